package configs

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Bounds of settings, as far as they are not zero.
const (
	minInterval = 10 * time.Millisecond // a scrape costs a replica's API server milliseconds
	minHead     = Size(1 << 10)
	maxHead     = Size(16 << 20)
)

// Validate returns everything that is wrong with the settings, each a *Problem whose Path is
// the key of the setting (replicas[0] for a replica).
func (s *Settings) Validate() []error {
	v := validator{}
	v.listeners(s)
	v.replicas(s.Replicas)
	v.oneOf("log.level", s.Log.Level, "debug", "info", "warn", "error")
	v.oneOf("log.format", s.Log.Format, "json", "console", "auto")

	v.atLeast("server.header_timeout", s.Server.HeaderTimeout, 1)
	v.atLeast("server.body_timeout", s.Server.BodyTimeout, 1)
	v.atLeast("server.idle_timeout", s.Server.IdleTimeout, 1)
	v.atLeast("server.write_timeout", s.Server.WriteTimeout, 1)
	if n := s.Server.MaxConns; n < 1 {
		v.report("server.max_conns", "write a number of at least 1", "the number %d is too small", n)
	}

	if r := s.Server.MinUploadRate; r < 0 {
		v.report("server.min_upload_rate", "write 0 or a size such as 1KiB", "the size %s is negative", r)
	}
	for i, text := range s.Server.TrustedProxies {
		if _, err := ParseNetwork(text); err != nil {
			v.report(fmt.Sprintf("server.trusted_proxies[%d]", i), "write an address such as 10.0.0.7, or a network such as 10.0.0.0/8", "%s is neither", quote(text))
		}
	}

	v.sizes(&s.Limits)
	v.caps(&s.Limits)

	v.pair("tls.cert_file", s.TLS.CertFile, "tls.key_file", s.TLS.KeyFile)
	if s.TLS.ClientCAFile != "" && s.TLS.CertFile == "" {
		v.report("tls.client_ca_file", "set tls.cert_file and tls.key_file, too", "clients can show a certificate only over TLS")
	}
	v.isolation(s)
	for i, name := range s.Limits.DenyFields {
		if name == "" || name == "model" || slices.Contains(s.Limits.DenyFields[:i], name) {
			v.report(fmt.Sprintf("limits.deny_fields[%d]", i), "list names of fields, each once", "%s cannot be denied, or is listed twice", quote(name))
		}
	}
	v.pair("upstream.client_cert_file", s.Upstream.ClientCertFile, "upstream.client_key_file", s.Upstream.ClientKeyFile)
	if name := s.Upstream.ServerName; name != "" && !validHost(name) {
		v.report("upstream.server_name", "write a host name", "%s is no host name", quote(name))
	}

	v.atLeast("upstream.connect_timeout", s.Upstream.ConnectTimeout, 1)
	v.atLeast("upstream.header_timeout", s.Upstream.HeaderTimeout, 1)
	v.atLeast("upstream.stream_timeout", s.Upstream.StreamTimeout, 1)
	v.atLeast("upstream.idle_timeout", s.Upstream.IdleTimeout, 1)
	if n := s.Upstream.MaxIdle; n < 0 {
		v.report("upstream.max_idle", "write 0 to keep no connection, or a positive number", "the number %d is negative", n)
	}

	if n := s.Upstream.RetryPercent; n < 0 || n > 100 {
		v.report("upstream.retry_percent", "write a number from 0 to 100", "the number %d is out of range", n)
	}
	if n := s.Upstream.RetryMin; n < 0 {
		v.report("upstream.retry_min", "write 0 or a positive number", "the number %d is negative", n)
	}

	v.atLeast("scrape.interval", s.Scrape.Interval, minInterval)
	v.atLeast("scrape.timeout", s.Scrape.Timeout, 1)
	v.atLeast("scrape.staleness", s.Scrape.Staleness, 1)
	v.atLeast("scrape.models_interval", s.Scrape.ModelsInterval, minInterval)
	if i, stale := s.Scrape.Interval, s.Scrape.Staleness; i > stale && stale > 0 {
		key := "scrape.interval"
		if i == DefaultSettings().Scrape.Interval {
			key = "scrape.staleness" // the one that was changed is to blame
		}
		v.report(key, "make the interval shorter or the staleness longer, else every observation counts as missing",
			"scrape.interval %s is longer than scrape.staleness %s", i, stale)
	}

	v.atLeast("drain.delay", s.Drain.Delay, 0)
	v.atLeast("drain.grace", s.Drain.Grace, 0)
	v.atLeast("drain.timeout", s.Drain.Timeout, 0)
	v.passthrough(s.Routes.Passthrough)
	return v.errs
}

type validator struct{ errs []error }

func (v *validator) report(key, remedy, format string, args ...any) {
	v.errs = append(v.errs, Position{Path: key}.Problem(remedy, format, args...))
}

func (v *validator) isolation(s *Settings) {
	v.oneOf("isolation.mode", s.Isolation.Mode, "shared", "key", "group")
	if s.Isolation.Mode != "key" && s.Isolation.Mode != "group" {
		return
	}
	if s.Auth.KeysFile == "" {
		v.report("isolation.mode", "set auth.keys_file, or write shared", "the tenants are those of the API keys, and there are none")
	}
	if s.Isolation.SecretFile == "" {
		v.report("isolation.mode", "set isolation.secret_file: openssl rand -hex 32 makes a secret", "without a secret a tenant could guess another's salt")
	}
}

// pair wants both or none.
func (v *validator) pair(key, value, otherKey, other string) {
	if value == "" {
		key, value, otherKey, other = otherKey, other, key, value
	}
	if value != "" && other == "" {
		v.report(key, "set both, or none", "set without %s", otherKey)
	}
}

func (v *validator) oneOf(key, got string, known ...string) {
	if !slices.Contains(known, got) {
		v.report(key, Suggest(got, "known values", known), "unknown value %s", quote(got))
	}
}

func (v *validator) atLeast(key string, got, least time.Duration) {
	if got >= least {
		return
	}
	remedy := fmt.Sprintf("write at least %s", least)
	if least == 1 {
		remedy = durationRemedy
	}
	v.report(key, remedy, "the duration %s is too short", got)
}

func (v *validator) listeners(s *Settings) {
	host, port, ok := v.listen("listen", s.Listen)
	if s.AdminListen == "" {
		return
	}
	if path, unix := strings.CutPrefix(s.AdminListen, "unix:"); unix {
		if !strings.HasPrefix(path, "/") {
			v.report("admin_listen", "write unix:/PATH", "the path %s is not absolute", quote(path))
		}
		return
	}
	adminHost, adminPort, adminOK := v.listen("admin_listen", s.AdminListen)
	if adminOK && s.Admin.TokenFile == "" && !s.Admin.Insecure && !loopback(adminHost) {
		v.report("admin_listen", "set admin.token_file, listen on 127.0.0.1 or unix:/PATH, or set admin.insecure: true",
			"%s can be reached from other machines and asks for no token", s.AdminListen)
	}
	every := func(host string) bool { return slices.Contains([]string{"", "0.0.0.0", "::"}, host) }
	if ok && adminOK && port == adminPort && port != 0 && (host == adminHost || every(host) || every(adminHost)) {
		v.report("admin_listen", "choose another port", "%s collides with listen %s", s.AdminListen, s.Listen)
	}
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (v *validator) listen(key, address string) (host string, port int, ok bool) {
	host, text, err := net.SplitHostPort(address)
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	if err != nil || port < 0 || port > 65535 || host != "" && !validHost(host) {
		v.report(key, "write HOST:PORT or :PORT; an IPv6 address goes in brackets: [::1]:8080", "%s is no address to listen on", quote(address))
		return "", 0, false
	}
	return host, port, true
}

func (v *validator) replicas(replicas []Replica) {
	ids, urls := make(map[string]string), make(map[string]string)
	for i, r := range replicas {
		key := fmt.Sprintf("%s[%d]", replicasKey, i)
		n, err := r.Normalize()
		if err != nil {
			v.report(key, "", "%v", err)
			continue
		}
		source := cmp.Or(r.Source, key)
		if first, twice := ids[n.ID()]; twice {
			v.report(key, "give each replica a name of its own", "duplicate replica %s, first in %s", n.ID(), first)
		} else if first, twice := urls[n.URL]; twice {
			v.report(key, "list each replica once", "duplicate URL %s, first in %s", n.URL, first)
		} else {
			ids[n.ID()], urls[n.URL] = source, source
		}
	}
}

func (v *validator) sizes(l *Limits) {
	if l.Body < 1 {
		v.report("limits.body", "write a size such as 32MiB", "the size %s is too small", l.Body)
	}
	for _, head := range []struct {
		key  string
		size Size
	}{{"limits.header", l.Header}, {"limits.upstream_header", l.UpstreamHeader}} {
		if head.size < minHead || head.size > maxHead {
			v.report(head.key, fmt.Sprintf("write a size from %s to %s", minHead, maxHead), "the size %s is out of range", head.size)
		}
	}
	if l.Buffered < l.Body {
		key := "limits.buffered"
		if l.Buffered == DefaultSettings().Limits.Buffered {
			key = "limits.body"
		}
		v.report(key, "raise limits.buffered or lower limits.body, else no body of that size is ever admitted",
			"limits.buffered %s is smaller than limits.body %s", l.Buffered, l.Body)
	}
}

// caps judges the limits of what bodies may ask for, and those of single routes.
func (v *validator) caps(l *Limits) {
	for _, c := range []struct {
		key string
		n   int
	}{{"limits.max_n", l.MaxN}, {"limits.max_tokens", l.MaxTokens}, {"limits.max_items", l.MaxItems}} {
		if c.n < 0 {
			v.report(c.key, "write 0 for no limit, or a positive number", "the number %d is negative", c.n)
		}
	}
	const mostHops = 999
	if l.Hops < 1 || l.Hops > mostHops {
		v.report("limits.hops", fmt.Sprintf("write a number from 1 to %d", mostHops), "the number %d is out of range", l.Hops)
	}
	seen := make(map[string]bool)
	for i, text := range l.RouteBodies {
		key := fmt.Sprintf("limits.route_bodies[%d]", i)
		path, size, err := ParseRouteBody(text)
		switch {
		case err != nil:
			v.report(key, "write PATH=SIZE such as /v1/embeddings=4MiB", "%v", err)
		case seen[path]:
			v.report(key, "keep one of them", "%s is listed twice", quote(path))
		case size > l.Buffered:
			v.report(key, "raise limits.buffered or lower the size, else no body of that size is ever admitted",
				"%s is larger than limits.buffered %s", size, l.Buffered)
		}
		seen[path] = true
	}
}

// ParseRouteBody reads PATH=SIZE, an item of limits.route_bodies.
func ParseRouteBody(text string) (path string, size Size, err error) {
	path, digits, ok := strings.Cut(text, "=")
	if !ok || !strings.HasPrefix(path, "/") {
		return "", 0, fmt.Errorf("%s is no path with a size", quote(text))
	}
	if err := size.UnmarshalText([]byte(digits)); err != nil {
		return "", 0, err
	}
	if size < 1 {
		return "", 0, fmt.Errorf("the size %s is too small", size)
	}
	return path, size, nil
}

// ParseNetwork reads an address or a network in CIDR form. IPv4 addresses that are
// written as IPv6 ones are IPv4.
func ParseNetwork(text string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(text); err == nil {
		addr = addr.WithZone("").Unmap()
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	return p.Masked(), err
}

func (v *validator) passthrough(paths []string) {
	for i, path := range paths {
		key := fmt.Sprintf("routes.passthrough[%d]", i)
		exact := strings.TrimSuffix(path, "/*")
		bad := func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`*?#%\`, r) }
		switch {
		case !strings.HasPrefix(path, "/"):
			v.report(key, "write an exact path such as /v1/score, or a prefix such as /custom/*", "%s does not start with /", quote(path))
		case strings.ContainsFunc(exact, bad) || strings.Contains(path, "//") || slices.ContainsFunc(strings.Split(exact, "/"), func(s string) bool { return s == "." || s == ".." }):
			v.report(key, "write an exact path such as /v1/score, or a prefix such as /custom/*", "%s is no plain path", quote(path))
		case slices.Contains(paths[:i], path):
			v.report(key, "keep one of them", "%s is listed twice", quote(path))
		}
	}
}
