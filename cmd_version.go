package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// buildVersion is set by the linker (-X main.buildVersion=...).
var buildVersion string

func version() string {
	if buildVersion != "" {
		return buildVersion
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "dev"
}

func newVersionCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Version string `json:"version"`
				Commit  string `json:"commit"`
				Go      string `json:"go"`
				OS      string `json:"os"`
				Arch    string `json:"arch"`
			}{version(), "", runtime.Version(), runtime.GOOS, runtime.GOARCH}
			if info, ok := debug.ReadBuildInfo(); ok {
				for _, s := range info.Settings {
					if s.Key == "vcs.revision" {
						v.Commit = s.Value
					}
				}
			}
			if output == "json" {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(v)
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "kvgate %s %s %s/%s\n", v.Version, v.Go, v.OS, v.Arch)
			return err
		},
	}
	outputFlag(cmd, &output)
	return cmd
}

// outputFlag adds --output table,json.
func outputFlag(cmd *cobra.Command, output *string) {
	cmd.Flags().StringVar(output, "output", "table", "table or json")
	previous := cmd.PreRunE
	cmd.PreRunE = func(c *cobra.Command, args []string) error {
		if *output != "table" && *output != "json" {
			return usageError{fmt.Errorf("--output %q: use table or json", *output)}
		}
		if previous != nil {
			return previous(c, args)
		}
		return nil
	}
}
