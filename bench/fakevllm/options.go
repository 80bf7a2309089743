package fakevllm

import (
	"crypto/tls"
	"fmt"
	"time"
)

// Options configures a Server. The zero value of a field means its default.
type Options struct {
	Listen string      // host:port; default 127.0.0.1:0
	TLS    *tls.Config // serves https

	Models []string // served names, the first the base model, the others LoRA adapters; default "fake"
	Engine Model    // default DefaultModel()

	MaxModelLen   int    // prompt and output of one request; default: 131072, or the capacity of the cache if that is less
	MaxQueued     int    // requests without a first token, more get 503; 0: no limit
	MaxBody       int    // bytes of a request body, more get 413; default 256 MiB
	OutputTokens  int    // tokens of an answer that the request neither limits nor forces; default 64
	NoUsageDetail bool   // usage without cached_tokens, vLLM's own default
	APIKey        string // wanted as bearer token on /v1 and /inference paths

	Speed   float64 // time compression: 10 makes every step ten times shorter; default 1
	Instant bool    // no engine: complete answers at once, at the least cost; prompts count as a quarter of their body's bytes
	Manual  bool    // the engine moves only when Step is called

	IdleTimeout     time.Duration // keep-alive, counted from the last answer; default 5 s, as uvicorn's
	ShutdownTimeout time.Duration // what Run gives open answers to end; 0, vLLM's default, ends them with finish_reason "abort"

	KVEvents KVEvents // what is published about the KV cache; nothing by default

	Faults Faults // from the start
}

func (o Options) withDefaults() (Options, error) {
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	if len(o.Models) == 0 {
		o.Models = []string{"fake"}
	}
	if o.Engine == (Model{}) {
		o.Engine = DefaultModel()
	}
	if err := o.Engine.Validate(); err != nil {
		return o, err
	}
	capacity := o.Engine.CapacityTokens()
	if o.MaxModelLen == 0 {
		o.MaxModelLen = min(131072, capacity)
	}
	if o.MaxModelLen < 2 || o.MaxModelLen > capacity {
		return o, fmt.Errorf("options: max model length %d: use 2 to %d, the capacity of the KV cache", o.MaxModelLen, capacity)
	}
	if o.MaxBody == 0 {
		o.MaxBody = 256 << 20
	}
	if o.OutputTokens == 0 {
		o.OutputTokens = 64
	}
	if o.Speed == 0 {
		o.Speed = 1
	}
	if o.IdleTimeout == 0 {
		o.IdleTimeout = 5 * time.Second
	}
	for _, f := range []struct {
		name  string
		value float64
	}{
		{"max queued", float64(o.MaxQueued)}, {"max body", float64(o.MaxBody)}, {"output tokens", float64(o.OutputTokens)},
		{"speed", o.Speed}, {"idle timeout", float64(o.IdleTimeout)}, {"shutdown timeout", float64(o.ShutdownTimeout)},
	} {
		if !(f.value >= 0) {
			return o, fmt.Errorf("options: %s is %v: use a number that is not negative", f.name, f.value)
		}
	}
	if o.Instant && o.Manual {
		return o, fmt.Errorf("options: instant and manual exclude each other")
	}
	if o.Instant && o.KVEvents.Endpoint != "" {
		return o, fmt.Errorf("options: instant has no KV cache that could be published: choose one")
	}
	if err := o.KVEvents.validate(); err != nil {
		return o, err
	}
	return o, o.Faults.Validate()
}
