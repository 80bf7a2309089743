package routing

import (
	"encoding/binary"
	"math"
	"strconv"
)

// prompts reads the prompts of a completion: a string, token ids, or an array of
// either. Any mixture is left out.
func (p *prompt) prompts(i int) int {
	if p.peek(i) != '[' {
		c, i := p.text(i)
		p.add(c)
		return i
	}
	if p.peek(p.space(i+1)) != '"' {
		return p.tokenIDs(i)
	}
	from := len(p.pieces)
	end := p.texts(i)
	if end < 0 {
		p.pieces = p.pieces[:from]
		if p.err == nil {
			end = p.skip(i)
		}
	}
	return end
}

// texts reads an array of strings, a prompt each. It returns -1 without an error
// when there is something else in it.
func (p *prompt) texts(i int) int {
	depth := p.depth
	i, more := p.open(i, ']')
	for more {
		if p.peek(i) != '"' {
			p.depth = depth
			return -1
		}
		var c piece
		c, i = p.text(i)
		p.endPrompt(c)
		i, more = p.next(i, ']')
	}
	return i
}

// endPrompt adds the last piece of a prompt, which is the last of the output,
// padded to whole tokens there, so that the next prompt can follow in place.
func (p *prompt) endPrompt(c piece) {
	if c.from == c.to {
		return
	}
	for (c.to-c.from)%bytesPerToken != 0 {
		p.out = append(p.out, 0)
		c.to++
	}
	c.ends = true
	p.pieces = push(p.pieces, c)
}

// tokenIDs reads an array of token ids, or an array of such arrays, a prompt
// each. What is no token id makes the whole value one of unknown shape.
func (p *prompt) tokenIDs(i int) int {
	from := len(p.pieces)
	end := p.ids(i, true)
	if end < 0 {
		p.pieces = p.pieces[:from]
		if p.err == nil {
			end = p.skip(i)
		}
	}
	return end
}

// ids reads one array of token ids into the output. It returns -1 without an
// error when there is something else in it.
func (p *prompt) ids(i int, nested bool) int {
	if p.peek(i) != '[' {
		return -1
	}
	depth, from := p.depth, len(p.out)
	i, more := p.open(i, ']')
	nested = nested && p.peek(i) == '['
	if more && !nested {
		i = p.plainIDs(i)
	}
	for more {
		var id int64
		if nested {
			i = p.ids(i, false)
		} else {
			id, i = p.tokenID(i)
		}
		if i < 0 {
			p.depth = depth
			return -1
		}
		if !nested {
			p.out = binary.LittleEndian.AppendUint32(p.out, uint32(id))
		}
		i, more = p.next(i, ']')
	}
	if i >= 0 && !nested {
		p.endPrompt(piece{kind: pieceIDs, from: from, to: len(p.out)})
	}
	return i
}

// plainIDs reads token ids as they mostly come, digits and a comma with or
// without a blank, and returns the offset of the first that is written otherwise
// or is the last.
func (p *prompt) plainIDs(i int) int {
	b, out := p.b, p.out
	for start := i; ; start = i {
		n := uint32(0)
		for i < len(b) && b[i]-'0' <= 9 {
			n = n*10 + uint32(b[i]-'0')
			i++
		}
		if i+2 > len(b) || b[i] != ',' || i == start || i-start > 9 || b[start] == '0' && i-start > 1 {
			p.out = out
			return start
		}
		out = binary.LittleEndian.AppendUint32(out, n)
		if i++; b[i] == ' ' {
			i++
		}
	}
}

// tokenID reads a token id: a whole number of 32 bits. It returns -1 without an
// error for any other value.
func (p *prompt) tokenID(i int) (int64, int) {
	if c := p.peek(i); c-'0' > 9 && c != '-' {
		return 0, -1
	}
	end := p.number(i)
	if end < 0 {
		return 0, -1
	}
	n, ok := wholeNumber(p.b[i:end])
	if !ok || n > 1<<32-1 {
		return 0, -1
	}
	return n, end
}

// wholeNumber returns the value of a literal that is a whole number from 0 to
// 2^53, as in 7, 7.0 or 7e2.
func wholeNumber(literal []byte) (int64, bool) {
	n := int64(0)
	for i, c := range literal {
		if c-'0' > 9 || i == 15 {
			if literal[0]-'0' > 9 {
				return 0, false
			}
			f, err := strconv.ParseFloat(string(literal), 64)
			return int64(f), err == nil && f <= 1<<53 && f == math.Trunc(f)
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

// embeddings reads the input of an embedding. Strings are hashed as the JSON
// {"Raw":...,"Strings":...,"TokenIDs":null} in which llm-d holds them.
func (p *prompt) embeddings(i int) int {
	switch c := p.peek(p.space(i + 1)); {
	case p.peek(i) == '"':
		from := len(p.out)
		p.out = append(p.out, `{"Raw":`...)
		end := p.skip(i)
		if end < 0 {
			return end
		}
		p.quoted(i)
		p.out = append(p.out, `,"Strings":null,"TokenIDs":null}`...)
		if end > i+2 {
			p.add(piece{from: from, to: len(p.out)})
		}
		return end
	case p.peek(i) != '[' || c == ']':
		return p.skip(i)
	case c != '"':
		return p.tokenIDs(i)
	}
	from := len(p.out)
	p.out = append(p.out, `{"Raw":"","Strings":[`...)
	strings := true
	i, more := p.open(i, ']')
	for more {
		end := p.skip(i)
		if end >= 0 && strings {
			if strings = p.b[i] == '"'; strings {
				p.quoted(i)
			}
		}
		if i, more = p.next(end, ']'); more {
			p.out = append(p.out, ',')
		}
	}
	if strings {
		p.out = append(p.out, `],"TokenIDs":null}`...)
		p.add(piece{from: from, to: len(p.out)})
	}
	return i
}
