package kvindex

import (
	"sync/atomic"
	"unsafe"
)

// lru orders the blocks of one slot by their last use. It is a list in an array
// and a sorted open-addressing table that finds a key's place in the array, both
// without pointers. They grow together, by half, up to the capacity.
type lru struct {
	list  []block  // list[0] is the list's end: next is the most, prev the least recent block
	index []uint64 // key>>32<<32 | place in list, 0 for empty; sorted like a shard
	homes uint64
	free  uint32 // first unused place of list, linked by next
	used  int

	size  atomic.Int64 // used, as of the last change that has ended
	limit atomic.Int64 // capacity in blocks
}

type block struct {
	key        uint64
	prev, next uint32
}

const (
	blockBytes = int64(unsafe.Sizeof(block{}))
	indexBytes = int64(unsafe.Sizeof(uint64(0)))
	lruBytes   = int64(unsafe.Sizeof(lru{}))

	minBlocks = 64
)

func (l *lru) bytes() int64 {
	return int64(cap(l.list))*blockBytes + int64(cap(l.index))*indexBytes
}

// find returns the place of key in list, 0 when it is not there.
func (l *lru) find(key uint64) uint32 {
	tag := key >> 32
	for i := l.home(tag); i < len(l.index); i++ {
		e := l.index[i]
		if e == 0 || e>>32 > tag {
			break
		}
		if e>>32 == tag && l.list[uint32(e)].key == key {
			return uint32(e)
		}
	}
	return 0
}

func (l *lru) home(tag uint64) int { return int(tag * l.homes >> 32) }

// promote makes the held hashes of a prompt the most recent blocks, first hash
// first, and returns how many of the hashes are not held. Runs that already stand
// in the right order, as a repeated prompt does, are moved as a whole.
func (l *lru) promote(m *mixer, hashes []uint64) (missing int) {
	if l.used == 0 {
		return len(hashes)
	}
	for i := len(hashes) - 1; i >= 0; i-- {
		last := l.find(m.key(hashes[i]))
		if last == 0 {
			missing++
			continue
		}
		first := last
		for i > 0 {
			p := l.list[first].prev
			if p == 0 || l.list[p].key != m.key(hashes[i-1]) {
				break
			}
			first = p
			i--
		}
		before, after := l.list[first].prev, l.list[last].next
		if before == 0 {
			continue // in front already
		}
		l.join(before, after)
		l.join(last, l.list[0].next)
		l.join(0, first)
	}
	return missing
}

func (l *lru) join(a, b uint32) { l.list[a].next, l.list[b].prev = b, a }

// insert puts a key that is not held right behind place at and returns its own place.
func (l *lru) insert(at uint32, key uint64) uint32 {
	n := l.free
	if n != 0 {
		l.free = l.list[n].next
	} else {
		if len(l.list) == cap(l.list) {
			l.grow(max(minBlocks, l.used+l.used/2))
		}
		n = uint32(len(l.list))
		l.list = l.list[:n+1]
	}
	l.list[n].key = key
	l.join(n, l.list[at].next)
	l.join(at, n)
	l.enter(key, n)
	l.used++
	return n
}

// remove frees place n.
func (l *lru) remove(n uint32) {
	b := &l.list[n]
	l.leave(b.key, n)
	l.join(b.prev, b.next)
	b.next, l.free = l.free, n
	l.used--
}

// enter adds place n to the index.
func (l *lru) enter(key uint64, n uint32) {
	e := key>>32<<32 | uint64(n)
	i := l.home(key >> 32)
	for i < len(l.index) && l.index[i] != 0 && l.index[i] < e {
		i++
	}
	end := i
	for end < len(l.index) && l.index[end] != 0 {
		end++
	}
	if end == len(l.index) {
		l.index = append(l.index, make([]uint64, tailSlots)...)
	}
	copy(l.index[i+1:end+1], l.index[i:end])
	l.index[i] = e
}

// leave takes place n from the index.
func (l *lru) leave(key uint64, n uint32) {
	e := key>>32<<32 | uint64(n)
	i := l.home(key >> 32)
	for l.index[i] != e {
		i++
	}
	end := i + 1
	for end < len(l.index) && l.index[end] != 0 && l.home(l.index[end]>>32) != end {
		end++
	}
	copy(l.index[i:], l.index[i+1:end])
	l.index[end-1] = 0
}

// grow makes room for that many blocks, at most the capacity. Blocks keep their places in list.
func (l *lru) grow(blocks int) {
	blocks = min(blocks, int(l.limit.Load()))
	list, index := l.list, l.index
	l.list = make([]block, max(len(list), 1), blocks+1)
	copy(l.list, list)
	l.makeIndex(blocks)
	next := 0
	for _, e := range index {
		if e == 0 {
			continue
		}
		next = max(next, l.home(e>>32))
		if next == len(l.index) {
			l.index = append(l.index, make([]uint64, tailSlots)...)
		}
		l.index[next] = e
		next++
	}
}

// pack moves the blocks, which are within the capacity, to arrays of just their number.
func (l *lru) pack() {
	old := l.list
	l.list, l.index, l.homes, l.free = nil, nil, 0, 0
	if l.used == 0 {
		return
	}
	l.list = make([]block, 1, l.used+1)
	l.makeIndex(l.used)
	for o := old[0].next; o != 0; o = old[o].next {
		n := uint32(len(l.list))
		l.list = append(l.list, block{key: old[o].key})
		l.join(n-1, n)
		l.enter(old[o].key, n)
	}
	l.join(uint32(l.used), 0)
}

func (l *lru) makeIndex(blocks int) {
	l.homes = uint64(blocks + blocks/3 + 1) // at most three quarters full
	l.index = make([]uint64, l.homes+tailSlots)
}

// clear forgets the blocks and gives the memory back.
func (l *lru) clear() {
	l.list, l.index, l.homes, l.free, l.used = nil, nil, 0, 0, 0
	l.size.Store(0)
}
