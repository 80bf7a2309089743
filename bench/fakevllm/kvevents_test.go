package fakevllm

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"
)

// kvServer starts a replica with 32 blocks of 4 tokens that publishes.
func kvServer(t *testing.T, e KVEvents) *Server {
	t.Helper()
	if e.Endpoint == "" {
		e.Endpoint = "tcp://*:0"
	}
	m := DefaultModel()
	m.Blocks, m.BlockTokens = 32, 4
	return start(t, Options{KVEvents: e, Engine: m, Speed: 10_000, Models: []string{"base", "adapter"}})
}

// kvDial connects to a published endpoint as a socket of a type.
func kvDial(t *testing.T, endpoint, kind, peer string) *zmqPeer {
	t.Helper()
	addr, err := zmqAddr(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return kvShake(t, nc, kind, peer)
}

func kvShake(t *testing.T, nc net.Conn, kind, peer string) *zmqPeer {
	t.Helper()
	t.Cleanup(func() { _ = nc.Close() })
	p, got, err := shakeZMQ(nc, kind)
	if err != nil || got != peer {
		t.Fatalf("got a %q socket, error %v, want %s", got, err, peer)
	}
	_ = nc.SetDeadline(time.Now().Add(20 * time.Second))
	return p
}

// subscribed connects, subscribes and waits until the publisher knows it.
func subscribed(t *testing.T, s *Server) *zmqPeer {
	t.Helper()
	events, _ := s.KVEndpoints()
	p := kvDial(t, events, "SUB", "PUB")
	if err := p.frame(0, []byte("\x01kv@")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the subscription", func() bool { return s.Stats().KV.Subscribers > 0 })
	return p
}

// kvBatch is one message taken apart.
type kvBatch struct {
	topic  string
	seq    uint64
	events []any
	bad    bool
}

func readBatch(t *testing.T, p *zmqPeer) kvBatch {
	t.Helper()
	frames, err := p.read()
	if err != nil {
		t.Fatal(err)
	}
	if len(frames) == 4 && len(frames[0]) == 0 {
		frames = frames[1:]
	}
	if len(frames) != 3 || len(frames[1]) != 8 {
		t.Fatalf("got %d frames: %q", len(frames), frames)
	}
	b := kvBatch{topic: string(frames[0]), seq: binary.BigEndian.Uint64(frames[1])}
	if len(frames[2]) == 0 {
		return b
	}
	v, rest, err := unpackMP(frames[2])
	if err != nil || len(rest) > 0 {
		b.bad = true
		return b
	}
	batch := v.([]any)
	if at := batch[0].(float64); math.Abs(at-float64(time.Now().UnixNano())/1e9) > 3600 || batch[2] != uint64(0) {
		t.Errorf("got the time %v and rank %v, want now and 0", at, batch[2])
	}
	b.events = batch[1].([]any)
	return b
}

// unpackMP reads the forms that the publisher writes.
func unpackMP(b []byte) (v any, rest []byte, err error) {
	if len(b) == 0 {
		return nil, nil, errors.New("cut short")
	}
	form := b[0]
	b = b[1:]
	sizes := map[byte]int{0xc4: 1, 0xcb: 8, 0xcc: 1, 0xcd: 2, 0xce: 4, 0xcf: 8, 0xd9: 1, 0xda: 2, 0xdb: 4, 0xdc: 2, 0xdd: 4}
	n := uint64(0)
	for range sizes[form] {
		if len(b) == 0 {
			return nil, nil, errors.New("cut short")
		}
		n, b = n<<8|uint64(b[0]), b[1:]
	}
	items := func(n uint64) (any, []byte, error) {
		out := []any{}
		for range n {
			var x any
			if x, b, err = unpackMP(b); err != nil {
				return nil, nil, err
			}
			out = append(out, x)
		}
		return out, b, nil
	}
	text := func(n uint64) (any, []byte, error) {
		if uint64(len(b)) < n {
			return nil, nil, errors.New("cut short")
		}
		return string(b[:n]), b[n:], nil
	}
	switch {
	case form < 0x80:
		return uint64(form), b, nil
	case form < 0x90: // the keys in their order, then their values
		list, b, err := items(2 * uint64(form&15))
		if err != nil {
			return nil, nil, err
		}
		m := map[string]any{}
		keys := []string{}
		for i := 0; i < len(list.([]any)); i += 2 {
			k := list.([]any)[i].(string)
			keys = append(keys, k)
			m[k] = list.([]any)[i+1]
		}
		m["keys"] = strings.Join(keys, " ")
		return m, b, nil
	case form < 0xa0:
		return items(uint64(form & 15))
	case form < 0xc0:
		return text(uint64(form & 31))
	case form == 0xc0:
		return nil, b, nil
	case form == 0xcb:
		return math.Float64frombits(n), b, nil
	case form >= 0xcc && form <= 0xcf:
		return n, b, nil
	case form == 0xdc || form == 0xdd:
		return items(n)
	case form == 0xc4 || form >= 0xd9 && form <= 0xdb:
		return text(n)
	}
	return nil, nil, fmt.Errorf("the form %#x", form)
}

func ints(v any) []uint64 {
	var out []uint64
	for _, x := range v.([]any) {
		out = append(out, x.(uint64))
	}
	return out
}

// complete sends a prompt and waits for its answer.
func complete(t *testing.T, s *Server, prompt, more string) {
	t.Helper()
	if status, doc := call(t, s, "POST", "/v1/completions", `{"prompt":"`+prompt+`","max_tokens":1`+more+`}`); status != 200 {
		t.Fatalf("got %d %s", status, doc)
	}
}

// TestKVEventForm: events have vLLM's keys in vLLM's order, and the tokens of /tokenize.
func TestKVEventForm(t *testing.T) {
	s := kvServer(t, KVEvents{})
	p := subscribed(t, s)
	prompt := strings.Repeat("word", 9)
	complete(t, s, prompt, `,"cache_salt":"pepper","model":"adapter"`)
	b := readBatch(t, p)
	if want := "kv@" + s.Addr() + "@base"; b.topic != want || b.seq != 0 {
		t.Errorf("got topic %s, number %d, want %s, 0", b.topic, b.seq, want)
	}
	if len(b.events) != 1 {
		t.Fatalf("got %d events, want 1", len(b.events))
	}
	e := b.events[0].(map[string]any)
	const keys = "type block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx kv_cache_spec_kind"
	if e["keys"] != keys {
		t.Errorf("got the keys %s, want %s", e["keys"], keys)
	}
	var tokenized struct{ Tokens []uint64 }
	_, doc := call(t, s, "POST", "/tokenize", `{"prompt":"`+prompt+`"}`)
	if err := json.Unmarshal([]byte(doc), &tokenized); err != nil {
		t.Fatal(err)
	}
	if got, want := ints(e["token_ids"]), tokenized.Tokens[:8]; !reflect.DeepEqual(got, want) {
		t.Errorf("got the tokens %d, want %d", got, want)
	}
	for key, want := range map[string]any{
		"type": "BlockStored", "parent_block_hash": nil, "block_size": uint64(4), "lora_id": uint64(1), "medium": "GPU", "lora_name": "adapter",
		"extra_keys": []any{[]any{"adapter", "pepper"}, []any{"adapter"}}, "group_idx": uint64(0), "kv_cache_spec_kind": "full_attention",
	} {
		if !reflect.DeepEqual(e[key], want) {
			t.Errorf("%s: got %v, want %v", key, e[key], want)
		}
	}
	first := ints(e["block_hashes"])
	complete(t, s, prompt+strings.Repeat("next", 8), `,"cache_salt":"pepper","model":"adapter"`)
	e = readBatch(t, p).events[0].(map[string]any)
	if e["parent_block_hash"] != first[1] {
		t.Errorf("the next blocks: got the parent %v, want %d", e["parent_block_hash"], first[1])
	}
	complete(t, s, strings.Repeat("base", 8), "")
	e = readBatch(t, p).events[0].(map[string]any)
	if !reflect.DeepEqual(e["extra_keys"], []any{nil, nil}) || e["lora_id"] != nil || e["lora_name"] != nil {
		t.Errorf("base model: got %v", e)
	}

	old := kvServer(t, KVEvents{Positional: true, ByteHashes: true, Topic: "kv@pod@m"})
	p = subscribed(t, old)
	complete(t, old, strings.Repeat("word", 5), "")
	b = readBatch(t, p)
	l := b.events[0].([]any)
	if len(l) != 11 || l[0] != "BlockStored" || len(l[1].([]any)[0].(string)) != 32 || l[4] != uint64(4) || l[6] != "GPU" || b.topic != "kv@pod@m" {
		t.Errorf("array form: got %d fields: %v, topic %s", len(l), l, b.topic)
	}
	for h := range old.CachedBlocks() {
		if got := binary.BigEndian.Uint64([]byte(l[1].([]any)[0].(string))[24:]); got != h {
			t.Errorf("the last bytes of the hash: got %d, want %d", got, h)
		}
	}
}

// TestKVEventsAreTheCache replays what was published by random traffic, aborts
// and resets included: it gives the cache, block by block and copy by copy.
func TestKVEventsAreTheCache(t *testing.T) {
	s := kvServer(t, KVEvents{})
	p := subscribed(t, s)
	rnd := rand.New(rand.NewPCG(1, 2))
	held := map[uint64]int{}
	next := uint64(0)
	removedBehind := false
	for round := range 40 {
		if round%13 == 12 {
			call(t, s, "POST", "/reset_prefix_cache", "")
		}
		prompt := strings.Repeat(fmt.Sprintf("p%03d", rnd.IntN(6)), 4) + strings.Repeat(fmt.Sprintf("q%03d", rnd.IntN(9)), rnd.IntN(12)+1)
		if round%5 == 4 { // twice at once: copies of one block
			complete(t, s, prompt, `,"n":2`)
		} else {
			complete(t, s, prompt, fmt.Sprintf(`,"max_tokens":%d`, rnd.IntN(20)+1))
		}
		for want := uint64(s.Stats().KV.Batches); next < want; next++ {
			b := readBatch(t, p)
			if b.seq != next {
				t.Fatalf("got batch %d, want %d", b.seq, next)
			}
			stored := false
			for _, e := range b.events {
				m := e.(map[string]any)
				switch m["type"] {
				case "AllBlocksCleared":
					clear(held)
				case "BlockRemoved":
					removedBehind = removedBehind || stored
					h := ints(m["block_hashes"])[0]
					if held[h]--; held[h] == 0 {
						delete(held, h)
					}
				case "BlockStored":
					stored = true
					for _, h := range ints(m["block_hashes"]) {
						held[h]++
					}
				}
			}
		}
		if cached := s.CachedBlocks(); !reflect.DeepEqual(held, cached) {
			t.Fatalf("round %d: got %d blocks, want %d", round, len(held), len(cached))
		}
	}
	if removedBehind {
		t.Error("got a BlockRemoved behind a BlockStored of the same batch")
	}
	if got := s.Stats().Engine.EvictedBlocks; got == 0 {
		t.Error("got no eviction: the test shows nothing")
	}
}

// TestKVReset: the event comes with the next step, and only when the cache was emptied.
func TestKVReset(t *testing.T) {
	s := kvServer(t, KVEvents{})
	p := subscribed(t, s)
	complete(t, s, strings.Repeat("word", 5), "")
	readBatch(t, p)
	if _, doc := call(t, s, "POST", "/reset_prefix_cache", ""); doc != `{"success":true}` {
		t.Fatalf("got %s", doc)
	}
	if got := s.Stats().KV.Batches; got != 1 {
		t.Errorf("after the reset: got %d batches, want 1", got)
	}
	complete(t, s, strings.Repeat("more", 5), "")
	b := readBatch(t, p)
	if len(b.events) != 2 || b.events[0].(map[string]any)["keys"] != "type" || b.events[0].(map[string]any)["type"] != "AllBlocksCleared" {
		t.Errorf("got %v, want AllBlocksCleared first", b.events)
	}
}

// replay asks the replay server and returns what it answers up to the end marker, as text.
func replay(t *testing.T, s *Server, from uint64) string {
	t.Helper()
	_, endpoint := s.KVEndpoints()
	p := kvDial(t, endpoint, "DEALER", "ROUTER")
	if err := p.write(appendMessage(nil, nil, binary.BigEndian.AppendUint64(nil, from))); err != nil {
		t.Fatal(err)
	}
	out := ""
	for {
		_ = p.nc.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		frames, err := p.read()
		if e := net.Error(nil); errors.As(err, &e) && e.Timeout() {
			return out + "silence"
		}
		if err != nil {
			return out + "cut"
		}
		if len(frames) != 4 || len(frames[0]) > 0 {
			t.Fatalf("got the frames %q", frames)
		}
		if string(frames[2]) == string(endMarker) && len(frames[3]) == 0 && len(frames[1]) == 0 {
			return out + "end"
		}
		if string(frames[1]) != "kv@"+s.Addr()+"@base" {
			t.Errorf("got the topic %q", frames[1])
		}
		mark := ""
		v, _, err := unpackMP(frames[3])
		if err != nil {
			mark = "?"
		} else if at, _ := v.([]any)[0].(float64); math.Abs(at-float64(time.Now().UnixNano())/1e9) > 3600 {
			mark = "*"
		}
		out += fmt.Sprintf("%d%s ", binary.BigEndian.Uint64(frames[2]), mark)
	}
}

func TestKVReplay(t *testing.T) {
	s := kvServer(t, KVEvents{Replay: "tcp://*:0", Buffer: 5})
	f := func(faults Faults, from uint64, want string) {
		t.Helper()
		if err := s.SetFaults(faults); err != nil {
			t.Fatal(err)
		}
		if got := replay(t, s, from); got != want {
			t.Errorf("%q from %d: got %s, want %s", faults.KVReplay, from, got, want)
		}
		if n := struck(s, "kv_replay_"+faults.KVReplay); faults.KVReplay != "" && n == 0 {
			t.Errorf("%s: not counted", faults.KVReplay)
		}
	}
	f(Faults{}, 0, "end")
	for i := range 7 {
		complete(t, s, strings.Repeat(fmt.Sprintf("w%03d", i), 5), "")
	}
	f(Faults{}, 0, "2 3 4 5 6 end")
	f(Faults{}, 5, "5 6 end")
	f(Faults{}, 7, "end")
	f(Faults{KVReplay: ReplayStall}, 0, "silence")
	f(Faults{KVReplay: ReplayEmpty}, 0, "end")
	f(Faults{KVReplay: ReplayCut}, 4, "4 cut")
	f(Faults{KVReplay: ReplayCut}, 9, "cut")
	f(Faults{KVReplay: ReplayHoles}, 3, "3 4 6 end")
	f(Faults{KVReplay: ReplayHoles}, 5, "5 6 end")
	f(Faults{KVReplay: ReplayLie}, 5, "5* 6* end")

	_, endpoint := s.KVEndpoints()
	p := kvDial(t, endpoint, "REQ", "ROUTER")
	for _, m := range [][]byte{appendMessage(nil, nil, []byte("short")), appendMessage(nil, []byte("one frame")), appendMessage(nil, nil, binary.BigEndian.AppendUint64(nil, 7))} {
		if err := p.write(m); err != nil { // only the last is a question
			t.Fatal(err)
		}
	}
	if frames, err := p.read(); err != nil || string(frames[2]) != string(endMarker) {
		t.Errorf("got %q, %v, want the end marker", frames, err)
	}
}

func TestKVFaults(t *testing.T) {
	f := func(faults Faults, want string) {
		t.Helper()
		s := kvServer(t, KVEvents{Replay: "tcp://*:0"})
		p := subscribed(t, s)
		if err := s.SetFaults(faults); err != nil {
			t.Fatal(err)
		}
		for i := range 4 {
			complete(t, s, strings.Repeat(fmt.Sprintf("w%03d", i), 5), "")
		}
		complete(t, s, strings.Repeat("last", 17), "")
		got := ""
		for !strings.Contains(got, " x4") {
			b := readBatch(t, p)
			got += fmt.Sprintf("%d", b.seq)
			if b.bad {
				got += "?"
			}
			for _, e := range b.events {
				m := e.(map[string]any)
				got += fmt.Sprintf(" x%d", len(m["block_hashes"].([]any)))
			}
			got += "; "
		}
		if got != want {
			t.Errorf("%+v: got %s, want %s", faults, got, want)
		}
	}
	f(Faults{}, "0 x1; 1 x1; 2 x1; 3 x1; 4 x4; ")
	f(Faults{KVDrop: 2}, "2 x1; 3 x1; 4 x4; ")
	f(Faults{KVReorder: 1}, "1 x1; 0 x1; 2 x1; 3 x1; 4 x4; ")
	f(Faults{KVGarbage: 1}, "0?; 1 x1; 2 x1; 3 x1; 4 x4; ")
	f(Faults{KVDuplicate: true}, "0 x1 x1; 1 x1 x1; 2 x1 x1; 3 x1 x1; 4 x4 x4; ")
	f(Faults{KVFlood: 2}, "0 x16 x16; 1 x16 x16; 2 x1; 3 x1; 4 x1; 5 x1; 6 x4; ")
}

// TestKVDuplicateEnds: what was announced twice is removed twice.
func TestKVDuplicateEnds(t *testing.T) {
	s := kvServer(t, KVEvents{})
	p := subscribed(t, s)
	if err := s.SetFaults(Faults{KVDuplicate: true}); err != nil {
		t.Fatal(err)
	}
	complete(t, s, strings.Repeat("word", 5), "")
	if err := s.SetFaults(Faults{}); err != nil {
		t.Fatal(err)
	}
	h := ints(readBatch(t, p).events[0].(map[string]any)["block_hashes"])[0]
	complete(t, s, strings.Repeat("fill", 125), "")
	removed := 0
	for _, e := range readBatch(t, p).events {
		if m := e.(map[string]any); m["type"] == "BlockRemoved" && ints(m["block_hashes"])[0] == h {
			removed++
		}
	}
	if removed != 2 {
		t.Errorf("got %d removals, want 2", removed)
	}
}

// TestKVRestart: another process in the place of this one: the cache is empty,
// connections end, numbers begin anew, open answers abort.
func TestKVRestart(t *testing.T) {
	m := DefaultModel()
	m.Blocks, m.BlockTokens = 32, 4
	s := start(t, Options{KVEvents: KVEvents{Endpoint: "tcp://*:0", Replay: "tcp://*:0"}, Engine: m, Manual: true})
	p := subscribed(t, s)
	finish := func(c net.Conn) {
		t.Helper()
		eventually(t, "the answer", func() bool { s.Step(); return s.Stats().InFlight == 0 })
		_ = c.Close()
	}
	c := dial(t, s)
	send(t, c, "POST", "/v1/completions", `{"prompt":"`+strings.Repeat("word", 9)+`","max_tokens":1}`)
	eventually(t, "the request", func() bool { return s.Stats().Awaiting == 1 })
	finish(c)
	if got := readBatch(t, p).seq; got != 0 {
		t.Fatalf("got batch %d, want 0", got)
	}

	c = dial(t, s) // one that is under way, its step begun
	send(t, c, "POST", "/v1/completions", `{"prompt":"`+strings.Repeat("more", 9)+`","max_tokens":9}`)
	eventually(t, "the request", func() bool { return s.Stats().Awaiting == 1 })
	if _, ok := s.begin(); !ok {
		t.Fatal("got no step")
	}
	if status, _ := call(t, s, "POST", "/fake/faults", `{"restart_engine":true}`); status != 200 {
		t.Fatalf("got %d", status)
	}
	s.finish()
	if got := s.CachedBlocks(); len(got) != 0 {
		t.Errorf("got %d cached blocks, want 0", len(got))
	}
	if _, err := p.read(); err == nil {
		t.Error("the subscriber: got a message, want the end of its connection")
	}
	eventually(t, "the abort", func() bool { return s.Stats().InFlight == 0 })
	if got := s.Stats().KV.Batches; got != 0 {
		t.Errorf("got %d batches, want 0", got)
	}
	if got := replay(t, s, 0); got != "end" {
		t.Errorf("replay: got %s, want end", got)
	}
	p = subscribed(t, s)
	c = dial(t, s)
	send(t, c, "POST", "/v1/completions", `{"prompt":"`+strings.Repeat("word", 9)+`","max_tokens":1}`)
	eventually(t, "the request", func() bool { return s.Stats().Awaiting == 1 })
	finish(c)
	if b := readBatch(t, p); b.seq != 0 || len(b.events) != 1 {
		t.Errorf("got batch %d of %d events, want 0 of 1", b.seq, len(b.events))
	}

	plain := start(t, Options{Manual: true})
	plain.RestartEngine() // also without events
}

// TestKVSubscriptions: by prefix, taken back, in the words of ZMTP 3.0 and 3.1.
func TestKVSubscriptions(t *testing.T) {
	s := kvServer(t, KVEvents{Topic: "kv@pod@m", HWM: 4})
	events, _ := s.KVEndpoints()
	p := kvDial(t, events, "SUB", "PUB")
	n := 0
	f := func(flags byte, body string, want int) {
		t.Helper()
		if err := p.frame(flags, []byte(body)); err != nil {
			t.Fatal(err)
		}
		eventually(t, fmt.Sprintf("%q: %d subscribers", body, want), func() bool { return s.Stats().KV.Subscribers == want })
		complete(t, s, strings.Repeat(fmt.Sprintf("w%03d", n), 5), "")
		n++
		if want > 0 {
			if got := readBatch(t, p).seq; got != uint64(n-1) {
				t.Errorf("%q: got batch %d, want %d", body, got, n-1)
			}
		}
	}
	f(0, "\x01other", 0)
	f(0, "\x01kv@pod", 1)
	f(0, "\x01", 1)
	f(0, "\x00", 1)
	f(0, "\x00kv@pod", 0)
	f(4, "\x09SUBSCRIBEkv@", 1)
	f(4, "\x06CANCELkv@", 0)
	f(0, "\x01kv@", 1)
	if err := p.frame(4, []byte("\x04PING\x00\x00abc")); err != nil {
		t.Fatal(err)
	}
	if flags, body, err := p.readFrame(); err != nil || flags != 4 || string(body) != "\x04PONGabc" {
		t.Errorf("PING: got %d %q %v, want PONG", flags, body, err)
	}
	for _, kind := range []string{"PUB", "DEALER"} { // no subscriber: cut
		other := kvDial(t, events, kind, "PUB")
		if _, err := other.read(); err == nil {
			t.Errorf("a %s socket: got a message, want an end", kind)
		}
	}
	// One that does not read loses what is beyond the mark, and nobody waits for it.
	slow := kvDial(t, events, "SUB", "PUB")
	if err := slow.frame(0, []byte("\x01kv@")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second subscriber", func() bool { return s.Stats().KV.Subscribers == 2 })
	if err := s.SetFaults(Faults{KVFlood: 20_000}); err != nil {
		t.Fatal(err)
	}
	if got := s.Stats().KV.Batches; got < 20_000 {
		t.Errorf("got %d batches, want 20000", got)
	}
}

// TestKVConnects: without a wildcard the replica connects, and again when it was cut.
func TestKVConnects(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	s := kvServer(t, KVEvents{Endpoint: "tcp://" + ln.Addr().String()})
	for i := range 2 {
		nc, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		p := kvShake(t, nc, "SUB", "PUB")
		if err := p.frame(0, []byte("\x01")); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the subscription", func() bool { return s.Stats().KV.Subscribers == 1 })
		complete(t, s, strings.Repeat(fmt.Sprintf("w%03d", i), 5), "")
		if got := readBatch(t, p).seq; got != uint64(i) {
			t.Errorf("got batch %d, want %d", got, i)
		}
		_ = nc.Close()
		eventually(t, "the end", func() bool { return s.Stats().KV.Subscribers == 0 })
	}
	if events, replay := s.KVEndpoints(); events != "tcp://"+ln.Addr().String() || replay != "" {
		t.Errorf("got %s and %q", events, replay)
	}
}

func TestKVSourcesPage(t *testing.T) {
	f := func(s *Server, want string) {
		t.Helper()
		if _, got := call(t, s, "GET", "/kv_event_sources", ""); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	f(start(t, Options{}), `{}`)
	s := kvServer(t, KVEvents{Topic: "t", Replay: "tcp://*:0"})
	events, replay := s.KVEndpoints()
	if host, _, _ := net.SplitHostPort(s.Addr()); !strings.HasPrefix(events, "tcp://"+host+":") || strings.HasSuffix(events, ":0") {
		t.Errorf("got the endpoint %s, want a port on %s", events, host)
	}
	f(s, `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"`+events+`","replay_endpoint":"`+replay+`","buffer_steps":10000,"hwm":10000,"max_queue_size":100000,"topic":"t"}}`)
	f(kvServer(t, KVEvents{Topic: "t", Endpoint: "tcp://127.0.0.1:1"}),
		`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:1","replay_endpoint":null,"buffer_steps":10000,"hwm":10000,"max_queue_size":100000,"topic":"t"}}`)
}

// TestKVHandshake: peers that do not speak ZMTP are left alone, and do no harm.
func TestKVHandshake(t *testing.T) {
	s := kvServer(t, KVEvents{Replay: "tcp://*:0"})
	events, replayed := s.KVEndpoints()
	for _, endpoint := range []string{events, replayed} {
		for _, says := range []string{"GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", 64), "\xff", strings.Repeat("\x00", 64)} {
			addr, _ := zmqAddr(endpoint)
			nc, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = nc.Write([]byte(says))
			_ = nc.(*net.TCPConn).CloseWrite()
			_ = nc.SetDeadline(time.Now().Add(20 * time.Second))
			n := 0
			for buf := make([]byte, 256); err == nil; n, err = nc.Read(buf) {
			}
			if e := net.Error(nil); errors.As(err, &e) && e.Timeout() {
				t.Errorf("%q: got %d bytes and silence, want an end", says, n)
			}
			_ = nc.Close()
		}
	}
	subscribed(t, s)
}

func TestKVOptions(t *testing.T) {
	f := func(e KVEvents, instant bool, want string) {
		t.Helper()
		s, err := Start(Options{KVEvents: e, Instant: instant})
		if err == nil {
			s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want %q", e, err, want)
		}
	}
	f(KVEvents{Endpoint: "5557"}, false, `endpoint "5557": use tcp://*:port`)
	f(KVEvents{Endpoint: "tcp://*:x"}, false, `endpoint "tcp://*:x"`)
	f(KVEvents{Endpoint: "tcp://*"}, false, `endpoint "tcp://*"`)
	f(KVEvents{Endpoint: "tcp://*:0", Replay: "*:1"}, false, `replay "*:1"`)
	f(KVEvents{Replay: "tcp://*:0"}, false, "a replay server needs an endpoint")
	f(KVEvents{Endpoint: "tcp://*:0", Buffer: -1}, false, "buffer -1")
	f(KVEvents{Endpoint: "tcp://*:0", HWM: -1}, false, "HWM -1")
	f(KVEvents{Endpoint: "tcp://*:0"}, true, "instant has no KV cache")
	ln, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	f(KVEvents{Endpoint: "tcp://*:" + port}, false, "address already in use")
	f(KVEvents{Endpoint: "tcp://*:0", Replay: "tcp://[::]:" + port}, false, "address already in use")
}
