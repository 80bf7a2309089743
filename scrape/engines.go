package scrape

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"kvgate/routing"
)

// spec names series: all of that name that have these labels.
type spec struct {
	name   string
	labels []labelPair
}

type labelPair struct{ key, value string }

// parseSpec reads name or name{label=value,other="value"}. Blanks may stand anywhere between.
func parseSpec(text string) (spec, error) {
	var s spec
	name, rest, braced := strings.Cut(text, "{")
	s.name = strings.Trim(name, " \t")
	if !isMetricName(s.name) {
		return s, fmt.Errorf("%q is no metric name", s.name)
	}
	if !braced {
		return s, nil
	}
	for {
		rest = strings.TrimLeft(rest, " \t")
		if tail, closed := strings.CutPrefix(rest, "}"); closed {
			if tail = strings.Trim(tail, " \t"); tail != "" {
				return s, fmt.Errorf("%q stands behind the closing brace", tail)
			}
			return s, nil
		}
		key, value, ok := strings.Cut(rest, "=")
		key, value = strings.TrimRight(key, " \t"), strings.TrimLeft(value, " \t")
		if !ok || !isLabelName(key) {
			return s, errors.New("a label needs the form name=value, and the list a closing brace")
		}
		if strings.HasPrefix(value, `"`) {
			end := closingQuote([]byte(value[1:]))
			if end < 0 {
				return s, fmt.Errorf("the value of label %s has no closing quote", key)
			}
			value, rest = string(unescape([]byte(value[1:1+end]))), value[end+2:]
		} else {
			end := strings.IndexAny(value, ",}")
			if end < 0 {
				return s, errors.New("the closing brace is missing")
			}
			value, rest = strings.TrimRight(value[:end], " \t"), value[end:]
		}
		if value == "" {
			return s, fmt.Errorf("label %s has no value", key)
		}
		s.labels = append(s.labels, labelPair{key, value})
		rest = strings.TrimLeft(rest, " \t")
		if tail, more := strings.CutPrefix(rest, ","); more {
			rest = tail
		} else if !strings.HasPrefix(rest, "}") {
			return s, errors.New("the closing brace is missing")
		}
	}
}

func isMetricName(s string) bool {
	return s != "" && !isDigit(s[0]) && !strings.ContainsFunc(s, func(r rune) bool {
		return r >= 0x80 || !isLetter(byte(r)) && !isDigit(byte(r)) && r != ':'
	})
}

func isLabelName(s string) bool { return isMetricName(s) && !strings.Contains(s, ":") }

// engineSpecs has, by field, the specs of one kind of engine; empty ones are not read.
type engineSpecs struct {
	name           string
	specs          [fieldCount]string
	blockSizeLabel string // of fieldCacheInfo
	numBlocksLabel string
}

// engine is a kind of inference engine, compiled.
type engine struct {
	name string
	*program
}

// builtin are the engines that kvgate knows, in the order in which they are
// tried on a page of an unlabelled replica.
var builtin = []engineSpecs{
	{
		name: "vllm",
		specs: [fieldCount]string{
			fieldWaiting:   "vllm:num_requests_waiting",
			fieldRunning:   "vllm:num_requests_running",
			fieldUsage:     "vllm:kv_cache_usage_perc",
			fieldUsageOld:  "vllm:gpu_cache_usage_perc", // until vLLM 0.10
			fieldCacheInfo: "vllm:cache_config_info",
			fieldLoRA:      "vllm:lora_requests_info",
		},
	},
	{
		name: "sglang",
		specs: [fieldCount]string{
			fieldWaiting:   "sglang:num_queue_reqs",
			fieldRunning:   "sglang:num_running_reqs",
			fieldUsage:     "sglang:token_usage",
			fieldCacheInfo: "sglang:cache_config_info",
		},
		blockSizeLabel: "page_size",
		numBlocksLabel: "num_pages",
	},
	{
		name: "trtllm-serve",
		specs: [fieldCount]string{
			fieldWaiting:   "trtllm_num_requests_waiting",
			fieldRunning:   "trtllm_num_requests_running",
			fieldUsage:     "trtllm_kv_cache_utilization",
			fieldBlockSize: "trtllm_kv_cache_tokens_per_block",
			fieldNumBlocks: "trtllm_kv_cache_max_blocks",
		},
	},
	{
		name: "triton-tensorrt-llm",
		specs: [fieldCount]string{
			fieldWaiting:   "nv_trt_llm_request_metrics{request_type=waiting}",
			fieldRunning:   "nv_trt_llm_request_metrics{request_type=scheduled}",
			fieldUsage:     "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
			fieldBlockSize: "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",
			fieldNumBlocks: "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",
		},
	},
	{
		name: "triton",
		specs: [fieldCount]string{
			fieldWaiting: "nv_inference_pending_request_count",
			fieldRunning: "nv_inference_exec_count", // a counter, as in llm-d: good for nothing but its presence
		},
	},
}

// compile turns specs into an engine. bad is called for each malformed spec.
func (s *engineSpecs) compile(bad func(f field, err error)) *engine {
	var rules []rule
	for f, text := range s.specs {
		if strings.Trim(text, " \t") == "" {
			continue
		}
		parsed, err := parseSpec(text)
		if err != nil {
			bad(field(f), err)
			continue
		}
		rules = append(rules, rule{spec: parsed, field: field(f)})
	}
	if len(rules) == 0 {
		return nil
	}
	blockSize, numBlocks := s.blockSizeLabel, s.numBlocksLabel
	if blockSize == "" {
		blockSize = "block_size"
	}
	if numBlocks == "" {
		numBlocks = "num_gpu_blocks"
	}
	return &engine{name: s.name, program: newProgram(rules, blockSize, numBlocks)}
}

// value is one part of an observation that may be missing.
type value uint8

const (
	valueWaiting value = iota
	valueRunning
	valueUsage
	valueBlockSize
	valueCapacity
	valueCount
)

var valueNames = [valueCount]string{"waiting", "running", "kv_usage", "block_size", "capacity"}

// values is a set of value.
type values uint8

func (v values) has(x value) bool { return v>>x&1 != 0 }

// maxUsage leaves room for rounding. A larger fraction is a percentage or nonsense, and counts as missing.
const maxUsage = 1.001

// metrics turns the tally of a page into an observation. missing are the values
// that the engine has series for and the page does not give. The adapter lists
// are left to the reader.
func (e *engine) metrics(t *tally) (m routing.Metrics, missing values) {
	m = routing.NoMetrics()
	if v, n := t.fields[fieldWaiting].total(); n > 0 {
		m.Waiting = v
	}
	if v, n := t.fields[fieldRunning].total(); n > 0 {
		m.Running = v
	}
	usage := &t.fields[fieldUsage]
	if usage.count == 0 {
		usage = &t.fields[fieldUsageOld]
	}
	if v, n := usage.total(); n > 0 && v/float64(n) <= maxUsage {
		m.KVUsage = min(v/float64(n), 1)
	}
	m.BlockTokens, m.CapacityTokens = t.cache()
	if t.lora {
		m.MaxAdapters = int(min(integer(t.maxAdaptersLabel), math.MaxInt32))
	}
	if math.IsNaN(m.Waiting) && e.has(fieldWaiting) {
		missing |= 1 << valueWaiting
	}
	if math.IsNaN(m.Running) && e.has(fieldRunning) {
		missing |= 1 << valueRunning
	}
	if math.IsNaN(m.KVUsage) && e.has(fieldUsage, fieldUsageOld) {
		missing |= 1 << valueUsage
	}
	if m.BlockTokens == 0 && e.has(fieldBlockSize, fieldCacheInfo) {
		missing |= 1 << valueBlockSize
	}
	if m.CapacityTokens == 0 && e.has(fieldNumBlocks, fieldCacheInfo) {
		missing |= 1 << valueCapacity
	}
	return m, missing
}

// cache returns tokens per block and tokens in all, each 0 when unknown.
func (t *tally) cache() (blockTokens int, capacity int64) {
	whole := func(f field) (total, mean float64) {
		v, n := t.fields[f].total()
		if n == 0 || !(v < math.MaxInt32) {
			return 0, 0
		}
		return v, v / float64(n)
	}
	if t.infos > 0 {
		return int(min(t.blockTokens, math.MaxInt32)), max(t.capacity, 0)
	}
	_, size := whole(fieldBlockSize)
	blocks, _ := whole(fieldNumBlocks)
	return int(size), int64(size) * int64(blocks)
}

// reader reads the pages of one replica. It remembers what repeats, so that a
// page costs no allocation.
type reader struct {
	engine           *engine // found on an earlier page of an unlabelled replica, nil before
	tally            tally
	running, waiting nameList
}

// read returns what the page says. engines are tried in turn until one has a
// series on the page, the one that had on the last page first; nil when none has.
func (r *reader) read(page []byte, engines []*engine, models []string) (found *engine, m routing.Metrics, missing values) {
	if r.engine != nil && slices.Contains(engines, r.engine) {
		if r.engine.read(page, models, &r.tally); r.tally.seen {
			found = r.engine
		}
	}
	for i := 0; i < len(engines) && found == nil; i++ {
		if engines[i].read(page, models, &r.tally); r.tally.seen {
			found = engines[i]
		}
	}
	r.engine = found
	if found == nil {
		return nil, routing.NoMetrics(), 0
	}
	m, missing = found.metrics(&r.tally)
	m.RunningAdapters = r.running.set(r.tally.runningAdapters)
	m.WaitingAdapters = r.waiting.set(r.tally.waitingAdapters)
	r.tally = tally{} // let go of the page
	return found, m, missing
}

// nameList is a comma-separated list that seldom changes.
type nameList struct {
	raw   []byte
	names []string // never changed in place: observations share it
}

func (l *nameList) set(raw []byte) []string {
	if bytes.Equal(raw, l.raw) {
		return l.names
	}
	l.raw = append(l.raw[:0], raw...)
	l.names = nil
	for name := range strings.SplitSeq(string(unescape(raw)), ",") {
		if name = strings.TrimSpace(name); name != "" {
			l.names = append(l.names, name)
		}
	}
	return l.names
}
