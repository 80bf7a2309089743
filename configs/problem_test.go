package configs

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

func TestProblemError(t *testing.T) {
	f := func(p Position, remedy, want string) {
		t.Helper()
		if got := p.Problem(remedy, "n is %d", 5).Error(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	f(Position{}, "", "n is 5")
	f(Position{}, "write 6", "n is 5 (write 6)")
	f(Position{File: "f"}, "", "f: n is 5")
	f(Position{Path: "a.b"}, "", "a.b: n is 5")
	f(Position{File: "f", Line: 2}, "", "f:2: n is 5")
	f(Position{File: "f", Line: 2, Column: 3}, "", "f:2:3: n is 5")
	f(Position{File: "f", Line: 2, Column: 3, Path: "a[1]"}, "write 6", "f:2:3: a[1]: n is 5 (write 6)")
	f(Position{File: "f", Column: 3, Path: "a"}, "", "f: a: n is 5")
}

func TestPositionAt(t *testing.T) {
	p, err := ParseParams("f", []byte("a:\n  b: [1, {c.d: 2}]\nnull: ~\nempty: ~\n"))
	if err != nil {
		t.Fatal(err)
	}
	f := func(path, want string, has bool) {
		t.Helper()
		if got := p.At(path).String(); got != want {
			t.Errorf("got %q at %q, want %q", got, path, want)
		}
		if got := p.Has(path); got != has {
			t.Errorf("got Has(%q) %v, want %v", path, got, has)
		}
	}
	f("", "f:1:1", true)
	f("a", "f:2:3: a", true)
	f("a.b", "f:2:6: a.b", true)
	f("a.b[0]", "f:2:7: a.b[0]", true)
	f("a.b[1]", "f:2:10: a.b[1]", true)
	f("a.b[2]", "f:2:6: a.b[2]", false)
	f("a.b[-1]", "f:2:6: a.b[-1]", false)
	f("a.b[x]", "f:2:6: a.b[x]", false)
	f("a.b.c", "f:2:6: a.b.c", false)
	f("a.b[1].x", "f:2:10: a.b[1].x", false)
	f("a.b[0].x", "f:2:7: a.b[0].x", false)
	f("a.c.d", "f:2:3: a.c.d", false)
	f("empty", "f:4:8: empty", false)
	f("z", "f:1:1: z", false)
	f(".z", "f:1:1: .z", false)
	if got, want := p.At("a").At("b[1]").String(), "f:2:10: a.b[1]"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestProblems(t *testing.T) {
	var ps Problems
	if err := ps.Err(); err != nil {
		t.Errorf("got %v, want no error", err)
	}
	second := Position{File: "f", Line: 2, Column: 1}.Problem("", "second")
	ps.Add(nil)
	ps.Add(second)
	ps.Add(Problems{
		Position{File: "f", Line: 3}.Problem("", "third"),
		Position{File: "f", Line: 1, Column: 9}.Problem("", "first"),
		Position{File: "e", Line: 9}.Problem("", "other file"),
	})
	ps.Add(os.ErrNotExist)
	ps.Add(fmt.Errorf("wrapped: %w", second))
	err := ps.Err()
	want := "file does not exist\ne:9: other file\nf:1:9: first\nf:2:1: second\nf:2:1: second\nf:3: third"
	if got := err.Error(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	var one *Problem
	if !errors.As(err, &one) || one.Message != "file does not exist" {
		t.Errorf("got %v, want the first problem", one)
	}
	if !errors.Is(err, second) {
		t.Errorf("got %v, want an error that is %v", err, second)
	}
	if got, want := len(ps.Unwrap()), 6; got != want {
		t.Errorf("got %d errors, want %d", got, want)
	}
}

func TestSuggest(t *testing.T) {
	f := func(got, want string, known ...string) {
		t.Helper()
		if s := Suggest(got, "known fields", known); s != want {
			t.Errorf("got %q for %q, want %q", s, got, want)
		}
	}
	f("pluginref", "did you mean `pluginRef`?", "weight", "pluginRef")
	f("wieght", "did you mean `weight`?", "pluginRef", "weight")
	f("tpye", "did you mean `type`?", "name", "type")
	f("a", "known fields: b, c", "b", "c")
	f("ab", "known fields: ac", "ac")
	f("A", "did you mean `a`?", "a")
	f("x", "known fields: none")
	f("queue", "known fields: queue-scorer", "queue-scorer")
	f("prefix-cache-score", "did you mean `prefix-cache-scorer`?", "precise-prefix-cache-scorer", "prefix-cache-scorer")
	f(strings.Repeat("x", 65), "known fields: "+strings.Repeat("x", 66), strings.Repeat("x", 66))
}

func TestDistance(t *testing.T) {
	f := func(a, b string, want int) {
		t.Helper()
		if got := distance(a, b); got != want {
			t.Errorf("got %d between %q and %q, want %d", got, a, b, want)
		}
		if got := distance(b, a); got != want {
			t.Errorf("got %d between %q and %q, want %d", got, b, a, want)
		}
	}
	f("", "", 0)
	f("", "abc", 3)
	f("abc", "abc", 0)
	f("abc", "acb", 1)
	f("abc", "abd", 1)
	f("abc", "ac", 1)
	f("kitten", "sitting", 3)
	f("ca", "abc", 3)
}

func TestQuote(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		if got := quote(in); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	f("a\nb", `"a\nb"`)
	f(strings.Repeat("x", 60), `"`+strings.Repeat("x", 60)+`"`)
	f(strings.Repeat("x", 61), `"`+strings.Repeat("x", 60)+`..."`)
	f(strings.Repeat("x", 59)+"é!", `"`+strings.Repeat("x", 59)+`..."`)
}
