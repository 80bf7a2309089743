package bench

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/bench/fakevllm"
)

var conversation = sync.OnceValues(func() (*Trace, error) { return LoadTrace("conversation", 512) })

// smallLab is a lab over the first requests of the conversation trace.
func smallLab(t *testing.T, requests, replicas int, rate float64) *Lab {
	t.Helper()
	whole, err := conversation()
	if err != nil {
		t.Fatal(err)
	}
	trace := &Trace{Name: whole.Name, Digest: whole.Digest, BlockTokens: whole.BlockTokens, Requests: whole.Requests[:requests]}
	s := DefaultSetting()
	s.Replicas, s.Rate, s.CacheTokens = replicas, rate, 307_200
	return &Lab{Setting: s, Engine: fakevllm.DefaultModel(), trace: trace.Shape(s.Spread, 1, s.Rate, s.Seed)}
}

// labOf is a lab over requests made by hand, without warm-up.
func labOf(replicas int, requests ...TraceRequest) *Lab {
	s := DefaultSetting()
	s.Replicas, s.Warmup, s.BlockTokens = replicas, 0, 64
	return &Lab{Setting: s, Engine: fakevllm.DefaultModel(), trace: &Trace{Name: "hand", BlockTokens: 64, Requests: requests}}
}

func run(t *testing.T, l *Lab, policy string) *LabResult {
	t.Helper()
	r, err := l.Run(policy)
	if err != nil {
		t.Fatalf("%s: %v", policy, err)
	}
	return r
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Every policy runs, twice with the same result to the byte, and with the same
// result when real bytes are hashed. (consistent-hash takes its key from the bytes.)
func TestLabRepeats(t *testing.T) {
	for _, policy := range append(PolicyNames(), "expected-cost-uniform", "../configs/scheduling-scraped.yaml") {
		t.Run(policy, func(t *testing.T) {
			l := smallLab(t, 300, 4, 0.6)
			l.Regret, l.Load = 7, true
			first := run(t, l, policy)
			if got, want := asJSON(t, run(t, l, policy)), asJSON(t, first); got != want {
				t.Errorf("got another result from the same flags, want %.200s", want)
			}
			if row := first.Row(); row.Requests != 240 || row.TTFTMean <= 0 || row.E2EP90 <= row.TTFTMean || row.Hit < 0 || row.Hit >= 1 || row.SLO <= 0 {
				t.Errorf("got %+v, want 240 requests that took some time", row)
			}
			if policy == "consistent-hash" {
				return
			}
			l.Hash = true
			hashed := run(t, l, policy)
			hashed.Predicted, hashed.PredError = first.Predicted, first.PredError // bytes are predicted in other blocks, and decide nothing
			if got, want := asJSON(t, hashed), asJSON(t, first); got != want {
				t.Errorf("with real bytes: got another result, want %.200s", want)
			}
			l.Seed++
			if policy != "round-robin" && policy != "oracle" && asJSON(t, run(t, l, policy)) == asJSON(t, first) {
				t.Error("another seed: got the same result, want another")
			}
		})
	}
}

func TestEventOrder(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	var h eventHeap
	var want []event
	for range 500 {
		e := event{at: time.Duration(rnd.IntN(20)), kind: eventKind(rnd.IntN(3)), replica: int32(rnd.IntN(5))}
		want = append(want, e)
		h.push(e)
	}
	slices.SortFunc(want, func(a, b event) int {
		switch {
		case a.before(b):
			return -1
		case b.before(a):
			return 1
		}
		return 0
	})
	for i, w := range want {
		if got := h.pop(); got != w {
			t.Fatalf("event %d: got %+v, want %+v", i, got, w)
		}
	}
	if !(event{at: 1, kind: scrapes}).before(event{at: 2, kind: stepEnds}) || !(event{at: 1, kind: stepEnds, replica: 9}).before(event{at: 1, kind: scrapes}) ||
		!(event{at: 1, replica: 1}).before(event{at: 1, replica: 2}) {
		t.Error("got another order, want time, then kind, then replica")
	}
}

// The times are the engine's, to the nanosecond: no clock but the virtual one.
func TestLabVirtualTime(t *testing.T) {
	m := fakevllm.DefaultModel()
	base, decode := m.Base, m.Base+m.Floor
	prompt := func(at time.Duration, tokens int, ids ...uint64) TraceRequest {
		return TraceRequest{At: at, Input: tokens, Output: 2, Blocks: ids}
	}
	f := func(t *testing.T, l *Lab, policy string, want ...float64) {
		t.Helper()
		got := run(t, l, policy)
		for i, w := range want {
			if math.Abs(got.TTFT[i]-w) > 1e-6 {
				t.Errorf("request %d: got its first token after %.6f s, want %.6f", i, got.TTFT[i], w)
			}
		}
		context := m.Context * float64(l.trace.Requests[0].Input+1)
		if e2e := want[0] + decode + context; math.Abs(got.E2E[0]-e2e) > 1e-6 {
			t.Errorf("got the first answer after %.6f s, want %.6f", got.E2E[0], e2e)
		}
	}
	one := base + m.PrefillTime(0, 4096).Seconds()
	t.Run("alone", func(t *testing.T) { f(t, labOf(1, prompt(0, 4096)), "random", one) })
	t.Run("side by side", func(t *testing.T) { f(t, labOf(2, prompt(0, 4096), prompt(0, 4096)), "least-request", one, one) })
	t.Run("clairvoyant", func(t *testing.T) { f(t, labOf(2, prompt(0, 4096), prompt(0, 4096)), "oracle", one, one) })
	t.Run("half as fast", func(t *testing.T) {
		l := labOf(1, prompt(0, 4096))
		l.Speeds = []float64{0.5}
		got := run(t, l, "random")
		if math.Abs(got.TTFT[0]-2*one) > 1e-6 {
			t.Errorf("got %.6f s, want %.6f", got.TTFT[0], 2*one)
		}
	})
	t.Run("steps", func(t *testing.T) {
		// The second arrives in the first one's step and waits for its end.
		l := labOf(1, prompt(0, 4096), prompt(100*time.Millisecond, 4096))
		second := one + base + m.PrefillTime(0, 4096).Seconds() + m.Decode + m.Context*4097
		got := run(t, l, "random")
		if math.Abs(got.TTFT[1]-(second-0.1)) > 1e-6 {
			t.Errorf("got %.6f s, want %.6f", got.TTFT[1], second-0.1)
		}
	})
	t.Run("cached", func(t *testing.T) {
		ids := make([]uint64, 64)
		for i := range ids {
			ids[i] = uint64(i + 1)
		}
		l := labOf(1, prompt(0, 4096, ids...), prompt(time.Second, 4096, ids...))
		got := run(t, l, "expected-cost")
		// The engine computes the last block anyway.
		if want := base + m.Floor; math.Abs(got.TTFT[1]-want) > 1e-6 {
			t.Errorf("got %.6f s, want %.6f: a step with 64 tokens", got.TTFT[1], want)
		}
		if got.Cached != 4032 || got.Predicted != 4096 || got.PredError != 64 || got.Prompt != 8192 {
			t.Errorf("got %d cached, %d predicted, %d wrong of %d, want 4032, 4096, 64 of 8192", got.Cached, got.Predicted, got.PredError, got.Prompt)
		}
	})
}

func TestLabCounts(t *testing.T) {
	l := smallLab(t, 600, 4, 0.6)
	l.Regret, l.Load = 1, true
	var calls int
	l.Progress = func(policy string, done, all int) {
		if policy != "least-request" || done > all || all != 600 {
			t.Errorf("progress: got %s %d/%d, want least-request and at most 600", policy, done, all)
		}
		calls++
	}
	ticks := time.Duration(0)
	l.Stopwatch = func() time.Duration { ticks++; return ticks }
	r := run(t, l, "least-request")
	if calls != 2 {
		t.Errorf("got %d calls of progress, want 2", calls)
	}
	if r.Routed != 600 {
		t.Errorf("got %d ticks in Route, want one for each of 600 requests", r.Routed)
	}
	if len(r.Load) != 4 || len(r.Load[0]) != int(r.Duration/loadSample)+1 {
		t.Errorf("got %d x %d samples of the load, want 4 x %d", len(r.Load), len(r.Load[0]), int(r.Duration/loadSample)+1)
	}
	if r.RegretW+r.RegretP <= 0 {
		t.Errorf("got a regret of %v + %v, want some: the policy is blind", r.RegretW, r.RegretP)
	}
	// Who takes the least true TTFT regrets nothing.
	p := Policy{Name: "greedy"}
	l.Progress = nil
	g, err := RunLab(l.trace, p, l.options(p.Name))
	if err != nil {
		t.Fatal(err)
	}
	if math.Abs(g.RegretW+g.RegretP) > 1e-9 {
		t.Errorf("greedy: got a regret of %v + %v, want none", g.RegretW, g.RegretP)
	}
	if greedy, blind := g.Row().TTFTMean, r.Row().TTFTMean; greedy >= blind {
		t.Errorf("got %.3f s from the clairvoyant choice and %.3f s from least-request, want less", greedy, blind)
	}
}

// An overloaded fleet is given up when enough requests are late.
func TestLabGivesUp(t *testing.T) {
	l := smallLab(t, 600, 4, 6)
	whole := run(t, l, "least-request")
	l.Late = 20
	part := run(t, l, "least-request")
	if part.Duration >= whole.Duration/2 || part.Row().SLO > whole.Row().SLO {
		t.Errorf("got %v with %.3f in time, want less than half of %v and at most %.3f", part.Duration, part.Row().SLO, whole.Duration, whole.Row().SLO)
	}
	l.Late = 600
	if got := run(t, l, "least-request"); got.Duration != whole.Duration {
		t.Errorf("with a limit that is not reached: got %v, want %v", got.Duration, whole.Duration)
	}
}

// A replica that publishes at once is herded onto less.
func TestLabInstantLoad(t *testing.T) {
	l := smallLab(t, 1500, 8, 1.2)
	late := run(t, l, "llm-d-default").Row().TTFTMean
	l.InstantLoad = true
	if at := run(t, l, "llm-d-default").Row().TTFTMean; at > 0.8*late {
		t.Errorf("got %.3f s with load published at once and %.3f s once per step, want at most 0.8 of it", at, late)
	}
}

func TestLabGateways(t *testing.T) {
	l := smallLab(t, 1000, 8, 1.2)
	one := run(t, l, "expected-cost").Row().TTFTMean
	l.Gateways = 4
	if four := run(t, l, "expected-cost").Row().TTFTMean; four <= one {
		t.Errorf("got %.3f s with four gateways that know nothing of each other and %.3f s with one, want more", four, one)
	}
}

func TestLabRefuses(t *testing.T) {
	f := func(t *testing.T, change func(*Lab), want string) {
		l := labOf(2, TraceRequest{Input: 100, Output: 1})
		change(l)
		_, err := l.Run("expected-cost")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	t.Run("no replica", func(t *testing.T) { f(t, func(l *Lab) { l.Replicas = 0 }, "replicas 0") })
	t.Run("no gateway", func(t *testing.T) { f(t, func(l *Lab) { l.Gateways = 0 }, "gateways 0") })
	t.Run("no scrape", func(t *testing.T) { f(t, func(l *Lab) { l.Scrape = 0 }, "scrape 0s") })
	t.Run("all warm-up", func(t *testing.T) { f(t, func(l *Lab) { l.Warmup = 1 }, "warm-up 1") })
	t.Run("engine", func(t *testing.T) { f(t, func(l *Lab) { l.Engine.Budget = 0 }, "max_num_batched_tokens is 0") })
	t.Run("too long", func(t *testing.T) {
		f(t, func(l *Lab) { l.CacheTokens = 64 }, "request 0: prompt and output do not fit into the KV cache")
	})
}

func TestNamedPolicy(t *testing.T) {
	if _, err := NamedPolicy("fastest", 1<<20); err == nil || !strings.Contains(err.Error(), "neither one of [random round-robin") {
		t.Errorf("unknown policy: got %v, want the names", err)
	}
	p, err := NamedPolicy("llm-d-default", 1_024_000)
	if err != nil {
		t.Fatal(err)
	}
	text := asJSON(t, p.Config)
	if p.Name != "llm-d-default" || text == "" {
		t.Errorf("got %q, want llm-d-default", p.Name)
	}
	p, err = NamedPolicy("../configs/expected-cost.yaml", 1<<20)
	if err != nil || p.Config == nil || len(p.Config.Plugins) == 0 {
		t.Errorf("a file: got %+v and %v, want its configuration", p, err)
	}
}

// The recommended profile decides as the named one does.
func TestExpectedCostProfile(t *testing.T) {
	l := smallLab(t, 600, 4, 0.6)
	got, want := run(t, l, "../configs/expected-cost.yaml"), run(t, l, "expected-cost")
	got.Policy = want.Policy
	if g, w := asJSON(t, got), asJSON(t, want); g != w {
		t.Errorf("configs/expected-cost.yaml: got %.200s, want %.200s", g, w)
	}
}
