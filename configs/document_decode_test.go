package configs

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
)

type decodeTarget struct {
	Bool     bool              `json:"bool"`
	Int      int               `json:"int"`
	Int8     int8              `json:"int8"`
	Uint16   uint16            `json:"uint16"`
	Uint64   uint64            `json:"uint64"`
	Float    float64           `json:"float"`
	Text     string            `json:"text"`
	Duration time.Duration     `json:"duration"`
	Quantity Quantity          `json:"quantity"`
	Pointer  *int              `json:"pointer"`
	List     []string          `json:"list"`
	Objects  []decodeInner     `json:"objects"`
	Map      map[string]string `json:"map"`
	Maps     map[string]decodeInner
	Inner    decodeInner `json:"inner,omitempty"`
	Raw      Params      `json:"raw"`
	Channel  chan int    `json:"channel"`
	Ignored  int         `json:"-"`
	Pos      Position    `json:"-"`
}

type decodeInner struct {
	A int      `json:"a"`
	B []int    `json:"b"`
	P Params   `json:"p"`
	Q Position `json:"-"`
}

// params returns text as the parameters of a plugin.
func params(t *testing.T, text string) Params {
	t.Helper()
	s, err := ParseScheduling("f", []byte(head+"plugins:\n- type: x\n  parameters:\n"+text))
	if err != nil {
		t.Fatalf("got %v for %q, want no error", err, text)
	}
	return s.Plugins[0].Parameters
}

func TestParamsDecode(t *testing.T) {
	f := func(text string, want decodeTarget) {
		t.Helper()
		var got decodeTarget
		if err := params(t, "    "+text).Decode(&got); err != nil {
			t.Errorf("got error %v for %q, want none", err, text)
		}
		got.Pos, got.Raw, got.Inner.P = Position{}, Params{}, Params{}
		for i := range got.Objects {
			got.Objects[i].P = Params{}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v for %q, want %+v", got, text, want)
		}
	}
	seven := 7
	f("{}", decodeTarget{})
	for _, s := range []string{"true", "True", "yes", "on", "y"} {
		f("{bool: "+s+"}", decodeTarget{Bool: true})
	}
	for _, s := range []string{"false", "FALSE", "no", "off", "n"} {
		f("{bool: "+s+"}", decodeTarget{})
	}
	f("{int: 5}", decodeTarget{Int: 5})
	f("{int: -5}", decodeTarget{Int: -5})
	f("{int: 0x10}", decodeTarget{Int: 16})
	f("{int: 1_000}", decodeTarget{Int: 1000})
	f("{int: 1e3}", decodeTarget{Int: 1000})
	f("{int: 2.0}", decodeTarget{Int: 2})
	f("{int8: -128}", decodeTarget{Int8: -128})
	f("{uint16: 65535}", decodeTarget{Uint16: 65535})
	f("{uint64: 18446744073709551615}", decodeTarget{Uint64: math.MaxUint64})
	f("{float: 1}", decodeTarget{Float: 1})
	f("{float: -1.5e3}", decodeTarget{Float: -1500})
	f("{float: 18446744073709551615}", decodeTarget{Float: math.MaxUint64})
	f("{text: a}", decodeTarget{Text: "a"})
	f("{text: 'true'}", decodeTarget{Text: "true"})
	f("{text: 2001-01-01}", decodeTarget{Text: "2001-01-01"})
	f("{text: !!str 5}", decodeTarget{Text: "5"})
	f("{text: yes}", decodeTarget{Text: "yes"})
	f("{duration: 1m30s}", decodeTarget{Duration: 90 * time.Second})
	f("{duration: 0}", decodeTarget{})
	f("{quantity: 1Ki}", decodeTarget{Quantity: 1024})
	f("{quantity: 12}", decodeTarget{Quantity: 12})
	f("{quantity: 1.5}", decodeTarget{Quantity: 2})
	f("{pointer: 7}", decodeTarget{Pointer: &seven})
	f("{pointer: ~}", decodeTarget{})
	f("{list: [a, b]}", decodeTarget{List: []string{"a", "b"}})
	f("{list: []}", decodeTarget{List: []string{}})
	f("{objects: [{a: 1}, {b: [2]}]}", decodeTarget{Objects: []decodeInner{{A: 1}, {B: []int{2}}}})
	f("{map: {Upper.Case/x: y, 5: z}}", decodeTarget{Map: map[string]string{"Upper.Case/x": "y", "5": "z"}})
	f("{inner: {a: 1}}", decodeTarget{Inner: decodeInner{A: 1}})
}

func TestParamsDecodeKeepsDefaults(t *testing.T) {
	want := decodeTarget{Int: 5, List: []string{"x"}, Inner: decodeInner{A: 1, B: []int{2}}}
	f := func(p Params) {
		t.Helper()
		got := decodeTarget{Int: 5, List: []string{"x"}, Inner: decodeInner{A: 1, B: []int{2}}}
		if err := p.Decode(&got); err != nil {
			t.Errorf("got error %v, want none", err)
		}
		got.Pos, got.Raw, got.Inner.P = Position{}, Params{}, Params{}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	f(Params{})
	f(params(t, ""))
	f(params(t, "    {}"))
	f(params(t, "    {int: ~, list: null, inner: {}}"))
}

func TestParamsDecodePlaces(t *testing.T) {
	p := params(t, "    raw:\n      x: {a: 5}\n    inner: {a: 1}\n")
	var in decodeTarget
	if err := p.Decode(&in); err != nil {
		t.Fatal(err)
	}
	f := func(what string, got Position, want string) {
		t.Helper()
		if got.String() != want {
			t.Errorf("got %s for %s, want %s", got, what, want)
		}
	}
	f("the block", in.Pos, "f:6:5: plugins[0].parameters")
	f("a block inside", in.Raw.Pos(), "f:7:7: plugins[0].parameters.raw")
	f("a value in it", in.Raw.At("x.a"), "f:7:14: plugins[0].parameters.raw.x.a")
	f("an absent block inside", in.Inner.P.Pos(), "f:8:12: plugins[0].parameters.inner.p")
	if got, want := in.Inner.P.IsZero(), true; got != want {
		t.Errorf("got IsZero %v of an absent block, want %v", got, want)
	}
	var x struct {
		X decodeInner `json:"x"`
	}
	if err := in.Raw.Decode(&x); err != nil || x.X.A != 5 {
		t.Errorf("got %d and error %v, want 5", x.X.A, err)
	}
	var y struct{}
	err := in.Raw.Decode(&y)
	if got, want := fmt.Sprint(err), "f:7:7: plugins[0].parameters.raw.x: unknown field (known fields: none)"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestParamsDecodeErrors(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		var dst decodeTarget
		err := params(t, "    "+text).Decode(&dst)
		var problems Problems
		if !errors.As(err, &problems) {
			t.Fatalf("got error %v for %q, want Problems", err, text)
		}
		if got := strings.ReplaceAll(err.Error(), "plugins[0].parameters", "P"); got != want {
			t.Errorf("got\n%s\nfor %q, want\n%s", got, text, want)
		}
	}
	f("5", "f:6:5: P: wants an object, got the number 5 (fields: bool, int, int8, uint16, uint64, float, text, duration, quantity, pointer, list, objects, map, inner, raw, channel)")
	f("{bool: 'true'}", `f:6:12: P.bool: wants true or false, got the string "true"`)
	f("{bool: 1}", `f:6:12: P.bool: wants true or false, got the number 1`)
	f("{bool: [true]}", `f:6:12: P.bool: wants true or false, got a list`)
	f("{int: 1.5}", `f:6:11: P.int: wants an integer, got the number 1.5`)
	f("{int: .inf}", `f:6:11: P.int: wants an integer, got the number .inf`)
	f("{int: 1e30}", `f:6:11: P.int: wants an integer, got the number 1e30 (the value is out of range)`)
	f("{int: '5'}", `f:6:11: P.int: wants an integer, got the string "5" (write 5 without quotes)`)
	f("{int: '5x'}", `f:6:11: P.int: wants an integer, got the string "5x"`)
	f("{int: true}", `f:6:11: P.int: wants an integer, got the boolean true`)
	f("{int: {}}", `f:6:11: P.int: wants an integer, got an object`)
	f("{int: !!int x}", `f:6:11: P.int: wants an integer, got the number x`)
	f("{int: 9223372036854775808}", `f:6:11: P.int: wants an integer, got the number 9223372036854775808 (the value is out of range)`)
	f("{int8: 128}", `f:6:12: P.int8: wants an integer, got the number 128 (the value is out of range)`)
	f("{uint16: -1}", `f:6:14: P.uint16: wants an integer of at least 0, got the number -1 (the value is out of range)`)
	f("{uint16: 65536}", `f:6:14: P.uint16: wants an integer of at least 0, got the number 65536 (the value is out of range)`)
	f("{float: x}", `f:6:13: P.float: wants a number, got the string "x"`)
	f("{float: []}", `f:6:13: P.float: wants a number, got a list`)
	f("{float: -.inf}", `f:6:13: P.float: wants a finite number, got the number -.inf`)
	f("{text: 5}", `f:6:12: P.text: wants a string, got the number 5 (put it in quotes)`)
	f("{text: {}}", `f:6:12: P.text: wants a string, got an object`)
	f("{duration: 5}", `f:6:16: P.duration: wants a duration, got the number 5 (a number with a unit, such as "200ms", "60s" or "1h30m")`)
	f("{duration: 5 minutes}", `f:6:16: P.duration: wants a duration, got the string "5 minutes" (a number with a unit, such as "200ms", "60s" or "1h30m")`)
	f("{duration: [5s]}", `f:6:16: P.duration: wants a duration, got a list (a number with a unit, such as "200ms", "60s" or "1h30m")`)
	f("{quantity: true}", `f:6:16: P.quantity: wants a string or a number, got the boolean true`)
	f("{quantity: [1]}", `f:6:16: P.quantity: wants a string or a number, got a list`)
	f("{pointer: x}", `f:6:15: P.pointer: wants an integer, got the string "x"`)
	f("{list: a}", `f:6:12: P.list: wants a list, got the string "a" (write [a])`)
	f("{list: {}}", `f:6:12: P.list: wants a list, got an object`)
	f("{list: [a, ~, 5]}", "f:6:16: P.list[1]: an empty list item (remove it)\nf:6:19: P.list[2]: wants a string, got the number 5 (put it in quotes)")
	f("{map: [a]}", `f:6:11: P.map: wants an object, got a list`)
	f("{map: {a: 5}}", `f:6:15: P.map.a: wants a string, got the number 5 (put it in quotes)`)
	f("{inner: {c: 5}}", `f:6:14: P.inner.c: unknown field (known fields: a, b, p)`)
	f("{objects: [{bb: 5}, x]}", "f:6:17: P.objects[0].bb: unknown field (known fields: a, b, p)\nf:6:25: P.objects[1]: wants an object, got the string \"x\" (fields: a, b, p)")
	f("{channel: 5}", `f:6:15: P.channel: kvgate cannot decode into chan int`)
	f("{Ignored: 5}", `f:6:6: P.Ignored: unknown field (known fields: bool, int, int8, uint16, uint64, float, text, duration, quantity, pointer, list, objects, map, inner, raw, channel)`)
	f("{hidden: 5, Maps: {}, '': 1}", "f:6:6: P.hidden: unknown field (known fields: bool, int, int8, uint16, uint64, float, text, duration, quantity, pointer, list, objects, map, inner, raw, channel)\n"+
		"f:6:17: P.Maps: unknown field (did you mean `map`?)\n"+
		"f:6:27: P: unknown field (known fields: bool, int, int8, uint16, uint64, float, text, duration, quantity, pointer, list, objects, map, inner, raw, channel)")

	p := params(t, "    {"+strings.Repeat("x", 10)+"}")
	if got, want := p.IsZero(), false; got != want {
		t.Errorf("got IsZero %v, want %v", got, want)
	}
	var many strings.Builder
	many.WriteString("    list:\n")
	for range 2 * maxProblems {
		many.WriteString("    - 5\n")
	}
	err := params(t, many.String()).Decode(new(decodeTarget))
	var problems Problems
	if errors.As(err, &problems); len(problems) != maxProblems {
		t.Errorf("got %d problems, want %d", len(problems), maxProblems)
	}
}

func TestParseParamsErrors(t *testing.T) {
	_, err := ParseParams("f", []byte("a: 1\na: 2\n"))
	if got, want := fmt.Sprint(err), "f:2:1: a: set twice, first in line 1 (keep one of them)"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
