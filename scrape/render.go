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
// connect_timeout, idle_timeout, ca_file and api_key_file.
type Renderer struct {
	version string
	client  atomic.Pointer[renderClient]
}

type renderClient struct {
	http   http.Client
	pool   *http.Transport
	apiKey string
}

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
	c, err := newConfig(s, &Plan{})
	if err != nil {
		return err
	}
	next := &renderClient{apiKey: c.apiKey}
	next.pool = &http.Transport{
		DialContext:         (&net.Dialer{Timeout: c.connectTimeout}).DialContext,
		TLSClientConfig:     c.tls,
		TLSHandshakeTimeout: c.connectTimeout,
		MaxIdleConnsPerHost: renderConns,
		IdleConnTimeout:     s.Upstream.IdleTimeout,
		DisableCompression:  true,
	}
	next.http = http.Client{
		Transport:     next.pool,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	if old := r.client.Swap(next); old != nil {
		old.pool.CloseIdleConnections()
	}
	return nil
}

// Close gives back the connections that wait for a next question.
func (r *Renderer) Close() { r.client.Load().pool.CloseIdleConnections() }

// Render is a routing.Renderer. It returns when the answer is whole, after
// q.Timeout, or when q.Done is closed, whichever comes first.
func (r *Renderer) Render(q routing.RenderQuery) (status int, body []byte, err error) {
	c := r.client.Load()
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
	case c.apiKey != "":
		req.Header.Set("Authorization", "Bearer "+c.apiKey)
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
