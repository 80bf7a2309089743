package proxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// framingCase is one line of testdata/framing.txt.
type framingCase struct {
	name     string
	statuses []int
	closes   bool
	cut      bool
	raw      []byte
	sent     string // "method target\nbody\n" of each request that reaches a replica
}

// framingCorpus reads testdata/framing.txt, which describes its own form.
func framingCorpus(t testing.TB) []framingCase {
	t.Helper()
	text, err := os.ReadFile("testdata/framing.txt")
	if err != nil {
		t.Fatal(err)
	}
	macros := map[string][]byte{}
	parts := func(line, s string) (out []byte) {
		for s = strings.TrimSpace(s); s != ""; s = strings.TrimSpace(s) {
			if s[0] == '$' {
				m, ok := macros[s[:2]]
				if !ok {
					t.Fatalf("framing.txt: %s: no macro %s", line, s[:2])
				}
				out, s = append(out, m...), s[2:]
				continue
			}
			quoted, err := strconv.QuotedPrefix(s)
			if err != nil {
				t.Fatalf("framing.txt: %s: at %.20q: %v", line, s, err)
			}
			s = s[len(quoted):]
			part, _ := strconv.Unquote(quoted)
			times := 1
			if digits, ok := strings.CutPrefix(s, "*"); ok {
				digits, _, _ = strings.Cut(digits, " ")
				if times, err = strconv.Atoi(digits); err != nil {
					t.Fatalf("framing.txt: %s: %v", line, err)
				}
				s = s[1+len(digits):]
			}
			out = append(out, strings.Repeat(part, times)...)
		}
		return out
	}
	var all []framingCase
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if line[0] == '$' {
			macros[line[:2]] = parts(line, strings.TrimPrefix(line[2:], " ="))
			continue
		}
		name, rest, _ := strings.Cut(line, ": ")
		verdict, rest, _ := strings.Cut(rest, ": ")
		stream, sent, listed := strings.Cut(rest, " -> ")
		c := framingCase{name: name, raw: parts(name, stream)}
		for _, word := range strings.Fields(verdict) {
			switch word {
			case "close":
				c.closes = true
			case "cut":
				c.cut = true
			default:
				status, err := strconv.Atoi(word)
				if err != nil {
					t.Fatalf("framing.txt: %s: %v", name, err)
				}
				if c.statuses = append(c.statuses, status); status == 200 && !listed {
					c.sent += string(macros["$D"])
				}
			}
		}
		if listed && sent != "-" {
			c.sent = string(parts(name, sent))
		}
		all = append(all, c)
	}
	return all
}

// framingStub is a replica that notes what reaches it.
type framingStub struct {
	*stub
	mu     sync.Mutex
	sent   strings.Builder
	odd    []string // what could not be read as requests
	hidden []string // names that must not arrive
}

func newFramingStub(t testing.TB) *framingStub {
	f := &framingStub{}
	f.stub = newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				if !errors.Is(err, io.EOF) && !isReset(err) {
					f.mu.Lock()
					f.odd = append(f.odd, err.Error())
					f.mu.Unlock()
				}
				return
			}
			f.mu.Lock()
			f.sent.WriteString(strings.TrimSuffix(r.line, " HTTP/1.1") + "\n" + string(r.body) + "\n")
			for name := range r.header {
				switch name {
				case "Connection", "Transfer-Encoding", "Te", "Trailer", "Expect", "Upgrade", "Http2-Settings", "X-Sum":
					f.hidden = append(f.hidden, name)
				}
				if strings.Contains(name, "_") {
					f.hidden = append(f.hidden, name)
				}
			}
			f.mu.Unlock()
			if !c.answer(200, plainAnswer) {
				return
			}
		}
	})
	return f
}

// take returns what has arrived since the last call.
func (f *framingStub) take() (sent string, odd, hidden []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	sent, odd, hidden = f.sent.String(), f.odd, f.hidden
	f.sent.Reset()
	f.odd, f.hidden = nil, nil
	return sent, odd, hidden
}

// answers reads the answers on a connection until it is closed, or until there
// are as many as are due, it is not to be closed, and a moment brings no more.
func (c *client) answers(due int, closes bool) (statuses []int, closed bool) {
	for {
		if len(statuses) >= due && c.Buffered() == 0 && !closes {
			_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		}
		if _, err := c.Peek(1); err != nil {
			return statuses, !isTimeout(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(patience))
		resp, err := http.ReadResponse(c.Reader, &http.Request{Method: http.MethodGet})
		if err != nil {
			c.t.Errorf("answer %d: got %v, want one", len(statuses), err)
			return statuses, true
		}
		_, err = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if err != nil {
			c.t.Errorf("answer %d: got %v, want its whole body", len(statuses), err)
		}
		statuses = append(statuses, resp.StatusCode)
	}
}

// TestFraming: case 27, the whole kind. Every stream of the corpus, whole and in
// small pieces: the answers, the connection's end and what reaches the replica.
func TestFraming(t *testing.T) {
	s := newFramingStub(t)
	g := newGateway(t, nil, s.stub)
	all := framingCorpus(t)
	if len(all) < 150 {
		t.Errorf("corpus: got %d cases, want at least 150", len(all))
	}
	seen := map[string]bool{}
	f := func(t *testing.T, tc framingCase, pieces bool) {
		c := g.dial()
		c.t = t
		_ = c.Conn.(*net.TCPConn).SetNoDelay(true)
		go func() {
			for rest := tc.raw; len(rest) > 0; {
				n := len(rest)
				if pieces {
					n = min(n, max(1, len(tc.raw)/16))
				}
				if _, err := c.Write(rest[:n]); err != nil {
					break // refused before all of it was sent
				}
				rest = rest[n:]
			}
			if tc.cut {
				_ = c.Conn.(*net.TCPConn).CloseWrite()
			}
		}()
		statuses, closed := c.answers(len(tc.statuses), tc.closes)
		if tc.cut {
			closed = tc.closes
			if n := len(statuses); n == len(tc.statuses)+1 && statuses[n-1] >= 400 {
				statuses = statuses[:n-1] // said to whoever still listens
			}
		}
		want(t, "answers", join(statuses), join(tc.statuses))
		want(t, "closed", closed, tc.closes)
		_ = c.Close()
		eventually(t, "the request's end", func() bool { return g.InFlight() == 0 })
		sent, odd, hidden := s.take()
		want(t, "sent on", sent, tc.sent)
		want(t, "unreadable on the way", strings.Join(odd, ", "), "")
		want(t, "fields on the way", strings.Join(hidden, ", "), "")
	}
	for _, tc := range all {
		if seen[tc.name] {
			t.Errorf("case %q: got it twice, want it once", tc.name)
		}
		seen[tc.name] = true
		t.Run(tc.name, func(t *testing.T) {
			f(t, tc, false)
			f(t, tc, true)
		})
	}
	want(t, "a good request", g.dial().ask(post(chat, chatBody)).StatusCode, 200) // the process lives
}

func join(statuses []int) string {
	var b bytes.Buffer
	for _, s := range statuses {
		b.WriteString(strconv.Itoa(s) + " ")
	}
	return strings.TrimSpace(b.String())
}

// fasthttp knows the field by this spelling alone.
func TestFramerSpellsExpect(t *testing.T) {
	stream := []byte("GET /a HTTP/1.1\r\nHost: h\r\neXPECT: 100-continue\r\n\r\n")
	var f framer
	want(t, "bytes taken", f.scan(stream), len(stream))
	want(t, "as handed on", string(stream), "GET /a HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n\r\n")
}

func BenchmarkFramer(b *testing.B) {
	head := []byte("POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nUser-Agent: OpenAI/Python 2.9.0\r\nAccept: application/json\r\n" +
		"Accept-Encoding: gzip, deflate\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{")
	b.SetBytes(int64(len(head)))
	b.ReportAllocs()
	for b.Loop() {
		var f framer
		if n := f.scan(head); n != len(head) {
			b.Fatalf("scan: stopped at byte %d of %d", n, len(head))
		}
	}
}
