package proxy

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/valyala/fasthttp"

	"kvgate/configs"
)

// limitedField bounds one field of a JSON body.
type limitedField struct {
	name    string
	setting string // that says so
	most    int
	list    bool // most is a number of items, else the largest number
}

// limitedFields returns the fields that the settings bound.
func limitedFields(l *configs.Limits) (fields []limitedField) {
	add := func(setting string, most int, list bool, names ...string) {
		for _, name := range names {
			if most > 0 {
				fields = append(fields, limitedField{name, setting, most, list})
			}
		}
	}
	add("limits.max_n", l.MaxN, false, "n", "best_of")
	add("limits.max_tokens", l.MaxTokens, false, "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
	add("limits.max_items", l.MaxItems, true, "messages", "prompt", "prompt_embeds", "input", "inputs", "texts", "text_1", "text_2", "data_1", "data_2", "queries", "documents", "items", "tools")
	return fields
}

// capped judges the fields that the settings bound. Of equal fields the last one
// counts, as for the replica.
func (x *exchange) capped() *refusal {
	l, req := x.live, &x.req
	judged := uint64(0)
	for i := len(req.Found) - 1; i >= 0; i-- {
		m := req.Found[i]
		at := m.Field - l.firstLimited
		if at < 0 || at > len(l.limited)+watchSampling || judged&(1<<at) != 0 {
			continue
		}
		judged |= 1 << at
		value := req.Body[m.Value:m.To]
		if at < len(l.limited) {
			if r := l.limited[at].judge(l.limited[at].name, value); r != nil {
				return r
			}
			continue
		}
		inner := members(value, l.watch[l.firstLimited:l.firstOther]...)
		seen := uint64(0)
		for i := len(inner) - 1; i >= 0; i-- {
			m := inner[i]
			if seen&(1<<m.Field) != 0 {
				continue
			}
			seen |= 1 << m.Field
			f := &l.limited[m.Field]
			if r := f.judge(samplingField+"."+f.name, value[m.Value:m.To]); r != nil {
				return r
			}
		}
	}
	return nil
}

// judge refuses a value that is above the limit, or in whose place the replica
// could read a number that is.
func (f *limitedField) judge(name string, value []byte) *refusal {
	value = trimJSON(value)
	if len(value) == 0 || string(value) == "null" {
		return nil
	}
	if f.list {
		if longest(value) <= f.most {
			return nil
		}
		return f.refuse(name, "has more than "+strconv.Itoa(f.most)+" items")
	}
	text := string(value)
	if value[0] == '"' && json.Unmarshal(value, &text) == nil { // engines take "4" for 4
		text = strings.ReplaceAll(strings.TrimSpace(text), "_", "")
	}
	n, err := strconv.ParseFloat(text, 64)
	switch {
	case err != nil && !math.IsInf(n, 0), math.IsNaN(n):
		return f.refuse(name, "must be a number of at most "+strconv.Itoa(f.most))
	case n > float64(f.most):
		return f.refuse(name, "must be at most "+strconv.Itoa(f.most))
	}
	return nil
}

func (f *limitedField) refuse(name, what string) *refusal {
	return &refusal{status: fasthttp.StatusBadRequest, code: "limit_exceeded", param: name, message: fmt.Sprintf("%s %s (%s)", name, what, f.setting)}
}

func trimJSON(b []byte) []byte {
	space := func(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }
	for len(b) > 0 && space(b[0]) {
		b = b[1:]
	}
	for len(b) > 0 && space(b[len(b)-1]) {
		b = b[:len(b)-1]
	}
	return b
}

// longest returns the length of the longest list in a value that is well-formed:
// the value itself, or a list within it that is in no object. Numbers are no
// items: a list of token ids is one prompt.
func longest(value []byte) int {
	const deepest = 8 // lists within lists; beneath they count for the one above
	var counts [deepest]int
	depth, objects, most := 0, 0, 0
	item := func() {
		if depth > 0 && objects == 0 {
			at := min(depth, deepest) - 1
			counts[at]++
			most = max(most, counts[at])
		}
	}
	for i := 0; i < len(value); i++ {
		switch c := value[i]; c {
		case '"':
			item()
			for i++; i < len(value) && value[i] != '"'; i++ {
				if value[i] == '\\' {
					i++
				}
			}
		case '[':
			item()
			if depth++; depth <= deepest && objects == 0 {
				counts[depth-1] = 0
			}
		case '{':
			item()
			objects++
		case ']':
			depth--
		case '}':
			objects--
		case 't', 'f', 'n': // true, false, null
			item()
			i += len("tru")
		}
	}
	return most
}

// routeBodies returns the largest body of every route by its index, and of the
// items of routes.passthrough that have one of their own; nil when limits.body
// holds for all.
func routeBodies(s *configs.Settings) (bodies []int64, patterns []patternBody, err error) {
	for _, text := range s.Limits.RouteBodies {
		path, size, err := configs.ParseRouteBody(text)
		if err != nil {
			return nil, nil, fmt.Errorf("limits.route_bodies: %w", err)
		}
		if bodies == nil {
			bodies = make([]int64, len(routeTable)+1)
			for i := range bodies {
				bodies[i] = int64(s.Limits.Body)
			}
		}
		at := slices.IndexFunc(routeTable, func(e routeEntry) bool {
			return e.path == path && e.kind == kindProxy && e.reading != readNone
		})
		switch {
		case at >= 0:
			bodies[at] = int64(size)
		case slices.Contains(s.Routes.Passthrough, path):
			patterns = append(patterns, patternBody{path, int64(size)})
		default:
			return nil, nil, fmt.Errorf("limits.route_bodies: no route %s takes a body: name one that does, or an item of routes.passthrough", path)
		}
	}
	return bodies, patterns, nil
}

// bodyLimit returns the size of the largest body that the request may have.
func (x *exchange) bodyLimit() int64 {
	l := x.live
	if l.bodies == nil {
		return int64(l.settings.Limits.Body)
	}
	if x.route.index == 0 {
		for _, p := range l.patterns { // the first that matches
			if matchPattern(x.path, p.path) {
				return p.size
			}
		}
	}
	return l.bodies[x.route.index]
}

// tooLarge refuses a body that is larger than bodyLimit.
func (x *exchange) tooLarge() *refusal {
	r := *refuseBodySize
	r.message = "the request's body is larger than " + configs.Size(x.bodyLimit()).String() + ", the limit of this route (limits.body, limits.route_bodies)"
	return &r
}
