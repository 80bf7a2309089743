package routing

// hostedScorer is a precise-prefix-cache-scorer that brings its own producer.
type hostedScorer struct {
	prefixScorer
	*preciseProducer
}

// newPreciseScorer makes llm-d's deprecated scorer: the prefix-cache-scorer of the
// one precise-prefix-cache-producer that is declared, or of one of its own with
// that producer's parameters.
func newPreciseScorer(b *builder) (any, error) {
	producer, n := "", 0
	for _, s := range b.specs {
		if s.Type == preciseProducerType {
			producer = s.Name
			n++
		}
	}
	b.warn("plugin type " + preciseScorerType + " is deprecated: write prefix-cache-scorer with prefixMatchInfoProducerName: " + preciseProducerType)
	switch {
	case n > 1:
		return nil, b.problem("write prefix-cache-scorer with prefixMatchInfoProducerName: the name of one of them", "several "+preciseProducerType+" are declared")
	case n == 1:
		if !b.spec.Parameters.IsZero() {
			b.warn("its parameters have no effect: those of " + producer + " count")
		}
		return prefixScorer{column: b.column(producer)}, nil
	}
	p, err := b.precise(true)
	if err != nil {
		return nil, err
	}
	return hostedScorer{prefixScorer{column: b.column(b.spec.Name)}, p}, nil
}
