//go:build unix

package proxy

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// prober looks at a socket without reading from it. Its function is bound once,
// so that a look allocates nothing.
type prober struct {
	raw    syscall.RawConn
	look   func(fd uintptr)
	fds    [1]unix.PollFd
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
		p.fds[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		n, err := unix.Poll(p.fds[:], 0)
		switch {
		case err == nil && n == 0:
			p.result = probeQuiet
		case err == nil && p.fds[0].Revents&unix.POLLIN != 0:
			var one [1]byte
			if n, _, err := unix.Recvfrom(int(fd), one[:], unix.MSG_PEEK|unix.MSG_DONTWAIT); err == nil && n > 0 {
				p.result = probeData
			}
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
