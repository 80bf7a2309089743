package routing

import (
	"slices"
	"strings"
	"testing"
)

// markEngine caches prompts of tokens of two bytes each, in blocks of 32 tokens.
type markEngine struct{ held []string }

const markBlock = 32

// ask serves a prompt and returns its tokens and those that were cached.
func (m *markEngine) ask(prompt, answer string) (tokens, cached int64) {
	tokens = int64(len(prompt) / 2)
	for _, h := range m.held {
		n := 0
		for n < min(len(h), len(prompt)) && h[n] == prompt[n] {
			n++
		}
		cached = max(cached, int64(n/2/markBlock*markBlock))
	}
	m.held = append(m.held, prompt+answer[:max(0, len(answer)-2)])
	return tokens, min(cached, (tokens-1)/markBlock*markBlock)
}

// letters returns n bytes that are nobody else's.
func letters(id byte, n int) string {
	return strings.Repeat(string([]byte{id, '.', '-', '='}), n/4+1)[:n]
}

// TestMarks: what prompts have in common is predicted in the engine's blocks, though
// the index knows it in blocks of 256 bytes, 128 tokens of this engine.
func TestMarks(t *testing.T) {
	type turn struct{ prompt, answer string }
	f := func(t *testing.T, name string, params string, told bool, turns []turn, want []int64) {
		t.Helper()
		clock := newTestClock()
		fleet := readyFleet(t, clock, "a")
		m := observed(0, 0, 0)
		if told {
			m.BlockTokens = markBlock
		}
		fleet.Endpoints()[0].Observe(m, clock.now())
		r := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n"+params)
		for range 20_000 {
			fleet.ratioOf([]byte("m")).learn(200, 100) // so that prompts are thought to have the tokens that they have
		}
		engine := &markEngine{}
		var got []int64
		for _, turn := range turns {
			if turn.prompt == "" { // a restart
				engine.held = nil
				continue
			}
			req := &Request{Weight: 1, Model: []byte("m"), Tokens: []byte(turn.prompt)}
			req.Ends = []int{len(req.Tokens)}
			l, err := r.Route(req)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, l.PredictedTokens())
			l.Output = int64(len(turn.answer) / 2)
			l.Usage(engine.ask(turn.prompt, turn.answer))
			l.Done(Completed)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: got %d tokens predicted, want %d", name, got, want)
		}
	}
	system, a1, a2 := letters('s', 1400), letters('a', 360), letters('b', 120) // 700, 180 and 60 tokens
	q := func(id byte) string { return letters(id, 200) }
	// 1600 bytes are 6 whole blocks; the answer makes 980 tokens of it, 960 in whole blocks of the engine.
	chat := []turn{{system + q('1'), a1}, {system + q('1') + a1 + q('2'), a2}, {system + q('1') + a1 + q('2') + a2 + q('3'), ""}}
	f(t, "a conversation", "", true, chat, []int64{0, 960, 1120})
	f(t, "of an engine that does not tell its blocks", "", false, chat, []int64{0, 768, 1024})
	f(t, "questions about a document", "", true, []turn{{system + q('1'), a2}, {system + q('2'), a2}, {system + q('3'), a2}, {system + q('4'), a2}},
		[]int64{0, 640, 672, 672})
	f(t, "the same again", "", true, []turn{{system + q('1'), a2}, {system + q('1'), a2}}, []int64{0, 768})
	f(t, "shorter than a block", "", true, []turn{{q('1')[:60], a2}, {q('1')[:60], a2}}, []int64{0, 0})
	f(t, "what the replica has lost teaches nothing", "", true, []turn{{system + q('1'), a2}, {system + q('2'), a2}, {}, {system + q('3'), a2}, {system + q('4'), a2}},
		[]int64{0, 640, 672, 672})
}
