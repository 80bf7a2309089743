package routing

import (
	"bytes"
	"math/rand/v2"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"
)

// fenced returns a page of memory with pages before and behind that may be neither read nor written.
func fenced(t *testing.T) []byte {
	t.Helper()
	page := unix.Getpagesize()
	m, err := unix.Mmap(-1, 0, 3*page, unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(m) })
	if err := unix.Mprotect(m[page:2*page], unix.PROT_READ|unix.PROT_WRITE); err != nil {
		t.Fatal(err)
	}
	return m[page : 2*page : 2*page]
}

// TestCopyTextAtTheEdgeOfMemory puts both sides at the end and at the start of what may be touched: a byte too much is a fault.
func TestCopyTextAtTheEdgeOfMemory(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true)) // the trace then names the test
	from, to := fenced(t), fenced(t)
	f := func(t *testing.T, text []byte, room int) {
		t.Helper()
		want := make([]byte, room)
		wantN, wantI := copyTextPortable(want, text)
		for _, last := range []bool{false, true} {
			src, dst := from[:len(text)], to[:room]
			if last {
				src, dst = from[len(from)-len(text):], to[len(to)-room:]
			}
			copy(src, text)
			n, i := copyText(dst, src)
			if n != wantN || i != wantI || !bytes.Equal(dst[:n], want[:n]) {
				t.Fatalf("copyText(%d bytes, %q) = %d, %d (%q), want %d, %d (%q)", room, text, n, i, dst[:n], wantN, wantI, want[:wantN])
			}
			if got, want := plainText(src), plainTextPortable(text); got != want {
				t.Fatalf("plainText(%q) = %d, want %d", text, got, want)
			}
		}
	}
	for at := range 50 { // the last bytes of src, wherever they are among 16
		for _, piece := range textPieces {
			text := append(bytes.Repeat([]byte{'x'}, at), piece...)
			f(t, text, len(text))
			f(t, text, len(text)+20)
		}
	}
	rng := rand.New(rand.NewPCG(23, 24))
	for range 100_000 {
		text := randomText(rng)
		f(t, text, len(text))
		f(t, text, rng.IntN(len(text)+20))
	}
}
