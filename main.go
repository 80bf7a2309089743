// kvgate is an inline, KV-cache-aware reverse proxy for vLLM replicas.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kvgate/configs"
)

// Exit statuses.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

// run executes one command line and returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRootCommand()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usage):
		printError(stderr, err)
		_, _ = fmt.Fprintln(stderr, "Run 'kvgate --help' for the commands.")
		return exitUsage
	}
	printError(stderr, err)
	return exitFailed
}

// printError prints one problem per line.
func printError(w io.Writer, err error) {
	var list configs.Problems
	if !errors.As(err, &list) {
		_, _ = fmt.Fprintln(w, "kvgate:", err)
		return
	}
	for _, p := range list {
		_, _ = fmt.Fprintln(w, "kvgate:", p)
	}
}

// usageError is a command line that cannot be understood.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvgate",
		Short: "KV-cache-aware reverse proxy for vLLM replicas",
		Long: "kvgate sits in front of vLLM replicas and sends every request to the replica\n" +
			"that already holds its prompt's KV cache.\n\n" +
			"  kvgate serve --replica http://127.0.0.1:8000 --replica http://127.0.0.1:8001\n\n" +
			"Without a command it serves.",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noArgs,
	}
	serve := newServeCommand()
	root.RunE = func(cmd *cobra.Command, args []string) error { return serve.RunE(cmd, args) }
	configs.BindFlags(root.Flags())
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(serve, newCheckCommand(), newExplainCommand(), newDemoCommand(), newBenchCommand(), newHealthcheckCommand(), newVersionCommand())
	root.InitDefaultCompletionCmd()
	return root
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return usageError{fmt.Errorf("%s: unknown command or argument %q", cmd.CommandPath(), args[0])}
}

// loadSettings reads the process settings for a command with the serve flags.
func loadSettings(flags *pflag.FlagSet) (*configs.Loaded, error) {
	file, err := flags.GetString("config")
	if err != nil {
		return nil, err
	}
	return configs.LoadSettings(flags, file, os.Environ())
}

func loadScheduling(file string) (*configs.Scheduling, error) {
	if file == "" {
		return configs.DefaultScheduling(), nil
	}
	return configs.LoadScheduling(file)
}
