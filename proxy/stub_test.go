package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/textproto"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kvgate/configs"
	"kvgate/routing"
)

// patience bounds every wait of a test: a hang, never a measure.
const patience = 10 * time.Second

// eventually waits until cond holds.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	end := time.Now().Add(patience)
	for !cond() {
		if time.Now().After(end) {
			t.Fatalf("%s: did not come true within %s", what, patience)
		}
		time.Sleep(time.Millisecond)
	}
}

// stub is a replica that speaks raw bytes: serve is called for every connection.
type stub struct {
	t        testing.TB
	ln       net.Listener
	serve    func(c *stubConn)
	accepted atomic.Int64
	requests atomic.Int64
	open     atomic.Int64

	mu    sync.Mutex
	conns map[net.Conn]bool
	wg    sync.WaitGroup
}

// stubConn is one connection from the gateway.
type stubConn struct {
	net.Conn
	*bufio.Reader
	stub *stub
	no   int64 // 1 for the first connection
}

// Read reads through the buffer.
func (c *stubConn) Read(p []byte) (int, error) { return c.Reader.Read(p) }

// stubRequest is a request as it arrived.
type stubRequest struct {
	line   string
	header textproto.MIMEHeader
	raw    string // the head
	body   []byte
}

func newStub(t testing.TB, serve func(c *stubConn)) *stub {
	t.Helper()
	return newStubOn(t, nil, serve)
}

func newStubOn(t testing.TB, cfg *tls.Config, serve func(c *stubConn)) *stub {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("Listen: got %v, want no error", err)
	}
	if cfg != nil {
		ln = tls.NewListener(ln, cfg)
	}
	s := &stub{t: t, ln: ln, serve: serve, conns: map[net.Conn]bool{}}
	s.wg.Add(1)
	go s.accept()
	t.Cleanup(s.close)
	return s
}

func (s *stub) accept() {
	defer s.wg.Done()
	for {
		nc, err := s.ln.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.conns[nc] = true
		s.mu.Unlock()
		c := &stubConn{Conn: nc, Reader: bufio.NewReaderSize(nc, 64<<10), stub: s, no: s.accepted.Add(1)}
		s.open.Add(1)
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			defer s.open.Add(-1)
			defer func() {
				_ = nc.Close()
				s.mu.Lock()
				delete(s.conns, nc)
				s.mu.Unlock()
			}()
			s.serve(c)
		}()
	}
}

func (s *stub) close() {
	_ = s.ln.Close()
	s.mu.Lock()
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

func (s *stub) url() string { return "http://" + s.ln.Addr().String() }

// head reads a request's head alone.
func (c *stubConn) head() (*stubRequest, error) {
	var raw strings.Builder
	for {
		line, err := c.ReadString('\n')
		if err != nil {
			return nil, err
		}
		if raw.WriteString(line); line == "\r\n" {
			break
		}
	}
	line, fields, _ := strings.Cut(raw.String(), "\r\n")
	header, err := textproto.NewReader(bufio.NewReader(strings.NewReader(fields))).ReadMIMEHeader()
	if err != nil {
		return nil, err
	}
	return &stubRequest{line: line, header: header, raw: raw.String()}, nil
}

// request reads a whole request.
func (c *stubConn) request() (*stubRequest, error) {
	r, err := c.head()
	if err != nil {
		return nil, err
	}
	var in io.Reader
	switch {
	case r.header.Get("Transfer-Encoding") == "chunked":
		var out bytes.Buffer
		for {
			line, err := c.ReadString('\n')
			if err != nil {
				return nil, err
			}
			n, err := strconv.ParseInt(strings.TrimSpace(line), 16, 64)
			if err != nil {
				return nil, err
			}
			if _, err := io.CopyN(&out, c.Reader, n); err != nil {
				return nil, err
			}
			if end, err := c.ReadString('\n'); err != nil || end != "\r\n" {
				return nil, fmt.Errorf("chunk ends in %q, %w", end, err)
			}
			if n == 0 {
				break
			}
		}
		in = &out
	case r.header.Get("Content-Length") != "":
		n, err := strconv.ParseInt(r.header.Get("Content-Length"), 10, 64)
		if err != nil {
			return nil, err
		}
		in = io.LimitReader(c.Reader, n)
		defer func() { _ = n }()
	default:
		in = strings.NewReader("")
	}
	if r.body, err = io.ReadAll(in); err != nil {
		return nil, err
	}
	c.stub.requests.Add(1)
	return r, nil
}

// say writes text as it is.
func (c *stubConn) say(text string) bool {
	_, err := io.WriteString(c.Conn, text)
	return err == nil
}

// answer writes a plain JSON answer.
func (c *stubConn) answer(status int, body string) bool {
	return c.say(fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", status, http.StatusText(status), len(body), body))
}

const sseHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"

func chunk(p string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(p), p) }

const lastChunk = "0\r\n\r\n"

// gone waits until the gateway has closed the connection.
func (c *stubConn) gone() {
	_, _ = io.Copy(io.Discard, c.Reader)
}

// event is a chunk of a chat stream.
func event(content string) string {
	return `data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"` + content + `"}}]}` + "\n\n"
}

const (
	roleEvent  = `data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	usageEvent = `data: {"id":"x","choices":[],"usage":{"prompt_tokens":100,"total_tokens":107,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":64}}}` + "\n\n"
	doneEvent  = "data: [DONE]\n\n"
)

// plain serves every request with a small completion.
func plain(c *stubConn) {
	for {
		if _, err := c.request(); err != nil {
			return
		}
		if !c.answer(200, plainAnswer) {
			return
		}
	}
}

const plainAnswer = `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`

// gateway is a Server in front of stubs.
type gateway struct {
	*Server
	t      testing.TB
	addr   string
	fleet  *routing.Fleet
	reg    *prometheus.Registry
	lines  *observer.ObservedLogs // the access log
	errors *observer.ObservedLogs // the process log, from warn
	served chan error
}

// quick makes timeouts short enough for a test to wait for.
func quick(s *configs.Settings) {
	s.Upstream.ConnectTimeout = 2 * time.Second
	s.Drain.Grace = 0
}

func newGateway(t testing.TB, change func(*configs.Settings), stubs ...*stub) *gateway {
	t.Helper()
	return newGatewayWith(t, change, nil, nil, stubs...)
}

func newGatewayWith(t testing.TB, change func(*configs.Settings), options func(*Options), wrap func(net.Listener) net.Listener, stubs ...*stub) *gateway {
	t.Helper()
	settings := configs.DefaultSettings()
	quick(&settings)
	if change != nil {
		change(&settings)
	}
	g := &gateway{t: t, fleet: routing.NewFleet(time.Now, time.Hour, zap.NewNop()), reg: prometheus.NewRegistry(), served: make(chan error, 1)}
	g.setStubs(stubs...)
	router, err := routing.New(configs.DefaultScheduling(), g.fleet, 1)
	if err != nil {
		t.Fatalf("routing.New: got %v, want no error", err)
	}
	current := &routing.Current{}
	current.Store(router)
	access, lines := observer.New(zapcore.InfoLevel)
	log, warnings := observer.New(zapcore.WarnLevel)
	g.lines, g.errors = lines, warnings
	o := Options{
		Settings: &settings, Router: current, Fleet: g.fleet, Metrics: NewMetrics(g.reg, g.fleet, RouteTemplates()),
		Log: zap.New(log), Access: zap.New(access), Version: "test",
	}
	if options != nil {
		options(&o)
	}
	if g.Server, err = New(o); err != nil {
		t.Fatalf("New: got %v, want no error", err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("Listen: got %v, want no error", err)
	}
	g.addr = ln.Addr().String()
	if wrap != nil {
		ln = wrap(ln)
	}
	go func() { g.served <- g.Serve(ln) }()
	t.Cleanup(g.stop)
	return g
}

func (g *gateway) setStubs(stubs ...*stub) {
	var specs []routing.EndpointSpec
	for i, s := range stubs {
		specs = append(specs, routing.EndpointSpec{Name: fmt.Sprintf("r%d", i), URL: s.url()})
	}
	g.setSpecs(specs)
}

func (g *gateway) setSpecs(specs []routing.EndpointSpec) {
	added, _ := g.fleet.Update(specs)
	for _, e := range added {
		e.ObserveFailure() // it serves though it has no metrics
		g.fleet.SetModels(e, []string{"m"}, true)
	}
}

// stop ends the gateway, cutting what still runs.
func (g *gateway) stop() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = g.Shutdown(ctx)
	if err := <-g.served; err != nil {
		g.t.Errorf("Serve: got %v, want no error", err)
	}
	g.served <- nil
	if n := g.InFlight(); n != 0 {
		g.t.Errorf("requests in flight at the end: got %d, want 0", n)
	}
	for _, e := range g.fleet.Endpoints() {
		if e.InFlight() != 0 || e.Awaiting() != 0 || e.PendingTokens() != 0 {
			g.t.Errorf("%s: got in flight %d, awaiting %d, pending %d, want 0 of each", e.ID(), e.InFlight(), e.Awaiting(), e.PendingTokens())
		}
	}
	if left, want := g.buffers.budget.Load(), int64(g.live.Load().settings.Limits.Buffered); left != want {
		g.t.Errorf("budget of buffered bytes at the end: got %d, want %d", left, want)
	}
	for _, e := range g.errors.All() {
		if e.Message == "a request panicked" {
			g.t.Errorf("got a panic: %v", e.ContextMap())
		}
	}
}

// value returns a series' value.
func (g *gateway) value(series string) float64 {
	g.t.Helper()
	families, err := g.reg.Gather()
	if err != nil {
		g.t.Fatalf("Gather: got %v, want no error", err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			if f.GetName()+"{"+strings.Join(labels, ",")+"}" != series {
				continue
			}
			if m.Counter != nil {
				return m.Counter.GetValue()
			}
			return m.Gauge.GetValue()
		}
	}
	return 0
}

// settled waits until what was answered is accounted for, which comes behind the answer.
func (g *gateway) settled() {
	g.t.Helper()
	eventually(g.t, "nothing is in flight", func() bool { return g.InFlight() == 0 })
}

// line returns the one access line there is.
func (g *gateway) line() map[string]any {
	g.t.Helper()
	eventually(g.t, "an access line", func() bool { return g.lines.Len() > 0 })
	all := g.lines.TakeAll()
	if len(all) != 1 {
		g.t.Fatalf("access lines: got %d, want 1", len(all))
	}
	return all[0].ContextMap()
}

// client is a raw connection to the gateway.
type client struct {
	net.Conn
	*bufio.Reader
	t testing.TB
}

func (c *client) Read(p []byte) (int, error) { return c.Reader.Read(p) }

func (g *gateway) dial() *client {
	g.t.Helper()
	nc, err := net.Dial("tcp", g.addr)
	if err != nil {
		g.t.Fatalf("Dial: got %v, want no error", err)
	}
	return newClient(g.t, nc)
}

func newClient(t testing.TB, nc net.Conn) *client {
	t.Cleanup(func() { _ = nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(patience))
	return &client{nc, bufio.NewReader(nc), t}
}

func (c *client) say(text string) {
	c.t.Helper()
	if _, err := io.WriteString(c.Conn, text); err != nil {
		c.t.Fatalf("write a request: got %v, want no error", err)
	}
}

// post returns a POST with a body.
func post(path, body string, fields ...string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s", path, len(body), lines(fields), body)
}

func get(path string, fields ...string) string {
	return "GET " + path + " HTTP/1.1\r\nHost: gate\r\n" + lines(fields) + "\r\n"
}

func lines(fields []string) string {
	var b strings.Builder
	for _, f := range fields {
		b.WriteString(f + "\r\n")
	}
	return b.String()
}

const (
	chat       = "/v1/chat/completions"
	chatBody   = `{"model":"m","messages":[{"role":"user","content":"hello there"}]}`
	streamBody = `{"model":"m","stream":true,"messages":[{"role":"user","content":"hello there"}]}`
)

// answer is a response with its body, or the error that broke the body off.
type answer struct {
	*http.Response
	body string
	err  error
}

func (c *client) answer(method string) *answer {
	c.t.Helper()
	resp, err := http.ReadResponse(c.Reader, &http.Request{Method: method})
	if err != nil {
		c.t.Fatalf("read a response: got %v, want no error", err)
	}
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	return &answer{resp, string(body), err}
}

// ask sends a request and reads its answer.
func (c *client) ask(request string) *answer {
	c.t.Helper()
	c.say(request)
	method, _, _ := strings.Cut(request, " ")
	return c.answer(method)
}

// closed waits for the gateway to close the connection.
func (c *client) closed() {
	c.t.Helper()
	if n, err := io.Copy(io.Discard, c.Reader); n != 0 || isTimeout(err) {
		c.t.Errorf("behind the answer: got %d bytes and %v, want the end", n, err)
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func want(t testing.TB, what string, got, want any) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func writeFile(t testing.TB, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
