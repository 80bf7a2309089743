package routing

import (
	"math"
	"math/rand/v2"
)

// pickerParams is accepted for every picker. kvgate uses one endpoint and, when
// the attempt fails, decides again: there is no list of fallbacks to size.
type pickerParams struct {
	MaxNumOfEndpoints int `json:"maxNumOfEndpoints"`
}

// maxScorePicker takes the highest total; equal totals are drawn uniformly.
type maxScorePicker struct{}

func newMaxScorePicker(b *builder) (any, error) { return maxScorePicker{}, b.params(&pickerParams{}) }

func (maxScorePicker) Pick(_ []Candidate, totals []float64, rnd *rand.Rand) (index, ties int) {
	best := math.Inf(-1)
	for i, t := range totals {
		switch {
		case t < best: // most
		case t > best:
			best, index, ties = t, i, 1
		case t == best:
			ties++
		}
	}
	if ties < 2 {
		return index, ties
	}
	skip := rnd.IntN(ties)
	for i, t := range totals {
		if t == best {
			if skip == 0 {
				return i, ties
			}
			skip--
		}
	}
	return index, ties
}
