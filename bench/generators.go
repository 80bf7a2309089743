package bench

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"
)

// generate returns a generated workload by name; ok is false for other names.
// Its arrivals are for eight replicas at rate 1. Blocks are of 64 tokens.
//
//	shared-prefix  150 groups share a prefix of 6,000 tokens; questions of 1,200
//	               tokens, answers of 1,000; Poisson arrivals
//	agents         200 sessions of a tool agent: a system prompt that all share, and
//	               a prompt that grows by what the agent said and what its tools
//	               returned; the next call follows the last after a pause
//	hot-burst      independent 4,096-token prompts, and every 45 s a new prefix of
//	               4,096 tokens that 48 requests ask for within 2 s
func generate(name string, rate float64, seed uint64) (*Trace, bool) {
	rnd := rand.New(rand.NewPCG(seed, 0x67656e657261746f))
	t := &Trace{Name: name, Digest: "generated", BlockTokens: 64}
	switch name {
	case "shared-prefix":
		t.sharedPrefix(rnd, rate)
	case "agents":
		t.agents(rnd, rate)
	case "hot-burst":
		t.hotBurst(rnd, rate)
	default:
		return nil, false
	}
	slices.SortStableFunc(t.Requests, func(a, b TraceRequest) int { return cmp.Compare(a.At, b.At) })
	return t, true
}

// runOf appends the ids of a run of blocks that starts at block `from` of a named text.
func runOf(dst []uint64, text uint64, from, tokens int) []uint64 {
	for b := range (tokens + 63) / 64 {
		dst = append(dst, mix(text)>>20<<20|uint64(from+b))
	}
	return dst
}

func exponential(rnd *rand.Rand, mean float64) time.Duration {
	return time.Duration(rnd.ExpFloat64() * mean * float64(time.Second))
}

func (t *Trace) sharedPrefix(rnd *rand.Rand, rate float64) {
	const groups, prefix, question, output, perSecond, seconds = 150, 6016, 1200, 1000, 20.0, 300
	at := time.Duration(0)
	for i := uint64(0); at < seconds*time.Second; i++ {
		at += exponential(rnd, 1/(perSecond*rate))
		blocks := runOf(nil, 1+rnd.Uint64N(groups), 0, prefix)
		blocks = runOf(blocks, 1<<32+i, 0, question)
		t.Requests = append(t.Requests, TraceRequest{At: at, Input: prefix + question, Output: output, Blocks: blocks})
	}
}

func (t *Trace) agents(rnd *rand.Rand, rate float64) {
	const sessions, system, seconds = 400, 4096, 600.0
	for s := uint64(0); s < sessions; s++ {
		at := time.Duration(rnd.Float64() * seconds / rate * float64(time.Second))
		length := 0 // tokens of the session's own history
		for range 4 + rnd.IntN(16) {
			length += 128 + rnd.IntN(640)
			output := 40 + rnd.IntN(160)
			blocks := runOf(nil, 7, 0, system)
			blocks = runOf(blocks, 1<<33+s, 0, length/64*64)
			t.Requests = append(t.Requests, TraceRequest{At: at, Input: system + length, Output: output, Blocks: blocks})
			length += output
			at += time.Duration((1 + 2*rnd.Float64() + 0.015*float64(output)) * float64(time.Second))
		}
	}
}

func (t *Trace) hotBurst(rnd *rand.Rand, rate float64) {
	const prompt, output, seconds, every, size = 4096, 200, 600.0, 45.0, 48
	at := time.Duration(0)
	for i := uint64(0); at.Seconds() < seconds; i++ {
		at += exponential(rnd, 1/(12*rate))
		t.Requests = append(t.Requests, TraceRequest{At: at, Input: prompt, Output: output, Blocks: runOf(nil, 1<<34+i, 0, prompt)})
	}
	for b := 0.0; b*every < seconds; b++ {
		for k := range size {
			start := time.Duration((b*every + 2*rnd.Float64()) * float64(time.Second))
			blocks := runOf(runOf(nil, 1<<35+uint64(b), 0, prompt), 1<<36+uint64(b*100)+uint64(k), 0, 256)
			t.Requests = append(t.Requests, TraceRequest{At: start, Input: prompt + 256, Output: output, Blocks: blocks})
		}
	}
}
