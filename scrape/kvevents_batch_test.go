package scrape

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"kvgate/routing"
)

// raw is msgpack as it stands; pairs is a map in this order.
type (
	rawPack string
	pairs   []any
)

// pack encodes a value for tests: nil, bool, ints, floats, strings, bytes, lists, pairs.
func pack(dst []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(dst, 0xc0)
	case bool:
		if v {
			return append(dst, 0xc3)
		}
		return append(dst, 0xc2)
	case int:
		return pack(dst, int64(v))
	case int64:
		switch {
		case v >= 0 && v < 128:
			return append(dst, byte(v))
		case v < 0 && v >= -32:
			return append(dst, byte(int8(v)))
		}
		return binary.BigEndian.AppendUint64(append(dst, 0xd3), uint64(v))
	case uint64:
		return binary.BigEndian.AppendUint64(append(dst, 0xcf), v)
	case float64:
		return binary.BigEndian.AppendUint64(append(dst, 0xcb), math.Float64bits(v))
	case string:
		if len(v) < 32 {
			return append(append(dst, 0xa0|byte(len(v))), v...)
		}
		return append(binary.BigEndian.AppendUint32(append(dst, 0xdb), uint32(len(v))), v...)
	case []byte:
		return append(append(dst, 0xc4, byte(len(v))), v...)
	case []any:
		dst = binary.BigEndian.AppendUint16(append(dst, 0xdc), uint16(len(v)))
		for _, x := range v {
			dst = pack(dst, x)
		}
		return dst
	case pairs:
		dst = binary.BigEndian.AppendUint16(append(dst, 0xde), uint16(len(v)/2))
		for _, x := range v {
			dst = pack(dst, x)
		}
		return dst
	case rawPack:
		return append(dst, v...)
	}
	panic(fmt.Sprintf("pack: %T", v))
}

// list builds a msgpack array.
func list(v ...any) []any { return v }

// show writes what a decoder holds, one event per line.
func (d *kvDecoder) show() string {
	var b strings.Builder
	fmt.Fprintf(&b, "at %v rank %d\n", d.at, d.rank)
	for _, e := range d.events {
		switch e.kind {
		case kvStored:
			s := d.stored[e.index]
			fmt.Fprintf(&b, "stored %d", s.Hashes)
			if s.HasParent {
				fmt.Fprintf(&b, " behind %d", s.Parent)
			}
			fmt.Fprintf(&b, " tokens %d block %d lora %q medium %q group %d kind %q", s.Tokens, s.BlockTokens, s.LoRA, s.Medium, s.Group, s.Kind)
			for _, x := range s.Extras {
				fmt.Fprintf(&b, " %d:%q", x.Block, x.Key)
				if x.Paired {
					fmt.Fprintf(&b, "@%d", x.Offset)
				}
			}
		case kvRemoved:
			r := d.removed[e.index]
			fmt.Fprintf(&b, "removed %d medium %q group %d", r.Hashes, r.Medium, r.Group)
		default:
			b.WriteString(kvEventNames[e.kind])
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func TestKVDecode(t *testing.T) {
	var d kvDecoder // reused, as in service
	f := func(t *testing.T, batch any, want string) {
		t.Helper()
		payload := pack(nil, batch)
		before := bytes.Clone(payload)
		err := d.decode(payload)
		got := d.show()
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
		if !bytes.Equal(payload, before) {
			t.Error("the payload was changed")
		}
		// Whatever is cut off, it is an error and no event comes of it.
		for n := range payload {
			if err := d.decode(payload[:n]); err == nil {
				t.Fatalf("cut after %d of %d bytes: got no error", n, len(payload))
			}
		}
		d.release()
	}
	head := "at 1.5 rank -1\n"
	one := func(e any) []any { return list(1.5, list(e)) }

	f(t, list(1.5, list()), head)
	f(t, list(7, list(), nil), "at 7 rank -1\n")
	f(t, list(rawPack("\xca\x3f\xc0\x00\x00"), list(), 3), "at 1.5 rank 3\n")
	f(t, list(1.5, list(), 3, "more", list(list(nil))), "at 1.5 rank 3\n")

	// Arrays, as SGLang and older vLLM send them.
	stored := head + "stored [100 101] behind 99 tokens [1 2 3] block 16 lora \"\" medium \"gpu\" group 0 kind \"\"\n"
	f(t, one(list("BlockStored", list(100, 101), 99, list(1, 2, 3), 16, nil, "gpu", nil, nil)), stored)
	f(t, one(list("BlockStored", list(100, 101), 99, list(1, 2, 3), 16, nil, "gpu")), stored)
	f(t, one(list("BlockStored", list(100, 101), 99, list(1, 2, 3), 16, nil, "gpu", nil, nil, 0, nil, nil, "new", pairs{"x", 1})), stored)
	f(t, one(list("BlockStored", list(5))), head+"stored [5] tokens [] block 0 lora \"\" medium \"\" group 0 kind \"\"\n")
	f(t, one(list("BlockStored", list(5), nil, list(), nil, nil, "CPU")), head+"stored [5] tokens [] block 0 lora \"\" medium \"CPU\" group 0 kind \"\"\n")
	f(t, one(list("BlockStored", list(5), nil, list(1), 1, 2, "GPU", "lora-a", list(list("lora-a")), 3, "mla_attention")),
		head+"stored [5] tokens [1] block 1 lora \"lora-a\" medium \"GPU\" group 3 kind \"mla_attention\" 0:\"lora-a\"\n")
	f(t, one(list("BlockRemoved", list(1, 2), "CPU")), head+"removed [1 2] medium \"CPU\" group 0\n")
	f(t, one(list("BlockRemoved", list())), head+"removed [] medium \"\" group 0\n")
	f(t, one(list("BlockRemoved", list(1), nil, 4, "more")), head+"removed [1] medium \"\" group 4\n")
	f(t, one(list("AllBlocksCleared")), head+"cleared\n")
	f(t, one(list("AllBlocksCleared", "GPU")), head+"cleared\n")

	// Maps, fields in any order, unknown ones of any form.
	f(t, one(pairs{"token_ids", list(1, 2), "type", "BlockStored", "parent_block_hash", nil, "block_hashes", list(8), "block_size", 2,
		"lora_id", nil, "medium", "GPU", "lora_name", nil, "extra_keys", nil, "group_idx", 1, "kv_cache_spec_kind", "full_attention",
		"session_id", rawPack("\xc7\x03\x01abc"), "fixed", rawPack("\xd6\x01abcd"), "deep", list(list(pairs{"a", list(true, -1.5)}))}),
		head+"stored [8] tokens [1 2] block 2 lora \"\" medium \"GPU\" group 1 kind \"full_attention\"\n")
	f(t, one(pairs{"type", "BlockRemoved", "block_hashes", list(8, 9), "medium", "GPU", "group_idx", 0, "ownership", nil}), head+"removed [8 9] medium \"GPU\" group 0\n")
	f(t, one(pairs{"type", "AllBlocksCleared", "x", 1}), head+"cleared\n")
	f(t, list(1.5, list(pairs{"type", "AllBlocksCleared"}, list("BlockRemoved", list(1)), pairs{"type", "BlockMoved", "to", "CPU"}, list("BlockMoved", 1))),
		head+"cleared\nremoved [1] medium \"\" group 0\nunknown\nunknown\n")

	// Hashes.
	f(t, one(list("BlockRemoved", list(uint64(math.MaxUint64), -1, int64(math.MinInt64), rawPack("\xcc\xff"), rawPack("\xcd\xff\xff"), rawPack("\xd0\xff"), rawPack("\xd1\xff\xfe")))),
		head+"removed [18446744073709551615 18446744073709551615 9223372036854775808 255 65535 18446744073709551615 18446744073709551614] medium \"\" group 0\n")
	f(t, one(list("BlockRemoved", list([]byte("0123456789\x00\x00\x00\x00\x00\x00\x01\x02"), []byte("\x01\x00"), "\x00\x00\x00\x00\x00\x00\x00\x07"))),
		head+"removed [258 256 7] medium \"\" group 0\n")

	// Extra keys: per block nothing, a key, keys and pairs.
	f(t, one(list("BlockStored", list(1, 2, 3, 4, 5), nil, list(), 16, nil, nil, nil, list(nil, "a", list("b", list("mm", -3), []byte{1, 2}), list(), list(list("c"), 7, nil, list("d", 1, "?"))))),
		head+"stored [1 2 3 4 5] tokens [] block 16 lora \"\" medium \"\" group 0 kind \"\" 1:\"a\" 2:\"b\" 2:\"mm\"@-3 2:\"\\x01\\x02\" 4:\"c\" 4:\"7\" 4:\"d\"@1\n")
	// An adapter that only has a number.
	f(t, one(list("BlockStored", list(1), nil, list(), 16, 12)), head+"stored [1] tokens [] block 16 lora \"12\" medium \"\" group 0 kind \"\"\n")
	f(t, one(list("BlockStored", list(1), nil, list(), 16, "x")), head+"stored [1] tokens [] block 16 lora \"x\" medium \"\" group 0 kind \"\"\n")

	// One bad event spoils the batch.
	good := list("BlockRemoved", list(1))
	two := func(e any) []any { return list(1.5, list(good, e)) }
	f(t, two(list("BlockStored")), "event 1: BlockStored without block_hashes")
	f(t, two(pairs{"type", "BlockRemoved"}), "event 1: BlockRemoved without block_hashes")
	f(t, two(list()), "event 1: an event without a type")
	f(t, two(pairs{"block_hashes", list()}), "event 1: a map without type")
	f(t, two(7), "event 1: byte 35, 0x07, is not an array")
	f(t, two(list("BlockStored", nil)), "event 1: byte 50, 0xc0, is not an array")
	f(t, two(list("BlockStored", list(1.5))), "event 1: byte 53, 0xcb, is not a string")
	f(t, two(list("BlockStored", list(""))), "event 1: a block hash without bytes")
	f(t, two(list("BlockStored", list(1), nil, list(-1))), "event 1: -1 is not from 0 to 4294967295")
	f(t, two(list("BlockStored", list(1), nil, list(int64(1)<<32))), "event 1: 4294967296 is not from 0 to 4294967295")
	f(t, two(list("BlockStored", list(1), nil, list(1), "16")), "event 1: byte 59, 0xa2, is not an integer")
	f(t, two(list("BlockStored", list(1), nil, list(1), 16, nil, 3)), "event 1: byte 61, 0x03, is not a string")
	f(t, two(list("BlockStored", list(1), nil, nil, nil, nil, nil, nil, list(list(list())))), "event 1: an extra key that is empty")
	f(t, two(list("BlockStored", list(1), nil, nil, nil, nil, nil, nil, list(list(list("a", uint64(1)<<63))))), "event 1: 9223372036854775808 is out of range")
	f(t, two(list("BlockStored", list(1), nil, nil, nil, nil, nil, nil, list(list(true)))), "event 1: byte 66, 0xc3, is not a string")
	f(t, two(list("BlockMoved", rawPack("\xc1"))), "event 1: byte 49, 0xc1, is not a string")
	f(t, list(1.5), "a batch of fewer than 2 elements")
	f(t, list("now", list()), "byte 3, 0xa3, is not a number")
	f(t, pairs{"ts", 1}, "byte 0, 0xde, is not an array")
	f(t, list(1.5, list(), -1), "-1 is not from 0 to 2147483647")
}

// TestKVDecodeBounds: what a header announces costs nothing.
func TestKVDecodeBounds(t *testing.T) {
	f := func(t *testing.T, payload []byte, want string) {
		t.Helper()
		var d kvDecoder
		err := d.decode(payload)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
		if cap(d.tokens)+cap(d.hashes)+cap(d.extras)+cap(d.events) > 8*len(payload) {
			t.Errorf("got memory for %d tokens, %d hashes, %d extra keys, %d events from %d bytes", cap(d.tokens), cap(d.hashes), cap(d.extras), cap(d.events), len(payload))
		}
	}
	f(t, []byte("\x92\x00\xdd\xff\xff\xff\xff"), "cut short")
	f(t, []byte("\x92\x00\x91\x92\xabBlockStored\xdd\xff\xff\xff\xff\x01"), "cut short")
	f(t, []byte("\x92\x00\x91\xdf\x80\x00\x00\x00\xa4type"), "cut short")
	f(t, []byte("\x92\x00\x91\x92\xa1x\xdb\xff\xff\xff\xff"), "cut short")
	f(t, []byte("\x92\x00\x91\x92\xa1x\xc9\xff\xff\xff\xff\x01"), "cut short")
	f(t, pack(nil, list(0, list(list("x", rawPack(strings.Repeat("\x91", 1<<16)))))), "cut short") // deep, and no stack of ours
	many := append([]byte("\x92\x00\xdd\x00\x02\x00\x01"), bytes.Repeat([]byte("\x91\xa1x"), maxBatchEvents+1)...)
	f(t, many, "more than 131072")
	keys := append([]byte("\x92\x00\x91\x99\xabBlockStored\x91\x01\xc0\xc0\xc0\xc0\xc0\xc0\x91\xdd\x00\x02\x00\x01"), bytes.Repeat([]byte("\xa1x"), maxBatchExtras+1)...)
	f(t, keys, "more than 131072 extra keys")
	f(t, append(pack(nil, list(0, list())), 0), "1 bytes behind the batch")
}

// TestKVDecodeKeepsLittle: one huge batch does not stay in memory.
func TestKVDecodeKeepsLittle(t *testing.T) {
	f := func(t *testing.T, tokens int, kept bool) {
		t.Helper()
		ids := make([]any, tokens)
		for i := range ids {
			ids[i] = 1
		}
		var d kvDecoder
		payload := binary.BigEndian.AppendUint32([]byte("\x92\x00\x91\x94\xabBlockStored\x91\x01\xc0\xdd"), uint32(tokens))
		payload = append(payload, bytes.Repeat([]byte{1}, tokens)...)
		if err := d.decode(payload); err != nil {
			t.Fatal(err)
		}
		d.release()
		if got := cap(d.tokens) > 0; got != kept {
			t.Errorf("%d tokens: got kept %v, want %v", tokens, got, kept)
		}
	}
	f(t, 1000, true)
	f(t, maxKeptDecoder+1, false)
}

// recorded is one batch as vLLM sent it, and what another decoder made of it.
type recorded struct {
	Topic   string `json:"topic"`
	Seq     uint64 `json:"seq"`
	Hex     string `json:"hex"`
	Payload []json.RawMessage
}

func readRecorded(t testing.TB) []recorded {
	t.Helper()
	data, err := os.ReadFile("testdata/vllm-0.32.0-kv-events.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var out []recorded
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		var r recorded
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	if len(out) < 7 {
		t.Fatalf("got %d recorded batches, want 7", len(out))
	}
	return out
}

func (r recorded) bytes(t testing.TB) []byte {
	t.Helper()
	b, err := hex.DecodeString(r.Hex)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestKVDecodeRecorded: batches that vLLM 0.32.0 has sent, with evictions, salts and an adapter.
func TestKVDecodeRecorded(t *testing.T) {
	type event struct {
		Type     string     `json:"type"`
		Hashes   []uint64   `json:"block_hashes"`
		Parent   *uint64    `json:"parent_block_hash"`
		Tokens   []uint32   `json:"token_ids"`
		Block    int        `json:"block_size"`
		Medium   string     `json:"medium"`
		LoRAName string     `json:"lora_name"`
		Extra    [][]string `json:"extra_keys"`
		Group    int        `json:"group_idx"`
		Kind     string     `json:"kv_cache_spec_kind"`
	}
	seen := map[string]int{}
	var d kvDecoder
	for _, r := range readRecorded(t) {
		if err := d.decode(r.bytes(t)); err != nil {
			t.Errorf("batch %d of %s: %v", r.Seq, r.Topic, err)
			continue
		}
		var at float64
		var events []event
		for i, into := range []any{&at, &events} {
			if err := json.Unmarshal(r.Payload[i], into); err != nil {
				t.Fatal(err)
			}
		}
		want := fmt.Sprintf("at %v rank %s\n", at, r.Payload[2])
		for _, e := range events {
			seen[e.Type]++
			if e.Type == "BlockRemoved" {
				want += fmt.Sprintf("removed %d medium %q group %d\n", e.Hashes, e.Medium, e.Group)
				continue
			}
			want += fmt.Sprintf("stored %d", e.Hashes)
			if e.Parent != nil {
				want += fmt.Sprintf(" behind %d", *e.Parent)
				seen["parent"]++
			}
			want += fmt.Sprintf(" tokens %d block %d lora %q medium %q group %d kind %q", e.Tokens, e.Block, e.LoRAName, e.Medium, e.Group, e.Kind)
			for block, keys := range e.Extra {
				for _, k := range keys {
					want += fmt.Sprintf(" %d:%q", block, k)
					seen["extra"]++
				}
			}
			want += "\n"
		}
		if got := d.show(); got != want {
			t.Errorf("batch %d of %s:\ngot  %s\nwant %s", r.Seq, r.Topic, got, want)
		}
		if got := string(topicModel([]byte(r.Topic))); got != "smollm2" {
			t.Errorf("model of %s: got %q, want smollm2", r.Topic, got)
		}
	}
	for _, kind := range []string{"BlockStored", "BlockRemoved", "parent", "extra"} {
		if seen[kind] == 0 {
			t.Errorf("the recording has no %s", kind)
		}
	}
}

// unpack is a slow msgpack reader that shares nothing with the decoder.
func unpack(b []byte) (v any, rest []byte, err error) {
	errCut := errors.New("cut")
	if len(b) == 0 {
		return nil, nil, errCut
	}
	form, b := b[0], b[1:]
	number := func(n int) (uint64, bool) {
		if len(b) < n {
			return 0, false
		}
		x := append(make([]byte, 8-n), b[:n]...)
		b = b[n:]
		return binary.BigEndian.Uint64(x), true
	}
	many := func(n uint64, keyed bool) (any, []byte, error) {
		out := []any{}
		if keyed {
			n *= 2
		}
		for range n {
			var x any
			if x, b, err = unpack(b); err != nil {
				return nil, nil, err
			}
			out = append(out, x)
		}
		if keyed {
			return pairs(out), b, nil
		}
		return out, b, nil
	}
	bytesOf := func(n uint64) (any, []byte, error) {
		if uint64(len(b)) < n {
			return nil, nil, errCut
		}
		return b[:n:n], b[n:], nil
	}
	var sizes = map[byte]int{0xc4: 1, 0xc5: 2, 0xc6: 4, 0xc7: 1, 0xc8: 2, 0xc9: 4, 0xca: 4, 0xcb: 8, 0xcc: 1, 0xcd: 2, 0xce: 4, 0xcf: 8,
		0xd0: 1, 0xd1: 2, 0xd2: 4, 0xd3: 8, 0xd9: 1, 0xda: 2, 0xdb: 4, 0xdc: 2, 0xdd: 4, 0xde: 2, 0xdf: 4}
	n, ok := number(sizes[form])
	if !ok {
		return nil, nil, errCut
	}
	switch {
	case form < 0x80:
		return int64(form), b, nil
	case form < 0x90:
		return many(uint64(form-0x80), true)
	case form < 0xa0:
		return many(uint64(form-0x90), false)
	case form < 0xc0:
		return bytesOf(uint64(form - 0xa0))
	case form == 0xc0:
		return nil, b, nil
	case form == 0xc1:
		return nil, nil, errors.New("unused")
	case form <= 0xc3:
		return form == 0xc3, b, nil
	case form <= 0xc6, form >= 0xd9 && form <= 0xdb:
		return bytesOf(n)
	case form <= 0xc9:
		_, rest, err := bytesOf(n + 1)
		return struct{}{}, rest, err
	case form == 0xca:
		return float64(math.Float32frombits(uint32(n))), b, nil
	case form == 0xcb:
		return math.Float64frombits(n), b, nil
	case form <= 0xcf:
		if n > math.MaxInt64 {
			return n, b, nil
		}
		return int64(n), b, nil
	case form == 0xd0:
		return int64(int8(n)), b, nil
	case form == 0xd1:
		return int64(int16(n)), b, nil
	case form == 0xd2:
		return int64(int32(n)), b, nil
	case form == 0xd3:
		return int64(n), b, nil
	case form <= 0xd8:
		_, rest, err := bytesOf(1 + uint64(1)<<(form-0xd4))
		return struct{}{}, rest, err
	case form <= 0xdd:
		return many(n, false)
	case form <= 0xdf:
		return many(n, true)
	}
	return int64(int8(form)), b, nil
}

var errReference = errors.New("no batch")

// reference decodes a batch from the tree of its values, by the words of the format.
func reference(payload []byte) (out kvDecoder, err error) {
	defer func() {
		if r := recover(); r != nil {
			e, is := r.(error)
			if !is || !errors.Is(e, errReference) {
				panic(r)
			}
			err = e
		}
	}()
	must := func(ok bool) {
		if !ok {
			panic(errReference)
		}
	}
	whole := func(v any, most int64) int {
		n, ok := v.(int64)
		must(ok && n >= 0 && n <= most)
		return int(n)
	}
	text := func(v any) []byte {
		b, ok := v.([]byte)
		must(ok)
		return b
	}
	key := func(v any) []byte {
		if n, ok := v.(int64); ok {
			return strconv.AppendInt(nil, n, 10)
		}
		return text(v)
	}
	items := func(v any) []any {
		l, ok := v.([]any)
		must(ok)
		return l
	}
	hash := func(v any) uint64 {
		switch v := v.(type) {
		case int64:
			return uint64(v)
		case uint64:
			return v
		}
		b := text(v)
		must(len(b) > 0)
		return binary.BigEndian.Uint64(append(make([]byte, 8), b...)[len(b):])
	}
	hashes := func(v any) []uint64 {
		out := []uint64{}
		for _, x := range items(v) {
			out = append(out, hash(x))
		}
		return out
	}
	tree, rest, err := unpack(payload)
	must(err == nil && len(rest) == 0)
	batch := items(tree)
	must(len(batch) >= 2)
	switch at := batch[0].(type) {
	case float64:
		out.at = at
	case int64:
		out.at = float64(at)
	default:
		must(false)
	}
	out.rank = -1
	if len(batch) > 2 && batch[2] != nil {
		out.rank = whole(batch[2], math.MaxInt32)
	}
	storedNames := []string{"", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"}
	removedNames := []string{"", "block_hashes", "medium", "group_idx"}
	for _, e := range items(batch[1]) {
		tag := ""
		fields := map[string]any{}
		event, keyed := e.(pairs)
		if keyed {
			found := false
			for i := 0; i < len(event); i += 2 {
				name := string(text(event[i]))
				if name == "type" && !found {
					tag, found = string(text(event[i+1])), true
				}
				if v, twice := fields[name]; !twice || event[i+1] != nil || v == nil {
					fields[name] = event[i+1]
				}
			}
			must(found)
		} else {
			l := items(e)
			must(len(l) > 0)
			tag = string(text(l[0]))
			names := map[string][]string{"BlockStored": storedNames, "BlockRemoved": removedNames}[tag]
			for i := 1; i < len(l) && i < len(names); i++ {
				fields[names[i]] = l[i]
			}
		}
		switch tag {
		case "BlockStored":
			s := routing.BlockStored{Hashes: hashes(fields["block_hashes"])}
			if v := fields["parent_block_hash"]; v != nil {
				s.Parent, s.HasParent = hash(v), true
			}
			if v := fields["token_ids"]; v != nil {
				for _, x := range items(v) {
					s.Tokens = append(s.Tokens, uint32(whole(x, math.MaxUint32)))
				}
			}
			if v := fields["block_size"]; v != nil {
				s.BlockTokens = whole(v, 1<<24)
			}
			if v := fields["lora_id"]; v != nil {
				s.LoRA = key(v)
			}
			if v := fields["lora_name"]; v != nil && len(text(v)) > 0 {
				s.LoRA = text(v)
			}
			if v := fields["medium"]; v != nil {
				s.Medium = text(v)
			}
			if v := fields["extra_keys"]; v != nil {
				for block, entry := range items(v) {
					keys, is := entry.([]any)
					if !is {
						keys = []any{entry}
					}
					for _, k := range keys {
						x := routing.BlockExtra{Block: block}
						if k == nil {
							continue
						}
						if pair, is := k.([]any); is {
							must(len(pair) > 0)
							k = pair[0]
							if len(pair) > 1 {
								n, ok := pair[1].(int64)
								must(ok)
								x.Offset, x.Paired = int(n), true
							}
						}
						x.Key = key(k)
						s.Extras = append(s.Extras, x)
					}
				}
			}
			if v := fields["group_idx"]; v != nil {
				s.Group = whole(v, math.MaxInt32)
			}
			if v := fields["kv_cache_spec_kind"]; v != nil {
				s.Kind = text(v)
			}
			out.events = append(out.events, kvEvent{kvStored, len(out.stored)})
			out.stored = append(out.stored, s)
		case "BlockRemoved":
			r := routing.BlockRemoved{Hashes: hashes(fields["block_hashes"])}
			if v := fields["medium"]; v != nil {
				r.Medium = text(v)
			}
			if v := fields["group_idx"]; v != nil {
				r.Group = whole(v, math.MaxInt32)
			}
			out.events = append(out.events, kvEvent{kvRemoved, len(out.removed)})
			out.removed = append(out.removed, r)
		case "AllBlocksCleared":
			out.events = append(out.events, kvEvent{kind: kvCleared})
		default:
			out.events = append(out.events, kvEvent{kind: kvUnknown})
		}
	}
	return out, nil
}

// distinct tells whether no map of a tree has a key twice, or a key that is not text: where the
// format leaves open what that means, the two decoders may differ.
func distinct(v any) bool {
	switch v := v.(type) {
	case []any:
		for _, x := range v {
			if !distinct(x) {
				return false
			}
		}
	case pairs:
		seen := map[string]bool{}
		for i, x := range v {
			if !distinct(x) {
				return false
			}
			if i%2 == 0 {
				k, is := x.([]byte)
				if !is || seen[string(k)] {
					return false
				}
				seen[string(k)] = true
			}
		}
	}
	return true
}

func TestReferenceAgrees(t *testing.T) {
	for _, r := range readRecorded(t) {
		var d kvDecoder
		if err := d.decode(r.bytes(t)); err != nil {
			t.Fatal(err)
		}
		want, err := reference(r.bytes(t))
		if err != nil {
			t.Fatal(err)
		}
		if got, want := d.show(), want.show(); got != want {
			t.Errorf("batch %d:\ngot  %s\nwant %s", r.Seq, got, want)
		}
	}
}

// FuzzKVBatch holds the decoder against the slow one.
func FuzzKVBatch(f *testing.F) {
	for _, r := range readRecorded(f) {
		f.Add(r.bytes(f))
	}
	f.Add(pack(nil, list(1.5, list(list("BlockStored", list(100, 101), 99, list(1, 2, 3), 16, nil, "gpu", nil, list(nil, list("a", list("b", 3)))), list("AllBlocksCleared")), 2)))
	f.Add(pack(nil, list(1, list(pairs{"type", "BlockRemoved", "block_hashes", list(-1, []byte("0123456789")), "x", rawPack("\xc7\x01\x02\x03")}), nil, "more")))
	var d kvDecoder
	f.Fuzz(func(t *testing.T, payload []byte) {
		err := d.decode(payload)
		got := ""
		if err == nil {
			got = d.show()
		}
		tree, _, broken := unpack(payload)
		if broken == nil && !distinct(tree) {
			return
		}
		ref, refErr := reference(payload)
		if (err == nil) != (refErr == nil) {
			t.Fatalf("got error %v, want %v", err, refErr)
		}
		if err != nil {
			return
		}
		if want := ref.show(); got != want {
			t.Fatalf("got  %s\nwant %s", got, want)
		}
		// A second decode of the same bytes says the same: nothing is left of the first.
		if err := d.decode(payload); err != nil || d.show() != got {
			t.Fatalf("again: got %v\n%s\nwant %s", err, d.show(), got)
		}
		if n := len(d.tokens) + len(d.hashes) + len(d.extras); n > len(payload) {
			t.Fatalf("%d elements from %d bytes", n, len(payload))
		}
	})
}

// TestKVDecodeAllocates: a batch of an ordinary form costs no memory once the decoder is warm.
func TestKVDecodeAllocates(t *testing.T) {
	var d kvDecoder
	for _, r := range readRecorded(t) {
		payload := r.bytes(t)
		decode := func() {
			if err := d.decode(payload); err != nil {
				t.Fatal(err)
			}
			d.release()
		}
		decode()
		if got := testing.AllocsPerRun(100, decode); got != 0 {
			t.Errorf("batch %d of %s: got %v allocations, want 0", r.Seq, r.Topic, got)
		}
	}
	if reflect.ValueOf(d.r.b).Len() != 0 {
		t.Error("the decoder keeps the payload")
	}
}

// BenchmarkKVDecode measures a batch of evictions and stores; blocks/s beside it.
func BenchmarkKVDecode(b *testing.B) {
	events := []any{}
	tokens := []any{}
	for i := range 16 {
		tokens = append(tokens, 1000+i)
	}
	for i := range 16 {
		events = append(events, pairs{"type", "BlockRemoved", "block_hashes", list(uint64(i) << 50), "medium", "GPU", "group_idx", 0},
			pairs{"type", "BlockStored", "block_hashes", list(uint64(i) << 51), "parent_block_hash", uint64(i) << 52, "token_ids", tokens, "block_size", 16,
				"lora_id", nil, "medium", "GPU", "lora_name", nil, "extra_keys", list(nil), "group_idx", 0, "kv_cache_spec_kind", "full_attention"})
	}
	payload := pack(nil, list(1.5, events, 0))
	var d kvDecoder
	b.ReportAllocs()
	for b.Loop() {
		if err := d.decode(payload); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)*float64(len(events))/b.Elapsed().Seconds(), "blocks/s")
}
