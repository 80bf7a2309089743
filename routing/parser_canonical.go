package routing

import (
	"bytes"
	"cmp"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"unicode/utf8"
	"unsafe"
)

// canonical renders JSON values as Go's encoding/json marshals what it has
// decoded into an any: keys sorted, the last of equal keys, no white space,
// numbers as float64, and <, >, &, U+2028 and U+2029 escaped.
//
// While the scanner skips a value it writes down where the members of every
// object are, in the order of the document. With these notes each byte of the
// value is read once more, however deep it is nested.
type canonical struct {
	record bool
	full   bool // there are more notes than maxNodes
	nodes  []node
	order  []member // the members of the objects being rendered
	keys   []byte   // keys that had to be unescaped
}

// node is an object or one of its members. Those inside it follow, up to end.
type node struct {
	key   uint32 // offset of a member's key
	value uint32 // offset of a member's value, or behind an object
	end   uint32 // index behind the last node inside
}

// member is a member of an object being rendered.
type member struct {
	key  []byte // unescaped
	node int
}

// maxNodes bounds the notes on one value, and with them the time it takes to sort
// keys (a quarter of a second at the worst). What has more objects and members is
// hashed as it was sent.
const maxNodes = 1 << 17

func (c *canonical) reset() {
	c.record, c.full = false, false
	c.nodes, c.order, c.keys = c.nodes[:0], c.order[:0], c.keys[:0]
}

func (c *canonical) enter() int { return c.member(0) }

func (c *canonical) member(at int) int {
	if !c.record {
		return -1
	}
	if len(c.nodes) == maxNodes {
		c.full, c.record = true, false
		return -1
	}
	c.nodes = append(c.nodes, node{key: uint32(at)})
	return len(c.nodes) - 1
}

func (c *canonical) value(n, at int) {
	if n >= 0 {
		c.nodes[n].value = uint32(at)
	}
}

func (c *canonical) leave(n int) {
	if n >= 0 {
		c.nodes[n].end = uint32(len(c.nodes))
	}
}

// canonical reads the value at i and appends its canonical form to s.out.
func (s *scanner) canonical(i int) int {
	s.canon.reset()
	s.canon.record = true
	end := s.skip(i)
	s.canon.record = false
	switch {
	case end < 0:
	case s.canon.full:
		s.out = append(s.out, s.b[i:end]...)
	default:
		s.render(i, 0)
	}
	return end
}

// render appends the value at i. Its first object is node n. It returns the
// offset behind the value and the node behind its last object.
func (s *scanner) render(i, n int) (int, int) {
	switch s.b[i] {
	case '{':
		return s.renderObject(n)
	case '[':
		s.out = append(s.out, '[')
		i, more := s.open(i, ']')
		for more {
			i, n = s.render(i, n)
			if i, more = s.next(i, ']'); more {
				s.out = append(s.out, ',')
			}
		}
		s.out = append(s.out, ']')
		return i, n
	case '"':
		return s.quoted(i), n
	default:
		end := s.skip(i)
		s.out = appendNumber(s.out, s.b[i:end])
		return end, n
	}
}

func (s *scanner) renderObject(object int) (int, int) {
	c := &s.canon
	first := len(c.order)
	for n := object + 1; n < int(c.nodes[object].end); n = int(c.nodes[n].end) {
		at := int(c.nodes[n].key) + 1
		end, plain := scanString(s.b, at)
		key := s.b[at : end-1]
		if !plain {
			from := len(c.keys)
			c.keys, _ = appendString(c.keys, s.b, at)
			key = c.keys[from:]
		}
		c.order = append(c.order, member{key, n})
	}
	slices.SortFunc(c.order[first:], func(x, y member) int {
		return cmp.Or(bytes.Compare(x.key, y.key), cmp.Compare(x.node, y.node))
	})
	s.out = append(s.out, '{')
	last := len(c.order)
	for k := first; k < last; k++ {
		if k+1 < last && bytes.Equal(c.order[k].key, c.order[k+1].key) {
			continue // the last of equal keys counts
		}
		if s.out[len(s.out)-1] != '{' {
			s.out = append(s.out, ',')
		}
		n := c.order[k].node
		s.quoted(int(c.nodes[n].key))
		s.out = append(s.out, ':')
		s.render(int(c.nodes[n].value), n+1)
	}
	s.out = append(s.out, '}')
	c.order = c.order[:first]
	return int(c.nodes[object].value), int(c.nodes[object].end)
}

// appendNumber appends a literal: numbers as the float64 they stand for, in the
// form of ECMAScript, all else as it is. A number beyond float64 stays, too.
func appendNumber(out, literal []byte) []byte {
	if c := literal[0]; c != '-' && c-'0' > 9 || len(literal) <= 15 && !bytes.ContainsAny(literal, ".eE") {
		return append(out, literal...) // true, false, null, NaN or an exact integer
	}
	f, err := strconv.ParseFloat(string(literal), 64)
	if err != nil || math.IsInf(f, 0) || math.IsNaN(f) {
		return append(out, literal...)
	}
	form := byte('f')
	if abs := math.Abs(f); abs != 0 && (abs < 1e-6 || abs >= 1e21) {
		form = 'e'
	}
	out = strconv.AppendFloat(out, f, form, -1, 64)
	if n := len(out); form == 'e' && n >= 4 && out[n-4] == 'e' && out[n-3] == '-' && out[n-2] == '0' {
		out[n-2] = out[n-1] // e-07 is e-7
		out = out[:n-1]
	}
	return out
}

const hexDigits = "0123456789abcdef"

// quoted appends the string at i, which was found well formed, as encoding/json
// quotes its value, and returns the offset behind it.
func (s *scanner) quoted(i int) int {
	b := s.b
	out := append(s.out, '"')
	i++
	start := i // of the run that stays as it is
	for {
		i += sameQuoted(b[i:])
		switch c := b[i]; {
		case c == '"':
			out = append(out, b[start:i]...)
			s.out = append(out, '"')
			return i + 1
		case c == '\\':
			r, size := unescape(b, i)
			if c := b[i+1]; c != 'u' && c != '/' {
				i += size
				continue
			}
			out = appendQuotedRune(append(out, b[start:i]...), r)
			i += size
			start = i
		case c >= utf8.RuneSelf:
			r, size := utf8.DecodeRune(b[i:])
			if r&^1 == '\u2028' || r == utf8.RuneError {
				out = appendQuotedRune(append(out, b[start:i]...), r)
				start = i + size
			}
			i += size
		case c == '<' || c == '>' || c == '&':
			out = appendQuotedRune(append(out, b[start:i]...), rune(c))
			i++
			start = i
		default: // near the end
			i++
		}
	}
}

// sameQuoted returns the number of bytes of src before the first that encoding/json
// might not quote as it stands, or up to textStep less when there is none.
func sameQuoted(src []byte) int {
	s, i := unsafe.Pointer(unsafe.SliceData(src)), 0
	for last := len(src) - textStep; i <= last; {
		w := load64(s, i)
		// '<' and '>' differ in bit 1 only.
		m := special(w) | ((((w|0x02*ones)^'>'*ones)-ones)|((w^'&'*ones)-ones))&highs
		if m == 0 {
			i += 8
			continue
		}
		i += bits.TrailingZeros64(m) / 8
		if src[i] != '\\' || src[i+1] == 'u' || src[i+1] == '/' {
			break
		}
		i += 2
	}
	return i
}

// appendQuotedRune appends a character of a string as encoding/json does.
func appendQuotedRune(out []byte, r rune) []byte {
	switch r {
	case '"', '\\':
		return append(out, '\\', byte(r))
	case '\b':
		return append(out, '\\', 'b')
	case '\f':
		return append(out, '\\', 'f')
	case '\n':
		return append(out, '\\', 'n')
	case '\r':
		return append(out, '\\', 'r')
	case '\t':
		return append(out, '\\', 't')
	case '\u2028', '\u2029':
		return append(out, '\\', 'u', '2', '0', '2', hexDigits[r&0xf])
	case '<', '>', '&':
	default:
		if r >= ' ' {
			return utf8.AppendRune(out, r)
		}
	}
	return append(out, '\\', 'u', '0', '0', hexDigits[r>>4], hexDigits[r&0xf])
}

// compacted appends the value that stands at b[i:end], as encoding/json compacts
// a RawMessage: white space between tokens goes and <, >, &, U+2028 and U+2029
// are escaped; the order of keys, numbers and escapes stay.
func (s *scanner) compacted(i, end int) {
	out := s.out
	for i < end {
		switch c := s.b[i]; c {
		case ' ', '\n', '\r', '\t':
			i++
		case '"':
			stop, _ := scanString(s.b, i+1)
			start := i
			for ; i < stop; i++ {
				c := s.b[i]
				r, size := rune(c), 1
				switch {
				case c == '<' || c == '>' || c == '&':
				case c == 0xe2 && s.b[i+1] == 0x80 && s.b[i+2]&^1 == 0xa8:
					r, size = '\u2028'|rune(s.b[i+2]&1), 3
				default:
					continue
				}
				out = appendQuotedRune(append(out, s.b[start:i]...), r)
				i += size - 1
				start = i + 1
			}
			out = append(out, s.b[start:stop]...)
		default:
			out = append(out, c)
			i++
		}
	}
	s.out = out
}
