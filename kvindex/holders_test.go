package kvindex

import (
	"math/bits"
	"math/rand/v2"
	"sync"
	"testing"
)

func countBits(s *shard) (n int) {
	for i := range s.table {
		e := &s.table[i]
		n += bits.OnesCount64(e.mask)
		for more := e.more; more != 0; more = s.nodes[more-1].next {
			for _, m := range s.nodes[more-1].masks {
				n += bits.OnesCount64(m)
			}
		}
	}
	return n
}

func holderBytes(h *Holders) int64 {
	n := shardCount * shardBytes
	for k := range h.shards {
		n += h.shards[k].bytes()
	}
	return n
}

// checkHolders compares h with who holds what and proves the order of every table.
func checkHolders(t *testing.T, h *Holders, want map[uint64]map[int]bool) {
	t.Helper()
	held := 0
	for hash, slots := range want {
		for slot := range slots {
			if !h.Has(hash, slot) {
				t.Fatalf("Has(%d, %d): got false, want true", hash, slot)
			}
		}
		held += len(slots)
	}
	got := 0
	for k := range h.shards {
		s := &h.shards[k]
		got += countBits(s)
		used, last := 0, -1
		for i := range s.table {
			e := &s.table[i]
			if e.mask == 0 {
				continue
			}
			used++
			home := s.home(e.key)
			if e.key>>shardShift != uint64(k) || home > i {
				t.Fatalf("shard %d: key %x with home %d at %d", k, e.key, home, i)
			}
			if last >= 0 && s.table[last].key >= e.key {
				t.Fatalf("shard %d: key %x at %d, %x at %d: want them sorted", k, s.table[last].key, last, e.key, i)
			}
			if home < i && last != i-1 {
				t.Fatalf("shard %d: key %x at %d after a gap, want it at its home %d", k, e.key, i, home)
			}
			last = i
		}
		if used != s.used {
			t.Fatalf("shard %d: got %d used, want %d", k, s.used, used)
		}
	}
	if got != held {
		t.Fatalf("holders: got %d, want %d", got, held)
	}
	if h.Distinct() != len(want) {
		t.Fatalf("Distinct: got %d, want %d", h.Distinct(), len(want))
	}
	if h.Bytes() != holderBytes(h) {
		t.Fatalf("Bytes: got %d, want %d", h.Bytes(), holderBytes(h))
	}
}

// TestModelHolders grows the map, keeps it changing, and empties it again.
func TestModelHolders(t *testing.T) {
	f := func(t *testing.T, name string, m mixer, hashes, slots int, first, step uint64) {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(uint64(hashes), 9))
			h := &Holders{}
			h.init(m)
			want := map[uint64]map[int]bool{}
			universe := make([]uint64, hashes)
			for i := range universe {
				universe[i] = first + uint64(i)*step
			}
			add := func(hash uint64, slot int) {
				fresh := !want[hash][slot]
				if got := h.Add(hash, slot); got != fresh {
					t.Fatalf("Add(%d, %d): got %v, want %v", hash, slot, got, fresh)
				}
				if want[hash] == nil {
					want[hash] = map[int]bool{}
				}
				want[hash][slot] = true
			}
			remove := func(hash uint64, slot int) {
				held := want[hash][slot]
				if got := h.Remove(hash, slot); got != held {
					t.Fatalf("Remove(%d, %d): got %v, want %v", hash, slot, got, held)
				}
				if delete(want[hash], slot); len(want[hash]) == 0 {
					delete(want, hash)
				}
			}
			for range hashes * slots / 2 {
				add(universe[r.IntN(hashes)], 37*r.IntN(slots))
			}
			checkHolders(t, h, want)
			for range hashes * slots / 2 {
				hash, slot := universe[r.IntN(hashes)], 37*r.IntN(slots)
				if r.IntN(2) == 0 {
					add(hash, slot)
				} else {
					remove(hash, slot)
				}
				if got := h.Has(hash, slot); got != want[hash][slot] {
					t.Fatalf("Has(%d, %d): got %v, want %v", hash, slot, got, want[hash][slot])
				}
			}
			checkHolders(t, h, want)
			full := h.Bytes()
			for slot := 0; slot < slots; slot += 2 {
				held := 0
				for _, hash := range universe {
					if want[hash][37*slot] {
						held++
						if delete(want[hash], 37*slot); len(want[hash]) == 0 {
							delete(want, hash)
						}
					}
				}
				if got := h.Clear(37 * slot); got != held {
					t.Fatalf("Clear(%d): got %d, want %d", 37*slot, got, held)
				}
			}
			checkHolders(t, h, want)
			for _, hash := range universe {
				for slot := 1; slot < slots; slot += 2 {
					remove(hash, 37*slot)
				}
			}
			checkHolders(t, h, want)
			if h.Bytes() > full {
				t.Errorf("Bytes when empty: got %d, want at most %d", h.Bytes(), full)
			}
		})
	}
	f(t, "one slot", newMixer(1), 200000, 1, 0, 1)
	f(t, "few pages", newMixer(2), 20000, 6, 0, 1)
	f(t, "many pages", newMixer(3), 100, 600, 0, 1)
	f(t, "one home", identity, 300, 9, 0, 1)
	f(t, "last home", identity, 300, 9, lastHashes, 1)
	f(t, "one shard", identity, 3000, 9, 0, 1<<40)
}

// Hashes chosen to be alike in any part are spread all the same.
func TestAlikeHashesSpread(t *testing.T) {
	f := func(t *testing.T, name string, hash func(i uint64) uint64) {
		t.Helper()
		h := NewHolders(4)
		for i := range uint64(100000) {
			h.Add(hash(i), 0)
		}
		most, far := 0, 0
		for k := range h.shards {
			s := &h.shards[k]
			most = max(most, s.used)
			for i := range s.table {
				if s.table[i].mask != 0 {
					far = max(far, i-s.home(s.table[i].key))
				}
			}
		}
		if most > 200 || far > 40 {
			t.Errorf("%s: got up to %d hashes in a shard and %d places from home, want at most 200 and 40", name, most, far)
		}
	}
	f(t, "low bits", func(i uint64) uint64 { return i })
	f(t, "high bits", func(i uint64) uint64 { return i << 47 })
	f(t, "middle bits", func(i uint64) uint64 { return i << 20 })
	f(t, "equal halves", func(i uint64) uint64 { return i<<32 | i })
	f(t, "stride", func(i uint64) uint64 { return i * 0x10001 })
}

// Readers share a lock; the race detector judges.
func TestWalkTogether(t *testing.T) {
	h := NewHolders(1)
	hashes := prompts(1, 100)[0]
	for slot := range 130 {
		for _, hash := range hashes[:slot%100+1] {
			h.Add(hash, slot)
		}
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 20 {
				active, matched := make([]uint64, 3), make([]int32, 130)
				all(active, 130)
				h.Walk(hashes, active, matched)
				for slot, got := range matched {
					if want := int32(slot%100 + 1); got != want {
						t.Errorf("slot %d: got %d blocks, want %d", slot, got, want)
					}
				}
			}
		})
	}
	wg.Wait()
}
