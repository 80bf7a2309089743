package scrape

import "kvgate/configs"

// Plan is what an EndpointPickerConfig says about observation and discovery.
type Plan struct {
	Warnings []string // what was accepted and ought to be changed, each with its place
}

// NewPlan reads the data sources, extractors and discovery plugins of a configuration.
func NewPlan(cfg *configs.Scheduling, s configs.Scrape) (*Plan, error) { return &Plan{}, nil }
