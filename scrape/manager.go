// Package scrape observes the replicas: it finds them (settings, files, the
// admin surface), reads their metrics and model lists, and stores what it learns
// in the endpoints of a routing.Fleet.
package scrape

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/routing"
)

// Errors of Add and Remove. ErrClash is one of NewManager and Reload, too.
var (
	// ErrClash: another replica has the same identity or the same URL.
	ErrClash = errors.New("replicas clash")
	// ErrUnknown: no replica has that identity.
	ErrUnknown = errors.New("no such replica")
	// ErrDeclared: Add has not added the replica, so Remove does not take it away.
	ErrDeclared = errors.New("declared elsewhere")

	errClosed = errors.New("the observation of replicas has ended")
)

// Options configures a Manager. All but Registry and Version is required.
type Options struct {
	Fleet    *routing.Fleet
	Settings *configs.Settings
	Plan     *Plan
	Log      *zap.Logger
	Registry *prometheus.Registry // where the kvgate_scrape_ and kvgate_discovery_ series go; nil: nowhere
	Version  string               // of kvgate, for the User-Agent of probes
}

// Manager owns the sources of endpoints and one worker per endpoint. The
// fleet's list of endpoints is its to change, and nobody else's.
//
// Lock order: Manager.mu, then what routing.Fleet locks. A worker takes neither
// Manager.mu nor waits for whoever holds it.
type Manager struct {
	fleet     *routing.Fleet
	log       *zap.Logger
	registry  *prometheus.Registry
	version   string
	collector *collector
	dial      dialFunc
	poll      time.Duration // of watched files
	pages     pages
	config    atomic.Pointer[config]
	kv        *kvHub

	mu       sync.Mutex
	sources  [sourceCount]source
	ctx      context.Context // of workers and watchers; nil before Start
	cancel   context.CancelFunc
	workers  []*worker
	initial  []*worker // those that Start has started
	watchers []*watcher
	closed   bool
}

// NewManager reads every source of endpoints once. The fleet stays as it is
// until Start. The error has everything that is wrong.
func NewManager(o Options) (*Manager, error) {
	m := &Manager{
		fleet: o.Fleet, log: o.Log, registry: o.Registry, version: o.Version,
		dial: (&net.Dialer{}).DialContext, poll: pollInterval,
	}
	if m.version == "" {
		m.version = "dev"
	}
	m.kv = newKVHub(m.fleet, m.dial, m.log)
	m.collector = newCollector(m)
	if err := m.load(o.Settings, o.Plan, true); err != nil {
		return nil, err
	}
	if m.registry != nil {
		if err := m.registry.Register(m.collector); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Start hands the endpoints to the fleet and observes them until ctx ends or Close is called.
func (m *Manager) Start(ctx context.Context) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ctx != nil || m.closed {
		return
	}
	m.ctx, m.cancel = context.WithCancel(ctx)
	m.apply()
	m.initial = slices.Clone(m.workers)
	m.watch()
}

// Close ends all observation and waits for its end. The endpoints stay in the fleet.
func (m *Manager) Close() {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return
	}
	m.closed = true
	if m.cancel != nil {
		m.cancel()
	}
	workers, watchers := m.workers, m.watchers
	m.mu.Unlock() // a watcher may be waiting for it
	for _, w := range workers {
		<-w.done
	}
	for _, w := range watchers {
		<-w.done
	}
	if m.registry != nil {
		m.registry.Unregister(m.collector)
	}
}

// Reload replaces settings and plan and reads every source of endpoints again.
// On an error everything stays as it was. Replicas that were added by Add stay.
func (m *Manager) Reload(s *configs.Settings, p *Plan) error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return errClosed
	}
	if err := m.load(s, p, false); err != nil {
		m.mu.Unlock()
		return err
	}
	old := m.watchers
	if m.ctx != nil {
		for _, w := range old {
			w.cancel()
		}
		m.apply()
		for _, w := range m.workers {
			w.poke()
		}
		m.watch()
	}
	m.mu.Unlock() // an old watcher may be waiting for it
	for _, w := range old {
		<-w.done
	}
	return nil
}

// load reads everything that settings and plan name and, if all of it is well,
// makes it the manager's. The caller holds mu or is the only one.
func (m *Manager) load(s *configs.Settings, p *Plan, first bool) error {
	config, err := newConfig(s, p)
	var errs []error
	if err != nil {
		errs = append(errs, err)
	}
	next := m.sources
	next[sourceSettings].specs, err = settingsSpecs(s.Replicas, config.credentials)
	if err != nil {
		errs = append(errs, err)
	}
	next[sourceEndpoints].path, next[sourceEndpoints].watch = s.Endpoints, true
	next[sourceDiscovery].path, next[sourceDiscovery].watch = "", false
	if d := p.discovery; d != nil {
		next[sourceDiscovery].path, next[sourceDiscovery].watch, next[sourceDiscovery].clusters = d.path, d.watch, d.clusters
	}
	var warnings []string
	for _, id := range []sourceID{sourceEndpoints, sourceDiscovery} {
		src := &next[id]
		if src.path == "" {
			src.reset()
			continue
		}
		data, err := readFile(src.path)
		if err == nil {
			var warned []string
			src.specs, warned, err = src.parse(data, config.credentials)
			warnings = append(warnings, warned...)
		}
		switch {
		case err == nil:
			src.succeed(m.fleet.Now(), data)
		case first && errors.Is(err, configs.ErrNoEndpoints): // nothing to lose yet, and the list may come
			src.fail(err)
			warnings = append(warnings, err.Error())
		default:
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 {
		_, err = merge(&next)
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, w := range warnings {
		m.log.Warn(w)
	}
	next[sourceSettings].succeed(m.fleet.Now(), nil)
	next[sourceAdmin].succeed(m.fleet.Now(), nil)
	m.sources = next
	m.config.Store(config)
	m.fleet.SetStaleness(s.Scrape.Staleness)
	return nil
}

// apply makes the fleet equal to the sources, and the workers equal to the fleet. The caller holds mu.
func (m *Manager) apply() {
	specs, err := merge(&m.sources)
	if err != nil || m.ctx == nil {
		return // whoever changed a source has merged it before; before Start there is nothing to do
	}
	added, removed := m.fleet.Update(specs)
	var ended []*worker
	m.workers = slices.DeleteFunc(slices.Clone(m.workers), func(w *worker) bool {
		gone := slices.Contains(removed, w.endpoint)
		if gone {
			w.cancel()
			ended = append(ended, w)
		}
		return gone
	})
	for _, w := range ended {
		<-w.done // the endpoint may come back as the same one: it must have one worker
		m.log.Info("replica removed", zap.String("replica", w.endpoint.DisplayName()))
	}
	for _, e := range added {
		m.log.Info("replica added", zap.String("replica", e.DisplayName()), zap.String("url", e.URL()), zap.String("source", e.Source()))
		m.workers = append(m.workers, newWorker(m.ctx, m, e))
	}
}

// watch starts watchers for the files that want one. The caller holds mu.
func (m *Manager) watch() {
	m.watchers = nil
	for id := range m.sources {
		if src := &m.sources[id]; src.path != "" && src.watch {
			m.watchers = append(m.watchers, newWatcher(m.ctx, src.path, m.poll, m.log, func(ctx context.Context) { m.reread(ctx, sourceID(id)) }))
		}
	}
}

// snapshot returns the workers of now.
func (m *Manager) snapshot() []*worker {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.workers // never changed in place
}

// WaitFirst waits until the first scrape of every endpoint that Start knew has
// ended, well or badly, or the endpoint is gone. The error is the context's.
func (m *Manager) WaitFirst(ctx context.Context) error {
	m.mu.Lock()
	initial := m.initial
	m.mu.Unlock()
	for _, w := range initial {
		select {
		case <-w.first:
		case <-w.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return ctx.Err()
}

// Add adds a replica until Remove or the end of the process; a reload keeps it.
// The name defaults to host:port of the URL. Errors: ErrClash, or what is wrong with the URL or the name.
func (m *Manager) Add(spec routing.EndpointSpec) error {
	r := configs.Replica{Name: spec.Name, Namespace: spec.Namespace, URL: spec.URL, Labels: spec.Labels, Source: adminSource}
	for _, label := range configs.AccessLabels {
		if _, set := r.Labels[label]; set {
			return fmt.Errorf("the label %s names a file of this machine: declare the replica in the settings or in the endpoints file", label)
		}
	}
	added, err := replicaSpec(r, nil, configs.Position{})
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return errClosed
	}
	next := m.sources
	next[sourceAdmin].specs = append(slices.Clone(next[sourceAdmin].specs), added)
	if _, err := merge(&next); err != nil {
		return err
	}
	next[sourceAdmin].succeed(m.fleet.Now(), nil)
	m.sources = next
	m.apply()
	return nil
}

// Remove removes a replica that Add has added, by ID (namespace/name) or by its
// name alone in the namespace default. What settings or a file declare is
// theirs to remove, and can be drained. Errors: ErrUnknown, ErrDeclared.
func (m *Manager) Remove(id string) error {
	if !strings.Contains(id, "/") {
		id = "default/" + id
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return errClosed
	}
	for s := range m.sources {
		i := slices.IndexFunc(m.sources[s].specs, func(e routing.EndpointSpec) bool { return e.ID() == id })
		switch {
		case i < 0:
		case sourceID(s) != sourceAdmin:
			return fmt.Errorf("replica %s is %w: remove it from %s, or drain it", id, ErrDeclared, m.sources[s].specs[i].Source)
		default:
			m.sources[s].specs = slices.Delete(slices.Clone(m.sources[s].specs), i, i+1)
			m.apply()
			return nil
		}
	}
	return fmt.Errorf("%w: %s", ErrUnknown, id)
}

// poke makes the worker look at the configuration now.
func (w *worker) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}
