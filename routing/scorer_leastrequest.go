package routing

// leastRequestScorer prefers the endpoint with the fewest requests in flight
// from this gateway, min-max over the candidates: used alone it acts
// as the least-request policy of other proxies.
type leastRequestScorer struct{}

func newLeastRequestScorer(b *builder) (any, error) { return leastRequestScorer{}, b.noParams() }

func (leastRequestScorer) Score(_ *Request, c []Candidate, out []float64) {
	for i := range c {
		out[i] = float64(c[i].InFlight)
	}
	minMax(out, 0)
}
