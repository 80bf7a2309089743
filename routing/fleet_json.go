package routing

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"kvgate/configs"
)

// FleetSnapshot is the fleet at one moment, as /debug/fleet prints it and
// kvgate explain --fleet reads it.
type FleetSnapshot struct {
	Time     time.Time         `json:"time"`
	Replicas []ReplicaSnapshot `json:"replicas"` // in ID order, then the removed ones whose streams run
}

// ReplicaSnapshot is one replica in a FleetSnapshot. A pointer is nil, null in
// JSON, where the number is unknown.
type ReplicaSnapshot struct {
	Name           string            `json:"name"` // Endpoint.DisplayName
	URL            string            `json:"url"`
	State          string            `json:"state"`  // a State's name; empty means ready
	Models         []string          `json:"models"` // null: the list is unknown
	Labels         map[string]string `json:"labels"`
	Waiting        *float64          `json:"waiting"`         // requests
	Running        *float64          `json:"running"`         // requests
	KVUsage        *float64          `json:"kv_usage"`        // 0..1
	AgeS           *float64          `json:"age_s"`           // seconds since the observation; null: never observed
	InFlight       int               `json:"in_flight"`       // requests of this gateway that have not ended
	Awaiting       int               `json:"awaiting"`        // of these, requests without a first token
	IndexBlocks    int               `json:"index_blocks"`    // blocks that the indexes hold for it
	CapacityTokens *int64            `json:"capacity_tokens"` // tokens that its KV cache holds
	// Match is the number of leading blocks of a request that the replica
	// holds. A live fleet never sets it; a saved one may, for Router.Seed.
	Match *int `json:"match,omitempty"`
}

// DisplayName returns the name under which people and tools see the endpoint:
// the plain name in the namespace "default", else namespace/name.
func (e *Endpoint) DisplayName() string {
	if name, ok := strings.CutPrefix(e.id, "default/"); ok && !strings.Contains(name, "/") {
		return name
	}
	return e.id
}

// Find returns the endpoint with that ID or DisplayName, nil when there is none.
func (f *Fleet) Find(name string) *Endpoint {
	for _, e := range f.Endpoints() {
		if e.id == name || e.DisplayName() == name {
			return e
		}
	}
	return nil
}

// State returns the state in which a pick would see the endpoint now.
func (f *Fleet) State(e *Endpoint) State { return e.stateAt(f.now()) }

// Snapshot returns what is known of every endpoint. Removed endpoints whose
// streams run are draining ones.
func (f *Fleet) Snapshot() FleetSnapshot {
	s := FleetSnapshot{Time: f.now(), Replicas: []ReplicaSnapshot{}}
	for _, e := range append(slices.Clone(f.Endpoints()), f.Leaving()...) {
		s.Replicas = append(s.Replicas, f.ReplicaSnapshot(e))
	}
	return s
}

// ReplicaSnapshot returns what is known of one endpoint.
func (f *Fleet) ReplicaSnapshot(e *Endpoint) ReplicaSnapshot {
	r := ReplicaSnapshot{
		Name: e.DisplayName(), URL: e.URL(), State: f.State(e).String(), Labels: e.Labels(),
		InFlight: e.InFlight(), Awaiting: e.Awaiting(), IndexBlocks: f.IndexBlocks(e),
	}
	r.Awaiting = min(r.Awaiting, r.InFlight) // read one after the other
	if r.Labels == nil {
		r.Labels = map[string]string{}
	}
	if models, known := e.Models(); known {
		r.Models = append([]string{}, models...)
	}
	if o := e.Observation(); o != nil {
		age := max(f.now().Sub(o.At).Seconds(), 0)
		r.Waiting, r.Running, r.KVUsage, r.AgeS = number(o.Waiting), number(o.Running), number(o.KVUsage), &age
		if o.CapacityTokens > 0 {
			r.CapacityTokens = &o.CapacityTokens
		}
	}
	return r
}

// number returns nil for what JSON cannot hold and nobody knows.
func number(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// UnmarshalJSON reads a snapshot strictly: an unknown field or a wrong type is
// an error that names the replica and the field.
func (s *FleetSnapshot) UnmarshalJSON(data []byte) error {
	var doc struct {
		Time     time.Time         `json:"time"`
		Replicas []json.RawMessage `json:"replicas"`
	}
	if err := decodeStrict(data, &doc, []string{"time", "replicas"}); err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	out := FleetSnapshot{Time: doc.Time, Replicas: make([]ReplicaSnapshot, len(doc.Replicas))}
	for i, raw := range doc.Replicas {
		if err := decodeStrict(raw, &out.Replicas[i], replicaFields); err != nil {
			var named struct{ Name any }
			_ = json.Unmarshal(raw, &named) // for the message only
			name, _ := named.Name.(string)
			return fmt.Errorf("fleet: %s: %w", replicaPlace(i, name), err)
		}
	}
	*s = out
	return nil
}

var replicaFields = []string{
	"name", "url", "state", "models", "labels", "waiting", "running", "kv_usage", "age_s",
	"in_flight", "awaiting", "index_blocks", "capacity_tokens", "match",
}

func replicaPlace(i int, name string) string {
	if name == "" {
		return fmt.Sprintf("replicas[%d]", i)
	}
	return "replica " + strconv.Quote(name)
}

// decodeStrict refuses unknown fields, with a remedy drawn from the known ones.
func decodeStrict(data []byte, dst any, fields []string) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	err := d.Decode(dst)
	var wrong *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrong) && wrong.Field == "":
		return fmt.Errorf("expected a JSON object, got a JSON %s", wrong.Value)
	case errors.As(err, &wrong):
		return fmt.Errorf("field %s: a JSON %s does not fit", wrong.Field, wrong.Value)
	}
	if quoted, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		if name, uerr := strconv.Unquote(quoted); uerr == nil {
			return fmt.Errorf("field %s is unknown (%s)", name, configs.Suggest(name, "known fields", fields))
		}
	}
	return err
}

// buildStaleness is the staleness of a rebuilt fleet: the default of
// scrape.staleness. SetStaleness changes it.
const buildStaleness = 2 * time.Second

// Build makes a fleet in the state of the snapshot, to explain decisions with.
// Its clock stands at Time (at now() when Time is zero) and moves on as now
// does; the observations were made AgeS before. The counts of requests are
// restored, the contents of the indexes are not: see Router.Seed. A draining replica that shares its name
// with another one is a removed one whose streams run: it is left out. An error
// names the replica and the field.
func (s FleetSnapshot) Build(now func() time.Time, log *zap.Logger) (*Fleet, error) {
	built := now()
	taken := s.Time
	if taken.IsZero() {
		taken = built
	}
	var specs []EndpointSpec
	rows := map[string]ReplicaSnapshot{}
	for i, r := range s.Replicas {
		if err := r.check(); err != nil {
			return nil, fmt.Errorf("fleet: %s: %w", replicaPlace(i, r.Name), err)
		}
		spec := EndpointSpec{Name: r.Name, URL: r.URL, Labels: maps.Clone(r.Labels), Source: "fleet snapshot"}
		if namespace, name, ok := strings.Cut(r.Name, "/"); ok {
			spec.Namespace, spec.Name = namespace, name
		}
		id := spec.ID()
		if other, twice := rows[id]; twice {
			switch Draining.String() {
			case r.State:
				continue
			case other.State:
				specs = slices.DeleteFunc(specs, func(x EndpointSpec) bool { return x.ID() == id })
			default:
				return nil, fmt.Errorf("fleet: %s: field name: two replicas have it", replicaPlace(i, r.Name))
			}
		}
		rows[id] = r
		specs = append(specs, spec)
	}
	f := NewFleet(func() time.Time { return taken.Add(now().Sub(built)) }, buildStaleness, log)
	f.Update(specs)
	for _, e := range f.Endpoints() {
		rows[e.ID()].restore(f, e, taken)
	}
	return f, nil
}

// restore puts a fresh endpoint into the snapshot's state.
func (r ReplicaSnapshot) restore(f *Fleet, e *Endpoint, taken time.Time) {
	known := func(v *float64) float64 {
		if v == nil {
			return math.NaN()
		}
		return *v
	}
	if r.AgeS != nil || r.Waiting != nil || r.Running != nil || r.KVUsage != nil || r.CapacityTokens != nil {
		m := Metrics{Waiting: known(r.Waiting), Running: known(r.Running), KVUsage: known(r.KVUsage)}
		if r.CapacityTokens != nil {
			m.CapacityTokens = *r.CapacityTokens
		}
		at := taken
		if r.AgeS != nil {
			at = at.Add(-time.Duration(*r.AgeS * float64(time.Second)))
		}
		// Not Observe: a replica that left and came back has an observation
		// while it is starting.
		e.observation.Store(&Observation{Metrics: m, At: at})
	}
	e.scraped.Store(r.State != Starting.String())
	e.down.Store(r.State == Down.String())
	e.draining.Store(r.State == Draining.String())
	e.inFlight.Store(int64(r.InFlight))
	e.awaiting.Store(int64(r.Awaiting))
	e.changed()
	f.SetModels(e, r.Models, r.Models != nil)
}

// check refuses what no fleet can be.
func (r ReplicaSnapshot) check() error {
	if r.Name == "" {
		return errors.New("field name is missing")
	}
	if namespace, name, ok := strings.Cut(r.Name, "/"); ok && (namespace == "" || name == "") {
		return errors.New("field name: expected NAME or NAMESPACE/NAME")
	}
	if r.URL != "" {
		if u, err := url.Parse(r.URL); err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
			return fmt.Errorf("field url: %q is not http://host:port or https://host:port", r.URL)
		}
	}
	if r.State != "" && !slices.Contains(stateNames[:], r.State) {
		return fmt.Errorf("field state: %q is unknown (%s)", r.State, configs.Suggest(r.State, "known states", stateNames[:]))
	}
	for _, x := range []struct {
		field string
		value *float64
	}{{"waiting", r.Waiting}, {"running", r.Running}, {"kv_usage", r.KVUsage}, {"age_s", r.AgeS}} {
		if x.value != nil && !(*x.value >= 0) {
			return fmt.Errorf("field %s: %v is below 0 (write null when it is unknown)", x.field, *x.value)
		}
	}
	if r.KVUsage != nil && *r.KVUsage > 1 {
		return fmt.Errorf("field kv_usage: %v is above 1 (it is a fraction, not a percentage)", *r.KVUsage)
	}
	if r.AgeS != nil && *r.AgeS > math.MaxInt64/1e9/2 {
		return fmt.Errorf("field age_s: %v seconds is too long ago", *r.AgeS)
	}
	for _, x := range []struct {
		field string
		value int
	}{{"in_flight", r.InFlight}, {"awaiting", r.Awaiting}, {"index_blocks", r.IndexBlocks}} {
		if x.value < 0 {
			return fmt.Errorf("field %s: %d is below 0", x.field, x.value)
		}
	}
	switch {
	case r.Awaiting > r.InFlight:
		return fmt.Errorf("field awaiting: %d is more than in_flight %d, which counts them too", r.Awaiting, r.InFlight)
	case r.CapacityTokens != nil && *r.CapacityTokens <= 0:
		return fmt.Errorf("field capacity_tokens: %d is not above 0 (write null when it is unknown)", *r.CapacityTokens)
	case r.Match != nil && *r.Match < 0:
		return fmt.Errorf("field match: %d is below 0", *r.Match)
	}
	return nil
}
