package routing

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"kvgate/configs"
)

// blocksOf names the blocks of a prompt the way a hash chain does: each by all letters up to it.
func blocksOf(prompt string) []uint64 {
	var out []uint64
	h := uint64(14695981039346656037)
	for _, c := range prompt {
		h = (h ^ uint64(c)) * 1099511628211
		out = append(out, h)
	}
	return out
}

// batch makes the requests of a window of "prompt*times" words, or "prompt" alone.
func batch(t testing.TB, text string) (out [][]uint64) {
	t.Helper()
	for _, word := range strings.Fields(text) {
		prompt, times, several := strings.Cut(word, "*")
		n := 1
		if several {
			if _, err := fmt.Sscan(times, &n); err != nil {
				t.Fatal(err)
			}
		}
		if prompt == "-" {
			prompt = ""
		}
		for range n {
			out = append(out, blocksOf(prompt))
		}
	}
	return out
}

func TestBurstPlacement(t *testing.T) {
	// want has the replica of each request, 1 to 9, - for none.
	f := func(t *testing.T, rules burstRules, requests, running, want string) {
		t.Helper()
		var loads []float64
		for _, c := range running {
			loads = append(loads, float64(c-'0'))
		}
		got := ""
		for _, r := range rules.place(batch(t, requests), loads) {
			if got += "-"; r >= 0 {
				got = got[:len(got)-1] + string(rune('1'+r))
			}
		}
		if got != want {
			t.Errorf("%+v, %s on %d replicas: got %s, want %s", rules, requests, len(loads), got, want)
		}
	}
	none := burstRules{perReplica: -1}
	f(t, none, "abc*8", "0000", "11111111")
	f(t, burstRules{perReplica: 2}, "abc*8", "0000", "11223344")
	f(t, burstRules{perReplica: 4}, "abc*8", "0000", "11112222")
	f(t, burstRules{perReplica: 2}, "abc*8", "00", "11221212") // full: wraps around
	f(t, none, "abc", "0000", "-")
	f(t, none, "-*3", "0000", "---")
	f(t, none, "abc*2", "", "--")
	f(t, none, "a*8 b*8", "0000", "1111111122222222")
	f(t, none, "a b a b a", "00", "12121")
	// The families ab and xy.
	two, three := burstRules{perReplica: -1, colocate: 2}, burstRules{perReplica: -1, colocate: 3}
	f(t, two, "abc*2 abd*2 xyc*2 xyd*2", "00", "11112222")
	f(t, three, "abc*2 abd*2 xyc*2 xyd*2", "00", "11221122")
	f(t, two, "abc*2 abd*2 abe*2 abf*2", "0000", "11223344") // nobody gets more than the fair share
	f(t, two, "abc*2 abd xyc*2 xyd", "00", "111222")
	f(t, two, "abc*2 abd xyc*2 xyd pqr", "00", "111222-") // nobody is like pqr
	f(t, two, "abc*2 ab", "00", "112")                    // the share is 2
	f(t, two, "abc abd abe abf", "00", "1122")
	f(t, none, "abc abd abe abf", "00", "----")
	f(t, two, "a ab abd", "00", "-21") // too short to share two blocks; the longer one first
	// Balance.
	tokens := burstRules{perReplica: -1, byTokens: true}
	f(t, none, "abcd*2 x*2 y*2", "00", "112211")
	f(t, tokens, "abcd*2 x*2 y*2", "00", "112222")
	nine := burstRules{perReplica: -1, colocate: 9, byTokens: true}
	f(t, nine, "abcdefghi1*2 abcdefghi2*2 abcdefghi3*2", "00", "111111")
	f(t, burstRules{perReplica: -1, colocate: 9}, "abcdefghi1*2 abcdefghi2*2 abcdefghi3*2", "00", "111122") // the share is 3
	f(t, tokens, "abcd*2 abcx*2 y*2", "00", "112211")
	// Equal loads of the window: the replica with fewer running requests, then the first.
	f(t, none, "a*2 b*2 c*2", "211", "223311")
	// Longest first, then in the order in which they came.
	f(t, none, "x*2 abc*2 y*2", "000", "221133")
}

// TestBurstPlacementProperties checks what holds for every window.
func TestBurstPlacementProperties(t *testing.T) {
	rnd := rand.New(rand.NewPCG(8, 1))
	for round := range 3000 {
		rules := burstRules{perReplica: -1, colocate: rnd.IntN(4), byTokens: rnd.IntN(2) == 0}
		if rnd.IntN(2) == 0 {
			rules.perReplica = 1 + rnd.IntN(5)
		}
		requests := make([][]uint64, rnd.IntN(40))
		prompts := make([]string, len(requests))
		for i := range requests {
			for range rnd.IntN(5) {
				prompts[i] += string(rune('a' + rnd.IntN(2)))
			}
			requests[i] = blocksOf(prompts[i])
		}
		running := make([]float64, 1+rnd.IntN(6))
		for i := range running {
			running[i] = float64(rnd.IntN(3))
		}
		got := rules.place(requests, running)
		fail := func(format string, args ...any) {
			t.Helper()
			t.Fatalf("round %d, %+v, %q on %v: got %v: %s", round, rules, prompts, running, got, fmt.Sprintf(format, args...))
		}
		if again := rules.place(slices.Clone(requests), slices.Clone(running)); !slices.Equal(got, again) {
			fail("want it again, got %v", again)
		}
		if len(got) != len(requests) {
			fail("want %d assignments", len(requests))
		}
		alike := func(i int) (equal int, shared bool) {
			for k := range prompts {
				if prompts[k] == prompts[i] {
					equal++
				}
				c := rules.colocate
				shared = shared || k != i && c > 0 && len(prompts[i]) >= c && len(prompts[k]) >= c && prompts[k][:c] == prompts[i][:c]
			}
			return equal, shared
		}
		for i, r := range got {
			if r < -1 || r >= len(running) {
				fail("request %d is on replica %d", i, r)
			}
			equal, shared := alike(i)
			if want := prompts[i] != "" && (equal > 1 || shared); (r >= 0) != want {
				fail("request %d is placed: %v, want %v", i, r >= 0, want)
			}
			if r < 0 {
				continue
			}
			on := make([]int, len(running))
			for k := range prompts {
				if prompts[k] == prompts[i] {
					on[got[k]]++
				}
			}
			switch k := rules.perReplica; {
			case k < 0 && on[r] != equal:
				fail("%d of %d requests for %q are together, want all", on[r], equal, prompts[i])
			case k > 0 && equal <= k && on[r] != equal:
				fail("%d of %d requests for %q are together, want all: they are below the cap", on[r], equal, prompts[i])
			case k > 0 && equal <= k*len(running) && slices.Max(on) > k:
				fail("%v requests for %q by replica, want at most %d on each", on, prompts[i], k)
			case k > 0 && equal > k*len(running) && slices.Min(on) < k:
				fail("%v requests for %q by replica, want at least %d on each: there are %d", on, prompts[i], k, equal)
			}
		}
	}
}

// TestBurstBlocks: a prompt behind other prompts is another one.
func TestBurstBlocks(t *testing.T) {
	f := func(ends []int, hashes ...uint64) []uint64 { return burstBlocks(&chain{hashes: hashes, ends: ends}) }
	one := f([]int{3}, 1, 2, 3)
	if !slices.Equal(one, []uint64{1, 2, 3}) {
		t.Errorf("one prompt: got %v, want its chain", one)
	}
	a, b, c := f([]int{2, 3}, 1, 2, 3), f([]int{1, 3}, 1, 2, 3), f([]int{2, 3}, 1, 2, 3)
	if !slices.Equal(a, c) || common(a, one) != 2 || common(a, b) != 1 {
		t.Errorf("got %v, %v, %v of equal, other and equal prompts, want the first and the last equal", a, b, c)
	}
	if d := f([]int{2, 3}, 9, 8, 3); d[2] == a[2] {
		t.Errorf("got %x for the same second prompt behind other first ones, want two names", d[2])
	}
}

func TestBurstParameters(t *testing.T) {
	f := func(parameters, want string) {
		t.Helper()
		cfg, err := configs.ParseScheduling("test.yaml", []byte(header+"plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: burst-prefix-cache-producer}}, {type: burst-prefix-cache-producer, parameters: {"+parameters+"}}]\n"))
		if err == nil {
			_, err = New(cfg, readyFleet(t, newTestClock(), "a"), 1)
		}
		if got := fmt.Sprint(err); want == "" && err != nil || !strings.Contains(got, want) {
			t.Errorf("{%s}: got %v, want %q", parameters, err, want)
		}
	}
	f("", "")
	f("windowDurationMs: 1, maxPerReplica: 1, blockSizeTokens: 1, maxPrefixTokensToMatch: 1, minColocateBlocks: 3, maxBatchSize: -1, balanceBy: tokens", "")
	f("windowDurationMs: 10000, maxPerReplica: -1, maxPrefixTokensToMatch: 64, maxBatchSize: 1, balanceBy: requests", "")
	f("windowDurationMs: 0", "windowDurationMs 0")
	f("windowDurationMs: 10001", "windowDurationMs 10001")
	f("maxPerReplica: 0", "maxPerReplica 0")
	f("maxPerReplica: -2", "maxPerReplica -2")
	f("blockSizeTokens: 0", "blockSizeTokens 0")
	f("maxPrefixTokensToMatch: 63", "maxPrefixTokensToMatch 63")
	f("maxPrefixTokensToMatch: -1", "maxPrefixTokensToMatch -1")
	f("minColocateBlocks: -1", "minColocateBlocks -1")
	f("maxBatchSize: 0", "maxBatchSize 0")
	f("maxBatchSize: -2", "maxBatchSize -2")
	f("balanceBy: bytes", `balanceBy "bytes"`)
	f("window: 5", "window")
}

// bed routes in a synctest bubble: its clock is the bubble's.
type bed struct {
	t     *testing.T
	fleet *Fleet
	*Router
	begin time.Time
}

func newBed(t *testing.T, parameters string, replicas ...string) *bed {
	t.Helper()
	f := NewFleet(time.Now, time.Hour, zap.NewNop())
	f.Update(specs(replicas...))
	for _, e := range f.Endpoints() {
		e.Observe(observed(0, 0, 0), time.Now())
	}
	cfg, err := configs.ParseScheduling("test.yaml", []byte(header+`plugins:
- {type: burst-prefix-cache-producer, parameters: {`+parameters+`}}
- {type: prefix-cache-scorer, name: burst, parameters: {prefixMatchInfoProducerName: burst-prefix-cache-producer}}
- type: prefix-cache-scorer
- type: queue-scorer
schedulingProfiles: [{name: p, plugins: [{pluginRef: burst, weight: 4}, {pluginRef: prefix-cache-scorer, weight: 2}, {pluginRef: queue-scorer, weight: 1}]}]
`))
	if err != nil {
		t.Fatal(err)
	}
	r, err := New(cfg, f, 1, WithTimer(func(d time.Duration) (<-chan time.Time, func() bool) {
		timer := time.NewTimer(d)
		return timer.C, timer.Stop
	}))
	if err != nil {
		t.Fatal(err)
	}
	return &bed{t, f, r, time.Now()}
}

// client is a Headers that can leave.
type client struct {
	mu     sync.Mutex
	gone   bool
	cancel func()
}

func (c *client) Header(string) []byte { return nil }
func (c *client) Attach(cancel func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cancel = cancel
	return !c.gone
}
func (c *client) Detach() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cancel = nil
}
func (c *client) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone = true; c.cancel != nil {
		c.cancel()
	}
}

// routed is how a request fared.
type routed struct {
	lease *Lease
	err   error
	at    time.Duration // since the beginning
}

func (b *bed) route(req *Request) routed {
	l, err := b.Route(req)
	return routed{l, err, time.Since(b.begin)}
}

// counts returns windows, placed, alone, full, left.
func (b *bed) counts() string {
	s := b.fleet.BurstStats()[0]
	return fmt.Sprint(s.Windows, s.Requests)
}

func TestBurstWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "windowDurationMs: 50", "a", "b", "c", "d")
		got := make([]routed, 32)
		var wg sync.WaitGroup
		for i := range got {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				got[i] = b.route(promptOf("m", byte(i%4*10), 4))
			})
		}
		wg.Wait()
		by := make([]string, 4)
		for i, r := range got {
			if r.err != nil || r.at != 50*time.Millisecond {
				t.Fatalf("request %d: got %v after %v, want an endpoint at the end of the window", i, r.err, r.at)
			}
			if g := i % 4; by[g] == "" {
				by[g] = r.lease.Endpoint.Name()
			} else if by[g] != r.lease.Endpoint.Name() {
				t.Errorf("group %d: got %s and %s, want one replica", g, by[g], r.lease.Endpoint.Name())
			}
		}
		slices.Sort(by)
		if want := []string{"a", "b", "c", "d"}; !slices.Equal(by, want) {
			t.Errorf("got the groups on %v, want %v", by, want)
		}
		// What is expected in a cache is the other producer's word.
		if l := got[0].lease; l.Matched+got[4].lease.Matched == 0 || l.Total != 4 {
			t.Errorf("got %d and %d of %d blocks expected for the first and a later request of a group, want the later one's", l.Matched, got[4].lease.Matched, l.Total)
		}
		if got, want := b.counts(), "1 [32 0 0 0]"; got != want {
			t.Errorf("got %s windows and requests, want %s", got, want)
		}
	})
}

// TestBurstBesidePrecise: the engines' own word and the window's wish are two columns.
func TestBurstBesidePrecise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFleet(time.Now, time.Hour, zap.NewNop())
		f.Update(specs("a", "b"))
		for _, e := range f.Endpoints() {
			e.Observe(observed(0, 0, 0), time.Now())
		}
		cfg, err := configs.ParseScheduling("test.yaml", []byte(header+`plugins:
- {type: burst-prefix-cache-producer, parameters: {windowDurationMs: 20}}
- {type: precise-prefix-cache-producer, parameters: {tokenProcessorConfig: {blockSizeTokens: 64}}}
- {type: prefix-cache-scorer, name: burst, parameters: {prefixMatchInfoProducerName: burst-prefix-cache-producer}}
- {type: prefix-cache-scorer, name: precise, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
schedulingProfiles: [{name: p, plugins: [{pluginRef: burst, weight: 4}, {pluginRef: precise, weight: 2}]}]
`))
		if err != nil {
			t.Fatal(err)
		}
		r, err := New(cfg, f, 1, WithTimer(func(d time.Duration) (<-chan time.Time, func() bool) {
			timer := time.NewTimer(d)
			return timer.C, timer.Stop
		}))
		if err != nil {
			t.Fatal(err)
		}
		ids := func(first uint32) (tokens []uint32) {
			for i := range uint32(128) {
				tokens = append(tokens, first+i)
			}
			return tokens
		}
		// b tells that it holds the prompt of the third request, which is alone in its window.
		r.KVEventSources()[0].Sink.Stored(f.Endpoints()[1], 0, &BlockStored{Hashes: []uint64{1, 2}, Tokens: ids(5000), BlockTokens: 64, Model: []byte("m")})
		got := make([]*Lease, 3)
		var wg sync.WaitGroup
		for i, first := range []uint32{1000, 1000, 5000} {
			wg.Go(func() {
				req := &Request{Model: []byte("m"), Weight: 1, Exact: true}
				for _, id := range ids(first) {
					req.Tokens = binary.LittleEndian.AppendUint32(req.Tokens, id)
				}
				req.Ends = append(req.Ends, len(req.Tokens))
				var err error
				if got[i], err = r.Route(req); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if a, b := got[0].Endpoint.Name(), got[1].Endpoint.Name(); a != b {
			t.Errorf("equal prompts: got %s and %s, want one replica", a, b)
		}
		if l := got[2]; l.Endpoint.Name() != "b" || l.Matched != 2 || l.Total != 2 {
			t.Errorf("the prompt that b holds: got %s with %d of %d blocks, want b with 2 of 2", l.Endpoint.Name(), l.Matched, l.Total)
		}
	})
}

// TestBurstWaits: who waits, and for how long.
func TestBurstWaits(t *testing.T) {
	f := func(t *testing.T, parameters string, replicas []string, req func(i int) *Request, pauses []time.Duration, want []time.Duration, counts string) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, parameters, replicas...)
			got := make([]time.Duration, len(pauses))
			var wg sync.WaitGroup
			for i, pause := range pauses {
				wg.Go(func() {
					time.Sleep(pause)
					r := b.route(req(i))
					if r.err != nil {
						t.Errorf("request %d: got %v, want an endpoint", i, r.err)
					}
					got[i] = r.at
				})
			}
			wg.Wait()
			if !slices.Equal(got, want) {
				t.Errorf("{%s}, %d replicas: got decisions at %v, want %v", parameters, len(replicas), got, want)
			}
			if got := b.counts(); got != counts {
				t.Errorf("{%s}, %d replicas: got %s windows and requests, want %s", parameters, len(replicas), got, counts)
			}
		})
	}
	const ms = time.Millisecond
	same := func(int) *Request { return promptOf("m", 1, 2) }
	two := []string{"a", "b"}
	f(t, "", two, same, []time.Duration{0}, []time.Duration{100 * ms}, "1 [0 1 0 0]") // a lone request: one window
	f(t, "windowDurationMs: 10", two, same, []time.Duration{0, 9 * ms, 11 * ms}, []time.Duration{10 * ms, 10 * ms, 21 * ms}, "2 [2 1 0 0]")
	f(t, "", two[:1], same, []time.Duration{0, 0}, []time.Duration{0, 0}, "0 [0 2 0 0]")                                                        // nothing to choose
	f(t, "", two, func(int) *Request { return &Request{Model: []byte("m"), Weight: 1} }, []time.Duration{0}, []time.Duration{0}, "0 [0 0 0 0]") // no prompt
	f(t, "maxBatchSize: 2", two, same, []time.Duration{0, ms, 2 * ms}, []time.Duration{100 * ms, 100 * ms, 2 * ms}, "1 [2 0 1 0]")              // full
}

// TestBurstClientLeaves: it goes at once, and its place is free at once.
func TestBurstClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "maxBatchSize: 2", "a", "b")
		c := &client{}
		var left, first, second routed
		var wg sync.WaitGroup
		wg.Go(func() {
			req := promptOf("m", 1, 2)
			req.Headers = c
			left = b.route(req)
		})
		wg.Go(func() { first = b.route(promptOf("m", 1, 2)) })
		synctest.Wait()
		time.Sleep(30 * time.Millisecond)
		c.leave()
		synctest.Wait()
		wg.Go(func() { second = b.route(promptOf("m", 1, 2)) })
		wg.Wait()
		if !errors.Is(left.err, ErrCanceled) || left.at != 30*time.Millisecond {
			t.Errorf("the one that left: got %v after %v, want %v at once", left.err, left.at, ErrCanceled)
		}
		if first.err != nil || second.err != nil || first.lease.Endpoint != second.lease.Endpoint || second.at != 100*time.Millisecond {
			t.Errorf("the others: got %v and %v, want the second in the place that was left", first, second)
		}
		if got, want := b.counts(), "1 [2 0 0 1]"; got != want {
			t.Errorf("got %s windows and requests, want %s", got, want)
		}
		for _, e := range b.fleet.Endpoints() {
			if got := e.InFlight(); got != 0 && e != first.lease.Endpoint {
				t.Errorf("%s: got %d requests in flight, want none of the one that left", e.Name(), got)
			}
		}
		// A client that has left before does not wait, and an empty window ends.
		c.cancel = nil
		req := promptOf("m", 1, 2)
		req.Headers = c
		begin := time.Now()
		if _, err := b.Route(req); !errors.Is(err, ErrCanceled) || time.Since(begin) != 0 {
			t.Errorf("gone before: got %v after %v, want %v at once", err, time.Since(begin), ErrCanceled)
		}
		time.Sleep(50 * time.Millisecond)
		begin = time.Now()
		if _, err := b.Route(promptOf("m", 9, 2)); err != nil || time.Since(begin) != 100*time.Millisecond {
			t.Errorf("behind an emptied window: got %v after %v, want a whole window", err, time.Since(begin))
		}
	})
}

// TestBurstFleetChanges: a replica that goes or comes while requests wait.
func TestBurstFleetChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "", "a", "b")
		got := make([]routed, 4)
		var wg sync.WaitGroup
		for i := range got {
			wg.Go(func() { got[i] = b.route(promptOf("m", 1, 2)) })
		}
		synctest.Wait()
		b.fleet.Update(specs("c"))
		b.fleet.Endpoints()[0].Observe(observed(0, 0, 0), time.Now())
		wg.Wait()
		for i, r := range got {
			if r.err != nil || r.lease.Endpoint.Name() != "c" {
				t.Errorf("request %d: got %v, want c", i, r)
			}
		}
	})
}

// TestBurstModels: requests that have other replicas to choose from are placed apart, on their own.
func TestBurstModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "", "a", "b", "c", "d")
		for i, e := range b.fleet.Endpoints() {
			b.fleet.SetModels(e, []string{[]string{"m", "n"}[i/2]}, true)
		}
		got := make([]routed, 8)
		var wg sync.WaitGroup
		for i := range got {
			wg.Go(func() { got[i] = b.route(promptOf([]string{"m", "n"}[i/4], 1, 2)) })
		}
		wg.Wait()
		for i, r := range got {
			if want := []string{"a", "c"}[i/4]; r.err != nil || r.lease.Endpoint.Name() != want {
				t.Errorf("request %d: got %v, want %s", i, r, want)
			}
		}
		if got, want := b.counts(), "1 [8 0 0 0]"; got != want {
			t.Errorf("got %s windows and requests, want %s", got, want)
		}
	})
}

// TestBurstSecondAttempt: what cannot be reached is not waited for again.
func TestBurstSecondAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "", "a", "b")
		reqs := []*Request{promptOf("m", 1, 2), promptOf("m", 1, 2)}
		var wg sync.WaitGroup
		for _, req := range reqs {
			wg.Go(func() {
				r := b.route(req)
				first := r.lease.Endpoint
				r.lease.Done(Unsent)
				req.Exclude = append(req.Exclude, first)
				if r = b.route(req); r.err != nil || r.lease.Endpoint == first || r.at != 100*time.Millisecond {
					t.Errorf("got %v %v after %v, want the other replica at once", r.lease, r.err, r.at)
				}
			})
		}
		wg.Wait()
	})
}

// TestBurstWithoutWindow: neither an explanation nor a router without a timer waits.
func TestBurstWithoutWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "", "a", "b")
		if _, err := b.Explain(promptOf("m", 1, 2)); err != nil || time.Since(b.begin) != 0 {
			t.Errorf("explanation: got %v after %v, want it at once", err, time.Since(b.begin))
		}
		if got, want := b.counts(), "0 [0 0 0 0]"; got != want {
			t.Errorf("got %s windows and requests, want %s", got, want)
		}
	})
	f := readyFleet(t, newTestClock(), "a", "b")
	r := newTestRouter(t, f, "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: burst-prefix-cache-producer}}, {type: burst-prefix-cache-producer}]\n")
	l, err := r.Route(promptOf("m", 1, 2))
	if err != nil || l.Total != 0 || l.Uncached != 128 {
		t.Fatalf("got %+v %v, want no prediction: a wish is none", l, err)
	}
	l.Usage(128, 0)
	l.Done(Completed)
	if got := f.PredictionStats(); len(got) != 0 {
		t.Errorf("got predictions %v, want none", got)
	}
}

// TestBurstConcurrent is for the race detector: clients come and leave all the time.
func TestBurstConcurrent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, "windowDurationMs: 5, maxPerReplica: 3, minColocateBlocks: 1, maxBatchSize: 20", "a", "b", "c")
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(i), 3))
				req := &Request{}
				for range 10 {
					time.Sleep(time.Duration(rnd.IntN(4000)) * time.Microsecond)
					req.Reset()
					c := &client{}
					req.Model, req.Headers = []byte("m"), c
					req.Tokens = append(req.Tokens, promptOf("m", byte(rnd.IntN(5)), 1+rnd.IntN(3)).Tokens...)
					req.Ends = append(req.Ends, len(req.Tokens))
					if rnd.IntN(3) == 0 {
						pause := time.Duration(rnd.IntN(6000)) * time.Microsecond
						wg.Go(func() {
							time.Sleep(pause)
							c.leave()
						})
					}
					if l, err := b.Route(req); err == nil {
						l.FirstToken()
						l.Done(Completed)
					} else if !errors.Is(err, ErrCanceled) {
						t.Errorf("got %v, want an endpoint or %v", err, ErrCanceled)
					}
				}
			})
		}
		wg.Wait()
		for _, e := range b.fleet.Endpoints() {
			if got := e.InFlight(); got != 0 {
				t.Errorf("%s: got %d requests in flight, want none", e.Name(), got)
			}
		}
		if b.producers[0].Producer.(*burstProducer).open != nil {
			t.Errorf("got an open window without members, want none")
		}
	})
}

func BenchmarkBurstPlacement(b *testing.B) {
	for _, rules := range []burstRules{{perReplica: -1}, {perReplica: 4, colocate: 4, byTokens: true}} {
		b.Run(fmt.Sprintf("%+v", rules), func(b *testing.B) {
			requests := make([][]uint64, 1000)
			for i := range requests {
				requests[i] = blocksOf(strings.Repeat("head", 32) + fmt.Sprintf("%03d", i%300) + strings.Repeat("tail", 32))
			}
			running := make([]float64, 16)
			for b.Loop() {
				rules.place(requests, running)
			}
		})
	}
}

// BenchmarkBurstWindow reports by how much the decisions on 32 requests in four
// groups come behind the end of their window, beside 32 bare timers: what the machine
// adds to both is not the window's.
func BenchmarkBurstWindow(b *testing.B) {
	const window = 20 * time.Millisecond
	f := NewFleet(time.Now, time.Hour, zap.NewNop())
	f.Update(specs("a", "b", "c", "d"))
	for _, e := range f.Endpoints() {
		e.Observe(observed(0, 0, 0), time.Now())
	}
	cfg, err := configs.ParseScheduling("test.yaml", []byte(header+`plugins:
- {type: burst-prefix-cache-producer, parameters: {windowDurationMs: 20}}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: burst-prefix-cache-producer}}
`))
	if err != nil {
		b.Fatal(err)
	}
	newTimer := func(d time.Duration) (<-chan time.Time, func() bool) {
		timer := time.NewTimer(d)
		return timer.C, timer.Stop
	}
	r, err := New(cfg, f, 1, WithTimer(newTimer))
	if err != nil {
		b.Fatal(err)
	}
	run := func(name string, wait func(req *Request)) {
		b.Run(name, func(b *testing.B) {
			var late []time.Duration
			for b.Loop() {
				ends := make([]time.Time, 32)
				var wg sync.WaitGroup
				begin := time.Now()
				for i := range ends {
					wg.Go(func() {
						wait(promptOf("m", byte(i%4*10), 16))
						ends[i] = time.Now()
					})
				}
				wg.Wait()
				for _, end := range ends {
					late = append(late, end.Sub(begin)-window)
				}
			}
			slices.Sort(late)
			b.ReportMetric(late[len(late)/2].Seconds()*1000, "p50-ms")
			b.ReportMetric(late[len(late)*99/100].Seconds()*1000, "p99-ms")
		})
	}
	run("timers", func(*Request) {
		after, _ := newTimer(window)
		<-after
	})
	run("window", func(req *Request) {
		l, err := r.Route(req)
		if err != nil {
			b.Error(err)
			return
		}
		l.Done(Completed)
	})
}
