package routing

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"kvgate/configs"
)

// builder compiles one configuration. Every name is resolved here: a request
// only indexes slices.
type builder struct {
	fleet    *Fleet
	seed     uint64
	render   Renderer
	timer    Timer
	specs    []configs.PluginSpec
	spec     configs.PluginSpec // the plugin being made
	problems configs.Problems
	warnings []string
	columns  []need // by column number
}

type need struct {
	producer string
	pos      configs.Position
}

// params decodes the plugin's parameters over the defaults in dst.
func (b *builder) params(dst any) error { return b.spec.Parameters.Decode(dst) }

// noParams refuses parameters: nothing is silently ignored.
func (b *builder) noParams() error { return b.params(&struct{}{}) }

// problem returns an error at the plugin's place.
func (b *builder) problem(remedy, message string) error {
	return b.spec.Pos.Problem(remedy, "%s: %s", b.spec.Name, message)
}

func (b *builder) warn(message string) {
	b.warnings = append(b.warnings, fmt.Sprintf("%s: %s", b.spec.Name, message))
}

// column returns the number of the match column that the named producer fills.
func (b *builder) column(producer string) int {
	for i, n := range b.columns {
		if n.producer == producer {
			return i
		}
	}
	b.columns = append(b.columns, need{producer, b.spec.Pos})
	return len(b.columns) - 1
}

func (b *builder) fail(err error) { b.problems.Add(err) }

// Option gives New what a configuration cannot.
type Option func(*builder)

// WithRenderer has the token-producer's vLLM backend ask through r. Without it
// nothing is asked, and the estimate stands in.
func WithRenderer(r Renderer) Option { return func(b *builder) { b.render = r } }

// WithTimer has the burst-prefix-cache-producer hold requests for its window. Without
// it nobody waits, and nothing is placed.
func WithTimer(t Timer) Option { return func(b *builder) { b.timer = t } }

type instance struct {
	spec  configs.PluginSpec
	value any // nil for a structural type
}

// New compiles a configuration over a fleet, with llm-d's defaulting rules:
// what is missing and can be supplied is added and written back into the
// returned router's Config. All problems are reported at once, as
// configs.Problems. seed makes the random choices repeatable.
func New(cfg *configs.Scheduling, fleet *Fleet, seed uint64, options ...Option) (*Router, error) {
	effective := *cfg
	effective.Plugins = slices.Clone(cfg.Plugins)
	effective.Profiles = slices.Clone(cfg.Profiles)
	effective.Parsers = slices.Clone(cfg.Parsers)
	effective.Warnings = slices.Clone(cfg.Warnings)
	b := &builder{fleet: fleet, seed: seed, specs: effective.Plugins}
	for _, o := range options {
		o(b)
	}
	r := &Router{fleet: fleet, config: &effective, primary: -1, rnd: rand.New(rand.NewPCG(seed, seed^0xda3e39cb94b95bdb))}

	var made []instance
	for _, spec := range effective.Plugins {
		made = append(made, instance{spec, b.make(spec)})
	}
	add := func(typ string) any {
		spec := configs.PluginSpec{Name: typ, Type: typ, Pos: configs.Position{File: effective.File, Path: "added by default"}}
		v := b.make(spec)
		effective.Plugins = append(effective.Plugins, spec)
		made = append(made, instance{spec, v})
		return v
	}
	b.defaultProfile(&effective, made, add)
	b.handler(&effective, made, add)
	b.compile(r, &effective, made)
	b.parsers(r, &effective, made, add)
	b.detector(&effective, made)
	b.produce(r, &made, add)
	if len(b.problems) > 0 {
		return nil, b.problems.Err()
	}
	effective.Warnings = append(effective.Warnings, b.warnings...)
	r.makeMemo()
	return r, nil
}

// make returns the plugin instance, nil for a structural type or on a problem.
func (b *builder) make(spec configs.PluginSpec) any {
	b.spec = spec
	for _, d := range deprecated {
		if spec.Type == d.old {
			b.warn(fmt.Sprintf("plugin type %s is deprecated: write %s", d.old, d.now))
			spec.Type = d.now
		}
	}
	for _, p := range registry {
		if p.name == spec.Type {
			v, err := p.make(b)
			b.fail(err)
			return v
		}
	}
	for _, s := range structural {
		if s.name == spec.Type {
			if !s.scrape && spec.Type != "utilization-detector" {
				b.fail(b.noParams())
			}
			return nil
		}
	}
	if slices.Contains(notYet, spec.Type) {
		b.fail(spec.Pos.At("type").Problem("remove it, or see docs/compatibility.md for what to use instead", "plugin type %s is llm-d's, but kvgate does not have it yet", spec.Type))
		return nil
	}
	b.fail(spec.Pos.At("type").Problem(configs.Suggest(spec.Type, "known types", typeNames()), "plugin type %s is unknown", spec.Type))
	return nil
}

func typeNames() []string {
	var names []string
	for _, p := range registry {
		names = append(names, p.name)
	}
	for _, s := range structural {
		names = append(names, s.name)
	}
	return names
}

// isSlot says whether the value belongs into a profile.
func isSlot(v any) bool {
	switch v.(type) {
	case Filter, Scorer, Picker:
		return true
	}
	return false
}

func isPicker(v any) bool { _, ok := v.(Picker); return ok }

// defaultProfile supplies the profile, and each profile's picker.
func (b *builder) defaultProfile(cfg *configs.Scheduling, made []instance, add func(string) any) {
	if len(cfg.Profiles) == 0 {
		p := configs.ProfileSpec{Name: "default", Pos: configs.Position{File: cfg.File, Path: "schedulingProfiles"}}
		for _, m := range made {
			if isSlot(m.value) {
				p.Plugins = append(p.Plugins, configs.ProfilePlugin{Ref: m.spec.Name, Pos: m.spec.Pos})
			}
		}
		cfg.Profiles = []configs.ProfileSpec{p}
	}
	for i := range cfg.Profiles {
		p := &cfg.Profiles[i]
		has := slices.ContainsFunc(p.Plugins, func(x configs.ProfilePlugin) bool { return isPicker(find(made, x.Ref)) })
		if has {
			continue
		}
		ref := "max-score-picker"
		if k := slices.IndexFunc(made, func(m instance) bool { return isPicker(m.value) }); k >= 0 {
			ref = made[k].spec.Name
		} else if !slices.ContainsFunc(cfg.Plugins, func(s configs.PluginSpec) bool { return s.Name == ref }) {
			v := add(ref)
			made = append(made, instance{cfg.Plugins[len(cfg.Plugins)-1], v})
		}
		p.Plugins = append(slices.Clone(p.Plugins), configs.ProfilePlugin{Ref: ref, Pos: p.Pos})
	}
}

func find(made []instance, name string) any {
	for _, m := range made {
		if m.spec.Name == name {
			return m.value
		}
	}
	return nil
}

// handler checks that exactly one profile is run by a single-profile-handler.
func (b *builder) handler(cfg *configs.Scheduling, made []instance, add func(string) any) {
	var handlers []instance
	for _, m := range made {
		if m.spec.Type == "single-profile-handler" {
			handlers = append(handlers, m)
		}
	}
	if len(handlers) > 1 {
		b.fail(handlers[1].spec.Pos.Problem("keep one of them", "there are %d profile handlers", len(handlers)))
	}
	if len(cfg.Profiles) > 1 {
		b.fail(cfg.Profiles[1].Pos.Problem("keep one profile: kvgate has no handler for several yet", "there are %d scheduling profiles", len(cfg.Profiles)))
	}
	if len(handlers) == 0 {
		add("single-profile-handler")
	}
}

// compile fills the slots of the profile.
func (b *builder) compile(r *Router, cfg *configs.Scheduling, made []instance) {
	profile := cfg.Profiles[0]
	r.profile = profile.Name
	picker := ""
	for _, entry := range profile.Plugins {
		var m instance
		for _, x := range cfg.Plugins {
			if x.Name == entry.Ref {
				m.spec = x
			}
		}
		m.value = find(made, entry.Ref)
		if m.spec.Name == "" {
			b.fail(entry.Pos.Problem("declare it under plugins", "pluginRef %s is not declared", entry.Ref))
			continue
		}
		if f, ok := m.value.(Filter); ok {
			r.filters = append(r.filters, namedFilter{entry.Ref, f})
		}
		if x, ok := m.value.(binder); ok {
			r.binders = append(r.binders, x)
			if h := x.answerHeader(); h != "" && !slices.Contains(r.sessionHeaders, h) {
				r.sessionHeaders = append(r.sessionHeaders, h)
			}
		}
		s, scores := m.value.(Scorer)
		if scores {
			weight := 1.0
			if entry.Weight != nil {
				weight = *entry.Weight
			}
			r.scorers = append(r.scorers, weightedScorer{entry.Ref, weight, s})
		}
		if p, ok := m.value.(Picker); ok {
			if r.picker != nil {
				b.fail(entry.Pos.Problem("keep one of them", "profile %s has two pickers, %s and %s", profile.Name, picker, entry.Ref))
			}
			r.picker, picker = p, entry.Ref
		}
		if !isSlot(m.value) && len(b.problems) == 0 {
			b.warnings = append(b.warnings, fmt.Sprintf("profile %s: %s is no filter, scorer or picker: it has no effect there", profile.Name, entry.Ref))
		}
		if entry.Weight != nil && !scores && m.value != nil {
			b.warnings = append(b.warnings, fmt.Sprintf("profile %s: the weight of %s has no effect: it is no scorer", profile.Name, entry.Ref))
		}
	}
	if len(r.scorers) == 0 {
		b.warnings = append(b.warnings, fmt.Sprintf("profile %s has no scorer: every choice is a draw", profile.Name))
	}
}

// parserSet says which body shapes are parsed.
type parserSet struct {
	api         [APICount]bool
	passthrough bool
}

// Parser returns how a body of that shape is read under this configuration:
// the shape itself, or APINone when only the passthrough-parser takes it. ok is
// false when no configured parser takes it.
func (r *Router) Parser(api API) (as API, ok bool) {
	switch {
	case api == APINone || r.parsers.api[api]:
		return api, true
	case r.parsers.passthrough:
		return APINone, true
	}
	return APINone, false
}

func (b *builder) parsers(r *Router, cfg *configs.Scheduling, made []instance, add func(string) any) {
	known := []string{"openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser"}
	if len(cfg.Parsers) == 0 {
		for _, name := range known {
			cfg.Parsers = append(cfg.Parsers, configs.Ref{Ref: name, Pos: configs.Position{File: cfg.File, Path: "requestHandler.parsers"}})
		}
	}
	for _, ref := range cfg.Parsers {
		typ := ""
		for _, m := range made {
			if m.spec.Name == ref.Ref {
				typ = m.spec.Type
			}
		}
		if typ == "" && slices.Contains(known, ref.Ref) {
			typ = ref.Ref
			add(typ)
		}
		switch typ {
		case "openai-parser":
			for _, a := range []API{APIChat, APICompletions, APIEmbeddings, APIResponses, APIChatBatch, APIScoring} {
				r.parsers.api[a] = true
			}
		case "anthropic-parser":
			r.parsers.api[APIMessages] = true
		case "vllmhttp-parser":
			r.parsers.api[APIGenerate] = true
		case "passthrough-parser":
			r.parsers.passthrough = true
		case "":
			b.fail(ref.Pos.Problem(configs.Suggest(ref.Ref, "parsers", known), "parser %s is not declared", ref.Ref))
		default:
			b.fail(ref.Pos.Problem("name a parser: openai-parser, anthropic-parser, vllmhttp-parser or passthrough-parser", "%s is a %s, not a parser", ref.Ref, typ))
		}
	}
}

// detector checks the saturation detector's reference, which counts even with
// the flowControl gate off.
func (b *builder) detector(cfg *configs.Scheduling, made []instance) {
	if cfg.FlowControl == nil || cfg.FlowControl.SaturationDetector == nil {
		return
	}
	const typ = "utilization-detector"
	ref := cfg.FlowControl.SaturationDetector
	for _, m := range made {
		if m.spec.Name == ref.Ref {
			if m.spec.Type != typ {
				b.fail(ref.Pos.Problem("name a "+typ, "%s is a %s, not a saturation detector", ref.Ref, m.spec.Type))
			}
			return
		}
	}
	if ref.Ref != typ {
		b.fail(ref.Pos.Problem("declare it under plugins", "saturation detector %s is not declared", ref.Ref))
	}
}

// produce binds the match columns to producers, adding the default ones.
func (b *builder) produce(r *Router, made *[]instance, add func(string) any) {
	for _, n := range b.columns {
		v := find(*made, n.producer)
		if v == nil && (n.producer == defaultProducer || n.producer == clusterProducer) {
			v = add(n.producer)
			*made = append(*made, instance{configs.PluginSpec{Name: n.producer, Type: n.producer}, v})
		}
		p, ok := v.(Producer)
		if !ok {
			if len(b.problems) == 0 {
				b.fail(n.pos.Problem("declare it under plugins, or leave the name out", "no plugin named %s produces prefix matches", n.producer))
			}
			continue
		}
		if o, ok := v.(Observer); ok {
			r.observers = append(r.observers, observer{len(r.producers), o})
		}
		_, places := v.(placer)
		if !places && r.primary < 0 {
			r.primary = len(r.producers)
		}
		r.producers = append(r.producers, namedProducer{n.producer, places, p})
	}
	for _, m := range *made {
		if _, ok := m.value.(Producer); ok && !slices.ContainsFunc(r.producers, func(p namedProducer) bool { return p.name == m.spec.Name }) {
			b.warnings = append(b.warnings, fmt.Sprintf("%s: no scorer reads it, so it does nothing", m.spec.Name))
		}
	}
	r.columns = make([]Column, len(r.producers))
	for i, p := range r.producers {
		r.columns[i].predictions = b.fleet.predictionsOf(p.name)
	}
	if len(r.producers) == 0 {
		return
	}
	tokens := ""
	for _, m := range *made {
		if t, ok := m.value.(Tokenizer); ok {
			if r.tokenizer != nil {
				b.fail(m.spec.Pos.Problem("keep one of them", "%s and %s both produce tokens", tokens, m.spec.Name))
			}
			r.tokenizer, tokens = t, m.spec.Name
		}
	}
	if r.tokenizer == nil {
		if t, ok := add("token-producer").(Tokenizer); ok {
			r.tokenizer = t
		}
	}
	if _, estimates := r.tokenizer.(*Estimator); !estimates {
		return
	}
	for _, p := range r.producers {
		if _, ok := p.Producer.(eventTaker); ok {
			b.warnings = append(b.warnings, fmt.Sprintf("%s: estimated tokens match nothing that an engine tells: give the token-producer the parameter vllm or local; until then only bodies with token ids have matches", p.name))
		}
	}
}
