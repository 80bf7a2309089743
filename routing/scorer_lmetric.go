package routing

// lmetricScorer is the product rule (P+U) x BS of LMetric (OSDI 2026): the
// outstanding uncached tokens of a replica plus those of this request, times
// the requests it would then have in flight. The least product scores 1, the
// others in proportion: least/product.
type lmetricScorer struct{ column int }

type producerParams struct {
	Producer string `json:"prefixMatchInfoProducerName"`
}

func newLMetricScorer(b *builder) (any, error) {
	p := producerParams{Producer: defaultProducer}
	if err := b.params(&p); err != nil {
		return nil, err
	}
	return lmetricScorer{column: b.column(p.Producer)}, nil
}

func (s lmetricScorer) Score(r *Request, c []Candidate, out []float64) {
	col := r.column(s.column)
	least := 0.0
	for i := range c {
		u := r.uncached(col, c[i].Row)
		// One token at least: a body without a prompt is judged by its batch alone.
		out[i] = float64(max(c[i].PendingTokens+u, 1)) * float64(c[i].InFlight+1)
		if i == 0 || out[i] < least {
			least = out[i]
		}
	}
	for i := range out {
		out[i] = least / out[i]
	}
}
