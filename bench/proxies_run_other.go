//go:build !linux

package bench

import (
	"context"
	"errors"
)

// RunProxies needs Linux: it waits in epoll and reads /proc.
func RunProxies(context.Context, ProxyOptions) (*ProxyReport, error) {
	return nil, errors.New("the bench of proxies needs Linux")
}
