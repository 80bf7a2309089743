package proxy

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

// tapResult is what a tap has found.
type tapResult struct {
	Events                          int64
	Usage                           usage
	Content, Ended, Failed, Errored bool
	Boundary                        bool
}

func (t *tap) result() tapResult {
	r := tapResult{Boundary: t.boundary()}
	t.finish()
	r.Events, r.Usage, r.Content, r.Ended, r.Failed, r.Errored = t.events, t.usage, t.content, t.ended, t.failed, t.errored
	return r
}

func TestTap(t *testing.T) {
	f := func(name string, e ending, text string, want tapResult) {
		t.Run(name, func(t *testing.T) {
			var whole, bytewise tap
			whole.reset(e)
			whole.feed([]byte(text))
			if got := whole.result(); got != want {
				t.Errorf("at once: got %+v, want %+v", got, want)
			}
			bytewise.reset(e)
			first := 0
			for i := range len(text) {
				if bytewise.feed([]byte{text[i]}) {
					first++
				}
			}
			if got := bytewise.result(); got != want {
				t.Errorf("byte by byte: got %+v, want %+v", got, want)
			}
			if first > 1 {
				t.Errorf("first content: got %d times, want at most 1", first)
			}
		})
	}
	none := noUsage
	f("nothing", endingDone, "", tapResult{Usage: none, Boundary: true})
	f("comments", endingDone, ": ping\n\n: keep-alive\r\n\r\n", tapResult{Usage: none, Boundary: true})
	f("role alone is no content", endingDone, roleEvent, tapResult{Events: 1, Usage: none, Boundary: true})
	f("null content is none", endingDone, `data: {"choices":[{"delta":{"content":null,"reasoning":"","tool_calls":[ ]}}]}`+"\n\n", tapResult{Events: 1, Usage: none, Boundary: true})
	f("content", endingDone, roleEvent+event("a"), tapResult{Events: 2, Usage: none, Content: true, Boundary: true})
	for _, delta := range []string{`"reasoning_content":"x"`, `"reasoning": "x"`, `"tool_calls":[{"index":0}]`, `"content":[{"type":"text"}]`, `"refusal":"no"`} {
		f("content "+delta, endingDone, `data: {"choices":[{"delta":{`+delta+`}}]}`+"\n\n", tapResult{Events: 1, Usage: none, Content: true, Boundary: true})
	}
	f("text of a completion", endingDone, `data: {"choices":[{"text":"x"}]}`+"\n\n", tapResult{Events: 1, Usage: none, Content: true, Boundary: true})
	f("token ids", endingDone, `data: {"choices":[{"token_ids":[5]}]}`+"\n\n", tapResult{Events: 1, Usage: none, Content: true, Boundary: true})
	f("finish reason", endingDone, `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}`+"\n\n", tapResult{Events: 1, Usage: none, Content: true, Boundary: true})
	f("an escaped key is text", endingDone, `data: {"choices":[{"delta":{"role":"\"content\":\"x\""}}]}`+"\n\n", tapResult{Events: 1, Usage: none, Boundary: true})
	f("usage", endingDone, usageEvent+doneEvent, tapResult{Events: 2, Usage: usage{100, 64, 7}, Ended: true, Boundary: true})
	f("CRLF", endingDone, strings.ReplaceAll(usageEvent+doneEvent, "\n", "\r\n"), tapResult{Events: 2, Usage: usage{100, 64, 7}, Ended: true, Boundary: true})
	f("no space behind the colon", endingDone, "data:[DONE]\n\n", tapResult{Events: 1, Usage: none, Ended: true, Boundary: true})
	f("usage null", endingDone, `data: {"choices":[],"usage":null}`+"\n\n", tapResult{Events: 1, Usage: none, Boundary: true})
	f("usage in text", endingDone, `data: {"choices":[{"delta":{"content":"the \"usage\":{\"prompt_tokens\":5} key"}}]}`+"\n\n", tapResult{Events: 1, Usage: none, Content: true, Boundary: true})
	f("the last usage counts", endingDone, `data: {"usage":{"prompt_tokens":5,"completion_tokens":1}}`+"\n\n"+`data: {"usage":{"prompt_tokens":5,"completion_tokens":3}}`+"\n\n", tapResult{Events: 2, Usage: usage{5, -1, 3}, Boundary: true})
	f("numbers as strings", endingDone, `data: {"usage":{"prompt_tokens":"12","completion_tokens":"3"}}`+"\n\n", tapResult{Events: 1, Usage: usage{12, -1, 3}, Boundary: true})
	f("details first", endingDone, `data: {"usage":{"prompt_tokens_details":{"audio":null,"cached_tokens":8,"x":[{"a":1}]},"prompt_tokens":12,"completion_tokens":3}}`+"\n\n", tapResult{Events: 1, Usage: usage{12, 8, 3}, Boundary: true})
	f("zero cached", endingDone, `data: {"usage":{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens":0}}}`+"\n\n", tapResult{Events: 1, Usage: usage{12, 0, -1}, Boundary: true})
	f("messages", endingMessages, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":20,\"cache_read_input_tokens\":16,\"output_tokens\":0}}}\n\n"+
		"event: content_block_start\ndata: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n"+
		"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"hi\"}}\n\n"+
		"event: message_delta\ndata: {\"usage\":{\"input_tokens\":0,\"output_tokens\":5}}\n\n"+
		"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n", tapResult{Events: 5, Usage: usage{36, 16, 5}, Content: true, Ended: true, Boundary: true})
	f("messages tell what is cached at the end", endingMessages, "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":1034,\"output_tokens\":0}}}\n\n"+
		"data: {\"type\":\"message_delta\",\"usage\":{\"input_tokens\":10,\"output_tokens\":3,\"cache_creation_input_tokens\":32,\"cache_read_input_tokens\":992}}\n\n",
		tapResult{Events: 2, Usage: usage{1034, 992, 3}, Boundary: true})
	f("messages without event lines", endingMessages, "data: {\"type\":\"content_block_delta\"}\n\ndata: {\"type\": \"message_stop\"}\n\n", tapResult{Events: 2, Usage: none, Content: true, Ended: true, Boundary: true})
	f("message_stop elsewhere", endingDone, "event: message_stop\ndata: {}\n\n", tapResult{Events: 1, Usage: none, Boundary: true})
	f("responses", endingResponses, "event: response.output_text.delta\ndata: {\"delta\":\"x\"}\n\nevent: response.completed\ndata: {\"response\":{\"output\":[{\"type\":\"message\"}],\"usage\":{\"input_tokens\":9,\"input_tokens_details\":{\"cached_tokens\":3},\"output_tokens\":2}}}\n\n",
		tapResult{Events: 2, Usage: usage{9, 3, 2}, Content: true, Ended: true, Boundary: true})
	f("responses know no [DONE]", endingResponses, doneEvent, tapResult{Events: 1, Usage: none, Boundary: true})
	f("response.failed", endingResponses, "event: response.failed\ndata: {}\n\n", tapResult{Events: 1, Usage: none, Ended: true, Errored: true, Boundary: true})
	f("cohere", endingCohere, "data: {\"type\":\"content-delta\"}\n\ndata: {\"type\":\"message-end\"}\n\n", tapResult{Events: 2, Usage: none, Content: true, Ended: true, Boundary: true})
	f("unknown API", endingNone, "data: x\n\n", tapResult{Events: 1, Usage: none, Content: true, Boundary: true})
	f("engine error", endingDone, `data: {"error": {"message":"x","code":500}}`+"\n\n"+doneEvent, tapResult{Events: 2, Usage: none, Ended: true, Failed: true, Errored: true, Boundary: true})
	f("error as text", endingDone, `data: {"error":"x"}`+"\n\n", tapResult{Events: 1, Usage: none, Failed: true, Errored: true, Boundary: true})
	f("error code beside it", endingDone, `data: {"error":{"message":"x"},"code":400}`+"\n\n", tapResult{Events: 1, Usage: none, Errored: true, Boundary: true})
	f("bad request", endingDone, `data: {"error":{"message":"x","type":"BadRequestError"}}`+"\n\n", tapResult{Events: 1, Usage: none, Errored: true, Boundary: true})
	f("error event", endingMessages, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\"}}\n\n", tapResult{Events: 1, Usage: none, Errored: true, Boundary: true})
	f("within an event", endingDone, "data: {", tapResult{Events: 1, Usage: none})
	f("between lines of an event", endingDone, "event: x\n", tapResult{Usage: none})
	f("id and retry", endingDone, "id: 1\nretry: 5\ndata: {}\n\n", tapResult{Events: 1, Usage: none, Boundary: true})
	long := strings.Repeat("x", 3*keptPart)
	f("usage at the end of a long event", endingDone, `data: {"choices":[{"text":"`+long+`"}],"usage":{"prompt_tokens":5}}`+"\n\n", tapResult{Events: 1, Usage: usage{5, -1, -1}, Content: true, Boundary: true})
	f("usage at its begin", endingDone, `data: {"usage":{"prompt_tokens":5},"x":"`+long+`"}`+"\n\n", tapResult{Events: 1, Usage: usage{5, -1, -1}, Boundary: true})
	f("usage lost in its middle", endingDone, `data: {"x":"`+long+`","usage":{"prompt_tokens":5},"y":"`+long+`"}`+"\n\n", tapResult{Events: 1, Usage: none, Boundary: true})
}

// TestTapMemory: a line without an end costs a bounded amount.
func TestTapMemory(t *testing.T) {
	var x tap
	x.reset(endingDone)
	piece := []byte(strings.Repeat("x", 5000))
	for range 20_000 { // 100 MB
		x.feed(piece)
	}
	if got, most := cap(x.line.buf), 8*keptPart; got > most {
		t.Errorf("memory: got %d bytes, want at most %d", got, most)
	}
	x.reset(endingDone)
	if got := cap(x.line.buf); got > largestKept {
		t.Errorf("memory after a reset: got %d bytes, want at most %d", got, largestKept)
	}
}

func TestKeptText(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		text := make([]byte, r.IntN(6*keptPart))
		for i := 0; i < len(text); i += 64 {
			text[i] = byte(r.IntN(256))
		}
		var k keptText
		for rest := text; len(rest) > 0; {
			n := min(1+r.IntN(1+r.IntN(3*keptPart)), len(rest))
			k.add(rest[:n])
			rest = rest[n:]
		}
		begin, end := k.parts()
		wantBegin, wantEnd := textParts(text, int64(len(text)))
		if string(begin) != string(wantBegin) || string(end) != string(wantEnd) {
			t.Fatalf("text of %d bytes: got parts of %d and %d bytes, want %d and %d of the same text", len(text), len(begin), len(end), len(wantBegin), len(wantEnd))
		}
	}
}

func FuzzSSETap(f *testing.F) {
	for _, seed := range []string{
		roleEvent + event("a") + usageEvent + doneEvent, strings.ReplaceAll(usageEvent, "\n", "\r\n") + ": ping\r\n\r\n", "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
		"data: {\"usage\":{\"prompt_tokens\":\"12\",\"x\":{\"cached_tokens\":3", "data: {\"error\":{\"code\":500}}\n\n", "\r\n\r\n:\ndata\ndata:\n\n", `data: {"usage":{{{{{{{{{{{{`,
	} {
		f.Add([]byte(seed), uint8(0), uint64(1))
	}
	f.Fuzz(func(t *testing.T, text []byte, e uint8, seed uint64) {
		kind := ending(e % 5)
		var whole, split tap
		whole.reset(kind)
		before := string(text)
		whole.feed(text)
		want := whole.result()
		r := rand.New(rand.NewPCG(seed, seed))
		split.reset(kind)
		for rest := text; len(rest) > 0; {
			n := min(1+r.IntN(1+r.IntN(40)), len(rest))
			split.feed(rest[:n])
			rest = rest[n:]
		}
		if got := split.result(); !reflect.DeepEqual(got, want) {
			t.Errorf("in pieces: got %+v, want %+v as at once", got, want)
		}
		if string(text) != before {
			t.Errorf("the bytes were changed")
		}
	})
}

func BenchmarkTap(b *testing.B) {
	one := []byte(event("some words"))
	var x tap
	x.reset(endingDone)
	x.feed(one)
	b.SetBytes(int64(len(one)))
	b.ReportAllocs()
	for b.Loop() {
		x.feed(one)
	}
	if x.events < 2 {
		b.Fatal(fmt.Sprint(x.events))
	}
}
