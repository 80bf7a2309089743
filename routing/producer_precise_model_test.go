package routing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"kvgate/kvindex"
)

// naiveIndex is what a preciseIndex does, said as plainly as possible.
type naiveIndex struct {
	keys    kvindex.Keys
	weights map[string]float64
	ttl     int64
	ranks   map[*Endpoint]map[int]*naiveRank
}

type naiveRank struct {
	blocks  map[uint64]*naiveBlock // by engine hash
	guesses map[uint64]int64       // key -> last generation
	engine  int
}

type naiveBlock struct {
	tokens []uint32 // of the whole prompt up to and including the block
	salt   string
	keys   []uint64
	refs   map[string]int // by tier/group
}

func (n *naiveIndex) rank(e *Endpoint, number int) *naiveRank {
	if n.ranks[e] == nil {
		n.ranks[e] = map[int]*naiveRank{}
	}
	if n.ranks[e][number] == nil {
		n.ranks[e][number] = &naiveRank{blocks: map[uint64]*naiveBlock{}, guesses: map[uint64]int64{}}
	}
	return n.ranks[e][number]
}

// chain returns the keys of all full blocks of a prompt.
func (n *naiveIndex) chain(tokens []uint32, salt string) []uint64 {
	var extras []kvindex.Extra
	if salt != "" {
		extras = []kvindex.Extra{{Text: []byte(salt)}}
	}
	return n.keys.Append(nil, n.keys.Model([]byte("m")), leBytes(tokens), extras)
}

func (n *naiveIndex) stored(e *Endpoint, number int, b *BlockStored, salt string) {
	r := n.rank(e, number)
	if k := string(b.Kind); k != "" && k != "full_attention" && k != "mla_attention" && k != "sink_full_attention" {
		return
	}
	place := fmt.Sprintf("%s/%d", b.Medium, b.Group)
	if len(b.Medium) == 0 {
		place = fmt.Sprintf("gpu/%d", b.Group)
	}
	if len(b.Tokens) == 0 {
		for _, h := range b.Hashes {
			if x := r.blocks[h]; x != nil {
				x.refs[place]++
			}
		}
		return
	}
	var before []uint32
	if b.HasParent {
		p := r.blocks[b.Parent]
		if p == nil {
			return
		}
		before, salt = p.tokens, p.salt
	}
	r.engine = b.BlockTokens
	for i, h := range b.Hashes {
		tokens := slices.Concat(before, b.Tokens[:(i+1)*b.BlockTokens])
		if r.blocks[h] == nil {
			all := n.chain(tokens, salt)
			from := (len(tokens) - b.BlockTokens) / n.keys.BlockTokens()
			r.blocks[h] = &naiveBlock{tokens: tokens, salt: salt, keys: all[from:], refs: map[string]int{}}
		}
		r.blocks[h].refs[place]++
		for _, k := range r.blocks[h].keys {
			delete(r.guesses, k)
		}
	}
}

func (n *naiveIndex) removed(e *Endpoint, number int, b *BlockRemoved) {
	r := n.rank(e, number)
	place := fmt.Sprintf("%s/%d", b.Medium, b.Group)
	if len(b.Medium) == 0 {
		place = fmt.Sprintf("gpu/%d", b.Group)
	}
	for _, h := range b.Hashes {
		x := r.blocks[h]
		if x == nil || x.refs[place] == 0 {
			continue
		}
		if x.refs[place]--; x.refs[place] == 0 {
			delete(x.refs, place)
		}
		if len(x.refs) == 0 {
			delete(r.blocks, h)
		}
	}
}

func (n *naiveIndex) generation(now time.Time) int64 { return now.UnixNano() / (n.ttl / 4) }

// weight returns the best weight of a key in a rank, and whether it is there.
func (n *naiveIndex) weight(r *naiveRank, key uint64, now time.Time) (best float64, ok bool) {
	for _, b := range r.blocks {
		if !slices.Contains(b.keys, key) {
			continue
		}
		for place := range b.refs {
			w, known := n.weights[place[:len(place)-2]]
			if !known {
				w = 1
			}
			best, ok = max(best, w), true
		}
	}
	if g, guessed := r.guesses[key]; guessed && !ok && g > n.generation(now)-5 {
		return n.weights["gpu"], true
	}
	return best, ok
}

// guessed reports whether a key is in the rank for no better reason than a guess.
func (n *naiveIndex) guessed(r *naiveRank, key uint64, now time.Time) bool {
	g, ok := r.guesses[key]
	return ok && g > n.generation(now)-5
}

func (n *naiveIndex) match(e *Endpoint, now time.Time, chains [][]uint64, tokens []int) (matched int, cached int64) {
	best := -1.0
	for number := range maxRanks {
		r := n.ranks[e][number]
		if r == nil {
			continue
		}
		score, sum := 0.0, int64(0)
		for i, chain := range chains {
			run := 0
			for _, key := range chain {
				w, ok := n.weight(r, key, now)
				if !ok {
					break
				}
				score += w
				run++
			}
			block := r.engine
			if block == 0 {
				block = n.keys.BlockTokens()
			}
			if held := min(run*n.keys.BlockTokens(), tokens[i]-1); run > 0 {
				sum += int64(held / block * block)
			}
		}
		if score > best+1e-9 {
			best, matched, cached = score, int(score+1e-6), sum
		}
	}
	return matched, cached
}

func (n *naiveIndex) picked(e *Endpoint, now time.Time, chains [][]uint64) {
	for _, r := range n.ranks[e] {
		for _, chain := range chains {
			run := 0
			if len(chains) == 1 {
				for run < len(chain) {
					if _, held := n.weight(r, chain[run], now); !held {
						break
					}
					run++
				}
			}
			// Of the blocks that are there, only those at the end are guessed again.
			for i := run - 1; i >= 0 && n.guessed(r, chain[i], now); i-- {
				r.guesses[chain[i]] = n.generation(now)
			}
			for _, key := range chain[run:] {
				if _, held := n.weight(r, key, now); !held || n.guessed(r, key, now) {
					r.guesses[key] = n.generation(now)
				}
			}
		}
	}
}

func leBytes(tokens []uint32) (out []byte) {
	for _, t := range tokens {
		out = append(out, byte(t), byte(t>>8), byte(t>>16), byte(t>>24))
	}
	return out
}

// exactRequest returns a request for prompts of real tokens.
func exactRequest(model, salt string, prompts ...[]uint32) *Request {
	r := &Request{Exact: true, Model: []byte(model), Salt: []byte(salt), Weight: 1}
	for _, p := range prompts {
		r.Tokens = append(r.Tokens, leBytes(p)...)
		r.Ends = append(r.Ends, len(r.Tokens))
	}
	r.work.tokenized = true
	return r
}

// preciseRun drives a fleet's precise index and the naive one side by side.
type preciseRun struct {
	*testing.T
	*rand.Rand
	clock   *testClock
	fleet   *Fleet
	router  *Router
	naive   *naiveIndex
	prompts [][]uint32
	size    int  // tokens per engine block
	plain   bool // one rank, one tier
	step    int
}

func (r *preciseRun) index() *preciseIndex { return r.fleet.precise[0] }

// hash is the engine's hash of a block: of everything up to it, different for each rank.
func (r *preciseRun) hash(e *Endpoint, rank int, tokens []uint32, salt string) uint64 {
	return xxhash.Sum64(append(leBytes(tokens), fmt.Sprint(e.Name(), rank, salt)...))
}

func (r *preciseRun) hashes(e *Endpoint, rank int, prompt []uint32, salt string) (out []uint64) {
	for end := r.size; end <= len(prompt); end += r.size {
		out = append(out, r.hash(e, rank, prompt[:end], salt))
	}
	return out
}

func (r *preciseRun) operate() {
	e := r.fleet.Endpoints()[r.IntN(len(r.fleet.Endpoints()))]
	rank := []int{0, 0, 0, 1, 5}[r.IntN(5)]
	prompt := r.prompts[r.IntN(len(r.prompts))]
	salt := []string{"", "", "s"}[r.IntN(3)]
	medium := [][]byte{nil, nil, nil, []byte("GPU"), []byte("cpu"), []byte("disk")}[r.IntN(6)]
	group := []int{0, 0, 0, 2}[r.IntN(4)]
	if r.plain {
		rank, medium = 0, nil
	}
	hashes := r.hashes(e, rank, prompt, salt)
	from := r.IntN(len(hashes))
	to := from + 1 + r.IntN(len(hashes)-from)
	switch op := r.IntN(100); {
	case op < 45:
		if r.IntN(2) == 0 {
			from = 0
		}
		b := &BlockStored{Hashes: hashes[from:to], Tokens: prompt[from*r.size : to*r.size], BlockTokens: r.size, Model: []byte("m"), Medium: medium, Group: group}
		if from > 0 {
			b.HasParent, b.Parent = true, hashes[from-1]
		} else if salt != "" {
			b.Extras = []BlockExtra{{Key: []byte(salt)}}
		}
		switch r.IntN(12) {
		case 0:
			b.Tokens = nil
		case 1:
			b.Kind = []byte("sliding_window")
		case 2:
			b.Kind = []byte("mla_attention")
		}
		r.index().Stored(e, rank, b)
		lower := *b
		lower.Medium = []byte(lowerASCII(string(medium)))
		r.naive.stored(e, rank, &lower, salt)
	case op < 65:
		b := &BlockRemoved{Hashes: slices.Clone(hashes[from:to]), Medium: medium, Group: group}
		if r.size < r.naive.keys.BlockTokens() {
			// An engine evicts the end of a prompt before its begin.
			b.Hashes = r.leaves(e, rank, hashes, b)
		}
		r.index().Removed(e, rank, b)
		lower := *b
		lower.Medium = []byte(lowerASCII(string(medium)))
		r.naive.removed(e, rank, &lower)
	case op < 66:
		if r.IntN(2) == 0 {
			r.index().Cleared(e, rank)
		} else {
			r.index().Incomplete(e, rank, "gap")
			r.index().Incomplete(e, rank, "")
		}
		r.naive.rank(e, rank) // known from now on
		delete(r.naive.ranks[e], rank)
		r.naive.rank(e, rank)
	case op < 67:
		r.churn(e)
	case op < 75:
		r.clock.advance(time.Duration(r.IntN(900)) * time.Millisecond)
	case op < 82:
		req := r.request(prompt, salt)
		lease, err := r.router.Route(req)
		if err != nil {
			r.Fatalf("step %d: Route: %v", r.step, err)
		}
		r.naive.picked(lease.Endpoint, r.clock.now(), r.chains(req, salt))
		lease.Done(Completed)
	default:
		r.match(r.request(prompt, salt), salt)
	}
	r.step++
}

// leaves returns the last stored block of a prompt when no other prompt continues it.
func (r *preciseRun) leaves(e *Endpoint, rank int, hashes []uint64, b *BlockRemoved) []uint64 {
	blocks := r.naive.rank(e, rank).blocks
	for i := len(hashes) - 1; i >= 0; i-- {
		x := blocks[hashes[i]]
		if x == nil {
			continue
		}
		for _, y := range blocks {
			if len(y.tokens) > len(x.tokens) && y.salt == x.salt && slices.Equal(y.tokens[:len(x.tokens)], x.tokens) {
				return nil
			}
		}
		return hashes[i : i+1]
	}
	return nil
}

func lowerASCII(s string) string {
	b := []byte(s)
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			b[i] = c + 32
		}
	}
	return string(b)
}

// churn takes an endpoint out of the fleet and back in.
func (r *preciseRun) churn(e *Endpoint) {
	var rest []EndpointSpec
	for _, x := range r.fleet.Endpoints() {
		if x != e {
			rest = append(rest, spec(x.Name()))
		}
	}
	r.fleet.Update(rest)
	delete(r.naive.ranks, e)
	r.index().Stored(e, 0, &BlockStored{Hashes: []uint64{1}, Tokens: make([]uint32, r.size), BlockTokens: r.size}) // it is not there
	r.fleet.Update(append(rest, spec(e.Name())))
	for _, x := range r.fleet.Endpoints() {
		x.Observe(observed(0, 0, 0), r.clock.now())
		r.naive.rank(x, 0)
	}
}

func (r *preciseRun) request(prompt []uint32, salt string) *Request {
	cut := r.IntN(len(prompt) + 1)
	prompts := [][]uint32{prompt[:cut]}
	if r.IntN(4) == 0 {
		other := r.prompts[r.IntN(len(r.prompts))]
		prompts = append(prompts, other[:1+r.IntN(len(other))])
	}
	return exactRequest("m", salt, slices.DeleteFunc(prompts, func(p []uint32) bool { return len(p) == 0 })...)
}

func (r *preciseRun) chains(req *Request, salt string) (out [][]uint64) {
	start := 0
	for _, end := range req.Ends {
		var tokens []uint32
		for i := start; i < end; i += 4 {
			tokens = append(tokens, uint32(req.Tokens[i])|uint32(req.Tokens[i+1])<<8)
		}
		out = append(out, r.naive.chain(tokens, salt))
		start = end
	}
	return out
}

func (r *preciseRun) match(req *Request, salt string) {
	p := &preciseProducer{fleet: r.fleet, index: r.index()}
	var c []Candidate
	for i, e := range r.fleet.Endpoints() {
		c = append(c, Candidate{Endpoint: e, Row: i})
	}
	ch, col := &chain{}, &Column{Matched: make([]int32, len(c))}
	p.Prepare(req, ch)
	p.Match(req, ch, c, col)
	chains := r.chains(req, salt)
	total := 0
	var tokens []int
	for i := range chains {
		total += len(chains[i])
		start := 0
		if i > 0 {
			start = req.Ends[i-1]
		}
		tokens = append(tokens, (req.Ends[i]-start)/4)
	}
	if col.Total != total || col.BlockTokens != r.naive.keys.BlockTokens() {
		r.Fatalf("step %d: got %d blocks of %d tokens, want %d of %d", r.step, col.Total, col.BlockTokens, total, r.naive.keys.BlockTokens())
	}
	for i, e := range r.fleet.Endpoints() {
		matched, cached := r.naive.match(e, r.clock.now(), chains, tokens)
		got := col.held(i)
		if int(col.Matched[i]) != matched || got != cached {
			r.Fatalf("step %d: %s, %d tokens: got %d blocks, %d tokens cached, want %d, %d", r.step, e.Name(), tokens, col.Matched[i], got, matched, cached)
		}
	}
}

// check compares the sums and proves the tables.
func (r *preciseRun) check() {
	held := 0
	for e, ranks := range r.naive.ranks {
		for number, want := range ranks {
			got := r.index().rank(e, number)
			refs := 0
			for _, b := range want.blocks {
				refs += len(b.refs)
			}
			if got.table.used != refs {
				r.Fatalf("step %d: %s rank %d: got %d records, want %d", r.step, e.Name(), number, got.table.used, refs)
			}
			free := 0
			for n := got.table.free; n != 0; n = got.table.rec(n).next {
				free++
			}
			if free+refs != len(got.table.recs) {
				r.Fatalf("step %d: %s rank %d: got %d free and %d used records of %d", r.step, e.Name(), number, free, refs, len(got.table.recs))
			}
			for h := range want.blocks {
				if got.table.find(h) == 0 {
					r.Fatalf("step %d: %s rank %d: got no record of %x, want one", r.step, e.Name(), number, h)
				}
			}
			keys := map[uint64]bool{}
			for _, b := range want.blocks {
				for _, k := range b.keys {
					keys[k] = true
				}
			}
			for k := range want.guesses {
				if g := want.guesses[k]; g > r.naive.generation(r.clock.now())-5 {
					keys[k] = true
				}
			}
			for k := range keys {
				if !r.index().held.Has(k, got.column) {
					r.Fatalf("step %d: %s rank %d: got key %x not held, want held", r.step, e.Name(), number, k)
				}
			}
			held += len(keys)
		}
	}
	r.index().expire(r.clock.now().UnixNano(), 1<<30)
	got := 0
	for column := range r.index().columns {
		if r.index().columns[column].rank == nil {
			continue
		}
		got += r.heldBy(column)
	}
	if got != held {
		r.Fatalf("step %d: got %d held keys, want %d", r.step, got, held)
	}
}

// heldBy counts the keys of a column among all that any prompt can have.
func (r *preciseRun) heldBy(column int) (n int) {
	seen := map[uint64]bool{}
	for _, p := range r.prompts {
		for _, salt := range []string{"", "s"} {
			for _, k := range r.naive.chain(p, salt) {
				if !seen[k] && r.index().held.Has(k, column) {
					n++
				}
				seen[k] = true
			}
		}
	}
	return n
}

func TestPreciseModel(t *testing.T) {
	f := func(t *testing.T, name string, seed uint64, ours, engine int, gpu float64, plain bool, steps int) {
		t.Run(name, func(t *testing.T) {
			clock := newTestClock()
			fleet := readyFleet(t, clock, "a", "b", "c")
			router := newTestRouter(t, fleet, fmt.Sprintf(`
plugins:
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig: {blockSizeTokens: %d}
    indexerConfig: {kvCacheBackendConfigs: [{name: gpu, weight: %v}, {name: cpu, weight: 0.5}]}
    speculativeIndexing: true
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
`, ours, gpu))
			r := &preciseRun{T: t, Rand: rand.New(rand.NewPCG(seed, 5)), clock: clock, fleet: fleet, router: router, size: engine, plain: plain}
			r.naive = &naiveIndex{keys: router.producers[0].Producer.(*preciseProducer).index.keys, ttl: int64(2 * time.Second),
				weights: map[string]float64{"gpu": gpu, "cpu": .5}, ranks: map[*Endpoint]map[int]*naiveRank{}}
			for _, e := range fleet.Endpoints() {
				r.naive.rank(e, 0)
			}
			for range 12 { // a tree: each prompt continues the begin of another one
				var p []uint32
				if n := len(r.prompts); n > 0 {
					p = slices.Clone(r.prompts[r.IntN(n)][:r.IntN(8)*4])
				}
				for len(p) < 48 {
					p = append(p, r.Uint32N(60000))
				}
				r.prompts = append(r.prompts, p)
			}
			for r.step < steps {
				for _, e := range fleet.Endpoints() {
					if r.step%64 == 0 {
						e.Observe(observed(0, 0, 0), clock.now())
					}
				}
				if r.operate(); r.step%200 == 0 {
					r.check()
				}
			}
		})
	}
	f(t, "equal blocks", 1, 4, 4, .9, false, 20000)
	f(t, "large engine blocks", 3, 4, 12, .9, false, 8000)
	f(t, "small engine blocks", 4, 12, 4, .9, false, 8000)
	f(t, "one rank and tier", 5, 4, 4, 1, true, 8000)
	f(t, "one rank and tier, large engine blocks", 6, 4, 12, 1, true, 8000)
	f(t, "one rank and tier that weighs less", 7, 4, 4, .9, true, 8000)
}
