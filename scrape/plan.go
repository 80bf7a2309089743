package scrape

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"
	"time"

	"kvgate/configs"
)

// Plan is what an EndpointPickerConfig says about observation and discovery.
type Plan struct {
	Warnings []string // what was accepted and ought to be changed, each with its place

	metrics    *httpSource // nil: nobody scrapes
	models     httpSource
	engineKeys []string  // labels of an endpoint that name its engine, the first one set counts
	engines    []*engine // the default engine first, then in the order in which they are tried
	discovery  *fileDiscovery
	clusters   bool // the endpoints are gateways of clusters: their pages have the averages over a cluster
}

// httpSource says how a page of a replica is read. Zero values: as the replica's traffic.
type httpSource struct {
	scheme   string
	host     string
	path     string
	port     string
	tls      *tls.Config // nil: the settings'
	interval time.Duration
}

// fileDiscovery is a file of endpoints that the scheduling file names.
type fileDiscovery struct {
	path     string
	watch    bool
	clusters bool // its entries may say where their metrics are
}

// engineLabel names a replica's engine. The older name of the label counts when the newer one is not set.
const (
	engineLabel       = "llm-d.ai/engine-type"
	legacyEngineLabel = "inference.networking.k8s.io/engine-type"
)

// The plugin types that are read here.
const (
	metricsSource    = "metrics-data-source"
	metricsExtractor = "core-metrics-extractor"
	modelsSource     = "models-data-source"
	modelsExtractor  = "models-data-extractor"
	noticeSource     = "endpoint-notification-source"
	fileSource       = "file-discovery"

	clusterSource    = "multicluster-metrics-data-source"
	clusterExtractor = "multicluster-metrics-extractor"
	clusterFile      = "multicluster-file-discovery"
)

// planner reads one configuration.
type planner struct {
	cfg      *configs.Scheduling
	scrape   configs.Scrape
	plan     *Plan
	problems configs.Problems
}

// NewPlan reads the data sources, extractors and discovery plugins of a
// configuration and the data layer section that binds them. The error is
// configs.Problems. Every parameter is honoured or refused.
//
// kvgate scrapes a replica once: a declared metrics-data-source replaces the
// default one, whatever its name.
func NewPlan(cfg *configs.Scheduling, s configs.Scrape) (*Plan, error) {
	p := planner{cfg: cfg, scrape: s, plan: &Plan{engineKeys: []string{engineLabel, legacyEngineLabel}}}
	p.plan.models.path = "/v1/models"
	p.sources()
	p.discovery()
	if err := p.problems.Err(); err != nil {
		return nil, err
	}
	return p.plan, nil
}

func (p *planner) warn(pos configs.Position, remedy, format string, args ...any) {
	p.plan.Warnings = append(p.plan.Warnings, pos.Problem(remedy, format, args...).Error())
}

func (p *planner) report(pos configs.Position, remedy, format string, args ...any) {
	p.problems.Add(pos.Problem(remedy, format, args...))
}

// declared returns the instances of a type.
func (p *planner) declared(typ string) []configs.PluginSpec {
	var out []configs.PluginSpec
	for _, s := range p.cfg.Plugins {
		if s.Type == typ {
			out = append(out, s)
		}
	}
	return out
}

// resolve returns the plugin that a reference names. One that is not declared is
// created without parameters if the reference is one of types.
func (p *planner) resolve(ref string, pos configs.Position, what string, types ...string) (configs.PluginSpec, bool) {
	var names []string
	for _, s := range p.cfg.Plugins {
		if s.Name == ref {
			if !slices.Contains(types, s.Type) {
				p.report(pos.At("pluginRef"), "name "+what+": "+strings.Join(types, ", "), "%q is a %s", ref, s.Type)
				return s, false
			}
			return s, true
		}
		if slices.Contains(types, s.Type) {
			names = append(names, s.Name)
		}
	}
	if slices.Contains(types, ref) {
		return configs.PluginSpec{Name: ref, Type: ref, Pos: pos}, true
	}
	p.report(pos.At("pluginRef"), configs.Suggest(ref, "known", append(names, types...)), "no plugin is named %q", ref)
	return configs.PluginSpec{}, false
}

// sources reads dataLayer.sources and what they name.
func (p *planner) sources() {
	bound := make(map[string]configs.DataSource) // by type
	for _, source := range p.cfg.DataLayer.Sources {
		spec, ok := p.resolve(source.Ref, source.Pos, "a data source", metricsSource, clusterSource, modelsSource, noticeSource)
		if !ok {
			continue
		}
		scrapes := spec.Type
		if scrapes == clusterSource {
			scrapes = metricsSource // in place of the other
		}
		if first, twice := bound[scrapes]; twice {
			p.report(source.Pos.At("pluginRef"), "keep one of them: kvgate reads a replica once", "%q is a second %s, beside %q", source.Ref, scrapes, first.Ref)
			continue
		}
		bound[scrapes] = source
		p.others(spec)
		switch spec.Type {
		case metricsSource:
			p.metrics(spec, source)
		case clusterSource:
			p.clusters(spec, source)
		case modelsSource:
			p.models(spec, source)
		case noticeSource:
			p.noParameters(spec)
			for _, x := range source.Extractors {
				if !slices.ContainsFunc(p.cfg.Plugins, func(s configs.PluginSpec) bool { return s.Name == x.Ref }) {
					p.report(x.Pos.At("pluginRef"), "declare it under plugins", "no plugin is named %q", x.Ref)
				}
			}
		}
	}
	p.unbound(bound)
}

// unbound reads the declared plugins that no source names.
func (p *planner) unbound(bound map[string]configs.DataSource) {
	if !p.plan.clusters {
		for _, spec := range slices.Concat(p.declared(clusterSource), p.declared(clusterExtractor)) {
			p.report(spec.Pos, "name it in dataLayer.sources", "%q is bound to nothing", spec.Name)
		}
	} else {
		for _, spec := range slices.Concat(p.declared(metricsSource), p.declared(metricsExtractor)) {
			p.report(spec.Pos, "remove it: a "+clusterSource+" is in use", "%q has no effect", spec.Name)
		}
	}
	if _, is := bound[metricsSource]; !is {
		spec, declared := p.only(metricsSource)
		switch {
		case p.cfg.DataLayer.InjectDefaults:
			if !declared {
				spec = configs.PluginSpec{Name: metricsSource, Type: metricsSource, Pos: p.cfg.DataLayer.Pos}
			}
			p.metrics(spec, configs.DataSource{Ref: spec.Name, Pos: spec.Pos})
		case declared:
			p.report(spec.Pos, "name it under dataLayer.sources, or remove dataLayer.injectDefaults: false", "%q is bound to nothing", spec.Name)
		default:
			p.warn(p.cfg.DataLayer.Pos.At("injectDefaults"), "name a "+metricsSource+" under dataLayer.sources", "nobody scrapes the replicas: scorers that read their load have no opinion")
			p.extractor(nil)
		}
	}
	if _, is := bound[modelsSource]; !is {
		if spec, declared := p.only(modelsSource); declared {
			p.models(spec, configs.DataSource{Ref: spec.Name, Pos: spec.Pos})
		} else {
			p.modelsExtractor(nil)
		}
	}
	if _, is := bound[noticeSource]; !is {
		for _, spec := range p.declared(noticeSource) {
			p.noParameters(spec)
		}
	}
}

// only returns the one declared instance of a type, and reports others.
func (p *planner) only(typ string) (configs.PluginSpec, bool) {
	all := p.declared(typ)
	if len(all) == 0 {
		return configs.PluginSpec{}, false
	}
	for _, other := range all[1:] {
		p.report(other.Pos, "keep one of them", "%q is a second %s, beside %q", other.Name, typ, all[0].Name)
	}
	return all[0], true
}

// others reports instances of a type beside the one that is used, but for those that a source names.
func (p *planner) others(used configs.PluginSpec) {
	for _, s := range p.declared(used.Type) {
		named := slices.ContainsFunc(p.cfg.DataLayer.Sources, func(source configs.DataSource) bool { return source.Ref == s.Name })
		if s.Name != used.Name && !named {
			p.report(s.Pos, "remove it, or use it in place of "+used.Name, "%q has no effect: %q is the %s in use", s.Name, used.Name, used.Type)
		}
	}
}

func (p *planner) noParameters(spec configs.PluginSpec) {
	p.problems.Add(spec.Parameters.Decode(&struct{}{}))
}

// sourceParams are the parameters of metrics-data-source and models-data-source.
type sourceParams struct {
	Scheme             string        `json:"scheme"`
	Path               string        `json:"path"`
	Port               *int          `json:"port"`
	InsecureSkipVerify bool          `json:"insecureSkipVerify"`
	CACertPath         string        `json:"caCertPath"`
	ClientCertPath     string        `json:"clientCertPath"`
	ClientKeyPath      string        `json:"clientKeyPath"`
	Interval           time.Duration `json:"interval"`
}

func (p *planner) metrics(spec configs.PluginSpec, source configs.DataSource) {
	p.plan.metrics = p.source(spec, "/metrics")
	p.fresh(spec)
	p.extractor(&source)
}

// fresh reports an interval at which observations grow stale.
func (p *planner) fresh(spec configs.PluginSpec) {
	if i, stale := p.plan.metrics.interval, p.scrape.Staleness; i > stale && stale > 0 {
		p.report(spec.Parameters.At("interval"), "make it shorter, or scrape.staleness longer, else every observation counts as missing",
			"the interval %s is longer than scrape.staleness %s", i, stale)
	}
}

// clusters reads a source of clusters' metrics and its extractor: of a page that
// a gateway serves about its replicas the two averages are taken for a replica's own values.
func (p *planner) clusters(spec configs.PluginSpec, source configs.DataSource) {
	p.plan.clusters = true
	p.plan.metrics = p.source(spec, "/metrics")
	if p.plan.metrics.scheme == "" {
		p.plan.metrics.scheme = "https"
	}
	if p.plan.metrics.port != "" {
		p.warn(spec.Parameters.At("port"), "label the clusters with "+metricsPortLabel, "port has no effect")
		p.plan.metrics.port = ""
	}
	p.fresh(spec)
	in := struct {
		Usage string `json:"kvCacheUtilizationMetric"`
		Queue string `json:"queueSizeMetric"`
	}{"llm_d_epp_average_kv_cache_utilization", "llm_d_epp_average_queue_size"}
	x := p.bind(&source, clusterExtractor)
	if x.Type == "" {
		p.report(source.Pos, "declare a "+clusterExtractor+" and name it there", "%q has no extractor", source.Ref)
		return
	}
	if err := x.Parameters.Decode(&in); err != nil {
		p.problems.Add(err)
		return
	}
	specs := engineSpecs{name: "cluster"}
	specs.specs[fieldUsage], specs.specs[fieldWaiting] = in.Usage, in.Queue
	keys := [fieldCount]string{fieldUsage: "kvCacheUtilizationMetric", fieldWaiting: "queueSizeMetric"}
	for f, key := range keys {
		if key != "" && specs.specs[f] == "" {
			p.report(x.Parameters.At(key), "name a metric", "%s is empty", key)
		}
	}
	e := specs.compile(func(f field, err error) {
		p.report(x.Parameters.At(keys[f]), "write name or name{label=value,...}", "%v", err)
	})
	if e != nil {
		p.plan.engines = []*engine{e}
	}
	p.plan.engineKeys = nil
}

func (p *planner) models(spec configs.PluginSpec, source configs.DataSource) {
	p.plan.models = *p.source(spec, "/v1/models")
	p.modelsExtractor(&source)
}

// source reads the parameters of an HTTP source.
func (p *planner) source(spec configs.PluginSpec, path string) *httpSource {
	in := sourceParams{Path: path}
	at := spec.Parameters
	if err := at.Decode(&in); err != nil {
		p.problems.Add(err)
		return &httpSource{path: path}
	}
	out := &httpSource{scheme: in.Scheme, path: in.Path, interval: in.Interval}
	if in.Scheme != "" && in.Scheme != "http" && in.Scheme != "https" {
		p.report(at.At("scheme"), configs.Suggest(in.Scheme, "known schemes", []string{"http", "https"}), "%q is no scheme", in.Scheme)
	}
	bad := func(r rune) bool { return r <= ' ' || r > '~' || r == '#' }
	if !strings.HasPrefix(in.Path, "/") || strings.ContainsFunc(in.Path, bad) {
		p.report(at.At("path"), "write a path such as "+path, "%q is no path", in.Path)
	}
	if in.Port != nil {
		if *in.Port < 1 || *in.Port > 65535 {
			p.report(at.At("port"), "write a number from 1 to 65535", "%d is no port", *in.Port)
		}
		out.port = fmt.Sprint(*in.Port)
	}
	const least = 10 * time.Millisecond // a scrape costs a replica's API server milliseconds
	if at.Has("interval") && in.Interval < least {
		p.report(at.At("interval"), "write at least "+least.String(), "the interval %s is too short", in.Interval)
	}
	out.tls = p.tls(at, &in)
	return out
}

// tls returns the TLS configuration of a source, nil when it sets nothing of its own.
func (p *planner) tls(at configs.Params, in *sourceParams) *tls.Config {
	files := in.CACertPath != "" || in.ClientCertPath != "" || in.ClientKeyPath != ""
	if in.Scheme == "http" {
		if files {
			p.report(at.At("scheme"), "write scheme: https, or remove the certificates", "certificates have no effect with http")
		}
		return nil
	}
	if !files && !in.InsecureSkipVerify {
		return nil
	}
	config := newTLS(nil)
	config.InsecureSkipVerify = in.InsecureSkipVerify // #nosec G402 -- the operator says so, for the metrics alone
	if in.CACertPath != "" {
		if in.InsecureSkipVerify {
			p.report(at.At("caCertPath"), "remove it or insecureSkipVerify: true", "has no effect: certificates are not verified")
		}
		pool, err := configs.ReadCAs(in.CACertPath)
		if err != nil {
			p.report(at.At("caCertPath"), "name a PEM file of CA certificates", "%v", err)
		}
		config.RootCAs = pool
	}
	switch {
	case in.ClientCertPath == "" && in.ClientKeyPath == "":
	case in.ClientCertPath == "":
		p.report(at.At("clientKeyPath"), "set clientCertPath too", "a key without its certificate")
	case in.ClientKeyPath == "":
		p.report(at.At("clientCertPath"), "set clientKeyPath too", "a certificate without its key")
	default:
		pair, err := tls.LoadX509KeyPair(in.ClientCertPath, in.ClientKeyPath)
		if err != nil {
			p.report(at.At("clientCertPath"), "name PEM files of a certificate and its key", "%v", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config
}

// newTLS returns a client configuration that trusts cas, the system's CAs when nil.
func newTLS(cas *x509.CertPool) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: cas, NextProtos: []string{"http/1.1"}}
}

// extractorParams are the parameters of core-metrics-extractor.
type extractorParams struct {
	EngineLabelKey string         `json:"engineLabelKey"`
	DefaultEngine  string         `json:"defaultEngine"`
	EngineConfigs  []engineParams `json:"engineConfigs"`
}

type engineParams struct {
	Name                    string           `json:"name"`
	QueuedRequestsSpec      string           `json:"queuedRequestsSpec"`
	RunningRequestsSpec     string           `json:"runningRequestsSpec"`
	KVUsageSpec             string           `json:"kvUsageSpec"`
	LoRASpec                string           `json:"loraSpec"`
	CacheInfoSpec           string           `json:"cacheInfoSpec"`
	CacheBlockSizeLabelName string           `json:"cacheBlockSizeLabelName"`
	CacheNumBlocksLabelName string           `json:"cacheNumBlocksLabelName"`
	CacheBlockSizeSpec      string           `json:"cacheBlockSizeSpec"`
	CacheNumBlocksSpec      string           `json:"cacheNumBlocksSpec"`
	CustomMetrics           []configs.Params `json:"customMetrics"`
	Pos                     configs.Position `json:"-"`
}

// specKeys are the parameters that hold specs.
var specKeys = [fieldCount]string{
	fieldWaiting:   "queuedRequestsSpec",
	fieldRunning:   "runningRequestsSpec",
	fieldUsage:     "kvUsageSpec",
	fieldBlockSize: "cacheBlockSizeSpec",
	fieldNumBlocks: "cacheNumBlocksSpec",
	fieldCacheInfo: "cacheInfoSpec",
	fieldLoRA:      "loraSpec",
}

// bind returns the extractor of a source: the one it names, the one that is declared, or the default.
func (p *planner) bind(source *configs.DataSource, typ string) configs.PluginSpec {
	if source != nil && len(source.Extractors) > 0 {
		for _, extra := range source.Extractors[1:] {
			p.report(extra.Pos.At("pluginRef"), "keep one of them", "%q is a second extractor of %q", extra.Ref, source.Ref)
		}
		x := source.Extractors[0]
		spec, ok := p.resolve(x.Ref, x.Pos, "an extractor", typ)
		if ok {
			p.others(spec)
		}
		return spec
	}
	spec, _ := p.only(typ)
	return spec
}

func (p *planner) modelsExtractor(source *configs.DataSource) {
	p.noParameters(p.bind(source, modelsExtractor))
}

func (p *planner) extractor(source *configs.DataSource) {
	spec := p.bind(source, metricsExtractor)
	in := extractorParams{DefaultEngine: builtin[0].name}
	at := spec.Parameters
	if err := at.Decode(&in); err != nil {
		p.problems.Add(err)
		return
	}
	if key := in.EngineLabelKey; key != "" && key != engineLabel {
		p.plan.engineKeys = []string{key, legacyEngineLabel}
	}
	var own []*engine
	for _, e := range in.EngineConfigs {
		if e.Name == "" || e.Name == "default" {
			p.report(e.Pos.At("name"), "write the name of the engine as the label "+p.plan.engineKeys[0]+" has it", "%q is no name for an engine", e.Name)
			continue
		}
		if slices.ContainsFunc(own, func(o *engine) bool { return o.name == e.Name }) {
			p.report(e.Pos.At("name"), "keep one of them", "duplicate engine %q", e.Name)
			continue
		}
		if compiled := p.engine(&e); compiled != nil {
			own = append(own, compiled)
		}
	}
	for i := range builtin {
		if !slices.ContainsFunc(own, func(o *engine) bool { return o.name == builtin[i].name }) {
			own = append(own, builtin[i].compile(nil))
		}
	}
	first := slices.IndexFunc(own, func(e *engine) bool { return e.name == in.DefaultEngine })
	if first < 0 {
		var names []string
		for _, e := range own {
			names = append(names, e.name)
		}
		p.report(at.At("defaultEngine"), configs.Suggest(in.DefaultEngine, "known engines", names), "unknown engine %q", in.DefaultEngine)
		return
	}
	chosen := own[first] // before Delete moves the others into its place
	p.plan.engines = append([]*engine{chosen}, slices.Delete(own, first, first+1)...)
}

// engine compiles one of engineConfigs, nil when something is wrong with it.
func (p *planner) engine(in *engineParams) *engine {
	n := len(p.problems)
	if len(in.CustomMetrics) > 0 {
		p.report(in.Pos.At("customMetrics"), "remove it", "customMetrics is llm-d's, but kvgate does not have it yet")
	}
	if in.CacheInfoSpec == "" {
		for _, label := range []struct{ key, value string }{
			{"cacheBlockSizeLabelName", in.CacheBlockSizeLabelName},
			{"cacheNumBlocksLabelName", in.CacheNumBlocksLabelName},
		} {
			if label.value != "" {
				p.report(in.Pos.At(label.key), "set cacheInfoSpec too, or remove it", "has no effect without cacheInfoSpec")
			}
		}
	}
	specs := engineSpecs{
		name: in.Name,
		specs: [fieldCount]string{
			fieldWaiting:   in.QueuedRequestsSpec,
			fieldRunning:   in.RunningRequestsSpec,
			fieldUsage:     in.KVUsageSpec,
			fieldBlockSize: in.CacheBlockSizeSpec,
			fieldNumBlocks: in.CacheNumBlocksSpec,
			fieldCacheInfo: in.CacheInfoSpec,
			fieldLoRA:      in.LoRASpec,
		},
		blockSizeLabel: in.CacheBlockSizeLabelName,
		numBlocksLabel: in.CacheNumBlocksLabelName,
	}
	e := specs.compile(func(f field, err error) {
		p.report(in.Pos.At(specKeys[f]), "write name or name{label=value,...}", "%v", err)
	})
	if e == nil && len(p.problems) == n {
		p.report(in.Pos, "write at least queuedRequestsSpec", "the engine %q reads nothing", in.Name)
	}
	if len(p.problems) > n {
		return nil
	}
	return e
}

// discovery reads file-discovery, named by dataLayer.discovery or merely declared.
func (p *planner) discovery() {
	var spec configs.PluginSpec
	ok := false
	if ref := p.cfg.DataLayer.Discovery; ref != nil {
		if spec, ok = p.resolve(ref.Ref, ref.Pos, "a discovery plugin", fileSource, clusterFile); ok {
			p.others(spec)
			for _, s := range slices.Concat(p.declared(fileSource), p.declared(clusterFile)) {
				if s.Type != spec.Type {
					p.report(s.Pos, "remove it", "%q has no effect: %q is the source of endpoints", s.Name, spec.Name)
				}
			}
		}
	} else if spec, ok = p.only(fileSource); !ok {
		spec, ok = p.only(clusterFile)
	} else if other, both := p.only(clusterFile); both {
		p.report(other.Pos, "keep one of them, or name one in dataLayer.discovery", "%q is a second source of endpoints, beside %q", other.Name, spec.Name)
	}
	if !ok {
		return
	}
	var in struct {
		Path      string `json:"path"`
		WatchFile bool   `json:"watchFile"`
	}
	if err := spec.Parameters.Decode(&in); err != nil {
		p.problems.Add(err)
		return
	}
	if in.Path == "" {
		p.report(spec.Pos.At("parameters.path"), "write the path of a file of endpoints", "missing")
		return
	}
	p.plan.discovery = &fileDiscovery{path: in.Path, watch: in.WatchFile, clusters: spec.Type == clusterFile}
}

// engineOf returns the engines to try on the pages of an endpoint with these
// labels: the one that it names, or all. unknown is the name that no engine has.
func (p *Plan) engineOf(label func(key string) (string, bool)) (engines []*engine, unknown string) {
	for _, key := range p.engineKeys {
		name, set := label(key)
		if !set {
			continue
		}
		for i, e := range p.engines {
			if e.name == name {
				return p.engines[i : i+1], ""
			}
		}
		return p.engines[:1], name
	}
	return p.engines, ""
}
