package scrape

import (
	"cmp"
	"encoding/json"
	"errors"
	"math"
	"slices"

	"kvgate/routing"
)

// ModelCard describes one model as the replicas list it.
type ModelCard struct {
	ID          string
	Created     int64 // Unix seconds, 0 when unknown
	OwnedBy     string
	Parent      string // base model of a LoRA adapter, "" for a base model
	MaxModelLen int64  // tokens, 0 when unknown
}

// maxModelMisses is how many failed reads in a row make a model list unknown, so
// that the replica may serve anything. Until then the last list stays. A replica
// that cannot be reached keeps its list: it tells what it will serve again.
const maxModelMisses = 3

// parseModels reads the answer of GET /v1/models. A list without an entry says
// nothing: engines give it while they load.
func parseModels(body []byte) ([]ModelCard, error) {
	var list struct {
		Data []struct {
			ID          any `json:"id"`
			Created     any `json:"created"`
			OwnedBy     any `json:"owned_by"`
			Parent      any `json:"parent"`
			MaxModelLen any `json:"max_model_len"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, err
	}
	cards := make([]ModelCard, 0, len(list.Data))
	for _, d := range list.Data {
		if id := text(d.ID); id != "" {
			cards = append(cards, ModelCard{ID: id, Created: whole(d.Created), OwnedBy: text(d.OwnedBy), Parent: text(d.Parent), MaxModelLen: whole(d.MaxModelLen)})
		}
	}
	if len(cards) == 0 {
		return nil, errors.New("the list has no model")
	}
	return mergeCards(cards), nil
}

// text and whole take what other engines than vLLM may write in a field for what it is worth.
func text(v any) string {
	s, _ := v.(string)
	return s
}

func whole(v any) int64 {
	f, ok := v.(float64)
	if !ok || !(f >= 0 && f < math.MaxInt64) {
		return 0
	}
	return int64(f)
}

// mergeCards sorts cards by ID and makes one of those that share it: the
// smallest length, the earliest time, the first owner and parent that are told.
func mergeCards(cards []ModelCard) []ModelCard {
	slices.SortStableFunc(cards, func(a, b ModelCard) int { return cmp.Compare(a.ID, b.ID) })
	least := func(a, b int64) int64 {
		if a == 0 || b == 0 {
			return max(a, b)
		}
		return min(a, b)
	}
	out := cards[:0]
	for _, c := range cards {
		if len(out) == 0 || out[len(out)-1].ID != c.ID {
			out = append(out, c)
			continue
		}
		last := &out[len(out)-1]
		last.Created, last.MaxModelLen = least(last.Created, c.Created), least(last.MaxModelLen, c.MaxModelLen)
		last.OwnedBy, last.Parent = cmp.Or(last.OwnedBy, c.OwnedBy), cmp.Or(last.Parent, c.Parent)
	}
	return out
}

// ModelCards returns the models of all endpoints that are not draining, sorted
// by ID; what replicas say differently of one model is merged. The replicas'
// file paths (root) are not kept.
func (m *Manager) ModelCards() []ModelCard {
	var all []ModelCard
	for _, w := range m.snapshot() {
		if cards := w.cards.Load(); cards != nil && m.fleet.State(w.endpoint) != routing.Draining {
			all = append(all, *cards...)
		}
	}
	return mergeCards(all)
}
