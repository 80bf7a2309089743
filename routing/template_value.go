package routing

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// value is a value of a chat template, with the rules of Python.
type value struct {
	kind valueKind
	num  uint64 // of bool, int and float
	str  string // of a string; the digits of an int that has more than 64 bits
	ref  any    // *[]value of a list or tuple, *dictValue, *funcValue, *loopValue, *macroNode closure
}

type valueKind uint8

const (
	kindUndefined valueKind = iota
	kindNone
	kindBool
	kindInt
	kindFloat
	kindString
	kindList
	kindTuple
	kindDict
	kindNamespace // a dict whose entries can be set
	kindFunc
	kindLoop
	kindView // what can be gone through, but is no list
)

var kindNames = [...]string{"undefined", "None", "bool", "int", "float", "str", "list", "tuple", "dict", "namespace", "function", "loop", "view"}

// dictValue keeps its keys in the order in which they came, as Python does.
type dictValue struct {
	keys  []value
	vals  []value
	index map[string]int // of string keys, once there are many
}

type funcValue struct {
	name string
	cost int // steps that a call takes: a method goes through its text or list
	call func(x *execution, args []value, named []namedValue) (value, error)
}

// viewValue are the items of Python's views of a dict, of a range, and of its generators,
// which can be gone through once.
type viewValue struct {
	items []value
	name  string // dict_keys and the like, "" of a generator
	bound [3]int // of a range: from, to, step
	used  bool
}

const rangeView = "range"

// view returns the items under a name.
func view(name string, items []value) value {
	return value{kind: kindView, ref: &viewValue{name: name, items: items}}
}

// generated returns the items of what Python makes only when they are asked for.
func generated(items []value) value { return view("", items) }

func (v value) view() *viewValue { return v.ref.(*viewValue) }

type namedValue struct {
	name string
	v    value
}

var none = value{kind: kindNone}

func boolValue(b bool) value {
	if b {
		return value{kind: kindBool, num: 1}
	}
	return value{kind: kindBool}
}
func intValue(n int) value       { return value{kind: kindInt, num: uint64(n)} }
func floatValue(f float64) value { return value{kind: kindFloat, num: math.Float64bits(f)} }
func stringValue(s string) value { return value{kind: kindString, str: s} }
func listValue(l []value) value  { return value{kind: kindList, ref: &l} }
func tupleValue(l ...value) value {
	return value{kind: kindTuple, ref: &l}
}
func dictOf(d *dictValue) value { return value{kind: kindDict, ref: d} }

func (v value) int() int       { return int(v.num) }
func (v value) float() float64 { return math.Float64frombits(v.num) }
func (v value) list() []value  { return *v.ref.(*[]value) }
func (v value) dict() *dictValue {
	return v.ref.(*dictValue)
}
func (v value) isList() bool   { return v.kind == kindList || v.kind == kindTuple }
func (v value) isDict() bool   { return v.kind == kindDict }
func (v value) isNumber() bool { return v.kind == kindInt || v.kind == kindFloat || v.kind == kindBool }

// asFloat returns a number of any kind as a float.
func (v value) asFloat() float64 {
	if v.kind == kindFloat {
		return v.float()
	}
	if v.str != "" {
		f, _ := strconv.ParseFloat(v.str, 64) // digits
		return f
	}
	return float64(v.int())
}

func (v value) truth() bool {
	switch v.kind {
	case kindUndefined, kindNone:
		return false
	case kindBool, kindInt:
		return v.num != 0 || v.str != ""
	case kindFloat:
		return v.float() != 0
	case kindString:
		return v.str != ""
	case kindList, kindTuple:
		return len(v.list()) > 0
	case kindDict:
		return len(v.dict().keys) > 0
	case kindView:
		return v.view().name == "" || len(v.view().items) > 0
	}
	return true
}

// manyKeys is when a dict gets an index.
const manyKeys = 12

func (d *dictValue) find(key value) int {
	if key.kind == kindString {
		return d.findText(key.str)
	}
	m := meter{maxKeyCost}
	for i := range d.keys {
		if m.equal(d.keys[i], key, 0) {
			return i
		}
	}
	return -1
}

// maxKeyCost is what looking for a key may cost, far more than a key does: none that is
// a list or dict is let in.
const maxKeyCost = 1 << 24

// isKey reports whether a value can be a key: Python's tuples can, too.
func (v value) isKey() bool { return v.kind <= kindString }

func (d *dictValue) findText(key string) int {
	if d.index != nil {
		if i, ok := d.index[key]; ok {
			return i
		}
		return -1
	}
	for i := range d.keys {
		if k := &d.keys[i]; len(k.str) == len(key) && k.kind == kindString && k.str == key {
			return i
		}
	}
	return -1
}

func (d *dictValue) get(key value) (value, bool) {
	if i := d.find(key); i >= 0 {
		return d.vals[i], true
	}
	return value{}, false
}

func (d *dictValue) text(key string) (value, bool) {
	if i := d.findText(key); i >= 0 {
		return d.vals[i], true
	}
	return value{}, false
}

func (d *dictValue) set(key, v value) {
	if i := d.find(key); i >= 0 {
		d.vals[i] = v
		return
	}
	if d.keys == nil { // most have a few
		both := make([]value, 8)
		d.keys, d.vals = both[0:0:4], both[4:4:8]
	}
	d.keys = append(d.keys, key)
	d.vals = append(d.vals, v)
	switch {
	case d.index != nil:
		if key.kind == kindString {
			d.index[key.str] = len(d.keys) - 1
		}
	case len(d.keys) == manyKeys:
		d.index = make(map[string]int, 2*manyKeys)
		for i, k := range d.keys {
			if k.kind == kindString {
				d.index[k.str] = i
			}
		}
	}
}

func (d *dictValue) put(key string, v value) { d.set(stringValue(key), v) }

// meter counts what comparing values costs, in steps: values that hold one value many
// times are a tree far larger than they are.
type meter struct{ left int }

// equal is Python's ==. When the meter runs out the answer says nothing. It bounds its
// own depth.
func (m *meter) equal(a, b value, depth int) bool {
	if m.left -= 1 + min(len(a.str), len(b.str))/64; m.left < 0 || depth > maxValueDepth {
		m.left = min(m.left, -1)
		return false
	}
	if a.isNumber() && b.isNumber() {
		if a.kind != kindFloat && b.kind != kindFloat {
			return a.num == b.num && a.str == b.str
		}
		return a.asFloat() == b.asFloat()
	}
	if a.kind != b.kind {
		return false
	}
	switch a.kind {
	case kindString:
		return a.str == b.str
	case kindList, kindTuple:
		x, y := a.list(), b.list()
		if len(x) != len(y) {
			return false
		}
		for i := range x {
			if !m.equal(x[i], y[i], depth+1) {
				return false
			}
		}
		return true
	case kindDict:
		x, y := a.dict(), b.dict()
		if len(x.keys) != len(y.keys) {
			return false
		}
		for i, k := range x.keys {
			v, ok := y.get(k)
			if !ok || !m.equal(x.vals[i], v, depth+1) {
				return false
			}
		}
		return true
	case kindUndefined, kindNone:
		return true
	}
	return a.ref == b.ref
}

// compare orders two values as Python's < does; what has no order is an error.
func (m *meter) compare(a, b value) (int, error) {
	m.left -= 1 + min(len(a.str), len(b.str))/64
	switch {
	case m.left < 0:
		return 0, errTemplateSteps
	case a.isNumber() && b.isNumber():
		if a.kind != kindFloat && b.kind != kindFloat && a.str == "" && b.str == "" {
			return compareInts(a.int(), b.int()), nil
		}
		x, y := a.asFloat(), b.asFloat()
		switch {
		case x < y:
			return -1, nil
		case x > y:
			return 1, nil
		}
		return 0, nil
	case a.kind == kindString && b.kind == kindString:
		return strings.Compare(a.str, b.str), nil
	case a.isList() && a.kind == b.kind:
		x, y := a.list(), b.list()
		for i := 0; i < len(x) && i < len(y); i++ {
			if m.equal(x[i], y[i], 0) {
				continue
			}
			return m.compare(x[i], y[i])
		}
		return compareInts(len(x), len(y)), nil
	}
	return 0, fmt.Errorf("%s and %s have no order", kindNames[a.kind], kindNames[b.kind])
}

func compareInts(a, b int) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// maxValueDepth bounds the nesting of what is printed, compared and parsed.
const maxValueDepth = 200

var errValueDepth = errors.New("values are nested too deeply")

// appendText appends str(v): what a template prints. Of what is no string it appends
// at most limit bytes and a bit.
func appendText(dst []byte, v value, limit int) ([]byte, error) {
	if v.kind == kindString {
		return append(dst, v.str...), nil
	}
	if v.kind == kindUndefined {
		return dst, nil
	}
	return appendRepr(dst, v, len(dst)+limit, 0)
}

// appendRepr appends repr(v), unless dst gets longer than limit.
func appendRepr(dst []byte, v value, limit, depth int) ([]byte, error) {
	if depth > maxValueDepth {
		return dst, errValueDepth
	}
	if len(dst) > limit {
		return dst, errTemplateMemory
	}
	var err error
	switch v.kind {
	case kindUndefined:
		return append(dst, "Undefined"...), nil
	case kindNone:
		return append(dst, "None"...), nil
	case kindBool:
		if v.num != 0 {
			return append(dst, "True"...), nil
		}
		return append(dst, "False"...), nil
	case kindInt:
		if v.str != "" {
			return append(dst, v.str...), nil
		}
		return strconv.AppendInt(dst, int64(v.num), 10), nil
	case kindFloat:
		return appendFloat(dst, v.float()), nil
	case kindString:
		return appendQuoted(dst, v.str), nil
	case kindList, kindTuple:
		open, end := byte('['), byte(']')
		if v.kind == kindTuple {
			open, end = '(', ')'
		}
		dst = append(dst, open)
		for i, x := range v.list() {
			if i > 0 {
				dst = append(dst, ", "...)
			}
			if dst, err = appendRepr(dst, x, limit, depth+1); err != nil {
				return dst, err
			}
		}
		if v.kind == kindTuple && len(v.list()) == 1 {
			dst = append(dst, ',')
		}
		return append(dst, end), nil
	case kindView:
		w := v.view()
		switch w.name {
		case "":
			return dst, errors.New("a generator cannot be printed") // Python prints an address
		case rangeView:
			dst = fmt.Appendf(dst, "range(%d, %d", w.bound[0], w.bound[1])
			if w.bound[2] != 1 {
				dst = fmt.Appendf(dst, ", %d", w.bound[2])
			}
			return append(dst, ')'), nil
		}
		dst = append(append(dst, w.name...), '(')
		if dst, err = appendRepr(dst, listValue(w.items), limit, depth+1); err != nil {
			return dst, err
		}
		return append(dst, ')'), nil
	case kindDict:
		d := v.dict()
		dst = append(dst, '{')
		for i := range d.keys {
			if i > 0 {
				dst = append(dst, ", "...)
			}
			if dst, err = appendRepr(dst, d.keys[i], limit, depth+1); err != nil {
				return dst, err
			}
			dst = append(dst, ": "...)
			if dst, err = appendRepr(dst, d.vals[i], limit, depth+1); err != nil {
				return dst, err
			}
		}
		return append(dst, '}'), nil
	}
	return dst, fmt.Errorf("a %s cannot be printed", kindNames[v.kind]) // Python prints an address
}

// appendFloat appends repr of a float.
func appendFloat(dst []byte, f float64) []byte {
	switch {
	case math.IsNaN(f):
		return append(dst, "nan"...)
	case math.IsInf(f, 0):
		if f < 0 {
			dst = append(dst, '-')
		}
		return append(dst, "inf"...)
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.AppendFloat(dst, f, 'e', -1, 64)
	}
	start := len(dst)
	dst = strconv.AppendFloat(dst, f, 'f', -1, 64)
	for _, c := range dst[start:] {
		if c == '.' {
			return dst
		}
	}
	return append(dst, ".0"...)
}

// appendQuoted appends repr of a string.
func appendQuoted(dst []byte, s string) []byte {
	quote := byte('\'')
	if strings.IndexByte(s, '\'') >= 0 && strings.IndexByte(s, '"') < 0 {
		quote = '"'
	}
	dst = append(dst, quote)
	for _, r := range s {
		switch {
		case r == rune(quote) || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, `\n`...)
		case r == '\r':
			dst = append(dst, `\r`...)
		case r == '\t':
			dst = append(dst, `\t`...)
		case r < 0x100 && !unicode.IsPrint(r):
			dst = fmt.Appendf(dst, `\x%02x`, r)
		case r >= 0x100 && r < 0x10000 && !unicode.IsPrint(r):
			dst = fmt.Appendf(dst, `\u%04x`, r)
		case r >= 0x10000 && !unicode.IsPrint(r):
			dst = fmt.Appendf(dst, `\U%08x`, r)
		default:
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, quote)
}

// jsonStyle are the arguments of tojson.
type jsonStyle struct {
	ascii    bool
	indent   string
	pretty   bool
	item     string
	key      string
	sortKeys bool
	limit    int // of the text so far, bytes
}

// appendJSON appends what json.dumps makes of v.
func appendJSON(dst []byte, v value, s *jsonStyle, depth int) ([]byte, error) {
	if depth > maxValueDepth {
		return dst, errValueDepth
	}
	if len(dst) > s.limit {
		return dst, errTemplateMemory
	}
	line := func(dst []byte, depth int) []byte {
		if s.pretty {
			dst = append(dst, '\n')
			for range depth {
				dst = append(dst, s.indent...)
			}
		}
		return dst
	}
	var err error
	switch v.kind {
	case kindNone:
		return append(dst, "null"...), nil
	case kindBool:
		return strconv.AppendBool(dst, v.num != 0), nil
	case kindInt:
		return appendRepr(dst, v, s.limit, depth)
	case kindFloat:
		f := v.float()
		switch {
		case math.IsNaN(f):
			return append(dst, "NaN"...), nil
		case math.IsInf(f, 1):
			return append(dst, "Infinity"...), nil
		case math.IsInf(f, -1):
			return append(dst, "-Infinity"...), nil
		}
		return appendFloat(dst, f), nil
	case kindString:
		return appendJSONString(dst, v.str, s.ascii), nil
	case kindList, kindTuple:
		list := v.list()
		if len(list) == 0 {
			return append(dst, "[]"...), nil
		}
		dst = append(dst, '[')
		for i, x := range list {
			if i > 0 {
				dst = append(dst, s.item...)
			}
			if dst, err = appendJSON(line(dst, depth+1), x, s, depth+1); err != nil {
				return dst, err
			}
		}
		return append(line(dst, depth), ']'), nil
	case kindDict:
		d := v.dict()
		if len(d.keys) == 0 {
			return append(dst, "{}"...), nil
		}
		order := make([]int, len(d.keys))
		for i := range order {
			order[i] = i
		}
		if s.sortKeys {
			if err := (&meter{maxKeyCost}).sortBy(order, func(i int) value { return d.keys[i] }); err != nil {
				return dst, err
			}
		}
		dst = append(dst, '{')
		for n, i := range order {
			if n > 0 {
				dst = append(dst, s.item...)
			}
			dst = line(dst, depth+1)
			if k := d.keys[i]; k.kind == kindString {
				dst = appendJSONString(dst, k.str, s.ascii)
			} else {
				if k.kind == kindList || k.kind == kindTuple || k.kind >= kindDict {
					return dst, fmt.Errorf("tojson: a %s cannot be a key", kindNames[k.kind])
				}
				dst = append(dst, '"')
				if dst, err = appendJSON(dst, k, s, depth+1); err != nil {
					return dst, err
				}
				dst = append(dst, '"')
			}
			dst = append(dst, s.key...)
			if dst, err = appendJSON(dst, d.vals[i], s, depth+1); err != nil {
				return dst, err
			}
		}
		return append(line(dst, depth), '}'), nil
	}
	return dst, fmt.Errorf("tojson: a %s has no JSON", kindNames[v.kind])
}

func appendJSONString(dst []byte, s string, ascii bool) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	from := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' && (c < 0x7f || !ascii) {
			i++
			continue
		}
		dst = append(dst, s[from:i]...)
		switch c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\n':
			dst = append(dst, `\n`...)
		case '\r':
			dst = append(dst, `\r`...)
		case '\t':
			dst = append(dst, `\t`...)
		case '\f':
			dst = append(dst, `\f`...)
		case '\b':
			dst = append(dst, `\b`...)
		default:
			if c < utf8.RuneSelf {
				dst = append(dst, `\u00`...)
				dst = append(dst, hex[c>>4], hex[c&15])
				break
			}
			r, n := utf8.DecodeRuneInString(s[i:])
			if r < 0x10000 {
				dst = fmt.Appendf(dst, `\u%04x`, r)
			} else {
				dst = fmt.Appendf(dst, `\u%04x\u%04x`, 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff)
			}
			i += n - 1
		}
		i++
		from = i
	}
	return append(append(dst, s[from:]...), '"')
}

// sortBy sorts indices by keys, stably. Keys without an order are an error.
func (m *meter) sortBy(order []int, key func(int) value) error {
	var err error
	keys := make([]value, len(order))
	for i, k := range order {
		keys[i] = key(k)
	}
	at := make([]int, len(order))
	for i := range at {
		at[i] = i
	}
	slices.SortStableFunc(at, func(a, b int) int {
		c, e := m.compare(keys[a], keys[b])
		if e != nil && err == nil {
			err = e
		}
		return c
	})
	sorted := make([]int, len(order))
	for i, k := range at {
		sorted[i] = order[k]
	}
	copy(order, sorted)
	return err
}

// parseValue reads JSON as Python's json.loads does: keys in order, the last of
// equal ones counts, NaN and Infinity are numbers. Strings alias s where they can.
func parseValue(s string) (value, error) {
	p := valueParser{s: s}
	return p.whole()
}

// whole reads all of the text.
func (p *valueParser) whole() (value, error) {
	v, err := p.value(0)
	if err != nil {
		return v, err
	}
	if p.space(); p.i < len(p.s) {
		return v, p.fail("more than one value")
	}
	return v, nil
}

type valueParser struct {
	s        string
	i        int
	messages func(*valueParser) (value, error) // reads the list of that name at the top; may be nil
}

func (p *valueParser) fail(what string) error {
	return fmt.Errorf("JSON: %s at offset %d", what, p.i)
}

func (p *valueParser) space() {
	for p.i < len(p.s) && (p.s[p.i] == ' ' || p.s[p.i] == '\n' || p.s[p.i] == '\t' || p.s[p.i] == '\r') {
		p.i++
	}
}

// next reports whether c comes next.
func (p *valueParser) next(c byte) bool {
	p.space()
	return p.i < len(p.s) && p.s[p.i] == c
}

func (p *valueParser) take(c byte) bool {
	if p.next(c) {
		p.i++
		return true
	}
	return false
}

func (p *valueParser) value(depth int) (value, error) {
	if depth > maxValueDepth {
		return none, errValueDepth
	}
	p.space()
	if p.i >= len(p.s) {
		return none, p.fail("nothing")
	}
	switch c := p.s[p.i]; c {
	case '{':
		p.i++
		d := &dictValue{}
		if p.take('}') {
			return dictOf(d), nil
		}
		for {
			p.space()
			if p.i >= len(p.s) || p.s[p.i] != '"' {
				return none, p.fail("a key is missing")
			}
			key, err := p.text()
			if err != nil {
				return none, err
			}
			if !p.take(':') {
				return none, p.fail("a colon is missing")
			}
			var v value
			if depth == 0 && p.messages != nil && key == "messages" {
				v, err = p.messages(p)
			} else {
				v, err = p.value(depth + 1)
			}
			if err != nil {
				return none, err
			}
			d.put(key, v)
			if p.take('}') {
				return dictOf(d), nil
			}
			if !p.take(',') {
				return none, p.fail("a comma is missing")
			}
		}
	case '[':
		p.i++
		list := []value{}
		if p.take(']') {
			return listValue(list), nil
		}
		for {
			v, err := p.value(depth + 1)
			if err != nil {
				return none, err
			}
			list = append(list, v)
			if p.take(']') {
				return listValue(list), nil
			}
			if !p.take(',') {
				return none, p.fail("a comma is missing")
			}
		}
	case '"':
		s, err := p.text()
		return stringValue(s), err
	}
	for _, w := range []struct {
		text string
		v    value
	}{
		{"true", boolValue(true)}, {"false", boolValue(false)}, {"null", none},
		{"NaN", floatValue(math.NaN())}, {"Infinity", floatValue(math.Inf(1))}, {"-Infinity", floatValue(math.Inf(-1))},
	} {
		if strings.HasPrefix(p.s[p.i:], w.text) {
			p.i += len(w.text)
			return w.v, nil
		}
	}
	return p.number()
}

func (p *valueParser) number() (value, error) {
	from, float := p.i, false
	for p.i < len(p.s) {
		switch c := p.s[p.i]; {
		case c-'0' <= 9 || c == '-':
		case c == '.' || c == 'e' || c == 'E' || c == '+':
			float = true
		default:
			goto end
		}
		p.i++
	}
end:
	text := p.s[from:p.i]
	if !float {
		n, err := strconv.ParseInt(text, 10, 64)
		if err == nil {
			return intValue(int(n)), nil
		}
		if digits := strings.TrimPrefix(text, "-"); errors.Is(err, strconv.ErrRange) && strings.Trim(digits, "0123456789") == "" && digits[0] != '0' {
			return value{kind: kindInt, str: text}, nil
		}
		return none, p.fail("no number")
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return none, p.fail("no number")
	}
	return floatValue(f), nil
}

var errSurrogate = errors.New("JSON: half a surrogate pair is no text")

// text reads the string at i.
func (p *valueParser) text() (string, error) {
	p.i++
	from := p.i
	n := strings.IndexByte(p.s[from:], '"')
	if n < 0 {
		return "", p.fail("an open string")
	}
	if strings.IndexByte(p.s[from:from+n], '\\') < 0 {
		p.i = from + n + 1
		return p.s[from : from+n], nil
	}
	var out strings.Builder
	out.Grow(n + n/8 + 16)
	quote := from + n
	for {
		if quote < p.i {
			k := strings.IndexByte(p.s[p.i:], '"')
			if k < 0 {
				break
			}
			quote = p.i + k
		}
		k := strings.IndexByte(p.s[p.i:quote], '\\')
		if k < 0 {
			out.WriteString(p.s[p.i:quote])
			p.i = quote + 1
			return out.String(), nil
		}
		out.WriteString(p.s[p.i : p.i+k])
		p.i += k + 1
		c := p.s[p.i]
		p.i++
		switch c {
		case '"', '\\', '/':
			out.WriteByte(c)
		case 'b':
			out.WriteByte('\b')
		case 'f':
			out.WriteByte('\f')
		case 'n':
			out.WriteByte('\n')
		case 'r':
			out.WriteByte('\r')
		case 't':
			out.WriteByte('\t')
		case 'u':
			r, err := p.hex()
			if err != nil {
				return "", err
			}
			if r >= 0xd800 && r < 0xe000 {
				if r >= 0xdc00 || !strings.HasPrefix(p.s[p.i:], `\u`) {
					return "", errSurrogate
				}
				p.i += 2
				low, err := p.hex()
				if err != nil {
					return "", err
				}
				if low < 0xdc00 || low >= 0xe000 {
					return "", errSurrogate
				}
				r = 0x10000 + (r-0xd800)<<10 + (low - 0xdc00)
			}
			out.WriteRune(r)
		default:
			return "", p.fail("an unknown escape")
		}
	}
	return "", p.fail("an open string")
}

func (p *valueParser) hex() (rune, error) {
	if p.i+4 > len(p.s) {
		return 0, p.fail("a short escape")
	}
	n, err := strconv.ParseUint(p.s[p.i:p.i+4], 16, 32)
	if err != nil {
		return 0, p.fail("no hexadecimal number")
	}
	p.i += 4
	return rune(n), nil
}
