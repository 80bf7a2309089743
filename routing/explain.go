package routing

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// Explanation is everything that led to one decision, for people and tools.
type Explanation struct {
	Model       string           `json:"model"`
	Profile     string           `json:"profile"`
	Total       int              `json:"total"`        // blocks of the prompt
	BlockTokens int              `json:"block_tokens"` // tokens per block
	Replicas    []ExplainReplica `json:"replicas"`     // in ID order
	Winner      string           `json:"winner"`
	Ties        int              `json:"ties"` // candidates with the winner's total
	Reason      string           `json:"reason"`
	Tokens      string           `json:"tokens,omitempty"`  // where they came from, with a render or a local backend: see TokenSource
	Prompts     []ExplainPrompt  `json:"prompts,omitempty"` // only when asked for: see ExplainTokens

	rows []int // candidate row -> index in Replicas
}

// ExplainPrompt is one prompt of a request as it is hashed.
type ExplainPrompt struct {
	Text   string         `json:"text,omitempty"` // as the local tokenizer has rendered it, special tokens around it left out
	Blocks []ExplainBlock `json:"blocks"`
}

// ExplainBlock is a block of a prompt's tokens. The last one may be short: it is not hashed then.
type ExplainBlock struct {
	Tokens []ExplainToken `json:"tokens"`
}

// ExplainToken is a token: of an estimate four bytes of the prompt.
type ExplainToken struct {
	ID   uint32 `json:"id"`
	Text string `json:"text,omitempty"` // where it is known
}

// ExplainTokens adds the prompts' tokens, block by block, to what Explain has said of the request.
func (r *Router) ExplainTokens(req *Request, ex *Explanation) {
	local, _ := r.tokenizer.(*localTokenizer)
	if req.Source != TokensLocal {
		local = nil
	}
	var texts []string
	var names map[uint32]string
	if local != nil {
		texts, names = local.texts(req), local.bpe.tokenTexts()
	}
	size := ex.BlockTokens
	if size <= 0 {
		size = 64
	}
	start := 0
	for i, end := range req.Ends {
		p := ExplainPrompt{Blocks: []ExplainBlock{}}
		if i < len(texts) {
			p.Text = texts[i]
		}
		for at := start; at < end; at += size * bytesPerToken {
			var b ExplainBlock
			for k := at; k < min(at+size*bytesPerToken, end); k += bytesPerToken {
				t := ExplainToken{ID: binary.LittleEndian.Uint32(req.Tokens[k:])}
				switch {
				case local != nil:
					t.Text = names[t.ID]
				case !req.Exact:
					t.Text = string(req.Tokens[k : k+bytesPerToken])
				}
				b.Tokens = append(b.Tokens, t)
			}
			p.Blocks = append(p.Blocks, b)
		}
		start = end
		ex.Prompts = append(ex.Prompts, p)
	}
}

// ExplainReplica is one replica's part in a decision.
type ExplainReplica struct {
	Name       string         `json:"name"`
	FilteredBy string         `json:"filtered_by,omitempty"` // the filter, or the state, that left it out
	Match      int            `json:"match"`                 // leading blocks it is believed to hold
	Scores     []ExplainScore `json:"scores"`
	Total      float64        `json:"total"`

	endpoint *Endpoint
}

// ExplainScore is one scorer's word on one replica.
type ExplainScore struct {
	Plugin   string   `json:"plugin"`
	Weight   float64  `json:"weight"`
	Raw      *float64 `json:"raw"` // null: no opinion
	Weighted float64  `json:"weighted"`
	Terms    []Term   `json:"terms,omitempty"` // what the score was made of
}

// Explain decides without dispatching: nothing is counted or recorded.
func (r *Router) Explain(req *Request) (*Explanation, error) {
	endpoints, err := r.fleet.view.Load().resolve(req)
	if err != nil {
		return nil, err
	}
	req.work.dry = true
	r.prepare(req, endpoints)
	f := r.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	ex := &Explanation{Model: string(req.Model), Profile: r.profile}
	if _, estimates := r.tokenizer.(*Estimator); !estimates && r.tokenizer != nil {
		ex.Tokens = req.Source.String()
	}
	for _, e := range f.Endpoints() {
		x := ExplainReplica{Name: e.DisplayName(), Scores: []ExplainScore{}, endpoint: e}
		if !slices.Contains(endpoints, e) {
			x.FilteredBy = "model"
		} else if s := e.stateAt(f.now()); s != Ready {
			x.FilteredBy = s.String()
		}
		ex.Replicas = append(ex.Replicas, x)
	}
	c, i, ties, degraded, err := r.decide(req, endpoints, ex)
	if err != nil {
		return ex, err
	}
	var l Lease
	r.predict(&l, req, c, i)
	if degraded {
		l.Reason = ReasonFallback
	}
	ex.Winner, ex.Ties, ex.Reason = c[i].Endpoint.DisplayName(), ties, l.Reason.String()
	return ex, nil
}

// The methods below are called on a nil Explanation on the request path.

func (ex *Explanation) pinned(c []Candidate) {
	if ex == nil {
		return
	}
	ex.rows = make([]int, len(c))
	for k := range c {
		i := slices.IndexFunc(ex.Replicas, func(x ExplainReplica) bool { return x.endpoint == c[k].Endpoint })
		ex.rows[k] = i
		ex.Replicas[i].FilteredBy = ""
	}
}

func (ex *Explanation) matched(col *Column) {
	if ex == nil {
		return
	}
	ex.Total, ex.BlockTokens = col.Total, col.BlockTokens
	for k, i := range ex.rows {
		ex.Replicas[i].Match = int(col.Matched[k])
	}
}

func (ex *Explanation) filtered(filter string, left []Candidate) {
	if ex == nil {
		return
	}
	for k, i := range ex.rows {
		if !slices.ContainsFunc(left, func(c Candidate) bool { return c.Row == k }) && ex.Replicas[i].FilteredBy == "" {
			ex.Replicas[i].FilteredBy = filter
		}
	}
}

func (ex *Explanation) scored(r *Request, s weightedScorer, c []Candidate, scores []float64) {
	if ex == nil {
		return
	}
	for k := range c {
		x := &ex.Replicas[ex.rows[c[k].Row]]
		score := ExplainScore{Plugin: s.name, Weight: s.weight}
		if v := scores[k]; !math.IsNaN(v) {
			v = min(max(v, 0), 1)
			score.Raw, score.Weighted = &v, v*s.weight
		}
		if t, ok := s.Scorer.(Termer); ok {
			score.Terms = t.Terms(r, c, k)
		}
		x.Scores = append(x.Scores, score)
	}
}

func (ex *Explanation) picked(c []Candidate, totals []float64, picked, ties int) {
	if ex == nil {
		return
	}
	for k := range c {
		ex.Replicas[ex.rows[c[k].Row]].Total = totals[k]
	}
	ex.Winner, ex.Ties = c[picked].Endpoint.DisplayName(), ties
}

// seeder is an observer to which Picked is no proof.
type seeder interface {
	seed(ch *chain, e *Endpoint)
}

// Seed records that an endpoint holds the first match blocks of the request's
// prompt: for explaining against a saved fleet.
func (r *Router) Seed(req *Request, e *Endpoint, match int) error {
	endpoints, err := r.fleet.view.Load().resolve(req)
	if err != nil {
		return err
	}
	req.work.dry = true
	r.prepare(req, endpoints)
	r.fleet.mu.Lock()
	defer r.fleet.mu.Unlock()
	for _, o := range r.observers {
		ch := req.work.chains[o.producer]
		if match < 0 || match > len(ch.hashes) {
			return fmt.Errorf("replica %s: match %d is outside the prompt's 0..%d blocks", e.DisplayName(), match, len(ch.hashes))
		}
		ch.hashes, ch.ends = ch.hashes[:match], []int{match}
		ch.held, ch.fresh = nil, nil
		if s, ok := o.Observer.(seeder); ok {
			s.seed(&ch, e)
			continue
		}
		o.Picked(req, &ch, e)
	}
	return nil
}
