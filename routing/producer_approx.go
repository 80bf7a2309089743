package routing

import (
	"fmt"
	"math"
	"slices"

	"go.uber.org/zap"

	"kvgate/kvindex"
)

// approxProducer believes that an endpoint holds what was sent to it, as far as
// its cache is large: hashes of the prompt's blocks in an LRU per endpoint.
type approxProducer struct {
	fleet    *Fleet
	store    *prefixIndex
	autoTune bool
	cluster  bool // an endpoint is a cluster
	block    int  // configured tokens per block
	maxBlock int  // blocks per prompt when maxToken is 0; 0 = unlimited
	maxToken int  // tokens per prompt; 0 = maxBlock counts
	capacity int  // blocks per endpoint when nothing better is known

	active  []uint64 // scratch: slots of the candidates
	matched []int32  // scratch: by slot
}

type approxParams struct {
	AutoTune    bool `json:"autoTune"`
	BlockTokens int  `json:"blockSizeTokens"`
	Block       int  `json:"blockSize"` // deprecated name
	MaxBlocks   int  `json:"maxPrefixBlocksToMatch"`
	MaxTokens   int  `json:"maxPrefixTokensToMatch"`
	LRUCapacity int  `json:"lruCapacityPerServer"`
}

// Sizes of the approximate index, the same as llm-d's.
const (
	minBlockTokens    = 64
	defaultBlock      = 16
	defaultLRU        = 31250
	defaultMaxBlocks  = 2048
	defaultMaxTokens  = 131072
	bytesPerToken     = 4
	indexPlacementKey = 0x9e3779b97f4a7c15
)

func newApproxProducer(b *builder) (any, error) {
	p := approxParams{AutoTune: true, BlockTokens: defaultBlock, MaxBlocks: defaultMaxBlocks, MaxTokens: defaultMaxTokens, LRUCapacity: defaultLRU}
	if err := b.params(&p); err != nil {
		return nil, err
	}
	if p.Block > 0 && p.BlockTokens == defaultBlock {
		b.warn("blockSize is deprecated: write blockSizeTokens")
		p.BlockTokens = p.Block
	}
	switch {
	case !p.AutoTune && p.BlockTokens <= 0:
		return nil, b.problem("give a number of tokens above 0, or leave autoTune on", fmt.Sprintf("blockSizeTokens %d with autoTune off", p.BlockTokens))
	case p.MaxTokens < 0:
		return nil, b.problem("0 switches the cap off", fmt.Sprintf("maxPrefixTokensToMatch %d is negative", p.MaxTokens))
	case p.MaxBlocks < 0:
		return nil, b.problem("0 switches the cap off", fmt.Sprintf("maxPrefixBlocksToMatch %d is negative", p.MaxBlocks))
	}
	if p.LRUCapacity <= 0 {
		p.LRUCapacity = defaultLRU
	}
	a := &approxProducer{
		fleet: b.fleet, autoTune: p.AutoTune, cluster: b.spec.Type == clusterProducer, block: p.BlockTokens,
		maxBlock: p.MaxBlocks, maxToken: p.MaxTokens, capacity: p.LRUCapacity,
	}
	a.store = b.fleet.prefixIndex(b.spec.Name, a.blockTokens(), b.seed)
	return a, nil
}

// prefixIndex returns the index of a producer, kept over reloads.
func (f *Fleet) prefixIndex(producer string, blockTokens int, seed uint64) *prefixIndex {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range f.indexes {
		if x.producer == producer {
			return x
		}
	}
	x := &prefixIndex{producer: producer, blockTokens: blockTokens, index: kvindex.New(seed ^ indexPlacementKey)}
	f.indexes = append(f.indexes, x)
	return x
}

// keepIndexes drops the indexes of producers that are gone.
func (f *Fleet) keepIndexes(producers []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.indexes = slices.DeleteFunc(f.indexes, func(x *prefixIndex) bool { return !slices.Contains(producers, x.producer) })
	f.predictions = slices.DeleteFunc(f.predictions, func(p *predictions) bool { return !slices.Contains(producers, p.producer) })
	f.bursts = slices.DeleteFunc(f.bursts, func(c *burstCounts) bool { return !slices.Contains(producers, c.producer) })
}

// blockTokens returns the block size in force: the engine's, at least 64.
func (a *approxProducer) blockTokens() int {
	block := a.block
	if a.autoTune {
		if n := a.fleet.view.Load().engineBlockTokens(); n > 0 {
			block = n
		}
	}
	return max(block, minBlockTokens)
}

// maxBlocks returns the cap of one prompt in blocks; 0 = unlimited, -1 = nothing.
func (a *approxProducer) maxBlocks(block int) int {
	if a.maxToken > 0 {
		if n := a.maxToken / block; n > 0 {
			return n
		}
		return -1
	}
	return a.maxBlock
}

func (a *approxProducer) Prepare(r *Request, ch *chain) {
	ch.blockTokens = a.blockTokens()
	limit := a.maxBlocks(ch.blockTokens)
	if limit >= 0 {
		r.hashBlocks(ch, ch.blockTokens, limit)
	}
}

// hashBlocks appends the chained hashes of the request's prompts to ch, of at most
// limit blocks of each; 0 = unlimited.
func (r *Request) hashBlocks(ch *chain, blockTokens, limit int) {
	if r.given != nil {
		n := len(r.given)
		if limit > 0 {
			n = min(n, limit)
		}
		ch.hashes, ch.ends = append(ch.hashes, r.given[:n]...), append(ch.ends, n)
		return
	}
	if len(r.Tokens) == 0 {
		return
	}
	seed := kvindex.Seed(r.Model, r.Salt)
	if r.memoed(blockTokens * bytesPerToken) {
		ch.hashes = r.appendChain(ch.hashes, seed, limit)
		ch.ends = append(ch.ends, len(ch.hashes))
		return
	}
	start := 0
	for _, end := range r.Ends {
		ch.hashes = kvindex.AppendChain(ch.hashes, seed, r.content()[start:end], blockTokens*bytesPerToken, limit)
		ch.ends = append(ch.ends, len(ch.hashes))
		start = end
	}
}

func (a *approxProducer) Match(r *Request, ch *chain, c []Candidate, col *Column) {
	if block := a.blockTokens(); block != ch.blockTokens {
		// The fleet's block size changed between hashing and now.
		ch.reset()
		a.Prepare(r, ch)
	}
	if a.store.blockTokens != ch.blockTokens {
		a.fleet.log.Info("prefix block size changed: the index starts anew",
			zap.String("producer", a.store.producer), zap.Int("from_tokens", a.store.blockTokens), zap.Int("to_tokens", ch.blockTokens))
		a.store.index.Reset()
		a.store.blockTokens = ch.blockTokens
		a.store.resets.Add(1)
	}
	col.Total, col.BlockTokens = len(ch.hashes), ch.blockTokens
	if len(ch.hashes) == 0 {
		return
	}
	slots := len(a.fleet.slots)
	a.matched = slices.Grow(a.matched[:0], slots)[:slots]
	clear(a.matched)
	pages := (slots + 63) / 64
	start := 0
	for _, end := range ch.ends {
		a.active = slices.Grow(a.active[:0], pages)[:pages]
		clear(a.active)
		for i := range c {
			slot := c[i].slot
			a.active[slot/64] |= 1 << (slot % 64)
		}
		a.store.index.Match(ch.hashes[start:end], a.active, a.matched)
		start = end
	}
	for row := range c {
		col.Matched[row] = a.matched[c[row].slot]
	}
}

func (a *approxProducer) Picked(r *Request, ch *chain, e *Endpoint) {
	a.fit(r, e)
	ch.held = ch.held[:0]
	start := 0
	for _, end := range ch.ends {
		ch.held = append(ch.held, a.store.index.Record(e.slot, ch.hashes[start:end]))
		start = end
	}
}

func (a *approxProducer) Undo(_ *Request, ch *chain, e *Endpoint) {
	for i := len(ch.held) - 1; i >= 0; i-- { // the prompts of a batch may have a head in common
		start := 0
		if i > 0 {
			start = ch.ends[i-1]
		}
		a.store.index.Forget(e.slot, ch.hashes[start:ch.ends[i]], ch.held[i])
	}
	ch.held = ch.held[:0]
}

// Learning an endpoint's capacity from what its engine says of every answered
// prompt. The factor on the told (or configured) capacity moves by learnGain
// times the part of the prompt that was predicted wrongly: down for blocks that
// the engine had dropped, up for blocks that it still held. Blocks that were held
// as predicted bring a factor below 1 back by learnKept of that, so that it
// settles where about one block in 1/learnKept is wrong: with the true capacity
// it is one in 30 to 200, with a quarter more one in five to 15
// (docs/routing-quality.md).
const (
	learnGain             = 0.05
	learnKept             = 0.03
	learnSlack            = 2 // blocks: the engine's blocks and ours do not end at the same places
	learnLeast, learnMost = 1.0 / 16, 16.0
)

// Told corrects the capacity of the endpoint's LRU.
func (a *approxProducer) Told(ch *chain, e *Endpoint, matched int, cached float64) {
	blocks := float64(len(ch.hashes))
	if !a.autoTune || blocks <= learnSlack {
		return
	}
	for len(a.store.learned) <= e.slot {
		a.store.learned = append(a.store.learned, learnedCapacity{})
	}
	l := &a.store.learned[e.slot]
	if l.endpoint != e {
		*l = learnedCapacity{endpoint: e, factor: 1}
	}
	expected, held := float64(matched), min(max(cached, 0), 1)*blocks
	most := learnMost
	wrong := held - expected
	if math.Abs(wrong) <= learnSlack || wrong > 0 && !a.full(e) {
		wrong = 0
		most = max(l.factor, 1)
	}
	if l.factor < 1 {
		wrong += learnKept * min(expected, held)
	}
	l.factor = min(max(l.factor*(1+learnGain*wrong/blocks), learnLeast), most)
}

// full reports whether the endpoint's LRU evicts, about. While it does not, what
// the engine holds and the index lacks was not evicted here: others sent it, or
// the index has forgotten it for other reasons.
func (a *approxProducer) full(e *Endpoint) bool {
	return 16*a.store.index.Len(e.slot) >= 15*a.store.index.Capacity(e.slot)
}

// learnedCapacity is the correction of one endpoint's capacity.
type learnedCapacity struct {
	endpoint *Endpoint
	factor   float64
}

// fit sizes the endpoint's LRU: its cache in tokens over our block size, times
// what was learned. llm-d takes the engine's number of blocks for ours, four
// times too many with 16-token blocks. A block of estimated tokens has as many of
// the engine's as were learned for the model.
func (a *approxProducer) fit(r *Request, e *Endpoint) {
	want := a.capacity
	if a.autoTune {
		if o := e.Observation(); o != nil && o.CapacityTokens > 0 {
			// In eighths, so that the capacity does not move with every answer.
			ratio := max(1, math.Round(8*bytesPerToken/a.fleet.ratioOf(r.Model).bytesPer())) / 8
			want = max(1, int(float64(o.CapacityTokens)/(ratio*float64(a.store.blockTokens))))
		}
		if e.slot < len(a.store.learned) && a.store.learned[e.slot].endpoint == e {
			want = max(1, int(float64(want)*a.store.learned[e.slot].factor))
		}
	}
	if a.store.index.Capacity(e.slot) != want {
		a.store.index.SetCapacity(e.slot, want)
	}
}

// IndexStats describes one index for metrics and the fleet view.
type IndexStats struct {
	Producer    string
	BlockTokens int
	Blocks      int   // (endpoint, block) entries
	Bytes       int64 // memory, approximately
	Resets      int64
}

// IndexStats returns the state of every index.
func (f *Fleet) IndexStats() []IndexStats {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]IndexStats, 0, len(f.indexes))
	for _, x := range f.indexes {
		out = append(out, IndexStats{x.producer, x.blockTokens, x.index.Total(), x.index.Bytes(), x.resets.Load()})
	}
	for _, x := range f.precise {
		blocks, bytes := x.size()
		out = append(out, IndexStats{Producer: x.producer, BlockTokens: x.keys.BlockTokens(), Blocks: blocks, Bytes: bytes})
	}
	return out
}

// IndexBlocks returns the blocks that the indexes hold for an endpoint.
func (f *Fleet) IndexBlocks(e *Endpoint) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	if e.gone.Load() {
		return 0
	}
	for _, x := range f.indexes {
		n += x.index.Len(e.slot)
	}
	for _, x := range f.precise {
		s, _ := x.stats(e)
		n += s.Blocks
	}
	return n
}
