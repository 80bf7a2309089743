package configs

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Position is a place in a configuration: where a value stands and the path that leads to it.
type Position struct {
	File   string
	Line   int    // from 1; 0 when unknown
	Column int    // from 1; 0 when unknown
	Path   string // schedulingProfiles[0].plugins[1].weight; empty for the whole document

	node *yaml.Node // the value, for At; nil when it is absent or did not come from a document
}

// String returns "file:line:column: path" without the parts that are unknown.
func (p Position) String() string {
	place := p.File
	if p.Line > 0 {
		place += ":" + strconv.Itoa(p.Line)
		if p.Column > 0 {
			place += ":" + strconv.Itoa(p.Column)
		}
	}
	switch {
	case p.Path == "":
		return place
	case place == "":
		return p.Path
	}
	return place + ": " + p.Path
}

// At returns the position of a value below p: At("plugins[1].weight"). When the value is
// absent, it is the position of the nearest enclosing value that exists, with the whole path.
func (p Position) At(path string) Position {
	q, _ := p.find(path)
	return q
}

// Has tells whether the value at a path below p is there and is not null.
func (p Position) Has(path string) bool {
	_, ok := p.find(path)
	return ok
}

// find is At that also tells whether the value is there and is not null.
func (p Position) find(path string) (Position, bool) {
	n, at := p.node, p
	at.Path = joinPath(p.Path, path)
	for path != "" && n != nil {
		var step string
		step, path = nextStep(path)
		n = child(n, step)
		if n != nil {
			at.Line, at.Column = n.Line, n.Column
		}
	}
	at.node = n
	return at, n != nil && !isNull(n)
}

// Problem returns an error at p. The remedy says what to do about it and may be empty.
func (p Position) Problem(remedy, format string, args ...any) *Problem {
	p.node = nil
	return &Problem{Position: p, Message: fmt.Sprintf(format, args...), Remedy: remedy}
}

func joinPath(parent, path string) string {
	if parent == "" || path == "" || path[0] == '[' {
		return parent + path
	}
	return parent + "." + path
}

// nextStep cuts the first step off a path: a field name, or "[2]".
func nextStep(path string) (step, rest string) {
	if i := strings.IndexByte(path, ']'); path[0] == '[' && i > 0 {
		return path[:i+1], strings.TrimPrefix(path[i+1:], ".")
	}
	i := strings.IndexAny(path, ".[")
	switch {
	case i <= 0:
		return path, ""
	case path[i] == '.':
		return path[:i], path[i+1:]
	}
	return path[:i], path[i:]
}

func child(n *yaml.Node, step string) *yaml.Node {
	if n.Kind == yaml.SequenceNode {
		i, err := strconv.Atoi(strings.Trim(step, "[]"))
		if err != nil || i < 0 || i >= len(n.Content) {
			return nil
		}
		return n.Content[i]
	}
	if n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == step {
				return n.Content[i+1]
			}
		}
	}
	return nil
}

// Problem is one thing wrong in a configuration: the place, what is wrong, and what to do about it.
type Problem struct {
	Position
	Message string
	Remedy  string // empty when the message says it all
}

// Error returns "file:line:column: path: message (remedy)".
func (p *Problem) Error() string {
	s := p.Message
	if p.Remedy != "" {
		s += " (" + p.Remedy + ")"
	}
	if place := p.String(); place != "" {
		s = place + ": " + s
	}
	return s
}

// Problems are all the things wrong in one configuration.
type Problems []*Problem

// Add appends what is wrong: a *Problem, Problems, or any other error (which has no place). It skips nil.
func (ps *Problems) Add(err error) {
	var one *Problem
	var many Problems
	switch {
	case err == nil:
	case errors.As(err, &many):
		*ps = append(*ps, many...)
	case errors.As(err, &one):
		*ps = append(*ps, one)
	default:
		*ps = append(*ps, &Problem{Message: err.Error()})
	}
}

// Err returns nil when there is no problem, else the problems sorted by place.
func (ps Problems) Err() error {
	if len(ps) == 0 {
		return nil
	}
	slices.SortStableFunc(ps, func(a, b *Problem) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return ps
}

// Error returns one line per problem.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns the problems one by one.
func (ps Problems) Unwrap() []error {
	errs := make([]error, len(ps))
	for i, p := range ps {
		errs[i] = p
	}
	return errs
}

// Suggest returns a remedy for an unknown name: "did you mean `x`?" when a known
// name is near, else the list of the known names, headed by kind ("known fields").
func Suggest(got, kind string, known []string) string {
	if near := nearest(got, known); near != "" {
		return "did you mean `" + near + "`?"
	}
	if len(known) == 0 {
		return kind + ": none"
	}
	return kind + ": " + strings.Join(known, ", ")
}

// nearest returns the known name that is nearest by edit distance, "" when none is near:
// one slip per three letters, at most three, and any difference of case.
func nearest(got string, known []string) string {
	const longest = 64 // a longer name is no slip of the finger, and distance is quadratic
	best, at := "", 1+min(3, len(got)/3)
	if len(got) <= longest {
		for _, k := range known {
			if d := distance(strings.ToLower(got), strings.ToLower(k)); d < at {
				best, at = k, d
			}
		}
	}
	return best
}

// distance counts the insertions, deletions, replacements and swaps of neighbours
// that turn a into b (optimal string alignment).
func distance(a, b string) int {
	prev2, prev, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(prev[j]+1, row[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], prev2[j-2]+1)
			}
		}
		prev2, prev, row = prev, row, prev2
	}
	return prev[len(b)]
}

// quote shows a value from a configuration in a message, cut to a readable length.
func quote(s string) string {
	const shown = 60
	if len(s) > shown {
		s = strings.ToValidUTF8(s[:shown], "") + "..."
	}
	return strconv.Quote(s)
}
