package scrape

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kvgate/configs"
)

// sketch renders what tests look at.
func (p *Plan) sketch() string {
	source := func(s *httpSource) string {
		if s == nil {
			return "nobody"
		}
		text := fmt.Sprintf("%s:%s%s", s.scheme, s.port, s.path)
		if s.interval > 0 {
			text += " every " + s.interval.String()
		}
		if s.tls != nil {
			text += fmt.Sprintf(" tls insecure=%v certificates=%d", s.tls.InsecureSkipVerify, len(s.tls.Certificates))
		}
		return text
	}
	text := "metrics " + source(p.metrics) + "; models " + source(&p.models) + "; engines"
	for _, e := range p.engines {
		text += " " + e.name
	}
	text += " by "
	if len(p.engineKeys) > 0 {
		text += p.engineKeys[0]
	} else {
		text += "nothing"
	}
	if p.discovery != nil {
		text += fmt.Sprintf("; file %s watch=%v", p.discovery.path, p.discovery.watch)
		if p.discovery.clusters {
			text += " clusters"
		}
	}
	return text
}

func TestPlan(t *testing.T) {
	const (
		engines = "; engines vllm sglang trtllm-serve triton-tensorrt-llm triton by llm-d.ai/engine-type"
		models  = "; models :/v1/models"
		plain   = "metrics :/metrics" + models + engines
	)
	f := func(t *testing.T, yaml, want string, warnings ...string) {
		t.Helper()
		p, err := planFor(t, yaml, configs.DefaultSettings().Scrape)
		if err != nil {
			t.Errorf("%s\ngot %v, want %s", yaml, err, want)
			return
		}
		if got := p.sketch(); got != want {
			t.Errorf("%s\ngot  %s\nwant %s", yaml, got, want)
		}
		if len(p.Warnings) != len(warnings) {
			t.Fatalf("%s\ngot warnings %q, want %q", yaml, p.Warnings, warnings)
		}
		for i, w := range warnings {
			if !strings.Contains(p.Warnings[i], w) {
				t.Errorf("%s\ngot warning %q, want %q in it", yaml, p.Warnings[i], w)
			}
		}
	}
	f(t, "", plain)
	f(t, "plugins: []\n", plain)
	f(t, "dataLayer: {}\n", plain)
	f(t, "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]}\n", plain)
	f(t, "dataLayer: {sources: [{pluginRef: metrics-data-source}]}\n", plain)
	f(t, "dataLayer: {sources: [{pluginRef: models-data-source, extractors: [{pluginRef: models-data-extractor}]}]}\n", plain)
	f(t, "dataLayer: {injectDefaults: false, sources: [{pluginRef: metrics-data-source}]}\n", plain)
	f(t, "dataLayer: {injectDefaults: false}\n", "metrics nobody"+models+engines, "epp.yaml:3:29: dataLayer.injectDefaults: nobody scrapes the replicas")
	f(t, "dataLayer: {injectDefaults: false, sources: [{pluginRef: models-data-source}]}\n", "metrics nobody"+models+engines, "nobody scrapes")
	f(t, "plugins:\n- type: endpoint-notification-source\n- type: queue-scorer\ndataLayer: {sources: [{pluginRef: endpoint-notification-source, extractors: [{pluginRef: queue-scorer}]}]}\n", plain)
	f(t, "plugins: [{type: endpoint-notification-source}]\n", plain)
	f(t, "plugins:\n- type: metrics-data-source\n  parameters: {scheme: http, path: /metrics, insecureSkipVerify: true}\n", "metrics http:/metrics"+models+engines)
	f(t, "plugins:\n- type: metrics-data-source\n  parameters: {scheme: https, path: /m, port: 9000, insecureSkipVerify: true, interval: 100ms}\n",
		"metrics https:9000/m every 100ms tls insecure=true certificates=0"+models+engines)
	f(t, "plugins:\n- name: mine\n  type: metrics-data-source\n  parameters: {port: 1}\n", "metrics :1/metrics"+models+engines)
	f(t, "plugins:\n- name: mine\n  type: metrics-data-source\n  parameters: {port: 1}\ndataLayer: {sources: [{pluginRef: mine}]}\n", "metrics :1/metrics"+models+engines)
	f(t, "plugins:\n- type: models-data-source\n  parameters: {path: /models, interval: 1m}\n", "metrics :/metrics; models :/models every 1m0s"+engines)
	f(t, "plugins:\n- {type: file-discovery, parameters: {path: /etc/e.yaml}}\n", plain+"; file /etc/e.yaml watch=false")
	f(t, "plugins:\n- {name: d, type: file-discovery, parameters: {path: e.yaml, watchFile: true}}\ndataLayer: {discovery: {pluginRef: d}}\n", plain+"; file e.yaml watch=true")
	f(t, `plugins:
- name: x
  type: core-metrics-extractor
  parameters:
    engineLabelKey: my/engine
    defaultEngine: sglang
    engineConfigs:
    - {name: mine, queuedRequestsSpec: q}
    - {name: vllm, cacheInfoSpec: c, cacheBlockSizeLabelName: bs}
dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: x}]}]}
`, "metrics :/metrics"+models+"; engines sglang mine vllm trtllm-serve triton-tensorrt-llm triton by my/engine")
}

func TestPlanRefuses(t *testing.T) {
	_, certFile, keyFile := selfSigned(t)
	f := func(t *testing.T, yaml string, want ...string) {
		t.Helper()
		p, err := planFor(t, yaml, configs.DefaultSettings().Scrape)
		if err == nil {
			t.Errorf("%s\ngot %s, want an error with %q", yaml, p.sketch(), want)
			return
		}
		if got := len(strings.Split(err.Error(), "\n")); got != len(want) {
			t.Errorf("%s\ngot %d problems\n%v\nwant %d", yaml, got, err, len(want))
		}
		for _, part := range want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s\ngot\n%v\nwant %q in it", yaml, err, part)
			}
		}
	}
	metrics := func(params string) string {
		return "plugins:\n- type: metrics-data-source\n  parameters: {" + params + "}\n"
	}
	f(t, metrics("pathh: /m"), "epp.yaml:5:16: plugins[0].parameters.pathh: unknown field (did you mean `path`?)")
	f(t, metrics("path: m"), `parameters.path: "m" is no path (write a path such as /metrics)`)
	f(t, metrics(`path: "/m x"`), "is no path")
	f(t, metrics(`path: "/m\r\nX: y"`), "is no path")
	f(t, metrics("scheme: htttp"), "parameters.scheme: \"htttp\" is no scheme (did you mean `http`?)")
	f(t, metrics("port: 0"), "parameters.port: 0 is no port (write a number from 1 to 65535)")
	f(t, metrics("port: 65536"), "65536 is no port")
	f(t, metrics(`port: "80"`), "parameters.port")
	f(t, metrics("interval: 60s"), "parameters.interval: the interval 1m0s is longer than scrape.staleness 2s")
	f(t, metrics("interval: 0s"), "the interval 0s is too short (write at least 10ms)")
	f(t, metrics("interval: -1s"), "is too short")
	f(t, metrics("interval: 50"), "parameters.interval")
	f(t, metrics("scheme: https, caCertPath: /nope"), "parameters.caCertPath: open /nope")
	f(t, metrics("scheme: https, caCertPath: "+keyFile), "holds no PEM certificate")
	f(t, metrics("scheme: https, insecureSkipVerify: true, caCertPath: "+certFile), "parameters.caCertPath: has no effect: certificates are not verified")
	f(t, metrics("scheme: http, caCertPath: "+certFile), "parameters.scheme: certificates have no effect with http")
	f(t, metrics("clientCertPath: "+certFile), "parameters.clientCertPath: a certificate without its key (set clientKeyPath too)")
	f(t, metrics("clientKeyPath: "+keyFile), "parameters.clientKeyPath: a key without its certificate (set clientCertPath too)")
	f(t, metrics("clientCertPath: "+keyFile+", clientKeyPath: "+certFile), "parameters.clientCertPath")
	f(t, "plugins:\n- {type: models-data-source, parameters: {interval: 1ms, port: -1}}\n", "1ms is too short", "-1 is no port")
	f(t, "plugins:\n- {type: models-data-extractor, parameters: {x: 1}}\n", "parameters.x: unknown field")
	f(t, "plugins:\n- {type: endpoint-notification-source, parameters: {x: 1}}\n", "parameters.x: unknown field")
	f(t, "plugins:\n- {type: endpoint-notification-source, parameters: {x: 1}}\ndataLayer: {sources: [{pluginRef: endpoint-notification-source, extractors: [{pluginRef: y}]}]}\n",
		"parameters.x: unknown field", `extractors[0].pluginRef: no plugin is named "y" (declare it under plugins)`)

	f(t, "dataLayer: {sources: [{pluginRef: metrics-data-sourc}]}\n", "dataLayer.sources[0].pluginRef: no plugin is named \"metrics-data-sourc\" (did you mean `metrics-data-source`?)")
	f(t, "plugins: [{type: queue-scorer}]\ndataLayer: {sources: [{pluginRef: queue-scorer}]}\n", `"queue-scorer" is a queue-scorer (name a data source: `)
	f(t, "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: models-data-extractor}]}]}\n", "extractors[0].pluginRef: no plugin is named \"models-data-extractor\"")
	f(t, "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}, {pluginRef: core-metrics-extractor}]}]}\n", "extractors[1].pluginRef: \"core-metrics-extractor\" is a second extractor")
	f(t, "plugins: [{type: queue-scorer}]\ndataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: queue-scorer}]}]}\n", `"queue-scorer" is a queue-scorer (name an extractor: core-metrics-extractor)`)
	f(t, "dataLayer: {sources: [{pluginRef: metrics-data-source}, {pluginRef: metrics-data-source}]}\n", `sources[1].pluginRef: "metrics-data-source" is a second metrics-data-source`)
	two := "plugins:\n- {name: a, type: metrics-data-source}\n- {name: b, type: metrics-data-source}\n"
	f(t, two, `plugins[1]: "b" is a second metrics-data-source, beside "a" (keep one of them)`)
	f(t, two+"dataLayer: {sources: [{pluginRef: a}, {pluginRef: b}]}\n", `sources[1].pluginRef: "b" is a second metrics-data-source`)
	f(t, two+"dataLayer: {sources: [{pluginRef: b}]}\n", `plugins[0]: "a" has no effect: "b" is the metrics-data-source in use`)
	f(t, "plugins:\n- {name: a, type: core-metrics-extractor}\n- {name: b, type: core-metrics-extractor}\n", `"b" is a second core-metrics-extractor`)
	f(t, "plugins: [{name: a, type: metrics-data-source}]\ndataLayer: {injectDefaults: false}\n", `plugins[0]: "a" is bound to nothing (name it under dataLayer.sources`)

	f(t, "plugins: [{type: file-discovery}]\n", "plugins[0].parameters.path: missing (write the path of a file of endpoints)")
	f(t, "plugins: [{type: file-discovery, parameters: {path: x, watch: true}}]\n", "parameters.watch: unknown field (known fields: path, watchFile)")
	f(t, "plugins:\n- {type: file-discovery, parameters: {path: x}}\n- {name: b, type: file-discovery, parameters: {path: y}}\n", `"b" is a second file-discovery`)
	f(t, "plugins: [{type: file-discovery, parameters: {path: x}}]\ndataLayer: {discovery: {pluginRef: file-discover}}\n", "dataLayer.discovery.pluginRef: no plugin is named \"file-discover\" (did you mean `file-discovery`?)")
	f(t, "plugins: [{type: queue-scorer}]\ndataLayer: {discovery: {pluginRef: queue-scorer}}\n", "(name a discovery plugin: file-discovery, multicluster-file-discovery)")

	engine := func(fields string) string {
		return "plugins:\n- type: core-metrics-extractor\n  parameters: {engineConfigs: [{" + fields + "}]}\n"
	}
	f(t, engine("name: x, queuedRequestsSpec: 'm{a=b'"), "engineConfigs[0].queuedRequestsSpec: the closing brace is missing (write name or name{label=value,...})")
	f(t, engine("name: x, queuedRequestsSpec: 'ma=b}', runningRequestsSpec: 'm{a}', kvUsageSpec: 'm{=b}', loraSpec: 'm{a=}', cacheInfoSpec: 'm} x', cacheBlockSizeSpec: '{a=b}', cacheNumBlocksSpec: 'm{a=b}c'"),
		"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "loraSpec", "cacheInfoSpec", "cacheBlockSizeSpec", "cacheNumBlocksSpec")
	f(t, engine("name: x"), `engineConfigs[0]: the engine "x" reads nothing (write at least queuedRequestsSpec)`)
	f(t, engine("queuedRequestsSpec: m"), `engineConfigs[0].name: "" is no name for an engine`)
	f(t, engine("name: default, queuedRequestsSpec: m"), `"default" is no name for an engine`)
	f(t, engine("name: x, queuedRequestsSpec: m}, {name: x, queuedRequestsSpec: m"), `engineConfigs[1].name: duplicate engine "x"`)
	f(t, engine("name: x, queuedRequestsSpec: m, customMetrics: [{attributeKey: a, metricSpec: b}]"), "customMetrics is llm-d's, but kvgate does not have it yet")
	f(t, engine("name: x, queuedRequestsSpec: m, cacheBlockSizeLabelName: a, cacheNumBlocksLabelName: b"), "cacheBlockSizeLabelName: has no effect without cacheInfoSpec", "cacheNumBlocksLabelName: has no effect")
	f(t, engine("name: x, queueSpec: m"), "engineConfigs[0].queueSpec: unknown field")
	f(t, "plugins:\n- {type: core-metrics-extractor, parameters: {defaultEngine: vlm}}\n", "parameters.defaultEngine: unknown engine \"vlm\" (did you mean `vllm`?)")
	f(t, metrics("port: 0")+"- {type: file-discovery}\n", "is no port", "parameters.path: missing")
}

func TestPlanWithoutStaleness(t *testing.T) {
	if _, err := planFor(t, "plugins:\n- {type: metrics-data-source, parameters: {interval: 60s}}\n", configs.Scrape{Staleness: 2 * time.Minute}); err != nil {
		t.Errorf("got %v, want success", err)
	}
}
