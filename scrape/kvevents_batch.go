package scrape

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"

	"kvgate/routing"
)

// A batch of KV events is a msgpack array [timestamp, events, data_parallel_rank].
// An event is a map with the key "type", or, from older engines and SGLang, an
// array of the type and the fields in the order of the constants below. Trailing
// fields may be missing, unknown ones are skipped.

// Bounds of one batch; the message has one as well, and no array is longer than the bytes that are left.
const (
	maxBatchEvents = 1 << 17
	maxBatchExtras = 1 << 17
	// maxKeptDecoder is up to how many tokens a decoder keeps its memory for the next batch.
	maxKeptDecoder = 1 << 18
)

// kvEventKind is a type of event, as metrics name it.
type kvEventKind uint8

const (
	kvStored kvEventKind = iota
	kvRemoved
	kvCleared
	kvUnknown // skipped, so that an engine may have more to tell than this knows
	kvEventKinds
)

var kvEventNames = [kvEventKinds]string{"stored", "removed", "cleared", "unknown"}

// Fields by their place in the array form.
const (
	fieldHashes = iota + 1
	fieldParent
	fieldTokens
	fieldTokensPerBlock
	fieldLoRAID
	fieldMedium
	fieldLoRAName
	fieldExtraKeys
	fieldGroup
	fieldKind

	fieldRemovedMedium = 2
	fieldRemovedGroup  = 3
	fieldIgnored       = -1
)

func storedField(key []byte) int {
	switch string(key) {
	case "block_hashes":
		return fieldHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldTokensPerBlock
	case "lora_id":
		return fieldLoRAID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoRAName
	case "extra_keys":
		return fieldExtraKeys
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldKind
	}
	return fieldIgnored
}

func removedField(key []byte) int {
	switch string(key) {
	case "block_hashes":
		return fieldHashes
	case "medium":
		return fieldRemovedMedium
	case "group_idx":
		return fieldRemovedGroup
	}
	return fieldIgnored
}

// kvEvent is one event: its kind and where in the decoder it is.
type kvEvent struct {
	kind  kvEventKind
	index int
}

// kvDecoder decodes batches, one at a time. What it holds points into the
// payload and is valid until the next decode.
type kvDecoder struct {
	at      float64 // Unix seconds, as the engine's clock had it
	rank    int     // -1: the batch names none
	events  []kvEvent
	stored  []routing.BlockStored
	removed []routing.BlockRemoved

	hashes []uint64
	tokens []uint32
	extras []routing.BlockExtra
	digits []byte // of integer keys
	r      msgpackReader
}

// decode reads a batch. On an error none of it may be used.
func (d *kvDecoder) decode(payload []byte) error {
	d.events, d.stored, d.removed = d.events[:0], d.stored[:0], d.removed[:0]
	d.hashes, d.tokens, d.extras, d.digits = d.hashes[:0], d.tokens[:0], d.extras[:0], d.digits[:0]
	d.at, d.rank = 0, -1
	r := &d.r
	*r = msgpackReader{b: payload}
	n := r.array()
	if r.err == nil && n < 2 {
		return errors.New("a batch of fewer than 2 elements")
	}
	d.at = r.float()
	events := r.array()
	if events > maxBatchEvents {
		return fmt.Errorf("a batch of %d events: more than %d", events, maxBatchEvents)
	}
	for i := 0; i < events && r.err == nil; i++ {
		d.event()
		if r.err != nil {
			return fmt.Errorf("event %d: %w", i, r.err)
		}
	}
	if n > 2 && !r.null() {
		d.rank = r.count(math.MaxInt32)
	}
	for i := 3; i < n && r.err == nil; i++ {
		r.skip()
	}
	if r.err == nil && r.i != len(payload) {
		r.fail("%d bytes behind the batch", len(payload)-r.i)
	}
	return r.err
}

// release lets go of memory that an unusually large batch has taken.
func (d *kvDecoder) release() {
	if cap(d.tokens)+cap(d.hashes)+cap(d.extras) > maxKeptDecoder {
		*d = kvDecoder{}
	}
	d.r.b = nil
}

func (d *kvDecoder) event() {
	r := &d.r
	form := r.peek()
	var n int
	var tag []byte
	keyed := isMap(form)
	if keyed {
		n = r.mapping()
		fields := r.i
		for i := 0; i < n && tag == nil && r.err == nil; i++ {
			if string(r.text()) == "type" {
				tag = r.text()
			} else {
				r.skip()
			}
		}
		if r.err == nil && tag == nil {
			r.fail("a map without type")
		}
		if r.err == nil {
			r.i = fields
		}
	} else if n = r.array(); n > 0 {
		tag = r.text()
		n--
	} else {
		r.fail("an event without a type")
	}
	if r.err != nil {
		return
	}
	switch string(tag) {
	case "BlockStored":
		d.storedEvent(n, keyed)
	case "BlockRemoved":
		d.removedEvent(n, keyed)
	case "AllBlocksCleared":
		d.rest(n, keyed)
		d.events = append(d.events, kvEvent{kind: kvCleared})
	default:
		d.rest(n, keyed)
		d.events = append(d.events, kvEvent{kind: kvUnknown})
	}
}

// rest skips the fields of an event.
func (d *kvDecoder) rest(n int, keyed bool) {
	for ; n > 0 && d.r.err == nil; n-- {
		if keyed {
			d.r.skip()
		}
		d.r.skip()
	}
}

func (d *kvDecoder) storedEvent(n int, keyed bool) {
	r := &d.r
	var s routing.BlockStored
	found := false
	var adapter []byte
	for i := 1; i <= n && r.err == nil; i++ {
		field := i
		if keyed {
			field = storedField(r.text())
		}
		if field != fieldHashes && field != fieldIgnored && field <= fieldKind && r.null() {
			continue
		}
		switch field {
		case fieldHashes:
			s.Hashes, found = d.readHashes(), true
		case fieldParent:
			s.Parent, s.HasParent = r.hash(), true
		case fieldTokens:
			s.Tokens = d.readTokens()
		case fieldTokensPerBlock:
			s.BlockTokens = r.count(1 << 24)
		case fieldLoRAID:
			adapter = d.key()
		case fieldMedium:
			s.Medium = r.text()
		case fieldLoRAName:
			s.LoRA = r.text()
		case fieldExtraKeys:
			s.Extras = d.readExtras()
		case fieldGroup:
			s.Group = r.count(math.MaxInt32)
		case fieldKind:
			s.Kind = r.text()
		default:
			r.skip()
		}
	}
	if r.err == nil && !found {
		r.fail("BlockStored without block_hashes")
	}
	if len(s.LoRA) == 0 {
		s.LoRA = adapter // an adapter without a name must not pass for the base model
	}
	d.events = append(d.events, kvEvent{kvStored, len(d.stored)})
	d.stored = append(d.stored, s)
}

func (d *kvDecoder) removedEvent(n int, keyed bool) {
	r := &d.r
	var s routing.BlockRemoved
	found := false
	for i := 1; i <= n && r.err == nil; i++ {
		field := i
		if keyed {
			field = removedField(r.text())
		}
		if (field == fieldRemovedMedium || field == fieldRemovedGroup) && r.null() {
			continue
		}
		switch field {
		case fieldHashes:
			s.Hashes, found = d.readHashes(), true
		case fieldRemovedMedium:
			s.Medium = r.text()
		case fieldRemovedGroup:
			s.Group = r.count(math.MaxInt32)
		default:
			r.skip()
		}
	}
	if r.err == nil && !found {
		r.fail("BlockRemoved without block_hashes")
	}
	d.events = append(d.events, kvEvent{kvRemoved, len(d.removed)})
	d.removed = append(d.removed, s)
}

func (d *kvDecoder) readHashes() []uint64 {
	from := len(d.hashes)
	for n := d.r.array(); n > 0 && d.r.err == nil; n-- {
		d.hashes = append(d.hashes, d.r.hash())
	}
	return d.hashes[from:len(d.hashes):len(d.hashes)]
}

func (d *kvDecoder) readTokens() []uint32 {
	from := len(d.tokens)
	for n := d.r.array(); n > 0 && d.r.err == nil; n-- {
		d.tokens = append(d.tokens, uint32(d.r.count(math.MaxUint32)))
	}
	return d.tokens[from:len(d.tokens):len(d.tokens)]
}

// readExtras reads one entry per block: nothing, one key, or an array of keys
// and [key, offset] pairs.
func (d *kvDecoder) readExtras() []routing.BlockExtra {
	r := &d.r
	from := len(d.extras)
	blocks := r.array()
	for block := 0; block < blocks && r.err == nil; block++ {
		if r.null() {
			continue
		}
		if !isArray(r.peek()) {
			d.extra(block)
			continue
		}
		for n := r.array(); n > 0 && r.err == nil; n-- {
			d.extra(block)
		}
	}
	return d.extras[from:len(d.extras):len(d.extras)]
}

func (d *kvDecoder) extra(block int) {
	r := &d.r
	if r.null() {
		return
	}
	if len(d.extras) == maxBatchExtras {
		r.fail("more than %d extra keys", maxBatchExtras)
		return
	}
	x := routing.BlockExtra{Block: block}
	if !isArray(r.peek()) {
		x.Key = d.key()
	} else if n := r.array(); n < 1 {
		r.fail("an extra key that is empty")
	} else {
		x.Key = d.key()
		if n > 1 {
			x.Offset, x.Paired = int(r.int()), true
		}
		for ; n > 2 && r.err == nil; n-- {
			r.skip()
		}
	}
	d.extras = append(d.extras, x)
}

// key reads a string, bytes, or an integer, which becomes its digits.
func (d *kvDecoder) key() []byte {
	if !isInt(d.r.peek()) {
		return d.r.text()
	}
	from := len(d.digits)
	d.digits = strconv.AppendInt(d.digits, d.r.int(), 10)
	return d.digits[from:len(d.digits):len(d.digits)]
}

// msgpackReader reads values (https://github.com/msgpack/msgpack/blob/master/spec.md).
// The first error stays, and every read after it gives zero.
type msgpackReader struct {
	b   []byte
	i   int
	err error
}

func (r *msgpackReader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
	r.i = len(r.b)
}

var errCutShort = errors.New("cut short")

func (r *msgpackReader) cut() {
	if r.err == nil {
		r.err = errCutShort
	}
	r.i = len(r.b)
}

// peek returns the first byte of the next value, 0xc1, which is none, at the end.
func (r *msgpackReader) peek() byte {
	if r.i >= len(r.b) {
		return 0xc1
	}
	return r.b[r.i]
}

func isMap(form byte) bool   { return form&0xf0 == 0x80 || form == 0xde || form == 0xdf }
func isArray(form byte) bool { return form&0xf0 == 0x90 || form == 0xdc || form == 0xdd }
func isInt(form byte) bool   { return form < 0x80 || form >= 0xe0 || form >= 0xcc && form <= 0xd3 }

func (r *msgpackReader) head() byte {
	if r.i >= len(r.b) {
		r.cut()
		return 0xc1
	}
	r.i++
	return r.b[r.i-1]
}

// size reads a big-endian number of n bytes.
func (r *msgpackReader) size(n int) uint64 {
	if len(r.b)-r.i < n {
		r.cut()
		return 0
	}
	v := uint64(0)
	for _, b := range r.b[r.i : r.i+n] {
		v = v<<8 | uint64(b)
	}
	r.i += n
	return v
}

// room checks a number of elements of at least `least` bytes each against the bytes that are left.
func (r *msgpackReader) room(n uint64, least int) int {
	if n > uint64(len(r.b)-r.i)/uint64(least) {
		r.cut()
		return 0
	}
	return int(n)
}

func (r *msgpackReader) array() int {
	switch form := r.head(); {
	case form&0xf0 == 0x90:
		return r.room(uint64(form&0x0f), 1)
	case form == 0xdc:
		return r.room(r.size(2), 1)
	case form == 0xdd:
		return r.room(r.size(4), 1)
	default:
		r.wrong(form, "an array")
	}
	return 0
}

func (r *msgpackReader) mapping() int {
	switch form := r.head(); {
	case form&0xf0 == 0x80:
		return r.room(uint64(form&0x0f), 2)
	case form == 0xde:
		return r.room(r.size(2), 2)
	case form == 0xdf:
		return r.room(r.size(4), 2)
	default:
		r.wrong(form, "a map")
	}
	return 0
}

func (r *msgpackReader) wrong(form byte, want string) {
	r.fail("byte %d, %#02x, is not %s", r.i-1, form, want)
}

// null skips a nil and tells whether there was one.
func (r *msgpackReader) null() bool {
	if r.peek() != 0xc0 {
		return false
	}
	r.i++
	return true
}

// integer reads an integer as its two's complement; negative tells its sign.
func (r *msgpackReader) integer() (v uint64, negative bool) {
	form := r.head()
	switch {
	case form < 0x80:
		return uint64(form), false
	case form >= 0xe0:
		return uint64(int64(int8(form))), true
	case form >= 0xcc && form <= 0xcf:
		return r.size(1 << (form - 0xcc)), false
	case form >= 0xd0 && form <= 0xd3:
		n := 1 << (form - 0xd0)
		shift := 64 - 8*n
		signed := int64(r.size(n)<<shift) >> shift
		return uint64(signed), signed < 0
	}
	r.wrong(form, "an integer")
	return 0, false
}

func (r *msgpackReader) int() int64 {
	v, negative := r.integer()
	if !negative && v > math.MaxInt64 {
		r.fail("%d is out of range", v)
		return 0
	}
	return int64(v)
}

// count reads an integer from 0 to most.
func (r *msgpackReader) count(most uint64) int {
	v, negative := r.integer()
	if negative || v > most {
		r.fail("%d is not from 0 to %d", int64(v), most)
		return 0
	}
	return int(v)
}

func (r *msgpackReader) float() float64 {
	switch form := r.peek(); {
	case isInt(form):
		return float64(r.int())
	case form == 0xca:
		r.i++
		return float64(math.Float32frombits(uint32(r.size(4))))
	case form == 0xcb:
		r.i++
		return math.Float64frombits(r.size(8))
	default:
		r.head()
		r.wrong(form, "a number")
	}
	return 0
}

// text reads a string or bytes.
func (r *msgpackReader) text() []byte {
	n := uint64(0)
	switch form := r.head(); {
	case form&0xe0 == 0xa0:
		n = uint64(form & 0x1f)
	case form == 0xc4 || form == 0xd9:
		n = r.size(1)
	case form == 0xc5 || form == 0xda:
		n = r.size(2)
	case form == 0xc6 || form == 0xdb:
		n = r.size(4)
	default:
		r.wrong(form, "a string")
	}
	k := r.room(n, 1)
	r.i += k
	return r.b[r.i-k : r.i : r.i]
}

// hash reads a block hash: an integer of any sign, or bytes, of which the last eight count.
func (r *msgpackReader) hash() uint64 {
	if isInt(r.peek()) {
		v, _ := r.integer()
		return v
	}
	b := r.text()
	if len(b) == 0 {
		r.fail("a block hash without bytes")
	}
	if len(b) >= 8 {
		return binary.BigEndian.Uint64(b[len(b)-8:])
	}
	v := uint64(0)
	for _, c := range b {
		v = v<<8 | uint64(c)
	}
	return v
}

// skip passes over one value of any form and depth.
func (r *msgpackReader) skip() {
	for left := uint64(1); left > 0 && r.err == nil; left-- {
		form := r.peek()
		switch {
		case isInt(form):
			r.integer()
		case isArray(form):
			left += uint64(r.array())
		case isMap(form):
			left += 2 * uint64(r.mapping())
		case form == 0xc0 || form == 0xc2 || form == 0xc3:
			r.i++
		case form == 0xca || form == 0xcb:
			r.float()
		case form >= 0xd4 && form <= 0xd8: // a fixed extension: type and 1 to 16 bytes
			r.i++
			r.jump(1 + 1<<(form-0xd4))
		case form >= 0xc7 && form <= 0xc9: // an extension: length, type, bytes
			r.i++
			r.jump(1 + r.size(1<<(form-0xc7)))
		default:
			r.text()
		}
	}
}

func (r *msgpackReader) jump(n uint64) {
	r.i += r.room(n, 1)
}
