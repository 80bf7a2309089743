package proxy

import (
	"math"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"kvgate/routing"
)

// fleetGauges describe what is read from the fleet when it is collected.
type fleetGauges struct {
	up, state, inFlight, pending, awaiting            *prometheus.Desc
	waiting, running, kvUsage, capacity, age, replica *prometheus.Desc
	blocks, bytes, resets                             *prometheus.Desc
}

func newFleetGauges() fleetGauges {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return fleetGauges{
		up:       desc("kvgate_replica_up", "Whether the replica is ready for new work.", "replica"),
		state:    desc("kvgate_replica_state", "1 for the state of the replica, 0 for the others.", "replica", "state"),
		inFlight: desc("kvgate_replica_in_flight", "Requests sent to the replica that have not ended.", "replica"),
		pending:  desc("kvgate_replica_in_flight_tokens", "Prompt tokens that the replica has to compute before the awaiting requests get a first token.", "replica"),
		awaiting: desc("kvgate_replica_awaiting", "Requests sent to the replica that have no first token yet.", "replica"),
		waiting:  desc("kvgate_replica_waiting_requests", "Scraped: requests in the engine's queue. Absent while unknown.", "replica"),
		running:  desc("kvgate_replica_running_requests", "Scraped: requests in the engine's batch. Absent while unknown.", "replica"),
		kvUsage:  desc("kvgate_replica_kv_usage_ratio", "Scraped: part of the KV cache in use. Absent while unknown.", "replica"),
		capacity: desc("kvgate_replica_capacity_tokens", "Scraped: tokens that the KV cache holds. Absent while unknown.", "replica"),
		age:      desc("kvgate_replica_scrape_age_seconds", "Age of the last observation. Absent before the first.", "replica"),
		replica:  desc("kvgate_replicas", "Replicas by state.", "state"),
		blocks:   desc("kvgate_index_blocks", "Prompt blocks that the indexes hold for the replica.", "replica"),
		bytes:    desc("kvgate_index_bytes", "Memory of a producer's index.", "producer"),
		resets:   desc("kvgate_index_resets_total", "Times that a new block size has emptied a producer's index.", "producer"),
	}
}

func (g *fleetGauges) describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		g.up, g.state, g.inFlight, g.pending, g.awaiting, g.waiting, g.running, g.kvUsage, g.capacity, g.age, g.replica, g.blocks, g.bytes, g.resets,
	} {
		ch <- d
	}
}

// collect emits one set of series per replica name. A removed endpoint whose
// streams run is a draining replica, or adds its requests to those of the
// endpoint that took over its name.
func (g *fleetGauges) collect(ch chan<- prometheus.Metric, fleet *routing.Fleet, live, leaving []*routing.Endpoint) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		if !math.IsNaN(v) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
		}
	}
	var byState [routing.Draining + 1]int
	seen := make([]string, 0, len(live)+len(leaving))
	all := slices.Concat(live, leaving)
	for i, e := range all {
		name, state := e.DisplayName(), fleet.State(e)
		if slices.Contains(seen, name) {
			continue
		}
		seen = append(seen, name)
		byState[state]++
		inFlight, awaiting, pending := 0, 0, int64(0)
		for _, x := range all[i:] {
			if x.DisplayName() == name {
				inFlight, awaiting, pending = inFlight+x.InFlight(), awaiting+x.Awaiting(), pending+x.PendingTokens()
			}
		}
		up := 0.0
		if state == routing.Ready {
			up = 1
		}
		gauge(g.up, up, name)
		for s := range routing.Draining + 1 {
			is := 0.0
			if s == state {
				is = 1
			}
			gauge(g.state, is, name, s.String())
		}
		gauge(g.inFlight, float64(inFlight), name)
		gauge(g.awaiting, float64(awaiting), name)
		gauge(g.pending, float64(pending), name)
		if i >= len(live) {
			continue // nobody observes it any more
		}
		gauge(g.blocks, float64(fleet.IndexBlocks(e)), name)
		if o := e.Observation(); o != nil {
			gauge(g.waiting, o.Waiting, name)
			gauge(g.running, o.Running, name)
			gauge(g.kvUsage, o.KVUsage, name)
			if o.CapacityTokens > 0 {
				gauge(g.capacity, float64(o.CapacityTokens), name)
			}
			gauge(g.age, max(fleet.Now().Sub(o.At).Seconds(), 0), name)
		}
	}
	for s, n := range byState {
		gauge(g.replica, float64(n), routing.State(s).String())
	}
	for _, x := range fleet.IndexStats() {
		gauge(g.bytes, float64(x.Bytes), x.Producer)
		ch <- prometheus.MustNewConstMetric(g.resets, prometheus.CounterValue, float64(x.Resets), x.Producer)
	}
}
