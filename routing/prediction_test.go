package routing

import (
	"fmt"
	"math"
	"slices"
	"testing"
)

// answer routes a prompt of n blocks of 64 tokens, says that the engine found cached
// of its tokens, and returns the lease.
func answer(t *testing.T, r *Router, id byte, blocks int, cached int64) *Lease {
	t.Helper()
	l, err := r.Route(promptOf("m", id, blocks))
	if err != nil {
		t.Fatal(err)
	}
	l.Usage(int64(blocks*64), cached)
	l.Done(Completed)
	return l
}

func TestPredictionStats(t *testing.T) {
	f := newTestClock()
	fleet := readyFleet(t, f, "a")
	r := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n")
	answer(t, r, 1, 10, 0)   // predicted 0
	answer(t, r, 1, 10, 576) // predicted 640
	answer(t, r, 1, 10, 640) // predicted 640
	got := fleet.PredictionStats()
	errs := 0.0
	for _, e := range []float64{64.0 / 640, 0} {
		errs += errorAlpha * (e - errs)
	}
	want := []PredictionStats{{Producer: "approx-prefix-cache-producer", Endpoint: fleet.Endpoints()[0],
		Answers: 3, PromptTokens: 1920, PredictedTokens: 1280, CachedTokens: 1216, AbsoluteError: 64, Error: errs}}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	// What says nothing does not count.
	l, err := r.Route(promptOf("m", 1, 10))
	if err != nil {
		t.Fatal(err)
	}
	l.Usage(-1, -1)
	l.Usage(640, -1)
	l.Usage(0, 0)
	l.Done(Completed)
	if got := fleet.PredictionStats(); !slices.Equal(got, want) {
		t.Errorf("after answers without figures: got %+v, want %+v", got, want)
	}
	// They stay over a reload, and go with their producer and with their endpoint.
	var current Current
	current.Store(newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n"))
	if got := fleet.PredictionStats(); !slices.Equal(got, want) {
		t.Errorf("after a reload: got %+v, want %+v", got, want)
	}
	fleet.Update(specs("b"))
	if got := fleet.PredictionStats(); len(got) != 0 {
		t.Errorf("of an endpoint in the slot of another one: got %+v, want none", got)
	}
	answer(t, newTestRouter(t, readyFleet(t, f, "b"), ""), 1, 1, 0)
	current.Store(newTestRouter(t, fleet, "plugins:\n- {type: queue-scorer}\n"))
	if got := fleet.PredictionStats(); len(got) != 0 {
		t.Errorf("without the producer: got %+v, want none", got)
	}
}

// TestUnclearAnswersJudgeNothing: what vLLM tells of one of several prompts or
// samples, or of a prompt for which it reads no cache, is not about the prediction.
func TestUnclearAnswersJudgeNothing(t *testing.T) {
	f := func(t *testing.T, body string, want uint64) {
		t.Helper()
		fleet := readyFleet(t, newTestClock(), "a")
		r := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n")
		req := &Request{API: APICompletions, Body: []byte(body)}
		if err := req.Parse(); err != nil {
			t.Fatal(err)
		}
		l, err := r.Route(req)
		if err != nil {
			t.Fatal(err)
		}
		l.Usage(400, 96)
		l.Done(Completed)
		if got := fleet.PredictionStats()[0].Answers; got != want {
			t.Errorf("%s: got %d answers that count, want %d", body, got, want)
		}
	}
	f(t, `{"prompt":"a"}`, 1)
	f(t, `{"prompt":["a"],"n":1,"echo":false,"prompt_logprobs":null}`, 1)
	f(t, `{"prompt":"a","n":2,"n":1}`, 1)
	f(t, `{"prompt":"a","n":null,"logprobs":3}`, 1)
	f(t, `{"prompt":["a","b"]}`, 0)
	f(t, `{"prompt":"a","n":2}`, 0)
	f(t, `{"prompt":"a","echo":true,"logprobs":1}`, 0)
	f(t, `{"prompt":"a","prompt_logprobs":0}`, 0)
}

// TestRestartIsNoticed: a replica that has lost its cache is believed to be empty
// within a few answers, and what it has computed since is remembered.
func TestRestartIsNoticed(t *testing.T) {
	f := func(t *testing.T, name string, found func(predicted int64) int64, wantDropped uint64, wantAnswers int) {
		t.Helper()
		clock := newTestClock()
		fleet := readyFleet(t, clock, "a")
		r := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n")
		for id := range byte(40) {
			answer(t, r, id, 20, 0)
		}
		before := fleet.IndexBlocks(fleet.Endpoints()[0])
		n, dropped := 0, uint64(0)
		for id := byte(0); id < 12 && dropped == 0; id++ {
			l := answer(t, r, id, 20, found(20*64))
			if l.PredictedTokens() != 20*64 {
				t.Fatalf("%s: answer %d: got %d tokens predicted, want %d", name, n, l.PredictedTokens(), 20*64)
			}
			n++
			dropped = fleet.PredictionStats()[0].Dropped
		}
		if dropped != wantDropped || dropped > 0 && n != wantAnswers {
			t.Errorf("%s: got dropped %d times after %d answers, want %d after %d", name, dropped, n, wantDropped, wantAnswers)
		}
		after := fleet.IndexBlocks(fleet.Endpoints()[0])
		if dropped > 0 && after != 20 {
			t.Errorf("%s: got %d blocks, want the 20 of the last prompt", name, after)
		}
		if dropped == 0 && after != before {
			t.Errorf("%s: got %d blocks, want %d still", name, after, before)
		}
	}
	f(t, "all is lost", func(int64) int64 { return 0 }, 1, 5)
	f(t, "a common head is there again", func(p int64) int64 { return p * 4 / 10 }, 1, 5)
	f(t, "all is there", func(p int64) int64 { return p }, 0, 0)
	f(t, "most is there", func(p int64) int64 { return p * 8 / 10 }, 0, 0)
	n := 0
	f(t, "half the time nothing is there", func(p int64) int64 {
		n++
		return p * int64(n%2)
	}, 0, 0)
}

// TestSmallPredictionsDisproveNothing: below two blocks or a quarter of the prompt.
func TestSmallPredictionsDisproveNothing(t *testing.T) {
	f := func(t *testing.T, predicted, prompt int64) {
		t.Helper()
		p := &prediction{}
		for i := range 20 {
			if p.disproves(predicted, prompt, 0) {
				t.Fatalf("%d of %d predicted: got disproved at answer %d, want never", predicted, prompt, i)
			}
		}
	}
	f(t, disproofTokens-1, disproofTokens)
	f(t, 200, 1000)
	f(t, 0, 1000)
}

// TestAnswersFromBeforeTheDrop: prompts in flight when the index is dropped are
// remembered when they are answered, and disprove nothing again.
func TestAnswersFromBeforeTheDrop(t *testing.T) {
	fleet := readyFleet(t, newTestClock(), "a")
	r := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n")
	for id := range byte(12) {
		answer(t, r, id, 20, 0)
	}
	var leases []*Lease
	for id := range byte(12) {
		l, err := r.Route(promptOf("m", id, 20))
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, l)
	}
	for i, l := range leases {
		l.Usage(20*64, 0)
		l.Done(Completed)
		blocks := fleet.IndexBlocks(l.Endpoint)
		if want := 20 * max(1, i-3); i >= 4 && blocks != want {
			t.Errorf("answer %d: got %d blocks, want %d", i, blocks, want)
		}
	}
	if got := fleet.PredictionStats()[0].Dropped; got != 1 {
		t.Errorf("got dropped %d times, want once", got)
	}
}

// TestPreciseIsNotDistrusted: on several ranks an answer may come from the wrong one.
func TestPreciseIsNotDistrusted(t *testing.T) {
	p := newPrecise(t, preciseBlock4, "a")
	p.index().Stored(p.endpoint("a"), 0, event(1, 4, count(0, 400)))
	for range 20 {
		l, err := p.router.Route(exactRequest("m", "", count(0, 401)))
		if err != nil {
			t.Fatal(err)
		}
		l.Usage(401, 0)
		l.Done(Completed)
	}
	if got := p.stats("a").Blocks; got != 100 {
		t.Errorf("got %d blocks, want 100", got)
	}
	if s := p.fleet.PredictionStats()[0]; s.Dropped != 0 || s.Answers != 20 || s.AbsoluteError != 20*400 || s.Error < .99 {
		t.Errorf("got %+v, want 20 answers that were 400 tokens off, and nothing dropped", s)
	}
}

// TestPreciseLearnsNoMarks: what the engine's events tell is not corrected by what it
// found the last time.
func TestPreciseLearnsNoMarks(t *testing.T) {
	p := newPrecise(t, preciseBlock4, "a", "b")
	p.index().Stored(p.endpoint("a"), 0, event(1, 4, count(0, 400)))
	for i := range 3 {
		l, err := p.router.Route(exactRequest("m", "", count(0, 401)))
		if err != nil {
			t.Fatal(err)
		}
		if got := l.PredictedTokens(); got != 400 {
			t.Errorf("request %d: got %d tokens predicted, want 400", i, got)
		}
		l.Usage(401, 398)
		l.Done(Completed)
	}
}

// TestBytesPerTokenAreLearned: what the engine makes of a model's bytes scales
// predictions and costs for that model.
func TestBytesPerTokenAreLearned(t *testing.T) {
	fleet := readyFleet(t, newTestClock(), "a")
	fleet.SetModels(fleet.Endpoints()[0], []string{"m", "n"}, true)
	r := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n")
	route := func(model string, prompt int64) *Lease {
		t.Helper()
		req := promptOf(model, 1, 100) // 25,600 bytes
		l, err := r.Route(req)
		if err != nil {
			t.Fatal(err)
		}
		l.Usage(prompt, 0)
		l.Done(Completed)
		return l
	}
	if l := route("m", 3200); l.Uncached != 6400 {
		t.Errorf("at first: got %d tokens uncached, want 6400", l.Uncached)
	}
	for range 20 {
		route("m", 3200) // 8 bytes per token
	}
	if got := fleet.BytesPerToken("m"); math.Abs(got-8) > .1 {
		t.Errorf("got %v bytes per token, want 8", got)
	}
	if got := fleet.BytesPerToken("n"); got != 4 {
		t.Errorf("another model: got %v bytes per token, want 4", got)
	}
	l, err := r.Route(promptOf("m", 1, 100))
	if err != nil {
		t.Fatal(err)
	}
	if got := l.PredictedTokens(); got < 3150 || got > 3250 {
		t.Errorf("got %d tokens predicted, want about 3200", got)
	}
	if got := l.Uncached; got < 30 || got > 34 {
		t.Errorf("got %d tokens uncached, want one block of about 32", got)
	}
	l.Done(Completed)
	fleet.SetModels(fleet.Endpoints()[0], []string{"m", "o"}, true)
	if got := fleet.BytesPerToken("m"); math.Abs(got-8) > .1 {
		t.Errorf("after another model came: got %v bytes per token, want 8 still", got)
	}
	fleet.SetModels(fleet.Endpoints()[0], nil, false)
	if got := fleet.BytesPerToken("m"); got != 4 {
		t.Errorf("without a list: got %v bytes per token, want 4", got)
	}
	route("m", 12800)
	if got := fleet.BytesPerToken("anything"); got >= 4 || got != fleet.BytesPerToken("m") {
		t.Errorf("without a list: got %v bytes per token, want the same for all, below 4", got)
	}
}

// TestTokensTeachOnlyWhereTheyWereEstimated: token ids and images say nothing of bytes.
func TestTokensTeachOnlyWhereTheyWereEstimated(t *testing.T) {
	f := func(t *testing.T, name string, api API, body string, want bool) {
		t.Helper()
		fleet := readyFleet(t, newTestClock(), "a")
		r := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n")
		req := &Request{API: api, Body: []byte(body)}
		if err := req.Parse(); err != nil {
			t.Fatal(err)
		}
		l, err := r.Route(req)
		if err != nil {
			t.Fatal(err)
		}
		l.Usage(1000, 0)
		l.Done(Completed)
		if got := fleet.BytesPerToken("m") != 4; got != want {
			t.Errorf("%s: got learned %v, want %v", name, got, want)
		}
	}
	f(t, "text", APICompletions, `{"model":"m","prompt":"text"}`, true)
	f(t, "token ids", APICompletions, `{"model":"m","prompt":[1,2,3]}`, false)
	f(t, "an image", APIChat, `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y.png"}}]}]}`, false)
	f(t, "no prompt", APIChat, `{"model":"m"}`, false)
}

func TestTokenRatioIsBounded(t *testing.T) {
	f := func(t *testing.T, bytes, tokens, want float64) {
		t.Helper()
		r := &tokenRatio{}
		for range 1000 {
			r.learn(bytes, tokens)
		}
		if got := r.bytesPer(); math.Abs(got-want) > want/50 {
			t.Errorf("%v bytes as %v tokens: got %v, want %v", bytes, tokens, got, want)
		}
	}
	f(t, 1e6, 1, mostPerToken)
	f(t, 1, 1e6, leastPerToken)
	f(t, 3000, 1000, 3)
}

// TestExplainShowsPredictions: what is expected, and how good the last answers were.
func TestExplainShowsPredictions(t *testing.T) {
	fleet := readyFleet(t, newTestClock(), "a")
	r := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n")
	f := func(t *testing.T, want string) {
		t.Helper()
		ex, err := r.Explain(promptOf("m", 1, 10))
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(ex.Replicas[0].Scores[0].Terms); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	f(t, "[{predicted_tokens 0}]")
	answer(t, r, 1, 10, 0)
	answer(t, r, 1, 10, 320)
	f(t, "[{predicted_tokens 640} {prediction_error 0.05}]")
}

// TestNothingIsLearnedWithoutAutoTune: the parameter says so.
func TestNothingIsLearnedWithoutAutoTune(t *testing.T) {
	fleet := readyFleet(t, newTestClock(), "a")
	r := newTestRouter(t, fleet, "plugins:\n- {type: prefix-cache-scorer}\n- {type: approx-prefix-cache-producer, parameters: {autoTune: false}}\n")
	for range 20 {
		answer(t, r, 1, 20, 0)
	}
	if got := fleet.PredictionStats()[0]; got.Dropped != 0 || got.AbsoluteError != 19*20*64 {
		t.Errorf("got %+v, want nothing dropped and 19 answers that were 1280 tokens off", got)
	}
}
