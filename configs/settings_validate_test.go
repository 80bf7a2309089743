package configs

import (
	"errors"
	"testing"
	"time"
)

func TestValidate(t *testing.T) {
	f := func(change func(s *Settings), want ...string) {
		t.Helper()
		s := DefaultSettings()
		change(&s)
		errs := s.Validate()
		if len(errs) != len(want) {
			t.Errorf("got %v, want %q", errs, want)
			return
		}
		for i, err := range errs {
			var p *Problem
			if !errors.As(err, &p) || p.Path == "" {
				t.Errorf("got %T without a key, want a Problem with one", err)
			}
			if got := err.Error(); got != want[i] {
				t.Errorf("got\n%s\nwant\n%s", got, want[i])
			}
		}
	}
	f(func(*Settings) {})

	listen := " is no address to listen on (write HOST:PORT or :PORT; an IPv6 address goes in brackets: [::1]:8080)"
	for _, good := range []string{":0", ":65535", "127.0.0.1:8080", "[::1]:8080", "[::]:8080", "localhost:8080", "a_b.example:1"} {
		f(func(s *Settings) { s.Listen = good })
	}
	for _, bad := range []string{"", "8080", "127.0.0.1", "::1:8080", ":65536", ":-1", ":http", ":", "a b:1", "[fe80::1%eth0]:1", "http://a:1", "1.2.3:1"} {
		f(func(s *Settings) { s.Listen = bad }, "listen: "+quote(bad)+listen)
	}
	f(func(s *Settings) { s.AdminListen = "9090" }, `admin_listen: "9090"`+listen)
	f(func(s *Settings) { s.AdminListen = "" })
	f(func(s *Settings) { s.AdminListen = "unix:/run/kvgate.sock" })
	f(func(s *Settings) { s.AdminListen = "unix:run/x" }, `admin_listen: the path "run/x" is not absolute (write unix:/PATH)`)
	f(func(s *Settings) { s.AdminListen = "unix:" }, `admin_listen: the path "" is not absolute (write unix:/PATH)`)
	f(func(s *Settings) { s.Listen = "unix:/run/x" }, `listen: "unix:/run/x"`+listen)
	f(func(s *Settings) { s.AdminListen = "127.0.0.1:8080" }, "admin_listen: 127.0.0.1:8080 collides with listen :8080 (choose another port)")
	f(func(s *Settings) { s.Listen, s.AdminListen, s.Admin.Insecure = "10.0.0.1:80", "0.0.0.0:80", true }, "admin_listen: 0.0.0.0:80 collides with listen 10.0.0.1:80 (choose another port)")
	f(func(s *Settings) { s.Listen, s.AdminListen, s.Admin.TokenFile = "10.0.0.1:80", "10.0.0.1:80", "t" }, "admin_listen: 10.0.0.1:80 collides with listen 10.0.0.1:80 (choose another port)")
	f(func(s *Settings) { s.Listen, s.AdminListen = "10.0.0.1:80", "127.0.0.1:80" })
	f(func(s *Settings) { s.Listen, s.AdminListen, s.Admin.Insecure = ":0", ":0", true })
	for _, open := range []string{":9090", "0.0.0.0:9090", "10.0.0.1:9090", "[::]:9090", "gate.example:9090"} {
		f(func(s *Settings) { s.AdminListen = open },
			"admin_listen: "+open+" can be reached from other machines and asks for no token (set admin.token_file, listen on 127.0.0.1 or unix:/PATH, or set admin.insecure: true)")
		f(func(s *Settings) { s.AdminListen, s.Admin.TokenFile = open, "t" })
		f(func(s *Settings) { s.AdminListen, s.Admin.Insecure = open, true })
	}
	for _, own := range []string{"127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"} {
		f(func(s *Settings) { s.AdminListen = own })
	}
	f(func(s *Settings) { s.TLS.CertFile = "c" }, "tls.cert_file: set without tls.key_file (set both, or none)")
	f(func(s *Settings) { s.TLS.KeyFile = "k" }, "tls.key_file: set without tls.cert_file (set both, or none)")
	f(func(s *Settings) { s.TLS = TLS{"c", "k", "a"} })
	f(func(s *Settings) { s.TLS.ClientCAFile = "a" }, "tls.client_ca_file: clients can show a certificate only over TLS (set tls.cert_file and tls.key_file, too)")
	f(func(s *Settings) { s.Upstream.ClientKeyFile = "k" }, "upstream.client_key_file: set without upstream.client_cert_file (set both, or none)")
	f(func(s *Settings) { s.Isolation.Mode = "tenant" }, `isolation.mode: unknown value "tenant" (known values: shared, key, group)`)
	f(func(s *Settings) { s.Isolation.Mode = "key" },
		"isolation.mode: the tenants are those of the API keys, and there are none (set auth.keys_file, or write shared)",
		"isolation.mode: without a secret a tenant could guess another's salt (set isolation.secret_file: openssl rand -hex 32 makes a secret)")
	f(func(s *Settings) { s.Isolation, s.Auth.KeysFile = Isolation{"group", "s"}, "k" })
	f(func(s *Settings) { s.Limits.DenyFields = nil })
	f(func(s *Settings) { s.Limits.DenyFields = []string{"a", "model", "a"} },
		`limits.deny_fields[1]: "model" cannot be denied, or is listed twice (list names of fields, each once)`,
		`limits.deny_fields[2]: "a" cannot be denied, or is listed twice (list names of fields, each once)`)
	f(func(s *Settings) { s.Upstream.ServerName = "a b" }, `upstream.server_name: "a b" is no host name (write a host name)`)

	f(func(s *Settings) {
		s.Replicas = []Replica{{URL: "http://a:1"}, {Name: "a:1", URL: "http://b"}, {Name: "c", URL: "http://A:1/"}, {URL: "ftp://x"}, {Name: "a:1", Namespace: "n", URL: "http://d"}}
	},
		"replicas[1]: duplicate replica default/a:1, first in replicas[0] (give each replica a name of its own)",
		"replicas[2]: duplicate URL http://a:1, first in replicas[0] (list each replica once)",
		`replicas[3]: the URL "ftp://x" does not start with http:// or https://: write http://HOST:PORT or https://HOST:PORT`)
	f(func(s *Settings) { s.Log = Log{Level: "INFO", Format: ""} },
		"log.level: unknown value \"INFO\" (did you mean `info`?)",
		`log.format: unknown value "" (known values: json, console, auto)`)

	unit := `the duration 0s is too short (a number with a unit, such as "200ms", "60s" or "1h30m")`
	f(func(s *Settings) { s.Server = Server{} },
		"server.header_timeout: "+unit, "server.body_timeout: "+unit, "server.idle_timeout: "+unit, "server.write_timeout: "+unit,
		"server.max_conns: the number 0 is too small (write a number of at least 1)")
	f(func(s *Settings) { s.Server.MinUploadRate = -1 }, "server.min_upload_rate: the size -1 is negative (write 0 or a size such as 1KiB)")
	network := " (write an address such as 10.0.0.7, or a network such as 10.0.0.0/8)"
	f(func(s *Settings) { s.Server.TrustedProxies = []string{"10.0.0.7", "10.0.0.0/8", "fd00::/8", "::1"} })
	f(func(s *Settings) { s.Server.TrustedProxies = []string{"::1", "lb"} }, `server.trusted_proxies[1]: "lb" is neither`+network)
	f(func(s *Settings) { s.Server.TrustedProxies = []string{"10.0.0.0/33"} }, `server.trusted_proxies[0]: "10.0.0.0/33" is neither`+network)
	f(func(s *Settings) { s.Limits.MaxN, s.Limits.MaxTokens, s.Limits.MaxItems = -1, -2, -3 },
		"limits.max_n: the number -1 is negative (write 0 for no limit, or a positive number)",
		"limits.max_tokens: the number -2 is negative (write 0 for no limit, or a positive number)",
		"limits.max_items: the number -3 is negative (write 0 for no limit, or a positive number)")
	f(func(s *Settings) { s.Limits.Hops = 0 }, "limits.hops: the number 0 is out of range (write a number from 1 to 999)")
	f(func(s *Settings) { s.Limits.Hops = 1000 }, "limits.hops: the number 1000 is out of range (write a number from 1 to 999)")
	f(func(s *Settings) { s.Limits.Hops = 999 })
	bodies := func(list ...string) func(*Settings) { return func(s *Settings) { s.Limits.RouteBodies = list } }
	shape := " (write PATH=SIZE such as /v1/embeddings=4MiB)"
	f(bodies("/v1/embeddings=4MiB", "/custom/*=64MiB"))
	f(bodies("/v1/embeddings"), `limits.route_bodies[0]: "/v1/embeddings" is no path with a size`+shape)
	f(bodies("v1=4MiB"), `limits.route_bodies[0]: "v1=4MiB" is no path with a size`+shape)
	f(bodies("/a=0"), "limits.route_bodies[0]: the size 0 is too small"+shape)
	f(bodies("/a=4MB"), `limits.route_bodies[0]: the unit of "4MB" may mean 1000 or 1024: write a number of bytes, or one with the unit KiB, MiB, GiB or TiB, such as 32MiB`+shape)
	f(bodies("/a=1", "/a=2"), `limits.route_bodies[1]: "/a" is listed twice (keep one of them)`)
	f(bodies("/a=2GiB"), "limits.route_bodies[0]: 2GiB is larger than limits.buffered 1GiB (raise limits.buffered or lower the size, else no body of that size is ever admitted)")
	f(func(s *Settings) { s.Upstream = Upstream{MaxIdle: -1} },
		"upstream.connect_timeout: "+unit, "upstream.header_timeout: "+unit, "upstream.stream_timeout: "+unit, "upstream.idle_timeout: "+unit,
		"upstream.max_idle: the number -1 is negative (write 0 to keep no connection, or a positive number)")
	f(func(s *Settings) { s.Upstream.RetryPercent, s.Upstream.RetryMin = 101, -1 },
		"upstream.retry_percent: the number 101 is out of range (write a number from 0 to 100)",
		"upstream.retry_min: the number -1 is negative (write 0 or a positive number)")
	f(func(s *Settings) { s.Upstream.RetryPercent, s.Upstream.RetryMin = 0, 0 })
	f(func(s *Settings) { s.Upstream.MaxIdle = 0 })
	f(func(s *Settings) { s.Scrape = Scrape{} },
		"scrape.interval: the duration 0s is too short (write at least 10ms)", "scrape.timeout: "+unit, "scrape.staleness: "+unit,
		"scrape.models_interval: the duration 0s is too short (write at least 10ms)")
	f(func(s *Settings) { s.Drain = Drain{-1, -1, -1} },
		"drain.delay: the duration -1ns is too short (write at least 0s)", "drain.grace: the duration -1ns is too short (write at least 0s)",
		"drain.timeout: the duration -1ns is too short (write at least 0s)")
	f(func(s *Settings) { s.Drain = Drain{} })

	late := " (make the interval shorter or the staleness longer, else every observation counts as missing)"
	f(func(s *Settings) { s.Scrape.Interval = time.Minute }, "scrape.interval: scrape.interval 1m0s is longer than scrape.staleness 2s"+late)
	f(func(s *Settings) { s.Scrape.Staleness = 100 * time.Millisecond }, "scrape.staleness: scrape.interval 200ms is longer than scrape.staleness 100ms"+late)
	f(func(s *Settings) { s.Scrape.Interval = 2 * time.Second })

	small := " (raise limits.buffered or lower limits.body, else no body of that size is ever admitted)"
	f(func(s *Settings) { s.Limits.Body = 0 }, "limits.body: the size 0 is too small (write a size such as 32MiB)")
	f(func(s *Settings) { s.Limits.Body = 2 << 30 }, "limits.body: limits.buffered 1GiB is smaller than limits.body 2GiB"+small)
	f(func(s *Settings) { s.Limits.Buffered = 1 << 20 }, "limits.buffered: limits.buffered 1MiB is smaller than limits.body 32MiB"+small)
	f(func(s *Settings) { s.Limits.Buffered = 32 << 20 })
	f(func(s *Settings) { s.Limits.Header, s.Limits.UpstreamHeader = 1023, 16<<20+1 },
		"limits.header: the size 1023 is out of range (write a size from 1KiB to 16MiB)",
		"limits.upstream_header: the size 16777217 is out of range (write a size from 1KiB to 16MiB)")

	paths := func(list ...string) func(*Settings) { return func(s *Settings) { s.Routes.Passthrough = list } }
	f(paths("/v1/score", "/custom/*", "/a/b.c/*", "/"))
	form := " (write an exact path such as /v1/score, or a prefix such as /custom/*)"
	f(paths("v1"), `routes.passthrough[0]: "v1" does not start with /`+form)
	f(paths(""), `routes.passthrough[0]: "" does not start with /`+form)
	for _, bad := range []string{"/a*", "/*/b", "/a?b", "/a#b", "/a b", "/a//b", "/../b", "/a/.", "/a/../*", "/%2e", "/é", `/a\b`} {
		f(paths(bad), "routes.passthrough[0]: "+quote(bad)+" is no plain path"+form)
	}
	f(paths("/a", "/b", "/a"), `routes.passthrough[2]: "/a" is listed twice (keep one of them)`)
}
