package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kvgate/configs"
)

func newHealthcheckCommand() *cobra.Command {
	var url string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "healthcheck",
		Short: "Exit 0 when the gateway of this configuration is ready (for containers)",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if url == "" {
				loaded, err := loadSettings(cmd.Flags())
				if err != nil {
					return err
				}
				if url, err = readyURL(&loaded.Settings); err != nil {
					return err
				}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			if err != nil {
				return err
			}
			client := &http.Client{Transport: &http.Transport{
				DisableKeepAlives: true,
				TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // #nosec G402 -- the certificate is not for this machine's own address, and nothing secret is sent
			}}
			resp, err := client.Do(req)
			if err != nil {
				return err
			}
			defer func() { _ = resp.Body.Close() }()
			if resp.StatusCode != http.StatusOK {
				return fmt.Errorf("%s answered %s", url, resp.Status)
			}
			return nil
		},
	}
	configs.BindFlags(cmd.Flags())
	cmd.Flags().StringVar(&url, "url", "", "what to ask instead of /readyz of the data listener")
	cmd.Flags().DurationVar(&timeout, "timeout", 3*time.Second, "how long to wait")
	return cmd
}

func readyURL(s *configs.Settings) (string, error) {
	host, port, err := net.SplitHostPort(s.Listen)
	if err != nil {
		return "", fmt.Errorf("listen %s: %w", s.Listen, err)
	}
	if ip := net.ParseIP(strings.Trim(host, "[]")); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	scheme := "http://"
	if s.TLS.CertFile != "" {
		scheme = "https://"
	}
	return scheme + net.JoinHostPort(host, port) + "/readyz", nil
}
