package configs

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// head starts a well-formed document; what follows it stands in line 3.
const head = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"

func TestParseSchedulingErrors(t *testing.T) {
	f := func(name, in, want string) {
		t.Run(name, func(t *testing.T) {
			t.Helper()
			s, err := ParseScheduling("f.yaml", []byte(in))
			if err == nil {
				t.Fatalf("got no error, want %s", want)
			}
			if got := err.Error(); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if s != nil {
				t.Errorf("got a value beside the error: %+v, want nil", s)
			}
		})
	}
	profile := func(entry string) string {
		return head + "plugins:\n- type: queue-scorer\nschedulingProfiles:\n- name: p\n  plugins:\n  - " + entry + "\n"
	}

	// The envelope.
	f("no apiVersion and kind", "plugins: []\n",
		"f.yaml:1:1: apiVersion: missing (write apiVersion: llm-d.ai/v1alpha1)\nf.yaml:1:1: kind: missing (write kind: EndpointPickerConfig)")
	f("unknown group", "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n",
		`f.yaml:1:13: apiVersion: unknown group or version "llm-d.ai/v1" (write llm-d.ai/v1alpha1)`)
	f("unknown kind", "apiVersion: llm-d.ai/v1alpha1\nkind: InferencePool\n",
		`f.yaml:2:7: kind: unknown kind "InferencePool" (write EndpointPickerConfig)`)
	f("a list", "- a\n",
		"f.yaml:1:1: wants an object, got a list (fields: apiVersion, kind, featureGates, plugins, schedulingProfiles, dataLayer, flowControl, requestHandler, saturationDetector, parser)")
	f("a scalar", "queue-scorer\n",
		`f.yaml:1:1: wants an object, got the string "queue-scorer" (fields: apiVersion, kind, featureGates, plugins, schedulingProfiles, dataLayer, flowControl, requestHandler, saturationDetector, parser)`)
	f("unknown field", head+"schedulingProfile: []\n",
		"f.yaml:3:1: schedulingProfile: unknown field (did you mean `schedulingProfiles`?)")
	f("wrong case", head+"Plugins: []\n",
		"f.yaml:3:1: Plugins: unknown field (did you mean `plugins`?)")
	f("duplicate key", head+"plugins: []\nplugins: []\n",
		"f.yaml:4:1: plugins: set twice, first in line 3 (keep one of them)")
	f("two documents", head+"---\n"+head,
		"f.yaml:3:1: a second document (keep one document per file)")

	// Plugins.
	f("plugins as strings", head+"plugins: [queue-scorer]\n",
		`f.yaml:3:11: plugins[0]: wants an object, got the string "queue-scorer" (fields: name, type, parameters)`)
	f("plugins as an object", head+"plugins: {type: queue-scorer}\n",
		"f.yaml:3:10: plugins: wants a list, got an object")
	f("plugins as a string", head+"plugins: queue-scorer\n",
		`f.yaml:3:10: plugins: wants a list, got the string "queue-scorer" (write [queue-scorer])`)
	f("empty item", head+"plugins:\n-\n- type: a\n",
		"f.yaml:4:2: plugins[0]: an empty list item (remove it)")
	f("missing type", head+"plugins:\n- name: a\n",
		"f.yaml:4:3: plugins[0].type: missing (write the type of the plugin)")
	f("type of a wrong type is reported once", head+"plugins:\n- type: 5\n",
		"f.yaml:4:9: plugins[0].type: wants a string, got the number 5 (put it in quotes)")
	f("duplicate name", head+"plugins:\n- type: a\n- name: a\n  type: b\n",
		`f.yaml:5:9: plugins[1].name: duplicate plugin name "a", first in line 4 (give each instance a name of its own)`)
	f("duplicate type without names", head+"plugins:\n- type: a\n- type: a\n",
		`f.yaml:5:9: plugins[1].type: duplicate plugin name "a", first in line 4 (give each instance a name of its own)`)

	// Profiles.
	f("empty profile", head+"schedulingProfiles: [~]\n", "f.yaml:3:22: schedulingProfiles[0]: an empty list item (remove it)")
	f("empty entry", head+"schedulingProfiles: [{name: p, plugins: [~]}]\n", "f.yaml:3:42: schedulingProfiles[0].plugins[0]: an empty list item (remove it)")
	f("nameless profile", head+"plugins:\n- type: a\nschedulingProfiles:\n- plugins:\n  - pluginRef: a\n",
		"f.yaml:6:3: schedulingProfiles[0].name: missing (write the name of the profile)")
	f("empty profile name", head+"plugins:\n- type: a\nschedulingProfiles:\n- name: ''\n  plugins: []\n",
		"f.yaml:6:9: schedulingProfiles[0].name: missing (write the name of the profile)")
	f("duplicate profile name", head+"schedulingProfiles:\n- name: p\n- name: p\n",
		`f.yaml:5:9: schedulingProfiles[1].name: duplicate profile name "p", first in line 4 (give each profile a name of its own)`)
	f("entry without pluginRef", profile("weight: 1"),
		"f.yaml:8:5: schedulingProfiles[0].plugins[0].pluginRef: missing (write the name of a plugin from plugins)")
	f("misspelt pluginRef key", profile("pluginref: queue-scorer"),
		"f.yaml:8:5: schedulingProfiles[0].plugins[0].pluginref: unknown field (did you mean `pluginRef`?)\n"+
			"f.yaml:8:5: schedulingProfiles[0].plugins[0].pluginRef: missing (write the name of a plugin from plugins)")
	f("undefined pluginRef, near", profile("pluginRef: queue-score"),
		"f.yaml:8:16: schedulingProfiles[0].plugins[0].pluginRef: no plugin is named \"queue-score\" (did you mean `queue-scorer`?)")
	f("undefined pluginRef, far", profile("pluginRef: random-picker"),
		`f.yaml:8:16: schedulingProfiles[0].plugins[0].pluginRef: no plugin is named "random-picker" (declared plugins: queue-scorer)`)
	f("no plugin at all", head+"schedulingProfiles: [{name: p, plugins: [{pluginRef: a}]}]\n",
		`f.yaml:3:54: schedulingProfiles[0].plugins[0].pluginRef: no plugin is named "a" (declared plugins: none)`)
	f("negative weight", profile("{pluginRef: queue-scorer, weight: -0.5}"),
		"f.yaml:8:39: schedulingProfiles[0].plugins[0].weight: the weight -0.5 is negative (write a number of at least 0)")
	f("weight .inf", profile("{pluginRef: queue-scorer, weight: .inf}"),
		"f.yaml:8:39: schedulingProfiles[0].plugins[0].weight: wants a finite number, got the number .inf")
	f("weight .nan", profile("{pluginRef: queue-scorer, weight: .NaN}"),
		"f.yaml:8:39: schedulingProfiles[0].plugins[0].weight: wants a finite number, got the number .NaN")
	f("weight NaN", profile("{pluginRef: queue-scorer, weight: NaN}"),
		`f.yaml:8:39: schedulingProfiles[0].plugins[0].weight: wants a number, got the string "NaN"`)
	f("weight 1e999", profile("{pluginRef: queue-scorer, weight: 1e999}"),
		`f.yaml:8:39: schedulingProfiles[0].plugins[0].weight: wants a number, got the string "1e999"`)
	f("weight in quotes", profile("{pluginRef: queue-scorer, weight: '2'}"),
		`f.yaml:8:39: schedulingProfiles[0].plugins[0].weight: wants a number, got the string "2" (write 2 without quotes)`)
	f("typo in weight", profile("{pluginRef: queue-scorer, wieght: 2}"),
		"f.yaml:8:31: schedulingProfiles[0].plugins[0].wieght: unknown field (did you mean `weight`?)")

	// Feature gates.
	f("unknown gate", head+"featureGates: [dataLayer]\n",
		`f.yaml:3:16: featureGates[0]: unknown feature gate "dataLayer" (known gates: flowControl, haPopulateNonLeaderDatastore)`)
	f("gate in the wrong case", head+"featureGates: [flowcontrol]\n",
		"f.yaml:3:16: featureGates[0]: unknown feature gate \"flowcontrol\" (did you mean `flowControl`?)")
	f("gate without a bool", head+"featureGates: [flowControl=qwerty]\n",
		`f.yaml:3:16: featureGates[0]: feature gate "flowControl" has the value "qwerty" (write flowControl=true or flowControl=false)`)
	f("flowControl", head+"featureGates: [flowControl]\n",
		"f.yaml:3:16: featureGates[0]: feature gate flowControl=true is not supported yet (remove the gate)")
	f("flowControl=true", head+"featureGates: ['flowControl= TRUE']\n",
		"f.yaml:3:16: featureGates[0]: feature gate flowControl=true is not supported yet (remove the gate)")
	f("contradictory gates", head+"featureGates: [flowControl=false, flowControl=true]\n",
		"f.yaml:3:35: featureGates[1]: feature gate flowControl is set twice (keep one of them)")
	f("empty gate", head+"featureGates: [~]\n",
		"f.yaml:3:16: featureGates[0]: an empty list item (remove it)")

	// The data layer.
	f("extractors as strings", head+"dataLayer: {sources: [{pluginRef: m, extractors: [core-metrics-extractor]}]}\n",
		`f.yaml:3:51: dataLayer.sources[0].extractors[0]: wants an object, got the string "core-metrics-extractor" (fields: pluginRef)`)
	f("source without pluginRef", head+"dataLayer: {sources: [{extractors: [{}]}]}\n",
		"f.yaml:3:23: dataLayer.sources[0].pluginRef: missing (write the name of a plugin from plugins)\n"+
			"f.yaml:3:37: dataLayer.sources[0].extractors[0].pluginRef: missing (write the name of a plugin from plugins)")
	f("discovery without pluginRef", head+"dataLayer: {discovery: {}}\n",
		"f.yaml:3:24: dataLayer.discovery.pluginRef: missing (write the name of a plugin from plugins)")
	f("injectDefaults in quotes", head+"dataLayer: {injectDefaults: \"false\"}\n",
		`f.yaml:3:29: dataLayer.injectDefaults: wants true or false, got the string "false"`)
	f("what kvgate has no use for", head+"dataLayer:\n  peerDiscovery: {pluginRef: p}\n  crossReplicaSyncerPluginRef: q\n  crossReplicaSyncInterval: 200ms\n",
		"f.yaml:4:18: dataLayer.peerDiscovery: not supported: kvgate shares no state between gateways (remove it)\n"+
			"f.yaml:5:32: dataLayer.crossReplicaSyncerPluginRef: not supported: kvgate shares no state between gateways (remove it)\n"+
			"f.yaml:6:29: dataLayer.crossReplicaSyncInterval: not supported: kvgate shares no state between gateways (remove it)")
	f("parser without pluginRef", head+"requestHandler: {parsers: [{}]}\n",
		"f.yaml:3:28: requestHandler.parsers[0].pluginRef: missing (write the name of a plugin from plugins)")
	f("requestHandler.parser", head+"requestHandler: {parser: {pluginRef: a}}\n",
		"f.yaml:3:18: requestHandler.parser: unknown field (did you mean `parsers`?)")

	// Flow control, with its gate off.
	f("negative limits", head+"flowControl:\n  maxBytes: -1\n  maxRequests: \"-1k\"\n  defaultRequestTTL: -1s\n  noEndpointRequestTTL: -2s\n",
		"f.yaml:4:13: flowControl.maxBytes: the limit -1 is negative (write 0 for no limit)\n"+
			"f.yaml:5:16: flowControl.maxRequests: the limit -1000 is negative (write 0 for no limit)\n"+
			"f.yaml:6:22: flowControl.defaultRequestTTL: the duration -1s is negative (write 0s for no limit)\n"+
			"f.yaml:7:25: flowControl.noEndpointRequestTTL: the duration -2s is negative (write 0s for no limit)")
	f("no quantity", head+"flowControl: {maxBytes: 1GB}\n",
		`f.yaml:3:25: flowControl.maxBytes: "1GB" is no quantity: write a number, or one with a suffix such as k, M, Mi or Gi`)
	f("no duration", head+"flowControl: {defaultRequestTTL: 60}\n",
		`f.yaml:3:34: flowControl.defaultRequestTTL: wants a duration, got the number 60 (a number with a unit, such as "200ms", "60s" or "1h30m")`)
	f("duplicate priority", head+"flowControl:\n  priorityBands:\n  - priority: 1\n  - priority: 1\n    maxBytes: -5\n",
		"f.yaml:6:15: flowControl.priorityBands[1].priority: duplicate priority 1, first in line 5 (keep one of them)\n"+
			"f.yaml:7:15: flowControl.priorityBands[1].maxBytes: the limit -5 is negative (write 0 for no limit)")
	f("a template band has no priority", head+"flowControl: {defaultPriorityBand: {priority: 1}}\n",
		"f.yaml:3:37: flowControl.defaultPriorityBand.priority: unknown field (known fields: maxBytes, maxRequests, fairnessPolicyRef, orderingPolicyRef)")
	f("undeclared policies", head+"flowControl:\n  usageLimitPolicyPluginRef: static\n  defaultPriorityBand: {orderingPolicyRef: fcfs-ordering-polic}\n  defaultNegativePriorityBand: {fairnessPolicyRef: fair}\n",
		"f.yaml:4:30: flowControl.usageLimitPolicyPluginRef: no plugin is named \"static\" (declared plugins: static-usage-limit-policy)\n"+
			"f.yaml:5:44: flowControl.defaultPriorityBand.orderingPolicyRef: no plugin is named \"fcfs-ordering-polic\" (did you mean `fcfs-ordering-policy`?)\n"+
			"f.yaml:6:52: flowControl.defaultNegativePriorityBand.fairnessPolicyRef: no plugin is named \"fair\" (declared plugins: global-strict-fairness-policy)")
	f("detector without pluginRef", head+"flowControl: {saturationDetector: {}}\n",
		"f.yaml:3:35: flowControl.saturationDetector.pluginRef: missing (write the name of a plugin from plugins)")
	f("band that is null", head+"flowControl: {priorityBands: [~]}\n",
		"f.yaml:3:31: flowControl.priorityBands[0]: an empty list item (remove it)")

	// All at once, by place.
	f("everything", "apiVersion: v1\nkind: EndpointPickerConfig\nplugin: []\nplugins:\n- name: a\nschedulingProfiles:\n- plugins:\n  - pluginRef: b\n    weight: x\n",
		"f.yaml:1:13: apiVersion: unknown group or version \"v1\" (write llm-d.ai/v1alpha1)\n"+
			"f.yaml:3:1: plugin: unknown field (did you mean `plugins`?)\n"+
			"f.yaml:5:3: plugins[0].type: missing (write the type of the plugin)\n"+
			"f.yaml:7:3: schedulingProfiles[0].name: missing (write the name of the profile)\n"+
			"f.yaml:8:16: schedulingProfiles[0].plugins[0].pluginRef: no plugin is named \"b\" (declared plugins: a)\n"+
			"f.yaml:9:13: schedulingProfiles[0].plugins[0].weight: wants a number, got the string \"x\"")
	f("JSON", `{"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig",`+"\n\t"+`"plugins": [{"type": "a", "typ\u0065": "b"}]}`,
		"f.yaml:2:28: plugins[0].type: set twice, first in line 2 (keep one of them)")
}

func TestParseScheduling(t *testing.T) {
	f := func(name, in string, check func(t *testing.T, s *Scheduling), warnings ...string) {
		t.Run(name, func(t *testing.T) {
			t.Helper()
			s, err := ParseScheduling("f.yaml", []byte(in))
			if err != nil {
				t.Fatalf("got error %v, want none", err)
			}
			if got, want := strings.Join(s.Warnings, "\n"), strings.Join(warnings, "\n"); got != want {
				t.Errorf("got warnings\n%s\nwant\n%s", got, want)
			}
			check(t, s)
		})
	}
	same := func(t *testing.T, what string, got, want any) {
		t.Helper()
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %s %v, want %v", what, got, want)
		}
	}
	refs := func(list []Ref) (names []string) {
		for _, r := range list {
			names = append(names, r.Ref)
		}
		return names
	}

	f("old group", "apiVersion: inference.networking.x-k8s.io/v1alpha1\nkind: EndpointPickerConfig\n", func(t *testing.T, s *Scheduling) {
		same(t, "apiVersion", s.APIVersion, "inference.networking.x-k8s.io/v1alpha1")
		same(t, "injectDefaults", s.DataLayer.InjectDefaults, true)
		same(t, "gates", s.FeatureGates, map[string]bool{"flowControl": false, "haPopulateNonLeaderDatastore": true})
	}, "f.yaml:1:13: apiVersion: inference.networking.x-k8s.io/v1alpha1 is deprecated (write llm-d.ai/v1alpha1)")
	f("names, order, weights", head+`
plugins:
- {type: max-score-picker}
- {name: q, type: queue-scorer, parameters: {load: scraped}}
- type: kv-cache-utilization-scorer
  parameters: ~
schedulingProfiles:
- name: p
  plugins:
  - {pluginRef: max-score-picker}
  - {pluginRef: q, weight: 10}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2e1}
`, func(t *testing.T, s *Scheduling) {
		var names, listed []string
		var weights []float64
		for _, p := range s.Plugins {
			names = append(names, p.Name+"="+p.Type)
		}
		for _, p := range s.Profiles[0].Plugins {
			listed = append(listed, p.Ref)
			if p.Weight != nil {
				weights = append(weights, *p.Weight)
			}
		}
		same(t, "plugins", names, []string{"max-score-picker=max-score-picker", "q=queue-scorer", "kv-cache-utilization-scorer=kv-cache-utilization-scorer"})
		same(t, "entries", listed, []string{"max-score-picker", "q", "kv-cache-utilization-scorer"})
		same(t, "weights", weights, []float64{10, 20})
		same(t, "absent parameters", s.Plugins[0].Parameters.IsZero(), true)
		same(t, "place of absent parameters", s.Plugins[0].Parameters.Pos().String(), "f.yaml:5:3: plugins[0].parameters")
		same(t, "null parameters", s.Plugins[2].Parameters.IsZero(), true)
		same(t, "set parameters", s.Plugins[1].Parameters.IsZero(), false)
		same(t, "place", s.Plugins[1].Pos.At("type").String(), "f.yaml:6:19: plugins[1].type")
		same(t, "place", s.Plugins[1].Parameters.At("load").String(), "f.yaml:6:52: plugins[1].parameters.load")
		same(t, "place", s.Profiles[0].Pos.String(), "f.yaml:10:3: schedulingProfiles[0]")
		same(t, "place", s.Profiles[0].Plugins[1].Pos.String(), "f.yaml:13:5: schedulingProfiles[0].plugins[1]")
	})
	f("no profiles", head+"plugins: [{type: a}]\n", func(t *testing.T, s *Scheduling) {
		same(t, "profiles", len(s.Profiles), 0)
	})
	f("plugin listed twice", head+"plugins: [{type: a}]\nschedulingProfiles: [{name: p, plugins: [{pluginRef: a}, {pluginRef: a}]}]\n", func(t *testing.T, s *Scheduling) {
		same(t, "entries", len(s.Profiles[0].Plugins), 2)
	}, `f.yaml:4:70: schedulingProfiles[0].plugins[1].pluginRef: "a" is listed twice in this profile and counts twice (keep one of them)`)
	f("gates", head+"featureGates: [flowControl=false, 'haPopulateNonLeaderDatastore= False ']\n", func(t *testing.T, s *Scheduling) {
		same(t, "gates", s.FeatureGates, map[string]bool{"flowControl": false, "haPopulateNonLeaderDatastore": false})
	}, "f.yaml:3:35: featureGates[1]: feature gate haPopulateNonLeaderDatastore has no effect: kvgate elects no leader (remove it)")
	f("parsers keep their order", head+"requestHandler: {parsers: [{pluginRef: b}, {pluginRef: passthrough-parser}, {pluginRef: a}]}\n", func(t *testing.T, s *Scheduling) {
		same(t, "parsers", refs(s.Parsers), []string{"b", "passthrough-parser", "a"})
		same(t, "place", s.Parsers[1].Pos.At("pluginRef").String(), "f.yaml:3:56: requestHandler.parsers[1].pluginRef")
	})
	f("deprecated parser", head+"parser: {pluginRef: a}\n", func(t *testing.T, s *Scheduling) {
		same(t, "parsers", refs(s.Parsers), []string{"a"})
	}, "f.yaml:3:9: parser: deprecated here (write it as the only item of requestHandler.parsers)")
	f("deprecated parser beside parsers", head+"parser: {pluginRef: a}\nrequestHandler: {parsers: [{pluginRef: b}]}\n", func(t *testing.T, s *Scheduling) {
		same(t, "parsers", refs(s.Parsers), []string{"b"})
	}, "f.yaml:3:9: parser: has no effect: requestHandler.parsers is set (remove it)")
	f("deprecated detector", head+"saturationDetector: {pluginRef: d}\n", func(t *testing.T, s *Scheduling) {
		same(t, "detector", s.FlowControl.SaturationDetector.Ref, "d")
	}, "f.yaml:3:21: saturationDetector: deprecated here (move it to flowControl.saturationDetector)")
	f("deprecated detector beside the new one", head+"saturationDetector: {pluginRef: d}\nflowControl: {saturationDetector: {pluginRef: e}}\n", func(t *testing.T, s *Scheduling) {
		same(t, "detector", s.FlowControl.SaturationDetector.Ref, "e")
	}, "f.yaml:3:21: saturationDetector: has no effect: flowControl.saturationDetector is set (remove it)")
	f("empty data layer", head+"dataLayer: {}\n", func(t *testing.T, s *Scheduling) {
		same(t, "injectDefaults", s.DataLayer.InjectDefaults, true)
		same(t, "sources", len(s.DataLayer.Sources), 0)
	})
	f("data layer", head+"dataLayer:\n  injectDefaults: no\n  sources:\n  - pluginRef: m\n    extractors: [{pluginRef: x}, {pluginRef: y}]\n  discovery: {pluginRef: file-discovery}\n  peerDiscovery: ~\n", func(t *testing.T, s *Scheduling) {
		same(t, "injectDefaults", s.DataLayer.InjectDefaults, false)
		same(t, "source", s.DataLayer.Sources[0].Ref, "m")
		same(t, "extractors", refs(s.DataLayer.Sources[0].Extractors), []string{"x", "y"})
		same(t, "discovery", s.DataLayer.Discovery.Ref, "file-discovery")
		same(t, "place", s.DataLayer.Sources[0].Pos.String(), "f.yaml:6:5: dataLayer.sources[0]")
	})
	f("flow control", head+`
plugins: [{name: fair, type: round-robin-fairness-policy}]
flowControl:
  maxBytes: "1024"
  maxRequests: 1.5k
  defaultRequestTTL: 1m
  noEndpointRequestTTL: 5m
  priorityBands:
  - {priority: -1, maxBytes: 1Gi, fairnessPolicyRef: fair, orderingPolicyRef: fcfs-ordering-policy}
  - {}
`, func(t *testing.T, s *Scheduling) {
		fc := s.FlowControl
		same(t, "maxBytes", fc.MaxBytes, Quantity(1024))
		same(t, "maxRequests", fc.MaxRequests, Quantity(1500))
		same(t, "defaultRequestTTL", *fc.DefaultRequestTTL, time.Minute)
		same(t, "noEndpointRequestTTL", *fc.NoEndpointRequestTTL, 5*time.Minute)
		same(t, "bands", []int{fc.PriorityBands[0].Priority, fc.PriorityBands[1].Priority}, []int{-1, 0})
		same(t, "band bytes", fc.PriorityBands[0].MaxBytes, Quantity(1<<30))
	}, "f.yaml:6:3: flowControl: has no effect while the feature gate flowControl is off")
	f("TTL of zero", head+"flowControl: {defaultRequestTTL: 0s}\n", func(t *testing.T, s *Scheduling) {
		same(t, "defaultRequestTTL", *s.FlowControl.DefaultRequestTTL, time.Duration(0))
		same(t, "noEndpointRequestTTL", s.FlowControl.NoEndpointRequestTTL, (*time.Duration)(nil))
	}, "f.yaml:3:14: flowControl: has no effect while the feature gate flowControl is off")
	f("detector alone acts with the gate off", head+"flowControl: {saturationDetector: {pluginRef: utilization-detector}}\n", func(t *testing.T, s *Scheduling) {
		same(t, "detector", s.FlowControl.SaturationDetector.Ref, "utilization-detector")
	})
	f("eviction", head+"flowControl: {enableEviction: true}\n", func(t *testing.T, s *Scheduling) {
		same(t, "enableEviction", s.FlowControl.EnableEviction, true)
	}, "f.yaml:3:14: flowControl: has no effect while the feature gate flowControl is off")
	f("anchors and merge keys", head+`
plugins:
- &a {type: a, parameters: {x: &x 1, y: [*x, *x]}}
- {<<: *a, name: b}
- {<<: [{type: c}, *a], name: d}
`, func(t *testing.T, s *Scheduling) {
		same(t, "merged", s.Plugins[1].Name+"="+s.Plugins[1].Type, "b=a")
		same(t, "merged list", s.Plugins[2].Name+"="+s.Plugins[2].Type, "d=c")
		var p struct {
			X int   `json:"x"`
			Y []int `json:"y"`
		}
		if err := s.Plugins[2].Parameters.Decode(&p); err != nil {
			t.Errorf("got error %v, want none", err)
		}
		same(t, "aliases", p.Y, []int{1, 1})
		same(t, "place", s.Plugins[2].Parameters.At("y[1]").String(), "f.yaml:5:32: plugins[2].parameters.y[1]")
	})
	f("byte order mark", "\ufeff"+head, func(t *testing.T, s *Scheduling) {
		same(t, "apiVersion", s.APIVersion, "llm-d.ai/v1alpha1")
	})

	for name, in := range map[string]string{"empty": "", "blank": " \n\n", "comments": "# nothing\n", "null": "---\n"} {
		f(name, in, func(t *testing.T, s *Scheduling) {
			want := DefaultScheduling()
			want.File, want.Warnings = "f.yaml", s.Warnings
			same(t, "configuration", s, want)
		}, "f.yaml: the document is empty: the built-in default configuration is used")
	}
}

// plain removes the places, so that two configurations can be compared by what they say.
func plain(s *Scheduling) *Scheduling {
	s.File, s.DataLayer.Pos = "", Position{}
	for i := range s.Plugins {
		s.Plugins[i].Pos, s.Plugins[i].Parameters = Position{}, Params{}
	}
	for i := range s.Profiles {
		s.Profiles[i].Pos = Position{}
		for j := range s.Profiles[i].Plugins {
			s.Profiles[i].Plugins[j].Pos = Position{}
		}
	}
	for i := range s.DataLayer.Sources {
		s.DataLayer.Sources[i].Pos = Position{}
		for j := range s.DataLayer.Sources[i].Extractors {
			s.DataLayer.Sources[i].Extractors[j].Pos = Position{}
		}
	}
	return s
}

func TestDefaultScheduling(t *testing.T) {
	file, err := LoadScheduling("scheduling-default.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s := DefaultScheduling()
	if got, want := s.Plugins[1].Pos.String(), "built-in default: plugins[1]"; got != want {
		t.Errorf("got place %s, want %s", got, want)
	}
	if got, want := plain(s), plain(file); !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
}

func TestLoadSchedulingMissingFile(t *testing.T) {
	_, err := LoadScheduling(filepath.Join(t.TempDir(), "none.yaml"))
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want %v", err, os.ErrNotExist)
	}
}
