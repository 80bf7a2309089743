package scrape

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"kvgate/configs"
	"kvgate/routing"
)

// Renderer asks render servers for the tokens of a body, over kept connections:
// what routing.WithRenderer takes. Its settings are those of traffic: upstream's
// connect_timeout and idle_timeout, and the credentials of the replica that is asked.
type Renderer struct {
	version string
	client  atomic.Pointer[renderClient]
}

type renderClient struct {
	settings configs.Upstream
	all      *renderHTTP // for who has no credentials of its own

	mu     sync.Mutex
	owners []*renderHTTP
}

// renderHTTP is a client that shows certain credentials.
type renderHTTP struct {
	shown *configs.Credentials
	http  http.Client
	pool  *http.Transport
}

// maxRenderOwners bounds the clients for credentials of single replicas.
const maxRenderOwners = 256

// Bounds of a render server: kept connections, and one answer, in which images may
// come back as the model sees them.
const (
	renderConns = 32
	maxRendered = 64 << 20
)

// NewRenderer returns a Renderer. The error says which settings are wrong.
func NewRenderer(s *configs.Settings, version string) (*Renderer, error) {
	r := &Renderer{version: version}
	return r, r.Apply(s)
}

// Apply puts other settings in force. On an error the old ones stay.
func (r *Renderer) Apply(s *configs.Settings) error {
	base, err := s.Upstream.Credentials()
	if err != nil {
		return err
	}
	next := &renderClient{settings: s.Upstream}
	next.all = next.with(base)
	if old := r.client.Swap(next); old != nil {
		old.close()
	}
	return nil
}

// with returns a client that shows the credentials.
func (c *renderClient) with(shown *configs.Credentials) *renderHTTP {
	h := &renderHTTP{shown: shown}
	h.pool = &http.Transport{
		DialContext:         (&net.Dialer{Timeout: c.settings.ConnectTimeout}).DialContext,
		TLSClientConfig:     shown.TLS,
		TLSHandshakeTimeout: c.settings.ConnectTimeout,
		MaxIdleConnsPerHost: renderConns,
		IdleConnTimeout:     c.settings.IdleTimeout,
		DisableCompression:  true,
	}
	h.http = http.Client{
		Transport:     h.pool,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return h
}

// of returns the client for a replica's own credentials, and the common one for nil.
func (c *renderClient) of(own *configs.Credentials) *renderHTTP {
	if own == nil {
		return c.all
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.owners {
		if h.shown == own {
			return h
		}
	}
	if len(c.owners) == maxRenderOwners { // those of files that were read again, most likely
		for _, h := range c.owners {
			h.pool.CloseIdleConnections()
		}
		c.owners = nil
	}
	h := c.with(own)
	c.owners = append(c.owners, h)
	return h
}

func (c *renderClient) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range append(c.owners, c.all) {
		h.pool.CloseIdleConnections()
	}
}

// Close gives back the connections that wait for a next question.
func (r *Renderer) Close() { r.client.Load().close() }

// Render is a routing.Renderer. It returns when the answer is whole, after
// q.Timeout, or when q.Done is closed, whichever comes first.
func (r *Renderer) Render(q routing.RenderQuery) (status int, body []byte, err error) {
	c := r.client.Load().of(q.Credentials)
	ctx, cancel := context.WithTimeout(context.Background(), q.Timeout)
	var watch sync.WaitGroup
	defer watch.Wait()
	defer cancel()
	if q.Done != nil {
		watch.Go(func() {
			select {
			case <-q.Done:
				cancel()
			case <-ctx.Done():
			}
		})
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, q.URL+q.Path, bytes.NewReader(q.Body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "kvgate/"+r.version)
	req.Header["Idempotency-Key"] = nil // not sent: the request may be sent again when a kept connection was stale
	switch {
	case c.shown.Authorization != "":
		req.Header.Set("Authorization", c.shown.Authorization)
	case len(q.Authorization) > 0:
		req.Header.Set("Authorization", string(q.Authorization))
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, maxDrained)) // as far as it comes, and for the sake of the connection
		return resp.StatusCode, body, nil
	}
	if resp.ContentLength > maxRendered {
		return 0, nil, errRenderedSize
	}
	var out bytes.Buffer
	out.Grow(int(max(resp.ContentLength, 0)) + bytes.MinRead)
	if _, err := out.ReadFrom(io.LimitReader(resp.Body, maxRendered+1)); err != nil {
		return 0, nil, fmt.Errorf("answer of %s: %w", q.Path, err)
	}
	if out.Len() > maxRendered {
		return 0, nil, errRenderedSize
	}
	return resp.StatusCode, out.Bytes(), nil
}

var errRenderedSize = errors.New("the answer is too large")
