package kvindex

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
)

// blocksModel is Blocks beside a map that says the same.
type blocksModel struct {
	t    *testing.T
	b    *Blocks
	want map[uint64]map[int]bool
}

func newBlocksModel(t *testing.T, m mixer) *blocksModel {
	return &blocksModel{t, newBlocks(m), map[uint64]map[int]bool{}}
}

func (m *blocksModel) note(hash uint64, slot int) (fresh bool) {
	fresh = !m.want[hash][slot]
	if m.want[hash] == nil {
		m.want[hash] = map[int]bool{}
	}
	m.want[hash][slot] = true
	return fresh
}

func (m *blocksModel) add(hash uint64, slot int) {
	m.t.Helper()
	want := m.note(hash, slot)
	if got := m.b.Add(hash, slot); got != want {
		m.t.Fatalf("Add(%d, %d): got %v, want %v", hash, slot, got, want)
	}
}

func (m *blocksModel) addAll(hashes []uint64, slot int) {
	m.t.Helper()
	want := []uint64{7}
	for _, hash := range hashes {
		if m.note(hash, slot) {
			want = append(want, hash)
		}
	}
	if got := m.b.AddAll(hashes, slot, []uint64{7}); !slices.Equal(got, want) {
		m.t.Fatalf("AddAll(%d, %d): got %d, want %d", hashes, slot, got, want)
	}
}

func (m *blocksModel) addWhile(hashes []uint64, slot int, of uint64) {
	m.t.Helper()
	want := []uint64{7}
	for _, hash := range slices.Backward(hashes) {
		mask := uint64(0)
		for s := range m.want[hash] {
			if s/64 == slot/64 {
				mask |= 1 << (s % 64)
			}
		}
		if mask&of == 0 {
			break
		}
		if m.note(hash, slot) {
			want = append(want, hash)
		}
	}
	if got := m.b.AddWhile(hashes, slot, of, []uint64{7}); !slices.Equal(got, want) {
		m.t.Fatalf("AddWhile(%d, %d, %x): got %d, want %d", hashes, slot, of, got, want)
	}
}

func (m *blocksModel) remove(hash uint64, slot int) {
	m.t.Helper()
	want := m.want[hash][slot]
	if got := m.b.Remove(hash, slot); got != want {
		m.t.Fatalf("Remove(%d, %d): got %v, want %v", hash, slot, got, want)
	}
	if delete(m.want[hash], slot); len(m.want[hash]) == 0 {
		delete(m.want, hash)
	}
}

func (m *blocksModel) holds(hash uint64, slot int) {
	m.t.Helper()
	if got, want := m.b.Has(hash, slot), m.want[hash][slot]; got != want {
		m.t.Fatalf("Has(%d, %d): got %v, want %v", hash, slot, got, want)
	}
	want := uint64(0)
	for s := range m.want[hash] {
		if s/64 == slot/64 {
			want |= 1 << (s % 64)
		}
	}
	if got := m.b.Mask(hash, slot/64); got != want {
		m.t.Fatalf("Mask(%d, %d): got %x, want %x", hash, slot/64, got, want)
	}
}

// match compares Walk and Tally with the map. Slots are asked about by the bits of ask.
func (m *blocksModel) match(prompt []uint64, slots int, ask uint64) {
	m.t.Helper()
	active, got := make([]uint64, (slots+63)/64), make([]int32, slots)
	want, longest := make([]int32, slots), 0
	for slot := range slots {
		if bits.RotateLeft64(ask, slot*7)&1 == 0 {
			continue
		}
		active[slot/64] |= 1 << (slot % 64)
		n := 0
		for n < len(prompt) && m.want[prompt[n]][slot] {
			n++
		}
		want[slot], longest = int32(n), max(longest, n)
	}
	if l := m.b.Walk(prompt, active, got); l != longest || !slices.Equal(got, want) {
		m.t.Fatalf("Walk(%d): got %d, %d, want %d, %d", prompt, l, got, longest, want)
	}
	upTo := want // whatever it is
	for slot := range upTo {
		upTo[slot] = int32((ask>>1 + uint64(slot)) % uint64(len(prompt)+1))
	}
	counts := make([]int32, slots)
	m.b.Tally(prompt, upTo, counts)
	for slot := range slots {
		n := int32(0)
		for _, hash := range prompt[:upTo[slot]] {
			if m.want[hash][slot] {
				n++
			}
		}
		if counts[slot] != n {
			m.t.Fatalf("Tally: slot %d of %d hashes: got %d, want %d", slot, upTo[slot], counts[slot], n)
		}
	}
}

// check proves the order of the tables and lists and that everything is in one place.
func (m *blocksModel) check() {
	m.t.Helper()
	t, b := m.t, m.b
	held, seen := 0, map[uint32]bool{}
	bytes := int64(cap(b.chunks))*chunkRefBytes + int64(cap(b.vacant))*4
	for k := range b.shards {
		s := &b.shards[k]
		bytes += blockShardBytes + s.bytes()
		used, last := 0, -1
		for i, v := range s.words {
			if v == emptyWord {
				continue
			}
			used++
			e, home := b.entry(uint32(v)), s.home(v>>32)
			key := b.mix.key(e.key)
			if seen[uint32(v)] || e.mask == 0 || word(key, uint32(v)) != v || key>>shardShift != uint64(k) {
				t.Fatalf("shard %d: word %x at %d is of hash %d, held by %x", k, v, i, e.key, e.mask)
			}
			seen[uint32(v)] = true
			if home > i || last >= 0 && s.words[last]>>32 > v>>32 || home < i && last != i-1 {
				t.Fatalf("shard %d: word %x with home %d at %d, the one before at %d: want them sorted, without gaps from home", k, v, home, i, last)
			}
			last = i
			held += bits.OnesCount64(e.mask)
			for n := e.more; n != 0; n = s.nodes[n-1].next {
				for _, mask := range s.nodes[n-1].masks {
					held += bits.OnesCount64(mask)
				}
			}
		}
		if used != s.used {
			t.Fatalf("shard %d: got %d used, want %d", k, s.used, used)
		}
	}
	want := 0
	for hash, slots := range m.want {
		for slot := range slots {
			m.holds(hash, slot)
		}
		want += len(slots)
	}
	if held != want || len(seen) != len(m.want) || b.Distinct() != len(m.want) {
		t.Fatalf("got %d holders of %d hashes, Distinct %d, want %d of %d", held, len(seen), b.Distinct(), want, len(m.want))
	}
	var kinds [groupKinds + 1]int
	waste := 0
	for c := range b.chunks {
		if b.chunks[c].entries == nil {
			if c > 0 && !slices.Contains(b.vacant, uint32(c)) {
				t.Fatalf("chunk %d is not there: got %d vacant, want it among them", c, b.vacant)
			}
			continue
		}
		bytes += chunkBytes
		used := 0
		for g := range chunkGroups {
			group := &b.chunks[c].groups[g]
			n := bits.OnesCount16(group.used)
			for at := range groupPlaces {
				p := uint32(c*chunkPlaces + g*groupPlaces + at)
				if taken := group.used>>at&1 != 0; taken != seen[p] || !taken && *b.entry(p) != (entry{}) {
					t.Fatalf("place %d: got %v for used, want %v; entry %v", p, taken, seen[p], *b.entry(p))
				}
			}
			used += n
			if n > 0 {
				waste += groupPlaces - n
			}
			kinds[kind(group.used)]++
		}
		if used != b.chunks[c].used {
			t.Fatalf("chunk %d: got %d used, want %d", c, b.chunks[c].used, used)
		}
	}
	if waste != b.waste || bytes != b.Bytes() {
		t.Fatalf("got %d places wasted, %d bytes, want %d, %d", b.waste, b.Bytes(), waste, bytes)
	}
	for k := range b.lists {
		n, before := 0, uint32(0)
		for g := b.lists[k].head; g != 0; g = b.group(g).next {
			if kind(b.group(g).used) != k || b.group(g).prev != before {
				t.Fatalf("list %d: group %d of %x behind %d, want kind %d behind %d", k, g, b.group(g).used, b.group(g).prev, k, before)
			}
			before = g
			n++
		}
		if n != kinds[k] || n != b.lists[k].n || b.lists[k].tail != before {
			t.Fatalf("list %d: got %d groups counted as %d, tail %d, want %d, %d", k, n, b.lists[k].n, b.lists[k].tail, kinds[k], before)
		}
	}
}

// TestModelBlocks grows the map as prompts of a tree, lets blocks come and go in
// any order, and empties it again.
func TestModelBlocks(t *testing.T) {
	f := func(t *testing.T, name string, m mixer, prompts, blocks, slots int, hash func(i int) uint64) {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(uint64(blocks), 9))
			x := newBlocksModel(t, m)
			var tree [][]uint64
			next := 0
			for range prompts { // a part of another prompt, and more
				var p []uint64
				if len(tree) > 0 && r.IntN(4) > 0 {
					p = slices.Clone(tree[r.IntN(len(tree))])
					p = p[:r.IntN(len(p)+1)]
				}
				for range 1 + r.IntN(blocks) {
					p = append(p, hash(next))
					next++
				}
				tree = append(tree, p)
			}
			prompt := func() []uint64 { return tree[r.IntN(len(tree))] }
			slot := func() int { return 37 * r.IntN(slots) }
			for range prompts * slots { // as events tell of them
				p, s := prompt(), slot()
				switch r.IntN(3) {
				case 0:
					x.b.Resume(0)
					x.addAll(p, s)
				case 1: // piece by piece, and somebody else in between
					from := r.IntN(len(p))
					for i, h := range p[from:] {
						if i == 0 && from > 0 {
							x.b.Behind(p[from-1])
						}
						last := x.b.Last()
						x.b.Resume(0)
						x.add(hash(r.IntN(next)), slot())
						x.b.Resume(last)
						x.add(h, s)
					}
				default:
					x.add(p[r.IntN(len(p))], s)
				}
			}
			x.check()
			grown := x.b.Bytes()
			for range 4 * prompts * slots {
				p, s := prompt(), slot()
				from := r.IntN(len(p))
				n := r.IntN(min(len(p)-from, 20) + 1)
				switch r.IntN(7) {
				case 0: // the tail goes first
					for _, h := range slices.Backward(p[from : from+n]) {
						x.remove(h, s)
					}
				case 1:
					for _, h := range p[from : from+n] {
						x.remove(h, s)
					}
				case 2:
					x.remove(p[from], s)
				case 3:
					x.addAll(p[from:from+n], s)
				case 4:
					x.add(p[from], s)
				case 5: // a slot of the same page
					x.addWhile(p[from:from+n], s^1, 1<<(s%64)|r.Uint64())
				default:
					x.holds(p[from], s)
				}
				if r.IntN(40) == 0 {
					x.match(p, 37*slots+1-r.IntN(36), r.Uint64()|r.Uint64())
				}
			}
			x.check()
			for _, p := range tree {
				x.match(p, 37*slots+1, ^uint64(0))
			}
			x.match(nil, 37*slots, ^uint64(0))
			r.Shuffle(len(tree), func(i, j int) { tree[i], tree[j] = tree[j], tree[i] })
			for _, p := range tree {
				for _, h := range p {
					for s := range slots {
						x.remove(h, 37*s)
						x.remove(h, 37*s^1)
					}
				}
			}
			x.check()
			if got := x.b.Bytes(); got > grown {
				t.Errorf("Bytes when empty: got %d, want at most %d", got, grown)
			}
		})
	}
	number := func(i int) uint64 { return uint64(i) }
	f(t, "one slot", newMixer(1), 1000, 100, 1, number)
	f(t, "few pages", newMixer(2), 200, 60, 6, number)
	f(t, "many pages", newMixer(3), 4, 20, 600, number)
	f(t, "single blocks", newMixer(4), 6000, 2, 1, number)
	f(t, "one home", identity, 20, 20, 9, number)
	f(t, "last home", identity, 20, 20, 9, func(i int) uint64 { return ^uint64(0) - uint64(i) })
	f(t, "one shard", identity, 100, 40, 9, func(i int) uint64 { return uint64(i) << 40 })
}

// FuzzBlocks does what the bytes say, of 256 hashes of which many look alike to the table.
func FuzzBlocks(f *testing.F) {
	f.Add([]byte{0, 1, 2, 0, 2, 2, 1, 1, 2, 3, 1, 9, 2, 1, 2})
	r := rand.New(rand.NewPCG(1, 2))
	for range 4 {
		seed := make([]byte, 900)
		for i := range seed {
			seed[i] = byte(r.Uint32())
		}
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, ops []byte) {
		x := newBlocksModel(t, identity)
		hash := func(i byte) uint64 { return uint64(i%8)<<54 | uint64(i/8)*uint64(i%3) }
		var row []uint64
		for ; len(ops) >= 3; ops = ops[3:] {
			h, slot := hash(ops[1]), int(ops[2]%16)*40
			row = row[:0]
			for i := range ops[2] % 20 {
				row = append(row, hash(ops[1]+i))
			}
			switch ops[0] % 8 {
			case 0:
				x.add(h, slot)
			case 1:
				x.addWhile(row, slot+1, 1<<(slot%64)|uint64(ops[0]/8))
			case 2:
				x.remove(h, slot)
			case 3:
				x.addAll(row, int(ops[0]%16)*40)
			case 4:
				for _, h := range row {
					x.remove(h, int(ops[0]%16)*40)
				}
			case 5:
				x.b.Behind(h)
			case 6:
				x.b.Resume(uint32(ops[1])<<8 | uint32(ops[2]))
			case 7:
				x.match(row, 642, ^uint64(0)<<(ops[0]/8))
			}
		}
		x.check()
	})
}

// TestBlocksSideBySide: the blocks of a prompt have places in a row, told at once or
// one by one between those of others, and a map that is full of gaps wastes little.
func TestBlocksSideBySide(t *testing.T) {
	b := NewBlocks(1)
	breaks := func(prompt []uint64) (n int) {
		last := uint32(0)
		for _, h := range prompt {
			p, _ := b.find(h)
			if p != last+1 {
				n++
			}
			last = p
		}
		return n
	}
	f := func(what string, prompt []uint64, most int) {
		t.Helper()
		if got := breaks(prompt); got > most {
			t.Errorf("%s: got %d pieces of %d blocks, want at most %d", what, got, len(prompt), most)
		}
	}
	all := prompts(300, 160)
	for _, p := range all[:100] {
		b.Resume(0)
		b.AddAll(p, 1, nil)
	}
	f("told at once", all[50], 2)
	for i := range 160 { // a block of each of 100 conversations in turn
		for _, p := range all[100:200] {
			if i > 0 {
				b.Behind(p[i-1])
			} else {
				b.Resume(0)
			}
			b.Add(p[i], 1)
		}
	}
	f("told one by one", all[150], 160/groupPlaces)
	r := rand.New(rand.NewPCG(1, 1))
	for _, p := range all[:200] { // every other place, at random
		for _, h := range p {
			if r.IntN(2) == 0 {
				b.Remove(h, 1)
			}
		}
	}
	for _, p := range all[200:] {
		b.Resume(0)
		b.AddAll(p, 1, nil)
	}
	if got, most := b.waste, b.Distinct()/8+2*chunkPlaces; got > most {
		t.Errorf("got %d places wasted of %d, want at most %d", got, b.Distinct(), most)
	}
}
