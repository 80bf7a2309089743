package routing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	zapobserver "go.uber.org/zap/zaptest/observer"

	"kvgate/configs"
)

// preciseYAML is a profile of the precise producer with these parameters.
func preciseYAML(params string) string {
	return "plugins:\n- type: precise-prefix-cache-producer\n  parameters: " + params +
		"\n- type: prefix-cache-scorer\n  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}\n"
}

// preciseFixture is a fleet with a precise index of blocks of 4 tokens.
type preciseFixture struct {
	t      testing.TB
	clock  *testClock
	fleet  *Fleet
	router *Router
}

const preciseBlock4 = "{tokenProcessorConfig: {blockSizeTokens: 4}}"

func newPrecise(t testing.TB, params string, names ...string) *preciseFixture {
	t.Helper()
	f := &preciseFixture{t: t, clock: newTestClock()}
	f.fleet = readyFleet(t, f.clock, names...)
	f.router = newTestRouter(t, f.fleet, preciseYAML(params))
	return f
}

func (f *preciseFixture) index() *preciseIndex {
	return f.router.producers[0].Producer.(*preciseProducer).index
}

func (f *preciseFixture) endpoint(name string) *Endpoint {
	f.t.Helper()
	for _, e := range f.fleet.Endpoints() {
		if e.Name() == name {
			return e
		}
	}
	f.t.Fatalf("endpoint %s: got none, want one", name)
	return nil
}

// match returns blocks and cached tokens by endpoint in ID order.
func (f *preciseFixture) match(r *Request) (matched []int32, cached []int64) {
	p := f.router.producers[0].Producer
	var c []Candidate
	for i, e := range f.fleet.Endpoints() {
		c = append(c, Candidate{Endpoint: e, Row: i})
	}
	ch, col := &chain{}, &Column{Matched: make([]int32, len(c))}
	p.Prepare(r, ch)
	p.Match(r, ch, c, col)
	for i := range c {
		cached = append(cached, col.held(i))
	}
	return col.Matched, cached
}

func (f *preciseFixture) want(what string, r *Request, matched []int32, cached []int64) {
	f.t.Helper()
	m, c := f.match(r)
	if !slices.Equal(m, matched) || !slices.Equal(c, cached) {
		f.t.Errorf("%s: got %d blocks, %d tokens, want %d, %d", what, m, c, matched, cached)
	}
}

func (f *preciseFixture) stats(name string) PreciseStats {
	f.t.Helper()
	for _, s := range f.fleet.PreciseStats() {
		if s.Endpoint.Name() == name {
			return s
		}
	}
	f.t.Fatalf("stats of %s: got none, want some", name)
	return PreciseStats{}
}

// count returns the tokens from, from+1, ...
func count(from, n int) (out []uint32) {
	for i := range n {
		out = append(out, uint32(from+i))
	}
	return out
}

// event returns a stored event of model m: blocks of size tokens with the hashes base, base+1, ...
func event(base uint64, size int, tokens []uint32) *BlockStored {
	b := &BlockStored{Tokens: tokens, BlockTokens: size, Model: []byte("m")}
	for i := range len(tokens) / size {
		b.Hashes = append(b.Hashes, base+uint64(i))
	}
	return b
}

func (b BlockStored) behind(parent uint64) *BlockStored {
	b.HasParent, b.Parent = true, parent
	return &b
}

func (b BlockStored) in(medium string, group int) *BlockStored {
	b.Medium, b.Group = []byte(medium), group
	return &b
}

func gone(medium string, group int, hashes ...uint64) *BlockRemoved {
	return &BlockRemoved{Hashes: hashes, Medium: []byte(medium), Group: group}
}

// TestPreciseScores: what six keys in two tiers are worth.
func TestPreciseScores(t *testing.T) {
	const params = "{tokenProcessorConfig: {blockSizeTokens: 1}, indexerConfig: {kvCacheBackendConfigs: [{name: gpu, weight: 1.0}, {name: cpu, weight: 0.5}]}}"
	keys := count(1001, 6)
	f := func(t *testing.T, name string, say func(x *preciseIndex, a, b *Endpoint), scores [2]float64, matched []int32, cached []int64) {
		t.Helper()
		p := newPrecise(t, params, "a", "b")
		a, b := p.endpoint("a"), p.endpoint("b")
		// Both know all six blocks; then they lose what they do not have.
		for _, e := range []*Endpoint{a, b} {
			p.index().Stored(e, 0, event(1001, 1, keys).in("init", 0))
		}
		say(p.index(), a, b)
		for _, e := range []*Endpoint{a, b} {
			p.index().Removed(e, 0, gone("init", 0, 1001, 1002, 1003, 1004, 1005, 1006))
		}
		p.want(name, exactRequest("m", "", append(keys, 0)), matched, cached)
		for i, e := range []*Endpoint{a, b} {
			if !p.index().lowerHeld() { // blocks of a whole weight are counted, not weighed
				break
			}
			if got := p.index().score[p.index().ranks(e)[0].column]; got != scores[i] {
				t.Errorf("%s: %s: got a score of %v, want %v", name, e.Name(), got, scores[i])
			}
		}
	}
	has := func(x *preciseIndex, e *Endpoint, medium string, hashes ...uint64) {
		x.Stored(e, 0, &BlockStored{Hashes: hashes, Medium: []byte(medium)})
	}
	f(t, "gpu, one of them in cpu too", func(x *preciseIndex, a, b *Endpoint) {
		has(x, a, "gpu", 1001, 1002, 1003, 1006)
		has(x, a, "cpu", 1003)
		has(x, b, "cpu", 1004, 1005)
	}, [2]float64{3, 0}, []int32{3, 0}, []int64{3, 0})
	f(t, "the third in cpu only", func(x *preciseIndex, a, b *Endpoint) {
		has(x, a, "gpu", 1001, 1002, 1006)
		has(x, a, "cpu", 1003)
		has(x, b, "cpu", 1004, 1005)
	}, [2]float64{2.5, 0}, []int32{2, 0}, []int64{3, 0})
	f(t, "cpu only counts all blocks for the prediction", func(x *preciseIndex, a, _ *Endpoint) {
		has(x, a, "cpu", 1001, 1002, 1003, 1004)
	}, [2]float64{2, 0}, []int32{2, 0}, []int64{4, 0})
	f(t, "the third is missing", func(x *preciseIndex, a, b *Endpoint) {
		has(x, a, "gpu", 1001, 1002, 1004, 1005)
		has(x, b, "gpu", 1002, 1003)
	}, [2]float64{2, 0}, []int32{2, 0}, []int64{2, 0})
	f(t, "an unknown tier counts like the gpu", func(x *preciseIndex, a, b *Endpoint) {
		has(x, a, "Tape", 1001, 1002)
		has(x, b, "", 1001)
	}, [2]float64{2, 1}, []int32{2, 1}, []int64{2, 1})
	f(t, "a gap in the cpu under the gpu", func(x *preciseIndex, a, _ *Endpoint) {
		has(x, a, "gpu", 1001, 1002, 1003, 1004)
		has(x, a, "cpu", 1001, 1002, 1004)
	}, [2]float64{4, 0}, []int32{4, 0}, []int64{4, 0})
}

// TestPrecisePrediction: vLLM takes whole blocks from its cache and always computes the last token.
func TestPrecisePrediction(t *testing.T) {
	f := func(t *testing.T, ours, engine, stored, asked int, wantBlocks int32, wantCached int64) {
		t.Helper()
		p := newPrecise(t, fmt.Sprintf("{tokenProcessorConfig: {blockSizeTokens: %d}}", ours), "a")
		p.index().Stored(p.endpoint("a"), 0, event(1, engine, count(0, stored)))
		p.want(fmt.Sprintf("%d of %d tokens, blocks of %d by %d", stored, asked, ours, engine), exactRequest("m", "", count(0, asked)), []int32{wantBlocks}, []int64{wantCached})
	}
	f(t, 32, 32, 480, 492, 15, 480)
	f(t, 32, 32, 480, 480, 15, 448) // an equal prompt of whole blocks: the last one is computed
	f(t, 32, 32, 480, 481, 15, 480)
	f(t, 32, 32, 480, 31, 0, 0)
	f(t, 16, 32, 64, 48, 3, 32) // half an engine block is no hit
	f(t, 16, 32, 64, 65, 4, 64)
	f(t, 32, 16, 64, 65, 2, 64)
	f(t, 32, 16, 80, 100, 2, 64) // the fifth engine block does not fill one of ours
	f(t, 1, 1, 5, 5, 5, 4)
	f(t, 16, 32, 96, 81, 5, 64) // two and a half of the engine's
}

// TestPrecisePredictionByReplica: replicas whose blocks differ in size, or of which one
// tells it later than it was asked about, are each predicted by their own.
func TestPrecisePredictionByReplica(t *testing.T) {
	p := newPrecise(t, "{}", "a", "b")
	r := exactRequest("m", "", count(0, 81))
	ask := func(matched [2]int32, cached [2]int64) {
		t.Helper()
		l, err := p.router.Route(r)
		if err != nil {
			t.Fatal(err)
		}
		l.Done(Completed)
		for i, want := range matched {
			if col := &p.router.columns[0]; col.Matched[i] != want || col.held(i) != cached[i] {
				t.Errorf("%s: got %d blocks, %d tokens cached, want %d, %d", p.fleet.Endpoints()[i].Name(), col.Matched[i], col.held(i), want, cached[i])
			}
		}
	}
	ask([2]int32{0, 0}, [2]int64{0, 0})
	p.index().Stored(p.endpoint("a"), 0, event(1, 32, count(0, 96)))
	ask([2]int32{5, 0}, [2]int64{64, 0})
	p.index().Stored(p.endpoint("b"), 0, event(1, 16, count(0, 96)))
	ask([2]int32{5, 5}, [2]int64{64, 80})
}

// TestPrecisePredictionOfLease: the lease predicts what the engine takes, by blocks that weigh less too.
func TestPrecisePredictionOfLease(t *testing.T) {
	p := newPrecise(t, preciseBlock4, "a", "b")
	a := p.endpoint("a")
	p.index().Stored(a, 0, event(1, 4, count(0, 40)).in("CPU", 0))
	l, err := p.router.Route(exactRequest("m", "", count(0, 42)))
	if err != nil {
		t.Fatal(err)
	}
	if l.Endpoint != a || l.Matched != 8 || l.Total != 10 || l.BlockTokens != 4 || l.PredictedTokens() != 40 || l.Uncached != 4 {
		t.Errorf("got %s %d/%d of %d tokens, %d predicted, %d uncached, want a 8/10 of 4, 40, 4",
			l.Endpoint.Name(), l.Matched, l.Total, l.BlockTokens, l.PredictedTokens(), l.Uncached)
	}
	l.Done(Completed)
}

func TestPreciseEvents(t *testing.T) {
	a := exactRequest("m", "", count(0, 13)) // three blocks
	type say = func(x *preciseIndex, e *Endpoint)
	f := func(t *testing.T, name string, want int32, wantCached int64, says ...say) {
		t.Helper()
		p := newPrecise(t, preciseBlock4, "a")
		for _, s := range says {
			s(p.index(), p.endpoint("a"))
		}
		p.want(name, a, []int32{want}, []int64{wantCached})
	}
	store := func(b *BlockStored) say { return func(x *preciseIndex, e *Endpoint) { x.Stored(e, 0, b) } }
	remove := func(b *BlockRemoved) say { return func(x *preciseIndex, e *Endpoint) { x.Removed(e, 0, b) } }
	all := event(1, 4, count(0, 12))
	f(t, "nothing", 0, 0)
	f(t, "a whole prompt", 3, 12, store(all))
	f(t, "in two events", 3, 12, store(event(1, 4, count(0, 4))), store(event(2, 4, count(4, 8)).behind(1)))
	f(t, "an unknown parent", 1, 4, store(event(1, 4, count(0, 4))), store(event(2, 4, count(4, 8)).behind(77)))
	f(t, "the tail is gone", 2, 8, store(all), remove(gone("GPU", 0, 3)))
	f(t, "the head is gone", 0, 0, store(all), remove(gone("gpu", 0, 1)))
	f(t, "stored twice, removed once", 3, 12, store(all), store(all), remove(gone("", 0, 1, 2, 3)))
	f(t, "stored twice, removed twice", 0, 0, store(all), store(all), remove(gone("", 0, 1, 2, 3)), remove(gone("", 0, 1, 2, 3)))
	f(t, "removed before it was stored", 3, 12, remove(gone("", 0, 1)), store(all))
	f(t, "removed from another tier", 3, 12, store(all), remove(gone("cpu", 0, 1)))
	f(t, "removed from another group", 3, 12, store(all), remove(gone("", 1, 1)))
	f(t, "offloaded, then gone from the gpu", 2, 12, store(all), store(&BlockStored{Hashes: []uint64{1, 2, 3}, Medium: []byte("cpu")}), remove(gone("", 0, 1, 2, 3)))
	f(t, "offloaded blocks that nobody knows", 0, 0, store(&BlockStored{Hashes: []uint64{1, 2, 3}, Medium: []byte("cpu")}))
	f(t, "in two groups, gone from one", 3, 12, store(all), store(all.in("", 1)), remove(gone("", 0, 1, 2, 3)))
	f(t, "cleared", 0, 0, store(all), func(x *preciseIndex, e *Endpoint) { x.Cleared(e, 0) })
	f(t, "cleared and stored again", 3, 12, store(all), func(x *preciseIndex, e *Endpoint) { x.Cleared(e, 0) }, store(all))
	f(t, "nothing is left of before", 1, 4, store(all), func(x *preciseIndex, e *Endpoint) { x.Cleared(e, 0) }, store(event(1, 4, count(0, 4))), store(event(3, 4, count(8, 4)).behind(2)))
	f(t, "incomplete", 0, 0, store(all), func(x *preciseIndex, e *Endpoint) { x.Incomplete(e, 0, "gap") })
	f(t, "incomplete, and stored since", 3, 12, func(x *preciseIndex, e *Endpoint) { x.Incomplete(e, 0, "gap") }, store(all))
	f(t, "complete again", 3, 12, store(all), func(x *preciseIndex, e *Endpoint) { x.Incomplete(e, 0, "") })
	kind := func(k string) *BlockStored { b := *all; b.Kind = []byte(k); return &b }
	f(t, "full attention", 3, 12, store(kind("full_attention")))
	f(t, "latent attention", 3, 12, store(kind("mla_attention")))
	f(t, "attention with sinks", 3, 12, store(kind("sink_full_attention")))
	f(t, "a sliding window", 0, 0, store(kind("sliding_window")), remove(gone("", 0, 1)))
	f(t, "a state space", 0, 0, store(kind("mamba")))
	f(t, "tokens for a block and a half", 1, 4, store(&BlockStored{Hashes: []uint64{1, 2}, Tokens: count(0, 6), BlockTokens: 4, Model: []byte("m")}))
	f(t, "a hash that is given to something else", 0, 0, store(all), store(event(1, 4, count(90, 4))))
	f(t, "no block size", 0, 0, store(&BlockStored{Hashes: []uint64{1}, Tokens: count(0, 4), Model: []byte("m")}))
	f(t, "another model", 0, 0, store(&BlockStored{Hashes: []uint64{1}, Tokens: count(0, 4), BlockTokens: 4, Model: []byte("other")}))
	f(t, "another endpoint's rank", 3, 12, func(x *preciseIndex, e *Endpoint) { x.Stored(e, 7, all) })
	f(t, "ranks do not add up", 2, 8, store(event(1, 4, count(0, 8))), func(x *preciseIndex, e *Endpoint) {
		x.Stored(e, 1, event(1, 4, count(0, 8)))
		x.Stored(e, 1, event(3, 4, count(8, 4)).behind(2))
		x.Removed(e, 1, gone("", 0, 1))
	})
	f(t, "one rank is cleared", 3, 12, store(all), func(x *preciseIndex, e *Endpoint) {
		x.Stored(e, 1, all)
		x.Cleared(e, 1)
	})
	f(t, "a rank out of range", 0, 0, func(x *preciseIndex, e *Endpoint) { x.Stored(e, -1, all); x.Stored(e, maxRanks, all) })
}

// TestPreciseBlockSizes: the engine's blocks and ours in both ratios, with the decode's single blocks.
func TestPreciseBlockSizes(t *testing.T) {
	f := func(t *testing.T, name string, ours int, want int32, events ...*BlockStored) *preciseFixture {
		t.Helper()
		p := newPrecise(t, fmt.Sprintf("{tokenProcessorConfig: {blockSizeTokens: %d}}", ours), "a")
		for _, b := range events {
			p.index().Stored(p.endpoint("a"), 0, b)
		}
		if m, _ := p.match(exactRequest("m", "", count(0, 65))); m[0] != want {
			t.Errorf("%s: got %d blocks, want %d", name, m[0], want)
		}
		return p
	}
	f(t, "32 tokens in blocks of 8", 8, 4, event(1, 16, count(0, 32)))
	f(t, "32 tokens in blocks of 16", 16, 2, event(1, 16, count(0, 32)))
	f(t, "32 tokens in blocks of 32", 32, 1, event(1, 16, count(0, 32)))
	f(t, "a rest is dropped", 32, 1, event(1, 16, count(0, 48)))
	f(t, "a rest is completed later", 32, 2, event(1, 16, count(0, 48)), event(4, 16, count(48, 16)).behind(3))
	single := []*BlockStored{event(1, 16, count(0, 16))}
	for i := 1; i < 4; i++ {
		single = append(single, event(uint64(1+i), 16, count(16*i, 16)).behind(uint64(i)))
	}
	f(t, "one block at a time", 32, 2, single...)
	f(t, "one block at a time in a large one", 64, 1, single...)
	f(t, "half of a block stays unknown", 32, 1, append(single[:2:2], event(9, 16, count(48, 16)).behind(8))...)
	f(t, "a ratio that is no whole number", 24, 0, event(1, 16, count(0, 48)))
	f(t, "too many of ours in one", 1, 0, event(1, 512, count(0, 512)))
	f(t, "another size in between", 16, 2, event(1, 16, count(0, 32)), event(3, 32, count(32, 32)).behind(2))

	p := f(t, "a part leaves", 32, 2, single...)
	a := p.endpoint("a")
	p.index().Removed(a, 0, gone("", 0, 1))
	p.want("the first half of the first block is gone", exactRequest("m", "", count(0, 65)), []int32{0}, []int64{0})
	p.index().Cleared(a, 0)
	p.index().Stored(a, 0, event(1, 32, count(0, 64)))
	p.want("another engine size after a restart", exactRequest("m", "", count(0, 65)), []int32{2}, []int64{64})
	p.index().Removed(a, 0, gone("", 0, 1, 2))
	p.index().Stored(a, 0, event(1, 8, count(0, 64)))
	p.want("another engine size when nothing is left", exactRequest("m", "", count(0, 65)), []int32{2}, []int64{64})
	if got := p.stats("a"); got.Blocks != 8 || got.Refused != 0 || got.Cleared != 1 {
		t.Errorf("got %d blocks, %d refused, %d times cleared, want 8, 0, 1", got.Blocks, got.Refused, got.Cleared)
	}
}

// TestPreciseIsolation: salt, adapter and images tell prompts apart that have the same tokens.
func TestPreciseIsolation(t *testing.T) {
	tokens := count(0, 13)
	image := func(r *Request, offset, length int, hash string) *Request {
		r.items = append(r.items, promptItem{offset: offset, length: length, hash: []byte(hash)})
		return r
	}
	f := func(t *testing.T, name string, b *BlockStored, hits *Request, misses ...*Request) {
		t.Helper()
		p := newPrecise(t, preciseBlock4, "a")
		p.index().Stored(p.endpoint("a"), 0, b)
		p.want(name+": its own", hits, []int32{3}, []int64{12})
		for i, r := range misses {
			if m, _ := p.match(r); m[0] == 3 {
				t.Errorf("%s: other %d: got 3 blocks, want less", name, i)
			}
		}
	}
	extra := func(keys ...BlockExtra) *BlockStored { b := event(1, 4, tokens[:12]); b.Extras = keys; return b }
	lora := func(b *BlockStored, name string) *BlockStored { b.LoRA = []byte(name); return b }
	plain, salted := exactRequest("m", "", tokens), exactRequest("m", "x", tokens)
	adapter := exactRequest("x", "", tokens)
	salt := BlockExtra{Key: []byte("x")}
	f(t, "plain", event(1, 4, tokens[:12]), plain, salted, adapter)
	f(t, "salt", extra(salt), salted, plain, adapter, exactRequest("m", "y", tokens))
	named := []BlockExtra{{Block: 0, Key: []byte("x")}, {Block: 1, Key: []byte("x")}, {Block: 2, Key: []byte("x")}}
	f(t, "adapter", lora(extra(named...), "x"), adapter, plain, salted, exactRequest("x", "x", tokens))
	f(t, "adapter with a salt of its name", lora(extra(slices.Insert(slices.Clone(named), 1, salt)...), "x"), exactRequest("x", "x", tokens), adapter)
	cat := func(blocks ...int) (keys []BlockExtra) {
		for _, b := range blocks {
			keys = append(keys, BlockExtra{Block: b, Key: []byte("cat"), Offset: 5 - 4*b, Paired: true})
		}
		return keys
	}
	f(t, "image", extra(cat(1, 2)...), image(exactRequest("m", "", tokens), 5, 4, "cat"),
		plain, image(exactRequest("m", "", tokens), 5, 4, "dog"), image(exactRequest("m", "", tokens), 5, 2, "cat"))
	f(t, "image and salt", extra(append([]BlockExtra{salt}, cat(1)...)...), image(exactRequest("m", "x", tokens), 5, 3, "cat"), salted)
	first := []BlockExtra{{Block: 0, Key: []byte("cat"), Paired: true}, {Block: 0, Key: []byte("x")}}
	f(t, "image in the first block, then the salt", extra(first...), image(exactRequest("m", "x", tokens), 0, 4, "cat"), salted)
	two := []BlockExtra{{Block: 0, Key: []byte("cat"), Paired: true}, {Block: 0, Key: []byte("dog"), Offset: 2, Paired: true}}
	f(t, "two images in a block", extra(two...), image(image(exactRequest("m", "", tokens), 0, 2, "cat"), 2, 2, "dog"),
		image(image(exactRequest("m", "", tokens), 0, 2, "dog"), 2, 2, "cat"))
}

// TestPreciseExtrasBySize: where an item and the salt count when the engine's blocks are of another size.
func TestPreciseExtrasBySize(t *testing.T) {
	tokens := count(0, 17)
	f := func(t *testing.T, name string, ours, engine int, extras []BlockExtra, salt string, items ...promptItem) {
		t.Helper()
		p := newPrecise(t, fmt.Sprintf("{tokenProcessorConfig: {blockSizeTokens: %d}}", ours), "a")
		b := event(1, engine, tokens[:16])
		b.Extras = extras
		p.index().Stored(p.endpoint("a"), 0, b)
		r := exactRequest("m", salt, tokens)
		r.items = items
		if m, _ := p.match(r); int(m[0]) != 16/ours {
			t.Errorf("%s: got %d blocks, want %d", name, m[0], 16/ours)
		}
	}
	s := []byte("s")
	f(t, "salt, large engine blocks", 4, 8, []BlockExtra{{Key: s}}, "s")
	f(t, "salt, small engine blocks", 8, 4, []BlockExtra{{Key: s}}, "s")
	f(t, "item at the end of a large engine block", 4, 8, []BlockExtra{{Key: s, Offset: 5, Paired: true}}, "", promptItem{offset: 5, length: 3, hash: s})
	f(t, "item over the border of large engine blocks", 4, 8,
		[]BlockExtra{{Block: 0, Key: s, Offset: 6, Paired: true}, {Block: 1, Key: s, Offset: -2, Paired: true}}, "", promptItem{offset: 6, length: 9, hash: s})
	f(t, "item over small engine blocks", 8, 4,
		[]BlockExtra{{Block: 0, Key: s, Offset: 2, Paired: true}, {Block: 1, Key: s, Offset: -2, Paired: true}, {Block: 2, Key: s, Offset: -6, Paired: true}}, "", promptItem{offset: 2, length: 8, hash: s})
}

// TestPreciseModelNames: a topic without a model is about the replica's only one.
func TestPreciseModelNames(t *testing.T) {
	f := func(t *testing.T, name string, models []string, ask string, want int32) {
		t.Helper()
		p := newPrecise(t, preciseBlock4, "a")
		p.fleet.SetModels(p.endpoint("a"), models, models != nil)
		b := event(1, 4, count(0, 12))
		b.Model = nil
		p.index().Stored(p.endpoint("a"), 0, b)
		if m, _ := p.match(exactRequest(ask, "", count(0, 13))); m[0] != want {
			t.Errorf("%s: got %d blocks, want %d", name, m[0], want)
		}
	}
	f(t, "one model", []string{"m"}, "m", 3)
	f(t, "two models", []string{"m", "n"}, "m", 0)
	f(t, "two models, nameless request", []string{"m", "n"}, "", 3)
	f(t, "no list", nil, "", 3)
}

func TestPreciseNeedsExactTokens(t *testing.T) {
	p := newPrecise(t, preciseBlock4, "a")
	p.index().Stored(p.endpoint("a"), 0, event(1, 4, count(0, 12)))
	r := exactRequest("m", "", count(0, 13))
	r.Exact = false
	l, err := p.router.Route(r)
	if err != nil {
		t.Fatal(err)
	}
	if l.Total != 0 || l.Matched != 0 || l.PredictedTokens() != 0 || l.Uncached != 13 {
		t.Errorf("estimated tokens: got %d/%d, %d predicted, %d uncached, want 0/0, 0, 13", l.Matched, l.Total, l.PredictedTokens(), l.Uncached)
	}
}

func TestPreciseSeveralPrompts(t *testing.T) {
	p := newPrecise(t, preciseBlock4, "a", "b")
	p.index().Stored(p.endpoint("a"), 0, event(1, 4, count(0, 12)))
	p.index().Stored(p.endpoint("a"), 0, event(11, 4, count(50, 8)))
	p.index().Stored(p.endpoint("b"), 0, event(1, 4, count(50, 8)))
	p.want("three prompts, one too short for a block", exactRequest("m", "", count(0, 12), count(70, 3), count(50, 9)), []int32{5, 2}, []int64{16, 8})
}

func TestPreciseStats(t *testing.T) {
	p := newPrecise(t, preciseBlock4, "a", "b")
	x, a := p.index(), p.endpoint("a")
	x.Stored(a, 0, event(1, 4, count(0, 12)))
	x.Stored(a, 3, event(1, 4, count(0, 12)))
	x.Stored(a, 0, event(1, 4, count(0, 8)))            // known
	x.Stored(a, 0, event(9, 4, count(0, 8)).behind(70)) // unknown parent
	x.Removed(a, 0, gone("", 0, 3, 99))                 // one unknown
	x.Stored(a, 0, &BlockStored{Hashes: []uint64{55}})  // unknown, without tokens
	x.Stored(a, 0, event(1, 3, count(0, 6)))            // does not fit
	x.Stored(a, 0, &BlockStored{Hashes: []uint64{5}, Kind: []byte("mamba")})
	x.Cleared(a, 3)
	x.Incomplete(a, 3, "seq 5 to 9 lost")
	want := PreciseStats{Producer: "precise-prefix-cache-producer", Endpoint: a, Blocks: 2, Stored: 8, Duplicates: 2, Removed: 1, Cleared: 1, Lost: 1,
		UnknownParents: 2, UnknownBlocks: 2, OtherKinds: 1, Refused: 2, Incomplete: "seq 5 to 9 lost"}
	if got := p.stats("a"); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got, want := p.fleet.IndexBlocks(a), 2; got != want {
		t.Errorf("IndexBlocks: got %d, want %d", got, want)
	}
	x.Incomplete(a, 3, "")
	if got := p.stats("a").Incomplete; got != "" {
		t.Errorf("after the replay: got incomplete %q, want nothing", got)
	}
	for _, s := range p.fleet.IndexStats() {
		if s.Producer == x.producer && (s.Blocks != 2 || s.BlockTokens != 4 || s.Bytes <= 0) {
			t.Errorf("IndexStats: got %+v, want 2 blocks of 4 tokens and their memory", s)
		}
	}
}

// TestPreciseLogs: a replica that says what cannot be used is named once.
func TestPreciseLogs(t *testing.T) {
	core, logs := zapobserver.New(zap.InfoLevel)
	clock := newTestClock()
	fleet := NewFleet(clock.now, 2*time.Second, zap.New(core))
	fleet.Update(specs("a"))
	r := newTestRouter(t, fleet, preciseYAML(preciseBlock4))
	x, a := r.producers[0].Producer.(*preciseProducer).index, fleet.Endpoints()[0]
	for range 3 {
		x.Stored(a, 0, event(1, 3, count(0, 6)))
		x.Incomplete(a, 0, "the replay stalled")
	}
	var got []string
	for _, l := range logs.All() {
		got = append(got, fmt.Sprint(l.Message[:20], l.ContextMap()["replica"], l.ContextMap()["reason"], l.ContextMap()["block_tokens"]))
	}
	want := []string{"KV events of a blocka<nil> 3", "KV events were lost:athe replay stalled<nil>"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestPreciseBounds: a replica has its share of the index, whatever it tells, and loses its oldest blocks.
func TestPreciseBounds(t *testing.T) {
	p := newPrecise(t, "{tokenProcessorConfig: {blockSizeTokens: 4}, indexerConfig: {kvBlockIndexConfig: {inMemoryConfig: {size: 600}}}}", "a", "b", "c")
	x, a, b := p.index(), p.endpoint("a"), p.endpoint("b")
	x.Stored(b, 0, event(1, 4, count(0, 400)))
	for i := range 500 { // a flood of prompts of 50 blocks
		x.Stored(a, 0, event(uint64(i)*100+1, 4, count(1000*i, 200)))
	}
	if got, want := p.stats("a").Blocks, 200; got != want {
		t.Errorf("the flooding replica: got %d blocks, want its share of %d", got, want)
	}
	if got, want := p.stats("b").Blocks, 100; got != want {
		t.Errorf("its neighbour: got %d blocks, want %d", got, want)
	}
	p.want("the neighbour's prompt", exactRequest("m", "", count(0, 401)), []int32{0, 100, 0}, []int64{0, 400, 0})
	p.want("the newest prompt", exactRequest("m", "", count(499_000, 201)), []int32{50, 0, 0}, []int64{200, 0, 0})
	p.want("an old prompt", exactRequest("m", "", count(1000, 201)), []int32{0, 0, 0}, []int64{0, 0, 0})
	if got, want := x.held.Distinct(), 300; got != want {
		t.Errorf("got %d keys, want %d: evicted ones are gone", got, want)
	}
	for i := range 100 {
		x.Stored(b, 0, event(1000, 4, count(0, 4)).in(fmt.Sprint("tier", i), 0))
	}
	if got, want := p.stats("b").Refused, uint64(100-maxPlaces+1); got != want {
		t.Errorf("many tiers: got %d blocks refused, want %d", got, want)
	}
	x.Stored(b, 0, event(2000, 4, count(0, 4)).in(strings.Repeat("x", maxTierName+1), 0))
	if got, want := p.stats("b").Refused, uint64(100-maxPlaces+2); got != want {
		t.Errorf("a long tier: got %d blocks refused, want %d", got, want)
	}
	p.fleet.Update(specs("b", "c"))
	if got, want := x.share.Load(), int64(300); got != want {
		t.Errorf("two endpoints: got a share of %d, want %d", got, want)
	}
}

// TestPreciseEndpointsComeAndGo: a removed endpoint leaves nothing behind, and what is said about it counts for nothing.
func TestPreciseEndpointsComeAndGo(t *testing.T) {
	p := newPrecise(t, "{tokenProcessorConfig: {blockSizeTokens: 4}, speculativeIndexing: true}", "a", "b")
	x, a := p.index(), p.endpoint("a")
	prompt := exactRequest("m", "", count(0, 13))
	x.Stored(a, 0, event(1, 4, count(0, 12)))
	x.Stored(a, 2, event(1, 4, count(0, 12)))
	p.fleet.Update(specs("b"))
	x.Stored(a, 0, event(1, 4, count(0, 12)))
	if got, want := x.held.Distinct(), 0; got != want {
		t.Errorf("after removal: got %d keys, want %d", got, want)
	}
	if got, want := x.strange.Load(), uint64(1); got != want {
		t.Errorf("events of nobody: got %d, want %d", got, want)
	}
	p.fleet.Update(specs("b", "c")) // takes the slot and the column
	p.want("the one that came instead", prompt, []int32{0, 0}, []int64{0, 0})
	x.Stored(p.endpoint("c"), 0, event(1, 4, count(0, 8)))
	p.want("and told", prompt, []int32{0, 2}, []int64{0, 8})
	if got, want := len(x.columns), 3; got != want {
		t.Errorf("got %d columns, want %d: those given up are used again", got, want)
	}
	for range 50 {
		p.fleet.Update(specs("b"))
		p.fleet.Update(specs("b", "c"))
		p.endpoint("c").Observe(observed(0, 0, 0), p.clock.now())
		x.Stored(p.endpoint("c"), 0, event(1, 4, count(0, 8)))
		l, err := p.router.Route(exactRequest("m", "", count(0, 9)))
		if err != nil {
			t.Fatal(err)
		}
		l.Done(Completed)
	}
	if got, most := len(x.columns), 60; got > most {
		t.Errorf("after 50 rounds: got %d columns, want at most %d", got, most)
	}
	p.clock.advance(time.Minute)
	p.match(prompt)
	p.fleet.Update(specs("b"))
	p.fleet.Update(specs("b", "c"))
	n := len(x.columns)
	for range 50 {
		p.fleet.Update(specs("b"))
		p.fleet.Update(specs("b", "c"))
	}
	if got := len(x.columns); got != n {
		t.Errorf("without guesses: got %d columns, want %d still", got, n)
	}
}

// TestPreciseReload: the index stays while what it is made of stays.
func TestPreciseReload(t *testing.T) {
	p := newPrecise(t, preciseBlock4, "a")
	var current Current
	current.Store(p.router)
	x := p.index()
	x.Stored(p.endpoint("a"), 0, event(1, 4, count(0, 12)))
	f := func(t *testing.T, name, yaml string, same bool) {
		t.Helper()
		r := newTestRouter(t, p.fleet, yaml)
		current.Store(r)
		sources := r.KVEventSources()
		if len(sources) != 1 {
			t.Fatalf("%s: got %d sources of events, want 1", name, len(sources))
		}
		if got := sources[0].Sink == KVEvents(x); got != same {
			t.Errorf("%s: got the same index %v, want %v", name, got, same)
		}
		if got, want := len(p.fleet.precise), 1; got != want {
			t.Errorf("%s: got %d indexes, want %d", name, got, want)
		}
	}
	f(t, "unchanged", preciseYAML(preciseBlock4), true)
	f(t, "other events", preciseYAML("{tokenProcessorConfig: {blockSizeTokens: 4}, kvEventsConfig: {concurrency: 2, podDiscoveryConfig: {socketPort: 6000}}}"), true)
	f(t, "deprecated spelling", preciseYAML("{tokenProcessorConfig: {blockSize: 4}}"), true)
	f(t, "another block size", preciseYAML("{tokenProcessorConfig: {blockSizeTokens: 8}}"), false)
	p.router = newTestRouter(t, p.fleet, preciseYAML(preciseBlock4))
	p.want("a new index knows nothing", exactRequest("m", "", count(0, 13)), []int32{0}, []int64{0})
	// A request that holds the old router across a reload and a new endpoint.
	p.fleet.Update(specs("a", "b"))
	p.endpoint("b").Observe(observed(0, 0, 0), p.clock.now())
	p.fleet.Update(append(specs("a", "b"), spec("c")))
	current.Store(newTestRouter(t, p.fleet, ""))
	p.fleet.Update(specs("a", "b", "c", "d"))
	p.endpoint("d").Observe(observed(0, 0, 0), p.clock.now())
	l, err := p.router.Route(exactRequest("m", "", count(0, 13)))
	if err != nil {
		t.Fatalf("old router: %v", err)
	}
	l.Done(Unsent)
	if got, want := len(p.fleet.precise), 0; got != want {
		t.Errorf("without a precise producer: got %d indexes, want %d", got, want)
	}
}

// TestPreciseSpeculation: a burst sticks before events tell of it.
func TestPreciseSpeculation(t *testing.T) {
	const on = "{tokenProcessorConfig: {blockSizeTokens: 4}, speculativeIndexing: true}"
	prompt := func() *Request { return exactRequest("m", "", count(0, 13)) }
	route := func(p *preciseFixture) *Lease {
		p.t.Helper()
		l, err := p.router.Route(prompt())
		if err != nil {
			p.t.Fatal(err)
		}
		return l
	}
	held := func(p *preciseFixture, name string, want ...int32) {
		p.t.Helper()
		if got, _ := p.match(prompt()); !slices.Equal(got, want) {
			p.t.Errorf("%s: got %d blocks, want %d", name, got, want)
		}
	}

	p := newPrecise(t, preciseBlock4, "a")
	route(p).Done(Completed)
	held(p, "without speculation", 0)

	p = newPrecise(t, on, "a", "b", "c", "d")
	first := route(p).Endpoint
	for range 20 {
		if got := route(p).Endpoint; got != first {
			t.Fatalf("the burst: got %s, want %s again", got.Name(), first.Name())
		}
	}

	p = newPrecise(t, on, "a")
	route(p).Done(Completed)
	held(p, "at once", 3)
	p.clock.advance(1999 * time.Millisecond)
	held(p, "before the ttl", 3)
	p.clock.advance(501 * time.Millisecond)
	held(p, "after the ttl and a quarter", 0)
	if got := p.index().guesses.total; got != 0 {
		t.Errorf("after the ttl: got %d guesses, want 0", got)
	}
	route(p).Done(Completed)
	p.clock.advance(1500 * time.Millisecond)
	route(p).Done(Completed)
	p.clock.advance(1500 * time.Millisecond)
	held(p, "sent again meanwhile", 3)
	p.clock.advance(time.Second)
	held(p, "and not since", 0)

	p = newPrecise(t, on, "a")
	route(p).Done(Unsent)
	held(p, "never sent", 0)
	p.index().Stored(p.endpoint("a"), 0, event(1, 4, count(0, 8)))
	route(p).Done(Unsent)
	held(p, "never sent, two blocks are certain", 2)

	p = newPrecise(t, on, "a")
	x, a := p.index(), p.endpoint("a")
	route(p).Done(Completed)
	x.Stored(a, 0, event(1, 4, count(0, 8)))
	p.clock.advance(time.Hour)
	held(p, "two blocks were told of", 2)
	x.Removed(a, 0, gone("", 0, 1, 2))
	held(p, "and evicted", 0)

	p = newPrecise(t, on, "a")
	x, a = p.index(), p.endpoint("a")
	route(p).Done(Completed)
	x.Stored(a, 1, event(1, 4, count(0, 4)))
	x.Cleared(a, 0)
	held(p, "a restart ends what was expected", 1)
	p.clock.advance(time.Hour)
	held(p, "of the other rank too", 1)

	p = newPrecise(t, on, "a")
	g := &p.index().guesses
	g.total = maxGuesses // as good as
	route(p).Done(Completed)
	held(p, "too many already", 0)
	g.total = 0
}

// TestPreciseGuessesExpireInParts: a long list does not hold up one decision.
func TestPreciseGuessesExpireInParts(t *testing.T) {
	p := newPrecise(t, "{tokenProcessorConfig: {blockSizeTokens: 4}, speculativeIndexing: true, speculativeTTL: 4s}", "a")
	x := p.index()
	for i := range 40 {
		l, err := p.router.Route(exactRequest("m", "", count(1000*i, 400)))
		if err != nil {
			t.Fatal(err)
		}
		l.Done(Completed)
	}
	if got, want := x.guesses.total, 4000; got != want {
		t.Fatalf("got %d guesses, want %d", got, want)
	}
	p.clock.advance(time.Minute)
	rounds := 0
	for ; x.guesses.total > 0; rounds++ {
		before, most := x.guesses.total, guessesPerExpire+2*((x.guesses.owed+7)/8)
		p.match(exactRequest("m", "", count(0, 4)))
		if got := before - x.guesses.total; got > most || got == 0 {
			t.Fatalf("round %d: got %d guesses expired, want 1 to %d", rounds, got, most)
		}
	}
	if least := 4000 / (3 * guessesPerExpire); rounds < least {
		t.Errorf("got %d rounds, want at least %d", rounds, least)
	}
	if got := x.held.Distinct(); got != 0 {
		t.Errorf("got %d keys held, want 0", got)
	}
}

func TestPreciseParameters(t *testing.T) {
	f := func(t *testing.T, params string, wants ...string) {
		t.Helper()
		cfg, err := configs.ParseScheduling("test.yaml", []byte(header+preciseYAML(params)))
		if err == nil {
			_, err = New(cfg, newTestFleet(newTestClock()), 1)
		}
		if err == nil {
			t.Errorf("%s: got no error, want %q", params, wants)
			return
		}
		for _, want := range append(wants, "test.yaml:5") {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %q", params, err, want)
			}
		}
	}
	const index = "indexerConfig: {kvBlockIndexConfig: "
	f(t, "{tokenProcessorConfig: {blockSizeTokens: 0}}", "blockSizeTokens", "0 tokens per block", "engine's block size")
	f(t, "{tokenProcessorConfig: {blockSizeTokens: -1}}", "blockSizeTokens", "-1 tokens per block")
	f(t, "{tokenProcessorConfig: {blockSize: -4}}", "tokenProcessorConfig.blockSize", "-4 tokens per block")
	f(t, "{tokenProcessorConfig: {blockSizeTokens: 1000000000}}", "blockSizeTokens", "1000000000 tokens per block")
	f(t, "{tokenProcessorConfig: {hashAlgorithm: xxhash}}", "hashAlgorithm", `"xxhash"`, "cbor-fnv or xxh64")
	f(t, "{tokenProcessorConfig: {hashAlgorithm: sha256}}", "hashAlgorithm", `"sha256"`)
	f(t, "{tokenProcessorConfig: {hashSeeds: a}}", "hashSeeds", "hashSeed")
	f(t, "{"+index+"{inMemoryConfig: {size: 0}}}}", "inMemoryConfig.size", "size 0")
	f(t, "{"+index+"{inMemoryConfig: {size: -1}}}}", "size -1")
	f(t, "{"+index+"{inMemoryConfig: {podCacheSize: 0}}}}", "podCacheSize 0")
	f(t, "{"+index+"{costAwareMemoryConfig: {}}}}", "costAwareMemoryConfig.size", "2GiB")
	f(t, "{"+index+"{costAwareMemoryConfig: {size: 10KiB}}}}", "size 10KiB")
	f(t, "{"+index+"{costAwareMemoryConfig: {size: lots}}}}", "lots")
	f(t, "{"+index+"{redisConfig: {address: 'redis://h'}}}}", "redisConfig", "remove it")
	f(t, "{"+index+"{valkeyConfig: {address: 'h:1'}}}}", "valkeyConfig", "remove it")
	f(t, "{indexerConfig: {tokenizersPoolConfig: {modelName: m}}}", "tokenizersPoolConfig", "token-producer")
	f(t, "{indexerConfig: {kvCacheBackendConfigs: [{name: '', weight: 1}]}}", "kvCacheBackendConfigs[0].name")
	f(t, "{indexerConfig: {kvCacheBackendConfigs: [{name: gpu, weight: 1}, {name: GPU, weight: .5}]}}", "kvCacheBackendConfigs[1].name", "twice")
	f(t, "{indexerConfig: {kvCacheBackendConfigs: [{name: gpu, weight: 2}]}}", "kvCacheBackendConfigs[0].weight", "0 to 1")
	f(t, "{indexerConfig: {kvCacheBackendConfigs: [{name: gpu, weight: -0.1}]}}", "weight -0.1")
	many := strings.Repeat("{name: x, weight: 1}, ", maxPreciseTiers+1)
	f(t, "{indexerConfig: {kvCacheBackendConfigs: ["+many+"]}}", "twice")
	f(t, "{kvEventsConfig: {engineType: trtllm}}", "engineType", `"trtllm"`, "vllm or sglang")
	f(t, "{kvEventsConfig: {concurrency: 0}}", "concurrency 0")
	f(t, "{kvEventsConfig: {podDiscoveryConfig: {socketPort: 0}}}", "socketPort 0")
	f(t, "{kvEventsConfig: {podDiscoveryConfig: {replaySocketPort: 70000}}}", "replaySocketPort 70000")
	f(t, "{speculativeTTL: 0s, speculativeIndexing: true}", "speculativeTTL")
	f(t, "{speculativeTTL: -1s}", "speculativeTTL")
	f(t, "{speculativeIndex: true}", "speculativeIndexing")
	f(t, "{kvEventsConfig: {engineType: x, concurrency: -1}, speculativeTTL: -1s}", `"x"`, "concurrency -1", "speculativeTTL -1s") // all at once
}

func TestPreciseTooManyTiers(t *testing.T) {
	var tiers []string
	for i := range maxPreciseTiers + 1 {
		tiers = append(tiers, fmt.Sprintf("{name: t%d, weight: 0.%02d}", i, i))
	}
	cfg, err := configs.ParseScheduling("test.yaml", []byte(header+preciseYAML("{indexerConfig: {kvCacheBackendConfigs: ["+strings.Join(tiers, ", ")+"]}}")))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = New(cfg, newTestFleet(newTestClock()), 1); err == nil || !strings.Contains(err.Error(), "more than 32 tiers") {
		t.Errorf("got %v, want more than 32 tiers", err)
	}
}

func TestPreciseWarnings(t *testing.T) {
	const exact = "\n- type: token-producer\n  parameters: {vllm: {}}\n"
	f := func(t *testing.T, params, tokens string, wants ...string) {
		t.Helper()
		r := newTestRouter(t, newTestFleet(newTestClock()), preciseYAML(params)+tokens)
		all := strings.Join(r.Config().Warnings, "\n")
		for _, want := range wants {
			if !strings.Contains(all, want) {
				t.Errorf("%s: got warnings %q, want %q", params, all, want)
			}
		}
		if len(wants) == 0 && all != "" {
			t.Errorf("%s: got warnings %q, want none", params, all)
		}
	}
	f(t, "{}", exact)
	f(t, "{kvEventsConfig: {topicFilter: 'kv@', podDiscoveryConfig: {podNamespace: x}}}", exact)
	f(t, "{}", "", "estimated tokens match nothing", "vllm")
	f(t, "{tokenProcessorConfig: {blockSize: 32}}", exact, "blockSizeTokens")
	f(t, "{indexerConfig: {kvBlockIndexConfig: {inMemoryConfig: {podCacheSize: 10}}}}", exact, "podCacheSize")
	f(t, "{indexerConfig: {kvBlockIndexConfig: {enableMetrics: true}}}", exact, "enableMetrics")
	f(t, "{indexerConfig: {kvBlockIndexConfig: {metricsLoggingInterval: 5}}}", exact, "metricsLoggingInterval")
	f(t, "{indexerConfig: {kvBlockIndexConfig: {costAwareMemoryConfig: {size: 2GiB}, inMemoryConfig: {size: 5}}}}", exact, "inMemoryConfig has no effect")
	f(t, "{kvEventsConfig: {podDiscoveryConfig: {podLabelSelector: 'a=b'}}}", exact, "podLabelSelector")
	f(t, "{kvEventsConfig: {discoverPods: false}}", exact, "no KV events will come")
	f(t, "{kvEventsConfig: {discoverPods: false, zmqEndpoint: 'tcp://*:5557'}}", exact)
	f(t, "{speculativeTTL: 3s}", exact, "speculativeTTL has no effect")
}

// TestPreciseConfig: every parameter arrives.
func TestPreciseConfig(t *testing.T) {
	f := func(t *testing.T, params string, want KVEventsConfig, shape preciseShape) {
		t.Helper()
		r := newTestRouter(t, newTestFleet(newTestClock()), preciseYAML(params))
		s := r.KVEventSources()
		if len(s) != 1 || s[0].Producer != "precise-prefix-cache-producer" || s[0].Config != want {
			t.Errorf("%s: got %+v, want %+v", params, s, want)
		}
		if got := r.producers[0].Producer.(*preciseProducer).index.shape; !got.same(shape) {
			t.Errorf("%s: got %+v, want %+v", params, got, shape)
		}
	}
	kv := KVEventsConfig{TopicFilter: "kv@", Concurrency: 4, Engine: "vllm", DiscoverPods: true, SocketPort: 5557}
	shape := preciseShape{algorithm: "cbor-fnv", blockTokens: 16, limit: 100_000_000, tiers: "[{gpu 1} {cpu 0.8}]"}
	f(t, "{}", kv, shape)
	f(t, "{tokenProcessorConfig: {blockSizeTokens: 32, blockSize: 8, hashSeed: '42', hashAlgorithm: xxh64}, speculativeIndexing: true}",
		kv, preciseShape{algorithm: "xxh64", seed: "42", blockTokens: 32, limit: 100_000_000, tiers: shape.tiers, guessTTL: int64(2 * time.Second)})
	f(t, "{tokenProcessorConfig: {blockSize: 8}, indexerConfig: {kvBlockIndexConfig: {inMemoryConfig: {size: 7}}, kvCacheBackendConfigs: [{name: CPU, weight: 0.25}]}, speculativeIndexing: true, speculativeTTL: 5s}",
		kv, preciseShape{algorithm: "cbor-fnv", blockTokens: 8, limit: 7, tiers: "[{cpu 0.25}]", guessTTL: int64(5 * time.Second)})
	f(t, "{indexerConfig: {kvBlockIndexConfig: {costAwareMemoryConfig: {size: 1MiB}}}, kvEventsConfig: {zmqEndpoint: 'tcp://*:1', topicFilter: x, concurrency: 1, engineType: sglang, discoverPods: false, podDiscoveryConfig: {podNamespace: n, socketPort: 2, replaySocketPort: 3}}}",
		KVEventsConfig{ZMQEndpoint: "tcp://*:1", TopicFilter: "x", Concurrency: 1, Engine: "sglang", Namespace: "n", SocketPort: 2, ReplayPort: 3},
		preciseShape{algorithm: "cbor-fnv", blockTokens: 16, limit: 1 << 20 / preciseEntryBytes, tiers: shape.tiers})
}

// TestPreciseBesideApprox: two columns; the first scorer's predicts, and each learns from its own.
func TestPreciseBesideApprox(t *testing.T) {
	clock := newTestClock()
	fleet := readyFleet(t, clock, "a", "b")
	r := newTestRouter(t, fleet, `
plugins:
- {type: precise-prefix-cache-producer, name: exact, parameters: {tokenProcessorConfig: {blockSizeTokens: 16}}}
- {type: approx-prefix-cache-producer}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: exact}}
- {type: prefix-cache-scorer, name: guessed}
`)
	x := fleet.precise[0]
	x.Stored(fleet.Endpoints()[1], 0, event(1, 16, count(0, 160)))
	l, err := r.Route(exactRequest("m", "", count(0, 170)))
	if err != nil {
		t.Fatal(err)
	}
	if l.Endpoint.Name() != "b" || l.Matched != 10 || l.Total != 10 || l.PredictedTokens() != 160 {
		t.Errorf("got %s %d/%d, %d tokens, want b 10/10, 160", l.Endpoint.Name(), l.Matched, l.Total, l.PredictedTokens())
	}
	l.Usage(170, 160)
	l.Done(Completed)
	l, err = r.Route(exactRequest("m", "", count(0, 170)))
	if err != nil {
		t.Fatal(err)
	}
	l.Usage(170, 160)
	l.Done(Completed)
	var got []string
	for _, s := range fleet.PredictionStats() {
		got = append(got, fmt.Sprint(s.Producer, s.Endpoint.Name(), s.Answers, s.PredictedTokens, s.CachedTokens, s.AbsoluteError))
	}
	want := []string{fmt.Sprint("exact", "b", 2, 320, 320, 0), fmt.Sprint("approx-prefix-cache-producer", "b", 2, 170, 320, 170)}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestPreciseScorer(t *testing.T) {
	const producer = "- {type: precise-prefix-cache-producer, name: %s, parameters: {tokenProcessorConfig: {blockSizeTokens: 4}}}\n"
	f := func(t *testing.T, name, yaml string, wantErr string, wantWarning string) *Router {
		t.Helper()
		cfg, err := configs.ParseScheduling("test.yaml", []byte(header+"plugins:\n"+yaml))
		if err != nil {
			t.Fatal(err)
		}
		r, err := New(cfg, readyFleet(t, newTestClock(), "a", "b"), 1)
		if wantErr != "" {
			if err == nil || !strings.Contains(err.Error(), wantErr) {
				t.Errorf("%s: got %v, want %q", name, err, wantErr)
			}
			return nil
		}
		if err != nil {
			t.Fatalf("%s: got %v, want a router", name, err)
		}
		if got := strings.Join(r.Config().Warnings, "\n"); !strings.Contains(got, wantWarning) || !strings.Contains(got, "deprecated") {
			t.Errorf("%s: got warnings %q, want %q and that it is deprecated", name, got, wantWarning)
		}
		x := r.fleet.precise[0]
		x.Stored(r.fleet.Endpoints()[1], 0, event(1, 4, count(0, 12)))
		l, err := r.Route(exactRequest("m", "", count(0, 13)))
		if err != nil {
			t.Fatal(err)
		}
		if l.Endpoint.Name() != "b" || l.Matched != 3 || l.PredictedTokens() != 12 {
			t.Errorf("%s: got %s, %d blocks, %d tokens, want b, 3, 12", name, l.Endpoint.Name(), l.Matched, l.PredictedTokens())
		}
		if got, want := len(r.KVEventSources()), 1; got != want {
			t.Errorf("%s: got %d sources of events, want %d", name, got, want)
		}
		return r
	}
	f(t, "bound", fmt.Sprintf(producer, "p")+"- {type: precise-prefix-cache-scorer}\n", "", "deprecated")
	f(t, "bound before it is declared", "- {type: precise-prefix-cache-scorer, parameters: {anything: 1}}\n"+fmt.Sprintf(producer, "p"), "", "those of p count")
	r := f(t, "its own", "- {type: precise-prefix-cache-scorer, parameters: {tokenProcessorConfig: {blockSizeTokens: 4}, indexerConfig: {tokenizersPoolConfig: {modelName: m}}}}\n", "", "tokenizersPoolConfig has no effect")
	if got, want := r.producers[0].name, "precise-prefix-cache-scorer"; got != want {
		t.Errorf("its own: got the producer %s, want %s", got, want)
	}
	f(t, "two producers", fmt.Sprintf(producer, "p")+fmt.Sprintf(producer, "q")+"- {type: precise-prefix-cache-scorer}\n", "several precise-prefix-cache-producer", "")
	f(t, "bad parameters", "- {type: precise-prefix-cache-scorer, parameters: {kvEventsConfig: {engineType: x}}}\n", "engineType", "")
}

// TestPreciseFlood: events and decisions at once; the race detector judges.
func TestPreciseFlood(t *testing.T) {
	p := newPrecise(t, "{tokenProcessorConfig: {blockSizeTokens: 4}, indexerConfig: {kvBlockIndexConfig: {inMemoryConfig: {size: 20000}}}, speculativeIndexing: true}", "a", "b", "c", "d")
	x, endpoints := p.index(), p.fleet.Endpoints()
	var wg sync.WaitGroup
	for i, e := range endpoints {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 3))
			for n := range 400 {
				base := uint64(r.IntN(50)) * 100
				switch r.IntN(12) {
				case 0:
					x.Cleared(e, n%2)
				case 1:
					x.Incomplete(e, n%2, "gap")
				case 2, 3, 4:
					x.Removed(e, n%2, gone("", 0, base+1, base+2, base+3))
				default:
					x.Stored(e, n%2, event(base+1, 4, count(int(base), 200)))
				}
			}
		})
	}
	wg.Go(func() {
		for i := range 200 {
			p.fleet.Update(specs("a", "b", "c", "d")[:3+i%2])
			p.fleet.PreciseStats()
			p.fleet.IndexStats()
		}
	})
	r := rand.New(rand.NewPCG(9, 9))
	for range 400 {
		l, err := p.router.Route(exactRequest("m", "", count(100*r.IntN(50), 100)))
		if err != nil {
			t.Fatal(err)
		}
		l.Usage(100, 50)
		l.Done(Outcome(r.IntN(4)))
	}
	wg.Wait()
	for _, e := range p.fleet.Endpoints() {
		for rank := range 2 {
			x.Cleared(e, rank)
		}
	}
	x.expire(p.clock.now().Add(time.Hour).UnixNano(), 1<<30)
	if got := x.held.Distinct(); got != 0 {
		t.Errorf("after all were cleared: got %d keys, want 0", got)
	}
}

// TestPreciseAllocates: decisions allocate nothing, events next to nothing.
func TestPreciseAllocates(t *testing.T) {
	p := newPrecise(t, "{speculativeIndexing: true}", "a", "b", "c", "d")
	x := p.index()
	events := make([]*BlockStored, 64)
	for i := range events {
		events[i] = event(uint64(1000*i+1), 16, count(10_000*i, 2048))
		for _, e := range p.fleet.Endpoints() {
			x.Stored(e, 0, events[i])
		}
	}
	req := exactRequest("m", "salt", count(20_000, 2060))
	route := func() {
		req.work.hashedBy = nil // hash again
		l, err := p.router.Route(req)
		if err != nil {
			t.Fatal(err)
		}
		l.Usage(2060, 0)
		l.Done(Completed)
	}
	for range 100 {
		route()
	}
	if got := testing.AllocsPerRun(200, route); got != 0 {
		t.Errorf("a decision: got %v allocations, want 0", got)
	}
	i := 0
	a, rm := p.endpoint("a"), &BlockRemoved{}
	churn := func() {
		b := events[i%len(events)]
		rm.Hashes = b.Hashes
		x.Removed(a, 0, rm)
		x.Stored(a, 0, b)
		i++
	}
	for range 200 {
		churn()
	}
	if got := testing.AllocsPerRun(200, churn); got != 0 {
		t.Errorf("an event of 128 blocks: got %v allocations, want 0", got)
	}
}

// TestPreciseMemory: costAwareMemoryConfig is a bound on the memory, with no block in common.
func TestPreciseMemory(t *testing.T) {
	const size = 8 << 20
	p := newPrecise(t, fmt.Sprintf("{tokenProcessorConfig: {blockSizeTokens: 4, hashAlgorithm: xxh64}, indexerConfig: {kvBlockIndexConfig: {costAwareMemoryConfig: {size: %dMiB}}}}", size>>20), "a", "b", "c")
	x := p.index()
	empty := p.fleet.IndexStats()[0].Bytes
	for i := range 1000 {
		for k, e := range p.fleet.Endpoints() {
			x.Stored(e, 0, event(uint64(1000*i+1), 4, count(100_000*i+30_000_000*k, 400)))
		}
	}
	s := p.fleet.IndexStats()[0]
	if s.Bytes-empty > size {
		t.Errorf("got %d bytes for %d blocks, want at most %d", s.Bytes-empty, s.Blocks, size)
	}
	if want := size / preciseEntryBytes * 9 / 10; s.Blocks < want {
		t.Errorf("got %d blocks, want at least %d", s.Blocks, want)
	}
}

// TestSeedPrecise: an explanation against a saved fleet may say what replicas hold.
func TestSeedPrecise(t *testing.T) {
	p := newPrecise(t, preciseBlock4, "a", "b")
	if err := p.router.Seed(exactRequest("m", "", count(0, 13)), p.endpoint("b"), 2); err != nil {
		t.Fatal(err)
	}
	ex, err := p.router.Explain(exactRequest("m", "", count(0, 13)))
	if err != nil {
		t.Fatal(err)
	}
	if ex.Winner != "b" || ex.Replicas[1].Match != 2 {
		t.Errorf("got the winner %s with %d blocks, want b with 2", ex.Winner, ex.Replicas[1].Match)
	}
}
