package main

import (
	"bytes"
	_ "embed" // the gates
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kvgate/bench"
	"kvgate/configs"
)

//go:embed bench/testdata/gates.yaml
var shippedGates []byte

type routingOptions struct {
	bench.Setting
	profile string
	engine  string
	compare []string
	goodput float64
	gates   string
	jsonOut string
	plots   string
	timing  bool
	output  string
	hash    bool
	regret  int
	update  string
	only    []string
}

func newRoutingCommand() *cobra.Command {
	o := routingOptions{Setting: bench.DefaultSetting()}
	cmd := &cobra.Command{
		Use:   "routing",
		Short: "Replay a trace in virtual time against the routing code and compare policies",
		Long: "routing replays a trace against simulated engines in virtual time. The policies are\n" +
			"scheduling configurations run by the code that serves; the oracle alone lives here.\n" +
			"The same flags give the same bytes. See docs/routing-quality.md.",
		Example: "  kvgate bench routing --rate 0.67\n" +
			"  kvgate bench routing --trace synthetic --rate 0.66 --compare llm-d-default,expected-cost,oracle\n" +
			"  kvgate bench routing --profile my-scheduling.yaml --compare expected-cost\n" +
			"  kvgate bench routing --gate ci",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case o.output != "table" && o.output != "json" && o.output != "markdown":
				return usageError{fmt.Errorf("--output %q: use table, json or markdown", o.output)}
			case o.update != "":
				return updatePage(o.update, o.only, cmd.ErrOrStderr())
			case o.gates != "":
				return runGates(o, cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			return runRouting(o, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	labFlags(f, &o.Setting)
	f.IntVar(&o.Copies, "copies", o.Copies, "times the trace is laid over itself (0: a quarter of the replicas)")
	f.DurationVar(&o.Spread, "spread", o.Spread, "width of the trace's arrival bins, over which arrivals are spread (0: not)")
	f.BoolVar(&o.InstantLoad, "instant-load", false, "engines publish their queue at every arrival, as mocks do, and not once per step")
	f.IntVar(&o.Gateways, "gateways", o.Gateways, "independent gateways that share the traffic")
	f.Float64SliceVar(&o.Speeds, "speed", nil, "relative speeds of the replicas, repeated; slower ones have as much less cache")
	f.Int64Var(&o.IndexTokens, "index-capacity", 0, "cache size in tokens that the replicas report (0: the truth)")
	f.StringVar(&o.engine, "engine", "", "YAML or JSON file with the engine's cost model (default: Qwen3-32B on two H100)")
	f.StringVar(&o.profile, "profile", "", "a scheduling file, or a policy's name, to run first")
	f.StringSliceVar(&o.compare, "compare", bench.PolicyNames(), "policies to run")
	f.Float64Var(&o.goodput, "goodput", 0, "also find the highest rate at which this part of the requests meets the SLO")
	f.StringVar(&o.gates, "gate", "", "check claims instead: ci, hand, all, or a YAML file")
	f.StringVar(&o.jsonOut, "json", "", "also write the report to this file")
	f.StringVar(&o.plots, "plots", "", "write ttft.svg and load.svg: a folder, or a prefix of their names")
	f.BoolVar(&o.timing, "timing", false, "print the wall-clock time per pick to standard error")
	f.BoolVar(&o.hash, "hash-content", false, "hash the bytes of every block instead of taking derived hashes (same results, slower)")
	f.IntVar(&o.regret, "regret", 16, "compare every n-th choice with the truly best one (0: none)")
	f.StringVar(&o.output, "output", "table", "table, json or markdown")
	f.StringVar(&o.update, "update", "", "run the commands in the comments of this Markdown page and put their tables behind them")
	f.StringSliceVar(&o.only, "only", nil, "with --update: the names of the tables (default: all)")
	return cmd
}

// labFlags are the flags that every replay of a trace has.
func labFlags(f *pflag.FlagSet, o *bench.Setting) {
	f.StringVar(&o.Trace, "trace", o.Trace, "conversation, synthetic, shared-prefix, agents, one-agent, hot-burst, or a JSONL or CSV file")
	f.IntVar(&o.BlockTokens, "block-tokens", o.BlockTokens, "tokens that one hash id of the trace stands for")
	f.IntVar(&o.Replicas, "replicas", o.Replicas, "simulated replicas")
	f.IntVar(&o.CacheTokens, "cache-tokens", o.CacheTokens, "KV cache of one replica")
	f.Float64Var(&o.Rate, "rate", o.Rate, "multiplies the trace's arrival rate")
	f.DurationVar(&o.Scrape, "scrape", o.Scrape, "interval at which metrics are observed, in the trace's time")
	f.Float64Var(&o.Warmup, "warmup", o.Warmup, "part of the requests that is not measured")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "seed of every random choice")
}

func runRouting(o routingOptions, stdout, stderr io.Writer) error {
	l, err := bench.NewLab(o.Setting)
	if err != nil {
		return usageError{err}
	}
	if o.engine != "" {
		data, err := os.ReadFile(o.engine)
		if err != nil {
			return err
		}
		p, err := configs.ParseParams(o.engine, data)
		if err != nil {
			return err
		}
		if err := p.Decode(&l.Engine); err != nil {
			return err
		}
	}
	l.Regret, l.Load, l.Hash = o.regret, o.plots != "", o.hash
	if o.timing {
		start := time.Now()
		l.Stopwatch = func() time.Duration { return time.Since(start) }
	}
	policies := slices.Clone(o.compare)
	if o.profile != "" {
		policies = slices.Insert(policies, 0, o.profile)
	}
	report := l.Report()
	var results []*bench.LabResult
	for _, name := range policies {
		progress, done := progressLine(stderr, filepath.Base(name))
		if progress != nil {
			l.Progress = func(_ string, n, all int) { progress(n, all) }
		}
		r, err := l.Run(name)
		goodput := 0.0
		if err == nil && o.goodput > 0 {
			goodput, err = l.Goodput(name, o.goodput)
		}
		done()
		if err != nil {
			return err
		}
		if o.timing {
			_, _ = fmt.Fprintf(stderr, "%-18s %.2f us per pick\n", name, float64(r.Routed.Microseconds())/float64(report.Requests))
		}
		report.Add(r, goodput)
		results = append(results, r)
	}
	if o.jsonOut != "" {
		if err := writeFile(o.jsonOut, report.JSON); err != nil {
			return err
		}
	}
	if o.plots != "" {
		prefix := o.plots
		if info, err := os.Stat(prefix); err == nil && info.IsDir() {
			prefix += string(filepath.Separator)
		}
		err := errors.Join(
			writeFile(prefix+"ttft.svg", func(w io.Writer) error { return bench.PlotTTFT(w, results) }),
			writeFile(prefix+"load.svg", func(w io.Writer) error { return bench.PlotLoad(w, results) }))
		if err != nil {
			return err
		}
	}
	switch o.output {
	case "json":
		return report.JSON(stdout)
	case "markdown":
		report.Markdown(stdout)
	default:
		report.Table(stdout)
	}
	return nil
}

func writeFile(name string, write func(io.Writer) error) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

func runGates(o routingOptions, stdout, stderr io.Writer) error {
	file, data := "the shipped gates", shippedGates
	if o.gates != "ci" && o.gates != "hand" && o.gates != "all" {
		var err error
		if data, err = os.ReadFile(o.gates); err != nil {
			return err
		}
		file = o.gates
	}
	gates, err := bench.LoadGates(file, data)
	if err != nil {
		return err
	}
	if o.gates == "ci" || o.gates == "hand" {
		gates = slices.DeleteFunc(gates, func(g bench.Gate) bool { return g.Set != o.gates })
	}
	if len(gates) == 0 {
		return fmt.Errorf("%s: no gates", file)
	}
	var progress func(string)
	if f, ok := stderr.(*os.File); ok && isTerminal(f) {
		progress = func(what string) { _, _ = fmt.Fprintf(f, "\r\x1b[K%s", what) }
		defer func() { _, _ = fmt.Fprint(f, "\r\x1b[K") }()
	}
	results, err := bench.CheckGates(gates, progress)
	if err != nil {
		return err
	}
	if !bench.PrintGates(stdout, results, o.output == "markdown") {
		return errors.New("a gate failed")
	}
	return nil
}

// pageTable is a table of a page that the lab writes: a comment with its name and
// the command, the table, and a closing comment.
var pageTable = regexp.MustCompile(`(?s)(<!-- table ([a-z0-9-]+): kvgate bench routing ([^\n]*) -->\n).*?(<!-- end of table -->)`)

// updatePage runs the commands of a page's tables again and writes the page.
func updatePage(file string, only []string, stderr io.Writer) error {
	page, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var failed error
	done := 0
	next := pageTable.ReplaceAllFunc(page, func(block []byte) []byte {
		m := pageTable.FindSubmatch(block)
		name := string(m[2])
		if failed != nil || len(only) > 0 && !slices.Contains(only, name) {
			return block
		}
		done++
		var out bytes.Buffer
		cmd := newRoutingCommand()
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetArgs(append(strings.Fields(string(m[3])), "--output", "markdown"))
		cmd.SetOut(&out)
		cmd.SetErr(stderr)
		if err := cmd.Execute(); err != nil {
			failed = fmt.Errorf("%s: table %s: %w", file, name, err)
			return block
		}
		return slices.Concat(m[1], []byte("\n"), out.Bytes(), []byte("\n"), m[4])
	})
	switch {
	case failed != nil:
		return failed
	case done == 0:
		return fmt.Errorf("%s: no such table: write a comment <!-- table NAME: kvgate bench routing FLAGS --> and, behind it, <!-- end of table -->", file)
	}
	return os.WriteFile(file, next, 0o644) // #nosec G306 G703 -- a page of the documentation, named on the command line
}
