package routing

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// oracleDir is where `make tokenizer-oracle` has put what the reference says.
const oracleDir = "KVGATE_TOKENIZER_ORACLE"

type oracleText struct {
	Text    []byte   `json:"text"` // base64
	Special bool     `json:"special"`
	IDs     []uint32 `json:"ids"`
}

// readLines calls f with every line of a file.
func readLines(t testing.TB, path string, f func(line []byte)) int {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	s := bufio.NewScanner(file)
	s.Buffer(nil, 64<<20)
	n := 0
	for s.Scan() {
		f(s.Bytes())
		n++
	}
	if s.Err() != nil {
		t.Fatal(s.Err())
	}
	return n
}

func loadTokenizer(t testing.TB, path string) *bpeTokenizer {
	t.Helper()
	return loadTokenizerWith(t, path, nil)
}

func loadTokenizerWith(t testing.TB, path string, config *tokenizerConfig) *bpeTokenizer {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	tk, err := parseTokenizer(data, config)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return tk
}

func tokensOf(b []byte) []uint32 {
	out := make([]uint32, 0, len(b)/4)
	for ; len(b) > 0; b = b[4:] {
		out = append(out, binary.LittleEndian.Uint32(b))
	}
	return out
}

// checkTexts holds a tokenizer against the reference's tokens.
func checkTexts(t *testing.T, dir string) {
	checkTextsOf(t, loadTokenizer(t, filepath.Join(dir, "tokenizer.json")), filepath.Join(dir, "texts.jsonl"))
}

func checkTextsOf(t *testing.T, tk *bpeTokenizer, file string) {
	w := newBPEWorker(1)
	bad := 0
	n := readLines(t, file, func(line []byte) {
		var x oracleText
		if err := json.Unmarshal(line, &x); err != nil {
			t.Fatal(err)
		}
		w.out = w.out[:0]
		if err := tk.encode(w, wellFormed(nil, x.Text), x.Special); err != nil {
			t.Fatalf("encode %q: %v", x.Text, err)
		}
		got := tokensOf(w.out)
		if slices.Equal(got, x.IDs) {
			return
		}
		if bad++; bad <= 3 {
			i := 0
			for i < len(got) && i < len(x.IDs) && got[i] == x.IDs[i] {
				i++
			}
			t.Errorf("tokens of %.300q (special %v): got %d, want %d; from token %d on got %v, want %v", x.Text, x.Special, len(got), len(x.IDs), i,
				got[i:min(i+8, len(got))], x.IDs[i:min(i+8, len(x.IDs))])
		}
	})
	if bad > 0 {
		t.Errorf("texts with other tokens than the reference's: got %d of %d, want 0", bad, n)
	}
	t.Logf("%d texts, %d differ", n, bad)
}

// TestTokenizerOracle is the full run of `make tokenizer-oracle`.
func TestTokenizerOracle(t *testing.T) {
	dir := os.Getenv(oracleDir)
	if dir == "" {
		t.Skip("the full run is make tokenizer-oracle")
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*", "texts.jsonl"))
	if len(files) == 0 {
		t.Fatalf("%s has no FAMILY/texts.jsonl", dir)
	}
	for _, f := range files {
		t.Run(filepath.Base(filepath.Dir(f)), func(t *testing.T) { checkTexts(t, filepath.Dir(f)) })
	}
	// The same with the config, against the tokenizer that transformers makes of both.
	files, _ = filepath.Glob(filepath.Join(dir, "*", "auto.jsonl"))
	for _, f := range files {
		t.Run(filepath.Base(filepath.Dir(f))+"/config", func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join(filepath.Dir(f), "tokenizer_config.json"))
			if err != nil {
				t.Fatal(err)
			}
			config, err := parseTokenizerConfig(data)
			if err != nil {
				t.Fatal(err)
			}
			checkTextsOf(t, loadTokenizerWith(t, filepath.Join(filepath.Dir(f), "tokenizer.json"), config), f)
		})
	}
}
