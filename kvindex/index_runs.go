package kvindex

import "unsafe"

// run is a piece of the tree of all prompts without a branch or an end in it: who
// holds one of its blocks holds all of them. It is known by the run before it and
// its first block, so that whoever makes two hashes equal gets two runs.
type run struct {
	key     uint64 // of the first block's hash
	cell    uint32 // the hashes
	blocks  uint32
	parent  uint32 // the run before, 0 for a prompt's first
	holders uint32 // slots that hold it
}

// cell has up to seven hashes of a run and fills a cache line.
type cell struct {
	hashes [cellHashes]uint64
	next   uint32
}

// Runs and cells live in pieces of equal size, so that growth moves nothing.
const (
	cellHashes  = 7
	pieceShift  = 10
	pieceSize   = 1 << pieceShift
	pieceMask   = pieceSize - 1
	headsShift  = 64 - 8
	headsTables = 1 << 8 // each is small, so that growing one stalls nobody for long

	runBytes  = int64(unsafe.Sizeof(run{}))
	cellBytes = int64(unsafe.Sizeof(cell{}))
)

// pool hands out numbered values, from 1 on, and takes them back.
type pool[T any] struct {
	pieces [][]T
	free   []uint32
	used   int // the numbers that were ever handed out
}

func (p *pool[T]) at(n uint32) *T { return &p.pieces[n>>pieceShift][n&pieceMask] }

func (p *pool[T]) get() uint32 {
	if n := len(p.free); n > 0 {
		id := p.free[n-1]
		p.free = p.free[:n-1]
		return id
	}
	p.used++
	if p.used>>pieceShift == len(p.pieces) || len(p.pieces) == 0 {
		p.pieces = append(p.pieces, make([]T, pieceSize))
	}
	return uint32(p.used)
}

// sparse reports whether less than a quarter of the memory is used.
func (p *pool[T]) sparse() bool {
	return len(p.pieces) > 4 && 4*(p.used-len(p.free)) < len(p.pieces)*pieceSize
}

func (p *pool[T]) put(id uint32) { p.free = append(p.free, id) }

func (p *pool[T]) bytes(each int64) int64 {
	return int64(len(p.pieces))*pieceSize*each + int64(cap(p.free))*4
}

// runs is all runs that somebody holds.
type runs struct {
	mix    mixer
	runs   pool[run]
	cells  pool[cell]
	heads  []table // run by the key of its first block
	sizes  int64   // bytes of heads
	blocks int
}

func (r *runs) init(m mixer) {
	*r = runs{mix: m, heads: make([]table, headsTables)}
}

func (r *runs) bytes() int64 {
	return r.runs.bytes(runBytes) + r.cells.bytes(cellBytes) + r.sizes + headsTables*int64(unsafe.Sizeof(table{}))
}

// find returns the run that begins with a block behind parent, 0 when there is none.
func (r *runs) find(key uint64, parent uint32) uint32 {
	t := &r.heads[key>>headsShift]
	if t.used == 0 {
		return 0
	}
	for i := t.home(key); t.entries[i].place != 0; i = (i + 1) & (len(t.entries) - 1) {
		if t.entries[i].key == key && r.runs.at(t.entries[i].place).parent == parent {
			return t.entries[i].place
		}
	}
	return 0
}

func (r *runs) enter(key uint64, id uint32) {
	t := &r.heads[key>>headsShift]
	before := t.bytes()
	t.add(key, id)
	r.sizes += t.bytes() - before
}

func (r *runs) leave(key uint64, id uint32) {
	t := &r.heads[key>>headsShift]
	before := t.bytes()
	t.remove(key, id)
	r.sizes += t.bytes() - before
}

// add makes a run of hashes behind another one. Nobody holds it yet.
func (r *runs) add(parent uint32, hashes []uint64) uint32 {
	id := r.runs.get()
	*r.runs.at(id) = run{key: r.mix.key(hashes[0]), cell: r.store(hashes), blocks: uint32(len(hashes)), parent: parent}
	r.enter(r.mix.key(hashes[0]), id)
	r.blocks += len(hashes)
	return id
}

// store puts hashes into cells and returns the first one.
func (r *runs) store(hashes []uint64) uint32 {
	first, last := uint32(0), uint32(0)
	for len(hashes) > 0 {
		id := r.cells.get()
		c := r.cells.at(id)
		n := copy(c.hashes[:], hashes)
		c.next = 0
		hashes = hashes[n:]
		if first == 0 {
			first = id
		} else {
			r.cells.at(last).next = id
		}
		last = id
	}
	return first
}

// drop forgets a run that nobody holds any more.
func (r *runs) drop(id uint32) {
	x := r.runs.at(id)
	r.leave(x.key, id)
	r.blocks -= int(x.blocks)
	r.release(x.cell)
	*x = run{}
	r.runs.put(id)
}

func (r *runs) release(id uint32) {
	for id != 0 {
		next := r.cells.at(id).next
		r.cells.put(id)
		id = next
	}
}

// common returns how many blocks a run and hashes have in common.
func (r *runs) common(id uint32, hashes []uint64) int {
	x := r.runs.at(id)
	most := min(int(x.blocks), len(hashes))
	n := 0
	at := x.cell
	for ; n+cellHashes <= most; n += cellHashes {
		c := r.cells.at(at)
		if c.hashes != [cellHashes]uint64(hashes[n:]) {
			break
		}
		at = c.next
	}
	for k := 0; n < most && k < cellHashes && r.cells.at(at).hashes[k] == hashes[n]; k++ {
		n++
	}
	return n
}

// tail returns the hashes of a run from a block on, in dst.
func (r *runs) tail(id uint32, from int, dst []uint64) []uint64 {
	x := r.runs.at(id)
	n := 0
	for at := x.cell; n < int(x.blocks); {
		c := r.cells.at(at)
		have := min(cellHashes, int(x.blocks)-n)
		if from < n+have {
			dst = append(dst, c.hashes[max(from-n, 0):have]...)
		}
		n += have
		at = c.next
	}
	return dst
}

// shorten leaves the first n blocks of a run.
func (r *runs) shorten(id uint32, n int) {
	x := r.runs.at(id)
	r.blocks -= int(x.blocks) - n
	x.blocks = uint32(n)
	at := x.cell
	for range (n - 1) / cellHashes {
		at = r.cells.at(at).next
	}
	c := r.cells.at(at)
	r.release(c.next)
	c.next = 0
}

// split makes two runs of one. The second keeps the number, so that the runs behind
// it keep their parent; the first, of n blocks, is new and returned. scratch is used
// for hashes and returned.
func (r *runs) split(id uint32, n int, scratch []uint64) (first uint32, _ []uint64) {
	scratch = r.tail(id, n, scratch[:0])
	first = r.runs.get()
	x := r.runs.at(id)
	*r.runs.at(first) = *x
	r.heads[x.key>>headsShift].move(x.key, id, first)
	r.shorten(first, n)
	r.blocks += len(scratch)
	key := r.mix.key(scratch[0])
	*x = run{key: key, cell: r.store(scratch), blocks: uint32(len(scratch)), parent: first, holders: x.holders}
	r.enter(key, id)
	return first, scratch
}

// pack moves what is left of many runs together and returns the new numbers of the runs by the old ones.
func (r *runs) pack() (to []uint32) {
	old := *r
	to = make([]uint32, old.runs.used+1)
	r.runs, r.cells, r.sizes = pool[run]{}, pool[cell]{}, 0
	for i := range r.heads {
		t := &r.heads[i]
		t.pack()
		r.sizes += t.bytes()
		for k, e := range t.entries {
			if e.place != 0 {
				to[e.place] = r.runs.get()
				t.entries[k].place = to[e.place]
			}
		}
	}
	var hashes []uint64
	for id, n := range to {
		if n != 0 {
			hashes = old.tail(uint32(id), 0, hashes[:0])
			x := *old.runs.at(uint32(id))
			x.cell, x.parent = r.store(hashes), to[x.parent]
			*r.runs.at(n) = x
		}
	}
	return to
}
