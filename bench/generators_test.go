package bench

import (
	"math"
	"reflect"
	"slices"
	"testing"
	"time"
)

func generated(t *testing.T, name string, rate float64, seed uint64) *Trace {
	t.Helper()
	trace, err := generate(name, rate, seed)
	if err != nil || trace == nil {
		t.Fatalf("%s: got %v and error %v, want a trace", name, trace, err)
	}
	for i, r := range trace.Requests {
		if i > 0 && r.At < trace.Requests[i-1].At || r.Input < 1 || r.Output < 1 || len(r.Blocks) > (r.Input+trace.BlockTokens-1)/trace.BlockTokens {
			t.Fatalf("%s: request %d is %+v, want it in order and its blocks within its tokens", name, i, r)
		}
	}
	return trace
}

func TestGeneratorsRepeat(t *testing.T) {
	for _, g := range generators {
		a, b, c := generated(t, g.name, 1, 1), generated(t, g.name, 1, 1), generated(t, g.name, 1, 2)
		if !reflect.DeepEqual(a, b) || a.Digest == c.Digest {
			t.Errorf("%s: got digests %s, %s and, with another seed, %s; want the first two equal", g.name, a.Digest, b.Digest, c.Digest)
		}
		fast := generated(t, g.name, 2, 1)
		if got, want := span(fast), span(a); got > want*7/10 {
			t.Errorf("%s at rate 2: got %v, want at most 0.7 of %v", g.name, got, want)
		}
	}
	if trace, err := generate("conversation", 1, 1); trace != nil || err != nil {
		t.Errorf("another name: got %v and %v, want nothing", trace, err)
	}
}

func span(t *Trace) time.Duration { return t.Requests[len(t.Requests)-1].At }

func TestSharedPrefix(t *testing.T) {
	trace := generated(t, "shared-prefix", 2, 1)
	groups, prompts := map[uint64]uint64{}, map[uint64]bool{}
	var gaps []float64
	for i, r := range trace.Requests {
		if r.Input != 7200 || r.Output != 1000 || len(r.Blocks) != 112 {
			t.Fatalf("got %d tokens in %d blocks and %d out, want 7200 in 112 and 1000", r.Input, len(r.Blocks), r.Output)
		}
		if end, ok := groups[r.Blocks[0]]; ok && end != r.Blocks[92] {
			t.Errorf("request %d: got another end of the prefix of its group", i)
		}
		groups[r.Blocks[0]] = r.Blocks[92]
		prompts[r.Blocks[93]] = true
		if i > 0 {
			gaps = append(gaps, (r.At - trace.Requests[i-1].At).Seconds())
		}
	}
	if len(groups) != 150 || len(prompts) != 750 {
		t.Errorf("got %d groups and %d prompts, want 150 and 750", len(groups), len(prompts))
	}
	// Poisson: the gaps' deviation is their mean.
	cv, _ := spread(gaps)
	if m := mean(gaps); math.Abs(m-0.05) > 0.002 || math.Abs(cv-1) > 0.05 {
		t.Errorf("got gaps of %.4f s with a variation of %.2f, want 0.05 and 1", m, cv)
	}
}

func TestAgents(t *testing.T) {
	f := func(t *testing.T, name string, wantKinds int) {
		trace := generated(t, name, 1, 1)
		kinds, last, calls := map[uint64]uint64{}, map[uint64]TraceRequest{}, map[uint64]int{}
		early := 0
		for i, r := range trace.Requests {
			if end, ok := kinds[r.Blocks[0]]; ok && end != r.Blocks[63] {
				t.Fatalf("request %d: got another end of the system prompt", i)
			}
			kinds[r.Blocks[0]] = r.Blocks[63]
			session := r.Blocks[64]
			before, ok := last[session]
			if grown := r.Input - before.Input - before.Output; ok && (grown < 64 || r.At <= before.At || !slices.Equal(r.Blocks[:len(before.Blocks)], before.Blocks)) {
				t.Fatalf("request %d: got %d new tokens after %v, want a prompt that grows", i, grown, r.At-before.At)
			}
			if !ok && r.At < 5*time.Second {
				early++
			}
			last[session] = r
			calls[session]++
		}
		if got := float64(len(trace.Requests)) / float64(len(calls)); len(kinds) != wantKinds || len(calls) != 1000 || got < 11 || got > 13 {
			t.Errorf("got %d kinds, %d sessions of %.1f calls, want %d, 1000 of 12", len(kinds), len(calls), got, wantKinds)
		}
		if early < 130 || early > 170 {
			t.Errorf("got %d sessions in the first 5 s, want about 138 and 11", early)
		}
		if got := trace.CacheBound(0, 0, nil); got < 0.91 || got > 0.95 {
			t.Errorf("got %.3f of the prompts cached at most, want about 0.93 as in recorded trajectories", got)
		}
	}
	t.Run("many", func(t *testing.T) { f(t, "agents", 16) })
	t.Run("one", func(t *testing.T) { f(t, "one-agent", 1) })
}

func TestHotBurst(t *testing.T) {
	trace := generated(t, "hot-burst", 1.3, 1)
	bursts := map[uint64][]time.Duration{}
	for _, r := range trace.Requests {
		if len(r.Blocks) == 8 && r.Output == 300 && r.Blocks[0] != 0 {
			bursts[r.Blocks[7]] = append(bursts[r.Blocks[7]], r.At)
		}
	}
	if got, want := len(bursts), int(span(trace)/(45*time.Second)); got < want-1 || got > want {
		t.Errorf("got %d bursts in %v, want %d", got, span(trace), want)
	}
	for _, at := range bursts {
		if width := at[len(at)-1] - at[0]; len(at) != 48 || width >= 2*time.Second || at[0]%(45*time.Second) >= 2*time.Second {
			t.Errorf("got %d requests within %v from %v on, want 48 within 2 s every 45 s", len(at), width, at[0])
		}
	}
	if got := len(trace.Requests) - 48*len(bursts); got != 12031 {
		t.Errorf("got %d other requests, want the conversation's 12031", got)
	}
}
