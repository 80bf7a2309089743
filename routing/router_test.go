package routing

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"kvgate/configs"
)

// testClock is a clock that moves only by hand.
type testClock struct{ t time.Time }

func newTestClock() *testClock               { return &testClock{time.Date(2026, 8, 22, 12, 0, 0, 0, time.UTC)} }
func (c *testClock) now() time.Time          { return c.t }
func (c *testClock) advance(d time.Duration) { c.t = c.t.Add(d) }
func observed(w, r, kv float64) Metrics      { return Metrics{Waiting: w, Running: r, KVUsage: kv} }
func newTestFleet(c *testClock) *Fleet       { return NewFleet(c.now, 2*time.Second, zap.NewNop()) }
func spec(name string) EndpointSpec          { return EndpointSpec{Name: name, URL: "http://" + name + ":8000"} }
func specs(names ...string) []EndpointSpec {
	var out []EndpointSpec
	for _, n := range names {
		out = append(out, spec(n))
	}
	return out
}

// readyFleet returns a fleet whose endpoints have been scraped as idle.
func readyFleet(t testing.TB, c *testClock, names ...string) *Fleet {
	t.Helper()
	f := newTestFleet(c)
	f.Update(specs(names...))
	for _, e := range f.Endpoints() {
		e.Observe(observed(0, 0, 0), c.now())
	}
	return f
}

func newTestRouter(t testing.TB, f *Fleet, yaml string) *Router {
	t.Helper()
	cfg := configs.DefaultScheduling()
	if yaml != "" {
		var err error
		if cfg, err = configs.ParseScheduling("test.yaml", []byte(header+yaml)); err != nil {
			t.Fatalf("ParseScheduling: %v", err)
		}
	}
	r, err := New(cfg, f, 1)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	return r
}

const header = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"

// promptOf returns a request whose prompt is n whole blocks of 64 tokens.
func promptOf(model string, seed byte, blocks int) *Request {
	req := &Request{Weight: 1, Model: []byte(model)}
	for i := 0; i < blocks*256; i++ {
		req.Tokens = append(req.Tokens, seed+byte(i/256))
	}
	req.Ends = []int{len(req.Tokens)}
	return req
}

func TestExplainSeedExample(t *testing.T) {
	c := newTestClock()
	f := newTestFleet(c)
	f.Update(specs("A", "B", "C"))
	for i, m := range []Metrics{observed(4, 0, 0.7), observed(0, 0, 0.2), observed(9, 0, 0.1)} {
		f.Endpoints()[i].Observe(m, c.now())
	}
	r := newTestRouter(t, f, "")
	for i, match := range []int{5, 3, 0} {
		if err := r.Seed(promptOf("m", 1, 5), f.Endpoints()[i], match); err != nil {
			t.Fatal(err)
		}
	}
	ex, err := r.Explain(promptOf("m", 1, 5))
	if err != nil {
		t.Fatal(err)
	}
	want := []float64{4.711, 5.400, 1.800}
	for i, x := range ex.Replicas {
		if math.Abs(x.Total-want[i]) > 0.0005 {
			t.Errorf("%s: total %.4f, want %.3f", x.Name, x.Total, want[i])
		}
	}
	if ex.Winner != "B" || ex.Ties != 1 || ex.Total != 5 || ex.BlockTokens != 64 || ex.Reason != "load_spill" {
		t.Errorf("got winner %s ties %d total %d block %d reason %s, want B 1 5 64 load_spill", ex.Winner, ex.Ties, ex.Total, ex.BlockTokens, ex.Reason)
	}
}

// TestDecisionsGolden compares with decisions computed by bench/oracle/decisions.py.
func TestDecisionsGolden(t *testing.T) {
	data, err := os.ReadFile("testdata/decisions.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Total int
		Fleet []struct {
			Name     string
			Waiting  *float64
			Running  *float64
			KVUsage  *float64 `json:"kv_usage"`
			Awaiting int
			Match    int
		}
		Profile []struct {
			Plugin string
			Weight float64
		}
		Totals  []float64
		Winners []string
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	value := func(v *float64) float64 {
		if v == nil {
			return math.NaN()
		}
		return *v
	}
	for n, tc := range cases {
		c := newTestClock()
		f := newTestFleet(c)
		var list []EndpointSpec
		for _, e := range tc.Fleet {
			list = append(list, spec(e.Name))
		}
		f.Update(list)
		yaml := "plugins:\n- {type: max-score-picker}\n- {type: prefix-cache-scorer}\n- {type: queue-scorer}\n- {type: running-requests-size-scorer}\n- {type: kv-cache-utilization-scorer}\n" +
			"- {type: queue-scorer, name: queue-scraped, parameters: {load: scraped}}\n- {type: prefix-cache-scorer, name: prefix-long, parameters: {matchLengthWeight: 0.5, matchLengthScaleTokens: 1024}}\n" +
			"schedulingProfiles:\n- name: default\n  plugins:\n  - {pluginRef: max-score-picker}\n"
		for _, p := range tc.Profile {
			yaml += fmt.Sprintf("  - {pluginRef: %s, weight: %v}\n", p.Plugin, p.Weight)
		}
		r := newTestRouter(t, f, yaml)
		for i, e := range tc.Fleet {
			ep := f.Endpoints()[i]
			ep.Observe(observed(value(e.Waiting), value(e.Running), value(e.KVUsage)), c.now())
			ep.awaiting.Store(int64(e.Awaiting))
			ep.changed()
			if tc.Total > 0 && len(r.producers) > 0 {
				if err := r.Seed(promptOf("m", 1, tc.Total), ep, e.Match); err != nil {
					t.Fatal(err)
				}
			}
		}
		ex, err := r.Explain(promptOf("m", 1, tc.Total))
		if err != nil {
			t.Fatalf("case %d: %v", n, err)
		}
		for i, x := range ex.Replicas {
			if math.Abs(x.Total-tc.Totals[i]) > 1e-9 {
				t.Errorf("case %d %s: total %v, want %v", n, x.Name, x.Total, tc.Totals[i])
			}
		}
		if !slices.Contains(tc.Winners, ex.Winner) {
			t.Errorf("case %d: winner %s, want one of %v", n, ex.Winner, tc.Winners)
		}
	}
}

func TestScorerTables(t *testing.T) {
	nan := math.NaN()
	f := func(name string, s Scorer, waiting, running, kv, want []float64) {
		t.Helper()
		c := make([]Candidate, len(want))
		for i := range c {
			c[i].Row = i
			if waiting != nil {
				c[i].Waiting = waiting[i]
			}
			if running != nil {
				c[i].Running = running[i]
			}
			if kv != nil {
				c[i].KVUsage = kv[i]
			}
		}
		got := make([]float64, len(c))
		s.Score(&Request{}, c, got)
		for i := range got {
			if math.Abs(got[i]-want[i]) > 1e-12 {
				t.Errorf("%s: got %v, want %v", name, got, want)
				return
			}
		}
	}
	q := queueScorer{inline: true}
	f("queue", q, []float64{10, 5, 0}, nil, nil, []float64{0, .5, 1})
	f("queue equal", q, []float64{5, 5}, nil, nil, []float64{1, 1})
	f("queue zero", q, []float64{0, 0}, nil, nil, []float64{1, 1})
	f("queue one stale", q, []float64{10, nan, 0}, nil, nil, []float64{0, .5, 1})
	f("queue all stale", q, []float64{nan, nan}, nil, nil, []float64{.5, .5})
	f("running", runningScorer{}, nil, []float64{10, 5, 0}, nil, []float64{0, .5, 1})
	f("kv", kvScorer{}, nil, nil, []float64{.8, .5, 0}, []float64{.2, .5, 1})
	f("kv equal", kvScorer{}, nil, nil, []float64{.6, .6}, []float64{.4, .4})
	f("kv full", kvScorer{}, nil, nil, []float64{1, .5}, []float64{0, .5})
	f("kv stale is not idle", kvScorer{}, nil, nil, []float64{.8, nan, .4}, []float64{.2, .4, .6})
}

func TestPrefixScorerTable(t *testing.T) {
	f := func(p prefixScorer, block, match, total int, want float64) {
		t.Helper()
		r := &Request{}
		r.work.columns = []Column{{Matched: []int32{int32(match)}, Total: total, BlockTokens: block}}
		got := []float64{-1}
		p.Score(r, []Candidate{{}}, got)
		if math.Abs(got[0]-want) > 1e-12 {
			t.Errorf("%+v match %d/%d: got %v, want %v", p, match, total, got[0], want)
		}
	}
	f(prefixScorer{}, 1, 5, 10, .5)
	f(prefixScorer{}, 1, 2, 10, .2)
	f(prefixScorer{weight: .5, scale: 100}, 1, 5, 10, .25125)
	f(prefixScorer{weight: .5, scale: 100}, 1, 50, 100, .375)
	f(prefixScorer{}, 1, 0, 0, 0)
}

// TestPrefixScorerBehindFilter: what is left of the candidates keeps its rows.
func TestPrefixScorerBehindFilter(t *testing.T) {
	f := func(rows []int, want ...float64) {
		t.Helper()
		r := &Request{}
		r.work.columns = []Column{{Matched: []int32{1, 2, 2, 4}, Total: 4, BlockTokens: 16}}
		var c []Candidate
		for _, row := range rows {
			c = append(c, Candidate{Row: row})
		}
		got := slices.Repeat([]float64{-1}, len(c))
		prefixScorer{}.Score(r, c, got)
		if !slices.Equal(got, want) {
			t.Errorf("rows %v: got %v, want %v", rows, got, want)
		}
	}
	f([]int{0, 1, 2, 3}, .25, .5, .5, 1)
	f([]int{1, 3}, .5, 1)
	f([]int{3}, 1)
	f(nil)
}

// TestQueueScorerSeesItsOwnBurst: a herd forms when only scraped counts are read.
func TestQueueScorerSeesItsOwnBurst(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b", "c", "d")
	r := newTestRouter(t, f, "plugins:\n- {type: queue-scorer}\n")
	counts := map[string]int{}
	for i := 0; i < 64; i++ {
		l, err := r.Route(promptOf("m", byte(i), 1))
		if err != nil {
			t.Fatal(err)
		}
		counts[l.Endpoint.Name()]++
	}
	for name, n := range counts {
		if n != 16 {
			t.Errorf("%s got %d of 64 requests, want 16: %v", name, n, counts)
		}
	}
}

func TestTiesAreUniformWithinTheTopTier(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b", "c", "d", "e", "f", "g", "h")
	r := newTestRouter(t, f, "plugins:\n- {type: kv-cache-utilization-scorer}\n")
	for i, e := range f.Endpoints() {
		kv := 1.0
		if i < 2 {
			kv = 0.5
		}
		e.Observe(observed(0, 0, kv), c.now())
	}
	counts := make([]int, 8)
	for i := 0; i < 10000; i++ {
		l, err := r.Route(promptOf("m", 1, 0))
		if err != nil {
			t.Fatal(err)
		}
		counts[l.Endpoint.slot]++
		l.Done(Completed)
	}
	for i, n := range counts {
		if i < 2 && (n < 4800 || n > 5200) || i >= 2 && n != 0 {
			t.Errorf("endpoint %d got %d of 10000, want 4800..5200 for the first two and 0 for the rest: %v", i, n, counts)
		}
	}
}

func TestPickers(t *testing.T) {
	c := newTestClock()
	f := func(picker string, kv []float64, want func(share []float64) bool) {
		t.Helper()
		names := []string{"a", "b", "c", "d"}[:len(kv)]
		fleet := readyFleet(t, c, names...)
		r := newTestRouter(t, fleet, "plugins:\n- {type: kv-cache-utilization-scorer}\n- {type: "+picker+", parameters: {maxNumOfEndpoints: 2}}\n")
		for i, e := range fleet.Endpoints() {
			e.Observe(observed(0, 0, kv[i]), c.now())
		}
		share := make([]float64, len(kv))
		for i := 0; i < 20000; i++ {
			l, err := r.Route(promptOf("m", 1, 0))
			if err != nil {
				t.Fatal(err)
			}
			share[l.Endpoint.slot] += 1.0 / 20000
			l.Done(Completed)
		}
		if !want(share) {
			t.Errorf("%s on kv %v: shares %v", picker, kv, share)
		}
	}
	near := func(v, want float64) bool { return math.Abs(v-want) < 0.02 }
	f("max-score-picker", []float64{.9, .75, .85}, func(s []float64) bool { return near(s[1], 1) && s[0] == 0 && s[2] == 0 })
	f("random-picker", []float64{.9, .5, 0}, func(s []float64) bool { return near(s[0], 1./3) && near(s[1], 1./3) && near(s[2], 1./3) })
	f("weighted-random-picker", []float64{.75, .25, 1}, func(s []float64) bool { return near(s[0], .25) && near(s[1], .75) && s[2] == 0 })
	f("weighted-random-picker", []float64{1, 1}, func(s []float64) bool { return near(s[0], .5) && near(s[1], .5) })
}

func TestConversationSticks(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b", "c")
	r := newTestRouter(t, f, "")
	home := ""
	for turn := 1; turn <= 6; turn++ {
		req := promptOf("m", 1, turn*4)
		l, err := r.Route(req)
		if err != nil {
			t.Fatal(err)
		}
		if turn > 1 && (l.Endpoint.Name() != home || l.Matched != (turn-1)*4 || l.Reason != ReasonPrefix) {
			t.Errorf("turn %d: %s matched %d (%s), want %s matched %d (prefix_hit)", turn, l.Endpoint.Name(), l.Matched, l.Reason, home, (turn-1)*4)
		}
		home = l.Endpoint.Name()
		l.FirstToken()
		l.Done(Completed)
	}
}

func TestLeaseCountsOnce(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a")
	e := f.Endpoints()[0]
	r := newTestRouter(t, f, "")
	check := func(step string, inFlight, awaiting int, pending int64) {
		t.Helper()
		if e.InFlight() != inFlight || e.Awaiting() != awaiting || e.PendingTokens() != pending {
			t.Errorf("%s: in flight %d awaiting %d pending %d, want %d %d %d", step, e.InFlight(), e.Awaiting(), e.PendingTokens(), inFlight, awaiting, pending)
		}
	}
	req := promptOf("m", 1, 2)
	l, err := r.Route(req)
	if err != nil {
		t.Fatal(err)
	}
	check("picked", 1, 1, 128)
	l.FirstToken()
	l.FirstToken()
	check("first token", 1, 0, 0)
	l.Done(Completed)
	l.Done(Failed)
	l.FirstToken()
	check("done", 0, 0, 0)

	batch := promptOf("m", 7, 2)
	batch.Weight = 3
	l, err = r.Route(batch)
	if err != nil {
		t.Fatal(err)
	}
	check("batch picked", 3, 3, 128)
	l.Done(Canceled)
	check("batch canceled", 0, 0, 0)
}

func TestUnsentIsUndone(t *testing.T) {
	c := newTestClock()
	f := func(o Outcome, want int) {
		t.Helper()
		fleet := readyFleet(t, c, "a")
		r := newTestRouter(t, fleet, "")
		warm, err := r.Route(promptOf("m", 1, 2))
		if err != nil {
			t.Fatal(err)
		}
		warm.Done(Completed)
		l, err := r.Route(promptOf("m", 1, 5))
		if err != nil {
			t.Fatal(err)
		}
		l.Done(o)
		again, err := r.Route(promptOf("m", 1, 5))
		if err != nil {
			t.Fatal(err)
		}
		if again.Matched != want {
			t.Errorf("outcome %d: next request matches %d blocks, want %d", o, again.Matched, want)
		}
	}
	f(Completed, 5)
	f(Failed, 5)
	f(Canceled, 5)
	f(Unsent, 2)
	f(Refused, 2)
}

func TestRerouteExcludesTheFailedEndpoint(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b")
	r := newTestRouter(t, f, "")
	req := promptOf("m", 1, 3)
	first, err := r.Route(req)
	if err != nil {
		t.Fatal(err)
	}
	failed := first.Endpoint
	first.Done(Unsent)
	req.Exclude = append(req.Exclude, failed)
	second, err := r.Route(req)
	if err != nil {
		t.Fatal(err)
	}
	if second.Endpoint == failed || second.Reason != ReasonRetry {
		t.Errorf("second attempt on %s (%s), want the other endpoint (retry)", second.Endpoint.Name(), second.Reason)
	}
	second.Done(Completed)
	req.Exclude = append(req.Exclude, second.Endpoint)
	if _, err := r.Route(req); !errors.Is(err, ErrNoEndpoints) {
		t.Errorf("third attempt: got %v, want ErrNoEndpoints", err)
	}
}

func TestStatesDecideWhoTakesWork(t *testing.T) {
	c := newTestClock()
	picks := func(f *Fleet) map[string]bool {
		r := newTestRouter(t, f, "plugins:\n- {type: random-picker}\n")
		got := map[string]bool{}
		for i := 0; i < 200; i++ {
			l, err := r.Route(promptOf("m", 1, 0))
			if err != nil {
				got[err.Error()] = true
				continue
			}
			got[l.Endpoint.Name()] = true
			l.Done(Canceled)
		}
		return got
	}
	want := func(f *Fleet, names ...string) {
		t.Helper()
		got := picks(f)
		if len(got) != len(names) {
			t.Errorf("got %v, want %v", got, names)
		}
		for _, n := range names {
			if !got[n] {
				t.Errorf("got %v, want %v", got, names)
			}
		}
	}
	f := newTestFleet(c)
	want(f, ErrNoEndpoints.Error())
	f.Update(specs("a", "b", "c"))
	want(f, "a", "b", "c") // nobody was scraped yet: better than a refusal
	a, b := f.Endpoints()[0], f.Endpoints()[1]
	a.Observe(observed(0, 0, 0), c.now())
	want(f, "a")
	b.ObserveFailure()
	want(f, "a", "b")
	a.SetReachable(false)
	want(f, "b")
	f.Drain("b", true)
	want(f, "a") // down beats refusing
	a.SetReachable(true)
	f.Drain("default/b", false)
	want(f, "a", "b")
	for i := 0; i < ejectAfter; i++ {
		b.ReportFailure(c.now())
	}
	want(f, "a")
	c.advance(ejectFor + time.Second)
	want(f, "a", "b")
	b.ReportFailure(c.now())
	want(f, "a")
	b.ReportSuccess()
	want(f, "a", "b")
	if f.Drain("nobody", true) {
		t.Error("Drain of an unknown endpoint: got true, want false")
	}
}

func TestStaleMetricsAreNeutral(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "stale", "fresh")
	r := newTestRouter(t, f, "plugins:\n- {type: queue-scorer}\n")
	c.advance(3 * time.Second)
	for _, e := range f.Endpoints() {
		if e.Name() == "fresh" {
			e.Observe(observed(5, 0, 0), c.now())
		}
	}
	ex, err := r.Explain(promptOf("m", 1, 0))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range ex.Replicas {
		if x.Total != 1 {
			t.Errorf("%s: total %v, want 1 for both: an unseen endpoint is not the idle one", x.Name, x.Total)
		}
	}
}

func TestModels(t *testing.T) {
	c := newTestClock()
	fleet := readyFleet(t, c, "a", "b", "c")
	a, b, third := fleet.Endpoints()[0], fleet.Endpoints()[1], fleet.Endpoints()[2]
	fleet.SetModels(a, []string{"m1", "lora"}, true)
	fleet.SetModels(b, []string{"m2"}, true)
	r := newTestRouter(t, fleet, "plugins:\n- {type: random-picker}\n")
	f := func(model string, wantErr error, names ...string) {
		t.Helper()
		got := map[string]bool{}
		for i := 0; i < 100; i++ {
			l, err := r.Route(promptOf(model, 1, 0))
			if !errors.Is(err, wantErr) {
				t.Fatalf("model %q: error %v, want %v", model, err, wantErr)
			}
			if err == nil {
				got[l.Endpoint.Name()] = true
				l.Done(Canceled)
			}
		}
		if len(got) != len(names) {
			t.Errorf("model %q: served by %v, want %v", model, got, names)
		}
	}
	f("m1", nil, "a", "c") // c's list is unknown: it may serve anything
	f("m2", nil, "b", "c")
	f("other", nil, "c")
	f("", ErrModelMissing)
	fleet.SetModels(third, []string{"m1"}, true)
	f("m1", nil, "a", "c")
	f("other", ErrModelNotFound)
	fleet.SetModels(a, []string{"m1"}, true)
	fleet.SetModels(b, []string{"m1"}, true)
	f("", nil, "a", "b", "c")
	if got := fleet.KnownModel([]byte("m1")); got != "m1" {
		t.Errorf("KnownModel(m1) = %q", got)
	}
	if got := fleet.KnownModel([]byte("nope")); got != "" {
		t.Errorf("KnownModel(nope) = %q, want empty", got)
	}
}

func TestSaltAndAdapterChainsAreSeparate(t *testing.T) {
	c := newTestClock()
	fleet := readyFleet(t, c, "a")
	r := newTestRouter(t, fleet, "")
	route := func(model, salt string) int {
		req := promptOf(model, 1, 4)
		req.Salt = []byte(salt)
		l, err := r.Route(req)
		if err != nil {
			t.Fatal(err)
		}
		l.Done(Completed)
		return l.Matched
	}
	for _, k := range [][2]string{{"base", "a"}, {"base", "b"}, {"x", ""}, {"base", ""}} {
		if got := route(k[0], k[1]); got != 0 {
			t.Errorf("model %q salt %q: %d blocks predicted, want 0", k[0], k[1], got)
		}
		if got := route(k[0], k[1]); got != 4 {
			t.Errorf("model %q salt %q again: %d blocks predicted, want 4", k[0], k[1], got)
		}
	}
}

func TestRemovedEndpointDrainsAndLosesItsIndex(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b")
	r := newTestRouter(t, f, "")
	var onA *Lease
	for i := byte(0); onA == nil; i++ {
		l, err := r.Route(promptOf("m", i*10, 4))
		if err != nil {
			t.Fatal(err)
		}
		if l.Endpoint.Name() == "a" {
			onA = l
		}
	}
	a := onA.Endpoint
	_, removed := f.Update(specs("b"))
	if len(removed) != 1 || removed[0] != a {
		t.Fatalf("removed %v, want a", removed)
	}
	if got := f.Leaving(); len(got) != 1 || got[0] != a {
		t.Errorf("leaving %v, want a", got)
	}
	if f.IndexBlocks(a) != 0 {
		t.Errorf("index keeps %d blocks of a removed endpoint, want 0", f.IndexBlocks(a))
	}
	// It comes back while its stream runs: the same endpoint, counters intact, cache unknown.
	added, _ := f.Update(specs("a", "b"))
	if len(added) != 1 || added[0] != a || a.InFlight() == 0 {
		t.Errorf("came back as %v with %d in flight, want the same endpoint with its stream", added, a.InFlight())
	}
	onA.Done(Unsent)
	if a.InFlight() != 0 || a.Awaiting() != 0 || a.PendingTokens() != 0 {
		t.Errorf("after the end: %d %d %d, want zeros", a.InFlight(), a.Awaiting(), a.PendingTokens())
	}
	f.Update(specs("b"))
	if got := f.Leaving(); len(got) != 0 {
		t.Errorf("leaving %v, want nobody", got)
	}
	f.Update([]EndpointSpec{{Name: "b", URL: "http://elsewhere:1"}})
	if e := f.Endpoints()[0]; e.URL() != "http://elsewhere:1" || f.State(e) != Starting {
		t.Errorf("moved endpoint: %s %s, want a new one that is starting", e.URL(), f.State(e))
	}
}

func TestBlockSizeFollowsTheEngine(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b")
	r := newTestRouter(t, f, "")
	matched := func() (int, int) {
		l, err := r.Route(promptOf("m", 1, 8))
		if err != nil {
			t.Fatal(err)
		}
		l.Done(Completed)
		return l.Matched, l.Total
	}
	set := func(block int, tokens int64) {
		for _, e := range f.Endpoints() {
			m := observed(0, 0, 0)
			m.BlockTokens, m.CapacityTokens = block, tokens
			e.Observe(m, c.now())
		}
	}
	step := func(name string, wantMatched, wantTotal int) {
		t.Helper()
		if m, n := matched(); m != wantMatched || n != wantTotal {
			t.Errorf("%s: %d/%d, want %d/%d", name, m, n, wantMatched, wantTotal)
		}
	}
	step("cold", 0, 8)
	step("warm", 8, 8)
	set(16, 1<<20)
	step("a block of 16 stays at 64", 8, 8)
	set(128, 1<<20)
	step("a block of 128 starts anew", 0, 4)
	step("warm again", 4, 4)
	if got := f.IndexStats()[0]; got.BlockTokens != 128 || got.Resets != 1 {
		t.Errorf("index stats %+v, want block 128, one reset", got)
	}
	set(128, 256) // room for two blocks
	step("found, then cut to the capacity", 4, 4)
	step("head kept", 2, 4)
}

func TestReloadKeepsTheIndex(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a")
	l, err := newTestRouter(t, f, "").Route(promptOf("m", 1, 4))
	if err != nil {
		t.Fatal(err)
	}
	l.Done(Completed)
	l, err = newTestRouter(t, f, "plugins:\n- {type: prefix-cache-scorer}\n").Route(promptOf("m", 1, 4))
	if err != nil {
		t.Fatal(err)
	}
	if l.Matched != 4 {
		t.Errorf("after a reload %d blocks match, want 4", l.Matched)
	}
	var current Current
	current.Store(newTestRouter(t, f, "plugins:\n- {type: queue-scorer}\n"))
	if got := f.IndexStats(); len(got) != 0 {
		t.Errorf("index of a producer that is gone: %v, want none", got)
	}
}

func TestDrainRate(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a")
	r := newTestRouter(t, f, "")
	e := f.Endpoints()[0]
	if seconds, tokens := e.Drained(); seconds != 0 || tokens != 0 {
		t.Errorf("before any request: %v s %v tokens, want 0 0", seconds, tokens)
	}
	for i := byte(0); i < 3; i++ {
		l, err := r.Route(promptOf("m", i*50, 10))
		if err != nil {
			t.Fatal(err)
		}
		c.advance(640 * time.Millisecond)
		l.FirstToken()
		l.Done(Completed)
		c.advance(time.Second) // idle time does not count
	}
	if seconds, tokens := e.Drained(); math.Abs(seconds/tokens-0.001) > 0.0001 {
		t.Errorf("640 tokens in 640 ms each: %v s for %v tokens, want about 0.001 s per token", seconds, tokens)
	}
}

func TestRouteDecideAllocatesNothing(t *testing.T) { testRouteAlloc(t) }

// TestRouteAlloc is the same under the name that tools look for.
func TestRouteAlloc(t *testing.T) { testRouteAlloc(t) }

func testRouteAlloc(t *testing.T) {
	t.Helper()
	c := newTestClock()
	var names []string
	for i := 0; i < 16; i++ {
		names = append(names, fmt.Sprintf("e%02d", i))
	}
	f := readyFleet(t, c, names...)
	r := newTestRouter(t, f, "")
	req := promptOf("m", 1, 32)
	tokens := slices.Clone(req.Tokens)
	got := testing.AllocsPerRun(500, func() {
		req.Reset()
		req.Model = append(req.Model[:0:0], modelName...)
		req.Tokens = append(req.Tokens, tokens...)
		req.Ends = append(req.Ends, len(req.Tokens))
		l, err := r.Route(req)
		if err != nil {
			panic(err)
		}
		l.FirstToken()
		l.Done(Completed)
	})
	if got > 1 { // the model's copy above
		t.Errorf("%v allocations per decision, want none", got-1)
	}
}

var modelName = []byte("m")

func TestLoadDefaults(t *testing.T) {
	f := func(yaml string, wantProfile string, wantPlugins ...string) {
		t.Helper()
		r := newTestRouter(t, readyFleet(t, newTestClock(), "a"), yaml)
		var got []string
		for _, s := range r.scorers {
			got = append(got, fmt.Sprintf("%s=%v", s.name, s.weight))
		}
		if p := strings.Join(got, " "); p != wantProfile {
			t.Errorf("%s\nprofile %q, want %q", yaml, p, wantProfile)
		}
		for _, want := range wantPlugins {
			if !slices.ContainsFunc(r.Config().Plugins, func(p configs.PluginSpec) bool { return p.Name == want }) {
				t.Errorf("%s\nno %s in the effective configuration", yaml, want)
			}
		}
	}
	all := []string{"max-score-picker", "single-profile-handler", "approx-prefix-cache-producer", "token-producer", "openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser"}
	f("", "queue-scorer=2 kv-cache-utilization-scorer=2 prefix-cache-scorer=3", all...)
	f("plugins: [{type: prefix-cache-scorer}]\n", "prefix-cache-scorer=1", all...)
	f("plugins: [{type: prefix-cache-scorer}, {type: queue-scorer}]\n", "prefix-cache-scorer=1 queue-scorer=1")
	f("plugins: []\n", "", "max-score-picker")
	f("plugins: [{type: queue-scorer, name: q}]\nschedulingProfiles: [{name: p, plugins: [{pluginRef: q, weight: 20}]}]\n", "q=20")
	f("plugins: [{type: random-picker}, {type: queue-scorer}]\nschedulingProfiles: [{name: p, plugins: [{pluginRef: queue-scorer}]}]\n", "queue-scorer=1")
}

func TestLoadErrors(t *testing.T) {
	f := func(yaml string, want ...string) {
		t.Helper()
		cfg, err := configs.ParseScheduling("test.yaml", []byte(header+yaml))
		if err == nil {
			_, err = New(cfg, readyFleet(t, newTestClock(), "a"), 1)
		}
		if err == nil {
			t.Errorf("%s\nno error, want %q", yaml, want)
			return
		}
		for _, w := range append(want, "test.yaml:") {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s\ngot %q\nwant it to contain %q", yaml, err, w)
			}
		}
	}
	f("plugins: [{type: queue-scorr}]\n", "queue-scorr", "queue-scorer")
	f("plugins: [{type: lora-affinity-scorer}]\n", "lora-affinity-scorer", "does not have it yet", "docs/compatibility.md")
	f("plugins: [{type: prefix-cache-scorer, parameters: {matchLengthWeight: 2}}]\n", "matchLengthWeight 2")
	f("plugins: [{type: prefix-cache-scorer, parameters: {matchLengthWeight: 1, matchLengthScaleTokens: 0}}]\n", "matchLengthScaleTokens 0")
	f("plugins: [{type: prefix-cache-scorer, parameters: {blockSize: 5}}]\n", "blockSize")
	f("plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: nobody}}]\n", "nobody", "declare it")
	f("plugins: [{type: queue-scorer, parameters: {load: guessed}}]\n", "guessed", "inline")
	f("plugins: [{type: kv-cache-utilization-scorer, parameters: {x: 1}}]\n", "x")
	f("plugins: [{type: max-score-picker}, {type: random-picker}]\n", "two pickers")
	f("plugins: [{type: single-profile-handler}, {type: single-profile-handler, name: other}]\n", "2 profile handlers")
	f("plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}, {name: b, plugins: [{pluginRef: queue-scorer}]}]\n", "2 scheduling profiles")
	f("plugins: [{type: approx-prefix-cache-producer, parameters: {autoTune: false, blockSizeTokens: 0}}]\n", "blockSizeTokens 0")
	f("plugins: [{type: approx-prefix-cache-producer, parameters: {maxPrefixTokensToMatch: -1}}]\n", "maxPrefixTokensToMatch -1")
	f("plugins: [{type: approx-prefix-cache-producer, parameters: {maxPrefixBlocksToMatch: -1}}]\n", "maxPrefixBlocksToMatch -1")
	f("plugins: [{type: prefix-cache-scorer}, {type: token-producer}, {type: token-producer, name: second}]\n", "both produce tokens")
	f("plugins: [{type: token-producer, parameters: {vllm: {url: 'http://h:1/v1'}}}]\n", "http://h:1/v1")
	f("plugins: [{type: token-producer, parameters: {udsTokenizerConfig: {}}}]\n", "udsTokenizerConfig")
	f("plugins: [{type: queue-scorer}]\nrequestHandler: {parsers: [{pluginRef: queue-scorer}]}\n", "not a parser")
	f("plugins: [{type: single-profile-handler, parameters: {x: 1}}]\n", "x")
}

func TestLoadErrorsAreReportedTogether(t *testing.T) {
	cfg, err := configs.ParseScheduling("test.yaml", []byte(header+"plugins: [{type: nonsense}, {type: queue-scorer, parameters: {load: no}}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = New(cfg, readyFleet(t, newTestClock(), "a"), 1)
	var list configs.Problems
	if !errors.As(err, &list) || len(list) != 2 {
		t.Errorf("got %v, want two problems", err)
	}
}

func TestLoadWarnings(t *testing.T) {
	f := func(yaml, want string) {
		t.Helper()
		r := newTestRouter(t, readyFleet(t, newTestClock(), "a"), yaml)
		if got := strings.Join(r.Config().Warnings, "\n"); !strings.Contains(got, want) {
			t.Errorf("%s\nwarnings %q, want one with %q", yaml, got, want)
		}
	}
	f("plugins: []\n", "no scorer")
	f("plugins: [{type: queue-scorer}, {type: approx-prefix-cache-producer}]\n", "no scorer reads it")
	f("plugins: [{type: approx-prefix-cache-producer, parameters: {autoTune: false, blockSize: 24}}]\n", "blockSizeTokens")
	f("plugins: [{type: queue-scorer}, {type: max-score-picker}]\nschedulingProfiles: [{name: p, plugins: [{pluginRef: queue-scorer}, {pluginRef: max-score-picker, weight: 2}]}]\n", "no scorer")
	f("plugins: [{type: queue-scorer}, {type: single-profile-handler}]\nschedulingProfiles: [{name: p, plugins: [{pluginRef: queue-scorer}, {pluginRef: single-profile-handler}]}]\n", "no effect")
}

func TestParserSelection(t *testing.T) {
	f := func(yaml string, api API, wantAs API, wantOK bool) {
		t.Helper()
		r := newTestRouter(t, readyFleet(t, newTestClock(), "a"), yaml)
		if as, ok := r.Parser(api); as != wantAs || ok != wantOK {
			t.Errorf("%q API %d: got %d %v, want %d %v", yaml, api, as, ok, wantAs, wantOK)
		}
	}
	f("", APIChat, APIChat, true)
	f("", APIMessages, APIMessages, true)
	f("", APIGenerate, APIGenerate, true)
	f("requestHandler: {parsers: [{pluginRef: openai-parser}]}\n", APIChat, APIChat, true)
	f("requestHandler: {parsers: [{pluginRef: openai-parser}]}\n", APIMessages, APINone, false)
	f("requestHandler: {parsers: [{pluginRef: openai-parser}, {pluginRef: passthrough-parser}]}\n", APIMessages, APINone, true)
	f("requestHandler: {parsers: [{pluginRef: openai-parser}]}\n", APINone, APINone, true)
}

func TestApproxParameters(t *testing.T) {
	f := func(params string, engineBlock, tokens, wantTotal, wantBlock int) {
		t.Helper()
		c := newTestClock()
		fleet := readyFleet(t, c, "a")
		m := observed(0, 0, 0)
		m.BlockTokens = engineBlock
		fleet.Endpoints()[0].Observe(m, c.now())
		r := newTestRouter(t, fleet, "plugins: [{type: prefix-cache-scorer}, {type: approx-prefix-cache-producer, parameters: "+params+"}]\n")
		req := &Request{Weight: 1, Model: []byte("m"), Tokens: make([]byte, 4*tokens)}
		req.Ends = []int{len(req.Tokens)}
		l, err := r.Route(req)
		if err != nil {
			t.Fatal(err)
		}
		if l.Total != wantTotal || l.BlockTokens != wantBlock {
			t.Errorf("%s engine block %d, %d tokens: %d blocks of %d, want %d of %d", params, engineBlock, tokens, l.Total, l.BlockTokens, wantTotal, wantBlock)
		}
	}
	f("{blockSizeTokens: 256}", 128, 192, 2, 128)
	f("{}", 16, 192, 3, 64)
	f("{autoTune: false, blockSizeTokens: 32}", 128, 192, 3, 64)
	f("{autoTune: false, blockSizeTokens: 96}", 128, 192, 2, 96)
	f("{}", 0, 65, 2, 64)
	f("{maxPrefixTokensToMatch: 128}", 0, 640, 2, 64)
	f("{maxPrefixTokensToMatch: 10}", 0, 640, 0, 64)
	f("{maxPrefixTokensToMatch: 0, maxPrefixBlocksToMatch: 3}", 0, 640, 3, 64)
	f("{maxPrefixTokensToMatch: 0, maxPrefixBlocksToMatch: 0}", 0, 640, 10, 64)
}

func TestSeveralPromptsRestartTheChain(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a")
	r := newTestRouter(t, f, "")
	two := func(first, second byte) *Request {
		a, b := promptOf("m", first, 2), promptOf("m", second, 1)
		a.Tokens = append(a.Tokens, b.Tokens...)
		a.Ends = []int{512, 768}
		return a
	}
	for i, want := range []int{0, 3} {
		l, err := r.Route(two(1, 9))
		if err != nil {
			t.Fatal(err)
		}
		l.Done(Completed)
		if l.Matched != want || l.Total != 3 {
			t.Errorf("request %d: %d/%d, want %d/3", i, l.Matched, l.Total, want)
		}
	}
	l, err := r.Route(two(50, 9)) // the second prompt alone is known
	if err != nil {
		t.Fatal(err)
	}
	if l.Matched != 1 {
		t.Errorf("second prompt: %d blocks, want 1", l.Matched)
	}
}

// costTest builds candidates and a request of the given prompt tokens with one match column.
func costTest(prompt int, match []int32, c []Candidate) *Request {
	r := &Request{Weight: 1, Tokens: make([]byte, 4*prompt)}
	r.work.columns = []Column{{Matched: match, Total: (prompt + 63) / 64, BlockTokens: 64}}
	for i := range c {
		c[i].Row = i
	}
	return r
}

func TestExpectedCostByHand(t *testing.T) {
	s := &costScorer{p: costParams{Stall: 0.25, StallCap: 8, Context: 0.03, Scale: 8192, PriorToken: 150_000}}
	c := []Candidate{{InFlight: 7, Awaiting: 3, PendingTokens: 1000}, {InFlight: 0}, {InFlight: 2, PendingTokens: 0}}
	r := costTest(6400, []int32{100, 0, 50}, c)
	got := make([]float64, 3)
	s.Score(r, c, got)
	// Dbar 3, Sbar 2; U 64 (one block at least), 6400, 3200; no drain measured.
	cost := []float64{
		1000 + 64*1.5 + 0.25*4*64 + 0.03*6400*7,
		6400*1.5 + 0.25*-3*4096,
		3200*1.5 + 0.25*-1*3200 + 0.03*6400*2,
	}
	least := min(cost[0], cost[1], cost[2])
	for i := range got {
		if want := 8192 / (8192 + cost[i] - least); math.Abs(got[i]-want) > 1e-12 {
			t.Errorf("candidate %d: score %v, want %v (cost %v)", i, got[i], want, cost[i])
		}
	}
	terms := s.Terms(r, c, 0)
	if last := terms[len(terms)-1]; last.Name != "cost" || math.Abs(last.Value-cost[0]) > 1e-9 {
		t.Errorf("last term %+v, want cost %v", last, cost[0])
	}
}

func TestExpectedCostKnowsSlowReplicas(t *testing.T) {
	s := &costScorer{p: costParams{Stall: 0.25, StallCap: 8, Context: 0.03, Scale: 8192, PriorToken: 150_000}}
	c := []Candidate{{DrainedSeconds: 60, DrainedTokens: 300_000}, {DrainedSeconds: 60, DrainedTokens: 900_000}}
	r := costTest(6400, []int32{0, 0}, c)
	got := make([]float64, 2)
	s.Score(r, c, got)
	if got[1] != 1 || got[0] >= 1 {
		t.Errorf("scores %v, want the replica that drains three times as fast to win", got)
	}
	s.p.PriorToken = 0
	s.Score(r, c, got)
	if got[0] != 1 || got[1] != 1 {
		t.Errorf("with drainPriorTokens 0: scores %v, want no difference", got)
	}
}

func TestLMetricByHand(t *testing.T) {
	c := []Candidate{{InFlight: 1, PendingTokens: 640}, {InFlight: 3}, {}}
	r := costTest(640, []int32{10, 5, 0}, c)
	got := make([]float64, 3)
	lmetricScorer{}.Score(r, c, got)
	product := []float64{(640 + 64) * 2, 320 * 4, 640 * 1}
	for i := range got {
		if want := 640 / product[i]; math.Abs(got[i]-want) > 1e-12 {
			t.Errorf("candidate %d: %v, want %v", i, got[i], want)
		}
	}
}

func TestLeastRequest(t *testing.T) {
	c := []Candidate{{InFlight: 4}, {InFlight: 1}, {InFlight: 2}}
	got := make([]float64, 3)
	leastRequestScorer{}.Score(nil, c, got)
	for i, want := range []float64{0, 1, 2. / 3} {
		if math.Abs(got[i]-want) > 1e-12 {
			t.Errorf("candidate %d: %v, want %v", i, got[i], want)
		}
	}
}

func TestRoundRobinKeepsItsPlace(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b", "c")
	r := newTestRouter(t, f, "plugins: [{type: round-robin-picker}]\n")
	var got []string
	route := func() {
		l, err := r.Route(promptOf("m", 1, 0))
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, l.Endpoint.Name())
		l.Done(Completed)
	}
	route()
	route()
	f.Update(specs("a", "b0", "b", "c"))
	for _, e := range f.Endpoints() {
		e.ObserveFailure()
	}
	for range 4 {
		route()
	}
	if want := "a b b0 c a b"; strings.Join(got, " ") != want {
		t.Errorf("got %s, want %s", strings.Join(got, " "), want)
	}
}

func TestConsistentHashSticksAndIsBounded(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b", "c", "d")
	r := newTestRouter(t, f, "plugins: [{type: consistent-hash-scorer}]\n")
	homes := map[string]bool{}
	for i := byte(0); i < 64; i++ {
		first, err := r.Route(promptOf("m", i, 3))
		if err != nil {
			t.Fatal(err)
		}
		home := first.Endpoint
		first.Done(Completed)
		again, err := r.Route(promptOf("m", i, 9))
		if err != nil {
			t.Fatal(err)
		}
		again.Done(Completed)
		if again.Endpoint != home {
			t.Errorf("prompt %d moved from %s to %s", i, home.Name(), again.Endpoint.Name())
		}
		homes[home.Name()] = true
	}
	if len(homes) != 4 {
		t.Errorf("64 prefixes live on %d of 4 endpoints", len(homes))
	}
	counts := map[string]int{}
	for range 40 {
		l, err := r.Route(promptOf("m", 1, 3))
		if err != nil {
			t.Fatal(err)
		}
		counts[l.Endpoint.Name()]++
	}
	for name, n := range counts {
		if n > 13 { // 1.25 * 40/4, rounded up
			t.Errorf("%s has %d of 40 requests for one prefix, want at most 13", name, n)
		}
	}
}

func TestScorerParameterErrors(t *testing.T) {
	f := func(yaml, want string) {
		t.Helper()
		cfg, err := configs.ParseScheduling("test.yaml", []byte(header+"plugins: ["+yaml+"]\n"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err = New(cfg, readyFleet(t, newTestClock(), "a"), 1); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want an error with %q", yaml, err, want)
		}
	}
	f("{type: expected-cost-scorer, parameters: {stallWeight: -1}}", "stallWeight -1")
	f("{type: expected-cost-scorer, parameters: {scoreScaleTokens: 0}}", "scoreScaleTokens 0")
	f("{type: expected-cost-scorer, parameters: {weight: 1}}", "weight")
	f("{type: consistent-hash-scorer, parameters: {prefixBlocks: 0}}", "prefixBlocks 0")
	f("{type: consistent-hash-scorer, parameters: {boundFactor: 0.5}}", "boundFactor 0.5")
	f("{type: lmetric-scorer, parameters: {x: 1}}", "x")
	f("{type: least-request-scorer, parameters: {x: 1}}", "x")
	f("{type: round-robin-picker, parameters: {x: 1}}", "x")
}

// TestCapacityIsLearned: an engine that holds a quarter of what it says.
func TestCapacityIsLearned(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a")
	r := newTestRouter(t, f, "")
	e := f.Endpoints()[0]
	m := observed(0, 0, 0)
	m.BlockTokens, m.CapacityTokens = 16, 64*1000
	e.Observe(m, c.now())
	route := func(seed byte, cached float64) {
		l, err := r.Route(promptOf("m", seed, 20))
		if err != nil {
			t.Fatal(err)
		}
		l.Usage(1000, int64(1000*cached))
		l.Done(Completed)
	}
	capacity := func() int { return f.indexes[0].index.Capacity(e.slot) }
	route(1, 0)
	if got := capacity(); got != 1000 {
		t.Fatalf("capacity %d, want 1000", got)
	}
	for range 60 {
		route(1, 0) // predicted whole, found nothing
	}
	low := capacity()
	if low > 250 {
		t.Errorf("after 60 wrong predictions the capacity is %d, want at most 250", low)
	}
	for range 60 {
		route(1, 1)
	}
	if got := capacity(); got <= low || got > 1000 {
		t.Errorf("after 60 right predictions the capacity is %d, want between %d and 1000", got, low)
	}
}

// fixedScorer scores candidate i with its i-th number.
type fixedScorer []float64

func (s fixedScorer) Score(_ *Request, _ []Candidate, out []float64) { copy(out, s) }

// Whatever a scorer says, it counts as 0 to 1 times its weight, and NaN as nothing.
func TestScoresAreClamped(t *testing.T) {
	fleet := readyFleet(t, newTestClock(), "a", "b", "c", "d")
	r := newTestRouter(t, fleet, "plugins: [{type: least-request-scorer}]\n")
	r.scorers = []weightedScorer{{"fixed", 2, fixedScorer{7, -3, math.NaN(), 0.25}}, {"other", 1, fixedScorer{math.Inf(1), 0.5, 1, math.Inf(-1)}}}
	if _, err := r.Route(promptOf("m", 1, 1)); err != nil {
		t.Fatal(err)
	}
	if want := []float64{3, 0.5, 1, 0.5}; !slices.Equal(r.totals, want) {
		t.Errorf("got totals %v, want %v", r.totals, want)
	}
}
