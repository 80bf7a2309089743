package kvindex

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// spec is what an Index does, said as plainly as possible: per slot a capacity
// and the hashes that it holds, most recent first; and what has come before each hash.
type spec struct {
	limit  map[int]int
	held   map[int][]uint64
	before map[uint64]uint64
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

func (s *spec) record(slot int, hashes []uint64) (held int) {
	hashes = hashes[:min(len(hashes), s.limit[slot])]
	for i, h := range hashes {
		if i > 0 {
			s.before[h] = hashes[i-1]
		}
		if slices.Contains(s.held[slot], h) {
			held = i + 1
		}
	}
	s.held[slot] = distinct(slices.Concat(hashes, s.held[slot]))
	s.setCapacity(slot, s.limit[slot])
	return held
}

// forget leaves what something else stands on.
func (s *spec) forget(slot int, hashes []uint64, held int) {
	for _, h := range slices.Backward(hashes[held:]) {
		next := func(other uint64) bool { before, ok := s.before[other]; return ok && before == h }
		if !slices.ContainsFunc(s.held[slot], next) {
			s.held[slot] = slices.DeleteFunc(s.held[slot], func(other uint64) bool { return other == h })
		}
	}
}

func (s *spec) match(slot int, hashes []uint64) (n int) {
	for n < len(hashes) && slices.Contains(s.held[slot], hashes[n]) {
		n++
	}
	return n
}

// choices is where a run of operations takes its decisions from: a random source or a fuzzer's bytes.
type choices interface{ IntN(n int) int }

// modelRun drives an Index and its specification side by side.
type modelRun struct {
	*testing.T
	choices
	step  int
	index *Index
	spec  spec
	slots []int
	hash  func(n int) uint64

	undo             []uint64 // an earlier Record
	undoOf, undoHeld int
}

// identity makes small hashes share a shard, a home and an index tag, which no seed would.
var identity = mixer{mul1: 1, mul2: 1}

// lastHashes and those after it share the last of all, under identity. Its own key is that of an empty place.
const lastHashes = 0xffffffff << 32

func newRun(t *testing.T, c choices, m mixer, hash func(n int) uint64) *modelRun {
	r := &modelRun{T: t, choices: c, index: newIndex(m), spec: spec{map[int]int{}, map[int][]uint64{}, map[uint64]uint64{}}, hash: hash}
	r.slots = []int{0, 1, 2, 31, 63, 64, 65, 127, 128, 200, 300, 400, 500, 4095, 4096, 4160, 5000}
	return r
}

const (
	treeLength = 20
	treeBlocks = 8 * treeLength
)

// prompt is a path from the root of a tree of 8 trunks and branches with 20 blocks
// each, of which every block has one leaf beside the way on.
func (r *modelRun) prompt() []uint64 {
	var reversed []int
	n := r.IntN(treeBlocks)
	if r.IntN(4) == 0 {
		reversed = append(reversed, treeBlocks+n)
	}
	for n >= 0 {
		reversed = append(reversed, n)
		switch branch, at := n/treeLength, n%treeLength; {
		case at > 0:
			n--
		case branch < 2:
			n = -1
		default: // a branch begins somewhere on an earlier one
			n = (branch/2-1)*treeLength + 3*branch%treeLength
		}
	}
	path := make([]uint64, 0, len(reversed))
	for _, n := range slices.Backward(reversed) {
		path = append(path, uint64(n))
	}
	return path[:len(path)-r.IntN(3)*len(path)/4]
}

// hashes is what the index knows of a path.
func (r *modelRun) hashes(path []uint64) []uint64 {
	var hashes []uint64
	for _, n := range path {
		hashes = append(hashes, r.hash(int(n)))
	}
	return hashes
}

func (r *modelRun) operate() {
	slot := r.slots[r.IntN(len(r.slots))]
	switch op := r.IntN(100); {
	case op < 55:
		path := r.prompt()
		got := r.index.Record(slot, r.hashes(path))
		if want := r.spec.record(slot, path); got != want {
			r.Fatalf("step %d: Record(%d, %d): got %d held, want %d", r.step, slot, path, got, want)
		}
		switch r.IntN(32) {
		case 0: // undone at once
			r.index.Forget(slot, r.hashes(path), got)
			r.spec.forget(slot, path, got)
		case 1, 2: // or later
			r.undo, r.undoOf, r.undoHeld = path, slot, got
		}
	case op < 84:
		r.match(r.prompt())
	case op < 85:
		r.index.Forget(r.undoOf, r.hashes(r.undo), r.undoHeld)
		r.spec.forget(r.undoOf, r.undo, r.undoHeld)
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
func (r *modelRun) match(path []uint64) {
	hashes := r.hashes(path)
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
		n := r.spec.match(slot, path)
		got[slot], want[slot] = before, before+int32(n)
		longest = max(longest, n)
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
func (r *modelRun) check() {
	total, all := 0, map[uint64]bool{}
	x := r.index
	holders := map[uint32]int{}
	for _, slot := range r.slots {
		var got []uint64
		holds := 0
		if l := x.lru(slot); l != nil && len(l.list) > 0 {
			kids := map[uint32]uint32{}
			for n := l.list[0].next; n != 0; n = l.list[n].next {
				id := l.list[n].run
				got = x.runs.tail(id, 0, got)
				holders[id]++
				holds++
				head := x.runs.runs.at(id)
				if x.holders.mask(x.key(id), pageOf(slot))&bitOf(slot) == 0 || l.find(id) != n || x.runs.find(head.key, head.parent) != id {
					r.Fatalf("step %d: slot %d: run %d is not found", r.step, slot, id)
				}
				kids[head.parent]++
			}
			for n := l.list[0].next; n != 0; n = l.list[n].next {
				if got, want := l.list[n].kids, kids[l.list[n].run]; got != want {
					r.Fatalf("step %d: slot %d: run %d: got %d runs behind it, want %d", r.step, slot, l.list[n].run, got, want)
				}
			}
			if l.index.used != holds {
				r.Fatalf("step %d: slot %d: got %d runs in the table, want %d", r.step, slot, l.index.used, holds)
			}
		}
		want := r.spec.held[slot]
		for _, h := range want {
			all[h] = true
		}
		if want := r.hashes(want); !slices.Equal(got, want) {
			r.Fatalf("step %d: slot %d by recency: got %x, want %x", r.step, slot, got, want)
		}
		total += len(want)
	}
	if got := x.Total(); got != total {
		r.Fatalf("step %d: Total: got %d, want %d", r.step, got, total)
	}
	if got := x.Distinct(); got != len(all) {
		r.Fatalf("step %d: Distinct: got %d, want %d", r.step, got, len(all))
	}
	bits := 0
	for k := range x.holders.shards {
		bits += countBits(&x.holders.shards[k])
	}
	runs, cells := 0, 0
	for id, n := range holders {
		if got := int(x.runs.runs.at(id).holders); got != n {
			r.Fatalf("step %d: run %d: got %d holders, want %d", r.step, id, got, n)
		}
		runs += n
		cells += (int(x.runs.runs.at(id).blocks) + cellHashes - 1) / cellHashes
	}
	if bits != runs {
		r.Fatalf("step %d: bits set in the holder map: got %d, want %d", r.step, bits, runs)
	}
	if got := x.runs.runs.used - len(x.runs.runs.free); got != len(holders) {
		r.Fatalf("step %d: got %d runs in use, want %d", r.step, got, len(holders))
	}
	if got := x.runs.cells.used - len(x.runs.cells.free); got != cells {
		r.Fatalf("step %d: got %d cells in use, want %d", r.step, got, cells)
	}
	heads, sizes := 0, int64(0)
	for i := range x.runs.heads {
		heads += x.runs.heads[i].used
		sizes += x.runs.heads[i].bytes()
	}
	if heads != len(holders) || sizes != x.runs.sizes {
		r.Fatalf("step %d: got %d heads in %d bytes, want %d in %d", r.step, heads, x.runs.sizes, len(holders), sizes)
	}
	lists := int64(len(*x.slots.Load())) * (lruBytes + 8)
	for _, l := range *x.slots.Load() {
		lists += l.bytes()
	}
	if got, want := x.Bytes(), lists+holderBytes(&x.holders)+x.runs.bytes(); got != want {
		r.Fatalf("step %d: Bytes: got %d, want %d", r.step, got, want)
	}
}

func TestModel(t *testing.T) {
	random := func(n int) uint64 { // one is 0
		return rand.New(rand.NewPCG(uint64(n), 0)).Uint64() * uint64(min(n, 1))
	}
	small := func(n int) uint64 { return uint64(n) }
	last := func(n int) uint64 { return lastHashes + uint64(n) }
	// As who looks for equal hashes would have it: all ways on from anywhere are one, and so are all leaves.
	equal := func(n int) uint64 {
		switch {
		case n >= treeBlocks:
			return 2
		case n%treeLength > 0:
			return 1
		}
		return 3 + uint64(n/treeLength)
	}
	f := func(t *testing.T, name string, seed uint64, m mixer, hash func(n int) uint64) {
		t.Run(name, func(t *testing.T) {
			r := newRun(t, rand.New(rand.NewPCG(seed, 1)), m, hash)
			for r.step < 20000 {
				if r.operate(); r.step%200 == 0 {
					r.check()
				}
			}
		})
	}
	f(t, "random hashes 1", 1, newMixer(1), random)
	f(t, "random hashes 2", 2, newMixer(2), random)
	f(t, "small hashes", 3, newMixer(3), small)
	f(t, "colliding hashes 1", 4, identity, small)
	f(t, "colliding hashes 2", 5, identity, small)
	f(t, "colliding hashes at the end", 6, identity, last)
	f(t, "equal hashes", 7, newMixer(7), equal)
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
