package fakevllm

import (
	"errors"
	"strconv"
	"time"
)

const fingerprint = "vllm-0.32.0-fake"

// answer is one request to the model, whatever its API.
type answer struct {
	c       *conn
	id      string
	model   string
	salt    string
	created int64
	choices []*choice

	stream     bool
	usage      bool // a stream ends with a usage event
	continuous bool // every event of a stream carries usage
	echo       bool

	promptTokens int    // as usage counts them
	broken       string // the break that this answer gets, "" for none
	seq          int    // events of a Responses stream
}

// dialect is how an API writes an answer.
type dialect interface {
	open(a *answer, st *stream)             // behind the head
	start(a *answer, st *stream, c *choice) // before a choice's first text
	// delta writes n new tokens of a choice and, when last, why it ended.
	delta(a *answer, st *stream, c *choice, from, n int, last bool)
	end(a *answer, st *stream)
	full(a *answer) []byte // the plain answer
}

// sampling is what a request says about the length of its answers.
type sampling struct {
	max, min, n int // max 0: no limit given
	ignoreEOS   bool
}

// newAnswer makes the choices of a request: n for every prompt.
func (c *conn) newAnswer(prefix, model, salt string, prompts [][]uint32, p sampling) (*answer, error) {
	a := &answer{c: c, id: prefix + c.rid, model: model, salt: salt, created: time.Now().Unix()}
	progress := make(chan struct{}, 1)
	if p.n == 0 {
		p.n = 1
	}
	if p.n < 0 || p.n*len(prompts) > 4096 {
		return nil, badRequest("n", "n must be at least 1 and ask for no more than 4096 sequences, got %d.", p.n)
	}
	for _, prompt := range prompts {
		if len(prompt) == 0 {
			return nil, badRequest("prompt", "The prompt must not be empty. (parameter=prompt)")
		}
		want, finish, err := c.s.length(p, len(prompt))
		if err != nil {
			return nil, err
		}
		a.promptTokens += len(prompt)
		for range p.n {
			a.choices = append(a.choices, &choice{
				index: len(a.choices), prompt: prompt, want: want, finish: finish, model: model,
				emoji: c.f.Emoji, progress: progress,
			})
		}
	}
	return a, nil
}

// length returns how many tokens an answer has and why it ends there.
func (s *Server) length(p sampling, prompt int) (int, string, error) {
	most := s.opt.MaxModelLen - prompt
	switch {
	case most < 1:
		return 0, "", badRequest("input_tokens", "This model's maximum context length is %d tokens, and the prompt has %d. (parameter=input_tokens, value=%d)", s.opt.MaxModelLen, prompt, prompt)
	case p.max > most:
		return 0, "", badRequest("max_tokens", "This model's maximum context length is %d tokens: %d of prompt and max_tokens=%d exceed it. (parameter=max_tokens, value=%d)", s.opt.MaxModelLen, prompt, p.max, p.max)
	case p.max > 0:
		most = p.max
	}
	if want := max(p.min, s.opt.OutputTokens); want < most && !p.ignoreEOS {
		return want, "stop", nil
	}
	return most, "length", nil
}

// run answers a request to the model, faults and all.
func (c *conn) run(a *answer, d dialect) error {
	if c.f.takeStatus() {
		c.s.fault("status")
		if c.f.RetryAfter > 0 {
			return c.fail(c.f.Status, "fault", "retry-after: "+strconv.Itoa(c.f.RetryAfter))
		}
		return c.fail(c.f.Status, "fault")
	}
	if limit := c.s.opt.MaxQueued; limit > 0 && int(c.s.count.awaiting.Load())+len(a.choices) > limit {
		c.s.rejected()
		return c.fail(503, "The request queue is full. (max_num_queued_reqs)")
	}
	c.s.execute(c.id)
	err := c.produce(a, d)
	if err != nil {
		c.s.mu.Lock()
		c.s.abort(a.choices)
		c.s.mu.Unlock()
	}
	switch {
	case err == nil:
		c.s.count.completed.Add(1)
	case errors.Is(err, errGone):
		c.s.count.aborted.Add(1)
	default:
		c.s.count.cut.Add(1)
	}
	c.s.count.inFlight.Add(-1)
	return err
}

func (c *conn) produce(a *answer, d dialect) error {
	for _, f := range []struct {
		name string
		on   bool
	}{
		{"crlf", a.stream && c.f.CRLF}, {"comments", a.stream && c.f.Comments}, {"event_delay", a.stream && c.f.EventDelay > 0},
		{"emoji", c.f.Emoji}, {"headers", c.f.HeaderBytes > 0 || len(c.f.Headers) > 0}, {"read_rate", c.f.ReadRate > 0},
	} {
		if f.on {
			c.s.fault(f.name)
		}
	}
	if c.f.Delay > 0 {
		c.s.fault("delay")
		if err := c.pause(time.Duration(c.f.Delay)); err != nil {
			return err
		}
	}
	if c.f.takeBreak() {
		a.broken = c.f.Break
	}
	if c.f.BreakAfter < 0 && a.broken != "" {
		if err := c.breakOff(a, nil); err != nil {
			return err
		}
	}
	switch {
	case c.f.Chunks > 0:
		c.s.fault("chunks")
		for _, ch := range a.choices {
			ch.want, ch.finish, ch.seed = c.f.Chunks, "stop", uint64(ch.index)
		}
	case c.s.opt.Instant:
		for _, ch := range a.choices {
			ch.seed = uint64(ch.index)
			ch.state.Store(int64(ch.want)<<2 | 3)
		}
	default:
		if err := c.s.submit(a.choices, a.salt); err != nil {
			return c.refuse(badRequest("", "%s", err))
		}
	}
	if a.stream {
		return c.streamed(a, d)
	}
	return c.plain(a, d)
}

// breakOff does what Faults.Break says. It returns nil when the answer goes on.
func (c *conn) breakOff(a *answer, st *stream) error {
	kind := a.broken
	a.broken = ""
	c.s.fault("break_" + kind)
	if st != nil {
		if st.flush(); st.err != nil {
			return st.err
		}
	}
	switch kind {
	case BreakStall:
		if c.f.BreakFor > 0 {
			return c.pause(time.Duration(c.f.BreakFor))
		}
		return c.pause(-1)
	case BreakReset:
		c.reset()
	case BreakClose:
		c.finish()
	case BreakError:
		dead := &apiError{status: 500, message: "The engine died. (fault)"}
		if st == nil {
			c.keep = false
			if err := c.refuse(dead); err != nil {
				return err
			}
			break
		}
		st.data(dead.body(c.path))
		st.data([]byte("[DONE]"))
		if err := st.close(); err != nil {
			return err
		}
	}
	c.keep = false
	return errCut
}

// advance waits until there is something new to write. It returns at once when
// there is.
func (c *conn) advance(a *answer) error {
	if c.f.Chunks > 0 {
		if err := c.pause(time.Duration(c.f.ChunkInterval)); err != nil {
			return err
		}
		for _, ch := range a.choices {
			n := ch.tokens() + 1
			ch.put(n, n >= ch.want)
		}
		if c.s.draining.Load() {
			return c.halting()
		}
		return nil
	}
	c.watch()
	select {
	case <-a.choices[0].progress:
		return nil
	case <-c.gone:
		return errGone
	case <-c.s.halted:
		return c.halting()
	case <-c.s.stop:
		return errCut
	}
}

// halting waits for the end without a byte when generation was stopped.
func (c *conn) halting() error {
	select {
	case <-c.s.halted:
		return c.pause(-1)
	default:
		return nil
	}
}

// done says whether nothing new will come.
func (a *answer) done() bool {
	for _, ch := range a.choices {
		if !ch.done() {
			return false
		}
	}
	return true
}

// plain sends an answer in one piece, or less of it when it has to break.
func (c *conn) plain(a *answer, d dialect) error {
	for !a.done() {
		if err := c.advance(a); err != nil {
			return err
		}
	}
	c.s.outside(a)
	body := d.full(a)
	kind := contentJSON
	if body[0] != '{' {
		kind = "text/plain; charset=utf-8"
	}
	if a.broken == BreakError {
		return c.breakOff(a, nil)
	}
	if a.broken == "" && c.f.ExtraLength == 0 {
		return c.reply(200, kind, body)
	}
	c.out = append(c.head(c.out[:0], 200, kind, len(body)+c.f.ExtraLength), "\r\n"...)
	head := len(c.out)
	c.out = append(c.out, body...)
	if a.broken != "" {
		cut := head
		if c.f.BreakAfter > 0 {
			cut += len(body) / 2
		}
		if err := c.write(c.out[:cut]); err != nil {
			return err
		}
		if err := c.breakOff(a, nil); err != nil {
			return err
		}
		c.out = c.out[cut:]
	}
	if err := c.write(c.out); err != nil || c.f.ExtraLength == 0 {
		return err
	}
	return c.short()
}

// short ends an answer that is shorter than its head declares.
func (c *conn) short() error {
	c.s.fault("extra_length")
	c.finish()
	return errCut
}

// streamed sends an answer as an event stream, one event per choice and step.
func (c *conn) streamed(a *answer, d dialect) error {
	st := c.openStream(a)
	d.open(a, st)
	for {
		if !a.done() {
			if !c.s.opt.Instant || c.f.ChunkInterval > 0 { // else a burst, in one write
				st.flush()
			}
			if st.err != nil {
				return st.err
			}
			if err := c.advance(a); err != nil {
				return err
			}
		}
		open := false
		for _, ch := range a.choices {
			state := ch.state.Load()
			n, last := int(state>>2), state&1 != 0
			if ch.closed || n == ch.sent && !last {
				open = open || !ch.closed
				continue
			}
			if ch.sent == 0 {
				d.start(a, st, ch)
			}
			d.delta(a, st, ch, ch.sent, n-ch.sent, last)
			ch.sent, ch.closed = n, last
			open = open || !last
		}
		if !open {
			break
		}
	}
	c.s.outside(a)
	d.end(a, st)
	return st.close()
}

// text appends the text of n tokens of a choice.
func (a *answer) text(dst []byte, ch *choice, from, n int) []byte {
	f := a.c.f
	if f.Chunks == 0 || f.ChunkBytes == 0 {
		for i := range n {
			dst = appendTokenText(dst, answerToken(ch.seed, from+i, ch.emoji))
		}
		return dst
	}
	per := f.ChunkBytes
	if ch.emoji {
		per = max(4, per/4*4) // whole characters
	}
	for i := from; i < from+n; i++ {
		end := len(dst) + per
		for j := 0; len(dst) < end; j++ {
			dst = appendTokenText(dst, answerToken(ch.seed+uint64(i), j, ch.emoji))
		}
		dst = dst[:end]
	}
	return dst
}

// completionTokens counts what was generated.
func (a *answer) completionTokens() (n int) {
	for _, ch := range a.choices {
		n += ch.tokens()
	}
	return n
}

// cached returns the prompt tokens that came from the cache, for the first
// choice as vLLM has it, and those that are in the cache now because of it.
func (a *answer) cached() (cached, created int) {
	ch := a.choices[0]
	if !ch.started() {
		return 0, 0
	}
	return ch.cached, ch.created
}

// appendUsage appends the usage object of the OpenAI APIs. full has the fields
// of plain answers; chat has the count of created tokens.
func (a *answer) appendUsage(dst []byte, full, chat bool) []byte {
	completion := a.completionTokens()
	dst = appendInt(append(dst, `{"prompt_tokens":`...), a.promptTokens)
	dst = appendInt(append(dst, `,"total_tokens":`...), a.promptTokens+completion)
	dst = appendInt(append(dst, `,"completion_tokens":`...), completion)
	cached, created := a.cached()
	switch {
	case !a.c.s.opt.NoUsageDetail:
		dst = appendInt(append(dst, `,"prompt_tokens_details":{"cached_tokens":`...), cached)
		if chat {
			dst = appendInt(append(dst, `,"created_cache_tokens":`...), created)
		} else if full {
			dst = append(dst, `,"created_cache_tokens":null`...)
		}
		if full {
			dst = append(dst, `,"multimodal_tokens":null`...)
		}
		dst = append(dst, '}')
	case full:
		dst = append(dst, `,"prompt_tokens_details":null`...)
	}
	if full {
		dst = append(dst, `,"completion_tokens_details":null`...)
	}
	return append(dst, '}')
}

// appendContinuous appends the usage field of an event in between.
func (a *answer) appendContinuous(dst []byte) []byte {
	if !a.continuous {
		return dst
	}
	n := 0
	for _, ch := range a.choices {
		n += ch.sent
	}
	dst = appendInt(append(dst, `,"usage":{"prompt_tokens":`...), a.promptTokens)
	dst = appendInt(append(dst, `,"total_tokens":`...), a.promptTokens+n)
	dst = appendInt(append(dst, `,"completion_tokens":`...), n)
	return append(dst, `,"completion_tokens_details":null}`...)
}
