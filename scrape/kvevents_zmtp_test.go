package scrape

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
)

// scripted is a connection whose peer has said everything already.
type scripted struct {
	net.Conn
	in  io.Reader
	out bytes.Buffer
}

func (c *scripted) Read(b []byte) (int, error)       { return c.in.Read(b) }
func (c *scripted) Write(b []byte) (int, error)      { return c.out.Write(b) }
func (c *scripted) Close() error                     { return nil }
func (c *scripted) SetDeadline(time.Time) error      { return nil }
func (c *scripted) SetWriteDeadline(time.Time) error { return nil }

// open returns a connection behind the handshake whose peer sends data.
func open(in io.Reader) (*zmtpConn, *scripted) {
	nc := &scripted{in: in}
	return &zmtpConn{nc: nc, in: bufio.NewReaderSize(in, 16), ponged: make(chan struct{})}, nc
}

// peerHello is what a libzmq socket of a type sends first.
func peerHello(kind string) string {
	hello := make([]byte, 64)
	copy(hello, "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL")
	ready := appendProperty([]byte("\x05READY"), "Socket-Type", kind)
	ready = appendProperty(ready, "Identity", "")
	return string(hello) + "\x04" + string(rune(len(ready))) + string(ready)
}

func TestZMTPHandshake(t *testing.T) {
	f := func(t *testing.T, says, want string) {
		t.Helper()
		for _, in := range []io.Reader{strings.NewReader(says), iotest.OneByteReader(strings.NewReader(says)), iotest.HalfReader(strings.NewReader(says))} {
			nc := &scripted{in: in}
			_, err := shakeZMTP(t.Context(), nc, "SUB", "PUB", "XPUB")
			got := "ok"
			if err != nil {
				got = err.Error()
			}
			if !strings.Contains(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
			if sent := nc.out.String(); sent != string(greeting[:])+"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB" {
				t.Errorf("sent %q", sent)
			}
		}
	}
	f(t, peerHello("PUB"), "ok")
	f(t, peerHello("XPUB"), "ok")
	f(t, strings.Replace(peerHello("PUB"), "Socket-Type", "socket-type", 1), "ok")
	f(t, peerHello("SUB"), `the peer is a "SUB" socket: PUB or XPUB is needed`)
	f(t, peerHello("PUB")[:40], "unexpected EOF")
	f(t, "", "EOF")
	f(t, "HTTP/1.1 400 Bad Request\r\n\r\n", "not ZMTP 3.0: the peer begins with 48 54 54 50")
	f(t, strings.Replace(peerHello("PUB"), "\x7f\x03", "\x7f\x01", 1), "revision 1: version 3 is needed")
	f(t, strings.Replace(peerHello("PUB"), "NULL\x00", "PLAIN", 1), `the mechanism "PLAIN"`)
	f(t, peerHello("PUB")[:64]+"\x00\x01x", "a message before READY")
	f(t, peerHello("PUB")[:64]+"\x04\x09\x05ERROR\x02no", `the peer refuses: "no"`)
	f(t, peerHello("PUB")[:64]+"\x04\x05\x05ERROR", "a command cut short")
	f(t, peerHello("PUB")[:64]+"\x04\x06\x05ERROR", `the peer refuses: ""`)
	f(t, peerHello("PUB")[:64]+"\x04\x05\x04PING", `the command "PING" in place of READY`)
	f(t, peerHello("PUB")[:64]+"\x04\x07\x05READY\x01", "metadata cut short")
	f(t, peerHello("PUB")[:64]+"\x04\x0c\x05READY\x01x\x00\x00\x00\x09", "metadata cut short")
	f(t, peerHello("PUB")[:64]+"\x04\x00", "a command of 0 bytes")
	f(t, peerHello("PUB")[:64]+"\x06\x00\x00\x00\x00\x00\x01\x00\x00", "a command of 65536 bytes")
	f(t, peerHello("PUB")[:64]+"\x05\x01x", "a frame with the flags 0x5")
	f(t, peerHello("PUB")[:64]+"\x04\x06\x05READY", `the peer is a "" socket`)
}

// TestZMTPHandshakeEnds: a peer that says nothing, and a context that ends.
func TestZMTPHandshakeEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := func(t *testing.T, ctx context.Context, want time.Duration) {
			t.Helper()
			ours, theirs := net.Pipe()
			go func() { _, _ = io.Copy(io.Discard, theirs) }()
			began := time.Now()
			if _, err := shakeZMTP(ctx, ours, "SUB", "PUB"); err == nil {
				t.Error("got no error")
			}
			if got := time.Since(began); got != want {
				t.Errorf("got an end after %s, want %s", got, want)
			}
			_ = theirs.Close()
		}
		f(t, t.Context(), zmtpHandshakeTime)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		f(t, ctx, time.Second)
	})
}

func TestZMTPRead(t *testing.T) {
	long := strings.Repeat("x", 300)
	f := func(t *testing.T, data string, want ...string) {
		t.Helper()
		for _, in := range []io.Reader{strings.NewReader(data), iotest.OneByteReader(strings.NewReader(data))} {
			c, _ := open(in)
			var m zmtpMessage
			for i, w := range want {
				err := c.read(&m)
				got := ""
				if err != nil {
					got = "error: " + err.Error()
				}
				for i := range m.frames() {
					got += fmt.Sprintf("[%.8s %d]", m.frame(i), len(m.frame(i)))
				}
				if err != nil {
					got, _, _ = strings.Cut(got, "[")
				}
				if got != w {
					t.Errorf("message %d: got %q, want %q", i, got, w)
				}
			}
		}
	}
	f(t, "\x00\x01a\x00\x00", "[a 1]", "[ 0]", "error: EOF")
	f(t, "\x01\x01a\x01\x00\x00\x02bc\x00\x01d", "[a 1][ 0][bc 2]", "[d 1]", "error: EOF")
	f(t, "\x02\x00\x00\x00\x00\x00\x00\x01\x2c"+long+"\x03\x00\x00\x00\x00\x00\x00\x00\x01y\x00\x01z", "[xxxxxxxx 300]", "[y 1][z 1]")
	f(t, "\x01\x01a", "error: unexpected EOF")
	f(t, "\x00\x05abc", "error: unexpected EOF")
	f(t, "\x00", "error: unexpected EOF")
	f(t, "\x02\x00\x00", "error: unexpected EOF")
	f(t, "\x08\x01a", "error: not ZMTP 3.0: a frame with the flags 0x8")
	f(t, strings.Repeat("\x01\x00", maxZMTPFrames)+"\x00\x00", "error: not ZMTP 3.0: a message of more than 8 frames")
	f(t, "\x02\xff\xff\xff\xff\xff\xff\xff\xff", "error: not ZMTP 3.0: a message of more than 16777216 bytes")
	f(t, "\x01\x01a\x02\x00\x00\x00\x00\x01\x00\x00\x00", "error: not ZMTP 3.0: a message of more than 16777216 bytes")
	f(t, "\x04\x06\x05WHAT?\x00\x01a", "[a 1]") // unknown commands are ignored
	f(t, "\x04\x08\x05ERROR\x01n", "error: the peer refuses: \"n\"")
	f(t, "\x04\x06\x04PING\x00", "error: not ZMTP 3.0: a PING of 1 bytes")
}

// TestZMTPAnnouncedSize: memory follows what has come.
func TestZMTPAnnouncedSize(t *testing.T) {
	c, _ := open(strings.NewReader("\x02\x00\x00\x00\x00\x01\x00\x00\x00" + strings.Repeat("x", 100)))
	var m zmtpMessage
	if err := c.read(&m); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v, want %v", err, io.ErrUnexpectedEOF)
	}
	if got := cap(m.buf); got > 128<<10 {
		t.Errorf("got %d bytes for 100, want at most 128 KiB", got)
	}
}

func TestZMTPCommands(t *testing.T) {
	c, nc := open(strings.NewReader("\x04\x0a\x04PING\x00\x05abc\x04\x05\x04PONG\x04\x05\x04PONG\x00\x01a"))
	var m zmtpMessage
	if err := c.read(&m); err != nil {
		t.Fatal(err)
	}
	if got, want := nc.out.String(), "\x04\x08\x04PONGabc"; got != want {
		t.Errorf("answer to PING: got %q, want %q", got, want)
	}
	select {
	case <-c.ponged:
	default:
		t.Error("PONG: got no sign of it")
	}
	if got := string(m.frame(0)); got != "a" {
		t.Errorf("message: got %q, want a", got)
	}
	nc.out.Reset()
	long := bytes.Repeat([]byte("x"), 256)
	for _, send := range []func() error{c.ping, func() error { return c.subscribe("kv@") }, func() error { return c.send(nil, []byte("ab"), long) }} {
		if err := send(); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := nc.out.String(), "\x04\x07\x04PING\x00\x00"+"\x00\x04\x01kv@"+"\x01\x00\x01\x02ab\x02\x00\x00\x00\x00\x00\x00\x01\x00"+string(long); got != want {
		t.Errorf("sent: got %q, want %q", got, want)
	}
}

func TestParseZMQ(t *testing.T) {
	f := func(t *testing.T, in, want string, bind bool) {
		t.Helper()
		a, err := parseZMQ(in)
		got := a.network + " " + a.address
		if err != nil {
			got = "error"
			if !strings.Contains(err.Error(), "write tcp://host:port") {
				t.Errorf("%s: %v names no remedy", in, err)
			}
		}
		if got != want || a.bind != bind {
			t.Errorf("%s: got %s, bind %v, want %s, %v", in, got, a.bind, want, bind)
		}
		if again, err2 := parseZMQ(a.String()); err == nil && (err2 != nil || again != a) {
			t.Errorf("%s: %s reads as %+v, %v", in, a, again, err2)
		}
	}
	f(t, "tcp://10.0.0.1:5557", "tcp 10.0.0.1:5557", false)
	f(t, "tcp://vllm-0.vllm:5557", "tcp vllm-0.vllm:5557", false)
	f(t, "tcp://[::1]:5557", "tcp [::1]:5557", false)
	f(t, "tcp://*:5557", "tcp :5557", true)
	f(t, "tcp://0.0.0.0:5557", "tcp :5557", true)
	f(t, "tcp://[::]:5557", "tcp :5557", true)
	f(t, "tcp://:::5557", "tcp :5557", true)
	f(t, "ipc:///run/vllm.sock", "unix /run/vllm.sock", false)
	f(t, "ipc://@kv", "unix @kv", false)
	for _, bad := range []string{"", "10.0.0.1:5557", "tcp://", "tcp://10.0.0.1", "tcp://10.0.0.1:", "tcp://:5557", "tcp://h:0", "tcp://h:99999", "tcp://h:*", "tcp://a/b:5", "http://h:5", "ipc://", "inproc://x", "udp://h:5"} {
		f(t, bad, "error", false)
	}
}

// TestZMTPUnix: the addresses of one host work as well.
func TestZMTPUnix(t *testing.T) {
	dir, err := os.MkdirTemp("", "kv")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	path := filepath.Join(dir, "s")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	done := make(chan error, 1)
	go func() {
		nc, err := ln.Accept()
		if err == nil {
			_, err = shakeZMTP(context.Background(), nc, "PUB", "SUB")
			defer func() { _ = nc.Close() }()
		}
		done <- err
	}()
	a, err := parseZMQ("ipc://" + path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := dialZMTP(t.Context(), (&net.Dialer{}).DialContext, a, "SUB", "PUB")
	if err != nil {
		t.Fatal(err)
	}
	c.close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// framesOf reads frames the slow way: messages, and whether the rest is an error.
func framesOf(data []byte) (messages [][]string, broken bool) {
	var parts []string
	size := 0
	for len(data) > 0 {
		flags, n, head := data[0], uint64(0), 2
		if flags > 7 || flags&4 != 0 && flags&1 != 0 {
			return messages, true
		}
		if flags&2 != 0 {
			head = 9
		}
		if len(data) < head {
			return messages, true
		}
		if head == 9 {
			n = binary.BigEndian.Uint64(data[1:])
		} else {
			n = uint64(data[1])
		}
		data = data[head:]
		most := uint64(maxZMTPMessage - size)
		if flags&4 != 0 {
			most = maxZMTPCommand
		} else if len(parts) == maxZMTPFrames {
			return messages, true
		}
		if n > most || n > uint64(len(data)) {
			return messages, true
		}
		body := string(data[:n])
		data = data[n:]
		if flags&4 != 0 {
			if n == 0 || int(body[0]) >= len(body) {
				return messages, true
			}
			switch name, rest := body[1:1+body[0]], body[1+body[0]:]; name {
			case "ERROR":
				return messages, true
			case "PING":
				if len(rest) < 2 || len(rest) > 18 {
					return messages, true
				}
			}
			continue
		}
		size += int(n)
		if parts = append(parts, body); flags&1 == 0 {
			messages, parts, size = append(messages, parts), nil, 0
		}
	}
	return messages, parts != nil
}

// FuzzZMTP holds the reader of frames against the slow one, however the bytes
// are cut into segments.
func FuzzZMTP(f *testing.F) {
	f.Add([]byte("\x01\x03kv@\x01\x08\x00\x00\x00\x00\x00\x00\x00\x01\x00\x03abc"))
	f.Add([]byte("\x04\x07\x04PING\x00\x00\x04\x05\x04PONG\x02\x00\x00\x00\x00\x00\x00\x00\x01a"))
	f.Add([]byte("\x01\x01a\x04\x06\x05WHAT?\x00\x01b\x04\x08\x05ERROR\x01n"))
	f.Add([]byte("\x02\x00\x00\x00\x00\x01\x00\x00\x01"))
	f.Fuzz(func(t *testing.T, data []byte) {
		want, broken := framesOf(data)
		for _, in := range []io.Reader{bytes.NewReader(data), iotest.OneByteReader(bytes.NewReader(data)), iotest.HalfReader(bytes.NewReader(data))} {
			c, _ := open(in)
			var m zmtpMessage
			var got [][]string
			var err error
			for {
				if err = c.read(&m); err != nil {
					break
				}
				var parts []string
				for i := range m.frames() {
					parts = append(parts, string(m.frame(i)))
				}
				got = append(got, parts)
			}
			if fmt.Sprint(got) != fmt.Sprint(want) || len(got) != len(want) {
				t.Fatalf("got %q, want %q", got, want)
			}
			if clean := err == io.EOF; clean == broken {
				t.Fatalf("got the end %v, want broken %v", err, broken)
			}
			if cap(m.buf) > 2*len(data)+256<<10 {
				t.Fatalf("%d bytes of memory for %d of data", cap(m.buf), len(data))
			}
		}
	})
}

// FuzzZMTPHandshake: whatever a peer begins with, the answer is a connection or an error.
func FuzzZMTPHandshake(f *testing.F) {
	f.Add([]byte(peerHello("PUB")))
	f.Add([]byte(peerHello("PUB")[:64] + "\x04\x09\x05ERROR\x02no"))
	f.Fuzz(func(t *testing.T, data []byte) {
		first := ""
		for _, in := range []io.Reader{bytes.NewReader(data), iotest.OneByteReader(bytes.NewReader(data))} {
			_, err := shakeZMTP(context.Background(), &scripted{in: in}, "SUB", "PUB")
			got := fmt.Sprint(err)
			if first == "" {
				first = got
			}
			if got != first {
				t.Fatalf("byte by byte: got %s, want %s", got, first)
			}
			if err == nil && (len(data) < 64 || data[0] != 0xff || data[10] < 3 || !bytes.Contains(data[64:], []byte("PUB"))) {
				t.Fatalf("took %q", data)
			}
		}
	})
}
