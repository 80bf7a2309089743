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

// isolated says whether the route's bodies get the salt of the tenant.
func (x *exchange) isolated() bool {
	if x.key == nil || x.key.salt == nil || x.route.reading != readJSON {
		return false
	}
	switch x.route.api {
	case routing.APIChat, routing.APIChatBatch, routing.APICompletions, routing.APIResponses, routing.APIMessages, routing.APIGenerate:
		return true
	}
	return false
}

// mustRead says whether a body that cannot be read is refused: one in which a
// replica that reads more generously may find what must not be there.
func (x *exchange) mustRead() bool {
	body := bytes.TrimLeft(x.body.bytes(), " \t\r\n\ufeff")
	return x.isolated() || len(x.live.watch) > 1 && len(body) > 0 && body[0] == '{'
}

func unreadable(err error) *refusal {
	return &refusal{status: fasthttp.StatusBadRequest, code: "invalid_body", message: err.Error()}
}

// control judges the fields of a body with which clients could steer a replica,
// and sets the tenant's salt.
func (x *exchange) control() *refusal {
	req := &x.req
	for _, m := range req.Found {
		if m.Field > 0 && m.Field < x.live.firstLimited && string(req.Body[m.Value:m.To]) != "null" {
			name := x.live.watch[m.Field]
			return &refusal{status: fasthttp.StatusBadRequest, code: "forbidden_field", param: name,
				message: "the field " + strconv.Quote(name) + " is not taken from clients (limits.deny_fields): leave it out"}
		}
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
