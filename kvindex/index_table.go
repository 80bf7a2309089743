package kvindex

import (
	"math/bits"
	"unsafe"
)

// table finds places by key: open addressing with linear probing, at most three
// quarters full, without pointers. A key may have several places.
type table struct {
	entries []tableEntry // a power of two; place 0 is an empty one
	used    int
}

type tableEntry struct {
	key   uint64
	place uint32
}

const (
	minTable        = 8
	tableEntryBytes = int64(unsafe.Sizeof(tableEntry{}))
)

func (t *table) bytes() int64 { return int64(len(t.entries)) * tableEntryBytes }

// home takes the upper bits of a product: keys may be numbers in a row, or have a part in common.
func (t *table) home(key uint64) int {
	return int(key * 0x9e3779b97f4a7c15 >> (65 - bits.Len(uint(len(t.entries)))))
}

// find returns the first place of a key, 0 when it has none.
func (t *table) find(key uint64) uint32 {
	if t.used == 0 {
		return 0
	}
	for i := t.home(key); t.entries[i].place != 0; i = (i + 1) & (len(t.entries) - 1) {
		if t.entries[i].key == key {
			return t.entries[i].place
		}
	}
	return 0
}

// add gives a key a place.
func (t *table) add(key uint64, place uint32) {
	if 4*(t.used+1) > 3*len(t.entries) {
		t.resize(max(minTable, 2*len(t.entries)))
	}
	t.put(tableEntry{key, place})
	t.used++
}

func (t *table) put(e tableEntry) {
	i := t.home(e.key)
	for t.entries[i].place != 0 {
		i = (i + 1) & (len(t.entries) - 1)
	}
	t.entries[i] = e
}

// move gives a key that has the place from the place to instead.
func (t *table) move(key uint64, from, to uint32) {
	if i := t.at(key, from); i >= 0 {
		t.entries[i].place = to
	}
}

// at returns where an entry is, -1 when it is not there.
func (t *table) at(key uint64, place uint32) int {
	if t.used == 0 {
		return -1
	}
	for i := t.home(key); t.entries[i].place != 0; i = (i + 1) & (len(t.entries) - 1) {
		if t.entries[i] == (tableEntry{key, place}) {
			return i
		}
	}
	return -1
}

// remove forgets an entry. Those that were pushed past it move back, so that no search ends too early.
func (t *table) remove(key uint64, place uint32) {
	gap := t.at(key, place)
	if gap < 0 {
		return
	}
	mask := len(t.entries) - 1
	for i := (gap + 1) & mask; t.entries[i].place != 0; i = (i + 1) & mask {
		if home := t.home(t.entries[i].key); (i-home)&mask >= (i-gap)&mask {
			t.entries[gap], gap = t.entries[i], i
		}
	}
	t.entries[gap] = tableEntry{}
	t.used--
}

// pack gives memory back when less than an eighth of it is used.
func (t *table) pack() {
	n := len(t.entries)
	for n > minTable && 8*t.used < n {
		n /= 2
	}
	if n < len(t.entries) {
		t.resize(n)
	}
}

func (t *table) resize(n int) {
	old := t.entries
	t.entries = make([]tableEntry, n)
	for _, e := range old {
		if e.place != 0 {
			t.put(e)
		}
	}
}
