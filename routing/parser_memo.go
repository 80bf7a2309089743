package routing

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/cpu"

	"kvgate/kvindex"
)

// Memo remembers the heads of conversations. The next request of one begins with
// the same bytes, and what Parse and Estimator made of them before need not be
// made again: to look 450 KB of it up takes a fifth of the time of unescaping and
// hashing it (BenchmarkMemo).
//
// A body is cut into cells of equal size. A cell is known by a tag of all bytes
// up to its end, and its entry says where the last message before that end has
// ended, and what the text up to there hashes to. Bytes are never compared, so the
// tag must not be forged: who could make two heads of one tag would have the
// second pass for the first. It is GMAC with a secret key, whose collisions nobody
// who does not see tags finds but by guessing 96 bits. With the processor's AES it
// is as fast as a hash.
//
// A Memo is safe for concurrent use.
type Memo struct {
	aead       cipher.AEAD
	cell       int          // bytes of a body
	blockBytes atomic.Int32 // of the prefix index, 0: not known yet

	mu         sync.Mutex
	young, old *generation
}

// Sizes of a Memo. A cell's entry takes about 500 bytes, so that a full
// generation stands for 256 MB of prompts.
const (
	memoCell    = 8 << 10
	memoChunk   = 1 << 15 // words
	memoChunks  = 64      // per generation: 16 MiB
	memoEntries = 1 << 15
	memoTable   = 2 * memoEntries
	tagBytes    = 16
	chainBytes  = 12 // of a tag that go into the next
)

// newMemo returns an empty Memo, nil where its tags would be slow or are not
// allowed (fips140=only).
func newMemo() *Memo {
	switch runtime.GOARCH {
	case "amd64":
		if !cpu.X86.HasAES || !cpu.X86.HasPCLMULQDQ {
			return nil
		}
	case "arm64":
		if !cpu.ARM64.HasAES || !cpu.ARM64.HasPMULL {
			return nil
		}
	default:
		return nil
	}
	var key [16]byte
	_, _ = rand.Read(key[:]) // never fails
	block, err := aes.NewCipher(key[:])
	if err != nil {
		return nil
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil
	}
	return &Memo{aead: aead, cell: memoCell, young: &generation{}, old: &generation{}}
}

// recall is what a Memo knows of the body being parsed, and what it will be told.
type recall struct {
	memo       *Memo // nil when it is not asked
	blockBytes int

	asked bool
	cells int // known cells at the body's start
	known mark
	tail  []byte // the text up to known, behind its last whole block
	entry []uint64
	chain [chainBytes]byte // of the last known cell
	tag   [tagBytes]byte

	array, start int // of the conversation being read: offset in the body, in the output
	resumed      bool
	hole         int      // the output's first bytes that were never written
	blocks       []uint64 // hashes of the text's whole blocks, those in the hole first
	marks        []mark   // the last end of a message before each cell's end, as far as it is new
}

// mark is where a message ends, with the text of all messages up to there in one piece.
type mark struct {
	raw, text    int32 // offsets in the body and in the output, raw 0: none
	array, start int32 // see recall
}

func (c *recall) reset() {
	*c = recall{tail: kept(c.tail, maxKeptBytes), entry: kept(c.entry, maxKeptItems), blocks: kept(c.blocks, maxKeptItems), marks: kept(c.marks, maxKeptItems)}
}

// begin decides whether a body is worth asking about.
func (c *recall) begin(m *Memo, api API, size int) {
	if m == nil || api != APIChat && api != APIMessages || size < 2*m.cell || size > 1<<30 {
		return
	}
	if c.blockBytes = int(m.blockBytes.Load()); c.blockBytes > 0 {
		c.memo = m
		c.chain = [chainBytes]byte{byte(api), byte(c.blockBytes), byte(c.blockBytes >> 8), byte(c.blockBytes >> 16)}
	}
}

// next tags the i-th cell of a body, all before it being tagged.
func (c *recall) next(body []byte, i int) {
	size := c.memo.cell
	c.memo.aead.Seal(c.tag[:0], c.chain[:], nil, body[i*size:(i+1)*size])
}

// ask finds the known cells at the body's start.
func (c *recall) ask(body []byte) {
	for (c.cells+1)*c.memo.cell <= len(body) {
		if c.next(body, c.cells); !c.memo.find(c) {
			return
		}
		copy(c.chain[:], c.tag[:])
		c.cells++
	}
}

// resume continues a conversation, whose array begins at i, behind the last
// message that is known. It returns the offset there, 0 when none is.
func (p *prompt) resume(i int) int {
	c := &p.recall
	c.array, c.start, c.marks = i, len(p.out), c.marks[:0]
	if !c.asked { // once per body, however many conversations it has
		c.asked = true
		c.ask(p.b)
	}
	k := c.known
	if k.raw == 0 || c.resumed || int(k.array) != c.array || int(k.start) != c.start {
		return 0
	}
	c.resumed = true
	text := int(k.text)
	if cap(p.out) < text {
		p.out = append(make([]byte, 0, max(text+text/4, len(p.b))), p.out...)
	}
	c.hole = text - text%c.blockBytes
	p.out = append(p.out[:c.hole], c.tail...)
	p.pieces = append(p.pieces, piece{from: c.start, to: text})
	return int(k.raw)
}

// mark notes that a message has ended at i.
func (p *prompt) mark(i int) {
	c := &p.recall
	if i < 0 || len(p.pieces) != p.first+1 {
		return
	}
	if t := p.pieces[p.first]; t.kind != pieceText || t.from != c.start || t.to != len(p.out) {
		return
	}
	m := mark{int32(i), int32(len(p.out)), int32(c.array), int32(c.start)}
	if n := len(c.marks); n > 0 && c.memo.cells(c.marks[n-1]) == c.memo.cells(m) {
		c.marks[n-1] = m
		return
	}
	c.marks = append(c.marks, m)
}

// closed forgets the last mark when its cell holds the end of the conversation,
// at i: where the next turn has a comma.
func (p *prompt) closed(i int) {
	c := &p.recall
	if n := len(c.marks); n > 0 && c.memo.cells(c.marks[n-1])*c.memo.cell >= i {
		c.marks = c.marks[:n-1]
	}
}

// cells returns the number of cells that hold all up to a mark.
func (m *Memo) cells(k mark) int { return (int(k.raw) + m.cell - 1) / m.cell }

// reparse makes good for a hole: it parses the body once more, without a Memo.
func (r *Request) reparse() {
	memo, model, salt := r.Memo, r.Model, r.Salt
	r.Memo = nil
	_ = r.Parse() // of a body that has been parsed
	r.Memo, r.Model, r.Salt = memo, model, salt
	r.Tokens = r.Tokens[:0]
}

// forgo has all of the Tokens there.
func (r *Request) forgo() {
	p := &r.prompt
	p.recall.memo = nil
	if p.recall.hole == 0 {
		return
	}
	tokenized := p.done
	if r.reparse(); tokenized {
		(&Estimator{}).Tokenize(r) // it has no parameters for text, and with a hole it was all text
	}
}

// memoed reports whether appendChain is to hash the request.
func (r *Request) memoed(blockBytes int) bool {
	if r.Memo != nil && r.Memo.blockBytes.Load() != int32(blockBytes) {
		r.Memo.blockBytes.Store(int32(blockBytes))
	}
	c := &r.prompt.recall
	if c.memo == nil {
		return false
	}
	if c.blockBytes != blockBytes { // it has changed meanwhile
		r.forgo()
	}
	return c.memo != nil
}

// appendChain is kvindex.AppendChain over a prompt whose head may be missing.
func (r *Request) appendChain(dst []uint64, seed uint64, limit int) []uint64 {
	c := &r.prompt.recall
	blockBytes := c.blockBytes
	whole := len(r.Tokens) / blockBytes
	if limit > 0 {
		whole = min(whole, limit)
	}
	if n := len(c.blocks); n < whole {
		c.blocks = kvindex.AppendBlocks(c.blocks, r.Tokens[n*blockBytes:whole*blockBytes], blockBytes)
	}
	dst = kvindex.AppendLinks(dst, seed, c.blocks[:whole])
	if limit <= 0 || whole < limit {
		if whole > 0 {
			seed = dst[len(dst)-1]
		}
		dst = kvindex.AppendChain(dst, seed, r.Tokens[whole*blockBytes:], blockBytes, 0)
	}
	r.remember()
	return dst
}

// remember tells the Memo what was new about a body.
func (r *Request) remember() {
	c := &r.prompt.recall
	if c.known.raw != 0 && !c.resumed {
		return
	}
	from := int(c.known.text) / c.blockBytes
	for _, k := range c.marks {
		cells, to := c.memo.cells(k), int(k.text)/c.blockBytes
		if cells <= c.cells {
			continue
		}
		if cells*c.memo.cell > len(r.Body) || to > len(c.blocks) || int(k.text) > len(r.Tokens) {
			break
		}
		for ; c.cells < cells; c.cells++ {
			c.next(r.Body, c.cells)
			if c.cells+1 < cells { // no message ends in it
				c.memo.put(c.tag, mark{}, nil, nil)
			} else {
				c.memo.put(c.tag, k, c.blocks[from:to], r.Tokens[to*c.blockBytes:k.text])
			}
			copy(c.chain[:], c.tag[:])
		}
		from = to
	}
	c.marks = c.marks[:0]
}

// generation is half of a Memo: entries, and an open-addressing table of their
// places by tag. When one is full the other, older one is emptied and takes its
// place; what is found in the older one moves to the younger.
type generation struct {
	chunks [][]uint64
	used   int      // words, the rests of chunks included
	table  []uint32 // place+1 of an entry, 0: none
	count  int
}

// An entry: two words of tag, two of the mark, the number of blocks and the
// length of the tail, the blocks since the mark of the cell before, the tail.
const entryHead = 5

func words(tag *[tagBytes]byte) (a, b uint64) {
	return binary.LittleEndian.Uint64(tag[:8]), binary.LittleEndian.Uint64(tag[8:])
}

func entryWords(e []uint64) int { return entryHead + int(e[4]>>32) + (int(uint32(e[4]))+7)/8 }

// at returns the words from a place to the end of its chunk.
func (g *generation) at(place int) []uint64 { return g.chunks[place/memoChunk][place%memoChunk:] }

func (g *generation) find(a, b uint64) []uint64 {
	if len(g.table) == 0 {
		return nil
	}
	for i := a % memoTable; g.table[i] != 0; i = (i + 1) % memoTable {
		if e := g.at(int(g.table[i] - 1)); e[0] == a && e[1] == b {
			return e[:entryWords(e)]
		}
	}
	return nil
}

// room returns n words, nil when there are none.
func (g *generation) room(n int) (e []uint64, place int) {
	if left := memoChunk - g.used%memoChunk; left < n {
		g.used += left
	}
	place = g.used
	if g.count == memoEntries || n > memoChunk || place+n > memoChunks*memoChunk {
		return nil, 0
	}
	if place/memoChunk == len(g.chunks) {
		g.chunks = append(g.chunks, make([]uint64, memoChunk))
	}
	if len(g.table) == 0 {
		g.table = make([]uint32, memoTable)
	}
	g.used += n
	g.count++
	return g.at(place)[:n], place
}

func (g *generation) clear() {
	clear(g.table)
	g.used, g.count = 0, 0
}

// find looks c.tag up and takes what its entry says into c.
func (m *Memo) find(c *recall) bool {
	a, b := words(&c.tag)
	m.mu.Lock()
	e := m.young.find(a, b)
	fresh := e != nil
	if !fresh {
		e = m.old.find(a, b)
	}
	c.entry = append(c.entry[:0], e...)
	if !fresh && e != nil {
		m.add(c.entry)
	}
	m.mu.Unlock()
	e = c.entry
	if len(e) == 0 {
		return false
	}
	if e[2] == 0 {
		return true
	}
	blocks, tail := e[entryHead:entryHead+int(e[4]>>32)], int(uint32(e[4]))
	c.known = mark{int32(e[2] >> 32), int32(e[2]), int32(e[3] >> 32), int32(e[3])}
	c.blocks = append(c.blocks, blocks...)
	c.tail = c.tail[:0]
	for _, w := range e[entryHead+len(blocks):] {
		c.tail = binary.LittleEndian.AppendUint64(c.tail, w)
	}
	c.tail = c.tail[:tail]
	return true
}

// put adds an entry unless it is there.
func (m *Memo) put(tag [tagBytes]byte, k mark, blocks []uint64, tail []byte) {
	a, b := words(&tag)
	head := [entryHead]uint64{a, b, uint64(k.raw)<<32 | uint64(k.text), uint64(k.array)<<32 | uint64(k.start), uint64(len(blocks))<<32 | uint64(len(tail))}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.young.find(a, b) != nil {
		return
	}
	e := m.slot(head[:])
	if e == nil {
		return
	}
	e = e[copy(e, head[:]):]
	e = e[copy(e, blocks):]
	for i := range e {
		var w [8]byte
		copy(w[:], tail[i*8:])
		e[i] = binary.LittleEndian.Uint64(w[:])
	}
}

// add copies an entry to the young generation. The caller holds mu.
func (m *Memo) add(e []uint64) { copy(m.slot(e), e) }

// slot makes room in the young generation for the entry that begins with head,
// nil when it is larger than any. The caller holds mu.
func (m *Memo) slot(head []uint64) []uint64 {
	n := entryWords(head)
	e, place := m.young.room(n)
	if e == nil {
		m.young, m.old = m.old, m.young
		m.young.clear()
		if e, place = m.young.room(n); e == nil {
			return nil
		}
	}
	i := head[0] % memoTable
	for m.young.table[i] != 0 {
		i = (i + 1) % memoTable
	}
	m.young.table[i] = uint32(place + 1)
	return e
}
