package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"kvgate/bench"
	"kvgate/bench/fakevllm"
	"kvgate/configs"
)

type socketOptions struct {
	bench.Setting
	window  time.Duration
	faster  float64
	compare []string
	output  string
}

func newSocketsCommand() *cobra.Command {
	o := socketOptions{Setting: bench.DefaultSetting()}
	cmd := &cobra.Command{
		Use:   "sockets",
		Short: "Replay a trace in real time through kvgate and simulated replicas, beside the lab",
		Long: "sockets sends the beginning of a trace over HTTP, each request when it is due, to\n" +
			"kvgate in front of simulated replicas, once per policy, and has the routing lab\n" +
			"replay the same requests in virtual time. It fails when a request does, or when two\n" +
			"policies stand in another order than in the lab. Times are those of the trace.",
		Example: "  kvgate bench sockets --rate 0.67 --window 10m --faster 4",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return runSockets(ctx, o, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	labFlags(f, &o.Setting)
	f.DurationVar(&o.window, "window", 10*time.Minute, "how much of the trace is replayed")
	f.Float64Var(&o.faster, "faster", 4, "seconds of the trace per second")
	f.StringSliceVar(&o.compare, "compare", []string{"llm-d-default", "default-inline", "expected-cost"}, "policies to run; the lab's oracle cannot")
	outputFlag(cmd, &o.output)
	return cmd
}

func runSockets(ctx context.Context, o socketOptions, stdout, stderr io.Writer) error {
	l, err := bench.NewLab(o.Setting)
	if err != nil {
		return usageError{err}
	}
	l.Cut(o.window)
	var rows []*bench.TraceReport
	for _, name := range o.compare {
		policy, err := bench.NamedPolicy(name, o.CacheTokens)
		if err != nil {
			return err
		}
		if policy.Config == nil {
			return usageError{fmt.Errorf("--compare %s: it exists in the lab only", name)}
		}
		row, err := replaySockets(ctx, l, o, policy, stderr)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		lab, err := l.Run(name)
		if err != nil {
			return err
		}
		virtual := lab.Row()
		row.LabTTFTMean, row.LabTTFTP99, row.LabHit = virtual.TTFTMean, virtual.TTFTP99, virtual.Hit
		rows = append(rows, row)
	}
	if o.output == "json" {
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		if err := enc.Encode(rows); err != nil {
			return err
		}
	} else {
		w := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
		_, _ = fmt.Fprintf(w, "policy\trequests\thit\tTTFT mean\tp50\tp99\tlab: hit\tmean\tp99\tlate p99\t\n")
		for _, r := range rows {
			_, _ = fmt.Fprintf(w, "%s\t%d\t%.3f\t%.3f s\t%.3f\t%.2f\t%.3f\t%.3f s\t%.2f\t%.0f ms\t\n",
				r.Policy, r.Requests, r.Hit, r.TTFTMean, r.TTFTP50, r.TTFTP99, r.LabHit, r.LabTTFTMean, r.LabTTFTP99, 1000*r.LateP99)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	return bench.SameOrder(rows, o.faster)
}

// replaySockets runs one policy: fresh replicas, a gateway, the trace.
func replaySockets(ctx context.Context, l *bench.Lab, o socketOptions, policy bench.Policy, stderr io.Writer) (*bench.TraceReport, error) {
	engine := l.Engine
	engine.Blocks = o.CacheTokens / engine.BlockTokens
	s := configs.DefaultSettings()
	s.Listen, s.AdminListen, s.Log.Access = "127.0.0.1:0", "", false
	s.Scrape.Interval = time.Duration(float64(o.Scrape) / o.faster)
	for i := range o.Replicas {
		r, err := fakevllm.Start(fakevllm.Options{Models: []string{demoModel}, Engine: engine, Speed: o.faster})
		if err != nil {
			return nil, err
		}
		defer r.Close()
		replica, err := configs.Replica{Name: fmt.Sprintf("replica-%d", i), URL: r.URL()}.Normalize()
		if err != nil {
			return nil, err
		}
		s.Replicas = append(s.Replicas, replica)
	}
	if policy.Text != "" {
		folder, err := os.MkdirTemp("", "kvgate")
		if err != nil {
			return nil, err
		}
		defer func() { _ = os.RemoveAll(folder) }()
		s.Scheduling = filepath.Join(folder, policy.Name+".yaml")
		if err := os.WriteFile(s.Scheduling, []byte(policy.Text), 0o600); err != nil {
			return nil, err
		}
	} else if policy.Name != "default-inline" {
		s.Scheduling = policy.Name // a file
	}
	g, err := newGateway(func() (*configs.Loaded, error) { return &configs.Loaded{Settings: s}, nil },
		zap.NewNop(), zap.NewAtomicLevelAt(zap.ErrorLevel))
	if err != nil {
		return nil, err
	}
	g.start(ctx)
	defer func() {
		cut, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = g.stop(cut)
	}()
	wait, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := g.scraper.WaitFirst(wait); err != nil {
		return nil, fmt.Errorf("wait for the replicas: %w", err)
	}
	progress, done := progressLine(stderr, policy.Name)
	defer done()
	row, err := l.Replay(ctx, policy.Name, bench.TraceReplayOptions{Target: g.dataURL(), Model: demoModel, Faster: o.faster, Progress: progress})
	if err == nil && row.Errors > 0 {
		err = errors.New(row.FirstError)
	}
	return row, err
}
