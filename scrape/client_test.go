package scrape

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// probeFor returns a client and a target for a stub.
func probeFor(s *stub) (*client, *target) {
	host, port, _ := net.SplitHostPort(s.address)
	t := newTarget("http", host, port, "/metrics", "text/plain", "1.2.3", "", nil)
	return &client{dial: (&net.Dialer{}).DialContext, pages: &pages{}, serves: t}, t
}

// fetch gets the page once; got is the body or how it failed.
func fetch(c *client, t *target, timeout time.Duration) (got string, r result) {
	p, err := c.get(context.Background(), t, timeout, time.Now().Add(timeout))
	var e *probeError
	switch {
	case err == nil:
		got = string(p.body)
		c.pages.put(p)
		return got, resultOK
	case errors.As(err, &e):
		return e.Error(), e.result
	}
	return err.Error(), resultCount
}

func TestClientReads(t *testing.T) {
	f := func(t *testing.T, a answer, want string, keep bool) {
		t.Helper()
		s := newStub(t)
		s.on("/metrics", a)
		c, target := probeFor(s)
		for range 2 {
			if got, r := fetch(c, target, 10*time.Second); got != want || r != resultOK {
				t.Errorf("got %.100q, %s, want %.100q, ok", got, resultNames[r], want)
			}
		}
		conns := 2
		if keep {
			conns = 1
		}
		if got := s.accepts(); got != conns {
			t.Errorf("got %d connections for two requests, want %d", got, conns)
		}
		c.abort()
	}
	big := strings.Repeat("0123456789abcdef", 1<<14)
	t.Run("content-length", func(t *testing.T) {
		f(t, body("hello\n"), "hello\n", true)
		f(t, body(""), "", true)
		f(t, body(big), big, true)
		f(t, kept("HTTP/1.1 200\r\nContent-Length:5\r\n\r\nhello"), "hello", true)
		f(t, kept("HTTP/1.1 200 OK\nContent-Length: 5\n\nhello"), "hello", true)
		f(t, kept("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"+text200("hello")), "hello", true)
	})
	t.Run("connection", func(t *testing.T) {
		f(t, kept("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"), "hello", false)
		f(t, kept("HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"), "hello", false)
		f(t, kept("HTTP/1.0 200 OK\r\nconnection: Keep-Alive\r\nContent-Length: 5\r\n\r\nhello"), "hello", true)
		f(t, raw("HTTP/1.1 200 OK\r\n\r\nhello"), "hello", false)
		f(t, raw("HTTP/1.1 200 OK\r\n\r\n"+big), big, false)
		f(t, kept(text200("hello")+"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad"), "hello", false) // nobody asked for a second answer
	})
	t.Run("chunked", func(t *testing.T) {
		head := "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
		f(t, kept(head+"5\r\nhello\r\n0\r\n\r\n"), "hello", true)
		f(t, kept(head+"2;x=y\r\nhe\r\n03 \r\nllo\r\n0\r\nTrailer: x\r\n\r\n"), "hello", true)
		f(t, kept(head+fmt.Sprintf("%x\r\n%s\r\n5\r\nhello\r\n0\r\n\r\n", len(big), big)), big+"hello", true)
		f(t, func(c net.Conn) bool { // every byte on its own
			for _, b := range []byte(head + "A\r\n0123456789\r\n0\r\n\r\n") {
				if _, err := c.Write([]byte{b}); err != nil {
					return false
				}
			}
			return true
		}, "0123456789", true)
	})
}

func TestClientRefuses(t *testing.T) {
	f := func(t *testing.T, text string, want result, message string) {
		t.Helper()
		s := newStub(t)
		s.on("/metrics", raw(text))
		c, target := probeFor(s)
		if got, r := fetch(c, target, 10*time.Second); r != want || !strings.Contains(got, message) {
			t.Errorf("%.60q: got %q, %s, want an error with %q, %s", text, got, resultNames[r], message, resultNames[want])
		}
		c.abort()
	}
	f(t, "", resultBroken, "unexpected EOF")
	f(t, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", resultBroken, "unexpected EOF")
	f(t, "HTTP/1.1 200 OK\r\nContent-Le", resultBroken, "unexpected EOF")
	f(t, "<html>\r\n", resultBroken, "no HTTP/1.1 status line")
	f(t, "HTTP/2 200\r\n\r\n", resultBroken, "no HTTP/1.1 status line")
	f(t, "HTTP/1.1 200OK\r\n\r\n", resultBroken, "no HTTP/1.1 status line")
	f(t, "HTTP/1.1 abc\r\n\r\n", resultBroken, "status")
	f(t, "HTTP/1.1 101 Switching\r\n\r\n", resultBroken, "status")
	f(t, "HTTP/1.1 200 OK\r\nnocolon\r\n\r\n", resultBroken, "header line")
	for _, h := range []string{
		"Content-Length: x", "Content-Length: -1", "Content-Length: +1", "Content-Length:", "Content-Length: 1\r\nContent-Length: 2",
		"Content-Length: 99999999999999999999", "Transfer-Encoding: chunked\r\nContent-Length: 1",
	} {
		f(t, "HTTP/1.1 200 OK\r\n"+h+"\r\n\r\n1", resultBroken, "content-length")
	}
	for _, h := range []string{"Transfer-Encoding: gzip", "Transfer-Encoding: gzip, chunked", "Content-Length: 1\r\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"} {
		f(t, "HTTP/1.1 200 OK\r\n"+h+"\r\n\r\n1", resultBroken, "transfer-encoding")
	}
	f(t, "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\n1", resultBroken, "content-encoding")
	f(t, "HTTP/1.1 200 OK\r\nX: "+strings.Repeat("x", 2*maxHead)+"\r\n\r\n", resultBroken, "a line of more than")
	f(t, "HTTP/1.1 200 OK\r\n"+strings.Repeat("X: y\r\n", maxHead)+"\r\n", resultBroken, "a head of more than")
	chunked := "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
	f(t, chunked+"xyz\r\n", resultBroken, "chunk size")
	f(t, chunked+"-1\r\n", resultBroken, "chunk size")
	f(t, chunked+"0x5\r\nhello", resultBroken, "chunk size")
	f(t, chunked+"\r\n", resultBroken, "chunk size")
	f(t, chunked+"ffffffffff\r\n", resultBroken, "chunk size")
	f(t, chunked+"2\r\nhello\r\n0\r\n\r\n", resultBroken, "longer than its size")
	f(t, chunked+"5\r\nhel", resultBroken, "unexpected EOF")
	f(t, chunked+"5\r\nhello\r\n", resultBroken, "unexpected EOF")
	f(t, chunked+"5\r\nhello", resultBroken, "unexpected EOF")
	f(t, chunked+"5\r\nhello\r\n0\r\nTrailer: x\r\n", resultBroken, "unexpected EOF")
	f(t, "HTTP/1.1 100 Continue\r\n\r\n", resultBroken, "unexpected EOF")
	f(t, chunked+"0\r\n"+strings.Repeat("X: y\r\n", maxHead), resultBroken, "trailers of more than")

	f(t, fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", maxPage+1), resultTooLarge, "larger than 8388608 bytes")
	f(t, chunked+fmt.Sprintf("%x\r\n", maxPage+1), resultTooLarge, "larger than")
	f(t, "HTTP/1.1 200 OK\r\n\r\n"+strings.Repeat("x", maxPage+1), resultTooLarge, "larger than")

	f(t, "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}", resultNoMetrics, "status 404")
	f(t, "HTTP/1.1 405 No\r\n\r\n", resultNoMetrics, "status 405")
	f(t, "HTTP/1.1 501 No\r\nContent-Length: 0\r\n\r\n", resultNoMetrics, "status 501")
	f(t, "HTTP/1.1 401 Who\r\nContent-Length: 0\r\n\r\n", resultStatus, "status 401")
	f(t, "HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\ncut", resultStatus, "status 503")
	f(t, "HTTP/1.1 204 None\r\n\r\n", resultStatus, "status 204")
	f(t, "HTTP/1.1 302 There\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", resultStatus, "status 302")
}

func TestClientTimesOut(t *testing.T) {
	f := func(t *testing.T, a answer) {
		t.Helper()
		s := newStub(t)
		s.on("/metrics", a)
		c, target := probeFor(s)
		if got, r := fetch(c, target, 50*time.Millisecond); r != resultTimeout {
			t.Errorf("got %q, %s, want timeout", got, resultNames[r])
		}
		s.on("/metrics", body("well"))
		if got, r := fetch(c, target, 10*time.Second); got != "well" {
			t.Errorf("the next request: got %q, %s, want a body on a new connection", got, resultNames[r])
		}
		c.abort()
	}
	partly := func(text string) answer {
		return func(c net.Conn) bool {
			_, _ = c.Write([]byte(text))
			return hang(c)
		}
	}
	f(t, hang)
	f(t, partly("HTTP/1.1 200 OK\r\n"))
	f(t, partly("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhell"))
	f(t, partly("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"))
	f(t, partly("HTTP/1.1 200 OK\r\n\r\nhell"))
	f(t, func(c net.Conn) bool { // slow, but never silent: the limit is on the whole answer
		for _, err := c.Write([]byte("HTTP/1.1 200 OK\r\n\r\n")); err == nil; _, err = c.Write([]byte("x")) {
			time.Sleep(time.Millisecond)
		}
		return false
	})
}

func TestClientConnectFails(t *testing.T) {
	s := newStub(t)
	c, target := probeFor(s)
	s.close()
	if got, r := fetch(c, target, 10*time.Second); r != resultConnect {
		t.Errorf("a closed port: got %q, %s, want connect", got, resultNames[r])
	}
	c.dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if got, r := fetch(c, target, time.Millisecond); r != resultConnect {
		t.Errorf("a silent host: got %q, %s, want connect", got, resultNames[r])
	}
}

// A server may close a kept connection at any moment; the request is sent again on a new one.
func TestClientStaleConnection(t *testing.T) {
	s := newStub(t)
	var served atomic.Int32
	s.on("/metrics", func(c net.Conn) bool {
		_, _ = c.Write([]byte(text200("hello")))
		served.Add(1)
		return false // although it did not say so
	})
	c, target := probeFor(s)
	for i := range 20 {
		if got, r := fetch(c, target, 10*time.Second); got != "hello" {
			t.Fatalf("request %d: got %q, %s, want hello", i, got, resultNames[r])
		}
	}
	if got := served.Load(); got != 20 {
		t.Errorf("got %d answers, want 20: none twice", got)
	}
	s.close()
	if got, r := fetch(c, target, 10*time.Second); r != resultConnect {
		t.Errorf("stale, and the server is gone: got %q, %s, want connect", got, resultNames[r])
	}
}

func TestClientAbort(t *testing.T) {
	s := newStub(t)
	asked := make(chan bool)
	s.on("/metrics", func(c net.Conn) bool { asked <- true; return hang(c) })
	c, target := probeFor(s)
	done := make(chan result)
	go func() {
		_, r := fetch(c, target, time.Hour)
		done <- r
	}()
	<-asked
	c.abort()
	if r := <-done; r != resultBroken {
		t.Errorf("got %s, want broken", resultNames[r])
	}
	if _, r := fetch(c, target, time.Hour); r != resultConnect {
		t.Errorf("after the abort: got %s, want connect", resultNames[r])
	}
}

func TestClientRequest(t *testing.T) {
	f := func(t *testing.T, got *target, address, want string) {
		t.Helper()
		if got.address != address || string(got.request) != want {
			t.Errorf("got %s %q, want %s %q", got.address, got.request, address, want)
		}
	}
	f(t, newTarget("http", "10.0.0.1", "8000", "/metrics", "text/plain", "1.0", "", nil), "10.0.0.1:8000",
		"GET /metrics HTTP/1.1\r\nHost: 10.0.0.1:8000\r\nUser-Agent: kvgate/1.0\r\nAccept: text/plain\r\n\r\n")
	f(t, newTarget("http", "::1", "80", "/health", "*/*", "1.0", "Bearer key", nil), "[::1]:80",
		"GET /health HTTP/1.1\r\nHost: [::1]\r\nUser-Agent: kvgate/1.0\r\nAccept: */*\r\nAuthorization: Bearer key\r\n\r\n")
	f(t, newTarget("https", "h", "443", "/", "*/*", "1.0", "", newTLS(nil)), "h:443",
		"GET / HTTP/1.1\r\nHost: h\r\nUser-Agent: kvgate/1.0\r\nAccept: */*\r\n\r\n")
}

func TestClientAllocatesNothing(t *testing.T) {
	page := bytes.Repeat([]byte("x 1\n"), 10_000)
	answer := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(page), page)
	conn := &replay{answer: answer}
	c := &client{dial: func(context.Context, string, string) (net.Conn, error) { return conn, nil }, pages: &pages{}}
	target := newTarget("http", "h", "80", "/metrics", "*/*", "1", "", nil)
	ctx, until := context.Background(), time.Now().Add(time.Hour)
	got := testing.AllocsPerRun(100, func() {
		p, err := c.get(ctx, target, time.Hour, until)
		if err != nil || len(p.body) != len(page) {
			t.Fatalf("got %v", err)
		}
		c.pages.put(p)
	})
	if got >= 1 { // a collection may empty the pool of pages
		t.Errorf("got %v allocations per page, want 0", got)
	}
}

// replay is a connection that gives the same answer to every request.
type replay struct {
	net.Conn
	answer, rest []byte
}

func (r *replay) SetDeadline(time.Time) error { return nil }

func (r *replay) Write(b []byte) (int, error) {
	r.rest = r.answer
	return len(b), nil
}

func (r *replay) Read(b []byte) (int, error) {
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}
