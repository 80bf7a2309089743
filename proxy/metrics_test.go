package proxy

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/routing"
)

// metricsBench is a Metrics over a small fleet with a clock that moves by hand.
type metricsBench struct {
	*Metrics
	reg   *prometheus.Registry
	fleet *routing.Fleet
	now   time.Time
}

var benchTime = time.Date(2026, 8, 22, 12, 0, 0, 0, time.UTC)

func newMetricsBench(t testing.TB, replicas ...string) *metricsBench {
	t.Helper()
	b := &metricsBench{reg: prometheus.NewRegistry(), now: benchTime}
	b.fleet = routing.NewFleet(func() time.Time { return b.now }, 2*time.Second, zap.NewNop())
	b.setReplicas(replicas...)
	for _, e := range b.fleet.Endpoints() {
		b.fleet.SetModels(e, []string{"m"}, true)
	}
	b.Metrics = NewMetrics(b.reg, b.fleet, []string{"/v1/chat/completions", "/v1/models"})
	return b
}

func (b *metricsBench) setReplicas(names ...string) {
	var specs []routing.EndpointSpec
	for _, n := range names {
		specs = append(specs, routing.EndpointSpec{Name: n, URL: "http://" + n + ":8000"})
	}
	b.fleet.Update(specs)
}

// want compares the series whose lines start with a name and some labels.
func (b *metricsBench) want(t *testing.T, series string, want float64) {
	t.Helper()
	got, ok := b.values(t)[series]
	if !ok {
		t.Errorf("%s: got no such series, want %v", series, want)
	} else if got != want {
		t.Errorf("%s: got %v, want %v", series, got, want)
	}
}

func (b *metricsBench) wantAbsent(t *testing.T, part string) {
	t.Helper()
	for series := range b.values(t) {
		if strings.Contains(series, part) {
			t.Errorf("got %s, want no series with %s", series, part)
		}
	}
}

// values returns every value by name{label="value",...}, labels in the order of
// their names; histograms as their _count and _sum.
func (b *metricsBench) values(t *testing.T) map[string]float64 {
	t.Helper()
	families, err := b.reg.Gather()
	if err != nil {
		t.Fatalf("Gather: got %v, want no error", err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			set := "{" + strings.Join(labels, ",") + "}"
			switch {
			case m.Counter != nil:
				out[f.GetName()+set] = m.Counter.GetValue()
			case m.Gauge != nil:
				out[f.GetName()+set] = m.Gauge.GetValue()
			case m.Histogram != nil:
				out[f.GetName()+"_count"+set] = float64(m.Histogram.GetSampleCount())
				out[f.GetName()+"_sum"+set] = m.Histogram.GetSampleSum()
			}
		}
	}
	return out
}

// fullRecord returns a stream that went well: read 1 ms, route 2 ms, connect
// 4 ms, header 8 ms, first token at 115 ms, ten tokens more in 2 s.
func fullRecord(e *routing.Endpoint) *record {
	ms := func(n int) time.Time { return benchTime.Add(time.Duration(n) * time.Millisecond) }
	return &record{
		start: ms(0), parsed: ms(1), routed: ms(3), sent: ms(7), header: ms(15), firstTok: ms(115), end: ms(2115),
		id: "req-1", client: "10.0.0.1:5000", key: "alice", method: "POST", route: "/v1/chat/completions", model: "m",
		replica: e.Name(), endpoint: e, status: 200, bytesIn: 8192, bytesOut: 4096, events: 13, stream: true, phase: phaseDone,
		promptTokens: 100, cachedTokens: 64, outputTokens: 11,
		matchBlocks: 3, totalBlocks: 4, hashedTokens: 256, predictedTokens: 192, reason: routing.ReasonPrefix.String(), ties: 1,
	}
}

func TestMetricsObserve(t *testing.T) {
	b := newMetricsBench(t, "a")
	e := b.fleet.Endpoints()[0]
	b.observe(fullRecord(e))

	for series, want := range map[string]float64{
		`kvgate_http_requests_total{code="200",model="m",route="/v1/chat/completions"}`:    1,
		`kvgate_http_request_duration_seconds_sum{model="m",route="/v1/chat/completions"}`: 2.115,
		`kvgate_request_body_bytes_sum{route="/v1/chat/completions"}`:                      8192,
		`kvgate_response_body_bytes_sum{route="/v1/chat/completions"}`:                     4096,
		`kvgate_time_to_first_token_seconds_sum{model="m",streaming="true"}`:               0.115,
		`kvgate_time_to_first_token_seconds_count{model="m",streaming="false"}`:            0,
		`kvgate_time_per_output_token_seconds_sum{model="m"}`:                              0.2,
		`kvgate_overhead_seconds_sum{stage="read"}`:                                        0.001,
		`kvgate_overhead_seconds_sum{stage="route"}`:                                       0.002,
		`kvgate_overhead_seconds_sum{stage="connect"}`:                                     0.004,
		`kvgate_prompt_tokens_total{model="m"}`:                                            100,
		`kvgate_completion_tokens_total{model="m"}`:                                        11,
		`kvgate_cached_prompt_tokens_total{model="m"}`:                                     64,
		`kvgate_cache_reported_prompt_tokens_total{model="m"}`:                             100,
		`kvgate_pick_total{model="m",reason="prefix_hit"}`:                                 1,
		`kvgate_pick_total{model="m",reason="cold"}`:                                       0,
		`kvgate_prefix_match_ratio_sum{model="m"}`:                                         0.75,
		`kvgate_prefix_predicted_tokens_total{model="m"}`:                                  192,
		`kvgate_prefix_prompt_tokens_total{model="m"}`:                                     256,
		`kvgate_upstream_requests_total{code_class="2xx",replica="a"}`:                     1,
		`kvgate_upstream_header_seconds_sum{replica="a"}`:                                  0.008,
		`kvgate_aborts_total{by="client",phase="stream"}`:                                  0,
	} {
		b.want(t, series, want)
	}
}

func TestMetricsObserveParts(t *testing.T) {
	f := func(t *testing.T, change func(r *record), want map[string]float64) {
		t.Helper()
		b := newMetricsBench(t, "a")
		r := fullRecord(b.fleet.Endpoints()[0])
		change(r)
		b.observe(r)
		for series, v := range want {
			b.want(t, series, v)
		}
	}
	// What the usage does not tell is not counted as zero.
	f(t, func(r *record) { r.cachedTokens = -1 }, map[string]float64{
		`kvgate_prompt_tokens_total{model="m"}`: 100, `kvgate_cache_reported_prompt_tokens_total{model="m"}`: 0,
	})
	f(t, func(r *record) { r.promptTokens, r.cachedTokens, r.outputTokens = -1, -1, -1 }, map[string]float64{
		`kvgate_prompt_tokens_total{model="m"}`: 0, `kvgate_completion_tokens_total{model="m"}`: 0,
		`kvgate_time_per_output_token_seconds_count{model="m"}`: 1, // by events
	})
	f(t, func(r *record) { r.cachedTokens = 0 }, map[string]float64{
		`kvgate_cached_prompt_tokens_total{model="m"}`: 0, `kvgate_cache_reported_prompt_tokens_total{model="m"}`: 100,
	})
	f(t, func(r *record) { r.outputTokens = 1 }, map[string]float64{`kvgate_time_per_output_token_seconds_count{model="m"}`: 0})
	// A plain answer comes all at once; one without tokens (embeddings) has no first one.
	plain := func(r *record) { r.stream, r.firstTok, r.events = false, time.Time{}, 0 }
	f(t, plain, map[string]float64{
		`kvgate_time_to_first_token_seconds_sum{model="m",streaming="false"}`:  0.015,
		`kvgate_time_to_first_token_seconds_count{model="m",streaming="true"}`: 0,
		`kvgate_time_per_output_token_seconds_count{model="m"}`:                0,
	})
	f(t, func(r *record) { plain(r); r.outputTokens = -1 }, map[string]float64{
		`kvgate_time_to_first_token_seconds_count{model="m",streaming="false"}`: 0,
	})
	f(t, func(r *record) { r.totalBlocks, r.matchBlocks = 0, 0 }, map[string]float64{
		`kvgate_prefix_match_ratio_count{model="m"}`: 0, `kvgate_pick_total{model="m",reason="prefix_hit"}`: 1,
	})

	// Who ended it, and where.
	f(t, func(r *record) { r.clientEnd, r.status, r.phase, r.header = true, 499, phaseHeader, time.Time{} }, map[string]float64{
		`kvgate_aborts_total{by="client",phase="header-wait"}`:                          1,
		`kvgate_http_requests_total{code="499",model="m",route="/v1/chat/completions"}`: 1,
		`kvgate_upstream_requests_total{code_class="none",replica="a"}`:                 1,
		`kvgate_upstream_header_seconds_count{replica="a"}`:                             0,
		`kvgate_time_per_output_token_seconds_count{model="m"}`:                         0,
	})
	f(t, func(r *record) { r.err, r.phase = "shutdown", phaseStream }, map[string]float64{`kvgate_aborts_total{by="shutdown",phase="stream"}`: 1})
	f(t, func(r *record) { r.err, r.phase = "panic", phaseRoute }, map[string]float64{`kvgate_aborts_total{by="gateway",phase="route"}`: 1})
	f(t, func(r *record) { r.err, r.phase = "canceled", phaseRoute }, map[string]float64{`kvgate_aborts_total{by="gateway",phase="route"}`: 1})
	f(t, func(r *record) { r.err, r.phase = "truncated", phaseStream }, map[string]float64{
		`kvgate_aborts_total{by="gateway",phase="stream"}`: 0, `kvgate_time_per_output_token_seconds_count{model="m"}`: 0,
	})

	// Labels are bounded.
	f(t, func(r *record) { r.route = "/etc/passwd" }, map[string]float64{`kvgate_http_requests_total{code="200",model="m",route="other"}`: 1})
	f(t, func(r *record) { r.status = 999 }, map[string]float64{
		`kvgate_http_requests_total{code="other",model="m",route="/v1/chat/completions"}`: 1,
		`kvgate_upstream_requests_total{code_class="5xx",replica="a"}`:                    1,
	})
	f(t, func(r *record) { r.model = "unheard of" }, map[string]float64{`kvgate_prompt_tokens_total{model="other"}`: 100})
	f(t, func(r *record) { r.model = strings.Repeat("m", 1000) }, map[string]float64{`kvgate_prompt_tokens_total{model="other"}`: 100})

	// A request that the gateway answered itself.
	f(t, func(r *record) {
		*r = record{start: benchTime, end: benchTime.Add(time.Millisecond), route: "/v1/models", status: 200, promptTokens: -1, cachedTokens: -1, outputTokens: -1}
	}, map[string]float64{
		`kvgate_http_requests_total{code="200",model="none",route="/v1/models"}`:    1,
		`kvgate_http_request_duration_seconds_sum{model="none",route="/v1/models"}`: 0.001,
		`kvgate_overhead_seconds_count{stage="read"}`:                               0,
		`kvgate_prefix_match_ratio_count{model="none"}`:                             0,
		`kvgate_upstream_requests_total{code_class="none",replica="a"}`:             0,
	})
}

func TestMetricsEvents(t *testing.T) {
	b := newMetricsBench(t, "a")
	e := b.fleet.Endpoints()[0]
	reasons := []string{"connect", "timeout", "reset", "truncated", "poisoned", "5xx", "malformed", "header_too_large", "refused", "error_event"}
	for _, reason := range append(reasons, "gremlins") {
		b.upstreamError(e, reason)
	}
	for _, reason := range append(reasons, "other") {
		b.want(t, `kvgate_upstream_errors_total{reason="`+reason+`",replica="a"}`, 1)
	}
	b.retry("reroute")
	b.retry("resend")
	b.retry("resend")
	b.want(t, `kvgate_retries_total{kind="reroute"}`, 1)
	b.want(t, `kvgate_retries_total{kind="resend"}`, 2)
	b.inFlight(0, 3)
	b.inFlight(0, -1)
	b.inFlight(-1, 1)
	b.inFlight(99, 1)
	b.want(t, `kvgate_http_requests_in_flight{route="/v1/chat/completions"}`, 2)
	b.want(t, `kvgate_http_requests_in_flight{route="/v1/models"}`, 0)
	b.want(t, `kvgate_http_requests_in_flight{route="other"}`, 2)
	b.connOpen(5)
	b.connOpen(-2)
	b.want(t, "kvgate_conns_open{}", 3)

	b.ConfigReload(true, "abc", time.Unix(1000, 5e8))
	b.ConfigReload(false, "broken", time.Unix(2000, 0))
	b.want(t, "kvgate_config_last_reload_success{}", 0)
	b.want(t, "kvgate_config_last_reload_timestamp_seconds{}", 1000.5)
	b.want(t, `kvgate_config_hash_info{hash="abc"}`, 1)
	b.ConfigReload(true, "def", time.Unix(3000, 0))
	b.want(t, "kvgate_config_last_reload_success{}", 1)
	b.want(t, `kvgate_config_hash_info{hash="def"}`, 1)
	b.wantAbsent(t, `hash="abc"`)
}

func TestMetricsFleet(t *testing.T) {
	b := newMetricsBench(t, "a", "b", "c")
	ends := b.fleet.Endpoints()
	m := routing.NoMetrics()
	m.Waiting, m.KVUsage, m.CapacityTokens = 4, 0.25, 4096
	ends[0].Observe(m, b.now)
	ends[1].ObserveFailure()
	ends[1].SetReachable(false)
	b.now = b.now.Add(3 * time.Second)

	for series, want := range map[string]float64{
		`kvgate_replica_up{replica="a"}`:                     1,
		`kvgate_replica_up{replica="b"}`:                     0,
		`kvgate_replica_state{replica="a",state="ready"}`:    1,
		`kvgate_replica_state{replica="b",state="down"}`:     1,
		`kvgate_replica_state{replica="b",state="ready"}`:    0,
		`kvgate_replica_state{replica="c",state="starting"}`: 1,
		`kvgate_replicas{state="ready"}`:                     1,
		`kvgate_replicas{state="draining"}`:                  0,
		`kvgate_replica_waiting_requests{replica="a"}`:       4,
		`kvgate_replica_kv_usage_ratio{replica="a"}`:         0.25,
		`kvgate_replica_capacity_tokens{replica="a"}`:        4096,
		`kvgate_replica_scrape_age_seconds{replica="a"}`:     3,
		`kvgate_replica_in_flight{replica="a"}`:              0,
		`kvgate_replica_in_flight_tokens{replica="a"}`:       0,
		`kvgate_replica_awaiting{replica="a"}`:               0,
		`kvgate_index_blocks{replica="a"}`:                   0,
		// Series of every replica exist before its first request.
		`kvgate_upstream_requests_total{code_class="5xx",replica="c"}`: 0,
		`kvgate_upstream_errors_total{reason="connect",replica="c"}`:   0,
	} {
		b.want(t, series, want)
	}
	b.wantAbsent(t, `kvgate_replica_running_requests{`) // unknown is absent, not zero
	b.wantAbsent(t, `kvgate_replica_scrape_age_seconds{replica="b"}`)
}

func TestMetricsFleetIndex(t *testing.T) {
	b := newMetricsBench(t, "a")
	router, err := routing.New(configs.DefaultScheduling(), b.fleet, 1)
	if err != nil {
		t.Fatalf("New: got %v, want no error", err)
	}
	b.fleet.Endpoints()[0].ObserveFailure()
	req := &routing.Request{API: routing.APIChat, Body: []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 300) + `"}]}`)}
	if err := req.Parse(); err != nil {
		t.Fatalf("Parse: got %v, want no error", err)
	}
	lease, err := router.Route(req)
	if err != nil {
		t.Fatalf("Route: got %v, want no error", err)
	}
	b.want(t, `kvgate_replica_in_flight{replica="a"}`, 1)
	b.want(t, `kvgate_replica_awaiting{replica="a"}`, 1)
	b.want(t, `kvgate_replica_in_flight_tokens{replica="a"}`, float64(lease.Uncached))
	b.want(t, `kvgate_index_blocks{replica="a"}`, float64(lease.Total))
	b.want(t, `kvgate_index_resets_total{producer="approx-prefix-cache-producer"}`, 0)
	if v := b.values(t)[`kvgate_index_bytes{producer="approx-prefix-cache-producer"}`]; v <= 0 {
		t.Errorf("kvgate_index_bytes: got %v, want more than 0", v)
	}

	// A replica that moved while its stream runs keeps one set of series.
	b.fleet.Update([]routing.EndpointSpec{{Name: "a", URL: "http://elsewhere:1"}})
	b.want(t, `kvgate_replica_in_flight{replica="a"}`, 1)
	b.want(t, `kvgate_replica_state{replica="a",state="starting"}`, 1)
	b.want(t, `kvgate_replicas{state="draining"}`, 0)
	// A removed one is draining until the stream ends, then gone.
	b.fleet.Update(nil)
	b.want(t, `kvgate_replica_state{replica="a",state="draining"}`, 1)
	b.want(t, `kvgate_replica_in_flight{replica="a"}`, 1)
	b.wantAbsent(t, `kvgate_index_blocks{replica="a"}`)
	lease.Done(routing.Completed)
	b.wantAbsent(t, `replica="a"`)
}

// The series of a replica go with it; a late request makes them only until the next collection.
func TestMetricsReplicaRemoved(t *testing.T) {
	b := newMetricsBench(t, "a", "b")
	a := b.fleet.Endpoints()[0]
	b.observe(fullRecord(a))
	b.want(t, `kvgate_upstream_requests_total{code_class="2xx",replica="a"}`, 1)
	b.setReplicas("b")
	b.wantAbsent(t, `replica="a"`)
	b.observe(fullRecord(a))
	b.upstreamError(a, "reset")
	b.wantAbsent(t, `replica="a"`)
	if n := len(*b.replicas.Load()); n != 1 {
		t.Errorf("handles: got %d, want 1", n)
	}
	b.setReplicas("a", "b")
	b.want(t, `kvgate_upstream_requests_total{code_class="2xx",replica="a"}`, 0)
}

func TestMetricsModelCap(t *testing.T) {
	b := newMetricsBench(t, "a")
	e := b.fleet.Endpoints()[0]
	var names []string
	for i := range maxModels + 10 {
		names = append(names, fmt.Sprintf("model-%04d", i))
	}
	b.fleet.SetModels(e, names, true)
	r := fullRecord(e)
	for _, name := range names {
		r.model = name
		b.observe(r)
	}
	if n := len(*b.models.Load()); n != maxModels {
		t.Errorf("models with series: got %d, want %d", n, maxModels)
	}
	prompts := func(model string, want float64) {
		t.Helper()
		if got := testutil.ToFloat64(b.byModel[tokPrompt].WithLabelValues(model)); got != want {
			t.Errorf("prompt tokens of %s: got %v, want %v", model, got, want)
		}
	}
	prompts("model-0000", 100)
	prompts("other", 1000)
	// A model that nobody lists any more keeps its counters.
	b.fleet.SetModels(e, nil, true)
	r.model = "model-0000"
	b.observe(r)
	prompts("model-0000", 200)
}

func TestMetricsLint(t *testing.T) {
	b := newMetricsBench(t, "a")
	e := b.fleet.Endpoints()[0]
	e.Observe(routing.Metrics{CapacityTokens: 1}, b.now)
	b.observe(fullRecord(e))
	b.ConfigReload(true, "x", b.now)
	problems, err := testutil.GatherAndLint(b.reg)
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: got %v and error %v, want nothing", problems, err)
	}
}

func TestMetricsObserveAlloc(t *testing.T) {
	b := newMetricsBench(t, "a", "b")
	e := b.fleet.Endpoints()[1]
	r, unknown := fullRecord(e), fullRecord(e)
	unknown.model, unknown.route = strings.Repeat("unheard of ", 10), "/x"
	got := testing.AllocsPerRun(1000, func() {
		b.inFlight(0, 1)
		b.observe(r)
		b.observe(unknown)
		b.upstreamError(e, "reset")
		b.retry("resend")
		b.inFlight(0, -1)
	})
	if got != 0 {
		t.Errorf("allocations per request: got %v, want 0", got)
	}
}

// Requests end while replicas come and go and scrapes run.
func TestMetricsConcurrent(t *testing.T) {
	b := newMetricsBench(t, "a", "b")
	all := b.fleet.Endpoints()
	const workers, each = 8, 200
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				r := fullRecord(all[(w+i)%2])
				r.status = 200 + i%7
				b.observe(r)
				b.upstreamError(all[i%2], "reset")
			}
		})
	}
	wg.Go(func() {
		for i := range 50 {
			if i%2 == 0 {
				b.setReplicas("a")
			} else {
				b.setReplicas("a", "b")
			}
			if _, err := b.reg.Gather(); err != nil {
				t.Errorf("Gather: got %v, want no error", err)
			}
		}
	})
	wg.Wait()
	got := 0.0
	for series, v := range b.values(t) {
		if strings.HasPrefix(series, "kvgate_http_requests_total{") {
			got += v
		}
	}
	if got != workers*each {
		t.Errorf("requests counted: got %v, want %v", got, workers*each)
	}
	b.want(t, `kvgate_upstream_errors_total{reason="reset",replica="a"}`, workers*each/2)
}

func BenchmarkMetricsObserve(b *testing.B) {
	names := make([]string, 100)
	for i := range names {
		names[i] = fmt.Sprintf("replica-%03d", i)
	}
	m := newMetricsBench(b, names...)
	r := fullRecord(m.fleet.Endpoints()[99])
	b.ReportAllocs()
	for b.Loop() {
		m.observe(r)
	}
}
