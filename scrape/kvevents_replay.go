package scrape

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cespare/xxhash/v2"
)

// A replay server is asked ["", first number] and answers one message per batch
// it still has, ["", topic, number, payload], and a last one with an empty payload
// and the number -1. It sends faster than its queue may hold, and then
// drops: holes and a missing end are ordinary, and are asked for again.

var (
	errOtherPublisher = errors.New("the replay server does not know the last batch: the publisher has restarted")
	errHole           = errors.New("the replay has holes")
	errContradiction  = errors.New("the replay server tells other things than the publisher: is it another replica's?")
)

// catchUp asks for everything from next on; everything there is, after a
// restart. One that is the same process, because its connection stands, cannot have restarted.
func (s *kvStream) catchUp(ctx context.Context, same bool) error {
	_, err := s.fetch(ctx, false)
	if !errors.Is(err, errOtherPublisher) {
		return err
	}
	if same && s.seen[(s.next-1)%kvSeen].epoch == s.epoch {
		s.lie()
		return errContradiction
	}
	s.counts.restarts.Add(1)
	s.log.Info("the publisher of KV events has restarted")
	s.begin()
	s.known = false
	_, err = s.fetch(ctx, true)
	return err
}

// fetch replays from next on or, with fresh or when nothing is known, from the
// start. The last batch that was applied is asked for again: it must be the same. A nil error says
// that the server has sent all it has; touched that a replay from the start has begun.
func (s *kvStream) fetch(ctx context.Context, fresh bool) (touched bool, err error) {
	hub := s.group.hub
	select {
	case hub.replays <- struct{}{}:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	defer func() { <-hub.replays }()
	ctx, cancel := context.WithTimeout(ctx, hub.times.total)
	defer cancel()
	r := replayer{s: s, fresh: fresh || !s.known, result: kvReplayOK}
	for tries := 0; tries < maxKVTries; {
		r.progress = false
		if err = r.attempt(ctx); err == nil || errors.Is(err, errOtherPublisher) {
			break
		}
		if tries++; r.progress {
			tries = 0
		}
		if sleep(ctx, hub.times.backoff); ctx.Err() != nil {
			break
		}
	}
	switch {
	case errors.Is(err, errOtherPublisher):
		r.result = kvReplayRestart
	case err != nil:
		r.result = kvReplayFailed
	}
	s.counts.replays[r.result].Add(1)
	return !r.fresh, err
}

// replayer is one replay of several attempts.
type replayer struct {
	s        *kvStream
	fresh    bool // from the start, as long as no answer has come
	progress bool // this attempt has brought a batch
	result   kvReplay
}

// attempt asks once and applies the answers.
func (r *replayer) attempt(ctx context.Context) error {
	s := r.s
	idle := s.group.hub.times.idle
	within, cancel := context.WithTimeout(ctx, idle)
	c, err := dialZMTP(within, s.group.hub.dial, *s.replay, "DEALER", "ROUTER")
	cancel()
	if err != nil {
		return fmt.Errorf("%s: %w", s.replay, err)
	}
	defer c.close()
	stop := context.AfterFunc(ctx, c.close)
	defer stop()
	from, verify := uint64(0), false
	if !r.fresh && s.next > 0 {
		from, verify = s.next-1, true
	}
	if err := c.send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return err
	}
	m := s.group.hub.messages.get()
	defer s.group.hub.messages.put(m)
	for {
		if err := c.nc.SetReadDeadline(time.Now().Add(idle)); err != nil {
			return err
		}
		if err := c.read(&m.zmtpMessage); errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("no answer from %s for %s", s.replay, idle)
		} else if err != nil {
			return fmt.Errorf("%s: %w", s.replay, err)
		}
		end, err := m.reply()
		if err != nil {
			return err
		}
		if end {
			if verify {
				return errOtherPublisher
			}
			r.begin(0)
			return nil
		}
		if topic := m.topic(); len(topic) > 0 && !bytes.HasPrefix(topic, []byte(s.group.source.Config.TopicFilter)) {
			return fmt.Errorf("the topic %q does not begin with the topicFilter %q: live events would not come", topic, s.group.source.Config.TopicFilter)
		}
		sum := xxhash.Sum64(m.payload())
		if verify {
			switch {
			case m.seq < from:
				continue // more than was asked for
			case m.seq == from && s.hasSeen(from, sum):
				verify = false
				continue
			case m.seq == from:
				return errOtherPublisher
			}
			r.fresh, verify = true, false // its memory begins behind what is known
		}
		r.begin(m.seq)
		switch {
		case m.seq < s.next:
			continue
		case m.seq > s.next:
			return fmt.Errorf("%w: batch %d follows %d", errHole, m.seq, int64(s.next)-1)
		}
		s.apply(ctx, m, sum, 0)
		r.progress = true
	}
}

// begin starts anew with the first answer to a replay of everything.
func (r *replayer) begin(first uint64) {
	if !r.fresh {
		return
	}
	s := r.s
	r.fresh = false
	s.begin()
	s.known, s.next = true, first
	if first == 0 {
		s.complete()
		return
	}
	r.result = kvReplayPartial
	s.incomplete(fmt.Sprintf("the replay server remembers KV events from batch %d on only", first))
}

// reply reads what a replay server sends, with or without the empty frame in front.
func (m *kvMessage) reply() (end bool, err error) {
	n := m.frames()
	if n == 4 && len(m.frame(0)) == 0 {
		m.ends = append(m.ends[:0], m.ends[1:]...)
		n--
	}
	if n != 3 || len(m.frame(1)) != 8 {
		return false, fmt.Errorf("the replay server sends a message of %d frames", n)
	}
	m.seq = binary.BigEndian.Uint64(m.frame(1))
	return m.seq == ^uint64(0) || len(m.payload()) == 0, nil
}

// splitTopic returns the second and the third part of kv@<pod>@<model>. Any other topic is a pod.
func splitTopic(topic []byte) (pod, model []byte) {
	rest, ok := bytes.CutPrefix(topic, []byte("kv@"))
	if !ok {
		return topic, nil
	}
	if pod, model, ok = bytes.Cut(rest, []byte("@")); !ok {
		return topic, nil
	}
	return pod, model
}
