package proxy

import (
	"time"

	"kvgate/routing"
)

// phase says how far a request came.
type phase uint8

const (
	phaseRead    phase = iota // reading the request
	phaseRoute                // parsing and deciding
	phaseConnect              // dialling or taking a pooled connection, sending
	phaseHeader               // waiting for the response head
	phaseStream               // body on its way
	phaseDone
)

var phaseNames = [...]string{"read", "route", "connect", "header-wait", "stream", "done"}

func (p phase) String() string { return phaseNames[p] }

// record is what is known of one request when it ends: the source of its
// metrics and of its access line. One per request, inside the pooled exchange.
type record struct {
	start    time.Time // head read
	parsed   time.Time // body read and scanned
	routed   time.Time // replica picked
	sent     time.Time // request written to the replica
	header   time.Time // response head read
	firstTok time.Time // first content event, zero when there was none
	end      time.Time

	id       string // x-request-id
	client   string // host:port
	key      string // name of the API key, "" without one
	method   string
	route    string // template, never the raw path
	model    string // "" when unknown
	replica  string // name of the last replica tried
	endpoint *routing.Endpoint

	status    int    // as sent to the client; 499 when it left before a head
	bytesIn   int64  // request body
	bytesOut  int64  // response body
	events    int64  // events of a stream
	stream    bool   // the answer is an event stream
	phase     phase  // where it ended
	reroutes  int    // other replicas tried after a failed attempt
	resends   int    // stale pooled connections replaced
	clientEnd bool   // the client left first
	err       string // reason: "", connect, timeout, reset, truncated, poisoned, canceled, panic ...

	promptTokens, cachedTokens, outputTokens int64 // from usage; -1 when not told

	matchBlocks, totalBlocks int // the index's prediction for the picked replica
	predictedTokens          int64
	hashedTokens             int64
	reason                   string // pick reason
	ties                     int
}
