package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"kvgate/bench/fakevllm"
)

func shortTrace() *Lab {
	return &Lab{Setting: DefaultSetting(), Engine: fakevllm.DefaultModel(), trace: &Trace{Name: "short", BlockTokens: 64, Requests: []TraceRequest{
		{At: 0, Input: 130, Output: 2, Blocks: []uint64{7, 8}},
		{At: 20 * time.Millisecond, Input: 200, Output: 3, Blocks: []uint64{7, 8, 9}},
		{At: 40 * time.Millisecond, Input: 100, Output: 0},
	}}}
}

func TestTraceReplay(t *testing.T) {
	r, err := fakevllm.Start(fakevllm.Options{Models: []string{"m"}, Speed: 10})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	l := shortTrace()
	l.Warmup = 0
	calls := 0
	got, err := l.Replay(context.Background(), "p", TraceReplayOptions{Target: r.URL(), Model: "m", Faster: 0.2, Progress: func(int, int) { calls++ }})
	if err != nil || got.Errors != 0 || got.Requests != 3 || calls != 3 || got.TTFTMean <= 0 {
		t.Fatalf("got %+v, %d calls and %v, want 3 requests", got, calls, err)
	}
	// The second prompt has 128 tokens of the first, which has been answered long before.
	if got.promptTokens != 430 || got.cachedTokens != 128 {
		t.Errorf("got %d prompt tokens, %d of them cached, want 430 and 128", got.promptTokens, got.cachedTokens)
	}
	if s := r.Stats(); s.Executed != 3 || s.Engine.GenerationTokens != 2+3+1 {
		t.Errorf("got %d requests and %d tokens generated, want 3 and 6", s.Executed, s.Engine.GenerationTokens)
	}
}

func TestTraceReplayFails(t *testing.T) {
	f := func(name string, l *Lab, o TraceReplayOptions, want string) {
		t.Helper()
		got, err := l.Replay(context.Background(), "p", o)
		text := ""
		if err != nil {
			text = err.Error()
		} else {
			text = got.FirstError
		}
		if !strings.Contains(text, want) {
			t.Errorf("%s: got %q, want %q", name, text, want)
		}
	}
	r, err := fakevllm.Start(fakevllm.Options{Models: []string{"m"}, Speed: 10})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	f("no speed", shortTrace(), TraceReplayOptions{Target: r.URL()}, "0 times faster")
	empty := shortTrace()
	empty.Cut(0)
	f("no requests", empty, TraceReplayOptions{Target: r.URL(), Faster: 1}, "0 requests")
	f("no server", shortTrace(), TraceReplayOptions{Target: "http://127.0.0.1:1", Model: "m", Faster: 10}, "refused")
	f("no such model", shortTrace(), TraceReplayOptions{Target: r.URL(), Model: "other", Faster: 10}, "404")
	if err := r.SetFaults(fakevllm.Faults{Break: "close", BreakAfter: 1}); err != nil {
		t.Fatal(err)
	}
	f("a cut stream", shortTrace(), TraceReplayOptions{Target: r.URL(), Model: "m", Faster: 10}, "EOF")
	if err := r.SetFaults(fakevllm.Faults{Break: "error", BreakAfter: 1}); err != nil {
		t.Fatal(err)
	}
	one := shortTrace()
	one.Cut(time.Millisecond)
	f("an error event", one, TraceReplayOptions{Target: r.URL(), Model: "m", Faster: 10}, "The engine died")
	done, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := shortTrace().Replay(done, "p", TraceReplayOptions{Target: r.URL(), Model: "m", Faster: 1}); err == nil {
		t.Errorf("ended: got no error, want one")
	}
}

// TestCompletionBody: equal ids are equal text, and no other text is equal.
func TestCompletionBody(t *testing.T) {
	prompt := func(i int) string {
		var body struct {
			Prompt string `json:"prompt"`
		}
		if err := json.NewDecoder(bytes.NewReader(shortTrace().trace.completion(i, "m"))).Decode(&body); err != nil {
			t.Fatal(err)
		}
		return body.Prompt
	}
	a, b, c := prompt(0), prompt(1), prompt(2)
	if len(a) != 4*130 || len(b) != 4*200 || len(c) != 4*100 {
		t.Errorf("got %d, %d and %d bytes, want four per token", len(a), len(b), len(c))
	}
	if a[:512] != b[:512] || a[512:] == b[512:520] || a[:256] == a[256:512] || c[:8] == a[:8] {
		t.Errorf("got %q, %q and %q, want the first 512 bytes of the first two to be equal, and nothing else", a, b, c)
	}
}

func TestSameOrder(t *testing.T) {
	f := func(want bool, rows ...[2]float64) {
		t.Helper()
		var reports []*TraceReport
		for _, r := range rows {
			reports = append(reports, &TraceReport{LabTTFTMean: r[0], TTFTMean: r[1]})
		}
		if err := SameOrder(reports, 4); (err == nil) != want {
			t.Errorf("%v: got %v, want the same order: %v", rows, err, want)
		}
	}
	f(true, [2]float64{1, 3}, [2]float64{2, 4})
	f(false, [2]float64{1, 4}, [2]float64{2, 3})
	f(false, [2]float64{2, 3}, [2]float64{1, 4})
	f(true, [2]float64{1, 4}, [2]float64{1.05, 3}) // alike in the lab
	late := []*TraceReport{{Policy: "p", LabTTFTMean: 1, TTFTMean: 1, LateP99: 0.6}}
	if err := SameOrder(late, 5); err == nil || !strings.Contains(err.Error(), "p: one request in a hundred was sent 0.60 s late") {
		t.Errorf("late requests: got %v, want an error that says so", err)
	}
}
