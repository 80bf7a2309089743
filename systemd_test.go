package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
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

// Three processes one after the other on a socket that stays, under the load of
// clients that keep their connections and of others that do not: no connection is
// refused and no request fails.
func TestRestartLosesNothing(t *testing.T) {
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
	stop := func(cmd *exec.Cmd, log *lockedBuffer) {
		t.Helper()
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("exit: got %v, want status 0\n%s", err, log)
		}
	}
	cmd, log := start()

	var answered atomic.Int64
	var load sync.WaitGroup
	ended := make(chan struct{})
	ask := func(client *http.Client, stream bool) error {
		body := fmt.Sprintf(`{"model":"m","max_tokens":4,"stream":%t,"messages":[{"role":"user","content":"hello"}]}`, stream)
		resp, err := client.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK || stream && !strings.HasSuffix(string(text), "data: [DONE]\n\n") {
			return fmt.Errorf("status %d: %s", resp.StatusCode, text)
		}
		return nil
	}
	for i := range 8 {
		transport := &http.Transport{DisableKeepAlives: i%2 == 0}
		client := &http.Client{Transport: transport, Timeout: 30 * time.Second}
		load.Go(func() {
			defer transport.CloseIdleConnections()
			for {
				select {
				case <-ended:
					return
				default:
				}
				if err := ask(client, i%4 < 2); err != nil {
					t.Errorf("client %d: got %v, want an answer", i, err)
					return
				}
				answered.Add(1)
			}
		})
	}
	more := func() {
		t.Helper()
		target := answered.Load() + 50
		until(t, "requests are answered", func() bool { return answered.Load() >= target || t.Failed() })
	}
	for range 2 {
		more()
		stop(cmd, log)
		cmd, log = start()
	}
	more()
	close(ended)
	load.Wait()
	stop(cmd, log)
	t.Logf("%d requests answered", answered.Load())
}
