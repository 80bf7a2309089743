package proxy

import (
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"strconv"
	"time"
	"unsafe"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"kvgate/routing"
)

// exchange is one request and its answer, from the request's head to the last
// byte that the client takes. end is the one place where it ends. It is pooled: nothing of it is used behind end.
type exchange struct {
	s     *Server
	live  *live // settings in force when the request came
	c     *conn
	ctx   *fasthttp.RequestCtx // while the handler runs
	route *route
	rec   record

	fields   []field // of the request's head
	path     []byte
	origin   []byte    // path and query, as they are sent on
	hops     int       // gateways that the request has passed
	declared int64     // Content-Length, -1 for a chunked body, 0 for none
	body     held      // the request's body, or the first part of it
	rest     io.Reader // what of a form was not read yet
	spent    bool      // some of it was sent on: the request cannot be sent again
	req      routing.Request
	key      *apiKey // of the client, nil when none is asked for
	doubt    bool    // the replica may read another model than was found
	lease    *routing.Lease
	opening  []byte // begin of the body as it is sent on, in place of the first cut bytes
	cut      int
	head     []byte // scratch: the request's head as it is sent on
	names    []byte // scratch: the request's model and salt, when its body is gone

	up         *upConn
	resp       response
	answer     body
	tap        tap
	chunked    bool // the client gets chunks
	untilClose bool // the end of the connection is the end of the answer

	counted bool // in the gauges
	charged bool // among the running requests of the key
	whole   bool // the answer was read to its clean end
	outcome routing.Outcome

	ids []byte // memory for request ids: never written twice, so ids may outlive the exchange
}

// Reasons for which an answer breaks off, as metrics and logs name them.
const (
	reasonConnect   = "connect"
	reasonTimeout   = "timeout"
	reasonReset     = "reset"
	reasonTruncated = "truncated"
	reasonMalformed = "malformed"
	reasonHead      = "header_too_large"
	reasonRefused   = "refused"
	reasonEngine    = "error_event"
	reasonStatus    = "5xx"
	reasonCanceled  = "canceled"
	reasonShutdown  = "shutdown"
	reasonPanic     = "panic"
	reasonSlow      = "slow_client"
)

// begin opens the exchange of a request whose head was read.
func (s *Server) begin(ctx *fasthttp.RequestCtx, c *conn) *exchange {
	x, ok := s.exchanges.Get().(*exchange)
	if !ok {
		x = &exchange{s: s}
		x.body.pool = &s.buffers
	}
	x.live = s.live.Load()
	x.c, x.ctx = c, ctx
	x.route = &unknownRoute
	x.declared, x.hops = 0, 0
	x.rec = record{start: c.since, client: c.remote, promptTokens: -1, cachedTokens: -1, outputTokens: -1}
	x.outcome = routing.Canceled
	x.chunked, x.untilClose = false, false
	x.counted, x.charged, x.whole, x.spent, x.doubt = false, false, false, false, false
	x.answer = body{}
	x.opening, x.cut = x.opening[:0], 0
	return x
}

// end closes the exchange. It is called once, on every way a request can take.
func (x *exchange) end() {
	s, rec := x.s, &x.rec
	rec.end = time.Now()
	x.c.answered(rec.end)
	s.watcher.end(x.c)
	switch {
	case x.c.wasCut():
		rec.err, rec.clientEnd, x.outcome = reasonShutdown, false, routing.Canceled
		if rec.header.IsZero() {
			rec.status = fasthttp.StatusServiceUnavailable
		}
	case rec.clientEnd:
		x.outcome = routing.Canceled
		if rec.err == "" {
			rec.err = reasonCanceled
		}
		if rec.header.IsZero() {
			rec.status = statusClientLeft
		}
	}
	x.release(x.whole && x.answer.done && x.resp.keep && x.up != nil && x.up.leftover() == 0 && !x.c.wasCut())
	if l := x.lease; l != nil {
		l.Output = x.tap.usage.output
		l.Usage(x.tap.usage.prompt, x.tap.usage.cached)
		l.Done(x.outcome)
		x.lease = nil
	}
	x.body.release()
	s.o.Metrics.observe(rec)
	s.access.write(rec)
	if x.charged {
		x.key.running.Add(-1)
	}
	if x.counted {
		s.o.Metrics.inFlight(x.route.index, -1)
		s.begun.Add(-1)
	}
	x.recycle()
}

// recycle empties the exchange for its next use.
func (x *exchange) recycle() {
	x.c, x.ctx, x.live, x.rest, x.route, x.key = nil, nil, nil, nil, nil, nil
	x.path, x.origin = nil, nil
	clear(x.fields[:cap(x.fields)])
	x.fields = x.fields[:0]
	x.resp.fields = x.resp.fields[:0]
	x.req.Reset()
	x.tap.reset(endingNone)
	x.rec = record{}
	x.s.exchanges.Put(x)
}

// statusClientLeft is what logs and metrics show when the client left before it
// got a status.
const statusClientLeft = 499

// release gives the replica's connection back, or closes it: an answer that was
// not read to its end is never drained, as the engine would go on generating.
func (x *exchange) release(clean bool) {
	c := x.up
	if c == nil {
		return
	}
	x.up = nil
	x.c.detach()
	if clean {
		c.pool.put(c, x.rec.end)
		return
	}
	if x.answer.done && c.leftover() > 0 {
		x.s.o.Metrics.upstreamError(c.pool.endpoint, "poisoned")
	}
	c.drop()
}

// wholeAnswer is the size up to which a plain answer waits for its body, so that
// both go out in one write.
const wholeAnswer = 8 << 10

// stream sends the answer, one write per read from the replica: the head with the
// first payload, or alone when that is not there yet. An answer that broke off has no
// terminator; its connection is closed.
func (x *exchange) stream() {
	c := x.up
	x.answer.reset(x.resp.kind, x.resp.length)
	x.rec.phase = phaseStream
	c.until, c.stall = time.Time{}, x.live.upstream.StreamTimeout
	from, to, _ := x.answer.take(c) // an error comes again
	for first := true; ; first = false {
		var err error
		switch {
		case to > from:
			err = x.write(first, from, to)
			x.look(c.buf.b[from:to]) // the client need not wait for it
		case first:
			err = x.c.send(x.head)
		}
		if err != nil {
			x.lost(err)
			x.hangUp()
			return
		}
		if from, to, err = x.answer.next(c); err != nil {
			if errors.Is(err, io.EOF) {
				err = x.finish()
			}
			if err == nil {
				x.terminate()
				return
			}
			x.broke(err)
			x.hangUp()
			return
		}
		x.c.clock = c.lastRead
	}
}

// write sends a payload, framed where it lies if it is to be, and behind the head if it is the first.
func (x *exchange) write(first bool, from, to int) error {
	b := x.up.buf.b
	if x.chunked {
		var line [headroom]byte
		size := append(strconv.AppendUint(line[:0], uint64(to-from), 16), "\r\n"...)
		from -= copy(b[from-len(size):], size)
		to += copy(b[to:], "\r\n")
	}
	switch {
	case !first:
		return x.c.send(b[from:to])
	case to-from <= wholeAnswer+headroom+tailroom: // to copy it costs less than another write
		x.head = append(x.head, b[from:to]...)
		return x.c.send(x.head)
	}
	if err := x.c.send(x.head); err != nil {
		return err
	}
	return x.c.send(b[from:to])
}

// terminate ends a whole answer.
func (x *exchange) terminate() {
	if x.chunked {
		if err := x.c.send(chunkedEnd); err != nil {
			x.hangUp() // the client has it all
		}
	}
}

var chunkedEnd = []byte("0\r\n\r\n")

// hangUp has the connection closed behind an answer that is not whole.
func (x *exchange) hangUp() {
	x.ctx.SetConnectionClose()
	if x.untilClose {
		x.c.reset = !x.rec.clientEnd // anything else could be read as the end of the answer
	}
}

// look shows the payload to the tap.
func (x *exchange) look(p []byte) {
	x.rec.bytesOut += int64(len(p))
	switch {
	case x.rec.stream:
		if x.tap.feed(p) {
			x.rec.firstTok = x.up.lastRead
			x.lease.FirstToken()
		}
	case x.resp.encoded:
	case x.tap.line.size == 0 && x.answer.done:
		begin, end := textParts(p, int64(len(p)))
		readUsage(begin, &x.tap.usage)
		readUsage(end, &x.tap.usage)
	default:
		x.tap.line.add(p)
	}
}

// finish judges an answer whose transport ended cleanly; errTruncated when it is not whole all the same.
func (x *exchange) finish() error {
	t := &x.tap
	x.rec.phase = phaseDone
	if !x.rec.stream {
		begin, end := t.line.parts()
		readUsage(begin, &t.usage)
		readUsage(end, &t.usage)
		x.told()
		x.complete()
		return nil
	}
	t.finish()
	x.told()
	if x.resp.status == fasthttp.StatusOK && x.route.ending != endingNone && !t.ended && !t.errored {
		x.rec.phase = phaseStream
		return errTruncated
	}
	if t.failed {
		x.rec.err = reasonEngine
		x.s.o.Metrics.upstreamError(x.lease.Endpoint, reasonEngine)
		x.whole, x.outcome = true, routing.Failed
		return nil
	}
	x.complete()
	return nil
}

// told takes over what the answer told of itself.
func (x *exchange) told() {
	x.rec.events = x.tap.events
	x.rec.promptTokens, x.rec.cachedTokens, x.rec.outputTokens = x.tap.usage.prompt, x.tap.usage.cached, x.tap.usage.output
}

// complete notes that the answer was whole.
func (x *exchange) complete() {
	x.whole = true
	switch status := x.resp.status; {
	case status < 500 || status == fasthttp.StatusNotImplemented:
		x.outcome = routing.Completed
	case status == fasthttp.StatusServiceUnavailable:
		x.outcome = routing.Refused
	default:
		x.outcome = routing.Failed
		x.rec.err = reasonStatus
		x.s.o.Metrics.upstreamError(x.lease.Endpoint, reasonStatus)
	}
}

// broke notes that the replica broke its answer off, or that the client left
// and the connection was closed under the read.
func (x *exchange) broke(err error) {
	between := x.rec.stream && x.chunked && x.tap.boundary()
	x.tap.finish()
	between = between && !x.tap.ended && !x.tap.errored // the client has its last event
	x.told()
	if x.c.left() {
		x.rec.clientEnd = true
		return
	}
	x.outcome = routing.Failed
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		x.rec.err = reasonTimeout
	case errors.Is(err, errTruncated), errors.Is(err, io.ErrUnexpectedEOF):
		x.rec.err = reasonTruncated
	case errors.Is(err, errChunk):
		x.rec.err = reasonMalformed
	default:
		x.rec.err = reasonReset
	}
	x.s.o.Metrics.upstreamError(x.lease.Endpoint, x.rec.err)
	if between {
		x.sayBroken()
	}
}

// sayBroken writes a last event, the API's own error, when the stream broke off
// between two events. The transport ends without its terminator all the same.
func (x *exchange) sayBroken() {
	message := "the replica broke the stream off"
	if x.rec.err == reasonTimeout {
		message = "the replica sent nothing within upstream.stream_timeout"
	}
	p := errorEvent(x.route, fasthttp.StatusBadGateway, "upstream_"+x.rec.err, message)
	_ = x.c.send(append(strconv.AppendInt(nil, int64(len(p)), 16), "\r\n"+string(p)+"\r\n"...))
}

// lost notes that the client took no more.
func (x *exchange) lost(err error) {
	x.told()
	x.rec.clientEnd = true
	if errors.Is(err, os.ErrDeadlineExceeded) {
		x.rec.err = reasonSlow
	}
}

func (x *exchange) panicked(p any) {
	x.rec.err, x.outcome, x.whole = reasonPanic, routing.Canceled, false
	x.s.log.Error("a request panicked", zap.Any("panic", p), zap.String("request_id", x.rec.id), zap.String("route", x.rec.route), zap.ByteString("stack", debug.Stack()))
}

// newID returns a fresh request id of 32 hexadecimal digits.
func (x *exchange) newID() string {
	const digits = "0123456789abcdef"
	id := x.idSpace(32)
	hi, lo := rand.Uint64(), rand.Uint64()
	for i := range 16 {
		id[i], id[16+i] = digits[hi&15], digits[lo&15]
		hi, lo = hi>>4, lo>>4
	}
	return unsafe.String(&id[0], len(id))
}

// keepID copies a client's request id.
func (x *exchange) keepID(id []byte) string {
	own := x.idSpace(len(id))
	copy(own, id)
	return unsafe.String(&own[0], len(own))
}

// idSpace returns fresh memory. It is cut from a larger piece, so that the
// common request allocates nothing.
func (x *exchange) idSpace(n int) []byte {
	if len(x.ids) < n {
		x.ids = make([]byte, 4<<10)
	}
	id := x.ids[:n:n]
	x.ids = x.ids[n:]
	return id
}
