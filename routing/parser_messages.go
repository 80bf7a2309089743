package routing

import (
	"bytes"

	"github.com/cespare/xxhash/v2"
)

// messages reads the messages of a chat: of each the role, then the content.
func (p *prompt) messages(i int) int { return p.conversation(i, (*prompt).chatBlock) }

// anthropicMessages is messages with the content blocks of Anthropic.
func (p *prompt) anthropicMessages(i int) int { return p.conversation(i, (*prompt).anthropicBlock) }

func (p *prompt) conversation(i int, block func(*prompt, int) int) int {
	if p.peek(i) != '[' {
		return p.skip(i)
	}
	array := i
	i, more := p.open(i, ']')
	if more && p.recall.memo != nil {
		return p.remembered(array, i, block)
	}
	for more {
		i, more = p.next(p.message(i, block), ']')
	}
	return i
}

// remembered is conversation with a Memo; the first message is at i.
func (p *prompt) remembered(array, i int, block func(*prompt, int) int) int {
	more := true
	if end := p.resume(array); end > 0 {
		i, more = p.next(end, ']')
	}
	for more {
		i = p.message(i, block)
		p.mark(i)
		i, more = p.next(i, ']')
	}
	p.closed(i)
	return i
}

func (p *prompt) message(i int, block func(*prompt, int) int) int {
	if p.peek(i) != '{' || len(p.pieces) >= maxPieces {
		return p.skip(i)
	}
	role := len(p.pieces) // the role comes first, wherever it stands
	p.pieces = append(p.pieces, piece{})
	i, more := p.open(i, '}')
	for more {
		var key []byte
		key, i = p.key(i)
		switch string(key) {
		case "role":
			p.pieces[role], i = p.text(i)
		case "content":
			p.pieces = p.pieces[:role+1]
			i = p.content(i, block)
		default:
			i = p.skip(i)
		}
		i, more = p.next(i, '}')
	}
	p.merge(role)
	return i
}

// content reads a message's content: a string or an array of blocks.
func (p *prompt) content(i int, block func(*prompt, int) int) int {
	if p.peek(i) != '[' {
		c, i := p.text(i)
		p.add(c)
		return i
	}
	i, more := p.open(i, ']')
	for more {
		i, more = p.next(block(p, i), ']')
	}
	return i
}

// blockType says what a content block holds.
type blockType uint8

const (
	blockOther blockType = iota
	blockText
	blockImageURL
	blockVideoURL
	blockAudioURL
	blockInputAudio
	blockImage
	blockThinking
	blockToolUse
	blockToolResult
)

// blockType reads the type of a content block.
func (p *prompt) blockType(i int) (blockType, int) {
	c, i := p.str(i)
	switch string(p.bytes(c)) {
	case "text":
		return blockText, i
	case "image_url":
		return blockImageURL, i
	case "video_url":
		return blockVideoURL, i
	case "audio_url":
		return blockAudioURL, i
	case "input_audio":
		return blockInputAudio, i
	case "image":
		return blockImage, i
	case "thinking":
		return blockThinking, i
	case "tool_use":
		return blockToolUse, i
	case "tool_result":
		return blockToolResult, i
	}
	return blockOther, i
}

// chatBlock reads a content block of a chat message. A bare string is text.
func (p *prompt) chatBlock(i int) int {
	if p.peek(i) != '{' {
		c, i := p.text(i)
		p.add(c)
		return i
	}
	var kind blockType
	var text, image, video, audio, data, format piece
	i, more := p.open(i, '}')
	for more {
		var key []byte
		key, i = p.key(i)
		switch string(key) {
		case "type":
			kind, i = p.blockType(i)
		case "text":
			text, i = p.text(i)
		case "image_url":
			image, _, i = p.source(i, "url", "")
		case "video_url":
			video, _, i = p.source(i, "url", "")
		case "audio_url":
			audio, _, i = p.source(i, "url", "")
		case "input_audio":
			data, format, i = p.source(i, "data", "format")
		default:
			i = p.skip(i)
		}
		i, more = p.next(i, '}')
	}
	switch kind {
	case blockText:
		p.add(text)
	case blockImageURL:
		p.addAsset(pieceImageURL, image, piece{})
	case blockVideoURL:
		p.addAsset(pieceVideo, video, piece{})
	case blockAudioURL:
		p.addAsset(pieceAudio, audio, piece{})
	case blockInputAudio:
		p.addAsset(pieceAudio, data, format)
	}
	return i
}

// source reads where an asset is: two fields of an object, or a bare string for
// the first of them.
func (p *prompt) source(i int, first, second string) (a, b piece, end int) {
	if p.peek(i) != '{' {
		a, i = p.str(i)
		return a, b, i
	}
	i, more := p.open(i, '}')
	for more {
		var key []byte
		key, i = p.key(i)
		switch {
		case string(key) == first:
			a, i = p.str(i)
		case string(key) == second:
			b, i = p.str(i)
		default:
			i = p.skip(i)
		}
		i, more = p.next(i, '}')
	}
	return a, b, i
}

// addAsset adds an asset whose content is a and then b.
func (p *prompt) addAsset(kind pieceKind, a, b piece) {
	c := a
	c.kind = kind
	if b.from < b.to {
		c.hash = hashAll(p.bytes(a), p.bytes(b))
		c.to += b.to - b.from // of audio, whose content is only counted
	} else {
		c.hash = xxhash.Sum64(p.bytes(a))
	}
	p.pieces = push(p.pieces, c)
}

func hashAll(parts ...[]byte) uint64 {
	var d xxhash.Digest
	d.Reset()
	for _, b := range parts {
		_, _ = d.Write(b) // never fails
	}
	return d.Sum64()
}

// batch reads the conversations of a batch: the first decides, all count.
func (r *Request) batch(i int) int {
	p := &r.prompt
	r.Weight = 1
	if p.peek(i) != '[' || p.peek(p.space(i+1)) != '[' {
		return p.section(1, i, (*prompt).messages)
	}
	var more bool
	i, _ = p.open(i, ']') // not empty: a '[' follows
	i = p.section(1, i, (*prompt).messages)
	for i, more = p.next(i, ']'); more; i, more = p.next(p.skip(i), ']') {
		r.Weight++
	}
	return i
}

// anthropic holds the fields of a content block of Anthropic that can be hashed.
type anthropic struct {
	kind                      blockType
	text, thinking            piece
	id, name, input           piece
	mediaType, data, imageURL piece
}

// anthropicBlock reads a content block of a message.
func (p *prompt) anthropicBlock(i int) int {
	var f anthropic
	from := len(p.pieces)
	i = p.anthropicFields(i, &f, false)
	if f.kind != blockToolResult {
		p.pieces = p.pieces[:from]
	}
	switch f.kind {
	case blockText:
		p.add(f.text)
	case blockThinking:
		p.add(f.thinking)
	case blockToolUse:
		p.add(f.id)
		p.add(f.name)
		p.add(f.input)
	case blockImage:
		if f.imageURL.from < f.imageURL.to {
			p.addAsset(pieceImageURL, f.imageURL, piece{})
		} else if f.data.from < f.data.to {
			p.addAsset(pieceImageData, f.data, piece{})
		}
	}
	return i
}

// anthropicFields reads the fields of the content block at i. The pieces of a
// tool result's content are added to the prompt. nested says that the block is
// itself part of a tool result or of the system prompt, whose blocks hold none.
func (p *prompt) anthropicFields(i int, f *anthropic, nested bool) int {
	if p.peek(i) != '{' {
		f.kind = blockText
		f.text, i = p.text(i)
		return i
	}
	from := len(p.pieces)
	i, more := p.open(i, '}')
	for more {
		var key []byte
		key, i = p.key(i)
		switch string(key) {
		case "type":
			f.kind, i = p.blockType(i)
		case "text":
			f.text, i = p.text(i)
		case "thinking":
			f.thinking, i = p.text(i)
		case "id":
			f.id, i = p.text(i)
		case "name":
			f.name, i = p.text(i)
		case "input":
			f.input, i = p.raw(i)
		case "source":
			i = p.anthropicSource(i, f)
		case "content":
			if nested {
				i = p.skip(i)
				break
			}
			p.pieces = p.pieces[:from]
			i = p.toolResult(i)
		default:
			i = p.skip(i)
		}
		i, more = p.next(i, '}')
	}
	return i
}

// raw reads the value at i as it stands.
func (p *prompt) raw(i int) (piece, int) {
	end := p.skip(i)
	if end < 0 {
		return piece{}, end
	}
	from := len(p.out)
	p.out = append(p.out, p.b[i:end]...)
	return piece{from: from, to: len(p.out)}, end
}

// anthropicSource reads where an image is.
func (p *prompt) anthropicSource(i int, f *anthropic) int {
	if p.peek(i) != '{' {
		return p.skip(i)
	}
	f.mediaType, f.data, f.imageURL = piece{}, piece{}, piece{}
	i, more := p.open(i, '}')
	for more {
		var key []byte
		key, i = p.key(i)
		switch string(key) {
		case "media_type":
			f.mediaType, i = p.str(i)
		case "data":
			f.data, i = p.str(i)
		case "url":
			f.imageURL, i = p.str(i)
		default:
			i = p.skip(i)
		}
		i, more = p.next(i, '}')
	}
	return i
}

// toolResult reads the content of a tool result: its texts, joined by line ends,
// and then its images.
func (p *prompt) toolResult(i int) int {
	if p.peek(i) != '[' {
		c, i := p.text(i)
		p.add(c)
		return i
	}
	p.late = p.late[:0]
	texts := 0
	i, more := p.open(i, ']')
	for more {
		var f anthropic
		glue := piece{from: len(p.out), to: len(p.out)}
		if texts > 0 { // before the text, so that the output is in order
			p.out = append(p.out, '\n')
			glue.to++
		}
		i = p.anthropicFields(i, &f, true)
		switch f.kind {
		case blockText:
			p.add(glue)
			p.add(f.text)
			texts++
		case blockImage:
			p.lateImage(&f)
		}
		i, more = p.next(i, ']')
	}
	for _, c := range p.late {
		p.pieces = push(p.pieces, c)
	}
	return i
}

// lateImage puts an image of a tool result aside. Unlike an image of a message,
// base64 data is hashed as the data URL that an engine makes of it.
func (p *prompt) lateImage(f *anthropic) {
	kind, c := pieceImageURL, f.imageURL
	if c.from < c.to {
		c.hash = xxhash.Sum64(p.bytes(c))
	} else {
		kind, c = pieceImageData, f.data
		if c.from == c.to {
			return
		}
		media := p.bytes(f.mediaType)
		if len(media) == 0 {
			media = []byte("image/jpeg")
		}
		c.hash = hashAll([]byte("data:"), media, []byte(";base64,"), p.bytes(c))
	}
	c.kind = kind
	p.late = push(p.late, c)
}

// anthropicSystem reads the system prompt: a string, or text blocks one after
// the other. Claude Code puts a block with a hash of the request before the rest,
// which the engine drops; so do we, or no two prompts would begin alike.
func (p *prompt) anthropicSystem(i int) int {
	if p.peek(i) != '[' {
		c, i := p.text(i)
		p.add(c)
		return i
	}
	i, more := p.open(i, ']')
	for more {
		var f anthropic
		i = p.anthropicFields(i, &f, true)
		if f.kind == blockText && !bytes.HasPrefix(p.bytes(f.text), []byte("x-anthropic-billing-header")) {
			p.add(f.text)
		}
		i, more = p.next(i, ']')
	}
	return i
}

// anthropicTools renders the tools as encoding/json marshals a struct of the
// fields that reach the prompt, in this order: name, description, input_schema,
// strict, defer_loading. Empty fields are left out.
func (p *prompt) anthropicTools(i int) int {
	if p.peek(i) != '[' {
		return p.skip(i)
	}
	from := len(p.out)
	p.out = append(p.out, '[')
	i, more := p.open(i, ']')
	for more {
		if p.peek(i) == '{' {
			if n := len(p.out); p.out[n-1] != '[' {
				p.out = append(p.out, ',')
			}
			i = p.anthropicTool(i)
		} else {
			i = p.skip(i)
		}
		i, more = p.next(i, ']')
	}
	if len(p.out) > from+1 {
		p.out = append(p.out, ']')
		p.add(piece{from: from, to: len(p.out)})
	}
	return i
}

func (p *prompt) anthropicTool(i int) int {
	names := [...]string{"name", "description", "input_schema", "strict", "defer_loading"}
	var values [len(names)][2]int // start and end of each, 0 when it is absent
	i, more := p.open(i, '}')
	for more {
		var key []byte
		key, i = p.key(i)
		end := p.skip(i)
		for n, name := range names {
			if string(key) == name {
				values[n] = [2]int{i, end}
			}
		}
		i, more = p.next(end, '}')
	}
	if i < 0 {
		return i
	}
	p.out = append(p.out, '{')
	for n, v := range values {
		at, end := v[0], v[1]
		if at == 0 || n < 2 && (p.b[at] != '"' || end == at+2) || n > 2 && p.b[at] != 't' {
			continue
		}
		if p.out[len(p.out)-1] != '{' {
			p.out = append(p.out, ',')
		}
		p.out = append(p.out, '"')
		p.out = append(p.out, names[n]...)
		p.out = append(p.out, '"', ':')
		if n < 2 {
			p.quoted(at)
		} else {
			p.compacted(at, end)
		}
	}
	p.out = append(p.out, '}')
	return i
}
