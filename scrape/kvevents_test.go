package scrape

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"kvgate/bench/fakevllm"
	"kvgate/routing"
)

// kvSink keeps what it is told as an index would: per replica and rank, how
// often each block was stored and not removed.
type kvSink struct {
	mu   sync.Mutex
	held map[string]map[uint64]int
	why  map[string]string // why a rank is incomplete
	told map[string]int    // reasons ever told, by rank and reason
	log  []string
	once bool // differs counts blocks, not their copies
}

func newKVSink() *kvSink {
	return &kvSink{held: map[string]map[uint64]int{}, why: map[string]string{}, told: map[string]int{}}
}

func rankName(e *routing.Endpoint, rank int) string { return e.Name() + "/" + strconv.Itoa(rank) }

func (s *kvSink) Stored(e *routing.Endpoint, rank int, b *routing.BlockStored) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := rankName(e, rank)
	if s.held[name] == nil {
		s.held[name] = map[uint64]int{}
	}
	for _, h := range b.Hashes {
		s.held[name][h]++
	}
	if len(b.Tokens) != len(b.Hashes)*b.BlockTokens {
		s.log = append(s.log, fmt.Sprintf("%s: %d tokens in %d blocks of %d", name, len(b.Tokens), len(b.Hashes), b.BlockTokens))
	}
}

func (s *kvSink) Removed(e *routing.Endpoint, rank int, b *routing.BlockRemoved) {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := s.held[rankName(e, rank)]
	for _, h := range b.Hashes {
		if held[h] > 1 {
			held[h]--
		} else {
			delete(held, h)
		}
	}
}

func (s *kvSink) Cleared(e *routing.Endpoint, rank int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.held, rankName(e, rank))
	s.told[rankName(e, rank)+" cleared"]++
}

func (s *kvSink) Incomplete(e *routing.Endpoint, rank int, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := rankName(e, rank)
	if s.why[name] = why; why != "" {
		delete(s.held, name)
		s.told[name+" "+why]++
	}
}

func (s *kvSink) countOnce(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.once = on
}

// clears returns how often a rank was cleared.
func (s *kvSink) clears(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.told[name+" cleared"]
}

// ranks returns the ranks that hold something.
func (s *kvSink) ranks() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprint(slices.Sorted(maps.Keys(s.held)))
}

func (s *kvSink) reason(name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.why[name]
}

func (s *kvSink) wasTold(name, part string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for reason := range s.told {
		if strings.HasPrefix(reason, name) && strings.Contains(reason, part) {
			return true
		}
	}
	return false
}

// differs says how what is known of a rank differs from the engine's cache: ghosts
// are known and gone, missing are there and not known.
func (s *kvSink) differs(name string, cached map[uint64]int) (ghosts, missing int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	copies := func(n int) int {
		if s.once {
			return min(n, 1)
		}
		return n
	}
	for h, n := range s.held[name] {
		ghosts += max(0, copies(n)-copies(cached[h]))
	}
	for h, n := range cached {
		missing += max(0, copies(n)-copies(s.held[name][h]))
	}
	return ghosts, missing
}

// kvRig is a manager with a sink, in front of replicas that publish.
type kvRig struct {
	*rig
	sink *kvSink
	cut  atomic.Bool // no new connection is made
}

func kvConfig() routing.KVEventsConfig {
	return routing.KVEventsConfig{TopicFilter: "kv@", Concurrency: 2, Engine: "vllm", DiscoverPods: true, SocketPort: defaultKVPort}
}

// newKVRig starts a manager that subscribes to replicas NAME=URL, with short times.
func newKVRig(t testing.TB, c routing.KVEventsConfig, set func(*kvTimes), replicas ...string) *kvRig {
	t.Helper()
	r := &kvRig{rig: newRig(t, rigOptions{replicas: replicas, set: quiet}), sink: newKVSink()}
	times := &r.kv.times
	times.tick, times.maxRetry, times.backoff = 5*time.Millisecond, 20*time.Millisecond, 5*time.Millisecond
	times.coolDown, times.quiet, times.checkEvery, times.checkIdle = 100*time.Millisecond, 20*time.Millisecond, 40*time.Millisecond, 100*time.Millisecond
	if set != nil {
		set(times)
	}
	dial := r.kv.dial
	r.kv.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if r.cut.Load() {
			return nil, errors.New("the cable is cut")
		}
		return dial(ctx, network, address)
	}
	r.SetKVEvents([]routing.KVEventSource{{Producer: "precise", Config: c, Sink: r.sink}})
	r.begin(t)
	return r
}

// subscribe replaces what producers want.
func (r *kvRig) subscribe(c routing.KVEventsConfig, sink routing.KVEvents) {
	r.SetKVEvents([]routing.KVEventSource{{Producer: "precise", Config: c, Sink: sink}})
}

func (r *kvRig) counts(t testing.TB, name string) *kvCounts { return &r.worker(t, name).kv.counts }

// connected waits until a replica has one subscriber.
func (r *kvRig) connected(t testing.TB, name string, s *fakevllm.Server) {
	t.Helper()
	k := r.counts(t, name)
	eventually(t, name+" connected", func() bool { return k.connected.Load() == 1 && s.Stats().KV.Subscribers == 1 })
}

// same waits until what is known of a replica's rank 0 is what its engine has cached.
func (r *kvRig) same(t testing.TB, name string, s *fakevllm.Server) {
	t.Helper()
	cached := s.CachedBlocks()
	defer func() {
		if t.Failed() {
			ghosts, missing := r.sink.differs(name+"/0", cached)
			r.sink.mu.Lock()
			defer r.sink.mu.Unlock()
			t.Logf("%s: %d ghosts, %d missing of %d, incomplete: %q, told %v", name, ghosts, missing, len(cached), r.sink.why[name+"/0"], r.sink.told)
		}
	}()
	eventually(t, name+" known as it is", func() bool {
		ghosts, missing := r.sink.differs(name+"/0", cached)
		return ghosts == 0 && missing == 0
	})
}

// complete waits until nothing is said to be missing.
func (r *kvRig) complete(t testing.TB, name string) {
	t.Helper()
	eventually(t, name+" complete", func() bool { return r.sink.reason(name+"/0") == "" })
}

// publish starts a replica with 64 blocks of 4 tokens that publishes.
func publish(t testing.TB, o fakevllm.Options) *fakevllm.Server {
	t.Helper()
	if o.KVEvents.Endpoint == "" {
		o.KVEvents.Endpoint = "tcp://*:0"
	}
	o.Engine, o.Speed = fakevllm.DefaultModel(), 10_000
	o.Engine.Blocks, o.Engine.BlockTokens = 64, 4
	s, err := fakevllm.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// replayed is publish with a replay server.
func replayed(t testing.TB) *fakevllm.Server {
	t.Helper()
	return publish(t, fakevllm.Options{KVEvents: fakevllm.KVEvents{Replay: "tcp://*:0"}})
}

// reborn starts another replica on the addresses of one that is closed.
func reborn(t testing.TB, s *fakevllm.Server) *fakevllm.Server {
	t.Helper()
	events, replay := s.KVEndpoints()
	wild := func(endpoint string) string {
		if endpoint == "" {
			return ""
		}
		return "tcp://*" + endpoint[strings.LastIndexByte(endpoint, ':'):]
	}
	return publish(t, fakevllm.Options{Listen: s.Addr(), KVEvents: fakevllm.KVEvents{Endpoint: wild(events), Replay: wild(replay)}})
}

func post(t testing.TB, s *fakevllm.Server, path, body string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}
	resp, err := client.Post(s.URL()+path, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Fatalf("%s %s: got %d %s", path, body, resp.StatusCode, answer)
	}
}

// prompts sends prompts number from to to: 12 blocks each, the first four shared by every third.
func prompts(t testing.TB, s *fakevllm.Server, from, to int) {
	t.Helper()
	for i := from; i < to; i++ {
		text := strings.Repeat(fmt.Sprintf("system prompt %02d ", i%3), 4) + strings.Repeat(fmt.Sprintf("question no %04d ", i), 8)
		post(t, s, "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":6}`, text))
	}
}

func fault(t testing.TB, s *fakevllm.Server, f fakevllm.Faults) {
	t.Helper()
	if err := s.SetFaults(f); err != nil {
		t.Fatal(err)
	}
}

// TestKVFollow: every form that engines publish in, with evictions, from before
// the subscription on.
func TestKVFollow(t *testing.T) {
	f := func(name string, e fakevllm.KVEvents) {
		t.Run(name, func(t *testing.T) {
			e.Replay = "tcp://*:0"
			s := publish(t, fakevllm.Options{Models: []string{"base", "adapter"}, KVEvents: e})
			prompts(t, s, 0, 9) // before anybody listens
			r := newKVRig(t, kvConfig(), nil, "a="+s.URL())
			r.same(t, "a", s)
			r.complete(t, "a")
			prompts(t, s, 5, 15)
			post(t, s, "/v1/completions", `{"model":"adapter","prompt":"`+strings.Repeat("adapted ", 8)+`","max_tokens":2,"cache_salt":"salt"}`)
			r.same(t, "a", s)
			r.complete(t, "a")
			k := r.counts(t, "a")
			if k.events[kvRemoved].Load() == 0 || k.gaps.Load() != 0 || k.restarts.Load() != 0 || k.replays[kvReplayFailed].Load() != 0 {
				t.Errorf("got %d removals, %d gaps, %d restarts, %d failed replays, want some, 0, 0, 0",
					k.events[kvRemoved].Load(), k.gaps.Load(), k.restarts.Load(), k.replays[kvReplayFailed].Load())
			}
			if len(r.sink.log) > 0 {
				t.Error(r.sink.log)
			}
		})
	}
	f("maps", fakevllm.KVEvents{})
	f("arrays", fakevllm.KVEvents{Positional: true})
	f("byte hashes", fakevllm.KVEvents{ByteHashes: true})
}

// TestKVWithoutReplay: what is known from batch 0 on is complete; what begins later is not, until the cache is emptied.
func TestKVWithoutReplay(t *testing.T) {
	s := publish(t, fakevllm.Options{})
	r := newKVRig(t, kvConfig(), nil, "a="+s.URL())
	r.connected(t, "a", s)
	prompts(t, s, 0, 2)
	r.same(t, "a", s)
	r.complete(t, "a")

	late := publish(t, fakevllm.Options{})
	prompts(t, late, 0, 3)
	if err := r.Add(routing.EndpointSpec{Name: "late", URL: late.URL()}); err != nil {
		t.Fatal(err)
	}
	r.connected(t, "late", late)
	prompts(t, late, 3, 5)
	eventually(t, "a later batch", func() bool { return r.sink.reason("late/0") != "" })
	if got, want := r.sink.reason("late/0"), "on only"; !strings.Contains(got, want) {
		t.Errorf("reason: got %q, want %q", got, want)
	}
	if ghosts, _ := r.sink.differs("late/0", late.CachedBlocks()); ghosts != 0 {
		t.Errorf("got %d ghosts, want 0", ghosts)
	}
	post(t, late, "/reset_prefix_cache", "{}")
	prompts(t, late, 5, 7)
	r.complete(t, "late")
	r.same(t, "late", late)
}

// TestKVReset: the event of /reset_prefix_cache comes with the next step, and then no ghost is left.
func TestKVReset(t *testing.T) {
	s := replayed(t)
	r := newKVRig(t, kvConfig(), nil, "a="+s.URL())
	prompts(t, s, 0, 4)
	r.same(t, "a", s)
	before := s.CachedBlocks()
	post(t, s, "/reset_prefix_cache", "{}")
	if n := len(s.CachedBlocks()); n != 0 {
		t.Fatalf("after the reset: got %d cached blocks, want 0", n)
	}
	if ghosts, missing := r.sink.differs("a/0", before); ghosts != 0 || missing != 0 {
		t.Errorf("before the next step: got %d more and %d fewer blocks, want what was told", ghosts, missing)
	}
	prompts(t, s, 100, 101)
	r.same(t, "a", s)
	r.complete(t, "a")
	if got := r.counts(t, "a").events[kvCleared].Load(); got != 1 {
		t.Errorf("got %d AllBlocksCleared, want 1", got)
	}
}

// TestKVLost: batches that never came are replayed, seen at the next one or, when there is none, in the silence.
func TestKVLost(t *testing.T) {
	s := replayed(t)
	r := newKVRig(t, kvConfig(), nil, "a="+s.URL())
	prompts(t, s, 0, 4)
	r.same(t, "a", s)
	k := r.counts(t, "a")
	cleared := r.sink.clears("a/0")

	fault(t, s, fakevllm.Faults{KVDrop: 3})
	prompts(t, s, 4, 12)
	r.same(t, "a", s)
	if s.Stats().Faults["kv_drop"] != 3 {
		t.Fatalf("got %d lost batches, want 3", s.Stats().Faults["kv_drop"])
	}

	fault(t, s, fakevllm.Faults{KVDrop: 1 << 20}) // all from now on
	prompts(t, s, 12, 16)
	r.same(t, "a", s)
	if r.sink.wasTold("a/0", "lost") || r.sink.clears("a/0") != cleared {
		t.Errorf("got %d times cleared, want nothing dropped", r.sink.clears("a/0"))
	}
	if k.replays[kvReplayOK].Load() == 0 {
		t.Error("got no replay")
	}
}

// TestKVLostForGood: without a replay server a gap drops what was known, and no ghost survives.
func TestKVLostForGood(t *testing.T) {
	s := publish(t, fakevllm.Options{})
	r := newKVRig(t, kvConfig(), nil, "a="+s.URL())
	r.connected(t, "a", s)
	prompts(t, s, 0, 4)
	r.same(t, "a", s)
	fault(t, s, fakevllm.Faults{KVDrop: 2})
	prompts(t, s, 4, 8)
	eventually(t, "incomplete", func() bool { return strings.Contains(r.sink.reason("a/0"), "are lost") })
	prompts(t, s, 8, 30)
	eventually(t, "no ghost, and more known", func() bool {
		ghosts, _ := r.sink.differs("a/0", s.CachedBlocks())
		return ghosts == 0 && r.sink.ranks() == "[a/0]"
	})
	if got := r.counts(t, "a").gaps.Load(); got != 1 {
		t.Errorf("got %d gaps, want 1", got)
	}
	post(t, s, "/reset_prefix_cache", "{}")
	prompts(t, s, 30, 34)
	r.complete(t, "a")
	r.same(t, "a", s)
}

// TestKVReplayServers: replay servers that fail in every way. Nothing is made up
// meanwhile, and once the server is well again everything is known again.
func TestKVReplayServers(t *testing.T) {
	f := func(kind, want string, result kvReplay, live bool) {
		t.Run(fmt.Sprintf("%s, live %v", kind, live), func(t *testing.T) {
			s := replayed(t)
			if !live { // what is known has come by a replay
				prompts(t, s, 0, 6)
			}
			r := newKVRig(t, kvConfig(), func(x *kvTimes) { x.idle = 300 * time.Millisecond }, "a="+s.URL())
			r.connected(t, "a", s)
			if live { // the replay at the start may bring the first ones
				prompts(t, s, 0, 3)
				r.same(t, "a", s)
				prompts(t, s, 3, 6)
			}
			r.same(t, "a", s)
			k := r.counts(t, "a")
			fault(t, s, fakevllm.Faults{KVReplay: kind, KVDrop: 3})
			prompts(t, s, 6, 12)
			eventually(t, want, func() bool { return r.sink.wasTold("a/0", want) })
			eventually(t, "counted", func() bool { return k.replays[result].Load() > 0 })
			eventually(t, "no ghost", func() bool {
				ghosts, _ := r.sink.differs("a/0", s.CachedBlocks())
				return ghosts == 0
			})
			prompts(t, s, 12, 14)
			fault(t, s, fakevllm.Faults{})
			if result == kvReplayLie {
				// Until the next connection nothing more is asked of it.
				s.Close()
				s = reborn(t, s)
				prompts(t, s, 0, 3)
			}
			eventually(t, "complete", func() bool {
				prompts(t, s, 14, 15)
				return r.sink.reason("a/0") == ""
			})
			r.same(t, "a", s)
		})
	}
	f(fakevllm.ReplayStall, "are lost, and", kvReplayFailed, true)
	f(fakevllm.ReplayCut, "are lost, and", kvReplayFailed, true)
	f(fakevllm.ReplayHoles, "are lost, and", kvReplayFailed, true)
	f(fakevllm.ReplayEmpty, "other things than the publisher", kvReplayLie, true)
	f(fakevllm.ReplayEmpty, "does not have them", kvReplayRestart, false)
	f(fakevllm.ReplayLie, "other things than the publisher", kvReplayLie, true)
	f(fakevllm.ReplayLie, "other things than the publisher", kvReplayLie, false)
}

// TestKVRestart: an engine that begins anew leaves no ghost, however far its numbers have come before it is seen again.
func TestKVRestart(t *testing.T) {
	f := func(name string, replay bool, before, after int) {
		t.Run(name, func(t *testing.T) {
			o := fakevllm.Options{}
			if replay {
				o.KVEvents.Replay = "tcp://*:0"
			}
			s := publish(t, o)
			r := newKVRig(t, kvConfig(), nil, "a="+s.URL())
			r.connected(t, "a", s)
			prompts(t, s, 0, before)
			r.same(t, "a", s)
			r.cut.Store(true)
			s.Close()
			s = reborn(t, s)
			prompts(t, s, 50, 50+after)
			r.cut.Store(false)
			r.connected(t, "a", s)
			if replay {
				r.same(t, "a", s)
				r.complete(t, "a")
			}
			prompts(t, s, 100, 103)
			eventually(t, "no ghost", func() bool {
				ghosts, missing := r.sink.differs("a/0", s.CachedBlocks())
				return ghosts == 0 && (missing == 0 || !replay)
			})
			if !replay && after > 0 {
				eventually(t, "incomplete", func() bool { return r.sink.reason("a/0") != "" })
			}
		})
	}
	f("seen again at its first batch", true, 5, 0)
	f("behind", true, 5, 2)
	f("level", true, 5, 5)
	f("ahead", true, 3, 9)
	f("ahead, no replay", false, 3, 9)
	f("level, no replay", false, 5, 6)
}

// TestKVRestartEngine: the engine alone begins anew, under a subscription that stands.
func TestKVRestartEngine(t *testing.T) {
	for _, replay := range []string{"tcp://*:0", ""} {
		s := publish(t, fakevllm.Options{KVEvents: fakevllm.KVEvents{Replay: replay}})
		r := newKVRig(t, kvConfig(), nil, "a="+s.URL())
		r.connected(t, "a", s)
		prompts(t, s, 0, 5)
		fault(t, s, fakevllm.Faults{RestartEngine: true})
		eventually(t, "no ghost", func() bool {
			prompts(t, s, 5, 7)
			ghosts, _ := r.sink.differs("a/0", s.CachedBlocks())
			return ghosts == 0 && r.sink.ranks() != "[]"
		})
	}
}

// TestKVOddities: doubles, swapped batches and ones that cannot be read.
func TestKVOddities(t *testing.T) {
	f := func(name string, faults fakevllm.Faults, incomplete string) {
		t.Run(name, func(t *testing.T) {
			s := replayed(t)
			r := newKVRig(t, kvConfig(), nil, "a="+s.URL())
			prompts(t, s, 0, 3)
			r.same(t, "a", s)
			fault(t, s, faults)
			prompts(t, s, 3, 14)
			if incomplete == "" {
				r.complete(t, "a")
				r.sink.countOnce(faults.KVDuplicate) // what was announced twice counts once
				r.same(t, "a", s)
				return
			}
			eventually(t, incomplete, func() bool { return r.sink.wasTold("a/0", incomplete) })
			eventually(t, "no ghost", func() bool {
				ghosts, _ := r.sink.differs("a/0", s.CachedBlocks())
				return ghosts == 0
			})
			if got := r.counts(t, "a").dropped[kvDropDecode].Load(); got < 1 {
				t.Errorf("got %d batches dropped, want 1", got)
			}
			post(t, s, "/reset_prefix_cache", "{}")
			prompts(t, s, 14, 16)
			r.complete(t, "a")
			r.same(t, "a", s)
		})
	}
	f("duplicate stores", fakevllm.Faults{KVDuplicate: true}, "")
	f("out of order", fakevllm.Faults{KVReorder: 3}, "")
	f("unreadable", fakevllm.Faults{KVGarbage: 1}, "cannot be read")
}

// TestKVFlood: one replica that floods costs itself; the other's events come.
func TestKVFlood(t *testing.T) {
	loud, calm := replayed(t), replayed(t)
	r := newKVRig(t, kvConfig(), nil, "loud="+loud.URL(), "calm="+calm.URL())
	prompts(t, loud, 0, 3)
	prompts(t, calm, 0, 3)
	r.same(t, "loud", loud)
	r.same(t, "calm", calm)
	flooded := make(chan struct{})
	go func() {
		defer close(flooded)
		fault(t, loud, fakevllm.Faults{KVFlood: 5000})
	}()
	prompts(t, calm, 3, 12)
	r.same(t, "calm", calm)
	<-flooded
	prompts(t, loud, 3, 6)
	r.same(t, "loud", loud)
	if k := r.counts(t, "calm"); k.gaps.Load() != 0 || k.dropped[kvDropQueue].Load() != 0 {
		t.Errorf("the calm one: got %d gaps and %d dropped batches, want 0", k.gaps.Load(), k.dropped[kvDropQueue].Load())
	}
}

// freePort returns a port that nobody listens on.
func freePort(t testing.TB) string {
	t.Helper()
	ln, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	_ = ln.Close()
	return port
}

// TestKVPublisherDials: engines whose endpoint has no wildcard connect to kvgate; their topics tell them apart.
func TestKVPublisherDials(t *testing.T) {
	port := freePort(t)
	dials := func(replay string) *fakevllm.Server {
		return publish(t, fakevllm.Options{KVEvents: fakevllm.KVEvents{Endpoint: "tcp://127.0.0.1:" + port, Replay: replay}})
	}
	a, b := dials(""), dials("tcp://*:0")
	c := kvConfig()
	c.ZMQEndpoint = "tcp://*:" + port
	r := newKVRig(t, c, nil, "a="+a.URL(), "b="+b.URL())
	for _, s := range []*fakevllm.Server{a, b} {
		prompts(t, s, 0, 2)
	}
	eventually(t, "both connected", func() bool {
		prompts(t, a, 2, 4)
		prompts(t, b, 4, 6)
		return r.counts(t, "a").connected.Load() == 1 && r.counts(t, "b").connected.Load() == 1
	})
	r.complete(t, "b") // by its replay server
	r.same(t, "b", b)
	post(t, a, "/reset_prefix_cache", "{}")
	prompts(t, a, 0, 9)
	prompts(t, b, 6, 9)
	r.complete(t, "a")
	r.same(t, "a", a)
	r.same(t, "b", b)

	// A restart: the publisher connects anew and is the same replica.
	a.Close()
	again := publish(t, fakevllm.Options{Listen: a.Addr(), KVEvents: fakevllm.KVEvents{Endpoint: "tcp://127.0.0.1:" + port}})
	eventually(t, "known again", func() bool {
		prompts(t, again, 20, 24)
		ghosts, _ := r.sink.differs("a/0", again.CachedBlocks())
		return ghosts == 0 && r.counts(t, "a").connected.Load() == 1
	})

	// One that belongs to nobody is refused.
	stranger := publish(t, fakevllm.Options{KVEvents: fakevllm.KVEvents{Endpoint: "tcp://127.0.0.1:" + port, Topic: "kv@stranger@m"}})
	eventually(t, "refused", func() bool {
		prompts(t, stranger, 0, 1)
		prompts(t, stranger, 1, 2)
		return r.logs.FilterMessageSnippet("belongs to no replica").Len() > 0
	})
}

// TestKVLabelBinds: a label with a wildcard binds for one replica, whatever its topic.
func TestKVLabelBinds(t *testing.T) {
	port := freePort(t)
	s := publish(t, fakevllm.Options{KVEvents: fakevllm.KVEvents{Endpoint: "tcp://127.0.0.1:" + port, Replay: "tcp://*:0", Topic: "kv@some-pod@m"}})
	_, replay := s.KVEndpoints()
	r := newKVRig(t, kvConfig(), nil)
	prompts(t, s, 0, 2)
	if err := r.Add(routing.EndpointSpec{Name: "a", URL: s.URL(), Labels: map[string]string{kvEventsLabel: "tcp://*:" + port, kvReplayLabel: replay}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "connected", func() bool {
		prompts(t, s, 2, 4)
		return r.counts(t, "a").connected.Load() == 1
	})
	prompts(t, s, 4, 9)
	r.same(t, "a", s)
	r.complete(t, "a")
	if err := r.Remove("a"); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", ":"+port)
	if err != nil {
		t.Fatalf("the address is still bound after the replica is gone: %v", err)
	}
	_ = ln.Close()
}

// TestKVReload: a source that stays the same goes on; a new sink is told everything anew; without a source nothing is left.
func TestKVReload(t *testing.T) {
	s := replayed(t)
	r := newKVRig(t, kvConfig(), nil, "a="+s.URL())
	prompts(t, s, 0, 3)
	r.same(t, "a", s)
	subscribed := func() int { return r.logs.FilterMessage("subscribed to KV events").Len() }
	r.subscribe(kvConfig(), r.sink)
	if err := r.Reload(&r.settings, mustPlan(t, "", r.settings.Scrape)); err != nil {
		t.Fatal(err)
	}
	prompts(t, s, 3, 5)
	r.same(t, "a", s)
	if got := subscribed(); got != 1 {
		t.Errorf("the same source: got %d subscriptions, want 1", got)
	}

	next := newKVSink()
	r.subscribe(kvConfig(), next)
	eventually(t, "the new sink knows", func() bool {
		ghosts, missing := next.differs("a/0", s.CachedBlocks())
		return ghosts == 0 && missing == 0
	})
	if got := r.counts(t, "a").streams.Load(); got != 1 {
		t.Errorf("got %d subscriptions at once, want 1", got)
	}

	// The same sink with another configuration: anew as well, and never twice at once.
	other := kvConfig()
	other.TopicFilter = "kv@127"
	r.subscribe(other, next)
	prompts(t, s, 5, 9)
	eventually(t, "known once", func() bool {
		ghosts, missing := next.differs("a/0", s.CachedBlocks())
		return ghosts == 0 && missing == 0
	})

	other.TopicFilter = "none@"
	r.subscribe(other, next)
	eventually(t, "left out by its topic", func() bool { return strings.Contains(next.reason("a/0"), "topicFilter") })
	if got := next.ranks(); got != "[]" {
		t.Errorf("left out: got %s, want nothing held", got)
	}

	r.SetKVEvents(nil)
	eventually(t, "no subscription", func() bool { return r.counts(t, "a").streams.Load() == 0 })
}

// TestKVReplicaGoes: the subscription of a replica that is removed ends with it, also when labels move it.
func TestKVReplicaGoes(t *testing.T) {
	s, other := replayed(t), replayed(t)
	r := newKVRig(t, kvConfig(), nil)
	add := func(labels map[string]string) {
		t.Helper()
		if err := r.Add(routing.EndpointSpec{Name: "a", URL: s.URL(), Labels: labels}); err != nil {
			t.Fatal(err)
		}
	}
	add(nil)
	prompts(t, s, 0, 3)
	r.same(t, "a", s)
	k := r.counts(t, "a")
	if err := r.Remove("a"); err != nil {
		t.Fatal(err)
	}
	if got := k.streams.Load(); got != 0 {
		t.Errorf("after the removal: got %d streams, want 0", got)
	}
	events, replay := other.KVEndpoints()
	add(map[string]string{kvEventsLabel: events, kvReplayLabel: replay})
	prompts(t, other, 10, 14)
	r.same(t, "a", other)
}

// TestKVUnreachable: a replica whose publisher cannot be reached is said to be unknown, and why.
func TestKVUnreachable(t *testing.T) {
	s := publish(t, fakevllm.Options{})
	r := newKVRig(t, kvConfig(), func(x *kvTimes) { x.lost = 50 * time.Millisecond }, "a="+s.URL())
	r.connected(t, "a", s)
	prompts(t, s, 0, 2)
	r.same(t, "a", s)
	r.cut.Store(true)
	s.Close()
	eventually(t, "lost", func() bool { return strings.Contains(r.sink.reason("a/0"), "no connection to the publisher") })
	if got := r.sink.ranks(); got != "[]" {
		t.Errorf("got %s, want nothing held", got)
	}

	silent := newKVRig(t, kvConfig(), nil)
	stub := newStub(t)
	stub.on("/kv_event_sources", body(`{}`))
	if err := silent.Add(routing.EndpointSpec{Name: "b", URL: stub.url()}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no publisher", func() bool { return strings.Contains(silent.sink.reason("b/0"), "--kv-events-config") })
}

// TestKVMetrics: every series moves.
func TestKVMetrics(t *testing.T) {
	s := replayed(t)
	r := newKVRig(t, kvConfig(), nil, "a="+s.URL())
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(r.collector); err != nil {
		t.Fatal(err)
	}
	prompts(t, s, 0, 12)
	r.same(t, "a", s)
	series := func(name string) float64 {
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		sum := 0.0
		for _, f := range families {
			if f.GetName() == "kvgate_"+name {
				for _, m := range f.Metric {
					sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
				}
			}
		}
		return sum
	}
	f := func(name string, want func(v float64) bool) {
		t.Helper()
		if got := series(name); !want(got) {
			t.Errorf("%s: got %v", name, got)
		}
	}
	positive := func(v float64) bool { return v > 0 }
	f("kv_events_received_total", positive)
	f("kv_events_connected", func(v float64) bool { return v == 1 })
	f("kv_events_replays_total", positive)
	f("kv_events_lag_seconds", func(v float64) bool { return v > 0 && v < 60 })
	f("kv_events_gaps_total", func(v float64) bool { return v == 0 })
	f("kv_events_dropped_batches_total", func(v float64) bool { return v == 0 })
	fault(t, s, fakevllm.Faults{KVDrop: 1, KVGarbage: 1})
	prompts(t, s, 12, 16)
	eventually(t, "dropped", func() bool { return series("kv_events_dropped_batches_total") > 0 })
	fault(t, s, fakevllm.Faults{RestartEngine: true})
	prompts(t, s, 0, 2)
	eventually(t, "restart", func() bool { return series("kv_events_restarts_total") > 0 })
	if n := testutil.CollectAndCount(r.collector, "kvgate_kv_events_received_total"); n != int(kvEventKinds) {
		t.Errorf("got %d series of events, want %d", n, kvEventKinds)
	}
	r.SetKVEvents(nil)
	if n := testutil.CollectAndCount(r.collector, "kvgate_kv_events_connected"); n != 0 {
		t.Errorf("without a source: got %d series, want none", n)
	}
}

// TestKVSourcesPage: what a replica says about its publishers.
func TestKVSourcesPage(t *testing.T) {
	f := func(t *testing.T, page, want string) {
		t.Helper()
		sources, err := parseKVSources([]byte(page))
		got := fmt.Sprint(sources)
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%s: got %s, want %s", page, got, want)
		}
	}
	f(t, `{}`, "[]")
	f(t, `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5600","replay_endpoint":"tcp://*:5700","topic":"kv@x@m"}}`,
		"[{0 true tcp://*:5600 tcp://*:5700 kv@x@m}]")
	f(t, `{"10":{"endpoint":"b"},"2":{"endpoint":"a","replay_endpoint":null,"new":[1]}}`, "[{2 true a  } {10 true b  }]")
	f(t, `{"0":{"enable_kv_cache_events":false,"endpoint":"a"},"1":{"publisher":"null","endpoint":"b"}}`, "[{0 false a  } {1 false b  }]")
	for _, bad := range []string{``, `[]`, `{"x":{}}`, `{"-1":{}}`, `{"256":{}}`, `{"0":{"endpoint":1}}`} {
		f(t, bad, "error")
	}
}

// TestKVWants: where a replica publishes, by labels, by what it says, by ports.
func TestKVWants(t *testing.T) {
	page := func(list ...kvSource) kvReport { return kvReport{known: true, page: true, sources: list} }
	rank := func(n int, events, replay string) kvSource {
		return kvSource{rank: n, enabled: true, events: events, replay: replay, topic: "kv@x@m"}
	}
	f := func(t *testing.T, set func(*routing.KVEventsConfig), events, replay string, report kvReport, want string) {
		t.Helper()
		c := kvConfig()
		if set != nil {
			set(&c)
		}
		fleet := routing.NewFleet(time.Now, time.Second, nil)
		added, _ := fleet.Update([]routing.EndpointSpec{{Name: "a", URL: "http://10.0.0.1:8000"}})
		g := newKVGroup(newKVHub(fleet, nil, nil), routing.KVEventSource{Config: c})
		wants, err := g.wants(added[0], events, replay, report)
		got := ""
		for _, w := range wants {
			got += fmt.Sprintf("%d %s", w.rank, w.events)
			for r := range 3 {
				if a := w.replay(r); a != nil && (w.rank < 0 || r == 0) {
					got += " replay " + a.String()
				}
			}
			got += "; "
		}
		if err != nil {
			got += err.Error()
		}
		if got != want && (err == nil || !strings.HasPrefix(got, want)) {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
	none := kvReport{}
	missing := kvReport{known: true}
	// Labels.
	f(t, nil, "tcp://h:5600", "", none, "0 tcp://h:5600; ")
	f(t, nil, "tcp://h:5600, tcp://h:5601", "tcp://h:5700,tcp://h:5701", none, "0 tcp://h:5600 replay tcp://h:5700; 1 tcp://h:5601 replay tcp://h:5701; ")
	f(t, nil, "tcp://*:5600", "tcp://h:5700", none, "-1 tcp://*:5600 replay tcp://h:5700; ")
	f(t, func(c *routing.KVEventsConfig) { c.DiscoverPods = false }, "tcp://h:5600", "", none, "0 tcp://h:5600; ")
	f(t, nil, "h:5600", "", none, `label kvgate.io/kv-events: "h:5600" is no ZeroMQ endpoint`)
	f(t, nil, "tcp://h:5600", "tcp://*:5700", none, `label kvgate.io/kv-replay: "tcp://*:5700" is no address to connect to`)
	f(t, nil, "tcp://h:5600,tcp://h:5601", "tcp://h:5700", none, "label kvgate.io/kv-replay: 1 addresses, and 2 of kvgate.io/kv-events")
	f(t, nil, strings.Repeat("tcp://h:1,", maxKVRanks)+"tcp://h:1", "", none, "label kvgate.io/kv-events: 257 addresses")
	// What the replica says; its host is ours to know.
	f(t, nil, "", "", page(rank(0, "tcp://*:5600", "tcp://*:5700")), "0 tcp://10.0.0.1:5600 replay tcp://10.0.0.1:5700; ")
	f(t, nil, "", "", page(rank(0, "tcp://169.254.169.254:80", "tcp://evil:1")), "0 tcp://10.0.0.1:80 replay tcp://10.0.0.1:1; ")
	f(t, nil, "", "", page(rank(1, "tcp://*:5601", ""), rank(3, "tcp://*:5603", "tcp://*:5703")), "1 tcp://10.0.0.1:5601; 3 tcp://10.0.0.1:5603 replay tcp://10.0.0.1:5703; ")
	f(t, nil, "", "tcp://r:1", page(rank(0, "tcp://*:5600", "tcp://*:5700")), "0 tcp://10.0.0.1:5600 replay tcp://r:1; ")
	f(t, nil, "", "bad", page(rank(0, "tcp://*:5600", "")), `label kvgate.io/kv-replay: "bad" is no address`)
	f(t, func(c *routing.KVEventsConfig) { c.SocketPort, c.ReplayPort = 6000, 7000 }, "", "", page(rank(0, "tcp://*:5600", ""), rank(1, "tcp://*:5601", "")),
		"0 tcp://10.0.0.1:6000 replay tcp://10.0.0.1:7000; 1 tcp://10.0.0.1:6001 replay tcp://10.0.0.1:7001; ")
	f(t, nil, "", "", page(), "GET /kv_event_sources names no publisher")
	f(t, nil, "", "", page(rank(0, "ipc:///tmp/x", ""), rank(1, "tcp://*:5601", "")), `1 tcp://10.0.0.1:5601; rank 0 publishes on "ipc:///tmp/x"`)
	f(t, nil, "", "", page(kvSource{rank: 0, events: "tcp://*:1", topic: "kv@"}), "rank 0 publishes no KV events")
	f(t, nil, "", "", page(kvSource{rank: 0, enabled: true, events: "tcp://*:1"}), `rank 0 publishes under the topic "", which topicFilter "kv@" leaves out`)
	// Ports.
	f(t, nil, "", "", none, "")
	f(t, nil, "", "", missing, "0 tcp://10.0.0.1:5557; ")
	f(t, func(c *routing.KVEventsConfig) { c.SocketPort, c.ReplayPort = 6000, 7000 }, "", "", missing, "0 tcp://10.0.0.1:6000 replay tcp://10.0.0.1:7000; ")
	f(t, func(c *routing.KVEventsConfig) { c.Engine = "sglang" }, "", "", none, "0 tcp://10.0.0.1:5557; ")
	f(t, func(c *routing.KVEventsConfig) { c.Engine = "sglang" }, "", "tcp://r:1", none, "0 tcp://10.0.0.1:5557 replay tcp://r:1; ")
	f(t, func(c *routing.KVEventsConfig) { c.DiscoverPods = false }, "", "", missing, "")
	f(t, func(c *routing.KVEventsConfig) { c.Namespace = "prod" }, "", "", missing, "")
	f(t, func(c *routing.KVEventsConfig) { c.Namespace = "default" }, "", "", missing, "0 tcp://10.0.0.1:5557; ")
	// The replica connects.
	inbound := func(c *routing.KVEventsConfig) { c.ZMQEndpoint = "tcp://*:5557" }
	f(t, inbound, "", "", none, "-1 tcp://*:5557; ")
	f(t, inbound, "", "", missing, "-1 tcp://*:5557; ")
	f(t, inbound, "", "", page(rank(0, "tcp://gw:5557", "tcp://*:5700")), "-1 tcp://*:5557 replay tcp://10.0.0.1:5700; ")
	f(t, inbound, "", "", page(rank(0, "tcp://*:5600", "")), "0 tcp://10.0.0.1:5600; ")
	f(t, inbound, "tcp://h:1", "", none, "0 tcp://h:1; ")
	f(t, func(c *routing.KVEventsConfig) { c.ZMQEndpoint, c.DiscoverPods = "tcp://*:5557", false }, "", "", page(rank(0, "tcp://*:5600", "")), "-1 tcp://*:5557; ")
	f(t, func(c *routing.KVEventsConfig) { c.ZMQEndpoint, c.DiscoverPods = "5557", false }, "", "", none, "zmqEndpoint: ")
}

func TestKVTopics(t *testing.T) {
	f := func(t *testing.T, topic, pod, model string) {
		t.Helper()
		p, m := splitTopic([]byte(topic))
		if string(p) != pod || string(m) != model {
			t.Errorf("%s: got %q and %q, want %q and %q", topic, p, m, pod, model)
		}
	}
	f(t, "kv@pod-1@llama-2-7b", "pod-1", "llama-2-7b")
	f(t, "kv@10.0.0.1:8000@org/model@rev", "10.0.0.1:8000", "org/model@rev")
	f(t, "kv@pod-1", "kv@pod-1", "")
	f(t, "anything", "anything", "")
	f(t, "", "", "")

	fleet := routing.NewFleet(time.Now, time.Second, nil)
	added, _ := fleet.Update([]routing.EndpointSpec{{Namespace: "prod", Name: "a", URL: "http://10.0.0.1:8000"}})
	for pod, want := range map[string]bool{"a": true, "prod/a": true, "10.0.0.1:8000": true, "0.0.0.1:8000": false, "10.0.0.1": false, "b": false, "": false} {
		if got := namedBy(added[0], []byte(pod)); got != want {
			t.Errorf("%q names prod/a: got %v, want %v", pod, got, want)
		}
	}
}

// publisherAt connects to an address that kvgate binds, as a publisher, and waits for its subscription.
func publisherAt(t testing.TB, address string) *zmtpConn {
	t.Helper()
	a, err := parseZMQ(address)
	if err != nil {
		t.Fatal(err)
	}
	var c *zmtpConn
	eventually(t, "connected to "+address, func() bool {
		c, err = dialZMTP(context.Background(), (&net.Dialer{}).DialContext, a, "PUB", "SUB")
		return err == nil
	})
	t.Cleanup(c.close)
	var m zmtpMessage
	if err := c.read(&m); err != nil || string(m.buf) != "\x01kv@" {
		t.Fatalf("got %q, error %v, want a subscription to kv@", m.buf, err)
	}
	return c
}

// TestKVInbound: ranks, strangers and a bound address in detail.
func TestKVInbound(t *testing.T) {
	dir, err := os.MkdirTemp("", "kv")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	old, err := net.Listen("unix", path) // of a process that is gone
	if err != nil {
		t.Fatal(err)
	}
	old.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = old.Close()
	c := kvConfig()
	c.ZMQEndpoint, c.DiscoverPods = "ipc://"+path, false
	r := newKVRig(t, c, nil, "a=http://127.0.0.1:1", "b=http://127.0.0.1:2")
	batch := func(seq, block uint64, rank any) []byte {
		return pack(nil, list(float64(seq), list(list("BlockStored", list(block), nil, list(), 16)), rank))
	}
	send := func(p *zmtpConn, topic string, seq, block uint64, rank any) {
		t.Helper()
		if err := p.send([]byte(topic), seqFrame(seq), batch(seq, block, rank)); err != nil {
			t.Fatal(err)
		}
	}
	held := func(name string, blocks ...uint64) {
		t.Helper()
		want := map[uint64]int{}
		for _, b := range blocks {
			want[b] = 1
		}
		eventually(t, fmt.Sprintf("%s holds %d", name, blocks), func() bool {
			ghosts, missing := r.sink.differs(name, want)
			return ghosts+missing == 0 && len(blocks) > 0 == strings.Contains(r.sink.ranks(), name)
		})
	}
	closed := func(what string, p *zmtpConn) {
		t.Helper()
		_ = p.nc.SetReadDeadline(time.Now().Add(20 * time.Second))
		var m zmtpMessage
		for err := error(nil); ; err = p.read(&m) {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: got silence, want an end", what)
			}
			if err != nil {
				return
			}
		}
	}
	group := (*r.kv.groups.Load())[0]
	eventually(t, "both replicas joined", func() bool {
		group.mu.Lock()
		defer group.mu.Unlock()
		if len(group.listeners) == 0 {
			return false
		}
		l := group.listeners[0]
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.inbound) == 2
	})
	zero, two := publisherAt(t, c.ZMQEndpoint), publisherAt(t, c.ZMQEndpoint)
	_ = zero.send([]byte("kv@a@m"), []byte("no number"), nil) // left out
	send(zero, "kv@a@m", 0, 10, 0)
	send(two, "kv@default/a@m", 0, 20, 2)
	held("a/0", 10)
	held("a/2", 20)
	send(two, "kv@a@m", 1, 21, 2)
	held("a/2", 20, 21)

	// The same rank from another connection: the newer one counts.
	again := publisherAt(t, c.ZMQEndpoint)
	send(again, "kv@a@m", 0, 30, 2)
	held("a/2", 30)
	closed("the older connection", two)

	other := publisherAt(t, c.ZMQEndpoint)
	send(other, "kv@127.0.0.1:2@m", 0, 40, nil) // the rank is 0 where none is told
	held("b/0", 40)

	far := publisherAt(t, c.ZMQEndpoint)
	send(far, "kv@a@m", 0, 50, maxKVRanks)
	closed("a rank that cannot be", far)
	nobody := publisherAt(t, c.ZMQEndpoint)
	send(nobody, "kv@c@m", 0, 60, 0)
	closed("nobody's publisher", nobody)
	if n := r.logs.FilterMessageSnippet("belongs to no replica").Len(); n != 1 {
		t.Errorf("got %d warnings, want 1", n)
	}
	wrong, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := shakeZMTP(context.Background(), wrong, "SUB", "SUB"); err == nil { // two subscribers have nothing to say to each other
		_ = wrong.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := wrong.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("a subscriber that connects: got silence, want an end")
		}
	}
	_ = wrong.Close()

	r.SetKVEvents(nil)
	closed("after the last source is gone", zero)
	eventually(t, "the address is free", func() bool { _, err := os.Lstat(path); return err != nil })
}

// TestKVBindAgain: an address that is taken is bound when it is free, and a file in its place stays.
func TestKVBindAgain(t *testing.T) {
	ln, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	c := kvConfig()
	c.ZMQEndpoint, c.DiscoverPods = "tcp://*:"+port, false
	r := newKVRig(t, c, func(x *kvTimes) { x.listen = 5 * time.Millisecond }, "a=http://127.0.0.1:1")
	failed := func(n int) func() bool {
		return func() bool { return r.logs.FilterMessageSnippet("cannot listen").Len() == n }
	}
	eventually(t, "a message", failed(1))
	_ = ln.Close()
	p := publisherAt(t, "tcp://127.0.0.1:"+port)
	if err := p.send([]byte("kv@whoever@m"), seqFrame(0), batchOf(0)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "held", func() bool { return r.sink.ranks() == "[a/0]" })

	file := filepath.Join(t.TempDir(), "f")
	write(t, file, "precious")
	c.ZMQEndpoint = "ipc://" + file
	r.subscribe(c, r.sink)
	eventually(t, "a message", failed(2))
	if got, err := os.ReadFile(file); err != nil || string(got) != "precious" {
		t.Errorf("the file: got %q, %v", got, err)
	}
}

// TestKVReports: what a replica answers to GET /kv_event_sources, and what comes of it.
func TestKVReports(t *testing.T) {
	s := replayed(t)
	prompts(t, s, 0, 3)
	events, replay := s.KVEndpoints()
	c := kvConfig()
	for endpoint, port := range map[string]*int{events: &c.SocketPort, replay: &c.ReplayPort} {
		*port, _ = strconv.Atoi(endpoint[strings.LastIndexByte(endpoint, ':')+1:])
	}
	for name, answer := range map[string]answer{"404": status(404), "401": status(401), "500": status(500), "no JSON": body("<html>"), "a list": body("[]")} {
		stub := newStub(t)
		stub.on("/kv_event_sources", answer)
		r := newKVRig(t, c, nil, "a="+stub.url())
		r.same(t, "a", s)
		r.complete(t, "a")
		if got := stub.count("/kv_event_sources"); got != 1 {
			t.Errorf("%s: asked %d times, want once in 30 s", name, got)
		}
	}
	// One that cannot be asked yet is asked again.
	stub := newStub(t)
	stub.on("/kv_event_sources", func(net.Conn) bool { return false })
	r := newKVRig(t, kvConfig(), nil, "a="+stub.url())
	if got := r.counts(t, "a").streams.Load(); got != 0 {
		t.Errorf("not asked: got %d streams, want 0", got)
	}
	stub.on("/kv_event_sources", body(fmt.Sprintf(`{"0":{"endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d","topic":"kv@x@y"}}`, c.SocketPort, c.ReplayPort)))
	r.same(t, "a", s)
}

// TestKVInboundLost: a publisher that has connected once, and does not again.
func TestKVInboundLost(t *testing.T) {
	port := freePort(t)
	c := kvConfig()
	c.ZMQEndpoint, c.DiscoverPods = "tcp://*:"+port, false
	r := newKVRig(t, c, func(x *kvTimes) { x.lost = 50 * time.Millisecond }, "a=http://127.0.0.1:1")
	p := publisherAt(t, "tcp://127.0.0.1:"+port)
	if err := p.send([]byte("kv@a@m"), seqFrame(0), batchOf(0)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "held", func() bool { return r.sink.ranks() == "[a/0]" })
	p.close()
	eventually(t, "lost", func() bool { return strings.Contains(r.sink.reason("a/0"), errNoPublisher.Error()) })
	if got := r.sink.ranks(); got != "[]" {
		t.Errorf("got %s, want nothing held", got)
	}
}

// from is a connection from an address.
type from struct {
	net.Conn
	ip string
}

func (f from) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(f.ip), Port: 1} }

// TestKVWhose: whose publisher it is that has connected.
func TestKVWhose(t *testing.T) {
	f := func(t *testing.T, topic, remote, want string, specs ...routing.EndpointSpec) {
		t.Helper()
		fleet := routing.NewFleet(time.Now, time.Second, nil)
		fleet.Update(specs)
		c := kvConfig()
		c.ZMQEndpoint = "tcp://*:5557"
		a, err := parseZMQ(c.ZMQEndpoint)
		if err != nil {
			t.Fatal(err)
		}
		l := &kvListener{group: newKVGroup(newKVHub(fleet, nil, nil), routing.KVEventSource{Config: c}), address: a}
		m := &kvMessage{}
		m.buf, m.ends = []byte(topic), []int{len(topic)}
		got := "nobody"
		if e := l.whose(kvOffer{conn: &zmtpConn{nc: from{ip: remote}}, first: m}); e != nil {
			got = e.Name()
		}
		if got != want {
			t.Errorf("topic %q from %s: got %s, want %s", topic, remote, got, want)
		}
	}
	spec := func(name, url string, labels ...string) routing.EndpointSpec {
		s := routing.EndpointSpec{Name: name, URL: url}
		if len(labels) > 0 {
			s.Labels = map[string]string{kvEventsLabel: labels[0]}
		}
		return s
	}
	a, b, c := spec("a", "http://10.0.0.1:8000"), spec("b", "http://10.0.0.1:8001"), spec("c", "http://10.0.0.2:8000")
	f(t, "kv@a@m", "10.0.0.9", "a", a, b, c)
	f(t, "kv@10.0.0.1:8001@m", "10.0.0.9", "b", a, b, c)
	f(t, "kv@10.0.0.2@m", "10.0.0.9", "c", a, b, c)
	f(t, "kv@10.0.0.1@m", "10.0.0.9", "nobody", a, b, c) // two of them
	f(t, "kv@pod@m", "10.0.0.2", "c", a, b, c)
	f(t, "", "10.0.0.2", "c", a, b, c)
	f(t, "kv@pod@m", "10.0.0.1", "nobody", a, b, c)
	f(t, "kv@pod@m", "10.0.0.9", "nobody", a, b, c)
	f(t, "kv@pod@m", "10.0.0.9", "a", a)
	f(t, "", "10.0.0.9", "a", a)
	f(t, "kv@a@m", "10.0.0.9", "c", c) // whatever it calls itself
	// Labels name the address for some of them.
	bound, elsewhere, dialled := spec("bound", "http://10.0.0.3:1", "tcp://*:5557"), spec("elsewhere", "http://10.0.0.4:1", "tcp://*:5558"), spec("dialled", "http://10.0.0.5:1", "tcp://10.0.0.5:5557")
	f(t, "kv@pod@m", "10.0.0.9", "bound", bound, elsewhere, dialled)
	f(t, "kv@dialled@m", "10.0.0.9", "nobody", bound, elsewhere, dialled)
	f(t, "kv@elsewhere@m", "10.0.0.3", "nobody", bound, elsewhere, dialled)
}
