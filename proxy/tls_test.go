package proxy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kvgate/configs"
	"kvgate/routing"
)

// issue writes a certificate and its key for a host name into dir, signed by
// itself, and returns it.
func issue(t testing.TB, dir, host string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: host}, DNSNames: []string{host}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{"cert.pem": {Type: "CERTIFICATE", Bytes: der}, "key.pem": {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func trust(t testing.TB, dir string) *x509.CertPool {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "cert.pem"))
	p := x509.NewCertPool()
	if err != nil || !p.AppendCertsFromPEM(data) {
		t.Fatalf("%s: got %v, want a certificate", dir, err)
	}
	return p
}

// over asks for /livez over TLS and returns the status and the connection's state.
func (g *gateway) over(cfg *tls.Config) (int, tls.ConnectionState, error) {
	g.t.Helper()
	nc := tls.Client(dialTCP(g.t, g.addr), cfg)
	defer func() { _ = nc.Close() }()
	_ = nc.SetDeadline(time.Now().Add(patience))
	if _, err := nc.Write([]byte(get("/livez", "Connection: close"))); err != nil {
		return 0, tls.ConnectionState{}, err
	}
	line := make([]byte, len("HTTP/1.1 200"))
	if _, err := nc.Read(line); err != nil {
		return 0, tls.ConnectionState{}, err
	}
	want(g.t, "status line", string(line), "HTTP/1.1 200")
	return http.StatusOK, nc.ConnectionState(), nil
}

func TestTLSListener(t *testing.T) {
	dir := t.TempDir()
	issue(t, dir, "gate")
	g := newGateway(t, func(s *configs.Settings) {
		s.TLS = configs.TLS{CertFile: filepath.Join(dir, "cert.pem"), KeyFile: filepath.Join(dir, "key.pem")}
	}, newStub(t, plain))
	cfg := &tls.Config{ServerName: "gate", RootCAs: trust(t, dir), NextProtos: []string{"h2", "http/1.1"}}
	status, state, err := g.over(cfg)
	if err != nil || status != 200 || state.NegotiatedProtocol != "http/1.1" || state.Version != tls.VersionTLS13 {
		t.Errorf("got %d, %s, %x, %v, want 200 over HTTP/1.1 and TLS 1.3", status, state.NegotiatedProtocol, state.Version, err)
	}
	if _, _, err := g.over(&tls.Config{ServerName: "gate", RootCAs: trust(t, dir), MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}); err == nil { // #nosec G402 -- to be refused
		t.Error("TLS 1.1: got an answer, want a refusal")
	}
	if _, _, err := g.over(&tls.Config{ServerName: "gate", RootCAs: trust(t, dir), NextProtos: []string{"h2"}}); err == nil {
		t.Error("h2 alone: got an answer, want a refusal")
	}
	// A reload takes a new certificate.
	issue(t, dir, "gate")
	settings := *g.live.Load().settings
	if err := g.Apply(&settings); err != nil {
		t.Fatalf("Apply: got %v, want no error", err)
	}
	if _, _, err := g.over(&tls.Config{ServerName: "gate", RootCAs: trust(t, dir)}); err != nil {
		t.Errorf("behind a reload: got %v, want the new certificate", err)
	}
	// Broken files leave the old one in force.
	if err := os.WriteFile(settings.TLS.CertFile, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := g.Apply(&settings); err == nil || !strings.Contains(err.Error(), "tls.cert_file") {
		t.Errorf("Apply: got %v, want an error about tls.cert_file", err)
	}
	settings.TLS = configs.TLS{}
	if err := g.Apply(&settings); err == nil || !strings.Contains(err.Error(), "at a restart only") {
		t.Errorf("Apply without TLS: got %v, want an error", err)
	}
}

func TestTLSFollowsFiles(t *testing.T) {
	dir := t.TempDir()
	first := issue(t, dir, "gate")
	files := configs.TLS{CertFile: filepath.Join(dir, "cert.pem"), KeyFile: filepath.Join(dir, "key.pem")}
	core, lines := observer.New(zapcore.InfoLevel)
	c, err := newListenerCert(files, zap.New(core))
	if err != nil {
		t.Fatal(err)
	}
	now := c.checked
	f := func(want tls.Certificate, messages int) {
		t.Helper()
		now = now.Add(certEvery)
		if got := c.get(now).Certificates[0].Certificate[0]; string(got) != string(want.Certificate[0]) {
			t.Errorf("got another certificate, want that of the step before")
		}
		if got := lines.Len(); got != messages {
			t.Errorf("messages: got %d, want %d", got, messages)
		}
	}
	touch := func(at int) {
		stamp := time.Unix(int64(1_700_000_000+at), 0)
		for _, name := range []string{files.CertFile, files.KeyFile} {
			_ = os.Chtimes(name, stamp, stamp)
		}
	}
	f(first, 0)
	second := issue(t, dir, "gate")
	touch(1)
	f(second, 1)
	f(second, 1)
	if err := os.WriteFile(files.KeyFile, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f(second, 2) // half replaced: the old one, said once
	f(second, 2)
	third := issue(t, dir, "gate")
	touch(2)
	if got := c.get(now).Certificates[0].Certificate[0]; string(got) != string(second.Certificate[0]) {
		t.Error("within certEvery: got the new certificate, want no look at the files")
	}
	f(third, 3)
}

func TestTLSClientCertificate(t *testing.T) {
	dir, friend, foe := t.TempDir(), t.TempDir(), t.TempDir()
	issue(t, dir, "gate")
	trusted, strange := issue(t, friend, "friend"), issue(t, foe, "foe")
	g := newGateway(t, func(s *configs.Settings) {
		s.TLS = configs.TLS{CertFile: filepath.Join(dir, "cert.pem"), KeyFile: filepath.Join(dir, "key.pem"), ClientCAFile: filepath.Join(friend, "cert.pem")}
	}, newStub(t, plain))
	f := func(what string, ok bool, certificates ...tls.Certificate) {
		t.Helper()
		_, _, err := g.over(&tls.Config{ServerName: "gate", RootCAs: trust(t, dir), Certificates: certificates})
		if (err == nil) != ok {
			t.Errorf("%s: got %v, want success %v", what, err, ok)
		}
	}
	f("without a certificate", false)
	f("a stranger's", false, strange)
	f("one that is trusted", true, trusted)
	settings := *g.live.Load().settings
	for _, file := range []string{filepath.Join(dir, "key.pem"), "/nonexistent"} {
		settings.TLS.ClientCAFile = file
		if err := CheckFiles(&settings); err == nil || !strings.Contains(err.Error(), "tls.client_ca_file") {
			t.Errorf("CheckFiles: got %v, want an error about tls.client_ca_file", err)
		}
	}
}

// The replica sees the gateway's certificate, and its own must have the configured name.
func TestTLSUpstream(t *testing.T) {
	replica, own := t.TempDir(), t.TempDir()
	cert := issue(t, replica, "replica.internal")
	issue(t, own, "kvgate")
	s := newStubOn(t, &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: trust(t, own)}, plain)
	f := func(status int, change func(u *configs.Upstream)) {
		t.Helper()
		g := newGateway(t, func(set *configs.Settings) {
			set.Upstream.CAFile, set.Upstream.ServerName = filepath.Join(replica, "cert.pem"), "replica.internal"
			set.Upstream.ClientCertFile, set.Upstream.ClientKeyFile = filepath.Join(own, "cert.pem"), filepath.Join(own, "key.pem")
			change(&set.Upstream)
		})
		g.setSpecs([]routing.EndpointSpec{{Name: "r0", URL: strings.Replace(s.url(), "http://", "https://", 1)}})
		want(t, "status", g.dial().ask(post(chat, chatBody)).StatusCode, status)
	}
	f(200, func(*configs.Upstream) {})
	f(502, func(u *configs.Upstream) { u.ServerName = "" })
	f(502, func(u *configs.Upstream) { u.ServerName = "other.internal" })
	f(502, func(u *configs.Upstream) { u.ClientCertFile, u.ClientKeyFile = "", "" })

	settings := configs.DefaultSettings()
	settings.Upstream.ClientCertFile, settings.Upstream.ClientKeyFile = filepath.Join(own, "cert.pem"), filepath.Join(replica, "key.pem")
	if err := CheckFiles(&settings); err == nil || !strings.Contains(err.Error(), "upstream.client_cert_file") {
		t.Errorf("CheckFiles: got %v, want an error about upstream.client_cert_file", err)
	}
}

// A replica's own key, CA, name and certificate are those of its traffic, and of
// no other replica's.
func TestReplicaCredentials(t *testing.T) {
	replica, own := t.TempDir(), t.TempDir()
	cert := issue(t, replica, "replica.internal")
	issue(t, own, "kvgate")
	s := newStubOn(t, &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: trust(t, own)}, reflectRequests)
	other := newStub(t, reflectRequests)
	key := writeFile(t, "k-own")
	g := newGateway(t, func(set *configs.Settings) { set.Upstream.APIKeyFile = writeFile(t, "k-common") })
	f := func(r configs.Replica, status int, authorization string) {
		t.Helper()
		c, err := r.Credentials(g.live.Load().upstream.all, configs.Position{})
		if err != nil {
			t.Fatal(err)
		}
		g.setSpecs([]routing.EndpointSpec{{Name: "r0", URL: strings.Replace(s.url(), "http://", "https://", 1), Credentials: c}})
		a := g.dial().ask(post(chat, chatBody, "Authorization: Bearer client"))
		want(t, "status", a.StatusCode, status)
		g.settled()
		if status == 200 && (!strings.Contains(a.body, "Authorization: "+authorization+"\r\n") || strings.Contains(a.body, "client")) {
			t.Errorf("sent on: got %q, want %q in it", a.body, authorization)
		}
	}
	whole := configs.Replica{
		APIKeyFile: key, CAFile: filepath.Join(replica, "cert.pem"), ServerName: "replica.internal",
		ClientCertFile: filepath.Join(own, "cert.pem"), ClientKeyFile: filepath.Join(own, "key.pem"),
	}
	f(whole, 200, "Bearer k-own")
	without := whole
	without.APIKeyFile = ""
	f(without, 200, "Bearer k-common")
	without = whole
	without.ServerName = "other.internal"
	g.setSpecs(nil) // so that no connection is left
	f(without, 502, "")
	without = whole
	without.ClientCertFile, without.ClientKeyFile = "", ""
	f(without, 502, "")
	f(configs.Replica{}, 502, "")
	g.setSpecs([]routing.EndpointSpec{{Name: "r1", URL: other.url()}})
	if a := g.dial().ask(post(chat, chatBody)); !strings.Contains(a.body, "Authorization: Bearer k-common\r\n") {
		t.Errorf("another replica: got %q, want the key of all", a.body)
	}
}

func TestAdminToken(t *testing.T) {
	b := newAdminBench(t, "a")
	token := "s3cret"
	b.options.Token = func() string { return token }
	f := func(target string, status int, change func(*http.Request)) {
		t.Helper()
		if w := b.do("GET", target, "", change); w.Code != status {
			t.Errorf("%s: got %d %s, want %d", target, w.Code, w.Body, status)
		}
	}
	none := func(*http.Request) {}
	bearer := func(value string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set("Authorization", value) }
	}
	basic := func(user, password string) func(*http.Request) {
		return func(r *http.Request) { r.SetBasicAuth(user, password) }
	}
	for _, target := range []string{"/", "/metrics", "/debug/fleet", "/admin/v1/replicas", "/nothing"} {
		f(target, 401, none)
		f(target, 401, bearer("Bearer s3cre"))
		f(target, 401, bearer("s3cret"))
		f(target, 401, basic("s3cret", ""))
	}
	for _, target := range []string{"/", "/metrics", "/debug/fleet"} {
		f(target, 200, bearer("Bearer s3cret"))
		f(target, 200, bearer("bearer s3cret"))
		f(target, 200, basic("me", "s3cret"))
	}
	f("/livez", 200, none)
	f("/readyz", 200, none)
	if w := b.do("GET", "/metrics", ""); w.Header().Get("WWW-Authenticate") != `Basic realm="kvgate"` {
		t.Errorf("WWW-Authenticate: got %q, want Basic", w.Header().Get("WWW-Authenticate"))
	}
	token = ""
	f("/metrics", 200, none)
}
