package proxy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvgate/configs"
	"kvgate/routing"
)

// withKeys makes a change of the settings that asks for the keys.
func withKeys(t testing.TB, text string) func(*configs.Settings) {
	file := writeFile(t, text)
	return func(s *configs.Settings) { s.Auth.KeysFile = file }
}

// reflectRequests answers with the request's head and its body.
func reflectRequests(c *stubConn) {
	for {
		r, err := c.request()
		if err != nil || !c.answer(200, r.raw+string(r.body)) {
			return
		}
	}
}

func TestKeyAuthentication(t *testing.T) {
	s := newStub(t, reflectRequests)
	hash := sha256.Sum256([]byte("sk-b"))
	g := newGateway(t, withKeys(t, fmt.Sprintf("keys:\n- {name: a, key: sk-a}\n- {name: b, sha256: %s}\n", hex.EncodeToString(hash[:]))), s)
	failures := map[string]float64{}
	f := func(key, reason string, fields ...string) {
		t.Helper()
		sent := s.requests.Load()
		a := g.dial().ask(post(chat, chatBody, fields...))
		line := g.line()
		if reason == "" {
			want(t, "status", a.StatusCode, 200)
			want(t, "key in the access line", line["key"], any(key))
			if strings.Contains(strings.ToLower(a.body), "sk-") {
				t.Errorf("%q: got a key sent on: %s", fields, a.body)
			}
			return
		}
		failures[reason]++
		want(t, "status", a.StatusCode, 401)
		want(t, "WWW-Authenticate", a.Header.Get("WWW-Authenticate"), "Bearer")
		want(t, "key in the access line", line["key"], any(nil))
		if !strings.Contains(a.body, `"code":"invalid_api_key"`) || !strings.Contains(a.body, `"type":"authentication_error"`) {
			t.Errorf("%q: got %s, want an authentication_error", fields, a.body)
		}
		want(t, "requests sent on", s.requests.Load(), sent)
		want(t, "failures counted", g.value(fmt.Sprintf("kvgate_auth_failures_total{reason=%q}", reason)), failures[reason])
	}
	f("a", "", "Authorization: Bearer sk-a")
	f("b", "", "authorization:  bearer  sk-b ")
	f("b", "", "x-api-key: sk-b")
	f("a", "", "Authorization: Bearer sk-a", "X-Api-Key: sk-stale") // Authorization decides
	f("", authUnknown, "Authorization: Bearer sk-c", "x-api-key: sk-a")
	f("", authMissing)
	f("", authMissing, "Authorization: Bearer sk-a", "Connection: authorization")
	f("", authUnknown, "x-api-key: ")
	f("", authUnknown, "x-api-key: sk-A")
	f("", authUnknown, "Authorization: Bearer sk-a sk-a")
	f("", authMalformed, "Authorization: Basic sk-a")
	f("", authMalformed, "Authorization: sk-a")
	f("", authMalformed, "Authorization: Bearer")
	f("", authMalformed, "Authorization: Bearer sk-a", "Authorization: Bearer sk-a")
	f("", authMalformed, "x-api-key: sk-a", "x-api-key: sk-a")
	f("", authMissing, "x_api_key: sk-a")
}

// Who may ask is judged before a body is read, in the words of the route; health needs no key.
func TestKeyRoutes(t *testing.T) {
	g := newGateway(t, withKeys(t, "a:sk-a"), newStub(t, plain))
	f := func(request string, status int, part string) {
		t.Helper()
		a := g.dial().ask(request)
		want(t, request[:20]+": status", a.StatusCode, status)
		if !strings.Contains(a.body, part) {
			t.Errorf("%q: got %s, want %s in it", request, a.body, part)
		}
	}
	for _, path := range []string{"/health", "/livez", "/readyz"} {
		f(get(path), 200, "ok")
	}
	for _, path := range []string{"/v1/models", "/v1/models/m", "/version", "/load", "/v1/responses/x"} {
		f(get(path), 401, "invalid_api_key")
	}
	f(get("/v1/models", "x-api-key: sk-a"), 200, `"id":"m"`)
	f("OPTIONS "+chat+" HTTP/1.1\r\nHost: gate\r\n\r\n", 204, "")
	f(get("/metrics"), 404, "route_not_found")
	f(get(chat), 405, "method_not_allowed")
	const head = " HTTP/1.1\r\nHost: gate\r\nContent-Length: 1000000\r\n"
	f("POST "+chat+head+"\r\n{", 401, "authentication_error")
	f("POST "+chat+head+"Expect: 100-continue\r\n\r\n", 401, "authentication_error")
	f("POST /v1/messages"+head+"\r\n{", 401, `{"type":"error","error":{"type":"authentication_error"`)
	f("POST /v2/rerank"+head+"\r\n{", 401, `{"id":"`)
}

// The key for the replicas takes the place of the client's.
func TestKeyReplaced(t *testing.T) {
	var auth, api []string
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			auth, api = r.header["Authorization"], r.header["X-Api-Key"]
			c.answer(200, plainAnswer)
		}
	})
	keys := withKeys(t, "a:sk-a")
	g := newGateway(t, func(set *configs.Settings) { keys(set); set.Upstream.APIKeyFile = writeFile(t, "upstream-key\n") }, s)
	want(t, "status", g.dial().ask(post(chat, chatBody, "Authorization: Bearer sk-a", "x-api-key: sk-a")).StatusCode, 200)
	want(t, "Authorization sent on", fmt.Sprint(auth), "[Bearer upstream-key]")
	want(t, "x-api-key sent on", fmt.Sprint(api), "[]")
}

func TestKeyModels(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, withKeys(t, "keys:\n- {name: a, key: sk-a, models: [m]}\n- {name: all, key: sk-all}\n"), s)
	models := func(names ...string) {
		for _, e := range g.fleet.Endpoints() {
			g.fleet.SetModels(e, names, true)
		}
	}
	models("m", "n")
	ask := func(key, request string) *answer {
		return g.dial().ask(strings.Replace(request, "\r\n", "\r\nx-api-key: "+key+"\r\n", 1))
	}
	f := func(key, request string, status int, part string) {
		t.Helper()
		sent := s.requests.Load()
		a := ask(key, request)
		if a.StatusCode != status || !strings.Contains(a.body, part) {
			t.Errorf("%s: %q: got %d %s, want %d with %s", key, request, a.StatusCode, a.body, status, part)
		}
		if status != 200 {
			want(t, "requests sent on", s.requests.Load(), sent)
		}
	}
	const forbidden = `"code":"forbidden_model"`
	body := func(model string) string {
		return `{"model":"` + model + `","messages":[{"role":"user","content":"x"}]}`
	}
	f("sk-a", post(chat, body("m")), 200, "")
	f("sk-a", post(chat, body("n")), 403, forbidden)
	f("sk-a", post(chat, body("nobody")), 403, forbidden) // no oracle for what exists
	f("sk-a", post(chat, `{"model":"m","messages":[],"model":"n"}`), 403, forbidden)
	f("sk-a", post(chat, `{"model":"n","messages":[],"mod\u0065l":"m"}`), 200, "")
	f("sk-a", post(chat, `{"messages":[]}`), 403, forbidden)
	f("sk-a", post("/v1/messages", body("n")), 403, `"type":"permission_error"`)
	f("sk-a", get("/tokenizer_info"), 403, forbidden)
	f("sk-a", get("/tokenizer_info?model=m"), 200, "")
	f("sk-a", get("/tokenizer_info?model=n"), 403, forbidden)
	f("sk-all", post(chat, body("n")), 200, "")
	f("sk-all", get("/tokenizer_info"), 200, "")

	part := func(name, value string) string {
		return "--b\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
	}
	form := func(query string, parts ...string) string {
		body := strings.Join(parts, "") + "--b--\r\n"
		return fmt.Sprintf("POST /v1/audio/transcriptions%s HTTP/1.1\r\nHost: gate\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n%s", query, len(body), body)
	}
	sound := part("file", strings.Repeat("s", 2*formHead))
	f("sk-a", form("", part("model", "m"), sound), 200, "")
	f("sk-a", form("", sound, part("model", "m")), 200, "")
	f("sk-a", form("", part("model", "n"), sound), 403, forbidden)
	f("sk-a", form("", part("model", "m"), sound, part("model", "n")), 403, forbidden)
	f("sk-a", form("?model=m", sound), 403, forbidden) // a replica reads the form alone
	f("sk-a", form("?model=m", sound, part("model", "n")), 403, forbidden)
	f("sk-all", form("", part("model", "m"), sound, part("model", "n")), 200, "")
	// Python's servers take the last name of a part, and no delimiter that goes on.
	f("sk-a", form("", part("model", "m"), sound, part(`x"; name="model`, "n")), 403, forbidden)
	f("sk-a", form("", part("model", "m"), part("x\"\r\nContent-Disposition: form-data; name=\"model", "n"), sound), 403, forbidden)
	f("sk-a", form("", part(`file"; filename="a`, "\r\n--bX\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm")), 403, forbidden)
	f("sk-a", strings.Replace(form("", part("model", "m"), sound), "--b--", "--b-x", 1), 403, forbidden)
	f("sk-a", form("", part("prompt", "a\r\n--bX\r\nb"), part("model", "m"), sound), 200, "")

	want(t, "failures counted", g.value(`kvgate_auth_failures_total{reason="forbidden_model"}`), 15.0)
	if list := ask("sk-a", get("/v1/models")).body; !strings.Contains(list, `"id":"m"`) || strings.Contains(list, `"id":"n"`) {
		t.Errorf("models: got %s, want m alone", list)
	}
	if list := ask("sk-all", get("/v1/models")).body; !strings.Contains(list, `"id":"n"`) {
		t.Errorf("models: got %s, want n too", list)
	}
	f("sk-a", get("/v1/models/n"), 404, "model_not_found")

	// The one model that is served needs no name.
	models("m")
	f("sk-a", post(chat, `{"messages":[]}`), 200, "")
	models("n")
	f("sk-a", post(chat, `{"messages":[]}`), 403, forbidden)
}

// Requests at once are counted until the last byte is out, on every way out.
func TestKeyConcurrency(t *testing.T) {
	hold := make(chan struct{})
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			if strings.Contains(string(r.body), `"stream":true`) {
				c.say(sseHead + chunk(roleEvent))
				<-hold
				c.say(chunk(doneEvent) + lastChunk)
				continue
			}
			c.answer(200, plainAnswer)
		}
	})
	g := newGateway(t, withKeys(t, "keys:\n- {name: a, key: sk-a, concurrency: 2}\n- {name: b, key: sk-b}\n"), s)
	key := "x-api-key: sk-a"
	running := func() int64 { return g.live.Load().keys.keys[0].running.Load() }
	streams := []*client{g.dial(), g.dial()}
	for _, c := range streams {
		c.say(post(chat, streamBody, key))
	}
	eventually(t, "two streams", func() bool { return s.requests.Load() == 2 })
	a := g.dial().ask(post(chat, chatBody, key))
	want(t, "status", a.StatusCode, 429)
	want(t, "Retry-After", a.Header.Get("Retry-After"), "1")
	want(t, "reason", a.Header.Get("x-llm-d-request-dropped-reason"), "rejected-concurrency")
	if !strings.Contains(a.body, `"code":"rate_limit_exceeded"`) {
		t.Errorf("got %s, want rate_limit_exceeded", a.body)
	}
	expect := g.dial().ask("POST " + chat + " HTTP/1.1\r\nHost: gate\r\nContent-Length: 9\r\nExpect: 100-continue\r\n" + key + "\r\n\r\n")
	want(t, "status for a client that expects 100", expect.StatusCode, 429)
	want(t, "limited", g.value(`kvgate_rate_limited_total{key="a"}`), 2.0)
	want(t, "status of the other key", g.dial().ask(post(chat, chatBody, "x-api-key: sk-b")).StatusCode, 200)
	want(t, "status of the model list", g.dial().ask(get("/v1/models", key)).StatusCode, 200)

	// A reload keeps the count.
	settings := *g.live.Load().settings
	if err := g.Apply(&settings); err != nil {
		t.Fatalf("Apply: got %v, want no error", err)
	}
	want(t, "running behind a reload", running(), int64(2))
	_ = streams[0].Close()
	eventually(t, "the client that left gives its place back", func() bool { return running() == 1 })
	want(t, "status", g.dial().ask(post(chat, chatBody, key)).StatusCode, 200)
	close(hold)
	want(t, "stream", streams[1].answer("POST").StatusCode, 200)
	eventually(t, "the stream that ended gives its place back", func() bool { return running() == 0 })
	for _, request := range []string{post(chat, "{", key), post(chat, `{"model":"no"}`, key), "POST " + chat + " HTTP/1.1\r\nHost: gate\r\n" + key + "\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n"} {
		if a := g.dial().ask(request); a.StatusCode < 400 || a.StatusCode >= 500 {
			t.Errorf("%q: got %d, want a refusal", request, a.StatusCode)
		}
	}
	cut := g.dial()
	cut.say("POST " + chat + " HTTP/1.1\r\nHost: gate\r\n" + key + "\r\nContent-Length: 100\r\n\r\n{")
	eventually(t, "it runs", func() bool { return running() == 1 })
	_ = cut.Close()
	eventually(t, "nothing runs", func() bool { return running() == 0 })
}

func TestKeyRate(t *testing.T) {
	key := &apiKey{Key: configs.Key{Name: "a"}, every: int64(time.Second), keyUse: &keyUse{}}
	now := int64(0)
	f := func(at time.Duration, want time.Duration) {
		t.Helper()
		now = int64(at)
		if got := key.take(now); got != want {
			t.Errorf("at %s: got %s to wait, want %s", at, got, want)
		}
	}
	for range 60 {
		f(0, 0)
	}
	f(0, time.Second)
	f(400*time.Millisecond, 600*time.Millisecond)
	f(time.Second, 0)
	f(time.Second, time.Second)
	for range 60 {
		f(time.Hour, 0) // an idle hour is worth a minute
	}
	f(time.Hour, time.Second)
	key.every = 0
	f(time.Hour, 0)
	key.every = int64(time.Minute) // one per minute
	key.paidUntil.Store(0)
	f(time.Hour, 0)
	f(time.Hour, time.Minute)

	g := newGateway(t, withKeys(t, "keys: [{name: a, key: sk-a, requests_per_minute: 1}]"), newStub(t, plain))
	want(t, "first", g.dial().ask(post(chat, chatBody, "x-api-key: sk-a")).StatusCode, 200)
	a := g.dial().ask(post(chat, chatBody, "x-api-key: sk-a"))
	want(t, "second", a.StatusCode, 429)
	want(t, "Retry-After", a.Header.Get("Retry-After"), "60")
	want(t, "reason", a.Header.Get("x-llm-d-request-dropped-reason"), "rejected-rate-limited")
	expect := g.dial().ask("POST " + chat + " HTTP/1.1\r\nHost: gate\r\nContent-Length: 9\r\nExpect: 100-continue\r\nx-api-key: sk-a\r\n\r\n")
	want(t, "status for a client that expects 100", expect.StatusCode, 429)
	eventually(t, "nothing runs", func() bool { return g.live.Load().keys.keys[0].running.Load() == 0 }) // the books are behind the answer
	want(t, "limited", g.value(`kvgate_rate_limited_total{key="a"}`), 2.0)
}

func TestKeyReload(t *testing.T) {
	g := newGateway(t, withKeys(t, "a:sk-a"), newStub(t, plain))
	settings := *g.live.Load().settings
	f := func(text, wrong string, accepted, refused string) {
		t.Helper()
		if err := os.WriteFile(settings.Auth.KeysFile, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := g.Apply(&settings); fmt.Sprint(err) != wrong && (wrong == "" || err == nil || !strings.Contains(err.Error(), wrong)) && (wrong != "" || err != nil) {
			t.Errorf("Apply: got %v, want %q", err, wrong)
		}
		want(t, accepted, g.dial().ask(get("/v1/models", "x-api-key: "+accepted)).StatusCode, 200)
		want(t, refused, g.dial().ask(get("/v1/models", "x-api-key: "+refused)).StatusCode, 401)
	}
	f("a:sk-2", "", "sk-2", "sk-a")
	f("a", "the line has no colon", "sk-2", "sk-a")
	f("", "no keys", "sk-2", "sk-a")
	f("b:sk-b", "", "sk-b", "sk-2")
	settings.Auth.KeysFile = ""
	if err := g.Apply(&settings); err != nil {
		t.Errorf("Apply: got %v, want no error", err)
	}
	want(t, "without keys", g.dial().ask(get("/v1/models")).StatusCode, 200)

	settings.Auth.KeysFile = "/nonexistent"
	fleet := routing.NewFleet(time.Now, time.Hour, nil)
	o := Options{Settings: &settings, Router: &routing.Current{}, Fleet: fleet, Metrics: NewMetrics(prometheus.NewRegistry(), fleet, nil)}
	if _, err := New(o); err == nil || !strings.Contains(err.Error(), "auth.keys_file: open /nonexistent") {
		t.Errorf("New: got %v, want the missing file", err)
	}
	if err := CheckFiles(&settings); err == nil || !strings.Contains(err.Error(), "/nonexistent") {
		t.Errorf("CheckFiles: got %v, want the missing file", err)
	}
	settings.Auth.KeysFile = ""
	if err := CheckFiles(&settings); err != nil {
		t.Errorf("CheckFiles: got %v, want no error", err)
	}
}

func TestKeySeriesAreBounded(t *testing.T) {
	b := newMetricsBench(t, "a")
	for i := range maxKeys + 2 {
		b.rateLimited(fmt.Sprint("k", i)).Inc()
		b.rateLimited(fmt.Sprint("k", i)).Inc()
	}
	b.want(t, `kvgate_rate_limited_total{key="k0"}`, 2)
	b.want(t, `kvgate_rate_limited_total{key="other"}`, 4)
}

func TestKeyAllocations(t *testing.T) {
	ring := &keyring{}
	for i := range 100 {
		ring.keys = append(ring.keys, &apiKey{Key: configs.Key{Hash: sha256.Sum256(fmt.Append(nil, "sk-", i))}, every: 1, keyUse: &keyUse{}})
	}
	key := []byte("sk-70")
	if n := testing.AllocsPerRun(100, func() {
		if k := ring.find(key); k == nil || k.take(1) != 0 {
			t.Errorf("find: got %v, want the key with room", k)
		}
	}); n != 0 {
		t.Errorf("got %v allocations, want 0", n)
	}
}
