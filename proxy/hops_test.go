package proxy

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"kvgate/configs"
	"kvgate/routing"
)

func TestParseHops(t *testing.T) {
	f := func(value string, want int) {
		t.Helper()
		if got := parseHops([]byte(value)); got != want {
			t.Errorf("%q: got %d, want %d", value, got, want)
		}
	}
	f("", 0)
	f("0", 0)
	f("7", 7)
	f("999", 999)
	f("12345678901", 999)
	f("99999999999999999999", 0)
	f("-1", 0)
	f("1, 2", 0)
	f("many", 0)
}

// TestHops: what is sent on counts this gateway, and a request that has passed too many ends.
func TestHops(t *testing.T) {
	s := newStub(t, echo)
	g := newGateway(t, func(s *configs.Settings) { s.Limits.Hops = 3 }, s)
	f := func(t *testing.T, path, body string, status int, wantBody string, fields ...string) {
		t.Helper()
		before := s.requests.Load()
		c := g.dial()
		a := c.ask(post(path, body, fields...))
		want(t, fmt.Sprint(fields), a.StatusCode, status)
		if !strings.Contains(a.body, wantBody) {
			t.Errorf("%v: got %s, want %s in it", fields, a.body, wantBody)
		}
		if sent := s.requests.Load() - before; (sent == 1) != (status == 200) {
			t.Errorf("%v: got %d requests sent on, want one of a status 200 only", fields, sent)
		}
		if status != 200 {
			c.closed() // the body was not read
		}
	}
	f(t, chat, chatBody, 200, "X-Kvgate-Hops: 1\r\n")
	f(t, chat, chatBody, 200, "X-Kvgate-Hops: 3\r\n", "x-kvgate-hops: 2")
	f(t, chat, chatBody, 200, "X-Kvgate-Hops: 3\r\n", "X-KVGATE-HOPS: 1", "X-Kvgate-Hops: 2")
	f(t, chat, chatBody, 200, "X-Kvgate-Hops: 1\r\n", "X-Kvgate-Hops: none")
	const message = "the request has passed 3 gateways (limits.hops): a replica or cluster of one of them leads back to it"
	f(t, chat, chatBody, 508, `{"error":{"message":"`+message+`","type":"server_error","param":null,"code":"loop_detected"}}`, "X-Kvgate-Hops: 3")
	f(t, "/v1/messages", `{"model":"m","max_tokens":1,"messages":[]}`, 508, `"error":{"type":"api_error","message":"`+message, "X-Kvgate-Hops: 3")
	f(t, chat, chatBody, 508, "loop_detected", "X-Kvgate-Hops: 3", "X-Kvgate-Hops: 0")
	f(t, chat, chatBody, 508, "passed 999 gateways", "X-Kvgate-Hops: 1000000")
	want(t, "a route of the gateway's own", g.dial().ask(get("/health", "X-Kvgate-Hops: 3")).StatusCode, 200)
}

// TestUnsent: what another gateway says nobody has seen goes elsewhere, and the gateway in
// front, nobody else, is told the same.
func TestUnsent(t *testing.T) {
	answering := func(status, fields string) func(c *stubConn) {
		return func(c *stubConn) {
			for {
				if _, err := c.request(); err != nil {
					return
				}
				c.say("HTTP/1.1 " + status + " X\r\n" + fields + "Content-Length: 2\r\n\r\nno")
			}
		}
	}
	f := func(t *testing.T, status, fields, hops string, wantStatus int, wantUnsent string, wantTries int64) {
		t.Helper()
		a, b := newStub(t, answering(status, fields)), newStub(t, answering(status, fields))
		g := newGateway(t, nil, a, b)
		got := g.dial().ask(post(chat, chatBody, hops))
		want(t, "status", got.StatusCode, wantStatus)
		want(t, "x-kvgate-unsent", got.Header.Get(unsentHeader), wantUnsent)
		want(t, "tries", a.requests.Load()+b.requests.Load(), wantTries)
	}
	const unsent, client, gateway = "x-kvgate-unsent: 1\r\n", "X-Nothing: 1", "X-Kvgate-Hops: 1"
	f(t, "502", unsent, client, 502, "", 2)
	f(t, "502", unsent, gateway, 502, "1", 2)
	f(t, "502", "", gateway, 502, "", 1) // it may have been seen
	f(t, "200", unsent, gateway, 200, "1", 1)
	f(t, "404", unsent, client, 404, "", 1)
	f(t, "503", "", client, 503, "", 2)

	// Replicas that cannot be reached, and none.
	for _, stubs := range [][]*stub{{newStub(t, plain)}, nil} {
		g := newGateway(t, nil, stubs...)
		for _, s := range stubs {
			s.close()
		}
		for hops, wantUnsent := range map[string]string{client: "", gateway: "1"} {
			a := g.dial().ask(post(chat, chatBody, hops))
			want(t, fmt.Sprintf("%d replicas, %s: x-kvgate-unsent", len(stubs), hops), a.Header.Get(unsentHeader), wantUnsent)
			if a.StatusCode < 502 {
				t.Errorf("%d replicas: got status %d, want 502 or 503", len(stubs), a.StatusCode)
			}
		}
	}
}

// TestSessionField: an answer carries the token of the replica, over what the replica says.
func TestSessionField(t *testing.T) {
	cfg, err := configs.ParseScheduling("test.yaml", []byte(`apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: multicluster-session-affinity-filter
- type: session-affinity-filter
  parameters: {encodedEndpointHeaderConfig: {header: X-Second}}
- type: random-picker
`))
	if err != nil {
		t.Fatal(err)
	}
	serve := func(c *stubConn) {
		for {
			if _, err := c.request(); err != nil {
				return
			}
			c.say("HTTP/1.1 200 OK\r\nX-Session-Token: of another\r\nContent-Length: 2\r\n\r\n{}")
		}
	}
	stubs := []*stub{newStub(t, serve), newStub(t, serve), newStub(t, serve)}
	g := newGatewayWith(t, func(s *configs.Settings) { s.Headers.Replica = true }, func(o *Options) {
		router, err := routing.New(cfg, o.Fleet, 1)
		if err != nil {
			t.Fatal(err)
		}
		o.Router.Store(router)
	}, nil, stubs...)
	c := g.dial()
	first := c.ask(post(chat, chatBody))
	token := first.Header.Values("x-session-token")
	if len(token) != 1 || token[0] == "of another" || first.Header.Get("x-second") != token[0] {
		t.Fatalf("got the tokens %q and %q, want one of the gateway in both", token, first.Header.Get("x-second"))
	}
	for range 20 {
		a := c.ask(post(chat, chatBody, "X-Session-Token: "+token[0]))
		want(t, "replica", a.Header.Get(replicaHeader), first.Header.Get(replicaHeader))
	}
}

func TestAverages(t *testing.T) {
	b := newAdminBench(t, "a", "b", "c")
	averages := NewAverages(b.fleet)
	if err := b.reg.Register(averages); err != nil {
		t.Fatal(err)
	}
	e := b.fleet.Endpoints()
	page := func() string {
		t.Helper()
		w := b.do("GET", "/metrics", "")
		want(t, "status", w.Code, 200)
		return w.Body.String()
	}
	f := func(line string) {
		t.Helper()
		if !strings.Contains(page(), "\n"+line+"\n") {
			t.Errorf("got no line %s", line)
		}
	}
	for _, x := range e {
		x.Observe(routing.NoMetrics(), b.now)
	}
	f(`llm_d_epp_ready_endpoints{name="kvgate"} 3`)
	if got := page(); strings.Contains(got, "llm_d_epp_average") {
		t.Errorf("got averages of nothing, want none:\n%s", got)
	}
	e[0].Observe(routing.Metrics{Waiting: 1, Running: 2, KVUsage: 0.25}, b.now)
	e[1].Observe(routing.Metrics{Waiting: 3, Running: 6, KVUsage: 0.75}, b.now)
	f(`llm_d_epp_average_queue_size{name="kvgate"} 2`)
	f(`llm_d_epp_average_running_requests{name="kvgate"} 4`)
	f(`llm_d_epp_average_kv_cache_utilization{name="kvgate"} 0.5`)
	f(`llm_d_epp_std_dev_queue_size{name="kvgate"} 1`)
	f(`llm_d_epp_std_dev_running_requests{name="kvgate"} 2`)
	f(`llm_d_epp_std_dev_kv_cache_utilization{name="kvgate"} 0.25`)
	f(`llm_d_epp_per_endpoint_queue_size{model_server_endpoint="b",name="kvgate"} 3`)
	descs := make(chan *prometheus.Desc, 16)
	averages.Describe(descs)
	close(descs)
	rows := docText(t, "multi-cluster.md")
	n := 0
	for d := range descs {
		n++
		name := strings.Split(d.String(), `"`)[1]
		if !strings.Contains(rows, "\n| `"+name+"` | `name`") {
			t.Errorf("docs/multi-cluster.md: got no row of %s, want one", name)
		}
	}
	if got := strings.Count(rows, "\n| `llm_d_epp_"); got != n {
		t.Errorf("docs/multi-cluster.md: got %d rows, want %d", got, n)
	}
}
