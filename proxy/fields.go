package proxy

import (
	"bytes"
	"errors"
	"strings"
)

// fieldID names the header fields that the proxy treats in a way of their own.
type fieldID uint8

const (
	fieldOther    fieldID = iota
	fieldHop              // hop-by-hop: never passed on
	fieldInternal         // of gateways and engines among themselves: never taken from a client
	fieldHost
	fieldContentLength
	fieldTransferEncoding
	fieldConnection
	fieldContentType
	fieldContentEncoding
	fieldExpect
	fieldAuthorization
	fieldAPIKey
	fieldAcceptEncoding
	fieldRequestID
	fieldHops
	fieldForwardedFor
	fieldForwarded // the others that proxies add
	fieldCacheControl
	fieldBuffering
	fieldLocation
)

// field is one line of a head. Name and value are aliases of the head.
type field struct {
	name, value []byte
	id          fieldID
}

// internalPrefixes start the names of fields with which gateways, schedulers and
// engines steer each other. A client that could send them would pick its own
// replica, rank, priority or KV source.
var internalPrefixes = [...]string{
	"x-kvgate-", "x-gateway-", "x-llm-d-", "x-prefiller-", "x-encoder-", "x-kv-cache-source-", "x-data-parallel-", "x-smg-",
}

const longestName = 40 // of the names below, with room for the prefixes

// identify returns the id of a field. Names are compared without regard to case.
func identify(name []byte) fieldID {
	var lower [longestName]byte
	n := min(len(name), longestName)
	underscore := false
	for i, c := range name[:n] {
		switch {
		case 'A' <= c && c <= 'Z':
			c += 'a' - 'A'
		case c == '_':
			underscore = true
		}
		lower[i] = c
	}
	if underscore || n < len(name) && bytes.IndexByte(name[n:], '_') >= 0 {
		return fieldInternal // a server behind may read it as the name with dashes
	}
	if n == len(name) {
		switch string(lower[:n]) {
		case "host":
			return fieldHost
		case "content-length":
			return fieldContentLength
		case "transfer-encoding":
			return fieldTransferEncoding
		case "connection":
			return fieldConnection
		case "content-type":
			return fieldContentType
		case "content-encoding":
			return fieldContentEncoding
		case "expect":
			return fieldExpect
		case "authorization":
			return fieldAuthorization
		case "x-api-key":
			return fieldAPIKey
		case "accept-encoding":
			return fieldAcceptEncoding
		case "x-request-id":
			return fieldRequestID
		case "x-kvgate-hops":
			return fieldHops
		case "x-forwarded-for":
			return fieldForwardedFor
		case "forwarded", "x-real-ip":
			return fieldForwarded
		case "cache-control":
			return fieldCacheControl
		case "x-accel-buffering":
			return fieldBuffering
		case "location":
			return fieldLocation
		case "alt-svc", "http2-settings", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer", "upgrade":
			return fieldHop
		case "x-vllm-priority", "routing-strategy", "target-pod":
			return fieldInternal
		}
	}
	if n > 2 && lower[0] == 'x' && lower[1] == '-' {
		if strings.HasPrefix(string(lower[:n]), "x-forwarded-") {
			return fieldForwarded
		}
		for _, p := range internalPrefixes {
			if strings.HasPrefix(string(lower[:n]), p) {
				return fieldInternal
			}
		}
	}
	return fieldOther
}

var errHead = errors.New("malformed head")

// token tells the bytes of which a field's name may consist (RFC 9110, 5.6.2).
var token = func() (t [256]bool) {
	for c := range t {
		t[c] = c > ' ' && c < 0x7f && !strings.ContainsRune(`"(),/:;<=>?@[\]{}`, rune(c))
	}
	return t
}()

// parseFields splits the lines of a head, each of which ends in CR LF, appending
// to dst. The empty line that ends the head may be there or not. Folded lines,
// bare line feeds, space around a name and control bytes in a value are refused.
func parseFields(head []byte, dst []field) ([]field, error) {
	for len(head) > 0 {
		end := bytes.IndexByte(head, '\n')
		if end < 1 || head[end-1] != '\r' {
			return dst, errHead
		}
		line := head[:end-1]
		head = head[end+1:]
		if len(line) == 0 {
			if len(head) > 0 {
				return dst, errHead
			}
			break
		}
		colon := 0
		for colon < len(line) && token[line[colon]] {
			colon++
		}
		if colon == 0 || colon == len(line) || line[colon] != ':' {
			return dst, errHead
		}
		value := trimSpace(line[colon+1:])
		for _, c := range value {
			if c < ' ' && c != '\t' || c == 0x7f {
				return dst, errHead
			}
		}
		dst = append(dst, field{line[:colon], value, identify(line[:colon])})
	}
	return dst, nil
}

// trimSpace removes optional whitespace: spaces and tabs.
func trimSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// nextItem cuts the first item off a comma-separated list.
func nextItem(list []byte) (item, rest []byte) {
	if i := bytes.IndexByte(list, ','); i >= 0 {
		return trimSpace(list[:i]), list[i+1:]
	}
	return trimSpace(list), nil
}

// dropNamed marks the fields that a Connection field names as hop-by-hop.
func dropNamed(fields []field) {
	for i := range fields {
		if fields[i].id != fieldConnection {
			continue
		}
		for list := fields[i].value; len(list) > 0; {
			var item []byte
			item, list = nextItem(list)
			if len(item) == 0 || equalFold(item, "close") || equalFold(item, "keep-alive") {
				continue
			}
			for k := range fields {
				if fields[k].id != fieldConnection && bytes.EqualFold(fields[k].name, item) && !framing(fields[k].id) {
					fields[k].id = fieldHop
				}
			}
		}
	}
}

// framing says whether the proxy itself reads the field, whatever Connection says.
func framing(id fieldID) bool {
	switch id {
	case fieldHost, fieldContentLength, fieldTransferEncoding, fieldContentType, fieldContentEncoding, fieldExpect:
		return true
	}
	return false
}

// equalFold compares with a name in lower case without regard to ASCII case.
func equalFold(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// parseLength reads a Content-Length: decimal digits alone.
func parseLength(b []byte) (int64, bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	n := int64(0)
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = 10*n + int64(c-'0')
	}
	return n, true
}

// validRequestID says whether a client's x-request-id is taken over.
func validRequestID(id []byte) bool {
	if len(id) == 0 || len(id) > 128 {
		return false
	}
	for _, c := range id {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '.' || c == '_' || c == '-') {
			return false
		}
	}
	return true
}
