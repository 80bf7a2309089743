package bench

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
)

// TraceReplayOptions says how to send a lab's trace over HTTP.
type TraceReplayOptions struct {
	Target   string  // base URL
	Model    string  // whose tokens are four bytes of text, as fakevllm's
	Faster   float64 // seconds of the trace per second; the replicas must be as much faster
	Progress func(done, all int)
}

// TraceReport is what a replay measured, in seconds of the trace. Warm-up requests are not in it.
type TraceReport struct {
	Policy       string  `json:"policy"`
	Requests     int     `json:"requests"`
	Errors       int     `json:"errors"`
	Hit          float64 `json:"hit"` // cached over prompt tokens, as the replicas report them
	TTFTMean     float64 `json:"ttft_mean"`
	TTFTP50      float64 `json:"ttft_p50"`
	TTFTP99      float64 `json:"ttft_p99"`
	FirstError   string  `json:"first_error,omitempty"`
	LateP99      float64 `json:"late_p99"`      // how much later than due requests were sent
	LabTTFTMean  float64 `json:"lab_ttft_mean"` // of the same requests in virtual time
	LabTTFTP99   float64 `json:"lab_ttft_p99"`
	LabHit       float64 `json:"lab_hit"`
	promptTokens int64
	cachedTokens int64
}

// Cut leaves the requests of the trace's first d.
func (l *Lab) Cut(d time.Duration) {
	n, _ := slices.BinarySearchFunc(l.trace.Requests, d, func(r TraceRequest, d time.Duration) int { return int(r.At - d) })
	cut := *l.trace
	cut.Requests = cut.Requests[:n]
	l.trace = &cut
}

// Replay sends the trace as completions, each when it is due, whatever is in
// flight. Block ids become text: equal ids equal text.
func (l *Lab) Replay(ctx context.Context, policy string, o TraceReplayOptions) (*TraceReport, error) {
	if !(o.Faster > 0) || len(l.trace.Requests) == 0 {
		return nil, fmt.Errorf("replay: %v times faster, %d requests: use a number above 0, and at least one request", o.Faster, len(l.trace.Requests))
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConns: 1024, MaxIdleConnsPerHost: 1024, IdleConnTimeout: 4 * time.Second, DisableCompression: true}}
	defer client.CloseIdleConnections()
	var (
		mu         sync.Mutex
		ttft, late []float64
		done       int
		flights    sync.WaitGroup
	)
	report := &TraceReport{Policy: policy}
	from := l.warmup()
	start := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := range l.trace.Requests {
		body := l.trace.completion(i, o.Model)
		due := start.Add(time.Duration(float64(l.trace.Requests[i].At) / o.Faster))
		timer.Reset(time.Until(due))
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		flights.Go(func() {
			sent := time.Since(due).Seconds() * o.Faster
			a, err := send(ctx, client, o.Target+"/v1/completions", body, due)
			mu.Lock()
			defer mu.Unlock()
			if done++; o.Progress != nil {
				o.Progress(done, len(l.trace.Requests))
			}
			switch {
			case err != nil:
				if report.Errors++; report.FirstError == "" {
					report.FirstError = err.Error()
				}
			case i >= from:
				report.Requests++
				ttft = append(ttft, a.ttft.Seconds()*o.Faster)
				late = append(late, sent)
				report.promptTokens += a.prompt
				report.cachedTokens += a.cached
			}
		})
	}
	flights.Wait()
	if report.promptTokens > 0 {
		report.Hit = float64(report.cachedTokens) / float64(report.promptTokens)
	}
	report.TTFTMean, report.TTFTP50, report.TTFTP99, report.LateP99 = mean(ttft), quantile(ttft, .5), quantile(ttft, .99), quantile(late, .99)
	return report, ctx.Err()
}

// completion is the body of request i.
func (t *Trace) completion(i int, model string) []byte {
	r := &t.Requests[i]
	b := make([]byte, 0, 4*r.Input+256)
	b = fmt.Appendf(b, `{"model":%q,"max_tokens":%d,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true},"prompt":"`, model, max(r.Output, 1))
	begin := len(b)
	for k := 0; len(b)-begin < 4*r.Input; k++ {
		id := mix(uint64(i))<<16 | uint64(k) // shared with nobody
		if k < len(r.Blocks) {
			id = r.Blocks[k]
		}
		for word := range t.BlockTokens / 4 { // sixteen digits are four tokens
			v := mix(mix(id) + uint64(word))
			for shift := 60; shift >= 0; shift -= 4 {
				b = append(b, "0123456789abcdef"[v>>shift&15])
			}
		}
	}
	b = b[:begin+4*r.Input]
	return append(b, `"}`...)
}

// SameOrder returns an error that names the first two policies whose mean TTFT
// differ by more than a tenth in the lab and stand the other way round here, or
// the first one that says nothing, as its requests were not sent when due: a tenth of
// a second late, and half a TTFT.
func SameOrder(rows []*TraceReport, faster float64) error {
	for _, a := range rows {
		if a.LateP99 > max(a.LabTTFTMean/2, 0.1*faster) {
			return fmt.Errorf("%s: one request in a hundred was sent %.2f s late, by the trace's clock: this machine is too busy; use a smaller --faster", a.Policy, a.LateP99)
		}
	}
	for _, a := range rows {
		for _, b := range rows {
			if a.LabTTFTMean < 0.9*b.LabTTFTMean && a.TTFTMean >= b.TTFTMean {
				return fmt.Errorf("%s has a mean TTFT of %.3f s and %s of %.3f s; in the lab it is %.3f and %.3f s", a.Policy, a.TTFTMean, b.Policy, b.TTFTMean, a.LabTTFTMean, b.LabTTFTMean)
			}
		}
	}
	return nil
}
