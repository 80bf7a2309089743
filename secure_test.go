package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"kvgate/configs"
)

// serverFiles writes a self-signed certificate and its key.
func serverFiles(t *testing.T) configs.TLS {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"gate"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return configs.TLS{
		CertFile: writeTemp(t, "cert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))),
		KeyFile:  writeTemp(t, "key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))),
	}
}

// The probes of the process itself go through TLS and mutual TLS.
func TestSecureProbes(t *testing.T) {
	files := serverFiles(t)
	g := testGateway(t, func(s *configs.Settings) { s.TLS = files }, testReplica(t))
	if !strings.HasPrefix(g.dataURL(), "https://") {
		t.Errorf("dataURL: got %s, want https", g.dataURL())
	}
	if err := probe(t.Context(), g.dataURL(), 5*time.Second); err != nil {
		t.Errorf("probe: got %v, want no error", err)
	}
	if status, _, errs := command(t, "healthcheck", "--url", g.dataURL()+"/readyz"); status != 0 {
		t.Errorf("healthcheck: got status %d %s, want 0", status, errs)
	}
	files.ClientCAFile = files.CertFile
	mutual := testGateway(t, func(s *configs.Settings) { s.TLS = files })
	if err := probe(t.Context(), mutual.dataURL(), 5*time.Second); err != nil {
		t.Errorf("probe over mutual TLS: got %v, want no error", err)
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	for _, scheme := range []string{"http://", "https://"} {
		if err := probe(t.Context(), scheme+silent.Addr().String(), 50*time.Millisecond); err == nil {
			t.Errorf("probe of %s that does not answer: got none, want an error", scheme)
		}
	}
	s := configs.DefaultSettings()
	s.TLS = files
	if url, err := readyURL(&s); err != nil || url != "https://127.0.0.1:8080/readyz" {
		t.Errorf("readyURL: got %s, %v, want https", url, err)
	}
}

func TestSecureAdmin(t *testing.T) {
	file := writeTemp(t, "token", "first\n")
	request := writeTemp(t, "request.json", `{"model":"m","messages":[{"role":"user","content":"hi"}]}`)
	g := testGateway(t, func(s *configs.Settings) { s.Admin.TokenFile = file }, testReplica(t))
	f := func(token string, status int) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, adminURL(g)+"/debug/fleet", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != status {
			t.Errorf("%s: got %d, want %d", token, resp.StatusCode, status)
		}
	}
	f("first", 200)
	f("second", 401)
	if status, out, errs := command(t, "explain", "-f", request, "--admin", adminURL(g), "--admin-token-file", file); status != 0 || !strings.Contains(out, "winner") {
		t.Errorf("explain: got status %d %s %s, want a winner", status, out, errs)
	}
	if status, _, errs := command(t, "explain", "-f", request, "--admin", adminURL(g)); status == 0 || !strings.Contains(errs, "401") {
		t.Errorf("explain without a token: got status %d %s, want 401", status, errs)
	}
	if status, _, errs := command(t, "explain", "-f", request, "--admin", adminURL(g), "--admin-token-file", "/nonexistent"); status == 0 || !strings.Contains(errs, "/nonexistent") {
		t.Errorf("explain: got status %d %s, want the missing file", status, errs)
	}
	for _, step := range []struct {
		text   string
		wrong  string
		accept string
	}{{"second", "", "second"}, {"two words", "admin.token_file", "second"}, {"", "must hold one key", "second"}, {" third ", "", "third"}} {
		if err := os.WriteFile(file, []byte(step.text), 0o600); err != nil {
			t.Fatal(err)
		}
		err := g.reload()
		if (err == nil) != (step.wrong == "") || err != nil && !strings.Contains(err.Error(), step.wrong) {
			t.Errorf("reload with %q: got %v, want %q", step.text, err, step.wrong)
		}
		f(step.accept, 200)
		f("first", 401)
	}
	load := func() (*configs.Loaded, error) {
		s := configs.DefaultSettings()
		s.Listen, s.AdminListen, s.Admin.TokenFile = "127.0.0.1:0", "127.0.0.1:0", "/nonexistent"
		return &configs.Loaded{Settings: s}, nil
	}
	if _, err := newGateway(load, zap.NewNop(), zap.NewAtomicLevel()); err == nil || !strings.Contains(err.Error(), "admin.token_file: open /nonexistent") {
		t.Errorf("newGateway: got %v, want the missing token", err)
	}
}

// The socket of the admin listener is for the owner and the group alone.
func TestSecureAdminSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admin.sock")
	for range 2 { // the second finds what the first has left behind
		ln, err := listenAdmin("unix:" + path)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o660 {
			t.Errorf("socket: got %v, %v, want mode 0660", info.Mode(), err)
		}
		ln.(*net.UnixListener).SetUnlinkOnClose(false)
		_ = ln.Close()
	}
	if _, err := listenAdmin("unix:/nonexistent/x"); err == nil {
		t.Error("a folder that is missing: got no error, want one")
	}
	g := testGateway(t, func(s *configs.Settings) { s.AdminListen = "unix:" + path }, testReplica(t))
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", g.admin.Addr().String())
	}}}
	resp, err := client.Get("http://kvgate/debug/fleet")
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("over the socket: got %v, %v, want 200", resp, err)
	}
	_ = resp.Body.Close()
}
