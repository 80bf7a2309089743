package bench

import (
	"math"
	"slices"
)

func mean(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// quantile returns the q-quantile by the nearest rank, 0 of nothing.
func quantile(v []float64, q float64) float64 { return rank(slices.Sorted(slices.Values(v)), q) }

// rank is quantile of sorted values.
func rank(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// spread returns the coefficient of variation (population) and the largest value over the mean.
func spread(v []float64) (cv, largest float64) {
	m := mean(v)
	if m == 0 {
		return 0, 0
	}
	sum := 0.0
	for _, x := range v {
		d := x - m
		sum += float64(d * d)
	}
	return math.Sqrt(sum/float64(len(v))) / m, slices.Max(v) / m
}
