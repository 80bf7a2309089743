package proxy

import (
	"context"
	"errors"
	"net"

	"go.uber.org/zap"

	"kvgate/configs"
	"kvgate/routing"
)

// Options are what a Server is made of. Settings, Router, Fleet and Metrics are
// needed; the loggers may be nil, as may the hooks.
type Options struct {
	Settings *configs.Settings
	Router   *routing.Current
	Fleet    *routing.Fleet
	Metrics  *Metrics
	Log      *zap.Logger // process log
	Access   *zap.Logger // one line per request

	// ModelCards returns the cards of the models that the replicas list, for
	// /v1/models. When it is nil or returns none, the list is made of the fleet's
	// model names.
	ModelCards func() []ModelCard
	// Version is what /version answers.
	Version string
	// Ready returns nil when the process can serve. Draining is added by the Server.
	Ready func() error
}

// ModelCard is one model as /v1/models lists it.
type ModelCard struct {
	ID          string
	Created     int64 // Unix seconds
	OwnedBy     string
	Parent      string // base model of an adapter, "" for a base model
	MaxModelLen int64  // tokens, 0 when unknown
}

// Server is the data listener: it reads requests, has them routed, and streams
// the answers of the replicas back.
type Server struct {
	o      Options
	access *accessLog
}

// New returns a Server that serves nothing yet.
func New(o Options) (*Server, error) {
	return &Server{o: o, access: NewAccessLog(o.Access)}, nil
}

// Serve accepts connections until the listener fails or Shutdown is called, in
// which case it returns nil. It may run on several listeners at once.
func (s *Server) Serve(ln net.Listener) error { return errors.New("not yet") }

// Apply puts other settings in force for the requests that come from now on.
// What a running listener cannot change (its address) is left as it is.
func (s *Server) Apply(settings *configs.Settings) error { return nil }

// Shutdown stops accepting, lets the streams finish until ctx ends, then cuts
// them so that their clients see a broken transport. It returns when nothing of
// the Server runs any more: nil, or ctx's error when streams were cut.
func (s *Server) Shutdown(ctx context.Context) error { return nil }

// InFlight returns the number of requests that have been read and not ended.
func (s *Server) InFlight() int { return 0 }
