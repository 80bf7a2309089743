package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kvgate/configs"
	"kvgate/routing"
)

// fleetSource adds and removes replicas of a fleet, or refuses.
type fleetSource struct {
	fleet *routing.Fleet
	err   error
	specs []routing.EndpointSpec
}

func (s *fleetSource) Add(spec routing.EndpointSpec) error {
	if s.err != nil {
		return s.err
	}
	s.specs = append(s.specs, spec)
	s.fleet.Update(s.specs)
	return nil
}

func (s *fleetSource) Remove(id string) error {
	if s.err != nil {
		return s.err
	}
	s.specs = slices.DeleteFunc(s.specs, func(x routing.EndpointSpec) bool { return x.ID() == id })
	s.fleet.Update(s.specs)
	return nil
}

// adminBench is an admin handler over a small fleet.
type adminBench struct {
	*metricsBench
	options AdminOptions
	source  *fleetSource
	logs    *observer.ObservedLogs
}

func newAdminBench(t *testing.T, replicas ...string) *adminBench {
	t.Helper()
	b := &adminBench{metricsBench: newMetricsBench(t, replicas...)}
	b.source = &fleetSource{fleet: b.fleet}
	for _, name := range replicas {
		b.source.specs = append(b.source.specs, routing.EndpointSpec{Name: name, URL: "http://" + name + ":8000"})
	}
	for _, e := range b.fleet.Endpoints() {
		e.Observe(routing.Metrics{}, b.now)
	}
	router, err := routing.New(configs.DefaultScheduling(), b.fleet, 1)
	if err != nil {
		t.Fatalf("New: got %v, want no error", err)
	}
	current := &routing.Current{}
	current.Store(router)
	core, logs := observer.New(zapcore.InfoLevel)
	level := zap.NewAtomicLevelAt(zapcore.InfoLevel)
	b.logs = logs
	b.options = AdminOptions{
		Fleet: b.fleet, Router: current, Registry: b.reg, Replicas: b.source, Version: "v1.2.3", Log: zap.New(core), Level: &level,
		Reload: func() error { return nil }, Ready: func() error { return nil },
		ExplainAPI: func(path string) (routing.API, bool) { return routing.APIChat, path == "/v1/chat/completions" },
	}
	return b
}

// do sends a request to a fresh handler, as if to 127.0.0.1.
func (b *adminBench) do(method, target, body string, change ...func(*http.Request)) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	r.Host = "127.0.0.1:9090"
	for _, c := range change {
		c(r)
	}
	w := httptest.NewRecorder()
	NewAdmin(b.options).ServeHTTP(w, r)
	return w
}

func wantAnswer(t *testing.T, w *httptest.ResponseRecorder, status int, part string) {
	t.Helper()
	if w.Code != status || !strings.Contains(w.Body.String(), part) {
		t.Errorf("answer: got %d %s, want %d with %q", w.Code, w.Body, status, part)
	}
}

func TestAdminRoutes(t *testing.T) {
	b := newAdminBench(t, "a")
	f := func(t *testing.T, method, target string, status int, allow string) {
		t.Helper()
		w := b.do(method, target, "")
		if got := w.Header().Get("Allow"); w.Code != status || got != allow {
			t.Errorf("%s %s: got %d, Allow %q, want %d, Allow %q", method, target, w.Code, got, status, allow)
		}
	}
	for _, path := range []string{"/", "/metrics", "/livez", "/readyz", "/debug/fleet", "/admin/v1/replicas", "/admin/v1/replicas/a", "/admin/v1/log-level"} {
		f(t, "GET", path, 200, "")
		f(t, "HEAD", path, 200, "")
	}
	f(t, "POST", "/", 405, "GET, HEAD")
	f(t, "POST", "/metrics", 405, "GET, HEAD")
	f(t, "DELETE", "/livez", 405, "GET, HEAD")
	f(t, "PUT", "/readyz", 405, "GET, HEAD")
	f(t, "POST", "/debug/fleet", 405, "GET, HEAD")
	f(t, "GET", "/debug/explain", 405, "POST")
	f(t, "GET", "/-/reload", 405, "POST")
	f(t, "PUT", "/admin/v1/replicas", 405, "GET, HEAD, POST")
	f(t, "POST", "/admin/v1/replicas/a", 405, "DELETE, GET, HEAD")
	f(t, "GET", "/admin/v1/replicas/a/drain", 405, "POST")
	f(t, "GET", "/admin/v1/replicas/a/undrain", 405, "POST")
	f(t, "POST", "/admin/v1/log-level", 405, "GET, HEAD, PUT")
	f(t, "GET", "/index.html", 404, "")
	f(t, "GET", "/v1/models", 404, "")
	f(t, "GET", "/debug/pprof/", 404, "")
	b.options.PProf = true
	f(t, "GET", "/debug/pprof/", 200, "")
	f(t, "GET", "/debug/pprof/cmdline", 200, "")
	f(t, "GET", "/debug/pprof/heap", 200, "")
	b.options.Level = nil
	f(t, "GET", "/admin/v1/log-level", 404, "")
}

func TestAdminMetricsAndHealth(t *testing.T) {
	b := newAdminBench(t, "a")
	wantAnswer(t, b.do("GET", "/metrics", ""), 200, `kvgate_replica_up{replica="a"} 1`)
	wantAnswer(t, b.do("GET", "/metrics", ""), 200, `version="v1.2.3"} 1`) // registered once, though there were two handlers
	wantAnswer(t, b.do("GET", "/livez", ""), 200, `{"status":"ok"}`)
	wantAnswer(t, b.do("GET", "/readyz", ""), 200, `{"status":"ok"}`)
	b.options.Ready = func() error { return errors.New("draining") }
	wantAnswer(t, b.do("GET", "/readyz", ""), 503, `{"error":{"code":503,"message":"draining"}}`)
	wantAnswer(t, b.do("GET", "/livez", ""), 200, "ok")
	b.options.Ready = nil
	wantAnswer(t, b.do("GET", "/readyz", ""), 200, "ok")
}

func TestAdminFleet(t *testing.T) {
	b := newAdminBench(t, "a", "b")
	w := b.do("GET", "/debug/fleet", "")
	if got := w.Header().Get("Content-Type"); got != "application/json" {
		t.Errorf("content type: got %s, want application/json", got)
	}
	var got routing.FleetSnapshot
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatalf("fleet: got %v, want no error", err)
	}
	if want := b.fleet.Snapshot(); !reflect.DeepEqual(got, want) {
		t.Errorf("fleet: got %+v, want %+v", got, want)
	}
	var fields map[string][]map[string]any
	_ = json.Unmarshal(w.Body.Bytes(), &fields) // time is no list: the error is of no interest
	want := []string{"age_s", "awaiting", "capacity_tokens", "in_flight", "index_blocks", "kv_usage", "labels", "models", "name", "running", "state", "url", "waiting"}
	var names []string
	for name := range fields["replicas"][0] {
		names = append(names, name)
	}
	slices.Sort(names)
	if !slices.Equal(names, want) {
		t.Errorf("fields: got %v, want %v", names, want)
	}
}

const explainBody = `{"model":"m","messages":[{"role":"user","content":"hello"}]}`

func TestAdminExplain(t *testing.T) {
	b := newAdminBench(t, "a", "b")
	w := b.do("POST", "/debug/explain?path=/v1/chat/completions", explainBody)
	if w.Code != 200 {
		t.Fatalf("explain: got %d %s, want 200", w.Code, w.Body)
	}
	var got routing.Explanation
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatalf("explain: got %v, want no error", err)
	}
	if got.Model != "m" || got.Profile != "default" || got.Total < 1 || len(got.Replicas) != 2 || len(got.Replicas[0].Scores) == 0 || got.Ties != 2 || got.Winner == "" {
		t.Errorf("explanation: got %s, want a whole one", w.Body)
	}
	for _, e := range b.fleet.Endpoints() {
		if e.InFlight() != 0 || b.fleet.IndexBlocks(e) != 0 {
			t.Errorf("%s after explaining: got %d in flight and %d blocks, want none", e.Name(), e.InFlight(), b.fleet.IndexBlocks(e))
		}
	}
	wantAnswer(t, b.do("POST", "/debug/explain", explainBody), 200, `"winner"`) // chat is the default
	wantAnswer(t, b.do("POST", "/debug/explain?path=/nowhere", explainBody), 404, `path \"/nowhere\" is not routed`)
	wantAnswer(t, b.do("POST", "/debug/explain", `{"model":`), 400, `"code":400`)
	wantAnswer(t, b.do("POST", "/debug/explain", `{"model":"x","messages":[]}`), 404, routing.ErrModelNotFound.Error())
	wantAnswer(t, b.do("POST", "/debug/explain", explainBody, func(r *http.Request) { r.Body = http.NoBody }), 400, `"code":400`)
	wantAnswer(t, b.do("POST", "/debug/explain", "", func(r *http.Request) { r.Body = readerBody{iotest.ErrReader(errors.New("gone"))} }), 400, "reading the body: gone")
	b.options.MaxBody = int64(len(explainBody))
	wantAnswer(t, b.do("POST", "/debug/explain", explainBody), 200, `"winner"`)
	wantAnswer(t, b.do("POST", "/debug/explain", explainBody+" "), 413, "the body is larger than 60 bytes")
	b.options.MaxBody = 0

	b.fleet.SetModels(b.fleet.Endpoints()[0], []string{"m", "m2"}, true)
	wantAnswer(t, b.do("POST", "/debug/explain", `{"messages":[]}`), 400, routing.ErrModelMissing.Error())
	for _, e := range b.fleet.Endpoints() {
		b.fleet.Drain(e.ID(), true)
	}
	wantAnswer(t, b.do("POST", "/debug/explain", explainBody), 200, `"winner":"","ties":0,"reason":"`+routing.ErrNoEndpoints.Error())
	b.setReplicas()
	wantAnswer(t, b.do("POST", "/debug/explain", explainBody), 503, routing.ErrNoEndpoints.Error())
}

// readerBody makes a reader a request body.
type readerBody struct {
	r interface{ Read([]byte) (int, error) }
}

func (b readerBody) Read(p []byte) (int, error) { return b.r.Read(p) }
func (b readerBody) Close() error               { return nil }

// A path whose shape no configured parser takes is not routed.
func TestAdminExplainParsers(t *testing.T) {
	b := newAdminBench(t, "a")
	cfg, err := configs.ParseScheduling("test.yaml", []byte("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nrequestHandler:\n  parsers:\n  - pluginRef: anthropic-parser\n"))
	if err != nil {
		t.Fatalf("ParseScheduling: got %v, want no error", err)
	}
	router, err := routing.New(cfg, b.fleet, 1)
	if err != nil {
		t.Fatalf("New: got %v, want no error", err)
	}
	b.options.Router.Store(router)
	wantAnswer(t, b.do("POST", "/debug/explain", explainBody), 404, "is not routed")
}

func TestAdminReload(t *testing.T) {
	b := newAdminBench(t, "a")
	wantAnswer(t, b.do("POST", "/-/reload", ""), 200, "reloaded\n")
	b.options.Reload = func() error { return errors.New("a.yaml:3: unknown field x\nb.yaml:7: bad weight") }
	w := b.do("POST", "/-/reload", "")
	wantAnswer(t, w, 500, "a.yaml:3: unknown field x\nb.yaml:7: bad weight\n")
	if got := w.Header().Get("Content-Type"); got != "text/plain; charset=utf-8" {
		t.Errorf("content type: got %s, want text", got)
	}
	b.options.Reload = nil
	wantAnswer(t, b.do("POST", "/-/reload", ""), 501, "cannot reload")
}

func TestAdminReplicas(t *testing.T) {
	b := newAdminBench(t, "a")
	add := func(t *testing.T, in string, status int, part string) {
		t.Helper()
		wantAnswer(t, b.do("POST", "/admin/v1/replicas", in), status, part)
	}
	add(t, `{"url":"http://10.0.0.7:8000/"}`, 201, `"name":"10.0.0.7:8000","url":"http://10.0.0.7:8000","state":"starting"`)
	w := b.do("POST", "/admin/v1/replicas", `{"name":"x","namespace":"prod","url":"https://x:8443","labels":{"zone":"eu"}}`)
	wantAnswer(t, w, 201, `"name":"prod/x"`)
	if got, want := w.Header().Get("Location"), "/admin/v1/replicas/prod%2Fx"; got != want {
		t.Errorf("location: got %s, want %s", got, want)
	}
	wantAnswer(t, b.do("GET", w.Header().Get("Location"), ""), 200, `"labels":{"zone":"eu"}`)
	wantAnswer(t, b.do("GET", "/admin/v1/replicas", ""), 200, `"name":"prod/x"`)

	add(t, `{"name":"a","url":"http://other:1"}`, 409, "replica a at http://a:8000 is there already")
	add(t, `{"name":"other","url":"http://a:8000"}`, 409, "replica a at http://a:8000 is there already")
	for _, url := range []string{"", "a:8000", "ftp://a:1", "http://", "http://a/v1", "http://a?x", "http://a#x", "http://me:secret@a", "http://a b"} {
		add(t, `{"url":"`+url+`"}`, 400, "must be http://host:port")
	}
	add(t, `{"url":"http://b:1","weight":1}`, 400, `unknown field \"weight\"`)
	add(t, `{"url":"http://b:1"} {}`, 400, "something follows it")
	add(t, `[]`, 400, "must be a JSON object")
	add(t, `{"name":"`+strings.Repeat("x", maxAdminBody)+`"}`, 400, "too large")
	b.source.err = errors.New("name x has a blank")
	add(t, `{"url":"http://b:1"}`, 400, "name x has a blank")
	b.source.err = nil

	f := func(t *testing.T, method, target string, status int, part string) {
		t.Helper()
		wantAnswer(t, b.do(method, target, ""), status, part)
	}
	f(t, "POST", "/admin/v1/replicas/a/drain", 200, `"state":"draining"`)
	f(t, "POST", "/admin/v1/replicas/a/undrain", 200, `"state":"ready"`)
	f(t, "POST", "/admin/v1/replicas/prod%2Fx/drain", 200, `"state":"draining"`)
	f(t, "GET", "/admin/v1/replicas/a", 200, `"state":"ready"`)
	f(t, "GET", "/admin/v1/replicas/nobody", 404, `no replica is named \"nobody\"`)
	f(t, "DELETE", "/admin/v1/replicas/nobody", 404, "no replica is named")
	f(t, "POST", "/admin/v1/replicas/nobody/drain", 404, "no replica is named")
	f(t, "POST", "/admin/v1/replicas/nobody/undrain", 404, "no replica is named")
	f(t, "DELETE", "/admin/v1/replicas/prod%2Fx", 202, `"state":"draining"`)
	f(t, "GET", "/admin/v1/replicas/prod%2Fx", 404, "no replica is named")
	b.source.err = errors.New("declared in kvgate.yaml: remove it there")
	f(t, "DELETE", "/admin/v1/replicas/a", 409, "remove it there")
	b.options.Replicas = nil
	f(t, "DELETE", "/admin/v1/replicas/a", 501, "cannot be removed")
	f(t, "POST", "/admin/v1/replicas", 501, "cannot be added")

	var said []string
	for _, entry := range b.logs.All() {
		said = append(said, entry.Message)
	}
	want := []string{"replica added by the operator", "replica added by the operator", "replica drained by the operator", "replica drained by the operator", "replica drained by the operator", "replica removed by the operator"}
	if !slices.Equal(said, want) {
		t.Errorf("log: got %q, want %q", said, want)
	}
}

// A source may take a replica without having told the fleet yet.
func TestAdminReplicaAddedLater(t *testing.T) {
	b := newAdminBench(t, "a")
	b.options.Replicas = lazySource{}
	wantAnswer(t, b.do("POST", "/admin/v1/replicas", `{"url":"http://b:1"}`), 202, `{"name":"default/b:1","url":"http://b:1"}`)
}

type lazySource struct{}

func (lazySource) Add(routing.EndpointSpec) error { return nil }
func (lazySource) Remove(string) error            { return nil }

func TestAdminLogLevel(t *testing.T) {
	b := newAdminBench(t, "a")
	wantAnswer(t, b.do("GET", "/admin/v1/log-level", ""), 200, `{"level":"info"}`)
	wantAnswer(t, b.do("PUT", "/admin/v1/log-level", `{"level":"debug"}`), 200, `{"level":"debug"}`)
	if got := b.options.Level.Level(); got != zapcore.DebugLevel {
		t.Errorf("level: got %v, want debug", got)
	}
	wantAnswer(t, b.do("PUT", "/admin/v1/log-level", `{"level":"loud"}`), 400, "loud")
	wantAnswer(t, b.do("PUT", "/admin/v1/log-level", `{"level":"`+strings.Repeat("x", maxAdminBody)+`"}`), 400, "too large")
}

func TestAdminHostCheck(t *testing.T) {
	b := newAdminBench(t, "a")
	b.options.Hosts = []string{"kvgate.internal"}
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	f := func(t *testing.T, host, target string, status int) {
		t.Helper()
		w := b.do("GET", target, "", func(r *http.Request) { r.Host = host })
		if w.Code != status {
			t.Errorf("%s at host %q: got %d %s, want %d", target, host, w.Code, w.Body, status)
		}
	}
	for _, host := range []string{"127.0.0.1", "127.0.0.1:9090", "10.1.2.3:9090", "[::1]:9090", "[::1]", "[fe80::1%25eth0]:9090", "localhost", "LOCALHOST:9090", "localhost.:9090", own + ":9090", "kvgate.internal", "KVgate.Internal:80"} {
		f(t, host, "/debug/fleet", 200)
	}
	for _, host := range []string{"", "evil.example", "evil.example:9090", "localhost.evil.example", "127.0.0.1.evil.example", "[evil]:1", "kvgate.internal.evil:9090"} {
		f(t, host, "/debug/fleet", 403)
		f(t, host, "/", 403)
		f(t, host, "/metrics", 200) // scrapers and probes use any name
		f(t, host, "/readyz", 200)
		f(t, host, "/livez", 200)
	}
	w := b.do("POST", "/-/reload", "", func(r *http.Request) { r.Host = "evil.example" })
	wantAnswer(t, w, 403, `host \"evil.example\" is not this machine's`)
	// Behind a Unix socket there is no name to rebind.
	w = b.do("GET", "/debug/fleet", "", func(r *http.Request) {
		r.Host = "kvgate"
		*r = *r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(&net.UnixAddr{Name: "/run/kvgate", Net: "unix"}))) //nolint:forbidigo // as net/http does
	})
	wantAnswer(t, w, 200, `"replicas"`)
}

func TestAdminCrossOrigin(t *testing.T) {
	b := newAdminBench(t, "a")
	from := func(key, value string) func(*http.Request) { return func(r *http.Request) { r.Header.Set(key, value) } }
	wantAnswer(t, b.do("POST", "/-/reload", "", from("Sec-Fetch-Site", "cross-site")), 403, "cross-origin")
	wantAnswer(t, b.do("POST", "/admin/v1/replicas/a/drain", "", from("Origin", "https://evil.example")), 403, "cross-origin")
	wantAnswer(t, b.do("POST", "/-/reload", "", from("Sec-Fetch-Site", "same-origin")), 200, "reloaded")
	wantAnswer(t, b.do("GET", "/debug/fleet", "", from("Sec-Fetch-Site", "cross-site")), 200, "replicas")
}

func TestAdminStatusPage(t *testing.T) {
	b := newAdminBench(t, "a")
	b.setReplicas("a", `<script>alert(1)</script>`)
	usage := 0.5
	m := routing.NoMetrics()
	m.Waiting, m.KVUsage = 7, usage
	b.fleet.Endpoints()[1].Observe(m, b.now)
	b.options.Ready = func() error { return errors.New("no replica <is> ready") }
	w := b.do("GET", "/", "")
	page := w.Body.String()
	if got := w.Header().Get("Content-Type"); w.Code != 200 || got != "text/html; charset=utf-8" {
		t.Fatalf("page: got %d %s, want 200 text/html", w.Code, got)
	}
	// The first paint needs no script.
	for _, want := range []string{">v1.2.3<", "no replica &lt;is&gt; ready", `<td>7</td>`, `<rect class="fill" width="30" height="8"`, "</svg> 50 %<", `<td class="starting">starting</td>`, "<td>m</td>", "<td>unknown</td>", `id="ready">1 / 2<`, "&lt;script&gt;alert(1)"} {
		if !strings.Contains(page, want) {
			t.Errorf("page: got no %q, want it in\n%s", want, page)
		}
	}
	if strings.Contains(page, "<script>alert") {
		t.Error("page: got the replica's name as markup, want it escaped")
	}
	// Nothing comes from elsewhere: no URL but the replicas' own in a title.
	bare := regexp.MustCompile(`<tr title="[^"]*">`).ReplaceAllString(page, "")
	for _, m := range regexp.MustCompile(`(?i)(https?:)?//[a-z0-9.-]+\.[a-z]+|@import|url\(|src=`).FindAllString(bare, -1) {
		t.Errorf("page: got %q, want nothing from outside", m)
	}
	for _, m := range regexp.MustCompile(`href="([^"]*)"`).FindAllStringSubmatch(bare, -1) {
		if !slices.Contains([]string{"data:,", "debug/fleet", "metrics"}, m[1]) {
			t.Errorf("link: got %q, want one of the listener's own", m[1])
		}
	}
	policy := w.Header().Get("Content-Security-Policy")
	nonces := regexp.MustCompile(`nonce="([^"]+)"`).FindAllStringSubmatch(page, -1)
	if len(nonces) != 2 || nonces[0][1] != nonces[1][1] || !strings.Contains(policy, "script-src 'nonce-"+nonces[0][1]+"'") || !strings.HasPrefix(policy, "default-src 'none';") {
		t.Errorf("policy: got %q for %v, want one nonce for style and script and nothing else", policy, nonces)
	}
	if again := b.do("GET", "/", "").Header().Get("Content-Security-Policy"); again == policy {
		t.Errorf("nonce: got %q twice, want a fresh one", policy)
	}
	// Every element that the script writes to is there.
	for _, m := range regexp.MustCompile(`\$\("([a-z]+)"\)`).FindAllStringSubmatch(page, -1) {
		if !strings.Contains(page, `id="`+m[1]+`"`) {
			t.Errorf("script: got $(%q), want an element with that id", m[1])
		}
	}
}

func TestAdminStatusPageEmpty(t *testing.T) {
	b := newAdminBench(t)
	b.options.Ready = nil
	wantAnswer(t, b.do("GET", "/", ""), 200, "No replica is known.")
}

// The metric names that the page's script reads exist.
func TestAdminStatusPageMetrics(t *testing.T) {
	names := metricNames(t)
	for _, m := range regexp.MustCompile(`kvgate_[a-z_]+`).FindAllString(statusHTML, -1) {
		if !slices.Contains(names, m) {
			t.Errorf("status page: got %s, want a metric that exists", m)
		}
	}
}

// fullScrape returns the text of /metrics when everything has happened once.
func fullScrape(t *testing.T) string {
	t.Helper()
	b := newAdminBench(t, "a")
	e := b.fleet.Endpoints()[0]
	e.Observe(routing.Metrics{CapacityTokens: 1}, b.now)
	b.observe(fullRecord(e))
	b.ConfigReload(true, "x", b.now)
	learnSomething(t, b.fleet)
	w := b.do("GET", "/metrics", "")
	if w.Code != 200 {
		t.Fatalf("/metrics: got %d %s, want 200", w.Code, w.Body)
	}
	return w.Body.String()
}

// metricNames returns the names of all series in a scrape.
func metricNames(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, m := range regexp.MustCompile(`(?m)^(kvgate_\w+)[ {]`).FindAllStringSubmatch(fullScrape(t), -1) {
		names = append(names, m[1])
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func TestAdminReplyIsOneLine(t *testing.T) {
	w := httptest.NewRecorder()
	fail(w, 400, errors.New("a\nb"))
	if want := []byte(`{"error":{"code":400,"message":"a\nb"}}` + "\n"); !bytes.Equal(w.Body.Bytes(), want) {
		t.Errorf("got %q, want %q", w.Body, want)
	}
}
