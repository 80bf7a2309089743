package proxy

import (
	"bytes"
	"encoding/json"
)

// The tap looks at an answer's bytes on their way and never changes them. Of
// every line (of an event stream) or of the whole body (of a plain answer) it
// sees at most the first and the last keptPart bytes: its memory is bounded, and
// what it finds does not depend on how the bytes were split.
const keptPart = 32 << 10

// keptText is a text of any length, given in pieces, of which the begin and the
// end are kept.
type keptText struct {
	buf  []byte // the whole, or a begin of keptPart bytes and an end of at least as many
	size int64
}

func (k *keptText) add(p []byte) {
	k.size += int64(len(p))
	if len(k.buf)+len(p) > 4*keptPart {
		if room := keptPart - len(k.buf); room > 0 {
			k.buf = append(k.buf, p[:room]...)
			p = p[room:]
		}
		if len(p) >= keptPart {
			k.buf = k.buf[:keptPart]
			p = p[len(p)-keptPart:]
		} else if n := len(k.buf); n > 2*keptPart {
			k.buf = append(k.buf[:keptPart], k.buf[n-keptPart:]...)
		}
	}
	k.buf = append(k.buf, p...)
}

// parts returns the text, in two parts when its middle is lost.
func (k *keptText) parts() (begin, end []byte) {
	return textParts(k.buf, k.size)
}

func textParts(b []byte, size int64) (begin, end []byte) {
	if size <= 2*keptPart {
		return b, nil
	}
	return b[:keptPart], b[len(b)-keptPart:]
}

func (k *keptText) reset() {
	k.size = 0
	k.buf = k.buf[:0]
	if cap(k.buf) > largestKept {
		k.buf = nil
	}
}

const largestKept = 16 << 10 // of what a pooled tap keeps for its next use

// usage is what an engine tells of a finished request; -1 is not told.
type usage struct{ prompt, cached, output int64 }

var noUsage = usage{-1, -1, -1}

// tap reads the events and the usage of one answer.
type tap struct {
	ending ending
	line   keptText // the unfinished line; of a plain answer, the body

	events  int64
	usage   usage
	content bool // the first content has been seen
	ended   bool // the event that ends a stream of this API has been seen
	failed  bool // the engine reported an error of its own
	errored bool // it reported any error
	open    bool // inside an event: a line of it has been seen
	data    bool // the event has a data line
	typed   bool // it has an event line
	name    eventName
}

// eventName is what an event: line said of the current event.
type eventName uint8

const (
	eventOther eventName = iota
	eventContent
	eventEnd
	eventError
)

func (t *tap) reset(e ending) {
	t.line.reset()
	*t = tap{ending: e, line: t.line, usage: noUsage}
}

// boundary says whether everything that was fed makes whole events.
func (t *tap) boundary() bool { return !t.open && t.line.size == 0 }

// feed takes the next bytes of an event stream. It reports whether the first
// content was among them.
func (t *tap) feed(p []byte) (first bool) {
	before := t.content
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			t.line.add(p)
			break
		}
		if t.line.size == 0 {
			t.take(textParts(p[:i], int64(i)))
		} else {
			t.line.add(p[:i])
			t.take(t.line.parts())
			t.line.reset()
		}
		p = p[i+1:]
	}
	return t.content && !before
}

// finish says that the stream has ended: a last line may lack its line end.
func (t *tap) finish() {
	if t.line.size > 0 {
		t.take(t.line.parts())
		t.line.reset()
	}
	t.take(nil, nil)
}

var (
	fieldData  = []byte("data:")
	fieldEvent = []byte("event:")
	doneMark   = []byte("[DONE]")
	usageKey   = []byte(`usage"`) // without its first quote: a search for a frequent byte is slow
	errorStart = []byte(`{"error"`)
	typeKey    = []byte(`"type"`)
	keyEnd     = []byte(`":`)
)

// take reads one line without its line end, in two parts when it is very long.
func (t *tap) take(line, tail []byte) {
	if last := len(line) - 1; tail == nil && last >= 0 && line[last] == '\r' {
		line = line[:last]
	}
	switch {
	case len(line) == 0:
		if t.data {
			t.events++
		}
		t.open, t.data, t.typed, t.name = false, false, false, eventOther
	case line[0] == ':': // a comment
	case bytes.HasPrefix(line, fieldData):
		t.open, t.data = true, true
		t.readData(trimSpace(line[len(fieldData):]), tail)
	case bytes.HasPrefix(line, fieldEvent):
		t.open, t.typed = true, true
		t.named(trimSpace(line[len(fieldEvent):]))
	default:
		t.open = true
	}
}

// named reads the name of an event, from its event: line or the type of its data.
func (t *tap) named(name []byte) {
	switch string(name) {
	case "error":
		t.name = eventError
	case "message_stop":
		if t.ending == endingMessages {
			t.ended = true
		}
	case "message-end":
		if t.ending == endingCohere {
			t.ended = true
		}
	case "response.completed", "response.incomplete", "response.failed":
		if t.ending == endingResponses {
			t.ended = true
			t.errored = t.errored || name[len("response.")] == 'f'
		}
	case "content_block_delta", "content-delta":
		t.name = eventContent
	default:
		if bytes.HasPrefix(name, []byte("response.")) && bytes.HasSuffix(name, []byte(".delta")) {
			t.name = eventContent
		}
	}
}

func (t *tap) readData(data, tail []byte) {
	if len(data) == len(doneMark) && bytes.Equal(data, doneMark) {
		t.ended = t.ended || t.ending != endingResponses
		return
	}
	if !t.typed {
		switch t.ending {
		case endingResponses, endingMessages, endingCohere:
			t.namedByType(data)
			t.namedByType(tail)
		}
	}
	if t.name == eventError || bytes.HasPrefix(data, errorStart) {
		t.errored = true
		t.failed = t.failed || engineFailed(data)
	}
	if !t.content {
		t.content = t.name == eventContent || t.ending == endingNone || chunkContent(data) || chunkContent(tail)
	}
	readUsage(data, &t.usage)
	readUsage(tail, &t.usage)
}

// namedByType reads the type fields of an event without an event line. An inner
// object has a type too, but none that is the name of an event.
func (t *tap) namedByType(b []byte) {
	for {
		i := bytes.Index(b, typeKey)
		if i < 0 {
			return
		}
		b = b[i+len(typeKey):]
		if v, ok := value(b); ok && len(v) > 0 && v[0] == '"' {
			t.named(v[1:max(stringEnd(v, 0)-1, 1)])
		}
	}
}

// value returns what follows the colon behind a key.
func value(b []byte) ([]byte, bool) {
	b = skipSpace(b)
	if len(b) == 0 || b[0] != ':' {
		return nil, false
	}
	return skipSpace(b[1:]), true
}

func skipSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t' || b[0] == '\r' || b[0] == '\n') {
		b = b[1:]
	}
	return b
}

// chunkContent says whether a chunk of OpenAI's APIs carries what a client waits
// for. In the first chunk of a chat, which has the role alone, the fields are
// empty or null.
func chunkContent(data []byte) bool {
	for from := 0; ; {
		i := bytes.Index(data[from:], keyEnd)
		if i < 0 {
			return false
		}
		i += from
		from = i + len(keyEnd)
		switch string(data[bytes.LastIndexByte(data[:i], '"')+1 : i]) {
		case "content", "text", "reasoning", "reasoning_content", "tool_calls", "function_call", "refusal", "token_ids", "finish_reason":
		default:
			continue
		}
		v := skipSpace(data[from:])
		if len(v) < 2 {
			continue
		}
		switch v[0] {
		case '"':
			if v[1] != '"' {
				return true
			}
		case '[':
			if in := skipSpace(v[1:]); len(in) > 0 && in[0] != ']' {
				return true
			}
		case '{':
			return true
		}
	}
}

// engineFailed says whether an error event is the engine's failure, and not
// about what the client had asked for.
func engineFailed(data []byte) bool {
	var e struct {
		Code  json.RawMessage `json:"code"`
		Error json.RawMessage `json:"error"`
	}
	if json.Unmarshal(data, &e) != nil {
		return true
	}
	var detail struct {
		Code json.RawMessage `json:"code"`
		Type string          `json:"type"`
	}
	if len(e.Error) > 0 && json.Unmarshal(e.Error, &detail) != nil {
		return true // the error is a mere text
	}
	if len(detail.Code) == 0 {
		detail.Code = e.Code
	}
	if n := scanNumber(detail.Code); n >= 400 && n < 500 {
		return false
	}
	switch detail.Type {
	case "invalid_request_error", "not_found_error", "BadRequestError", "NotFoundError":
		return false
	}
	return true
}

// readUsage looks for usage objects; what the last one tells counts.
func readUsage(b []byte, u *usage) {
	for from := 0; ; {
		i := bytes.Index(b[from:], usageKey)
		if i < 0 {
			return
		}
		i += from
		from = i + len(usageKey)
		if i == 0 || b[i-1] != '"' {
			continue
		}
		if v, ok := value(b[from:]); ok && len(v) > 0 && v[0] == '{' {
			o := usageObject{usage: noUsage}
			from = len(b) - len(v) + o.read(v, 0)
			o.addTo(u)
		}
	}
}

// usageObject is what one usage object tells.
type usageObject struct {
	usage
	beside int64 // Anthropic's cache reads and writes, which its input_tokens do not count
}

// addTo takes over what was told. A later zero takes nothing back: a stream tells
// the prompt's tokens once.
func (o *usageObject) addTo(u *usage) {
	if o.prompt >= 0 {
		o.prompt += o.beside
	}
	for _, x := range [...]struct {
		dst *int64
		n   int64
	}{{&u.prompt, o.prompt}, {&u.cached, o.cached}, {&u.output, o.output}} {
		if x.n > 0 || x.n == 0 && *x.dst < 0 {
			*x.dst = x.n
		}
	}
}

// read takes in the numbers of the object at the begin of b and returns how far
// it has read. Details are objects inside; what is unknown is skipped.
func (o *usageObject) read(b []byte, depth int) int {
	i := 1
	for i < len(b) {
		switch c := b[i]; c {
		case '}':
			return i + 1
		case '"':
			end := stringEnd(b, i)
			key := b[i+1 : max(end-1, i+1)]
			i = end
			v, ok := value(b[i:])
			if !ok {
				continue
			}
			i = len(b) - len(v)
			o.told(key, v)
		case '{':
			if depth >= 8 {
				return len(b)
			}
			i += o.read(b[i:], depth+1)
		default:
			i++
		}
	}
	return i
}

// stringEnd returns the offset behind the string that starts at b[i].
func stringEnd(b []byte, i int) int {
	for i++; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(b)
}

func (o *usageObject) told(key, v []byte) {
	n := scanNumber(v)
	if n < 0 {
		return
	}
	switch string(key) {
	case "prompt_tokens", "input_tokens":
		o.prompt = n
	case "completion_tokens", "output_tokens":
		o.output = n
	case "cached_tokens":
		o.cached = n
	case "cache_read_input_tokens":
		o.cached = n
		o.beside += n
	case "cache_creation_input_tokens":
		o.beside += n
	}
}

// scanNumber reads a whole number, as JSON or as a JSON string; -1 when b does
// not start with one.
func scanNumber(b []byte) int64 {
	if len(b) > 0 && b[0] == '"' {
		b = b[1:]
	}
	n, i := int64(0), 0
	for ; i < len(b) && '0' <= b[i] && b[i] <= '9'; i++ {
		if n = 10*n + int64(b[i]-'0'); n > 1<<53 {
			return -1
		}
	}
	if i == 0 {
		return -1
	}
	return n
}
