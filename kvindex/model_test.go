package kvindex

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// spec is what an Index does, said as plainly as possible: per slot a capacity
// and the hashes that it holds, most recent first.
type spec struct {
	limit map[int]int
	held  map[int][]uint64
}

func distinct(hashes []uint64) (out []uint64) {
	for _, h := range hashes {
		if !slices.Contains(out, h) {
			out = append(out, h)
		}
	}
	return out
}

func (s *spec) setCapacity(slot, blocks int) {
	s.limit[slot] = max(blocks, 0)
	s.held[slot] = s.held[slot][:min(len(s.held[slot]), s.limit[slot])]
}

func (s *spec) record(slot int, hashes []uint64) (fresh []uint64) {
	hashes = hashes[:min(len(hashes), s.limit[slot])]
	for _, h := range distinct(hashes) {
		if !slices.Contains(s.held[slot], h) {
			fresh = append(fresh, h)
		}
	}
	s.held[slot] = distinct(slices.Concat(hashes, s.held[slot]))
	s.setCapacity(slot, s.limit[slot])
	return fresh
}

func (s *spec) forget(slot int, hashes []uint64) {
	s.held[slot] = slices.DeleteFunc(s.held[slot], func(h uint64) bool { return slices.Contains(hashes, h) })
}

func (s *spec) match(slot int, hashes []uint64) (n int) {
	for n < len(hashes) && slices.Contains(s.held[slot], hashes[n]) {
		n++
	}
	return n
}

// choices is where a run of operations takes its decisions from: a random source or a fuzzer's bytes.
type choices interface{ IntN(n int) int }

// run drives an Index and its specification side by side.
type run struct {
	*testing.T
	choices
	step             int
	index            *Index
	spec             spec
	slots            []int
	hash             func(n int) uint64
	undo             []uint64 // what an earlier Record called fresh
	undoOf           int
	bisected, walked int
}

// identity makes small hashes share a shard, a home and an index tag, which no seed would.
var identity = mixer{mul1: 1, mul2: 1}

// lastHashes and those after it share the last of all, under identity. Its own key is that of an empty place.
const lastHashes = 0xffffffff << 32

func newRun(t *testing.T, c choices, m mixer, hash func(n int) uint64) *run {
	r := &run{T: t, choices: c, index: newIndex(m), spec: spec{map[int]int{}, map[int][]uint64{}}, hash: hash}
	r.slots = []int{0, 1, 2, 31, 63, 64, 65, 127, 128, 200, 300, 400, 500, 4095, 4096, 4160, 5000}
	return r
}

// prompt is a path from the root of a tree of 8 trunks and branches with 20 blocks
// each, of which every block has one leaf beside the way on.
func (r *run) prompt() []uint64 {
	const length, blocks = 20, 8 * 20
	var reversed []int
	n := r.IntN(blocks)
	if r.IntN(4) == 0 {
		reversed = append(reversed, blocks+n)
	}
	for n >= 0 {
		reversed = append(reversed, n)
		switch branch, at := n/length, n%length; {
		case at > 0:
			n--
		case branch < 2:
			n = -1
		default: // a branch begins somewhere on an earlier one
			n = (branch/2-1)*length + 3*branch%length
		}
	}
	hashes := make([]uint64, 0, len(reversed))
	for _, n := range slices.Backward(reversed) {
		hashes = append(hashes, r.hash(n))
	}
	return hashes[:len(hashes)-r.IntN(3)*len(hashes)/4]
}

func (r *run) operate() {
	slot := r.slots[r.IntN(len(r.slots))]
	switch op := r.IntN(100); {
	case op < 55:
		hashes := r.prompt()
		got := r.index.Record(slot, hashes, make([]uint64, 0, 4))
		if want := r.spec.record(slot, hashes); !slices.Equal(got, want) {
			r.Fatalf("step %d: Record(%d, %d): got fresh %d, want %d", r.step, slot, hashes, got, want)
		}
		switch r.IntN(32) {
		case 0: // undone at once
			r.index.Forget(slot, got)
			r.spec.forget(slot, got)
		case 1, 2: // or later
			r.undo, r.undoOf = got, slot
		}
	case op < 84:
		r.match(r.prompt())
	case op < 85:
		r.index.Forget(r.undoOf, r.undo)
		r.spec.forget(r.undoOf, r.undo)
		slot = r.undoOf
	case op < 97:
		blocks := r.IntN(24) - 1
		if r.IntN(4) == 0 {
			blocks = r.IntN(200)
		}
		r.index.SetCapacity(slot, blocks)
		r.spec.setCapacity(slot, blocks)
	case op < 99 || r.IntN(8) != 0:
		r.index.Clear(slot)
		r.spec.setCapacity(slot, 0)
	default:
		r.index.Reset()
		clear(r.spec.held)
	}
	if got, want := r.index.Len(slot), len(r.spec.held[slot]); got != want {
		r.Fatalf("step %d: Len(%d): got %d, want %d", r.step, slot, got, want)
	}
	if got, want := r.index.Capacity(slot), r.spec.limit[slot]; got != want {
		r.Fatalf("step %d: Capacity(%d): got %d, want %d", r.step, slot, got, want)
	}
	r.step++
}

// match compares Match over a random set of slots, some of which never held anything.
func (r *run) match(hashes []uint64) {
	pages := []int{1, 2, 9, 64, 65, 80}[r.IntN(6)]
	active := make([]uint64, pages)
	got, want := make([]int32, 64*pages), make([]int32, 64*pages)
	longest := 0
	for _, slot := range append(r.slots, 3, 66, 4100) {
		if slot >= 64*pages || r.IntN(3) == 0 {
			continue
		}
		active[slot/64] |= 1 << (slot % 64)
		before := int32(r.IntN(5))
		n := r.spec.match(slot, hashes)
		got[slot], want[slot] = before, before+int32(n)
		longest = max(longest, n)
	}
	if len(hashes) >= minBisected {
		if r.index.gaps == 0 {
			r.bisected++
		} else {
			r.walked++
		}
	}
	if n := r.index.Match(hashes, active, got); n != longest {
		r.Fatalf("step %d: Match(%d): got %d blocks, want %d", r.step, hashes, n, longest)
	}
	for slot := range got {
		if got[slot] != want[slot] {
			r.Fatalf("step %d: Match(%d): slot %d: got %d, want %d", r.step, hashes, slot, got[slot], want[slot])
		}
	}
}

// check compares everything that is held, in order, and the sums over it.
func (r *run) check() {
	total, all := 0, map[uint64]bool{}
	holders := map[uint64]int{}
	for _, slot := range r.slots {
		var got []uint64
		if l := r.index.lru(slot); l != nil && len(l.list) > 0 {
			for n := l.list[0].next; n != 0; n = l.list[n].next {
				got = append(got, l.list[n].key)
			}
		}
		var want []uint64
		for _, h := range r.spec.held[slot] {
			want = append(want, r.index.holders.mix.key(h))
			all[h] = true
			holders[h]++
			if !r.index.holders.Has(h, slot) {
				r.Fatalf("step %d: Has(%d, %d): got false, want true", r.step, h, slot)
			}
		}
		if !slices.Equal(got, want) {
			r.Fatalf("step %d: slot %d by recency: got %x, want %x", r.step, slot, got, want)
		}
		total += len(want)
	}
	if got := r.index.Total(); got != total {
		r.Fatalf("step %d: Total: got %d, want %d", r.step, got, total)
	}
	if got := r.index.Distinct(); got != len(all) {
		r.Fatalf("step %d: Distinct: got %d, want %d", r.step, got, len(all))
	}
	held := 0
	for k := range r.index.holders.shards {
		held += countBits(&r.index.holders.shards[k])
	}
	if held != total {
		r.Fatalf("step %d: bits set in the holder map: got %d, want %d", r.step, held, total)
	}
	lists := int64(len(*r.index.slots.Load())) * (lruBytes + 8)
	for _, l := range *r.index.slots.Load() {
		lists += l.bytes()
	}
	if got, want := r.index.Bytes(), lists+holderBytes(&r.index.holders); got != want {
		r.Fatalf("step %d: Bytes: got %d, want %d", r.step, got, want)
	}
}

func TestModel(t *testing.T) {
	random := func(n int) uint64 { // one is 0
		return rand.New(rand.NewPCG(uint64(n), 0)).Uint64() * uint64(min(n, 1))
	}
	small := func(n int) uint64 { return uint64(n) }
	last := func(n int) uint64 { return lastHashes + uint64(n) }
	f := func(t *testing.T, name string, seed uint64, m mixer, hash func(n int) uint64) {
		t.Run(name, func(t *testing.T) {
			r := newRun(t, rand.New(rand.NewPCG(seed, 1)), m, hash)
			for r.step < 20000 {
				if r.operate(); r.step%100 == 0 {
					r.check()
				}
			}
			if r.bisected < 100 || r.walked < 20 {
				t.Errorf("long prompts: got %d matched by bisection and %d by walking, want 100 and 20", r.bisected, r.walked)
			}
		})
	}
	f(t, "random hashes 1", 1, newMixer(1), random)
	f(t, "random hashes 2", 2, newMixer(2), random)
	f(t, "small hashes", 3, newMixer(3), small)
	f(t, "colliding hashes 1", 4, identity, small)
	f(t, "colliding hashes 2", 5, identity, small)
	f(t, "colliding hashes at the end", 6, identity, last)
}

// script is a fuzzer's input as choices; past its end every choice is 0.
type script []byte

func (s *script) IntN(n int) int {
	v := 0
	for range 1 + n/257 {
		if len(*s) > 0 {
			v = v<<8 | int((*s)[0])
			*s = (*s)[1:]
		}
	}
	return v % n
}

func FuzzIndex(f *testing.F) {
	r := rand.New(rand.NewPCG(6, 7))
	for n := range 6 {
		seed := make([]byte, 40<<n)
		for i := range seed {
			seed[i] = byte(r.Uint32())
		}
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, first := newMixer(1), uint64(0)
		switch len(data) % 3 {
		case 1:
			m = identity
		case 2:
			m, first = identity, lastHashes
		}
		s := script(data)
		r := newRun(t, &s, m, func(n int) uint64 { return first + uint64(n) })
		for len(s) > 0 {
			r.operate()
		}
		r.check()
	})
}
