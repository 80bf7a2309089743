package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"kvgate/bench/fakevllm"
	"kvgate/configs"
	"kvgate/routing"
)

// clusterBed is what docs/multi-cluster.md builds, on ports of its own.
type clusterBed struct {
	t          *testing.T
	west, east *gateway
	top        *gateway
	replicas   map[string][]*fakevllm.Server // by cluster
}

// newClusterBed runs the files of the page.
func newClusterBed(t *testing.T) *clusterBed {
	t.Helper()
	b := &clusterBed{t: t, replicas: make(map[string][]*fakevllm.Server)}
	blocks := docBlocks(readDoc(t, "docs/multi-cluster.md"), "yaml")
	dir := t.TempDir()
	var ports []string // of the page and of this run, in turn
	file := func(name string) string {
		text, ok := blocks["file="+name]
		if !ok {
			t.Fatalf("docs/multi-cluster.md: got no %s, want one", name)
		}
		path := filepath.Join(dir, name)
		text = strings.NewReplacer(ports...).Replace(text)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	start := func(name string) *gateway {
		path := file(name)
		g := startGateway(t, func() (*configs.Loaded, error) { return configs.LoadSettings(nil, path, nil) })
		return g
	}
	for i, cluster := range []string{"west", "east"} {
		for k := range 2 {
			r := testReplica(t)
			b.replicas[cluster] = append(b.replicas[cluster], r)
			_, port, _ := strings.Cut(r.Addr(), ":")
			ports = append(ports, fmt.Sprintf("127.0.0.1:8%d0%d", i+1, k+1), "127.0.0.1:"+port)
		}
	}
	own := ports
	for i, g := range []**gateway{&b.west, &b.east} {
		data, admin := fmt.Sprintf("808%d", i+1), fmt.Sprintf("909%d", i+1)
		ports = append(own, "127.0.0.1:"+data, "127.0.0.1:0", "127.0.0.1:"+admin, "127.0.0.1:0")
		*g = start([]string{"west.yaml", "east.yaml"}[i])
	}
	ports = []string{`"8081"`, `"` + portOf(b.west.data) + `"`, `"9091"`, `"` + portOf(b.west.admin) + `"`,
		`"8082"`, `"` + portOf(b.east.data) + `"`, `"9092"`, `"` + portOf(b.east.admin) + `"`}
	ports = append(ports, "clusters.yaml", file("clusters.yaml"))
	ports = append(ports, "127.0.0.1:8080", "127.0.0.1:0", "127.0.0.1:9090", "127.0.0.1:0", "scheduling: multicluster.yaml", "scheduling: "+file("multicluster.yaml"))
	b.top = start("top.yaml")
	return b
}

// startGateway starts a gateway and waits for the first scrape of its replicas.
func startGateway(t *testing.T, load func() (*configs.Loaded, error)) *gateway {
	t.Helper()
	g, err := newGateway(load, zap.NewNop(), zap.NewAtomicLevel())
	if err != nil {
		t.Fatal(err)
	}
	g.start(context.Background())
	t.Cleanup(func() { stopGateway(t, g) })
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := g.scraper.WaitFirst(ctx); err != nil {
		t.Fatal(err)
	}
	return g
}

// stopGateway drains a gateway; a second time it does nothing.
func stopGateway(t *testing.T, g *gateway) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := g.stop(ctx); err != nil {
		t.Errorf("stop: %v", err)
	}
}

// ask sends a completion and returns the cluster that answered.
func (b *clusterBed) ask(prompt string) (cluster string, status int, body string) {
	b.t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(b.top.dataURL()+"/v1/completions", "application/json", strings.NewReader(`{"model":"m","max_tokens":2,"prompt":"`+prompt+`"}`))
	if err != nil {
		b.t.Errorf("ask: %v", err)
		return "", 0, ""
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Errorf("ask: %v", err)
	}
	if got := resp.Header.Get("x-kvgate-unsent"); got != "" {
		b.t.Errorf("got x-kvgate-unsent %q at the client, want none", got)
	}
	return resp.Header.Get("x-kvgate-replica"), resp.StatusCode, string(data)
}

// history is what conversation i has said up to a turn.
func history(i, turn int) string {
	var b strings.Builder
	for k := range turn + 1 {
		fmt.Fprintf(&b, "Turn %d of conversation %d. %s", k, i, strings.Repeat(fmt.Sprintf("Word %d. ", i), 60))
	}
	return b.String()
}

// converse has n conversations of several turns, and returns their clusters; each stays in its own.
func (b *clusterBed) converse(n, turns int) []string {
	b.t.Helper()
	clusters := make([]string, n)
	for turn := range turns {
		for i := range n {
			got, status, body := b.ask(history(i, turn))
			if status != 200 {
				b.t.Fatalf("conversation %d, turn %d: got status %d: %s, want 200", i, turn, status, body)
			}
			if turn == 0 {
				clusters[i] = got
			} else if got != clusters[i] {
				b.t.Errorf("conversation %d, turn %d: got %s, want %s, where it began", i, turn, got, clusters[i])
			}
		}
	}
	return clusters
}

// TestMultiClusterPage runs docs/multi-cluster.md: conversations stick, and a cluster
// that goes while requests come is not missed.
func TestMultiClusterPage(t *testing.T) {
	b := newClusterBed(t)
	clusters := b.converse(10, 4)
	prompts, cached := int64(0), int64(0)
	for _, list := range b.replicas {
		for _, r := range list {
			s := r.Stats().Engine
			prompts, cached = prompts+s.PromptTokens, cached+s.CachedTokens
		}
	}
	// Of turn k only the last of k+1 parts is new: 6 of 10 parts can be cached.
	if got := float64(cached) / float64(prompts); got < 0.5 {
		t.Errorf("got %.2f of the prompt tokens cached, want at least 0.5: a turn finds the turns before", got)
	}
	// The averages of both clusters have arrived.
	_, page := get(t, adminURL(b.top)+"/metrics")
	for _, name := range []string{"west", "east"} {
		if line := `kvgate_replica_waiting_requests{replica="` + name + `"} 0`; !strings.Contains(page, line+"\n") {
			t.Errorf("got no %s in the metrics, want it", line)
		}
	}

	gone, g, rest := clusters[0], b.west, "east"
	if gone == "east" {
		g, rest = b.east, "west"
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	answers, left := 0, make(chan struct{})
	for i := range 4 {
		wg.Go(func() {
			for turn := 4; ; turn++ {
				got, status, body := b.ask(history(i, turn%8))
				if status != 200 {
					t.Errorf("while a cluster goes: got status %d from %s: %s, want 200", status, got, body)
				}
				mu.Lock()
				answers++
				mu.Unlock()
				select {
				case <-left:
					if got != rest {
						t.Errorf("got %s, want %s: the other one is gone", got, rest)
					}
					return
				default:
				}
			}
		})
	}
	until(t, "requests to run", func() bool { mu.Lock(); defer mu.Unlock(); return answers > 8 })
	stopGateway(t, g)
	if got, status, body := b.ask(history(0, 5)); status != 200 || got != rest {
		t.Errorf("the conversation of the cluster that is gone: got status %d from %s: %s, want 200 from %s", status, got, body, rest)
	}
	close(left)
	wg.Wait()
	if n := b.top.fleet.Endpoints(); len(n) != 2 {
		t.Errorf("got %d clusters, want 2: one is down, not removed", len(n))
	}
}

// TestClusterWithoutReplicas: a cluster whose gateway is there and whose replicas are
// not is left from the first request on.
func TestClusterWithoutReplicas(t *testing.T) {
	b := newClusterBed(t)
	clusters := b.converse(6, 2)
	gone, rest := clusters[0], "east"
	if gone == "east" {
		rest = "west"
	}
	for _, r := range b.replicas[gone] {
		r.Close()
	}
	for turn := 2; turn < 6; turn++ {
		for i := range clusters {
			if got, status, body := b.ask(history(i, turn)); status != 200 || got != rest {
				t.Errorf("conversation %d, turn %d: got status %d from %s: %s, want 200 from %s", i, turn, status, got, body, rest)
			}
		}
	}
}

// TestClusterLoop: a cluster that leads back to the gateway above it.
func TestClusterLoop(t *testing.T) {
	west := testGateway(t, nil)
	top := testGateway(t, func(s *configs.Settings) {
		s.Replicas = []configs.Replica{{Name: "west", Namespace: "default", URL: west.dataURL()}}
	})
	if err := west.scraper.Add(routing.EndpointSpec{Name: "back", URL: top.dataURL()}); err != nil {
		t.Fatal(err)
	}
	until(t, "the replica that leads back", func() bool {
		e := west.fleet.Endpoints()
		return len(e) == 1 && west.fleet.State(e[0]) != routing.Starting
	})
	f := func(path, body string, want func(e map[string]any) (typ, message any)) {
		t.Helper()
		status, answer := post(t, top.dataURL()+path, body)
		var e map[string]any
		if err := json.Unmarshal([]byte(answer), &e); err != nil {
			t.Fatalf("%s: got %s, want JSON", path, answer)
		}
		typ, message := want(e)
		if status != 508 || !strings.Contains(fmt.Sprint(message), "8 gateways (limits.hops)") || typ == nil {
			t.Errorf("%s: got status %d: %s, want 508 in the route's dialect", path, status, answer)
		}
	}
	f("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"Hello"}]}`, func(e map[string]any) (any, any) {
		x, _ := e["error"].(map[string]any)
		if x["code"] != "loop_detected" || x["type"] != "server_error" {
			t.Errorf("got %v, want loop_detected", e)
		}
		return x["type"], x["message"]
	})
	f("/v1/messages", `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"Hello"}]}`, func(e map[string]any) (any, any) {
		x, _ := e["error"].(map[string]any)
		if e["type"] != "error" || x["type"] != "api_error" {
			t.Errorf("got %v, want an error of Anthropic's API", e)
		}
		return x["type"], x["message"]
	})
}

// TestLLMDClusterConfig: a configuration for llm-d's Endpoint Picker over clusters is read as it is.
func TestLLMDClusterConfig(t *testing.T) {
	ca := serverFiles(t).CertFile
	text := `apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: multicluster-file-discovery
    name: discovery
    parameters:
      path: ` + writeTemp(t, "clusters.yaml", clustersYAML) + `
  - type: multicluster-metrics-data-source
    name: metrics-source
    parameters:
      scheme: https
      caCertPath: ` + ca + `
  - type: multicluster-metrics-extractor
    name: metrics-extractor
  - type: multicluster-session-affinity-filter
    name: session-affinity
  - type: multicluster-kv-cache-utilization-scorer
    name: kv-cache
  - type: multicluster-queue-scorer
    name: queue
  - type: multicluster-approx-prefix-cache-producer
  - type: multicluster-prefix-cache-scorer
    name: prefix
  - type: max-score-picker
  - type: single-profile-handler
dataLayer:
  discovery:
    pluginRef: discovery
  sources:
    - pluginRef: metrics-source
      extractors:
        - pluginRef: metrics-extractor
`
	file := writeTemp(t, "epp.yaml", text)
	if status, out, errs := command(t, "check", "--scheduling", file); status != 0 || strings.Contains(out+errs, "warning") {
		t.Errorf("check: got status %d\n%s%s, want 0 without a warning", status, out, errs)
	}
	g := testGateway(t, func(s *configs.Settings) { s.Scheduling = file })
	var names []string
	for _, e := range g.fleet.Endpoints() {
		names = append(names, e.ID()+" "+e.URL())
	}
	if got, want := strings.Join(names, ", "), "default/east http://east.invalid:8000, prod/west http://10.255.255.1:8000"; got != want {
		t.Errorf("got the clusters %s, want %s", got, want)
	}
	for _, part := range []string{"      extractors:\n        - pluginRef: metrics-extractor\n", "  - type: multicluster-metrics-extractor\n    name: metrics-extractor\n"} {
		text = strings.Replace(text, part, "", 1)
	}
	if status, _, errs := command(t, "check", "--scheduling", writeTemp(t, "broken.yaml", text)); status == 0 || !strings.Contains(errs, "nobody reads the metrics of clusters") {
		t.Errorf("without the extractor: got status %d, %s, want a refusal", status, errs)
	}
}

const clustersYAML = `endpoints:
  - name: west
    namespace: prod
    address: 10.255.255.1
    port: "8000"
    labels:
      metricsAddress: 10.255.255.1
      metricsPort: "9090"
  - name: east
    address: east.invalid
    port: "8000"
`

// TestDemoClusters runs the demo over two clusters.
func TestDemoClusters(t *testing.T) {
	status, out, errs := command(t, "demo", "--once", "--conversations", "4", "--replicas", "3", "--clusters", "2", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
	if status != 0 || !strings.Contains(out, "3 simulated replicas in 2 clusters") {
		t.Errorf("got status %d\n%s%s, want a comparison over two clusters", status, out, errs)
	}
	if status, _, errs := command(t, "demo", "--once", "--clusters", "5"); status == 0 || !strings.Contains(errs, "--clusters 5: use a number from 0") {
		t.Errorf("more clusters than replicas: got status %d, %s, want a refusal", status, errs)
	}
}

// TestClusterKeysAndTLS: a cluster that asks for keys, for its requests and for its
// metrics, and has a certificate that nobody else has issued.
func TestClusterKeysAndTLS(t *testing.T) {
	files := serverFiles(t)
	west := testGateway(t, func(s *configs.Settings) {
		s.TLS, s.Auth.KeysFile = files, writeTemp(t, "keys", "top:key-of-top\n")
		s.Admin.TokenFile, s.Admin.LLMDMetrics = writeTemp(t, "token", "token-of-west\n"), true
	}, testReplica(t))
	clusters := "endpoints:\n- name: west\n  address: 127.0.0.1\n  port: " + portOf(west.data) + "\n  labels: {kvgate.io/scheme: https, kvgate.io/server-name: gate, kvgate.io/ca-file: " + files.CertFile +
		", kvgate.io/api-key-file: " + writeTemp(t, "key", "key-of-top\n") + ", kvgate.io/metrics-key-file: " + writeTemp(t, "metrics", "token-of-west\n") + ", metricsPort: \"" + portOf(west.admin) + "\"}\n"
	top := testGateway(t, func(s *configs.Settings) {
		s.Scheduling = writeTemp(t, "scheduling.yaml", fmt.Sprintf(demoClusters, writeTemp(t, "clusters.yaml", clusters)))
	})
	if status, body := post(t, top.dataURL()+"/v1/completions", `{"model":"m","prompt":"Hello","max_tokens":2}`); status != 200 {
		t.Errorf("got status %d: %s, want 200", status, body)
	}
	if o := top.fleet.Endpoints()[0].Observation(); o == nil || o.Waiting != 0 {
		t.Errorf("got the averages %+v, want those of an idle cluster", o)
	}
	// A page behind the same token, read without it, is none.
	if status, _ := get(t, adminURL(west)+"/metrics"); status != 401 {
		t.Errorf("the metrics without the token: got status %d, want 401", status)
	}
}

// TestAveragesFollowReload: admin.llm_d_metrics is switched on and off while the gateway runs.
func TestAveragesFollowReload(t *testing.T) {
	on := false
	g := testGateway(t, func(s *configs.Settings) { s.Admin.LLMDMetrics = on }, testReplica(t))
	for _, on = range []bool{false, true, true, false} {
		if err := g.reload(); err != nil {
			t.Fatal(err)
		}
		_, page := get(t, adminURL(g)+"/metrics")
		if got := strings.Contains(page, `llm_d_epp_average_queue_size{name="kvgate"} 0`); got != on {
			t.Errorf("admin.llm_d_metrics %v: got the averages: %v, want %v", on, got, on)
		}
	}
}
