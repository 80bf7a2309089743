package configs

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestParseKeys(t *testing.T) {
	hash := sha256.Sum256([]byte("sk-1"))
	digits := hex.EncodeToString(hash[:])
	f := func(text string, want ...Key) {
		t.Helper()
		got, err := ParseKeys("keys", []byte(text))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: got %+v, %v, want %+v", text, got, err, want)
		}
	}
	one := Key{Name: "a", Group: "a", Hash: hash}
	f("a:sk-1\n", one)
	f("\n# who: what\n a : sk-1 \r\n", one)
	f("keys:\n- {name: a, key: sk-1}\n", one)
	f("---\nkeys: [{name: a, sha256: "+digits+"}]\n", one)
	f("keys: [{name: a, sha256: "+strings.ToUpper(digits)+"}]\n", one)
	f(`{"keys":[{"name":"a","key":"sk-1"}]}`, one)
	f("# c\nkeys:\n- {name: a, key: sk-1, models: [m, n], group: g, requests_per_minute: 60, concurrency: 4}\n",
		Key{Name: "a", Group: "g", Hash: hash, Models: []string{"m", "n"}, RequestsPerMinute: 60, Concurrency: 4})
	f("keys:sk-1\n", Key{Name: "keys", Group: "keys", Hash: hash})
	f("a:sk:2\n", Key{Name: "a", Group: "a", Hash: sha256.Sum256([]byte("sk:2"))})
}

func TestParseKeysErrors(t *testing.T) {
	const secret = "hunter2"
	f := func(text, want string) {
		t.Helper()
		_, err := ParseKeys("keys", []byte(text))
		if err == nil || err.Error() != want {
			t.Errorf("%q: got %v, want %s", text, err, want)
			return
		}
		if strings.Contains(err.Error(), secret) {
			t.Errorf("%q: got a message with the key: %v, want none", text, err)
		}
	}
	item := func(fields string) string { return "keys:\n- {" + fields + "}\n" }
	const none = "keys: no keys (list at least one under `keys:`, or write lines NAME:KEY)"
	f("", none)
	f("# nobody\n", none)
	f("keys: []\n", none)
	f("keys:\n", none)
	f("hunter2\n", "keys:1: the line has no colon (write NAME:KEY, or a document that begins with `keys:`)")
	f("a:k\nb:\n", `keys:2: "b" has neither key nor sha256`)
	f(":hunter2\n", "keys:1: the key has no name: it is what logs and metrics show")
	f("a b:hunter2\n", `keys:1: the name "a b" is not allowed: `+nameRemedy)
	f("a:hunter2 x\n", `keys:1: the key of "a" has other than printable ASCII characters, or a blank`)
	f("a:k\na:hunter2\n", `keys:2: the name "a" is used twice, first in keys:1 (give each key a name of its own)`)
	f("a:hunter2\nb:hunter2\n", "keys:2: the same key twice, first in keys:1 (keep one of them)")
	f(item("name: a, key: 5"), "keys:2:18: keys[0].key: wants a string (put it in quotes)")
	f("keys: hunter2\n", "keys:1:7: keys: wants a list of objects with name and key or sha256")
	f("keys: [hunter2]\n", "keys:1:8: keys[0]: wants a list of objects with name and key or sha256")
	f(item("name: a, key: hunter2, sha256: x"), `keys:2:3: keys[0]: "a" has key and sha256: keep one of them`)
	f(item("name: a, sha256: abc"), `keys:2:3: keys[0]: the sha256 of "a" must have 64 hexadecimal digits: printf %s KEY | sha256sum`)
	f(item("name: a, key: k, models: []"), `keys:2:3: keys[0]: "a" may use no model: list its models, or leave models out to allow all`)
	f(item("name: a, key: k, models: ['']"), `keys:2:3: keys[0]: "a": a model has an empty name`)
	f(item("name: a, key: k, concurrency: -1"), `keys:2:3: keys[0]: "a": a limit must be from 0 (none) to 1000000000`)
	f(item("name: a, key: k, group: a/b"), `keys:2:3: keys[0]: the name "a/b" is not allowed: `+nameRemedy)
	f(item("name: a, key: k, rate: 1"), "keys:2:21: keys[0].rate: unknown field (known fields: name, key, sha256, models, group, requests_per_minute, concurrency)")
	f("{", "keys:1: did not find expected node content")
	f("a:"+strings.Repeat("k", maxDocument), "keys: larger than 1048576 bytes")
}

func TestLoadKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	if _, err := LoadKeys(file); err == nil {
		t.Errorf("a missing file: got %v, want an error", err)
	}
	if err := os.WriteFile(file, []byte("a:k\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := LoadKeys(file); err != nil || len(got) != 1 || got[0].Name != "a" {
		t.Errorf("got %+v, %v, want the key a", got, err)
	}
}
