package bench

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"kvgate/bench/fakevllm"
	"kvgate/configs"
)

// Setting names one experiment of the lab: a trace, how it is shaped, a fleet.
type Setting struct {
	Trace       string        `json:"trace"`        // conversation, synthetic, a generator's name, or a file
	BlockTokens int           `json:"block_tokens"` // tokens per block id of a trace file
	Replicas    int           `json:"replicas"`
	CacheTokens int           `json:"cache_tokens"` // per replica
	Rate        float64       `json:"rate"`         // multiplies the trace's arrival rate
	Copies      int           `json:"copies"`       // 0: a quarter of the replicas, at least 1; generators make their own load
	Spread      time.Duration `json:"spread"`       // width of the trace's arrival bins; 0: arrivals stay
	Scrape      time.Duration `json:"scrape"`
	InstantLoad bool          `json:"instant_load"` // engines publish their queue at every arrival, as mocks do
	Speeds      []float64     `json:"speeds"`
	Gateways    int           `json:"gateways"`
	IndexTokens int64         `json:"index_tokens"` // capacity that the replicas report; 0: the truth
	Warmup      float64       `json:"warmup"`
	Seed        uint64        `json:"seed"`
}

// DefaultSetting is the reference setting of docs/routing-quality.md.
func DefaultSetting() Setting {
	return Setting{
		Trace: "conversation", BlockTokens: 512, Replicas: 8, CacheTokens: 1_024_000, Rate: 1,
		Spread: 3 * time.Second, Scrape: 50 * time.Millisecond, Gateways: 1, Warmup: 0.2, Seed: 1,
	}
}

// Validate returns an error that names the first field out of range.
func (s Setting) Validate() error {
	if err := checkBlockTokens(s.BlockTokens); err != nil {
		return err
	}
	switch {
	case s.Replicas < 1:
		return fmt.Errorf("replicas %d: use at least 1", s.Replicas)
	case s.CacheTokens < s.BlockTokens:
		return fmt.Errorf("cache tokens %d: use at least one block of %d", s.CacheTokens, s.BlockTokens)
	case !(s.Rate > 0) || math.IsInf(s.Rate, 0):
		return fmt.Errorf("rate %v: use a number above 0", s.Rate)
	case s.Copies < 0:
		return fmt.Errorf("copies %d: use 0 or more", s.Copies)
	case s.Spread < 0 || s.Scrape <= 0:
		return fmt.Errorf("spread %v, scrape %v: use 0 or more, and more than 0", s.Spread, s.Scrape)
	case s.Gateways < 1:
		return fmt.Errorf("gateways %d: use at least 1", s.Gateways)
	case !(s.Warmup >= 0 && s.Warmup < 1):
		return fmt.Errorf("warm-up %v: use 0 up to, and without, 1", s.Warmup)
	}
	for _, v := range s.Speeds {
		if !(v > 0) || math.IsInf(v, 0) {
			return fmt.Errorf("speed %v: use a number above 0", v)
		}
	}
	return nil
}

// Lab runs policies over one setting.
type Lab struct {
	Setting
	Engine    fakevllm.Model
	Regret    int // see LabOptions
	Late      int
	Load      bool
	Hash      bool
	Stopwatch func() time.Duration
	Progress  func(policy string, done, all int)

	trace *Trace
}

// NewLab loads and shapes the setting's trace.
func NewLab(s Setting) (*Lab, error) {
	l := &Lab{Setting: s, Engine: fakevllm.DefaultModel()}
	return l, l.shape()
}

func (l *Lab) shape() error {
	if err := l.Validate(); err != nil {
		return err
	}
	t, err := generate(l.Trace, l.Rate*float64(l.Replicas)/8, l.Seed)
	if err != nil {
		return err
	}
	if t != nil {
		l.trace = t
		return nil
	}
	if t, err = LoadTrace(l.Trace, l.BlockTokens); err != nil {
		return err
	}
	copies := l.Copies
	if copies == 0 {
		copies = max(1, l.Replicas/4)
	}
	l.trace = t.Shape(l.Spread, copies, l.Rate, l.Seed)
	return nil
}

func (l *Lab) options(policy string) LabOptions {
	o := LabOptions{
		Replicas: l.Replicas, CacheTokens: l.CacheTokens, Engine: l.Engine, Speeds: l.Speeds, Scrape: l.Scrape, InstantLoad: l.InstantLoad,
		Gateways: l.Gateways, IndexTokens: l.IndexTokens, Warmup: l.Warmup, Seed: l.Seed, HashContent: l.Hash,
		Regret: l.Regret, Late: l.Late, Load: l.Load, Stopwatch: l.Stopwatch,
	}
	if l.Progress != nil {
		o.Progress = func(done, all int) { l.Progress(policy, done, all) }
	}
	return o
}

// Run replays the trace against a policy by name (see NamedPolicy).
func (l *Lab) Run(policy string) (*LabResult, error) {
	p, err := NamedPolicy(policy, l.CacheTokens)
	if err != nil {
		return nil, err
	}
	return RunLab(l.trace, p, l.options(policy))
}

// Goodput returns the highest rate, by seven bisections, at which the part `inside`
// of the requests meets the SLO.
func (l *Lab) Goodput(policy string, inside float64) (float64, error) {
	low, high := 0.0, 0.0
	ok := func(rate float64) (bool, error) {
		s := l.Setting
		s.Rate = rate
		at := &Lab{Setting: s, Engine: l.Engine, Progress: l.Progress}
		if err := at.shape(); err != nil {
			return false, err
		}
		// A rate that is too high is told by its first misses: an overloaded fleet takes long to simulate.
		measured := len(at.trace.Requests) - at.warmup()
		at.Late = max(1, measured-int(math.Ceil(inside*float64(measured)-1e-9)))
		r, err := at.Run(policy)
		if err != nil {
			return false, err
		}
		return r.Row().SLO >= inside, nil
	}
	for rate := 0.25; ; rate *= 2 {
		good, err := ok(rate)
		if err != nil {
			return 0, err
		}
		if !good {
			high = rate
			break
		}
		low = rate
		if rate > 64 {
			return low, nil
		}
	}
	for range 7 {
		mid := (low + high) / 2
		good, err := ok(mid)
		if err != nil {
			return 0, err
		}
		if good {
			low = mid
		} else {
			high = mid
		}
	}
	return low, nil
}

// LabReport is a run of the lab as it is printed.
type LabReport struct {
	Trace        string    `json:"trace"`
	TraceDigest  string    `json:"trace_sha256"`
	EngineDigest string    `json:"engine_sha256"` // of its cost model as JSON
	Requests     int       `json:"requests"`
	Replicas     int       `json:"replicas"`
	CacheTokens  int       `json:"cache_tokens"`
	Rate         float64   `json:"rate"`
	Seed         uint64    `json:"seed"`
	InfiniteHit  float64   `json:"infinite_hit"` // one cache without limit
	PooledHit    float64   `json:"pooled_hit"`   // one LRU of all the fleet's memory
	FloorTTFT    float64   `json:"floor_ttft"`   // mean, with the pooled cache's hits and no queue
	Policies     []LabRow  `json:"policies"`
	Detail       []Replica `json:"replicas_detail,omitempty"`
}

// Replica is one replica's part in a policy's run.
type Replica struct {
	Policy   string  `json:"policy"`
	Replica  int     `json:"replica"`
	Work     float64 `json:"prefill_work_s"`
	InFlight float64 `json:"inflight_mean"`
}

// Report starts a report with the bounds of the setting.
func (l *Lab) Report() *LabReport {
	from := l.warmup()
	r := &LabReport{
		Trace: l.trace.Name, TraceDigest: l.trace.Digest, EngineDigest: modelDigest(l.Engine), Requests: len(l.trace.Requests),
		Replicas: l.Replicas, CacheTokens: l.CacheTokens, Rate: l.Rate, Seed: l.Seed, Policies: []LabRow{},
	}
	r.InfiniteHit = l.trace.CacheBound(0, from, nil)
	var floor []float64
	r.PooledHit = l.pooled(func(i, cached int) {
		if i >= from {
			input := l.trace.Requests[i].Input
			steps := (input - cached + l.Engine.Budget - 1) / l.Engine.Budget
			floor = append(floor, float64(steps)*l.Engine.Base+max(l.Engine.Floor, l.Engine.PrefillTime(cached, input).Seconds()))
		}
	})
	r.FloorTTFT = mean(floor)
	return r
}

func modelDigest(m fakevllm.Model) string {
	data, err := json.Marshal(m)
	if err != nil {
		return err.Error() // infinite or not a number: Validate refuses it
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// pooled returns the hit of one LRU of all the fleet's memory, see CacheBound.
func (l *Lab) pooled(cached func(i, tokens int)) float64 {
	memory := 0.0
	for i := range l.Replicas {
		speed := 1.0
		if len(l.Speeds) > 0 {
			speed = min(l.Speeds[i%len(l.Speeds)], 1)
		}
		memory += speed * float64(l.CacheTokens)
	}
	return l.trace.CacheBound(max(1, int(memory/float64(l.trace.BlockTokens))), l.warmup(), cached)
}

// warmup returns the number of requests that are not measured.
func (l *Lab) warmup() int { return int(l.Warmup * float64(len(l.trace.Requests))) }

// Add takes a result into the report.
func (r *LabReport) Add(res *LabResult, goodput float64) {
	row := res.Row()
	row.Goodput = goodput
	r.Policies = append(r.Policies, row)
	for i := range res.Work {
		r.Detail = append(r.Detail, Replica{res.Policy, i, res.Work[i], res.InFlight[i]})
	}
}

func (r *LabReport) head() string {
	return fmt.Sprintf("%s x%v, %d requests (sha256 %.12s), %d replicas of %d cached tokens (engine %.12s), seed %d",
		r.Trace, r.Rate, r.Requests, r.TraceDigest, r.Replicas, r.CacheTokens, r.EngineDigest, r.Seed)
}

func (r *LabReport) bounds() string {
	return fmt.Sprintf("bounds: hit %.3f with one endless cache, %.3f with all memory pooled; TTFT %.3f s without queues", r.InfiniteHit, r.PooledHit, r.FloorTTFT)
}

// Markdown writes the report as a table for a page.
func (r *LabReport) Markdown(w io.Writer) {
	goodput := slices.ContainsFunc(r.Policies, func(p LabRow) bool { return p.Goodput > 0 })
	_, _ = fmt.Fprintf(w, "%s; %s.\n\n| policy | hit | predicted | TTFT mean | p50 | p90 | p99 | TPOT ms | SLO %% | in-flight CV | regret |%s\n| --- |%s\n",
		r.head(), r.bounds(), mdCell(goodput, " goodput |"), strings.Repeat(" ---: |", 10)+mdCell(goodput, " ---: |"))
	for _, p := range r.Policies {
		_, _ = fmt.Fprintf(w, "| %s | %.3f | %.3f | %.3f | %.3f | %.2f | %.2f | %.0f | %.1f | %.3f | %.2f |%s\n", p.Name, p.Hit, p.PredictedHit,
			p.TTFTMean, p.TTFTP50, p.TTFTP90, p.TTFTP99, 1000*p.TPOTMean, 100*p.SLO, p.InFlightCV, p.RegretWait+p.RegretFill,
			mdCell(goodput, fmt.Sprintf(" %.2f |", p.Goodput)))
	}
}

func mdCell(show bool, cell string) string {
	if show {
		return cell
	}
	return ""
}

// JSON writes the report as one object.
func (r *LabReport) JSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", " ")
	return enc.Encode(r)
}

// Table writes the report for people.
func (r *LabReport) Table(w io.Writer) {
	_, _ = fmt.Fprintf(w, "%s\n%s\n\n", r.head(), r.bounds())
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(tw, "policy\thit\tpredicted\tTTFT mean\tp50\tp90\tp99\tTPOT\tSLO\twork CV\tin-flight CV\tregret wait\tfill\tgoodput\t")
	for _, p := range r.Policies {
		goodput := "-"
		if p.Goodput > 0 {
			goodput = fmt.Sprintf("%.2f", p.Goodput)
		}
		_, _ = fmt.Fprintf(tw, "%s\t%.3f\t%.3f\t%.3f s\t%.3f\t%.2f\t%.2f\t%.0f ms\t%.1f %%\t%.3f\t%.3f\t%.2f s\t%.2f\t%s\t\n", p.Name, p.Hit, p.PredictedHit,
			p.TTFTMean, p.TTFTP50, p.TTFTP90, p.TTFTP99, 1000*p.TPOTMean, 100*p.SLO, p.WorkCV, p.InFlightCV, p.RegretWait, p.RegretFill, goodput)
	}
	_ = tw.Flush()
}

// Gate is one claim that the lab can check.
type Gate struct {
	ID         string           `json:"id"`
	Settings   []configs.Params `json:"settings"` // each over DefaultSetting
	Worst      bool             `json:"worst"`    // of several settings the worst value counts; false: their geometric mean
	Policy     string           `json:"policy"`
	Metric     string           `json:"metric"` // a column of the JSON report, or identical: two runs agree to the byte
	Op         string           `json:"op"`     // <= or >=
	Value      float64          `json:"value"`
	RelativeTo string           `json:"relative_to"` // a policy, or pooled (hits); empty: the metric itself
	Inside     float64          `json:"inside"`      // for goodput: the part that must meet the SLO
	Set        string           `json:"set"`         // ci, or hand (takes minutes)

	settings []Setting
}

// LoadGates reads a YAML file of gates.
func LoadGates(file string, data []byte) ([]Gate, error) {
	p, err := configs.ParseParams(file, data)
	if err != nil {
		return nil, err
	}
	var doc struct {
		Gates []Gate `json:"gates"`
	}
	if err := p.Decode(&doc); err != nil {
		return nil, err
	}
	var problems configs.Problems
	names := fieldNames()
	for i := range doc.Gates {
		g := &doc.Gates[i]
		at := func(field string) configs.Position { return p.At(fmt.Sprintf("gates[%d].%s", i, field)) }
		if g.Op != "<=" && g.Op != ">=" {
			problems.Add(at("op").Problem("use <= or >=", "unknown comparison %q", g.Op))
		}
		if g.Metric != "identical" && !slices.Contains(names, g.Metric) {
			problems.Add(at("metric").Problem(configs.Suggest(g.Metric, "metrics", names), "unknown metric %q", g.Metric))
		}
		if g.Set != "" && g.Set != "ci" && g.Set != "hand" {
			problems.Add(at("set").Problem("use ci or hand", "unknown set %q", g.Set))
		}
		if _, err := NamedPolicy(g.Policy, DefaultSetting().CacheTokens); err != nil {
			problems.Add(at("policy").Problem("", "%v", err))
		}
		if g.RelativeTo != "" && g.RelativeTo != "pooled" {
			if _, err := NamedPolicy(g.RelativeTo, DefaultSetting().CacheTokens); err != nil {
				problems.Add(at("relative_to").Problem("or use pooled", "%v", err))
			}
		}
		if len(g.Settings) == 0 {
			problems.Add(at("settings").Problem("list at least one", "no settings"))
		}
		for k, s := range g.Settings {
			setting := DefaultSetting()
			problems.Add(s.Decode(&setting))
			if err := setting.Validate(); err != nil {
				problems.Add(at(fmt.Sprintf("settings[%d]", k)).Problem("", "%v", err))
			}
			g.settings = append(g.settings, setting)
		}
	}
	return doc.Gates, problems.Err()
}

// fieldNames returns the numeric columns of LabRow.
func fieldNames() []string {
	var names []string
	t := reflect.TypeFor[LabRow]()
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		if t.Field(i).Type.Kind() == reflect.Float64 {
			names = append(names, name)
		}
	}
	return names
}

func (r LabRow) field(name string) float64 {
	v := reflect.ValueOf(r)
	for i := range v.NumField() {
		if tag, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ","); tag == name && v.Field(i).CanFloat() {
			return v.Field(i).Float()
		}
	}
	return math.NaN()
}

// GateResult is a checked gate.
type GateResult struct {
	Gate
	Measured float64
	OK       bool
}

// CheckGates runs what the gates need; runs are shared between gates.
func CheckGates(gates []Gate, progress func(what string)) ([]GateResult, error) {
	c := gateChecker{labs: map[string]*Lab{}, rows: map[string]LabRow{}, progress: progress}
	var out []GateResult
	for _, g := range gates {
		logs, worst := 0.0, math.NaN()
		for i, s := range g.settings {
			v, err := c.value(g, s)
			if err != nil {
				return nil, fmt.Errorf("gate %s: %w", g.ID, err)
			}
			logs += math.Log(v)
			if i == 0 || (v > worst) == (g.Op == "<=") {
				worst = v
			}
		}
		v := math.Exp(logs / float64(len(g.settings)))
		if g.Worst || len(g.settings) == 1 {
			v = worst
		}
		out = append(out, GateResult{g, v, g.Op == "<=" && v <= g.Value || g.Op == ">=" && v >= g.Value})
	}
	return out, nil
}

type gateChecker struct {
	labs     map[string]*Lab
	rows     map[string]LabRow
	progress func(string)
}

func (c *gateChecker) value(g Gate, s Setting) (float64, error) {
	if g.Metric == "identical" {
		return c.identical(s, g.Policy)
	}
	v, err := c.metric(g, s, g.Policy)
	if err != nil || g.RelativeTo == "" {
		return v, err
	}
	if g.RelativeTo == "pooled" {
		l, err := c.lab(s)
		if err != nil {
			return 0, err
		}
		return v / l.pooled(nil), nil
	}
	base, err := c.metric(g, s, g.RelativeTo)
	return v / base, err
}

func (c *gateChecker) lab(s Setting) (*Lab, error) {
	key := fmt.Sprintf("%+v", s)
	if l, ok := c.labs[key]; ok {
		return l, nil
	}
	l, err := NewLab(s)
	if err == nil {
		c.labs = map[string]*Lab{key: l} // one trace in memory
	}
	return l, err
}

func (c *gateChecker) metric(g Gate, s Setting, policy string) (float64, error) {
	key := fmt.Sprintf("%+v %s", s, policy)
	if g.Metric == "goodput" {
		key += " goodput"
	}
	row, ok := c.rows[key]
	if !ok {
		if c.progress != nil {
			c.progress(fmt.Sprintf("%s: %s x%v, %d replicas, %s", g.ID, s.Trace, s.Rate, s.Replicas, policy))
		}
		l, err := c.lab(s)
		if err != nil {
			return 0, err
		}
		if g.Metric == "goodput" {
			inside := g.Inside
			if inside == 0 {
				inside = 0.95
			}
			if row.Goodput, err = l.Goodput(policy, inside); err != nil {
				return 0, err
			}
		} else {
			res, err := l.Run(policy)
			if err != nil {
				return 0, err
			}
			row = res.Row()
		}
		c.rows[key] = row
	}
	return row.field(g.Metric), nil
}

// identical returns 1 when two runs give the same bytes, else 0.
func (c *gateChecker) identical(s Setting, policy string) (float64, error) {
	var texts []string
	for range 2 {
		l, err := NewLab(s)
		if err != nil {
			return 0, err
		}
		l.Load, l.Regret = true, 64
		res, err := l.Run(policy)
		if err != nil {
			return 0, err
		}
		data, err := json.Marshal(res)
		if err != nil {
			return 0, err
		}
		texts = append(texts, string(data))
	}
	if texts[0] != texts[1] {
		return 0, nil
	}
	return 1, nil
}

// PrintGates writes the results as a table, for a page or a terminal, and
// reports whether all hold.
func PrintGates(w io.Writer, results []GateResult, markdown bool) bool {
	const columns = 7
	rows := [][columns]string{{"gate", "settings", "policy", "metric", "measured", "goal", "verdict"}}
	all := true
	for _, r := range results {
		verdict := "ok"
		if !r.OK {
			verdict, all = "FAILED", false
		}
		metric := r.Metric
		if r.RelativeTo != "" {
			metric += " / " + r.RelativeTo
		}
		first := r.settings[0]
		settings := fmt.Sprintf("%s N=%d x%v", first.Trace, first.Replicas, first.Rate)
		if len(r.settings) > 1 {
			settings += fmt.Sprintf(" and %d more", len(r.settings)-1)
		}
		if r.Worst {
			settings += ", worst"
		}
		rows = append(rows, [columns]string{r.ID, settings, r.Policy, metric, fmt.Sprintf("%.3f", r.Measured), fmt.Sprintf("%s %v", r.Op, r.Value), verdict})
	}
	if markdown {
		rows = slices.Insert(rows, 1, [columns]string{"---", "---", "---", "---", "---:", "---:", "---"})
		for _, r := range rows {
			_, _ = fmt.Fprintf(w, "| %s |\n", strings.Join(r[:], " | "))
		}
		return all
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		_, _ = fmt.Fprintln(tw, strings.Join(r[:], "\t"))
	}
	_ = tw.Flush()
	return all
}
