package proxy

import (
	"runtime"
	"runtime/debug"
	"time"
)

// Bounds of a wave behind which memory is given back: it took so many connections
// or bytes of bodies more than are left, no more than half is left, and what is left
// is no less than it was a moment ago, or little.
const (
	trimEvery = 2 * time.Second
	trimConns = 256      // each has had some 40 KiB of buffers and stacks
	trimBytes = 64 << 20 // of request bodies
)

// trimmer notices the end of a wave of connections or bodies. Go gives memory back
// slowly, and a process with nothing to do collects once in two minutes: what a
// flood of slow clients has made it take would stay for long.
type trimmer struct{ conns, bytes wave }

// wave is the most that was in use since memory was given back, and what was at last.
type wave struct{ peak, last int64 }

// ended notes what is in use. Half-way down is too early: what the other half had
// would be too little for a wave of its own, and stay.
func (w *wave) ended(now, least int64) bool {
	falls := now < w.last && now > w.peak/8
	w.peak, w.last = max(w.peak, now), now
	return w.peak-now >= least && now <= w.peak/2 && !falls
}

// due notes what is in use and says whether a wave has ended.
func (t *trimmer) due(conns, bytes int64) bool {
	some, many := t.conns.ended(conns, trimConns), t.bytes.ended(bytes, trimBytes)
	if some || many {
		t.conns.peak, t.bytes.peak = conns, bytes
	}
	return some || many
}

// trim gives memory back behind waves until the Server ends. A collection costs
// tens of milliseconds of one processor beside the requests; it happens at most once per wave.
func (s *Server) trim() {
	tick := time.NewTicker(trimEvery)
	defer tick.Stop()
	var t trimmer
	for {
		select {
		case <-s.ended:
			return
		case <-tick.C:
		}
		s.mu.Lock()
		conns := int64(len(s.conns))
		s.mu.Unlock()
		if t.due(conns, int64(s.live.Load().settings.Limits.Buffered)-s.buffers.budget.Load()) {
			runtime.GC()         // pools keep what they hold over one collection
			debug.FreeOSMemory() // collects again
		}
	}
}
