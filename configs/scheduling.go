package configs

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Scheduling is an EndpointPickerConfig (llm-d.ai/v1alpha1) as far as it can be judged
// without knowing the plugin types: the document is strictly decoded, its names are
// unique, the plugins that its profiles name exist. What depends on the plugin types
// (which types exist, which interfaces they have, the parameters, the defaults that follow)
// is left to the reader of the value, and so are the references of Parsers, DataLayer and
// FlowControl.SaturationDetector, which may name a type that is created when it is absent.
type Scheduling struct {
	File         string // where it was read from, for messages
	APIVersion   string
	FeatureGates map[string]bool // every known gate with its value
	Plugins      []PluginSpec    // in the order of the document; names are set and unique
	Profiles     []ProfileSpec   // empty when the document has none
	Parsers      []Ref           // requestHandler.parsers
	DataLayer    DataLayer
	FlowControl  *FlowControl // nil when the document has no such section
	Warnings     []string     // what was accepted and ought to be changed, each with its place
}

// PluginSpec declares one plugin instance.
type PluginSpec struct {
	Name       string   `json:"name"` // the type when the document has none
	Type       string   `json:"type"`
	Parameters Params   `json:"parameters"`
	Pos        Position `json:"-"` // Pos.At("type") is the place of the type
}

// ProfileSpec is one scheduling profile.
type ProfileSpec struct {
	Name    string          `json:"name"`
	Plugins []ProfilePlugin `json:"plugins"`
	Pos     Position        `json:"-"`
}

// ProfilePlugin puts a declared plugin into a profile.
type ProfilePlugin struct {
	Ref    string   `json:"pluginRef"`
	Weight *float64 `json:"weight"` // finite and not negative; nil when absent; scorers only
	Pos    Position `json:"-"`
}

// Ref names a plugin instance.
type Ref struct {
	Ref string   `json:"pluginRef"`
	Pos Position `json:"-"`
}

// DataLayer says where observations and endpoints come from.
type DataLayer struct {
	InjectDefaults bool // add the default metrics source; true unless the document says false
	Sources        []DataSource
	Discovery      *Ref // replaces the other sources of endpoints; nil when absent
	Pos            Position
}

// DataSource binds extractors to a source of observations.
type DataSource struct {
	Ref        string   `json:"pluginRef"`
	Extractors []Ref    `json:"extractors"`
	Pos        Position `json:"-"`
}

// FlowControl is the flowControl section. It acts only while the gate flowControl is on,
// except for SaturationDetector.
type FlowControl struct {
	MaxBytes                    Quantity       `json:"maxBytes"`             // 0: no limit
	MaxRequests                 Quantity       `json:"maxRequests"`          // 0: no limit
	DefaultRequestTTL           *time.Duration `json:"defaultRequestTTL"`    // nil: 60 s; 0: none
	NoEndpointRequestTTL        *time.Duration `json:"noEndpointRequestTTL"` // nil: DefaultRequestTTL, or 60 s
	DefaultPriorityBand         *BandLimits    `json:"defaultPriorityBand"`
	DefaultNegativePriorityBand *BandLimits    `json:"defaultNegativePriorityBand"`
	PriorityBands               []PriorityBand `json:"priorityBands"`
	UsageLimitPolicyRef         string         `json:"usageLimitPolicyPluginRef"` // empty: static-usage-limit-policy
	SaturationDetector          *Ref           `json:"saturationDetector"`        // nil: utilization-detector
	EnableEviction              bool           `json:"enableEviction"`
	Pos                         Position       `json:"-"`
}

// BandLimits bounds one priority band. Zero and empty mean the default.
type BandLimits struct {
	MaxBytes          Quantity `json:"maxBytes"`          // 0: 1e9
	MaxRequests       Quantity `json:"maxRequests"`       // 0: 5000
	FairnessPolicyRef string   `json:"fairnessPolicyRef"` // empty: global-strict-fairness-policy
	OrderingPolicyRef string   `json:"orderingPolicyRef"` // empty: fcfs-ordering-policy
	Pos               Position `json:"-"`
}

// PriorityBand bounds the requests of one priority.
type PriorityBand struct {
	Priority          int      `json:"priority"`
	MaxBytes          Quantity `json:"maxBytes"`
	MaxRequests       Quantity `json:"maxRequests"`
	FairnessPolicyRef string   `json:"fairnessPolicyRef"`
	OrderingPolicyRef string   `json:"orderingPolicyRef"`
	Pos               Position `json:"-"`
}

// The groups that an EndpointPickerConfig may have, and its kind.
const (
	apiVersion       = "llm-d.ai/v1alpha1"
	legacyAPIVersion = "inference.networking.x-k8s.io/v1alpha1"
	kind             = "EndpointPickerConfig"
)

// DefaultScheduling returns the configuration that holds without a file: queue-scorer and
// kv-cache-utilization-scorer with weight 2, prefix-cache-scorer with weight 3.
func DefaultScheduling() *Scheduling {
	const file = "built-in default"
	s := &Scheduling{File: file, APIVersion: apiVersion, FeatureGates: defaultGates()}
	s.DataLayer.InjectDefaults = true
	profile := ProfileSpec{Name: "default", Pos: Position{File: file, Path: "schedulingProfiles[0]"}}
	for i, p := range []struct {
		name   string
		weight float64
	}{{"queue-scorer", 2}, {"kv-cache-utilization-scorer", 2}, {"prefix-cache-scorer", 3}, {"metrics-data-source", 0}, {"core-metrics-extractor", 0}} {
		pos := Position{File: file, Path: fmt.Sprintf("plugins[%d]", i)}
		s.Plugins = append(s.Plugins, PluginSpec{Name: p.name, Type: p.name, Parameters: Params{pos: pos.At("parameters")}, Pos: pos})
		if p.weight > 0 {
			at := profile.Pos.At(fmt.Sprintf("plugins[%d]", i))
			profile.Plugins = append(profile.Plugins, ProfilePlugin{Ref: p.name, Weight: &p.weight, Pos: at})
		}
	}
	s.Profiles = []ProfileSpec{profile}
	source := Position{File: file, Path: "dataLayer.sources[0]"}
	s.DataLayer.Pos = Position{File: file, Path: "dataLayer"}
	s.DataLayer.Sources = []DataSource{{Ref: "metrics-data-source", Pos: source,
		Extractors: []Ref{{Ref: "core-metrics-extractor", Pos: source.At("extractors[0]")}}}}
	return s
}

// LoadScheduling reads an EndpointPickerConfig file.
func LoadScheduling(file string) (*Scheduling, error) {
	data, err := readDocument(file)
	if err != nil {
		return nil, err
	}
	return ParseScheduling(file, data)
}

// document is the envelope of an EndpointPickerConfig.
type document struct {
	APIVersion         string        `json:"apiVersion"`
	Kind               string        `json:"kind"`
	FeatureGates       []string      `json:"featureGates"`
	Plugins            []PluginSpec  `json:"plugins"`
	SchedulingProfiles []ProfileSpec `json:"schedulingProfiles"`
	DataLayer          struct {
		InjectDefaults           *bool        `json:"injectDefaults"`
		Sources                  []DataSource `json:"sources"`
		Discovery                *Ref         `json:"discovery"`
		PeerDiscovery            Params       `json:"peerDiscovery"`
		CrossReplicaSyncerRef    Params       `json:"crossReplicaSyncerPluginRef"`
		CrossReplicaSyncInterval Params       `json:"crossReplicaSyncInterval"`
		Pos                      Position     `json:"-"`
	} `json:"dataLayer"`
	FlowControl    *FlowControl `json:"flowControl"`
	RequestHandler struct {
		Parsers []Ref    `json:"parsers"`
		Pos     Position `json:"-"`
	} `json:"requestHandler"`
	SaturationDetector *Ref `json:"saturationDetector"` // deprecated
	Parser             *Ref `json:"parser"`             // deprecated
}

// ParseScheduling reads an EndpointPickerConfig; file is its name in messages. The error
// is Problems with everything that is wrong.
func ParseScheduling(file string, data []byte) (*Scheduling, error) {
	root, problems := parseDocument(file, data)
	if problems == nil && root.node == nil {
		s := DefaultScheduling()
		s.File = file
		s.warn(root.Problem("", "the document is empty: the built-in default configuration is used"))
		return s, nil
	}
	if root.node == nil {
		return nil, problems.Err()
	}
	var doc document
	decode(root, "json", &doc, &problems)
	s := &Scheduling{
		File: file, APIVersion: doc.APIVersion, FeatureGates: defaultGates(),
		Plugins: doc.Plugins, Profiles: doc.SchedulingProfiles, Parsers: doc.RequestHandler.Parsers, FlowControl: doc.FlowControl,
	}
	c := checker{s: s, problems: &problems}
	c.envelope(root, &doc)
	if root.node.Kind == yaml.MappingNode {
		c.moveDeprecated(root, &doc)
		c.gates(root, doc.FeatureGates)
		c.plugins()
		c.profiles()
		c.refs(s.Parsers)
		c.dataLayer(&doc)
		c.flowControl(root)
	}
	if err := problems.Err(); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Scheduling) warn(p *Problem) { s.Warnings = append(s.Warnings, p.Error()) }

// checker judges a decoded document and moves it into s.
type checker struct {
	s        *Scheduling
	problems *Problems
	names    []string // of the plugins
}

func (c *checker) report(at Position, remedy, format string, args ...any) {
	if len(*c.problems) < maxProblems {
		c.problems.Add(at.Problem(remedy, format, args...))
	}
}

func (c *checker) envelope(root Position, doc *document) {
	if root.node.Kind != yaml.MappingNode {
		return // the decoder has said so
	}
	switch doc.APIVersion {
	case apiVersion:
	case legacyAPIVersion:
		c.s.warn(root.At("apiVersion").Problem("write "+apiVersion, "%s is deprecated", legacyAPIVersion))
	case "":
		c.report(root.At("apiVersion"), "write apiVersion: "+apiVersion, "missing")
	default:
		c.report(root.At("apiVersion"), "write "+apiVersion, "unknown group or version %s", quote(doc.APIVersion))
	}
	switch doc.Kind {
	case kind:
	case "":
		c.report(root.At("kind"), "write kind: "+kind, "missing")
	default:
		c.report(root.At("kind"), "write "+kind, "unknown kind %s", quote(doc.Kind))
	}
}

// moveDeprecated moves the deprecated top-level references to where they belong now.
func (c *checker) moveDeprecated(root Position, doc *document) {
	if ref := doc.SaturationDetector; ref != nil {
		at := root.At("saturationDetector")
		if c.s.FlowControl == nil {
			c.s.FlowControl = &FlowControl{Pos: at}
		}
		if fc := c.s.FlowControl; fc.SaturationDetector == nil {
			fc.SaturationDetector = ref
			c.s.warn(at.Problem("move it to flowControl.saturationDetector", "deprecated here"))
		} else {
			c.s.warn(at.Problem("remove it", "has no effect: flowControl.saturationDetector is set"))
		}
	}
	if ref := doc.Parser; ref != nil {
		at := root.At("parser")
		if len(c.s.Parsers) == 0 {
			c.s.Parsers = []Ref{*ref}
			c.s.warn(at.Problem("write it as the only item of requestHandler.parsers", "deprecated here"))
		} else {
			c.s.warn(at.Problem("remove it", "has no effect: requestHandler.parsers is set"))
		}
	}
}

// The feature gates of llm-d.
const (
	gateFlowControl = "flowControl"
	gateNonLeader   = "haPopulateNonLeaderDatastore"
)

func defaultGates() map[string]bool {
	return map[string]bool{gateFlowControl: false, gateNonLeader: true}
}

func (c *checker) gates(root Position, gates []string) {
	set := make(map[string]bool, len(gates))
	for i, gate := range gates {
		at := root.At(fmt.Sprintf("featureGates[%d]", i))
		if isNull(at.node) {
			continue // the decoder has said so
		}
		name, text, assigned := strings.Cut(gate, "=")
		value := true
		if assigned {
			var err error
			if value, err = strconv.ParseBool(strings.ToLower(strings.TrimSpace(text))); err != nil {
				c.report(at, "write "+name+"=true or "+name+"=false", "feature gate %s has the value %s", quote(name), quote(text))
			}
		}
		switch _, known := c.s.FeatureGates[name]; {
		case !known:
			c.report(at, Suggest(name, "known gates", []string{gateFlowControl, gateNonLeader}), "unknown feature gate %s", quote(name))
		case set[name]:
			c.report(at, "keep one of them", "feature gate %s is set twice", name)
		case name == gateFlowControl && value:
			c.report(at, "remove the gate", "feature gate flowControl=true is not supported yet")
		case name == gateNonLeader:
			c.s.warn(at.Problem("remove it", "feature gate %s has no effect: kvgate elects no leader", name))
		}
		set[name] = true
		c.s.FeatureGates[name] = value
	}
}

func (c *checker) plugins() {
	first := make(map[string]Position, len(c.s.Plugins))
	for i := range c.s.Plugins {
		p := &c.s.Plugins[i]
		if p.Pos.node == nil {
			continue // the decoder has said why
		}
		if p.Type == "" {
			c.missing(p.Pos.At("type"), "write the type of the plugin")
		}
		if p.Name == "" {
			p.Name = p.Type
		}
		if p.Name == "" {
			continue
		}
		if f, twice := first[p.Name]; twice {
			at := p.Pos.At("type")
			if p.Pos.Has("name") {
				at = p.Pos.At("name")
			}
			c.report(at, "give each instance a name of its own", "duplicate plugin name %s, first in line %d", quote(p.Name), f.Line)
			continue
		}
		first[p.Name] = p.Pos
		c.names = append(c.names, p.Name)
	}
}

func (c *checker) profiles() {
	first := make(map[string]Position, len(c.s.Profiles))
	for _, p := range c.s.Profiles {
		if p.Pos.node == nil {
			continue
		}
		if f, twice := first[p.Name]; p.Name == "" {
			c.missing(p.Pos.At("name"), "write the name of the profile")
		} else if twice {
			c.report(p.Pos.At("name"), "give each profile a name of its own", "duplicate profile name %s, first in line %d", quote(p.Name), f.Line)
		} else {
			first[p.Name] = p.Pos
		}
		listed := make(map[string]bool, len(p.Plugins))
		for _, entry := range p.Plugins {
			if entry.Pos.node == nil {
				continue
			}
			at := entry.Pos.At("pluginRef")
			switch {
			case entry.Ref == "":
				c.missing(at, "write the name of a plugin from plugins")
			case !slices.Contains(c.names, entry.Ref):
				c.report(at, Suggest(entry.Ref, "declared plugins", c.names), "no plugin is named %s", quote(entry.Ref))
			case listed[entry.Ref]:
				c.s.warn(at.Problem("keep one of them", "%s is listed twice in this profile and counts twice", quote(entry.Ref)))
			}
			listed[entry.Ref] = true
			if w := entry.Weight; w != nil && *w < 0 {
				c.report(entry.Pos.At("weight"), "write a number of at least 0", "the weight %v is negative", *w)
			}
		}
	}
}

// missing reports a field that is not set or empty, unless its value has been reported already.
func (c *checker) missing(at Position, remedy string) {
	if at.node == nil || isNull(at.node) || at.node.Kind == yaml.ScalarNode && at.node.Value == "" {
		c.report(at, remedy, "missing")
	}
}

// refs reports the references that are empty.
func (c *checker) refs(refs []Ref) {
	for _, r := range refs {
		if r.Pos.node != nil && r.Ref == "" {
			c.missing(r.Pos.At("pluginRef"), "write the name of a plugin from plugins")
		}
	}
}

func (c *checker) dataLayer(doc *document) {
	in, out := &doc.DataLayer, &c.s.DataLayer
	*out = DataLayer{InjectDefaults: in.InjectDefaults == nil || *in.InjectDefaults, Sources: in.Sources, Discovery: in.Discovery, Pos: in.Pos}
	for _, source := range in.Sources {
		c.refs([]Ref{{Ref: source.Ref, Pos: source.Pos}})
		c.refs(source.Extractors)
	}
	if in.Discovery != nil {
		c.refs([]Ref{*in.Discovery})
	}
	for _, field := range []string{"peerDiscovery", "crossReplicaSyncerPluginRef", "crossReplicaSyncInterval"} {
		if in.Pos.Has(field) {
			c.report(in.Pos.At(field), "remove it", "not supported: kvgate shares no state between gateways")
		}
	}
}

func (c *checker) flowControl(root Position) {
	fc := c.s.FlowControl
	if fc == nil {
		return
	}
	if fc.SaturationDetector != nil {
		c.refs([]Ref{*fc.SaturationDetector})
	}
	if root.Has("flowControl") {
		c.flowLimits(fc)
	}
	if fc.inert() {
		c.s.warn(fc.Pos.Problem("", "has no effect while the feature gate flowControl is off"))
	}
}

// inert tells whether the section sets something that acts only with the gate on.
func (fc *FlowControl) inert() bool {
	return fc.MaxBytes != 0 || fc.MaxRequests != 0 || fc.DefaultRequestTTL != nil || fc.NoEndpointRequestTTL != nil ||
		fc.DefaultPriorityBand != nil || fc.DefaultNegativePriorityBand != nil || len(fc.PriorityBands) > 0 ||
		fc.UsageLimitPolicyRef != "" || fc.EnableEviction
}

// The policies that exist without being declared.
const (
	defaultOrdering   = "fcfs-ordering-policy"
	defaultFairness   = "global-strict-fairness-policy"
	defaultUsageLimit = "static-usage-limit-policy"
)

func (c *checker) flowLimits(fc *FlowControl) {
	c.limits(fc.Pos, fc.MaxBytes, fc.MaxRequests)
	c.ttl(fc.Pos.At("defaultRequestTTL"), fc.DefaultRequestTTL)
	c.ttl(fc.Pos.At("noEndpointRequestTTL"), fc.NoEndpointRequestTTL)
	c.policy(fc.Pos.At("usageLimitPolicyPluginRef"), fc.UsageLimitPolicyRef, defaultUsageLimit)
	for _, band := range []*BandLimits{fc.DefaultPriorityBand, fc.DefaultNegativePriorityBand} {
		if band != nil {
			c.band(*band)
		}
	}
	first := make(map[int]Position, len(fc.PriorityBands))
	for _, b := range fc.PriorityBands {
		if b.Pos.node == nil {
			continue
		}
		if f, twice := first[b.Priority]; twice {
			c.report(b.Pos.At("priority"), "keep one of them", "duplicate priority %d, first in line %d", b.Priority, f.Line)
		} else {
			first[b.Priority] = b.Pos
		}
		c.band(BandLimits{b.MaxBytes, b.MaxRequests, b.FairnessPolicyRef, b.OrderingPolicyRef, b.Pos})
	}
}

func (c *checker) band(b BandLimits) {
	c.limits(b.Pos, b.MaxBytes, b.MaxRequests)
	c.policy(b.Pos.At("fairnessPolicyRef"), b.FairnessPolicyRef, defaultFairness)
	c.policy(b.Pos.At("orderingPolicyRef"), b.OrderingPolicyRef, defaultOrdering)
}

func (c *checker) limits(at Position, bytes, requests Quantity) {
	if bytes < 0 {
		c.report(at.At("maxBytes"), "write 0 for no limit", "the limit %d is negative", bytes)
	}
	if requests < 0 {
		c.report(at.At("maxRequests"), "write 0 for no limit", "the limit %d is negative", requests)
	}
}

func (c *checker) ttl(at Position, ttl *time.Duration) {
	if ttl != nil && *ttl < 0 {
		c.report(at, "write 0s for no limit", "the duration %v is negative", *ttl)
	}
}

// policy checks a reference to a policy, which is declared or one that always exists.
func (c *checker) policy(at Position, ref, always string) {
	if ref != "" && ref != always && !slices.Contains(c.names, ref) {
		c.report(at, Suggest(ref, "declared plugins", append(slices.Clone(c.names), always)), "no plugin is named %s", quote(ref))
	}
}
