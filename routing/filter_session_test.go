package routing

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kvgate/configs"
)

// heads is a request's header.
type heads map[string]string

func (h heads) Header(name string) []byte {
	if v, ok := h[name]; ok {
		return []byte(v)
	}
	return nil
}

// sessionRouter has the plugin in front of a scorer that prefers c.
func sessionRouter(t *testing.T, c *testClock, typ, parameters string) *Router {
	t.Helper()
	f := readyFleet(t, c, "a", "b", "c")
	for i, e := range f.Endpoints() {
		e.Observe(observed(float64(2-i), 0, 0), c.now().Add(1000*time.Hour))
	}
	return newTestRouter(t, f, `plugins:
- {type: `+typ+`, name: session, parameters: {`+parameters+`}}
- {type: queue-scorer, parameters: {load: scraped}}
schedulingProfiles: [{name: p, plugins: [{pluginRef: session, weight: 5}, {pluginRef: queue-scorer, weight: 1}]}]
`)
}

func TestSessionToken(t *testing.T) {
	f := func(t *testing.T, typ, parameters string, h heads, want string) {
		t.Helper()
		r := sessionRouter(t, newTestClock(), typ, parameters)
		req := promptOf("m", 1, 1)
		if h != nil {
			req.Headers = h
		}
		l, err := r.Route(req)
		if err != nil {
			t.Fatal(err)
		}
		if got := l.Endpoint.Name(); got != want {
			t.Errorf("%s {%s} %v: got %s, want %s", typ, parameters, h, got, want)
		}
		l.Done(Completed)
	}
	const other = "encodedEndpointHeaderConfig: {header: X-My-Session}"
	for _, typ := range []string{"session-affinity-filter", "multicluster-session-affinity-filter", "session-affinity-scorer"} {
		f(t, typ, "", nil, "c")
		f(t, typ, "", heads{}, "c")
		f(t, typ, "", heads{"x-session-token": "ZGVmYXVsdC9h"}, "a") // default/a
		f(t, typ, "", heads{"x-session-token": "ZGVmYXVsdC9i"}, "b")
		f(t, typ, "", heads{"x-session-token": "ZGVmYXVsdC94"}, "c") // default/x is no candidate
		f(t, typ, "", heads{"x-session-token": "not base64!"}, "c")
		f(t, typ, "", heads{"x-session-token": strings.Repeat("ZGVm", 400)}, "c")
		f(t, typ, other, heads{"x-session-token": "ZGVmYXVsdC9h"}, "c")
		f(t, typ, other, heads{"x-my-session": "ZGVmYXVsdC9h"}, "a")
	}
	r := sessionRouter(t, newTestClock(), "session-affinity-filter", other)
	l, err := r.Route(promptOf("m", 1, 1))
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprintf("%v %s", l.SessionHeaders(), l.Endpoint.SessionToken()); got != "[x-my-session] ZGVmYXVsdC9j" {
		t.Errorf("got %s for the answer, want the field and the token of c", got)
	}
	r = sessionRouter(t, newTestClock(), "session-affinity-filter", "strategy: session_id")
	if l, err = r.Route(promptOf("m", 1, 1)); err != nil || len(l.SessionHeaders()) != 0 {
		t.Errorf("session_id: got %v %v for the answer, want nothing", l.SessionHeaders(), err)
	}
}

func TestSessionID(t *testing.T) {
	c := newTestClock()
	r := sessionRouter(t, c, "multicluster-session-affinity-filter", "strategy: session_id, sessionIdConfig: {sources: [{header: X-Conversation}, {header: x-user}], evictionTtlSeconds: 60}")
	f := r.Fleet()
	route := func(h heads, exclude ...*Endpoint) string {
		t.Helper()
		req := promptOf("m", 1, 1)
		req.Headers, req.Exclude = h, exclude
		l, err := r.Route(req)
		if err != nil {
			t.Fatal(err)
		}
		l.Done(Completed)
		return l.Endpoint.Name()
	}
	want := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: got %s, want %s", what, got, want)
		}
	}
	prefer := func(name string) {
		for _, e := range f.Endpoints() {
			v := 1.0
			if e.Name() == name {
				v = 0
			}
			e.Observe(observed(v, 0, 0), c.now().Add(1000*time.Hour))
		}
	}
	one, two := heads{"x-conversation": "one"}, heads{"x-user": "two"}
	prefer("a")
	want("the first of a session", route(one), "a")
	prefer("b")
	want("the second of it", route(one), "a")
	want("another session", route(two), "b")
	want("no session", route(heads{}), "b")
	want("the first source counts", route(heads{"x-conversation": "one", "x-user": "two"}), "a")
	want("an empty source does not", route(heads{"x-conversation": "", "x-user": "two"}), "b")
	prefer("c")
	if _, err := r.Explain(&Request{Model: []byte("m"), Weight: 1, Headers: heads{"x-conversation": "three"}}); err != nil {
		t.Fatal(err)
	}
	prefer("b")
	want("an explanation binds nothing", route(heads{"x-conversation": "three"}), "b")
	// Its endpoint is no candidate: the session moves for good.
	prefer("c")
	want("a second attempt", route(one, f.Endpoints()[0]), "c")
	prefer("b")
	want("behind it", route(one), "c")
	// A reload keeps the bindings, and use keeps them alive.
	cfg := r.Config()
	again, err := New(cfg, f, 99)
	if err != nil {
		t.Fatal(err)
	}
	var current Current
	current.Store(again)
	r = again
	for range 3 {
		c.advance(50 * time.Second)
		want("behind a reload", route(one), "c")
	}
	c.advance(61 * time.Second)
	want("unused for too long", route(one), "b")
	// Without the plugin the table goes.
	current.Store(newTestRouter(t, f, "plugins: [{type: queue-scorer}]\n"))
	if n := len(f.sessions); n != 0 {
		t.Errorf("got %d tables, want none", n)
	}
}

// TestSessionTable: more sessions than it holds, the least recently used make room.
func TestSessionTable(t *testing.T) {
	c := newTestClock()
	f := readyFleet(t, c, "a", "b")
	table, e := f.sessionTable("s", 7), f.Endpoints()
	const ttl = time.Hour
	place := uint64(5)
	for i := range uint64(sessionWays + 1) {
		c.advance(time.Second)
		table.bind(place+i*sessionPlaces, e[i%2], false, c.now(), ttl)
		if i == 0 {
			continue
		}
		table.bind(place+sessionPlaces, e[1], true, c.now(), ttl) // the second one is used all the time
	}
	for i := range uint64(sessionWays + 1) {
		x := table.find(place+i*sessionPlaces, c.now(), ttl)
		if got, want := x != nil, i != 0; got != want {
			t.Errorf("session %d: got it bound: %v, want %v", i, got, want)
		} else if want && x.endpoint != e[i%2] {
			t.Errorf("session %d: got %s, want %s", i, x.endpoint.Name(), e[i%2].Name())
		}
	}
	if table.keyOf(nil) == 0 || table.keyOf([]byte("x")) == table.keyOf([]byte("y")) {
		t.Errorf("got the keys %d, %d and %d, want different ones and never 0", table.keyOf(nil), table.keyOf([]byte("x")), table.keyOf([]byte("y")))
	}
}

func TestSessionParameters(t *testing.T) {
	f := func(parameters, want string) {
		t.Helper()
		cfg, err := configs.ParseScheduling("test.yaml", []byte(header+"plugins: [{type: session-affinity-filter, parameters: {"+parameters+"}}]\n"))
		text := ""
		if err == nil {
			var r *Router
			if r, err = New(cfg, readyFleet(t, newTestClock(), "a"), 1); err == nil {
				text = strings.Join(r.Config().Warnings, "\n")
			}
		}
		if err != nil {
			text = err.Error()
		}
		if want == "" && err != nil || !strings.Contains(text, want) {
			t.Errorf("{%s}: got %s, want %q", parameters, text, want)
		}
	}
	f("", "")
	f("strategy: session_id, sessionIdConfig: {sources: [{header: a}], evictionTtlSeconds: 0.5, evictionSweepSeconds: 1}", "")
	f("strategy: cookie", `strategy "cookie" is unknown`)
	f("header: x", "unknown field")
	f("encodedEndpointHeaderConfig: {header: content-length}", `"content-length" cannot name a session`)
	f("encodedEndpointHeaderConfig: {header: 'a b'}", `"a b" cannot name a session`)
	f("strategy: session_id, sessionIdConfig: {sources: [{header: 'a:b'}]}", `"a:b" cannot name a session`)
	f("strategy: session_id, sessionIdConfig: {sources: [{attribute: SessionID, producer: x}]}", "requests have no attributes here (name a header field)")
	f("strategy: session_id, sessionIdConfig: {sources: [{}]}", "a source names nothing")
	f("strategy: session_id, sessionIdConfig: {evictionTtlSeconds: 0}", "evictionTtlSeconds 0 is out of range")
	f("strategy: session_id, sessionIdConfig: {evictionSweepSeconds: -1}", "evictionSweepSeconds -1 is out of range")
	f("sessionIdConfig: {sources: [{header: a}]}", "sessionIdConfig has no effect with strategy: encoded_endpoint_header")
	f("strategy: session_id, encodedEndpointHeaderConfig: {header: a}", "encodedEndpointHeaderConfig has no effect with strategy: session_id")
	f("profileName: decode", "profileName has no effect")
}

// fixed is a request's header without a map.
type fixed struct {
	name  string
	value []byte
}

func (h *fixed) Header(name string) []byte {
	if name == h.name {
		return h.value
	}
	return nil
}

func TestSessionAllocatesNothing(t *testing.T) {
	f := func(parameters string, h *fixed) {
		t.Helper()
		r := sessionRouter(t, newTestClock(), "session-affinity-filter", parameters)
		req := promptOf("m", 1, 1)
		req.Headers = h
		route := func() {
			l, err := r.Route(req)
			if err != nil {
				panic(err)
			}
			l.Done(Completed)
		}
		route()
		if got := testing.AllocsPerRun(200, route); got != 0 {
			t.Errorf("{%s}: got %v allocations per decision, want none", parameters, got)
		}
	}
	f("", &fixed{"x-session-token", []byte("ZGVmYXVsdC9h")})
	f("strategy: session_id", &fixed{"x-session-id", []byte("one")})
}
