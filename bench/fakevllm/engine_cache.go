package fakevllm

// blockCache is a paged KV cache with prefix caching. Blocks nobody refers to
// wait in a list in the order of their eviction; those with a hash can be
// found until they are handed out again. Several blocks may carry one hash
// (sequences that computed the same prompt side by side): the oldest is used.
type blockCache struct {
	ref   []int32  // sequences that hold the block
	hash  []uint64 // valid where named
	twin  []int32  // next block with the same hash, or none
	elder []int32  // the one before; of the first, the last
	named []bool

	next, prev []int32 // eviction order; entry len(ref) is both ends of the list
	free       int     // blocks in the list
	cached     int     // blocks with a hash

	table []int32 // open addressing: first block of a hash, or none
	shift uint

	evicted int64
	onEvict func(hash uint64)
}

const none = int32(-1)

func newBlockCache(blocks int) *blockCache {
	c := &blockCache{
		ref: make([]int32, blocks), hash: make([]uint64, blocks), twin: make([]int32, blocks), elder: make([]int32, blocks), named: make([]bool, blocks),
		next: make([]int32, blocks+1), prev: make([]int32, blocks+1), free: blocks,
	}
	size := 4
	for c.shift = 62; size < 2*blocks; c.shift-- {
		size *= 2
	}
	c.table = make([]int32, size)
	for i := range c.table {
		c.table[i] = none
	}
	for i := range c.next {
		c.next[i], c.prev[i] = int32(i+1), int32(i-1)
	}
	c.next[blocks], c.prev[0] = 0, int32(blocks)
	return c
}

// find returns the slot of the table that holds the hash, or the empty slot
// where it belongs.
func (c *blockCache) find(hash uint64) int {
	i := c.home(hash)
	for b := c.table[i]; b != none && c.hash[b] != hash; b = c.table[i] {
		i = (i + 1) & (len(c.table) - 1)
	}
	return i
}

func (c *blockCache) home(hash uint64) int { return int(hash * 0x9e3779b97f4a7c15 >> c.shift) }

// prefix returns how many of the leading hashes are in the cache.
func (c *blockCache) prefix(hashes []uint64) int {
	for i, h := range hashes {
		if c.table[c.find(h)] == none {
			return i
		}
	}
	return len(hashes)
}

// take appends n blocks for a new sequence to dst: the cached ones for the
// hashes first, then those that are next in the order of eviction. It returns
// false, and takes none, when not enough are free.
func (c *blockCache) take(dst []int32, hashes []uint64, n int) ([]int32, bool) {
	start := len(dst)
	need := n - len(hashes)
	for _, h := range hashes {
		b := c.table[c.find(h)]
		if c.ref[b] == 0 {
			need++
		}
		dst = append(dst, b)
	}
	if need > c.free {
		return dst[:start], false
	}
	for _, b := range dst[start:] {
		if c.ref[b] == 0 {
			c.unlink(b)
		}
		c.ref[b]++
	}
	for len(dst)-start < n {
		b := c.next[len(c.ref)]
		c.unlink(b)
		if c.named[b] {
			if c.onEvict != nil {
				c.onEvict(c.hash[b])
			}
			c.evicted++
			c.forget(b)
		}
		c.ref[b] = 1
		dst = append(dst, b)
	}
	return dst, true
}

// name makes a computed block findable.
func (c *blockCache) name(b int32, hash uint64) {
	i := c.find(hash)
	c.hash[b], c.named[b], c.twin[b], c.elder[b] = hash, true, none, b
	c.cached++
	first := c.table[i]
	if first == none {
		c.table[i] = b
		return
	}
	last := c.elder[first]
	c.twin[last], c.elder[b], c.elder[first] = b, last, b
}

// release gives a sequence's blocks back, its tail to be evicted first.
// Blocks without a hash are of no use to anybody and go before all others.
func (c *blockCache) release(blocks []int32) {
	end := int32(len(c.ref))
	for _, b := range blocks {
		if c.ref[b]--; c.ref[b] == 0 && !c.named[b] {
			c.link(b, end, c.next[end])
		}
	}
	for i := len(blocks) - 1; i >= 0; i-- {
		if b := blocks[i]; c.ref[b] == 0 && c.named[b] {
			c.link(b, c.prev[end], end)
		}
	}
}

// clear forgets every hash. It returns false, and does nothing, while blocks
// are in use.
func (c *blockCache) clear() bool {
	if c.free != len(c.ref) {
		return false
	}
	clear(c.named)
	for i := range c.table {
		c.table[i] = none
	}
	c.cached = 0
	return true
}

func (c *blockCache) link(b, prev, next int32) {
	c.prev[b], c.next[b] = prev, next
	c.next[prev], c.prev[next] = b, b
	c.free++
}

func (c *blockCache) unlink(b int32) {
	c.next[c.prev[b]], c.prev[c.next[b]] = c.next[b], c.prev[b]
	c.free--
}

// forget takes a block's hash away.
func (c *blockCache) forget(b int32) {
	c.named[b] = false
	c.cached--
	i := c.find(c.hash[b])
	first, younger := c.table[i], c.twin[b]
	if first != b {
		c.twin[c.elder[b]] = younger
		if younger == none {
			younger = first
		}
		c.elder[younger] = c.elder[b]
		return
	}
	if c.table[i] = younger; younger != none {
		c.elder[younger] = c.elder[b]
		return
	}
	// Close the gap: an entry moves back unless its home lies behind the gap.
	mask := len(c.table) - 1
	for j := (i + 1) & mask; c.table[j] != none; j = (j + 1) & mask {
		if h := c.home(c.hash[c.table[j]]); (j-h)&mask >= (j-i)&mask {
			c.table[i], c.table[j], i = c.table[j], none, j
		}
	}
}
