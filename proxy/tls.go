package proxy

import (
	"crypto/tls"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"

	"kvgate/configs"
)

// certEvery is how often a handshake looks whether the certificate's files have changed.
const certEvery = time.Second

// listenerCert is the data listener's side of TLS. It follows its files: whoever
// renews them need not tell.
type listenerCert struct {
	files configs.TLS
	log   *zap.Logger

	mu      sync.Mutex
	config  *tls.Config
	state   [3]fileState
	checked time.Time
}

// fileState changes when a file does.
type fileState struct {
	size int64
	at   time.Time
}

// newListenerCert reads the files, nil when the listener speaks plain HTTP.
func newListenerCert(files configs.TLS, log *zap.Logger) (*listenerCert, error) {
	c := &listenerCert{files: files, log: log, checked: time.Now()}
	c.state = c.look() // before they are read: a change in between is seen
	var err error
	if c.config, err = files.Config(); err != nil || c.config == nil {
		return nil, err
	}
	return c, nil
}

func (c *listenerCert) look() (s [3]fileState) {
	for i, name := range [...]string{c.files.CertFile, c.files.KeyFile, c.files.ClientCAFile} {
		if info, err := os.Stat(name); err == nil { // one that is away for a moment is being replaced
			s[i] = fileState{info.Size(), info.ModTime()}
		}
	}
	return s
}

// get returns the configuration for a handshake. Files that are broken, or not
// all replaced yet, leave the old one in force.
func (c *listenerCert) get(now time.Time) *tls.Config {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.checked) < certEvery {
		return c.config
	}
	c.checked = now
	state := c.look()
	if state == c.state {
		return c.config
	}
	c.state = state
	config, err := c.files.Config()
	if err != nil {
		c.log.Error("the new certificate cannot be used: the old one stays", zap.Error(err))
		return c.config
	}
	c.config = config
	c.log.Info("certificate read again", zap.String("file", c.files.CertFile))
	return config
}

// tlsConfig returns the configuration of the listener.
func (s *Server) tlsConfig() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			return s.live.Load().cert.get(time.Now()), nil
		},
	}
}
