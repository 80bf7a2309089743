package fakevllm

import (
	"encoding/binary"
	"encoding/json"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// The tokenizer needs no vocabulary: four bytes of text are a token, whose id
// is these bytes as a little-endian number; a text that ends within a token
// leaves its last bytes zero. The chat template puts a marker token before and
// after every message. Text starts a new token behind a marker, and every token of an
// answer is exactly four bytes, so that the prompt of the next turn has the
// tokens of this turn's prompt and answer as its prefix.

// marker is a token that no text contains: its first byte, 0xff, is not UTF-8.
type marker uint32

const (
	markSystem marker = iota
	markUser
	markAssistant
	markTool
	markRole // any other role, its name follows
	markEnd
	markTools
	markMedia // eight tokens derived from the part follow
)

var markerNames = [...]string{
	"<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|role|>", "<|end|>", "<|tools|>", "<|media|>",
}

func (m marker) token() uint32 { return 0xff | uint32(m)<<8 }

// appendText appends the tokens of a text.
func appendText(dst []uint32, text string) []uint32 {
	for ; len(text) >= 4; text = text[4:] {
		dst = append(dst, uint32(text[0])|uint32(text[1])<<8|uint32(text[2])<<16|uint32(text[3])<<24)
	}
	if text != "" {
		var last [4]byte
		copy(last[:], text)
		dst = append(dst, binary.LittleEndian.Uint32(last[:]))
	}
	return dst
}

// appendTokenText appends the text of a token.
func appendTokenText(dst []byte, token uint32) []byte {
	if m := token >> 8; token&0xff == 0xff && m < uint32(len(markerNames)) {
		return append(dst, markerNames[m]...)
	}
	for ; token != 0; token >>= 8 {
		dst = append(dst, byte(token))
	}
	return dst
}

func detokenize(tokens []uint32) string {
	var text []byte
	for _, t := range tokens {
		text = appendTokenText(text, t)
	}
	return strings.ToValidUTF8(string(text), "\uFFFD")
}

// turn is one message as the chat template sees it.
type turn struct {
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`    // string, list of parts, or nothing
	ToolCalls json.RawMessage `json:"tool_calls"` // rendered as JSON text
	Type      string          `json:"type"`       // Responses items: function_call and the like are rendered as JSON text
	raw       json.RawMessage
}

// UnmarshalJSON keeps the raw item beside the fields.
func (t *turn) UnmarshalJSON(b []byte) error {
	type plain turn
	if err := json.Unmarshal(b, (*plain)(t)); err != nil {
		return err
	}
	t.raw = append(t.raw[:0], b...)
	return nil
}

type part struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

// billing is how one client starts a system block that changes with every
// request and says nothing to the model; vLLM leaves such a block out.
const billing = "x-anthropic-billing-header"

// render applies the chat template.
func render(tools json.RawMessage, turns []turn, prompt bool) []uint32 {
	var dst []uint32
	if given(tools) && string(tools) != "[]" {
		dst = append(dst, markTools.token())
		dst = appendText(dst, string(tools))
		dst = append(dst, markEnd.token())
	}
	for _, t := range turns {
		switch t.Role {
		case "system", "developer":
			dst = append(dst, markSystem.token())
		case "user":
			dst = append(dst, markUser.token())
		case "assistant":
			dst = append(dst, markAssistant.token())
		case "tool":
			dst = append(dst, markTool.token())
		default:
			dst = append(dst, markRole.token())
			dst = appendText(dst, t.Role)
		}
		if t.Type != "" && t.Type != "message" {
			dst = appendText(dst, string(t.raw))
		}
		dst = appendContent(dst, t.Content)
		if given(t.ToolCalls) {
			dst = appendText(dst, string(t.ToolCalls))
		}
		dst = append(dst, markEnd.token())
	}
	if prompt {
		return append(dst, markAssistant.token())
	}
	if n := len(dst); n > 0 && dst[n-1] == markEnd.token() {
		return dst[:n-1] // the final message goes on
	}
	return dst
}

// appendContent appends a message's content. A part that is not text counts as
// its marker and eight tokens that depend on all of it.
func appendContent(dst []uint32, content json.RawMessage) []uint32 {
	if !given(content) {
		return dst
	}
	var text string
	if json.Unmarshal(content, &text) == nil {
		return appendText(dst, text)
	}
	var parts []json.RawMessage
	if json.Unmarshal(content, &parts) != nil {
		return appendText(dst, string(content))
	}
	for _, raw := range parts {
		var p part
		if json.Unmarshal(raw, &p) != nil {
			dst = appendContent(dst, raw)
			continue
		}
		switch p.Type {
		case "text", "input_text", "output_text", "":
			if !strings.HasPrefix(p.Text, billing) {
				dst = appendText(dst, p.Text)
			}
		default:
			dst = append(dst, markMedia.token())
			for i, h := 0, xxhash.Sum64(raw); i < 8; i++ {
				h = mix(h)
				dst = append(dst, uint32(h>>33))
			}
		}
	}
	return dst
}

func given(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }

// chainSeed starts the chain of block hashes: prompts for different models or
// with different salts share no block.
func chainSeed(model, salt string) uint64 {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(model)))
	b = append(append(b, model...), salt...)
	return xxhash.Sum64(b)
}

// blockHashes appends the hash of every full block of the tokens: each covers
// all tokens up to its end. It also returns the hash of everything, the last
// partial block included.
func blockHashes(dst []uint64, seed uint64, tokens []uint32, block int) ([]uint64, uint64) {
	buf := make([]byte, 8+4*block)
	h := seed
	for len(tokens) > 0 {
		n := min(block, len(tokens))
		binary.LittleEndian.PutUint64(buf, h)
		for i, t := range tokens[:n] {
			binary.LittleEndian.PutUint32(buf[8+4*i:], t)
		}
		h = xxhash.Sum64(buf[:8+4*n])
		if n == block {
			dst = append(dst, h)
		}
		tokens = tokens[n:]
	}
	return dst, h
}

// answerToken returns token i of the answer that seed stands for: four bytes,
// a syllable behind a blank, and a vowel in its place at the very start; or an emoji.
func answerToken(seed uint64, i int, emoji bool) uint32 {
	const onsets, vowels, codas = "bdlmnrvz", "aeio", "lmnrstvx"
	h := mix(seed + uint64(i)*0x9e3779b97f4a7c15)
	if emoji { // U+1F600 to U+1F63F
		return 0xf0 | 0x9f<<8 | 0x98<<16 | uint32(0x80|h&63)<<24
	}
	first := byte(' ')
	if i == 0 {
		first = "AEIO"[h>>8&3]
	}
	return uint32(first) | uint32(onsets[h&7])<<8 | uint32(vowels[h>>3&3])<<16 | uint32(codas[h>>5&7])<<24
}

// mix is the finisher of SplitMix64 (Steele, Lea, Flood 2014).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
