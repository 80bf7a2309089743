package routing

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// tokenizerFile is a tokenizer.json as the tokenizers library writes it. Whatever is
// in it and not known here is an error: a step that was left out would make wrong
// tokens, which are worse than none.
type tokenizerFile struct {
	Version       string          `json:"version"`
	Truncation    json.RawMessage `json:"truncation"` // off: an engine does not truncate
	Padding       json.RawMessage `json:"padding"`
	AddedTokens   []addedToken    `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"` // tokens to text: no concern of ours
	Model         json.RawMessage `json:"model"`
}

type bpeFile struct {
	Type         string            `json:"type"`
	Dropout      *float64          `json:"dropout"`
	UnkToken     *string           `json:"unk_token"`
	Prefix       *string           `json:"continuing_subword_prefix"`
	Suffix       *string           `json:"end_of_word_suffix"`
	FuseUnk      bool              `json:"fuse_unk"`
	ByteFallback bool              `json:"byte_fallback"`
	IgnoreMerges bool              `json:"ignore_merges"`
	Vocab        map[string]uint32 `json:"vocab"`
	Merges       bpeMerges         `json:"merges"`
}

type bpeMerge [2]string

// bpeMerges are pairs of tokens, as lists of two or as strings with a blank.
type bpeMerges []bpeMerge

// UnmarshalJSON reads either form.
func (m *bpeMerges) UnmarshalJSON(data []byte) error {
	var pairs [][]string
	if err := json.Unmarshal(data, &pairs); err == nil {
		for i, p := range pairs {
			if len(p) != 2 {
				return fmt.Errorf("merges[%d] has %d tokens: want 2", i, len(p))
			}
			*m = append(*m, bpeMerge{p[0], p[1]})
		}
		return nil
	}
	var lines []string
	if err := json.Unmarshal(data, &lines); err != nil {
		return err
	}
	for i, l := range lines {
		a, b, ok := strings.Cut(l, " ")
		if !ok || strings.Contains(b, " ") {
			return fmt.Errorf("merges[%d] %q: want two tokens with a blank between", i, l)
		}
		*m = append(*m, bpeMerge{a, b})
	}
	return nil
}

// strict decodes a component and refuses fields that are not known.
func strict(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one value")
	}
	return nil
}

func isNull(data json.RawMessage) bool { return len(data) == 0 || string(data) == "null" }

// component is the union of the normalizers, pre-tokenizers and post-processors
// that are supported; which fields go with which type is checked by allowed.
type component struct {
	Type           string                     `json:"type"`
	Normalizers    []json.RawMessage          `json:"normalizers"`
	PreTokenizers  []json.RawMessage          `json:"pretokenizers"`
	Processors     []json.RawMessage          `json:"processors"`
	Pattern        *filePattern               `json:"pattern"`
	Content        string                     `json:"content"`
	Prepend        string                     `json:"prepend"`
	Behavior       string                     `json:"behavior"`
	Invert         bool                       `json:"invert"`
	AddPrefixSpace *bool                      `json:"add_prefix_space"`
	TrimOffsets    bool                       `json:"trim_offsets"`
	UseRegex       *bool                      `json:"use_regex"`
	Individual     bool                       `json:"individual_digits"`
	Replacement    string                     `json:"replacement"`
	PrependScheme  string                     `json:"prepend_scheme"`
	StrRep         string                     `json:"str_rep"`
	Split          *bool                      `json:"split"`
	StripLeft      bool                       `json:"strip_left"`
	StripRight     bool                       `json:"strip_right"`
	Single         []map[string]templatePiece `json:"single"`
	Pair           json.RawMessage            `json:"pair"`
	SpecialTokens  map[string]templateToken   `json:"special_tokens"`
	Sep            []any                      `json:"sep"`
	Cls            []any                      `json:"cls"`
}

type filePattern struct {
	String *string `json:"String"`
	Regex  *string `json:"Regex"`
}

type templatePiece struct {
	ID     string `json:"id"`
	TypeID int    `json:"type_id"`
}

type templateToken struct {
	ID     string   `json:"id"`
	IDs    []uint32 `json:"ids"`
	Tokens []string `json:"tokens"`
}

// bpeTokenizer turns text into tokens as a tokenizer.json says. It is immutable; what a
// tokenization needs besides is in a bpeWorker.
type bpeTokenizer struct {
	classes     *runeClasses
	added       *addedSet // looked for in the text as it is
	guard       int       // bytes behind the start of an added token that decide on it and on those before
	addedNormal *addedSet // looked for in the normalized text
	normalizers []normalizer
	splits      []split
	model       bpeModel
	before      []uint32 // tokens that special tokens add around a text
	after       []uint32
	special     map[string]uint32 // added tokens by content
	names       map[string]uint32 // the vocabulary as the file writes it
}

// tokenTexts returns the text of every token: for explanations.
func (t *bpeTokenizer) tokenTexts() map[uint32]string {
	out := make(map[uint32]string, len(t.names))
	for name, id := range t.names {
		if raw, ok := runeBytes(name); ok && t.model.byteLevel {
			name = raw
		}
		out[id] = name
	}
	for name, id := range t.special {
		out[id] = name
	}
	return out
}

// maxTokenizerFile bounds the files that are read: Gemma's has 33 MB.
const maxTokenizerFile = 256 << 20

// parseTokenizer reads a tokenizer.json and what its tokenizer_config.json, if there is
// one, changes. The error names what is not supported.
func parseTokenizer(data []byte, config *tokenizerConfig) (*bpeTokenizer, error) {
	var f tokenizerFile
	if err := strict(data, &f); err != nil {
		return nil, err
	}
	t := &bpeTokenizer{classes: newRuneClasses(), special: map[string]uint32{}}
	if err := t.normalizer("normalizer", f.Normalizer, 0); err != nil {
		return nil, err
	}
	if err := t.preTokenizer("pre_tokenizer", f.PreTokenizer, 0); err != nil {
		return nil, err
	}
	vocab, err := t.readModel(f.Model)
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if config != nil && config.llama() && !t.model.byteLevel {
		t.asLlama(config)
	}
	if err := t.postProcessor("post_processor", f.PostProcessor, 0); err != nil {
		return nil, err
	}
	t.names = vocab
	tokens := f.AddedTokens
	if config != nil {
		if tokens, err = config.addTo(tokens, vocab); err != nil {
			return nil, err
		}
	}
	return t, t.addTokens(tokens)
}

// asLlama replaces the file's steps by those of transformers' LlamaTokenizer, which
// differ from older files behind added tokens: blanks become marks, one goes in front of
// every piece (legacy) or of the first, and unknown characters are bytes or nothing.
func (t *bpeTokenizer) asLlama(c *tokenizerConfig) {
	s := split{metaspace: true, mark: []byte(spaceMark), literal: []byte(spaceMark), behavior: splitNext, prepend: "first"}
	if c.Legacy {
		s.prepend = "always"
	}
	if c.PrefixSpace != nil && !*c.PrefixSpace {
		s.prepend = "never"
	}
	t.normalizers, t.splits = nil, []split{s}
	t.model.fuseUnk, t.model.byteFallback, t.model.ignoreMerges, t.model.unk = true, true, false, -1
}

// addTo appends the tokens that the config has and the file has not: those of
// added_tokens_decoder, and special tokens by name. They take their number from the
// vocabulary, or the next free one.
func (c *tokenizerConfig) addTo(tokens []addedToken, vocab map[string]uint32) ([]addedToken, error) {
	have := map[string]bool{}
	next := uint32(len(vocab))
	for _, a := range tokens {
		have[a.Content] = true
		if _, inside := vocab[a.Content]; !inside {
			next = max(next, a.ID+1)
		}
	}
	add := func(a addedToken) {
		if have[a.Content] || a.Content == "" {
			return
		}
		have[a.Content] = true
		id, ok := vocab[a.Content]
		if !ok {
			id = next
			next++
		}
		a.ID = id
		tokens = append(tokens, a)
	}
	var decoder []addedToken
	for id, data := range c.Added {
		n, err := strconv.ParseUint(id, 10, 32)
		a := addedToken{Normalized: true}
		if err == nil {
			err = json.Unmarshal(data, &a)
		}
		if err != nil {
			return nil, fmt.Errorf("added_tokens_decoder[%s]: %w", id, err)
		}
		a.ID = uint32(n)
		decoder = append(decoder, a)
	}
	slices.SortFunc(decoder, func(a, b addedToken) int { return cmp.Compare(a.ID, b.ID) })
	for _, a := range decoder {
		add(a)
	}
	for _, name := range specialTokenNames {
		add(addedToken{Content: c.tokens[name], Special: true})
	}
	return tokens, nil
}

// addTokens compiles the added tokens, those of the file and of its config.
func (t *bpeTokenizer) addTokens(tokens []addedToken) error {
	var plain, normal []addedToken
	w := newBPEWorker(0)
	// Special tokens are looked at first, so that they win where two have one text.
	slices.SortStableFunc(tokens, func(a, b addedToken) int {
		switch {
		case a.Special == b.Special:
			return 0
		case a.Special:
			return -1
		}
		return 1
	})
	for i, a := range tokens {
		if a.Content == "" {
			continue // the reference leaves them out, too
		}
		if !utf8.ValidString(a.Content) {
			return fmt.Errorf("added_tokens[%d] is no UTF-8", i)
		}
		if _, twice := t.special[a.Content]; twice {
			continue
		}
		t.special[a.Content] = a.ID
		if !a.Normalized {
			plain = append(plain, a)
			continue
		}
		text, err := t.normalize(w, []byte(a.Content))
		if err != nil {
			return fmt.Errorf("added_tokens[%d]: %w", i, err)
		}
		if a.Content = string(text); a.Content != "" {
			normal = append(normal, a)
		}
	}
	t.added, t.addedNormal = newAddedSet(plain), newAddedSet(normal)
	for _, a := range plain {
		t.guard = max(t.guard, len(a.Content)+2*utf8.UTFMax) // the character behind, and one that may have been cut
	}
	return nil
}

// readModel reads the vocabulary and the merges.
func (t *bpeTokenizer) readModel(data json.RawMessage) (map[string]uint32, error) {
	var kind struct {
		Type   string          `json:"type"`
		Merges json.RawMessage `json:"merges"`
	}
	if err := json.Unmarshal(data, &kind); err != nil {
		return nil, err
	}
	if kind.Type != "BPE" && (kind.Type != "" || isNull(kind.Merges)) {
		return nil, fmt.Errorf("type %q is not supported: only BPE is", kind.Type)
	}
	var f bpeFile
	if err := strict(data, &f); err != nil {
		return nil, err
	}
	switch {
	case f.Dropout != nil && *f.Dropout != 0:
		return nil, fmt.Errorf("dropout %v is not supported: tokens would be random", *f.Dropout)
	case f.Prefix != nil && *f.Prefix != "":
		return nil, fmt.Errorf("continuing_subword_prefix %q is not supported", *f.Prefix)
	case f.Suffix != nil && *f.Suffix != "":
		return nil, fmt.Errorf("end_of_word_suffix %q is not supported", *f.Suffix)
	case len(f.Vocab) == 0:
		return nil, errors.New("vocab is empty")
	case len(f.Merges) > math.MaxInt32-1:
		return nil, fmt.Errorf("%d merges are too many", len(f.Merges))
	}
	m := &t.model
	m.byteFallback, m.fuseUnk, m.ignoreMerges, m.unk = f.ByteFallback, f.FuseUnk, f.IgnoreMerges, -1
	if f.UnkToken != nil {
		id, ok := f.Vocab[*f.UnkToken]
		if !ok {
			return nil, fmt.Errorf("unk_token %q is not in vocab", *f.UnkToken)
		}
		if id > math.MaxInt32 {
			return nil, fmt.Errorf("vocab: token number %d is too large", id)
		}
		m.unk = int32(id)
	}
	m.pairs = newPairTable(len(f.Merges))
	for i, x := range f.Merges {
		a, okA := f.Vocab[x[0]]
		b, okB := f.Vocab[x[1]]
		c, okC := f.Vocab[x[0]+x[1]]
		if !okA || !okB || !okC {
			return nil, fmt.Errorf("merges[%d]: %q and %q, or what they become, are not in vocab", i, x[0], x[1])
		}
		m.pairs.set(a, b, i, int(c))
	}
	for b := range m.bytes {
		m.bytes[b] = -1
		name := fmt.Sprintf("<0x%02X>", b)
		if m.byteLevel {
			name = string(byteRune(byte(b)))
		}
		if id, ok := f.Vocab[name]; ok {
			if id > math.MaxInt32 {
				return nil, fmt.Errorf("vocab: token number %d is too large", id)
			}
			m.bytes[b] = int32(id)
		}
	}
	if !m.byteLevel {
		m.vocab = f.Vocab
		_, blank := f.Vocab[spaceMark]
		if blank && !m.ignoreMerges && !slices.ContainsFunc(f.Merges, func(x bpeMerge) bool { return isByteToken(x[0]) || isByteToken(x[1]) }) {
			m.findCuts(f.Merges)
		}
	} else if m.ignoreMerges {
		// Whole words are looked up: by their bytes, not by the letters that stand for them.
		m.vocab = make(map[string]uint32, len(f.Vocab))
		for name, id := range f.Vocab {
			if raw, ok := runeBytes(name); ok {
				m.vocab[raw] = id
			}
		}
	}
	for name := range m.vocab {
		m.longer = max(m.longer, len(name))
	}
	return f.Vocab, nil
}

func isByteToken(s string) bool { return len(s) == 6 && strings.HasPrefix(s, "<0x") && s[5] == '>' }

// byteRune returns the character that stands for a byte in byte-level files: itself
// where it can be printed, else the next free one from U+0100 on.
func byteRune(b byte) rune {
	switch {
	case b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae:
		return rune(b)
	case b <= ' ':
		return 0x100 + rune(b)
	case b <= 0xa0:
		return 0x100 + 33 + rune(b) - 0x7f
	}
	return 0x100 + 67 // the soft hyphen
}

// runeBytes undoes byteRune for every character of a token.
func runeBytes(s string) (string, bool) {
	out := make([]byte, 0, len(s))
	for _, r := range s {
		switch {
		case r < 0x100 && byteRune(byte(r)) == r:
			out = append(out, byte(r))
		case r >= 0x100 && r <= 0x100+' ':
			out = append(out, byte(r-0x100))
		case r > 0x100+' ' && r < 0x100+67:
			out = append(out, byte(r-0x100-33+0x7f))
		case r == 0x100+67:
			out = append(out, 0xad)
		default:
			return "", false
		}
	}
	return string(out), true
}

// component decodes one step. allowed are the fields that its type has, besides type.
func readComponent(where string, data json.RawMessage, allowed map[string][]string) (*component, error) {
	c := &component{}
	if err := strict(data, c); err != nil {
		var kind struct {
			Type string `json:"type"`
		}
		if json.Unmarshal(data, &kind) == nil && kind.Type != "" && allowed[kind.Type] == nil {
			return nil, fmt.Errorf("%s: type %q is not supported", where, kind.Type)
		}
		return nil, fmt.Errorf("%s: %w", where, err)
	}
	fields, ok := allowed[c.Type]
	if !ok {
		return nil, fmt.Errorf("%s: type %q is not supported", where, c.Type)
	}
	var present map[string]json.RawMessage
	if err := json.Unmarshal(data, &present); err != nil {
		return nil, fmt.Errorf("%s: %w", where, err)
	}
	for name := range present {
		if name != "type" && !slices.Contains(fields, name) {
			return nil, fmt.Errorf("%s: field %q of %s is not supported", where, name, c.Type)
		}
	}
	return c, nil
}

// postProcessor reads what special tokens add around a text.
func (t *bpeTokenizer) postProcessor(where string, data json.RawMessage, depth int) error {
	if isNull(data) {
		return nil
	}
	c, err := readComponent(where, data, map[string][]string{
		"Sequence":           {"processors"},
		"ByteLevel":          {"add_prefix_space", "trim_offsets", "use_regex"},
		"TemplateProcessing": {"single", "pair", "special_tokens"},
		"BertProcessing":     {"sep", "cls"},
		"RobertaProcessing":  {"sep", "cls", "trim_offsets", "add_prefix_space"},
	})
	if err != nil {
		return err
	}
	switch c.Type {
	case "Sequence":
		if depth > 8 {
			return fmt.Errorf("%s: too deep", where)
		}
		for i, p := range c.Processors {
			if err := t.postProcessor(fmt.Sprintf("%s.processors[%d]", where, i), p, depth+1); err != nil {
				return err
			}
		}
	case "TemplateProcessing":
		seen := false
		var before, after []uint32
		for i, x := range c.Single {
			at := fmt.Sprintf("%s.single[%d]", where, i)
			if s, ok := x["Sequence"]; ok && len(x) == 1 && s.ID == "A" && !seen {
				seen = true
				continue
			}
			s, ok := x["SpecialToken"]
			ids, known := c.SpecialTokens[s.ID]
			if !ok || len(x) != 1 || !known {
				return fmt.Errorf("%s is not supported: want one Sequence A, and SpecialToken of special_tokens", at)
			}
			if seen {
				after = append(after, ids.IDs...)
			} else {
				before = append(before, ids.IDs...)
			}
		}
		if !seen {
			return fmt.Errorf("%s.single has no Sequence A", where)
		}
		t.before, t.after = append(before, t.before...), append(t.after, after...)
	case "BertProcessing", "RobertaProcessing":
		cls, okC := tokenOf(c.Cls)
		sep, okS := tokenOf(c.Sep)
		if !okC || !okS {
			return fmt.Errorf("%s: cls and sep must be a token and its number", where)
		}
		t.before, t.after = append([]uint32{cls}, t.before...), append(t.after, sep)
	}
	return nil
}

func tokenOf(pair []any) (uint32, bool) {
	if len(pair) != 2 {
		return 0, false
	}
	n, ok := pair[1].(float64)
	return uint32(n), ok && n >= 0 && n <= math.MaxUint32 && n == math.Trunc(n)
}
