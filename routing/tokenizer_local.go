package routing

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
)

// localParams are the parameters `local` of the token-producer.
type localParams struct {
	Tokenizer    string   `json:"tokenizer"`    // tokenizer.json
	Config       string   `json:"config"`       // tokenizer_config.json; beside the tokenizer if absent
	ChatTemplate string   `json:"chatTemplate"` // chat_template.jinja; beside the tokenizer, or in the config, if absent
	Models       []string `json:"models"`       // whose tokens these are; absent: every model's
	Format       string   `json:"contentFormat"`
	Kwargs       string   `json:"chatTemplateKwargs"` // a JSON object, as vLLM's --default-chat-template-kwargs
	DropTools    bool     `json:"excludeToolsWhenToolChoiceNone"`
}

// localTokenizer makes an engine's own tokens in this process, from the files that the
// engine reads. What it cannot know the render backend is asked for, if there is one,
// and else the estimate must do.
type localTokenizer struct {
	fleet     *Fleet
	estimate  *Estimator
	render    *renderTokenizer // may be nil
	models    []string
	bpe       *bpeTokenizer
	templates *chatTemplates // nil: chats are not rendered here
	whyNot    error          // why templates is nil
	rules     chatRules
	limits    templateLimits
	cache     *tokenCache
	heads     *conversations
	pool      localPool
}

// maxLocalBody bounds the bodies that are tokenized here: a few million tokens.
const maxLocalBody = 16 << 20

var (
	errLocalSize  = unsupported("a body of more than %d bytes", maxLocalBody)
	errLocalAPI   = unsupported("this API")
	errLocalModel = unsupported("another model")
	errLocalAsset = unsupported("images, videos and audio")
)

// Tokenize implements Tokenizer.
func (t *localTokenizer) Tokenize(r *Request) {
	t.estimate.Tokenize(r)
	if r.Source != TokensEstimated {
		return
	}
	err := t.tokens(r)
	switch {
	case err == nil:
		r.Source, r.Exact = TokensLocal, true
		return
	case errors.Is(err, errUnsupported):
		r.Source = TokensUnsupported
	default:
		r.Source = TokensRefused
		t.complain(err)
	}
	if t.render != nil {
		r.Source = TokensEstimated
		t.render.Tokenize(r)
	}
}

// complain logs why the template or the tokenizer would not have a request, at most once
// a minute.
func (t *localTokenizer) complain(err error) {
	now := t.fleet.now().Unix()
	if last := t.cache.complained.Load(); now-last < 60 && last != 0 || !t.cache.complained.CompareAndSwap(last, now) {
		return
	}
	t.fleet.log.Warn("a prompt has no local tokens; the estimate, or the engine, stands in", zap.Error(err))
}

// tokens fills r.Tokens and r.Ends, or leaves them as they are and says why.
func (t *localTokenizer) tokens(r *Request) error {
	switch {
	case r.API != APIChat && r.API != APICompletions:
		return errLocalAPI
	case len(r.Body) > maxLocalBody:
		return errLocalSize
	case len(t.models) > 0 && !slices.ContainsFunc(t.models, func(m string) bool { return string(r.Model) == m }):
		return errLocalModel
	case r.prompt.hasAssets():
		return errLocalAsset
	case r.API == APIChat && t.templates == nil:
		return t.whyNot
	}
	w := t.pool.take(t)
	defer t.pool.give(w)
	w.bpe.out, w.ends = w.bpe.out[:0], w.ends[:0]
	if err := t.encodeBody(w, r.API, r.Body); err != nil {
		return err
	}
	if len(w.bpe.out) == 0 {
		return unsupported("a prompt without tokens")
	}
	r.Tokens, w.bpe.out = w.bpe.out, r.Tokens[:0]
	r.Ends = append(r.Ends[:0], w.ends...)
	if r.API == APIChat {
		r.head = tokenHead{w.head.known, int(w.head.cut.tokens), w.head.learned}
	}
	return nil
}

// texts returns the rendered prompts of a request that has tokens from here.
func (t *localTokenizer) texts(r *Request) []string {
	w := t.pool.take(t)
	defer t.pool.give(w)
	w.bpe.out, w.ends, w.keep, w.texts = w.bpe.out[:0], w.ends[:0], true, nil
	err := t.encodeBody(w, r.API, r.Body)
	texts := w.texts
	w.keep, w.texts = false, nil
	if err != nil {
		return nil
	}
	return texts
}

// encodeBody puts the tokens of a body's prompts into w.
func (t *localTokenizer) encodeBody(w *localWorker, api API, data []byte) error {
	p := valueParser{s: viewOf(data)} // no value outlives the request
	if api == APIChat {
		return t.encodeChat(w, &p, data)
	}
	body, err := p.whole()
	if err != nil {
		return unsupported("%v", err)
	}
	if !body.isDict() {
		return unsupported("the body is no object")
	}
	d := body.dict()
	for _, name := range [...]string{"truncate_prompt_tokens", "prompt_embeds"} {
		if d.field(name).kind != kindNone {
			return unsupported("%s", name)
		}
	}
	special, err := d.flag("add_special_tokens", true)
	if err != nil {
		return err
	}
	prompts := []value{d.field("prompt")}
	if prompts[0].isList() {
		prompts = prompts[0].list()
	}
	for _, p := range prompts {
		if p.kind != kindString {
			return unsupported("a prompt that is no text")
		}
		w.text = append(w.text[:0], p.str...)
		if err := t.encode(w, w.text, special); err != nil {
			return err
		}
	}
	return nil
}

// encodeChat puts the tokens of a chat into w.
func (t *localTokenizer) encodeChat(w *localWorker, p *valueParser, data []byte) error {
	h := &w.head
	h.begin(t.heads, data)
	p.messages = h.read
	body, err := p.whole()
	if err != nil {
		return unsupported("%v", err)
	}
	known, developer := h.messages()
	in, special, err := t.rules.chatOf(body, known, developer)
	if err != nil {
		return err
	}
	text, err := t.templates.render(&w.run, in)
	if err != nil {
		return err
	}
	from := h.recall(w.bpe, text, special, t.bpe.guard)
	text = w.wellFormed(text, h.shared)
	if w.keep {
		w.texts = append(w.texts, string(text))
	}
	if err := t.bpe.encodeFrom(w.bpe, text, from, special); err != nil {
		return err
	}
	w.ends = append(w.ends, len(w.bpe.out))
	h.learn(w.bpe, in, text, special, t.bpe.guard)
	return nil
}

// encode appends the tokens of one prompt.
func (t *localTokenizer) encode(w *localWorker, text []byte, special bool) error {
	text = w.wellFormed(text, 0)
	if w.keep {
		w.texts = append(w.texts, string(text))
	}
	if err := t.bpe.encode(w.bpe, text, special); err != nil {
		return err
	}
	w.ends = append(w.ends, len(w.bpe.out))
	return nil
}

// localWorker is the memory of one tokenization.
type localWorker struct {
	bpe   *bpeWorker
	run   execution
	head  headReader
	text  []byte
	valid []byte
	ends  []int
	keep  bool // the texts of the prompts, for an explanation
	texts []string
}

// localPool keeps the memory of as many tokenizations as went on at once, up to a bound.
type localPool struct {
	mu   sync.Mutex
	free []*localWorker
}

const maxFreeWorkers = 32

func (p *localPool) take(t *localTokenizer) *localWorker {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		w := p.free[n-1]
		p.free = p.free[:n-1]
		return w
	}
	w := &localWorker{bpe: newBPEWorker(t.cache.seed)}
	w.bpe.cache = t.cache
	w.run.now, w.run.limits = t.fleet.now, t.limits
	return w
}

// give takes a worker back. What it holds of an unusually large prompt is let go.
func (p *localPool) give(w *localWorker) {
	const large = 2 * maxKeptBytes
	if cap(w.bpe.out)+cap(w.text)+cap(w.valid)+cap(w.run.out)+8*cap(w.bpe.heap) > 4*large {
		seed, cache := w.bpe.seed, w.bpe.cache
		words := w.bpe.words
		*w.bpe = bpeWorker{seed: seed, cache: cache, words: words}
		w.run = execution{now: w.run.now, limits: w.run.limits}
		w.text, w.valid = nil, nil
	}
	w.run.free, w.run.stack = nil, nil // they hold values of the request
	w.head.forget()
	w.bpe.matcher.s = nil
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) < maxFreeWorkers {
		p.free = append(p.free, w)
	}
}

// makeLocal makes the local backend.
func (b *builder) makeLocal(e *Estimator, p localParams, render *renderTokenizer) (any, error) {
	at := func(name string) func(remedy, format string, args ...any) error {
		return func(remedy, format string, args ...any) error {
			return b.spec.Parameters.At("local."+name).Problem(remedy, "%s: "+format, append([]any{b.spec.Name}, args...)...)
		}
	}
	if p.Tokenizer == "" {
		return nil, at("tokenizer")("name the model's tokenizer.json", "local has no tokenizer")
	}
	data, err := readModelFile(p.Tokenizer)
	if err != nil {
		return nil, at("tokenizer")("give a tokenizer.json that can be read", "%v", err)
	}
	beside := func(given, name string) (string, []byte, error) {
		path := given
		if path == "" {
			path = filepath.Join(filepath.Dir(p.Tokenizer), name)
		}
		data, err := readModelFile(path)
		if given == "" && errors.Is(err, os.ErrNotExist) {
			return path, nil, nil
		}
		return path, data, err
	}
	configPath, configData, err := beside(p.Config, "tokenizer_config.json")
	if err != nil {
		return nil, at("config")("give a tokenizer_config.json that can be read", "%v", err)
	}
	templatePath, templateData, err := beside(p.ChatTemplate, "chat_template.jinja")
	if err != nil {
		return nil, at("chatTemplate")("give a template that can be read", "%v", err)
	}
	t := &localTokenizer{fleet: b.fleet, estimate: e, render: render, models: p.Models, limits: defaultTemplateLimits, heads: &conversations{seed: b.seed ^ indexPlacementKey}, whyNot: unsupported("a chat: there is no template")}
	var config *tokenizerConfig
	if configData != nil {
		if config, err = parseTokenizerConfig(configData); err != nil {
			return nil, at("config")("use the file as it was published", "%s: %v", configPath, err)
		}
		var model struct {
			Type string `json:"model_type"`
		}
		if data, err := readModelFile(filepath.Join(filepath.Dir(configPath), "config.json")); err == nil && json.Unmarshal(data, &model) == nil {
			config.modelType = model.Type
			configData = append(configData, model.Type...) // part of what the tokenizer is made of
		}
	}
	if t.bpe, t.cache, err = b.fleet.localFiles(b.seed, data, configData, config); err != nil {
		return nil, at("tokenizer")("remove local, and have the engine asked (vllm)", "%s: %v", p.Tokenizer, err)
	}
	c := &chatTemplates{}
	switch {
	case templateData != nil:
		c.plain, err = compileTemplate(string(templateData))
	case config != nil && !isNull(config.ChatTemplate):
		templatePath = configPath
		c.plain, c.tools, err = parseTemplates(config.ChatTemplate)
	}
	if err != nil {
		return nil, at("chatTemplate")("remove local, and have the engine asked (vllm)", "%s: %v", templatePath, err)
	}
	if c.plain == nil {
		b.warn("local has no chat template: chats are not tokenized here")
		return t, nil
	}
	if config != nil {
		for name, text := range config.tokens {
			c.special = append(c.special, namedValue{name, stringValue(text)})
		}
		slices.SortFunc(c.special, func(a, b namedValue) int { return strings.Compare(a.name, b.name) })
	}
	if _, harmony := t.bpe.special["<|constrain|>"]; harmony {
		t.whyNot = unsupported("chats of gpt-oss: vLLM renders them without the template")
		b.warn("chats of gpt-oss are not tokenized here: vLLM renders them without the template. Completions are")
		return t, nil
	}
	t.templates = c
	t.rules.dropForNone = p.DropTools
	t.rules.developer = strings.Contains(c.plain.source, `"developer"`) || strings.Contains(c.plain.source, `'developer'`)
	switch p.Format {
	case "", "auto":
		t.rules.format = c.plain.detectFormat()
	case "string":
	case "openai":
		t.rules.format = contentParts
	default:
		return nil, at("contentFormat")("use auto, string or openai", "contentFormat %q", p.Format)
	}
	if p.Kwargs == "" {
		return t, nil
	}
	kwargs, err := parseValue(p.Kwargs)
	if err != nil || !kwargs.isDict() {
		return nil, at("chatTemplateKwargs")("write a JSON object in quotes", "chatTemplateKwargs %q", p.Kwargs)
	}
	for i, k := range kwargs.dict().keys {
		if slices.Contains(reservedArgs, k.str) || slices.Contains([]string{"tools", "documents", "add_generation_prompt", "continue_final_message"}, k.str) {
			return nil, at("chatTemplateKwargs")("remove it: the request says it", "chatTemplateKwargs.%s", k.str)
		}
		t.rules.defaults = append(t.rules.defaults, namedValue{k.str, kwargs.dict().vals[i]})
	}
	return t, nil
}

// readModelFile reads a file of a model, of at most maxTokenizerFile bytes.
func readModelFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	data, err := io.ReadAll(io.LimitReader(f, maxTokenizerFile+1))
	if err == nil && len(data) > maxTokenizerFile {
		err = fmt.Errorf("%s has more than %d bytes", path, maxTokenizerFile)
	}
	return data, err
}

// localFiles is a tokenizer that was read, kept over reloads together with the tokens
// that it has made.
type localFiles struct {
	hash  [2]uint64
	bpe   *bpeTokenizer
	cache *tokenCache
}

// localFiles returns the tokenizer of these files, read once while they stay the same.
func (f *Fleet) localFiles(seed uint64, data, configData []byte, config *tokenizerConfig) (*bpeTokenizer, *tokenCache, error) {
	key := [2]uint64{hashText(data, 1), hashText(configData, 2)}
	f.mu.Lock()
	last := f.local
	f.mu.Unlock()
	if last == nil || last.hash != key {
		bpe, err := parseTokenizer(data, config)
		if err != nil {
			return nil, nil, err
		}
		last = &localFiles{key, bpe, newTokenCache(seed ^ indexPlacementKey)}
		f.mu.Lock()
		f.local = last
		f.mu.Unlock()
	}
	return last.bpe, last.cache, nil
}

// tokenCache remembers the tokens of what lies between added tokens: the messages
// of a conversation come again with every turn, and system prompts and tools with
// every conversation. It is bounded in entries and bytes.
type tokenCache struct {
	seed       uint64
	complained atomic.Int64

	mu    sync.Mutex
	sets  [tokenSets][tokenWays]tokenEntry
	tick  uint64
	bytes int64
	hand  int
}

type tokenEntry struct {
	key    renderKey
	used   uint64
	tokens []byte
}

const (
	tokenSets      = 2048
	tokenWays      = 8
	tokenBytes     = 64 << 20
	minCachedPiece = 48 // bytes: of shorter ones the words are remembered
)

func newTokenCache(seed uint64) *tokenCache { return &tokenCache{seed: seed} }

// key names a piece: whether it stands first matters to some tokenizers.
func (c *tokenCache) key(s []byte, first bool) renderKey {
	seed := c.seed
	if first {
		seed = ^seed
	}
	return renderKey{hashText(s, seed), hashText(s, seed*pairSalt)}
}

// get appends the tokens of a piece to dst, if they are known.
func (c *tokenCache) get(dst []byte, key renderKey) ([]byte, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	set := &c.sets[key.place%tokenSets]
	for i := range set {
		if e := &set[i]; e.tokens != nil && e.key == key {
			c.tick++
			e.used = c.tick
			return append(dst, e.tokens...), true
		}
	}
	return dst, false
}

// put remembers tokens, in the place of what was used longest ago.
func (c *tokenCache) put(key renderKey, tokens []byte) {
	if len(tokens) > tokenBytes/16 || len(tokens) == 0 {
		return
	}
	kept := bytes.Clone(tokens)
	c.mu.Lock()
	defer c.mu.Unlock()
	set := &c.sets[key.place%tokenSets]
	oldest := &set[0]
	for i := range set {
		if set[i].key == key && set[i].tokens != nil {
			return
		}
		if set[i].used < oldest.used {
			oldest = &set[i]
		}
	}
	c.bytes -= int64(len(oldest.tokens))
	c.tick++
	*oldest = tokenEntry{key, c.tick, kept}
	for c.bytes += int64(len(kept)); c.bytes > tokenBytes; c.hand++ {
		for i := range c.sets[c.hand%tokenSets] {
			if e := &c.sets[c.hand%tokenSets][i]; e != oldest {
				c.bytes -= int64(len(e.tokens))
				*e = tokenEntry{}
			}
		}
	}
}
