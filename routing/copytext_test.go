package routing

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
)

// copied is what copyText makes of src with room for so many bytes, and how much of src that is. It must be what
// copyTextPortable makes, and neither src nor a byte behind dst may change. Behind src there are more escapes, to
// be told from a read beyond the end.
func copied(t *testing.T, src []byte, room int) (out []byte, read int) {
	t.Helper()
	const guard = 40
	from := append(bytes.Clone(src), strings.Repeat(`\n`, guard/2)...)
	whole := bytes.Clone(from)
	run := func(f func(dst, src []byte) (n, i int)) ([]byte, int) {
		to := bytes.Repeat([]byte{0xa5}, room+guard)
		n, i := f(to[:room], from[:len(src)])
		if n < 0 || n > i || n > room || i > len(src) {
			t.Fatalf("copyText(%d bytes, %q) = %d, %d, want no more written than read and room for both", room, src, n, i)
		}
		if got := bytes.Count(to[room:], []byte{0xa5}); got != guard {
			t.Fatalf("copyText(%d bytes, %q): got %d bytes written behind dst, want none", room, src, guard-got)
		}
		return to[:n], i
	}
	out, read = run(copyText)
	want, wantRead := run(copyTextPortable)
	if !bytes.Equal(out, want) || read != wantRead {
		t.Fatalf("copyText(%d bytes, %q) = %q, %d, want %q, %d", room, src, out, read, want, wantRead)
	}
	if got, want := plainText(from[:len(src)]), plainTextPortable(from[:len(src)]); got != want {
		t.Fatalf("plainText(%q) = %d, want %d", src, got, want)
	}
	if !bytes.Equal(from, whole) {
		t.Fatalf("copyText(%d bytes, %q): got a source of %q, want it as it was", room, src, from)
	}
	return out, read
}

func TestCopyText(t *testing.T) {
	f := func(t *testing.T, src string, room int, want string, wantRead int) {
		t.Helper()
		out, read := copied(t, []byte(src), room)
		if string(out) != want || read != wantRead {
			t.Errorf("copyText(%d bytes, %q) = %q, %d, want %q, %d", room, src, out, read, want, wantRead)
		}
	}
	x := func(n int) string { return strings.Repeat("x", n) }
	const all = 1000

	f(t, "", 0, "", 0)
	f(t, "", all, "", 0)
	f(t, x(40), 0, "", 0)

	// Near the end of either side.
	f(t, x(16), all, "", 0)
	f(t, x(17), all, x(16), 16)
	f(t, x(32), all, x(16), 16)
	f(t, x(33), all, x(32), 32)
	f(t, x(64), 16, "", 0)
	f(t, x(64), 17, x(16), 16)
	f(t, x(64), 32, x(16), 16)
	f(t, x(64), 33, x(32), 32)

	// Escapes in the last bytes.
	f(t, x(14)+`\nx`, all, x(14)+"\n", 16)
	f(t, x(15)+`\n`, all, x(15)+"\n", 17)
	f(t, x(15)+`\`+"\x00", all, x(15), 15)
	f(t, x(15)+`\nx`, all, x(15)+"\n", 17)
	f(t, x(16)+`\n`, all, x(16), 16)
	f(t, x(15)+`\n\n`, all, x(15)+"\n", 17)
	f(t, strings.Repeat(`\n`, 16), all, strings.Repeat("\n", 8), 16)
	f(t, strings.Repeat(`\n`, 16)+"x", all, strings.Repeat("\n", 9), 18)
	f(t, strings.Repeat(`\n`, 40), 17, "\n", 2)
	f(t, strings.Repeat(`\n`, 40), 34, strings.Repeat("\n", 9), 18)
	f(t, `\t\t\"\\\/"`+x(40), all, "\t\t\"\\/", 10)
	f(t, `\t\t\u00e9`+x(40), all, "\t\t", 4)

	// Runs of characters of three bytes.
	f(t, "请求被路由"+x(17), all, "请求被路由"+x(16), 31)
	f(t, "请求被路由"+x(40), all, "请求被路由"+x(32), 47)
	f(t, "请求被路由\""+x(40), all, "请求被路由", 15)
	f(t, `请求\n被`+x(40), all, "请求\n被"+x(32), 43)
	f(t, "请求é"+x(40), all, "请求", 6)
	f(t, "请求🙂"+x(40), all, "请求", 6)
	f(t, "请求한"+x(40), all, "请求", 6)
	f(t, "请求अ"+x(40), all, "请求", 6)
	f(t, "请求\xe8\xafx"+x(40), all, "请求", 6)
	f(t, "请求\xe8x\xb7"+x(40), all, "请求", 6)
	f(t, strings.Repeat("请", 10), all, strings.Repeat("请", 5), 15)
	f(t, strings.Repeat("请", 10), 17, "请", 3)
	f(t, strings.Repeat("请", 5)+"xx", all, "请", 3)
	f(t, x(14)+"请", all, x(14), 14)
	f(t, x(14)+"请"+x(16), all, x(14)+"请", 17)
	f(t, x(14)+"请"+x(17), all, x(14)+"请"+x(16), 33)

	for at := range 18 {
		for c := range 256 {
			src := x(at) + string([]byte{byte(c)}) + x(40)
			if c < ' ' || c == '"' || c == '\\' || c >= 0x80 {
				f(t, src, all, x(at), at)
			} else {
				read := (len(src) - 1) &^ 15
				f(t, src, all, src[:read], read)
			}

			src = x(at) + `\` + string([]byte{byte(c)}) + x(50)
			if e := strings.IndexByte(`"\/bfnrt`, byte(c)); e >= 0 {
				f(t, src, at+52, x(at)+"\"\\/\b\f\n\r\t"[e:e+1]+x(48), at+50)
			} else {
				f(t, src, at+52, x(at), at)
			}

			src = x(at) + string([]byte{byte(c), 0x80, 0xbf}) + x(48)
			if c > 0xe0 && c < 0xf0 && c != 0xed {
				f(t, src, all, src[:at+35], at+35)
			} else if c >= 0x80 {
				f(t, src, all, x(at), at)
			}
			for _, tail := range []string{"\x80" + string([]byte{byte(c)}), string([]byte{byte(c)}) + "\x80"} {
				src = x(at) + "\xef" + tail + x(48)
				if c >= 0x80 && c < 0xc0 {
					f(t, src, all, src[:at+35], at+35)
				} else {
					f(t, src, all, x(at), at)
				}
			}
		}
	}
}

// textPieces are what random text is made of: all that copyText treats in its own way.
var textPieces = [...]string{
	"x", "plain text", strings.Repeat("long ", 7), `\n`, `\t\t`, `\"`, `\\`, `\/`, `\x`, `\u00e9`, `\`, `"`, "\n", "\x00", "\x1f", "\x7f",
	"请", "请求被路由到持有前缀缓存的副本。", "キャッシュ", "한", "अ", "é", "🙂", "\x80", "\xe8", "\xe8\xaf", "\xed\xa0\x80", "\xff",
}

func randomText(rng *rand.Rand) []byte {
	var b []byte
	for range rng.IntN(16) {
		b = append(b, textPieces[rng.IntN(len(textPieces))]...)
	}
	return b
}

func FuzzCopyText(f *testing.F) {
	rng := rand.New(rand.NewPCG(21, 22))
	for range 300 {
		f.Add(randomText(rng), uint16(rng.IntN(300)))
	}
	f.Fuzz(func(t *testing.T, src []byte, room uint16) {
		copied(t, src, int(room))
		copied(t, src, len(src))
	})
}

func TestCopyTextAllocatesNothing(t *testing.T) {
	src, dst := bytes.Repeat([]byte(`plain text,\n请求`), 20), make([]byte, 1000)
	if got := testing.AllocsPerRun(100, func() {
		copyText(dst, src)
		plainText(src)
	}); got != 0 {
		t.Errorf("got %v allocations, want none", got)
	}
}

// BenchmarkCopyText compares copyText and plainText with their portable forms. What they stop at is passed over.
func BenchmarkCopyText(b *testing.B) {
	mixed := escaped(rand.New(rand.NewPCG(1, 2)), promptText(rand.New(rand.NewPCG(1, 2)), 64<<10))[1:]
	code := "func f(name string) (n int, err error) {\n\tif name == \"\" {\n\t\treturn 0, fmt.Errorf(\"f: empty\")\n\t}\n\treturn len(name), nil\n}\n\n"
	for _, text := range []struct {
		name string
		src  []byte
	}{
		{"mixed", mixed},
		{"code", escaped(rand.New(rand.NewPCG(1, 2)), strings.Repeat(code, 500))[1:]},
		{"plain", bytes.Repeat([]byte("plain text "), 6000)},
		{"chinese", []byte(strings.Repeat("请求被路由到持有前缀缓存的副本。", 1400))},
		{"10", append([]byte(`plain text"`), mixed[:40]...)},
	} {
		for _, form := range []struct {
			name  string
			copy  func(dst, src []byte) (n, i int)
			plain func(src []byte) int
		}{
			{"portable", copyTextPortable, plainTextPortable},
			{"used", copyText, plainText},
		} {
			dst := make([]byte, len(text.src))
			b.Run(text.name+"/copy/"+form.name, func(b *testing.B) {
				b.SetBytes(int64(len(text.src)))
				for b.Loop() {
					for src := text.src; len(src) >= textStep; {
						_, i := form.copy(dst, src)
						src = src[min(len(src), i+1):]
					}
				}
			})
			b.Run(text.name+"/plain/"+form.name, func(b *testing.B) {
				b.SetBytes(int64(len(text.src)))
				for b.Loop() {
					for src := text.src; len(src) >= textStep; {
						src = src[min(len(src), form.plain(src)+1):]
					}
				}
			})
		}
	}
}

// TestTextWindow: strings of several windows, with an escape, a character of three bytes and a pair of surrogates across each place near a window's end.
func TestTextWindow(t *testing.T) {
	for _, piece := range []string{"x", `\n`, `\"`, "語", `\u8a9e`, `\ud83d\ude00`, "😀", "é"} {
		for back := range textStep + 13 {
			text := strings.Repeat("x", textWindow-back) + piece + strings.Repeat("y", textWindow) + piece + "z"
			var want string
			if err := json.Unmarshal([]byte(`"`+text+`"`), &want); err != nil {
				t.Fatal(err)
			}
			got, end := appendString(nil, []byte(text+`"`), 0)
			if string(got) != want || end != len(text)+1 {
				t.Fatalf("%q %d bytes before a window's end: got %d bytes ending at %d, want %d at %d", piece, back, len(got), end, len(want), len(text)+1)
			}
			if end, _ := scanString([]byte(text+`"`), 0); end != len(text)+1 {
				t.Fatalf("%q %d bytes before a window's end: the string ends at %d, want %d", piece, back, end, len(text)+1)
			}
		}
	}
}
