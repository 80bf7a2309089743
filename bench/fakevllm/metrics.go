package fakevllm

import (
	"math"
	"strconv"
	"strings"
	"time"
)

// finishReasons are the values of the label of vllm:request_success_total.
var finishReasons = [...]string{"stop", "length", "abort", "error", "repetition"}

// pageStats is what /metrics shows beside the engine's own numbers. Guarded by
// Server.mu.
type pageStats struct {
	success  [len(finishReasons)]int64
	rejected int64
	prompt   int64 // tokens that no engine saw
	output   int64

	last       time.Time // end of the last step
	ttft       histogram
	inter      histogram
	endToEnd   histogram
	promptSize histogram
	outputSize histogram
	iteration  histogram
}

func (p *pageStats) init() {
	p.ttft.bounds = []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	p.inter.bounds = []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	p.endToEnd.bounds = []float64{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	sizes := []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}
	p.promptSize.bounds, p.outputSize.bounds = sizes, sizes
	p.iteration.bounds = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
	for _, h := range []*histogram{&p.ttft, &p.inter, &p.endToEnd, &p.promptSize, &p.outputSize, &p.iteration} {
		h.counts = make([]int64, len(h.bounds)+1)
	}
}

type histogram struct {
	bounds []float64
	counts []int64
	sum    float64
	n      int64
}

func (h *histogram) observe(v float64, times int) {
	if times == 0 {
		return
	}
	i := 0
	for i < len(h.bounds) && v > h.bounds[i] {
		i++
	}
	h.counts[i] += int64(times)
	h.n += int64(times)
	h.sum += v * float64(times)
}

// step notes the end of a step in which so many sequences decoded.
func (p *pageStats) step(tokens int, now time.Time, decodes int) {
	p.iteration.observe(float64(tokens), 1)
	if !p.last.IsZero() {
		p.inter.observe(now.Sub(p.last).Seconds(), decodes)
	}
	p.last = now
}

func (p *pageStats) firstToken(after time.Duration, prompt int) {
	p.ttft.observe(after.Seconds(), 1)
	p.promptSize.observe(float64(prompt), 1)
}

func (p *pageStats) finished(reason string, after time.Duration, output int) {
	p.endToEnd.observe(after.Seconds(), 1)
	p.outputSize.observe(float64(output), 1)
	for i, r := range finishReasons {
		if r == reason {
			p.success[i]++
		}
	}
}

// outside counts an answer if the engine had no part in it.
func (s *Server) outside(a *answer) {
	if a.choices[0].id != 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.metrics.prompt += int64(a.promptTokens)
	for _, c := range a.choices {
		s.metrics.output += int64(c.tokens())
		s.metrics.finished(c.finish, 0, c.tokens())
	}
}

// rejected counts a request that found the queue full.
func (s *Server) rejected() {
	s.mu.Lock()
	s.metrics.rejected++
	s.mu.Unlock()
}

// page writes the text format.
type page struct {
	b      []byte
	labels string // engine="0",model_name="m"
	model  string // model_name="m"
}

func (p *page) family(name, kind string) {
	p.b = append(append(append(p.b, "# HELP "...), name...), " As vLLM's metric of this name.\n# TYPE "...)
	p.b = append(append(append(append(p.b, name...), ' '), kind...), '\n')
}

func (p *page) sample(name, labels string, v float64) {
	p.b = append(append(append(append(p.b, name...), '{'), labels...), "} "...)
	p.b = append(appendNumber(p.b, v), '\n')
}

func (p *page) counter(name string, v float64) {
	p.family(name, "counter")
	p.sample(name, p.labels, v)
}

func (p *page) histogram(name string, h *histogram) {
	p.family(name, "histogram")
	n := int64(0)
	for i, c := range h.counts {
		n += c
		bound := "+Inf"
		if i < len(h.bounds) {
			bound = string(appendNumber(nil, h.bounds[i]))
		}
		// Labels come in the order of the alphabet: engine, le, model_name.
		engine, _, _ := strings.Cut(p.labels, ",")
		p.sample(name+"_bucket", engine+`,le="`+bound+`",`+p.model, float64(n))
	}
	p.sample(name+"_count", p.labels, float64(h.n))
	p.sample(name+"_sum", p.labels, h.sum)
}

// appendNumber writes a number as Python's client does: 3.0, 1.5e+06.
func appendNumber(dst []byte, v float64) []byte {
	switch {
	case math.IsNaN(v):
		return append(dst, "NaN"...)
	case math.Abs(v) >= 1e6:
		return strconv.AppendFloat(dst, v, 'e', -1, 64)
	}
	n := len(dst)
	dst = strconv.AppendFloat(dst, v, 'f', -1, 64)
	for _, c := range dst[n:] {
		if c == '.' {
			return dst
		}
	}
	return append(dst, ".0"...)
}

// metricsPage renders /metrics, with the faults that concern its contents.
func (s *Server) metricsPage(f *Faults) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.engine.Stats()
	pin := func(truth float64, pinned *float64) float64 {
		switch {
		case f.Metrics == MetricsNaN:
			return math.NaN()
		case pinned != nil:
			return *pinned
		}
		return truth
	}
	running, waiting, usage := pin(float64(e.Running), f.MetricsRunning), pin(float64(e.Waiting), f.MetricsWaiting), pin(e.KVUsage, f.MetricsKVUsage)
	model := `model_name=` + string(appendString(nil, s.opt.Models[0]))
	p := &page{b: make([]byte, 0, 16<<10), model: model, labels: `engine="0",` + model}
	engines := []string{p.labels}
	if f.Metrics == MetricsTwoEngines {
		engines = []string{p.labels, `engine="1",` + model}
	}
	gauge := func(name string, v float64) {
		p.family(name, "gauge")
		for i, labels := range engines {
			if i < len(engines)-1 {
				p.sample(name, labels, 0)
				continue
			}
			p.sample(name, labels, v)
		}
		if f.Metrics == MetricsTwoModels {
			other := 99.0
			if strings.HasSuffix(name, "_perc") {
				other = 1
			}
			p.sample(name, `engine="0",model_name="other"`, other)
		}
	}
	if f.Metrics != MetricsNone {
		gauge("vllm:num_requests_running", running)
		gauge("vllm:num_requests_waiting", waiting)
		p.family("vllm:num_requests_waiting_by_reason", "gauge")
		p.sample("vllm:num_requests_waiting_by_reason", p.labels+`,reason="capacity"`, waiting)
		p.sample("vllm:num_requests_waiting_by_reason", p.labels+`,reason="deferred"`, 0)
		if f.Metrics != MetricsOld {
			gauge("vllm:kv_cache_usage_perc", usage)
		}
		if f.Metrics == MetricsOld || f.Metrics == MetricsBoth {
			gauge("vllm:gpu_cache_usage_perc", usage)
		}
	}
	extra := float64(s.metrics.prompt)
	p.counter("vllm:prefix_cache_queries_total", float64(e.QueryTokens)+extra)
	p.counter("vllm:prefix_cache_hits_total", float64(e.HitTokens))
	p.counter("vllm:num_preemptions_total", 0)
	p.counter("vllm:prompt_tokens_total", float64(e.PromptTokens)+extra)
	p.counter("vllm:prompt_tokens_cached_total", float64(e.CachedTokens))
	p.counter("vllm:generation_tokens_total", float64(e.GenerationTokens+s.metrics.output))
	p.family("vllm:request_success_total", "counter")
	for i, reason := range finishReasons {
		p.sample("vllm:request_success_total", `engine="0",finished_reason="`+reason+`",`+model, float64(s.metrics.success[i]))
	}
	p.family("vllm:admission_rejections_total", "counter")
	p.sample("vllm:admission_rejections_total", model+`,reason="max_num_queued_reqs"`, float64(s.metrics.rejected))
	p.histogram("vllm:request_prompt_tokens", &s.metrics.promptSize)
	p.histogram("vllm:request_generation_tokens", &s.metrics.outputSize)
	p.histogram("vllm:iteration_tokens_total", &s.metrics.iteration)
	p.histogram("vllm:time_to_first_token_seconds", &s.metrics.ttft)
	p.histogram("vllm:inter_token_latency_seconds", &s.metrics.inter)
	p.histogram("vllm:e2e_request_latency_seconds", &s.metrics.endToEnd)
	if len(s.opt.Models) > 1 {
		p.family("vllm:lora_requests_info", "gauge")
		in, queued := s.adapters()
		p.sample("vllm:lora_requests_info", `max_lora="`+strconv.Itoa(len(s.opt.Models)-1)+`",running_lora_adapters="`+in+`",waiting_lora_adapters="`+queued+`"`, float64(time.Now().Unix()))
	}
	p.family("vllm:cache_config_info", "gauge")
	for i := range engines {
		m := s.opt.Engine
		p.sample("vllm:cache_config_info", `block_size="`+strconv.Itoa(m.BlockTokens)+`",cache_dtype="auto",enable_prefix_caching="True",engine="`+strconv.Itoa(i)+
			`",gpu_memory_utilization="0.92",kv_cache_size_tokens="`+strconv.Itoa(m.CapacityTokens())+`",num_cpu_blocks="None",num_gpu_blocks="`+strconv.Itoa(m.Blocks)+
			`",prefix_caching_hash_algo="xxhash",sliding_window="None"`, 1)
	}
	return p.b
}

// adapters lists the LoRA adapters in the batch and in the queue, in the order
// of Options.Models. The caller holds mu.
func (s *Server) adapters() (running, waiting string) {
	in, queued := make([]bool, len(s.opt.Models)), make([]bool, len(s.opt.Models))
	for _, c := range s.calls {
		if c == nil {
			continue
		}
		for i, m := range s.opt.Models {
			if m == c.model && i > 0 {
				q := s.engine.get(c.id)
				in[i] = in[i] || q != nil && q.phase != inQueue
				queued[i] = queued[i] || q != nil && q.phase == inQueue
			}
		}
	}
	join := func(set []bool) string {
		var names []string
		for i, ok := range set {
			if ok {
				names = append(names, s.opt.Models[i])
			}
		}
		return strings.Join(names, ",")
	}
	return join(in), join(queued)
}
