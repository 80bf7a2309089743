package routing

import (
	"bytes"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"
	"unsafe"

	"github.com/cespare/xxhash/v2"

	"kvgate/kvindex"
)

// knownChat is what is remembered of a chat, so that the next turn costs what is new
// of it: its messages by their bytes in the body, and the tokens of its rendered text by
// that text. Both are compared, never assumed: a template may print the same messages
// otherwise once more follow. It is immutable for whoever finds it; the arrays' room
// behind their lengths belongs to the first that extends it.
type knownChat struct {
	body      []byte  // of the request, from the [ of the messages to the end of the last
	ends      []int32 // of the messages, in body
	messages  []value // as chatRules made them, in memory of their own
	values    int64   // bytes of that
	developer bool    // a message is a developer's
	special   bool    // tokens go around the text
	text      []byte  // rendered, up to where its last cut is sure
	cuts      []textCut
	tokens    []byte // of the text up to the last cut

	extended atomic.Bool
	keys     atomic.Pointer[blockKeys]

	// Of the memory, under its lock.
	tag  uint64
	used uint64
	size int64 // bytes
}

// textCut is a place in a rendered text, where an added token starts, from which on
// tokens depend on nothing before: those of what stands there end at tokens.
type textCut struct{ at, tokens int32 }

// blockKeys are the keys of the blocks that a conversation's tokens fill.
type blockKeys struct {
	keys   *kvindex.Keys
	model  uint64
	salt   []byte
	hashes []uint64
}

// Sizes of the memory of conversations.
const (
	headCell   = 2 << 10 // bytes of a body
	headSets   = 256
	headWays   = 8
	headBytes  = 64 << 20
	headLeast  = 4 << 10 // bytes of a body that is remembered
	headDetour = 8       // a branch is remembered when its own part is one in so many
)

// conversations is a memory of them, bounded in number and bytes. One is found by the
// hash of its whole cells and of those of any shorter body; what is found is compared.
type conversations struct {
	seed uint64

	mu    sync.Mutex
	sets  [headSets][headWays]*knownChat
	tick  uint64
	bytes int64
}

// tags appends the hashes of a body's beginning, cell by cell.
func (m *conversations) tags(dst []uint64, body []byte) []uint64 {
	h := m.seed
	var d xxhash.Digest
	for ; len(body) >= headCell; body = body[headCell:] {
		d.ResetWithSeed(h)
		_, _ = d.Write(body[:headCell]) // never fails
		h = d.Sum64()
		dst = append(dst, h)
	}
	return dst
}

// find returns the conversation that shares the most cells, nil when none does.
func (m *conversations) find(tags []uint64) *knownChat {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := len(tags) - 1; i >= 0; i-- {
		for _, c := range m.sets[tags[i]%headSets] {
			if c != nil && c.tag == tags[i] {
				m.tick++
				c.used = m.tick
				return c
			}
		}
	}
	return nil
}

// put remembers a conversation, in place of one that it extends. What was used longest
// ago goes when there is no room.
func (m *conversations) put(c, old *knownChat) {
	if c.size > headBytes/8 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if old != nil {
		m.drop(old)
	}
	set := &m.sets[c.tag%headSets]
	at := 0
	for i, x := range set {
		if x != nil && x.tag == c.tag { // of two that differ late the last is kept
			at = i
			break
		}
		if set[at] != nil && (x == nil || x.used < set[at].used) {
			at = i
		}
	}
	if set[at] != nil {
		m.drop(set[at])
	}
	m.tick++
	c.used = m.tick
	set[at] = c
	for m.bytes += c.size; m.bytes > headBytes; {
		oldest := c
		for i := range m.sets {
			for _, x := range m.sets[i] {
				if x != nil && x.used < oldest.used {
					oldest = x
				}
			}
		}
		if oldest == c {
			return
		}
		m.drop(oldest)
	}
}

// drop forgets a conversation unless it is forgotten. The caller holds mu.
func (m *conversations) drop(c *knownChat) {
	set := &m.sets[c.tag%headSets]
	if i := slices.Index(set[:], c); i >= 0 {
		m.bytes -= c.size
		set[i] = nil
	}
}

// headReader reads the messages of a body, of which the first may be known.
type headReader struct {
	memory *conversations
	data   []byte // the body
	tags   []uint64
	ends   []int32 // of the new messages
	at     int     // of the [ in the body

	shared  int        // bytes that the rendered text shares with that of known
	seen    int        // lists of messages, of which the last counts
	known   *knownChat // whose first messages the body has, nil for none
	count   int        // of the messages that are known
	cut     textCut    // from which on there were new tokens
	learned *knownChat // what is remembered of this body from now on
}

// begin prepares for a body.
func (h *headReader) begin(m *conversations, data []byte) {
	*h = headReader{memory: m, data: data, tags: h.tags, ends: h.ends[:0]}
}

// forget lets the request go.
func (h *headReader) forget() { h.begin(nil, nil) }

// read implements the valueParser's messages. The list that it returns has only what
// is new.
func (h *headReader) read(p *valueParser) (value, error) {
	h.known, h.count, h.ends = nil, 0, h.ends[:0] // of equal keys the last counts
	if h.seen++; h.seen > 1 || !p.next('[') {
		return p.value(1)
	}
	h.at = p.i
	h.tags = h.memory.tags(h.tags[:0], h.data[h.at:])
	if c := h.memory.find(h.tags); c != nil {
		n := int32(sharedBytes(c.body, h.data[h.at:]))
		if k, exact := slices.BinarySearch(c.ends, n); exact {
			h.count = k + 1
		} else {
			h.count = k
		}
		if h.count > 0 {
			h.known = c
		}
	}
	list := []value{}
	if h.count == 0 {
		p.i++
	} else {
		p.i = h.at + int(h.known.ends[h.count-1])
	}
	if p.take(']') {
		return listValue(list), nil
	}
	if h.count > 0 && !p.take(',') {
		return none, p.fail("a comma is missing")
	}
	for {
		v, err := p.value(2)
		if err != nil {
			return none, err
		}
		list, h.ends = append(list, v), append(h.ends, int32(p.i-h.at))
		if p.take(']') {
			return listValue(list), nil
		}
		if !p.take(',') {
			return none, p.fail("a comma is missing")
		}
	}
}

// messages returns those that are known, and whether one may be a developer's.
func (h *headReader) messages() (known []value, developer bool) {
	if h.count == 0 {
		return nil, false
	}
	return h.known.messages[:h.count:h.count], h.known.developer
}

// sharedBytes returns how many bytes two texts have in common at their start.
func sharedBytes(a, b []byte) int {
	const stride = 1 << 10
	n, i := min(len(a), len(b)), 0
	for i+stride <= n && bytes.Equal(a[i:i+stride], b[i:i+stride]) {
		i += stride
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}

// recall puts the tokens into w.bpe.out that the text shares with the conversation
// whose messages it begins with, and returns where new ones begin.
func (h *headReader) recall(w *bpeWorker, text []byte, special bool, guard int) int {
	w.cuts = w.cuts[:0]
	c := h.known
	if c == nil || c.special != special || len(c.cuts) == 0 {
		return 0
	}
	h.shared = sharedBytes(c.text, text)
	i, _ := slices.BinarySearchFunc(c.cuts, h.shared-guard+1, func(x textCut, at int) int { return int(x.at) - at })
	if i == 0 {
		return 0
	}
	h.cut = c.cuts[i-1]
	w.out = append(w.out[:0], c.tokens[:h.cut.tokens]...)
	w.cuts = append(w.cuts[:0], c.cuts[:i-1]...)
	return int(h.cut.at)
}

// learn remembers the conversation of a body: its messages, its text, and its tokens in w.out with the cuts in w.cuts.
func (h *headReader) learn(w *bpeWorker, in *chatInput, text []byte, special bool, guard int) {
	if len(h.ends) == 0 || h.seen != 1 {
		return
	}
	n := int(h.ends[len(h.ends)-1])
	old := h.known
	if n < headLeast {
		return
	}
	extends := old != nil && h.count == len(old.ends) && old.special == special
	from := 0
	if old != nil {
		from = int(old.ends[h.count-1])
		if !extends && (n-from)*headDetour < n {
			return
		}
	}
	last := len(w.cuts)
	for last > 0 && int(w.cuts[last-1].at)+guard > len(text) {
		last--
	}
	cut := textCut{}
	if last > 0 {
		cut = w.cuts[last-1]
		text = text[:int(cut.at)+guard]
	} else {
		text = nil
	}
	c := &knownChat{special: special, developer: in.developer, tag: h.tags[n/headCell-1]}
	body := h.data[h.at : h.at+n]
	if extends && !old.extended.CompareAndSwap(false, true) {
		old = nil // another branch has the room
	}
	if !extends || old == nil {
		c.body, c.text, c.tokens = roomy(body), roomy(text), roomy(w.out[:cut.tokens])
		c.cuts = slices.Clone(w.cuts[:last])
		if h.known != nil {
			c.ends = append(c.ends, h.known.ends[:h.count]...)
			c.messages = append(c.messages, h.known.messages[:h.count]...)
			for _, m := range c.messages {
				c.values += valueBytes(m)
			}
		}
		old = nil
	} else {
		c.body = append(old.body, body[len(old.body):]...)
		c.ends, c.messages, c.values = old.ends, old.messages, old.values
		if k := len(old.cuts); k > 0 && h.shared == len(old.text) {
			c.text = append(old.text, text[len(old.text):]...)
			c.tokens = append(old.tokens, w.out[len(old.tokens):cut.tokens]...)
			c.cuts = append(old.cuts, w.cuts[k:last]...)
		} else {
			c.text, c.tokens, c.cuts = roomy(text), roomy(w.out[:cut.tokens]), slices.Clone(w.cuts[:last])
		}
	}
	c.ends = append(c.ends, h.ends...)
	for _, m := range in.read[h.count:] {
		m = cloneValue(m)
		c.messages = append(c.messages, m)
		c.values += valueBytes(m)
	}
	c.size = int64(cap(c.body)+cap(c.text)+cap(c.tokens)*9/8+8*cap(c.cuts)+4*cap(c.ends)+64*cap(c.messages)) + c.values
	h.memory.put(c, old)
	h.learned = c
}

// roomy returns a copy with room for the next turns.
func roomy(b []byte) []byte { return append(make([]byte, 0, len(b)+len(b)/8), b...) }

// appendKeys is keys.Append for a prompt that may begin as a conversation does, which
// then is the only one and has no items.
func (r *Request) appendKeys(keys *kvindex.Keys, dst []uint64, model uint64, tokens []byte, extras []kvindex.Extra) []uint64 {
	h := &r.head
	if h.known == nil && h.learned == nil {
		return keys.Append(dst, model, tokens, extras)
	}
	size := keys.BlockTokens() * bytesPerToken
	parent, from := model, len(dst)
	if h.known != nil {
		if b := h.known.keys.Load(); b != nil && b.keys == keys && b.model == model && bytes.Equal(b.salt, r.Salt) {
			if n := min(h.bytes/size, len(b.hashes)); n > 0 {
				dst = append(dst, b.hashes[:n]...)
				parent, extras = dst[len(dst)-1], nil
			}
		}
	}
	dst = keys.Append(dst, parent, tokens[(len(dst)-from)*size:], extras)
	if c := h.learned; c != nil {
		c.keys.Store(&blockKeys{keys, model, bytes.Clone(r.Salt), slices.Clone(dst[from : from+len(c.tokens)/size])})
	}
	return dst
}

// tokenHead says of which conversations a request's tokens are.
type tokenHead struct {
	known   *knownChat // they begin with bytes of its tokens
	bytes   int
	learned *knownChat // they begin with all of its tokens
}

// cloneValue copies a value of a request into memory of its own.
func cloneValue(v value) value {
	switch v.kind {
	case kindString, kindInt:
		v.str = strings.Clone(v.str)
	case kindList:
		list := make([]value, len(v.list()))
		for i, x := range v.list() {
			list[i] = cloneValue(x)
		}
		return listValue(list)
	case kindDict:
		d := &dictValue{}
		for i, k := range v.dict().keys {
			d.set(cloneValue(k), cloneValue(v.dict().vals[i]))
		}
		return dictOf(d)
	}
	return v
}

// valueBytes returns about how much memory a value takes besides its own words.
func valueBytes(v value) int64 {
	n := int64(len(v.str))
	switch v.kind {
	case kindList:
		n += 24
		for _, x := range v.list() {
			n += 56 + valueBytes(x)
		}
	case kindDict:
		d := v.dict()
		n += 500 + 64*int64(len(d.index))
		for i, k := range d.keys {
			n += 112 + valueBytes(k) + valueBytes(d.vals[i])
		}
	}
	return n
}

// viewOf returns bytes as a string, valid as long as they do not change.
func viewOf(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// wellFormed returns a rendered text as UTF-8. Its first shared bytes are.
func (w *localWorker) wellFormed(text []byte, shared int) []byte {
	shared = max(shared-utf8.UTFMax, 0) // a character may have been cut
	for shared > 0 && !utf8.RuneStart(text[shared]) {
		shared--
	}
	if utf8.Valid(text[shared:]) {
		return text
	}
	w.valid = wellFormed(w.valid, text)
	return w.valid
}
