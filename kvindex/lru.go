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
	index []uint64 // key>>32<<32 | place in list, or emptyIndex; sorted like a shard
	homes uint64
	free  uint32 // first unused place of list, linked by next
	used  int

	newest uint64 // key of the block that was added last
	gaps   int    // evictions until no block is there without the one before it

	fetched uint64 // the sum of what fetch has read, so that the reads are not optimised away

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

	emptyIndex = ^uint64(0) // the greatest value, so that a search ends there; no place in list has this number
)

func emptyIndexes(n int) []uint64 {
	index := make([]uint64, n)
	for i := range index {
		index[i] = emptyIndex
	}
	return index
}

func (l *lru) bytes() int64 {
	return int64(cap(l.list))*blockBytes + int64(cap(l.index))*indexBytes
}

// find returns the place of key in list, 0 when it is not there, and where in the index key is or belongs.
func (l *lru) find(key uint64) (n uint32, at int) {
	tag := key >> 32
	at = l.home(tag)
	for at < len(l.index) && l.index[at] < tag<<32 {
		at++
	}
	for ; at < len(l.index) && l.index[at]>>32 == tag && l.index[at] != emptyIndex; at++ {
		if n := uint32(l.index[at]); l.list[n].key == key {
			return n, at
		}
	}
	return 0, at
}

func (l *lru) home(tag uint64) int { return int(tag * l.homes >> 32) }

// fetch reads the homes of keys ahead of their look-ups, as Holders.fetch does.
func (l *lru) fetch(keys []uint64) {
	sum := uint64(0)
	for _, key := range keys {
		if i := l.home(key >> 32); i < len(l.index) {
			sum += l.index[i]
		}
	}
	l.fetched = sum
}

// promote makes the held ones of a prompt's keys the most recent blocks, first
// key first, and appends the others, last key first, to missing. Runs that already
// stand in the right order, as a repeated prompt does, are moved as a whole.
//
// Where there are no gaps the held ones are the first, and are found by bisection:
// then held is their number and last the place of the last of them. It is 0 otherwise.
func (l *lru) promote(keys, missing []uint64) (_ []uint64, held int, last uint32) {
	if l.gaps == 0 {
		held, last = l.bisect(keys)
		for k := len(keys); k > held; k-- {
			missing = append(missing, keys[k-1])
		}
		keys = keys[:held]
	}
	for i := len(keys) - 1; i >= 0; i-- {
		last, _ := l.find(keys[i])
		if last == 0 {
			missing = append(missing, keys[i])
			continue
		}
		first := last
		for i > 0 {
			p := l.list[first].prev
			if p == 0 || l.list[p].key != keys[i-1] {
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
	return missing, held, last
}

// bisect returns how many of a prompt's keys are held, and the place of the last
// one, when none is without those before it.
func (l *lru) bisect(keys []uint64) (held int, last uint32) {
	for to := len(keys); held < to; {
		mid := (held + to) / 2
		if n, _ := l.find(keys[mid]); n != 0 {
			held, last = mid+1, n
		} else {
			to = mid
		}
	}
	return held, last
}

// oldest appends the keys of the n least recent blocks to keys.
func (l *lru) oldest(n int, keys []uint64) []uint64 {
	for b := uint32(0); n > 0; n-- {
		b = l.list[b].prev
		keys = append(keys, l.list[b].key)
	}
	return keys
}

func (l *lru) join(a, b uint32) { l.list[a].next, l.list[b].prev = b, a }

// insert puts a key that is not held right behind another block and returns its
// place. at is where in the index the key belongs.
func (l *lru) insert(behind uint32, key uint64, at int) uint32 {
	n := l.free
	if n != 0 {
		l.free = l.list[n].next
	} else {
		if len(l.list) == cap(l.list) {
			l.grow(max(minBlocks, l.used+l.used/2))
			_, at = l.find(key)
		}
		n = uint32(len(l.list))
		l.list = l.list[:n+1]
	}
	l.list[n].key = key
	l.join(n, l.list[behind].next)
	l.join(behind, n)
	l.enter(at, key>>32<<32|uint64(n))
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

// enter puts e at its place in the index and moves what is there up to the next empty one.
func (l *lru) enter(at int, e uint64) {
	end := at
	for end < len(l.index) && l.index[end] != emptyIndex {
		end++
	}
	if end == len(l.index) {
		l.index = append(l.index, emptyIndexes(tailSlots)...)
	}
	copy(l.index[at+1:end+1], l.index[at:end])
	l.index[at] = e
}

// leave takes place n from the index.
func (l *lru) leave(key uint64, n uint32) {
	e := key>>32<<32 | uint64(n)
	i := l.home(key >> 32)
	for l.index[i] != e {
		i++
	}
	end := i + 1
	for end < len(l.index) && l.index[end] != emptyIndex && l.home(l.index[end]>>32) != end {
		end++
	}
	copy(l.index[i:], l.index[i+1:end])
	l.index[end-1] = emptyIndex
}

// grow makes room for that many blocks, at most the capacity and one, which may
// come before another goes. Blocks keep their places in list.
func (l *lru) grow(blocks int) {
	blocks = min(blocks, int(l.limit.Load())+1)
	list, index := l.list, l.index
	l.list = make([]block, max(len(list), 1), blocks+1)
	copy(l.list, list)
	l.makeIndex(blocks)
	next := 0
	for _, e := range index {
		if e == emptyIndex {
			continue
		}
		next = max(next, l.home(e>>32))
		if next == len(l.index) {
			l.index = append(l.index, emptyIndexes(tailSlots)...)
		}
		l.index[next] = e
		next++
	}
}

// pack moves the blocks, which are within the capacity, to arrays of just their number.
func (l *lru) pack() {
	old := l.list
	if l.free = 0; l.used == 0 {
		l.clear()
		return
	}
	l.list = make([]block, 1, l.used+1)
	l.makeIndex(l.used)
	for o := old[0].next; o != 0; o = old[o].next {
		n := uint32(len(l.list))
		l.list = append(l.list, block{key: old[o].key})
		l.join(n-1, n)
		_, at := l.find(old[o].key)
		l.enter(at, old[o].key>>32<<32|uint64(n))
	}
	l.join(uint32(l.used), 0)
}

func (l *lru) makeIndex(blocks int) {
	l.homes = uint64(2 * blocks)
	l.index = emptyIndexes(int(l.homes) + tailSlots)
}

// clear forgets the blocks and gives the memory back.
func (l *lru) clear() {
	l.list, l.index, l.homes, l.free, l.used = nil, nil, 0, 0, 0
}
