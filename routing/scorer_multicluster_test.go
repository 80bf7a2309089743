package routing

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"kvgate/configs"
)

func TestClusterScorers(t *testing.T) {
	nan := math.NaN()
	// stale are old observations, of the first clusters.
	f := func(t *testing.T, s Scorer, values, want []float64, stale ...float64) {
		t.Helper()
		c := make([]Candidate, len(values))
		for i, v := range values {
			c[i].Endpoint, c[i].Waiting, c[i].KVUsage = &Endpoint{}, v, v
			if i < len(stale) {
				c[i].Endpoint.Observe(observed(stale[i], 0, stale[i]), time.Time{})
			}
		}
		got := make([]float64, len(c))
		s.Score(nil, c, got)
		if !slices.EqualFunc(got, want, func(a, b float64) bool { return math.Abs(a-b) < 1e-12 || math.IsNaN(a) && math.IsNaN(b) }) {
			t.Errorf("%T of %v, once %v: got %v, want %v", s, values, stale, got, want)
		}
	}
	f(t, clusterQueueScorer{}, []float64{2, 6, 10}, []float64{1, 0.5, 0})
	f(t, clusterQueueScorer{}, []float64{4, 4}, []float64{1, 1})
	f(t, clusterQueueScorer{}, []float64{2, nan, 10}, []float64{1, nan, 0})
	f(t, clusterQueueScorer{}, []float64{nan}, []float64{nan})
	f(t, clusterKVScorer{}, []float64{0.2, 0.9, nan}, []float64{0.8, 0.1, nan})
	// What was told and is stale is neutral.
	f(t, clusterQueueScorer{}, []float64{nan, 6, 10}, []float64{0.5, 1, 0}, 2)
	f(t, clusterKVScorer{}, []float64{nan, 0.2, 0.4}, []float64{0.7, 0.8, 0.6}, 0.9)
	f(t, clusterKVScorer{}, []float64{nan, 0.2}, []float64{nan, 0.8}, nan)
	f(t, clusterQueueScorer{}, []float64{nan, nan}, []float64{nan, nan}, 1, 2)
}

// clusterHeader declares what the scorers of load need.
const clusterHeader = `plugins:
- type: multicluster-metrics-data-source
- type: multicluster-metrics-extractor
`

func TestClusterConfigurations(t *testing.T) {
	f := func(yaml string, want string) {
		t.Helper()
		cfg, err := configs.ParseScheduling("test.yaml", []byte(header+yaml))
		if err == nil {
			_, err = New(cfg, readyFleet(t, newTestClock(), "a"), 1)
		}
		if got := fmt.Sprint(err); want == "" && err != nil || !strings.Contains(got, want) {
			t.Errorf("%s\ngot %v, want %q", yaml, err, want)
		}
	}
	f(clusterHeader+"- type: multicluster-queue-scorer\n- type: multicluster-kv-cache-utilization-scorer\n", "")
	const missing = "nobody reads the metrics of clusters (declare a multicluster-metrics-extractor"
	f("plugins: [{type: multicluster-queue-scorer}]\n", missing)
	f("plugins: [{type: multicluster-kv-cache-utilization-scorer}]\n", missing)
	f(clusterHeader+"- {type: multicluster-queue-scorer, parameters: {load: scraped}}\n", "load: unknown field")
	f("plugins: [{type: multicluster-approx-prefix-cache-producer, parameters: {autoTune: false, blockSizeTokens: 0}}]\n", "blockSizeTokens 0")
	f("plugins: [{type: multicluster-prefix-cache-scorer, parameters: {matchLengthWeight: 2}}]\n", "matchLengthWeight 2")
	f("plugins: [{type: multicluster-prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: nobody}}]\n", "no plugin named nobody")
}

// TestClusterConversationSticks: the scorer has a producer of its own, beside that of replicas.
func TestClusterConversationSticks(t *testing.T) {
	fleet := readyFleet(t, newTestClock(), "west", "east")
	r := newTestRouter(t, fleet, "plugins: [{type: multicluster-prefix-cache-scorer}, {type: prefix-cache-scorer}]\n")
	var names []string
	for _, p := range r.producers {
		names = append(names, p.name)
	}
	if want := []string{clusterProducer, defaultProducer}; !slices.Equal(names, want) {
		t.Errorf("got the producers %v, want %v", names, want)
	}
	first := ""
	for turn := 1; turn < 5; turn++ {
		l, err := r.Route(promptOf("m", 1, turn))
		if err != nil {
			t.Fatal(err)
		}
		if got := l.Endpoint.Name(); first == "" {
			first = got
		} else if got != first || l.Matched != turn-1 {
			t.Errorf("turn %d: got %s with %d blocks, want %s with %d", turn, got, l.Matched, first, turn-1)
		}
		l.Done(Completed)
	}
}

// TestClusterIsNotForgotten: answers that disprove one replica of a cluster leave the
// index of the cluster as it is; that of a replica goes.
func TestClusterIsNotForgotten(t *testing.T) {
	f := func(scorer string, wantDropped bool) {
		t.Helper()
		fleet := readyFleet(t, newTestClock(), "west")
		r := newTestRouter(t, fleet, "plugins: [{type: "+scorer+"}]\n")
		for range 20 {
			l, err := r.Route(promptOf("m", 1, 8))
			if err != nil {
				t.Fatal(err)
			}
			l.Usage(512, 0)
			l.Done(Completed)
		}
		if got := fleet.PredictionStats()[0].Dropped > 0; got != wantDropped {
			t.Errorf("%s: got the index dropped: %v, want %v", scorer, got, wantDropped)
		}
	}
	f(clusterScorer, false)
	f("prefix-cache-scorer", true)
}

func TestFleetAverages(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b", "c", "d")
	show := func(a Averages) string {
		return fmt.Sprintf("%d ready, waiting %.2f+-%.2f, running %.2f+-%.2f, usage %.2f+-%.2f", a.Ready,
			a.Waiting.Mean, a.Waiting.StdDev, a.Running.Mean, a.Running.StdDev, a.KVUsage.Mean, a.KVUsage.StdDev)
	}
	want := func(want string) {
		t.Helper()
		if got := show(f.Averages()); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	e := f.Endpoints()
	e[0].Observe(observed(1, 10, 0.1), c.now())
	e[1].Observe(observed(3, 30, 0.3), c.now())
	e[2].Observe(NoMetrics(), c.now())
	e[3].Observe(observed(100, 100, 1), c.now())
	f.Drain("d", true)
	want("3 ready, waiting 2.00+-1.00, running 20.00+-10.00, usage 0.20+-0.10")
	e[1].SetReachable(false)
	want("2 ready, waiting 1.00+-0.00, running 10.00+-0.00, usage 0.10+-0.00")
	c.advance(f.Now().Sub(c.now()) + 3e9)
	want("2 ready, waiting NaN+-NaN, running NaN+-NaN, usage NaN+-NaN")
}
