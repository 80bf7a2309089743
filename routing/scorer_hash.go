package routing

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/cespare/xxhash/v2"

	"kvgate/kvindex"
)

// hashScorer is consistent hashing of the prompt's first blocks with bounded
// load: rendezvous hashing (Thaler and Ravishankar, 1996) orders the endpoints
// for a key, and the first one whose requests in flight stay below boundFactor
// times the mean takes it (Mirrokni, Thorup and Zadimoghaddam, 2016). It scores 1,
// the others 0.
type hashScorer struct {
	blocks int
	bound  float64
}

type hashParams struct {
	Blocks int     `json:"prefixBlocks"` // blocks of 64 tokens in the key
	Bound  float64 `json:"boundFactor"`  // 0: unbounded
}

func newHashScorer(b *builder) (any, error) {
	p := hashParams{Blocks: 2, Bound: 1.25}
	if err := b.params(&p); err != nil {
		return nil, err
	}
	if p.Blocks < 1 {
		return nil, b.problem("use at least 1", fmt.Sprintf("prefixBlocks %d is out of range", p.Blocks))
	}
	if p.Bound != 0 && !(p.Bound >= 1) || math.IsInf(p.Bound, 0) {
		return nil, b.problem("use a factor of at least 1, or 0 for no bound", fmt.Sprintf("boundFactor %v is out of range", p.Bound))
	}
	return &hashScorer{blocks: p.Blocks, bound: p.Bound}, nil
}

func (s *hashScorer) Score(r *Request, c []Candidate, out []float64) {
	key := kvindex.Seed(r.Model, r.Salt)
	if n := min(len(r.given), s.blocks); n > 0 {
		key ^= r.given[n-1] // chained: it names all blocks up to here
	} else {
		key ^= xxhash.Sum64(r.Tokens[:min(len(r.Tokens), s.blocks*minBlockTokens*bytesPerToken)])
	}
	total := 0
	for i := range c {
		total += c[i].InFlight
	}
	limit := math.Inf(1)
	if s.bound > 0 {
		limit = math.Ceil(s.bound * float64(total+1) / float64(len(c)))
	}
	clear(out)
	best, bestKey := -1, uint64(0)
	var mix [16]byte
	binary.LittleEndian.PutUint64(mix[:8], key)
	for i := range c {
		if float64(c[i].InFlight+1) > limit {
			continue
		}
		binary.LittleEndian.PutUint64(mix[8:], xxhash.Sum64String(c[i].Endpoint.id))
		if k := xxhash.Sum64(mix[:]); best < 0 || k > bestKey {
			best, bestKey = i, k
		}
	}
	if best >= 0 {
		out[best] = 1
	}
}
