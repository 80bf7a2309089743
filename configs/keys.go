package configs

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// Key is one API key that clients may use. The key itself is not kept.
type Key struct {
	Name              string   // in logs and metrics
	Hash              [32]byte // SHA-256 of the key
	Models            []string // that it may use; nil: all
	Group             string   // tenant for isolation.mode group; the name when the file has none
	RequestsPerMinute int      // 0: no limit
	Concurrency       int      // requests at once, 0: no limit
}

// fileKey is the schema of one item in the file.
type fileKey struct {
	Name              string   `json:"name"`
	Key               string   `json:"key"`
	SHA256            string   `json:"sha256"`
	Models            []string `json:"models"`
	Group             string   `json:"group"`
	RequestsPerMinute int      `json:"requests_per_minute"`
	Concurrency       int      `json:"concurrency"`
	Pos               Position `json:"-"`
}

// maxLimit bounds the limits of a key.
const maxLimit = 1_000_000_000

// LoadKeys reads a file of API keys; see ParseKeys.
func LoadKeys(file string) ([]Key, error) {
	data, err := readDocument(file)
	if err != nil {
		return nil, err
	}
	return ParseKeys(file, data)
}

// ParseKeys reads a file of API keys: a YAML or JSON document with a list named
// keys, or plain lines NAME:KEY with # comments. file is its name in messages. The
// error is Problems, of which none shows a key; a file without keys is an error.
func ParseKeys(file string, data []byte) ([]Key, error) {
	var in struct {
		Keys []fileKey `json:"keys"`
	}
	var problems Problems
	if isKeyDocument(data) {
		root, broken := parseDocument(file, data)
		if problems = broken; problems == nil {
			decode(root, "json", &in, &problems)
		}
	} else {
		in.Keys, problems = keyLines(file, data)
	}
	for _, p := range problems {
		switch {
		case strings.HasSuffix(p.Path, ".key"), strings.HasSuffix(p.Path, ".sha256"):
			p.Message, p.Remedy = "wants a string", "put it in quotes"
		case p.Path == "keys", strings.HasSuffix(p.Path, "]"):
			p.Message, p.Remedy = "wants a list of objects with name and key or sha256", ""
		}
	}
	if len(problems) > 0 {
		return nil, problems.Err()
	}
	if len(in.Keys) == 0 {
		problems.Add(Position{File: file}.Problem("list at least one under `keys:`, or write lines NAME:KEY", "no keys"))
	}
	names, hashes := make(map[string]string), make(map[[32]byte]string)
	out := make([]Key, 0, len(in.Keys))
	for _, k := range in.Keys {
		key, err := k.key()
		if err != nil {
			problems.Add(k.Pos.Problem("", "%v", err))
			continue
		}
		if first, twice := names[key.Name]; twice {
			problems.Add(k.Pos.Problem("give each key a name of its own", "the name %s is used twice, first in %s", quote(key.Name), first))
		}
		if first, twice := hashes[key.Hash]; twice {
			problems.Add(k.Pos.Problem("keep one of them", "the same key twice, first in %s", first))
		}
		names[key.Name], hashes[key.Hash] = k.Pos.String(), k.Pos.String()
		out = append(out, key)
	}
	return out, problems.Err()
}

// isKeyDocument tells a document from plain lines by what it begins with.
func isKeyDocument(data []byte) bool {
	for line := range bytes.Lines(data) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		rest, named := bytes.CutPrefix(line, []byte("keys:"))
		return line[0] == '{' || string(line) == "---" || named && (len(rest) == 0 || rest[0] == ' ' || rest[0] == '[')
	}
	return false
}

// keyLines reads lines NAME:KEY.
func keyLines(file string, data []byte) (keys []fileKey, problems Problems) {
	if len(data) > maxDocument {
		problems.Add(Position{File: file}.Problem("", "larger than %d bytes", maxDocument))
		return nil, problems
	}
	n := 0
	for line := range bytes.Lines(data) {
		n++
		text := string(bytes.TrimSpace(line))
		if text == "" || text[0] == '#' {
			continue
		}
		at := Position{File: file, Line: n}
		name, key, ok := strings.Cut(text, ":")
		if !ok {
			problems.Add(at.Problem("write NAME:KEY, or a document that begins with `keys:`", "the line has no colon"))
			continue
		}
		keys = append(keys, fileKey{Name: strings.TrimSpace(name), Key: strings.TrimSpace(key), Pos: at})
	}
	return keys, problems
}

// key checks an item and hashes its key.
func (k *fileKey) key() (Key, error) {
	out := Key{Name: k.Name, Models: k.Models, Group: k.Group, RequestsPerMinute: k.RequestsPerMinute, Concurrency: k.Concurrency}
	if k.Name == "" {
		return out, errors.New("the key has no name: it is what logs and metrics show")
	}
	for _, name := range []string{k.Name, k.Group} {
		if err := checkName(name); err != nil {
			return out, fmt.Errorf("%w: %s", err, nameRemedy)
		}
	}
	if out.Group == "" {
		out.Group = k.Name
	}
	switch {
	case k.Key != "" && k.SHA256 != "":
		return out, fmt.Errorf("%s has key and sha256: keep one of them", quote(k.Name))
	case k.Key != "":
		if strings.ContainsFunc(k.Key, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return out, fmt.Errorf("the key of %s has other than printable ASCII characters, or a blank", quote(k.Name))
		}
		out.Hash = sha256.Sum256([]byte(k.Key))
	case k.SHA256 != "":
		hash, err := hex.DecodeString(k.SHA256)
		if err != nil || len(hash) != len(out.Hash) {
			return out, fmt.Errorf("the sha256 of %s must have 64 hexadecimal digits: printf %%s KEY | sha256sum", quote(k.Name))
		}
		copy(out.Hash[:], hash)
	default:
		return out, fmt.Errorf("%s has neither key nor sha256", quote(k.Name))
	}
	if k.Models != nil && len(k.Models) == 0 {
		return out, fmt.Errorf("%s may use no model: list its models, or leave models out to allow all", quote(k.Name))
	}
	for _, m := range k.Models {
		if m == "" {
			return out, fmt.Errorf("%s: a model has an empty name", quote(k.Name))
		}
	}
	for _, limit := range []int{k.RequestsPerMinute, k.Concurrency} {
		if limit < 0 || limit > maxLimit {
			return out, fmt.Errorf("%s: a limit must be from 0 (none) to %d", quote(k.Name), maxLimit)
		}
	}
	return out, nil
}

// ReadSecret reads a file that holds one key or token of printable ASCII
// characters and nothing else, blanks around it excepted.
func ReadSecret(file string) (string, error) {
	data, err := readDocument(file)
	if err != nil {
		return "", err
	}
	text := strings.TrimSpace(string(data))
	if text == "" || strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("%s must hold one key of printable ASCII characters and nothing else", file)
	}
	return text, nil
}
