package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// RunProxies measures every cell of every system, round after round. Its error
// says what is missing on this machine, or which program did not start; failed
// requests are in the report.
func RunProxies(ctx context.Context, o ProxyOptions) (*ProxyReport, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r := &proxyRun{ProxyOptions: o, client: &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}, port: 18100}
	if r.Progress == nil {
		r.Progress = io.Discard
	}
	r.dir = o.KeepDir
	if r.dir == "" {
		dir, err := os.MkdirTemp("", "kvgate-bench-")
		if err != nil {
			return nil, err
		}
		defer func() { _ = os.RemoveAll(dir) }()
		r.dir = dir
	}
	var err error
	if r.dir, err = filepath.Abs(r.dir); err != nil {
		return nil, err
	}
	// Some systems drop their rights: they must be able to enter.
	if err := errors.Join(os.MkdirAll(r.dir, 0o755), os.Chmod(r.dir, 0o755)); err != nil {
		return nil, err
	}
	defer r.stopAll()
	return r.run(ctx)
}

type proxyRun struct {
	ProxyOptions
	dir      string
	client   *http.Client
	port     int // next to try
	replicas []*process
	addrs    []netip.AddrPort // of the replicas
	systems  []*system
	prompts  []madePrompts
	nonce    uint64
	report   *ProxyReport
}

// system is one system under test; direct has no process.
type system struct {
	peer
	exe    string
	setup  peerSetup
	addrs  []netip.AddrPort
	proc   *process
	kvgate bool
}

type madePrompts struct {
	bytes  int
	mix    string
	stream bool
	set    *promptSet
}

func (r *proxyRun) run(ctx context.Context) (*ProxyReport, error) {
	cells := r.cells()
	kernel, cpu, ram := machineFacts()
	r.report = &ProxyReport{
		Started: time.Now(), Command: r.Command, Rounds: r.Rounds, Window: r.Duration.Seconds(), Replicas: r.Upstreams, Cells: cells,
		Versions: map[string]string{}, Machine: Machine{Cores: runtime.NumCPU(), CPU: cpu, Kernel: kernel, RAM: ram, Go: runtime.Version()},
	}
	if err := r.startReplicas(ctx); err != nil {
		return nil, err
	}
	if err := r.startSystems(ctx); err != nil {
		return nil, err
	}
	for round := range r.Rounds {
		order := append(slices.Clone(r.systems[round%len(r.systems):]), r.systems[:round%len(r.systems)]...)
		for i := range cells {
			c := &cells[i]
			if c.rounds > 0 && round >= c.rounds {
				continue
			}
			for _, s := range order {
				if s.decides && !s.kvgate && !c.decides || c.fresh && s.proc == nil {
					continue
				}
				if err := r.cell(ctx, round, c, s); err != nil {
					return nil, err
				}
			}
		}
	}
	for _, s := range r.systems {
		if s.proc == nil {
			continue
		}
		if info, err := os.Stat(s.proc.log); err == nil && info.Size() > maxLog {
			r.report.Notes = append(r.report.Notes, fmt.Sprintf("%s wrote %d KB of log, which takes its time too: see it with --keep DIR", s.name, info.Size()>>10))
		}
	}
	r.report.Took = time.Since(r.report.Started).Seconds()
	r.report.sortRows()
	name, _ := kvgateBinary(r.KVGate[0])
	r.report.finish(name)
	return r.report, nil
}

// maxLog is the size in bytes from which a log shows that something is wrong: no system is to write a line per request.
const maxLog = 16 << 10

// startReplicas starts the simulated replicas, each a process of its own. One
// thread each will do, and leaves more of the machine to the systems. They have no
// cache: were they to say so, kvgate would believe them and forget what it has recorded.
func (r *proxyRun) startReplicas(ctx context.Context) error {
	for i := range r.Upstreams {
		port, err := r.freePort()
		if err != nil {
			return err
		}
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(port))
		p, err := startProcess(fmt.Sprintf("replica-%d", i), r.dir, []string{"GOMAXPROCS=1"}, r.Replica, "bench", "fakevllm", "--instant", "--no-usage-detail", "--listen", addr.String())
		if err != nil {
			return err
		}
		r.replicas, r.addrs = append(r.replicas, p), append(r.addrs, addr)
		if err := p.waitFor(ctx, 10*time.Second, func() error { return r.probe(addr) }); err != nil {
			return err
		}
	}
	return nil
}

// freePort returns a port below those that the kernel gives to outgoing connections.
func (r *proxyRun) freePort() (int, error) {
	for ; r.port < 32768; r.port++ {
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", r.port))
		if err == nil {
			r.port++
			return r.port - 1, ln.Close()
		}
	}
	return 0, errors.New("no port is free below 32768")
}

// probe sends one request.
func (r *proxyRun) probe(addr netip.AddrPort) error {
	resp, err := r.client.Post("http://"+addr.String()+"/v1/chat/completions", "application/json",
		strings.NewReader(`{"model":"fake","max_tokens":1,"messages":[{"role":"user","content":"Are you there?"}]}`))
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err == nil && (resp.StatusCode != http.StatusOK || len(body) == 0) {
		err = fmt.Errorf("it answers %s: %.200s", resp.Status, body)
	}
	return err
}

// faults sets how the replicas answer.
func (r *proxyRun) faults(c *Cell) error {
	body := fmt.Sprintf(`{"chunks":%d,"chunk_interval":%q}`, c.Chunks, c.interval.String())
	for _, addr := range r.addrs {
		resp, err := r.client.Post("http://"+addr.String()+"/fake/faults", "application/json", strings.NewReader(body))
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("replica %v: /fake/faults: %s", addr, resp.Status)
		}
	}
	return nil
}

// startSystems finds and starts what was asked for. Of the peers, what is
// missing or does not start is left out and named in the report.
func (r *proxyRun) startSystems(ctx context.Context) error {
	var wanted []*system
	for _, p := range peers() {
		wanted = append(wanted, &system{peer: p})
	}
	for _, binary := range r.KVGate {
		name, path := kvgateBinary(binary)
		path, err := filepath.Abs(path)
		if err != nil {
			return err
		}
		wanted = append(wanted, &system{peer: kvgatePeer(name, path), kvgate: true})
	}
	r.systems = append(r.systems, &system{peer: peer{name: sysDirect}, addrs: r.addrs})
	settle := time.Duration(0)
	for _, s := range wanted {
		if len(r.Systems) > 0 && !slices.Contains(r.Systems, s.name) {
			continue
		}
		if err := r.startSystem(ctx, s); err != nil {
			if s.kvgate || ctx.Err() != nil {
				return err
			}
			r.report.Skipped = append(r.report.Skipped, err.Error())
			_, _ = fmt.Fprintln(r.Progress, "skipped:", err)
			continue
		}
		r.systems = append(r.systems, s)
		r.report.Versions[s.name] = s.versionOf(s.exe)
		settle = max(settle, s.settle)
	}
	for _, s := range r.systems {
		r.report.Systems = append(r.report.Systems, s.name)
	}
	if err := pause(ctx, settle); err != nil {
		return err
	}
	for _, s := range r.systems[1:] {
		s.proc.pause()
	}
	return nil
}

func (r *proxyRun) startSystem(ctx context.Context, s *system) (err error) {
	if s.exe == "" {
		if s.exe, err = s.find(r.Tools); err != nil {
			return err
		}
		s.setup = peerSetup{dir: filepath.Join(r.dir, s.name), profile: r.Profiles != ""}
		for _, a := range r.addrs {
			s.setup.replicas = append(s.setup.replicas, a.String())
		}
		if s.setup.port, err = r.freePort(); err != nil {
			return err
		}
		if s.setup.admin, err = r.freePort(); err != nil {
			return err
		}
		s.addrs = []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(s.setup.port))}
		if err := os.MkdirAll(s.setup.dir, 0o755); err != nil {
			return err
		}
	}
	args, err := s.arguments(s.setup)
	if err != nil {
		return err
	}
	if s.proc, err = startProcess(s.name, s.setup.dir, nil, s.exe, args...); err != nil {
		return err
	}
	err = s.proc.waitFor(ctx, 30*time.Second, func() error { return r.probe(s.addrs[0]) })
	if err != nil {
		s.proc.stop()
	}
	return err
}

// pause waits, or returns the context's error.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func (r *proxyRun) promptsFor(c *Cell) *promptSet {
	stream := c.Chunks > 0
	for _, m := range r.prompts {
		if m.bytes == c.Bytes && m.mix == c.Mix && m.stream == stream {
			return m.set
		}
	}
	const conversations = 32
	set := newPromptSet(c.Bytes, conversations, c.Mix, stream, 1)
	r.prompts = append(r.prompts, madePrompts{c.Bytes, c.Mix, stream, set})
	return set
}

// wakeUp is what a system that was stopped gets to see which connections it has lost.
const wakeUp = 300 * time.Millisecond

// cell measures one cell of one system. Failed requests are in the sample; an
// error means that there is no measuring on.
func (r *proxyRun) cell(ctx context.Context, round int, c *Cell, s *system) error {
	if c.fresh {
		s.proc.stop()
		if err := r.faults(&Cell{}); err != nil { // that the first request gets an answer that ends
			return err
		}
		if err := r.startSystem(ctx, s); err != nil {
			return err
		}
	}
	if err := r.faults(c); err != nil {
		return err
	}
	var pids []int
	var idle memory
	if s.proc != nil {
		s.proc.resume()
		defer s.proc.pause()
		err := pause(ctx, wakeUp)
		if err != nil {
			return err
		}
		if pids, err = s.proc.members(); err != nil {
			return err
		}
		if err := s.proc.alive(); err != nil {
			return err
		}
		if err := resetPeak(pids); err != nil {
			return err
		}
		if idle, err = readMemory(pids); err != nil {
			return err
		}
	}
	var (
		meter   = newCPUMeter(pids)
		used    time.Duration
		usedErr error
		held    memory
		profile chan error
	)
	spec := loadSpec{
		targets: s.addrs, prompts: r.promptsFor(c), conns: c.Conns, rate: c.Rate, warmup: r.Warmup, duration: r.Duration * time.Duration(max(1, c.windows)),
		stream: c.Chunks > 0, events: c.events(), hold: c.hold, nonce: r.nonce,
	}
	if c.hold {
		spec.warmup = max(spec.warmup, 3*c.interval) // until every stream has begun
	}
	spec.mark = func(end bool) {
		if !end {
			meter.start()
			if r.Profiles != "" && s.kvgate && round == 0 {
				profile = make(chan error, 1)
				go func() { profile <- r.profile(ctx, s, c, spec.duration) }()
			}
			return
		}
		used, usedErr = meter.stop()
		if c.hold && usedErr == nil {
			held, usedErr = readMemory(pids)
		}
	}
	result, err := runLoad(ctx, spec)
	if err != nil {
		return fmt.Errorf("%s, %s: %w", c.Name, s.name, err)
	}
	r.nonce = result.nonce
	if profile != nil {
		if err := <-profile; err != nil {
			return fmt.Errorf("profile of %s: %w", s.name, err)
		}
	}
	sample := sampleOf(c, result, used)
	sample.Round = round
	if s.proc != nil {
		after, err := s.proc.members()
		if err == nil {
			err = s.proc.alive()
		}
		if err == nil && !slices.Equal(pids, after) {
			err = fmt.Errorf("%s: its processes were %v and are %v", s.name, pids, after)
		}
		if err = errors.Join(err, usedErr); err != nil {
			return fmt.Errorf("%s, %s: %w", c.Name, s.name, err)
		}
		m, err := readMemory(pids)
		if err != nil {
			return err
		}
		sample.PeakRSS = float64(m.peak) / (1 << 20)
		if c.hold && result.open > 0 {
			sample.PerStream = float64(held.now-idle.now) / float64(result.open) / 1024
		}
		// The system sees that the load has gone before it is stopped.
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	r.report.add(c.Name, s.name, sample)
	note := ""
	if sample.Failures > 0 {
		note = fmt.Sprintf("  %d FAILED: %s", sample.Failures, sample.Failure)
	}
	_, _ = fmt.Fprintf(r.Progress, "round %d/%d  %-14s  %-11s  %8.0f/s  %7.0f us p50  %7.0f us p99  %.4f s CPU  %.1f MiB%s\n",
		round+1, r.Rounds, c.Name, s.name, sample.Throughput, sample.P50, sample.P99, sample.CPU, sample.PeakRSS, note)
	return nil
}

// profile takes a CPU profile of kvgate over the window.
func (r *proxyRun) profile(ctx context.Context, s *system, c *Cell, d time.Duration) error {
	url := fmt.Sprintf("http://127.0.0.1:%d/debug/pprof/profile?seconds=%d", s.setup.admin, max(1, int(d.Seconds())))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Timeout: d + 30*time.Second}).Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	if err := os.MkdirAll(r.Profiles, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.Profiles, s.name+"-"+c.Name+".pprof"), b.Bytes(), 0o644)
}

func (r *proxyRun) stopAll() {
	done := make(chan struct{})
	procs := slices.Clone(r.replicas)
	for _, s := range r.systems {
		if s.proc != nil {
			procs = append(procs, s.proc)
		}
	}
	for _, p := range procs {
		go func() {
			p.stop()
			done <- struct{}{}
		}()
	}
	for range procs {
		<-done
	}
}
