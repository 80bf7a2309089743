package proxy

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"

	"kvgate/routing"
)

// Averages serves the state of the fleet as one pool under the names of llm-d's
// Endpoint Picker, so that a gateway over clusters can read it. A value that no
// ready replica tells is absent.
type Averages struct {
	fleet *routing.Fleet

	usage, queue, running          *prometheus.Desc
	usageDev, queueDev, runningDev *prometheus.Desc
	ready, perEndpoint             *prometheus.Desc
}

// averagesPool is the value of the label name: kvgate serves one pool.
const averagesPool = "kvgate"

// NewAverages returns a collector to be registered while the averages are to be served.
func NewAverages(fleet *routing.Fleet) *Averages {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("llm_d_epp_"+name, help, append([]string{"name"}, labels...), nil)
	}
	return &Averages{
		fleet:       fleet,
		usage:       desc("average_kv_cache_utilization", "Mean part of the KV cache in use over the ready replicas."),
		queue:       desc("average_queue_size", "Mean number of waiting requests over the ready replicas."),
		running:     desc("average_running_requests", "Mean number of running requests over the ready replicas."),
		usageDev:    desc("std_dev_kv_cache_utilization", "Standard deviation of the part of the KV cache in use."),
		queueDev:    desc("std_dev_queue_size", "Standard deviation of the number of waiting requests."),
		runningDev:  desc("std_dev_running_requests", "Standard deviation of the number of running requests."),
		ready:       desc("ready_endpoints", "Replicas that take work."),
		perEndpoint: desc("per_endpoint_queue_size", "Waiting requests of one replica.", "model_server_endpoint"),
	}
}

// Describe implements prometheus.Collector.
func (a *Averages) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{a.usage, a.queue, a.running, a.usageDev, a.queueDev, a.runningDev, a.ready, a.perEndpoint} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (a *Averages) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		if !math.IsNaN(v) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append([]string{averagesPool}, labels...)...)
		}
	}
	v := a.fleet.Averages()
	gauge(a.usage, v.KVUsage.Mean)
	gauge(a.queue, v.Waiting.Mean)
	gauge(a.running, v.Running.Mean)
	gauge(a.usageDev, v.KVUsage.StdDev)
	gauge(a.queueDev, v.Waiting.StdDev)
	gauge(a.runningDev, v.Running.StdDev)
	gauge(a.ready, float64(v.Ready))
	for _, e := range a.fleet.Endpoints() {
		if o := e.Observation(); o != nil {
			gauge(a.perEndpoint, o.Waiting, e.DisplayName())
		}
	}
}
