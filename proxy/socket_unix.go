//go:build unix

package proxy

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
)

// socket is a TCP connection whose reads and writes do not tell Go's scheduler
// that they are system calls. A socket that does not block returns at once, so that nobody
// need take its processor over meanwhile, and the thread that watches for that sleeps on:
// docs/benchmarks.md, "System calls". One goroutine reads and one writes at a time.
type socket struct {
	*net.TCPConn
	raw syscall.RawConn
	in  readCall
	out writeCall
}

// readCall is the read under way. Its function is bound once, so that none allocates.
type readCall struct {
	try   func(fd uintptr) bool
	p     []byte
	n     int
	errno syscall.Errno
}

// writeCall is the write under way.
type writeCall struct {
	try   func(fd uintptr) bool
	v     vector
	n     int
	errno syscall.Errno
}

// direct returns c with the reads and writes of a socket where it is a TCP connection, else c.
func direct(c net.Conn) net.Conn {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return c // closed: its next use says so
	}
	s := &socket{TCPConn: t, raw: raw}
	s.in.try, s.out.try = s.in.once, s.out.all
	return s
}

// once reads once; false when there is nothing to read yet.
func (r *readCall) once(fd uintptr) bool {
	for {
		r.n, r.errno = sysRead(fd, r.p)
		if r.errno != syscall.EINTR {
			return r.errno != syscall.EAGAIN
		}
	}
}

// Read implements net.Conn.
func (s *socket) Read(p []byte) (int, error) {
	r := &s.in
	r.p = p
	err := s.raw.Read(r.try)
	r.p = nil
	switch {
	case err != nil || r.errno != 0:
		return 0, s.failed("read", err, r.errno)
	case r.n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return r.n, nil
}

// all writes what is left; false when the socket takes no more for now.
func (w *writeCall) all(fd uintptr) bool {
	for !w.v.empty() {
		n, errno := sysWritev(fd, &w.v)
		switch errno {
		case 0:
			w.v.drop(n)
			w.n += n
		case syscall.EAGAIN:
			return false
		case syscall.EINTR:
		default:
			w.errno = errno
			return true
		}
	}
	return true
}

// Write implements net.Conn.
func (s *socket) Write(p []byte) (int, error) {
	v := vector{p}
	return s.writev(&v)
}

// writev writes both parts of v at once and takes what was written out of it.
func (s *socket) writev(v *vector) (int, error) {
	w := &s.out
	w.v, w.n, w.errno = *v, 0, 0
	err := s.raw.Write(w.try)
	*v, w.v = w.v, vector{}
	if err != nil || w.errno != 0 {
		return w.n, s.failed("write", err, w.errno)
	}
	return w.n, nil
}

// failed returns the error as package net words it.
func (s *socket) failed(op string, err error, errno syscall.Errno) error {
	if err == nil {
		return &net.OpError{Op: op, Net: "tcp", Source: s.LocalAddr(), Addr: s.RemoteAddr(), Err: os.NewSyscallError(op, errno)}
	}
	if o := (*net.OpError)(nil); errors.As(err, &o) {
		o.Op = op // raw-read, raw-write
	}
	return err
}
