package proxy

import (
	"strings"
	"testing"

	"kvgate/configs"
	"kvgate/routing"
)

// learnSomething routes one prompt of token ids that replica a holds by its own
// word, and has it answered.
func learnSomething(t *testing.T, fleet *routing.Fleet) {
	t.Helper()
	cfg, err := configs.ParseScheduling("test.yaml", []byte(`apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters: {tokenProcessorConfig: {blockSizeTokens: 4}}
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
- type: burst-prefix-cache-producer
`))
	if err != nil {
		t.Fatal(err)
	}
	router, err := routing.New(cfg, fleet, 1)
	if err != nil {
		t.Fatal(err)
	}
	e := fleet.Endpoints()[0]
	kv := router.KVEventSources()[0].Sink
	kv.Stored(e, 0, &routing.BlockStored{Hashes: []uint64{1, 2}, Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8}, BlockTokens: 4, Model: []byte("m")})
	kv.Removed(e, 0, &routing.BlockRemoved{Hashes: []uint64{2, 3}})
	kv.Incomplete(e, 1, "a gap")
	req := &routing.Request{API: routing.APICompletions, Body: []byte(`{"model":"m","prompt":[1,2,3,4,5,6,7,8,9]}`)}
	if err := req.Parse(); err != nil {
		t.Fatal(err)
	}
	lease, err := router.Route(req)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := lease.HashedTokens(), int64(8); got != want {
		t.Errorf("HashedTokens: got %d, want %d", got, want)
	}
	lease.Usage(9, 1)
	lease.Done(routing.Completed)
}

func TestLearnedSeries(t *testing.T) {
	page := fullScrape(t)
	f := func(line string) {
		t.Helper()
		if !strings.Contains(page, line+"\n") {
			t.Errorf("got no line %s", line)
		}
	}
	const of = `{producer="precise-prefix-cache-producer",replica="a"`
	f("kvgate_prediction_prompt_tokens_total" + of + "} 9")
	f("kvgate_prediction_predicted_tokens_total" + of + "} 4")
	f("kvgate_prediction_cached_tokens_total" + of + "} 1")
	f("kvgate_prediction_error_tokens_total" + of + "} 3")
	f("kvgate_prediction_error_ratio" + of + "} 0.3333333333333333")
	f("kvgate_prediction_drops_total" + of + "} 0")
	f("kvgate_kv_blocks" + of + "} 1")
	f("kvgate_kv_incomplete" + of + "} 1")
	const op, reason = `{op="`, `{producer="precise-prefix-cache-producer",reason="`
	for _, x := range []string{"store", "remove", "lose"} {
		n := map[string]string{"store": "2", "remove": "1", "lose": "1"}[x]
		f("kvgate_kv_updates_total" + op + x + `",producer="precise-prefix-cache-producer",replica="a"} ` + n)
	}
	f("kvgate_kv_skipped_blocks_total" + reason + `unknown_block",replica="a"} 1`)
	f("kvgate_kv_skipped_blocks_total" + reason + `unknown_parent",replica="a"} 0`)
	f(`kvgate_token_sources_total{source="given"} 1`)
	f(`kvgate_token_sources_total{source="rendered"} 0`)
	f(`kvgate_burst_windows_total{producer="burst-prefix-cache-producer"} 0`)
	f(`kvgate_burst_requests_total{producer="burst-prefix-cache-producer",result="placed"} 0`)
	if !strings.Contains(page, "kvgate_prompt_bytes_per_token{model=") {
		t.Error("got no kvgate_prompt_bytes_per_token, want one per model")
	}
}
