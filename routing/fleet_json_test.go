package routing

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
)

// snapshotFleet returns a fleet with an endpoint in every state.
func snapshotFleet(t *testing.T, c *testClock) *Fleet {
	t.Helper()
	f := newTestFleet(c)
	all := specs("busy", "cold", "down", "leaving", "drained")
	all[0].Labels = map[string]string{"zone": "a"}
	all = append(all, EndpointSpec{Namespace: "prod", Name: "busy", URL: "https://prod:8443"})
	f.Update(all)
	at := c.now()
	c.advance(1500 * time.Millisecond)
	m := observed(4, 2, 0.5)
	m.CapacityTokens = 65536
	mustFind(t, f, "busy").Observe(m, at)
	mustFind(t, f, "down").Observe(observed(math.NaN(), math.Inf(1), 0), c.now())
	mustFind(t, f, "down").SetReachable(false)
	mustFind(t, f, "drained").ObserveFailure()
	mustFind(t, f, "leaving").ObserveFailure()
	mustFind(t, f, "prod/busy").ObserveFailure()
	f.Drain("default/drained", true)
	f.SetModels(mustFind(t, f, "busy"), []string{"m2", "m1"}, true)
	f.SetModels(mustFind(t, f, "prod/busy"), nil, true)

	busy := mustFind(t, f, "busy")
	busy.inFlight.Store(7)
	busy.awaiting.Store(3)
	mustFind(t, f, "leaving").inFlight.Store(1)
	f.Update(append(all[:3:3], all[4:]...))
	return f
}

func mustFind(t *testing.T, f *Fleet, name string) *Endpoint {
	t.Helper()
	e := f.Find(name)
	if e == nil {
		t.Fatalf("Find(%q): got nil, want an endpoint", name)
	}
	return e
}

const snapshotJSON = `{
 "time": "2026-08-22T12:00:01.5Z",
 "replicas": [
  {"name": "busy", "url": "http://busy:8000", "state": "ready", "models": ["m1", "m2"], "labels": {"zone": "a"},
   "waiting": 4, "running": 2, "kv_usage": 0.5, "age_s": 1.5, "in_flight": 7, "awaiting": 3, "index_blocks": 0, "capacity_tokens": 65536},
  {"name": "cold", "url": "http://cold:8000", "state": "starting", "models": null, "labels": {},
   "waiting": null, "running": null, "kv_usage": null, "age_s": null, "in_flight": 0, "awaiting": 0, "index_blocks": 0, "capacity_tokens": null},
  {"name": "down", "url": "http://down:8000", "state": "down", "models": null, "labels": {},
   "waiting": null, "running": null, "kv_usage": 0, "age_s": 0, "in_flight": 0, "awaiting": 0, "index_blocks": 0, "capacity_tokens": null},
  {"name": "drained", "url": "http://drained:8000", "state": "draining", "models": null, "labels": {},
   "waiting": null, "running": null, "kv_usage": null, "age_s": null, "in_flight": 0, "awaiting": 0, "index_blocks": 0, "capacity_tokens": null},
  {"name": "prod/busy", "url": "https://prod:8443", "state": "ready", "models": [], "labels": {},
   "waiting": null, "running": null, "kv_usage": null, "age_s": null, "in_flight": 0, "awaiting": 0, "index_blocks": 0, "capacity_tokens": null},
  {"name": "leaving", "url": "http://leaving:8000", "state": "draining", "models": null, "labels": {},
   "waiting": null, "running": null, "kv_usage": null, "age_s": null, "in_flight": 1, "awaiting": 0, "index_blocks": 0, "capacity_tokens": null}
 ]}`

// generic returns JSON as maps and lists, for comparing.
func generic(t *testing.T, data []byte) any {
	t.Helper()
	var v any
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatalf("not JSON: %v\n%s", err, data)
	}
	return v
}

func TestFleetSnapshotJSON(t *testing.T) {
	f := snapshotFleet(t, newTestClock())
	got, err := json.Marshal(f.Snapshot())
	if err != nil {
		t.Fatalf("Marshal: got %v, want no error", err)
	}
	if !reflect.DeepEqual(generic(t, got), generic(t, []byte(snapshotJSON))) {
		t.Errorf("snapshot: got\n%s\nwant\n%s", got, snapshotJSON)
	}
}

// A rebuilt fleet prints the snapshot that it was built from.
func TestFleetSnapshotBuildRoundTrip(t *testing.T) {
	var s FleetSnapshot
	if err := json.Unmarshal([]byte(snapshotJSON), &s); err != nil {
		t.Fatalf("Unmarshal: got %v, want no error", err)
	}
	later := &testClock{s.Time.Add(time.Hour)} // read back an hour later, the ages are the same
	f, err := s.Build(later.now, zap.NewNop())
	if err != nil {
		t.Fatalf("Build: got %v, want no error", err)
	}
	want := generic(t, []byte(snapshotJSON)).(map[string]any)
	list := want["replicas"].([]any) // a rebuilt fleet keeps the removed one in ID order
	want["replicas"] = append(append(append([]any{}, list[:4]...), list[5]), list[4])
	got, err := json.Marshal(f.Snapshot())
	if err != nil {
		t.Fatalf("Marshal: got %v, want no error", err)
	}
	if !reflect.DeepEqual(generic(t, got), any(want)) {
		t.Errorf("rebuilt: got\n%s\nwant\n%v", got, want)
	}
	if o := mustFind(t, f, "busy").Observation(); !o.At.Equal(s.Time.Add(-1500 * time.Millisecond)) {
		t.Errorf("observation time: got %v, want 1.5 s before %v", o.At, s.Time)
	}
	later.advance(time.Second)
	if got := *f.ReplicaSnapshot(mustFind(t, f, "busy")).AgeS; got != 2.5 {
		t.Errorf("age a second later: got %v s, want 2.5 s", got)
	}
}

func TestFleetSnapshotBuildExplains(t *testing.T) {
	const saved = `{"replicas":[
		{"name":"A","waiting":4,"kv_usage":0.7,"match":5},
		{"name":"B","waiting":0,"kv_usage":0.2,"match":3},
		{"name":"C","waiting":9,"kv_usage":0.1,"match":0}]}`
	var s FleetSnapshot
	if err := json.Unmarshal([]byte(saved), &s); err != nil {
		t.Fatalf("Unmarshal: got %v, want no error", err)
	}
	c := newTestClock()
	f, err := s.Build(c.now, zap.NewNop())
	if err != nil {
		t.Fatalf("Build: got %v, want no error", err)
	}
	r := newTestRouter(t, f, "")
	req := promptOf("m", 1, 5)
	for _, x := range s.Replicas {
		if err := r.Seed(req, mustFind(t, f, x.Name), *x.Match); err != nil {
			t.Fatalf("Seed(%s): got %v, want no error", x.Name, err)
		}
	}
	ex, err := r.Explain(req)
	if err != nil {
		t.Fatalf("Explain: got %v, want no error", err)
	}
	for i, want := range []float64{4.711, 5.4, 1.8} {
		if got := ex.Replicas[i].Total; math.Abs(got-want) > 0.001 {
			t.Errorf("total of %s: got %.3f, want %.3f", ex.Replicas[i].Name, got, want)
		}
	}
	if ex.Winner != "B" {
		t.Errorf("winner: got %s, want B", ex.Winner)
	}
}

// A replica whose URL changed while its streams run is there twice.
func TestFleetSnapshotBuildRemovedTwin(t *testing.T) {
	f := func(t *testing.T, replicas string, wantURL string) {
		t.Helper()
		var s FleetSnapshot
		if err := json.Unmarshal([]byte(`{"replicas":[`+replicas+`]}`), &s); err != nil {
			t.Fatalf("Unmarshal: got %v, want no error", err)
		}
		fleet, err := s.Build(newTestClock().now, zap.NewNop())
		if err != nil {
			t.Fatalf("Build: got %v, want no error", err)
		}
		if n := len(fleet.Endpoints()); n != 1 {
			t.Errorf("endpoints: got %d, want 1", n)
		}
		if got := mustFind(t, fleet, "a").URL(); got != wantURL {
			t.Errorf("url: got %s, want %s", got, wantURL)
		}
	}
	const live, gone = `{"name":"a","url":"http://new"}`, `{"name":"a","url":"http://old","state":"draining"}`
	f(t, live+","+gone, "http://new")
	f(t, gone+","+live, "http://new")
	f(t, gone+","+gone, "http://old")
}

func TestFleetSnapshotErrors(t *testing.T) {
	f := func(t *testing.T, in, want string) {
		t.Helper()
		var s FleetSnapshot
		err := json.Unmarshal([]byte(in), &s)
		if err == nil {
			_, err = s.Build(newTestClock().now, zap.NewNop())
		}
		got := "no error"
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s\n got %s\nwant %s", in, got, want)
		}
	}
	one := func(fields string) string { return `{"replicas":[{"name":"a"},{"name":"b",` + fields + `}]}` }

	f(t, `[]`, "fleet: expected a JSON object, got a JSON array")
	f(t, `{"replica":[]}`, "fleet: field replica is unknown (did you mean `replicas`?)")
	f(t, `{"time":"noon","replicas":[]}`, `fleet: parsing time "noon" as "2006-01-02T15:04:05Z07:00": cannot parse "noon" as "2006"`)
	f(t, `{"replicas":{}}`, "fleet: field replicas: a JSON object does not fit")
	f(t, `{"replicas":[7]}`, "fleet: replicas[0]: expected a JSON object, got a JSON number")
	f(t, one(`"wating":1`), "fleet: replica \"b\": field wating is unknown (did you mean `waiting`?)")
	f(t, one(`"waiting":"4"`), `fleet: replica "b": field waiting: a JSON string does not fit`)
	f(t, one(`"in_flight":1.5`), `fleet: replica "b": field in_flight: a JSON number 1.5 does not fit`)
	f(t, `{"replicas":[{"name":5}]}`, `fleet: replicas[0]: field name: a JSON number does not fit`)

	f(t, `{"replicas":[{"url":"http://a"}]}`, "fleet: replicas[0]: field name is missing")
	f(t, `{"replicas":[{"name":"a/"}]}`, `fleet: replica "a/": field name: expected NAME or NAMESPACE/NAME`)
	f(t, `{"replicas":[{"name":"a"},{"name":"default/a"}]}`, `fleet: replica "default/a": field name: two replicas have it`)
	f(t, one(`"url":"b:8000"`), `fleet: replica "b": field url: "b:8000" is not http://host:port or https://host:port`)
	f(t, one(`"state":"redy"`), "fleet: replica \"b\": field state: \"redy\" is unknown (did you mean `ready`?)")
	f(t, one(`"waiting":-1`), `fleet: replica "b": field waiting: -1 is below 0 (write null when it is unknown)`)
	f(t, one(`"running":-1`), `fleet: replica "b": field running: -1 is below 0 (write null when it is unknown)`)
	f(t, one(`"age_s":-0.5`), `fleet: replica "b": field age_s: -0.5 is below 0 (write null when it is unknown)`)
	f(t, one(`"age_s":1e300`), `fleet: replica "b": field age_s: 1e+300 seconds is too long ago`)
	f(t, one(`"kv_usage":70`), `fleet: replica "b": field kv_usage: 70 is above 1 (it is a fraction, not a percentage)`)
	f(t, one(`"in_flight":-1`), `fleet: replica "b": field in_flight: -1 is below 0`)
	f(t, one(`"awaiting":-1`), `fleet: replica "b": field awaiting: -1 is below 0`)
	f(t, one(`"awaiting":2,"in_flight":1`), `fleet: replica "b": field awaiting: 2 is more than in_flight 1, which counts them too`)
	f(t, one(`"index_blocks":-1`), `fleet: replica "b": field index_blocks: -1 is below 0`)
	f(t, one(`"capacity_tokens":0`), `fleet: replica "b": field capacity_tokens: 0 is not above 0 (write null when it is unknown)`)
	f(t, one(`"match":-1`), `fleet: replica "b": field match: -1 is below 0`)
	f(t, one(`"state":"down","match":2`), "no error")
}

func TestFleetFindAndDisplayName(t *testing.T) {
	fleet := newTestFleet(newTestClock())
	fleet.Update([]EndpointSpec{
		{Name: "a", URL: "http://1"}, {Namespace: "x", Name: "a", URL: "http://2"}, {Name: "b/c", URL: "http://3"},
	})
	f := func(t *testing.T, name, wantURL, wantDisplay string) {
		t.Helper()
		e := mustFind(t, fleet, name)
		if e.URL() != wantURL || e.DisplayName() != wantDisplay {
			t.Errorf("Find(%q): got %s shown as %s, want %s shown as %s", name, e.URL(), e.DisplayName(), wantURL, wantDisplay)
		}
	}
	f(t, "a", "http://1", "a")
	f(t, "default/a", "http://1", "a")
	f(t, "x/a", "http://2", "x/a")
	f(t, "default/b/c", "http://3", "default/b/c")
	if e := fleet.Find("b/c"); e != nil {
		t.Errorf("Find(b/c): got %s, want nil: it could be c in the namespace b", e.ID())
	}
}

func TestFleetSnapshotCountsAgree(t *testing.T) {
	f := readyFleet(t, newTestClock(), "a")
	f.Endpoints()[0].awaiting.Store(2) // as seen between the two reads
	if got := f.Snapshot().Replicas[0].Awaiting; got != 0 {
		t.Errorf("awaiting beside in_flight 0: got %d, want 0", got)
	}
	if _, err := f.Snapshot().Build(f.Now, zap.NewNop()); err != nil {
		t.Errorf("Build: got %v, want no error", err)
	}
}

func TestFleetSnapshotUnmarshalKeepsOldOnError(t *testing.T) {
	s := FleetSnapshot{Replicas: []ReplicaSnapshot{{Name: "kept"}}}
	err := s.UnmarshalJSON([]byte(`{"replicas":[{"name":"a","x":1}]}`))
	if err == nil || !strings.Contains(err.Error(), "field x is unknown") || s.Replicas[0].Name != "kept" {
		t.Errorf("got %v and %v, want an error about x and the old value", err, s.Replicas)
	}
}

// What can be built prints something that can be built again and prints the same.
func FuzzFleetSnapshot(f *testing.F) {
	f.Add([]byte(snapshotJSON))
	f.Add([]byte(`{"replicas":[{"name":"A","waiting":4,"kv_usage":0.7,"match":5},{"name":"x/A","state":"down","models":["m","m"]}]}`))
	f.Add([]byte(`{"time":"0000-01-01T00:00:00Z","replicas":[{"name":"a","age_s":4e9,"state":"draining"},{"name":"default/a","state":"draining"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c := newTestClock()
		show := func(data []byte) ([]byte, error) {
			var s FleetSnapshot
			if err := json.Unmarshal(data, &s); err != nil {
				return nil, err
			}
			fleet, err := s.Build(c.now, zap.NewNop())
			if err != nil {
				return nil, err
			}
			out, err := json.Marshal(fleet.Snapshot())
			if err != nil {
				t.Fatalf("Marshal: got %v, want no error", err)
			}
			return out, nil
		}
		first, err := show(data)
		if err != nil {
			return
		}
		second, err := show(first)
		if err != nil || string(second) != string(first) {
			t.Errorf("again: got %s and error %v, want %s", second, err, first)
		}
	})
}
