package routing

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

type oracleChat struct {
	Messages json.RawMessage `json:"messages"`
	Args     json.RawMessage `json:"args"`
	Text     *string         `json:"text"`
	IDs      []uint32        `json:"ids"`
	Error    string          `json:"error"`
}

// oracleNow is the time of the reference's clock.
func oracleNow() time.Time { return time.Date(2026, 3, 5, 14, 7, 9, 0, time.UTC) }

// loadTemplates reads the template of a folder, nil when it has none.
func loadTemplates(t testing.TB, dir string) *chatTemplates {
	t.Helper()
	c := &chatTemplates{}
	config := &tokenizerConfig{}
	if data, err := os.ReadFile(filepath.Join(dir, "tokenizer_config.json")); err == nil {
		if config, err = parseTokenizerConfig(data); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range specialTokenNames {
		if text := config.tokens[name]; text != "" {
			c.special = append(c.special, namedValue{name, stringValue(text)})
		}
	}
	var err error
	if data, readErr := os.ReadFile(filepath.Join(dir, "chat_template.jinja")); readErr == nil {
		c.plain, err = compileTemplate(string(data))
	} else {
		c.plain, c.tools, err = parseTemplates(config.ChatTemplate)
	}
	if err != nil {
		t.Fatalf("%s: %v", dir, err)
	}
	return c
}

// inputOf turns the arguments of apply_chat_template into ours.
func inputOf(t testing.TB, o *oracleChat) *chatInput {
	t.Helper()
	in := &chatInput{tools: none, docs: none}
	var err error
	if in.messages, err = parseValue(string(o.Messages)); err != nil {
		t.Fatal(err)
	}
	args, err := parseValue(string(o.Args))
	if err != nil {
		t.Fatal(err)
	}
	for i, k := range args.dict().keys {
		switch v := args.dict().vals[i]; k.str {
		case "tools":
			in.tools = v
		case "documents":
			in.docs = v
		case "add_generation_prompt":
			in.generate = v.truth()
		case "continue_final_message":
			in.resume = v.truth()
		default:
			in.extra = append(in.extra, namedValue{k.str, v})
		}
	}
	return in
}

// checkChats holds the templates of a folder against what transformers renders.
func checkChats(t *testing.T, dir string, tokens bool) {
	c := loadTemplates(t, dir)
	x := &execution{now: oracleNow, limits: defaultTemplateLimits}
	var tk *bpeTokenizer
	w := newBPEWorker(1)
	if tokens {
		tk = loadTokenizer(t, filepath.Join(dir, "tokenizer.json"))
	}
	bad, refused := 0, 0
	complain := func(format string, args ...any) {
		if bad++; bad <= 3 {
			t.Errorf(format, args...)
		}
	}
	n := readLines(t, filepath.Join(dir, "chats.jsonl"), func(line []byte) {
		var o oracleChat
		if err := json.Unmarshal(line, &o); err != nil {
			t.Fatal(err)
		}
		text, err := c.render(x, inputOf(t, &o))
		switch {
		case o.Text == nil && err == nil:
			complain("chat %.600s: got %.300q, want the error %s", line, text, o.Error)
		case o.Text == nil:
			refused++
		case err != nil:
			complain("chat %.900s: got error %v, want %.300q", line, err, *o.Text)
		case string(text) != *o.Text:
			i := 0
			for i < len(text) && i < len(*o.Text) && text[i] == (*o.Text)[i] {
				i++
			}
			from := max(0, i-60)
			complain("chat %.300s: from byte %d on\ngot  %.200q\nwant %.200q", line, i, text[min(from, len(text)):], (*o.Text)[min(from, len(*o.Text)):])
		case tk != nil:
			w.out = w.out[:0]
			if err := tk.encode(w, text, false); err != nil || !slices.Equal(tokensOf(w.out), o.IDs) {
				complain("chat %.300s: got tokens %v, %v, want %v", line, tokensOf(w.out), err, o.IDs)
			}
		}
	})
	if bad > 0 {
		t.Errorf("chats that differ: got %d of %d, want 0", bad, n)
	}
	t.Logf("%d chats, %d refused by both, %d differ", n, refused, bad)
}

// TestTemplateOracle is the other half of `make tokenizer-oracle`.
func TestTemplateOracle(t *testing.T) {
	dir := os.Getenv(oracleDir)
	if dir == "" {
		t.Skip("the full run is make tokenizer-oracle")
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*", "chats.jsonl"))
	if len(files) == 0 {
		t.Fatalf("%s has no FAMILY/chats.jsonl", dir)
	}
	for _, f := range files {
		t.Run(filepath.Base(filepath.Dir(f)), func(t *testing.T) { checkChats(t, filepath.Dir(f), true) })
	}
}

// TestChatSamples holds the samples' templates against what transformers renders.
func TestChatSamples(t *testing.T) {
	files, _ := filepath.Glob(filepath.Join(tokenizerSamples, "*", "chats.jsonl"))
	if len(files) < 3 {
		t.Fatalf("samples with chats: got %d, want at least 3", len(files))
	}
	for _, f := range files {
		t.Run(filepath.Base(filepath.Dir(f)), func(t *testing.T) { checkChats(t, filepath.Dir(f), true) })
	}
}
