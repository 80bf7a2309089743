package routing

import (
	"math"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// predictions compares what a producer has predicted with what the engines
// answered, per endpoint. It is guarded by Fleet.mu and lives as long as a router
// has a producer of the name.
type predictions struct {
	producer string
	bySlot   []prediction
	marks    marks
}

// prediction is the record of one endpoint.
type prediction struct {
	PredictionStats
	warned    time.Time // when a drop was last logged
	epoch     uint32    // how often the index has dropped the endpoint's entries
	suspicion float64   // see disproves
	usual     float64   // rate of answers for which too much was predicted
	common    int64     // tokens found when too much was predicted, while suspicion lasts: the head of all prompts
}

// PredictionStats says how well a producer has predicted the cached tokens of one
// endpoint's answers. Tokens are the engine's.
type PredictionStats struct {
	Producer string
	Endpoint *Endpoint

	Answers         uint64  // that told prompt and cached tokens
	PromptTokens    uint64  // of these answers
	PredictedTokens uint64  // expected in the cache
	CachedTokens    uint64  // found in the cache
	AbsoluteError   uint64  // tokens, summed over |predicted - cached|
	Error           float64 // moving average of |predicted - cached| / prompt, the last ten answers or so
	Dropped         uint64  // times that the answers disproved the index, which then forgot the endpoint
}

// errorAlpha is the weight of one answer in PredictionStats.Error.
const errorAlpha = 0.1

// expectation is what a producer says of the endpoint that was picked.
type expectation struct {
	matched int
	cached  int64   // real tokens, as many as were thought to be in the prompt
	part    float64 // the same as a part of the prompt, of which the answer tells the tokens; -1: they were known
	marked  bool    // the answer teaches marks
	epoch   uint32
}

// predictionsOf returns the record of a producer, kept over reloads.
func (f *Fleet) predictionsOf(producer string) *predictions {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.predictions {
		if p.producer == producer {
			return p
		}
	}
	p := &predictions{producer: producer}
	f.predictions = append(f.predictions, p)
	return p
}

// of returns the record of an endpoint, a new one when its slot was another's.
func (p *predictions) of(e *Endpoint) *prediction {
	for len(p.bySlot) <= e.slot {
		p.bySlot = append(p.bySlot, prediction{})
	}
	x := &p.bySlot[e.slot]
	if x.Endpoint != e {
		*x = prediction{PredictionStats: PredictionStats{Producer: p.producer, Endpoint: e}}
	}
	return x
}

// PredictionStats returns how well each producer predicts, by producer and endpoint.
func (f *Fleet) PredictionStats() []PredictionStats {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []PredictionStats
	for _, p := range f.predictions {
		for _, e := range f.view.Load().endpoints {
			if e.slot < len(p.bySlot) && p.bySlot[e.slot].Endpoint == e {
				out = append(out, p.bySlot[e.slot].PredictionStats)
			}
		}
	}
	return out
}

// expect notes what every producer says of the picked candidate.
func (r *Router) expect(req *Request, c Candidate) {
	w := &req.work
	w.expected = grown(w.expected, len(r.columns))
	for i := range r.columns {
		if r.producers[i].places {
			continue
		}
		col := &r.columns[i]
		x := expectation{int(col.Matched[c.Row]), req.cached(col, c.Row), -1, len(col.hashes) > 0, col.predictions.of(c.Endpoint).epoch}
		if n := req.PromptTokens(); w.perToken > 0 && n > 0 && col.mark(c.Row) < 0 {
			x.part = float64(x.cached) / float64(n)
		}
		w.expected[i] = x
	}
}

// compare takes in what an engine said about a prompt. Of several prompts, vLLM
// tells what was found of one of them. The caller holds the fleet's lock.
func (r *Router) compare(l *Lease, prompt, cached int64) {
	req, e, w := l.req, l.Endpoint, &l.req.work
	if len(req.Ends) > 1 || req.prompt.unclear != 0 {
		return
	}
	for i := range r.producers {
		if ch := &w.chains[i]; len(ch.hashes) > 0 && !r.producers[i].places {
			x, p := &w.expected[i], r.columns[i].predictions
			if x.part >= 0 {
				x.cached = int64(math.Round(x.part * float64(prompt)))
			}
			x.cached = min(x.cached, prompt)
			p.of(e).add(x.cached, prompt, cached)
			if x.marked {
				block := int64(0)
				if o := e.Observation(); o != nil {
					block = int64(o.BlockTokens)
				}
				p.marks.learn(req, ch, x.matched, prompt, cached, max(l.Output, 0), block)
			}
		}
	}
	for _, o := range r.observers {
		ch, x := &w.chains[o.producer], w.expected[o.producer]
		if len(ch.hashes) == 0 {
			continue
		}
		o.Told(ch, e, x.matched, float64(cached)/float64(prompt))
		if d, ok := o.Observer.(distruster); ok {
			r.distrust(d, o, req, e, x, prompt, cached)
		}
	}
}

// add counts one answer.
func (p *prediction) add(predicted, prompt, cached int64) {
	off := predicted - cached
	off = max(off, -off)
	p.PromptTokens += uint64(prompt)
	p.PredictedTokens += uint64(predicted)
	p.CachedTokens += uint64(cached)
	p.AbsoluteError += uint64(off)
	err := float64(off) / float64(prompt)
	if p.Answers++; p.Answers == 1 {
		p.Error = err
	}
	p.Error += errorAlpha * (err - p.Error)
}

// distruster is a producer whose index answers can disprove: nobody tells it when
// an engine restarts.
type distruster interface {
	// Distrust forgets what the endpoint is believed to hold. False means that the
	// producer is not to learn.
	Distrust(e *Endpoint) bool
}

// What disproves an index: answers for which too much was predicted, more of them
// than usual. An engine that has restarted finds nothing, or only the head that all
// prompts have in common, since the first prompt after that has computed it again.
//
// It is a one-sided CUSUM over the answers that say something: 1 for one of which
// less than three quarters of the prediction was found, 0 for one of which nine
// tenths were. The reference lies halfway between the replica's usual rate of the
// former and 1.
const (
	disproofTokens = 2 * minBlockTokens // a prediction below it, or below a quarter of the prompt, says nothing
	disproofLimit  = 2.25               // five answers after a long time without any
	usualAlpha     = 0.02
	usualMost      = 0.5 // an index that is always wrong is dropped again and again
)

// distrust drops what the index says of an endpoint when its answers disprove it.
// Prompts that were sent there before that, and are answered after it, are in the
// engine's cache now and are recorded again.
func (r *Router) distrust(d distruster, o observer, req *Request, e *Endpoint, x expectation, prompt, cached int64) {
	p := r.columns[o.producer].predictions.of(e)
	ch := &req.work.chains[o.producer]
	if x.epoch != p.epoch {
		o.Picked(req, ch, e)
		return
	}
	if !p.disproves(x.cached, prompt, cached) || !d.Distrust(e) {
		return
	}
	p.epoch++
	p.Dropped++
	// A replica that caches nothing disproves every index: say so once a minute.
	if now := r.fleet.now(); p.Dropped == 1 || now.Sub(p.warned) >= time.Minute {
		p.warned = now
		r.fleet.log.Warn("a replica does not hold what was sent to it: its index entries are dropped",
			zap.String("replica", e.DisplayName()), zap.String("producer", p.Producer), zap.Int64("predicted_tokens", x.cached),
			zap.Int64("cached_tokens", cached), zap.Uint64("dropped", p.Dropped))
	}
	o.Picked(req, ch, e)
}

// disproves takes one answer into account and reports whether it was the last straw.
func (p *prediction) disproves(predicted, prompt, cached int64) bool {
	if predicted < disproofTokens || predicted < prompt/4 || 10*predicted <= 11*p.common {
		return false
	}
	reference := (min(p.usual, usualMost) + 1) / 2
	switch {
	case 4*cached < 3*predicted:
		p.suspicion += 1 - reference
		p.usual += usualAlpha * (1 - p.usual)
		p.common = max(p.common, cached)
	case 10*cached >= 9*predicted:
		p.suspicion -= reference
		p.usual -= usualAlpha * p.usual
	}
	if p.suspicion > 0 && p.suspicion < disproofLimit {
		return false
	}
	disproved := p.suspicion > 0
	p.suspicion, p.common = 0, 0
	return disproved
}

// Distrust implements distruster. Without autoTune nothing is learned, as in llm-d.
// A cluster does not lose all that it holds at once: an answer that disproves one of
// its replicas says little of the others.
func (a *approxProducer) Distrust(e *Endpoint) bool {
	if a.cluster {
		return false
	}
	if a.autoTune {
		a.store.index.Clear(e.slot)
	}
	return a.autoTune
}

// tokenRatio learns how many of a prompt's bytes make one of the model's tokens.
type tokenRatio struct {
	bytes, tokens float64 // decaying sums, guarded by Fleet.mu
	perToken      atomic.Uint64
}

// A model's ratio is the mean over its last hundred prompts or so, long ones
// counting more, within what a tokenizer may do.
const (
	ratioAlpha                     = 0.01
	leastPerToken, mostPerToken    = 0.5, 64.0
	ratioPriorTokens, ratioPriorOf = 256, bytesPerToken
)

// learn takes in one prompt.
func (t *tokenRatio) learn(bytes, tokens float64) {
	if t.tokens == 0 {
		t.bytes, t.tokens = ratioPriorTokens*ratioPriorOf, ratioPriorTokens
	}
	t.bytes += bytes - ratioAlpha*t.bytes
	t.tokens += tokens - ratioAlpha*t.tokens
	t.perToken.Store(math.Float64bits(min(max(t.bytes/t.tokens, leastPerToken), mostPerToken)))
}

// bytesPer returns the bytes per token, 4 before anything was learned.
func (t *tokenRatio) bytesPer() float64 {
	if v := t.perToken.Load(); v != 0 {
		return math.Float64frombits(v)
	}
	return bytesPerToken
}

// ratio returns the ratio of a model, a new one when the view does not have it.
func (v *fleetView) ratio(model string) *tokenRatio {
	if i, ok := v.find([]byte(model)); ok {
		return v.models[i].tokens
	}
	return &tokenRatio{}
}

// ratioOf returns the ratio that counts for a model: that of all unlisted ones when nobody lists it.
func (f *Fleet) ratioOf(model []byte) *tokenRatio {
	v := f.view.Load()
	if i, ok := v.find(model); ok {
		return v.models[i].tokens
	}
	return &f.tokens
}

// perToken returns how many real tokens stand behind one of the request's Tokens, 0 when they are real.
func (f *Fleet) perToken(r *Request) float64 {
	if r.Exact || r.given != nil {
		return 0
	}
	if b := f.ratioOf(r.Model).bytesPer(); b != bytesPerToken {
		return bytesPerToken / b
	}
	return 0
}

// learnTokens takes in how many tokens the engine made of a prompt. The estimate of
// an image or a recording teaches nothing about text.
func (f *Fleet) learnTokens(r *Request, prompt int64) {
	if r.Exact || r.given != nil || len(r.Tokens) == 0 || r.prompt.hasAssets() {
		return
	}
	f.ratioOf(r.Model).learn(float64(len(r.Tokens)), float64(prompt))
}

// BytesPerToken returns the prompt bytes per token that were learned for a model, 4 before anything was.
func (f *Fleet) BytesPerToken(model string) float64 { return f.ratioOf([]byte(model)).bytesPer() }

// hasAssets reports whether something else than text and token ids is in the prompt.
func (p *prompt) hasAssets() bool {
	return slices.ContainsFunc(p.pieces, func(c piece) bool { return c.kind > pieceIDs })
}
