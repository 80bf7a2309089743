package routing

import (
	"math"
	"time"
)

// Averages describes the ready endpoints as one, for a gateway that routes over
// several of such fleets.
type Averages struct {
	Ready   int    // endpoints that take work
	Waiting Spread // requests in an engine's queue
	Running Spread // requests in an engine's batch
	KVUsage Spread // part of an engine's KV cache in use, 0..1
}

// Spread is the mean and the population's standard deviation of a value over the
// endpoints that tell it, both NaN when none does.
type Spread struct{ Mean, StdDev float64 }

// Averages returns what holds now. An observation that is stale counts as missing.
func (f *Fleet) Averages() Averages {
	now := f.now()
	oldest := now.Add(-time.Duration(f.staleness.Load()))
	var a Averages
	var waiting, running, usage []float64
	add := func(values *[]float64, v float64) {
		if !math.IsNaN(v) {
			*values = append(*values, v)
		}
	}
	for _, e := range f.Endpoints() {
		if e.stateAt(now) != Ready {
			continue
		}
		a.Ready++
		var c Candidate
		join(e, 0, oldest, &c)
		add(&waiting, c.Waiting)
		add(&running, c.Running)
		add(&usage, c.KVUsage)
	}
	a.Waiting, a.Running, a.KVUsage = spreadOf(waiting), spreadOf(running), spreadOf(usage)
	return a
}

func spreadOf(values []float64) Spread {
	n := float64(len(values))
	mean, square := 0.0, 0.0
	for _, v := range values {
		mean += v / n
	}
	for _, v := range values {
		square += (v - mean) * (v - mean) / n
	}
	if n == 0 {
		return Spread{math.NaN(), math.NaN()}
	}
	return Spread{mean, math.Sqrt(square)}
}
