package routing

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"kvgate/configs"
	"kvgate/kvindex"
)

// TokenSource says where a request's tokens came from.
type TokenSource uint8

// The sources of tokens. Only those that are exact match what engines tell.
const (
	TokensNone        TokenSource = iota // the request has no prompt
	TokensGiven                          // exact: the body has token ids
	TokensEstimated                      // four bytes are a token: no render backend is configured
	TokensRendered                       // exact: the render backend has told
	TokensRemembered                     // exact: it has told for an equal body before
	TokensUnsupported                    // estimated: neither the render backend nor the local one renders this
	TokensFailed                         // estimated: the render backend did not answer well, or not in time
	TokensSkipped                        // estimated: it has failed just now, or is asked too much at once
	TokensCanceled                       // estimated: the client has left meanwhile
	TokensLocal                          // exact: made here, from the model's files
	TokensRefused                        // estimated: the chat template refused the prompt, or went beyond its limits
	tokenSourceCount
)

var tokenSourceNames = [tokenSourceCount]string{
	"none", "given", "estimated", "rendered", "remembered", "unsupported", "failed", "skipped", "canceled", "local", "refused",
}

// String returns the name as metrics and explanations print it.
func (s TokenSource) String() string { return tokenSourceNames[s] }

// TokenSources returns how many requests got their tokens from each source, by TokenSource.
func (f *Fleet) TokenSources() []uint64 {
	out := make([]uint64, tokenSourceCount)
	for i := range out {
		out[i] = f.sources[i].Load()
	}
	return out
}

// RenderQuery is one question to a render server.
type RenderQuery struct {
	URL           string // scheme://host:port
	Path          string
	Body          []byte // JSON; unchanged until Renderer returns
	Authorization []byte // header field of the client, nil for none
	Timeout       time.Duration
	Done          <-chan struct{} // closed when nobody waits for the answer any more

	Credentials *configs.Credentials // of the replica that is asked, nil when it has none of its own
}

// Renderer posts a query and returns the answer's status and body, of an answer
// other than 200 as much as shows what it is. An error means that there is no whole
// answer.
type Renderer func(q RenderQuery) (status int, body []byte, err error)

// renderTokenizer has an engine turn a body into the very tokens that it will
// compute. Where that fails, the estimate must do.
type renderTokenizer struct {
	fleet    *Fleet
	estimate *Estimator
	render   Renderer // nil: there is no network, as when a configuration is checked
	params   renderParams
	model    []byte // a JSON string to put in place of the body's model; nil keeps that
	cache    *renderCache
}

type renderParams struct {
	URL       string        `json:"url"`
	Timeout   time.Duration `json:"timeout"`
	MMTimeout time.Duration `json:"mmTimeout"`
}

// The paths that render, by API, and the one that only tokenizes text.
var renderPaths = [APICount]string{
	APIChat: "/v1/chat/completions/render", APICompletions: "/v1/completions/render",
	APIMessages: "/v1/messages/render", APIResponses: "/v1/responses/render",
}

const tokenizePath = "/tokenize"

// How long a server is left alone: after two failures in a row, and on a path that it does not have.
const (
	renderFailures   = 2
	renderPause      = 5 * time.Second
	renderPauseNoAPI = time.Minute
)

// Tokenize implements Tokenizer.
func (t *renderTokenizer) Tokenize(r *Request) {
	t.estimate.Tokenize(r)
	if r.Source != TokensEstimated {
		return
	}
	path := renderPaths[r.API]
	if path == "" {
		r.Source = TokensUnsupported
		return
	}
	key := t.cache.key(path, t.model, r.Body)
	v, call, source := t.cache.begin(key, t.fleet.now())
	switch {
	case v != nil:
		r.Source = TokensRemembered
		v.fill(r)
		return
	case call == nil:
		r.Source = source
		return
	}
	done := make(chan struct{})
	client, canCancel := r.Headers.(Canceler)
	if canCancel && !client.Attach(sync.OnceFunc(func() { close(done) })) {
		close(done)
	}
	if source == TokensRendered {
		// This request asks; others with an equal body wait for what it gets.
		v, source = t.ask(r, path, key.place, done)
		t.cache.end(call, v, t.fleet.now())
	} else {
		v, source = call.wait(done)
	}
	if canCancel {
		client.Detach()
	}
	if r.Source = source; v != nil {
		v.fill(r)
	}
}

// ask gets the tokens of a body from a server.
func (t *renderTokenizer) ask(r *Request, path string, place uint64, done <-chan struct{}) (*rendered, TokenSource) {
	if t.render == nil {
		return nil, TokensUnsupported
	}
	q := RenderQuery{Body: r.Body, Timeout: t.params.Timeout, Done: done}
	assets := r.prompt.hasAssets()
	if assets {
		q.Timeout = t.params.MMTimeout
	}
	if t.model != nil {
		q.Body = withModel(r.Body, t.model)
	}
	if q.URL = t.params.URL; q.URL == "" {
		if r.Headers != nil {
			q.Authorization = r.Headers.Header("authorization")
		}
	}
	paths := []string{path}
	if (r.API == APIChat || r.API == APICompletions) && !assets {
		paths = append(paths, tokenizePath) // it knows nothing of images
	}
	source := TokensUnsupported
	for _, q.Path = range paths {
		url, e, ok := t.server(r, q.Path, place)
		if !ok {
			source = TokensSkipped
			continue
		}
		if url == "" {
			continue
		}
		if q.URL, q.Credentials = url, nil; e != nil {
			q.Credentials = e.Credentials()
		}
		status, body, err := t.render(q)
		select {
		case <-done:
			return nil, TokensCanceled
		default:
		}
		var v *rendered
		if err == nil && status == 200 {
			v, err = parseRendered(body)
		}
		absent := err == nil && noSuchPath(status, body)
		t.cache.health(url, q.Path, absent, err != nil || status >= 500 || status == 401 || status == 429, t.fleet.now())
		switch {
		case v != nil:
			return v, TokensRendered
		case absent:
			source = TokensUnsupported
			continue
		}
		return nil, TokensFailed
	}
	return nil, source
}

// noSuchPath tells a server that does not render from one that does not have the
// model: the engine says "error" for the latter and "detail" for the former.
func noSuchPath(status int, body []byte) bool {
	return status == 403 || status == 405 || status == 501 || status == 404 && !bytes.Contains(body, []byte(`"error"`))
}

// server returns who is to be asked on a path: the configured server, or else one
// of the replicas that may serve the request, by the question's hash. "" is nobody,
// and ok then says that this is because nobody has the path.
func (t *renderTokenizer) server(r *Request, path string, place uint64) (url string, replica *Endpoint, ok bool) {
	now := t.fleet.now()
	if t.params.URL != "" {
		url, ok = t.cache.usable(t.params.URL, path, now)
		return url, nil, ok
	}
	n := uint64(len(r.work.endpoints))
	ok = true
	for i := range n {
		e := r.work.endpoints[(place%n+i)%n]
		if e.stateAt(now) != Ready {
			continue
		}
		u, usable := t.cache.usable(e.URL(), path, now)
		if u != "" {
			return u, e, true
		}
		ok = ok && usable
	}
	return "", nil, ok
}

// rendered is what a server has told of one body. It is immutable.
type rendered struct {
	tokens []byte // little-endian uint32
	ends   []int
	items  []promptItem
}

// promptItem is an image or the like in the place that its tokens take.
type promptItem struct {
	prompt, offset, length int // number of the prompt; tokens
	hash                   []byte
}

func (v *rendered) bytes() int64 {
	n := int64(len(v.tokens) + 8*len(v.ends) + 256)
	for _, x := range v.items {
		n += int64(len(x.hash)) + 48
	}
	return n
}

// fill gives the tokens to a request.
func (v *rendered) fill(r *Request) {
	r.Tokens = append(r.Tokens[:0], v.tokens...)
	r.Ends = append(r.Ends[:0], v.ends...)
	r.items = append(r.items[:0], v.items...)
	r.Exact = true
	if len(v.items) == 0 {
		return
	}
	r.marked = append(r.marked[:0], v.tokens...)
	for _, x := range v.items {
		start := 0
		if x.prompt > 0 {
			start = v.ends[x.prompt-1]
		}
		mark := uint32(xxhash.Sum64(x.hash))
		for i := range x.length {
			binary.LittleEndian.PutUint32(r.marked[start+(x.offset+i)*bytesPerToken:], mark)
		}
	}
}

// content returns the tokens with the items' hashes in place of their
// placeholders, which are the same for every image.
func (r *Request) content() []byte {
	if len(r.marked) > 0 {
		return r.marked
	}
	return r.Tokens
}

// extrasOf appends what tells the blocks of prompt i from others with the same
// tokens: the items that reach into a block, and on the first block the salt.
func (r *Request) extrasOf(dst []kvindex.Extra, prompt, blockTokens int) []kvindex.Extra {
	for _, x := range r.items {
		if x.prompt != prompt || x.length == 0 {
			continue
		}
		for block := x.offset / blockTokens; block <= (x.offset+x.length-1)/blockTokens; block++ {
			dst = append(dst, kvindex.Extra{Block: block, Text: x.hash})
		}
	}
	slices.SortStableFunc(dst, func(a, b kvindex.Extra) int { return cmp.Compare(a.Block, b.Block) })
	if len(r.Salt) > 0 {
		n := 0
		for n < len(dst) && dst[n].Block == 0 {
			n++
		}
		dst = slices.Insert(dst, n, kvindex.Extra{Text: r.Salt})
	}
	return dst
}

var errNoTokens = errors.New("the answer of the render server has no tokens")

// parseRendered reads the answer to a query: an object with token_ids (render) or
// tokens (tokenize), or for several prompts a list of them.
func parseRendered(body []byte) (*rendered, error) {
	p := &prompt{}
	p.reset()
	p.scanner.reset(body)
	v := &rendered{}
	i := p.space(0)
	if p.peek(i) == '[' {
		var more bool
		i, more = p.open(i, ']')
		for more {
			if i = v.object(p, i); i >= 0 {
				i, more = p.next(i, ']')
			} else {
				more = false
			}
		}
	} else {
		i = v.object(p, i)
	}
	if i < 0 || p.space(i) != len(body) || len(v.ends) == 0 {
		if p.err != nil {
			return nil, fmt.Errorf("%w: %w", errNoTokens, p.place())
		}
		return nil, errNoTokens
	}
	v.tokens = slices.Clip(p.out)
	slices.SortStableFunc(v.items, func(a, b promptItem) int {
		return cmp.Or(cmp.Compare(a.prompt, b.prompt), cmp.Compare(a.offset, b.offset))
	})
	for _, x := range v.items {
		start := 0
		if x.prompt > 0 {
			start = v.ends[x.prompt-1]
		}
		if room := (v.ends[x.prompt] - start) / bytesPerToken; x.offset < 0 || x.length < 0 || x.offset > room || x.length > room-x.offset {
			return nil, fmt.Errorf("%w: an item is at token %d to %d of %d", errNoTokens, x.offset, x.offset+x.length, room)
		}
	}
	return v, nil
}

// object reads the tokens of one prompt. It returns -1 when there are none.
func (v *rendered) object(p *prompt, i int) int {
	if p.peek(i) != '{' {
		return -1
	}
	from, items := len(p.out), len(v.items)
	i, more := p.open(i, '}')
	for more {
		var key []byte
		if key, i = p.key(i); i < 0 {
			return -1
		}
		switch string(key) {
		case "token_ids", "tokens":
			if len(p.out) != from || p.peek(i) != '[' {
				i = p.skip(i)
			} else if i = p.ids(i, false); i < 0 {
				return -1
			}
		case "features":
			end := p.skip(i)
			if end < 0 || v.features(p.b[i:end]) != nil {
				return -1
			}
			i = end
		default:
			i = p.skip(i)
		}
		i, more = p.next(i, '}')
	}
	if i < 0 || len(p.out) == from {
		return -1
	}
	for k := range v.items[items:] {
		v.items[items+k].prompt = len(v.ends)
	}
	v.ends = append(v.ends, len(p.out))
	return i
}

// features reads where the multimodal items of a prompt are.
func (v *rendered) features(data []byte) error {
	var f struct {
		Hashes map[string][]string `json:"mm_hashes"`
		Places map[string][]struct {
			Offset int `json:"offset"`
			Length int `json:"length"`
		} `json:"mm_placeholders"`
	}
	if err := json.Unmarshal(data, &f); err != nil {
		return err
	}
	for kind, places := range f.Places {
		if len(places) != len(f.Hashes[kind]) {
			return errNoTokens
		}
		for k, at := range places {
			v.items = append(v.items, promptItem{offset: at.Offset, length: at.Length, hash: []byte(f.Hashes[kind][k])})
		}
	}
	return nil
}

// withModel returns the body with another model, given as a JSON string.
func withModel(body, model []byte) []byte {
	var s scanner
	s.reset(body)
	i := s.space(0)
	first, more := s.open(i, '}')
	for i = first; more; {
		var key []byte
		key, i = s.key(i)
		end := s.skip(i)
		if string(key) == "model" && end >= 0 {
			return slices.Concat(body[:i], model, body[end:])
		}
		i, more = s.next(end, '}')
	}
	if first < 0 || first > len(body) {
		return body // no object: the server will say so
	}
	comma := ","
	if s.peek(first) != '"' {
		comma = "" // an empty object
		first--
	}
	return slices.Concat(body[:first], []byte(`"model":`), model, []byte(comma), body[first:])
}

// renderCache remembers what bodies were rendered to, lets one request ask for all
// with an equal body, and knows which servers fail.
type renderCache struct {
	seed uint64

	mu      sync.Mutex
	sets    [renderSets][renderWays]renderEntry
	tick    uint64
	bytes   int64
	hand    int
	calls   []*renderCall
	servers []renderServer
}

type renderKey struct{ place, check uint64 }

type renderEntry struct {
	key   renderKey
	used  uint64 // tick of the last use
	until time.Time
	value *rendered
}

// renderCall is a question that is being asked.
type renderCall struct {
	key   renderKey
	done  chan struct{}
	value *rendered // once done is closed
}

type renderServer struct {
	url, path string
	failures  int
	until     time.Time // it is not asked before
	absent    bool      // the path is not there
}

// Bounds of what is remembered and of what is asked at once. An answer is asked
// for again after a while, lest a new model or template under an old name be missed.
const (
	renderKeep    = 10 * time.Minute
	renderSets    = 512
	renderWays    = 8
	renderBytes   = 64 << 20
	renderCalls   = 64
	renderServers = 4096
)

// key names a question. The place is found by one hash and checked by another,
// both with a seed that nobody outside knows.
func (c *renderCache) key(path string, model, body []byte) renderKey {
	var d xxhash.Digest
	sum := func(seed uint64) uint64 {
		d.ResetWithSeed(seed)
		_, _ = d.WriteString(path) // never fails
		_, _ = d.Write(model)
		_, _ = d.Write(body)
		return d.Sum64()
	}
	return renderKey{sum(c.seed), sum(^c.seed)}
}

// begin returns what is remembered; or a call and TokensRendered when the caller
// is to ask, TokensRemembered when it is to wait for it; or no call and why.
func (c *renderCache) begin(key renderKey, now time.Time) (*rendered, *renderCall, TokenSource) {
	c.mu.Lock()
	defer c.mu.Unlock()
	set := &c.sets[key.place%renderSets]
	for i := range set {
		if e := &set[i]; e.value != nil && e.key == key && now.Before(e.until) {
			c.tick++
			e.used = c.tick
			return e.value, nil, TokensRemembered
		}
	}
	for _, call := range c.calls {
		if call.key == key {
			return nil, call, TokensRemembered
		}
	}
	if len(c.calls) == renderCalls {
		return nil, nil, TokensSkipped
	}
	call := &renderCall{key: key, done: make(chan struct{})}
	c.calls = append(c.calls, call)
	return nil, call, TokensRendered
}

// end gives the answer to those who wait and remembers it.
func (c *renderCache) end(call *renderCall, v *rendered, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = slices.DeleteFunc(c.calls, func(x *renderCall) bool { return x == call })
	call.value = v
	close(call.done)
	if v == nil || v.bytes() > renderBytes/8 {
		return
	}
	set := &c.sets[call.key.place%renderSets]
	oldest := &set[0]
	for i := range set {
		if set[i].key == call.key {
			oldest = &set[i]
			break
		}
		if set[i].used < oldest.used {
			oldest = &set[i]
		}
	}
	c.drop(oldest)
	c.tick++
	*oldest = renderEntry{call.key, c.tick, now.Add(renderKeep), v}
	for c.bytes += v.bytes(); c.bytes > renderBytes; c.hand++ {
		for i := range c.sets[c.hand%renderSets] {
			if e := &c.sets[c.hand%renderSets][i]; e != oldest {
				c.drop(e)
			}
		}
	}
}

func (c *renderCache) drop(e *renderEntry) {
	if e.value != nil {
		c.bytes -= e.value.bytes()
	}
	*e = renderEntry{}
}

// wait returns what the one that asks has got.
func (c *renderCall) wait(done <-chan struct{}) (*rendered, TokenSource) {
	select {
	case <-c.done:
		if c.value == nil {
			return nil, TokensFailed
		}
		return c.value, TokensRemembered
	case <-done:
		return nil, TokensCanceled
	}
}

// usable returns the URL when the server is to be asked on that path, else "" and
// whether that is because it does not have the path.
func (c *renderCache) usable(url, path string, now time.Time) (string, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.server(url, path); s != nil && now.Before(s.until) {
		return "", s.absent
	}
	return url, true
}

func (c *renderCache) server(url, path string) *renderServer {
	for i := range c.servers {
		if s := &c.servers[i]; s.url == url && s.path == path {
			return s
		}
	}
	return nil
}

// health notes how a question ended.
func (c *renderCache) health(url, path string, absent, failed bool, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.server(url, path)
	switch {
	case s == nil && (failed || absent):
		if len(c.servers) == renderServers {
			c.servers = c.servers[:0]
		}
		c.servers = append(c.servers, renderServer{url: url, path: path})
		s = &c.servers[len(c.servers)-1]
	case s == nil:
		return
	}
	switch {
	case absent:
		s.absent, s.until, s.failures = true, now.Add(renderPauseNoAPI), 0
	case failed:
		s.absent = false
		if s.failures++; s.failures >= renderFailures {
			s.until = now.Add(renderPause)
		}
	default:
		*s = renderServer{url: url, path: path}
	}
}
