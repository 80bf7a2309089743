package routing

import "unicode/utf8"

// A splitter cuts a text into words. next returns the length of the first segment
// of a text that is not empty, and whether it is a match or what lies before one.
type splitter interface {
	next(s []byte) (n int, match bool)
}

// The patterns that families of models use, and the splitter by hand of each. A
// splitter finds what the pattern finds with a backtracking matcher, in one pass.
const (
	patternGPT2     = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	patternCL100K   = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternQwen     = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternQwenMark = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternO200K    = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternTekken   = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternDigits3  = `\p{N}{1,3}`
	patternKanaHan  = `[一-龥぀-ゟ゠-ヿ]+`
	patternDeepSeek = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

// knownSplitter returns the splitter by hand of a pattern, nil when there is none.
func knownSplitter(pattern string, t *runeClasses) splitter {
	switch pattern {
	case patternGPT2:
		return gpt2Splitter{t}
	case patternCL100K:
		return cl100kSplitter{t, classLetter, 3}
	case patternQwen:
		return cl100kSplitter{t, classLetter, 1}
	case patternQwenMark:
		return cl100kSplitter{t, classLetter | classMark, 1}
	case patternO200K:
		return o200kSplitter{t, 3, true}
	case patternTekken:
		return o200kSplitter{t, 1, false}
	case patternDigits3:
		return numberSplitter{t, 3}
	case patternKanaHan:
		return kanaHanSplitter{}
	case patternDeepSeek:
		return deepSeekSplitter{t}
	}
	return nil
}

// contraction returns the length of 's 't 're 've 'm 'll 'd at i, 0 when there is none.
func contraction(s []byte, i int, fold bool) int {
	if i+1 >= len(s) || s[i] != '\'' {
		return 0
	}
	lower := func(k int) byte {
		if k >= len(s) {
			return 0
		}
		if c := s[k]; fold && c-'A' < 26 {
			return c | 0x20
		}
		return s[k]
	}
	next := lower(i + 2)
	switch c := lower(i + 1); {
	case c == 's' || c == 't' || c == 'm' || c == 'd':
		return 2
	case (c == 'r' || c == 'v') && next == 'e' || c == 'l' && next == 'l':
		return 3
	case fold && c == 0xc5 && next == 0xbf: // the long s is an s in upper case
		return 3
	}
	return 0
}

// spaces matches \s+(?!\S)|\s+ on a run of white space that ends at end: without
// its last character, which belongs to the word behind it, if that leaves any.
func spaces(s []byte, end int) int {
	if end == len(s) {
		return end
	}
	_, n := utf8.DecodeLastRune(s[:end])
	if end > n {
		return end - n
	}
	return end
}

// lines matches \s*[\r\n]+|\s+(?!\S)|\s+ on the white space at the start.
func (t *runeClasses) lines(s []byte) int {
	end := t.run(s, 0, classSpace)
	for i := end; i > 0; i-- {
		if c := s[i-1]; c == '\n' || c == '\r' {
			return i
		}
	}
	return spaces(s, end)
}

func lineEnds(s []byte, i int, slash bool) int {
	for i < len(s) && (s[i] == '\r' || s[i] == '\n' || slash && s[i] == '/') {
		i++
	}
	return i
}

// numbers matches \p{N}{1,most} at the start.
func (t *runeClasses) numbers(s []byte, most int) int {
	i := 0
	for k := 0; k < most; k++ {
		c, n := t.at(s, i)
		if c&classNumber == 0 {
			break
		}
		i += n
	}
	return i
}

type gpt2Splitter struct{ *runeClasses }

func (t gpt2Splitter) next(s []byte) (int, bool) {
	if n := contraction(s, 0, false); n > 0 {
		return n, true
	}
	i := 0
	if s[0] == ' ' && len(s) > 1 {
		i = 1
	}
	switch c, _ := t.at(s, i); {
	case c&classLetter != 0:
		return t.run(s, i, classLetter), true
	case c&classNumber != 0:
		return t.run(s, i, classNumber), true
	case c&classSpace == 0:
		return t.not(s, i, classSpace|classLetter|classNumber), true
	}
	return spaces(s, t.run(s, 0, classSpace)), true
}

// cl100kSplitter: words of letters (and marks), numbers of at most so many digits.
type cl100kSplitter struct {
	*runeClasses
	word   runeClass
	digits int
}

func (t cl100kSplitter) next(s []byte) (int, bool) {
	if s[0] == '\'' {
		if n := contraction(s, 0, true); n > 0 {
			return n, true
		}
	}
	c, n := t.at(s, 0)
	switch {
	case c&t.word != 0:
		return t.run(s, n, t.word), true
	case c&classNumber != 0:
		return t.numbers(s, t.digits), true
	}
	after, _ := t.at(s, n)
	if after&t.word != 0 && s[0] != '\r' && s[0] != '\n' {
		return t.run(s, n, t.word), true
	}
	const none = classSpace | classLetter | classNumber
	if c&classSpace == 0 {
		return lineEnds(s, t.not(s, n, none|t.word), false), true
	}
	if s[0] == ' ' && n < len(s) && after&(none|t.word) == 0 {
		return lineEnds(s, t.not(s, n, none|t.word), false), true
	}
	return t.lines(s), true
}

// o200kSplitter: words begin with capitals or have only capitals.
type o200kSplitter struct {
	*runeClasses
	digits       int
	contractions bool
}

const (
	o200kHead = classUpper | classOther | classMark
	o200kTail = classLower | classOther | classMark
)

func (t o200kSplitter) next(s []byte) (int, bool) {
	c, n := t.at(s, 0)
	if c&classNumber != 0 {
		return t.numbers(s, t.digits), true
	}
	lead := 0 // of a character that may stand before a word
	if c&classLetter == 0 && s[0] != '\r' && s[0] != '\n' {
		lead = n
	}
	end := -1
	if c&(classLetter|classMark) != 0 || lead > 0 {
		end = t.lower(s, lead)
		if end < 0 && lead > 0 {
			end = t.lower(s, 0)
		}
		if end < 0 {
			end = t.upper(s, lead)
		}
		if end < 0 && lead > 0 {
			end = t.upper(s, 0)
		}
	}
	if end > 0 {
		if t.contractions {
			end += contraction(s, end, true)
		}
		return end, true
	}
	const none = classSpace | classLetter | classNumber
	if c&classSpace == 0 {
		return lineEnds(s, t.not(s, n, none), true), true
	}
	if after, _ := t.at(s, n); s[0] == ' ' && n < len(s) && after&none == 0 {
		return lineEnds(s, t.not(s, n, none), true), true
	}
	return t.lines(s), true
}

// lower matches head*tail+ at i, where a character may be both: -1 for no match.
func (t o200kSplitter) lower(s []byte, i int) int {
	last := -1 // end of the last character of the head that could be the tail
	for i < len(s) {
		c, n := t.at(s, i)
		if c&o200kHead == 0 {
			if c&classLower != 0 {
				return t.run(s, i, o200kTail)
			}
			break
		}
		i += n
		if c&o200kTail != 0 {
			last = i
		}
	}
	return last
}

// upper matches head+tail* at i: -1 for no match.
func (t o200kSplitter) upper(s []byte, i int) int {
	end := t.run(s, i, o200kHead)
	if end == i {
		return -1
	}
	return t.run(s, end, o200kTail)
}

// numberSplitter finds numbers of at most so many digits; 0 is any number.
type numberSplitter struct {
	*runeClasses
	digits int
}

func (t numberSplitter) next(s []byte) (int, bool) {
	if n := t.numbers(s, t.digits); n > 0 {
		return n, true
	}
	if n := t.not(s, 0, classNumber); n > 0 {
		return n, false
	}
	return t.run(s, 0, classNumber), true
}

// kanaHanSplitter finds runs of Han, Hiragana and Katakana.
type kanaHanSplitter struct{}

func (kanaHanSplitter) next(s []byte) (int, bool) {
	is := func(i int) (bool, int) {
		if s[i] < utf8.RuneSelf {
			return false, 1
		}
		r, n := utf8.DecodeRune(s[i:])
		return r >= 0x4e00 && r <= 0x9fa5 || r >= 0x3040 && r <= 0x30ff, n
	}
	match, i := is(0)
	for i < len(s) {
		m, n := is(i)
		if m != match {
			break
		}
		i += n
	}
	return i, match
}

type deepSeekSplitter struct{ *runeClasses }

func (t deepSeekSplitter) next(s []byte) (int, bool) {
	for i := 0; i < len(s); {
		n := t.match(s[i:])
		if n > 0 && i == 0 {
			return n, true
		}
		if n > 0 {
			return i, false
		}
		_, n = t.at(s, i)
		i += n
	}
	return len(s), false
}

func (t deepSeekSplitter) match(s []byte) int {
	first := s[0]
	c, n := t.at(s, 0)
	if first < utf8.RuneSelf && c&(classPunct|classSymbol) != 0 {
		i := 1
		for i < len(s) && s[i]|0x20-'a' < 26 {
			i++
		}
		if i > 1 {
			return i
		}
	}
	const word = classLetter | classMark
	if c&word != 0 {
		return t.run(s, n, word)
	}
	after, _ := t.at(s, n)
	if c&(classPunct|classSymbol) == 0 && first != '\r' && first != '\n' && after&word != 0 {
		return t.run(s, n, word)
	}
	if c&(classPunct|classSymbol) != 0 || first == ' ' && after&(classPunct|classSymbol) != 0 {
		return lineEnds(s, t.run(s, n, classPunct|classSymbol), false)
	}
	if c&classSpace != 0 {
		return t.lines(s)
	}
	return 0
}
