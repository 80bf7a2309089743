package routing

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"unicode/utf16"

	"kvgate/kvindex"
)

// promptText makes n bytes of text as it is sent to a model: source code,
// quotations, several languages.
func promptText(rng *rand.Rand, n int) string {
	words := [...]string{"request", "replica", "cache", "the", "prefix", "of", "a", "token", "is", "held", "by", "route", "score", "queue", "block", "and", "stream"}
	word := func() string { return words[rng.IntN(len(words))] }
	code := [...]string{
		"func %s(%s string) (%s int, err error) {\n\tif %s == \"\" {\n\t\treturn 0, fmt.Errorf(\"%s: empty\")\n\t}\n\treturn len(%s), nil\n}\n\n",
		"for i, %s := range %s {\n\tlog.Printf(\"%%d: %%s\", i, %s) // %s of the %s\n\t%s++\n}\n",
		"SELECT \"%s\", count(*) FROM %s WHERE %s > 10 GROUP BY \"%s\"; -- %s %s\n",
	}
	foreign := [...]string{"请求被路由到持有前缀缓存的副本。", "キャッシュのヒット率を測る。", "Für jede Anfrage wird höchstens ein Schlüssel geprüft – später.", "라우터는 가장 긴 접두사를 찾는다."}
	var b bytes.Buffer
	for b.Len() < n {
		switch k := rng.IntN(10); {
		case k < 4:
			fmt.Fprintf(&b, code[rng.IntN(len(code))], word(), word(), word(), word(), word(), word())
		case k < 9:
			for range 12 + rng.IntN(40) {
				b.WriteString(word())
				b.WriteByte(' ')
			}
			fmt.Fprintf(&b, "\"%s %s\" said %s, 'as %d of %d'.\n", word(), word(), word(), rng.IntN(100), rng.IntN(1000))
		default:
			b.WriteString(foreign[rng.IntN(len(foreign))])
			b.WriteString(" 🙂\n")
		}
	}
	return string(bytes.ToValidUTF8(b.Bytes()[:n], nil))
}

// escaped writes text as a JSON string in the manner of several clients: as
// UTF-8 or, every now and then, with \u escapes.
func escaped(rng *rand.Rand, text string) []byte {
	b := []byte{'"'}
	for _, r := range text {
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, '\\', 'n')
		case r == '\t':
			b = append(b, '\\', 't')
		case r >= 0x80 && r < 0x10000 && rng.IntN(20) == 0:
			b = fmt.Appendf(b, `\u%04x`, r)
		case r >= 0x10000 && rng.IntN(2) == 0:
			hi, lo := utf16.EncodeRune(r)
			b = fmt.Appendf(b, `\u%04x\u%04x`, hi, lo)
		default:
			b = append(b, string(r)...)
		}
	}
	return append(b, '"')
}

// chatBody makes a chat request of about size bytes: a system prompt and turns
// of up to 4 KB.
func chatBody(rng *rand.Rand, size int) []byte {
	b := []byte(`{"model":"meta-llama/Llama-3.1-8B-Instruct","stream":true,"stream_options":{"include_usage":true},"temperature":0.7,"max_tokens":512,"messages":[`)
	b = append(b, `{"role":"system","content":`...)
	b = append(b, escaped(rng, promptText(rng, min(size/4, 4096)))...)
	b = append(b, '}')
	for turn := 0; len(b) < size-64; turn++ {
		b = append(b, `,{"role":"`...)
		b = append(b, [...]string{"user", "assistant"}[turn%2]...)
		b = append(b, `","content":`...)
		b = append(b, escaped(rng, promptText(rng, max(16, min(4096, (size-len(b))*9/10))))...)
		b = append(b, '}')
	}
	return append(b, `]}`...)
}

// toolCatalogue makes n tools as clients of agents send them.
func toolCatalogue(rng *rand.Rand, n int) []byte {
	b := []byte{'['}
	for k := range n {
		if k > 0 {
			b = append(b, ", "...)
		}
		b = fmt.Appendf(b, `{"type": "function", "function": {"name": "tool_%d", "description": `, k)
		b = append(b, escaped(rng, promptText(rng, 400))...)
		b = append(b, `, "parameters": {"type": "object", "properties": {"path": {"type": "string", "description": "a <path>", "minLength": 1}, `+
			`"limit": {"type": "number", "default": 2.50, "maximum": 1e3}}, "required": ["path"], "additionalProperties": false}}}`...)
	}
	return append(b, ']')
}

// shapes are bodies of about 64 KB in other shapes than a plain chat.
func shapes() []struct {
	name string
	api  API
	body []byte
} {
	rng := rand.New(rand.NewPCG(3, 64))
	tools := toolCatalogue(rng, 60)
	text := escaped(rng, promptText(rng, 30<<10))
	ids := []byte("[0")
	for len(ids) < 64<<10 {
		ids = fmt.Appendf(ids, ",%d", rng.IntN(128000))
	}
	return []struct {
		name string
		api  API
		body []byte
	}{
		{"tools", APIChat, fmt.Appendf(nil, `{"messages":[{"role":"user","content":%s}],"tools":%s}`, text, tools)},
		{"responses", APIResponses, fmt.Appendf(nil, `{"input":[{"role":"user","content":%s}],"tools":%s,"instructions":"be brief"}`, text, tools)},
		{"anthropic", APIMessages, fmt.Appendf(nil, `{"system":[{"type":"text","text":%s}],"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":%s}]}]}]}`, text, text)},
		{"ids", APICompletions, fmt.Appendf(nil, `{"prompt":%s]}`, ids)},
		{"image", APIChat, fmt.Appendf(nil, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,%s%064000d"}}]}]}`, pngBase64, 0)},
	}
}

func BenchmarkParseShapes(b *testing.B) {
	e, err := NewEstimator(DefaultEstimateParams())
	if err != nil {
		b.Fatalf("NewEstimator: %v, want no error", err)
	}
	for _, s := range shapes() {
		b.Run(s.name, func(b *testing.B) {
			var r Request
			b.SetBytes(int64(len(s.body)))
			b.ReportAllocs()
			for b.Loop() {
				r.Reset()
				r.API, r.Body = s.api, s.body
				if err := r.Parse(); err != nil {
					b.Fatalf("Parse: %v, want no error", err)
				}
				e.Tokenize(&r)
			}
		})
	}
}

func BenchmarkParse(b *testing.B) {
	for _, kb := range []int{1, 8, 64, 512} {
		body := chatBody(rand.New(rand.NewPCG(1, uint64(kb))), kb<<10)
		e, err := NewEstimator(DefaultEstimateParams())
		if err != nil {
			b.Fatalf("NewEstimator: %v, want no error", err)
		}
		b.Run(fmt.Sprintf("%dKB", kb), func(b *testing.B) {
			var r Request
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				r.Reset()
				r.API, r.Body = APIChat, body
				if err := r.Parse(); err != nil {
					b.Fatalf("Parse: %v, want no error", err)
				}
				e.Tokenize(&r)
			}
		})
		b.Run(fmt.Sprintf("%dKB/hash", kb), func(b *testing.B) {
			var r Request
			var hashes []uint64
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				r.Reset()
				r.API, r.Body = APIChat, body
				if err := r.Parse(); err != nil {
					b.Fatalf("Parse: %v, want no error", err)
				}
				e.Tokenize(&r)
				hashes = kvindex.AppendChain(hashes[:0], kvindex.Seed(r.Model, r.Salt), r.Tokens, 64*bytesPerToken, 0)
			}
		})
	}
}
