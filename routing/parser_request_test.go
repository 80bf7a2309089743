package routing

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"

	"kvgate/kvindex"
)

// tokenized parses a body with the default estimate.
func tokenized(t testing.TB, api API, body string) *Request {
	t.Helper()
	return tokenizedWith(t, EstimateParams{}, nil, api, body)
}

func tokenizedWith(t testing.TB, p EstimateParams, h Headers, api API, body string) *Request {
	t.Helper()
	e, err := NewEstimator(p)
	if err != nil {
		t.Fatalf("NewEstimator(%+v): error %v, want none", p, err)
	}
	r := &Request{API: api, Body: []byte(body), Headers: h}
	if err := r.Parse(); err != nil {
		t.Fatalf("Parse(%q): error %v, want none", body, err)
	}
	e.Tokenize(r)
	return r
}

// promptsOf splits the tokens into prompts.
func promptsOf(r *Request) (prompts [][]byte) {
	start := 0
	for _, end := range r.Ends {
		prompts = append(prompts, r.Tokens[start:end])
		start = end
	}
	return prompts
}

// TestWorkedExamples checks the hashes that llm-d's router computes for the same bodies.
func TestWorkedExamples(t *testing.T) {
	f := func(t *testing.T, api API, body string, wantTokens int, want ...uint64) {
		t.Helper()
		r := tokenized(t, api, body)
		if got := len(r.Tokens) / 4; got != wantTokens || len(r.Ends) != 1 || r.Ends[0] != len(r.Tokens) || r.Exact {
			t.Errorf("%s: %d tokens, ends %v, exact %v, want %d tokens in one estimated prompt", body, got, r.Ends, r.Exact, wantTokens)
		}
		got := kvindex.AppendChain(nil, kvindex.Seed(r.Model, r.Salt), r.Tokens, 64*4, 0)
		if !slices.Equal(got, want) {
			t.Errorf("%s: hashes %v, want %v", body, got, want)
		}
	}
	f(t, APICompletions, `{"model":"test-model","prompt":"hello world"}`, 3, 12140827157480816039)
	f(t, APICompletions, `{"model":"test-model","prompt":["hello world"]}`, 3, 12140827157480816039)
	f(t, APICompletions, `{"model":"test-model","prompt":"`+strings.Repeat("a", 600)+`"}`, 150,
		6967039974380692447, 9742904949044203714, 2601360439537577488)
	f(t, APIChat, `{"model":"test-model","messages":[{"role":"system","content":"You are helpful."},{"role":"user","content":"Hi"}]}`, 7,
		17765527247625690794)
	f(t, APIChat, `{"model":"test-model","messages":[{"role":"user","content":"hello"}],`+
		`"tools":[{"type":"function","function":{"name":"get_weather","description":"a<b"}}]}`, 23, 9463819695262989225)
	f(t, APIChat, `{"model":"test-model","messages":[{"role":"user","content":[{"type":"text","text":"look"},`+
		`{"type":"image_url","image_url":{"url":"https://example.com/a.png"}}]}]}`, 227,
		15977988845696548717, 1402072672018238619, 11917567190513261957, 412950690142279952)
	f(t, APIResponses, `{"model":"test-model","input":"hello","instructions":"be nice"}`, 12, 15318124862385414981)

	exact := tokenized(t, APICompletions, `{"model":"m","cache_salt":"salt","prompt":[1,2,3,4]}`)
	if got, want := kvindex.AppendChain(nil, kvindex.Seed(exact.Model, exact.Salt), exact.Tokens, 8, 0),
		[]uint64{7714218408385768131, 17384806400187647017}; !slices.Equal(got, want) || !exact.Exact {
		t.Errorf("token ids with a salt: hashes %v, exact %v, want %v, true", got, exact.Exact, want)
	}
	tail := tokenized(t, APIGenerate, `{"model":"m","token_ids":[1,2,3,4,5,6,7,8,9,10]}`)
	if got, want := kvindex.AppendChain(nil, kvindex.Seed(tail.Model, tail.Salt), tail.Tokens, 16, 0),
		[]uint64{18390267952832273189, 15051379317946961216, 7786504833879382867}; !slices.Equal(got, want) {
		t.Errorf("token ids with a partial block: hashes %v, want %v", got, want)
	}
}

// TestPromptBytes has one case per field and shape. want lists the prompts as
// text, without the zeros that pad each to whole tokens.
func TestPromptBytes(t *testing.T) {
	f := func(t *testing.T, api API, body string, want ...string) {
		t.Helper()
		r := tokenized(t, api, body)
		var got []string
		for _, p := range promptsOf(r) {
			got = append(got, strings.TrimRight(string(p), "\x00"))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: prompts %q, want %q", body, got, want)
		}
		if r.Exact {
			t.Errorf("%s: exact, want an estimate", body)
		}
	}
	chat := func(t *testing.T, fields, want string) {
		t.Helper()
		var all []string
		if want != "" {
			all = []string{want}
		}
		f(t, APIChat, `{`+fields+`}`, all...)
	}
	messages := func(t *testing.T, list, want string) {
		t.Helper()
		chat(t, `"messages":[`+list+`]`, want)
	}
	messages(t, ``, "")
	messages(t, `{"role":"user","content":"a"}`, "usera")
	messages(t, `{"content":"a","role":"user"},{"content":"b","role":"assistant"}`, "useraassistantb")
	messages(t, `{"role":"user","content":null},{"role":"tool"},{"content":"x"}`, "usertoolx")
	messages(t, `{"role":7,"content":"x"},{"role":null,"content":7},{"role":"r","content":{"a":1}},7,null,["a"]`, "xr")
	messages(t, `{"role":"user","content":[{"type":"text","text":"a"},{"text":"b","type":"text"},"c"]}`, "userabc")
	messages(t, `{"role":"user","content":[{"type":"text"},{"type":"refusal","refusal":"r","text":"t"},{"text":"no type"},[["x"]],null,8]}`, "user")
	messages(t, `{"role":"assistant","content":"x","tool_calls":[{"id":"1"}],"name":"n","reasoning":"r"}`, "assistantx")
	messages(t, `{"role":"a","role":"b","content":"x","content":["y","z"]}`, "byz")
	messages(t, `{"role":"user","content":["x"],"content":null}`, "user")
	messages(t, `{"r\u006fle":"u\u0073er","\u0063ontent":"\"q\"\\\/\n\t\u00e9\ud83d\ude42\ud83d!"}`, "user\"q\"\\/\n\té🙂\ufffd!")
	messages(t, "{\"role\":\"user\",\"content\":\"\xff\xe6\xbc\xa2\xe6\xbc\"}", "user\ufffd漢\ufffd\ufffd")
	chat(t, `"messages":[{"role":"first"}],"messages":[{"role":"last"}]`, "last")
	chat(t, `"messages":{"role":"user"},"prompt":"x"`, "")
	chat(t, `"tools":[],"messages":[{"role":"user"}]`, "user")
	chat(t, `"tools":null,"messages":[{"role":"user"}]`, "user")
	chat(t, `"tools":{"a":1},"messages":[{"role":"user"}]`, "user")
	chat(t, `"messages":[{"role":"user"}],"tools":[ {"b":1e2, "a":"<\u003e", "b":[ ] } ]`, `[{"a":"\u003c\u003e","b":[]}]user`)
	chat(t, `"tools":[1],"tools":[2],"messages":[{"role":"user"}]`, "[2]user")

	f(t, APICompletions, `{"prompt":"a\nb"}`, "a\nb")
	f(t, APICompletions, `{"prompt":["one prompt"]}`, "one prompt")
	f(t, APICompletions, `{"prompt":["first","","second!","third"]}`, "first", "second!", "third")
	f(t, APICompletions, `{"prompt":["only"," last"],"prompt":["x"]}`, "x")
	for _, odd := range []string{`""`, `[]`, `[""]`, `null`, `7`, `{"a":1}`, `["a",1]`, `[1,"a"]`, `[-1]`, `[1.5]`, `[4294967296]`, `[[1],"a"]`, `[[1],2]`, `[[[1]]]`, `[null]`, `[[]]`} {
		f(t, APICompletions, `{"prompt":`+odd+`}`)
	}
	f(t, APICompletions, `{"prompt_embeds":"AAAA"}`)

	f(t, APIEmbeddings, `{"input":"hello"}`, `{"Raw":"hello","Strings":null,"TokenIDs":null}`)
	f(t, APIEmbeddings, `{"input":["a","<\u00e9>"]}`, `{"Raw":"","Strings":["a","\u003cé\u003e"],"TokenIDs":null}`)
	f(t, APIEmbeddings, `{"messages":[{"role":"user","content":"a"}]}`, "usera")
	f(t, APIEmbeddings, `{"messages":[{"role":"user","content":"a"}],"input":"b"}`, `{"Raw":"b","Strings":null,"TokenIDs":null}`)
	for _, odd := range []string{`""`, `[]`, `null`, `7`, `["a",1]`, `{"a":1}`, `[["a"]]`, `[null]`} {
		f(t, APIEmbeddings, `{"input":`+odd+`}`)
	}

	f(t, APIResponses, `{"tools":[{"b":1,"a":2}],"input":[{"role":"user","content":"x"}],"instructions":"i"}`,
		`[{"instructions":"i"},{"tools":[{"a":2,"b":1}]},{"input":[{"content":"x","role":"user"}]}]`)
	f(t, APIResponses, `{"input":"x","instructions":null,"tools":null}`, `[{"input":"x"}]`)
	f(t, APIResponses, `{"input":"","tools":[]}`, `[{"tools":[]},{"input":""}]`)
	f(t, APIResponses, `{"instructions":"i","input":null}`)
	f(t, APIResponses, `{"instructions":"i"}`)

	f(t, APIChatBatch, `{"messages":[[{"role":"user","content":"a"}],[{"role":"user","content":"b"}]]}`, "usera")
	f(t, APIChatBatch, `{"messages":[{"role":"user","content":"a"}]}`, "usera")
	f(t, APIChatBatch, `{"messages":[]}`)
	f(t, APIChatBatch, `{"messages":"x"}`)

	f(t, APIScoring, `{"items":["x"],"query":"q"}`, "q")
	f(t, APIScoring, `{"questions":["a","b"],"instructions":"do","state":{"y":1,"x":2},"model":"m"}`, `{"x":2,"y":1}do["a","b"]`)
	f(t, APIScoring, `{"input":"text"}`, "text")
	f(t, APINone, `{"model":"m","prompt":"x","messages":[{"role":"user"}],"input":"x","query":"x"}`)
}

func TestAnthropicPromptBytes(t *testing.T) {
	f := func(t *testing.T, fields, want string) {
		t.Helper()
		r := tokenized(t, APIMessages, `{`+fields+`}`)
		if got := strings.TrimRight(string(r.Tokens), "\x00"); got != want {
			t.Errorf("%s: prompt %q, want %q", fields, got, want)
		}
	}
	f(t, `"messages":[{"role":"user","content":"hi"}],"system":"be nice"`, "be niceuserhi")
	f(t, `"system":[{"type":"text","text":"x-anthropic-billing-header: cch=1;"},{"type":"text","text":"one","cache_control":{"type":"ephemeral"}},{"type":"image"},"two"]`, "onetwo")
	f(t, `"system":"x-anthropic-billing-header: a string stays"`, "x-anthropic-billing-header: a string stays")
	f(t, `"system":[{"text":"x-anthropic-billing-h\u0065ader","type":"text"}],"system":[{"text":"last","type":"text"}]`, "last")
	f(t, `"system":7,"tools":{},"messages":{}`, "")
	f(t, `"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":"s"},{"type":"redacted_thinking","data":"d"},`+
		`{"input":{"b": 1, "a":"\u0041"},"name":"get","id":"t1","type":"tool_use"}]}]`, `assistanthmt1get{"b": 1, "a":"\u0041"}`)
	f(t, `"messages":[{"role":"user","content":[{"tool_use_id":"t1","content":"42","type":"tool_result"},{"type":"text","content":"no","text":"yes"}]}]`, "user42yes")
	f(t, `"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":"a"},{"type":"other","text":"x"},{"type":"text"},{"text":"b","type":"text"}]}]}]`, "usera\n\nb")
	f(t, `"messages":[{"role":"user","content":[{"type":"tool_result","content":"first","content":[{"type":"text","text":"last"}]}]}]`, "userlast")
	f(t, `"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"tool_result","content":"inner"}]}]}]`, "user")
	f(t, `"tools":[{"input_schema":{"b":1, "a":"<"},"description":"d\u003e","type":"custom","name":"n","strict":true,"defer_loading":false},7,{"name":"","strict":null},{"name":7,"defer_loading":true}]`,
		`[{"name":"n","description":"d\u003e","input_schema":{"b":1,"a":"\u003c"},"strict":true},{},{"defer_loading":true}]`)
	f(t, `"tools":[],"messages":[{"role":"user","content":"x"}]`, "userx")
	f(t, `"messages":[{"role":"user","content":"late tools"}],"tools":[{"name":"n"}]`, `[{"name":"n"}]userlate tools`)
}

func TestTokenIDs(t *testing.T) {
	f := func(t *testing.T, api API, body string, want ...[]uint32) {
		t.Helper()
		r := tokenized(t, api, body)
		var got [][]uint32
		for _, p := range promptsOf(r) {
			ids := make([]uint32, len(p)/4)
			for n := range ids {
				ids[n] = binary.LittleEndian.Uint32(p[4*n:])
			}
			got = append(got, ids)
		}
		if !slices.EqualFunc(got, want, slices.Equal) || r.Exact != (len(want) > 0) {
			t.Errorf("%s: prompts %v, exact %v, want %v, exact", body, got, r.Exact, want)
		}
	}
	f(t, APICompletions, `{"prompt":[1,2,3]}`, []uint32{1, 2, 3})
	f(t, APICompletions, `{"prompt":[ 0 , 4294967295,7.0,1e2 , 12]}`, []uint32{0, 4294967295, 7, 100, 12})
	f(t, APICompletions, `{"prompt":[[1,2],[],[3]]}`, []uint32{1, 2}, []uint32{3})
	f(t, APICompletions, `{"prompt":"text","prompt":[9]}`, []uint32{9})
	f(t, APIEmbeddings, `{"input":[1,2]}`, []uint32{1, 2})
	f(t, APIEmbeddings, `{"input":[[1],[2]]}`, []uint32{1}, []uint32{2})
	f(t, APIGenerate, `{"token_ids":[5],"features":{"mm_hashes":{}}}`, []uint32{5})
	f(t, APIGenerate, `{"input_ids":[6]}`, []uint32{6})
	f(t, APIGenerate, `{"token_ids":[5],"input_ids":null}`, []uint32{5})
	f(t, APIGenerate, `{"token_ids":"x","text":"x"}`)
	f(t, APIGenerate, `{"token_ids":[1,"x"]}`)
	f(t, APIGenerate, `{"token_ids":[12345678901]}`)
	f(t, APIGenerate, `{"token_ids":[1e999]}`)
	f(t, APIGenerate, `{"token_ids":[NaN]}`)
}

func TestParseFields(t *testing.T) {
	type fields struct {
		Model, Salt        string
		Stream, WantsUsage bool
		MaxTokens          int64
		Weight             int
	}
	f := func(t *testing.T, api API, body string, want fields) {
		t.Helper()
		r := tokenized(t, api, body)
		got := fields{string(r.Model), string(r.Salt), r.Stream, r.WantsUsage, r.MaxTokens, r.Weight}
		if got != want {
			t.Errorf("%s: got %+v, want %+v", body, got, want)
		}
	}
	f(t, APINone, `{}`, fields{Weight: 1})
	f(t, APINone, `{"model":"m","stream":true,"cache_salt":"s"}`, fields{Model: "m", Salt: "s", Stream: true, Weight: 1})
	f(t, APIChat, `{"m\u006fdel":"esc\u0061ped\/é","cache_salt":"\u0073"}`, fields{Model: "escaped/é", Salt: "s", Weight: 1})
	f(t, APIChat, `{"model":"first","m\u006fdel":"last"}`, fields{Model: "last", Weight: 1})
	f(t, APIChat, `{"model":"m","model":null}`, fields{Weight: 1})
	f(t, APIChat, `{"cache_salt":7,"stream":"true","stream_options":true}`, fields{Weight: 1})
	f(t, APIChat, `{"stream":true,"stream":false,"stream_options":{"include_usage":true,"x":[1]}}`, fields{WantsUsage: true, Weight: 1})
	f(t, APIChat, `{"stream_options":{"include_usage":true},"stream_options":null}`, fields{Weight: 1})
	f(t, APIChat, `{"max_tokens":7}`, fields{MaxTokens: 7, Weight: 1})
	f(t, APIChat, `{"max_completion_tokens":5,"max_tokens":7}`, fields{MaxTokens: 5, Weight: 1})
	f(t, APIChat, `{"max_tokens":7,"max_completion_tokens":null}`, fields{MaxTokens: 7, Weight: 1})
	f(t, APIChat, `{"max_tokens":7.0}`, fields{MaxTokens: 7, Weight: 1})
	for _, odd := range []string{"-1", "1.5", `"7"`, "null", "true", "[1]", "1e30", "NaN", "0"} {
		f(t, APIChat, `{"max_tokens":`+odd+`}`, fields{Weight: 1})
	}
	f(t, APICompletions, `{"max_tokens":7,"max_output_tokens":8}`, fields{MaxTokens: 7, Weight: 1})
	f(t, APIMessages, `{"max_tokens":7}`, fields{MaxTokens: 7, Weight: 1})
	f(t, APIResponses, `{"max_tokens":7,"max_output_tokens":8}`, fields{MaxTokens: 8, Weight: 1})
	f(t, APIGenerate, `{"sampling_params":{"max_tokens":9,"x":{}}}`, fields{MaxTokens: 9, Weight: 1})
	f(t, APIGenerate, `{"sampling_params":{"max_new_tokens":9},"extra_key":"k"}`, fields{MaxTokens: 9, Salt: "k", Weight: 1})
	f(t, APIGenerate, `{"sampling_params":[],"extra_key":"k","cache_salt":"s"}`, fields{Salt: "s", Weight: 1})
	f(t, APIChat, `{"extra_key":"k"}`, fields{Weight: 1})
	f(t, APIChatBatch, `{"messages":[[],[],[]],"model":"m"}`, fields{Model: "m", Weight: 3})
	f(t, APIChatBatch, `{"messages":[[],[],[]],"messages":[]}`, fields{Weight: 1})
}

// TestSaltAndAdapterChains has one prompt with two salts, for an adapter, and
// with the adapter's name as its salt: no two may share a block.
func TestSaltAndAdapterChains(t *testing.T) {
	const prompt = `"messages":[{"role":"user","content":"the same prompt"}]`
	seen := map[uint64]string{}
	for _, head := range []string{
		`"model":"base"`,
		`"model":"base","cache_salt":"a"`,
		`"model":"base","cache_salt":"b"`,
		`"model":"x"`,
		`"model":"base","cache_salt":"x"`,
	} {
		r := tokenized(t, APIChat, `{`+head+`,`+prompt+`}`)
		hashes := kvindex.AppendChain(nil, kvindex.Seed(r.Model, r.Salt), r.Tokens, 256, 0)
		if len(hashes) != 1 {
			t.Fatalf("%s: %d hashes, want 1", head, len(hashes))
		}
		if other, ok := seen[hashes[0]]; ok {
			t.Errorf("%s has the hash %d of %s, want its own", head, hashes[0], other)
		}
		seen[hashes[0]] = head
	}
}

// samples are bodies of every API, for the fuzzer and for truncation.
func samples() (all []struct {
	api  API
	body string
}) {
	add := func(api API, body string) {
		all = append(all, struct {
			api  API
			body string
		}{api, body})
	}
	add(APINone, `{"model":"m","x":[1,-2.5e3,true,false,null,NaN,-Infinity,"\ud83d\ude42"]}`)
	add(APIChat, `{"model":"m","stream":true,"stream_options":{"include_usage":true},"max_tokens":7,"cache_salt":"s","messages":[`+
		`{"role":"system","content":"a \"quoted\" line\nand 漢字 \u00e9"},{"content":[{"type":"text","text":"look"},`+
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,`+pngBase64+`"}},{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}},`+
		`{"type":"video_url","video_url":{"url":"https://example.com/a.mp4"}},{"type":"audio_url","audio_url":{"url":"u"}},"bare"],"role":"user"}],`+
		`"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","z":1.50,"a":{}}}}]}`)
	add(APICompletions, `{"prompt":["first\n","second"],"max_tokens":3}`)
	add(APICompletions, `{"prompt":[[1,2,3],[4]]}`)
	add(APIEmbeddings, `{"input":["a<b","c"],"model":"e"}`)
	add(APIResponses, `{"instructions":"be nice","tools":[{"b":[1],"a":null}],"input":[{"role":"user","content":[{"type":"input_text","text":"x\u2028"}]}]}`)
	add(APIMessages, `{"system":[{"type":"text","text":"x-anthropic-billing-header: 1"},{"type":"text","text":"sys"}],"max_tokens":9,"tools":[{"name":"n","input_schema":{"type":"object" , "b":"<"},"strict":true}],`+
		`"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"`+pngBase64+`"}},{"type":"text","text":"t"}]},`+
		`{"role":"assistant","content":[{"type":"thinking","thinking":"h"},{"type":"tool_use","id":"1","name":"n","input":{"a" :1}}]},`+
		`{"role":"user","content":[{"type":"tool_result","content":[{"type":"image","source":{"url":"https://e/x.png"}},{"type":"text","text":"a"},{"type":"image","source":{"data":"AA"}},{"type":"text","text":"b"}]}]}]}`)
	add(APIGenerate, `{"token_ids":[1,2,3],"sampling_params":{"max_tokens":4},"features":{"mm_hashes":{"image":["x"]}},"extra_key":"k"}`)
	add(APIChatBatch, `{"messages":[[{"role":"user","content":"a"}],[{"role":"user","content":"b"}]]}`)
	add(APIScoring, `{"query":"q","items":["a"],"state":{"b":1,"a":2},"instructions":"i","questions":["x"]}`)
	return all
}

// TestParseTruncated cuts every sample at every byte: each rest is refused.
func TestParseTruncated(t *testing.T) {
	var r Request
	for _, s := range samples() {
		for cut := range len(s.body) {
			r.Reset()
			r.API, r.Body = s.api, []byte(s.body[:cut])
			var got *BodyError
			if err := r.Parse(); !errors.As(err, &got) || got.Offset > cut {
				t.Fatalf("Parse(%q): error %v, want a *BodyError up to byte %d", s.body[:cut], err, cut)
			}
		}
	}
}

// checkAgainstReference compares one body with encoding/json and the reference.
func checkAgainstReference(t *testing.T, e *Estimator, r *Request, api API, body []byte) {
	t.Helper()
	r.Reset()
	r.API, r.Body = api, bytes.Clone(body)
	err := r.Parse()
	var refused *BodyError
	if err != nil && (!errors.As(err, &refused) || refused.Offset < 0 || refused.Offset > len(body)) {
		t.Fatalf("Parse(%q): error %v, want a *BodyError within the body", body, err)
	}
	if want := referenceError(body); (err != nil) != (want != "") {
		t.Fatalf("Parse(%q): error %v, want %q", body, err, want)
	}
	if err != nil {
		return
	}
	if !bytes.Equal(r.Body, body) {
		t.Fatalf("Parse changed the body to %q, want %q", r.Body, body)
	}
	e.Tokenize(r)
	first := slices.Clone(r.Tokens)
	e.Tokenize(r)
	if !bytes.Equal(r.Tokens, first) {
		t.Fatalf("the second Tokenize of %q made %q, want %q again", body, r.Tokens, first)
	}
	prompts, exact, ok := reference(api, body)
	if !ok {
		return
	}
	if got := promptsOf(r); !slices.EqualFunc(got, prompts, bytes.Equal) || r.Exact != exact {
		t.Fatalf("%q as API %d: prompts %q, exact %v, want %q, %v", body, api, got, r.Exact, prompts, exact)
	}
}

// referenceError returns why a body must be refused, or "".
func referenceError(body []byte) string {
	strict := withoutConstants(body)
	if !json.Valid(strict) {
		return "not JSON"
	}
	if strict = bytes.TrimLeft(strict, " \t\r\n"); strict[0] != '{' {
		return "not an object"
	}
	if depthOf(strict) > maxDepth {
		return "too deep"
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(strict, &fields); err != nil {
		return err.Error()
	}
	if m := fields["model"]; len(m) > 0 && m[0] != '"' && string(m) != "null" {
		return "model is no string"
	}
	return ""
}

// withoutConstants replaces NaN, Infinity and -Infinity outside strings by 0,
// which encoding/json knows.
func withoutConstants(body []byte) (out []byte) {
	inString := false
	for i := 0; i < len(body); i++ {
		if inString {
			if body[i] == '\\' && i+1 < len(body) {
				out = append(out, body[i])
				i++
			} else if body[i] == '"' {
				inString = false
			}
			out = append(out, body[i])
			continue
		}
		for _, c := range []string{"NaN", "-Infinity", "Infinity"} {
			if bytes.HasPrefix(body[i:], []byte(c)) {
				out = append(out, " 0 "...)
				i += len(c)
				break
			}
		}
		if i < len(body) {
			inString = body[i] == '"'
			out = append(out, body[i])
		}
	}
	return out
}

func depthOf(body []byte) int {
	depth, deepest := 0, 0
	d := json.NewDecoder(bytes.NewReader(body))
	for {
		token, err := d.Token()
		if err != nil {
			return deepest
		}
		switch token {
		case json.Delim('{'), json.Delim('['):
			depth++
			deepest = max(deepest, depth)
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
	}
}

// mutate changes a few bytes of a body.
func mutate(rng *rand.Rand, body []byte) []byte {
	body = bytes.Clone(body)
	for range rng.IntN(4) {
		at := rng.IntN(len(body))
		switch rng.IntN(6) {
		case 0:
			body[at] = `{}[]",:\0e-N nu`[rng.IntN(15)]
		case 1:
			body[at] = byte(rng.IntN(256))
		case 2:
			body = slices.Delete(body, at, min(len(body), at+1+rng.IntN(4)))
		case 3:
			end := at + rng.IntN(min(40, len(body)-at))
			body = slices.Insert(body, rng.IntN(len(body)), body[at:end]...)
		case 4:
			body = slices.Insert(body, at, randomString(rng, 3)...)
		default:
			body = slices.Insert(body, at, randomJSON(rng, 2)...)
		}
		if len(body) == 0 {
			return body
		}
	}
	return body
}

// TestParseMatchesReference mutates the samples and replaces values in them.
func TestParseMatchesReference(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	e, err := NewEstimator(EstimateParams{})
	if err != nil {
		t.Fatalf("NewEstimator: error %v, want none", err)
	}
	var r Request
	all := samples()
	for range 8000 {
		s := all[rng.IntN(len(all))]
		checkAgainstReference(t, e, &r, s.api, mutate(rng, []byte(s.body)))
	}
	// Values of any kind in every field.
	for range 3000 {
		var b []byte
		for n := range 1 + rng.IntN(6) {
			b = fmt.Appendf(b, `%c"%s":`, "{,"[min(n, 1)], [...]string{"messages", "tools", "system", "prompt", "input", "instructions", "token_ids", "input_ids",
				"model", "query", "state", "questions", "stream_options", "sampling_params", "max_tokens", "cache_salt"}[rng.IntN(16)])
			b = append(b, randomBody(rng, 3)...)
		}
		checkAgainstReference(t, e, &r, API(rng.IntN(int(APICount))), append(b, '}'))
	}
}

// randomBody makes values that look like messages, blocks and tools.
func randomBody(rng *rand.Rand, depth int) []byte {
	if depth == 0 || rng.IntN(8) == 0 {
		return randomJSON(rng, 1)
	}
	switch rng.IntN(3) {
	case 0:
		return fmt.Appendf(nil, "%d", rng.IntN(1000))
	case 1:
		b := []byte{'['}
		for n := range rng.IntN(4) {
			if n > 0 {
				b = append(b, ',')
			}
			b = append(b, randomBody(rng, depth-1)...)
		}
		return append(b, ']')
	}
	b := []byte{'{'}
	for n := range rng.IntN(6) {
		if n > 0 {
			b = append(b, ',')
		}
		key := [...]string{"role", "content", "type", "text", "image_url", "url", "source", "data", "media_type", "thinking", "id", "name", "input", "input_schema", "strict", "t\\u0079pe"}[rng.IntN(16)]
		b = fmt.Appendf(b, `"%s":`, key)
		switch {
		case key == "type" || rng.IntN(6) == 0:
			b = fmt.Appendf(b, "%q", [...]string{"text", "image", "image_url", "tool_use", "tool_result", "thinking", "input_audio", "audio_url", "video_url"}[rng.IntN(9)])
		case rng.IntN(2) == 0:
			b = append(append(append(b, '"'), randomString(rng, rng.IntN(9))...), '"')
		default:
			b = append(b, randomBody(rng, depth-1)...)
		}
	}
	return append(b, '}')
}

func FuzzParse(f *testing.F) {
	for _, s := range samples() {
		f.Add(uint8(s.api), []byte(s.body))
	}
	e, err := NewEstimator(EstimateParams{})
	if err != nil {
		f.Fatalf("NewEstimator: error %v, want none", err)
	}
	f.Fuzz(func(t *testing.T, api uint8, body []byte) {
		var r Request
		checkAgainstReference(t, e, &r, API(api%uint8(APICount)), body)
	})
}

// TestParseReuse parses bodies in turn with one request, as a pool does: none
// may leave anything behind for the next.
func TestParseReuse(t *testing.T) {
	e, err := NewEstimator(EstimateParams{})
	if err != nil {
		t.Fatalf("NewEstimator: error %v, want none", err)
	}
	rng := rand.New(rand.NewPCG(13, 14))
	all := samples()
	var r Request
	for range 2000 {
		s := all[rng.IntN(len(all))]
		body := s.body[:len(s.body)-rng.IntN(2)] // every other one is refused
		fresh := Request{API: s.api, Body: []byte(body)}
		wantErr := fresh.Parse()
		e.Tokenize(&fresh)
		r.Reset()
		r.API, r.Body = s.api, []byte(body)
		gotErr := r.Parse()
		e.Tokenize(&r)
		if fmt.Sprint(gotErr) != fmt.Sprint(wantErr) {
			t.Fatalf("%s: error %v, want %v", body, gotErr, wantErr)
		}
		if wantErr == nil && (!bytes.Equal(r.Tokens, fresh.Tokens) || !slices.Equal(r.Ends, fresh.Ends) || !bytes.Equal(r.Model, fresh.Model) || !bytes.Equal(r.Salt, fresh.Salt) || r.Weight != fresh.Weight) {
			t.Fatalf("%s: got tokens %q, want %q", body, r.Tokens, fresh.Tokens)
		}
	}
}

// TestResetDropsLargeBuffers keeps a pool from holding the largest body ever seen.
func TestResetDropsLargeBuffers(t *testing.T) {
	r := tokenized(t, APICompletions, `{"prompt":"`+strings.Repeat("x", maxKeptBytes+1)+`"}`)
	r.Reset()
	if got := cap(r.Tokens) + cap(r.prompt.out); got > 2*maxKeptBytes {
		t.Errorf("Reset keeps %d bytes, want at most %d", got, 2*maxKeptBytes)
	}
}

// TestPieces wants few pieces for many messages, however small they are.
func TestPieces(t *testing.T) {
	f := func(t *testing.T, api API, body string, wantPieces int, wantText string) {
		t.Helper()
		r := tokenized(t, api, body)
		if got := len(r.prompt.pieces); got != wantPieces {
			t.Errorf("%.60s: %d pieces, want %d", body, got, wantPieces)
		}
		if got := strings.ReplaceAll(string(r.Tokens), "\x00", ""); got != wantText {
			t.Errorf("%.60s: %d bytes of text, first %.20q, want %d, first %.20q", body, len(got), got, len(wantText), wantText)
		}
	}
	list := func(open, element string, n int, closing string) string {
		return open + strings.TrimSuffix(strings.Repeat(element+",", n), ",") + closing
	}
	chat := func(message string, n int) string { return list(`{"messages":[`, message, n, `]}`) }
	const n = 1000
	f(t, APIChat, chat(`{"role":"user","content":"a"}`, n), 1, strings.Repeat("usera", n))
	f(t, APIChat, chat(`{}`, n), 0, "")
	f(t, APIChat, chat(`{"content":"a"}`, n), 1, strings.Repeat("a", n))
	f(t, APIChat, chat(`{"content":"a","role":"b"}`, n), 2*n, strings.Repeat("ba", n))
	f(t, APIChat, list(`{"tools":[1],"messages":[`, `{"role":"user","content":["a","b"]}`, n, `]}`), 2, "[1]"+strings.Repeat("userab", n))
	f(t, APIMessages, chat(`{"role":"user","content":[{"type":"tool_use","id":"1","name":"n","input":{}}]}`, n), 1, strings.Repeat("user1n{}", n))
	// Beyond the limit nothing is hashed.
	f(t, APIChat, chat(`{"content":"a","role":"b"}`, maxPieces), maxPieces, strings.Repeat("ba", maxPieces/2))
	f(t, APICompletions, list(`{"prompt":[`, `"a"`, maxPieces+1, `]}`), maxPieces, strings.Repeat("a", maxPieces))
	silence := string(binary.LittleEndian.AppendUint32(nil, uint32(xxhash.Sum64(nil))))
	f(t, APIChat, list(`{"messages":[{"content":[`, `{"type":"input_audio"}`, maxPieces, `]}]}`), maxPieces-1, strings.Repeat(silence, maxPieces-1))
}

// checkAllocs parses a body again and again with one request.
func checkAllocs(t *testing.T, api API, body []byte, want float64) {
	t.Helper()
	e, err := NewEstimator(EstimateParams{})
	if err != nil {
		t.Fatalf("NewEstimator: error %v, want none", err)
	}
	var r Request
	var hashes []uint64
	run := func() {
		r.Reset()
		r.API, r.Body = api, body
		if err := r.Parse(); err != nil {
			t.Fatalf("Parse: error %v, want none", err)
		}
		e.Tokenize(&r)
		hashes = kvindex.AppendChain(hashes[:0], kvindex.Seed(r.Model, r.Salt), r.Tokens, 256, 0)
	}
	run()
	if got := testing.AllocsPerRun(100, run); got > want {
		t.Errorf("API %d, %d bytes: %v allocations, want at most %v", api, len(body), got, want)
	}
	if len(hashes) == 0 {
		t.Errorf("API %d: no hashes, want some", api)
	}
}

func TestParseAllocs(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 16))
	body := chatBody(rng, 8<<10)
	checkAllocs(t, APIChat, body, 0)
	tools := `,"tools":[{"type":"function","function":{"name":"f\u0061","z\u0061":1,"description":"a<b","parameters":{"type":"object","properties":{"city":{"type":"string","minLength":1.5,"maxLength":1e3}},"required":["city"]}}}]}`
	checkAllocs(t, APIChat, append(bytes.TrimSuffix(body, []byte("}")), tools...), 0)
	for _, s := range samples() {
		switch {
		case s.api == APINone:
		case bytes.Contains([]byte(s.body), []byte("base64")):
			checkAllocs(t, s.api, []byte(s.body), 16) // the header of an image is read by image/png
		default:
			checkAllocs(t, s.api, []byte(s.body), 0)
		}
	}
}

// TestPromptBytesDoc holds the examples of docs/prompt-bytes.md against the parser.
func TestPromptBytesDoc(t *testing.T) {
	page, err := os.ReadFile("../docs/prompt-bytes.md")
	if err != nil {
		t.Fatalf("reading the page: error %v, want none", err)
	}
	apis := map[string]API{"chat": APIChat, "completions": APICompletions, "embeddings": APIEmbeddings, "responses": APIResponses, "messages": APIMessages, "scoring": APIScoring}
	seen := map[API]bool{}
	rows := regexp.MustCompile("(?m)^\\| ([a-z]+) \\| `(.*?)` \\| `(.*?)` \\|$").FindAllStringSubmatch(string(page), -1)
	for _, row := range rows {
		api, ok := apis[row[1]]
		if !ok {
			t.Errorf("the page has an example of %q, want one of %v", row[1], apis)
		}
		r := tokenized(t, api, row[2])
		if got, want := strings.TrimRight(string(r.Tokens), "\x00"), strings.ReplaceAll(row[3], "⏎", "\n"); got != want {
			t.Errorf("%s %s: got %q, want %q as the page says", row[1], row[2], got, want)
		}
		seen[api] = true
	}
	if len(seen) != len(apis) {
		t.Errorf("the page has examples of %d APIs, want of %d", len(seen), len(apis))
	}
}
