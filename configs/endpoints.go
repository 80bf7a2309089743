package configs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ErrNoEndpoints says that a file of endpoints is well-formed and lists none. A file that
// was emptied by accident must not take every replica away.
var ErrNoEndpoints = errors.New("no endpoints (list at least one under `endpoints:`)")

// schemeLabel chooses http (the default) or https for an endpoint.
const schemeLabel = "kvgate.io/scheme"

const defaultNamespace = "default"

// Endpoint is one replica in llm-d's file-discovery format.
type Endpoint struct {
	Name      string
	Namespace string // "default" when the file has none
	Address   string // IPv4 or IPv6 address, or host name
	Port      int
	Labels    map[string]string
	Pos       Position
}

// ID returns namespace/name.
func (e Endpoint) ID() string { return e.Namespace + "/" + e.Name }

// URL returns scheme://address:port. The scheme is http unless the label kvgate.io/scheme says https.
func (e Endpoint) URL() string {
	scheme := "http"
	if s := e.Labels[schemeLabel]; s != "" {
		scheme = s
	}
	return scheme + "://" + net.JoinHostPort(e.Address, strconv.Itoa(e.Port))
}

// Replica returns the endpoint as the settings know a replica.
func (e Endpoint) Replica() Replica {
	return Replica{Name: e.Name, Namespace: e.Namespace, URL: e.URL(), Labels: e.Labels, Source: e.Pos.String()}
}

// portNumber is a TCP port, as a string (which is all that llm-d takes) or an integer.
type portNumber int

// UnmarshalText reads a port from 1 to 65535.
func (p *portNumber) UnmarshalText(text []byte) error {
	n, err := strconv.ParseUint(string(text), 10, 16)
	if err != nil || n == 0 {
		return fmt.Errorf("%s is no port: write a number from 1 to 65535", quote(string(text)))
	}
	*p = portNumber(n)
	return nil
}

// fileEndpoint is the schema of one item in the file.
type fileEndpoint struct {
	Name      string            `json:"name"`
	Namespace string            `json:"namespace"`
	Address   string            `json:"address"`
	Port      portNumber        `json:"port"`
	Labels    map[string]string `json:"labels"`
	Pos       Position          `json:"-"`
}

// ParseEndpoints reads llm-d's file-discovery format, YAML or JSON; file is its name in
// messages. Keys that the format does not have are warnings, because llm-d ignores them. The
// error is Problems, or wraps ErrNoEndpoints when the list is empty or absent.
func ParseEndpoints(file string, data []byte) (endpoints []Endpoint, warnings []string, err error) {
	root, problems := parseDocument(file, data)
	if problems == nil && root.node == nil {
		return nil, nil, fmt.Errorf("%s: %w", file, ErrNoEndpoints)
	}
	if root.node == nil {
		return nil, nil, problems.Err()
	}
	if root.node.Kind == yaml.SequenceNode {
		problems.Add(root.Problem("write endpoints: and the list below it, each item with name, address and port", "wants an object, got a list"))
		return nil, nil, problems.Err()
	}
	var in struct {
		Endpoints []fileEndpoint `json:"endpoints"`
	}
	d := decoder{file: file, tag: "json", problems: &problems, unknown: func(p *Problem) { warnings = append(warnings, p.Error()) }}
	d.decode(root, &in)
	ids, urls := make(map[string]Position), make(map[string]Position)
	for _, f := range in.Endpoints {
		if f.Pos.node == nil {
			continue // the decoder has said why
		}
		e := Endpoint{Name: f.Name, Namespace: f.Namespace, Address: canonicalHost(f.Address), Port: int(f.Port), Labels: f.Labels, Pos: f.Pos}
		if e.Namespace == "" {
			e.Namespace = defaultNamespace
		}
		n := len(problems)
		e.check(&problems)
		if len(problems) > n {
			continue
		}
		if first, twice := ids[e.ID()]; twice {
			problems.Add(e.Pos.At("name").Problem("give each endpoint of a namespace a name of its own", "duplicate endpoint %s, first in line %d", e.ID(), first.Line))
		} else if first, twice := urls[e.URL()]; twice {
			problems.Add(e.Pos.At("address").Problem("list each replica once", "duplicate address %s, first in line %d", e.URL(), first.Line))
		}
		ids[e.ID()], urls[e.URL()] = e.Pos, e.Pos
		endpoints = append(endpoints, e)
	}
	if err := problems.Err(); err != nil {
		return nil, warnings, err
	}
	if len(endpoints) == 0 {
		return nil, warnings, fmt.Errorf("%s: %w", file, ErrNoEndpoints)
	}
	return endpoints, warnings, nil
}

// check reports what is missing or malformed in one endpoint.
func (e Endpoint) check(problems *Problems) {
	report := func(field, remedy, format string, args ...any) {
		at := e.Pos.At(field)
		for _, p := range *problems {
			if p.Line == at.Line && p.Column == at.Column && p.Path == at.Path {
				return // of a wrong type, which has been said
			}
		}
		problems.Add(at.Problem(remedy, format, args...))
	}
	if e.Name == "" {
		report("name", "write the name of the replica", "missing")
	} else if err := checkName(e.Name); err != nil {
		report("name", nameRemedy, "%v", err)
	}
	if err := checkName(e.Namespace); err != nil {
		report("namespace", nameRemedy, "%v", err)
	}
	if e.Address == "" {
		report("address", "write an IP address or a host name", "missing")
	} else if !validHost(e.Address) {
		report("address", "write one of these, without scheme and port", "%s is no IPv4 or IPv6 address and no host name", quote(e.Address))
	}
	if e.Port == 0 {
		report("port", `write a number from 1 to 65535`, "missing")
	}
	if s := e.Labels[schemeLabel]; s != "" && s != "http" && s != "https" {
		report("labels", "write http or https", "the label %s has the value %s", schemeLabel, quote(s))
	}
}

const nameRemedy = "write 1 to 253 printable ASCII characters without blanks and without any of /,=\"\\"

// checkName refuses what cannot stand in a URL path, a header, a metric label or a --replica flag.
func checkName(name string) error {
	const longest = 253 // of a Kubernetes object name
	bad := func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`/,="\`, r) }
	if len(name) > longest || strings.ContainsFunc(name, bad) {
		return fmt.Errorf("the name %s is not allowed", quote(name))
	}
	return nil
}

// validHost accepts IPv4 and IPv6 addresses without zone and DNS names (also with the
// underscore that Docker puts into them).
func validHost(host string) bool {
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr.Zone() == ""
	}
	host = strings.TrimSuffix(host, ".")
	if len(host) > 253 || strings.Trim(host, "0123456789.") == "" {
		return false // nothing but digits and dots is a broken IPv4 address
	}
	for label := range strings.SplitSeq(host, ".") {
		bad := func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
		}
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' || strings.ContainsFunc(label, bad) {
			return false
		}
	}
	return true
}

// canonicalHost writes one host in one way: IPv6 as RFC 5952 has it, names in lower case.
func canonicalHost(host string) string {
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr.String()
	}
	return strings.ToLower(host)
}
