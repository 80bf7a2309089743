package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/proxy"
	"kvgate/routing"
)

func newExplainCommand() *cobra.Command {
	var file, path, admin, tokenFile, key, fleetFile, scheduling, output string
	var tokens bool
	cmd := &cobra.Command{
		Use:   "explain -f REQUEST.json",
		Short: "Show which replica a request would go to, and why",
		Long: "explain asks a running gateway (--admin), or decides over a saved fleet (--fleet:\n" +
			"what GET /debug/fleet printed; a replica may carry \"match\", the leading blocks of\n" +
			"this prompt that it holds). Nothing is dispatched.",
		Example: "  kvgate explain -f request.json\n" +
			"  curl -s localhost:9090/debug/fleet > fleet.json && kvgate explain -f request.json --fleet fleet.json --scheduling new.yaml",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			body, err := readInput(file, cmd.InOrStdin())
			if err != nil {
				return usageError{err}
			}
			var ex *routing.Explanation
			if fleetFile != "" {
				ex, err = explainSaved(body, path, fleetFile, scheduling, tokens)
			} else {
				if scheduling != "" {
					return usageError{errors.New("--scheduling goes with --fleet: a running gateway explains its own configuration")}
				}
				ex, err = explainLive(cmd.Context(), admin, tokenFile, path, key, body, tokens)
			}
			if err != nil {
				return err
			}
			if output == "json" {
				enc := json.NewEncoder(cmd.OutOrStdout())
				enc.SetIndent("", "  ")
				return enc.Encode(ex)
			}
			printExplanation(cmd.OutOrStdout(), ex)
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVarP(&file, "file", "f", "", "request body; - reads standard input")
	f.StringVar(&path, "path", "/v1/chat/completions", "the request's path")
	f.StringVar(&tokenFile, "admin-token-file", "", "file with the token that the admin listener asks for")
	f.BoolVar(&tokens, "tokens", false, "show the tokens of the prompt, block by block")
	f.StringVar(&key, "key", "", "name of the API key whose tenant asks, under isolation.mode")
	f.StringVar(&admin, "admin", "http://127.0.0.1:9090", "admin listener of the running gateway, or unix:/path")
	f.StringVar(&fleetFile, "fleet", "", "saved fleet (JSON of /debug/fleet) instead of a running gateway")
	f.StringVar(&scheduling, "scheduling", "", "EndpointPickerConfig to decide with; with --fleet")
	outputFlag(cmd, &output)
	return cmd
}

// explainSaved decides over a saved fleet with the code that serves.
func explainSaved(body []byte, path, fleetFile, scheduling string, tokens bool) (*routing.Explanation, error) {
	data, err := os.ReadFile(fleetFile)
	if err != nil {
		return nil, err
	}
	var saved routing.FleetSnapshot
	if err := json.Unmarshal(data, &saved); err != nil {
		return nil, fmt.Errorf("%s: %w", fleetFile, err)
	}
	fleet, err := saved.Build(time.Now, zap.NewNop())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", fleetFile, err)
	}
	cfg, err := loadScheduling(scheduling)
	if err != nil {
		return nil, err
	}
	router, err := routing.New(cfg, fleet, uint64(time.Now().UnixNano()))
	if err != nil {
		return nil, err
	}
	api, ok := proxy.RouteAPI(path)
	if !ok {
		return nil, fmt.Errorf("path %s is not one that kvgate serves", path)
	}
	if api, ok = router.Parser(api); !ok {
		return nil, fmt.Errorf("path %s: the configuration has no parser for it", path)
	}
	req := &routing.Request{}
	req.Reset()
	req.API, req.Body = api, body
	if err := req.Parse(); err != nil {
		return nil, err
	}
	for i, replica := range saved.Replicas {
		if replica.Match == nil || *replica.Match == 0 {
			continue
		}
		if e := fleet.Find(replica.Name); e != nil {
			if err := router.Seed(req, e, *replica.Match); err != nil {
				return nil, fmt.Errorf("%s: replicas[%d]: %w", fleetFile, i, err)
			}
		}
	}
	ex, err := router.Explain(req)
	if err != nil {
		return nil, err
	}
	if tokens {
		router.ExplainTokens(req, ex)
	}
	return ex, nil
}

// explainLive asks a running gateway.
func explainLive(ctx context.Context, admin, tokenFile, path, key string, body []byte, tokens bool) (*routing.Explanation, error) {
	client := &http.Client{Timeout: 10 * time.Second}
	base := strings.TrimSuffix(admin, "/")
	if socket, ok := strings.CutPrefix(admin, "unix:"); ok {
		base = "http://localhost"
		client.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}}
	}
	query := url.Values{"path": {path}, "key": {key}}
	if tokens {
		query.Set("tokens", "true")
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/debug/explain?"+query.Encode(), bytes.NewReader(body))
	if err != nil {
		return nil, usageError{err}
	}
	req.Header.Set("Content-Type", "application/json")
	if tokenFile != "" {
		token, err := configs.ReadSecret(tokenFile)
		if err != nil {
			return nil, err
		}
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask the gateway at %s (set --admin, or use --fleet): %w", admin, err)
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the gateway answered %s: %s", resp.Status, bytes.TrimSpace(data))
	}
	ex := &routing.Explanation{}
	if err := json.Unmarshal(data, ex); err != nil {
		return nil, fmt.Errorf("the gateway's answer: %w", err)
	}
	return ex, nil
}

func printExplanation(w io.Writer, ex *routing.Explanation) {
	_, _ = fmt.Fprintf(w, "model %s, profile %s, prompt of %d blocks of %d tokens\n\n", orDash(ex.Model), ex.Profile, ex.Total, ex.BlockTokens)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	head := "\tREPLICA\tMATCH"
	for _, r := range ex.Replicas {
		if len(r.Scores) > 0 {
			for _, s := range r.Scores {
				head += fmt.Sprintf("\t%s x %s", s.Plugin, number(s.Weight))
			}
			break
		}
	}
	_, _ = fmt.Fprintln(tw, head+"\tTOTAL")
	for _, r := range ex.Replicas {
		mark := ""
		if r.Name == ex.Winner {
			mark = "*"
		}
		if r.FilteredBy != "" {
			_, _ = fmt.Fprintf(tw, "%s\t%s\t%d/%d\tleft out: %s\n", mark, r.Name, r.Match, ex.Total, r.FilteredBy)
			continue
		}
		line := fmt.Sprintf("%s\t%s\t%d/%d", mark, r.Name, r.Match, ex.Total)
		for _, s := range r.Scores {
			raw := "-"
			if s.Raw != nil {
				raw = strconv.FormatFloat(*s.Raw, 'f', 3, 64)
			}
			line += fmt.Sprintf("\t%s = %.3f", raw, s.Weighted)
		}
		_, _ = fmt.Fprintf(tw, "%s\t%.3f\n", line, r.Total)
	}
	_ = tw.Flush()
	for _, r := range ex.Replicas {
		for _, s := range r.Scores {
			if len(s.Terms) == 0 {
				continue
			}
			parts := make([]string, len(s.Terms))
			for i, t := range s.Terms {
				parts[i] = t.Name + " " + number(t.Value)
			}
			_, _ = fmt.Fprintf(w, "  %s %s: %s\n", r.Name, s.Plugin, strings.Join(parts, ", "))
		}
	}
	_, _ = fmt.Fprintf(w, "\nwinner: %s (%s", orDash(ex.Winner), ex.Reason)
	if ex.Ties > 1 {
		_, _ = fmt.Fprintf(w, ", drawn among %d equals", ex.Ties)
	}
	_, _ = fmt.Fprintln(w, ")")
	for i, p := range ex.Prompts {
		printPrompt(w, i, p, ex)
	}
}

// printPrompt shows the tokens of a prompt, a line for each block.
func printPrompt(w io.Writer, i int, p routing.ExplainPrompt, ex *routing.Explanation) {
	_, _ = fmt.Fprintf(w, "\nprompt %d", i)
	if ex.Tokens != "" {
		_, _ = fmt.Fprintf(w, " (%s)", ex.Tokens)
	}
	_, _ = fmt.Fprintln(w)
	for k, b := range p.Blocks {
		note := ""
		if len(b.Tokens) < ex.BlockTokens {
			note = fmt.Sprintf(" (%d tokens)", len(b.Tokens))
		}
		_, _ = fmt.Fprintf(w, "  block %d%s:", k, note)
		for _, t := range b.Tokens {
			_, _ = fmt.Fprintf(w, " %d", t.ID)
			if t.Text != "" {
				_, _ = fmt.Fprintf(w, "=%q", t.Text)
			}
		}
		_, _ = fmt.Fprintln(w)
	}
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }
