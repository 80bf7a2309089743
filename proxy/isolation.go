package proxy

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strconv"

	"github.com/valyala/fasthttp"

	"kvgate/configs"
	"kvgate/routing"
)

// Who shares cached prefixes.
const (
	isolateKey   = "key"
	isolateGroup = "group"
)

// saltField is the field that seeds the hashes of vLLM's KV blocks: requests
// with different values share none.
const saltField = "cache_salt"

// saltLength is enough of a base64 text for 132 bits.
const saltLength = 22

// minSecret is the shortest secret, in characters.
const minSecret = 16

// isolationSecret reads the secret of which salts are made, "" when tenants are
// not kept apart.
func isolationSecret(s *configs.Isolation) (string, error) {
	if s.Mode != isolateKey && s.Mode != isolateGroup {
		return "", nil
	}
	secret, err := configs.ReadSecret(s.SecretFile)
	if err == nil && len(secret) < minSecret {
		err = fmt.Errorf("%s must hold at least %d characters: openssl rand -hex 32", s.SecretFile, minSecret)
	}
	if err != nil {
		return "", fmt.Errorf("isolation.secret_file: %w", err)
	}
	return secret, nil
}

// tenantSalt returns the cache_salt of a tenant, which nobody without the secret
// can guess: the first 22 characters of base64url(HMAC-SHA256(secret, tenant)).
func tenantSalt(secret, tenant string) []byte {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(tenant))
	return []byte(base64.RawURLEncoding.EncodeToString(mac.Sum(nil))[:saltLength])
}

// Salt returns the cache_salt that requests of the named key get, nil when there
// is none; ok is false when there is no such key.
func (s *Server) Salt(key string) (salt []byte, ok bool) {
	if ring := s.live.Load().keys; ring != nil {
		for _, k := range ring.keys {
			if k.Name == key {
				return k.salt, true
			}
		}
	}
	return nil, false
}

// tenant says whether the request comes from one of several tenants that are kept apart.
func (x *exchange) tenant() bool { return x.key != nil && x.key.salt != nil }

// isolated says whether the route's bodies get the salt of the tenant.
func (x *exchange) isolated() bool { return x.tenant() && x.route.blocks == blocksSalted }

// refuseUnsalted answers on routes whose cached blocks nothing keeps apart.
var refuseUnsalted = &refusal{status: fasthttp.StatusNotImplemented, code: "not_supported",
	message: "this route is not served while tenants are kept apart (isolation.mode): the engine takes no cache_salt on it"}

// mustRead says whether a body that cannot be read is refused: one in which a
// replica that reads more generously may find what must not be there.
func (x *exchange) mustRead() bool {
	return x.isolated() || x.live.judges && startsObject(x.body.bytes())
}

// startsObject says whether a text in any encoding that Python's json.loads finds
// out by itself (UTF-8, UTF-16 and UTF-32, with a byte order mark or by its zeros)
// begins like a JSON object.
func startsObject(b []byte) bool {
	for _, c := range b {
		switch c {
		case ' ', '\t', '\r', '\n', 0, 0xef, 0xbb, 0xbf, 0xfe, 0xff:
		default:
			return c == '{'
		}
	}
	return false
}

func unreadable(err error) *refusal {
	return &refusal{status: fasthttp.StatusBadRequest, code: "invalid_body", message: err.Error()}
}

// Fields that hold others of which vLLM reads some as if they stood in the body.
const (
	samplingField = "sampling_params" // of /inference/v1/generate: n, max_tokens, extra_args
	extraField    = "extra_args"      // in sampling_params
	xargsField    = "vllm_xargs"      // becomes extra_args
)

// What is looked for in every body, behind live.firstOther.
const (
	watchSampling = iota
	watchXargs
	watchPrevious
	watchBackground
)

var otherWatched = [...]string{watchSampling: samplingField, watchXargs: xargsField, watchPrevious: "previous_response_id", watchBackground: "background"}

// members returns those of an object's members that are among the names, as they
// stand, of equal ones all. What is no object has none.
func members(value []byte, names ...string) []routing.Member {
	r := routing.Request{Body: value, Watch: names}
	_ = r.Parse() // it is well-formed: an error is about what it is, or about what model means elsewhere
	return r.Found
}

// forbidden refuses those of the found members that are not null.
func forbidden(path string, names []string, body []byte, found ...routing.Member) *refusal {
	for _, m := range found {
		if string(body[m.Value:m.To]) != "null" {
			name := path + names[m.Field]
			return &refusal{status: fasthttp.StatusBadRequest, code: "forbidden_field", param: name,
				message: "the field " + strconv.Quote(name) + " is not taken from clients (limits.deny_fields): leave it out"}
		}
	}
	return nil
}

// denied refuses the fields of limits.deny_fields, also where vLLM reads them in other fields.
func (x *exchange) denied() *refusal {
	l, body := x.live, x.req.Body
	names := l.watch[1:l.firstLimited]
	if len(names) == 0 {
		return nil
	}
	for _, m := range x.req.Found {
		value := body[m.Value:m.To]
		var r *refusal
		switch at := m.Field - l.firstOther; {
		case m.Field > 0 && m.Field < l.firstLimited || m.Field == 0 && l.denySalt:
			r = forbidden("", l.watch, body, m)
		case at == watchXargs:
			r = forbidden(xargsField+".", names, value, members(value, names...)...)
		case at == watchSampling:
			for _, extra := range members(value, extraField) {
				in := value[extra.Value:extra.To]
				if r == nil {
					r = forbidden(samplingField+"."+extraField+".", names, in, members(in, names...)...)
				}
			}
		}
		if r != nil {
			return r
		}
	}
	return nil
}

// control judges the fields of a body with which clients could steer a replica,
// and sets the tenant's salt.
func (x *exchange) control() *refusal {
	req := &x.req
	if r := x.denied(); r != nil {
		return r
	}
	if r := x.capped(); r != nil {
		return r
	}
	if !x.isolated() {
		return nil
	}
	for i := len(req.Found) - 1; i >= 0; i-- {
		if m := req.Found[i]; m.Field == 0 {
			blank(req.Body, m.From, m.To)
		}
	}
	req.Salt = x.key.salt
	x.cut = bytes.IndexByte(req.Body, '{') + 1
	x.opening = append(append(append(x.opening[:0], `{"`+saltField+`":"`...), x.key.salt...), '"')
	if rest := bytes.TrimLeft(req.Body[x.cut:], " \t\r\n"); rest[0] != '}' {
		x.opening = append(x.opening, ',')
	}
	return nil
}

// blank writes spaces over a member of an object, and over a comma beside it:
// what is left is JSON, of the same length.
func blank(b []byte, from, to int) {
	for i := from; i < to; i++ {
		b[i] = ' '
	}
	space := func(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }
	for to < len(b) && space(b[to]) {
		to++
	}
	if b[to] == ',' {
		b[to] = ' '
		return
	}
	for from > 0 && space(b[from-1]) {
		from--
	}
	if b[from-1] == ',' {
		b[from-1] = ' '
	}
}
