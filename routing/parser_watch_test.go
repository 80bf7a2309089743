package routing

import (
	"fmt"
	"testing"
)

// Found has every occurrence of the watched top-level fields, and no other.
func TestWatch(t *testing.T) {
	f := func(body string, want ...string) {
		t.Helper()
		r := Request{API: APIChat, Body: []byte(body), Watch: []string{"cache_salt", "x"}}
		for range 2 { // the second finds what the first has left behind
			if err := r.Parse(); err != nil {
				t.Fatalf("%s: got %v, want no error", body, err)
			}
		}
		var got []string
		for _, m := range r.Found {
			got = append(got, r.Watch[m.Field]+" "+body[m.From:m.To]+" "+body[m.Value:m.To])
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: got %q, want %q", body, got, want)
		}
		if r.Reset(); len(r.Found) != 0 || r.Watch != nil {
			t.Errorf("behind Reset: got %v and %v, want nothing", r.Found, r.Watch)
		}
	}
	f(`{}`)
	f(`{"y":1}`)
	f(`{"x" : 1 }`, `x "x" : 1 1`)
	f(`{"x":{"x":[1]},"cache_salt":"a","x":null}`, `x "x":{"x":[1]} {"x":[1]}`, `cache_salt "cache_salt":"a" "a"`, `x "x":null null`)
	f(`{"messages":[{"role":"user","content":"a","x":1}],"\u0078":2}`, `x "\u0078":2 2`)
	f(`{"X":1,"xx":2,"":3}`)
}
