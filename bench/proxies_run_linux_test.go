package bench

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvgate/bench/fakevllm"
)

// The stand-in for the kvgate binary: a script that runs this test binary,
// which plays a replica (bench fakevllm) or a plain reverse proxy (serve).
func standIn(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(t.TempDir(), "stand-in")
	text := fmt.Sprintf("#!/bin/sh\nKVGATE_STAND_IN=1 exec '%s' -test.run '^TestStandIn$' -- \"$@\"\n", self)
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return script
}

func TestStandIn(t *testing.T) {
	if os.Getenv("KVGATE_STAND_IN") == "" {
		t.Skip("it is a program for the other tests")
	}
	args := os.Args[slices.Index(os.Args, "--")+1:]
	values := func(flag string) (out []string) {
		for i, a := range args[1:] {
			if args[i] == flag {
				out = append(out, a)
			}
		}
		return out
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if args[0] == "bench" {
		if err := fakevllm.Run(ctx, fakevllm.Options{Listen: values("--listen")[0], Instant: true}, nil); err != nil {
			t.Fatal(err)
		}
		return
	}
	target, err := url.Parse(values("--replica")[0])
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.FlushInterval = -1
	fmt.Println(strings.Repeat("talks too much ", maxLog/10))
	go func() { _ = http.ListenAndServe(values("--listen")[0], proxy) }()
	if slices.Contains(args, "--admin-pprof") {
		admin := http.NewServeMux()
		admin.HandleFunc("/debug/pprof/profile", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("profile")) })
		go func() { _ = http.ListenAndServe(values("--admin-listen")[0], admin) }()
	}
	<-ctx.Done()
}

func TestRunProxies(t *testing.T) {
	binary := standIn(t)
	dir := t.TempDir()
	var progress strings.Builder
	o := ProxyOptions{
		KVGate: []string{binary}, Replica: binary, Systems: []string{sysKVGate}, Upstreams: 2,
		Rounds: 2, Duration: 500 * time.Millisecond, Warmup: 20 * time.Millisecond,
		Cells:    regexp.MustCompile("^(plain-1k|memory-512k)$"),
		Profiles: filepath.Join(dir, "profiles"), KeepDir: filepath.Join(dir, "run"), Command: "kvgate bench proxy", Progress: &progress,
	}
	r, err := RunProxies(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	f := func(cell, system string, wantSamples int, wantUse bool) {
		x := r.row(cell, system)
		if x == nil {
			t.Errorf("%s, %s: got no row, want one", cell, system)
			return
		}
		if x.Error != "" || len(x.Samples) != wantSamples {
			t.Errorf("%s, %s: got %d samples, error %q, want %d, none", cell, system, len(x.Samples), x.Error, wantSamples)
		}
		if got := x.CPU.Min > 0 && x.PeakRSS.Min > 1; got != wantUse {
			t.Errorf("%s, %s: got CPU %v, memory %v, want some: %v", cell, system, x.CPU, x.PeakRSS, wantUse)
		}
		if x.Throughput.Min <= 0 || x.P50.Min <= 0 {
			t.Errorf("%s, %s: got throughput %v, p50 %v, want some", cell, system, x.Throughput, x.P50)
		}
	}
	f("plain-1k", sysDirect, 2, false)
	f("plain-1k", sysKVGate, 2, true)
	f(cellMemory, sysKVGate, 2, true)
	if got := r.row(cellMemory, sysDirect); got != nil {
		t.Errorf("got a row of direct's memory, want none: %+v", got)
	}
	if got, err := os.ReadFile(filepath.Join(o.Profiles, "kvgate-plain-1k.pprof")); string(got) != "profile" {
		t.Errorf("got profile %q, %v, want one", got, err)
	}
	if len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "kvgate wrote ") {
		t.Errorf("notes: got %q, want one about the log", r.Notes)
	}
	if got, want := strings.Count(progress.String(), "\n"), 6; got != want {
		t.Errorf("progress: got %d lines, want %d:\n%s", got, want, progress.String())
	}
	if _, err := os.Stat(filepath.Join(dir, "run", "replica-0.log")); err != nil {
		t.Errorf("got %v, want the logs kept", err)
	}
}

func TestRunProxiesFails(t *testing.T) {
	binary := standIn(t)
	f := func(t *testing.T, change func(*ProxyOptions), want string) {
		o := validProxyOptions()
		o.KVGate, o.Replica, o.Systems, o.Duration = []string{binary}, binary, []string{sysKVGate}, 100*time.Millisecond
		change(&o)
		_, err := RunProxies(t.Context(), o)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	t.Run("options", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.Rounds = 0 }, "rounds 0") })
	t.Run("no replica", func(t *testing.T) {
		f(t, func(o *ProxyOptions) { o.Replica = "/bin/false" }, "replica-0 has ended (exit status 1)")
	})
	t.Run("no replica program", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.Replica = "/absent/kvgate" }, "no such file") })
	t.Run("kvgate ends", func(t *testing.T) {
		f(t, func(o *ProxyOptions) { o.KVGate = []string{"/bin/false"} }, "kvgate has ended")
	})
	t.Run("kvgate absent", func(t *testing.T) {
		f(t, func(o *ProxyOptions) { o.KVGate = []string{"/absent/kvgate"} }, "kvgate is not installed")
	})
	t.Run("no folder", func(t *testing.T) { f(t, func(o *ProxyOptions) { o.KeepDir = "/dev/null/x" }, "not a directory") })
}

// A peer that is not there is left out, and named.
func TestRunProxiesSkips(t *testing.T) {
	binary := standIn(t)
	o := validProxyOptions()
	o.KVGate, o.Replica, o.Duration, o.Cells = []string{binary}, binary, 100*time.Millisecond, regexp.MustCompile("^plain-1k$")
	o.Systems, o.Tools = []string{sysKVGate, sysVLLM}, t.TempDir()
	t.Setenv("PATH", "/usr/bin:/bin")
	r, err := RunProxies(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Systems; !slices.Equal(got, []string{sysDirect, sysKVGate}) {
		t.Errorf("systems: got %q, want direct and kvgate", got)
	}
	if len(r.Skipped) != 1 || !strings.Contains(r.Skipped[0], "vllm-router is not installed") {
		t.Errorf("skipped: got %q, want vllm-router", r.Skipped)
	}
}

func TestRunProxiesIsCanceled(t *testing.T) {
	binary := standIn(t)
	ctx, cancel := context.WithCancel(t.Context())
	o := validProxyOptions()
	o.KVGate, o.Replica, o.Duration, o.Systems = []string{binary}, binary, time.Hour, []string{sysKVGate}
	o.Progress = writerFunc(func() { cancel() })
	o.Cells, o.Warmup = regexp.MustCompile("^plain-1k$|^open-1k$"), 0
	o.Duration = 100 * time.Millisecond
	o.Rounds = 1 << 20
	_, err := RunProxies(ctx, o)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}

type writerFunc func()

func (f writerFunc) Write(p []byte) (int, error) { f(); return len(p), nil }

func TestParseStat(t *testing.T) {
	const rest = " S 1 77 77 0 -1 4194560 100 200 0 0 11 22 33 44 20 0 1 0 999"
	f := func(t *testing.T, line string, want procStat, wantErr bool) {
		got, err := parseStat([]byte(line))
		if (err != nil) != wantErr {
			t.Fatalf("got error %v, want one: %v", err, wantErr)
		}
		if err == nil && got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	want := procStat{state: 'S', group: 77, children: 770 * time.Millisecond}
	t.Run("plain", func(t *testing.T) { f(t, "12 (nginx)"+rest, want, false) })
	t.Run("a name with everything", func(t *testing.T) { f(t, "12 (a) Z 1 (b c)"+rest, want, false) })
	t.Run("short", func(t *testing.T) { f(t, "12 (nginx) S 1 77", procStat{}, true) })
	t.Run("no number", func(t *testing.T) { f(t, "12 (nginx)"+strings.Replace(rest, "33", "x", 1), procStat{}, true) })
}

func TestParseStatus(t *testing.T) {
	f := func(t *testing.T, text string, want memory, wantErr bool) {
		got, err := parseStatus([]byte(text))
		if (err != nil) != wantErr {
			t.Fatalf("got error %v, want one: %v", err, wantErr)
		}
		if err == nil && got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	t.Run("both", func(t *testing.T) {
		f(t, "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n", memory{now: 1 << 20, peak: 2 << 20}, false)
	})
	t.Run("none", func(t *testing.T) { f(t, "Name:\tkthreadd\n", memory{}, true) })
	t.Run("no number", func(t *testing.T) { f(t, "VmHWM: x kB\nVmRSS: 1024 kB\n", memory{}, true) })
}

// The processor time of a group has that of its children: of those that live
// and of those that have been waited for.
func TestProcessGroup(t *testing.T) {
	dir := t.TempDir()
	burn := "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done"
	// One child burns and is waited for, another burns and stays.
	p, err := startProcess("burner", dir, []string{"WORDS=last words"}, "/bin/sh", "-c",
		"sh -c '"+burn+"'; sh -c '"+burn+"; echo $WORDS; touch ready; read x < fifo' & mkfifo fifo; wait")
	if err != nil {
		t.Fatal(err)
	}
	ready := func() error { _, err := os.Stat(filepath.Join(dir, "ready")); return err }
	if err := p.waitFor(t.Context(), time.Minute, ready); err != nil {
		t.Fatal(err)
	}
	pids, err := p.members()
	if err != nil || len(pids) != 2 {
		t.Fatalf("got members %v, %v, want the shell and one child", pids, err)
	}
	all, err := newCPUMeter(pids).total()
	if err != nil {
		t.Fatal(err)
	}
	child, err := newCPUMeter(pids[1:]).total()
	if err != nil {
		t.Fatal(err)
	}
	// The child that is gone burnt as much as the one that is here, counted in hundredths of a second.
	if child <= 0 || all-child <= child/4-10*time.Millisecond {
		t.Errorf("got %v of all, %v of one of two equal children, want about half", all, child)
	}
	if err := resetPeak(pids); err != nil {
		t.Fatal(err)
	}
	m, err := readMemory(pids)
	if err != nil || m.now <= 0 || m.peak < m.now {
		t.Errorf("got memory %+v, %v, want a peak of at least what is now", m, err)
	}
	state := func() byte {
		s, err := readStat(pids[0])
		if err != nil {
			t.Fatal(err)
		}
		return s.state
	}
	await := func(want byte) {
		for limit := time.Now().Add(10 * time.Second); state() != want; time.Sleep(time.Millisecond) {
			if time.Now().After(limit) {
				t.Fatalf("got state %c, want %c", state(), want)
			}
		}
	}
	p.pause()
	await('T')
	p.resume()
	await('S')
	if err := p.alive(); err != nil {
		t.Errorf("got %v, want it alive", err)
	}
	p.pause() // stop must wake it
	p.stop()
	if err := p.alive(); err == nil || !strings.Contains(err.Error(), "burner has ended") || !strings.Contains(err.Error(), "last words") {
		t.Errorf("got %v, want an error with the end of the log", err)
	}
	if got, err := p.members(); err != nil || len(got) != 0 {
		t.Errorf("got members %v, %v, want none", got, err)
	}
	if _, err := newCPUMeter(pids).total(); err == nil {
		t.Error("got the processor time of ended processes, want an error")
	}
	if _, err := readMemory(pids); err == nil {
		t.Error("got the memory of ended processes, want an error")
	}
	if err := resetPeak(pids); err == nil {
		t.Error("got the peak of ended processes reset, want an error")
	}
	if got := (&process{log: filepath.Join(dir, "absent")}).lastWords(); !strings.Contains(got, "no such file") {
		t.Errorf("got %q, want the reason why there is no log", got)
	}
	if _, err := startProcess("x", filepath.Join(dir, "absent"), nil, "/bin/true"); err == nil {
		t.Error("got a process without a folder, want an error")
	}
}

func TestWaitForEnds(t *testing.T) {
	no := errors.New("not yet")
	p, err := startProcess("sleeper", t.TempDir(), nil, "/bin/sh", "-c", "echo here; sleep 100")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.stop)
	err = p.waitFor(t.Context(), time.Millisecond, func() error { return no })
	if !errors.Is(err, no) || !strings.Contains(err.Error(), "sleeper did not serve") {
		t.Errorf("got %v, want that it did not serve", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err = p.waitFor(ctx, time.Hour, func() error { cancel(); return no })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}
