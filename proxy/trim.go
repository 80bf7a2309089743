package proxy

import (
	"runtime"
	"runtime/debug"
	"time"
)

// Bounds of a wave behind which memory is given back: it took so many connections
// or bytes of bodies more than are left, and no more than half is left.
const (
	trimEvery = 2 * time.Second
	trimConns = 256      // each has had some 40 KiB of buffers and stacks
	trimBytes = 64 << 20 // of request bodies
)

// trimmer notices the end of a wave of connections or bodies. Go gives memory back
// slowly, and a process with nothing to do collects once in two minutes: what a
// flood of slow clients has made it take would stay for long.
type trimmer struct{ conns, bytes int64 }

// due notes what is in use and says whether a wave has ended.
func (t *trimmer) due(conns, bytes int64) bool {
	ended := func(peak *int64, now, least int64) bool {
		*peak = max(*peak, now)
		return *peak-now >= least && now <= *peak/2
	}
	some, many := ended(&t.conns, conns, trimConns), ended(&t.bytes, bytes, trimBytes)
	if some || many {
		t.conns, t.bytes = conns, bytes
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
