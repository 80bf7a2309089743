package routing

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"kvgate/kvindex"
)

// testMemo returns a Memo with cells so small that short bodies have many.
func testMemo(t testing.TB, cell, blockBytes int) *Memo {
	t.Helper()
	m := newMemo()
	if m == nil {
		t.Skip("no fast AES here")
	}
	m.cell = cell
	m.blockBytes.Store(int32(blockBytes))
	return m
}

// chainOf parses a body and hashes its prompts as the approximate producer does.
func chainOf(r *Request, m *Memo, api API, body []byte, blockBytes, limit int) ([]uint64, error) {
	r.Reset()
	r.API, r.Body, r.Memo = api, body, m
	if err := r.Parse(); err != nil {
		return nil, err
	}
	(&Estimator{DefaultEstimateParams()}).Tokenize(r)
	if len(r.Tokens) == 0 {
		return nil, nil
	}
	seed := kvindex.Seed(r.Model, r.Salt)
	if r.memoed(blockBytes) {
		return r.appendChain(nil, seed, limit), nil
	}
	var hashes []uint64
	start := 0
	for _, end := range r.Ends {
		hashes = kvindex.AppendChain(hashes, seed, r.content()[start:end], blockBytes, limit)
		start = end
	}
	return hashes, nil
}

// checkMemo wants of a request with a Memo all that it is without.
func checkMemo(t *testing.T, got *Request, m *Memo, api API, body []byte, blockBytes, limit int) {
	t.Helper()
	var want Request
	wantHashes, wantErr := chainOf(&want, nil, api, body, blockBytes, limit)
	gotHashes, gotErr := chainOf(got, m, api, body, blockBytes, limit)
	if fmt.Sprint(gotErr) != fmt.Sprint(wantErr) {
		t.Fatalf("%q: error %v, want %v", body, gotErr, wantErr)
	}
	if !slices.Equal(gotHashes, wantHashes) {
		t.Fatalf("%q: hashes %x, want %x", body, gotHashes, wantHashes)
	}
	fields := func(r *Request) string {
		return fmt.Sprintf("model %q salt %q stream %v usage %v max %d weight %d ends %v exact %v source %v assets %v tokens %d",
			r.Model, r.Salt, r.Stream, r.WantsUsage, r.MaxTokens, r.Weight, r.Ends, r.Exact, r.Source, r.prompt.hasAssets(), len(r.Tokens))
	}
	if got, want := fields(got), fields(&want); wantErr == nil && got != want {
		t.Fatalf("%q: %s, want %s", body, got, want)
	}
	if hole := min(got.prompt.recall.hole, len(got.Tokens)); wantErr == nil && !bytes.Equal(got.Tokens[hole:], want.Tokens[hole:]) {
		t.Fatalf("%q: tokens from %d on %q, want %q", body, hole, got.Tokens[hole:], want.Tokens[hole:])
	}
}

// randomMessages makes the messages of a conversation, odd ones among them.
func randomMessages(rng *rand.Rand, n int) []string {
	text := func() string { return string(escaped(rng, promptText(rng, 1+rng.IntN(120)))) }
	var all []string
	for range n {
		switch rng.IntN(14) {
		case 0:
			all = append(all, `{"role":"user","content":[{"type":"text","text":`+text()+`},{"type":"text","text":`+text()+`}]}`)
		case 1:
			all = append(all, `{"content":`+text()+`,"role":"assistant"}`)
		case 2:
			all = append(all, `{"role":"user","content":`+text()+`,"content":`+text()+`}`)
		case 3:
			all = append(all, `{"role":"tool","content":[{"type":"other","text":`+text()+`}]}`)
		case 4:
			all = append(all, `{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y.png"}}]}`)
		case 5:
			all = append(all, `{}`, `null`, `{"role":"","content":""}`)
		default:
			all = append(all, fmt.Sprintf(`{"role":"user", "content":%s}`, text()))
		}
	}
	return all
}

func TestMemoChangesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	var r Request
	resumed := 0
	for range 150 {
		blockBytes := []int{8, 64, 256}[rng.IntN(3)]
		limit := []int{0, 3, 1000}[rng.IntN(3)]
		m := testMemo(t, 16<<rng.IntN(5), blockBytes)
		api := []API{APIChat, APIMessages, APIChatBatch, APIEmbeddings}[rng.IntN(4)]
		if rng.IntN(2) == 0 {
			api = APIChat
		}
		heads := []string{`{"model":"m","messages":[`, `{ "tools":[{"b":1.0,"a":"<"}],"system":"be brief", "messages" : [ `, `{"messages":[],"messages":[`, `{"messages":[{"role":"a","content":"b"}],"messages":[`, `{"cache_salt":"\u0041","tools":[],"messages":[`}
		tails := []string{`]}`, `],"stream":true,"model":"\u006d"}`, `],"tools":[{"x":2}]}`, `],"tools":[]}`, `],"messages":[]}`, `],"messages":null}`, `],"messages":[{"role":"z","content":"other"}]}`, `],"system":"late"}`, `]`, `],}`, `],"model":7}`, `] , "max_tokens" : 5 } `}
		head := heads[rng.IntN(len(heads))]
		messages := randomMessages(rng, 30)
		if rng.IntN(3) > 0 { // without what a Memo does not help with
			messages = slices.DeleteFunc(messages, func(s string) bool { return !strings.HasPrefix(s, `{"role":"user", `) })
		}
		for range 40 {
			n := 1 + rng.IntN(len(messages))
			body := []byte(head + strings.Join(messages[:n], ",") + tails[max(0, rng.IntN(2*len(tails))-len(tails))])
			if rng.IntN(4) == 0 {
				body[rng.IntN(len(body))] = "\"\\{}[],:x0\x01\xff"[rng.IntN(12)]
			}
			checkMemo(t, &r, m, api, body, blockBytes, limit)
			if r.prompt.recall.hole > 0 {
				resumed++
			}
			if rng.IntN(20) == 0 { // the engine's block size changes
				m.blockBytes.Store(int32(blockBytes * 2))
			}
		}
	}
	if want := 1000; resumed < want {
		t.Errorf("%d requests went on from a head, want at least %d", resumed, want)
	}
}

func FuzzMemo(f *testing.F) {
	for _, s := range samples() {
		f.Add(uint8(s.api), []byte(s.body), []byte(s.body), uint16(len(s.body)*3/4))
	}
	f.Add(uint8(APIChat), []byte(`{"messages":[{"role":"user","content":"0123456789abcdefghijklmnopqrstuvwxyz"},{"role":"user","content":"0123456789abcdefghijklmnopqrstuvwxyz"}]}`), []byte(`]}`), uint16(120))
	f.Fuzz(func(t *testing.T, api uint8, first, second []byte, cut uint16) {
		m := testMemo(t, 8, 8)
		var r Request
		a := API(api % uint8(APICount))
		checkMemo(t, &r, m, a, first, 8, 100)
		checkMemo(t, &r, m, a, append(slices.Clone(first[:min(int(cut), len(first))]), second...), 8, 100)
		checkMemo(t, &r, m, a, first, 8, 100)
	})
}

// conversation returns a chat of that many messages of 200 bytes.
func conversation(messages int) []byte {
	b := []byte(`{"messages":[`)
	for i := range messages {
		b = fmt.Appendf(b, `{"role":"user","content":"%0170d"},`, i)
	}
	return append(b[:len(b)-1], `]}`...)
}

// TestMemoResumes wants the head of a conversation found: all up to the last
// message that ends in a whole cell.
func TestMemoResumes(t *testing.T) {
	f := func(t *testing.T, first, second []byte, wantCells, wantAtLeast int) {
		t.Helper()
		m := testMemo(t, 1024, 64)
		var r Request
		checkMemo(t, &r, m, APIChat, first, 64, 0)
		checkMemo(t, &r, m, APIChat, second, 64, 0)
		c := &r.prompt.recall
		if got := c.cells; got < wantCells {
			t.Errorf("%d cells known, want %d", got, wantCells)
		}
		if c.hole < wantAtLeast {
			t.Errorf("%d bytes of text left out, want at least %d", c.hole, wantAtLeast)
		}
	}
	one, more := conversation(50), conversation(70)
	f(t, one, one, 9, 7000)
	f(t, one, more, 9, 7000)
	f(t, more, one, 9, 7000)
	changed := bytes.Clone(one)
	changed[9000] = 'x'
	f(t, one, changed, 8, 6000)
	changed[0] = ' '
	f(t, one, changed, 0, 0)
}

// TestMemoKeepsNoEnds wants nothing kept of a cell that no other turn has: one
// with the end of the conversation.
func TestMemoKeepsNoEnds(t *testing.T) {
	f := func(t *testing.T, cell, want int) {
		t.Helper()
		m := testMemo(t, cell, 64)
		body := conversation(20)
		body = append(body, bytes.Repeat([]byte{' '}, cell)...)
		checkMemo(t, new(Request), m, APIChat, body, 64, 0)
		if got := m.young.count; got != want {
			t.Errorf("cells of %d bytes: %d entries, want %d", cell, got, want)
		}
	}
	size := len(conversation(20))
	f(t, size, 0)
	f(t, size/2, 1)
	f(t, 1024, size/1024)
}

// TestMemoForgets wants a Memo to stay within its bounds, and what is in use to stay in it.
func TestMemoForgets(t *testing.T) {
	m := testMemo(t, 64, 64)
	hot := conversation(20)
	var r Request
	for i := range 5 * memoEntries / 100 {
		cold := conversation(40)
		copy(cold[len(`{"messages":[{"role":"`):], fmt.Sprintf("%04x", i))
		checkMemo(t, &r, m, APIChat, cold, 64, 0)
		checkMemo(t, &r, m, APIChat, hot, 64, 0)
		if i > 0 && r.prompt.recall.hole == 0 {
			t.Fatalf("after %d bodies the one in use is forgotten, want it kept", i)
		}
	}
	for _, g := range []*generation{m.young, m.old} {
		if g.count == 0 || g.count > memoEntries || len(g.chunks) > memoChunks {
			t.Errorf("%d entries in %d chunks, want 1 to %d in at most %d", g.count, len(g.chunks), memoEntries, memoChunks)
		}
	}
}

// TestRouterMemo wants a Memo only where nothing reads the tokens themselves, and
// a request that comes with one to be hashed whole by a router without.
func TestRouterMemo(t *testing.T) {
	clock := newTestClock()
	f := func(t *testing.T, yaml string, want bool) *Router {
		t.Helper()
		r := newTestRouter(t, readyFleet(t, clock, "a", "b"), yaml)
		if got := r.Memo() != nil; got != want {
			t.Errorf("%s: has a Memo: %v, want %v", yaml, got, want)
		}
		return r
	}
	if newMemo() == nil {
		t.Skip("no fast AES here")
	}
	plain := f(t, "plugins:\n- type: prefix-cache-scorer\n", true)
	hashed := f(t, "plugins:\n- type: prefix-cache-scorer\n- type: consistent-hash-scorer\n", false)
	body := conversation(400)
	var with, without Request
	for range 2 {
		for _, q := range []*Request{&with, &without} {
			q.Reset()
			q.API, q.Body = APIChat, body
			if q == &with {
				q.Memo = plain.Memo()
			}
			if err := q.Parse(); err != nil {
				t.Fatalf("Parse: %v, want no error", err)
			}
		}
		plain.prepare(&with, nil)
		plain.prepare(&without, nil)
		if got, want := with.work.chains[0].hashes, without.work.chains[0].hashes; !slices.Equal(got, want) {
			t.Fatalf("hashes %x, want %x", got, want)
		}
	}
	if with.prompt.recall.hole == 0 {
		t.Fatalf("no head was found, want one")
	}
	hashed.prepare(&with, nil)
	if got, want := with.Tokens, without.Tokens; !bytes.Equal(got, want) {
		t.Errorf("tokens for the router without a Memo: %.80q, want %.80q", got, want)
	}
}

func BenchmarkMemo(b *testing.B) {
	for _, kb := range []int{16, 64, 512} {
		body := chatBody(rand.New(rand.NewPCG(1, uint64(kb))), kb<<10)
		for _, memo := range []bool{false, true} {
			b.Run(fmt.Sprintf("%dKB/%v", kb, memo), func(b *testing.B) {
				var m *Memo
				if memo {
					m = testMemo(b, memoCell, 256)
				}
				a := approxProducer{block: 64, maxBlock: 2048}
				var ch chain
				var r Request
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					r.Reset()
					r.API, r.Body, r.Memo = APIChat, body, m
					if err := r.Parse(); err != nil {
						b.Fatalf("Parse: %v, want no error", err)
					}
					(&Estimator{}).Tokenize(&r)
					ch.reset()
					a.Prepare(&r, &ch)
				}
			})
		}
	}
}
