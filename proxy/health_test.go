package proxy

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
)

// TestHealthyButDying: an engine whose completions die while /health and /metrics
// are fine is left out, and its requests cost their clients no more than that.
func TestHealthyButDying(t *testing.T) {
	f := func(name, body string, die func(c *stubConn)) {
		t.Run(name, func(t *testing.T) {
			var asked atomic.Int64
			dying := newStub(t, func(c *stubConn) {
				for {
					r, err := c.request()
					if err != nil {
						return
					}
					if strings.HasPrefix(r.line, "GET ") {
						c.answer(200, "")
						continue
					}
					asked.Add(1)
					die(c)
					return
				}
			})
			good := newStub(t, func(c *stubConn) {
				for {
					if _, err := c.request(); err != nil {
						return
					}
					if body == streamBody {
						c.say(sseHead + chunk(roleEvent) + chunk(doneEvent) + lastChunk)
					} else {
						c.answer(200, plainAnswer)
					}
				}
			})
			g := newGateway(t, nil, dying, good)
			probed := g.fleet.Endpoints()[0]
			failed := 0
			for i := range 60 {
				probed.SetReachable(true) // what every scrape says of it
				a := g.dial().ask(post(chat, fmt.Sprintf(`{"model":"m","user":"%d",%s`, i, body[len(`{"model":"m",`):])))
				if a.StatusCode != 200 || a.err != nil || strings.Contains(a.body, `"error"`) {
					failed++
				}
				g.settled()
			}
			want(t, "failures seen by clients", failed, 5)
			want(t, "requests to the dying one", asked.Load(), int64(5))
			want(t, "state", g.value(`kvgate_replica_state{replica="r0",state="down"}`), 1.0)
		})
	}
	f("reset", chatBody, func(c *stubConn) { c.reset() })
	f("500", chatBody, func(c *stubConn) { c.answer(500, `{"error":{"message":"EngineCore encountered an issue","code":500}}`) })
	f("stream that ends in the middle", streamBody, func(c *stubConn) { c.say(sseHead + chunk(roleEvent)) })
}
