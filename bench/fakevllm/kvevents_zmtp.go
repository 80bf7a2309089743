package fakevllm

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"
)

// zmqPeer is the other side of a ZMTP 3 connection with the NULL mechanism.
type zmqPeer struct {
	nc net.Conn
	in *bufio.Reader
	mu sync.Mutex // of writes
}

var errZMQ = errors.New("fakevllm: the peer breaks ZMTP")

// shakeZMQ greets a peer as a socket of one type and returns it with the peer's type.
func shakeZMQ(nc net.Conn, own string) (p *zmqPeer, kind string, err error) {
	p = &zmqPeer{nc: nc, in: bufio.NewReader(nc)}
	_ = nc.SetDeadline(time.Now().Add(10 * time.Second))
	var hello [64]byte
	hello[0], hello[9], hello[10] = 0xff, 0x7f, 3
	copy(hello[12:], "NULL")
	if _, err := nc.Write(hello[:]); err != nil {
		return nil, "", err
	}
	if _, err := io.ReadFull(p.in, hello[:]); err != nil {
		return nil, "", err
	}
	if hello[0] != 0xff || hello[10] < 3 || strings.TrimRight(string(hello[12:32]), "\x00") != "NULL" {
		return nil, "", errZMQ
	}
	ready := append([]byte("\x05READY\x0bSocket-Type"), 0, 0, 0, byte(len(own)))
	if err := p.frame(4, append(ready, own...)); err != nil {
		return nil, "", err
	}
	flags, body, err := p.readFrame()
	if err != nil {
		return nil, "", err
	}
	name, rest, _ := strings.Cut(string(body), "Socket-Type")
	if flags&4 == 0 || !strings.HasPrefix(name, "\x05READY") || len(rest) < 4 || len(rest) < 4+int(rest[3]) {
		return nil, "", errZMQ
	}
	return p, rest[4 : 4+int(rest[3])], nc.SetDeadline(time.Time{})
}

// frame writes one frame.
func (p *zmqPeer) frame(flags byte, body []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.nc.Write(appendFrame(nil, flags, body))
	return err
}

func (p *zmqPeer) write(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.nc.Write(b)
	return err
}

func appendFrame(dst []byte, flags byte, body []byte) []byte {
	if len(body) < 256 {
		dst = append(dst, flags, byte(len(body)))
	} else {
		dst = binary.BigEndian.AppendUint64(append(dst, flags|2), uint64(len(body)))
	}
	return append(dst, body...)
}

// appendMessage appends the frames of one message.
func appendMessage(dst []byte, frames ...[]byte) []byte {
	for i, f := range frames {
		flags := byte(1)
		if i == len(frames)-1 {
			flags = 0
		}
		dst = appendFrame(dst, flags, f)
	}
	return dst
}

func (p *zmqPeer) readFrame() (flags byte, body []byte, err error) {
	if flags, err = p.in.ReadByte(); err != nil {
		return 0, nil, err
	}
	var size [8]byte
	n := 7
	if flags&2 != 0 {
		n = 0
	}
	if _, err := io.ReadFull(p.in, size[n:]); err != nil {
		return 0, nil, err
	}
	length := binary.BigEndian.Uint64(size[:])
	if length > 1<<16 { // subscribers have little to say
		return 0, nil, errZMQ
	}
	body = make([]byte, length)
	_, err = io.ReadFull(p.in, body)
	return flags, body, err
}

// read returns the next message. PING is answered; the SUBSCRIBE and CANCEL
// commands of ZMTP 3.1 become the messages that ZMTP 3.0 has for them.
func (p *zmqPeer) read() (frames [][]byte, err error) {
	for {
		flags, body, err := p.readFrame()
		if err != nil {
			return nil, err
		}
		if flags&4 == 0 {
			if frames = append(frames, body); flags&1 == 0 {
				return frames, nil
			}
			if len(frames) > 8 {
				return nil, errZMQ
			}
			continue
		}
		command := string(body)
		switch {
		case strings.HasPrefix(command, "\x04PING") && len(body) >= 7:
			if err := p.frame(4, append([]byte("\x04PONG"), body[7:]...)); err != nil {
				return nil, err
			}
		case strings.HasPrefix(command, "\x09SUBSCRIBE"):
			return [][]byte{append([]byte{1}, body[10:]...)}, nil
		case strings.HasPrefix(command, "\x06CANCEL"):
			return [][]byte{append([]byte{0}, body[7:]...)}, nil
		}
	}
}

// zmqBinds tells whether vLLM binds an endpoint: when it has a wildcard. It connects to any other.
func zmqBinds(endpoint string) bool {
	return strings.Contains(endpoint, "*") || strings.Contains(endpoint, "::")
}

// zmqAddr returns host:port of tcp://host:port, an empty host for a wildcard.
func zmqAddr(endpoint string) (string, error) {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	colon := strings.LastIndexByte(rest, ':')
	if !ok || colon < 0 {
		return "", fmt.Errorf("%q: use tcp://*:port or tcp://host:port", endpoint)
	}
	host, port := strings.Trim(rest[:colon], "[]"), rest[colon+1:]
	if _, err := net.LookupPort("tcp", port); err != nil || port == "" {
		return "", fmt.Errorf("%q: use tcp://*:port or tcp://host:port", endpoint)
	}
	if host == "*" || host == "::" {
		host = ""
	}
	return net.JoinHostPort(host, port), nil
}
