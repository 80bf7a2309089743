//go:build linux && !race

package proxy

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls below do not block: their sockets are the runtime poller's. So they
// are made without its books, which other calls need for the time that they may block.

// sysRead reads at most len(p) bytes.
func sysRead(fd uintptr, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// sysWritev writes some of v, which is not empty.
func sysWritev(fd uintptr, v *vector) (int, syscall.Errno) {
	var parts [len(v)]unix.Iovec
	for i, p := range v {
		parts[i].Base = unsafe.SliceData(p)
		parts[i].SetLen(len(p))
	}
	n, _, errno := syscall.RawSyscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&parts)), uintptr(len(parts)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// sysPeek reads one byte and leaves it there. EAGAIN: there is none.
func sysPeek(fd uintptr, p *[1]byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(p)), 1, unix.MSG_PEEK|unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}
