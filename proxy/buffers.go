package proxy

import (
	"errors"
	"sync"
	"sync/atomic"
)

// classes are the sizes of pooled buffers. A larger buffer is made for one use
// and left to the garbage collector: a pool that keeps giants never shrinks.
var classes = [...]int{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}

const largestClass = 1 << 20

// buffer is a pooled piece of memory; b has its full length.
type buffer struct {
	b     []byte
	class int8 // -1: not pooled
}

// buffers is the memory of bodies: pools by size class, and a budget for the
// request bodies that are held at once.
type buffers struct {
	pools  [len(classes)]sync.Pool
	budget atomic.Int64 // bytes that may still be reserved
}

var errBudget = errors.New("too many request bodies are in memory")

// get returns a buffer of at least n bytes.
func (p *buffers) get(n int) *buffer {
	for i, size := range classes {
		if n <= size {
			if b, ok := p.pools[i].Get().(*buffer); ok {
				return b
			}
			return &buffer{b: make([]byte, size), class: int8(i)}
		}
	}
	return &buffer{b: make([]byte, n), class: -1}
}

func (p *buffers) put(b *buffer) {
	if b != nil && b.class >= 0 {
		p.pools[b.class].Put(b)
	}
}

// reserve takes n bytes of the budget.
func (p *buffers) reserve(n int) bool {
	if p.budget.Add(int64(-n)) >= 0 {
		return true
	}
	p.budget.Add(int64(n))
	return false
}

func (p *buffers) free(n int) { p.budget.Add(int64(n)) }

// held is a request body in memory. It grows geometrically with what arrives,
// never with what a client merely announces.
type held struct {
	pool *buffers
	buf  *buffer
	n    int // bytes in use
}

func (h *held) bytes() []byte {
	if h.buf == nil {
		return nil
	}
	return h.buf.b[:h.n]
}

// space returns room for more bytes. want is the size that the body is expected
// to have, 0 when unknown; max is the most that it may become.
func (h *held) space(want, limit int) ([]byte, error) {
	if h.buf == nil {
		first := classes[1]
		if want > 0 {
			first = min(want, classes[2])
		}
		return h.grow(first)
	}
	if h.n < len(h.buf.b) {
		return h.buf.b[h.n:], nil
	}
	next := 4 * h.n
	switch {
	case want > h.n && want <= largestClass:
		next = want // a client that has sent 64 KiB is believed up to 1 MiB
	case h.n >= largestClass:
		next = 2 * h.n
		if want > h.n {
			next = min(next, want)
		}
	}
	return h.grow(max(min(next, limit), h.n+1))
}

func (h *held) grow(size int) ([]byte, error) {
	b := h.pool.get(size)
	old := 0
	if h.buf != nil {
		old = len(h.buf.b)
	}
	if !h.pool.reserve(len(b.b) - old) {
		h.pool.put(b)
		return nil, errBudget
	}
	if h.buf != nil {
		copy(b.b, h.buf.b[:h.n])
		h.pool.put(h.buf)
	}
	h.buf = b
	return b.b[h.n:], nil
}

// release gives the memory back. The bytes must not be used any more.
func (h *held) release() {
	if h.buf != nil {
		h.pool.free(len(h.buf.b))
		h.pool.put(h.buf)
	}
	h.buf, h.n = nil, 0
}
