package proxy

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"time"
)

// A form (audio) streams through: only its first part is held, to find the model.
const (
	formHead = 1 << 20  // at most so much is searched
	formStep = 16 << 10 // between two searches
)

// formBoundary returns the boundary of a multipart/form-data body, nil when the
// Content-Type is another.
func formBoundary(contentType []byte) []byte {
	kind, params, _ := bytes.Cut(contentType, []byte(";"))
	if !equalFold(trimSpace(kind), "multipart/form-data") {
		return nil
	}
	boundary, _ := parameter(params, "boundary")
	return boundary
}

// parameter returns the first value of a parameter in a list separated by
// semicolons, and how often it is there. A quoted value may hold escapes only
// where they do not matter here: a boundary and a field's name have none.
func parameter(list []byte, name string) (first []byte, times int) {
	for len(list) > 0 {
		end, quoted := 0, false
		for end < len(list) && (quoted || list[end] != ';') {
			switch list[end] {
			case '"':
				quoted = !quoted
			case '\\':
				if quoted {
					end++
				}
			}
			end++
		}
		end = min(end, len(list))
		key, value, ok := bytes.Cut(list[:end], []byte("="))
		list = list[min(end+1, len(list)):]
		if !ok || !equalFold(trimSpace(key), name) {
			continue
		}
		value = trimSpace(value)
		if n := len(value); n >= 2 && value[0] == '"' && value[n-1] == '"' {
			value = value[1 : n-1]
		}
		if times++; times == 1 {
			first = value
		}
	}
	return first, times
}

// formModel looks for the model field in the begin of a form. found is false
// when it is not there, or not there as a whole.
func formModel(b, boundary []byte) (model []byte, found bool) {
	eachPart(b, boundary, func(head, value []byte) bool {
		if name, _ := partName(head); string(name) == "model" {
			model, found = trimSpace(value), true
		}
		return !found
	})
	return model, found
}

// doubtful says whether a whole form may name another model than formModel finds:
// in a second field, in a part that servers read in more than one way, or behind
// what is no end of a form.
func doubtful(b, boundary []byte) bool {
	models, unclear := 0, false
	whole := eachPart(b, boundary, func(head, _ []byte) bool {
		name, plain := partName(head)
		if unclear = unclear || !plain; string(name) == "model" {
			models++
		}
		return true
	})
	return models > 1 || unclear || !whole
}

// eachPart calls do with the head and the value of each part that is there as a
// whole, until it returns false. It returns whether the form's end was reached. A
// delimiter is one only before a line end or a further "--", as for Python's parsers.
func eachPart(b, boundary []byte, do func(head, value []byte) bool) (whole bool) {
	if len(boundary) == 0 || len(boundary) > 200 {
		return false
	}
	delimiter := append([]byte("\r\n--"), boundary...)
	// next returns the text before the next delimiter and behind it.
	next := func(b, delimiter []byte) (before, behind []byte, ok bool) {
		for from := 0; ; {
			i := bytes.Index(b[from:], delimiter)
			if i < 0 {
				return nil, nil, false
			}
			i += from
			from = i + len(delimiter)
			if behind = b[from:]; bytes.HasPrefix(behind, []byte("\r\n")) || bytes.HasPrefix(behind, []byte("--")) {
				return b[:i], behind, true
			}
		}
	}
	ok := false
	if bytes.HasPrefix(b, delimiter[2:]) {
		_, b, ok = next(b, delimiter[2:])
	} else {
		_, b, ok = next(b, delimiter)
	}
	for ok && !bytes.HasPrefix(b, []byte("--")) {
		end := bytes.Index(b, blankLine)
		if end < 0 {
			return false
		}
		head := b[:end+2]
		var value []byte
		if value, b, ok = next(b[end+len(blankLine):], delimiter); ok && !do(head, value) {
			return false
		}
	}
	return ok
}

// partName returns the name of a part's field, nil for a file's and for none.
// plain is false when servers may read another name: Python's take the last of
// several, whatever stands before.
func partName(head []byte) (name []byte, plain bool) {
	lines := 0
	plain = true
	for line := range bytes.SplitSeq(head, []byte("\r\n")) {
		field, value, _ := bytes.Cut(line, []byte(":"))
		if len(line) > 0 && (line[0] == ' ' || line[0] == '\t') {
			plain = false // folded
		}
		if !equalFold(trimSpace(field), "content-disposition") {
			continue
		}
		lines++
		_, params, _ := bytes.Cut(value, []byte(";"))
		own, times := parameter(params, "name")
		_, files := parameter(params, "filename")
		if lines > 1 || times > 1 || bytes.ContainsAny(own, `"\`) {
			plain = false
		}
		if name = own; files > 0 {
			name = nil
		}
	}
	return name, plain
}

// appendQuery appends the decoded value of a query parameter. query starts with
// its question mark, if there is one.
func appendQuery(dst, query []byte, name string) []byte {
	if len(query) == 0 {
		return dst
	}
	for pair := range bytes.SplitSeq(query[1:], []byte("&")) {
		key, value, _ := bytes.Cut(pair, []byte("="))
		if string(key) != name {
			continue
		}
		return unescape(dst, value, true)
	}
	return dst
}

// unescape appends the decoded form of a percent-encoded text; what is no
// escape stays.
func unescape(dst, b []byte, plus bool) []byte {
	for i := 0; i < len(b); i++ {
		c := b[i]
		switch {
		case c == '+' && plus:
			c = ' '
		case c == '%' && i+2 < len(b) && unhex(b[i+1]) < 16 && unhex(b[i+2]) < 16:
			c = unhex(b[i+1])<<4 | unhex(b[i+2])
			i += 2
		}
		dst = append(dst, c)
	}
	return dst
}

// clientError says that the client, not the replica, broke a transfer off.
type clientError struct{ refusal *refusal }

func (e *clientError) Error() string { return e.refusal.message }

// sendForm sends the head and the form: the part that is held, then the rest as
// it comes from the client.
func (x *exchange) sendForm(c *upConn) error {
	stall := x.live.upstream.StreamTimeout
	chunked := x.declared < 0
	first := x.body.bytes()
	if chunked {
		x.head = append(strconv.AppendInt(x.head, int64(len(first)), 16), "\r\n"...)
	}
	if err := c.send(x.rec.routed, x.head, first, stall, true); err != nil {
		return err
	}
	buf := x.s.buffers.get(classes[2])
	defer x.s.buffers.put(buf)
	x.spent = true
	limit := x.bodyLimit()
	for {
		n, readErr := x.rest.Read(buf.b[headroom : len(buf.b)-len("\r\n0\r\n\r\n")])
		x.rec.bytesIn += int64(n)
		if x.rec.bytesIn > limit {
			return &clientError{x.tooLarge()}
		}
		ended := errors.Is(readErr, io.EOF)
		if readErr != nil && !ended {
			return &clientError{x.bodyLost(readErr)}
		}
		if ended && !chunked && x.rec.bytesIn < x.declared {
			return &clientError{x.bodyLost(io.ErrUnexpectedEOF)}
		}
		from, to := headroom, headroom+n
		if chunked {
			// The held part ends, and what was read becomes a chunk of its own.
			var line [headroom]byte
			size := append(line[:0], "\r\n"...)
			if n > 0 {
				size = append(strconv.AppendInt(size, int64(n), 16), "\r\n"...)
			}
			from -= copy(buf.b[from-len(size):], size)
			if ended {
				if n > 0 {
					to += copy(buf.b[to:], "\r\n")
				}
				to += copy(buf.b[to:], "0\r\n\r\n")
			}
		}
		if to > from && (n > 0 || ended) {
			if c.probe() != probeQuiet {
				return errEarly
			}
			begin := time.Now()
			if err := c.send(begin, buf.b[from:to], nil, stall, true); err != nil {
				return err
			}
			x.c.heldUp(time.Since(begin))
		}
		if ended {
			x.rest = nil
			x.s.watcher.begin(x.c)
			return nil
		}
	}
}

// clientRefusal returns the refusal in an error of the client's, nil when the
// error is another.
func clientRefusal(err error) *refusal {
	var own *clientError
	if errors.As(err, &own) {
		return own.refusal
	}
	return nil
}
