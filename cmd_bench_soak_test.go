package main

import (
	"strings"
	"testing"
)

func TestBenchSoakCommand(t *testing.T) {
	f := func(wantStatus int, want string, args ...string) {
		t.Helper()
		status, out, errs := command(t, append([]string{"bench", "soak"}, args...)...)
		if status != wantStatus || !strings.Contains(out+errs, want) {
			t.Errorf("kvgate bench soak %s: got status %d\n%s%s\nwant status %d and %q", strings.Join(args, " "), status, out, errs, wantStatus, want)
		}
	}
	f(2, "--duration 0s", "--duration", "0s")
	f(2, "--clients 0", "--clients", "0")
	f(2, "--replicas 1", "--replicas", "1")
	f(1, "/nonexistent/kvgate", "--kvgate", "/nonexistent/kvgate")
}
