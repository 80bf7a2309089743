package proxy

import (
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// countedConn knows when its reader has taken everything and wants more.
type countedConn struct {
	*net.TCPConn
	mu      sync.Mutex
	changed sync.Cond
	read    int
	waiting bool
	closed  bool
}

func (c *countedConn) Read(p []byte) (int, error) {
	c.set(func() { c.waiting = true })
	n, err := c.TCPConn.Read(p)
	c.set(func() { c.waiting = false; c.read += n })
	return n, err
}

func (c *countedConn) Close() error {
	err := c.TCPConn.Close()
	c.set(func() { c.closed = true })
	return err
}

func (c *countedConn) set(change func()) {
	c.mu.Lock()
	change()
	c.mu.Unlock()
	c.changed.Broadcast()
}

// settle waits until the reader has taken n bytes and waits for more, which it
// does only when all before has been answered, or until it has closed.
func (c *countedConn) settle(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.closed && !(c.waiting && c.read >= n) {
		c.changed.Wait()
	}
}

// countedListener hands out what it accepts twice: to the server and on conns.
type countedListener struct {
	net.Listener
	conns chan *countedConn
}

func (l *countedListener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &countedConn{TCPConn: nc.(*net.TCPConn)}
	c.changed.L = &c.mu
	l.conns <- c
	return c, nil
}

// FuzzFraming sends streams of several requests, split at random points. The
// requests that the replica sees are those that were accepted, no more and no
// fewer, each framed so that it can be read.
func FuzzFraming(f *testing.F) {
	s := newFramingStub(f)
	ln := &countedListener{conns: make(chan *countedConn, 1)}
	g := newGatewayWith(f, nil, nil, func(inner net.Listener) net.Listener {
		ln.Listener = inner
		return ln
	}, s.stub)
	all := framingCorpus(f)
	for i, tc := range all {
		if len(tc.raw) > 4<<10 {
			continue
		}
		f.Add(tc.raw, uint64(i))
		if !tc.cut {
			next := all[(i*7+1)%len(all)].raw
			f.Add(append(append([]byte{}, tc.raw...), next[:min(len(next), 4<<10)]...), uint64(i))
		}
	}
	f.Fuzz(func(t *testing.T, stream []byte, seed uint64) {
		if len(stream) > 32<<10 {
			return
		}
		before := s.requests.Load()
		nc, err := net.Dial("tcp", g.addr)
		if err != nil {
			t.Fatalf("Dial: got %v, want no error", err)
		}
		defer func() { _ = nc.Close() }()
		_ = nc.SetDeadline(time.Now().Add(patience))
		far := <-ln.conns
		written := make(chan struct{})
		go func() {
			defer close(written)
			rnd := rand.New(rand.NewPCG(seed, 1))
			for rest := stream; len(rest) > 0; {
				n := 1 + rnd.IntN(len(rest))
				if rnd.IntN(4) == 0 {
					n = min(n, 3)
				}
				if _, err := nc.Write(rest[:n]); err != nil {
					return // refused before all of it was sent
				}
				rest = rest[n:]
			}
		}()
		settled := make(chan struct{})
		go func() {
			far.settle(len(stream))
			<-written
			_ = nc.(*net.TCPConn).CloseWrite()
			close(settled)
		}()
		accepted := int64(0)
		c := newClient(t, nc)
		for {
			if _, err := c.Peek(1); err != nil {
				if isTimeout(err) {
					t.Fatalf("the gateway neither answers nor closes")
				}
				break
			}
			resp, err := http.ReadResponse(c.Reader, &http.Request{Method: http.MethodGet})
			if err != nil {
				if errors.Is(err, io.ErrUnexpectedEOF) || isReset(err) {
					break
				}
				t.Fatalf("answer: got %v, want one", err)
			}
			body, _ := io.ReadAll(resp.Body)
			if string(body) == plainAnswer {
				accepted++
			}
		}
		_ = nc.Close()
		<-settled
		eventually(t, "the request's end", func() bool { return g.InFlight() == 0 })
		_, odd, hidden := s.take()
		want(t, "requests seen by the replica, against those answered", s.requests.Load()-before, accepted)
		want(t, "unreadable on the way", strings.Join(odd, ", "), "")
		want(t, "fields on the way", strings.Join(hidden, ", "), "")
	})
}

// FuzzFramerPieces reads a stream at once, where whole lines are taken, and byte by
// byte, where none is: both stop at the same byte, in the same state.
func FuzzFramerPieces(f *testing.F) {
	for _, tc := range framingCorpus(f) {
		if len(tc.raw) <= 4<<10 {
			f.Add(tc.raw)
		}
	}
	for _, line := range []string{"Accept: */*", "Hose: x", "Expert: 1", "Content-Length: 1", "Transfer-Encoding: chunked", "X-A:\t", "A", "A:\x00", "A\x00: b", ": b", "A: b\r"} {
		f.Add([]byte("GET /a HTTP/1.1\r\nHost: h\r\n" + line + "\r\nB: c\r\n\r\n"))
	}
	for _, line := range []string{"GET /\x7f HTTP/1.1", "GET  HTTP/1.1", " / HTTP/1.1", "GET / HTTP/1.0", "GET / HTTP/1.1 ", "G\x00T / HTTP/1.1"} {
		f.Add([]byte(line + "\r\nHost: h\r\n\r\n"))
	}
	trailers := strings.Repeat("A: b\r\n", maxTrailers/len("A: b")+1)
	f.Add([]byte("POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + trailers + "\r\n"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		var whole, bytewise framer
		want := 0
		for want < len(stream) && bytewise.scan([]byte{stream[want]}) == 1 {
			want++
		}
		got := whole.scan(append([]byte(nil), stream...))
		if got != want {
			t.Fatalf("at once: stopped at byte %d, want %d as byte by byte", got, want)
		}
		// What a line leaves in the counters is set anew before it is read.
		for _, f := range []*framer{&whole, &bytewise} {
			f.n, f.field, f.beside, f.behind, f.host, f.name = 0, 0, 0, false, 0, [len(f.name)]byte{}
		}
		if whole.state == bytewise.state && whole != bytewise {
			t.Fatalf("at once: left %+v, want %+v", whole, bytewise)
		}
		if whole.state != bytewise.state {
			t.Fatalf("at once: state %d, want %d", whole.state, bytewise.state)
		}
	})
}
