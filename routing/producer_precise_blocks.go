package routing

import (
	"math"
	"math/bits"
	"unsafe"
)

// blockTable holds what one rank has told of its blocks: the engine's hash of a
// block, the keys that stand for the same tokens here, and how often it is held in
// which place (tier and group), for an engine that stores a block twice removes it
// twice. A hash has one record per place, chained; nothing in it is a pointer.
type blockTable struct {
	mul    uint64
	homes  []uint32 // number of the first record of a hash, 0 when empty; a power of two long
	recs   []blockRecord
	more   []uint64 // the keys of record n behind its first: more[(n-1)*(stride-1):], stride-1 of them
	stride int      // keys per engine block
	free   uint32   // first unused record, linked by next
	used   int      // records in use
	hand   int      // next record that evict looks at
}

// blockRecord is one hash in one place. Its number is its index + 1.
type blockRecord struct {
	hash  uint64
	key   uint64
	next  uint32 // next record of the hash, or next unused record; 0 ends
	count uint16 // times stored and not removed; 0 in an unused record
	place uint8
	part  bool // less than one of our blocks: key is the one that it was a part of, 0 before that
}

const (
	recordBytes = int64(unsafe.Sizeof(blockRecord{}))
	minHomes    = 64
)

func (t *blockTable) bytes() int64 {
	return int64(cap(t.homes))*4 + int64(cap(t.recs))*recordBytes + int64(cap(t.more))*8
}

func (t *blockTable) rec(n uint32) *blockRecord { return &t.recs[n-1] }

func (t *blockTable) home(hash uint64) int {
	return int(hash * t.mul >> (64 - uint(bits.TrailingZeros(uint(len(t.homes))))))
}

// find returns the number of the first record of hash, 0 when there is none.
func (t *blockTable) find(hash uint64) uint32 {
	if len(t.homes) == 0 {
		return 0
	}
	for i := t.home(hash); ; i = (i + 1) & (len(t.homes) - 1) {
		if n := t.homes[i]; n == 0 || t.rec(n).hash == hash {
			return n
		}
	}
}

// at returns the record of a place in the chain that starts at n, 0 when there is none.
func (t *blockTable) at(n uint32, place uint8) uint32 {
	for n != 0 && t.rec(n).place != place {
		n = t.rec(n).next
	}
	return n
}

// keys appends the keys of record n to dst.
func (t *blockTable) keys(dst []uint64, n uint32) []uint64 {
	dst = append(dst, t.rec(n).key)
	if s := t.stride - 1; s > 0 {
		dst = append(dst, t.more[int(n-1)*s:int(n)*s]...)
	}
	return dst
}

// lastKey returns the key that the block behind record n continues.
func (t *blockTable) lastKey(n uint32) uint64 {
	if s := t.stride - 1; s > 0 {
		return t.more[int(n)*s-1]
	}
	return t.rec(n).key
}

// insert makes the first record of a hash that has none.
func (t *blockTable) insert(hash uint64, place uint8, keys []uint64) uint32 {
	if 4*(t.used+1) > 3*len(t.homes) {
		t.grow()
	}
	n := t.take(blockRecord{hash: hash, key: keys[0], count: 1, place: place}, keys)
	t.enter(n)
	return n
}

// chain adds a record for another place behind record n.
func (t *blockTable) chain(n uint32, place uint8, scratch []uint64) {
	first := *t.rec(n)
	m := t.take(blockRecord{hash: first.hash, count: 1, place: place, next: first.next, key: first.key, part: first.part}, t.keys(scratch[:0], n))
	t.rec(n).next = m
}

func (t *blockTable) take(r blockRecord, keys []uint64) uint32 {
	n := t.free
	if n != 0 {
		t.free = t.rec(n).next
	} else {
		t.recs = append(t.recs, blockRecord{})
		n = uint32(len(t.recs))
		if t.stride > 1 {
			t.more = append(t.more, keys[1:]...)
		}
	}
	*t.rec(n) = r
	if s := t.stride - 1; s > 0 {
		copy(t.more[int(n-1)*s:int(n)*s], keys[1:])
	}
	t.used++
	return n
}

// unlink frees record n of the chain that starts at first and returns the new first.
func (t *blockTable) unlink(first, n uint32) uint32 {
	r := t.rec(n)
	next := r.next
	if n != first {
		p := first
		for t.rec(p).next != n {
			p = t.rec(p).next
		}
		t.rec(p).next = next
	} else {
		i := t.home(r.hash)
		for t.homes[i] != n {
			i = (i + 1) & (len(t.homes) - 1)
		}
		if t.homes[i] = next; next == 0 {
			t.leave(i)
		}
		first = next
	}
	*r = blockRecord{next: t.free}
	t.free = n
	t.used--
	return first
}

// enter puts record n at its home or the next empty place behind it.
func (t *blockTable) enter(n uint32) {
	i := t.home(t.rec(n).hash)
	for t.homes[i] != 0 {
		i = (i + 1) & (len(t.homes) - 1)
	}
	t.homes[i] = n
}

// leave closes the gap at place i: a follower whose home is not behind the gap moves into it.
func (t *blockTable) leave(i int) {
	mask := len(t.homes) - 1
	for j := (i + 1) & mask; t.homes[j] != 0; j = (j + 1) & mask {
		if (j-t.home(t.rec(t.homes[j]).hash))&mask >= (j-i)&mask {
			t.homes[i], t.homes[j] = t.homes[j], 0
			i = j
		}
	}
}

func (t *blockTable) grow() {
	old := t.homes
	t.homes = make([]uint32, max(minHomes, 2*len(old)))
	for _, n := range old {
		if n != 0 {
			t.enter(n)
		}
	}
}

// oldest returns a record that has been there for long: records are filled in
// order, and this goes round them in order. 0 when the table is empty.
func (t *blockTable) oldest() uint32 {
	for range t.recs {
		if t.hand++; t.hand >= len(t.recs) {
			t.hand = 0
		}
		if t.recs[t.hand].count > 0 {
			return uint32(t.hand + 1)
		}
	}
	return 0
}

// reset empties the table and gives its memory back.
func (t *blockTable) reset() { *t = blockTable{mul: t.mul} }

// addCount adds one reference, as far as the number can tell.
func (r *blockRecord) addCount() {
	if r.count < math.MaxUint16 {
		r.count++
	}
}
