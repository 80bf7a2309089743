package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/proxy"
	"kvgate/routing"
	"kvgate/scrape"
)

// checkReport is what `kvgate check --output json` prints.
type checkReport struct {
	OK         bool           `json:"ok"`
	Problems   []string       `json:"problems"`
	Warnings   []string       `json:"warnings"`
	Settings   []configs.Row  `json:"settings"`
	Scheduling schedulingView `json:"scheduling"`
}

// schedulingView is a compiled scheduling configuration, defaults included.
type schedulingView struct {
	File    string       `json:"file"`
	Profile string       `json:"profile"`
	Plugins []pluginView `json:"plugins"`
}

type pluginView struct {
	Name   string   `json:"name"`
	Type   string   `json:"type"`
	Weight *float64 `json:"weight,omitempty"`
	Origin string   `json:"origin"`
}

func newCheckCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check the configuration and print it as it will be used",
		Long: "check reads everything that serve would read, prints the effective configuration\n" +
			"with the origin of every value, and exits 1 with all errors at once.",
		Aliases: []string{"validate"},
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := check(func() (*configs.Loaded, error) { return loadSettings(cmd.Flags()) })
			if output == "json" {
				enc := json.NewEncoder(cmd.OutOrStdout())
				enc.SetIndent("", "  ")
				if encErr := enc.Encode(report); encErr != nil {
					return encErr
				}
			} else {
				report.print(cmd.OutOrStdout())
			}
			return err
		},
	}
	configs.BindFlags(cmd.Flags())
	outputFlag(cmd, &output)
	return cmd
}

// check loads everything; the error holds all problems.
func check(load func() (*configs.Loaded, error)) (checkReport, error) {
	report := checkReport{Problems: []string{}, Warnings: []string{}}
	var problems configs.Problems
	loaded, err := load()
	problems.Add(err)
	if loaded != nil {
		report.Settings = loaded.Rows()
		problems.Add(report.scheduling(&loaded.Settings))
		problems.Add(proxy.CheckFiles(&loaded.Settings))
	}
	err = problems.Err()
	report.OK = err == nil
	for _, p := range problems {
		report.Problems = append(report.Problems, p.Error())
	}
	return report, err
}

func (c *checkReport) scheduling(s *configs.Settings) error {
	cfg, err := loadScheduling(s.Scheduling)
	if err != nil {
		return err
	}
	c.Scheduling.File = cfg.File
	fleet := routing.NewFleet(time.Now, time.Second, zap.NewNop())
	var problems configs.Problems
	plan, err := scrape.NewPlan(cfg, s.Scrape)
	problems.Add(err)
	router, err := routing.New(cfg, fleet, 1)
	problems.Add(err)
	if plan != nil {
		_, err := scrape.NewManager(scrape.Options{Fleet: fleet, Settings: s, Plan: plan, Log: zap.NewNop()}) // reads every source, starts nothing
		problems.Add(err)
	}
	if plan != nil {
		c.Warnings = append(c.Warnings, plan.Warnings...)
	}
	if router != nil {
		c.Warnings = append(c.Warnings, router.Config().Warnings...)
		c.Scheduling.describe(router)
	}
	if err := problems.Err(); err != nil {
		return err
	}
	return nil
}

func (v *schedulingView) describe(r *routing.Router) {
	cfg := r.Config()
	v.Profile = r.Profile()
	for _, p := range cfg.Plugins {
		row := pluginView{Name: p.Name, Type: p.Type, Origin: "default"}
		if p.Pos.Line > 0 {
			row.Origin = fmt.Sprintf("%s:%d", p.Pos.File, p.Pos.Line)
		}
		if w, ok := r.Weight(p.Name); ok {
			row.Weight = &w
		}
		v.Plugins = append(v.Plugins, row)
	}
}

func (c *checkReport) print(w io.Writer) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(tw, "SETTING\tVALUE\tORIGIN")
	for _, r := range c.Settings {
		_, _ = fmt.Fprintf(tw, "%s\t%s\t%s\n", r.Key, r.Value, r.Origin)
	}
	_ = tw.Flush()
	if len(c.Scheduling.Plugins) > 0 {
		_, _ = fmt.Fprintf(w, "\nScheduling: %s, profile %s\n", c.Scheduling.File, c.Scheduling.Profile)
		tw = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		_, _ = fmt.Fprintln(tw, "PLUGIN\tTYPE\tWEIGHT\tORIGIN")
		for _, p := range c.Scheduling.Plugins {
			weight := ""
			if p.Weight != nil {
				weight = fmt.Sprint(*p.Weight)
			}
			_, _ = fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", p.Name, p.Type, weight, p.Origin)
		}
		_ = tw.Flush()
	}
	for _, warning := range c.Warnings {
		_, _ = fmt.Fprintln(w, "warning:", warning)
	}
	if c.OK {
		_, _ = fmt.Fprintln(w, "\nThe configuration is valid.")
	}
}

// readInput reads a file, or standard input for "-".
func readInput(name string, stdin io.Reader) ([]byte, error) {
	if name == "" {
		return nil, errors.New("no input file: give -f FILE, or -f - for standard input")
	}
	if name == "-" {
		return io.ReadAll(stdin)
	}
	return os.ReadFile(name)
}
