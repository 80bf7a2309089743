package routing

import (
	"os"
	"regexp"
	"slices"
	"testing"
)

// TestDocsCompatibility holds docs/compatibility.md against the registry: one
// row for every plugin type, with the right state.
func TestDocsCompatibility(t *testing.T) {
	page, err := os.ReadFile("../docs/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]string)
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9-]+)` \\| ([a-z ]+) \\|").FindAllStringSubmatch(string(page), -1) {
		if _, twice := got[m[1]]; twice {
			t.Errorf("%s: got two rows, want one", m[1])
		}
		got[m[1]] = m[2]
	}
	f := func(typ string, want ...string) {
		t.Helper()
		if !slices.Contains(want, got[typ]) {
			t.Errorf("%s: got the state %q, want one of %q", typ, got[typ], want)
		}
		delete(got, typ)
	}
	for _, p := range registry {
		f(p.name, "works", "differs", "own")
	}
	for _, s := range structural {
		f(s.name, "works", "differs")
	}
	for _, d := range deprecated {
		f(d.old, "works", "differs")
	}
	for _, name := range notYet {
		f(name, "not yet")
	}
	for typ, state := range got {
		t.Errorf("%s: got a row (%s), want none: the registry has no such type", typ, state)
	}
}
