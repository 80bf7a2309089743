package proxy

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"unicode/utf16"

	"kvgate/configs"
	"kvgate/routing"
)

const testSecret = "0123456789abcdef"

// isolatedBy makes a change of the settings with three keys, two of them of one group.
func isolatedBy(t testing.TB, mode string) func(*configs.Settings) {
	keys := withKeys(t, "keys:\n- {name: a, key: sk-a, group: g}\n- {name: b, key: sk-b, group: g}\n- {name: c, key: sk-c}\n")
	secret := writeFile(t, testSecret)
	return func(s *configs.Settings) {
		keys(s)
		s.Isolation = configs.Isolation{Mode: mode, SecretFile: secret}
	}
}

func TestTenantSalt(t *testing.T) {
	// printf %s alice | openssl dgst -sha256 -hmac 0123456789abcdef -binary | basenc --base64url | cut -c1-22
	want(t, "salt", string(tenantSalt(testSecret, "alice")), "_b-LHKzT1XjgYtDkEQQ1fQ")
	if string(tenantSalt(testSecret, "a")) == string(tenantSalt(testSecret+"x", "a")) {
		t.Error("two secrets: got one salt, want two")
	}
}

// What a replica gets is the client's body with the tenant's salt as its only one.
func TestIsolationBodies(t *testing.T) {
	s := newStub(t, reflectRequests)
	g := newGateway(t, isolatedBy(t, isolateKey), s)
	salt := string(tenantSalt(testSecret, "a"))
	f := func(path, body, rest string) {
		t.Helper()
		a := g.dial().ask(post(path, body, "x-api-key: sk-a"))
		if a.StatusCode != 200 {
			t.Errorf("%s: got %d %s, want 200", body, a.StatusCode, a.body)
			return
		}
		_, sent, _ := strings.Cut(a.body, "\r\n\r\n")
		if strings.Count(sent, saltField) != 1 || strings.Contains(sent, "evil") || strings.Contains(sent, `\u`) {
			t.Errorf("%s: got %s sent on, want one salt and not the client's", body, sent)
		}
		var got, want map[string]any
		if err := json.Unmarshal([]byte(sent), &got); err != nil {
			t.Errorf("%s: got %s sent on: %v, want JSON", body, sent, err)
		}
		if err := json.Unmarshal([]byte(rest), &want); err != nil {
			t.Fatal(err)
		}
		want[saltField] = salt
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: got %v sent on, want %v", body, got, want)
		}
	}
	const m = `"model":"m","messages":[{"role":"user","content":"x, \"cache_salt\" y"}]`
	text := strings.NewReplacer(`, \"cache_salt\" y`, "").Replace(m)
	whole := "{" + text + "}"
	for _, body := range []string{
		whole,
		" \r\n{ " + text + " }\n",
		`{"cache_salt":"evil",` + text + `}`,
		`{` + text + `,"cache_salt":"evil"}`,
		`{` + text + ` , "cache_salt" : "evil" } `,
		`{"cache_salt":"evil",` + text + `,"cache_salt":"evil2"}`,
		`{` + text + `,"cache_salt":"evil","cache_salt":"evil2","cache_salt":null}`,
		`{"cache_salt":"evil","cache_salt":"evil2",` + text + `}`,
		`{` + text + `,"cache_s\u0061lt":"evil"}`,
		`{` + text + `,"cache_salt":{"a":["evil",{"cache_salt":1}]}}`,
		`{"cache_salt":[],` + text + `,"cache_salt":12}`,
	} {
		f(chat, body, whole)
	}
	f("/v1/completions", `{"model":"m","prompt":"x"}`, `{"model":"m","prompt":"x"}`)
	f("/v1/responses", `{"model":"m","input":"x","cache_salt":"evil"}`, `{"model":"m","input":"x"}`)
	f("/v1/messages", `{"model":"m","max_tokens":1,"messages":[],"cache_salt":"evil"}`, `{"model":"m","max_tokens":1,"messages":[]}`)
	f("/inference/v1/generate", `{"token_ids":[1,2],"cache_salt":"evil"}`, `{"token_ids":[1,2]}`)
	f("/v2/rerank", `{"query":"x","documents":["y"]}`, `{"query":"x","documents":["y"]}`)
	for _, path := range []string{"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/generative_scoring", "/v1/decisions", "/v1/systemone"} {
		f(path, `{"model":"m","input":"x","cache_salt":"evil"}`, `{"model":"m","input":"x"}`)
	}
	f("/v1/completions", `{}`, `{}`)
	f("/v1/completions", `{"cache_salt":"evil"}`, `{}`)

	// A string that only looks like the field is left alone.
	a := g.dial().ask(post(chat, "{"+m+"}", "x-api-key: sk-a"))
	if !strings.Contains(a.body, `"content":"x, \"cache_salt\" y"`) {
		t.Errorf("got %s, want the content as it was", a.body)
	}
	// Routes that compute no blocks are sent on as they came.
	a = g.dial().ask(post("/tokenize", `{"model":"m","prompt":"x"}`, "x-api-key: sk-a"))
	if !strings.HasSuffix(a.body, "\r\n\r\n"+`{"model":"m","prompt":"x"}`) {
		t.Errorf("tokenize: got %s, want the body as it was", a.body)
	}
	a = g.dial().ask(post(chat, "\ufeff{"+m+"}", "x-api-key: sk-a"))
	want(t, "a body that cannot be read", a.StatusCode, 400)
}

// Routes of which vLLM takes no salt would share blocks among tenants in silence.
func TestIsolationOfRoutesWithoutSalt(t *testing.T) {
	s := newStub(t, plain)
	f := func(mode, path string, status int) {
		t.Helper()
		sent := s.requests.Load()
		a := newGateway(t, isolatedBy(t, mode), s).dial().ask(post(path, `{"model":"m","messages":[],"texts":["x"]}`, "x-api-key: sk-a"))
		want(t, mode+" "+path, a.StatusCode, status)
		if status != 200 {
			want(t, mode+" "+path+": requests sent on", s.requests.Load(), sent)
			if !strings.Contains(a.body, "isolation.mode") {
				t.Errorf("%s %s: got %s, want isolation.mode in it", mode, path, a.body)
			}
		}
	}
	for _, path := range []string{"/cohere/v2/chat", "/v2/embed"} {
		f(isolateKey, path, 501)
		f(isolateGroup, path, 501)
		f("shared", path, 200)
	}
}

// A second attempt sends the same bytes.
func TestIsolationReroute(t *testing.T) {
	busy := newStub(t, func(c *stubConn) {
		for {
			if _, err := c.request(); err != nil || !c.answer(503, "{}") {
				return
			}
		}
	})
	g := newGateway(t, isolatedBy(t, isolateKey), busy, newStub(t, reflectRequests))
	for range 8 {
		a := g.dial().ask(post(chat, chatBody, "x-api-key: sk-a"))
		want(t, "status", a.StatusCode, 200)
		if strings.Count(a.body, `{"cache_salt":"`+string(tenantSalt(testSecret, "a"))+`","model"`) != 1 {
			t.Errorf("got %s, want one salt", a.body)
		}
	}
	if busy.requests.Load() == 0 {
		t.Error("the busy replica: got no request, want one at least")
	}
}

// The same prompt of two tenants shares nothing: neither the salt that the
// engine sees nor a block of the index. That of one tenant shares all.
func TestIsolationTenants(t *testing.T) {
	prompt := strings.Repeat("a long system prompt that everyone has ", 100)
	body := `{"model":"m","messages":[{"role":"user","content":"` + prompt + `"}],"cache_salt":"mine"}`
	f := func(mode string, shares map[string]bool) {
		s := newStub(t, reflectRequests)
		g := newGateway(t, isolatedBy(t, mode), s)
		b := &adminBench{metricsBench: newMetricsBench(t)}
		b.options = AdminOptions{Fleet: g.fleet, Router: g.o.Router, Registry: b.reg, Log: g.log, Salt: g.Salt, ExplainAPI: RouteAPI}
		salt := func(key string) string {
			t.Helper()
			a := g.dial().ask(post(chat, body, "x-api-key: sk-"+key))
			var in struct {
				Salt string `json:"cache_salt"`
			}
			_, sent, _ := strings.Cut(a.body, "\r\n\r\n")
			if err := json.Unmarshal([]byte(sent), &in); err != nil {
				t.Fatalf("%s: got %s: %v, want the body sent on", mode, a.body, err)
			}
			return in.Salt
		}
		first := salt("a")
		for key, shared := range shares {
			w := b.do("POST", "/debug/explain?path="+url.QueryEscape(chat)+"&key="+key, body)
			var ex routing.Explanation
			if err := json.Unmarshal(w.Body.Bytes(), &ex); err != nil || w.Code != 200 {
				t.Fatalf("explain: got %d %s, %v, want 200", w.Code, w.Body, err)
			}
			if match := ex.Replicas[0].Match; (match > 0) != shared || shared && match != ex.Total {
				t.Errorf("%s: a then %s: got %d of %d blocks, want shared %v", mode, key, match, ex.Total, shared)
			}
		}
		for key, shared := range shares {
			if got := salt(key); (got == first) != shared {
				t.Errorf("%s: a then %s: got the salts %s and %s, want the same %v", mode, key, first, got, shared)
			}
		}
		w := b.do("POST", "/debug/explain?key=nobody", body)
		want(t, "explain for nobody", w.Code, 400)
	}
	f(isolateKey, map[string]bool{"a": true, "b": false, "c": false})
	f(isolateGroup, map[string]bool{"a": true, "b": true, "c": false})
	f("shared", map[string]bool{"a": true, "b": true, "c": true})
}

func TestIsolationErrors(t *testing.T) {
	settings := configs.DefaultSettings()
	isolatedBy(t, isolateGroup)(&settings)
	f := func(text, wrong string) {
		t.Helper()
		settings.Isolation.SecretFile = writeFile(t, text)
		if err := CheckFiles(&settings); err == nil || !strings.Contains(err.Error(), "isolation.secret_file") || !strings.Contains(err.Error(), wrong) {
			t.Errorf("%q: got %v, want %s", text, err, wrong)
		}
	}
	f("", "must hold one key")
	f("short", "at least 16 characters")
	settings.Isolation.SecretFile = "/nonexistent"
	if err := CheckFiles(&settings); err == nil || !strings.Contains(err.Error(), "/nonexistent") {
		t.Errorf("got %v, want the missing file", err)
	}
}

func TestDeniedFields(t *testing.T) {
	s := newStub(t, plain)
	f := func(g *gateway, path, body string, status int, part string) {
		t.Helper()
		sent := s.requests.Load()
		a := g.dial().ask(post(path, body))
		if a.StatusCode != status || !strings.Contains(a.body, part) {
			t.Errorf("%s %s: got %d %s, want %d with %s", path, body, a.StatusCode, a.body, status, part)
		}
		if status != 200 {
			want(t, "requests sent on", s.requests.Load(), sent)
		}
	}
	g := newGateway(t, func(set *configs.Settings) { set.Routes.Passthrough = []string{"/custom"} }, s)
	const forbidden = `"code":"forbidden_field"`
	for _, path := range []string{chat, "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/custom"} {
		f(g, path, `{"model":"m","kv_transfer_params":{"remote_host":"10.0.0.9"}}`, 400, forbidden)
		f(g, path, `{"model":"m","ec_transfer_params":{}}`, 400, forbidden)
		f(g, path, `{"model":"m","kv_tr\u0061nsfer_params":{}}`, 400, forbidden)
		f(g, path, `{"kv_transfer_params":{},"model":"m","kv_transfer_params":null}`, 400, forbidden)
		f(g, path, `{"model":"m","kv_transfer_params":null,"priority":1,"request_id":"x","vllm_xargs":{},"chat_template":"t"}`, 200, "")
		f(g, path, `{"model":"m","metadata":{"kv_transfer_params":1}}`, 200, "")
		// vLLM makes extra_args of these, and takes the fields out of them.
		f(g, path, `{"model":"m","vllm_xargs":{"kv_transfer_params":{"remote_host":"10.0.0.9"}}}`, 400, `"param":"vllm_xargs.kv_transfer_params"`)
		f(g, path, `{"vllm_xargs":{"ec_transfer_p\u0061rams":1},"model":"m","vllm_xargs":null}`, 400, forbidden)
		f(g, path, `{"model":"m","sampling_params":{"extra_args":{"kv_transfer_params":{}}}}`, 400, `"param":"sampling_params.extra_args.kv_transfer_params"`)
		f(g, path, `{"model":"m","sampling_params":{"model":1,"top_p":NaN,"extra_args":{"model":2,"kv_transfer_params":{}}}}`, 400, forbidden)
		f(g, path, `{"model":"m","sampling_params":{"extra_args":{"kv_transfer_params":null}},"vllm_xargs":"x"}`, 200, "")
	}
	// Python finds out by itself in which encoding JSON is.
	for _, bom := range []string{"", "\ufeff"} {
		text := utf16.Encode([]rune(bom + ` {"kv_transfer_params":{}}`))
		for _, order := range []binary.AppendByteOrder{binary.LittleEndian, binary.BigEndian} {
			var wide, wider []byte
			for _, c := range text {
				wide, wider = order.AppendUint16(wide, c), order.AppendUint32(wider, uint32(c))
			}
			f(g, "/custom", string(wide), 400, "invalid_body")
			f(g, "/custom", string(wider), 400, "invalid_body")
		}
	}
	f(g, "/custom", "\x00\x01\x02{", 200, "")
	f(g, "/v1/messages", `{"model":"m","kv_transfer_params":1}`, 400, `"type":"invalid_request_error"`)
	f(g, "/custom", `{"model":NaN,"kv_transfer_params":1}`, 400, "invalid_body") // Python reads it
	f(g, "/custom", "\ufeff{\"kv_transfer_params\":1,}", 400, "invalid_body")
	f(g, "/custom", "not json", 200, "")

	open := newGateway(t, func(set *configs.Settings) { set.Limits.DenyFields = nil; set.Routes.Passthrough = []string{"/custom"} }, s)
	f(open, chat, `{"model":"m","kv_transfer_params":{}}`, 200, "")
	f(open, "/custom", `{"model":NaN}`, 200, "")
	strict := newGateway(t, func(set *configs.Settings) { set.Limits.DenyFields = []string{"priority"} }, s)
	f(strict, chat, `{"model":"m","priority":-1}`, 400, `"param":"priority"`)
	f(strict, chat, `{"model":"m","kv_transfer_params":{}}`, 200, "")
	unsalted := newGateway(t, func(set *configs.Settings) { set.Limits.DenyFields = []string{"priority", saltField, "vllm_xargs"} }, s)
	f(unsalted, chat, `{"model":"m","cache_s\u0061lt":"x"}`, 400, `"param":"cache_salt"`)
	f(unsalted, chat, `{"model":"m","vllm_xargs":{}}`, 400, `"param":"vllm_xargs"`)
	f(unsalted, chat, `{"model":"m","cache_salt":null}`, 200, "")
}
