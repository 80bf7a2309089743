package scrape

import (
	"github.com/prometheus/client_golang/prometheus"
)

// collector exposes what workers and sources count. Series of a replica live as long as its worker.
type collector struct {
	m        *Manager
	duration prometheus.Histogram

	scrapes, missing                   *prometheus.Desc
	endpoints, errors, success, loaded *prometheus.Desc

	kvReceived, kvGaps, kvReplays, kvRestarts, kvLag, kvConnected, kvDropped *prometheus.Desc
}

func newCollector(m *Manager) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvgate_"+name, help, labels, nil)
	}
	return &collector{
		m: m,
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "kvgate_scrape_duration_seconds",
			Help:    "Time of one scrape of a replica's metrics, from the request to the values, failed ones included.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5},
		}),
		scrapes:     desc("scrapes_total", "Scrapes of a replica's metrics by how they ended.", "replica", "result"),
		missing:     desc("scrape_missing_total", "Scraped pages without a usable value of a field: absent, negative or not a number.", "replica", "field"),
		endpoints:   desc("discovery_endpoints", "Endpoints that a source contributes.", "source"),
		errors:      desc("discovery_errors_total", "Lists of endpoints that were not taken: unreadable, broken, empty or clashing.", "source"),
		success:     desc("discovery_last_success_timestamp_seconds", "When a list of endpoints was last found good.", "source"),
		kvReceived:  desc("kv_events_received_total", "KV events taken in, by type; unknown ones are skipped.", "replica", "event"),
		kvGaps:      desc("kv_events_gaps_total", "Holes in the numbers of a replica's batches of KV events.", "replica"),
		kvReplays:   desc("kv_events_replays_total", "Requests to a replica's replay server by how they ended.", "replica", "result"),
		kvRestarts:  desc("kv_events_restarts_total", "Publishers of KV events that began to number anew.", "replica"),
		kvLag:       desc("kv_events_lag_seconds", "Age of the newest batch of KV events when it was taken in, by both clocks.", "replica"),
		kvConnected: desc("kv_events_connected", "1 while every publisher of the replica that should be is connected.", "replica"),
		kvDropped:   desc("kv_events_dropped_batches_total", "Messages of a publisher of KV events that were not taken in, by reason.", "replica", "reason"),
		loaded:      desc("discovery_last_load_successful", "1 when the newest list of endpoints is in force, 0 when an older one is.", "source"),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	c.duration.Describe(ch)
	for _, d := range []*prometheus.Desc{c.scrapes, c.missing, c.endpoints, c.errors, c.success, c.loaded,
		c.kvReceived, c.kvGaps, c.kvReplays, c.kvRestarts, c.kvLag, c.kvConnected, c.kvDropped} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	c.duration.Collect(ch)
	send := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, v, labels...)
	}
	for _, w := range c.m.snapshot() {
		name := w.endpoint.DisplayName()
		for r := range resultCount {
			if n := w.results[r].Load(); n > 0 || r == resultOK {
				send(c.scrapes, prometheus.CounterValue, float64(n), name, resultNames[r])
			}
		}
		for v := range valueCount {
			send(c.missing, prometheus.CounterValue, float64(w.missing[v].Load()), name, valueNames[v])
		}
		if len(*c.m.kv.groups.Load()) > 0 {
			c.kvEvents(&w.kv.counts, name, send)
		}
	}
	c.m.mu.Lock()
	sources := c.m.sources
	c.m.mu.Unlock()
	for id := range sources {
		s, name := &sources[id], sourceNames[id]
		send(c.endpoints, prometheus.GaugeValue, float64(len(s.specs)), name)
		send(c.errors, prometheus.CounterValue, float64(s.errors), name)
		loaded := 1.0
		if s.problem != "" {
			loaded = 0
		}
		send(c.loaded, prometheus.GaugeValue, loaded, name)
		if !s.success.IsZero() {
			send(c.success, prometheus.GaugeValue, float64(s.success.UnixNano())/1e9, name)
		}
	}
}

// kvEvents sends what the subscriptions of one replica have counted.
func (c *collector) kvEvents(k *kvCounts, name string, send func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string)) {
	for e := range kvEventKinds {
		send(c.kvReceived, prometheus.CounterValue, float64(k.events[e].Load()), name, kvEventNames[e])
	}
	for r := range kvReplays {
		send(c.kvReplays, prometheus.CounterValue, float64(k.replays[r].Load()), name, kvReplayNames[r])
	}
	for d := range kvDrops {
		send(c.kvDropped, prometheus.CounterValue, float64(k.dropped[d].Load()), name, kvDropNames[d])
	}
	send(c.kvGaps, prometheus.CounterValue, float64(k.gaps.Load()), name)
	send(c.kvRestarts, prometheus.CounterValue, float64(k.restarts.Load()), name)
	send(c.kvLag, prometheus.GaugeValue, float64(k.lag.Load())/1e9, name)
	connected := 0.0
	if n := k.streams.Load(); n > 0 && k.connected.Load() >= n {
		connected = 1
	}
	send(c.kvConnected, prometheus.GaugeValue, connected, name)
}
