package routing

import (
	"fmt"
	"math"
)

// queueScorer prefers short queues: min-max over the waiting requests.
//
// By default the load of an endpoint is the fresher of two truths, max(scraped
// waiting, own requests awaiting a first token): an engine publishes its queue
// once per step, so what was just sent is not in it yet. While own requests
// await a first token the range is at least queueRangeFloor requests, so that a
// difference of one does not outvote a cached prefix. With nothing awaiting,
// inline and scraped agree.
type queueScorer struct{ inline bool }

const queueRangeFloor = 8 // requests

type loadParams struct {
	Load string `json:"load"`
}

func newQueueScorer(b *builder) (any, error) {
	p := loadParams{Load: "inline"}
	if err := b.params(&p); err != nil {
		return nil, err
	}
	switch p.Load {
	case "inline", "scraped":
		return queueScorer{inline: p.Load == "inline"}, nil
	}
	return nil, b.problem("use load: inline or load: scraped", fmt.Sprintf("load %q is unknown", p.Load))
}

func (s queueScorer) Score(_ *Request, c []Candidate, out []float64) {
	floor := 0.0
	for i := range c {
		out[i] = c[i].Waiting
		if s.inline && c[i].Awaiting > 0 {
			floor = queueRangeFloor
			if !math.IsNaN(out[i]) {
				out[i] = max(out[i], float64(c[i].Awaiting))
			}
		}
	}
	minMax(out, floor)
	fillMissing(out)
	if floor == 0 {
		return
	}
	// An endpoint without metrics gets the mean, but no more than its own awaiting requests allow.
	for i := range c {
		if math.IsNaN(c[i].Waiting) && c[i].Awaiting > 0 {
			out[i] = min(out[i], max(0, 1-float64(c[i].Awaiting)/floor))
		}
	}
}

// runningScorer is the same min-max over the running requests.
type runningScorer struct{}

func newRunningScorer(b *builder) (any, error) { return runningScorer{}, b.noParams() }

func (runningScorer) Score(_ *Request, c []Candidate, out []float64) {
	for i := range c {
		out[i] = c[i].Running
	}
	minMax(out, 0)
	fillMissing(out)
}
