package routing

import (
	"encoding/base64"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
)

// session finds the endpoint to which a client's session is pinned: the one that
// the client names, with a token that every answer carries; or the one that served the
// session's id before.
type session struct {
	fleet   *Fleet
	header  string   // of the token, "" with ids
	sources []string // header fields of the id, the first one that is there counts
	ttl     time.Duration
	table   *sessionTable

	// What the last call of pinned has found, for bound.
	key   uint64 // 0: no id
	known bool   // the endpoint that the id is bound to was a candidate
}

type sessionParams struct {
	Strategy string `json:"strategy"`
	Profile  string `json:"profileName"`
	Encoded  struct {
		Header string `json:"header"`
	} `json:"encodedEndpointHeaderConfig"`
	ID struct {
		Sources      []sessionSource `json:"sources"`
		TTLSeconds   float64         `json:"evictionTtlSeconds"`
		SweepSeconds float64         `json:"evictionSweepSeconds"`
	} `json:"sessionIdConfig"`
}

type sessionSource struct {
	Header    string `json:"header"`
	Attribute string `json:"attribute"`
	Producer  string `json:"producer"`
}

// The strategies, and the fields that they read when none is named.
const (
	sessionEncoded       = "encoded_endpoint_header"
	sessionID            = "session_id"
	defaultSessionHeader = "x-session-token"
	defaultSessionID     = "x-session-id"
)

// sessionFilter leaves nobody but the pinned endpoint, or all when that is no candidate.
type sessionFilter struct{ *session }

// sessionScorer gives the pinned endpoint 1, the others 0.
type sessionScorer struct{ *session }

func newSessionFilter(b *builder) (any, error) {
	s, err := b.session()
	if err != nil {
		return nil, err
	}
	return sessionFilter{s}, nil
}

func newSessionScorer(b *builder) (any, error) {
	s, err := b.session()
	if err != nil {
		return nil, err
	}
	return sessionScorer{s}, nil
}

func (f sessionFilter) Filter(r *Request, c []Candidate) []Candidate {
	i := f.pinned(r, c)
	if i < 0 {
		return c
	}
	c[0] = c[i]
	return c[:1]
}

func (s sessionScorer) Score(r *Request, c []Candidate, out []float64) {
	clear(out)
	if i := s.pinned(r, c); i >= 0 {
		out[i] = 1
	}
}

// session reads the parameters.
func (b *builder) session() (*session, error) {
	p := sessionParams{Strategy: sessionEncoded}
	p.ID.TTLSeconds, p.ID.SweepSeconds = 300, 10
	if err := b.params(&p); err != nil {
		return nil, err
	}
	unused := map[string]string{sessionEncoded: "sessionIdConfig", sessionID: "encodedEndpointHeaderConfig"}[p.Strategy]
	switch {
	case unused == "":
		return nil, b.problem("use strategy: "+sessionEncoded+" or strategy: "+sessionID, fmt.Sprintf("strategy %q is unknown", p.Strategy))
	case b.spec.Parameters.Has(unused):
		b.warn(unused + " has no effect with strategy: " + p.Strategy)
	}
	if p.Profile != "" {
		b.warn("profileName has no effect: there is one profile")
	}
	s := &session{fleet: b.fleet}
	if p.Strategy == sessionEncoded {
		s.header = strings.ToLower(p.Encoded.Header)
		if s.header == "" {
			s.header = defaultSessionHeader
		}
		return s, b.fieldName(s.header)
	}
	for _, source := range p.ID.Sources {
		switch {
		case source.Attribute != "" || source.Producer != "":
			return nil, b.problem("name a header field", "sessionIdConfig.sources: requests have no attributes here")
		case source.Header == "":
			return nil, b.problem("name a header field in each source", "sessionIdConfig.sources: a source names nothing")
		}
		name := strings.ToLower(source.Header)
		if err := b.fieldName(name); err != nil {
			return nil, err
		}
		s.sources = append(s.sources, name)
	}
	if len(s.sources) == 0 {
		s.sources = []string{defaultSessionID}
	}
	for _, x := range []struct {
		name  string
		value float64
	}{{"evictionTtlSeconds", p.ID.TTLSeconds}, {"evictionSweepSeconds", p.ID.SweepSeconds}} {
		if !(x.value > 0) || x.value > 1e9 {
			return nil, b.problem("use a number of seconds above 0", fmt.Sprintf("%s %v is out of range", x.name, x.value))
		}
	}
	s.ttl = time.Duration(p.ID.TTLSeconds * float64(time.Second))
	s.table = b.fleet.sessionTable(b.spec.Name, b.seed)
	return s, nil
}

// fieldName refuses what is no name of a header field, or of one that frames messages.
func (b *builder) fieldName(name string) error {
	bad := func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r) }
	framing := []string{"connection", "content-encoding", "content-length", "content-type", "date", "host", "transfer-encoding"}
	if strings.ContainsFunc(name, bad) || slices.Contains(framing, name) {
		return b.problem("name a header field of your own, such as "+defaultSessionHeader, fmt.Sprintf("%q cannot name a session", name))
	}
	return nil
}

// pinned returns the candidate to which the request's session is pinned, -1 for none.
func (s *session) pinned(r *Request, c []Candidate) int {
	s.key, s.known = 0, false
	if r.Headers == nil {
		return -1
	}
	if s.header != "" {
		return named(r.Headers.Header(s.header), c)
	}
	var id []byte
	for _, name := range s.sources {
		if id = r.Headers.Header(name); len(id) > 0 {
			break
		}
	}
	if len(id) == 0 {
		return -1
	}
	s.key = s.table.keyOf(id)
	if x := s.table.find(s.key, s.fleet.now(), s.ttl); x != nil {
		for i := range c {
			if c[i].Endpoint == x.endpoint {
				s.known = true
				return i
			}
		}
	}
	return -1
}

// named returns the candidate whose identity a token has, -1 for none.
func named(token []byte, c []Candidate) int {
	const longest = 512 // an identity has at most 2*253+1 bytes
	var id [longest]byte
	if len(token) == 0 || base64.StdEncoding.DecodedLen(len(token)) > longest {
		return -1
	}
	n, err := base64.StdEncoding.Decode(id[:], token)
	if err != nil {
		return -1
	}
	return slices.IndexFunc(c, func(c Candidate) bool { return string(id[:n]) == c.Endpoint.id })
}

// bound notes where a request went, right after it was decided: an id keeps its
// endpoint for as long as that is a candidate.
func (s *session) bound(e *Endpoint) {
	if s.key != 0 {
		s.table.bind(s.key, e, s.known, s.fleet.now(), s.ttl)
	}
}

// answerHeader names the field in which an answer tells the client its token, "" for none.
func (s *session) answerHeader() string { return s.header }

// binder is a plugin of a profile that pins sessions.
type binder interface {
	bound(e *Endpoint)
	answerHeader() string
	sessions() *sessionTable // nil: it remembers none
}

// SessionToken is the endpoint's identity as a client gives it back: namespace/name in base64.
func (e *Endpoint) SessionToken() string { return base64.StdEncoding.EncodeToString([]byte(e.id)) }

// SessionHeaders names the fields in which the answer has to tell the endpoint's
// SessionToken. The slice must not be changed.
func (l *Lease) SessionHeaders() []string { return l.router.sessionHeaders }

// sessionTable remembers the endpoints of so many sessions, the least recently used
// of those that share a place make room. It is guarded by Fleet.mu and lives as long as
// a router has a plugin of the name.
type sessionTable struct {
	plugin string
	seed   uint64
	places []sessionPlace
}

// Bounds of a table: 65,536 sessions in 2 MB.
const (
	sessionPlaces = 8192
	sessionWays   = 8
)

type sessionPlace [sessionWays]sessionBinding

type sessionBinding struct {
	key      uint64 // 0: free
	endpoint *Endpoint
	used     int64 // Unix nanoseconds
}

func (f *Fleet) sessionTable(plugin string, seed uint64) *sessionTable {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.sessions {
		if t.plugin == plugin {
			return t
		}
	}
	t := &sessionTable{plugin: plugin, seed: seed, places: make([]sessionPlace, sessionPlaces)}
	f.sessions = append(f.sessions, t)
	return t
}

// keepSessions drops the tables of plugins that are gone.
func (f *Fleet) keepSessions(binders []binder) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sessions = slices.DeleteFunc(f.sessions, func(t *sessionTable) bool {
		return !slices.ContainsFunc(binders, func(b binder) bool { return b.sessions() == t })
	})
}

func (s *session) sessions() *sessionTable { return s.table }

// keyOf never returns 0.
func (t *sessionTable) keyOf(id []byte) uint64 {
	var d xxhash.Digest
	d.ResetWithSeed(t.seed)
	_, _ = d.Write(id) // never fails
	return max(d.Sum64(), 1)
}

func (t *sessionTable) find(key uint64, now time.Time, ttl time.Duration) *sessionBinding {
	place := &t.places[key%sessionPlaces]
	for i := range place {
		if x := &place[i]; x.key == key && now.UnixNano()-x.used <= int64(ttl) {
			return x
		}
	}
	return nil
}

// bind records that a session is at e. keep: its endpoint was a candidate, so it stays.
func (t *sessionTable) bind(key uint64, e *Endpoint, keep bool, now time.Time, ttl time.Duration) {
	x := t.find(key, now, ttl)
	if x == nil {
		place := &t.places[key%sessionPlaces]
		oldest := int64(math.MaxInt64)
		for i := range place {
			y := &place[i]
			if y.key == key || y.key == 0 {
				x = y
				break
			}
			if y.used < oldest {
				x, oldest = y, y.used
			}
		}
		*x, keep = sessionBinding{key: key}, false
	}
	if x.used = now.UnixNano(); !keep {
		x.endpoint = e
	}
}
