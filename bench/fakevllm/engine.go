// Package fakevllm is a double of a vLLM replica: its scheduler, paged KV cache
// and cost model as a step machine that has no clock (Engine), and an HTTP
// server (Server) that drives the machine in real time, speaks vLLM's API and
// fails on demand.
package fakevllm

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// ErrTooLong says that a sequence would never fit into the KV cache.
var ErrTooLong = errors.New("prompt and output do not fit into the KV cache")

// ID names a sequence of one Engine. IDs are never used twice.
type ID uint64

// Slot returns a small number that no other sequence in the engine has: the
// index for a caller's own table of sequences.
func (id ID) Slot() int { return int(uint32(id)) }

// Sequence is one prompt with the answer that the engine will find for it.
type Sequence struct {
	// Hashes[i] names the block of the tokens [i*BlockTokens, (i+1)*BlockTokens)
	// and everything before it. Hashes past the prompt name blocks of the answer. Blocks without
	// a hash are never reused. The engine keeps the slice until the sequence ends.
	Hashes       []uint64
	PromptTokens int // at least 1
	OutputTokens int // 0: the sequence ends with its prefill (pooling)
}

// FirstToken is the end of a sequence's prefill.
type FirstToken struct {
	ID      ID
	Cached  int // prompt tokens found in the cache at admission
	Created int // prompt tokens computed and now in the cache
}

// Stored says that blocks [From, To) of a sequence can be found from now on.
type Stored struct {
	ID       ID
	From, To int
}

// StepResult is what one step brought. Its slices are valid until the next Begin.
type StepResult struct {
	Tokens   int          // prompt and decoded tokens in the batch
	First    []FirstToken // prefills that ended, in order of admission
	Finished []ID         // sequences that produced their last token; their IDs are invalid now
	Evicted  []uint64     // hashes of blocks handed out again, before any of Stored; only with TrackBlocks
	Stored   []Stored     // only with TrackBlocks
}

// Stats is the engine as it publishes itself: as of the end of the last step,
// without what arrived while that step ran.
type Stats struct {
	Running int     `json:"running"`  // sequences in the batch
	Waiting int     `json:"waiting"`  // sequences in the queue
	KVUsage float64 `json:"kv_usage"` // fraction of the blocks that sequences hold, 0..1

	Blocks       int `json:"blocks"`        // all blocks
	UsedBlocks   int `json:"used_blocks"`   // held by sequences, the room for their output included
	CachedBlocks int `json:"cached_blocks"` // that can be found by hash

	Steps            int64 `json:"steps"`
	QueryTokens      int64 `json:"query_tokens"`      // prompt tokens of admitted sequences
	HitTokens        int64 `json:"hit_tokens"`        // of these, found in the cache
	PromptTokens     int64 `json:"prompt_tokens"`     // of sequences whose prefill ended
	CachedTokens     int64 `json:"cached_tokens"`     // of these, not computed
	GenerationTokens int64 `json:"generation_tokens"` // output tokens
	EvictedBlocks    int64 `json:"evicted_blocks"`    // blocks with a hash that were handed out again
}

// Engine is vLLM's scheduler over a paged KV cache, one step at a time: first
// come first served, decodes before prefills, prefills in chunks of what the
// token budget leaves, and admission when the whole prompt and output fit. It
// has no clock, no randomness and no goroutine; the same calls give the same
// answers. It is not safe for concurrent use.
//
// A driver calls Begin, waits for the duration it returns, calls End, and
// starts over. Add and Abort may come at any time.
//
// Differences from vLLM: room for the output is reserved at admission, so that
// nothing is preempted, and a block can be found when the step that computes it
// has ended (vLLM: when that step is scheduled).
type Engine struct {
	model  Model
	cache  *blockCache
	seqs   []sequence
	unused []int32 // free entries of seqs

	waiting  []ID // FIFO from head on; aborted sequences leave dead IDs
	head     int
	queued   int // live ones
	blocked  bool
	prefills []int32 // admitted, prompt not computed; in order of admission
	running  int     // admitted

	decodes int   // sequences that get one token per step
	context int64 // their context tokens
	wakes   []wake
	admits  int64 // sequences admitted so far

	tick    int64 // steps ended
	stepped int64 // sequences added when the step began
	added   int64
	inStep  bool
	left    int // queued of those added before the step began
	aborted []ID

	track     bool
	live      Stats
	published Stats
	result    StepResult
}

type phase uint8

const (
	unusedSlot phase = iota
	inQueue
	inPrefill
	inDecode
)

type sequence struct {
	Sequence
	gen      uint32
	phase    phase
	dead     bool // aborted, to be freed at the end of the step
	blocks   []int32
	named    int   // leading blocks that can be found
	cached   int   // tokens found at admission
	computed int   // prompt tokens in the cache
	chunk    int   // prompt tokens in this step
	first    int64 // tick of the first token
	serial   int64 // order of Add, then of admission
}

// wake is a step at whose end a decoding sequence fills a named block or ends.
type wake struct {
	tick   int64
	serial int64
	slot   int32
	gen    uint32
}

// NewEngine returns an idle engine with an empty cache. It panics on a model
// that Validate refuses.
func NewEngine(m Model) *Engine {
	if err := m.Validate(); err != nil {
		panic(err)
	}
	e := &Engine{model: m, cache: newBlockCache(m.Blocks)}
	e.publish(0)
	return e
}

// Model returns the model that the engine was built with.
func (e *Engine) Model() Model { return e.model }

// TrackBlocks says whether step results list stored and evicted blocks.
func (e *Engine) TrackBlocks(on bool) {
	e.track, e.cache.onEvict = on, nil
	if on {
		e.cache.onEvict = func(hash uint64) { e.result.Evicted = append(e.result.Evicted, hash) }
	}
}

// Add queues a sequence. A step in progress does not see it.
func (e *Engine) Add(s Sequence) (ID, error) {
	if s.PromptTokens < 1 || s.OutputTokens < 0 {
		return 0, fmt.Errorf("sequence of %d prompt and %d output tokens: at least 1 and 0 are needed", s.PromptTokens, s.OutputTokens)
	}
	if need := e.blocksFor(&s); need > e.model.Blocks {
		return 0, fmt.Errorf("%w: %d blocks needed, %d there", ErrTooLong, need, e.model.Blocks)
	}
	var slot int32
	if n := len(e.unused); n > 0 {
		slot, e.unused = e.unused[n-1], e.unused[:n-1]
	} else {
		slot = int32(len(e.seqs))
		e.seqs = append(e.seqs, sequence{})
	}
	q := &e.seqs[slot]
	*q = sequence{Sequence: s, gen: q.gen + 1, phase: inQueue, blocks: q.blocks[:0], serial: e.added}
	e.added++
	id := ID(q.gen)<<32 | ID(slot)
	e.waiting = append(e.waiting, id)
	e.queued++
	return id, nil
}

// Abort ends a sequence. It leaves the batch, and its blocks become free, when
// the step in progress ends; at once when there is none. Unknown IDs and
// finished sequences are ignored.
func (e *Engine) Abort(id ID) {
	q := e.get(id)
	if q == nil || q.dead {
		return
	}
	switch {
	case q.phase == inQueue:
		e.queued--
		if q.serial < e.stepped {
			e.left--
		}
		e.blocked = false // the next in the queue may be smaller
		e.drop(int32(id.Slot()))
		if len(e.waiting)-e.head > 2*e.queued+1024 {
			e.waiting = slices.DeleteFunc(e.waiting[e.head:], func(id ID) bool { return e.get(id) == nil })
			e.head = 0
		}
	case e.inStep:
		q.dead = true
		e.aborted = append(e.aborted, id)
	default:
		e.end(int32(id.Slot()))
	}
}

// Begin admits what fits and starts a step. It returns how long the step takes,
// and false when there is nothing to do. It panics while a step is in progress.
func (e *Engine) Begin() (time.Duration, bool) {
	if e.inStep {
		panic("fakevllm: Begin without End")
	}
	e.result = StepResult{
		First: e.result.First[:0], Finished: e.result.Finished[:0], Evicted: e.result.Evicted[:0], Stored: e.result.Stored[:0],
	}
	budget := e.model.Budget - e.decodes
	seconds := 0.0
	for _, slot := range e.prefills {
		seconds += e.schedule(slot, &budget)
	}
	for budget > 0 && e.running < e.model.MaxSeqs && e.queued > 0 && !e.blocked {
		slot, ok := e.admit()
		if !ok {
			e.blocked = true
			break
		}
		seconds += e.schedule(slot, &budget)
	}
	e.stepped, e.left = e.added, e.queued
	if e.running == 0 {
		e.publish(e.left)
		return 0, false
	}
	e.inStep = true
	e.result.Tokens = e.model.Budget - budget
	return e.model.step(seconds, e.decodes, e.context), true
}

// End ends the step that Begin started. It panics when there is none.
func (e *Engine) End() *StepResult {
	if !e.inStep {
		panic("fakevllm: End without Begin")
	}
	e.inStep = false
	e.tick++
	e.live.Steps++
	e.live.GenerationTokens += int64(e.decodes)
	e.context += int64(e.decodes)
	for _, id := range e.aborted {
		if e.get(id).phase == inDecode {
			e.live.GenerationTokens-- // its token went nowhere
		}
	}
	if len(e.prefills) > 0 {
		e.endPrefills()
	}
	for len(e.wakes) > 0 && e.wakes[0].tick <= e.tick {
		w := e.popWake()
		if q := &e.seqs[w.slot]; q.gen == w.gen && q.phase == inDecode && !q.dead {
			e.wake(w.slot)
		}
	}
	for _, id := range e.aborted {
		e.end(int32(id.Slot()))
	}
	e.aborted = e.aborted[:0]
	e.publish(e.left)
	return &e.result
}

// Stats returns what the engine last published.
func (e *Engine) Stats() Stats { return e.published }

// CachedTokens returns how many prompt tokens a sequence would find in the
// cache if it were admitted now: whole blocks, and never the whole prompt,
// whose last token must be computed.
func (e *Engine) CachedTokens(hashes []uint64, promptTokens int) int {
	return e.cache.prefix(e.findable(hashes, promptTokens)) * e.model.BlockTokens
}

// Backlog returns the prefill time of everything that has no first token yet,
// with the hits that the cache gives now and without the step in progress.
func (e *Engine) Backlog() time.Duration {
	seconds := 0.0
	for _, slot := range e.prefills {
		q := &e.seqs[slot]
		seconds += e.model.prefill(q.computed+q.chunk, q.PromptTokens)
	}
	for _, id := range e.waiting[e.head:] {
		if q := e.get(id); q != nil {
			seconds += e.model.prefill(e.CachedTokens(q.Hashes, q.PromptTokens), q.PromptTokens)
		}
	}
	return e.model.duration(seconds)
}

// ClearCache forgets every cached block, as POST /reset_prefix_cache does. It
// returns false, and does nothing, while sequences hold blocks.
func (e *Engine) ClearCache() bool {
	if !e.cache.clear() {
		return false
	}
	e.published.CachedBlocks = 0
	return true
}

func (e *Engine) get(id ID) *sequence {
	if id.Slot() >= len(e.seqs) {
		return nil
	}
	q := &e.seqs[id.Slot()]
	if q.phase == unusedSlot || q.gen != uint32(id>>32) {
		return nil
	}
	return q
}

func (e *Engine) id(slot int32) ID { return ID(e.seqs[slot].gen)<<32 | ID(slot) }

func (e *Engine) blocksFor(s *Sequence) int {
	return (s.PromptTokens + s.OutputTokens + e.model.BlockTokens - 1) / e.model.BlockTokens
}

func (e *Engine) findable(hashes []uint64, promptTokens int) []uint64 {
	return hashes[:min(len(hashes), (promptTokens-1)/e.model.BlockTokens)]
}

// admit takes the head of the queue into the batch if its blocks fit.
func (e *Engine) admit() (int32, bool) {
	id := e.waiting[e.head]
	for e.get(id) == nil || e.get(id).phase != inQueue {
		e.head++
		id = e.waiting[e.head]
	}
	slot, q := int32(id.Slot()), e.get(id)
	hits := e.findable(q.Hashes, q.PromptTokens)
	hits = hits[:e.cache.prefix(hits)]
	blocks, ok := e.cache.take(q.blocks, hits, e.blocksFor(&q.Sequence))
	if !ok {
		return 0, false
	}
	if e.head++; e.head == len(e.waiting) {
		e.waiting, e.head = e.waiting[:0], 0
	} else if e.head > 1024 && e.head > len(e.waiting)/2 {
		e.waiting = e.waiting[:copy(e.waiting, e.waiting[e.head:])]
		e.head = 0
	}
	q.blocks, q.named, q.cached = blocks, len(hits), len(hits)*e.model.BlockTokens
	q.computed, q.phase, q.serial = q.cached, inPrefill, e.admits
	e.admits++
	e.queued--
	e.running++
	e.prefills = append(e.prefills, slot)
	e.live.QueryTokens += int64(q.PromptTokens)
	e.live.HitTokens += int64(q.cached)
	return slot, true
}

// schedule gives a prefill its chunk of the budget and returns its cost in seconds.
func (e *Engine) schedule(slot int32, budget *int) float64 {
	q := &e.seqs[slot]
	q.chunk = min(q.PromptTokens-q.computed, *budget)
	*budget -= q.chunk
	return e.model.prefill(q.computed, q.computed+q.chunk)
}

func (e *Engine) endPrefills() {
	keep := e.prefills[:0]
	for _, slot := range e.prefills {
		q := &e.seqs[slot]
		q.computed += q.chunk
		q.chunk = 0
		e.name(slot, q.computed)
		if q.computed < q.PromptTokens || q.dead {
			keep = append(keep, slot)
			continue
		}
		e.blocked = false // its blocks may make the head of the queue smaller
		prompt := int64(q.PromptTokens)
		e.live.PromptTokens += prompt
		e.live.CachedTokens += int64(q.cached)
		full := min(q.PromptTokens/e.model.BlockTokens, len(q.Hashes)) * e.model.BlockTokens
		e.result.First = append(e.result.First, FirstToken{ID: e.id(slot), Cached: q.cached, Created: max(0, full-q.cached)})
		if q.OutputTokens > 0 {
			e.live.GenerationTokens++
		}
		q.phase, q.first = inDecode, e.tick
		e.decodes++
		e.context += prompt + 1
		e.wake(slot)
	}
	e.prefills = keep
}

// wake names what a decoding sequence has computed, ends it after its last
// token, and else notes when to come back.
func (e *Engine) wake(slot int32) {
	q := &e.seqs[slot]
	steps := int(e.tick - q.first)
	e.name(slot, q.PromptTokens+steps)
	last := max(q.OutputTokens-1, 0)
	if steps >= last {
		e.result.Finished = append(e.result.Finished, e.id(slot))
		e.end(slot)
		return
	}
	next := last
	if q.named < len(q.Hashes) {
		next = min(next, (q.named+1)*e.model.BlockTokens-q.PromptTokens)
	}
	e.pushWake(wake{tick: q.first + int64(next), serial: q.serial, slot: slot, gen: q.gen})
}

// name makes the blocks of the first n tokens findable.
func (e *Engine) name(slot int32, n int) {
	q := &e.seqs[slot]
	from, to := q.named, min(n/e.model.BlockTokens, len(q.Hashes))
	if from >= to {
		return
	}
	for i := from; i < to; i++ {
		e.cache.name(q.blocks[i], q.Hashes[i])
	}
	q.named = to
	e.blocked = false
	if e.track {
		e.result.Stored = append(e.result.Stored, Stored{ID: e.id(slot), From: from, To: to})
	}
}

// end takes a sequence out of the batch and frees its blocks.
func (e *Engine) end(slot int32) {
	q := &e.seqs[slot]
	if q.phase == inDecode {
		e.decodes--
		e.context -= int64(q.PromptTokens) + 1 + e.tick - q.first
	} else {
		for i, s := range e.prefills {
			if s == slot {
				e.prefills = append(e.prefills[:i], e.prefills[i+1:]...)
				break
			}
		}
	}
	e.cache.release(q.blocks)
	e.running--
	e.blocked = false
	e.drop(slot)
}

func (e *Engine) drop(slot int32) {
	q := &e.seqs[slot]
	q.phase, q.Hashes = unusedSlot, nil
	e.unused = append(e.unused, slot)
}

func (e *Engine) publish(waiting int) {
	used := e.model.Blocks - e.cache.free
	e.live.Running, e.live.Waiting = e.running, waiting
	e.live.Blocks, e.live.UsedBlocks, e.live.CachedBlocks = e.model.Blocks, used, e.cache.cached
	e.live.KVUsage = float64(used) / float64(e.model.Blocks)
	e.live.EvictedBlocks = e.cache.evicted
	e.published = e.live
}

func (w wake) before(o wake) bool {
	return w.tick < o.tick || w.tick == o.tick && w.serial < o.serial
}

func (e *Engine) pushWake(w wake) {
	e.wakes = append(e.wakes, w)
	i := len(e.wakes) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !w.before(e.wakes[up]) {
			break
		}
		e.wakes[i], i = e.wakes[up], up
	}
	e.wakes[i] = w
}

func (e *Engine) popWake() wake {
	top := e.wakes[0]
	n := len(e.wakes) - 1
	w := e.wakes[n]
	e.wakes = e.wakes[:n]
	for i := 0; n > 0; {
		down := 2*i + 1
		if down+1 < n && e.wakes[down+1].before(e.wakes[down]) {
			down++
		}
		if down >= n || !e.wakes[down].before(w) {
			e.wakes[i] = w
			break
		}
		e.wakes[i], i = e.wakes[down], down
	}
	return top
}
