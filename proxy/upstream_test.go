package proxy

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvgate/configs"
	"kvgate/routing"
)

func (c *stubConn) reset() {
	_ = c.Conn.(*net.TCPConn).SetLinger(0)
	_ = c.Close()
}

// TestUpstreamDies: case 4. Whatever way an answer breaks off, the client sees a
// broken transport and at most an error event, never a clean end.
func TestUpstreamDies(t *testing.T) {
	const two = roleEvent
	f := func(name, path, body, reason string, wantBody string, serve func(c *stubConn)) {
		t.Run(name, func(t *testing.T) {
			s := newStub(t, func(c *stubConn) {
				if _, err := c.request(); err == nil {
					serve(c)
				}
			})
			g := newGateway(t, func(s *configs.Settings) { s.Upstream.StreamTimeout = 100 * time.Millisecond }, s)
			c := g.dial()
			a := c.ask(post(path, body))
			want(t, "status", a.StatusCode, 200)
			if a.err == nil {
				t.Errorf("body: got a clean end, want an error")
			}
			got, _, _ := strings.Cut(a.body, "data: {\"error\"")
			got, _, _ = strings.Cut(got, "event: error\n")
			want(t, "body", got, wantBody)
			if strings.Contains(a.body, "127.0.0.1") || strings.Contains(a.body, "[DONE]") {
				t.Errorf("body: got %q, want no address and no [DONE]", a.body)
			}
			c.closed()
			l := g.line()
			want(t, "err", l["err"], reason)
			want(t, "phase", l["phase"], "stream")
			want(t, "errors", g.value(fmt.Sprintf(`kvgate_upstream_errors_total{reason=%q,replica="r0"}`, reason)), 1.0)
			want(t, "reroutes", g.value(`kvgate_retries_total{kind="reroute"}`), 0.0)
			want(t, "requests", s.requests.Load(), int64(1))
			want(t, "replica's connections kept", s.open.Load() <= 1, true)
			eventually(t, "the replica's connection is closed", func() bool { return s.open.Load() == 0 })
		})
	}
	head := sseHead + chunk(two) + chunk(event("a"))
	f("reset", chat, streamBody, "reset", two+event("a"), func(c *stubConn) {
		c.say(head)
		time.Sleep(20 * time.Millisecond) // let the gateway read before the reset takes it away
		c.reset()
	})
	f("no last chunk", chat, streamBody, "truncated", two+event("a"), func(c *stubConn) { c.say(head) })
	f("within a chunk", chat, streamBody, "truncated", two+event("a")+"data: {", func(c *stubConn) { c.say(head + "100\r\ndata: {") })
	f("within a chunk size", chat, streamBody, "truncated", two+event("a"), func(c *stubConn) { c.say(head + "1") })
	f("within the trailer", chat, streamBody, "truncated", two+event("a"), func(c *stubConn) { c.say(head + "0\r\nX: y\r\n") })
	f("clean end without [DONE]", chat, streamBody, "truncated", two+event("a"), func(c *stubConn) {
		c.say(head + lastChunk)
		c.gone()
	})
	f("short length", chat, streamBody, "truncated", two, func(c *stubConn) {
		c.say("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\n" + two)
	})
	f("short large length", chat, chatBody, "truncated", strings.Repeat("x", 50000), func(c *stubConn) {
		c.say("HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + strings.Repeat("x", 50000))
	})
	f("close-delimited without [DONE]", chat, streamBody, "truncated", two+event("a"), func(c *stubConn) {
		c.say("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + two + event("a"))
	})
	f("responses without its end", "/v1/responses", `{"model":"m","input":"x","stream":true}`, "truncated", "event: response.output_text.delta\ndata: {}\n\n", func(c *stubConn) {
		c.say(sseHead + chunk("event: response.output_text.delta\ndata: {}\n\n") + lastChunk)
	})
	f("messages without its end", "/v1/messages", `{"model":"m","messages":[],"stream":true}`, "truncated", "event: content_block_delta\ndata: {}\n\n", func(c *stubConn) {
		c.say(sseHead + chunk("event: content_block_delta\ndata: {}\n\n") + lastChunk)
	})
	f("silence", chat, streamBody, "timeout", two+event("a"), func(c *stubConn) {
		c.say(head)
		c.gone()
	})
	f("bad chunk", chat, streamBody, "malformed", two+event("a"), func(c *stubConn) { c.say(head + "zz\r\n") })
}

// TestShortPlainAnswer: nothing of a small plain answer is sent before all of it
// is there, so its loss can still be said.
func TestShortPlainAnswer(t *testing.T) {
	f := func(name string, serve func(c *stubConn), status int, code, reason string) {
		t.Run(name, func(t *testing.T) {
			s := newStub(t, func(c *stubConn) {
				if _, err := c.request(); err == nil {
					c.say("HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nX-Gone: x\r\nContent-Type: text/plain\r\nContent-Length: 1000\r\n\r\n" + strings.Repeat("x", 100))
					serve(c)
				}
			})
			g := newGateway(t, func(s *configs.Settings) { s.Upstream.StreamTimeout = 50 * time.Millisecond }, s)
			a := g.dial().ask(post(chat, chatBody))
			want(t, "status", a.StatusCode, status)
			want(t, "code", strings.Contains(a.body, code), true)
			want(t, "Content-Type", a.Header.Get("Content-Type"), "application/json")
			want(t, "fields of the lost answer", len(a.Header["X-Gone"])+len(a.Header["Set-Cookie"]), 0)
			l := g.line()
			want(t, "err", l["err"], reason)
			want(t, "errors", g.value(fmt.Sprintf(`kvgate_upstream_errors_total{reason=%q,replica="r0"}`, reason)), 1.0)
		})
	}
	f("ends", func(*stubConn) {}, 502, "upstream_reset", "truncated")
	f("stalls", func(c *stubConn) { c.gone() }, 504, "upstream_timeout", "timeout")
}

// TestStreamEnds: the ends that are clean, each in its API's words.
func TestStreamEnds(t *testing.T) {
	f := func(name, path, body, stream, reason string) {
		t.Run(name, func(t *testing.T) {
			s := newStub(t, func(c *stubConn) {
				if _, err := c.request(); err == nil {
					c.say(sseHead + chunk(stream) + lastChunk)
					c.gone()
				}
			})
			g := newGateway(t, nil, s)
			a := g.dial().ask(post(path, body))
			want(t, "error", a.err, error(nil))
			want(t, "body", a.body, stream)
			l := g.line()
			want(t, "phase", l["phase"], "done")
			if reason == "" {
				want(t, "err", l["err"], nil)
			} else {
				want(t, "err", l["err"], reason)
			}
		})
	}
	responses, messages := `{"model":"m","input":"x","stream":true}`, `{"model":"m","messages":[],"stream":true}`
	f("done", chat, streamBody, event("a")+doneEvent, "")
	f("done without a blank line", chat, streamBody, event("a")+"data: [DONE]\n", "")
	f("done without a line end", chat, streamBody, event("a")+"data:[DONE]", "")
	f("completed", "/v1/responses", responses, "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{}}\n\n", "")
	f("incomplete", "/v1/responses", responses, "event: response.incomplete\ndata: {}\n\n", "")
	f("failed", "/v1/responses", responses, "event: response.failed\ndata: {}\n\n", "")
	f("completed by type", "/v1/responses", responses, "data: {\"response\":{\"output\":[{\"type\":\"message\"}]},\"type\":\"response.completed\"}\n\n", "")
	f("message_stop", "/v1/messages", messages, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n", "")
	f("cohere", "/cohere/v2/chat", messages, "data: {\"type\":\"content-delta\"}\n\ndata: {\"type\":\"message-end\"}\n\n", "")
	// The engine's own error is passed on as it is, and counted as its failure.
	f("engine error", chat, streamBody, event("a")+"data: {\"error\":{\"message\":\"died\",\"code\":500}}\n\n"+doneEvent, "error_event")
	f("client's error", chat, streamBody, event("a")+"data: {\"error\":{\"message\":\"too long\",\"code\":400}}\n\n"+doneEvent, "")
	f("messages error", "/v1/messages", messages, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n", "error_event")
}

// A stream that breaks off behind its last event ends broken, and no event follows.
func TestNothingFollowsTheLastEvent(t *testing.T) {
	f := func(path, body, stream string) {
		t.Helper()
		s := newStub(t, func(c *stubConn) {
			if _, err := c.request(); err == nil {
				c.say(sseHead + chunk(stream))
			}
		})
		g := newGateway(t, nil, s)
		a := g.dial().ask(post(path, body))
		if a.err == nil {
			t.Errorf("%q: got a clean end, want an error", stream)
		}
		want(t, "body", a.body, stream)
		want(t, "err", g.line()["err"], "truncated")
	}
	f(chat, streamBody, event("a")+doneEvent)
	f(chat, streamBody, event("a")+"data: {\"error\":{\"message\":\"died\",\"code\":500}}\n\n")
	f("/v1/messages", `{"model":"m","messages":[],"stream":true}`, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n")
}

// TestIdleReuse: case 6 with short intervals. Replicas close each connection as
// long after an answer as the client waits; every request is answered, once.
func TestIdleReuse(t *testing.T) {
	const idle = 15 * time.Millisecond
	f := func(name string, limit time.Duration, clients, rounds int) {
		t.Run(name, func(t *testing.T) {
			var executed atomic.Int64
			s := newStub(t, func(c *stubConn) {
				for answered := false; ; answered = true {
					if answered {
						_ = c.SetReadDeadline(time.Now().Add(idle))
					}
					if _, err := c.Peek(1); err != nil {
						return // closes
					}
					_ = c.SetReadDeadline(time.Time{})
					if _, err := c.request(); err != nil {
						return
					}
					executed.Add(1)
					if !c.answer(200, plainAnswer) {
						return
					}
				}
			})
			g := newGateway(t, func(s *configs.Settings) { s.Upstream.IdleTimeout = limit }, s)
			var failed atomic.Int64
			var wg sync.WaitGroup
			for k := range clients {
				wg.Add(1)
				go func() {
					defer wg.Done()
					c := g.dial()
					for i := range rounds {
						_ = c.SetDeadline(time.Now().Add(patience))
						if a := c.ask(post(chat, chatBody)); a.StatusCode != 200 || a.body != plainAnswer {
							failed.Add(1)
							t.Errorf("answer: got %d %q, want 200", a.StatusCode, a.body)
						}
						time.Sleep(idle - 3*time.Millisecond + time.Duration((i+k)%7)*time.Millisecond)
					}
				}()
			}
			wg.Wait()
			want(t, "failed", failed.Load(), int64(0))
			want(t, "executed", executed.Load(), int64(clients*rounds))
			t.Logf("connections %d, resends %v", s.accepted.Load(), g.value(`kvgate_retries_total{kind="resend"}`))
		})
	}
	f("limit below the replica's", 5*time.Millisecond, 16, 40)
	f("limit above the replica's", time.Second, 16, 40)
	f("200 connections at once", 10*time.Second, 200, 12)
}

// TestResend: a pooled connection that dies as the request is sent is replaced
// once, on the same replica; a fresh one that dies is not.
func TestResend(t *testing.T) {
	f := func(name string, kill func(n int64, request int) bool, status int, resends float64) {
		t.Run(name, func(t *testing.T) {
			s := newStub(t, func(c *stubConn) {
				for i := 0; ; i++ {
					if _, err := c.request(); err != nil {
						return
					}
					if kill(c.no, i) {
						c.reset()
						return
					}
					c.answer(200, plainAnswer)
				}
			})
			g := newGateway(t, nil, s, newStubDown(t))
			g.fleet.Drain("r1", true)
			c := g.dial()
			want(t, "first", c.ask(post(chat, chatBody)).StatusCode, 200)
			want(t, "second", c.ask(post(chat, chatBody)).StatusCode, status)
			want(t, "resends", g.value(`kvgate_retries_total{kind="resend"}`), resends)
			want(t, "reroutes", g.value(`kvgate_retries_total{kind="reroute"}`), 0.0)
		})
	}
	f("stale", func(n int64, request int) bool { return n == 1 && request == 1 }, 200, 1)
	f("stale, then broken", func(n int64, request int) bool { return n == 1 && request == 1 || n == 2 }, 502, 1)
}

// newStubDown returns a stub that refuses connections.
func newStubDown(t testing.TB) *stub {
	s := newStub(t, func(*stubConn) {})
	_ = s.ln.Close()
	return s
}

// TestPoisoned: case 7.
func TestPoisoned(t *testing.T) {
	f := func(name string, together bool) {
		t.Run(name, func(t *testing.T) {
			now, sent := make(chan bool, 1), make(chan bool, 1)
			s := newStub(t, func(c *stubConn) {
				for {
					r, err := c.request()
					if err != nil {
						return
					}
					own := fmt.Sprintf(`{"conn":%d,"body":%q}`, c.no, r.body)
					unasked := "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nforeign"
					text := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(own), own)
					switch {
					case c.no > 1:
						c.say(text)
					case together:
						c.say(text + unasked)
					default:
						c.say(text)
						select {
						case <-now:
						case <-t.Context().Done():
						}
						c.say(unasked)
						sent <- true
					}
				}
			})
			g := newGateway(t, nil, s)
			first := g.dial().ask(post(chat, chatBody))
			want(t, "first", strings.HasPrefix(first.body, `{"conn":1`), true)
			g.settled()
			if !together {
				now <- true
				<-sent
			}
			second := g.dial().ask(post(chat, streamBody))
			want(t, "second", strings.HasPrefix(second.body, `{"conn":2`), true)
			want(t, "poisoned", g.value(`kvgate_upstream_errors_total{reason="poisoned",replica="r0"}`), 1.0)
		})
	}
	f("later", false)
	f("at once", true)
}

// TestEarlyAnswer: case 8. A replica that refuses an upload and hangs up, or
// refuses it and just stops reading, is heard.
func TestEarlyAnswer(t *testing.T) {
	f := func(name string, wait bool) {
		t.Run(name, func(t *testing.T) {
			s := newStub(t, func(c *stubConn) {
				if _, err := c.head(); err != nil {
					return
				}
				c.say("HTTP/1.1 413 Content Too Large\r\nContent-Type: text/plain\r\nContent-Length: 7\r\nConnection: close\r\n\r\ntoo big")
				if wait {
					<-t.Context().Done()
				}
			})
			g := newGateway(t, nil, s)
			body := `{"model":"m","prompt":"` + strings.Repeat("x", 16<<20) + `"}`
			c := g.dial()
			a := c.ask(post("/v1/completions", body))
			want(t, "status", a.StatusCode, 413)
			want(t, "body", a.body, "too big")
			l := g.line()
			want(t, "status logged", l["status"], int64(413))
			want(t, "client_gone", l["client_gone"], nil)
		})
	}
	f("hangs up", false)
	f("stops reading", true)
}

// TestReroute: a replica that cannot be reached, or has no room, is replaced once.
func TestReroute(t *testing.T) {
	busy := func(c *stubConn) {
		for {
			if _, err := c.request(); err != nil {
				return
			}
			c.answer(503, `{"error":"busy"}`)
		}
	}
	f := func(name string, status int, body string, reroutes float64, stubs func(t *testing.T) []*stub) {
		t.Run(name, func(t *testing.T) {
			list := stubs(t)
			g := newGateway(t, nil, list...)
			c := g.dial()
			for range 20 { // whichever is picked first
				a := c.ask(post(chat, chatBody))
				want(t, "status", a.StatusCode, status)
				if body != "" {
					want(t, "body", a.body, body)
				}
				if strings.Contains(a.body, "127.0.0.1") {
					t.Errorf("body: got %q, want no address", a.body)
				}
			}
			if reroutes == 0 {
				want(t, "reroutes", g.value(`kvgate_retries_total{kind="reroute"}`), 0.0)
			} else if g.value(`kvgate_retries_total{kind="reroute"}`) < reroutes {
				t.Errorf("reroutes: got %v, want at least %v", g.value(`kvgate_retries_total{kind="reroute"}`), reroutes)
			}
			for _, e := range g.fleet.Endpoints() {
				eventually(t, "nothing in flight", func() bool { return e.InFlight() == 0 })
			}
		})
	}
	f("one down", 200, plainAnswer, 1, func(t *testing.T) []*stub { return []*stub{newStubDown(t), newStub(t, plain)} })
	f("one busy", 200, plainAnswer, 1, func(t *testing.T) []*stub { return []*stub{newStub(t, busy), newStub(t, plain)} })
	f("all busy", 503, `{"error":"busy"}`, 20, func(t *testing.T) []*stub { return []*stub{newStub(t, busy), newStub(t, busy)} })
	f("three busy", 503, `{"error":"busy"}`, 20, func(t *testing.T) []*stub {
		return []*stub{newStub(t, busy), newStub(t, busy), newStub(t, busy)}
	})
	f("alone and down", 502, "", 0, func(t *testing.T) []*stub { return []*stub{newStubDown(t)} })
	f("alone and busy", 503, `{"error":"busy"}`, 0, func(t *testing.T) []*stub { return []*stub{newStub(t, busy)} })
	f("all down", 502, "", 20, func(t *testing.T) []*stub { return []*stub{newStubDown(t), newStubDown(t)} })
}

// TestDownIsRemembered: a replica that refused a connection gets no further
// request until it is reached again.
func TestDownIsRemembered(t *testing.T) {
	g := newGateway(t, nil, newStubDown(t), newStub(t, plain))
	c := g.dial()
	eventually(t, "the dead replica is tried once", func() bool {
		c.ask(post(chat, chatBody))
		return g.value(`kvgate_replica_state{replica="r0",state="down"}`) == 1
	})
	for range 10 {
		c.ask(post(chat, chatBody))
	}
	want(t, "attempts on it", g.value(`kvgate_upstream_errors_total{reason="connect",replica="r0"}`), 1.0)
}

// TestBadRequestsAreNoFailures: case 13.
func TestBadRequestsAreNoFailures(t *testing.T) {
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			if strings.Contains(string(r.body), "max_tokens") {
				c.answer(400, `{"error":{"message":"max_tokens is too large","type":"BadRequestError","code":400}}`)
			} else {
				c.answer(200, plainAnswer)
			}
		}
	})
	g := newGateway(t, nil, s)
	c := g.dial()
	for range 100 {
		want(t, "bad", c.ask(post(chat, `{"model":"m","messages":[],"max_tokens":99999999}`)).StatusCode, 400)
	}
	want(t, "good", c.ask(post(chat, chatBody)).StatusCode, 200)
	want(t, "state", g.value(`kvgate_replica_state{replica="r0",state="ready"}`), 1.0)
}

// TestFailuresAreCounted: 5xx answers eject a replica; 501 and 4xx do not.
func TestFailuresAreCounted(t *testing.T) {
	f := func(status int, ready float64) {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			s := newStub(t, func(c *stubConn) {
				for {
					if _, err := c.request(); err != nil {
						return
					}
					c.answer(status, `{}`)
				}
			})
			g := newGateway(t, nil, s)
			c := g.dial()
			for range 10 {
				want(t, "status", c.ask(post(chat, chatBody)).StatusCode, status)
			}
			want(t, "ready", g.value(`kvgate_replica_state{replica="r0",state="ready"}`), ready)
			want(t, "connections", s.accepted.Load(), int64(1))
		})
	}
	f(500, 0)
	f(502, 0)
	f(501, 1)
	f(429, 1)
	f(404, 1)
	f(503, 1)
}

// TestTimeouts: each phase has its own, and none counts the whole.
// A replica that stops at SIGTERM may leave its streams hanging and listen no
// more: the idle limit ends each with an error event and without a clean end, and
// what comes next goes to another replica.
func TestReplicaLeavesStreamsHanging(t *testing.T) {
	f := func(path, body, opening, event string) {
		t.Run(path, func(t *testing.T) {
			stopped := make(chan bool)
			leaving := newStub(t, func(c *stubConn) {
				if _, err := c.request(); err != nil {
					return
				}
				c.say(sseHead + chunk(opening))
				<-stopped
				c.gone()
			})
			g := newGateway(t, func(s *configs.Settings) { s.Upstream.StreamTimeout = 200 * time.Millisecond }, leaving)
			c := g.dial()
			c.say(post(path, body))
			resp, err := http.ReadResponse(c.Reader, nil)
			if err != nil {
				t.Fatalf("head: got %v, want one", err)
			}
			_ = leaving.ln.Close()
			close(stopped)
			other := newStub(t, plain)
			specs := []routing.EndpointSpec{{Name: "r0", URL: leaving.url()}, {Name: "r1", URL: other.url()}}
			g.setSpecs(specs)
			for range 8 {
				want(t, "the next request", g.dial().ask(post(chat, chatBody)).StatusCode, 200)
			}
			want(t, "served by the other", other.requests.Load(), int64(8))
			text, err := io.ReadAll(resp.Body)
			if rest, ok := strings.CutPrefix(string(text), opening); !ok || !strings.HasPrefix(rest, event) || !strings.Contains(rest, "upstream_timeout") && !strings.Contains(rest, "stream_timeout") {
				t.Errorf("stream: got %q, want an error event behind what came", text)
			}
			if err == nil || strings.Contains(string(text), "[DONE]") {
				t.Errorf("stream: got a clean end (%v, %q), want a broken one", err, text)
			}
			want(t, "failures", g.value(`kvgate_upstream_errors_total{reason="timeout",replica="r0"}`), 1.0)
		})
	}
	f(chat, streamBody, roleEvent+event("a"), `data: {"error":{"message":`)
	f("/v1/completions", `{"model":"m","prompt":"x","stream":true}`, event("a"), `data: {"error":{"message":`)
	f("/v1/responses", `{"model":"m","input":"x","stream":true}`, "event: response.created\ndata: {}\n\n", "event: error\ndata: {\"type\":\"error\"")
	f("/v1/messages", `{"model":"m","messages":[],"stream":true}`, "event: message_start\ndata: {}\n\n", "event: error\ndata: {\"type\":\"error\"")
}

func TestTimeouts(t *testing.T) {
	limits := func(s *configs.Settings) {
		s.Upstream.HeaderTimeout = 60 * time.Millisecond
		s.Upstream.StreamTimeout = 60 * time.Millisecond
	}
	t.Run("header", func(t *testing.T) {
		s := newStub(t, func(c *stubConn) { c.gone() })
		g := newGateway(t, limits, s)
		a := g.dial().ask(post(chat, chatBody))
		want(t, "status", a.StatusCode, 504)
		want(t, "timeouts", g.value(`kvgate_upstream_errors_total{reason="timeout",replica="r0"}`), 1.0)
		eventually(t, "the connection is closed", func() bool { return s.open.Load() == 0 })
	})
	t.Run("a long stream", func(t *testing.T) {
		const n = 12
		s := newStub(t, func(c *stubConn) {
			if _, err := c.request(); err != nil {
				return
			}
			c.say(sseHead)
			for range n {
				time.Sleep(120 * time.Millisecond) // in all longer than the limit
				c.say(chunk(event("a")))
			}
			c.say(chunk(doneEvent) + lastChunk)
			c.gone()
		})
		g := newGateway(t, func(s *configs.Settings) { s.Upstream.StreamTimeout = time.Second }, s)
		a := g.dial().ask(post(chat, streamBody))
		want(t, "error", a.err, error(nil))
		want(t, "body", a.body, strings.Repeat(event("a"), n)+doneEvent)
	})
}

// TestOddAnswers: what cannot be read is a 502, what is merely unusual passes.
func TestOddAnswers(t *testing.T) {
	f := func(name, answer string, status int, body string, kept bool) {
		t.Run(name, func(t *testing.T) {
			s := newStub(t, func(c *stubConn) {
				for {
					if _, err := c.request(); err != nil || !c.say(answer) {
						return
					}
					if !kept && !strings.Contains(answer, "Content-Length") {
						return
					}
				}
			})
			g := newGateway(t, nil, s)
			c := g.dial()
			for range 2 {
				a := c.ask(post(chat, chatBody))
				want(t, "status", a.StatusCode, status)
				if status < 500 {
					want(t, "body", a.body, body)
				}
			}
			accepted := int64(2)
			if kept {
				accepted = 1
			}
			want(t, "connections", s.accepted.Load(), accepted)
		})
	}
	ok := "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"
	f("plain", ok+"\r\nok", 200, "ok", true)
	f("interim", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"+ok+"\r\nok", 200, "ok", true)
	f("close", ok+"Connection: close\r\n\r\nok", 200, "ok", false)
	f("HTTP/1.0", "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, "ok", false)
	f("close-delimited", "HTTP/1.1 200 OK\r\n\r\nok", 200, "ok", false)
	f("empty reason", "HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", 200, "ok", true)
	f("chunked with extension", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b\r\nok\r\n0\r\nX: y\r\n\r\n", 200, "ok", true)
	f("204", "HTTP/1.1 204 No Content\r\n\r\n", 204, "", true)
	f("304", "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, "", true)
	f("empty", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, "", true)
	f("length and chunks", "HTTP/1.1 200 OK\r\nContent-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, "ok", false)
	f("equal lengths", ok+"Content-Length: 2\r\n\r\nok", 200, "ok", true)
	f("different lengths", ok+"Content-Length: 3\r\n\r\nokk", 502, "", false)
	f("bad length", "HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok", 502, "", false)
	f("unknown coding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 502, "", false)
	f("folded", "HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 2\r\n\r\nok", 502, "", false)
	f("bare line feed", "HTTP/1.1 200 OK\r\nX: a\nContent-Length: 2\r\n\r\nok", 502, "", false)
	f("no status", "HTTP/1.1 OK\r\nContent-Length: 2\r\n\r\nok", 502, "", false)
	f("no HTTP", "SSH-2.0-OpenSSH_9.6 Content-Length\r\n\r\n", 502, "", false)
	f("switching protocols", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", 502, "", false)
}

// TestUpstreamHead: case 26, the replica's side.
func TestUpstreamHead(t *testing.T) {
	f := func(size, status int) {
		s := newStub(t, func(c *stubConn) {
			if _, err := c.request(); err == nil {
				c.say("HTTP/1.1 200 OK\r\nX-Long: " + strings.Repeat("x", size) + "\r\nContent-Length: 2\r\n\r\nok")
				c.gone()
			}
		})
		g := newGateway(t, nil, s)
		a := g.dial().ask(post(chat, chatBody))
		want(t, fmt.Sprintf("status with a field of %d bytes", size), a.StatusCode, status)
		if status == 200 {
			want(t, "field", len(a.Header.Get("X-Long")), size)
		}
	}
	f(12<<10, 200)
	f(17<<10, 502)
	f(100<<10, 502)
}

// TestTLSReplica: https replicas, trusted by upstream.ca_file; kept alive.
func TestTLSReplica(t *testing.T) {
	cfg, ca := certificate(t)
	f := func(name, file string, status int, accepted int64) {
		t.Run(name, func(t *testing.T) {
			s := newStubOn(t, cfg, func(c *stubConn) {
				for {
					r, err := c.request()
					if err != nil {
						return
					}
					c.answer(200, fmt.Sprint(len(r.body)))
				}
			})
			g := newGateway(t, func(s *configs.Settings) { s.Upstream.CAFile = file })
			g.setSpecs([]routing.EndpointSpec{{Name: "r0", URL: "https" + strings.TrimPrefix(s.url(), "http")}})
			c := g.dial()
			body := `{"model":"m","prompt":"` + strings.Repeat("x", 1<<20) + `"}`
			for range 3 {
				a := c.ask(post("/v1/completions", body))
				want(t, "status", a.StatusCode, status)
				if status == 200 {
					want(t, "body", a.body, fmt.Sprint(len(body)))
				}
			}
			if accepted > 0 {
				want(t, "connections", s.accepted.Load(), accepted)
			}
		})
	}
	f("trusted", ca, 200, 1)
	f("untrusted", "", 502, 0)
}

func TestUpstreamFiles(t *testing.T) {
	f := func(name string, change func(*configs.Settings), part string) {
		settings := configs.DefaultSettings()
		change(&settings)
		_, err := newUpstreamLimits(&settings)
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s: got %v, want an error with %q", name, err, part)
		}
	}
	f("missing CA", func(s *configs.Settings) { s.Upstream.CAFile = "/nonexistent" }, "upstream.ca_file")
	f("empty CA", func(s *configs.Settings) { s.Upstream.CAFile = writeFile(t, "no certificate") }, "no PEM certificate")
	f("missing key", func(s *configs.Settings) { s.Upstream.APIKeyFile = "/nonexistent" }, "upstream.api_key_file")
	f("empty key", func(s *configs.Settings) { s.Upstream.APIKeyFile = writeFile(t, " \n") }, "one key")
	f("two keys", func(s *configs.Settings) { s.Upstream.APIKeyFile = writeFile(t, "a\nb\n") }, "one key")
}

// TestPoolSweep: idle connections are closed without a further request, and
// when their replica is removed.
func TestPoolSweep(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, func(s *configs.Settings) { s.Upstream.IdleTimeout = 50 * time.Millisecond }, s)
	g.dial().ask(post(chat, chatBody))
	want(t, "open", s.open.Load(), int64(1))
	eventually(t, "the idle connection is closed", func() bool { return s.open.Load() == 0 })
}

func TestPoolMaxIdle(t *testing.T) {
	gate := make(chan bool)
	s := newStub(t, func(c *stubConn) {
		for {
			if _, err := c.request(); err != nil {
				return
			}
			select {
			case <-gate:
			case <-t.Context().Done():
			}
			c.answer(200, plainAnswer)
		}
	})
	g := newGateway(t, func(s *configs.Settings) { s.Upstream.MaxIdle = 2 }, s)
	var clients []*client
	for range 5 {
		c := g.dial()
		c.say(post(chat, chatBody))
		clients = append(clients, c)
	}
	eventually(t, "all are at the replica", func() bool { return s.requests.Load() == 5 })
	close(gate)
	for _, c := range clients {
		want(t, "body", c.answer("POST").body, plainAnswer)
	}
	eventually(t, "two connections are kept", func() bool { return s.open.Load() == 2 })
}
