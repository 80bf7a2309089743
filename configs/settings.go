// Package configs reads what an operator intends: the settings of the process, the
// EndpointPickerConfig and the files that list replicas. It is strict: whatever it does not understand is an
// error with its place and a remedy. It imports no other package of kvgate.
package configs

import "time"

// Settings are the process settings: flags over environment over file over defaults.
// The key of a field is its mapstructure path: upstream.idle_timeout is
// KVGATE_UPSTREAM_IDLE_TIMEOUT in the environment and --upstream-idle-timeout on the command line.
type Settings struct {
	Listen      string    `mapstructure:"listen" usage:"data listener, HOST:PORT"`
	AdminListen string    `mapstructure:"admin_listen" usage:"admin listener, HOST:PORT or unix:/PATH; empty switches it off"`
	Scheduling  string    `mapstructure:"scheduling" usage:"EndpointPickerConfig file; empty: the built-in default"`
	Endpoints   string    `mapstructure:"endpoints" usage:"file of replicas in llm-d's file-discovery format, watched; empty: none"`
	Replicas    []Replica `mapstructure:"replicas" usage:"replica as [NAME=]URL; flags, environment and file add up"`

	Log    Log    `mapstructure:"log"`
	Server Server `mapstructure:"server"`
	Limits Limits `mapstructure:"limits"`
	TLS    TLS    `mapstructure:"tls"`
	Auth   Auth   `mapstructure:"auth"`

	Isolation Isolation `mapstructure:"isolation"`

	Upstream Upstream `mapstructure:"upstream"`
	Scrape   Scrape   `mapstructure:"scrape"`
	Drain    Drain    `mapstructure:"drain"`
	Routes   Routes   `mapstructure:"routes"`
	Headers  Headers  `mapstructure:"headers"`
	Admin    Admin    `mapstructure:"admin"`
}

// Replica is one vLLM replica named in the settings file, in KVGATE_REPLICAS or by
// --replica [NAME=]URL. Loaded replicas are normalized.
type Replica struct {
	Name      string            `mapstructure:"name"`      // default: host:port of the URL
	Namespace string            `mapstructure:"namespace"` // default: "default"
	URL       string            `mapstructure:"url"`       // http:// or https://, no path
	Labels    map[string]string `mapstructure:"labels"`

	// In place of the settings of the same names under upstream; "": those hold.
	APIKeyFile     string `mapstructure:"api_key_file"`
	CAFile         string `mapstructure:"ca_file"`
	ClientCertFile string `mapstructure:"client_cert_file"`
	ClientKeyFile  string `mapstructure:"client_key_file"`
	ServerName     string `mapstructure:"server_name"`
	MetricsKeyFile string `mapstructure:"metrics_key_file"`

	Source string `mapstructure:"-"` // where it was declared, for messages
}

// Log configures the process log and the access log.
type Log struct {
	Level  string `mapstructure:"level" usage:"debug, info, warn or error"`
	Format string `mapstructure:"format" usage:"json, console, or auto: console on a terminal"`
	Access bool   `mapstructure:"access" usage:"log one line per request"`
}

// Server bounds what a client connection may do.
type Server struct {
	HeaderTimeout time.Duration `mapstructure:"header_timeout" usage:"time from the first byte of a request head to its end"`
	BodyTimeout   time.Duration `mapstructure:"body_timeout" usage:"time between two reads of a request body"`
	IdleTimeout   time.Duration `mapstructure:"idle_timeout" usage:"time that a client connection may stay without a request"`
	WriteTimeout  time.Duration `mapstructure:"write_timeout" usage:"time of one write to a client that does not read"`
	MaxConns      int           `mapstructure:"max_conns" usage:"client connections at once"`

	MinUploadRate  Size     `mapstructure:"min_upload_rate" usage:"bytes per second that a request body must make behind its first body_timeout; 0: any"`
	TrustedProxies []string `mapstructure:"trusted_proxies" usage:"addresses or networks of the proxies whose forwarding header fields are believed"`
}

// Limits bounds sizes.
type Limits struct {
	Body           Size `mapstructure:"body" usage:"size of a request body"`
	Header         Size `mapstructure:"header" usage:"size of a request head"`
	UpstreamHeader Size `mapstructure:"upstream_header" usage:"size of the response head of a replica"`
	Buffered       Size `mapstructure:"buffered" usage:"size of all request bodies in memory"`

	RouteBodies []string `mapstructure:"route_bodies" usage:"PATH=SIZE: limits.body of a single route"`
	MaxN        int      `mapstructure:"max_n" usage:"answers that one request may ask for (n, best_of); 0: any number"`
	MaxTokens   int      `mapstructure:"max_tokens" usage:"tokens that one request may ask for (max_tokens and its like); 0: any number"`
	MaxItems    int      `mapstructure:"max_items" usage:"messages, prompts, inputs, documents or tools in one request; 0: any number"`
	Hops        int      `mapstructure:"hops" usage:"kvgates that a request may pass one after the other"`
	DenyFields  []string `mapstructure:"deny_fields" usage:"top-level fields of a JSON body that are refused with 400 unless they are null"`
}

// TLS configures the data listener's side of TLS.
type TLS struct {
	CertFile     string `mapstructure:"cert_file" usage:"PEM file of the data listener's certificate and its chain, followed when it changes; empty: plain HTTP"`
	KeyFile      string `mapstructure:"key_file" usage:"PEM file of the certificate's key"`
	ClientCAFile string `mapstructure:"client_ca_file" usage:"PEM file of the CAs of which clients must show a certificate; empty: none is asked for"`
}

// Auth configures who may use the data listener.
type Auth struct {
	KeysFile string `mapstructure:"keys_file" usage:"file of the API keys that clients must send; empty: everyone may ask"`
}

// Isolation keeps tenants from sharing a prefix cache.
type Isolation struct {
	Mode       string `mapstructure:"mode" usage:"who shares cached prefixes: shared (everyone), key (nobody but the holder of an API key) or group"`
	SecretFile string `mapstructure:"secret_file" usage:"file with the secret of which the tenants' cache_salt is made"`
}

// Upstream configures the connections to the replicas.
type Upstream struct {
	ConnectTimeout time.Duration `mapstructure:"connect_timeout" usage:"time to connect to a replica"`
	HeaderTimeout  time.Duration `mapstructure:"header_timeout" usage:"time from the request to the response head; covers queue and prefill, and a whole answer that is not streamed"`
	StreamTimeout  time.Duration `mapstructure:"stream_timeout" usage:"time between two reads of a response body"`
	IdleTimeout    time.Duration `mapstructure:"idle_timeout" usage:"time that a pooled connection may stay unused; below the engine's keep-alive (5s)"`
	MaxIdle        int           `mapstructure:"max_idle" usage:"pooled connections per replica"`
	APIKeyFile     string        `mapstructure:"api_key_file" usage:"file with the key that replaces the client's Authorization, for probes too"`
	CAFile         string        `mapstructure:"ca_file" usage:"file of CA certificates to trust instead of the system's"`
	ClientCertFile string        `mapstructure:"client_cert_file" usage:"PEM file of the certificate to show to https replicas, for probes too"`
	ClientKeyFile  string        `mapstructure:"client_key_file" usage:"PEM file of that certificate's key"`
	ServerName     string        `mapstructure:"server_name" usage:"name that the certificate of every https replica must have; empty: the host in its URL"`
	RetryPercent   int           `mapstructure:"retry_percent" usage:"share of the requests that may be sent to a second replica, in percent"`
	RetryMin       int           `mapstructure:"retry_min" usage:"requests per second that may be sent to a second replica whatever the share"`
}

// Scrape configures the observation of the replicas.
type Scrape struct {
	Interval       time.Duration `mapstructure:"interval" usage:"time between two scrapes of a replica's metrics"`
	Timeout        time.Duration `mapstructure:"timeout" usage:"time that one scrape or probe may take"`
	Staleness      time.Duration `mapstructure:"staleness" usage:"age from which an observation counts as missing"`
	ModelsInterval time.Duration `mapstructure:"models_interval" usage:"time between two reads of a replica's model list"`
}

// Drain configures the end of the process.
type Drain struct {
	Delay   time.Duration `mapstructure:"delay" usage:"time after a stop signal in which the gateway is not ready and still accepts, for a load balancer to notice"`
	Grace   time.Duration `mapstructure:"grace" usage:"time for which requests on open connections are still served when the listener is closed"`
	Timeout time.Duration `mapstructure:"timeout" usage:"time that running streams then have to finish, the grace included"`
}

// Routes widens the allow-list of paths.
type Routes struct {
	Passthrough []string `mapstructure:"passthrough" usage:"more paths to route: exact ones, or prefixes that end in /*"`
}

// Headers configures what kvgate adds to responses.
type Headers struct {
	Replica bool `mapstructure:"replica" usage:"name the replica in the response header x-kvgate-replica"`
}

// Admin configures the admin listener.
type Admin struct {
	TokenFile string `mapstructure:"token_file" usage:"file with the token that requests to the admin listener must carry"`
	Insecure  bool   `mapstructure:"insecure" usage:"serve the admin listener beyond loopback without a token"`
	PProf     bool   `mapstructure:"pprof" usage:"serve /debug/pprof/"`

	LLMDMetrics bool `mapstructure:"llm_d_metrics" usage:"serve the averages over the replicas under llm-d's names, too, for a gateway over clusters"`
}

// DefaultSettings returns what holds when nothing is set.
func DefaultSettings() Settings {
	return Settings{
		Listen:      ":8080",
		AdminListen: "127.0.0.1:9090",
		Log:         Log{Level: "info", Format: "auto", Access: true},
		Server: Server{
			HeaderTimeout: 10 * time.Second,
			BodyTimeout:   30 * time.Second,
			IdleTimeout:   75 * time.Second,
			WriteTimeout:  60 * time.Second,
			MaxConns:      100_000,
			MinUploadRate: 1 << 10,
		},
		Limits:    Limits{Body: 32 << 20, Header: 32 << 10, UpstreamHeader: 16 << 10, Buffered: 1 << 30, Hops: 8, DenyFields: []string{"kv_transfer_params", "ec_transfer_params"}},
		Isolation: Isolation{Mode: "shared"},
		Upstream: Upstream{
			ConnectTimeout: 2 * time.Second,
			HeaderTimeout:  600 * time.Second,
			StreamTimeout:  300 * time.Second,
			IdleTimeout:    4 * time.Second,
			MaxIdle:        512,
			RetryPercent:   20,
			RetryMin:       10,
		},
		Scrape: Scrape{
			Interval:       200 * time.Millisecond,
			Timeout:        2 * time.Second,
			Staleness:      2 * time.Second,
			ModelsInterval: 10 * time.Second,
		},
		Drain: Drain{Grace: time.Second, Timeout: 300 * time.Second},
	}
}
