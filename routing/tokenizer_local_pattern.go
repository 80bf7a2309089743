package routing

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// pattern is a regular expression as tokenizer files have them: alternatives,
// classes, greedy, lazy and possessive repetition, groups, (?i:), look-around ahead,
// anchors. It is matched by backtracking, like the engine that made the files' tokens,
// within a budget of steps. What it does not know is an error at load.
type pattern struct {
	source string
	prog   *patternNode
	lower  int // the least length of a match in bytes, 0 or more
}

type patternKind uint8

const (
	patternEmpty patternKind = iota
	patternClass             // one character
	patternSeq
	patternAlt
	patternRepeat
	patternAhead    // (?= ), (?! ) when negated
	patternStart    // ^ \A
	patternEnd      // $ \z
	patternBoundary // \b, \B when negated
	patternAtomic   // (?> )
)

type patternNode struct {
	kind       patternKind
	negated    bool
	lazy       bool
	possessive bool
	min, max   int // of a repetition; max -1 is any number
	subs       []*patternNode
	class      *patternSet
}

// patternSet is a class of characters.
type patternSet struct {
	negated bool
	ascii   [2]uint64 // answers for ASCII, negation included
	ranges  []rune    // pairs
	tables  []*unicode.RangeTable
	without []*unicode.RangeTable
	subs    []*patternSet // nested classes, joined
	and     []*patternSet // && classes
}

func (c *patternSet) has(r rune) bool {
	if r < utf8.RuneSelf {
		return c.ascii[r>>6]>>(r&63)&1 != 0
	}
	return c.search(r)
}

func (c *patternSet) search(r rune) bool {
	return c.inside(r) != c.negated
}

func (c *patternSet) inside(r rune) bool {
	in := unicode.In(r, c.tables...)
	for i := 0; !in && i < len(c.ranges); i += 2 {
		in = r >= c.ranges[i] && r <= c.ranges[i+1]
	}
	for i := 0; !in && i < len(c.without); i++ {
		in = !unicode.Is(c.without[i], r)
	}
	for i := 0; !in && i < len(c.subs); i++ {
		in = c.subs[i].search(r)
	}
	for i := 0; in && i < len(c.and); i++ {
		in = c.and[i].search(r)
	}
	return in
}

func (c *patternSet) ready() *patternSet {
	for r := range rune(utf8.RuneSelf) {
		if c.search(r) {
			c.ascii[r>>6] |= 1 << (r & 63)
		}
	}
	return c
}

// fold adds the other cases of what is in the set.
func (c *patternSet) fold() {
	for i := 0; i < len(c.ranges); i += 2 {
		for r := c.ranges[i]; r <= c.ranges[i+1] && c.ranges[i+1]-c.ranges[i] < 4096; r++ {
			for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
				c.ranges = append(c.ranges, f, f)
			}
		}
		if i > 1<<14 {
			return
		}
	}
}

// Bounds of a pattern.
const (
	maxPatternBytes  = 1 << 14
	maxPatternDepth  = 100
	maxPatternRepeat = 1000
)

var errPatternSteps = errors.New("the pattern takes too many steps on this text")

type patternParser struct {
	s     string
	i     int
	depth int
	fold  bool
}

// compilePattern reads a pattern. The error says what in it is not supported.
func compilePattern(source string) (*pattern, error) {
	if len(source) > maxPatternBytes || !utf8.ValidString(source) {
		return nil, fmt.Errorf("regular expression of %d bytes is too long or no UTF-8", len(source))
	}
	p := &patternParser{s: source}
	p.fold = p.take("(?i)")
	n, err := p.alternatives()
	if err == nil && p.i < len(p.s) {
		err = p.unsupported("unmatched )")
	}
	if err != nil {
		return nil, err
	}
	return &pattern{source: source, prog: n, lower: n.least()}, nil
}

func (p *patternParser) unsupported(what string) error {
	return fmt.Errorf("regular expression %q: %s at offset %d is not supported", p.s, what, p.i)
}

func (p *patternParser) more() bool { return p.i < len(p.s) }

func (p *patternParser) take(prefix string) bool {
	if strings.HasPrefix(p.s[p.i:], prefix) {
		p.i += len(prefix)
		return true
	}
	return false
}

func (p *patternParser) rune() rune {
	r, n := utf8.DecodeRuneInString(p.s[p.i:])
	p.i += n
	return r
}

func (p *patternParser) alternatives() (*patternNode, error) {
	if p.depth++; p.depth > maxPatternDepth {
		return nil, p.unsupported("so deep a nesting")
	}
	defer func() { p.depth-- }()
	n := &patternNode{kind: patternAlt}
	for {
		seq, err := p.sequence()
		if err != nil {
			return nil, err
		}
		n.subs = append(n.subs, seq)
		if !p.take("|") {
			break
		}
	}
	if len(n.subs) == 1 {
		return n.subs[0], nil
	}
	return n, nil
}

func (p *patternParser) sequence() (*patternNode, error) {
	n := &patternNode{kind: patternSeq}
	for p.more() && p.s[p.i] != '|' && p.s[p.i] != ')' {
		atom, err := p.atom()
		if err != nil {
			return nil, err
		}
		if atom, err = p.repeated(atom); err != nil {
			return nil, err
		}
		n.subs = append(n.subs, atom)
	}
	if len(n.subs) == 1 {
		return n.subs[0], nil
	}
	return n, nil
}

// repeated reads the quantifiers behind an atom.
func (p *patternParser) repeated(atom *patternNode) (*patternNode, error) {
	for p.more() {
		n := &patternNode{kind: patternRepeat, subs: []*patternNode{atom}, max: -1}
		counted := false
		switch {
		case p.take("*"):
		case p.take("+"):
			n.min = 1
		case p.take("?"):
			n.max = 1
		case p.s[p.i] == '{':
			end := strings.IndexByte(p.s[p.i:], '}')
			if end < 0 {
				return nil, p.unsupported("{")
			}
			from, to, ranged := strings.Cut(p.s[p.i+1:p.i+end], ",")
			var err error
			if n.min, err = strconv.Atoi(from); from == "" && ranged {
				n.min, err = 0, nil
			}
			if err == nil && !ranged {
				n.max = n.min
			} else if err == nil && to != "" {
				n.max, err = strconv.Atoi(to)
			}
			if err != nil || n.min < 0 || n.min > maxPatternRepeat || n.max > maxPatternRepeat || n.max >= 0 && n.max < n.min {
				return nil, p.unsupported("repetition")
			}
			p.i += end + 1
			counted = true
		default:
			return atom, nil
		}
		switch k := atom.kind; k {
		case patternStart, patternEnd, patternBoundary, patternAhead:
			return nil, p.unsupported("repetition of an assertion")
		}
		if p.take("?") {
			n.lazy = true
		} else if !counted && p.take("+") {
			n.possessive = true
		}
		atom = n
	}
	return atom, nil
}

func (p *patternParser) atom() (*patternNode, error) {
	switch c := p.s[p.i]; c {
	case '(':
		return p.group()
	case '[':
		set, err := p.set()
		if err != nil {
			return nil, err
		}
		return &patternNode{kind: patternClass, class: set}, nil
	case '.':
		p.i++
		return &patternNode{kind: patternClass, class: (&patternSet{negated: true, ranges: []rune{'\n', '\n'}}).ready()}, nil
	case '^':
		p.i++
		return nil, p.unsupported("^")
	case '$':
		p.i++
		return nil, p.unsupported("$")
	case '*', '+', '?', '{':
		return nil, p.unsupported("repetition of nothing")
	case '\\':
		for _, a := range []struct {
			text    string
			kind    patternKind
			negated bool
		}{{`\A`, patternStart, false}, {`\z`, patternEnd, false}, {`\b`, patternBoundary, false}, {`\B`, patternBoundary, true}} {
			if p.take(a.text) {
				return &patternNode{kind: a.kind, negated: a.negated}, nil
			}
		}
		set := &patternSet{}
		if err := p.escape(set); err != nil {
			return nil, err
		}
		if p.fold {
			set.fold()
		}
		return &patternNode{kind: patternClass, class: set.ready()}, nil
	}
	r := p.rune()
	set := &patternSet{ranges: []rune{r, r}}
	if p.fold {
		set.fold()
	}
	return &patternNode{kind: patternClass, class: set.ready()}, nil
}

func (p *patternParser) group() (*patternNode, error) {
	fold := p.fold
	n := &patternNode{}
	switch {
	case p.take("(?:"):
	case p.take("(?i:"):
		p.fold = true
	case p.take("(?-i:"):
		p.fold = false
	case p.take("(?="):
		n.kind = patternAhead
	case p.take("(?!"):
		n.kind, n.negated = patternAhead, true
	case p.take("(?>"):
		n.kind = patternAtomic
	case strings.HasPrefix(p.s[p.i:], "(?") || strings.HasPrefix(p.s[p.i:], "(*"):
		return nil, p.unsupported(p.s[p.i:min(p.i+4, len(p.s))])
	default:
		p.i++
	}
	sub, err := p.alternatives()
	if err != nil {
		return nil, err
	}
	if !p.take(")") {
		return nil, p.unsupported("missing )")
	}
	p.fold = fold
	if n.kind == patternEmpty {
		return sub, nil
	}
	n.subs = []*patternNode{sub}
	return n, nil
}

// set reads a class in brackets.
func (p *patternParser) set() (*patternSet, error) {
	if p.depth++; p.depth > maxPatternDepth {
		return nil, p.unsupported("so deep a nesting")
	}
	defer func() { p.depth-- }()
	p.i++
	set := &patternSet{negated: p.take("^")}
	for first := true; ; first = false {
		if !p.more() {
			return nil, p.unsupported("missing ]")
		}
		switch {
		case p.s[p.i] == ']' && !first:
			p.i++
			if p.fold {
				set.fold()
			}
			return set.ready(), nil
		case strings.HasPrefix(p.s[p.i:], "[:"):
			return nil, p.unsupported("[:")
		case p.s[p.i] == '[':
			sub, err := p.set()
			if err != nil {
				return nil, err
			}
			set.subs = append(set.subs, sub)
			continue
		case p.take("&&"):
			// What follows up to the end is the other side.
			from := p.i
			if p.more() && (p.s[from] == '^' || p.s[from] == ']') {
				return nil, p.unsupported("&&" + p.s[from:from+1])
			}
			p.i--
			p.s = p.s[:from-1] + "[" + p.s[from:] // reads as a class of its own
			sub, err := p.set()
			if err != nil {
				return nil, err
			}
			set.and = append(set.and, sub)
			if p.fold {
				set.fold()
			}
			return set.ready(), nil
		}
		from := len(set.ranges)
		if err := p.member(set); err != nil {
			return nil, err
		}
		if len(set.ranges) == from || p.i+1 >= len(p.s) || p.s[p.i] != '-' || p.s[p.i+1] == ']' {
			continue
		}
		p.i++
		to := &patternSet{}
		if err := p.member(to); err != nil {
			return nil, err
		}
		if len(to.ranges) != 2 || to.ranges[0] < set.ranges[from] {
			return nil, p.unsupported("range")
		}
		set.ranges[from+1] = to.ranges[0]
	}
}

func (p *patternParser) member(set *patternSet) error {
	if p.s[p.i] == '\\' {
		return p.escape(set)
	}
	if p.s[p.i] == '[' {
		return p.unsupported("[ as an end of a range")
	}
	r := p.rune()
	set.ranges = append(set.ranges, r, r)
	return nil
}

// escape adds what a backslash stands for.
func (p *patternParser) escape(set *patternSet) error {
	p.i++
	if !p.more() {
		return p.unsupported(`\`)
	}
	control := map[rune]rune{'n': '\n', 'r': '\r', 't': '\t', 'f': '\f', 'v': '\v', 'a': 7, 'e': 27}
	digits, word := []*unicode.RangeTable{unicode.Nd}, wordTables()
	switch r := p.rune(); {
	case control[r] != 0:
		set.ranges = append(set.ranges, control[r], control[r])
	case r == 's':
		set.tables = append(set.tables, unicode.White_Space)
	case r == 'S':
		set.without = append(set.without, unicode.White_Space)
	case r == 'd':
		set.tables = append(set.tables, digits...)
	case r == 'D':
		set.without = append(set.without, digits...)
	case r == 'w':
		set.tables = append(set.tables, word...)
		set.ranges = append(set.ranges, latinNumbers()...)
	case r == 'W':
		set.subs = append(set.subs, (&patternSet{negated: true, tables: word, ranges: latinNumbers()}).ready())
	case r == 'p' || r == 'P':
		return p.property(set, r == 'P')
	case r == 'x' || r == 'u':
		return p.hex(set, r)
	case r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r)):
		p.i--
		return p.unsupported(`\` + string(r))
	default:
		set.ranges = append(set.ranges, r, r)
	}
	return nil
}

func (p *patternParser) hex(set *patternSet, kind rune) error {
	digits := 4
	if kind == 'x' {
		digits = 2
	}
	text := ""
	if p.take("{") {
		var ok bool
		if text, _, ok = strings.Cut(p.s[p.i:], "}"); !ok {
			return p.unsupported("missing }")
		}
		p.i += len(text) + 1
	} else {
		text = p.s[p.i:min(p.i+digits, len(p.s))]
		p.i += len(text)
	}
	v, err := strconv.ParseUint(text, 16, 32)
	if err != nil || v > unicode.MaxRune {
		return p.unsupported("character number " + text)
	}
	set.ranges = append(set.ranges, rune(v), rune(v))
	return nil
}

func (p *patternParser) property(set *patternSet, negated bool) error {
	name := ""
	if p.take("{") {
		var ok bool
		if name, _, ok = strings.Cut(p.s[p.i:], "}"); !ok {
			return p.unsupported("missing }")
		}
		p.i += len(name) + 1
		if name, ok = strings.CutPrefix(name, "^"); ok {
			negated = !negated
		}
	} else if p.more() {
		name = string(p.rune())
	}
	name = strings.TrimPrefix(name, "Script=")
	long := map[string]string{"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S", "Mark": "M", "Separator": "Z", "Other": "C", "Space": "White_Space"}
	if l := long[name]; l != "" {
		name = l
	}
	if p.fold && len(name) > 1 {
		return p.unsupported(`\p{` + name + "} without regard to case")
	}
	table := unicode.Categories[name]
	if table == nil {
		table = unicode.Scripts[name]
	}
	if table == nil {
		table = unicode.Properties[name]
	}
	if table == nil {
		return p.unsupported(`\p{` + name + "}")
	}
	if negated {
		set.without = append(set.without, table)
	} else {
		set.tables = append(set.tables, table)
	}
	return nil
}

// least returns the least length of a match in bytes.
func (n *patternNode) least() int {
	total := 0
	switch n.kind {
	case patternClass:
		return 1
	case patternSeq, patternAtomic:
		for _, s := range n.subs {
			total += s.least()
		}
	case patternAlt:
		total = n.subs[0].least()
		for _, s := range n.subs[1:] {
			total = min(total, s.least())
		}
	case patternRepeat:
		total = n.min * n.subs[0].least()
	}
	return min(total, 1<<20)
}

// patternMatcher matches one pattern at places of a text. Its memory is kept.
type patternMatcher struct {
	s     []byte
	steps int // left
	depth int
}

// find returns the first match at or behind from, -1 when there is none.
func (p *pattern) find(m *patternMatcher, from int) (start, end int, err error) {
	for i := from; i <= len(m.s); {
		end := -1
		ok := m.match(p.prog, i, func(j int) bool { end = j; return true })
		if m.steps < 0 {
			return -1, -1, errPatternSteps
		}
		if ok {
			return i, end, nil
		}
		_, n := utf8.DecodeRune(m.s[i:])
		i += max(n, 1)
	}
	return -1, -1, nil
}

// maxMatchDepth bounds the recursion of a match.
const maxMatchDepth = 10_000

// match reports whether the node matches at i so that the rest does, too.
func (m *patternMatcher) match(n *patternNode, i int, rest func(int) bool) bool {
	m.steps--
	m.depth++
	defer func() { m.depth-- }()
	if m.depth > maxMatchDepth {
		m.steps = -1
	}
	if m.steps < 0 {
		return false
	}
	switch n.kind {
	case patternClass:
		if i >= len(m.s) {
			return false
		}
		r, size := utf8.DecodeRune(m.s[i:])
		return n.class.has(r) && rest(i+size)
	case patternSeq:
		return m.sequence(n.subs, i, rest)
	case patternAlt:
		return slices.ContainsFunc(n.subs, func(s *patternNode) bool { return m.match(s, i, rest) })
	case patternRepeat:
		if n.subs[0].kind == patternClass {
			return m.repeatClass(n, i, rest)
		}
		if n.possessive {
			end := i
			greedy := *n
			greedy.possessive = false
			return m.match(&greedy, i, func(j int) bool { end = j; return true }) && rest(end)
		}
		return m.repeat(n, 0, i, rest)
	case patternAhead:
		return m.match(n.subs[0], i, func(int) bool { return true }) != n.negated && rest(i)
	case patternAtomic:
		end := i
		return m.match(n.subs[0], i, func(j int) bool { end = j; return true }) && rest(end)
	case patternStart:
		return i == 0 && rest(i)
	case patternEnd:
		return i == len(m.s) && rest(i)
	case patternBoundary:
		before, _ := utf8.DecodeLastRune(m.s[:i])
		after, _ := utf8.DecodeRune(m.s[i:])
		return ((i > 0 && inPatternWord(before)) != (i < len(m.s) && inPatternWord(after))) != n.negated && rest(i)
	}
	return rest(i)
}

// wordTables are the characters of words: numbers like ½ are none, letters in circles are.
func wordTables() []*unicode.RangeTable {
	return []*unicode.RangeTable{unicode.L, unicode.M, unicode.Nd, unicode.Nl, unicode.Other_Alphabetic, unicode.Pc}
}

// latinNumbers are the ranges ²³, ¹ and ¼½¾, which are in \w of the engine that made the files' tokens.
func latinNumbers() []rune { return []rune{0xb2, 0xb3, 0xb9, 0xb9, 0xbc, 0xbe} }

func inPatternWord(r rune) bool {
	return isWordRune(r) || r >= 0xb2 && r <= 0xbe && (r <= 0xb3 || r == 0xb9 || r >= 0xbc)
}

func isWordRune(r rune) bool { return unicode.In(r, wordTables()...) }

func (m *patternMatcher) sequence(subs []*patternNode, i int, rest func(int) bool) bool {
	if len(subs) == 0 {
		return rest(i)
	}
	return m.match(subs[0], i, func(j int) bool { return m.sequence(subs[1:], j, rest) })
}

func (m *patternMatcher) repeat(n *patternNode, count, i int, rest func(int) bool) bool {
	again := func() bool {
		return (n.max < 0 || count < n.max) && m.match(n.subs[0], i, func(j int) bool {
			return (j > i || count < n.min) && m.repeat(n, count+1, j, rest)
		})
	}
	switch {
	case count < n.min:
		return again()
	case n.lazy:
		return rest(i) || again()
	}
	return again() || rest(i)
}

// repeatClass repeats one class without recursion: the usual case.
func (m *patternMatcher) repeatClass(n *patternNode, i int, rest func(int) bool) bool {
	class, count := n.subs[0].class, 0
	one := func(at int) int {
		if at >= len(m.s) || n.max >= 0 && count >= n.max {
			return -1
		}
		r, size := utf8.DecodeRune(m.s[at:])
		if !class.has(r) {
			return -1
		}
		m.steps--
		return at + size
	}
	at := i
	for count < n.min || !n.lazy {
		j := one(at)
		if j < 0 {
			break
		}
		at = j
		count++
	}
	if count < n.min {
		return false
	}
	for {
		if m.steps < 0 {
			return false
		}
		if rest(at) {
			return true
		}
		switch {
		case n.lazy:
			j := one(at)
			if j < 0 {
				return false
			}
			at = j
			count++
		case n.possessive || count == n.min:
			return false
		default:
			_, size := utf8.DecodeLastRune(m.s[:at])
			at -= size
			count--
			m.steps--
		}
	}
}
