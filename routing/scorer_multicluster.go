package routing

// The plugins that route over clusters, each of which is fronted by a gateway of its
// own: the endpoints are those gateways, and what is scraped are the averages over
// a cluster's replicas.

const (
	clusterProducer  = "multicluster-approx-prefix-cache-producer"
	clusterScorer    = "multicluster-prefix-cache-scorer"
	clusterExtractor = "multicluster-metrics-extractor"
)

// clusterQueueScorer prefers clusters with short queues: min-max over the average
// queue. A cluster that does not tell has no score.
type clusterQueueScorer struct{}

func newClusterQueueScorer(b *builder) (any, error) { return clusterQueueScorer{}, b.clusterMetrics() }

func (clusterQueueScorer) Score(_ *Request, c []Candidate, out []float64) {
	for i := range c {
		out[i] = c[i].Waiting
	}
	minMax(out, 0)
}

// clusterKVScorer prefers clusters with free KV cache: 1 - average usage. A
// cluster that does not tell has no score.
type clusterKVScorer struct{}

func newClusterKVScorer(b *builder) (any, error) { return clusterKVScorer{}, b.clusterMetrics() }

func (clusterKVScorer) Score(_ *Request, c []Candidate, out []float64) {
	for i := range c {
		out[i] = 1 - c[i].KVUsage
	}
}

// clusterMetrics refuses parameters, and a configuration in which nobody reads a cluster's averages.
func (b *builder) clusterMetrics() error {
	if err := b.noParams(); err != nil {
		return err
	}
	for _, s := range b.specs {
		if s.Type == clusterExtractor {
			return nil
		}
	}
	return b.problem("declare a "+clusterExtractor+" and name it in dataLayer.sources under a multicluster-metrics-data-source", "nobody reads the metrics of clusters")
}
