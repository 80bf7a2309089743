package proxy

import (
	"encoding/json"
	"strings"
	"testing"

	"kvgate/configs"
)

func TestLongest(t *testing.T) {
	f := func(value string, want int) {
		t.Helper()
		if !json.Valid([]byte(value)) {
			t.Fatalf("%s: got no JSON, want JSON", value)
		}
		if got := longest([]byte(value)); got != want {
			t.Errorf("%s: got %d, want %d", value, got, want)
		}
	}
	f(`"text"`, 0)
	f(`12`, 0)
	f(`{"a":[1,"b","c"]}`, 0)
	f(`[]`, 0)
	f(`[1,2,3]`, 0)
	f(`["a"]`, 1)
	f(`["a", "b\\\"],[", "c"]`, 3)
	f(`[{"role":"user","content":[{"type":"text"},{"type":"text"},{"type":"text"}]},{"a":{"b":["x","y","z"]}}]`, 2)
	f(`[[1,2,3],[4,5,6]]`, 2)
	f(`[["a","b","c"],["d"]]`, 3)
	f(`[["a"],["b","c"],["d"]]`, 3)
	f(`[null,true,false,null]`, 4)
	f(`[[[[[[[[[["a","b","c"]]]]]]]]]]`, 5)
}

func TestCaps(t *testing.T) {
	s := newStub(t, plain)
	keys := isolatedBy(t, isolateKey)
	g := newGateway(t, func(set *configs.Settings) {
		keys(set)
		set.Limits.MaxN, set.Limits.MaxTokens, set.Limits.MaxItems = 4, 1000, 3
	}, s)
	f := func(path, fields string, status int, parts ...string) {
		t.Helper()
		sent := s.requests.Load()
		body := `{"model":"m",` + fields + `}`
		a := g.dial().ask(post(path, body, "x-api-key: sk-a"))
		want(t, path+" "+body+" "+a.body, a.StatusCode, status)
		for _, part := range parts {
			if !strings.Contains(a.body, part) {
				t.Errorf("%s %s: got %s, want %s in it", path, body, a.body, part)
			}
		}
		if status != 200 {
			want(t, "requests sent on", s.requests.Load(), sent)
		}
	}
	const over = `"code":"limit_exceeded"`
	f(chat, `"n":4,"max_tokens":1000,"messages":[{},{},{}]`, 200)
	f(chat, `"n":5`, 400, over, `"param":"n"`, "n must be at most 4 (limits.max_n)")
	f(chat, `"n":null,"max_tokens":null,"messages":null`, 200)
	f(chat, `"n":9,"n":1`, 200) // as the replica reads it
	f(chat, `"n":1,"n":9`, 400, over)
	f(chat, `"\u006e":9`, 400, over)
	f(chat, `"N":9,"user":{"n":9},"stop":["n"]`, 200)
	f(chat, `"n":"9"`, 400, over)
	f(chat, `"n":" 1_0 "`, 400, over)
	f(chat, `"n":"2"`, 200)
	f(chat, `"n":4.0`, 200)
	f(chat, `"n":1e1`, 400, over)
	f(chat, `"n":1e999`, 400, over)
	f(chat, `"n":[9]`, 400, over, "n must be a number of at most 4")
	f(chat, `"n":"x"`, 400, over)
	f(chat, `"n":"nan"`, 400, over)
	f(chat, `"n":-1`, 200) // the replica's to refuse
	f("/v1/completions", `"best_of":5`, 400, over, `"param":"best_of"`)
	f(chat, `"max_tokens":1001`, 400, "max_tokens must be at most 1000 (limits.max_tokens)")
	f(chat, `"max_completion_tokens":1001`, 400, over)
	f(chat, `"min_tokens":1001`, 400, over)
	f("/v1/responses", `"input":"x","max_output_tokens":1001`, 400, over)
	f("/v1/messages", `"messages":[],"max_tokens":1001`, 400, `"type":"invalid_request_error"`, "max_tokens must be at most 1000")
	f(chat, `"messages":[{},{},{},{}]`, 400, over, `"param":"messages"`, "messages has more than 3 items (limits.max_items)")
	f(chat, `"messages":[{},{},{},{}],"messages":[]`, 200)
	f(chat, `"messages":[],"tools":[{},{},{},{}]`, 400, over)
	f(chat+"/batch", `"messages":[[{},{},{},{}]]`, 400, over)
	f(chat+"/batch", `"messages":[[{}],[{}],[{}],[{}]]`, 400, over)
	f("/v1/completions", `"prompt":["a","b","c","d"]`, 400, over)
	f("/v1/completions", `"prompt":[1,2,3,4,5]`, 200)
	f("/v1/completions", `"prompt":[[1],[2],[3],[4]]`, 400, over)
	f("/v1/embeddings", `"input":["a","b","c","d"]`, 400, over)
	f("/v1/rerank", `"query":"q","documents":["a","b","c","d"]`, 400, over)
	f("/inference/v1/generate", `"token_ids":[1,2,3,4,5],"sampling_params":{"n":4,"max_tokens":1}`, 200)
	f("/inference/v1/generate", `"token_ids":[1],"sampling_params":{"n":1,"n":5}`, 400, `"param":"sampling_params.n"`)
	f("/inference/v1/generate", `"token_ids":[1],"sampling_params":{"n":5,"N":1}`, 400, over)
	f("/inference/v1/generate", `"token_ids":[1],"sampling_params":{"max_tokens":5000}`, 400, over)
	f("/inference/v1/generate", `"token_ids":[1],"sampling_params":{"top_p":NaN,"n":5}`, 400, over)
	f("/inference/v1/generate", `"token_ids":[1],"sampling_params":{"model":1,"n":5}`, 400, over)
	f("/inference/v1/generate", `"token_ids":[1],"sampling_params":{"n":5,"\u006e":4}`, 200)
	f("/inference/v1/generate", `"token_ids":[1],"sampling_params":"x"`, 200)
	f(chat, `"kv_transfer_params":1,"n":1`, 400, "forbidden_field")

	open := newGateway(t, nil, s)
	want(t, "without limits", open.dial().ask(post(chat, `{"model":"m","n":1000,"max_tokens":1000000}`)).StatusCode, 200)
}

func TestRouteBodies(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, func(set *configs.Settings) {
		set.Limits.Body = 2000
		set.Routes.Passthrough = []string{"/custom/*", "/other"}
		set.Limits.RouteBodies = []string{"/v1/embeddings=100", "/v1/audio/transcriptions=4KiB", "/custom/*=3KiB"}
	}, s)
	f := func(path string, size, status int, limit string) {
		t.Helper()
		body := `{"model":"m","input":"` + strings.Repeat("x", size-len(`{"model":"m","input":""}`)) + `"}`
		for _, request := range []string{
			post(path, body),
			"POST " + path + " HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(body) + lastChunk,
		} {
			a := g.dial().ask(request)
			want(t, path, a.StatusCode, status)
			if status != 200 && !strings.Contains(a.body, "larger than "+limit+",") {
				t.Errorf("%s: got %s, want the limit %s", path, a.body, limit)
			}
		}
	}
	f("/v1/embeddings", 100, 200, "")
	f("/v1/embeddings", 101, 413, "100")
	f(chat, 2000, 200, "")
	f(chat, 2001, 413, "2000")
	f("/custom/a", 3072, 200, "")
	f("/custom/a", 3073, 413, "3KiB")
	f("/other", 2001, 413, "2000")
	form := func(size int) string {
		const head, tail = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n", "\r\n--b--\r\n"
		return post("/v1/audio/transcriptions", head+strings.Repeat("x", size-len(head)-len(tail))+tail, "Content-Type: multipart/form-data; boundary=b")
	}
	once := func(text string) string { return strings.Replace(text, "Content-Type: application/json\r\n", "", 1) }
	want(t, "a form", g.dial().ask(once(form(4096))).StatusCode, 200)
	want(t, "a larger form", g.dial().ask(once(form(4097))).StatusCode, 413)

	for _, path := range []string{"/nowhere", "/v1/models", "/livez"} {
		settings := configs.DefaultSettings()
		settings.Limits.RouteBodies = []string{path + "=1MiB"}
		if err := CheckFiles(&settings); err == nil || !strings.Contains(err.Error(), "limits.route_bodies: no route "+path) {
			t.Errorf("CheckFiles: got %v, want an error about %s", err, path)
		}
		if err := g.Apply(&settings); err == nil {
			t.Errorf("Apply with %s: got no error, want one", path)
		}
	}
	f("/v1/embeddings", 101, 413, "100") // as before
}
