package fakevllm

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"mime/multipart"
	"slices"
	"strconv"

	"github.com/cespare/xxhash/v2"
)

// tokenize answers POST /tokenize for a prompt or a conversation.
func (c *conn) tokenize() error {
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	if _, err := c.served(f); err != nil {
		return c.refuse(err)
	}
	var (
		tokens []uint32
		named  bool
	)
	if given(f["messages"]) {
		tokens, err = chatPrompt(f)
	} else if err = required(f, "prompt"); err == nil {
		var text string
		err = field(f, "prompt", &text)
		tokens = appendText(nil, text)
	}
	if err == nil {
		err = field(f, "return_token_strs", &named)
	}
	if err != nil {
		return c.refuse(err)
	}
	b := appendInt([]byte(`{"count":`), len(tokens))
	b = appendInt(append(b, `,"max_model_len":`...), c.s.opt.MaxModelLen)
	b = append(appendTokens(append(b, `,"tokens":`...), tokens), `,"token_strs":`...)
	if named {
		for i, t := range tokens {
			sep := byte(',')
			if i == 0 {
				sep = '['
			}
			b = appendString(append(b, sep), string(appendTokenText(nil, t)))
		}
		b = append(b, "]}"...)
	} else {
		b = append(b, "null}"...)
	}
	return c.reply(200, contentJSON, b)
}

func appendTokens(dst []byte, tokens []uint32) []byte {
	dst = append(dst, '[')
	for i, t := range tokens {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(t), 10)
	}
	return append(dst, ']')
}

func (c *conn) detokenize() error {
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	var tokens []uint32
	_, err = c.served(f)
	if err == nil {
		err = required(f, "tokens")
	}
	if err == nil {
		err = field(f, "tokens", &tokens)
	}
	if err != nil {
		return c.refuse(err)
	}
	return c.reply(200, contentJSON, append(appendString([]byte(`{"prompt":`), detokenize(tokens)), '}'))
}

// rendered appends what the render endpoints return for one prompt: the
// tokens, and the request to /inference/v1/generate that has the same answer.
func (c *conn) rendered(dst []byte, f fields, id, model string, tokens []uint32, most int) ([]byte, error) {
	var (
		salt   *string
		stream bool
	)
	if err := field(f, "cache_salt", &salt); err != nil {
		return nil, err
	}
	if err := field(f, "stream", &stream); err != nil {
		return nil, err
	}
	dst = appendTokens(append(append(append(dst, `{"request_id":"`...), id...), `","token_ids":`...), tokens)
	dst = append(dst, `,"token_offsets":null,"features":null,"content_parts":null,"sampling_params":{"temperature":1.0,"top_p":1.0,"max_tokens":`...)
	dst = appendInt(dst, most)
	dst = appendString(append(dst, `},"model":`...), model)
	dst = append(strconv.AppendBool(append(dst, `,"output_mode":"tokens","stream":`...), stream), `,"stream_options":null,"cache_salt":`...)
	if salt == nil {
		dst = append(dst, "null"...)
	} else {
		dst = appendString(dst, *salt)
	}
	return append(dst, `,"priority":0,"kv_transfer_params":null,"ec_transfer_params":null}`...), nil
}

func (c *conn) renderChat() error {
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	tokens, err := chatPrompt(f)
	if err != nil {
		return c.refuse(err)
	}
	b, err := c.renderAll(nil, f, "chatcmpl-", [][]uint32{tokens}, "max_completion_tokens", "max_tokens")
	if err != nil {
		return c.refuse(err)
	}
	return c.reply(200, contentJSON, b)
}

func (c *conn) renderCompletions() error {
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	prompts, err := textPrompts(f, "prompt")
	if err != nil {
		return c.refuse(err)
	}
	b, err := c.renderAll([]byte{'['}, f, "cmpl-", prompts, "max_tokens")
	if err != nil {
		return c.refuse(err)
	}
	return c.reply(200, contentJSON, append(b, ']'))
}

func (c *conn) renderAll(dst []byte, f fields, prefix string, prompts [][]uint32, limits ...string) ([]byte, error) {
	model, err := c.served(f)
	if err != nil {
		return nil, err
	}
	p, err := c.sampling(f, limits...)
	if err != nil {
		return nil, err
	}
	for i, tokens := range prompts {
		if _, _, err := c.s.length(p, len(tokens)); err != nil {
			return nil, err
		}
		id := prefix + c.rid
		if len(prompts) > 1 {
			id += "-" + strconv.Itoa(i)
		}
		if i > 0 {
			dst = append(dst, ',')
		}
		most := p.max
		if most == 0 {
			most = c.s.opt.MaxModelLen - len(tokens)
		}
		if dst, err = c.rendered(dst, f, id, model, tokens, most); err != nil {
			return nil, err
		}
	}
	return dst, nil
}

// generate is POST /inference/v1/generate: tokens in, tokens out.
func (c *conn) generate() error {
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	var tokens []uint32
	if err = required(f, "token_ids"); err == nil {
		err = field(f, "token_ids", &tokens)
	}
	if err != nil {
		return c.refuse(err)
	}
	eachField(f["sampling_params"], func(key, value []byte) { f[string(key)] = value })
	a, err := c.begin(f, "generate-tokens-", [][]uint32{tokens}, "max_tokens")
	if err != nil {
		return c.refuse(err)
	}
	return c.run(a, generateDialect{})
}

type generateDialect struct{}

func (generateDialect) open(*answer, *stream)           {}
func (generateDialect) start(*answer, *stream, *choice) {}

// tokens appends one choice with n of its tokens.
func (a *answer) tokens(dst []byte, c *choice, from, n int, last bool) []byte {
	dst = appendInt(append(dst, `{"index":`...), c.index)
	dst = append(dst, `,"finish_reason":`...)
	if dst = c.appendFinish(dst, last); !last {
		dst = append(dst, `,"stop_reason":null`...)
	}
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = answerToken(c.seed, from+i, c.emoji)
	}
	return append(appendTokens(append(dst, `,"token_ids":`...), tokens), `,"routed_experts":null,"sampling_mask":null,"logprobs":null}`...)
}

func (generateDialect) delta(a *answer, st *stream, c *choice, from, n int, last bool) {
	b := append(append(st.body[:0], `{"request_id":"`...), a.id...)
	b = a.tokens(append(b, `","usage":null,"output_mode":"tokens","choices":[`...), c, from, n, last)
	st.body = append(b, "]}"...)
	st.data(st.body)
	c.sent = from + n
}

func (generateDialect) end(a *answer, st *stream) {
	if a.usage {
		b := append(append(st.body[:0], `{"request_id":"`...), a.id...)
		b = a.appendUsage(append(b, `","usage":`...), false, false)
		st.body = append(b, `,"output_mode":"tokens","choices":[]}`...)
		st.data(st.body)
	}
	st.data([]byte("[DONE]"))
}

func (generateDialect) full(a *answer) []byte {
	b := append(append([]byte(nil), `{"request_id":"`...), a.id...)
	b = appendInt(append(appendString(append(b, `","model":`...), a.model), `,"created":`...), int(a.created))
	b = a.appendUsage(append(b, `,"usage":`...), true, false)
	b = append(b, `,"prompt_logprobs":null,"prompt_token_ids":null,"metrics":null,"kv_transfer_params":null,"ec_transfer_params":null,"output_mode":"tokens","choices":[`...)
	for i, c := range a.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = a.tokens(b, c, 0, c.tokens(), true)
	}
	return append(b, "]}"...)
}

// embeddingSize is the length of a vector.
const embeddingSize = 8

// embeddingDialect is /v1/embeddings. The vectors depend on the input alone.
type embeddingDialect struct{ base64 bool }

func (c *conn) embeddings() error {
	f, err := c.jsonBody()
	if err != nil {
		return c.refuse(err)
	}
	var (
		inputs [][]uint32
		format string
	)
	if given(f["messages"]) {
		var tokens []uint32
		tokens, err = chatPrompt(f)
		inputs = [][]uint32{tokens}
	} else {
		inputs, err = textPrompts(f, "input")
	}
	if err == nil {
		err = field(f, "encoding_format", &format)
	}
	if err != nil {
		return c.refuse(err)
	}
	delete(f, "n")
	delete(f, "stream")
	a, err := c.begin(f, "embd-", inputs)
	if err != nil {
		return c.refuse(err)
	}
	for _, ch := range a.choices {
		ch.want, ch.finish = 0, "stop"
	}
	return c.run(a, embeddingDialect{base64: format == "base64"})
}

func (embeddingDialect) open(*answer, *stream)                           {}
func (embeddingDialect) start(*answer, *stream, *choice)                 {}
func (embeddingDialect) delta(*answer, *stream, *choice, int, int, bool) {}
func (embeddingDialect) end(*answer, *stream)                            {}
func (d embeddingDialect) full(a *answer) []byte {
	b := append(append([]byte(nil), `{"id":"`...), a.id...)
	b = appendInt(append(b, `","object":"list","created":`...), int(a.created))
	b = append(appendString(append(b, `,"model":`...), a.model), `,"data":[`...)
	for i, c := range a.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendInt(append(b, `{"index":`...), i), `,"object":"embedding","embedding":`...)
		b = append(d.vector(b, c.prompt), '}')
	}
	n := strconv.Itoa(a.promptTokens)
	return append(b, `],"usage":{"prompt_tokens":`+n+`,"total_tokens":`+n+`,"completion_tokens":0,"prompt_tokens_details":null}}`...)
}

func (d embeddingDialect) vector(dst []byte, prompt []uint32) []byte {
	_, h := blockHashes(nil, 0, prompt, max(1, len(prompt)))
	raw := make([]byte, 0, 4*embeddingSize)
	for i := range embeddingSize {
		h = mix(h + 1)
		v := float32(int64(h>>40)-1<<23) / (1 << 23)
		if d.base64 {
			raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
			continue
		}
		sep := byte(',')
		if i == 0 {
			sep = '['
		}
		dst = strconv.AppendFloat(append(dst, sep), float64(v), 'g', -1, 32)
	}
	if d.base64 {
		return appendString(dst, base64.StdEncoding.EncodeToString(raw))
	}
	return append(dst, ']')
}

// audioDialect is /v1/audio/transcriptions and /v1/audio/translations.
type audioDialect struct {
	format  string
	seconds int
}

// audio reads the form. A file counts as 50 tokens per second of 16 kHz, 16 bit
// sound, 640 bytes each.
func (c *conn) audio() error {
	boundary := c.req.Header.MultipartFormBoundary()
	if len(boundary) == 0 {
		return c.refuse(invalid("body.file", "{'type': 'missing', 'loc': 'body.file', 'msg': 'Field required'}"))
	}
	f := fields{}
	var file []byte
	r := multipart.NewReader(bytes.NewReader(c.req.Body()), string(boundary))
	for {
		part, err := r.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		var value []byte
		if err == nil {
			value, err = io.ReadAll(part)
		}
		if err != nil {
			return c.refuse(invalid("body", "{'type': 'multipart', 'loc': 'body', 'msg': %q}", err))
		}
		switch name := part.FormName(); name {
		case "file":
			file = value
		case "stream", "stream_include_usage":
			f[name] = value
		default:
			f[name] = appendString(nil, string(value))
		}
	}
	if len(file) == 0 {
		return c.refuse(invalid("body.file", "{'type': 'missing', 'loc': 'body.file', 'msg': 'Field required'}"))
	}
	format := "json"
	if err := field(f, "response_format", &format); err != nil {
		return c.refuse(err)
	}
	prompt := make([]uint32, 0, len(file)/640+1)
	for chunk := range slices.Chunk(file, 640) {
		prompt = append(prompt, uint32(xxhash.Sum64(chunk)>>33))
	}
	a, err := c.begin(f, "trsc-", [][]uint32{prompt})
	if err == nil {
		err = field(f, "stream_include_usage", &a.usage)
	}
	if err != nil {
		return c.refuse(err)
	}
	return c.run(a, audioDialect{format: format, seconds: len(file)/32000 + 1})
}

func (audioDialect) open(*answer, *stream)           {}
func (audioDialect) start(*answer, *stream, *choice) {}

func (audioDialect) delta(a *answer, st *stream, c *choice, from, n int, last bool) {
	b := a.head(st.body[:0], "transcription.chunk")
	b = append(a.text(append(b, `{"delta":{"content":"`...), c, from, n), `"},"finish_reason":`...)
	if b = c.appendFinish(b, last); !last {
		b = append(b, `,"stop_reason":null`...)
	}
	c.sent = from + n
	st.body = append(b, "}]}"...)
	st.data(st.body)
}

func (audioDialect) end(a *answer, st *stream) { a.endOpenAI(st, "transcription.chunk", false) }

func (d audioDialect) full(a *answer) []byte {
	c := a.choices[0]
	text := a.text(nil, c, 0, c.tokens())
	switch d.format {
	case "text":
		return append(text, '\n')
	case "verbose_json":
		return fmt.Appendf(nil, `{"duration":"%d.0","language":"en","text":%s,"segments":null,"words":null}`, d.seconds, appendString(nil, string(text)))
	}
	return fmt.Appendf(nil, `{"text":%s,"usage":{"type":"duration","seconds":%d}}`, appendString(nil, string(text)), d.seconds)
}
