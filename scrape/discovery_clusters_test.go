package scrape

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvgate/configs"
	"kvgate/routing"
)

// clusterPlan is the part of a configuration that reads clusters.
func clusterPlan(source, extractor string) string {
	return "plugins:\n- {type: multicluster-metrics-data-source, parameters: {" + source + "}}\n- {type: multicluster-metrics-extractor, parameters: {" + extractor + "}}\n" +
		"dataLayer: {sources: [{pluginRef: multicluster-metrics-data-source, extractors: [{pluginRef: multicluster-metrics-extractor}]}]}\n"
}

func TestClusterPlan(t *testing.T) {
	f := func(t *testing.T, yaml, want string, warnings ...string) {
		t.Helper()
		p, err := planFor(t, yaml, configs.DefaultSettings().Scrape)
		if err != nil {
			t.Errorf("%s\ngot %v, want %s", yaml, err, want)
			return
		}
		got := p.sketch()
		for _, r := range p.engines[0].rules {
			got += " " + r.name
		}
		if got != want {
			t.Errorf("%s\ngot  %s\nwant %s", yaml, got, want)
		}
		if fmt.Sprint(len(p.Warnings)) != fmt.Sprint(len(warnings)) || len(warnings) > 0 && !strings.Contains(p.Warnings[0], warnings[0]) {
			t.Errorf("%s\ngot warnings %q, want %q", yaml, p.Warnings, warnings)
		}
	}
	const rest = "; models :/v1/models; engines cluster by nothing"
	const averages = " llm_d_epp_average_queue_size llm_d_epp_average_kv_cache_utilization"
	f(t, clusterPlan("", ""), "metrics https:/metrics"+rest+averages)
	f(t, clusterPlan("scheme: http, path: /m, interval: 100ms, insecureSkipVerify: false", "queueSizeMetric: q, kvCacheUtilizationMetric: 'u{name=a}'"), "metrics http:/m every 100ms"+rest+" q u")
	f(t, clusterPlan("insecureSkipVerify: true", ""), "metrics https:/metrics tls insecure=true certificates=0"+rest+averages)
	f(t, clusterPlan("port: 9090", ""), "metrics https:/metrics"+rest+averages, "parameters.port: port has no effect (label the clusters with metricsPort)")
	f(t, "plugins: [{type: multicluster-file-discovery, parameters: {path: c.yaml, watchFile: true}}]\n",
		"metrics :/metrics; models :/v1/models; engines vllm sglang trtllm-serve triton-tensorrt-llm triton by llm-d.ai/engine-type; file c.yaml watch=true clusters"+
			" vllm:num_requests_waiting vllm:num_requests_running vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc vllm:cache_config_info vllm:lora_requests_info")
	f(t, "plugins: [{name: c, type: multicluster-file-discovery, parameters: {path: c.yaml}}]\ndataLayer: {injectDefaults: false, discovery: {pluginRef: c}, sources: [{pluginRef: multicluster-metrics-data-source, extractors: [{pluginRef: multicluster-metrics-extractor}]}]}\n",
		"metrics https:/metrics"+rest+"; file c.yaml watch=false clusters"+averages)
}

func TestClusterPlanRefuses(t *testing.T) {
	f := func(t *testing.T, yaml string, want ...string) {
		t.Helper()
		p, err := planFor(t, yaml, configs.DefaultSettings().Scrape)
		if err == nil {
			t.Errorf("%s\ngot %s, want an error with %q", yaml, p.sketch(), want)
			return
		}
		for _, part := range want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s\ngot\n%v\nwant %q in it", yaml, err, part)
			}
		}
	}
	f(t, clusterPlan("scheme: ftp", ""), `"ftp" is no scheme`)
	f(t, clusterPlan("port: 0", ""), "0 is no port")
	f(t, clusterPlan("interval: 1m", ""), "longer than scrape.staleness")
	f(t, clusterPlan("caCertPath: /nope", ""), "parameters.caCertPath: open /nope")
	f(t, clusterPlan("", "queueSizeMetric: ''"), "parameters.queueSizeMetric: queueSizeMetric is empty (name a metric)")
	f(t, clusterPlan("", "kvCacheUtilizationMetric: 'm{a=b'"), "parameters.kvCacheUtilizationMetric: the closing brace is missing")
	f(t, clusterPlan("", "x: 1"), "parameters.x: unknown field")
	const both = "dataLayer: {sources: [{pluginRef: multicluster-metrics-data-source, extractors: [{pluginRef: multicluster-metrics-extractor}]}, {pluginRef: metrics-data-source}]}\n"
	f(t, both, `sources[1].pluginRef: "metrics-data-source" is a second metrics-data-source, beside "multicluster-metrics-data-source"`)
	f(t, "plugins: [{type: multicluster-metrics-data-source}, {type: multicluster-metrics-extractor}]\n",
		`plugins[0]: "multicluster-metrics-data-source" is bound to nothing (name it in dataLayer.sources)`, `plugins[1]: "multicluster-metrics-extractor" is bound to nothing`)
	f(t, "plugins: [{type: metrics-data-source}, {type: core-metrics-extractor}]\ndataLayer: {sources: [{pluginRef: multicluster-metrics-data-source, extractors: [{pluginRef: multicluster-metrics-extractor}]}]}\n",
		`plugins[0]: "metrics-data-source" has no effect (remove it`, `plugins[1]: "core-metrics-extractor" has no effect`)
	f(t, "dataLayer: {sources: [{pluginRef: multicluster-metrics-data-source}]}\n", `sources[0]: "multicluster-metrics-data-source" has no extractor (declare a multicluster-metrics-extractor`)
	f(t, "plugins: [{type: core-metrics-extractor, name: x}]\ndataLayer: {sources: [{pluginRef: multicluster-metrics-data-source, extractors: [{pluginRef: x}]}]}\n", `"x" is a core-metrics-extractor (name an extractor: multicluster-metrics-extractor)`)
	const files = "plugins:\n- {type: file-discovery, parameters: {path: a}}\n- {type: multicluster-file-discovery, parameters: {path: b}}\n"
	f(t, files, `plugins[1]: "multicluster-file-discovery" is a second source of endpoints, beside "file-discovery"`)
	f(t, files+"dataLayer: {discovery: {pluginRef: multicluster-file-discovery}}\n", `plugins[0]: "file-discovery" has no effect`)
	f(t, "plugins: [{type: multicluster-file-discovery}]\n", "parameters.path: missing")
}

func TestMetricsPlace(t *testing.T) {
	f := func(address, port, want string) {
		t.Helper()
		labels := map[string]string{metricsAddressLabel: address, metricsPortLabel: port}
		host, p, err := metricsPlace(func(key string) (string, bool) { v, ok := labels[key]; return v, ok })
		if got := fmt.Sprint(host, "|", p, "|", err); !strings.Contains(got, want) {
			t.Errorf("%q %q: got %s, want %s", address, port, got, want)
		}
	}
	f("", "", "||<nil>")
	f("10.0.0.1", "9090", "10.0.0.1|9090|<nil>")
	f("2001:db8::1", "", "2001:db8::1||<nil>")
	f("metrics.west.example", "65535", "metrics.west.example|65535|<nil>")
	f("http://x", "", `||the label metricsAddress has the value "http://x"`)
	f("x:9090", "", "the label metricsAddress")
	f("fe80::1%eth0", "", "the label metricsAddress")
	f("300.0.0.1", "", "the label metricsAddress")
	f(".west", "", "the label metricsAddress")
	f("", "0", `the label metricsPort has the value "0"`)
	f("", "65536", "the label metricsPort")
	f("", "http", "the label metricsPort")
}

// averages is the page of a cluster.
func averages(queue, usage float64) answer {
	return body(fmt.Sprintf("# TYPE llm_d_epp_average_queue_size gauge\nllm_d_epp_average_queue_size{name=\"p\"} %v\nllm_d_epp_average_kv_cache_utilization{name=\"p\"} %v\n"+
		"vllm:num_requests_waiting 99\n", queue, usage))
}

// clustersFile is a file of one cluster.
func clustersFile(s *stub, labels string) string {
	host, port, _ := net.SplitHostPort(s.address)
	return "endpoints:\n- {name: west, address: " + host + ", port: \"" + port + "\", labels: {" + labels + "}}\n"
}

// TestClusterMetrics: the averages are read where the labels say, which may change;
// that the cluster takes requests is what its gateway says.
func TestClusterMetrics(t *testing.T) {
	serving, first, second := newStub(t), newStub(t), newStub(t)
	serving.on("/v1/models", models("m"))
	serving.on("/health", body(`{"status":"ok"}`))
	first.on("/metrics", averages(1.5, 0.25))
	second.on("/metrics", averages(7, 0.75))
	place := func(s *stub) string {
		_, port, _ := net.SplitHostPort(s.address)
		return `metricsAddress: localhost, metricsPort: "` + port + `"`
	}
	file := filepath.Join(t.TempDir(), "clusters.yaml")
	write(t, file, clustersFile(serving, place(first)))
	plan := strings.Replace(clusterPlan("scheme: http", ""), "plugins:\n", "plugins:\n- {type: multicluster-file-discovery, parameters: {path: "+file+"}}\n", 1)
	r := newRig(t, rigOptions{scheduling: plan})
	r.begin(t)
	e := r.endpoint(t, "west")
	if o := e.Observation(); o == nil || o.Waiting != 1.5 || o.KVUsage != 0.25 {
		t.Fatalf("got %+v, want the averages", o)
	}
	write(t, file, clustersFile(serving, place(second)))
	r.reread(context.Background(), sourceDiscovery)
	eventually(t, "the averages of the other place", func() bool { o := e.Observation(); return o.Waiting == 7 && o.KVUsage == 0.75 })
	if r.endpoint(t, "west") != e {
		t.Error("got another endpoint, want the same with other labels")
	}
	write(t, file, clustersFile(serving, `metricsPort: "x"`))
	if err := r.Reload(&r.settings, mustPlan(t, plan, r.settings.Scrape)); err == nil || !strings.Contains(err.Error(), `clusters.yaml:2:`) || !strings.Contains(err.Error(), `endpoints[0].labels: the label metricsPort has the value "x"`) {
		t.Errorf("got %v, want the label and its line", err)
	}
	serving.on("/health", status(503))
	eventually(t, "down", func() bool { return r.fleet.State(e) == routing.Down })
}

// TestClusterLabelsElsewhere: what a source without a check says is warned about.
func TestClusterLabelsElsewhere(t *testing.T) {
	s := newStub(t)
	s.on("/v1/models", models("m"))
	s.on("/metrics", averages(3, 0))
	r := newRig(t, rigOptions{scheduling: clusterPlan("scheme: http", "")})
	r.begin(t)
	if err := r.Add(routing.EndpointSpec{Name: "west", URL: s.url(), Labels: map[string]string{metricsPortLabel: "x"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the averages from where the traffic goes", func() bool { o := r.endpoint(t, "west").Observation(); return o != nil && o.Waiting == 3 })
	if got := r.said("the metrics of the cluster are read where its traffic goes"); got != 1 {
		t.Errorf("got %d warnings, want 1", got)
	}
}

// TestClusterWithoutAverages: the page of a gateway that does not serve them.
func TestClusterWithoutAverages(t *testing.T) {
	s := newStub(t)
	s.on("/v1/models", models("m"))
	s.on("/metrics", load(4, 0, 0))
	r := newRig(t, rigOptions{replicas: []string{"a=" + s.url()}, scheduling: clusterPlan("scheme: http", ""), set: func(s *configs.Settings) { s.Scrape.Interval = time.Second }})
	r.begin(t)
	if o := r.endpoint(t, "a").Observation(); o != nil {
		t.Errorf("got %+v, want nothing of a page without averages", o)
	}
	logs := r.logs.FilterMessage("cannot read the metrics of the replica").All()
	if len(logs) != 1 || !strings.Contains(fmt.Sprint(logs[0].ContextMap()["error"]), "admin.llm_d_metrics") {
		t.Errorf("got %v, want one warning that names admin.llm_d_metrics", logs)
	}
}

// TestClusterKeys: the metrics are asked for with a key of their own, all else with the cluster's.
func TestClusterKeys(t *testing.T) {
	f := func(t *testing.T, labels map[string]string, wantMetrics, wantModels string) {
		t.Helper()
		serving, metrics := newStub(t), newStub(t)
		serving.on("/v1/models", models("m"))
		metrics.on("/metrics", averages(1, 0))
		_, port, _ := net.SplitHostPort(metrics.address)
		labels[metricsPortLabel] = port
		r := newRig(t, rigOptions{scheduling: clusterPlan("scheme: http", ""), set: func(s *configs.Settings) {
			s.Replicas = []configs.Replica{{Name: "west", URL: serving.url(), Labels: labels}}
		}})
		r.begin(t)
		if o := r.endpoint(t, "west").Observation(); o == nil || o.Waiting != 1 {
			t.Fatalf("got %+v, want the averages", o)
		}
		for s, want := range map[*stub]string{serving: wantModels, metrics: wantMetrics} {
			for _, head := range s.allHeads() {
				if got := strings.Contains(head, "Authorization: Bearer "); got != (want != "") || !strings.Contains(head, want) {
					t.Errorf("%v: got request %q, want %q in it", labels, head, want)
				}
			}
		}
	}
	dir := t.TempDir()
	file := func(name string) string {
		write(t, filepath.Join(dir, name), "key-of-"+name+"\n")
		return filepath.Join(dir, name)
	}
	west, page := file("west"), file("page")
	f(t, map[string]string{}, "", "")
	f(t, map[string]string{"kvgate.io/api-key-file": west}, "Bearer key-of-west\n", "Bearer key-of-west\n")
	f(t, map[string]string{"kvgate.io/metrics-key-file": page}, "Bearer key-of-page\n", "")
	f(t, map[string]string{"kvgate.io/api-key-file": west, "kvgate.io/metrics-key-file": page}, "Bearer key-of-page\n", "Bearer key-of-west\n")
	r := newRig(t, rigOptions{scheduling: clusterPlan("scheme: http", "")})
	next := r.settings
	next.Replicas = []configs.Replica{{Name: "west", URL: "http://h:1", Labels: map[string]string{"kvgate.io/metrics-key-file": filepath.Join(dir, "nope")}}}
	if err := r.Reload(&next, mustPlan(t, clusterPlan("scheme: http", ""), next.Scrape)); err == nil || !strings.Contains(err.Error(), "metrics_key_file") {
		t.Errorf("got %v, want an error that names metrics_key_file", err)
	}
}
