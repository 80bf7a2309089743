package routing

import "fmt"

// prefixScorer prefers endpoints that hold the prompt's head:
//
//	w * min(1, match*block/S)^2 + (1-w) * match/total
//
// with w = matchLengthWeight and S = matchLengthScaleTokens; 0 without a match.
// Where the two integers come from is the producer's business.
type prefixScorer struct {
	column int
	weight float64
	scale  float64 // tokens
}

type prefixParams struct {
	Producer    string  `json:"prefixMatchInfoProducerName"`
	Weight      float64 `json:"matchLengthWeight"`
	ScaleTokens float64 `json:"matchLengthScaleTokens"`
}

const defaultProducer = "approx-prefix-cache-producer"

func newPrefixScorer(b *builder) (any, error) {
	producer := defaultProducer
	if b.spec.Type == clusterScorer {
		producer = clusterProducer
	}
	p := prefixParams{Producer: producer, ScaleTokens: 8192}
	if err := b.params(&p); err != nil {
		return nil, err
	}
	if p.Producer == "" {
		p.Producer = producer
	}
	if p.Weight < 0 || p.Weight > 1 {
		return nil, b.problem("use a value from 0 to 1", fmt.Sprintf("matchLengthWeight %v is out of range", p.Weight))
	}
	if p.Weight > 0 && p.ScaleTokens <= 0 {
		return nil, b.problem("use a number of tokens above 0", fmt.Sprintf("matchLengthScaleTokens %v is out of range", p.ScaleTokens))
	}
	return prefixScorer{column: b.column(p.Producer), weight: p.Weight, scale: p.ScaleTokens}, nil
}

// Terms shows what the prediction is and how good the last ones were.
func (s prefixScorer) Terms(r *Request, c []Candidate, i int) []Term {
	col := r.column(s.column)
	terms := []Term{{"predicted_tokens", float64(r.cached(col, c[i].Row))}}
	if p := col.predictions.of(c[i].Endpoint); p.Answers > 0 {
		terms = append(terms, Term{"prediction_error", p.Error})
	}
	return terms
}

func (s prefixScorer) Score(r *Request, c []Candidate, out []float64) {
	col := r.column(s.column)
	if col.Total == 0 {
		clear(out)
		return
	}
	last, score := int32(0), 0.0 // most are like the one before
	matched := col.Matched
	if len(c) == len(matched) { // in order: a thousand candidates need not be read for their rows
		out = out[:len(matched)]
		for i, m := range matched {
			if m != last {
				last, score = m, s.score(float64(m), col)
			}
			out[i] = score
		}
		return
	}
	for i := range c {
		out[i] = s.score(float64(matched[c[i].Row]), col)
	}
}

func (s prefixScorer) score(matched float64, col *Column) float64 {
	score := matched / float64(col.Total)
	if s.weight > 0 {
		long := min(1, matched*float64(col.BlockTokens)/s.scale)
		score = s.weight*long*long + (1-s.weight)*score
	}
	return score
}
