package main

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"kvgate/bench/fakevllm"
	"kvgate/routing"
)

// TestReplicaRestartsUnderLoad: one of two replicas loses its cache without a word.
// Fifty of its answers later, what is predicted of it is within five percent again.
func TestReplicaRestartsUnderLoad(t *testing.T) {
	replicas := []*fakevllm.Server{testReplica(t), testReplica(t)}
	g := testGateway(t, nil, replicas...)
	// Forty users with long histories of their own behind a common begin.
	turn := make([]int, 40)
	var mu sync.Mutex
	next := 0
	ask := func() {
		mu.Lock()
		user := next * 7 % len(turn)
		next++
		turn[user]++
		n := turn[user]
		mu.Unlock()
		var prompt strings.Builder
		prompt.WriteString(strings.Repeat("You answer briefly and never guess. ", 60))
		for i := range 10 + n%20 {
			fmt.Fprintf(&prompt, "User %d said in round %d that all of this belongs to the story so far, word by word, %d. ", user, i, user*i)
		}
		if status, body := post(t, g.dataURL()+"/v1/completions", `{"model":"m","max_tokens":2,"prompt":"`+prompt.String()+`"}`); status != 200 {
			t.Errorf("got status %d: %s, want 200", status, body)
		}
	}
	load := func(enough func() bool) {
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for !enough() && !t.Failed() {
					ask()
				}
			})
		}
		wg.Wait()
	}
	stats := func(url string) routing.PredictionStats {
		for _, s := range g.fleet.PredictionStats() {
			if s.Endpoint.URL() == url {
				return s
			}
		}
		return routing.PredictionStats{}
	}
	answers := func(url string, n uint64) func() bool { return func() bool { return stats(url).Answers >= n } }
	off := func(from, to routing.PredictionStats) float64 {
		return float64(to.AbsoluteError-from.AbsoluteError) / float64(to.PromptTokens-from.PromptTokens)
	}
	const most = 0.05

	load(func() bool { return stats(replicas[0].URL()).Answers+stats(replicas[1].URL()).Answers >= 300 })
	replica := replicas[0] // the busier one
	if stats(replicas[1].URL()).Answers > stats(replica.URL()).Answers {
		replica = replicas[1]
	}
	restarted := replica.URL()
	warm := stats(restarted)
	load(answers(restarted, warm.Answers+50))
	before := stats(restarted)
	if got := off(warm, before); got > most {
		t.Errorf("before the restart: got an error of %.3f, want at most %v", got, most)
	}
	replica.RestartEngine()
	load(answers(restarted, before.Answers+50))
	middle := stats(restarted)
	load(answers(restarted, middle.Answers+50))
	after := stats(restarted)
	if got := off(middle, after); got > most {
		t.Errorf("fifty answers after the restart: got an error of %.3f, want at most %v", got, most)
	}
	if got := off(before, middle); got <= most {
		t.Errorf("right after the restart: got an error of %.3f, want more than %v, or it was none", got, most)
	}
	if after.Dropped == 0 {
		t.Errorf("got the index dropped %d times, want at least once", after.Dropped)
	}
	t.Logf("error %.3f, right after the restart %.3f, fifty answers later %.3f", off(warm, before), off(before, middle), off(middle, after))
}
