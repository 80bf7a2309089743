package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"kvgate/bench"
	"kvgate/bench/fakevllm"
	"kvgate/configs"
)

const demoModel = "demo-model"

type demoOptions struct {
	once        bool
	output      string
	listen      string
	adminListen string
	replicas    int
	clusters    int
	concurrency int
	count       int
}

func newDemoCommand() *cobra.Command {
	var o demoOptions
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show the gateway at work on simulated replicas",
		Long: "demo replays real multi-turn conversations twice: round robin straight to fresh\n" +
			"simulated vLLM replicas, then through kvgate in front of fresh ones, and compares.\n" +
			"Then it stays up for curl, unless --once.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.clusters < 0 || o.clusters > o.replicas {
				return fmt.Errorf("--clusters %d: use a number from 0 to that of --replicas, %d", o.clusters, o.replicas)
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return demo(ctx, o, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.once, "once", false, "end after the table")
	f.StringVar(&o.listen, "listen", ":8080", "data listener of the gateway")
	f.StringVar(&o.adminListen, "admin-listen", "127.0.0.1:9090", "admin listener of the gateway")
	f.IntVar(&o.replicas, "replicas", 4, "simulated replicas")
	f.IntVar(&o.clusters, "clusters", 0, "clusters over which the replicas are spread, each with a gateway of its own below this one (0: none)")
	f.IntVar(&o.concurrency, "concurrency", 12, "conversations at once")
	f.IntVar(&o.count, "conversations", 0, "conversations to replay (0: all)")
	outputFlag(cmd, &o.output)
	return cmd
}

// demoEngine is a small GPU: 3,300 prompt tokens per second and room for 64k tokens.
func demoEngine() fakevllm.Model {
	m := fakevllm.DefaultModel()
	m.Prefill, m.Floor, m.Blocks = 300e-6, 4e-3, 4000
	return m
}

func startReplicas(n int) (servers []*fakevllm.Server, stop func(), err error) {
	stop = func() {
		for _, s := range servers {
			s.Close()
		}
	}
	for range n {
		s, err := fakevllm.Start(fakevllm.Options{Models: []string{demoModel}, Engine: demoEngine(), OutputTokens: 16})
		if err != nil {
			stop()
			return nil, nil, err
		}
		servers = append(servers, s)
	}
	return servers, stop, nil
}

// demoReport is what `kvgate demo --output json` prints.
type demoReport struct {
	Replicas   int                 `json:"replicas"`
	Clusters   int                 `json:"clusters,omitempty"`
	RoundRobin *bench.ReplayReport `json:"round_robin"`
	KVGate     *bench.ReplayReport `json:"kvgate"`
}

func demo(ctx context.Context, o demoOptions, stdout, stderr io.Writer) error {
	conversations, err := bench.Conversations()
	if err != nil {
		return err
	}
	if o.count > 0 && o.count < len(conversations) {
		conversations = conversations[:o.count]
	}
	replay := func(name string, targets ...string) (*bench.ReplayReport, error) {
		progress, done := progressLine(stderr, name)
		defer done()
		r, err := bench.Replay(ctx, bench.ReplayOptions{
			Targets: targets, Model: demoModel, Conversations: conversations,
			Concurrency: o.concurrency, OutputTokens: 16, Progress: progress,
		})
		if err == nil && r.Errors > 0 {
			err = fmt.Errorf("%s: %d of %d requests failed, the first with: %s", name, r.Errors, r.Requests, r.FirstError)
		}
		return r, err
	}
	report := demoReport{Replicas: o.replicas, Clusters: o.clusters}

	servers, stop, err := startReplicas(o.replicas)
	if err != nil {
		return err
	}
	var urls []string
	for _, s := range servers {
		urls = append(urls, s.URL())
	}
	report.RoundRobin, err = replay("round robin", urls...)
	stop()
	if err != nil {
		return err
	}

	servers, stop, err = startReplicas(o.replicas)
	if err != nil {
		return err
	}
	defer stop()
	g, stop, err := demoGateways(ctx, o, servers, stderr)
	if err != nil {
		return err
	}
	defer stop()
	if report.KVGate, err = replay("kvgate", g.dataURL()); err != nil {
		return err
	}
	if o.output == "json" {
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		if err := enc.Encode(report); err != nil {
			return err
		}
	} else {
		report.print(stdout)
	}
	if o.once {
		return nil
	}
	_, _ = fmt.Fprintf(stdout, "\nThe gateway stays up until you press Ctrl-C. Try:\n\n"+
		"  curl %s/v1/chat/completions -H 'Content-Type: application/json' -d '{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'\n"+
		"  curl %s/debug/fleet\n", g.dataURL(), demoModel, adminURL(g))
	select {
	case <-ctx.Done():
		return nil
	case err := <-g.failed:
		return err
	}
}

func adminURL(g *gateway) string {
	if g.admin == nil {
		return ""
	}
	return "http://" + g.admin.Addr().String()
}

// demoGateways starts the gateway that the demo talks to, and those of its clusters if there are any.
func demoGateways(ctx context.Context, o demoOptions, servers []*fakevllm.Server, stderr io.Writer) (top *gateway, stop func(), err error) {
	var all []*gateway
	dir := ""
	stop = func() {
		cut, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		for _, g := range slices.Backward(all) {
			_ = g.stop(cut)
		}
		if dir != "" {
			_ = os.RemoveAll(dir)
		}
	}
	defer func() {
		if err != nil {
			stop()
		}
	}()
	start := func(change func(s *configs.Settings)) (*gateway, error) {
		g, err := demoGateway(ctx, stderr, change)
		if g != nil {
			all = append(all, g)
		}
		return g, err
	}
	if o.clusters == 0 {
		top, err = start(func(s *configs.Settings) {
			s.Listen, s.AdminListen, s.Replicas = o.listen, o.adminListen, demoReplicas(servers)
		})
		return top, stop, err
	}
	clusters := "endpoints:\n"
	for i := range o.clusters {
		from, to := i*len(servers)/o.clusters, (i+1)*len(servers)/o.clusters
		g, err := start(func(s *configs.Settings) {
			s.Listen, s.AdminListen, s.Replicas, s.Admin.LLMDMetrics = "127.0.0.1:0", "127.0.0.1:0", demoReplicas(servers[from:to]), true
		})
		if err != nil {
			return nil, nil, err
		}
		clusters += fmt.Sprintf("- {name: cluster-%d, address: 127.0.0.1, port: %q, labels: {metricsPort: %q}}\n", i, portOf(g.data), portOf(g.admin))
	}
	if dir, err = os.MkdirTemp("", "kvgate-demo-"); err != nil {
		return nil, nil, err
	}
	list, scheduling := filepath.Join(dir, "clusters.yaml"), filepath.Join(dir, "scheduling.yaml")
	for file, text := range map[string]string{list: clusters, scheduling: fmt.Sprintf(demoClusters, list)} {
		if err = os.WriteFile(file, []byte(text), 0o600); err != nil {
			return nil, nil, err
		}
	}
	top, err = start(func(s *configs.Settings) {
		s.Listen, s.AdminListen, s.Scheduling = o.listen, o.adminListen, scheduling
	})
	return top, stop, err
}

// demoClusters is the configuration of a gateway over clusters; their file is to be filled in.
const demoClusters = `apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - {type: multicluster-file-discovery, parameters: {path: %q}}
  - {type: multicluster-metrics-data-source, parameters: {scheme: http}}
  - {type: multicluster-metrics-extractor}
  - {type: multicluster-queue-scorer}
  - {type: multicluster-kv-cache-utilization-scorer}
  - {type: multicluster-prefix-cache-scorer}
schedulingProfiles:
  - name: default
    plugins:
      - {pluginRef: multicluster-queue-scorer, weight: 2}
      - {pluginRef: multicluster-kv-cache-utilization-scorer, weight: 2}
      - {pluginRef: multicluster-prefix-cache-scorer, weight: 5}
dataLayer:
  sources:
    - pluginRef: multicluster-metrics-data-source
      extractors: [{pluginRef: multicluster-metrics-extractor}]
`

func portOf(ln net.Listener) string { return fmt.Sprint(ln.Addr().(*net.TCPAddr).Port) }

func demoReplicas(servers []*fakevllm.Server) []configs.Replica {
	replicas := make([]configs.Replica, len(servers))
	for i, r := range servers {
		replicas[i] = configs.Replica{Name: fmt.Sprintf("replica-%d", i), Namespace: "default", URL: r.URL()}
	}
	return replicas
}

// demoGateway starts a gateway and waits for its replicas. It may return a gateway that is to be stopped beside an error.
func demoGateway(ctx context.Context, stderr io.Writer, change func(s *configs.Settings)) (*gateway, error) {
	load := func() (*configs.Loaded, error) {
		s := configs.DefaultSettings()
		s.Log.Access = false
		change(&s)
		return &configs.Loaded{Settings: s}, nil
	}
	level := zap.NewAtomicLevelAt(zap.WarnLevel)
	log := zap.NewNop()
	if file, ok := stderr.(*os.File); ok {
		var err error
		if log, level, err = newLogger(configs.Log{Level: "warn", Format: "auto"}, file, os.Getenv); err != nil {
			return nil, err
		}
	}
	g, err := newGateway(load, log, level)
	if err != nil {
		return nil, err
	}
	g.start(ctx)
	wait, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := g.scraper.WaitFirst(wait); err != nil {
		return g, fmt.Errorf("wait for the replicas: %w", err)
	}
	return g, nil
}

// progressLine shows the progress on a terminal, and nothing elsewhere.
func progressLine(w io.Writer, name string) (progress func(done, all int), end func()) {
	file, ok := w.(*os.File)
	if !ok || !isTerminal(file) {
		return nil, func() {}
	}
	const width = 30
	progress = func(done, all int) {
		filled := width * done / max(all, 1)
		_, _ = fmt.Fprintf(w, "\r%-12s [%s%s] %d/%d", name, strings.Repeat("#", filled), strings.Repeat(".", width-filled), done, all)
	}
	return progress, func() { _, _ = fmt.Fprint(w, "\r\x1b[K") }
}

func (r demoReport) print(w io.Writer) {
	in := ""
	if r.Clusters > 0 {
		in = fmt.Sprintf(" in %d clusters", r.Clusters)
	}
	_, _ = fmt.Fprintf(w, "%d requests of real conversations, %d simulated replicas%s, empty before each run\n\n", r.KVGate.Requests, r.Replicas, in)
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(tw, "\trequests\thit rate\tTTFT p50\tTTFT p99\tcomputed prompt tokens\t")
	for _, row := range []struct {
		name string
		r    *bench.ReplayReport
	}{{"round robin", r.RoundRobin}, {"kvgate", r.KVGate}} {
		_, _ = fmt.Fprintf(tw, "%s\t%d\t%.1f %%\t%.0f ms\t%.0f ms\t%d\t\n", row.name, row.r.Requests, 100*row.r.HitRate,
			1000*row.r.TTFTP50, 1000*row.r.TTFTP99, row.r.PromptTokens-row.r.CachedTokens)
	}
	_ = tw.Flush()
}
