//go:build unix

package proxy

import "syscall"

// prober looks at a socket without reading from it. Its function is bound once,
// so that a look allocates nothing.
type prober struct {
	raw    syscall.RawConn
	look   func(fd uintptr)
	one    [1]byte
	result probeResult
}

func (c *upConn) initProbe() {
	s, ok := c.tcp.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return
	}
	p := &c.prober
	p.raw = raw
	p.look = func(fd uintptr) {
		p.result = probeEnd
		n, errno := sysPeek(fd, &p.one)
		switch {
		case errno == syscall.EAGAIN:
			p.result = probeQuiet
		case errno == 0 && n > 0:
			p.result = probeData
		}
	}
}

// probe says what waits to be read.
func (c *upConn) probe() probeResult {
	if c.raw == nil {
		return probeQuiet
	}
	if err := c.raw.Control(c.look); err != nil {
		return probeEnd
	}
	return c.result
}
