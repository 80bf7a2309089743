package proxy

import (
	"debug/gosym"
	"errors"
	"io/fs"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// A function that was renamed, or that the compiler puts into its callers, is no
// longer prefetched: its name must leave prefetch.txt, or be put right there.
func TestPrefetchNames(t *testing.T) {
	if raceEnabled {
		t.Skip("with the race detector other functions are put into their callers")
	}
	table, err := symbols("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	names := strings.Fields(prefetchNames)
	if !slices.IsSorted(names) {
		t.Error("prefetch.txt: got names in disorder, want them sorted")
	}
	missing := []string{}
	for _, name := range names {
		if table.LookupFunc(name) == nil {
			missing = append(missing, name)
		}
	}
	ours := slices.DeleteFunc(slices.Clone(missing), func(name string) bool { return !strings.HasPrefix(name, "kvgate/") })
	want(t, "functions of ours that there are no longer", strings.Join(ours, " "), "")
	if len(missing) > len(names)/10 {
		t.Errorf("prefetch.txt: got %d of %d names missing, want a tenth at most: %s", len(missing), len(names), strings.Join(missing, " "))
	}
}

func TestCodeLines(t *testing.T) {
	table, err := symbols("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	entry := reflect.ValueOf(codeLines).Pointer()
	one, err := codeLines(table, []string{"kvgate/proxy.codeLines", "kvgate/proxy.nowhere"})
	if err != nil {
		t.Fatal(err)
	}
	if len(one) < linesPerFunction || len(one) > linesPerFunction+1 || one[0] != entry&^(cacheLine-1) {
		t.Errorf("lines of a large function at %x: got %x, want its first %d", entry, one, linesPerFunction)
	}
	all, err := requestCode()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 1000 || !slices.IsSorted(all) || len(slices.Compact(slices.Clone(all))) != len(all) {
		t.Errorf("lines of a request: got %d, want 1,000 at least, in order, each once", len(all))
	}
	if _, err := codeLines(&gosym.Table{}, nil); !errors.Is(err, errNoSymbols) {
		t.Errorf("another program's table: got %v, want %v", err, errNoSymbols)
	}
}

func TestSymbolsOfNoGoProgram(t *testing.T) {
	if _, err := symbols(t.TempDir() + "/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: got %v, want %v", err, fs.ErrNotExist)
	}
	text := t.TempDir() + "/text"
	if err := os.WriteFile(text, []byte("kvgate"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := symbols(text); err == nil {
		t.Error("a text: got no error, want one")
	}
}

func TestPrefetchTakesAnyAddress(t *testing.T) {
	prefetch(nil)
	prefetch([]uintptr{0, 1, 1 << 63, ^uintptr(0)})
}

func TestPrefetchBehindPause(t *testing.T) {
	var p prefetcher
	now := time.Unix(1_000_000, 0)
	for i, step := range []struct {
		after time.Duration
		want  bool
	}{
		{0, true}, // the first request
		{prefetchPause - 1, false},
		{prefetchPause, true},
		{prefetchPause / 32, false},
		{prefetchPause - prefetchPause/32, true}, // since the last one that was noted
		{prefetchPause / 2, false},
		{prefetchPause - 1, false}, // since the one before
	} {
		now = now.Add(step.after)
		if got := p.due(now); got != step.want {
			t.Errorf("request %d, %v behind the one before: got due %v, want %v", i, step.after, got, step.want)
		}
	}
}

// BenchmarkPrefetch prefetches code that is in the caches: the price of a pause that was none.
func BenchmarkPrefetch(b *testing.B) {
	lines, err := requestCode()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		prefetch(lines)
	}
}
