package routing

import (
	"cmp"
	"math"
	"slices"
	"sort"
)

// burstRules say how the requests of one window are placed.
type burstRules struct {
	perReplica int  // equal requests on one replica, while others have room; -1: no cap
	colocate   int  // leading blocks that different requests must share to be placed together; 0: never
	byTokens   bool // replicas are balanced by the blocks that they compute, not by requests
}

// burstUnit is what is placed as one: equal requests, or a single one that shares its head.
type burstUnit struct {
	blocks  []uint64
	members []int // requests, ascending
}

// place assigns the requests of a window to replicas jointly and returns the
// replica of each, -1 for one that has nothing to gain. It depends on nothing but its arguments.
//
// requests[i] names the blocks of a prompt: two are equal at a place when everything
// up to there is. running is the load of each replica before the window, in requests;
// of equally loaded replicas the first is taken.
//
// Units go to replicas one after the other, the longest first, groups of equal
// requests before single ones. With colocate, a unit goes where most of it has been
// placed already, as long as that replica has not had its fair share. Else it goes to
// the replica with the least load of this window. A unit of more than perReplica
// requests takes several replicas, and wraps around when all are full.
func (p burstRules) place(requests [][]uint64, running []float64) []int {
	placed := slices.Repeat([]int{-1}, len(requests))
	n := len(running)
	if n == 0 {
		return placed
	}
	units := p.units(requests)
	total := 0
	for _, u := range units {
		if p.byTokens {
			total += len(u.blocks)
		} else {
			total += len(u.members)
		}
	}
	share := (total + n - 1) / n
	most := p.perReplica
	if most < 0 {
		most = math.MaxInt
	}
	load := make([]int, n)  // of this window: requests, or blocks
	count := make([]int, n) // requests of the unit
	match := make([]int, n) // leading blocks of the unit placed before
	held := make([][][]uint64, n)
	less := func(a, b int) int { return cmp.Or(cmp.Compare(load[a], load[b]), cmp.Compare(running[a], running[b])) }
	// least returns the replica that suits and comes first, -1 when none suits.
	least := func(order func(a, b int) int, suits func(r int) bool) int {
		best := -1
		for r := range n {
			if suits(r) && (best < 0 || order(r, best) < 0) {
				best = r
			}
		}
		return best
	}
	for _, u := range units {
		clear(count)
		for r := range match {
			match[r] = 0
			if p.colocate > 0 || p.byTokens {
				for _, other := range held[r] {
					match[r] = max(match[r], common(u.blocks, other))
				}
			}
		}
		room := func(r int) bool { return count[r] < most }
		for done := 0; done < len(u.members); {
			r := -1
			if done == 0 && p.colocate > 0 {
				r = least(func(a, b int) int { return cmp.Or(cmp.Compare(match[b], match[a]), less(a, b)) },
					func(r int) bool { return room(r) && load[r] < share && match[r] >= p.colocate })
			}
			if r < 0 {
				r = least(less, room)
			}
			if r < 0 {
				r = least(less, func(int) bool { return true })
			}
			run := min(len(u.members)-done, max(most-count[r], 1))
			switch {
			case !p.byTokens:
				load[r] += run
			case count[r] == 0:
				load[r] += len(u.blocks) - match[r]
			}
			for _, i := range u.members[done : done+run] {
				placed[i] = r
			}
			count[r] += run
			done += run
		}
		for r, c := range count {
			if c > 0 {
				held[r] = append(held[r], u.blocks)
			}
		}
	}
	return placed
}

// units returns what is to be placed, in that order.
func (p burstRules) units(requests [][]uint64) []burstUnit {
	var order []int
	for i, blocks := range requests {
		if len(blocks) > 0 {
			order = append(order, i)
		}
	}
	last := func(i int) uint64 { return requests[i][len(requests[i])-1] }
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(len(requests[a]), len(requests[b])), cmp.Compare(last(a), last(b)))
	})
	var heads []uint64 // of all requests that are long enough
	if p.colocate > 0 {
		for _, i := range order {
			if len(requests[i]) >= p.colocate {
				heads = append(heads, requests[i][p.colocate-1])
			}
		}
		slices.Sort(heads)
	}
	shared := func(i int) bool {
		if p.colocate <= 0 || len(requests[i]) < p.colocate {
			return false
		}
		k, _ := slices.BinarySearch(heads, requests[i][p.colocate-1])
		return k+1 < len(heads) && heads[k] == heads[k+1]
	}
	var groups, singles []burstUnit
	for from := 0; from < len(order); {
		to := from + 1
		for to < len(order) && len(requests[order[to]]) == len(requests[order[from]]) && last(order[to]) == last(order[from]) {
			to++
		}
		u := burstUnit{requests[order[from]], order[from:to:to]}
		switch {
		case to-from > 1:
			groups = append(groups, u)
		case shared(order[from]):
			singles = append(singles, u)
		}
		from = to
	}
	longest := func(a, b burstUnit) int {
		return cmp.Or(cmp.Compare(len(b.blocks), len(a.blocks)), cmp.Compare(a.members[0], b.members[0]))
	}
	slices.SortFunc(groups, longest)
	slices.SortFunc(singles, longest)
	return append(groups, singles...)
}

// common returns how many leading blocks two prompts share.
func common(a, b []uint64) int {
	return sort.Search(min(len(a), len(b)), func(i int) bool { return a[i] != b[i] })
}

// burstBlocks returns the names of a request's blocks: the chained hashes of its
// prompts, those of later prompts bound to what stands before them. The result may
// be an alias of ch.
func burstBlocks(ch *chain) []uint64 {
	if len(ch.ends) < 2 {
		return ch.hashes
	}
	out := slices.Clone(ch.hashes)
	start := ch.ends[0]
	for _, end := range ch.ends[1:] {
		if start > 0 {
			before := out[start-1] * indexPlacementKey
			for i := start; i < end; i++ {
				out[i] ^= before
			}
		}
		start = end
	}
	return out
}
