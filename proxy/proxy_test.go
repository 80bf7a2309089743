package proxy

import (
	"strings"
	"testing"
)

func TestPlainAnswer(t *testing.T) {
	var got *stubRequest
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			got = r
			c.answer(200, plainAnswer)
		}
	})
	g := newGateway(t, nil, s)
	c := g.dial()
	a := c.ask(post(chat, chatBody, "X-Request-Id: my-id", "Authorization: Bearer k"))
	want(t, "status", a.StatusCode, 200)
	want(t, "body", a.body, plainAnswer)
	want(t, "x-request-id", a.Header.Get("x-request-id"), "my-id")
	want(t, "request line", got.line, "POST "+chat+" HTTP/1.1")
	want(t, "body sent on", string(got.body), chatBody)
	want(t, "Host", got.header.Get("Host"), strings.TrimPrefix(s.url(), "http://"))
	want(t, "Authorization", got.header.Get("Authorization"), "Bearer k")
	want(t, "X-Request-Id", got.header.Get("X-Request-Id"), "my-id")
	want(t, "X-Forwarded-For", got.header.Get("X-Forwarded-For"), "127.0.0.1")
	want(t, "Accept-Encoding", got.header.Get("Accept-Encoding"), "identity")
	l := g.line()
	for key, v := range map[string]any{
		"request_id": "my-id", "status": int64(200), "method": "POST", "route": chat, "model": "m", "replica": "r0", "phase": "done",
		"in_tok": int64(9), "cached_tok": int64(4), "out_tok": int64(2), "bytes_in": int64(len(chatBody)), "bytes_out": int64(len(plainAnswer)),
	} {
		want(t, key, l[key], v)
	}
	want(t, "second answer", c.ask(post(chat, chatBody)).body, plainAnswer)
	want(t, "connections to the replica", s.accepted.Load(), int64(1))
}

func TestStream(t *testing.T) {
	parts := []string{roleEvent, event("a"), event("b"), usageEvent, doneEvent}
	s := newStub(t, func(c *stubConn) {
		for {
			if _, err := c.request(); err != nil {
				return
			}
			c.say(sseHead)
			for _, p := range parts {
				c.say(chunk(p))
			}
			c.say(lastChunk)
		}
	})
	g := newGateway(t, nil, s)
	c := g.dial()
	for range 3 {
		a := c.ask(post(chat, streamBody))
		want(t, "error", a.err, error(nil))
		want(t, "body", a.body, strings.Join(parts, ""))
		want(t, "Content-Type", a.Header.Get("Content-Type"), "text/event-stream; charset=utf-8")
		want(t, "Cache-Control", a.Header.Get("Cache-Control"), "no-cache")
		want(t, "X-Accel-Buffering", a.Header.Get("X-Accel-Buffering"), "no")
		l := g.line()
		for key, v := range map[string]any{"status": int64(200), "events": int64(5), "in_tok": int64(100), "cached_tok": int64(64), "out_tok": int64(7), "phase": "done", "err": nil} {
			want(t, key, l[key], v)
		}
		if l["ttft_ms"] == nil {
			t.Errorf("ttft_ms: got none, want a value")
		}
	}
	want(t, "connections to the replica", s.accepted.Load(), int64(1))
}
