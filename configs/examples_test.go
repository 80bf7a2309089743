package configs

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// Every example in this folder loads without a warning, and there is none that no rule covers.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 7 {
		t.Errorf("got the examples %q, want at least 7", files)
	}
	for _, file := range files {
		var warnings []string
		var err error
		switch {
		case strings.HasPrefix(file, "scheduling-"), file == "expected-cost.yaml":
			var s *Scheduling
			if s, err = LoadScheduling(file); err == nil {
				warnings = s.Warnings
			}
		case strings.HasPrefix(file, "endpoints"):
			var data []byte
			if data, err = os.ReadFile(file); err == nil {
				_, warnings, err = ParseEndpoints(file, data)
			}
		default:
			_, err = LoadSettings(nil, file, nil)
		}
		if err != nil || len(warnings) > 0 {
			t.Errorf("got error %v and warnings %q for %s, want none", err, warnings, file)
		}
	}
}

// kvgate.yaml is the reference: it has every key, and each with its default.
func TestReferenceSettings(t *testing.T) {
	const file = "kvgate.yaml"
	l, err := LoadSettings(nil, file, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, leaf := range leaves() {
		if got := l.Origins[leaf.key]; !strings.HasPrefix(got, file+":") {
			t.Errorf("got origin %q of %s, want a line of %s", got, leaf.key, file)
		}
		defaults := DefaultSettings()
		got, want := leaf.of(&l.Settings).Interface(), leaf.of(&defaults).Interface()
		if show(reflect.ValueOf(got)) != show(reflect.ValueOf(want)) {
			t.Errorf("got %v for %s, want the default %v", got, leaf.key, want)
		}
	}
}
