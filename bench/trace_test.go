package bench

import (
	"bytes"
	"compress/gzip"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const threeLines = `{"timestamp": 2000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 7, 9], "session": "x"}

{"timestamp": 1000.5, "input_length": 512, "output_length": 0, "hash_ids": [0]}
{"timestamp": 2000, "input_length": 5, "output_length": 1, "hash_ids": []}
`

const twoRows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,600,10\n2023-11-16 18:17:04.9799600,64,1\n"

func gzipped(t *testing.T, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestParseTrace(t *testing.T) {
	f := func(t *testing.T, data []byte, want []TraceRequest) {
		got, err := ParseTrace("file", data, 512)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got.Requests, want) {
			t.Errorf("got %+v, want %+v", got.Requests, want)
		}
		if got.Name != "file" || len(got.Digest) != 64 || got.BlockTokens != 512 {
			t.Errorf("got name %s, digest %s, blocks of %d, want file, a SHA-256, 512", got.Name, got.Digest, got.BlockTokens)
		}
	}
	// In the order of arrival, from 0 on; equal times keep their order.
	lines := []TraceRequest{
		{At: 0, Input: 512, Blocks: []uint64{0}},
		{At: 999_500 * time.Microsecond, Input: 1100, Output: 52, Blocks: []uint64{0, 7, 9}},
		{At: 999_500 * time.Microsecond, Input: 5, Output: 1, Blocks: []uint64{}},
	}
	const own = 1 << 63
	rows := []TraceRequest{
		{At: 0, Input: 600, Output: 10, Blocks: []uint64{2<<20 | own, 2<<20 | 1 | own}},
		{At: time.Second, Input: 64, Output: 1, Blocks: []uint64{3<<20 | own}},
	}
	t.Run("lines", func(t *testing.T) { f(t, []byte(threeLines), lines) })
	t.Run("lines compressed", func(t *testing.T) { f(t, gzipped(t, threeLines), lines) })
	t.Run("rows", func(t *testing.T) { f(t, []byte(twoRows), rows) })
	t.Run("rows compressed", func(t *testing.T) { f(t, gzipped(t, twoRows), rows) })
}

func TestParseTraceRefuses(t *testing.T) {
	f := func(t *testing.T, data string, blockTokens int, want string) {
		_, err := ParseTrace("file", []byte(data), blockTokens)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	row := "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,600,10\n"
	t.Run("nothing", func(t *testing.T) { f(t, "", 512, "file: empty trace") })
	t.Run("no request", func(t *testing.T) { f(t, "TIMESTAMP,ContextTokens,GeneratedTokens\n", 512, "file: empty trace") })
	t.Run("broken gzip", func(t *testing.T) { f(t, "\x1f\x8b\x00", 512, "file: ") })
	t.Run("cut gzip", func(t *testing.T) { f(t, string(gzipped(t, threeLines)[:40]), 512, "file: ") })
	t.Run("other text", func(t *testing.T) { f(t, "hello\n", 512, "neither JSON Lines nor a CSV") })
	t.Run("not JSON", func(t *testing.T) { f(t, threeLines+"{\n", 512, "file:5: ") })
	t.Run("wrong type", func(t *testing.T) { f(t, `{"timestamp": 1, "input_length": "x"}`, 512, "file:1: ") })
	t.Run("negative id", func(t *testing.T) { f(t, `{"input_length": 5, "hash_ids": [-1]}`, 512, "file:1: ") })
	t.Run("no input", func(t *testing.T) { f(t, `{"timestamp": 1}`, 512, "file:1: input 0 and output 0 tokens") })
	t.Run("negative output", func(t *testing.T) {
		f(t, `{"input_length": 1, "output_length": -1}`, 512, "file:1: input 1 and output -1")
	})
	t.Run("negative time", func(t *testing.T) { f(t, `{"timestamp": -1, "input_length": 1}`, 512, "at -1ms") })
	t.Run("too many ids", func(t *testing.T) {
		f(t, `{"input_length": 512, "hash_ids": [1, 2]}`, 512, "file:1: 2 hash ids for 512 tokens in blocks of 512")
	})
	t.Run("row without a number", func(t *testing.T) { f(t, row+"2023-11-16 18:17:03,x,1\n", 512, "file:3: ") })
	t.Run("row without output", func(t *testing.T) { f(t, row+"2023-11-16 18:17:03,1,\n", 512, "file:3: ") })
	t.Run("row without time", func(t *testing.T) { f(t, row+"yesterday,1,1\n", 512, "file:3: ") })
	t.Run("row of other length", func(t *testing.T) { f(t, row+"1,1\n", 512, "line 3") })
	t.Run("row before the first", func(t *testing.T) { f(t, row+"2023-11-16 18:17:02,1,1\n", 512, "file:3: ") })
	t.Run("quote in the head", func(t *testing.T) { f(t, "\"TIMESTAMP\n", 512, "file: ") })
	t.Run("block size 48", func(t *testing.T) { f(t, threeLines, 48, "block tokens 48: use a multiple or a divisor of 64") })
	t.Run("block size 0", func(t *testing.T) { f(t, threeLines, 0, "block tokens 0") })
	t.Run("line too long", func(t *testing.T) { f(t, "{"+strings.Repeat(" ", 17<<20), 512, "file: ") })
}

func TestLoadTrace(t *testing.T) {
	f := func(t *testing.T, name string, wantRequests int, wantInput float64) {
		got, err := LoadTrace(name, 512)
		if err != nil {
			t.Fatal(err)
		}
		sum := 0.0
		for _, r := range got.Requests {
			sum += float64(r.Input)
		}
		if mean := sum / float64(len(got.Requests)); len(got.Requests) != wantRequests || mean < wantInput-1 || mean > wantInput+1 {
			t.Errorf("got %d requests of %.0f tokens, want %d of %.0f", len(got.Requests), mean, wantRequests, wantInput)
		}
	}
	t.Run("conversation", func(t *testing.T) { f(t, "conversation", 12031, 12035) })
	t.Run("synthetic", func(t *testing.T) { f(t, "synthetic", 3993, 15325) })
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(file, []byte(threeLines), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Run("file", func(t *testing.T) { f(t, file, 3, 539) })
	if _, err := LoadTrace(file+".gone", 512); err == nil {
		t.Error("a file that is not there: got no error, want one")
	}
}

func TestShape(t *testing.T) {
	base := &Trace{Name: "x", Digest: "d", BlockTokens: 512, Requests: []TraceRequest{
		{At: 0, Input: 1024, Output: 1, Blocks: []uint64{0, 5}},
		{At: 2 * time.Second, Input: 1024, Output: 2, Blocks: []uint64{0, 6}},
		{At: 4*time.Second - 1, Input: 1024, Output: 3, Blocks: []uint64{0, 5}},
	}}
	before := slices.Clone(base.Requests)
	got := base.Shape(0, 2, 2, 1).Requests
	if !reflect.DeepEqual(base.Requests, before) {
		t.Errorf("the trace itself is now %+v, want it as it was", base.Requests)
	}
	// 4 s long; the second copy starts 2 s later and wraps around; all twice as fast.
	want := []struct {
		at     time.Duration
		output int
		copied bool
	}{
		{0, 1, false}, {0, 2, true}, {time.Second - 1, 3, true}, {time.Second, 2, false}, {time.Second, 1, true}, {2*time.Second - 1, 3, false},
	}
	if len(got) != len(want) {
		t.Fatalf("got %d requests, want %d", len(got), len(want))
	}
	names := map[uint64]uint64{} // a copied block's new id
	for i, w := range want {
		r := got[i]
		if r.At != w.at || r.Output != w.output || r.Blocks[0] != 0 {
			t.Errorf("request %d: got %v with output %d and first block %d, want %v, %d, 0", i, r.At, r.Output, r.Blocks[0], w.at, w.output)
		}
		id := uint64(5)
		if w.output == 2 {
			id = 6
		}
		if w.copied && names[id] == 0 {
			names[id] = r.Blocks[1]
		}
		if wantID := map[bool]uint64{false: id, true: names[id]}[w.copied]; r.Blocks[1] != wantID {
			t.Errorf("request %d: got block %d, want %d", i, r.Blocks[1], wantID)
		}
	}
	if names[5] == names[6] || names[5] == 5 || names[6] == 6 {
		t.Errorf("got the copied ids %v, want new ones", names)
	}

	spread := base.Shape(3*time.Second, 1, 1, 1).Requests
	again := base.Shape(3*time.Second, 1, 1, 1).Requests
	other := base.Shape(3*time.Second, 1, 1, 2).Requests
	if !reflect.DeepEqual(spread, again) || reflect.DeepEqual(spread, other) {
		t.Errorf("got %v, %v and, with another seed, %v; want the first two equal", spread, again, other)
	}
	for _, r := range spread {
		at := base.Requests[r.Output-1].At
		if r.At < at || r.At >= at+3*time.Second {
			t.Errorf("request %d: got %v, want it from %v on within 3 s", r.Output, r.At, at)
		}
	}
}

// naiveBound is CacheBound by the book: a list, the newest first.
func naiveBound(t *Trace, capacity, from int) float64 {
	var cache []uint64
	hit, all := 0, 0
	for i, r := range t.Requests {
		n := 0
		for n < min(len(r.Blocks), (r.Input-1)/t.BlockTokens) && slices.Contains(cache, r.Blocks[n]) {
			n++
		}
		names := t.blockNames(nil, i)
		slices.Reverse(names)
		for _, id := range names {
			cache = slices.DeleteFunc(cache, func(x uint64) bool { return x == id })
			cache = slices.Insert(cache, 0, id)
			if capacity > 0 && len(cache) > capacity {
				cache = cache[:capacity]
			}
		}
		if i >= from {
			hit += n * t.BlockTokens
			all += r.Input
		}
	}
	return float64(hit) / float64(all)
}

func TestCacheBound(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	trace := &Trace{BlockTokens: 64}
	for i := range 300 {
		var blocks []uint64
		for b := range 1 + rnd.IntN(6) {
			blocks = append(blocks, uint64(b)<<8|uint64(rnd.IntN(4)))
		}
		trace.Requests = append(trace.Requests, TraceRequest{At: time.Duration(i), Input: len(blocks)*64 - rnd.IntN(64), Output: rnd.IntN(200), Blocks: blocks})
	}
	for _, capacity := range []int{0, 1, 3, 10, 40} {
		sum := 0
		got := trace.CacheBound(capacity, 50, func(i, tokens int) {
			if i >= 50 {
				sum += tokens
			}
		})
		if want := naiveBound(trace, capacity, 50); got != want || want <= 0 && capacity != 1 {
			t.Errorf("capacity %d: got %v, want %v", capacity, got, want)
		}
		if (sum > 0) != (got > 0) {
			t.Errorf("capacity %d: told %d cached tokens for a hit of %v", capacity, sum, got)
		}
	}
	if got := trace.CacheBound(0, 300, nil); got != 0 {
		t.Errorf("no request measured: got %v, want 0", got)
	}
}

func TestRouterBlocks(t *testing.T) {
	f := func(t *testing.T, blockTokens int, r TraceRequest, want []uint64) {
		trace := &Trace{BlockTokens: blockTokens}
		for b, w := range want {
			if got := trace.routerBlock(&r, b); got != w {
				t.Errorf("block %d: got %d, want %d", b, got, w)
			}
		}
	}
	own := mix(uint64(time.Second))
	t.Run("larger", func(t *testing.T) {
		f(t, 128, TraceRequest{At: time.Second, Input: 300, Blocks: []uint64{7, 9}}, []uint64{14, 15, 18, 19, own + 4})
	})
	t.Run("equal", func(t *testing.T) { f(t, 64, TraceRequest{Input: 100, Blocks: []uint64{7, 9}}, []uint64{7, 9}) })
	t.Run("smaller", func(t *testing.T) {
		f(t, 16, TraceRequest{Input: 100, Blocks: []uint64{1, 2, 3, 4, 5, 6, 7}}, []uint64{4, 7})
	})
	t.Run("smaller and incomplete", func(t *testing.T) {
		f(t, 16, TraceRequest{At: time.Second, Input: 200, Blocks: []uint64{1, 2, 3, 4, 5, 6}}, []uint64{4, own + 1, own + 2, own + 3})
	})
}
