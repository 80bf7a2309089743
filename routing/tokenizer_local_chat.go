package routing

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// chatTemplates are the templates of a model and the special tokens that they know by
// name. It is immutable.
type chatTemplates struct {
	plain   *chatTemplate
	tools   *chatTemplate // takes the place of plain when there are tools; nil: plain
	special []namedValue  // bos_token and the like
}

// chatInput is what a template is given.
type chatInput struct {
	read      []value // the messages as they were read
	developer bool    // one of them may be a developer's
	messages  value   // those for the template: a list of dicts
	tools     value   // list, or none
	docs      value   // list, or none
	generate  bool    // add_generation_prompt
	resume    bool    // continue_final_message
	extra     []namedValue
}

// tokenizerConfig is what is read of a tokenizer_config.json. Whatever else is in it
// has no part in a prompt's tokens: beside a tokenizer.json transformers ignores even
// add_bos_token and add_eos_token.
type tokenizerConfig struct {
	ChatTemplate json.RawMessage            `json:"chat_template"`
	Added        map[string]json.RawMessage `json:"added_tokens_decoder"`
	PrefixSpace  *bool                      `json:"add_prefix_space"`
	Legacy       bool                       `json:"legacy"`
	Class        string                     `json:"tokenizer_class"`
	Extra        json.RawMessage            `json:"extra_special_tokens"`
	tokens       map[string]string
	modelType    string // of the model's config.json, "" when it is unknown
}

// fileModels are the types of models whose tokenizer_class transformers does not
// believe: it reads their tokenizer.json as it is.
var fileModels = []string{
	"chatlm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_vl", "deepseek_vl_v2", "ernie4_5", "ernie4_5_moe", "fuyu", "internlm2", "jamba", "janus", "llava",
	"llava_next", "minicpm3", "minicpmv", "minimax_m2", "molmo", "nemotron", "openvla", "paddleocr_vl", "phi3", "phi3_v", "phimoe", "vipllava",
}

// llama reports whether transformers (since version 5) builds a LlamaTokenizer of its
// own of the file's vocabulary and merges, whatever else the file says.
func (c *tokenizerConfig) llama() bool {
	return (c.Class == "LlamaTokenizer" || c.Class == "LlamaTokenizerFast") && !slices.Contains(fileModels, c.modelType)
}

// specialTokenNames are the names under which templates know special tokens.
var specialTokenNames = [...]string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

func parseTokenizerConfig(data []byte) (*tokenizerConfig, error) {
	c := &tokenizerConfig{tokens: map[string]string{}}
	if err := json.Unmarshal(data, c); err != nil {
		return nil, err
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, err
	}
	for _, name := range specialTokenNames {
		if text, ok := tokenText(all[name]); ok {
			c.tokens[name] = text
		}
	}
	var extra map[string]json.RawMessage
	if json.Unmarshal(c.Extra, &extra) == nil { // a list names no tokens
		for name, v := range extra {
			if text, ok := tokenText(v); ok {
				c.tokens[name] = text
			}
		}
	}
	return c, nil
}

// tokenText reads a token that is a string or an object with its content.
func tokenText(data json.RawMessage) (string, bool) {
	var text string
	if json.Unmarshal(data, &text) == nil {
		return text, text != ""
	}
	var object struct {
		Content string `json:"content"`
	}
	return object.Content, json.Unmarshal(data, &object) == nil && object.Content != ""
}

// templates compiles the templates of a chat_template field: one, or a list of those
// with a name.
func parseTemplates(data json.RawMessage) (plain, tools *chatTemplate, err error) {
	var text string
	if json.Unmarshal(data, &text) == nil {
		plain, err = compileTemplate(text)
		return plain, nil, err
	}
	var list []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, nil, fmt.Errorf("chat_template is neither a template nor a list of them: %w", err)
	}
	for _, t := range list {
		c, err := compileTemplate(t.Template)
		if err != nil {
			return nil, nil, fmt.Errorf("chat_template %q: %w", t.Name, err)
		}
		switch t.Name {
		case "default":
			plain = c
		case "tool_use":
			tools = c
		}
	}
	if plain == nil {
		return nil, nil, errors.New("chat_template has none with the name default")
	}
	return plain, tools, nil
}

const resumeTag = "CONTINUE_FINAL_MESSAGE_TAG "

var (
	errResume   = errors.New("continue_final_message: the last message has no text that the template prints")
	errMessages = errors.New("there are no messages")
)

// template returns the one that is used.
func (c *chatTemplates) template(tools bool) *chatTemplate {
	if tools && c.tools != nil {
		return c.tools
	}
	return c.plain
}

// render returns the text of a conversation, valid until x runs again.
func (c *chatTemplates) render(x *execution, in *chatInput) ([]byte, error) {
	messages := in.messages.list()
	if len(messages) == 0 {
		return nil, errMessages
	}
	t := c.template(in.tools.kind != kindNone)
	final := ""
	if in.resume {
		if in.generate || !strings.Contains(t.source, "content") {
			return nil, errResume
		}
		last, text, ok := resumed(messages[len(messages)-1])
		if !ok {
			return nil, errResume
		}
		final = text
		messages = append(slices.Clone(messages[:len(messages)-1]), last)
	}
	vars := slices.Grow([]namedValue(nil), len(c.special)+len(in.extra)+4)
	for _, s := range c.special {
		if !slices.ContainsFunc(in.extra, func(e namedValue) bool { return e.name == s.name }) {
			vars = append(vars, s)
		}
	}
	vars = append(vars, in.extra...)
	vars = append(vars, namedValue{"messages", listValue(messages)}, namedValue{"tools", in.tools}, namedValue{"documents", in.docs},
		namedValue{"add_generation_prompt", boolValue(in.generate)})
	out, err := x.run(t, vars)
	if err != nil || !in.resume {
		return out, err
	}
	tag := bytes.LastIndex(out, []byte(strings.TrimSpace(resumeTag)))
	if tag < 0 || !bytes.Contains(out, []byte(strings.TrimFunc(final, isPythonSpace))) {
		return nil, errResume
	}
	if bytes.HasPrefix(out[tag:], []byte(resumeTag)) {
		return out[:tag], nil
	}
	return bytes.TrimRightFunc(out[:tag], isPythonSpace), nil // the template trims
}

// resumed returns a copy of the last message with the tag behind its text, and the text.
func resumed(m value) (value, string, bool) {
	if !m.isDict() {
		return m, "", false
	}
	d := copyDict(m.dict())
	content, _ := d.text("content")
	switch content.kind {
	case kindString:
		d.put("content", stringValue(content.str+resumeTag))
		return dictOf(d), content.str, true
	case kindList:
		parts := slices.Clone(content.list())
		for i := len(parts) - 1; i >= 0; i-- {
			if !parts[i].isDict() {
				continue
			}
			if text, ok := parts[i].dict().text("text"); ok && text.kind == kindString {
				part := copyDict(parts[i].dict())
				part.put("text", stringValue(text.str+resumeTag))
				parts[i] = dictOf(part)
				d.put("content", listValue(parts))
				return dictOf(d), text.str, true
			}
		}
	}
	return m, "", false
}

func copyDict(d *dictValue) *dictValue {
	out := &dictValue{}
	for i, k := range d.keys {
		out.set(k, d.vals[i])
	}
	return out
}
