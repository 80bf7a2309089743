//go:build unix

package proxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// tcpPair returns both ends of a connection.
func tcpPair(t *testing.T) (near, far *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = c.Close(), a.Close() })
	return c.(*net.TCPConn), a.(*net.TCPConn)
}

// TestSocketAsPackageNet does the same with a socket and with package net's
// connection: bytes, numbers, and the words of errors.
func TestSocketAsPackageNet(t *testing.T) {
	type result struct {
		n    int
		err  error
		data string
	}
	read := func(c net.Conn, size int) result {
		p := make([]byte, size)
		n, err := c.Read(p)
		return result{n, err, string(p[:n])}
	}
	write := func(c net.Conn, p []byte) result {
		n, err := c.Write(p)
		return result{n, err, ""}
	}
	arrived := func(c net.Conn) { // the peer's bytes, its end or its reset
		raw, _ := c.(syscall.Conn).SyscallConn()
		_ = raw.Read(func(fd uintptr) bool {
			_, errno := sysPeek(fd, new([1]byte))
			return errno != syscall.EAGAIN
		})
	}
	for _, tc := range []struct {
		name string
		is   error
		do   func(c net.Conn, far *net.TCPConn) result
	}{
		{"read what is there", nil, func(c net.Conn, far *net.TCPConn) result {
			_, _ = far.Write([]byte("hello"))
			arrived(c)
			return read(c, 100)
		}},
		{"read less than is there", nil, func(c net.Conn, far *net.TCPConn) result {
			_, _ = far.Write([]byte("hello"))
			arrived(c)
			return read(c, 2)
		}},
		{"wait for what is not there yet", nil, func(c net.Conn, far *net.TCPConn) result {
			go func() { _, _ = far.Write([]byte("hello")) }()
			return read(c, 100)
		}},
		{"read nothing", nil, func(c net.Conn, far *net.TCPConn) result { return read(c, 0) }},
		{"the end", io.EOF, func(c net.Conn, far *net.TCPConn) result {
			_ = far.Close()
			return read(c, 100)
		}},
		{"the read's deadline has passed", os.ErrDeadlineExceeded, func(c net.Conn, far *net.TCPConn) result {
			_ = c.SetReadDeadline(time.Unix(1, 0))
			return read(c, 100)
		}},
		{"the read's deadline passes", os.ErrDeadlineExceeded, func(c net.Conn, far *net.TCPConn) result {
			_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
			return read(c, 100)
		}},
		{"read a reset connection", syscall.ECONNRESET, func(c net.Conn, far *net.TCPConn) result {
			_ = far.SetLinger(0)
			_ = far.Close()
			return read(c, 100)
		}},
		{"read a closed connection", net.ErrClosed, func(c net.Conn, far *net.TCPConn) result {
			_ = c.Close()
			return read(c, 100)
		}},
		{"closed while it reads", net.ErrClosed, func(c net.Conn, far *net.TCPConn) result {
			go func() { _ = c.Close() }()
			return read(c, 100)
		}},
		{"write", nil, func(c net.Conn, far *net.TCPConn) result {
			r := write(c, []byte("hello"))
			r.data = read(far, 100).data
			return r
		}},
		{"write nothing", nil, func(c net.Conn, far *net.TCPConn) result { return write(c, nil) }},
		{"write to a reset connection", syscall.EPIPE, func(c net.Conn, far *net.TCPConn) result {
			_ = far.SetLinger(0)
			_ = far.Close()
			_ = read(c, 1)
			return write(c, []byte("hello"))
		}},
		{"write to a closed connection", net.ErrClosed, func(c net.Conn, far *net.TCPConn) result {
			_ = c.Close()
			return write(c, []byte("hello"))
		}},
		{"the write's deadline has passed", os.ErrDeadlineExceeded, func(c net.Conn, far *net.TCPConn) result {
			_ = c.SetWriteDeadline(time.Unix(1, 0))
			return write(c, []byte("hello"))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var results [2]result
			var words [2]string
			for i := range results {
				c, far := tcpPair(t)
				// An address says which of the two it is.
				named := strings.NewReplacer(c.LocalAddr().String(), "NEAR", c.RemoteAddr().String(), "FAR")
				var used net.Conn = c
				if i == 1 {
					if used = direct(c); used == net.Conn(c) {
						t.Fatal("direct: got package net's connection, want a socket")
					}
				}
				results[i] = tc.do(used, far)
				words[i] = "nil"
				if err := results[i].err; err != nil {
					words[i] = named.Replace(err.Error())
				}
			}
			want(t, "bytes", results[1].n, results[0].n)
			want(t, "data", results[1].data, results[0].data)
			want(t, "error", words[1], words[0])
			if !errors.Is(results[1].err, tc.is) {
				t.Errorf("error: got %v, want %v", results[1].err, tc.is)
			}
		})
	}
}

func TestDirectLeavesOthers(t *testing.T) {
	a, b := net.Pipe()
	defer func() { _, _ = a.Close(), b.Close() }()
	want(t, "no TCP connection", direct(a), a)
	c, _ := tcpPair(t)
	hidden := hiddenConn{c}
	want(t, "a connection in another", direct(hidden), net.Conn(hidden))
}

// TestWritev sends heads and bodies of all sizes, also larger than the socket takes at once.
func TestWritev(t *testing.T) {
	large := bytes.Repeat([]byte("0123456789abcdef"), 1<<19) // 8 MB
	for _, tc := range []struct {
		name       string
		head, body []byte
	}{
		{"both", []byte("head"), []byte("body")},
		{"no head", nil, []byte("body")},
		{"no body", []byte("head"), nil},
		{"nothing", nil, nil},
		{"large body", []byte("head"), large},
		{"large head", large, []byte("body")},
		{"both large", large, large[:len(large)/2]},
	} {
		for _, kind := range []string{"socket", "package net"} {
			t.Run(tc.name+"/"+kind, func(t *testing.T) {
				c, far := tcpPair(t)
				w := vectored(direct(c))
				if kind != "socket" {
					w = vectored(hiddenConn{c})
				}
				got := make(chan []byte)
				go func() {
					b, _ := io.ReadAll(far)
					got <- b
				}()
				v := vector{tc.head, tc.body}
				n, err := w.writev(&v)
				want(t, "error", err, nil)
				want(t, "written", n, len(tc.head)+len(tc.body))
				want(t, "all is taken out", v.empty(), true)
				_ = c.Close()
				if b := <-got; !bytes.Equal(b, append(append([]byte{}, tc.head...), tc.body...)) {
					t.Errorf("arrived: got %d bytes, want the head and the body, %d", len(b), len(tc.head)+len(tc.body))
				}
			})
		}
	}
}

// TestWritevDeadline: a peer that does not read. What is written later goes on where it stopped.
func TestWritevDeadline(t *testing.T) {
	all := bytes.Repeat([]byte("0123456789abcdef"), 1<<20) // 16 MB: more than the sockets hold
	c, far := tcpPair(t)
	s := vectored(direct(c))
	v := vector{all[:100], all[100:]}
	_ = s.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
	n, err := s.writev(&v)
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("error: got %v, want %v", err, os.ErrDeadlineExceeded)
	}
	if n <= 100 || n >= len(all) {
		t.Fatalf("written: got %d, want more than the head and less than all", n)
	}
	want(t, "left", len(v[0])+len(v[1]), len(all)-n)
	got := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(far)
		got <- b
	}()
	_ = s.SetWriteDeadline(time.Time{})
	m, err := s.writev(&v)
	want(t, "error of the rest", err, nil)
	want(t, "written in all", n+m, len(all))
	_ = c.Close()
	if b := <-got; !bytes.Equal(b, all) {
		t.Errorf("arrived: got %d bytes, want all %d, in order", len(b), len(all))
	}
}

// A kernel short of memory fails one write, and not those behind it.
func TestSocketForgetsAnError(t *testing.T) {
	c, far := tcpPair(t)
	s := direct(c).(*socket)
	s.in.errno, s.out.errno = syscall.ENOMEM, syscall.ENOBUFS
	_, err := s.Write([]byte("hello"))
	want(t, "write", err, nil)
	_, _ = far.Write([]byte("hello"))
	_, err = s.Read(make([]byte, 5))
	want(t, "read", err, nil)
}

func TestSocketAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	c, far := tcpPair(t)
	s := vectored(direct(c))
	go func() { _, _ = io.Copy(far, far) }()
	head, body, p := []byte("head"), []byte("body"), make([]byte, 100)
	var v vector
	n := testing.AllocsPerRun(100, func() {
		v = vector{head, body}
		_, _ = s.writev(&v)
		_, _ = s.Write(body)
		for got := 0; got < 12; {
			n, err := s.Read(p)
			if err != nil {
				t.Fatal(err)
			}
			got += n
		}
	})
	want(t, "allocations", n, 0.0)
}
