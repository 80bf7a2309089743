package proxy

import (
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvgate/routing"
)

// Labels that stand for what has no bounded name of its own.
const (
	otherLabel = "other" // a route, model, status or reason outside the known set
	noModel    = "none"  // no model that some replica lists
)

// maxModels and maxKeys bound the models and API keys with series of their own; maxModelName the names of models in bytes.
const (
	maxModels    = 1000
	maxKeys      = 1000
	maxModelName = 256
)

// Bucket limits. Seconds, but for bodyBuckets (bytes).
var (
	durationBuckets = []float64{.005, .025, .05, .1, .2, .4, .6, .8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600}
	firstBuckets    = []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	tokenBuckets    = []float64{.001, .005, .01, .02, .04, .06, .08, .1, .15, .2, .3, .5, .75, 1, 2}
	overheadBuckets = []float64{25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3}
	bodyBuckets     = prometheus.ExponentialBuckets(64, 4, 11) // 64 B to 64 MiB
	ratioBuckets    = prometheus.LinearBuckets(0, .1, 11)
)

// The values of the labels that are fixed. A series of each exists from the start.
var (
	upstreamReasons = [...]string{
		reasonConnect, reasonTimeout, reasonReset, reasonTruncated, reasonMalformed, reasonHead, reasonRefused, reasonEngine, reasonStatus, "poisoned", otherLabel,
	}
	codeClasses    = [...]string{"none", "1xx", "2xx", "3xx", "4xx", "5xx"} // none: no answer came
	retryKinds     = [...]string{"reroute", "resend"}
	abortBy        = [...]string{"client", "gateway", "shutdown"}
	overheadStages = [...]string{"read", "route", "connect"}
)

// Metrics are the process's own series (docs/metrics.md lists them). What
// happens per request is counted in children that were looked up once; what
// the fleet knows anyway is read from it when it is collected.
type Metrics struct {
	fleet  *routing.Fleet
	routes []string // templates; the last is otherLabel

	requests  *prometheus.CounterVec
	duration  *prometheus.HistogramVec
	firstTok  *prometheus.HistogramVec
	perTok    *prometheus.HistogramVec
	picks     *prometheus.CounterVec
	ratio     *prometheus.HistogramVec
	byModel   [len(modelCounters)]*prometheus.CounterVec
	upstream  *prometheus.CounterVec
	upErrors  *prometheus.CounterVec
	upHeader  *prometheus.HistogramVec
	reloadOK  prometheus.Gauge
	reloadAt  prometheus.Gauge
	reloadTag *prometheus.GaugeVec
	conns     prometheus.Gauge
	limited   *prometheus.CounterVec // by key
	strangers [len(authReasons)]prometheus.Counter

	running  []prometheus.Gauge    // by route
	bytesIn  []prometheus.Observer // by route
	bytesOut []prometheus.Observer // by route
	overhead [len(overheadStages)]prometheus.Observer
	retries  [len(retryKinds)]prometheus.Counter
	denied   prometheus.Counter
	aborts   [len(abortBy)][len(phaseNames)]prometheus.Counter

	collectors []prometheus.Collector // all of the above
	gauges     fleetGauges
	learned    learnedSeries

	none, other *modelSeries

	mu       sync.Mutex // guards the growth of what follows; readers take none
	models   atomic.Pointer[[]*modelSeries]
	replicas atomic.Pointer[[]replicaHandle]
	keys     []string // that have series of their own
}

// The token counters of one model, in the order of modelSeries.tokens.
const (
	tokPrompt = iota
	tokCompletion
	tokCached
	tokCacheTold
	tokPredicted
	tokHashed
)

var modelCounters = [...]struct{ name, help string }{
	tokPrompt:     {"kvgate_prompt_tokens_total", "Prompt tokens, from the usage of answers."},
	tokCompletion: {"kvgate_completion_tokens_total", "Generated tokens, from the usage of answers."},
	tokCached:     {"kvgate_cached_prompt_tokens_total", "Prompt tokens that the replica found in its KV cache, from the usage of answers."},
	tokCacheTold:  {"kvgate_cache_reported_prompt_tokens_total", "Prompt tokens of the answers whose usage told the cached tokens."},
	tokPredicted:  {"kvgate_prefix_predicted_tokens_total", "Prompt tokens that the index expected in the cache of the picked replica."},
	tokHashed:     {"kvgate_prefix_prompt_tokens_total", "Prompt tokens that were hashed for the index, in whole blocks."},
}

// modelSeries are the children of one model.
type modelSeries struct {
	name     string
	cells    []atomic.Pointer[routeSeries] // by route, made when first needed
	firstTok [2]prometheus.Observer        // plain, streaming
	perTok   prometheus.Observer
	picks    [routing.ReasonCount]prometheus.Counter
	ratio    prometheus.Observer
	tokens   [len(modelCounters)]prometheus.Counter
}

// routeSeries are the children of one route and model.
type routeSeries struct {
	duration prometheus.Observer
	codes    atomic.Pointer[[]codeSeries]
}

type codeSeries struct {
	code int
	prometheus.Counter
}

// replicaHandle leads from an endpoint to its children. A replica that moved to
// another URL while streams run has two endpoints and one set of children.
type replicaHandle struct {
	endpoint *routing.Endpoint
	series   *replicaSeries
}

type replicaSeries struct {
	name    string
	classes [len(codeClasses)]prometheus.Counter
	errors  [len(upstreamReasons)]prometheus.Counter
	header  prometheus.Observer
}

// NewMetrics registers the process's series. Requests are counted by the index
// or the name of their route in routeTemplates; every other route is "other".
func NewMetrics(reg *prometheus.Registry, fleet *routing.Fleet, routeTemplates []string) *Metrics {
	m := &Metrics{fleet: fleet, routes: append(slices.Clone(routeTemplates), otherLabel), gauges: newFleetGauges(), learned: newLearnedSeries()}

	m.requests = m.counter("kvgate_http_requests_total", "Requests by route template, model and status sent to the client (499: it left before a status).", "route", "model", "code")
	m.duration = m.histogram("kvgate_http_request_duration_seconds", "From the request head to the last byte of the answer.", durationBuckets, "route", "model")
	m.firstTok = m.histogram("kvgate_time_to_first_token_seconds", "From the request head to the first content of the answer.", firstBuckets, "model", "streaming")
	m.perTok = m.histogram("kvgate_time_per_output_token_seconds", "Mean time between two output tokens of one complete stream.", tokenBuckets, "model")
	m.picks = m.counter("kvgate_pick_total", "Requests by the reason for which their last replica was picked.", "model", "reason")
	m.ratio = m.histogram("kvgate_prefix_match_ratio", "Part of a prompt's blocks that the index expected in the cache of the picked replica.", ratioBuckets, "model")
	for i, c := range modelCounters {
		m.byModel[i] = m.counter(c.name, c.help, "model")
	}
	m.upstream = m.counter("kvgate_upstream_requests_total", "Requests by the last replica tried and the class of its answer (none: no answer).", "replica", "code_class")
	m.upErrors = m.counter("kvgate_upstream_errors_total", "Failed attempts by replica and reason.", "replica", "reason")
	m.upHeader = m.histogram("kvgate_upstream_header_seconds", "From the request sent to the response head of the replica.", firstBuckets, "replica")

	m.reloadOK = m.gauge("kvgate_config_last_reload_success", "Whether the last load of the configuration succeeded.").WithLabelValues()
	m.reloadAt = m.gauge("kvgate_config_last_reload_timestamp_seconds", "When the configuration in force was loaded.").WithLabelValues()
	m.reloadTag = m.gauge("kvgate_config_hash_info", "The configuration in force.", "hash")
	m.conns = m.gauge("kvgate_conns_open", "Open client connections.").WithLabelValues()

	running := m.gauge("kvgate_http_requests_in_flight", "Requests that have been read and not ended.", "route")
	in := m.histogram("kvgate_request_body_bytes", "Size of request bodies.", bodyBuckets, "route")
	out := m.histogram("kvgate_response_body_bytes", "Size of response bodies.", bodyBuckets, "route")
	for _, route := range m.routes {
		m.running = append(m.running, running.WithLabelValues(route))
		m.bytesIn = append(m.bytesIn, in.WithLabelValues(route))
		m.bytesOut = append(m.bytesOut, out.WithLabelValues(route))
	}
	overhead := m.histogram("kvgate_overhead_seconds", "Time spent in the gateway: read (body and scan), route (hash, match, pick), connect (dial or reuse, send).", overheadBuckets, "stage")
	for i, stage := range overheadStages {
		m.overhead[i] = overhead.WithLabelValues(stage)
	}
	retries := m.counter("kvgate_retries_total", "Second attempts: reroute (another replica), resend (same replica, fresh connection).", "kind")
	for i, kind := range retryKinds {
		m.retries[i] = retries.WithLabelValues(kind)
	}
	m.denied = m.counter("kvgate_reroutes_denied_total", "Requests that got no second replica, as upstream.retry_percent and upstream.retry_min were used up.").WithLabelValues()
	aborts := m.counter("kvgate_aborts_total", "Requests given up, by whom and how far they had come.", "by", "phase")
	for i, by := range abortBy {
		for p, phase := range phaseNames {
			m.aborts[i][p] = aborts.WithLabelValues(by, phase)
		}
	}
	m.limited = m.counter("kvgate_rate_limited_total", "Requests refused by the limits of their API key.", "key")
	m.limited.WithLabelValues(otherLabel)
	strangers := m.counter("kvgate_auth_failures_total", "Requests refused for want of a valid API key, or of a model that it may use.", "reason")
	for i, reason := range authReasons {
		m.strangers[i] = strangers.WithLabelValues(reason)
	}
	m.models.Store(&[]*modelSeries{})
	m.replicas.Store(&[]replicaHandle{})
	m.none, m.other = m.newModel(noModel), m.newModel(otherLabel)
	reg.MustRegister(m)
	return m
}

func (m *Metrics) counter(name, help string, labels ...string) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	m.collectors = append(m.collectors, v)
	return v
}

func (m *Metrics) gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	m.collectors = append(m.collectors, v)
	return v
}

func (m *Metrics) histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	m.collectors = append(m.collectors, v)
	return v
}

// observe counts a request. It is called once, when the request ends.
func (m *Metrics) observe(r *record) {
	route := m.route(r.route)
	model := m.model(r.model)
	cell := m.cell(model, route)
	m.code(cell, model, route, r.status).Inc()
	cell.duration.Observe(r.end.Sub(r.start).Seconds())
	m.bytesIn[route].Observe(float64(r.bytesIn))
	m.bytesOut[route].Observe(float64(r.bytesOut))

	for i, span := range [...][2]time.Time{{r.start, r.parsed}, {r.parsed, r.routed}, {r.routed, r.sent}} {
		if !span[0].IsZero() && !span[1].IsZero() {
			m.overhead[i].Observe(span[1].Sub(span[0]).Seconds())
		}
	}
	if first := firstContent(r); !first.IsZero() {
		kind := 0
		if r.stream {
			kind = 1
		}
		model.firstTok[kind].Observe(first.Sub(r.start).Seconds())
		steps := r.outputTokens - 1
		if r.outputTokens < 0 {
			steps = r.events - 1
		}
		if r.stream && steps > 0 && r.err == "" && !r.clientEnd {
			model.perTok.Observe(r.end.Sub(first).Seconds() / float64(steps))
		}
	}
	m.tokens(model, r)
	if i := abortIndex(r); i >= 0 {
		m.aborts[i][r.phase].Inc()
	}
	if r.endpoint == nil {
		return
	}
	replica := m.replica(r.endpoint)
	class := 0
	if !r.header.IsZero() {
		class = min(max(r.status/100, 0), len(codeClasses)-1)
		if !r.sent.IsZero() {
			replica.header.Observe(r.header.Sub(r.sent).Seconds())
		}
	}
	replica.classes[class].Inc()
}

// firstContent returns when the first generated content came, zero when none
// did. An engine sends the head of a plain answer together with its text.
func firstContent(r *record) time.Time {
	if !r.stream && r.outputTokens > 0 {
		return r.header
	}
	return r.firstTok
}

// tokens counts what was predicted of the prompt and what the answer told of it.
func (m *Metrics) tokens(model *modelSeries, r *record) {
	add := func(i int, n int64) {
		if n > 0 {
			model.tokens[i].Add(float64(n))
		}
	}
	add(tokPrompt, r.promptTokens)
	add(tokCompletion, r.outputTokens)
	if r.cachedTokens >= 0 && r.promptTokens > 0 {
		add(tokCached, r.cachedTokens)
		add(tokCacheTold, r.promptTokens)
	}
	if r.reason == "" {
		return
	}
	for i := range routing.ReasonCount {
		if i.String() == r.reason {
			model.picks[i].Inc()
		}
	}
	if r.totalBlocks > 0 {
		model.ratio.Observe(float64(r.matchBlocks) / float64(r.totalBlocks))
		add(tokPredicted, r.predictedTokens)
		add(tokHashed, r.hashedTokens)
	}
}

// abortIndex returns who gave the request up, as an index of abortBy, -1 when nobody did.
func abortIndex(r *record) int {
	switch {
	case r.clientEnd:
		return 0
	case r.err == reasonShutdown:
		return 2
	case r.err == reasonCanceled || r.err == reasonPanic:
		return 1
	}
	return -1
}

// upstreamError counts an attempt that a replica failed. A reason that is not
// among upstreamReasons is "other".
func (m *Metrics) upstreamError(e *routing.Endpoint, reason string) {
	i := slices.Index(upstreamReasons[:], reason)
	if i < 0 {
		i = len(upstreamReasons) - 1
	}
	m.replica(e).errors[i].Inc()
}

// inFlight adds delta to the requests in flight on a route, by its index; an index outside the templates is "other".
func (m *Metrics) inFlight(route, delta int) {
	if uint(route) >= uint(len(m.running)) {
		route = len(m.running) - 1
	}
	m.running[route].Add(float64(delta))
}

// connOpen adds delta to the open client connections.
func (m *Metrics) connOpen(delta int) { m.conns.Add(float64(delta)) }

// retry counts a second attempt: "reroute" or "resend".
func (m *Metrics) retry(kind string) {
	if i := slices.Index(retryKinds[:], kind); i >= 0 {
		m.retries[i].Inc()
	}
}

// authFailure counts a request that was not let in: one of authReasons.
func (m *Metrics) authFailure(reason string) {
	if i := slices.Index(authReasons[:], reason); i >= 0 {
		m.strangers[i].Inc()
	}
}

// rateLimited returns the counter of a key's refused requests: its own for the
// first maxKeys names, else that of all others.
func (m *Metrics) rateLimited(key string) prometheus.Counter {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !slices.Contains(m.keys, key) {
		if len(m.keys) >= maxKeys {
			key = otherLabel
		} else {
			m.keys = append(m.keys, key)
		}
	}
	return m.limited.WithLabelValues(key)
}

// ConfigReload says how a load of the configuration ended. The hash and the
// time of a failed one are ignored: those of the configuration in force stay.
func (m *Metrics) ConfigReload(ok bool, hash string, at time.Time) {
	if !ok {
		m.reloadOK.Set(0)
		return
	}
	m.reloadOK.Set(1)
	m.reloadAt.Set(float64(at.UnixNano()) / 1e9)
	m.reloadTag.Reset()
	m.reloadTag.WithLabelValues(hash).Set(1)
}

// route returns the index of a route template.
func (m *Metrics) route(template string) int {
	if i := slices.Index(m.routes, template); i >= 0 {
		return i
	}
	return len(m.routes) - 1
}

// model returns the series of a model: its own when some replica lists or has
// listed it, else those of all other models, so that clients cannot make series.
func (m *Metrics) model(name string) *modelSeries {
	if name == "" {
		return m.none
	}
	list := *m.models.Load()
	if i, ok := findModel(list, name); ok {
		return list[i]
	}
	var buf [maxModelName]byte
	if copy(buf[:], name) < len(name) || len(list) >= maxModels {
		return m.other
	}
	known := m.fleet.KnownModel(buf[:len(name)])
	if known == "" {
		return m.other
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	list = *m.models.Load()
	i, ok := findModel(list, known)
	switch {
	case ok:
		return list[i]
	case len(list) >= maxModels:
		return m.other
	}
	s := m.newModel(known)
	next := slices.Insert(slices.Clone(list), i, s)
	m.models.Store(&next)
	return s
}

func findModel(list []*modelSeries, name string) (int, bool) {
	return slices.BinarySearchFunc(list, name, func(s *modelSeries, name string) int { return strings.Compare(s.name, name) })
}

func (m *Metrics) newModel(name string) *modelSeries {
	s := &modelSeries{
		name:     name,
		cells:    make([]atomic.Pointer[routeSeries], len(m.routes)),
		firstTok: [2]prometheus.Observer{m.firstTok.WithLabelValues(name, "false"), m.firstTok.WithLabelValues(name, "true")},
		perTok:   m.perTok.WithLabelValues(name),
		ratio:    m.ratio.WithLabelValues(name),
	}
	for i := range s.picks {
		s.picks[i] = m.picks.WithLabelValues(name, routing.Reason(i).String())
	}
	for i := range s.tokens {
		s.tokens[i] = m.byModel[i].WithLabelValues(name)
	}
	return s
}

// cell returns the series of a model on a route.
func (m *Metrics) cell(model *modelSeries, route int) *routeSeries {
	if c := model.cells[route].Load(); c != nil {
		return c
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := model.cells[route].Load(); c != nil {
		return c
	}
	c := &routeSeries{duration: m.duration.WithLabelValues(m.routes[route], model.name)}
	c.codes.Store(&[]codeSeries{})
	model.cells[route].Store(c)
	return c
}

// code returns the counter of a status.
func (m *Metrics) code(cell *routeSeries, model *modelSeries, route, status int) prometheus.Counter {
	if status < 100 || status > 599 {
		status = 0
	}
	for _, c := range *cell.codes.Load() {
		if c.code == status {
			return c.Counter
		}
	}
	label := otherLabel
	if status != 0 {
		label = strconv.Itoa(status)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c := codeSeries{status, m.requests.WithLabelValues(m.routes[route], model.name, label)}
	next := append(slices.Clone(*cell.codes.Load()), c) // twice the same entry after a race: the same counter
	cell.codes.Store(&next)
	return c.Counter
}

// replica returns the series of an endpoint.
func (m *Metrics) replica(e *routing.Endpoint) *replicaSeries {
	list := *m.replicas.Load()
	for i := range list {
		if list[i].endpoint == e {
			return list[i].series
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.addReplica(e)
}

// addReplica makes the series of an endpoint unless they are there. The caller holds mu.
func (m *Metrics) addReplica(e *routing.Endpoint) *replicaSeries {
	list := *m.replicas.Load()
	var s *replicaSeries
	for _, h := range list {
		if h.endpoint == e {
			return h.series
		}
		if h.series.name == e.DisplayName() {
			s = h.series
		}
	}
	if s == nil {
		s = &replicaSeries{name: e.DisplayName()}
		s.header = m.upHeader.WithLabelValues(s.name)
		for i, class := range codeClasses {
			s.classes[i] = m.upstream.WithLabelValues(s.name, class)
		}
		for i, reason := range upstreamReasons {
			s.errors[i] = m.upErrors.WithLabelValues(s.name, reason)
		}
	}
	next := append(slices.Clone(list), replicaHandle{e, s})
	m.replicas.Store(&next)
	return s
}

// sweep makes the replicas' series those of the endpoints that are there or
// whose streams run, and returns the latter, live ones first.
func (m *Metrics) sweep() (live, leaving []*routing.Endpoint) {
	m.mu.Lock()
	defer m.mu.Unlock()
	live, leaving = m.fleet.Endpoints(), m.fleet.Leaving() // under mu: an endpoint that has series was in the fleet before
	old := *m.replicas.Load()
	keep := slices.DeleteFunc(slices.Clone(old), func(h replicaHandle) bool {
		return !slices.Contains(live, h.endpoint) && !slices.Contains(leaving, h.endpoint)
	})
	m.replicas.Store(&keep)
	for _, e := range live {
		m.addReplica(e)
	}
	now := *m.replicas.Load()
	for _, h := range old {
		if !slices.ContainsFunc(now, func(x replicaHandle) bool { return x.series.name == h.series.name }) {
			gone := prometheus.Labels{"replica": h.series.name}
			m.upstream.DeletePartialMatch(gone)
			m.upErrors.DeletePartialMatch(gone)
			m.upHeader.DeletePartialMatch(gone)
		}
	}
	return live, leaving
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.collectors {
		c.Describe(ch)
	}
	m.gauges.describe(ch)
	m.learned.describe(ch)
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	live, leaving := m.sweep()
	for _, c := range m.collectors {
		c.Collect(ch)
	}
	m.gauges.collect(ch, m.fleet, live, leaving)
	m.learned.collect(ch, m.fleet)
}
