package scrape

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"kvgate/configs"
	"kvgate/routing"
)

// watchRig watches a file that lists a.
func watchRig(t *testing.T, file string, poll time.Duration) *rig {
	t.Helper()
	r := newRig(t, rigOptions{set: func(s *configs.Settings) { quiet(s); s.Endpoints = file }})
	r.poll = poll
	r.begin(t)
	r.waitNames(t, "[a]")
	return r
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, target, name string) {
	t.Helper()
	if err := os.Symlink(target, name); err != nil {
		t.Fatal(err)
	}
}

func mkdir(t *testing.T, dir string) string {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

var (
	listA  = endpointsYAML("a=127.0.0.1:1")
	listAB = endpointsYAML("a=127.0.0.1:1", "b=127.0.0.2:1")
	listB  = endpointsYAML("b=127.0.0.2:1")
)

func TestWatchWrite(t *testing.T) {
	file := filepath.Join(t.TempDir(), "endpoints.yaml")
	write(t, file, listA)
	r := watchRig(t, file, time.Hour)
	a := r.endpoint(t, "a")
	write(t, file, listAB)
	r.waitNames(t, "[a b]")
	if r.endpoint(t, "a") != a {
		t.Error("got another endpoint a, want the same")
	}
	write(t, file, listB)
	r.waitNames(t, "[b]")
	write(t, file, "endpoints:\n- {name: b, address: 127.0.0.2, port: \"1\", labels: {k: v}}\n")
	eventually(t, "the label", func() bool { v, _ := r.endpoint(t, "b").Label("k"); return v == "v" })
}

func TestWatchRename(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "endpoints.yaml")
	write(t, file, listA)
	r := watchRig(t, file, time.Hour)
	for _, next := range []struct{ text, want string }{{listAB, "[a b]"}, {listB, "[b]"}, {listA, "[a]"}} {
		write(t, filepath.Join(dir, "new"), next.text)
		rename(t, filepath.Join(dir, "new"), file)
		r.waitNames(t, next.want)
	}
}

// A Kubernetes volume: the file is a link through ..data, which is swapped.
func TestWatchLinkSwap(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(mkdir(t, filepath.Join(dir, "..v1")), "endpoints.yaml"), listA)
	link(t, "..v1", filepath.Join(dir, "..data"))
	file := filepath.Join(dir, "endpoints.yaml")
	link(t, "..data/endpoints.yaml", file)
	r := watchRig(t, file, time.Hour)
	for i, next := range []struct{ text, want string }{{listAB, "[a b]"}, {listB, "[b]"}} {
		version := fmt.Sprintf("..v%d", i+2)
		write(t, filepath.Join(mkdir(t, filepath.Join(dir, version)), "endpoints.yaml"), next.text)
		link(t, version, filepath.Join(dir, "..data_tmp"))
		rename(t, filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data"))
		if err := os.RemoveAll(filepath.Join(dir, fmt.Sprintf("..v%d", i+1))); err != nil {
			t.Fatal(err)
		}
		r.waitNames(t, next.want)
	}
}

// What no event tells, the poll finds: here a link above the directory, and a target in another one.
func TestWatchPolls(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(mkdir(t, filepath.Join(dir, "v1")), "endpoints.yaml"), listA)
	write(t, filepath.Join(mkdir(t, filepath.Join(dir, "v2")), "real.yaml"), listAB)
	link(t, "real.yaml", filepath.Join(dir, "v2", "endpoints.yaml"))
	link(t, "v1", filepath.Join(dir, "current"))
	r := watchRig(t, filepath.Join(dir, "current", "endpoints.yaml"), 20*time.Millisecond)
	link(t, "v2", filepath.Join(dir, "next"))
	rename(t, filepath.Join(dir, "next"), filepath.Join(dir, "current"))
	r.waitNames(t, "[a b]")
	write(t, filepath.Join(dir, "v2", "real.yaml"), listB)
	r.waitNames(t, "[b]")
}

// A directory that is removed and made anew is watched again.
func TestWatchDirectoryReplaced(t *testing.T) {
	dir := mkdir(t, filepath.Join(t.TempDir(), "conf"))
	file := filepath.Join(dir, "endpoints.yaml")
	write(t, file, listA)
	r := watchRig(t, file, 20*time.Millisecond)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the alert", func() bool { return r.source(sourceEndpoints).problem != "" })
	mkdir(t, dir)
	write(t, file, listAB)
	r.waitNames(t, "[a b]")
}

// Keys that the format does not have are told and ignored, as llm-d does.
func TestWatchWarns(t *testing.T) {
	file := filepath.Join(t.TempDir(), "endpoints.yaml")
	write(t, file, listA)
	r := watchRig(t, file, time.Hour)
	write(t, file, listAB+"extra: 1\n")
	r.waitNames(t, "[a b]")
	if got := r.said(file + ":4:1: extra: unknown field (known fields: endpoints)"); got != 1 {
		t.Errorf("got %d warnings in %v, want 1", got, r.logs.All())
	}
}

// A list that cannot be used leaves the last good one in force, and an alert.
func TestWatchBadFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "endpoints.yaml")
	write(t, file, listAB)
	r := newRig(t, rigOptions{replicas: []string{"s=http://127.0.0.9:1"}, set: func(s *configs.Settings) { quiet(s); s.Endpoints = file }})
	r.poll = time.Hour
	r.begin(t)
	problems := int64(0)
	f := func(t *testing.T, what string, spoil func()) {
		t.Helper()
		spoil()
		problems++
		eventually(t, what, func() bool { return r.source(sourceEndpoints).errors == problems })
		if s := r.source(sourceEndpoints); s.problem == "" || len(s.specs) != 2 {
			t.Errorf("%s: got problem %q, %d endpoints, want one and 2", what, s.problem, len(s.specs))
		}
		if got := fmt.Sprint(r.names()); got != "[a b s]" {
			t.Errorf("%s: got %v, want [a b s]", what, got)
		}
		write(t, file, listAB)
		eventually(t, "recovery from "+what, func() bool { return r.source(sourceEndpoints).problem == "" })
		if got := r.source(sourceEndpoints).errors; got != problems {
			t.Errorf("%s: got %d errors, want %d: each counted once", what, got, problems)
		}
	}
	f(t, "a broken file", func() { write(t, file, "endpoints: [") })
	f(t, "an empty file", func() { write(t, file, "") })
	f(t, "an empty list", func() { write(t, file, "endpoints: []\n") })
	f(t, "a bad entry", func() { write(t, file, listA+"- {name: b, address: 127.0.0.2, port: \"0\"}\n") })
	f(t, "a clash of names", func() { write(t, file, listA+"- {name: s, address: 127.0.0.2, port: \"1\"}\n") })
	f(t, "a clash of URLs", func() { write(t, file, listA+"- {name: b, address: 127.0.0.9, port: \"1\"}\n") })
	f(t, "a removed file", func() {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	})
	if got := r.said("the endpoints stay as they were"); got != int(problems) {
		t.Errorf("got %d messages, want %d", got, problems)
	}
}

// An empty file at the start is waited for.
func TestWatchStartsEmpty(t *testing.T) {
	file := filepath.Join(t.TempDir(), "endpoints.yaml")
	write(t, file, "endpoints: []\n")
	r := newRig(t, rigOptions{set: func(s *configs.Settings) { quiet(s); s.Endpoints = file }})
	r.begin(t)
	if s := r.source(sourceEndpoints); s.problem == "" || s.errors != 1 {
		t.Errorf("got problem %q, %d errors, want one", s.problem, s.errors)
	}
	write(t, file, listA)
	r.waitNames(t, "[a]")
}

// The file is read again when what it clashed with is gone.
func TestWatchClashEnds(t *testing.T) {
	file := filepath.Join(t.TempDir(), "endpoints.yaml")
	write(t, file, listA)
	r := watchRig(t, file, 20*time.Millisecond)
	if err := r.Add(routing.EndpointSpec{Name: "b", URL: "http://127.0.0.8:1"}); err != nil {
		t.Fatal(err)
	}
	write(t, file, listAB)
	eventually(t, "the clash", func() bool { return r.source(sourceEndpoints).problem != "" })
	if err := r.Remove("b"); err != nil {
		t.Fatal(err)
	}
	r.waitNames(t, "[a b]")
	if got := r.source(sourceEndpoints).errors; got != 1 {
		t.Errorf("got %d errors, want 1", got)
	}
}

// file-discovery watches only if told to, and a reload reads it in any case.
func TestWatchFileDiscovery(t *testing.T) {
	f := func(t *testing.T, watch bool) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "endpoints.yaml")
		write(t, file, listA)
		scheduling := fmt.Sprintf("plugins:\n- {name: files, type: file-discovery, parameters: {path: %s, watchFile: %v}}\ndataLayer: {discovery: {pluginRef: files}}\n", file, watch)
		r := newRig(t, rigOptions{scheduling: scheduling, set: quiet})
		r.begin(t)
		r.waitNames(t, "[a]")
		if got := len(r.watchers); (got == 1) != watch {
			t.Errorf("watchFile %v: got %d watchers", watch, got)
		}
		write(t, file, listAB)
		if !watch {
			if err := r.Reload(&r.settings, mustPlan(t, scheduling, r.settings.Scrape)); err != nil {
				t.Fatal(err)
			}
		}
		r.waitNames(t, "[a b]")
	}
	f(t, true)
	f(t, false)
}

// A reload ends the watch of a file that is no longer named.
func TestWatchEndsWithReload(t *testing.T) {
	file, other := filepath.Join(t.TempDir(), "endpoints.yaml"), filepath.Join(t.TempDir(), "other.yaml")
	write(t, file, listA)
	write(t, other, listB)
	r := watchRig(t, file, time.Hour)
	old := r.watchers[0]
	next := r.settings
	next.Endpoints = other
	if err := r.Reload(&next, mustPlan(t, "", next.Scrape)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-old.done:
	default:
		t.Error("the old watcher still runs")
	}
	if got := fmt.Sprint(r.names()); got != "[b]" {
		t.Errorf("got %v, want [b]", got)
	}
	write(t, other, listAB)
	r.waitNames(t, "[a b]")
}
