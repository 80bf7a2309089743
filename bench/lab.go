package bench

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"go.uber.org/zap"

	"kvgate/bench/fakevllm"
	"kvgate/configs"
	"kvgate/routing"
)

// LabOptions describes one simulated fleet and how it is observed.
type LabOptions struct {
	Replicas    int
	CacheTokens int            // KV cache of one replica
	Engine      fakevllm.Model // its blocks are set from CacheTokens
	Speeds      []float64      // relative speed per replica, repeated; slower ones have as much less cache
	Scrape      time.Duration  // interval at which metrics are observed
	InstantLoad bool           // engines publish their queue at every arrival too, not only at the end of a step
	Gateways    int            // independent gateways, requests fall to them at random
	IndexTokens int64          // capacity that engines report; 0: the truth
	Warmup      float64        // part of the requests that is not measured
	Seed        uint64
	HashContent bool                 // hash real bytes for every block instead of taking derived hashes
	Regret      int                  // compare every n-th choice with the best; 0: never
	Late        int                  // stop when more requests than this have missed the SLO; 0: never
	Load        bool                 // sample the requests in flight
	Stopwatch   func() time.Duration // wall clock, to time the choices; nil: not timed
	Progress    func(done, all int)
}

// Policy is a way to choose: a scheduling configuration, or the clairvoyant
// oracle of the lab.
type Policy struct {
	Name   string
	Config *configs.Scheduling // nil: the oracle
	Text   string              // the configuration as YAML, of a named policy but the default and the oracle
	Stall  float64             // oracle: how much worse own prefill is than waiting (b)
}

// virtualTime is the lab's clock: it moves from event to event.
type virtualTime struct{ t time.Duration }

var labEpoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func (v *virtualTime) now() time.Time { return labEpoch.Add(v.t) }

type eventKind uint8

const (
	stepEnds eventKind = iota
	scrapes
	loadSamples
)

type event struct {
	at      time.Duration
	kind    eventKind
	replica int32
}

func (e event) before(o event) bool {
	if e.at != o.at {
		return e.at < o.at
	}
	if e.kind != o.kind {
		return e.kind < o.kind
	}
	return e.replica < o.replica
}

// eventHeap is a binary heap: one pending step and one pending scrape per replica.
type eventHeap []event

func (h *eventHeap) push(e event) {
	*h = append(*h, e)
	s := *h
	for i := len(s) - 1; i > 0; {
		up := (i - 1) / 2
		if !s[i].before(s[up]) {
			break
		}
		s[i], s[up] = s[up], s[i]
		i = up
	}
}

func (h *eventHeap) pop() event {
	s := *h
	top := s[0]
	last := len(s) - 1
	s[0] = s[last]
	s = s[:last]
	for i := 0; ; {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < len(s); c++ {
			if s[c].before(s[least]) {
				least = c
			}
		}
		if least == i {
			break
		}
		s[i], s[least] = s[least], s[i]
		i = least
	}
	*h = s
	return top
}

// flight is one request on its way.
type flight struct {
	index   int
	request *routing.Request
	lease   *routing.Lease
	first   time.Duration
	hashes  []uint64 // memory of the router's hashes
	blocks  []uint64 // names of the engine's blocks
}

type labReplica struct {
	engine *fakevllm.Engine
	byID   []*flight // by slot of the engine's sequence
	ends   time.Duration
	inStep bool
	busy   time.Duration
	work   float64       // seconds of prefill computed
	count  int           // requests in flight
	open   time.Duration // integral of requests in flight
}

type labGateway struct {
	fleet  *routing.Fleet
	router *routing.Router
}

type lab struct {
	o        LabOptions
	trace    *Trace
	policy   Policy
	clock    virtualTime
	rnd      *rand.Rand
	replicas []*labReplica
	gateways []labGateway
	events   eventHeap
	free     []*flight
	out      *LabResult
	from     int // first measured request
	all      int // choices that were compared with the best
	late     int // measured requests that have missed the SLO
	ended    int
}

// LabResult is one policy over one trace, raw.
type LabResult struct {
	Policy    string
	TTFT      []float64 // seconds, measured requests in the order of arrival
	TPOT      []float64 // seconds, of those with more than one token
	E2E       []float64
	Arrivals  []time.Duration
	InSLO     int
	Measured  int
	Prompt    int64 // tokens
	Cached    int64
	Predicted int64
	PredError int64 // sum of |predicted - cached|
	Work      []float64
	InFlight  []float64   // mean requests in flight per replica
	RegretW   float64     // seconds of waiting lost against the best choice, mean
	RegretP   float64     // seconds of prefill lost, mean
	Load      [][]float32 // per replica: requests in flight, one sample per loadSample
	Duration  time.Duration
	Routed    time.Duration // wall-clock time spent in Route, when LabOptions.Stopwatch is set
}

// slo is the limit of a time to first token: 2 s and three times the linear prefill time.
func (l *lab) slo(input int) float64 {
	return 2 + 3*float64(input)*l.o.Engine.Prefill
}

// RunLab replays a trace against one policy: the routing code that serves, over
// simulated engines, in virtual time. The same options give the same result.
func RunLab(t *Trace, p Policy, o LabOptions) (*LabResult, error) {
	if o.Replicas < 1 || o.Scrape <= 0 || o.Gateways < 1 || o.Warmup < 0 || o.Warmup >= 1 {
		return nil, fmt.Errorf("lab: replicas %d, scrape %v, gateways %d, warm-up %v: at least 1, above 0, at least 1 and 0 to 1 are needed", o.Replicas, o.Scrape, o.Gateways, o.Warmup)
	}
	l := &lab{o: o, trace: t, policy: p, rnd: rand.New(rand.NewPCG(o.Seed, 0x6c61625f726e6421))}
	l.from = int(o.Warmup * float64(len(t.Requests)))
	n := len(t.Requests) - l.from
	l.out = &LabResult{Policy: p.Name, TTFT: make([]float64, n), E2E: make([]float64, n), Arrivals: make([]time.Duration, n), Measured: n}
	for i := range o.Replicas {
		m := o.Engine
		speed := 1.0
		if len(o.Speeds) > 0 {
			speed = o.Speeds[i%len(o.Speeds)]
		}
		m.Speed, m.BlockTokens = speed, t.BlockTokens
		m.Blocks = int(float64(o.CacheTokens) * min(speed, 1) / float64(t.BlockTokens))
		if err := m.Validate(); err != nil {
			return nil, fmt.Errorf("lab: %w", err)
		}
		l.replicas = append(l.replicas, &labReplica{engine: fakevllm.NewEngine(m)})
	}
	if p.Config != nil {
		if err := l.buildGateways(); err != nil {
			return nil, err
		}
	}
	if err := l.run(); err != nil {
		return nil, err
	}
	return l.finish(), nil
}

func (l *lab) buildGateways() error {
	var specs []routing.EndpointSpec
	for i := range l.replicas {
		specs = append(specs, routing.EndpointSpec{Name: fmt.Sprintf("r%03d", i), URL: fmt.Sprintf("http://r%03d", i)})
	}
	for g := range l.o.Gateways {
		fleet := routing.NewFleet(l.clock.now, 2*time.Second+2*l.o.Scrape, zap.NewNop())
		fleet.Update(specs)
		router, err := routing.New(l.policy.Config, fleet, l.o.Seed+uint64(g))
		if err != nil {
			return err
		}
		l.gateways = append(l.gateways, labGateway{fleet, router})
		for i := range l.replicas {
			l.observe(g, i)
		}
	}
	for i := range l.replicas {
		phase := l.o.Scrape * time.Duration(i) / time.Duration(len(l.replicas))
		l.events.push(event{at: phase, kind: scrapes, replica: int32(i)})
	}
	return nil
}

// engineBlock is the block size that the simulated replicas report: vLLM's usual
// one. The engine itself works in the trace's blocks.
const engineBlock = 16

func (l *lab) observe(g, i int) {
	r := l.replicas[i]
	s := r.engine.Stats()
	capacity := l.o.IndexTokens
	if capacity == 0 {
		capacity = int64(r.engine.Model().CapacityTokens())
	}
	if l.o.InstantLoad {
		s.Waiting = r.count - s.Running
	}
	m := routing.Metrics{
		Waiting: float64(s.Waiting), Running: float64(s.Running), KVUsage: s.KVUsage,
		BlockTokens: engineBlock, CapacityTokens: capacity,
	}
	l.gateways[g].fleet.Endpoints()[i].Observe(m, l.clock.now())
}

// loadSample is the time between two samples of the requests in flight.
const loadSample = 5 * time.Second

func (l *lab) run() error {
	next := 0
	if l.o.Load {
		l.out.Load = make([][]float32, len(l.replicas))
		l.events.push(event{kind: loadSamples})
	}
	total := len(l.trace.Requests)
	for next < total || l.ended < total {
		if next < total && (len(l.events) == 0 || l.trace.Requests[next].At < l.events[0].at) {
			l.clock.t = l.trace.Requests[next].At
			if err := l.arrive(next); err != nil {
				return err
			}
			next++
			if l.o.Progress != nil && next%256 == 0 {
				l.o.Progress(next, total)
			}
			continue
		}
		if len(l.events) == 0 {
			return fmt.Errorf("lab: %d requests never ended", total-l.ended)
		}
		if l.o.Late > 0 && l.late > l.o.Late {
			break
		}
		e := l.events.pop()
		l.clock.t = e.at
		switch e.kind {
		case scrapes:
			for g := range l.gateways {
				l.observe(g, int(e.replica))
			}
			l.events.push(event{at: e.at + l.o.Scrape, kind: scrapes, replica: e.replica})
		case loadSamples:
			for i, r := range l.replicas {
				l.out.Load[i] = append(l.out.Load[i], float32(r.count))
			}
			l.events.push(event{at: e.at + loadSample, kind: loadSamples})
		case stepEnds:
			l.stepEnd(int(e.replica))
		}
	}
	l.out.Duration = l.clock.t
	return nil
}

// arrive routes one request and queues it at the replica.
func (l *lab) arrive(i int) error {
	t := &l.trace.Requests[i]
	f := l.take()
	f.index = i
	f.blocks = l.trace.blockNames(f.blocks[:0], i)
	replica := 0
	if l.policy.Config == nil {
		replica, _ = l.best(t, l.policy.Stall)
	} else {
		g := 0
		if len(l.gateways) > 1 {
			g = l.rnd.IntN(len(l.gateways))
		}
		l.prompt(f, t)
		start := l.watch()
		lease, err := l.gateways[g].router.Route(f.request)
		l.out.Routed += l.watch() - start
		if err != nil {
			return fmt.Errorf("lab: request %d: %w", i, err)
		}
		f.lease = lease
		replica = lease.Endpoint.Slot()
	}
	if l.o.Regret > 0 && i >= l.from && i%l.o.Regret == 0 {
		l.regret(t, replica)
	}
	r := l.replicas[replica]
	id, err := r.engine.Add(fakevllm.Sequence{Hashes: f.blocks, PromptTokens: t.Input, OutputTokens: max(t.Output, 1)})
	if err != nil {
		return fmt.Errorf("lab: request %d: %w", i, err)
	}
	for len(r.byID) <= id.Slot() {
		r.byID = append(r.byID, nil)
	}
	r.byID[id.Slot()] = f
	r.count++
	if !r.inStep {
		l.begin(replica)
	}
	l.instant(replica)
	return nil
}

// instant publishes a replica's load out of turn.
func (l *lab) instant(i int) {
	if l.o.InstantLoad {
		for g := range l.gateways {
			l.observe(g, i)
		}
	}
}

func (l *lab) watch() time.Duration {
	if l.o.Stopwatch == nil {
		return 0
	}
	return l.o.Stopwatch()
}

func (l *lab) take() *flight {
	if n := len(l.free); n > 0 {
		f := l.free[n-1]
		l.free = l.free[:n-1]
		return f
	}
	return &flight{request: &routing.Request{}}
}

// prompt gives the request the trace's prompt: a router block of 64 tokens for
// every 64 tokens, the tail included.
func (l *lab) prompt(f *flight, t *TraceRequest) {
	req := f.request
	req.Reset()
	req.Model = labModel
	n := (t.Input + routerBlock - 1) / routerBlock
	if l.o.HashContent {
		for b := 0; b < n; b++ {
			rnd := rand.NewPCG(l.trace.routerBlock(t, b), 0x626c6f636b)
			tokens := min(routerBlock, t.Input-b*routerBlock)
			for k := 0; k < tokens; k += 2 {
				v := rnd.Uint64()
				req.Tokens = append(req.Tokens, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
				if k+1 < tokens {
					req.Tokens = append(req.Tokens, byte(v>>32), byte(v>>40), byte(v>>48), byte(v>>56))
				}
			}
		}
		req.Ends = append(req.Ends, len(req.Tokens))
		return
	}
	f.hashes = f.hashes[:0]
	for b := 0; b < n; b++ {
		h := l.trace.routerBlock(t, b)
		if tail := t.Input - b*routerBlock; tail < routerBlock {
			h ^= uint64(tail) << 56 // a partial block is another block
		}
		f.hashes = append(f.hashes, mix(h))
	}
	req.SetChain(int64(t.Input), f.hashes)
}

var labModel = []byte("m")

// routerBlock is the router's block size in tokens.
const routerBlock = 64

// routerBlock names router block b of a prompt: by the trace's id and the place
// in that block or, where several ids fill a router block, by the last of them.
// Ids of a trace are chained already. Past its ids a prompt is unlike any other.
func (t *Trace) routerBlock(r *TraceRequest, b int) uint64 {
	if per := t.BlockTokens / routerBlock; per > 0 {
		if b/per < len(r.Blocks) {
			return r.Blocks[b/per]*uint64(per) + uint64(b%per)
		}
	} else if last := min((b+1)*routerBlock, r.Input+t.BlockTokens-1)/t.BlockTokens - 1; last < len(r.Blocks) {
		return r.Blocks[last]
	}
	return mix(uint64(r.At)) + uint64(b)
}

// mix is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func (l *lab) begin(i int) {
	r := l.replicas[i]
	d, ok := r.engine.Begin()
	r.inStep = ok
	if !ok {
		return
	}
	r.ends = l.clock.t + d
	r.busy += d
	l.events.push(event{at: r.ends, kind: stepEnds, replica: int32(i)})
}

func (l *lab) stepEnd(i int) {
	r := l.replicas[i]
	res := r.engine.End()
	for _, first := range res.First {
		f := r.byID[first.ID.Slot()]
		l.firstToken(f, first.Cached)
		t := &l.trace.Requests[f.index]
		r.work += r.engine.Model().PrefillTime(first.Cached, t.Input).Seconds()
	}
	for _, id := range res.Finished {
		l.done(i, r.byID[id.Slot()])
		r.byID[id.Slot()] = nil
	}
	l.instant(i)
	l.begin(i)
}

func (l *lab) firstToken(f *flight, cached int) {
	f.first = l.clock.t
	t := &l.trace.Requests[f.index]
	predicted := int64(0)
	if f.lease != nil {
		predicted = f.lease.PredictedTokens()
		f.lease.FirstToken()
		f.lease.Usage(int64(t.Input), int64(cached))
	}
	if f.index < l.from {
		return
	}
	k := f.index - l.from
	ttft := (l.clock.t - t.At).Seconds()
	l.out.TTFT[k], l.out.Arrivals[k] = ttft, t.At
	if ttft <= l.slo(t.Input) {
		l.out.InSLO++
	} else {
		l.late++
	}
	l.out.Prompt += int64(t.Input)
	l.out.Cached += int64(cached)
	l.out.Predicted += predicted
	if d := predicted - int64(cached); d < 0 {
		l.out.PredError -= d
	} else {
		l.out.PredError += d
	}
}

func (l *lab) done(i int, f *flight) {
	t := &l.trace.Requests[f.index]
	l.replicas[i].open += l.clock.t - t.At
	l.replicas[i].count--
	if f.lease != nil {
		f.lease.Done(routing.Completed)
		f.lease = nil
	}
	l.ended++
	if f.index >= l.from {
		l.out.E2E[f.index-l.from] = (l.clock.t - t.At).Seconds()
		if t.Output > 1 {
			l.out.TPOT = append(l.out.TPOT, (l.clock.t-f.first).Seconds()/float64(t.Output-1))
		}
	}
	l.free = append(l.free, f)
}

// wait and prefill are what a request would truly cost at a replica now.
func (l *lab) truth(t *TraceRequest, i int) (wait, prefill float64) {
	r := l.replicas[i]
	if r.inStep {
		wait = (r.ends - l.clock.t).Seconds()
	}
	m := r.engine.Model()
	wait += r.engine.Backlog().Seconds()
	return wait, m.PrefillTime(r.engine.CachedTokens(t.Blocks, t.Input), t.Input).Seconds()
}

// best is the clairvoyant greedy choice: least true waiting + (1+stall) x true prefill.
func (l *lab) best(t *TraceRequest, stall float64) (replica int, cost float64) {
	ties := 0
	for i := range l.replicas {
		wait, prefill := l.truth(t, i)
		c := wait + (1+stall)*prefill
		switch {
		case i == 0 || c < cost:
			replica, cost, ties = i, c, 1
		case c == cost:
			if ties++; l.rnd.IntN(ties) == 0 {
				replica = i
			}
		}
	}
	return replica, cost
}

func (l *lab) regret(t *TraceRequest, chosen int) {
	best, _ := l.best(t, 0)
	w, p := l.truth(t, chosen)
	bw, bp := l.truth(t, best)
	l.out.RegretW += w - bw
	l.out.RegretP += p - bp
	l.all++
}

func (l *lab) finish() *LabResult {
	for _, r := range l.replicas {
		l.out.Work = append(l.out.Work, r.work)
		l.out.InFlight = append(l.out.InFlight, r.open.Seconds()/max(l.clock.t.Seconds(), 1e-9))
	}
	if l.all > 0 {
		l.out.RegretW /= float64(l.all)
		l.out.RegretP /= float64(l.all)
	}
	return l.out
}

// labProfiles are the policies that can be named. All but the oracle are
// scheduling configurations of the product.
var labProfiles = []struct{ name, plugins string }{
	{"random", "[{type: random-picker}]"},
	{"round-robin", "[{type: round-robin-picker}]"},
	{"least-request", "[{type: least-request-scorer}]"},
	{"consistent-hash", "[{type: consistent-hash-scorer, parameters: {prefixBlocks: 16}}]"}, // 1,024 tokens: chats share the first 512
	{"lmetric", "[{type: lmetric-scorer}]"},
	{"llm-d-default", ""}, // needs the cache size: see NamedPolicy
	{"default-inline", "default"},
	{"expected-cost", "[{type: expected-cost-scorer}]"},
	{"expected-cost-uniform", "[{type: expected-cost-scorer, parameters: {drainPriorTokens: 0}}]"},
}

// PolicyNames returns the names that NamedPolicy knows.
func PolicyNames() []string {
	var names []string
	for _, p := range labProfiles {
		if p.name != "expected-cost-uniform" { // for one gate
			names = append(names, p.name)
		}
	}
	return append(names, "oracle")
}

// NamedPolicy returns a policy by name, or the scheduling configuration in a file.
// llm-d-default is llm-d's default profile as it behaves there: scraped load only,
// and an index that takes the engine's block count (16 tokens each) for its own
// 64-token blocks.
func NamedPolicy(name string, cacheTokens int) (Policy, error) {
	const head = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
	if name == "oracle" {
		return Policy{Name: name, Stall: 2}, nil
	}
	i := slices.IndexFunc(labProfiles, func(p struct{ name, plugins string }) bool { return p.name == name })
	if i < 0 {
		cfg, err := configs.LoadScheduling(name)
		if err != nil {
			return Policy{}, fmt.Errorf("policy %s is neither one of %v nor a scheduling file: %w", name, PolicyNames(), err)
		}
		return Policy{Name: name, Config: cfg}, nil
	}
	text := head + "plugins: " + labProfiles[i].plugins + "\n"
	switch name {
	case "default-inline":
		return Policy{Name: name, Config: configs.DefaultScheduling()}, nil
	case "llm-d-default":
		text = head + fmt.Sprintf(`plugins:
- {type: queue-scorer, parameters: {load: scraped}}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
- {type: approx-prefix-cache-producer, parameters: {autoTune: false, blockSizeTokens: 64, lruCapacityPerServer: %d}}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
`, cacheTokens/engineBlock)
	}
	cfg, err := configs.ParseScheduling(name, []byte(text))
	return Policy{Name: name, Config: cfg, Text: text}, err
}

// LabRow is a policy's result as a line of the table. Times are seconds, hits
// and the SLO are fractions.
type LabRow struct {
	Name         string  `json:"name"`
	Requests     int     `json:"requests"`
	Hit          float64 `json:"hit"`           // cached over prompt tokens
	PredictedHit float64 `json:"predicted_hit"` // predicted over prompt tokens
	HitError     float64 `json:"hit_error"`     // sum of |predicted - cached| over prompt tokens
	TTFTMean     float64 `json:"ttft_mean"`
	TTFTP50      float64 `json:"ttft_p50"`
	TTFTP90      float64 `json:"ttft_p90"`
	TTFTP99      float64 `json:"ttft_p99"`
	TPOTMean     float64 `json:"tpot_mean"`
	E2EP90       float64 `json:"e2e_p90"`
	SLO          float64 `json:"slo"`         // part of the requests inside 2 s + 3 x linear prefill time
	WorkCV       float64 `json:"work_cv"`     // prefill work over replicas, standard deviation over mean
	WorkMax      float64 `json:"work_max"`    // largest over mean
	InFlightCV   float64 `json:"inflight_cv"` // mean requests in flight over replicas
	RegretWait   float64 `json:"regret_wait"` // seconds of waiting against the truly best choice, mean
	RegretFill   float64 `json:"regret_prefill"`
	Goodput      float64 `json:"goodput,omitempty"` // highest rate with the asked part inside the SLO
}

// Row sums the result up.
func (r *LabResult) Row() LabRow {
	row := LabRow{
		Name: r.Policy, Requests: r.Measured, TTFTMean: mean(r.TTFT), TPOTMean: mean(r.TPOT),
		SLO: float64(r.InSLO) / float64(max(r.Measured, 1)), RegretWait: r.RegretW, RegretFill: r.RegretP,
	}
	if r.Prompt > 0 {
		row.Hit = float64(r.Cached) / float64(r.Prompt)
		row.PredictedHit = float64(r.Predicted) / float64(r.Prompt)
		row.HitError = float64(r.PredError) / float64(r.Prompt)
	}
	sorted := slices.Sorted(slices.Values(r.TTFT))
	row.TTFTP50, row.TTFTP90, row.TTFTP99 = rank(sorted, .5), rank(sorted, .9), rank(sorted, .99)
	row.E2EP90 = rank(slices.SortedFunc(slices.Values(r.E2E), cmp.Compare[float64]), .9)
	row.WorkCV, row.WorkMax = spread(r.Work)
	row.InFlightCV, _ = spread(r.InFlight)
	return row
}
