package scrape

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"kvgate/routing"
)

// The tests of this file run in virtual time, with the limits of service.

// pipeEnd is a net.Pipe that holds what was written, as a socket does.
type pipeEnd struct {
	net.Conn
	out  chan []byte
	done chan struct{}
	once *sync.Once
}

func newPipe() (a, b *pipeEnd) {
	x, y := net.Pipe()
	end := func(c net.Conn) *pipeEnd {
		e := &pipeEnd{Conn: c, out: make(chan []byte, 1<<12), done: make(chan struct{}), once: new(sync.Once)}
		go func() {
			for {
				select {
				case b := <-e.out:
					if _, err := c.Write(b); err != nil {
						_ = e.Close()
						return
					}
				case <-e.done:
					return
				}
			}
		}()
		return e
	}
	return end(x), end(y)
}

func (e *pipeEnd) Write(b []byte) (int, error) {
	select {
	case <-e.done:
		return 0, net.ErrClosed
	default:
	}
	select {
	case <-e.done:
		return 0, net.ErrClosed
	case e.out <- append([]byte(nil), b...):
		return len(b), nil
	}
}

func (e *pipeEnd) Close() error {
	e.once.Do(func() { close(e.done) })
	return e.Conn.Close()
}

func (e *pipeEnd) SetDeadline(t time.Time) error      { return e.SetReadDeadline(t) }
func (e *pipeEnd) SetWriteDeadline(t time.Time) error { return nil }

// actor is a publisher and a replay server that a test plays.
type actor struct {
	publish func(c *zmtpConn)              // nil: nobody listens
	replay  func(c *zmtpConn, from uint64) // nil: nobody listens
	dials   atomic.Int64                   // of the publisher
	asked   []time.Duration                // when the replay server was dialled
	began   time.Time
	mu      sync.Mutex
}

// dial plays the network: the publisher is tcp://p:1, the replay server tcp://r:1.
func (a *actor) dial(_ context.Context, _, address string) (net.Conn, error) {
	replay := strings.HasPrefix(address, "r")
	a.mu.Lock()
	publish, answer := a.publish, a.replay
	if replay {
		a.asked = append(a.asked, time.Since(a.began).Round(10*time.Millisecond))
	} else {
		a.dials.Add(1)
	}
	a.mu.Unlock()
	if replay && answer == nil || !replay && publish == nil {
		return nil, errors.New("refused")
	}
	ours, theirs := newPipe()
	go func() {
		defer func() { _ = theirs.Close() }()
		kind, peer := "PUB", "SUB"
		if replay {
			kind, peer = "ROUTER", "DEALER"
		}
		c, err := shakeZMTP(context.Background(), theirs, kind, peer)
		if err != nil {
			return
		}
		if !replay {
			publish(c)
			return
		}
		var m zmtpMessage
		if c.read(&m) != nil {
			return
		}
		answer(c, binary.BigEndian.Uint64(m.frame(1)))
	}()
	return ours, nil
}

// batchOf is a batch that stores block number seq+1.
func batchOf(seq uint64) []byte {
	return pack(nil, list(float64(seq), list(list("BlockStored", list(seq+1), nil, list(), 16))))
}

func seqFrame(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

func sendLive(c *zmtpConn, seq uint64) error {
	return c.send([]byte("kv@p@m"), seqFrame(seq), batchOf(seq))
}

func sendReplay(c *zmtpConn, seq uint64) error {
	return c.send(nil, []byte("kv@p@m"), seqFrame(seq), batchOf(seq))
}

func sendEnd(c *zmtpConn) error { return c.send(nil, nil, seqFrame(^uint64(0)), nil) }

// obeys reads, and so answers PINGs, until the connection ends.
func obeys(c *zmtpConn) {
	var m zmtpMessage
	for c.read(&m) == nil {
	}
}

// obeying lets a connection obey beside a script, and is closed at its end.
func obeying(c *zmtpConn) <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		obeys(c)
	}()
	return ended
}

// follow runs one stream, with a replay server if the actor plays one or with asks, for d.
func (a *actor) follow(t *testing.T, sink *kvSink, rank int, replay bool) (*kvStream, func()) {
	t.Helper()
	hub := newKVHub(nil, a.dial, zap.NewNop())
	return a.followOn(t, newKVGroup(hub, routing.KVEventSource{Config: kvConfig(), Sink: sink}), rank, replay)
}

func (a *actor) followOn(t *testing.T, g *kvGroup, rank int, replay bool) (*kvStream, func()) {
	t.Helper()
	fleet := routing.NewFleet(time.Now, time.Second, nil)
	added, _ := fleet.Update([]routing.EndpointSpec{{Name: "a", URL: "http://10.0.0.1:8000"}})
	if a.began.IsZero() {
		a.began = time.Now()
	}
	s := &kvStream{group: g, endpoint: added[0], rank: rank, log: zap.NewNop(), counts: &kvCounts{}}
	if replay {
		s.replay = &zmqAddress{network: "tcp", address: "r:1"}
	}
	s.connect = func(ctx context.Context) (*zmtpConn, *kvMessage, error) {
		c, err := dialZMTP(ctx, a.dial, zmqAddress{network: "tcp", address: "p:1"}, "SUB", "PUB")
		if err != nil {
			return nil, nil, err
		}
		return c, nil, g.subscribe(c)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.run(ctx)
	}()
	return s, func() {
		cancel()
		<-done
		time.Sleep(10 * time.Second) // for the goroutines of the actor
	}
}

// plays changes the roles.
func (a *actor) plays(publish func(c *zmtpConn), replay func(c *zmtpConn, from uint64)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.publish, a.replay = publish, replay
}

func (a *actor) askedAt() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return fmt.Sprint(a.asked)
}

// TestKVCoolDown: a replay server that is not there is asked three times, and
// again after 30 s; what comes meanwhile is kept.
func TestKVCoolDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &actor{}
		next := make(chan uint64)
		a.publish = func(c *zmtpConn) {
			go obeys(c)
			for seq := range next {
				if sendLive(c, seq) != nil {
					return
				}
			}
		}
		sink := newKVSink()
		s, stop := a.follow(t, sink, 0, true)
		time.Sleep(5 * time.Second)
		if got, want := a.askedAt(), "[0s 100ms 200ms]"; got != want {
			t.Errorf("asked at %s, want %s", got, want)
		}
		if got := sink.reason("a/0"); !strings.Contains(got, "refused") {
			t.Errorf("reason: got %q, want refused", got)
		}
		next <- 7
		next <- 8
		next <- 11 // a gap within the cool-down
		next <- 12
		time.Sleep(20 * time.Second)
		if got, want := a.askedAt(), "[0s 100ms 200ms]"; got != want {
			t.Errorf("within the cool-down: asked at %s, want %s", got, want)
		}
		if got := sink.reason("a/0"); !strings.Contains(got, "the batches 9 to 10 are lost, and the replay server has failed before") {
			t.Errorf("reason: got %q", got)
		}
		if ghosts, missing := sink.differs("a/0", map[uint64]int{12: 1, 13: 1}); ghosts+missing > 0 {
			t.Errorf("after the gap: got %d more and %d fewer blocks than 12 and 13", ghosts, missing)
		}
		time.Sleep(10 * time.Second) // asked again in vain
		if ghosts, missing := sink.differs("a/0", map[uint64]int{12: 1, 13: 1}); ghosts+missing > 0 {
			t.Errorf("after another failure: got %d more and %d fewer blocks than 12 and 13", ghosts, missing)
		}
		if got := strings.Count(a.askedAt(), " ") + 1; got != 6 {
			t.Errorf("asked %d times, want 6", got)
		}
		a.plays(a.publish, func(c *zmtpConn, from uint64) {
			for seq := from; seq <= 12; seq++ {
				_ = sendReplay(c, seq)
			}
			_ = sendEnd(c)
			obeys(c)
		})
		time.Sleep(31 * time.Second)
		all := map[uint64]int{}
		for n := range uint64(13) {
			all[n+1] = 1
		}
		if ghosts, missing := sink.differs("a/0", all); ghosts+missing > 0 || sink.reason("a/0") != "" {
			t.Errorf("replayed: got %d more and %d fewer blocks than 1 to 13, %q", ghosts, missing, sink.reason("a/0"))
		}
		close(next)
		stop()
		if got := s.counts.replays[kvReplayFailed].Load(); got != 2 {
			t.Errorf("got %d failed replays, want 2", got)
		}
	})
}

// TestKVReplayLimits: how long a replay may take, and what counts as progress.
func TestKVReplayLimits(t *testing.T) {
	f := func(name string, replay func(c *zmtpConn, from uint64), result kvReplay, tries int, took time.Duration) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &actor{publish: obeys, replay: replay}
				s, stop := a.follow(t, newKVSink(), 0, true)
				began := time.Now()
				for s.counts.replays[result].Load() == 0 && time.Since(began) < time.Hour {
					time.Sleep(10 * time.Millisecond)
				}
				if got := time.Since(began).Round(100 * time.Millisecond); got != took {
					t.Errorf("got an end after %s, want %s", got, took)
				}
				if got := strings.Count(a.askedAt(), " ") + 1; got != tries {
					t.Errorf("got %d attempts, want %d: %s", got, tries, a.askedAt())
				}
				stop()
			})
		})
	}
	f("silence", func(c *zmtpConn, _ uint64) { obeys(c) }, kvReplayFailed, 3, 6300*time.Millisecond)
	f("a handshake and no more", func(*zmtpConn, uint64) {}, kvReplayFailed, 3, 300*time.Millisecond)
	f("drops", func(c *zmtpConn, from uint64) {
		for ; sendReplay(c, from) == nil; from++ {
			time.Sleep(1900 * time.Millisecond)
		}
	}, kvReplayFailed, 1, 2*time.Minute)
	f("one batch at a time", func(c *zmtpConn, from uint64) {
		_ = sendReplay(c, from)
		if from < 9 {
			_ = sendReplay(c, from+1)
			time.Sleep(time.Millisecond) // read before the end
			return
		}
		_ = sendEnd(c)
		obeys(c)
	}, kvReplayOK, 10, 900*time.Millisecond)
	f("no end marker", func(c *zmtpConn, from uint64) {
		for ; from < 5; from++ {
			_ = sendReplay(c, from)
		}
		obeys(c)
	}, kvReplayFailed, 4, 8400*time.Millisecond)
	f("an endless message", func(c *zmtpConn, _ uint64) {
		for c.write([]byte("\x01\x00")) == nil {
			time.Sleep(100 * time.Millisecond)
		}
	}, kvReplayFailed, 3, 2700*time.Millisecond)
	f("what nobody asked for", func(c *zmtpConn, _ uint64) {
		_ = c.send(nil, []byte("kv@p@m"), []byte("short"), nil)
		obeys(c)
	}, kvReplayFailed, 3, 300*time.Millisecond)
	f("another topic", func(c *zmtpConn, from uint64) {
		_ = c.send(nil, []byte("other"), seqFrame(from), batchOf(from))
		obeys(c)
	}, kvReplayFailed, 3, 300*time.Millisecond)
	f("a short memory", func(c *zmtpConn, _ uint64) {
		_ = sendReplay(c, 5)
		_ = sendReplay(c, 6)
		_ = sendEnd(c)
		obeys(c)
	}, kvReplayPartial, 1, 0)
}

// TestKVReplaysAtOnce: no more than eight replicas are replayed at a time.
func TestKVReplaysAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &actor{publish: obeys}
		var open, most atomic.Int64
		a.replay = func(c *zmtpConn, from uint64) {
			if n := open.Add(1); n > most.Load() {
				most.Store(n)
			}
			time.Sleep(time.Second)
			open.Add(-1)
			_ = sendReplay(c, from)
			_ = sendEnd(c)
			var m zmtpMessage
			_ = c.read(&m)
		}
		sink := newKVSink()
		hub := newKVHub(nil, a.dial, zap.NewNop())
		g := newKVGroup(hub, routing.KVEventSource{Config: kvConfig(), Sink: sink})
		var stops []func()
		for rank := range 20 {
			_, stop := a.followOn(t, g, rank, true)
			stops = append(stops, stop)
		}
		time.Sleep(3500 * time.Millisecond)
		if got := most.Load(); got != maxKVReplays {
			t.Errorf("got %d replays at once, want %d", got, maxKVReplays)
		}
		if got := strings.Count(sink.ranks(), "a/"); got != 20 {
			t.Errorf("got %d ranks replayed, want 20", got)
		}
		for _, stop := range stops {
			stop()
		}
	})
}

// TestKVHeartbeat: a publisher that used to answer and falls silent is given up; one that never answered is not.
func TestKVHeartbeat(t *testing.T) {
	f := func(name string, publish func(c *zmtpConn), want int64) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &actor{publish: publish}
				_, stop := a.follow(t, newKVSink(), 0, false)
				time.Sleep(2 * time.Minute)
				if got := a.dials.Load(); got != want {
					t.Errorf("got %d connections in 2 minutes, want %d", got, want)
				}
				stop()
			})
		})
	}
	f("answers", obeys, 1)
	f("never answers", func(c *zmtpConn) {
		buf := make([]byte, 1000)
		for {
			if _, err := c.nc.Read(buf); err != nil {
				return
			}
		}
	}, 1)
	f("falls silent", func(c *zmtpConn) {
		var once zmtpMessage
		_ = c.nc.SetReadDeadline(time.Now().Add(15 * time.Second))
		for c.read(&once) == nil {
		}
		_ = c.nc.SetReadDeadline(time.Time{})
		buf := make([]byte, 1000)
		for {
			if _, err := c.nc.Read(buf); err != nil {
				return
			}
		}
	}, 3)
}

// TestKVLostConnection: for 30 s without a connection what is known stays; then it is dropped.
func TestKVLostConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &actor{}
		hang := make(chan struct{})
		a.publish = func(c *zmtpConn) {
			_ = sendLive(c, 0)
			go obeys(c)
			<-hang
		}
		replay := func(c *zmtpConn, _ uint64) {
			_ = sendReplay(c, 0)
			_ = sendEnd(c)
			obeys(c)
		}
		a.replay = replay
		sink := newKVSink()
		_, stop := a.follow(t, sink, 0, true)
		time.Sleep(time.Minute)
		if got, why := sink.ranks(), sink.reason("a/0"); got != "[a/0]" || why != "" {
			t.Fatalf("connected: got %s, %q, want [a/0]", got, why)
		}
		a.plays(nil, replay)
		close(hang)
		time.Sleep(29 * time.Second)
		if got, why := sink.ranks(), sink.reason("a/0"); got != "[a/0]" || why != "" {
			t.Errorf("after 29 s: got %s, %q, want [a/0]", got, why)
		}
		time.Sleep(10 * time.Second)
		if got, why := sink.ranks(), sink.reason("a/0"); got != "[]" || !strings.Contains(why, "no connection") {
			t.Errorf("after 39 s: got %s, %q, want nothing", got, why)
		}
		if got := a.dials.Load(); got > 30 {
			t.Errorf("got %d connections tried in 39 s, want at most 30", got)
		}
		a.plays(obeys, replay)
		time.Sleep(10 * time.Second)
		if got, why := sink.ranks(), sink.reason("a/0"); got != "[a/0]" || why != "" {
			t.Errorf("connected again: got %s, %q, want [a/0]", got, why)
		}
		stop()
	})
}

// TestKVNoFrames: messages that are no batches are counted and left out.
func TestKVNoFrames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &actor{publish: func(c *zmtpConn) {
			_ = c.send([]byte("kv@p@m"))
			_ = c.send([]byte("kv@p@m"), []byte("seven.."), batchOf(0))
			_ = c.send([]byte("kv@p@m"), seqFrame(0), batchOf(0), nil)
			_ = sendLive(c, 0)
			obeys(c)
		}}
		sink := newKVSink()
		s, stop := a.follow(t, sink, 3, false)
		time.Sleep(time.Second)
		if got := s.counts.dropped[kvDropMessage].Load(); got != 3 {
			t.Errorf("got %d messages dropped, want 3", got)
		}
		if ghosts, missing := sink.differs("a/3", map[uint64]int{1: 1}); ghosts+missing > 0 {
			t.Errorf("got %d more and %d fewer blocks than block 1", ghosts, missing)
		}
		stop()
	})
}

// slowSink takes its time.
type slowSink struct {
	*kvSink
	hold chan struct{}
}

func (s *slowSink) Stored(e *routing.Endpoint, rank int, b *routing.BlockStored) {
	<-s.hold
	s.kvSink.Stored(e, rank, b)
}

// TestKVQueueIsBounded: what comes faster than it is taken in is dropped, and becomes a gap.
func TestKVQueueIsBounded(t *testing.T) {
	f := func(name string, payload func(seq uint64) []byte, n, least int) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &actor{publish: func(c *zmtpConn) {
					for seq := range uint64(n) {
						if c.send([]byte("kv@p@m"), seqFrame(seq), payload(seq)) != nil {
							return
						}
					}
					obeys(c)
				}}
				sink := &slowSink{kvSink: newKVSink(), hold: make(chan struct{})}
				hub := newKVHub(nil, a.dial, zap.NewNop())
				s, stop := a.followOn(t, newKVGroup(hub, routing.KVEventSource{Config: kvConfig(), Sink: sink}), 0, false)
				time.Sleep(time.Minute)
				dropped := int(s.counts.dropped[kvDropQueue].Load())
				if dropped < least || dropped >= n {
					t.Errorf("got %d of %d batches dropped, want at least %d", dropped, n, least)
				}
				close(sink.hold)
				time.Sleep(time.Minute)
				if got := int(s.counts.events[kvStored].Load()); got != n-dropped {
					t.Errorf("got %d batches taken in, want %d", got, n-dropped)
				}
				stop()
			})
		})
	}
	f("many", batchOf, 3*maxKVQueue, 2*maxKVQueue-10)
	f("large", func(seq uint64) []byte {
		return pack(nil, list(float64(seq), list(list("BlockStored", list(seq+1), nil, list(), 16)), nil, strings.Repeat("x", maxKVQueueBytes/10)))
	}, 30, 15)
}

// TestKVNumbers: what the numbers of a connection without a replay server say.
func TestKVNumbers(t *testing.T) {
	f := func(name string, seqs []uint64, held []uint64, gaps, restarts int64, why string) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &actor{publish: func(c *zmtpConn) {
					for _, seq := range seqs {
						_ = sendLive(c, seq)
					}
					obeys(c)
				}}
				sink := newKVSink()
				s, stop := a.follow(t, sink, 0, false)
				time.Sleep(time.Second)
				want := map[uint64]int{}
				for _, seq := range held {
					want[seq+1] = 1
				}
				if ghosts, missing := sink.differs("a/0", want); ghosts+missing > 0 {
					t.Errorf("got %d more and %d fewer blocks than those of the batches %d", ghosts, missing, held)
				}
				if got := sink.reason("a/0"); got != why {
					t.Errorf("reason: got %q, want %q", got, why)
				}
				if g, r := s.counts.gaps.Load(), s.counts.restarts.Load(); g != gaps || r != restarts {
					t.Errorf("got %d gaps and %d restarts, want %d and %d", g, r, gaps, restarts)
				}
				stop()
			})
		})
	}
	f("in order", []uint64{0, 1, 2}, []uint64{0, 1, 2}, 0, 0, "")
	f("twice", []uint64{0, 1, 1, 0, 1, 2}, []uint64{0, 1, 2}, 0, 0, "")
	f("from the middle", []uint64{5, 6}, []uint64{5, 6}, 0, 0, "KV events are known from batch 5 on only")
	f("a gap", []uint64{0, 1, 4, 5}, []uint64{4, 5}, 1, 0, "the batches 2 to 3 are lost")
	f("anew", []uint64{3, 4, 0, 1}, []uint64{0, 1}, 0, 1, "")
	f("anew in the middle", []uint64{3, 4, 1, 2}, []uint64{1, 2}, 0, 1, "KV events are known from batch 3 on only")
	f("swapped", []uint64{0, 2, 1, 3}, []uint64{3}, 2, 1, "the batches 2 to 2 are lost")
}

// otherBatch is what another process publishes under the same number: block seq+101.
func otherBatch(seq uint64) []byte {
	return pack(nil, list(float64(seq), list(list("BlockStored", list(seq+101), nil, list(), 16))))
}

// TestKVNumbersAnew: a publisher that begins anew on a standing connection, with replay servers of every kind.
func TestKVNumbersAnew(t *testing.T) {
	f := func(name string, second func(c *zmtpConn, from uint64), held []uint64, why string) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &actor{}
				turn := make(chan struct{})
				a.publish = func(c *zmtpConn) {
					ended := obeying(c)
					for seq := range uint64(3) {
						_ = sendLive(c, seq)
					}
					<-turn
					for seq := range uint64(2) {
						_ = c.send([]byte("kv@p@m"), seqFrame(seq), otherBatch(seq))
					}
					<-ended
				}
				a.replay = func(c *zmtpConn, _ uint64) { _ = sendEnd(c); obeys(c) }
				sink := newKVSink()
				s, stop := a.follow(t, sink, 0, true)
				time.Sleep(time.Second)
				a.plays(a.publish, second)
				close(turn)
				time.Sleep(time.Second)
				want := map[uint64]int{}
				for _, b := range held {
					want[b] = 1
				}
				if ghosts, missing := sink.differs("a/0", want); ghosts+missing > 0 {
					t.Errorf("got %d more and %d fewer blocks than %d", ghosts, missing, held)
				}
				if got := sink.reason("a/0"); !strings.Contains(got, why) || (got == "") != (why == "") {
					t.Errorf("reason: got %q, want %q", got, why)
				}
				if s.counts.restarts.Load() == 0 {
					t.Error("got no restart")
				}
				stop()
			})
		})
	}
	serve := func(batch func(uint64) []byte, n uint64) func(c *zmtpConn, from uint64) {
		return func(c *zmtpConn, _ uint64) { // from the start, whatever is asked for
			for seq := range n {
				_ = c.send(nil, []byte("kv@p@m"), seqFrame(seq), batch(seq))
			}
			_ = sendEnd(c)
			obeys(c)
		}
	}
	f("it knows", serve(otherBatch, 2), []uint64{101, 102}, "")
	f("it is silent", func(c *zmtpConn, _ uint64) { _ = c.nc.Close() }, []uint64{101, 102}, "")
	f("it is the old one's", serve(batchOf, 3), []uint64{}, "other things than the publisher")
}

// TestKVRetryBreaks: a replay of everything that has begun and breaks off leaves nothing half known.
func TestKVRetryBreaks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &actor{publish: func(c *zmtpConn) {
			ended := obeying(c)
			time.Sleep(time.Second)
			_ = sendLive(c, 7)
			<-ended
		}}
		sink := newKVSink()
		s, stop := a.follow(t, sink, 0, true)
		time.Sleep(10 * time.Second)
		if ghosts, missing := sink.differs("a/0", map[uint64]int{8: 1}); ghosts+missing > 0 {
			t.Errorf("without a replay server: got %d more and %d fewer blocks than block 8", ghosts, missing)
		}
		a.plays(a.publish, func(c *zmtpConn, _ uint64) {
			_ = sendReplay(c, 0)
			_ = sendReplay(c, 2)
			time.Sleep(time.Millisecond)
		})
		time.Sleep(40 * time.Second)
		if got, why := sink.ranks(), sink.reason("a/0"); got != "[]" || !strings.Contains(why, "holes") {
			t.Errorf("after half a replay: got %s, %q, want nothing held", got, why)
		}
		a.plays(a.publish, func(c *zmtpConn, _ uint64) { // with everything before what was asked for
			for seq := range uint64(8) {
				_ = sendReplay(c, seq)
			}
			_ = sendEnd(c)
			obeys(c)
		})
		time.Sleep(40 * time.Second)
		if got, why := sink.reason("a/0"), s.counts.replays[kvReplayOK].Load(); got != "" || why == 0 {
			t.Errorf("after a whole one: got %q and %d replays, want complete", got, why)
		}
		all := map[uint64]int{}
		for n := range uint64(8) {
			all[n+1] = 1
		}
		if ghosts, missing := sink.differs("a/0", all); ghosts+missing > 0 {
			t.Errorf("after a whole one: got %d more and %d fewer blocks than 1 to 8", ghosts, missing)
		}
		stop()
	})
}
