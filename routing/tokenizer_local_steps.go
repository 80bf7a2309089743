package routing

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// normalizer is one step that changes a text before it is cut.
type normalizer struct {
	kind    string
	form    norm.Form
	text    []byte // Prepend, Replace: what comes in
	literal []byte // Replace: what goes out, when pattern is nil
	pattern *pattern
	left    bool
	right   bool
}

// normalizer reads the normalizers, in their order.
func (t *bpeTokenizer) normalizer(where string, data json.RawMessage, depth int) error {
	if isNull(data) {
		return nil
	}
	c, err := readComponent(where, data, map[string][]string{
		"Sequence": {"normalizers"}, "NFC": {}, "NFD": {}, "NFKC": {}, "NFKD": {}, "Lowercase": {},
		"Prepend": {"prepend"}, "Replace": {"pattern", "content"}, "Strip": {"strip_left", "strip_right"},
	})
	if err != nil {
		return err
	}
	n := normalizer{kind: c.Type}
	switch c.Type {
	case "Sequence":
		if depth > 8 {
			return fmt.Errorf("%s: too deep", where)
		}
		for i, s := range c.Normalizers {
			if err := t.normalizer(fmt.Sprintf("%s.normalizers[%d]", where, i), s, depth+1); err != nil {
				return err
			}
		}
		return nil
	case "NFC", "NFD", "NFKC", "NFKD":
		n.form = map[string]norm.Form{"NFC": norm.NFC, "NFD": norm.NFD, "NFKC": norm.NFKC, "NFKD": norm.NFKD}[c.Type]
		n.kind = "form"
	case "Prepend":
		n.text = []byte(c.Prepend)
	case "Replace":
		n.text = []byte(c.Content)
		var split splitter
		if n.literal, split, err = t.pattern(c.Pattern, true); err != nil {
			return fmt.Errorf("%s: %w", where, err)
		}
		if p, ok := split.(*patternSplitter); ok {
			n.pattern = p.pattern
		}
	case "Strip":
		n.left, n.right = c.StripLeft, c.StripRight
	}
	t.normalizers = append(t.normalizers, n)
	return nil
}

// pattern reads a pattern: a literal, or a regular expression, which byHand may
// have known if plain is false.
func (t *bpeTokenizer) pattern(p *filePattern, plain bool) ([]byte, splitter, error) {
	switch {
	case p == nil || (p.String == nil) == (p.Regex == nil):
		return nil, nil, fmt.Errorf("pattern must be a String or a Regex")
	case p.String != nil:
		if *p.String == "" {
			return nil, nil, fmt.Errorf("pattern is empty")
		}
		return []byte(*p.String), nil, nil
	}
	if s := knownSplitter(*p.Regex, t.classes); s != nil && !plain {
		return nil, s, nil
	}
	x, err := compilePattern(*p.Regex)
	if err != nil {
		return nil, nil, err
	}
	if x.lower == 0 {
		return nil, nil, fmt.Errorf("regular expression %q matches the empty text: not supported", *p.Regex)
	}
	return nil, &patternSplitter{pattern: x}, nil
}

// normalize returns the text as the normalizers make it, in w's memory or text itself.
func (t *bpeTokenizer) normalize(w *bpeWorker, text []byte) ([]byte, error) {
	for i := range t.normalizers {
		dst := w.text[0][:0]
		n := &t.normalizers[i]
		switch n.kind {
		case "form":
			if n.form.IsNormal(text) {
				continue
			}
			dst = n.form.Append(dst, text...)
			if bytes.Count(dst, joiner) != bytes.Count(text, joiner) {
				var err error
				if dst, err = normalForm(n.form, dst[:0], text); err != nil {
					return nil, err
				}
			}
		case "Lowercase":
			for _, r := range string(text) {
				dst = utf8.AppendRune(dst, unicode.ToLower(r))
				if r == 'İ' {
					dst = append(dst, "\u0307"...)
				}
			}
		case "Prepend":
			if len(text) == 0 {
				continue
			}
			dst = append(append(dst, n.text...), text...)
		case "Strip":
			if n.left {
				text = bytes.TrimLeftFunc(text, unicode.IsSpace)
			}
			if n.right {
				text = bytes.TrimRightFunc(text, unicode.IsSpace)
			}
			continue
		case "Replace":
			if n.pattern == nil {
				if !bytes.Contains(text, n.literal) {
					continue
				}
				for {
					k := bytes.Index(text, n.literal)
					if k < 0 {
						break
					}
					dst = append(append(dst, text[:k]...), n.text...)
					text = text[k+len(n.literal):]
				}
				dst = append(dst, text...)
				break
			}
			w.matcher.reset(text)
			at := 0
			for at < len(text) {
				from, to, err := n.pattern.find(&w.matcher, at)
				if err != nil {
					return nil, err
				}
				if from < 0 {
					break
				}
				dst = append(append(dst, text[at:from]...), n.text...)
				at = to
			}
			dst = append(dst, text[at:]...)
		}
		// The result is the next step's text: its memory is not written to meanwhile.
		w.text[0], w.text[1] = w.text[1], dst
		text = dst
	}
	return text, nil
}

// joiner is what x/text puts into more than 30 marks in a row, to make a text that can be
// normalized in a stream. The Unicode standard's forms have none.
var joiner = []byte("\u034f")

// maxMarks bounds the marks in a row, which have to be sorted.
const maxMarks = 4096

var errManyMarks = errors.New("too many combining marks in a row")

// normalForm normalizes a text in which many marks follow each other: decomposed,
// put in the order of their classes, and composed again (Unicode Standard Annex 15).
func normalForm(form norm.Form, dst, text []byte) ([]byte, error) {
	apart := norm.NFD
	if form == norm.NFKC || form == norm.NFKD {
		apart = norm.NFKD
	}
	var runes []rune
	for _, r := range string(text) {
		for _, d := range apart.String(string(r)) {
			runes = append(runes, d)
		}
	}
	class := func(r rune) uint8 { return norm.NFD.PropertiesString(string(r)).CCC() }
	for i := 0; i < len(runes); {
		k := i
		for k < len(runes) && class(runes[k]) != 0 {
			k++
		}
		if k-i > maxMarks {
			return nil, errManyMarks
		}
		slices.SortStableFunc(runes[i:k], func(a, b rune) int { return int(class(a)) - int(class(b)) })
		i = k + 1
	}
	if form == norm.NFC || form == norm.NFKC {
		out, starter, last := runes[:0], -1, uint8(0)
		for _, r := range runes {
			c := class(r)
			if starter >= 0 && (last < c || last == 0 && starter == len(out)-1) {
				if both := []rune(norm.NFC.String(string(out[starter]) + string(r))); len(both) == 1 {
					out[starter] = both[0]
					continue
				}
			}
			if last = c; c == 0 {
				starter = len(out)
			}
			out = append(out, r)
		}
		runes = out
	}
	return append(dst, string(runes)...), nil
}

func (m *patternMatcher) reset(text []byte) {
	m.s, m.depth, m.steps = text, 0, 10_000+100*len(text)
}

// split is one step that cuts pieces: a splitter, or a literal, and what is done
// with what matches.
type split struct {
	splitter splitter
	literal  []byte
	behavior string
	invert   bool
	simple   bool // every segment is a piece

	metaspace bool // blanks become marks first, as the fields say
	mark      []byte
	prepend   string
	cut       bool

	prefix bool // ByteLevel: a blank goes before the piece
}

// Behaviors of a Split.
const (
	splitIsolated   = "Isolated"
	splitRemoved    = "Removed"
	splitPrevious   = "MergedWithPrevious"
	splitNext       = "MergedWithNext"
	splitContiguous = "Contiguous"
)

// preTokenizer reads the pre-tokenizers, in their order.
func (t *bpeTokenizer) preTokenizer(where string, data json.RawMessage, depth int) error {
	if isNull(data) {
		return nil
	}
	c, err := readComponent(where, data, map[string][]string{
		"Sequence":  {"pretokenizers"},
		"Split":     {"pattern", "behavior", "invert"},
		"ByteLevel": {"add_prefix_space", "trim_offsets", "use_regex"},
		"Digits":    {"individual_digits"},
		"Metaspace": {"replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"},
	})
	if err != nil {
		return err
	}
	if t.model.byteLevel {
		return fmt.Errorf("%s: %s behind ByteLevel is not supported", where, c.Type)
	}
	switch c.Type {
	case "Sequence":
		if depth > 8 {
			return fmt.Errorf("%s: too deep", where)
		}
		for i, s := range c.PreTokenizers {
			if err := t.preTokenizer(fmt.Sprintf("%s.pretokenizers[%d]", where, i), s, depth+1); err != nil {
				return err
			}
		}
	case "Split":
		s := split{behavior: c.Behavior, invert: c.Invert}
		if s.literal, s.splitter, err = t.pattern(c.Pattern, false); err != nil {
			return fmt.Errorf("%s: %w", where, err)
		}
		switch c.Behavior {
		case splitIsolated, splitRemoved, splitPrevious, splitNext, splitContiguous:
		default:
			return fmt.Errorf("%s: behavior %q is not supported", where, c.Behavior)
		}
		s.simple = s.behavior == splitIsolated && s.splitter != nil
		t.splits = append(t.splits, s)
	case "ByteLevel":
		s := split{prefix: c.AddPrefixSpace == nil || *c.AddPrefixSpace, behavior: splitIsolated, simple: true}
		if c.UseRegex == nil || *c.UseRegex {
			s.splitter = gpt2Splitter{t.classes}
		}
		t.model.byteLevel = true
		if s.prefix || s.splitter != nil {
			t.splits = append(t.splits, s)
		}
	case "Digits":
		s := split{splitter: numberSplitter{t.classes, 1 << 30}, behavior: splitContiguous}
		if c.Individual {
			s = split{splitter: numberSplitter{t.classes, 1}, behavior: splitIsolated, simple: true}
		}
		t.splits = append(t.splits, s)
	case "Metaspace":
		s := split{metaspace: true, mark: []byte(c.Replacement), prepend: c.PrependScheme, cut: c.Split == nil || *c.Split}
		if utf8.RuneCountInString(c.Replacement) != 1 {
			return fmt.Errorf("%s: replacement %q must be one character", where, c.Replacement)
		}
		if s.prepend == "" {
			s.prepend = "always"
			if c.AddPrefixSpace != nil && !*c.AddPrefixSpace {
				s.prepend = "never"
			}
		}
		if s.prepend != "always" && s.prepend != "never" && s.prepend != "first" {
			return fmt.Errorf("%s: prepend_scheme %q is not supported", where, s.prepend)
		}
		s.literal, s.behavior = s.mark, splitNext
		t.splits = append(t.splits, s)
	}
	return nil
}

// patternSplitter finds a pattern for which there is no splitter by hand. It is a
// splitter by name only: it needs a matcher.
type patternSplitter struct{ pattern *pattern }

func (*patternSplitter) next(s []byte) (int, bool) { return len(s), false }

// segment is a part of a piece.
type segment struct {
	from, to int
	match    bool
}

// pieces applies the splits from level on to a piece, and the model to what comes out.
// first says that the piece stands at the start of the text.
func (t *bpeTokenizer) pieces(w *bpeWorker, s []byte, level int, first bool) error {
	if len(s) == 0 {
		return nil
	}
	if level == len(t.splits) {
		t.model.words(w, s)
		return nil
	}
	p := &t.splits[level]
	if p.prefix && s[0] != ' ' {
		s = append([]byte{' '}, s...)
	}
	if p.metaspace {
		if s = p.metaspaced(s, first); !p.cut {
			return t.pieces(w, s, level+1, first)
		}
	}
	if p.splitter == nil && p.literal == nil {
		return t.pieces(w, s, level+1, first)
	}
	if p.simple {
		if _, slow := p.splitter.(*patternSplitter); !slow {
			return t.simplePieces(w, p.splitter, s, level+1, first)
		}
	}
	for len(w.segments) <= level {
		w.segments = append(w.segments, nil)
	}
	segments, err := p.segments(w, s, w.segments[level][:0])
	w.segments[level] = segments
	if err != nil {
		return err
	}
	for i, x := range segments {
		if err := t.pieces(w, s[x.from:x.to], level+1, first && i == 0 && x.from == 0); err != nil {
			return err
		}
	}
	return nil
}

func (t *bpeTokenizer) simplePieces(w *bpeWorker, p splitter, s []byte, level int, first bool) error {
	last := level == len(t.splits) && !t.model.cut
	for len(s) > 0 {
		n, _ := p.next(s)
		if last {
			t.model.word(w, s[:n])
		} else if err := t.pieces(w, s[:n], level, first); err != nil {
			return err
		}
		s, first = s[n:], false
	}
	return nil
}

func (p *split) metaspaced(s []byte, first bool) []byte {
	out := make([]byte, 0, len(s)+len(s)/2+len(p.mark))
	if p.prepend == "always" || p.prepend == "first" && first {
		if s[0] != ' ' && !bytes.HasPrefix(s, p.mark) {
			out = append(out, p.mark...)
		}
	}
	for _, c := range s {
		if c == ' ' {
			out = append(out, p.mark...)
		} else {
			out = append(out, c)
		}
	}
	return out
}

// segments cuts a piece and joins the cuts as the behavior says.
func (p *split) segments(w *bpeWorker, s []byte, out []segment) ([]segment, error) {
	pattern, _ := p.splitter.(*patternSplitter)
	if pattern != nil {
		w.matcher.reset(s)
	}
	add := func(from, to int, match bool) {
		if from < to {
			out = append(out, segment{from, to, match != p.invert})
		}
	}
	for at := 0; at < len(s); {
		switch {
		case pattern != nil:
			from, to, err := pattern.pattern.find(&w.matcher, at)
			if err != nil {
				return out, err
			}
			if from < 0 {
				from, to = len(s), len(s)
			}
			add(at, from, false)
			add(from, to, true)
			at = to
		case p.literal != nil:
			k := bytes.Index(s[at:], p.literal)
			if k < 0 {
				add(at, len(s), false)
				at = len(s)
				break
			}
			add(at, at+k, false)
			add(at+k, at+k+len(p.literal), true)
			at += k + len(p.literal)
		default:
			n, match := p.splitter.next(s[at:])
			add(at, at+n, match)
			at += n
		}
	}
	k := 0
	switch p.behavior {
	case splitRemoved:
		for _, x := range out {
			if !x.match {
				out[k] = x
				k++
			}
		}
	case splitContiguous:
		for _, x := range out {
			if k > 0 && out[k-1].match == x.match {
				out[k-1].to = x.to
			} else {
				out[k] = x
				k++
			}
		}
	case splitPrevious:
		before := false
		for _, x := range out {
			if x.match && !before && k > 0 {
				out[k-1].to = x.to
			} else {
				out[k] = x
				k++
			}
			before = x.match
		}
	case splitNext:
		k = len(out)
		after := false
		for i := len(out) - 1; i >= 0; i-- {
			x := out[i]
			if x.match && !after && k < len(out) {
				out[k].from = x.from
			} else {
				k--
				out[k] = x
			}
			after = x.match
		}
		return out[k:], nil
	default:
		return out, nil
	}
	return out[:k], nil
}

// encode appends the tokens of a text to w.out, with those that special tokens add
// around it. The error says that a pattern took too long.
func (t *bpeTokenizer) encode(w *bpeWorker, text []byte, special bool) error {
	w.cuts = w.cuts[:0]
	return t.encodeFrom(w, text, 0, special)
}

// encodeFrom is encode for a text whose tokens up to from, a place in w.cuts of the same
// text before, are in w.out.
func (t *bpeTokenizer) encodeFrom(w *bpeWorker, text []byte, from int, special bool) error {
	if special && from == 0 {
		w.ids = append(w.ids[:0], t.before...)
		w.emit()
	}
	var err error
	t.added.each(text, from, func(s []byte, at int) {
		if err == nil {
			err = t.encodePiece(w, s, at == 0)
		}
	}, func(a *addedToken, at int) {
		if at > 0 {
			w.cuts = append(w.cuts, textCut{int32(at), int32(len(w.out))})
		}
		w.one(a.ID)
	})
	if special {
		w.ids = append(w.ids[:0], t.after...)
		w.emit()
	}
	return err
}

func (w *bpeWorker) one(id uint32) {
	w.ids = append(w.ids[:0], id)
	w.emit()
}

// encodePiece appends the tokens of what lies between added tokens, which nothing
// around it changes.
func (t *bpeTokenizer) encodePiece(w *bpeWorker, s []byte, first bool) error {
	if w.cache == nil || len(s) < minCachedPiece {
		return t.encodeNew(w, s, first)
	}
	key := w.cache.key(s, first)
	var known bool
	if w.out, known = w.cache.get(w.out, key); known {
		return nil
	}
	from := len(w.out)
	err := t.encodeNew(w, s, first)
	if err == nil {
		w.cache.put(key, w.out[from:])
	}
	return err
}

func (t *bpeTokenizer) encodeNew(w *bpeWorker, s []byte, first bool) error {
	s, err := t.normalize(w, s)
	if err != nil {
		return err
	}
	if len(t.addedNormal.tokens) == 0 {
		return t.pieces(w, s, 0, first)
	}
	t.addedNormal.each(s, 0, func(s []byte, at int) {
		if err == nil {
			err = t.pieces(w, s, 0, first && at == 0)
		}
	}, func(a *addedToken, _ int) { w.one(a.ID) })
	return err
}
