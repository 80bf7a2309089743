package routing

import (
	"unicode"
	"unicode/utf8"
)

// runeClass is what the splitters of tokenizers ask of a character.
type runeClass uint8

const (
	classUpper  runeClass = 1 << iota // Lu, Lt
	classLower                        // Ll
	classOther                        // Lm, Lo
	classMark                         // M
	classNumber                       // N
	classPunct                        // P
	classSymbol                       // S
	classSpace                        // White_Space

	classLetter = classUpper | classLower | classOther
)

// runeClasses tells the class of every character. It is made when a tokenizer is
// loaded: one byte a character is faster than any search.
type runeClasses [unicode.MaxRune + 1]runeClass

func newRuneClasses() *runeClasses {
	t := new(runeClasses)
	for class, tables := range map[runeClass][]*unicode.RangeTable{
		classUpper:  {unicode.Lu, unicode.Lt},
		classLower:  {unicode.Ll},
		classOther:  {unicode.Lm, unicode.Lo},
		classMark:   {unicode.M},
		classNumber: {unicode.N},
		classPunct:  {unicode.P},
		classSymbol: {unicode.S},
		classSpace:  {unicode.White_Space},
	} {
		for _, table := range tables {
			for _, r := range table.R16 {
				t.add(class, rune(r.Lo), rune(r.Hi), rune(r.Stride))
			}
			for _, r := range table.R32 {
				t.add(class, rune(r.Lo), rune(r.Hi), rune(r.Stride))
			}
		}
	}
	return t
}

func (t *runeClasses) add(class runeClass, from, to, stride rune) {
	for r := from; r <= to; r += stride {
		t[r] |= class
	}
}

// at returns the class and the length of the character at i, 0 and 0 at the end.
func (t *runeClasses) at(s []byte, i int) (runeClass, int) {
	if i >= len(s) {
		return 0, 0
	}
	if c := s[i]; c < utf8.RuneSelf {
		return t[c], 1
	}
	r, n := utf8.DecodeRune(s[i:])
	return t[r], n
}

// run returns the end of the run of characters of these classes that begins at i.
func (t *runeClasses) run(s []byte, i int, class runeClass) int {
	for i < len(s) {
		if c := s[i]; c < utf8.RuneSelf {
			if t[c]&class == 0 {
				return i
			}
			i++
			continue
		}
		r, n := utf8.DecodeRune(s[i:])
		if t[r]&class == 0 {
			return i
		}
		i += n
	}
	return i
}

// not is run for the characters of none of these classes.
func (t *runeClasses) not(s []byte, i int, class runeClass) int {
	for i < len(s) {
		if c := s[i]; c < utf8.RuneSelf {
			if t[c]&class != 0 {
				return i
			}
			i++
			continue
		}
		r, n := utf8.DecodeRune(s[i:])
		if t[r]&class != 0 {
			return i
		}
		i += n
	}
	return i
}
