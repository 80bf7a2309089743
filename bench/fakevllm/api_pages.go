package fakevllm

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// spoiled answers a page as its fault says and returns true, or returns false when there is none to show.
func (c *conn) spoiled(page, kind string) (bool, error) {
	status, body := 0, ""
	switch kind {
	case PageHang:
		c.s.fault(page + "_" + kind)
		c.keep = false
		return true, c.pause(-1)
	case PageMissing:
		status, body = 404, `{"detail":"Not Found"}`
	case PageDenied:
		status, body = 401, `{"error":"Unauthorized"}`
	case PageBroken:
		status, body = 500, `{"detail":"Internal Server Error"}`
	case PageGarbage:
		status, body = 200, "\x00\xff{{{ not a page\nvllm:num_requests_waiting{engine=\"0\" 1\nvllm:kv_cache_usage_perc{} x\n"
	default:
		return false, nil
	}
	c.s.fault(page + "_" + kind)
	return true, c.json(status, body)
}

func (c *conn) health() error {
	if c.f.Health != 0 {
		c.s.fault("health")
		return c.reply(c.f.Health, "", nil)
	}
	return c.reply(200, "", nil)
}

func (c *conn) listModels() error {
	if done, err := c.spoiled("models", c.f.Models); done {
		return err
	}
	b := []byte(`{"object":"list","data":[`)
	if c.f.Models == ModelsEmpty {
		c.s.fault("models_empty")
		return c.reply(200, contentJSON, append(b, "]}"...))
	}
	base := c.s.opt.Models[0]
	for i, m := range c.s.opt.Models {
		parent := []byte("null")
		if i > 0 {
			b = append(b, ',')
			parent = appendString(nil, base)
		}
		b = fmt.Appendf(b, `{"id":%s,"object":"model","created":%d,"owned_by":"vllm","root":%s,"parent":%s,"max_model_len":%d,"permission":[]}`,
			appendString(nil, m), c.s.started.Unix(), appendString(nil, m), parent, c.s.opt.MaxModelLen)
	}
	return c.reply(200, contentJSON, append(b, "]}"...))
}

func (c *conn) showMetrics() error {
	if d := time.Duration(c.f.MetricsDelay); d > 0 {
		c.s.fault("metrics_delay")
		if err := c.pause(d); err != nil {
			return err
		}
	}
	if done, err := c.spoiled("metrics", c.f.Metrics); done {
		return err
	}
	if c.f.Metrics != "" {
		c.s.fault("metrics_" + c.f.Metrics)
	}
	return c.reply(200, "text/plain; version=1.0.0; charset=utf-8", c.s.metricsPage(&c.f.Faults))
}

func (c *conn) serverInfo() error {
	o := &c.s.opt
	return c.document(map[string]any{
		"vllm_config": fmt.Sprintf("model='%s', max_seq_len=%d, block_size=%d, num_gpu_blocks=%d", o.Models[0], o.MaxModelLen, o.Engine.BlockTokens, o.Engine.Blocks),
		"vllm_env":    map[string]string{}, "system_env": map[string]string{"vllm_version": "0.32.0"},
		"model_path": o.Models[0], "served_model_name": o.Models[0], "max_num_seqs": o.Engine.MaxSeqs, "engine": o.Engine,
	})
}

func (c *conn) resetPrefixCache() error {
	c.s.mu.Lock()
	done := c.s.engine.ClearCache()
	if done && c.s.events != nil {
		c.s.events.cleared = true // told with the next step
	}
	c.s.mu.Unlock()
	return c.json(200, `{"success":`+strconv.FormatBool(done)+`}`)
}

func (c *conn) showStats() error { return c.document(c.s.Stats()) }

// switchFaults shows the faults, after a POST those that it set.
func (c *conn) switchFaults() error {
	if string(c.req.Header.Method()) == http.MethodPost {
		f, err := ParseFaults(c.req.Body())
		if err != nil {
			return c.refuse(badRequest("", "%s", err))
		}
		if err := c.s.apply(f); err != nil {
			return c.refuse(err)
		}
	}
	return c.document(c.s.Faults())
}

// document answers with a value as JSON.
func (c *conn) document(v any) error {
	doc, err := json.Marshal(v)
	if err != nil {
		return c.refuse(err)
	}
	return c.reply(200, contentJSON, doc)
}
