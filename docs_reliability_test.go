package main

import (
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestDocsReliability holds docs/reliability.md against the tests: each that it
// names is there.
func TestDocsReliability(t *testing.T) {
	declared := map[string]bool{}
	err := fs.WalkDir(os.DirFS("."), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`).FindAllStringSubmatch(readDoc(t, path), -1) {
			declared[m[1]] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	page := readDoc(t, "docs/reliability.md")
	names := regexp.MustCompile("`((?:Test|Fuzz)\\w+)`").FindAllStringSubmatch(page, -1)
	if len(names) == 0 {
		t.Fatal("docs/reliability.md: got no test's name, want some")
	}
	for _, m := range names {
		if !declared[m[1]] {
			t.Errorf("docs/reliability.md: got %s, want a test that exists", m[1])
		}
	}
}
