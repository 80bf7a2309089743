package routing

import (
	"fmt"
	"math"
)

// costScorer is the expected-cost scorer: what sending the request to a replica
// costs, in prompt tokens, everybody's waiting included. All of it is known
// inline. For a replica i and a request of L prompt tokens:
//
//	P_i  outstanding uncached prompt tokens: dispatched, no first token yet
//	D_i  requests in flight; Dbar their mean over the candidates, and
//	     Sbar the mean of those that have their first token
//	U_i  uncached tokens of this request there, at least one block
//	r_i  measured seconds per uncached token, shrunk towards the mean rbar
//
//	cost_i = r_i/rbar * [ P_i + U_i*(1 + min(cap, w*Sbar)) ]
//	       + w * (D_i - Dbar) * min(U_i, 4096)
//	       + c * D_i * min(L, 16384)
//
// The first term is the wait and the prefill with the stall it inflicts on
// running decodes (which makes cached prefixes worth more as load grows), the
// second balances decode batches, the third is the slowdown that a long context
// inflicts on the others: every step of theirs reads its KV cache. score_i =
// scale / (scale + cost_i - min cost). The constants, where they come from and
// what they are worth: docs/routing-quality.md.
type costScorer struct {
	column int
	p      costParams
}

type costParams struct {
	Producer   string  `json:"prefixMatchInfoProducerName"`
	Stall      float64 `json:"stallWeight"`      // w, per request in flight
	StallCap   float64 `json:"stallCap"`         // cap
	Context    float64 `json:"contextWeight"`    // c, per prompt token and request in flight
	Scale      float64 `json:"scoreScaleTokens"` // tokens of extra cost at which the score halves
	PriorToken float64 `json:"drainPriorTokens"` // weight of the fleet's mean in r_i; 0 switches r_i off
}

const (
	costMaxStalledTokens = 4096
	costMaxContextTokens = 16384
)

func newCostScorer(b *builder) (any, error) {
	p := costParams{Producer: defaultProducer, Stall: 0.25, StallCap: 8, Context: 0.03, Scale: 8192, PriorToken: 150_000}
	if err := b.params(&p); err != nil {
		return nil, err
	}
	for _, v := range []struct {
		name  string
		value float64
		min   float64
	}{
		{"stallWeight", p.Stall, 0}, {"stallCap", p.StallCap, 0}, {"contextWeight", p.Context, 0},
		{"scoreScaleTokens", p.Scale, 1}, {"drainPriorTokens", p.PriorToken, 0},
	} {
		if !(v.value >= v.min) || math.IsInf(v.value, 0) {
			return nil, b.problem(fmt.Sprintf("use a number of at least %v", v.min), fmt.Sprintf("%s %v is out of range", v.name, v.value))
		}
	}
	return &costScorer{column: b.column(p.Producer), p: p}, nil
}

// costMeans are the values that all candidates share.
type costMeans struct {
	inFlight float64 // Dbar
	started  float64 // Sbar
	perToken float64 // rbar, 0 when nothing was measured
}

func (s *costScorer) means(c []Candidate) costMeans {
	var m costMeans
	seconds, tokens := 0.0, 0.0
	for i := range c {
		m.inFlight += float64(c[i].InFlight)
		m.started += float64(c[i].InFlight - c[i].Awaiting)
		seconds += c[i].DrainedSeconds
		tokens += c[i].DrainedTokens
	}
	m.inFlight /= float64(len(c))
	m.started /= float64(len(c))
	if tokens > 0 && s.p.PriorToken > 0 {
		m.perToken = seconds / tokens
	}
	return m
}

// cost returns the three terms of one candidate, and U_i and r_i/rbar.
func (s *costScorer) cost(r *Request, c *Candidate, m costMeans) (prefill, batch, context, uncached, speed float64) {
	col := r.column(s.column)
	u := float64(r.uncached(col, c.Row))
	d := float64(c.InFlight)
	speed = 1
	if m.perToken > 0 {
		speed = (c.DrainedSeconds + s.p.PriorToken*m.perToken) / (c.DrainedTokens + s.p.PriorToken) / m.perToken
	}
	prefill = speed * (float64(c.PendingTokens) + u*(1+min(s.p.StallCap, s.p.Stall*m.started)))
	batch = s.p.Stall * (d - m.inFlight) * min(u, costMaxStalledTokens)
	context = s.p.Context * d * min(float64(r.PromptTokens()), costMaxContextTokens)
	return prefill, batch, context, u, speed
}

func (s *costScorer) Score(r *Request, c []Candidate, out []float64) {
	m := s.means(c)
	least := math.Inf(1)
	for i := range c {
		prefill, batch, context, _, _ := s.cost(r, &c[i], m)
		out[i] = prefill + batch + context
		least = min(least, out[i])
	}
	for i := range out {
		out[i] = s.p.Scale / (s.p.Scale + out[i] - least)
	}
}

// Terms shows the parts of one candidate's cost, in tokens.
func (s *costScorer) Terms(r *Request, c []Candidate, i int) []Term {
	prefill, batch, context, u, speed := s.cost(r, &c[i], s.means(c))
	return []Term{
		{"pending_tokens", float64(c[i].PendingTokens)}, {"uncached_tokens", u}, {"relative_speed", speed},
		{"prefill_cost", prefill}, {"batch_cost", batch}, {"context_cost", context}, {"cost", prefill + batch + context},
	}
}
