package proxy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvgate/configs"
	"kvgate/routing"
)

// hiddenListener gives connections without a descriptor, so that the watcher
// reads ahead instead of asking the kernel.
type hiddenListener struct{ net.Listener }

type hiddenConn struct{ net.Conn }

func (c hiddenConn) CloseWrite() error { return c.Conn.(*net.TCPConn).CloseWrite() }

func (l hiddenListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return hiddenConn{c}, nil
}

// certificate makes a self-signed certificate for 127.0.0.1 and writes it to a file.
func certificate(t testing.TB) (*tls.Config, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "stub"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, file
}

// ways are the kinds of client connections; the client that leaves is seen on each.
var ways = []struct {
	name string
	wrap func(t testing.TB) func(net.Listener) net.Listener
	dial func(t testing.TB, addr string) net.Conn
}{
	{"tcp", func(testing.TB) func(net.Listener) net.Listener { return nil }, dialTCP},
	{"tls", func(t testing.TB) func(net.Listener) net.Listener {
		cfg, _ := certificate(t)
		return func(ln net.Listener) net.Listener { return tls.NewListener(ln, cfg) }
	}, func(t testing.TB, addr string) net.Conn {
		c := tls.Client(dialTCP(t, addr), &tls.Config{InsecureSkipVerify: true}) // #nosec G402 -- a test's own certificate
		if err := c.Handshake(); err != nil {
			t.Fatalf("Handshake: got %v, want no error", err)
		}
		return c
	}},
	{"read ahead", func(testing.TB) func(net.Listener) net.Listener {
		return func(ln net.Listener) net.Listener { return hiddenListener{ln} }
	}, dialTCP},
}

func dialTCP(t testing.TB, addr string) net.Conn {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatalf("Dial: got %v, want no error", err)
	}
	return c
}

// TestClientLeaves: cases 1 and 3, in every phase and on every kind of connection.
func TestClientLeaves(t *testing.T) {
	type phaseCase struct {
		name, request, phase string
		status               int64
		serve                func(c *stubConn, reached chan<- bool)
	}
	silent := func(c *stubConn, reached chan<- bool) {
		if _, err := c.request(); err == nil {
			reached <- true
			c.gone()
		}
	}
	cases := []phaseCase{
		{"header wait of a stream", post(chat, streamBody), "header-wait", 499, silent},
		{"header wait of a plain answer", post(chat, chatBody), "header-wait", 499, silent},
		{"interim answer", post(chat, chatBody), "header-wait", 499, func(c *stubConn, reached chan<- bool) {
			if _, err := c.request(); err == nil {
				c.say("HTTP/1.1 103 Early Hints\r\n\r\n")
				reached <- true
				c.gone()
			}
		}},
		{"stream", post(chat, streamBody), "stream", 200, func(c *stubConn, reached chan<- bool) {
			if _, err := c.request(); err == nil {
				c.say(sseHead + chunk(roleEvent))
				reached <- true
				c.gone()
			}
		}},
		{"plain body", post(chat, chatBody), "stream", 200, func(c *stubConn, reached chan<- bool) {
			if _, err := c.request(); err == nil {
				c.say("HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + strings.Repeat("x", 50000))
				reached <- true
				c.gone()
			}
		}},
	}
	for _, way := range ways {
		for _, reset := range []bool{false, true} {
			for _, pc := range cases {
				t.Run(fmt.Sprintf("%s/reset=%v/%s", way.name, reset, pc.name), func(t *testing.T) {
					reached := make(chan bool, 2)
					s := newStub(t, func(c *stubConn) { pc.serve(c, reached) })
					g := newGatewayWith(t, nil, nil, way.wrap(t), s)
					nc := way.dial(t, g.addr)
					c := newClient(t, nc)
					c.say(pc.request)
					<-reached
					want(t, "in flight", g.InFlight(), 1)
					if pc.phase == "stream" {
						if _, err := c.Peek(1); err != nil {
							t.Fatalf("answer: got %v, want its begin", err)
						}
					}
					if reset {
						raw := nc
						if secure, ok := nc.(*tls.Conn); ok {
							raw = secure.NetConn()
						}
						_ = raw.(*net.TCPConn).SetLinger(0)
						_ = raw.Close()
					} else {
						_ = nc.Close()
					}
					eventually(t, "the replica's connection is closed", func() bool { return s.open.Load() == 0 })
					l := g.line()
					want(t, "status", l["status"], pc.status)
					want(t, "phase", l["phase"], pc.phase)
					want(t, "client_gone", l["client_gone"], true)
					want(t, "attempts", s.requests.Load(), int64(1))
					want(t, "resends", l["resends"], nil)
					g.settled()
					want(t, "gauge", g.value(`kvgate_http_requests_in_flight{route="/v1/chat/completions"}`), 0.0)
					for _, reason := range []string{"timeout", "reset", "truncated", "connect"} {
						want(t, reason, g.value(`kvgate_upstream_errors_total{reason="`+reason+`",replica="r0"}`), 0.0)
					}
					want(t, "aborts", g.value(fmt.Sprintf(`kvgate_aborts_total{by="client",phase=%q}`, pc.phase)), 1.0)
				})
			}
		}
	}
}

func TestClientLeavesWhileConnecting(t *testing.T) {
	reached := make(chan bool, 1)
	s := newStub(t, func(c *stubConn) { // takes the connection, never shakes hands
		_, _ = c.Peek(1)
		reached <- true
		c.gone()
	})
	g := newGateway(t, func(s *configs.Settings) { s.Upstream.ConnectTimeout = time.Hour })
	g.setSpecs([]routing.EndpointSpec{{Name: "r0", URL: "https" + strings.TrimPrefix(s.url(), "http")}})
	c := g.dial()
	c.say(post(chat, chatBody))
	<-reached
	_ = c.Close()
	eventually(t, "the replica's connection is closed", func() bool { return s.open.Load() == 0 })
	l := g.line()
	want(t, "status", l["status"], int64(499))
	want(t, "phase", l["phase"], "connect")
	want(t, "connect errors", g.value(`kvgate_upstream_errors_total{reason="connect",replica="r0"}`), 0.0)
	want(t, "replica down", g.value(`kvgate_replica_state{replica="r0",state="down"}`), 0.0)
}

func TestClientLeavesWhileUploading(t *testing.T) {
	f := func(name, request string) {
		t.Run(name, func(t *testing.T) {
			s := newStub(t, plain)
			g := newGateway(t, nil, s)
			c := g.dial()
			c.say(request)
			eventually(t, "the request is read", func() bool { return g.InFlight() == 1 })
			_ = c.Close()
			l := g.line()
			want(t, "status", l["status"], int64(499))
			want(t, "phase", l["phase"], "read")
			want(t, "requests sent on", s.requests.Load(), int64(0))
		})
	}
	f("length", "POST "+chat+" HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n{")
	f("chunked", "POST "+chat+" HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"a\":\r\n")
}

// TestKeepAliveAfterWatch: a watched connection serves on, pipelined or not.
func TestKeepAliveAfterWatch(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			s := newStub(t, plain)
			g := newGatewayWith(t, nil, nil, way.wrap(t), s)
			c := newClient(t, way.dial(t, g.addr))
			for range 3 {
				want(t, "answer", c.ask(post(chat, chatBody)).body, plainAnswer)
			}
			c.say(strings.Repeat(post(chat, chatBody), 5))
			for range 5 {
				want(t, "pipelined answer", c.answer("POST").body, plainAnswer)
			}
			eventually(t, "requests at the replica", func() bool { return s.requests.Load() == 8 })
			want(t, "connections to the replica", s.accepted.Load(), int64(1))
		})
	}
}

// TestPipelinedAnswerIsNotHeld: the first answer goes out while the second waits.
func TestPipelinedAnswerIsNotHeld(t *testing.T) {
	release := make(chan bool)
	s := newStub(t, func(c *stubConn) {
		for {
			r, err := c.request()
			if err != nil {
				return
			}
			if strings.Contains(string(r.body), "slow") {
				select {
				case <-release:
				case <-t.Context().Done():
				}
			}
			c.answer(200, plainAnswer)
		}
	})
	g := newGateway(t, nil, s)
	c := g.dial()
	c.say(post(chat, chatBody) + post(chat, strings.Replace(chatBody, "hello", "slow", 1)))
	want(t, "first answer", c.answer("POST").body, plainAnswer)
	close(release)
	want(t, "second answer", c.answer("POST").body, plainAnswer)
}

// TestSlowReader: case 12. Nothing is buffered for a client that does not read,
// and one that takes nothing is cut off.
func TestSlowReader(t *testing.T) {
	payload := chunk(event(strings.Repeat("x", 16<<10)))
	total := make(chan int64, 1)
	s := newStub(t, func(c *stubConn) {
		if _, err := c.request(); err != nil {
			return
		}
		c.say(sseHead)
		n := int64(0)
		for n < 200<<20 && c.say(payload) {
			n += int64(len(payload))
		}
		total <- n
	})
	g := newGateway(t, func(s *configs.Settings) { s.Server.WriteTimeout = 200 * time.Millisecond }, s)
	c := g.dial()
	c.say(post(chat, streamBody))
	n := <-total
	// What is on its way sits in the sockets' buffers: a few MB each on loopback.
	if limit := int64(32 << 20); n > limit {
		t.Errorf("bytes taken from the replica: got %d, want at most %d", n, limit)
	}
	l := g.line()
	want(t, "client_gone", l["client_gone"], true)
	want(t, "err", l["err"], "slow_client")
	eventually(t, "the connection is closed", func() bool { return g.value("kvgate_conns_open{}") == 0 })
}

// TestSlowReaderIsServed: a client that reads slowly but steadily gets everything.
func TestSlowReaderIsServed(t *testing.T) {
	want1 := strings.Repeat(event(strings.Repeat("x", 8<<10)), 300) + doneEvent
	s := newStub(t, func(c *stubConn) {
		if _, err := c.request(); err != nil {
			return
		}
		c.say(sseHead + chunk(want1) + lastChunk)
		c.gone()
	})
	g := newGateway(t, func(s *configs.Settings) { s.Server.WriteTimeout = 300 * time.Millisecond }, s)
	c := g.dial()
	c.say(post(chat, streamBody))
	time.Sleep(100 * time.Millisecond) // the sockets fill while nobody reads
	a := c.answer("POST")
	want(t, "error", a.err, error(nil))
	want(t, "whole body", a.body == want1, true)
}

func TestHTTP10(t *testing.T) {
	f := func(name, answer, body string, broken bool) {
		t.Run(name, func(t *testing.T) {
			s := newStub(t, func(c *stubConn) {
				if _, err := c.request(); err == nil {
					c.say(answer)
				}
			})
			g := newGateway(t, nil, s)
			c := g.dial()
			c.say(fmt.Sprintf("POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s", chat, len(streamBody), streamBody))
			got, err := io.ReadAll(c)
			head, rest, _ := strings.Cut(string(got), "\r\n\r\n")
			want(t, "body", rest, body)
			want(t, "broken", err != nil, broken)
			if strings.Contains(head, "chunked") || !strings.Contains(head, "Connection: close") {
				t.Errorf("head: got %q, want no chunks and Connection: close", head)
			}
		})
	}
	events := event("a") + doneEvent
	f("stream", sseHead+chunk(event("a"))+chunk(doneEvent)+lastChunk, events, false)
	f("length", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", "ok", false)
	f("broken stream", sseHead+chunk(event("a")), event("a"), true)
	t.Run("kept alive", func(t *testing.T) {
		c := newGateway(t, nil, newStub(t, plain)).dial()
		for range 2 {
			a := c.ask(fmt.Sprintf("POST %s HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%s", chat, len(chatBody), chatBody))
			want(t, "body", a.body, plainAnswer)
			want(t, "Connection", a.Header.Get("Connection"), "keep-alive")
		}
	})
}
