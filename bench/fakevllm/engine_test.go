package fakevllm

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// testModel has round numbers: 1 ms per prompt token and decode, 0.1 ms per
// context token, 2 ms + at least 10 ms per step, 8 tokens per step, 3 sequences,
// 12 blocks of 4.
func testModel() Model {
	return Model{
		Prefill: 1e-3, Base: 2e-3, Floor: 10e-3, Decode: 1e-3, Context: 1e-4,
		Budget: 8, MaxSeqs: 3, Blocks: 12, BlockTokens: 4, Speed: 1,
	}
}

// chain turns "abc" into the hashes of three blocks: a letter names a block
// together with all letters before it.
func chain(letters string) []uint64 {
	var out []uint64
	h := uint64(0)
	for _, c := range letters {
		h = h<<8 | uint64(c)
		out = append(out, h)
	}
	return out
}

func unchain(h uint64) (s string) {
	for ; h > 0; h >>= 8 {
		s = string(rune(h&255)) + s
	}
	return s
}

// script takes an engine through commands, one per line, and returns what every
// step brought:
//
//	add NAME PROMPT OUTPUT [LETTERS]   queue a sequence whose blocks LETTERS name
//	abort NAME
//	step                               one whole step
//	begin, end                         its halves
func script(t *testing.T, e *Engine, commands string) []string {
	t.Helper()
	var out []string
	ids, names := map[string]ID{}, map[ID]string{}
	var took time.Duration
	begin := func() bool {
		d, ok := e.Begin()
		if took = d; !ok {
			out = append(out, "idle")
		}
		return ok
	}
	end := func() {
		r := e.End()
		line := fmt.Sprintf("%v %d", took, r.Tokens)
		for _, h := range r.Evicted {
			line += " -" + unchain(h)
		}
		for _, st := range r.Stored {
			line += fmt.Sprintf(" +%s[%d:%d]", names[st.ID], st.From, st.To)
		}
		for _, f := range r.First {
			line += fmt.Sprintf(" first=%s(%d,%d)", names[f.ID], f.Cached, f.Created)
		}
		for _, id := range r.Finished {
			line += " done=" + names[id]
		}
		s := e.Stats()
		out = append(out, line+fmt.Sprintf(" | %d %d %d", s.Running, s.Waiting, s.UsedBlocks))
	}
	for line := range strings.SplitSeq(commands, ";") {
		var cmd, name, letters string
		var prompt, output int
		n, _ := fmt.Sscan(line, &cmd, &name, &prompt, &output, &letters)
		switch {
		case cmd == "add" && n >= 4:
			id, err := e.Add(Sequence{Hashes: chain(letters), PromptTokens: prompt, OutputTokens: output})
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			ids[name], names[id] = id, name
		case cmd == "abort":
			e.Abort(ids[name])
		case cmd == "step":
			if begin() {
				end()
			}
		case cmd == "begin":
			begin()
		case cmd == "end":
			end()
		default:
			t.Fatalf("bad command %q", line)
		}
	}
	return out
}

// Every step is: duration, tokens, -evicted, +stored, first=NAME(cached,created),
// done=NAME | running waiting used blocks.
func TestEngineSchedule(t *testing.T) {
	f := func(name, commands string, want ...string) {
		t.Helper()
		e := NewEngine(testModel())
		e.TrackBlocks(true)
		if got := script(t, e, commands); !slices.Equal(got, want) {
			t.Errorf("%s:\ngot  %s\nwant %s", name, strings.Join(got, "\n     "), strings.Join(want, "\n     "))
		}
	}
	f("nothing to do", "step", "idle")

	// Step 1 computes 6 tokens: 2 + max(10, 6) ms. Steps 2 and 3 read 7 and 8 tokens of context.
	f("one sequence", "add A 6 3; step; step; step; step",
		"12ms 6 first=A(0,0) | 1 0 3",
		"12.7ms 1 | 1 0 3",
		"12.8ms 1 done=A | 0 0 0",
		"idle")
	f("one output token ends with the prefill", "add A 5 1 a; step; step",
		"12ms 5 +A[0:1] first=A(0,4) done=A | 0 0 0",
		"idle")
	f("no output token: pooling", "add A 8 0 ab; step; step",
		"12ms 8 +A[0:2] first=A(0,8) done=A | 0 0 0",
		"idle")

	// A decodes first, B gets the 7 tokens that are left: 2 + max(10, 7 + 1) ms, and 0.7 ms of context.
	f("chunks leave room for decodes", "add A 6 4; step; add B 16 2 abcd; step; step; step; step; step",
		"12ms 6 first=A(0,0) | 1 0 3",
		"12.7ms 8 +B[0:1] | 2 0 8",
		"12.8ms 8 +B[1:3] | 2 0 8",
		"12.9ms 3 +B[3:4] first=B(0,16) done=A | 1 0 5",
		"13.7ms 1 done=B | 0 0 0",
		"idle")
	f("three prompts share a step", "add A 3 1; add B 3 1; add C 4 1; step; step",
		"12ms 8 first=A(0,0) first=B(0,0) done=A done=B | 1 0 2",
		"12ms 2 first=C(0,0) done=C | 0 0 0")
	f("first come first served, three at a time", "add A 2 3; add B 1 2; add C 1 2; add D 1 1; step; step; step",
		"12ms 4 first=A(0,0) first=B(0,0) first=C(0,0) | 3 1 4",
		"12.7ms 3 done=B done=C | 1 1 2",
		"12.4ms 2 first=D(0,0) done=D done=A | 0 0 0")

	// B does not fit beside A (8 + 6 > 12 blocks) and holds up C, which would.
	f("admission when prompt and output fit", "add A 8 24; add B 4 20; add C 2 1; step; step; abort A; step",
		"12ms 8 first=A(0,0) | 1 2 8",
		"12.9ms 1 | 1 2 8",
		"12ms 6 first=B(0,0) first=C(0,0) done=C | 1 0 6")
	f("the head of the queue leaves", "add A 8 24; add B 4 20; add C 2 1; step; step; abort B; step",
		"12ms 8 first=A(0,0) | 1 2 8",
		"12.9ms 1 | 1 2 8",
		"13ms 3 first=C(0,0) done=C | 1 0 8")
	f("all leave the queue", "add A 8 24; add B 4 20; step; abort B; abort A; step",
		"12ms 8 first=A(0,0) | 1 1 8",
		"idle")
}

func TestEngineCache(t *testing.T) {
	f := func(name, commands string, want ...string) {
		t.Helper()
		e := NewEngine(testModel())
		e.TrackBlocks(true)
		if got := script(t, e, commands); !slices.Equal(got, want) {
			t.Errorf("%s:\ngot  %s\nwant %s", name, strings.Join(got, "\n     "), strings.Join(want, "\n     "))
		}
	}
	// Of a prompt that is cached whole, the last block is computed again: its last token's output is needed.
	f("hits stop before the last token", "add A 8 1 ab; step; add B 8 1 ab; step; add C 9 1 ab; step; add D 8 1 ac; step",
		"12ms 8 +A[0:2] first=A(0,8) done=A | 0 0 0",
		"12ms 4 +B[1:2] first=B(4,4) done=B | 0 0 0",
		"12ms 1 first=C(8,0) done=C | 0 0 0",
		"12ms 4 +D[1:2] first=D(4,4) done=D | 0 0 0")
	// A, D and G have used all 12 blocks and left one of them without a name. A finds two and takes two: that
	// one first, then the tail of the oldest prompt, its own.
	f("the tail of the oldest goes first", "add A 12 1 abc; step; step; add D 12 1 def; step; step; add G 20 1 ghijk; step; step; step; add A 12 1 abc; step",
		"12ms 8 +A[0:2] | 1 0 4",
		"12ms 4 +A[2:3] first=A(0,12) done=A | 0 0 0",
		"12ms 8 +D[0:2] | 1 0 4",
		"12ms 4 +D[2:3] first=D(0,12) done=D | 0 0 0",
		"12ms 8 +G[0:2] | 1 0 6",
		"12ms 8 +G[2:4] | 1 0 6",
		"12ms 4 +G[4:5] first=G(0,20) done=G | 0 0 0",
		"12ms 4 -abc +A[2:3] first=A(8,4) done=A | 0 0 0")
	// Both hold block a, so that the end of one leaves it in use: 3 + 3 - 1 blocks, then 3.
	f("shared blocks are counted once", "add A 8 3 ab; step; add B 8 9 ac; step; step; step",
		"12ms 8 +A[0:2] first=A(0,8) | 1 0 3",
		"12.9ms 5 +B[1:2] first=B(4,4) | 2 0 7",
		"13.9ms 2 done=A | 1 0 5",
		"13ms 1 | 1 0 5")
	// A and B compute the same block side by side, so that there are two of it. C needs 11 of the 12 blocks
	// and evicts the older; D finds the other.
	f("a hash may have two blocks", "add A 4 1 a; add B 4 1 a; step; add C 40 1; step; abort C; add D 5 1 a; step",
		"12ms 8 +A[0:1] +B[0:1] first=A(0,4) first=B(0,4) done=A done=B | 0 0 0",
		"12ms 8 -a | 1 0 11",
		"12ms 1 first=D(4,0) done=D | 0 0 0")
	// The answer's blocks are named as they fill: 6 prompt tokens and 2 decoded ones make block b, and
	// block c is full when the last but one token was fed back.
	f("the next turn finds the answer", "add A 6 7 abc; step; step; step; step; add B 13 1 abcd; step; step; step; step",
		"12ms 6 +A[0:1] first=A(0,4) | 1 0 4",
		"12.7ms 1 | 1 0 4",
		"12.8ms 1 +A[1:2] | 1 0 4",
		"12.9ms 1 | 1 0 4",
		"13ms 6 +B[2:3] first=B(8,4) done=B | 1 0 4",
		"13.1ms 1 | 1 0 4",
		"13.2ms 1 +A[2:3] done=A | 0 0 0",
		"idle")
	f("a prompt held by another", "add A 8 24 ab; add B 8 1 ab; step; begin; abort A; end; add C 9 1 ab; step",
		"12ms 8 +A[0:2] first=A(0,8) | 1 1 8",
		"12.9ms 5 +B[1:2] first=B(4,4) done=B | 0 0 0",
		"12ms 1 first=C(8,0) done=C | 0 0 0")
}

func TestEngineAbort(t *testing.T) {
	f := func(name, commands string, generated int64, want ...string) {
		t.Helper()
		e := NewEngine(testModel())
		e.TrackBlocks(true)
		if got := script(t, e, commands); !slices.Equal(got, want) {
			t.Errorf("%s:\ngot  %s\nwant %s", name, strings.Join(got, "\n     "), strings.Join(want, "\n     "))
		}
		if got := e.Stats(); got.GenerationTokens != generated || got.Running+got.Waiting+got.UsedBlocks != 0 {
			t.Errorf("%s: got %+v, want an empty engine and %d generated tokens", name, got, generated)
		}
	}
	f("in the queue", "add A 6 2; abort A; abort A; step", 0, "idle")
	f("in the queue during a step", "add A 8 2; begin; add B 8 2; abort B; end; step; step", 2,
		"12ms 8 first=A(0,0) | 1 0 3", "12.9ms 1 done=A | 0 0 0", "idle")
	f("queued before the step", "add A 8 2; add B 8 1; begin; abort B; end; step; step", 2,
		"12ms 8 first=A(0,0) | 1 0 3", "12.9ms 1 done=A | 0 0 0", "idle")
	// The blocks that the step computed stay in the cache.
	f("in the prefill", "add A 16 2 abcd; begin; abort A; abort A; end; step; add B 9 1 ab; step", 1,
		"12ms 8 +A[0:2] | 0 0 0", "idle", "12ms 1 first=B(8,0) done=B | 0 0 0")
	f("as the prefill ends", "add A 8 2; begin; abort A; end; step", 0, "12ms 8 | 0 0 0", "idle")
	f("while it decodes", "add A 8 9; step; begin; abort A; end; step", 1,
		"12ms 8 first=A(0,0) | 1 0 5", "12.9ms 1 | 0 0 0", "idle")
	f("as the last token comes", "add A 8 2; step; begin; abort A; end; step", 1,
		"12ms 8 first=A(0,0) | 1 0 3", "12.9ms 1 | 0 0 0", "idle")
	f("between steps, before the first chunk and behind it", "add A 16 2; step; abort A; step", 0,
		"12ms 8 | 1 0 5", "idle")
	f("between steps while it decodes", "add A 8 9; add B 8 9; step; step; abort A; step; step; abort B; step", 4,
		"12ms 8 first=A(0,0) | 1 1 5", "12.9ms 8 | 2 0 10", "12ms 1 first=B(0,0) | 1 0 5", "12.9ms 1 | 1 0 5", "idle")
	f("an unknown one", "abort A; add A 1 1; step", 1, "12ms 1 first=A(0,0) done=A | 0 0 0")
	f("when it has ended", "add A 8 1; step; add B 8 1; abort A; step", 2,
		"12ms 8 first=A(0,0) done=A | 0 0 0", "12ms 8 first=B(0,0) done=B | 0 0 0")
}

// TestEngineQueue has thousands come and go behind a head that does not fit.
func TestEngineQueue(t *testing.T) {
	e := NewEngine(testModel())
	script(t, e, "add A 8 30; add B 4 28; step; step")
	for range 5000 {
		id, err := e.Add(Sequence{PromptTokens: 1, OutputTokens: 1})
		if err != nil {
			t.Fatal(err)
		}
		e.Abort(id)
	}
	if n := len(e.waiting); n > 1100 {
		t.Errorf("queue: got %d entries for one live sequence", n)
	}
	for range 100 {
		if _, ok := e.Begin(); ok {
			e.End()
		}
	}
	if s := e.Stats(); s.GenerationTokens != 58 || s.Running != 0 {
		t.Errorf("got %+v, want both sequences done", s)
	}
}

func TestEngineStatsLag(t *testing.T) {
	e := NewEngine(testModel())
	f := func(when, commands string, running, waiting int, queries int64) {
		t.Helper()
		script(t, e, commands)
		if s := e.Stats(); s.Running != running || s.Waiting != waiting || s.QueryTokens != queries {
			t.Errorf("%s: got running %d, waiting %d, queries %d, want %d, %d, %d", when, s.Running, s.Waiting, s.QueryTokens, running, waiting, queries)
		}
	}
	f("the first step runs", "add A 8 3; begin", 0, 0, 0)
	f("arrivals during the step", "add B 8 2; add C 8 2", 0, 0, 0)
	f("its end does not know them", "end", 1, 0, 8)
	f("the next step runs", "begin", 1, 0, 8)
	f("its end knows both", "end", 2, 1, 16)
}

func TestEngineCost(t *testing.T) {
	f := func(name string, change func(*Model), from, to int, want time.Duration) {
		t.Helper()
		m := DefaultModel()
		change(&m)
		if got := m.PrefillTime(from, to); got != want {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
	f("linear", func(m *Model) { m.Attention = 0 }, 0, 10_000, 628*time.Millisecond)
	f("the token at 60k costs twice as much", func(*Model) {}, 59_999, 60_001, time.Duration(math.Round(2*2*62.8e3)))
	f("a whole prompt of 60k: half as much again", func(*Model) {}, 0, 60_000, 5652*time.Millisecond)
	f("half speed", func(m *Model) { m.Attention, m.Speed = 0, 0.5 }, 0, 10_000, 1256*time.Millisecond)
	f("nothing", func(*Model) {}, 7, 7, 0)
}

func TestEngineBacklog(t *testing.T) {
	e := NewEngine(testModel())
	f := func(when, commands string, want time.Duration) {
		t.Helper()
		script(t, e, commands)
		if got := e.Backlog(); got != want {
			t.Errorf("%s: got %v, want %v", when, got, want)
		}
	}
	f("idle", "step", 0)
	f("queued", "add A 20 1 abcde", 20*time.Millisecond)
	f("the step in progress does not count", "begin", 12*time.Millisecond)
	f("what the cache holds neither", "add B 12 1 abx; end", 12*time.Millisecond+4*time.Millisecond)
	if got, want := e.CachedTokens(chain("abcde"), 8), 4; got != want {
		t.Errorf("cached tokens of 8: got %d, want %d", got, want)
	}
	if got, want := e.CachedTokens(chain("abcde"), 20), 8; got != want {
		t.Errorf("cached tokens of 20: got %d, want %d", got, want)
	}
}

func TestEngineClearCache(t *testing.T) {
	e := NewEngine(testModel())
	script(t, e, "add A 8 2 ab; step")
	if e.ClearCache() {
		t.Error("cleared while a sequence holds blocks: got true, want false")
	}
	script(t, e, "step")
	if got, want := e.Stats().CachedBlocks, 2; got != want {
		t.Errorf("cached blocks: got %d, want %d", got, want)
	}
	if !e.ClearCache() {
		t.Error("idle: got false, want true")
	}
	if got := e.Stats().CachedBlocks + e.CachedTokens(chain("ab"), 9); got != 0 {
		t.Errorf("cached blocks and tokens behind it: got %d, want 0", got)
	}
}

func TestEngineErrors(t *testing.T) {
	e := NewEngine(testModel())
	f := func(s Sequence, want string) {
		t.Helper()
		if _, err := e.Add(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want %q", s, err, want)
		}
	}
	f(Sequence{PromptTokens: 0, OutputTokens: 1}, "at least 1 and 0")
	f(Sequence{PromptTokens: 1, OutputTokens: -1}, "at least 1 and 0")
	f(Sequence{PromptTokens: 40, OutputTokens: 9}, "13 blocks needed, 12 there")
	if _, err := e.Add(Sequence{PromptTokens: 49}); !errors.Is(err, ErrTooLong) {
		t.Errorf("got %v, want %v", err, ErrTooLong)
	}
	panics := func(name string, f func()) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("%s: got no panic, want one", name)
			}
		}()
		f()
	}
	panics("End first", func() { e.End() })
	script(t, e, "add A 1 1; begin")
	panics("Begin twice", func() { e.Begin() })
	panics("a bad model", func() { NewEngine(Model{}) })
}

func TestModelValidate(t *testing.T) {
	f := func(change func(*Model), want string) {
		t.Helper()
		m := DefaultModel()
		change(&m)
		err := m.Validate()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	f(func(*Model) {}, "")
	f(func(m *Model) { m.Prefill = -1 }, "prefill_s_per_token is -1")
	f(func(m *Model) { m.Attention = math.NaN() }, "attention_tokens is NaN")
	f(func(m *Model) { m.Floor = math.Inf(1) }, "floor_s is +Inf")
	f(func(m *Model) { m.Budget = 255 }, "max_num_batched_tokens is 255: use a number from 256")
	f(func(m *Model) { m.MaxSeqs = 0 }, "max_num_seqs is 0")
	f(func(m *Model) { m.Blocks = 0 }, "num_gpu_blocks is 0")
	f(func(m *Model) { m.BlockTokens = -1 }, "block_size is -1")
	f(func(m *Model) { m.Speed = 0 }, "speed is 0")
}

// naiveCache is the block cache in so many words: a list of blocks in the
// order of eviction, searched from end to end.
type naiveCache struct {
	free  []int
	ref   map[int]int
	names map[int]uint64
	named []int // in order of naming
}

func (c *naiveCache) find(h uint64) int {
	for _, b := range c.named {
		if c.names[b] == h {
			return b
		}
	}
	return -1
}

func (c *naiveCache) take(hashes []uint64, n int) (got []int, evicted []uint64) {
	free := slices.Clone(c.free)
	for _, h := range hashes {
		b := c.find(h)
		got = append(got, b)
		free = slices.DeleteFunc(free, func(x int) bool { return x == b })
	}
	if len(free) < n-len(hashes) {
		return nil, nil
	}
	for len(got) < n {
		b := free[0]
		free = free[1:]
		if h, ok := c.names[b]; ok {
			evicted = append(evicted, h)
			delete(c.names, b)
			c.named = slices.DeleteFunc(c.named, func(x int) bool { return x == b })
		}
		got = append(got, b)
	}
	for _, b := range got {
		c.ref[b]++
	}
	c.free = free
	return got, evicted
}

func (c *naiveCache) release(blocks []int) {
	for _, b := range blocks {
		c.ref[b]--
	}
	for _, b := range blocks {
		if _, named := c.names[b]; !named && c.ref[b] == 0 {
			c.free = append([]int{b}, c.free...)
		}
	}
	for _, b := range slices.Backward(blocks) {
		if _, named := c.names[b]; named && c.ref[b] == 0 {
			c.free = append(c.free, b)
		}
	}
}

func TestBlockCacheModel(t *testing.T) {
	const size, steps = 24, 30_000
	r := rand.New(rand.NewPCG(1, 2))
	c, want := newBlockCache(size), &naiveCache{ref: map[int]int{}, names: map[int]uint64{}}
	var evicted []uint64
	c.onEvict = func(h uint64) { evicted = append(evicted, h) }
	for i := range size {
		want.free = append(want.free, i)
	}
	type held struct {
		got    []int32
		hashes []uint64
		named  int
	}
	var open []held
	for step := range steps {
		switch op := r.IntN(10); {
		case op < 4: // a sequence: a random path in a small tree of prompts
			letters := make([]byte, 1+r.IntN(6))
			for i := range letters {
				letters[i] = "abc"[r.IntN(3)]
			}
			hashes := chain(string(letters))
			hits := 0
			for hits < len(hashes) && want.find(hashes[hits]) >= 0 {
				hits++
			}
			if got := c.prefix(hashes); got != hits {
				t.Fatalf("step %d: prefix of %s: got %d, want %d", step, letters, got, hits)
			}
			hits = r.IntN(hits + 1)
			n := max(1, len(hashes)+r.IntN(2))
			evicted = evicted[:0]
			got, ok := c.take(nil, hashes[:hits], n)
			wantBlocks, wantEvicted := want.take(hashes[:hits], n)
			if ok != (wantBlocks != nil) || !slices.Equal(evicted, wantEvicted) {
				t.Fatalf("step %d: take: got %v, evicted %v, want %v, %v", step, ok, evicted, wantBlocks != nil, wantEvicted)
			}
			for i, b := range got {
				if int(b) != wantBlocks[i] {
					t.Fatalf("step %d: take: got %v, want %v", step, got, wantBlocks)
				}
			}
			if ok {
				open = append(open, held{got: got, hashes: hashes, named: hits})
			}
		case op < 7 && len(open) > 0: // name the next block of a sequence
			h := &open[r.IntN(len(open))]
			if h.named < len(h.hashes) {
				b := h.got[h.named]
				c.name(b, h.hashes[h.named])
				want.names[int(b)] = h.hashes[h.named]
				want.named = append(want.named, int(b))
				h.named++
			}
		case op < 9 && len(open) > 0:
			i := r.IntN(len(open))
			c.release(open[i].got)
			var blocks []int
			for _, b := range open[i].got {
				blocks = append(blocks, int(b))
			}
			want.release(blocks)
			open = slices.Delete(open, i, i+1)
		case r.IntN(200) == 0:
			idle := len(want.free) == size
			if got := c.clear(); got != idle {
				t.Fatalf("step %d: clear: got %v, want %v", step, got, idle)
			}
			if idle {
				clear(want.names)
				want.named = nil
			}
		}
		if c.free != len(want.free) || c.cached != len(want.named) {
			t.Fatalf("step %d: got %d free, %d cached, want %d, %d", step, c.free, c.cached, len(want.free), len(want.named))
		}
	}
}

// TestEngineDeterminism runs the same random load twice and compares every
// answer, and checks what must hold after every step.
func TestEngineDeterminism(t *testing.T) {
	load := func() string {
		var log strings.Builder
		r := rand.New(rand.NewPCG(3, 4))
		m := testModel()
		m.Blocks, m.MaxSeqs = 40, 8
		e := NewEngine(m)
		e.TrackBlocks(true)
		var live []ID
		wanted := map[ID]Sequence{}
		for range 20_000 {
			switch r.IntN(4) {
			case 0, 1:
				letters := make([]byte, r.IntN(7))
				for i := range letters {
					letters[i] = "abcd"[r.IntN(4)]
				}
				s := Sequence{Hashes: chain(string(letters)), PromptTokens: 1 + r.IntN(30), OutputTokens: r.IntN(20)}
				if len(live) < 30 {
					id, err := e.Add(s)
					if err != nil {
						t.Fatal(err)
					}
					live, wanted[id] = append(live, id), s
				}
			case 2:
				if len(live) > 0 && r.IntN(4) == 0 {
					i := r.IntN(len(live))
					e.Abort(live[i])
					delete(wanted, live[i])
					live = slices.Delete(live, i, i+1)
				}
			case 3:
				d, ok := e.Begin()
				if !ok {
					if len(wanted) > 0 {
						t.Fatalf("idle with %d sequences", len(wanted))
					}
					continue
				}
				if r.IntN(8) == 0 && len(live) > 0 {
					e.Abort(live[0])
					delete(wanted, live[0])
					live = live[1:]
				}
				res := e.End()
				s := e.Stats()
				fmt.Fprintln(&log, d, *res, s)
				for _, id := range res.Finished {
					if _, ok := wanted[id]; !ok {
						t.Fatalf("%d finished twice or behind its abort", id)
					}
					delete(wanted, id)
					live = slices.DeleteFunc(live, func(x ID) bool { return x == id })
				}
				if s.Running > m.MaxSeqs || res.Tokens > m.Budget || s.UsedBlocks > m.Blocks || s.HitTokens > s.QueryTokens {
					t.Fatalf("limits: got %+v with %d tokens", s, res.Tokens)
				}
			}
		}
		for _, id := range live {
			e.Abort(id)
		}
		if _, ok := e.Begin(); ok || e.Stats().UsedBlocks != 0 || e.context != 0 || e.decodes != 0 {
			t.Fatalf("at the end: got %+v, context %d, decodes %d, want nothing", e.Stats(), e.context, e.decodes)
		}
		return log.String()
	}
	a, b := load(), load()
	if a != b {
		t.Error("two runs differ, want none")
	}
	if len(a) < 100_000 {
		t.Errorf("log of %d bytes, want a real load", len(a))
	}
}

// BenchmarkEngine is an hour of chat on eight replicas in simulated time: 24,000 requests
// of 12,000 prompt tokens, half of them shared, and 343 output tokens.
func BenchmarkEngine(b *testing.B) {
	m := DefaultModel()
	m.BlockTokens, m.Blocks = 512, 2000
	for b.Loop() {
		r := rand.New(rand.NewPCG(5, 6))
		var steps int64
		for range 8 {
			e := NewEngine(m)
			now, next := time.Duration(0), time.Duration(0)
			for n := 0; n < 3000; {
				for ; n < 3000 && next <= now; n++ {
					hashes := make([]uint64, 23)
					session := r.Uint64N(300)
					for i := range hashes {
						if hashes[i] = session<<8 | uint64(i); i > 11 {
							hashes[i] = r.Uint64()
						}
					}
					if _, err := e.Add(Sequence{Hashes: hashes, PromptTokens: 12_000, OutputTokens: 343}); err != nil {
						b.Fatal(err)
					}
					next += time.Duration(r.ExpFloat64() * 1.2e9)
				}
				d, ok := e.Begin()
				if !ok {
					now = next
					continue
				}
				now += d
				e.End()
			}
			steps += e.Stats().Steps
		}
		b.ReportMetric(float64(steps), "steps/op")
	}
}
