package configs

import (
	"encoding"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Params is a block of a configuration that is decoded later, by whoever knows its fields.
type Params struct{ pos Position }

// ParseParams reads a block from a document of its own.
func ParseParams(file string, data []byte) (Params, error) {
	root, problems := parseDocument(file, data)
	return Params{pos: root}, problems.Err()
}

// Pos returns where the block stands, or where it would.
func (p Params) Pos() Position { return p.pos }

// At returns the position of a value in the block: At("conditions[0].metric").
func (p Params) At(path string) Position { return p.pos.At(path) }

// Has tells whether the block sets a value, and not to null.
func (p Params) Has(path string) bool { return p.pos.Has(path) }

// IsZero reports that the block is absent, null or has no fields.
func (p Params) IsZero() bool {
	return p.pos.node == nil || isNull(p.pos.node) || p.pos.node.Kind == yaml.MappingNode && len(p.pos.node.Content) == 0
}

// Decode reads the block into dst, a pointer to a struct whose fields have json tags. Fields
// that the block does not set, or sets to null, keep their values, so dst holds the defaults.
//
// A field may be a bool, a string, any integer, a float64 (finite), a time.Duration ("60s"), an
// encoding.TextUnmarshaler, a pointer, slice, map[string]T or struct of these, or Params for
// a block inside the block. A struct field named Pos of type Position is set to the place of the struct.
//
// The error is Problems: every unknown field and every value of a wrong type with its place.
func (p Params) Decode(dst any) error {
	if p.pos.node == nil || isNull(p.pos.node) {
		return nil
	}
	var problems Problems
	decode(p.pos, "json", dst, &problems)
	return problems.Err()
}

// decode reads the value at p into what dst points to. tag is the struct tag that names the fields.
func decode(p Position, tag string, dst any, problems *Problems) {
	d := decoder{file: p.File, tag: tag, problems: problems}
	d.decode(p, dst)
}

func (d *decoder) decode(p Position, dst any) {
	var at *step
	if p.Path != "" {
		at = &step{key: p.Path, index: -1}
	}
	d.value(p.node, reflect.ValueOf(dst).Elem(), at)
}

type decoder struct {
	file     string
	tag      string
	problems *Problems
	unknown  func(*Problem) // takes what is said about unknown fields; nil: they are problems
}

func (d *decoder) position(n *yaml.Node, at *step) Position {
	return Position{File: d.file, Line: n.Line, Column: n.Column, Path: at.String(), node: n}
}

func (d *decoder) report(n *yaml.Node, at *step, remedy, format string, args ...any) {
	if len(*d.problems) < maxProblems {
		d.problems.Add(d.position(n, at).Problem(remedy, format, args...))
	}
}

func (d *decoder) wants(n *yaml.Node, at *step, what, remedy string) {
	d.report(n, at, remedy, "wants %s, got %s", what, describe(n))
}

var (
	paramsType   = reflect.TypeFor[Params]()
	positionType = reflect.TypeFor[Position]()
	durationType = reflect.TypeFor[time.Duration]()
)

func (d *decoder) value(n *yaml.Node, dst reflect.Value, at *step) {
	if dst.Type() == paramsType {
		dst.Set(reflect.ValueOf(Params{pos: d.position(n, at)}))
		return
	}
	if isNull(n) {
		return
	}
	if text, ok := dst.Addr().Interface().(encoding.TextUnmarshaler); ok && (n.Kind == yaml.ScalarNode || dst.Kind() != reflect.Struct) {
		d.text(n, text, at)
		return
	}
	if dst.Type() == durationType {
		d.duration(n, dst, at)
		return
	}
	switch dst.Kind() {
	case reflect.Pointer:
		value := reflect.New(dst.Type().Elem())
		d.value(n, value.Elem(), at)
		dst.Set(value)
	case reflect.Struct:
		d.object(n, dst, at)
	case reflect.Map:
		d.mapping(n, dst, at)
	case reflect.Slice:
		d.list(n, dst, at)
	case reflect.String:
		if s := n.ShortTag(); n.Kind == yaml.ScalarNode && (s == "!!str" || s == "!!timestamp") {
			dst.SetString(n.Value)
			return
		}
		remedy := ""
		if n.Kind == yaml.ScalarNode {
			remedy = "put it in quotes"
		}
		d.wants(n, at, "a string", remedy)
	case reflect.Bool:
		if b, ok := boolean(n); ok {
			dst.SetBool(b)
			return
		}
		d.wants(n, at, "true or false", "")
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		d.integer(n, dst, at)
	case reflect.Float32, reflect.Float64:
		f, ok := number(n)
		switch {
		case !ok:
			d.wants(n, at, "a number", unquote(n))
		case math.IsNaN(f) || math.IsInf(f, 0):
			d.wants(n, at, "a finite number", "")
		default:
			dst.SetFloat(f)
		}
	default:
		d.report(n, at, "", "kvgate cannot decode into %s", dst.Type())
	}
}

// boolean takes what YAML 1.1 takes, as llm-d's parser does: yes and on are true.
func boolean(n *yaml.Node) (value, ok bool) {
	if n.Kind != yaml.ScalarNode || n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) != 0 {
		return false, false
	}
	switch n.Value {
	case "true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON", "y", "Y":
		return true, true
	case "false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF", "n", "N":
		return false, true
	}
	return false, false
}

// number returns the value of a numeric scalar.
func number(n *yaml.Node) (float64, bool) {
	switch v := scalar(n).(type) {
	case int64:
		return float64(v), true
	case uint64:
		return float64(v), true
	case float64:
		return v, true
	}
	return 0, false
}

// scalar returns an int64, uint64 or float64, or nil for anything but a number.
func scalar(n *yaml.Node) any {
	if tag := n.ShortTag(); n.Kind != yaml.ScalarNode || tag != "!!int" && tag != "!!float" {
		return nil
	}
	var v any
	if n.Decode(&v) != nil {
		return nil
	}
	if i, ok := v.(int); ok {
		return int64(i)
	}
	return v
}

// unquote is the remedy for a number in quotes.
func unquote(n *yaml.Node) string {
	plain := *n
	plain.Style, plain.Tag = 0, ""
	if scalar(&plain) == nil {
		return ""
	}
	return "write " + n.Value + " without quotes"
}

func (d *decoder) integer(n *yaml.Node, dst reflect.Value, at *step) {
	const two63 = 1 << 63
	v := scalar(n)
	if f, ok := v.(float64); ok && f == math.Trunc(f) && f >= -two63 && f < two63 {
		v = int64(f) // 1e3 is an integer
	}
	fits := false
	switch v := v.(type) {
	case nil:
		d.wants(n, at, "an integer", unquote(n))
		return
	case int64:
		if dst.CanInt() {
			if fits = !dst.OverflowInt(v); fits {
				dst.SetInt(v)
			}
		} else if fits = v >= 0 && !dst.OverflowUint(uint64(v)); fits {
			dst.SetUint(uint64(v))
		}
	case uint64:
		if fits = dst.CanUint() && !dst.OverflowUint(v); fits {
			dst.SetUint(v)
		}
	case float64:
		if f := v; f != math.Trunc(f) || math.IsInf(f, 0) {
			d.wants(n, at, "an integer", "")
			return
		}
	}
	if !fits {
		what := "an integer"
		if dst.CanUint() {
			what = "an integer of at least 0"
		}
		d.wants(n, at, what, "the value is out of range")
	}
}

func (d *decoder) duration(n *yaml.Node, dst reflect.Value, at *step) {
	if n.ShortTag() == "!!int" && n.Value == "0" {
		dst.SetInt(0)
		return
	}
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" {
		if v, err := time.ParseDuration(n.Value); err == nil {
			dst.SetInt(int64(v))
			return
		}
	}
	d.wants(n, at, "a duration", durationRemedy)
}

const durationRemedy = `a number with a unit, such as "200ms", "60s" or "1h30m"`

func (d *decoder) text(n *yaml.Node, dst encoding.TextUnmarshaler, at *step) {
	switch n.ShortTag() {
	case "!!str", "!!int", "!!float":
		if err := dst.UnmarshalText([]byte(n.Value)); err != nil {
			d.report(n, at, "", "%v", err)
		}
	default:
		d.wants(n, at, "a string or a number", "")
	}
}

func (d *decoder) list(n *yaml.Node, dst reflect.Value, at *step) {
	if n.Kind != yaml.SequenceNode {
		remedy := ""
		if n.Kind == yaml.ScalarNode {
			remedy = "write [" + strings.Trim(quote(n.Value), `"`) + "]"
		}
		d.wants(n, at, "a list", remedy)
		return
	}
	out := reflect.MakeSlice(dst.Type(), len(n.Content), len(n.Content))
	for i, item := range n.Content {
		if isNull(item) {
			d.report(item, at.item(i), "remove it", "an empty list item")
			continue
		}
		d.value(item, out.Index(i), at.item(i))
	}
	dst.Set(out)
}

func (d *decoder) mapping(n *yaml.Node, dst reflect.Value, at *step) {
	if n.Kind != yaml.MappingNode {
		d.wants(n, at, "an object", "")
		return
	}
	out := reflect.MakeMapWithSize(dst.Type(), len(n.Content)/2)
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i].Value, reflect.New(dst.Type().Elem()).Elem()
		d.value(n.Content[i+1], value, at.field(key))
		out.SetMapIndex(reflect.ValueOf(key).Convert(dst.Type().Key()), value)
	}
	dst.Set(out)
}

func (d *decoder) object(n *yaml.Node, dst reflect.Value, at *step) {
	fields := fieldNames(dst.Type(), d.tag)
	known := slices.DeleteFunc(slices.Clone(fields), func(s string) bool { return s == "" })
	if n.Kind != yaml.MappingNode {
		d.wants(n, at, "an object", "fields: "+strings.Join(known, ", "))
		return
	}
	if f := dst.FieldByName("Pos"); f.IsValid() && f.Type() == positionType {
		f.Set(reflect.ValueOf(d.position(n, at)))
	}
	for i, name := range fields {
		if f := dst.Field(i); name != "" && f.Type() == paramsType {
			f.Set(reflect.ValueOf(Params{pos: d.position(n, at).At(name)}))
		}
	}
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if f := slices.Index(fields, key.Value); f >= 0 && key.Value != "" {
			d.value(value, dst.Field(f), at.field(key.Value))
			continue
		}
		p := d.position(key, at.field(key.Value)).Problem(Suggest(key.Value, "known fields", known), "unknown field")
		if d.unknown != nil {
			d.unknown(p)
		} else if len(*d.problems) < maxProblems {
			d.problems.Add(p)
		}
	}
}

// fieldNames returns the names of a struct's fields by index, "" for a field without a name.
func fieldNames(t reflect.Type, tag string) []string {
	names := make([]string, t.NumField())
	for i := range names {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get(tag), ",")
		if name != "-" {
			names[i] = name
		}
	}
	return names
}
