package proxy

import (
	"encoding/json"
	"slices"

	"github.com/valyala/fasthttp"
)

// modelJSON is a model as OpenAI's API lists it. The path of its weights, which
// vLLM adds, is left out: it is the replica's own business.
type modelJSON struct {
	ID          string  `json:"id"`
	Object      string  `json:"object"`
	Created     int64   `json:"created"`
	OwnedBy     string  `json:"owned_by"`
	Parent      *string `json:"parent"`
	MaxModelLen *int64  `json:"max_model_len"`
}

func (m *ModelCard) json() modelJSON {
	j := modelJSON{ID: m.ID, Object: "model", Created: m.Created, OwnedBy: m.OwnedBy}
	if j.OwnedBy == "" {
		j.OwnedBy = "kvgate"
	}
	if m.Parent != "" {
		j.Parent = &m.Parent
	}
	if m.MaxModelLen > 0 {
		j.MaxModelLen = &m.MaxModelLen
	}
	return j
}

// models returns the models of all replicas, each id once. Of cards that differ
// the first counts, but for the length, of which the smallest does. Those that a
// key may not use are left out.
func (s *Server) models(key *apiKey) []modelJSON {
	var cards []ModelCard
	if s.o.ModelCards != nil {
		cards = s.o.ModelCards()
	}
	if len(cards) == 0 {
		for _, name := range s.o.Fleet.ModelNames() {
			cards = append(cards, ModelCard{ID: name})
		}
	}
	list := make([]modelJSON, 0, len(cards))
	at := make(map[string]int, len(cards))
	for i := range cards {
		if key.restricted() && !slices.Contains(key.Models, cards[i].ID) {
			continue
		}
		j := cards[i].json()
		k, again := at[j.ID]
		if !again {
			at[j.ID] = len(list)
			list = append(list, j)
			continue
		}
		if old := list[k].MaxModelLen; j.MaxModelLen != nil && (old == nil || *j.MaxModelLen < *old) {
			list[k].MaxModelLen = j.MaxModelLen
		}
	}
	return list
}

// answerOwn answers what needs no replica.
func (x *exchange) answerOwn() {
	s := x.s
	if x.rec.method == "OPTIONS" {
		x.ctx.SetStatusCode(fasthttp.StatusNoContent)
		x.ctx.Response.Header.Set("Allow", x.route.methods.allow())
		x.ctx.Response.Header.Set("x-request-id", x.rec.id)
		x.rec.status, x.rec.phase = fasthttp.StatusNoContent, phaseDone
		return
	}
	switch x.route.kind {
	case kindModels:
		if len(s.o.Fleet.Endpoints()) == 0 {
			x.refuse(refuseEndpoints)
			return
		}
		x.reply(fasthttp.StatusOK, struct {
			Object string      `json:"object"`
			Data   []modelJSON `json:"data"`
		}{"list", s.models(x.key)})
	case kindModel:
		id := unescape(nil, x.path[len("/v1/models/"):], false)
		for _, m := range s.models(x.key) {
			if m.ID == string(id) {
				x.reply(fasthttp.StatusOK, m)
				return
			}
		}
		x.refuse(modelNotFound(id))
	case kindAlive:
		x.reply(fasthttp.StatusOK, healthJSON{Status: "ok"})
	case kindReady:
		switch err := s.ready(); {
		case err != nil:
			x.reply(fasthttp.StatusServiceUnavailable, healthJSON{"unavailable", err.Error()})
		default:
			x.reply(fasthttp.StatusOK, healthJSON{Status: "ok"})
		}
	case kindVersion:
		x.reply(fasthttp.StatusOK, struct {
			Version string `json:"version"`
		}{s.o.Version})
	case kindLoad:
		x.reply(fasthttp.StatusOK, struct {
			Load int `json:"server_load"`
		}{s.InFlight() - 1}) // without this one
	}
}

type healthJSON struct {
	Status string `json:"status"`
	Reason string `json:"reason,omitempty"`
}

func (x *exchange) reply(status int, v any) {
	body, err := json.Marshal(v)
	if err != nil { // plain structs always marshal
		x.refuse(refusePanic)
		return
	}
	h := &x.ctx.Response.Header
	x.ctx.SetStatusCode(status)
	h.SetContentType("application/json")
	h.Set("x-request-id", x.rec.id)
	if status == fasthttp.StatusServiceUnavailable {
		h.Set("Retry-After", "1")
	}
	if x.s.draining.Load() {
		x.ctx.SetConnectionClose()
	}
	x.ctx.Response.SetBodyRaw(body)
	x.rec.status, x.rec.phase, x.rec.bytesOut = status, phaseDone, int64(len(body))
}
