package routing

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const tokenizerSamples = "testdata/tokenizers"

// TestTokenizerSamples holds small tokenizers of every kind against what Python's
// tokenizers makes of the same texts: see bench/oracle/tokenizer.py.
func TestTokenizerSamples(t *testing.T) {
	dirs, _ := filepath.Glob(filepath.Join(tokenizerSamples, "*", "texts.jsonl"))
	if len(dirs) < 13 {
		t.Fatalf("samples: got %d, want at least 13", len(dirs))
	}
	for _, d := range dirs {
		t.Run(filepath.Base(filepath.Dir(d)), func(t *testing.T) { checkTexts(t, filepath.Dir(d)) })
	}
}

// tinyTokenizer is a file of four bytes and two merges, with parts replaced.
func tinyTokenizer(replace ...string) []byte {
	s := `{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":9,"content":"<s>","special":true}],
"normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
"post_processor":null,"decoder":null,
"model":{"type":"BPE","dropout":null,"unk_token":null,"vocab":{"a":0,"b":1,"c":2,"Ġ":3,"ab":4,"abc":5},"merges":["a b","ab c"]}}`
	return []byte(strings.NewReplacer(replace...).Replace(s))
}

func TestParseTokenizerErrors(t *testing.T) {
	f := func(t *testing.T, old, with, want string) {
		t.Helper()
		data := tinyTokenizer(old, with)
		if bytes.Equal(data, tinyTokenizer()) {
			t.Fatalf("%q is not in the file", old)
		}
		_, err := parseTokenizer(data, nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("with %s: got error %v, want one with %q", with, err, want)
		}
	}
	if _, err := parseTokenizer(tinyTokenizer(), nil); err != nil {
		t.Fatalf("the file itself: got error %v, want none", err)
	}
	norm := `{"type":"NFC"}`
	pre := `{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}`
	split := func(pattern, more string) string {
		return `{"type":"Split","pattern":{"Regex":"` + pattern + `"},"behavior":"Isolated","invert":false` + more + `}`
	}
	f(t, `"decoder"`, `"speed"`, `unknown field "speed"`)
	f(t, norm, `{"type":"Precompiled","precompiled_charsmap":"AA=="}`, `normalizer: type "Precompiled" is not supported`)
	f(t, norm, `{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"BertNormalizer"}]}`, `normalizer.normalizers[1]: type "BertNormalizer" is not supported`)
	f(t, norm, `{"type":"NFC","content":"x"}`, `field "content" of NFC is not supported`)
	f(t, norm, `{"type":"Replace","pattern":{"Regex":"a*"},"content":"x"}`, "matches the empty text")
	f(t, norm, `{"type":"Replace","pattern":{},"content":"x"}`, "pattern must be a String or a Regex")
	f(t, norm, `{"type":"Replace","pattern":{"String":""},"content":"x"}`, "pattern is empty")
	f(t, norm, strings.Repeat(`{"type":"Sequence","normalizers":[`, 12)+strings.Repeat(`]}`, 12), "too deep")
	f(t, pre, `{"type":"Whitespace"}`, `pre_tokenizer: type "Whitespace" is not supported`)
	f(t, pre, `{"type":"Sequence","pretokenizers":[`+pre+`,`+pre+`]}`, "ByteLevel behind ByteLevel is not supported")
	f(t, pre, strings.Repeat(`{"type":"Sequence","pretokenizers":[`, 12)+strings.Repeat(`]}`, 12), "too deep")
	f(t, pre, split(`(?<=a)b`, ""), "(?<= at offset 0 is not supported")
	f(t, pre, split(`a`, `,"speed":1`), `unknown field "speed"`)
	f(t, pre, strings.Replace(split(`a`, ""), "Isolated", "Shuffled", 1), `behavior "Shuffled" is not supported`)
	f(t, pre, `{"type":"Metaspace","replacement":"ab"}`, "must be one character")
	f(t, pre, `{"type":"Metaspace","replacement":"_","prepend_scheme":"last"}`, `prepend_scheme "last" is not supported`)
	f(t, `"post_processor":null`, `"post_processor":{"type":"TemplateProcessing","single":[],"pair":[],"special_tokens":{}}`, "no Sequence A")
	f(t, `"post_processor":null`, `"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}}],"pair":[],"special_tokens":{}}`, "single[0] is not supported")
	f(t, `"post_processor":null`, `"post_processor":{"type":"RobertaProcessing","sep":["</s>"],"cls":["<s>",0]}`, "cls and sep must be")
	f(t, `"post_processor":null`, `"post_processor":`+strings.Repeat(`{"type":"Sequence","processors":[`, 12)+strings.Repeat(`]}`, 12), "too deep")
	f(t, `"BPE"`, `"Unigram"`, `model: type "Unigram" is not supported`)
	f(t, `"dropout":null`, `"dropout":0.5`, "dropout 0.5 is not supported")
	f(t, `"dropout":null`, `"speed":0.5`, `unknown field "speed"`)
	f(t, `"unk_token":null`, `"unk_token":"?"`, `unk_token "?" is not in vocab`)
	f(t, `"unk_token":null`, `"continuing_subword_prefix":"##"`, `continuing_subword_prefix "##" is not supported`)
	f(t, `"unk_token":null`, `"end_of_word_suffix":"</w>"`, `end_of_word_suffix "</w>" is not supported`)
	f(t, `"ab c"`, `"ab d"`, `merges[1]: "ab" and "d"`)
	f(t, `"ab c"`, `"abc"`, `merges[1] "abc": want two tokens`)
	f(t, `["a b","ab c"]`, `[["a","b"],["ab"]]`, "merges[1] has 1 tokens")
	f(t, `["a b","ab c"]`, `{}`, "cannot unmarshal")
	f(t, `{"a":0,"b":1,"c":2,"Ġ":3,"ab":4,"abc":5}`, `{}`, "vocab is empty")
	f(t, `"a":0`, `"a":4294967295`, "too large")
	f(t, `"abc":5}`, `"abc":-5}`, "cannot unmarshal")
}

func TestCompilePatternErrors(t *testing.T) {
	f := func(t *testing.T, in, want string) {
		t.Helper()
		_, err := compilePattern(in)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want one with %q", in, err, want)
		}
	}
	f(t, `a)`, "unmatched )")
	f(t, `(a`, "missing )")
	f(t, `[a`, "missing ]")
	f(t, `a{`, "{ at offset")
	f(t, `a{3,2}`, "repetition")
	f(t, `a{1000000}`, "repetition")
	f(t, `*a`, "repetition of nothing")
	f(t, `(?=a)*`, "repetition of an assertion")
	f(t, `^a`, "^")
	f(t, `a$`, "$")
	f(t, `\1`, `\1`)
	f(t, `\`, `\`)
	f(t, `\p{Klingon}`, `\p{Klingon}`)
	f(t, `\p{L`, "missing }")
	f(t, `(?i:\p{Lu})`, "without regard to case")
	f(t, `(?P<x>a)`, "(?P<")
	f(t, `[[:alpha:]]`, "[:")
	f(t, `[b-a]`, "range")
	f(t, `[a-\d]`, "range")
	f(t, `[a-[b]]`, "[ as an end")
	f(t, `[a&&^b]`, "&&^")
	f(t, `\x{110000}`, "character number")
	f(t, `\xzz`, "character number")
	f(t, strings.Repeat("(", 200), "so deep")
	f(t, strings.Repeat("[", 200), "so deep")
	f(t, strings.Repeat("a", 1<<15), "too long")
	f(t, "\xff", "no UTF-8")
}

// matches returns where a pattern matches in a text.
func matches(p *pattern, text string) (out []string, err error) {
	var m patternMatcher
	m.reset([]byte(text))
	for at := 0; at < len(text); {
		from, to, err := p.find(&m, at)
		if err != nil || from < 0 {
			return out, err
		}
		out = append(out, text[from:to])
		at = max(to, from+1)
	}
	return out, nil
}

func TestPatternMatches(t *testing.T) {
	f := func(t *testing.T, in, text string, want ...string) {
		t.Helper()
		p, err := compilePattern(in)
		if err != nil {
			t.Fatal(err)
		}
		got, err := matches(p, text)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s on %q: got %q, %v, want %q", in, text, got, err, want)
		}
	}
	f(t, `a|ab`, "ab", "a")
	f(t, `(a|ab)(c|bcd)`, "abcd", "abcd")
	f(t, `a+?b`, "aaab", "aaab")
	f(t, `a*+a|b`, "aab", "b")
	f(t, `(?>a|ab)c|x`, "abcx", "x")
	f(t, `(?:ab){2,3}`, "ababababab", "ababab", "abab")
	f(t, `(?:ab)++c`, "ababc", "ababc")
	f(t, `x(?=y)|z(?!y)`, "xyxzzy", "x", "z")
	f(t, `(?i)straSSE`, "STRAsse", "STRAsse")
	f(t, `(?i:k)k`, "KkKkkK", "Kk", "Kk")
	f(t, `[^a-c\d]+`, "xa1yz", "x", "yz")
	f(t, `[\w&&[^a]]+`, "bacd", "b", "cd")
	f(t, `[a[xy]-]+`, "-xaz", "-xa")
	f(t, `[]a]+`, "]a", "]a")
	f(t, `\p{Han}+|\p{^L}|\P{L}`, "漢字a1", "漢字", "1")
	f(t, `\p{Letter}\pN`, "a1", "a1")
	f(t, `\x41\u0042\x{43}`, "ABC", "ABC")
	f(t, `\bfoo\b|\Ba`, "foo barfoo ba", "foo", "a", "a")
	f(t, `\Aa|b\z`, "aabb", "a", "b")
	f(t, `.`, "a\nb", "a", "b")
	f(t, `\W\S\s\D`, "!a b", "!a b")
	f(t, `a{,2}b`, "aaab", "aab")
}

func TestPatternStepsAreBounded(t *testing.T) {
	p, err := compilePattern(`(?:a+)+b`)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := matches(p, strings.Repeat("a", 2000)); !errors.Is(err, errPatternSteps) {
		t.Errorf("a pattern that backtracks for ever: got error %v, want %v", err, errPatternSteps)
	}
}

func TestWellFormed(t *testing.T) {
	f := func(t *testing.T, in, want string) {
		t.Helper()
		if got := string(wellFormed(nil, []byte(in))); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
	f(t, "aé漢😀", "aé漢😀")
	f(t, "\xff\xfe", "\uFFFD\uFFFD")
	f(t, "\xe6\xbc", "\uFFFD")
	f(t, "\xf0\x9f\x98x", "\uFFFDx")
	f(t, "\xed\xa0\x80", "\uFFFD\uFFFD\uFFFD") // a surrogate
	f(t, "\xe0\x80\x80", "\uFFFD\uFFFD\uFFFD") // too long a form
	f(t, "\xf4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD")
}

// splitAll cuts a text with a splitter.
func splitAll(s splitter, text []byte) (out []segment) {
	for at := 0; at < len(text); {
		n, match := s.next(text[at:])
		out = append(out, segment{at, at + n, match})
		at += n
	}
	return out
}

var splitPatterns = []string{patternGPT2, patternCL100K, patternQwen, patternQwenMark, patternO200K, patternTekken, patternDigits3, patternKanaHan, patternDeepSeek}

func compileSplitPatterns(t testing.TB) (out []*pattern) {
	t.Helper()
	for _, source := range splitPatterns {
		p, err := compilePattern(source)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, p)
	}
	return out
}

// checkSplitters holds the splitters by hand against the pattern matcher.
func checkSplitters(t *testing.T, classes *runeClasses, patterns []*pattern, text []byte) {
	t.Helper()
	for _, p := range patterns {
		var w bpeWorker
		slow := split{splitter: &patternSplitter{p}, behavior: splitIsolated}
		want, err := slow.segments(&w, text, nil)
		if err != nil {
			return // long texts take too many steps
		}
		if got := splitAll(knownSplitter(p.source, classes), text); !slices.Equal(got, want) {
			t.Errorf("%s\non %q: got %v, want %v", p.source, text, got, want)
		}
	}
}

func TestSplittersMatchPatterns(t *testing.T) {
	classes, patterns := newRuneClasses(), compileSplitPatterns(t)
	for _, text := range []string{
		"Hello, World! it's 12345 don'T I'LL x'ſ", " \n\n  x\r\n\ty  ", "a\u0301b\u0301 \u0301\u0301A\u0301", "日本語テキスト漢字123", "HTTPServer iPhone ǅungla",
		"\x00\x01abc\x00", "  ", "\n", "!!!\n\n", " ?x", "\u00a0x\u3000", "//\n/x", "½²Ⅷ٣", "'", "''s", "e\u200d👍🏽",
	} {
		checkSplitters(t, classes, patterns, []byte(text))
	}
}

func FuzzTokenizerSplitters(f *testing.F) {
	classes, patterns := newRuneClasses(), compileSplitPatterns(f)
	for _, s := range []string{"Hello, World! it's 12345", " \n\n  x\r\n", "a\u0301b", "日本語123", "\x00abc", "HTTPServer's"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 0 && len(text) < 200 {
			checkSplitters(t, classes, patterns, wellFormed(nil, text))
		}
	})
}

func FuzzTokenizerFile(f *testing.F) {
	f.Add(tinyTokenizer(), []byte("abc <s> cab"))
	dirs, _ := filepath.Glob(filepath.Join(tokenizerSamples, "*", "tokenizer.json"))
	for _, d := range dirs {
		if data, err := os.ReadFile(d); err == nil && len(data) < 40<<10 {
			f.Add(data, []byte("The  tokenizer's\n<s> 123 é漢"))
		}
	}
	f.Fuzz(func(t *testing.T, file, text []byte) {
		tk, err := parseTokenizer(file, nil)
		if err != nil {
			return
		}
		if err := tk.encode(newBPEWorker(1), wellFormed(nil, text), true); err != nil && !errors.Is(err, errPatternSteps) && !errors.Is(err, errManyMarks) {
			t.Errorf("encode %q: got error %v, want none", text, err)
		}
	})
}

// FuzzTokenizerText holds what is remembered against what is not, and the merge of
// long words against that of short ones.
func FuzzTokenizerText(f *testing.F) {
	var tokenizers []*bpeTokenizer
	var workers []*bpeWorker
	for _, name := range []string{"cl100k", "spm", "metaspace", "deepseek", "digits", "gemma"} {
		tokenizers = append(tokenizers, loadTokenizer(f, filepath.Join(tokenizerSamples, name, "tokenizer.json")))
		workers = append(workers, newBPEWorker(7))
	}
	for _, s := range []string{"The  tokenizer's <both> 123", "▁▁ a ▁b", strings.Repeat("word", 40), "é漢\xff😀"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		text = wellFormed(nil, text)
		for i, tk := range tokenizers {
			w := workers[i]
			w.out = w.out[:0]
			err := tk.encode(w, text, false)
			plain := *tk
			plain.model.cut = false
			fresh := newBPEWorker(8)
			if errFresh := plain.encode(fresh, text, false); (err == nil) != (errFresh == nil) || !bytes.Equal(w.out, fresh.out) {
				t.Errorf("tokenizer %d on %q: got %v, %v, want %v, %v", i, text, tokensOf(w.out), err, tokensOf(fresh.out), errFresh)
			}
		}
	})
}

// TestMergesAgree holds the two ways to merge against each other.
func TestMergesAgree(t *testing.T) {
	tk := loadTokenizer(t, filepath.Join(tokenizerSamples, "cl100k", "tokenizer.json"))
	readLines(t, filepath.Join(tokenizerSamples, "cl100k", "texts.jsonl"), func(line []byte) {
		a, b := newBPEWorker(1), newBPEWorker(1)
		tk.model.symbols(a, line)
		b.ids = slices.Clone(a.ids)
		tk.model.mergeFew(a)
		tk.model.mergeMany(b)
		if !slices.Equal(a.ids, b.ids) {
			t.Errorf("%q: got %v, want %v", line, b.ids, a.ids)
		}
	})
}

func TestManyMarks(t *testing.T) {
	tk := loadTokenizer(t, filepath.Join(tokenizerSamples, "cl100k", "tokenizer.json"))
	w := newBPEWorker(1)
	if err := tk.encode(w, []byte("a"+strings.Repeat("\u0301", maxMarks+1)), false); !errors.Is(err, errManyMarks) {
		t.Errorf("got error %v, want %v", err, errManyMarks)
	}
	if err := tk.encode(w, []byte("a"+strings.Repeat("\u0301", 300)), false); err != nil {
		t.Errorf("got error %v, want none", err)
	}
}

// TestAddedTokensAtTheirEdges: what one token has stripped is not stripped again by the
// next, and words are what the reference takes for words.
func TestAddedTokensAtTheirEdges(t *testing.T) {
	f := func(text, want string, tokens ...addedToken) {
		t.Helper()
		var got []string
		newAddedSet(tokens).each([]byte(text), 0, func(s []byte, _ int) { got = append(got, string(s)) }, func(a *addedToken, _ int) { got = append(got, "<"+a.Content+">") })
		if s := strings.Join(got, "|"); s != want {
			t.Errorf("%q: got %q, want %q", text, s, want)
		}
	}
	both := addedToken{Content: "  ", LStrip: true, RStrip: true}
	f("a        b", "a|<  >|b", both)
	f("a    b  c", "a|<  >|b|<  >|c", both)
	word := addedToken{Content: "word", SingleWord: true}
	f("a word b", "a |<word>| b", word)
	for _, beside := range []string{"x", "_", "7", "\u200d", "\u0301", "Ⓐ", "Ⅷ"} {
		f(beside+"word", beside+"word", word)
		f("word"+beside, "word"+beside, word)
	}
	for _, beside := range []string{"½", "①", "-", " "} {
		f(beside+"word", beside+"|<word>", word)
	}
}
