package configs

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// seed adds the examples and some documents that are hard to read.
func seed(f *testing.F, pattern string) {
	f.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		f.Fatalf("got %q and error %v, want examples", files, err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	for _, s := range []string{
		"", "{}", "[]", "~", "a: 1\na: 2\n", "a: &a [*a]\n", "<<: {a: 1}\n<<: [{b: 2}]\n", "? [a]\n: b\n", "a: !!int x\n", "a: .nan\n", "{\"a\":\"\\u0000\"}", "%YAML 1.1\n--- a\n...\n", "a: |\n\tb\n", "a: >-\n  b\n", "*x : 1",
		"plugins:\n- &a {type: a, parameters: {<<: &b {x: 1}, y: *b}}\n- *a\n",
		"flowControl: {maxBytes: 1e9, defaultRequestTTL: 1m, priorityBands: [{priority: -1, maxRequests: 5k}]}\n",
		"featureGates: [flowControl=false, a=, =b]\ndataLayer: {discovery: {pluginRef: a}}\nparser: {pluginRef: b}\n",
		"replicas: [a=http://[::1]:1, {url: https://b, labels: {c.D: e}}]\nroutes: {passthrough: [/a/*]}\n",
		"limits: {body: 9223372036854775807TiB, header: 1k}\nscrape: {interval: 1h}\n",
	} {
		f.Add([]byte(s))
	}
}

// placed fails unless err is nil or problems that all name the file.
func placed(t *testing.T, err error, file string) {
	t.Helper()
	var problems Problems
	if err == nil || errors.Is(err, ErrNoEndpoints) {
		return
	}
	if !errors.As(err, &problems) || len(problems) == 0 {
		t.Fatalf("got %T %v, want Problems", err, err)
	}
	for _, p := range problems {
		if p.File != file || p.Message == "" || p.node != nil {
			t.Fatalf("got %+v, want a problem in %s", p, file)
		}
	}
}

func FuzzParseScheduling(f *testing.F) {
	seed(f, "scheduling-*.yaml")
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := ParseScheduling("f", data)
		placed(t, err, "f")
		if (s == nil) != (err != nil) {
			t.Fatalf("got %v and error %v, want one of them", s, err)
		}
		if s == nil {
			return
		}
		names := make(map[string]bool)
		for _, p := range s.Plugins {
			if p.Name == "" || p.Type == "" || names[p.Name] {
				t.Fatalf("got plugin %+v, want a unique name and a type", p)
			}
			names[p.Name] = true
			var dst struct {
				X int               `json:"x"`
				Y map[string]Params `json:"y"`
				Z []string          `json:"z"`
			}
			placed(t, p.Parameters.Decode(&dst), "f")
		}
		for _, p := range s.Profiles {
			for _, entry := range p.Plugins {
				if p.Name == "" || !names[entry.Ref] || entry.Weight != nil && !(*entry.Weight >= 0) {
					t.Fatalf("got entry %+v of profile %q, want a declared plugin and a weight of at least 0", entry, p.Name)
				}
			}
		}
		if s.FeatureGates[gateFlowControl] {
			t.Fatal("got flowControl on, want it refused")
		}
	})
}

func FuzzParseEndpoints(f *testing.F) {
	seed(f, "endpoints.yaml")
	f.Fuzz(func(t *testing.T, data []byte) {
		list, _, err := ParseEndpoints("f", data)
		placed(t, err, "f")
		if (len(list) == 0) != (err != nil) {
			t.Fatalf("got %v and error %v, want one of them", list, err)
		}
		ids := make(map[string]bool)
		for _, e := range list {
			n, err := e.Replica().Normalize()
			if err != nil || n.URL != e.URL() || n.ID() != e.ID() || ids[e.ID()] {
				t.Fatalf("got %+v, normalized %+v and error %v, want a unique endpoint in its normal form", e, n, err)
			}
			ids[e.ID()] = true
		}
	})
}

func FuzzSettingsFile(f *testing.F) {
	seed(f, "[km]*.yaml")
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := mergeSettings(nil, "f", data, map[string]string{"KVGATE_LISTEN": ":1"}, nil)
		if errs := l.Validate(); err == nil && len(errs) > 0 {
			t.Fatalf("got no error, want %v", errs)
		}
		if l.Listen != ":1" {
			t.Fatalf("got listen %q, want the environment to win", l.Listen)
		}
		for _, row := range l.Rows() {
			if row.Origin == "" {
				t.Fatalf("got %+v, want an origin", row)
			}
		}
		if err == nil {
			return
		}
		var problems Problems
		if !errors.As(err, &problems) {
			t.Fatalf("got %T %v, want Problems", err, err)
		}
		for _, p := range problems {
			if p.File != "f" && p.File != "env KVGATE_LISTEN" {
				t.Fatalf("got %+v, want a problem with a place", p)
			}
		}
	})
}

func FuzzQuantity(f *testing.F) {
	for _, s := range []string{"1Gi", "1e9", "-5.5m", "1E", "9223372036854775807", "+.5k"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var q Quantity
		if err := q.UnmarshalText([]byte(text)); err != nil && q != 0 {
			t.Fatalf("got %d beside the error %v, want 0", q, err)
		}
		var s, again Size
		if s.UnmarshalText([]byte(text)) != nil {
			return
		}
		if err := again.UnmarshalText([]byte(s.String())); err != nil || s != again {
			t.Fatalf("got %d and error %v from %s, want %d", again, err, s, s)
		}
	})
}
