package fakevllm

import (
	"encoding/json"
	"strings"
)

// streamOptions reads stream and stream_options.
func (a *answer) streamOptions(f fields) error {
	if err := field(f, "stream", &a.stream); err != nil {
		return err
	}
	if !given(f["stream_options"]) {
		return nil
	}
	if !a.stream {
		return badRequest("stream_options", "stream_options need stream=true. (parameter=stream_options)")
	}
	var o struct {
		IncludeUsage         bool `json:"include_usage"`
		ContinuousUsageStats bool `json:"continuous_usage_stats"`
	}
	err := field(f, "stream_options", &o)
	a.usage, a.continuous = o.IncludeUsage, o.IncludeUsage && o.ContinuousUsageStats
	return err
}

// sampling reads the length of the answer; limits are the fields that bound it, the first given counts.
func (c *conn) sampling(f fields, limits ...string) (p sampling, err error) {
	for _, key := range limits {
		if given(f[key]) && p.max == 0 {
			if err := field(f, key, &p.max); err != nil {
				return p, err
			}
			if p.max <= 0 {
				return p, badRequest(key, "%s must be at least 1, got %d. (parameter=%s, value=%d)", key, p.max, key, p.max)
			}
		}
	}
	if err := field(f, "min_tokens", &p.min); err != nil {
		return p, err
	}
	if err := field(f, "n", &p.n); err != nil {
		return p, err
	}
	return p, field(f, "ignore_eos", &p.ignoreEOS)
}

// chatPrompt reads messages and applies the template.
func chatPrompt(f fields) ([]uint32, error) {
	if err := required(f, "messages"); err != nil {
		return nil, err
	}
	var turns []turn
	if err := field(f, "messages", &turns); err != nil {
		return nil, err
	}
	if len(turns) == 0 {
		return nil, badRequest("", "There is no message to apply the chat template to.")
	}
	prompt, goesOn := true, false
	if err := field(f, "add_generation_prompt", &prompt); err != nil {
		return nil, err
	}
	if err := field(f, "continue_final_message", &goesOn); err != nil {
		return nil, err
	}
	return render(f["tools"], turns, prompt && !goesOn), nil
}

// textPrompts reads the four shapes of a prompt: text, texts, tokens, lists of tokens.
func textPrompts(f fields, key string) ([][]uint32, error) {
	raw := f[key]
	var (
		text   string
		texts  []string
		tokens []uint32
		lists  [][]uint32
	)
	switch {
	case !given(raw):
		return nil, badRequest(key, "%s must be given and not be empty. (parameter=%s)", key, key)
	case json.Unmarshal(raw, &text) == nil:
		texts = []string{text}
	case json.Unmarshal(raw, &texts) == nil:
	case json.Unmarshal(raw, &tokens) == nil:
		return [][]uint32{tokens}, nil
	case json.Unmarshal(raw, &lists) == nil:
		return lists, nil
	default:
		return nil, invalid("body."+key, "{'type': 'type_error', 'loc': 'body.%s', 'msg': 'text, texts, tokens or lists of tokens are needed'}", key)
	}
	for _, t := range texts {
		lists = append(lists, appendText(nil, t))
	}
	for _, l := range lists {
		if len(l) == 0 {
			return nil, badRequest(key, "%s must be given and not be empty. (parameter=%s)", key, key)
		}
	}
	return lists, nil
}

// begin reads what the chat and completion APIs share.
func (c *conn) begin(f fields, prefix string, prompts [][]uint32, limits ...string) (*answer, error) {
	model, err := c.served(f)
	if err != nil {
		return nil, err
	}
	p, err := c.sampling(f, limits...)
	if err != nil {
		return nil, err
	}
	var salt string
	if err := field(f, "cache_salt", &salt); err != nil {
		return nil, err
	}
	a, err := c.newAnswer(prefix, model, salt, prompts, p)
	if err != nil {
		return nil, err
	}
	return a, a.streamOptions(f)
}

func (c *conn) chat() error {
	if c.s.opt.Instant {
		return c.instant("chatcmpl-", chatDialect{})
	}
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	prompt, err := chatPrompt(f)
	if err != nil {
		return c.refuse(err)
	}
	a, err := c.begin(f, "chatcmpl-", [][]uint32{prompt}, "max_completion_tokens", "max_tokens")
	if err != nil {
		return c.refuse(err)
	}
	return c.run(a, chatDialect{})
}

func (c *conn) completions() error {
	if c.s.opt.Instant {
		return c.instant("cmpl-", textDialect{})
	}
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	prompts, err := textPrompts(f, "prompt")
	if err != nil {
		return c.refuse(err)
	}
	if !given(f["max_tokens"]) {
		f["max_tokens"] = json.RawMessage("16")
	}
	a, err := c.begin(f, "cmpl-", prompts, "max_tokens")
	if err == nil {
		err = field(f, "echo", &a.echo)
	}
	if err != nil {
		return c.refuse(err)
	}
	return c.run(a, textDialect{})
}

// instant answers without the engine and without looking closely.
func (c *conn) instant(prefix string, d dialect) error {
	a := &answer{c: c, id: prefix + c.rid, model: c.s.opt.Models[0], created: c.s.started.Unix()}
	body := c.req.Body()
	a.promptTokens = (len(body) + 3) / 4
	ch := &choice{want: c.s.opt.OutputTokens, finish: "stop", model: a.model}
	a.choices = []*choice{ch}
	eachField(body, func(key, value []byte) {
		switch string(key) {
		case "stream":
			a.stream = string(value) == "true"
		case "stream_options":
			eachField(value, func(key, value []byte) {
				a.usage = a.usage || string(key) == "include_usage" && string(value) == "true"
			})
		case "max_tokens", "max_completion_tokens":
			if n := atoi(value); n > 0 && n <= ch.want {
				ch.want, ch.finish = n, "length"
			}
		}
	})
	return c.run(a, d)
}

func atoi(b []byte) (n int) {
	for _, d := range b {
		if d < '0' || d > '9' || n > 1<<30 {
			return 0
		}
		n = 10*n + int(d-'0')
	}
	return n
}

// chatDialect is /v1/chat/completions.
type chatDialect struct{}

func (chatDialect) open(*answer, *stream) {}

// head appends the start of a chunk up to its choices.
func (a *answer) head(dst []byte, object string) []byte {
	dst = append(append(dst, `{"id":`...), '"')
	dst = append(append(dst, a.id...), `","object":"`...)
	dst = append(append(dst, object...), `","created":`...)
	dst = appendInt(dst, int(a.created))
	return append(appendString(append(dst, `,"model":`...), a.model), `,"choices":[`...)
}

func (chatDialect) start(a *answer, st *stream, c *choice) {
	b := a.head(st.body[:0], "chat.completion.chunk")
	b = appendInt(append(b, `{"index":`...), c.index)
	b = append(b, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
	b = a.appendContinuous(b)
	st.body = append(b, `,"prompt_token_ids":null,"prompt_text":null}`...)
	st.data(st.body)
}

func (chatDialect) delta(a *answer, st *stream, c *choice, from, n int, last bool) {
	b := a.head(st.body[:0], "chat.completion.chunk")
	b = appendInt(append(b, `{"index":`...), c.index)
	b = append(a.text(append(b, `,"delta":{"content":"`...), c, from, n), `"},"logprobs":null,"finish_reason":`...)
	b = append(c.appendFinish(b, last), `,"token_ids":null}]`...)
	c.sent = from + n
	b = a.appendContinuous(b)
	if last && !a.usage {
		b = append(b, `,"system_fingerprint":"`+fingerprint+`"`...)
	}
	st.body = append(b, '}')
	st.data(st.body)
}

// appendFinish appends the values of finish_reason and stop_reason.
func (c *choice) appendFinish(dst []byte, last bool) []byte {
	if !last {
		return append(dst, "null"...)
	}
	return append(append(append(append(dst, '"'), c.finish...), '"'), `,"stop_reason":null`...)
}

func (chatDialect) end(a *answer, st *stream) { a.endOpenAI(st, "chat.completion.chunk", true) }

// endOpenAI writes the usage chunk and the terminator.
func (a *answer) endOpenAI(st *stream, object string, chat bool) {
	if a.usage {
		b := append(a.head(st.body[:0], object), `],"usage":`...)
		b = a.appendUsage(b, false, chat)
		st.body = append(b, `,"system_fingerprint":"`+fingerprint+`"}`...)
		st.data(st.body)
	}
	st.data([]byte("[DONE]"))
}

func (chatDialect) full(a *answer) []byte {
	b := a.head(nil, "chat.completion")
	for i, c := range a.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendInt(append(b, `{"index":`...), c.index)
		b = a.text(append(b, `,"message":{"role":"assistant","content":"`...), c, 0, c.tokens())
		b = append(b, `","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":`...)
		b = append(c.appendFinish(b, true), `,"token_ids":null,"routed_experts":null}`...)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":"`+fingerprint+`","usage":`...)
	b = a.appendUsage(b, true, true)
	return append(b, `,"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`...)
}

// textDialect is /v1/completions.
type textDialect struct{}

func (textDialect) open(*answer, *stream)           {}
func (textDialect) start(*answer, *stream, *choice) {}

func (textDialect) delta(a *answer, st *stream, c *choice, from, n int, last bool) {
	b := a.head(st.body[:0], "text_completion")
	b = appendInt(append(b, `{"index":`...), c.index)
	b = a.echoed(append(b, `,"text":"`...), c, from)
	b = append(a.text(b, c, from, n), `","logprobs":null,"finish_reason":`...)
	if b = c.appendFinish(b, last); !last {
		b = append(b, `,"stop_reason":null`...)
	}
	b = append(b, `,"prompt_token_ids":null,"token_ids":null}]`...)
	c.sent = from + n
	st.body = append(a.appendContinuous(b), '}')
	st.data(st.body)
}

// echoed appends the prompt before the first token when the client wants it back.
func (a *answer) echoed(dst []byte, c *choice, from int) []byte {
	if !a.echo || from > 0 {
		return dst
	}
	quoted := appendString(nil, detokenize(c.prompt))
	return append(dst, strings.TrimSuffix(string(quoted[1:]), `"`)...)
}

func (textDialect) end(a *answer, st *stream) { a.endOpenAI(st, "text_completion", false) }

func (textDialect) full(a *answer) []byte {
	b := a.head(nil, "text_completion")
	for i, c := range a.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendInt(append(b, `{"index":`...), c.index)
		b = a.echoed(append(b, `,"text":"`...), c, 0)
		b = a.text(b, c, 0, c.tokens())
		b = append(c.appendFinish(append(b, `","logprobs":null,"finish_reason":`...), true),
			`,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}`...)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":"`+fingerprint+`","usage":`...)
	b = a.appendUsage(b, true, false)
	return append(b, `,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`...)
}
