package proxy

import (
	"bytes"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
)

// loop is a client, a gateway and a replica on loopback, of which only the
// gateway does anything that could allocate.
type loop struct {
	g       *gateway
	conn    net.Conn
	request []byte
	answer  int // bytes of an answer, head included
	buf     []byte
}

func newLoop(t testing.TB, body, answer string) *loop {
	t.Helper()
	end := []byte(body[len(body)-16:])
	reply := []byte(answer)
	s := newStub(t, func(c *stubConn) {
		buf := make([]byte, 2*len(body)+4096)
		n := 0
		for {
			k, err := c.Conn.Read(buf[n:])
			if err != nil {
				return
			}
			if n += k; bytes.HasSuffix(buf[:n], end) {
				n = 0
				if _, err := c.Conn.Write(reply); err != nil {
					return
				}
			}
		}
	})
	// An observer would allocate for every line; the others are as in production.
	g := newGatewayWith(t, nil, func(o *Options) { o.Access, o.Log = zap.NewNop(), zap.NewNop() }, nil, s)
	nc, err := net.Dial("tcp", g.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	l := &loop{g: g, conn: nc, request: []byte(post(chat, body)), buf: make([]byte, 1<<20)}
	if _, err := nc.Write(l.request); err != nil {
		t.Fatal(err)
	}
	for { // an answer's end is a pause: the first one only
		_ = nc.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		n, err := nc.Read(l.buf)
		if l.answer += n; err != nil {
			break
		}
	}
	_ = nc.SetReadDeadline(time.Time{})
	if l.answer < len(answer)/2 {
		t.Fatalf("first answer: got %d bytes, want about %d", l.answer, len(answer))
	}
	return l
}

func (l *loop) run(t testing.TB) {
	if _, err := l.conn.Write(l.request); err != nil {
		t.Fatal(err)
	}
	for n := 0; n < l.answer; {
		k, err := l.conn.Read(l.buf)
		if err != nil {
			t.Fatal(err)
		}
		n += k
	}
}

func chatOf(size int) string {
	const words = "The quick brown fox jumps over the lazy dog; then it \\\"rests\\\".\\n"
	text := strings.Repeat(words, size/len(words)+1)[:size-size%len(words)]
	return `{"model":"m","messages":[{"role":"system","content":"` + text + `"},{"role":"user","content":"go on"}],"stream":false}`
}

func plainReply() string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\ndate: Sat, 22 Aug 2026 12:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n%s", len(plainAnswer), plainAnswer)
}

func streamReply(n int) string {
	return sseHead + chunk(roleEvent) + strings.Repeat(chunk(event("word")), n) + chunk(usageEvent) + chunk(doneEvent) + lastChunk
}

// TestRequestAlloc: a request over kept-alive connections allocates nothing of
// ours. fasthttp allocates a reader to look for an unread body and a writer of
// chunks.
func TestRequestAlloc(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	f := func(name, answer string, most float64) {
		t.Run(name, func(t *testing.T) {
			l := newLoop(t, chatOf(8<<10), answer)
			for range 50 {
				l.run(t)
			}
			if got := testing.AllocsPerRun(300, func() { l.run(t) }); got > most {
				t.Errorf("allocations per request: got %v, want at most %v", got, most)
			}
		})
	}
	f("plain", plainReply(), 1)
	f("stream", streamReply(20), 2)
}

func benchmarkLoop(b *testing.B, body, answer string) {
	l := newLoop(b, body, answer)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		l.run(b)
	}
}

func BenchmarkRequest(b *testing.B) {
	for _, size := range []int{1 << 10, 8 << 10, 64 << 10, 512 << 10} {
		b.Run(fmt.Sprintf("plain/%dKiB", size>>10), func(b *testing.B) { benchmarkLoop(b, chatOf(size), plainReply()) })
	}
	b.Run("stream/8KiB/100events", func(b *testing.B) { benchmarkLoop(b, chatOf(8<<10), streamReply(100)) })
}

// BenchmarkStreamChunk forwards events of one long stream, one at a time: the
// replica writes the next when the client has the one before.
func BenchmarkStreamChunk(b *testing.B) {
	next, text := make(chan bool), []byte(chunk(event("word")))
	s := newStub(b, func(c *stubConn) {
		if _, err := c.request(); err != nil || !c.say(sseHead) {
			return
		}
		for range next {
			if _, err := c.Conn.Write(text); err != nil {
				return
			}
		}
	})
	g := newGateway(b, nil, s)
	c := g.dial()
	_ = c.SetDeadline(time.Time{})
	c.say(post(chat, streamBody))
	head := make([]byte, 64<<10)
	if _, err := c.Conn.Read(head); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		next <- true
		for n := 0; n < len(text); {
			k, err := c.Conn.Read(head)
			if err != nil {
				b.Fatal(err)
			}
			n += k
		}
	}
	close(next)
}
