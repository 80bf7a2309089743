package configs

import (
	"errors"
	"strings"
	"testing"
)

func TestParseEndpoints(t *testing.T) {
	f := func(name, in string, want []string, warnings ...string) {
		t.Run(name, func(t *testing.T) {
			t.Helper()
			list, warned, err := ParseEndpoints("e.yaml", []byte(in))
			if err != nil {
				t.Fatalf("got error %v, want none", err)
			}
			var got []string
			for _, e := range list {
				got = append(got, e.ID()+" "+e.URL())
			}
			if strings.Join(got, "\n") != strings.Join(want, "\n") {
				t.Errorf("got %q, want %q", got, want)
			}
			if got, want := strings.Join(warned, "\n"), strings.Join(warnings, "\n"); got != want {
				t.Errorf("got warnings\n%s\nwant\n%s", got, want)
			}
		})
	}
	f("llm-d's own form", "endpoints:\n- name: ep1\n  namespace: ns1\n  address: \"10.0.0.1\"\n  port: \"8000\"\n  labels: {llm-d.ai/role: decode}\n", []string{"ns1/ep1 http://10.0.0.1:8000"})
	f("port as a number", "endpoints: [{name: a, address: 10.0.0.1, port: 8000}]", []string{"default/a http://10.0.0.1:8000"})
	f("host name", "endpoints: [{name: a, address: VLLM-0.ns.svc, port: 1}]", []string{"default/a http://vllm-0.ns.svc:1"})
	f("IPv6", "endpoints: [{name: a, address: '2001:DB8:0::1', port: '1'}]", []string{"default/a http://[2001:db8::1]:1"})
	f("https", "endpoints: [{name: a, address: b, port: 443, labels: {kvgate.io/scheme: https}}]", []string{"default/a https://b:443"})
	f("http", "endpoints: [{name: a, address: b, port: 443, labels: {kvgate.io/scheme: http}}]", []string{"default/a http://b:443"})
	f("one name in two namespaces", "endpoints: [{name: a, address: b, port: 1}, {name: a, namespace: n, address: b, port: 2}]", []string{"default/a http://b:1", "n/a http://b:2"})
	f("JSON", `{"endpoints": [{"name": "a", "address": "b", "port": "1", "labels": {"A.b/c": "D"}}]}`, []string{"default/a http://b:1"})
	f("unknown keys", "version: 1\nendpoints:\n- {name: a, address: b, port: 1, lables: {x: y}}\n", []string{"default/a http://b:1"},
		"e.yaml:1:1: version: unknown field (known fields: endpoints)",
		"e.yaml:3:34: endpoints[0].lables: unknown field (did you mean `labels`?)")
}

func TestParseEndpointsErrors(t *testing.T) {
	f := func(name, in, want string) {
		t.Run(name, func(t *testing.T) {
			t.Helper()
			list, _, err := ParseEndpoints("e.yaml", []byte(in))
			if err == nil {
				t.Fatalf("got no error, want %s", want)
			}
			if got := err.Error(); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if list != nil {
				t.Errorf("got %v beside the error, want nil", list)
			}
			if got, want := errors.Is(err, ErrNoEndpoints), strings.Contains(want, "no endpoints"); got != want {
				t.Errorf("got ErrNoEndpoints %v, want %v", got, want)
			}
		})
	}
	f("too large", strings.Repeat("#", maxDocument+1), "e.yaml: larger than 1048576 bytes")
	f("syntax", "endpoints: [", "e.yaml:1: did not find expected node content")
	f("a list", "- targets: ['a:1']\n", "e.yaml:1:1: wants an object, got a list (write endpoints: and the list below it, each item with name, address and port)")
	f("a scalar", "endpoints\n", `e.yaml:1:1: wants an object, got the string "endpoints" (fields: endpoints)`)
	f("an item that is none", "endpoints: [a, ~, {name: a, address: b, port: 1}]",
		"e.yaml:1:13: endpoints[0]: wants an object, got the string \"a\" (fields: name, namespace, address, port, labels)\n"+
			"e.yaml:1:16: endpoints[1]: an empty list item (remove it)")
	f("nothing set", "endpoints:\n- labels: {}\n",
		"e.yaml:2:3: endpoints[0].name: missing (write the name of the replica)\n"+
			"e.yaml:2:3: endpoints[0].address: missing (write an IP address or a host name)\n"+
			"e.yaml:2:3: endpoints[0].port: missing (write a number from 1 to 65535)")
	f("wrong types are reported once", "endpoints: [{name: 5, address: [], port: true, labels: {x: 1}}]",
		"e.yaml:1:20: endpoints[0].name: wants a string, got the number 5 (put it in quotes)\n"+
			"e.yaml:1:32: endpoints[0].address: wants a string, got a list\n"+
			"e.yaml:1:42: endpoints[0].port: wants a string or a number, got the boolean true\n"+
			"e.yaml:1:60: endpoints[0].labels.x: wants a string, got the number 1 (put it in quotes)")
	f("name", "endpoints: [{name: a b, namespace: c/d, address: b, port: 1}]",
		"e.yaml:1:20: endpoints[0].name: the name \"a b\" is not allowed ("+nameRemedy+")\n"+
			"e.yaml:1:36: endpoints[0].namespace: the name \"c/d\" is not allowed ("+nameRemedy+")")
	f("address", "endpoints: [{name: a, address: '10.0.0', port: 1}, {name: b, address: 'http://b', port: 1}]",
		"e.yaml:1:32: endpoints[0].address: \"10.0.0\" is no IPv4 or IPv6 address and no host name (write one of these, without scheme and port)\n"+
			"e.yaml:1:71: endpoints[1].address: \"http://b\" is no IPv4 or IPv6 address and no host name (write one of these, without scheme and port)")
	for _, port := range []string{"0", "'0'", "65536", "-1", "http", "''", "1.5", "0x50"} {
		f("port "+port, "endpoints: [{name: a, address: b, port: "+port+"}]",
			`e.yaml:1:41: endpoints[0].port: "`+strings.Trim(port, "'")+`" is no port: write a number from 1 to 65535`)
	}
	f("scheme", "endpoints: [{name: a, address: b, port: 1, labels: {kvgate.io/scheme: ftp}}]",
		`e.yaml:1:52: endpoints[0].labels: the label kvgate.io/scheme has the value "ftp" (write http or https)`)
	f("duplicate name", "endpoints:\n- {name: a, address: b, port: 1}\n- {name: a, namespace: default, address: c, port: 1}\n",
		"e.yaml:3:10: endpoints[1].name: duplicate endpoint default/a, first in line 2 (give each endpoint of a namespace a name of its own)")
	f("duplicate address", "endpoints:\n- {name: a, address: b, port: 1}\n- {name: c, address: B, port: 1}\n",
		"e.yaml:3:22: endpoints[1].address: duplicate address http://b:1, first in line 2 (list each replica once)")
	f("duplicate key", "endpoints: [{name: a, name: b, address: c, port: 1}]",
		"e.yaml:1:23: endpoints[0].name: set twice, first in line 1 (keep one of them)")

	none := "e.yaml: no endpoints (list at least one under `endpoints:`)"
	for name, in := range map[string]string{"empty": "", "comments": "# x\n", "null": "---\n", "no key": "{}", "null list": "endpoints:\n", "empty list": "endpoints: []\n", "misspelt": "endpoint: [{}]\n"} {
		f(name, in, none)
	}
	_, warnings, _ := ParseEndpoints("e.yaml", []byte("endpoint: [{}]\n"))
	if got, want := strings.Join(warnings, "\n"), "e.yaml:1:1: endpoint: unknown field (did you mean `endpoints`?)"; got != want {
		t.Errorf("got warnings %s, want %s", got, want)
	}
}

func TestEndpointReplica(t *testing.T) {
	list, _, err := ParseEndpoints("e.yaml", []byte("endpoints:\n- {name: a, address: '::1', port: 1, labels: {kvgate.io/scheme: https}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	r := list[0].Replica()
	if got, want := r.ID()+" "+r.URL+" "+r.Source+" "+r.Labels["kvgate.io/scheme"], "default/a https://[::1]:1 e.yaml:2:3: endpoints[0] https"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if n, err := r.Normalize(); err != nil || n.URL != r.URL {
		t.Errorf("got %+v and error %v, want a replica that is normalized already", n, err)
	}
}
