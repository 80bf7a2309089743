package routing

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// What one answer does to the correction of a capacity: 100 blocks, of which some
// were expected and some were there.
func TestApproxLearns(t *testing.T) {
	newProducer := func(t *testing.T, parameters string) (*approxProducer, *Fleet) {
		f := readyFleet(t, newTestClock(), "a", "b")
		r := newTestRouter(t, f, fmt.Sprintf("plugins:\n- {type: expected-cost-scorer}\n- {type: approx-prefix-cache-producer, parameters: {%s}}\n", parameters))
		a, ok := r.producers[0].Producer.(*approxProducer)
		if !ok {
			t.Fatalf("got producer %T, want the approximate one", r.producers[0].Producer)
		}
		return a, f
	}
	f := func(t *testing.T, factor float64, blocks, expected int, cached, want float64) {
		a, fleet := newProducer(t, "autoTune: true")
		e := fleet.Endpoints()[1]
		ch := &chain{hashes: make([]uint64, blocks)}
		a.Told(ch, e, 0, 0)
		if blocks > learnSlack {
			a.store.learned[e.slot].factor = factor
		}
		a.Told(ch, e, expected, cached)
		got := 1.0
		if blocks > learnSlack {
			got = a.store.learned[e.slot].factor
		}
		if math.Abs(got-want) > 1e-12 {
			t.Errorf("factor %v, %d of %d blocks expected, %v of the prompt there: got %v, want %v", factor, expected, blocks, cached, got, want)
		}
	}
	t.Run("all dropped", func(t *testing.T) { f(t, 1, 100, 100, 0, 1-0.05) })
	t.Run("half dropped", func(t *testing.T) { f(t, 1, 100, 80, 0.3, 1-0.05*0.5) })
	t.Run("more there", func(t *testing.T) { f(t, 1, 100, 20, 0.6, 1+0.05*0.4) })
	t.Run("as expected", func(t *testing.T) { f(t, 1, 100, 80, 0.8, 1) })
	t.Run("off by the slack", func(t *testing.T) { f(t, 1, 100, 80, 0.78, 1) })
	t.Run("back towards what was told", func(t *testing.T) { f(t, 0.5, 100, 80, 0.8, 0.5*(1+0.05*0.03*0.8)) })
	t.Run("back, not past it", func(t *testing.T) { f(t, 0.9999, 100, 100, 1, 1) })
	t.Run("back from above only by what was dropped", func(t *testing.T) { f(t, 3, 100, 80, 0.8, 3) })
	t.Run("both", func(t *testing.T) { f(t, 0.5, 100, 80, 0.4, 0.5*(1+0.05*(-0.4+0.03*0.4))) })
	t.Run("least", func(t *testing.T) { f(t, 1./16, 100, 100, 0, 1./16) })
	t.Run("most", func(t *testing.T) { f(t, 15.9, 100, 0, 1, 16) })
	t.Run("nonsense from the engine", func(t *testing.T) { f(t, 1, 100, 50, 7, 1+0.05*0.5) })
	t.Run("too short to tell", func(t *testing.T) { f(t, 1, learnSlack, learnSlack, 0, 1) })

	t.Run("autoTune off", func(t *testing.T) {
		a, fleet := newProducer(t, "autoTune: false, blockSizeTokens: 64")
		a.Told(&chain{hashes: make([]uint64, 100)}, fleet.Endpoints()[0], 100, 0)
		if len(a.store.learned) != 0 {
			t.Errorf("got %v, want nothing learned", a.store.learned)
		}
	})
	t.Run("another endpoint in the slot", func(t *testing.T) {
		a, fleet := newProducer(t, "autoTune: true")
		e := fleet.Endpoints()[0]
		ch := &chain{hashes: make([]uint64, 100)}
		a.Told(ch, e, 100, 0)
		next := newEndpoint(spec("c"))
		next.slot = e.slot
		a.Told(ch, next, 100, 1)
		if got := a.store.learned[e.slot]; got.endpoint != next || got.factor != 1 {
			t.Errorf("got factor %v of %s, want 1 of c", got.factor, got.endpoint.Name())
		}
	})
}

// A correction settles near the size at which the engine drops what the index drops.
func TestApproxLearnsTheCapacity(t *testing.T) {
	f := func(t *testing.T, told, truth int64, wantLeast, wantMost int) {
		c := newTestClock()
		fleet := readyFleet(t, c, "a")
		r := newTestRouter(t, fleet, "plugins: [{type: expected-cost-scorer}]\n")
		e := fleet.Endpoints()[0]
		m := observed(0, 0, 0)
		m.BlockTokens, m.CapacityTokens = 16, told
		e.Observe(m, c.now())
		// The engine: prompts of 10 blocks, the newest `truth` tokens of them.
		var held []byte
		rnd := rand.New(rand.NewPCG(1, 1))
		for range 20_000 {
			seed := byte(rnd.IntN(128))
			l, err := r.Route(promptOf("m", seed, 10))
			if err != nil {
				t.Fatal(err)
			}
			cached := int64(0)
			for k, s := range held {
				if s == seed {
					cached = 640
					held = append(held[:k], held[k+1:]...)
					break
				}
			}
			held = append(held, seed)
			if int64(len(held)) > truth/640 {
				held = held[1:]
			}
			l.FirstToken()
			l.Usage(640, cached)
			l.Done(Completed)
		}
		if got := fleet.indexes[0].index.Capacity(e.slot); got < wantLeast || got > wantMost {
			t.Errorf("told %d tokens, %d in truth: got %d blocks, want %d to %d", told, truth, got, wantLeast, wantMost)
		}
	}
	const truth = 64 * 640
	t.Run("told the truth", func(t *testing.T) { f(t, truth, truth, 580, 700) })
	t.Run("told four times as much", func(t *testing.T) { f(t, 4*truth, truth, 580, 800) })
	t.Run("told half of it", func(t *testing.T) { f(t, truth/2, truth, 560, 700) })
}

// TestCapacityInTheEnginesTokens: what a replica holds is told in its own tokens, and
// a block of 256 bytes has as many of them as were learned for the model.
func TestCapacityInTheEnginesTokens(t *testing.T) {
	f := func(t *testing.T, bytesPerToken float64, want int) {
		t.Helper()
		clock := newTestClock()
		fleet := readyFleet(t, clock, "a")
		m := observed(0, 0, 0)
		m.BlockTokens, m.CapacityTokens = 16, 6400
		fleet.Endpoints()[0].Observe(m, clock.now())
		r := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n")
		for range 2000 {
			fleet.ratioOf([]byte("m")).learn(1000*bytesPerToken, 1000)
		}
		for id := range byte(200) {
			l, err := r.Route(promptOf("m", id, 1))
			if err != nil {
				t.Fatal(err)
			}
			l.Done(Completed)
		}
		if got := fleet.IndexBlocks(fleet.Endpoints()[0]); got != want {
			t.Errorf("%v bytes per token: got %d blocks kept, want %d", bytesPerToken, got, want)
		}
	}
	f(t, 4, 100)
	f(t, 2, 50)
	f(t, 8, 200)
	f(t, 4.1, 100) // no other capacity for a little
}
