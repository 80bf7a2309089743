package routing

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
	"unsafe"
)

// maxDepth is the number of objects and arrays that may stand inside each other.
// It bounds the scanner's recursion; Python's json gives up at about 1000.
const maxDepth = 512

// BodyError says why a request body was refused, to be answered with a 400.
type BodyError struct {
	Msg    string // what is wrong, and what was expected
	Path   string // the place in the document, as in messages[2].content; empty at the top
	Offset int    // the place in the body, in bytes from its start
}

// Error returns the message with the place.
func (e *BodyError) Error() string {
	if e.Path == "" {
		return fmt.Sprintf("invalid request body: %s (at byte %d)", e.Msg, e.Offset)
	}
	return fmt.Sprintf("invalid request body: %s (in %s, at byte %d)", e.Msg, e.Path, e.Offset)
}

// scanner walks a JSON document by byte offsets. Every method takes the offset
// of what it reads and returns the offset behind it, or -1 after the first
// error; an offset of -1 goes through all of them unharmed, so that only the end
// of a walk needs a check.
//
// It accepts what Python's json.loads accepts of a UTF-8 document (NaN, Infinity
// and -Infinity are numbers, a lone surrogate escape is a character) except that
// bytes that are no UTF-8 are let through, and it reads strings as Go's
// encoding/json does: what is no character becomes U+FFFD.
type scanner struct {
	b     []byte
	out   []byte // unescaped and rendered text, in the order of the document
	name  []byte // the last key that had to be unescaped
	depth int
	err   *BodyError

	canon canonical // what the renderer needs of the value being skipped
}

func (s *scanner) reset(body []byte) {
	s.b, s.out, s.name = body, s.out[:0], s.name[:0]
	s.depth, s.err = 0, nil
	s.canon.reset()
}

// fail records the first error and returns -1.
func (s *scanner) fail(i int, msg string) int {
	if s.err == nil {
		if i >= len(s.b) {
			i, msg = len(s.b), "the JSON document ends too early"
		}
		s.err = &BodyError{Msg: msg, Offset: i}
	}
	return -1
}

// peek returns the byte at i, or 0 at the end and after an error.
func (s *scanner) peek(i int) byte {
	if uint(i) < uint(len(s.b)) {
		return s.b[i]
	}
	return 0
}

// space returns the offset of the first byte at or after i that is no white space.
func (s *scanner) space(i int) int {
	for i < len(s.b) && s.b[i] <= ' ' {
		switch s.b[i] {
		case ' ', '\n', '\r', '\t':
			i++
		default:
			return i
		}
	}
	return i
}

// open enters the object or array at i. It returns the offset of the first
// element, or, without one, the offset behind the closing bracket and false.
func (s *scanner) open(i int, closing byte) (int, bool) {
	if s.depth++; s.depth > maxDepth {
		return s.fail(i, "objects and arrays are nested deeper than "+strconv.Itoa(maxDepth)+" levels"), false
	}
	i = s.space(i + 1)
	if s.peek(i) == closing {
		s.depth--
		return i + 1, false
	}
	return i, true
}

// next goes on to the next element of an object or array. i is the offset behind
// an element. It returns as open does.
func (s *scanner) next(i int, closing byte) (int, bool) {
	if i < 0 {
		return -1, false
	}
	i = s.space(i)
	switch s.peek(i) {
	case ',':
		return s.space(i + 1), true
	case closing:
		s.depth--
		return i + 1, false
	}
	return s.fail(i, "expected ',' or '"+string(rune(closing))+"'"), false
}

// key reads an object's key and returns it, unescaped, with the offset of its
// value. The key is valid until the next call.
func (s *scanner) key(i int) ([]byte, int) {
	if s.peek(i) != '"' {
		return nil, s.fail(i, "expected a key in double quotes")
	}
	end, plain := scanString(s.b, i+1)
	if end < 0 {
		return nil, s.badString(i)
	}
	name := s.b[i+1 : end-1]
	if !plain {
		s.name, _ = appendString(s.name[:0], s.b, i+1)
		name = s.name
	}
	end = s.space(end)
	if s.peek(end) != ':' {
		return nil, s.fail(end, "expected ':' after a key")
	}
	return name, s.space(end + 1)
}

// skip checks the value at i and returns the offset behind it.
func (s *scanner) skip(i int) int {
	if i < 0 {
		return -1
	}
	switch c := s.peek(i); c {
	case '"':
		end, _ := scanString(s.b, i+1)
		if end < 0 {
			return s.badString(i)
		}
		return end
	case '{':
		return s.skipObject(i)
	case '[':
		i, more := s.open(i, ']')
		for more {
			i, more = s.next(s.skip(i), ']')
		}
		return i
	case 't':
		return s.literal(i, "true")
	case 'f':
		return s.literal(i, "false")
	case 'n':
		return s.literal(i, "null")
	case 'N':
		return s.literal(i, "NaN")
	case 'I':
		return s.literal(i, "Infinity")
	default:
		if c == '-' || c-'0' <= 9 {
			return s.number(i)
		}
		return s.fail(i, "expected a value")
	}
}

func (s *scanner) skipObject(i int) int {
	header := s.canon.enter()
	i, more := s.open(i, '}')
	for more {
		member := s.canon.member(i)
		_, i = s.key(i)
		s.canon.value(member, i)
		i = s.skip(i)
		s.canon.leave(member)
		i, more = s.next(i, '}')
	}
	s.canon.value(header, i)
	s.canon.leave(header)
	return i
}

func (s *scanner) literal(i int, want string) int {
	if len(s.b)-i < len(want) {
		if string(s.b[i:]) == want[:len(s.b)-i] {
			return s.fail(len(s.b), "")
		}
	} else if string(s.b[i:i+len(want)]) == want {
		return i + len(want)
	}
	return s.fail(i, "expected "+want)
}

// number checks the number at i: -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?
func (s *scanner) number(i int) int {
	if s.b[i] == '-' {
		if i++; s.peek(i) == 'I' {
			return s.literal(i, "Infinity")
		}
	}
	if s.peek(i) == '0' {
		i++
	} else if i = s.digits(i); i < 0 {
		return -1
	}
	if s.peek(i) == '.' {
		if i = s.digits(i + 1); i < 0 {
			return -1
		}
	}
	if s.peek(i)|0x20 == 'e' {
		i++
		if c := s.peek(i); c == '-' || c == '+' {
			i++
		}
		i = s.digits(i)
	}
	return i
}

func (s *scanner) digits(i int) int {
	if s.peek(i)-'0' > 9 {
		return s.fail(i, "expected a digit")
	}
	for s.peek(i)-'0' <= 9 {
		i++
	}
	return i
}

// badString explains why the string at i could not be read.
func (s *scanner) badString(i int) int {
	for i++; i < len(s.b); i++ {
		switch c := s.b[i]; {
		case c < ' ':
			return s.fail(i, "a control character inside a string must be escaped")
		case c == '\\':
			i++
			if c := s.peek(i); c == 'u' {
				for range 4 {
					if i++; unhex[s.peek(i)] < 0 {
						return s.fail(i, `expected four hexadecimal digits after \u`)
					}
				}
			} else if escapes[c] == 0 {
				return s.fail(i, "unknown escape sequence in a string")
			}
		}
	}
	return s.fail(i, "")
}

// place completes the error with the path to it.
func (s *scanner) place() error {
	if s.err.Path == "" {
		s.err.Path = jsonPath(s.b, s.err.Offset)
	}
	return s.err
}

// The string scanners look at 8 bytes at a time, as one little-endian word.
const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// special marks, in the high bit of each, the bytes of w that end a run of plain
// text: quotes, backslashes, control characters and all that is not ASCII. Only
// the lowest mark is exact: a subtraction borrows from the bytes above it.
func special(w uint64) uint64 {
	// Flipping bit 1 moves '"' to 0x20, next to the control characters, which
	// change places among themselves.
	return (((w ^ 0x02*ones) - 0x21*ones) | ((w ^ '\\'*ones) - ones) | w) & highs
}

// escapes maps the character after a backslash to what it stands for; 0: none.
var escapes = [256]byte{
	'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t',
}

// unhex maps hexadecimal digits to their values, all else to -1.
var unhex = func() (t [256]int8) {
	for i := range t {
		t[i] = -1
	}
	for i := range 10 {
		t['0'+i] = int8(i)
	}
	for i := range 6 {
		t['a'+i], t['A'+i] = int8(10+i), int8(10+i)
	}
	return t
}()

// hex4 returns the value of the four hexadecimal digits at b[i:], -1 when they are not.
func hex4(b []byte, i int) rune {
	if len(b)-i < 4 {
		return -1
	}
	d := b[i : i+4]
	return rune(unhex[d[0]])<<12 | rune(unhex[d[1]])<<8 | rune(unhex[d[2]])<<4 | rune(unhex[d[3]])
}

// scanString reads a string whose first byte behind the quote is b[i]. It returns
// the offset behind the closing quote, -1 when there is an error, and whether
// the string is plain: ASCII without escapes, so that its bytes are its value.
func scanString(b []byte, i int) (end int, plain bool) {
	plain = true
	for {
		i += plainText(b[i:min(i+textWindow, len(b))])
		if i >= len(b) {
			return -1, false
		}
		switch c := b[i]; {
		case c == '"':
			return i + 1, plain
		case c == '\\':
			_, size := unescape(b, i)
			if size == 0 {
				return -1, false
			}
			i += size
			plain = false
		case c < ' ':
			return -1, false
		case c >= utf8.RuneSelf:
			for i < len(b) && b[i] >= utf8.RuneSelf {
				i++
			}
			plain = false
		default: // near the end
			i++
		}
	}
}

// appendString reads a string as scanString does and appends its value to out.
func appendString(out, b []byte, i int) ([]byte, int) {
	n, buf := len(out), out[:cap(out)]
	for {
		if n+2*textStep > len(buf) {
			buf = grow(buf, n)
		}
		wrote, read := copyText(buf[n:], b[i:min(i+textWindow, len(b))])
		n += wrote
		i += read
		switch {
		case i >= len(b):
			return out, -1
		case n+textStep > len(buf): // copyText ran out of room
		case b[i] == '"':
			return buf[:n], i + 1
		case b[i] == '\\':
			r, size := unescape(b, i)
			if size == 0 {
				return out, -1
			}
			n += utf8.EncodeRune(buf[n:n+4], r)
			i += size
		case b[i] < ' ':
			return out, -1
		case b[i] >= utf8.RuneSelf:
			r, size := utf8.DecodeRune(b[i:]) // U+FFFD for a byte that begins no character
			n += utf8.EncodeRune(buf[n:n+4], r)
			i += size
		default: // near the end
			buf[n] = b[i]
			n++
			i++
		}
	}
}

// textStep is the room that copyText and plainText want before them.
const textStep = 17

// textWindow is how much they are given at once: assembler cannot be preempted, and the
// collector would wait for the whole of a long string.
const textWindow = 64 << 10

// copyTextPortable copies what is most of a string: plain text, simple escapes and
// characters of three bytes. It returns the bytes written and read when it comes
// to anything else, or near the end of either side. dst is overwritten beyond
// what is written. copyText is the same in assembler where there is some: it takes
// a quarter (plain text) to two thirds (all mixed) of the time (BenchmarkCopyText).
//
// It copies 16 bytes while it looks for what must not be copied among them, and
// calls nothing, so that all stays in registers: on source code, with an escape
// in every 27 bytes, scanning and copying at once takes half the time of one
// after the other. unsafe saves the four bounds checks of each word, a fifth of
// the time; the loop's condition is the proof: at most 16 bytes are read at i and
// written at n, then at most 4 more after both have advanced by less than 16, and
// n is never above i, as nothing gets longer (BenchmarkParse).
func copyTextPortable(dst, src []byte) (n, i int) {
	last := min(len(src), len(dst)) - textStep
	if last < 0 {
		return 0, 0
	}
	s, d := unsafe.Pointer(unsafe.SliceData(src)), unsafe.Pointer(unsafe.SliceData(dst))
	for i <= last {
		w, v := load64(s, i), load64(s, i+8)
		store64(d, n, w)
		store64(d, n+8, v)
		m := special(w)
		if m == 0 {
			i += 8
			n += 8
			if m = special(v); m == 0 {
				i += 8
				n += 8
				continue
			}
		}
		k := bits.TrailingZeros64(m) / 8
		i += k
		n += k
		switch c := src[i]; {
		case c == '\\':
			e := escapes[src[i+1]]
			if e == 0 {
				return n, i
			}
			dst[n] = e
			n++
			i += 2
		case c >= 0xe1:
			// A lead byte from 0xe1 to 0xef but 0xed, which may begin a surrogate, and
			// two bytes that continue it; such characters come in runs.
			for i <= last {
				r := binary.LittleEndian.Uint32(src[i : i+4])
				if r&0xc0c0f0 != 0x8080e0 || r&0xff == 0xe0 || r&0xff == 0xed {
					break
				}
				binary.LittleEndian.PutUint32(dst[n:n+4], r)
				i += 3
				n += 3
			}
			if src[i] >= utf8.RuneSelf {
				return n, i
			}
		default:
			return n, i
		}
	}
	return n, i
}

// plainTextPortable, like plainText, returns the number of bytes of src before the
// first that is not plain text, or up to textStep less when there is none.
func plainTextPortable(src []byte) int {
	s, i := unsafe.Pointer(unsafe.SliceData(src)), 0
	for last := len(src) - textStep; i <= last; i += 16 {
		if m := special(load64(s, i)); m != 0 {
			return i + bits.TrailingZeros64(m)/8
		}
		if m := special(load64(s, i+8)); m != 0 {
			return i + 8 + bits.TrailingZeros64(m)/8
		}
	}
	return i
}

// load64 and store64 are encoding/binary's Uint64 and PutUint64 without checks.
// Their callers have made sure that 8 bytes are there.
func load64(p unsafe.Pointer, at int) uint64 {
	return binary.LittleEndian.Uint64((*[8]byte)(unsafe.Add(p, at))[:])
}

func store64(p unsafe.Pointer, at int, v uint64) {
	binary.LittleEndian.PutUint64((*[8]byte)(unsafe.Add(p, at))[:], v)
}

// unescape reads the escape at b[i:] and returns its character and length, which
// is 0 when it is none. A pair of surrogates is one character, and one without
// the other is U+FFFD.
func unescape(b []byte, i int) (rune, int) {
	if i+1 >= len(b) {
		return 0, 0
	}
	if e := escapes[b[i+1]]; e != 0 {
		return rune(e), 2
	}
	r := hex4(b, i+2)
	if b[i+1] != 'u' || r < 0 {
		return 0, 0
	}
	if !utf16.IsSurrogate(r) {
		return r, 6
	}
	if len(b)-i >= 12 && b[i+6] == '\\' && b[i+7] == 'u' {
		if both := utf16.DecodeRune(r, hex4(b, i+8)); both != utf8.RuneError {
			return both, 12
		}
	}
	return utf8.RuneError, 6
}

// grow returns a larger buffer with the first n bytes of buf.
func grow(buf []byte, n int) []byte {
	bigger := make([]byte, max(4096, 2*len(buf)))
	copy(bigger, buf[:n])
	return bigger
}

// jsonPath names the place of an offset in a document that is well formed up to
// there, as in messages[2].content.
func jsonPath(b []byte, offset int) string {
	type level struct {
		key     string
		index   int
		isArray bool
	}
	var levels []level
	key := "" // the last string read
	for i := 0; i < min(offset, len(b)); {
		switch c := b[i]; c {
		case '"':
			end, _ := scanString(b, i+1)
			if end < 0 || end > offset {
				i = offset
				continue
			}
			key = string(b[i+1 : end-1])
			i = end
			continue
		case '{', '[':
			levels = append(levels, level{isArray: c == '['})
		case '}', ']':
			levels = levels[:max(0, len(levels)-1)]
		case ':':
			if n := len(levels); n > 0 {
				levels[n-1].key = key
			}
		case ',':
			if n := len(levels); n > 0 {
				levels[n-1].index++
				levels[n-1].key = ""
			}
		}
		i++
	}
	const maxPath = 200 // bytes; a path is for people
	var path []byte
	for _, l := range levels {
		switch {
		case len(path) > maxPath:
			return string(path) + "..."
		case l.isArray:
			path = append(path, '[')
			path = strconv.AppendInt(path, int64(l.index), 10)
			path = append(path, ']')
		case l.key != "":
			if len(path) > 0 {
				path = append(path, '.')
			}
			if len(l.key) > maxPath || strconv.Quote(l.key) != `"`+l.key+`"` {
				l.key = strconv.Quote(l.key[:min(len(l.key), maxPath)])
			}
			path = append(path, l.key...)
		}
	}
	return string(path)
}
