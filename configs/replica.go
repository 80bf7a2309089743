package configs

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// UnmarshalText reads the short form of a replica: URL or NAME=URL.
func (r *Replica) UnmarshalText(text []byte) error {
	name, address, named := strings.Cut(string(text), "=")
	switch {
	case !named || strings.Contains(name, "://"):
		name, address = "", string(text)
	case name == "":
		return errors.New("the name of the replica is empty: write NAME=URL, or URL alone")
	}
	*r = Replica{Name: name, URL: address}
	return nil
}

// parseReplicas reads a comma-separated list of replicas in their short form.
func parseReplicas(text string) ([]Replica, error) {
	var out []Replica
	for _, item := range splitList(text) {
		var r Replica
		if err := r.UnmarshalText([]byte(item)); err != nil {
			return nil, err
		}
		if _, err := r.Normalize(); err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// splitList splits a comma-separated list and trims blanks; "" is the empty list.
func splitList(text string) []string {
	if strings.TrimSpace(text) == "" {
		return nil
	}
	items := strings.Split(text, ",")
	for i := range items {
		items[i] = strings.TrimSpace(items[i])
	}
	return items
}

// ID returns namespace/name.
func (r Replica) ID() string { return r.Namespace + "/" + r.Name }

// Normalize fills in what may be left out (the port of the scheme, the name, the namespace) and
// brings the URL into the form scheme://host:port. The error says what is wrong with the URL or the name.
func (r Replica) Normalize() (Replica, error) {
	const remedy = "write http://HOST:PORT or https://HOST:PORT"
	if strings.Contains(r.URL, "@") { // not shown: it may hold a password
		return r, errors.New("the URL of a replica has a user or password: set upstream.api_key_file instead")
	}
	u, err := url.Parse(r.URL)
	if err != nil {
		return r, fmt.Errorf("%s is no URL: %s", quote(r.URL), remedy)
	}
	port := map[string]string{"http": "80", "https": "443"}[u.Scheme]
	var refused string
	switch {
	case port == "" || u.Opaque != "":
		refused = "does not start with http:// or https://"
	case u.Path != "" && u.Path != "/":
		refused = "has a path"
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.Contains(r.URL, "#"):
		refused = "has a query or fragment"
	case !validHost(u.Hostname()):
		refused = "has no valid host"
	case u.Port() == "" && strings.HasSuffix(u.Host, ":"):
		refused = "has an empty port"
	}
	if refused != "" {
		return r, fmt.Errorf("the URL %s %s: %s", quote(r.URL), refused, remedy)
	}
	if u.Port() != "" {
		var p portNumber
		if err := p.UnmarshalText([]byte(u.Port())); err != nil {
			return r, fmt.Errorf("the URL %s: %w", quote(r.URL), err)
		}
		port = strconv.Itoa(int(p))
	}
	hostPort := net.JoinHostPort(canonicalHost(u.Hostname()), port)
	r.URL = u.Scheme + "://" + hostPort
	if err := r.access(); err != nil {
		return r, err
	}
	if r.Name == "" {
		r.Name = hostPort
	}
	if r.Namespace == "" {
		r.Namespace = defaultNamespace
	}
	for _, name := range []string{r.Name, r.Namespace} {
		if err := checkName(name); err != nil {
			return r, fmt.Errorf("%w: %s", err, nameRemedy)
		}
	}
	return r, nil
}

// AccessLabels are the labels that stand for a replica's own api_key_file and so
// on where there is nothing but labels: in llm-d's file-discovery format. They
// name files of this machine, so only whoever writes its configuration may set them.
var AccessLabels = [...]string{"kvgate.io/api-key-file", "kvgate.io/ca-file", "kvgate.io/client-cert-file", "kvgate.io/client-key-file", "kvgate.io/server-name", "kvgate.io/metrics-key-file"}

// access takes over what the labels say and judges all of it.
func (r *Replica) access() error {
	fields := [...]struct {
		name  string
		value *string
	}{{"api_key_file", &r.APIKeyFile}, {"ca_file", &r.CAFile}, {"client_cert_file", &r.ClientCertFile}, {"client_key_file", &r.ClientKeyFile}, {"server_name", &r.ServerName}, {"metrics_key_file", &r.MetricsKeyFile}}
	for i, f := range fields {
		label := r.Labels[AccessLabels[i]]
		if label != "" && *f.value != "" && *f.value != label {
			return fmt.Errorf("%s and the label %s differ: keep one of them", f.name, AccessLabels[i])
		}
		*f.value = cmp.Or(*f.value, label)
	}
	switch {
	case (r.ClientCertFile == "") != (r.ClientKeyFile == ""):
		return errors.New("client_cert_file and client_key_file belong together: set both, or none")
	case r.ServerName != "" && !validHost(r.ServerName):
		return fmt.Errorf("server_name: %s is no host name", quote(r.ServerName))
	}
	return nil
}
