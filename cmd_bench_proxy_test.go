package main

import (
	"strings"
	"testing"
)

func TestBenchProxyCommand(t *testing.T) {
	f := func(t *testing.T, args string, wantStatus int, want string) {
		status, stdout, stderr := command(t, append([]string{"bench", "proxy"}, strings.Fields(args)...)...)
		if status != wantStatus {
			t.Errorf("got status %d, want %d: %s", status, wantStatus, stderr)
		}
		if !strings.Contains(stdout+stderr, want) {
			t.Errorf("got %q, want %q in it", stdout+stderr, want)
		}
	}
	t.Run("list", func(t *testing.T) { f(t, "--list", exitOK, "memory-streams") })
	t.Run("list peers", func(t *testing.T) { f(t, "--list --tools /absent", exitOK, "vllm-router") })
	t.Run("cells", func(t *testing.T) { f(t, "--cells (", exitUsage, "--cells: error parsing regexp") })
	t.Run("no cell", func(t *testing.T) { f(t, "--cells ^none$", exitUsage, "no cell's name matches") })
	t.Run("rounds", func(t *testing.T) { f(t, "--rounds 0", exitUsage, "rounds 0: use at least 1") })
	t.Run("duration", func(t *testing.T) { f(t, "--duration 1ms", exitUsage, "duration 1ms: use at least 100ms") })
	t.Run("system", func(t *testing.T) { f(t, "--systems squid", exitUsage, `system "squid"`) })
	t.Run("names", func(t *testing.T) { f(t, "--kvgate a --kvgate b", exitUsage, `two systems are called "kvgate"`) })
	t.Run("output", func(t *testing.T) { f(t, "--output xml", exitUsage, "use table or json") })
	t.Run("argument", func(t *testing.T) { f(t, "now", exitUsage, "unknown command or argument") })
}

func TestCommandLine(t *testing.T) {
	f := func(want string, args ...string) {
		if got := commandLine(args); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	f("kvgate bench proxy --rounds 3", "bench", "proxy", "--rounds", "3")
	f("kvgate bench proxy --cells 'a|b'", "bench", "proxy", "--cells", "a|b")
	f(`kvgate 'it'\''s'`, "it's")
}
