package kvindex

import (
	"math/bits"
	"slices"
	"sync/atomic"
	"unsafe"
)

// Blocks says which slots hold which blocks, as Holders does, for an owner that is
// told of single blocks, in any order.
//
// The entries of blocks that follow each other in a prompt are side by side in
// memory where there is room. Whether the next entry is that of the prompt's next
// block is seen from its hash; only where it is not, the block is looked up. That
// makes a walk over a prompt a read of a few pages from front to back, while a
// look-up of each block waits for memory, and for the addresses of memory, twice.
// A bad neighbour costs time and nothing else.
//
// Nothing in it but the tables' addresses is a pointer. Distinct and Bytes may be
// called at any time from any goroutine; all else, reads too, needs a lock to itself.
type Blocks struct {
	mix    mixer
	shards []blockShard
	chunks []chunk  // by place >> chunkBits; number 0 is never there
	vacant []uint32 // numbers of chunks that are not there
	lists  [groupKinds]groupList
	waste  int    // free places in groups that are not empty
	last   uint32 // place of the block that the next one added is behind, 0 when it starts a prompt
	near   uint32 // place that was found last

	fetched  uint64 // the sum of what was read ahead, so that the reads are not optimised away
	distinct int
	counted  atomic.Int64 // distinct, as of the last change that has ended
	bytes    atomic.Int64
}

// blockShard finds the places of its share of the hashes. It is an open-addressing
// table like shard, sorted by what is left of the table key: a word is 32 bits of
// it and 32 of the place.
type blockShard struct {
	words []uint64
	homes uint64
	used  int
	pages
}

// chunk is the memory that entries come in.
type chunk struct {
	entries *[chunkPlaces]entry // one of an empty mask is free
	groups  *[chunkGroups]group
	used    int
}

// group is a few places in a row, which a prompt takes as one so that others do not
// come between its blocks.
type group struct {
	next, prev uint32 // groups of the list, 0 at its ends
	used       uint16 // a bit for each place
}

// groupList is a list of groups of one kind: how many of their places are used, in
// quarters that are begun. Full groups are in none.
type groupList struct {
	head, tail uint32
	n          int
}

const (
	chunkBits   = 10
	chunkPlaces = 1 << chunkBits
	groupBits   = 4
	groupPlaces = 1 << groupBits
	chunkGroups = chunkPlaces / groupPlaces
	groupKinds  = 5

	emptyWord = ^uint64(0) // sorts last
	walkAhead = 32         // look-ups made together, at most

	blockShardBytes = int64(unsafe.Sizeof(blockShard{}))
	chunkBytes      = chunkPlaces*entryBytes + chunkGroups*int64(unsafe.Sizeof(group{}))
	chunkRefBytes   = int64(unsafe.Sizeof(chunk{}))
)

// NewBlocks returns an empty map. The seed decides where hashes are looked up; it
// should be random and secret where clients choose the prompts.
func NewBlocks(seed uint64) *Blocks { return newBlocks(newMixer(seed)) }

func newBlocks(m mixer) *Blocks {
	b := &Blocks{mix: m, shards: make([]blockShard, shardCount), chunks: make([]chunk, 1)}
	b.bytes.Store(shardCount*blockShardBytes + chunkRefBytes)
	return b
}

// Distinct returns the number of hashes that at least one slot holds.
func (b *Blocks) Distinct() int { return int(b.counted.Load()) }

// Bytes returns the memory in use, in bytes.
func (b *Blocks) Bytes() int64 { return b.bytes.Load() }

func (b *Blocks) publish() {
	if n := int64(b.distinct); n != b.counted.Load() {
		b.counted.Store(n)
	}
}

// Behind says that what is added next comes behind the block of hash in a prompt.
// It has no effect but on speed.
func (b *Blocks) Behind(hash uint64) { b.last, _ = b.find(hash) }

// Last returns the place of the block that was added last, for Resume. 0 stands for none.
func (b *Blocks) Last() uint32 { return b.last }

// Resume says that what is added next comes behind the block that was added at last,
// with 0 that it starts a prompt. It has no effect but on speed.
func (b *Blocks) Resume(last uint32) { b.last = last }

// Add records that slot holds hash and reports whether that is new.
func (b *Blocks) Add(hash uint64, slot int) bool {
	fresh := b.add(hash, slot)
	b.publish()
	return fresh
}

// AddAll records that slot now holds hashes, blocks in a row of a prompt, and appends
// those that are new to fresh. It does not wait for memory as often as Add one by one.
func (b *Blocks) AddAll(hashes []uint64, slot int, fresh []uint64) []uint64 {
	for part := range slices.Chunk(hashes, walkAhead) {
		for _, hash := range part {
			b.fetched += b.fetch(b.mix.key(hash))
		}
		for _, hash := range part {
			if b.add(hash, slot) {
				fresh = append(fresh, hash)
			}
		}
	}
	b.publish()
	return fresh
}

func (b *Blocks) add(hash uint64, slot int) bool {
	key, page, bit := b.mix.key(hash), pageOf(slot), bitOf(slot)
	s := &b.shards[key>>shardShift]
	p, i := b.beside(hash), 0
	if p == 0 {
		p, i = b.look(s, key, hash)
	}
	if p != 0 {
		b.last = p
		fresh, grown := s.set(b.entry(p), page, bit)
		if grown > 0 {
			b.bytes.Add(grown)
		}
		return fresh
	}
	if uint64(s.used) >= s.homes*3/4 {
		b.resize(s, larger(s.homes, key))
		_, i = b.look(s, key, hash)
	}
	p = b.take()
	*b.entry(p) = entry{key: hash, mask: bit, page: page}
	b.insert(s, i, word(key, p))
	b.distinct++
	b.last = p
	return true
}

// AddWhile goes back from the end of hashes, blocks in a row of a prompt, as long as they
// are held by one of the slots that of has a bit for, on the page of slot as Mask counts,
// and records that slot holds them, too. It appends those that are new to fresh.
func (b *Blocks) AddWhile(hashes []uint64, slot int, of uint64, fresh []uint64) []uint64 {
	page, bit, p := pageOf(slot), bitOf(slot), uint32(0)
	for i := len(hashes) - 1; i >= 0; i-- {
		hash := hashes[i]
		if p--; !b.holds(p, hash) {
			if p, _ = b.find(hash); p == 0 {
				break
			}
		}
		e := b.entry(p)
		mask := &e.mask
		if e.page != page {
			d, k := b.shard(hash).findPage(e, page)
			if d == nil {
				break
			}
			mask = &d.masks[k]
		}
		if *mask&of == 0 {
			break
		}
		if *mask&bit == 0 {
			*mask |= bit
			fresh = append(fresh, hash)
		}
	}
	return fresh
}

// Remove records that slot no longer holds hash and reports whether it did.
func (b *Blocks) Remove(hash uint64, slot int) bool {
	key, page, bit := b.mix.key(hash), pageOf(slot), bitOf(slot)
	s := &b.shards[key>>shardShift]
	p := b.beside(hash)
	if p == 0 {
		if p, _ = b.look(s, key, hash); p == 0 {
			return false
		}
		b.near = p
	}
	e := b.entry(p)
	if s.pageMask(e, page)&bit == 0 {
		return false
	}
	if s.clear(e, page, bit); e.mask == 0 {
		b.delete(s, word(key, p))
		b.drop(p)
		b.distinct--
		b.publish()
	}
	return true
}

// Has reports whether slot holds hash.
func (b *Blocks) Has(hash uint64, slot int) bool {
	return b.Mask(hash, slot/pageSlots)&bitOf(slot) != 0
}

// Mask returns the slots from 64*page to 64*page+63 that hold hash, lowest slot in the lowest bit.
func (b *Blocks) Mask(hash uint64, page int) uint64 {
	p, s := b.find(hash)
	if p == 0 {
		return 0
	}
	return s.pageMask(b.entry(p), uint32(page))
}

// Walk is Holders.Walk: it adds to matched[slot] the number of leading hashes that
// the slot, if its bit of active is set, holds, and returns the longest such run.
// The content of active is lost.
func (b *Blocks) Walk(hashes []uint64, active []uint64, matched []int32) int {
	longest := 0
	for first := 0; first < len(active); first += 64 {
		w := walk{first: uint32(first), active: active[first:min(first+64, len(active))], matched: matched}
		longest = max(longest, b.walk(&w, hashes))
	}
	return longest
}

func (b *Blocks) walk(w *walk, hashes []uint64) int {
	var l lookahead
	w.start()
	i, p := 0, uint32(0)
	for i < len(hashes) && w.live != 0 {
		if !b.holds(p+1, hashes[i]) {
			if p = b.ahead(&l, hashes, i); p == 0 {
				break
			}
		} else {
			p++
		}
		if w.live&(w.live-1) == 0 {
			k := bits.TrailingZeros64(w.live)
			page, slots, n := w.first+uint32(k), w.active[k], 0
			row := b.chunks[p>>chunkBits].entries[p%chunkPlaces:]
			left := hashes[i:]
			row = row[:min(len(row), len(left))]
			for n < len(row) && row[n].key == left[n] && row[n].page == page && slots&^row[n].mask == 0 {
				n++
			}
			if n > 0 {
				i, p = i+n, p+uint32(n)-1
				continue
			}
		}
		if w.step(b.entry(p), &b.shard(hashes[i]).pages, i); w.live != 0 {
			i++
		}
	}
	w.end(i)
	b.fetched += l.sum
	return i
}

// Tally counts how many hashes of a prompt's head each slot holds, gaps and all:
// it adds to count[slot] the number of the first upTo[slot] hashes that the slot
// holds. Slots from len(upTo) on are left out.
func (b *Blocks) Tally(hashes []uint64, upTo, count []int32) {
	var l lookahead
	p := uint32(0)
	for i, hash := range hashes {
		q := p + 1
		if !b.holds(q, hash) {
			if q = b.ahead(&l, hashes, i); q == 0 {
				continue
			}
		}
		p = q
		e, s := b.entry(p), b.shard(hash)
		tally(int32(i), e.page, e.mask, upTo, count)
		for n := e.more; n != 0; n = s.nodes[n-1].next {
			for k, page := range s.nodes[n-1].pages {
				tally(int32(i), page, s.nodes[n-1].masks[k], upTo, count)
			}
		}
	}
	b.fetched += l.sum
}

func tally(i int32, page uint32, mask uint64, upTo, count []int32) {
	for base := int(page) * pageSlots; mask != 0; mask &= mask - 1 {
		if slot := base + bits.TrailingZeros64(mask); slot < len(upTo) && i < upTo[slot] {
			count[slot]++
		}
	}
}

// lookahead is what was looked up of a prompt beforehand.
type lookahead struct {
	places [walkAhead]uint32 // of hashes[from:from+n]; a place may be that of another hash
	from   int
	n      int
	needed int
	sum    uint64
}

// ahead returns the place of hashes[i], 0 when there is none, and looks up more
// behind it: the look-ups do not depend on each other and wait for memory
// together. How many depends on how many of the last were of use, and a prompt that nobody knows ends early.
func (b *Blocks) ahead(l *lookahead, hashes []uint64, i int) uint32 {
	if i >= l.from+l.n {
		n := 4
		if 2*l.needed > l.n && l.n > 0 {
			n = min(2*l.n, walkAhead)
		}
		l.from, l.n, l.needed = i, min(n, len(hashes)-i), 0
		var keys [walkAhead]uint64
		for k, hash := range hashes[i : i+l.n] {
			keys[k] = b.mix.key(hash)
			l.sum += b.fetch(keys[k])
		}
		for k, key := range keys[:l.n] {
			l.places[k] = b.shards[key>>shardShift].first(key)
		}
		for _, p := range l.places[:l.n] {
			if p != 0 {
				l.sum += b.entry(p).key
			}
		}
	}
	l.needed++
	p := l.places[i-l.from]
	if p == 0 || b.holds(p, hashes[i]) {
		return p
	}
	key := b.mix.key(hashes[i])
	p, _ = b.look(&b.shards[key>>shardShift], key, hashes[i])
	return p
}

func (b *Blocks) shard(hash uint64) *blockShard { return &b.shards[b.mix.key(hash)>>shardShift] }

func (b *Blocks) entry(p uint32) *entry { return &b.chunks[p>>chunkBits].entries[p%chunkPlaces] }

func (b *Blocks) group(g uint32) *group {
	return &b.chunks[g/chunkGroups].groups[g%chunkGroups]
}

// holds reports whether the place, any number, is that of hash.
func (b *Blocks) holds(p uint32, hash uint64) bool {
	c := int(p >> chunkBits)
	if c >= len(b.chunks) || b.chunks[c].entries == nil {
		return false
	}
	e := &b.chunks[c].entries[p%chunkPlaces]
	return e.key == hash && e.mask != 0
}

// beside returns the place of a hash if it is where it is likely to be, else 0.
func (b *Blocks) beside(hash uint64) uint32 {
	for _, p := range [...]uint32{b.last + 1, b.near + 1, b.near, b.near - 1} {
		if b.holds(p, hash) {
			b.near = p
			return p
		}
	}
	return 0
}

// find returns the place and the shard of a hash, 0 when nobody holds it.
func (b *Blocks) find(hash uint64) (uint32, *blockShard) {
	key := b.mix.key(hash)
	s := &b.shards[key>>shardShift]
	p := b.beside(hash)
	if p == 0 {
		if p, _ = b.look(s, key, hash); p != 0 {
			b.near = p
		}
	}
	return p, s
}

// look finds the place of a hash in the table. Where there is none it returns 0 and
// where the hash's word belongs.
func (b *Blocks) look(s *blockShard, key, hash uint64) (uint32, int) {
	want := part(key)
	i := s.home(want)
	for ; i < len(s.words); i++ {
		v := s.words[i]
		if v>>32 > want || v == emptyWord {
			break
		}
		if v>>32 == want && b.entry(uint32(v)).key == hash {
			return uint32(v), i
		}
	}
	return 0, i
}

// first returns the place of the first word that looks like key's, 0 when there is none.
func (s *blockShard) first(key uint64) uint32 {
	want := part(key)
	for i := s.home(want); i < len(s.words); i++ {
		if v := s.words[i]; v>>32 >= want {
			if v>>32 == want && v != emptyWord {
				return uint32(v)
			}
			break
		}
	}
	return 0
}

// fetch reads where key is looked up, see Holders.fetch.
func (b *Blocks) fetch(key uint64) uint64 {
	s := &b.shards[key>>shardShift]
	if i := s.home(part(key)); i < len(s.words) {
		return s.words[i]
	}
	return 0
}

// part returns the 32 bits of a table key that its shard is sorted by.
func part(key uint64) uint64 { return key << shardBits >> 32 }

// word is what a shard knows of a hash at place p.
func word(key uint64, p uint32) uint64 { return part(key)<<32 | uint64(p) }

func (s *blockShard) home(part uint64) int { return int(part * s.homes >> 32) }

func words(n int) []uint64 {
	w := make([]uint64, n)
	for i := range w {
		w[i] = emptyWord
	}
	return w
}

// insert puts a word at i and moves what is there up to the next empty place.
func (b *Blocks) insert(s *blockShard, i int, v uint64) {
	end := i
	for end < len(s.words) && s.words[end] != emptyWord {
		end++
	}
	if end == len(s.words) {
		before := cap(s.words)
		s.words = append(s.words, words(tailSlots)...)
		b.bytes.Add(int64(cap(s.words)-before) * 8)
	}
	copy(s.words[i+1:end+1], s.words[i:end])
	s.words[i] = v
	s.used++
}

// delete takes a word out and moves those that were pushed past it back.
func (b *Blocks) delete(s *blockShard, v uint64) {
	i := s.home(v >> 32)
	for s.words[i] != v {
		i++
	}
	end := i + 1
	for end < len(s.words) && s.words[end] != emptyWord && s.home(s.words[end]>>32) != end {
		end++
	}
	copy(s.words[i:], s.words[i+1:end])
	s.words[end-1] = emptyWord
	s.used--
	if s.homes > 8*minHomes && uint64(s.used) < s.homes*3/16 {
		b.resize(s, s.homes/2)
	}
}

// resize moves a shard to a table of that many homes. Nodes are packed when most of them are unused.
func (b *Blocks) resize(s *blockShard, homes uint64) {
	before := s.bytes()
	old := s.words
	s.homes = homes
	s.words = words(int(homes) + tailSlots)
	was, pack := s.sparse()
	next := 0
	for _, v := range old {
		if v == emptyWord {
			continue
		}
		if pack {
			s.move(b.entry(uint32(v)), was)
		}
		next = max(next, s.home(v>>32))
		if next == len(s.words) {
			s.words = append(s.words, words(tailSlots)...)
		}
		s.words[next] = v
		next++
	}
	b.bytes.Add(s.bytes() - before)
}

func (s *blockShard) bytes() int64 {
	return int64(cap(s.words))*8 + int64(cap(s.nodes))*nodeBytes
}

// take returns a free place that is marked as used: behind the last block if it is
// free, else the first one of a group.
func (b *Blocks) take() uint32 {
	p := b.last + 1
	if !b.free(p) {
		p = b.open()
	}
	g, bit := p/groupPlaces, uint16(1)<<(p%groupPlaces)
	was := b.group(g).used
	if was == 0 {
		b.waste += groupPlaces
	}
	b.waste--
	b.setUsed(g, was|bit)
	b.chunks[p>>chunkBits].used++
	return p
}

// free reports whether the place, any number, may be taken by the block behind the
// one before it: where a group begins only if all of it is free.
func (b *Blocks) free(p uint32) bool {
	c := int(p >> chunkBits)
	if c >= len(b.chunks) || b.chunks[c].entries == nil {
		return false
	}
	at, used := p%groupPlaces, b.group(p/groupPlaces).used
	return used>>at&1 == 0 && (at > 0 || used == 0)
}

// open returns a free place for a block that cannot be behind the one before it: in an
// empty group, unless groups that are not full waste more than an eighth of the memory.
func (b *Blocks) open() uint32 {
	if b.waste > b.distinct/8+chunkPlaces {
		for kind := 1; kind < groupKinds; kind++ { // those with the most room first, of these the oldest
			if g := b.lists[kind].head; g != 0 {
				used := b.group(g).used
				at := uint32(bits.Len16(used))
				if at == groupPlaces {
					at = uint32(bits.TrailingZeros16(^used))
				}
				return g*groupPlaces + at
			}
		}
	}
	if b.lists[0].n == 0 {
		b.grow()
	}
	return b.lists[0].head * groupPlaces
}

// drop frees a place.
func (b *Blocks) drop(p uint32) {
	*b.entry(p) = entry{}
	g := p / groupPlaces
	used := b.group(g).used &^ (1 << (p % groupPlaces))
	b.setUsed(g, used)
	b.waste++
	if used == 0 {
		b.waste -= groupPlaces
	}
	c := p >> chunkBits
	if b.chunks[c].used--; b.chunks[c].used == 0 {
		b.giveBack(c)
	}
}

// kind returns the list that a group is in, groupKinds for none.
func kind(used uint16) int {
	n := bits.OnesCount16(used)
	if n == groupPlaces {
		return groupKinds
	}
	return (n + groupPlaces/4 - 1) / (groupPlaces / 4)
}

// setUsed changes which places of a group are used, and moves it to the list where it then belongs.
func (b *Blocks) setUsed(n uint32, used uint16) {
	g := b.group(n)
	from, to := kind(g.used), kind(used)
	if g.used = used; from == to {
		return
	}
	if from < groupKinds {
		b.unlink(n, from)
	}
	if to < groupKinds {
		b.link(n, to)
	}
}

// link appends a group to a list.
func (b *Blocks) link(n uint32, kind int) {
	l, g := &b.lists[kind], b.group(n)
	g.prev, g.next = l.tail, 0
	if l.tail != 0 {
		b.group(l.tail).next = n
	} else {
		l.head = n
	}
	l.tail = n
	l.n++
}

func (b *Blocks) unlink(n uint32, kind int) {
	l, g := &b.lists[kind], b.group(n)
	if g.prev != 0 {
		b.group(g.prev).next = g.next
	} else {
		l.head = g.next
	}
	if g.next != 0 {
		b.group(g.next).prev = g.prev
	} else {
		l.tail = g.prev
	}
	l.n--
}

// grow makes another chunk, all of it empty groups.
func (b *Blocks) grow() {
	var c uint32
	if n := len(b.vacant); n > 0 {
		c = b.vacant[n-1]
		b.vacant = b.vacant[:n-1]
	} else {
		c = uint32(len(b.chunks))
		before := cap(b.chunks)
		b.chunks = append(b.chunks, chunk{})
		b.bytes.Add(int64(cap(b.chunks)-before) * chunkRefBytes)
	}
	b.chunks[c] = chunk{entries: new([chunkPlaces]entry), groups: new([chunkGroups]group)}
	b.bytes.Add(chunkBytes)
	for g := range uint32(chunkGroups) {
		b.link(c*chunkGroups+g, 0)
	}
}

// giveBack drops an empty chunk, and another one that had been kept, when more than
// an eighth of the groups, and than two chunks', are empty.
func (b *Blocks) giveBack(c uint32) {
	for range 2 {
		groups := (len(b.chunks) - 1 - len(b.vacant)) * chunkGroups
		if b.chunks[c].used > 0 || b.lists[0].n <= 2*chunkGroups+groups/8 {
			return
		}
		for g := range uint32(chunkGroups) {
			b.unlink(c*chunkGroups+g, 0)
		}
		b.chunks[c] = chunk{}
		before := cap(b.vacant)
		b.vacant = append(b.vacant, c)
		b.bytes.Add(int64(cap(b.vacant)-before)*4 - chunkBytes)
		c = b.lists[0].head / chunkGroups
	}
}
