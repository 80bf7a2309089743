package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"kvgate/configs"
)

// Each kind of wrong configuration ends a start with its file and line, and at a
// reload leaves the old one in force.
func TestWrongConfiguration(t *testing.T) {
	const head = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
	good := head + "- type: queue-scorer\n"
	scheduling := writeTemp(t, "scheduling.yaml", good)
	staleness := 2 * time.Second
	g := testGateway(t, func(s *configs.Settings) { s.Scheduling, s.Scrape.Staleness = scheduling, staleness }, testReplica(t))
	router, settings := g.router.Load(), g.settings
	f := func(name, text, settingsText string, parts ...string) {
		t.Helper()
		if err := os.WriteFile(scheduling, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args := []string{"serve", "--scheduling", scheduling}
		if settingsText != "" {
			args = append(args, "--config", writeTemp(t, "kvgate.yaml", settingsText))
		}
		status, _, errs := command(t, args...)
		for _, part := range parts {
			if status != 1 || !strings.Contains(errs, part) {
				t.Errorf("%s: got status %d, %s, want 1 and %q", name, status, errs, part)
			}
		}
		if settingsText != "" {
			return // a reload has the same loader
		}
		if err := g.reload(); err == nil || !strings.Contains(err.Error(), parts[0]) {
			t.Errorf("%s: reload: got %v, want %q", name, err, parts[0])
		}
		if g.router.Load() != router || g.settings != settings {
			t.Errorf("%s: the refused reload has changed something, want the old configuration", name)
		}
	}
	f("a scorer whose producer is missing", head+"- type: prefix-cache-scorer\n  parameters: {prefixMatchInfoProducerName: nobody}\n", "", "scheduling.yaml:4", "nobody")
	f("a typo in a parameter", head+"- type: queue-scorer\n- type: approx-prefix-cache-producer\n  parameters: {blockSizeTokns: 64}\n", "", "scheduling.yaml:6", "blockSizeTokens")
	f("a negative weight", good+"schedulingProfiles:\n- name: default\n  plugins: [{pluginRef: queue-scorer, weight: -1}]\n", "", "scheduling.yaml:7", "is negative")
	f("an interval that is longer than the staleness", good, "scrape:\n  interval: 60s\n  staleness: 2s\n", "kvgate.yaml:2", "longer than scrape.staleness")
	if err := os.WriteFile(scheduling, []byte(good), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := g.reload(); err != nil || g.router.Load() == router {
		t.Errorf("reload of what is right: got %v, want a new configuration", err)
	}
}
