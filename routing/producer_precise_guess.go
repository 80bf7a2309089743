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
	ttl   int64           // nanoseconds, 0 when there are none
	bits  *kvindex.Blocks // key -> column*8 + generation%8
	lists [guessGenerations]guessList
	total int
	owed  int      // guesses made that expireSome has not taken into account yet
	added []uint64 // scratch
}

// guessList is what was guessed in one generation.
type guessList struct {
	generation int64
	items      []guess
	from       int // first of items that is not gone
}

type guess struct {
	key    uint64
	column int32
}

const (
	guessGenerations = 8 // of which 5 live at a time
	guessLives       = 5
	maxGuesses       = 1 << 18
	guessesPerExpire = 128
)

func (g *guesses) generation(now int64) int64 { return now / (g.ttl / (guessLives - 1)) }

func guessSlot(column int, generation int64) int {
	return column*guessGenerations + int(generation%guessGenerations)
}

// any reports whether there are guesses.
func (g *guesses) any() bool { return g.bits.Distinct() > 0 }

// of returns the generations of the guess of key in column, a bit each.
func (g *guesses) of(key uint64, column int) uint64 {
	slot := column * guessGenerations
	return g.bits.Mask(key, slot/64) >> (slot % 64) & (1<<guessGenerations - 1)
}

// drop removes the guess and reports whether there was one.
func (g *guesses) drop(key uint64, column int) bool {
	if !g.any() {
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
	generation := g.generation(now)
	list := &g.lists[generation%guessGenerations]
	if list.generation != generation {
		x.expireList(list, len(list.items)) // those of eight generations before
		list.generation = generation
	}
	// Events tell of a prompt from its begin, so that what is not certain is at the end.
	slot := guessSlot(column, generation)
	if g.any() {
		g.added = g.bits.AddWhile(keys[:n], slot, (1<<guessGenerations-1)<<(guessSlot(column, 0)%64), g.added[:0])
		x.guessed(list, g.added, column)
	}
	first := len(fresh)
	x.held.Resume(0)
	g.bits.Resume(0)
	if n > 0 {
		x.held.Behind(keys[n-1])
	}
	fresh = x.held.AddAll(keys[n:], column, fresh)
	added := fresh[first:]
	if len(added) < len(keys)-n {
		x.renewBehind(list, keys[n:], added, column)
	}
	g.added = g.bits.AddAll(added, slot, g.added[:0])
	x.guessed(list, g.added, column)
	return fresh
}

// renewBehind makes those keys that are guesses already, and so are not among added, ones of the list's generation.
func (x *preciseIndex) renewBehind(list *guessList, keys, added []uint64, column int) {
	for _, key := range keys {
		switch {
		case len(added) > 0 && added[0] == key:
			added = added[1:]
		case x.guesses.any() && x.guesses.of(key, column) != 0:
			x.renew(list, key, column)
		}
	}
}

// renew makes a guess one of the list's generation.
func (x *preciseIndex) renew(list *guessList, key uint64, column int) {
	if x.guesses.bits.Add(key, guessSlot(column, list.generation)) {
		x.guessed(list, []uint64{key}, column)
	}
}

// guessed notes what was guessed.
func (x *preciseIndex) guessed(list *guessList, keys []uint64, column int) {
	n := len(keys)
	for _, key := range keys {
		list.items = append(list.items, guess{key, int32(column)})
	}
	x.columns[column].guesses += n
	x.guesses.total += n
	x.guesses.owed += n
}

// expireSome takes old guesses away, not so many that a decision takes long, but in the
// long run twice as many as are made. The caller holds mu.
func (x *preciseIndex) expireSome(now int64) {
	g := &x.guesses
	part := (g.owed + 7) / 8
	g.owed -= part
	x.expire(now, guessesPerExpire+2*part)
}

// expire takes old guesses away, at most budget of them. The caller holds mu.
func (x *preciseIndex) expire(now int64, budget int) {
	g := &x.guesses
	if g.total == 0 {
		return
	}
	oldest := g.generation(now) - guessLives
	for i := range g.lists {
		if l := &g.lists[i]; l.generation <= oldest {
			budget -= x.expireList(l, budget)
		}
	}
}

// expireList takes up to n guesses of one generation away and returns how many.
func (x *preciseIndex) expireList(l *guessList, n int) int {
	g := &x.guesses
	part := l.items[l.from:]
	part = part[:min(len(part), n)]
	for _, q := range part {
		column := int(q.column)
		if g.bits.Remove(q.key, guessSlot(column, l.generation)) && g.of(q.key, column) == 0 {
			x.held.Remove(q.key, column)
		}
		x.columns[column].guesses--
	}
	g.total -= len(part)
	if l.from += len(part); l.from == len(l.items) {
		l.items, l.from = kept(l.items, maxKeptItems), 0
	}
	return len(part)
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
		n += int64(cap(g.lists[i].items)) * 16
	}
	return n
}
