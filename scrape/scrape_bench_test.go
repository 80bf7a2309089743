package scrape

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/routing"
)

// serveEnv makes the test binary a server of metrics pages, so that the
// processor time of a benchmark is that of the scraper alone.
const serveEnv = "KVGATE_SCRAPE_SERVE"

// serveForBenchmark answers GET as vLLM does until its standard input closes.
func serveForBenchmark() {
	var size int
	if _, err := fmt.Scanln(&size); err != nil {
		panic(err)
	}
	page := make([]byte, size)
	if _, err := io.ReadFull(os.Stdin, page); err != nil {
		panic(err)
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // the parent is gone
		os.Exit(0)
	}()
	list := []byte(text200(`{"object":"list","data":[{"id":"smollm2"}]}`))
	answer := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 11:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\ncontent-length: %d\r\n\r\n%s", len(page), page)
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(l.Addr().(*net.TCPAddr).Port)
	for {
		c, err := l.Accept()
		if err != nil {
			panic(err)
		}
		go func() {
			defer func() { _ = c.Close() }()
			in := bufio.NewReader(c)
			for {
				line, err := in.ReadSlice('\n')
				if err != nil {
					return
				}
				out := answer
				if bytes.Contains(line, []byte("/v1/models")) {
					out = list
				}
				for len(line) > 2 {
					if line, err = in.ReadSlice('\n'); err != nil {
						return
					}
				}
				if _, err := c.Write(out); err != nil {
					return
				}
			}
		}()
	}
}

// startServer runs serveForBenchmark in a process of its own and returns its port.
func startServer(b *testing.B, page []byte) (port int) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serveEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if _, err := fmt.Fprintf(in, "%d\n%s", len(page), page); err != nil {
		b.Fatal(err)
	}
	if _, err := fmt.Fscan(out, &port); err != nil {
		b.Fatal(err)
	}
	return port
}

// processorTime returns what this process has used, in user and kernel mode.
func processorTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// report tells the processor time per page and the cores that 100 replicas every 50 ms would take.
func report(b *testing.B, used time.Duration, pages int64) {
	perPage := float64(used.Nanoseconds()) / float64(pages)
	b.ReportMetric(perPage/1e3, "cpu-us/page")
	b.ReportMetric(perPage*2000/1e9, "cores")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkScrape100 scrapes 100 replicas every 50 ms, pages of 70 KB.
func BenchmarkScrape100(b *testing.B) {
	page := bigPage(b)
	port := startServer(b, page)
	settings := configs.DefaultSettings()
	settings.Scrape.Interval = 50 * time.Millisecond
	for i := range 100 {
		settings.Replicas = append(settings.Replicas, configs.Replica{URL: fmt.Sprintf("http://127.0.0.%d:%d", i+1, port)})
	}
	plan, err := NewPlan(configs.DefaultScheduling(), settings.Scrape)
	if err != nil {
		b.Fatal(err)
	}
	m, err := NewManager(Options{Fleet: routing.NewFleet(time.Now, time.Second, zap.NewNop()), Settings: &settings, Plan: plan, Log: zap.NewNop()})
	if err != nil {
		b.Fatal(err)
	}
	m.Start(b.Context())
	defer m.Close()
	if err := m.WaitFirst(b.Context()); err != nil {
		b.Fatal(err)
	}
	scraped := func() (n int64) {
		for _, w := range m.snapshot() {
			n += w.results[resultOK].Load()
		}
		return n
	}
	b.SetBytes(int64(len(page)))
	b.ResetTimer()
	first, used := scraped(), processorTime(b)
	for scraped()-first < int64(b.N) {
		time.Sleep(time.Millisecond)
	}
	report(b, processorTime(b)-used, scraped()-first)
}

// BenchmarkNetHTTP is BenchmarkScrape100 with net/http in place of the client, and without the parsing.
func BenchmarkNetHTTP(b *testing.B) {
	port := startServer(b, bigPage(b))
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2}}
	defer client.CloseIdleConnections()
	ctx, cancel := context.WithCancel(b.Context())
	var wait sync.WaitGroup
	var n atomic.Int64
	pool := sync.Pool{New: func() any { return new(bytes.Buffer) }}
	used := processorTime(b)
	b.ResetTimer()
	for i := range 100 {
		wait.Go(func() {
			request, err := http.NewRequestWithContext(ctx, "GET", fmt.Sprintf("http://127.0.0.%d:%d/metrics", i+1, port), nil)
			if err != nil {
				b.Error(err)
				return
			}
			for ctx.Err() == nil {
				response, err := client.Do(request)
				if err != nil {
					return
				}
				buf := pool.Get().(*bytes.Buffer)
				buf.Reset()
				_, _ = buf.ReadFrom(response.Body)
				_ = response.Body.Close()
				pool.Put(buf)
				n.Add(1)
				time.Sleep(jitter(50 * time.Millisecond))
			}
		})
	}
	for n.Load() < int64(b.N) {
		time.Sleep(time.Millisecond)
	}
	report(b, processorTime(b)-used, n.Load())
	cancel()
	wait.Wait()
}
