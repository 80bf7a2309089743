package kvindex

import (
	"math/bits"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// The primes of XXH64, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
const (
	prime1 uint64 = 11400714785074694791
	prime2 uint64 = 14029467366897019727
	prime3 uint64 = 1609587929392839161
	prime4 uint64 = 9650029242287828579
	prime5 uint64 = 2870177450012600261
)

// Seed returns the start of a prompt's hash chain: XXH64 (seed 0) of the model's
// name followed by the cache salt, without a separator.
func Seed(model, salt []byte) uint64 {
	if len(salt) == 0 {
		return xxhash.Sum64(model)
	}
	var d xxhash.Digest
	d.Reset()
	_, _ = d.Write(model) // never fails
	_, _ = d.Write(salt)
	return d.Sum64()
}

// AppendChain appends one chained hash per block of a prompt to dst and returns it:
//
//	b_i = XXH64(bytes of block i)
//	h_i = XXH64(LE64(b_i) ‖ LE64(h_{i-1})), h_0 = seed
//
// so that equal hashes mean equal prompts up to and including the block. tokens
// holds the prompt's tokens as little-endian uint32 at any alignment, blockBytes
// is four times the tokens per block. A partial last block is hashed like the
// others. At most maxBlocks hashes are appended; zero or less means no limit.
// A blockBytes of zero or less makes no blocks.
func AppendChain(dst []uint64, seed uint64, tokens []byte, blockBytes, maxBlocks int) []uint64 {
	if blockBytes <= 0 || len(tokens) == 0 {
		return dst
	}
	blocks := (len(tokens)-1)/blockBytes + 1
	if maxBlocks > 0 && blocks > maxBlocks {
		blocks = maxBlocks
	}
	dst = slices.Grow(dst, blocks)
	h := seed
	for range blocks {
		n := min(blockBytes, len(tokens))
		h = link(xxhash.Sum64(tokens[:n]), h)
		dst = append(dst, h)
		tokens = tokens[n:]
	}
	return dst
}

// AppendBlocks appends the b_i of AppendChain to dst and returns it. tokens is a
// whole number of blocks.
func AppendBlocks(dst []uint64, tokens []byte, blockBytes int) []uint64 {
	for ; len(tokens) > 0; tokens = tokens[blockBytes:] {
		dst = append(dst, xxhash.Sum64(tokens[:blockBytes]))
	}
	return dst
}

// AppendLinks appends the h_i of AppendChain to dst, given the b_i, and returns it.
func AppendLinks(dst []uint64, seed uint64, blocks []uint64) []uint64 {
	dst = slices.Grow(dst, len(blocks))
	for _, b := range blocks {
		seed = link(b, seed)
		dst = append(dst, seed)
	}
	return dst
}

// link is XXH64 of the 16 bytes LE64(block) ‖ LE64(parent). Spelled out it needs
// neither a buffer nor a call, and overlaps with the hashing of the next block.
func link(block, parent uint64) uint64 {
	h := prime5 + 16
	h = bits.RotateLeft64(h^lane(block), 27)*prime1 + prime4
	h = bits.RotateLeft64(h^lane(parent), 27)*prime1 + prime4
	h = (h ^ h>>33) * prime2
	h = (h ^ h>>29) * prime3
	return h ^ h>>32
}

func lane(v uint64) uint64 { return bits.RotateLeft64(v*prime2, 31) * prime1 }
