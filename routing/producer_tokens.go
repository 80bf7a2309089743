package routing

import "fmt"

// newTokenProducer makes llm-d's token-producer with the estimate backend: four bytes
// of the rendered prompt stand for one token.
type tokenParams struct {
	ModelName string          `json:"modelName"`
	Estimate  *EstimateParams `json:"estimate"`
	VLLM      *struct {
		URL       string `json:"url"`
		Timeout   string `json:"timeout"`
		MMTimeout string `json:"mmTimeout"`
	} `json:"vllm"`
	UDS *struct{} `json:"udsTokenizerConfig"`
}

func newTokenProducer(b *builder) (any, error) {
	estimate := DefaultEstimateParams()
	p := tokenParams{}
	if err := b.params(&p); err != nil {
		return nil, err
	}
	switch {
	case p.UDS != nil:
		return nil, b.problem("remove it: the estimate backend needs no tokenizer service", "udsTokenizerConfig is not supported")
	case p.VLLM != nil || p.ModelName != "":
		return nil, b.problem("use estimate, or leave the parameters out", "the vLLM render backend (vllm, modelName) is not supported yet")
	case p.Estimate != nil:
		estimate = *p.Estimate
	}
	e, err := NewEstimator(estimate)
	if err != nil {
		return nil, b.problem("see docs/configuration.md", fmt.Sprintf("estimate: %v", err))
	}
	return e, nil
}
