package configs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// load merges a settings file with the given text ("": none), variables and arguments.
// The name of the file is cut down to kvgate.yaml in what comes back.
func load(t *testing.T, text string, environ, args []string) (*Loaded, error) {
	t.Helper()
	dir := t.TempDir()
	file := ""
	if text != "" {
		file = filepath.Join(dir, "kvgate.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	BindFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatalf("got %v for the flags %q, want no error", err, args)
	}
	l, err := LoadSettings(flags, file, environ)
	for key, origin := range l.Origins {
		l.Origins[key] = strings.ReplaceAll(origin, dir+"/", "")
	}
	for i := range l.Replicas {
		l.Replicas[i].Source = strings.ReplaceAll(l.Replicas[i].Source, dir+"/", "")
	}
	if err != nil {
		err = errors.New(strings.ReplaceAll(err.Error(), dir+"/", ""))
	}
	return l, err
}

func TestLoadSettingsPrecedence(t *testing.T) {
	type value struct{ file, env, flag string }
	f := func(key string, set value, want any, origin string) {
		t.Run(key+" "+origin, func(t *testing.T) {
			t.Helper()
			var leaf leaf
			for _, l := range leaves() {
				if l.key == key {
					leaf = l
				}
			}
			text, environ, args := "", []string(nil), []string(nil)
			if set.file != "" {
				section, name, nested := strings.Cut(key, ".")
				text = fmt.Sprintf("# one\n%s: %s\n", key, set.file)
				if nested {
					text = fmt.Sprintf("%s:\n  %s: %s\n", section, name, set.file)
				}
			}
			if set.env != "" {
				environ = []string{"PATH=/bin", leaf.env() + "=" + set.env}
			}
			if set.flag != "" {
				args = []string{"--" + leaf.flag() + "=" + set.flag}
			}
			l, err := load(t, text, environ, args)
			if err != nil {
				t.Fatalf("got %v, want no error", err)
			}
			if got := leaf.of(&l.Settings).Interface(); !reflect.DeepEqual(got, want) {
				t.Errorf("got %v (%T), want %v (%T)", got, got, want, want)
			}
			if got := l.Origins[key]; got != origin {
				t.Errorf("got origin %q, want %q", got, origin)
			}
			for other, got := range l.Origins {
				if other != key && got != "default" {
					t.Errorf("got origin %q of %s, want default", got, other)
				}
			}
		})
	}
	// Every type in every layer, and each layer over those below.
	f("listen", value{}, ":8080", "default")
	f("listen", value{file: `":1"`}, ":1", "kvgate.yaml:2")
	f("listen", value{file: `":1"`, env: ":2"}, ":2", "env KVGATE_LISTEN")
	f("listen", value{file: `":1"`, env: ":2", flag: ":3"}, ":3", "flag --listen")
	f("listen", value{file: `":1"`, flag: ":3"}, ":3", "flag --listen")
	f("listen", value{env: ":2", flag: ":3"}, ":3", "flag --listen")
	f("listen", value{env: ":2"}, ":2", "env KVGATE_LISTEN")
	f("listen", value{flag: ":8080"}, ":8080", "flag --listen")

	f("log.access", value{}, true, "default")
	f("log.access", value{file: "false"}, false, "kvgate.yaml:2")
	f("log.access", value{file: "true", env: "0"}, false, "env KVGATE_LOG_ACCESS")
	f("log.access", value{env: "true", flag: "false"}, false, "flag --log-access")

	f("server.max_conns", value{}, 100_000, "default")
	f("server.max_conns", value{file: "5"}, 5, "kvgate.yaml:2")
	f("server.max_conns", value{file: "5", env: "6"}, 6, "env KVGATE_SERVER_MAX_CONNS")
	f("server.max_conns", value{file: "5", env: "6", flag: "7"}, 7, "flag --server-max-conns")

	f("upstream.idle_timeout", value{}, 4*time.Second, "default")
	f("upstream.idle_timeout", value{file: "5s"}, 5*time.Second, "kvgate.yaml:2")
	f("upstream.idle_timeout", value{file: "5s", env: "1m"}, time.Minute, "env KVGATE_UPSTREAM_IDLE_TIMEOUT")
	f("upstream.idle_timeout", value{file: "5s", env: "1m", flag: "7ms"}, 7*time.Millisecond, "flag --upstream-idle-timeout")

	f("limits.upstream_header", value{}, Size(16<<10), "default")
	f("limits.upstream_header", value{file: "64k"}, Size(64<<10), "kvgate.yaml:2")
	f("limits.upstream_header", value{file: "65536"}, Size(64<<10), "kvgate.yaml:2")
	f("limits.upstream_header", value{file: "64k", env: "1MiB"}, Size(1<<20), "env KVGATE_LIMITS_UPSTREAM_HEADER")
	f("limits.upstream_header", value{file: "64k", env: "1MiB", flag: "2048"}, Size(2048), "flag --limits-upstream-header")

	f("routes.passthrough", value{}, []string(nil), "default")
	f("routes.passthrough", value{file: "[/a, /b/*]"}, []string{"/a", "/b/*"}, "kvgate.yaml:2")
	f("routes.passthrough", value{file: "[]"}, []string{}, "kvgate.yaml:2")
	f("routes.passthrough", value{file: "[/a, /b]", env: "/c, /D"}, []string{"/c", "/D"}, "env KVGATE_ROUTES_PASSTHROUGH")
	f("routes.passthrough", value{file: "[/a, /b]", env: "/c", flag: "/d,/e"}, []string{"/d", "/e"}, "flag --routes-passthrough")
}

// Each setting can be set in each layer, under the names that the documentation promises.
func TestLoadSettingsEveryKey(t *testing.T) {
	other := map[string]string{
		"admin_listen": "unix:/run/x", "scheduling": "s.yaml", "endpoints": "e.yaml", "replicas": "a=http://a:1", "log.level": "debug", "log.format": "json",
		"limits.body": "1MiB", "limits.buffered": "2GiB", "upstream.api_key_file": "/k", "upstream.ca_file": "/c", "routes.passthrough": "/x",
		"upstream.server_name": "replica.example", "limits.deny_fields": "priority", "server.trusted_proxies": "10.0.0.0/8", "limits.route_bodies": "/v1/embeddings=4MiB", "isolation.mode": "key",
	}
	needs := map[string][]string{
		"isolation.mode": {"KVGATE_AUTH_KEYS_FILE=/k", "KVGATE_ISOLATION_SECRET_FILE=/s"},
		"tls.cert_file":  {"KVGATE_TLS_KEY_FILE=/k"}, "tls.key_file": {"KVGATE_TLS_CERT_FILE=/c"}, "tls.client_ca_file": {"KVGATE_TLS_CERT_FILE=/c", "KVGATE_TLS_KEY_FILE=/k"},
		"upstream.client_cert_file": {"KVGATE_UPSTREAM_CLIENT_KEY_FILE=/k"}, "upstream.client_key_file": {"KVGATE_UPSTREAM_CLIENT_CERT_FILE=/c"},
	}
	for _, leaf := range leaves() {
		text := other[leaf.key]
		if text == "" {
			switch leaf.typ.String() {
			case "string":
				text = "127.0.0.1:1"
			case "bool":
				text = "true"
			case "int":
				text = "9"
			case "time.Duration":
				text = "1500ms"
			case "configs.Size":
				text = "4KiB"
			}
		}
		file := leaf.key + ": " + text
		if section, name, nested := strings.Cut(leaf.key, "."); nested {
			file = section + ": {" + name + ": " + text + "}"
		}
		if leaf.typ.Kind() == reflect.Slice {
			file = strings.Replace(file, text, "[\""+text+"\"]", 1)
		}
		f := func(layer, file string, environ, args []string, origin string) {
			t.Helper()
			l, err := load(t, file, append(environ, needs[leaf.key]...), args)
			if err != nil {
				t.Errorf("got %v for %s in the %s, want no error", err, leaf.key, layer)
			}
			if got := l.Origins[leaf.key]; got != origin {
				t.Errorf("got origin %q for %s, want %q", got, leaf.key, origin)
			}
			if leaf.key == replicasKey {
				want := []Replica{{Name: "a", Namespace: "default", URL: "http://a:1", Source: origin}}
				if !reflect.DeepEqual(l.Replicas, want) {
					t.Errorf("got %+v from the %s, want %+v", l.Replicas, layer, want)
				}
				return
			}
			if got := show(leaf.of(&l.Settings)); got != text && got != "1.5s" {
				t.Errorf("got %s = %s from the %s, want %s", leaf.key, got, layer, text)
			}
		}
		f("file", file, nil, nil, "kvgate.yaml:1")
		f("environment", "", []string{leaf.env() + "=" + text}, nil, "env "+leaf.env())
		f("flags", "", nil, []string{"--" + leaf.flag() + "=" + text}, "flag --"+leaf.flag())
	}
}

func TestLeafNames(t *testing.T) {
	var got []string
	for _, l := range leaves() {
		got = append(got, l.key+" "+l.env()+" --"+l.flag())
		if l.usage == "" {
			t.Errorf("got no usage text for %s, want one", l.key)
		}
	}
	for _, want := range []string{
		"admin_listen KVGATE_ADMIN_LISTEN --admin-listen",
		"replicas KVGATE_REPLICAS --replica",
		"log.level KVGATE_LOG_LEVEL --log-level",
		"upstream.api_key_file KVGATE_UPSTREAM_API_KEY_FILE --upstream-api-key-file",
		"admin.pprof KVGATE_ADMIN_PPROF --admin-pprof",
		"admin.llm_d_metrics KVGATE_ADMIN_LLM_D_METRICS --admin-llm-d-metrics",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("got %q, want %q among them", got, want)
		}
	}
}

func TestLoadSettingsReplicas(t *testing.T) {
	l, err := load(t, `
replicas:
- name: a
  url: HTTP://Host.Example:8000/
  labels: {llm-d.ai/Role: decode, meta-llama/Llama-3.1-8B: "yes"}
- url: https://10.0.0.1
  namespace: ns
- http://[::1]:8000
- c=http://c
`, []string{"KVGATE_REPLICAS=d=http://d:1, http://e:2"}, []string{"--replica", "f=http://f:1", "--replica", "http://g:1,h=http://h:1"})
	if err != nil {
		t.Fatalf("got %v, want no error", err)
	}
	want := []Replica{
		{Name: "a", Namespace: "default", URL: "http://host.example:8000", Source: "kvgate.yaml:3", Labels: map[string]string{"llm-d.ai/Role": "decode", "meta-llama/Llama-3.1-8B": "yes"}},
		{Name: "10.0.0.1:443", Namespace: "ns", URL: "https://10.0.0.1:443", Source: "kvgate.yaml:6"},
		{Name: "[::1]:8000", Namespace: "default", URL: "http://[::1]:8000", Source: "kvgate.yaml:8"},
		{Name: "c", Namespace: "default", URL: "http://c:80", Source: "kvgate.yaml:9"},
		{Name: "d", Namespace: "default", URL: "http://d:1", Source: "env KVGATE_REPLICAS"},
		{Name: "e:2", Namespace: "default", URL: "http://e:2", Source: "env KVGATE_REPLICAS"},
		{Name: "f", Namespace: "default", URL: "http://f:1", Source: "flag --replica"},
		{Name: "g:1", Namespace: "default", URL: "http://g:1", Source: "flag --replica"},
		{Name: "h", Namespace: "default", URL: "http://h:1", Source: "flag --replica"},
	}
	if !reflect.DeepEqual(l.Replicas, want) {
		t.Errorf("got\n%+v\nwant\n%+v", l.Replicas, want)
	}
	if got, want := l.Origins["replicas"], "kvgate.yaml:3 + env KVGATE_REPLICAS + flag --replica"; got != want {
		t.Errorf("got origin %q, want %q", got, want)
	}
}

func TestLoadSettingsErrors(t *testing.T) {
	f := func(name, file string, environ, args []string, want string) {
		t.Run(name, func(t *testing.T) {
			t.Helper()
			l, err := load(t, file, environ, args)
			if err == nil {
				t.Fatalf("got no error, want %s", want)
			}
			if got := err.Error(); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if got, want := l.Upstream.IdleTimeout, 4*time.Second; got != want {
				t.Errorf("got %v where nothing valid was set, want the default %v", got, want)
			}
		})
	}
	env := func(kv ...string) []string { return kv }
	none := []string(nil)

	// The file.
	f("unknown section", "upstreams: {}\n", none, none, "kvgate.yaml:1:1: upstreams: unknown field (did you mean `upstream`?)")
	f("unknown key", "upstream:\n  idel_timeout: 4s\n", none, none, "kvgate.yaml:2:3: upstream.idel_timeout: unknown field (did you mean `idle_timeout`?)")
	f("unknown key, far", "admin: {colour: red}\n", none, none, "kvgate.yaml:1:9: admin.colour: unknown field (known fields: token_file, insecure, pprof, llm_d_metrics)")
	f("duplicate key", "listen: ':1'\nlisten: ':2'\n", none, none, "kvgate.yaml:2:1: listen: set twice, first in line 1 (keep one of them)")
	f("wrong type", "upstream: {idle_timeout: 4}\n", none, none,
		`kvgate.yaml:1:26: upstream.idle_timeout: wants a duration, got the number 4 (a number with a unit, such as "200ms", "60s" or "1h30m")`)
	f("wrong size", "limits: {body: 32MB}\n", none, none,
		`kvgate.yaml:1:16: limits.body: the unit of "32MB" may mean 1000 or 1024: write a number of bytes, or one with the unit KiB, MiB, GiB or TiB, such as 32MiB`)
	f("section of a wrong type", "upstream: 4s\n", none, none,
		`kvgate.yaml:1:11: upstream: wants an object, got the string "4s" (fields: connect_timeout, header_timeout, stream_timeout, idle_timeout, max_idle, api_key_file, ca_file, client_cert_file, client_key_file, server_name, retry_percent, retry_min)`)
	f("a list", "- a\n", none, none,
		"kvgate.yaml:1:1: wants an object, got a list (fields: listen, admin_listen, scheduling, endpoints, replicas, log, server, limits, tls, auth, isolation, upstream, scrape, drain, routes, headers, admin)")
	f("syntax", "a: [\n", none, none, "kvgate.yaml:1: did not find expected node content")
	f("list item of a wrong type", "routes: {passthrough: [/a, 5]}\n", none, none, "kvgate.yaml:1:28: routes.passthrough[1]: wants a string, got the number 5 (put it in quotes)")
	f("replica without name", "replicas: ['=http://a']\n", none, none, "kvgate.yaml:1:12: replicas[0]: the name of the replica is empty: write NAME=URL, or URL alone")
	f("replica of a wrong type", "replicas: [true]\n", none, none, "kvgate.yaml:1:12: replicas[0]: wants a string or a number, got the boolean true")
	f("unknown key of a replica", "replicas:\n- address: a\n", none, none, "kvgate.yaml:2:3: replicas[0].address: unknown field (known fields: name, namespace, url, labels, api_key_file, ca_file, client_cert_file, client_key_file, server_name, metrics_key_file)")
	f("replica with a path", "replicas:\n- http://a:1\n- url: http://b/v1\n", none, none,
		`kvgate.yaml:3:3: replicas[1]: the URL "http://b/v1" has a path: write http://HOST:PORT or https://HOST:PORT`)
	f("duplicate name", "replicas:\n- a=http://a:1\n", none, []string{"--replica=a=http://b:1"},
		"flag --replica: replicas[1]: duplicate replica default/a, first in kvgate.yaml:2 (give each replica a name of its own)")
	f("item judged later", "routes:\n  passthrough:\n  - /a\n  - b\n", none, none,
		`kvgate.yaml:4:5: routes.passthrough[1]: "b" does not start with / (write an exact path such as /v1/score, or a prefix such as /custom/*)`)
	f("value judged later", "scrape: {interval: 60s}\n", none, none,
		"kvgate.yaml:1:20: scrape.interval: scrape.interval 1m0s is longer than scrape.staleness 2s (make the interval shorter or the staleness longer, else every observation counts as missing)")

	// The environment.
	f("unknown variable", "", env("KVGATE_UPSTREAM_IDLETIMEOUT=1s"), none, "env KVGATE_UPSTREAM_IDLETIMEOUT: no setting has this name (did you mean `KVGATE_UPSTREAM_IDLE_TIMEOUT`?)")
	f("unknown variable, far", "", env("KVGATE_COLOUR=red"), none, "env KVGATE_COLOUR: no setting has this name (unset it; kvgate check lists the settings)")
	f("bool", "", env("KVGATE_LOG_ACCESS=maybe"), none, `env KVGATE_LOG_ACCESS: log.access: "maybe" is neither true nor false`)
	f("int", "", env("KVGATE_UPSTREAM_MAX_IDLE=many"), none, `env KVGATE_UPSTREAM_MAX_IDLE: upstream.max_idle: "many" is no integer, or out of range`)
	f("duration", "", env("KVGATE_UPSTREAM_IDLE_TIMEOUT=4"), none,
		`env KVGATE_UPSTREAM_IDLE_TIMEOUT: upstream.idle_timeout: "4" is no duration (a number with a unit, such as "200ms", "60s" or "1h30m")`)
	f("empty duration", "", env("KVGATE_UPSTREAM_IDLE_TIMEOUT="), none,
		`env KVGATE_UPSTREAM_IDLE_TIMEOUT: upstream.idle_timeout: "" is no duration (a number with a unit, such as "200ms", "60s" or "1h30m")`)
	f("size", "", env("KVGATE_LIMITS_BODY=x"), none,
		`env KVGATE_LIMITS_BODY: limits.body: "x" is no size: write a number of bytes, or one with the unit KiB, MiB, GiB or TiB, such as 32MiB`)
	f("replicas", "", env("KVGATE_REPLICAS=a=b"), none,
		`env KVGATE_REPLICAS: replicas: the URL "b" does not start with http:// or https://: write http://HOST:PORT or https://HOST:PORT`)
	f("replica without name in a list", "", env("KVGATE_REPLICAS==http://a"), none,
		"env KVGATE_REPLICAS: replicas: the name of the replica is empty: write NAME=URL, or URL alone")
	f("value of a variable judged later", "", env("KVGATE_LOG_LEVEL=wran"), none, "env KVGATE_LOG_LEVEL: log.level: unknown value \"wran\" (did you mean `warn`?)")

	// Flags.
	f("value of a flag judged later", "", none, []string{"--log-format=xml"}, `flag --log-format: log.format: unknown value "xml" (known values: json, console, auto)`)
	f("item of a flag judged later", "", none, []string{"--routes-passthrough=/a,b"},
		`flag --routes-passthrough: routes.passthrough[1]: "b" does not start with / (write an exact path such as /v1/score, or a prefix such as /custom/*)`)

	// All at once.
	f("everything", "listen: 8080\nlog: {level: loud}\n", env("KVGATE_X=1", "KVGATE_ADMIN_PPROF=x"), []string{"--drain-delay=-1s"},
		"kvgate.yaml:1:9: listen: wants a string, got the number 8080 (put it in quotes)\n"+
			"kvgate.yaml:2:14: log.level: unknown value \"loud\" (known values: debug, info, warn, error)\n"+
			"env KVGATE_ADMIN_PPROF: admin.pprof: \"x\" is neither true nor false\n"+
			"env KVGATE_X: no setting has this name (unset it; kvgate check lists the settings)\n"+
			"flag --drain-delay: drain.delay: the duration -1s is too short (write at least 0s)")
}

func TestLoadSettingsFileNames(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	one, two, three := write("1", "listen: ':1'\n"), write("2", "listen: ':2'\n"), write("3", "listen: ':3'\n")
	f := func(argument, flag, variable, want string) {
		t.Helper()
		flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
		BindFlags(flags)
		if err := flags.Parse([]string{"--config=" + flag}); err != nil {
			t.Fatal(err)
		}
		l, err := LoadSettings(flags, argument, []string{"KVGATE_CONFIG=" + variable})
		if err != nil {
			t.Errorf("got %v, want no error", err)
		}
		if l.Listen != want {
			t.Errorf("got listen %q, want %q", l.Listen, want)
		}
	}
	f(one, two, three, ":1")
	f("", two, three, ":2")
	f("", "", three, ":3")
	f("", "", "", ":8080")

	l, err := LoadSettings(nil, filepath.Join(dir, "none"), nil)
	if err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("got %v, want an error about the file", err)
	}
	if l.Listen != ":8080" {
		t.Errorf("got listen %q, want the default", l.Listen)
	}
	if _, err = LoadSettings(pflag.NewFlagSet("other", pflag.ContinueOnError), "", nil); err != nil {
		t.Errorf("got %v with flags that are not ours, want no error", err)
	}
	for _, text := range []string{"", "# nothing\n", "upstream:\n", "upstream: {idle_timeout: ~}\n"} {
		if l, err = LoadSettings(nil, write("4", text), nil); err != nil || !reflect.DeepEqual(l.Settings, DefaultSettings()) {
			t.Errorf("got %+v and error %v for %q, want the defaults", l.Settings, err, text)
		}
	}
}

func TestLoadSettingsForeignEnvironment(t *testing.T) {
	_, err := load(t, "", []string{
		"KVGATE_SERVICE_HOST=10.0.0.1", "KVGATE_SERVICE_PORT=80", "KVGATE_SERVICE_PORT_HTTP_ADMIN=80", "KVGATE_PORT=tcp://10.0.0.1:80", "KVGATE_PORT_80_TCP=tcp://10.0.0.1:80",
		"KVGATE_PORT_80_TCP_ADDR=10.0.0.1", "KVGATE_PORT_80_TCP_PORT=80", "KVGATE_PORT_80_UDP_PROTO=udp", "KVGATE_ADMIN_SERVICE_HOST=10.0.0.1", "KVGATE_ADMIN_PORT_80_TCP=x",
		"KVGATEX=1", "kvgate_listen=:1", "XKVGATE_Y=1", "KVGATE=1",
	}, nil)
	if err != nil {
		t.Errorf("got %v, want no error", err)
	}
	for _, name := range []string{"KVGATE_SERVICE", "KVGATE_PORTS", "KVGATE_PORT_80", "KVGATE_PORT_80_TCP_X", "KVGATE_"} {
		if _, err := load(t, "", []string{name + "=1"}, nil); err == nil {
			t.Errorf("got no error for %s, want one", name)
		}
	}
	for _, l := range leaves() {
		if foreignEnv.MatchString(l.env()) {
			t.Errorf("got %s on the allow-list, want every setting off it", l.env())
		}
	}
}

func TestLoadSettingsEmptyVariables(t *testing.T) {
	l, err := load(t, "routes: {passthrough: [/a]}\nreplicas: [http://a]\n", []string{"KVGATE_ADMIN_LISTEN=", "KVGATE_ROUTES_PASSTHROUGH= ", "KVGATE_REPLICAS="}, nil)
	if err != nil {
		t.Fatalf("got %v, want no error", err)
	}
	if l.AdminListen != "" || len(l.Routes.Passthrough) != 0 || len(l.Replicas) != 1 {
		t.Errorf("got %q, %q and %d replicas, want two empty values and one replica", l.AdminListen, l.Routes.Passthrough, len(l.Replicas))
	}
}

func TestBindFlagsErrors(t *testing.T) {
	f := func(arg, want string) {
		t.Helper()
		flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
		BindFlags(flags)
		err := flags.Parse([]string{arg})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v for %s, want an error with %q", err, arg, want)
		}
	}
	f("--limits-body=1MB", "may mean 1000 or 1024")
	f("--upstream-idle-timeout=4", "missing unit in duration")
	f("--replica=tcp://a", "does not start with http://")
	f("--replica==http://a", "the name of the replica is empty")
	f("--listne=x", "unknown flag")
}

// The usage text shows types and defaults that can be typed in.
func TestBindFlagsUsage(t *testing.T) {
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	BindFlags(flags)
	usage := flags.FlagUsages()
	for _, want := range []string{"--limits-body size", "(default 32MiB)", "--replica [NAME=]URL", "(default 4s)", "--log-access", "(default true)", "--config string"} {
		if !strings.Contains(usage, want) {
			t.Errorf("got usage without %q:\n%s", want, usage)
		}
	}
	replicas := flags.Lookup("replica").Value
	if err := replicas.Set("a=http://a,http://b"); err != nil {
		t.Fatal(err)
	}
	if got, want := replicas.String(), "a=http://a,=http://b"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestRows(t *testing.T) {
	l, err := load(t, "replicas:\n- {url: 'http://a', labels: {z: 1x, b: c}}\nroutes:\n  passthrough: [/a, /b]\n", []string{"KVGATE_LIMITS_BODY=64KiB"}, []string{"--replica=b=http://b"})
	if err != nil {
		t.Fatalf("got %v, want no error", err)
	}
	rows := l.Rows()
	if got, want := len(rows), len(leaves())+1; got != want {
		t.Errorf("got %d rows, want %d", got, want)
	}
	f := func(i int, want Row) {
		t.Helper()
		if rows[i] != want {
			t.Errorf("got %+v, want %+v", rows[i], want)
		}
	}
	f(0, Row{"listen", ":8080", "default"})
	f(4, Row{"replicas[0]", "default/a:80=http://a:80 b=c z=1x", "kvgate.yaml:2"})
	f(5, Row{"replicas[1]", "default/b=http://b:80", "flag --replica"})
	f(slices.IndexFunc(rows, func(r Row) bool { return r.Key == "limits.body" }), Row{"limits.body", "64KiB", "env KVGATE_LIMITS_BODY"})
	f(slices.IndexFunc(rows, func(r Row) bool { return r.Key == "routes.passthrough" }), Row{"routes.passthrough", "/a,/b", "kvgate.yaml:4"})
	f(len(rows)-1, Row{"admin.llm_d_metrics", "false", "default"})

	if l, err = load(t, "", nil, nil); err != nil {
		t.Fatalf("got %v, want no error", err)
	}
	rows = l.Rows()
	f(4, Row{"replicas", "", "default"})
}

// A password in the URL of a replica is in no message and no row.
func TestLoadSettingsHidesPasswords(t *testing.T) {
	for _, url := range []string{"http://user:hunter2@a:1", "a=http://user:hunter2@a:bad", "=http://user:hunter2@a"} {
		l, err := load(t, "replicas: ['"+url+"']\n", []string{"KVGATE_REPLICAS=" + url}, nil)
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("got %v for %s, want an error without the password", err, url)
		}
		if got := fmt.Sprint(l.Rows()); strings.Contains(got, "hunter2") {
			t.Errorf("got rows %s, want none with the password", got)
		}
	}
}
