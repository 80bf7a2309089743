package proxy

import (
	"testing"
	"time"

	"kvgate/configs"
)

func TestRerouteBudget(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	// spend asks once per step of pause, in which requests begin, and returns how often it was let.
	spend := func(b *rerouteBudget, from time.Time, total *uint32, steps int, pause time.Duration, requests uint32, percent, least int) int {
		n := 0
		for i := range steps {
			*total += requests
			if b.take(from.Add(time.Duration(i)*pause), *total, percent, least) {
				n++
			}
		}
		return n
	}
	f := func(name string, steps int, pause time.Duration, requests uint32, percent, least, low, high int) {
		t.Helper()
		total := uint32(1<<32 - 50) // wraps
		got := spend(&rerouteBudget{}, start, &total, steps, pause, requests, percent, least)
		if got < low || got > high {
			t.Errorf("%s: got %d reroutes, want %d to %d", name, got, low, high)
		}
	}
	// All requests of a minute fail: 6000 of them, 20 % and 10 per second.
	f("a fleet that fails", 6000, 10*time.Millisecond, 1, 20, 10, 1700, 1900)
	f("without a share", 6000, 10*time.Millisecond, 1, 0, 10, 590, 700)
	f("without a minimum", 6000, 10*time.Millisecond, 1, 20, 0, 1190, 1210)
	f("never", 6000, 10*time.Millisecond, 1, 0, 0, 0, 0)
	f("one request in ten fails", 600, 100*time.Millisecond, 10, 20, 0, 599, 599)
	f("a burst at the start", 500, 0, 1, 0, 10, 100, 100)

	// Behind hours without a failure the requests of all of them do not count at once.
	var b rerouteBudget
	total := uint32(0)
	spend(&b, start, &total, 1, 0, 1, 20, 0)
	total += 3600 * 100 // 100 per second
	got := spend(&b, start.Add(time.Hour), &total, 5000, 0, 0, 20, 0)
	if got < 190 || got > 210 { // 20 % of those of ten seconds
		t.Errorf("behind an hour: got %d reroutes, want about 200", got)
	}
	b.giveBack()
	if !b.take(start.Add(time.Hour), total, 20, 0) {
		t.Error("behind giveBack: got none, want one")
	}
}

// A fleet that fails as a whole gets little more than its load.
func TestRerouteBudgetHolds(t *testing.T) {
	busy := func(c *stubConn) {
		for {
			if _, err := c.request(); err != nil || !c.answer(503, "{}") {
				return
			}
		}
	}
	f := func(percent, least int, low, high int64) {
		t.Helper()
		a, b := newStub(t, busy), newStub(t, busy)
		g := newGateway(t, func(s *configs.Settings) { s.Upstream.RetryPercent, s.Upstream.RetryMin = percent, least }, a, b)
		c := g.dial()
		const asked = 200
		for range asked {
			want(t, "status", c.ask(post(chat, chatBody)).StatusCode, 503)
		}
		extra := a.requests.Load() + b.requests.Load() - asked
		if extra < low || extra > high {
			t.Errorf("%d %%, %d/s: got %d requests more, want %d to %d", percent, least, extra, low, high)
		}
		denied := g.value("kvgate_reroutes_denied_total{}")
		want(t, "denied", int64(denied), asked-extra)
		want(t, "rerouted", int64(g.value(`kvgate_retries_total{kind="reroute"}`)), extra)
	}
	f(20, 0, 39, 40)
	f(0, 0, 0, 0)
	f(100, 0, 199, 200)

	// A replica alone has no second one: nothing is spent.
	g := newGateway(t, func(s *configs.Settings) { s.Upstream.RetryPercent, s.Upstream.RetryMin = 0, 1 }, newStub(t, busy))
	for range 50 {
		want(t, "status", g.dial().ask(post(chat, chatBody)).StatusCode, 503)
	}
	want(t, "denied", g.value("kvgate_reroutes_denied_total{}"), 0.0)
}
