package routing

import "math"

// Canceler breaks off what is done for a client when that client leaves. Headers
// that are a Canceler, too, are asked while a request waits for its tokens.
type Canceler interface {
	// Attach has cancel called, once, when the client leaves. It returns false when the client has left.
	Attach(cancel func()) bool
	// Detach takes Attach back: cancel is not called behind it.
	Detach()
}

// Headers gives the plugins and parsers a request's header fields.
type Headers interface {
	// Header returns the value of the field, nil when it is absent. The name is
	// in lower case. The value is valid while the request lives.
	Header(name string) []byte
}

// API is the shape of a request body: which fields hold the prompt.
type API uint8

// The request shapes that the parsers know. APINone is routed on load alone.
const (
	APINone        API = iota // no prompt to hash: models, audio, rerank, passthrough ...
	APIChat                   // /v1/chat/completions and its /render
	APICompletions            // /v1/completions and its /render
	APIEmbeddings             // /v1/embeddings, /pooling, /classify with an input
	APIResponses              // /v1/responses
	APIMessages               // /v1/messages (Anthropic)
	APIGenerate               // /inference/v1/generate: token ids
	APIChatBatch              // /v1/chat/completions/batch
	APIScoring                // /generative_scoring, /v1/decisions, /v1/systemone: a JSON prompt
	APICount                  // number of shapes
)

// Member is a top-level field of a body: its name is Watch[Field], and it stands
// in Body[From:To], of which its value is Body[Value:To].
type Member struct{ Field, From, Value, To int }

// Request is one inference request on its way through the router: what the
// caller sets, what Parse finds, and the scratch that Route needs. It is pooled
// by its caller; Reset makes it empty and keeps the memory.
type Request struct {
	// Set by the caller before Parse.
	API     API
	Body    []byte   // valid until the request is Reset
	Headers Headers  // may be nil
	Watch   []string // top-level fields of the body whose places Parse notes in Found
	Memo    *Memo    // Router.Memo, or nil

	// Set by Parse. Byte slices are aliases of Body or of scratch memory.
	Model      []byte // as asked for, unescaped; empty when the body names none
	Salt       []byte // cache_salt, unescaped
	Stream     bool   // the body asks for an event stream
	WantsUsage bool   // stream_options.include_usage
	MaxTokens  int64  // the client's cap on generated tokens, 0 when there is none
	Weight     int    // requests that this body stands for (batch), at least 1

	Found []Member // the watched fields, each occurrence, in their order

	// The prompts as one stream of little-endian uint32 tokens: real token ids,
	// or four bytes of text each (see Estimate). Ends[i] is the end of prompt i in
	// Tokens; a prompt starts where the one before ends. Every length is a
	// multiple of 4. With a Memo the head of Tokens may be undefined: a plugin that
	// reads them belongs into Router.Memo.
	Tokens []byte
	Ends   []int
	Exact  bool // Tokens are the engine's own token ids, not an estimate
	Source TokenSource

	// AnyModel says that a request without a model may go anywhere: set by the
	// caller for what is not about a model.
	AnyModel bool

	// Exclude lists endpoints that must not be picked again (failed attempts).
	Exclude []*Endpoint

	items   []promptItem // of exact Tokens, in the order of their places
	marked  []byte       // Tokens with the items in place of their placeholders, empty without items
	scratch []byte       // unescaped strings that outlive the scan: model, salt

	head tokenHead // of Tokens, when they were made here

	given       []uint64 // block hashes in place of tokens, see SetChain
	givenTokens int64

	prompt prompt // what Parse found of the prompts, for the Tokenizer
	work   routeWork
}

// Reset empties the request for its next use.
func (r *Request) Reset() {
	r.API = APINone
	r.Body, r.Headers, r.Memo, r.Watch = nil, nil, nil, nil
	r.Found = r.Found[:0]
	r.Model, r.Salt = nil, nil
	r.Stream, r.WantsUsage, r.Exact, r.AnyModel = false, false, false, false
	r.MaxTokens, r.Weight, r.Source = 0, 1, TokensNone
	clear(r.items)
	r.items, r.marked = kept(r.items, maxKeptItems), kept(r.marked, maxKeptBytes)
	r.Tokens, r.Ends = kept(r.Tokens, maxKeptBytes), kept(r.Ends, maxKeptItems)
	r.prompt.reset()
	clear(r.Exclude)
	r.Exclude = r.Exclude[:0]
	r.scratch = kept(r.scratch, maxKeptBytes)
	r.given, r.givenTokens, r.head = nil, 0, tokenHead{}
	r.work.reset()
}

// own copies s into the request's scratch memory.
func (r *Request) own(s string) []byte {
	start := len(r.scratch)
	r.scratch = append(r.scratch, s...)
	return r.scratch[start:len(r.scratch):len(r.scratch)]
}

// SetChain gives the request its chained block hashes, blocks of 64 tokens, in
// place of a body: for replaying traces that hold hashes and no text. The slice
// must stay unchanged while the request lives.
func (r *Request) SetChain(tokens int64, hashes []uint64) {
	r.given, r.givenTokens = hashes, tokens
	r.work.tokenized = true
}

// PromptTokens returns the number of tokens over all prompts: the engine's own
// when they are known, else what so many bytes have been for this model.
func (r *Request) PromptTokens() int64 { return r.realTokens(r.hashedTokens()) }

// hashedTokens returns the number of Tokens over all prompts.
func (r *Request) hashedTokens() int64 {
	if r.given != nil {
		return r.givenTokens
	}
	return int64(len(r.Tokens) / bytesPerToken)
}

// realTokens turns a number of Tokens into one of the engine's tokens.
func (r *Request) realTokens(n int64) int64 {
	if f := r.work.perToken; f > 0 {
		return int64(math.Round(float64(n) * f))
	}
	return n
}
