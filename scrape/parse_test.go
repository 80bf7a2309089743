package scrape

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"kvgate/routing"
)

// allEngines returns the built-in engines, vllm first.
func allEngines() []*engine {
	var all []*engine
	for i := range builtin {
		all = append(all, builtin[i].compile(nil))
	}
	return all
}

// say renders what a page says; NaN is equal to NaN this way.
func say(e *engine, m routing.Metrics, missing values) string {
	if e == nil {
		return "nothing"
	}
	var names []string
	for v := range valueCount {
		if missing.has(v) {
			names = append(names, valueNames[v])
		}
	}
	return fmt.Sprintf("%s: waiting %v running %v usage %.4g block %d capacity %d running adapters %q waiting adapters %q max %d missing %v",
		e.name, m.Waiting, m.Running, m.KVUsage, m.BlockTokens, m.CapacityTokens, m.RunningAdapters, m.WaitingAdapters, m.MaxAdapters, names)
}

func readPage(t testing.TB, name string) []byte {
	t.Helper()
	page, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return page
}

// bigPage returns a page of the size that vLLM has after some use: 70 KB, mostly histograms.
func bigPage(t testing.TB) []byte {
	page := readPage(t, "vllm.txt")
	const family = "vllm:time_to_first_token_seconds"
	from := bytes.Index(page, []byte("# HELP "+family))
	to := bytes.Index(page, []byte("# HELP vllm:cache_config_info"))
	out := bytes.Clone(page[:to])
	for i := 0; len(out)+len(page)-to < 69_000; i++ {
		out = append(out, bytes.ReplaceAll(page[from:to], []byte(family), fmt.Appendf(nil, "vllm:request_phase_%d_seconds", i))...)
	}
	return append(out, page[to:]...)
}

func TestReadPage(t *testing.T) {
	const (
		none = `running adapters [] waiting adapters [] max 0`
		info = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\"} 1\n"
		rest = "vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.25\n" + info
	)
	f := func(t *testing.T, page string, models []string, want string) {
		t.Helper()
		var r reader
		if got := say(r.read([]byte(page), allEngines(), models)); got != want {
			t.Errorf("page\n%s\ngot  %s\nwant %s", page, got, want)
		}
	}
	vllm := func(waiting, running, usage, missing string) string {
		return fmt.Sprintf("vllm: waiting %s running %s usage %s block 16 capacity 1600 %s missing [%s]", waiting, running, usage, none, missing)
	}
	t.Run("vLLM", func(t *testing.T) {
		f(t, string(readPage(t, "vllm.txt")), []string{"smollm2"}, "vllm: waiting 0 running 0 usage 0 block 32 capacity 8192 "+none+" missing []")
		f(t, string(bigPage(t)), []string{"smollm2"}, "vllm: waiting 0 running 0 usage 0 block 32 capacity 8192 "+none+" missing []")
		f(t, "vllm:num_requests_waiting 3\n"+rest, nil, vllm("3", "1", "0.25", ""))
	})
	t.Run("the former name of the KV usage", func(t *testing.T) {
		f(t, "vllm:num_requests_waiting 3\nvllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5\n"+info, nil, vllm("3", "1", "0.5", ""))
		f(t, "vllm:num_requests_waiting 3\nvllm:gpu_cache_usage_perc 0.5\n"+rest, nil, vllm("3", "1", "0.25", ""))
	})
	t.Run("several engines of one replica", func(t *testing.T) {
		f(t, `vllm:num_requests_waiting{engine="0"} 0
vllm:num_requests_waiting{engine="1"} 9
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_running{engine="1"} 3
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.6
vllm:cache_config_info{engine="0",block_size="16",kv_cache_size_tokens="700",num_gpu_blocks="50"} 1
vllm:cache_config_info{engine="1",block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="50"} 1
`, nil, "vllm: waiting 9 running 5 usage 0.4 block 16 capacity 1500 "+none+" missing []")
	})
	t.Run("several models", func(t *testing.T) {
		page := `vllm:num_requests_waiting{engine="0",model_name="draft"} 100
vllm:num_requests_waiting{engine="0",model_name="big"} 1
vllm:num_requests_waiting{engine="1",model_name="big"} 2
` + rest
		f(t, page, []string{"adapter", "big"}, vllm("3", "1", "0.25", ""))
		f(t, page, nil, vllm("103", "1", "0.25", ""))
		f(t, page, []string{"alias"}, vllm("103", "1", "0.25", "")) // the page knows the model under another name
		f(t, "vllm:num_requests_waiting{model_name=\"a\\\"\\\\b\"} 1\nvllm:num_requests_waiting{model_name=\"c\"} 5\n"+rest, []string{`a"\b`}, vllm("1", "1", "0.25", ""))
	})
	t.Run("values that are none", func(t *testing.T) {
		for _, v := range []string{"NaN", "-1", "+Inf", "-Inf", "1e999", "0x10", "1_000", "abc", "", "1 2 3", "1 x", "--1", "1e"} {
			f(t, "vllm:num_requests_waiting "+v+"\n"+rest, nil, vllm("NaN", "1", "0.25", "waiting"))
		}
		f(t, "vllm:num_requests_waiting{engine=\"0\"} NaN\nvllm:num_requests_waiting{engine=\"1\"} 9\n"+rest, nil, vllm("NaN", "1", "0.25", "waiting"))
		f(t, rest, nil, vllm("NaN", "1", "0.25", "waiting"))
		f(t, "vllm:num_requests_waiting 1\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 37\n"+info, nil, vllm("1", "1", "NaN", "kv_usage"))
		f(t, "vllm:num_requests_waiting 1\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 1.0000001\n"+info, nil, vllm("1", "1", "1", ""))
	})
	t.Run("notation", func(t *testing.T) {
		for text, want := range map[string]string{
			"vllm:num_requests_waiting 12.0":                                      "12",
			"vllm:num_requests_waiting 1.2e+01":                                   "12",
			"vllm:num_requests_waiting 1234567890.125":                            "1.234567890125e+09",
			"vllm:num_requests_waiting +12":                                       "12",
			"vllm:num_requests_waiting 12 1700000000000":                          "12",
			"vllm:num_requests_waiting 12 -5  ":                                   "12",
			"vllm:num_requests_waiting\t12\t":                                     "12",
			"  vllm:num_requests_waiting  12":                                     "12",
			"vllm:num_requests_waiting 12\r":                                      "12",
			"vllm:num_requests_waiting{} 12":                                      "12",
			"vllm:num_requests_waiting { engine = \"0\" , b=\"}\" , } 12":         "12",
			"vllm:num_requests_waiting{a=\"\\\"} 99 \\\\\\\"\"} 12":               "12",
			"vllm:num_requests_waiting{a=\"\\\\\"} 12":                            "12",
			"vllm:num_requests_waiting{a=\"x,y={z}\",b=\"\"}12":                   "12",
			"vllm:num_requests_waiting{\"quoted.name\"=\"v\"} 12":                 "12",
			"vllm:num_requests_waiting 0.30000000000000004":                       "0.30000000000000004",
			"# vllm:num_requests_waiting 1\nvllm:num_requests_waiting 12":         "12",
			"vllm:num_requests_waiting_by_reason 99\nvllm:num_requests_waiting 1": "1",
			"vllm:num_requests_waiting:x 99\nvllm:num_requests_waiting 1":         "1",
		} {
			f(t, text+"\n"+rest, nil, vllm(want, "1", "0.25", ""))
		}
	})
	t.Run("malformed label sets", func(t *testing.T) {
		for _, set := range []string{"{", "{a", "{a=", "{a=\"", "{a=\"x", "{a=\"x\"", "{a=x}", "{=\"x\"}", "{,}", "{a=\"x\" b=\"y\"}", "{1=\"x\"}", "{\"a}", "{\"a\"}", "{a=\"\\\"}"} {
			f(t, "vllm:num_requests_waiting"+set+" 5\n"+rest, nil, vllm("NaN", "1", "0.25", "waiting"))
		}
	})
	t.Run("a cut page", func(t *testing.T) {
		f(t, rest+"vllm:num_requests_waiting 1", nil, vllm("NaN", "1", "0.25", "waiting"))
		f(t, "vllm:num_requests_waiting 1", nil, "nothing")
	})
	t.Run("cache of unknown size", func(t *testing.T) {
		load := "vllm:num_requests_waiting 3\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.25\n"
		cache := func(labels, want string) {
			t.Helper()
			f(t, load+"vllm:cache_config_info{"+labels+"} 1\n", nil, "vllm: waiting 3 running 1 usage 0.25 "+want)
		}
		cache(`block_size="None",num_gpu_blocks="None"`, "block 0 capacity 0 "+none+" missing [block_size capacity]")
		cache(`block_size="16",num_gpu_blocks="None"`, "block 16 capacity 0 "+none+" missing [capacity]")
		cache(`block_size="16",num_gpu_blocks="0"`, "block 16 capacity 0 "+none+" missing [capacity]")
		cache(`block_size="None",kv_cache_size_tokens="64"`, "block 0 capacity 64 "+none+" missing [block_size]")
		cache(`block_size="99999999999999999999",kv_cache_size_tokens="1.5"`, "block 0 capacity 0 "+none+" missing [block_size capacity]")
		cache(`block_size="16",num_gpu_blocks="100"} 1`+"\nvllm:cache_config_info{engine=\"1\"", "block 16 capacity 0 "+none+" missing [capacity]")
		f(t, load, nil, "vllm: waiting 3 running 1 usage 0.25 block 0 capacity 0 "+none+" missing [block_size capacity]")
	})
	t.Run("adapters", func(t *testing.T) {
		f(t, "vllm:num_requests_waiting 3\n"+rest+
			"vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"old\",waiting_lora_adapters=\"\"} 1.7e9\n"+
			"vllm:lora_requests_info{max_lora=\"4\",running_lora_adapters=\"a, b\",waiting_lora_adapters=\"c\\\"d,\"} 1.8e9\n"+
			"vllm:lora_requests_info{max_lora=\"1\",running_lora_adapters=\"older\",waiting_lora_adapters=\"\"} 1.6e9\n",
			nil, `vllm: waiting 3 running 1 usage 0.25 block 16 capacity 1600 running adapters ["a" "b"] waiting adapters ["c\"d"] max 4 missing []`)
		f(t, "vllm:num_requests_waiting 3\n"+rest+"vllm:lora_requests_info{max_lora=\"0\"} 0\n", nil, vllm("3", "1", "0.25", ""))
	})
	t.Run("other engines are found by their series", func(t *testing.T) {
		f(t, `sglang:num_queue_reqs{model_name="m"} 4
sglang:num_running_reqs{model_name="m"} 5
sglang:token_usage{model_name="m"} 0.5
sglang:cache_config_info{page_size="64",num_pages="1000"} 1
`, []string{"m"}, "sglang: waiting 4 running 5 usage 0.5 block 64 capacity 64000 "+none+" missing []")
		f(t, `trtllm_num_requests_waiting 4
trtllm_num_requests_running 5
trtllm_kv_cache_utilization 0.5
trtllm_kv_cache_tokens_per_block 32
trtllm_kv_cache_max_blocks 1000
`, nil, "trtllm-serve: waiting 4 running 5 usage 0.5 block 32 capacity 32000 "+none+" missing []")
		f(t, `nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 4
nv_trt_llm_request_metrics{model="m",request_type="context",version="1"} 70
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m"} 9
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m"} 100
`, nil, "triton-tensorrt-llm: waiting 4 running 5 usage 0.5 block 64 capacity 6400 "+none+" missing []")
		f(t, "nv_inference_pending_request_count{model=\"m\"} 4\nnv_inference_exec_count{model=\"m\"} 5\n", nil,
			"triton: waiting 4 running 5 usage NaN block 0 capacity 0 "+none+" missing []")
		f(t, "sglang:num_queue_reqs 4\nsglang:num_running_reqs 5\n", nil,
			"sglang: waiting 4 running 5 usage NaN block 0 capacity 0 "+none+" missing [kv_usage block_size capacity]")
	})
	t.Run("no engine", func(t *testing.T) {
		f(t, "", nil, "nothing")
		f(t, "<html><body>It works!</body></html>\n", nil, "nothing")
		f(t, "llamacpp:requests_processing 1\nvllm\nvllm:\n\n \n", nil, "nothing")
	})
}

func TestReaderRemembersTheEngine(t *testing.T) {
	var r reader
	engines := allEngines()
	f := func(t *testing.T, page, want string) {
		t.Helper()
		e, _, _ := r.read([]byte(page), engines, nil)
		got := "none"
		if e != nil {
			got = e.name
		}
		if got != want || r.engine != e {
			t.Errorf("got engine %s, remembered %v, want %s", got, r.engine, want)
		}
	}
	f(t, "sglang:num_queue_reqs 4\n", "sglang")
	f(t, "vllm:num_requests_waiting 4\nsglang:num_queue_reqs 4\n", "sglang") // known by now
	f(t, "vllm:num_requests_waiting 4\n", "vllm")                            // replaced by another
	f(t, "x 1\n", "none")
	engines = engines[:1]
	f(t, "sglang:num_queue_reqs 4\n", "none") // a label names vllm
}

func TestParseSpec(t *testing.T) {
	f := func(t *testing.T, text, want string) {
		t.Helper()
		got, err := parseSpec(text)
		if s := fmt.Sprint(got.name, got.labels); err != nil || s != want {
			t.Errorf("parseSpec(%q): got %s, %v, want %s", text, s, err, want)
		}
	}
	f(t, "m", "m[]")
	f(t, " m ", "m[]")
	f(t, "m{a=b}", "m[{a b}]")
	f(t, `m{a="b",c=d}`, "m[{a b} {c d}]")
	f(t, ` ns:m { a = b , c = "d e" } `, "ns:m[{a b} {c d e}]")
	f(t, `m{a="x,y}\"z"}`, `m[{a x,y}"z}]`)
	f(t, "m{a=b,}", "m[{a b}]")
	f(t, "m{}", "m[]")

	refuse := func(t *testing.T, text, want string) {
		t.Helper()
		if _, err := parseSpec(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parseSpec(%q): got %v, want an error with %q", text, err, want)
		}
	}
	refuse(t, "", "no metric name")
	refuse(t, "{a=b}", "no metric name")
	refuse(t, "ma=b}", "no metric name")
	refuse(t, "1m", "no metric name")
	refuse(t, "m€", "no metric name")
	refuse(t, "m{a=b", "closing brace")
	refuse(t, "m{", "name=value")
	refuse(t, "m{a}", "name=value")
	refuse(t, "m{=b}", "name=value")
	refuse(t, "m{a:b=c}", "name=value")
	refuse(t, "m{a=}", "label a has no value")
	refuse(t, `m{a=""}`, "label a has no value")
	refuse(t, `m{a="b}`, "no closing quote")
	refuse(t, `m{a="b"c=d}`, "closing brace is missing")
	refuse(t, "m{a=b} x", `"x" stands behind`)
	refuse(t, "m{a=b}}", `"}" stands behind`)
}

func TestReadAllocatesNothing(t *testing.T) {
	page := append(bigPage(t), "vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"a,b\",waiting_lora_adapters=\"c\"} 1\n"...)
	engines, models := allEngines(), []string{"other", "smollm2"}
	var r reader
	r.read(page, engines, models)
	if got := testing.AllocsPerRun(100, func() { r.read(page, engines, models) }); got != 0 {
		t.Errorf("got %v allocations per page, want 0", got)
	}
}

// FuzzParse compares the scanner with Prometheus' own parser: on every page
// that this one takes, each engine reads the same values.
func FuzzParse(f *testing.F) {
	page := readPage(f, "vllm.txt")
	f.Add(page[:bytes.IndexByte(page, '\n')+1], "")
	f.Add(page[bytes.Index(page, []byte("# HELP vllm:num_requests_running")):bytes.Index(page, []byte("# HELP vllm:prefix_cache_queries_total"))], "smollm2")
	f.Add(page[bytes.Index(page, []byte("# HELP vllm:cache_config_info")):], "smollm2")
	f.Add([]byte("vllm:num_requests_waiting{model_name=\"a\\\"\\\\\\n\",engine=\"0\"} 1.5e3 17\nvllm:num_requests_waiting{model_name=\"b\"} NaN\n"), "a\"\\\n")
	f.Add([]byte("nv_trt_llm_request_metrics{request_type=\"waiting\",} 4\nnv_trt_llm_kv_cache_block_metrics {kv_cache_block_type = \"max\"} 0.30000000000000004\n"), "x")
	f.Add([]byte("vllm:lora_requests_info{max_lora=\"4\",running_lora_adapters=\"a, b\",waiting_lora_adapters=\"c\"} 18\nsglang:token_usage +Inf\n"), "")
	engines := allEngines()
	f.Fuzz(func(t *testing.T, page []byte, modelName string) {
		models := []string{modelName}
		for _, e := range engines {
			var r reader
			found, m, missing := r.read(page, []*engine{e}, models)
			want, ok := slowRead(page, e, models)
			if !ok {
				continue
			}
			if got := say(found, m, missing); got != want {
				t.Errorf("page %q\ngot  %s\nwant %s", page, got, want)
			}
		}
	})
}

// slowRead reads a page with expfmt. It is the specification of reader.read. ok
// is false for pages that expfmt refuses or reads in a way that engines do not use.
func slowRead(page []byte, e *engine, models []string) (want string, ok bool) {
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	if err != nil {
		return "", false
	}
	if bytes.HasPrefix(page, []byte("{")) || bytes.Contains(page, []byte("\n{")) || bytes.Contains(page, []byte(" {\"")) || bytes.Contains(page, []byte("\t{")) {
		return "", false // names in braces
	}
	label := func(m *dto.Metric, key string) (string, bool) {
		for _, l := range m.Label {
			if l.GetName() == key {
				return l.GetValue(), true
			}
		}
		return "", false
	}
	number := func(m *dto.Metric, key string) float64 {
		s, _ := label(m, key)
		var n int64
		if _, err := fmt.Sscanf(s, "%d", &n); err != nil || fmt.Sprint(n) != strings.TrimLeft(s, "0") || len(s) > 18 || n < 0 {
			return 0
		}
		return float64(n)
	}
	seen := false
	type series struct {
		*dto.Metric
		value float64
	}
	find := func(f field) (out []series) {
		for _, r := range e.rules {
			family := families[r.name]
			if r.field != f || family == nil {
				continue
			}
			for _, m := range family.Metric {
				matches := true
				for _, l := range r.labels {
					v, _ := label(m, l.key)
					matches = matches && v == l.value
				}
				if matches {
					seen = true
					out = append(out, series{m, m.GetGauge().GetValue() + m.GetCounter().GetValue() + m.GetUntyped().GetValue()})
				}
			}
		}
		return out
	}
	total := func(f field) (float64, int) {
		sum := func(listed bool) (sum float64, n int) {
			for _, s := range find(f) {
				if name, has := label(s.Metric, "model_name"); listed && has && name != models[0] {
					continue
				}
				v := s.value
				if v < 0 || math.IsInf(v, 0) {
					v = math.NaN()
				}
				sum += v
				n++
			}
			return sum, n
		}
		if v, n := sum(true); n > 0 {
			return v, n
		}
		return sum(false)
	}
	for _, f := range families {
		if t := f.GetType(); t == dto.MetricType_HISTOGRAM || t == dto.MetricType_SUMMARY {
			return "", false // takes in series of other names
		}
	}
	m := routing.NoMetrics()
	if v, n := total(fieldWaiting); n > 0 {
		m.Waiting = v
	}
	if v, n := total(fieldRunning); n > 0 {
		m.Running = v
	}
	usage, n := total(fieldUsage)
	if n == 0 {
		usage, n = total(fieldUsageOld)
	}
	if mean := usage / float64(n); n > 0 && mean <= maxUsage {
		m.KVUsage = math.Min(mean, 1)
	}
	if infos := find(fieldCacheInfo); len(infos) > 0 {
		m.BlockTokens = int(math.Min(number(infos[0].Metric, e.blockSizeLabel), math.MaxInt32))
		for i, s := range infos {
			tokens, size, blocks := number(s.Metric, sizeTokensLabel), number(s.Metric, e.blockSizeLabel), number(s.Metric, e.numBlocksLabel)
			if max(tokens, size, blocks) > math.MaxInt32 {
				return "", false // where a float64 is not exact
			}
			if tokens == 0 {
				tokens = size * blocks
			}
			if tokens == 0 || i > 0 && m.CapacityTokens == 0 {
				m.CapacityTokens = 0
				break
			}
			m.CapacityTokens += int64(tokens)
		}
	} else {
		size, n := total(fieldBlockSize)
		blocks, _ := total(fieldNumBlocks)
		if n > 0 && size < math.MaxInt32 {
			m.BlockTokens = int(size / float64(n))
		}
		if blocks < math.MaxInt32 {
			m.CapacityTokens = int64(m.BlockTokens) * int64(blocks)
		}
	}
	best := math.Inf(-1)
	for i, s := range find(fieldLoRA) {
		if i == 0 || s.value > best {
			best = s.value
			running, _ := label(s.Metric, "running_lora_adapters")
			waiting, _ := label(s.Metric, "waiting_lora_adapters")
			m.RunningAdapters, m.WaitingAdapters = split(running), split(waiting)
			m.MaxAdapters = int(math.Min(number(s.Metric, "max_lora"), math.MaxInt32))
		}
	}
	if !seen {
		return "nothing", true
	}
	var missing values
	for v, is := range map[value]bool{
		valueWaiting:   math.IsNaN(m.Waiting) && e.has(fieldWaiting),
		valueRunning:   math.IsNaN(m.Running) && e.has(fieldRunning),
		valueUsage:     math.IsNaN(m.KVUsage) && e.has(fieldUsage),
		valueBlockSize: m.BlockTokens == 0 && (e.has(fieldBlockSize) || e.has(fieldCacheInfo)),
		valueCapacity:  m.CapacityTokens == 0 && (e.has(fieldNumBlocks) || e.has(fieldCacheInfo)),
	} {
		if is {
			missing |= 1 << v
		}
	}
	return say(e, m, missing), true
}

func split(list string) (names []string) {
	for _, name := range strings.Split(list, ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}

func BenchmarkParse(b *testing.B) {
	page := bigPage(b)
	engines, models := allEngines(), []string{"smollm2"}
	var r reader
	b.SetBytes(int64(len(page)))
	b.ReportAllocs()
	for b.Loop() {
		r.read(page, engines, models)
	}
}
