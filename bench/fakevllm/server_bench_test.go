package fakevllm

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
)

// load repeats one request on open connections, 32 per core, until b is done.
func load(b *testing.B, s *Server, body string, end func(r *bufio.Reader) error) {
	request := fmt.Appendf(nil, "POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", chatPath, len(body), body)
	b.ReportAllocs()
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			b.Error(err)
			return
		}
		defer func() { _ = c.Close() }()
		r := bufio.NewReader(c)
		for pb.Next() {
			_, err := c.Write(request)
			if err == nil {
				err = end(r)
			}
			if err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// BenchmarkInstant is one 8 KB chat request and its plain answer, client included.
func BenchmarkInstant(b *testing.B) {
	s, err := Start(Options{Instant: true})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	body := `{"model":"fake","max_tokens":16,"messages":[{"role":"user","content":"` + strings.Repeat("hello world ", 680) + `"}]}`
	load(b, s, body, func(r *bufio.Reader) error {
		length := 0
		for {
			line, err := r.ReadSlice('\n')
			if err != nil {
				return err
			}
			if v, ok := bytes.CutPrefix(line, []byte("content-length: ")); ok {
				length, _ = strconv.Atoi(string(bytes.TrimSpace(v)))
			}
			if len(line) == 2 {
				_, err := r.Discard(length)
				return err
			}
		}
	})
}

// BenchmarkStream is one stream of 100 tokens through an engine a thousand
// times as fast as life, client included.
func BenchmarkStream(b *testing.B) {
	s, err := Start(Options{Speed: 1000})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	load(b, s, `{`+hello+`,"stream":true,"max_tokens":100,"ignore_eos":true}`, func(r *bufio.Reader) error {
		for {
			line, err := r.ReadSlice('\n')
			if err != nil || string(line) == "0\r\n" {
				_, _ = r.Discard(2)
				return err
			}
		}
	})
}
