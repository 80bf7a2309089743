package proxy

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"kvgate/configs"
	"kvgate/routing"
)

// Errors of an attempt on a replica.
var (
	errDial     = errors.New("the replica cannot be reached")
	errLeft     = errors.New("the client has left")
	errHeadSize = errors.New("the response head is larger than limits.upstream_header")
)

// The space that a connection's buffer keeps around what was read, so that a
// chunk can be framed where it lies.
const (
	headroom = 16
	tailroom = 2
)

// A body larger than this may fill the sockets while the replica has long
// refused it; every earlyCheck it is looked whether an answer is there.
const (
	largeBody  = 64 << 10
	earlyCheck = 100 * time.Millisecond
	earlyWait  = time.Second // for the answer behind a failed write
)

// transport holds the connections to the replicas.
type transport struct {
	limits  atomic.Pointer[upstreamLimits]
	errors  func(e *routing.Endpoint, reason string)
	buffers *buffers

	mu     sync.Mutex
	listed []*pool // those with idle connections
	others []*pool // of endpoints whose Transport is another transport's
	closed atomic.Bool

	stop chan struct{}
	done chan struct{}
}

// upstreamLimits are the settings of the transport in force.
type upstreamLimits struct {
	configs.Upstream
	head int // bytes of a response head
	all  *configs.Credentials
}

func newUpstreamLimits(s *configs.Settings) (*upstreamLimits, error) {
	l := &upstreamLimits{Upstream: s.Upstream, head: int(s.Limits.UpstreamHeader)}
	var err error
	if l.all, err = s.Upstream.Credentials(); err != nil {
		return nil, err
	}
	return l, nil
}

// credentials returns what a replica is shown and must show.
func (l *upstreamLimits) credentials(e *routing.Endpoint) *configs.Credentials {
	if own := e.Credentials(); own != nil {
		return own
	}
	return l.all
}

func newTransport(l *upstreamLimits, b *buffers, onError func(*routing.Endpoint, string)) *transport {
	t := &transport{errors: onError, buffers: b, stop: make(chan struct{}), done: make(chan struct{})}
	t.limits.Store(l)
	go t.sweep()
	return t
}

// pool returns the connections of a replica.
func (t *transport) pool(e *routing.Endpoint) (*pool, error) {
	if p, ok := e.Transport.Load().(*pool); ok && p.t == t {
		return p, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.others {
		if p.endpoint == e {
			return p, nil
		}
	}
	u, err := url.Parse(e.URL())
	if err != nil || u.Hostname() == "" {
		return nil, fmt.Errorf("replica %s: its URL is not scheme://host:port", e.ID())
	}
	port := u.Port()
	p := &pool{t: t, endpoint: e, authority: u.Host, serverName: u.Hostname(), secure: u.Scheme == "https"}
	switch {
	case port == "" && p.secure:
		port = "443"
	case port == "":
		port = "80"
	}
	p.address = net.JoinHostPort(u.Hostname(), port)
	if !e.Transport.CompareAndSwap(nil, p) {
		if q, ok := e.Transport.Load().(*pool); ok && q.t == t {
			return q, nil
		}
		t.others = append(t.others, p)
	}
	return p, nil
}

// sweep closes connections that were idle for too long, so that none lingers
// half-closed when no request comes.
func (t *transport) sweep() {
	defer close(t.done)
	for {
		pause := min(max(t.limits.Load().IdleTimeout/2, 20*time.Millisecond), 2*time.Second)
		timer := time.NewTimer(pause)
		select {
		case <-t.stop:
			timer.Stop()
			return
		case <-timer.C:
		}
		t.mu.Lock()
		kept := t.listed[:0]
		for _, p := range t.listed {
			if p.expire(time.Now().Add(-t.limits.Load().IdleTimeout)) {
				kept = append(kept, p)
			}
		}
		clear(t.listed[len(kept):])
		t.listed = kept
		t.mu.Unlock()
	}
}

// close closes the idle connections and ends the sweep. Connections that are
// given back later are closed.
func (t *transport) close() {
	if !t.closed.Swap(true) {
		close(t.stop)
	}
	<-t.done
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.listed {
		p.expire(time.Now().Add(time.Hour))
	}
}

// pool holds the idle connections to one replica, the most recently used last.
type pool struct {
	t          *transport
	endpoint   *routing.Endpoint
	address    string // host:port to dial
	authority  string // as in the URL: the Host field
	serverName string // for TLS
	secure     bool

	mu     sync.Mutex
	idle   []*upConn
	listed bool // in t.listed
}

// expire closes what was idle since before the time and says whether any is left.
func (p *pool) expire(before time.Time) bool {
	p.mu.Lock()
	n := 0
	for n < len(p.idle) && p.idle[n].idleSince.Before(before) {
		n++
	}
	old := append([]*upConn(nil), p.idle[:n]...)
	p.idle = append(p.idle[:0], p.idle[n:]...)
	p.listed = len(p.idle) > 0
	left := p.listed
	p.mu.Unlock()
	for _, c := range old {
		c.abort()
	}
	return left
}

// reuse returns an idle connection on which nothing is waiting to be read, nil
// when there is none.
func (p *pool) reuse(now time.Time, limit time.Duration) *upConn {
	for {
		p.mu.Lock()
		n := len(p.idle)
		if n == 0 {
			p.mu.Unlock()
			return nil
		}
		c := p.idle[n-1]
		p.idle[n-1] = nil
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		if now.Sub(c.idleSince) >= limit {
			c.abort()
			continue
		}
		switch c.probe() {
		case probeQuiet:
			c.reused = true
			return c
		case probeData:
			if !p.secure { // TLS has records of its own
				p.t.errors(p.endpoint, "poisoned")
			}
		}
		c.abort()
	}
}

// put keeps a connection for its next use, or closes it.
func (p *pool) put(c *upConn, now time.Time) {
	p.t.buffers.put(c.buf)
	c.buf = nil
	c.idleSince = now
	p.mu.Lock()
	if len(p.idle) >= p.t.limits.Load().MaxIdle {
		p.mu.Unlock()
		c.abort()
		return
	}
	p.idle = append(p.idle, c)
	list := !p.listed
	p.listed = true
	p.mu.Unlock()
	if list {
		p.t.mu.Lock()
		p.t.listed = append(p.t.listed, p)
		p.t.mu.Unlock()
	}
	if p.t.closed.Load() {
		p.expire(time.Now().Add(time.Hour))
	}
}

// dial opens a connection. cancel, when not nil, is told how to break off.
func (p *pool) dial(l *upstreamLimits, attach func(aborter) bool, detach func()) (*upConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), l.ConnectTimeout)
	defer cancel()
	if !attach(cancelFunc(cancel)) {
		return nil, errLeft
	}
	defer detach()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", p.address)
	if err != nil {
		return nil, errors.Join(errDial, err)
	}
	plain := vectored(direct(conn))
	c := &upConn{Conn: plain, tcp: plain, pool: p}
	c.initProbe()
	if p.secure {
		cfg := l.credentials(p.endpoint).TLS.Clone()
		cfg.ServerName = cmp.Or(cfg.ServerName, p.serverName)
		secure := tls.Client(plain, cfg)
		if err := secure.HandshakeContext(ctx); err != nil {
			_ = conn.Close()
			return nil, errors.Join(errDial, err)
		}
		c.Conn = secure
	}
	return c, nil
}

// aborter is what can be broken off from another goroutine.
type aborter interface{ abort() }

type cancelFunc context.CancelFunc

func (f cancelFunc) abort() { f() }

// upConn is a connection to a replica. One goroutine uses it at a time, but for
// abort.
type upConn struct {
	net.Conn              // plain or TLS
	tcp      vectorWriter // what is closed: tls.Conn.Close may wait for the peer
	pool     *pool
	prober

	idleSince time.Time
	reused    bool // has carried a request before
	answered  bool // a byte of the response has arrived

	buf  *buffer // what was read and not consumed is buf.b[r:w]
	r, w int
	full bool // the last read left no room: a larger buffer is worth it

	until     time.Time     // the next reads must end, when not zero
	stall     time.Duration // else: the longest pause between two reads
	lastRead  time.Time
	readArmed time.Time // the deadlines that the poller knows
	sendArmed time.Time

	vec vector // what is being sent
}

// abort closes the connection; what waits for it fails. It never blocks.
func (c *upConn) abort() { _ = c.tcp.Close() }

// drop closes the connection and gives its buffer back.
func (c *upConn) drop() {
	c.abort()
	c.pool.t.buffers.put(c.buf)
	c.buf = nil
}

// open makes the connection ready for a request.
func (c *upConn) open() {
	c.buf = c.pool.t.buffers.get(classes[0])
	c.r, c.w, c.full, c.answered = headroom, headroom, false, false
}

// leftover is what the replica sent beyond its answer.
func (c *upConn) leftover() int { return c.w - c.r }

// fill reads once. It may move what is buffered.
func (c *upConn) fill() error {
	b := c.pool.t.buffers
	if c.r == c.w {
		c.r, c.w = headroom, headroom
		if c.full && len(c.buf.b) < classes[2] {
			b.put(c.buf)
			c.buf = b.get(len(c.buf.b) + 1)
		}
	} else if c.w == len(c.buf.b)-tailroom {
		larger := b.get(len(c.buf.b) + 1)
		c.w = headroom + copy(larger.b[headroom:], c.buf.b[c.r:c.w])
		c.r = headroom
		b.put(c.buf)
		c.buf = larger
	}
	room := c.buf.b[c.w : len(c.buf.b)-tailroom]
	n, err := c.read(room)
	c.full = n == len(room)
	c.w += n
	if n > 0 {
		c.answered = true
		return nil
	}
	if err == nil {
		return io.ErrNoProgress
	}
	return err
}

// read reads once under the limits. The poller's deadline is moved only when it
// is too late, or has passed too early: it costs more than the read's own share.
func (c *upConn) read(p []byte) (int, error) {
	for {
		limit := c.until
		if limit.IsZero() {
			limit = c.lastRead.Add(c.stall)
		}
		if c.readArmed.IsZero() || c.readArmed.After(limit) {
			c.readArmed = limit
			if err := c.SetReadDeadline(limit); err != nil {
				return 0, err
			}
		}
		n, err := c.Conn.Read(p)
		c.lastRead = time.Now()
		if n == 0 && err != nil && errors.Is(err, os.ErrDeadlineExceeded) && c.lastRead.Before(limit) {
			c.readArmed = time.Time{}
			if c.until.IsZero() {
				c.lastRead = limit.Add(-c.stall)
			}
			continue
		}
		return n, err
	}
}

// send writes a request, or a part of a long one. errEarly means that the
// replica answered before it had taken everything.
func (c *upConn) send(now time.Time, head, body []byte, stall time.Duration, part bool) error {
	if c.pool.secure {
		if err := c.SetWriteDeadline(now.Add(stall)); err != nil {
			return err
		}
		if _, err := c.Write(head); err != nil || len(body) == 0 {
			return err
		}
		_, err := c.Write(body)
		return err
	}
	c.vec = vector{head, body}
	defer c.forget()
	progress := now
	for {
		wait := stall
		if part || len(body) > largeBody {
			wait = earlyCheck
		}
		if c.sendArmed.Before(now.Add(wait/2)) || c.sendArmed.After(now.Add(wait)) {
			c.sendArmed = now.Add(wait)
			if err := c.SetWriteDeadline(c.sendArmed); err != nil {
				return err
			}
		}
		n, err := c.tcp.writev(&c.vec)
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		now = time.Now()
		if n > 0 {
			progress = now
		}
		if c.probe() != probeQuiet {
			return errEarly
		}
		if now.Sub(progress) >= stall {
			return err
		}
	}
}

var errEarly = errors.New("the replica answered before it had read the request")

func (c *upConn) forget() { c.vec = vector{} }

var blankLine = []byte("\r\n\r\n")

// readHead reads up to the end of a response head, of at most limit bytes. The
// result is an alias of the buffer, valid until the next fill.
func (c *upConn) readHead(limit int) ([]byte, error) {
	seen := 0
	for {
		if i := bytes.Index(c.buf.b[c.r+max(seen-3, 0):c.w], blankLine); i >= 0 {
			end := c.r + max(seen-3, 0) + i + len(blankLine)
			if end-c.r > limit {
				return nil, errHeadSize
			}
			head := c.buf.b[c.r:end]
			c.r = end
			return head, nil
		}
		seen = c.w - c.r
		if seen >= limit {
			return nil, errHeadSize
		}
		if err := c.fill(); err != nil {
			return nil, err
		}
	}
}
