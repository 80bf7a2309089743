package kvindex

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cespare/xxhash/v2"
)

// le32 returns tokens as AppendChain takes them.
func le32(tokens ...uint32) []byte {
	var b []byte
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return b
}

func upTo(n uint32) []byte {
	var b []byte
	for t := uint32(1); t <= n; t++ {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return b
}

func TestBlocksAndLinks(t *testing.T) {
	f := func(t *testing.T, blocks, blockBytes int) {
		t.Helper()
		tokens := make([]byte, blocks*blockBytes)
		for i := range tokens {
			tokens[i] = byte(i * i >> 3)
		}
		want := AppendChain(nil, 7, tokens, blockBytes, 0)
		got := AppendLinks(nil, 7, AppendBlocks(nil, tokens, blockBytes))
		if !slices.Equal(got, want) {
			t.Errorf("%d blocks of %d bytes: got %x, want %x", blocks, blockBytes, got, want)
		}
	}
	f(t, 0, 256)
	f(t, 1, 4)
	f(t, 9, 256)
}

func TestSeed(t *testing.T) {
	f := func(t *testing.T, model, salt string, want uint64) {
		t.Helper()
		if got := Seed([]byte(model), []byte(salt)); got != want {
			t.Errorf("Seed(%q, %q): got %d, want %d", model, salt, got, want)
		}
	}
	f(t, "", "", 17241709254077376921)
	f(t, "m", "", 13415755381228090088)
	f(t, "m", "salt", 15642489102335581083)
	f(t, "msalt", "", 15642489102335581083)
	f(t, "test-model", "", 3725054772343846052)
	f(t, "test-", "model", 3725054772343846052)
}

func TestBlockHash(t *testing.T) {
	f := func(t *testing.T, tokens []byte, want uint64) {
		t.Helper()
		if got := xxhash.Sum64(tokens); got != want {
			t.Errorf("block %v: got %d, want %d", tokens, got, want)
		}
	}
	f(t, le32(1, 2), 14789060894577137722)
	f(t, le32(3, 4), 18168013704444311603)
	f(t, le32(9, 10), 18162685891231435795)
	f(t, []byte("hello world\x00"), 6829730999678130178)
}

// The worked values are those of the llm-d router, so that a recorded prompt means the same to both.
func TestAppendChain(t *testing.T) {
	f := func(t *testing.T, name, model, salt string, tokens []byte, blockTokens, maxBlocks int, want ...uint64) {
		t.Helper()
		got := AppendChain(nil, Seed([]byte(model), []byte(salt)), tokens, 4*blockTokens, maxBlocks)
		if !slices.Equal(got, want) {
			t.Errorf("%s: got %d, want %d", name, got, want)
		}
	}
	a := []byte("aaaaaaaa")
	for len(a) < 600 {
		a = append(a, a[:min(len(a), 600-len(a))]...)
	}
	f(t, "A", "m", "", upTo(4), 2, 0, 13684990250598020483, 8839716502830690385)
	f(t, "A'", "m", "salt", upTo(4), 2, 0, 7714218408385768131, 17384806400187647017)
	f(t, "B", "m", "", upTo(10), 4, 0, 18390267952832273189, 15051379317946961216, 7786504833879382867)
	f(t, "C", "test-model", "", []byte("hello world\x00"), 64, 0, 12140827157480816039)
	f(t, "D", "test-model", "", a, 64, 0, 6967039974380692447, 9742904949044203714, 2601360439537577488)
	f(t, "no tokens", "m", "", nil, 4, 0)
	f(t, "no block size", "m", "", upTo(4), 0, 0)
	f(t, "negative block size", "m", "", upTo(4), -1, 0)
	f(t, "at most one", "m", "", upTo(10), 4, 1, 18390267952832273189)
	f(t, "at most three of three", "m", "", upTo(10), 4, 3, 18390267952832273189, 15051379317946961216, 7786504833879382867)
	f(t, "negative limit", "m", "", upTo(4), 2, -1, 13684990250598020483, 8839716502830690385)
}

// chain is AppendChain as its documentation says it.
func chain(seed uint64, tokens []byte, blockBytes, maxBlocks int) []uint64 {
	var out []uint64
	for block := range slices.Chunk(tokens, blockBytes) {
		if maxBlocks > 0 && len(out) == maxBlocks {
			break
		}
		pair := binary.LittleEndian.AppendUint64(nil, xxhash.Sum64(block))
		seed = xxhash.Sum64(binary.LittleEndian.AppendUint64(pair, seed))
		out = append(out, seed)
	}
	return out
}

func checkChain(t *testing.T, seed uint64, tokens []byte, blockBytes, maxBlocks int) {
	t.Helper()
	want := chain(seed, tokens, blockBytes, maxBlocks)
	if got := AppendChain(nil, seed, tokens, blockBytes, maxBlocks); !slices.Equal(got, want) {
		t.Errorf("AppendChain(seed %d, %d bytes in blocks of %d, at most %d): got %d, want %d",
			seed, len(tokens), blockBytes, maxBlocks, got, want)
	}
}

func TestAppendChainAnyShape(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	buf := make([]byte, 2048)
	for i := range buf {
		buf[i] = byte(r.Uint32())
	}
	for range 2000 {
		from := r.IntN(9) // any alignment
		checkChain(t, r.Uint64(), buf[from:from+4*r.IntN(500)], 4*(1+r.IntN(80)), r.IntN(20)-2)
	}
}

func TestAppendChainAppends(t *testing.T) {
	want := append([]uint64{7}, chain(9, upTo(10), 16, 0)...)
	dst := make([]uint64, 1, 8)
	dst[0] = 7
	got := AppendChain(dst, 9, upTo(10), 16, 0)
	if !slices.Equal(got, want) {
		t.Errorf("got %d, want %d", got, want)
	}
	if &got[0] != &dst[0] {
		t.Errorf("room for %d of %d hashes: got another array, want the given one", cap(dst), len(want))
	}
}

func FuzzAppendChain(f *testing.F) {
	f.Add(uint64(0), []byte(nil), uint8(0), uint8(0))
	f.Add(uint64(13415755381228090088), upTo(10), uint8(3), uint8(0))
	f.Add(uint64(1), upTo(65), uint8(63), uint8(1))
	f.Fuzz(func(t *testing.T, seed uint64, tokens []byte, block, limit uint8) {
		checkChain(t, seed, tokens[:len(tokens)&^3], 4+4*int(block), int(limit))
	})
}

func TestHashAllocsNothing(t *testing.T) {
	model, salt, tokens := []byte("a-model"), []byte("a-salt"), upTo(8192)
	dst := make([]uint64, 0, 128)
	got := testing.AllocsPerRun(100, func() {
		dst = AppendChain(dst[:0], Seed(model, salt), tokens, 256, 0)
		dst = AppendChain(dst[:0], Seed(model, nil), tokens, 256, 0)
	})
	if got != 0 || len(dst) != 128 {
		t.Errorf("got %v allocations for %d hashes, want 0 for 128", got, len(dst))
	}
}

func BenchmarkHash128(b *testing.B) {
	model, salt, tokens := []byte("meta-llama/Llama-3.1-8B-Instruct"), []byte(nil), upTo(8192)
	dst := make([]uint64, 0, 128)
	b.SetBytes(int64(len(tokens)))
	for b.Loop() {
		dst = AppendChain(dst[:0], Seed(model, salt), tokens, 256, 0)
	}
}
