package bench

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"
)

// ProxyOptions says what a bench of proxies measures, and how long.
type ProxyOptions struct {
	Systems   []string       // names; empty: all that are installed. Direct is always measured
	KVGate    []string       // binaries as [NAME=]PATH: several compare versions of kvgate
	Cells     *regexp.Regexp // of the cells' names; nil: all
	Rounds    int            // every cell of every system once in each
	Duration  time.Duration  // of a window; open loops take two, and five at low rates
	Warmup    time.Duration  // before a window
	Tools     string         // folder of install-peers.sh, "" for none
	Upstreams int            // simulated replicas
	Replica   string         // kvgate binary that simulates them
	Profiles  string         // folder for CPU profiles of kvgate, "" for none
	KeepDir   string         // folder for configurations and logs, kept; "": one that is removed
	Command   string         // for the report
	Progress  io.Writer      // one line per run; nil: none
}

// Validate returns an error that names the first field out of range.
func (o *ProxyOptions) Validate() error {
	switch {
	case o.Rounds < 1:
		return fmt.Errorf("rounds %d: use at least 1", o.Rounds)
	case o.Duration < 100*time.Millisecond:
		return fmt.Errorf("duration %v: use at least 100ms", o.Duration)
	case o.Warmup < 0:
		return fmt.Errorf("warm-up %v: use 0 or more", o.Warmup)
	case o.Upstreams < 1:
		return fmt.Errorf("upstreams %d: use at least 1", o.Upstreams)
	case len(o.KVGate) == 0 || o.Replica == "":
		return errors.New("no kvgate binary is given")
	case len(o.cells()) == 0:
		return fmt.Errorf("no cell's name matches %q: see --list", o.Cells)
	}
	known := []string{sysDirect}
	for _, p := range peers() {
		known = append(known, p.name)
	}
	for _, binary := range o.KVGate {
		name, path := kvgateBinary(binary)
		if name == "" || path == "" {
			return fmt.Errorf("kvgate binary %q: use PATH or NAME=PATH", binary)
		}
		if slices.Contains(known, name) {
			return fmt.Errorf("two systems are called %q: give kvgate binaries names of their own, NAME=PATH", name)
		}
		known = append(known, name)
	}
	for _, s := range o.Systems {
		if !slices.Contains(known, s) {
			return fmt.Errorf("system %q: use some of %q", s, known)
		}
	}
	return nil
}

// Cell is one kind of load on a system.
type Cell struct {
	Name   string  `json:"name"`
	What   string  `json:"what"`
	Bytes  int     `json:"bytes"`            // request body
	Mix    string  `json:"mix"`              // what prompts share: warm, cold or hot
	Conns  int     `json:"conns"`            // connections; those open from the start in an open loop
	Rate   float64 `json:"rate,omitempty"`   // open loop: requests per second
	Chunks int     `json:"chunks,omitempty"` // of a stream; 0: a plain answer

	interval time.Duration // between chunks; 0: all at once
	windows  int           // length of the window in durations; 0: 1
	fresh    bool          // the system is started for this cell: it measures memory
	hold     bool          // streams do not end
	rounds   int           // at most; 0: all
	decides  bool          // the cache-aware routers take part
}

// events returns the events of a whole answer: the role, the chunks, the usage and the terminator.
func (c *Cell) events() int {
	if c.Chunks == 0 || c.hold {
		return 0
	}
	return c.Chunks + 3
}

// Kinds of load by name.
const (
	cellPlain  = "plain" // closed loop
	cellOpen   = "open"
	cellBurst  = "sse-burst"
	cellPaced  = "sse-paced"
	cellHeld   = "memory-streams"
	cellMemory = "memory-512k"
)

// cells returns the cells that the options select.
func (o *ProxyOptions) cells() []Cell {
	var out []Cell
	for _, c := range AllCells() {
		if o.Cells == nil || o.Cells.MatchString(c.Name) {
			out = append(out, c)
		}
	}
	return out
}

var sizeNames = [...]string{"1k", "8k", "64k", "512k"}
var sizeBytes = [...]int{1 << 10, 8 << 10, 64 << 10, 512 << 10}

// AllCells returns every cell, in the order of a round.
func AllCells() []Cell {
	var out []Cell
	for i, name := range sizeNames {
		out = append(out, Cell{Name: cellPlain + "-" + name, What: "closed loop, plain answers", Bytes: sizeBytes[i], Mix: mixWarm, Conns: 32, decides: i < 3})
	}
	for i, name := range sizeNames {
		c := Cell{Name: cellOpen + "-" + name, What: "open loop, plain answers", Bytes: sizeBytes[i], Mix: mixWarm, Conns: 8, Rate: 100, windows: 2}
		if i == 3 {
			c.Rate, c.windows = 20, 5
		}
		out = append(out, c)
	}
	return append(out,
		Cell{Name: cellBurst, What: "closed loop, streams of chunks that come at once", Bytes: 1 << 10, Mix: mixWarm, Conns: 32, Chunks: 100},
		Cell{Name: cellPaced, What: "closed loop, streams of a chunk per 10 ms", Bytes: 1 << 10, Mix: mixWarm, Conns: 256, Chunks: 100, interval: 10 * time.Millisecond},
		Cell{Name: "cold-8k", What: "closed loop, prompts that share nothing", Bytes: 8 << 10, Mix: mixCold, Conns: 32},
		Cell{Name: "hot-8k", What: "closed loop, one conversation", Bytes: 8 << 10, Mix: mixHot, Conns: 32},
		Cell{Name: cellHeld, What: "open streams of a chunk per second, system just started", Bytes: 1 << 10, Mix: mixWarm, Conns: 1000, Chunks: 1 << 20,
			interval: time.Second, fresh: true, hold: true, rounds: 3},
		Cell{Name: cellMemory, What: "closed loop, plain answers, system just started", Bytes: 512 << 10, Mix: mixWarm, Conns: 32, fresh: true, rounds: 3},
	)
}

// Sample is one cell of one system in one round.
type Sample struct {
	Round      int     `json:"round"`
	Requests   int     `json:"requests"`                  // complete answers in the window
	Seconds    float64 `json:"seconds"`                   // length of the window
	Throughput float64 `json:"throughput"`                // answers per second, or chunks of streams
	P50        float64 `json:"p50_us"`                    // latency, of streams up to the first byte
	P99        float64 `json:"p99_us"`                    //
	AddedP50   float64 `json:"added_p50_us"`              // P50 less that of direct in the same round
	AddedP99   float64 `json:"added_p99_us"`              //
	CPU        float64 `json:"cpu_seconds_per_1000"`      // user and system, per 1,000 requests or streams
	PeakRSS    float64 `json:"peak_rss_mb"`               // MiB, the highest within the run
	PerStream  float64 `json:"per_stream_kb,omitempty"`   // KiB of memory per open stream, over idle
	Failures   int     `json:"failures"`                  //
	Failure    string  `json:"failure,omitempty"`         // the first
	Warmup     int     `json:"warmup_failures,omitempty"` // before the window; they do not count
}

// Stat is a median over rounds and its spread.
type Stat struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// Row is one cell of one system over all rounds. A row with a failed request
// has an error and counts for nothing.
type Row struct {
	Cell       string   `json:"cell"`
	System     string   `json:"system"`
	Throughput Stat     `json:"throughput"`
	P50        Stat     `json:"p50_us"`
	P99        Stat     `json:"p99_us"`
	AddedP50   Stat     `json:"added_p50_us"`
	AddedP99   Stat     `json:"added_p99_us"`
	CPU        Stat     `json:"cpu_seconds_per_1000"`
	PeakRSS    Stat     `json:"peak_rss_mb"`
	PerStream  Stat     `json:"per_stream_kb"`
	Error      string   `json:"error,omitempty"`
	Samples    []Sample `json:"samples"`
}

// ProxyReport is a whole run.
type ProxyReport struct {
	Started  time.Time         `json:"started"`
	Took     float64           `json:"took_seconds"`
	Command  string            `json:"command"`
	Machine  Machine           `json:"machine"`
	Versions map[string]string `json:"versions"`
	Skipped  []string          `json:"skipped,omitempty"` // systems that are not here, and why
	Notes    []string          `json:"notes,omitempty"`   // what may make the figures wrong
	Rounds   int               `json:"rounds"`
	Window   float64           `json:"window_seconds"`
	Replicas int               `json:"replicas"`
	Cells    []Cell            `json:"cells"`
	Systems  []string          `json:"systems"`
	Rows     []*Row            `json:"rows"`
	Goals    []ProxyGoal       `json:"goals"`
}

// Machine is where a report was made.
type Machine struct {
	Cores  int    `json:"cores"`
	CPU    string `json:"cpu"`
	Kernel string `json:"kernel"`
	RAM    uint64 `json:"ram_bytes"`
	Go     string `json:"go"`
}

// row returns the row of a cell and a system, nil when there is none.
func (r *ProxyReport) row(cell, system string) *Row {
	for _, x := range r.Rows {
		if x.Cell == cell && x.System == system {
			return x
		}
	}
	return nil
}

// add takes a sample into its row.
func (r *ProxyReport) add(cell, system string, s Sample) {
	x := r.row(cell, system)
	if x == nil {
		x = &Row{Cell: cell, System: system}
		r.Rows = append(r.Rows, x)
	}
	x.Samples = append(x.Samples, s)
}

// kvgateBinary splits [NAME=]PATH; the name is kvgate when there is none.
func kvgateBinary(s string) (name, path string) {
	if name, path, ok := strings.Cut(s, "="); ok {
		return name, path
	}
	return sysKVGate, s
}
