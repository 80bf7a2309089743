package proxy

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// connState says what a client connection does.
type connState int32

const (
	connIdle    connState = iota // waits for a request: may be closed at any time
	connReading                  // bytes of a request have arrived
	connClosing                  // was idle when the server shut down
)

// conn is a client connection. fasthttp reads and writes through it; the limits
// in time are kept here, as fasthttp's are absolute. Only leave and the state may
// be touched by other goroutines than the connection's own.
type conn struct {
	net.Conn          // as accepted: TCP, TLS over it, or whatever the listener gives
	raw      net.Conn // beneath TLS
	s        *Server
	remote   string // host:port
	ip       string
	trusted  bool    // a proxy whose forwarding fields are believed
	watched  watched // the watcher's own

	state atomic.Int32 // connState

	mu       sync.Mutex
	upstream aborter // what works for this client, broken off when it leaves
	gone     bool
	cut      bool // by Shutdown

	framing framer

	// Reading. stash is a byte that a read-ahead watcher has taken.
	since     time.Time // of the last read, or of the last answer
	head      time.Time // of the first byte of the request
	first     bool      // no request has arrived yet
	body      bool      // reading a body: the limit is between two reads, and that of all from bodyFrom on
	bodyFrom  time.Time // when the body began; later when the replica held the client up
	bodyRead  int64     // bytes of it
	readArmed time.Time // the deadlines that the poller knows
	stash     []byte

	owns      bool      // the answer is sent past fasthttp, whose own is thrown away
	clock     time.Time // about now: good enough for a deadline, and cheaper
	sendArmed time.Time
	reset     bool // an answer that has no other end than the connection's broke off
	linger    bool // a refusal was sent while the client still sends
	closed    atomic.Bool
}

func newConn(s *Server, c net.Conn) *conn {
	now := time.Now()
	k := &conn{Conn: c, raw: c, s: s, first: true, since: now, head: now, clock: now}
	if t, ok := c.(*tls.Conn); ok {
		k.raw = t.NetConn()
	}
	if a := c.RemoteAddr(); a != nil {
		k.remote, k.ip = a.String(), "unknown" // a Unix socket has no address
		if host, _, err := net.SplitHostPort(k.remote); err == nil {
			k.ip = host
		}
		k.trusted = s.live.Load().trusted.contain(k.ip)
	}
	return k
}

// leave is called by the watcher when the client has closed its side, and by
// Shutdown. What works for it is broken off.
func (c *conn) leave() {
	c.mu.Lock()
	c.gone = true
	if c.upstream != nil {
		c.upstream.abort()
	}
	c.mu.Unlock()
}

// left says whether the client has left.
func (c *conn) left() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gone
}

// attach says what to break off when the client leaves; false when it has left.
func (c *conn) attach(a aborter) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return false
	}
	c.upstream = a
	return true
}

// detach takes back what attach said. Nothing is broken off behind it.
func (c *conn) detach() {
	c.mu.Lock()
	c.upstream = nil
	c.mu.Unlock()
}

// cutOff ends what the connection does at once: Shutdown's last word.
func (c *conn) cutOff() {
	c.mu.Lock()
	c.cut = true
	c.mu.Unlock()
	c.leave()
	_ = c.raw.Close()
}

func (c *conn) wasCut() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cut
}

// reading says that a request's head is complete; false when the connection is
// being closed and the request must not be served.
func (c *conn) reading() bool {
	c.owns = false
	c.first = false
	c.body, c.bodyFrom, c.bodyRead = true, c.since, 0
	c.state.CompareAndSwap(int32(connIdle), int32(connReading)) // a pipelined request came without a read
	return connState(c.state.Load()) != connClosing
}

// answered says when the answer was complete.
func (c *conn) answered(at time.Time) { c.since, c.clock = at, at }

// headRead is how much is read at once of a request whose predecessor had a large
// body: a head, mostly. The body is then read to where it stays; of 64 KB that
// saves copying 32, and costs no further read.
const headRead = 4 << 10

// waiting says that the answer is out and the next read is for another request.
func (c *conn) waiting() {
	c.body = false
	c.state.Store(int32(connIdle))
}

// Read hands on what the strict reader lets pass.
func (c *conn) Read(p []byte) (int, error) { return c.framing.read(p, c.readRaw) }

// readRaw reads under the limit of the phase: idle_timeout for the first byte of a
// further request, header_timeout for a head, body_timeout between two reads of
// a body. The poller's deadline is moved only when it is too late, or has passed
// too early: most reads cost no timer.
func (c *conn) readRaw(p []byte) (int, error) {
	if len(c.stash) > 0 {
		n := copy(p, c.stash)
		c.stash = c.stash[n:]
		c.arrived(time.Now(), n)
		return n, nil
	}
	limits := &c.s.live.Load().Server
	idle := connState(c.state.Load()) == connIdle
	var until time.Time
	switch {
	case c.body:
		until = c.since.Add(limits.BodyTimeout)
		if rate := int64(limits.MinUploadRate); rate > 0 {
			if end := c.bodyFrom.Add(limits.BodyTimeout + time.Duration(c.bodyRead/rate)*time.Second); end.Before(until) {
				until = end
			}
		}
	case idle && c.s.late.Load():
		return 0, io.EOF
	case idle && !c.first:
		until = c.since.Add(limits.IdleTimeout)
	default:
		until = c.head.Add(limits.HeaderTimeout)
	}
	if idle && len(p) > headRead && c.bodyRead >= 4*headRead {
		p = p[:headRead] // what comes with the head is copied once more
	}
	for {
		if c.readArmed.IsZero() || c.readArmed.After(until) {
			c.readArmed = until
			if err := c.Conn.SetReadDeadline(until); err != nil {
				return 0, err
			}
		}
		n, err := c.Conn.Read(p)
		now := time.Now()
		switch {
		case n > 0:
			if idle {
				c.s.prefetcher.arrived(now)
			}
			if !c.arrived(now, n) {
				return 0, io.EOF // closed by Shutdown a moment ago
			}
		case err != nil && errors.Is(err, os.ErrDeadlineExceeded) && now.Before(until):
			c.readArmed = time.Time{}
			continue
		}
		return n, err
	}
}

// heldUp says that the replica, and not the client, has made the body wait.
func (c *conn) heldUp(d time.Duration) { c.since, c.bodyFrom = c.since.Add(d), c.bodyFrom.Add(d) }

// arrived notes a read of n bytes; false when Shutdown has closed the connection meanwhile.
func (c *conn) arrived(now time.Time, n int) bool {
	c.since, c.clock = now, now
	c.bodyRead += int64(n)
	if connState(c.state.Load()) == connReading {
		return true
	}
	c.head = now
	return c.state.CompareAndSwap(int32(connIdle), int32(connReading))
}

// SetReadDeadline does nothing: see readRaw.
func (c *conn) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline does nothing: see Write.
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// SetDeadline does nothing.
func (c *conn) SetDeadline(time.Time) error { return nil }

// own says that the answer to this request is sent with send, and nothing of fasthttp's.
func (c *conn) own() { c.owns = true }

// Write takes what fasthttp sends.
func (c *conn) Write(p []byte) (written int, err error) {
	if c.owns {
		return len(p), nil
	}
	return c.write(p)
}

// send writes all of p.
func (c *conn) send(p []byte) error {
	_, err := c.write(p)
	return err
}

// write writes all of p. A client that takes nothing for about write_timeout (half
// of it at least, one and a half times it at most) is cut off. The clock may be
// late and the poller's deadline an earlier write's, so a first deadline that
// passes only starts another, shorter one.
func (c *conn) write(p []byte) (written int, err error) {
	limit := c.s.live.Load().Server.WriteTimeout
	for wait := limit; ; wait = limit / 2 {
		if c.sendArmed.Before(c.clock.Add(wait / 2)) {
			c.sendArmed = c.clock.Add(wait)
			if err := c.Conn.SetWriteDeadline(c.sendArmed); err != nil {
				return written, err
			}
		}
		n, err := c.Conn.Write(p[written:])
		written += n
		if err == nil || c.raw != c.Conn || n == 0 && wait < limit || !errors.Is(err, os.ErrDeadlineExceeded) {
			return written, err
		}
		c.clock = time.Now()
	}
}

// Bounds of a lingering close.
const (
	lingerTime  = 5 * time.Second
	lingerPause = time.Second
)

// Close closes the connection once. When the client was refused while it still
// sends, closing at once would reset the connection and could destroy the
// answer before it is read: so our side is closed first, and what still comes is
// thrown away for a while.
func (c *conn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	if c.linger && !c.wasCut() {
		c.drain()
	}
	c.s.watcher.remove(c)
	closing := c.Conn
	if t, ok := c.raw.(interface{ SetLinger(sec int) error }); ok && c.reset {
		_ = t.SetLinger(0) // anything else could be read as the end of the answer
		closing = c.raw
	}
	err := closing.Close()
	c.s.closedConn(c)
	return err
}

func (c *conn) drain() {
	closer, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok || closer.CloseWrite() != nil {
		return
	}
	if t, ok := c.raw.(interface{ CloseWrite() error }); ok && c.raw != c.Conn {
		_ = t.CloseWrite()
	}
	end := time.Now().Add(lingerTime)
	buf := c.s.buffers.get(classes[1])
	defer c.s.buffers.put(buf)
	for {
		next := time.Now().Add(lingerPause)
		if next.After(end) {
			return
		}
		if c.raw.SetReadDeadline(next) != nil {
			return
		}
		if _, err := c.raw.Read(buf.b); err != nil {
			return
		}
	}
}

// isReset says that the peer is gone.
func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, net.ErrClosed)
}
