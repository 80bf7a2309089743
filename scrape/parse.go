package scrape

import (
	"bytes"
	"math"
	"strconv"
	"strings"
)

// The pages are in Prometheus' text format 0.0.4: one series per line,
//
//	name{label="value",...} value [timestamp]
//
// A page has hundreds of series and a handful of them are wanted, so a line
// costs a search for its end and a look at one byte behind the prefix that all
// wanted names share; only wanted lines are read further. Nothing is copied.

// field is one thing that a series can tell.
type field uint8

const (
	fieldWaiting   field = iota // requests in the queue
	fieldRunning                // requests in the batch
	fieldUsage                  // fraction of the KV cache in use
	fieldUsageOld               // the same under its former name
	fieldBlockSize              // tokens per KV block, as a value
	fieldNumBlocks              // KV blocks, as a value
	fieldCacheInfo              // block size, blocks and tokens of the KV cache, as labels
	fieldLoRA                   // adapters, as labels
	fieldCount
)

// rule binds the series that match a spec to a field.
type rule struct {
	spec
	field field
}

// program finds the series of one engine on a page.
type program struct {
	rules  []rule // at most 16
	prefix string // of every name
	next   [256]uint16
	// next has, by the byte behind the prefix, the rules that may match

	blockSizeLabel, numBlocksLabel string // of fieldCacheInfo
}

// sizeTokensLabel is vLLM's own account of its KV cache in tokens. It beats
// blocks times block size, which is wrong for models with several kinds of cache.
const sizeTokensLabel = "kv_cache_size_tokens" // #nosec G101 -- a label's name

func newProgram(rules []rule, blockSizeLabel, numBlocksLabel string) *program {
	p := &program{rules: rules, prefix: rules[0].name, blockSizeLabel: blockSizeLabel, numBlocksLabel: numBlocksLabel}
	for _, r := range rules {
		for !strings.HasPrefix(r.name, p.prefix) {
			p.prefix = p.prefix[:len(p.prefix)-1]
		}
	}
	for i, r := range rules {
		bit := uint16(1) << i
		if len(r.name) > len(p.prefix) {
			p.next[r.name[len(p.prefix)]] |= bit
			continue
		}
		for _, c := range []byte("{ \t") { // what may follow a whole name
			p.next[c] |= bit
		}
	}
	return p
}

// has tells whether some series can fill one of the fields.
func (p *program) has(fields ...field) bool {
	for i := range p.rules {
		for _, f := range fields {
			if p.rules[i].field == f {
				return true
			}
		}
	}
	return false
}

// sum adds up the series of one field.
type sum struct {
	all, served   float64 // a value that is negative or no number makes it NaN
	count, listed int     // series; of these, series of a model that the replica lists
}

func (s *sum) add(v float64, served bool) {
	if !(v >= 0) || math.IsInf(v, 0) {
		v = math.NaN()
	}
	s.all += v
	s.count++
	if served {
		s.served += v
		s.listed++
	}
}

// total returns the sum over the series of listed models, over all series if
// none is listed, and how many it is over.
func (s *sum) total() (v float64, n int) {
	if s.listed > 0 {
		return s.served, s.listed
	}
	return s.all, s.count
}

// tally is what the wanted series of one page add up to. Its byte slices are parts of the page.
type tally struct {
	seen   bool // a wanted series is on the page
	fields [fieldCacheInfo]sum

	infos       int // series of fieldCacheInfo
	blockTokens int64
	capacity    int64 // tokens over all engines, -1 when one of them does not say

	lora             bool
	loraValue        float64
	runningAdapters  []byte // label value, still escaped
	waitingAdapters  []byte
	maxAdaptersLabel []byte
}

// read adds up the wanted series of a page. Series of a model_name that is not
// in models, which is sorted, count only when no series is of one that is. A last
// line without an end may be cut and is not read.
func (p *program) read(page []byte, models []string, t *tally) {
	*t = tally{}
	at := len(p.prefix)
	for {
		end := bytes.IndexByte(page, '\n')
		if end < 0 {
			return
		}
		line := page[:end]
		page = page[end+1:]
		if len(line) > 0 && (line[0] == ' ' || line[0] == '\t') {
			line = skipBlanks(line)
		}
		if len(line) <= at || string(line[:at]) != p.prefix {
			continue
		}
		for candidates, i := p.next[line[at]], 0; candidates != 0; candidates, i = candidates>>1, i+1 {
			if candidates&1 != 0 {
				p.series(&p.rules[i], line, models, t)
			}
		}
	}
}

// series adds a line to the tally if it is of the rule.
func (p *program) series(r *rule, line []byte, models []string, t *tally) {
	if len(line) <= len(r.name) || string(line[:len(r.name)]) != r.name {
		return
	}
	switch line[len(r.name)] {
	case '{', ' ', '\t':
	default:
		return // a longer name
	}
	var in info
	rest, matched, served, ok := p.labels(r, skipBlanks(line[len(r.name):]), models, &in)
	if !matched {
		return
	}
	t.seen = true
	value := math.NaN()
	if ok {
		value = sample(rest)
	}
	switch r.field {
	case fieldCacheInfo:
		t.addInfo(&in, ok)
	case fieldLoRA:
		if ok && (!t.lora || value > t.loraValue) {
			t.lora, t.loraValue = true, value
			t.runningAdapters, t.waitingAdapters, t.maxAdaptersLabel = in.running, in.waiting, in.maxAdapters
		}
	default:
		t.fields[r.field].add(value, served)
	}
}

// info has what the labels of one series say.
type info struct {
	blockSize, numBlocks, tokens  int64 // 0 when unknown
	running, waiting, maxAdapters []byte
}

func (t *tally) addInfo(in *info, ok bool) {
	tokens := in.tokens
	if tokens == 0 && in.numBlocks <= math.MaxInt32 && in.blockSize <= math.MaxInt32 {
		tokens = in.numBlocks * in.blockSize
	}
	if t.infos++; t.infos == 1 {
		t.blockTokens = in.blockSize
	}
	switch {
	case !ok || tokens == 0 || tokens > math.MaxInt64-t.capacity:
		t.capacity = -1
	case t.capacity >= 0:
		t.capacity += tokens
	}
}

// labels reads the label set at the start of s, if there is one, and returns
// what follows it. matched: the set has the labels of the rule; served: its
// model_name, if it has one, is in models; ok: it is well-formed.
func (p *program) labels(r *rule, s []byte, models []string, in *info) (rest []byte, matched, served, ok bool) {
	served, ok = true, true
	found := 0
	if len(s) > 0 && s[0] == '{' {
		l := labelScanner{rest: s[1:]}
		for l.next() {
			for i := range r.labels {
				if string(l.key) == r.labels[i].key && equalUnescaped(l.value, r.labels[i].value) {
					found++
				}
			}
			switch r.field {
			case fieldCacheInfo:
				switch { // a switch over string(l.key) would copy long ones
				case string(l.key) == p.blockSizeLabel:
					in.blockSize = integer(l.value)
				case string(l.key) == p.numBlocksLabel:
					in.numBlocks = integer(l.value)
				case string(l.key) == sizeTokensLabel:
					in.tokens = integer(l.value)
				}
			case fieldLoRA:
				switch {
				case string(l.key) == "running_lora_adapters":
					in.running = l.value
				case string(l.key) == "waiting_lora_adapters":
					in.waiting = l.value
				case string(l.key) == "max_lora":
					in.maxAdapters = l.value
				}
			default:
				if string(l.key) == "model_name" {
					served = contains(models, l.value)
				}
			}
		}
		s, ok = l.rest, !l.bad
	}
	return s, found == len(r.labels), served, ok
}

// labelScanner walks over a label set, from behind its opening brace.
type labelScanner struct {
	rest       []byte // behind the closing brace at the end
	key, value []byte // of the current label; the value is still escaped
	bad        bool   // the set is malformed
}

// next reads one label. It returns false at the end of the set.
func (l *labelScanner) next() bool {
	s := skipBlanks(l.rest)
	if len(s) > 0 && s[0] == '}' {
		l.rest = s[1:]
		return false
	}
	end := 0
	if len(s) > 0 && s[0] == '"' { // a name that is not a plain identifier
		if end = closingQuote(s[1:]); end < 0 {
			return l.fail()
		}
		l.key, s = s[1:1+end], s[end+2:]
	} else {
		for end < len(s) && (isLetter(s[end]) || end > 0 && isDigit(s[end])) {
			end++
		}
		if end == 0 {
			return l.fail()
		}
		l.key, s = s[:end], s[end:]
	}
	s = skipBlanks(s)
	if len(s) == 0 || s[0] != '=' {
		return l.fail()
	}
	s = skipBlanks(s[1:])
	if len(s) == 0 || s[0] != '"' {
		return l.fail()
	}
	s = s[1:]
	if end = closingQuote(s); end < 0 {
		return l.fail()
	}
	l.value, s = s[:end], skipBlanks(s[end+1:])
	if len(s) > 0 && s[0] == ',' {
		s = s[1:]
	} else if len(s) == 0 || s[0] != '}' {
		return l.fail()
	}
	l.rest = s
	return true
}

func (l *labelScanner) fail() bool {
	l.rest, l.bad = nil, true
	return false
}

func isLetter(c byte) bool { return c == '_' || c|0x20 >= 'a' && c|0x20 <= 'z' }
func isDigit(c byte) bool  { return c >= '0' && c <= '9' }

// closingQuote returns the index of the first quote that no backslash escapes, -1 when there is none.
func closingQuote(s []byte) int {
	for at := 0; ; {
		i := bytes.IndexByte(s[at:], '"')
		if i < 0 {
			return -1
		}
		i += at
		backslashes := 0
		for i-backslashes > 0 && s[i-backslashes-1] == '\\' {
			backslashes++
		}
		if backslashes%2 == 0 {
			return i
		}
		at = i + 1
	}
}

// unescape returns the label value with \\, \" and \n resolved. It copies only when there is something to resolve.
func unescape(raw []byte) []byte {
	if bytes.IndexByte(raw, '\\') < 0 {
		return raw
	}
	out := make([]byte, 0, len(raw))
	for i := 0; i < len(raw); i++ {
		c := raw[i]
		if c == '\\' && i+1 < len(raw) {
			i++
			if c = raw[i]; c == 'n' {
				c = '\n'
			}
		}
		out = append(out, c)
	}
	return out
}

func equalUnescaped(raw []byte, want string) bool {
	return string(raw) == want || string(unescape(raw)) == want
}

// contains tells whether the sorted list has the label value.
func contains(sorted []string, raw []byte) bool {
	raw = unescape(raw)
	lo, hi := 0, len(sorted)
	for lo < hi {
		mid := (lo + hi) / 2
		if sorted[mid] < string(raw) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo < len(sorted) && sorted[lo] == string(raw)
}

func skipBlanks(s []byte) []byte {
	for len(s) > 0 && (s[0] == ' ' || s[0] == '\t') {
		s = s[1:]
	}
	return s
}

// token cuts the first word off s.
func token(s []byte) (word, rest []byte) {
	s = skipBlanks(s)
	end := 0
	for end < len(s) && s[end] != ' ' && s[end] != '\t' {
		end++
	}
	return s[:end], s[end:]
}

// sample returns the value of a line from behind its labels, NaN when it is
// malformed. A timestamp may follow and says nothing: a page has one value per series.
func sample(s []byte) float64 {
	if n := len(s); n > 0 && s[n-1] == '\r' {
		s = s[:n-1]
	}
	word, rest := token(s)
	if stamp, rest := token(rest); len(stamp) > 0 {
		if _, err := strconv.ParseInt(string(stamp), 10, 64); err != nil || len(skipBlanks(rest)) > 0 {
			return math.NaN()
		}
	}
	return number(word)
}

// number reads a float. Pages are full of short ones ("12.0"), whose digits are
// exact in a float64, so one division gives the nearest value; the rest is strconv's.
func number(s []byte) float64 {
	mantissa, digits, point := uint64(0), 0, -1
	for i, c := range s {
		switch {
		case isDigit(c) && digits < 15:
			mantissa = mantissa*10 + uint64(c-'0')
			digits++
		case c == '.' && point < 0:
			point = i
		default:
			return slowNumber(s)
		}
	}
	if digits == 0 {
		return math.NaN()
	}
	v := float64(mantissa)
	if point >= 0 {
		v /= pow10[len(s)-1-point]
	}
	return v
}

// pow10 has the powers of ten that are needed, all exact.
var pow10 = [16]float64{1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15}

func slowNumber(s []byte) float64 {
	if bytes.ContainsAny(s, "pPxX_") { // Go's notation, not Prometheus'
		return math.NaN()
	}
	v, err := strconv.ParseFloat(string(s), 64)
	if err != nil {
		return math.NaN()
	}
	return v
}

// integer reads a positive integer, 0 when it is none ("None", "0", "1.5").
func integer(s []byte) int64 {
	if len(s) == 0 || len(s) > 18 {
		return 0
	}
	n := int64(0)
	for _, c := range s {
		if !isDigit(c) {
			return 0
		}
		n = n*10 + int64(c-'0')
	}
	return n
}
