package routing

import "testing"

// Equal prompts that come at once must not all go where the first one went: 64 of
// 8,000 tokens over four replicas whose metrics stand still.
func TestExpectedCostSpreadsABurst(t *testing.T) {
	f := func(t *testing.T, blocks, wantMost int) {
		c := newTestClock()
		fleet := readyFleet(t, c, "a", "b", "c", "d")
		r := newTestRouter(t, fleet, "plugins: [{type: expected-cost-scorer}]\n")
		var leases []*Lease
		for range 64 {
			l, err := r.Route(promptOf("m", 1, blocks))
			if err != nil {
				t.Fatal(err)
			}
			leases = append(leases, l)
		}
		for _, e := range fleet.Endpoints() {
			if got := e.InFlight(); got > wantMost {
				t.Errorf("%s: got %d of 64 requests, want at most %d", e.Name(), got, wantMost)
			}
		}
		for _, l := range leases {
			l.FirstToken()
			l.Done(Completed)
		}
		for _, e := range fleet.Endpoints() {
			if e.InFlight() != 0 || e.Awaiting() != 0 || e.PendingTokens() != 0 {
				t.Errorf("%s: got %d in flight, %d awaiting, %d tokens pending in the end, want 0", e.Name(), e.InFlight(), e.Awaiting(), e.PendingTokens())
			}
		}
	}
	t.Run("long prompts", func(t *testing.T) { f(t, 125, 24) })
	t.Run("short prompts", func(t *testing.T) { f(t, 4, 24) })
	t.Run("no prompts", func(t *testing.T) { f(t, 0, 17) })
}

// A conversation stays where its prefix is until the wait there costs more than
// to compute it again elsewhere.
func TestExpectedCostLeavesAnOverloadedReplica(t *testing.T) {
	c := newTestClock()
	fleet := readyFleet(t, c, "a", "b")
	r := newTestRouter(t, fleet, "plugins: [{type: expected-cost-scorer}]\n")
	route := func() *Lease {
		t.Helper()
		l, err := r.Route(promptOf("m", 1, 100))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	first := route()
	home := first.Endpoint
	first.FirstToken()
	first.Done(Completed)
	if l := route(); l.Endpoint != home || l.Uncached != 64 {
		t.Errorf("got %s with %d uncached tokens, want %s with 64", l.Endpoint.Name(), l.Uncached, home.Name())
	} else {
		l.FirstToken()
		l.Done(Completed)
	}
	home.pending.Store(3000)
	home.changed()
	if l := route(); l.Endpoint != home {
		t.Errorf("3,000 tokens before it: got %s, want %s: 6,400 tokens would be computed again", l.Endpoint.Name(), home.Name())
	} else {
		l.FirstToken()
		l.Done(Completed)
	}
	home.pending.Store(30_000)
	home.changed()
	if l := route(); l.Endpoint == home || l.Reason != ReasonSpill {
		t.Errorf("30,000 tokens before it: got %s (%s), want the other replica", l.Endpoint.Name(), l.Reason)
	}
}
