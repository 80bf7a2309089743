package fakevllm

import (
	"sync/atomic"
	"time"
)

// choice is one sequence of a request on its way through the engine. The
// driver writes it, the handler of the request reads it.
type choice struct {
	index  int // in the answer
	prompt []uint32
	want   int    // output tokens
	finish string // why it ends, valid once done
	seed   uint64 // of its text
	emoji  bool
	model  string // served name

	id       ID
	added    time.Time
	cached   int           // prompt tokens found in the cache, valid once started
	created  int           // prompt tokens that are in the cache now
	ending   bool          // the step brought the last token; the driver's own
	state    atomic.Int64  // tokens * 4 + started * 2 + done, in one so that the last token and the end are seen together
	progress chan struct{} // of the request, capacity 1

	sent   int  // tokens written; the handler's own
	closed bool // the end is written
}

// put publishes the number of tokens and whether they are all.
func (c *choice) put(tokens int, done bool) {
	state := int64(tokens)<<2 | 2
	if done {
		state |= 1
	}
	c.state.Store(state)
	c.notify()
}

func (c *choice) tokens() int   { return int(c.state.Load() >> 2) }
func (c *choice) started() bool { return c.state.Load()&2 != 0 }
func (c *choice) done() bool    { return c.state.Load()&1 != 0 }

func (c *choice) notify() {
	select {
	case c.progress <- struct{}{}:
	default:
	}
}

// submit queues the choices of one request.
func (s *Server) submit(choices []*choice, salt string) error {
	hashes := make([][]uint64, len(choices))
	for i, c := range choices {
		hashes[i] = s.hashes(c, salt)
	}
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range choices {
		id, err := s.engine.Add(Sequence{Hashes: hashes[i], PromptTokens: len(c.prompt), OutputTokens: c.want})
		if err != nil {
			s.abort(choices)
			return err
		}
		for len(s.calls) <= id.Slot() {
			s.calls = append(s.calls, nil)
		}
		c.id, c.added = id, now
		if s.events != nil {
			s.events.track(id, c, hashes[i], salt)
		}
		s.calls[id.Slot()] = c
		s.count.awaiting.Add(1)
	}
	s.rouse()
	return nil
}

// abort takes the choices that are not done out of the engine and returns their number. The caller holds mu.
func (s *Server) abort(choices []*choice) int {
	n := 0
	for _, c := range choices {
		if c.id == 0 || c.done() {
			continue
		}
		n++
		s.engine.Abort(c.id)
		s.calls[c.id.Slot()] = nil
		if !c.started() {
			s.count.awaiting.Add(-1)
		}
		c.finish = "abort"
		c.state.Store(c.state.Load() | 1)
		c.notify()
	}
	s.rouse()
	return n
}

// abortAll ends every answer with finish_reason "abort".
func (s *Server) abortAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.abortCalls()
}

// abortCalls is abortAll for who holds mu.
func (s *Server) abortCalls() {
	for _, c := range s.calls {
		if c != nil {
			s.abort([]*choice{c})
		}
	}
}

func (s *Server) rouse() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// drive lets the engine run in real time. Steps follow each other by their own
// durations, not by when the timer happened to fire.
func (s *Server) drive() {
	defer s.driver.Done()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var next time.Time
	for {
		d, ok := s.begin()
		if !ok {
			select {
			case <-s.wake:
				next = time.Now()
				continue
			case <-s.halted:
			case <-s.stop:
			}
			return
		}
		next = next.Add(time.Duration(float64(d) / s.opt.Speed))
		if late := time.Since(next); late > 100*time.Millisecond {
			next = next.Add(late) // the machine stood still: do not run after it
		} else if late < 0 {
			timer.Reset(-late)
			select {
			case <-timer.C:
			case <-s.halted:
				return
			case <-s.stop:
				return
			}
		}
		s.finish()
	}
}

func (s *Server) begin() (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.engine.Begin()
}

// finish ends the step and hands out what it brought.
func (s *Server) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.engine.End()
	if s.restarting {
		s.restarted() // nobody has heard of this step
	} else if s.events != nil {
		s.events.step(r)
	}
	now := time.Now()
	s.metrics.step(r.Tokens, now, len(s.decoding))
	for _, id := range r.Finished {
		c := s.calls[id.Slot()]
		c.ending = true
		s.metrics.finished(c.finish, now.Sub(c.added), c.want)
	}
	live := s.decoding[:0]
	for _, c := range s.decoding {
		if !c.done() {
			c.put(c.tokens()+1, c.ending)
			live = append(live, c)
		}
	}
	for _, f := range r.First {
		c := s.calls[f.ID.Slot()]
		c.cached, c.created = f.Cached, f.Created
		c.put(min(1, c.want), c.ending)
		s.count.awaiting.Add(-1)
		s.metrics.firstToken(now.Sub(c.added), len(c.prompt))
		live = append(live, c)
	}
	for _, id := range r.Finished {
		s.calls[id.Slot()] = nil
	}
	clear(s.decoding[min(len(live), len(s.decoding)):])
	s.decoding = live
}

// hashes returns the block hashes of a choice's prompt and answer, and sets
// the seed of its text.
func (s *Server) hashes(c *choice, salt string) []uint64 {
	block := s.opt.Engine.BlockTokens
	chain := chainSeed(s.adapter(c.model), salt)
	full, seed := blockHashes(nil, chain, c.prompt, block)
	c.seed = mix(seed + uint64(c.index))
	if len(full) > 0 {
		chain = full[len(full)-1]
	}
	tail := append([]uint32(nil), c.prompt[len(full)*block:]...)
	for i := range c.want {
		tail = append(tail, answerToken(c.seed, i, c.emoji))
	}
	full, _ = blockHashes(full, chain, tail, block)
	return full
}

// adapter returns the LoRA adapter that a served name stands for, "" for the base model.
func (s *Server) adapter(model string) string {
	if model == s.opt.Models[0] {
		return ""
	}
	return model
}
