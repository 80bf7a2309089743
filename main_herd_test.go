package main

import (
	"strings"
	"sync"
	"testing"
	"time"

	"kvgate/bench/fakevllm"
	"kvgate/configs"
)

// TestHerd: 64 equal prompts of 8,000 tokens come at once to four replicas whose
// metrics say that nothing waits. With the recommended profile no replica gets
// more than 24 of them, all are answered, and nothing is counted in flight in the end.
func TestHerd(t *testing.T) {
	var replicas []*fakevllm.Server
	for range 4 {
		r, err := fakevllm.Start(fakevllm.Options{Models: []string{"m"}, Manual: true, OutputTokens: 2})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(r.Close)
		replicas = append(replicas, r)
	}
	g := testGateway(t, func(s *configs.Settings) { s.Scheduling = "configs/expected-cost.yaml" }, replicas...)
	body := `{"model":"m","prompt":"` + strings.Repeat("herd", 8000) + `"}`
	var clients sync.WaitGroup
	for range 64 {
		clients.Go(func() {
			if status, answer := post(t, g.dataURL()+"/v1/completions", body); status != 200 {
				t.Errorf("got status %d: %s, want 200", status, answer)
			}
		})
	}
	arrived := func() (n int64) {
		for _, r := range replicas {
			n += r.Stats().Executed
		}
		return n
	}
	until(t, "all 64 requests to be at a replica", func() bool { return arrived() == 64 })
	answered := make(chan struct{})
	go func() {
		clients.Wait()
		close(answered)
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for open := true; open; {
		for _, r := range replicas {
			r.Step()
		}
		select {
		case <-answered:
			open = false
		case <-tick.C:
		}
	}
	for i, r := range replicas {
		if got := r.Stats().MaxInFlight; got > 24 || got == 0 {
			t.Errorf("replica %d: got %d requests at once, want 1 to 24", i, got)
		}
	}
	for _, e := range g.fleet.Endpoints() {
		until(t, e.Name()+" to have nothing in flight", func() bool { return e.InFlight() == 0 && e.Awaiting() == 0 && e.PendingTokens() == 0 })
	}
}
