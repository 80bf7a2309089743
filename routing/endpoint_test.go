package routing

import (
	"testing"
	"time"
)

// health is a fleet of three with a random picker, seen through its leases.
type health struct {
	t *testing.T
	c *testClock
	f *Fleet
	r *Router
}

func newHealth(t *testing.T) *health {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b", "c")
	return &health{t, c, f, newTestRouter(t, f, "plugins:\n- {type: random-picker}\n")}
}

// pick takes n requests at once and returns the leases of those on the endpoint;
// the others are done with.
func (h *health) pick(n int, e *Endpoint) (on []*Lease) {
	h.t.Helper()
	for range n {
		l, err := h.r.Route(promptOf("m", 1, 0))
		if err != nil {
			h.t.Fatalf("Route: got %v, want no error", err)
		}
		if l.Endpoint == e {
			on = append(on, l)
			continue
		}
		l.Done(Completed)
	}
	return on
}

func (h *health) eject(e *Endpoint) {
	for range ejectAfter {
		e.ReportFailure(h.c.now())
	}
}

func TestEjectionHalfOpen(t *testing.T) {
	f := func(name string, verdict Outcome, back bool) {
		t.Run(name, func(t *testing.T) {
			h := newHealth(t)
			a := h.f.Endpoints()[0]
			h.eject(a)
			if on := h.pick(200, a); len(on) != 0 {
				t.Errorf("while ejected: got %d requests, want 0", len(on))
			}
			h.c.advance(ejectFor)
			on := h.pick(200, a)
			if len(on) != 1 {
				t.Fatalf("on trial: got %d requests at once, want 1", len(on))
			}
			on[0].Done(verdict)
			for _, l := range h.pick(1, a) { // begins its slow start, if it is back
				l.Done(Canceled)
			}
			h.c.advance(slowStart)
			got := len(h.pick(200, a))
			if (got > 1) != back {
				t.Errorf("afterwards: got %d requests at once, want more than one: %v", got, back)
			}
		})
	}
	f("answered", Completed, true)
	f("failed", Failed, false)
	f("given up by the client", Canceled, false)
	f("refused", Refused, false)
}

func TestEjectionRenewed(t *testing.T) {
	h := newHealth(t)
	a := h.f.Endpoints()[0]
	h.eject(a)
	h.c.advance(ejectFor)
	h.pick(200, a)[0].Done(Failed)
	if on := h.pick(200, a); len(on) != 0 {
		t.Errorf("after a failed trial: got %d requests, want 0", len(on))
	}
	h.c.advance(ejectFor - time.Nanosecond)
	if on := h.pick(200, a); len(on) != 0 {
		t.Errorf("until the end of the renewed ejection: got %d requests, want 0", len(on))
	}
}

func TestAllEjectedIsIgnored(t *testing.T) {
	h := newHealth(t)
	for _, e := range h.f.Endpoints() {
		h.eject(e)
	}
	got := map[string]int{}
	for range 300 {
		l, err := h.r.Route(promptOf("m", 1, 0))
		if err != nil {
			t.Fatalf("Route: got %v, want no error", err)
		}
		got[l.Endpoint.Name()]++
		l.Done(Canceled)
	}
	for _, e := range h.f.Endpoints() {
		if n := got[e.Name()]; n < 50 {
			t.Errorf("%s: got %d of 300 requests, want a share", e.Name(), n)
		}
	}
}

// TestSlowStart: the others have 30 requests each; a replica that comes back gets
// one, then a share that grows with time, then what it is picked for.
func TestSlowStart(t *testing.T) {
	f := func(name string, back func(h *health, e *Endpoint)) {
		t.Run(name, func(t *testing.T) {
			h := newHealth(t)
			a := h.f.Endpoints()[0]
			for _, e := range h.f.Endpoints()[1:] {
				e.inFlight.Add(30)
				e.changed()
			}
			back(h, a)
			var on []*Lease
			step := func(age time.Duration, least, most int) {
				t.Helper()
				h.c.advance(age)
				on = append(on, h.pick(300, a)...)
				if n := len(on); n < least || n > most {
					t.Errorf("requests in flight: got %d, want %d to %d", n, least, most)
				}
			}
			step(0, 1, 1)
			step(slowStart/4, 5, 7)    // the even share is 20 and a little
			step(slowStart/4, 11, 14)  // it grows with its own requests
			step(slowStart/2, 50, 314) // no limit
			for _, l := range on {
				l.Done(Completed)
			}
		})
	}
	f("after an ejection", func(h *health, e *Endpoint) {
		h.eject(e)
		h.c.advance(ejectFor)
		for on := h.pick(200, e); len(on) > 0; on = on[1:] {
			on[0].Done(Completed)
		}
	})
	f("after it was unreachable", func(_ *health, e *Endpoint) {
		e.SetReachable(false)
		e.SetReachable(true)
	})
}

// TestSlowStartAlone: a share is never a reason to refuse or to ask who is down.
func TestSlowStartAlone(t *testing.T) {
	h := newHealth(t)
	for _, e := range h.f.Endpoints()[1:] {
		e.SetReachable(false)
	}
	a := h.f.Endpoints()[0]
	a.SetReachable(false)
	a.SetReachable(true)
	if on := h.pick(50, a); len(on) != 50 {
		t.Errorf("got %d of 50 requests, want all", len(on))
	}
}
