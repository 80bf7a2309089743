package bench

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// parts returns request n of a set: its head, its body with a nonce.
func (p *promptSet) parts(n int, nonce string) (head, body []byte) {
	a, b := p.request(n)
	whole := slices.Concat(a, []byte(nonce), b)
	head, body, _ = bytes.Cut(whole, []byte("\r\n\r\n"))
	return head, body
}

func TestPromptSet(t *testing.T) {
	type message struct{ Role, Content string }
	type chat struct {
		Model    string
		Stream   bool
		Messages []message
	}
	f := func(t *testing.T, size int, mixture string, stream bool, wantConversations int) {
		p := newPromptSet(size, 3, mixture, stream, 1)
		if got := len(p.heads); got != wantConversations {
			t.Fatalf("conversations: got %d, want %d", got, wantConversations)
		}
		var all []chat
		for n := range 3 {
			head, body := p.parts(n, "0123456789abcdef")
			if len(body) != size {
				t.Errorf("body %d: got %d bytes, want %d", n, len(body), size)
			}
			if want := "Content-Length: " + string(appendDecimal(size)); !strings.Contains(string(head), want) {
				t.Errorf("head: got %q, want %q in it", head, want)
			}
			var c chat
			if err := json.Unmarshal(body, &c); err != nil {
				t.Fatalf("body %d: got %v, want JSON", n, err)
			}
			if c.Model != "fake" || c.Stream != stream || len(c.Messages) < 3 {
				t.Errorf("got model %q, stream %v, %d messages, want fake, %v, at least 3", c.Model, c.Stream, len(c.Messages), stream)
			}
			where := len(c.Messages) - 1
			if mixture == mixCold {
				where = 0
			}
			if got := c.Messages[where].Content[:nonceLen]; got != "0123456789abcdef" {
				t.Errorf("message %d starts with %q, want the nonce", where, got)
			}
			all = append(all, c)
		}
		if got := all[0].Messages[0] == all[1].Messages[0]; !got {
			t.Error("got different system prompts, want one that all share")
		}
		if got, want := all[0].Messages[1] == all[1].Messages[1], wantConversations == 1; got != want {
			t.Errorf("same first turn in two conversations: got %v, want %v", got, want)
		}
	}
	t.Run("1 KB", func(t *testing.T) { f(t, 1<<10, mixWarm, false, 3) })
	t.Run("8 KB stream", func(t *testing.T) { f(t, 8<<10, mixWarm, true, 3) })
	t.Run("64 KB cold", func(t *testing.T) { f(t, 64<<10, mixCold, false, 3) })
	t.Run("512 KB hot", func(t *testing.T) { f(t, 512<<10, mixHot, false, 1) })
}

func appendDecimal(n int) []byte {
	b, _ := json.Marshal(n)
	return b
}

// The prompts must be as hard to read as what people send: a proxy that parses
// them meets an escape every few dozen bytes, and text beyond ASCII in both notations.
func TestPromptsAreRealText(t *testing.T) {
	_, body := newPromptSet(512<<10, 1, mixWarm, false, 1).parts(0, "0123456789abcdef")
	f := func(what string, got, low, high int) {
		if got < low || got > high {
			t.Errorf("%s: got %d, want %d to %d", what, got, low, high)
		}
	}
	f("bytes per escape", len(body)/bytes.Count(body, []byte(`\`)), 15, 60)
	f(`\u escapes`, bytes.Count(body, []byte(`\u`)), 500, 20_000)
	beyond := 0
	for _, b := range body {
		if b >= 0x80 {
			beyond++
		}
	}
	f("percent beyond ASCII", 100*beyond/len(body), 3, 20)
}

func TestNoncesDiffer(t *testing.T) {
	seen := map[string]bool{}
	for n := range uint64(100_000) {
		var b [nonceLen]byte
		putNonce(&b, n)
		seen[string(b[:4])+string(b[4:])] = true
	}
	if len(seen) != 100_000 {
		t.Errorf("got %d different nonces, want 100000", len(seen))
	}
}
