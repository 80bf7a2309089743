package routing

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"image"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// reference is the specification of the parsers: it decodes a body with
// encoding/json, without regard for time or memory, and writes down the tokens
// of its prompts. It knows the default estimate and no headers. ok is false
// where encoding/json refuses a body that we accept.
func reference(api API, body []byte) (prompts [][]byte, exact, ok bool) {
	b := refBody{}
	if json.Unmarshal(body, &b.fields) != nil {
		return nil, false, false
	}
	ok = true
	defer func() {
		if recover() != nil { // a number beyond float64
			prompts, exact, ok = nil, false, false
		}
	}()
	switch api {
	case APIChat, APIChatBatch:
		messages := b.array("messages")
		if tools := b.array("tools"); len(tools) > 0 {
			b.text(canonicalJSON(b.fields["tools"]))
		}
		if api == APIChatBatch && len(messages) > 0 && messages[0][0] == '[' {
			messages = array(messages[0])
		}
		b.messages(messages, b.chatBlock)
	case APIMessages:
		b.anthropicTools()
		b.anthropicSystem()
		b.messages(b.array("messages"), b.anthropicBlock)
	case APICompletions:
		return b.completions(b.fields["prompt"])
	case APIGenerate:
		for _, field := range []string{"token_ids", "input_ids"} {
			if prompts := tokenIDs(b.fields[field]); len(prompts) > 0 {
				return prompts, true, true
			}
		}
		return nil, false, true
	case APIEmbeddings:
		in := b.fields["input"]
		if prompts := tokenIDs(in); len(prompts) > 0 {
			return prompts, true, true
		}
		var holder struct {
			Raw      string
			Strings  []string
			TokenIDs []uint32
		}
		if s, isString := str(in); isString {
			holder.Raw = s
		}
		for _, e := range array(in) {
			s, isString := str(e)
			if !isString {
				holder.Strings = nil
				break
			}
			holder.Strings = append(holder.Strings, s)
		}
		if holder.Raw != "" || holder.Strings != nil {
			b.text(marshal(holder))
		} else {
			b.messages(b.array("messages"), b.chatBlock)
		}
	case APIResponses:
		if b.has("input") {
			var all []map[string]any
			for _, field := range []string{"instructions", "tools", "input"} {
				if b.has(field) {
					var v any
					if json.Unmarshal(b.fields[field], &v) != nil {
						panic("a number beyond float64")
					}
					all = append(all, map[string]any{field: v})
				}
			}
			b.text(marshal(all))
		}
	case APIScoring:
		for _, field := range []string{"query", "input", "state", "instructions", "questions"} {
			if s, isString := str(b.fields[field]); isString {
				b.text([]byte(s))
			} else if b.has(field) {
				b.text(canonicalJSON(b.fields[field]))
			}
		}
	}
	b.align()
	if len(b.out) > 0 {
		prompts = [][]byte{b.out}
	}
	return prompts, false, true
}

type refBody struct {
	fields map[string]json.RawMessage
	out    []byte
}

func (b *refBody) array(field string) []json.RawMessage { return array(b.fields[field]) }
func (b *refBody) has(field string) bool {
	return len(b.fields[field]) > 0 && string(b.fields[field]) != "null"
}
func (b *refBody) text(s []byte) { b.out = append(b.out, s...) }
func (b *refBody) align() {
	for len(b.out)%4 != 0 {
		b.out = append(b.out, 0)
	}
}

func (b *refBody) asset(content string, n int) {
	b.align()
	token := binary.LittleEndian.AppendUint32(nil, uint32(xxhash.Sum64String(content)))
	b.out = append(b.out, bytes.Repeat(token, max(1, n))...)
}

func object(raw json.RawMessage) (m map[string]json.RawMessage) {
	if len(raw) > 0 && raw[0] == '{' {
		_ = json.Unmarshal(raw, &m)
	}
	return m
}

func array(raw json.RawMessage) (a []json.RawMessage) {
	if len(raw) > 0 && raw[0] == '[' {
		_ = json.Unmarshal(raw, &a)
	}
	return a
}

func str(raw json.RawMessage) (s string, ok bool) {
	if len(raw) == 0 || raw[0] != '"' {
		return "", false
	}
	return s, json.Unmarshal(raw, &s) == nil
}

func text(raw json.RawMessage) string { s, _ := str(raw); return s }

func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

func canonicalJSON(raw json.RawMessage) []byte {
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		panic(err)
	}
	return marshal(v)
}

func pack(s string) []byte {
	b := refBody{out: []byte(s)}
	b.align()
	return b.out
}

func (b *refBody) messages(messages []json.RawMessage, block func(json.RawMessage)) {
	for _, raw := range messages {
		m := object(raw)
		if m == nil {
			continue
		}
		b.text([]byte(text(m["role"])))
		b.text([]byte(text(m["content"])))
		for _, e := range array(m["content"]) {
			if s, isString := str(e); isString {
				b.text([]byte(s))
			} else if object(e) != nil {
				block(e)
			}
		}
	}
}

func source(raw json.RawMessage, field string) string {
	if s, isString := str(raw); isString {
		return s
	}
	return text(object(raw)[field])
}

func (b *refBody) chatBlock(raw json.RawMessage) {
	f := object(raw)
	switch text(f["type"]) {
	case "text":
		b.text([]byte(text(f["text"])))
	case "image_url":
		url := source(f["image_url"], "url")
		b.asset(url, imageTokensOf(url))
	case "video_url":
		b.asset(source(f["video_url"], "url"), 4500)
	case "audio_url":
		url := source(f["audio_url"], "url")
		b.asset(url, (len(url)+3)/4)
	case "input_audio":
		data := source(f["input_audio"], "data")
		if object(f["input_audio"]) != nil {
			data += text(object(f["input_audio"])["format"])
		}
		b.asset(data, (len(data)+3)/4)
	}
}

func imageTokensOf(url string) int {
	if !strings.HasPrefix(url, "data:image/") || !strings.Contains(url, "base64,") {
		return 640 * 360 / 1024
	}
	_, data, _ := strings.Cut(url, "base64,")
	return imageDataTokens(data)
}

func imageDataTokens(data string) int {
	if len(data) > maxImageHeader {
		data = data[:maxImageHeader]
	}
	c, _, err := image.DecodeConfig(base64.NewDecoder(base64.StdEncoding, strings.NewReader(data)))
	if err != nil || c.Width <= 0 || c.Height <= 0 {
		return 640 * 360 / 1024
	}
	return int(min(float64(c.Width)*float64(c.Height)/1024, maxAssetTokens))
}

func (b *refBody) anthropicSystem() {
	b.text([]byte(text(b.fields["system"])))
	for _, e := range b.array("system") {
		s, isString := str(e)
		if f := object(e); text(f["type"]) == "text" {
			s, isString = text(f["text"]), true
		}
		if isString && !strings.HasPrefix(s, "x-anthropic-billing-header") {
			b.text([]byte(s))
		}
	}
}

func (b *refBody) anthropicTools() {
	type tool struct {
		Name         string          `json:"name,omitempty"`
		Description  string          `json:"description,omitempty"`
		InputSchema  json.RawMessage `json:"input_schema,omitempty"`
		Strict       bool            `json:"strict,omitempty"`
		DeferLoading bool            `json:"defer_loading,omitempty"`
	}
	var tools []tool
	for _, e := range b.array("tools") {
		if f := object(e); f != nil {
			tools = append(tools, tool{text(f["name"]), text(f["description"]), f["input_schema"],
				string(f["strict"]) == "true", string(f["defer_loading"]) == "true"})
		}
	}
	if tools != nil {
		b.text(marshal(tools))
	}
}

func (b *refBody) anthropicBlock(raw json.RawMessage) {
	f := object(raw)
	switch text(f["type"]) {
	case "text":
		b.text([]byte(text(f["text"])))
	case "thinking":
		b.text([]byte(text(f["thinking"])))
	case "tool_use":
		b.text([]byte(text(f["id"]) + text(f["name"]) + string(f["input"])))
	case "image":
		s := object(f["source"])
		if url := text(s["url"]); url != "" {
			b.asset(url, imageTokensOf(url))
		} else if data := text(s["data"]); data != "" {
			b.asset(data, imageDataTokens(data))
		}
	case "tool_result":
		b.text([]byte(text(f["content"])))
		var texts []string
		for _, e := range array(f["content"]) {
			item := object(e)
			if s, isString := str(e); isString {
				texts = append(texts, s)
			} else if text(item["type"]) == "text" {
				texts = append(texts, text(item["text"]))
			}
		}
		b.text([]byte(strings.Join(texts, "\n")))
		for _, e := range array(f["content"]) {
			item := object(e)
			if text(item["type"]) != "image" {
				continue
			}
			s := object(item["source"])
			if url := text(s["url"]); url != "" {
				b.asset(url, imageTokensOf(url))
			} else if data := text(s["data"]); data != "" {
				media := text(s["media_type"])
				if media == "" {
					media = "image/jpeg"
				}
				b.asset("data:"+media+";base64,"+data, imageDataTokens(data))
			}
		}
	}
}

func (b *refBody) completions(raw json.RawMessage) (prompts [][]byte, exact, ok bool) {
	if prompts := tokenIDs(raw); len(prompts) > 0 {
		return prompts, true, true
	}
	all := array(raw)
	if s, isString := str(raw); isString && s != "" {
		return [][]byte{pack(s)}, false, true
	}
	for _, e := range all {
		s, isString := str(e)
		if !isString {
			return nil, false, true
		}
		if s != "" {
			prompts = append(prompts, pack(s))
		}
	}
	return prompts, false, true
}

// tokenIDs returns the prompts of an array of token ids or of such arrays, nil
// for anything else.
func tokenIDs(raw json.RawMessage) [][]byte {
	lists := array(raw)
	if len(lists) == 0 {
		return nil
	}
	if lists[0][0] != '[' {
		lists = []json.RawMessage{raw}
	}
	var prompts [][]byte
	for _, list := range lists {
		var ids []float64
		if list[0] != '[' || slices.ContainsFunc(array(list), func(e json.RawMessage) bool { return e[0] == 'n' }) || json.Unmarshal(list, &ids) != nil {
			return nil
		}
		var out []byte
		literals := array(list)
		for n, id := range ids {
			// A minus sign makes no token id, not even of -0.
			if id < 0 || id > 1<<32-1 || id != float64(uint32(id)) || literals[n][0] == '-' {
				return nil
			}
			out = binary.LittleEndian.AppendUint32(out, uint32(id))
		}
		if len(out) > 0 {
			prompts = append(prompts, out)
		}
	}
	return prompts
}
