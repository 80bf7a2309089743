package proxy

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"net/url"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"kvgate/routing"
)

// AdminOptions is what the admin surface shows and changes. Fleet, Router,
// Registry, Log and ExplainAPI are required.
type AdminOptions struct {
	Fleet    *routing.Fleet
	Router   *routing.Current
	Registry *prometheus.Registry
	Reload   func() error  // reads the configuration again; its error is shown as text. nil: not possible
	Ready    func() error  // says why the process should get no traffic. nil: always ready
	Replicas ReplicaSource // nil: replicas cannot be added or removed
	PProf    bool          // serve /debug/pprof/
	Version  string
	Log      *zap.Logger
	Level    *zap.AtomicLevel // nil: the log level cannot be seen or changed

	// ExplainAPI returns the shape of the bodies of a path of the data listener,
	// false when the data listener would answer 404.
	ExplainAPI func(path string) (routing.API, bool)

	// Hosts are names, besides the machine's own, under which browsers may
	// reach the admin listener.
	Hosts []string
	// Salt returns the cache_salt that requests of an API key get, by the key's
	// name; ok is false when there is no such key. It may be nil.
	Salt func(key string) (salt []byte, ok bool)
	// Token returns what requests must carry, as a Bearer token or a password; ""
	// or a nil func: nothing. Liveness and readiness are always answered.
	Token func() string
	// MaxBody limits an explain request, in bytes; 0 means 32 MiB.
	MaxBody int64
}

// ReplicaSource adds and removes replicas while the process runs. Both return
// an error that says why they refused, for the operator.
type ReplicaSource interface {
	Add(spec routing.EndpointSpec) error
	Remove(id string) error
}

const (
	defaultExplainBody = 32 << 20
	maxAdminBody       = 64 << 10 // of every other request
	defaultExplainPath = "/v1/chat/completions"
)

// admin serves the operator's listener.
type admin struct {
	AdminOptions
	hosts []string // names that a browser may use
}

// NewAdmin returns the handler of the admin listener: metrics, health, the
// state of the fleet, explanations, reload, replicas, log level, profiles and a
// status page. It registers kvgate_build_info.
//
// Browsers get the extra care that a listener without a password needs: a
// request under a foreign host name (DNS rebinding) and a change that another
// site asks for are refused. Metrics and health answer under any name, since
// scrapers and probes use whatever the network calls this machine.
func NewAdmin(o AdminOptions) http.Handler {
	if o.MaxBody <= 0 {
		o.MaxBody = defaultExplainBody
	}
	a := &admin{AdminOptions: o, hosts: append([]string{"localhost"}, o.Hosts...)}
	if name, err := os.Hostname(); err == nil {
		a.hosts = append(a.hosts, name)
	}
	a.registerBuild()

	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Registry, promhttp.HandlerOpts{
		ErrorLog: stdLog(o.Log), ErrorHandling: promhttp.ContinueOnError,
	}))
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, http.StatusOK, map[string]string{"status": "ok"})
	})
	mux.HandleFunc("GET /readyz", a.ready)
	mux.HandleFunc("GET /{$}", a.statusPage)
	mux.HandleFunc("GET /debug/fleet", a.fleet)
	mux.HandleFunc("POST /debug/explain", a.explain)
	mux.HandleFunc("POST /-/reload", a.reload)
	mux.HandleFunc("GET /admin/v1/replicas", a.fleet)
	mux.HandleFunc("POST /admin/v1/replicas", a.addReplica)
	mux.HandleFunc("GET /admin/v1/replicas/{name}", a.replica(func(*routing.Endpoint) (int, error) { return http.StatusOK, nil }))
	mux.HandleFunc("DELETE /admin/v1/replicas/{name}", a.replica(a.removeReplica))
	mux.HandleFunc("POST /admin/v1/replicas/{name}/drain", a.replica(a.drain(true)))
	mux.HandleFunc("POST /admin/v1/replicas/{name}/undrain", a.replica(a.drain(false)))
	if o.Level != nil {
		mux.HandleFunc("GET /admin/v1/log-level", func(w http.ResponseWriter, _ *http.Request) {
			reply(w, http.StatusOK, map[string]string{"level": o.Level.String()})
		})
		mux.HandleFunc("PUT /admin/v1/log-level", o.Level.ServeHTTP)
	}
	if o.PProf {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return a.guard(http.NewCrossOriginProtection().Handler(mux))
}

// registerBuild says what runs. A registry that knows it already is left alone.
func (a *admin) registerBuild() {
	commit := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				commit = s.Value
			}
		}
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kvgate_build_info", Help: "The build that runs: always 1.",
		ConstLabels: prometheus.Labels{"version": a.Version, "commit": commit, "goversion": runtime.Version()},
	})
	build.Set(1)
	if err := a.Registry.Register(build); err != nil && !errors.As(err, &prometheus.AlreadyRegisteredError{}) {
		a.Log.Warn("kvgate_build_info is missing from /metrics", zap.Error(err))
	}
}

func stdLog(l *zap.Logger) *log.Logger {
	std, err := zap.NewStdLogAt(l, zap.WarnLevel)
	if err != nil { // only for a level that does not exist
		return zap.NewStdLog(l)
	}
	return std
}

// guard bounds what a request may carry and refuses host names that are not
// this machine's: a page on another site can make its own name resolve to this
// address, and its scripts then read what they like.
func (a *admin) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		limit := int64(maxAdminBody)
		switch r.URL.Path {
		case "/livez", "/readyz":
			next.ServeHTTP(w, r)
			return
		}
		if !a.trusted(r) {
			w.Header().Set("WWW-Authenticate", `Basic realm="kvgate"`) // which makes a browser ask
			fail(w, http.StatusUnauthorized, errors.New("the token of admin.token_file is needed: Authorization: Bearer TOKEN, or any user with the token as password"))
			return
		}
		switch r.URL.Path {
		case "/debug/explain":
			limit = a.MaxBody
		case "/metrics":
			next.ServeHTTP(w, r)
			return
		}
		local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		if socket := ok && local.Network() == "unix"; !socket && !a.ownHost(r.Host) {
			fail(w, http.StatusForbidden, fmt.Errorf("host %q is not this machine's: use its address, localhost, or a name under which it was configured", r.Host))
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, limit)
		next.ServeHTTP(w, r)
	})
}

// trusted says whether a request carries the token. Hashes are compared, in constant time.
func (a *admin) trusted(r *http.Request) bool {
	token := ""
	if a.Token != nil {
		token = a.Token()
	}
	if token == "" {
		return true
	}
	_, got, basic := r.BasicAuth()
	if !basic {
		scheme, rest, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if !strings.EqualFold(scheme, "Bearer") {
			return false
		}
		got = strings.TrimSpace(rest)
	}
	want, have := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(got))
	return subtle.ConstantTimeCompare(want[:], have[:]) == 1
}

func (a *admin) ownHost(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), ".")
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	return slices.ContainsFunc(a.hosts, func(own string) bool { return strings.EqualFold(own, host) })
}

// reply writes a value as JSON.
func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client has left
}

// fail writes an error as JSON.
func fail(w http.ResponseWriter, status int, err error) {
	reply(w, status, map[string]any{"error": map[string]any{"message": err.Error(), "code": status}})
}

func (a *admin) fleet(w http.ResponseWriter, _ *http.Request) {
	reply(w, http.StatusOK, a.Fleet.Snapshot())
}

func (a *admin) ready(w http.ResponseWriter, _ *http.Request) {
	if a.Ready != nil {
		if err := a.Ready(); err != nil {
			fail(w, http.StatusServiceUnavailable, err)
			return
		}
	}
	reply(w, http.StatusOK, map[string]string{"status": "ok"})
}

func (a *admin) reload(w http.ResponseWriter, _ *http.Request) {
	if a.Reload == nil {
		fail(w, http.StatusNotImplemented, errors.New("this process cannot reload its configuration"))
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if err := a.Reload(); err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		_, _ = fmt.Fprintf(w, "not reloaded, the old configuration stays in force:\n%v\n", err)
		return
	}
	_, _ = io.WriteString(w, "reloaded\n")
}

// requestHeaders shows a request's header fields to the router.
type requestHeaders http.Header

func (h requestHeaders) Header(name string) []byte {
	if v := http.Header(h).Get(name); v != "" {
		return []byte(v)
	}
	return nil
}

// explain says where a request would go, without sending it. A request that no
// replica could take gets an explanation without a winner.
func (a *admin) explain(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Query().Get("path")
	if path == "" {
		path = defaultExplainPath
	}
	router := a.Router.Load()
	api, ok := a.ExplainAPI(path)
	if ok {
		api, ok = router.Parser(api)
	}
	if !ok {
		fail(w, http.StatusNotFound, fmt.Errorf("path %q is not routed", path))
		return
	}
	body, err := io.ReadAll(r.Body)
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		fail(w, http.StatusRequestEntityTooLarge, fmt.Errorf("the body is larger than %d bytes", large.Limit))
		return
	case err != nil:
		fail(w, http.StatusBadRequest, fmt.Errorf("reading the body: %w", err))
		return
	}
	req := routing.Request{API: api, Body: body, Headers: requestHeaders(r.Header)}
	if err := req.Parse(); err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	if key := r.URL.Query().Get("key"); key != "" {
		ok := false
		if a.Salt != nil {
			var salt []byte
			if salt, ok = a.Salt(key); salt != nil {
				req.Salt = salt
			}
		}
		if !ok {
			fail(w, http.StatusBadRequest, fmt.Errorf("no API key is named %q", key))
			return
		}
	}
	ex, err := router.Explain(&req)
	switch {
	case errors.Is(err, routing.ErrModelNotFound):
		fail(w, http.StatusNotFound, err)
	case errors.Is(err, routing.ErrModelMissing):
		fail(w, http.StatusBadRequest, err)
	case err != nil && ex == nil:
		fail(w, http.StatusServiceUnavailable, err)
	default:
		if err != nil {
			ex.Reason = err.Error()
		}
		if on, _ := strconv.ParseBool(r.URL.Query().Get("tokens")); on {
			router.ExplainTokens(&req, ex)
		}
		reply(w, http.StatusOK, ex)
	}
}

// addReplica takes {"name", "namespace", "url", "labels"}; only the url is needed.
func (a *admin) addReplica(w http.ResponseWriter, r *http.Request) {
	if a.Replicas == nil {
		fail(w, http.StatusNotImplemented, errors.New("replicas cannot be added to this process"))
		return
	}
	var in struct {
		Name      string            `json:"name"`
		Namespace string            `json:"namespace"`
		URL       string            `json:"url"`
		Labels    map[string]string `json:"labels"`
	}
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	err := d.Decode(&in)
	if _, more := d.Token(); err == nil && !errors.Is(more, io.EOF) {
		err = errors.New("something follows it")
	}
	if err != nil {
		fail(w, http.StatusBadRequest, fmt.Errorf("the body must be a JSON object with url and, if wanted, name, namespace and labels: %w", err))
		return
	}
	u, err := url.Parse(in.URL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || strings.TrimSuffix(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		fail(w, http.StatusBadRequest, fmt.Errorf("url %q must be http://host:port or https://host:port", in.URL))
		return
	}
	spec := routing.EndpointSpec{Namespace: in.Namespace, Name: in.Name, URL: u.Scheme + "://" + u.Host, Labels: in.Labels, Source: "admin"}
	if spec.Name == "" {
		spec.Name = u.Host
	}
	for _, e := range a.Fleet.Endpoints() {
		if e.ID() == spec.ID() || e.URL() == spec.URL {
			fail(w, http.StatusConflict, fmt.Errorf("replica %s at %s is there already, declared in %s", e.DisplayName(), e.URL(), e.Source()))
			return
		}
	}
	if err := a.Replicas.Add(spec); err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	a.Log.Info("replica added by the operator", zap.String("replica", spec.ID()), zap.String("url", spec.URL))
	if e := a.Fleet.Find(spec.ID()); e != nil {
		w.Header().Set("Location", "/admin/v1/replicas/"+url.PathEscape(e.DisplayName()))
		reply(w, http.StatusCreated, a.Fleet.ReplicaSnapshot(e))
		return
	}
	reply(w, http.StatusAccepted, map[string]string{"name": spec.ID(), "url": spec.URL})
}

// replica wraps what is done to one replica: its state afterwards is the answer.
func (a *admin) replica(do func(e *routing.Endpoint) (status int, err error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("name")
		e := a.Fleet.Find(name)
		if e == nil {
			fail(w, http.StatusNotFound, fmt.Errorf("no replica is named %q: see /admin/v1/replicas", name))
			return
		}
		status, err := do(e)
		if err != nil {
			fail(w, status, err)
			return
		}
		reply(w, status, a.Fleet.ReplicaSnapshot(e))
	}
}

func (a *admin) drain(on bool) func(e *routing.Endpoint) (int, error) {
	return func(e *routing.Endpoint) (int, error) {
		if !a.Fleet.Drain(e.ID(), on) {
			return http.StatusNotFound, fmt.Errorf("replica %s has just been removed", e.DisplayName())
		}
		a.Log.Info("replica drained by the operator", zap.String("replica", e.ID()), zap.Bool("drain", on))
		return http.StatusOK, nil
	}
}

// removeReplica answers 202: the replica's streams may still run.
func (a *admin) removeReplica(e *routing.Endpoint) (int, error) {
	if a.Replicas == nil {
		return http.StatusNotImplemented, errors.New("replicas cannot be removed from this process")
	}
	if err := a.Replicas.Remove(e.ID()); err != nil {
		return http.StatusConflict, err
	}
	a.Log.Info("replica removed by the operator", zap.String("replica", e.ID()))
	return http.StatusAccepted, nil
}
