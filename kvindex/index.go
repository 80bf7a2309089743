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

// batch bounds the blocks that are fetched ahead of their removal, so that they are still at hand when their turn comes.
const batch = 256

// Index says which slots hold which block hashes, and evicts from each slot what
// it has used least recently once the slot is at its capacity.
//
// The owner of an Index guards it with a lock, which calls of Match may share.
// Capacity, Len, Total, Distinct and Bytes may be called at any time from any
// goroutine without it.
type Index struct {
	holders Holders
	slots   atomic.Pointer[[]*lru] // replaced, not changed, when it grows
	total   atomic.Int64
	bytes   atomic.Int64 // of the lists

	gaps int // slots that may hold a block without the one before it

	keys, scratch []uint64 // of the prompt at hand
	fetched       uint64
}

// New returns an empty index in which every slot has the capacity 0. The seed
// decides where hashes are placed; it should be random and secret where clients
// choose the prompts.
func New(seed uint64) *Index { return newIndex(newMixer(seed)) }

func newIndex(m mixer) *Index {
	x := &Index{}
	x.holders.init(m)
	x.slots.Store(&[]*lru{})
	return x
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
		x.bytes.Add(int64(len(slots)-len(old)) * (lruBytes + 8))
		l = slots[slot]
	}
	l.limit.Store(int64(blocks))
	before := l.bytes()
	if blocks == 0 {
		x.empty(l, slot)
	} else if x.evict(l, slot, l.used-blocks); cap(l.list) > blocks+blocks/2+2 {
		l.pack()
	}
	x.bytes.Add(l.bytes() - before)
	x.publish(l)
}

// empty takes all blocks from a slot, in the order in which the holder map has them.
func (x *Index) empty(l *lru, slot int) {
	for part := range slices.Chunk(l.index, batch) {
		x.scratch = x.scratch[:0]
		for _, e := range part {
			if e != emptyIndex {
				x.scratch = append(x.scratch, l.list[uint32(e)].key)
			}
		}
		x.fetched += x.holders.fetch(x.scratch)
		for _, key := range x.scratch {
			x.holders.remove(key, slot)
		}
	}
	x.setGaps(l, 0)
	l.clear()
}

// setGaps says how many blocks a slot has to evict until none is there without the one before it.
func (x *Index) setGaps(l *lru, n int) {
	x.gaps += min(n, 1) - min(l.gaps, 1)
	l.gaps = n
}

// Capacity returns the blocks that a slot can hold, 0 before SetCapacity and after Clear.
func (x *Index) Capacity(slot int) int {
	if l := x.lru(slot); l != nil {
		return int(l.limit.Load())
	}
	return 0
}

// Match is Holders.Walk over what the slots hold. It does not count as a use.
//
// A block is never older than the one behind it: a slot that has a block has all
// before it, and the end of what it has is found by bisection. Of 2,000 blocks that
// reads 20 and not all (BenchmarkMatch). Only Forget can leave gaps, rarely, and then all are read.
func (x *Index) Match(hashes []uint64, active []uint64, matched []int32) int {
	if x.gaps > 0 || len(hashes) < minBisected {
		return x.holders.Walk(hashes, active, matched)
	}
	longest := 0
	for page, slots := range active {
		if slots != 0 {
			longest = max(longest, x.holders.bisect(hashes, page, slots, matched))
		}
	}
	return longest
}

// Record says that a slot now holds a prompt, given as its chain of hashes in
// order: a hash must stand for all of the prompt up to its block. A prompt longer
// than the slot's capacity is cut to it, keeping the head. The prompt's blocks become the slot's most recent ones with the first block in
// front, so that a prompt loses its tail first, as in the engine; what is then
// over the capacity is evicted.
//
// The hashes that the slot did not hold before are appended to fresh, in order
// and once each, and fresh is returned. A nil fresh skips that and stays nil.
func (x *Index) Record(slot int, hashes []uint64, fresh []uint64) []uint64 {
	l := x.lru(slot)
	if l == nil {
		return fresh
	}
	limit := int(l.limit.Load())
	hashes = hashes[:min(len(hashes), limit)]
	x.keys, x.scratch = x.keys[:0], x.scratch[:0]
	for _, hash := range hashes {
		x.keys = append(x.keys, x.holders.mix.key(hash))
	}
	// What is held moves to the front first, lest it be evicted for what is not.
	var held int
	var last uint32
	x.scratch, held, last = l.promote(x.keys, x.scratch)
	if len(x.scratch) == 0 {
		return fresh
	}
	x.fetched += x.holders.fetch(x.scratch)
	l.fetch(x.scratch)
	if evict := l.used + len(x.scratch) - limit; evict > 0 {
		x.fetchOldest(l, min(evict, l.used))
	}
	before := l.bytes()
	for i := held; i < len(x.keys); i++ {
		key := x.keys[i]
		if len(l.list) > 0 {
			if n := l.list[last].next; n != 0 && l.list[n].key == key {
				last = n
				continue
			}
		}
		n, at := l.find(key)
		if n != 0 {
			continue // seen in this prompt
		}
		last = l.insert(last, key, at)
		l.newest = key
		x.holders.add(key, slot)
		if l.used > limit {
			x.evictOne(l, slot)
		}
		if fresh != nil {
			fresh = append(fresh, hashes[i])
		}
	}
	if after := l.bytes(); after != before {
		x.bytes.Add(after - before)
	}
	x.publish(l)
	return fresh
}

// evict removes the n least recently used blocks.
func (x *Index) evict(l *lru, slot, n int) {
	for ; n > 0; n -= batch {
		part := min(n, batch)
		x.fetchOldest(l, part)
		for range part {
			x.evictOne(l, slot)
		}
	}
}

func (x *Index) evictOne(l *lru, slot int) {
	victim := l.list[0].prev
	x.holders.remove(l.list[victim].key, slot)
	l.remove(victim)
	if l.gaps > 0 {
		x.setGaps(l, l.gaps-1)
	}
}

// fetchOldest gets the n least recently used blocks, which are about to go, into the processor's caches.
func (x *Index) fetchOldest(l *lru, n int) {
	x.scratch = l.oldest(n, x.scratch[:0])
	x.fetched += x.holders.fetch(x.scratch)
	l.fetch(x.scratch)
}

// Forget says that a slot does not hold these hashes: what Record returned, when the prompt never reached the endpoint.
func (x *Index) Forget(slot int, hashes []uint64) {
	l := x.lru(slot)
	if l == nil || l.used == 0 || len(hashes) == 0 {
		return
	}
	// What was added since may stand behind these blocks. It is the oldest then, as
	// nothing touches it but what brings them back, and so it is gone or well once
	// as many blocks as there are now have been evicted.
	if l.gaps > 0 || l.newest != x.holders.mix.key(hashes[len(hashes)-1]) {
		x.setGaps(l, l.used)
	}
	for _, hash := range hashes {
		key := x.holders.mix.key(hash)
		if n, _ := l.find(key); n != 0 {
			x.holders.remove(key, slot)
			l.remove(n)
		}
	}
	x.publish(l)
}

// Clear removes a slot: it holds nothing and its capacity is 0. The number may be used for another endpoint.
func (x *Index) Clear(slot int) { x.SetCapacity(slot, 0) }

// Reset forgets the blocks of all slots. The capacities stay.
func (x *Index) Reset() {
	x.holders.Reset()
	for _, l := range *x.slots.Load() {
		x.bytes.Add(-l.bytes())
		x.setGaps(l, 0)
		l.clear()
		x.publish(l)
	}
}

// publish makes the counts of blocks visible to other goroutines, once per change rather than per block.
func (x *Index) publish(l *lru) {
	n := int64(l.used)
	if old := l.size.Load(); n != old {
		l.size.Store(n)
		x.total.Add(n - old)
	}
	x.holders.publish()
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
func (x *Index) Distinct() int { return x.holders.Distinct() }

// Bytes returns the memory in use, in bytes.
func (x *Index) Bytes() int64 { return x.holders.Bytes() + x.bytes.Load() }
