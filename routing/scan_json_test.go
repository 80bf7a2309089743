package routing

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestParseRefuses(t *testing.T) {
	f := func(t *testing.T, body, wantMsg, wantPath string, wantOffset int) {
		t.Helper()
		r := Request{API: APIChat, Body: []byte(body)}
		err := r.Parse()
		var got *BodyError
		if !errors.As(err, &got) {
			t.Fatalf("Parse(%q): error %v, want a *BodyError", body, err)
		}
		if got.Msg != wantMsg || got.Path != wantPath || got.Offset != wantOffset {
			t.Errorf("Parse(%q): got %q in %q at %d, want %q in %q at %d", body, got.Msg, got.Path, got.Offset, wantMsg, wantPath, wantOffset)
		}
		if !strings.Contains(err.Error(), wantMsg) || !strings.Contains(err.Error(), fmt.Sprint("at byte ", wantOffset)) {
			t.Errorf("Error() = %q, want it to have %q and the offset %d", err, wantMsg, wantOffset)
		}
	}
	const early = "the JSON document ends too early"
	f(t, ``, early, "", 0)
	f(t, "  \n", early, "", 3)
	f(t, `[]`, "expected a JSON object", "", 0)
	f(t, `"x"`, "expected a JSON object", "", 0)
	f(t, `null`, "expected a JSON object", "", 0)
	f(t, "\xef\xbb\xbf{}", "expected a JSON object", "", 0)
	f(t, "{\x00}", "expected a key in double quotes", "", 1)
	f(t, `{`, early, "", 1)
	f(t, `{"a"`, early, "", 4)
	f(t, `{"a" 1}`, "expected ':' after a key", "", 5)
	f(t, `{"a":}`, "expected a value", "a", 5)
	f(t, `{"a":1`, early, "a", 6)
	f(t, `{"a":1,}`, "expected a key in double quotes", "", 7)
	f(t, `{"a":1 "b":2}`, "expected ',' or '}'", "a", 7)
	f(t, `{a:1}`, "expected a key in double quotes", "", 1)
	f(t, `{'a':1}`, "expected a key in double quotes", "", 1)
	f(t, `{"a":1}}`, "expected nothing behind the JSON object", "", 7)
	f(t, `{"a":1} {}`, "expected nothing behind the JSON object", "", 8)
	f(t, `{"a":[1,2,]}`, "expected a value", "a[2]", 10)
	f(t, `{"a":[1 2]}`, "expected ',' or ']'", "a[0]", 8)
	f(t, `{"a":[1}`, "expected ',' or ']'", "a[0]", 7)
	f(t, `{"a":tru}`, "expected true", "a", 5)
	f(t, `{"a":tru`, early, "a", 8)
	f(t, `{"a":nul!}`, "expected null", "a", 5)
	f(t, `{"a":-NaN}`, "expected a digit", "a", 6)
	f(t, `{"a":-Inf}`, "expected Infinity", "a", 6)
	f(t, `{"a":01}`, "expected ',' or '}'", "a", 6)
	f(t, `{"a":1.}`, "expected a digit", "a", 7)
	f(t, `{"a":.5}`, "expected a value", "a", 5)
	f(t, `{"a":+1}`, "expected a value", "a", 5)
	f(t, `{"a":1e}`, "expected a digit", "a", 7)
	f(t, `{"a":"x`, early, "a", 7)
	f(t, `{"a":"x\`, early, "a", 8)
	f(t, `{"a":"\u12`, early, "a", 10)
	f(t, `{"a":"\u12g4"}`, `expected four hexadecimal digits after \u`, "a", 10)
	f(t, `{"a":"\x"}`, "unknown escape sequence in a string", "a", 7)
	f(t, "{\"a\":\"x\ny\"}", "a control character inside a string must be escaped", "a", 7)
	f(t, "{\"a\":\"x\x1f\"}", "a control character inside a string must be escaped", "a", 7)
	f(t, "{\"a\nb\":1}", "a control character inside a string must be escaped", "", 3)
	f(t, `{"messages":[{"role":"user","content":[{"type":"text","text":"a	b"}]}]}`, "a control character inside a string must be escaped", "messages[0].content[0].text", 63)
	f(t, `{"messages":[{"role":"user"},{"role":"user","content":"a`+"\x01"+`"}]}`, "a control character inside a string must be escaped", "messages[1].content", 56)
	f(t, `{"tools":[{"b":1,"a":[}]}`, "expected a value", "tools[0].a[0]", 22)
	f(t, `{"model":7}`, "model must be a string", "model", 9)
	f(t, `{"model":"m","model":["m"],"stream":true}`, "model must be a string", "model", 21)
	f(t, `{"model":{"id":"m"}}`, "model must be a string", "model", 9)
	f(t, `{"a b":{"`+"\x7f"+`":[tru]}}`, "expected true", `a b."\x7f"[0]`, 13)
	f(t, `{"`+strings.Repeat("k", 300)+`":{"a":!}}`, "expected a value", `"`+strings.Repeat("k", 200)+`"...`, 309)
	deep := strings.Repeat("[", maxDepth)
	f(t, `{"a":`+deep, "objects and arrays are nested deeper than 512 levels", "a"+strings.Repeat("[0]", 67)+"...", 5+maxDepth-1)
}

func TestParseAcceptsWhatPythonDoes(t *testing.T) {
	f := func(t *testing.T, body string) {
		t.Helper()
		r := Request{API: APIChat, Body: []byte(body)}
		if err := r.Parse(); err != nil {
			t.Errorf("Parse(%q): error %v, want none", body, err)
		}
	}
	f(t, `{}`)
	f(t, " \t\r\n{ } \n")
	f(t, `{"a":NaN,"b":[Infinity,-Infinity],"c":-0,"d":1E+5,"e":0.5e-1}`)
	f(t, `{"a":"\ud800","b":"\udc00\ud800","c":"`+"\xff\xc0"+`","d":"`+"\x7f"+`"}`)
	f(t, `{"":"","a":{"":[]}}`)
	f(t, `{"model":null}`)
	f(t, `{"model":1,"model":"last"}`)
	f(t, `{"a":1e999,"b":`+strings.Repeat("9", 5000)+`}`)
	f(t, `{"a":`+strings.Repeat("[", maxDepth-1)+strings.Repeat("]", maxDepth-1)+`}`)
	f(t, `{"a":`+strings.Repeat(`{"b":`, maxDepth-1)+"1"+strings.Repeat("}", maxDepth-1)+`}`)
}

// randomString makes the inside of a JSON string, well formed but full of
// escapes, surrogates and bytes that are no UTF-8.
func randomString(rng *rand.Rand, n int) []byte {
	var b []byte
	for range n {
		switch rng.IntN(14) {
		case 0:
			b = append(b, '\\', `"\/bfnrt`[rng.IntN(8)])
		case 1:
			b = fmt.Appendf(b, `\u%04x`, rng.IntN(0x10000))
		case 2:
			b = fmt.Appendf(b, `\u%04X`, rng.IntN(0x100))
		case 3:
			b = fmt.Appendf(b, `\u%04x\u%04X`, 0xd800+rng.IntN(0x800), 0xd800+rng.IntN(0x800))
		case 4:
			b = append(b, byte(0x80+rng.IntN(0x80)))
		case 5:
			b = append(b, string(rune(0x80+rng.IntN(0x11000)))...)
		case 6:
			const mixed = "漢字かな交じり\u2028\u2029\ufffd🙂é"
			b = append(b, mixed[rng.IntN(len(mixed)):]...)
		case 7:
			b = append(b, `<>&'/=`[rng.IntN(6)])
		case 8:
			b = append(b, bytes.Repeat([]byte("plain text "), rng.IntN(4))...)
		case 9:
			b = append(b, 0x7f)
		default:
			c := byte(' ' + rng.IntN(0x5f))
			if c == '"' || c == '\\' {
				c = 'x'
			}
			b = append(b, c)
		}
	}
	return b
}

// TestStringsMatchEncodingJSON compares the value and the quoted form of strings
// with encoding/json, at every offset to the 8 bytes of the scanner's words.
func TestStringsMatchEncodingJSON(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 3))
	for n := range 8000 {
		inside := randomString(rng, rng.IntN(40))
		doc := append(append(bytes.Repeat([]byte{' '}, n%8), '"'), inside...)
		doc = append(doc, '"')
		if n%2 == 0 {
			doc = append(doc, "   "...)
		}
		var want string
		if err := json.Unmarshal(doc, &want); err != nil {
			t.Fatalf("json.Unmarshal(%q): %v, want no error", doc, err)
		}
		start := n%8 + 1
		out, end := appendString([]byte("kept:"), doc, start)
		if got := string(out); got != "kept:"+want || end != start+len(inside)+1 {
			t.Fatalf("appendString(%q) = %q, %d, want %q, %d", doc, got, end, "kept:"+want, start+len(inside)+1)
		}
		end, plain := scanString(doc, start)
		if wantPlain := want == string(inside) && isASCII(inside); end != start+len(inside)+1 || plain != wantPlain {
			t.Fatalf("scanString(%q) = %d, %v, want %d, %v", doc, end, plain, start+len(inside)+1, wantPlain)
		}
		quoted, err := json.Marshal(want)
		if err != nil {
			t.Fatalf("json.Marshal(%q): %v, want no error", want, err)
		}
		s := scanner{b: doc}
		if end := s.quoted(start - 1); !bytes.Equal(s.out, quoted) || end != start+len(inside)+1 {
			t.Fatalf("quoted(%q) = %q, %d, want %q, %d", doc, s.out, end, quoted, start+len(inside)+1)
		}
		var compact bytes.Buffer
		raw, err := json.Marshal(json.RawMessage(doc))
		if err != nil {
			t.Fatalf("json.Marshal(RawMessage(%q)): %v, want no error", doc, err)
		}
		compact.Write(raw)
		s = scanner{b: doc}
		if s.compacted(0, len(doc)); !bytes.Equal(s.out, compact.Bytes()) {
			t.Fatalf("compacted(%q) = %q, want %q", doc, s.out, compact.Bytes())
		}
	}
}

func isASCII(b []byte) bool {
	for _, c := range b {
		if c >= 0x80 {
			return false
		}
	}
	return true
}

// TestBrokenStrings breaks strings in every place: both scanners must agree that
// they are broken.
func TestBrokenStrings(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	refused := 0
	for range 8000 {
		doc := append(append([]byte{'"'}, randomString(rng, 1+rng.IntN(30))...), '"', ' ')
		switch at := 1 + rng.IntN(len(doc)-1); rng.IntN(4) {
		case 0:
			doc[at] = byte(rng.IntN(32))
		case 1:
			doc[at] = '\\'
		case 2:
			doc = doc[:at]
		default:
			doc[at] = byte(rng.IntN(256))
		}
		// The first string of the document is judged; json needs it alone.
		end, _ := scanString(doc, 1)
		_, end2 := appendString(nil, doc, 1)
		if end != end2 {
			t.Fatalf("scanString(%q) ends at %d, appendString at %d, want the same", doc, end, end2)
		}
		valid := end >= 0 && json.Valid(doc[:end])
		if end < 0 {
			refused++
			for cut := 2; cut <= len(doc); cut++ {
				if json.Valid(doc[:cut]) {
					t.Fatalf("%q is refused, want it accepted up to %d", doc, cut)
				}
			}
			s := scanner{b: doc}
			if got := s.skip(0); got != -1 || s.err == nil || s.err.Offset > len(doc) {
				t.Fatalf("skip(%q) = %d, %v, want -1 and an error with its place", doc, got, s.err)
			}
		} else if !valid {
			t.Fatalf("%q is accepted, want it refused", doc[:end])
		}
	}
	if refused < 500 {
		t.Errorf("%d strings were refused, want at least 500", refused)
	}
}
