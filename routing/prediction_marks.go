package routing

// marks remember how many tokens engines have found in their caches of prompts that
// had the same block as the last that matched. The blocks of an estimated prompt are
// four times as long as an engine's, or longer, and what two prompts have in common
// ends somewhere within one; but it ends where it ended before, mostly: behind a
// system prompt, a document, or the last turn of a conversation and its answer.
//
// A mark is in the engine's tokens, so that it owes nothing to bytes per token. It
// says nothing about who holds the block, and changes no decision.
type marks struct {
	cells []markCell // by hash; what comes later replaces what was there
}

type markCell struct {
	hash   uint64
	tokens int64
}

const markCells = 1 << 15 // half a MiB for a producer that uses them

func (m *marks) cell(hash uint64) *markCell { return &m.cells[hash%markCells] }

func (m *marks) set(hash uint64, tokens int64) {
	if m.cells == nil {
		m.cells = make([]markCell, markCells)
	}
	*m.cell(hash) = markCell{hash, tokens}
}

// at returns what was found of prompts whose last block that matched is the one with
// the hash, -1 when nothing is known.
func (m *marks) at(hash uint64) int64 {
	if m.cells == nil || m.cell(hash).hash != hash {
		return -1
	}
	return m.cell(hash).tokens
}

// remember keeps the chain of the request that is being decided for mark. Blocks of
// real tokens that the engine tells, and those of a trace, are all that there is.
func (col *Column) remember(r *Request, ch *chain) {
	if col.hashes = nil; len(ch.ends) == 1 && len(col.Cached) == 0 && col.engineBlock == 0 && r.given == nil {
		col.hashes = ch.hashes
	}
}

// mark returns the tokens that the candidate of a row should hold by what others of
// its kind have held, -1 when nothing is known.
func (col *Column) mark(row int) int64 {
	if m := int(col.Matched[row]); 0 < m && m <= len(col.hashes) {
		return col.predictions.marks.at(col.hashes[m-1])
	}
	return -1
}

// learn takes in an answer for a prompt of which the first matched blocks were
// expected in the cache, of an engine with blocks of so many tokens; 0 is unknown.
func (m *marks) learn(r *Request, ch *chain, matched int, prompt, cached, output, block int64) {
	found := float64(cached) / float64(prompt) * float64(r.hashedTokens()) / float64(ch.blockTokens)
	if matched > 0 && found > float64(matched-1) { // else the replica has lost it
		m.set(ch.hashes[matched-1], cached)
	}
	if block == 0 {
		return
	}
	whole, last := int(r.hashedTokens())/ch.blockTokens, len(ch.hashes)
	// Whoever goes on with this prompt finds all of it, and the answer but for its
	// last token, which was not computed; the same prompt again finds itself.
	if n := min(whole, last); n > matched {
		m.set(ch.hashes[n-1], (prompt+output-1)/block*block)
	}
	if last > max(whole, matched) {
		m.set(ch.hashes[last-1], (prompt-1)/block*block)
	}
}
