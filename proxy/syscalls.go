//go:build unix && (!linux || race)

package proxy

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// The same calls with the runtime's books, and with what the race detector has to
// know of the bytes that they read and write.

// sysRead reads at most len(p) bytes.
func sysRead(fd uintptr, p []byte) (int, syscall.Errno) { return counted(syscall.Read(int(fd), p)) }

// sysWritev writes some of v, which is not empty.
func sysWritev(fd uintptr, v *vector) (int, syscall.Errno) {
	p := v[0]
	if len(p) == 0 {
		p = v[1]
	}
	return counted(syscall.Write(int(fd), p))
}

// sysPeek reads one byte and leaves it there. EAGAIN: there is none.
func sysPeek(fd uintptr, p *[1]byte) (int, syscall.Errno) {
	n, _, err := unix.Recvfrom(int(fd), p[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return counted(n, err)
}

func counted(n int, err error) (int, syscall.Errno) {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return 0, errno
	}
	return n, 0
}
