package proxy

import (
	"github.com/prometheus/client_golang/prometheus"

	"kvgate/routing"
)

// learnedSeries describe how well the producers predict, what engines have told
// of their caches, and where tokens come from.
type learnedSeries struct {
	prompt, predicted, cached, off, mean, dropped *prometheus.Desc
	bytesPerToken, sources                        *prometheus.Desc
	blocks, updates, skipped, incomplete          *prometheus.Desc
	windows, burst                                *prometheus.Desc
}

func newLearnedSeries() learnedSeries {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return learnedSeries{
		prompt:        desc("kvgate_prediction_prompt_tokens_total", "Prompt tokens of the answers by which predictions were judged.", "producer", "replica"),
		predicted:     desc("kvgate_prediction_predicted_tokens_total", "Of these, tokens that the producer expected in the replica's cache.", "producer", "replica"),
		cached:        desc("kvgate_prediction_cached_tokens_total", "Of these, tokens that the replica found in its cache.", "producer", "replica"),
		off:           desc("kvgate_prediction_error_tokens_total", "Tokens by which expected and found differ, answer by answer.", "producer", "replica"),
		mean:          desc("kvgate_prediction_error_ratio", "The difference over the prompt, a moving average of about ten answers.", "producer", "replica"),
		dropped:       desc("kvgate_prediction_drops_total", "Times that answers disproved the index, which then forgot the replica.", "producer", "replica"),
		bytesPerToken: desc("kvgate_prompt_bytes_per_token", "Prompt bytes per token of the model, learned from its answers.", "model"),
		sources:       desc("kvgate_token_sources_total", "Requests by where their tokens came from.", "source"),
		blocks:        desc("kvgate_kv_blocks", "Blocks that the replica holds by its own word, in every tier and group.", "producer", "replica"),
		updates:       desc("kvgate_kv_updates_total", "What the replica has told: blocks stored and removed, and times that it was cleared or its events were lost.", "producer", "replica", "op"),
		skipped:       desc("kvgate_kv_skipped_blocks_total", "Blocks that the replica has told of and the index has not taken in or has dropped.", "producer", "replica", "reason"),
		incomplete:    desc("kvgate_kv_incomplete", "1 while events are missing, so that the replica holds more than is known.", "producer", "replica"),
		windows:       desc("kvgate_burst_windows_total", "Windows in which requests waited to be placed together.", "producer"),
		burst:         desc("kvgate_burst_requests_total", "Requests that came upon a window, by what it did for them.", "producer", "result"),
	}
}

func (s *learnedSeries) describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		s.prompt, s.predicted, s.cached, s.off, s.mean, s.dropped, s.bytesPerToken, s.sources, s.blocks, s.updates, s.skipped, s.incomplete, s.windows, s.burst,
	} {
		ch <- d
	}
}

func (s *learnedSeries) collect(ch chan<- prometheus.Metric, fleet *routing.Fleet) {
	emit := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, v, labels...)
	}
	for _, p := range fleet.PredictionStats() {
		counter := func(d *prometheus.Desc, n uint64) {
			emit(d, prometheus.CounterValue, float64(n), p.Producer, p.Endpoint.DisplayName())
		}
		counter(s.prompt, p.PromptTokens)
		counter(s.predicted, p.PredictedTokens)
		counter(s.cached, p.CachedTokens)
		counter(s.off, p.AbsoluteError)
		counter(s.dropped, p.Dropped)
		emit(s.mean, prometheus.GaugeValue, p.Error, p.Producer, p.Endpoint.DisplayName())
	}
	for _, model := range fleet.ModelNames() {
		emit(s.bytesPerToken, prometheus.GaugeValue, fleet.BytesPerToken(model), model)
	}
	for i, n := range fleet.TokenSources() {
		emit(s.sources, prometheus.CounterValue, float64(n), routing.TokenSource(i).String())
	}
	for _, b := range fleet.BurstStats() {
		emit(s.windows, prometheus.CounterValue, float64(b.Windows), b.Producer)
		for r, n := range b.Requests {
			emit(s.burst, prometheus.CounterValue, float64(n), b.Producer, routing.BurstResult(r).String())
		}
	}
	for _, k := range fleet.PreciseStats() {
		name := k.Endpoint.DisplayName()
		emit(s.blocks, prometheus.GaugeValue, float64(k.Blocks), k.Producer, name)
		for _, u := range [...]struct {
			op string
			n  uint64
		}{{"store", k.Stored}, {"remove", k.Removed}, {"clear", k.Cleared}, {"lose", k.Lost}} {
			emit(s.updates, prometheus.CounterValue, float64(u.n), k.Producer, name, u.op)
		}
		for _, u := range [...]struct {
			reason string
			n      uint64
		}{
			{"unknown_parent", k.UnknownParents}, {"unknown_block", k.UnknownBlocks}, {"kind", k.OtherKinds},
			{"refused", k.Refused}, {"evicted", k.Evicted},
		} {
			emit(s.skipped, prometheus.CounterValue, float64(u.n), k.Producer, name, u.reason)
		}
		lost := 0.0
		if k.Incomplete != "" {
			lost = 1
		}
		emit(s.incomplete, prometheus.GaugeValue, lost, k.Producer, name)
	}
}
