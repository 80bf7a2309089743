package fakevllm

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
)

// BenchmarkInstant is one 8 KB chat request and its plain answer over a
// connection that stays open.
func BenchmarkInstant(b *testing.B) {
	s, err := Start(Options{Instant: true})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	body := `{"model":"fake","max_tokens":16,"messages":[{"role":"user","content":"` + strings.Repeat("hello world ", 680) + `"}]}`
	request := fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", len(body), body)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			b.Error(err)
			return
		}
		defer func() { _ = c.Close() }()
		r := bufio.NewReader(c)
		for pb.Next() {
			if _, err := c.Write(request); err != nil {
				b.Error(err)
				return
			}
			length := 0
			for {
				line, err := r.ReadSlice('\n')
				if err != nil {
					b.Error(err)
					return
				}
				if v, ok := bytes.CutPrefix(line, []byte("content-length: ")); ok {
					length, _ = strconv.Atoi(string(bytes.TrimSpace(v)))
				}
				if len(line) == 2 {
					break
				}
			}
			if _, err := io.CopyN(io.Discard, r, int64(length)); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
