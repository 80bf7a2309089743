package fakevllm

import (
	"bytes"
	"encoding/json"
	"testing"
	"unicode/utf8"
)

func TestEachField(t *testing.T) {
	f := func(doc string, want ...string) { // key, value, key, value
		t.Helper()
		var got []string
		eachField([]byte(doc), func(key, value []byte) { got = append(got, string(key), string(value)) })
		if len(got) != len(want) {
			t.Fatalf("%s: got %q, want %q", doc, got, want)
		}
		for i := range got {
			if got[i] != want[i] {
				t.Errorf("%s: got %q, want %q", doc, got, want)
			}
		}
	}
	f(`{}`)
	f(`[]`)
	f(``)
	f(` { "a" : 1 , "b":"x,}\"]" ,"c":{"d":[1,"}"]},"e":[{}],"f":null}`, "a", "1", "b", `"x,}\"]"`, "c", `{"d":[1,"}"]}`, "e", `[{}]`, "f", "null")
	f(`{"a":1}`, "a", "1")
	f(`{"m\u006fdel":"x","":"\\"}`, "model", `"x"`, "", `"\\"`)
	f(`{"a":"open`, "a", `"open`)
	f(`{"a`, "", "")
}

// FuzzEachField compares the walk over an object with encoding/json's reading
// of it, and must survive what is no JSON.
func FuzzEachField(f *testing.F) {
	for _, doc := range []string{`{}`, `{"a":1,"b":[{"c":"}"}],"a":"\\\""}`, "{\"\\u0061\" : {} ,\n\"\":-1e9}", `{"a`, `{"a":"`, `{"a":]}`} {
		f.Add([]byte(doc))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		got := map[string]json.RawMessage{}
		eachField(doc, func(key, value []byte) { got[string(key)] = value })
		var want map[string]json.RawMessage
		if json.Unmarshal(doc, &want) != nil || want == nil || !utf8.Valid(doc) {
			return
		}
		if len(got) != len(want) {
			t.Fatalf("got %d fields, want %d in %q", len(got), len(want), doc)
		}
		for k, v := range want {
			if !bytes.Equal(got[k], v) {
				t.Fatalf("%q: got %q, want %q in %q", k, got[k], v, doc)
			}
		}
	})
}

func TestAppendString(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		got := appendString(nil, in)
		var back string
		if err := json.Unmarshal(got, &back); err != nil || back != want {
			t.Errorf("%q: got %s, %v, %q, want %q", in, got, err, back, want)
		}
	}
	f("plain", "plain")
	f("a\"b\\c\nd\te\x00\x1f", "a\"b\\c\nd\te\x00\x1f")
	f("grün 😀 \u2028", "grün 😀 \u2028")
	f("bad\xff", "bad\uFFFD")
}
