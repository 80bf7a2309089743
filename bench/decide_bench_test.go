package bench

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/routing"
)

// decider runs the whole decision as the proxy does: parse, hash, match,
// score, pick, record, first token, done. The last requests are in flight.
type decider struct {
	router *routing.Router
	bodies [][]byte // one per conversation
	nonces [][]byte // where each differs from request to request
	flight [32]routing.Request
	leases [32]*routing.Lease
	n      int
}

func newDecider(tb testing.TB, endpoints, size int) *decider {
	tb.Helper()
	return newDeciderOf(tb, configs.DefaultScheduling(), endpoints, size)
}

func newDeciderOf(tb testing.TB, profile *configs.Scheduling, endpoints, size int) *decider {
	tb.Helper()
	fleet := routing.NewFleet(time.Now, time.Hour, zap.NewNop())
	var specs []routing.EndpointSpec
	for i := range endpoints {
		specs = append(specs, routing.EndpointSpec{Namespace: "default", Name: fmt.Sprintf("r%04d", i), URL: fmt.Sprintf("http://10.0.%d.%d:8000", i/250, i%250)})
	}
	fleet.Update(specs)
	for i, e := range fleet.Endpoints() {
		e.Observe(routing.Metrics{
			Waiting: float64(i % 3), Running: float64(i % 7), KVUsage: float64(i%10) / 10, BlockTokens: 16, CapacityTokens: 1 << 20,
		}, time.Now())
	}
	router, err := routing.New(profile, fleet, 1)
	if err != nil {
		tb.Fatal(err)
	}
	d := &decider{router: router}
	conversations := max(8, min(64, 4<<20/size)) // as many as the caches of four endpoints hold
	set := newPromptSet(size, conversations, mixWarm, true, 1)
	for i := range set.heads {
		whole := bytes.Join([][]byte{set.heads[i], set.tails[i]}, make([]byte, nonceLen))
		_, body, _ := bytes.Cut(whole, []byte("\r\n\r\n"))
		at := len(body) - len(set.tails[i]) - nonceLen
		d.bodies, d.nonces = append(d.bodies, body), append(d.nonces, body[at:at+nonceLen])
	}
	for range 2 * len(d.bodies) { // every conversation is known, all memory is there
		d.decide(tb)
	}
	return d
}

// decide routes the next request, which nobody has seen, of the next conversation.
func (d *decider) decide(tb testing.TB) *routing.Lease {
	i, c := d.n%len(d.flight), d.n%len(d.bodies)
	if l := d.leases[i]; l != nil {
		l.Done(routing.Completed)
	}
	putNonce((*[nonceLen]byte)(d.nonces[c]), uint64(d.n))
	d.n++
	r := &d.flight[i]
	r.Reset()
	r.API, r.Body, r.Memo = routing.APIChat, d.bodies[c], d.router.Memo()
	if err := r.Parse(); err != nil {
		tb.Fatal(err)
	}
	l, err := d.router.Route(r)
	if err != nil {
		tb.Fatal(err)
	}
	l.FirstToken()
	d.leases[i] = l
	return l
}

// The prompts of the benchmark must be found: most of each but its last message.
func TestDecideFindsPrefixes(t *testing.T) {
	f := func(t *testing.T, endpoints, size int, wantLeast float64) {
		d := newDecider(t, endpoints, size)
		matched, total := 0, 0
		for range 4 * len(d.bodies) {
			l := d.decide(t)
			matched, total = matched+l.Matched, total+l.Total
		}
		if got := float64(matched) / float64(total); got < wantLeast || got > 0.95 {
			t.Errorf("got %.2f of the blocks matched, want %.2f to 0.95", got, wantLeast)
		}
	}
	t.Run("8 KB, 16 endpoints", func(t *testing.T) { f(t, 16, 8<<10, 0.6) })
	t.Run("64 KB, 4 endpoints", func(t *testing.T) { f(t, 4, 64<<10, 0.6) })
	t.Run("512 KB, 100 endpoints", func(t *testing.T) { f(t, 100, 512<<10, 0.6) })
}

func BenchmarkDecide(b *testing.B) {
	for _, size := range sizeBytes {
		for _, endpoints := range []int{4, 16, 100, 1000} {
			b.Run(fmt.Sprintf("%dKB/%d", size>>10, endpoints), func(b *testing.B) {
				d := newDecider(b, endpoints, size)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					d.decide(b)
				}
			})
		}
	}
}

// profiles are the scheduling configurations whose decisions are compared.
func profiles(tb testing.TB) map[string]*configs.Scheduling {
	tb.Helper()
	cost, err := configs.LoadScheduling("../configs/expected-cost.yaml")
	if err != nil {
		tb.Fatal(err)
	}
	return map[string]*configs.Scheduling{"default": configs.DefaultScheduling(), "expected-cost": cost}
}

// BenchmarkDecideProfile compares the profiles: 16 endpoints, prompts of 8 KB.
func BenchmarkDecideProfile(b *testing.B) {
	all := profiles(b)
	for _, name := range []string{"default", "expected-cost"} {
		b.Run(name, func(b *testing.B) {
			d := newDeciderOf(b, all[name], 16, 8<<10)
			for range 60_000 { // every cache is full: what is new replaces what is old
				d.decide(b)
			}
			b.ReportAllocs()
			for b.Loop() {
				d.decide(b)
			}
		})
	}
}

func TestDecideAllocatesNothing(t *testing.T) {
	for name, profile := range profiles(t) {
		d := newDeciderOf(t, profile, 16, 8<<10)
		if got := testing.AllocsPerRun(500, func() { d.decide(t) }); got != 0 {
			t.Errorf("%s: got %v allocations per decision, want none", name, got)
		}
	}
}
