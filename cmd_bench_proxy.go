package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"kvgate/bench"
)

func newProxyCommand() *cobra.Command {
	var (
		o       bench.ProxyOptions
		cells   string
		results string
		output  string
		list    bool
	)
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "Measure kvgate beside nginx, haproxy, Envoy and cache-aware routers",
		Long: "proxy starts simulated replicas, puts nginx, haproxy, Envoy, smg, vllm-router and kvgate\n" +
			"in front of them in turn, and measures throughput, added latency, processor time and\n" +
			"memory of each. What is not installed is left out; bench/install-peers.sh installs it.\n" +
			"See docs/benchmarks.md.",
		Example: "  kvgate bench proxy\n" +
			"  kvgate bench proxy --rounds 1 --duration 1s --cells plain-8k --systems envoy,kvgate\n" +
			"  kvgate bench proxy --kvgate ./kvgate --kvgate before=./kvgate.old --cells 'plain|open'\n" +
			"  kvgate bench proxy --cells plain-64k --systems kvgate --cpuprofile profiles",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if list {
				return listCells(cmd.OutOrStdout(), o.Tools)
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			o.Replica = self
			if len(o.KVGate) == 0 {
				o.KVGate = []string{self}
			}
			if cells != "" {
				if o.Cells, err = regexp.Compile(cells); err != nil {
					return usageError{fmt.Errorf("--cells: %w", err)}
				}
			}
			if err := o.Validate(); err != nil {
				return usageError{err}
			}
			o.Command = commandLine(os.Args[1:])
			o.Progress = cmd.ErrOrStderr()
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			report, err := bench.RunProxies(ctx, o)
			if err != nil {
				return err
			}
			if results != "" {
				if err := report.WriteFiles(results); err != nil {
					return err
				}
			}
			if output == "json" {
				err = report.JSON(cmd.OutOrStdout())
			} else {
				report.Table(cmd.OutOrStdout())
			}
			if err == nil && report.Failed() {
				err = errors.New("requests failed, see the report")
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.Systems, "systems", nil, "systems to measure beside direct (default: all that are installed)")
	f.StringArrayVar(&o.KVGate, "kvgate", nil, "kvgate binary as [NAME=]PATH, repeated to compare versions (default: this one)")
	f.StringVar(&cells, "cells", "", "regular expression of the cells to measure (default: all)")
	f.IntVar(&o.Rounds, "rounds", 9, "interleaved rounds")
	f.DurationVar(&o.Duration, "duration", 4*time.Second, "length of a window; open loops take two, and five at low rates")
	f.DurationVar(&o.Warmup, "warmup", time.Second, "load before a window")
	f.StringVar(&o.Tools, "tools", "", "folder that bench/install-peers.sh has filled")
	f.IntVar(&o.Upstreams, "upstreams", 4, "simulated replicas")
	f.StringVar(&results, "results", "", "write the report, its plots and its data into this folder")
	f.StringVar(&o.Profiles, "cpuprofile", "", "write a CPU profile of kvgate per cell into this folder, in the first round")
	f.StringVar(&o.KeepDir, "keep", "", "folder for the systems' configurations and logs (default: one that is removed)")
	f.BoolVar(&list, "list", false, "list the cells and what is installed, measure nothing")
	outputFlag(cmd, &output)
	return cmd
}

// commandLine returns a kvgate command as a shell reads it.
func commandLine(args []string) string {
	line := "kvgate"
	for _, a := range args {
		if strings.ContainsAny(a, " \t\n'\"\\|&;<>()$`*?[]{}~#") {
			a = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
		line += " " + a
	}
	return line
}

// listCells prints what can be measured.
func listCells(w io.Writer, tools string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(tw, "CELL\tBODY\tMIX\tCONNECTIONS\tRATE\tWHAT")
	for _, c := range bench.AllCells() {
		rate := "closed"
		if c.Rate > 0 {
			rate = fmt.Sprintf("%g/s", c.Rate)
		}
		_, _ = fmt.Fprintf(tw, "%s\t%d KB\t%s\t%d\t%s\t%s\n", c.Name, c.Bytes>>10, c.Mix, c.Conns, rate, c.What)
	}
	_, _ = fmt.Fprintln(tw)
	for _, line := range bench.FindPeers(tools) {
		_, _ = fmt.Fprintln(tw, line)
	}
	return tw.Flush()
}
