package proxy

import "net"

// vector is what is written with one system call: a head and a body, say.
type vector [2][]byte

func (v *vector) empty() bool { return len(v[0])+len(v[1]) == 0 }

// drop takes away the first n bytes.
func (v *vector) drop(n int) {
	k := min(n, len(v[0]))
	v[0], v[1] = v[0][k:], v[1][n-k:]
}

// vectorWriter is a connection that writes two parts at once.
type vectorWriter interface {
	net.Conn
	writev(v *vector) (int, error)
}

// buffersConn writes them with package net.
type buffersConn struct{ net.Conn }

func (c buffersConn) writev(v *vector) (int, error) {
	b := net.Buffers(v[:])
	n, err := b.WriteTo(c.Conn)
	return int(n), err
}

// vectored returns c, as direct has made it, with writev.
func vectored(c net.Conn) vectorWriter {
	if v, ok := c.(vectorWriter); ok {
		return v
	}
	return buffersConn{c}
}
