package kvindex

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
)

// prompts returns n chains of that many blocks, all different.
func prompts(n, blocks int) [][]uint64 {
	r := rand.New(rand.NewPCG(uint64(n), uint64(blocks)))
	out := make([][]uint64, n)
	for i := range out {
		out[i] = make([]uint64, blocks)
		for k := range out[i] {
			out[i][k] = r.Uint64()
		}
	}
	return out
}

// matches returns how many blocks each of the first slots holds.
func matches(x *Index, slots int, hashes []uint64) []int32 {
	active := make([]uint64, (slots+63)/64)
	for s := range slots {
		active[s/64] |= 1 << (s % 64)
	}
	matched := make([]int32, slots)
	x.Match(hashes, active, matched)
	return matched
}

func TestRecord(t *testing.T) {
	f := func(t *testing.T, name string, capacity int, record [][]uint64, query []uint64, want int32) {
		t.Helper()
		x := New(1)
		x.SetCapacity(0, capacity)
		for _, hashes := range record {
			x.Record(0, hashes)
		}
		if got := matches(x, 1, query)[0]; got != want {
			t.Errorf("%s: got %d blocks, want %d", name, got, want)
		}
	}
	type p = []uint64
	f(t, "nothing recorded", 8, nil, p{1}, 0)
	f(t, "nothing asked", 8, []p{{1}}, nil, 0)
	f(t, "whole", 8, []p{{1, 2, 3}}, p{1, 2, 3}, 3)
	f(t, "longer question", 8, []p{{1, 2}}, p{1, 2, 3}, 2)
	f(t, "another tail", 8, []p{{1, 2, 3}}, p{1, 4}, 1)
	f(t, "a gap ends the match", 8, []p{{1, 2}, {4}}, p{1, 2, 3, 4}, 2)
	f(t, "hash 0", 8, []p{{0, 1}}, p{0, 1}, 2)
	f(t, "hash 0 not recorded", 8, []p{{1}}, p{0}, 0)
	f(t, "capacity 0", 0, []p{{1, 2}}, p{1, 2}, 0)
	f(t, "negative capacity", -3, []p{{1, 2}}, p{1, 2}, 0)
	f(t, "capacity 1", 1, []p{{1}, {2}}, p{2}, 1)
	f(t, "capacity 1 evicts", 1, []p{{1}, {2}}, p{1}, 0)
	f(t, "three prompts, room for two", 2, []p{{1}, {2}, {3}}, p{1}, 0)
	f(t, "three prompts, room for two, the second", 2, []p{{1}, {2}, {3}}, p{2}, 1)
	f(t, "use keeps", 2, []p{{1}, {2}, {1}, {3}}, p{1}, 1)
	f(t, "longer than the capacity keeps its head", 3, []p{{1, 2, 3, 4, 5}}, p{1, 2, 3, 4, 5}, 3)
	f(t, "tail goes first", 4, []p{{1, 2, 3}, {7, 8}}, p{1, 2, 3}, 2)
	f(t, "repeats", 8, []p{{1, 2, 1, 2, 3}}, p{1, 2, 1, 2, 3}, 5)
}

func TestRecordReturnsHeld(t *testing.T) {
	x := New(1)
	x.SetCapacity(0, 4)
	f := func(t *testing.T, hashes []uint64, want int) {
		t.Helper()
		if got := x.Record(0, hashes); got != want {
			t.Errorf("Record(%d): got %d blocks held before, want %d", hashes, got, want)
		}
	}
	f(t, []uint64{1, 2}, 0)
	f(t, []uint64{1, 2}, 2)
	f(t, []uint64{1}, 1)
	f(t, []uint64{1, 3}, 1)
	f(t, []uint64{5, 6, 7}, 0)
	f(t, []uint64{1, 2}, 1)
	f(t, nil, 0)
	if got := x.Record(1, []uint64{8}); got != 0 {
		t.Errorf("Record to a slot without a capacity: got %d, want 0", got)
	}
}

func TestForgetUndoesRecord(t *testing.T) {
	x := New(1)
	x.SetCapacity(3, 10)
	x.Forget(4, []uint64{1}, 0) // a slot that never was
	x.Forget(3, []uint64{1}, 0)
	x.Record(3, []uint64{1, 2})
	held := x.Record(3, []uint64{1, 2, 3, 4})
	x.Forget(3, []uint64{1, 2, 3, 4}, held)
	f := func(name string, hashes []uint64, want int) {
		t.Helper()
		if got := matches(x, 4, hashes)[3]; int(got) != want {
			t.Errorf("%s: got %d blocks, want %d", name, got, want)
		}
	}
	f("after Forget", []uint64{1, 2, 3, 4}, 2)
	if x.Len(3) != 2 || x.Total() != 2 || x.Distinct() != 2 {
		t.Errorf("after Forget: got %d, %d, %d blocks, want 2", x.Len(3), x.Total(), x.Distinct())
	}
	held = x.Record(3, []uint64{1, 2, 5, 6})
	x.Record(3, []uint64{1, 2, 5, 7})
	x.Forget(3, []uint64{1, 2, 5, 6}, held)
	f("another prompt stands on it", []uint64{1, 2, 5, 7}, 4)
	f("what is its own is gone", []uint64{1, 2, 5, 6}, 3)
	x.Record(3, []uint64{1, 2, 5, 7, 8})
	x.Forget(3, []uint64{1, 2, 5, 7}, 3)
	f("the prompt went on", []uint64{1, 2, 5, 7, 8}, 5)
}

func TestSlotIsReused(t *testing.T) {
	x := New(1)
	for _, slot := range []int{0, 70} {
		x.SetCapacity(slot, 10)
		x.Record(slot, []uint64{1, 2})
	}
	x.Clear(0)
	x.Clear(500) // a slot that never was
	if got := x.Record(0, []uint64{1}); got != 0 || x.Capacity(0) != 0 || x.Len(0) != 0 {
		t.Errorf("cleared slot: got %d held, capacity %d, length %d, want none", got, x.Capacity(0), x.Len(0))
	}
	x.SetCapacity(0, 5)
	x.Record(0, []uint64{9})
	if got, want := matches(x, 71, []uint64{1, 2}), int32(2); got[0] != 0 || got[70] != want {
		t.Errorf("after reuse: got %d and %d blocks, want 0 and %d", got[0], got[70], want)
	}
}

func TestResetKeepsCapacities(t *testing.T) {
	x := New(1)
	x.SetCapacity(0, 10)
	x.Record(0, []uint64{1, 2})
	x.Reset()
	if x.Len(0) != 0 || x.Total() != 0 || x.Distinct() != 0 || x.Capacity(0) != 10 {
		t.Errorf("got length %d, total %d, distinct %d, capacity %d, want 0, 0, 0, 10",
			x.Len(0), x.Total(), x.Distinct(), x.Capacity(0))
	}
	x.Record(0, []uint64{2, 3})
	if got := matches(x, 1, []uint64{2, 3})[0]; got != 2 {
		t.Errorf("after Reset and Record: got %d blocks, want 2", got)
	}
}

// Memory follows what is held, not what may be held.
func TestBytesFollowContent(t *testing.T) {
	x := New(1)
	x.SetCapacity(0, 1<<30)
	empty := x.Bytes()
	if empty > 1<<20 {
		t.Errorf("empty with a capacity of 2^30: got %d bytes, want at most %d", empty, 1<<20)
	}
	all := prompts(1, 100000)[0]
	for chunk := range slices.Chunk(all, 100) {
		x.Record(0, chunk)
	}
	full := x.Bytes()
	if got := float64(full-empty) / float64(len(all)); got < 8 || got > 20 {
		t.Errorf("full: got %.1f bytes per block, want 8 to 20", got)
	}
	x.SetCapacity(0, 100)
	if got := x.Bytes(); x.Len(0) != 100 || got > empty+(full-empty)/4 {
		t.Errorf("shrunk from %d to %d blocks: got %d bytes, want at most a quarter of %d", len(all), x.Len(0), got, full)
	}
}

// The counts may be read while the owner works; the race detector judges.
func TestCountsWhileWriting(t *testing.T) {
	x := New(1)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				if n := x.Len(70) + x.Total() + x.Distinct() + x.Capacity(3); n < 0 || x.Bytes() <= 0 {
					t.Errorf("got a sum of %d and %d bytes, want them positive", n, x.Bytes())
				}
			}
		}
	})
	for i, hashes := range prompts(200, 20) {
		slot := i % 150
		x.SetCapacity(slot, 10+i%20)
		x.Record(slot, hashes)
		if i%50 == 49 {
			x.Clear(slot)
		}
	}
	x.Reset()
	close(done)
	wg.Wait()
}

// filled returns an index whose slots hold different prompts and the given one, which each slot holds a bit less of.
func filled(slots, capacity int, shared []uint64) *Index {
	x := New(1)
	r := rand.New(rand.NewPCG(5, uint64(slots)))
	own := make([]uint64, 50)
	for slot := range slots {
		x.SetCapacity(slot, capacity)
		for x.Len(slot) < capacity {
			for k := range own {
				own[k] = r.Uint64()
			}
			x.Record(slot, own)
		}
		x.Record(slot, shared[:len(shared)-slot*len(shared)/(2*slots)])
	}
	return x
}

func all(active []uint64, slots int) {
	for s := range slots {
		active[s/64] |= 1 << (s % 64)
	}
}

func TestIndexAllocsNothing(t *testing.T) {
	const slots, capacity = 200, 600
	shared := prompts(1, 128)[0]
	x := filled(slots, capacity, shared)
	active, matched := make([]uint64, (slots+63)/64), make([]int32, slots)
	cold := prompts(200, 128)
	f := func(t *testing.T, name string, op func(i int)) {
		t.Helper()
		i := 0
		for range 2000 { // until shards and lists have reached their size
			op(i)
			i++
		}
		if got := testing.AllocsPerRun(1000, func() { op(i); i++ }); got != 0 {
			t.Errorf("%s: got %v allocations, want 0", name, got)
		}
	}
	f(t, "match", func(int) {
		all(active, slots)
		if got := x.Match(shared, active, matched); got != len(shared) {
			t.Fatalf("match: got %d blocks, want %d", got, len(shared))
		}
	})
	f(t, "match nothing", func(i int) {
		all(active, slots)
		if got := x.Match(cold[i%len(cold)], active, matched); got != 0 {
			t.Fatalf("match nothing: got %d blocks, want 0", got)
		}
	})
	f(t, "record warm", func(int) {
		if got := x.Record(0, shared); got != 128 {
			t.Fatalf("record warm: got %d held, want 128", got)
		}
	})
	f(t, "forget and record", func(int) {
		x.Forget(0, shared, 0)
		if got := x.Record(0, shared); got != 0 {
			t.Fatalf("forget and record: got %d held, want 0", got)
		}
	})
	f(t, "record evicting", func(i int) {
		if got := x.Record(7, cold[i%len(cold)]); got != 0 || x.Len(7) != capacity {
			t.Fatalf("record evicting: got %d held before, %d now, want 0, %d", got, x.Len(7), capacity)
		}
	})
}

func TestBlocksAllocNothing(t *testing.T) {
	h := NewBlocks(1)
	hashes := prompts(1, 1000)[0]
	for _, hash := range hashes {
		h.Add(hash, 70)
		h.Add(hash, 3)
		h.Remove(hash, 3)
	}
	active, matched := make([]uint64, 2), make([]int32, 128)
	fresh := make([]uint64, 0, 100)
	i := 0
	got := testing.AllocsPerRun(1000, func() {
		hash := hashes[i%len(hashes)]
		if i++; !h.Add(hash, 3) || !h.Has(hash, 3) || !h.Remove(hash, 3) || h.Has(hash, 3) {
			t.Fatalf("hash %d was not added and removed", i)
		}
		part := hashes[i%900:][:100]
		if fresh = h.AddAll(part, 4, fresh[:0]); len(fresh) != 100 {
			t.Fatalf("AddAll: got %d fresh, want 100", len(fresh))
		}
		active[0], active[1] = 1<<4, 1<<6
		if got := h.Walk(part, active, matched); got != 100 {
			t.Fatalf("Walk: got %d, want 100", got)
		}
		for _, hash := range part {
			h.Remove(hash, 4)
		}
	})
	if got != 0 {
		t.Errorf("got %v allocations, want 0", got)
	}
}

func BenchmarkMatch128(b *testing.B) {
	for _, slots := range []int{4, 16, 100, 1000} {
		b.Run(fmt.Sprintf("endpoints=%d", slots), func(b *testing.B) {
			shared := prompts(1, 128)[0]
			x := filled(slots, min(31250, 2000000/slots), shared)
			active, matched := make([]uint64, (slots+63)/64), make([]int32, slots)
			for b.Loop() {
				all(active, slots)
				x.Match(shared, active, matched)
			}
		})
	}
}

// BenchmarkMatchMany128 asks for a different prompt each time, so that nothing of it is in a cache.
func BenchmarkMatchMany128(b *testing.B) {
	for _, slots := range []int{16, 100} {
		b.Run(fmt.Sprintf("endpoints=%d", slots), func(b *testing.B) {
			x := New(1)
			held := prompts(slots*100, 128)
			for i, hashes := range held {
				x.SetCapacity(i%slots, 31250)
				x.Record(i%slots, hashes)
			}
			active, matched := make([]uint64, (slots+63)/64), make([]int32, slots)
			i := 0
			for b.Loop() {
				all(active, slots)
				x.Match(held[i*7919%len(held)], active, matched)
				i++
			}
		})
	}
}

// BenchmarkMatchUnknown128 asks for a prompt that nobody holds.
func BenchmarkMatchUnknown128(b *testing.B) {
	x := filled(16, 31250, prompts(1, 128)[0])
	cold := prompts(4000, 128)
	active, matched := make([]uint64, 1), make([]int32, 16)
	i := 0
	for b.Loop() {
		all(active, 16)
		x.Match(cold[i%len(cold)], active, matched)
		i++
	}
}

func BenchmarkRecordWarm128(b *testing.B) {
	shared := prompts(1, 128)[0]
	x := filled(16, 31250, shared)
	for b.Loop() {
		x.Record(0, shared)
	}
}

// BenchmarkRecordHeld128 records prompts that are held but not in front.
func BenchmarkRecordHeld128(b *testing.B) {
	x := New(1)
	held := prompts(16*200, 128)
	for i, hashes := range held {
		x.SetCapacity(i%16, 31250)
		x.Record(i%16, hashes)
	}
	i := 0
	for b.Loop() {
		x.Record(i%16, held[i%len(held)])
		i++
	}
}

func BenchmarkRecordEvicting128(b *testing.B) {
	for _, slots := range []int{16, 100} {
		b.Run(fmt.Sprintf("endpoints=%d", slots), func(b *testing.B) {
			x := filled(slots, 31250, prompts(1, 128)[0])
			cold := prompts(slots*400, 128)
			i := 0
			for b.Loop() {
				x.Record(i%slots, cold[i%len(cold)])
				i++
			}
		})
	}
}

// BenchmarkRecordTurn records the next turn of conversations whose head, 85 % of
// the prompt, is held, on endpoints that are full.
func BenchmarkRecordTurn(b *testing.B) {
	for _, blocks := range []int{256, 2048} {
		b.Run(fmt.Sprintf("blocks=%d", blocks), func(b *testing.B) {
			const slots = 4
			held := blocks * 85 / 100
			conversations := prompts(slots*(8000/blocks), blocks)
			x := filled(slots, 31250, nil)
			rng := rand.New(rand.NewPCG(1, 2))
			i := 0
			turn := func() {
				c := conversations[i%len(conversations)]
				for k := held; k < blocks; k++ {
					c[k] = rng.Uint64()
				}
				x.Record(i%slots, c)
				i++
			}
			for range 8 * slots * 31250 / blocks {
				turn()
			}
			for b.Loop() {
				turn()
			}
		})
	}
}

// BenchmarkClear removes an endpoint that is full.
func BenchmarkClear(b *testing.B) {
	x := filled(16, 31250, nil)
	own := prompts(16*244, 128)
	i := 0
	for b.Loop() {
		slot := i % 16
		x.Clear(slot)
		b.StopTimer()
		x.SetCapacity(slot, 31250)
		for k := slot; k < len(own); k += 16 {
			x.Record(slot, own[k])
		}
		b.StartTimer()
		i++
	}
}

// BenchmarkBytes reports the memory per endpoint and block, measured and as the index counts it, with no block in common.
func BenchmarkBytes(b *testing.B) {
	for _, c := range []struct{ slots, capacity int }{{1, 31250}, {16, 31250}, {1000, 1250}} {
		b.Run(fmt.Sprintf("endpoints=%d/blocks=%d", c.slots, c.capacity), func(b *testing.B) {
			for b.Loop() {
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				x := filled(c.slots, c.capacity, nil)
				runtime.GC()
				runtime.ReadMemStats(&after)
				n := float64(x.Total())
				b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "heap-B/entry")
				b.ReportMetric(float64(x.Bytes())/n, "counted-B/entry")
			}
		})
	}
}
