package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// ReplayOptions says how to replay conversations over HTTP.
type ReplayOptions struct {
	Targets       []string // base URLs; requests go to them in turn
	Model         string
	Conversations []Conversation
	Concurrency   int                 // conversations at once; a conversation's turns follow each other
	OutputTokens  int                 // max_tokens of every request
	Progress      func(done, all int) // may be nil; called by one goroutine at a time
}

// ReplayReport is what a replay measured. Times are seconds at the client.
type ReplayReport struct {
	Requests     int     `json:"requests"`
	Errors       int     `json:"errors"`
	PromptTokens int64   `json:"prompt_tokens"`
	CachedTokens int64   `json:"cached_tokens"`
	HitRate      float64 `json:"hit_rate"` // cached over prompt tokens, as the replicas report them
	TTFTMean     float64 `json:"ttft_mean_s"`
	TTFTP50      float64 `json:"ttft_p50_s"`
	TTFTP99      float64 `json:"ttft_p99_s"`
	Seconds      float64 `json:"seconds"`
	FirstError   string  `json:"first_error,omitempty"`
}

// Replay sends every turn of every conversation as a streamed chat request.
func Replay(ctx context.Context, o ReplayOptions) (*ReplayReport, error) {
	if len(o.Targets) == 0 || o.Concurrency < 1 {
		return nil, errors.New("replay: give at least one target and a concurrency of at least 1")
	}
	var turns [][][]Message
	all := 0
	for _, c := range o.Conversations {
		t := c.Turns()
		turns = append(turns, t)
		all += len(t)
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: o.Concurrency, IdleConnTimeout: 4 * time.Second}}
	defer client.CloseIdleConnections()
	var (
		mu      sync.Mutex
		report  ReplayReport
		ttft    []float64
		next    int
		workers sync.WaitGroup
	)
	start := time.Now()
	queue := make(chan [][]Message)
	for range o.Concurrency {
		workers.Go(func() {
			for conversation := range queue {
				for _, messages := range conversation {
					mu.Lock()
					target := o.Targets[next%len(o.Targets)]
					next++
					mu.Unlock()
					a, err := ask(ctx, client, target, o.Model, messages, o.OutputTokens)
					mu.Lock()
					report.Requests++
					if err != nil {
						report.Errors++
						if report.FirstError == "" {
							report.FirstError = err.Error()
						}
					} else {
						ttft = append(ttft, a.ttft.Seconds())
						report.PromptTokens += a.prompt
						report.CachedTokens += a.cached
					}
					if o.Progress != nil {
						o.Progress(report.Requests, all)
					}
					mu.Unlock()
				}
			}
		})
	}
	for _, t := range turns {
		select {
		case queue <- t:
		case <-ctx.Done():
		}
	}
	close(queue)
	workers.Wait()
	report.Seconds = time.Since(start).Seconds()
	if report.PromptTokens > 0 {
		report.HitRate = float64(report.CachedTokens) / float64(report.PromptTokens)
	}
	report.TTFTMean, report.TTFTP50, report.TTFTP99 = mean(ttft), quantile(ttft, 0.50), quantile(ttft, 0.99)
	return &report, ctx.Err()
}

type answer struct {
	ttft           time.Duration
	prompt, cached int64
}

// ask sends one streamed chat request and reads it to its end.
func ask(ctx context.Context, client *http.Client, target, model string, messages []Message, outputTokens int) (answer, error) {
	body, err := json.Marshal(map[string]any{
		"model": model, "messages": messages, "max_tokens": outputTokens, "stream": true,
		"stream_options": map[string]bool{"include_usage": true},
	})
	if err != nil {
		return answer{}, err
	}
	return send(ctx, client, target+"/v1/chat/completions", body, time.Now())
}

// send posts a request for a stream and reads it to its end. The time to the first
// token counts from start.
func send(ctx context.Context, client *http.Client, url string, body []byte, start time.Time) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		return answer{}, fmt.Errorf("%s: %s", resp.Status, bytes.TrimSpace(text))
	}
	var a answer
	done := false
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok {
			continue
		}
		if string(data) == "[DONE]" {
			done = true
			continue
		}
		if a.ttft > 0 && !bytes.Contains(data, []byte(`"usage":{`)) && !bytes.Contains(data, []byte(`"error"`)) {
			continue // one more token
		}
		var chunk struct {
			Choices []struct {
				Text  string `json:"text"`
				Delta struct {
					Content string `json:"content"`
				} `json:"delta"`
			} `json:"choices"`
			Usage *struct {
				Prompt  int64 `json:"prompt_tokens"`
				Details struct {
					Cached int64 `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			} `json:"usage"`
			Error *struct {
				Message string `json:"message"`
			} `json:"error"`
		}
		if err := json.Unmarshal(data, &chunk); err != nil {
			return answer{}, fmt.Errorf("event %q: %w", data, err)
		}
		switch {
		case chunk.Error != nil:
			return answer{}, errors.New(chunk.Error.Message)
		case chunk.Usage != nil:
			a.prompt, a.cached = chunk.Usage.Prompt, chunk.Usage.Details.Cached
		}
		if a.ttft == 0 && len(chunk.Choices) > 0 && chunk.Choices[0].Delta.Content+chunk.Choices[0].Text != "" {
			a.ttft = time.Since(start)
		}
	}
	if err := lines.Err(); err != nil {
		return answer{}, err
	}
	if !done {
		return answer{}, io.ErrUnexpectedEOF
	}
	return a, nil
}
