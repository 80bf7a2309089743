package proxy

import (
	"errors"
	"io"
)

// framer is the strict reader in front of fasthttp's. It follows the bytes of a
// client connection through request lines, fields, bodies and trailers by the
// letter of RFC 9112, and stops at the first byte that another reader could take
// for something else. fasthttp never sees that byte nor what is behind it, so the
// two cannot disagree on where a request ends. It keeps no bytes.
//
// Stricter than the RFC, which leaves it open: one empty line may come before a
// request, line ends are CR LF, there is no obs-fold, no whitespace around a chunk
// size, no list of codings or lengths, a Host is a name or an address with at most a
// port, a target is printable ASCII, and the version is 1.0 or 1.1.
type framer struct {
	state   framingState
	refused bool
	expects bool // the field's name is that of Expect
	trailer bool // the fields are trailers
	old     bool // HTTP/1.0
	blank   bool // an empty line came before the request

	field    framed
	lengths  bool
	codings  bool
	hosts    bool
	host     hostState
	behind   bool  // whitespace behind the value of such a field
	n        int   // bytes of the current element
	beside   int   // bytes of a chunk's extensions, or of the trailers
	left     int64 // bytes to come of a body or chunk
	name     [len("transfer-encoding")]byte
	poisoned int // bytes of poison that were handed out
}

// maxFields bounds the fields of a head: what is sent on must stay far below the
// 256 that an engine's own server takes.
const maxFields = 100

// framed names the fields whose values are read to the letter.
type framed uint8

const (
	framedOther framed = iota
	framedLength
	framedCoding
	framedHost
)

// hostState is what the next byte of a Host field belongs to.
type hostState uint8

const (
	hostStart hostState = iota
	hostName
	hostAddress // in brackets
	hostBehind
	hostPort
)

// framingState is what the next byte belongs to. Up to framingEndLF it is the head.
type framingState uint8

const (
	framingStart framingState = iota
	framingStartLF
	framingMethod
	framingTarget
	framingVersion
	framingLineLF
	framingField // at the start of a field's line, or of the empty one
	framingName
	framingValue
	framingEndLF
	framingBody
	framingSize
	framingExt
	framingSizeLF
	framingChunk
	framingChunkCR
	framingChunkLF
)

// poison ends a head that is refused: NUL has no place in any part of it, so
// fasthttp stops there and has the request answered with 400.
const poison = "\x00\r\n\r\n"

var errFraming = errors.New("the request's body is framed badly")

// read hands on what pass has read, up to what is refused.
func (f *framer) read(p []byte, pass func([]byte) (int, error)) (int, error) {
	var n int
	var err error
	if !f.refused {
		n, err = pass(p)
		switch good := f.scan(p[:n]); {
		case good == n:
			return n, err
		case good > 0:
			return good, nil
		}
	}
	switch {
	case f.state > framingEndLF || f.trailer:
		return 0, errFraming
	case f.poisoned == len(poison):
		return 0, io.EOF
	}
	n = copy(p, poison[f.poisoned:])
	f.poisoned += n
	return n, nil
}

// scan follows b and returns how much of it is good; less than all of it when
// the byte behind is refused.
func (f *framer) scan(b []byte) int {
	for i := 0; i < len(b); {
		switch {
		case f.state == framingBody || f.state == framingChunk:
			n := min(f.left, int64(len(b)-i))
			i += int(n)
			if f.left -= n; f.left == 0 {
				f.ended()
			}
			continue
		case f.state == framingValue && f.field == framedOther && fieldByte[b[i]]:
			from := i
			for i++; i < len(b) && fieldByte[b[i]]; i++ {
			}
			f.beside += i - from
			continue
		case f.state == framingStart:
			if n := startLine(b[i:]); n > 0 {
				i += n
				f.state = framingField
				f.old = false
				continue
			}
		case f.state == framingField && !f.trailer:
			if n := plainField(b[i:]); n > 0 {
				i += n
				continue
			}
		}
		if !f.step(b[i]) {
			if !f.expects {
				f.refused = true
				return i
			}
			f.expects = false
			if from := i - len(expectName); from >= 0 { // else its begin has been handed on
				copy(b[from:], expectName)
			}
		}
		i++
	}
	return len(b)
}

// startLine returns the length of the request line that b begins with when it is one
// of HTTP/1.1, complete and good; 0 leaves it to step, as plainField does. Line by
// line, a head of 210 bytes takes half the time that step needs (BenchmarkFramer).
func startLine(b []byte) int {
	const version = " HTTP/1.1\r\n"
	i := 0
	for i < len(b) && token[b[i]] {
		i++
	}
	if i == 0 || i == len(b) || b[i] != ' ' {
		return 0
	}
	from := i + 1
	for i = from; i < len(b) && b[i] > ' ' && b[i] < 0x7f; i++ {
	}
	if i == from || len(b)-i < len(version) || string(b[i:i+len(version)]) != version {
		return 0
	}
	return i + len(version)
}

// plainField returns the length of the field line that b begins with when it is
// complete, good, and of no field that framing depends on.
func plainField(b []byte) int {
	i := 0
	for i < len(b) && token[b[i]] {
		i++
	}
	if i == 0 || i == len(b) || b[i] != ':' {
		return 0
	}
	switch b[0] | 0x20 {
	case 'h', 'e', 'c', 't':
		switch i {
		case len("host"), len("expect"), len("content-length"), len("transfer-encoding"):
			return 0
		}
	}
	for i++; i < len(b) && fieldByte[b[i]]; i++ {
	}
	if len(b)-i < 2 || b[i] != '\r' || b[i+1] != '\n' {
		return 0
	}
	return i + 2
}

// fieldByte tells the bytes that a field's value may have (RFC 9110, 5.5).
var fieldByte = func() (t [256]bool) {
	for c := range t {
		t[c] = c >= ' ' && c != 0x7f || c == '\t'
	}
	return t
}()

// expectName is how fasthttp wants the field's name, the only one for which case
// matters to it: it answers 100 before anyone else sees the request.
const expectName = "Expect"

// ended goes on behind the payload of a body or chunk.
func (f *framer) ended() {
	if f.state == framingChunk {
		f.state = framingChunkCR
		return
	}
	*f = framer{}
}

// step takes one byte that is not payload; false refuses it, unless expects is set.
func (f *framer) step(c byte) bool {
	switch f.state {
	case framingStart:
		if c == '\r' && !f.blank {
			f.state = framingStartLF
			return true
		}
		f.state = framingMethod
		return token[c]
	case framingStartLF:
		f.state, f.blank = framingStart, true
		return c == '\n'
	case framingMethod:
		if c == ' ' {
			f.state, f.n = framingTarget, 0
			return true
		}
		return token[c]
	case framingTarget:
		if c == ' ' {
			ok := f.n > 0
			f.state, f.n = framingVersion, 0
			return ok
		}
		f.n++
		return c > ' ' && c < 0x7f
	case framingVersion:
		return f.version(c)
	case framingLineLF:
		f.state = framingField
		return c == '\n'
	case framingField:
		if c == '\r' {
			f.state = framingEndLF
			return true
		}
		f.state, f.n = framingName, 0
		return f.naming(c)
	case framingName:
		return f.naming(c)
	case framingValue:
		if c == '\r' {
			f.state = framingLineLF
			return f.valued()
		}
		return f.framedValue(c)
	case framingEndLF:
		return c == '\n' && f.headEnds()
	case framingSize, framingExt:
		return f.size(c)
	case framingSizeLF:
		f.state = framingChunk
		if f.left == 0 {
			f.state, f.trailer, f.beside = framingField, true, 0
		}
		return c == '\n'
	case framingChunkCR:
		f.state = framingChunkLF
		return c == '\r'
	case framingChunkLF:
		f.state, f.n, f.beside = framingSize, 0, 0
		return c == '\n'
	}
	return false
}

// version takes a byte of HTTP/1.0 or HTTP/1.1 and its CR.
func (f *framer) version(c byte) bool {
	const name = "HTTP/1."
	f.n++
	switch {
	case f.n <= len(name):
		return c == name[f.n-1]
	case f.n == len(name)+1:
		f.old = c == '0'
		return c == '0' || c == '1'
	}
	f.state = framingLineLF
	return c == '\r'
}

// naming takes a byte of a field's name, or the colon behind it.
func (f *framer) naming(c byte) bool {
	if f.beside++; f.trailer && f.beside > maxTrailers {
		return false
	}
	if c == ':' && f.n > 0 {
		f.state, f.field, f.behind, f.host = framingValue, framedOther, false, hostStart
		again := false
		if f.n <= len(f.name) {
			switch string(f.name[:f.n]) {
			case "content-length":
				f.field, again = framedLength, f.lengths || f.codings
			case "transfer-encoding":
				f.field, again = framedCoding, f.lengths || f.codings
			case "host":
				f.field, again = framedHost, f.hosts
			case "expect":
				f.expects, f.n = true, 0
				return false
			}
		}
		f.n = 0
		return !again && (f.field == framedOther || !f.trailer)
	}
	if f.n < len(f.name) {
		f.name[f.n] = c
		if 'A' <= c && c <= 'Z' {
			f.name[f.n] += 'a' - 'A'
		}
	}
	f.n++
	return token[c]
}

// framedValue takes a byte of a value: any that is allowed, or a digit of a
// length, or a letter of chunked, with whitespace around.
func (f *framer) framedValue(c byte) bool {
	const chunked = "chunked"
	if f.field == framedOther {
		return fieldByte[c]
	}
	if c == ' ' || c == '\t' {
		f.behind = f.n > 0
		return true
	}
	f.n++
	if f.behind {
		return false
	}
	switch f.field {
	case framedHost:
		return f.hostByte(c)
	case framedCoding:
		return f.n <= len(chunked) && c|0x20 == chunked[f.n-1]
	}
	f.left = 10*f.left + int64(c-'0')
	return '0' <= c && c <= '9' && f.n <= 18
}

// valued judges a value at its end.
func (f *framer) valued() bool {
	switch f.field {
	case framedLength:
		f.lengths = true
		return f.n > 0
	case framedCoding:
		f.codings = true
		return f.n == len("chunked") && !f.old
	case framedHost:
		f.hosts = true
		return f.host == hostName || f.host == hostBehind || f.host == hostPort
	}
	return !f.trailer || f.beside <= maxTrailers
}

// hostByte takes a byte of name:port or [address]:port.
func (f *framer) hostByte(c byte) bool {
	digit := '0' <= c && c <= '9'
	switch {
	case f.host == hostPort:
		return digit
	case f.host == hostAddress && c == ']':
		f.host = hostBehind
		return true
	case f.host == hostAddress:
		return unhex(c) < 16 || c == ':' || c == '.'
	case f.host != hostStart && c == ':':
		f.host = hostPort
		return true
	case f.host == hostBehind:
		return false
	case f.host == hostStart && c == '[':
		f.host = hostAddress
		return true
	}
	f.host = hostName
	return digit || 'a' <= c|0x20 && c|0x20 <= 'z' || c == '-' || c == '.' || c == '_' || c == '~'
}

// headEnds goes on behind a head or behind trailers.
func (f *framer) headEnds() bool {
	switch {
	case !f.hosts && !f.old:
		return false
	case f.trailer || !f.codings && f.left == 0:
		*f = framer{}
	case f.codings:
		f.state, f.n, f.beside = framingSize, 0, 0
	default:
		f.state = framingBody
	}
	return true
}

// size takes a byte of the line in front of a chunk.
func (f *framer) size(c byte) bool {
	if f.state == framingExt {
		if c == '\r' {
			f.state = framingSizeLF
			return true
		}
		f.beside++
		return fieldByte[c] && f.beside <= maxChunkLine
	}
	if d := unhex(c); d < 16 {
		if f.n == 0 {
			f.left = 0
		}
		f.n++
		f.left = f.left<<4 | int64(d)
		return f.n <= 15
	}
	f.state = framingExt
	if c == '\r' {
		f.state = framingSizeLF
	}
	return f.n > 0 && (c == '\r' || c == ';')
}
