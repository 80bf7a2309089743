package scrape

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"time"
)

// Bounds of one answer.
const (
	maxHead = 16 << 10
	maxPage = 8 << 20
	// maxDrained is the largest body of an unwanted answer that is read for the sake of its connection.
	maxDrained = 64 << 10
)

// result says how a probe ended.
type result uint8

const (
	resultOK        result = iota
	resultConnect          // no connection: refused, unreachable, unknown host, handshake
	resultTimeout          // connected, and no whole answer in time
	resultBroken           // the connection broke, or the answer is no HTTP
	resultTooLarge         // longer than maxPage
	resultStatus           // a status that is not 200
	resultNoMetrics        // the replica has no such page: 404, 405 or 501
	resultEmpty            // the page has none of the series of a known engine
	resultCount
)

var resultNames = [resultCount]string{"ok", "connect", "timeout", "broken", "too_large", "status", "no_metrics", "empty"}

// probeError is a failed probe.
type probeError struct {
	result result
	err    error
}

func (e *probeError) Error() string { return e.err.Error() }
func (e *probeError) Unwrap() error { return e.err }

// target is one page of one replica.
type target struct {
	address string      // host:port to connect to
	tls     *tls.Config // nil for http
	request []byte      // the whole request
}

// same tells whether both targets can share a connection.
func (t *target) same(u *target) bool { return t.address == u.address && t.tls == u.tls }

// newTarget makes the request for a page. Targets that may share a connection need the same config.
func newTarget(scheme, host, port, path, accept, version, authorization string, config *tls.Config) *target {
	address := net.JoinHostPort(host, port)
	named := address
	if scheme == "http" && port == "80" || scheme == "https" && port == "443" {
		named = address[:len(address)-len(port)-1]
	}
	request := "GET " + path + " HTTP/1.1\r\nHost: " + named + "\r\nUser-Agent: kvgate/" + version + "\r\nAccept: " + accept + "\r\n"
	if authorization != "" {
		request += "Authorization: " + authorization + "\r\n"
	}
	t := &target{address: address, request: []byte(request + "\r\n")}
	if scheme == "https" {
		t.tls = config
	}
	return t
}

// page is a pooled body.
type page struct{ body []byte }

// pages lends page buffers to all workers: far fewer are in use at once than there are replicas.
type pages struct{ pool sync.Pool }

func (p *pages) get() *page {
	if v, ok := p.pool.Get().(*page); ok {
		v.body = v.body[:0]
		return v
	}
	return &page{}
}

// put takes a page back; nothing may point into it any more.
func (p *pages) put(v *page) {
	if v != nil && cap(v.body) <= 1<<20 {
		p.pool.Put(v)
	}
}

// dialFunc connects, as net.Dialer.DialContext does.
type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// client sends GET requests over one kept connection. It takes 60 us of processor
// time per page of 70 KB, parsing included; net/http takes 80 without it
// (BenchmarkScrape100, BenchmarkNetHTTP), and two more goroutines per replica.
type client struct {
	dial   dialFunc
	pages  *pages
	serves *target // one of the targets that share this client

	fresh bool // the last get has made a connection

	mu     sync.Mutex
	raw    net.Conn // what abort closes
	closed bool

	conn net.Conn // raw, or TLS over it; nil when there is none
	buf  []byte   // read and not yet used: buf[from:to]
	from int
	to   int
}

// get fetches a page and gives it to the caller, who puts it back; it is nil on
// an error. The error is a *probeError; a status other than 200 is one.
func (c *client) get(ctx context.Context, t *target, connectTimeout time.Duration, deadline time.Time) (*page, error) {
	c.fresh = false
	for {
		reused := c.conn != nil
		if !reused {
			if err := c.connect(ctx, t, connectTimeout, deadline); err != nil {
				return nil, &probeError{resultConnect, err}
			}
			c.fresh = true
		}
		p, keep, err := c.exchange(t, deadline)
		if !keep {
			c.disconnect()
		}
		if err != nil && reused && isStale(err) && ctx.Err() == nil {
			continue // the server had closed it meanwhile
		}
		return p, err
	}
}

func (c *client) connect(ctx context.Context, t *target, timeout time.Duration, deadline time.Time) error {
	if until := time.Now().Add(timeout); until.Before(deadline) {
		deadline = until
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	raw, err := c.dial(ctx, "tcp", t.address)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.raw = raw
	closed := c.closed
	c.mu.Unlock()
	if closed {
		_ = raw.Close()
		return net.ErrClosed
	}
	c.conn, c.from, c.to = raw, 0, 0
	if t.tls != nil {
		conn := tls.Client(raw, t.tls)
		if err := conn.HandshakeContext(ctx); err != nil {
			c.disconnect()
			return fmt.Errorf("TLS: %w", err)
		}
		c.conn = conn
	}
	return nil
}

func (c *client) disconnect() {
	if c.conn != nil {
		_ = c.raw.Close() // not the TLS connection: its farewell may block
		c.conn = nil
	}
}

// abort ends the current and every later get. Any goroutine may call it.
func (c *client) abort() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if c.raw != nil {
		_ = c.raw.Close()
	}
}

// staleError: the connection broke before the first byte of an answer.
type staleError struct{ error }

func (e *staleError) Unwrap() error { return e.error }

func isStale(err error) bool {
	var stale *staleError
	return errors.As(err, &stale)
}

// broken wraps an error of a connection; unanswered says that no byte of an answer has come.
func broken(err error, unanswered bool) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return &probeError{resultTimeout, errors.New("no answer in time")}
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if unanswered {
		err = &staleError{err}
	}
	return &probeError{resultBroken, err}
}

func malformed(format string, args ...any) error {
	return &probeError{resultBroken, fmt.Errorf("malformed answer: "+format, args...)}
}

// exchange sends one request and reads the answer. keep: the connection can take another one.
func (c *client) exchange(t *target, deadline time.Time) (p *page, keep bool, err error) {
	if err := c.conn.SetDeadline(deadline); err != nil {
		return nil, false, broken(err, true)
	}
	if _, err := c.conn.Write(t.request); err != nil {
		return nil, false, broken(err, true)
	}
	if c.from == c.to {
		if err := c.fill(); err != nil {
			return nil, false, broken(err, true)
		}
	}
	var h head
	for {
		if h, err = c.head(); err != nil {
			return nil, false, err
		}
		if h.status >= 200 {
			break
		}
	}
	limit := maxPage
	if h.status != 200 {
		limit = maxDrained
	}
	if h.status == 204 || h.status == 304 {
		h.length, h.chunked = 0, false
	}
	p = c.pages.get()
	switch {
	case h.chunked:
		err = c.chunked(p, limit)
	case h.length > int64(limit):
		err = tooLarge(limit)
	case h.length >= 0:
		err = c.take(p, int(h.length))
	default:
		h.keep = false
		err = c.toEnd(p, limit)
	}
	keep = h.keep && err == nil && c.from == c.to // bytes that nobody asked for are nobody's answer
	if h.status != 200 {
		err = statusError(h.status)
	}
	if err != nil {
		c.pages.put(p)
		return nil, keep, err
	}
	return p, keep, nil
}

func statusError(status int) error {
	r := resultStatus
	switch status {
	case 404, 405, 501:
		r = resultNoMetrics
	}
	return &probeError{r, &httpStatus{status}}
}

// httpStatus is an answer that is not 200.
type httpStatus struct{ status int }

func (e *httpStatus) Error() string { return "status " + strconv.Itoa(e.status) }

func tooLarge(limit int) error {
	return &probeError{resultTooLarge, fmt.Errorf("the answer is larger than %d bytes", limit)}
}

// fill reads more into buf, behind what is there.
func (c *client) fill() error {
	switch {
	case c.from == c.to:
		c.from, c.to = 0, 0
	case c.to == len(c.buf) && c.from > 0:
		c.to = copy(c.buf, c.buf[c.from:c.to])
		c.from = 0
	}
	if c.to == len(c.buf) {
		c.buf = append(c.buf, make([]byte, max(len(c.buf), 2<<10))...)
	}
	n, err := c.conn.Read(c.buf[c.to:])
	c.to += n
	if n > 0 {
		return nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return err
}

// line returns the next line without its end. It is valid until the next call of fill.
func (c *client) line() ([]byte, error) {
	for searched := 0; ; {
		if i := bytes.IndexByte(c.buf[c.from+searched:c.to], '\n'); i >= 0 {
			line := c.buf[c.from : c.from+searched+i]
			c.from += searched + i + 1
			return bytes.TrimSuffix(line, []byte("\r")), nil
		}
		searched = c.to - c.from
		if searched > maxHead {
			return nil, malformed("a line of more than %d bytes", maxHead)
		}
		if err := c.fill(); err != nil {
			return nil, broken(err, false)
		}
	}
}

// head is what matters of a response head.
type head struct {
	status  int
	length  int64 // of the body, -1 when it is not told
	chunked bool
	keep    bool
}

// head reads a status line and the header fields.
func (c *client) head() (head, error) {
	h := head{length: -1}
	line, err := c.line()
	if err != nil {
		return h, err
	}
	if len(line) < 12 || string(line[:7]) != "HTTP/1." || line[8] != ' ' || len(line) > 12 && line[12] != ' ' {
		return h, malformed("%.40q is no HTTP/1.1 status line", line)
	}
	h.keep = line[7] >= '1'
	if h.status = int(integer(line[9:12])); h.status < 100 || h.status == 101 {
		return h, malformed("status %.3q", line[9:12])
	}
	for total := len(line); ; {
		if line, err = c.line(); err != nil {
			return h, err
		}
		if len(line) == 0 {
			return h, nil
		}
		if total += len(line); total > maxHead {
			return h, malformed("a head of more than %d bytes", maxHead)
		}
		if err := h.field(line); err != nil {
			return h, err
		}
	}
}

func (h *head) field(line []byte) error {
	key, value, ok := bytes.Cut(line, []byte(":"))
	if !ok {
		return malformed("header line %.40q", line)
	}
	value = bytes.Trim(value, " \t")
	switch {
	case bytes.EqualFold(key, []byte("content-length")):
		n, err := strconv.ParseUint(string(value), 10, 62)
		if err != nil || h.chunked || h.length >= 0 && h.length != int64(n) {
			return malformed("content-length %.40q", value)
		}
		h.length = int64(n)
	case bytes.EqualFold(key, []byte("transfer-encoding")):
		if !bytes.EqualFold(value, []byte("chunked")) || h.length >= 0 || h.chunked {
			return malformed("transfer-encoding %.40q", value)
		}
		h.chunked = true
	case bytes.EqualFold(key, []byte("content-encoding")):
		if !bytes.EqualFold(value, []byte("identity")) {
			return malformed("content-encoding %.40q, which was not asked for", value)
		}
	case bytes.EqualFold(key, []byte("connection")):
		switch {
		case bytes.EqualFold(value, []byte("close")):
			h.keep = false
		case bytes.EqualFold(value, []byte("keep-alive")):
			h.keep = true
		}
	}
	return nil
}

// take appends n bytes of the body to the page.
func (c *client) take(p *page, n int) error {
	start := len(p.body)
	p.grow(n)
	p.body = p.body[:start+n]
	used := copy(p.body[start:], c.buf[c.from:c.to])
	c.from += used
	if _, err := io.ReadFull(c.conn, p.body[start+used:]); err != nil {
		return broken(err, false)
	}
	return nil
}

// grow makes room for n more bytes, generously: pages of a replica grow slowly.
func (p *page) grow(n int) {
	if need := len(p.body) + n; need > cap(p.body) {
		p.body = append(make([]byte, 0, need+need/4), p.body...)
	}
}

// chunked appends a chunked body to the page. Chunk extensions and trailers are skipped.
func (c *client) chunked(p *page, limit int) error {
	for {
		line, err := c.line()
		if err != nil {
			return err
		}
		size, _, _ := bytes.Cut(line, []byte(";"))
		n, err := strconv.ParseUint(string(bytes.TrimRight(size, " \t")), 16, 31)
		if err != nil {
			return malformed("chunk size %.40q", line)
		}
		if n == 0 {
			break
		}
		if len(p.body)+int(n) > limit {
			return tooLarge(limit)
		}
		if err := c.take(p, int(n)); err != nil {
			return err
		}
		if line, err = c.line(); err != nil {
			return err
		}
		if len(line) != 0 {
			return malformed("a chunk is longer than its size")
		}
	}
	for total := 0; ; {
		line, err := c.line()
		if err != nil {
			return err
		}
		if len(line) == 0 {
			return nil
		}
		if total += len(line); total > maxHead {
			return malformed("trailers of more than %d bytes", maxHead)
		}
	}
}

// toEnd appends all that comes until the connection closes.
func (c *client) toEnd(p *page, limit int) error {
	p.body = append(p.body, c.buf[c.from:c.to]...)
	c.from = c.to
	for {
		p.grow(4 << 10)
		n, err := c.conn.Read(p.body[len(p.body):cap(p.body)])
		p.body = p.body[:len(p.body)+n]
		switch {
		case len(p.body) > limit:
			return tooLarge(limit)
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return broken(err, false)
		}
	}
}
