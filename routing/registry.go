package routing

// plugin is one row of the registry: adding a plugin is a file and a line here.
// A factory returns a value that fills the slots whose interfaces it implements.
type plugin struct {
	name string
	make func(b *builder) (any, error)
}

var registry = []plugin{
	{"queue-scorer", newQueueScorer},
	{"kv-cache-utilization-scorer", newKVScorer},
	{"running-requests-size-scorer", newRunningScorer},
	{"prefix-cache-scorer", newPrefixScorer},
	{"expected-cost-scorer", newCostScorer},
	{"lmetric-scorer", newLMetricScorer},
	{"least-request-scorer", newLeastRequestScorer},
	{"consistent-hash-scorer", newHashScorer},
	{"session-affinity-scorer", newSessionScorer},
	{"session-affinity-filter", newSessionFilter},
	{"multicluster-queue-scorer", newClusterQueueScorer},
	{"multicluster-kv-cache-utilization-scorer", newClusterKVScorer},
	{clusterScorer, newPrefixScorer},
	{"multicluster-session-affinity-filter", newSessionFilter},
	{clusterProducer, newApproxProducer},
	{"max-score-picker", newMaxScorePicker},
	{"random-picker", newRandomPicker},
	{"weighted-random-picker", newWeightedRandomPicker},
	{"round-robin-picker", newRoundRobinPicker},
	{"approx-prefix-cache-producer", newApproxProducer},
	{preciseProducerType, newPreciseProducer},
	{preciseScorerType, newPreciseScorer},
	{"burst-prefix-cache-producer", newBurstProducer},
	{"token-producer", newTokenProducer},
}

// structural are llm-d's types for jobs that kvgate does itself. They may be
// declared. Those with scrape true are read by the scrape package.
var structural = []struct {
	name, job string
	scrape    bool
}{
	{"single-profile-handler", "runs the one profile", false},
	{"openai-parser", "parses OpenAI bodies", false},
	{"anthropic-parser", "parses Anthropic bodies", false},
	{"vllmhttp-parser", "parses /inference/v1/generate", false},
	{"passthrough-parser", "lets unparsed bodies through on load alone", false},
	{"metrics-data-source", "scrapes the replicas", true},
	{"core-metrics-extractor", "reads the scraped page", true},
	{"models-data-source", "reads the model lists", true},
	{"models-data-extractor", "reads the model lists", true},
	{"endpoint-notification-source", "tells of endpoints that come and go", true},
	{"file-discovery", "reads endpoints from a file", true},
	{"multicluster-metrics-data-source", "scrapes the gateways of clusters", true},
	{clusterExtractor, "reads a cluster's averages", true},
	{"multicluster-file-discovery", "reads clusters from a file", true},
	{"utilization-detector", "measures saturation (kvgate has no admission queue yet: it decides nothing)", false},
	{"fcfs-ordering-policy", "orders an admission queue (kvgate has none yet)", false},
	{"global-strict-fairness-policy", "orders an admission queue (kvgate has none yet)", false},
	{"static-usage-limit-policy", "limits an admission queue (kvgate has none yet)", false},
}

// deprecated maps llm-d's old names to today's.
var deprecated = []struct{ old, now string }{
	{"tokenizer", "token-producer"},
}

// notYet are llm-d plugin types that kvgate does not have: refused by name.
var notYet = []string{
	"active-request-scorer", "agent-identity", "always-disagg-multimodal-decider", "always-disagg-pd-decider",
	"by-label", "by-label-selector", "concurrency-detector", "context-length-aware",
	"data-parallel-profile-handler", "dcgm-data-source", "dcgm-extractor", "decode-filter", "destination-endpoint-served-verifier",
	"disagg-headers-handler", "disagg-profile-handler", "disaggregatedset-rollout-screener", "edf-ordering-policy",
	"encode-filter", "endpoint-attribute-filter", "endpoint-attribute-scorer", "header-based-testing-filter",
	"header-label-affinity-scorer", "header-profile-handler", "inflight-load-producer", "k8s-notification-source",
	"label-selector-filter", "latency-scorer", "latency-slo-admitter", "load-aware-scorer", "lora-affinity-scorer",
	"mm-embeddings-cache-producer", "mm-embeddings-cache-scorer", "no-hit-lru-scorer", "p2p-source-producer", "pd-profile-handler",
	"predicted-latency-producer", "prefill-filter",
	"prefill-header-handler", "prefix-based-pd-decider", "prefix-cache-affinity-filter", "priority-holdback-policy",
	"priority-then-time-eviction-order-policy", "probabilistic-admitter", "program-aware-fairness",
	"request-attribute-reporter", "round-robin-fairness-policy",
	"session-id-producer", "sglanghttp-parser", "sheddable-eviction-filter", "slo-deadline-ordering-policy",
	"slo-headroom-tier-filter", "soft-reflective-ceiling-policy", "token-load-scorer", "topology-affinity-filter",
	"topology-affinity-scorer", "topology-extractor", "utilization-filter", "vertexai-parser", "vllmgrpc-parser",
}
