package main

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvgate/configs"
	"kvgate/routing"
)

// TestExplainTokensOfSavedFleet shows the local tokenizer's tokens, as a table and as JSON.
func TestExplainTokensOfSavedFleet(t *testing.T) {
	tokenizer, err := filepath.Abs("routing/testdata/tokenizers/cl100k/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	request := writeTemp(t, "request.json", `{"model":"m","messages":[{"role":"user","content":"the"}]}`)
	fleet := writeTemp(t, "fleet.json", `{"time":"2026-01-01T00:00:00Z","replicas":[{"name":"A","url":"http://a:1","state":"ready","models":["m"]}]}`)
	scheduling := writeTemp(t, "scheduling.yaml", `apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: token-producer
    parameters: {local: {tokenizer: `+tokenizer+`}}
  - type: precise-prefix-cache-producer
    parameters: {tokenProcessorConfig: {blockSizeTokens: 4}}
  - type: prefix-cache-scorer
    parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
`)
	status, out, errs := command(t, "explain", "-f", request, "--fleet", fleet, "--scheduling", scheduling, "--tokens")
	for _, want := range []string{"prompt 0 (local)", `block 0: 0="<|begin|>"`, `1="<|end|>"`, `="\n"`, "block 3"} {
		if status != 0 || !strings.Contains(out, want) {
			t.Errorf("status %d: output lacks %q:\n%s%s", status, want, out, errs)
		}
	}
	status, out, errs = command(t, "explain", "-f", request, "--fleet", fleet, "--scheduling", scheduling, "--tokens", "--output", "json")
	var ex routing.Explanation
	if err := json.Unmarshal([]byte(out), &ex); status != 0 || err != nil {
		t.Fatalf("status %d, %v: %s", status, err, errs)
	}
	want := "<|begin|>user\nthe<|end|>\n<|begin|>assistant\n"
	got := ""
	if len(ex.Prompts) == 1 {
		for _, b := range ex.Prompts[0].Blocks {
			for _, x := range b.Tokens {
				got += x.Text
			}
		}
	}
	if ex.Tokens != "local" || got != want || ex.Prompts[0].Text != want {
		t.Errorf("got %s %q, want local %q", ex.Tokens, got, want)
	}
}

// TestExplainTokensOfGateway asks a running gateway.
func TestExplainTokensOfGateway(t *testing.T) {
	g := testGateway(t, nil, testReplica(t))
	request := writeTemp(t, "request.json", `{"model":"m","prompt":[1,2,3]}`)
	f := func(t *testing.T, want bool, args ...string) {
		t.Helper()
		status, out, errs := command(t, append([]string{"explain", "-f", request, "--path", "/v1/completions", "--admin", adminURL(g)}, args...)...)
		if status != 0 || strings.Contains(out, "block 0 (3 tokens): 1 2 3") != want {
			t.Errorf("%v: status %d\n%s%s\nwant tokens: %v", args, status, out, errs, want)
		}
	}
	f(t, false)
	f(t, true, "--tokens")
}

// TestExampleOfLocalTokens: the example asks for files that nobody has.
func TestExampleOfLocalTokens(t *testing.T) {
	cfg, err := configs.LoadScheduling("configs/scheduling-local.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(cfg.Plugins, func(p configs.PluginSpec) bool {
		return p.Type == "token-producer" && p.Parameters.Has("local") && p.Parameters.Has("vllm")
	}) {
		t.Error("got no token-producer with local and vllm, want one")
	}
}
