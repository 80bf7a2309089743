package main

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/proxy"
	"kvgate/routing"
	"kvgate/scrape"
)

func readDoc(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// docFiles returns every page of the project.
func docFiles(t *testing.T) []string {
	t.Helper()
	pages, err := filepath.Glob("docs/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("docs/*.md: got %d pages, error %v", len(pages), err)
	}
	return append(pages, "README.md", "CHANGELOG.md")
}

// docBlocks returns the fenced blocks of a page whose info string starts with
// info, by the rest of their info string.
func docBlocks(page, info string) map[string]string {
	blocks := make(map[string]string)
	for i, m := range regexp.MustCompile("(?ms)^```"+info+"(?: ([^\n]*))?\n(.*?)^```$").FindAllStringSubmatch(page, -1) {
		name := m[1]
		if name == "" {
			name = fmt.Sprint(i)
		}
		blocks[name] = m[2]
	}
	return blocks
}

// TestDocsSettings holds the table of docs/configuration.md against the code:
// one row per setting, in the order of the struct, with flag, variable and default.
func TestDocsSettings(t *testing.T) {
	rows := regexp.MustCompile("(?m)^\\| `([a-z_.]+)` \\| `--([a-z-]+)` \\| `([A-Z_]+)` \\| (?:`([^`]*)` )?\\| (.+) \\|$").
		FindAllStringSubmatch(readDoc(t, "docs/configuration.md"), -1)
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	configs.BindFlags(flags)
	want := (&configs.Loaded{Settings: configs.DefaultSettings()}).Rows()
	for i, w := range want {
		if i >= len(rows) {
			t.Errorf("row %d: got none, want %s", i+1, w.Key)
			continue
		}
		key, flag, env, value := rows[i][1], rows[i][2], rows[i][3], rows[i][4]
		if key != w.Key {
			t.Fatalf("row %d: got %s, want %s", i+1, key, w.Key)
		}
		if value != w.Value {
			t.Errorf("%s: got the default %q, want %q", key, value, w.Value)
		}
		if wantEnv := "KVGATE_" + strings.ToUpper(strings.ReplaceAll(key, ".", "_")); env != wantEnv {
			t.Errorf("%s: got the variable %s, want %s", key, env, wantEnv)
		}
		if flags.Lookup(flag) == nil {
			t.Errorf("%s: got --%s, want a flag that exists", key, flag)
		}
		if value == "" {
			continue
		}
		if _, err := configs.LoadSettings(nil, "", []string{env + "=" + value}); err != nil {
			t.Errorf("%s=%s: got %v, want it to load", env, value, err)
		}
	}
	if len(rows) != len(want) {
		t.Errorf("got %d rows, want %d", len(rows), len(want))
	}
}

// TestDocsLinks checks that every relative link and anchor leads somewhere.
func TestDocsLinks(t *testing.T) {
	anchors := func(file string) []string {
		var out []string
		drop := regexp.MustCompile("[^a-z0-9 _-]")
		for _, m := range regexp.MustCompile("(?m)^#+ (.*)$").FindAllStringSubmatch(readDoc(t, file), -1) {
			out = append(out, strings.ReplaceAll(drop.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
		}
		return out
	}
	for _, file := range docFiles(t) {
		for _, m := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(readDoc(t, file), -1) {
			target, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			path := file
			if target != "" {
				path = filepath.Join(filepath.Dir(file), target)
			}
			if _, err := os.Stat(path); err != nil {
				t.Errorf("%s: link %s: got %v, want a file", file, m[1], err)
				continue
			}
			if anchor != "" && !slices.Contains(anchors(path), anchor) {
				t.Errorf("%s: link %s: got no such heading in %s, want one of %q", file, m[1], path, anchors(path))
			}
		}
	}
}

// TestDocsCommands checks that every kvgate command line of the docs names a
// command and flags that exist, and every make line a target.
func TestDocsCommands(t *testing.T) {
	makefile := readDoc(t, "Makefile")
	seen := 0
	for _, file := range docFiles(t) {
		page := readDoc(t, file)
		for _, m := range regexp.MustCompile("(?:^|[\\s`])make ([a-z-]+)").FindAllStringSubmatch(strings.Join(append(codeSpans(page), shLines(page)...), "\n"), -1) {
			if !strings.Contains(makefile, "\n"+m[1]+":") {
				t.Errorf("%s: make %s: got no such target, want one", file, m[1])
			}
			seen++
		}
		for _, line := range append(shLines(page), codeSpans(page)...) {
			m := regexp.MustCompile(`(?:^|&& |[$] )(?:\./)?kvgate((?: [^|&#]+)?)`).FindStringSubmatch(line)
			if m == nil || strings.HasPrefix(line, "docker") {
				continue
			}
			seen++
			args := strings.Fields(m[1])
			cmd, rest, err := newRootCommand().Find(args)
			if err != nil {
				t.Errorf("%s: %s: got %v, want a command", file, line, err)
				continue
			}
			if cmd.Name() == "kvgate" && len(rest) > 0 && !strings.HasPrefix(rest[0], "-") {
				t.Errorf("%s: %s: got no command %s, want one", file, line, rest[0])
			}
			for _, arg := range rest {
				name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
				switch {
				case strings.HasPrefix(arg, "--"):
					if cmd.Flag(name) == nil {
						t.Errorf("%s: %s: got no flag %s, want one", file, line, arg)
					}
				case strings.HasPrefix(arg, "-"):
					if cmd.Flags().ShorthandLookup(name) == nil {
						t.Errorf("%s: %s: got no flag %s, want one", file, line, arg)
					}
				}
			}
		}
	}
	if seen < 10 {
		t.Errorf("got %d command lines in the docs, want at least 10: the patterns miss them", seen)
	}
}

// shLines returns the lines of a page's shell blocks.
func shLines(page string) []string {
	var lines []string
	for _, block := range docBlocks(page, "sh") {
		for line := range strings.Lines(block) {
			line, _, _ = strings.Cut(line, " #")
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// codeSpans returns the inline code of a page.
func codeSpans(page string) []string {
	var spans []string
	for _, m := range regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(page, -1) {
		spans = append(spans, m[1])
	}
	return spans
}

// TestDocsMetrics checks that every series which the docs name is registered.
func TestDocsMetrics(t *testing.T) {
	registry := prometheus.NewRegistry()
	fleet := routing.NewFleet(time.Now, time.Second, zap.NewNop())
	proxy.NewMetrics(registry, fleet, proxy.RouteTemplates())
	settings := configs.DefaultSettings()
	if _, err := scrape.NewManager(scrape.Options{Fleet: fleet, Settings: &settings, Plan: &scrape.Plan{}, Log: zap.NewNop(), Registry: registry}); err != nil {
		t.Fatal(err)
	}
	var router routing.Current
	proxy.NewAdmin(proxy.AdminOptions{Fleet: fleet, Router: &router, Registry: registry, Log: zap.NewNop(), ExplainAPI: proxy.RouteAPI})
	var known []string
	descs := make(chan *prometheus.Desc)
	go func() {
		registry.Describe(descs)
		close(descs)
	}()
	for d := range descs {
		known = append(known, regexp.MustCompile(`fqName: "([^"]*)"`).FindStringSubmatch(d.String())[1])
	}
	seen := 0
	for _, file := range docFiles(t) {
		for _, name := range regexp.MustCompile(`\bkvgate_[a-z0-9_]+`).FindAllString(readDoc(t, file), -1) {
			seen++
			base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(name, "")
			if !slices.Contains(known, name) && !slices.Contains(known, base) {
				t.Errorf("%s: got %s, want one of %q", file, name, known)
			}
		}
	}
	if seen < 10 {
		t.Errorf("got %d series in the docs, want at least 10: the pattern misses them", seen)
	}
}

// TestDocsPaths checks that docs/configuration.md names every route.
func TestDocsPaths(t *testing.T) {
	page := readDoc(t, "docs/configuration.md")
	for _, route := range proxy.RouteTemplates() {
		if !strings.Contains(page, "`"+route+"`") && route != "passthrough" {
			t.Errorf("docs/configuration.md: got no `%s`, want every route named", route)
		}
	}
}

// TestDocsUnit checks that systemd waits longer for the end than kvgate drains.
func TestDocsUnit(t *testing.T) {
	unit := readDoc(t, "configs/systemd/kvgate.service")
	m := regexp.MustCompile(`(?m)^TimeoutStopSec=(\d+)$`).FindStringSubmatch(unit)
	if m == nil {
		t.Fatal("got no TimeoutStopSec in seconds, want one")
	}
	got, err := time.ParseDuration(m[1] + "s")
	d := configs.DefaultSettings().Drain
	if want := d.Delay + d.Timeout + 10*time.Second; err != nil || got < want {
		t.Errorf("TimeoutStopSec: got %v (%v), want at least drain.delay + drain.timeout + 10s = %v", got, err, want)
	}
	for _, line := range strings.Split(unit, "\n") {
		key, command, _ := strings.Cut(line, "=")
		if (key == "ExecStart" || key == "ExecStartPre") && !strings.HasPrefix(command, "/usr/bin/kvgate ") {
			t.Errorf("%s: got %s, want /usr/bin/kvgate, which make install rewrites", key, command)
		}
	}
}

// TestDocsPlugin adds the plugin of docs/adding-a-plugin.md to the tree as the
// page says, without touching the tree, and runs the test of the page.
func TestDocsPlugin(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles a package: not with -short")
	}
	page := readDoc(t, "docs/adding-a-plugin.md")
	dir := t.TempDir()
	replace := make(map[string]string)
	add := func(file, text string) {
		path, err := filepath.Abs(file)
		if err != nil {
			t.Fatal(err)
		}
		replace[path] = filepath.Join(dir, filepath.Base(file))
		if err := os.WriteFile(replace[path], []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for info, text := range docBlocks(page, "go") {
		kind, file, _ := strings.Cut(info, "=")
		switch kind {
		case "file":
			if _, err := os.Stat(file); !os.IsNotExist(err) {
				t.Fatalf("%s: got a file of the tree (%v), want a new one", file, err)
			}
			add(file, text)
		case "line":
			const head = "var registry = []plugin{\n"
			registry := readDoc(t, file)
			if !strings.Contains(registry, head) {
				t.Fatalf("%s: got no line %q, want it", file, head)
			}
			add(file, strings.Replace(registry, head, head+text, 1))
		default:
			t.Errorf("got a Go block %q, want file= or line=", info)
		}
	}
	if len(replace) != 3 {
		t.Fatalf("got %d Go blocks, want the plugin, its line and its test", len(replace))
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	list := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(list, overlay, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "test", "-overlay", list, "-run", "^TestHeadroomScorer$", "-v", "./routing").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestHeadroomScorer") {
		t.Errorf("got %v and\n%s\nwant TestHeadroomScorer to pass", err, out)
	}
}

// TestDocsExamples loads every configuration that the pages show.
func TestDocsExamples(t *testing.T) {
	seen := 0
	for _, file := range docFiles(t) {
		for info, text := range docBlocks(readDoc(t, file), "yaml") {
			seen++
			var err error
			if strings.HasPrefix(text, "apiVersion:") {
				var cfg *configs.Scheduling
				if cfg, err = configs.ParseScheduling(file, []byte(text)); err == nil && !strings.Contains(text, "headroom-scorer") {
					_, err = routing.New(cfg, routing.NewFleet(time.Now, time.Second, zap.NewNop()), 1)
				}
			} else if strings.HasPrefix(text, "keys:") {
				_, err = configs.ParseKeys(file, []byte(text))
			} else if strings.HasPrefix(text, "endpoints:") {
				_, _, err = configs.ParseEndpoints(file, []byte(text))
			} else {
				path := filepath.Join(t.TempDir(), "settings.yaml")
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
				_, err = configs.LoadSettings(nil, path, nil)
			}
			if err != nil {
				t.Errorf("%s: block %s: got %v, want it to load", file, info, err)
			}
		}
	}
	if seen < 3 {
		t.Errorf("got %d blocks, want at least 3: the pattern misses them", seen)
	}
}

// TestDocsEstimate checks that docs/configuration.md shows the defaults of the estimate.
func TestDocsEstimate(t *testing.T) {
	text, ok := docBlocks(readDoc(t, "docs/configuration.md"), "yaml")["file=estimate.yaml"]
	if !ok {
		t.Fatal("docs/configuration.md: got no block estimate.yaml, want one")
	}
	cfg, err := configs.ParseScheduling("estimate.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Estimate routing.EstimateParams `json:"estimate"`
	}
	for _, p := range cfg.Plugins {
		if p.Type == "token-producer" {
			if err := p.Parameters.Decode(&got); err != nil {
				t.Fatal(err)
			}
		}
	}
	if want := routing.DefaultEstimateParams(); got.Estimate != want {
		t.Errorf("docs/configuration.md: got the defaults\n%+v, want\n%+v", got.Estimate, want)
	}
}

// TestDocsDependencies checks that docs/decisions.md has a paragraph for every
// module that the code imports.
func TestDocsDependencies(t *testing.T) {
	page := readDoc(t, "docs/decisions.md")
	out, err := exec.Command("go", "list", "-test", "-f", `{{join .Imports "\n"}}{{"\n"}}{{join .TestImports "\n"}}{{"\n"}}{{join .XTestImports "\n"}}`, "./...").Output()
	if err != nil {
		t.Fatalf("go list: got %v, want the imports", err)
	}
	var modules []string
	for _, m := range regexp.MustCompile(`(?m)^(?:require)?\s+(\S+\.\S+/\S+) v`).FindAllStringSubmatch(readDoc(t, "go.mod"), -1) {
		modules = append(modules, m[1])
	}
	used := make(map[string]bool)
	for path := range strings.FieldsSeq(string(out)) {
		for _, m := range modules {
			if path == m || strings.HasPrefix(path, m+"/") {
				used[m] = true
			}
		}
	}
	for m := range used {
		if !strings.Contains(page, "`"+strings.TrimPrefix(m, "github.com/")+"`") {
			t.Errorf("docs/decisions.md: got no `%s`, want a paragraph for every dependency", strings.TrimPrefix(m, "github.com/"))
		}
	}
	if len(used) < 5 {
		t.Errorf("got %d imported modules, want at least 5: the patterns miss them", len(used))
	}
}

// TestDocsTree checks that docs/architecture.md names every package of the tree.
func TestDocsTree(t *testing.T) {
	page := readDoc(t, "docs/architecture.md")
	err := fs.WalkDir(os.DirFS("."), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
			return fs.SkipDir
		}
		if dir := filepath.Dir(path); strings.HasSuffix(path, ".go") && dir != "." && !strings.Contains(page, "`"+dir+"`") {
			t.Errorf("docs/architecture.md: got no `%s`, want every package named", dir)
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
