package bench

import (
	"strings"
	"testing"
)

func TestAnswerReader(t *testing.T) {
	const stream = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" +
		"b\r\ndata: {1}\n\n\r\n5\r\ndata:\r\n6;x=y\r\n {2}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
	f := func(t *testing.T, in string, wantDone bool, wantEvents int, wantErr string) {
		// Whole, and cut at every place: the result may not depend on how bytes arrive.
		for cut := 0; cut <= len(in); cut++ {
			r := answerReader{stream: strings.Contains(in, "chunked")}
			done, err := r.feed([]byte(in[:cut]))
			if err == nil && cut < len(in) {
				done, err = r.feed([]byte(in[cut:]))
			}
			if err == nil && done {
				err = r.whole(wantEvents)
			}
			got := ""
			if err != nil {
				got = err.Error()
			}
			if (wantErr == "") != (got == "") || !strings.Contains(got, wantErr) {
				t.Fatalf("cut at %d: got error %q, want %q", cut, got, wantErr)
			}
			if err == nil && done != wantDone {
				t.Fatalf("cut at %d: got done %v, want %v", cut, done, wantDone)
			}
			if err == nil && r.events() != wantEvents {
				t.Fatalf("cut at %d: got %d events, want %d", cut, r.events(), wantEvents)
			}
		}
	}
	const sized = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"
	t.Run("sized", func(t *testing.T) { f(t, sized+"{ }", true, 0, "") })
	t.Run("short", func(t *testing.T) { f(t, sized+"{ ", false, 0, "") })
	t.Run("long", func(t *testing.T) { f(t, sized+"{ }!", false, 0, errMoreThanAnswer.Error()) })
	t.Run("chunked", func(t *testing.T) { f(t, stream, true, 3, "") })
	t.Run("cut stream", func(t *testing.T) { f(t, stream[:len(stream)-5], false, 3, "") })
	t.Run("missing events", func(t *testing.T) { f(t, strings.Replace(stream, "data: {1}", "dumm: {1}", 1), true, 3, "") })
	t.Run("no terminator", func(t *testing.T) {
		f(t, strings.Replace(stream, "[DONE]", "[OVER]", 1), true, 3, `ends with "data: [OVER]`)
	})
	t.Run("fewer events", func(t *testing.T) {
		f(t, strings.Replace(stream, "b\r\ndata: {1}\n\n", "b\r\ndata: {1} .", 1), true, 3, "a stream of 2 events")
	})
	t.Run("status", func(t *testing.T) { f(t, strings.Replace(sized, "200 OK", "503 Full", 1), false, 0, "503 Full") })
	t.Run("old", func(t *testing.T) { f(t, strings.Replace(sized, "1.1", "1.0", 1), false, 0, "HTTP/1.0") })
	t.Run("no length", func(t *testing.T) { f(t, "HTTP/1.1 200 OK\r\nserver: x\r\n\r\n", false, 0, "unknown or no length") })
	t.Run("bad length", func(t *testing.T) {
		f(t, "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", false, 0, "content-length: x")
	})
	t.Run("bad chunk", func(t *testing.T) { f(t, strings.Replace(stream, "b\r\n", "g\r\n", 1), false, 0, `chunk size "g"`) })
	t.Run("short chunk", func(t *testing.T) { f(t, strings.Replace(stream, "b\r\n", "3\r\n", 1), false, 0, "behind a chunk") })
	t.Run("long head", func(t *testing.T) {
		r := answerReader{}
		_, err := r.feed([]byte(sized[:20] + strings.Repeat("x", maxAnswerHead)))
		if err == nil || !strings.Contains(err.Error(), "head of more than") {
			t.Errorf("got %v, want an error about the head", err)
		}
	})
	t.Run("long line", func(t *testing.T) {
		r := answerReader{stage: stageSize}
		_, err := r.feed([]byte(strings.Repeat("1", maxAnswerHead+1)))
		if err == nil || !strings.Contains(err.Error(), "line of more than") {
			t.Errorf("got %v, want an error about the line", err)
		}
	})
	t.Run("empty", func(t *testing.T) {
		r := answerReader{}
		if err := r.whole(0); err == nil {
			t.Error("got no error, want one: the answer is empty")
		}
	})
	t.Run("closing", func(t *testing.T) {
		r := answerReader{}
		done, err := r.feed([]byte("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\n1"))
		if !done || err != nil || !r.last {
			t.Errorf("got done %v, error %v, last %v, want true, none, true", done, err, r.last)
		}
	})
}
