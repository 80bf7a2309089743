package proxy

import "testing"

func TestTrimmer(t *testing.T) {
	var tr trimmer
	f := func(conns, bytes int64, due bool) {
		t.Helper()
		if got := tr.due(conns, bytes); got != due {
			t.Errorf("%d connections, %d bytes: got %t, want %t", conns, bytes, got, due)
		}
	}
	f(10, 0, false)
	f(1000, 0, false)
	f(700, 0, false) // most of the wave is there
	f(400, 0, false) // it still ends: what the others had would stay
	f(200, 0, false)
	f(200, 0, true)
	f(150, 0, false) // said once
	f(0, 0, false)   // too few to matter
	f(1000, 0, false)
	f(600, 0, false)
	f(120, 0, true) // little is left, though it gets less
	f(0, 0, false)
	f(0, 200<<20, false)
	f(0, 150<<20, false)
	f(0, 50<<20, false)
	f(0, 50<<20, true)
	f(0, 60<<20, false)
	f(0, 1<<20, false)
	f(0, 0, false)
	f(5000, 300<<20, false)
	f(0, 0, true)
	f(0, 0, false)
}
