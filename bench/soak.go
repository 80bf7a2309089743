package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"kvgate/bench/fakevllm"
)

// SoakOptions configures Soak.
type SoakOptions struct {
	KVGate   string        // the program under test
	Duration time.Duration // of the load with faults; a tenth of it comes before as warm-up
	Clients  int           // that ask at once
	Replicas int           // at least 2
	Seed     uint64
	Progress io.Writer // one line per fault; may be nil
}

// soakQuiet is how long kvgate has to return to its start when the load ends:
// idle connections of both sides end within it.
const soakQuiet = 20 * time.Second

// soakGrace is how long after a replica's restart an error is put down to it: the
// replica must be scraped and found ready again.
const soakGrace = 3 * time.Second

// SoakReport is what a soak has found.
type SoakReport struct {
	Requests, Streams, Aborts  int64
	Restarts, Changes, Reloads int64
	Explained                  int64 // errors of requests that ran while a replica was restarted
	Unexplained                int64
	Samples                    []string // of unexplained errors
	Before, Most, After        SoakState
	Leaks                      []string // what did not return to its start
	restarts                   []soakRestart
}

type soakRestart struct {
	replica string
	from    time.Time
	to      time.Time // zero while it is down
}

// SoakState is what kvgate holds at a moment.
type SoakState struct {
	RSS, Goroutines, Files    float64 // bytes, number, number
	InFlight, Replicas, Conns float64 // requests in flight by route and by replica, client connections
	IndexBlocks, IndexBytes   float64
}

// Failed says whether the soak found an error or a leak.
func (r *SoakReport) Failed() bool { return r.Unexplained > 0 || len(r.Leaks) > 0 }

// Table writes the report for people.
func (r *SoakReport) Table(w io.Writer) {
	_, _ = fmt.Fprintf(w, "%d requests (%d streams), %d given up by the client; %d replica restarts, %d endpoint changes, %d reloads\n", r.Requests, r.Streams, r.Aborts, r.Restarts, r.Changes, r.Reloads)
	_, _ = fmt.Fprintf(w, "errors: %d of requests on a replica that was restarted, %d unexplained\n\n", r.Explained, r.Unexplained)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(t, "\tbefore\tat most\tafter\t")
	for _, row := range soakRows {
		_, _ = fmt.Fprintf(t, "%s\t%.0f\t%.0f\t%.0f\t\n", row.name, *row.of(&r.Before), *row.of(&r.Most), *row.of(&r.After))
	}
	_ = t.Flush()
	for _, s := range append(slices.Clone(r.Samples), r.Leaks...) {
		_, _ = fmt.Fprintln(w, s)
	}
}

// soakRows are the values of a state; after is the most that may be there in the end.
var soakRows = []struct {
	name  string
	of    func(*SoakState) *float64
	after func(before float64) float64
}{
	{"resident bytes", func(s *SoakState) *float64 { return &s.RSS }, func(b float64) float64 { return 1.25*b + 16<<20 }},
	{"goroutines", func(s *SoakState) *float64 { return &s.Goroutines }, func(b float64) float64 { return b + 2 }},
	{"open files", func(s *SoakState) *float64 { return &s.Files }, func(b float64) float64 { return b + 2 }},
	{"requests in flight", func(s *SoakState) *float64 { return &s.InFlight }, func(float64) float64 { return 0 }},
	{"in flight on replicas", func(s *SoakState) *float64 { return &s.Replicas }, func(float64) float64 { return 0 }},
	{"client connections", func(s *SoakState) *float64 { return &s.Conns }, func(float64) float64 { return 0 }},
	// Replicas that come and go spread the conversations, until each of the four (by default) holds what one did before.
	{"index blocks", func(s *SoakState) *float64 { return &s.IndexBlocks }, func(b float64) float64 { return 4*b + 1000 }},
	{"index bytes", func(s *SoakState) *float64 { return &s.IndexBytes }, func(b float64) float64 { return 1.1*b + 1<<20 }},
}

// soak is one run.
type soak struct {
	o       SoakOptions
	dir     string
	url     string
	admin   string
	gate    *exec.Cmd
	client  *http.Client
	mu      sync.Mutex // of report and servers
	report  SoakReport
	servers []*fakevllm.Server
	prompts []string
}

// Soak runs kvgate in front of simulated replicas while clients come, ask and
// leave, replicas are killed and restarted, endpoints go and come, and settings
// are read again; then it looks whether everything is as before. Errors are of
// the bench itself: what kvgate did wrong is in the report.
func Soak(ctx context.Context, o SoakOptions) (*SoakReport, error) {
	if o.Duration < time.Second || o.Clients < 1 || o.Replicas < 2 {
		return nil, fmt.Errorf("soak: duration %s, %d clients, %d replicas: use at least 1s, 1 and 2", o.Duration, o.Clients, o.Replicas)
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	dir, err := os.MkdirTemp("", "kvgate-soak")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	s := &soak{o: o, dir: dir}
	// A machine that stands still for seconds must not make the client use what the
	// gateway closes at that moment: it gives connections up before server.idle_timeout.
	s.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: o.Clients, DisableCompression: true, IdleConnTimeout: 3 * time.Second}, Timeout: time.Minute}
	rnd := rand.New(rand.NewPCG(o.Seed, 0))
	for i := range 200 {
		s.prompts = append(s.prompts, fmt.Sprintf("%d %s", i, strings.Repeat("soak ", 50+rnd.IntN(800))))
	}
	defer s.end()
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	if err := s.run(ctx); err != nil {
		return nil, err
	}
	return &s.report, nil
}

// begin starts the replicas and kvgate.
func (s *soak) begin(ctx context.Context) error {
	for range s.o.Replicas {
		r, err := fakevllm.Start(soakReplica(""))
		if err != nil {
			return err
		}
		s.servers = append(s.servers, r)
	}
	if err := s.writeEndpoints(s.o.Replicas); err != nil {
		return err
	}
	var ports [2]string
	for i := range ports {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		ports[i] = ln.Addr().String()
		_ = ln.Close()
	}
	s.url, s.admin = "http://"+ports[0], "http://"+ports[1]
	log, err := os.Create(filepath.Join(s.dir, "log"))
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	s.gate = exec.Command(s.o.KVGate, "serve", "--listen", ports[0], "--admin-listen", ports[1], "--endpoints", filepath.Join(s.dir, "endpoints.yaml"),
		"--headers-replica", "--log-access=false", "--server-idle-timeout", "5s")
	s.gate.Stdout, s.gate.Stderr = log, log
	if err := s.gate.Start(); err != nil {
		return fmt.Errorf("soak: %w", err)
	}
	for end := time.Now().Add(15 * time.Second); ; {
		resp, err := s.client.Get(s.url + "/readyz")
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		if time.Now().After(end) || ctx.Err() != nil {
			words, _ := os.ReadFile(log.Name())
			return fmt.Errorf("soak: %s is not ready: %s", s.o.KVGate, words)
		}
		rest(ctx, 100*time.Millisecond)
	}
}

func soakReplica(addr string) fakevllm.Options {
	return fakevllm.Options{Listen: addr, Speed: 4, OutputTokens: 24}
}

// writeEndpoints lists the first n replicas.
func (s *soak) writeEndpoints(n int) error {
	var b strings.Builder
	b.WriteString("endpoints:\n")
	for i, r := range s.servers[:n] {
		host, port, err := net.SplitHostPort(r.Addr())
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "  - {name: r%d, address: %s, port: %q}\n", i, host, port)
	}
	next := filepath.Join(s.dir, "next")
	if err := os.WriteFile(next, []byte(b.String()), 0o600); err != nil {
		return err
	}
	return os.Rename(next, filepath.Join(s.dir, "endpoints.yaml"))
}

// end stops what begin has started.
func (s *soak) end() {
	if s.gate != nil && s.gate.Process != nil {
		_ = s.gate.Process.Kill()
		_ = s.gate.Wait()
	}
	for _, r := range s.servers {
		r.Close()
	}
	s.client.CloseIdleConnections()
}

// run is warm-up, before, load with faults, after.
func (s *soak) run(ctx context.Context) error {
	s.load(ctx, s.o.Duration/10, false)
	before, err := s.quiet(ctx, nil)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.report = SoakReport{Before: before, Most: before, Samples: s.report.Samples, Unexplained: s.report.Unexplained} // the warm-up's errors count
	s.mu.Unlock()
	s.load(ctx, s.o.Duration, true)
	after, err := s.quiet(ctx, &before)
	if err != nil {
		return err
	}
	s.report.After = after
	for _, row := range soakRows {
		got, most := *row.of(&after), row.after(*row.of(&before))
		if got > most {
			s.report.Leaks = append(s.report.Leaks, fmt.Sprintf("%s: %.0f in the end, at most %.0f expected", row.name, got, most))
		}
	}
	return ctx.Err()
}

// load runs the clients, and with faults all that disturbs them.
func (s *soak) load(ctx context.Context, d time.Duration, faults bool) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	var wg sync.WaitGroup
	for k := range s.o.Clients {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(s.o.Seed+1, uint64(k)))
			for ctx.Err() == nil {
				s.ask(rnd, faults)
			}
		})
	}
	if faults {
		wg.Go(func() { s.disturb(ctx) })
	}
	wg.Go(func() {
		for rest(ctx, time.Second) {
			if now, err := s.state(); err == nil {
				s.mu.Lock()
				for _, row := range soakRows {
					*row.of(&s.report.Most) = max(*row.of(&s.report.Most), *row.of(&now))
				}
				s.mu.Unlock()
			}
		}
	})
	wg.Wait()
}

// ask sends one request, or gives one up.
func (s *soak) ask(rnd *rand.Rand, aborts bool) {
	prompt := s.prompts[rnd.IntN(len(s.prompts))]
	stream := rnd.IntN(2) == 0
	body := fmt.Sprintf(`{"model":"fake","max_tokens":%d,"stream":%t,"messages":[{"role":"user","content":%q}]}`, 4+rnd.IntN(40), stream, prompt)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	leaves := aborts && rnd.IntN(10) < 3
	if leaves {
		timer := time.AfterFunc(time.Duration(rnd.IntN(60))*time.Millisecond, cancel)
		defer timer.Stop()
	}
	begin := time.Now()
	replica, err := s.exchange(ctx, body, stream)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.Requests++
	if stream {
		s.report.Streams++
	}
	switch {
	case leaves && ctx.Err() != nil:
		s.report.Aborts++
	case err == nil:
	case s.restarted(begin, replica):
		s.report.Explained++
	default:
		if s.report.Unexplained++; len(s.report.Samples) < 10 {
			s.report.Samples = append(s.report.Samples, fmt.Sprintf("%s, replica %q, stream %t: %v", begin.Format(time.TimeOnly), replica, stream, err))
		}
	}
}

// restarted says whether the replica, or any when it is not known, was being
// restarted since the time. The caller holds mu.
func (s *soak) restarted(since time.Time, replica string) bool {
	return slices.ContainsFunc(s.report.restarts, func(r soakRestart) bool {
		return (replica == "" || replica == r.replica) && (r.to.IsZero() || r.to.Add(soakGrace).After(since))
	})
}

func (s *soak) exchange(ctx context.Context, body string, stream bool) (replica string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	replica = resp.Header.Get("x-kvgate-replica")
	answer, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return replica, err
	case resp.StatusCode != http.StatusOK:
		return replica, fmt.Errorf("status %d: %.200s", resp.StatusCode, answer)
	case stream && !bytes.HasSuffix(answer, []byte("data: [DONE]\n\n")):
		return replica, errors.New("the stream has no [DONE]")
	case !stream && !bytes.Contains(answer, []byte(`"choices"`)):
		return replica, fmt.Errorf("no answer: %.200s", answer)
	}
	return replica, nil
}

// disturb restarts replicas, takes one out of the list and back, and has the
// settings read again, in turn.
func (s *soak) disturb(ctx context.Context) {
	rnd := rand.New(rand.NewPCG(s.o.Seed+2, 0))
	gap := min(max(s.o.Duration/60, 500*time.Millisecond), 5*time.Second)
	for i := 0; rest(ctx, gap); i++ {
		switch i % 3 {
		case 0:
			s.restart(ctx, rnd.IntN(s.o.Replicas))
		case 1:
			err := s.writeEndpoints(s.o.Replicas - 1)
			rest(ctx, gap)
			s.say("endpoint removed and added", errors.Join(err, s.writeEndpoints(s.o.Replicas)))
			s.count(&s.report.Changes)
		case 2:
			s.say("reload", s.gate.Process.Signal(syscall.SIGHUP))
			s.count(&s.report.Reloads)
		}
	}
	if err := s.writeEndpoints(s.o.Replicas); err != nil {
		s.say("endpoints", err)
	}
}

func (s *soak) count(n *int64) {
	s.mu.Lock()
	*n++
	s.mu.Unlock()
}

// restart kills a replica and starts it again on its address.
func (s *soak) restart(ctx context.Context, i int) {
	s.mu.Lock()
	n := len(s.report.restarts)
	s.report.restarts = append(s.report.restarts, soakRestart{replica: fmt.Sprintf("r%d", i), from: time.Now()})
	s.mu.Unlock()
	addr := s.servers[i].Addr()
	s.servers[i].Close()
	rest(ctx, 300*time.Millisecond)
	var err error
	for range 50 {
		var r *fakevllm.Server
		if r, err = fakevllm.Start(soakReplica(addr)); err == nil {
			s.servers[i] = r
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	s.mu.Lock()
	s.report.restarts[n].to = time.Now()
	s.report.Restarts++
	s.mu.Unlock()
	s.say(fmt.Sprintf("replica r%d killed and started", i), err)
}

func (s *soak) say(what string, err error) {
	if err != nil {
		what += ": " + err.Error()
	}
	_, _ = fmt.Fprintln(s.o.Progress, time.Now().Format(time.TimeOnly), what)
}

// quiet waits until nothing runs, and until all is as before when that is known,
// for at most soakQuiet, and returns what there is then.
func (s *soak) quiet(ctx context.Context, before *SoakState) (SoakState, error) {
	s.client.CloseIdleConnections()
	end := time.Now().Add(soakQuiet)
	if before == nil {
		rest(ctx, soakQuiet/2) // pooled connections end
	}
	for {
		now, err := s.state()
		if err != nil {
			return now, fmt.Errorf("soak: kvgate's metrics: %w", err)
		}
		settled := true
		for _, row := range soakRows {
			settled = settled && before != nil && *row.of(&now) <= row.after(*row.of(before))
		}
		if settled || time.Now().After(end) || !rest(ctx, 500*time.Millisecond) {
			return now, nil
		}
	}
}

// state reads kvgate's metrics.
func (s *soak) state() (SoakState, error) {
	var st SoakState
	resp, err := s.client.Get(s.admin + "/metrics")
	if err != nil {
		return st, err
	}
	defer func() { _ = resp.Body.Close() }()
	sum := map[string]*float64{
		"process_resident_memory_bytes": &st.RSS, "go_goroutines": &st.Goroutines, "process_open_fds": &st.Files,
		"kvgate_http_requests_in_flight": &st.InFlight, "kvgate_replica_in_flight": &st.Replicas, "kvgate_conns_open": &st.Conns,
		"kvgate_index_blocks": &st.IndexBlocks, "kvgate_index_bytes": &st.IndexBytes,
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if i := strings.IndexByte(name, '{'); i >= 0 {
			value = lines.Text()[strings.LastIndexByte(lines.Text(), ' ')+1:]
			name = name[:i]
		}
		if to := sum[name]; to != nil {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return st, fmt.Errorf("%s: %w", name, err)
			}
			*to += v
		}
	}
	return st, lines.Err()
}

// rest waits; false when the context ended before.
func rest(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
