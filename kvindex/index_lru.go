package kvindex

import (
	"sync/atomic"
	"unsafe"
)

// lru orders the runs that one slot holds by their last use: a list in an array,
// and a table that finds a run in it.
type lru struct {
	list  []hold // list[0] is the list's end: next is the most, prev the least recent run
	index table  // place in list by run
	free  uint32 // first unused place of list, linked by next
	used  int    // blocks
	sized int64  // bytes that Index.lists has of it

	size  atomic.Int64 // used, as of the last change that has ended
	limit atomic.Int64 // capacity in blocks
}

// hold is a run in a slot.
type hold struct {
	run        uint32
	kids       uint32 // runs behind it that the slot holds
	prev, next uint32
}

const (
	holdBytes = int64(unsafe.Sizeof(hold{}))
	lruBytes  = int64(unsafe.Sizeof(lru{}))
)

func (l *lru) bytes() int64 { return int64(cap(l.list))*holdBytes + l.index.bytes() }

func (l *lru) join(a, b uint32) { l.list[a].next, l.list[b].prev = b, a }

// find returns the place of a run, 0 when it is not held.
func (l *lru) find(run uint32) uint32 { return l.index.find(uint64(run)) }

// insert puts a run that is not held right behind place, and returns where it is.
func (l *lru) insert(place, run uint32) uint32 {
	n := l.free
	switch {
	case n != 0:
		l.free = l.list[n].next
	case len(l.list) == 0:
		l.list = append(l.list, hold{})
		fallthrough
	default:
		n = uint32(len(l.list))
		l.list = append(l.list, hold{})
	}
	l.list[n] = hold{run: run}
	l.join(n, l.list[place].next)
	l.join(place, n)
	l.index.add(uint64(run), n)
	return n
}

// front makes place n the most recent one.
func (l *lru) front(n uint32) {
	if l.list[0].next == n {
		return
	}
	l.join(l.list[n].prev, l.list[n].next)
	l.join(n, l.list[0].next)
	l.join(0, n)
}

// remove frees place n.
func (l *lru) remove(n uint32) {
	l.index.remove(uint64(l.list[n].run), n)
	l.join(l.list[n].prev, l.list[n].next)
	l.list[n] = hold{next: l.free}
	l.free = n
}

// clear forgets everything and gives the memory back.
func (l *lru) clear() { l.list, l.index, l.free, l.used = nil, table{}, 0, 0 }
