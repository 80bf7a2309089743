package routing

import "math/rand/v2"

// roundRobinPicker ignores the scores and takes the endpoints in turn, in ID
// order: the one behind the last picked, so that an endpoint that comes or goes
// does not start the round anew.
type roundRobinPicker struct{ last string }

func newRoundRobinPicker(b *builder) (any, error) { return &roundRobinPicker{}, b.noParams() }

func (p *roundRobinPicker) Pick(c []Candidate, _ []float64, _ *rand.Rand) (index, ties int) {
	for i := range c {
		if c[i].Endpoint.id > p.last {
			index = i
			break
		}
	}
	p.last = c[index].Endpoint.id
	return index, 1
}
