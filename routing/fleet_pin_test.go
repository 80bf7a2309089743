package routing

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

// pinnedTwice returns the candidates of a pick, and those of one that does not know of any before.
func (f *Fleet) pinnedTwice(r *Request, endpoints []*Endpoint) (got, want []Candidate, degraded, wantDegraded bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	got, degraded = f.pin(r, endpoints, f.now())
	got = slices.Clone(got)
	f.pinned.of = nil
	want, wantDegraded = f.pin(r, endpoints, f.now())
	return got, slices.Clone(want), degraded, wantDegraded
}

func sameCandidates(a, b []Candidate) bool {
	same := func(x, y float64) bool { return x == y || math.IsNaN(x) && math.IsNaN(y) }
	return slices.EqualFunc(a, b, func(x, y Candidate) bool {
		ok := same(x.Waiting, y.Waiting) && same(x.Running, y.Running) && same(x.KVUsage, y.KVUsage)
		x.Waiting, x.Running, x.KVUsage, y.Waiting, y.Running, y.KVUsage = 0, 0, 0, 0, 0, 0
		return ok && x == y
	})
}

// Whatever happens to a fleet, a pick sees what a pick without a memory would.
func TestPinnedIsWhatThereIs(t *testing.T) {
	f := func(t *testing.T, seed uint64, calm bool) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		clock := newTestClock()
		fleet := newTestFleet(clock)
		router := newTestRouter(t, fleet, "")
		all := specs("a", "b", "c", "d", "e", "f")
		fleet.Update(all)
		for _, e := range fleet.Endpoints() {
			e.Observe(observed(0, 0, 0), clock.now())
		}
		var leases []*Lease
		kept := 0
		for step := range 4000 {
			list := fleet.Endpoints()
			e := list[rnd.IntN(len(list))]
			what, kinds := "", 14
			if calm {
				kinds = 5
			}
			switch rnd.IntN(kinds) {
			case 0:
				what = "observe"
				e.Observe(observed(float64(rnd.IntN(9)), float64(rnd.IntN(9)), rnd.Float64()), clock.now().Add(-time.Duration(rnd.IntN(2500))*time.Millisecond))
			case 1, 2:
				what = "route"
				if l, err := router.Route(promptOf("", byte(rnd.IntN(9)), rnd.IntN(5))); err == nil {
					leases = append(leases, l)
				}
			case 3:
				what = "end"
				if len(leases) > 0 {
					i := rnd.IntN(len(leases))
					if rnd.IntN(2) == 0 {
						leases[i].FirstToken()
					} else {
						outcome := Completed
						if !calm {
							outcome = Outcome(rnd.IntN(int(Refused) + 1))
						}
						leases[i].Done(outcome)
						leases = slices.Delete(leases, i, i+1)
					}
				}
			case 4:
				what = "time"
				clock.advance(time.Duration(rnd.IntN(300)) * time.Millisecond)
			case 5:
				what = "more time"
				clock.advance(time.Duration(rnd.IntN(4000)) * time.Millisecond)
			case 6:
				what = "reachable"
				e.SetReachable(rnd.IntN(2) == 0)
			case 7:
				what = "failures"
				for range 1 + rnd.IntN(ejectAfter) {
					e.ReportFailure(clock.now())
				}
			case 8:
				what = "success"
				e.ReportSuccess()
			case 9:
				what = "drain"
				fleet.Drain(e.ID(), rnd.IntN(3) == 0)
			case 10:
				what = "update"
				next := slices.DeleteFunc(slices.Clone(all), func(EndpointSpec) bool { return rnd.IntN(8) == 0 })
				if len(next) > 0 {
					fleet.Update(next)
				}
			case 11:
				what = "models"
				fleet.SetModels(e, []string{"m", "n"}[:1+rnd.IntN(2)], rnd.IntN(3) > 0)
			case 12:
				what = "staleness"
				fleet.SetStaleness(time.Duration(1+rnd.IntN(3)) * time.Second)
			case 13:
				what = "scrape without metrics"
				e.ObserveFailure()
			}
			if !calm && rnd.IntN(2) == 0 {
				continue // several things happen between two picks: one that goes and comes back
			}
			endpoints := fleet.Endpoints()
			if !calm && rnd.IntN(4) == 0 {
				if others, err := fleet.view.Load().resolve(&Request{Model: []byte("n")}); err == nil {
					endpoints = others
				}
			}
			r := &Request{}
			if rnd.IntN(8) == 0 {
				r.Exclude = []*Endpoint{e}
			}
			before := fleet.pinned.made
			got, want, degraded, wantDegraded := fleet.pinnedTwice(r, endpoints)
			if !sameCandidates(got, want) || degraded != wantDegraded {
				t.Fatalf("step %d, after %s: got %+v, degraded %t, want %+v, %t", step, what, got, degraded, want, wantDegraded)
			}
			if fleet.pinned.made == before+1 {
				kept++
			}
			fleet.mu.Lock()
			fleet.pin(&Request{}, endpoints, clock.now())
			fleet.mu.Unlock()
		}
		if least := map[bool]int{true: 2500, false: 20}[calm]; kept < least {
			t.Errorf("picks that made use of the one before: got %d of 4000, want %d", kept, least)
		}
	}
	for seed := range uint64(8) {
		t.Run(fmt.Sprintf("calm %d", seed), func(t *testing.T) { f(t, seed, true) })
		t.Run(fmt.Sprintf("wild %d", seed), func(t *testing.T) { f(t, seed, false) })
	}
}

// A replica that comes to be ready by time alone, after it was left out for two reasons, is found.
func TestPinnedEndsWithAnEjection(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b")
	b := f.Endpoints()[1]
	pin := func(what string, want int) {
		t.Helper()
		f.mu.Lock()
		defer f.mu.Unlock()
		if got, _ := f.pin(&Request{}, f.Endpoints(), c.now()); len(got) != want {
			t.Errorf("candidates %s: got %d, want %d", what, len(got), want)
		}
	}
	b.SetReachable(false)
	pin("while it is down", 1)
	for range ejectAfter {
		b.ReportFailure(c.now())
	}
	pin("while it is down and left out", 1)
	b.down.Store(false) // and no slow start
	b.changed()
	pin("while it is left out", 1)
	c.advance(ejectFor - time.Nanosecond)
	pin("just before its trial", 1)
	c.advance(time.Nanosecond)
	pin("on trial", 2)
}

// Changes that are made while a pick reads are seen by the next one.
func TestPinnedBesideChanges(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b", "c", "d")
	r := newTestRouter(t, f, "")
	var wg sync.WaitGroup
	for i, e := range f.Endpoints() {
		wg.Go(func() {
			for n := range 2000 {
				e.Observe(observed(float64(n), float64(i), 0), c.now())
			}
		})
		wg.Go(func() {
			for range 1000 {
				l, err := r.Route(promptOf("", byte(i), 2))
				if err != nil {
					t.Errorf("Route: got %v, want no error", err)
					return
				}
				l.FirstToken()
				l.Done(Completed)
			}
		})
	}
	wg.Wait()
	got, want, _, _ := f.pinnedTwice(&Request{}, f.Endpoints())
	if !sameCandidates(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	for _, x := range got {
		if x.Waiting != 1999 || x.InFlight != 0 {
			t.Errorf("%s: got %v waiting, %d in flight, want 1999, 0", x.Endpoint.Name(), x.Waiting, x.InFlight)
		}
	}
}

// A replica with requests in flight that goes and comes back between two picks is in
// its slow start at the second one, though it was a candidate at both.
func TestPinnedSeesAReplicaThatCameBackMeanwhile(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b")
	router := newTestRouter(t, f, "")
	for range 8 {
		if _, err := router.Route(promptOf("", 1, 0)); err != nil {
			t.Fatal(err)
		}
	}
	a := f.Endpoints()[0]
	if a.InFlight() == 0 {
		a = f.Endpoints()[1]
	}
	if got, want, _, _ := f.pinnedTwice(&Request{}, f.Endpoints()); len(got) != 2 || len(want) != 2 {
		t.Fatalf("candidates before: got %d and %d, want 2", len(got), len(want))
	}
	f.mu.Lock()
	f.pin(&Request{}, f.Endpoints(), c.now())
	f.mu.Unlock()
	a.SetReachable(false)
	a.SetReachable(true)
	if got, want, _, _ := f.pinnedTwice(&Request{}, f.Endpoints()); len(got) != 1 || len(want) != 1 {
		t.Errorf("candidates in its slow start: got %d and without a memory %d, want 1", len(got), len(want))
	}
}
