package routing

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap"
	zapobserver "go.uber.org/zap/zaptest/observer"

	"kvgate/configs"
)

// localRouter returns a router with the local backend of a sample, with more parameters.
func localRouter(t testing.TB, f *Fleet, dir, more string) (*Router, error) {
	t.Helper()
	params := fmt.Sprintf("local: {tokenizer: %s/tokenizer.json%s}", filepath.Join(tokenizerSamples, dir), more)
	cfg, err := configs.ParseScheduling("test.yaml", []byte(header+"plugins:\n- {type: prefix-cache-scorer}\n- type: token-producer\n  parameters: {"+params+"}\n"))
	if err != nil {
		return nil, err
	}
	return New(cfg, f, 1)
}

// tokenizeWith parses a body and lets the router's tokenizer at it.
func tokenizeWith(t testing.TB, r *Router, api API, body string) *Request {
	t.Helper()
	req := &Request{API: api, Body: []byte(body)}
	if err := req.Parse(); err != nil {
		t.Fatal(err)
	}
	r.prepare(req, r.fleet.Endpoints())
	return req
}

func TestLocalTokens(t *testing.T) {
	c := newTestClock()
	fleet := readyFleet(t, c, "a")
	chat := func(messages string) string { return `{"model":"m","messages":` + messages + `}` }
	f := func(t *testing.T, dir, more string, api API, body string, want TokenSource, prompts ...string) {
		t.Helper()
		r, err := localRouter(t, fleet, dir, more)
		if err != nil {
			t.Fatal(err)
		}
		before := fleet.TokenSources()[want]
		req := tokenizeWith(t, r, api, body)
		if req.Source != want || req.Exact != (want == TokensLocal) {
			t.Fatalf("%s: got %s (exact %v), want %s", body, req.Source, req.Exact, want)
		}
		if got := fleet.TokenSources()[want]; got != before+1 {
			t.Errorf("%s: got %d requests counted, want %d", body, got, before+1)
		}
		if want != TokensLocal {
			if len(req.Tokens) == 0 {
				t.Errorf("%s: got no estimate", body)
			}
			return
		}
		tk := loadTokenizer(t, filepath.Join(tokenizerSamples, dir, "tokenizer.json"))
		w := newBPEWorker(1)
		for i, p := range prompts {
			if err := tk.encode(w, []byte(p), api == APICompletions); err != nil {
				t.Fatal(err)
			}
			if req.Ends[i] != len(w.out) {
				t.Errorf("%s: prompt %d: got the end %d, want %d", body, i, req.Ends[i], len(w.out))
			}
		}
		if len(req.Ends) != len(prompts) || !bytes.Equal(req.Tokens, w.out) {
			t.Errorf("%s: got tokens %v, want %v", body, tokensOf(req.Tokens), tokensOf(w.out))
		}
	}
	hi := "<|begin|>user\nhi<|end|>\n<|begin|>assistant\n"
	f(t, "cl100k", "", APIChat, chat(`[{"role":"user","content":"hi"}]`), TokensLocal, hi)
	f(t, "cl100k", "", APIChat, chat(`[{"role":"user","content":[{"type":"text","text":"h"},"",{"type":"input_text","text":"i"}]}]`), TokensLocal, strings.Replace(hi, "hi", "h\ni", 1))
	f(t, "cl100k", "", APIChat, chat(`[{"role":"developer","content":"d"},{"role":"user","content":"hi"},{"role":"system","content":"s"}]`), TokensLocal, "<|begin|>system\nd\n\ns<|end|>\n"+hi)
	f(t, "cl100k", "", APIChat, chat(`[{"role":"system","content":"x-anthropic-billing-header: 1\ns"},{"role":"user","content":"hi"}]`), TokensLocal, "<|begin|>system\ns<|end|>\n"+hi)
	f(t, "cl100k", "", APIChat, `{"messages":[{"role":"user","content":"hi"}],"reasoning_effort":"none"}`, TokensLocal, hi+"<think>\n\n</think>\n\n")
	f(t, "cl100k", "", APIChat, `{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"enable_thinking":false}}`, TokensLocal, hi+"<think>\n\n</think>\n\n")
	f(t, "cl100k", ", chatTemplateKwargs: '{\"enable_thinking\": false}'", APIChat, chat(`[{"role":"user","content":"hi"}]`), TokensLocal, hi+"<think>\n\n</think>\n\n")
	f(t, "cl100k", ", chatTemplateKwargs: '{\"enable_thinking\": false}'", APIChat, `{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"enable_thinking":true}}`, TokensLocal, hi)
	f(t, "cl100k", "", APIChat, `{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":false,"documents":[{"title":" t ","text":"x"}]}`, TokensLocal, "<|begin|>user\nhi<|end|>\n\n[1] t: x")
	f(t, "cl100k", "", APIChat, `{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho "}],"add_generation_prompt":false,"continue_final_message":true}`, TokensLocal,
		"<|begin|>user\nhi<|end|>\n<|begin|>assistant\nho ")
	f(t, "cl100k", "", APIChat, chat(`[{"role":"user","content":"hi"},{"role":"assistant","tool_calls":[{"type":"function","x":1,"id":"i","function":{"name":"f","arguments":"{\"b\": 1.0, \"a\":\"é\"}"}}]},{"role":"tool","tool_call_id":"i","content":[{"type":"text","text":"r"}]}]`), TokensLocal,
		"<|begin|>user\nhi<|end|>\n<|begin|>assistant\n\n<call>{\"name\": \"f\", \"arguments\": {\"b\": 1.0, \"a\": \"é\"}}</call><|end|>\n<|begin|>user\n<result>\nr\n</result><|end|>\n<|begin|>assistant\n")
	tool := `"tools":[{"function":{"parameters":{"z":1},"name":"n","x":2}}]`
	withTools := "<|begin|>system\n# Tools\n<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"n\", \"description\": null, \"parameters\": {\"z\": 1}}}\n</tools><|end|>\n" + hi
	f(t, "cl100k", "", APIChat, `{"messages":[{"role":"user","content":"hi"}],`+tool+`}`, TokensLocal, withTools)
	f(t, "cl100k", "", APIChat, `{"tool_choice":"none","messages":[{"role":"user","content":"hi"}],`+tool+`}`, TokensLocal, withTools)
	f(t, "cl100k", ", excludeToolsWhenToolChoiceNone: true", APIChat, `{"tool_choice":"none","messages":[{"role":"user","content":"hi"}],`+tool+`}`, TokensLocal, hi)
	f(t, "spm", "", APIChat, chat(`[{"role":"user","content":[{"type":"text","text":"h"},{"type":"text","text":"i"}]}]`), TokensLocal, "<s>[INST] h\ni [/INST]")
	f(t, "spm", ", contentFormat: openai", APIChat, chat(`[{"role":"user","content":[{"type":"text","text":"h"},{"type":"text","text":"i"}]}]`), TokensLocal, "<s>[INST] hi [/INST]")
	f(t, "gemma", ", contentFormat: openai", APIChat, chat(`[{"role":"user","content":"h\ud83d\ude00"}]`), TokensLocal, "<turn>user 22 Aug 2026\nh😀<turn>\nassistant\n")
	f(t, "cl100k", "", APICompletions, `{"prompt":"hi"}`, TokensLocal, "hi")
	f(t, "cl100k", "", APICompletions, `{"prompt":["hi","there"]}`, TokensLocal, "hi", "there")
	f(t, "cl100k", ", models: [m, n]", APICompletions, `{"model":"n","prompt":"hi"}`, TokensLocal, "hi")

	user := `"messages":[{"role":"user","content":"hi"}]`
	f(t, "cl100k", ", models: [n]", APICompletions, `{"model":"m","prompt":"hi"}`, TokensUnsupported)
	f(t, "cl100k", "", APIResponses, `{"input":"hi"}`, TokensUnsupported)
	f(t, "cl100k", "", APICompletions, `{"prompt":"hi","truncate_prompt_tokens":4}`, TokensUnsupported)
	f(t, "cl100k", "", APICompletions, `{"prompt":"hi","add_special_tokens":4}`, TokensUnsupported)
	f(t, "gpt2", "", APIChat, chat(`[{"role":"user","content":"hi"}]`), TokensUnsupported)
	for _, odd := range []string{
		chat(`[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y"}},{"type":"text","text":"x"}]}]`),
		chat(`[{"role":"user","content":[{"type":"text","text":"x","uuid":"u"}]}]`),
		chat(`[{"role":"user","content":[{"type":"text","text":"x"},{"type":"tool_reference","name":"x"}]}]`),
		chat(`[{"role":"user","content":"hi"},{"role":"assistant","content":"x","tool_calls":7}]`),
		chat(`[{"role":"user","content":"hi"},{"role":"assistant","content":"x","tool_calls":[{"type":"custom"}]}]`),
		chat(`[{"role":"user","content":"hi"},{"role":"assistant","content":"x","reasoning":7}]`),
		chat(`[{"role":"user","content":"hi"},{"content":"x"}]`),
		chat(`[{"role":"user","content":"hi \ud800"}]`),
		`{` + user + `,"chat_template":"x"}`,
		`{` + user + `,"truncate_prompt_tokens":1}`,
		`{` + user + `,"add_generation_prompt":"x"}`,
		`{` + user + `,"continue_final_message":1}`,
		`{` + user + `,"documents":[{"text":1}]}`,
		`{` + user + `,"tools":[]}`,
		`{` + user + `,"tools":[{"type":"web_search"}]}`,
		`{` + user + `,"tools":[{"function":{}}]}`,
		`{` + user + `,"tools":[{"function":{"name":"f","strict":1}}]}`,
		`{` + user + `,"chat_template_kwargs":{"tokenize":true}}`,
		`{` + user + `,"chat_template_kwargs":7}`,
		`{` + user + `,"reasoning_effort":7}`,
	} {
		f(t, "cl100k", "", APIChat, odd, TokensUnsupported)
	}
	f(t, "spm", "", APIChat, chat(`[{"role":"assistant","content":"hi"}]`), TokensRefused)
	f(t, "cl100k", "", APIChat, `{`+user+`,"add_generation_prompt":true,"continue_final_message":true}`, TokensRefused)
}

// TestLocalRefusalIsLogged: once a minute, with the template's reason.
func TestLocalRefusalIsLogged(t *testing.T) {
	core, logs := zapobserver.New(zap.WarnLevel)
	c := newTestClock()
	fleet := NewFleet(c.now, 1, zap.New(core))
	r, err := localRouter(t, fleet, "spm", "")
	if err != nil {
		t.Fatal(err)
	}
	f := func(t *testing.T, want int) {
		t.Helper()
		tokenizeWith(t, r, APIChat, `{"messages":[{"role":"assistant","content":"hi"}]}`)
		if got := logs.FilterMessageSnippet("no local tokens").Len(); got != want {
			t.Errorf("got %d lines, want %d", got, want)
		}
	}
	f(t, 1)
	f(t, 1)
	c.t = c.t.Add(61e9)
	f(t, 2)
	if got, want := fmt.Sprint(logs.All()[0].ContextMap()["error"]), "Roles must alternate"; !strings.Contains(got, want) {
		t.Errorf("got %q, want it to say %q", got, want)
	}
}

// TestLocalAsksTheEngine: what cannot be known here is asked for.
func TestLocalAsksTheEngine(t *testing.T) {
	c := newTestClock()
	fleet := readyFleet(t, c, "a")
	asked := 0
	cfg, err := configs.ParseScheduling("test.yaml", []byte(header+"plugins:\n- {type: prefix-cache-scorer}\n- type: token-producer\n  parameters: {vllm: {url: 'http://r:1'}, local: {tokenizer: "+
		filepath.Join(tokenizerSamples, "spm", "tokenizer.json")+"}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	r, err := New(cfg, fleet, 1, WithRenderer(func(RenderQuery) (int, []byte, error) {
		asked++
		return 200, []byte(`{"token_ids":[1,2,3]}`), nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	f := func(t *testing.T, body string, want TokenSource, wantAsked int) {
		t.Helper()
		if req := tokenizeWith(t, r, APIChat, body); req.Source != want || asked != wantAsked || !req.Exact {
			t.Errorf("%s: got %s after %d questions (exact %v), want %s after %d", body, req.Source, asked, req.Exact, want, wantAsked)
		}
	}
	f(t, `{"messages":[{"role":"user","content":"hi"}]}`, TokensLocal, 0)
	f(t, `{"messages":[{"role":"assistant","content":"hi"}]}`, TokensRendered, 1)
	f(t, `{"messages":[{"role":"user","content":"hi"}],"chat_template":"x"}`, TokensRendered, 2)
}

func TestLocalParameters(t *testing.T) {
	fleet := newTestFleet(newTestClock())
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	tiny := write("tiny.json", string(tinyTokenizer()))
	f := func(t *testing.T, params string, wants ...string) {
		t.Helper()
		cfg, err := configs.ParseScheduling("test.yaml", []byte(header+"plugins:\n- {type: prefix-cache-scorer}\n- type: token-producer\n  parameters: {"+params+"}\n"))
		if err == nil {
			_, err = New(cfg, fleet, 1)
		}
		if len(wants) == 0 && err != nil {
			t.Errorf("%s: got error %v, want none", params, err)
		}
		for _, want := range wants {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got error %v, want one with %q", params, err, want)
			}
		}
	}
	f(t, "local: {tokenizer: "+tiny+"}")
	f(t, "local: {tokenizer: "+tiny+"}, vllm: {}, modelName: m")
	f(t, "local: {}", "test.yaml:", "local has no tokenizer")
	f(t, "local: {tokenizer: "+tiny+", chatTemplate: "+write("plain.jinja", "x")+", chatTemplateKwargs: '[1]'}", "write a JSON object in quotes")
	f(t, "local: {tokenizer: "+tiny+", speed: 1}", "speed")
	f(t, "local: {tokenizer: "+tiny+"}, modelName: m", "local.models")
	f(t, "local: {tokenizer: "+filepath.Join(dir, "none.json")+"}", "none.json: no such file")
	f(t, "local: {tokenizer: "+write("bad.json", `{"model":{"type":"WordPiece"}}`)+"}", "bad.json", `type "WordPiece" is not supported`, "have the engine asked")
	f(t, "local: {tokenizer: "+tiny+", config: "+filepath.Join(dir, "none.json")+"}", "none.json: no such file")
	f(t, "local: {tokenizer: "+tiny+", config: "+write("config.json", `[]`)+"}", "config.json", "cannot unmarshal")
	f(t, "local: {tokenizer: "+tiny+", config: "+write("config2.json", `{"added_tokens_decoder":{"x":{}}}`)+"}", "added_tokens_decoder[x]")
	f(t, "local: {tokenizer: "+tiny+", chatTemplate: "+filepath.Join(dir, "none.jinja")+"}", "none.jinja: no such file")
	f(t, "local: {tokenizer: "+tiny+", chatTemplate: "+write("bad.jinja", `{% if %}`)+"}", "bad.jinja", "template line 1")
	ok := write("ok.jinja", `{{ messages }}`)
	f(t, "local: {tokenizer: "+tiny+", chatTemplate: "+ok+", contentFormat: odd}", `contentFormat "odd"`, "use auto, string or openai")
	f(t, "local: {tokenizer: "+tiny+", chatTemplate: "+ok+", chatTemplateKwargs: '{\"tools\": 1}'}", "chatTemplateKwargs.tools")
	f(t, "local: {tokenizer: "+tiny+", chatTemplate: "+ok+", chatTemplateKwargs: '{\"thinking\": true, \"n\": [1, {\"a\": \"b\"}]}'}")
}

// TestLocalConfig: what a tokenizer_config.json changes.
func TestLocalConfig(t *testing.T) {
	f := func(t *testing.T, config, text string, want ...uint32) {
		t.Helper()
		c, err := parseTokenizerConfig([]byte(config))
		if err != nil {
			t.Fatal(err)
		}
		tk, err := parseTokenizer(tinyTokenizer(), c)
		if err != nil {
			t.Fatal(err)
		}
		w := newBPEWorker(1)
		if err := tk.encode(w, []byte(text), true); err != nil {
			t.Fatal(err)
		}
		if got := tokensOf(w.out); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", config, got, want)
		}
	}
	f(t, `{}`, "abc<s>", 5, 9)
	f(t, `{"add_bos_token":true,"bos_token":"<s>"}`, "abc", 5)
	f(t, `{"bos_token":{"content":"<s>"},"eos_token":"c"}`, "abc", 4, 2)
	f(t, `{"eos_token":"</s>"}`, "ab</s>", 4, 10)
	f(t, `{"added_tokens_decoder":{"77":{"content":"ca","normalized":false},"9":{"content":"<s>"}}}`, "abcab", 4, 10, 1)
	f(t, `{"added_tokens_decoder":{"5":{"content":"abc","special":true}}}`, "aabc", 0, 5)
}

// TestLlamaTokenizer: transformers builds its own LlamaTokenizer of a SentencePiece-style file.
func TestLlamaTokenizer(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(tokenizerSamples, "spm", "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	f := func(t *testing.T, config, model, text, want string) {
		t.Helper()
		c, err := parseTokenizerConfig([]byte(config))
		if err != nil {
			t.Fatal(err)
		}
		c.modelType = model
		tk, err := parseTokenizer(data, c)
		if err != nil {
			t.Fatal(err)
		}
		w := newBPEWorker(1)
		if err := tk.encode(w, []byte(text), false); err != nil {
			t.Fatal(err)
		}
		names, got := tk.tokenTexts(), ""
		for _, id := range tokensOf(w.out) {
			got += names[id]
		}
		if got != want {
			t.Errorf("%s %s: got %q, want %q", config, model, got, want)
		}
	}
	f(t, `{}`, "", " a<s>b", "▁▁a<s>▁b")
	f(t, `{"tokenizer_class":"LlamaTokenizer"}`, "", " a<s>b", "▁a<s>b")
	f(t, `{"tokenizer_class":"LlamaTokenizerFast"}`, "", "a<s>b", "▁a<s>b")
	f(t, `{"tokenizer_class":"LlamaTokenizer","legacy":true}`, "", "a<s>b", "▁a<s>▁b")
	f(t, `{"tokenizer_class":"LlamaTokenizer","add_prefix_space":false}`, "", "a<s>b", "a<s>b")
	f(t, `{"tokenizer_class":"LlamaTokenizer"}`, "phi3", " a<s>b", "▁▁a<s>▁b")
}

func TestLocalFilesAreReadOnce(t *testing.T) {
	fleet := newTestFleet(newTestClock())
	f := func(t *testing.T, dir string) *bpeTokenizer {
		t.Helper()
		r, err := localRouter(t, fleet, dir, "")
		if err != nil {
			t.Fatal(err)
		}
		return r.tokenizer.(*localTokenizer).bpe
	}
	a, b, c := f(t, "cl100k"), f(t, "cl100k"), f(t, "spm")
	if a != b || a == c {
		t.Errorf("got the same tokenizer after a reload: %v, and for another file: %v, want true and false", a == b, a == c)
	}
}

// TestLocalTokensConcurrently: many requests at once, with and without what is remembered.
func TestLocalTokensConcurrently(t *testing.T) {
	r, err := localRouter(t, readyFleet(t, newTestClock(), "a"), "cl100k", "")
	if err != nil {
		t.Fatal(err)
	}
	local := r.tokenizer.(*localTokenizer)
	tk := local.bpe
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for k := range 30 {
				text := strings.Repeat(fmt.Sprintf("message %d of all: <|end|> it's shared. ", (i+k)%7), 1+k%5)
				body, _ := json.Marshal(map[string]any{"prompt": text})
				req := &Request{API: APICompletions, Body: body}
				if err := req.Parse(); err != nil {
					t.Error(err)
					return
				}
				local.Tokenize(req)
				w := newBPEWorker(3)
				if err := tk.encode(w, []byte(text), true); err != nil || !bytes.Equal(req.Tokens, w.out) {
					t.Errorf("%q: got %v, want %v, %v", text, tokensOf(req.Tokens), tokensOf(w.out), err)
				}
			}
		})
	}
	wg.Wait()
}

// TestTokenCacheIsBounded fills it far beyond its bytes.
func TestTokenCacheIsBounded(t *testing.T) {
	c := newTokenCache(1)
	tokens := make([]byte, 1<<20)
	for i := range 500 {
		c.put(c.key([]byte{byte(i), byte(i >> 8)}, false), tokens)
	}
	held := int64(0)
	for i := range c.sets {
		for k := range c.sets[i] {
			held += int64(len(c.sets[i][k].tokens))
		}
	}
	if held != c.bytes || held > tokenBytes || held < tokenBytes/4 {
		t.Errorf("got %d bytes held and %d counted, want the same and at most %d", held, c.bytes, tokenBytes)
	}
	if _, ok := c.get(nil, c.key([]byte{499 & 255, 499 >> 8}, false)); !ok {
		t.Error("got nothing for the last, want its tokens")
	}
	if _, ok := c.get(nil, c.key([]byte{499 & 255, 499 >> 8}, true)); ok {
		t.Error("got tokens for a piece that stands first, want none")
	}
}

func TestExplainTokens(t *testing.T) {
	r, err := localRouter(t, readyFleet(t, newTestClock(), "a"), "cl100k", "")
	if err != nil {
		t.Fatal(err)
	}
	f := func(t *testing.T, api API, body, wantSource, wantText, wantTokens string) {
		t.Helper()
		req := &Request{API: api, Body: []byte(body)}
		if err := req.Parse(); err != nil {
			t.Fatal(err)
		}
		ex, err := r.Explain(req)
		if err != nil {
			t.Fatal(err)
		}
		r.ExplainTokens(req, ex)
		got, text := "", ""
		for _, p := range ex.Prompts {
			text += p.Text
			for _, b := range p.Blocks {
				for _, x := range b.Tokens {
					got += "|" + x.Text
				}
				got += "/"
			}
		}
		if ex.Tokens != wantSource || text != wantText || got != wantTokens {
			t.Errorf("%s: got %s %q %q, want %s %q %q", body, ex.Tokens, text, got, wantSource, wantText, wantTokens)
		}
	}
	f(t, APICompletions, `{"prompt":"the<|end|> the"}`, "local", "the<|end|> the", "|<|begin|>|the|<|end|>| the|<|end|>/")
	f(t, APICompletions, `{"prompt":[1,2]}`, "given", "", "||/")
	f(t, APICompletions, `{"prompt":"abcdef","truncate_prompt_tokens":3}`, "unsupported", "", "|abcd|ef\x00\x00/")
}

// TestDetectFormat: whether a template goes through the parts of a content itself.
func TestDetectFormat(t *testing.T) {
	f := func(t *testing.T, source string, want contentFormat) {
		t.Helper()
		c, err := compileTemplate(source)
		if err != nil {
			t.Fatal(err)
		}
		if got := c.detectFormat(); got != want {
			t.Errorf("%s: got %d, want %d", source, got, want)
		}
	}
	f(t, `{% for m in messages %}{{ m.content }}{% endfor %}`, contentString)
	f(t, `{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}`, contentParts)
	f(t, `{% for m in messages %}{% for p in m['content'] | list %}{{ p.text }}{% endfor %}{% endfor %}`, contentParts)
	f(t, `{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{% endfor %}{% endfor %}`, contentParts)
	f(t, `{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}`, contentParts)
	f(t, `{% macro show(x) %}{% for p in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}`, contentParts)
	f(t, `{% macro show(x) %}{% for p in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(x=m.content) }}{% endfor %}`, contentParts)
	f(t, `{% macro show(x) %}{% for p in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.role) }}{% endfor %}`, contentString)
	f(t, `{% macro show(x) %}{% for p in content %}{% endfor %}{% endmacro %}`, contentString)
	f(t, `{% for t in tools %}{% for p in t.content %}{% endfor %}{% endfor %}`, contentString)
}

// TestTokenizeAllocations: memory is taken for a text, not for its tokens.
func TestTokenizeAllocations(t *testing.T) {
	f := func(t *testing.T, dir, text string, most float64) {
		t.Helper()
		tk := loadTokenizer(t, filepath.Join(tokenizerSamples, dir, "tokenizer.json"))
		w := newBPEWorker(1)
		run := func() {
			w.out = w.out[:0]
			if err := tk.encode(w, []byte(text), false); err != nil {
				t.Fatal(err)
			}
		}
		run()
		if got := testing.AllocsPerRun(20, run); got > most || len(w.out) < 4000 {
			t.Errorf("%s: got %v allocations for %d tokens, want at most %v for 1000", dir, got, len(w.out)/4, most)
		}
	}
	text := strings.Repeat("The tokenizer's words, 2024 of them:\n\n\tdo not take memory. ", 60)
	f(t, "cl100k", text, 8)
	f(t, "o200k", text, 8)
	f(t, "deepseek", text, 8)
	f(t, "spm", text, 8)
}
