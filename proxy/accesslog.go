package proxy

import (
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// maxLogged bounds the strings in an access line that a client chooses, in bytes.
const maxLogged = 256

// accessLog writes one line per request. It knows no header and no body, so
// neither keys nor prompts can get into it.
type accessLog struct {
	log    *zap.Logger
	fields sync.Pool // *[]zap.Field
}

// NewAccessLog returns the access log that writes to log, at info level for what
// went well or was the client's doing, at warn level for the rest. A nil log
// writes nothing.
func NewAccessLog(log *zap.Logger) *accessLog {
	if log == nil {
		log = zap.NewNop()
	}
	return &accessLog{log: log, fields: sync.Pool{New: func() any { f := make([]zap.Field, 0, 40); return &f }}}
}

// write writes the line of a request that has ended. What did not happen has
// no field: phases that were not reached, tokens that were not told.
func (l *accessLog) write(r *record) {
	level := zapcore.InfoLevel
	if !r.clientEnd && (r.status >= 500 || r.err != "") {
		level = zapcore.WarnLevel
	}
	entry := l.log.Check(level, "request")
	if entry == nil {
		return
	}
	pooled := l.fields.Get().(*[]zap.Field)
	f := (*pooled)[:0]

	text := func(key, value string) {
		if value != "" {
			f = append(f, zap.String(key, value[:min(len(value), maxLogged)]))
		}
	}
	count := func(key string, n int64) {
		if n > 0 {
			f = append(f, zap.Int64(key, n))
		}
	}
	span := func(key string, from, to time.Time) {
		if !from.IsZero() && !to.IsZero() {
			f = append(f, zap.Float64(key, float64(to.Sub(from).Microseconds())/1000))
		}
	}
	text("request_id", r.id)
	text("client", r.client)
	text("key", r.key)
	text("method", r.method)
	text("route", r.route)
	text("model", r.model)
	text("replica", r.replica)
	f = append(f, zap.Int("status", r.status))
	span("dur_ms", r.start, r.end)
	span("ttft_ms", r.start, firstContent(r))
	span("read_ms", r.start, r.parsed)
	span("route_ms", r.parsed, r.routed)
	span("connect_ms", r.routed, r.sent)
	span("header_ms", r.sent, r.header)
	f = append(f, zap.Int64("bytes_in", r.bytesIn), zap.Int64("bytes_out", r.bytesOut))
	if r.stream {
		f = append(f, zap.Int64("events", r.events))
	}
	for _, t := range [...]struct {
		key string
		n   int64
	}{{"in_tok", r.promptTokens}, {"cached_tok", r.cachedTokens}, {"out_tok", r.outputTokens}} {
		if t.n >= 0 {
			f = append(f, zap.Int64(t.key, t.n))
		}
	}
	if r.reason != "" {
		f = append(f, zap.String("pick_reason", r.reason), zap.Int("match_blocks", r.matchBlocks), zap.Int("total_blocks", r.totalBlocks),
			zap.Int64("predicted_tok", r.predictedTokens))
		count("ties", int64(r.ties))
	}
	count("reroutes", int64(r.reroutes))
	count("resends", int64(r.resends))
	f = append(f, zap.String("phase", r.phase.String()))
	if r.clientEnd {
		f = append(f, zap.Bool("client_gone", true))
	}
	text("err", r.err)

	entry.Write(f...)
	clear(f)
	*pooled = f[:0]
	l.fields.Put(pooled)
}
