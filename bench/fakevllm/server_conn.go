package fakevllm

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
)

// maxHead is the longest request head in bytes.
const maxHead = 64 << 10

var (
	errGone = errors.New("the client left")
	errCut  = errors.New("cut")
)

// conn is one client connection and the request that it carries.
type conn struct {
	s   *Server
	nc  net.Conn
	raw net.Conn // below TLS
	br  *bufio.Reader
	req fasthttp.Request

	idle atomic.Bool // between two requests

	// Of the current request.
	f     *faultSet
	path  string
	id    string // x-request-id of the client, "" when there was none
	rid   string // x-request-id of the answer
	model bool   // the path runs the model
	keep  bool   // the connection may be used again
	gone  <-chan struct{}
	leave func()
	out   []byte
}

func newConn(s *Server, nc, raw net.Conn) *conn {
	c := &conn{s: s, nc: nc, raw: raw}
	c.br = bufio.NewReaderSize(reader{c}, maxHead)
	c.idle.Store(true)
	return c
}

// reader reads the socket, no faster than Faults.ReadRate.
type reader struct{ c *conn }

func (r reader) Read(p []byte) (int, error) {
	rate := r.c.s.faults.Load().ReadRate
	if rate == 0 {
		return r.c.nc.Read(p)
	}
	n, err := r.c.nc.Read(p[:min(len(p), max(1, rate/20))])
	wait(time.Second*time.Duration(n)/time.Duration(rate), r.c.s.stop, nil)
	return n, err
}

func (c *conn) serve() {
	defer c.s.forget(c)
	defer func() {
		_ = c.nc.Close()
		if c.leave != nil {
			c.leave()
		}
	}()
	for used, faulty := false, false; ; used = true {
		c.idle.Store(true)
		if c.s.draining.Load() || c.s.faults.Load().Refuse {
			return
		}
		if used {
			limit := c.s.opt.IdleTimeout
			d := time.Duration(c.s.faults.Load().IdleClose)
			if faulty = d > 0; faulty {
				limit = d
			}
			_ = c.nc.SetReadDeadline(time.Now().Add(limit))
		}
		if _, err := c.br.Peek(1); err != nil {
			if faulty && errors.Is(err, os.ErrDeadlineExceeded) {
				c.s.fault("idle_close")
			}
			return
		}
		c.idle.Store(false)
		_ = c.nc.SetReadDeadline(time.Time{})
		if err := c.request(); err != nil || !c.keep {
			return
		}
	}
}

// request reads one request and answers it. After an error the connection is of no use.
func (c *conn) request() error {
	c.req.Reset()
	h := &c.req.Header
	h.DisableNormalizing()
	c.f, c.keep, c.gone, c.leave, c.model = c.s.faults.Load(), false, nil, nil, false
	if err := h.Read(c.br); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		c.path, c.rid = "", c.s.newID()
		return c.reply(400, "text/plain; charset=utf-8", []byte("Invalid HTTP request received."))
	}
	path, _, _ := bytes.Cut(h.RequestURI(), []byte("?"))
	c.path = string(path)
	c.model = runsModel(c.path)
	c.id = string(headerValue(h.RawHeaders(), "x-request-id"))
	if c.rid = c.id; c.rid == "" {
		c.rid = c.s.newID()
	}
	if limit := c.f.BodyLimit; limit > 0 && h.ContentLength() > limit && !c.control() {
		c.s.fault("body_limit")
		return c.fail(413, "Request body is too large.")
	}
	if h.IsHTTP11() && bytes.EqualFold(headerValue(h.RawHeaders(), "expect"), []byte("100-continue")) {
		if err := c.write([]byte("HTTP/1.1 100 Continue\r\n\r\n")); err != nil {
			return err
		}
	}
	if err := c.req.ContinueReadBody(c.br, c.s.opt.MaxBody, false); err != nil {
		if errors.Is(err, fasthttp.ErrBodyTooLarge) {
			return c.fail(413, "Request body is too large.")
		}
		return errGone
	}
	c.keep = !h.ConnectionClose()
	if !c.s.opt.Instant {
		c.record()
	}
	err := c.route()
	if c.leave != nil {
		c.leave()
	}
	if err == nil && c.f.Unasked && c.model {
		err = c.unasked()
	}
	return err
}

func (c *conn) record() {
	head := &RequestHead{
		Method: string(c.req.Header.Method()), URI: string(c.req.Header.RequestURI()),
		Headers: string(c.req.Header.RawHeaders()), Body: len(c.req.Body()),
	}
	c.s.count.mu.Lock()
	c.s.count.paths[c.path]++
	if !c.control() {
		c.s.count.last = head
	}
	c.s.count.mu.Unlock()
}

// watch closes gone when the client leaves. Until leave was called nobody else
// may read the connection; what arrived meanwhile stays in its buffer.
func (c *conn) watch() {
	if c.gone != nil {
		return
	}
	gone, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		_, err := c.br.Peek(1) // data: the next request, and no way to see an end behind it
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			close(gone)
		}
	}()
	c.gone = gone
	c.leave = func() {
		_ = c.nc.SetReadDeadline(time.Unix(1, 0))
		<-done
		_ = c.nc.SetReadDeadline(time.Time{})
		c.gone, c.leave = nil, nil
	}
}

// pause waits and returns an error when the client or the server left. A
// negative time never ends.
func (c *conn) pause(d time.Duration) error {
	if d == 0 {
		return nil
	}
	c.watch()
	var fire <-chan time.Time
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		fire = t.C
	}
	select {
	case <-fire:
		return nil
	case <-c.gone:
		return errGone
	case <-c.s.stop:
		return errCut
	}
}

// write sends bytes as they are, cut into pieces when Faults say so.
func (c *conn) write(b []byte) error {
	if c.f.SplitBytes == 0 || !c.model {
		return c.send(b)
	}
	c.s.fault("split")
	for len(b) > 0 {
		n := min(len(b), c.f.SplitBytes)
		if err := c.send(b[:n]); err != nil {
			return err
		}
		if b = b[n:]; len(b) > 0 {
			if err := c.pause(time.Duration(c.f.SplitDelay)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *conn) send(b []byte) error {
	if _, err := c.nc.Write(b); err != nil {
		select {
		case <-c.s.stop:
			return errCut
		default:
			return errGone
		}
	}
	return nil
}

// reset closes the connection with RST.
func (c *conn) reset() {
	if t, ok := c.raw.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.raw.Close()
}

// finish closes the connection with FIN, below TLS and without its goodbye.
func (c *conn) finish() { _ = c.raw.Close() }

// head appends a response head up to its last line; length < 0 means chunked.
func (c *conn) head(dst []byte, status int, contentType string, length int) []byte {
	dst = append(dst, "HTTP/1.1 "...)
	dst = strconv.AppendInt(dst, int64(status), 10)
	dst = append(dst, ' ')
	dst = append(dst, fasthttp.StatusMessage(status)...)
	dst = append(dst, "\r\ndate: "...)
	dst = time.Now().UTC().AppendFormat(dst, "Mon, 02 Jan 2006 15:04:05 GMT")
	dst = append(dst, "\r\nserver: uvicorn\r\n"...)
	if length >= 0 {
		dst = append(dst, "content-length: "...)
		dst = append(appendInt(dst, length), "\r\n"...)
	}
	if contentType != "" {
		dst = append(dst, "content-type: "...)
		dst = append(append(dst, contentType...), "\r\n"...)
	}
	dst = append(dst, "x-request-id: "...)
	dst = append(append(dst, c.rid...), "\r\n"...)
	if c.model {
		for _, line := range c.f.Headers {
			dst = append(append(dst, line...), "\r\n"...)
		}
		if n := c.f.HeaderBytes; n > 0 {
			dst = append(dst, "x-fill: "...)
			dst = append(append(dst, bytes.Repeat([]byte("f"), n)...), "\r\n"...)
		}
	}
	if length < 0 {
		dst = append(dst, "transfer-encoding: chunked\r\n"...)
	}
	if !c.keep {
		dst = append(dst, "connection: close\r\n"...)
	}
	return dst
}

// newID returns 16 hexadecimal digits that this server has not used before.
func (s *Server) newID() string {
	const hex = "0123456789abcdef"
	var b [16]byte
	h := mix(s.ids.Add(1) ^ uint64(s.started.UnixNano()))
	for i := range b {
		b[i], h = hex[h&15], h>>4
	}
	return string(b[:])
}

// reply sends a whole response that no fault touches.
func (c *conn) reply(status int, contentType string, body []byte, lines ...string) error {
	if c.s.draining.Load() {
		c.keep = false
	}
	c.out = c.head(c.out[:0], status, contentType, len(body))
	for _, line := range lines {
		c.out = append(append(c.out, line...), "\r\n"...)
	}
	c.out = append(c.out, "\r\n"...)
	c.out = append(c.out, body...)
	return c.write(c.out)
}

// unasked sends a response without a request, as a confused server would.
func (c *conn) unasked() error {
	if err := c.pause(time.Duration(c.f.UnaskedDelay)); err != nil {
		return err
	}
	if c.leave != nil {
		c.leave()
	}
	c.s.fault("unasked")
	return c.reply(200, "application/json", []byte(`{"id":"unasked","object":"chat.completion","choices":[]}`))
}

// headerValue returns the value of the first header line with this name, in
// lower case, from raw header lines.
func headerValue(raw []byte, name string) []byte {
	for len(raw) > 0 {
		line, rest, _ := bytes.Cut(raw, []byte("\n"))
		raw = rest
		if len(line) > len(name) && line[len(name)] == ':' && bytes.EqualFold(line[:len(name)], []byte(name)) {
			return bytes.TrimSpace(line[len(name)+1:])
		}
	}
	return nil
}
