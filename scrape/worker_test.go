package scrape

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kvgate/configs"
	"kvgate/routing"
)

// rig is a manager under test.
type rig struct {
	*Manager
	fleet    *routing.Fleet
	logs     *observer.ObservedLogs
	settings configs.Settings
}

// rigOptions are what tests differ in.
type rigOptions struct {
	set        func(s *configs.Settings)
	scheduling string   // the part below plugins: of an EndpointPickerConfig, "" for the default
	dial       dialFunc // nil: the network
	replicas   []string // [NAME=]URL
}

func planFor(t testing.TB, yaml string, s configs.Scrape) (*Plan, error) {
	t.Helper()
	cfg := configs.DefaultScheduling()
	if yaml != "" {
		var err error
		cfg, err = configs.ParseScheduling("epp.yaml", []byte("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"+yaml))
		if err != nil {
			t.Fatal(err)
		}
	}
	return NewPlan(cfg, s)
}

func mustPlan(t testing.TB, yaml string, s configs.Scrape) *Plan {
	t.Helper()
	p, err := planFor(t, yaml, s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// newRig makes a manager with fast rhythms; Start is left to the test, Close is not.
func newRig(t testing.TB, o rigOptions) *rig {
	t.Helper()
	r := &rig{settings: configs.DefaultSettings()}
	r.settings.Scrape.Interval = 10 * time.Millisecond
	r.settings.Scrape.ModelsInterval = 10 * time.Millisecond
	for _, text := range o.replicas {
		var replica configs.Replica
		if err := replica.UnmarshalText([]byte(text)); err != nil {
			t.Fatal(err)
		}
		r.settings.Replicas = append(r.settings.Replicas, replica)
	}
	if o.set != nil {
		o.set(&r.settings)
	}
	core, logs := observer.New(zapcore.DebugLevel)
	r.logs = logs
	r.fleet = routing.NewFleet(time.Now, r.settings.Scrape.Staleness, zap.NewNop())
	var err error
	r.Manager, err = NewManager(Options{Fleet: r.fleet, Settings: &r.settings, Plan: mustPlan(t, o.scheduling, r.settings.Scrape), Log: zap.New(core), Version: "1.2.3"})
	if err != nil {
		t.Fatal(err)
	}
	if o.dial != nil {
		r.Manager.dial = o.dial
	}
	t.Cleanup(r.Close)
	return r
}

// begin starts the manager and waits for the first scrapes.
func (r *rig) begin(t testing.TB) {
	t.Helper()
	r.Start(context.Background())
	if err := r.WaitFirst(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) endpoint(t testing.TB, name string) *routing.Endpoint {
	t.Helper()
	e := r.fleet.Find(name)
	if e == nil {
		t.Fatalf("no endpoint %s in %v", name, r.names())
	}
	return e
}

func (r *rig) names() []string {
	names := []string{}
	for _, e := range r.fleet.Endpoints() {
		names = append(names, e.DisplayName())
	}
	return names
}

// worker returns the worker of an endpoint.
func (r *rig) worker(t testing.TB, name string) *worker {
	t.Helper()
	for _, w := range r.snapshot() {
		if w.endpoint.DisplayName() == name {
			return w
		}
	}
	t.Fatalf("no worker for %s", name)
	return nil
}

// said counts the log entries with this message.
func (r *rig) said(message string) int { return r.logs.FilterMessage(message).Len() }

func load(waiting, running int, usage float64) answer {
	return body(fmt.Sprintf("vllm:num_requests_waiting %d\nvllm:num_requests_running %d\nvllm:kv_cache_usage_perc %g\n"+
		"vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\"} 1\n", waiting, running, usage))
}

func models(names ...string) answer {
	var cards []string
	for _, n := range names {
		cards = append(cards, fmt.Sprintf(`{"id":%q,"object":"model","created":1700000000,"owned_by":"vllm","root":"/data/%s","parent":null,"max_model_len":4096}`, n, n))
	}
	return body(`{"object":"list","data":[` + strings.Join(cards, ",") + `]}`)
}

func TestWorkerObserves(t *testing.T) {
	s := newStub(t)
	s.on("/metrics", load(3, 2, 0.5))
	s.on("/v1/models", models("m", "adapter"))
	before := time.Now()
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}})
	r.begin(t)
	e := r.endpoint(t, "a")
	o := e.Observation()
	if o == nil {
		t.Fatal("got no observation")
	}
	if o.Waiting != 3 || o.Running != 2 || o.KVUsage != 0.5 || o.BlockTokens != 16 || o.CapacityTokens != 1600 {
		t.Errorf("got %+v, want 3 waiting, 2 running, 0.5 used, blocks of 16, 1600 tokens", o.Metrics)
	}
	if o.At.Before(before) || o.At.After(s.times("/metrics")[0]) {
		t.Errorf("got an observation of %v, want one before the request came at %v", o.At, s.times("/metrics")[0])
	}
	if got := r.fleet.State(e); got != routing.Ready {
		t.Errorf("got state %s, want ready", got)
	}
	if names, known := e.Models(); !known || fmt.Sprint(names) != "[adapter m]" {
		t.Errorf("got models %v, known %v, want [adapter m], true", names, known)
	}
	want := []ModelCard{{ID: "adapter", Created: 1700000000, OwnedBy: "vllm", MaxModelLen: 4096}, {ID: "m", Created: 1700000000, OwnedBy: "vllm", MaxModelLen: 4096}}
	if got := r.ModelCards(); !slices.Equal(got, want) {
		t.Errorf("got cards %+v, want %+v", got, want)
	}
	s.on("/metrics", load(7, 2, 0.5))
	eventually(t, "the new value", func() bool { return e.Observation().Waiting == 7 })
	if got := s.accepts(); got != 1 {
		t.Errorf("got %d connections, want 1 for all probes", got)
	}
	if got := s.count("/health"); got != 0 {
		t.Errorf("got %d health probes, want 0: scrapes tell enough", got)
	}
	for _, head := range s.allHeads() {
		if !strings.Contains(head, "User-Agent: kvgate/1.2.3\n") {
			t.Errorf("got request %q, want the version in its User-Agent", head)
		}
	}
	r.fleet.Drain("a", true)
	if got := r.ModelCards(); len(got) != 0 {
		t.Errorf("draining: got cards %v, want none", got)
	}
}

// The model list is known before the endpoint takes work.
func TestWorkerReadsModelsFirst(t *testing.T) {
	s := newStub(t)
	var r *rig
	s.on("/v1/models", func(c net.Conn) bool {
		if e := r.fleet.Find("a"); r.fleet.State(e) != routing.Starting {
			t.Errorf("got state %s, want starting", r.fleet.State(e))
		}
		return models("m")(c)
	})
	s.on("/metrics", load(0, 0, 0))
	r = newRig(t, rigOptions{replicas: []string{"a=" + s.url()}, set: func(s *configs.Settings) { s.Scrape.ModelsInterval = time.Hour }})
	r.begin(t)
	if names, known := r.endpoint(t, "a").Models(); !known {
		t.Errorf("got models %v, known %v, want a known list", names, known)
	}
}

// A replica whose metrics hang gets stale, not down: it may still serve.
func TestWorkerHungMetrics(t *testing.T) {
	hung, fresh := newStub(t), newStub(t)
	for _, s := range []*stub{hung, fresh} {
		s.on("/v1/models", models("m"))
	}
	hung.on("/metrics", load(0, 0, 0))
	fresh.on("/metrics", load(5, 0, 0))
	r := newRig(t, rigOptions{replicas: []string{"hung=" + hung.url(), "fresh=" + fresh.url()}, set: func(s *configs.Settings) {
		s.Scrape.Timeout = 20 * time.Millisecond
		s.Scrape.Staleness = 300 * time.Millisecond
	}})
	r.begin(t)
	hung.on("/metrics", hang)
	e := r.endpoint(t, "hung")
	w := r.worker(t, "hung")
	eventually(t, "timeouts and age", func() bool {
		return w.results[resultTimeout].Load() >= 2 && time.Since(e.Observation().At) > 300*time.Millisecond
	})
	if got := r.fleet.State(e); got != routing.Ready {
		t.Errorf("got state %s, want ready", got)
	}
	if stale, other := e.Observation().At, r.endpoint(t, "fresh").Observation().At; !other.After(stale) {
		t.Errorf("got observations of %v (hung) and %v (fresh), want the second to be newer", stale, other)
	}
	if got := r.said("cannot read the metrics of the replica"); got != 1 {
		t.Errorf("got %d warnings, want 1", got)
	}
	hung.on("/metrics", load(1, 0, 0))
	eventually(t, "a fresh observation", func() bool { return e.Observation().Waiting == 1 })
	eventually(t, "word of it", func() bool { return r.said("metrics are back") == 1 })
}

func TestWorkerHungFromTheStart(t *testing.T) {
	s := newStub(t)
	s.on("/metrics", hang)
	s.on("/v1/models", hang)
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}, set: func(s *configs.Settings) { s.Scrape.Timeout = 20 * time.Millisecond }})
	r.begin(t)
	e := r.endpoint(t, "a")
	if got := r.fleet.State(e); got != routing.Ready || e.Observation() != nil {
		t.Errorf("got state %s, observation %v, want ready without one", got, e.Observation())
	}
	if names, known := e.Models(); known {
		t.Errorf("got models %v, want an unknown list", names)
	}
}

// Metric names and shapes: see TestReadPage for all of them; here through a socket, with what is counted and said.
func TestWorkerShapes(t *testing.T) {
	rest := "vllm:num_requests_running 1\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\"} 1\n"
	f := func(t *testing.T, page, list string, check func(m routing.Metrics) bool, missing ...string) {
		t.Helper()
		s := newStub(t)
		s.on("/v1/models", models(list))
		s.on("/metrics", body(page))
		r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}})
		r.begin(t)
		w := r.worker(t, "a")
		eventually(t, "three scrapes", func() bool { return w.results[resultOK].Load() >= 3 })
		if m := r.endpoint(t, "a").Observation().Metrics; !check(m) {
			t.Errorf("page\n%s\ngot %+v", page, m)
		}
		for v := range valueCount {
			want := slices.Contains(missing, valueNames[v])
			if got := w.missing[v].Load(); (got >= 3) != want {
				t.Errorf("field %s: counted %d times in at least 3 scrapes, want counted: %v", valueNames[v], got, want)
			}
			said := 0
			for _, entry := range r.logs.FilterMessage("the metrics page has no usable value").All() {
				if entry.ContextMap()["field"] == valueNames[v] {
					said++
				}
			}
			if want && said != 1 || !want && said != 0 {
				t.Errorf("field %s: warned %d times, want once if it is missing (%v)", valueNames[v], said, want)
			}
		}
	}
	waiting := "vllm:num_requests_waiting 0\n"
	f(t, waiting+"vllm:gpu_cache_usage_perc 0.4\n"+rest, "m", func(m routing.Metrics) bool { return m.KVUsage == 0.4 })
	f(t, waiting+"vllm:kv_cache_usage_perc 0.4\n"+rest, "m", func(m routing.Metrics) bool { return m.KVUsage == 0.4 })
	f(t, waiting+"vllm:kv_cache_usage_perc 0.4\nvllm:gpu_cache_usage_perc 0.4\n"+rest, "m", func(m routing.Metrics) bool { return m.KVUsage == 0.4 })
	f(t, waiting+"vllm:kv_cache_usage_perc NaN\n"+rest, "m", func(m routing.Metrics) bool { return m.KVUsage != m.KVUsage }, "kv_usage")
	f(t, rest, "m", func(m routing.Metrics) bool {
		return m.KVUsage != m.KVUsage && m.Waiting != m.Waiting && m.Running == 1
	}, "kv_usage", "waiting")
	f(t, "vllm:num_requests_waiting{engine=\"0\"} 0\nvllm:num_requests_waiting{engine=\"1\"} 9\nvllm:kv_cache_usage_perc 0\n"+rest, "m", func(m routing.Metrics) bool { return m.Waiting == 9 })
	f(t, "vllm:num_requests_waiting{model_name=\"x\"} 50\nvllm:num_requests_waiting{model_name=\"m\"} 2\nvllm:kv_cache_usage_perc 0\n"+rest, "m", func(m routing.Metrics) bool { return m.Waiting == 2 })
}

func TestWorkerFailures(t *testing.T) {
	f := func(t *testing.T, a answer, want result, state routing.State) {
		t.Helper()
		s := newStub(t)
		s.on("/v1/models", models("m"))
		s.on("/metrics", a)
		r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}, set: func(s *configs.Settings) { s.Scrape.Timeout = 100 * time.Millisecond }})
		r.begin(t)
		w := r.worker(t, "a")
		eventually(t, "the second failure", func() bool { return w.results[want].Load() >= 2 })
		if e := r.endpoint(t, "a"); r.fleet.State(e) != state || e.Observation() != nil {
			t.Errorf("%s: got state %s, observation %v, want %s without one", resultNames[want], r.fleet.State(e), e.Observation(), state)
		}
		if got := r.said("cannot read the metrics of the replica"); got != 1 {
			t.Errorf("%s: got %d warnings, want 1", resultNames[want], got)
		}
	}
	f(t, hang, resultTimeout, routing.Ready)
	f(t, status(500), resultStatus, routing.Ready)
	f(t, raw("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nvllm:num_requests_waiting 1\n"), resultBroken, routing.Ready)
	f(t, kept(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", maxPage+1)), resultTooLarge, routing.Ready)
	f(t, body("<html>hello</html>\n"), resultEmpty, routing.Ready)
	f(t, body(""), resultEmpty, routing.Ready)
}

func TestWorkerUnreachable(t *testing.T) {
	s := newStub(t)
	s.on("/v1/models", models("m"))
	s.on("/metrics", load(1, 1, 0.1))
	s.close()
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}, set: func(s *configs.Settings) { s.Scrape.ModelsInterval = time.Hour }})
	r.begin(t)
	e := r.endpoint(t, "a")
	if got := r.fleet.State(e); got != routing.Down {
		t.Errorf("got state %s, want down", got)
	}
	s.reopen()
	eventually(t, "ready", func() bool { return r.fleet.State(e) == routing.Ready && e.Observation() != nil })
	eventually(t, "the model list, long before it is due", func() bool { _, known := e.Models(); return known })

	s.close()
	eventually(t, "down", func() bool { return r.fleet.State(e) == routing.Down })
	if names, known := e.Models(); !known || fmt.Sprint(names) != "[m]" {
		t.Errorf("down: got models %v, known %v, want the last list", names, known)
	}
	s.on("/v1/models", models("n"))
	s.reopen()
	eventually(t, "the list of what is there now", func() bool { names, _ := e.Models(); return fmt.Sprint(names) == "[n]" })
}

// A replica without a metrics page serves; GET /health tells whether it is there.
func TestWorkerWithoutMetrics(t *testing.T) {
	s := newStub(t)
	s.on("/v1/models", models("m"))
	s.on("/health", body(""))
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}})
	r.begin(t)
	e := r.endpoint(t, "a")
	if got := r.fleet.State(e); got != routing.Ready || e.Observation() != nil {
		t.Errorf("got state %s, observation %v, want ready without one", got, e.Observation())
	}
	eventually(t, "a health probe", func() bool { return s.count("/health") > 0 })
	s.on("/health", status(503))
	eventually(t, "down", func() bool { return r.fleet.State(e) == routing.Down })
	s.on("/health", status(404)) // no such page, but somebody is there
	eventually(t, "ready", func() bool { return r.fleet.State(e) == routing.Ready })
	s.close()
	eventually(t, "down", func() bool { return r.fleet.State(e) == routing.Down })
	s.reopen()
	eventually(t, "ready", func() bool { return r.fleet.State(e) == routing.Ready })
	if got := r.worker(t, "a").results[resultNoMetrics].Load(); got != 1 {
		t.Errorf("got %d scrapes, want 1: the next is seconds away", got)
	}
	if got := r.said("the replica has no metrics page: it is judged by what kvgate itself has in flight"); got != 1 {
		t.Errorf("got %d messages, want 1", got)
	}
}

func TestWorkerModels(t *testing.T) {
	s := newStub(t)
	s.on("/metrics", load(0, 0, 0))
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}, set: func(s *configs.Settings) { s.Scrape.Timeout = 500 * time.Millisecond }})
	r.begin(t)
	e := r.endpoint(t, "a")
	f := func(t *testing.T, what string, a answer) {
		t.Helper()
		s.on("/v1/models", models("m"))
		eventually(t, "a known list before "+what, func() bool { names, known := e.Models(); return known && len(names) == 1 })
		var seen atomic.Int32
		s.on("/v1/models", func(c net.Conn) bool {
			if n := seen.Add(1); n <= maxModelMisses {
				if names, known := e.Models(); !known || len(names) != 1 {
					t.Errorf("%s: got %v, %v before miss %d, want the last list", what, names, known, n)
				}
			}
			return a(c)
		})
		eventually(t, "an unknown list after "+what, func() bool { _, known := e.Models(); return !known })
		if got := r.ModelCards(); len(got) != 0 {
			t.Errorf("%s: got cards %v, want none", what, got)
		}
	}
	f(t, "401", status(401))
	f(t, "404", status(404))
	f(t, "500", status(500))
	f(t, "no answer", hang)
	f(t, "no JSON", body("<html>"))
	f(t, "another JSON", body(`{"data":"x"}`))
	f(t, "an empty list", models())
	f(t, "a cut answer", raw("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}"))
	if got := r.fleet.State(e); got != routing.Ready {
		t.Errorf("got state %s, want ready: it serves all the same", got)
	}
}

func TestParseModels(t *testing.T) {
	f := func(t *testing.T, text string, want ...ModelCard) {
		t.Helper()
		got, err := parseModels([]byte(text))
		if (err == nil) != (len(want) > 0) || err == nil && !slices.Equal(got, want) {
			t.Errorf("%s: got %+v, %v, want %+v", text, got, err, want)
		}
	}
	f(t, `{"object":"list","data":[{"id":"b","created":5,"owned_by":"vllm","root":"/secret","parent":"a","max_model_len":10,"permission":[]},{"id":"a"}]}`,
		ModelCard{ID: "a"}, ModelCard{ID: "b", Created: 5, OwnedBy: "vllm", Parent: "a", MaxModelLen: 10})
	f(t, `{"data":[{"id":"a","created":"x","owned_by":1,"parent":{},"max_model_len":-1},{"id":7},{}]}`, ModelCard{ID: "a"})
	f(t, `{"data":[{"id":"a","max_model_len":9,"created":7},{"id":"a","max_model_len":8,"owned_by":"x","created":6},{"id":"a","max_model_len":null}]}`,
		ModelCard{ID: "a", MaxModelLen: 8, OwnedBy: "x", Created: 6})
	f(t, `{"data":[]}`)
	f(t, `{"data":[{"id":""}]}`)
	f(t, `{"data":{}}`)
	f(t, `[]`)
	f(t, `{`)
	f(t, ``)
	f(t, `{"data":[{"id":"a"}]} trailing`)
}

// What two replicas say of one model is merged.
func TestModelCardsMerge(t *testing.T) {
	a, b := newStub(t), newStub(t)
	a.on("/metrics", load(0, 0, 0))
	b.on("/metrics", load(0, 0, 0))
	a.on("/v1/models", body(`{"data":[{"id":"m","max_model_len":4096,"created":9},{"id":"only-a"}]}`))
	b.on("/v1/models", body(`{"data":[{"id":"m","max_model_len":2048,"created":8,"owned_by":"vllm"},{"id":"lora","parent":"m"}]}`))
	r := newRig(t, rigOptions{replicas: []string{"a=" + a.url(), "b=" + b.url()}})
	r.begin(t)
	want := []ModelCard{{ID: "lora", Parent: "m"}, {ID: "m", Created: 8, OwnedBy: "vllm", MaxModelLen: 2048}, {ID: "only-a"}}
	if got := r.ModelCards(); !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestWorkerEngines(t *testing.T) {
	const sglang = "sglang:num_queue_reqs 4\nsglang:num_running_reqs 5\nsglang:token_usage 0.5\nsglang:cache_config_info{page_size=\"64\",num_pages=\"10\"} 1\n"
	f := func(t *testing.T, labels map[string]string, scheduling, page string, waiting float64, says ...string) {
		t.Helper()
		s := newStub(t)
		s.on("/metrics", body(page))
		r := newRig(t, rigOptions{scheduling: scheduling, set: func(c *configs.Settings) {
			c.Replicas = []configs.Replica{{Name: "a", URL: s.url(), Labels: labels}}
		}})
		r.begin(t)
		if o := r.endpoint(t, "a").Observation(); (o == nil) != (waiting < 0) || o != nil && o.Waiting != waiting {
			t.Errorf("labels %v: got %+v, want %v waiting", labels, o, waiting)
		}
		for _, message := range says {
			if got := r.said(message); got != 1 {
				t.Errorf("labels %v: said %q %d times, want once", labels, message, got)
			}
		}
	}
	label := func(value string) map[string]string { return map[string]string{"llm-d.ai/engine-type": value} }
	f(t, label("sglang"), "", sglang, 4)
	f(t, map[string]string{"inference.networking.k8s.io/engine-type": "sglang"}, "", sglang, 4)
	f(t, map[string]string{"llm-d.ai/engine-type": "sglang", "inference.networking.k8s.io/engine-type": "vllm"}, "", sglang, 4)
	f(t, nil, "", sglang, 4, "engine found by its metrics")
	f(t, label("vllm"), "", sglang, -1)
	f(t, label("unheard-of"), "", sglang, -1, "no engine has this name: the default engine's metrics are read")
	own := `
plugins:
- type: core-metrics-extractor
  parameters:
    engineLabelKey: my/engine
    defaultEngine: mine
    engineConfigs:
    - name: mine
      queuedRequestsSpec: "queue{kind=wait}"
`
	f(t, nil, own, "queue{kind=\"run\"} 9\nqueue{kind=\"wait\"} 2\n", 2)
	f(t, map[string]string{"my/engine": "sglang"}, own, sglang, 4)
	f(t, nil, own, sglang, 4)
}

// Removal ends a probe that hangs, at once and for good.
func TestWorkerRemovedWhileScraping(t *testing.T) {
	s := newStub(t)
	s.on("/metrics", hang)
	r := newRig(t, rigOptions{set: func(s *configs.Settings) { s.Scrape.Timeout = time.Hour }})
	r.Start(context.Background())
	for i := range 10 {
		if err := r.Add(routing.EndpointSpec{Name: "a", URL: s.url()}); err != nil {
			t.Fatal(err)
		}
		w := r.worker(t, "a")
		eventually(t, "a request", func() bool { return s.count("/metrics") > i })
		if err := r.Remove("a"); err != nil {
			t.Fatal(err)
		}
		select {
		case <-w.done:
		default:
			t.Fatal("the worker still runs after Remove")
		}
		if w.endpoint.Observation() != nil {
			t.Error("got an observation, want none")
		}
	}
}

// selfSigned writes a certificate for 127.0.0.1 and its key, and returns both files.
func selfSigned(t *testing.T) (pair tls.Certificate, certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	write(t, certFile, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	write(t, keyFile, string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})))
	pair, err = tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	return pair, certFile, keyFile
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// newTLSStub returns a stub that speaks TLS, and asks for a client certificate if roots are given.
func newTLSStub(t *testing.T, pair tls.Certificate, clients *x509.CertPool) *stub {
	s := newPipeStub(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{pair}}
	if clients != nil {
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, clients
	}
	s.listener, s.address = tls.NewListener(l, config), l.Addr().String()
	s.wait.Add(1)
	go s.accept(s.listener)
	t.Cleanup(s.close)
	s.on("/metrics", load(1, 0, 0))
	s.on("/v1/models", models("m"))
	return s
}

func TestWorkerTLS(t *testing.T) {
	pair, certFile, keyFile := selfSigned(t)
	f := func(t *testing.T, s *stub, caFile, params string, state routing.State, observed bool) {
		t.Helper()
		scheduling := ""
		if params != "" {
			scheduling = "plugins:\n- type: metrics-data-source\n  parameters: {" + params + "}\n"
		}
		r := newRig(t, rigOptions{replicas: []string{"a=https://" + s.address}, scheduling: scheduling, set: func(s *configs.Settings) { s.Upstream.CAFile = caFile }})
		r.begin(t)
		e := r.endpoint(t, "a")
		eventually(t, "the state", func() bool { return r.fleet.State(e) == state })
		if got := e.Observation() != nil; got != observed {
			t.Errorf("CA %q, parameters %q: observed %v, want %v", caFile, params, got, observed)
		}
	}
	f(t, newTLSStub(t, pair, nil), certFile, "", routing.Ready, true)
	f(t, newTLSStub(t, pair, nil), "", "", routing.Down, false)
	f(t, newTLSStub(t, pair, nil), certFile, "caCertPath: "+certFile, routing.Ready, true)
	// The metrics may be read from a replica whose certificate traffic does not trust.
	f(t, newTLSStub(t, pair, nil), "", "insecureSkipVerify: true", routing.Down, true)
	roots, err := configs.ReadCAs(certFile)
	if err != nil {
		t.Fatal(err)
	}
	f(t, newTLSStub(t, pair, roots), certFile, "clientCertPath: "+certFile+", clientKeyPath: "+keyFile, routing.Ready, true)
}

// A replica with a key, a CA, a name and a certificate of its own sees them in
// every probe; the others see those of all. A reload, and a change of the file of
// endpoints, take other ones.
func TestWorkerCredentials(t *testing.T) {
	pair, certFile, keyFile := selfSigned(t)
	roots, err := configs.ReadCAs(certFile)
	if err != nil {
		t.Fatal(err)
	}
	common, own := filepath.Join(t.TempDir(), "common"), filepath.Join(t.TempDir(), "own")
	write(t, common, "k-common")
	write(t, own, "k-own")
	plain, secure, listed := newStub(t), newTLSStub(t, pair, roots), newTLSStub(t, pair, roots)
	plain.on("/v1/models", models("m"))
	host, port, _ := net.SplitHostPort(listed.address)
	endpoints := filepath.Join(t.TempDir(), "endpoints.yaml")
	list := func(key string) string {
		return fmt.Sprintf("endpoints:\n- name: c\n  address: %s\n  port: %q\n  labels: {kvgate.io/scheme: https, kvgate.io/api-key-file: %s, kvgate.io/ca-file: %s, kvgate.io/client-cert-file: %s, kvgate.io/client-key-file: %s}\n",
			host, port, key, certFile, certFile, keyFile)
	}
	write(t, endpoints, list(own))
	r := newRig(t, rigOptions{set: func(s *configs.Settings) {
		s.Upstream.APIKeyFile, s.Endpoints = common, endpoints
		s.Replicas = []configs.Replica{
			{Name: "a", URL: plain.url()},
			{Name: "b", URL: "https://" + secure.address, APIKeyFile: own, CAFile: certFile, ClientCertFile: certFile, ClientKeyFile: keyFile},
		}
	}})
	r.poll = 5 * time.Millisecond
	r.SetKVEvents([]routing.KVEventSource{{Producer: "precise", Config: kvConfig(), Sink: newKVSink()}})
	r.begin(t)
	seen := func(s *stub, key string) {
		t.Helper()
		from := len(s.allHeads())
		eventually(t, "probes with "+key, func() bool {
			heads := s.allHeads()[from:]
			return len(heads) > 0 && strings.Contains(heads[len(heads)-1], "Authorization: Bearer "+key+"\n")
		})
	}
	for _, c := range []struct {
		s   *stub
		key string
	}{{plain, "k-common"}, {secure, "k-own"}, {listed, "k-own"}} {
		eventually(t, "every page of "+c.key, func() bool {
			return c.s.count("/v1/models") > 0 && c.s.count("/metrics") > 0 && c.s.count("/kv_event_sources") > 0 && (c.s != plain || c.s.count("/health") > 0)
		})
		for _, head := range c.s.allHeads() {
			if !strings.Contains(head, "Authorization: Bearer "+c.key+"\n") {
				t.Errorf("got request %q, want the key %s in it", head, c.key)
			}
		}
	}
	for _, name := range []string{"b", "c"} {
		if got := r.fleet.State(r.endpoint(t, name)); got != routing.Ready {
			t.Errorf("%s: got %s, want ready", name, got)
		}
	}
	b := r.endpoint(t, "b")
	if got := b.Credentials(); got == nil || got.Authorization != "Bearer k-own" || r.endpoint(t, "a").Credentials() != nil {
		t.Errorf("credentials: got %+v and %+v, want those of b alone", got, r.endpoint(t, "a").Credentials())
	}

	// The file of the key has changed: a reload reads it, and keeps the replica.
	write(t, own, "k-new")
	if err := r.Reload(&r.settings, mustPlan(t, "", r.settings.Scrape)); err != nil {
		t.Fatal(err)
	}
	seen(secure, "k-new")
	seen(listed, "k-new")
	seen(plain, "k-common")
	if r.endpoint(t, "b") != b {
		t.Error("behind the reload: got another endpoint, want the same one")
	}
	// The watched file names another key, then none: that of all holds.
	write(t, endpoints, list(common))
	seen(listed, "k-common")

	// What cannot be read leaves everything as it was, and says where.
	refused := func(change func(s *configs.Settings), parts ...string) {
		t.Helper()
		bad := r.settings
		bad.Replicas = slices.Clone(bad.Replicas)
		change(&bad)
		err := r.Reload(&bad, mustPlan(t, "", bad.Scrape))
		for _, part := range parts {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("got %v, want %q in it", err, part)
			}
		}
		if got := b.Credentials(); got == nil || got.Authorization != "Bearer k-new" {
			t.Errorf("behind a refused reload: got %+v, want k-new", got)
		}
	}
	refused(func(s *configs.Settings) {
		s.Replicas[1].APIKeyFile, s.Replicas[1].Source = "/nonexistent", "kvgate.yaml:12"
	},
		"kvgate.yaml:12: api_key_file: ", "/nonexistent", "name a file that holds the key and nothing else")
	refused(func(s *configs.Settings) { s.Replicas[1].CAFile = own }, "replicas[1]: ca_file: ", "holds no PEM certificate", "name a PEM file of CA certificates")
	refused(func(s *configs.Settings) { s.Replicas[1].ClientKeyFile = own }, "replicas[1]: client_cert_file: ", "name PEM files of a certificate and of its key")
	refused(func(s *configs.Settings) { s.Replicas[1].ServerName = "a b" }, "replicas[1]: server_name: ")
	write(t, endpoints, list("/nonexistent"))
	refused(func(*configs.Settings) {}, "endpoints.yaml:2:3: endpoints[0].api_key_file: ", "/nonexistent")
	eventually(t, "the file is complained of", func() bool { return r.logs.FilterMessage("the endpoints stay as they were").Len() > 0 })
	seen(listed, "k-common")

	// The admin surface cannot have files of this machine sent anywhere.
	err = r.Add(routing.EndpointSpec{Name: "x", URL: "http://127.0.0.1:9", Labels: map[string]string{"kvgate.io/api-key-file": "/etc/shadow"}})
	if err == nil || !strings.Contains(err.Error(), "kvgate.io/api-key-file names a file of this machine") {
		t.Errorf("Add: got %v, want a refusal", err)
	}
}

// The name that a replica is asked for, and must have, is its own.
func TestWorkerServerName(t *testing.T) {
	pair, certFile, _ := selfSigned(t)
	f := func(all, own string, state routing.State) {
		t.Helper()
		r := newRig(t, rigOptions{set: func(s *configs.Settings) {
			s.Upstream.CAFile, s.Upstream.ServerName = certFile, all
			s.Replicas = []configs.Replica{{Name: "a", URL: "https://" + newTLSStub(t, pair, nil).address, ServerName: own}}
		}})
		r.begin(t)
		eventually(t, fmt.Sprintf("%q, %q: %s", all, own, state), func() bool { return r.fleet.State(r.endpoint(t, "a")) == state })
	}
	f("", "", routing.Ready) // the certificate is for 127.0.0.1
	f("other", "", routing.Down)
	f("other", "127.0.0.1", routing.Ready)
	f("", "other", routing.Down)
}

// Metrics on a port of their own say nothing of the serving port: /health does.
func TestWorkerMetricsPort(t *testing.T) {
	serving, metrics := newStub(t), newStub(t)
	serving.on("/v1/models", models("m"))
	metrics.on("/m", load(4, 0, 0))
	_, port, _ := net.SplitHostPort(metrics.address)
	r := newRig(t, rigOptions{replicas: []string{"a=" + serving.url()}, scheduling: "plugins:\n- type: metrics-data-source\n  parameters: {scheme: http, path: /m, port: " + port + ", interval: 15ms}\n"})
	r.begin(t)
	e := r.endpoint(t, "a")
	if o := e.Observation(); o == nil || o.Waiting != 4 {
		t.Errorf("got %+v, want 4 waiting", o)
	}
	if got := serving.count("/health"); got == 0 {
		t.Errorf("got no health probe of the serving port, want one")
	}
	metrics.close()
	w := r.worker(t, "a")
	eventually(t, "a failed scrape", func() bool { return w.results[resultConnect].Load() > 0 })
	if got := r.fleet.State(e); got != routing.Ready {
		t.Errorf("metrics port closed: got state %s, want ready", got)
	}
	serving.close()
	eventually(t, "down", func() bool { return r.fleet.State(e) == routing.Down })
}

func TestWorkerNobodyScrapes(t *testing.T) {
	s := newStub(t)
	s.on("/v1/models", models("m"))
	s.on("/metrics", load(4, 0, 0))
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}, scheduling: "dataLayer: {injectDefaults: false}\n"})
	r.begin(t)
	e := r.endpoint(t, "a")
	if got := r.fleet.State(e); got != routing.Ready || e.Observation() != nil || s.count("/metrics") != 0 {
		t.Errorf("got state %s, observation %v, %d scrapes, want ready and never scraped", got, e.Observation(), s.count("/metrics"))
	}
	if names, known := e.Models(); !known {
		t.Errorf("got models %v, want a known list", names)
	}
	s.close()
	eventually(t, "down", func() bool { return r.fleet.State(e) == routing.Down })
}

func TestWorkerAPIKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	write(t, file, "  sekret\n")
	s := newStub(t)
	s.on("/v1/models", models("m"))
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}, set: func(s *configs.Settings) { s.Upstream.APIKeyFile = file }})
	r.begin(t)
	eventually(t, "all probes", func() bool { return s.count("/health") > 0 && s.count("/v1/models") > 0 && s.count("/metrics") > 0 })
	for _, head := range s.allHeads() {
		if !strings.Contains(head, "Authorization: Bearer sekret\n") {
			t.Errorf("got request %q, want the key in it", head)
		}
	}
}

// gaps returns the times between requests.
func gaps(times []time.Time) []time.Duration {
	var out []time.Duration
	for i := 1; i < len(times); i++ {
		out = append(out, times[i].Sub(times[i-1]))
	}
	return out
}

func within(d, want time.Duration) bool { return d >= want-want/10 && d <= want+want/10 }

func TestRhythm(t *testing.T) {
	pipeRig := func(t *testing.T, s *stub) *rig {
		return newRig(t, rigOptions{replicas: []string{"a=http://replica:8000"}, dial: s.dial, set: func(s *configs.Settings) {
			s.Scrape.Interval, s.Scrape.ModelsInterval = 200*time.Millisecond, 10*time.Second
		}})
	}
	t.Run("healthy", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newPipeStub(t)
			s.on("/metrics", load(0, 0, 0))
			s.on("/v1/models", models("m"))
			r := pipeRig(t, s)
			r.begin(t)
			time.Sleep(60 * time.Second)
			r.Close()
			for i, gap := range gaps(s.times("/metrics")) {
				if i == 0 && gap > 200*time.Millisecond || i > 0 && !within(gap, 200*time.Millisecond) {
					t.Errorf("scrape %d: got a gap of %v, want 200ms, 10%% more or less, and a random share of it at first", i, gap)
				}
			}
			if got := len(s.times("/metrics")); got < 280 || got > 320 {
				t.Errorf("got %d scrapes in a minute, want about 300", got)
			}
			if got := slices.Compact(gaps(s.times("/metrics"))); len(got) < 100 {
				t.Errorf("got gaps %v, want them to vary", got)
			}
			for _, gap := range gaps(s.times("/v1/models")) {
				if !within(gap, 10*time.Second) {
					t.Errorf("got a gap of %v between model lists, want 10s", gap)
				}
			}
			s.set(true)
			s.wait.Wait()
		})
	})
	t.Run("failing", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newPipeStub(t)
			s.on("/metrics", status(500))
			s.on("/v1/models", models("m"))
			r := pipeRig(t, s)
			r.begin(t)
			time.Sleep(60 * time.Second)
			want := []time.Duration{400, 800, 1600, 3200, 5000, 5000, 5000}
			got := gaps(s.times("/metrics"))
			for i, ms := range want {
				if i >= len(got) || !within(got[i], ms*time.Millisecond) {
					t.Fatalf("got gaps %v, want %v ms", got, want)
				}
			}
			s.on("/metrics", load(0, 0, 0))
			time.Sleep(6 * time.Second)
			before := len(s.times("/metrics"))
			time.Sleep(10 * time.Second)
			if got := len(s.times("/metrics")) - before; got < 45 || got > 56 {
				t.Errorf("recovered: got %d scrapes in 10 s, want about 50", got)
			}
			r.Close()
			s.set(true)
			s.wait.Wait()
		})
	})
	t.Run("unreachable", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newPipeStub(t)
			s.set(true)
			r := pipeRig(t, s)
			r.begin(t)
			if got := s.attempts(); got != 1 {
				t.Errorf("got %d attempts to connect before the first scrape had ended, want 1", got)
			}
			time.Sleep(60 * time.Second)
			if got := s.attempts(); got < 13 || got > 18 {
				t.Errorf("got %d attempts in a minute, want about 15: one per 5 s and a few at first", got)
			}
			r.Close()
		})
	})
	t.Run("no metrics page", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newPipeStub(t)
			s.on("/health", body(""))
			s.on("/v1/models", models("m"))
			r := pipeRig(t, s)
			r.begin(t)
			time.Sleep(60 * time.Second)
			if got := len(s.times("/metrics")); got < 6 || got > 8 {
				t.Errorf("got %d scrapes in a minute, want about 7", got)
			}
			for _, gap := range gaps(s.times("/health")) {
				if !within(gap, time.Second) {
					t.Errorf("got a gap of %v between health probes, want 1s", gap)
				}
			}
			s.on("/metrics", load(0, 0, 0))
			time.Sleep(11 * time.Second)
			before := len(s.times("/health"))
			time.Sleep(10 * time.Second)
			if got := len(s.times("/health")) - before; got > 0 {
				t.Errorf("got %d health probes after the metrics page has appeared, want 0", got)
			}
			r.Close()
			s.set(true)
			s.wait.Wait()
		})
	})
	t.Run("hanging", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newPipeStub(t)
			s.on("/metrics", hang)
			s.on("/v1/models", models("m"))
			r := pipeRig(t, s)
			began := time.Now()
			r.begin(t)
			if got := time.Since(began); got != 2*time.Second {
				t.Errorf("the first scrape ended after %v, want 2s, which is scrape.timeout", got)
			}
			r.Close()
			s.set(true)
			s.wait.Wait()
		})
	})
	t.Run("many start together and spread", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newPipeStub(t)
			s.on("/metrics", load(0, 0, 0))
			s.on("/v1/models", models("m"))
			r := newRig(t, rigOptions{dial: s.dial, set: func(s *configs.Settings) {
				s.Scrape.Interval = time.Second
				for i := range 100 {
					s.Replicas = append(s.Replicas, configs.Replica{URL: fmt.Sprintf("http://replica%d:8000", i)})
				}
			}})
			began := time.Now()
			r.begin(t)
			time.Sleep(time.Second)
			r.Close()
			var tenths [10]int
			for _, at := range s.times("/metrics") {
				if d := at.Sub(began); d > 0 && d < time.Second {
					tenths[d/(100*time.Millisecond)]++
				}
			}
			for i, n := range tenths {
				if n > 40 {
					t.Errorf("got %d of 100 second scrapes in tenth %d of the interval, want about 10: %v", n, i, tenths)
				}
			}
			s.set(true)
			s.wait.Wait()
		})
	})
}
