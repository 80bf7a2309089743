package routing

import (
	"math"
	"slices"
	"sync/atomic"
	"time"
)

// changes lists the endpoints of which something has changed that candidates are
// made of. Anybody puts one there; who holds Fleet.mu takes them all.
type changes struct{ first atomic.Pointer[Endpoint] }

// change is an endpoint's place in the list.
type change struct {
	of     *changes    // nil without a fleet
	listed atomic.Bool // set by who puts it there, reset by who takes it
	next   *Endpoint
	row    int // of its candidate when it was last pinned. Guarded by Fleet.mu
}

// changed is called behind every change of what stateAt, warm and join read: a pick
// looks at those endpoints again, and at no others.
func (e *Endpoint) changed() {
	c := &e.change
	if c.of == nil || c.listed.Load() || c.listed.Swap(true) {
		return
	}
	for {
		c.next = c.of.first.Load()
		if c.of.first.CompareAndSwap(c.next, e) {
			return
		}
	}
}

// pinned are the candidates of the last pick. The next one among the same endpoints
// makes those anew that have changed, where a thousand would take it longer than all
// the rest. Guarded by Fleet.mu.
type pinned struct {
	of         []*Endpoint // a slice of a view; nil: to be made anew
	staleness  time.Duration
	until      time.Time // then time alone changes something
	candidates []Candidate
	made       uint64 // times that it was made anew: until then rows stay what they are
}

// serves says whether the candidates are those of a pick among endpoints at that time, but for changes.
func (p *pinned) serves(r *Request, endpoints []*Endpoint, now time.Time, staleness time.Duration) bool {
	return len(r.Exclude) == 0 && len(p.of) > 0 && len(p.of) == len(endpoints) && &p.of[0] == &endpoints[0] &&
		p.staleness == staleness && !now.After(p.until)
}

// pin returns the candidates of a request: the ready endpoints; if there are none,
// those that are down (a guess beats a refusal); if there are none, those that were
// never scraped. degraded says that it was not the first choice. The candidates must
// not be changed, and are valid until the next pick. The caller holds mu.
func (f *Fleet) pin(r *Request, endpoints []*Endpoint, now time.Time) (c []Candidate, degraded bool) {
	p, staleness := &f.pinned, time.Duration(f.staleness.Load())
	serves := p.serves(r, endpoints, now, staleness)
	for e := f.changes.first.Swap(nil); e != nil; {
		next := e.change.next
		e.change.listed.Store(false) // before it is read: what changes behind that lists it again
		serves = serves && p.renew(e, now)
		e = next
	}
	if serves {
		return p.candidates, false
	}
	p.of, p.staleness, p.until = nil, staleness, now.Add(time.Hour) // or before
	p.candidates = slices.Grow(p.candidates[:0], len(endpoints))
	p.made++
	even := evenShare(endpoints)
	lasts := even < 0 && len(r.Exclude) == 0
	for _, want := range [...]State{Ready, Ready, Down, Starting} {
		for _, e := range endpoints {
			p.expect(e, now)
			if e.stateAt(now) != want || (len(r.Exclude) > 0 && slices.Contains(r.Exclude, e)) {
				continue
			}
			if even >= 0 && !e.warm(now, even) {
				continue
			}
			e.change.row = len(p.candidates)
			p.candidates = p.candidates[:e.change.row+1]
			p.join(e, now)
		}
		if len(p.candidates) > 0 {
			if lasts && want == Ready {
				p.of = endpoints
			}
			return p.candidates, want != Ready
		}
		even = -1 // rather a replica in its slow start than one that is down
	}
	return p.candidates, true
}

// renew brings the candidates up to date with a change of an endpoint. It returns
// false when there is one more or less of them, or a slow start has begun.
func (p *pinned) renew(e *Endpoint, now time.Time) bool {
	p.expect(e, now)
	row, ready := e.change.row, e.stateAt(now) == Ready
	if row >= len(p.candidates) || p.candidates[row].Endpoint != e {
		return !ready || !slices.Contains(p.of, e)
	}
	if !ready || e.returned.Load() != 0 {
		return false
	}
	p.join(e, now)
	return true
}

// join makes the candidate of an endpoint, in its row.
func (p *pinned) join(e *Endpoint, now time.Time) {
	row := e.change.row
	if until := join(e, row, now.Add(-p.staleness), &p.candidates[row]); !until.IsZero() {
		p.ends(until.Add(p.staleness))
	}
}

// expect notes when an endpoint that is left out is to be tried again.
func (p *pinned) expect(e *Endpoint, now time.Time) {
	if until := e.ejectedUntil.Load(); until > now.UnixNano() {
		p.ends(time.Unix(0, until-1))
	}
}

// ends says that after t the candidates are others.
func (p *pinned) ends(t time.Time) {
	if t.Before(p.until) {
		p.until = t
	}
}

// evenShare returns what each endpoint would have of the requests in flight, and
// a negative number when no endpoint is in its slow start.
func evenShare(endpoints []*Endpoint) float64 {
	slow := false
	for _, e := range endpoints {
		slow = slow || e.returned.Load() != 0
	}
	if !slow {
		return -1
	}
	total := 0
	for _, e := range endpoints {
		total += e.InFlight()
	}
	return float64(total) / float64(len(endpoints))
}

// join is the one place where scraped and inline truth meet. It sets all of c:
// observations from before oldest are not believed. It returns when the one that is
// believed was made.
func join(e *Endpoint, row int, oldest time.Time, c *Candidate) (at time.Time) {
	c.Endpoint, c.Row, c.slot = e, row, e.slot
	if o := e.Observation(); o != nil && !o.At.Before(oldest) {
		c.Waiting, c.Running, c.KVUsage, at = o.Waiting, o.Running, o.KVUsage, o.At
	} else {
		c.Waiting, c.Running, c.KVUsage = math.NaN(), math.NaN(), math.NaN()
	}
	c.Awaiting, c.InFlight, c.PendingTokens = e.Awaiting(), e.InFlight(), e.PendingTokens()
	c.DrainedSeconds, c.DrainedTokens = e.Drained()
	return at
}
