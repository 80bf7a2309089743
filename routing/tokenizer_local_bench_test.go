package routing

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
)

// benchTokenizer is the tokenizer that the benchmarks use: that of the folder in
// KVGATE_TOKENIZER, else a small one.
func benchDir() string {
	if dir := os.Getenv("KVGATE_TOKENIZER"); dir != "" {
		return dir
	}
	return filepath.Join(tokenizerSamples, "cl100k")
}

// benchPiece is the length of one text, in bytes: the reference does badly with long ones.
const benchPiece = 8 << 10

// BenchmarkTokenize is the speed of text in MB/s, words remembered but no pieces: of the
// file in KVGATE_TEXT, else of this package's source.
func BenchmarkTokenize(b *testing.B) {
	tk := loadTokenizer(b, filepath.Join(benchDir(), "tokenizer.json"))
	var text []byte
	if path := os.Getenv("KVGATE_TEXT"); path != "" {
		data, err := os.ReadFile(path)
		if err != nil {
			b.Fatal(err)
		}
		text = data
	} else {
		files, _ := filepath.Glob("*.go")
		for _, f := range files {
			data, err := os.ReadFile(f)
			if err != nil {
				b.Fatal(err)
			}
			text = append(text, data...)
		}
	}
	w := newBPEWorker(1)
	b.SetBytes(int64(len(text)))
	n := 0
	for b.Loop() {
		n = 0
		for rest := text; len(rest) > 0; rest = rest[min(len(rest), benchPiece):] {
			w.out = w.out[:0]
			if err := tk.encode(w, wellFormed(nil, rest[:min(len(rest), benchPiece)]), false); err != nil {
				b.Fatal(err)
			}
			n += len(w.out) / 4
		}
	}
	b.ReportMetric(float64(n), "tokens")
}

// turnsBody returns a conversation of about size bytes, with turns more at its end.
func turnsBody(b testing.TB, size, turns int) []byte {
	b.Helper()
	sentence := "The gateway keeps a conversation on the replica that holds its cache; \"quotes\", `code()` and\nnew lines are in it, as in any other text. "
	messages := []map[string]string{{"role": "system", "content": "You are helpful."}}
	for n, i := 0, 0; n < size || turns > 0; i++ {
		if n >= size {
			turns--
		}
		role := "user"
		if i%2 == 1 {
			role = "assistant"
		}
		text := strings.Repeat(sentence, 1+i%9) + time.Duration(i).String()
		messages = append(messages, map[string]string{"role": role, "content": text})
		n += len(text)
	}
	body, err := json.Marshal(map[string]any{"model": "m", "messages": messages})
	if err != nil {
		b.Fatal(err)
	}
	return body
}

// benchLocal returns the local tokenizer of a folder.
func benchLocal(b testing.TB, dir string) *localTokenizer {
	b.Helper()
	estimate, err := NewEstimator(DefaultEstimateParams())
	if err != nil {
		b.Fatal(err)
	}
	t := &localTokenizer{
		fleet: NewFleet(time.Now, time.Second, zap.NewNop()), estimate: estimate, limits: defaultTemplateLimits, cache: newTokenCache(1),
		bpe: loadTokenizer(b, filepath.Join(dir, "tokenizer.json")), templates: loadTemplates(b, dir),
	}
	t.rules.format = t.templates.plain.detectFormat()
	return t
}

// BenchmarkLocalNextTurn is the next turn of a conversation of 100 KB of which all but
// the last two messages were seen before: parsing, rendering and tokens.
func BenchmarkLocalNextTurn(b *testing.B) {
	t := benchLocal(b, benchDir())
	var r Request
	run := func(body []byte) int {
		r.Reset()
		r.API, r.Body = APIChat, body
		if err := r.Parse(); err != nil {
			b.Fatal(err)
		}
		t.Tokenize(&r)
		if r.Source != TokensLocal {
			b.Fatalf("got tokens %s, want local", r.Source)
		}
		return len(r.Tokens) / 4
	}
	run(turnsBody(b, 100_000, 0))
	next := make([][]byte, 64)
	for i := range next {
		next[i] = append([]byte{}, turnsBody(b, 100_000, 2)...)
		next[i] = []byte(strings.Replace(string(next[i]), `"}]`, time.Duration(i).String()+`"}]`, 1))
	}
	b.ReportAllocs()
	n := 0
	for i := 0; b.Loop(); i++ {
		n = run(next[i%len(next)])
	}
	b.ReportMetric(float64(n), "tokens")
}
