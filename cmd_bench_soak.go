package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"kvgate/bench"
)

func newSoakCommand() *cobra.Command {
	o := bench.SoakOptions{Duration: 10 * time.Minute, Clients: 32, Replicas: 4, Seed: 1}
	cmd := &cobra.Command{
		Use:   "soak",
		Short: "Look for leaks: load with aborts, restarts, endpoint changes and reloads",
		Long: "soak runs kvgate in front of simulated replicas. Clients ask and leave at random, replicas are\n" +
			"killed and restarted, endpoints go and come, settings are read again. It prints what kvgate\n" +
			"held before and after and exits with 1 on an error that no restart explains, or on a leak.",
		Example: "  kvgate bench soak --duration 1m",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.KVGate == "" {
				self, err := os.Executable()
				if err != nil {
					return err
				}
				o.KVGate = self
			}
			if o.Duration < time.Second || o.Clients < 1 || o.Replicas < 2 {
				return usageError{fmt.Errorf("--duration %s, --clients %d, --replicas %d: use at least 1s, 1 and 2", o.Duration, o.Clients, o.Replicas)}
			}
			o.Progress = cmd.ErrOrStderr()
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			report, err := bench.Soak(ctx, o)
			if err != nil {
				return err
			}
			report.Table(cmd.OutOrStdout())
			if report.Failed() {
				return errors.New("the soak found errors or leaks, see above")
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.KVGate, "kvgate", o.KVGate, "program under test (default this one)")
	f.DurationVar(&o.Duration, "duration", o.Duration, "load with faults; a tenth of it comes before as warm-up")
	f.IntVar(&o.Clients, "clients", o.Clients, "clients that ask at once")
	f.IntVar(&o.Replicas, "replicas", o.Replicas, "simulated replicas")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "seed of everything random")
	return cmd
}
