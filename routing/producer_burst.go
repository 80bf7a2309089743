package routing

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// burstProducer holds requests for a window and places those of it together whose
// prompts are equal, or begin alike, so that each prompt is computed once. Its matches are wishes:
// everything of the prompt on the replica that was chosen, nothing elsewhere.
//
// A request waits for the rest of the window that it falls into. It does not wait
// when it has nothing to gain: without a whole prompt to compare, with fewer than two
// replicas to choose from, behind the last place of a window.
//
// Lock order: mu, before nothing. Fleet.mu is taken without it.
type burstProducer struct {
	fleet  *Fleet
	rules  burstRules
	block  int // tokens per block
	limit  int // blocks per prompt
	window time.Duration
	most   int // requests in a window
	timer  Timer
	counts *burstCounts

	mu   sync.Mutex
	open *burstWindow
}

// burstWindow is a window that takes requests. Its members each watch the time:
// whoever sees its end first places them all.
type burstWindow struct {
	until   time.Time
	members []*burstMember
	sealed  chan struct{} // closed when all are placed
}

type burstMember struct {
	blocks    []uint64
	endpoints []*Endpoint // that may serve it
	placed    *Endpoint   // once the window is sealed
}

type burstParams struct {
	WindowMS   int    `json:"windowDurationMs"`
	PerReplica int    `json:"maxPerReplica"` // -1: no cap
	Block      int    `json:"blockSizeTokens"`
	MaxTokens  int    `json:"maxPrefixTokensToMatch"` // 0: defaultMaxBlocks blocks
	Colocate   int    `json:"minColocateBlocks"`
	MaxBatch   int    `json:"maxBatchSize"` // -1: no cap
	BalanceBy  string `json:"balanceBy"`
}

func newBurstProducer(b *builder) (any, error) {
	p := burstParams{WindowMS: 100, PerReplica: -1, Block: 64, MaxBatch: 1000, BalanceBy: "requests"}
	if err := b.params(&p); err != nil {
		return nil, err
	}
	switch {
	case p.WindowMS < 1 || p.WindowMS > 10000:
		return nil, b.problem("use a number of milliseconds from 1 to 10000", fmt.Sprintf("windowDurationMs %d is out of range", p.WindowMS))
	case p.PerReplica != -1 && p.PerReplica < 1:
		return nil, b.problem("use a number of requests above 0, or -1 for no cap", fmt.Sprintf("maxPerReplica %d is out of range", p.PerReplica))
	case p.Block <= 0:
		return nil, b.problem("use a number of tokens above 0", fmt.Sprintf("blockSizeTokens %d is out of range", p.Block))
	case p.MaxTokens != 0 && p.MaxTokens < p.Block:
		return nil, b.problem("use at least blockSizeTokens, or 0 for the default", fmt.Sprintf("maxPrefixTokensToMatch %d is less than a block of %d tokens", p.MaxTokens, p.Block))
	case p.Colocate < 0:
		return nil, b.problem("use a number of blocks, or 0 to place equal prompts only", fmt.Sprintf("minColocateBlocks %d is negative", p.Colocate))
	case p.MaxBatch != -1 && p.MaxBatch < 1:
		return nil, b.problem("use a number of requests above 0, or -1 for no cap", fmt.Sprintf("maxBatchSize %d is out of range", p.MaxBatch))
	case p.BalanceBy != "requests" && p.BalanceBy != "tokens":
		return nil, b.problem("use balanceBy: requests or balanceBy: tokens", fmt.Sprintf("balanceBy %q is unknown", p.BalanceBy))
	}
	x := &burstProducer{
		fleet: b.fleet, timer: b.timer, counts: b.fleet.burstCounts(b.spec.Name),
		rules: burstRules{perReplica: p.PerReplica, colocate: p.Colocate, byTokens: p.BalanceBy == "tokens"},
		block: p.Block, limit: defaultMaxBlocks,
		window: time.Duration(p.WindowMS) * time.Millisecond, most: math.MaxInt,
	}
	if p.MaxTokens > 0 {
		x.limit = p.MaxTokens / p.Block
	}
	if p.MaxBatch > 0 {
		x.most = p.MaxBatch
	}
	return x, nil
}

func (p *burstProducer) places() {}

// Prepare hashes the prompts and waits for the end of the window.
func (p *burstProducer) Prepare(r *Request, ch *chain) {
	ch.blockTokens = p.block
	r.hashBlocks(ch, p.block, p.limit)
	if p.timer == nil || r.work.dry || len(ch.hashes) == 0 {
		return
	}
	if !p.choice(r.work.endpoints) {
		p.counts.add(BurstAlone)
		return
	}
	m := &burstMember{blocks: burstBlocks(ch), endpoints: r.work.endpoints}
	w, wait := p.join(m)
	if w == nil {
		p.counts.add(BurstFull)
		return
	}
	done := make(chan struct{})
	client, cancelable := r.Headers.(Canceler)
	if cancelable && !client.Attach(sync.OnceFunc(func() { close(done) })) {
		close(done)
	}
	after, stop := p.timer(wait)
	select {
	case <-w.sealed:
	case <-after:
		p.seal(w)
		<-w.sealed
	case <-done:
		r.work.canceled = true
		if !p.leave(w, m) {
			<-w.sealed // whoever places reads the request's hashes
		}
	}
	stop()
	if cancelable {
		client.Detach()
	}
	ch.placed = m.placed
	switch {
	case r.work.canceled:
		p.counts.add(BurstLeft)
	case m.placed != nil:
		p.counts.add(BurstPlaced)
	default:
		p.counts.add(BurstAlone)
	}
}

// choice says whether there is more than one replica to choose from.
func (p *burstProducer) choice(endpoints []*Endpoint) bool {
	now, ready := p.fleet.now(), 0
	for _, e := range endpoints {
		if e.stateAt(now) == Ready {
			ready++
		}
	}
	return ready > 1
}

// join gives a request a place in the open window, or opens one, and returns how
// long it is open. It returns nil when all places are taken.
func (p *burstProducer) join(m *burstMember) (*burstWindow, time.Duration) {
	now := p.fleet.now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		p.open = &burstWindow{until: now.Add(p.window), sealed: make(chan struct{})}
		p.counts.windows.Add(1)
	}
	w := p.open
	if len(w.members) >= p.most {
		return nil, 0
	}
	w.members = append(w.members, m)
	return w, max(w.until.Sub(now), 0)
}

// leave frees a place. It returns false when the window is sealed.
func (p *burstProducer) leave(w *burstWindow, m *burstMember) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open != w {
		return false
	}
	w.members = slices.DeleteFunc(w.members, func(x *burstMember) bool { return x == m })
	if len(w.members) == 0 {
		p.open = nil // the next request begins a whole window
	}
	return true
}

// seal ends a window and places its requests, unless somebody does that already.
func (p *burstProducer) seal(w *burstWindow) {
	p.mu.Lock()
	if p.open != w {
		p.mu.Unlock()
		return
	}
	p.open = nil
	p.mu.Unlock()
	defer close(w.sealed)
	// Requests that have different replicas to choose from (other models) are placed apart.
	for left := w.members; len(left) > 0; {
		var here, there []*burstMember
		for _, m := range left {
			if slices.Equal(m.endpoints, left[0].endpoints) {
				here = append(here, m)
			} else {
				there = append(there, m)
			}
		}
		p.place(here)
		left = there
	}
}

// place assigns requests that have the same replicas to choose from.
func (p *burstProducer) place(members []*burstMember) {
	requests := make([][]uint64, len(members))
	for i, m := range members {
		requests[i] = m.blocks
	}
	f := p.fleet
	f.mu.Lock()
	c, _ := f.pin(&Request{}, members[0].endpoints, f.now())
	c = slices.Clone(c)
	f.mu.Unlock()
	running := make([]float64, len(c))
	for i := range c {
		running[i] = float64(c[i].InFlight)
		if v := c[i].Running; v > running[i] { // false for NaN
			running[i] = v
		}
	}
	for i, r := range p.rules.place(requests, running) {
		if r >= 0 {
			members[i].placed = c[r].Endpoint
		}
	}
}

// Match gives the whole prompt to the replica that was chosen.
func (p *burstProducer) Match(_ *Request, ch *chain, c []Candidate, col *Column) {
	col.Total, col.BlockTokens = len(ch.hashes), ch.blockTokens
	for i := range c {
		if c[i].Endpoint == ch.placed {
			col.Matched[c[i].Row] = int32(col.Total)
		}
	}
}

// BurstResult says what a window did for a request.
type BurstResult uint8

// What a window did.
const (
	BurstPlaced BurstResult = iota // it was placed with others
	BurstAlone                     // no other request was like it, or there was no choice of replicas
	BurstFull                      // it came to a full window and went on at once
	BurstLeft                      // its client left meanwhile
	burstResults
)

var burstResultNames = [burstResults]string{"placed", "alone", "full", "left"}

// String returns the result as metrics print it.
func (r BurstResult) String() string { return burstResultNames[r] }

// burstCounts are a producer's counters, kept over reloads.
type burstCounts struct {
	producer string
	windows  atomic.Uint64
	requests [burstResults]atomic.Uint64
}

func (c *burstCounts) add(r BurstResult) { c.requests[r].Add(1) }

func (f *Fleet) burstCounts(producer string) *burstCounts {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.bursts {
		if c.producer == producer {
			return c
		}
	}
	c := &burstCounts{producer: producer}
	f.bursts = append(f.bursts, c)
	return c
}

// BurstStats says what the windows of one burst-prefix-cache-producer did.
type BurstStats struct {
	Producer string
	Windows  uint64
	Requests [burstResults]uint64 // by BurstResult
}

// BurstStats returns the counts of every burst-prefix-cache-producer.
func (f *Fleet) BurstStats() []BurstStats {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]BurstStats, len(f.bursts))
	for i, c := range f.bursts {
		out[i] = BurstStats{Producer: c.producer, Windows: c.windows.Load()}
		for r := range c.requests {
			out[i].Requests[r] = c.requests[r].Load()
		}
	}
	return out
}
