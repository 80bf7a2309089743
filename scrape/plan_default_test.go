package scrape

import (
	"testing"

	"kvgate/configs"
)

// TestDefaultPlanReadsVLLMFirst: every page was taken for one without a known engine.
func TestDefaultPlanReadsVLLMFirst(t *testing.T) {
	p, err := NewPlan(configs.DefaultScheduling(), configs.DefaultSettings().Scrape)
	if err != nil {
		t.Fatal(err)
	}
	engines, _ := p.engineOf(func(string) (string, bool) { return "", false })
	var got []string
	for _, e := range engines {
		got = append(got, e.name)
	}
	want := []string{"vllm", "sglang", "trtllm-serve", "triton-tensorrt-llm", "triton"}
	if len(got) != len(want) {
		t.Fatalf("engines %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("engines %v, want %v", got, want)
		}
	}
}
