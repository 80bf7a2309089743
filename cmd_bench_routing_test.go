package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// labTrace writes a small trace: 60 prompts of two conversations.
func labTrace(t *testing.T) string {
	t.Helper()
	var b bytes.Buffer
	for i := range 60 {
		fmt.Fprintf(&b, `{"timestamp": %d, "input_length": 2048, "output_length": 20, "hash_ids": [%d, %d, %d, %d]}`+"\n", 300*i, 10+i%2, 20+i%2, 30+i%2, 100+i)
	}
	name := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(name, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func routingLab(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return command(t, append([]string{"bench", "routing"}, args...)...)
}

func TestBenchRouting(t *testing.T) {
	dir := t.TempDir()
	args := []string{
		"--trace", labTrace(t), "--replicas", "2", "--spread", "0s", "--compare", "random,expected-cost", "--profile", "configs/scheduling-default.yaml",
		"--json", filepath.Join(dir, "report.json"), "--plots", dir, "--timing", "--goodput", "0.99",
	}
	status, table, timing := routingLab(t, args...)
	if status != exitOK {
		t.Fatalf("got status %d and %s, want %d", status, timing, exitOK)
	}
	for _, want := range []string{"60 requests", "engine ", "configs/scheduling-default.yaml  0.", "random  0.", "expected-cost  0."} {
		if !strings.Contains(table, want) {
			t.Errorf("got\n%s\nwant %q in it", table, want)
		}
	}
	if got := strings.Count(timing, " us per pick\n"); got != 3 {
		t.Errorf("got %d pick times in %q, want 3", got, timing)
	}
	data, err := os.ReadFile(filepath.Join(dir, "report.json"))
	if err != nil {
		t.Fatal(err)
	}
	var report struct {
		Trace    string
		Replicas int
		Rate     float64
		Seed     uint64
		Policies []struct {
			Name     string
			Requests int
			Goodput  float64
		}
	}
	if err := json.Unmarshal(data, &report); err != nil {
		t.Fatal(err)
	}
	if report.Replicas != 2 || report.Rate != 1 || report.Seed != 1 || len(report.Policies) != 3 || report.Policies[2].Requests != 48 || report.Policies[2].Goodput <= 0 {
		t.Errorf("got %+v, want 2 replicas, rate and seed 1, three policies with 48 requests and a goodput", report)
	}
	for _, name := range []string{"ttft.svg", "load.svg"} {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.HasPrefix(data, []byte("<svg ")) {
			t.Errorf("%s: got %.20q and error %v, want a plot", name, data, err)
		}
	}
	// The same flags give the same bytes; real hashing the same choices.
	plain := args[:8]
	plain = append(plain[:len(plain):len(plain)], "--output", "json")
	_, first, _ := routingLab(t, plain...)
	_, second, _ := routingLab(t, plain...)
	_, hashed, _ := routingLab(t, append(plain, "--hash-content")...)
	if first != second || first != hashed || !strings.Contains(first, `"policies"`) {
		t.Errorf("got\n%s\n%s\nand, with real bytes,\n%s\nwant all alike", first, second, hashed)
	}
}

func TestBenchRoutingEngine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "engine.yaml")
	mean := func(engine string) string {
		t.Helper()
		if err := os.WriteFile(file, []byte(engine), 0o600); err != nil {
			t.Fatal(err)
		}
		status, out, errs := routingLab(t, "--trace", labTrace(t), "--replicas", "2", "--compare", "random", "--output", "markdown", "--engine", file)
		if status != exitOK {
			return errs
		}
		lines := strings.Split(strings.TrimSpace(out), "\n")
		return lines[len(lines)-1]
	}
	slow, fast := mean("prefill_s_per_token: 1e-3\n"), mean("prefill_s_per_token: 1e-6\n")
	if slow == fast || !strings.HasPrefix(slow, "| random | 0.") {
		t.Errorf("got %q and %q, want two rows with different times", slow, fast)
	}
	if got := mean("prefill: 1\n"); !strings.Contains(got, "engine.yaml:1") || !strings.Contains(got, "prefill") {
		t.Errorf("unknown field: got %q, want file, line and name", got)
	}
	if got := mean("["); !strings.Contains(got, "engine.yaml:1") {
		t.Errorf("no YAML: got %q, want file and line", got)
	}
	if got := mean("max_num_seqs: 0\n"); !strings.Contains(got, "max_num_seqs is 0") {
		t.Errorf("out of range: got %q, want the field", got)
	}
}

func TestBenchRoutingRefuses(t *testing.T) {
	trace := labTrace(t)
	f := func(t *testing.T, wantStatus int, want string, args ...string) {
		status, _, errs := routingLab(t, args...)
		if status != wantStatus || !strings.Contains(errs, want) {
			t.Errorf("got status %d and %q, want %d and %q", status, errs, wantStatus, want)
		}
	}
	gone := filepath.Join(t.TempDir(), "gone", "file")
	t.Run("flag", func(t *testing.T) { f(t, exitUsage, "unknown flag", "--speeds", "1") })
	t.Run("output", func(t *testing.T) { f(t, exitUsage, "use table, json or markdown", "--output", "xml") })
	t.Run("setting", func(t *testing.T) { f(t, exitUsage, "replicas 0", "--replicas", "0") })
	t.Run("policy", func(t *testing.T) { f(t, exitFailed, "neither one of [random", "--trace", trace, "--compare", "best") })
	t.Run("engine", func(t *testing.T) { f(t, exitFailed, "no such file", "--trace", trace, "--engine", gone) })
	t.Run("JSON file", func(t *testing.T) {
		f(t, exitFailed, "no such file", "--trace", trace, "--compare", "random", "--json", gone)
	})
	t.Run("plots", func(t *testing.T) {
		f(t, exitFailed, "no such file", "--trace", trace, "--compare", "random", "--plots", gone)
	})
	t.Run("gates", func(t *testing.T) { f(t, exitFailed, "no such file", "--gate", gone) })
	t.Run("page", func(t *testing.T) { f(t, exitFailed, "no such file", "--update", gone) })
}

func TestBenchRoutingGates(t *testing.T) {
	file := filepath.Join(t.TempDir(), "gates.yaml")
	f := func(t *testing.T, gates string, wantStatus int, want string) {
		if err := os.WriteFile(file, []byte(gates), 0o600); err != nil {
			t.Fatal(err)
		}
		status, out, errs := routingLab(t, "--gate", file)
		if status != wantStatus || !strings.Contains(out+errs, want) {
			t.Errorf("got status %d and\n%s%s\nwant %d and %q", status, out, errs, wantStatus, want)
		}
	}
	gate := "gates:\n- {id: A, policy: expected-cost, metric: slo, op: \">=\", value: %v, settings: [{trace: " + labTrace(t) + ", replicas: 2}]}\n"
	t.Run("holds", func(t *testing.T) { f(t, fmt.Sprintf(gate, 0.5), exitOK, "ok") })
	t.Run("fails", func(t *testing.T) { f(t, fmt.Sprintf(gate, 1.5), exitFailed, "a gate failed") })
	t.Run("none", func(t *testing.T) { f(t, "gates: []\n", exitFailed, "no gates") })
	t.Run("wrong", func(t *testing.T) { f(t, "gates: [{id: A}]\n", exitFailed, "gates.yaml:1") })
	t.Run("trace gone", func(t *testing.T) {
		f(t, strings.Replace(fmt.Sprintf(gate, 1), "trace.jsonl", "gone.jsonl", 1), exitFailed, "gate A: ")
	})
}

func TestBenchRoutingUpdatesPages(t *testing.T) {
	trace := labTrace(t)
	page := filepath.Join(t.TempDir(), "page.md")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(page, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	table := func(name, flags, old string) string {
		return fmt.Sprintf("<!-- table %s: kvgate bench routing %s -->\n%s<!-- end of table -->\n", name, flags, old)
	}
	flags := "--trace " + trace + " --replicas 2 --compare "
	write("# Head\n" + table("a", flags+"random", "old a\n") + "between\n" + table("b", flags+"expected-cost", "") + "end\n")
	if status, _, errs := routingLab(t, "--update", page, "--only", "b"); status != exitOK {
		t.Fatalf("got status %d and %s, want %d", status, errs, exitOK)
	}
	got := readDoc(t, page)
	if !strings.Contains(got, "old a\n") || !strings.Contains(got, "-->\n\n"+trace) || !strings.Contains(got, "| expected-cost | 0.") || !strings.HasSuffix(got, "|\n\n<!-- end of table -->\nend\n") {
		t.Errorf("only b: got\n%s\nwant table b anew", got)
	}
	if status, _, errs := routingLab(t, "--update", page); status != exitOK {
		t.Fatalf("got status %d and %s, want %d", status, errs, exitOK)
	}
	first := readDoc(t, page)
	if strings.Contains(first, "old a") || !strings.Contains(first, "| random | ") || !strings.HasPrefix(first, "# Head\n<!-- table a: ") {
		t.Errorf("all: got\n%s\nwant both tables anew", first)
	}
	if status, _, _ := routingLab(t, "--update", page); status != exitOK || readDoc(t, page) != first {
		t.Errorf("again: got status %d and\n%s\nwant no change", status, readDoc(t, page))
	}
	f := func(t *testing.T, text, want string) {
		write(text)
		if status, _, errs := routingLab(t, "--update", page); status != exitFailed || !strings.Contains(errs, want) {
			t.Errorf("got status %d and %q, want %d and %q", status, errs, exitFailed, want)
		}
		if got := readDoc(t, page); got != text {
			t.Errorf("got the page\n%s\nwant it as it was", got)
		}
	}
	t.Run("no table", func(t *testing.T) { f(t, "text\n", "no such table") })
	t.Run("wrong flags", func(t *testing.T) { f(t, table("a", "--compare best", ""), "page.md: table a: ") })
}
