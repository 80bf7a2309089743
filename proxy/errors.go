package proxy

import (
	"encoding/json"
	"errors"
	"strconv"

	"github.com/valyala/fasthttp"

	"kvgate/routing"
)

// refusal is an answer of the gateway's own that is no success. It never names
// a replica's address.
type refusal struct {
	status  int
	code    string // snake_case, for programs
	message string // for people: what is wrong and what to do
	param   string // the field at fault
	reason  string // x-llm-d-request-dropped-reason
	retry   int    // Retry-After in seconds, 0: none
	allow   methods
	unsent  bool // no replica has seen the request
	hangUp  bool // close the connection: its framing is in doubt, or the body was not read
}

// Refusals that need no detail.
var (
	refuseFraming = &refusal{status: fasthttp.StatusBadRequest, code: "invalid_framing", hangUp: true,
		message: "the request's head is ambiguous: one Content-Length or Transfer-Encoding: chunked, one header field per line"}
	refuseHead      = &refusal{status: fasthttp.StatusBadRequest, code: "invalid_request", hangUp: true, message: "the request's head could not be read"}
	refuseHeadSize  = &refusal{status: fasthttp.StatusRequestHeaderFieldsTooLarge, code: "header_too_large", hangUp: true, message: "the request's head is larger than limits.header"}
	refuseFields    = &refusal{status: fasthttp.StatusRequestHeaderFieldsTooLarge, code: "header_too_large", hangUp: true, message: "the request has more than 100 header fields"}
	refuseSlow      = &refusal{status: fasthttp.StatusRequestTimeout, code: "request_timeout", hangUp: true, message: "the request did not arrive in time"}
	refuseBodyRead  = &refusal{status: fasthttp.StatusBadRequest, code: "invalid_body", hangUp: true, message: "the request's body is framed badly"}
	refuseBodySize  = &refusal{status: fasthttp.StatusRequestEntityTooLarge, code: "request_too_large", hangUp: true, message: "the request's body is larger than limits.body"}
	refuseBudget    = &refusal{status: fasthttp.StatusServiceUnavailable, code: "overloaded", hangUp: true, retry: 1, reason: "rejected-saturated", message: "too many request bodies are in memory: try again"}
	refuseEncoding  = &refusal{status: fasthttp.StatusUnsupportedMediaType, code: "unsupported_encoding", hangUp: true, message: "the body is compressed: send it as it is"}
	refuseExpect    = &refusal{status: fasthttp.StatusExpectationFailed, code: "expectation_failed", hangUp: true, message: "the only expectation that can be met is 100-continue"}
	refuseNoBody    = &refusal{status: fasthttp.StatusBadRequest, code: "invalid_request", hangUp: true, message: "this route takes no body"}
	refuseRoute     = &refusal{status: fasthttp.StatusNotFound, code: "route_not_found", message: "there is no such route here; routes.passthrough opens more of a replica's paths"}
	refuseParser    = &refusal{status: fasthttp.StatusNotFound, code: "route_not_found", message: "no configured parser reads this route: see requestHandler.parsers"}
	refuseDraining  = &refusal{status: fasthttp.StatusServiceUnavailable, code: "draining", retry: 1, reason: "rejected-shutting-down", hangUp: true, message: "this gateway is shutting down"}
	refuseEndpoints = &refusal{unsent: true, status: fasthttp.StatusServiceUnavailable, code: "no_ready_replicas", retry: 1, reason: "rejected-no-endpoints", message: "no replica is available"}
	refuseFiltered  = &refusal{status: fasthttp.StatusTooManyRequests, code: "saturated", retry: 1, reason: "rejected-saturated", message: "no replica has room"}
	refuseNoModel   = &refusal{status: fasthttp.StatusBadRequest, code: "model_missing", param: "model", message: "the request names no model and more than one is served: set model"}
	refuseFormModel = &refusal{status: fasthttp.StatusBadRequest, code: "model_missing", param: "model", hangUp: true,
		message: "no model was found in the first part of the form and more than one is served: send the model field before the file, or add ?model= to the URL"}
	refusePrevious = &refusal{status: fasthttp.StatusNotImplemented, code: "not_supported", param: "previous_response_id",
		message: "previous_response_id is not supported: the stored response lives in one replica's memory; send the whole conversation in input instead"}
	refuseBackground = &refusal{status: fasthttp.StatusNotImplemented, code: "not_supported", param: "background",
		message: "background responses are not supported: they are fetched by id from one replica's memory; use stream or a plain answer"}
	refusePanic   = &refusal{status: fasthttp.StatusInternalServerError, code: "internal_error", hangUp: true, message: "the gateway failed to handle this request"}
	refuseConnect = &refusal{unsent: true, status: fasthttp.StatusBadGateway, code: "upstream_connect_error", message: "the replica could not be reached"}
	refuseReset   = &refusal{status: fasthttp.StatusBadGateway, code: "upstream_reset", message: "the replica broke off before it answered"}
	refuseAnswer  = &refusal{status: fasthttp.StatusBadGateway, code: "upstream_malformed", message: "the replica's answer could not be read"}
	refuseTimeout = &refusal{status: fasthttp.StatusGatewayTimeout, code: "upstream_timeout", message: "the replica did not answer within upstream.header_timeout"}
)

func modelNotFound(model []byte) *refusal {
	const most = 200
	name := string(model[:min(len(model), most)])
	return &refusal{status: fasthttp.StatusNotFound, code: "model_not_found", param: "model", message: "the model " + strconv.Quote(name) + " does not exist: GET /v1/models lists those that do"}
}

// routingRefusal turns an error of a decision into an answer.
func routingRefusal(err error, model []byte) *refusal {
	switch {
	case errors.Is(err, routing.ErrModelNotFound):
		return modelNotFound(model)
	case errors.Is(err, routing.ErrModelMissing):
		return refuseNoModel
	case errors.Is(err, routing.ErrFiltered):
		return refuseFiltered
	}
	return refuseEndpoints
}

// openAIType returns error.type as OpenAI's API names it.
func openAIType(status int) string {
	switch {
	case status == fasthttp.StatusTooManyRequests:
		return "rate_limit_error"
	case status == fasthttp.StatusUnauthorized:
		return "authentication_error"
	case status == fasthttp.StatusForbidden:
		return "permission_error"
	case status < fasthttp.StatusInternalServerError:
		return "invalid_request_error"
	}
	return "server_error"
}

// anthropicType returns error.type as Anthropic's API names it.
func anthropicType(status int) string {
	switch status {
	case fasthttp.StatusUnauthorized:
		return "authentication_error"
	case fasthttp.StatusForbidden:
		return "permission_error"
	case fasthttp.StatusNotFound:
		return "not_found_error"
	case fasthttp.StatusRequestEntityTooLarge:
		return "request_too_large"
	case fasthttp.StatusTooManyRequests:
		return "rate_limit_error"
	case fasthttp.StatusServiceUnavailable:
		return "overloaded_error"
	}
	if status < fasthttp.StatusInternalServerError {
		return "invalid_request_error"
	}
	return "api_error"
}

// errorBody renders an error in the dialect of a route.
func errorBody(d dialect, status int, code, message, param, id string) []byte {
	var v any
	switch d {
	case dialectAnthropic:
		type detail struct {
			Type    string `json:"type"`
			Message string `json:"message"`
		}
		v = struct {
			Type      string `json:"type"`
			Error     detail `json:"error"`
			RequestID string `json:"request_id,omitempty"`
		}{"error", detail{anthropicType(status), message}, id}
	case dialectCohere:
		v = struct {
			ID      string `json:"id,omitempty"`
			Message string `json:"message"`
		}{id, message}
	default:
		type detail struct {
			Message string  `json:"message"`
			Type    string  `json:"type"`
			Param   *string `json:"param"`
			Code    string  `json:"code"`
		}
		x := detail{Message: message, Type: openAIType(status), Code: code}
		if param != "" {
			x.Param = &param
		}
		v = struct {
			Error detail `json:"error"`
		}{x}
	}
	body, err := json.Marshal(v)
	if err != nil { // strings always marshal
		return []byte(`{"error":{"message":"internal error"}}`)
	}
	return body
}

// errorEvent renders an error as an event of a stream in the dialect of a route.
func errorEvent(rt *route, status int, code, message string) []byte {
	body := errorBody(rt.dialect, status, code, message, "", "")
	var head string
	switch {
	case rt.dialect == dialectAnthropic:
		head = "event: error\n"
	case rt.ending == endingResponses:
		head = "event: error\n"
		type event struct {
			Type    string  `json:"type"`
			Code    string  `json:"code"`
			Message string  `json:"message"`
			Param   *string `json:"param"`
		}
		if b, err := json.Marshal(event{Type: "error", Code: code, Message: message}); err == nil {
			body = b
		}
	}
	out := make([]byte, 0, len(head)+len(body)+8)
	out = append(out, head...)
	out = append(out, "data: "...)
	out = append(out, body...)
	return append(out, "\n\n"...)
}

// write puts the refusal into the response.
func (r *refusal) write(ctx *fasthttp.RequestCtx, d dialect, id string) {
	ctx.Response.ResetBody()
	ctx.SetStatusCode(r.status)
	h := &ctx.Response.Header
	h.SetContentType("application/json")
	h.Set("x-request-id", id)
	if r.retry > 0 {
		h.Set("Retry-After", strconv.Itoa(r.retry))
	}
	if r.reason != "" {
		h.Set("x-llm-d-request-dropped-reason", r.reason)
	}
	if r.status == fasthttp.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	if r.allow != 0 {
		h.Set("Allow", r.allow.allow())
	}
	if r.hangUp {
		ctx.SetConnectionClose()
	}
	ctx.Response.SetBodyRaw(errorBody(d, r.status, r.code, r.message, r.param, id))
}
