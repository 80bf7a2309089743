package proxy

import (
	"bytes"
	"errors"
)

// response is the head of a replica's answer.
type response struct {
	status  int
	fields  []field // aliases of the connection's buffer, valid until the next fill
	kind    bodyKind
	length  int64 // of bodyLength; of an answer to HEAD, what it announces; -1 unknown
	keep    bool  // the connection can carry another request
	events  bool  // an event stream
	unsent  bool  // a gateway's word that no replica has seen the request
	encoded bool  // compressed: the tap cannot read it
}

var errAnswer = errors.New("the response head is malformed")

// parse reads a head that ends in an empty line. headOnly says that the request
// was a HEAD.
func (r *response) parse(head []byte, headOnly bool) error {
	r.fields = r.fields[:0]
	r.status, r.kind, r.length = 0, bodyEmpty, -1
	r.keep, r.events, r.encoded, r.unsent = false, false, false, false
	line := head[:bytes.IndexByte(head, '\n')+1]
	// HTTP/1.x SSS[ reason]
	if len(line) < len("HTTP/1.1 200\r\n") || string(line[:7]) != "HTTP/1." || line[7] != '0' && line[7] != '1' || line[8] != ' ' || line[len(line)-2] != '\r' {
		return errAnswer
	}
	for _, c := range line[9:12] {
		if c < '0' || c > '9' {
			return errAnswer
		}
		r.status = 10*r.status + int(c-'0')
	}
	if c := line[12]; c != ' ' && c != '\r' || r.status < 100 {
		return errAnswer
	}
	var err error
	if r.fields, err = parseFields(head[len(line):], r.fields); err != nil {
		return errAnswer
	}
	r.keep = line[7] == '1'
	chunked, lengths, codings := false, 0, 0
	for i := range r.fields {
		f := &r.fields[i]
		switch f.id {
		case fieldContentLength:
			n, ok := parseLength(f.value)
			if !ok || lengths > 0 && n != r.length {
				return errAnswer
			}
			lengths++
			r.length = n
		case fieldTransferEncoding:
			codings++
			if codings > 1 || !equalFold(f.value, "chunked") {
				return errAnswer
			}
			chunked = true
		case fieldConnection:
			for list := f.value; len(list) > 0; {
				var item []byte
				if item, list = nextItem(list); equalFold(item, "close") {
					r.keep = false
				}
			}
		case fieldContentType:
			mediaType := f.value
			if i := bytes.IndexByte(mediaType, ';'); i >= 0 {
				mediaType = trimSpace(mediaType[:i])
			}
			r.events = equalFold(mediaType, "text/event-stream")
		case fieldContentEncoding:
			r.encoded = !equalFold(f.value, "identity")
		case fieldInternal:
			r.unsent = r.unsent || r.status >= 500 && equalFold(f.name, unsentHeader)
		}
	}
	switch {
	case headOnly || r.status < 200 || r.status == 204 || r.status == 304:
	case chunked:
		r.kind = bodyChunked
		r.keep = r.keep && lengths == 0
		r.length = -1
	case lengths > 0:
		r.kind = bodyLength
	default:
		r.kind = bodyClose
		r.keep = false
	}
	dropNamed(r.fields)
	return nil
}
