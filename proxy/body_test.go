package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http/httputil"
	"strings"
	"testing"
)

// decodeAll decodes a chunked body in pieces of the given sizes, in turn.
func decodeAll(text string, sizes ...int) (payload string, rest string, done bool, err error) {
	var c chunks
	var out strings.Builder
	for i := 0; len(text) > 0; i++ {
		n := min(max(sizes[i%len(sizes)], 1), len(text))
		b := []byte("#" + text[:n] + "#")
		end, next, err := c.decode(b, 1, n+1)
		if b[0] != '#' || b[n+1] != '#' {
			return "", "", false, errors.New("wrote outside of the piece")
		}
		out.Write(b[1:end])
		if err != nil {
			return out.String(), text[next-1:], false, err
		}
		text = text[next-1:]
		if c.state == chunkDone {
			break
		}
	}
	return out.String(), text, c.state == chunkDone, nil
}

func TestChunks(t *testing.T) {
	f := func(text, payload, rest string, done bool, want error) {
		t.Helper()
		for _, size := range []int{len(text), 1, 2, 3, 7} {
			gotPayload, gotRest, gotDone, err := decodeAll(text, size)
			if gotPayload != payload || !errors.Is(err, want) || want == nil && (gotRest != rest || gotDone != done) {
				t.Errorf("%q in pieces of %d: got %q, rest %q, done %v, %v, want %q, rest %q, done %v, %v", text, size, gotPayload, gotRest, gotDone, err, payload, rest, done, want)
			}
		}
	}
	f("3\r\nabc\r\n0\r\n\r\n", "abc", "", true, nil)
	f("3\r\nabc\r\n2\r\nde\r\n0\r\n\r\nHTTP", "abcde", "HTTP", true, nil)
	f("a;x=\"y\"\r\n0123456789\r\n0\r\n\r\n", "0123456789", "", true, nil)
	f("00A \r\n0123456789\r\n000\r\n\r\n", "0123456789", "", true, nil)
	f("1\r\na\r\n0\r\nX: y\r\nZ: w\r\n\r\n", "a", "", true, nil)
	f("3\r\nab", "ab", "", false, nil)
	f("0\r\n", "", "", false, nil)
	f("", "", "", false, nil)
	f("x\r\n", "", "", false, errChunk)
	f("\r\n", "", "", false, errChunk)
	f("-1\r\n", "", "", false, errChunk)
	f("+1\r\na\r\n", "", "", false, errChunk)
	f("0x1\r\na\r\n", "", "", false, errChunk)
	f("1\na\r\n", "", "", false, errChunk)
	f("1;a\nb\r\n", "", "", false, errChunk)
	f("1\r\nab\r\n", "a", "", false, errChunk)
	f("1\r\na\n", "a", "", false, errChunk)
	f("1\r\na\rb", "a", "", false, errChunk)
	f("ffffffffffffffffff\r\n", "", "", false, errChunk)
	f("1;"+strings.Repeat("x", maxChunkLine+1)+"\r\n", "", "", false, errChunk)
	f("0\r\n"+strings.Repeat("x: y\r\n", maxTrailers/6+1), "", "", false, errChunk)
	f("0\r\n\rx", "", "", false, errChunk)
}

// FuzzBodyFraming: whatever the pieces, the result is the same; and what the
// standard library decodes is decoded alike.
func FuzzBodyFraming(f *testing.F) {
	for _, seed := range []string{"3\r\nabc\r\n0\r\n\r\n", "a;x\r\n0123456789\r\n0\r\nX: y\r\n\r\nrest", "1\r\nab", "0\r\n\r\n0\r\n\r\n", "ffffffffff\r\n"} {
		f.Add([]byte(seed), uint64(3))
	}
	f.Fuzz(func(t *testing.T, text []byte, seed uint64) {
		payload, rest, done, err := decodeAll(string(text), max(len(text), 1))
		r := rand.New(rand.NewPCG(seed, seed))
		sizes := []int{1 + r.IntN(5), 1 + r.IntN(50), 1}
		payload2, rest2, done2, err2 := decodeAll(string(text), sizes...)
		if payload != payload2 || done != done2 || !errors.Is(err2, err) || done && rest != rest2 {
			t.Errorf("in pieces %v: got %q %q %v %v, want %q %q %v %v", sizes, payload2, rest2, done2, err2, payload, rest, done, err)
		}
		if !done {
			return
		}
		std, err := io.ReadAll(httputil.NewChunkedReader(bytes.NewReader(text)))
		if err == nil && string(std) != payload {
			t.Errorf("got %q, want %q as the standard library", payload, std)
		}
	})
}

// FuzzResponseHead: no head makes the parser panic or accept what it must not.
func FuzzResponseHead(f *testing.F) {
	for _, seed := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HTTP/1.0 404\r\n\r\n", sseHead, "HTTP/1.1 200 OK\r\nConnection: x, close\r\nX: 1\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n",
		"HTTP/1.1 200 \r\na:\r\n\r\n", "HTTP/1.1 2000\r\n\r\n", "\r\n\r\n",
	} {
		f.Add([]byte(seed), false)
	}
	f.Fuzz(func(t *testing.T, text []byte, headOnly bool) {
		i := bytes.Index(text, blankLine)
		if i < 0 {
			return
		}
		head := text[:i+len(blankLine)]
		var r response
		if r.parse(head, headOnly) != nil {
			return
		}
		if r.status < 100 || r.status > 999 {
			t.Errorf("status: got %d, want three digits", r.status)
		}
		if r.kind == bodyLength && r.length < 0 || headOnly && r.kind != bodyEmpty || r.keep && r.kind == bodyClose {
			t.Errorf("got %+v, want a body that can be read", r)
		}
		again := fmt.Appendf(nil, "HTTP/1.1 %d \r\n", r.status)
		for _, x := range r.fields {
			if len(x.name) == 0 || bytes.ContainsAny(x.name, " \t\r\n:") || bytes.ContainsAny(x.value, "\r\n\x00") {
				t.Errorf("field: got %q: %q, want neither space nor control bytes", x.name, x.value)
			}
			again = appendField(again, x.name, x.value)
		}
		var second response
		if err := second.parse(append(again, "\r\n"...), headOnly); err != nil || second.kind != r.kind || second.length != r.length {
			t.Errorf("written again: got %v, kind %d, length %d, want %d and %d", err, second.kind, second.length, r.kind, r.length)
		}
	})
}

// FuzzFields: request heads in any shape.
func FuzzFields(f *testing.F) {
	for _, seed := range []string{"Host: h\r\nX: y\r\n\r\n", "X:y\r\n", "X : y\r\n", "X: a\r\n b\r\n", "\r\n", "X_Y: 1\r\nx-llm-d-a: 2\r\n"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, head []byte) {
		fields, err := parseFields(head, nil)
		if err != nil {
			return
		}
		dropNamed(fields)
		var again []byte
		for _, x := range fields {
			if bytes.IndexByte(x.name, '_') >= 0 && x.id != fieldInternal && x.id != fieldHop {
				t.Errorf("%q: got id %d, want it internal", x.name, x.id)
			}
			again = appendField(again, x.name, x.value)
		}
		second, err := parseFields(again, nil)
		if err != nil || len(second) != len(fields) {
			t.Errorf("written again: got %v and %d fields, want %d", err, len(second), len(fields))
		}
	})
}

func TestHeld(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	for range 200 {
		pool := &buffers{}
		pool.budget.Store(64 << 20)
		h := held{pool: pool}
		size := r.IntN(3 << 20)
		wanted := 0
		if r.IntN(2) == 0 {
			wanted = size
		}
		text := bytes.Repeat([]byte("0123456789abcdef"), size/16+1)[:size]
		for h.n < size {
			room, err := h.space(wanted, 8<<20)
			if err != nil || len(room) == 0 {
				t.Fatalf("space at %d of %d: got %d bytes and %v, want some", h.n, size, len(room), err)
			}
			h.n += copy(room[:min(len(room), 1+r.IntN(len(room)))], text[h.n:])
		}
		if !bytes.Equal(h.bytes(), text) {
			t.Fatalf("body of %d bytes: got another", size)
		}
		if size > largestClass && len(h.buf.b) > 4*size {
			t.Errorf("memory for %d bytes: got %d, want at most four times", size, len(h.buf.b))
		}
		h.release()
		if got := pool.budget.Load(); got != 64<<20 {
			t.Errorf("budget: got %d, want %d", got, 64<<20)
		}
	}
}

func TestHeldBudget(t *testing.T) {
	pool := &buffers{}
	pool.budget.Store(100 << 10)
	h := held{pool: pool}
	if _, err := h.space(0, 1<<20); err != nil {
		t.Fatalf("first: got %v, want no error", err)
	}
	h.n = len(h.buf.b)
	if _, err := h.space(1<<20, 1<<20); !errors.Is(err, errBudget) {
		t.Errorf("over the budget: got %v, want %v", err, errBudget)
	}
	h.release()
	if got := pool.budget.Load(); got != 100<<10 {
		t.Errorf("budget: got %d, want %d", got, 100<<10)
	}
}

func TestFormModel(t *testing.T) {
	f := func(text, boundary, model string, found bool) {
		t.Helper()
		got, ok := formModel([]byte(text), []byte(boundary))
		if string(got) != model || ok != found {
			t.Errorf("%q: got %q %v, want %q %v", text, got, ok, model, found)
		}
	}
	f(form("b", "model", "m"), "b", "m", true)
	f("preamble\r\n"+form("b", "x", "y", "model", "m"), "b", "m", true)
	f(form("b", "file", "@model", "model", "m"), "b", "m", true)
	f(form("b", "model", "@file"), "b", "", false)
	f(form("b", "x", "y"), "b", "", false)
	f("--b\r\ncontent-disposition: form-data; NAME=model\r\n\r\n m \r\n--b--", "b", "m", true)
	f("--b\r\nX: y\r\nContent-Disposition: form-data; filename2=\"a;name=x\"; name=\"model\"\r\n\r\nm\r\n--b--", "b", "m", true)
	f("--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm", "b", "", false)
	f("--b\r\nContent-Disposition: form-data; name=\"mo", "b", "", false)
	f("--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n\r\n--bX\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--", "b", "", false)
	f("--bX\r\n"+form("b", "model", "m"), "b", "m", true)
	f("no form", "b", "", false)
	f("", "b", "", false)
	f(form("b", "model", "m"), "", "", false)
}

func TestFormBoundary(t *testing.T) {
	f := func(contentType, want string) {
		t.Helper()
		if got := string(formBoundary([]byte(contentType))); got != want {
			t.Errorf("%q: got %q, want %q", contentType, got, want)
		}
	}
	f(`multipart/form-data; boundary=abc`, "abc")
	f(`Multipart/Form-Data; charset="a;b"; Boundary="a b"`, "a b")
	f(`multipart/form-data`, "")
	f(`multipart/mixed; boundary=abc`, "")
	f(`application/json`, "")
}

func TestQuery(t *testing.T) {
	f := func(query, want string) {
		t.Helper()
		if got := string(appendQuery(nil, []byte(query), "model")); got != want {
			t.Errorf("%q: got %q, want %q", query, got, want)
		}
	}
	f("", "")
	f("?model=m", "m")
	f("?x=1&model=a%2Fb+c&model=2", "a/b c")
	f("?xmodel=1", "")
	f("?model=%zz", "%zz")
}

func TestIdentify(t *testing.T) {
	f := func(name string, want fieldID) {
		t.Helper()
		if got := identify([]byte(name)); got != want {
			t.Errorf("%s: got %d, want %d", name, got, want)
		}
	}
	f("hOsT", fieldHost)
	f("Content-Length", fieldContentLength)
	f("X-Request-ID", fieldRequestID)
	f("Accept", fieldOther)
	f("X-LLM-D-Anything", fieldInternal)
	f("x-kvgate-replica", fieldInternal)
	f("X-Vllm-Priority", fieldInternal)
	f("X-Vllm-Priorities", fieldOther)
	f("a_b", fieldInternal)
	f(strings.Repeat("a", 100)+"_", fieldInternal)
	f("x-prefiller-"+strings.Repeat("a", 100), fieldInternal)
	f(strings.Repeat("a", 100), fieldOther)
	f("TE", fieldHop)
	f("HTTP2-Settings", fieldHop)
	f("", fieldOther)
}
