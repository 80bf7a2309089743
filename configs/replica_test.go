package configs

import (
	"strings"
	"testing"
)

func TestReplicaNormalize(t *testing.T) {
	f := func(in Replica, name, url string) {
		t.Helper()
		got, err := in.Normalize()
		if err != nil || got.Name != name || got.URL != url || got.Namespace != "default" {
			t.Errorf("got %+v and error %v, want %s and %s", got, err, name, url)
		}
		again, err := got.Normalize()
		if err != nil || again.ID() != got.ID() || again.URL != got.URL {
			t.Errorf("got %+v and error %v the second time, want %+v", again, err, got)
		}
	}
	f(Replica{URL: "http://10.0.0.1:8000"}, "10.0.0.1:8000", "http://10.0.0.1:8000")
	f(Replica{URL: "http://10.0.0.1:8000/"}, "10.0.0.1:8000", "http://10.0.0.1:8000")
	f(Replica{URL: "http://vllm-0"}, "vllm-0:80", "http://vllm-0:80")
	f(Replica{URL: "https://vllm-0"}, "vllm-0:443", "https://vllm-0:443")
	f(Replica{URL: "HTTPS://VLLM.Example.NET:8443"}, "vllm.example.net:8443", "https://vllm.example.net:8443")
	f(Replica{URL: "http://[2001:DB8:0::1]:8000"}, "[2001:db8::1]:8000", "http://[2001:db8::1]:8000")
	f(Replica{URL: "http://[::1]"}, "[::1]:80", "http://[::1]:80")
	f(Replica{URL: "http://a_b:08000"}, "a_b:8000", "http://a_b:8000")
	f(Replica{Name: "A.b-1:x", URL: "http://a"}, "A.b-1:x", "http://a:80")
}

// What a replica has of its own stands in fields, or in labels where there is nothing else.
func TestReplicaAccess(t *testing.T) {
	labels := func(values ...string) map[string]string {
		m := map[string]string{"x": "y"}
		for i, v := range values {
			if v != "" {
				m[AccessLabels[i]] = v
			}
		}
		return m
	}
	f := func(in Replica, want string) {
		t.Helper()
		in.URL = "https://h:1"
		n, err := in.Normalize()
		got := strings.Join([]string{n.APIKeyFile, n.CAFile, n.ClientCertFile, n.ClientKeyFile, n.ServerName, n.MetricsKeyFile}, " ")
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%+v: got %s, want %s", in, got, want)
		}
	}
	f(Replica{}, "     ")
	f(Replica{APIKeyFile: "k", CAFile: "a", ClientCertFile: "c", ClientKeyFile: "e", ServerName: "s", MetricsKeyFile: "m"}, "k a c e s m")
	f(Replica{Labels: labels("k", "a", "c", "e", "s", "m")}, "k a c e s m")
	f(Replica{APIKeyFile: "k", Labels: labels("k", "a")}, "k a    ")
	f(Replica{APIKeyFile: "k", Labels: labels("other")}, "api_key_file and the label kvgate.io/api-key-file differ: keep one of them")
	f(Replica{ClientCertFile: "c"}, "client_cert_file and client_key_file belong together: set both, or none")
	f(Replica{Labels: labels("", "", "", "e")}, "client_cert_file and client_key_file belong together: set both, or none")
	f(Replica{ServerName: "a b"}, `server_name: "a b" is no host name`)
}

func TestReplicaNormalizeErrors(t *testing.T) {
	f := func(url, want string) {
		t.Helper()
		_, err := Replica{URL: url}.Normalize()
		if err == nil || err.Error() != want {
			t.Errorf("got %v for %q, want %s", err, url, want)
		}
	}
	form := ": write http://HOST:PORT or https://HOST:PORT"
	f("", `the URL "" does not start with http:// or https://`+form)
	f("10.0.0.1:8000", `"10.0.0.1:8000" is no URL`+form)
	f("vllm:8000", `the URL "vllm:8000" does not start with http:// or https://`+form)
	f("vllm", `the URL "vllm" does not start with http:// or https://`+form)
	f("tcp://a:1", `the URL "tcp://a:1" does not start with http:// or https://`+form)
	f("http:a:1", `the URL "http:a:1" does not start with http:// or https://`+form)
	f("http://a:1/v1", `the URL "http://a:1/v1" has a path`+form)
	f("http://a:1//", `the URL "http://a:1//" has a path`+form)
	f("http://a:1?x=y", `the URL "http://a:1?x=y" has a query or fragment`+form)
	f("http://a:1?", `the URL "http://a:1?" has a query or fragment`+form)
	f("http://a:1#x", `the URL "http://a:1#x" has a query or fragment`+form)
	f("http://a:1/#", `the URL "http://a:1/#" has a query or fragment`+form)
	f("http://", `the URL "http://" has no valid host`+form)
	f("http://:80", `the URL "http://:80" has no valid host`+form)
	f("http://1.2.3", `the URL "http://1.2.3" has no valid host`+form)
	f("http://-a", `the URL "http://-a" has no valid host`+form)
	f("http://[fe80::1%25eth0]:1", `the URL "http://[fe80::1%25eth0]:1" has no valid host`+form)
	f("http://a:", `the URL "http://a:" has an empty port`+form)
	f("http://a:0", `the URL "http://a:0": "0" is no port: write a number from 1 to 65535`)
	f("http://a:65536", `the URL "http://a:65536": "65536" is no port: write a number from 1 to 65535`)
	f("http://a:x", `"http://a:x" is no URL`+form)
	f("http://user:secret@a", "the URL of a replica has a user or password: set upstream.api_key_file instead")

	g := func(r Replica, want string) {
		t.Helper()
		if _, err := r.Normalize(); err == nil || err.Error() != want {
			t.Errorf("got %v for %+v, want %s", err, r, want)
		}
	}
	for _, name := range []string{"a/b", "a b", "a,b", "a=b", `a"b`, `a\b`, "a\n", "é", strings.Repeat("a", 254)} {
		g(Replica{Name: name, URL: "http://a"}, "the name "+quote(name)+" is not allowed: "+nameRemedy)
		g(Replica{Namespace: name, URL: "http://a"}, "the name "+quote(name)+" is not allowed: "+nameRemedy)
	}
}

func TestReplicaUnmarshalText(t *testing.T) {
	f := func(text, name, url string) {
		t.Helper()
		var r Replica
		if err := r.UnmarshalText([]byte(text)); err != nil || r.Name != name || r.URL != url {
			t.Errorf("got %+v and error %v for %q, want %q and %q", r, err, text, name, url)
		}
	}
	f("http://a:1", "", "http://a:1")
	f("a=http://a:1", "a", "http://a:1")
	f("http://a:1?x=y", "", "http://a:1?x=y")
	f("a=b=c", "a", "b=c")
}

func TestValidHost(t *testing.T) {
	f := func(host string, want bool) {
		t.Helper()
		if got := validHost(host); got != want {
			t.Errorf("got %v for %q, want %v", got, host, want)
		}
	}
	for _, good := range []string{"a", "a.b", "a.b.", "A-1.b_c", "1a.2", "10.0.0.1", "::1", "2001:db8::1", "::ffff:10.0.0.1", strings.Repeat("a", 63) + ".b"} {
		f(good, true)
	}
	for _, bad := range []string{"", ".", "a..b", ".a", "-a", "a-", "a b", "a/b", "a:b", "[::1]", "fe80::1%eth0", "1.2.3", "1", "256.0.0.1", "é", strings.Repeat("a", 64), strings.Repeat("a.", 128)} {
		f(bad, false)
	}
}
