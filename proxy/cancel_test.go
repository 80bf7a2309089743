package proxy

import (
	"context"
	"testing"

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
