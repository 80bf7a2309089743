package bench

import (
	_ "embed" // the text of the prompts
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"unicode/utf8"
)

//go:embed testdata/prompts.txt
var promptText string

// Mixes of prompts, by what two requests share.
const (
	mixWarm = "warm" // a conversation's history, all but its last message
	mixCold = "cold" // nothing
	mixHot  = "hot"  // all but the last message, and all requests are of one conversation
)

// nonceLen is the length of what makes a prompt differ from every other.
const nonceLen = 16

// promptSet is chat requests of one size, complete with their heads. A request is
// the head of a conversation, a nonce, and its tail, so that distinct requests
// are sent without copying a prompt.
type promptSet struct {
	heads, tails [][]byte
}

// request returns request n: its conversation's bytes, around the nonce.
func (p *promptSet) request(n int) (head, tail []byte) {
	n %= len(p.heads)
	return p.heads[n], p.tails[n]
}

// putNonce writes 16 hexadecimal digits of n. Neighbours differ in their first digits.
func putNonce(dst *[nonceLen]byte, n uint64) {
	const hex = "0123456789abcdef"
	n = mix(n)
	for i := range dst {
		dst[i], n = hex[n&15], n>>4
	}
}

// newPromptSet returns chat requests of exactly `size` bytes of body: a system
// prompt that all share (a tenth), a conversation (three quarters), and a last
// message. The text has code, quotes, line ends and CJK; one message in eight
// is written in ASCII with \u escapes, as some clients do.
func newPromptSet(size, conversations int, mixture string, stream bool, seed uint64) *promptSet {
	if mixture == mixHot {
		conversations = 1
	}
	p := &promptSet{}
	fragments := strings.Split(strings.TrimSpace(promptText), "\n---\n")
	end := `"}],"temperature":0.7,"max_tokens":16`
	if stream {
		end += `,"stream":true,"stream_options":{"include_usage":true}`
	}
	end += "}"
	system := textOf(rand.New(rand.NewPCG(seed, 0)), fragments, size/10)
	for c := range conversations {
		rnd := rand.New(rand.NewPCG(seed, uint64(c)+1))
		body := []byte(`{"model":"fake","messages":[{"role":"system","content":"`)
		cut := 0 // where the nonce goes
		if mixture == mixCold {
			cut = len(body)
		}
		body = appendEscaped(body, system, false, size/10)
		role := "user"
		for len(body) < size*85/100 {
			body = append(append(append(body, `"},{"role":"`...), role...), `","content":"`...)
			room := min(size*85/100-len(body), 200+rnd.IntN(max(1, size/8)))
			body = appendEscaped(body, textOf(rnd, fragments, room), rnd.IntN(8) == 0, room)
			if role == "user" {
				role = "assistant"
			} else {
				role = "user"
			}
		}
		body = append(body, `"},{"role":"user","content":"`...)
		if cut == 0 {
			cut = len(body)
		}
		room := size - len(body) - nonceLen - len(end)
		body = appendEscaped(body, textOf(rnd, fragments, room), false, room)
		for len(body) < size-nonceLen-len(end) {
			body = append(body, '.')
		}
		body = append(body, end...)
		head := fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: bench.test\r\nUser-Agent: kvgate-bench\r\n"+
			"Accept: application/json\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(body)+nonceLen)
		p.heads = append(p.heads, append(head, body[:cut]...))
		p.tails = append(p.tails, body[cut:])
	}
	return p
}

// textOf returns at least n bytes of fragments in random order, numbered so that no two are alike.
func textOf(rnd *rand.Rand, fragments []string, n int) string {
	var b strings.Builder
	for b.Len() < n {
		b.WriteString("[" + strconv.Itoa(rnd.IntN(1_000_000)) + "] ")
		b.WriteString(fragments[rnd.IntN(len(fragments))])
		b.WriteString("\n\n")
	}
	return b.String()
}

// appendEscaped appends text as the inside of a JSON string, as much of it as
// fits into `room` bytes. With ascii everything else is a \u escape.
func appendEscaped(dst []byte, text string, ascii bool, room int) []byte {
	limit := len(dst) + room
	var piece []byte
	for _, r := range text {
		piece = piece[:0]
		switch {
		case r == '"' || r == '\\':
			piece = append(piece, '\\', byte(r))
		case r == '\n':
			piece = append(piece, `\n`...)
		case r == '\t':
			piece = append(piece, `\t`...)
		case r < utf8.RuneSelf || !ascii:
			piece = utf8.AppendRune(piece, r)
		case r > 0xffff:
			r -= 0x10000
			piece = fmt.Appendf(piece, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			piece = fmt.Appendf(piece, `\u%04x`, r)
		}
		if len(dst)+len(piece) > limit {
			break
		}
		dst = append(dst, piece...)
	}
	return dst
}
