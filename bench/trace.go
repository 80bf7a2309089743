package bench

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	_ "embed" // the traces
	"encoding/csv"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

//go:embed testdata/mooncake_conversation.jsonl.gz
var conversationTrace []byte

//go:embed testdata/mooncake_synthetic.jsonl.gz
var syntheticTrace []byte

// TraceRequest is one request of a trace.
type TraceRequest struct {
	At     time.Duration // since the start of the trace
	Input  int           // prompt tokens
	Output int           // completion tokens
	Blocks []uint64      // ids of the prompt's blocks of Trace.BlockTokens tokens; equal ids mean equal prefixes
}

// Trace is a recorded workload in the order of arrival.
type Trace struct {
	Name        string
	Digest      string // SHA-256 of the file, hexadecimal
	BlockTokens int    // tokens per block id
	Requests    []TraceRequest
}

// LoadTrace reads a trace: "conversation" or "synthetic" (both embedded), or a
// file. Files are JSON Lines with timestamp (ms), input_length, output_length
// and hash_ids, or CSV with TIMESTAMP, ContextTokens and GeneratedTokens (load
// only: no prefix is shared); either may be gzip-compressed. blockTokens is what
// one hash id stands for: a multiple or a divisor of the router's 64.
func LoadTrace(name string, blockTokens int) (*Trace, error) {
	var data []byte
	switch name {
	case "conversation":
		data = conversationTrace
	case "synthetic":
		data = syntheticTrace
	default:
		var err error
		if data, err = os.ReadFile(name); err != nil {
			return nil, err
		}
	}
	return ParseTrace(name, data, blockTokens)
}

// ParseTrace is LoadTrace on the file's content.
func ParseTrace(name string, data []byte, blockTokens int) (*Trace, error) {
	if err := checkBlockTokens(blockTokens); err != nil {
		return nil, err
	}
	digest := sha256.Sum256(data)
	t := &Trace{Name: name, Digest: hex.EncodeToString(digest[:]), BlockTokens: blockTokens}
	var r io.Reader = bytes.NewReader(data)
	if bytes.HasPrefix(data, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(r)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		r = z
	}
	buffered := bufio.NewReaderSize(r, 1<<16)
	first, err := buffered.Peek(1)
	if err != nil {
		return nil, fmt.Errorf("%s: empty trace", name)
	}
	if first[0] == '{' {
		err = t.readJSONL(buffered)
	} else {
		err = t.readCSV(buffered)
	}
	if err != nil {
		return nil, err
	}
	if len(t.Requests) == 0 {
		return nil, fmt.Errorf("%s: empty trace", name)
	}
	slices.SortStableFunc(t.Requests, func(a, b TraceRequest) int { return cmp.Compare(a.At, b.At) })
	start := t.Requests[0].At
	for i := range t.Requests {
		t.Requests[i].At -= start
	}
	return t, nil
}

func checkBlockTokens(n int) error {
	if n < 1 || n%routerBlock != 0 && routerBlock%n != 0 {
		return fmt.Errorf("block tokens %d: use a multiple or a divisor of %d", n, routerBlock)
	}
	return nil
}

func (t *Trace) add(line int, r TraceRequest) error {
	if r.Input < 1 || r.Output < 0 || r.At < 0 {
		return fmt.Errorf("%s:%d: input %d and output %d tokens at %v: numbers of at least 1, 0 and 0 are needed", t.Name, line, r.Input, r.Output, r.At)
	}
	if most := (r.Input + t.BlockTokens - 1) / t.BlockTokens; len(r.Blocks) > most {
		return fmt.Errorf("%s:%d: %d hash ids for %d tokens in blocks of %d: at most %d are needed; is the block size right?", t.Name, line, len(r.Blocks), r.Input, t.BlockTokens, most)
	}
	t.Requests = append(t.Requests, r)
	return nil
}

func (t *Trace) readJSONL(r io.Reader) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var x struct {
			Timestamp float64  `json:"timestamp"`
			Input     int      `json:"input_length"`
			Output    int      `json:"output_length"`
			HashIDs   []uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &x); err != nil {
			return fmt.Errorf("%s:%d: %w", t.Name, n, err)
		}
		if err := t.add(n, TraceRequest{time.Duration(x.Timestamp * 1e6), x.Input, x.Output, x.HashIDs}); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%s: %w", t.Name, err)
	}
	return nil
}

func (t *Trace) readCSV(r io.Reader) error {
	rows := csv.NewReader(r)
	rows.ReuseRecord = true
	head, err := rows.Read()
	if err != nil {
		return fmt.Errorf("%s: %w", t.Name, err)
	}
	head = slices.Clone(head)
	column := func(name string) int { return slices.Index(head, name) }
	at, in, out := column("TIMESTAMP"), column("ContextTokens"), column("GeneratedTokens")
	if at < 0 || in < 0 || out < 0 {
		return fmt.Errorf("%s: neither JSON Lines nor a CSV with TIMESTAMP, ContextTokens and GeneratedTokens", t.Name)
	}
	var start time.Time
	for n := 2; ; n++ {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", t.Name, err)
		}
		when, err := time.Parse("2006-01-02 15:04:05.9999999", strings.TrimSpace(row[at]))
		if err != nil {
			return fmt.Errorf("%s:%d: %w", t.Name, n, err)
		}
		if start.IsZero() {
			start = when
		}
		input, err := strconv.Atoi(row[in])
		if err != nil {
			return fmt.Errorf("%s:%d: %w", t.Name, n, err)
		}
		output, err := strconv.Atoi(row[out])
		if err != nil {
			return fmt.Errorf("%s:%d: %w", t.Name, n, err)
		}
		req := TraceRequest{At: when.Sub(start), Input: input, Output: output}
		for b := 0; b*t.BlockTokens < input; b++ {
			req.Blocks = append(req.Blocks, uint64(n)<<20|uint64(b)|1<<63)
		}
		if err := t.add(n, req); err != nil {
			return err
		}
	}
}

// Shape prepares a trace for a fleet: arrivals whose time stamps were rounded down
// are spread over the bin (0: left as they are), the trace is laid over itself copies
// times, rotated in time and with other block ids (id 0, which stands for what
// all requests share, stays), and the arrival rate is multiplied by rate. It
// returns a new trace.
func (t *Trace) Shape(spread time.Duration, copies int, rate float64, seed uint64) *Trace {
	rnd := rand.New(rand.NewPCG(seed, 0x74726163655f7370))
	base := slices.Clone(t.Requests)
	if spread > 0 {
		for i := range base {
			base[i].At += time.Duration(rnd.Int64N(int64(spread)))
		}
	}
	length := time.Duration(0)
	for _, r := range base {
		length = max(length, r.At+1)
	}
	out := &Trace{Name: t.Name, Digest: t.Digest, BlockTokens: t.BlockTokens}
	for c := range copies {
		shift := length * time.Duration(c) / time.Duration(copies)
		for _, r := range base {
			r.At = time.Duration(float64((r.At+shift)%length) / rate)
			if c > 0 {
				blocks := make([]uint64, len(r.Blocks))
				for i, id := range r.Blocks {
					if id != 0 {
						id = mix(id + mix(uint64(c)))
					}
					blocks[i] = id
				}
				r.Blocks = blocks
			}
			out.Requests = append(out.Requests, r)
		}
	}
	slices.SortStableFunc(out.Requests, func(a, b TraceRequest) int { return cmp.Compare(a.At, b.At) })
	return out
}

// blockNames appends the names of the blocks that request i fills: those of its
// prompt, and those of its answer, which nobody asks for again.
func (t *Trace) blockNames(dst []uint64, i int) []uint64 {
	r := &t.Requests[i]
	prompt := min(len(r.Blocks), r.Input/t.BlockTokens)
	dst = append(dst, r.Blocks[:prompt]...)
	for b := prompt; b < (r.Input+r.Output)/t.BlockTokens; b++ {
		dst = append(dst, mix(uint64(i))<<16|uint64(b))
	}
	return dst
}

// CacheBound returns the part of the prompt tokens of the requests from index
// from on that one LRU cache of that many blocks finds: the bound of any fleet
// with as much memory in all. capacity 0 is a cache without limit. cached, when
// not nil, is told the tokens found for every request.
func (t *Trace) CacheBound(capacity, from int, cached func(i, tokens int)) float64 {
	lru := newLRU(capacity)
	hit, all := 0, 0
	var names []uint64
	for i, r := range t.Requests {
		full := r.Blocks[:min(len(r.Blocks), (r.Input-1)/t.BlockTokens)]
		n := 0
		for n < len(full) && lru.has(full[n]) {
			n++
		}
		// The tail first, so that the head of the prompt is evicted last.
		names = t.blockNames(names[:0], i)
		for k := len(names) - 1; k >= 0; k-- {
			lru.touch(names[k])
		}
		if cached != nil {
			cached(i, n*t.BlockTokens)
		}
		if i >= from {
			hit += n * t.BlockTokens
			all += r.Input
		}
	}
	if all == 0 {
		return 0
	}
	return float64(hit) / float64(all)
}

// lru is a plain LRU set of block ids.
type lru struct {
	capacity   int
	at         map[uint64]int32
	id         []uint64
	next, prev []int32
}

func newLRU(capacity int) *lru {
	return &lru{capacity: capacity, at: map[uint64]int32{}, id: []uint64{0}, next: []int32{0}, prev: []int32{0}}
}

func (l *lru) has(id uint64) bool { _, ok := l.at[id]; return ok }

// touch makes id the newest; entry 0 is both ends of the ring.
func (l *lru) touch(id uint64) {
	n, ok := l.at[id]
	switch {
	case ok:
		l.next[l.prev[n]], l.prev[l.next[n]] = l.next[n], l.prev[n]
	case l.capacity > 0 && len(l.at) == l.capacity:
		n = l.next[0] // the oldest
		l.next[0], l.prev[l.next[n]] = l.next[n], 0
		delete(l.at, l.id[n])
		l.id[n], l.at[id] = id, n
	default:
		n = int32(len(l.id))
		l.id, l.next, l.prev = append(l.id, id), append(l.next, 0), append(l.prev, 0)
		l.at[id] = n
	}
	last := l.prev[0]
	l.next[last], l.prev[n], l.next[n], l.prev[0] = n, last, 0, n
}
