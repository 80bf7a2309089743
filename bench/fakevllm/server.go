package fakevllm

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Server is one replica on a socket. Its connections are read and written
// here, with fasthttp's request type but without its server: half of the
// faults happen where a server's API does not reach.
type Server struct {
	opt     Options
	addr    string
	started time.Time

	mu       sync.Mutex
	engine   *Engine
	events   *publisher // nil: none
	calls    []*choice  // by slot of the engine
	decoding []*choice
	metrics  pageStats

	restarting bool // the engine begins anew when its step ends

	faults atomic.Pointer[faultSet]

	wake   chan struct{} // work for an idle driver
	stop   chan struct{} // closed by Close
	halted chan struct{} // closed when generation stops before its connections do
	halt   sync.Once

	lnMu     sync.Mutex
	ln       net.Listener
	reopen   chan struct{} // closed when a timed Refuse was replaced
	closed   bool
	conns    map[*conn]struct{}
	draining atomic.Bool

	driver    sync.WaitGroup
	listeners sync.WaitGroup
	open      sync.WaitGroup // connections

	count counters
	ids   atomic.Uint64
}

// Start listens and serves until Close or Shutdown. Its error names the option
// that is wrong, or says why the address cannot be listened on.
func Start(opt Options) (*Server, error) {
	opt, err := opt.withDefaults()
	if err != nil {
		return nil, err
	}
	ln, err := net.Listen("tcp", opt.Listen)
	if err != nil {
		return nil, fmt.Errorf("fakevllm: %w", err)
	}
	s := &Server{
		opt: opt, addr: ln.Addr().String(), started: time.Now(), engine: NewEngine(opt.Engine),
		wake: make(chan struct{}, 1), stop: make(chan struct{}), halted: make(chan struct{}),
		conns: make(map[*conn]struct{}),
	}
	s.metrics.init()
	s.count.init()
	s.faults.Store(newFaultSet(Faults{}))
	if opt.KVEvents.Endpoint != "" {
		s.engine.TrackBlocks(true)
		if s.events, err = newPublisher(s); err != nil {
			_ = ln.Close()
			return nil, err
		}
	}
	s.listen(ln)
	if !opt.Instant && !opt.Manual {
		s.driver.Add(1)
		go s.drive()
	}
	_ = s.apply(opt.Faults) // fails on a closed server only
	return s, nil
}

// Run serves until the context is done, then shuts down as vLLM does on
// SIGTERM, within Options.ShutdownTimeout. ready is called with the server that serves; it may be nil.
func Run(ctx context.Context, opt Options, ready func(*Server)) error {
	s, err := Start(opt)
	if err != nil {
		return err
	}
	if ready != nil {
		ready(s)
	}
	<-ctx.Done()
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), opt.ShutdownTimeout)
	defer cancel()
	return s.Shutdown(end)
}

// Addr returns host:port.
func (s *Server) Addr() string { return s.addr }

// URL returns scheme://host:port.
func (s *Server) URL() string {
	if s.opt.TLS != nil {
		return "https://" + s.addr
	}
	return "http://" + s.addr
}

// Faults returns what is set.
func (s *Server) Faults() Faults { return s.faults.Load().Faults }

// SetFaults replaces all faults; requests under way keep those they began with.
func (s *Server) SetFaults(f Faults) error {
	if err := f.Validate(); err != nil {
		return err
	}
	return s.apply(f)
}

// Step runs one engine step in no time and reports whether there was one. It is
// for Options.Manual.
func (s *Server) Step() bool {
	if _, ok := s.begin(); !ok {
		return false
	}
	s.finish()
	return true
}

// Drop resets every connection, as a replica that crashed and came back.
func (s *Server) Drop() {
	s.lnMu.Lock()
	defer s.lnMu.Unlock()
	for c := range s.conns {
		c.reset()
	}
}

// Shutdown closes the listener and the idle connections and waits for open
// answers. When the context is done they end with finish_reason "abort". With
// Faults.HangShutdown they hang instead, without a byte, and are cut.
func (s *Server) Shutdown(ctx context.Context) error {
	s.draining.Store(true)
	s.lnMu.Lock()
	s.unlisten()
	s.lnMu.Unlock()
	done := make(chan struct{})
	go func() {
		s.open.Wait()
		close(done)
	}()
	if hang := time.Duration(s.faults.Load().HangShutdown); hang > 0 {
		s.fault("hang_shutdown")
		s.halt.Do(func() { close(s.halted) })
		wait(hang, done, s.stop)
	} else {
		select {
		case <-done:
		case <-s.stop:
		case <-ctx.Done():
			s.abortAll()
			wait(time.Second, done, s.stop)
		}
	}
	s.Close()
	<-done
	return nil
}

// Close ends everything at once, as a killed process, and waits for all goroutines.
func (s *Server) Close() {
	s.draining.Store(true)
	s.lnMu.Lock()
	if !s.closed {
		s.closed = true
		close(s.stop)
		s.unlisten()
		for c := range s.conns {
			_ = c.nc.Close()
		}
	}
	s.lnMu.Unlock()
	s.listeners.Wait()
	s.open.Wait()
	s.driver.Wait()
	if s.events != nil {
		s.events.close()
	}
}

// apply stores a valid set of faults and opens or closes the listener.
func (s *Server) apply(f Faults) error {
	s.lnMu.Lock()
	defer s.lnMu.Unlock()
	if s.closed {
		return errors.New("fakevllm: the server is closed")
	}
	s.faults.Store(newFaultSet(f))
	if f.RestartEngine {
		s.fault("restart_engine")
		s.RestartEngine()
	}
	if f.KVFlood > 0 && s.events != nil {
		s.fault("kv_flood")
		s.events.flood(f.KVFlood)
	}
	if s.reopen != nil {
		close(s.reopen)
		s.reopen = nil
	}
	if !f.Refuse {
		if s.ln != nil || s.draining.Load() {
			return nil
		}
		ln, err := net.Listen("tcp", s.addr)
		if err != nil {
			return fmt.Errorf("fakevllm: listening again: %w", err)
		}
		s.listen(ln)
		return nil
	}
	s.fault("refuse")
	s.unlisten()
	if f.RefuseFor > 0 {
		s.reopen = make(chan struct{})
		s.listeners.Add(1)
		go s.refuseFor(f, s.reopen)
	}
	return nil
}

func (s *Server) refuseFor(f Faults, replaced <-chan struct{}) {
	defer s.listeners.Done()
	if !wait(time.Duration(f.RefuseFor), replaced, s.stop) {
		return
	}
	f.Refuse, f.RefuseFor = false, 0
	s.lnMu.Lock()
	current := s.reopen == replaced
	s.lnMu.Unlock()
	if current {
		_ = s.apply(f) // the port is gone only if another process took it; /fake/stats shows no connection then
	}
}

// listen serves a listener. The caller holds lnMu, or is alone.
func (s *Server) listen(ln net.Listener) {
	s.ln = ln
	s.listeners.Add(1)
	go s.accept(ln)
}

// unlisten closes the listener and what is idle. The caller holds lnMu.
func (s *Server) unlisten() {
	if s.ln != nil {
		_ = s.ln.Close()
		s.ln = nil
	}
	for c := range s.conns {
		if c.idle.Load() {
			_ = c.nc.Close()
		}
	}
}

func (s *Server) accept(ln net.Listener) {
	defer s.listeners.Done()
	for {
		nc, err := ln.Accept()
		if err != nil {
			return // closed
		}
		raw := nc
		if s.opt.TLS != nil {
			nc = tls.Server(nc, s.opt.TLS)
		}
		c := newConn(s, nc, raw)
		s.lnMu.Lock()
		if s.ln != ln {
			s.lnMu.Unlock()
			c.reset()
			return
		}
		s.conns[c] = struct{}{}
		s.open.Add(1)
		s.lnMu.Unlock()
		s.count.connections.Add(1)
		go c.serve()
		if d := time.Duration(s.faults.Load().AcceptDelay); d > 0 {
			s.fault("accept_delay")
			wait(d, s.stop, nil)
		}
	}
}

func (s *Server) forget(c *conn) {
	s.lnMu.Lock()
	delete(s.conns, c)
	s.lnMu.Unlock()
	s.open.Done()
}

// wait returns true when the time has passed, false when a channel was closed before.
func wait(d time.Duration, a, b <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-a:
	case <-b:
	}
	return false
}
