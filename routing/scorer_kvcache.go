package routing

// kvScorer prefers free KV cache: 1 - usage.
type kvScorer struct{}

func newKVScorer(b *builder) (any, error) { return kvScorer{}, b.noParams() }

func (kvScorer) Score(_ *Request, c []Candidate, out []float64) {
	for i := range c {
		out[i] = 1 - c[i].KVUsage
	}
	fillMissing(out)
}
