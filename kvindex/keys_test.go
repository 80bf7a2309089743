package kvindex

import (
	"bytes"
	"encoding/binary"
	stdfnv "hash/fnv"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cespare/xxhash/v2"
)

func tokenBytesOf(tokens ...uint32) (out []byte) {
	for _, t := range tokens {
		out = binary.LittleEndian.AppendUint32(out, t)
	}
	return out
}

func newKeys(t testing.TB, algorithm, seed string, block int) Keys {
	t.Helper()
	k, err := NewKeys(algorithm, seed, block)
	if err != nil {
		t.Fatalf("NewKeys(%q, %q, %d): %v", algorithm, seed, block, err)
	}
	return k
}

// TestKeysWorked: tokens 1 to 9 in blocks of 4 under the model m, with and
// without the salt "salt".
func TestKeysWorked(t *testing.T) {
	tokens := tokenBytesOf(1, 2, 3, 4, 5, 6, 7, 8, 9)
	f := func(t *testing.T, algorithm, seed, salt string, wantModel uint64, want ...uint64) {
		t.Helper()
		k := newKeys(t, algorithm, seed, 4)
		model := k.Model([]byte("m"))
		if model != wantModel {
			t.Errorf("%s seed %q: model: got %d, want %d", algorithm, seed, model, wantModel)
		}
		var extras []Extra
		if salt != "" {
			extras = []Extra{{0, []byte(salt)}}
		}
		if got := k.Append(nil, model, tokens, extras); !slices.Equal(got, want) {
			t.Errorf("%s seed %q salt %q: got %d, want %d", algorithm, seed, salt, got, want)
		}
	}
	f(t, CBORFNV, "", "", 11374735546233341228, 14686617092727577033, 9856792211163113858)
	f(t, "", "", "", 11374735546233341228, 14686617092727577033, 9856792211163113858)
	f(t, CBORFNV, "", "salt", 11374735546233341228, 10186460440412050603, 8282717915344470216)
	f(t, CBORFNV, "42", "", 13673417957312747559, 532455181840886691, 8312739180506385493)
	f(t, CBORFNV, "42", "salt", 13673417957312747559, 6366117847912328901, 2891526329376744735)
	f(t, XXH64, "", "", 14487164469406636363, 6079057133344773006, 10407153327552680244)
	f(t, XXH64, "", "salt", 14487164469406636363, 10801125114328922064, 14816988621191197844)
}

// TestKeysCBOR: what is hashed, byte for byte.
func TestKeysCBOR(t *testing.T) {
	f := func(t *testing.T, got uint64, hex ...byte) {
		t.Helper()
		h := stdfnv.New64a()
		_, _ = h.Write(hex)
		if want := h.Sum64(); got != want {
			t.Errorf("% x: got %d, want %d", hex, got, want)
		}
	}
	k := newKeys(t, CBORFNV, "", 4)
	model := k.Model([]byte("m"))
	f(t, model, 0x83, 0x1b, 0xcb, 0xf2, 0x9c, 0xe4, 0x84, 0x22, 0x23, 0x25, 0xf6, 0x61, 'm')
	tokens := tokenBytesOf(1, 2, 3, 4)
	f(t, k.Append(nil, model, tokens, nil)[0], 0x83, 0x1b, 0x9d, 0xdb, 0x2d, 0xb6, 0x9f, 0x3f, 0x45, 0x2c, 0x84, 1, 2, 3, 4, 0xf6)
	f(t, k.Append(nil, model, tokens, []Extra{{0, []byte("salt")}})[0],
		0x83, 0x1b, 0x9d, 0xdb, 0x2d, 0xb6, 0x9f, 0x3f, 0x45, 0x2c, 0x84, 1, 2, 3, 4, 0x81, 0xa1, 0x64, 'H', 'a', 's', 'h', 0x64, 's', 'a', 'l', 't')
	// The parent, too, is as short as it can be.
	f(t, k.Append(nil, 23, tokenBytesOf(24, 255, 65535, 65536), nil)[0],
		0x83, 23, 0x84, 0x18, 24, 0x18, 255, 0x19, 255, 255, 0x1a, 0, 1, 0, 0, 0xf6)
}

func TestKeysErrors(t *testing.T) {
	f := func(t *testing.T, algorithm string, block int, want string) {
		t.Helper()
		_, err := NewKeys(algorithm, "", block)
		if err == nil || err.Error() != want {
			t.Errorf("NewKeys(%q, %d): got %v, want %s", algorithm, block, err, want)
		}
	}
	f(t, "xxhash", 16, `unknown algorithm "xxhash"`)
	f(t, "sha256", 16, `unknown algorithm "sha256"`)
	f(t, CBORFNV, 0, "0 tokens per block")
	f(t, XXH64, -1, "-1 tokens per block")
	f(t, XXH64, 1<<30, "1073741824 tokens per block")
}

// slowKeys says what Append does as plainly as possible: all bytes, then one hash.
func slowKeys(algorithm, seed string, block int, model []byte, tokens []uint32, extras []Extra) (out []uint64) {
	text := func(b []byte, s []byte) []byte { return append(cborHead(b, 3, uint64(len(s))), s...) }
	hash := func(b []byte) uint64 {
		if algorithm == XXH64 {
			return xxhash.Sum64(b)
		}
		h := stdfnv.New64a()
		_, _ = h.Write(b)
		return h.Sum64()
	}
	key := hash([]byte(seed))
	if algorithm == XXH64 {
		b := binary.LittleEndian.AppendUint64(nil, key)
		b = binary.LittleEndian.AppendUint64(b, uint64(len(model)))
		key = hash(append(b, model...))
	} else {
		key = hash(text(append(cborHead(cborHead(nil, 4, 3), 0, key), 0xf6), model))
	}
	for i := 0; (i+1)*block <= len(tokens); i++ {
		var b []byte
		var mine []Extra
		for _, e := range extras {
			if e.Block == i {
				mine = append(mine, e)
			}
		}
		if algorithm == XXH64 {
			b = binary.LittleEndian.AppendUint64(b, key)
			for _, t := range tokens[i*block : (i+1)*block] {
				b = binary.LittleEndian.AppendUint32(b, t)
			}
			for _, e := range mine {
				b = append(binary.LittleEndian.AppendUint64(b, uint64(len(e.Text))), e.Text...)
			}
		} else {
			b = cborHead(cborHead(cborHead(b, 4, 3), 0, key), 4, uint64(block))
			for _, t := range tokens[i*block : (i+1)*block] {
				b = cborHead(b, 0, uint64(t))
			}
			if len(mine) == 0 {
				b = append(b, 0xf6)
			} else {
				b = cborHead(b, 4, uint64(len(mine)))
				for _, e := range mine {
					b = text(text(cborHead(b, 5, 1), []byte("Hash")), e.Text)
				}
			}
		}
		key = hash(b)
		out = append(out, key)
	}
	return out
}

// cborHead appends the head of an item: the shortest of the five forms.
func cborHead(b []byte, major byte, n uint64) []byte {
	size := 0
	for form := byte(24); form <= 27; form++ {
		if size = 1 << (form - 24); size == 8 || n < 1<<(8*size) {
			if n < 24 {
				return append(b, major<<5|byte(n))
			}
			b = append(b, major<<5|form)
			break
		}
	}
	var all [8]byte
	binary.BigEndian.PutUint64(all[:], n)
	return append(b, all[8-size:]...)
}

// FuzzKeys holds Append against slowKeys.
func FuzzKeys(f *testing.F) {
	f.Add("", []byte("m"), uint8(4), []byte{1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0}, []byte("salt"))
	f.Add("42", []byte{}, uint8(1), bytes.Repeat([]byte{255, 7}, 40), []byte{})
	f.Add("s", bytes.Repeat([]byte("n"), 300), uint8(3), bytes.Repeat([]byte{0, 1, 0, 0}, 30), bytes.Repeat([]byte("x"), 70000))
	f.Fuzz(func(t *testing.T, seed string, model []byte, block uint8, data, extra []byte) {
		var tokens []uint32
		for d := data; len(d) >= tokenBytes; d = d[tokenBytes:] {
			tokens = append(tokens, binary.LittleEndian.Uint32(d))
		}
		size := 1 + int(block)%40
		var extras []Extra
		for i := 0; len(extra) > 0 && i < 4; i++ {
			extras = append(extras, Extra{Block: i / 2, Text: extra[:len(extra)/(i+1)]})
		}
		for _, algorithm := range []string{CBORFNV, XXH64} {
			k := newKeys(t, algorithm, seed, size)
			got := k.Append([]uint64{7}, k.Model(model), data, extras)
			if want := append([]uint64{7}, slowKeys(algorithm, seed, size, model, tokens, extras)...); !slices.Equal(got, want) {
				t.Fatalf("%s seed %q model %q block %d tokens %v: got %d, want %d", algorithm, seed, model, size, tokens, got, want)
			}
			// The same in two steps, split at a block's end.
			blocks := len(tokens) / size
			if blocks < 2 {
				continue
			}
			head := k.Append(nil, k.Model(model), data[:size*tokenBytes], extras)
			var rest []Extra
			for _, e := range extras {
				if e.Block > 0 {
					rest = append(rest, Extra{e.Block - 1, e.Text})
				}
			}
			if two := k.Append(head, head[0], data[size*tokenBytes:], rest); !slices.Equal(two, got[1:]) {
				t.Fatalf("%s in two steps: got %d, want %d", algorithm, two, got[1:])
			}
		}
	})
}

func TestKeysAllocate(t *testing.T) {
	data := make([]byte, 512*tokenBytes)
	for i := range data {
		data[i] = byte(rand.New(rand.NewPCG(1, uint64(i))).Uint32())
	}
	extras := []Extra{{0, []byte("salt")}, {3, []byte("image")}}
	f := func(t *testing.T, algorithm string) {
		t.Helper()
		k := newKeys(t, algorithm, "", 16)
		dst := make([]uint64, 0, 64)
		if got := testing.AllocsPerRun(100, func() { dst = k.Append(dst[:0], k.Model([]byte("model")), data, extras) }); got != 0 {
			t.Errorf("%s: got %v allocations per prompt, want 0", algorithm, got)
		}
	}
	f(t, CBORFNV)
	f(t, XXH64)
}

func BenchmarkKeys(b *testing.B) {
	tokens := make([]byte, 0, 8192*tokenBytes)
	r := rand.New(rand.NewPCG(1, 2))
	for range 8192 {
		tokens = binary.LittleEndian.AppendUint32(tokens, r.Uint32N(128256))
	}
	f := func(algorithm string) {
		b.Run(algorithm, func(b *testing.B) {
			k := newKeys(b, algorithm, "", 16)
			model := k.Model([]byte("model"))
			dst := make([]uint64, 0, 512)
			b.ReportAllocs()
			for b.Loop() {
				dst = k.Append(dst[:0], model, tokens, nil)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/512, "ns/block")
		})
	}
	f(CBORFNV)
	f(XXH64)
}
