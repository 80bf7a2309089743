package routing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"kvgate/configs"
	"kvgate/kvindex"
)

// preciseProducer believes what the engines tell of their caches: the keys of
// the prompt's full blocks, made of real tokens, in a preciseIndex. Without the
// engine's own token ids (Request.Exact) it knows nothing.
type preciseProducer struct {
	fleet *Fleet
	index *preciseIndex
	kv    KVEventsConfig
}

type preciseParams struct {
	Tokens struct {
		BlockTokens int    `json:"blockSizeTokens"`
		Block       int    `json:"blockSize"` // deprecated name
		Seed        string `json:"hashSeed"`
		Algorithm   string `json:"hashAlgorithm"`
	} `json:"tokenProcessorConfig"`
	Indexer struct {
		Index struct {
			Memory struct {
				Size int `json:"size"`
				Pods int `json:"podCacheSize"`
			} `json:"inMemoryConfig"`
			Cost            configs.Params `json:"costAwareMemoryConfig"`
			Redis           configs.Params `json:"redisConfig"`
			Valkey          configs.Params `json:"valkeyConfig"`
			Metrics         bool           `json:"enableMetrics"`
			MetricsInterval int64          `json:"metricsLoggingInterval"`
		} `json:"kvBlockIndexConfig"`
		Tiers []struct {
			Name   string           `json:"name"`
			Weight float64          `json:"weight"`
			Pos    configs.Position `json:"-"`
		} `json:"kvCacheBackendConfigs"`
		Tokenizers configs.Params `json:"tokenizersPoolConfig"`
	} `json:"indexerConfig"`
	Events struct {
		ZMQEndpoint string `json:"zmqEndpoint"`
		TopicFilter string `json:"topicFilter"`
		Concurrency int    `json:"concurrency"`
		Engine      string `json:"engineType"`
		Discover    bool   `json:"discoverPods"`
		Pods        struct {
			Selector   string `json:"podLabelSelector"`
			Namespace  string `json:"podNamespace"`
			SocketPort int    `json:"socketPort"`
			ReplayPort int    `json:"replaySocketPort"`
		} `json:"podDiscoveryConfig"`
	} `json:"kvEventsConfig"`
	Speculative    bool          `json:"speculativeIndexing"`
	SpeculativeTTL time.Duration `json:"speculativeTTL"`
}

// Defaults of the precise producer, the same as llm-d's, and what an entry costs.
const (
	preciseProducerType = "precise-prefix-cache-producer"
	preciseScorerType   = "precise-prefix-cache-scorer"

	defaultPreciseSize = 100_000_000
	defaultPodCache    = 10
	maxPreciseSize     = 1 << 31
	maxPreciseTiers    = 32
	// preciseEntryBytes is the most that an entry takes when no two replicas share
	// one: a record with a place in its table, an entry of the holder map, each with
	// room to grow. See TestPreciseMemory.
	preciseEntryBytes = 160
)

func newPreciseProducer(b *builder) (any, error) { return b.precise(false) }

// precise makes a producer of the plugin's parameters. ownTokenizer says that
// tokenizersPoolConfig, which only the deprecated scorer takes, is accepted.
func (b *builder) precise(ownTokenizer bool) (*preciseProducer, error) {
	p := preciseParams{SpeculativeTTL: 2 * time.Second}
	p.Indexer.Index.Memory.Size, p.Indexer.Index.Memory.Pods = defaultPreciseSize, defaultPodCache
	e := &p.Events
	e.TopicFilter, e.Concurrency, e.Engine, e.Discover, e.Pods.SocketPort = "kv@", 4, "vllm", true, 5557
	if err := b.params(&p); err != nil {
		return nil, err
	}
	var problems configs.Problems
	at := func(path, remedy, format string, args ...any) {
		problems.Add(b.spec.Parameters.At(path).Problem(remedy, b.spec.Name+": "+format, args...))
	}
	keys := b.preciseKeys(&p, at)
	limit := b.preciseLimit(&p, at)
	tiers, levels, described := preciseTiers(&p, at)
	kv := b.preciseEvents(&p, at)
	if !p.Indexer.Tokenizers.IsZero() {
		if ownTokenizer {
			b.warn("tokenizersPoolConfig has no effect: tokens come from the token-producer")
		} else {
			at("indexerConfig.tokenizersPoolConfig", "remove it and declare a token-producer with vllm.url", "tokenizersPoolConfig is not accepted here")
		}
	}
	if p.SpeculativeTTL <= 0 || p.SpeculativeTTL > time.Hour {
		at("speculativeTTL", "use a time above 0, such as 2s", "speculativeTTL %v is out of range", p.SpeculativeTTL)
	}
	if err := problems.Err(); err != nil {
		return nil, err
	}
	ttl := int64(0)
	if p.Speculative {
		ttl = int64(p.SpeculativeTTL)
	} else if b.spec.Parameters.Has("speculativeTTL") {
		b.warn("speculativeTTL has no effect without speculativeIndexing")
	}
	shape := preciseShape{
		algorithm: p.Tokens.Algorithm, seed: p.Tokens.Seed, blockTokens: keys.BlockTokens(),
		limit: limit, tiers: described, guessTTL: ttl, seedOfPlaces: b.seed ^ indexPlacementKey,
	}
	return &preciseProducer{fleet: b.fleet, kv: kv, index: b.fleet.preciseIndex(b.spec.Name, shape, keys, tiers, levels)}, nil
}

// problemAt reports what is wrong with a parameter, and what to do about it.
type problemAt func(path, remedy, format string, args ...any)

func (b *builder) preciseKeys(p *preciseParams, at problemAt) kvindex.Keys {
	block, path := p.Tokens.BlockTokens, "tokenProcessorConfig.blockSizeTokens"
	switch has := b.spec.Parameters.Has(path); {
	case has && block <= 0, !has && p.Tokens.Block < 0:
		if !has {
			block, path = p.Tokens.Block, "tokenProcessorConfig.blockSize"
		}
		at(path, "use the engine's block size, 16 unless it was set", "%d tokens per block", block)
		return kvindex.Keys{}
	case block == 0 && p.Tokens.Block > 0:
		b.warn("tokenProcessorConfig.blockSize is deprecated: write blockSizeTokens")
		block = p.Tokens.Block
	case block == 0:
		block = defaultBlock
	}
	switch p.Tokens.Algorithm {
	case "":
		p.Tokens.Algorithm = kvindex.CBORFNV
	case kvindex.CBORFNV, kvindex.XXH64:
	default:
		at("tokenProcessorConfig.hashAlgorithm", "use cbor-fnv or xxh64", "hashAlgorithm %q is unknown", p.Tokens.Algorithm)
		return kvindex.Keys{}
	}
	keys, err := kvindex.NewKeys(p.Tokens.Algorithm, p.Tokens.Seed, block)
	if err != nil {
		at(path, "use the engine's block size, 16 unless it was set", "%v", err)
	}
	return keys
}

// preciseLimit returns how many keys the index may hold.
func (b *builder) preciseLimit(p *preciseParams, at problemAt) int {
	const path = "indexerConfig.kvBlockIndexConfig."
	x := &p.Indexer.Index
	for _, r := range []struct {
		name   string
		params configs.Params
	}{{"redisConfig", x.Redis}, {"valkeyConfig", x.Valkey}} {
		if b.spec.Parameters.Has(path + r.name) {
			at(path+r.name, "remove it: every gateway keeps its own index in memory, from the same events", "%s: an index outside of the process is not supported", r.name)
		}
	}
	if x.Metrics || x.MetricsInterval != 0 {
		b.warn("enableMetrics and metricsLoggingInterval have no effect: the index is always in the metrics")
	}
	if b.spec.Parameters.Has(path + "inMemoryConfig.podCacheSize") {
		b.warn("podCacheSize has no effect: every replica that holds a block is kept")
		if x.Memory.Pods <= 0 {
			at(path+"inMemoryConfig.podCacheSize", "remove it", "podCacheSize %d is out of range", x.Memory.Pods)
		}
	}
	if b.spec.Parameters.Has(path + "costAwareMemoryConfig") {
		if b.spec.Parameters.Has(path + "inMemoryConfig") {
			b.warn("inMemoryConfig has no effect beside costAwareMemoryConfig")
		}
		cost := struct {
			Size configs.Size `json:"size"`
		}{}
		if err := x.Cost.Decode(&cost); err != nil {
			b.fail(err)
			return 1
		}
		const least = 1 << 20
		if cost.Size < least {
			at(path+"costAwareMemoryConfig.size", "give the memory that the index may take, such as 2GiB", "size %v is below 1MiB", cost.Size)
			return 1
		}
		return int(min(int64(cost.Size)/preciseEntryBytes, maxPreciseSize))
	}
	if x.Memory.Size <= 0 || x.Memory.Size > maxPreciseSize {
		at(path+"inMemoryConfig.size", fmt.Sprintf("give a number of blocks, at most %d", maxPreciseSize), "size %d is out of range", x.Memory.Size)
	}
	return x.Memory.Size
}

// preciseTiers returns the weights of the tiers, their different values with
// that of the gpu first, and all of it as a string that can be compared.
func preciseTiers(p *preciseParams, at problemAt) (tiers []tierWeight, levels []float64, described string) {
	tiers = []tierWeight{{"gpu", 1}, {"cpu", 0.8}}
	if len(p.Indexer.Tiers) > 0 {
		tiers = nil
	}
	for i, t := range p.Indexer.Tiers {
		path := fmt.Sprintf("indexerConfig.kvCacheBackendConfigs[%d]", i)
		name := strings.ToLower(t.Name)
		switch {
		case name == "" || len(name) > maxTierName:
			at(path+".name", "name the tier as the engine's events do: gpu, cpu", "a tier needs a name of at most %d bytes", maxTierName)
		case slices.ContainsFunc(tiers, func(x tierWeight) bool { return x.name == name }):
			at(path+".name", "remove one of them", "tier %s is there twice", name)
		case t.Weight < 0 || t.Weight > 1:
			at(path+".weight", "use a value from 0 to 1", "the weight %v of tier %s is out of range", t.Weight, name)
		case i == maxPreciseTiers:
			at(path, "remove those that the engine does not have", "more than %d tiers", maxPreciseTiers)
			return tiers, []float64{1}, ""
		}
		tiers = append(tiers, tierWeight{name, t.Weight})
	}
	levels = []float64{1} // of a tier without a weight, and of the gpu when it has none
	for _, t := range tiers {
		if t.name == "gpu" {
			levels[0] = t.weight
		}
	}
	for _, w := range append([]tierWeight{{"", 1}}, tiers...) {
		if !slices.Contains(levels, w.weight) {
			levels = append(levels, w.weight)
		}
	}
	return tiers, levels, fmt.Sprint(tiers)
}

func (b *builder) preciseEvents(p *preciseParams, at problemAt) KVEventsConfig {
	e := &p.Events
	const path = "kvEventsConfig."
	if e.Concurrency <= 0 {
		at(path+"concurrency", "use a number of at least 1", "concurrency %d is out of range", e.Concurrency)
	}
	if e.Engine != "vllm" && e.Engine != "sglang" {
		at(path+"engineType", "use vllm or sglang", "engineType %q is unknown", e.Engine)
	}
	ports := []struct {
		name  string
		value int
		least int
	}{{"socketPort", e.Pods.SocketPort, 1}, {"replaySocketPort", e.Pods.ReplayPort, 0}}
	for _, q := range ports {
		if q.value < q.least || q.value > 65535 {
			at(path+"podDiscoveryConfig."+q.name, fmt.Sprintf("use a port from %d to 65535", q.least), "%s %d is out of range", q.name, q.value)
		}
	}
	if e.Pods.Selector != "" {
		b.warn("podLabelSelector has no effect: events are read of every replica; those that publish none cost nothing")
	}
	if !e.Discover && e.ZMQEndpoint == "" {
		b.warn("no KV events will come: discoverPods is off and zmqEndpoint is empty")
	}
	return KVEventsConfig{
		ZMQEndpoint: e.ZMQEndpoint, TopicFilter: e.TopicFilter, Concurrency: e.Concurrency, Engine: e.Engine,
		DiscoverPods: e.Discover, Namespace: e.Pods.Namespace, SocketPort: e.Pods.SocketPort, ReplayPort: e.Pods.ReplayPort,
	}
}

// preciseIndex returns the index of a producer, the one before a reload when it
// was made alike.
func (f *Fleet) preciseIndex(producer string, shape preciseShape, keys kvindex.Keys, tiers []tierWeight, levels []float64) *preciseIndex {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range f.precise {
		if x.producer == producer && x.shape.same(shape) {
			return x
		}
	}
	x := newPreciseIndex(producer, shape, keys, tiers, levels, f.log)
	for slot, e := range f.slots {
		if e != nil {
			x.join(e, slot)
		}
	}
	f.precise = append(f.precise, x)
	return x
}

// keepPrecise drops the indexes that the router in force does not use.
func (f *Fleet) keepPrecise(used []*preciseIndex) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.precise = slices.DeleteFunc(f.precise, func(x *preciseIndex) bool { return !slices.Contains(used, x) })
}

func (p *preciseProducer) events() (KVEventsConfig, KVEvents) { return p.kv, p.index }

func (p *preciseProducer) preciseIndex() *preciseIndex { return p.index }

// Prepare makes the keys of every prompt's full blocks.
func (p *preciseProducer) Prepare(r *Request, ch *chain) {
	ch.blockTokens = p.index.keys.BlockTokens()
	if !r.Exact {
		return
	}
	keys := &p.index.keys
	model := keys.Model(r.Model)
	start := 0
	for i, end := range r.Ends {
		ch.extras = r.extrasOf(ch.extras[:0], i, ch.blockTokens)
		ch.hashes = r.appendKeys(keys, ch.hashes, model, r.Tokens[start:end], ch.extras)
		ch.ends = append(ch.ends, len(ch.hashes))
		start = end
	}
}

// Match fills the column: matched blocks weigh what their best tier weighs, and
// the prediction counts them all.
func (p *preciseProducer) Match(r *Request, ch *chain, c []Candidate, col *Column) {
	col.Total, col.BlockTokens = len(ch.hashes), ch.blockTokens
	x := p.index
	x.lock()
	defer x.mu.Unlock()
	x.expireSome(p.fleet.now().UnixNano())
	if len(ch.hashes) > 0 && len(c) > 0 {
		x.activate(c, preciseRows{&c[0], len(c), p.fleet.pinned.made})
		x.match(r, ch, c, col)
	}
}

// match walks the prompts. The caller holds mu.
//
// A rank's score is the sum of the weights of the best tiers of the contiguous
// blocks from the first. vLLM computes the last token always, and whole blocks:
// of T tokens at most (T-1)/E blocks of E tokens come from its cache.
func (x *preciseIndex) match(r *Request, ch *chain, c []Candidate, col *Column) {
	n := len(x.columns)
	x.runs = grown(x.runs, n)
	x.walked = nil
	if len(ch.ends) == 1 {
		x.walked = ch
		if x.alike > 0 && x.levels[0] == 1 && !x.lowerHeld() { // all that follows comes down to this
			x.walk(ch.hashes)
			x.gather(col.Matched)
			col.tokens, col.engineBlock = r.Ends[0]/bytesPerToken, x.alike
			return
		}
	}
	col.Cached = grown(col.Cached, len(col.Matched))
	x.score, x.cached = grown(x.score, n), grown(x.cached, n)
	clear(x.score)
	clear(x.cached)
	start, first := 0, 0
	for i, end := range ch.ends {
		hashes, tokens := ch.hashes[start:end], (r.Ends[i]-first)/bytesPerToken
		start, first = end, r.Ends[i]
		longest := x.walk(hashes)
		for column, run := range x.runs {
			if run > 0 {
				x.score[column] += x.levels[0] * float64(run)
				x.cached[column] += capped(int(run)*ch.blockTokens, tokens, cmp.Or(x.columns[column].block, ch.blockTokens))
			}
		}
		x.weigh(hashes[:longest])
	}
	for row, column := range x.rows {
		if column >= 0 {
			col.Matched[row], col.Cached[row] = whole(x.score[column]), x.cached[column]
			continue
		}
		best := -1.0
		col.Cached[row] = 0
		for _, rank := range x.ranks(c[row].Endpoint) {
			if rank != nil && x.score[rank.column] > best+1e-9 {
				best = x.score[rank.column]
				col.Matched[row], col.Cached[row] = whole(best), x.cached[rank.column]
			}
		}
	}
}

// walk sets runs, by column, to how many of a prompt's first blocks it holds, and returns the most.
func (x *preciseIndex) walk(hashes []uint64) int {
	x.active = append(x.active[:0], x.asked...)
	clear(x.runs)
	return x.held.Walk(hashes, x.active, x.runs)
}

// gather sets matched, by row, to the runs of the candidates' columns.
func (x *preciseIndex) gather(matched []int32) {
	runs := x.runs // what a thousand turns need is in registers
	matched = matched[:len(x.rows)]
	for row, column := range x.rows {
		matched[row] = runs[column]
	}
}

// whole returns the blocks that a score counts: a sum of tenths may come out just below the number that it is.
func whole(score float64) int32 { return int32(score + 1e-6) }

// lowerHeld reports whether the best tier of some block is not the gpu.
func (x *preciseIndex) lowerHeld() bool {
	for _, l := range x.lower {
		if l.Distinct() > 0 {
			return true
		}
	}
	return false
}

// activate finds the columns of the candidates, unless it has done so for the same ones.
func (x *preciseIndex) activate(c []Candidate, of preciseRows) {
	if x.rowsOf == of {
		return
	}
	x.rowsOf = of
	x.rows, x.asked = grown(x.rows, len(c)), grown(x.asked, (len(x.columns)+63)/64)
	clear(x.asked)
	x.alike = -1
	ask := func(column int) {
		x.asked[column/64] |= 1 << (column % 64)
		if block := cmp.Or(x.columns[column].block, x.keys.BlockTokens()); x.alike < 0 {
			x.alike = block
		} else if block != x.alike {
			x.alike = 0
		}
	}
	for k := range c {
		e := c[k].Endpoint
		if s := x.slotOf(e); s != nil && !s.several {
			x.rows[k] = s.column
			ask(int(s.column))
			continue
		}
		x.rows[k], x.alike = -1, 0
		for _, rank := range x.ranks(e) {
			if rank != nil {
				ask(rank.column)
			}
		}
	}
}

// slotOf returns what is known of an endpoint, nil when the index is of a router
// that a reload has replaced and the endpoint came later.
func (x *preciseIndex) slotOf(e *Endpoint) *preciseSlot {
	if e.slot < len(x.bySlot) && x.bySlot[e.slot].endpoint == e {
		return &x.bySlot[e.slot]
	}
	return nil
}

// weigh corrects the scores for blocks whose best tier is not the gpu.
func (x *preciseIndex) weigh(hashes []uint64) {
	for i, l := range x.lower {
		if l.Distinct() == 0 {
			continue
		}
		x.counts = grown(x.counts, len(x.runs))
		clear(x.counts)
		l.Tally(hashes, x.runs, x.counts)
		for column, count := range x.counts {
			x.score[column] += (x.levels[i+1] - x.levels[0]) * float64(count)
		}
	}
}

// capped returns how many of a prompt's tokens come from the cache when so many are in it.
func capped(held, tokens, block int) int64 {
	held = min(held, tokens-1)
	return int64(held - held%block)
}

// ranks returns the ranks of an endpoint, see slotOf.
func (x *preciseIndex) ranks(e *Endpoint) []*preciseRank {
	if s := x.slotOf(e); s != nil {
		return s.member.ranks
	}
	return nil
}

// grown returns a slice of n elements, the old one when it is large enough.
func grown[T any](s []T, n int) []T { return slices.Grow(s[:0], n)[:n] }

// Picked expects what was just sent to be held soon.
func (p *preciseProducer) Picked(_ *Request, ch *chain, e *Endpoint) {
	x := p.index
	ch.fresh = ch.fresh[:0]
	if x.shape.guessTTL == 0 || len(ch.hashes) == 0 {
		return
	}
	x.lock()
	defer x.mu.Unlock()
	now := p.fleet.now().UnixNano()
	for _, rank := range x.ranks(e) {
		if rank != nil && x.guesses.total+len(ch.hashes) <= maxGuesses {
			n := 0
			if x.walked == ch && rank.column < len(x.runs) {
				n = int(x.runs[rank.column])
			}
			ch.fresh = x.guess(now, rank.column, n, ch.hashes, ch.fresh)
		}
	}
}

// seed implements seeder.
func (p *preciseProducer) seed(ch *chain, e *Endpoint) {
	p.index.lock()
	defer p.index.mu.Unlock()
	p.index.held.Resume(0)
	for _, key := range ch.hashes {
		p.index.set(blockOp{key, 0}, p.index.ranks(e)[0].column)
	}
}

// Undo takes back what Picked expected.
func (p *preciseProducer) Undo(_ *Request, ch *chain, e *Endpoint) {
	x := p.index
	x.lock()
	defer x.mu.Unlock()
	for _, rank := range x.ranks(e) {
		if rank != nil {
			x.unguess(rank.column, ch.fresh)
		}
	}
	ch.fresh = ch.fresh[:0]
}

// Told learns nothing: the engine's events say it all.
func (p *preciseProducer) Told(*chain, *Endpoint, int, float64) {}
