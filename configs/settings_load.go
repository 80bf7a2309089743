package configs

import (
	"encoding"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
)

// Loaded are the settings of a process with the origin of each value.
type Loaded struct {
	Settings
	File    string            // the settings file; empty when there is none
	Origins map[string]string // by key (upstream.idle_timeout): "default", "FILE:LINE", "env KVGATE_X" or "flag --x"
}

// Row is one effective setting.
type Row struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Origin string `json:"origin"`
}

const (
	envPrefix   = "KVGATE_"
	envConfig   = envPrefix + "CONFIG" // the settings file when --config is absent
	replicasKey = "replicas"
	configFlag  = "config"
	replicaFlag = "replica"
)

// foreignEnv are the variables that Kubernetes and Docker inject for a service named kvgate or
// kvgate-something. They are the only KVGATE_ variables that may be set without being settings.
var foreignEnv = regexp.MustCompile(`^KVGATE_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)$`)

// leaf is one setting.
type leaf struct {
	key   string // upstream.idle_timeout
	usage string
	index []int // of the field in Settings
	typ   reflect.Type
}

func (l leaf) env() string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(l.key, ".", "_"))
}

func (l leaf) flag() string {
	if l.key == replicasKey {
		return replicaFlag
	}
	return strings.NewReplacer(".", "-", "_", "-").Replace(l.key)
}

func (l leaf) of(s *Settings) reflect.Value { return reflect.ValueOf(s).Elem().FieldByIndex(l.index) }

// leaves returns all settings in the order of the struct.
func leaves() []leaf {
	var out []leaf
	var walk func(t reflect.Type, key string, index []int)
	walk = func(t reflect.Type, key string, index []int) {
		for i, name := range fieldNames(t, "mapstructure") {
			f := t.Field(i)
			at := append(slices.Clone(index), i)
			if f.Type.Kind() == reflect.Struct {
				walk(f.Type, joinPath(key, name), at)
				continue
			}
			out = append(out, leaf{key: joinPath(key, name), usage: f.Tag.Get("usage"), index: at, typ: f.Type})
		}
	}
	walk(reflect.TypeFor[Settings](), "", nil)
	return out
}

// Rows returns the effective settings in the order of the struct, each with its origin.
// Secrets are not among them: settings name files that hold secrets.
func (l *Loaded) Rows() []Row {
	var rows []Row
	for _, leaf := range leaves() {
		if leaf.key != replicasKey {
			rows = append(rows, Row{leaf.key, show(leaf.of(&l.Settings)), l.Origins[leaf.key]})
			continue
		}
		if len(l.Replicas) == 0 {
			rows = append(rows, Row{replicasKey, "", l.Origins[replicasKey]})
		}
		for i, r := range l.Replicas {
			value := r.ID() + "=" + r.URL
			for _, label := range slices.Sorted(maps.Keys(r.Labels)) {
				value += " " + label + "=" + r.Labels[label]
			}
			for _, own := range [...][2]string{
				{"api_key_file", r.APIKeyFile}, {"ca_file", r.CAFile}, {"client_cert_file", r.ClientCertFile}, {"client_key_file", r.ClientKeyFile}, {"server_name", r.ServerName},
				{"metrics_key_file", r.MetricsKeyFile},
			} {
				if own[1] != "" {
					value += " " + own[0] + "=" + own[1]
				}
			}
			rows = append(rows, Row{fmt.Sprintf("%s[%d]", replicasKey, i), value, r.Source})
		}
	}
	return rows
}

func show(v reflect.Value) string {
	if list, ok := v.Interface().([]string); ok {
		return strings.Join(list, ",")
	}
	return fmt.Sprint(v.Interface())
}

// BindFlags declares --config and one flag per setting, with the defaults of DefaultSettings.
func BindFlags(fs *pflag.FlagSet) {
	fs.String(configFlag, "", "settings file, YAML or JSON ("+envConfig+" in the environment)")
	defaults := DefaultSettings()
	for _, l := range leaves() {
		switch v := l.of(&defaults).Interface().(type) {
		case string:
			fs.String(l.flag(), v, l.usage)
		case bool:
			fs.Bool(l.flag(), v, l.usage)
		case int:
			fs.Int(l.flag(), v, l.usage)
		case time.Duration:
			fs.Duration(l.flag(), v, l.usage)
		case []string:
			fs.StringSlice(l.flag(), v, l.usage)
		case Size:
			fs.Var(&v, l.flag(), l.usage)
		case []Replica:
			fs.Var(new(replicaValue), l.flag(), l.usage)
		}
	}
}

// Set and Type make a Size a flag.
func (s *Size) Set(text string) error { return s.UnmarshalText([]byte(text)) }

// Type names the value in a usage text.
func (*Size) Type() string { return "size" }

// replicaValue is the repeatable flag --replica.
type replicaValue struct{ list []Replica }

func (v *replicaValue) Set(text string) error {
	list, err := parseReplicas(text)
	v.list = append(v.list, list...)
	return err
}

func (*replicaValue) Type() string { return "[NAME=]URL" }

func (v *replicaValue) String() string {
	items := make([]string, len(v.list))
	for i, r := range v.list {
		items[i] = r.Name + "=" + r.URL
	}
	return strings.Join(items, ",")
}

// LoadSettings merges defaults, the settings file, the KVGATE_ variables of environ
// (os.Environ) and the flags that were set; each wins over those before it, except that the
// replicas of all of them add up. flags come from BindFlags and may be nil. An empty file is the
// one that --config or else KVGATE_CONFIG names, or none. The error is Problems with everything
// that is wrong; the settings are returned all the same, with the value of the layer below in
// place of what could not be read, for `kvgate check` to show. They must not be used to serve.
func LoadSettings(flags *pflag.FlagSet, file string, environ []string) (*Loaded, error) {
	env, problems := environment(environ)
	if flags != nil && file == "" {
		if f := flags.Lookup(configFlag); f != nil {
			file = f.Value.String()
		}
	}
	if file == "" {
		file = env[envConfig]
	}
	var data []byte
	if file != "" {
		var err error
		if data, err = readDocument(file); err != nil {
			problems.Add(err)
		}
	}
	return mergeSettings(flags, file, data, env, problems)
}

// mergeSettings is LoadSettings with the file read.
func mergeSettings(flags *pflag.FlagSet, file string, data []byte, env map[string]string, problems Problems) (*Loaded, error) {
	l := loader{
		Loaded:   Loaded{File: file, Origins: make(map[string]string)},
		viper:    viper.New(),
		problems: problems,
		places:   make(map[string]Position),
	}
	l.defaults()
	l.file(data)
	l.environment(env)
	l.flags(flags)
	l.finish()
	return &l.Loaded, l.problems.Err()
}

// environment returns the KVGATE_ variables by name and a problem for each that is no setting.
func environment(environ []string) (map[string]string, Problems) {
	var problems Problems
	known := []string{envConfig}
	for _, l := range leaves() {
		known = append(known, l.env())
	}
	env := make(map[string]string)
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		switch {
		case !strings.HasPrefix(name, envPrefix):
		case slices.Contains(known, name):
			env[name] = value
		case !foreignEnv.MatchString(name):
			remedy := "unset it; kvgate check lists the settings"
			if near := nearest(name, known); near != "" {
				remedy = "did you mean `" + near + "`?"
			}
			problems.Add(Position{File: "env " + name}.Problem(remedy, "no setting has this name"))
		}
	}
	return env, problems
}

// loader puts the layers on top of each other. Values are parsed by the layer they come
// from, which knows the place to blame; viper decides which layer wins.
type loader struct {
	Loaded
	viper    *viper.Viper
	replicas []Replica // of all layers
	problems Problems
	places   map[string]Position // by key, of the values that are set; replicas[0] for a replica
}

func (l *loader) defaults() {
	defaults := DefaultSettings()
	for _, leaf := range leaves() {
		l.Origins[leaf.key] = "default"
		l.viper.SetDefault(leaf.key, leaf.of(&defaults).Interface())
	}
}

// file merges the settings file. It is not read by viper, which lower-cases keys,
// splits them at dots and knows no lines.
func (l *loader) file(data []byte) {
	root, problems := parseDocument(l.File, data)
	if root.node == nil {
		l.problems.Add(problems.Err())
		return
	}
	var in Settings
	decode(root, "mapstructure", &in, &problems)
	values := make(map[string]any)
	for _, leaf := range leaves() {
		broken := func(p *Problem) bool {
			rest, below := strings.CutPrefix(p.Path, leaf.key)
			return below && (rest == "" || rest[0] == '[' || rest[0] == '.')
		}
		at, set := root.find(leaf.key)
		if !set || slices.ContainsFunc(problems, broken) {
			continue
		}
		if leaf.key != replicasKey {
			l.set(leaf, at, Position{File: at.File, Line: at.Line}.String())
			nest(values, leaf.key, leaf.of(&in).Interface())
			continue
		}
		for i, r := range in.Replicas {
			item := root.At(fmt.Sprintf("%s[%d]", replicasKey, i))
			r.Source = Position{File: item.File, Line: item.Line}.String()
			l.addReplica(item, r)
		}
		l.addOrigin(Position{File: at.File, Line: at.Line}.String())
	}
	l.problems.Add(problems.Err())
	l.problems.Add(l.viper.MergeConfigMap(values))
}

// nest puts a value into nested maps: "a.b" into {a: {b: value}}.
func nest(m map[string]any, key string, value any) {
	for {
		section, rest, nested := strings.Cut(key, ".")
		if !nested {
			m[key] = value
			return
		}
		below, _ := m[section].(map[string]any)
		if below == nil {
			below = make(map[string]any)
			m[section] = below
		}
		m, key = below, rest
	}
}

func (l *loader) set(leaf leaf, at Position, origin string) {
	l.places[leaf.key] = at
	l.Origins[leaf.key] = origin
}

func (l *loader) addReplica(at Position, r Replica) {
	l.places[fmt.Sprintf("%s[%d]", replicasKey, len(l.replicas))] = at
	l.replicas = append(l.replicas, r)
}

// addOrigin names one more origin of the list of replicas.
func (l *loader) addOrigin(origin string) {
	if old := l.Origins[replicasKey]; old != "default" {
		origin = old + " + " + origin
	}
	l.Origins[replicasKey] = origin
}

func (l *loader) environment(env map[string]string) {
	values := make(map[string]any)
	for _, leaf := range leaves() {
		text, set := env[leaf.env()]
		if !set {
			continue
		}
		at := Position{File: "env " + leaf.env(), Path: leaf.key}
		value, err := parseText(leaf.typ, text)
		if err != nil {
			l.problems.Add(at.Problem("", "%v", err))
			continue
		}
		if list, ok := value.([]Replica); ok {
			for _, r := range list {
				r.Source = at.File
				l.addReplica(at, r)
			}
			l.addOrigin(at.File)
			continue
		}
		l.set(leaf, at, at.File)
		nest(values, leaf.key, value)
	}
	l.problems.Add(l.viper.MergeConfigMap(values))
}

// parseText reads the text of a variable. Empty text is the empty string or list, and wrong for anything else.
func parseText(t reflect.Type, text string) (any, error) {
	value := reflect.New(t)
	switch dst := value.Interface().(type) {
	case *string:
		*dst = text
	case *bool:
		var err error
		if *dst, err = strconv.ParseBool(text); err != nil {
			return nil, fmt.Errorf("%s is neither true nor false", quote(text))
		}
	case *int:
		var err error
		if *dst, err = strconv.Atoi(text); err != nil {
			return nil, fmt.Errorf("%s is no integer, or out of range", quote(text))
		}
	case *time.Duration:
		var err error
		if *dst, err = time.ParseDuration(text); err != nil {
			return nil, fmt.Errorf("%s is no duration (%s)", quote(text), durationRemedy)
		}
	case *[]string:
		*dst = splitList(text)
	case *[]Replica:
		var err error
		if *dst, err = parseReplicas(text); err != nil {
			return nil, err
		}
	case encoding.TextUnmarshaler:
		if err := dst.UnmarshalText([]byte(text)); err != nil {
			return nil, err
		}
	}
	return value.Elem().Interface(), nil
}

func (l *loader) flags(fs *pflag.FlagSet) {
	if fs == nil {
		return
	}
	for _, leaf := range leaves() {
		f := fs.Lookup(leaf.flag())
		if f == nil || !f.Changed {
			continue
		}
		at := Position{File: "flag --" + f.Name, Path: leaf.key}
		if list, ok := f.Value.(*replicaValue); ok {
			for _, r := range list.list {
				r.Source = at.File
				l.addReplica(at, r)
			}
			l.addOrigin(at.File)
			continue
		}
		l.set(leaf, at, at.File)
		l.problems.Add(l.viper.BindPFlag(leaf.key, f))
	}
}

// finish decodes what viper has merged, judges it, and puts places on what is wrong.
func (l *loader) finish() {
	hooks := mapstructure.ComposeDecodeHookFunc(mapstructure.StringToTimeDurationHookFunc(), mapstructure.TextUnmarshallerHookFunc())
	l.problems.Add(l.viper.UnmarshalExact(&l.Settings, viper.DecodeHook(hooks)))
	l.Replicas = l.replicas // not through viper, which lower-cases the keys of labels
	for _, err := range l.Validate() {
		var p *Problem
		if errors.As(err, &p) {
			at, set := l.places[p.Path]
			if key, item, list := strings.Cut(p.Path, "["); list && !set {
				at = l.places[key].At("[" + item)
			}
			p.File, p.Line, p.Column = at.File, at.Line, at.Column
		}
		l.problems.Add(err)
	}
	l.Replicas = nil
	for _, r := range l.replicas {
		if n, err := r.Normalize(); err == nil {
			l.Replicas = append(l.Replicas, n)
		}
	}
}
