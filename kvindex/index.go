// Package kvindex remembers which endpoint holds which blocks of which prompts.
//
// A prompt is a chain of block hashes (AppendChain). An endpoint is a slot, a
// small integer. Holders maps a hash to the slots that hold it; Index adds one
// least-recently-used list per slot, which decides what a slot has forgotten.
// After a warm-up neither allocates.
package kvindex

import (
	"math"
	"slices"
	"sync/atomic"
)

// Index says which slots hold which block hashes, and evicts from each slot what
// it has used least recently once the slot is at its capacity.
//
// As a hash stands for all of a prompt up to its block, prompts are a tree, and a
// slot that has a block has all before it: they are used whenever it is. So the
// index keeps runs, pieces of the tree in which no prompt ends or branches off,
// and not blocks: one look-up, one entry in a list and one set of holders for a
// turn of a conversation, whatever its length. A run is split when a prompt ends
// or branches off in it, and when a slot evicts a part of it.
//
// The owner of an Index guards it with a lock, which calls of Match may not share.
// Capacity, Len, Total, Distinct and Bytes may be called at any time from any
// goroutine without it.
type Index struct {
	runs     runs
	holders  Holders                // of runs, by their number
	slots    atomic.Pointer[[]*lru] // replaced, not changed, when it grows
	total    atomic.Int64
	distinct atomic.Int64
	bytes    atomic.Int64
	lists    int64 // bytes of the slots

	// Scratch: the prompt at hand as runs, with how many of its blocks are at the end of each.
	path   []uint32
	ends   []int32
	ids    []uint64
	counts []int32
	hashes []uint64
	peers  []int
}

// New returns an empty index in which every slot has the capacity 0. The seed
// decides where hashes are placed; it should be random and secret where clients
// choose the prompts.
func New(seed uint64) *Index { return newIndex(newMixer(seed)) }

func newIndex(m mixer) *Index {
	x := &Index{}
	x.slots.Store(&[]*lru{})
	x.init(m)
	return x
}

func (x *Index) init(m mixer) {
	x.runs.init(m)
	x.holders.init(m)
	x.publish()
}

// lru returns the list of a slot, nil when the slot never had a capacity.
func (x *Index) lru(slot int) *lru {
	if s := *x.slots.Load(); uint(slot) < uint(len(s)) {
		return s[slot]
	}
	return nil
}

// SetCapacity says how many blocks a slot can hold. A slot with more of them
// loses the least recently used ones at once; zero or less empties it.
func (x *Index) SetCapacity(slot, blocks int) {
	blocks = min(max(blocks, 0), math.MaxInt32-2)
	l := x.lru(slot)
	if l == nil {
		if blocks == 0 {
			return
		}
		old := *x.slots.Load()
		slots := append(make([]*lru, 0, (slot/pageSlots+1)*pageSlots), old...)
		for len(slots) < cap(slots) {
			slots = append(slots, &lru{})
		}
		x.slots.Store(&slots)
		x.lists += int64(len(slots)-len(old)) * (lruBytes + 8)
		l = slots[slot]
	}
	l.limit.Store(int64(blocks))
	x.evict(l, slot, l.used-blocks)
	if l.used == 0 {
		l.clear()
	} else if len(l.list) > minTable+4*l.index.used {
		x.packList(l)
	}
	if x.runs.cells.sparse() || x.runs.runs.sparse() {
		x.pack()
	}
	x.publishSlot(l)
}

// packList moves a list to an array of its size.
func (x *Index) packList(l *lru) {
	old := l.list
	l.list, l.free, l.index = make([]hold, 1, l.index.used+1), 0, table{}
	last := uint32(0)
	for o := old[0].next; o != 0; o = old[o].next {
		n := l.insert(last, old[o].run)
		l.list[n].kids = old[o].kids
		last = n
	}
}

// pack gives memory back that many runs took. It takes time that only the removal of endpoints is worth.
func (x *Index) pack() {
	to := x.runs.pack()
	x.holders.Reset()
	for slot, l := range *x.slots.Load() {
		if l.used == 0 {
			continue
		}
		for n := l.list[0].next; n != 0; n = l.list[n].next {
			l.list[n].run = to[l.list[n].run]
			x.holders.add(x.key(l.list[n].run), slot)
		}
		x.packList(l)
		x.measure(l)
	}
}

// Capacity returns the blocks that a slot can hold, 0 before SetCapacity and after Clear.
func (x *Index) Capacity(slot int) int {
	if l := x.lru(slot); l != nil {
		return int(l.limit.Load())
	}
	return 0
}

// follow finds the runs that a prompt goes through: x.path, with x.ends. Of the
// last one it may have only a part; over says how many blocks that one goes on for.
func (x *Index) follow(hashes []uint64) (over int) {
	x.path, x.ends = x.path[:0], x.ends[:0]
	id := uint32(0)
	for n := 0; n < len(hashes); {
		if id = x.runs.find(x.runs.mix.key(hashes[n]), id); id == 0 {
			return 0
		}
		c := x.runs.common(id, hashes[n:])
		n += c
		x.path, x.ends = append(x.path, id), append(x.ends, int32(n))
		if over = int(x.runs.runs.at(id).blocks) - c; over > 0 {
			return over
		}
	}
	return 0
}

// Match finds how much of a prompt each slot holds; see Holders.Walk for active and
// matched. It does not count as a use.
func (x *Index) Match(hashes []uint64, active []uint64, matched []int32) int {
	x.follow(hashes)
	if len(x.path) == 0 {
		return 0
	}
	x.ids = x.ids[:0]
	for _, id := range x.path {
		x.ids = append(x.ids, uint64(id))
	}
	slots := min(len(matched), len(active)*pageSlots)
	x.counts = slices.Grow(x.counts[:0], slots)[:slots]
	clear(x.counts)
	longest := x.holders.Walk(x.ids, active, x.counts)
	if longest == 0 {
		return 0
	}
	for slot, n := range x.counts {
		if n > 0 {
			matched[slot] += x.ends[n-1]
		}
	}
	return int(x.ends[longest-1])
}

// Record says that a slot now holds a prompt, given as its chain of hashes in
// order: a hash must stand for all of the prompt up to its block. A prompt longer
// than the slot's capacity is cut to it, keeping the head. The prompt's blocks
// become the slot's most recent ones with the first block in front, so that a
// prompt loses its tail first, as in the engine; what is then over the capacity is
// evicted.
//
// It returns how many of the prompt's blocks the slot held before.
func (x *Index) Record(slot int, hashes []uint64) (held int) {
	l := x.lru(slot)
	if l == nil {
		return 0
	}
	limit := int(l.limit.Load())
	hashes = hashes[:min(len(hashes), limit)]
	if len(hashes) == 0 {
		return 0
	}
	over := x.follow(hashes)
	if over > 0 {
		last := len(x.path) - 1
		x.path[last] = x.split(x.path[last], int(x.runs.runs.at(x.path[last]).blocks)-over)
	}
	known, parent := 0, uint32(0)
	if n := len(x.path); n > 0 {
		known, parent = int(x.ends[n-1]), x.path[n-1]
	}
	if known < len(hashes) {
		x.path = append(x.path, x.runs.add(parent, hashes[known:]))
		x.ends = append(x.ends, int32(len(hashes)))
	}
	held = len(hashes)
	kids := uint32(0) // 1 behind a run that was not held
	for i := len(x.path) - 1; i >= 0; i-- {
		r := x.runs.runs.at(x.path[i])
		if n := l.find(x.path[i]); n != 0 {
			l.front(n)
			l.list[n].kids += kids
			kids = 0
			continue
		}
		l.list[l.insert(0, x.path[i])].kids = kids
		kids = 1
		x.holders.add(x.key(x.path[i]), slot)
		r.holders++
		l.used += int(r.blocks)
		held -= int(r.blocks)
	}
	x.evict(l, slot, l.used-limit)
	x.publishSlot(l)
	return held
}

// split is runs.split with what the slots hold. It returns the first run.
func (x *Index) split(id uint32, n int) uint32 {
	var first uint32
	first, x.hashes = x.runs.split(id, n, x.hashes)
	x.peers = x.holders.slots(x.key(id), x.peers[:0])
	for _, slot := range x.peers {
		l := x.lru(slot)
		head := l.insert(l.list[l.find(id)].prev, first)
		l.list[head].kids = 1
		x.holders.add(x.key(first), slot)
		x.measure(l)
	}
	return first
}

// evict removes the n least recently used blocks.
func (x *Index) evict(l *lru, slot, n int) {
	for n > 0 && l.used > 0 {
		place := l.list[0].prev
		id := l.list[place].run
		r := x.runs.runs.at(id)
		keep := int(r.blocks) - n
		switch {
		case keep <= 0:
			n = -keep
			x.drop(l, slot, place)
		case r.holders == 1:
			x.runs.shorten(id, keep)
			l.used -= n
			return
		default:
			x.split(id, keep)
			x.drop(l, slot, l.list[0].prev)
			return
		}
	}
}

// drop takes a run from a slot.
func (x *Index) drop(l *lru, slot int, place uint32) {
	id := l.list[place].run
	r := x.runs.runs.at(id)
	x.holders.remove(x.key(id), slot)
	l.remove(place)
	l.used -= int(r.blocks)
	if r.parent != 0 {
		l.list[l.find(r.parent)].kids--
	}
	if r.holders--; r.holders == 0 {
		x.runs.drop(id)
	}
}

// Forget takes back a Record that returned held: the prompt never reached the
// endpoint. Blocks stay that the slot has been given more behind since.
func (x *Index) Forget(slot int, hashes []uint64, held int) {
	l := x.lru(slot)
	if l == nil || l.used == 0 {
		return
	}
	over := x.follow(hashes)
	for i := len(x.path) - 1; i >= 0; i-- {
		if i > 0 && int(x.ends[i-1]) < held || i == 0 && held > 0 {
			break
		}
		if n := l.find(x.path[i]); n != 0 && l.list[n].kids == 0 && over == 0 {
			x.drop(l, slot, n)
		}
		over = 0
	}
	x.publishSlot(l)
}

// Clear removes a slot: it holds nothing and its capacity is 0. The number may be used for another endpoint.
func (x *Index) Clear(slot int) { x.SetCapacity(slot, 0) }

// Reset forgets the blocks of all slots. The capacities stay.
func (x *Index) Reset() {
	for _, l := range *x.slots.Load() {
		l.clear()
		x.publishSlot(l)
	}
	x.init(x.runs.mix)
}

// key is what the holders know a run by.
func (x *Index) key(id uint32) uint64 { return x.holders.mix.key(uint64(id)) }

// measure keeps the sum of the lists' memory.
func (x *Index) measure(l *lru) {
	if n := l.bytes(); n != l.sized {
		x.lists += n - l.sized
		l.sized = n
	}
}

// publish makes the counts visible to other goroutines, once per change rather than per block.
func (x *Index) publish() {
	x.holders.publish()
	x.distinct.Store(int64(x.runs.blocks))
	x.bytes.Store(x.runs.bytes() + x.lists)
}

func (x *Index) publishSlot(l *lru) {
	x.measure(l)
	n := int64(l.used)
	if old := l.size.Load(); n != old {
		l.size.Store(n)
		x.total.Add(n - old)
	}
	x.publish()
}

// Len returns the number of blocks that a slot holds.
func (x *Index) Len(slot int) int {
	if l := x.lru(slot); l != nil {
		return int(l.size.Load())
	}
	return 0
}

// Total returns the number of blocks that all slots hold, a block counted once per slot.
func (x *Index) Total() int { return int(x.total.Load()) }

// Distinct returns the number of different blocks that the slots hold.
func (x *Index) Distinct() int { return int(x.distinct.Load()) }

// Bytes returns the memory in use, in bytes.
func (x *Index) Bytes() int64 { return x.holders.Bytes() + x.bytes.Load() }
