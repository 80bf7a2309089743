package bench

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"slices"
	"time"
)

// generators are the workloads that Setting.Trace can name besides the recorded
// ones. Rate 1 is a load for eight replicas, see generate.
var generators = []struct {
	name        string
	blockTokens int
	fill        func(t *Trace, rnd *rand.Rand, rate float64, seed uint64) error
}{
	{"shared-prefix", 64, (*Trace).sharedPrefix},
	{"agents", 64, func(t *Trace, rnd *rand.Rand, rate float64, _ uint64) error { return t.agents(rnd, rate, 16) }},
	{"one-agent", 64, func(t *Trace, rnd *rand.Rand, rate float64, _ uint64) error { return t.agents(rnd, rate, 1) }},
	{"hot-burst", 512, (*Trace).hotBurst},
}

// generate returns a generated workload by name, nil for other names. Its
// arrivals are for eight replicas at rate 1.
//
//	shared-prefix  150 groups of five prompts: a prefix of 6,000 tokens that the group
//	               shares and a question of 1,200; answers of 1,000 tokens; Poisson
//	               arrivals at 10 per second (the load that llm-d publishes on)
//	agents         sessions of 16 kinds of tool agents: a system prompt of 4,096 tokens
//	               that a kind shares, and a prompt that grows with every call by what
//	               the agent said and what its tools returned; 2.3 new sessions per
//	               second, after those of a minute that start within 5 s
//	one-agent      the same with one kind
//	hot-burst      one copy of the conversation trace and, every 45 s, a prefix of 4,096
//	               tokens never seen before that 48 requests ask for within 2 s
func generate(name string, rate float64, seed uint64) (*Trace, error) {
	for _, g := range generators {
		if g.name != name {
			continue
		}
		t := &Trace{Name: name, BlockTokens: g.blockTokens}
		if err := g.fill(t, rand.New(rand.NewPCG(seed, 0x67656e657261746f)), rate, seed); err != nil {
			return nil, err
		}
		slices.SortStableFunc(t.Requests, func(a, b TraceRequest) int { return cmp.Compare(a.At, b.At) })
		t.Digest = t.digest()
		return t, nil
	}
	return nil, nil
}

// digest is the SHA-256 of the requests, for a trace that is no file.
func (t *Trace) digest() string {
	h := sha256.New()
	var b []byte
	for _, r := range t.Requests {
		b = b[:0]
		for _, v := range []int64{int64(r.At), int64(r.Input), int64(r.Output), int64(len(r.Blocks))} {
			b = binary.LittleEndian.AppendUint64(b, uint64(v))
		}
		for _, id := range r.Blocks {
			b = binary.LittleEndian.AppendUint64(b, id)
		}
		_, _ = h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// runOf appends the ids of the blocks that the tokens [from, from+tokens) of a named text fill.
func (t *Trace) runOf(dst []uint64, text uint64, from, tokens int) []uint64 {
	for b := from / t.BlockTokens; b < (from+tokens)/t.BlockTokens; b++ {
		dst = append(dst, mix(text)>>20<<20|uint64(b))
	}
	return dst
}

func exponential(rnd *rand.Rand, mean float64) time.Duration {
	return time.Duration(rnd.ExpFloat64() * mean * float64(time.Second))
}

func (t *Trace) sharedPrefix(rnd *rand.Rand, rate float64, _ uint64) error {
	const groups, prompts, prefix, question, output, perSecond, requests = 150, 5, 6000, 1200, 1000, 10.0, 9000
	at := time.Duration(0)
	for range requests {
		at += exponential(rnd, 1/(perSecond*rate))
		group, prompt := rnd.Uint64N(groups), rnd.Uint64N(prompts)
		// The block in which the prefix ends belongs to the question.
		blocks := t.runOf(nil, 1+group, 0, prefix)
		blocks = t.runOf(blocks, 1<<32+group*prompts+prompt, prefix, question)
		t.Requests = append(t.Requests, TraceRequest{At: at, Input: prefix + question, Output: output, Blocks: blocks})
	}
	return nil
}

func (t *Trace) agents(rnd *rand.Rand, rate float64, kinds uint64) error {
	const sessions, perSecond, open, opening, system = 1000, 2.3, 60, 5 * time.Second, 4096
	start := time.Duration(0)
	for s := uint64(0); s < sessions; s++ {
		if float64(s) < open*perSecond*rate {
			start = time.Duration(rnd.Int64N(int64(opening)))
		} else {
			start += exponential(rnd, 1/(perSecond*rate))
		}
		at, length := start, system+64+rnd.IntN(192)
		for range 4 + rnd.IntN(17) {
			output := 20 + rnd.IntN(140)
			blocks := t.runOf(nil, 1<<37+s%kinds, 0, system)
			blocks = t.runOf(blocks, 1<<33+s, system, length-system)
			t.Requests = append(t.Requests, TraceRequest{At: at, Input: length, Output: output, Blocks: blocks})
			// The agent's words, then the tool's result or the user's answer.
			length += output + 64 + rnd.IntN(512)
			at += time.Duration(float64(time.Second) * (1 + 0.03*float64(output) + 2*rnd.ExpFloat64()))
		}
	}
	return nil
}

func (t *Trace) hotBurst(rnd *rand.Rand, rate float64, seed uint64) error {
	const every, within, size, prefix, output = 45 * time.Second, 2 * time.Second, 48, 4096, 300
	chat, err := LoadTrace("conversation", t.BlockTokens)
	if err != nil {
		return err
	}
	t.Requests = chat.Shape(3*time.Second, 1, rate, seed).Requests
	end := t.Requests[len(t.Requests)-1].At
	for b := uint64(1); time.Duration(b)*every < end; b++ {
		blocks := t.runOf(nil, 1<<35+b, 0, prefix)
		for range size {
			at := time.Duration(b)*every + time.Duration(rnd.Int64N(int64(within)))
			t.Requests = append(t.Requests, TraceRequest{At: at, Input: prefix + 64 + rnd.IntN(384), Output: output, Blocks: blocks})
		}
	}
	return nil
}
