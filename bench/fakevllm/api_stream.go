package fakevllm

import (
	"bytes"
	"strconv"
	"time"
)

// stream writes server-sent events, one chunk each. After an error it writes nothing.
type stream struct {
	c       *conn
	a       *answer
	buf     []byte // chunks not written yet
	body    []byte // scratch for the data of an event
	chunked bool
	events  int
	err     error
}

// openStream sends the head at once, before the first event, as uvicorn does.
func (c *conn) openStream(a *answer) *stream {
	st := &stream{c: c, a: a, chunked: c.req.Header.IsHTTP11() && c.f.ExtraLength == 0}
	length := -1
	if c.f.ExtraLength > 0 {
		length = 1<<20 + c.f.ExtraLength
	}
	if c.s.draining.Load() || !st.chunked {
		c.keep = false
	}
	st.buf = c.head(c.out[:0], 200, "text/event-stream; charset=utf-8", length)
	if !st.chunked && length < 0 { // HTTP/1.0: the end of the connection ends the body
		st.buf = bytes.Replace(st.buf, []byte("transfer-encoding: chunked\r\n"), nil, 1)
	}
	st.buf = append(st.buf, "\r\n"...)
	if !c.s.opt.Instant {
		st.flush()
	}
	st.strike()
	return st
}

// data writes an event without a name.
func (st *stream) data(data []byte) { st.event("", data) }

// event writes an event whose data is one line.
func (st *stream) event(name string, data []byte) {
	if st.err != nil {
		return
	}
	if d := st.c.f.EventDelay; d > 0 && st.events > 0 {
		if st.flush(); st.err == nil {
			st.err = st.c.pause(time.Duration(d))
		}
		if st.err != nil {
			return
		}
	}
	line := "\n"
	if st.c.f.CRLF {
		line = "\r\n"
	}
	size := len("data: ") + len(data) + 2*len(line)
	if name != "" {
		size += len("event: ") + len(name) + len(line)
	}
	if st.c.f.Comments {
		size += len(": ping") + 2*len(line)
	}
	b := st.buf
	if st.chunked {
		b = append(strconv.AppendUint(b, uint64(size), 16), "\r\n"...)
	}
	if st.c.f.Comments {
		b = append(append(append(b, ": ping"...), line...), line...)
	}
	if name != "" {
		b = append(append(append(b, "event: "...), name...), line...)
	}
	b = append(append(b, "data: "...), data...)
	b = append(append(b, line...), line...)
	if st.chunked {
		b = append(b, "\r\n"...)
	}
	st.buf = b
	st.events++
	st.strike()
}

// strike breaks the stream off when its time has come.
func (st *stream) strike() {
	if st.err == nil && st.a.broken != "" && st.events == st.c.f.BreakAfter {
		if err := st.c.breakOff(st.a, st); st.err == nil {
			st.err = err
		}
	}
}

func (st *stream) flush() {
	if st.err == nil && len(st.buf) > 0 {
		st.err = st.c.write(st.buf)
		st.buf = st.buf[:0]
	}
}

// close ends the body.
func (st *stream) close() error {
	if st.err == nil && st.chunked {
		st.buf = append(st.buf, "0\r\n\r\n"...)
	}
	st.flush()
	st.c.out = st.buf
	if st.err == nil && st.c.f.ExtraLength > 0 {
		st.err = st.c.short()
	}
	return st.err
}
