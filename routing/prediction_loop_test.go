package routing

import (
	"math/rand/v2"
	"testing"
)

// loopEngine is an engine's prefix cache: blocks of 16 tokens, unlimited.
type loopEngine map[uint64]bool

// serve returns how many tokens of a prompt, given as chained hashes of 64-token
// blocks, are found, and keeps them all.
func (e loopEngine) serve(hashes []uint64) (cached int64) {
	hit := true
	for i, h := range hashes {
		hit = hit && e[h] && i < len(hashes)-1 // the last block is computed always
		if hit {
			cached += 64
		}
		e[h] = true
	}
	return cached
}

// loopRun sends conversations behind a common head to four replicas, eight at a
// time, restarts the first replica, and returns the mean error of the replica's
// last 200 answers before that and of its answers 51 to 100 after it, relative to
// the prompt.
func loopRun(t *testing.T, withLoop bool) (before, after float64) {
	t.Helper()
	r := rand.New(rand.NewPCG(7, 8))
	clock := newTestClock()
	fleet := readyFleet(t, clock, "a", "b", "c", "d")
	router := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n- {type: least-request-scorer}\n")
	if !withLoop {
		type deaf struct{ Observer } // does not distrust
		for i := range router.observers {
			router.observers[i].Observer = deaf{router.observers[i].Observer}
		}
	}
	engines := map[*Endpoint]loopEngine{}
	for _, e := range fleet.Endpoints() {
		engines[e] = loopEngine{}
	}
	restarted := fleet.Endpoints()[0]
	head := make([]uint64, 20)
	for i := range head {
		head[i] = r.Uint64()
	}
	histories := make([][]uint64, 800)
	type inFlight struct {
		lease  *Lease
		req    *Request
		hashes []uint64
	}
	var running []inFlight
	var errs []float64 // of the restarted replica's answers
	finish := func() {
		f := running[0]
		running = running[1:]
		cached := engines[f.lease.Endpoint].serve(f.hashes)
		prompt := int64(64 * len(f.hashes))
		if f.lease.Endpoint == restarted {
			off := f.lease.PredictedTokens() - cached
			errs = append(errs, float64(max(off, -off))/float64(prompt))
		}
		f.lease.Usage(prompt, cached)
		f.lease.Done(Completed)
	}
	send := func() {
		id := r.IntN(len(histories))
		h := histories[id]
		if len(h) == 0 {
			h = append(h, head...)
		}
		for range 1 + r.IntN(4) { // what was said since
			h = append(h, r.Uint64())
		}
		if len(h) > 120 {
			h = append(h[:20:20], r.Uint64()) // another conversation
		}
		histories[id] = h
		req := &Request{Model: []byte("m"), Weight: 1}
		req.SetChain(int64(64*len(h)), h)
		l, err := router.Route(req)
		if err != nil {
			t.Fatal(err)
		}
		running = append(running, inFlight{l, req, h})
		if len(running) == 8 {
			finish()
		}
	}
	mean := func(v []float64) (m float64) {
		for _, x := range v {
			m += x / float64(len(v))
		}
		return m
	}
	for range 8000 {
		send()
	}
	before = mean(errs[len(errs)-200:])
	engines[restarted] = loopEngine{}
	errs = nil
	for len(errs) < 100 {
		send()
	}
	return before, mean(errs[50:100])
}

// TestLoopAfterRestart: a replica restarts under load. Its answers correct the
// index within fifty of them; without that the error stays.
func TestLoopAfterRestart(t *testing.T) {
	const most = 0.05
	before, after := loopRun(t, true)
	if before > most || after > most {
		t.Errorf("with the loop: got an error of %.3f before and %.3f after fifty answers, want at most %v", before, after, most)
	}
	before, after = loopRun(t, false)
	if before > most || after <= most {
		t.Errorf("without the loop: got an error of %.3f before and %.3f after fifty answers, want it above %v still", before, after, most)
	}
}
