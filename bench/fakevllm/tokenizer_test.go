package fakevllm

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

func TestTokenizer(t *testing.T) {
	f := func(text string, want ...uint32) {
		t.Helper()
		got := appendText(nil, text)
		if !slices.Equal(got, want) || detokenize(got) != text {
			t.Errorf("%q: got %x and back %q, want %x", text, got, detokenize(got), want)
		}
	}
	f("")
	f("a", 0x61)
	f("abcd", 0x64636261)
	f("abcde", 0x64636261, 0x65)
	f("😀", 0x80989ff0)
	for m, name := range markerNames {
		if got := detokenize([]uint32{marker(m).token()}); got != name {
			t.Errorf("marker %d: got %q, want %q", m, got, name)
		}
	}
	if got := detokenize([]uint32{0xffff, 0x61}); got != "\uFFFDa" {
		t.Errorf("unknown marker: got %q", got)
	}
}

func TestRender(t *testing.T) {
	f := func(tools, messages string, prompt bool, want string) {
		t.Helper()
		var turns []turn
		if err := json.Unmarshal([]byte(messages), &turns); err != nil {
			t.Fatal(err)
		}
		if got := detokenize(render(json.RawMessage(tools), turns, prompt)); got != want {
			t.Errorf("%s %s:\ngot  %q\nwant %q", tools, messages, got, want)
		}
	}
	f("", `[{"role":"system","content":"S"},{"role":"user","content":"U"},{"role":"assistant","content":"A"},{"role":"tool","content":"T"},{"role":"critic","content":"C"}]`, true,
		"<|system|>S<|end|><|user|>U<|end|><|assistant|>A<|end|><|tool|>T<|end|><|role|>criticC<|end|><|assistant|>")
	f(`[{"type":"function"}]`, `[{"role":"developer","content":"D"}]`, true, `<|tools|>[{"type":"function"}]<|end|><|system|>D<|end|><|assistant|>`)
	f("[]", `[{"role":"user","content":"U"}]`, false, "<|user|>U")
	f("null", `[{"role":"assistant","content":null,"tool_calls":[{"id":"1"}]}]`, true, `<|assistant|>[{"id":"1"}]<|end|><|assistant|>`)
	f("", `[{"role":"user","content":[{"type":"text","text":"a"},{"type":"input_text","text":"b"},"c",{"text":"d"}]}]`, true, "<|user|>abcd<|end|><|assistant|>")
	f("", `[{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header: 1"},{"type":"text","text":"S"}]}]`, true, "<|system|>S<|end|><|assistant|>")
	f("", `[{"role":"user","content":7}]`, true, "<|user|>7<|end|><|assistant|>")
	f("", `[{"type":"function_call","name":"f"}]`, false, `<|role|>{"type":"function_call","name":"f"}`)

	image := func(url string) []uint32 {
		return render(nil, []turn{{Role: "user", Content: json.RawMessage(`[{"type":"image_url","image_url":{"url":"` + url + `"}}]`)}}, true)
	}
	a, b := image("data:a"), image("data:b")
	if len(a) != len(b) || len(a) != 12 || slices.Equal(a, b) || !slices.Equal(a, image("data:a")) {
		t.Errorf("images: got %x and %x, want twelve tokens that depend on the image", a, b)
	}
}

func TestBlockHashes(t *testing.T) {
	tokens := appendText(nil, strings.Repeat("abcd", 10))
	full, all := blockHashes(nil, chainSeed("", ""), tokens, 4)
	if len(full) != 2 || slices.Contains(full, all) {
		t.Errorf("got %d blocks, want 2 and another hash for all", len(full))
	}
	if full[0] == full[1] {
		t.Error("equal tokens at other places: got the same hash, want chained ones")
	}
	longer, _ := blockHashes(nil, chainSeed("", ""), append(tokens, 1, 2), 4)
	if len(longer) != 3 || !slices.Equal(longer[:2], full) {
		t.Errorf("a longer prompt: got %x, want %x and one more", longer, full)
	}
	seeds := []uint64{chainSeed("", ""), chainSeed("x", ""), chainSeed("", "x"), chainSeed("ab", "c"), chainSeed("a", "bc")}
	slices.Sort(seeds)
	if n := len(slices.Compact(seeds)); n != 5 {
		t.Errorf("seeds: got %d different, want 5", n)
	}
}

func TestAnswerToken(t *testing.T) {
	for i := range 2000 {
		for seed := range uint64(3) {
			word := string(appendTokenText(nil, answerToken(seed, i, false)))
			if len(word) != 4 || (word[0] == ' ') != (i > 0) || strings.ContainsAny(word, "\"\\") || strings.TrimRight(word, " ") != word {
				t.Fatalf("token %d: got %q, want four plain bytes", i, word)
			}
			if emoji := string(appendTokenText(nil, answerToken(seed, i, true))); len(emoji) != 4 || len([]rune(emoji)) != 1 {
				t.Fatalf("token %d: got %q, want one character of four bytes", i, emoji)
			}
		}
	}
}
