package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"kvgate/bench/fakevllm"
)

func newBenchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Simulated replicas and measurements",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newFakeVLLMCommand(), newRoutingCommand(), newSocketsCommand(), newProxyCommand(), newSoakCommand())
	return cmd
}

func newFakeVLLMCommand() *cobra.Command {
	o := fakevllm.Options{Engine: fakevllm.DefaultModel()}
	var faults string
	var replicas int
	cmd := &cobra.Command{
		Use:   "fakevllm",
		Short: "Serve simulated vLLM replicas",
		Long: "fakevllm is a double of vLLM: continuous batching, a paged KV cache with prefix\n" +
			"caching, the API, the metrics, and faults on demand (POST /fake/faults). With\n" +
			"--replicas N it serves on N ports from --listen on.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if faults != "" {
				if err := json.Unmarshal([]byte(faults), &o.Faults); err != nil {
					return usageError{fmt.Errorf("--faults: %w", err)}
				}
			}
			addrs, err := portsFrom(o.Listen, replicas)
			if err != nil {
				return usageError{err}
			}
			options := make([]fakevllm.Options, len(addrs))
			for i, addr := range addrs {
				options[i] = o
				options[i].Listen = addr
				kv := &options[i].KVEvents
				if kv.Endpoint, err = portPlus(kv.Endpoint, i); err != nil {
					return usageError{fmt.Errorf("--kv-events: %w", err)}
				}
				if kv.Replay, err = portPlus(kv.Replay, i); err != nil {
					return usageError{fmt.Errorf("--kv-replay: %w", err)}
				}
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			var (
				group sync.WaitGroup
				mu    sync.Mutex
				first error
			)
			for _, opt := range options {
				group.Go(func() {
					err := fakevllm.Run(ctx, opt, func(s *fakevllm.Server) {
						mu.Lock()
						defer mu.Unlock()
						_, _ = fmt.Fprintln(cmd.OutOrStdout(), s.URL())
					})
					if err != nil {
						mu.Lock()
						defer mu.Unlock()
						if first == nil {
							first = err
						}
						stop()
					}
				})
			}
			group.Wait()
			return first
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Listen, "listen", "127.0.0.1:8100", "address of the first replica")
	f.IntVar(&replicas, "replicas", 1, "replicas, on consecutive ports")
	f.StringSliceVar(&o.Models, "model", []string{"fake"}, "served model names, the first the base model")
	f.IntVar(&o.Engine.Blocks, "blocks", o.Engine.Blocks, "KV blocks")
	f.IntVar(&o.Engine.BlockTokens, "block-size", o.Engine.BlockTokens, "tokens per KV block")
	f.Float64Var(&o.Engine.Prefill, "prefill", o.Engine.Prefill, "seconds per uncached prompt token")
	f.IntVar(&o.Engine.MaxSeqs, "max-num-seqs", o.Engine.MaxSeqs, "sequences in a batch")
	f.Float64Var(&o.Speed, "speed", 1, "time compression")
	f.IntVar(&o.OutputTokens, "output-tokens", 64, "tokens of an answer whose request does not say")
	f.BoolVar(&o.Instant, "instant", false, "answer at once, without an engine: for measuring proxies")
	f.BoolVar(&o.NoUsageDetail, "no-usage-detail", false, "usage without cached_tokens, as vLLM without --enable-prompt-tokens-details")
	f.StringVar(&o.APIKey, "api-key", "", "bearer token that clients must send")
	f.StringVar(&o.KVEvents.Endpoint, "kv-events", "", "publish KV events: tcp://*:PORT binds, tcp://HOST:PORT connects; one port up per replica where it binds")
	f.StringVar(&o.KVEvents.Replay, "kv-replay", "", "serve past KV events on tcp://*:PORT, one port up per replica")
	f.StringVar(&o.KVEvents.Topic, "kv-topic", "", "topic of KV events (default kv@HOST:PORT@MODEL)")
	f.BoolVar(&o.KVEvents.Positional, "kv-positional", false, "KV events as arrays, as older engines send them")
	f.StringVar(&faults, "faults", "", "faults from the start, as JSON (see POST /fake/faults)")
	return cmd
}

// portPlus returns tcp://*:port with i added to a port that is not 0; any other endpoint as it is.
func portPlus(endpoint string, i int) (string, error) {
	host, port, ok := strings.Cut(endpoint, "*:")
	if !ok || i == 0 || port == "0" {
		return endpoint, nil
	}
	first, err := strconv.ParseUint(port, 10, 16)
	if err != nil || first+uint64(i) > 65535 {
		return "", fmt.Errorf("%q: no port for replica %d", endpoint, i)
	}
	return host + "*:" + strconv.FormatUint(first+uint64(i), 10), nil
}

// portsFrom returns n addresses with consecutive ports; port 0 stays 0.
func portsFrom(listen string, n int) ([]string, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	first, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("--listen: port %q: %w", port, err)
	}
	if n < 1 || first != 0 && first+uint64(n)-1 > 65535 {
		return nil, fmt.Errorf("--replicas %d: the ports from %d on do not suffice", n, first)
	}
	out := make([]string, n)
	for i := range out {
		p := first
		if first != 0 {
			p += uint64(i)
		}
		out[i] = net.JoinHostPort(host, strconv.FormatUint(p, 10))
	}
	return out, nil
}
