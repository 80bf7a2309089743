package routing

import (
	"math"
	"math/rand/v2"
	"time"

	"kvgate/kvindex"
)

// A plugin fills the slots whose interfaces it implements: Filter, Scorer,
// Picker, Producer, Observer, Tokenizer. All but Prepare and Tokenize run under
// the fleet's lock, one request at a time, so a plugin may keep scratch memory.

// Filter removes candidates, in place, keeping their order.
type Filter interface {
	Filter(r *Request, c []Candidate) []Candidate
}

// Scorer writes one score per candidate, 0 (worst) to 1 (best); the router
// clamps what lies outside. NaN means that the scorer has no opinion: +0. It must
// not change the candidates: those that nothing happens to are the next request's, too.
type Scorer interface {
	Score(r *Request, c []Candidate, out []float64)
}

// Picker chooses one candidate by the weighted totals. It returns its index
// and how many candidates were equally good.
type Picker interface {
	Pick(c []Candidate, totals []float64, rnd *rand.Rand) (index, ties int)
}

// Producer says how much of the prompt each candidate holds.
type Producer interface {
	// Prepare does the part that needs no lock: hashing. It may wait, as long as
	// the request's client does.
	Prepare(r *Request, ch *chain)
	// Match fills the column, one row per candidate: they are all there, each at
	// the index that is its Candidate.Row.
	Match(r *Request, ch *chain, c []Candidate, col *Column)
}

// Observer learns what became of a request.
type Observer interface {
	// Picked is called inside the decision, before the next request is scored.
	Picked(r *Request, ch *chain, e *Endpoint)
	// Undo is called when the engine of e never saw the request.
	Undo(r *Request, ch *chain, e *Endpoint)
	// Told is called with what the engine says about an answered request: which
	// part (0..1) of the prompt was in its cache, where matched blocks were expected
	// by this producer.
	Told(ch *chain, e *Endpoint, matched int, cached float64)
}

// placer is a producer whose matches are wishes: they say where a request is to go,
// not what is in a cache.
type placer interface{ places() }

// Timer has something arrive on after when d has gone by, unless stop is called before.
type Timer func(d time.Duration) (after <-chan time.Time, stop func() bool)

// Tokenizer turns the parsed body into the request's token stream.
type Tokenizer interface {
	Tokenize(r *Request)
}

// Termer is a scorer that can show the parts of a score to Explain.
type Termer interface {
	Terms(r *Request, c []Candidate, i int) []Term
}

// Term is one named part of a score.
type Term struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// Candidate is one endpoint as pinned for one decision: values that cannot move.
type Candidate struct {
	Endpoint *Endpoint
	Row      int // row of this candidate in every Column; filters do not change it
	slot     int // Endpoint.Slot, here so that a pass over all need not read every Endpoint

	// Scraped. NaN when missing or older than the staleness limit.
	Waiting float64 // requests
	Running float64 // requests
	KVUsage float64 // 0..1

	// Inline: what this process has dispatched itself.
	Awaiting       int     // requests without a first token
	InFlight       int     // requests that have not ended
	PendingTokens  int64   // uncached prompt tokens of the awaiting requests
	DrainedSeconds float64 // busy seconds that DrainedTokens uncached tokens took, see Endpoint.Drained
	DrainedTokens  float64
}

// Column is what one producer says of one request: Matched[row] of Total
// blocks of BlockTokens tokens. Total 0 means that nothing was hashed.
type Column struct {
	Matched     []int32
	Total       int
	BlockTokens int

	// Cached is how many of the prompt's tokens the engine will take from its cache,
	// by row, of a producer for which that is not Matched*BlockTokens; else empty.
	Cached []int64

	// tokens and engineBlock, when they are not 0, are what Matched*BlockTokens of every
	// row is capped with, see capped.
	tokens, engineBlock int

	predictions *predictions // how well the producer has predicted so far
	hashes      []uint64     // of the request's prompt, where marks may tell more than Matched; else empty
}

// chain holds the block hashes that one producer made of one request, kept for
// recording and for another attempt.
type chain struct {
	hashes      []uint64
	ends        []int    // end of prompt i in hashes
	held        []int    // blocks of prompt i that the picked endpoint held before
	fresh       []uint64 // keys that were guessed for it
	blockTokens int
	extras      []kvindex.Extra // scratch
	placed      *Endpoint       // where a producer that places wants the request, nil: it has no opinion
}

func (ch *chain) reset() {
	ch.hashes, ch.ends, ch.held, ch.fresh = ch.hashes[:0], ch.ends[:0], ch.held[:0], ch.fresh[:0]
	ch.blockTokens, ch.placed = 0, nil
}

// fillMissing gives every candidate whose score is NaN the mean of the others,
// 0.5 when there are no others: an endpoint that cannot be seen is neither
// favoured nor shunned.
func fillMissing(out []float64) {
	sum, n := 0.0, 0
	for _, v := range out {
		if !math.IsNaN(v) {
			sum += v
			n++
		}
	}
	if n == len(out) {
		return
	}
	mean := 0.5
	if n > 0 {
		mean = sum / float64(n)
	}
	for i, v := range out {
		if math.IsNaN(v) {
			out[i] = mean
		}
	}
}

// minMax turns loads into scores: the least loaded 1, the most loaded 0, all
// equal 1. The range is at least floor; NaN stays NaN.
func minMax(loads []float64, floor float64) {
	lo, hi := math.Inf(1), math.Inf(-1)
	for _, v := range loads {
		if v < lo {
			lo = v
		}
		if v > hi {
			hi = v
		}
	}
	span := max(hi-lo, floor)
	for i, v := range loads {
		switch {
		case math.IsNaN(v):
		case span <= 0:
			loads[i] = 1
		default:
			loads[i] = 1 - (v-lo)/span
		}
	}
}
