package fakevllm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Duration is a time.Duration that reads and writes "1.5s" in JSON.
type Duration time.Duration

// MarshalJSON writes "1.5s".
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON reads "1.5s".
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("a duration is a string such as \"1.5s\", not %s", b)
	}
	v, err := time.ParseDuration(s)
	*d = Duration(v)
	return err
}

// What Faults.Break does to an answer.
const (
	BreakStall = "stall" // no more bytes: for BreakFor, or until the client leaves
	BreakReset = "reset" // RST
	BreakClose = "close" // FIN, without the last chunk or the rest of the body
	BreakError = "error" // an error event and [DONE], as when vLLM's engine dies; a plain answer becomes a 500
)

// What Faults.Metrics does to GET /metrics, and the first five to GET /v1/models.
const (
	PageHang    = "hang" // no answer until the client leaves
	PageMissing = "404"
	PageDenied  = "401"
	PageBroken  = "500"
	PageGarbage = "garbage" // 200 and no page

	MetricsOld        = "old"         // gpu_cache_usage_perc in place of kv_cache_usage_perc
	MetricsBoth       = "both"        // both names
	MetricsNaN        = "nan"         // gauges are NaN
	MetricsNone       = "none"        // a page without the gauges
	MetricsTwoEngines = "two_engines" // engine 0 idle, engine 1 with all values
	MetricsTwoModels  = "two_models"  // a second model_name with 99 waiting and a full cache

	ModelsEmpty = "empty" // an empty list
)

// What Faults.KVReplay does to the answers of the replay server.
const (
	ReplayStall = "stall" // no answer
	ReplayEmpty = "empty" // the end marker alone
	ReplayHoles = "holes" // every third batch is missing, but for the first that was asked for
	ReplayCut   = "cut"   // the connection ends after the first one
	ReplayLie   = "lie"   // right numbers, other batches
)

var (
	replayKinds = []string{"", ReplayStall, ReplayEmpty, ReplayHoles, ReplayCut, ReplayLie}
	breakKinds  = []string{"", BreakStall, BreakReset, BreakClose, BreakError}
	pageKinds   = []string{"", PageHang, PageMissing, PageDenied, PageBroken, PageGarbage}
	metricKinds = append(slices.Clone(pageKinds), MetricsOld, MetricsBoth, MetricsNaN, MetricsNone, MetricsTwoEngines, MetricsTwoModels)
	modelKinds  = append(slices.Clone(pageKinds), ModelsEmpty)
)

// Faults is everything that a replica can do wrong. The zero value does
// everything right. Faults of answers concern the endpoints that run the model.
type Faults struct {
	// Connections.
	Refuse      bool     `json:"refuse,omitempty"`       // closes the listener and the idle connections
	RefuseFor   Duration `json:"refuse_for,omitempty"`   // ends Refuse after a time
	AcceptDelay Duration `json:"accept_delay,omitempty"` // between two accepts
	ReadRate    int      `json:"read_rate,omitempty"`    // bytes per second read of a connection
	IdleClose   Duration `json:"idle_close,omitempty"`   // closes a connection so long after its last answer, in place of Options.IdleTimeout

	// Answers: whether, when and with what status.
	Delay       Duration       `json:"delay,omitempty"`        // before the head
	Status      int            `json:"status,omitempty"`       // answers with this status, 400 to 599
	StatusTimes int            `json:"status_times,omitempty"` // only the first so many; 0: all
	RetryAfter  int            `json:"retry_after,omitempty"`  // seconds, sent with Status
	BodyLimit   int            `json:"body_limit,omitempty"`   // a longer Content-Length gets 413 and a close, the body unread
	Routes      map[string]int `json:"routes,omitempty"`       // status per path, of any endpoint

	// Answers: where they break.
	Break       string   `json:"break,omitempty"`        // stall, reset, close or error
	BreakAfter  int      `json:"break_after,omitempty"`  // events: -1 before the head, 0 behind it; of a plain body half is sent from 1 on
	BreakFor    Duration `json:"break_for,omitempty"`    // ends a stall; 0: it lasts until the client leaves
	BreakTimes  int      `json:"break_times,omitempty"`  // only the first so many; 0: all
	ExtraLength int      `json:"extra_length,omitempty"` // the declared Content-Length exceeds the body by so much, then FIN; a stream declares it beyond 1 MiB

	// Answers: their bytes.
	Unasked      bool     `json:"unasked,omitempty"`       // a second response follows that nobody asked for
	UnaskedDelay Duration `json:"unasked_delay,omitempty"` // how long behind the first
	SplitBytes   int      `json:"split_bytes,omitempty"`   // writes at most so many bytes at once: TCP segments cut anywhere
	SplitDelay   Duration `json:"split_delay,omitempty"`   // between these writes
	EventDelay   Duration `json:"event_delay,omitempty"`   // writes every event by itself, so long after the one before
	CRLF         bool     `json:"crlf,omitempty"`          // events end their lines with CR LF
	Comments     bool     `json:"comments,omitempty"`      // a ": ping" comment before every event
	Emoji        bool     `json:"emoji,omitempty"`         // answers of four-byte characters
	HeaderBytes  int      `json:"header_bytes,omitempty"`  // an extra response header of this size
	Headers      []string `json:"headers,omitempty"`       // more response header lines, "name: value"

	// Answers without the engine: Chunks events of ChunkBytes of text each, ChunkInterval apart.
	Chunks        int      `json:"chunks,omitempty"`
	ChunkBytes    int      `json:"chunk_bytes,omitempty"` // 0: 4
	ChunkInterval Duration `json:"chunk_interval,omitempty"`

	// Pages.
	Health         int      `json:"health,omitempty"`  // status of /health
	Models         string   `json:"models,omitempty"`  // see ModelsEmpty and PageHang
	Metrics        string   `json:"metrics,omitempty"` // see MetricsOld and PageHang
	MetricsDelay   Duration `json:"metrics_delay,omitempty"`
	MetricsWaiting *float64 `json:"metrics_waiting,omitempty"` // in place of the truth
	MetricsRunning *float64 `json:"metrics_running,omitempty"`
	MetricsKVUsage *float64 `json:"metrics_kv_usage,omitempty"`

	// The engine and what it publishes about its KV cache.
	RestartEngine bool   `json:"restart_engine,omitempty"` // once: aborts everything, the cache is empty, batches are numbered from 0
	KVDrop        int    `json:"kv_drop,omitempty"`        // the next so many batches are not sent; a replay has them
	KVReorder     int    `json:"kv_reorder,omitempty"`     // the next so many batches go out behind the one that follows
	KVGarbage     int    `json:"kv_garbage,omitempty"`     // the next so many batches cannot be read
	KVDuplicate   bool   `json:"kv_duplicate,omitempty"`   // blocks are announced twice when stored, and when removed
	KVFlood       int    `json:"kv_flood,omitempty"`       // once: so many batches without an effect
	KVReplay      string `json:"kv_replay,omitempty"`      // see ReplayStall

	// HangShutdown is how long open answers get no byte and no FIN once Shutdown
	// was called; generation stops.
	HangShutdown Duration `json:"hang_shutdown,omitempty"`
}

// Validate returns an error that names the first field out of range.
func (f *Faults) Validate() error {
	for _, e := range []struct {
		name, value string
		allowed     []string
	}{{"break", f.Break, breakKinds}, {"metrics", f.Metrics, metricKinds}, {"models", f.Models, modelKinds}, {"kv_replay", f.KVReplay, replayKinds}} {
		if !slices.Contains(e.allowed, e.value) {
			return fmt.Errorf("faults: %s is %q: use one of %s", e.name, e.value, strings.Join(e.allowed[1:], ", "))
		}
	}
	for _, e := range []struct {
		name       string
		value, low int
	}{
		{"refuse_for", int(f.RefuseFor), 0}, {"accept_delay", int(f.AcceptDelay), 0}, {"read_rate", f.ReadRate, 0},
		{"idle_close", int(f.IdleClose), 0}, {"delay", int(f.Delay), 0}, {"status_times", f.StatusTimes, 0},
		{"retry_after", f.RetryAfter, 0}, {"body_limit", f.BodyLimit, 0}, {"break_after", f.BreakAfter, -1},
		{"break_for", int(f.BreakFor), 0}, {"break_times", f.BreakTimes, 0}, {"extra_length", f.ExtraLength, 0},
		{"unasked_delay", int(f.UnaskedDelay), 0}, {"split_bytes", f.SplitBytes, 0}, {"split_delay", int(f.SplitDelay), 0}, {"event_delay", int(f.EventDelay), 0},
		{"header_bytes", f.HeaderBytes, 0}, {"chunks", f.Chunks, 0}, {"chunk_bytes", f.ChunkBytes, 0},
		{"chunk_interval", int(f.ChunkInterval), 0}, {"metrics_delay", int(f.MetricsDelay), 0}, {"hang_shutdown", int(f.HangShutdown), 0},
		{"kv_drop", f.KVDrop, 0}, {"kv_reorder", f.KVReorder, 0}, {"kv_garbage", f.KVGarbage, 0}, {"kv_flood", f.KVFlood, 0},
	} {
		if e.value < e.low {
			return fmt.Errorf("faults: %s is %d: use at least %d", e.name, e.value, e.low)
		}
	}
	for _, status := range []int{f.Status, f.Health} {
		if status != 0 && (status < 400 || status > 599) {
			return fmt.Errorf("faults: status %d: use 400 to 599", status)
		}
	}
	for path, status := range f.Routes {
		if status < 400 || status > 599 {
			return fmt.Errorf("faults: routes: status %d of %s: use 400 to 599", status, path)
		}
	}
	for _, line := range f.Headers {
		if name, _, ok := strings.Cut(line, ":"); !ok || name == "" || strings.ContainsAny(line, "\r\n") {
			return fmt.Errorf("faults: headers: %q is not one line \"name: value\"", line)
		}
	}
	return nil
}

// ParseFaults reads Faults from JSON. Unknown fields are errors.
func ParseFaults(doc []byte) (Faults, error) {
	var f Faults
	d := json.NewDecoder(bytes.NewReader(doc))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return f, fmt.Errorf("faults: %w", err)
	}
	if d.More() {
		return f, errors.New("faults: more than one JSON value")
	}
	return f, f.Validate()
}

// faultSet is one setting of the faults, with what is left of those that end
// after a number of times.
type faultSet struct {
	Faults
	statusLeft, breakLeft                    atomic.Int64
	kvDropLeft, kvReorderLeft, kvGarbageLeft atomic.Int64
}

func newFaultSet(f Faults) *faultSet {
	s := &faultSet{Faults: f}
	s.statusLeft.Store(int64(f.StatusTimes))
	s.breakLeft.Store(int64(f.BreakTimes))
	s.kvDropLeft.Store(int64(f.KVDrop))
	s.kvReorderLeft.Store(int64(f.KVReorder))
	s.kvGarbageLeft.Store(int64(f.KVGarbage))
	return s
}

// takeStatus says whether this answer is one of those that get the status.
func (s *faultSet) takeStatus() bool {
	return s.Status != 0 && (s.StatusTimes == 0 || s.statusLeft.Add(-1) >= 0)
}

// takeBreak says whether this answer is one of those that break.
func (s *faultSet) takeBreak() bool {
	return s.Break != "" && (s.BreakTimes == 0 || s.breakLeft.Add(-1) >= 0)
}

// take says whether this is one of the times that are left.
func take(left *atomic.Int64) bool { return left.Load() > 0 && left.Add(-1) >= 0 }
