package routing

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"kvgate/kvindex"
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
		fleet: NewFleet(time.Now, time.Second, zap.NewNop()), estimate: estimate, limits: defaultTemplateLimits, cache: newTokenCache(1), heads: &conversations{seed: 1},
		bpe: loadTokenizer(b, filepath.Join(dir, "tokenizer.json")), templates: loadTemplates(b, dir),
	}
	t.rules.format = t.templates.plain.detectFormat()
	return t
}

// BenchmarkLocalNextTurn is the next turn of a conversation of 100 KB of which all but
// the last two messages were seen before, all that is done for it: reading the body,
// rendering, tokens, and the keys of its blocks. No body comes twice.
func BenchmarkLocalNextTurn(b *testing.B) {
	f := func(algorithm string) {
		b.Run(algorithm, func(b *testing.B) {
			t := benchLocal(b, benchDir())
			keys, err := kvindex.NewKeys(algorithm, "", 16)
			if err != nil {
				b.Fatal(err)
			}
			p := &preciseProducer{index: &preciseIndex{keys: keys}}
			var r Request
			var ch chain
			run := func(body []byte) {
				r.Reset()
				r.API, r.Body = APIChat, body
				if err := r.Parse(); err != nil {
					b.Fatal(err)
				}
				t.Tokenize(&r)
				ch.reset()
				p.Prepare(&r, &ch)
				if r.Source != TokensLocal || len(ch.hashes) != len(r.Tokens)/bytesPerToken/16 {
					b.Fatalf("got tokens %s and %d keys, want local and %d", r.Source, len(ch.hashes), len(r.Tokens)/bytesPerToken/16)
				}
			}
			const chats, turns = 16, 20
			bodies := make([][turns][]byte, chats)
			for i := range bodies {
				for k := range turns {
					body := turnsBody(b, 100_000, 2*k)
					bodies[i][k] = bytes.Replace(body, []byte("helpful"), []byte("helpful "+time.Duration(i).String()), 1)
				}
			}
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				at := n % (chats * (turns - 1))
				if at == 0 {
					b.StopTimer()
					t.heads, t.cache.sets, t.cache.bytes = &conversations{seed: 1}, [tokenSets][tokenWays]tokenEntry{}, 0
					for i := range bodies {
						run(bodies[i][0])
					}
					b.StartTimer()
				}
				run(bodies[at%chats][1+at/chats])
			}
			b.ReportMetric(float64(len(r.Tokens)/bytesPerToken), "tokens")
		})
	}
	f(kvindex.CBORFNV)
	f(kvindex.XXH64)
}
