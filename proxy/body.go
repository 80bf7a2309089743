package proxy

import (
	"errors"
	"io"
)

// framing of a response body.
type bodyKind uint8

const (
	bodyEmpty   bodyKind = iota
	bodyLength           // Content-Length
	bodyChunked          // Transfer-Encoding: chunked
	bodyClose            // ends with the connection
)

// Errors of a response body.
var (
	errTruncated = errors.New("the body ended early")
	errChunk     = errors.New("the chunked body is malformed")
)

// Bounds of what a chunked body may have beside its payload.
const (
	maxChunkLine = 4 << 10 // a size with its extensions
	maxTrailers  = 16 << 10
)

// chunkState is where a chunked body stands between two bytes.
type chunkState uint8

const (
	chunkSize      chunkState = iota // in the hexadecimal digits
	chunkExt                         // behind them, up to CR
	chunkSizeLF                      // CR seen, LF due
	chunkData                        // in the payload
	chunkDataCR                      // payload ended, CR due
	chunkDataLF                      // LF due
	chunkTrailer                     // at the start of a trailer line
	chunkTrailerIn                   // in a trailer line
	chunkEndLF                       // CR of the empty line seen, LF due
	chunkDone
)

// chunks decodes a chunked body in whatever pieces it arrives.
type chunks struct {
	state  chunkState
	digits bool  // the size has a digit
	left   int64 // payload of the current chunk
	line   int   // bytes of the current size line, or of all trailers
}

// decode reads b[from:to]. It moves the payload together, so that it is
// b[from:end], and returns the offset behind the last byte that belongs to the
// body: to, unless the body ended before it.
func (c *chunks) decode(b []byte, from, to int) (end, next int, err error) {
	end = from
	for i := from; i < to; {
		if c.state == chunkData {
			n := int(min(c.left, int64(to-i)))
			if end != i {
				copy(b[end:], b[i:i+n])
			}
			end += n
			i += n
			if c.left -= int64(n); c.left == 0 {
				c.state = chunkDataCR
			}
			continue
		}
		if c.state == chunkDone {
			return end, i, nil
		}
		if !c.step(b[i]) {
			return end, i, errChunk
		}
		i++
	}
	return end, to, nil
}

// step takes one byte outside of the payload.
func (c *chunks) step(b byte) bool {
	switch c.state {
	case chunkSize:
		if d := unhex(b); d < 16 {
			if c.left >= 1<<55 {
				return false
			}
			c.left = c.left<<4 | int64(d)
			c.digits = true
			return true
		}
		if !c.digits {
			return false
		}
		c.state = chunkExt
		return c.step(b)
	case chunkExt:
		if b == '\r' {
			c.state, c.line = chunkSizeLF, 0
			return true
		}
		c.line++
		return b != '\n' && c.line <= maxChunkLine && (c.line > 1 || b == ';' || b == ' ' || b == '\t')
	case chunkSizeLF:
		c.state = chunkData
		if c.left == 0 {
			c.state = chunkTrailer
		}
		c.digits = false
		return b == '\n'
	case chunkDataCR:
		c.state = chunkDataLF
		return b == '\r'
	case chunkDataLF:
		c.state = chunkSize
		return b == '\n'
	case chunkTrailer:
		if b == '\r' {
			c.state = chunkEndLF
			return true
		}
		c.state = chunkTrailerIn
		return c.step(b)
	case chunkTrailerIn:
		if b == '\n' {
			c.state = chunkTrailer
		}
		c.line++
		return c.line <= maxTrailers
	case chunkEndLF:
		c.state = chunkDone
		return b == '\n'
	}
	return false
}

// body reads the payload of one response out of its connection's buffer.
type body struct {
	kind   bodyKind
	left   int64 // bodyLength: bytes to come
	chunks chunks
	err    error // of the framing; behind it nothing can be read
	done   bool  // the whole body was seen, cleanly
}

func (b *body) reset(kind bodyKind, length int64) {
	*b = body{kind: kind, left: length, done: kind == bodyEmpty || kind == bodyLength && length == 0}
}

// take consumes what is buffered and returns the payload in it as offsets in
// the connection's buffer, valid until the next fill.
func (b *body) take(c *upConn) (from, to int, err error) {
	if b.done || b.err != nil {
		return 0, 0, b.err
	}
	from = c.r
	switch b.kind {
	case bodyLength:
		to = c.r + int(min(b.left, int64(c.w-c.r)))
		b.left -= int64(to - from)
		b.done = b.left == 0
		c.r = to
	case bodyChunked:
		to, c.r, b.err = b.chunks.decode(c.buf.b, c.r, c.w)
		b.done = b.err == nil && b.chunks.state == chunkDone
	default:
		to = c.w
		c.r = to
	}
	return from, to, b.err
}

// next returns the payload that is there, reading once from the connection when
// nothing is; io.EOF behind a whole body. A body that ends early is errTruncated.
func (b *body) next(c *upConn) (from, to int, err error) {
	for {
		if from, to, err = b.take(c); to > from {
			return from, to, nil // an error comes again
		}
		switch {
		case err != nil:
			return 0, 0, err
		case b.done:
			return 0, 0, io.EOF
		}
		if err = c.fill(); err == nil {
			continue
		}
		if !errors.Is(err, io.EOF) {
			return 0, 0, err
		}
		if b.kind != bodyClose {
			return 0, 0, errTruncated
		}
		b.done = true
	}
}
