// Package proxy carries the bytes: it reads requests, has them routed, sends them
// to the picked replica and streams the answer back, untouched. It also serves
// the operator: metrics, explanations, the state of the fleet.
package proxy

import (
	"errors"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"kvgate/routing"
)

// A request's way, from top to bottom: handle, admit, receive, parse, forward,
// attempt, relay; then exchange.stream and exchange.end in stream.go.

// handle serves one request. When it returns, the answer is in ctx, or has been
// sent already: see conn.own.
func (s *Server) handle(ctx *fasthttp.RequestCtx) {
	c, ok := ctx.Conn().(*conn)
	if !ok || !c.reading() {
		ctx.SetConnectionClose()
		return
	}
	_ = ctx.SetWriteDeadline(time.Time{}) // makes fasthttp flush this answer before it waits for a pipelined request's
	x := s.begin(ctx, c)
	defer x.handled()
	r := x.admit()
	x.count()
	if r != nil {
		x.refuse(r)
		return
	}
	if x.route.kind != kindProxy || x.rec.method == "OPTIONS" {
		x.answerOwn()
		return
	}
	if r := x.charge(); r != nil {
		x.refuse(r)
		return
	}
	if r := x.receive(); r != nil {
		x.refuse(r)
		return
	}
	if x.rest == nil {
		s.watcher.begin(c)
	}
	router := s.o.Router.Load()
	r = x.parse(router)
	if r == nil {
		r = x.permit()
	}
	if r == nil {
		r = x.control()
	}
	if r != nil {
		x.refuse(x.unsent(r))
		return
	}
	x.rec.parsed = time.Now()
	x.rec.phase = phaseRoute
	x.rec.model = s.o.Fleet.KnownModel(x.req.Model)
	x.forward(router)
}

// handled ends the exchange.
func (x *exchange) handled() {
	if p := recover(); p != nil {
		x.panicked(p)
		if x.c.owns {
			x.hangUp()
		} else {
			x.refuse(refusePanic)
		}
	}
	x.end()
}

// refuse answers in place of a replica.
func (x *exchange) refuse(r *refusal) {
	r.write(x.ctx, x.route.dialect, x.rec.id)
	x.rec.status = r.status
	if r.unsent && x.hops > 0 {
		x.ctx.Response.Header.Set(unsentHeader, "1")
	}
	if r.hangUp {
		x.c.linger = true
	}
	if x.s.draining.Load() {
		x.ctx.SetConnectionClose()
	}
}

// clientLeft ends a request whose client is no longer there.
func (x *exchange) clientLeft() {
	x.rec.clientEnd = true
	x.rec.status = statusClientLeft
	x.ctx.SetStatusCode(statusClientLeft)
	x.ctx.SetConnectionClose()
}

// errorHandler answers what fasthttp could not read.
func (s *Server) errorHandler(ctx *fasthttp.RequestCtx, err error) {
	c, ok := ctx.Conn().(*conn)
	if !ok {
		return
	}
	c.reading()
	x := s.begin(ctx, c)
	defer x.handled()
	_, x.rec.method = methodOf(ctx.Method())
	x.rec.route = x.route.template
	x.rec.id = x.newID()
	x.count()
	var small *fasthttp.ErrSmallBuffer
	switch {
	case errors.As(err, &small):
		x.refuse(refuseHeadSize)
	case errors.Is(err, os.ErrDeadlineExceeded):
		x.refuse(refuseSlow)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		x.clientLeft()
	case c.framing.refused:
		x.refuse(refuseFraming)
	default:
		x.refuse(refuseHead)
	}
}

// expect decides on a request that waits for a 100 before it sends its body.
func (s *Server) expect(ctx *fasthttp.RequestCtx) int {
	c, ok := ctx.Conn().(*conn)
	if !ok || !c.reading() {
		return fasthttp.StatusServiceUnavailable
	}
	x := s.begin(ctx, c)
	r := x.admit()
	if r == nil {
		r = x.wouldCharge()
	}
	if r != nil {
		defer x.handled()
		x.count()
		x.refuse(r)
		return r.status
	}
	x.recycle() // handle begins it again
	return fasthttp.StatusContinue
}

// count takes the request into the gauges.
func (x *exchange) count() {
	x.counted = true
	x.s.begun.Add(oneRequest)
	x.s.o.Metrics.inFlight(x.route.index, 1)
}

// admit judges a request by its head alone.
func (x *exchange) admit() *refusal {
	h := &x.ctx.Request.Header
	bit, method := methodOf(h.Method())
	x.rec.method = method
	framed := x.readHead(h.RawHeaders())
	if x.c.trusted {
		x.rec.client = x.clientAddress()
	}
	path, origin, refused := target(h.RequestURI(), h.Host())
	if refused == nil {
		x.path, x.origin = path, origin
		x.route = x.s.routes.find(path, x.live.settings.Routes.Passthrough)
	}
	x.rec.route = x.route.template
	if id := x.field(fieldRequestID); validRequestID(id) {
		x.rec.id = x.keepID(id)
	} else {
		x.rec.id = x.newID()
	}
	rt := x.route
	switch {
	case framed != nil:
		return framed
	case refused != nil:
		return refused
	case rt == &unknownRoute:
		return x.unread(refuseRoute)
	case bit == methodOptions:
	case rt.methods&bit == 0:
		return x.unread(&refusal{status: fasthttp.StatusMethodNotAllowed, code: "method_not_allowed", allow: rt.methods,
			message: method + " is not allowed here: use " + rt.methods.allow()})
	}
	if bit != methodOptions {
		if r := x.authenticate(); r != nil {
			return r
		}
	}
	if rt.kind == kindProxy && rt.blocks == blocksUnsalted && x.tenant() {
		return x.unread(refuseUnsalted)
	}
	if rt.kind == kindRefused {
		return x.unread(&refusal{status: fasthttp.StatusNotImplemented, code: "not_supported", message: rt.remedy})
	}
	if rt.kind == kindProxy && bit != methodOptions {
		if r := x.circles(); r != nil {
			return r
		}
	}
	if rt.kind == kindProxy && bit != methodOptions && x.s.late.Load() {
		return refuseDraining
	}
	if (rt.reading == readNone || bit == methodOptions) && x.declared != 0 {
		return refuseNoBody
	}
	if x.declared > x.bodyLimit() {
		return x.tooLarge()
	}
	if e := x.field(fieldContentEncoding); len(e) > 0 && !equalFold(e, "identity") && rt.reading == readJSON {
		return refuseEncoding
	}
	return nil
}

// unread returns the refusal of a request whose body, if it has one, is not read.
func (x *exchange) unread(r *refusal) *refusal {
	if x.declared == 0 || r.hangUp {
		return r
	}
	closing := *r
	closing.hangUp = true
	return &closing
}

// readHead splits the head into fields and judges its framing.
func (x *exchange) readHead(raw []byte) *refusal {
	var err error
	if x.fields, err = parseFields(raw, x.fields[:0]); err != nil {
		return refuseFraming
	}
	if len(x.fields) > maxFields {
		return refuseFields
	}
	lengths, codings, hosts := 0, 0, 0
	for i := range x.fields {
		f := &x.fields[i]
		switch f.id {
		case fieldContentLength:
			n, ok := parseLength(f.value)
			if lengths++; !ok || lengths > 1 {
				return refuseFraming
			}
			x.declared = n
		case fieldTransferEncoding:
			if codings++; codings > 1 || !equalFold(f.value, "chunked") || !x.ctx.Request.Header.IsHTTP11() {
				return refuseFraming
			}
			x.declared = -1
		case fieldHost:
			hosts++
		case fieldHops:
			x.hops = max(x.hops, parseHops(f.value))
		case fieldExpect:
			if len(f.value) > 0 && !equalFold(f.value, "100-continue") {
				return refuseExpect
			}
		}
	}
	if lengths > 0 && codings > 0 || hosts > 1 {
		return refuseFraming
	}
	dropNamed(x.fields)
	return nil
}

// field returns the first field with the id, nil when there is none.
func (x *exchange) field(id fieldID) []byte {
	for i := range x.fields {
		if x.fields[i].id == id {
			return x.fields[i].value
		}
	}
	return nil
}

// Header implements routing.Headers.
func (x *exchange) Header(name string) []byte {
	for i := range x.fields {
		if equalFold(x.fields[i].name, name) {
			return x.fields[i].value
		}
	}
	return nil
}

// receive reads the body: whole, or of a form as much as it takes to find the model.
func (x *exchange) receive() *refusal {
	if x.declared == 0 {
		return nil
	}
	in := x.ctx.RequestBodyStream()
	if in == nil {
		return refuseBodyRead
	}
	reading := x.route.reading
	boundary := formBoundary(x.field(fieldContentType))
	if reading == readAny && boundary != nil {
		reading = readForm
	}
	if reading == readForm && x.key.restricted() {
		reading = readAny // whole: another model further down must not go unseen
	}
	limit := int(x.bodyLimit())
	most := limit + 1
	if reading == readForm {
		limit = min(limit, formHead)
		most = limit
	}
	scanned := 0
	for {
		room, err := x.body.space(int(max(x.declared, 0)), most)
		if err != nil {
			return refuseBudget
		}
		n, err := in.Read(room)
		x.body.n += n
		x.rec.bytesIn += int64(n)
		switch {
		case errors.Is(err, io.EOF):
			if x.declared > 0 && int64(x.body.n) < x.declared {
				return x.bodyLost(io.ErrUnexpectedEOF)
			}
			return nil
		case err != nil:
			return x.bodyLost(err)
		}
		if reading != readForm {
			if x.body.n > limit {
				return x.tooLarge()
			}
			continue
		}
		if x.body.n-scanned >= formStep || x.body.n >= limit {
			scanned = x.body.n
			if _, found := formModel(x.body.bytes(), boundary); found || x.body.n >= limit {
				x.rest = in
				return nil
			}
		}
	}
}

// bodyLost says why a body could not be read.
func (x *exchange) bodyLost(err error) *refusal {
	switch {
	case x.c.left(), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF), isReset(err):
		x.rec.clientEnd = true
		gone := *refuseBodyRead
		gone.status = statusClientLeft
		return &gone
	case errors.Is(err, os.ErrDeadlineExceeded):
		return refuseSlow
	}
	return refuseBodyRead
}

// parse finds what the decision needs in the body.
func (x *exchange) parse(router *routing.Router) *refusal {
	rt, req := x.route, &x.req
	req.Reset()
	req.Headers = x
	body := x.body.bytes()
	boundary := formBoundary(x.field(fieldContentType))
	switch rt.reading {
	case readNone, readForm, readAny:
		req.AnyModel = rt.reading != readForm
		if boundary != nil {
			model, _ := formModel(body, boundary)
			req.Model = append(req.Model, model...)
			x.doubt = x.key.restricted() && doubtful(body, boundary)
		} else if len(body) > 0 {
			req.Body, req.Watch = body, x.live.watch
			if err := req.Parse(); err != nil {
				if x.mustRead() {
					return unreadable(err)
				}
				req.Reset()
				req.Headers, req.AnyModel = x, true
			}
		}
		if len(req.Model) == 0 && (len(body) == 0 || !x.key.restricted()) {
			req.Model = appendQuery(req.Model, x.origin[len(x.path):], "model")
		}
		return nil
	}
	api, ok := router.Parser(rt.api)
	if !ok {
		return refuseParser
	}
	req.API, req.Body, req.Memo, req.Watch = api, body, router.Memo(), x.live.watch
	if err := req.Parse(); err != nil {
		if api != rt.api && !x.mustRead() { // only the passthrough parser takes it
			req.Reset()
			req.Headers, req.AnyModel = x, true
			return nil
		}
		return unreadable(err)
	}
	if rt.api == routing.APIResponses {
		return x.storedResponse()
	}
	return nil
}

// storedResponse refuses what needs a response that one replica has stored. Of equal
// fields the last one counts, and vLLM takes more than true for true.
func (x *exchange) storedResponse() *refusal {
	previous, background := false, false
	for _, m := range x.req.Found {
		value := x.req.Body[m.Value:m.To]
		switch m.Field - x.live.firstOther {
		case watchPrevious:
			previous = string(value) != "null"
		case watchBackground:
			background = string(value) != "null" && string(value) != "false"
		}
	}
	switch {
	case previous:
		return refusePrevious
	case background:
		return refuseBackground
	}
	return nil
}

// forward has the request routed and sent, on a second replica when the first
// could not take it, and hands the answer on.
func (x *exchange) forward(router *routing.Router) {
	lease, err := router.Route(&x.req)
	if err != nil {
		switch {
		case errors.Is(err, routing.ErrCanceled):
			x.clientLeft()
			return
		case x.rest != nil && errors.Is(err, routing.ErrModelMissing):
			x.refuse(refuseFormModel)
			return
		}
		x.refuse(x.unsent(routingRefusal(err, x.req.Model)))
		return
	}
	for {
		x.lease = lease
		x.picked()
		err := x.attempt()
		e := lease.Endpoint
		if err == nil {
			if x.resp.status != fasthttp.StatusServiceUnavailable && !x.resp.unsent {
				break
			}
			x.s.o.Metrics.upstreamError(e, reasonRefused)
			lease.Done(routing.Refused)
			if next := x.reroute(router); next != nil {
				x.rec.end = x.up.lastRead
				x.release(x.rejected())
				lease = next
				continue
			}
			break
		}
		x.release(false)
		switch r := clientRefusal(err); {
		case r != nil:
			x.refuse(r)
			return
		case x.c.left():
			x.clientLeft()
			return
		}
		reason, refused := attemptError(err)
		if reason == reasonConnect {
			e.SetReachable(false)
			lease.Done(routing.Unsent)
			if next := x.reroute(router); next != nil {
				x.s.o.Metrics.upstreamError(e, reason)
				lease = next
				continue
			}
		}
		x.fail(reason, refused)
		return
	}
	x.rec.err = ""
	x.relay()
}

// fail answers for a replica that gave no answer.
func (x *exchange) fail(reason string, r *refusal) {
	x.s.o.Metrics.upstreamError(x.lease.Endpoint, reason)
	x.rec.err, x.outcome = reason, routing.Failed
	x.refuse(x.unsent(r))
}

// unsent closes the connection behind the answer when the body was not read to its end.
func (x *exchange) unsent(r *refusal) *refusal {
	if x.rest == nil {
		return r
	}
	closing := *r
	closing.hangUp = true
	return &closing
}

// reroute asks for another replica: once, and only while the body can be sent
// again and the client is there.
func (x *exchange) reroute(router *routing.Router) *routing.Lease {
	if x.rec.reroutes > 0 || x.spent || x.c.left() {
		return nil
	}
	if !x.s.mayReroute() {
		return nil
	}
	x.req.Exclude = append(x.req.Exclude, x.lease.Endpoint)
	lease, err := router.Route(&x.req)
	if err != nil {
		x.s.reroutes.giveBack()
		return nil
	}
	x.rec.reroutes++
	x.s.o.Metrics.retry("reroute")
	return lease
}

// picked notes what the decision said.
func (x *exchange) picked() {
	l, rec := x.lease, &x.rec
	rec.routed = time.Now()
	rec.phase = phaseConnect
	rec.endpoint, rec.replica = l.Endpoint, l.Endpoint.DisplayName()
	rec.model = x.s.o.Fleet.KnownModel(x.req.Model)
	rec.matchBlocks, rec.totalBlocks = l.Matched, l.Total
	rec.predictedTokens, rec.hashedTokens = l.PredictedTokens(), l.HashedTokens()
	rec.reason, rec.ties = l.Reason.String(), l.Ties
}

// attemptError turns the error of an attempt into its reason and its answer.
func attemptError(err error) (string, *refusal) {
	switch {
	case errors.Is(err, errDial):
		return reasonConnect, refuseConnect
	case errors.Is(err, os.ErrDeadlineExceeded):
		return reasonTimeout, refuseTimeout
	case errors.Is(err, errHeadSize):
		return reasonHead, refuseAnswer
	case errors.Is(err, errAnswer):
		return reasonMalformed, refuseAnswer
	}
	return reasonReset, refuseReset
}

// attempt sends the request to the leased replica and reads the head of its
// answer. A reused connection that fails before the first byte of an answer is
// replaced once: the replica had closed it.
func (x *exchange) attempt() error {
	pool, err := x.s.transport.pool(x.lease.Endpoint)
	if err != nil {
		return errors.Join(errDial, err)
	}
	streamed := x.rest != nil
	for try := 0; ; try++ {
		var c *upConn
		if try == 0 && !streamed {
			c = pool.reuse(x.rec.routed, x.live.upstream.IdleTimeout)
		}
		if c == nil {
			if c, err = pool.dial(x.live.upstream, x.c.attach, x.c.detach); err != nil {
				return err
			}
		}
		c.open()
		if !x.c.attach(c) {
			c.drop()
			return errLeft
		}
		x.up = c
		if err = x.exchangeHead(c); err == nil {
			x.lease.Endpoint.SetReachable(true)
			return nil
		}
		stale := c.reused && !c.answered && !errors.Is(err, os.ErrDeadlineExceeded)
		x.release(false)
		if !stale || try > 0 || x.c.left() {
			return err
		}
		x.rec.resends++
		x.s.o.Metrics.retry("resend")
	}
}

// exchangeHead sends the request and reads the head of the answer, past interim ones.
func (x *exchange) exchangeHead(c *upConn) error {
	l := x.live.upstream
	x.answer = body{}
	x.rec.phase = phaseConnect
	x.buildHead(c.pool)
	var err error
	if x.rest != nil {
		err = x.sendForm(c)
	} else {
		err = c.send(x.rec.routed, x.head, x.body.bytes()[x.cut:], l.StreamTimeout, false)
	}
	x.rec.sent = time.Now()
	early := err != nil
	wait := l.HeaderTimeout
	switch {
	case early && (clientRefusal(err) != nil || x.c.left()):
		return err
	case early && errors.Is(err, os.ErrDeadlineExceeded):
		return err
	case early:
		wait = earlyWait // it may have answered before it hung up
	}
	x.rec.phase = phaseHeader
	c.until = x.rec.sent.Add(wait)
	for {
		head, readErr := c.readHead(l.head)
		if readErr == nil {
			readErr = x.resp.parse(head, x.rec.method == "HEAD")
		}
		if readErr != nil {
			if early && !errors.Is(err, errEarly) {
				return err
			}
			return readErr
		}
		if x.resp.status >= 200 {
			break
		}
		if x.resp.status == fasthttp.StatusSwitchingProtocols {
			return errAnswer
		}
	}
	x.resp.keep = x.resp.keep && !early
	x.rec.header, x.c.clock = c.lastRead, c.lastRead
	return nil
}

// rejected consumes the body of an answer that is not handed on, when all of it
// has arrived, and says whether the connection is clean.
func (x *exchange) rejected() bool {
	x.answer.reset(x.resp.kind, x.resp.length)
	for {
		from, to, err := x.answer.take(x.up)
		if err != nil || x.answer.done || from == to {
			return err == nil && x.answer.done && x.resp.keep && x.up.leftover() == 0
		}
	}
}

// buildHead writes the request's head from what was parsed: no framing, no
// hop-by-hop and no internal field of the client's gets through.
func (x *exchange) buildHead(p *pool) {
	b := append(x.head[:0], x.ctx.Request.Header.Method()...)
	b = append(b, ' ')
	b = append(b, x.origin...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, p.authority...)
	b = append(b, "\r\n"...)
	key := x.live.upstream.credentials(p.endpoint).Authorization
	for i := range x.fields {
		f := &x.fields[i]
		switch f.id {
		case fieldHop, fieldInternal, fieldHost, fieldContentLength, fieldTransferEncoding, fieldConnection, fieldExpect, fieldRequestID, fieldHops, fieldForwardedFor:
			continue
		case fieldAcceptEncoding:
			if x.route.streams {
				continue
			}
		case fieldForwarded:
			if !x.c.trusted {
				continue
			}
		case fieldAuthorization, fieldAPIKey:
			if key != "" || x.live.keys != nil {
				continue
			}
		}
		b = appendField(b, f.name, f.value)
	}
	if x.route.streams {
		b = append(b, "Accept-Encoding: identity\r\n"...)
	}
	if key != "" {
		b = append(b, "Authorization: "...)
		b = append(b, key...)
		b = append(b, "\r\n"...)
	}
	b = append(b, "X-Request-Id: "...)
	b = append(b, x.rec.id...)
	b = append(b, "\r\n"+hopsHeader+": "...)
	b = strconv.AppendInt(b, int64(x.hops)+1, 10)
	b = append(b, "\r\nX-Forwarded-For: "...)
	for i := range x.fields {
		if x.c.trusted && x.fields[i].id == fieldForwardedFor && len(x.fields[i].value) > 0 {
			b = append(b, x.fields[i].value...)
			b = append(b, ", "...)
		}
	}
	b = append(b, x.c.ip...)
	switch {
	case x.rest != nil && x.declared < 0:
		b = append(b, "\r\nTransfer-Encoding: chunked"...)
	case x.rest != nil:
		b = append(b, "\r\nContent-Length: "...)
		b = strconv.AppendInt(b, x.declared, 10)
	case x.body.n > 0 || x.ctx.Request.Header.IsPost() || x.ctx.Request.Header.IsPut() || x.ctx.Request.Header.IsPatch():
		b = append(b, "\r\nContent-Length: "...)
		b = strconv.AppendInt(b, int64(len(x.opening)+x.body.n-x.cut), 10)
	}
	b = append(b, "\r\n\r\n"...)
	x.head = append(b, x.opening...)
}

func appendField(b, name, value []byte) []byte {
	b = append(b, name...)
	b = append(b, ": "...)
	b = append(b, value...)
	return append(b, "\r\n"...)
}

// wait reads a small plain answer whole before anything is sent, so that a
// replica which breaks it off can still be answered for.
func (x *exchange) wait() error {
	if x.resp.kind != bodyLength || x.resp.length > wholeAnswer || x.resp.events {
		return nil
	}
	c := x.up
	c.until, c.stall = time.Time{}, x.live.upstream.StreamTimeout
	for int64(c.w-c.r) < x.resp.length {
		if err := c.fill(); err != nil {
			return err
		}
	}
	return nil
}

// lostWhileWaiting answers for a replica that broke a small plain answer off.
func (x *exchange) lostWhileWaiting(err error) {
	x.release(false)
	if x.c.left() {
		x.clientLeft()
		return
	}
	reason, refused := attemptError(err)
	if errors.Is(err, io.EOF) {
		reason = reasonTruncated
	}
	x.fail(reason, refused)
}

// relay hands the answer on. It is written to the connection itself: fasthttp, which
// would keep it until the handler returns, gets to send nothing.
func (x *exchange) relay() {
	if x.c.left() {
		x.clientLeft()
		return
	}
	x.rec.status = x.resp.status
	x.rec.stream = x.resp.events && x.resp.kind != bodyEmpty
	x.answerHead()
	if !x.rec.stream {
		x.lease.FirstToken() // an engine sends a plain answer when all of it is there
	}
	x.tap.reset(x.route.ending)
	x.letBodyGo()
	if err := x.wait(); err != nil {
		x.lostWhileWaiting(err)
		return
	}
	x.c.own()
	x.stream()
}

// answerHead writes the answer's head: the replica's fields as they came, but for
// those of its connection and those that are ours. An answer of unknown length is
// chunked; an HTTP/1.0 client knows no chunks: the end of the connection is the end
// of its answer, and a reset is its failure.
func (x *exchange) answerHead() {
	request := &x.ctx.Request.Header
	x.chunked = x.resp.kind != bodyLength && x.resp.kind != bodyEmpty
	closing := request.ConnectionClose() || x.s.draining.Load()
	old := !request.IsHTTP11()
	if old && x.chunked {
		x.chunked, x.untilClose, closing = false, true, true
	}
	if unread := x.rest != nil; unread {
		closing, x.c.linger = true, true
	}
	b := append(x.head[:0], "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(x.resp.status), 10)
	b = append(b, ' ')
	b = append(b, fasthttp.StatusMessage(x.resp.status)...)
	b = append(b, "\r\n"...)
	cacheControl, buffering := false, false
	sessions := x.lease.SessionHeaders()
	for i := range x.resp.fields {
		f := &x.resp.fields[i]
		if slices.ContainsFunc(sessions, func(name string) bool { return equalFold(f.name, name) }) {
			continue
		}
		switch f.id {
		case fieldHop, fieldContentLength, fieldTransferEncoding, fieldConnection, fieldRequestID:
			continue
		case fieldLocation:
			f.value = relative(f.value, x.lease.Endpoint.URL())
		case fieldCacheControl:
			cacheControl = true
		case fieldBuffering:
			buffering = true
		case fieldInternal:
			if equalFold(f.name, replicaHeader) || x.hops == 0 && equalFold(f.name, unsentHeader) {
				continue
			}
		}
		b = appendField(b, f.name, f.value)
	}
	b = appendOwn(b, "x-request-id", x.rec.id)
	if x.live.settings.Headers.Replica {
		b = appendOwn(b, replicaHeader, x.rec.replica)
	}
	for _, name := range sessions {
		b = appendOwn(b, name, x.lease.Endpoint.SessionToken())
	}
	if x.rec.stream && !cacheControl {
		b = appendOwn(b, "Cache-Control", "no-cache")
	}
	if x.rec.stream && !buffering {
		b = appendOwn(b, "X-Accel-Buffering", "no")
	}
	switch {
	case x.chunked:
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	case x.resp.length >= 0:
		b = append(b, "Content-Length: "...)
		b = append(strconv.AppendInt(b, x.resp.length, 10), "\r\n"...)
	}
	switch {
	case closing:
		x.ctx.SetConnectionClose()
		b = append(b, "Connection: close\r\n"...)
	case old:
		b = append(b, "Connection: keep-alive\r\n"...)
	}
	x.head = append(b, "\r\n"...)
}

func appendOwn(b []byte, name, value string) []byte {
	b = append(append(b, name...), ": "...)
	return append(append(b, value...), "\r\n"...)
}

// letBodyGo gives the request's body back: an answer is there, so it is not sent
// again. What the lease still needs of it is copied.
func (x *exchange) letBodyGo() {
	r := &x.req
	n := len(r.Model)
	x.names = append(append(x.names[:0], r.Model...), r.Salt...)
	r.Model, r.Salt, r.Body = x.names[:n:n], x.names[n:], nil
	x.body.release()
}

const replicaHeader = "x-kvgate-replica"

// relative takes a replica's own address out of a redirect.
func relative(location []byte, url string) []byte {
	if len(location) > len(url) && string(location[:len(url)]) == url && location[len(url)] == '/' {
		return location[len(url):]
	}
	return location
}
