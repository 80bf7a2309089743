package proxy

// probeResult is what waits to be read on an idle connection.
type probeResult uint8

const (
	probeQuiet probeResult = iota // nothing: it can be used
	probeEnd                      // its end, or an error
	probeData                     // bytes that nobody asked for
)
