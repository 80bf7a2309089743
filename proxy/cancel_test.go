package proxy

import (
	"context"
	"testing"
	"time"

	"kvgate/configs"
	"kvgate/routing"
)

// TestClientLeavesWhileTokensAreRendered: nobody renders for a client that has
// left, and no replica sees the request.
func TestClientLeavesWhileTokensAreRendered(t *testing.T) {
	scheduling, err := configs.ParseScheduling("test.yaml", []byte(`apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: token-producer
  parameters: {vllm: {url: "http://render:1"}}
`))
	if err != nil {
		t.Fatal(err)
	}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			asked, canceled := make(chan bool, 1), make(chan bool, 1)
			render := func(q routing.RenderQuery) (int, []byte, error) {
				asked <- true
				<-q.Done
				canceled <- true
				return 0, nil, context.Canceled
			}
			s := newStub(t, plain)
			g := newGatewayWith(t, nil, func(o *Options) {
				router, err := routing.New(scheduling, o.Fleet, 1, routing.WithRenderer(render))
				if err != nil {
					t.Fatal(err)
				}
				o.Router.Store(router)
			}, way.wrap(t), s)
			c := newClient(t, way.dial(t, g.addr))
			c.say(post(chat, chatBody))
			<-asked
			_ = c.Close()
			<-canceled
			want(t, "status", g.line()["status"], int64(499))
			want(t, "requests sent on", s.requests.Load(), int64(0))
			want(t, "canceled", g.fleet.TokenSources()[routing.TokensCanceled], uint64(1))
		})
	}
}

// TestClientLeavesTheWindow: a request that waits for others goes when its client
// does, no replica sees it, and the rest of the window is placed without it.
func TestClientLeavesTheWindow(t *testing.T) {
	scheduling, err := configs.ParseScheduling("test.yaml", []byte(`apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: burst-prefix-cache-producer}
- type: burst-prefix-cache-producer
`))
	if err != nil {
		t.Fatal(err)
	}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			opened, end := make(chan bool, 2), make(chan time.Time, 2)
			timer := func(time.Duration) (<-chan time.Time, func() bool) {
				opened <- true
				return end, func() bool { return true }
			}
			first, second := newStub(t, plain), newStub(t, plain)
			g := newGatewayWith(t, nil, func(o *Options) {
				router, err := routing.New(scheduling, o.Fleet, 1, routing.WithTimer(timer))
				if err != nil {
					t.Fatal(err)
				}
				o.Router.Store(router)
			}, way.wrap(t), first, second)
			c, other := newClient(t, way.dial(t, g.addr)), newClient(t, way.dial(t, g.addr))
			c.say(post(chat, chatBody))
			<-opened
			_ = c.Close()
			want(t, "status of the one that left", g.line()["status"], int64(499))
			want(t, "requests sent on", first.requests.Load()+second.requests.Load(), int64(0))
			other.say(post(chat, chatBody))
			<-opened
			end <- time.Now()
			want(t, "status of the other", g.line()["status"], int64(200))
			const of = `kvgate_burst_requests_total{producer="burst-prefix-cache-producer",result=`
			want(t, "left", g.value(of+`"left"}`), 1.0)
			want(t, "alone", g.value(of+`"alone"}`), 1.0)
			want(t, "windows", g.value(`kvgate_burst_windows_total{producer="burst-prefix-cache-producer"}`), 2.0)
		})
	}
}
