package configs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Bounds of one document. A hand-written configuration is far below each of them.
const (
	maxDocument = 1 << 20 // bytes
	maxDepth    = 100     // nested lists and objects
	maxAliased  = 100_000 // values that come into being through aliases
	maxProblems = 100     // reported of one document
)

// readDocument reads a configuration file, at most one byte more than a document may have.
func readDocument(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, maxDocument+1))
}

// parseDocument reads one YAML or JSON document into a tree without aliases, merge
// keys and duplicate keys. The root has no node when the document is empty.
func parseDocument(file string, data []byte) (root Position, problems Problems) {
	root = Position{File: file}
	whole := root
	if len(data) > maxDocument {
		problems.Add(whole.Problem("", "larger than %d bytes", maxDocument))
		return root, problems
	}
	if at := invalidUTF8(data); at >= 0 {
		whole.Line = 1 + bytes.Count(data[:at], []byte("\n"))
		whole.Column = at - bytes.LastIndexByte(data[:at], '\n')
		problems.Add(whole.Problem("save the file as UTF-8", "byte 0x%02x is not UTF-8", data[at]))
		return root, problems
	}
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var doc, next yaml.Node
	if err := decoder.Decode(&doc); err != nil {
		if !errors.Is(err, io.EOF) {
			problems.Add(syntaxProblem(file, data, err))
		}
		return root, problems
	}
	if err := decoder.Decode(&next); err == nil {
		whole.Line, whole.Column = next.Line, next.Column
		problems.Add(whole.Problem("keep one document per file", "a second document"))
		return root, problems
	} else if !errors.Is(err, io.EOF) {
		problems.Add(syntaxProblem(file, data, err))
		return root, problems
	}
	if len(doc.Content) == 0 || isNull(doc.Content[0]) {
		return root, problems
	}
	e := expander{file: file, problems: &problems}
	root.node = e.expand(doc.Content[0], nil)
	root.Line, root.Column = root.node.Line, root.node.Column
	return root, problems
}

func invalidUTF8(data []byte) int {
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return -1
}

var (
	syntaxLine    = regexp.MustCompile(`^yaml: (?:line (\d+): )?(?s:(.*))$`)
	parserError   = regexp.MustCompile(`^did not find expected ('-'|',' or|key|node content|<)|^found undefined tag handle`)
	unknownAnchor = regexp.MustCompile(`^unknown anchor '(.*)' referenced$`)
	tabIndent     = regexp.MustCompile(`(?m)^ *\t`)
)

// syntaxProblem turns an error of the YAML library into a Problem. The library counts lines from 1 in
// what its scanner finds, from 0 in what its parser finds, and names none in the first line.
func syntaxProblem(file string, data []byte, err error) *Problem {
	at, message, remedy := Position{File: file, Line: 1}, err.Error(), ""
	if m := syntaxLine.FindStringSubmatch(message); m != nil {
		if line, err := strconv.Atoi(m[1]); err == nil {
			at.Line = line
			if parserError.MatchString(m[2]) {
				at.Line = min(line+1, 1+bytes.Count(bytes.TrimRight(data, "\n"), []byte("\n")))
			}
		}
		message = m[2]
	}
	if m := unknownAnchor.FindStringSubmatch(message); m != nil {
		offset := max(0, bytes.Index(data, []byte("*"+m[1])))
		at.Line += bytes.Count(data[:offset], []byte("\n"))
	}
	if tab := tabIndent.FindIndex(data); tab != nil && (strings.Contains(message, "cannot start any token") || strings.Contains(message, "tab character")) {
		at.Line = 1 + bytes.Count(data[:tab[0]], []byte("\n"))
		at.Column = tab[1] - tab[0]
		remedy = "indent with spaces, not with tabs"
	}
	return at.Problem(remedy, "%s", message)
}

// step is one step of the way from the root of a document to a value. Paths are
// rendered only when they are shown: a document may have many values and long keys.
type step struct {
	up    *step
	key   string
	index int // of a list item; -1 for a field
}

func (s *step) item(i int) *step { return &step{up: s, index: i} }

func (s *step) field(key string) *step {
	const shown = 60
	if len(key) > shown {
		key = strings.ToValidUTF8(key[:shown], "") + "..."
	}
	return &step{up: s, key: key, index: -1}
}

func (s *step) String() string {
	if s == nil {
		return ""
	}
	if s.index >= 0 {
		return joinPath(s.up.String(), "["+strconv.Itoa(s.index)+"]")
	}
	return joinPath(s.up.String(), s.key)
}

// expander copies a parsed tree and resolves aliases and merge keys on the way.
type expander struct {
	file     string
	problems *Problems
	aliases  []*yaml.Node // anchored values that are being expanded
	aliased  int          // values made below aliases so far
	stopped  bool         // a bound was passed; one problem says so
	depth    int
}

func (e *expander) report(n *yaml.Node, at *step, remedy, format string, args ...any) {
	if len(*e.problems) < maxProblems {
		p := Position{File: e.file, Line: n.Line, Column: n.Column, Path: at.String()}
		e.problems.Add(p.Problem(remedy, format, args...))
	}
}

// stop ends the expansion: what follows is null.
func (e *expander) stop(n *yaml.Node, at *step, format string, args ...any) *yaml.Node {
	if !e.stopped {
		e.stopped = true
		e.report(n, at, "", format, args...)
	}
	return nullAt(n)
}

func nullAt(n *yaml.Node) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null", Line: n.Line, Column: n.Column}
}

var knownTags = []string{"!!null", "!!bool", "!!int", "!!float", "!!str", "!!timestamp", "!!seq", "!!map", "!!merge"}

func (e *expander) expand(n *yaml.Node, at *step) *yaml.Node {
	if e.stopped {
		return nullAt(n)
	}
	if n.Kind == yaml.AliasNode {
		if slices.Contains(e.aliases, n.Alias) {
			return e.stop(n, at, "the anchor %s contains itself", quote(n.Value))
		}
		e.aliases = append(e.aliases, n.Alias)
		out := e.expand(n.Alias, at)
		e.aliases = e.aliases[:len(e.aliases)-1]
		return out
	}
	if len(e.aliases) > 0 {
		if e.aliased++; e.aliased > maxAliased {
			return e.stop(n, at, "aliases make more than %d values", maxAliased)
		}
	}
	if e.depth++; e.depth > maxDepth {
		return e.stop(n, at, "nested deeper than %d levels", maxDepth)
	}
	defer func() { e.depth-- }()
	if !slices.Contains(knownTags, n.ShortTag()) {
		e.report(n, at, "remove the tag", "the tag %s is not supported", quote(n.Tag))
		return nullAt(n)
	}
	out := &yaml.Node{Kind: n.Kind, Tag: n.Tag, Style: n.Style, Value: n.Value, Line: n.Line, Column: n.Column}
	switch n.Kind {
	case yaml.SequenceNode:
		for i, item := range n.Content {
			out.Content = append(out.Content, e.expand(item, at.item(i)))
		}
	case yaml.MappingNode:
		e.expandMapping(n, out, at)
	}
	return out
}

func (e *expander) expandMapping(n, out *yaml.Node, at *step) {
	lines := make(map[string]int, len(n.Content)/2)
	var merged []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		for key.Kind == yaml.AliasNode {
			key = key.Alias
		}
		if key.Kind != yaml.ScalarNode {
			e.report(key, at, "write a name", "a key is a list or an object")
			continue
		}
		if first, twice := lines[key.Value]; twice {
			e.report(n.Content[i], at.field(key.Value), "keep one of them", "set twice, first in line %d", first)
			continue
		}
		lines[key.Value] = key.Line
		expanded := e.expand(value, at.field(key.Value))
		if key.ShortTag() == "!!merge" {
			merged = append(merged, expanded)
			continue
		}
		name := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key.Value, Line: n.Content[i].Line, Column: n.Content[i].Column}
		out.Content = append(out.Content, name, expanded)
	}
	for len(merged) > 0 {
		m := merged[0]
		merged = merged[1:]
		switch m.Kind {
		case yaml.SequenceNode:
			merged = append(slices.Clone(m.Content), merged...)
		case yaml.MappingNode:
			for i := 0; i+1 < len(m.Content); i += 2 {
				if _, set := lines[m.Content[i].Value]; !set {
					lines[m.Content[i].Value] = m.Content[i].Line
					out.Content = append(out.Content, m.Content[i], m.Content[i+1])
				}
			}
		default:
			if !e.stopped {
				e.report(m, at.field("<<"), "merge an anchored object", "merges %s", describe(m))
			}
		}
	}
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// describe names a value in a message.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.SequenceNode:
		return "a list"
	case yaml.MappingNode:
		return "an object"
	}
	switch n.ShortTag() {
	case "!!null":
		return "null"
	case "!!bool":
		return "the boolean " + n.Value
	case "!!int", "!!float":
		return fmt.Sprintf("the number %.60s", n.Value)
	}
	return "the string " + quote(n.Value)
}
