package proxy

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"kvgate/configs"
	"kvgate/routing"
)

// echo answers with the request's head as it arrived.
func echo(c *stubConn) {
	for {
		r, err := c.request()
		if err != nil {
			return
		}
		c.answer(200, r.raw)
	}
}

// TestAmbiguousFraming: case 27. What two readers could read as two different
// requests is refused, the connection closed, and nothing reaches a replica.
func TestAmbiguousFraming(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, nil, s)
	f := func(name, head string) {
		t.Run(name, func(t *testing.T) {
			c := g.dial()
			c.t = t
			c.say(strings.ReplaceAll(head, "\n", "\r\n"))
			a := c.answer("POST")
			want(t, "status", a.StatusCode, 400)
			want(t, "Connection", a.Close, true)
			want(t, "JSON error", strings.HasPrefix(a.body, `{"error":{"message":`), true)
			c.closed()
			want(t, "requests sent on", s.requests.Load(), int64(0))
		})
	}
	start := "POST " + chat + " HTTP/1.1\nHost: h\n"
	f("length and chunks", start+"Content-Length: 5\nTransfer-Encoding: chunked\n\n0\n\n")
	f("chunks and length", start+"Transfer-Encoding: chunked\nContent-Length: 5\n\n0\n\n")
	f("two lengths", start+"Content-Length: 2\nContent-Length: 3\n\n{}")
	f("two equal lengths", start+"Content-Length: 2\nContent-Length: 2\n\n{}")
	f("length list", start+"Content-Length: 2, 2\n\n{}")
	f("length with sign", start+"Content-Length: +2\n\n{}")
	f("length in hex", start+"Content-Length: 0x2\n\n{}")
	f("empty length", start+"Content-Length:\n\n{}")
	f("unknown coding", start+"Transfer-Encoding: xchunked\n\n0\n\n")
	f("identity", start+"Transfer-Encoding: identity\nContent-Length: 2\n\n{}")
	f("identity alone", start+"Transfer-Encoding: identity\n\n")
	f("coding list", start+"Transfer-Encoding: gzip, chunked\n\n0\n\n")
	f("coding twice", start+"Transfer-Encoding: chunked\nTransfer-Encoding: chunked\n\n0\n\n")
	f("coding on HTTP/1.0", "POST "+chat+" HTTP/1.0\nHost: h\nTransfer-Encoding: chunked\n\n0\n\n")
	f("folded coding", start+"Transfer-Encoding:\n chunked\n\n0\n\n")
	f("folded field", start+"X: a\n b\nContent-Length: 2\n\n{}")
	f("folded with a tab", start+"X: a\n\tb\nContent-Length: 2\n\n{}")
	f("space before the colon", start+"Content-Length : 2\n\n{}")
	f("space in a name", start+"X Y: 1\nContent-Length: 2\n\n{}")
	f("no Host", "POST "+chat+" HTTP/1.1\nContent-Length: 2\n\n{}")
	f("two Hosts", start+"Host: h\nContent-Length: 2\n\n{}")
	f("NUL in a value", start+"X: a\x00b\nContent-Length: 2\n\n{}")
	f("CR in a value", start+"X: a\rb\nContent-Length: 2\n\n{}")
	f("line without a colon", start+"garbage\nContent-Length: 2\n\n{}")
	f("empty name", start+": x\nContent-Length: 2\n\n{}")
	chunked := start + "Transfer-Encoding: chunked\n\n"
	f("chunk size in C", chunked+"0x2\n{}\n0\n\n")
	f("chunk size with sign", chunked+"+2\n{}\n0\n\n")
	f("chunk size overflow", chunked+"ffffffffffffffff2\n{}\n0\n\n")
	f("chunk without its end", chunked+"2\n{}xx\n0\n\n")
	f("empty chunk size", chunked+"\n{}\n0\n\n")
	f("HTTP/2 preface", "PRI * HTTP/2.0\n\nSM\n\n")
	f("no version", "GET /v1/models\nHost: h\n\n")

	// Line feeds of their own, which the shorthand above cannot say.
	raw := func(name, text string) {
		t.Run(name, func(t *testing.T) {
			c := g.dial()
			c.t = t
			c.say(text)
			want(t, "status", c.answer("POST").StatusCode, 400)
			want(t, "requests sent on", s.requests.Load(), int64(0))
		})
	}
	head := "POST " + chat + " HTTP/1.1\r\nHost: h\r\n"
	raw("bare line feed after a field", head+"X: a\nContent-Length: 2\r\n\r\n{}")
	raw("line feed in an extension", head+"Transfer-Encoding: chunked\r\n\r\n2;a\nb\r\n{}\r\n0\r\n\r\n")
	// The process lives.
	want(t, "a good request", g.dial().ask(post(chat, chatBody)).StatusCode, 200)
}

// TestTarget: case 28. The judged path is the one that is sent.
func TestTarget(t *testing.T) {
	s := newStub(t, echo)
	g := newGateway(t, func(s *configs.Settings) { s.Routes.Passthrough = []string{"/custom/*", "/exact"} }, s)
	f := func(target string, status int, sent string) {
		t.Helper()
		c := g.dial()
		method, body := "POST", chatBody
		if status == 200 && strings.HasPrefix(target, "/v1/models") {
			method, body = "GET", ""
		}
		a := c.ask(fmt.Sprintf("%s %s HTTP/1.1\r\nHost: gate\r\nContent-Length: %d\r\n\r\n%s", method, target, len(body), body))
		want(t, target, a.StatusCode, status)
		if status == 200 && sent != "" {
			line, _, _ := strings.Cut(a.body, "\r\n")
			want(t, target+" as sent", line, "POST "+sent+" HTTP/1.1")
		}
	}
	f(chat, 200, chat)
	f(chat+"?a=b&c=%2F..", 200, chat+"?a=b&c=%2F..")
	f("http://gate"+chat, 200, chat)
	f("/custom/a%20b//c?x", 200, "/custom/a%20b//c?x")
	f("/exact", 200, "/exact")
	f("/v1/models/m", 200, "")
	f("/v1/%2e%2e/reset_prefix_cache", 400, "")
	f("/v1/chat/completions/../../sleep", 400, "")
	f("/v1/./chat/completions", 400, "")
	f("/v1/.%2e/chat", 400, "")
	f("/custom/%2E%2e/sleep", 400, "")
	f("/custom/..", 400, "")
	f("/custom/a%2fb", 400, "")
	f("/custom/a%5cb", 400, "")
	f(`/custom/a\b`, 400, "")
	f("/custom/a%00b", 400, "")
	f("/custom/a%0ab", 400, "")
	f("/custom/a%zz", 400, "")
	f("/custom/a%2", 400, "")
	f("/custom/a#b", 400, "")
	f("/v1%2fchat%2fcompletions", 400, "")
	f("http://elsewhere"+chat, 400, "")
	f("*", 400, "")
	f("gate:80", 400, "")
	f("//v1//chat/completions", 404, "")
	f("/v1/chat/completions/", 404, "")
	f("/V1/chat/completions", 404, "")
	f("/v1/chat/completion%73", 404, "")
	f("/exact/more", 404, "")
	f("/custom", 404, "")
	f("/", 404, "")
}

// TestDeniedRoutes: what controls an engine is not reachable, nor is the admin surface.
func TestDeniedRoutes(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, nil, s)
	for _, path := range []string{
		"/reset_prefix_cache", "/sleep", "/wake_up", "/start_profile", "/pause", "/abort_requests", "/collective_rpc", "/update_weights", "/v1/load_lora_adapter",
		"/invocations", "/docs", "/openapi.json", "/metrics", "/debug/fleet", "/debug/explain", "/-/reload", "/admin/v1/replicas", "/debug/pprof/", "/kv_event_sources", "/server_info",
	} {
		for _, method := range []string{"GET", "POST"} {
			a := g.dial().ask(method + " " + path + " HTTP/1.1\r\nHost: h\r\n\r\n")
			want(t, method+" "+path, a.StatusCode, 404)
			want(t, "code", strings.Contains(a.body, `"code":"route_not_found"`), true)
		}
	}
	want(t, "requests sent on", s.requests.Load(), int64(0))
}

// TestRoutes: every route of the table answers as its kind says.
func TestRoutes(t *testing.T) {
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			method, rest, _ := strings.Cut(r.line, " ")
			path, _, _ := strings.Cut(rest, " ")
			if method == "HEAD" {
				c.say("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")
				continue
			}
			c.answer(200, method+" "+path)
		}
	})
	g := newGateway(t, nil, s)
	bodies := map[routing.API]string{
		routing.APIGenerate: `{"model":"m","token_ids":[1,2,3]}`, routing.APICompletions: `{"model":"m","prompt":"x"}`, routing.APIEmbeddings: `{"model":"m","input":"x"}`,
	}
	templates := RouteTemplates()
	for i := range routeTable {
		r := &routeTable[i]
		if r.path == "" || r.kind != kindProxy {
			continue
		}
		t.Run(templates[i], func(t *testing.T) {
			c := g.dial()
			c.t = t
			body, kind := bodies[r.api], "application/json"
			switch {
			case r.reading == readForm:
				body, kind = form("b", "model", "m"), "multipart/form-data; boundary=b"
			case body == "":
				body = chatBody
			}
			if r.reading == readNone {
				a := c.ask(get(r.path))
				want(t, "body", a.body, "GET "+r.path)
				head := c.ask("HEAD " + r.path + " HTTP/1.1\r\nHost: h\r\n\r\n")
				want(t, "HEAD length", head.ContentLength, int64(99))
				want(t, "HEAD body", head.body, "")
				want(t, "POST", c.ask(post(r.path, "")).StatusCode, 405)
				want(t, "GET with a body", c.ask(strings.Replace(post(r.path, "{}"), "POST", "GET", 1)).StatusCode, 400)
				return
			}
			a := c.ask(strings.Replace(post(r.path+"?q=1", body), "application/json", kind, 1))
			want(t, "body", a.body, "POST "+r.path+"?q=1")
			a = c.ask(get(r.path))
			want(t, "GET", a.StatusCode, 405)
			want(t, "Allow", a.Header.Get("Allow"), "POST, OPTIONS")
			a = c.ask("OPTIONS " + r.path + " HTTP/1.1\r\nHost: h\r\n\r\n")
			want(t, "OPTIONS", a.StatusCode, 204)
			want(t, "Allow", a.Header.Get("Allow"), "POST, OPTIONS")
			api, ok := RouteAPI(r.path)
			want(t, "RouteAPI", fmt.Sprint(api, ok), fmt.Sprint(r.api, true))
		})
	}
	if _, ok := RouteAPI("/v1/models"); ok {
		t.Errorf("RouteAPI(/v1/models): got ok, want none")
	}
	for i, name := range templates {
		if name == "" || slices.Index(templates, name) != i {
			t.Errorf("template %d: got %q, want a name of its own", i, name)
		}
	}
}

func TestRefusedByName(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, nil, s)
	f := func(request, part string) {
		t.Helper()
		a := g.dial().ask(request)
		want(t, request[:30], a.StatusCode, 501)
		if !strings.Contains(a.body, part) {
			t.Errorf("%s: got %s, want a remedy with %q", request[:30], a.body, part)
		}
	}
	f(get("/v1/responses/resp_1"), "whole conversation")
	f("DELETE /v1/responses/resp_1 HTTP/1.1\r\nHost: h\r\n\r\n", "whole conversation")
	f(post("/v1/responses/resp_1/cancel", ""), "whole conversation")
	f(get("/v1/realtime?model=m", "Upgrade: websocket", "Connection: Upgrade"), "realtime")
	f(post("/v1/responses", `{"model":"m","input":"x","previous_response_id":"resp_1"}`), "previous_response_id")
	f(post("/v1/responses", `{"model":"m","input":"x","previous\u005fresponse_id":"resp_1"}`), "previous_response_id")
	f(post("/v1/responses", `{"model":"m","input":"x","previous_response_id":"resp_1","Previous_Response_Id":null}`), "previous_response_id")
	f(post("/v1/responses", `{"model":"m","input":NaN,"previous_response_id":"resp_1"}`), "previous_response_id")
	for _, on := range []string{`1`, `"true"`, `"on"`, `false,"background":true`, `true,"Background":false`, `true,"x":NaN`} { // vLLM takes them all for true
		f(post("/v1/responses", `{"model":"m","input":"x","background":`+on+`}`), "background")
	}
	f(post("/v1/responses", `{"model":"m","input":"x","background":true}`), "background")
	want(t, "requests sent on", s.requests.Load(), int64(0))
	for _, body := range []string{
		`{"model":"m","input":"x","previous_response_id":null}`, `{"model":"m","input":"say \"previous_response_id\"","background":false}`,
	} {
		want(t, body, g.dial().ask(post("/v1/responses", body)).StatusCode, 200)
	}
}

// TestHopByHop: case 29, and the headers that clients must not set.
func TestHopByHop(t *testing.T) {
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			c.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nConnection: x-bar, keep-alive\r\nX-Bar: 1\r\nKeep-Alive: timeout=5\r\nSet-Cookie: a=1; Path=/\r\nSet-Cookie: b=2\r\n"+
				"Server: uvicorn\r\nX-Request-Id: other\r\nx-kvgate-replica: spoofed\r\nUpgrade: h2c\r\nX-Kept_too: 1\r\nContent-Length: %d\r\n\r\n%s", len(r.raw), r.raw))
		}
	})
	g := newGateway(t, nil, s)
	c := g.dial()
	c.say(post(chat, chatBody, "Connection: close, X-Foo, X-Forwarded-For, Content-Type", "X-Foo: 1", "TE: trailers", "Trailer: X-T", "Keep-Alive: 1", "Proxy-Authorization: secret",
		"Proxy-Connection: x", "Upgrade: h2c", "Expect: 100-continue",
		"X-Gateway-Destination-Endpoint: 10.0.0.1", "x-llm-d-target: x", "X-Prefiller-Host-Port: evil:1", "X-Encoder-Url: evil", "x-kv-cache-source-host: evil", "X-Data-Parallel-Rank: 3",
		"x-vllm-priority: 0", "X-Kvgate-Replica: r9", "X-Kvgate-Hops: 5", "x-kvgate-unsent: 1", "Content_Length: 5", "X_Forwarded_For: 6.6.6.6", "x-smg-routing-key: k", "target-pod: p",
		"X-Forwarded-For: 10.1.1.1", "X-Dup: 1", "X-Dup: 2", "Cookie: a=b;  c=d", "Accept-Encoding: gzip", "traceparent: 00-ab", "x-stainless-lang: python"))
	want(t, "interim answer", c.answer("HEAD").StatusCode, 100)
	a := c.answer("POST")
	for _, absent := range []string{
		"X-Foo", "TE:", "Trailer", "Keep-Alive", "Proxy-", "Upgrade", "Expect", "Connection:", "Gateway", "llm-d", "Prefiller", "Encoder", "kv-cache", "Parallel", "priority",
		"Kvgate-Replica", "Kvgate-Hops: 5", "unsent", "Content_Length", "X_Forwarded", "smg", "target-pod", "gzip", "Transfer-Encoding",
	} {
		if strings.Contains(a.body, absent) {
			t.Errorf("sent on: got %q in %q, want it gone", absent, a.body)
		}
	}
	for _, present := range []string{
		"X-Kvgate-Hops: 6\r\n", "X-Dup: 1\r\nX-Dup: 2\r\n", "Cookie: a=b;  c=d\r\n", "traceparent: 00-ab\r\n", "x-stainless-lang: python\r\n", "Accept-Encoding: identity\r\n", "Content-Type: application/json\r\n",
		fmt.Sprintf("Content-Length: %d\r\n", len(chatBody)),
	} {
		if !strings.Contains(a.body, present) {
			t.Errorf("sent on: got %q, want %q in it", a.body, present)
		}
	}
	want(t, "Set-Cookie", strings.Join(a.Header["Set-Cookie"], "|"), "a=1; Path=/|b=2")
	want(t, "X-Bar", a.Header.Get("X-Bar"), "")
	want(t, "Keep-Alive", a.Header.Get("Keep-Alive"), "")
	want(t, "Server", a.Header.Get("Server"), "uvicorn")
	want(t, "x-request-id", len(a.Header["X-Request-Id"]), 1)
	want(t, "replica header", a.Header.Get("x-kvgate-replica"), "")
	// The client's Connection: close is its own affair.
	want(t, "closed for the client", a.Close, true)
	c.closed()
	want(t, "second", g.dial().ask(post(chat, chatBody)).StatusCode, 200)
	want(t, "connections to the replica", s.accepted.Load(), int64(1))
}

func TestForwardedFor(t *testing.T) {
	s := newStub(t, echo)
	f := func(trusted, sent, client string, present []string, fields ...string) {
		t.Helper()
		g := newGateway(t, func(s *configs.Settings) {
			if trusted != "" {
				s.Server.TrustedProxies = strings.Split(trusted, ",")
			}
		}, s)
		c := g.dial()
		a := c.ask(post(chat, chatBody, fields...))
		if line := "X-Forwarded-For: " + sent + "\r\n"; strings.Count(strings.ToLower(a.body), "x-forwarded-for:") != 1 || !strings.Contains(a.body, line) {
			t.Errorf("trusted %q, %q: got %q sent on, want %q in it, once", trusted, fields, a.body, line)
		}
		for _, name := range []string{"X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-Ip", "Forwarded:"} {
			if got, want := strings.Contains(a.body, name), slices.Contains(present, name); got != want {
				t.Errorf("trusted %q: %s sent on: got %t, want %t", trusted, name, got, want)
			}
		}
		if client == "" {
			client = c.LocalAddr().String()
		}
		want(t, "client in the access log", g.line()["client"], any(client))
	}
	all := []string{"X-Forwarded-For: 10.1.1.1, 10.2.2.2", "x-forwarded-for: 10.3.3.3", "X-Forwarded-Host: h", "X-Forwarded-Proto: https", "X-Real-Ip: 10.1.1.1", "Forwarded: for=10.1.1.1"}
	names := []string{"X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-Ip", "Forwarded:"}
	f("", "127.0.0.1", "", nil, all...)
	f("10.0.0.0/8", "127.0.0.1", "", nil, all...)
	f("127.0.0.1", "10.1.1.1, 10.2.2.2, 10.3.3.3, 127.0.0.1", "10.3.3.3", names, all...)
	f("127.0.0.0/8,10.3.0.0/16", "10.1.1.1, 10.2.2.2, 10.3.3.3, 127.0.0.1", "10.2.2.2", names, all...)
	f("127.0.0.0/8,10.0.0.0/8", "10.1.1.1, 10.2.2.2, 10.3.3.3, 127.0.0.1", "10.1.1.1", names, all...)
	f("127.0.0.1", "127.0.0.1", "", nil)
	f("127.0.0.1", "spoof, fd00::1, 127.0.0.1", "fd00::1", nil, "X-Forwarded-For: spoof, fd00::1")
	f("127.0.0.1,fd00::/8", "spoof, fd00::1, 127.0.0.1", "fd00::1", nil, "X-Forwarded-For: spoof, fd00::1")
	f("127.0.0.1", "junk, 127.0.0.1", "", nil, "X-Forwarded-For: junk")
	// A client behind the proxy cannot have what the gateway adds taken away.
	f("", "127.0.0.1", "", nil, "Connection: close, x-forwarded-for")
}

func TestRequestID(t *testing.T) {
	s := newStub(t, echo)
	g := newGateway(t, nil, s)
	f := func(id string, kept bool) {
		t.Helper()
		a := g.dial().ask(post(chat, chatBody, "x-request-id: "+id))
		got := a.Header.Get("x-request-id")
		want(t, fmt.Sprintf("id %.20q kept", id), got == id, kept)
		want(t, "sent on once", strings.Count(strings.ToLower(a.body), "x-request-id: "+strings.ToLower(got)+"\r\n"), 1)
		if !kept && len(got) != 32 {
			t.Errorf("id: got %q, want 32 digits", got)
		}
	}
	f("abc-DEF_1.2", true)
	f(strings.Repeat("a", 128), true)
	f(strings.Repeat("a", 129), false)
	f("a b", false)
	f("a/b", false)
	f("", false)
}

func TestReplicaHeader(t *testing.T) {
	g := newGateway(t, func(s *configs.Settings) { s.Headers.Replica = true }, newStub(t, plain))
	want(t, "x-kvgate-replica", g.dial().ask(post(chat, chatBody)).Header.Get("x-kvgate-replica"), "r0")
}

func TestAPIKey(t *testing.T) {
	s := newStub(t, echo)
	g := newGateway(t, func(s *configs.Settings) { s.Upstream.APIKeyFile = writeFile(t, "sk-replica\n") }, s)
	a := g.dial().ask(post(chat, chatBody, "Authorization: Bearer client-secret", "x-api-key: client-secret"))
	want(t, "client's key sent on", strings.Contains(a.body, "client-secret"), false)
	want(t, "own key", strings.Count(a.body, "Authorization: Bearer sk-replica\r\n"), 1)
}

func TestRedirectIsRelative(t *testing.T) {
	var s *stub
	s = newStub(t, func(c *stubConn) {
		if _, err := c.request(); err == nil {
			c.say("HTTP/1.1 307 Temporary Redirect\r\nLocation: " + s.url() + "/v1/x\r\nContent-Length: 0\r\n\r\n")
			c.gone()
		}
	})
	g := newGateway(t, nil, s)
	want(t, "Location", g.dial().ask(post(chat, chatBody)).Header.Get("Location"), "/v1/x")
}

// TestBigPrompt: case 24.
func TestBigPrompt(t *testing.T) {
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			c.answer(200, fmt.Sprint(len(r.body)))
		}
	})
	const limit = 9 << 20
	g := newGateway(t, func(s *configs.Settings) { s.Limits.Body = limit }, s)
	build := func(size int) string {
		const head, tail = `{"model":"m","prompt":"`, `"}`
		return head + strings.Repeat("x", size-len(head)-len(tail)) + tail
	}
	chunks := func(body string) string {
		var b strings.Builder
		b.WriteString("POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
		for len(body) > 0 {
			n := min(len(body), 100_000)
			b.WriteString(chunk(body[:n]))
			body = body[n:]
		}
		return b.String() + lastChunk
	}
	for _, size := range []int{100, 16 << 10, 64<<10 - 1, 64 << 10, 64<<10 + 1, 256<<10 + 7, 1 << 20, 1<<20 + 1, 4<<20 + 1, 8 << 20, limit} {
		body := build(size)
		want(t, fmt.Sprintf("%d bytes", size), g.dial().ask(post("/v1/completions", body)).body, fmt.Sprint(size))
		want(t, fmt.Sprintf("%d bytes in chunks", size), g.dial().ask(chunks(body)).body, fmt.Sprint(size))
	}
	requests := s.requests.Load()
	// Over the limit: said from the Content-Length alone, before the body is read.
	c := g.dial()
	c.say(fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n{", limit+1))
	a := c.answer("POST")
	want(t, "status", a.StatusCode, 413)
	want(t, "JSON", strings.Contains(a.body, `"code":"request_too_large"`), true)
	want(t, "Connection: close", a.Close, true)
	// While the client still uploads: the answer arrives all the same.
	c = g.dial()
	done := make(chan bool)
	go func() {
		defer close(done)
		_, _ = io.WriteString(c.Conn, post("/v1/completions", build(limit+1)))
	}()
	want(t, "status while uploading", c.answer("POST").StatusCode, 413)
	<-done
	// Counted in chunks.
	c = g.dial()
	done = make(chan bool)
	go func() {
		defer close(done)
		_, _ = io.WriteString(c.Conn, chunks(build(limit+1)))
	}()
	want(t, "status of chunks", c.answer("POST").StatusCode, 413)
	_ = c.Close()
	<-done
	want(t, "sent on", s.requests.Load(), requests)
}

// TestBudget: the memory of all bodies is bounded.
func TestBudget(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, func(s *configs.Settings) { s.Limits.Body, s.Limits.Buffered = 1<<20, 1<<20 }, s)
	body := `{"model":"m","prompt":"` + strings.Repeat("x", 600<<10)
	holder := g.dial()
	holder.say(fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(body)+2, body))
	eventually(t, "the first body is held", func() bool { return g.buffers.budget.Load() < 1<<19 })
	c := g.dial()
	c.say(post("/v1/completions", body+`"}`))
	a := c.answer("POST")
	want(t, "status", a.StatusCode, 503)
	want(t, "Retry-After", a.Header.Get("Retry-After"), "1")
	holder.say(`"}`)
	want(t, "the first", holder.answer("POST").StatusCode, 200)
	want(t, "again", g.dial().ask(post("/v1/completions", body+`"}`)).StatusCode, 200)
}

// TestBigHeaders: case 26, the client's side.
func TestBigHeaders(t *testing.T) {
	s := newStub(t, echo)
	g := newGateway(t, nil, s)
	f := func(size, status int) {
		t.Helper()
		c := g.dial()
		done := make(chan bool)
		go func() {
			defer close(done)
			_, _ = io.WriteString(c.Conn, post(chat, chatBody, "Authorization: Bearer "+strings.Repeat("x", size)))
		}()
		a := c.answer("POST")
		<-done
		want(t, fmt.Sprintf("status with a token of %d bytes", size), a.StatusCode, status)
		if status == 431 {
			want(t, "JSON", strings.Contains(a.body, `"code":"header_too_large"`), true)
			want(t, "Connection: close", a.Close, true)
		}
	}
	f(9<<10, 200)
	f(30<<10, 200)
	f(70<<10, 431)
	f(1<<20, 431)
}

// TestSlowRequests: heads, bodies and idle connections have their time.
func TestSlowRequests(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, func(s *configs.Settings) {
		s.Server.HeaderTimeout, s.Server.BodyTimeout, s.Server.IdleTimeout = 60*time.Millisecond, 60*time.Millisecond, 60*time.Millisecond
		s.Server.MinUploadRate = 0
	}, s)
	t.Run("head", func(t *testing.T) {
		c := g.dial()
		c.say("POST " + chat + " HTTP/1.1\r\nHost: h\r\n")
		want(t, "status", c.answer("POST").StatusCode, 408)
		c.closed()
	})
	t.Run("body", func(t *testing.T) {
		c := g.dial()
		c.say("POST " + chat + " HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n{")
		want(t, "status", c.answer("POST").StatusCode, 408)
		c.closed()
	})
	t.Run("steady body", func(t *testing.T) {
		c := g.dial()
		c.say(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n", chat, len(chatBody)))
		for i := range 10 { // in all longer than the limit, each pause shorter
			time.Sleep(20 * time.Millisecond)
			n := len(chatBody) / 10
			end := (i + 1) * n
			if i == 9 {
				end = len(chatBody)
			}
			c.say(chatBody[i*n : end])
		}
		want(t, "status", c.answer("POST").StatusCode, 200)
	})
	t.Run("idle", func(t *testing.T) {
		c := g.dial()
		want(t, "status", c.ask(post(chat, chatBody)).StatusCode, 200)
		c.closed()
	})
}

// A body that never pauses for long and never ends is ended by its rate; one that
// makes the rate, or whose replica is slow to take it, is not.
func TestUploadRate(t *testing.T) {
	s := newStub(t, plain)
	f := func(name string, rate configs.Size, head string, pieces int, status int) {
		t.Run(name, func(t *testing.T) {
			g := newGateway(t, func(s *configs.Settings) {
				s.Server.BodyTimeout, s.Server.MinUploadRate = 100*time.Millisecond, rate
			}, s)
			c := g.dial()
			c.say(head)
			answered := make(chan *answer, 1)
			go func() { answered <- c.answer("POST") }()
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for n := 0; pieces == 0 || n < pieces; n++ {
				select {
				case a := <-answered:
					want(t, "status", a.StatusCode, status)
					want(t, "code", strings.Contains(a.body, `"code":"request_timeout"`), status == 408)
					want(t, "closed", a.Close, true)
					return
				case <-tick.C:
					if _, err := io.WriteString(c.Conn, "          "); err != nil && status != 408 {
						t.Fatalf("write: got %v, want no error", err)
					}
				}
			}
			c.say(chatBody)
			want(t, "status", (<-answered).StatusCode, status)
		})
	}
	start := func(n int) string {
		return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", chat, n)
	}
	f("trickled", 1<<20, start(1<<20), 0, 408)
	f("trickled without a limit", 0, start(10*30+len(chatBody)), 30, 200)
	f("fast enough", 5, start(10*30+len(chatBody)), 30, 200)
	form := "POST /v1/audio/transcriptions?model=m HTTP/1.1\r\nHost: h\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 1000000\r\n\r\n" +
		"--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b\r\n"
	f("trickled form", 1<<20, form, 0, 408)

	t.Run("held up by the replica", func(t *testing.T) {
		c := &conn{since: time.Unix(100, 0), bodyFrom: time.Unix(90, 0)}
		c.heldUp(7 * time.Second)
		want(t, "since", c.since, time.Unix(107, 0))
		want(t, "bodyFrom", c.bodyFrom, time.Unix(97, 0))
	})
}

// TestExpect: 100-continue is answered here, after the head was judged.
func TestExpect(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, func(s *configs.Settings) { s.Limits.Body = 1000 }, s)
	f := func(name, path, expect string, length, status int) {
		t.Run(name, func(t *testing.T) {
			c := g.dial()
			c.say(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: h\r\n%s\r\nContent-Length: %d\r\n\r\n", path, expect, length))
			if status == 200 {
				line, err := c.ReadString('\n')
				want(t, "interim", line, "HTTP/1.1 100 Continue\r\n")
				want(t, "error", err, error(nil))
				_, _ = c.ReadString('\n')
				c.say(chatBody)
				want(t, "status", c.answer("POST").StatusCode, 200)
				return
			}
			if status == 417 {
				c.say(strings.Repeat("x", length))
			}
			a := c.answer("POST")
			want(t, "status", a.StatusCode, status)
			want(t, "JSON", strings.HasPrefix(a.body, `{"error"`), true)
			want(t, "x-request-id", len(a.Header.Get("x-request-id")), 32)
			c.closed()
		})
	}
	f("accepted", chat, "Expect: 100-continue", len(chatBody), 200)
	f("in other capitals", chat, "Expect: 100-CONTINUE", len(chatBody), 200)
	f("in capitals", chat, "EXPECT: 100-Continue", len(chatBody), 200)
	f("in small letters", chat, "expect:100-continue", len(chatBody), 200)
	f("too large", chat, "Expect: 100-continue", 1001, 413)
	f("too large in capitals", chat, "EXPECT: 100-CONTINUE", 1001, 413)
	f("no route", "/nowhere", "Expect: 100-continue", 10, 404)
	f("unknown", chat, "Expect: 200-maybe", 10, 417)
	eventually(t, "nothing is in flight", func() bool { return g.InFlight() == 0 }) // the books are behind the answer
}

// TestBadBodies: what is no JSON object is refused here, with the place.
func TestBadBodies(t *testing.T) {
	s := newStub(t, plain)
	g := newGateway(t, nil, s)
	f := func(name, path, body string, status int, part string, fields ...string) {
		t.Run(name, func(t *testing.T) {
			a := g.dial().ask(post(path, body, fields...))
			want(t, "status", a.StatusCode, status)
			if !strings.Contains(a.body, part) {
				t.Errorf("body: got %s, want %q in it", a.body, part)
			}
		})
	}
	f("no JSON", chat, "hello", 400, `"code":"invalid_body"`)
	f("no object", chat, "[]", 400, `"type":"invalid_request_error"`)
	f("cut off", chat, `{"model":"m"`, 400, "invalid_body")
	f("empty", chat, "", 400, "invalid_body")
	f("model is no string", chat, `{"model":3}`, 400, "model must be a string")
	f("compressed", chat, "xx", 415, "unsupported_encoding", "Content-Encoding: gzip")
	f("not compressed", chat, chatBody, 200, "", "Content-Encoding: identity")
	f("unknown model", chat, `{"model":"nope","messages":[]}`, 404, `"code":"model_not_found"`)
	f("unknown model, Anthropic", "/v1/messages", `{"model":"nope","messages":[]}`, 404, `{"type":"error","error":{"type":"not_found_error"`)
	f("unknown model, Cohere", "/cohere/v2/chat", `{"model":"nope","messages":[]}`, 404, `"message":"the model \"nope\"`)
	f("no model", chat, `{"messages":[]}`, 200, "")
	f("odd shapes", chat, `{"model":"m","messages":"what?"}`, 200, "")
	for _, e := range g.fleet.Endpoints() {
		g.fleet.SetModels(e, []string{"m", "n"}, true)
	}
	f("no model of several", chat, `{"messages":[]}`, 400, "model_missing")
}

// TestNobodyThere: case 37, without a queue.
func TestNobodyThere(t *testing.T) {
	g := newGateway(t, nil)
	a := g.dial().ask(post(chat, chatBody))
	want(t, "status", a.StatusCode, 503)
	want(t, "Retry-After", a.Header.Get("Retry-After"), "1")
	want(t, "reason", a.Header.Get("x-llm-d-request-dropped-reason"), "rejected-no-endpoints")
	want(t, "code", strings.Contains(a.body, `"code":"no_ready_replicas"`), true)
	want(t, "models", g.dial().ask(get("/v1/models")).StatusCode, 503)
	l := g.lines.TakeAll()[0].ContextMap()
	want(t, "logged", l["status"], int64(503))
}

// form makes a multipart body of pairs of name and value; a value that starts
// with @ is a file.
func form(boundary string, pairs ...string) string {
	var b strings.Builder
	for i := 0; i < len(pairs); i += 2 {
		b.WriteString("--" + boundary + "\r\nContent-Disposition: form-data; name=\"" + pairs[i] + `"`)
		value, file := strings.CutPrefix(pairs[i+1], "@")
		if file {
			b.WriteString("; filename=\"a.wav\"\r\nContent-Type: audio/wav")
		}
		b.WriteString("\r\n\r\n" + value + "\r\n")
	}
	return b.String() + "--" + boundary + "--\r\n"
}

// TestForms: audio streams through; the model is in the form or in the query.
func TestForms(t *testing.T) {
	got := make(chan *stubRequest, 1)
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			got <- r
			c.answer(200, `{"text":"hi"}`)
		}
	})
	g := newGateway(t, func(s *configs.Settings) { s.Limits.Body = 4 << 20 }, s)
	const path = "/v1/audio/transcriptions"
	send := func(target, body, kind string, chunked bool) string {
		if !chunked {
			return strings.Replace(post(target, body), "application/json", kind, 1)
		}
		var text strings.Builder
		text.WriteString("POST " + target + " HTTP/1.1\r\nHost: h\r\nContent-Type: " + kind + "\r\nTransfer-Encoding: chunked\r\n\r\n")
		for rest := body; len(rest) > 0; {
			n := min(len(rest), 77_777)
			text.WriteString(chunk(rest[:n]))
			rest = rest[n:]
		}
		return text.String() + lastChunk
	}
	small, large := "@RIFF", "@"+strings.Repeat("RIFF\r\n--", 300_000)
	f := func(name, target, body, kind, model string, status int) {
		for _, chunked := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/chunked=%v", name, chunked), func(t *testing.T) {
				g.lines.TakeAll()
				c := g.dial()
				go func() { _, _ = io.WriteString(c.Conn, send(target, body, kind, chunked)) }()
				a := c.answer("POST")
				want(t, "status", a.StatusCode, status)
				if status != 200 {
					return
				}
				want(t, "body sent on unchanged", string((<-got).body) == body, true)
				l := g.line()
				want(t, "model", l["model"], model)
				want(t, "bytes_in", l["bytes_in"], int64(len(body)))
			})
		}
	}
	multipart := "multipart/form-data; boundary=\"xyz\""
	for _, e := range g.fleet.Endpoints() {
		g.fleet.SetModels(e, []string{"m", "n"}, true)
	}
	f("small", path, form("xyz", "model", "n", "file", small), multipart, "n", 200)
	f("small, model last", path, form("xyz", "file", small, "model", "n"), multipart, "n", 200)
	f("large", path, form("xyz", "language", "en", "model", "m", "file", large), multipart, "m", 200)
	f("large, model last, in the query", path+"?model=n", form("xyz", "file", large, "model", "n"), multipart, "n", 200)
	f("large, model last", path, form("xyz", "file", large, "model", "n"), multipart, "", 400)
	f("unknown model", path, form("xyz", "model", "o", "file", small), multipart, "", 404)
	f("no form", path+"?model=n", "raw audio", "audio/wav", "n", 200)
	f("encoded query", path+"?x=1&model=%6e", "raw audio", "audio/wav", "n", 200)
	// Too large is said while it streams.
	huge := form("xyz", "model", "m", "file", "@"+strings.Repeat("x", 5<<20))
	c := g.dial()
	go func() { _, _ = io.WriteString(c.Conn, send(path, huge, multipart, true)) }()
	want(t, "too large", c.answer("POST").StatusCode, 413)
	want(t, "state", g.value(`kvgate_replica_state{replica="r0",state="ready"}`), 1.0)
}

// TestFormReroute: a form whose rest was not touched goes to another replica.
func TestFormReroute(t *testing.T) {
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			c.answer(200, fmt.Sprint(len(r.body)))
		}
	})
	g := newGateway(t, nil, newStubDown(t), s)
	body := form("xyz", "model", "m", "file", "@"+strings.Repeat("x", 3<<20))
	for range 8 {
		a := g.dial().ask(strings.Replace(post("/v1/audio/translations", body), "application/json", "multipart/form-data; boundary=xyz", 1))
		want(t, "status", a.StatusCode, 200)
		want(t, "body", a.body, fmt.Sprint(len(body)))
	}
}

// TestFormEarlyAnswer: a replica that refuses an upload is heard, and the
// client's connection is not used again.
func TestFormEarlyAnswer(t *testing.T) {
	s := newStub(t, func(c *stubConn) {
		if _, err := c.head(); err == nil {
			c.answer(415, "no such codec")
			<-t.Context().Done()
		}
	})
	g := newGateway(t, nil, s)
	body := form("xyz", "model", "m", "file", "@"+strings.Repeat("x", 20<<20))
	c := g.dial()
	go func() {
		_, _ = io.WriteString(c.Conn, strings.Replace(post("/v1/audio/translations", body), "application/json", "multipart/form-data; boundary=xyz", 1))
	}()
	a := c.answer("POST")
	want(t, "status", a.StatusCode, 415)
	want(t, "body", a.body, "no such codec")
	want(t, "Connection: close", a.Close, true)
}

func TestPassthrough(t *testing.T) {
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			c.answer(200, r.line+"|"+string(r.body))
		}
	})
	g := newGateway(t, func(s *configs.Settings) { s.Routes.Passthrough = []string{"/x/*"} }, s)
	for _, e := range g.fleet.Endpoints() {
		g.fleet.SetModels(e, []string{"m", "n"}, true)
	}
	f := func(method, body string, status int) {
		t.Helper()
		request := fmt.Sprintf("%s /x/y?z HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", method, len(body), body)
		a := g.dial().ask(request)
		want(t, method, a.StatusCode, status)
		if status == 200 {
			want(t, method, a.body, method+" /x/y?z HTTP/1.1|"+body)
		}
	}
	f("GET", "", 200)
	f("DELETE", "", 200)
	f("PUT", "not JSON", 200)
	f("PATCH", `{"model":"n"}`, 200)
	f("POST", `{"model":"unknown"}`, 404)
	f("TRACE", "", 405)
	want(t, "route", g.lines.TakeAll()[0].ContextMap()["route"], "passthrough")
}

// TestGatewayRoutes: what is answered without a replica.
func TestGatewayRoutes(t *testing.T) {
	s := newStub(t, plain)
	var ready error
	cards := []ModelCard{{ID: "m", Created: 1, OwnedBy: "vllm", MaxModelLen: 100}, {ID: "org/name", Parent: "m"}, {ID: "m", MaxModelLen: 50}}
	g := newGatewayWith(t, nil, func(o *Options) {
		o.ModelCards = func() []ModelCard { return cards }
		o.Ready = func() error { return ready }
	}, nil, s)
	f := func(path string, status int, body string) {
		t.Helper()
		a := g.dial().ask(get(path))
		want(t, path, a.StatusCode, status)
		if body != "" {
			want(t, path, a.body, body)
		}
		want(t, "Content-Type", a.Header.Get("Content-Type"), "application/json")
		want(t, "x-request-id", len(a.Header.Get("x-request-id")), 32)
	}
	m := `{"id":"m","object":"model","created":1,"owned_by":"vllm","parent":null,"max_model_len":50}`
	n := `{"id":"org/name","object":"model","created":0,"owned_by":"kvgate","parent":"m","max_model_len":null}`
	f("/v1/models", 200, `{"object":"list","data":[`+m+`,`+n+`]}`)
	f("/v1/models/m", 200, m)
	f("/v1/models/org/name", 200, n)
	f("/v1/models/org%2Fname", 200, n)
	f("/v1/models/nope", 404, "")
	f("/livez", 200, `{"status":"ok"}`)
	f("/readyz", 200, `{"status":"ok"}`)
	f("/health", 200, `{"status":"ok"}`)
	f("/version", 200, `{"version":"test"}`)
	f("/load", 200, `{"server_load":0}`)
	ready = io.ErrClosedPipe
	f("/readyz", 503, `{"status":"unavailable","reason":"io: read/write on closed pipe"}`)
	f("/livez", 200, `{"status":"ok"}`)
	cards = nil
	f("/v1/models", 200, `{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"kvgate","parent":null,"max_model_len":null}]}`)
	a := g.dial().ask("HEAD /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
	want(t, "HEAD", a.StatusCode, 200)
	want(t, "HEAD body", a.body, "")
	want(t, "POST", g.dial().ask(post("/v1/models", "")).StatusCode, 405)
	want(t, "requests sent on", s.requests.Load(), int64(0))
}

// TestTooManyConnections: the connection over the limit is answered and closed.
func TestTooManyConnections(t *testing.T) {
	g := newGateway(t, func(s *configs.Settings) { s.Server.MaxConns = 1 }, newStub(t, plain))
	first := g.dial()
	want(t, "first", first.ask(post(chat, chatBody)).StatusCode, 200)
	second := g.dial()
	resp, err := http.ReadResponse(second.Reader, nil)
	if err != nil {
		t.Fatalf("second: got %v, want an answer", err)
	}
	_ = resp.Body.Close()
	want(t, "second", resp.StatusCode, 503)
	_ = first.Close()
	eventually(t, "there is room again", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return len(g.conns) == 0
	})
	want(t, "third", g.dial().ask(post(chat, chatBody)).StatusCode, 200)
}

// TestApply: settings change for the requests that come.
func TestApply(t *testing.T) {
	s := newStub(t, echo)
	g := newGateway(t, nil, s)
	c := g.dial()
	want(t, "before", c.ask(post("/x", chatBody)).StatusCode, 404)
	settings := configs.DefaultSettings()
	settings.Routes.Passthrough = []string{"/x"}
	settings.Headers.Replica = true
	settings.Upstream.APIKeyFile = writeFile(t, "k2")
	settings.Limits.Buffered = 64 << 20
	if err := g.Apply(&settings); err != nil {
		t.Fatalf("Apply: got %v, want no error", err)
	}
	settings.Routes.Passthrough = nil // what was applied is the Server's own
	c = g.dial()
	a := c.ask(post("/x", chatBody))
	want(t, "after", a.StatusCode, 200)
	want(t, "replica header", a.Header.Get("x-kvgate-replica"), "r0")
	want(t, "key", strings.Contains(a.body, "Authorization: Bearer k2\r\n"), true)
	want(t, "budget", g.buffers.budget.Load(), int64(64<<20))
	bad := configs.DefaultSettings()
	bad.Upstream.CAFile = "/nonexistent"
	if err := g.Apply(&bad); err == nil {
		t.Errorf("Apply of bad settings: got no error, want one")
	}
	want(t, "kept", c.ask(post("/x", chatBody)).StatusCode, 200)
}
