package routing

import (
	"math"
	"math/rand/v2"
)

// randomPicker ignores the scores.
type randomPicker struct{}

func newRandomPicker(b *builder) (any, error) { return randomPicker{}, b.params(&pickerParams{}) }

func (randomPicker) Pick(c []Candidate, _ []float64, rnd *rand.Rand) (index, ties int) {
	return rnd.IntN(len(c)), len(c)
}

// weightedRandomPicker draws in proportion to the totals by keys U^(1/score)
// (Efraimidis and Spirakis, 2006: A-Res with a reservoir of one). When no total
// is above 0 every candidate is equally likely.
type weightedRandomPicker struct{}

func newWeightedRandomPicker(b *builder) (any, error) {
	return weightedRandomPicker{}, b.params(&pickerParams{})
}

func (weightedRandomPicker) Pick(c []Candidate, totals []float64, rnd *rand.Rand) (index, ties int) {
	best := -1.0
	for i, t := range totals {
		if t <= 0 {
			continue
		}
		if key := math.Pow(rnd.Float64(), 1/t); key > best {
			best, index = key, i
		}
	}
	if best < 0 {
		return rnd.IntN(len(c)), len(c)
	}
	return index, 1
}
