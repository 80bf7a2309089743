package bench

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestSoakRefuses(t *testing.T) {
	f := func(o SoakOptions) {
		t.Helper()
		if _, err := Soak(context.Background(), o); err == nil || !strings.Contains(err.Error(), "use at least") {
			t.Errorf("%+v: got %v, want what to use", o, err)
		}
	}
	f(SoakOptions{Duration: time.Millisecond, Clients: 1, Replicas: 2})
	f(SoakOptions{Duration: time.Second, Clients: 0, Replicas: 2})
	f(SoakOptions{Duration: time.Second, Clients: 1, Replicas: 1})
	if _, err := Soak(context.Background(), SoakOptions{KVGate: "/nonexistent/kvgate", Duration: time.Second, Clients: 1, Replicas: 2}); err == nil || !strings.Contains(err.Error(), "/nonexistent/kvgate") {
		t.Errorf("no program: got %v, want an error that names it", err)
	}
}

// TestSoakExplains: an error is a restart's only on the replica that was restarted,
// from its end until a moment after its return.
func TestSoakExplains(t *testing.T) {
	at := time.Date(2026, 8, 22, 12, 0, 0, 0, time.UTC)
	f := func(r soakRestart, begin time.Time, replica string, want bool) {
		t.Helper()
		s := &soak{report: SoakReport{restarts: []soakRestart{r}}}
		if got := s.restarted(begin, replica); got != want {
			t.Errorf("request on %q at %s: got %v, want %v", replica, begin, got, want)
		}
	}
	ended := soakRestart{replica: "r1", from: at, to: at.Add(time.Second)}
	f(ended, at, "r1", true)
	f(ended, at, "r0", false)
	f(ended, at, "", true) // refused before a replica was named
	f(ended, at.Add(time.Second+soakGrace), "r1", false)
	f(soakRestart{replica: "r1", from: at}, at.Add(time.Hour), "r1", true)
}

func TestSoakState(t *testing.T) {
	page := "# HELP x y\nprocess_resident_memory_bytes 2.5e+07\ngo_goroutines 17\nprocess_open_fds 9\n" +
		"kvgate_http_requests_in_flight{route=\"/v1/a b\"} 1\nkvgate_http_requests_in_flight{route=\"/v1/c\"} 2\nkvgate_replica_in_flight{replica=\"r0\"} 3\n" +
		"kvgate_conns_open 4\nkvgate_index_blocks{replica=\"r0\"} 5\nkvgate_index_bytes 6\n"
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(page)) }))
	defer srv.Close()
	s := &soak{admin: srv.URL, client: srv.Client()}
	got, err := s.state()
	if want := (SoakState{RSS: 2.5e7, Goroutines: 17, Files: 9, InFlight: 3, Replicas: 3, Conns: 4, IndexBlocks: 5, IndexBytes: 6}); err != nil || got != want {
		t.Errorf("got %+v and %v, want %+v", got, err, want)
	}
	page = "go_goroutines many\n"
	if _, err := s.state(); err == nil || !strings.Contains(err.Error(), "go_goroutines") {
		t.Errorf("got %v, want an error that names the series", err)
	}
}

func TestSoakReport(t *testing.T) {
	r := SoakReport{Before: SoakState{Goroutines: 17}, After: SoakState{Goroutines: 99}}
	if r.Failed() {
		t.Error("without errors and leaks: got failed, want not")
	}
	r.Leaks = []string{"goroutines: 99 in the end, at most 19 expected"}
	r.Samples = []string{"an error"}
	var b strings.Builder
	r.Table(&b)
	for _, want := range append(r.Leaks, "an error", "goroutines", "index bytes") {
		if !strings.Contains(b.String(), want) {
			t.Errorf("got %q, want %q in it", b.String(), want)
		}
	}
	if !r.Failed() {
		t.Error("with a leak: got not failed, want failed")
	}
}
