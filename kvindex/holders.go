package kvindex

import (
	"math/bits"
	"sync/atomic"
	"unsafe"
)

const (
	pageSlots = 64 // slots per page, one bit of a mask each

	// Shards grow one by one, so that growing stalls nobody for long: of 31
	// million hashes a shard holds 30,000, less than a megabyte to move.
	shardBits  = 10
	shardShift = 64 - shardBits
	shardCount = 1 << shardBits

	minHomes  = 8
	tailSlots = 8 // places behind the last home, for entries pushed past it
)

// Holders says which slots hold which block hashes. It knows nothing of
// recency, tiers or time: whoever owns those adds and removes.
//
// A hash is found with one look-up, whatever the number of slots: its entry
// carries the slots of one page of 64 as a bit mask, and links to the pages
// beyond the first. Nothing in it is a pointer, so a garbage collection does not
// look at the entries.
//
// Has and Walk only read and may share a lock; Distinct and Bytes need none; all
// else needs the lock to itself.
type Holders struct {
	mix    mixer
	shards []shard

	distinct int
	counted  atomic.Int64 // distinct, as of the last change that has ended
	bytes    atomic.Int64
}

// mixer turns a block hash into a table key. It is one to one, so that the key
// stands for the hash, and it depends on a secret, because who writes prompts
// can look for hashes that would crowd one place of a table.
type mixer struct{ xor, mul1, mul2 uint64 }

func newMixer(seed uint64) mixer {
	next := func() uint64 { // SplitMix64
		seed += 0x9e3779b97f4a7c15
		z := (seed ^ seed>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		return z ^ z>>31
	}
	return mixer{xor: next(), mul1: next() | 1, mul2: next() | 1}
}

func (m *mixer) key(hash uint64) uint64 {
	k := (hash ^ m.xor) * m.mul1
	return (k ^ k>>32) * m.mul2
}

// shard is an open-addressing table sorted by key: a key's home is its share of
// the homes, entries wait behind their home in key order. A search ends at the
// first key that is not smaller, a removal shifts the followers back, and a
// resize is one pass from front to back.
type shard struct {
	table []entry // homes places and a tail
	homes uint64
	used  int
	pages
}

// pages holds the pages of entries beyond the first.
type pages struct {
	nodes []node // named by index + 1
	free  uint32 // first unused node, linked by next
	spare int    // number of unused nodes
}

// entry is a hash that somebody holds, or an empty place.
type entry struct {
	key  uint64
	mask uint64 // 0 in an empty place only
	page uint32
	more uint32 // first node, 0 for none
}

// emptyKey is the greatest key, so that a search ends at an empty place without asking. It may also be that of a hash.
const emptyKey = ^uint64(0)

// places returns n empty places.
func places(n int) []entry {
	p := make([]entry, n)
	for i := range p {
		p[i].key = emptyKey
	}
	return p
}

// node holds five more pages of a hash and fills a cache line. A place with an empty mask is free.
type node struct {
	masks [5]uint64
	pages [5]uint32
	next  uint32
}

const (
	entryBytes = int64(unsafe.Sizeof(entry{}))
	nodeBytes  = int64(unsafe.Sizeof(node{}))
	shardBytes = int64(unsafe.Sizeof(shard{}))
)

// NewHolders returns an empty map. The seed decides where hashes are placed; it
// should be random and secret where clients choose the prompts.
func NewHolders(seed uint64) *Holders {
	h := &Holders{}
	h.init(newMixer(seed))
	return h
}

func (h *Holders) init(m mixer) {
	h.mix = m
	h.Reset()
}

// Reset forgets everything.
func (h *Holders) Reset() {
	h.shards = make([]shard, shardCount)
	h.bytes.Store(shardCount * shardBytes)
	h.distinct = 0
	h.publish()
}

// Add records that slot holds hash and reports whether that is new.
func (h *Holders) Add(hash uint64, slot int) bool {
	defer h.publish()
	return h.add(h.mix.key(hash), slot)
}

// Remove records that slot no longer holds hash and reports whether it did.
func (h *Holders) Remove(hash uint64, slot int) bool {
	defer h.publish()
	return h.remove(h.mix.key(hash), slot)
}

// Has reports whether slot holds hash.
func (h *Holders) Has(hash uint64, slot int) bool {
	return h.mask(h.mix.key(hash), pageOf(slot))&bitOf(slot) != 0
}

// Clear makes slot hold nothing and returns how many hashes it held. It reads
// every entry; an owner that can list the hashes of a slot removes them instead.
func (h *Holders) Clear(slot int) int {
	defer h.publish()
	removed, page, bit := 0, pageOf(slot), bitOf(slot)
	for k := range h.shards {
		s := &h.shards[k]
		for i := 0; i < len(s.table); {
			if s.table[i].mask == 0 || s.pageMask(&s.table[i], page)&bit == 0 {
				i++
				continue
			}
			removed++
			if s.clear(&s.table[i], page, bit); s.table[i].mask == 0 {
				s.delete(i) // a follower may have moved here
				h.distinct--
			} else {
				i++
			}
		}
		h.shrink(s)
	}
	return removed
}

// Distinct returns the number of hashes that at least one slot holds. It may be called at any time from any goroutine.
func (h *Holders) Distinct() int { return int(h.counted.Load()) }

// Bytes returns the memory in use, in bytes. It may be called at any time from any goroutine.
func (h *Holders) Bytes() int64 { return h.bytes.Load() }

// Walk finds how much of a prompt each slot holds. hashes is the prompt's chain
// in order; active has a bit for each slot that is asked about, slot s being bit
// s%64 of active[s/64]. For each of them Walk adds to matched[slot] the number of
// leading hashes that the slot holds, and it ends where no slot is left. It
// returns the longest such run. active is scratch: its content is lost.
func (h *Holders) Walk(hashes []uint64, active []uint64, matched []int32) int {
	longest := 0
	for first := 0; first < len(active); first += 64 {
		w := walk{first: uint32(first), active: active[first:min(first+64, len(active))], matched: matched}
		longest = max(longest, w.run(h, hashes))
	}
	return longest
}

// publish makes the count of hashes visible to other goroutines, once per change rather than per hash.
func (h *Holders) publish() {
	if n := int64(h.distinct); n != h.counted.Load() {
		h.counted.Store(n)
	}
}

func pageOf(slot int) uint32 { return uint32(slot / pageSlots) }
func bitOf(slot int) uint64  { return 1 << (uint(slot) % pageSlots) }

// walk is one pass over a prompt for up to 64 pages, so that a word can say which of them are left.
type walk struct {
	first   uint32 // page of active[0]
	active  []uint64
	matched []int32
	live    uint64 // pages that still have an active slot
	keys    [32]uint64
	fetched uint64
}

func (w *walk) start() {
	for p, m := range w.active {
		if m != 0 {
			w.live |= 1 << p
		}
	}
}

// end gives all slots that are left n hashes.
func (w *walk) end(n int) {
	for left := w.live; left != 0; left &= left - 1 {
		p := bits.TrailingZeros64(left)
		w.credit(p, w.active[p], n)
	}
}

func (w *walk) run(h *Holders, hashes []uint64) int {
	var none entry
	w.start()
	i, ahead := 0, 4
	for i < len(hashes) && w.live != 0 {
		n := min(ahead, len(hashes)-i)
		for k, hash := range hashes[i : i+n] {
			w.keys[k] = h.mix.key(hash)
		}
		w.fetched += h.fetch(w.keys[:n])
		for _, key := range w.keys[:n] {
			s, e := &h.shards[key>>shardShift], &none
			if at, ok := s.find(key); ok {
				e = &s.table[at]
			}
			if w.step(e, &s.pages, i); w.live == 0 {
				return i
			}
			i++
		}
		ahead = min(2*ahead, len(w.keys)) // a prompt that nobody knows ends early
	}
	w.end(i)
	return i
}

// step checks all slots against the entry of the i-th hash of the prompt, an empty one when nobody holds it.
func (w *walk) step(e *entry, more *pages, i int) {
	if w.live&(w.live-1) == 0 { // a single page is left
		p := bits.TrailingZeros64(w.live)
		if mask := more.pageMask(e, w.first+uint32(p)); w.active[p]&^mask != 0 {
			w.keep(p, mask, i)
		}
		return
	}
	seen := uint64(0) // pages that the hash has been checked against
	if p := e.page - w.first; p < uint32(len(w.active)) {
		seen |= 1 << p
		if w.active[p]&^e.mask != 0 {
			w.keep(int(p), e.mask, i)
		}
	}
	for n := e.more; n != 0 && w.live&^seen != 0; {
		d := &more.nodes[n-1]
		for k, m := range d.masks {
			if p := d.pages[k] - w.first; m != 0 && p < uint32(len(w.active)) {
				seen |= 1 << p
				if w.active[p]&^m != 0 {
					w.keep(int(p), m, i)
				}
			}
		}
		n = d.next
	}
	for gone := w.live &^ seen; gone != 0; gone &= gone - 1 {
		w.keep(bits.TrailingZeros64(gone), 0, i)
	}
}

// keep leaves the slots of active[p] that are in mask; the others end with n hashes.
func (w *walk) keep(p int, mask uint64, n int) {
	w.credit(p, w.active[p]&^mask, n)
	if w.active[p] &= mask; w.active[p] == 0 {
		w.live &^= 1 << p
	}
}

// credit adds n to the slots of active[p] in mask.
func (w *walk) credit(p int, mask uint64, n int) {
	if n == 0 {
		return
	}
	base := (int(w.first) + p) * pageSlots
	if mask == ^uint64(0) { // all leave together where their common head ends
		all := w.matched[base:][:pageSlots]
		for i := range all {
			all[i] += int32(n)
		}
		return
	}
	for ; mask != 0; mask &= mask - 1 {
		w.matched[base+bits.TrailingZeros64(mask)] += int32(n)
	}
}

func (h *Holders) add(key uint64, slot int) bool {
	s := &h.shards[key>>shardShift]
	page, bit := pageOf(slot), bitOf(slot)
	i, ok := s.find(key)
	if ok {
		fresh, grown := s.set(&s.table[i], page, bit)
		if grown > 0 {
			h.bytes.Add(grown)
		}
		return fresh
	}
	if uint64(s.used) >= s.homes*5/8 {
		h.resize(s, larger(s.homes, key))
		i, _ = s.find(key)
	}
	h.insert(s, i, entry{key: key, mask: bit, page: page})
	h.distinct++
	return true
}

func (h *Holders) remove(key uint64, slot int) bool {
	s := &h.shards[key>>shardShift]
	page, bit := pageOf(slot), bitOf(slot)
	i, ok := s.find(key)
	if !ok || s.pageMask(&s.table[i], page)&bit == 0 {
		return false
	}
	if s.clear(&s.table[i], page, bit); s.table[i].mask == 0 {
		s.delete(i)
		h.distinct--
		h.shrink(s)
	}
	return true
}

// mask returns the slots of a page that hold the hash of key.
func (h *Holders) mask(key uint64, page uint32) uint64 {
	s := &h.shards[key>>shardShift]
	i, ok := s.find(key)
	if !ok {
		return 0
	}
	return s.pageMask(&s.table[i], page)
}

// slots appends the slots that hold the hash of key.
func (h *Holders) slots(key uint64, dst []int) []int {
	s := &h.shards[key>>shardShift]
	i, ok := s.find(key)
	if !ok {
		return dst
	}
	add := func(page uint32, mask uint64) {
		for ; mask != 0; mask &= mask - 1 {
			dst = append(dst, int(page)*pageSlots+bits.TrailingZeros64(mask))
		}
	}
	e := &s.table[i]
	add(e.page, e.mask)
	for n := e.more; n != 0; n = s.nodes[n-1].next {
		for k, mask := range s.nodes[n-1].masks {
			add(s.nodes[n-1].pages[k], mask)
		}
	}
	return dst
}

// fetch reads the homes of keys ahead of their look-ups. The reads do not depend
// on each other and wait for memory together, which look-ups, full of branches on
// what they read, do not. The caller stores the sum, so that the reads are not
// optimised away.
func (h *Holders) fetch(keys []uint64) (sum uint64) {
	for _, key := range keys {
		s := &h.shards[key>>shardShift]
		if i := s.home(key); i+3 < len(s.table) {
			sum += s.table[i].key ^ s.table[i+3].key
		}
	}
	return sum
}

// find returns where key is, or else where it belongs.
func (s *shard) find(key uint64) (int, bool) {
	for i := s.home(key); i < len(s.table); i++ {
		if e := &s.table[i]; e.key >= key {
			return i, e.mask != 0 && e.key == key
		}
	}
	return len(s.table), false
}

func (s *shard) home(key uint64) int {
	i, _ := bits.Mul64(key<<shardBits, s.homes)
	return int(i)
}

// insert puts e at i and moves what is there up to the next empty place.
func (h *Holders) insert(s *shard, i int, e entry) {
	end := i
	for end < len(s.table) && s.table[end].mask != 0 {
		end++
	}
	if end == len(s.table) {
		before := s.bytes()
		s.table = append(s.table, places(tailSlots)...)
		h.bytes.Add(s.bytes() - before)
	}
	copy(s.table[i+1:end+1], s.table[i:end])
	s.table[i] = e
	s.used++
}

// delete empties place i and moves the entries that were pushed past it back.
func (s *shard) delete(i int) {
	end := i + 1
	for end < len(s.table) && s.table[end].mask != 0 && s.home(s.table[end].key) != end {
		end++
	}
	copy(s.table[i:], s.table[i+1:end])
	s.table[end-1] = entry{key: emptyKey}
	s.used--
}

// larger returns how many homes a full shard gets: a fifth to nearly a half more,
// or about twice as many when it is small. The key decides at random, lest all
// shards, which fill at the same pace, grow during the same few requests.
func larger(homes, key uint64) uint64 {
	if homes < 64 {
		n := max(homes, minHomes)
		return n + n/2 + key%n
	}
	return homes + homes/5 + key%(homes/4)
}

// shrink gives memory back when a shard is less than three sixteenths full.
func (h *Holders) shrink(s *shard) {
	if s.homes > 8*minHomes && uint64(s.used) < s.homes*3/16 {
		h.resize(s, s.homes/2)
	}
}

// resize moves a shard to a table of that many homes. Nodes are packed when most of them are unused.
func (h *Holders) resize(s *shard, homes uint64) {
	before := s.bytes()
	old := s.table
	s.homes = homes
	s.table = places(int(homes) + tailSlots)
	was, pack := s.sparse()
	next := 0
	for i := range old {
		e := &old[i]
		if e.mask == 0 {
			continue
		}
		if pack {
			s.move(e, was)
		}
		next = max(next, s.home(e.key))
		if next == len(s.table) {
			s.table = append(s.table, places(tailSlots)...)
		}
		s.table[next] = *e
		next++
	}
	h.bytes.Add(s.bytes() - before)
}

func (s *shard) bytes() int64 {
	return int64(cap(s.table))*entryBytes + int64(cap(s.nodes))*nodeBytes
}

// pageMask returns the slots of a page that hold e.
func (p *pages) pageMask(e *entry, page uint32) uint64 {
	if e.page == page {
		return e.mask
	}
	if d, k := p.findPage(e, page); d != nil {
		return d.masks[k]
	}
	return 0
}

// findPage returns the node and place of a page beyond the first.
func (p *pages) findPage(e *entry, page uint32) (*node, int) {
	for n := e.more; n != 0; {
		d := &p.nodes[n-1]
		for k, n := range d.pages {
			if n == page && d.masks[k] != 0 {
				return d, k
			}
		}
		n = d.next
	}
	return nil, 0
}

// set adds slots of a page to e, and returns whether that is new and by how many bytes p has grown.
func (p *pages) set(e *entry, page uint32, bit uint64) (fresh bool, grown int64) {
	mask := &e.mask
	if e.page != page {
		d, k := p.findPage(e, page)
		if d == nil {
			return true, p.addPage(e, page, bit)
		}
		mask = &d.masks[k]
	}
	fresh = *mask&bit == 0
	*mask |= bit
	return fresh, 0
}

// addPage adds a page beyond the first, in a node of e that has room or in a new one.
func (p *pages) addPage(e *entry, page uint32, mask uint64) (grown int64) {
	for n := e.more; n != 0; {
		d := &p.nodes[n-1]
		for k, m := range d.masks {
			if m == 0 {
				d.masks[k], d.pages[k] = mask, page
				return 0
			}
		}
		n = d.next
	}
	n := p.free
	if n != 0 {
		p.free = p.nodes[n-1].next
		p.spare--
	} else {
		before := cap(p.nodes)
		p.nodes = append(p.nodes, node{})
		n = uint32(len(p.nodes))
		grown = int64(cap(p.nodes)-before) * nodeBytes
	}
	p.nodes[n-1] = node{next: e.more}
	p.nodes[n-1].masks[0], p.nodes[n-1].pages[0] = mask, page
	e.more = n
	return grown
}

// clear takes a held slot of a page from e. The mask of e stays empty only if nobody is left.
func (p *pages) clear(e *entry, page uint32, bit uint64) {
	if e.page == page {
		if e.mask &^= bit; e.mask == 0 && e.more != 0 { // move another page in
			d := &p.nodes[e.more-1]
			for k, m := range d.masks {
				if m != 0 {
					e.page, e.mask = d.pages[k], m
					d.masks[k] = 0
					break
				}
			}
			p.release(e, d)
		}
		return
	}
	d, k := p.findPage(e, page)
	d.masks[k] &^= bit
	p.release(e, d)
}

// release unlinks a node of e that holds nothing.
func (p *pages) release(e *entry, d *node) {
	if d.masks != [5]uint64{} {
		return
	}
	link := &e.more
	for &p.nodes[*link-1] != d {
		link = &p.nodes[*link-1].next
	}
	n := *link
	*link = d.next
	d.next, p.free = p.free, n
	p.spare++
}

// sparse makes p ready for move when most of the nodes are unused. It returns the old nodes.
func (p *pages) sparse() (was []node, pack bool) {
	if was = p.nodes; p.spare <= len(was)/2 {
		return was, false
	}
	*p = pages{nodes: make([]node, 0, len(was)-p.spare)}
	return was, true
}

// move takes the nodes of e over from those before sparse.
func (p *pages) move(e *entry, was []node) {
	for link := &e.more; *link != 0; {
		p.nodes = append(p.nodes, was[*link-1])
		*link = uint32(len(p.nodes))
		link = &p.nodes[len(p.nodes)-1].next
	}
}
