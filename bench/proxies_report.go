package bench

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// metrics are what a cell reports.
type metric struct {
	name   string
	title  string
	format string
	lower  bool // lower is better
	of     func(*Row) *Stat
	sample func(*Sample) float64
}

func metrics() []metric {
	return []metric{
		{"throughput", "Throughput: answers per second, of streams chunks per second", "%.0f", false,
			func(r *Row) *Stat { return &r.Throughput }, func(s *Sample) float64 { return s.Throughput }},
		{"cpu", "CPU: seconds, user and system, per 1,000 answers or streams", "%.4f", true,
			func(r *Row) *Stat { return &r.CPU }, func(s *Sample) float64 { return s.CPU }},
		{"added p50", "Added latency, p50 in us: over direct in the same round", "%.0f", true,
			func(r *Row) *Stat { return &r.AddedP50 }, func(s *Sample) float64 { return s.AddedP50 }},
		{"added p99", "Added latency, p99 in us: over direct in the same round", "%.0f", true,
			func(r *Row) *Stat { return &r.AddedP99 }, func(s *Sample) float64 { return s.AddedP99 }},
		{"p50", "Latency, p50 in us: to the last byte, of streams to the first", "%.0f", true,
			func(r *Row) *Stat { return &r.P50 }, func(s *Sample) float64 { return s.P50 }},
		{"p99", "Latency, p99 in us: to the last byte, of streams to the first", "%.0f", true,
			func(r *Row) *Stat { return &r.P99 }, func(s *Sample) float64 { return s.P99 }},
		{"memory", "Peak memory in MiB, resident, over all processes", "%.1f", true,
			func(r *Row) *Stat { return &r.PeakRSS }, func(s *Sample) float64 { return s.PeakRSS }},
		{"per stream", "Memory per open stream in KiB, over idle", "%.1f", true,
			func(r *Row) *Stat { return &r.PerStream }, func(s *Sample) float64 { return s.PerStream }},
	}
}

func metricByName(name string) metric {
	list := metrics()
	return list[slices.IndexFunc(list, func(m metric) bool { return m.name == name })]
}

// statOf returns the median, the mean of the middle two of an even number, and the spread.
func statOf(v []float64) Stat {
	if len(v) == 0 {
		return Stat{}
	}
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	return Stat{Median: (s[(n-1)/2] + s[n/2]) / 2, Min: s[0], Max: s[n-1]}
}

// finish computes what is added over direct, the statistics and the goals.
func (r *ProxyReport) finish(kvgate string) {
	for _, x := range r.Rows {
		direct := r.row(x.Cell, sysDirect)
		for i := range x.Samples {
			s := &x.Samples[i]
			if s.Failures > 0 && x.Error == "" {
				x.Error = fmt.Sprintf("round %d: %d requests failed: %s", s.Round, s.Failures, s.Failure)
			}
			if direct == nil {
				continue
			}
			for _, d := range direct.Samples {
				if d.Round == s.Round {
					s.AddedP50, s.AddedP99 = s.P50-d.P50, s.P99-d.P99
				}
			}
		}
		for _, m := range metrics() {
			var values []float64
			for i := range x.Samples {
				values = append(values, m.sample(&x.Samples[i]))
			}
			*m.of(x) = statOf(values)
		}
	}
	r.Goals = r.judge(kvgate)
}

// ProxyGoal is a claim about one cell, and whether it held.
type ProxyGoal struct {
	Group    string  `json:"group"`
	Cell     string  `json:"cell"`
	Metric   string  `json:"metric"`
	Against  string  `json:"against,omitempty"` // system; "": the goal is a value of its own
	Op       string  `json:"op"`
	Goal     float64 `json:"goal"` // ratio to Against, or the value
	Measured float64 `json:"measured"`
	Other    float64 `json:"other,omitempty"` // what Against measured
	Verdict  string  `json:"verdict"`         // pass, FAIL, or why it cannot be told
}

// ratio returns Measured over Other, NaN when that says nothing.
func (g *ProxyGoal) ratio() float64 {
	if g.Other <= 0 {
		return math.NaN()
	}
	return g.Measured / g.Other
}

func proxyGoals() []ProxyGoal {
	var goals []ProxyGoal
	add := func(group, cell, metric, against, op string, value float64) {
		goals = append(goals, ProxyGoal{Group: group, Cell: cell, Metric: metric, Against: against, Op: op, Goal: value})
	}
	for i, size := range sizeNames {
		cell := cellPlain + "-" + size
		if i < 3 {
			add("CPU", cell, "cpu", sysEnvoy, "<", 1)
		} else {
			add("CPU", cell, "cpu", sysEnvoy, "<=", 1.5)
		}
		if i < 2 {
			add("CPU, aim", cell, "cpu", sysNginx, "<=", 2)
		}
	}
	for i, size := range sizeNames {
		cell := cellOpen + "-" + size
		switch i {
		case 0, 1:
			add("latency", cell, "added p50", sysHAProxy, "<=", 1)
		case 2:
			add("latency", cell, "added p50", sysEnvoy, "<=", 1)
		case 3:
			add("latency", cell, "added p50", sysEnvoy, "<=", 1.3)
		}
		add("latency", cell, "added p99", sysEnvoy, "<=", 1.2)
	}
	for i, size := range sizeNames {
		add("throughput", cellPlain+"-"+size, "throughput", sysEnvoy, ">=", [...]float64{1.3, 1.3, 1.1, 0.7}[i])
	}
	add("streams", cellBurst, "throughput", sysEnvoy, ">=", 1)
	add("streams", cellPaced, "cpu", sysEnvoy, "<=", 1)
	for _, router := range []string{sysSMG, sysVLLM} {
		for _, size := range sizeNames[:3] {
			add("cache-aware routers", cellPlain+"-"+size, "throughput", router, ">=", 2)
			add("cache-aware routers", cellPlain+"-"+size, "cpu", router, "<=", 0.5)
		}
	}
	add("memory", cellHeld, "per stream", "", "<=", 64)
	add("memory", cellMemory, "memory", "", "<=", 120)
	return goals
}

// judge measures the goals of the cells that ran.
func (r *ProxyReport) judge(kvgate string) []ProxyGoal {
	var out []ProxyGoal
	for _, g := range proxyGoals() {
		own := r.row(g.Cell, kvgate)
		if own == nil {
			continue
		}
		m := metricByName(g.Metric)
		g.Measured = m.of(own).Median
		limit := g.Goal
		if g.Against != "" {
			other := r.row(g.Cell, g.Against)
			if other == nil {
				g.Verdict = "no " + g.Against
				out = append(out, g)
				continue
			}
			if other.Error != "" {
				g.Verdict = g.Against + " failed"
				out = append(out, g)
				continue
			}
			g.Other = m.of(other).Median
			limit = g.Goal * max(g.Other, 0)
		}
		holds := map[string]bool{"<": g.Measured < limit, "<=": g.Measured <= limit, ">=": g.Measured >= limit}[g.Op]
		switch {
		case own.Error != "":
			g.Verdict = "FAIL: requests failed"
		case holds:
			g.Verdict = "pass"
		default:
			g.Verdict = "FAIL"
		}
		out = append(out, g)
	}
	return out
}

// JSON writes the report as one JSON document.
func (r *ProxyReport) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(r)
}

// cell formats a statistic, the spread in brackets.
func (m metric) cell(x *Row, spread bool) string {
	switch {
	case x == nil:
		return ""
	case x.Error != "":
		return "FAILED"
	}
	s := m.of(x)
	if *s == (Stat{}) {
		return "" // not measured
	}
	text := fmt.Sprintf(m.format, s.Median)
	if spread && len(x.Samples) > 1 {
		text += fmt.Sprintf(" ("+m.format+" to "+m.format+")", s.Min, s.Max)
	}
	return text
}

// present says whether any row of a cell has something to say by this metric.
func (r *ProxyReport) present(m metric, cell string) bool {
	for _, x := range r.Rows {
		if s := *m.of(x); x.Cell == cell && s != (Stat{}) {
			return true
		}
	}
	return false
}

// Table prints medians, one line per cell and metric.
func (r *ProxyReport) Table(w io.Writer) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(tw, "CELL\tMETRIC\t"+strings.Join(r.Systems, "\t")+"\t")
	for _, c := range r.Cells {
		for _, m := range metrics() {
			if !r.present(m, c.Name) {
				continue
			}
			_, _ = fmt.Fprintf(tw, "%s\t%s\t", c.Name, m.name)
			for _, s := range r.Systems {
				_, _ = fmt.Fprintf(tw, "%s\t", m.cell(r.row(c.Name, s), false))
			}
			_, _ = fmt.Fprintln(tw)
		}
	}
	_ = tw.Flush()
	tw = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(tw, "\nGOAL\tCELL\tMETRIC\tMEASURED\tAGAINST\tRATIO\tGOAL\t")
	for _, g := range r.Goals {
		_, _ = fmt.Fprintln(tw, strings.Join(g.columns(), "\t"))
	}
	_ = tw.Flush()
	for _, x := range r.Rows {
		if x.Error != "" {
			_, _ = fmt.Fprintf(w, "FAILED: %s, %s: %s\n", x.Cell, x.System, x.Error)
		}
	}
	for _, s := range r.Skipped {
		_, _ = fmt.Fprintln(w, "not measured:", s)
	}
	for _, s := range r.Notes {
		_, _ = fmt.Fprintln(w, "note:", s)
	}
}

func (g *ProxyGoal) columns() []string {
	format := metricByName(g.Metric).format
	against, ratio := "", ""
	if g.Against != "" && g.Other != 0 {
		against = fmt.Sprintf("%s "+format, g.Against, g.Other)
	} else if g.Against != "" {
		against = g.Against
	}
	if v := g.ratio(); !math.IsNaN(v) {
		ratio = fmt.Sprintf("%.2f", v)
	}
	return []string{g.Group, g.Cell, g.Metric, fmt.Sprintf(format, g.Measured), against, ratio, fmt.Sprintf("%s %v", g.Op, g.Goal), g.Verdict}
}

// Failed says whether a request failed anywhere.
func (r *ProxyReport) Failed() bool {
	return slices.ContainsFunc(r.Rows, func(x *Row) bool { return x.Error != "" })
}

// Markdown writes the report as a page with links to its plots, which start with prefix.
func (r *ProxyReport) Markdown(w io.Writer, prefix string, plots []string) error {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("# Proxies side by side\n")
	line("One run of `%s`, begun %s, %.0f minutes long.", r.Command, r.Started.UTC().Format("2006-01-02 15:04 MST"), r.Took/60)
	line("What is measured and how to read it: [docs/benchmarks.md](../../docs/benchmarks.md).\n")
	line("- Machine: %d cores, %s, %.1f GiB of memory, %s. Load, proxies and replicas share it.", r.Machine.Cores, r.Machine.CPU, float64(r.Machine.RAM)/(1<<30), r.Machine.Kernel)
	var versions []string
	for _, s := range r.Systems {
		if v := r.Versions[s]; v != "" {
			versions = append(versions, s+" "+v)
		}
	}
	line("- Versions: %s, %s.", strings.Join(versions, ", "), r.Machine.Go)
	line("- %d simulated replicas; %d rounds, in each every cell of every system once; windows of %gs or a multiple.", r.Replicas, r.Rounds, r.Window)
	line("- Numbers are medians over rounds, the lowest and highest in brackets.")
	for _, s := range r.Skipped {
		line("- Not measured: %s.", s)
	}
	for _, s := range r.Notes {
		line("- Note: %s.", s)
	}
	line("\n## Goals\n\n| what | cell | metric | kvgate | against | ratio | goal | verdict |\n| --- | --- | --- | ---: | ---: | ---: | ---: | --- |")
	for _, g := range r.Goals {
		line("| %s |", strings.Join(g.columns(), " | "))
	}
	line("\n## Cells\n\n| cell | load | body | connections |\n| --- | --- | ---: | --- |")
	for _, c := range r.Cells {
		conns := fmt.Sprint(c.Conns)
		if c.Rate > 0 {
			conns = fmt.Sprintf("as needed, %g requests per second", c.Rate)
		}
		line("| %s | %s | %d KB | %s |", c.Name, c.What, c.Bytes>>10, conns)
	}
	for _, p := range plots {
		line("\n![%s](%s%s.svg)", p, prefix, p)
	}
	for _, m := range metrics() {
		line("\n## %s\n\n| cell | %s |\n| --- |%s", m.title, strings.Join(r.Systems, " | "), strings.Repeat(" ---: |", len(r.Systems)))
		for _, c := range r.Cells {
			if !r.present(m, c.Name) {
				continue
			}
			fmt.Fprintf(&b, "| %s |", c.Name)
			for _, s := range r.Systems {
				fmt.Fprintf(&b, " %s |", m.cell(r.row(c.Name, s), true))
			}
			b.WriteByte('\n')
		}
	}
	if r.Failed() {
		line("\n## Failures\n")
		for _, x := range r.Rows {
			if x.Error != "" {
				line("- %s, %s: %s", x.Cell, x.System, x.Error)
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// proxyPlot is a metric over the body size.
type proxyPlot struct{ name, metric, kind, title, label string }

func proxyPlots() []proxyPlot {
	return []proxyPlot{
		{"cpu", "cpu", cellPlain, "CPU per 1,000 requests, closed loop", "seconds"},
		{"throughput", "throughput", cellPlain, "Throughput, closed loop", "requests per second"},
		{"p50", "added p50", cellOpen, "Added latency, open loop, p50", "microseconds"},
		{"p99", "added p99", cellOpen, "Added latency, open loop, p99", "microseconds"},
	}
}

// plot writes one plot as an SVG and reports whether there was something to draw.
func (r *ProxyReport) plot(w io.Writer, p proxyPlot) (bool, error) {
	m := metricByName(p.metric)
	var lines []series
	for _, s := range r.Systems {
		if s == sysDirect {
			continue
		}
		l := series{name: s}
		for i, size := range sizeNames {
			if x := r.row(p.kind+"-"+size, s); x != nil && x.Error == "" {
				l.x = append(l.x, float64(sizeBytes[i]>>10))
				l.y = append(l.y, m.of(x).Median)
			}
		}
		if len(l.x) > 1 {
			lines = append(lines, l)
		}
	}
	if len(lines) == 0 {
		return false, nil
	}
	return true, svgPlot(w, p.title, "KB of prompt", p.label, true, lines)
}

// WriteFiles writes the report as proxies.md, proxies.json and plots into a folder, which it makes.
func (r *ProxyReport) WriteFiles(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	const prefix = "proxies-"
	var drawn []string
	for _, p := range proxyPlots() {
		var svg strings.Builder
		ok, err := r.plot(&svg, p)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, prefix+p.name+".svg"), []byte(svg.String()), 0o644); err != nil {
			return err
		}
		drawn = append(drawn, p.name)
	}
	for name, write := range map[string]func(io.Writer) error{
		"proxies.md":   func(w io.Writer) error { return r.Markdown(w, prefix, drawn) },
		"proxies.json": r.JSON,
	} {
		var text strings.Builder
		if err := write(&text); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text.String()), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// sampleOf turns what the load generator saw into rates.
func sampleOf(c *Cell, l *loadResult, cpu time.Duration) Sample {
	s := Sample{Requests: l.requests, Seconds: l.elapsed.Seconds(), Failures: l.failures, Failure: l.failure, Warmup: l.warmup}
	if l.failures == 0 {
		s.Failure = ""
	}
	slices.Sort(l.latencies)
	s.P50, s.P99 = micros(l.latencies, 0.5), micros(l.latencies, 0.99)
	units := float64(l.requests)
	switch {
	case c.hold:
		units = 0
		if l.failures == 0 && l.open < c.Conns {
			s.Failures, s.Failure = c.Conns-l.open, fmt.Sprintf("%d of %d streams began", l.open, c.Conns)
		}
	case c.Chunks > 0:
		// Streams that cross the ends of the window count as far as they are in it.
		units = float64(l.events) / float64(c.events())
	}
	if units > 0 && s.Seconds > 0 {
		s.Throughput = units / s.Seconds * float64(max(1, c.Chunks))
		s.CPU = cpu.Seconds() / units * 1000
	} else if !c.hold && s.Failures == 0 {
		s.Failures, s.Failure = 1, "no answer came within the window"
	}
	return s
}

// micros returns a quantile of latencies in microseconds.
func micros[D ~int64](sorted []D, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return float64(sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]) / 1000
}

// sortRows orders rows as cells and systems are ordered.
func (r *ProxyReport) sortRows() {
	place := func(x *Row) int {
		cell := slices.IndexFunc(r.Cells, func(c Cell) bool { return c.Name == x.Cell })
		return cell*len(r.Systems) + slices.Index(r.Systems, x.System)
	}
	slices.SortStableFunc(r.Rows, func(a, b *Row) int { return cmp.Compare(place(a), place(b)) })
}
