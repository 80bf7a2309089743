package scrape

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"
	"go.uber.org/zap"

	"kvgate/routing"
)

// kvTimes are the limits in time of a subscription.
type kvTimes struct {
	tick      time.Duration // between two looks at the clock
	heartbeat time.Duration // silence after which a publisher is pinged
	deaf      time.Duration // without an answer to that, after which one that used to answer is given up
	settle    time.Duration // longest wait for the sign that a subscription has arrived
	lost      time.Duration // without a connection, after which what is known counts as lost
	maxRetry  time.Duration // between two attempts to connect
	listen    time.Duration // between two attempts to bind an address

	idle       time.Duration // silence that ends an attempt at a replay
	total      time.Duration // a whole replay
	backoff    time.Duration // between two attempts at a replay
	coolDown   time.Duration // after a replay that failed
	quiet      time.Duration // silence after which the replay server is asked whether something was missed
	checkEvery time.Duration // at most so often after a message
	checkIdle  time.Duration // and so often when nothing has come since
}

func defaultKVTimes() kvTimes {
	return kvTimes{
		tick: 2 * time.Second, heartbeat: 10 * time.Second, deaf: 20 * time.Second, settle: 250 * time.Millisecond,
		lost: 30 * time.Second, maxRetry: maxBackoff, listen: maxBackoff,
		idle: 2 * time.Second, total: 2 * time.Minute, backoff: 100 * time.Millisecond, coolDown: 30 * time.Second,
		quiet: 2 * time.Second, checkEvery: 10 * time.Second, checkIdle: 30 * time.Second,
	}
}

// Bounds of what waits for a decoder, per stream. What does not fit is dropped
// and becomes a gap, so that one flood costs itself alone.
const (
	maxKVQueue      = 1024
	maxKVQueueBytes = 16 << 20
	maxKVReplays    = 8 // at once
	maxKVTries      = 3 // attempts at a replay without progress
	kvSeen          = 256
)

// kvMessage is one message of a publisher: topic, sequence number, payload.
type kvMessage struct {
	zmtpMessage
	seq uint64
}

func (m *kvMessage) topic() []byte   { return m.frame(0) }
func (m *kvMessage) payload() []byte { return m.frame(2) }

// read fills the message from a subscription; bad says what is wrong with one that must be left out.
func (m *kvMessage) read(c *zmtpConn) (bad string, err error) {
	if err := c.read(&m.zmtpMessage); err != nil {
		return "", err
	}
	if m.frames() != 3 || len(m.frame(1)) != 8 {
		return fmt.Sprintf("a message of %d frames: topic, sequence number of 8 bytes and payload are needed", m.frames()), nil
	}
	m.seq = binary.BigEndian.Uint64(m.frame(1))
	return "", nil
}

// kvMessages lends messages to all streams.
type kvMessages struct{ pool sync.Pool }

func (p *kvMessages) get() *kvMessage {
	if m, ok := p.pool.Get().(*kvMessage); ok {
		return m
	}
	return &kvMessage{}
}

func (p *kvMessages) put(m *kvMessage) {
	if cap(m.buf) <= 256<<10 {
		p.pool.Put(m)
	}
}

// kvDrop says why a batch was not taken in.
type kvDrop uint8

const (
	kvDropQueue   kvDrop = iota // it came faster than it could be decoded
	kvDropDecode                // an event that cannot be read
	kvDropMessage               // no batch at all: other frames than topic, number and payload
	kvDrops
)

var kvDropNames = [kvDrops]string{"queue", "decode", "message"}

// kvReplay says how a replay ended.
type kvReplay uint8

const (
	kvReplayOK      kvReplay = iota
	kvReplayPartial          // the server does not reach back far enough
	kvReplayRestart          // the server knows another history: the publisher has restarted
	kvReplayFailed           // no answer, a broken one, or one with holes
	kvReplayLie              // the server contradicts the publisher
	kvReplays
)

var kvReplayNames = [kvReplays]string{"ok", "partial", "restart", "failed", "contradiction"}

// kvCounts is what the streams of one replica have counted.
type kvCounts struct {
	events    [kvEventKinds]atomic.Int64
	dropped   [kvDrops]atomic.Int64
	replays   [kvReplays]atomic.Int64
	gaps      atomic.Int64
	restarts  atomic.Int64
	streams   atomic.Int64 // of ranks
	connected atomic.Int64 // of these
	lag       atomic.Int64 // nanoseconds from a batch's timestamp to the end of its application
}

// kvStream follows the events of one rank of one replica. Two goroutines: one
// connects and reads into a bounded queue, one applies what is in it, in order.
//
// What makes it right: batches are numbered without holes; a publisher keeps the
// last ones for replay; and a batch that was applied is known by its number and its
// bytes (which hold a timestamp), so that a publisher that has restarted, or a replay server
// of another one, shows in the first answer.
type kvStream struct {
	group    *kvGroup
	endpoint *routing.Endpoint
	rank     int
	replay   *zmqAddress // nil: there is none
	log      *zap.Logger
	counts   *kvCounts

	// connect makes one connection that is subscribed; first is a message that was
	// read from it already. It returns errNoPublisher when there is nothing to retry for now.
	connect func(ctx context.Context) (c *zmtpConn, first *kvMessage, err error)

	// What follows belongs to the goroutine that applies.
	known    bool   // every batch before next was applied, or counted as lost
	next     uint64 // number of the next batch
	clean    bool   // the sink knows nothing
	why      string // why it does not know everything, as it was told last
	live     uint64 // number of the last message of this connection
	isLive   bool   // there was one
	distrust bool   // the replay server contradicts the publisher; until the next connection
	retry    bool   // a whole replay is due when the cool-down is over
	cool     time.Time
	active   time.Time // last message or connection
	pinged   time.Time // last PING in a silence
	checked  time.Time // last look for missed messages
	epoch    uint32    // number of the connection, from 1 on
	seen     [kvSeen]seenBatch
}

// seenBatch is a batch that was applied.
type seenBatch struct {
	seq, sum uint64
	valid    bool
	epoch    uint32 // the connection that it came by, 0 for a replay
}

// errNoPublisher: nobody has connected yet.
var errNoPublisher = errors.New("no publisher has connected")

// run subscribes until ctx ends.
func (s *kvStream) run(ctx context.Context) {
	times := &s.group.hub.times
	s.counts.streams.Add(1)
	defer s.counts.streams.Add(-1)
	s.begin()
	failures := 0
	last := time.Now() // of a connection
	for ctx.Err() == nil {
		c, first, err := s.connect(ctx)
		wait := times.backoff << min(failures, 10)
		if err == nil {
			began := time.Now()
			s.log.Info("subscribed to KV events", zap.String("publisher", c.peer()))
			err = s.session(ctx, c, first)
			if last = time.Now(); last.Sub(began) > times.maxRetry {
				failures, wait = 0, times.backoff
			}
		} else if errors.Is(err, errNoPublisher) {
			wait = 0
		}
		if ctx.Err() != nil {
			return
		}
		if failures++; failures == 1 {
			s.log.Warn("no KV events from the replica: its index may grow old", zap.Error(err))
		}
		if !s.known && s.why == "" || s.known && time.Since(last) > times.lost {
			s.incomplete(fmt.Sprintf("no connection to the publisher of KV events: %v", err))
			s.known = false
		}
		wait = min(wait, times.maxRetry)
		sleep(ctx, wait-wait/4+rand.N(max(wait/2, 1)))
	}
}

// sleep waits for d or the end of ctx.
func sleep(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// kvQueue holds the messages of one connection that wait to be applied.
type kvQueue struct {
	messages chan *kvMessage // closed by the reader at the end of the connection
	bytes    atomic.Int64
}

// session reads and applies what one connection brings. It returns why the connection ended.
func (s *kvStream) session(ctx context.Context, c *zmtpConn, first *kvMessage) error {
	stop := context.AfterFunc(ctx, c.close)
	defer stop()
	s.counts.connected.Add(1)
	defer s.counts.connected.Add(-1)
	q := &kvQueue{messages: make(chan *kvMessage, maxKVQueue)}
	if first != nil {
		q.bytes.Add(int64(len(first.buf)))
		q.messages <- first
	}
	var end error
	var reader sync.WaitGroup
	reader.Go(func() {
		defer close(q.messages)
		end = s.readAll(c, q)
	})
	s.applyAll(ctx, c, q)
	c.close()
	for m := range q.messages { // what is lost here will be a gap
		s.group.hub.messages.put(m)
	}
	reader.Wait()
	return end
}

// readAll takes every message of a connection into the queue, or drops it.
func (s *kvStream) readAll(c *zmtpConn, q *kvQueue) error {
	messages := &s.group.hub.messages
	m := messages.get()
	defer func() { messages.put(m) }()
	drop := func(why kvDrop) int64 {
		time.Sleep(time.Millisecond) // a flood is the publisher's to hold back
		return s.counts.dropped[why].Add(1)
	}
	for {
		bad, err := m.read(c)
		if err != nil {
			return err
		}
		if bad != "" {
			if drop(kvDropMessage) == 1 {
				s.log.Warn("not a batch of KV events", zap.String("problem", bad))
			}
			continue
		}
		if q.bytes.Add(int64(len(m.buf))) > maxKVQueueBytes {
			q.bytes.Add(-int64(len(m.buf)))
			drop(kvDropQueue)
			continue
		}
		select {
		case q.messages <- m:
			m = messages.get()
		default:
			q.bytes.Add(-int64(len(m.buf)))
			drop(kvDropQueue)
		}
	}
}

// applyAll applies the messages of a connection until it ends.
func (s *kvStream) applyAll(ctx context.Context, c *zmtpConn, q *kvQueue) {
	hub := s.group.hub
	// Only what is published after the subscription has arrived comes this way. The
	// answer to a PING behind it says that it has; what was published before is replayed.
	settled := time.NewTimer(hub.times.settle)
	select {
	case <-c.ponged:
	case <-settled.C:
	case <-ctx.Done():
	}
	settled.Stop()
	s.connected(ctx)
	ticker := time.NewTicker(hub.times.tick)
	defer ticker.Stop()
	for {
		select {
		case m, ok := <-q.messages:
			if !ok {
				return
			}
			s.active = time.Now()
			s.message(ctx, m)
			q.bytes.Add(-int64(len(m.buf)))
			hub.messages.put(m)
		case now := <-ticker.C:
			if err := s.tick(ctx, c, now); err != nil {
				s.log.Warn("the publisher of KV events is silent", zap.Error(err))
				c.close()
			}
		case <-ctx.Done():
			return
		}
	}
}

// tick does what is due.
func (s *kvStream) tick(ctx context.Context, c *zmtpConn, now time.Time) error {
	times := &s.group.hub.times
	heard := time.Unix(0, c.heard.Load())
	switch {
	case s.pinged.After(heard): // and so no answer
		if c.pongs.Load() && now.Sub(s.pinged) > times.deaf {
			return fmt.Errorf("no answer for %s", now.Sub(s.pinged).Round(time.Second))
		}
	case now.Sub(heard) > times.heartbeat:
		s.pinged = now
		if err := c.ping(); err != nil {
			return err
		}
	}
	switch {
	case !s.canReplay(now):
	case s.retry:
		s.retry = false
		if touched, err := s.fetch(ctx, true); touched && err != nil {
			s.fail(ctx, err)
		} else if err != nil { // what was gathered meanwhile is worth keeping
			s.cool, s.retry = time.Now().Add(times.coolDown), true
		}
	case s.known && now.Sub(s.active) > times.quiet &&
		(now.Sub(s.checked) > times.checkIdle || s.active.After(s.checked) && now.Sub(s.checked) > times.checkEvery):
		// A loss shows only in the next number, and the next may be long in coming.
		s.checked = now
		if err := s.catchUp(ctx, true); err != nil && !s.known {
			s.fail(ctx, err)
		} else if err != nil { // no sign of a loss
			s.cool = time.Now().Add(times.coolDown)
		}
	}
	return nil
}

func (s *kvStream) canReplay(now time.Time) bool {
	return s.replay != nil && !s.distrust && !now.Before(s.cool)
}

// connected finds out what was missed since the last connection, or before the first.
func (s *kvStream) connected(ctx context.Context) {
	s.isLive, s.distrust = false, false
	s.epoch++
	s.active, s.pinged = time.Now(), time.Time{}
	switch {
	case s.canReplay(s.active):
		if err := s.catchUp(ctx, false); err != nil {
			s.fail(ctx, err)
		}
	case s.known:
		// The publisher may be another process by now, whose numbers happen to go on.
		s.incomplete("the connection to the publisher was lost, and no replay server can tell what was missed")
		s.known, s.retry = false, s.replay != nil
	}
}

// fail deals with a replay that did not succeed.
func (s *kvStream) fail(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	s.cool = time.Now().Add(s.group.hub.times.coolDown)
	s.known, s.retry = false, true
	s.incomplete(fmt.Sprintf("KV events cannot be replayed: %v", err))
}

// message takes one live message.
func (s *kvStream) message(ctx context.Context, m *kvMessage) {
	sum := xxhash.Sum64(m.payload())
	if s.isLive && m.seq <= s.live {
		if s.hasSeen(m.seq, sum) {
			return // delivered twice
		}
		// A publisher numbers upwards: this is another one.
		s.counts.restarts.Add(1)
		s.log.Info("the publisher of KV events numbers anew", zap.Uint64("after", s.live), zap.Uint64("number", m.seq))
		if !s.canReplay(time.Now()) {
			s.begin()
			s.known = false
		} else if err := s.catchUp(ctx, false); err != nil {
			s.fail(ctx, err)
		}
	}
	s.live, s.isLive = m.seq, true
	if !s.known {
		if m.seq == 0 {
			s.begin()
			s.complete()
		} else if s.why == "" {
			s.incomplete(fmt.Sprintf("KV events are known from batch %d on only", m.seq))
		}
		s.known, s.next = true, m.seq
	}
	if m.seq > s.next {
		s.gap(ctx, m.seq)
	}
	if m.seq < s.next { // a replay has brought it
		if s.contradicts(m.seq, sum) {
			s.lie()
		}
		return
	}
	s.apply(ctx, m, sum, s.epoch)
}

// gap deals with the loss of the batches from next up to, and without, seq.
func (s *kvStream) gap(ctx context.Context, seq uint64) {
	s.counts.gaps.Add(1)
	lost := fmt.Sprintf("the batches %d to %d are lost", s.next, seq-1)
	switch {
	case s.replay == nil:
	case !s.canReplay(time.Now()):
		lost += ", and the replay server has failed before"
		s.retry = !s.distrust
	default:
		err := s.catchUp(ctx, true)
		if err == nil && s.next >= seq || ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("the replay server does not have them")
		}
		lost += fmt.Sprintf(", and not replayed: %v", err)
		s.cool, s.retry = time.Now().Add(s.group.hub.times.coolDown), !s.distrust
	}
	s.incomplete(lost)
	s.known, s.next = true, seq
}

// lie drops what a replay server has told that contradicts the publisher.
func (s *kvStream) lie() {
	s.counts.replays[kvReplayLie].Add(1)
	s.distrust, s.retry = true, false
	s.incomplete(errContradiction.Error())
}

// begin tells the sink that nothing is known.
func (s *kvStream) begin() {
	if !s.clean {
		s.group.source.Sink.Cleared(s.endpoint, s.rank)
	}
	s.clean = true
	clear(s.seen[:])
}

// complete tells the sink that everything is known from now on.
func (s *kvStream) complete() {
	if s.why != "" {
		s.log.Info("KV events are complete again")
		s.group.source.Sink.Incomplete(s.endpoint, s.rank, "")
	}
	s.why = ""
}

// incomplete tells the sink that events were lost for good.
func (s *kvStream) incomplete(why string) {
	s.group.source.Sink.Incomplete(s.endpoint, s.rank, why)
	s.why, s.clean = why, true
}

// hasSeen tells whether a batch was applied with these bytes, contradicts whether it was with others.
func (s *kvStream) hasSeen(seq, sum uint64) bool {
	x := &s.seen[seq%kvSeen]
	return x.valid && x.seq == seq && x.sum == sum
}

func (s *kvStream) contradicts(seq, sum uint64) bool {
	x := &s.seen[seq%kvSeen]
	return x.valid && x.seq == seq && x.sum != sum
}

// apply decodes the batch that is next and tells the sink.
func (s *kvStream) apply(ctx context.Context, m *kvMessage, sum uint64, epoch uint32) {
	s.seen[m.seq%kvSeen] = seenBatch{m.seq, sum, true, epoch}
	s.next = m.seq + 1
	d := s.group.borrow(ctx)
	if d == nil {
		return // the end
	}
	defer s.group.giveBack(d)
	if err := d.decode(m.payload()); err != nil {
		s.counts.dropped[kvDropDecode].Add(1)
		s.incomplete(fmt.Sprintf("batch %d cannot be read: %v", m.seq, err))
		return
	}
	s.deliver(d, topicModel(m.topic()))
	at := time.Unix(0, int64(d.at*1e9))
	s.counts.lag.Store(int64(max(0, time.Since(at))))
}

// deliver tells the sink the events of a batch.
func (s *kvStream) deliver(d *kvDecoder, model []byte) {
	sink := s.group.source.Sink
	for _, e := range d.events {
		s.counts.events[e.kind].Add(1)
		switch e.kind {
		case kvStored:
			b := &d.stored[e.index]
			if len(b.Hashes) > 0 {
				b.Model = model
				sink.Stored(s.endpoint, s.rank, b)
				s.clean = false
			}
		case kvRemoved:
			if b := &d.removed[e.index]; len(b.Hashes) > 0 {
				sink.Removed(s.endpoint, s.rank, b)
			}
		case kvCleared:
			sink.Cleared(s.endpoint, s.rank)
			s.clean = true
			s.complete()
		}
	}
}

// topicModel returns the model of a topic kv@<pod>@<model>, nil when it has none.
func topicModel(topic []byte) []byte {
	_, model := splitTopic(topic)
	return model
}
