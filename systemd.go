package main

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// notifier speaks systemd's notification protocol (sd_notify(3)). Without a
// NOTIFY_SOCKET it does nothing.
type notifier struct{ socket string }

func newNotifier(getenv func(string) string) notifier {
	return notifier{socket: getenv("NOTIFY_SOCKET")}
}

func (n notifier) send(lines ...string) error {
	if n.socket == "" {
		return nil
	}
	addr := n.socket
	if strings.HasPrefix(addr, "@") { // abstract namespace
		addr = "\x00" + addr[1:]
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: addr, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := conn.Write([]byte(strings.Join(lines, "\n"))); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}

// reloading must carry the monotonic time in the same datagram, else systemd
// takes the reload for failed.
func (n notifier) reloading() error {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return fmt.Errorf("monotonic clock: %w", err)
	}
	return n.send("RELOADING=1", fmt.Sprintf("MONOTONIC_USEC=%d", ts.Nano()/1000))
}

// watchdogInterval returns how often to ping: half of what systemd allows, 0
// when it does not watch this process.
func watchdogInterval(getenv func(string) string, pid int) time.Duration {
	if p := getenv("WATCHDOG_PID"); p != "" && p != strconv.Itoa(pid) {
		return 0
	}
	usec, err := strconv.ParseInt(getenv("WATCHDOG_USEC"), 10, 64)
	if err != nil || usec <= 0 {
		return 0
	}
	return time.Duration(usec) * time.Microsecond / 2
}

// underJournal says whether standard error goes to the journal, which stamps lines itself.
func underJournal(getenv func(string) string, f *os.File) bool {
	dev, ino, ok := strings.Cut(getenv("JOURNAL_STREAM"), ":")
	if !ok {
		return false
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return false
	}
	return dev == strconv.FormatUint(st.Dev, 10) && ino == strconv.FormatUint(st.Ino, 10)
}

// firstInherited is the descriptor of the first inherited socket (sd_listen_fds(3)).
const firstInherited = 3

// inherited are the listening sockets that systemd has opened for this process,
// and keeps open while it is restarted. Each is nil when it was not handed over.
type inherited struct{ data, admin net.Listener }

// inheritListeners takes over the sockets that LISTEN_FDS announces to this
// process: by the names data and admin (FileDescriptorName=), or the only one for data.
func inheritListeners(getenv func(string) string, pid, first int) (in inherited, err error) {
	if getenv("LISTEN_PID") != strconv.Itoa(pid) {
		return in, nil
	}
	n, err := strconv.Atoi(getenv("LISTEN_FDS"))
	if err != nil || n < 0 || n > 2 {
		return in, fmt.Errorf("LISTEN_FDS=%s: kvgate takes up to two sockets, data and admin", getenv("LISTEN_FDS"))
	}
	names := strings.Split(getenv("LISTEN_FDNAMES"), ":")
	for i := range n {
		name := ""
		if i < len(names) {
			name = names[i]
		}
		file := os.NewFile(uintptr(first+i), name)
		if file == nil {
			return in.closed(fmt.Errorf("the inherited socket %d (%s) is not open", first+i, name))
		}
		ln, err := net.FileListener(file)
		_ = file.Close() // ln has a copy
		if err != nil {
			return in.closed(fmt.Errorf("the inherited socket %d (%s): %w", first+i, name, err))
		}
		switch {
		case name == "admin" && in.admin == nil:
			in.admin = ln
		case (name == "data" || n == 1 && name != "admin") && in.data == nil:
			if _, tcp := ln.Addr().(*net.TCPAddr); !tcp {
				_ = ln.Close()
				return in.closed(fmt.Errorf("the inherited socket data is %s: the data listener is a TCP one", ln.Addr().Network()))
			}
			in.data = ln
		default:
			_ = ln.Close()
			return in.closed(fmt.Errorf("the inherited socket %d has the name %q: set FileDescriptorName=data and FileDescriptorName=admin", first+i, name))
		}
	}
	return in, nil
}

func (in inherited) closed(err error) (inherited, error) {
	for _, ln := range []net.Listener{in.data, in.admin} {
		if ln != nil {
			_ = ln.Close()
		}
	}
	return inherited{}, err
}
