package scrape

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/routing"
)

// endpointsYAML lists endpoints NAME=HOST:PORT in llm-d's format.
func endpointsYAML(list ...string) string {
	out := "endpoints:\n"
	for _, item := range list {
		name, address, _ := strings.Cut(item, "=")
		host, port, _ := strings.Cut(address, ":")
		out += fmt.Sprintf("- {name: %s, address: %s, port: %q}\n", name, host, port)
	}
	return out
}

func (r *rig) waitNames(t *testing.T, want string) {
	t.Helper()
	eventually(t, "endpoints "+want, func() bool { return fmt.Sprint(r.names()) == want })
}

// source returns a copy of one source's state.
func (r *rig) source(id sourceID) source {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sources[id]
}

// quiet makes endpoints that nothing listens for cheap to observe.
func quiet(s *configs.Settings) { s.Scrape.Interval = time.Second }

func TestSourcesAddUp(t *testing.T) {
	dir := t.TempDir()
	eps, found := filepath.Join(dir, "endpoints.yaml"), filepath.Join(dir, "found.yaml")
	write(t, eps, endpointsYAML("b=127.0.0.2:1"))
	write(t, found, endpointsYAML("c=127.0.0.3:1"))
	r := newRig(t, rigOptions{
		replicas:   []string{"a=http://127.0.0.1:1"},
		scheduling: "plugins:\n- type: file-discovery\n  parameters: {path: " + found + "}\n",
		set:        func(s *configs.Settings) { quiet(s); s.Endpoints = eps },
	})
	if got := r.names(); len(got) != 0 {
		t.Errorf("before Start: got %v, want none", got)
	}
	if err := r.Add(routing.EndpointSpec{URL: "http://127.0.0.4:1/", Labels: map[string]string{"k": "v"}}); err != nil {
		t.Fatal(err)
	}
	r.begin(t)
	if got := fmt.Sprint(r.names()); got != "[127.0.0.4:1 a b c]" {
		t.Errorf("got %v, want all four", got)
	}
	if v, _ := r.endpoint(t, "127.0.0.4:1").Label("k"); v != "v" {
		t.Errorf("got label %q, want v", v)
	}
	for name, want := range map[string]string{"a": "replicas[0]", "b": eps + ":2:3", "127.0.0.4:1": "the admin surface"} {
		if got := r.endpoint(t, name).Source(); !strings.HasPrefix(got, want) {
			t.Errorf("%s: got source %q, want %q", name, got, want)
		}
	}
}

func TestClashes(t *testing.T) {
	dir := t.TempDir()
	f := func(t *testing.T, replicas []string, endpoints, found string, want ...string) {
		t.Helper()
		s := configs.DefaultSettings()
		for _, text := range replicas {
			var replica configs.Replica
			if err := replica.UnmarshalText([]byte(text)); err != nil {
				t.Fatal(err)
			}
			s.Replicas = append(s.Replicas, replica)
		}
		s.Endpoints = filepath.Join(dir, "endpoints.yaml")
		write(t, s.Endpoints, endpoints)
		write(t, filepath.Join(dir, "found.yaml"), found)
		plan := mustPlan(t, "plugins:\n- type: file-discovery\n  parameters: {path: "+filepath.Join(dir, "found.yaml")+"}\n", s.Scrape)
		_, err := NewManager(Options{Fleet: routing.NewFleet(time.Now, time.Second, zap.NewNop()), Settings: &s, Plan: plan, Log: zap.NewNop()})
		if !errors.Is(err, ErrClash) {
			t.Fatalf("got %v, want ErrClash", err)
		}
		for _, part := range want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("got %q, want %q in it", err, part)
			}
		}
	}
	f(t, []string{"a=http://h1:1"}, endpointsYAML("a=h2:1"), endpointsYAML("c=h3:1"), "replicas[0]", "endpoints.yaml:2:3", "the same name default/a")
	f(t, []string{"a=http://H1:1/"}, endpointsYAML("b=h1:1"), endpointsYAML("c=h3:1"), "replicas[0]", "endpoints.yaml:2:3", "the same URL http://h1:1")
	f(t, nil, endpointsYAML("a=h1:1", "b=h2:1"), endpointsYAML("a=h3:1", "c=h2:1"), "endpoints.yaml:2:3", "found.yaml:2:3", "default/a", "found.yaml:3:3", "http://h2:1")
	f(t, []string{"http://h1", "http://h1:80"}, endpointsYAML("b=h2:1"), endpointsYAML("c=h3:1"), "replicas[0]", "replicas[1]")
}

func TestNewManagerRefuses(t *testing.T) {
	dir := t.TempDir()
	missing := filepath.Join(dir, "missing")
	f := func(t *testing.T, set func(s *configs.Settings), want ...string) {
		t.Helper()
		s := configs.DefaultSettings()
		set(&s)
		_, err := NewManager(Options{Fleet: routing.NewFleet(time.Now, time.Second, zap.NewNop()), Settings: &s, Plan: mustPlan(t, "", s.Scrape), Log: zap.NewNop()})
		for _, part := range want {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("got %v, want %q in it", err, part)
			}
		}
	}
	text := func(name, text string) string {
		file := filepath.Join(dir, name)
		write(t, file, text)
		return file
	}
	f(t, func(s *configs.Settings) { s.Endpoints = missing }, missing)
	f(t, func(s *configs.Settings) { s.Endpoints = dir }, "is no regular file")
	f(t, func(s *configs.Settings) {
		s.Endpoints = text("bad", "endpoints: [{name: a, address: h, port: 70000}]")
	}, "bad:1:")
	f(t, func(s *configs.Settings) { s.Endpoints = text("big", strings.Repeat("#", 1<<20+1)) }, "larger than")
	f(t, func(s *configs.Settings) { s.Replicas = []configs.Replica{{URL: "ftp://h"}} }, "replicas[0]", "ftp://h")
	f(t, func(s *configs.Settings) { s.Upstream.CAFile = missing }, "upstream.ca_file", missing)
	f(t, func(s *configs.Settings) { s.Upstream.CAFile = text("ca", "no PEM") }, "upstream.ca_file", "holds no PEM certificate")
	f(t, func(s *configs.Settings) { s.Upstream.APIKeyFile = missing }, "upstream.api_key_file", missing)
	f(t, func(s *configs.Settings) { s.Upstream.APIKeyFile = text("empty", " \n") }, "upstream.api_key_file", "must hold one key")
	f(t, func(s *configs.Settings) { s.Upstream.APIKeyFile = text("two", "a\nb") }, "upstream.api_key_file", "must hold one key")
	f(t, func(s *configs.Settings) {
		s.Endpoints, s.Upstream.CAFile, s.Upstream.APIKeyFile = missing, missing, missing
	}, "open", "ca_file", "api_key_file")
}

func TestAddAndRemove(t *testing.T) {
	r := newRig(t, rigOptions{replicas: []string{"a=http://127.0.0.1:1"}, set: quiet})
	r.begin(t)
	f := func(t *testing.T, err, want error, part string) {
		t.Helper()
		if want == nil && part == "" {
			if err != nil {
				t.Errorf("got %v, want success", err)
			}
			return
		}
		if err == nil || want != nil && !errors.Is(err, want) || !strings.Contains(err.Error(), part) {
			t.Errorf("got %v, want %v with %q", err, want, part)
		}
	}
	f(t, r.Add(routing.EndpointSpec{Name: "b", URL: "http://127.0.0.2:1"}), nil, "")
	f(t, r.Add(routing.EndpointSpec{Name: "b", URL: "http://127.0.0.3:1"}), ErrClash, "the admin surface and the admin surface have the same name default/b")
	f(t, r.Add(routing.EndpointSpec{Name: "c", URL: "http://127.0.0.1:1"}), ErrClash, "replicas[0] and the admin surface have the same URL")
	f(t, r.Add(routing.EndpointSpec{Name: "c", URL: "127.0.0.1:1"}), nil, "is no URL")
	f(t, r.Add(routing.EndpointSpec{Name: "c/d", URL: "http://127.0.0.3:1"}), nil, "not allowed")
	f(t, r.Add(routing.EndpointSpec{Namespace: "ns", Name: "a", URL: "http://127.0.0.3:1"}), nil, "")
	if got := fmt.Sprint(r.names()); got != "[a b ns/a]" {
		t.Errorf("got %v, want [a b ns/a]", got)
	}
	f(t, r.Remove("a"), ErrDeclared, "remove it from replicas[0], or drain it")
	f(t, r.Remove("default/a"), ErrDeclared, "replicas[0]")
	f(t, r.Remove("x"), ErrUnknown, "default/x")
	f(t, r.Remove("ns/a"), nil, "")
	f(t, r.Remove("default/b"), nil, "")
	f(t, r.Remove("b"), ErrUnknown, "default/b")
	if got := fmt.Sprint(r.names()); got != "[a]" {
		t.Errorf("got %v, want [a]", got)
	}
	r.Close()
	f(t, r.Add(routing.EndpointSpec{Name: "b", URL: "http://127.0.0.2:1"}), errClosed, "")
	f(t, r.Remove("a"), errClosed, "")
	f(t, r.Reload(&r.settings, mustPlan(t, "", r.settings.Scrape)), errClosed, "")
}

func TestReload(t *testing.T) {
	s := newStub(t)
	s.on("/metrics", load(0, 0, 0))
	s.on("/v1/models", models("m"))
	file := filepath.Join(t.TempDir(), "endpoints.yaml")
	write(t, file, endpointsYAML("f=127.0.0.6:1"))
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url(), "b=http://127.0.0.2:1"}, set: func(c *configs.Settings) {
		c.Scrape.Interval = time.Hour // until the reload
		c.Scrape.Staleness = 2 * time.Hour
		c.Endpoints = file
	}})
	r.begin(t)
	if err := r.Add(routing.EndpointSpec{Name: "x", URL: "http://127.0.0.3:1"}); err != nil {
		t.Fatal(err)
	}
	a := r.endpoint(t, "a")

	next := r.settings
	next.Scrape.Interval, next.Scrape.Staleness = 10*time.Millisecond, time.Second
	next.Replicas = []configs.Replica{{Name: "a", URL: s.url()}, {Name: "c", URL: "http://127.0.0.4:1"}}
	if err := r.Reload(&next, mustPlan(t, "", next.Scrape)); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(r.names()); got != "[a c f x]" {
		t.Errorf("got %v, want [a c f x]: b gone, c new, the added one kept", got)
	}
	if r.endpoint(t, "a") != a {
		t.Error("got another endpoint a, want the same")
	}
	before := s.count("/metrics")
	eventually(t, "the new interval", func() bool { return s.count("/metrics") > before+5 })
	s.on("/metrics", load(8, 0, 0))
	eventually(t, "a new observation", func() bool { return a.Observation().Waiting == 8 })

	f := func(t *testing.T, change func(c *configs.Settings), want string) {
		t.Helper()
		bad := next
		bad.Scrape.Interval = time.Hour
		change(&bad)
		err := r.Reload(&bad, mustPlan(t, "", configs.Scrape{}))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
		if got := fmt.Sprint(r.names()); got != "[a c f x]" {
			t.Errorf("after the failed reload: got %v, want no change", got)
		}
		if got := r.config.Load().interval; got != 10*time.Millisecond {
			t.Errorf("after the failed reload: got interval %v, want 10ms", got)
		}
	}
	f(t, func(c *configs.Settings) { c.Replicas = []configs.Replica{{Name: "x", URL: "http://127.0.0.5:1"}} }, "replicas[0] and the admin surface have the same name")
	f(t, func(c *configs.Settings) { c.Replicas = []configs.Replica{{URL: "x"}} }, "replicas[0]: the URL")
	f(t, func(c *configs.Settings) { c.Upstream.CAFile = file }, "holds no PEM certificate")
	f(t, func(c *configs.Settings) { c.Endpoints = file + ".missing" }, "no such file")
	write(t, file, "endpoints: [")
	f(t, func(c *configs.Settings) {}, file)
	write(t, file, "")
	f(t, func(c *configs.Settings) {}, "no endpoints")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	next.Endpoints = ""
	if err := r.Reload(&next, mustPlan(t, "", next.Scrape)); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(r.names()); got != "[a c x]" {
		t.Errorf("without the file: got %v, want [a c x]", got)
	}
}

func TestReloadBeforeStart(t *testing.T) {
	r := newRig(t, rigOptions{replicas: []string{"a=http://127.0.0.1:1"}, set: quiet})
	next := r.settings
	next.Replicas = []configs.Replica{{Name: "b", URL: "http://127.0.0.2:1"}}
	if err := r.Reload(&next, mustPlan(t, "", next.Scrape)); err != nil {
		t.Fatal(err)
	}
	r.begin(t)
	if got := fmt.Sprint(r.names()); got != "[b]" {
		t.Errorf("got %v, want [b]", got)
	}
}

func TestWaitFirst(t *testing.T) {
	s := newStub(t)
	s.on("/v1/models", hang)
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}, set: func(s *configs.Settings) { s.Scrape.Timeout = time.Hour }})
	ctx, cancel := context.WithCancel(context.Background())
	r.Start(context.Background())
	r.Start(context.Background()) // once is enough
	eventually(t, "a request", func() bool { return s.count("/v1/models") > 0 })
	cancel()
	if err := r.WaitFirst(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	next := r.settings
	next.Replicas = nil
	if err := r.Reload(&next, mustPlan(t, "", next.Scrape)); err != nil {
		t.Fatal(err)
	}
	if err := r.WaitFirst(context.Background()); err != nil {
		t.Errorf("the endpoint is gone: got %v, want success", err)
	}
	r.Close()
	r.Close() // once is enough
}

// The end of the context that Start was given ends the observation, too.
func TestStartContext(t *testing.T) {
	s := newStub(t)
	s.on("/metrics", hang)
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}, set: func(s *configs.Settings) { s.Scrape.Timeout = time.Hour }})
	ctx, cancel := context.WithCancel(context.Background())
	r.Start(ctx)
	eventually(t, "a request", func() bool { return s.count("/metrics") > 0 })
	cancel()
	<-r.worker(t, "a").done
}

// An endpoint that is removed and comes back is scraped by one worker again, even if streams have kept it alive.
func TestEndpointComesBack(t *testing.T) {
	s := newStub(t)
	s.on("/metrics", load(1, 0, 0))
	s.on("/v1/models", models("m"))
	r := newRig(t, rigOptions{})
	r.begin(t)
	for range 5 {
		if err := r.Add(routing.EndpointSpec{Name: "a", URL: s.url()}); err != nil {
			t.Fatal(err)
		}
		e := r.endpoint(t, "a")
		eventually(t, "ready", func() bool { return r.fleet.State(e) == routing.Ready && e.Observation() != nil })
		if got := len(r.snapshot()); got != 1 {
			t.Errorf("got %d workers, want 1", got)
		}
		if err := r.Remove("a"); err != nil {
			t.Fatal(err)
		}
		if got := len(r.snapshot()); got != 0 {
			t.Errorf("got %d workers, want 0", got)
		}
	}
}

func TestCollector(t *testing.T) {
	s := newStub(t)
	s.on("/metrics", body("vllm:num_requests_waiting -1\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1\"} 1\n"))
	s.on("/v1/models", models("m"))
	settings := configs.DefaultSettings()
	settings.Scrape.Interval = time.Hour
	settings.Scrape.Staleness = 2 * time.Hour
	settings.Replicas = []configs.Replica{{Name: "a", URL: s.url()}, {Name: "a", Namespace: "ns", URL: "http://127.0.0.2:1"}}
	registry := prometheus.NewPedanticRegistry()
	now := time.Unix(1_800_000_000, 500_000_000)
	o := Options{Fleet: routing.NewFleet(func() time.Time { return now }, time.Hour, zap.NewNop()), Settings: &settings, Plan: mustPlan(t, "", settings.Scrape), Log: zap.NewNop(), Registry: registry}
	m, err := NewManager(o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewManager(o); err == nil {
		t.Error("a second manager on the registry: got success, want an error")
	}
	m.Start(context.Background())
	if err := m.WaitFirst(context.Background()); err != nil {
		t.Fatal(err)
	}
	check := func(t *testing.T, want string) {
		t.Helper()
		names := []string{"kvgate_scrapes_total", "kvgate_scrape_missing_total", "kvgate_discovery_endpoints", "kvgate_discovery_errors_total", "kvgate_discovery_last_success_timestamp_seconds", "kvgate_discovery_last_load_successful"}
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want), names...); err != nil {
			t.Error(err)
		}
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("got %v, %v, want no problem", problems, err)
	}
	if got, err := testutil.GatherAndCount(registry, "kvgate_scrape_duration_seconds"); err != nil || got != 1 {
		t.Errorf("got %d histograms, %v, want 1", got, err)
	}
	sources := `
# HELP kvgate_discovery_endpoints Endpoints that a source contributes.
# TYPE kvgate_discovery_endpoints gauge
kvgate_discovery_endpoints{source="admin"} 0
kvgate_discovery_endpoints{source="endpoints"} 0
kvgate_discovery_endpoints{source="file-discovery"} 0
kvgate_discovery_endpoints{source="settings"} %d
# HELP kvgate_discovery_errors_total Lists of endpoints that were not taken: unreadable, broken, empty or clashing.
# TYPE kvgate_discovery_errors_total counter
kvgate_discovery_errors_total{source="admin"} 0
kvgate_discovery_errors_total{source="endpoints"} 0
kvgate_discovery_errors_total{source="file-discovery"} 0
kvgate_discovery_errors_total{source="settings"} 0
# HELP kvgate_discovery_last_load_successful 1 when the newest list of endpoints is in force, 0 when an older one is.
# TYPE kvgate_discovery_last_load_successful gauge
kvgate_discovery_last_load_successful{source="admin"} 1
kvgate_discovery_last_load_successful{source="endpoints"} 1
kvgate_discovery_last_load_successful{source="file-discovery"} 1
kvgate_discovery_last_load_successful{source="settings"} 1
# HELP kvgate_discovery_last_success_timestamp_seconds When a list of endpoints was last found good.
# TYPE kvgate_discovery_last_success_timestamp_seconds gauge
kvgate_discovery_last_success_timestamp_seconds{source="admin"} 1.8000000005e+09
kvgate_discovery_last_success_timestamp_seconds{source="settings"} 1.8000000005e+09
`
	a := `
# HELP kvgate_scrape_missing_total Scraped pages without a usable value of a field: absent, negative or not a number.
# TYPE kvgate_scrape_missing_total counter
kvgate_scrape_missing_total{field="block_size",replica="a"} 0
kvgate_scrape_missing_total{field="capacity",replica="a"} 0
kvgate_scrape_missing_total{field="kv_usage",replica="a"} 0
kvgate_scrape_missing_total{field="running",replica="a"} 0
kvgate_scrape_missing_total{field="waiting",replica="a"} 1
%s# HELP kvgate_scrapes_total Scrapes of a replica's metrics by how they ended.
# TYPE kvgate_scrapes_total counter
kvgate_scrapes_total{replica="a",result="ok"} 1
`
	check(t, fmt.Sprintf(sources, 2)+fmt.Sprintf(a, `kvgate_scrape_missing_total{field="block_size",replica="ns/a"} 0
kvgate_scrape_missing_total{field="capacity",replica="ns/a"} 0
kvgate_scrape_missing_total{field="kv_usage",replica="ns/a"} 0
kvgate_scrape_missing_total{field="running",replica="ns/a"} 0
kvgate_scrape_missing_total{field="waiting",replica="ns/a"} 0
`)+"kvgate_scrapes_total{replica=\"ns/a\",result=\"connect\"} 1\nkvgate_scrapes_total{replica=\"ns/a\",result=\"ok\"} 0\n")
	settings.Replicas = settings.Replicas[:1]
	if err := m.Reload(&settings, o.Plan); err != nil {
		t.Fatal(err)
	}
	check(t, fmt.Sprintf(sources, 1)+fmt.Sprintf(a, "")) // the series of the other one are gone
	m.Close()
	if got, err := testutil.GatherAndCount(registry); err != nil || got != 0 {
		t.Errorf("after Close: got %d series, %v, want 0", got, err)
	}
}

// A file that is not in force is an alert.
func TestCollectorBadFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "endpoints.yaml")
	write(t, file, "")
	settings := configs.DefaultSettings()
	settings.Endpoints = file
	registry := prometheus.NewPedanticRegistry()
	m, err := NewManager(Options{Fleet: routing.NewFleet(time.Now, time.Second, zap.NewNop()), Settings: &settings, Plan: mustPlan(t, "", settings.Scrape), Log: zap.NewNop(), Registry: registry})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	want := `
# HELP kvgate_discovery_last_load_successful 1 when the newest list of endpoints is in force, 0 when an older one is.
# TYPE kvgate_discovery_last_load_successful gauge
kvgate_discovery_last_load_successful{source="admin"} 1
kvgate_discovery_last_load_successful{source="endpoints"} 0
kvgate_discovery_last_load_successful{source="file-discovery"} 1
kvgate_discovery_last_load_successful{source="settings"} 1
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "kvgate_discovery_last_load_successful"); err != nil {
		t.Error(err)
	}
}
