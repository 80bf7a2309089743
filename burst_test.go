package main

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/bench/fakevllm"
	"kvgate/configs"
)

// The burst of the tests: eight copies of each of four prompts.
const (
	burstGroups = 4
	burstCopies = 8
	burstPrompt = 1024 // tokens
	burstWindow = 50 * time.Millisecond
	burstBlock  = 16 // tokens of an engine's block
	burstLeast  = burstGroups*burstPrompt + burstGroups*(burstCopies-1)*burstBlock
)

// burstReplica is an engine that computes one prompt of the burst per step, in real
// time: whoever comes with a copy of it then finds all but its last block.
func burstReplica(t *testing.T) *fakevllm.Server {
	t.Helper()
	m := fakevllm.DefaultModel()
	m.Budget, m.MaxSeqs = burstPrompt, 64
	m.Floor, m.Prefill = 100e-3, 100e-6
	r, err := fakevllm.Start(fakevllm.Options{Models: []string{"m"}, Engine: m, OutputTokens: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// burstClient keeps the connections of a whole burst.
func burstClient(t testing.TB) *http.Client {
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: burstGroups * burstCopies}}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// sendBurst sends the burst at once and waits for the answers.
func sendBurst(t testing.TB, client *http.Client, url, salt string) (latencies []time.Duration) {
	t.Helper()
	ids := func(group int) string {
		var b strings.Builder
		for i := range burstPrompt {
			fmt.Fprintf(&b, "%d,", 1000*group+i)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	var bodies [burstGroups]string
	for g := range bodies {
		bodies[g] = `{"model":"m","max_tokens":1,"cache_salt":"s` + salt + `","prompt":[` + ids(g) + `]}`
	}
	latencies = make([]time.Duration, burstGroups*burstCopies)
	var ready, wg sync.WaitGroup
	start := make(chan struct{})
	for i := range latencies {
		ready.Add(1)
		wg.Go(func() {
			ready.Done()
			<-start
			begin := time.Now()
			resp, err := client.Post(url+"/v1/completions", "application/json", strings.NewReader(bodies[i%burstGroups]))
			if err != nil {
				t.Errorf("request %d: %v", i, err)
				return
			}
			body, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			latencies[i] = time.Since(begin)
			if err != nil || resp.StatusCode != 200 {
				t.Errorf("request %d: got status %d, error %v: %s, want 200", i, resp.StatusCode, err, body)
			}
		})
	}
	ready.Wait()
	close(start)
	wg.Wait()
	return latencies
}

// TestBurstIsPrefilledOnce: of a burst of 32 prompts in four groups every group is
// computed on one replica, once, and no two share a replica.
func TestBurstIsPrefilledOnce(t *testing.T) {
	run := func(name, scheduling string) (computed int64, busy int, windows uint64) {
		var replicas []*fakevllm.Server
		for range 4 {
			replicas = append(replicas, burstReplica(t))
		}
		g := testGateway(t, func(s *configs.Settings) { s.Scheduling = scheduling }, replicas...)
		sendBurst(t, burstClient(t), g.dataURL(), "")
		for _, r := range replicas {
			if s := r.Stats().Engine; s.PromptTokens > 0 {
				computed += s.PromptTokens - s.CachedTokens
				busy++
			}
		}
		t.Logf("%s: %d prompt tokens computed on %d replicas, %.2f prefills of each prompt", name, computed, busy, float64(computed)/(burstGroups*burstPrompt))
		for _, s := range g.fleet.BurstStats() {
			windows += s.Windows
		}
		return computed, busy, windows
	}
	// A window long enough for a busy machine.
	example := strings.Replace(readDoc(t, "configs/scheduling-burst.yaml"), "windowDurationMs: 50", "windowDurationMs: 1000", 1)
	computed, busy, windows := run("burst", writeTemp(t, "burst.yaml", example))
	for try := 0; windows > 1 && try < 5; try++ { // the machine stood still while the burst was sent
		computed, busy, windows = run("burst", writeTemp(t, "burst.yaml", example))
	}
	if windows != 1 {
		t.Fatalf("got %d windows, want the burst in one", windows)
	}
	if computed != burstLeast || busy != 4 {
		t.Errorf("got %d prompt tokens computed on %d replicas, want %d on 4: each prompt once, and the last block of each copy", computed, busy, burstLeast)
	}
	run("without", "")
	scattered, _, _ := run("by load alone", writeTemp(t, "scheduling.yaml",
		"apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer}]\n"))
	if scattered <= computed {
		t.Errorf("by load alone: got %d prompt tokens computed, want more than %d, or the burst was none", scattered, computed)
	}
}

// BenchmarkBurstWait reports what the window adds to a request: the latency with the
// producer less the window, beside the latency without it.
func BenchmarkBurstWait(b *testing.B) {
	for _, bench := range []struct {
		name, scheduling string
		window           time.Duration
	}{{"without", "", 0}, {"window50ms", "configs/scheduling-burst.yaml", burstWindow}} {
		b.Run(bench.name, func(b *testing.B) {
			var replicas []*fakevllm.Server
			for range 4 {
				r, err := fakevllm.Start(fakevllm.Options{Models: []string{"m"}, Instant: true})
				if err != nil {
					b.Fatal(err)
				}
				b.Cleanup(r.Close)
				replicas = append(replicas, r)
			}
			g := testGateway(b, func(s *configs.Settings) { s.Scheduling = bench.scheduling }, replicas...)
			client := burstClient(b)
			for range 5 {
				sendBurst(b, client, g.dataURL(), "warm")
			}
			var all []time.Duration
			for i := 0; b.Loop(); i++ {
				all = append(all, sendBurst(b, client, g.dataURL(), fmt.Sprint(i))...)
			}
			slices.Sort(all)
			at := func(part float64) float64 {
				return (all[int(part*float64(len(all)-1))] - bench.window).Seconds() * 1000
			}
			b.ReportMetric(at(0.5), "p50-ms")
			b.ReportMetric(at(0.99), "p99-ms")
		})
	}
}
