package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/routing"
)

// Options are what a Server is made of. Settings, Router, Fleet and Metrics are
// needed; the loggers may be nil, as may the hooks.
type Options struct {
	Settings *configs.Settings
	Router   *routing.Current
	Fleet    *routing.Fleet
	Metrics  *Metrics
	Log      *zap.Logger // process log
	Access   *zap.Logger // one line per request

	// ModelCards returns the cards of the models that the replicas list, for
	// /v1/models. When it is nil or returns none, the list is made of the fleet's
	// model names.
	ModelCards func() []ModelCard
	// Version is what /version answers.
	Version string
	// Ready returns nil when the process can serve. Draining is added by the Server.
	Ready func() error
}

// ModelCard is one model as /v1/models lists it.
type ModelCard struct {
	ID          string
	Created     int64 // Unix seconds
	OwnedBy     string
	Parent      string // base model of an adapter, "" for a base model
	MaxModelLen int64  // tokens, 0 when unknown
}

// Server is the data listener: it reads requests, has them routed, and streams
// the answers of the replicas back.
type Server struct {
	o          Options
	log        *zap.Logger
	access     *accessLog
	http       fasthttp.Server
	routes     *routes
	live       atomic.Pointer[live]
	transport  *transport
	watcher    watcher
	prefetcher prefetcher
	buffers    buffers
	exchanges  sync.Pool
	begun      atomic.Int64 // requests that have begun, in the upper half, and those of them that have not ended
	reroutes   rerouteBudget
	draining   atomic.Bool // every answer is the last of its connection
	late       atomic.Bool // no request is served any more

	made    time.Time
	serving sync.WaitGroup

	accepting sync.WaitGroup // Serve

	end        sync.Once
	ended      chan struct{} // closed by Shutdown
	background sync.WaitGroup

	mu        sync.Mutex
	listeners []net.Listener // as given to Serve
	conns     map[*conn]struct{}
	changed   chan struct{} // closed when a connection ends, made anew by whoever waits
	shut      bool          // Serve returns at once
	full      bool          // no connection is taken any more
}

// live are the settings that requests read.
type live struct {
	settings *configs.Settings
	Server   configs.Server
	upstream *upstreamLimits
	keys     *keyring      // nil: no key is asked for
	cert     *listenerCert // nil: plain HTTP
	watch    []string      // fields of a body to look for: cache_salt, those that are denied, those that are bounded, otherWatched

	limited      []limitedField
	firstLimited int           // in watch
	firstOther   int           // in watch
	judges       bool          // any is denied or bounded
	denySalt     bool          // cache_salt is denied, too
	bodies       []int64       // largest body by route.index, nil: limits.body for all
	patterns     []patternBody // of routes.passthrough
	trusted      networks
}

// patternBody is the largest body of an item of routes.passthrough.
type patternBody struct {
	path string
	size int64
}

// New returns a Server that serves nothing yet. Errors: a file that the
// settings name cannot be read. Shutdown ends what New has started.
func New(o Options) (*Server, error) {
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	s := &Server{o: o, log: o.Log, access: NewAccessLog(o.Access), routes: newRoutes(), made: time.Now(), conns: make(map[*conn]struct{})}
	l, err := s.newLive(o.Settings)
	if err != nil {
		return nil, err
	}
	s.live.Store(l)
	s.buffers.budget.Store(int64(o.Settings.Limits.Buffered))
	s.transport = newTransport(l.upstream, &s.buffers, o.Metrics.upstreamError)
	s.watcher = newWatcher()
	s.ended = make(chan struct{})
	s.background.Go(s.trim)
	s.background.Go(func() { s.prefetcher.find(s.log) })
	s.http = fasthttp.Server{
		Handler:        s.handle,
		ErrorHandler:   s.errorHandler,
		ExpectHandler:  s.expect,
		ConnState:      connStateHook,
		Logger:         httpLog{o.Log},
		ReadBufferSize: int(o.Settings.Limits.Header),
		// A stream writes its chunks past this buffer.
		WriteBufferSize: wholeAnswer,
		Concurrency:     1 << 30, // max_conns is kept in Serve
		// One byte is read before the handler is called, the rest by the handler:
		// fasthttp counts no streamed body, and would reserve what is announced.
		StreamRequestBody:             true,
		MaxRequestBodySize:            1,
		DisablePreParseMultipartForm:  true,
		DisableHeaderNamesNormalizing: true,
		NoDefaultServerHeader:         true,
		NoDefaultDate:                 true, // fasthttp passes no other on, and its own needs a goroutine without an end
		NoDefaultContentType:          true,
		SecureErrorLogMessage:         true,
		LazyRequestTime:               false,
	}
	return s, nil
}

// CheckFiles reads every file that the settings name for the data listener and
// the replicas, as New and Apply do.
func CheckFiles(settings *configs.Settings) error {
	var problems configs.Problems
	_, err := newUpstreamLimits(settings)
	problems.Add(err)
	_, _, err = routeBodies(settings)
	problems.Add(err)
	_, err = settings.TLS.Config()
	problems.Add(err)
	if file := settings.Auth.KeysFile; file != "" {
		_, err := configs.LoadKeys(file)
		problems.Add(err)
		_, err = isolationSecret(&settings.Isolation)
		problems.Add(err)
	}
	return problems.Err()
}

func (s *Server) newLive(settings *configs.Settings) (*live, error) {
	own := *settings
	l, err := newUpstreamLimits(&own)
	if err != nil {
		return nil, err
	}
	var old *keyring
	if in := s.live.Load(); in != nil {
		old = in.keys
	}
	keys, err := newKeyring(&own, old, s.o.Metrics)
	if err != nil {
		return nil, err
	}
	cert, err := newListenerCert(own.TLS, s.log)
	if err != nil {
		return nil, err
	}
	in := &live{settings: &own, Server: own.Server, upstream: l, keys: keys, cert: cert, limited: limitedFields(&own.Limits), trusted: newNetworks(own.Server.TrustedProxies)}
	if in.bodies, in.patterns, err = routeBodies(&own); err != nil {
		return nil, err
	}
	in.watch = append([]string{saltField}, own.Limits.DenyFields...)
	in.denySalt = slices.Contains(own.Limits.DenyFields, saltField)
	in.firstLimited = len(in.watch)
	for _, f := range in.limited {
		in.watch = append(in.watch, f.name)
	}
	in.firstOther, in.judges = len(in.watch), len(in.watch) > 1
	in.watch = append(in.watch, otherWatched[:]...)
	return in, nil
}

// Apply puts other settings in force for the requests that come from now on. On
// an error those in force stay. The size of a request head is fixed when the
// Server is made, as is the listener's address.
func (s *Server) Apply(settings *configs.Settings) error {
	l, err := s.newLive(settings)
	if err != nil {
		return err
	}
	if (l.cert == nil) != (s.live.Load().cert == nil) {
		return errors.New("tls.cert_file: TLS is switched on and off at a restart only")
	}
	old := s.live.Swap(l)
	s.transport.limits.Store(l.upstream)
	s.buffers.budget.Add(int64(l.settings.Limits.Buffered - old.settings.Limits.Buffered))
	return nil
}

// Serve accepts connections until the listener fails or Shutdown is called, in
// which case it returns nil. It may run on several listeners at once. With
// tls.cert_file every one of them speaks TLS.
func (s *Server) Serve(ln net.Listener) error {
	s.mu.Lock()
	if s.shut {
		s.mu.Unlock()
		return ln.Close()
	}
	s.listeners = append(s.listeners, ln)
	s.accepting.Add(1)
	s.mu.Unlock()
	defer s.accepting.Done()
	ln = directListener{ln}
	if s.live.Load().cert != nil {
		ln = tls.NewListener(ln, s.tlsConfig())
	}
	const longest = time.Second
	pause := time.Duration(0)
	for {
		nc, err := ln.Accept()
		if err != nil {
			if s.isShut() {
				return nil
			}
			var temporary interface{ Temporary() bool }
			if !errors.As(err, &temporary) || !temporary.Temporary() {
				return err
			}
			// Too many open files, most likely: wait for connections to end.
			pause = min(max(2*pause, 5*time.Millisecond), longest)
			s.log.Warn("accept failed", zap.Error(err), zap.Duration("retry_in", pause))
			time.Sleep(pause)
			continue
		}
		pause = 0
		c := newConn(s, nc)
		if !s.opened(c) {
			s.turnAway(nc)
			continue
		}
		s.watcher.add(c)
		s.serving.Add(1)
		go func() {
			defer s.serving.Done()
			_ = s.http.ServeConn(c) // closes c; its errors are the client's, and in the access log
		}()
	}
}

// directListener accepts connections as direct makes them.
type directListener struct{ net.Listener }

// Accept implements net.Listener.
func (l directListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return direct(c), nil
}

// opened takes a connection into the books; false when there is no room.
func (s *Server) opened(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.full || len(s.conns) >= s.live.Load().Server.MaxConns {
		return false
	}
	s.conns[c] = struct{}{}
	s.o.Metrics.connOpen(1)
	return true
}

// closedConn takes a connection out of the books.
func (s *Server) closedConn(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	s.o.Metrics.connOpen(-1)
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// turnAway answers a connection for which there is no room. It must not block.
func (s *Server) turnAway(nc net.Conn) {
	if _, secure := nc.(*tls.Conn); !secure { // there it would wait for a handshake
		body := errorBody(dialectOpenAI, fasthttp.StatusServiceUnavailable, "overloaded", "too many connections: try again", "", "")
		_ = nc.SetWriteDeadline(time.Now().Add(time.Millisecond))
		_, _ = nc.Write([]byte("HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: " +
			strconv.Itoa(len(body)) + "\r\n\r\n" + string(body)))
	}
	_ = nc.Close()
}

// connStateHook learns when an answer has left fasthttp's buffers.
func connStateHook(nc net.Conn, state fasthttp.ConnState) {
	if c, ok := nc.(*conn); ok && state == fasthttp.StateIdle {
		c.waiting()
	}
}

// httpLog takes fasthttp's own messages.
type httpLog struct{ log *zap.Logger }

// Printf implements fasthttp.Logger.
func (l httpLog) Printf(format string, args ...any) {
	l.log.Debug("http", zap.String("message", fmt.Sprintf(format, args...)))
}

var errDraining = errors.New("draining")

// ready returns nil when new requests can be served.
func (s *Server) ready() error {
	switch {
	case s.draining.Load():
		return errDraining
	case s.o.Ready != nil:
		return s.o.Ready()
	}
	return nil
}

// InFlight returns the number of requests that have been read and not ended.
func (s *Server) InFlight() int { return int(uint32(s.begun.Load())) }

// oneRequest begins a request in Server.begun; -1 ends it.
const oneRequest = 1<<32 + 1

// mayReroute takes one reroute of the budget, or counts that there was none.
func (s *Server) mayReroute() bool {
	l := &s.live.Load().settings.Upstream
	ok := s.reroutes.take(time.Now(), uint32(s.begun.Load()>>32), l.RetryPercent, l.RetryMin)
	if !ok {
		s.o.Metrics.denied.Inc()
	}
	return ok
}

// Leave makes every answer from now on the last one of its connection, and
// readiness fails: clients and load balancers go elsewhere before Shutdown.
func (s *Server) Leave() { s.draining.Store(true) }

// lastAccepts is how long connections that the kernel has taken are still fetched
// from it when the listener is about to close, which would reset them.
const lastAccepts = 50 * time.Millisecond

// Shutdown stops accepting, serves what still comes on open connections for
// drain.grace, then closes those that are idle, lets the streams finish until ctx
// ends, and cuts them so that their clients see a broken transport. It returns
// when nothing of the Server runs any more: nil, or ctx's error when streams were
// cut. Readiness is off from the begin; a request that comes behind the grace is
// refused with 503. Every answer closes its connection.
func (s *Server) Shutdown(ctx context.Context) error {
	s.Leave()
	grace := s.live.Load().settings.Drain.Grace
	s.stopAccepting(grace > 0)
	if grace > 0 {
		within, done := context.WithTimeout(ctx, grace)
		_ = s.waitConns(within)
		done()
	}
	s.late.Store(true)
	s.mu.Lock()
	idle := s.openConns()
	s.mu.Unlock()
	for _, c := range idle {
		if c.state.CompareAndSwap(int32(connIdle), int32(connClosing)) {
			_ = c.raw.Close()
		}
	}
	err := s.waitConns(ctx)
	if err != nil {
		s.mu.Lock()
		open := s.openConns()
		s.mu.Unlock()
		for _, c := range open {
			c.cutOff()
		}
		_ = s.waitConns(context.Background())
	}
	s.serving.Wait()
	s.end.Do(func() { close(s.ended) })
	s.background.Wait()
	s.transport.close()
	s.watcher.close()
	return err
}

// isShut says whether Shutdown has been called.
func (s *Server) isShut() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.shut
}

// stopAccepting closes the listeners, and returns when no connection is taken any
// more. What the kernel has taken is fetched first if fetch says so.
func (s *Server) stopAccepting(fetch bool) {
	s.mu.Lock()
	s.shut = true
	listeners := s.listeners
	s.listeners = nil
	s.mu.Unlock()
	for _, ln := range listeners {
		if l, ok := ln.(interface{ SetDeadline(time.Time) error }); !fetch || !ok || l.SetDeadline(time.Now().Add(lastAccepts)) != nil {
			_ = ln.Close()
		}
	}
	s.accepting.Wait()
	for _, ln := range listeners {
		_ = ln.Close()
	}
	s.mu.Lock()
	s.full = true
	s.mu.Unlock()
}

// openConns returns the open connections. The caller holds mu.
func (s *Server) openConns() []*conn {
	list := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		list = append(list, c)
	}
	return list
}

// waitConns waits until no connection is open.
func (s *Server) waitConns(ctx context.Context) error {
	for {
		s.mu.Lock()
		if len(s.conns) == 0 {
			s.mu.Unlock()
			return nil
		}
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
