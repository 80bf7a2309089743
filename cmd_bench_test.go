package main

import "testing"

func TestPortPlus(t *testing.T) {
	f := func(t *testing.T, endpoint string, i int, want string) {
		t.Helper()
		got, err := portPlus(endpoint, i)
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%q for replica %d: got %q, want %q", endpoint, i, got, want)
		}
	}
	f(t, "", 3, "")
	f(t, "tcp://*:5600", 0, "tcp://*:5600")
	f(t, "tcp://*:5600", 2, "tcp://*:5602")
	f(t, "tcp://*:0", 2, "tcp://*:0")
	f(t, "tcp://10.0.0.1:5600", 2, "tcp://10.0.0.1:5600")
	f(t, "tcp://*:65535", 1, "error")
	f(t, "tcp://*:x", 1, "error")
}

// TestFakeVLLMEvents: what is wrong with the flags of KV events is said before anything listens.
func TestFakeVLLMEvents(t *testing.T) {
	f := func(want int, args ...string) {
		t.Helper()
		status, _, stderr := command(t, append([]string{"bench", "fakevllm", "--listen", "127.0.0.1:0"}, args...)...)
		if status != want {
			t.Errorf("%q: got status %d (%s), want %d", args, status, stderr, want)
		}
	}
	f(2, "--replicas", "2", "--kv-events", "tcp://*:65535")
	f(2, "--replicas", "2", "--kv-events", "tcp://*:0", "--kv-replay", "tcp://*:x")
	f(1, "--kv-events", "5600")
	f(1, "--kv-replay", "tcp://*:0")
}
