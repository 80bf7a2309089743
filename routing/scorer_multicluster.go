package routing

import "math"

// The plugins that route over clusters, each of which is fronted by a gateway of its
// own: the endpoints are those gateways, and what is scraped are the averages over
// a cluster's replicas.

const (
	clusterProducer  = "multicluster-approx-prefix-cache-producer"
	clusterScorer    = "multicluster-prefix-cache-scorer"
	clusterExtractor = "multicluster-metrics-extractor"
)

// clusterQueueScorer prefers clusters with short queues: min-max over the average
// queue. A cluster that does not tell has no score, see scoreStale for one that did.
type clusterQueueScorer struct{}

func newClusterQueueScorer(b *builder) (any, error) { return clusterQueueScorer{}, b.clusterMetrics() }

func (clusterQueueScorer) Score(_ *Request, c []Candidate, out []float64) {
	for i := range c {
		out[i] = c[i].Waiting
	}
	minMax(out, 0)
	scoreStale(c, out, func(m *Metrics) float64 { return m.Waiting })
}

// clusterKVScorer prefers clusters with free KV cache: 1 - average usage, likewise.
type clusterKVScorer struct{}

func newClusterKVScorer(b *builder) (any, error) { return clusterKVScorer{}, b.clusterMetrics() }

func (clusterKVScorer) Score(_ *Request, c []Candidate, out []float64) {
	for i := range c {
		out[i] = 1 - c[i].KVUsage
	}
	scoreStale(c, out, func(m *Metrics) float64 { return m.KVUsage })
}

// scoreStale gives the mean of the others to a cluster whose value was told and is
// stale: it loses no conversation because its metrics could not be read for a moment.
func scoreStale(c []Candidate, out []float64, told func(*Metrics) float64) {
	sum, n := 0.0, 0
	for _, v := range out {
		if !math.IsNaN(v) {
			sum += v
			n++
		}
	}
	if n == 0 || n == len(out) {
		return
	}
	for i, v := range out {
		if !math.IsNaN(v) {
			continue
		}
		if o := c[i].Endpoint.Observation(); o != nil && !math.IsNaN(told(&o.Metrics)) {
			out[i] = sum / float64(n)
		}
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
