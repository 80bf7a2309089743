package main

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/proxy"
	"kvgate/routing"
	"kvgate/scrape"
)

// gateway is the whole process wired together: fleet, router, scraper, data
// listener and admin listener.
//
// Start order: listeners are bound, the scraper starts, the data listener
// serves. Stop order: not ready, the listener closes, streams end, the scraper
// stops, the admin listener closes last so that the drain can be watched.
type gateway struct {
	load func() (*configs.Loaded, error)

	log      *zap.Logger
	level    zap.AtomicLevel
	registry *prometheus.Registry
	fleet    *routing.Fleet
	router   routing.Current
	metrics  *proxy.Metrics
	server   *proxy.Server
	scraper  *scrape.Manager
	renderer *scrape.Renderer
	averages *proxy.Averages

	reloadMu sync.Mutex
	settings *configs.Settings

	token    atomic.Pointer[string] // of the admin listener, "" when none is asked for
	draining atomic.Bool            // not ready any more, whoever asks

	data  net.Listener
	admin net.Listener

	adminServer *http.Server
	serving     sync.WaitGroup
	failed      chan error // a listener that ended by itself
}

// newGateway loads the configuration, builds everything and binds the listeners.
func newGateway(load func() (*configs.Loaded, error), log *zap.Logger, level zap.AtomicLevel) (*gateway, error) {
	loaded, err := load()
	if err != nil {
		return nil, err
	}
	s := &loaded.Settings
	g := &gateway{load: load, log: log, level: level, settings: s, registry: prometheus.NewRegistry(), failed: make(chan error, 2)}
	g.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	g.fleet = routing.NewFleet(time.Now, s.Scrape.Staleness, log)
	if g.renderer, err = scrape.NewRenderer(s, version()); err != nil {
		return nil, err
	}
	router, plan, err := g.compile(s)
	if err != nil {
		return nil, err
	}
	g.scraper, err = scrape.NewManager(scrape.Options{Fleet: g.fleet, Settings: s, Plan: plan, Log: log, Registry: g.registry, Version: version()})
	if err != nil {
		return nil, err
	}
	token, err := adminToken(s)
	if err != nil {
		return nil, err
	}
	g.token.Store(&token)
	g.router.Store(router)
	g.scraper.SetKVEvents(router.KVEventSources())
	g.metrics = proxy.NewMetrics(g.registry, g.fleet, proxy.RouteTemplates())
	g.averages = proxy.NewAverages(g.fleet)
	if err := g.serveAverages(s.Admin.LLMDMetrics); err != nil {
		return nil, err
	}
	access := zap.NewNop()
	if s.Log.Access {
		access = log.Named("access")
	}
	g.server, err = proxy.New(proxy.Options{
		Settings: s, Router: &g.router, Fleet: g.fleet, Metrics: g.metrics, Log: log, Access: access,
		ModelCards: g.modelCards, Version: version(), Ready: g.ready,
	})
	if err != nil {
		return nil, err
	}
	in, err := inheritListeners(os.Getenv, os.Getpid(), firstInherited)
	if err != nil {
		return nil, err
	}
	if err := g.listen(in); err != nil {
		return nil, err
	}
	g.metrics.ConfigReload(true, hashOf(s), time.Now())
	return g, nil
}

// listen binds the listeners, those excepted that were inherited: their sockets
// decide where, not the settings.
func (g *gateway) listen(in inherited) (err error) {
	s := g.settings
	g.data, g.admin = in.data, in.admin
	defer func() {
		if err != nil {
			_, _ = inherited{g.data, g.admin}.closed(nil)
		}
	}()
	if g.admin != nil {
		if tcp, ok := g.admin.Addr().(*net.TCPAddr); ok && !tcp.IP.IsLoopback() && s.Admin.TokenFile == "" && !s.Admin.Insecure {
			return fmt.Errorf("the inherited admin socket %s can be reached from other machines: set admin.token_file, or admin.insecure: true", tcp)
		}
	}
	if g.data == nil {
		if g.data, err = net.Listen("tcp", s.Listen); err != nil {
			return fmt.Errorf("listen %s: %w", s.Listen, err)
		}
	}
	if g.admin == nil {
		if g.admin, err = listenAdmin(s.AdminListen); err != nil {
			return fmt.Errorf("admin_listen %s: %w", s.AdminListen, err)
		}
	}
	return nil
}

// serveAverages puts the averages over the replicas on the metrics page, or takes them off.
func (g *gateway) serveAverages(on bool) error {
	g.registry.Unregister(g.averages)
	if !on {
		return nil
	}
	return g.registry.Register(g.averages)
}

// adminToken reads what requests to the admin listener must carry.
func adminToken(s *configs.Settings) (string, error) {
	if s.Admin.TokenFile == "" {
		return "", nil
	}
	token, err := configs.ReadSecret(s.Admin.TokenFile)
	if err != nil {
		return "", fmt.Errorf("admin.token_file: %w", err)
	}
	return token, nil
}

// listenAdmin binds host:port or unix:/path, which the owner and the group may
// use; nil when it is switched off.
func listenAdmin(addr string) (net.Listener, error) {
	if addr == "" {
		return nil, nil
	}
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		ln, err := net.Listen("unix", path)
		if err == nil {
			if err = os.Chmod(path, 0o660); err != nil { // #nosec G302 -- the group is whom the operator lets in
				_ = ln.Close()
				return nil, err
			}
		}
		return ln, err
	}
	return net.Listen("tcp", addr)
}

// compile builds the router and the scrape plan of a configuration; all their problems at once.
func (g *gateway) compile(s *configs.Settings) (*routing.Router, *scrape.Plan, error) {
	scheduling, err := loadScheduling(s.Scheduling)
	if err != nil {
		return nil, nil, err
	}
	var problems configs.Problems
	plan, err := scrape.NewPlan(scheduling, s.Scrape)
	problems.Add(err)
	router, err := routing.New(scheduling, g.fleet, uint64(time.Now().UnixNano()), routing.WithRenderer(g.renderer.Render), routing.WithTimer(newTimer))
	problems.Add(err)
	if err := problems.Err(); err != nil {
		return nil, nil, err
	}
	for _, w := range slices.Concat(router.Config().Warnings, plan.Warnings) {
		g.log.Warn("scheduling configuration", zap.String("warning", w))
	}
	return router, plan, nil
}

// newTimer is the process's routing.Timer.
func newTimer(d time.Duration) (<-chan time.Time, func() bool) {
	t := time.NewTimer(d)
	return t.C, t.Stop
}

// start begins to scrape and to serve.
func (g *gateway) start(ctx context.Context) {
	g.scraper.Start(ctx)
	if g.admin != nil {
		g.adminServer = &http.Server{Handler: g.adminHandler(), ReadHeaderTimeout: 10 * time.Second}
		g.serving.Go(func() {
			if err := g.adminServer.Serve(g.admin); !errors.Is(err, http.ErrServerClosed) {
				g.failed <- fmt.Errorf("admin listener: %w", err)
			}
		})
	}
	g.serving.Go(func() {
		if err := g.server.Serve(g.data); err != nil {
			g.failed <- fmt.Errorf("data listener: %w", err)
		}
	})
}

func (g *gateway) adminHandler() http.Handler {
	return proxy.NewAdmin(proxy.AdminOptions{
		Fleet: g.fleet, Router: &g.router, Registry: g.registry, Reload: g.reload, Ready: g.ready,
		Replicas: g.scraper, PProf: g.settings.Admin.PProf, Version: version(), Log: g.log, Level: &g.level,
		ExplainAPI: proxy.RouteAPI, MaxBody: int64(g.settings.Limits.Body), Hosts: adminHosts(g.settings.AdminListen),
		Salt:  g.server.Salt,
		Token: func() string { return *g.token.Load() },
	})
}

// adminHosts returns the name under which the admin listener may be asked besides the local ones.
func adminHosts(listen string) []string {
	if host, _, err := net.SplitHostPort(listen); err == nil && host != "" {
		return []string{host}
	}
	return nil
}

// reload puts the configuration's files in force, all or nothing: on an error
// everything stays as it was.
func (g *gateway) reload() (err error) {
	g.reloadMu.Lock()
	defer g.reloadMu.Unlock()
	hash := ""
	defer func() {
		g.metrics.ConfigReload(err == nil, hash, time.Now())
		if err != nil {
			g.log.Error("reload failed: the old configuration stays", zap.Error(err))
		}
	}()
	loaded, err := g.load()
	if err != nil {
		return err
	}
	s := &loaded.Settings
	router, plan, err := g.compile(s)
	if err != nil {
		return err
	}
	token, err := adminToken(s)
	if err != nil {
		return err
	}
	if err := proxy.CheckFiles(s); err != nil { // before anything is in force
		return err
	}
	if (s.TLS.CertFile == "") != (g.settings.TLS.CertFile == "") {
		return errors.New("tls.cert_file: TLS is switched on and off at a restart only")
	}
	if err := g.scraper.Reload(s, plan); err != nil {
		return err
	}
	if err := g.server.Apply(s); err != nil {
		return err
	}
	if err := g.renderer.Apply(s); err != nil {
		return err
	}
	if err := g.serveAverages(s.Admin.LLMDMetrics); err != nil {
		return err
	}
	g.token.Store(&token)
	g.fleet.SetStaleness(s.Scrape.Staleness)
	g.router.Store(router)
	g.scraper.SetKVEvents(router.KVEventSources())
	if s.Listen != g.settings.Listen || s.AdminListen != g.settings.AdminListen {
		g.log.Warn("listen addresses change only at a restart", zap.String("listen", g.settings.Listen), zap.String("admin_listen", g.settings.AdminListen))
	}
	if l, err := zap.ParseAtomicLevel(s.Log.Level); err == nil {
		g.level.SetLevel(l.Level())
	}
	g.settings = s
	hash = hashOf(s)
	g.log.Info("configuration reloaded", zap.String("hash", hash))
	return nil
}

// hashOf names a configuration, so that several gateways can be compared.
func hashOf(s *configs.Settings) string {
	h := fnv.New64a()
	_, _ = fmt.Fprintf(h, "%+v", *s)
	for _, file := range []string{s.Scheduling, s.Endpoints} {
		data, _ := os.ReadFile(file) // "" is no file; one that has just gone is empty too
		_, _ = h.Write(data)
	}
	return fmt.Sprintf("%016x", h.Sum64())
}

var errDraining = errors.New("draining")

// ready says why the gateway should get no traffic, nil when it should.
func (g *gateway) ready() error {
	if g.draining.Load() {
		return errDraining
	}
	for _, e := range g.fleet.Endpoints() {
		if g.fleet.State(e) == routing.Ready {
			return nil
		}
	}
	return routing.ErrNoEndpoints
}

func (g *gateway) modelCards() []proxy.ModelCard {
	cards := g.scraper.ModelCards()
	out := make([]proxy.ModelCard, len(cards))
	for i, c := range cards {
		out[i] = proxy.ModelCard(c)
	}
	return out
}

// stop drains and ends everything. Streams may finish until ctx ends.
func (g *gateway) stop(ctx context.Context) error {
	err := g.server.Shutdown(ctx)
	g.scraper.Close()
	g.renderer.Close()
	if g.adminServer != nil {
		_ = g.adminServer.Close()
	}
	g.serving.Wait()
	return err
}

// dataURL returns where the data listener can be reached from this machine.
func (g *gateway) dataURL() string {
	addr := g.data.Addr().(*net.TCPAddr)
	host := addr.IP.String()
	if addr.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	scheme := "http://"
	if g.settings.TLS.CertFile != "" {
		scheme = "https://"
	}
	return scheme + net.JoinHostPort(host, fmt.Sprint(addr.Port))
}
