package fakevllm

import (
	"fmt"
	"math"
	"time"
)

// Model is the size and speed of one replica. A step that computes prompt
// tokens and lets d sequences decode over c tokens of context takes
//
//	Base + max(Floor, prefill + Decode*d) + Context*c
//
// where a prompt token at position x costs Prefill * (1 + x/Attention).
// Every time is divided by Speed.
type Model struct {
	Prefill   float64 `json:"prefill_s_per_token" yaml:"prefill_s_per_token"` // seconds per prompt token at position 0
	Attention float64 `json:"attention_tokens" yaml:"attention_tokens"`       // position at which a prompt token costs twice as much; 0: cost does not grow
	Base      float64 `json:"base_s" yaml:"base_s"`                           // seconds per step, scheduling and sampling
	Floor     float64 `json:"floor_s" yaml:"floor_s"`                         // seconds per step at least, reading the weights
	Decode    float64 `json:"decode_s_per_seq" yaml:"decode_s_per_seq"`       // seconds per decoding sequence
	Context   float64 `json:"context_s_per_token" yaml:"context_s_per_token"` // seconds per context token of the decoding sequences, reading the KV cache

	Budget      int     `json:"max_num_batched_tokens" yaml:"max_num_batched_tokens"` // tokens per step
	MaxSeqs     int     `json:"max_num_seqs" yaml:"max_num_seqs"`                     // sequences in the batch
	Blocks      int     `json:"num_gpu_blocks" yaml:"num_gpu_blocks"`                 // KV blocks
	BlockTokens int     `json:"block_size" yaml:"block_size"`                         // tokens per KV block
	Speed       float64 `json:"speed" yaml:"speed"`                                   // 0.5: half as fast
}

// DefaultModel returns Qwen3-32B on two H100: 15,928 prompt tokens per second,
// 1,024,000 tokens of KV cache in blocks of 16.
func DefaultModel() Model {
	return Model{
		Prefill: 62.8e-6, Attention: 60_000, Base: 2e-3, Floor: 12e-3, Decode: 50e-6, Context: 0.05e-6,
		Budget: 8192, MaxSeqs: 256, Blocks: 64_000, BlockTokens: 16, Speed: 1,
	}
}

// Validate returns an error that names the first field out of range.
func (m Model) Validate() error {
	for _, f := range []struct {
		name  string
		value float64
	}{
		{"prefill_s_per_token", m.Prefill}, {"attention_tokens", m.Attention}, {"base_s", m.Base},
		{"floor_s", m.Floor}, {"decode_s_per_seq", m.Decode}, {"context_s_per_token", m.Context},
	} {
		if !(f.value >= 0) || math.IsInf(f.value, 0) {
			return fmt.Errorf("model: %s is %v: use a finite number of at least 0", f.name, f.value)
		}
	}
	for _, f := range []struct {
		name       string
		value, low int
	}{
		{"max_num_seqs", m.MaxSeqs, 1}, {"max_num_batched_tokens", m.Budget, m.MaxSeqs},
		{"num_gpu_blocks", m.Blocks, 1}, {"block_size", m.BlockTokens, 1},
	} {
		if f.value < f.low || f.value > math.MaxInt32 {
			return fmt.Errorf("model: %s is %d: use a number from %d to %d", f.name, f.value, f.low, math.MaxInt32)
		}
	}
	if !(m.Speed > 0) || math.IsInf(m.Speed, 0) {
		return fmt.Errorf("model: speed is %v: use a finite number above 0", m.Speed)
	}
	return nil
}

// CapacityTokens returns the tokens that the KV cache holds.
func (m Model) CapacityTokens() int { return m.Blocks * m.BlockTokens }

// PrefillTime returns how long the prompt tokens from position `from` up to,
// and without, position `to` keep the engine busy.
func (m Model) PrefillTime(from, to int) time.Duration {
	return m.duration(m.prefill(from, to))
}

// prefill returns seconds before Speed. The conversions keep the compiler from
// fusing products and sums, so that every machine computes the same bits.
func (m Model) prefill(from, to int) float64 {
	n := float64(to - from)
	if n <= 0 {
		return 0
	}
	if m.Attention > 0 {
		mean := float64(from+to) / 2
		n += float64(n*mean) / m.Attention
	}
	return m.Prefill * n
}

func (m Model) step(prefill float64, decodes int, context int64) time.Duration {
	work := prefill + float64(m.Decode*float64(decodes))
	return m.duration(m.Base + max(m.Floor, work) + float64(m.Context*float64(context)))
}

func (m Model) duration(seconds float64) time.Duration {
	return time.Duration(math.Round(seconds / m.Speed * 1e9))
}
