package kvindex

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// Keys makes the chained keys of a prompt's full blocks from real token ids, in
// one of two ways. A chain starts with the key of the model's name:
//
//	cbor-fnv  start = FNV1a64(seed)
//	          model = FNV1a64(CBOR([start, null, name]))
//	          key_i = FNV1a64(CBOR([key_{i-1}, [tokens...], extras])), extras null or [{"Hash": text}...]
//	xxh64     start = XXH64(seed)
//	          model = XXH64(LE64(start) ‖ LE64(len(name)) ‖ name)
//	          key_i = XXH64(LE64(key_{i-1}) ‖ LE32 tokens... ‖ for each extra LE64(len(text)) ‖ text)
//
// CBOR is canonical with definite lengths (RFC 8949 section 4.2), FNV-1a that of
// http://www.isthe.com/chongo/tech/comp/fnv. The same keys as llm-d's.
//
// xxh64 takes a quarter of the time (BenchmarkKeys). Keys may be used by many goroutines at once.
type Keys struct {
	fnv         bool
	start       uint64
	blockTokens int
}

// The ways to make keys, as configurations name them.
const (
	CBORFNV = "cbor-fnv"
	XXH64   = "xxh64"
)

const tokenBytes = 4

// NewKeys returns the keys of blocks of blockTokens tokens, made in the way that
// algorithm names; "" is cbor-fnv.
func NewKeys(algorithm, seed string, blockTokens int) (Keys, error) {
	if blockTokens <= 0 || blockTokens > math.MaxInt32/tokenBytes {
		return Keys{}, fmt.Errorf("%d tokens per block", blockTokens)
	}
	switch algorithm {
	case CBORFNV, "":
		h := fnvOffset
		for i := range len(seed) {
			h = h.byte(seed[i])
		}
		return Keys{fnv: true, start: uint64(h), blockTokens: blockTokens}, nil
	case XXH64:
		return Keys{start: xxhash.Sum64String(seed), blockTokens: blockTokens}, nil
	}
	return Keys{}, fmt.Errorf("unknown algorithm %q", algorithm)
}

// BlockTokens returns the tokens per block.
func (k *Keys) BlockTokens() int { return k.blockTokens }

// Extra is what tells a block from another one with the same tokens: the hash of
// a multimodal item that reaches into it, or in a prompt's first block the cache salt.
type Extra struct {
	Block int // number of the block in the chain, from 0
	Text  []byte
}

// Model returns the key that the chains of a model start with.
func (k *Keys) Model(name []byte) uint64 {
	if k.fnv {
		return uint64(fnvOffset.byte(cborArray|3).head(cborUint, k.start).byte(cborNull).text(name))
	}
	var d xxhash.Digest
	d.Reset()
	writeLE64(&d, k.start)
	writeLE64(&d, uint64(len(name)))
	_, _ = d.Write(name) // never fails
	return d.Sum64()
}

// Append appends the key of every full block of tokens to dst and returns it.
// parent is the key before the first one: Model, or the last key of the blocks
// before. tokens are little-endian uint32 at any alignment; a partial last block
// has no key. extras are in block order; those of later blocks are not used.
func (k *Keys) Append(dst []uint64, parent uint64, tokens []byte, extras []Extra) []uint64 {
	size := k.blockTokens * tokenBytes
	blocks := len(tokens) / size
	dst = slices.Grow(dst, blocks)
	for i := range blocks {
		n := 0
		for n < len(extras) && extras[n].Block <= i {
			n++
		}
		block := tokens[i*size : (i+1)*size]
		if k.fnv {
			parent = k.cbor(parent, block, extras[:n])
		} else {
			parent = k.xxh(parent, block, extras[:n])
		}
		dst, extras = append(dst, parent), extras[n:]
	}
	return dst
}

func (k *Keys) cbor(parent uint64, block []byte, extras []Extra) uint64 {
	h := fnvOffset.byte(cborArray|3).head(cborUint, parent).head(cborArray, uint64(k.blockTokens))
	for len(block) >= tokenBytes {
		h = h.head(cborUint, uint64(binary.LittleEndian.Uint32(block)))
		block = block[tokenBytes:]
	}
	if len(extras) == 0 {
		return uint64(h.byte(cborNull))
	}
	h = h.head(cborArray, uint64(len(extras)))
	for _, e := range extras {
		h = h.byte(cborMap | 1).byte(cborText | 4).byte('H').byte('a').byte('s').byte('h').text(e.Text)
	}
	return uint64(h)
}

func (k *Keys) xxh(parent uint64, block []byte, extras []Extra) uint64 {
	var d xxhash.Digest
	d.Reset()
	writeLE64(&d, parent)
	_, _ = d.Write(block) // never fails
	for _, e := range extras {
		writeLE64(&d, uint64(len(e.Text)))
		_, _ = d.Write(e.Text) // never fails
	}
	return d.Sum64()
}

func writeLE64(d *xxhash.Digest, v uint64) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], v)
	_, _ = d.Write(b[:]) // never fails
}

// fnv is an FNV-1a hash of 64 bits in progress. CBOR goes into it byte by byte
// and is written nowhere.
type fnv uint64

const (
	fnvOffset fnv = 14695981039346656037
	fnvPrime  fnv = 1099511628211
)

// Major types of CBOR, RFC 8949 section 3.1, and null.
const (
	cborUint  = 0x00
	cborText  = 0x60
	cborArray = 0x80
	cborMap   = 0xa0
	cborNull  = 0xf6
)

func (h fnv) byte(b byte) fnv { return (h ^ fnv(b)) * fnvPrime }

// head writes the head of an item: its major type and its number, in as few bytes as it takes.
func (h fnv) head(major byte, n uint64) fnv {
	switch {
	case n < 24:
		return h.byte(major | byte(n))
	case n <= math.MaxUint8:
		return h.byte(major | 24).byte(byte(n))
	case n <= math.MaxUint16:
		return h.byte(major | 25).byte(byte(n >> 8)).byte(byte(n))
	case n <= math.MaxUint32:
		return h.byte(major | 26).byte(byte(n >> 24)).byte(byte(n >> 16)).byte(byte(n >> 8)).byte(byte(n))
	}
	h = h.byte(major | 27)
	for shift := 56; shift >= 0; shift -= 8 {
		h = h.byte(byte(n >> shift))
	}
	return h
}

// text writes a string.
func (h fnv) text(s []byte) fnv {
	h = h.head(cborText, uint64(len(s)))
	for _, b := range s {
		h = h.byte(b)
	}
	return h
}
