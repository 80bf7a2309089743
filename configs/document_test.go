package configs

import (
	"fmt"
	"strings"
	"testing"
)

func TestParseDocumentErrors(t *testing.T) {
	f := func(name, in, want string) {
		t.Run(name, func(t *testing.T) {
			t.Helper()
			_, problems := parseDocument("f.yaml", []byte(in))
			if got := problems.Error(); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
	f("none", "a: 1\n", "")
	f("largest", "a: "+strings.Repeat("x", maxDocument-3), "")
	f("too large", "a: "+strings.Repeat("x", maxDocument-2), "f.yaml: larger than 1048576 bytes")
	f("not UTF-8", "a: é\nb: \xff\n", "f.yaml:2:4: byte 0xff is not UTF-8 (save the file as UTF-8)")
	f("UTF-16", "\xff\xfea\x00", "f.yaml:1:1: byte 0xff is not UTF-8 (save the file as UTF-8)")
	f("tab before a key", "a:\n  b: 1\n\tc: 2\n", "f.yaml:3:1: found a tab character that violates indentation (indent with spaces, not with tabs)")
	f("tab before an item", "a:\n \t- b\n", "f.yaml:2:2: found character that cannot start any token (indent with spaces, not with tabs)")
	f("tab elsewhere", "a:\t@x\n", "f.yaml:1: found character that cannot start any token")
	f("unclosed list", "a: [1\nb: 2\n", "f.yaml:2: did not find expected ',' or ']'")
	f("unclosed string", "\na: 'x\n", "f.yaml:2: found unexpected end of stream")
	f("bad indentation", "a:\n- {b: x}\n c: y\n", "f.yaml:3: did not find expected key")
	f("syntax in a second document", "a: 1\n---\n@\n", "f.yaml:3: found character that cannot start any token")
	f("unclosed list in a second document", "a: 1\n---\nb: [\n", "f.yaml:3: did not find expected node content")
	f("second document", "a: 1\n---\nb: 1\n", "f.yaml:2:1: a second document (keep one document per file)")
	f("unknown anchor", "a: 1\nb: *c\n", "f.yaml:2: unknown anchor 'c' referenced")
	f("tag", "a: !secret b\n", "f.yaml:1:4: a: the tag \"!secret\" is not supported (remove the tag)")
	f("binary", "a: !!binary aGk=\n", "f.yaml:1:4: a: the tag \"!!binary\" is not supported (remove the tag)")
	f("list as a key", "? [a]\n: 1\nb: 2\n", "f.yaml:1:3: a key is a list or an object (write a name)")
	f("duplicates", "a: {b: 1, b: 2}\n\"\\u0061\": 1\n", "f.yaml:1:11: a.b: set twice, first in line 1 (keep one of them)\nf.yaml:2:1: a: set twice, first in line 1 (keep one of them)")
	f("alias as a duplicate key", "a: &x a\n*x : 1\n", "f.yaml:2:1: a: set twice, first in line 1 (keep one of them)")
	f("duplicate with a long key", strings.Repeat("k", 100)+": 1\n"+strings.Repeat("k", 100)+": 1\n",
		"f.yaml:2:1: "+strings.Repeat("k", 60)+"...: set twice, first in line 1 (keep one of them)")
	f("recursive anchor", "a: &a [b, *a]\n", `f.yaml:1:11: a[1][1]: the anchor "a" contains itself`)
	f("mutually recursive anchors", "a: &a {b: &b {c: *a, d: *b}}\n", `f.yaml:1:18: a.b.c.b.c: the anchor "a" contains itself`)
	f("merge of a scalar", "a: {<<: b}\n", `f.yaml:1:9: a.<<: merges the string "b" (merge an anchored object)`)
	f("merge of scalars", "a: {<<: [1, {x: y}]}\n", "f.yaml:1:10: a.<<: merges the number 1 (merge an anchored object)")
	f("deepest", strings.Repeat("[", maxDepth)+strings.Repeat("]", maxDepth), "")
	f("too deep", strings.Repeat("[", maxDepth+1)+strings.Repeat("]", maxDepth+1),
		"f.yaml:1:101: "+strings.Repeat("[0]", maxDepth)+": nested deeper than 100 levels")

	bomb := "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
	for i := 1; i < 20; i++ {
		ref := fmt.Sprintf("*a%d", i-1)
		bomb += fmt.Sprintf("a%d: &a%d [%s]\n", i, i, strings.Repeat(ref+", ", 9)+ref)
	}
	_, problems := parseDocument("f.yaml", []byte(bomb))
	if got, want := len(problems), 1; got != want {
		t.Fatalf("got %d problems %v, want %d", got, problems, want)
	}
	if got, want := problems[0].Message, "aliases make more than 100000 values"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}

	var many strings.Builder
	for range 2 * maxProblems {
		many.WriteString("a: 1\n")
	}
	if _, problems = parseDocument("f.yaml", []byte(many.String())); len(problems) != maxProblems {
		t.Errorf("got %d problems, want %d", len(problems), maxProblems)
	}
}

func TestDescribe(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		root, _ := parseDocument("f", []byte(in))
		if got := describe(child(root.node, "a")); got != want {
			t.Errorf("got %q for %q, want %q", got, in, want)
		}
	}
	f("a: [1]", "a list")
	f("a: {b: 1}", "an object")
	f("a: ~", "null")
	f("a: true", "the boolean true")
	f("a: 1.5", "the number 1.5")
	f("a: "+strings.Repeat("1", 100), "the number "+strings.Repeat("1", 60))
	f("a: b", `the string "b"`)
	f("a: 2001-01-01", `the string "2001-01-01"`)
}
