package proxy

import (
	"strconv"

	"github.com/valyala/fasthttp"
)

// Gateways that stand before each other count in a header field how many of them a
// request has passed, so that one whose way leads in a circle ends.

const (
	hopsHeader = "X-Kvgate-Hops"
	// unsentHeader tells the gateway in front, and nobody else, that no replica has
	// seen the request, so that it may be sent elsewhere.
	unsentHeader = "x-kvgate-unsent"
)

// maxHops is what limits.hops can be, and what a larger number in a request counts as.
const maxHops = 999

// parseHops reads the number of gateways passed; what is no number counts as none,
// as no gateway has written it.
func parseHops(value []byte) int {
	n, ok := parseLength(value)
	if !ok {
		return 0
	}
	return int(min(n, maxHops))
}

// circles refuses a request that has passed too many gateways.
func (x *exchange) circles() *refusal {
	if limit := x.live.settings.Limits.Hops; x.hops >= limit {
		return x.unread(&refusal{status: fasthttp.StatusLoopDetected, code: "loop_detected",
			message: "the request has passed " + strconv.Itoa(x.hops) + " gateways (limits.hops): a replica or cluster of one of them leads back to it"})
	}
	return nil
}
