package routing

import (
	"errors"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kvgate/kvindex"
)

// Errors of a decision.
var (
	// ErrModelNotFound: every replica's model list is known and none has the model.
	ErrModelNotFound = errors.New("no replica serves this model")
	// ErrModelMissing: the body names no model and the fleet serves more than one.
	ErrModelMissing = errors.New("the request names no model and the fleet serves more than one")
	// ErrNoEndpoints: no replica can take the request.
	ErrNoEndpoints = errors.New("no replica is available")
	// ErrFiltered: replicas are there, but the profile's filters left none.
	ErrFiltered = errors.New("the scheduling profile's filters left no replica")
	// ErrCanceled: the client has left while the request waited for its decision.
	ErrCanceled = errors.New("the client has left")
)

// Fleet is the set of endpoints and everything that lives as long as they do:
// their slots and the indexes of what they hold. Routers come and go with the
// configuration; the fleet stays.
//
// Lock order: Fleet.mu, then Endpoint.drain.mu, or the locks of a preciseIndex. Match, score, pick and record
// of one request run under Fleet.mu.
type Fleet struct {
	mu        sync.Mutex
	now       func() time.Time
	log       *zap.Logger
	staleness atomic.Int64 // nanoseconds
	view      atomic.Pointer[fleetView]
	changes   changes
	pinned    pinned

	slots       []*Endpoint // by slot, nil when free
	gone        []*Endpoint // removed, streams still open
	indexes     []*prefixIndex
	precise     []*preciseIndex
	predictions []*predictions
	bursts      []*burstCounts
	sessions    []*sessionTable
	tokens      tokenRatio // of models that no list names
	rendered    *renderCache
	local       *localFiles
	sources     [tokenSourceCount]atomic.Uint64
}

// fleetView is an immutable snapshot for the request path.
type fleetView struct {
	endpoints []*Endpoint // sorted by ID
	models    []modelView // sorted by name
	unlisted  []*Endpoint // those that may serve a model which nobody lists
	allKnown  bool        // every list is known
}

type modelView struct {
	name      string
	endpoints []*Endpoint // list the model, or have no known list; sorted by ID
	tokens    *tokenRatio
}

// prefixIndex is an approximate index with the block size its hashes were made with.
type prefixIndex struct {
	producer    string
	blockTokens int
	index       *kvindex.Index
	resets      atomic.Int64      // times a new block size has cleared it
	learned     []learnedCapacity // by slot
}

// NewFleet returns an empty fleet. now is the clock of every decision; an
// observation older than staleness counts as missing.
func NewFleet(now func() time.Time, staleness time.Duration, log *zap.Logger) *Fleet {
	f := &Fleet{now: now, log: log}
	f.SetStaleness(staleness)
	f.view.Store(&fleetView{allKnown: false})
	return f
}

// SetStaleness changes the age from which an observation counts as missing.
func (f *Fleet) SetStaleness(d time.Duration) { f.staleness.Store(int64(d)) }

// Now returns the fleet's time.
func (f *Fleet) Now() time.Time { return f.now() }

// Endpoints returns the endpoints in ID order. The slice must not be changed.
func (f *Fleet) Endpoints() []*Endpoint { return f.view.Load().endpoints }

// Leaving returns removed endpoints whose streams have not ended.
func (f *Fleet) Leaving() []*Endpoint {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sweepGone()
	return slices.Clone(f.gone)
}

func (f *Fleet) sweepGone() {
	f.gone = slices.DeleteFunc(f.gone, func(e *Endpoint) bool { return e.InFlight() == 0 })
}

// Update makes the fleet equal to specs (level-triggered). It returns what came
// and what went. A removed endpoint gets no new work, its index entries go, its
// streams finish; if it comes back while they run, it is the same endpoint. An
// endpoint whose URL changed is another endpoint. Identities must be unique.
func (f *Fleet) Update(specs []EndpointSpec) (added, removed []*Endpoint) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sweepGone()
	old := f.view.Load().endpoints
	next := make([]*Endpoint, 0, len(specs))
	for _, s := range specs {
		if e := findEndpoint(old, s); e != nil {
			e.set(s)
			next = append(next, e)
			continue
		}
		e := findEndpoint(f.gone, s)
		if e != nil {
			f.gone = slices.DeleteFunc(f.gone, func(x *Endpoint) bool { return x == e })
			e.set(s)
			e.draining.Store(false)
			e.gone.Store(false)
			e.scraped.Store(false)
			e.changed()
		} else {
			e = newEndpoint(s)
			e.change.of = &f.changes
		}
		e.slot = f.takeSlot(e)
		for _, x := range f.precise {
			x.join(e, e.slot)
		}
		next = append(next, e)
		added = append(added, e)
	}
	for _, e := range old {
		if !slices.Contains(next, e) {
			f.release(e)
			removed = append(removed, e)
		}
	}
	slices.SortFunc(next, func(a, b *Endpoint) int { return compareStrings(a.id, b.id) })
	f.publish(next)
	return added, removed
}

func compareStrings(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func findEndpoint(list []*Endpoint, s EndpointSpec) *Endpoint {
	id := s.ID()
	for _, e := range list {
		if e.id == id && e.URL() == s.URL {
			return e
		}
	}
	return nil
}

func (f *Fleet) takeSlot(e *Endpoint) int {
	for i, x := range f.slots {
		if x == nil {
			f.slots[i] = e
			return i
		}
	}
	f.slots = append(f.slots, e)
	return len(f.slots) - 1
}

// release takes the endpoint out of every index and frees its slot.
func (f *Fleet) release(e *Endpoint) {
	e.gone.Store(true)
	e.draining.Store(true)
	e.changed()
	for _, x := range f.indexes {
		x.index.Clear(e.slot)
	}
	for _, x := range f.precise {
		x.leave(e)
	}
	f.slots[e.slot] = nil
	if e.InFlight() > 0 {
		f.gone = append(f.gone, e)
	}
}

// SetModels stores the replica's model list; known false means that it could
// not be read, so the replica may serve anything.
func (f *Fleet) SetModels(e *Endpoint, names []string, known bool) {
	if !e.setModels(names, known) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.publish(f.view.Load().endpoints)
}

// Drain stops (on) or resumes (off) new work for an endpoint by the operator's
// word. It reports whether the endpoint exists.
func (f *Fleet) Drain(id string, on bool) bool {
	for _, e := range f.Endpoints() {
		if e.id == id || e.Name() == id {
			e.draining.Store(on)
			e.changed()
			return true
		}
	}
	return false
}

// publish builds the snapshot. The caller holds mu.
func (f *Fleet) publish(endpoints []*Endpoint) {
	v := &fleetView{endpoints: endpoints, allKnown: len(endpoints) > 0}
	var names []string
	for _, e := range endpoints {
		list, known := e.Models()
		if !known {
			v.allKnown = false
			v.unlisted = append(v.unlisted, e)
			continue
		}
		names = append(names, list...)
	}
	slices.Sort(names)
	old := f.view.Load()
	for _, name := range slices.Compact(names) {
		m := modelView{name: name, tokens: old.ratio(name)}
		for _, e := range endpoints {
			list, known := e.Models()
			if _, listed := slices.BinarySearch(list, name); listed || !known {
				m.endpoints = append(m.endpoints, e)
			}
		}
		v.models = append(v.models, m)
	}
	f.view.Store(v)
}

// ModelNames returns every model that some replica lists, sorted.
func (f *Fleet) ModelNames() []string {
	v := f.view.Load()
	names := make([]string, len(v.models))
	for i, m := range v.models {
		names[i] = m.name
	}
	return names
}

// KnownModel returns the listed model's name as a string of the fleet's own,
// "" when nobody lists it: a bounded label for metrics.
func (f *Fleet) KnownModel(name []byte) string {
	v := f.view.Load()
	if i, ok := v.find(name); ok {
		return v.models[i].name
	}
	return ""
}

func (v *fleetView) find(name []byte) (int, bool) {
	i := sort.Search(len(v.models), func(i int) bool { return v.models[i].name >= string(name) })
	return i, i < len(v.models) && v.models[i].name == string(name)
}

// resolve returns the endpoints that may serve the request's model and fills in
// the model when the body names none.
func (v *fleetView) resolve(r *Request) ([]*Endpoint, error) {
	if len(v.endpoints) == 0 {
		return nil, ErrNoEndpoints
	}
	if len(r.Model) == 0 {
		switch {
		case len(v.models) == 1:
			r.Model = r.own(v.models[0].name)
		case len(v.models) > 1 && !r.AnyModel:
			return nil, ErrModelMissing
		default:
			return v.endpoints, nil
		}
	}
	if i, ok := v.find(r.Model); ok {
		return v.models[i].endpoints, nil
	}
	if v.allKnown {
		return nil, ErrModelNotFound
	}
	return v.unlisted, nil
}

// engineBlockTokens returns the KV block size of the first endpoint in ID order
// that told one, 0 when none did.
func (v *fleetView) engineBlockTokens() int {
	for _, e := range v.endpoints {
		if o := e.Observation(); o != nil && o.BlockTokens > 0 {
			return o.BlockTokens
		}
	}
	return 0
}
