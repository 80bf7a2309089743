package fakevllm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
)

const contentJSON = "application/json"

// runsModel says whether a path is one of those that the faults of answers concern.
func runsModel(path string) bool {
	switch path {
	case "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
		"/v1/audio/transcriptions", "/v1/audio/translations", "/inference/v1/generate":
		return true
	}
	return false
}

func (c *conn) control() bool { return strings.HasPrefix(c.path, "/fake/") }

// route answers one request.
func (c *conn) route() error {
	if status := c.f.Routes[c.path]; status != 0 {
		c.s.fault("routes")
		return c.fail(status, "fault")
	}
	if c.s.opt.APIKey != "" && (strings.HasPrefix(c.path, "/v1") || strings.HasPrefix(c.path, "/inference")) &&
		string(headerValue(c.req.Header.RawHeaders(), "authorization")) != "Bearer "+c.s.opt.APIKey {
		return c.unauthorized()
	}
	switch c.path {
	case "/v1/chat/completions":
		return c.post(c.chat)
	case "/v1/completions":
		return c.post(c.completions)
	case "/v1/responses":
		return c.post(c.responses)
	case "/v1/messages":
		return c.post(c.messages)
	case "/v1/messages/count_tokens":
		return c.post(c.countTokens)
	case "/v1/embeddings":
		return c.post(c.embeddings)
	case "/v1/audio/transcriptions", "/v1/audio/translations":
		return c.post(c.audio)
	case "/inference/v1/generate":
		return c.post(c.generate)
	case "/v1/chat/completions/render":
		return c.post(c.renderChat)
	case "/v1/completions/render":
		return c.post(c.renderCompletions)
	case "/tokenize":
		return c.post(c.tokenize)
	case "/detokenize":
		return c.post(c.detokenize)
	case "/reset_prefix_cache":
		return c.post(c.resetPrefixCache)
	case "/v1/models":
		return c.get(c.listModels)
	case "/kv_event_sources":
		return c.get(c.kvEventSources)
	case "/metrics":
		return c.get(c.showMetrics)
	case "/health":
		return c.get(c.health)
	case "/version":
		return c.get(func() error { return c.json(200, `{"version":"0.32.0"}`) })
	case "/load":
		return c.get(func() error { return c.json(200, `{"server_load":0}`) })
	case "/is_sleeping":
		return c.get(func() error { return c.json(200, `{"is_sleeping":false}`) })
	case "/server_info", "/get_server_info":
		return c.get(c.serverInfo)
	case "/ping":
		return c.methods(c.health, http.MethodGet, http.MethodPost)
	case "/fake/stats":
		return c.get(c.showStats)
	case "/fake/faults":
		return c.methods(c.switchFaults, http.MethodGet, http.MethodPost)
	}
	return c.json(404, `{"detail":"Not Found"}`)
}

func (c *conn) get(f func() error) error  { return c.methods(f, http.MethodGet) }
func (c *conn) post(f func() error) error { return c.methods(f, http.MethodPost) }

func (c *conn) methods(f func() error, allowed ...string) error {
	method := string(c.req.Header.Method())
	for _, m := range allowed {
		if m == method {
			return f()
		}
	}
	body := []byte(`{"detail":"Method Not Allowed"}`)
	if method == http.MethodHead {
		c.keep, body = false, nil
	}
	return c.reply(405, contentJSON, body, "allow: "+strings.Join(allowed, ", "))
}

func (c *conn) json(status int, body string) error {
	return c.reply(status, contentJSON, []byte(body))
}

// apiError is a refusal in vLLM's words.
type apiError struct {
	status  int
	message string
	kind    string // "" means the kind that belongs to the status
	param   string
}

func (e *apiError) Error() string { return e.message }

func badRequest(param, format string, args ...any) error {
	return &apiError{status: 400, message: fmt.Sprintf(format, args...), param: param}
}

// invalid is what request validation says, before the engine is asked.
func invalid(param, format string, args ...any) error {
	return &apiError{status: 400, kind: "Bad Request", message: "1 validation error:\n  " + fmt.Sprintf(format, args...), param: param}
}

func errorKind(status int) string {
	switch status {
	case 400:
		return "BadRequestError"
	case 404:
		return "NotFoundError"
	case 422:
		return "UnprocessableEntityError"
	case 500:
		return "InternalServerError"
	case 501:
		return "NotImplementedError"
	case 503:
		return "ServiceUnavailableError"
	}
	return http.StatusText(status)
}

// body returns the error as the dialect of a path has it.
func (e *apiError) body(path string) []byte {
	kind := e.kind
	if kind == "" {
		kind = errorKind(e.status)
	}
	if strings.HasPrefix(path, "/v1/messages") && e.kind == "" {
		b := appendString([]byte(`{"type":"error","error":{"type":`), kind)
		return append(appendString(append(b, `,"message":`...), e.message), "}}"...)
	}
	b := appendString([]byte(`{"error":{"message":`), e.message)
	b = appendString(append(b, `,"type":`...), kind)
	if b = append(b, `,"param":`...); e.param == "" {
		b = append(b, "null"...)
	} else {
		b = appendString(b, e.param)
	}
	return append(appendInt(append(b, `,"code":`...), e.status), "}}"...)
}

// refuse answers with an error.
func (c *conn) refuse(err error, lines ...string) error {
	var e *apiError
	if !errors.As(err, &e) {
		e = &apiError{status: 500, message: err.Error()}
	}
	return c.reply(e.status, contentJSON, e.body(c.path), lines...)
}

// fail answers with an error that no request of the client's caused.
func (c *conn) fail(status int, message string, lines ...string) error {
	if status == 401 {
		return c.unauthorized()
	}
	return c.refuse(&apiError{status: status, message: message}, lines...)
}

// unauthorized is the one error whose shape differs.
func (c *conn) unauthorized() error { return c.json(401, `{"error":"Unauthorized"}`) }

// fields is a JSON object taken apart, keys compared exactly and the last of
// equal keys taken, as vLLM does.
type fields map[string]json.RawMessage

// jsonBody takes the request's body apart.
func (c *conn) jsonBody() (fields, error) {
	kind, _, _ := bytes.Cut(c.req.Header.ContentType(), []byte(";"))
	if !bytes.EqualFold(bytes.TrimSpace(kind), []byte(contentJSON)) {
		return nil, invalid("", "Unsupported Media Type: Only 'application/json' is allowed")
	}
	body := c.req.Body()
	if len(body) == 0 {
		return nil, invalid("body", "{'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}")
	}
	if !json.Valid(body) {
		var none json.RawMessage
		err := json.Unmarshal(body, &none)
		at := 0
		if e := new(json.SyntaxError); errors.As(err, &e) {
			at = int(e.Offset)
		}
		return nil, invalid(fmt.Sprintf("body.%d", at), "{'type': 'json_invalid', 'loc': 'body.%d', 'msg': 'JSON decode error', 'ctx': {'error': %q}}", at, err)
	}
	if bytes.TrimLeft(body, " \t\r\n")[0] != '{' {
		return nil, invalid("body", "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'an object is needed'}")
	}
	out := make(fields, 16)
	eachField(body, func(key, value []byte) { out[string(key)] = value })
	return out, nil
}

// field reads a field if it is there and not null.
func field[T any](f fields, key string, into *T) error {
	raw, ok := f[key]
	if !ok || !given(raw) {
		return nil
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return invalid("body."+key, "{'type': 'type_error', 'loc': 'body.%s', 'msg': %q}", key, err)
	}
	return nil
}

// required says that a field is missing.
func required(f fields, key string) error {
	if given(f[key]) {
		return nil
	}
	return invalid("body."+key, "{'type': 'missing', 'loc': 'body.%s', 'msg': 'Field required', 'input': '<dict of %d items>'}", key, len(f))
}

// served returns the model that the request names, the base model when it names none.
func (c *conn) served(f fields) (string, error) {
	model := c.s.opt.Models[0]
	if err := field(f, "model", &model); err != nil {
		return "", err
	}
	return model, c.s.serves(model)
}

func (s *Server) serves(model string) error {
	for _, m := range s.opt.Models {
		if m == model {
			return nil
		}
	}
	return &apiError{status: 404, param: "model", message: fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", model, strings.Join(s.opt.Models, ", "))}
}
