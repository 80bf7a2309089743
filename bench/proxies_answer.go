package bench

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
)

// answerReader checks one HTTP/1.1 answer as its bytes come in: status 200, a
// body as long as the head says, events counted by their line ends.
type answerReader struct {
	stage  answerStage
	line   []byte // head, or size line of a chunk, as far as it is here
	left   int64  // bytes of the body or the chunk
	tail   []byte // the last bytes of the body
	last   bool   // the connection closes behind this answer
	lines  int    // line ends in the body
	body   int64  // bytes of the body
	stream bool
}

type answerStage uint8

const (
	stageHead answerStage = iota
	stageSized
	stageSize // of a chunk
	stageChunk
	stageChunkEnd
	stageTrailer
	stageDone
)

// maxAnswerHead is the longest head, and the longest line in a chunked body, in bytes.
const maxAnswerHead = 16 << 10

var errMoreThanAnswer = errors.New("bytes behind the end of the answer")

func (r *answerReader) reset() {
	*r = answerReader{line: r.line[:0], tail: r.tail[:0]}
}

// feed takes the next bytes and reports whether the answer is complete.
func (r *answerReader) feed(b []byte) (done bool, err error) {
	for len(b) > 0 {
		switch r.stage {
		case stageHead:
			old := len(r.line)
			r.line = append(r.line, b...)
			end := bytes.Index(r.line, []byte("\r\n\r\n"))
			if end < 0 {
				if len(r.line) > maxAnswerHead {
					return false, fmt.Errorf("a response head of more than %d bytes", maxAnswerHead)
				}
				return false, nil
			}
			b = b[end+4-old:]
			if err := r.head(r.line[:end+2]); err != nil {
				return false, err
			}
			r.line = r.line[:0]
		case stageSized, stageChunk:
			n := int(min(int64(len(b)), r.left))
			r.payload(b[:n])
			b = b[n:]
			if r.left -= int64(n); r.left > 0 {
				continue
			}
			if r.stage == stageSized {
				r.stage = stageDone
			} else {
				r.stage = stageChunkEnd
			}
		case stageSize, stageChunkEnd, stageTrailer:
			end := bytes.IndexByte(b, '\n')
			if end < 0 {
				r.line = append(r.line, b...)
				b = nil
			} else {
				r.line = append(r.line, b[:end]...)
				b = b[end+1:]
			}
			if len(r.line) > maxAnswerHead {
				return false, fmt.Errorf("a line of more than %d bytes in a chunked body", maxAnswerHead)
			}
			if end < 0 {
				return false, nil
			}
			if err := r.chunkLine(bytes.TrimSuffix(r.line, []byte("\r"))); err != nil {
				return false, err
			}
			r.line = r.line[:0]
		case stageDone:
			return false, errMoreThanAnswer
		}
	}
	return r.stage == stageDone, nil
}

func (r *answerReader) payload(b []byte) {
	r.body += int64(len(b))
	if r.stream {
		r.lines += bytes.Count(b, []byte("\n"))
		if keep := len(streamEnd); len(b) >= keep {
			r.tail = append(r.tail[:0], b[len(b)-keep:]...)
		} else {
			r.tail = append(r.tail, b...)
			r.tail = append(r.tail[:0], r.tail[max(0, len(r.tail)-keep):]...)
		}
	}
}

const streamEnd = "data: [DONE]\n\n"

// events returns the events so far, the terminator included.
func (r *answerReader) events() int { return r.lines / 2 }

// whole returns an error when a complete answer is not what was asked for: of
// a stream, `want` events and the terminator.
func (r *answerReader) whole(want int) error {
	switch {
	case r.body == 0:
		return errors.New("an empty answer")
	case !r.stream:
		return nil
	case string(r.tail) != streamEnd:
		return fmt.Errorf("a stream that ends with %q instead of [DONE]", r.tail)
	case want > 0 && r.events() != want:
		return fmt.Errorf("a stream of %d events, %d were expected", r.events(), want)
	}
	return nil
}

func (r *answerReader) head(head []byte) error {
	status, rest, _ := bytes.Cut(head, []byte("\r\n"))
	if len(status) < 12 || string(status[:9]) != "HTTP/1.1 " || string(status[9:12]) != "200" {
		return fmt.Errorf("the answer %q", status)
	}
	length, chunks := int64(-1), false
	for len(rest) > 0 {
		var line []byte
		line, rest, _ = bytes.Cut(rest, []byte("\r\n"))
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch {
		case bytes.EqualFold(name, []byte("content-length")):
			n, err := strconv.ParseInt(string(value), 10, 64)
			if err != nil {
				return fmt.Errorf("the header line %q", line)
			}
			length = n
		case bytes.EqualFold(name, []byte("transfer-encoding")):
			chunks = bytes.EqualFold(value, []byte("chunked"))
		case bytes.EqualFold(name, []byte("connection")):
			r.last = bytes.EqualFold(value, []byte("close"))
		}
	}
	switch {
	case chunks:
		r.stage = stageSize
	case length > 0:
		r.stage, r.left = stageSized, length
	default:
		return fmt.Errorf("an answer of unknown or no length: %q", head)
	}
	return nil
}

func (r *answerReader) chunkLine(line []byte) error {
	switch r.stage {
	case stageChunkEnd:
		if len(line) > 0 {
			return fmt.Errorf("%q behind a chunk", line)
		}
		r.stage = stageSize
	case stageTrailer:
		if len(line) == 0 {
			r.stage = stageDone
		}
	case stageSize:
		size, _, _ := bytes.Cut(line, []byte(";"))
		n, err := strconv.ParseInt(string(bytes.TrimSpace(size)), 16, 64)
		if err != nil || n < 0 {
			return fmt.Errorf("the chunk size %q", line)
		}
		r.left, r.stage = n, stageChunk
		if n == 0 {
			r.stage = stageTrailer
		}
	default:
	}
	return nil
}
