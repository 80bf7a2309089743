package routing

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/url"
	"time"
)

type tokenParams struct {
	ModelName string          `json:"modelName"`
	Estimate  *EstimateParams `json:"estimate"`
	VLLM      *renderParams   `json:"vllm"`
	Local     *localParams    `json:"local"`
	UDS       *struct{}       `json:"udsTokenizerConfig"`
}

// Times that a render server has, the same as llm-d's.
const (
	defaultRenderTimeout   = 5 * time.Second
	defaultRenderMMTimeout = 30 * time.Second
)

// newTokenProducer makes llm-d's token-producer: with the estimate backend, in
// which four bytes of the rendered prompt stand for one token, with the vLLM render
// backend, or with the local one, which fall back on that.
func newTokenProducer(b *builder) (any, error) {
	p := tokenParams{VLLM: &renderParams{}}
	estimate := DefaultEstimateParams()
	if err := b.params(&p); err != nil {
		return nil, err
	}
	if p.UDS != nil {
		return nil, b.problem("remove it: the estimate backend needs no tokenizer service, and vllm asks an engine", "udsTokenizerConfig is not supported")
	}
	if p.Estimate != nil {
		estimate = *p.Estimate
	}
	e, err := NewEstimator(estimate)
	if err != nil {
		return nil, b.problem("see docs/configuration.md", fmt.Sprintf("estimate: %v", err))
	}
	local, asks := b.spec.Parameters.Has("local"), b.spec.Parameters.Has("vllm")
	if local && !asks && p.ModelName != "" {
		return nil, b.spec.Parameters.At("modelName").Problem("remove it, or write local.models", "%s: modelName is what vllm is asked for; beside local it says nothing", b.spec.Name)
	}
	if !local && !asks && p.ModelName == "" {
		return e, nil
	}
	var render *renderTokenizer
	if asks || p.ModelName != "" {
		if render, err = b.renderer(e, p); err != nil {
			return nil, err
		}
	}
	if local {
		if p.Local == nil {
			p.Local = &localParams{}
		}
		return b.makeLocal(e, *p.Local, render)
	}
	return render, nil
}

// renderer makes the render backend.
func (b *builder) renderer(e *Estimator, p tokenParams) (*renderTokenizer, error) {
	v := p.VLLM
	v.Timeout, v.MMTimeout = cmp.Or(v.Timeout, defaultRenderTimeout), cmp.Or(v.MMTimeout, defaultRenderMMTimeout)
	for _, t := range []struct {
		name  string
		value time.Duration
	}{{"timeout", v.Timeout}, {"mmTimeout", v.MMTimeout}} {
		if t.value < 0 || t.value > 10*time.Minute {
			return nil, b.spec.Parameters.At("vllm."+t.name).Problem("use a time above 0, such as 5s", "%s: %s %v is out of range", b.spec.Name, t.name, t.value)
		}
	}
	if v.URL != "" {
		u, err := url.Parse(v.URL)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" {
			return nil, b.spec.Parameters.At("vllm.url").Problem("use http://HOST:PORT without a path, or leave it out to ask the replicas", "%s: url %q", b.spec.Name, v.URL)
		}
		v.URL = u.Scheme + "://" + u.Host
	}
	t := &renderTokenizer{fleet: b.fleet, estimate: e, render: b.render, params: *v, cache: b.fleet.renderCache(b.seed)}
	if p.ModelName != "" {
		t.model, _ = json.Marshal(p.ModelName) // of a string it never fails
	}
	return t, nil
}

// renderCache returns what render servers have told, kept over reloads.
func (f *Fleet) renderCache(seed uint64) *renderCache {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.rendered == nil {
		f.rendered = &renderCache{seed: seed ^ indexPlacementKey}
	}
	return f.rendered
}
