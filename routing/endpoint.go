package routing

import (
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvgate/configs"
)

// Metrics is one scraped observation of a replica. A value that the page did
// not have, or that is negative or NaN, is NaN (floats) or zero (integers).
type Metrics struct {
	Waiting float64 // requests in the engine's queue, summed over engines
	Running float64 // requests in the engine's batch, summed over engines
	KVUsage float64 // fraction of KV blocks in use, 0..1, mean over engines

	BlockTokens    int   // tokens per KV block, 0 when unknown
	CapacityTokens int64 // tokens that the KV cache holds, summed over engines, 0 when unknown

	RunningAdapters []string // LoRA adapters in the batch
	WaitingAdapters []string // LoRA adapters in the queue
	MaxAdapters     int      // LoRA adapters that fit at once, 0 when unknown
}

// NoMetrics returns the observation that knows nothing.
func NoMetrics() Metrics {
	return Metrics{Waiting: math.NaN(), Running: math.NaN(), KVUsage: math.NaN()}
}

// Observation is a Metrics value with the time at which it was true.
type Observation struct {
	Metrics
	At time.Time
}

// State says whether an endpoint takes new work.
type State int32

// The states of an endpoint, in the order of its life.
const (
	// Starting: known, and its first scrape has not ended yet.
	Starting State = iota
	// Ready: takes work.
	Ready
	// Down: the last attempts to reach it failed. It takes work only when every other endpoint is down too.
	Down
	// Draining: finishes what it has and takes nothing new.
	Draining
)

var stateNames = [...]string{"starting", "ready", "down", "draining"}

// String returns the state's name as the admin surface prints it.
func (s State) String() string { return stateNames[s] }

// EndpointSpec is what a source of endpoints says about one replica.
type EndpointSpec struct {
	Namespace string // "default" when empty
	Name      string
	URL       string // scheme://host:port, without a path
	Labels    map[string]string
	Source    string // where it was declared, for messages

	Credentials *configs.Credentials // its own; nil: those of all replicas
}

// ID returns namespace/name, the identity of the replica.
func (s EndpointSpec) ID() string {
	if s.Namespace == "" {
		return "default/" + s.Name
	}
	return s.Namespace + "/" + s.Name
}

// Endpoint is one replica: its identity, what was observed of it, and what
// this process has sent to it. Proxy, scraper and router meet here, in atomics.
type Endpoint struct {
	// What every pick reads of every endpoint, in as few cache lines as it fits.
	observation  atomic.Pointer[Observation]
	scraped      atomic.Bool  // the first scrape has ended, well or badly
	down         atomic.Bool  // the last attempt to connect failed
	draining     atomic.Bool  // by the operator or by removal
	gone         atomic.Bool  // removed: no index may hold its slot any more
	trial        atomic.Int32 // requests out that decide whether it comes back
	ejectedUntil atomic.Int64 // Unix nanoseconds
	returned     atomic.Int64 // Unix nanoseconds at which its slow start began, or slowStartDue, or 0
	inFlight     atomic.Int64 // requests dispatched and not ended
	awaiting     atomic.Int64 // of these, requests without a first token
	pending      atomic.Int64 // uncached prompt tokens of the awaiting requests
	drain        drainRate
	change       change

	id     string
	name   string
	url    string
	source string
	labels atomic.Pointer[map[string]string]
	own    atomic.Pointer[configs.Credentials]
	slot   int // column of this endpoint in every index, stable while it lives

	models   atomic.Pointer[modelList]
	failures atomic.Int32 // failed requests in a row

	// Transport belongs to the proxy: its connections to this replica, found
	// without a map.
	Transport atomic.Value
}

func newEndpoint(s EndpointSpec) *Endpoint {
	e := &Endpoint{id: s.ID(), name: s.Name, url: s.URL, source: s.Source}
	e.set(s)
	return e
}

// set takes over what may change while the endpoint lives.
func (e *Endpoint) set(s EndpointSpec) {
	e.setLabels(s.Labels)
	e.own.Store(s.Credentials)
}

// Credentials returns what this replica alone is shown and must show; nil: what
// holds for all of them.
func (e *Endpoint) Credentials() *configs.Credentials { return e.own.Load() }

func (e *Endpoint) setLabels(labels map[string]string) {
	labels = maps.Clone(labels)
	e.labels.Store(&labels)
}

type modelList struct {
	names []string // sorted
	known bool
}

// ID returns namespace/name.
func (e *Endpoint) ID() string { return e.id }

// Name returns the name without its namespace.
func (e *Endpoint) Name() string { return e.name }

// URL returns scheme://host:port.
func (e *Endpoint) URL() string { return e.url }

// Source says where the endpoint was declared.
func (e *Endpoint) Source() string { return e.source }

// Label returns the value of a label and whether it is set.
func (e *Endpoint) Label(key string) (string, bool) {
	v, ok := (*e.labels.Load())[key]
	return v, ok
}

// Labels returns a copy of all labels.
func (e *Endpoint) Labels() map[string]string { return maps.Clone(*e.labels.Load()) }

// Slot returns the endpoint's column in the indexes.
func (e *Endpoint) Slot() int { return e.slot }

// Observe stores what a scrape has read. The endpoint takes work from now on.
func (e *Endpoint) Observe(m Metrics, at time.Time) {
	e.observation.Store(&Observation{Metrics: m, At: at})
	e.scraped.Store(true)
	e.changed()
}

// ObserveFailure says that a scrape ended without an observation. The endpoint
// takes work all the same: a replica without metrics serves.
func (e *Endpoint) ObserveFailure() {
	e.scraped.Store(true)
	e.changed()
}

// Observation returns the newest observation, nil before the first.
func (e *Endpoint) Observation() *Observation { return e.observation.Load() }

// Models returns the models that the replica lists, sorted, and whether the list is known.
func (e *Endpoint) Models() (names []string, known bool) {
	if l := e.models.Load(); l != nil {
		return l.names, l.known
	}
	return nil, false
}

// setModels stores the list and reports whether it changed.
func (e *Endpoint) setModels(names []string, known bool) bool {
	names = slices.Clone(names)
	slices.Sort(names)
	names = slices.Compact(names)
	old := e.models.Load()
	if old != nil && old.known == known && slices.Equal(old.names, names) {
		return false
	}
	e.models.Store(&modelList{names: names, known: known})
	return old != nil || known
}

// SetReachable records whether the last attempt to connect succeeded.
func (e *Endpoint) SetReachable(ok bool) {
	if e.down.Load() == ok && e.down.Swap(!ok) == ok {
		if ok {
			e.returned.Store(slowStartDue)
		}
		e.changed()
	}
}

// Passive ejection: a replica that fails this many requests in a row is left out
// for the duration. Then it is on trial: it takes one request at a time, the first
// that it answers brings it back, the first that it fails leaves it out again.
const (
	ejectAfter = 5
	ejectFor   = 10 * time.Second
)

// Slow start: for this long the share that a replica which came back may have of
// the requests in flight grows linearly from one request to an even share.
const (
	slowStart    = 10 * time.Second
	slowStartDue = -1 // begins at the next pick
)

// ReportFailure counts a request that the replica failed (no answer, a broken
// answer, a 5xx other than 501 and 503).
func (e *Endpoint) ReportFailure(now time.Time) {
	if e.failures.Add(1) >= ejectAfter {
		e.ejectedUntil.Store(now.Add(ejectFor).UnixNano())
		e.changed()
	}
}

// ReportSuccess says that the replica has answered a request.
func (e *Endpoint) ReportSuccess() {
	if e.failures.Load() == 0 {
		return
	}
	e.failures.Store(0)
	if e.ejectedUntil.Swap(0) != 0 {
		e.returned.Store(slowStartDue)
		e.changed()
	}
}

// onTrial says whether the endpoint was ejected and has not answered since.
func (e *Endpoint) onTrial() bool { return e.ejectedUntil.Load() != 0 }

// warm says whether an endpoint that came back may take one more request, when
// even is what each endpoint would have of those in flight.
func (e *Endpoint) warm(now time.Time, even float64) bool {
	e.returned.CompareAndSwap(slowStartDue, now.UnixNano())
	from := e.returned.Load()
	if from == 0 {
		return true
	}
	age := now.UnixNano() - from
	if age >= int64(slowStart) {
		e.returned.CompareAndSwap(from, 0)
		return true
	}
	return float64(e.InFlight()) < max(1, even*float64(age)/float64(slowStart))
}

// stateAt returns the state in which a pick at that time sees the endpoint.
func (e *Endpoint) stateAt(now time.Time) State {
	switch {
	case e.draining.Load():
		return Draining
	case !e.scraped.Load():
		return Starting
	case e.down.Load():
		return Down
	}
	if until := e.ejectedUntil.Load(); until != 0 && (now.UnixNano() < until || e.trial.Load() > 0) {
		return Down
	}
	return Ready
}

// InFlight returns the number of requests dispatched and not ended.
func (e *Endpoint) InFlight() int { return int(e.inFlight.Load()) }

// Awaiting returns the number of requests dispatched that have no first token yet.
func (e *Endpoint) Awaiting() int { return int(e.awaiting.Load()) }

// PendingTokens returns the uncached prompt tokens of the requests that await a first token.
func (e *Endpoint) PendingTokens() int64 { return e.pending.Load() }

// Drained returns how fast the replica has turned outstanding prompt tokens into
// first tokens: busy seconds and uncached tokens, both decaying with a time
// constant of 60 s. Seconds over tokens is its cost per token.
func (e *Endpoint) Drained() (seconds, tokens float64) {
	return math.Float64frombits(e.drain.secondsBits.Load()), math.Float64frombits(e.drain.tokensBits.Load())
}

// drainRate measures how fast a replica turns outstanding prompt tokens into
// first tokens: (uncached tokens that reached a first token) / (time with at
// least one request awaiting one), both decaying with a time constant of 60 s.
type drainRate struct {
	// The two below as of the last first token, for readers without the lock.
	secondsBits, tokensBits atomic.Uint64

	mu      sync.Mutex
	since   time.Time // last update
	busy    bool      // requests are awaiting since then
	seconds float64   // decayed busy seconds
	tokens  float64   // decayed tokens
}

const drainTimeConstant = 60 // seconds

// advance moves the measurement to now. The caller holds mu.
func (d *drainRate) advance(now time.Time) {
	if d.since.IsZero() {
		d.since = now
		return
	}
	dt := now.Sub(d.since).Seconds()
	if dt <= 0 {
		return
	}
	d.since = now
	k := math.Exp(-dt / drainTimeConstant)
	d.seconds *= k
	d.tokens *= k
	if d.busy {
		d.seconds += dt
	}
}

// begin notes that a request now awaits its first token.
func (d *drainRate) begin(now time.Time) {
	d.mu.Lock()
	d.advance(now)
	d.busy = true
	d.mu.Unlock()
}

// end notes that a request stopped waiting: tokens > 0 when it got its first
// token, 0 when it failed. idle says that no other request is waiting.
func (d *drainRate) end(now time.Time, tokens int64, idle bool) {
	d.mu.Lock()
	d.advance(now)
	d.tokens += float64(tokens)
	if idle {
		d.busy = false
	}
	d.secondsBits.Store(math.Float64bits(d.seconds))
	d.tokensBits.Store(math.Float64bits(d.tokens))
	d.mu.Unlock()
}
