package proxy

import (
	"bytes"
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap/zapcore"
	"go.yaml.in/yaml/v3"
)

func docText(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile("../docs/" + file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// docSeries is one row of a table in docs/metrics.md.
type docSeries struct {
	typ    string
	labels []string
}

func documentedSeries(t *testing.T) map[string]docSeries {
	t.Helper()
	out := map[string]docSeries{}
	row := regexp.MustCompile("(?m)^\\| `(kvgate_[a-z_]+)` \\| (counter|gauge|histogram) \\|([a-z_`, ]*)\\| .+ \\|$")
	label := regexp.MustCompile("`([a-z_]+)`")
	for _, m := range row.FindAllStringSubmatch(docText(t, "metrics.md"), -1) {
		s := docSeries{typ: m[2]}
		for _, l := range label.FindAllStringSubmatch(m[3], -1) {
			s.labels = append(s.labels, l[1])
		}
		slices.Sort(s.labels)
		out[m[1]] = s
	}
	return out
}

// scrapedSeries returns type and labels of every kvgate_ family in a real scrape.
func scrapedSeries(t *testing.T) map[string]docSeries {
	t.Helper()
	out := map[string]docSeries{}
	page := fullScrape(t)
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (kvgate_\w+) (\w+)$`).FindAllStringSubmatch(page, -1) {
		s := docSeries{typ: m[2]}
		line := regexp.MustCompile(`(?m)^` + m[1] + `(?:_bucket)?(?:\{(.*)\})? \S+$`).FindStringSubmatch(page)
		if line == nil {
			t.Fatalf("%s: got no sample, want one", m[1])
		}
		for _, l := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(line[1], -1) {
			if l[1] != "le" {
				s.labels = append(s.labels, l[1])
			}
		}
		slices.Sort(s.labels)
		out[m[1]] = s
	}
	return out
}

// observationSeries says whether a name belongs to the package scrape, whose series no scrape here has.
func observationSeries(name string) bool {
	return strings.HasPrefix(name, "kvgate_scrape") || strings.HasPrefix(name, "kvgate_discovery_") || strings.HasPrefix(name, "kvgate_kv_events_")
}

func TestDocsMetricsTable(t *testing.T) {
	documented, scraped := documentedSeries(t), scrapedSeries(t)
	for name, got := range documented {
		if want, ok := scraped[name]; ok {
			if got.typ != want.typ || !slices.Equal(got.labels, want.labels) {
				t.Errorf("docs/metrics.md: %s: got %s %v, want %s %v", name, got.typ, got.labels, want.typ, want.labels)
			}
		} else if !observationSeries(name) {
			t.Errorf("docs/metrics.md: got %s, want only series that a scrape has", name)
		}
	}
	for name := range scraped {
		if _, ok := documented[name]; !ok {
			t.Errorf("docs/metrics.md: got no row for %s, want one", name)
		}
	}
}

// queries returns every PromQL expression of the dashboard, the rules and the page, by where it stands.
func queries(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	var board struct {
		Panels []struct {
			Title   string
			Type    string
			Targets []struct{ RefID, Expr string }
		}
	}
	if err := json.Unmarshal([]byte(docText(t, "grafana.json")), &board); err != nil {
		t.Fatalf("docs/grafana.json: got %v, want a dashboard", err)
	}
	for _, p := range board.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("docs/grafana.json: panel %s: got no query, want one", p.Title)
		}
		for _, q := range p.Targets {
			out["docs/grafana.json: "+p.Title+" "+q.RefID] = q.Expr
		}
	}
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr string
				Labels      map[string]string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal([]byte(docText(t, "alerts.yaml")), &rules); err != nil {
		t.Fatalf("docs/alerts.yaml: got %v, want rules", err)
	}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if r.Alert == "" || r.Labels["severity"] == "" || r.Annotations["summary"] == "" {
				t.Errorf("docs/alerts.yaml: got %+v, want a name, a severity and a summary", r)
			}
			out["docs/alerts.yaml: "+r.Alert] = r.Expr
		}
	}
	for i, block := range regexp.MustCompile("(?s)```promql\n(.*?)```").FindAllStringSubmatch(docText(t, "metrics.md"), -1) {
		out["docs/metrics.md: block "+string(rune('1'+i))] = block[1]
	}
	if len(out) < 50 {
		t.Fatalf("queries: got %d, want at least 50", len(out))
	}
	return out
}

// Every series and label that a query names is one of a real scrape.
func TestDocsQueries(t *testing.T) {
	scraped, documented := scrapedSeries(t), documentedSeries(t)
	find := func(name string) (docSeries, bool) {
		for _, suffix := range []string{"", "_bucket", "_sum", "_count"} {
			base, ok := strings.CutSuffix(name, suffix)
			if s, known := scraped[base]; ok && known && (suffix == "" || s.typ == "histogram") {
				return s, s.typ != "histogram" || suffix != ""
			}
		}
		s, ok := documented[name] // which another test holds against the package scrape
		return s, ok && observationSeries(name)
	}
	for place, query := range queries(t) {
		for _, m := range regexp.MustCompile(`\b(kvgate_\w+)(?:\{([^}]*)\})?`).FindAllStringSubmatch(query, -1) {
			s, ok := find(m[1])
			if !ok {
				t.Errorf("%s: got %s, want a series of a scrape", place, m[1])
				continue
			}
			for _, l := range regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)`).FindAllStringSubmatch(m[2], -1) {
				if !slices.Contains(append([]string{"job", "instance", "le"}, s.labels...), l[1]) {
					t.Errorf("%s: got the label %s of %s, want one of %v", place, l[1], m[1], s.labels)
				}
			}
		}
	}
}

// The table of fields is that of a line with everything in it.
func TestDocsAccessLogFields(t *testing.T) {
	_, page, ok := strings.Cut(docText(t, "metrics.md"), "## Access log")
	if !ok {
		t.Fatal("docs/metrics.md: got no section on the access log, want one")
	}
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]+) \\|").FindAllStringSubmatch(page, -1) {
		for _, field := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(row[1], -1) {
			documented = append(documented, field[1])
		}
	}
	r := fullRecord(newMetricsBench(t, "a").fleet.Endpoints()[0])
	r.reroutes, r.resends, r.clientEnd, r.err = 1, 1, true, reasonCanceled
	var out bytes.Buffer
	accessTo(&out, zapcore.InfoLevel).write(r)
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("line: got %v, want JSON", err)
	}
	delete(line, "level")
	delete(line, "msg")
	var written []string
	for field := range line {
		written = append(written, field)
	}
	slices.Sort(written)
	slices.Sort(documented)
	if !slices.Equal(documented, written) {
		t.Errorf("docs/metrics.md: got the fields\n%v, want\n%v", documented, written)
	}
}
