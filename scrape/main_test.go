package scrape

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/textproto"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv(serveEnv) != "" {
		serveForBenchmark()
		return
	}
	goleak.VerifyTestMain(m)
}

// stub is a replica whose every byte a test decides.
type stub struct {
	t        testing.TB
	address  string
	listener net.Listener
	wait     sync.WaitGroup

	mu       sync.Mutex
	answers  map[string]answer // by path
	conns    map[net.Conn]bool
	accepted int
	dialled  int
	requests map[string][]time.Time // by path
	heads    []string               // of all requests
	down     bool
}

// answer writes to a connection and tells whether another request may follow.
type answer func(c net.Conn) (keep bool)

// newStub listens until the end of the test. Paths without an answer get 404.
func newStub(t testing.TB) *stub {
	s := newPipeStub(t)
	s.listen("127.0.0.1:0")
	t.Cleanup(s.close)
	return s
}

// newPipeStub returns a stub that is reached by its dial only, for tests in a synctest bubble.
func newPipeStub(t testing.TB) *stub {
	return &stub{t: t, address: "replica:8000", answers: make(map[string]answer), conns: make(map[net.Conn]bool), requests: make(map[string][]time.Time)}
}

// dial is a dialFunc that connects to the stub without a socket.
func (s *stub) dial(context.Context, string, string) (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dialled++
	if s.down {
		return nil, errors.New("refused")
	}
	client, server := net.Pipe()
	s.conns[server] = true
	s.wait.Add(1)
	go s.serve(server)
	return client, nil
}

// set makes a stub without a listener refuse connections, and cuts those that are open, or accept them again.
func (s *stub) set(down bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = down
	for c := range s.conns {
		_ = c.Close()
	}
}

// attempts returns how often dial was called.
func (s *stub) attempts() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dialled
}

// allHeads returns the heads of all requests.
func (s *stub) allHeads() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.heads)
}

// times returns when requests for a path came.
func (s *stub) times(path string) []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests[path])
}

func (s *stub) listen(address string) {
	var err error
	if s.listener, err = net.Listen("tcp", address); err != nil {
		s.t.Fatal(err)
	}
	s.address = s.listener.Addr().String()
	s.mu.Lock()
	s.down = false
	s.mu.Unlock()
	s.wait.Add(1)
	go s.accept(s.listener)
}

func (s *stub) accept(l net.Listener) {
	defer s.wait.Done()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.down {
			_ = c.Close()
		} else {
			s.conns[c] = true
			s.accepted++
			s.wait.Add(1)
			go s.serve(c)
		}
		s.mu.Unlock()
	}
}

func (s *stub) serve(c net.Conn) {
	defer s.wait.Done()
	defer func() { _ = c.Close() }()
	in := textproto.NewReader(bufio.NewReader(c))
	for {
		head, path := "", ""
		for {
			line, err := in.ReadLine()
			if err != nil {
				return
			}
			if line == "" {
				break
			}
			if head == "" {
				path = strings.Fields(line)[1]
			}
			head += line + "\n"
		}
		s.mu.Lock()
		s.requests[path] = append(s.requests[path], time.Now())
		s.heads = append(s.heads, head)
		a := s.answers[path]
		s.mu.Unlock()
		if a == nil {
			a = status(404)
		}
		if !a(c) {
			return
		}
	}
}

func (s *stub) url() string { return "http://" + s.address }

// on sets the answer to a path.
func (s *stub) on(path string, a answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[path] = a
}

// close refuses further connections and cuts those that are open.
func (s *stub) close() {
	_ = s.listener.Close()
	s.mu.Lock()
	s.down = true
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.wait.Wait()
}

// reopen listens again on the same address.
func (s *stub) reopen() { s.listen(s.address) }

// count returns how many requests for a path have come, accepts how many connections.
func (s *stub) count(path string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.requests[path])
}

func (s *stub) accepts() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accepted
}

// raw answers with these bytes and closes.
func raw(text string) answer {
	return func(c net.Conn) bool {
		_, _ = c.Write([]byte(text))
		return false
	}
}

// kept answers with these bytes and keeps the connection.
func kept(text string) answer {
	return func(c net.Conn) bool {
		_, err := c.Write([]byte(text))
		return err == nil
	}
}

func text200(body string) string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s", len(body), body)
}

// body answers 200 with a content-length.
func body(text string) answer { return kept(text200(text)) }

func status(code int) answer {
	return kept(fmt.Sprintf("HTTP/1.1 %d Whatever\r\nContent-Length: 2\r\n\r\n{}", code))
}

// hang reads on and never answers.
func hang(c net.Conn) bool {
	_, _ = c.Read(make([]byte, 1))
	return false
}

// eventually waits for a condition that real sockets or files bring about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timed out: %s", what)
		}
	}
}
