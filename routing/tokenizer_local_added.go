package routing

import (
	"bytes"
	"slices"
	"unicode"
	"unicode/utf8"
)

// addedToken is a text that is a token wherever it stands, before anything else
// is done with the text.
type addedToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// addedSet finds added tokens in a text: the leftmost, of those the longest.
type addedSet struct {
	tokens []addedToken
	byHead [256][]int32 // tokens that begin with a byte, the longest first
	heads  string       // bytes that begin a token
	pairs  [1 << 16 / 64]uint64
	single bool // a token has one byte: pairs says nothing
}

func newAddedSet(tokens []addedToken) *addedSet {
	s := &addedSet{tokens: tokens}
	for i, t := range tokens {
		c := t.Content[0]
		s.byHead[c] = append(s.byHead[c], int32(i))
		if len(t.Content) == 1 {
			s.single = true
		} else {
			p := int(c)<<8 | int(t.Content[1])
			s.pairs[p/64] |= 1 << (p % 64)
		}
	}
	for c := range s.byHead {
		if len(s.byHead[c]) > 0 {
			s.heads += string([]byte{byte(c)})
		}
		slices.SortStableFunc(s.byHead[c], func(a, b int32) int { return len(tokens[b].Content) - len(tokens[a].Content) })
	}
	return s
}

// find returns the first token at or behind i, nil when there is none.
func (s *addedSet) find(text []byte, i int) (*addedToken, int) {
	if len(s.tokens) == 0 {
		return nil, 0
	}
	for i < len(text) {
		if len(s.heads) == 1 {
			n := bytes.IndexByte(text[i:], s.heads[0])
			if n < 0 {
				return nil, 0
			}
			i += n
		}
		c := text[i]
		list := s.byHead[c]
		if len(list) == 0 {
			i++
			continue
		}
		if !s.single {
			if i+1 == len(text) {
				return nil, 0
			}
			if p := int(c)<<8 | int(text[i+1]); s.pairs[p/64]>>(p%64)&1 == 0 {
				i++
				continue
			}
		}
		rest := text[i:]
		for _, k := range list {
			if t := &s.tokens[k]; len(t.Content) <= len(rest) && string(rest[:len(t.Content)]) == t.Content {
				return t, i
			}
		}
		i++
	}
	return nil, 0
}

// each calls text for what lies between added tokens and token for these, in
// their order, from a place on. Ends of what was stripped overlap as in the reference.
// It says of a token where it starts, -1 when what follows may depend on what stood before.
func (s *addedSet) each(b []byte, from int, text func([]byte, int), token func(t *addedToken, at int)) {
	done := from
	for {
		t, start := s.find(b, from)
		if t == nil {
			break
		}
		end := start + len(t.Content)
		from = end
		at := start
		if t.LStrip || done > start {
			at = -1
		}
		if t.SingleWord {
			before, _ := utf8.DecodeLastRune(b[:start])
			after, _ := utf8.DecodeRune(b[end:])
			if start > 0 && joins(before) || end < len(b) && joins(after) {
				continue
			}
		}
		if t.LStrip {
			for start > done {
				r, n := utf8.DecodeLastRune(b[:start])
				if !unicode.IsSpace(r) {
					break
				}
				start -= n
			}
			start = max(start, done)
		}
		if t.RStrip {
			for end < len(b) {
				r, n := utf8.DecodeRune(b[end:])
				if !unicode.IsSpace(r) {
					break
				}
				end += n
			}
		}
		if done < start {
			text(b[done:start], done)
		}
		if start < end { // else the one before has stripped all of it
			token(t, at)
		}
		done = end
	}
	if done < len(b) {
		text(b[done:], done)
	}
}

// joins reports whether a token with single_word is part of a longer word beside r.
func joins(r rune) bool { return isWordRune(r) || unicode.Is(unicode.Join_Control, r) }

// wellFormed returns text as UTF-8. What is none becomes U+FFFD, one for each
// longest beginning of a character, as Python's decoder replaces it.
func wellFormed(dst, text []byte) []byte {
	if utf8.Valid(text) {
		return text
	}
	dst = dst[:0]
	for i := 0; i < len(text); {
		_, n := utf8.DecodeRune(text[i:])
		if n > 1 || text[i] < utf8.RuneSelf {
			dst = append(dst, text[i:i+n]...)
			i += n
			continue
		}
		dst = append(dst, "\uFFFD"...)
		i += brokenRune(text[i:])
	}
	return dst
}

// brokenRune returns the length of the longest beginning of a character at the
// start of a text that does not begin with a whole one, at least 1.
func brokenRune(s []byte) int {
	low, high := byte(0x80), byte(0xbf)
	need := 0
	switch c := s[0]; {
	case c >= 0xc2 && c <= 0xdf:
		need = 1
	case c >= 0xe0 && c <= 0xef:
		need = 2
		if c == 0xe0 {
			low = 0xa0
		} else if c == 0xed {
			high = 0x9f
		}
	case c >= 0xf0 && c <= 0xf4:
		need = 3
		if c == 0xf0 {
			low = 0x90
		} else if c == 0xf4 {
			high = 0x8f
		}
	}
	n := 1
	for n <= need && n < len(s) && s[n] >= low && s[n] <= high {
		low, high = 0x80, 0xbf
		n++
	}
	return n
}
