package fakevllm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	chatPath   = "/v1/chat/completions"
	streamBody = `{` + hello + `,"max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}`
	plainBody  = `{` + hello + `,"max_tokens":4}`
)

// struck returns how often a fault has struck.
func struck(s *Server, name string) int64 { return s.Stats().Faults[name] }

func TestFaultRefuse(t *testing.T) {
	s := start(t, Options{})
	idle := dial(t, s)
	_, _ = io.Copy(io.Discard, ask(t, idle, "GET", "/version", "").Body)
	refused := func() bool {
		c, err := net.Dial("tcp", s.Addr())
		if err == nil {
			_ = c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	}
	set := func(f Faults) {
		t.Helper()
		if err := s.SetFaults(f); err != nil {
			t.Fatal(err)
		}
	}
	set(Faults{Refuse: true})
	if !refused() {
		t.Error("refuse: got a connection, want none")
	}
	if _, err := idle.Read(make([]byte, 1)); err == nil {
		t.Error("an idle connection: got data, want its end")
	}
	set(Faults{Refuse: true}) // twice is once
	set(Faults{})
	if status, _ := call(t, s, "GET", "/version", ""); status != 200 {
		t.Errorf("taken back: got %d, want 200", status)
	}
	set(Faults{Refuse: true, RefuseFor: Duration(time.Hour)})
	set(Faults{Refuse: true, RefuseFor: Duration(10 * time.Millisecond), CRLF: true})
	eventually(t, "a listener again", func() bool { return !refused() })
	if f := s.Faults(); f.Refuse || !f.CRLF {
		t.Errorf("behind refuse_for: got %+v, want the other faults", f)
	}
	set(Faults{Refuse: true, RefuseFor: Duration(time.Hour)}) // Close ends the wait
	s.Close()
	if err := s.SetFaults(Faults{}); err == nil {
		t.Error("closed server: got no error")
	}
}

// TestFaultBreak sends one request per case and compares what came and how it
// ended.
func TestFaultBreak(t *testing.T) {
	const (
		hang  = "hang"
		reset = "reset"
		eof   = "eof"
		some  = -1 // as many events as steps were seen apart
	)
	f := func(name string, faults Faults, body string, wantEvents int, wantText, wantEnd string) {
		t.Helper()
		s := start(t, Options{Faults: faults})
		c := dial(t, s)
		send(t, c, "POST", chatPath, body)
		var got []byte
		end := eof
		if wantEnd == hang {
			eventually(t, "the stall", func() bool { return struck(s, "break_stall") == 1 })
			_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond)) // nothing more is under way
		}
		got, err := io.ReadAll(c)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			end = hang
		case errors.Is(err, syscall.ECONNRESET):
			end = reset
		case err != nil:
			end = err.Error()
		}
		n := len(events(string(got)))
		if end != wantEnd || !strings.Contains(string(got), wantText) || n != wantEvents && wantEvents != some {
			t.Errorf("%s: got %d events, end %s, in %q, want %d, %s, %q", name, n, end, got, wantEvents, wantEnd, wantText)
		}
		if wantEvents < 3 && strings.Contains(string(got), "\r\n0\r\n\r\n") {
			t.Errorf("%s: got a last chunk in %q, want none", name, got)
		}
		_ = c.Close()
		eventually(t, "the end of the request", func() bool { st := s.Stats(); return st.InFlight == 0 && st.Aborted+st.Cut == 1 })
		if st := s.Stats(); wantEnd == hang && st.Aborted != 1 || wantEnd != hang && st.Cut != 1 {
			t.Errorf("%s: got %d aborted, %d cut", name, st.Aborted, st.Cut)
		}
	}
	f("accept and never answer", Faults{Break: BreakStall, BreakAfter: -1}, streamBody, 0, "", hang)
	f("stall behind the head", Faults{Break: BreakStall}, streamBody, 0, "HTTP/1.1 200 OK\r\n", hang)
	f("stall behind two events", Faults{Break: BreakStall, BreakAfter: 2}, streamBody, 2, `"role"`, hang)
	f("never answer, plain", Faults{Break: BreakStall, BreakAfter: -1}, plainBody, 0, "", hang)
	f("stall behind the head, plain", Faults{Break: BreakStall}, plainBody, 0, "\r\n\r\n", hang)
	f("stall within the body, plain", Faults{Break: BreakStall, BreakAfter: 1}, plainBody, 0, `{"id":`, hang)
	f("reset before the head", Faults{Break: BreakReset, BreakAfter: -1}, streamBody, 0, "", reset)
	f("reset behind two events", Faults{Break: BreakReset, BreakAfter: 2}, streamBody, 2, `"role"`, reset)
	f("reset, plain", Faults{Break: BreakReset, BreakAfter: 1}, plainBody, 0, `{"id":`, reset)
	f("close before the head", Faults{Break: BreakClose, BreakAfter: -1}, streamBody, 0, "", eof)
	f("close behind the head", Faults{Break: BreakClose}, streamBody, 0, "transfer-encoding: chunked", eof)
	f("close behind two events", Faults{Break: BreakClose, BreakAfter: 2}, streamBody, 2, `"role"`, eof)
	f("close within the body, plain", Faults{Break: BreakClose, BreakAfter: 1}, plainBody, 0, `{"id":`, eof)
	f("error behind two events", Faults{Break: BreakError, BreakAfter: 2}, streamBody, 4, `"code":500}}`+"\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", eof)
	f("error, plain", Faults{Break: BreakError, BreakAfter: 1}, plainBody, 0, "HTTP/1.1 500 Internal Server Error\r\n", eof)
	f("error before the head", Faults{Break: BreakError, BreakAfter: -1}, streamBody, 0, "HTTP/1.1 500 Internal Server Error\r\n", eof)
	f("short plain body", Faults{ExtraLength: 900}, plainBody, 0, `"metrics":null}`, eof)
	f("short stream", Faults{ExtraLength: 900}, streamBody, some, "content-length: 1049476\r\n", eof)

	s := start(t, Options{Faults: Faults{Break: BreakStall, BreakAfter: 1, BreakFor: Duration(time.Millisecond), BreakTimes: 1}})
	for i := range 3 { // the stall ends, and there is one
		for _, body := range []string{streamBody, plainBody} {
			if status, doc := call(t, s, "POST", chatPath, body); status != 200 || !strings.Contains(doc, `"finish_reason":"length"`) {
				t.Errorf("answer %d: got %d %s", i, status, doc)
			}
		}
	}
	if got := struck(s, "break_stall"); got != 1 {
		t.Errorf("break_times 1: got %d stalls", got)
	}
	s = start(t, Options{Faults: Faults{Break: BreakStall, BreakFor: Duration(time.Millisecond)}})
	if status, doc := call(t, s, "POST", chatPath, plainBody); status != 200 || !json.Valid([]byte(doc)) {
		t.Errorf("a stall that ends: got %d %s", status, doc)
	}
}

func TestFaultStatus(t *testing.T) {
	f := func(faults Faults, path, body string, status int, want string) {
		t.Helper()
		s := start(t, Options{Faults: faults})
		got, doc := call(t, s, "POST", path, body)
		if got != status || !strings.Contains(doc, want) {
			t.Errorf("%+v: got %d %s, want %d %s", faults, got, doc, status, want)
		}
		if st := s.Stats(); st.Executed != 0 {
			t.Errorf("%+v: got %d executed, want 0", faults, st.Executed)
		}
	}
	f(Faults{Status: 500}, chatPath, plainBody, 500, `"type":"InternalServerError"`)
	f(Faults{Status: 503}, chatPath, streamBody, 503, `"type":"ServiceUnavailableError","param":null,"code":503`)
	f(Faults{Status: 429}, chatPath, plainBody, 429, `"type":"Too Many Requests"`)
	f(Faults{Status: 401}, chatPath, plainBody, 401, `{"error":"Unauthorized"}`)
	f(Faults{Status: 529}, "/v1/messages", `{"max_tokens":1,`+hello+`}`, 529, `{"type":"error","error":`)
	f(Faults{Routes: map[string]int{"/tokenize": 404, chatPath + "/render": 403}}, "/tokenize", `{}`, 404, `"NotFoundError"`)
	f(Faults{Routes: map[string]int{"/tokenize": 404, chatPath + "/render": 403}}, chatPath+"/render", `{}`, 403, `"Forbidden"`)

	s := start(t, Options{Faults: Faults{Status: 503, StatusTimes: 2, RetryAfter: 7}})
	c := dial(t, s)
	r := bufio.NewReader(c)
	for i, want := range []int{503, 503, 200, 200} { // on one connection
		send(t, c, "POST", chatPath, plainBody)
		resp := head(t, r)
		_, _ = io.Copy(io.Discard, resp.Body)
		if after := resp.Header.Get("Retry-After"); resp.StatusCode != want || (after == "7") != (want == 503) {
			t.Errorf("answer %d: got %d, retry-after %q, want %d", i, resp.StatusCode, after, want)
		}
	}
	if got := struck(s, "status"); got != 2 {
		t.Errorf("struck: got %d, want 2", got)
	}
	s = start(t, Options{Faults: Faults{Health: 503}})
	if status, body := call(t, s, "GET", "/health", ""); status != 503 || body != "" || struck(s, "health") != 1 {
		t.Errorf("health: got %d %q", status, body)
	}
}

func TestFaultBodyLimit(t *testing.T) {
	s := start(t, Options{Faults: Faults{BodyLimit: 1000}})
	c := dial(t, s)
	_, _ = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 8000000\r\n\r\n", chatPath)
	r := bufio.NewReader(c)
	resp := head(t, r) // the body is not even sent
	doc, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 413 || !resp.Close || at(t, string(doc), "error", "code") != 413.0 {
		t.Errorf("got %v, %d, %s, want 413 and close", err, resp.StatusCode, doc)
	}
	if _, err := r.ReadByte(); err != io.EOF {
		t.Errorf("behind it: got %v, want EOF", err)
	}
	if status, _ := call(t, s, "POST", chatPath, plainBody); status != 200 || struck(s, "body_limit") != 1 {
		t.Errorf("a small body: got %d, struck %d, want 200, 1", status, struck(s, "body_limit"))
	}
}

func TestFaultMetrics(t *testing.T) {
	nine, zero := 9.0, 0.0
	f := func(faults Faults, status int, want, not string) {
		t.Helper()
		s := start(t, Options{Faults: faults})
		got, page := call(t, s, "GET", "/metrics", "")
		if got != status || !strings.Contains(page, want) || not != "" && strings.Contains(page, not) {
			t.Errorf("%+v: got %d, want %d with %s and without %s:\n%.900s", faults, got, status, want, not, page)
		}
		if faults.Metrics != "" && struck(s, "metrics_"+faults.Metrics) != 1 {
			t.Errorf("%s: got %v, want one strike", faults.Metrics, s.Stats().Faults)
		}
	}
	const waiting, kv = "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc{"
	f(Faults{}, 200, waiting+`engine="0",model_name="fake"} 0.0`+"\n", "gpu_cache")
	f(Faults{Metrics: PageMissing}, 404, `{"detail":"Not Found"}`, "")
	f(Faults{Metrics: PageDenied}, 401, "Unauthorized", "")
	f(Faults{Metrics: PageBroken}, 500, "Internal", "")
	f(Faults{Metrics: PageGarbage}, 200, "not a page", "")
	f(Faults{Metrics: MetricsOld}, 200, `vllm:gpu_cache_usage_perc{engine="0",model_name="fake"} 0.0`, kv)
	f(Faults{Metrics: MetricsBoth}, 200, "vllm:gpu_cache_usage_perc{", "")
	f(Faults{Metrics: MetricsBoth}, 200, kv, "")
	f(Faults{Metrics: MetricsNaN}, 200, kv+`engine="0",model_name="fake"} NaN`, "")
	f(Faults{Metrics: MetricsNone}, 200, "vllm:prompt_tokens_total", waiting)
	f(Faults{Metrics: MetricsTwoEngines, MetricsWaiting: &nine}, 200, waiting+`engine="0",model_name="fake"} 0.0`+"\n"+waiting+`engine="1",model_name="fake"} 9.0`, "")
	f(Faults{Metrics: MetricsTwoEngines}, 200, `engine="1",gpu_memory_utilization`, "")
	f(Faults{Metrics: MetricsTwoModels, MetricsKVUsage: &zero}, 200, kv+`engine="0",model_name="other"} 1.0`, "")
	f(Faults{MetricsWaiting: &nine, MetricsRunning: &nine, MetricsKVUsage: &nine}, 200, `vllm:num_requests_running{engine="0",model_name="fake"} 9.0`, "} 0.5")
	f(Faults{MetricsDelay: Duration(time.Millisecond)}, 200, waiting, "")
}

// TestFaultHang asks for pages that never come, and leaves.
func TestFaultHang(t *testing.T) {
	f := func(name string, faults Faults, path string) {
		t.Helper()
		s := start(t, Options{Faults: faults})
		c := dial(t, s)
		send(t, c, "GET", path, "")
		eventually(t, name, func() bool { return struck(s, name) == 1 })
		if err := c.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: got %d bytes, %v, want none", name, n, err)
		}
		_ = c.Close()
		eventually(t, "no connection", func() bool { return s.Stats().Open == 0 })
	}
	f("metrics_hang", Faults{Metrics: PageHang}, "/metrics")
	f("metrics_delay", Faults{MetricsDelay: Duration(time.Hour)}, "/metrics")
	f("models_hang", Faults{Models: PageHang}, "/v1/models")
}

func TestFaultModels(t *testing.T) {
	f := func(kind string, status int, want string) {
		t.Helper()
		s := start(t, Options{Faults: Faults{Models: kind}})
		got, doc := call(t, s, "GET", "/v1/models", "")
		if got != status || !strings.Contains(doc, want) || struck(s, "models_"+kind) != 1 {
			t.Errorf("%s: got %d %s, want %d %s", kind, got, doc, status, want)
		}
	}
	f(PageMissing, 404, `{"detail":"Not Found"}`)
	f(PageDenied, 401, `{"error":"Unauthorized"}`)
	f(PageBroken, 500, "Internal")
	f(PageGarbage, 200, "{{{")
	f(ModelsEmpty, 200, `{"object":"list","data":[]}`)
}

func TestFaultIdleClose(t *testing.T) {
	s := start(t, Options{IdleTimeout: time.Hour, Faults: Faults{IdleClose: Duration(20 * time.Millisecond)}})
	c := dial(t, s)
	r := bufio.NewReader(c)
	send(t, c, "POST", chatPath, plainBody)
	if _, err := io.Copy(io.Discard, head(t, r).Body); err != nil {
		t.Fatal(err)
	}
	if _, err := r.ReadByte(); err != io.EOF || struck(s, "idle_close") != 1 {
		t.Errorf("behind the answer: got %v, %d closes, want EOF, 1", err, struck(s, "idle_close"))
	}
	// A connection that never asked anything stays, as uvicorn's does.
	if status, _ := call(t, s, "GET", "/version", ""); status != 200 {
		t.Errorf("a fresh connection: got %d, want 200", status)
	}
}

func TestFaultUnasked(t *testing.T) {
	s := start(t, Options{Faults: Faults{Unasked: true, UnaskedDelay: Duration(time.Millisecond)}})
	c := dial(t, s)
	r := bufio.NewReader(c)
	send(t, c, "POST", chatPath, plainBody)
	for i, want := range []string{"chatcmpl-", "unasked"} {
		doc, err := io.ReadAll(head(t, r).Body)
		if err != nil || !strings.HasPrefix(at(t, string(doc), "id").(string), want) {
			t.Errorf("answer %d: got %v, %s, want id %s", i, err, doc, want)
		}
	}
	// Its client may leave meanwhile.
	if err := s.SetFaults(Faults{Unasked: true, UnaskedDelay: Duration(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	send(t, c, "POST", chatPath, plainBody)
	_, _ = io.Copy(io.Discard, head(t, r).Body)
	_ = c.Close()
	eventually(t, "no connection", func() bool { return s.Stats().Open == 0 })
}

// wire is a connection that notes every write.
type wire struct {
	net.Conn
	writes [][]byte
	in     io.Reader
}

func (w *wire) Write(b []byte) (int, error) {
	w.writes = append(w.writes, bytes.Clone(b))
	return len(b), nil
}
func (w *wire) Read(b []byte) (int, error)      { return w.in.Read(b) }
func (w *wire) Close() error                    { return nil }
func (w *wire) SetReadDeadline(time.Time) error { return nil }

func TestFaultBytes(t *testing.T) {
	f := func(name string, faults Faults, check func(resp *http.Response, body string) string) {
		t.Helper()
		s := start(t, Options{Faults: faults})
		defer func() {
			if struck(s, name) == 0 {
				t.Errorf("%s: got %v, want it counted", name, s.Stats().Faults)
			}
		}()
		resp := ask(t, dial(t, s), "POST", chatPath, streamBody)
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if complaint := check(resp, string(body)); complaint != "" {
			t.Errorf("%s: got %s in %q", name, complaint, body)
		}
	}
	f("crlf", Faults{CRLF: true}, func(_ *http.Response, body string) string {
		if strings.Count(body, "\n") != strings.Count(body, "\r\n") || !strings.HasSuffix(body, "data: [DONE]\r\n\r\n") {
			return "a bare LF"
		}
		return ""
	})
	f("comments", Faults{Comments: true}, func(_ *http.Response, body string) string {
		if got, want := strings.Count(body, ": ping\n\n"), len(events(body)); got != want {
			return strconv.Itoa(got) + " comments"
		}
		return ""
	})
	f("comments", Faults{Comments: true, CRLF: true}, func(_ *http.Response, body string) string {
		if !strings.HasPrefix(body, ": ping\r\n\r\ndata: ") {
			return "another start"
		}
		return ""
	})
	f("emoji", Faults{Emoji: true}, func(_ *http.Response, body string) string {
		var text string
		for _, e := range events(body) {
			if e.data != "[DONE]" {
				content, _ := at(t, e.data, "choices", "0", "delta", "content").(string)
				text += content
			}
		}
		if n := len([]rune(text)); n != 4 || len(text) != 16 {
			return fmt.Sprintf("%d characters of %q", n, text)
		}
		return ""
	})
	f("headers", Faults{HeaderBytes: 12_000, Headers: []string{"connection: x-bar", "x-bar: 1", "set-cookie: a=1", "set-cookie: b=2"}}, func(resp *http.Response, _ string) string {
		if len(resp.Header.Get("x-fill")) != 12_000 || resp.Header.Get("x-bar") != "1" || len(resp.Header["Set-Cookie"]) != 2 {
			return fmt.Sprint(resp.Header)
		}
		return ""
	})
	f("event_delay", Faults{EventDelay: Duration(time.Millisecond)}, func(_ *http.Response, body string) string {
		if events(body)[len(events(body))-1].data != "[DONE]" {
			return "no end"
		}
		return ""
	})
	f("split", Faults{SplitBytes: 3, SplitDelay: Duration(time.Microsecond), Emoji: true}, func(_ *http.Response, body string) string {
		if events(body)[len(events(body))-1].data != "[DONE]" {
			return "no end"
		}
		return ""
	})
	f("delay", Faults{Delay: Duration(time.Millisecond)}, func(_ *http.Response, body string) string {
		if len(events(body)) < 4 {
			return "no answer"
		}
		return ""
	})

	// What a split write looks like on the wire.
	s := start(t, Options{Instant: true, Faults: Faults{SplitBytes: 7}})
	w := &wire{in: strings.NewReader(fmt.Sprintf("POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s", chatPath, len(streamBody), streamBody))}
	c := newConn(s, w, w)
	if err := c.request(); err != nil {
		t.Fatal(err)
	}
	for i, b := range w.writes {
		if len(b) > 7 || len(b) < 7 && i < len(w.writes)-1 {
			t.Fatalf("write %d: got %d bytes, want 7", i, len(b))
		}
	}
	if all := string(bytes.Join(w.writes, nil)); !strings.HasPrefix(all, "HTTP/1.1 200 OK\r\n") || !strings.HasSuffix(all, "data: [DONE]\n\n\r\n0\r\n\r\n") {
		t.Errorf("joined: got %q", all)
	}

	// A slow reader takes a twentieth of its rate at once.
	s = start(t, Options{Faults: Faults{ReadRate: 200_000}})
	w.in = strings.NewReader(strings.Repeat("x", 30_000))
	if n, err := (reader{newConn(s, w, w)}).Read(make([]byte, 20_000)); n != 10_000 || err != nil {
		t.Errorf("read rate: got %d, %v, want 10000 bytes", n, err)
	}
	if status, _ := call(t, s, "POST", chatPath, plainBody); status != 200 || struck(s, "read_rate") != 1 {
		t.Errorf("read rate: got %d, struck %d, want 200, 1", status, struck(s, "read_rate"))
	}
}

func TestFaultLeave(t *testing.T) {
	f := func(name string, faults Faults, strike string) {
		t.Helper()
		s := start(t, Options{Faults: faults})
		c := dial(t, s)
		send(t, c, "POST", chatPath, streamBody)
		eventually(t, strike, func() bool { return struck(s, strike) == 1 })
		_ = c.Close()
		eventually(t, "the abort", func() bool { st := s.Stats(); return st.Aborted == 1 && st.InFlight == 0 })
		eventually(t, "an empty engine", func() bool { return s.Stats().Engine.Running == 0 })
	}
	f("delay", Faults{Delay: Duration(time.Hour)}, "delay")
	f("chunks", Faults{Chunks: 3, ChunkInterval: Duration(time.Hour)}, "chunks")
	f("split", Faults{SplitBytes: 5, SplitDelay: Duration(time.Hour)}, "split")
}

func TestFaultChunks(t *testing.T) {
	s := start(t, Options{Faults: Faults{Chunks: 5, ChunkBytes: 10, ChunkInterval: Duration(time.Millisecond)}})
	_, doc := call(t, s, "POST", chatPath, streamBody)
	got := events(doc)
	if len(got) != 8 { // role, five chunks, usage, end
		t.Fatalf("got %d events, want 8: %s", len(got), doc)
	}
	for i, e := range got[1:6] {
		if text := at(t, e.data, "choices", "0", "delta", "content").(string); len(text) != 10 {
			t.Errorf("chunk %d: got %q, want 10 bytes", i, text)
		}
	}
	if n := at(t, got[6].data, "usage", "completion_tokens"); n != 5.0 {
		t.Errorf("usage: got %v tokens, want 5", n)
	}
	if _, doc = call(t, s, "POST", chatPath, plainBody); len(at(t, doc, "choices", "0", "message", "content").(string)) != 50 {
		t.Errorf("plain: got %s, want 50 bytes of text", doc)
	}
	if got := metric(t, s, "vllm:generation_tokens_total"); got != 10 {
		t.Errorf("generation tokens: got %v, want 10", got)
	}
	if err := s.SetFaults(Faults{Chunks: 2, ChunkBytes: 7, Emoji: true}); err != nil {
		t.Fatal(err)
	}
	if _, doc = call(t, s, "POST", chatPath, plainBody); len([]rune(at(t, doc, "choices", "0", "message", "content").(string))) != 2 {
		t.Errorf("emoji: got %s, want two characters", doc)
	}
}

func TestFaultAcceptDelay(t *testing.T) {
	s := start(t, Options{Faults: Faults{AcceptDelay: Duration(time.Millisecond)}})
	for range 3 {
		if status, _ := call(t, s, "GET", "/version", ""); status != 200 {
			t.Errorf("got %d, want 200", status)
		}
	}
	if got := struck(s, "accept_delay"); got < 2 {
		t.Errorf("struck: got %d, want 2 at least", got)
	}
}

func TestDrop(t *testing.T) {
	s := start(t, Options{Manual: true})
	c := dial(t, s)
	ask(t, c, "POST", chatPath, streamBody)
	s.Drop()
	if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
	eventually(t, "no connection", func() bool { return s.Stats().Open == 0 })
	if status, _ := call(t, s, "GET", "/version", ""); status != 200 {
		t.Errorf("behind it: got %d, want 200", status)
	}
}

func TestFaultsJSON(t *testing.T) {
	one := 1.0
	want := Faults{
		Refuse: true, RefuseFor: Duration(time.Second), Break: BreakReset, BreakAfter: -1, Status: 503, Routes: map[string]int{"/x": 404},
		Headers: []string{"a: b"}, MetricsWaiting: &one, Metrics: MetricsOld, Models: ModelsEmpty,
	}
	doc, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ParseFaults(doc); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s: got %+v, %v, want %+v", doc, got, err, want)
	}
	f := func(doc, want string) {
		t.Helper()
		if _, err := ParseFaults([]byte(doc)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", doc, err, want)
		}
	}
	f(`{"brake":"reset"}`, `unknown field "brake"`)
	f(`{} {}`, "more than one")
	f(`{"delay":3}`, `a duration is a string such as "1.5s"`)
	f(`{"delay":"3 moons"}`, "unknown unit")
	f(`{"delay":"-1s"}`, "delay is -1000000000: use at least 0")
	f(`{"break":"leg"}`, `break is "leg": use one of stall, reset, close, error`)
	f(`{"break_after":-2}`, "break_after is -2: use at least -1")
	f(`{"metrics":"x"}`, `metrics is "x"`)
	f(`{"models":"x"}`, `models is "x"`)
	f(`{"status":200}`, "status 200: use 400 to 599")
	f(`{"health":99}`, "status 99")
	f(`{"routes":{"/x":200}}`, "status 200 of /x")
	f(`{"headers":["a b"]}`, `"a b" is not one line`)
	f(`{"headers":["a: b\r\nc: d"]}`, "is not one line")

	s := start(t, Options{})
	if status, doc := call(t, s, "POST", "/fake/faults", `{"status":500,"delay":"1.5s"}`); status != 200 || doc != `{"delay":"1.5s","status":500}` {
		t.Errorf("POST: got %d %s", status, doc)
	}
	if status, doc := call(t, s, "GET", "/fake/faults", ""); status != 200 || doc != `{"delay":"1.5s","status":500}` {
		t.Errorf("GET: got %d %s", status, doc)
	}
	if err := s.SetFaults(Faults{Status: 1}); err == nil {
		t.Error("SetFaults: got no error for status 1")
	}
	if status, doc := call(t, s, "POST", "/fake/faults", `{}`); status != 200 || doc != `{}` {
		t.Errorf("POST: got %d %s, want no faults", status, doc)
	}
}
