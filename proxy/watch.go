package proxy

import (
	"errors"
	"os"
	"time"
)

// watcher notices that a client has left while its request is worked on, and
// calls conn.leave.
type watcher interface {
	add(c *conn)    // a connection was accepted
	remove(c *conn) // it is about to be closed
	begin(c *conn)  // its request was read; nothing is read until end
	end(c *conn)    // its answer is out
	close()
}

// readWatcher reads ahead: it works on every system and every kind of
// connection, at the price of a goroutine per request.
type readWatcher struct{}

func (readWatcher) add(*conn)     {}
func (readWatcher) remove(*conn)  {}
func (readWatcher) begin(c *conn) { c.watched.read.begin(c) }
func (readWatcher) end(c *conn)   { c.watched.read.end(c) }
func (readWatcher) close()        {}

// readAhead reads one byte in the background. An end or an error is the client
// leaving; a byte is the begin of a pipelined request, kept for the next read.
type readAhead struct {
	done chan struct{}
	one  [1]byte
	n    int
}

func (r *readAhead) begin(c *conn) {
	if len(c.stash) > 0 || c.Conn.SetReadDeadline(time.Time{}) != nil {
		return
	}
	c.readArmed = time.Time{}
	done := make(chan struct{})
	r.done, r.n = done, 0
	go func() {
		defer close(done)
		n, err := c.Conn.Read(r.one[:])
		r.n = n
		if n == 0 && !errors.Is(err, os.ErrDeadlineExceeded) {
			c.leave()
		}
	}()
}

func (r *readAhead) end(c *conn) {
	if r.done == nil {
		return
	}
	_ = c.Conn.SetReadDeadline(time.Unix(1, 0)) // long past: the read ends
	<-r.done
	r.done = nil
	_ = c.Conn.SetReadDeadline(time.Time{})
	c.readArmed = time.Time{}
	if r.n > 0 {
		c.stash = append(c.stash[:0], r.one[:]...)
	}
}
