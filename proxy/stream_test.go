package proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kvgate/configs"
	"kvgate/routing"
)

// TestFlush: case 10. The head is there before the first event, and event n is
// read before event n+1 is written.
func TestFlush(t *testing.T) {
	f := func(name, head string, frame func(string) string, end string) {
		t.Run(name, func(t *testing.T) {
			step := make(chan bool)
			next := func() bool {
				select {
				case <-step:
					return true
				case <-t.Context().Done():
					return false
				}
			}
			s := newStub(t, func(c *stubConn) {
				if _, err := c.request(); err != nil || !c.say(head) {
					return
				}
				for i := range 10 {
					if !next() || !c.say(frame(event(fmt.Sprint(i)))) {
						return
					}
				}
				if next() {
					c.say(frame(doneEvent) + end)
				}
			})
			g := newGateway(t, nil, s)
			c := g.dial()
			c.say(post(chat, streamBody))
			resp, err := http.ReadResponse(c.Reader, nil)
			if err != nil {
				t.Fatalf("head: got %v, want it before any event", err)
			}
			defer func() { _ = resp.Body.Close() }()
			for i := range 10 {
				step <- true
				one := event(fmt.Sprint(i))
				got := make([]byte, len(one))
				if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != one {
					t.Fatalf("event %d: got %q and %v, want it before the next is written", i, got, err)
				}
			}
			step <- true
			rest, err := io.ReadAll(resp.Body)
			want(t, "rest", string(rest), doneEvent)
			want(t, "error", err, error(nil))
		})
	}
	f("chunked", sseHead, chunk, lastChunk)
	f("close-delimited", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n", func(s string) string { return s }, "")
	length := 0
	for i := range 10 {
		length += len(event(fmt.Sprint(i)))
	}
	f("length", fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n", length+len(doneEvent)), func(s string) string { return s }, "")
}

// TestUsageSplit: case 9. The tap counts right however the bytes are cut.
func TestUsageSplit(t *testing.T) {
	whole := roleEvent + ": ping\n\n" + event("héllo ✓ 世界") + usageEvent + doneEvent
	texts := map[string]string{"LF": whole, "CRLF": strings.ReplaceAll(whole, "\n", "\r\n")}
	for name, text := range texts {
		t.Run(name, func(t *testing.T) {
			var cut atomic.Int64
			s := newStub(t, func(c *stubConn) {
				for {
					if _, err := c.request(); err != nil {
						return
					}
					at := int(cut.Load())
					c.say(sseHead + chunk(text[:at]))
					runtime.Gosched()
					c.say(chunk(text[at:]) + lastChunk)
				}
			})
			g := newGateway(t, nil, s)
			c := g.dial()
			for at := 1; at < len(text); at += 3 {
				cut.Store(int64(at))
				a := c.ask(post(chat, streamBody))
				if a.err != nil || a.body != text {
					t.Fatalf("cut at %d: got %q and %v, want the replica's bytes", at, a.body, a.err)
				}
				l := g.line()
				got := fmt.Sprint(l["events"], l["in_tok"], l["cached_tok"], l["out_tok"], l["err"])
				if got != "4 100 64 7 <nil>" {
					t.Fatalf("cut at %d: got events and tokens %s, want 4 100 64 7 <nil>", at, got)
				}
			}
		})
	}
}

// TestLargeAnswers pass unchanged in every framing.
func TestLargeAnswers(t *testing.T) {
	body := make([]byte, 3<<20)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range body {
		body[i] = byte('a' + r.IntN(26))
	}
	f := func(name string, answer func(c *stubConn)) {
		t.Run(name, func(t *testing.T) {
			s := newStub(t, func(c *stubConn) {
				if _, err := c.request(); err == nil {
					answer(c)
				}
			})
			g := newGateway(t, nil, s)
			a := g.dial().ask(post(chat, chatBody))
			want(t, "error", a.err, error(nil))
			want(t, "same bytes", a.body == string(body), true)
			want(t, "bytes_out", g.line()["bytes_out"], int64(len(body)))
		})
	}
	f("length", func(c *stubConn) {
		c.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
		c.gone()
	})
	f("close", func(c *stubConn) { c.say("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + string(body)) })
	f("one chunk", func(c *stubConn) {
		c.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(string(body)) + lastChunk)
		c.gone()
	})
	f("many chunks", func(c *stubConn) {
		var b bytes.Buffer
		b.WriteString("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		for rest := body; len(rest) > 0; {
			n := min(1+r.IntN(5000), len(rest))
			b.WriteString(chunk(string(rest[:n])))
			rest = rest[n:]
		}
		c.say(b.String() + lastChunk)
		c.gone()
	})
}

// TestPlainUsage: the tokens of plain answers are counted whatever their size.
func TestPlainUsage(t *testing.T) {
	f := func(size int, fields, wantTokens string) {
		t.Helper()
		answer := `{"choices":[{"text":"` + strings.Repeat("x", size) + `"}],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}},"prompt_logprobs":null}`
		s := newStub(t, func(c *stubConn) {
			if _, err := c.request(); err == nil {
				c.say(fmt.Sprintf("HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n", fields, len(answer)))
				time.Sleep(time.Millisecond)
				c.say(answer)
				c.gone()
			}
		})
		g := newGateway(t, nil, s)
		g.dial().ask(post(chat, chatBody))
		l := g.line()
		want(t, fmt.Sprintf("tokens of %d bytes", size), fmt.Sprint(l["in_tok"], l["cached_tok"], l["out_tok"]), wantTokens)
	}
	f(1, "", "9 4 2")
	f(9<<10, "", "9 4 2")
	f(1<<20, "", "9 4 2")
	f(1, "Content-Encoding: gzip\r\n", "<nil> <nil> <nil>")
}

// TestDrain: case 34. Readiness is off at once, streams end, idle connections
// are closed, new requests are refused.
func TestDrain(t *testing.T) {
	release := make(chan bool)
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			if !strings.Contains(string(r.body), `"stream"`) {
				c.answer(200, plainAnswer)
				continue
			}
			c.say(sseHead + chunk(event("a")))
			select {
			case <-release:
			case <-t.Context().Done():
				return
			}
			c.say(chunk(doneEvent) + lastChunk)
		}
	})
	g := newGateway(t, nil, s)
	idle, fresh, late, streaming := g.dial(), g.dial(), g.dial(), g.dial()
	want(t, "warm", idle.ask(post(chat, chatBody)).StatusCode, 200)
	late.say("POST " + chat + " HTTP/1.1\r\n") // a request on its way
	streaming.say(post(chat, streamBody))
	resp, err := http.ReadResponse(streaming.Reader, nil)
	if err != nil {
		t.Fatalf("stream: got %v, want its head", err)
	}
	eventually(t, "the request on its way is seen", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		n := 0
		for c := range g.conns {
			if connState(c.state.Load()) == connReading {
				n++
			}
		}
		return n == 2 && len(g.conns) == 4
	})
	ended := make(chan error)
	go func() { ended <- g.Shutdown(context.Background()) }()
	idle.closed()
	fresh.closed()
	if _, err := net.Dial("tcp", g.addr); err == nil {
		t.Errorf("a new connection: got one, want none")
	}
	late.say(strings.TrimPrefix(post(chat, chatBody), "POST "+chat+" HTTP/1.1\r\n"))
	a := late.answer("POST")
	want(t, "late request", a.StatusCode, 503)
	want(t, "Connection: close", a.Close, true)
	want(t, "Retry-After", a.Header.Get("Retry-After"), "1")
	want(t, "code", strings.Contains(a.body, `"code":"draining"`), true)
	if err := g.ready(); err == nil {
		t.Errorf("ready: got nil, want draining")
	}
	select {
	case err := <-ended:
		t.Fatalf("Shutdown: got %v while a stream runs, want it to wait", err)
	default:
	}
	close(release)
	body, err := io.ReadAll(resp.Body)
	want(t, "stream", string(body), event("a")+doneEvent)
	want(t, "error", err, error(nil))
	want(t, "Shutdown", <-ended, error(nil))
	want(t, "again", g.Shutdown(context.Background()), error(nil))
}

// TestDrainDeadline: what still runs is cut, visibly.
func TestDrainDeadline(t *testing.T) {
	s := newStub(t, func(c *stubConn) {
		if r, err := c.request(); err == nil {
			if strings.Contains(string(r.body), `"stream"`) {
				c.say(sseHead + chunk(event("a")))
			}
			c.gone()
		}
	})
	g := newGateway(t, nil, s)
	stream, waiting, uploading := g.dial(), g.dial(), g.dial()
	stream.say(post(chat, streamBody))
	waiting.say(post(chat, chatBody))
	uploading.say("POST " + chat + " HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{")
	resp, err := http.ReadResponse(stream.Reader, nil)
	if err != nil {
		t.Fatalf("stream: got %v, want its head", err)
	}
	eventually(t, "all are in flight", func() bool { return g.InFlight() == 3 && s.requests.Load() == 2 })
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	want(t, "Shutdown", g.Shutdown(ctx), context.DeadlineExceeded)
	body, err := io.ReadAll(resp.Body)
	want(t, "stream", string(body), event("a"))
	if err == nil {
		t.Errorf("stream: got a clean end, want an error")
	}
	waiting.closed()
	eventually(t, "nothing is in flight", func() bool { return g.InFlight() == 0 }) // the books are behind the answer
	for _, l := range g.lines.TakeAll() {
		want(t, "err", l.ContextMap()["err"], "shutdown")
	}
	eventually(t, "the replica's connections are closed", func() bool { return s.open.Load() == 0 })
}

// Whoever has a connection when the listener closes has its next request served:
// one that was just accepted, one that was kept, one in the kernel's queue.
func TestDrainGrace(t *testing.T) {
	s := newStub(t, plain)
	var queue *lateListener
	g := newGatewayWith(t, func(s *configs.Settings) { s.Drain.Grace = patience }, nil, func(ln net.Listener) net.Listener {
		queue = &lateListener{TCPListener: ln.(*net.TCPListener), hold: make(chan bool), reached: make(chan bool)}
		return queue
	}, s)
	kept, fresh := g.dial(), g.dial()
	a := kept.ask(post(chat, chatBody))
	want(t, "before", a.StatusCode, 200)
	want(t, "before: Connection: close", a.Close, false)
	eventually(t, "both are accepted", func() bool { return g.value("kvgate_conns_open{}") == 2 })
	queue.late.Store(true)
	queued := g.dial()
	<-queue.reached
	g.Leave()
	a = kept.ask(post(chat, chatBody))
	want(t, "leaving", a.StatusCode, 200)
	want(t, "leaving: Connection: close", a.Close, true)
	kept.closed()
	if err := g.ready(); err == nil {
		t.Error("ready: got nil, want draining")
	}
	ended := make(chan error, 1)
	go func() { ended <- g.Shutdown(context.Background()) }()
	eventually(t, "the listener is about to close", g.isShut)
	close(queue.hold)
	for name, c := range map[string]*client{"fresh": fresh, "queued": queued} {
		a := c.ask(post(chat, chatBody))
		want(t, name, a.StatusCode, 200)
		want(t, name+": Connection: close", a.Close, true)
		c.closed()
	}
	want(t, "Shutdown", <-ended, error(nil)) // as soon as the last one is gone
	want(t, "served", s.requests.Load(), int64(4))
}

// lateListener holds a connection back, as a queue would, until hold is closed.
type lateListener struct {
	*net.TCPListener
	late          atomic.Bool
	hold, reached chan bool
}

func (l *lateListener) Accept() (net.Conn, error) {
	c, err := l.TCPListener.Accept()
	if err == nil && l.late.Load() {
		close(l.reached)
		<-l.hold
	}
	return c, err
}

// Those that say nothing are closed when the grace is over, and later ones refused.
func TestDrainGraceEnds(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, func(s *configs.Settings) { s.Drain.Grace = 20 * time.Millisecond }, s)
	idle, late := g.dial(), g.dial()
	late.say("POST " + chat + " HTTP/1.1\r\n")
	eventually(t, "a request is on its way", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		for c := range g.conns {
			if connState(c.state.Load()) == connReading {
				return len(g.conns) == 2
			}
		}
		return false
	})
	ended := make(chan error, 1)
	go func() { ended <- g.Shutdown(context.Background()) }()
	idle.closed()
	late.say(strings.TrimPrefix(post(chat, chatBody), "POST "+chat+" HTTP/1.1\r\n"))
	want(t, "late request", late.answer("POST").StatusCode, 503)
	want(t, "Shutdown", <-ended, error(nil))
}

func TestServeAfterShutdown(t *testing.T) {
	g := newGateway(t, nil)
	want(t, "Shutdown", g.Shutdown(context.Background()), error(nil))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	want(t, "Serve", g.Serve(ln), error(nil))
}

// openFiles returns the number of open descriptors, -1 where it cannot be told.
func openFiles() int {
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return -1
	}
	return len(dir)
}

// TestHygiene: case 18. Thousands of requests, three of ten given up at some
// point, a replica removed and added again: every gauge ends at exactly zero.
func TestHygiene(t *testing.T) {
	goroutines, files := runtime.NumGoroutine(), openFiles()
	t.Run("storm", func(t *testing.T) { storm(t, 10_000) })
	eventually(t, "goroutines are at their start", func() bool { return runtime.NumGoroutine() <= goroutines })
	eventually(t, "descriptors are at their start", func() bool { return openFiles() <= files })
}

func storm(t *testing.T, total int) {
	var stubs []*stub
	for range 4 {
		stubs = append(stubs, newStub(t, func(c *stubConn) {
			r := rand.New(rand.NewPCG(uint64(c.no), 7))
			for {
				req, err := c.request()
				if err != nil {
					return
				}
				time.Sleep(time.Duration(r.IntN(4)) * time.Millisecond)
				var ok bool
				switch {
				case r.IntN(50) == 0:
					c.reset()
					return
				case r.IntN(50) == 0:
					ok = c.answer(503, "busy")
				case strings.Contains(string(req.body), `"stream"`):
					ok = c.say(sseHead)
					for range 5 {
						ok = ok && c.say(chunk(event("a")))
						time.Sleep(time.Duration(r.IntN(2)) * time.Millisecond)
					}
					ok = ok && c.say(chunk(usageEvent+doneEvent)+lastChunk)
				default:
					ok = c.answer(200, plainAnswer)
				}
				if !ok {
					return
				}
			}
		}))
	}
	g := newGateway(t, nil, stubs...)
	stop := make(chan bool)
	var changes sync.WaitGroup
	changes.Add(1)
	go func() { // one replica comes and goes
		defer changes.Done()
		for i := 0; ; i++ {
			select {
			case <-stop:
				g.setStubs(stubs...)
				return
			case <-time.After(5 * time.Millisecond):
				g.setStubs(stubs[:len(stubs)-i%2]...)
			}
		}
	}()
	var left, good atomic.Int64
	var wg sync.WaitGroup
	const clients = 40
	for k := range clients {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r := rand.New(rand.NewPCG(uint64(k), 3))
			var c *client
			for range total / clients {
				if c == nil {
					nc, err := net.Dial("tcp", g.addr)
					if err != nil {
						t.Errorf("Dial: got %v, want no error", err)
						return
					}
					c = newClient(t, nc)
				}
				text := post(chat, chatBody)
				if r.IntN(2) == 0 {
					text = post(chat, streamBody)
				}
				if r.IntN(10) >= 3 {
					if _, err := io.WriteString(c.Conn, text); err != nil {
						t.Errorf("write: got %v, want no error", err)
						return
					}
					resp, err := http.ReadResponse(c.Reader, nil)
					if err == nil {
						_, err = io.Copy(io.Discard, resp.Body)
						_ = resp.Body.Close()
					}
					if err != nil || resp.Close {
						_ = c.Close()
						c = nil
					}
					good.Add(1)
					continue
				}
				// Leave in the middle of the request, of the wait or of the answer.
				left.Add(1)
				switch r.IntN(3) {
				case 0:
					_, _ = io.WriteString(c.Conn, text[:1+r.IntN(len(text)-1)])
				case 1:
					_, _ = io.WriteString(c.Conn, text)
					time.Sleep(time.Duration(r.IntN(4)) * time.Millisecond)
				case 2:
					_, _ = io.WriteString(c.Conn, text)
					_, _ = c.Peek(1 + r.IntN(200))
				}
				if r.IntN(2) == 0 {
					_ = c.Conn.(*net.TCPConn).SetLinger(0)
				}
				_ = c.Close()
				c = nil
			}
			if c != nil {
				_ = c.Close()
			}
		}()
	}
	wg.Wait()
	close(stop)
	changes.Wait()
	if left.Load() == 0 || good.Load() == 0 {
		t.Errorf("requests given up and served: got %d and %d, want some of each", left.Load(), good.Load())
	}
	g.settled()
	all := append(g.fleet.Endpoints(), g.fleet.Leaving()...)
	for _, e := range all {
		want(t, e.ID()+" in flight", e.InFlight(), 0)
		want(t, e.ID()+" awaiting", e.Awaiting(), 0)
		want(t, e.ID()+" pending tokens", e.PendingTokens(), int64(0))
	}
	for _, name := range RouteTemplates() {
		want(t, name, g.value(fmt.Sprintf("kvgate_http_requests_in_flight{route=%q}", name)), 0.0)
	}
	eventually(t, "no client connection is open", func() bool { return g.value("kvgate_conns_open{}") == 0 })
}

// TestPanic: a panic ends its own request and nothing else.
func TestPanic(t *testing.T) {
	s := newStub(t, plain)
	boom := true
	g := newGatewayWith(t, nil, func(o *Options) {
		o.Ready = func() error {
			if boom {
				panic("boom")
			}
			return nil
		}
	}, nil, s)
	c := g.dial()
	a := c.ask(get("/readyz"))
	want(t, "status", a.StatusCode, 500)
	want(t, "code", strings.Contains(a.body, `"code":"internal_error"`), true)
	want(t, "err", g.line()["err"], "panic")
	want(t, "logged", len(g.errors.TakeAll()), 1)
	boom = false
	want(t, "again", g.dial().ask(get("/readyz")).StatusCode, 200)
	eventually(t, "nothing is in flight", func() bool { return g.InFlight() == 0 }) // the books are behind the answer
}

// panicky panics when it is to write a certain word.
type panicky struct{ net.Conn }

func (c panicky) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("boom")) {
		panic("boom")
	}
	return c.Conn.Write(p)
}

type panickyListener struct{ net.Listener }

func (l panickyListener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	return panicky{nc}, err
}

// TestPanicWithinAnAnswer: it ends broken, not whole and not waited for.
func TestPanicWithinAnAnswer(t *testing.T) {
	s := newStub(t, func(c *stubConn) {
		if _, err := c.request(); err == nil {
			c.say(sseHead + chunk(event("a")))
			c.say(chunk(event("boom")) + chunk(doneEvent) + lastChunk)
			c.gone()
		}
	})
	g := newGatewayWith(t, nil, nil, func(ln net.Listener) net.Listener { return panickyListener{ln} }, s)
	c := g.dial()
	c.say(post(chat, streamBody))
	raw, err := io.ReadAll(c)
	want(t, "the connection ends", err, error(nil))
	want(t, "the answer's end", strings.Contains(string(raw), lastChunk), false)
	want(t, "another answer behind it", strings.Contains(string(raw), "internal_error"), false)
	l := g.line()
	want(t, "err", l["err"], "panic")
	want(t, "status, as the client has it", l["status"], any(int64(200)))
	want(t, "logged", len(g.errors.TakeAll()), 1)
	eventually(t, "the replica's connection is closed", func() bool { return s.open.Load() == 0 })
}

// TestReload: the router in force is taken per request.
func TestReload(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, nil, s)
	c := g.dial()
	want(t, "before", c.ask(post(chat, chatBody)).StatusCode, 200)
	cfg, err := configs.ParseScheduling("test", []byte("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: random-picker\nschedulingProfiles:\n- name: default\n  plugins:\n  - pluginRef: random-picker\nrequestHandler:\n  parsers:\n  - pluginRef: anthropic-parser\n"))
	if err != nil {
		t.Fatalf("ParseScheduling: got %v, want no error", err)
	}
	router, err := routing.New(cfg, g.fleet, 2)
	if err != nil {
		t.Fatalf("New: got %v, want no error", err)
	}
	g.o.Router.Store(router)
	want(t, "no parser for chat", c.ask(post(chat, chatBody)).StatusCode, 404)
	want(t, "messages", c.ask(post("/v1/messages", `{"model":"m","messages":[]}`)).StatusCode, 200)
}

// TestAnswerIsAsTheReplicaSaidIt: to the byte, but for the fields of the connection
// and the request's id; one answer behind the other, whatever their kinds.
func TestAnswerIsAsTheReplicaSaidIt(t *testing.T) {
	const id = "x-request-id: 7\r\n"
	f := func(name, answer, as string) {
		t.Run(name, func(t *testing.T) {
			s := newStub(t, func(c *stubConn) {
				for {
					if _, err := c.request(); err != nil || !c.say(answer) {
						return
					}
				}
			})
			g := newGateway(t, nil, s)
			c := g.dial()
			for range 3 {
				c.say(post(chat, chatBody, "X-Request-Id: 7"))
				got := make([]byte, len(as))
				_, err := io.ReadFull(c, got)
				want(t, "error", err, error(nil))
				want(t, "answer", string(got), as)
			}
			c.say("nonsense\r\n\r\n")
			want(t, "status of what cannot be read", c.answer("POST").StatusCode, 400)
			c.closed()
		})
	}
	const fields = "date: Mon, 30 Nov 2026 10:00:00 GMT\r\nserver: uvicorn\r\nX-Odd_name:  two  words\r\nset-cookie: a=1; path=/\r\nset-cookie: a=2\r\n"
	const kept = "date: Mon, 30 Nov 2026 10:00:00 GMT\r\nserver: uvicorn\r\nX-Odd_name: two  words\r\nset-cookie: a=1; path=/\r\nset-cookie: a=2\r\n"
	f("plain", "HTTP/1.1 200 OK\r\n"+fields+"Content-Length: 5\r\n\r\nhello", "HTTP/1.1 200 OK\r\n"+kept+id+"Content-Length: 5\r\n\r\nhello")
	f("empty", "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 404 Not Found\r\n"+id+"Content-Length: 0\r\n\r\n")
	f("no content", "HTTP/1.1 204 No Content\r\nX: y\r\n\r\n", "HTTP/1.1 204 No Content\r\nX: y\r\n"+id+"\r\n")
	long := strings.Repeat("long ", 10_000)
	f("long", fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(long), long), fmt.Sprintf("HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s", id, len(long), long))
	f("chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk("ab")+lastChunk, "HTTP/1.1 200 OK\r\n"+id+"Transfer-Encoding: chunked\r\n\r\n"+chunk("ab")+lastChunk)
	f("events", sseHead+chunk(doneEvent)+lastChunk, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"+id+
		"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk(doneEvent)+lastChunk)
}

// TestAnswerDoesNotWaitForTheBooks: a log that takes no line holds no answer up.
func TestAnswerDoesNotWaitForTheBooks(t *testing.T) {
	f := func(name string, serve func(*stubConn), body string) {
		t.Run(name, func(t *testing.T) {
			release := make(chan struct{})
			core, _ := observer.New(zapcore.InfoLevel)
			slow := zap.New(core, zap.Hooks(func(zapcore.Entry) error { <-release; return nil }))
			g := newGatewayWith(t, nil, func(o *Options) { o.Access = slow }, nil, newStub(t, serve))
			defer close(release)
			a := g.dial().ask(post(chat, body))
			want(t, "error", a.err, error(nil))
			want(t, "status", a.StatusCode, 200)
			want(t, "in flight", g.InFlight(), 1)
		})
	}
	f("plain", plain, chatBody)
	f("stream", func(c *stubConn) {
		if _, err := c.request(); err == nil {
			c.say(sseHead + chunk(doneEvent) + lastChunk)
			c.gone()
		}
	}, streamBody)
}
