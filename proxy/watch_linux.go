package proxy

import (
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// watched is what the watcher keeps of a connection.
type watched struct {
	epoll bool
	key   uint64 // generation and slot
	read  readAhead
}

// vanished is how long data to a client may go unacknowledged.
const vanished = 30 * time.Second

// epollWatcher notices clients that leave: every connection is registered once,
// for the end of its stream alone, so that requests cost nothing and arriving
// data wakes nobody. One goroutine waits, parked in the runtime's own poller.
type epollWatcher struct {
	file *os.File
	raw  syscall.RawConn
	fd   int
	done chan struct{}

	mu    sync.Mutex
	slots []epollSlot
	free  []uint32
}

// epollSlot is where an event leads to. Its generation tells a connection from
// an earlier one whose event was still on its way.
type epollSlot struct {
	conn       *conn
	generation uint32
}

// newWatcher returns the watcher of this system.
func newWatcher() watcher {
	w, err := newEpollWatcher()
	if err != nil {
		return readWatcher{}
	}
	return w
}

func newEpollWatcher() (*epollWatcher, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	w := &epollWatcher{file: os.NewFile(uintptr(fd), "epoll"), fd: fd, done: make(chan struct{})}
	if w.raw, err = w.file.SyscallConn(); err != nil {
		_ = w.file.Close()
		return nil, err
	}
	go w.run()
	return w, nil
}

func (w *epollWatcher) run() {
	defer close(w.done)
	events := make([]unix.EpollEvent, 64)
	n := 0
	wait := func(fd uintptr) bool {
		var err error
		n, err = unix.EpollWait(int(fd), events, 0)
		return n > 0 || err != nil && err != unix.EINTR //nolint:errorlint // a plain errno
	}
	for {
		if err := w.raw.Read(wait); err != nil {
			return // closed
		}
		for _, e := range events[:max(n, 0)] {
			if c := w.find(uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32); c != nil {
				c.leave()
			}
		}
	}
}

func (w *epollWatcher) find(key uint64) *conn {
	w.mu.Lock()
	defer w.mu.Unlock()
	if slot := uint32(key); int(slot) < len(w.slots) && w.slots[slot].generation == uint32(key>>32) {
		return w.slots[slot].conn
	}
	return nil
}

// add registers a connection. One that has no socket is read ahead instead.
func (w *epollWatcher) add(c *conn) {
	s, ok := c.raw.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return
	}
	w.mu.Lock()
	var slot uint32
	if n := len(w.free); n > 0 {
		slot = w.free[n-1]
		w.free = w.free[:n-1]
	} else {
		slot = uint32(len(w.slots))
		w.slots = append(w.slots, epollSlot{})
	}
	w.slots[slot].conn = c
	generation := w.slots[slot].generation
	w.mu.Unlock()
	c.watched.key = uint64(generation)<<32 | uint64(slot)
	failed := error(nil)
	err = raw.Control(func(fd uintptr) {
		e := unix.EpollEvent{Events: unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR | unix.EPOLLET, Fd: int32(slot), Pad: int32(generation)}
		failed = unix.EpollCtl(w.fd, unix.EPOLL_CTL_ADD, int(fd), &e)
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(vanished.Milliseconds()))
	})
	c.watched.epoll = err == nil && failed == nil
	if !c.watched.epoll {
		w.release(slot)
	}
}

// remove forgets a connection. The kernel drops its registration with the
// descriptor, which the caller closes next.
func (w *epollWatcher) remove(c *conn) {
	if c.watched.epoll {
		w.release(uint32(c.watched.key))
		c.watched.epoll = false
	}
}

func (w *epollWatcher) release(slot uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.slots[slot].conn = nil
	w.slots[slot].generation++
	w.free = append(w.free, slot)
}

func (w *epollWatcher) begin(c *conn) {
	if !c.watched.epoll {
		c.watched.read.begin(c)
	}
}

func (w *epollWatcher) end(c *conn) {
	if !c.watched.epoll {
		c.watched.read.end(c)
	}
}

func (w *epollWatcher) close() {
	_ = w.file.Close()
	<-w.done
}
