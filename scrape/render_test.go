package scrape

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvgate/configs"
	"kvgate/routing"
)

func newTestRenderer(t *testing.T, set func(*configs.Settings)) *Renderer {
	t.Helper()
	s := configs.DefaultSettings()
	if set != nil {
		set(&s)
	}
	r, err := NewRenderer(&s, "1.2")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestRenderAsks: what the server gets and what comes back.
func TestRenderAsks(t *testing.T) {
	var seen string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		seen = fmt.Sprintf("%s %s %q %q %q %q %s", r.Method, r.URL, r.Header.Get("Content-Type"), r.Header.Get("Authorization"), r.UserAgent(), r.Header.Get("Idempotency-Key"), body)
		switch r.URL.Path {
		case "/moved":
			http.Redirect(w, r, "/ok", http.StatusTemporaryRedirect)
		case "/missing":
			http.NotFound(w, r)
		default:
			_, _ = io.WriteString(w, "answer")
		}
	}))
	defer server.Close()
	key := writeFile(t, "key", "secret\n")
	f := func(t *testing.T, path, clientAuth string, set func(*configs.Settings), wantSeen string, wantStatus int, wantBody string) {
		t.Helper()
		r := newTestRenderer(t, set)
		status, body, err := r.Render(routing.RenderQuery{URL: server.URL, Path: path, Body: []byte("{}"), Authorization: []byte(clientAuth), Timeout: time.Minute})
		if err != nil || status != wantStatus || string(body) != wantBody || seen != wantSeen {
			t.Errorf("%s: got %d %q %v for %s, want %d %q for %s", path, status, body, err, seen, wantStatus, wantBody, wantSeen)
		}
	}
	f(t, "/ok", "", nil, `POST /ok "application/json" "" "kvgate/1.2" "" {}`, 200, "answer")
	f(t, "/ok", "Bearer client", nil, `POST /ok "application/json" "Bearer client" "kvgate/1.2" "" {}`, 200, "answer")
	f(t, "/ok", "Bearer client", func(s *configs.Settings) { s.Upstream.APIKeyFile = key }, `POST /ok "application/json" "Bearer secret" "kvgate/1.2" "" {}`, 200, "answer")
	f(t, "/missing", "", nil, `POST /missing "application/json" "" "kvgate/1.2" "" {}`, 404, "404 page not found\n")
	f(t, "/moved", "", nil, `POST /moved "application/json" "" "kvgate/1.2" "" {}`, 307, "")
}

// TestRenderKeepsConnections: one connection for many questions, a new one when it was closed meanwhile.
func TestRenderKeepsConnections(t *testing.T) {
	var conns atomic.Int32
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/refused" {
			http.Error(w, strings.Repeat("no", 1000), http.StatusForbidden)
		}
	}))
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns.Add(1)
		}
	}
	server.Start()
	defer server.Close()
	r := newTestRenderer(t, nil)
	ask := func(path string, want int) {
		t.Helper()
		if status, _, err := r.Render(routing.RenderQuery{URL: server.URL, Path: path, Body: []byte("{}"), Timeout: time.Minute}); err != nil || status != want {
			t.Fatalf("%s: got %d %v, want %d", path, status, err, want)
		}
	}
	for range 5 {
		ask("/ok", 200)
		ask("/refused", 403)
	}
	if got := conns.Load(); got != 1 {
		t.Errorf("got %d connections, want 1", got)
	}
	server.CloseClientConnections()
	ask("/ok", 200)
	if got := conns.Load(); got != 2 {
		t.Errorf("after it was closed: got %d connections, want 2", got)
	}
}

func TestRenderFailures(t *testing.T) {
	f := func(t *testing.T, name string, handler http.HandlerFunc, q routing.RenderQuery, want error) {
		t.Helper()
		server := httptest.NewServer(handler)
		defer server.Close()
		r := newTestRenderer(t, nil)
		q.URL, q.Path = server.URL, "/x"
		status, body, err := r.Render(q)
		if err == nil || want != nil && !errors.Is(err, want) || status != 0 || body != nil {
			t.Errorf("%s: got %d, %d bytes, %v, want %v", name, status, len(body), err, want)
		}
	}
	long := routing.RenderQuery{Timeout: time.Minute}
	stall := func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // or its end is not noticed
		<-r.Context().Done()
	}
	f(t, "too long, as told", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(maxRendered+1))
	}, long, errRenderedSize)
	f(t, "too long", func(w http.ResponseWriter, _ *http.Request) {
		chunk := make([]byte, 1<<20)
		for range maxRendered>>20 + 1 {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}, long, errRenderedSize)
	f(t, "cut short", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
		_, _ = io.WriteString(w, "four")
	}, long, io.ErrUnexpectedEOF)
	f(t, "no answer in time", stall, routing.RenderQuery{Timeout: time.Millisecond}, context.DeadlineExceeded)
	left := make(chan struct{})
	f(t, "the client leaves", func(w http.ResponseWriter, r *http.Request) {
		close(left)
		stall(w, r)
	}, routing.RenderQuery{Timeout: time.Minute, Done: left}, context.Canceled)
	gone := make(chan struct{})
	close(gone)
	f(t, "the client has left", stall, routing.RenderQuery{Timeout: time.Minute, Done: gone}, context.Canceled)
	r := newTestRenderer(t, nil)
	if _, _, err := r.Render(routing.RenderQuery{URL: "http://127.0.0.1:1", Path: "/x", Timeout: time.Minute}); err == nil {
		t.Error("nobody listens: got no error, want one")
	}
	if _, _, err := r.Render(routing.RenderQuery{URL: "http://[", Path: "/x", Timeout: time.Minute}); err == nil {
		t.Error("no URL: got no error, want one")
	}
}

// TestRendererSettings: a certificate authority and a key of one's own; a reload that fails changes nothing.
// A replica that is asked for tokens sees its own credentials.
func TestRenderCredentials(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Header.Get("Authorization")) }))
	defer server.Close()
	ca := writeFile(t, "ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	s := configs.DefaultSettings()
	s.Upstream.APIKeyFile = writeFile(t, "key", "common")
	base, err := s.Upstream.Credentials()
	if err != nil {
		t.Fatal(err)
	}
	r := newTestRenderer(t, func(to *configs.Settings) { *to = s })
	ask := func(own *configs.Credentials, want string) {
		t.Helper()
		_, body, err := r.Render(routing.RenderQuery{URL: server.URL, Path: "/", Timeout: time.Minute, Authorization: []byte("Bearer client"), Credentials: own})
		if (err != nil) != (want == "") || string(body) != want {
			t.Errorf("got %q, %v, want %q", body, err, want)
		}
	}
	of := func(replica configs.Replica) *configs.Credentials {
		c, err := replica.Credentials(base, configs.Position{})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	trusting := of(configs.Replica{CAFile: ca})
	ask(nil, "")
	ask(trusting, "Bearer common")
	ask(of(configs.Replica{CAFile: ca, APIKeyFile: writeFile(t, "own", "own")}), "Bearer own")
	ask(of(configs.Replica{CAFile: ca, ServerName: "other"}), "")
	ask(of(configs.Replica{CAFile: ca, ServerName: "example.com"}), "Bearer common") // a name of httptest's certificate
	ask(trusting, "Bearer common")
	if got := len(r.client.Load().owners); got != 4 {
		t.Errorf("got %d clients, want one for each credentials", got)
	}
	for range 2 * maxRenderOwners {
		r.client.Load().of(of(configs.Replica{CAFile: ca}))
	}
	if got := len(r.client.Load().owners); got > maxRenderOwners {
		t.Errorf("got %d clients, want at most %d", got, maxRenderOwners)
	}
	ask(trusting, "Bearer common")
}

func TestRendererSettings(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Header.Get("Authorization")) }))
	defer server.Close()
	ca := writeFile(t, "ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	r := newTestRenderer(t, nil)
	ask := func(wantErr bool, want string) {
		t.Helper()
		_, body, err := r.Render(routing.RenderQuery{URL: server.URL, Path: "/", Timeout: time.Minute})
		if (err != nil) != wantErr || string(body) != want {
			t.Errorf("got %q, %v, want %q, an error %v", body, err, want, wantErr)
		}
	}
	ask(true, "")
	s := configs.DefaultSettings()
	s.Upstream.CAFile, s.Upstream.APIKeyFile = ca, writeFile(t, "key", "k1")
	if err := r.Apply(&s); err != nil {
		t.Fatal(err)
	}
	ask(false, "Bearer k1")
	s.Upstream.APIKeyFile = filepath.Join(t.TempDir(), "none")
	if err := r.Apply(&s); err == nil || !strings.Contains(err.Error(), "upstream.api_key_file") {
		t.Errorf("no key: got %v, want upstream.api_key_file", err)
	}
	ask(false, "Bearer k1")
	if _, err := NewRenderer(&s, ""); err == nil {
		t.Error("no key: got no error, want one")
	}
}
