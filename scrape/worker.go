package scrape

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/routing"
)

// Rhythms that are no settings.
const (
	maxBackoff = 5 * time.Second // between two attempts while a replica fails
	// noMetricsInterval is how often a replica without a metrics page is asked for one all the same.
	noMetricsInterval = 10 * time.Second
	// healthInterval is how often GET /health is asked when no scrape tells whether the replica can be reached.
	healthInterval = time.Second
)

// config is what a reload replaces for all workers at once.
type config struct {
	plan           *Plan
	connectTimeout time.Duration
	timeout        time.Duration // of one probe
	interval       time.Duration
	modelsInterval time.Duration
	credentials    *configs.Credentials // of replicas that have none of their own
}

func newConfig(s *configs.Settings, p *Plan) (*config, error) {
	c := &config{
		plan:           p,
		connectTimeout: s.Upstream.ConnectTimeout,
		timeout:        s.Scrape.Timeout,
		interval:       s.Scrape.Interval,
		modelsInterval: s.Scrape.ModelsInterval,
	}
	if p.metrics != nil && p.metrics.interval > 0 {
		c.interval = p.metrics.interval
	}
	if p.models.interval > 0 {
		c.modelsInterval = p.models.interval
	}
	var err error
	c.credentials, err = s.Upstream.Credentials()
	return c, err
}

// worker observes one endpoint.
type worker struct {
	m        *Manager
	endpoint *routing.Endpoint
	log      *zap.Logger
	ctx      context.Context
	cancel   context.CancelFunc
	done     chan struct{} // closed when run has returned
	first    chan struct{} // closed when the first scrape has ended
	wake     chan struct{} // a reload

	cards   atomic.Pointer[[]ModelCard]
	results [resultCount]atomic.Int64
	missing [valueCount]atomic.Int64

	kv kvWorker

	mu      sync.Mutex
	clients []*client // one per address and TLS configuration

	// What follows belongs to the goroutine of run.
	config                  *config
	own                     *configs.Credentials // of this replica, nil when it has none
	health, metrics, models *target
	place                   place
	healthBy, metricsBy     *client
	modelsBy                *client
	reader                  reader
	healthAt                time.Time
	metricsAt               time.Time
	modelsAt                time.Time
	ended                   bool // the first scrape has
	noMetrics               bool // the replica has no metrics page
	down                    bool // the last attempt to connect failed
	failures                int  // scrapes in a row
	healthFailures          int
	modelMisses             int
	warned                  values
	warnedEngine            string
}

func newWorker(ctx context.Context, m *Manager, e *routing.Endpoint) *worker {
	w := &worker{
		m: m, endpoint: e, log: m.log.With(zap.String("replica", e.DisplayName())),
		done: make(chan struct{}), first: make(chan struct{}), wake: make(chan struct{}, 1),
	}
	w.ctx, w.cancel = context.WithCancel(ctx)
	w.kv.w = w
	go w.run()
	return w
}

// run probes until the worker is cancelled.
func (w *worker) run() {
	defer close(w.done)
	defer w.cancel()
	defer w.kv.stop()
	stop := context.AfterFunc(w.ctx, w.abort)
	defer stop()
	defer w.abort()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for w.ctx.Err() == nil {
		if c, own := w.m.config.Load(), w.endpoint.Credentials(); c != w.config || own != w.own || w.moved() {
			w.configure(c, own)
		}
		timer.Reset(w.step())
		select {
		case <-timer.C:
		case <-w.wake:
		case <-w.ctx.Done():
		}
	}
}

// abort closes every connection, which ends a probe at once.
func (w *worker) abort() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.clients {
		c.abort()
	}
}

// configure makes the targets anew.
func (w *worker) configure(c *config, own *configs.Credentials) {
	shown := cmp.Or(own, c.credentials)
	w.abort()
	w.mu.Lock()
	w.clients = nil
	w.mu.Unlock()
	u, _ := url.Parse(w.endpoint.URL()) // a fleet's URLs are normalized
	traffic := shown.TLS.Clone()
	traffic.ServerName = cmp.Or(traffic.ServerName, u.Hostname())
	aim := func(s *httpSource, accept, authorization string) (*target, *client) {
		scheme, host, port, config := u.Scheme, u.Hostname(), u.Port(), traffic
		if s.scheme != "" {
			scheme = s.scheme
		}
		if s.port != "" {
			port = s.port
		}
		if s.tls != nil {
			config = s.tls.Clone()
			config.ServerName = traffic.ServerName
			if config.RootCAs == nil {
				config.RootCAs = traffic.RootCAs
			}
		}
		if s.host != "" {
			host = s.host
			config = config.Clone()
			config.ServerName = host // the name that traffic wants may be another's
		}
		t := newTarget(scheme, host, port, s.path, accept, w.m.version, authorization, config)
		return t, w.client(t)
	}
	first := w.config == nil
	w.place = place{}
	w.config, w.own, w.metrics = c, own, nil
	w.health, w.healthBy = aim(&httpSource{path: "/health"}, "*/*", shown.Authorization)
	w.models, w.modelsBy = aim(&c.plan.models, "application/json", shown.Authorization)
	if c.plan.metrics != nil {
		source := *c.plan.metrics
		if c.plan.clusters {
			w.place = w.placed()
			source.host, source.port = w.place.host, w.place.port
		}
		w.metrics, w.metricsBy = aim(&source, "text/plain;version=0.0.4", cmp.Or(shown.Metrics, shown.Authorization))
		if w.place.problem != "" {
			w.log.Warn("the metrics of the cluster are read where its traffic goes", zap.String("problem", w.place.problem))
		}
	}
	w.kv.page, w.kv.pageBy = aim(&httpSource{path: "/kv_event_sources"}, "application/json", shown.Authorization)
	w.noMetrics, w.failures, w.warned, w.warnedEngine = false, 0, 0, ""
	if now := time.Now(); first {
		w.healthAt, w.metricsAt, w.modelsAt = now, now, now
	} else {
		w.healthAt, w.metricsAt, w.modelsAt = now.Add(spread(healthInterval)), now.Add(spread(c.interval)), now.Add(spread(time.Second))
	}
}

// place is where the labels of a cluster say that its metrics are.
type place struct{ host, port, problem string }

func (w *worker) placed() place {
	host, port, err := metricsPlace(w.endpoint.Label)
	if err != nil {
		return place{problem: err.Error()}
	}
	return place{host: host, port: port}
}

// moved reports whether a cluster's metrics are elsewhere now: its labels change while it lives.
func (w *worker) moved() bool {
	if !w.config.plan.clusters {
		return false
	}
	now := w.placed()
	return now != w.place
}

// client returns the client for a target: probes of one address share a connection.
func (w *worker) client(t *target) *client {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.clients {
		if c.serves.same(t) {
			return c
		}
	}
	c := &client{dial: w.m.dial, pages: &w.m.pages, serves: t, closed: w.ctx.Err() != nil}
	w.clients = append(w.clients, c)
	return c
}

// spread returns a random share of d, so that workers that begin together do not go on together.
func spread(d time.Duration) time.Duration { return rand.N(max(d, 1)) }

// jitter changes d by up to a tenth.
func jitter(d time.Duration) time.Duration { return d - d/10 + rand.N(max(d/5, 1)) }

// backoff doubles d for each failure, up to maxBackoff.
func backoff(d time.Duration, failures int) time.Duration {
	for ; failures > 0 && d < maxBackoff; failures-- {
		d = min(2*d, maxBackoff)
	}
	return jitter(d)
}

// step does what is due and returns the time until something is due again.
//
// The model list comes first: an endpoint takes work from the end of its first
// scrape on, and should be known by then for what it serves.
func (w *worker) step() time.Duration {
	now := time.Now()
	if !w.modelsAt.After(now) {
		if err := w.readModels(); err != nil && !w.ended && w.down && w.modelsBy == w.metricsBy {
			w.scraped(resultConnect, err, time.Since(now)) // nobody is there: no need to find out twice
		}
	}
	if w.blind() && !w.healthAt.After(now) {
		w.probe()
	}
	if w.metrics != nil && !w.metricsAt.After(now) {
		w.scrape()
	}
	if w.ctx.Err() == nil && !w.ended {
		w.endpoint.ObserveFailure() // no effect after an observation
		w.ended = true
		close(w.first)
	}
	next := w.modelsAt
	if at := w.kv.step(); !at.IsZero() && at.Before(next) {
		next = at
	}
	if w.metrics != nil && w.metricsAt.Before(next) {
		next = w.metricsAt
	}
	if w.blind() && w.healthAt.Before(next) {
		next = w.healthAt
	}
	return time.Until(next)
}

// blind tells that no scrape shows whether the replica's serving port can be reached.
func (w *worker) blind() bool { return w.metrics == nil || w.noMetrics || w.metricsBy != w.healthBy }

// get fetches a page of the replica.
func (w *worker) get(by *client, t *target) (*page, result, error) {
	p, err := by.get(w.ctx, t, w.config.connectTimeout, time.Now().Add(w.config.timeout))
	if err == nil {
		return p, resultOK, nil
	}
	var e *probeError
	errors.As(err, &e)
	return nil, e.result, err
}

// learn tells the endpoint whether it can be reached, from the result of a
// probe of its serving port: whether a connection could be made.
func (w *worker) learn(r result) {
	switch r {
	case resultConnect:
		w.reach(false)
	case resultTimeout, resultBroken:
		if w.healthBy.fresh { // an old connection says nothing of a new one
			w.reach(true)
		}
	default:
		w.reach(true)
	}
}

// reach records whether the replica can be reached. One that is back may serve
// other models than before.
func (w *worker) reach(ok bool) {
	if ok && w.down {
		w.modelsAt = time.Now()
		w.kv.reportAt = time.Now()
	}
	w.down = !ok
	w.endpoint.SetReachable(ok)
}

// scrape reads the metrics page once.
func (w *worker) scrape() {
	// The page tells of a moment between the request and the answer. The earlier
	// end counts, so that a slow answer does not pass for a fresh one.
	at, began := w.m.fleet.Now(), time.Now()
	p, r, err := w.get(w.metricsBy, w.metrics)
	if w.ctx.Err() != nil {
		w.m.pages.put(p)
		return
	}
	if err == nil {
		r, err = w.observe(p.body, at)
		w.m.pages.put(p)
	}
	if !w.blind() {
		w.learn(r)
	}
	w.scraped(r, err, time.Since(began))
}

// scraped counts a scrape, tells of changes, and says when the next one is due.
func (w *worker) scraped(r result, err error, took time.Duration) {
	w.results[r].Add(1)
	w.m.collector.duration.Observe(took.Seconds())
	interval := w.config.interval
	switch {
	case r == resultOK:
		if w.failures > 0 || w.noMetrics {
			w.log.Info("metrics are back")
		}
		w.failures, w.noMetrics = 0, false
		wait := max(jitter(interval)-took, interval/2)
		if !w.ended {
			wait = spread(interval)
		}
		w.metricsAt = time.Now().Add(wait)
	case r == resultNoMetrics:
		if !w.noMetrics {
			w.log.Info("the replica has no metrics page: it is judged by what kvgate itself has in flight", zap.Error(err))
		}
		w.failures, w.noMetrics = 0, true
		w.metricsAt = time.Now().Add(jitter(noMetricsInterval))
	default:
		if w.failures++; w.failures == 1 {
			w.log.Warn("cannot read the metrics of the replica", zap.String("result", resultNames[r]), zap.Error(err))
		}
		w.metricsAt = time.Now().Add(backoff(interval, w.failures))
	}
}

var errEmpty = errors.New("the page has no series of a known engine: set the label " + engineLabel + " or engineConfigs of " + metricsExtractor)

var errNoAverages = errors.New("the page has no averages over a cluster: a kvgate serves them on its admin listener with admin.llm_d_metrics, and " +
	metricsAddressLabel + " and " + metricsPortLabel + " say where that is")

// observe stores what a page says.
func (w *worker) observe(body []byte, at time.Time) (result, error) {
	engines, unknown := w.config.plan.engineOf(w.endpoint.Label)
	if unknown != w.warnedEngine {
		if w.warnedEngine = unknown; unknown != "" {
			w.log.Warn("no engine has this name: the default engine's metrics are read", zap.String("engine", unknown), zap.String("default", engines[0].name))
		}
	}
	models, _ := w.endpoint.Models()
	before := w.reader.engine
	found, metrics, missing := w.reader.read(body, engines, models)
	if found == nil && w.config.plan.clusters {
		return resultEmpty, errNoAverages
	}
	if found == nil {
		return resultEmpty, errEmpty
	}
	if found != before && found != engines[0] {
		w.log.Info("engine found by its metrics", zap.String("engine", found.name))
	}
	for v := range valueCount {
		if !missing.has(v) {
			continue
		}
		w.missing[v].Add(1)
		if !w.warned.has(v) {
			w.warned |= 1 << v
			w.log.Warn("the metrics page has no usable value", zap.String("field", valueNames[v]), zap.String("engine", found.name))
		}
	}
	w.endpoint.Observe(metrics, at)
	return resultOK, nil
}

// probe asks GET /health. An answer of 500 and above, but for 501, is an engine
// that cannot serve; any other answer is one that can be reached.
func (w *worker) probe() {
	p, r, err := w.get(w.healthBy, w.health)
	w.m.pages.put(p)
	if w.ctx.Err() != nil {
		return
	}
	var status *httpStatus
	if errors.As(err, &status) && status.status >= 500 && status.status != 501 {
		r = resultConnect // to a process, but not to an engine
	}
	if w.learn(r); r == resultConnect {
		w.healthFailures++
	} else {
		w.healthFailures = 0
	}
	w.healthAt = time.Now().Add(backoff(max(healthInterval, w.config.interval), w.healthFailures))
}

// readModels reads the model list once. The error is for the caller to judge; it has been dealt with.
func (w *worker) readModels() error {
	w.modelsAt = time.Now().Add(jitter(w.config.modelsInterval))
	if w.down && w.modelsBy == w.healthBy {
		return nil // reach asks for the list when the replica is back
	}
	p, r, err := w.get(w.modelsBy, w.models)
	if w.ctx.Err() != nil {
		w.m.pages.put(p)
		return err
	}
	if r == resultConnect {
		if w.modelsBy == w.healthBy {
			w.reach(false)
		}
		return err
	}
	var cards []ModelCard
	if err == nil {
		cards, err = parseModels(p.body)
		w.m.pages.put(p)
	}
	if err != nil {
		if w.modelMisses++; w.modelMisses == maxModelMisses {
			w.log.Warn("the model list is unknown: the replica may get any request", zap.Error(err))
			w.cards.Store(nil)
			w.m.fleet.SetModels(w.endpoint, nil, false)
		}
		return err
	}
	w.modelMisses = 0
	names := make([]string, len(cards))
	for i, c := range cards {
		names[i] = c.ID
	}
	w.cards.Store(&cards)
	w.m.fleet.SetModels(w.endpoint, names, true)
	return nil
}
