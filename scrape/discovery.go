package scrape

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/routing"
)

// Endpoints come from several sources, which add up. Each has a list of its own,
// the last good one; the fleet is made equal to all lists together whenever one
// changes. Two endpoints with the same identity or URL are an error of whoever came later.

// sourceID numbers the sources.
type sourceID int

const (
	sourceSettings  sourceID = iota // --replica, KVGATE_REPLICAS, replicas of the settings file
	sourceEndpoints                 // the --endpoints file
	sourceDiscovery                 // file-discovery of the scheduling file
	sourceAdmin                     // Manager.Add
	sourceCount
)

var sourceNames = [sourceCount]string{"settings", "endpoints", "file-discovery", "admin"}

// adminSource is where Add says that a replica was declared.
const adminSource = "the admin surface"

// source is one origin of endpoints and how it fares.
type source struct {
	path     string // of a file, else empty
	watch    bool
	clusters bool                   // the file's entries are clusters
	specs    []routing.EndpointSpec // never changed in place

	problem string            // why the last list was not taken, "" when it was
	errors  int64             // problems, each counted once
	success time.Time         // when a list was last found good
	sum     [sha256.Size]byte // of the file in force
}

// reset forgets everything but the count of errors.
func (s *source) reset() { *s = source{errors: s.errors} }

// fail keeps the list and reports whether the problem is a new one.
func (s *source) fail(err error) bool {
	if s.problem == err.Error() {
		return false
	}
	s.problem = err.Error()
	s.errors++
	return true
}

// succeed notes that the list is good; data is the file that it came from.
func (s *source) succeed(at time.Time, data []byte) {
	s.problem, s.success, s.sum = "", at, sha256.Sum256(data)
}

// replicaSpec brings a replica into the form that the fleet wants. Its own
// credentials are base but for what it says itself; place is where it was declared.
func replicaSpec(r configs.Replica, base *configs.Credentials, place configs.Position) (routing.EndpointSpec, error) {
	n, err := r.Normalize()
	if err != nil {
		return routing.EndpointSpec{}, place.Problem("", "%v", err)
	}
	spec := routing.EndpointSpec{Namespace: n.Namespace, Name: n.Name, URL: n.URL, Labels: n.Labels, Source: n.Source}
	spec.Credentials, err = n.Credentials(base, place)
	return spec, err
}

func settingsSpecs(replicas []configs.Replica, base *configs.Credentials) ([]routing.EndpointSpec, error) {
	var specs []routing.EndpointSpec
	var problems configs.Problems
	for i, r := range replicas {
		if r.Source == "" {
			r.Source = fmt.Sprintf("replicas[%d]", i)
		}
		spec, err := replicaSpec(r, base, configs.Position{File: r.Source})
		if err != nil {
			problems.Add(err)
			continue
		}
		specs = append(specs, spec)
	}
	return specs, problems.Err()
}

// merge returns the endpoints of all sources.
func merge(sources *[sourceCount]source) ([]routing.EndpointSpec, error) {
	var specs []routing.EndpointSpec
	ids, urls := make(map[string]int), make(map[string]int)
	var errs []error
	for i := range sources {
		for _, s := range sources[i].specs {
			clash := func(first int, what, value string) {
				errs = append(errs, fmt.Errorf("%w: %s and %s have the same %s %s: keep one of them", ErrClash, specs[first].Source, s.Source, what, value))
			}
			if first, twice := ids[s.ID()]; twice {
				clash(first, "name", s.ID())
			} else if first, twice := urls[s.URL]; twice {
				clash(first, "URL", s.URL)
			}
			ids[s.ID()], urls[s.URL] = len(specs), len(specs)
			specs = append(specs, s)
		}
	}
	return specs, errors.Join(errs...)
}

// maxEndpointsFile is what ParseEndpoints takes, and one byte more is enough to be refused.
const maxEndpointsFile = 1 << 20

// readFile reads a file of endpoints.
func readFile(path string) ([]byte, error) {
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() { // opening a pipe would wait for its writer
		return nil, fmt.Errorf("%s is no regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, maxEndpointsFile+1))
}

func (s *source) parse(data []byte, base *configs.Credentials) ([]routing.EndpointSpec, []string, error) {
	endpoints, warnings, err := configs.ParseEndpoints(s.path, data)
	if err == nil && s.clusters {
		err = checkClusters(endpoints)
	}
	if err != nil {
		return nil, warnings, err
	}
	specs := make([]routing.EndpointSpec, len(endpoints))
	var problems configs.Problems
	for i, e := range endpoints {
		specs[i], err = replicaSpec(e.Replica(), base, e.Pos)
		problems.Add(err)
	}
	return specs, warnings, problems.Err()
}

// sameSpecs tells whether two lists describe the same endpoints in the same way.
func sameSpecs(a, b []routing.EndpointSpec) bool {
	return slices.EqualFunc(a, b, func(x, y routing.EndpointSpec) bool {
		return x.ID() == y.ID() && x.URL == y.URL && maps.Equal(x.Labels, y.Labels)
	})
}

// reread takes over a changed file of endpoints. A file that is missing, broken,
// empty or clashing leaves the last good list in force.
func (m *Manager) reread(ctx context.Context, id sourceID) {
	m.mu.Lock()
	src := m.sources[id]
	m.mu.Unlock()
	data, err := readFile(src.path)
	unchanged := err == nil && src.problem == "" && sha256.Sum256(data) == src.sum
	var specs []routing.EndpointSpec
	var warnings []string
	if err == nil && !unchanged {
		specs, warnings, err = src.parse(data, m.config.Load().credentials)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if ctx.Err() != nil {
		return // a reload has replaced the watcher, and perhaps the path
	}
	if unchanged {
		m.sources[id].success = m.fleet.Now()
		return
	}
	next := m.sources
	next[id].specs = specs
	if err == nil {
		_, err = merge(&next)
	}
	if err != nil {
		if now := &m.sources[id]; now.fail(err) {
			m.log.Error("the endpoints stay as they were", zap.String("source", sourceNames[id]), zap.Int("endpoints", len(now.specs)), zap.Error(err))
		}
		return
	}
	next[id].succeed(m.fleet.Now(), data)
	m.sources = next
	if sameSpecs(specs, src.specs) && src.problem == "" {
		return
	}
	for _, w := range warnings {
		m.log.Warn(w)
	}
	m.log.Info("endpoints read", zap.String("source", sourceNames[id]), zap.Int("endpoints", len(specs)))
	m.apply()
}
