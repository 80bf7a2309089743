package routing

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

// bpeModel merges the symbols of a word into tokens: of all neighbours that the file
// can merge, the pair that stands first in the file, the leftmost first, until none
// can be. Symbols are bytes (byteLevel) or characters.
type bpeModel struct {
	byteLevel    bool
	byteFallback bool
	fuseUnk      bool
	ignoreMerges bool
	unk          int32 // -1: what is unknown is left out

	bytes  [256]int32 // token of a byte: alone (byteLevel) or as <0xNN>; -1 for none
	vocab  map[string]uint32
	pairs  pairTable
	longer int // the longest token in bytes

	cut    bool // texts may be cut before a ▁, but for those behind one of joins
	joins  map[rune]bool
	unsafe [utf8.RuneSelf]bool // joins, of ASCII
}

// pairTable is a hash table of pairs of tokens, with open addressing.
type pairTable struct {
	shift   uint
	entries []pairEntry
}

// pairEntry says what a pair becomes: the rank above, the token below.
type pairEntry struct{ key, value uint64 }

const (
	noPair   = ^uint64(0)
	noMerge  = ^uint64(0)
	pairSalt = 0x9e3779b97f4a7c15
)

func newPairTable(n int) pairTable {
	size := bits.Len(uint(max(n, 1)*2 - 1))
	t := pairTable{uint(64 - size), make([]pairEntry, 1<<size)}
	for i := range t.entries {
		t.entries[i].key = noPair
	}
	return t
}

func (t *pairTable) set(a, b uint32, rank, token int) {
	key := uint64(a)<<32 | uint64(b)
	for i := key * pairSalt >> t.shift; ; i = (i + 1) & uint64(len(t.entries)-1) {
		if e := &t.entries[i]; e.key == noPair || e.key == key {
			*e = pairEntry{key, uint64(rank)<<32 | uint64(token)}
			return
		}
	}
}

// get returns rank and token of a pair, noMerge when it stays two.
func (t *pairTable) get(a, b uint32) uint64 {
	key := uint64(a)<<32 | uint64(b)
	for i := key * pairSalt >> t.shift; ; i = (i + 1) & uint64(len(t.entries)-1) {
		switch e := &t.entries[i]; e.key {
		case key:
			return e.value
		case noPair:
			return noMerge
		}
	}
}

// wordEntry remembers the tokens of a short word.
type wordEntry struct {
	size, count uint8
	word        [maxCachedWord]byte
	tokens      [maxCachedTokens]uint32
}

const (
	maxCachedWord   = 22
	maxCachedTokens = 10
	cachedWords     = 1 << 14
)

// bpeWorker is the memory of one tokenization at a time, kept between them.
type bpeWorker struct {
	seed  uint64
	cache *tokenCache // nil: nothing is remembered of pieces
	words []wordEntry
	ids   []uint32
	value []uint64 // of the pair that begins here
	prev  []int32
	next  []int32
	heap  []uint64
	out   []byte // little-endian tokens
	cuts  []textCut

	text     [2][]byte // normalized
	segments [][]segment
	matcher  patternMatcher
}

func newBPEWorker(seed uint64) *bpeWorker {
	return &bpeWorker{seed: seed, words: make([]wordEntry, cachedWords)}
}

// word appends the tokens of one word, which is not empty.
func (m *bpeModel) word(w *bpeWorker, s []byte) {
	if len(s) > maxCachedWord {
		m.merge(w, s)
		w.emit()
		return
	}
	e := &w.words[hashWord(s, w.seed)&(cachedWords-1)]
	if int(e.size) == len(s) && string(e.word[:e.size]) == string(s) {
		for _, id := range e.tokens[:e.count] {
			w.out = binary.LittleEndian.AppendUint32(w.out, id)
		}
		return
	}
	m.merge(w, s)
	w.emit()
	if len(w.ids) <= maxCachedTokens {
		e.size, e.count = uint8(len(s)), uint8(len(w.ids))
		copy(e.word[:], s)
		copy(e.tokens[:], w.ids)
	}
}

// hashWord spreads short words; what it finds is compared.
func hashWord(s []byte, seed uint64) uint64 {
	n := len(s)
	h := seed ^ uint64(n)
	switch {
	case n >= 16:
		h = mix(h^binary.LittleEndian.Uint64(s), binary.LittleEndian.Uint64(s[8:]))
		h = mix(h^binary.LittleEndian.Uint64(s[n-8:]), pairSalt)
	case n >= 8:
		h = mix(h^binary.LittleEndian.Uint64(s), binary.LittleEndian.Uint64(s[n-8:]))
	case n >= 4:
		h ^= uint64(binary.LittleEndian.Uint32(s))<<32 | uint64(binary.LittleEndian.Uint32(s[n-4:]))
	default:
		h ^= uint64(s[0])<<16 | uint64(s[n>>1])<<8 | uint64(s[n-1])
	}
	return mix(h, pairSalt)
}

func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a^0xa0761d6478bd642f, b^0xe7037ed1a0b428db)
	return hi ^ lo
}

func (w *bpeWorker) emit() {
	for _, id := range w.ids {
		w.out = binary.LittleEndian.AppendUint32(w.out, id)
	}
}

// merge puts the tokens of a word into w.ids.
func (m *bpeModel) merge(w *bpeWorker, s []byte) {
	w.ids = w.ids[:0]
	if m.ignoreMerges && len(s) <= m.longer {
		if id, ok := m.vocab[string(s)]; ok {
			w.ids = append(w.ids, id)
			return
		}
	}
	m.symbols(w, s)
	switch n := len(w.ids); {
	case n < 2:
	case n <= 32:
		m.mergeFew(w)
	default:
		m.mergeMany(w)
	}
}

// symbols puts the first tokens of a word into w.ids, one for each symbol.
func (m *bpeModel) symbols(w *bpeWorker, s []byte) {
	unk, pending := m.unk, false
	add := func(id uint32) {
		if pending {
			w.ids = append(w.ids, uint32(unk))
			pending = false
		}
		w.ids = append(w.ids, id)
	}
	for i := 0; i < len(s); {
		n := 1
		id, ok := uint32(0), false
		if m.byteLevel {
			b := m.bytes[s[i]]
			id, ok = uint32(b), b >= 0
		} else {
			_, n = utf8.DecodeRune(s[i:])
			id, ok = m.vocab[string(s[i:i+n])]
		}
		switch {
		case ok:
			add(id)
		case m.byteFallback && m.allBytes(s[i:i+n]):
			// An unknown character that waits to be joined with the next goes behind
			// these bytes: so does the reference.
			for _, b := range s[i : i+n] {
				w.ids = append(w.ids, uint32(m.bytes[b]))
			}
		case unk >= 0:
			if pending && !m.fuseUnk {
				w.ids = append(w.ids, uint32(unk))
			}
			pending = true
		}
		i += n
	}
	if pending {
		w.ids = append(w.ids, uint32(unk))
	}
}

func (m *bpeModel) allBytes(s []byte) bool {
	for _, b := range s {
		if m.bytes[b] < 0 {
			return false
		}
	}
	return true
}

// mergeFew looks for the best pair among all, each time.
func (m *bpeModel) mergeFew(w *bpeWorker) {
	ids := w.ids
	value := slices.Grow(w.value[:0], len(ids))[:len(ids)-1]
	w.value = value
	for i := range value {
		value[i] = m.pairs.get(ids[i], ids[i+1])
	}
	for {
		best, at := noMerge, 0
		for i, v := range value {
			if v < best {
				best, at = v, i
			}
		}
		if best == noMerge {
			break
		}
		ids[at] = uint32(best)
		copy(ids[at+1:], ids[at+2:])
		ids = ids[:len(ids)-1]
		copy(value[at:], value[at+1:])
		value = value[:len(value)-1]
		if at < len(value) {
			value[at] = m.pairs.get(ids[at], ids[at+1])
		}
		if at > 0 {
			value[at-1] = m.pairs.get(ids[at-1], ids[at])
		}
	}
	w.ids = ids
}

// mergeMany keeps the pairs in a heap, the rank above the place.
func (m *bpeModel) mergeMany(w *bpeWorker) {
	ids, n := w.ids, len(w.ids)
	w.value = slices.Grow(w.value[:0], n)[:n]
	w.prev, w.next = slices.Grow(w.prev[:0], n)[:n], slices.Grow(w.next[:0], n)[:n]
	value, prev, next, h := w.value, w.prev, w.next, w.heap[:0]
	for i := range ids {
		prev[i], next[i] = int32(i-1), int32(i+1)
		value[i] = noMerge
		if i+1 < n {
			if value[i] = m.pairs.get(ids[i], ids[i+1]); value[i] != noMerge {
				h = append(h, value[i]>>32<<32|uint64(i))
			}
		}
	}
	for i := len(h)/2 - 1; i >= 0; i-- {
		sift(h, i)
	}
	push := func(i int32) {
		v := noMerge
		if j := next[i]; int(j) < n {
			if v = m.pairs.get(ids[i], ids[j]); v != noMerge {
				h = append(h, v>>32<<32|uint64(i))
				for k := len(h) - 1; k > 0 && h[k] < h[(k-1)/2]; k = (k - 1) / 2 {
					h[k], h[(k-1)/2] = h[(k-1)/2], h[k]
				}
			}
		}
		value[i] = v
	}
	for len(h) > 0 {
		top := h[0]
		h[0] = h[len(h)-1]
		h = h[:len(h)-1]
		sift(h, 0)
		i := int32(uint32(top))
		if value[i] == noMerge || value[i]>>32 != top>>32 {
			continue // that pair is no more
		}
		j := next[i]
		ids[i] = uint32(value[i])
		value[j] = noMerge
		if next[i] = next[j]; int(next[i]) < n {
			prev[next[i]] = i
		}
		push(i)
		if prev[i] >= 0 {
			push(prev[i])
		}
	}
	w.heap = h
	k := 0
	for i := 0; i < n; i = int(next[i]) {
		ids[k] = ids[i]
		k++
	}
	w.ids = ids[:k]
}

func sift(h []uint64, i int) {
	for {
		c := 2*i + 1
		if c >= len(h) {
			return
		}
		if c+1 < len(h) && h[c+1] < h[c] {
			c++
		}
		if h[i] <= h[c] {
			return
		}
		h[i], h[c] = h[c], h[i]
		i = c
	}
}

const spaceMark = "▁" // U+2581, what SentencePiece writes for a blank

// words appends the tokens of a piece. Where no token reaches over the start of
// a blank, what lies before it and what follows are merged apart, which makes words of a text that has none.
func (m *bpeModel) words(w *bpeWorker, s []byte) {
	if !m.cut {
		m.word(w, s)
		return
	}
	start := 0
	for i := 0; i+len(spaceMark) <= len(s); {
		if s[i] != spaceMark[0] || string(s[i:i+len(spaceMark)]) != spaceMark {
			i++
			continue
		}
		if i > start && !m.joined(s[:i]) {
			m.word(w, s[start:i])
			start = i
		}
		i += len(spaceMark)
	}
	if start < len(s) {
		m.word(w, s[start:])
	}
}

// joined reports whether a token may reach from the end of s into a ▁.
func (m *bpeModel) joined(s []byte) bool {
	if c := s[len(s)-1]; c < utf8.RuneSelf {
		return m.unsafe[c]
	}
	r, _ := utf8.DecodeLastRune(s)
	return m.joins[r]
}

// findCuts learns from the merges where a text may be cut.
func (m *bpeModel) findCuts(merges []bpeMerge) {
	m.cut, m.joins = true, map[rune]bool{}
	for _, x := range merges {
		if len(x[1]) >= len(spaceMark) && x[1][:len(spaceMark)] == spaceMark {
			r, _ := utf8.DecodeLastRuneInString(x[0])
			m.joins[r] = true
			if r < utf8.RuneSelf {
				m.unsafe[r] = true
			}
		}
	}
}

func hashText(s []byte, seed uint64) uint64 {
	var d xxhash.Digest
	d.ResetWithSeed(seed)
	_, _ = d.Write(s) // never fails
	return d.Sum64()
}
