package fakevllm

import "strconv"

// messagesDialect is /v1/messages, Anthropic's API. Its stream ends with
// message_stop and without [DONE].
type messagesDialect struct{}

// messagesPrompt reads system and messages.
func messagesPrompt(f fields) ([]uint32, error) {
	if err := required(f, "messages"); err != nil {
		return nil, err
	}
	var turns, messages []turn
	if given(f["system"]) {
		turns = append(turns, turn{Role: "system", Content: f["system"]})
	}
	if err := field(f, "messages", &messages); err != nil {
		return nil, err
	}
	if len(messages) == 0 {
		return nil, badRequest("", "There is no message to apply the chat template to.")
	}
	return render(f["tools"], append(turns, messages...), true), nil
}

func (c *conn) messages() error {
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	if err := required(f, "max_tokens"); err != nil {
		return c.refuse(err)
	}
	prompt, err := messagesPrompt(f)
	if err != nil {
		return c.refuse(err)
	}
	delete(f, "n") // unknown to this API
	a, err := c.begin(f, "chatcmpl-", [][]uint32{prompt}, "max_tokens")
	if err != nil {
		return c.refuse(err)
	}
	return c.run(a, messagesDialect{})
}

func (c *conn) countTokens() error {
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	if _, err := c.served(f); err != nil {
		return c.refuse(err)
	}
	prompt, err := messagesPrompt(f)
	if err != nil {
		return c.refuse(err)
	}
	n := strconv.Itoa(len(prompt))
	return c.json(200, `{"input_tokens":`+n+`,"context_management":{"original_input_tokens":`+n+`}}`)
}

// anthropicUsage appends the usage object: input_tokens are those that were
// neither read from the cache nor written to it.
func (a *answer) anthropicUsage(dst []byte) []byte {
	cached, created := a.cached()
	if a.c.s.opt.NoUsageDetail {
		cached, created = 0, 0
	}
	dst = appendInt(append(dst, `{"input_tokens":`...), max(0, a.promptTokens-cached-created))
	dst = appendInt(append(dst, `,"output_tokens":`...), a.completionTokens())
	if !a.c.s.opt.NoUsageDetail {
		dst = appendInt(append(dst, `,"cache_creation_input_tokens":`...), created)
		dst = appendInt(append(dst, `,"cache_read_input_tokens":`...), cached)
	}
	return append(dst, '}')
}

func (c *choice) stopReason() string {
	switch c.finish {
	case "length":
		return `"max_tokens"`
	case "stop":
		return `"end_turn"`
	}
	return "null"
}

func (messagesDialect) open(*answer, *stream) {}

func (messagesDialect) start(a *answer, st *stream, _ *choice) {
	b := append(append(st.body[:0], `{"type":"message_start","message":{"id":"`...), a.id...)
	b = appendString(append(b, `","type":"message","role":"assistant","content":[],"model":`...), a.model)
	b = appendInt(append(b, `,"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":`...), a.promptTokens)
	st.body = append(b, `,"output_tokens":0}}}`...)
	st.event("message_start", st.body)
	st.event("content_block_start", []byte(`{"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}`))
}

func (messagesDialect) delta(a *answer, st *stream, c *choice, from, n int, last bool) {
	if c.sent = from + n; n > 0 {
		b := append(st.body[:0], `{"type":"content_block_delta","delta":{"type":"text_delta","text":"`...)
		st.body = append(a.text(b, c, from, n), `"},"index":0}`...)
		st.event("content_block_delta", st.body)
	}
	if last {
		st.event("content_block_stop", []byte(`{"type":"content_block_stop","index":0}`))
	}
}

func (messagesDialect) end(a *answer, st *stream) {
	b := append(st.body[:0], `{"type":"message_delta","delta":{"stop_reason":`...)
	b = append(append(b, a.choices[0].stopReason()...), `,"stop_sequence":null},"usage":`...)
	st.body = append(a.anthropicUsage(b), '}')
	st.event("message_delta", st.body)
	st.event("message_stop", []byte(`{"type":"message_stop"}`))
}

func (messagesDialect) full(a *answer) []byte {
	c := a.choices[0]
	b := append(append([]byte(nil), `{"id":"`...), a.id...)
	b = append(b, `","type":"message","role":"assistant","content":[{"type":"text","text":"`...)
	b = a.text(b, c, 0, c.tokens())
	b = appendString(append(b, `"}],"model":`...), a.model)
	b = append(append(append(b, `,"stop_reason":`...), c.stopReason()...), `,"usage":`...)
	return append(a.anthropicUsage(b), '}')
}
