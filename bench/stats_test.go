package bench

import (
	"math"
	"testing"
)

func TestStats(t *testing.T) {
	f := func(t *testing.T, v []float64, q, wantRank, wantMean, wantCV, wantMax float64) {
		if got := quantile(v, q); got != wantRank {
			t.Errorf("quantile %v of %v: got %v, want %v", q, v, got, wantRank)
		}
		if got := mean(v); got != wantMean {
			t.Errorf("mean of %v: got %v, want %v", v, got, wantMean)
		}
		cv, largest := spread(v)
		if math.Abs(cv-wantCV) > 1e-12 || math.Abs(largest-wantMax) > 1e-12 {
			t.Errorf("spread of %v: got %v and %v, want %v and %v", v, cv, largest, wantCV, wantMax)
		}
	}
	t.Run("nothing", func(t *testing.T) { f(t, nil, 0.5, 0, 0, 0, 0) })
	t.Run("one", func(t *testing.T) { f(t, []float64{3}, 0.99, 3, 3, 0, 1) })
	t.Run("median", func(t *testing.T) { f(t, []float64{4, 1, 3, 2}, 0.5, 3, 2.5, math.Sqrt(1.25)/2.5, 1.6) })
	t.Run("largest", func(t *testing.T) { f(t, []float64{2, 6}, 1, 6, 4, 0.5, 1.5) })
	t.Run("zeros", func(t *testing.T) { f(t, []float64{0, 0}, 0, 0, 0, 0, 0) })
}
