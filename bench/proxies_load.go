package bench

import (
	"net/netip"
	"time"
)

// loadSpec is one run of the load generator.
type loadSpec struct {
	targets  []netip.AddrPort // connections go to them in turn
	prompts  *promptSet
	conns    int           // closed loop: connections with one request each at all times; open loop: those open from the start
	rate     float64       // open loop: requests per second, due whatever is in flight; 0 makes it a closed loop
	warmup   time.Duration // before the window that counts
	duration time.Duration // of the window
	stream   bool          // the answers are event streams
	events   int           // events of an answer, the terminator included; 0: any number
	hold     bool          // the answers do not end within the window: they are cut at its end
	nonce    uint64        // of the first request

	// mark is called as the window begins and as it ends, on the thread that makes the load: it must be quick. It may be nil.
	mark func(end bool)
}

// loadResult is what a run of the load generator saw in its window.
type loadResult struct {
	requests  int             // complete answers
	events    int             // events of streams
	elapsed   time.Duration   // length of the window
	latencies []time.Duration // of the requests due in the window, see runLoad
	open      int             // hold: streams with an event behind them at the end

	failures int    // requests due in the window, or cut by its end, without a right answer
	warmup   int    // the same before the window: a proxy that had slept may have lost its connections
	failure  string // the first of failures, or of warmup when there is no other
	nonce    uint64 // of the next request
}

const (
	loadDrain    = 10 * time.Second // answers may take so long beyond the window
	loadMaxConns = 4096
	loadGiveUp   = 1000 // failures
	loadRamp     = 20   // connections opened at once, every loadTick
	loadTick     = 2 * time.Millisecond
)
