//go:build !unix

package proxy

// prober does nothing where a socket cannot be looked at without reading: a
// stale connection shows itself by its first failed use.
type prober struct{}

func (c *upConn) initProbe() {}

func (c *upConn) probe() probeResult { return probeQuiet }
