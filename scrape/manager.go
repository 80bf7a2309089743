// Package scrape observes the replicas: it finds them (settings, files, the
// admin surface), reads their metrics and model lists, and stores what it learns
// in the endpoints of a routing.Fleet.
package scrape

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/routing"
)

// Errors of Add and Remove.
var (
	// ErrClash: another replica has the same identity or the same URL.
	ErrClash = errors.New("replica clash")
	// ErrUnknown: no replica has that identity.
	ErrUnknown = errors.New("unknown replica")
	// ErrDeclared: the replica was not added by Add, so Remove must not take it away.
	ErrDeclared = errors.New("replica is declared elsewhere")
)

// Options configures a Manager. All fields but Registry and Version are required.
type Options struct {
	Fleet    *routing.Fleet
	Settings *configs.Settings
	Plan     *Plan
	Log      *zap.Logger
	Registry *prometheus.Registry // where the kvgate_scrape_ and kvgate_discovery_ series go; nil: nowhere
	Version  string               // of kvgate, for the User-Agent of probes
}

// Manager owns the sources of endpoints and one worker per endpoint.
type Manager struct{}

// ModelCard describes one model as the replicas list it.
type ModelCard struct {
	ID          string
	Created     int64 // Unix seconds
	OwnedBy     string
	Parent      string // base model of a LoRA adapter, "" for a base model
	MaxModelLen int64  // tokens, 0 when unknown
}

// NewManager reads every source of endpoints once.
func NewManager(o Options) (*Manager, error) { return &Manager{}, nil }

// Start hands the endpoints to the fleet and begins to observe them, until ctx ends or Close is called.
func (m *Manager) Start(ctx context.Context) {}

// Close ends all observation and waits for it.
func (m *Manager) Close() {}

// Reload replaces settings and plan at once; on error everything stays as it was.
func (m *Manager) Reload(s *configs.Settings, p *Plan) error { return nil }

// WaitFirst waits until the first scrape of every endpoint that Start knew has ended, well or badly.
func (m *Manager) WaitFirst(ctx context.Context) error { return nil }

// ModelCards returns the models of all endpoints that are not draining, sorted by ID.
func (m *Manager) ModelCards() []ModelCard { return nil }

// Add adds a replica until it is removed or the process ends. Errors: ErrClash, or a bad URL or name.
func (m *Manager) Add(spec routing.EndpointSpec) error { return nil }

// Remove removes a replica that Add has added, by ID or display name. Errors: ErrUnknown, ErrDeclared.
func (m *Manager) Remove(id string) error { return nil }
