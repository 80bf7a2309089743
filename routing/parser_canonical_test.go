package routing

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
)

// randomJSON makes a JSON document with white space, equal keys and every kind
// of number and string.
func randomJSON(rng *rand.Rand, depth int) []byte {
	space := func() []byte { return []byte(" \n\t\r  "[rng.IntN(3):][:rng.IntN(3)]) }
	str := func() []byte { return append(append([]byte{'"'}, randomString(rng, rng.IntN(12))...), '"') }
	b := space()
	kind := rng.IntN(10)
	if depth == 0 {
		kind = rng.IntN(6)
	}
	switch kind {
	case 0:
		b = append(b, [...]string{"true", "false", "null"}[rng.IntN(3)]...)
	case 1, 2:
		b = append(b, randomNumber(rng)...)
	case 3, 4, 5:
		b = append(b, str()...)
	case 6, 7:
		b = append(b, '[')
		for k := range rng.IntN(5) {
			if k > 0 {
				b = append(b, ',')
			}
			b = append(b, randomJSON(rng, depth-1)...)
		}
		b = append(append(b, space()...), ']')
	default:
		b = append(b, '{')
		for k := range rng.IntN(20) {
			if k > 0 {
				b = append(b, ',')
			}
			b = append(b, space()...)
			if rng.IntN(2) == 0 {
				b = fmt.Appendf(b, "%q", string(rune('a'+rng.IntN(8)))) // often equal
			} else {
				b = append(b, str()...)
			}
			b = append(append(b, space()...), ':')
			b = append(b, randomJSON(rng, depth-1)...)
		}
		b = append(append(b, space()...), '}')
	}
	return append(b, space()...)
}

func randomNumber(rng *rand.Rand) []byte {
	sign := [...]string{"", "-"}[rng.IntN(2)]
	switch rng.IntN(5) {
	case 0:
		return []byte(sign + strconv.Itoa(rng.IntN(100)))
	case 1:
		return []byte(sign + strconv.FormatUint(rng.Uint64(), 10))
	case 2:
		return fmt.Appendf(nil, "%s%d.%de%d", sign, rng.IntN(10), rng.IntN(1000), rng.IntN(60)-30)
	case 3:
		return fmt.Appendf(nil, "%s%d.%06dE+%d", sign, rng.IntN(1000), rng.IntN(1000000), rng.IntN(30))
	}
	return fmt.Appendf(nil, "%s%v", sign, rng.Float64())
}

func TestCanonicalMatchesEncodingJSON(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	var s scanner
	for range 1500 {
		doc := randomJSON(rng, 4)
		var v any
		if err := json.Unmarshal(doc, &v); err != nil {
			t.Fatalf("json.Unmarshal(%q): %v, want no error", doc, err)
		}
		want, err := json.Marshal(v)
		if err != nil {
			t.Fatalf("json.Marshal: %v, want no error", err)
		}
		s.reset(doc)
		start := s.space(0)
		end := s.canonical(start)
		if got := s.out; !bytes.Equal(got, want) || s.space(end) != len(doc) || s.depth != 0 {
			t.Fatalf("canonical(%q) = %q up to %d at depth %d, want %q up to %d at depth 0", doc, got, end, s.depth, want, len(doc))
		}
		var compact []byte
		if compact, err = json.Marshal(json.RawMessage(doc)); err != nil {
			t.Fatalf("json.Marshal(RawMessage): %v, want no error", err)
		}
		s.out = s.out[:0]
		if s.compacted(start, end); !bytes.Equal(s.out, compact) {
			t.Fatalf("compacted(%q) = %q, want %q", doc, s.out, compact)
		}
	}
}

func TestCanonicalNumbers(t *testing.T) {
	f := func(t *testing.T, in, want string) {
		t.Helper()
		s := scanner{b: []byte(in)}
		s.canonical(0)
		if got := string(s.out); got != want {
			t.Errorf("canonical(%s) = %s, want %s", in, got, want)
		}
	}
	f(t, "0", "0")
	f(t, "-0", "-0")
	f(t, "1.0", "1")
	f(t, "1e2", "100")
	f(t, "999999999999999", "999999999999999")
	f(t, "9007199254740993", "9007199254740992")
	f(t, "123456789012345678901234567890", "1.2345678901234568e+29")
	f(t, "1e21", "1e+21")
	f(t, "1e20", "100000000000000000000")
	f(t, "0.000001", "0.000001")
	f(t, "0.0000001", "1e-7")
	f(t, "1e-10", "1e-10")
	f(t, "5e-324", "5e-324")
	f(t, "1e-400", "0")
	// What encoding/json refuses stays as it is.
	f(t, "1e400", "1e400")
	f(t, "NaN", "NaN")
	f(t, "[Infinity,-Infinity]", "[Infinity,-Infinity]")
}

// TestCanonicalDepth nests objects whose keys are out of order as deep as they
// may be: with one reading per level this would take minutes.
func TestCanonicalDepth(t *testing.T) {
	const size = 1 << 20
	inner := `"` + strings.Repeat("x", size) + `"`
	levels := maxDepth - 2
	body := `{"tools":[` + strings.Repeat(`{"b":`, levels) + inner + strings.Repeat(`,"a":0}`, levels) + `]}`
	r := Request{API: APIChat, Body: []byte(body)}
	if err := r.Parse(); err != nil {
		t.Fatalf("Parse: error %v, want none", err)
	}
	want := `[` + strings.Repeat(`{"a":0,"b":`, levels) + inner + strings.Repeat(`}`, levels) + `]`
	if got := string(r.prompt.out); got != want {
		t.Errorf("canonical form has %d bytes and starts %.40q, want %d bytes and %.40q", len(got), got, len(want), want)
	}
}

// TestCanonicalLimit gives one value more members than the renderer takes notes of.
func TestCanonicalLimit(t *testing.T) {
	tools := `[{"b":0` + strings.Repeat(`,"a":0`, maxNodes) + `}]`
	r := Request{API: APIChat, Body: []byte(`{"tools":` + tools + `}`)}
	if err := r.Parse(); err != nil {
		t.Fatalf("Parse: error %v, want none", err)
	}
	if got := string(r.prompt.out); got != tools {
		t.Errorf("the prompt has %d bytes and starts %.40q, want the %d bytes as they were sent", len(got), got, len(tools))
	}
	r.Reset()
	if got := cap(r.prompt.canon.nodes); got > maxKeptItems {
		t.Errorf("Reset kept %d notes, want at most %d", got, maxKeptItems)
	}
}
