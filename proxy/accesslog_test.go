package proxy

import (
	"bytes"
	"encoding/json"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// accessTo returns an access log that writes JSON lines to w.
func accessTo(w io.Writer, level zapcore.Level) *accessLog {
	cfg := zap.NewProductionEncoderConfig()
	cfg.TimeKey = zapcore.OmitKey
	return NewAccessLog(zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(cfg), zapcore.AddSync(w), level)))
}

func TestAccessLog(t *testing.T) {
	e := newMetricsBench(t, "a").fleet.Endpoints()[0]
	f := func(t *testing.T, change func(r *record), want string) {
		t.Helper()
		r := fullRecord(e)
		change(r)
		var out bytes.Buffer
		accessTo(&out, zapcore.InfoLevel).write(r)
		if n := strings.Count(out.String(), "\n"); n != 1 {
			t.Errorf("lines: got %d, want 1:\n%s", n, out.String())
		}
		var got, wanted map[string]any
		if err := json.Unmarshal(out.Bytes(), &got); err != nil {
			t.Fatalf("line: got %v, want JSON: %s", err, out.String())
		}
		if err := json.Unmarshal([]byte(want), &wanted); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, wanted) {
			t.Errorf("line:\n got %s\nwant %s", out.String(), want)
		}
	}
	f(t, func(r *record) {}, `{"level":"info","msg":"request","request_id":"req-1","client":"10.0.0.1:5000","key":"alice","method":"POST",
		"route":"/v1/chat/completions","model":"m","replica":"a","status":200,"dur_ms":2115,"ttft_ms":115,
		"read_ms":1,"route_ms":2,"connect_ms":4,"header_ms":8,"bytes_in":8192,"bytes_out":4096,"events":13,
		"in_tok":100,"cached_tok":64,"out_tok":11,"pick_reason":"prefix_hit","match_blocks":3,"total_blocks":4,"predicted_tok":192,"ties":1,"phase":"done"}`)
	// The client left while the replica was silent.
	f(t, func(r *record) {
		r.clientEnd, r.status, r.phase, r.err = true, 499, phaseHeader, "canceled"
		r.header, r.firstTok, r.stream, r.bytesOut, r.events = time.Time{}, time.Time{}, false, 0, 0
		r.promptTokens, r.cachedTokens, r.outputTokens = -1, -1, -1
	}, `{"level":"info","msg":"request","request_id":"req-1","client":"10.0.0.1:5000","key":"alice","method":"POST",
		"route":"/v1/chat/completions","model":"m","replica":"a","status":499,"dur_ms":2115,
		"read_ms":1,"route_ms":2,"connect_ms":4,"bytes_in":8192,"bytes_out":0,
		"pick_reason":"prefix_hit","match_blocks":3,"total_blocks":4,"predicted_tok":192,"ties":1,"phase":"header-wait","client_gone":true,"err":"canceled"}`)
	// A replica broke the stream after a second attempt.
	f(t, func(r *record) { r.err, r.phase, r.reroutes, r.resends = "truncated", phaseStream, 1, 2 }, `{"level":"warn","msg":"request","request_id":"req-1","client":"10.0.0.1:5000","key":"alice","method":"POST",
		"route":"/v1/chat/completions","model":"m","replica":"a","status":200,"dur_ms":2115,"ttft_ms":115,
		"read_ms":1,"route_ms":2,"connect_ms":4,"header_ms":8,"bytes_in":8192,"bytes_out":4096,"events":13,
		"in_tok":100,"cached_tok":64,"out_tok":11,"pick_reason":"prefix_hit","match_blocks":3,"total_blocks":4,"predicted_tok":192,"ties":1,
		"reroutes":1,"resends":2,"phase":"stream","err":"truncated"}`)
	// A refusal before anything was known.
	f(t, func(r *record) {
		*r = record{start: benchTime, end: benchTime.Add(250 * time.Microsecond), route: "other", status: 503, promptTokens: -1, cachedTokens: -1, outputTokens: -1}
	}, `{"level":"warn","msg":"request","route":"other","status":503,"dur_ms":0.25,"bytes_in":0,"bytes_out":0,"phase":"read"}`)
	// What a client chooses is cut and cannot break the line.
	f(t, func(r *record) {
		*r = record{start: benchTime, end: benchTime, model: "x\r\n{\"level\":\"error\"}" + strings.Repeat("y", 1000), status: 404, promptTokens: -1, cachedTokens: -1, outputTokens: -1}
	}, `{"level":"info","msg":"request","model":"x\r\n{\"level\":\"error\"}`+strings.Repeat("y", maxLogged-20)+`","status":404,"dur_ms":0,"bytes_in":0,"bytes_out":0,"phase":"read"}`)
}

func TestAccessLogLevel(t *testing.T) {
	e := newMetricsBench(t, "a").fleet.Endpoints()[0]
	var out bytes.Buffer
	log := accessTo(&out, zapcore.WarnLevel)
	log.write(fullRecord(e))
	if out.Len() != 0 {
		t.Errorf("a good request at warn level: got %s, want nothing", out.String())
	}
	bad := fullRecord(e)
	bad.status = 502
	log.write(bad)
	if !strings.Contains(out.String(), `"status":502`) {
		t.Errorf("a bad request at warn level: got %q, want a line", out.String())
	}
	NewAccessLog(nil).write(bad) // writes nowhere and does not panic
}

// A pooled line holds nothing of the line before.
func TestAccessLogReuse(t *testing.T) {
	var out bytes.Buffer
	log := accessTo(&out, zapcore.InfoLevel)
	log.write(fullRecord(newMetricsBench(t, "a").fleet.Endpoints()[0]))
	out.Reset()
	log.write(&record{start: benchTime, end: benchTime, status: 404, promptTokens: -1, cachedTokens: -1, outputTokens: -1})
	if want := `{"level":"info","msg":"request","status":404,"dur_ms":0,"bytes_in":0,"bytes_out":0,"phase":"read"}` + "\n"; out.String() != want {
		t.Errorf("second line: got %s, want %s", out.String(), want)
	}
}

func TestAccessLogAlloc(t *testing.T) {
	r := fullRecord(newMetricsBench(t, "a").fleet.Endpoints()[0])
	log := accessTo(io.Discard, zapcore.InfoLevel)
	log.write(r)
	if got := testing.AllocsPerRun(1000, func() { log.write(r) }); got > 1 {
		t.Errorf("allocations per line: got %v, want at most 1", got)
	}
}
