package main

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kvgate/configs"
)

// descriptors puts copies of the listeners' descriptors next to each other and returns the first.
func descriptors(t *testing.T, listeners ...interface{ File() (*os.File, error) }) int {
	t.Helper()
	const first = 200
	for i, ln := range listeners {
		file, err := ln.File()
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Dup3(int(file.Fd()), first+i, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		_ = file.Close()
	}
	t.Cleanup(func() {
		for i := range listeners {
			_ = unix.Close(first + i) // closed already when it was taken over
		}
	})
	return first
}

func listenTCP(t *testing.T, address string) *net.TCPListener {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln.(*net.TCPListener)
}

func TestInheritListeners(t *testing.T) {
	data, admin := listenTCP(t, "127.0.0.1:0"), listenTCP(t, "127.0.0.1:0")
	socket, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = socket.Close() }()
	type file = interface{ File() (*os.File, error) }
	f := func(pid, fds, names string, listeners []file, wantData, wantAdmin net.Listener, wrong string) {
		t.Helper()
		first := descriptors(t, listeners...)
		env := map[string]string{"LISTEN_PID": pid, "LISTEN_FDS": fds, "LISTEN_FDNAMES": names}
		in, err := inheritListeners(func(key string) string { return env[key] }, 7, first)
		defer func() { _, _ = in.closed(nil) }()
		if wrong != "" || err != nil {
			if err == nil || wrong == "" || !strings.Contains(err.Error(), wrong) {
				t.Errorf("%s %s: got %v, want %q", fds, names, err, wrong)
			}
			return
		}
		for _, l := range []struct{ got, want net.Listener }{{in.data, wantData}, {in.admin, wantAdmin}} {
			if (l.got == nil) != (l.want == nil) || l.got != nil && l.got.Addr().String() != l.want.Addr().String() {
				t.Errorf("%s %s: got %v, want %v", fds, names, l.got, l.want)
			}
		}
	}
	both := []file{data, admin}
	f("", "", "", nil, nil, nil, "")
	f("8", "2", "data:admin", both, nil, nil, "") // for another process
	f("7", "0", "", nil, nil, nil, "")
	f("7", "2", "data:admin", both, data, admin, "")
	f("7", "2", "admin:data", both, admin, data, "")
	f("7", "1", "", both, data, nil, "")
	f("7", "1", "kvgate.socket", both, data, nil, "")
	f("7", "1", "admin", both, nil, data, "")
	f("7", "2", "data:admin", []file{data, socket.(*net.UnixListener)}, data, socket, "")
	f("7", "3", "a:b:c", both, nil, nil, "up to two sockets")
	f("7", "x", "", both, nil, nil, "LISTEN_FDS=x")
	f("7", "2", "data:data", both, nil, nil, `has the name "data"`)
	f("7", "2", "data", both, nil, nil, `has the name ""`)
	f("7", "1", "data", []file{socket.(*net.UnixListener)}, nil, nil, "the data listener is a TCP one")
	f("7", "2", "data:admin", []file{data}, nil, nil, "inherited socket 201 (admin)")
}

func TestInheritedAdminNeedsAToken(t *testing.T) {
	s := configs.DefaultSettings()
	s.Listen = "127.0.0.1:0"
	g := &gateway{settings: &s, log: zap.NewNop()}
	admin, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := g.listen(inherited{admin: admin}); err == nil || !strings.Contains(err.Error(), "admin.token_file") {
		t.Errorf("listen: got %v, want an error about admin.token_file", err)
	}
	if _, err := admin.Accept(); err == nil {
		t.Error("the refused socket: got a connection, want it closed")
	}
	s.Admin.Insecure = true
	if admin, err = net.Listen("tcp", "0.0.0.0:0"); err != nil {
		t.Fatal(err)
	}
	if err := g.listen(inherited{admin: admin}); err != nil {
		t.Errorf("listen: got %v, want no error", err)
	}
	_, _ = inherited{g.data, g.admin}.closed(nil)
}

// Two processes one after the other on a socket that stays: no connection is
// refused. What reaches the first one in its last moment is turned away by it.
func TestRestartRefusesNoConnection(t *testing.T) {
	replica := testReplica(t)
	ln := listenTCP(t, "127.0.0.1:0")
	file, err := ln.File()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	url := "http://" + ln.Addr().String()
	start := func() (*exec.Cmd, *lockedBuffer) {
		t.Helper()
		log := &lockedBuffer{}
		cmd := exec.Command("/bin/sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=data exec "$0" serve --admin-listen "" --log-format json --replica `+replica.URL(), os.Args[0])
		cmd.Env = append(os.Environ(), "KVGATE_TEST_AS_MAIN=1")
		cmd.Stderr, cmd.ExtraFiles = log, []*os.File{file}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if cmd.ProcessState == nil {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			}
		})
		until(t, "it serves", func() bool { return strings.Contains(log.String(), "kvgate serves") })
		return cmd, log
	}
	first, log := start()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	until(t, "ready", func() bool {
		resp, err := client.Get(url + "/readyz")
		if err != nil {
			t.Fatalf("readyz: got %v, want an answer", err)
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	var load sync.WaitGroup
	stop := make(chan struct{})
	results := make(chan string, 4)
	for range 4 {
		load.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					results <- fmt.Sprintf("%t", n > 0)
					return
				default:
				}
				resp, err := client.Get(url + "/livez")
				var dial *net.OpError
				switch {
				case err == nil:
					_ = resp.Body.Close()
				case errors.As(err, &dial) && dial.Op == "dial":
					results <- err.Error()
					return
				}
			}
		})
	}
	if err := first.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := first.Wait(); err != nil {
		t.Errorf("the first process: got %v, want status 0\n%s", err, log)
	}
	second, log := start()
	until(t, "the second serves", func() bool {
		resp, err := client.Get(url + "/livez")
		if err == nil {
			_ = resp.Body.Close()
		}
		return err == nil
	})
	close(stop)
	load.Wait()
	for range 4 {
		if got := <-results; got != "true" {
			t.Errorf("a client: got %s, want every connection taken", got)
		}
	}
	if err := second.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := second.Wait(); err != nil {
		t.Errorf("the second process: got %v, want status 0\n%s", err, log)
	}
}
