package bench

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"kvgate/bench/fakevllm"
)

func loadTarget(t *testing.T, o fakevllm.Options) (netip.AddrPort, *fakevllm.Server) {
	t.Helper()
	o.Instant = true
	s, err := fakevllm.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return netip.MustParseAddrPort(s.Addr()), s
}

func TestLoad(t *testing.T) {
	prompts := newPromptSet(2<<10, 4, mixWarm, false, 1)
	streams := newPromptSet(2<<10, 4, mixWarm, true, 1)
	large := newPromptSet(512<<10, 2, mixWarm, false, 1)
	f := func(t *testing.T, o fakevllm.Options, spec loadSpec, wantFailures bool, wantFailure string) *loadResult {
		a, _ := loadTarget(t, o)
		b, _ := loadTarget(t, o)
		marks := ""
		spec.targets = []netip.AddrPort{a, b}
		spec.mark = func(end bool) { marks += map[bool]string{false: "(", true: ")"}[end] }
		if spec.duration == 0 {
			spec.warmup, spec.duration = 20*time.Millisecond, 100*time.Millisecond
		}
		r, err := runLoad(t.Context(), spec)
		if err != nil {
			t.Fatalf("got %v, want no error", err)
		}
		// A load that fails fast enough is given up before its window ends.
		if marks != "()" && !(wantFailures && marks == "(") {
			t.Errorf("marks: got %q, want ()", marks)
		}
		if got := r.failures > 0; got != wantFailures || !strings.Contains(r.failure, wantFailure) {
			t.Errorf("got %d failures, %q, want some: %v, %q", r.failures, r.failure, wantFailures, wantFailure)
		}
		if wantFailures {
			return r
		}
		if !spec.hold && (r.requests == 0 || len(r.latencies) == 0) {
			t.Errorf("got %d requests, %d latencies, want some", r.requests, len(r.latencies))
		}
		if r.elapsed < spec.duration {
			t.Errorf("window: got %v, want at least %v", r.elapsed, spec.duration)
		}
		return r
	}
	t.Run("closed", func(t *testing.T) { f(t, fakevllm.Options{}, loadSpec{prompts: prompts, conns: 4}, false, "") })
	t.Run("large", func(t *testing.T) { f(t, fakevllm.Options{}, loadSpec{prompts: large, conns: 4}, false, "") })
	t.Run("open", func(t *testing.T) {
		r := f(t, fakevllm.Options{}, loadSpec{prompts: prompts, conns: 2, rate: 250, warmup: 20 * time.Millisecond, duration: 200 * time.Millisecond}, false, "")
		// Due at 0, 4 ms, 8 ms ...: those from 20 ms on and before 220 ms, however slow the machine.
		if got := len(r.latencies); got != 50 {
			t.Errorf("got %d latencies, want 50", got)
		}
	})
	burst := fakevllm.Faults{Chunks: 10}
	t.Run("streams", func(t *testing.T) {
		r := f(t, fakevllm.Options{Faults: burst}, loadSpec{prompts: streams, conns: 4, stream: true, events: 13}, false, "")
		if r.events < r.requests {
			t.Errorf("got %d events of %d streams, want more", r.events, r.requests)
		}
	})
	t.Run("held", func(t *testing.T) {
		endless := fakevllm.Faults{Chunks: 1 << 20, ChunkInterval: fakevllm.Duration(5 * time.Millisecond)}
		r := f(t, fakevllm.Options{Faults: endless}, loadSpec{prompts: streams, conns: 30, stream: true, hold: true,
			warmup: 100 * time.Millisecond, duration: 300 * time.Millisecond}, false, "")
		if r.open != 30 || r.requests != 0 {
			t.Errorf("got %d open streams, %d complete, want 30, 0", r.open, r.requests)
		}
	})
	t.Run("too few events", func(t *testing.T) {
		f(t, fakevllm.Options{Faults: burst}, loadSpec{prompts: streams, conns: 4, stream: true, events: 14}, true, "a stream of 13 events, 14 were expected")
	})
	t.Run("errors", func(t *testing.T) {
		f(t, fakevllm.Options{Faults: fakevllm.Faults{Status: 500}}, loadSpec{prompts: prompts, conns: 1,
			duration: 50 * time.Millisecond}, true, "500 Internal Server Error")
	})
	t.Run("cut answers", func(t *testing.T) {
		f(t, fakevllm.Options{Faults: fakevllm.Faults{Break: fakevllm.BreakClose, BreakAfter: 1}}, loadSpec{prompts: prompts, conns: 1,
			duration: 50 * time.Millisecond}, true, errHungUp.Error())
	})
	t.Run("unasked", func(t *testing.T) {
		f(t, fakevllm.Options{Faults: fakevllm.Faults{Unasked: true}}, loadSpec{prompts: prompts, conns: 1,
			duration: 50 * time.Millisecond}, true, "")
	})
}

func TestLoadMeetsNobody(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddrPort(ln.Addr().String())
	_ = ln.Close()
	f := func(t *testing.T, rate float64) {
		r, err := runLoad(t.Context(), loadSpec{targets: []netip.AddrPort{addr}, prompts: newPromptSet(1<<10, 1, mixWarm, false, 1),
			conns: 4, rate: rate, duration: 50 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		if r.failures == 0 || !strings.Contains(r.failure, "connect: connection refused") {
			t.Errorf("got %d failures, %q, want some, connection refused", r.failures, r.failure)
		}
	}
	t.Run("closed", func(t *testing.T) { f(t, 0) })
	t.Run("open", func(t *testing.T) { f(t, 100) })
}

// A window whose answers stay away ends by itself, and says so.
func TestLoadIsCanceled(t *testing.T) {
	addr, _ := loadTarget(t, fakevllm.Options{Faults: fakevllm.Faults{Delay: fakevllm.Duration(time.Hour)}})
	ctx, cancel := context.WithCancel(t.Context())
	_, err := runLoad(ctx, loadSpec{targets: []netip.AddrPort{addr}, prompts: newPromptSet(1<<10, 1, mixWarm, false, 1),
		conns: 2, duration: time.Hour, mark: func(bool) { cancel() }})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}

func BenchmarkLoad(b *testing.B) {
	s, err := fakevllm.Start(fakevllm.Options{Instant: true})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	spec := loadSpec{targets: []netip.AddrPort{netip.MustParseAddrPort(s.Addr())}, prompts: newPromptSet(8<<10, 32, mixWarm, false, 1),
		conns: 32, duration: time.Second}
	for b.Loop() {
		r, err := runLoad(b.Context(), spec)
		if err != nil || r.failures > 0 {
			b.Fatal(err, r.failure)
		}
		b.ReportMetric(float64(r.requests)/r.elapsed.Seconds(), "requests/s")
	}
}
