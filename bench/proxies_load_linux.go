package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// runLoad sends requests over its own connections, from one thread that waits
// in epoll and allocates nothing per request, so that it takes as little as it
// can of the machine that it shares with the proxy. In an open loop the latency
// of a request counts from when it was due: a slow answer makes the next ones late,
// and that shows (no coordinated omission). The latency of a plain answer is that
// of its last byte, of a stream that of the first byte of its body.
//
// An error means that the generator itself failed; failed requests are in the result.
func runLoad(ctx context.Context, spec loadSpec) (*loadResult, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	l := &loader{loadSpec: spec, buf: make([]byte, 256<<10)}
	l.res.latencies = make([]time.Duration, 0, 1<<18)
	l.res.nonce = spec.nonce
	var err error
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	defer func() { _ = unix.Close(l.epoll) }()
	if l.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	defer func() { _ = unix.Close(l.timer) }()
	event := unix.EpollEvent{Events: unix.EPOLLIN, Fd: -1}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, l.timer, &event); err != nil {
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	defer l.closeAll()
	err = l.run(ctx)
	return &l.res, err
}

type loader struct {
	loadSpec
	epoll, timer int
	began        time.Time
	now          time.Duration // since began, as of the last wake-up or answer
	stage        loadStage
	stageAt      time.Duration // when the stage began
	windowAt     time.Duration // when the window began
	conns        []*loadConn   // by slot
	turns        int32         // connections so far
	lost         []int         // closed loop: slots to connect again
	idle         []*loadConn   // open loop: first in, first out
	sent         int           // open loop: requests due so far
	inFlight     int
	buf          []byte
	res          loadResult
}

type loadStage uint8

const (
	stageWarmup loadStage = iota
	stageWindow
	stageDrain
)

type loadConn struct {
	fd, slot int
	turn     int32 // tells the connections of one slot apart
	state    connState
	due      time.Duration // when the request was due
	asked    bool          // a request waits for the connection
	started  bool          // the body has begun
	nonce    [nonceLen]byte
	rest     [3][]byte // unsent
	answer   answerReader
}

type connState uint8

const (
	connDialling connState = iota
	connIdle
	connSending
	connReceiving
	connClosed
)

func (l *loader) run(ctx context.Context) error {
	events := make([]unix.EpollEvent, 256)
	l.began = time.Now()
	for {
		l.now = time.Since(l.began)
		if err := ctx.Err(); err != nil {
			return err
		}
		if done, err := l.tick(); done || err != nil {
			return err
		}
		n, err := unix.EpollWait(l.epoll, events, 100)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("epoll_wait", err)
		}
		for _, e := range events[:max(n, 0)] {
			l.now = time.Since(l.began)
			if e.Fd < 0 {
				_, _ = unix.Read(l.timer, l.buf[:8])
				continue
			}
			if c := l.conns[e.Fd]; c != nil && c.turn == e.Pad {
				if err := l.handle(c, e.Events); err != nil {
					return err
				}
			}
		}
	}
}

// tick does what is due by the clock and sets the timer for the next time.
func (l *loader) tick() (done bool, err error) {
	next := l.now + time.Second
	switch {
	case l.stage == stageWarmup && l.now >= l.warmup:
		l.enter(stageWindow)
	case l.stage == stageWindow && l.now >= l.stageAt+l.duration:
		l.res.elapsed = l.now - l.stageAt
		for _, c := range l.conns {
			if l.hold && c != nil && c.answer.events() > 0 {
				l.res.open++
			}
		}
		l.enter(stageDrain)
	}
	switch l.stage {
	case stageWarmup:
		next = l.warmup
	case stageWindow:
		next = l.stageAt + l.duration
	case stageDrain:
		if l.inFlight == 0 || l.hold {
			return true, nil
		}
		if l.now > l.stageAt+loadDrain {
			for _, c := range l.conns {
				if c != nil && c.asked {
					l.fail(c, fmt.Errorf("no whole answer within %v of the end", loadDrain))
				}
			}
			return true, nil
		}
	}
	if l.res.failures+l.res.warmup > loadGiveUp {
		return true, nil
	}
	if l.stage != stageDrain {
		if l.rate > 0 {
			err = l.issue(&next)
		}
		if e := l.connect(&next); err == nil {
			err = e
		}
	}
	wait := max(next-l.now, 1)
	value := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(wait))}
	if e := unix.TimerfdSettime(l.timer, 0, &value, nil); err == nil && e != nil {
		err = os.NewSyscallError("timerfd_settime", e)
	}
	return false, err
}

func (l *loader) enter(s loadStage) {
	l.stage = s
	if l.mark != nil {
		l.mark(s == stageDrain)
	}
	l.now = time.Since(l.began)
	l.stageAt = l.now
	if s == stageWindow {
		l.windowAt = l.now
	}
}

// connect opens what is missing, a few connections at a time: a listener's queue is short.
func (l *loader) connect(next *time.Duration) error {
	for range loadRamp {
		slot := len(l.conns)
		switch {
		case len(l.lost) > 0:
			slot = l.lost[len(l.lost)-1]
			l.lost = l.lost[:len(l.lost)-1]
		case slot >= l.loadSpec.conns:
			return nil
		}
		c, err := l.dial(slot)
		if err != nil {
			return err
		}
		if l.rate == 0 {
			l.ask(c, l.now)
		}
	}
	*next = min(*next, l.now+loadTick)
	return nil
}

// issue sends the requests of an open loop that are due.
func (l *loader) issue(next *time.Duration) error {
	for {
		due := time.Duration(float64(l.sent) / l.rate * float64(time.Second))
		if due > l.now {
			*next = min(*next, due)
			return nil
		}
		l.sent++
		var c *loadConn
		for c == nil && len(l.idle) > 0 {
			if l.idle[0].state != connClosed {
				c = l.idle[0]
			}
			l.idle = l.idle[1:]
		}
		if c == nil {
			slot := len(l.conns)
			for i, x := range l.conns {
				if x == nil {
					slot = i
					break
				}
			}
			if slot >= loadMaxConns {
				return fmt.Errorf("%d requests are in flight at %v per second: use a lower rate", slot, l.rate)
			}
			var err error
			if c, err = l.dial(slot); err != nil {
				return err
			}
		}
		l.ask(c, due)
	}
}

func (l *loader) dial(slot int) (*loadConn, error) {
	for len(l.conns) <= slot {
		l.conns = append(l.conns, nil)
	}
	target := l.targets[slot%len(l.targets)]
	domain, sa := socketAddress(target)
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	l.turns++
	c := &loadConn{fd: fd, slot: slot, turn: l.turns}
	c.answer.stream = l.stream
	l.conns[slot] = c
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return nil, os.NewSyscallError("setsockopt", err)
	}
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(slot), Pad: c.turn}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &event); err != nil {
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	// A refusal comes back with the first event, as EINPROGRESS's outcome does.
	if err := unix.Connect(fd, sa); err != nil && !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("connect to %v: %w", target, err)
	}
	return c, nil
}

func socketAddress(a netip.AddrPort) (domain int, sa unix.Sockaddr) {
	if a.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// ask puts the next request on a connection.
func (l *loader) ask(c *loadConn, due time.Duration) {
	n := l.res.nonce
	l.res.nonce++
	l.inFlight++
	head, tail := l.prompts.request(int(n))
	putNonce(&c.nonce, n)
	c.rest = [3][]byte{head, c.nonce[:], tail}
	c.due, c.asked, c.started = due, true, false
	c.answer.reset()
	c.answer.stream = l.stream
	if c.state == connIdle {
		l.send(c)
	}
}

func (l *loader) send(c *loadConn) {
	c.state = connSending
	iov := c.rest[:]
	for len(iov[0]) == 0 {
		iov = iov[1:]
	}
	for {
		n, err := unix.Writev(c.fd, iov)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			// What the proxy said before it hung up tells more.
			if e := l.receive(c, true); e == nil && c.state != connClosed {
				l.fail(c, os.NewSyscallError("write", err))
			}
			return
		}
		for len(iov) > 0 && n >= len(iov[0]) {
			n -= len(iov[0])
			iov[0] = nil
			iov = iov[1:]
		}
		if len(iov) == 0 {
			c.state = connReceiving
			return
		}
		iov[0] = iov[0][n:]
	}
}

func (l *loader) handle(c *loadConn, events uint32) error {
	if c.state == connDialling {
		code, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			return os.NewSyscallError("getsockopt", err)
		case code != 0:
			l.fail(c, fmt.Errorf("connect: %w", unix.Errno(code)))
			return nil
		case events&unix.EPOLLOUT == 0:
			return nil
		}
		c.state = connIdle
		if c.asked {
			l.send(c)
		} else {
			l.idle = append(l.idle, c)
		}
	} else if c.state == connSending && events&unix.EPOLLOUT != 0 {
		l.send(c)
	}
	if c.state != connClosed && events&^unix.EPOLLOUT != 0 {
		return l.receive(c, events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0)
	}
	return nil
}

var errHungUp = errors.New("the connection was closed before the answer was complete")

// receive reads what is there, up to the end when the peer has ended.
func (l *loader) receive(c *loadConn, ended bool) error {
	for {
		n, err := unix.Read(c.fd, l.buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case (err != nil || n == 0) && !c.asked:
			l.drop(c)
			return nil
		case err != nil:
			l.fail(c, fmt.Errorf("%w: %w", errHungUp, err))
			return nil
		case n == 0:
			l.fail(c, errHungUp)
			return nil
		case !c.asked:
			l.fail(c, fmt.Errorf("an answer that nobody asked for: %.60q", l.buf[:n]))
			return nil
		}
		before := c.answer.events()
		done, err := c.answer.feed(l.buf[:n])
		if l.stage == stageWindow {
			l.res.events += c.answer.events() - before
		}
		if !c.started && c.answer.body > 0 {
			c.started = true
			if l.stream {
				l.observe(c)
			}
		}
		if done && err == nil {
			err = c.answer.whole(l.events)
		}
		if err != nil {
			l.fail(c, err)
			return nil
		}
		if done {
			l.finish(c)
			return nil
		}
		if n < len(l.buf) && !ended {
			return nil // drained, and more of it is another event: that saves the read that finds nothing
		}
	}
}

// observe records the latency of a request that was due in the window.
func (l *loader) observe(c *loadConn) {
	in := l.stage != stageWarmup && c.due >= l.windowAt // nothing is asked after the window
	if l.rate > 0 {
		in = c.due >= l.warmup && c.due < l.warmup+l.duration // by the schedule, however late the thread was
	}
	if in {
		l.res.latencies = append(l.res.latencies, time.Since(l.began)-c.due)
	}
}

// finish ends a request with its whole answer.
func (l *loader) finish(c *loadConn) {
	if !l.stream {
		l.observe(c)
	}
	if l.stage == stageWindow {
		l.res.requests++
	}
	l.inFlight--
	c.asked = false
	if c.answer.last || c.state == connSending {
		l.drop(c)
		return
	}
	c.state = connIdle
	switch {
	case l.rate > 0:
		l.idle = append(l.idle, c)
	case l.stage != stageDrain:
		l.now = time.Since(l.began)
		l.ask(c, l.now)
	}
}

func (l *loader) fail(c *loadConn, err error) {
	before := l.stage == stageWarmup
	if before {
		l.res.warmup++
	} else {
		l.res.failures++
	}
	if l.res.failure == "" || !before && l.res.failures == 1 {
		l.res.failure = err.Error()
	}
	if c.asked {
		l.inFlight--
		c.asked = false
	}
	l.drop(c)
}

// drop closes a connection and, in a closed loop, has it replaced.
func (l *loader) drop(c *loadConn) {
	_ = unix.Close(c.fd)
	c.state = connClosed
	l.conns[c.slot] = nil
	if l.rate == 0 {
		l.lost = append(l.lost, c.slot)
	}
}

func (l *loader) closeAll() {
	for _, c := range l.conns {
		if c != nil {
			_ = unix.Close(c.fd)
		}
	}
}
