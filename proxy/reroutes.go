package proxy

import (
	"sync"
	"time"
)

// rerouteWindow is how far back the share of rerouted requests is counted, at least.
const rerouteWindow = 10 * time.Second

// rerouteBudget bounds how many requests are sent to a second replica, so that a
// fleet which fails as a whole gets its load once and not twice. Of the requests of
// the last one or two windows a share may be, and some per second beside it. Only a
// request that wants a second replica touches it: the count of all requests is the
// Server's.
type rerouteBudget struct {
	mu           sync.Mutex
	older, newer rerouteSpan
}

// rerouteSpan is what was spent since a point in time.
type rerouteSpan struct {
	at       time.Time
	requests uint32 // all that had begun by then, modulo 2^32
	spent    int
}

// take spends one reroute if the budget has it. requests is the number of requests
// that have begun, modulo 2^32; percent of them and least per second are allowed.
func (b *rerouteBudget) take(now time.Time, requests uint32, percent, least int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch age := now.Sub(b.older.at); {
	case age > 3*rerouteWindow: // nobody has asked for long: assume that requests came evenly
		recent := float64(requests-b.older.requests) * rerouteWindow.Seconds() / age.Seconds()
		b.older = rerouteSpan{at: now.Add(-rerouteWindow), requests: requests - uint32(recent)}
		b.newer = rerouteSpan{at: now, requests: requests}
	case now.Sub(b.newer.at) >= rerouteWindow:
		b.older, b.newer = b.newer, rerouteSpan{at: now, requests: requests}
	}
	allowed := float64(requests-b.older.requests)*float64(percent)/100 + now.Sub(b.older.at).Seconds()*float64(least)
	if float64(b.older.spent+b.newer.spent+1) > allowed {
		return false
	}
	b.newer.spent++
	return true
}

// giveBack returns what take has spent: there was no second replica.
func (b *rerouteBudget) giveBack() {
	b.mu.Lock()
	b.newer.spent--
	b.mu.Unlock()
}
