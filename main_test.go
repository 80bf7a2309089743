package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"kvgate/bench/fakevllm"
	"kvgate/configs"
	"kvgate/routing"
)

// TestMain lets the test binary be kvgate itself, for the tests that need a process.
func TestMain(m *testing.M) {
	if os.Getenv("KVGATE_TEST_AS_MAIN") != "" {
		_ = os.Unsetenv("KVGATE_TEST_AS_MAIN")
		main()
	}
	goleak.VerifyTestMain(m)
}

// command runs one command line.
func command(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = run(context.Background(), args, &out, &errs)
	return status, out.String(), errs.String()
}

func writeTemp(t *testing.T, name, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestExitStatusAndMessages(t *testing.T) {
	broken := writeTemp(t, "scheduling.yaml", "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: queue-scorr\n- type: prefix-cache-scorer\n  parameters: {matchLengthWeight: 7}\n")
	settings := writeTemp(t, "settings.yaml", "upstream:\n  idle_timout: 3s\nscrape:\n  interval: 60s\n")
	request := writeTemp(t, "request.json", `{"model":"m","messages":[]}`)
	fleet := writeTemp(t, "fleet.json", `{"time":"2026-01-01T00:00:00Z","replicas":[{"name":"a","url":"http://a:1","state":"ready","waiting":0,"running":0,"kv_usage":0,"age_s":0,"match":3}]}`)
	f := func(wantStatus int, want string, args ...string) {
		t.Helper()
		status, out, errs := command(t, args...)
		if status != wantStatus || !strings.Contains(out+errs, want) {
			t.Errorf("kvgate %s: status %d\n%s%s\nwant status %d and %q", strings.Join(args, " "), status, out, errs, wantStatus, want)
		}
	}
	f(0, "kvgate", "version")
	f(0, `"version"`, "version", "--output", "json")
	f(2, "use table or json", "version", "--output", "xml")
	f(2, "unknown command", "srve")
	f(2, "--replicca", "serve", "--replicca", "x")
	f(0, "The configuration is valid.", "check")
	f(0, "flag --listen", "check", "--listen", ":9")
	f(0, `"ok": true`, "check", "--output", "json")
	f(1, "queue-scorr", "check", "--scheduling", broken)
	f(1, "matchLengthWeight", "check", "--scheduling", broken) // both problems at once
	f(1, "idle_timout", "check", "--config", settings)
	f(1, "scrape.staleness", "check", "--config", settings)
	f(1, "scheduling.yaml:4", "serve", "--scheduling", broken)
	f(1, "no such file", "serve", "--config", "/nonexistent/kvgate.yaml")
	f(1, "listen", "serve", "--listen", "256.0.0.1:1", "--log-level", "error")
	f(2, "no input file", "explain")
	f(2, "goes with --fleet", "explain", "-f", request, "--scheduling", broken)
	f(1, "is outside the prompt's", "explain", "-f", request, "--fleet", fleet)
	f(1, "set --admin", "explain", "-f", request, "--admin", "http://127.0.0.1:1")
	f(1, "not one that kvgate serves", "explain", "-f", request, "--fleet", fleet, "--path", "/v2/nothing")
	f(2, "--replicas 0", "bench", "fakevllm", "--replicas", "0")
	f(2, "--listen", "bench", "fakevllm", "--listen", "nonsense")
	f(2, "--faults", "bench", "fakevllm", "--faults", "{")
	f(1, "refused", "healthcheck", "--url", "http://127.0.0.1:1/readyz")
	f(2, "rate 0", "bench", "routing", "--rate", "0")
	f(1, "neither one of", "bench", "routing", "--trace", "hot-burst", "--rate", "0.01", "--compare", "nobody")
}

func TestExplainSavedFleet(t *testing.T) {
	prompt := strings.Repeat("x", 5*256-len("user"))
	request := writeTemp(t, "request.json", `{"model":"m","messages":[{"role":"user","content":"`+prompt+`"}]}`)
	fleet := writeTemp(t, "fleet.json", `{"time":"2026-01-01T00:00:00Z","replicas":[
		{"name":"A","url":"http://a:1","state":"ready","models":["m"],"waiting":4,"running":0,"kv_usage":0.7,"age_s":0.1,"in_flight":0,"awaiting":0,"match":5},
		{"name":"B","url":"http://b:1","state":"ready","models":["m"],"waiting":0,"running":0,"kv_usage":0.2,"age_s":0.1,"in_flight":0,"awaiting":0,"match":3},
		{"name":"C","url":"http://c:1","state":"ready","models":["m"],"waiting":9,"running":0,"kv_usage":0.1,"age_s":0.1,"in_flight":0,"awaiting":0,"match":0}]}`)
	status, out, errs := command(t, "explain", "-f", request, "--fleet", fleet)
	if status != 0 {
		t.Fatalf("status %d: %s", status, errs)
	}
	for _, want := range []string{"4.711", "5.400", "1.800", "winner: B (load_spill)", "5/5", "3/5", "0/5"} {
		if !strings.Contains(out, want) {
			t.Errorf("output lacks %q:\n%s", want, out)
		}
	}
	status, out, errs = command(t, "explain", "-f", request, "--fleet", fleet, "--output", "json")
	var ex routing.Explanation
	if err := json.Unmarshal([]byte(out), &ex); status != 0 || err != nil {
		t.Fatalf("status %d, %v: %s", status, err, errs)
	}
	if ex.Winner != "B" || ex.Total != 5 || ex.BlockTokens != 64 || len(ex.Replicas) != 3 {
		t.Errorf("got %+v, want winner B of 3 replicas, 5 blocks of 64", ex)
	}
}

// testGateway starts a gateway in front of replicas on free ports.
func testGateway(t testing.TB, change func(s *configs.Settings), replicas ...*fakevllm.Server) *gateway {
	t.Helper()
	load := func() (*configs.Loaded, error) {
		s := configs.DefaultSettings()
		s.Listen, s.AdminListen, s.Log.Access = "127.0.0.1:0", "127.0.0.1:0", false
		for _, r := range replicas {
			replica, err := configs.Replica{URL: r.URL()}.Normalize()
			if err != nil {
				return nil, err
			}
			s.Replicas = append(s.Replicas, replica)
		}
		if change != nil {
			change(&s)
		}
		return &configs.Loaded{Settings: s}, nil
	}
	g, err := newGateway(load, zap.NewNop(), zap.NewAtomicLevel())
	if err != nil {
		t.Fatal(err)
	}
	g.start(context.Background())
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := g.stop(ctx); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := g.scraper.WaitFirst(ctx); err != nil {
		t.Fatal(err)
	}
	return g
}

func testReplica(t *testing.T) *fakevllm.Server {
	t.Helper()
	r, err := fakevllm.Start(fakevllm.Options{Models: []string{"m"}, Speed: 50, OutputTokens: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func post(t *testing.T, url, body string) (int, string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(data)
}

func TestGatewayServesAndExplains(t *testing.T) {
	g := testGateway(t, nil, testReplica(t), testReplica(t))
	request := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("hello ", 200) + `"}],"max_tokens":2}`
	if code, body := post(t, g.dataURL()+"/v1/chat/completions", request); code != 200 || !strings.Contains(body, `"usage"`) {
		t.Errorf("chat: %d %s, want 200 with usage", code, body)
	}
	if code, body := get(t, g.dataURL()+"/v1/models"); code != 200 || !strings.Contains(body, `"id":"m"`) {
		t.Errorf("models: %d %s, want 200 with m", code, body)
	}
	file := writeTemp(t, "request.json", request)
	status, out, errs := command(t, "explain", "-f", file, "--admin", adminURL(g))
	if status != 0 || !strings.Contains(out, "winner:") || !strings.Contains(out, "prefix_hit") {
		t.Errorf("explain: status %d\n%s%s\nwant a prefix_hit", status, out, errs)
	}
	if status, _, errs := command(t, "healthcheck", "--url", g.dataURL()+"/readyz"); status != 0 {
		t.Errorf("healthcheck: status %d %s, want 0", status, errs)
	}
	code, body := get(t, adminURL(g)+"/metrics")
	for _, want := range []string{"kvgate_http_requests_total", "kvgate_build_info", "go_goroutines", "kvgate_scrapes_total"} {
		if code != 200 || !strings.Contains(body, want) {
			t.Errorf("metrics: %d without %s", code, want)
		}
	}
}

func TestReloadIsAllOrNothing(t *testing.T) {
	scheduling := writeTemp(t, "scheduling.yaml", "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: random-picker}]\n")
	g := testGateway(t, func(s *configs.Settings) { s.Scheduling = scheduling }, testReplica(t))
	router := g.router.Load()
	if err := os.WriteFile(scheduling, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	code, body := post(t, adminURL(g)+"/-/reload", "")
	if code != 500 || !strings.Contains(body, "scheduling.yaml") {
		t.Errorf("reload of a broken file: %d %s, want 500 that names the file", code, body)
	}
	if g.router.Load() != router {
		t.Error("a failed reload has replaced the router")
	}
	if _, metrics := get(t, adminURL(g)+"/metrics"); !strings.Contains(metrics, "kvgate_config_last_reload_success 0") {
		t.Error("kvgate_config_last_reload_success is not 0 after a failed reload")
	}
	if err := os.WriteFile(scheduling, []byte("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, body := post(t, adminURL(g)+"/-/reload", ""); code != 200 {
		t.Errorf("reload: %d %s, want 200", code, body)
	}
	if g.router.Load() == router {
		t.Error("a reload has not replaced the router")
	}
	if _, metrics := get(t, adminURL(g)+"/metrics"); !strings.Contains(metrics, "kvgate_config_last_reload_success 1") {
		t.Error("kvgate_config_last_reload_success is not 1 after a reload")
	}
}

func TestDemoOnce(t *testing.T) {
	status, out, errs := command(t, "demo", "--once", "--conversations", "4", "--replicas", "2", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--output", "json")
	var report demoReport
	if err := json.Unmarshal([]byte(out), &report); status != 0 || err != nil {
		t.Fatalf("status %d, %v: %s %s", status, err, out, errs)
	}
	if report.KVGate.Requests == 0 || report.KVGate.Errors != 0 || report.KVGate.HitRate <= report.RoundRobin.HitRate {
		t.Errorf("kvgate %+v, round robin %+v: want more hits and no error", report.KVGate, report.RoundRobin)
	}
}

func TestNotifier(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	n := newNotifier(func(key string) string {
		if key == "NOTIFY_SOCKET" {
			return socket
		}
		return ""
	})
	read := func() string {
		t.Helper()
		buf := make([]byte, 512)
		k, err := conn.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		return string(buf[:k])
	}
	if err := n.send("READY=1", "STATUS=fine"); err != nil {
		t.Fatal(err)
	}
	if got := read(); got != "READY=1\nSTATUS=fine" {
		t.Errorf("got %q, want READY=1 and STATUS=fine", got)
	}
	if err := n.reloading(); err != nil {
		t.Fatal(err)
	}
	if got := read(); !strings.HasPrefix(got, "RELOADING=1\nMONOTONIC_USEC=") {
		t.Errorf("got %q, want RELOADING=1 with MONOTONIC_USEC in one datagram", got)
	}
	if err := (notifier{}).send("READY=1"); err != nil {
		t.Errorf("without a socket: %v, want nothing to happen", err)
	}
	if err := (notifier{socket: "/nonexistent/notify"}).send("READY=1"); err == nil {
		t.Error("a socket that is not there: no error")
	}
}

func TestWatchdogInterval(t *testing.T) {
	f := func(usec, pid string, want time.Duration) {
		t.Helper()
		env := map[string]string{"WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}
		if got := watchdogInterval(func(k string) string { return env[k] }, 42); got != want {
			t.Errorf("WATCHDOG_USEC=%s WATCHDOG_PID=%s: %v, want %v", usec, pid, got, want)
		}
	}
	f("15000000", "42", 7500*time.Millisecond)
	f("15000000", "", 7500*time.Millisecond)
	f("15000000", "43", 0)
	f("", "", 0)
	f("-1", "", 0)
	f("x", "", 0)
}

func TestReadyURL(t *testing.T) {
	f := func(listen, want string) {
		t.Helper()
		s := configs.DefaultSettings()
		s.Listen = listen
		got, err := readyURL(&s)
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%s: %s, want %s", listen, got, want)
		}
	}
	f(":8080", "http://127.0.0.1:8080/readyz")
	f("0.0.0.0:80", "http://127.0.0.1:80/readyz")
	f("[::]:80", "http://127.0.0.1:80/readyz")
	f("10.0.0.1:80", "http://10.0.0.1:80/readyz")
	f("nonsense", "error")
}

// process is kvgate as a process of its own.
type process struct {
	cmd   *exec.Cmd
	log   *lockedBuffer
	data  string
	ended chan error
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// startProcess starts kvgate serve and waits until it is ready.
func startProcess(t *testing.T, args ...string) *process {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := listener.Addr().String()
	_ = listener.Close()
	p := &process{log: &lockedBuffer{}, data: "http://" + addr, ended: make(chan error, 1)}
	p.cmd = exec.Command(os.Args[0], append([]string{"serve", "--listen", addr, "--admin-listen", "", "--log-format", "json"}, args...)...)
	p.cmd.Env = append(os.Environ(), "KVGATE_TEST_AS_MAIN=1")
	p.cmd.Stderr = p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.ended <- p.cmd.Wait() }()
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			_ = p.cmd.Process.Kill()
		}
	})
	until(t, "ready", func() bool {
		resp, err := http.Get(p.data + "/readyz")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	http.DefaultClient.CloseIdleConnections()
	return p
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("never came: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// openStream sends a streamed request and returns a reader behind its first event.
func openStream(t *testing.T, base string) *bufio.Reader {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(base+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	r := bufio.NewReader(resp.Body)
	if line, err := r.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: ") {
		t.Fatalf("first event %q, %v", line, err)
	}
	return r
}

// slowReplica streams 20 events, one every 100 ms.
func slowReplica(t *testing.T) *fakevllm.Server {
	t.Helper()
	r, err := fakevllm.Start(fakevllm.Options{Models: []string{"m"}, Instant: true, Faults: fakevllm.Faults{Chunks: 20, ChunkInterval: fakevllm.Duration(100 * time.Millisecond)}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

func TestSIGTERMFinishesStreamsAndTakesNoMore(t *testing.T) {
	p := startProcess(t, "--replica", slowReplica(t).URL())
	stream := openStream(t, p.data)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	until(t, "new requests are turned away", func() bool {
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Get(p.data + "/readyz")
		if err != nil {
			return true // refused
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusServiceUnavailable
	})
	rest, err := io.ReadAll(stream)
	if err != nil || !strings.Contains(string(rest), "data: [DONE]") {
		t.Errorf("the open stream ended with %v and %q, want it whole", err, rest)
	}
	if err := <-p.ended; err != nil {
		t.Errorf("exit: %v, want status 0\n%s", err, p.log)
	}
}

func TestSecondSignalEndsAtOnce(t *testing.T) {
	p := startProcess(t, "--replica", slowReplica(t).URL())
	stream := openStream(t, p.data)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	until(t, "draining", func() bool { return strings.Contains(p.log.String(), "draining") })
	if err := p.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(stream)
	if err == nil || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("the cut stream ended with %v and %q, want a broken transport", err, rest)
	}
	_ = <-p.ended // the status does not matter
}

func TestDrainDeadlineCutsStreams(t *testing.T) {
	p := startProcess(t, "--replica", slowReplica(t).URL(), "--drain-timeout", "200ms")
	stream := openStream(t, p.data)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(stream)
	if err == nil || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("the stream ended with %v and %q, want a broken transport at the deadline", err, rest)
	}
	if err := <-p.ended; err != nil {
		t.Errorf("exit: %v, want status 0\n%s", err, p.log)
	}
}

func TestSIGHUPKeepsStreams(t *testing.T) {
	scheduling := writeTemp(t, "scheduling.yaml", "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: random-picker}]\n")
	p := startProcess(t, "--replica", slowReplica(t).URL(), "--scheduling", scheduling)
	stream := openStream(t, p.data)
	for _, want := range []string{"configuration reloaded", "reload failed"} {
		if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		until(t, want, func() bool { return strings.Contains(p.log.String(), want) })
		if err := os.WriteFile(scheduling, []byte("plugins: [{type: random-picker, weight: -1}]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	rest, err := io.ReadAll(stream)
	if err != nil || !strings.Contains(string(rest), "data: [DONE]") {
		t.Errorf("the open stream ended with %v and %q, want it whole", err, rest)
	}
}
