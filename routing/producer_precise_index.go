package routing

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"kvgate/kvindex"
)

// preciseIndex knows which endpoint holds which blocks from what the engines tell
// (KVEvents), and expects for a while what was just sent (guesses).
//
// Each rank of an endpoint is a column of the holder map, for a prompt is found
// on one rank or another, not half and half. What an engine calls a block stays
// in the rank's own table; only keys made from the tokens are in the holder map.
//
// Lock order: Fleet.mu, rank.mu, preciseIndex.mu. Hashing and the rank's table
// are outside of preciseIndex.mu, which is held for a few blocks at a time, so
// that a decision does not wait for a flood of events.
type preciseIndex struct {
	producer string
	shape    preciseShape
	keys     kvindex.Keys
	tiers    []tierWeight
	levels   []float64 // the different weights of tiers; levels[0] is that of the gpu
	log      *zap.Logger

	share   atomic.Int64  // keys that one endpoint may hold
	strange atomic.Uint64 // events of endpoints that are not there

	wanted  atomic.Int32 // decisions that wait for mu
	mu      sync.Mutex
	held    *kvindex.Blocks   // key -> columns that hold it, or are guessed to
	lower   []*kvindex.Blocks // by level-1: key -> columns whose best tier is of that level
	guesses guesses
	columns []preciseColumn
	bySlot  []preciseSlot // by Endpoint.slot
	members map[*Endpoint]*preciseMember

	// Scratch of match.
	rowsOf preciseRows // what rows, asked and alike are of; zero: to be made anew
	rows   []int32     // by candidate, its column; below 0 when it has none or several
	asked  []uint64    // bits of the candidates' columns
	alike  int         // tokens per engine block of all candidates, 0 when they differ or one has several columns
	active []uint64
	runs   []int32
	walked *chain // whose single prompt runs is about
	counts []int32
	score  []float64
	cached []int64
}

// preciseShape is what two configurations must have in common to share an index. Values are comparable.
type preciseShape struct {
	algorithm, seed string
	blockTokens     int
	limit           int // keys over all endpoints
	tiers           string
	guessTTL        int64  // nanoseconds, 0 without speculativeIndexing
	seedOfPlaces    uint64 // not part of the comparison: see same
}

// tierWeight is what a block in a tier, named in lower case, counts.
type tierWeight struct {
	name   string
	weight float64
}

// preciseRows tells pinned candidates from others.
type preciseRows struct {
	first *Candidate
	n     int
	made  uint64 // see pinned
}

// preciseColumn is a column of the holder map. A column that a rank has given up is
// used again once no guess names it any more.
type preciseColumn struct {
	rank    *preciseRank // nil when given up
	guesses int
	block   int  // tokens per engine block, 0 before the first event
	cleared bool // no event's key is left in it
}

// preciseSlot is what a decision reads of an endpoint. It is of the endpoint's slot, and in one array, so that
// a decision over many endpoints does not wait for each one's memory.
type preciseSlot struct {
	endpoint *Endpoint // nil when free
	member   *preciseMember
	column   int32 // of rank 0
	several  bool  // ranks
}

// preciseMember is an endpoint and its ranks, rank 0 at least.
type preciseMember struct {
	endpoint *Endpoint
	slot     int
	ranks    []*preciseRank // by rank; nil for one that told nothing
	told     atomic.Int32
}

// maxRanks bounds the ranks of one endpoint.
const maxRanks = 256

// preciseRank is one engine of an endpoint.
type preciseRank struct {
	x      *preciseIndex
	member *preciseMember
	number int

	column int // guarded by x.mu, changed under mu too

	mu     sync.Mutex
	gone   bool
	engine int    // tokens per engine block, 0 before the first event; the column has it too
	lost   string // why it is incomplete
	table  blockTable
	places []precisePlace // by number
	tails  map[uint64]preciseTail
	shared map[uint64][]int8 // key -> levels of the blocks that it is of, when there are several
	stats  PreciseStats

	warned bool

	ops    []blockOp
	last   []uint32 // by map, held and lower: see flush
	keys   []uint64 // scratch of note
	made   []uint64 // scratch of storeTokens
	tokens []byte
	extras []kvindex.Extra
}

// precisePlace is a tier and a group of the engine.
type precisePlace struct {
	tier  string // in lower case
	group int
	level int8
}

// preciseTail is the begin of one of our blocks, up to and including an engine block
// that does not fill it.
type preciseTail struct {
	parent uint64   // key before our block
	tokens []byte   // since the start of our block
	hashes []uint64 // engine blocks since there, this one included
	extras []kvindex.Extra
}

// blockOp sets the level of a key in a rank's column. opGone takes it out; opBehind
// says that the next one comes behind it in its prompt.
type blockOp struct {
	key   uint64
	level int8
}

const (
	opGone   int8 = -1
	opBehind int8 = -2
)

// Bounds of what one rank may tell: places, the length of a tier's name, the
// ratio between its block size and ours; and the changes made under one lock.
const (
	maxPlaces   = 64
	maxTierName = 64
	maxRatio    = 256
	opsAtOnce   = 4
)

// same tells whether an index of shape s serves a configuration of shape o.
func (s preciseShape) same(o preciseShape) bool {
	s.seedOfPlaces, o.seedOfPlaces = 0, 0
	return s == o
}

func newPreciseIndex(producer string, shape preciseShape, keys kvindex.Keys, tiers []tierWeight, levels []float64, log *zap.Logger) *preciseIndex {
	x := &preciseIndex{
		producer: producer, shape: shape, keys: keys, tiers: tiers, levels: levels, log: log,
		held: kvindex.NewBlocks(shape.seedOfPlaces), members: make(map[*Endpoint]*preciseMember),
	}
	for i := 1; i < len(levels); i++ {
		x.lower = append(x.lower, kvindex.NewBlocks(shape.seedOfPlaces+uint64(i)))
	}
	x.guesses.ttl, x.guesses.bits = shape.guessTTL, kvindex.NewBlocks(^shape.seedOfPlaces)
	x.share.Store(int64(shape.limit))
	return x
}

// join makes room for an endpoint. The caller holds Fleet.mu.
func (x *preciseIndex) join(e *Endpoint, slot int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	m := &preciseMember{endpoint: e, slot: slot}
	for len(x.bySlot) <= slot {
		x.bySlot = append(x.bySlot, preciseSlot{})
	}
	x.bySlot[slot] = preciseSlot{endpoint: e, member: m}
	x.members[e] = m
	x.rowsOf = preciseRows{}
	x.addRank(m, 0)
	x.share.Store(int64(max(1, x.shape.limit/len(x.members))))
}

// leave forgets an endpoint. The caller holds Fleet.mu.
func (x *preciseIndex) leave(e *Endpoint) {
	x.mu.Lock()
	m := x.members[e]
	if m == nil {
		x.mu.Unlock()
		return
	}
	delete(x.members, e)
	x.bySlot[m.slot] = preciseSlot{}
	x.rowsOf = preciseRows{}
	x.share.Store(int64(max(1, x.shape.limit/max(1, len(x.members)))))
	x.mu.Unlock()
	for _, r := range m.ranks {
		if r != nil {
			r.mu.Lock()
			r.gone = true
			r.clear(false)
			r.mu.Unlock()
		}
	}
}

// addRank gives an endpoint's rank a column. The caller holds mu.
func (x *preciseIndex) addRank(m *preciseMember, number int) *preciseRank {
	r := &preciseRank{x: x, member: m, number: number, last: make([]uint32, 1+len(x.lower))}
	r.table.mul = x.shape.seedOfPlaces | 1
	x.takeColumn(r)
	for len(m.ranks) <= number {
		m.ranks = append(m.ranks, nil)
	}
	m.ranks[number] = r
	x.bySlot[m.slot].several = len(m.ranks) > 1
	x.rowsOf = preciseRows{}
	m.told.Add(1)
	return r
}

// takeColumn gives a rank a column that holds nothing. The caller holds mu.
func (x *preciseIndex) takeColumn(r *preciseRank) {
	r.column = len(x.columns)
	for i := range x.columns {
		if c := &x.columns[i]; c.rank == nil && c.cleared && c.guesses == 0 {
			r.column = i
			break
		}
	}
	if r.column == len(x.columns) {
		x.columns = append(x.columns, preciseColumn{})
	}
	x.columns[r.column] = preciseColumn{rank: r}
	x.rowsOf = preciseRows{}
	if s := &x.bySlot[r.member.slot]; r.number == 0 && s.member == r.member { // it may have left
		s.column = int32(r.column)
	}
}

// rank returns who an event is about, nil when it is to be dropped.
func (x *preciseIndex) rank(e *Endpoint, number int) *preciseRank {
	x.lockBetween()
	defer x.mu.Unlock()
	m := x.members[e]
	if m == nil || number < 0 || number >= maxRanks {
		x.strange.Add(1)
		return nil
	}
	if number < len(m.ranks) && m.ranks[number] != nil {
		return m.ranks[number]
	}
	return x.addRank(m, number)
}

// with calls do with the rank that an event is about, and applies what it did.
func (x *preciseIndex) with(e *Endpoint, number int, do func(*preciseRank)) {
	r := x.rank(e, number)
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gone {
		x.strange.Add(1)
		return
	}
	clear(r.last)
	do(r)
	r.flush()
}

// Stored implements KVEvents.
func (x *preciseIndex) Stored(e *Endpoint, rank int, b *BlockStored) {
	x.with(e, rank, func(r *preciseRank) { r.store(b) })
}

// Removed implements KVEvents.
func (x *preciseIndex) Removed(e *Endpoint, rank int, b *BlockRemoved) {
	x.with(e, rank, func(r *preciseRank) { r.remove(b) })
}

// Cleared implements KVEvents.
func (x *preciseIndex) Cleared(e *Endpoint, rank int) {
	x.with(e, rank, func(r *preciseRank) {
		r.stats.Cleared++
		r.clear(true)
	})
}

// Incomplete implements KVEvents.
func (x *preciseIndex) Incomplete(e *Endpoint, rank int, why string) {
	x.with(e, rank, func(r *preciseRank) {
		if why != "" && r.lost == "" {
			x.log.Warn("KV events were lost: what the replica holds is not known any more", zap.String("producer", x.producer),
				zap.String("replica", e.DisplayName()), zap.Int("rank", rank), zap.String("reason", why))
		}
		r.lost = why
		if why != "" {
			r.stats.Lost++
			r.clear(true)
		}
	})
}

// lock takes mu for a decision. Events hold it for a microsecond at a time, while
// going to sleep until it is free takes ten.
func (x *preciseIndex) lock() {
	x.wanted.Add(1)
	defer x.wanted.Add(-1)
	for range 1000 {
		if x.mu.TryLock() {
			return
		}
	}
	x.mu.Lock()
}

// lockBetween takes mu for events, between two decisions. It looks again and again
// before it sleeps, for a decision would have to wake it up, and lets one that waits
// go first: who has just let go of a lock has it again before anybody else sees that it was free.
func (x *preciseIndex) lockBetween() {
	for range 200 {
		if x.wanted.Load() == 0 && x.mu.TryLock() {
			return
		}
		runtime.Gosched()
	}
	x.mu.Lock()
}

// flush applies the noted changes to the holder map. The caller holds r.mu.
func (r *preciseRank) flush() {
	x := r.x
	for part := range slices.Chunk(r.ops, opsAtOnce) {
		x.lockBetween()
		x.resume(r.last)
		for _, op := range part {
			x.set(op, r.column)
		}
		r.last[0] = x.held.Last()
		for i, l := range x.lower {
			r.last[i+1] = l.Last()
		}
		x.mu.Unlock()
	}
	r.ops = kept(r.ops, maxKeptItems)
}

// resume goes on where the maps were at last, whatever others have added since. The caller holds mu.
func (x *preciseIndex) resume(last []uint32) {
	x.held.Resume(last[0])
	for i, l := range x.lower {
		l.Resume(last[i+1])
	}
}

// set applies one change. The caller holds mu.
func (x *preciseIndex) set(op blockOp, column int) {
	if op.level == opBehind {
		x.held.Behind(op.key)
		for _, l := range x.lower {
			if l.Distinct() > 0 {
				l.Behind(op.key)
			}
		}
		return
	}
	if op.level != opGone {
		if !x.held.Add(op.key, column) {
			x.guesses.confirm(op.key, column)
		}
	} else {
		x.held.Remove(op.key, column)
	}
	for i, l := range x.lower {
		if int(op.level) == i+1 {
			l.Add(op.key, column)
		} else if l.Distinct() > 0 {
			l.Remove(op.key, column)
		}
	}
}

// clear forgets everything about the rank, guesses too. The rank moves to another
// column at once; the old one is emptied after that. The caller holds r.mu.
func (r *preciseRank) clear(stays bool) {
	x := r.x
	r.flush()
	x.mu.Lock()
	old := r.column
	x.columns[old].rank = nil
	if stays {
		x.takeColumn(r)
	}
	x.mu.Unlock()
	for i := range r.table.recs {
		if rec := &r.table.recs[i]; rec.count > 0 && rec.key != 0 {
			r.keys = r.table.keys(r.keys[:0], uint32(i+1))
			for _, key := range r.keys {
				r.ops = append(r.ops, blockOp{key, opGone})
			}
		}
		if len(r.ops) >= opsAtOnce || i == len(r.table.recs)-1 {
			x.lockBetween()
			for _, op := range r.ops {
				x.set(op, old)
			}
			x.mu.Unlock()
			r.ops = r.ops[:0]
		}
	}
	r.table.reset()
	r.tails, r.shared, r.places = nil, nil, r.places[:0]
	r.engine = 0
	x.mu.Lock()
	x.columns[old].cleared = true
	x.mu.Unlock()
}

// fullAttention tells whether blocks of that kind of cache make up a prefix. Of a
// sliding window or a state space model a prefix needs the end only.
func fullAttention(kind []byte) bool {
	switch string(kind) {
	case "", "full_attention", "mla_attention", "sink_full_attention":
		return true
	}
	return false
}

// placeOf returns the number of a tier and group. ok is false when there are too many.
func (r *preciseRank) placeOf(medium []byte, group int, add bool) (n uint8, ok bool) {
	if len(medium) == 0 {
		medium = []byte("gpu")
	}
	for i := range r.places {
		if p := &r.places[i]; p.group == group && bytes.EqualFold(medium, []byte(p.tier)) {
			return uint8(i), true
		}
	}
	if !add || len(r.places) == maxPlaces || len(medium) > maxTierName {
		return 0, false
	}
	tier := string(bytes.ToLower(medium))
	r.places = append(r.places, precisePlace{tier: tier, group: group, level: r.x.level(tier)})
	return uint8(len(r.places) - 1), true
}

// level returns the index of a tier's weight in levels: 1 when the tier has none.
func (x *preciseIndex) level(tier string) int8 {
	weight := 1.0
	for _, t := range x.tiers {
		if t.name == tier {
			weight = t.weight
		}
	}
	return int8(slices.Index(x.levels, weight))
}

// levelOf returns the best level of the hash whose first record is n, opGone when n is 0.
func (r *preciseRank) levelOf(n uint32) int8 {
	best := opGone
	for ; n != 0; n = r.table.rec(n).next {
		if l := r.places[r.table.rec(n).place].level; best == opGone || r.x.levels[l] > r.x.levels[best] {
			best = l
		}
	}
	return best
}

// note says that the block of record n moved from one level to another.
func (r *preciseRank) note(n uint32, from, to int8) {
	if r.table.rec(n).key == 0 {
		return // a part of one of our blocks that is not whole yet
	}
	r.keys = r.table.keys(r.keys[:0], n)
	for _, key := range r.keys {
		level := to
		if r.table.stride > 1 {
			level = r.share(key, from, to)
		}
		r.ops = append(r.ops, blockOp{key, level})
	}
}

// share notes the move of one of the blocks that a key is of, and returns the best
// level of them all. Prompts that part within an engine block make different engine
// blocks that begin with the same blocks of ours.
func (r *preciseRank) share(key uint64, from, to int8) int8 {
	levels, shared := r.shared[key]
	if !shared {
		if from != opGone {
			return to
		}
		level := r.levelHeld(key)
		if level == opGone {
			return to
		}
		levels = []int8{level}
	}
	if i := slices.Index(levels, from); i >= 0 {
		levels = slices.Delete(levels, i, i+1)
	}
	if to != opGone {
		levels = append(levels, to)
	}
	if len(levels) > 1 {
		if r.shared == nil {
			r.shared = make(map[uint64][]int8)
		}
		r.shared[key] = levels
	} else {
		delete(r.shared, key)
	}
	best := levels[0]
	for _, l := range levels {
		if r.x.levels[l] > r.x.levels[best] {
			best = l
		}
	}
	return best
}

// levelHeld returns the level at which the rank is known to hold a key.
func (r *preciseRank) levelHeld(key uint64) int8 {
	r.flush()
	x := r.x
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.held.Has(key, r.column) || x.guesses.any() && x.guesses.of(key, r.column) != 0 {
		return opGone
	}
	for i, l := range x.lower {
		if l.Has(key, r.column) {
			return int8(i + 1)
		}
	}
	return 0
}

// hold adds a reference to the hash whose first record is n.
func (r *preciseRank) hold(n uint32, place uint8) {
	if at := r.table.at(n, place); at != 0 {
		r.table.rec(at).addCount()
		r.stats.Duplicates++
		return
	}
	before := r.levelOf(n)
	r.table.chain(n, place, r.keys)
	if l := r.levelOf(n); l != before && !r.table.rec(n).part {
		r.note(n, before, l)
	}
}

// drop takes record at out of the chain that starts at n.
func (r *preciseRank) drop(n, at uint32) uint32 {
	before, hash := r.levelOf(n), r.table.rec(n).hash
	if r.table.rec(at).next == 0 && at == n {
		r.note(n, before, opGone)
		delete(r.tails, hash)
		return r.table.unlink(n, at)
	}
	n = r.table.unlink(n, at)
	if l := r.levelOf(n); l != before && !r.table.rec(n).part {
		r.note(n, before, l)
	}
	return n
}

// forget takes all records of the hash whose first record is n away.
func (r *preciseRank) forget(n uint32) {
	for n != 0 {
		n = r.drop(n, n)
	}
}

// insert records a hash that is new, and makes room for it when the rank has its
// share of the index. A key of 0 stands for none yet.
func (r *preciseRank) insert(hash uint64, place uint8, keys []uint64, part bool) {
	share := int(r.x.share.Load()) / int(r.member.told.Load())
	for r.table.used > 0 && (r.table.used+1)*len(keys) > share {
		n := r.table.oldest()
		r.forget(r.table.find(r.table.rec(n).hash))
		r.stats.Evicted++
	}
	r.table.stride = len(keys)
	n := r.table.insert(hash, place, keys)
	r.table.rec(n).part = part
	if !part {
		r.note(n, opGone, r.places[place].level)
	}
}

// remove takes in a BlockRemoved event.
func (r *preciseRank) remove(b *BlockRemoved) {
	place, ok := r.placeOf(b.Medium, b.Group, false)
	for _, hash := range b.Hashes {
		n, at := r.table.find(hash), uint32(0)
		if ok {
			at = r.table.at(n, place)
		}
		if at == 0 {
			r.stats.UnknownBlocks++
			continue
		}
		r.stats.Removed++
		if rec := r.table.rec(at); rec.count > 1 {
			rec.count--
			continue
		}
		r.drop(n, at)
	}
}

// store takes in a BlockStored event.
func (r *preciseRank) store(b *BlockStored) {
	if !fullAttention(b.Kind) {
		r.stats.OtherKinds += uint64(len(b.Hashes))
		return
	}
	place, ok := r.placeOf(b.Medium, b.Group, true)
	switch {
	case !ok:
		r.stats.Refused += uint64(len(b.Hashes))
	case len(b.Tokens) == 0:
		for _, hash := range b.Hashes {
			if n := r.table.find(hash); n != 0 {
				r.stats.Stored++
				r.hold(n, place)
			} else {
				r.stats.UnknownBlocks++
			}
		}
	default:
		r.storeTokens(b, place)
	}
}

// storeTokens takes in blocks with their tokens.
func (r *preciseRank) storeTokens(b *BlockStored, place uint8) {
	ours := r.x.keys.BlockTokens()
	size := b.BlockTokens
	known := r.engine
	if r.table.used == 0 && size != known {
		r.table.reset()
		known = 0
	}
	if size <= 0 || size%ours != 0 && ours%size != 0 || max(size/ours, ours/size) > maxRatio || known != 0 && size != known {
		r.stats.Refused += uint64(len(b.Hashes))
		if !r.warned {
			r.warned = true
			r.x.log.Warn("KV events of a block size that does not fit are left out: it must be the same for all blocks of a replica, and a multiple or a fraction of blockSizeTokens",
				zap.String("producer", r.x.producer), zap.String("replica", r.member.endpoint.DisplayName()), zap.Int("block_tokens", size),
				zap.Int("block_tokens_before", known), zap.Int("blockSizeTokens", ours))
		}
		return
	}
	blocks := min(len(b.Hashes), len(b.Tokens)/size)
	r.stats.Refused += uint64(len(b.Hashes) - blocks)
	parent := uint32(0)
	if b.HasParent {
		if parent = r.table.find(b.Parent); parent == 0 {
			r.stats.UnknownParents += uint64(blocks)
			return
		}
	}
	if r.engine != size {
		r.engine = size
		r.x.mu.Lock()
		r.x.columns[r.column].block = size
		r.x.rowsOf = preciseRows{}
		r.x.mu.Unlock()
	}
	r.tokens = r.tokens[:0]
	for _, t := range b.Tokens[:blocks*size] {
		r.tokens = binary.LittleEndian.AppendUint32(r.tokens, t)
	}
	if size < ours {
		r.storeParts(b, place, parent, blocks)
		return
	}
	start := uint64(0)
	if parent == 0 {
		start = r.x.keys.Model(r.model(b))
	} else {
		start = r.table.lastKey(parent)
		r.ops = append(r.ops, blockOp{start, opBehind})
	}
	ratio := size / ours
	r.takeExtras(b, ratio)
	made := r.x.keys.Append(r.made[:0], start, r.tokens, r.extras)
	r.made = kept(made, maxKeptItems)
	for i, hash := range b.Hashes[:blocks] {
		r.keep(hash, place, made[i*ratio:(i+1)*ratio], false)
	}
}

// model returns the name that requests for these blocks ask for. A topic that
// does not say is about the replica's only model.
func (r *preciseRank) model(b *BlockStored) []byte {
	switch {
	case len(b.LoRA) > 0:
		return b.LoRA
	case len(b.Model) > 0:
		return b.Model
	}
	if names, _ := r.member.endpoint.Models(); len(names) == 1 {
		return []byte(names[0])
	}
	return nil
}

// keep adds a reference to a hash, known or new.
func (r *preciseRank) keep(hash uint64, place uint8, keys []uint64, part bool) {
	r.stats.Stored++
	if n := r.table.find(hash); n != 0 {
		if part || r.table.rec(n).key == keys[0] {
			r.hold(n, place)
			return
		}
		r.forget(n) // the engine gives the hash to something else
	}
	r.insert(hash, place, keys, part)
}

// takeExtras makes r.extras of the extra keys that tell blocks apart: all but the
// name of the LoRA, which stands for the model already. With several of our blocks
// in an engine block, an item counts from where it starts on, and the salt, which
// is no pair, for the first block of a prompt only.
func (r *preciseRank) takeExtras(b *BlockStored, ratio int) {
	r.extras = r.extras[:0]
	ours := r.x.keys.BlockTokens()
	for i := 0; i < len(b.Extras); {
		end := i
		for end < len(b.Extras) && b.Extras[end].Block == b.Extras[i].Block {
			end++
		}
		of := b.Extras[i:end]
		if i = end; len(b.LoRA) > 0 && !of[0].Paired && bytes.Equal(of[0].Key, b.LoRA) {
			of = of[1:]
		}
		for sub := range ratio {
			for _, e := range of {
				first := !b.HasParent && e.Block == 0 && sub == 0
				if ratio == 1 || e.Paired && e.Offset < (sub+1)*ours || !e.Paired && (first || b.HasParent || e.Block > 0) {
					r.extras = append(r.extras, kvindex.Extra{Block: e.Block*ratio + sub, Text: e.Key})
				}
			}
		}
	}
}

// storeParts takes in engine blocks of which several make one of ours.
func (r *preciseRank) storeParts(b *BlockStored, place uint8, parent uint32, blocks int) {
	size := b.BlockTokens * bytesPerToken
	var t preciseTail
	switch {
	case parent == 0:
		t.parent = r.x.keys.Model(r.model(b))
	case r.table.rec(parent).part:
		p, ok := r.tails[b.Parent]
		if !ok {
			r.stats.UnknownParents += uint64(blocks)
			return
		}
		t = preciseTail{p.parent, slices.Clone(p.tokens), slices.Clone(p.hashes), slices.Clone(p.extras)}
	default:
		t.parent = r.table.rec(parent).key
	}
	if parent != 0 {
		r.ops = append(r.ops, blockOp{t.parent, opBehind})
	}
	r.takeExtras(b, 1)
	for i, hash := range b.Hashes[:blocks] {
		t.tokens = append(t.tokens, r.tokens[i*size:(i+1)*size]...)
		t.hashes = append(t.hashes, hash)
		for _, e := range r.extras {
			if e.Block == i {
				t.add(e.Text)
			}
		}
		if len(t.tokens) < r.x.keys.BlockTokens()*bytesPerToken {
			r.keep(hash, place, []uint64{0}, true)
			if r.tails == nil {
				r.tails = make(map[uint64]preciseTail)
			}
			r.tails[hash] = preciseTail{t.parent, slices.Clone(t.tokens), slices.Clone(t.hashes), slices.Clone(t.extras)}
			continue
		}
		key := r.x.keys.Append(r.made[:0], t.parent, t.tokens, t.extras)
		r.keep(hash, place, key, false)
		// Without one of its parts our block is not whole any more.
		for _, h := range t.hashes[:len(t.hashes)-1] {
			for n := r.table.find(h); n != 0; n = r.table.rec(n).next {
				r.table.rec(n).key = key[0]
			}
		}
		t = preciseTail{parent: key[0]}
	}
}

// add notes an item that reaches into the block, once.
func (t *preciseTail) add(text []byte) {
	for _, e := range t.extras {
		if bytes.Equal(e.Text, text) {
			return
		}
	}
	t.extras = append(t.extras, kvindex.Extra{Text: bytes.Clone(text)})
}

// PreciseStats is what the ranks of one endpoint have told a precise producer, in
// blocks of the engine unless it says otherwise.
type PreciseStats struct {
	Producer string
	Endpoint *Endpoint

	Blocks         int    // held now, in every tier and group that they are in
	Stored         uint64 // stored events' blocks, known or new
	Duplicates     uint64 // of these, blocks that were in the same place already
	Removed        uint64
	Cleared        uint64 // times that a rank was emptied
	Lost           uint64 // times that events were lost for good
	UnknownParents uint64 // left out: the block before them is not known
	UnknownBlocks  uint64 // removed, or stored without tokens, and not known
	OtherKinds     uint64 // left out: a sliding window's or a state space's
	Refused        uint64 // left out: a block size that does not fit, too many tiers, no tokens
	Evicted        uint64 // blocks dropped because the endpoint has its share of the index

	Incomplete string // why what is known is not all; "" when it is
}

// PreciseStats returns what precise producers were told, by producer and endpoint.
func (f *Fleet) PreciseStats() []PreciseStats {
	f.mu.Lock()
	indexes, endpoints := slices.Clone(f.precise), f.view.Load().endpoints
	f.mu.Unlock()
	var out []PreciseStats
	for _, x := range indexes {
		for _, e := range endpoints {
			if s, ok := x.stats(e); ok {
				out = append(out, s)
			}
		}
	}
	return out
}

// stats adds up what the ranks of an endpoint have told.
func (x *preciseIndex) stats(e *Endpoint) (PreciseStats, bool) {
	sum := PreciseStats{Producer: x.producer, Endpoint: e}
	x.mu.Lock()
	m := x.members[e]
	if m == nil {
		x.mu.Unlock()
		return sum, false
	}
	ranks := slices.Clone(m.ranks)
	x.mu.Unlock()
	for _, r := range ranks {
		if r == nil {
			continue
		}
		r.mu.Lock()
		s := &r.stats
		sum.Blocks += r.table.used
		for _, c := range [...]struct{ to, from *uint64 }{
			{&sum.Stored, &s.Stored}, {&sum.Duplicates, &s.Duplicates}, {&sum.Removed, &s.Removed}, {&sum.Cleared, &s.Cleared}, {&sum.Lost, &s.Lost},
			{&sum.UnknownParents, &s.UnknownParents}, {&sum.UnknownBlocks, &s.UnknownBlocks}, {&sum.OtherKinds, &s.OtherKinds},
			{&sum.Refused, &s.Refused}, {&sum.Evicted, &s.Evicted},
		} {
			*c.to += *c.from
		}
		if r.lost != "" {
			sum.Incomplete = r.lost
		}
		r.mu.Unlock()
	}
	return sum, true
}

// size returns the blocks that the ranks hold and the memory in use. The caller may hold Fleet.mu.
func (x *preciseIndex) size() (blocks int, bytes int64) {
	x.mu.Lock()
	var ranks []*preciseRank
	for _, m := range x.members {
		ranks = append(ranks, m.ranks...)
	}
	bytes = x.held.Bytes() + x.guesses.bytes()
	for _, l := range x.lower {
		bytes += l.Bytes()
	}
	x.mu.Unlock()
	for _, r := range ranks {
		if r != nil {
			r.mu.Lock()
			blocks += r.table.used
			bytes += r.bytes()
			r.mu.Unlock()
		}
	}
	return blocks, bytes
}

// bytes returns the memory of the rank. The caller holds r.mu.
func (r *preciseRank) bytes() int64 {
	n := r.table.bytes() + int64(cap(r.ops))*16 + int64(cap(r.keys)+cap(r.made))*8 + int64(cap(r.tokens))
	for _, t := range r.tails {
		n += int64(cap(t.tokens)) + int64(cap(t.hashes))*8 + 64
	}
	n += int64(len(r.shared)) * 48
	return n
}
