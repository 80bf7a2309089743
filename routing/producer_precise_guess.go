package routing

import "kvgate/kvindex"

// guesses are keys that a column does not hold yet as far as its engine has told,
// but will soon, because the prompt was just sent there. They are in the holder
// map like what is held. An event makes one of them certain; the others go when
// they are ttl to ttl*5/4 old.
//
// Time runs in generations of a quarter of ttl. A guess that is made again is
// one of the newer generation too, and goes with its last one. Nothing is done
// about time but in expire.
type guesses struct {
	ttl   int64            // nanoseconds, 0 when there are none
	bits  *kvindex.Holders // key -> column*8 + generation%8
	lists [guessGenerations][]guess
	from  [guessGenerations]int // what of a list is still to go
	next  int64                 // first generation that is not all gone
	total int
}

type guess struct {
	key    uint64
	column int32
}

const (
	guessGenerations = 8 // of which 5 live at a time
	guessLives       = 5
	maxGuesses       = 1 << 18
	guessesPerExpire = 256
)

func (g *guesses) generation(now int64) int64 { return now / (g.ttl / (guessLives - 1)) }

func guessSlot(column int, generation int64) int {
	return column*guessGenerations + int(generation%guessGenerations)
}

// of returns the generations of the guess of key in column, a bit each.
func (g *guesses) of(key uint64, column int) uint64 {
	slot := column * guessGenerations
	return g.bits.Mask(key, slot/64) >> (slot % 64) & (1<<guessGenerations - 1)
}

// drop removes the guess and reports whether there was one.
func (g *guesses) drop(key uint64, column int) bool {
	if g.bits.Distinct() == 0 {
		return false
	}
	m := g.of(key, column)
	for i := int64(0); m>>i != 0; i++ {
		if m>>i&1 != 0 {
			g.bits.Remove(key, guessSlot(column, i))
		}
	}
	return m != 0
}

// confirm says that an event has told of key.
func (g *guesses) confirm(key uint64, column int) { g.drop(key, column) }

// guess says that the column will hold the keys, of which the first n are in the
// holder map, and appends those to fresh that were not. The caller holds mu.
func (x *preciseIndex) guess(now int64, column, n int, keys, fresh []uint64) []uint64 {
	g := &x.guesses
	x.expire(now, 0)
	generation := g.generation(now)
	again := g.bits.Distinct() > 0
	if !again {
		keys, n = keys[n:], 0
	}
	for i, key := range keys {
		if g.total >= maxGuesses {
			break
		}
		isNew := i >= n && x.held.Add(key, column)
		if isNew {
			fresh = append(fresh, key)
		} else if !again || g.of(key, column) == 0 {
			continue // certain
		}
		if g.bits.Add(key, guessSlot(column, generation)) {
			list := &g.lists[generation%guessGenerations]
			*list = append(*list, guess{key, int32(column)})
			x.columns[column].guesses++
			g.total++
		}
	}
	return fresh
}

// expire takes old guesses away, at most budget of them unless their list is
// needed for new ones. The caller holds mu.
func (x *preciseIndex) expire(now int64, budget int) {
	g := &x.guesses
	if g.ttl == 0 {
		return
	}
	current := g.generation(now)
	if g.total == 0 {
		g.next = current - guessLives + 1
		return
	}
	if g.next < current-2*guessGenerations {
		g.next = current - 2*guessGenerations // every list is named once among these
	}
	for ; g.next <= current-guessLives; g.next++ {
		i := g.next % guessGenerations
		list := g.lists[i][g.from[i]:]
		must := g.next <= current-guessGenerations
		if !must {
			list = list[:min(len(list), max(budget, 0))]
		}
		for _, q := range list {
			x.expireOne(q, i)
		}
		budget -= len(list)
		if g.from[i] += len(list); g.from[i] < len(g.lists[i]) {
			return
		}
		g.lists[i], g.from[i] = kept(g.lists[i], maxKeptItems), 0
	}
}

func (x *preciseIndex) expireOne(q guess, generation int64) {
	g := &x.guesses
	column := int(q.column)
	if g.bits.Remove(q.key, guessSlot(column, generation)) && g.of(q.key, column) == 0 {
		x.held.Remove(q.key, column)
	}
	g.total--
	x.columns[column].guesses--
}

// unguess takes keys back that guess has reported as new. The caller holds mu.
func (x *preciseIndex) unguess(column int, keys []uint64) {
	for _, key := range keys {
		if x.guesses.drop(key, column) {
			x.held.Remove(key, column)
		}
	}
}

// bytes returns the memory in use.
func (g *guesses) bytes() int64 {
	n := g.bits.Bytes()
	for i := range g.lists {
		n += int64(cap(g.lists[i])) * 16
	}
	return n
}
