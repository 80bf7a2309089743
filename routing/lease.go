package routing

import "sync/atomic"

// Outcome says how a leased request ended.
type Outcome uint8

// The ends of a request.
const (
	// Completed: the replica gave a whole answer, of whatever status below 500.
	Completed Outcome = iota
	// Failed: the replica may have seen the request and broke it.
	Failed
	// Unsent: the replica never saw the request; what was recorded of it is undone.
	Unsent
	// Canceled: the client left, or the gateway gave up for its own reasons.
	Canceled
	// Refused: the replica answered that it has no room (503).
	Refused
)

// Lease is one request on one endpoint: its share of the in-flight counts, and
// the prediction that was made for it. It lives inside its Request and is given
// back exactly once, by Done; later calls do nothing. FirstToken, Usage and Done
// may be called from any one goroutine at a time.
type Lease struct {
	// Endpoint is where the request goes.
	Endpoint *Endpoint
	// Matched of Total blocks of BlockTokens tokens are expected in its cache.
	Matched, Total, BlockTokens int
	// Uncached is the number of prompt tokens that it is expected to compute.
	Uncached int64
	// Reason says why it was picked: see Reason.
	Reason Reason
	// Ties is the number of candidates that scored as well as the picked one.
	Ties int
	// Output is the number of tokens that the engine has generated, when it told
	// so. The caller sets it before Usage.
	Output int64

	router    *Router
	req       *Request
	weight    int64
	predicted int64
	trial     bool          // the endpoint is on trial with this request
	state     atomic.Uint32 // leaseFree, leaseAwaiting, leaseStreaming
}

const (
	leaseFree uint32 = iota
	leaseAwaiting
	leaseStreaming
)

// Reason names why an endpoint was picked.
type Reason uint8

// The reasons of a pick.
const (
	ReasonCold     Reason = iota // nobody holds any of the prompt
	ReasonPrefix                 // nobody holds more of it than the picked one
	ReasonSpill                  // another one holds more, but costs more
	ReasonOnly                   // there was one candidate
	ReasonFallback               // no endpoint was ready
	ReasonRetry                  // a first attempt failed
	ReasonCount
)

var reasonNames = [...]string{"cold", "prefix_hit", "load_spill", "only", "fallback", "retry"}

// String returns the reason as metrics and logs print it.
func (r Reason) String() string { return reasonNames[r] }

// PredictedTokens returns the prompt tokens expected in the endpoint's cache.
func (l *Lease) PredictedTokens() int64 { return l.predicted }

// HashedTokens returns the prompt tokens that could have been expected there: those of whole blocks.
func (l *Lease) HashedTokens() int64 {
	return l.req.realTokens(int64(l.Total) * int64(l.BlockTokens))
}

// take opens the lease. The caller holds the fleet's lock.
func (l *Lease) take(r *Router, req *Request, e *Endpoint) {
	l.router, l.req, l.Endpoint = r, req, e
	l.weight = int64(max(req.Weight, 1))
	e.inFlight.Add(l.weight)
	e.awaiting.Add(l.weight)
	e.pending.Add(l.Uncached)
	e.drain.begin(r.fleet.now())
	if l.trial = e.onTrial(); l.trial {
		e.trial.Add(1)
	}
	e.changed()
	l.state.Store(leaseAwaiting)
}

// FirstToken says that the first content has arrived.
func (l *Lease) FirstToken() {
	if l.state.CompareAndSwap(leaseAwaiting, leaseStreaming) {
		l.endAwaiting(l.Uncached)
	}
}

func (l *Lease) endAwaiting(tokens int64) {
	e := l.Endpoint
	e.pending.Add(-l.Uncached)
	left := e.awaiting.Add(-l.weight)
	e.drain.end(l.router.fleet.now(), tokens, left == 0)
	e.changed()
}

// Usage passes on what the engine said about the finished request: prompt
// tokens, and those of them found in its cache; negative means not told. Call it before Done.
func (l *Lease) Usage(prompt, cached int64) {
	if l.state.Load() != leaseFree {
		l.router.usage(l, prompt, cached)
	}
}

// Done ends the lease.
func (l *Lease) Done(o Outcome) {
	old := l.state.Swap(leaseFree)
	if old == leaseFree {
		return
	}
	e := l.Endpoint
	if old == leaseAwaiting {
		tokens := int64(0)
		if o == Completed {
			tokens = l.Uncached
		}
		l.endAwaiting(tokens)
	}
	e.inFlight.Add(-l.weight)
	switch o {
	case Completed:
		e.ReportSuccess()
	case Failed:
		e.ReportFailure(l.router.fleet.now())
	case Unsent, Refused:
		l.router.undo(l)
	case Canceled:
	}
	if l.trial { // after the verdict, so that no second request slips in before it
		e.trial.Add(-1)
	}
	e.changed()
}
