// Package routing decides which endpoint serves a request: the fleet of
// endpoints, the plugins of a scheduling profile, and the leases that keep count of
// what was dispatched. It knows no sockets and has no clock of its own.
package routing

import (
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"kvgate/configs"
)

// Router is one compiled scheduling configuration over a fleet. It is
// immutable but for its scratch memory, which the fleet's lock guards.
type Router struct {
	fleet     *Fleet
	config    *configs.Scheduling
	tokenizer Tokenizer
	producers []namedProducer
	observers []observer
	binders   []binder
	filters   []namedFilter
	scorers   []weightedScorer
	picker    Picker
	parsers   parserSet
	profile   string
	memo      *Memo

	sessionHeaders []string // of answers

	primary int // producer whose match feeds the lease, -1 when there is none

	rnd     *rand.Rand
	cands   []Candidate
	columns []Column
	scores  []float64
	totals  []float64
}

type namedProducer struct {
	name   string
	places bool // it is a placer: what it says is no prediction
	Producer
}

// observer is a producer that records: it shares that producer's chain.
type observer struct {
	producer int
	Observer
}

type namedFilter struct {
	name string
	Filter
}

type weightedScorer struct {
	name   string
	weight float64
	Scorer
}

// routeWork is the routing part of a pooled request.
type routeWork struct {
	tokenized bool
	endpoints []*Endpoint // that may serve the model, while the request is prepared
	dry       bool        // nothing will be sent: do not wait for others
	canceled  bool        // the client has left while the request waited
	hashedBy  *Router
	chains    []chain
	expected  []expectation // by producer, of the picked endpoint
	columns   []Column      // the router's, while it decides
	perToken  float64       // real tokens per token of four bytes, 0 when Tokens are real
	lease     Lease
}

func (w *routeWork) reset() {
	w.tokenized, w.hashedBy, w.columns, w.perToken = false, nil, nil, 0
	w.dry, w.canceled = false, false
	for i := range w.chains {
		w.chains[i].reset()
	}
	w.lease = Lease{}
}

// Fleet returns the fleet that the router decides over.
func (r *Router) Fleet() *Fleet { return r.fleet }

// Config returns the configuration that the router was built from, defaults included.
func (r *Router) Config() *configs.Scheduling { return r.config }

// Memo returns what remembers the heads of conversations, to be set as a request's
// Memo before Parse. It is nil when a plugin reads more of the tokens than hashes of blocks.
func (r *Router) Memo() *Memo { return r.memo }

func (r *Router) makeMemo() {
	for _, s := range r.scorers {
		if _, reads := s.Scorer.(*hashScorer); reads {
			return
		}
	}
	if _, ok := r.tokenizer.(*Estimator); !ok || len(r.producers) != 1 {
		return
	}
	if a, ok := r.producers[0].Producer.(*approxProducer); ok {
		if r.memo = newMemo(); r.memo != nil {
			r.memo.blockBytes.Store(int32(a.blockTokens() * bytesPerToken))
		}
	}
}

// Route picks an endpoint for a parsed request, counts it in flight there and
// records its prompt. It may be called again for another attempt, with
// Exclude set, after the first lease is done. The lease lives inside the
// request. Errors: ErrNoEndpoints, ErrModelNotFound, ErrModelMissing, ErrFiltered, ErrCanceled.
func (r *Router) Route(req *Request) (*Lease, error) {
	f := r.fleet
	view := f.view.Load()
	endpoints, err := view.resolve(req)
	if err != nil {
		return nil, err
	}
	r.prepare(req, endpoints)
	if req.work.canceled {
		return nil, ErrCanceled
	}
	if now := f.view.Load(); now != view { // it may have waited
		if endpoints, err = now.resolve(req); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	cands, i, ties, degraded, err := r.decide(req, endpoints, nil)
	if err != nil {
		return nil, err
	}
	l := &req.work.lease
	l.Ties = ties
	r.predict(l, req, cands, i)
	switch {
	case len(req.Exclude) > 0:
		l.Reason = ReasonRetry
	case degraded:
		l.Reason = ReasonFallback
	}
	e := cands[i].Endpoint
	r.expect(req, cands[i])
	l.take(r, req, e)
	for _, o := range r.observers {
		o.Picked(req, &req.work.chains[o.producer], e)
	}
	for _, b := range r.binders {
		b.bound(e)
	}
	return l, nil
}

// prepare does what needs no lock: tokens and hashes, once per request.
func (r *Router) prepare(req *Request, endpoints []*Endpoint) {
	w := &req.work
	w.endpoints = endpoints
	if r.memo == nil {
		req.forgo()
	}
	if !w.tokenized {
		w.tokenized = true
		if len(req.Tokens) == 0 && r.tokenizer != nil {
			r.tokenizer.Tokenize(req)
			r.fleet.sources[req.Source].Add(1)
		}
		w.perToken = r.fleet.perToken(req)
	}
	if w.hashedBy == r {
		w.endpoints = nil
		return
	}
	w.hashedBy = r
	for len(w.chains) < len(r.producers) {
		w.chains = append(w.chains, chain{})
	}
	for i, p := range r.producers {
		w.chains[i].reset()
		p.Prepare(req, &w.chains[i])
	}
	w.endpoints = nil
}

// decide runs the profile: pin, match, filter, score, pick. The caller holds
// the fleet's lock. It returns the candidates that were left and the index of
// the picked one. ex, when not nil, is told every step.
func (r *Router) decide(req *Request, endpoints []*Endpoint, ex *Explanation) (c []Candidate, picked, ties int, degraded bool, err error) {
	c, degraded = r.fleet.pin(req, endpoints, r.fleet.now())
	if len(r.filters) > 0 { // they work in place
		r.cands = append(r.cands[:0], c...)
		c = r.cands
	}
	if len(c) == 0 {
		return nil, 0, 0, true, ErrNoEndpoints
	}
	ex.pinned(c)
	rows := len(c)
	req.work.columns = r.columns
	for i, p := range r.producers {
		col := &r.columns[i]
		col.Matched = slices.Grow(col.Matched[:0], rows)[:rows]
		clear(col.Matched)
		col.Total, col.BlockTokens, col.Cached = 0, 0, col.Cached[:0]
		col.tokens, col.engineBlock = 0, 0
		p.Match(req, &req.work.chains[i], c, col)
		col.remember(req, &req.work.chains[i])
	}
	if r.primary >= 0 {
		ex.matched(&r.columns[r.primary])
	}
	for _, f := range r.filters {
		c = f.Filter.Filter(req, c)
		ex.filtered(f.name, c)
		if len(c) == 0 {
			return nil, 0, 0, degraded, ErrFiltered
		}
	}
	r.totals = slices.Grow(r.totals[:0], rows)[:len(c)]
	r.scores = slices.Grow(r.scores[:0], rows)[:len(c)]
	clear(r.totals)
	totals := r.totals
	for _, s := range r.scorers {
		s.Score(req, c, r.scores)
		last, share := 0.0, 0.0 // a thousand endpoints have a few different scores, mostly like the one before
		for i, v := range r.scores[:len(totals)] {
			if v != last {
				if last, share = v, 0; v > 0 { // and no NaN
					share = s.weight * min(v, 1)
				}
			}
			totals[i] += share
		}
		ex.scored(req, s, c, r.scores)
	}
	picked, ties = r.picker.Pick(c, r.totals, r.rnd)
	ex.picked(c, r.totals, picked, ties)
	return c, picked, ties, degraded, nil
}

// predict fills what the lease expects of the picked candidate.
func (r *Router) predict(l *Lease, req *Request, c []Candidate, i int) {
	l.Matched, l.Total, l.BlockTokens, l.predicted = 0, 0, 0, 0
	l.Uncached = req.PromptTokens()
	l.Reason = ReasonCold
	if len(c) == 1 {
		l.Reason = ReasonOnly
	}
	if r.primary < 0 {
		return
	}
	col := &r.columns[r.primary]
	best := int32(0)
	if len(c) == len(col.Matched) {
		best = slices.Max(col.Matched)
	} else {
		for k := range c {
			best = max(best, col.Matched[c[k].Row])
		}
	}
	m := col.Matched[c[i].Row]
	l.Matched, l.Total, l.BlockTokens = int(m), col.Total, col.BlockTokens
	l.Uncached, l.predicted = req.uncached(col, c[i].Row), req.cached(col, c[i].Row)
	switch {
	case len(c) == 1:
	case best == 0:
	case m == best:
		l.Reason = ReasonPrefix
	default:
		l.Reason = ReasonSpill
	}
}

// uncached returns the prompt tokens left to compute on the candidate of a row: at
// least one block, as an engine computes the last block anyway.
func (r *Request) uncached(col *Column, row int) int64 {
	total := r.hashedTokens()
	return r.realTokens(min(total, max(total-col.held(row), int64(col.BlockTokens))))
}

// cached returns the prompt tokens expected in the cache of the candidate of a row.
func (r *Request) cached(col *Column, row int) int64 {
	if n := col.mark(row); n >= 0 {
		return n
	}
	return r.realTokens(min(col.held(row), r.hashedTokens()))
}

// held is cached in the tokens that were hashed.
func (col *Column) held(row int) int64 {
	switch held := int(col.Matched[row]) * col.BlockTokens; {
	case len(col.Cached) > 0:
		return col.Cached[row]
	case col.engineBlock > 0:
		return capped(held, col.tokens, col.engineBlock)
	default:
		return int64(held)
	}
}

// column returns the match column that a scorer was bound to at load.
func (r *Request) column(i int) *Column { return &r.work.columns[i] }

// undo takes back what Picked recorded.
func (r *Router) undo(l *Lease) {
	r.fleet.mu.Lock()
	defer r.fleet.mu.Unlock()
	if l.Endpoint.gone.Load() {
		return
	}
	for _, o := range r.observers {
		o.Undo(l.req, &l.req.work.chains[o.producer], l.Endpoint)
	}
}

// usage feeds the engine's own figures back.
func (r *Router) usage(l *Lease, prompt, cached int64) {
	if prompt <= 0 {
		return
	}
	r.fleet.mu.Lock()
	defer r.fleet.mu.Unlock()
	r.fleet.learnTokens(l.req, prompt)
	if cached >= 0 && !l.Endpoint.gone.Load() {
		r.compare(l, prompt, cached)
	}
}

// Current is the router in force: a reload swaps it whole.
type Current struct{ p atomic.Pointer[Router] }

// Load returns the router in force.
func (c *Current) Load() *Router { return c.p.Load() }

// Store puts another router in force and drops the indexes that it does not use.
func (c *Current) Store(r *Router) {
	c.p.Store(r)
	names := make([]string, 0, len(r.producers))
	var precise []*preciseIndex
	for _, p := range r.producers {
		names = append(names, p.name)
		if x, ok := p.Producer.(interface{ preciseIndex() *preciseIndex }); ok {
			precise = append(precise, x.preciseIndex())
		}
	}
	r.fleet.keepIndexes(names)
	r.fleet.keepPrecise(precise)
	r.fleet.keepSessions(r.binders)
}

// Profile returns the name of the scheduling profile.
func (r *Router) Profile() string { return r.profile }

// Weight returns the weight of a scorer of the profile, and whether there is one of that name.
func (r *Router) Weight(name string) (float64, bool) {
	for _, s := range r.scorers {
		if s.name == name {
			return s.weight, true
		}
	}
	return 0, false
}
