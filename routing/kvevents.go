package routing

// KVEvents takes what engines tell about their KV caches. A subscriber calls it:
// in the order of the engine's sequence numbers for one endpoint and rank, at
// will from any goroutine otherwise. What is said about an endpoint that is not
// in the fleet (any more) is dropped and counted. No method blocks for long, and
// none keeps a slice that it was given.
type KVEvents interface {
	// Stored: blocks came into the cache, or into another tier of it.
	Stored(e *Endpoint, rank int, b *BlockStored)
	// Removed: blocks left one tier of the cache.
	Removed(e *Endpoint, rank int, b *BlockRemoved)
	// Cleared: the rank holds nothing that was told of before. AllBlocksCleared, a
	// restart, the start of a replay of everything.
	Cleared(e *Endpoint, rank int)
	// Incomplete: events were lost for good, for the reason why. What is known of the
	// rank is dropped. It stays marked, with later events taken in all the same,
	// until why is "".
	Incomplete(e *Endpoint, rank int, why string)
}

// BlockStored is one BlockStored event: a chain of full blocks.
type BlockStored struct {
	Hashes      []uint64 // the engine's own hashes, in the order of the prompt
	Parent      uint64   // engine hash of the block before Hashes[0]
	HasParent   bool     // false: Hashes[0] is the first block of a prompt
	Tokens      []uint32 // token ids of all blocks; empty when known blocks came into another tier
	BlockTokens int      // tokens per engine block
	Model       []byte   // base model, the third part of the topic; empty when the topic has none
	LoRA        []byte   // lora_name; empty for the base model
	Medium      []byte   // tier as the engine spells it; empty means gpu
	Group       int      // group_idx, 0 when absent
	Kind        []byte   // kv_cache_spec_kind; empty means full_attention

	// Extras are the extra_keys of all blocks: in block order, and within a block in
	// the engine's order. The name of the LoRA may be among them.
	Extras []BlockExtra
}

// BlockExtra is one extra key of one block: the hash of a multimodal item, the
// cache_salt, the name of the LoRA.
type BlockExtra struct {
	Block int    // index into Hashes
	Key   []byte // the string, or the string of a (string, offset) pair
	// Offset is the second part of a pair: where the item starts, in tokens from the start
	// of the block, below 0 when it starts before. Paired says whether there was one.
	Offset int
	Paired bool
}

// BlockRemoved is one BlockRemoved event.
type BlockRemoved struct {
	Hashes []uint64 // engine hashes
	Medium []byte   // tier as the engine spells it; empty means gpu
	Group  int      // group_idx, 0 when absent
}

// KVEventsConfig is kvEventsConfig of a precise-prefix-cache-producer, complete
// and checked. Values are comparable with ==.
type KVEventsConfig struct {
	ZMQEndpoint  string // address to bind, engines connect to it; "" = none
	TopicFilter  string // prefix of the topics to subscribe to
	Concurrency  int    // workers that decode, at least 1
	Engine       string // "vllm" or "sglang"
	DiscoverPods bool   // subscribe to each endpoint
	Namespace    string // subscribe to the endpoints of this namespace only; "" = all
	SocketPort   int    // port of an endpoint's publisher, plus its rank
	ReplayPort   int    // port of an endpoint's replay server, plus its rank; 0 = no replay
}

// KVEventSource is what one producer wants to be told. A Sink that is the same
// value as before a reload still holds its index: subscriptions with an equal
// Config go on. A new Sink knows nothing: subscribe anew and replay from the start.
type KVEventSource struct {
	Producer string // the instance's name, for logs and metrics
	Config   KVEventsConfig
	Sink     KVEvents
}

// eventTaker is a producer that lives on KV events.
type eventTaker interface {
	events() (KVEventsConfig, KVEvents)
}

// KVEventSources returns what the producers of this configuration want to be
// told; none when no scorer reads a precise producer.
func (r *Router) KVEventSources() []KVEventSource {
	var out []KVEventSource
	for _, p := range r.producers {
		if t, ok := p.Producer.(eventTaker); ok {
			cfg, sink := t.events()
			out = append(out, KVEventSource{p.name, cfg, sink})
		}
	}
	return out
}
