package routing

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/configs"
)

// fakeRenderer answers queries as a test says and notes them.
type fakeRenderer struct {
	mu      sync.Mutex
	queries []RenderQuery
	answer  func(q RenderQuery) (int, []byte, error)
}

func (f *fakeRenderer) render(q RenderQuery) (int, []byte, error) {
	f.mu.Lock()
	q.Body = slices.Clone(q.Body)
	f.queries = append(f.queries, q)
	answer := f.answer
	f.mu.Unlock()
	return answer(q)
}

// asked returns the queries since the last call as "url path".
func (f *fakeRenderer) asked() (out []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.queries {
		out = append(out, strings.TrimSpace(q.URL+" "+q.Path))
	}
	f.queries = nil
	return out
}

func status(code int, body string) func(RenderQuery) (int, []byte, error) {
	return func(RenderQuery) (int, []byte, error) { return code, []byte(body), nil }
}

// renderFixture is a fleet whose tokens come from a fakeRenderer.
type renderFixture struct {
	t      testing.TB
	clock  *testClock
	fleet  *Fleet
	router *Router
	server *fakeRenderer
}

const renderURL = "{vllm: {url: 'http://render:8000/', timeout: 2s}}"

func newRender(t testing.TB, params string, names ...string) *renderFixture {
	t.Helper()
	f := &renderFixture{t: t, clock: newTestClock(), server: &fakeRenderer{answer: status(200, `{"token_ids":[1,2,3,4,5,6,7,8,9]}`)}}
	f.fleet = readyFleet(t, f.clock, names...)
	f.router = f.compile(params)
	return f
}

func (f *renderFixture) compile(params string) *Router {
	f.t.Helper()
	cfg, err := configs.ParseScheduling("test.yaml", []byte(header+preciseYAML(preciseBlock4)+"- type: token-producer\n  parameters: "+params+"\n"))
	if err != nil {
		f.t.Fatal(err)
	}
	r, err := New(cfg, f.fleet, 1, WithRenderer(f.server.render))
	if err != nil {
		f.t.Fatal(err)
	}
	return r
}

// ask has a body routed and returns the request.
func (f *renderFixture) ask(api API, body string, h Headers) *Request {
	f.t.Helper()
	r := &Request{API: api, Body: []byte(body), Headers: h}
	if err := r.Parse(); err != nil {
		f.t.Fatalf("%s: %v", body, err)
	}
	l, err := f.router.Route(r)
	if err != nil {
		f.t.Fatalf("%s: %v", body, err)
	}
	l.Done(Completed)
	return r
}

func (f *renderFixture) want(what string, r *Request, source TokenSource, tokens int, asked ...string) {
	f.t.Helper()
	exact := source == TokensRendered || source == TokensRemembered || source == TokensGiven
	got := f.server.asked()
	if r.Source != source || r.Exact != exact || tokens >= 0 && len(r.Tokens) != 4*tokens || !slices.Equal(got, asked) {
		f.t.Errorf("%s: got %v, exact %v, %d tokens, asked %q, want %v, %v, %d, %q", what, r.Source, r.Exact, len(r.Tokens)/4, got, source, exact, tokens, asked)
	}
}

const renderBody = `{"model":"m","messages":[{"role":"user","content":"hello"}]}`

func TestRenderPaths(t *testing.T) {
	f := func(t *testing.T, api API, body string, source TokenSource, tokens int, asked ...string) {
		t.Helper()
		p := newRender(t, renderURL, "a")
		p.want(body, p.ask(api, body, nil), source, tokens, asked...)
	}
	f(t, APIChat, renderBody, TokensRendered, 9, "http://render:8000 /v1/chat/completions/render")
	f(t, APICompletions, `{"model":"m","prompt":"hello"}`, TokensRendered, 9, "http://render:8000 /v1/completions/render")
	f(t, APIMessages, renderBody, TokensRendered, 9, "http://render:8000 /v1/messages/render")
	f(t, APIResponses, `{"model":"m","input":"hello"}`, TokensRendered, 9, "http://render:8000 /v1/responses/render")
	f(t, APIEmbeddings, `{"model":"m","input":"hello"}`, TokensUnsupported, -1)
	f(t, APICompletions, `{"model":"m","prompt":[7,8,9]}`, TokensGiven, 3)
	f(t, APIGenerate, `{"model":"m","token_ids":[7,8]}`, TokensGiven, 2)
	f(t, APIChat, `{"model":"m"}`, TokensNone, 0)
}

func TestRenderQuery(t *testing.T) {
	f := func(t *testing.T, params, body string, want RenderQuery) {
		t.Helper()
		p := newRender(t, params, "a")
		p.ask(APIChat, body, testHeaders{"authorization": "Bearer client"})
		if len(p.server.queries) != 1 {
			t.Fatalf("%s: got %d queries, want 1", params, len(p.server.queries))
		}
		got := p.server.queries[0]
		got.Done = nil
		if fmt.Sprintf("%+v %s %s", got, got.Body, got.Authorization) != fmt.Sprintf("%+v %s %s", want, want.Body, want.Authorization) {
			t.Errorf("%s: got %+v %s, want %+v %s", params, got, got.Body, want, want.Body)
		}
	}
	const path = "/v1/chat/completions/render"
	image := `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y.png"}}]}]}`
	f(t, renderURL, renderBody, RenderQuery{URL: "http://render:8000", Path: path, Body: []byte(renderBody), Timeout: 2 * time.Second})
	f(t, "{vllm: {url: 'https://r', mmTimeout: 9s}}", image, RenderQuery{URL: "https://r", Path: path, Body: []byte(image), Timeout: 9 * time.Second})
	f(t, "{vllm: {}}", image, RenderQuery{URL: "http://a:8000", Path: path, Body: []byte(image), Timeout: 30 * time.Second, Authorization: []byte("Bearer client")})
	f(t, "{modelName: other}", renderBody, RenderQuery{URL: "http://a:8000", Path: path, Timeout: 5 * time.Second, Authorization: []byte("Bearer client"),
		Body: []byte(strings.Replace(renderBody, `"m"`, `"other"`, 1))})
}

type testHeaders map[string]string

func (h testHeaders) Header(name string) []byte {
	if v, ok := h[name]; ok {
		return []byte(v)
	}
	return nil
}

// TestRenderIsRemembered: an equal body costs nothing, for a while and over a reload.
func TestRenderIsRemembered(t *testing.T) {
	const asked = "http://render:8000 /v1/chat/completions/render"
	p := newRender(t, renderURL, "a")
	p.want("first", p.ask(APIChat, renderBody, nil), TokensRendered, 9, asked)
	p.want("again", p.ask(APIChat, renderBody, nil), TokensRemembered, 9)
	p.want("another body", p.ask(APIChat, renderBody+" ", nil), TokensRendered, 9, asked)
	p.router = p.compile(renderURL)
	p.want("after a reload", p.ask(APIChat, renderBody, nil), TokensRemembered, 9)
	p.router = p.compile("{modelName: n, vllm: {url: 'http://render:8000'}}")
	p.want("for another model", p.ask(APIChat, renderBody, nil), TokensRendered, 9, asked)
	p.router = p.compile(renderURL)
	p.clock.advance(renderKeep)
	p.fleet.Endpoints()[0].Observe(observed(0, 0, 0), p.clock.now())
	p.server.answer = status(200, `{"token_ids":[1,2]}`)
	p.want("much later", p.ask(APIChat, renderBody, nil), TokensRendered, 2, asked)
	p.want("and again", p.ask(APIChat, renderBody, nil), TokensRemembered, 2)
	counts := p.fleet.TokenSources()
	if counts[TokensRendered] != 4 || counts[TokensRemembered] != 3 {
		t.Errorf("got %d rendered, %d remembered, want 4, 3", counts[TokensRendered], counts[TokensRemembered])
	}
	body := []byte(renderBody)
	r := &Request{}
	ask := func() {
		r.Reset()
		r.API, r.Body = APIChat, body
		if err := r.Parse(); err != nil {
			t.Fatal(err)
		}
		p.router.prepare(r, p.fleet.Endpoints())
	}
	if got := testing.AllocsPerRun(100, ask); got != 0 {
		t.Errorf("a repeated prompt: got %v allocations, want 0", got)
	}
}

// TestRenderFallsBack: what happens when the server does not answer well.
func TestRenderFallsBack(t *testing.T) {
	const chat, tokenize = "http://render:8000 /v1/chat/completions/render", "http://render:8000 /tokenize"
	onlyTokenize := func(code int) func(RenderQuery) (int, []byte, error) {
		return func(q RenderQuery) (int, []byte, error) {
			if q.Path == tokenizePath {
				return 200, []byte(`{"count":3,"max_model_len":2048,"tokens":[1,2,3],"token_strs":null}`), nil
			}
			return code, nil, nil
		}
	}
	f := func(t *testing.T, name string, answer func(RenderQuery) (int, []byte, error), body string, source TokenSource, tokens int, asked ...string) *renderFixture {
		t.Helper()
		p := newRender(t, renderURL, "a")
		p.server.answer = answer
		p.want(name, p.ask(APIChat, body, nil), source, tokens, asked...)
		return p
	}
	for _, code := range []int{403, 404, 405, 501} {
		p := f(t, fmt.Sprint("not enabled, ", code), onlyTokenize(code), renderBody, TokensRendered, 3, chat, tokenize)
		p.want("the path is known to be absent", p.ask(APIChat, renderBody+" ", nil), TokensRendered, 3, tokenize)
		p.clock.advance(renderPauseNoAPI)
		p.fleet.Endpoints()[0].Observe(observed(0, 0, 0), p.clock.now())
		p.server.answer = status(200, `{"token_ids":[4]}`)
		p.want("a minute later", p.ask(APIChat, renderBody+"  ", nil), TokensRendered, 1, chat)
		p.want("and on", p.ask(APIChat, renderBody+"   ", nil), TokensRendered, 1, chat)
	}
	p0 := f(t, "an unknown model", status(404, `{"error":{"message":"The model does not exist."}}`), renderBody, TokensFailed, -1, chat)
	p0.want("which says nothing of the path", p0.ask(APIChat, renderBody+" ", nil), TokensFailed, -1, chat)
	estimate := (len("user") + len("hello") + 3) / 4
	p := f(t, "neither", status(404, ""), renderBody, TokensUnsupported, estimate, chat, tokenize)
	p.want("neither, known", p.ask(APIChat, renderBody+" ", nil), TokensUnsupported, estimate)
	const image = `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y.png"}}]}]}`
	f(t, "an image is nothing for tokenize", onlyTokenize(403), image, TokensUnsupported, -1, chat)
	f(t, "a body that the engine refuses", status(400, "{}"), renderBody, TokensFailed, estimate, chat)
	f(t, "no tokens", status(200, `{"token_ids":[]}`), renderBody, TokensFailed, estimate, chat)
	f(t, "no JSON", status(200, `<html>`), renderBody, TokensFailed, estimate, chat)

	for name, answer := range map[string]func(RenderQuery) (int, []byte, error){
		"no connection": func(RenderQuery) (int, []byte, error) { return 0, nil, errors.New("refused") },
		"500":           status(500, ""), "401": status(401, ""), "429": status(429, ""), "nonsense": status(200, "[]"),
	} {
		p := f(t, name, answer, renderBody, TokensFailed, estimate, chat)
		p.want(name+", once more", p.ask(APIChat, renderBody, nil), TokensFailed, estimate, chat)
		p.server.answer = status(200, `{"token_ids":[4]}`)
		// The other path was never asked, and a text prompt may still try it.
		r := p.ask(APIMessages, renderBody, nil)
		p.want(name+", another path is not affected", r, TokensRendered, 1, "http://render:8000 /v1/messages/render")
		p.want(name+", left alone for a while", p.ask(APIChat, image, nil), TokensSkipped, -1)
		p.clock.advance(renderPause)
		p.fleet.Endpoints()[0].Observe(observed(0, 0, 0), p.clock.now())
		p.want(name+", afterwards", p.ask(APIChat, renderBody, nil), TokensRendered, 1, chat)
	}

	cfg, err := configs.ParseScheduling("test.yaml", []byte(header+preciseYAML(preciseBlock4)+"- type: token-producer\n  parameters: {vllm: {}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	p = newRender(t, renderURL, "a")
	if p.router, err = New(cfg, p.fleet, 1); err != nil {
		t.Fatal(err)
	}
	p.want("without a network", p.ask(APIChat, renderBody, nil), TokensUnsupported, estimate)
}

// TestRenderAsksReplicas: without a URL the replicas of the model are asked, those that can.
func TestRenderAsksReplicas(t *testing.T) {
	p := newRender(t, "{vllm: {}}", "a", "b", "c")
	e := p.fleet.Endpoints()
	p.fleet.SetModels(e[0], []string{"other"}, true)
	p.fleet.SetModels(e[1], []string{"m"}, true)
	p.fleet.SetModels(e[2], []string{"m"}, true)
	seen := map[string]int{}
	for i := range 40 {
		p.ask(APIChat, renderBody+strings.Repeat(" ", i), nil)
		for _, a := range p.server.asked() {
			seen[strings.Fields(a)[0]]++
		}
	}
	if seen["http://a:8000"] != 0 || seen["http://b:8000"] < 5 || seen["http://c:8000"] < 5 {
		t.Errorf("got questions to %v, want none to a and some to b and c each", seen)
	}
	e[1].SetReachable(false)
	for i := range 10 {
		p.want("b is down", p.ask(APIChat, renderBody+strings.Repeat("\n", i+1), nil), TokensRendered, 9, "http://c:8000 /v1/chat/completions/render")
	}
	e[1].SetReachable(true)
	p.server.answer = func(q RenderQuery) (int, []byte, error) {
		if q.URL == "http://c:8000" {
			return 0, nil, errors.New("refused")
		}
		return 200, []byte(`{"token_ids":[1]}`), nil
	}
	for i := range 30 {
		p.ask(APIChat, renderBody+strings.Repeat("\t", i+1), nil)
	}
	asked := p.server.asked()
	failed := 0
	for _, a := range asked {
		if strings.HasPrefix(a, "http://c") {
			failed++
		}
	}
	if failed != renderFailures || len(asked) != 30 {
		t.Errorf("c fails: got %d questions to it of %d, want %d of 30", failed, len(asked), renderFailures)
	}
	e[1].SetReachable(false)
	e[2].SetReachable(false)
	p.want("nobody is ready", p.ask(APIChat, renderBody+"\r", nil), TokensUnsupported, -1)
}

// leaver is a client that leaves when told to.
type leaver struct {
	mu     sync.Mutex
	cancel func()
	left   bool
	ready  chan struct{}
}

func (l *leaver) Header(string) []byte { return nil }

func (l *leaver) Attach(cancel func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left {
		return false
	}
	l.cancel = cancel
	if l.ready != nil {
		close(l.ready)
	}
	return true
}

func (l *leaver) Detach() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cancel = nil
}

func (l *leaver) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left = true; l.cancel != nil {
		l.cancel()
	}
}

func TestRenderIsCanceled(t *testing.T) {
	p := newRender(t, renderURL, "a")
	client := &leaver{}
	p.server.answer = func(q RenderQuery) (int, []byte, error) {
		client.leave()
		<-q.Done
		return 0, nil, errors.New("canceled")
	}
	p.want("left while it was asked", p.ask(APIChat, renderBody, client), TokensCanceled, -1, "http://render:8000 /v1/chat/completions/render")
	if client.cancel != nil {
		t.Error("got the client still attached, want it detached")
	}
	p.server.answer = func(q RenderQuery) (int, []byte, error) {
		select {
		case <-q.Done:
			return 0, nil, errors.New("canceled")
		default:
			return 200, []byte(`{"token_ids":[1]}`), nil
		}
	}
	p.want("had left before", p.ask(APIChat, renderBody, &leaver{left: true}), TokensCanceled, -1, "http://render:8000 /v1/chat/completions/render")
	p.want("that was no failure", p.ask(APIChat, renderBody, &leaver{}), TokensRendered, 1, "http://render:8000 /v1/chat/completions/render")
}

// TestRenderAsksOnce: of a burst of equal bodies one asks and the others wait for
// it, each as long as its client is there.
func TestRenderAsksOnce(t *testing.T) {
	f := func(t *testing.T, name string, answer func() (int, []byte, error), source TokenSource) {
		t.Helper()
		p := newRender(t, renderURL, "a")
		release := make(chan struct{})
		p.server.answer = func(RenderQuery) (int, []byte, error) {
			<-release
			return answer()
		}
		var wg sync.WaitGroup
		results := make([]*Request, 8)
		leavers := make([]*leaver, len(results))
		for i := range results {
			leavers[i] = &leaver{ready: make(chan struct{})}
			wg.Go(func() { results[i] = p.ask(APIChat, renderBody, leavers[i]) })
			<-leavers[i].ready // it waits
		}
		leavers[7].leave()
		for { // until the one that left has given up
			p.server.mu.Lock()
			n := len(p.server.queries)
			p.server.mu.Unlock()
			runtime.Gosched()
			if n == 1 && p.fleet.TokenSources()[TokensCanceled] == 1 {
				break
			}
		}
		close(release)
		wg.Wait()
		got := map[TokenSource]int{}
		for _, r := range results {
			got[r.Source]++
		}
		if got[source] != 6 || got[TokensCanceled] != 1 {
			t.Errorf("%s: got %v, want 6 of %v and one canceled", name, got, source)
		}
		if n := len(p.server.asked()); n != 1 {
			t.Errorf("%s: got %d questions, want 1", name, n)
		}
	}
	f(t, "well", func() (int, []byte, error) { return 200, []byte(`{"token_ids":[1]}`), nil }, TokensRemembered)
	p := newRender(t, renderURL, "a")
	key := p.router.tokenizer.(*renderTokenizer).cache
	for i := range renderCalls {
		if _, call, _ := key.begin(renderKey{place: uint64(i)}, p.clock.now()); call == nil {
			t.Fatalf("question %d: got none, want one", i)
		}
	}
	p.want("too many at once", p.ask(APIChat, renderBody, nil), TokensSkipped, -1)
}

func TestRenderWaitersFailTogether(t *testing.T) {
	c := &renderCache{}
	_, call, source := c.begin(renderKey{1, 2}, time.Time{})
	_, same, waits := c.begin(renderKey{1, 2}, time.Time{})
	if same != call || source != TokensRendered || waits != TokensRemembered {
		t.Fatalf("got %v and %v, the same call %v, want rendered, remembered, true", source, waits, same == call)
	}
	c.end(call, nil, time.Time{})
	if v, source := same.wait(nil); v != nil || source != TokensFailed {
		t.Errorf("got %v, %v, want nothing, failed", v, source)
	}
	if _, again, source := c.begin(renderKey{1, 2}, time.Time{}); again == nil || again == call || source != TokensRendered {
		t.Errorf("after a failure: got %v, want a new question", source)
	}
}

// TestRenderCacheIsBounded: by memory, and by places.
func TestRenderCacheIsBounded(t *testing.T) {
	c := &renderCache{}
	now := time.Unix(1000, 0)
	put := func(key renderKey, n int) {
		t.Helper()
		_, call, _ := c.begin(key, now)
		if call == nil {
			t.Fatalf("key %v: got none to ask, want one", key)
		}
		c.end(call, &rendered{tokens: make([]byte, n), ends: []int{n}}, now)
	}
	has := func(key renderKey) bool {
		v, call, _ := c.begin(key, now)
		if call != nil {
			c.end(call, nil, now)
		}
		return v != nil
	}
	put(renderKey{0, 1}, renderBytes/8+1)
	if has(renderKey{0, 1}) || c.bytes != 0 {
		t.Errorf("too large: got %d bytes kept, want 0", c.bytes)
	}
	for i := range uint64(renderWays) {
		put(renderKey{5, i}, 100)
	}
	has(renderKey{5, 0})
	put(renderKey{5, 99}, 100)
	if !has(renderKey{5, 0}) || has(renderKey{5, 1}) || !has(renderKey{5, 99}) {
		t.Errorf("a full set: got %v %v %v, want the used one, not the oldest, the new one", has(renderKey{5, 0}), has(renderKey{5, 1}), has(renderKey{5, 99}))
	}
	for i := range uint64(400) {
		put(renderKey{i, i + 1000}, 1<<20)
		if c.bytes > renderBytes {
			t.Fatalf("after %d: got %d bytes, want at most %d", i, c.bytes, renderBytes)
		}
		if !has(renderKey{i, i + 1000}) {
			t.Fatalf("the newest: got nothing, want it")
		}
	}
	sum := int64(0)
	for i := range c.sets {
		for _, e := range c.sets[i] {
			if e.value != nil {
				sum += e.value.bytes()
			}
		}
	}
	if sum != c.bytes || sum < renderBytes/2 {
		t.Errorf("got %d bytes counted, %d kept, want the same, at least half of %d", c.bytes, sum, renderBytes)
	}
	for i := range renderServers + 10 {
		c.health(fmt.Sprint(i), "/p", false, true, now)
	}
	if got := len(c.servers); got > renderServers {
		t.Errorf("got %d servers, want at most %d", got, renderServers)
	}
}

func TestParseRendered(t *testing.T) {
	f := func(t *testing.T, body string, tokens []uint32, ends []int, items ...promptItem) {
		t.Helper()
		v, err := parseRendered([]byte(body))
		if err != nil {
			t.Errorf("%s: got %v, want tokens", body, err)
			return
		}
		if !slices.Equal(v.tokens, leBytes(tokens)) || !slices.Equal(v.ends, ends) || fmt.Sprint(v.items) != fmt.Sprint(items) {
			t.Errorf("%s: got %v %v %v, want %v %v %v", body, v.tokens, v.ends, v.items, tokens, ends, items)
		}
	}
	f(t, `{"token_ids":[1,2,128255]}`, []uint32{1, 2, 128255}, []int{12})
	f(t, `{"count":2,"max_model_len":9,"tokens":[5,6],"token_strs":null}`, []uint32{5, 6}, []int{8})
	f(t, ` [ {"request_id":"x","token_ids":[1]} , {"token_ids":[2,3],"model":"m"} ] `, []uint32{1, 2, 3}, []int{4, 12})
	f(t, `{"token_ids":[1,2],"features":null,"sampling_params":{"token_ids":[9]}}`, []uint32{1, 2}, []int{8})
	f(t, `{"token_ids":[1],"token_ids":[2]}`, []uint32{1}, []int{4})
	f(t, `{"features":{"mm_hashes":{"image":["b","a"]},"mm_placeholders":{"image":[{"offset":2,"length":1},{"offset":0,"length":2}]},"kwargs_data":{"image":["AAA",null]}},"token_ids":[1,2,3]}`,
		[]uint32{1, 2, 3}, []int{12}, promptItem{0, 0, 2, []byte("a")}, promptItem{0, 2, 1, []byte("b")})
	f(t, `[{"token_ids":[1]},{"token_ids":[2,3],"features":{"mm_hashes":{"image":["c"]},"mm_placeholders":{"image":[{"offset":1,"length":1}]}}}]`,
		[]uint32{1, 2, 3}, []int{4, 12}, promptItem{1, 1, 1, []byte("c")})

	bad := func(t *testing.T, body string) {
		t.Helper()
		if v, err := parseRendered([]byte(body)); !errors.Is(err, errNoTokens) {
			t.Errorf("%s: got %v, %v, want no tokens", body, v, err)
		}
	}
	for _, body := range []string{
		``, `null`, `[]`, `{}`, `{"token_ids":[]}`, `{"token_ids":"abc"}`, `{"token_ids":[1.5]}`, `{"token_ids":[-1]}`, `{"token_ids":[4294967296]}`,
		`{"token_ids":[1]`, `{"token_ids":[1]} x`, `[{"token_ids":[1]},{}]`, `[{"token_ids":[1]},3]`, `[{"token_ids":[1]}`, `{"token_ids":[[1]]}`,
		`{"token_ids":[1],"features":3}`, `{"token_ids":[1],"features":{"mm_placeholders":{"image":[{"offset":0,"length":1}]}}}`,
		`{"token_ids":[1],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":0,"length":2}]}}}`,
		`{"token_ids":[1],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":-1,"length":1}]}}}`,
		`{"token_ids":[1],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":1,"length":9223372036854775807}]}}}`,
		`{"token_ids":[1],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":0,"length":-1}]}}}`,
	} {
		bad(t, body)
	}
}

// FuzzParseRendered: whatever comes back, the tokens are as encoding/json reads
// them, and they fill a request without harm.
func FuzzParseRendered(f *testing.F) {
	f.Add([]byte(`{"token_ids":[1,2,3]}`))
	f.Add([]byte(`[{"token_ids":[1]},{"tokens":[2]}]`))
	f.Add([]byte(`{"token_ids":[1,2],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":0,"length":2}]}}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		v, err := parseRendered(body)
		if err != nil {
			return
		}
		r := &Request{}
		v.fill(r)
		if len(r.Tokens) == 0 || len(r.Tokens)%4 != 0 || r.Ends[len(r.Ends)-1] != len(r.Tokens) || len(r.content()) != len(r.Tokens) {
			t.Fatalf("%q: got %d bytes of tokens, ends %v", body, len(r.Tokens), r.Ends)
		}
		for i := range r.Ends {
			r.extrasOf(nil, i, 4)
		}
		var plain struct {
			IDs []uint32 `json:"token_ids"`
		}
		if json.Unmarshal(body, &plain) == nil && len(plain.IDs) > 0 && body[0] == '{' && strings.Count(string(body), `oken`) == 1 {
			if !slices.Equal(r.Tokens, leBytes(plain.IDs)) {
				t.Fatalf("%q: got %v, want %v", body, r.Tokens, plain.IDs)
			}
		}
	})
}

func TestWithModel(t *testing.T) {
	f := func(t *testing.T, body, want string) {
		t.Helper()
		if got := string(withModel([]byte(body), []byte(`"new"`))); got != want {
			t.Errorf("%s: got %s, want %s", body, got, want)
		}
	}
	f(t, `{"model":"old","a":1}`, `{"model":"new","a":1}`)
	f(t, `{"a":{"model":1}, "model" : "old" }`, `{"a":{"model":1}, "model" : "new" }`)
	f(t, `{"model":null}`, `{"model":"new"}`)
	f(t, `{"a":1}`, `{"model":"new","a":1}`)
	f(t, ` {} `, ` {"model":"new"} `)
	f(t, `{"mod\u0065l":"old"}`, `{"mod\u0065l":"new"}`)
}

// TestItemsTellPromptsApart: two images under the same placeholders, for both producers.
func TestItemsTellPromptsApart(t *testing.T) {
	clock := newTestClock()
	fleet := readyFleet(t, clock, "a")
	cfg, err := configs.ParseScheduling("test.yaml", []byte(header+`
plugins:
- {type: precise-prefix-cache-producer}
- {type: prefix-cache-scorer}
- {type: prefix-cache-scorer, name: exact, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
- {type: token-producer, parameters: {vllm: {}}}
`))
	if err != nil {
		t.Fatal(err)
	}
	image := ""
	ids := strings.Trim(strings.Repeat("7,", 640), ",")
	r, err := New(cfg, fleet, 1, WithRenderer(func(RenderQuery) (int, []byte, error) {
		return 200, []byte(`{"token_ids":[` + ids + `],"features":{"mm_hashes":{"image":["` + image + `"]},"mm_placeholders":{"image":[{"offset":320,"length":64}]}}}`), nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	hashes := func(name string) (approx, precise []uint64) {
		t.Helper()
		image = name
		req := &Request{API: APIChat, Body: []byte(`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/` + name + `"}}]}]}`)}
		if err := req.Parse(); err != nil {
			t.Fatal(err)
		}
		r.prepare(req, fleet.Endpoints())
		return slices.Clone(req.work.chains[0].hashes), slices.Clone(req.work.chains[1].hashes)
	}
	a1, p1 := hashes("cat")
	a2, p2 := hashes("dog")
	same := func(x, y []uint64) (n int) {
		for n < len(x) && x[n] == y[n] {
			n++
		}
		return n
	}
	if got, want := same(a1, a2), 5; len(a1) != 10 || got != want {
		t.Errorf("approximate: got %d of %d blocks alike, want %d of 10", got, len(a1), want)
	}
	if got, want := same(p1, p2), 20; len(p1) != 40 || got != want {
		t.Errorf("precise: got %d of %d blocks alike, want %d of 40", got, len(p1), want)
	}
}

func TestExplainShowsTokenSource(t *testing.T) {
	p := newRender(t, renderURL, "a")
	explain := func(want string) {
		t.Helper()
		r := &Request{API: APIChat, Body: []byte(renderBody)}
		if err := r.Parse(); err != nil {
			t.Fatal(err)
		}
		ex, err := p.router.Explain(r)
		if err != nil {
			t.Fatal(err)
		}
		if ex.Tokens != want {
			t.Errorf("got tokens %q, want %q", ex.Tokens, want)
		}
	}
	explain("rendered")
	explain("remembered")
	p.router = newTestRouter(t, p.fleet, "")
	explain("")
}

func TestTokenProducerParameters(t *testing.T) {
	f := func(t *testing.T, params string, wants ...string) {
		t.Helper()
		cfg, err := configs.ParseScheduling("test.yaml", []byte(header+"plugins:\n- {type: prefix-cache-scorer}\n- type: token-producer\n  parameters: "+params+"\n"))
		if err == nil {
			_, err = New(cfg, newTestFleet(newTestClock()), 1)
		}
		for _, want := range wants {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %q", params, err, want)
			}
		}
		if len(wants) == 0 && err != nil {
			t.Errorf("%s: got %v, want no error", params, err)
		}
	}
	f(t, "{vllm: {url: 'http://h:8000'}}")
	f(t, "{vllm: {url: 'http://h:8000/', timeout: 1s, mmTimeout: 1m}, modelName: m, estimate: {image: {mode: static}}}")
	f(t, "{modelName: m}")
	f(t, "{vllm: {}}")
	f(t, "{vllm: null}")
	for _, url := range []string{"h:8000", "ftp://h", "http://", "http://h/v1", "http://u:p@h", "http://h?x=1", "http://h#x", "://"} {
		f(t, "{vllm: {url: '"+url+"'}}", "vllm.url", url, "test.yaml:6")
	}
	f(t, "{vllm: {timeout: -1s}}", "vllm.timeout", "-1s")
	f(t, "{vllm: {mmTimeout: 1h}}", "vllm.mmTimeout", "1h0m0s")
	f(t, "{vllm: {host: x}}", "host")
	f(t, "{estimate: {image: {mode: x}}, vllm: {}}", "estimate", "image.mode")
	f(t, "{udsTokenizerConfig: {}}", "udsTokenizerConfig")
}
