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
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The part of ZMTP 3.0 (https://rfc.zeromq.org/spec/23) that a subscriber and
// a replay client need: TCP or a Unix socket, the NULL mechanism, the sockets SUB and
// DEALER. Security is the network's: as engines publish, nothing is authenticated.

// Bounds of what a peer may send.
const (
	maxZMTPFrames  = 8        // frames of one message; events have 3, replays 4
	maxZMTPMessage = 16 << 20 // bytes of all frames of one message
	maxZMTPCommand = 4 << 10
)

// Limits of a peer that does not answer.
const (
	zmtpHandshakeTime = 5 * time.Second
	zmtpWriteTime     = 5 * time.Second
)

// Flags of a frame.
const (
	zmtpMore    = 1 << 0
	zmtpLong    = 1 << 1
	zmtpCommand = 1 << 2
)

// zmqAddress is one endpoint in ZeroMQ's notation.
type zmqAddress struct {
	network string // tcp or unix
	address string // host:port, or a path
	bind    bool   // the host is a wildcard: whoever binds it lets others connect
}

// String returns the address in ZeroMQ's notation.
func (a zmqAddress) String() string {
	if a.network == "unix" {
		return "ipc://" + a.address
	}
	host, port, _ := net.SplitHostPort(a.address)
	if a.bind {
		host = "*"
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return "tcp://" + host + ":" + port
}

// parseZMQ reads tcp://host:port, tcp://*:port and ipc://path.
func parseZMQ(s string) (zmqAddress, error) {
	const remedy = "write tcp://host:port, tcp://*:port or ipc:///path"
	scheme, rest, ok := strings.Cut(s, "://")
	switch {
	case ok && scheme == "ipc" && rest != "":
		return zmqAddress{network: "unix", address: rest}, nil
	case ok && scheme == "tcp":
		colon := strings.LastIndexByte(rest, ':')
		if colon <= 0 {
			break
		}
		host, port := strings.Trim(rest[:colon], "[]"), rest[colon+1:]
		if n, err := net.LookupPort("tcp", port); err != nil || n == 0 || port == "" || strings.ContainsAny(host, "/@ ") {
			break
		}
		a := zmqAddress{network: "tcp", address: net.JoinHostPort(host, port)}
		if host == "*" || host == "0.0.0.0" || host == "::" {
			a.bind, a.address = true, ":"+port
		}
		return a, nil
	}
	return zmqAddress{}, fmt.Errorf("%q is no ZeroMQ endpoint: %s", s, remedy)
}

// zmtpMessage is a message of several frames in one buffer.
type zmtpMessage struct {
	buf  []byte
	ends []int // end of frame i
}

func (m *zmtpMessage) frames() int { return len(m.ends) }

func (m *zmtpMessage) frame(i int) []byte {
	from := 0
	if i > 0 {
		from = m.ends[i-1]
	}
	return m.buf[from:m.ends[i]]
}

// zmtpConn is one connection. One goroutine reads; any may write.
type zmtpConn struct {
	nc      net.Conn
	in      *bufio.Reader
	heard   atomic.Int64  // Unix nanoseconds of the last frame
	pongs   atomic.Bool   // the peer has answered a PING
	ponged  chan struct{} // closed at the first PONG
	command []byte        // scratch

	mu sync.Mutex // of writes
}

// errZMTP is a violation of the protocol.
var errZMTP = errors.New("not ZMTP 3.0")

func zmtpError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errZMTP, fmt.Sprintf(format, args...))
}

// dialZMTP connects and shakes hands as a socket of the type want[0] with one of the types want[1:].
func dialZMTP(ctx context.Context, dial dialFunc, a zmqAddress, want ...string) (*zmtpConn, error) {
	ctx, cancel := context.WithTimeout(ctx, zmtpHandshakeTime)
	defer cancel()
	nc, err := dial(ctx, a.network, a.address)
	if err != nil {
		return nil, err
	}
	return shakeZMTP(ctx, nc, want...)
}

// shakeZMTP exchanges greetings and READY commands. It closes the connection on an error.
func shakeZMTP(ctx context.Context, nc net.Conn, want ...string) (*zmtpConn, error) {
	c := &zmtpConn{nc: nc, in: bufio.NewReaderSize(nc, 8<<10), ponged: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	err := nc.SetDeadline(time.Now().Add(zmtpHandshakeTime))
	if err == nil {
		err = c.handshake(want[0], want[1:])
	}
	if err == nil {
		err = nc.SetDeadline(time.Time{})
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = nc.Close()
		return nil, err
	}
	c.heard.Store(time.Now().UnixNano())
	return c, nil
}

// greeting is the signature, version 3.0 and the mechanism NULL; not as a server.
var greeting = [64]byte{0: 0xff, 9: 0x7f, 10: 3, 12: 'N', 13: 'U', 14: 'L', 15: 'L'}

func (c *zmtpConn) handshake(own string, peers []string) error {
	ready := appendProperty([]byte("\x05READY"), "Socket-Type", own)
	ready = append([]byte{zmtpCommand, byte(len(ready))}, ready...)
	// The peer may answer the greeting before it reads READY, and takes both at once.
	if err := c.write(append(greeting[:], ready...)); err != nil {
		return err
	}
	var hello [64]byte
	if _, err := io.ReadFull(c.in, hello[:11]); err != nil {
		return err
	}
	if hello[0] != 0xff || hello[9]&1 == 0 {
		return zmtpError("the peer begins with % x", hello[:10])
	}
	if hello[10] < 3 {
		return zmtpError("the peer speaks revision %d: version 3 is needed, that of libzmq 4", hello[10])
	}
	if _, err := io.ReadFull(c.in, hello[11:]); err != nil {
		return err
	}
	if mechanism := string(bytes.TrimRight(hello[12:32], "\x00")); mechanism != "NULL" {
		return zmtpError("the peer wants the mechanism %q: only NULL is spoken", mechanism)
	}
	flags, size, err := c.header()
	if err != nil {
		return err
	}
	if flags&zmtpCommand == 0 {
		return zmtpError("a message before READY")
	}
	name, data, err := c.readCommand(size)
	if err != nil {
		return err
	}
	if name == "ERROR" {
		return commandError(data)
	}
	if name != "READY" {
		return zmtpError("the command %q in place of READY", name)
	}
	kind, err := property(data, "Socket-Type")
	if err != nil {
		return err
	}
	if !slices.Contains(peers, kind) {
		return zmtpError("the peer is a %q socket: %s is needed", kind, strings.Join(peers, " or "))
	}
	return nil
}

// appendProperty appends one pair of a READY command's metadata.
func appendProperty(dst []byte, name, value string) []byte {
	dst = append(append(dst, byte(len(name))), name...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}

// property finds a value in a READY command's metadata; names are compared without case.
func property(data []byte, want string) (string, error) {
	found := ""
	for len(data) > 0 {
		n := int(data[0])
		if len(data) < 1+n+4 {
			return "", zmtpError("metadata cut short")
		}
		name, rest := string(data[1:1+n]), data[1+n:]
		size := binary.BigEndian.Uint32(rest)
		if rest = rest[4:]; uint64(size) > uint64(len(rest)) {
			return "", zmtpError("metadata cut short")
		}
		if strings.EqualFold(name, want) {
			found = string(rest[:size])
		}
		data = rest[size:]
	}
	return found, nil
}

func commandError(data []byte) error {
	if len(data) > 0 && int(data[0]) < len(data) {
		data = data[1 : 1+int(data[0])]
	}
	return fmt.Errorf("the peer refuses: %q", data)
}

// header reads flags and size of a frame.
func (c *zmtpConn) header() (flags byte, size uint64, err error) {
	if flags, err = c.in.ReadByte(); err != nil {
		return 0, 0, err
	}
	if flags&^(zmtpMore|zmtpLong|zmtpCommand) != 0 || flags&zmtpCommand != 0 && flags&zmtpMore != 0 {
		return 0, 0, zmtpError("a frame with the flags %#x", flags)
	}
	if flags&zmtpLong == 0 {
		b, err := c.in.ReadByte()
		return flags, uint64(b), unexpected(err)
	}
	var b [8]byte
	_, err = io.ReadFull(c.in, b[:])
	return flags, binary.BigEndian.Uint64(b[:]), unexpected(err)
}

// unexpected: the end of the stream within a frame is no clean end.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readCommand reads the body of a command. What it returns is valid until the next one.
func (c *zmtpConn) readCommand(size uint64) (name string, data []byte, err error) {
	if size < 1 || size > maxZMTPCommand {
		return "", nil, zmtpError("a command of %d bytes", size)
	}
	c.command = slices.Grow(c.command[:0], int(size))[:size]
	if _, err := io.ReadFull(c.in, c.command); err != nil {
		return "", nil, unexpected(err)
	}
	n := int(c.command[0])
	if n >= len(c.command) {
		return "", nil, zmtpError("a command cut short")
	}
	return string(c.command[1 : 1+n]), c.command[1+n:], nil
}

// read fills m with the next message and deals with the commands before it.
func (c *zmtpConn) read(m *zmtpMessage) error {
	m.buf, m.ends = m.buf[:0], m.ends[:0]
	for {
		flags, size, err := c.header()
		if err != nil {
			if len(m.ends) > 0 {
				err = unexpected(err)
			}
			return err
		}
		c.heard.Store(time.Now().UnixNano())
		if flags&zmtpCommand != 0 {
			if err := c.obey(size); err != nil {
				return err
			}
			continue
		}
		if len(m.ends) == maxZMTPFrames {
			return zmtpError("a message of more than %d frames", maxZMTPFrames)
		}
		if size > uint64(maxZMTPMessage-len(m.buf)) {
			return zmtpError("a message of more than %d bytes", maxZMTPMessage)
		}
		if err := c.body(m, int(size)); err != nil {
			return err
		}
		if m.ends = append(m.ends, len(m.buf)); flags&zmtpMore == 0 {
			return nil
		}
	}
}

// body appends n bytes to the message. Memory follows what has come, not what a header announces.
func (c *zmtpConn) body(m *zmtpMessage, n int) error {
	for n > 0 {
		part := min(n, max(64<<10, len(m.buf)))
		from := len(m.buf)
		m.buf = slices.Grow(m.buf, part)[:from+part]
		if _, err := io.ReadFull(c.in, m.buf[from:]); err != nil {
			return unexpected(err)
		}
		n -= part
	}
	return nil
}

// obey deals with a command that comes after the handshake. Unknown ones are ignored.
func (c *zmtpConn) obey(size uint64) error {
	name, data, err := c.readCommand(size)
	if err != nil {
		return err
	}
	switch name {
	case "PING": // a TTL of 2 bytes, and up to 16 bytes of context that PONG repeats
		if len(data) < 2 || len(data) > 18 {
			return zmtpError("a PING of %d bytes", len(data))
		}
		pong := append([]byte{zmtpCommand, byte(5 + len(data) - 2)}, "\x04PONG"...)
		return c.write(append(pong, data[2:]...))
	case "PONG":
		if !c.pongs.Swap(true) {
			close(c.ponged)
		}
	case "ERROR":
		return commandError(data)
	}
	return nil
}

// ping asks for a PONG. libzmq answers although PING is of ZMTP 3.1; a peer that does not is never given up for it.
func (c *zmtpConn) ping() error { return c.write([]byte("\x04\x07\x04PING\x00\x00")) }

// subscribe asks a publisher for the topics with a prefix.
func (c *zmtpConn) subscribe(prefix string) error { return c.send([]byte("\x01" + prefix)) }

// send writes a message.
func (c *zmtpConn) send(frames ...[]byte) error {
	var b []byte
	for i, f := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = zmtpMore
		}
		if len(f) < 256 {
			b = append(b, flags, byte(len(f)))
		} else {
			b = binary.BigEndian.AppendUint64(append(b, flags|zmtpLong), uint64(len(f)))
		}
		b = append(b, f...)
	}
	return c.write(b)
}

func (c *zmtpConn) write(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.nc.SetWriteDeadline(time.Now().Add(zmtpWriteTime)); err != nil {
		return err
	}
	_, err := c.nc.Write(b)
	return err
}

func (c *zmtpConn) close() { _ = c.nc.Close() }

// peer returns the address of the other side.
func (c *zmtpConn) peer() string { return c.nc.RemoteAddr().String() }
