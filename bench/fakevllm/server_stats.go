package fakevllm

import (
	"maps"
	"sync"
	"sync/atomic"
)

// ServerStats is what GET /fake/stats shows. Counts start at zero with the server.
type ServerStats struct {
	Requests    map[string]int64 `json:"requests"`  // read completely, by path
	Executed    int64            `json:"executed"`  // requests that reached the model
	Completed   int64            `json:"completed"` // of these, answered to the end
	Aborted     int64            `json:"aborted"`   // of these, left by their client
	Cut         int64            `json:"cut"`       // of these, broken off by a fault or by Close
	InFlight    int64            `json:"in_flight"` // of these, neither
	MaxInFlight int64            `json:"max_in_flight"`
	Awaiting    int64            `json:"awaiting"`    // sequences without a first token
	Connections int64            `json:"connections"` // accepted
	Open        int              `json:"open"`        // of these, open
	Faults      map[string]int64 `json:"faults"`      // times that each fault has struck
	Repeated    map[string]int   `json:"repeated"`    // x-request-ids that were executed more than once
	Distinct    int              `json:"distinct"`    // x-request-ids executed
	Engine      Stats            `json:"engine"`
	KV          KVStats          `json:"kv_events"`
	Last        *RequestHead     `json:"last,omitempty"` // the last request outside /fake
}

// RequestHead is a request as it arrived. Instant servers keep none.
type RequestHead struct {
	Method  string `json:"method"`
	URI     string `json:"uri"`
	Headers string `json:"headers"` // raw lines
	Body    int    `json:"body"`    // bytes
}

// maxIDs bounds the memory of x-request-ids.
const maxIDs = 1 << 20

type counters struct {
	connections, executed, completed, aborted, cut, inFlight, maxInFlight, awaiting atomic.Int64

	mu     sync.Mutex
	paths  map[string]int64
	ids    map[string]int
	faults map[string]int64
	last   *RequestHead
}

func (c *counters) init() {
	c.paths, c.ids, c.faults = make(map[string]int64), make(map[string]int), make(map[string]int64)
}

// fault counts a fault that struck.
func (s *Server) fault(name string) {
	s.count.mu.Lock()
	s.count.faults[name]++
	s.count.mu.Unlock()
}

// execute counts a request that reaches the model.
func (s *Server) execute(id string) {
	s.count.executed.Add(1)
	n := s.count.inFlight.Add(1)
	for m := s.count.maxInFlight.Load(); n > m && !s.count.maxInFlight.CompareAndSwap(m, n); {
		m = s.count.maxInFlight.Load()
	}
	if id == "" || s.opt.Instant {
		return
	}
	s.count.mu.Lock()
	if _, known := s.count.ids[id]; known || len(s.count.ids) < maxIDs {
		s.count.ids[id]++
	}
	s.count.mu.Unlock()
}

// Executions returns how often a request with this x-request-id reached the model.
func (s *Server) Executions(id string) int {
	s.count.mu.Lock()
	defer s.count.mu.Unlock()
	return s.count.ids[id]
}

// Stats returns the counts so far.
func (s *Server) Stats() ServerStats {
	c := &s.count
	s.lnMu.Lock()
	open := len(s.conns)
	s.lnMu.Unlock()
	s.mu.Lock()
	engine := s.engine.Stats()
	s.mu.Unlock()
	kv := s.events.stats()
	c.mu.Lock()
	defer c.mu.Unlock()
	out := ServerStats{
		Requests: maps.Clone(c.paths), Executed: c.executed.Load(), Completed: c.completed.Load(), Aborted: c.aborted.Load(),
		Cut: c.cut.Load(), InFlight: c.inFlight.Load(), MaxInFlight: c.maxInFlight.Load(), Awaiting: c.awaiting.Load(),
		Connections: c.connections.Load(), Open: open, Faults: maps.Clone(c.faults), Repeated: make(map[string]int),
		Distinct: len(c.ids), Engine: engine, KV: kv, Last: c.last,
	}
	for id, n := range c.ids {
		if n > 1 {
			out.Repeated[id] = n
		}
	}
	return out
}
