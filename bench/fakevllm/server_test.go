package fakevllm

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs a server for one test.
func start(t *testing.T, opt Options) *Server {
	t.Helper()
	if opt.Speed == 0 && !opt.Manual {
		opt.Speed = 50
	}
	s, err := Start(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// call sends one request over its own connection and returns status and body.
func call(t *testing.T, s *Server, method, path, body string, headers ...string) (int, string) {
	t.Helper()
	resp := ask(t, dial(t, s), method, path, body, headers...)
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp.StatusCode, string(b)
}

func dial(t *testing.T, s *Server) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// send writes a request.
func send(t *testing.T, c net.Conn, method, path, body string, headers ...string) {
	t.Helper()
	head := method + " " + path + " HTTP/1.1\r\nhost: fake\r\n"
	if body != "" {
		head += "content-type: application/json\r\ncontent-length: " + strconv.Itoa(len(body)) + "\r\n"
	}
	for _, h := range headers {
		head += h + "\r\n"
	}
	if _, err := io.WriteString(c, head+"\r\n"+body); err != nil {
		t.Fatal(err)
	}
}

// ask sends a request and reads the head of its answer.
func ask(t *testing.T, c net.Conn, method, path, body string, headers ...string) *http.Response {
	t.Helper()
	send(t, c, method, path, body, headers...)
	return head(t, bufio.NewReader(c))
}

func head(t *testing.T, r *bufio.Reader) *http.Response {
	t.Helper()
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for limit := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("%s: got nothing of it within 20 s", what)
		}
	}
}

type sse struct{ name, data string }

// events takes an event stream apart.
func events(body string) (out []sse) {
	var e sse
	for line := range strings.SplitSeq(body, "\n") {
		line = strings.TrimSuffix(line, "\r")
		switch {
		case strings.HasPrefix(line, "event: "):
			e.name = line[7:]
		case strings.HasPrefix(line, "data: "):
			e.data = line[6:]
		case line == "" && e.data != "":
			out = append(out, e)
			e = sse{}
		}
	}
	return out
}

// at reads a value of a JSON document: at(doc, "choices", "0", "text").
func at(t *testing.T, doc string, path ...string) any {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(doc), &v); err != nil {
		t.Fatalf("%v in %s", err, doc)
	}
	for _, p := range path {
		switch x := v.(type) {
		case map[string]any:
			v = x[p]
		case []any:
			i, _ := strconv.Atoi(p)
			if i >= len(x) {
				return nil
			}
			v = x[i]
		default:
			return nil
		}
	}
	return v
}

// metric returns the first sample whose line starts with this text.
func metric(t *testing.T, s *Server, name string) float64 {
	t.Helper()
	_, page := call(t, s, "GET", "/metrics", "")
	for line := range strings.SplitSeq(page, "\n") {
		if rest, ok := strings.CutPrefix(line, name); ok && (rest[0] == '{' || rest[0] == ' ') {
			v, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			return v
		}
	}
	t.Fatalf("no %s on the page:\n%s", name, page)
	return 0
}

const hello = `"messages":[{"role":"user","content":"Hello, who are you, and what are you able to do for me today"}]`

func TestEndpoints(t *testing.T) {
	s := start(t, Options{Models: []string{"base", "lora"}, MaxModelLen: 4096, OutputTokens: 5})
	f := func(method, path, body string, status int, want ...string) { // want: path=value, by dots
		t.Helper()
		got, doc := call(t, s, method, path, body)
		if got != status {
			t.Errorf("%s %s %s: got status %d, want %d: %s", method, path, body, got, status, doc)
			return
		}
		for _, w := range want {
			where, value, _ := strings.Cut(w, "=")
			v := at(t, doc, strings.Split(where, ".")...)
			if n, ok := v.(float64); ok {
				v = strconv.FormatFloat(n, 'f', -1, 64)
			}
			if fmt.Sprint(v) != value {
				t.Errorf("%s %s %s: got %s=%s, want %s in %s", method, path, body, where, v, value, doc)
			}
		}
	}
	f("GET", "/v1/models", "", 200, "object=list", "data.0.id=base", "data.0.parent=<nil>", "data.0.max_model_len=4096", "data.1.id=lora", "data.1.parent=base")
	f("GET", "/version", "", 200, "version=0.32.0")
	f("GET", "/load", "", 200, "server_load=0")
	f("GET", "/is_sleeping", "", 200, "is_sleeping=false")
	f("GET", "/server_info", "", 200, "served_model_name=base", "engine.block_size=16")
	f("GET", "/get_server_info", "", 200, "model_path=base")
	f("GET", "/nope", "", 404, "detail=Not Found")
	f("GET", "/v1/models/base", "", 404, "detail=Not Found")
	f("POST", "/health", "", 405, "detail=Method Not Allowed")
	f("GET", "/v1/chat/completions", "", 405, "detail=Method Not Allowed")
	f("POST", "/reset_prefix_cache", "", 200, "success=true")
	for _, path := range []string{"/health", "/ping"} {
		if status, body := call(t, s, "GET", path, ""); status != 200 || body != "" {
			t.Errorf("GET %s: got %d %q, want 200 and nothing", path, status, body)
		}
	}

	f("POST", "/v1/chat/completions", `{"model":"base",`+hello+`}`, 200,
		"object=chat.completion", "model=base", "choices.0.index=0", "choices.0.message.role=assistant", "choices.0.finish_reason=stop",
		"usage.prompt_tokens=18", "usage.completion_tokens=5", "usage.total_tokens=23",
		"usage.prompt_tokens_details.cached_tokens=0", "usage.prompt_tokens_details.created_cache_tokens=16")
	f("POST", "/v1/chat/completions", `{`+hello+`,"max_tokens":2,"n":2}`, 200,
		"model=base", "choices.1.index=1", "choices.1.finish_reason=length", "usage.prompt_tokens=18", "usage.completion_tokens=4",
		"usage.prompt_tokens_details.cached_tokens=16", "usage.prompt_tokens_details.created_cache_tokens=0")
	f("POST", "/v1/chat/completions", `{`+hello+`,"max_completion_tokens":1,"max_tokens":4}`, 200, "usage.completion_tokens=1")
	f("POST", "/v1/chat/completions", `{`+hello+`,"max_tokens":9,"ignore_eos":true}`, 200, "usage.completion_tokens=9", "choices.0.finish_reason=length")
	f("POST", "/v1/chat/completions", `{`+hello+`,"min_tokens":7}`, 200, "usage.completion_tokens=7", "choices.0.finish_reason=stop")
	f("POST", "/v1/chat/completions", `{`+hello+`,"Model":"nope","model":"nope","m\u006fdel":"lora"}`, 200, "model=lora")

	f("POST", "/v1/completions", `{"prompt":"Once upon a time"}`, 200, "object=text_completion", "usage.prompt_tokens=4", "usage.completion_tokens=5", "choices.0.finish_reason=stop")
	f("POST", "/v1/completions", `{"prompt":["Once upon","two"],"max_tokens":2}`, 200, "choices.1.index=1", "usage.prompt_tokens=4", "usage.completion_tokens=4")
	f("POST", "/v1/completions", `{"prompt":[1,2,3],"max_tokens":2}`, 200, "usage.prompt_tokens=3", "usage.prompt_tokens_details.created_cache_tokens=<nil>")
	f("POST", "/v1/completions", `{"prompt":[[1,2,3],[4]],"max_tokens":2}`, 200, "usage.prompt_tokens=4")
	_, echoed := call(t, s, "POST", "/v1/completions", `{"prompt":"Say \"hi\"","max_tokens":1,"echo":true}`)
	if text := at(t, echoed, "choices", "0", "text").(string); !strings.HasPrefix(text, `Say "hi"`) || len(text) != len(`Say "hi"`)+4 {
		t.Errorf("echo: got %q, want the prompt and one token", text)
	}

	f("POST", "/v1/responses", `{"input":"Hello","instructions":"Be nice","max_output_tokens":3}`, 200,
		"object=response", "status=incomplete", "incomplete_details.reason=max_output_tokens", "output.0.content.0.type=output_text",
		"usage.input_tokens=9", "usage.output_tokens=3", "usage.total_tokens=12", "usage.input_tokens_details.cached_tokens=0")
	f("POST", "/v1/responses", `{"input":[{"role":"user","content":[{"type":"input_text","text":"Hello"}]},{"type":"function_call_output","call_id":"1","output":"x"}]}`, 200,
		"status=completed", "incomplete_details=<nil>", "usage.output_tokens=5")
	f("POST", "/v1/messages", `{"max_tokens":3,"messages":[{"role":"user","content":"Hello"}]}`, 200,
		"type=message", "role=assistant", "content.0.type=text", "stop_reason=max_tokens", "usage.input_tokens=5", "usage.output_tokens=3", "usage.cache_read_input_tokens=0")
	f("POST", "/v1/messages", `{"max_tokens":30,"messages":[{"role":"user","content":"Hello"}]}`, 200, "stop_reason=end_turn", "usage.output_tokens=5")
	f("POST", "/v1/messages/count_tokens", `{"messages":[{"role":"user","content":"Hello"}]}`, 200, "input_tokens=5")
	f("POST", "/v1/embeddings", `{"input":"one","encoding_format":"base64"}`, 200, "data.0.object=embedding")
	f("POST", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"max_tokens":1,"n":2}}`, 200, "choices.1.index=1", "usage.completion_tokens=2")
	f("POST", "/v1/embeddings", `{"input":["one","two!!"]}`, 200, "object=list", "data.1.index=1", "data.1.object=embedding", "usage.prompt_tokens=3", "usage.completion_tokens=0")
	f("POST", "/v1/embeddings", `{`+hello+`}`, 200, "usage.prompt_tokens=18")
	f("POST", "/tokenize", `{"prompt":"Hello world"}`, 200, "count=3", "max_model_len=4096", "tokens.2=6581362", "token_strs=<nil>")
	f("POST", "/tokenize", `{`+hello+`,"return_token_strs":true}`, 200, "count=18", "token_strs.0=<|user|>", "token_strs.1=Hell", "token_strs.17=<|assistant|>")
	f("POST", "/detokenize", `{"tokens":[511,1819043144,111,1535]}`, 200, "prompt=<|user|>Hello<|end|>")
	f("POST", "/v1/chat/completions/render", `{`+hello+`,"max_tokens":5,"cache_salt":"s"}`, 200,
		"token_ids.0=511", "token_ids.17=767", "sampling_params.max_tokens=5", "model=base", "cache_salt=s", "stream=false")
	f("POST", "/v1/completions/render", `{"prompt":["Hello world","b"]}`, 200, "0.token_ids.2=6581362", "1.token_ids.0=98", "1.sampling_params.max_tokens=4095", "1.cache_salt=<nil>")
	f("POST", "/inference/v1/generate", `{"token_ids":[40,41,42],"sampling_params":{"max_tokens":3}}`, 200,
		"model=base", "usage.prompt_tokens=3", "choices.0.finish_reason=length", "choices.0.token_ids.3=<nil>", "output_mode=tokens")

	// Refusals.
	const chat = "/v1/chat/completions"
	f("POST", chat, `{"model":"nope",`+hello+`}`, 404, "error.type=NotFoundError", "error.param=model", "error.code=404", "error.message=The model `nope` does not exist. Valid aliases: base, lora.")
	f("POST", chat, `{"model":"base"}`, 400, "error.type=Bad Request", "error.param=body.messages", "error.code=400")
	f("POST", chat, `{"messages":[]}`, 400, "error.type=BadRequestError", "error.param=<nil>")
	f("POST", chat, `{"messages":[1]}`, 400, "error.param=body.messages")
	f("POST", chat, `{"messages":"x"}`, 400, "error.type=Bad Request", "error.param=body.messages")
	f("POST", chat, `{bad`, 400, "error.type=Bad Request", "error.param=body.2")
	f("POST", chat, `[]`, 400, "error.param=body")
	f("POST", chat, `{`+hello+`,"max_tokens":-1}`, 400, "error.param=max_tokens")
	f("POST", chat, `{`+hello+`,"max_tokens":5000}`, 400, "error.param=max_tokens", "error.type=BadRequestError")
	f("POST", chat, `{`+hello+`,"n":-1}`, 400, "error.param=n")
	f("POST", chat, `{`+hello+`,"n":9999}`, 400, "error.param=n")
	f("POST", chat, `{`+hello+`,"stream":1}`, 400, "error.param=body.stream")
	f("POST", chat, `{`+hello+`,"min_tokens":"x"}`, 400, "error.param=body.min_tokens")
	f("POST", chat, `{`+hello+`,"n":"x"}`, 400, "error.param=body.n")
	f("POST", chat, `{`+hello+`,"max_tokens":"x"}`, 400, "error.param=body.max_tokens")
	f("POST", chat, `{`+hello+`,"ignore_eos":"x"}`, 400, "error.param=body.ignore_eos")
	f("POST", chat, `{`+hello+`,"cache_salt":1}`, 400, "error.param=body.cache_salt")
	f("POST", chat, `{`+hello+`,"model":1}`, 400, "error.param=body.model")
	f("POST", chat, `{`+hello+`,"add_generation_prompt":1}`, 400, "error.param=body.add_generation_prompt")
	f("POST", chat, `{`+hello+`,"continue_final_message":1}`, 400, "error.param=body.continue_final_message")
	f("POST", chat, `{`+hello+`,"stream":true,"stream_options":1}`, 400, "error.param=body.stream_options")
	f("POST", chat, `{`+hello+`,"stream_options":{"include_usage":true}}`, 400, "error.param=stream_options")
	f("POST", chat, `{"messages":[{"role":"user","content":"`+strings.Repeat("long", 4096)+`"}]}`, 400, "error.param=input_tokens")
	f("POST", "/v1/completions", `{"prompt":""}`, 400, "error.param=prompt")
	f("POST", "/v1/completions", `{}`, 400, "error.param=prompt")
	f("POST", "/v1/completions", `{"prompt":{}}`, 400, "error.param=body.prompt")
	f("POST", "/v1/completions", `{"prompt":[[]]}`, 400, "error.param=prompt")
	f("POST", "/v1/responses", `{}`, 400, "error.param=body.input")
	f("POST", "/v1/completions", `{"prompt":"a","echo":1}`, 400, "error.param=body.echo")
	f("POST", "/v1/responses", `{"model":"nope","input":"a"}`, 404, "error.param=model")
	f("POST", "/v1/responses", `[]`, 400, "error.param=body")
	f("POST", "/v1/responses", `{"input":3}`, 400, "error.param=body.input")
	f("POST", "/v1/messages", `{"messages":[]}`, 400, "error.param=body.max_tokens")
	f("POST", "/v1/messages", `{"max_tokens":1,"messages":[]}`, 400, "type=error", "error.type=BadRequestError")
	f("POST", "/v1/messages", `{"model":"nope","max_tokens":3,`+hello+`}`, 404, "type=error", "error.type=NotFoundError")
	f("POST", "/v1/messages", `{"max_tokens":1,"messages":"x"}`, 400, "error.param=body.messages")
	f("POST", "/v1/messages", `[]`, 400, "error.param=body")
	f("POST", "/v1/messages/count_tokens", `[]`, 400, "error.param=body")
	f("POST", "/v1/messages/count_tokens", `{"model":"nope",`+hello+`}`, 404, "type=error")
	f("POST", "/v1/messages/count_tokens", `{}`, 400, "error.param=body.messages")
	f("POST", "/v1/embeddings", `{}`, 400, "error.param=input")
	f("POST", "/tokenize", `{"model":"nope","prompt":"a"}`, 404, "error.param=model")
	f("POST", "/v1/embeddings", `[]`, 400, "error.param=body")
	f("POST", "/v1/embeddings", `{"input":"a","encoding_format":1}`, 400, "error.param=body.encoding_format")
	f("POST", "/v1/embeddings", `{"input":"a","model":"nope"}`, 404, "error.param=model")
	f("POST", "/tokenize", `[]`, 400, "error.param=body")
	f("POST", "/detokenize", `[]`, 400, "error.param=body")
	f("POST", "/detokenize", `{}`, 400, "error.param=body.tokens")
	f("POST", "/v1/chat/completions/render", `[]`, 400, "error.param=body")
	f("POST", "/v1/chat/completions/render", `{"model":"nope",`+hello+`}`, 404, "error.param=model")
	f("POST", "/v1/chat/completions/render", `{"cache_salt":1,`+hello+`}`, 400, "error.param=body.cache_salt")
	f("POST", "/v1/completions/render", `[]`, 400, "error.param=body")
	f("POST", "/v1/completions/render", `{}`, 400, "error.param=prompt")
	f("POST", "/v1/completions/render", `{"prompt":"a","stream":1}`, 400, "error.param=body.stream")
	f("POST", "/v1/completions/render", `{"prompt":"a","max_tokens":5000}`, 400, "error.param=max_tokens")
	f("POST", "/inference/v1/generate", `[]`, 400, "error.param=body")
	f("POST", "/inference/v1/generate", `{"token_ids":[1],"model":"nope"}`, 404, "error.param=model")
	f("POST", "/inference/v1/generate", `{"token_ids":["x"]}`, 400, "error.param=body.token_ids")
	f("POST", "/tokenize", `{}`, 400, "error.param=body.prompt")
	f("POST", "/detokenize", `{"tokens":"x"}`, 400, "error.param=body.tokens")
	f("POST", "/v1/chat/completions/render", `{}`, 400, "error.param=body.messages")
	f("POST", "/v1/completions/render", `{"prompt":"a","max_tokens":0}`, 400, "error.param=max_tokens")
	f("POST", "/inference/v1/generate", `{}`, 400, "error.param=body.token_ids")
	f("POST", "/fake/faults", `{"brake":"reset"}`, 400, "error.code=400")
	if status, doc := call(t, s, "POST", chat, "", "content-length: 0", "content-type: application/json"); status != 400 || at(t, doc, "error", "param") != "body" {
		t.Errorf("no body: got %d %s, want 400 about body", status, doc)
	}
	if status, doc := call(t, s, "POST", chat, "", "content-length: 0", "content-type: text/plain"); status != 400 || !strings.Contains(doc, "Unsupported Media Type") {
		t.Errorf("text/plain: got %d %s, want 400", status, doc)
	}
}

func TestAudio(t *testing.T) {
	s := start(t, Options{OutputTokens: 4})
	form := func(fields ...string) (string, string) { // name=value
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		for _, x := range fields {
			name, value, _ := strings.Cut(x, "=")
			part, _ := w.CreateFormField(name)
			if name == "file" {
				part, _ = w.CreateFormFile(name, "a.wav")
			}
			_, _ = io.WriteString(part, value)
		}
		_ = w.Close()
		return b.String(), w.FormDataContentType()
	}
	f := func(status int, want string, fields ...string) string {
		t.Helper()
		body, kind := form(fields...)
		c := dial(t, s)
		_, _ = fmt.Fprintf(c, "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s", kind, len(body), body)
		resp := head(t, bufio.NewReader(c))
		got, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != status || !strings.Contains(string(got), want) {
			t.Errorf("%.60q: got %d, %v, %s, want %d and %s", fields, resp.StatusCode, err, got, status, want)
		}
		return string(got)
	}
	wav := "file=" + strings.Repeat("pcm!", 16_001)
	f(200, `"usage":{"type":"duration","seconds":3}`, wav, "model=fake")
	f(200, `"duration":"3.0"`, wav, "response_format=verbose_json")
	if text := f(200, " ", wav, "response_format=text"); len(text) != 17 {
		t.Errorf("text: got %q, want four tokens and a newline", text)
	}
	stream := events(f(200, `"object":"transcription.chunk"`, "model=fake", "stream=true", "stream_include_usage=true", wav))
	if n := len(stream); n < 3 || stream[n-1].data != "[DONE]" || at(t, stream[n-2].data, "usage", "prompt_tokens") != 101.0 {
		t.Errorf("stream: got %v, want usage of 101 tokens and [DONE]", stream)
	}
	f(400, "body.file", "model=fake")
	f(400, "body.stream", wav, "stream=maybe")
	f(404, "NotFoundError", wav, "model=nope")
	for _, head := range []string{"content-type: application/json", "content-type: multipart/form-data; boundary=x"} {
		if status, doc := call(t, s, "POST", "/v1/audio/transcriptions", "", head, "content-length: 3", "\r\nabc"); status != 400 {
			t.Errorf("%s: got %d %s, want 400", head, status, doc)
		}
	}
}

// TestStreams checks the order and the ends of every API's events: step by
// step, so that each token is an event.
func TestStreams(t *testing.T) {
	// token is what the data of every event with a token contains, n how many a step has.
	f := func(path, body, token string, n int, want ...string) []sse { // want: event names, or what the data contains
		t.Helper()
		s := start(t, Options{Manual: true})
		resp := ask(t, dial(t, s), "POST", path, body) // the head comes before any step
		if got := resp.Header.Get("Content-Type"); got != "text/event-stream; charset=utf-8" {
			t.Errorf("%s: got content-type %q", path, got)
		}
		eventually(t, "the request", func() bool { return s.Stats().Awaiting == int64(n) })
		var all strings.Builder
		r := bufio.NewReader(resp.Body)
		for s.Step() {
			for seen := 0; seen < n; {
				line, err := r.ReadString('\n')
				if err != nil {
					t.Fatalf("%s: got %v behind %s", path, err, all.String())
				}
				if all.WriteString(line); strings.Contains(line, token) {
					seen++
				}
			}
		}
		rest, err := io.ReadAll(r)
		if err != nil {
			t.Errorf("%s: got %v, want a clean end", path, err)
		}
		all.Write(rest)
		got := events(all.String())
		if len(got) != len(want) {
			t.Fatalf("%s: got %d events, want %d:\n%s", path, len(got), len(want), all.String())
		}
		for i, e := range got {
			if e.name != want[i] && !strings.Contains(e.data, want[i]) {
				t.Errorf("%s event %d: got %v, want %s", path, i, e, want[i])
			}
			if e.data != "[DONE]" && !json.Valid([]byte(e.data)) {
				t.Errorf("%s event %d: got no JSON: %s", path, i, e.data)
			}
		}
		return got
	}
	const usage = `,"stream":true,"stream_options":{"include_usage":true}}`
	chat := f("/v1/chat/completions", `{"max_tokens":3,`+hello+usage, `{"content":`, 1,
		`{"role":"assistant","content":""}`, `"finish_reason":null`, `"finish_reason":null`, `"finish_reason":"length"`,
		`"choices":[],"usage":{"prompt_tokens":18,"total_tokens":21,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":16}}`, "[DONE]")
	if text := at(t, chat[1].data, "choices", "0", "delta", "content").(string); len(text) != 4 {
		t.Errorf("first token: got %q, want four bytes", text)
	}
	f("/v1/chat/completions", `{"max_tokens":2,`+hello+`,"stream":true}`, `{"content":`, 1, `"role"`, `"content"`, `"system_fingerprint"`, "[DONE]")
	f("/v1/chat/completions", `{"max_tokens":2,`+hello+`,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`, `{"content":`, 1,
		`"completion_tokens":0`, `"completion_tokens":1`, `"completion_tokens":2`, `"choices":[]`, "[DONE]")
	f("/v1/chat/completions", `{"max_tokens":1,"n":2,`+hello+usage, `{"content":`, 2, `"index":0,"delta":{"role"`, `"index":0,"delta":{"content"`, `"index":1,"delta":{"role"`, `"index":1,"delta":{"content"`, `"completion_tokens":2`, "[DONE]")
	f("/v1/completions", `{"max_tokens":2,"prompt":"Once","echo":true`+usage, `"text":`, 1, `"text":"Once`, `"finish_reason":"length"`, `"total_tokens":3`, "[DONE]")
	f("/v1/responses", `{"max_output_tokens":2,"input":"Hello","stream":true}`, `"response.output_text.delta"`, 1,
		"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added", "response.output_text.delta", "response.output_text.delta",
		"response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed")
	f("/v1/messages", `{"max_tokens":2,`+hello+`,"stream":true}`, `"text_delta"`, 1,
		"message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop", "message_delta", "message_stop")
	f("/inference/v1/generate", `{"token_ids":[1,2],"sampling_params":{"max_tokens":2}`+usage, `"token_ids":[`, 1, `"finish_reason":null`, `"finish_reason":"length"`, `"choices":[]`, "[DONE]")
}

// TestConversation plays several turns and compares every answer's usage with
// what the caps of the cache say, and the sums with /metrics.
func TestConversation(t *testing.T) {
	s := start(t, Options{OutputTokens: 21, Engine: func() Model { m := DefaultModel(); m.Blocks = 8192; return m }()})
	const block = 16
	var prompt, cached, output float64
	messages := []string{`{"role":"system","content":"You answer briefly, and every answer is one that has four bytes to a token."}`}
	previous := 0 // tokens of the last prompt and its answer
	for turn := range 6 {
		messages = append(messages, fmt.Sprintf(`{"role":"user","content":"Question %d of a conversation that goes on for a while."}`, turn))
		status, doc := call(t, s, "POST", "/v1/chat/completions", `{"messages":[`+strings.Join(messages, ",")+`]}`)
		if status != 200 {
			t.Fatalf("turn %d: got %d %s", turn, status, doc)
		}
		p, o := at(t, doc, "usage", "prompt_tokens").(float64), at(t, doc, "usage", "completion_tokens").(float64)
		c := at(t, doc, "usage", "prompt_tokens_details", "cached_tokens").(float64)
		created := at(t, doc, "usage", "prompt_tokens_details", "created_cache_tokens").(float64)
		// The last token of an answer is never fed back, so its block is not full one token earlier than it looks.
		want := float64(max(0, previous-1) / block * block)
		if c != want {
			t.Errorf("turn %d: got %v cached tokens, want %v of %v", turn, c, want, p)
		}
		if full := math.Floor(p/block) * block; created != full-c {
			t.Errorf("turn %d: got %v created tokens, want %v", turn, created, full-c)
		}
		prompt, cached, output, previous = prompt+p, cached+c, output+o, int(p+o)
		messages = append(messages, `{"role":"assistant","content":`+string(appendString(nil, at(t, doc, "choices", "0", "message", "content").(string)))+`}`)
	}
	for name, want := range map[string]float64{
		"vllm:prompt_tokens_total": prompt, "vllm:prefix_cache_queries_total": prompt, "vllm:prefix_cache_hits_total": cached,
		"vllm:prompt_tokens_cached_total": cached, "vllm:generation_tokens_total": output,
		`vllm:request_success_total{engine="0",finished_reason="stop",model_name="fake"}`: 6, "vllm:request_prompt_tokens_sum": prompt,
		"vllm:time_to_first_token_seconds_count": 6, "vllm:num_requests_running": 0, "vllm:kv_cache_usage_perc": 0,
	} {
		if i := strings.IndexByte(name, '{'); i > 0 {
			_, page := call(t, s, "GET", "/metrics", "")
			if !strings.Contains(page, name+" "+string(appendNumber(nil, want))+"\n") {
				t.Errorf("%s: got none of %v on\n%s", name, want, page)
			}
			continue
		}
		if got := metric(t, s, name); got != want {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
	_, page := call(t, s, "GET", "/metrics", "")
	if want := `kv_cache_size_tokens="131072",num_cpu_blocks="None",num_gpu_blocks="8192"`; !strings.Contains(page, want) || !strings.Contains(page, `block_size="16"`) {
		t.Errorf("cache_config_info: got none with %s", want)
	}
}

// TestSeparateChains is fault case 21: salts and adapters share nothing.
func TestSeparateChains(t *testing.T) {
	s := start(t, Options{Models: []string{"base", "x"}, OutputTokens: 1})
	f := func(fields string, want float64) {
		t.Helper()
		_, doc := call(t, s, "POST", "/v1/chat/completions", `{`+fields+hello+`}`)
		if got := at(t, doc, "usage", "prompt_tokens_details", "cached_tokens"); got != want {
			t.Errorf("%s: got %v cached tokens, want %v", fields, got, want)
		}
	}
	for _, want := range []float64{0, 16} {
		f("", want)
		f(`"cache_salt":"a",`, want)
		f(`"cache_salt":"b",`, want)
		f(`"cache_salt":"x",`, want)
		f(`"model":"x",`, want)
	}
	f(`"model":"base",`, 16)
	if status, doc := call(t, s, "POST", "/reset_prefix_cache", ""); status != 200 || doc != `{"success":true}` {
		t.Errorf("reset: got %d %s", status, doc)
	}
	f("", 0)
}

// TestGaugesLag sees what a scraper sees: the engine as of its last step.
func TestGaugesLag(t *testing.T) {
	s := start(t, Options{Manual: true, Models: []string{"base", "lora"}, Engine: func() Model { m := DefaultModel(); m.MaxSeqs, m.Blocks = 1, 100; return m }()})
	f := func(when string, running, waiting, usage float64) {
		t.Helper()
		r, w, u := metric(t, s, "vllm:num_requests_running"), metric(t, s, "vllm:num_requests_waiting"), metric(t, s, "vllm:kv_cache_usage_perc")
		if r != running || w != waiting || u != usage {
			t.Errorf("%s: got %v running, %v waiting, %v used, want %v, %v, %v", when, r, w, u, running, waiting, usage)
		}
	}
	for i, model := range []string{"base", "lora"} {
		send(t, dial(t, s), "POST", "/v1/chat/completions", `{"model":"`+model+`",`+hello+`,"max_tokens":2}`)
		eventually(t, "the request in the engine", func() bool { return s.Stats().Awaiting == int64(i+1) })
	}
	f("before the first step", 0, 0, 0)
	if _, ok := s.begin(); !ok {
		t.Fatal("got no step, want one")
	}
	f("during the first step", 0, 0, 0)
	s.finish()
	f("behind the first step", 1, 1, 0.02)
	_, page := call(t, s, "GET", "/metrics", "")
	if want := `vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters="lora"}`; !strings.Contains(page, want) {
		t.Errorf("adapters: got none of %s", want)
	}
	for s.Step() {
	}
	f("at the end", 0, 0, 0)
	eventually(t, "both answers", func() bool { return s.Stats().Completed == 2 })
}

// TestAbort leaves in every phase and sees the slot and the blocks come free.
func TestAbort(t *testing.T) {
	f := func(name, path, fields string, busy bool, steps int) {
		t.Helper()
		s := start(t, Options{Manual: true, Engine: func() Model { m := DefaultModel(); m.MaxSeqs, m.Budget = 1, 8; return m }()})
		first := dial(t, s)
		if busy {
			send(t, first, "POST", path, `{`+fields+hello+`,"max_tokens":8}`)
			eventually(t, "the first request", func() bool { return s.Stats().Awaiting == 1 })
		}
		c := dial(t, s)
		before := s.Stats().Awaiting
		send(t, c, "POST", path, `{`+fields+hello+`,"max_tokens":8}`)
		eventually(t, "the request", func() bool { return s.Stats().Awaiting == before+1 })
		for range steps {
			s.Step()
		}
		_ = c.Close()
		eventually(t, "the abort", func() bool { return s.Stats().Aborted == 1 })
		_ = first.Close()
		eventually(t, "no request", func() bool { return s.Stats().InFlight == 0 })
		s.Step()
		if got := s.Stats(); got.Engine.Running+got.Engine.Waiting+got.Engine.UsedBlocks != 0 || got.Awaiting != 0 || got.Completed != 0 {
			t.Errorf("%s: got %+v, want an empty engine", name, got)
		}
	}
	for _, fields := range []string{"", `"stream":true,`} {
		f("queue "+fields, "/v1/chat/completions", fields, true, 1)
		f("prefill "+fields, "/v1/chat/completions", fields, false, 1)
		f("decode "+fields, "/v1/chat/completions", fields, false, 4)
	}
	f("messages", "/v1/messages", `"stream":true,`, false, 4)
	f("embeddings", "/v1/embeddings", "", false, 1)

	// A plain answer whose client half-closes counts as left, too.
	s := start(t, Options{Manual: true})
	c := dial(t, s)
	send(t, c, "POST", "/v1/chat/completions", `{`+hello+`}`)
	eventually(t, "the request", func() bool { return s.Stats().Awaiting == 1 })
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the abort", func() bool { return s.Stats().Aborted == 1 })
}

func TestConnections(t *testing.T) {
	s := start(t, Options{OutputTokens: 2, MaxBody: 1000})
	// Three requests at once on one connection, one of them streamed, one with a chunked body, and one that is the last.
	c := dial(t, s)
	body := `{` + hello + `,"stream":true}`
	send(t, c, "POST", "/v1/chat/completions", body)
	_, _ = fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nContent-Type: application/json; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n", body[:3], len(body)-3, body[3:])
	send(t, c, "GET", "/version", "", "connection: close")
	r := bufio.NewReader(c)
	for i := range 3 {
		resp := head(t, r)
		b, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != 200 || (i == 2) != resp.Close {
			t.Errorf("answer %d: got %d, %v, close %v: %s", i, resp.StatusCode, err, resp.Close, b)
		}
	}
	if _, err := r.ReadByte(); err != io.EOF {
		t.Errorf("behind connection: close: got %v, want EOF", err)
	}

	f := func(name, request, want string) {
		t.Helper()
		c := dial(t, s)
		_, _ = io.WriteString(c, request)
		got, _ := io.ReadAll(c)
		if !strings.HasPrefix(string(got), want) {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
	f("HTTP/1.0", "POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: "+strconv.Itoa(len(body))+"\r\n\r\n"+body, "HTTP/1.1 200 OK\r\n")
	f("HEAD", "HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n", "HTTP/1.1 405 Method Not Allowed\r\n")
	f("no HTTP", "hello\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n")
	f("a body above the limit", "POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", "HTTP/1.1 413 Request Entity Too Large\r\n")
	f("expect", "POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n{\"prompt\":\"a\"}", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")

	resp := ask(t, dial(t, s), "POST", "/v1/chat/completions", `{`+hello+`}`, "X-Request-Id: abc")
	b, _ := io.ReadAll(resp.Body)
	if got := resp.Header.Get("x-request-id"); got != "abc" || at(t, string(b), "id") != "chatcmpl-abc" {
		t.Errorf("x-request-id: got %q, %s", got, b)
	}
	call(t, s, "POST", "/v1/chat/completions", `{`+hello+`}`, "x-request-id: abc")
	call(t, s, "POST", "/v1/chat/completions", `{`+hello+`}`, "x-request-id: def")
	st := s.Stats()
	if s.Executions("abc") != 2 || s.Executions("def") != 1 || s.Executions("ghi") != 0 || st.Repeated["abc"] != 2 || st.Distinct != 2 {
		t.Errorf("executions: got %v, %d distinct, want abc twice, def once", st.Repeated, st.Distinct)
	}
	if st.Last.Method != "POST" || st.Last.URI != "/v1/chat/completions" || !strings.Contains(st.Last.Headers, "x-request-id: def\r\n") {
		t.Errorf("last request: got %+v", st.Last)
	}
	_, doc := call(t, s, "GET", "/fake/stats", "")
	if at(t, doc, "requests", "/v1/chat/completions") != 6.0 || at(t, doc, "executed") != 6.0 || at(t, doc, "last", "uri") != "/v1/chat/completions" {
		t.Errorf("/fake/stats: got %s", doc)
	}
}

func TestOptions(t *testing.T) {
	f := func(opt Options, want string) {
		t.Helper()
		s, err := Start(opt)
		if err == nil {
			s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want %q", opt, err, want)
		}
	}
	f(Options{Engine: Model{Blocks: 1}}, "max_num_seqs is 0")
	f(Options{MaxModelLen: 1}, "max model length 1: use 2 to 1024000")
	f(Options{MaxModelLen: 2e6}, "max model length 2000000")
	f(Options{Speed: -1}, "speed is -1")
	f(Options{MaxQueued: -1}, "max queued is -1")
	f(Options{Instant: true, Manual: true}, "exclude each other")
	f(Options{Faults: Faults{Break: "leg"}}, `break is "leg"`)
	f(Options{Listen: "nowhere:x"}, "fakevllm:")

	s := start(t, Options{APIKey: "secret", NoUsageDetail: true, OutputTokens: 1})
	if status, doc := call(t, s, "GET", "/v1/models", ""); status != 401 || doc != `{"error":"Unauthorized"}` {
		t.Errorf("without key: got %d %s", status, doc)
	}
	if status, _ := call(t, s, "GET", "/health", ""); status != 200 {
		t.Errorf("health without key: got %d, want 200", status)
	}
	key := "Authorization: Bearer secret"
	for _, stream := range []string{"", `,"stream":true,"stream_options":{"include_usage":true}`} {
		status, doc := call(t, s, "POST", "/v1/chat/completions", `{`+hello+stream+`}`, key)
		if status != 200 || strings.Contains(doc, "cached_tokens") {
			t.Errorf("no usage detail: got %d %s", status, doc)
		}
	}
	if _, doc := call(t, s, "POST", "/v1/responses", `{"input":"Hello, this is a prompt that was sent before, and it has two blocks and more of tokens in all, as one sees, or counts."}`, key); at(t, doc, "usage", "input_tokens_details", "cache_write_tokens") != 0.0 {
		t.Errorf("no usage detail: got %s", doc)
	}
	if _, doc := call(t, s, "POST", "/v1/messages", `{"max_tokens":1,`+hello+`}`, key); strings.Contains(doc, "cache_read") {
		t.Errorf("no usage detail: got %s", doc)
	}

	full := start(t, Options{Manual: true, MaxQueued: 1})
	send(t, dial(t, full), "POST", "/v1/chat/completions", `{`+hello+`}`)
	eventually(t, "a queued request", func() bool { return full.Stats().Awaiting == 1 })
	if status, doc := call(t, full, "POST", "/v1/chat/completions", `{`+hello+`}`); status != 503 || at(t, doc, "error", "type") != "ServiceUnavailableError" {
		t.Errorf("full queue: got %d %s, want 503", status, doc)
	}
	if got := metric(t, full, "vllm:admission_rejections_total"); got != 1 {
		t.Errorf("rejections: got %v, want 1", got)
	}
}

func TestInstant(t *testing.T) {
	s := start(t, Options{Instant: true, OutputTokens: 8})
	body := `{` + hello + `,"max_tokens":3}`
	status, doc := call(t, s, "POST", "/v1/chat/completions", body)
	want := float64((len(body) + 3) / 4)
	if status != 200 || at(t, doc, "usage", "prompt_tokens") != want || at(t, doc, "usage", "completion_tokens") != 3.0 || at(t, doc, "choices", "0", "finish_reason") != "length" {
		t.Errorf("plain: got %d %s, want %v and 3 tokens", status, doc, want)
	}
	second := `{"prompt":"x","stream":true,"stream_options":{"include_usage":true}} `
	status, doc = call(t, s, "POST", "/v1/completions", second)
	got := events(doc)
	if status != 200 || len(got) != 3 || at(t, got[1].data, "usage", "completion_tokens") != 8.0 || got[2].data != "[DONE]" {
		t.Errorf("stream: got %d %v", status, got)
	}
	if p, g := metric(t, s, "vllm:prompt_tokens_total"), metric(t, s, "vllm:generation_tokens_total"); p != want+float64((len(second)+3)/4) || g != 11 {
		t.Errorf("metrics: got %v and %v tokens, want the sums", p, g)
	}
	eventually(t, "both answers", func() bool { st := s.Stats(); return st.Executed == 2 && st.Completed == 2 && st.InFlight == 0 })
}

func TestShutdown(t *testing.T) {
	long := `{` + hello + `,"stream":true,"max_tokens":50,"ignore_eos":true}`
	open := func(s *Server) (*http.Response, net.Conn) {
		c := dial(t, s)
		resp := ask(t, c, "POST", "/v1/chat/completions", long)
		eventually(t, "a stream in the engine", func() bool { st := s.Stats(); return st.Awaiting == 1 || st.Engine.Steps > 0 })
		return resp, c
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()

	s := start(t, Options{Manual: true})
	resp, _ := open(s)
	idle := dial(t, s)
	_, _ = io.Copy(io.Discard, ask(t, idle, "GET", "/version", "").Body)
	s.Step()
	if err := s.Shutdown(ended); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	got := events(string(b))
	if n := len(got); err != nil || n < 3 || at(t, got[n-2].data, "choices", "0", "finish_reason") != "abort" || got[n-1].data != "[DONE]" {
		t.Errorf("at once: got %v, %s, want finish_reason abort and [DONE]", err, b)
	}
	if _, err := idle.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("an idle connection: got %v, want EOF", err)
	}
	if _, err := net.Dial("tcp", s.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the listener: got %v, want refused", err)
	}

	s = start(t, Options{Speed: 10})
	resp, _ = open(s)
	if err := s.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); err != nil || !strings.HasSuffix(string(b), "data: [DONE]\n\n") || !strings.Contains(string(b), `"length"`) {
		t.Errorf("drained: got %v, %s, want the whole stream", err, b)
	}

	s = start(t, Options{Manual: true, Faults: Faults{HangShutdown: Duration(time.Hour)}})
	resp, _ = open(s)
	down := make(chan error)
	go func() { down <- s.Shutdown(ended) }()
	eventually(t, "the hang", func() bool { return s.Stats().Faults["hang_shutdown"] == 1 })
	s.Step() // what the engine does reaches nobody
	select {
	case err := <-down:
		t.Errorf("hanging: got %v, want no end", err)
	default:
	}
	s.Close()
	if err := <-down; err != nil {
		t.Errorf("hung and killed: got %v", err)
	}
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("hung and killed: got a clean end of %q", b)
	}

	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	ready := make(chan *Server, 1)
	go func() { done <- Run(ctx, Options{}, func(s *Server) { ready <- s }) }()
	if status, _ := call(t, <-ready, "GET", "/health", ""); status != 200 {
		t.Errorf("run: got %d, want 200", status)
	}
	stop()
	if err := <-done; err != nil {
		t.Errorf("run: got %v", err)
	}
	if err := Run(ctx, Options{Speed: -1}, nil); err == nil {
		t.Error("run with a bad option: got no error")
	}
}

// TestStorm has 200 clients of whom a third leaves at a random moment, and
// nothing may be left of them.
func TestStorm(t *testing.T) {
	s := start(t, Options{Speed: 20, Engine: func() Model { m := DefaultModel(); m.MaxSeqs, m.Blocks = 8, 100; return m }()})
	var clients sync.WaitGroup
	var left atomic.Int64
	for i := range 200 {
		clients.Go(func() {
			c, err := net.Dial("tcp", s.Addr())
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = c.Close() }()
			body := fmt.Sprintf(`{"messages":[{"role":"user","content":"%s %d"}],"stream":%v,"max_tokens":%d,"ignore_eos":true}`, strings.Repeat("storm ", i), i%7, i%2 == 0, 1+i%40)
			_, _ = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", chatPath, len(body), body)
			if i%3 == 0 {
				_ = c.SetReadDeadline(time.Now().Add(time.Duration(i%50) * time.Millisecond))
				_, _ = io.Copy(io.Discard, c)
				left.Add(1)
				return
			}
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Error(err)
				return
			}
			if b, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(b), `"finish_reason":"length"`) {
				t.Errorf("client %d: got %v, %s", i, err, b)
			}
		})
	}
	clients.Wait()
	eventually(t, "all answers", func() bool {
		st := s.Stats()
		return st.InFlight == 0 && st.Executed == st.Completed+st.Aborted && st.Open == 0
	})
	eventually(t, "an empty engine", func() bool { st := s.Stats(); return st.Engine.Running+st.Engine.Waiting+st.Engine.UsedBlocks == 0 })
	if st := s.Stats(); st.Awaiting != 0 || st.Aborted > left.Load() || st.Engine.EvictedBlocks == 0 {
		t.Errorf("got %+v, want nothing awaited, at most %d aborted, and blocks evicted", st, left.Load())
	}
}

func TestTLS(t *testing.T) {
	certified := httptest.NewUnstartedServer(nil)
	certified.StartTLS()
	certified.Close()
	s := start(t, Options{TLS: &tls.Config{Certificates: certified.TLS.Certificates}, Faults: Faults{Break: BreakReset, BreakAfter: 2, BreakTimes: 1}})
	if !strings.HasPrefix(s.URL(), "https://127.0.0.1:") {
		t.Errorf("URL: got %s, want https", s.URL())
	}
	roots := x509.NewCertPool()
	roots.AddCert(certified.Certificate())
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
	defer transport.CloseIdleConnections()
	for i, broken := range []bool{true, false, false} { // the last two on one connection
		resp, err := (&http.Client{Transport: transport}).Post(s.URL()+chatPath, "application/json", strings.NewReader(streamBody))
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if (err != nil) != broken || strings.HasSuffix(string(b), "[DONE]\n\n") == broken {
			t.Errorf("answer %d: got %v, %s, want broken %v", i, err, b, broken)
		}
	}
	if got := s.Stats().Connections; got != 2 {
		t.Errorf("connections: got %d, want 2", got)
	}
}

// TestUnlikely reaches what a request cannot.
func TestUnlikely(t *testing.T) {
	s := start(t, Options{Manual: true})
	w := &wire{}
	c := newConn(s, w, w)
	c.f, c.path, c.rid = s.faults.Load(), chatPath, "r"
	long := &choice{prompt: make([]uint32, DefaultModel().CapacityTokens()+1), progress: make(chan struct{}, 1)}
	fits := &choice{prompt: []uint32{1}, want: 1, progress: long.progress}
	if err := c.produce(&answer{c: c, choices: []*choice{fits, long}}, chatDialect{}); err != nil {
		t.Errorf("too long for the engine: got %v, want an answer", err)
	}
	if got := string(bytes.Join(w.writes, nil)); !strings.HasPrefix(got, "HTTP/1.1 400 ") || !strings.Contains(got, "do not fit into the KV cache") {
		t.Errorf("too long for the engine: got %s, want 400", got)
	}
	if s.Step() || s.Stats().Awaiting != 0 {
		t.Errorf("too long for the engine: got %+v, want nothing left", s.Stats())
	}
	nan := math.NaN()
	if err := s.SetFaults(Faults{MetricsWaiting: &nan}); err != nil {
		t.Fatal(err)
	}
	if status, doc := call(t, s, "GET", "/fake/faults", ""); status != 500 || at(t, doc, "error", "type") != "InternalServerError" {
		t.Errorf("faults that JSON cannot say: got %d %s, want 500", status, doc)
	}
}
