package routing

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"kvgate/kvindex"
)

// headTurn is a body's messages and what else is in it.
type headTurn struct {
	messages []json.RawMessage
	before   string // fields in front of the messages
	behind   string
}

func (h headTurn) body() []byte {
	list, _ := json.Marshal(h.messages) // of raw JSON it never fails
	return fmt.Appendf(nil, `{%s"messages": %s%s}`, h.before, list, h.behind)
}

// nextTurns makes bodies of conversations that go on, branch, change their last message,
// start again with other fields, or come again.
func nextTurns(r *rand.Rand, n int) [][]byte {
	words := []string{"word", " ", "  ", "\n", "é", "漢字", "😀", "\u0301", "<|end|>", "<|begin|>", "<s>", "<turn>", "[INST]", "</think>", "x\"y\\", "12345", "\xff", "\xe6\xbc", " word word"}
	text := func() string {
		var b strings.Builder
		for range r.IntN(120) {
			b.WriteString(words[r.IntN(len(words))])
		}
		return b.String()
	}
	message := func(i int) json.RawMessage {
		role := []string{"user", "assistant"}[i%2]
		if r.IntN(20) == 0 {
			role = []string{"system", "developer", "tool", "user"}[r.IntN(4)]
		}
		content, _ := json.Marshal(text())
		if r.IntN(3) == 0 { // as bytes that are no UTF-8 may come
			content = bytes.ReplaceAll(content, []byte(`\ufffd`), []byte("\xff"))
		}
		if r.IntN(6) == 0 {
			content = fmt.Appendf(nil, `[{"type":"text","text":%s},{"type":"text","text":"more"}]`, content)
		}
		more := ""
		if role == "assistant" && r.IntN(4) == 0 {
			more = `,"tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{\"a\": [1, \"b\"]}"}}]`
		}
		return fmt.Appendf(nil, `{"role":"%s","content":%s%s}`, role, content, more)
	}
	var all []headTurn
	var out [][]byte
	for range n {
		var h headTurn
		if len(all) > 0 && r.IntN(10) > 0 {
			h = all[len(all)-1-r.IntN(min(len(all), 4))]
			h.messages = slices.Clone(h.messages)
		}
		switch k := r.IntN(12); {
		case k == 0 && len(h.messages) > 1:
			h.messages = h.messages[:1+r.IntN(len(h.messages)-1)]
		case k == 1 && len(h.messages) > 0:
			h.messages[len(h.messages)-1] = message(len(h.messages) - 1)
		case k == 2 && len(h.messages) > 0:
			i := r.IntN(len(h.messages))
			h.messages[i] = message(i)
		case k == 3:
			h.behind = []string{`, "add_generation_prompt": false`, `, "add_special_tokens": true`, `, "tools": [{"function": {"name": "f"}}]`, `, "documents": [{"title": "t", "text": "x"}]`, ""}[r.IntN(5)]
		case k == 4:
			h.before = []string{`"model": "m", `, `"messages": [], `, `"temperature": 0.5, `, ""}[r.IntN(4)]
		}
		for range 1 + r.IntN(3) {
			h.messages = append(h.messages, message(len(h.messages)))
		}
		all = append(all, h)
		out = append(out, h.body())
	}
	return out
}

// headTokens are a body's tokens and keys as one tokenizer makes them.
type headTokens struct {
	source TokenSource
	tokens []byte
	keys   []uint64
}

func tokensOfBody(t *testing.T, tk *localTokenizer, p *preciseProducer, r *Request, body []byte, salt string) headTokens {
	t.Helper()
	r.Reset()
	r.API, r.Body = APIChat, slices.Clone(body)
	if err := r.Parse(); err != nil {
		t.Error(err)
		return headTokens{}
	}
	tk.Tokenize(r)
	if salt != "" {
		r.Salt = []byte(salt)
	}
	var ch chain
	ch.reset()
	p.Prepare(r, &ch)
	out := headTokens{r.Source, slices.Clone(r.Tokens), slices.Clone(ch.hashes)}
	for i := range r.Body { // what is remembered is a copy
		r.Body[i] = 'x'
	}
	return out
}

// TestKnownHeadsChangeNoToken: of conversations that go on, branch and change, tokens and
// keys are those that a tokenizer makes that remembers nothing, whoever asks meanwhile.
func TestKnownHeadsChangeNoToken(t *testing.T) {
	keys, err := kvindex.NewKeys(kvindex.XXH64, "", 16)
	if err != nil {
		t.Fatal(err)
	}
	p := &preciseProducer{index: &preciseIndex{keys: keys}}
	f := func(dir string, seed uint64) {
		plain, known := benchLocal(t, tokenizerSamples+"/"+dir), benchLocal(t, tokenizerSamples+"/"+dir)
		bodies := nextTurns(rand.New(rand.NewPCG(seed, 1)), 120)
		want := make([]headTokens, len(bodies))
		var r Request
		for i, b := range bodies {
			plain.heads = &conversations{}
			want[i] = tokensOfBody(t, plain, p, &r, b, []string{"", "s"}[i/7%2])
		}
		var all sync.WaitGroup
		for k := range 3 {
			all.Go(func() {
				var r Request
				for i, b := range bodies {
					if k > 0 && (i+k)%3 == 0 {
						continue
					}
					got := tokensOfBody(t, known, p, &r, b, []string{"", "s"}[i/7%2])
					if got.source != want[i].source || !bytes.Equal(got.tokens, want[i].tokens) || !slices.Equal(got.keys, want[i].keys) {
						t.Errorf("%s, seed %d, body %d: got %s, %d tokens and %d keys, want %s, %d and %d, or they differ", dir, seed, i,
							got.source, len(got.tokens)/4, len(got.keys), want[i].source, len(want[i].tokens)/4, len(want[i].keys))
						return
					}
				}
			})
		}
		all.Wait()
	}
	for seed := range uint64(4) {
		f("cl100k", seed)
		f("spm", seed)
		f("gemma", seed)
	}
}

// TestKnownHeadIsUsed: of the next turn only what is new is read and tokenized.
func TestKnownHeadIsUsed(t *testing.T) {
	tk := benchLocal(t, tokenizerSamples+"/cl100k")
	var r Request
	run := func(turns int) headReader {
		r.Reset()
		r.API, r.Body = APIChat, turnsBody(t, 20_000, turns)
		if err := r.Parse(); err != nil {
			t.Fatal(err)
		}
		var w localWorker
		w.bpe = newBPEWorker(1)
		w.run.limits = tk.limits
		if err := tk.encodeBody(&w, r.API, r.Body); err != nil {
			t.Fatal(err)
		}
		return w.head
	}
	first, second, third := run(0), run(2), run(4)
	if first.known != nil || first.learned == nil {
		t.Fatalf("first turn: got known %v, learned %v, want none and one", first.known, first.learned)
	}
	if second.known != first.learned || second.count != len(first.ends) || int(second.cut.tokens)*10 < len(first.learned.tokens)*9 {
		t.Errorf("second turn: got %d messages and %d bytes of tokens known, want %d and about %d", second.count, second.cut.tokens, len(first.ends), len(first.learned.tokens))
	}
	if third.known != second.learned || &third.learned.body[0] != &second.learned.body[0] && cap(second.learned.body) > len(third.learned.body) {
		t.Error("third turn: the second's memory was copied")
	}
	if got := run(4); got.learned != nil || got.count != len(first.ends)+4 {
		t.Errorf("the same again: got learned %v, %d messages known, want none and %d", got.learned, got.count, len(first.ends)+4)
	}
}

// TestConversationsAreBounded in bytes and number, and the oldest go.
func TestConversationsAreBounded(t *testing.T) {
	m := &conversations{}
	f := func(n int, size int64) {
		for i := range n {
			m.put(&knownChat{tag: uint64(i) * 0x9e3779b97f4a7c15, size: size}, nil)
		}
		count, bytes := 0, int64(0)
		for _, set := range m.sets {
			for _, c := range set {
				if c != nil {
					count++
					bytes += c.size
				}
			}
		}
		if bytes != m.bytes || bytes > headBytes || count == 0 {
			t.Errorf("%d of %d bytes: got %d of %d bytes, want what is counted, %d, and at most %d", n, size, count, bytes, m.bytes, headBytes)
		}
	}
	f(10_000, 1<<10)
	f(100, headBytes/8)
	last := m.tick
	if m.put(&knownChat{size: headBytes/8 + 1}, nil); m.tick != last {
		t.Error("one that is too large: got it remembered")
	}
}
