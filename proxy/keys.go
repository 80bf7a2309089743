package proxy

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"kvgate/configs"
)

// keyring holds the API keys in force. A nil keyring lets everyone in.
type keyring struct{ keys []*apiKey }

// apiKey is one key with what its limits count. The count outlives a reload.
type apiKey struct {
	configs.Key
	every int64  // nanoseconds that one request costs, 0: no limit of requests per minute
	salt  []byte // cache_salt of its tenant, nil without isolation
	*keyUse
}

// keyUse is what a key's requests have used up.
type keyUse struct {
	paidUntil atomic.Int64 // nanoseconds since the Server was made, see take
	running   atomic.Int64
	limited   prometheus.Counter
}

// newKeyring reads the file of keys, nil without one. Keys that old has, too, go
// on counting where they are.
func newKeyring(s *configs.Settings, old *keyring, m *Metrics) (*keyring, error) {
	file := s.Auth.KeysFile
	if file == "" {
		return nil, nil
	}
	list, err := configs.LoadKeys(file)
	if err != nil {
		return nil, fmt.Errorf("auth.keys_file: %w", err)
	}
	secret, err := isolationSecret(&s.Isolation)
	if err != nil {
		return nil, err
	}
	ring := &keyring{}
	for _, k := range list {
		key := &apiKey{Key: k, keyUse: old.use(k.Name)}
		if key.keyUse == nil {
			key.keyUse = &keyUse{limited: m.rateLimited(k.Name)}
		}
		if k.RequestsPerMinute > 0 {
			key.every = int64(time.Minute) / int64(k.RequestsPerMinute)
		}
		switch s.Isolation.Mode {
		case isolateKey:
			key.salt = tenantSalt(secret, k.Name)
		case isolateGroup:
			key.salt = tenantSalt(secret, k.Group)
		}
		ring.keys = append(ring.keys, key)
	}
	return ring, nil
}

func (r *keyring) use(name string) *keyUse {
	if r != nil {
		for _, k := range r.keys {
			if k.Name == name {
				return k.keyUse
			}
		}
	}
	return nil
}

// find returns the key that a client presents, nil when there is none like it.
// Hashes are compared, all of them and each in constant time, so that neither a
// key nor its place in the file can be learnt from how long that takes.
func (r *keyring) find(presented []byte) *apiKey {
	hash := sha256.Sum256(presented)
	found := -1
	for i, k := range r.keys {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(hash[:], k.Hash[:]), i, found)
	}
	if found < 0 {
		return nil
	}
	return r.keys[found]
}

// allows says whether the key may use a model.
func (k *apiKey) allows(model []byte) bool {
	if k == nil || k.Models == nil {
		return true
	}
	for _, m := range k.Models {
		if string(model) == m {
			return true
		}
	}
	return false
}

// restricted says whether the key may use some models only.
func (k *apiKey) restricted() bool { return k != nil && k.Models != nil }

// minute is how far the requests of a key may run ahead of their even pace.
const minute = int64(time.Minute)

// wait returns how long the next request must wait for requests_per_minute.
func (k *apiKey) wait(paid, now int64) time.Duration {
	return time.Duration(max(paid, now) + k.every - minute - now)
}

// take charges one request at the time now, in nanoseconds, and returns 0, or
// charges nothing and returns how long to wait. Each request pays for its share
// of a minute and may do so a minute ahead (the generic cell rate algorithm,
// ITU-T I.371, with a burst of a whole minute).
func (k *apiKey) take(now int64) time.Duration {
	if k.every == 0 {
		return 0
	}
	for {
		paid := k.paidUntil.Load()
		if wait := k.wait(paid, now); wait > 0 {
			return wait
		}
		if k.paidUntil.CompareAndSwap(paid, max(paid, now)+k.every) {
			return 0
		}
	}
}

// Why a client was not let in, as metrics name it.
const (
	authMissing   = "missing"
	authMalformed = "malformed"
	authUnknown   = "unknown_key"
	authModel     = "forbidden_model"
)

var authReasons = [...]string{authMissing, authMalformed, authUnknown, authModel}

// Refusals of clients.
var (
	refuseNoKey  = &refusal{status: fasthttp.StatusUnauthorized, code: "invalid_api_key", message: "an API key is needed: send Authorization: Bearer KEY, or x-api-key: KEY"}
	refuseBadKey = &refusal{status: fasthttp.StatusUnauthorized, code: "invalid_api_key",
		message: "the API key cannot be read: send one field Authorization: Bearer KEY, or one field x-api-key: KEY"}
	refuseKey     = &refusal{status: fasthttp.StatusUnauthorized, code: "invalid_api_key", message: "the API key is not valid"}
	refuseModel   = &refusal{status: fasthttp.StatusForbidden, code: "forbidden_model", param: "model", message: "this API key may not use this model: GET /v1/models lists those that it may"}
	refuseUnnamed = &refusal{status: fasthttp.StatusForbidden, code: "forbidden_model", param: "model",
		message: "this API key may use certain models only and the request does not name one of them beyond doubt: set model, once"}
	refuseRunning = &refusal{status: fasthttp.StatusTooManyRequests, code: "rate_limit_exceeded", retry: 1, reason: "rejected-concurrency", message: "too many requests of this API key run at once"}
)

// authenticate finds the key of the client. Authorization decides alone when it
// is there, whatever x-api-key says: some clients send both, the second one stale.
func (x *exchange) authenticate() *refusal {
	ring := x.live.keys
	if ring == nil || x.route.open() {
		return nil
	}
	var bearer, plain []byte
	bearers, plains := 0, 0
	for i := range x.fields {
		switch f := &x.fields[i]; f.id {
		case fieldAuthorization:
			bearer = f.value
			bearers++
		case fieldAPIKey:
			plain = f.value
			plains++
		}
	}
	switch {
	case bearers+plains == 0:
		return x.stranger(authMissing, refuseNoKey)
	case bearers > 1 || bearers == 0 && plains > 1:
		return x.stranger(authMalformed, refuseBadKey)
	case bearers == 1:
		const scheme = "bearer "
		if len(bearer) <= len(scheme) || !equalFold(bearer[:len(scheme)], scheme) {
			return x.stranger(authMalformed, refuseBadKey)
		}
		plain = trimSpace(bearer[len(scheme):])
	}
	if x.key = ring.find(plain); x.key == nil {
		return x.stranger(authUnknown, refuseKey)
	}
	x.rec.key = x.key.Name
	return nil
}

func (x *exchange) stranger(reason string, r *refusal) *refusal {
	x.s.o.Metrics.authFailure(reason)
	return x.unread(r)
}

// charge counts the request against the limits of its key; end gives back what
// runs. It is called once per request.
func (x *exchange) charge() *refusal {
	k := x.key
	if k == nil {
		return nil
	}
	if n := k.running.Add(1); k.Concurrency > 0 && n > int64(k.Concurrency) {
		k.running.Add(-1)
		k.limited.Inc()
		return x.unread(refuseRunning)
	}
	if wait := k.take(int64(x.rec.start.Sub(x.s.made))); wait > 0 {
		k.running.Add(-1)
		k.limited.Inc()
		return x.unread(refuseRate(wait))
	}
	x.charged = true
	return nil
}

// wouldCharge is charge without counting, for a client that waits for a 100
// before it sends its body.
func (x *exchange) wouldCharge() *refusal {
	k := x.key
	switch {
	case k == nil:
	case k.Concurrency > 0 && k.running.Load() >= int64(k.Concurrency):
		k.limited.Inc()
		return x.unread(refuseRunning)
	case k.every > 0:
		if wait := k.wait(k.paidUntil.Load(), int64(x.rec.start.Sub(x.s.made))); wait > 0 {
			k.limited.Inc()
			return x.unread(refuseRate(wait))
		}
	}
	return nil
}

func refuseRate(wait time.Duration) *refusal {
	return &refusal{status: fasthttp.StatusTooManyRequests, code: "rate_limit_exceeded", retry: int((wait + time.Second - 1) / time.Second), reason: "rejected-rate-limited",
		message: "this API key has used up its requests per minute"}
}

// permit judges the model of a parsed request. A request that names none of
// the models that its key is restricted to is refused, unless only one is served.
func (x *exchange) permit() *refusal {
	if !x.key.restricted() {
		return nil
	}
	refused := refuseModel
	if len(x.req.Model) == 0 && !x.doubt {
		if names := x.s.o.Fleet.ModelNames(); len(names) == 1 && !x.req.AnyModel {
			x.req.Model = []byte(names[0]) // and no other that may be served a moment later
		}
	}
	if len(x.req.Model) == 0 || x.doubt {
		refused = refuseUnnamed
	} else if x.key.allows(x.req.Model) {
		return nil
	}
	x.s.o.Metrics.authFailure(authModel)
	return refused
}
