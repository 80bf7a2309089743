package routing

// prompt is what Parse found of a request's prompts: pieces of text in the
// scanner's output and assets. A section is what one field of the body adds;
// sections are hashed in their order, wherever the fields stood in the body. The
// Estimator turns all of it into tokens.
type prompt struct {
	scanner
	pieces   []piece
	late     []piece // the images of a tool result, which follow its text
	sections [maxSections]span
	first    int  // the first piece of the section being read
	done     bool // the pieces became tokens

	recall recall

	modelAt       int // offset of a model that is no string, -1 when there is none
	maxCompletion int64
	extraKey      []byte
	unclear       unclear
}

// unclear holds a bit for every field that makes the cached tokens of the answer
// say something else than what was held of the prompt: vLLM tells of one of several
// samples, the siblings of which find the prompt, and reads no cache where the
// probabilities of the prompt itself are asked for.
type unclear uint8

const (
	unclearSamples unclear = 1 << iota
	unclearLogprobs
	unclearEcho
)

// set notes what the last of equal fields says.
func (u *unclear) set(bit unclear, on bool) {
	if *u &^= bit; on {
		*u |= bit
	}
}

// span is a range of pieces.
type span struct{ from, to int }

// maxSections is the number of fields of which a prompt can consist.
const maxSections = 5

// piece is a part of a prompt.
type piece struct {
	kind   pieceKind
	inBody bool // from and to are offsets in the body, not in the output
	ends   bool // the prompt ends behind this piece
	from   int
	to     int
	hash   uint64 // XXH64 of an asset's content
}

type pieceKind uint8

const (
	pieceText      pieceKind = iota // from..to is text
	pieceIDs                        // from..to is a prompt of token ids
	pieceImageURL                   // from..to is a URL
	pieceImageData                  // from..to is base64
	pieceVideo
	pieceAudio // to-from is the content's length in bytes
)

// maxKeptBytes and maxKeptItems bound the memory that a pooled request keeps
// after an unusually large body.
const (
	maxKeptBytes = 4 << 20
	maxKeptItems = maxKeptBytes / 32
)

// kept empties a buffer for its next use and drops it when it grew too large.
func kept[T any](buf []T, limit int) []T {
	if cap(buf) > limit {
		return nil
	}
	return buf[:0]
}

func (p *prompt) reset() {
	p.scanner.reset(nil)
	p.out = kept(p.out, maxKeptBytes)
	p.name = kept(p.name, maxKeptBytes)
	p.canon.nodes = kept(p.canon.nodes, maxKeptItems)
	p.canon.order = kept(p.canon.order, maxKeptItems)
	p.canon.keys = kept(p.canon.keys, maxKeptBytes)
	p.pieces = kept(p.pieces, maxKeptItems)
	p.late = kept(p.late, maxKeptItems)
	p.sections = [maxSections]span{}
	p.recall.reset()
	p.done = false
	p.maxCompletion, p.extraKey, p.modelAt, p.unclear = 0, nil, -1, 0
}

// Parse scans r.Body once. It fills Model, Salt, Stream, WantsUsage, MaxTokens
// and Weight, and keeps what a Tokenizer needs of the prompt. The error is a
// *BodyError when the body is no JSON object or its model is no string. What
// else the fields hold is the engine's business: a prompt of an unknown shape
// has no tokens and is routed on load.
func (r *Request) Parse() error {
	p := &r.prompt
	p.reset()
	p.scanner.reset(r.Body)
	if cap(r.Tokens) > cap(p.out) {
		// Tokenize has swapped them. One large buffer, still warm, does for both.
		r.Tokens, p.out = p.out, r.Tokens[:0]
	}
	p.recall.begin(r.Memo, r.API, len(r.Body))
	r.Weight = 1
	r.Found = r.Found[:0]
	i := p.space(0)
	if p.peek(i) != '{' {
		p.fail(i, "expected a JSON object")
		return p.place()
	}
	i, more := p.open(i, '}')
	for more {
		from := i
		var key []byte
		if key, i = p.key(i); i >= 0 {
			watched := r.watched(key)
			value := i
			if i = r.field(key, i); watched >= 0 && i >= 0 {
				r.Found = append(r.Found, Member{watched, from, value, i})
			}
		}
		i, more = p.next(i, '}')
	}
	if i >= 0 {
		if i = p.space(i); i < len(p.b) {
			p.fail(i, "expected nothing behind the JSON object")
		} else if p.modelAt >= 0 {
			p.fail(p.modelAt, "model must be a string")
		}
	}
	if p.err != nil {
		return p.place()
	}
	if p.maxCompletion > 0 {
		r.MaxTokens = p.maxCompletion
	}
	if len(r.Salt) == 0 {
		r.Salt = p.extraKey
	}
	p.choose(r.API)
	return nil
}

// watched returns the index of a key in Watch, -1 when it is not there.
func (r *Request) watched(key []byte) int {
	for i, name := range r.Watch {
		if string(key) == name {
			return i
		}
	}
	return -1
}

// field reads the value at i of a field of the body. The last of equal fields
// counts, as in Python.
func (r *Request) field(key []byte, i int) int {
	p := &r.prompt
	switch string(key) {
	case "model":
		p.modelAt = -1
		if c := p.peek(i); c != '"' && c != 'n' {
			p.modelAt = i
		}
		r.Model, i = r.keep(i)
		return i
	case "cache_salt":
		r.Salt, i = r.keep(i)
		return i
	case "stream":
		r.Stream = p.peek(i) == 't'
		return p.skip(i)
	case "stream_options":
		r.WantsUsage, i = p.includeUsage(i)
		return i
	case "n":
		samples, end := p.count(i)
		p.unclear.set(unclearSamples, samples > 1)
		return end
	case "prompt_logprobs":
		p.unclear.set(unclearLogprobs, p.peek(i) != 'n')
		return p.skip(i)
	case "echo":
		p.unclear.set(unclearEcho, p.peek(i) == 't')
		return p.skip(i)
	}
	switch r.API {
	case APIChat, APIChatBatch:
		switch string(key) {
		case "tools":
			return p.section(0, i, (*prompt).tools)
		case "messages":
			if r.API == APIChatBatch {
				return r.batch(i)
			}
			return p.section(1, i, (*prompt).messages)
		case "max_completion_tokens":
			p.maxCompletion, i = p.count(i)
			return i
		case "max_tokens":
			r.MaxTokens, i = p.count(i)
			return i
		}
	case APIMessages:
		switch string(key) {
		case "tools":
			return p.section(0, i, (*prompt).anthropicTools)
		case "system":
			return p.section(1, i, (*prompt).anthropicSystem)
		case "messages":
			return p.section(2, i, (*prompt).anthropicMessages)
		case "max_tokens":
			r.MaxTokens, i = p.count(i)
			return i
		}
	case APICompletions:
		switch string(key) {
		case "prompt":
			return p.section(0, i, (*prompt).prompts)
		case "max_tokens":
			r.MaxTokens, i = p.count(i)
			return i
		}
	case APIEmbeddings:
		switch string(key) {
		case "input":
			return p.section(0, i, (*prompt).embeddings)
		case "messages":
			return p.section(1, i, (*prompt).messages)
		}
	case APIResponses:
		switch string(key) {
		case "instructions":
			return p.section(0, i, (*prompt).value)
		case "tools":
			return p.section(1, i, (*prompt).value)
		case "input":
			return p.section(2, i, (*prompt).value)
		case "max_output_tokens":
			r.MaxTokens, i = p.count(i)
			return i
		}
	case APIGenerate:
		switch string(key) {
		case "token_ids":
			return p.section(0, i, (*prompt).tokenIDs)
		case "input_ids": // of SGLang
			return p.section(1, i, (*prompt).tokenIDs)
		case "sampling_params":
			r.MaxTokens, i = p.samplingParams(i)
			return i
		case "extra_key":
			p.extraKey, i = r.keep(i)
			return i
		}
	case APIScoring:
		switch string(key) {
		case "query":
			return p.section(0, i, (*prompt).textOrValue)
		case "input":
			return p.section(1, i, (*prompt).textOrValue)
		case "state":
			return p.section(2, i, (*prompt).textOrValue)
		case "instructions":
			return p.section(3, i, (*prompt).textOrValue)
		case "questions":
			return p.section(4, i, (*prompt).textOrValue)
		}
	}
	return p.skip(i)
}

// section reads the value at i with read and makes its pieces section n.
func (p *prompt) section(n, i int, read func(*prompt, int) int) int {
	p.first = len(p.pieces)
	i = read(p, i)
	p.sections[n] = span{p.first, len(p.pieces)}
	return i
}

// choose settles, when all fields are known, which sections make the prompt.
func (p *prompt) choose(api API) {
	switch api {
	case APIEmbeddings, APIGenerate: // one or the other
		if s := p.sections[0]; s.from < s.to {
			p.sections[1] = span{}
		}
	case APIResponses:
		p.responses()
	}
}

// keep returns the string at i for the life of the request, nil when the value
// is none.
func (r *Request) keep(i int) ([]byte, int) {
	p := &r.prompt
	if p.peek(i) != '"' {
		return nil, p.skip(i)
	}
	end, plain := scanString(p.b, i+1)
	switch {
	case end < 0:
		return nil, p.badString(i)
	case plain:
		return p.b[i+1 : end-1], end
	}
	from := len(r.scratch)
	r.scratch, _ = appendString(r.scratch, p.b, i+1)
	return r.scratch[from:len(r.scratch):len(r.scratch)], end
}

func (p *prompt) includeUsage(i int) (wants bool, end int) {
	if p.peek(i) != '{' {
		return false, p.skip(i)
	}
	i, more := p.open(i, '}')
	for more {
		var key []byte
		if key, i = p.key(i); string(key) == "include_usage" {
			wants = p.peek(i) == 't'
		}
		i, more = p.next(p.skip(i), '}')
	}
	return wants, i
}

func (p *prompt) samplingParams(i int) (n int64, end int) {
	if p.peek(i) != '{' {
		return 0, p.skip(i)
	}
	i, more := p.open(i, '}')
	for more {
		var key []byte
		key, i = p.key(i)
		switch string(key) {
		case "max_tokens", "max_new_tokens": // of vLLM, of SGLang
			n, i = p.count(i)
		default:
			i = p.skip(i)
		}
		i, more = p.next(i, '}')
	}
	return n, i
}

// count reads a number of tokens: 0 when the value is no whole number above 0.
func (p *prompt) count(i int) (int64, int) {
	end := p.skip(i)
	if end < 0 {
		return 0, end
	}
	n, ok := wholeNumber(p.b[i:end])
	if !ok {
		return 0, end
	}
	return n, end
}

// text reads the string at i into a piece; any other value is skipped and makes
// an empty piece.
func (p *prompt) text(i int) (piece, int) {
	if p.peek(i) != '"' {
		return piece{}, p.skip(i)
	}
	from := len(p.out)
	out, end := appendString(p.out, p.b, i+1)
	if end < 0 {
		return piece{}, p.badString(i)
	}
	p.out = out
	return piece{from: from, to: len(out)}, end
}

// str reads the string at i without copying it when it is plain.
func (p *prompt) str(i int) (piece, int) {
	if p.peek(i) != '"' {
		return piece{}, p.skip(i)
	}
	end, plain := scanString(p.b, i+1)
	if end >= 0 && plain {
		return piece{inBody: true, from: i + 1, to: end - 1}, end
	}
	return p.text(i)
}

// bytes returns what a piece made by text or str stands for.
func (p *prompt) bytes(c piece) []byte {
	if c.inBody {
		return p.b[c.from:c.to]
	}
	return p.out[c.from:c.to]
}

// add appends text to the prompt.
func (p *prompt) add(c piece) {
	if c.from < c.to {
		p.pieces = push(p.pieces, c)
	}
}

// maxPieces bounds the pieces of a prompt, or a body of nothing but the smallest
// messages would need ten times its size. What comes later is not hashed.
const maxPieces = 1 << 20

func push(pieces []piece, c piece) []piece {
	if len(pieces) >= maxPieces {
		return pieces
	}
	return append(pieces, c)
}

// merge makes one piece of pieces that follow each other in the output, from
// piece n on: mostly the whole of a conversation.
func (p *prompt) merge(n int) {
	last := n - 1
	for _, c := range p.pieces[n:] {
		switch {
		case c.kind == pieceText && c.from == c.to:
		case last >= p.first && c.kind == pieceText && p.pieces[last].kind == pieceText && p.pieces[last].to == c.from:
			p.pieces[last].to = c.to
		default:
			last++
			p.pieces[last] = c
		}
	}
	p.pieces = p.pieces[:last+1]
}

// addLiteral appends text of our own to the prompt.
func (p *prompt) addLiteral(s string) {
	from := len(p.out)
	p.out = append(p.out, s...)
	p.add(piece{from: from, to: len(p.out)})
}

// value reads the value at i as canonical JSON; null is nothing.
func (p *prompt) value(i int) int {
	if p.peek(i) == 'n' {
		return p.skip(i)
	}
	from := len(p.out)
	i = p.canonical(i)
	p.add(piece{from: from, to: len(p.out)})
	return i
}

// textOrValue reads a string as text, any other value as canonical JSON.
func (p *prompt) textOrValue(i int) int {
	if p.peek(i) != '"' {
		return p.value(i)
	}
	c, i := p.text(i)
	p.add(c)
	return i
}

// tools reads the tools of a chat. Without any there is nothing to hash.
func (p *prompt) tools(i int) int {
	if p.peek(i) != '[' || p.peek(p.space(i+1)) == ']' {
		return p.skip(i)
	}
	return p.value(i)
}

// responses wraps the sections into the JSON that stands for the prompt of a
// response: [{"instructions":...},{"tools":...},{"input":...}]. Without an input
// there is no prompt.
func (p *prompt) responses() {
	input := p.sections[2]
	if input.from == input.to {
		p.sections = [maxSections]span{}
		return
	}
	names := [...]string{`{"instructions":`, `{"tools":`, `{"input":`}
	from := len(p.pieces)
	open := "["
	for n, name := range names {
		s := p.sections[n]
		if s.from == s.to {
			continue
		}
		p.addLiteral(open)
		p.addLiteral(name)
		p.pieces = append(p.pieces, p.pieces[s.from:s.to]...)
		open = "},"
	}
	p.addLiteral("}]")
	p.sections = [maxSections]span{{from, len(p.pieces)}}
}
