package fakevllm

import "encoding/json"

// responsesDialect is /v1/responses. Its stream ends with response.completed
// and without [DONE].
type responsesDialect struct{}

func (c *conn) responses() error {
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	turns, err := responseTurns(f)
	if err != nil {
		return c.refuse(err)
	}
	a, err := c.begin(f, "resp_", [][]uint32{render(f["tools"], turns, true)}, "max_output_tokens")
	if err != nil {
		return c.refuse(err)
	}
	return c.run(a, responsesDialect{})
}

// responseTurns reads instructions and input.
func responseTurns(f fields) ([]turn, error) {
	if err := required(f, "input"); err != nil {
		return nil, err
	}
	var turns []turn
	if given(f["instructions"]) {
		turns = append(turns, turn{Role: "system", Content: f["instructions"]})
	}
	var text string
	if json.Unmarshal(f["input"], &text) == nil {
		return append(turns, turn{Role: "user", Content: f["input"]}), nil
	}
	var items []turn
	if err := field(f, "input", &items); err != nil {
		return nil, err
	}
	return append(turns, items...), nil
}

// message appends the output item.
func (a *answer) message(dst []byte, status string, text bool) []byte {
	dst = append(append(dst, `{"id":"msg_`...), a.c.rid...)
	dst = append(dst, `","content":[`...)
	if text {
		dst = append(a.outputText(dst, "null"), ']')
	} else {
		dst = append(dst, ']')
	}
	return append(append(append(dst, `,"role":"assistant","status":"`...), status...), `","type":"message","phase":null}`...)
}

func (a *answer) outputText(dst []byte, logprobs string) []byte {
	c := a.choices[0]
	dst = a.text(append(dst, `{"annotations":[],"text":"`...), c, 0, c.sent)
	return append(append(append(dst, `","type":"output_text","logprobs":`...), logprobs...), '}')
}

// response appends the response object; ended says whether it has output and usage.
func (a *answer) response(dst []byte, ended bool) []byte {
	c := a.choices[0]
	dst = append(append(dst, `{"id":"`...), a.id...)
	dst = append(appendInt(append(dst, `","created_at":`...), int(a.created)), `,"incomplete_details":`...)
	status := "in_progress"
	if ended {
		status = "completed"
	}
	if ended && c.finish == "length" {
		status = "incomplete"
		dst = append(dst, `{"reason":"max_output_tokens"}`...)
	} else {
		dst = append(dst, "null"...)
	}
	dst = appendString(append(dst, `,"instructions":null,"metadata":null,"model":`...), a.model)
	dst = append(dst, `,"object":"response","output":[`...)
	if ended {
		dst = a.message(dst, "completed", true)
	}
	dst = append(dst, `],"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"none","tools":[],"top_p":1.0,"background":false,"max_output_tokens":`...)
	dst = appendInt(dst, c.want)
	dst = append(dst, `,"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto","status":"`...)
	dst = append(append(dst, status...), `","text":null,"top_logprobs":null,"truncation":"disabled","usage":`...)
	if ended {
		cached, created := a.cached()
		if a.c.s.opt.NoUsageDetail {
			cached, created = 0, 0
		}
		dst = appendInt(append(dst, `{"input_tokens":`...), a.promptTokens)
		dst = appendInt(append(dst, `,"input_tokens_details":{"cached_tokens":`...), cached)
		dst = appendInt(append(dst, `,"cache_write_tokens":`...), created)
		dst = appendInt(append(dst, `,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]},"output_tokens":`...), c.sent)
		dst = append(dst, `,"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]},"total_tokens":`...)
		dst = append(appendInt(dst, a.promptTokens+c.sent), '}')
	} else {
		dst = append(dst, "null"...)
	}
	return append(dst, `,"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}`...)
}

// send writes an event: the fields that f appends, then its number and type.
func (a *answer) send(st *stream, kind string, f func(dst []byte) []byte) {
	b := f(append(st.body[:0], '{'))
	b = appendInt(append(b, `,"sequence_number":`...), a.seq)
	b = append(append(append(b, `,"type":"`...), kind...), `"}`...)
	a.seq++
	st.body = b
	st.event(kind, b)
}

func (responsesDialect) open(a *answer, st *stream) {
	for _, kind := range []string{"response.created", "response.in_progress"} {
		a.send(st, kind, func(b []byte) []byte { return a.response(append(b, `"response":`...), false) })
	}
}

func (responsesDialect) start(a *answer, st *stream, _ *choice) {
	a.send(st, "response.output_item.added", func(b []byte) []byte {
		return append(a.message(append(b, `"item":`...), "in_progress", false), `,"output_index":0`...)
	})
	a.send(st, "response.content_part.added", func(b []byte) []byte {
		b = append(a.place(b), `,"part":`...)
		return append(b, `{"annotations":[],"text":"","type":"output_text","logprobs":[]}`...)
	})
}

// place appends the fields that say which part of the output an event is about.
func (a *answer) place(dst []byte) []byte {
	return append(append(append(dst, `"content_index":0,"item_id":"msg_`...), a.c.rid...), `","output_index":0`...)
}

func (responsesDialect) delta(a *answer, st *stream, c *choice, from, n int, last bool) {
	c.sent = from + n
	if n > 0 {
		a.send(st, "response.output_text.delta", func(b []byte) []byte {
			return append(a.text(append(a.place(b), `,"delta":"`...), c, from, n), `","logprobs":[]`...)
		})
	}
	if !last {
		return
	}
	a.send(st, "response.output_text.done", func(b []byte) []byte {
		return append(a.text(append(a.place(b), `,"logprobs":[],"text":"`...), c, 0, c.sent), '"')
	})
	a.send(st, "response.content_part.done", func(b []byte) []byte {
		return a.outputText(append(a.place(b), `,"part":`...), "null")
	})
	a.send(st, "response.output_item.done", func(b []byte) []byte {
		return append(a.message(append(b, `"item":`...), "completed", true), `,"output_index":0`...)
	})
}

func (responsesDialect) end(a *answer, st *stream) {
	a.send(st, "response.completed", func(b []byte) []byte { return a.response(append(b, `"response":`...), true) })
}

func (responsesDialect) full(a *answer) []byte {
	c := a.choices[0]
	c.sent = c.tokens()
	return a.response(nil, true)
}
