package fakevllm

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// KVEvents configures what a replica publishes about its KV cache, as vLLM's
// --kv-events-config does. The zero value publishes nothing.
type KVEvents struct {
	// Endpoint is tcp://*:port, which is bound, or tcp://host:port, which is connected to. Port 0 binds any.
	Endpoint string
	Replay   string // address of the replay server, always bound; "": none
	Topic    string // default kv@<host:port of the replica>@<model>
	Buffer   int    // batches kept for replay; default 10000
	HWM      int    // batches that wait for one subscriber, more are dropped; default 10000

	Positional bool // events as arrays, as older versions send them, not as maps
	ByteHashes bool // block hashes as 32 bytes, as with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0
}

func (e KVEvents) withDefaults(addr, model string) KVEvents {
	if e.Topic == "" {
		e.Topic = "kv@" + addr + "@" + model
	}
	if e.Buffer == 0 {
		e.Buffer = 10_000
	}
	if e.HWM == 0 {
		e.HWM = 10_000
	}
	return e
}

func (e *KVEvents) validate() error {
	for _, o := range []struct{ name, value string }{{"endpoint", e.Endpoint}, {"replay", e.Replay}} {
		if o.value == "" {
			continue
		}
		if _, err := zmqAddr(o.value); err != nil {
			return fmt.Errorf("options: KV events: %s %w", o.name, err)
		}
	}
	if e.Endpoint == "" && e.Replay != "" {
		return fmt.Errorf("options: KV events: a replay server needs an endpoint")
	}
	if e.Buffer < 0 || e.HWM < 0 {
		return fmt.Errorf("options: KV events: buffer %d, HWM %d: use numbers that are not negative", e.Buffer, e.HWM)
	}
	return nil
}

// KVStats is what a replica has published.
type KVStats struct {
	Batches     int64 `json:"batches"`     // since the engine began, lost ones included
	Subscribers int   `json:"subscribers"` // connections that have subscribed to the topic
}

// publisher is the PUB socket and the replay server of one replica.
type publisher struct {
	s        *Server
	opt      KVEvents
	endpoint string // as it can be reached
	replay   string

	wait sync.WaitGroup

	mu        sync.Mutex
	listeners []net.Listener
	conns     map[net.Conn]struct{}
	closed    bool
	subs      map[*subscriber]struct{}
	seq       uint64
	kept      []keptBatch    // the last ones are those of the replay server
	held      []byte         // a message that goes out behind the next one
	twice     map[uint64]int // copies of blocks that were announced twice

	// What follows is guarded by Server.mu.
	sequences []publishedSequence // by slot of the engine
	cleared   bool                // AllBlocksCleared goes out with the next step
}

type keptBatch struct {
	seq     uint64
	payload []byte
}

// publishedSequence is what an event needs to know of a sequence.
type publishedSequence struct {
	c      *choice
	hashes []uint64
	salt   string
}

// subscriber is one connection to the PUB socket.
type subscriber struct {
	topics   map[string]int // prefixes, guarded by publisher.mu
	messages chan []byte
	gone     chan struct{}
}

// newPublisher binds or connects.
func newPublisher(s *Server) (*publisher, error) {
	p := &publisher{
		s: s, opt: s.opt.KVEvents.withDefaults(s.addr, s.opt.Models[0]),
		conns: make(map[net.Conn]struct{}), subs: make(map[*subscriber]struct{}), twice: make(map[uint64]int),
	}
	var err error
	if zmqBinds(p.opt.Endpoint) {
		p.endpoint, err = p.bind(p.opt.Endpoint, p.publish)
	} else {
		p.endpoint = p.opt.Endpoint
		p.wait.Go(p.connect)
	}
	if err == nil && p.opt.Replay != "" {
		p.replay, err = p.bind(p.opt.Replay, p.answer)
	}
	if err != nil {
		p.close()
		return nil, fmt.Errorf("fakevllm: KV events: %w", err)
	}
	return p, nil
}

// bind serves an address and returns it as vLLM would report it.
func (p *publisher) bind(endpoint string, serve func(net.Conn)) (string, error) {
	addr, err := zmqAddr(endpoint)
	if err != nil {
		return "", err
	}
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return "", err
	}
	p.mu.Lock()
	p.listeners = append(p.listeners, ln)
	p.mu.Unlock()
	p.wait.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			if p.keep(nc) {
				p.wait.Go(func() { serve(nc) })
			}
		}
	})
	if !strings.HasSuffix(addr, ":0") {
		return endpoint, nil
	}
	host, _, _ := net.SplitHostPort(p.s.addr)
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	return "tcp://" + net.JoinHostPort(host, port), nil
}

// keep notes an open connection, or closes it when the publisher is closed.
func (p *publisher) keep(nc net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = nc.Close()
		return false
	}
	p.conns[nc] = struct{}{}
	return true
}

func (p *publisher) drop(nc net.Conn) {
	_ = nc.Close()
	p.mu.Lock()
	delete(p.conns, nc)
	p.mu.Unlock()
}

// connect keeps one connection to whoever has bound the endpoint.
func (p *publisher) connect() {
	addr, _ := zmqAddr(p.opt.Endpoint)
	dialer := net.Dialer{Timeout: time.Second}
	for {
		if nc, err := dialer.Dial("tcp", addr); err == nil && p.keep(nc) {
			p.publish(nc)
		}
		if !wait(50*time.Millisecond, p.s.stop, nil) {
			return
		}
	}
}

// close ends everything and waits for its end.
func (p *publisher) close() {
	p.mu.Lock()
	p.closed = true
	for _, ln := range p.listeners {
		_ = ln.Close()
	}
	p.cut()
	p.mu.Unlock()
	p.wait.Wait()
}

// cut closes all connections. The caller holds mu.
func (p *publisher) cut() {
	for nc := range p.conns {
		_ = nc.Close()
	}
}

// restart begins anew, as another process in the place of this one.
func (p *publisher) restart() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seq, p.kept, p.held = 0, nil, nil
	clear(p.twice)
	p.cleared = false
	p.cut()
}

// publish serves one subscriber.
func (p *publisher) publish(nc net.Conn) {
	defer p.drop(nc)
	peer, kind, err := shakeZMQ(nc, "PUB")
	if err != nil || kind != "SUB" && kind != "XSUB" {
		return
	}
	sub := &subscriber{topics: make(map[string]int), messages: make(chan []byte, p.opt.HWM), gone: make(chan struct{})}
	p.mu.Lock()
	p.subs[sub] = struct{}{}
	p.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() {
		for {
			select {
			case m := <-sub.messages:
				if peer.write(m) != nil {
					_ = nc.Close()
					return
				}
			case <-sub.gone:
				return
			}
		}
	})
	for {
		frames, err := peer.read()
		if err != nil {
			break
		}
		if len(frames) != 1 || len(frames[0]) == 0 {
			continue
		}
		topic := string(frames[0][1:])
		p.mu.Lock()
		switch frames[0][0] {
		case 1:
			sub.topics[topic]++
		case 0:
			if sub.topics[topic]--; sub.topics[topic] <= 0 {
				delete(sub.topics, topic)
			}
		}
		p.mu.Unlock()
	}
	p.mu.Lock()
	delete(p.subs, sub)
	p.mu.Unlock()
	close(sub.gone)
	_ = nc.Close()
	writer.Wait()
}

// endMarker is the number of the message that ends a replay.
var endMarker = binary.BigEndian.AppendUint64(nil, math.MaxUint64)

// answer serves one client of the replay server.
func (p *publisher) answer(nc net.Conn) {
	defer p.drop(nc)
	peer, kind, err := shakeZMQ(nc, "ROUTER")
	if err != nil || kind != "DEALER" && kind != "REQ" {
		return
	}
	for {
		frames, err := peer.read()
		if err != nil {
			return
		}
		if len(frames) != 2 || len(frames[1]) != 8 {
			continue
		}
		from := binary.BigEndian.Uint64(frames[1])
		p.mu.Lock()
		kept := slices.DeleteFunc(slices.Clone(p.kept[max(0, len(p.kept)-p.opt.Buffer):]), func(b keptBatch) bool { return b.seq < from })
		p.mu.Unlock()
		fault := p.s.faults.Load().KVReplay
		if fault != "" {
			p.s.fault("kv_replay_" + fault)
		}
		switch fault {
		case ReplayStall:
			continue
		case ReplayEmpty:
			kept = nil
		case ReplayCut:
			kept = kept[:min(1, len(kept))]
		case ReplayHoles:
			kept = slices.DeleteFunc(kept, func(b keptBatch) bool { return b.seq%3 == 2 && b.seq != from })
		}
		for _, b := range kept {
			payload := b.payload
			if fault == ReplayLie { // a batch of another time: the timestamp is behind 3 bytes
				payload = slices.Clone(payload)
				payload[3] ^= 0xff
			}
			if peer.write(appendMessage(nil, nil, []byte(p.opt.Topic), binary.BigEndian.AppendUint64(nil, b.seq), payload)) != nil {
				return
			}
		}
		if fault == ReplayCut {
			return
		}
		if peer.write(appendMessage(nil, nil, nil, endMarker, nil)) != nil {
			return
		}
	}
}

// send numbers a batch, keeps it for replay and gives it to the subscribers.
func (p *publisher) send(payload []byte) {
	f := p.s.faults.Load()
	p.mu.Lock()
	defer p.mu.Unlock()
	if take(&f.kvGarbageLeft) {
		p.s.fault("kv_garbage")
		payload = append(appendMPArray(nil, 2), 0, 0x91, 0x92, 0xab) // an event that is cut short
		payload = append(payload, "BlockStored\xff"...)
	}
	m := appendMessage(nil, []byte(p.opt.Topic), binary.BigEndian.AppendUint64(nil, p.seq), payload)
	p.kept = append(p.kept, keptBatch{p.seq, payload})
	if len(p.kept) >= 2*p.opt.Buffer { // rarely, so that a flood does not move it all for each batch
		p.kept = slices.Delete(p.kept, 0, len(p.kept)-p.opt.Buffer)
	}
	p.seq++
	switch {
	case take(&f.kvDropLeft):
		p.s.fault("kv_drop")
	case p.held != nil:
		p.deliver(m)
		p.deliver(p.held)
		p.held = nil
	case take(&f.kvReorderLeft):
		p.s.fault("kv_reorder")
		p.held = m
	default:
		p.deliver(m)
	}
}

// stats returns the counts; a server that publishes nothing has none.
func (p *publisher) stats() KVStats {
	if p == nil {
		return KVStats{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	out := KVStats{Batches: int64(p.seq)}
	for sub := range p.subs {
		if p.wants(sub) {
			out.Subscribers++
		}
	}
	return out
}

// wants tells whether a subscriber has subscribed to the topic. The caller holds mu.
func (p *publisher) wants(sub *subscriber) bool {
	for topic := range sub.topics {
		if strings.HasPrefix(p.opt.Topic, topic) {
			return true
		}
	}
	return false
}

// deliver gives a message to every subscriber of the topic that has room for it. The caller holds mu.
func (p *publisher) deliver(m []byte) {
	for sub := range p.subs {
		if p.wants(sub) {
			select {
			case sub.messages <- m:
			default:
			}
		}
	}
}

// flood publishes n batches at once: of blocks that are stored and removed again.
func (p *publisher) flood(n int) {
	const blocks = 16
	hashes := make([]uint64, blocks)
	tokens := make([]uint32, blocks*p.s.opt.Engine.BlockTokens)
	for i := range n {
		for j := range hashes {
			hashes[j] = mix(uint64(i*blocks+j) ^ 0xf100d)
		}
		b := p.head(2)
		b = p.stored(b, hashes, 0, false, tokens, "", make([][]string, blocks))
		b = p.removed(b, hashes)
		p.send(append(b, 0))
	}
}

// step publishes what one engine step brought. The caller holds Server.mu.
func (p *publisher) step(r *StepResult) {
	n, cleared := len(r.Evicted)+len(r.Stored), p.cleared
	p.cleared = false
	if cleared {
		n++
	}
	if n == 0 {
		return
	}
	again := p.again(r)
	b := p.head(n + len(again.Evicted) + len(again.Stored))
	if cleared {
		b = p.allCleared(b)
	}
	for _, h := range append(r.Evicted, again.Evicted...) {
		b = p.removed(b, []uint64{h})
	}
	for _, st := range append(r.Stored, again.Stored...) {
		b = p.storedOf(b, st)
	}
	p.send(append(b, 0)) // rank 0
}

// again returns what Faults.KVDuplicate announces a second time: each block that
// is stored, and when it is evicted.
func (p *publisher) again(r *StepResult) StepResult {
	var out StepResult
	duplicate := p.s.faults.Load().KVDuplicate
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, h := range r.Evicted {
		if p.twice[h] > 0 {
			out.Evicted = append(out.Evicted, h)
			if p.twice[h]--; p.twice[h] == 0 {
				delete(p.twice, h)
			}
		}
	}
	if !duplicate {
		return out
	}
	p.s.fault("kv_duplicate")
	out.Stored = r.Stored
	for _, st := range r.Stored {
		for _, h := range p.sequences[st.ID.Slot()].hashes[st.From:st.To] {
			p.twice[h]++
		}
	}
	return out
}

// track notes a sequence whose blocks will be announced. The caller holds Server.mu.
func (p *publisher) track(id ID, c *choice, hashes []uint64, salt string) {
	for len(p.sequences) <= id.Slot() {
		p.sequences = append(p.sequences, publishedSequence{})
	}
	p.sequences[id.Slot()] = publishedSequence{c, hashes, salt}
}

// storedOf appends the BlockStored event of a sequence's blocks.
func (p *publisher) storedOf(dst []byte, st Stored) []byte {
	q := &p.sequences[st.ID.Slot()]
	block := p.s.opt.Engine.BlockTokens
	tokens := make([]uint32, 0, (st.To-st.From)*block)
	for i := st.From * block; i < st.To*block; i++ {
		if i < len(q.c.prompt) {
			tokens = append(tokens, q.c.prompt[i])
		} else {
			tokens = append(tokens, answerToken(q.c.seed, i-len(q.c.prompt), q.c.emoji))
		}
	}
	adapter := p.s.adapter(q.c.model)
	extra := make([][]string, st.To-st.From)
	for i := range extra {
		if adapter != "" {
			extra[i] = append(extra[i], adapter)
		}
		if q.salt != "" && st.From+i == 0 {
			extra[i] = append(extra[i], q.salt)
		}
	}
	parent := uint64(0)
	if st.From > 0 {
		parent = q.hashes[st.From-1]
	}
	return p.stored(dst, q.hashes[st.From:st.To], parent, st.From > 0, tokens, adapter, extra)
}

// head appends the start of a batch of n events.
func (p *publisher) head(n int) []byte {
	b := append(appendMPArray(nil, 3), 0xcb)
	b = binary.BigEndian.AppendUint64(b, math.Float64bits(float64(time.Now().UnixNano())/1e9))
	return appendMPArray(b, n)
}

// event appends the start of an event of n fields; field the name of one, where events are maps.
func (p *publisher) event(dst []byte, tag string, n int) []byte {
	if p.opt.Positional {
		return appendMPString(appendMPArray(dst, n+1), tag)
	}
	return appendMPString(appendMPString(append(dst, 0x80|byte(n+1)), "type"), tag)
}

func (p *publisher) field(dst []byte, name string) []byte {
	if p.opt.Positional {
		return dst
	}
	return appendMPString(dst, name)
}

func (p *publisher) hash(dst []byte, h uint64) []byte {
	if !p.opt.ByteHashes {
		return appendMPUint(dst, h)
	}
	dst = append(dst, 0xc4, 32)
	for _, part := range [...]uint64{mix(h), mix(h + 1), mix(h + 2), h} {
		dst = binary.BigEndian.AppendUint64(dst, part)
	}
	return dst
}

func (p *publisher) hashes(dst []byte, hashes []uint64) []byte {
	dst = appendMPArray(p.field(dst, "block_hashes"), len(hashes))
	for _, h := range hashes {
		dst = p.hash(dst, h)
	}
	return dst
}

func (p *publisher) allCleared(dst []byte) []byte { return p.event(dst, "AllBlocksCleared", 0) }

func (p *publisher) removed(dst []byte, hashes []uint64) []byte {
	dst = p.hashes(p.event(dst, "BlockRemoved", 3), hashes)
	dst = appendMPString(p.field(dst, "medium"), "GPU")
	return append(p.field(dst, "group_idx"), 0)
}

func (p *publisher) stored(dst []byte, hashes []uint64, parent uint64, hasParent bool, tokens []uint32, adapter string, extra [][]string) []byte {
	dst = p.hashes(p.event(dst, "BlockStored", 10), hashes)
	if dst = p.field(dst, "parent_block_hash"); hasParent {
		dst = p.hash(dst, parent)
	} else {
		dst = append(dst, 0xc0)
	}
	dst = appendMPArray(p.field(dst, "token_ids"), len(tokens))
	for _, t := range tokens {
		dst = appendMPUint(dst, uint64(t))
	}
	dst = appendMPUint(p.field(dst, "block_size"), uint64(p.s.opt.Engine.BlockTokens))
	if dst = p.field(dst, "lora_id"); adapter == "" {
		dst = append(dst, 0xc0)
	} else {
		dst = appendMPUint(dst, uint64(slices.Index(p.s.opt.Models, adapter)))
	}
	dst = appendMPString(p.field(dst, "medium"), "GPU")
	if dst = p.field(dst, "lora_name"); adapter == "" {
		dst = append(dst, 0xc0)
	} else {
		dst = appendMPString(dst, adapter)
	}
	dst = appendMPArray(p.field(dst, "extra_keys"), len(extra))
	for _, keys := range extra {
		if len(keys) == 0 {
			dst = append(dst, 0xc0)
			continue
		}
		dst = appendMPArray(dst, len(keys))
		for _, k := range keys {
			dst = appendMPString(dst, k)
		}
	}
	dst = append(p.field(dst, "group_idx"), 0)
	return appendMPString(p.field(dst, "kv_cache_spec_kind"), "full_attention")
}

func appendMPArray(dst []byte, n int) []byte {
	switch {
	case n < 16:
		return append(dst, 0x90|byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(dst, 0xdc), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(dst, 0xdd), uint32(n))
}

func appendMPUint(dst []byte, v uint64) []byte {
	switch {
	case v < 128:
		return append(dst, byte(v))
	case v < 1<<8:
		return append(dst, 0xcc, byte(v))
	case v < 1<<16:
		return binary.BigEndian.AppendUint16(append(dst, 0xcd), uint16(v))
	case v < 1<<32:
		return binary.BigEndian.AppendUint32(append(dst, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(dst, 0xcf), v)
}

func appendMPString(dst []byte, s string) []byte {
	switch {
	case len(s) < 32:
		dst = append(dst, 0xa0|byte(len(s)))
	case len(s) < 1<<8:
		dst = append(dst, 0xd9, byte(len(s)))
	case len(s) < 1<<16:
		dst = binary.BigEndian.AppendUint16(append(dst, 0xda), uint16(len(s)))
	default:
		dst = binary.BigEndian.AppendUint32(append(dst, 0xdb), uint32(len(s)))
	}
	return append(dst, s...)
}

// KVEndpoints returns the addresses of the publisher and of its replay server, "" where there is none.
func (s *Server) KVEndpoints() (events, replay string) {
	if s.events == nil {
		return "", ""
	}
	return s.events.endpoint, s.events.replay
}

// CachedBlocks returns how many copies the cache holds of each block, by the hash that events name it with.
func (s *Server) CachedBlocks() map[uint64]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[uint64]int)
	for b, h := range s.engine.cache.hash {
		if s.engine.cache.named[b] {
			out[h]++
		}
	}
	return out
}

// RestartEngine ends every sequence with finish_reason "abort" and empties the
// cache without a word, as a new process in the place of the old one: batches of KV
// events are numbered from 0 again, and those before are forgotten.
func (s *Server) RestartEngine() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.abortCalls()
	if s.restarting = s.engine.inStep; !s.restarting {
		s.restarted()
	}
}

// restarted empties cache and publisher. The caller holds mu; no sequence holds a block.
func (s *Server) restarted() {
	s.restarting = false
	s.engine.ClearCache()
	if s.events != nil {
		s.events.restart()
	}
}

// kvEventSources answers GET /kv_event_sources.
func (c *conn) kvEventSources() error {
	p := c.s.events
	if p == nil {
		return c.json(200, `{}`)
	}
	b := appendString([]byte(`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":`), p.endpoint)
	if b = append(b, `,"replay_endpoint":`...); p.replay == "" {
		b = append(b, "null"...)
	} else {
		b = appendString(b, p.replay)
	}
	b = append(b, `,"buffer_steps":`+strconv.Itoa(p.opt.Buffer)+`,"hwm":`+strconv.Itoa(p.opt.HWM)+`,"max_queue_size":100000,"topic":`...)
	return c.json(200, string(append(appendString(b, p.opt.Topic), "}}"...)))
}
