package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvgate/bench"
)

// TestBenchSockets replays a trace of four requests, of which the last two find what the first left.
func TestBenchSockets(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "short.jsonl")
	lines := ""
	for _, at := range []string{"0", "300", "600", "700"} {
		lines += `{"timestamp":` + at + `,"input_length":1100,"output_length":2,"hash_ids":[1,2,` + at + `]}` + "\n"
	}
	if err := os.WriteFile(trace, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	profile := filepath.Join(t.TempDir(), "profile.yaml")
	if err := os.WriteFile(profile, []byte("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: prefix-cache-scorer}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"bench", "sockets", "--trace", trace, "--replicas", "1", "--faster", "2", "--warmup", "0"}
	status, out, errs := command(t, append(args, "--compare", "llm-d-default,default-inline,"+profile, "--output", "json")...)
	var rows []bench.TraceReport
	if err := json.Unmarshal([]byte(out), &rows); status != 0 || err != nil || len(rows) != 3 {
		t.Fatalf("got status %d, %d rows and %v\n%s%s\nwant status 0 and 3 rows", status, len(rows), err, out, errs)
	}
	for _, r := range rows {
		if want := 3 * 1024.0 / 4400; r.Requests != 4 || r.Hit != want || r.LabHit != want {
			t.Errorf("%s: got %d requests, hit %.3f and %.3f in the lab, want 4 and twice %.3f", r.Policy, r.Requests, r.Hit, r.LabHit, want)
		}
	}
	status, out, errs = command(t, append(args, "--compare", "expected-cost")...)
	if status != 0 || !strings.Contains(out, "expected-cost") || !strings.Contains(out, "lab: hit") {
		t.Errorf("got status %d\n%s%s\nwant a table", status, out, errs)
	}
	f := func(wantStatus int, want string, more ...string) {
		t.Helper()
		status, out, errs := command(t, append(args, more...)...)
		if status != wantStatus || !strings.Contains(out+errs, want) {
			t.Errorf("%q: got status %d\n%s%s\nwant status %d and %q", more, status, out, errs, wantStatus, want)
		}
	}
	f(2, "exists in the lab only", "--compare", "oracle")
	f(2, "replicas 0", "--replicas", "0")
	f(1, "nonsense", "--compare", "nonsense")
	f(1, "above 0", "--compare", "default-inline", "--faster", "0")
	f(1, "at least one request", "--compare", "default-inline", "--window", "0s")
}
