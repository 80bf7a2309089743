package routing

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// chatTemplate is a compiled Jinja template, as transformers compiles the ones of
// models: trim_blocks, lstrip_blocks, break and continue, {% generation %}, in a
// sandbox in which nothing can be changed. It is immutable.
type chatTemplate struct {
	source string
	body   []*tmplNode
	names  []string // by symbol
	syms   map[string]int
}

type tmplKind uint8

const (
	nodeText tmplKind = iota
	nodePrint
	nodeIf    // a: condition, body, other
	nodeFor   // targets in a, list in b, filter in c, body, other
	nodeSet   // target a, value b, or body and filters in b
	nodeMacro // name sym, args, body
	nodeCall  // {% call %}: a is the call, args, body
	nodeFilter
	nodeWith
	nodeGroup // {% generation %}, {% block %}: its body
	nodeBreak
	nodeContinue
	nodeDo // an expression for its effects: the call of {% call %} has none

	exprConst
	exprName
	exprList
	exprTuple
	exprDict // args are pairs
	exprAttr // a.text
	exprItem // a[b]
	exprSlice
	exprCall   // a(args)
	exprPipe   // a|text(args)
	exprIs     // a is text(args), not when sym is 1
	exprUnary  // text
	exprBinary // text
	exprCompare
	exprAnd
	exprOr
	exprCond // b if a else c
	exprConcat
)

// tmplNode is a statement or an expression.
type tmplNode struct {
	kind    tmplKind
	line    int
	text    string
	sym     int
	v       value
	a, b, c *tmplNode
	args    []*tmplNode
	named   []tmplArg // named arguments, parameters of macros
	ops     []string
	body    []*tmplNode
	other   []*tmplNode
	filter  func(x *execution, v value, args []value, named []namedValue) (value, error)
	test    func(x *execution, v value, args []value) (bool, error)
	loops   bool // the body of a for refers to loop
	plain   bool // no method of a dict has that name
}

type tmplArg struct {
	name string
	sym  int
	v    *tmplNode
}

// maxTemplateBytes and maxTemplateDepth bound what is compiled.
const (
	maxTemplateBytes = 1 << 20
	maxTemplateDepth = 150
)

// compileTemplate reads a template. The error names line and what is not supported.
func compileTemplate(source string) (*chatTemplate, error) {
	if len(source) > maxTemplateBytes {
		return nil, fmt.Errorf("the template has %d bytes: more than %d", len(source), maxTemplateBytes)
	}
	if !utf8.ValidString(source) {
		return nil, fmt.Errorf("the template is no UTF-8")
	}
	tokens, err := lexTemplate(source)
	if err != nil {
		return nil, err
	}
	t := &chatTemplate{source: source, syms: map[string]int{}}
	p := &tmplParser{t: t, tokens: tokens}
	if t.body, err = p.statements(); err != nil {
		return nil, err
	}
	return t, nil
}

// symbol returns the number of a name.
func (t *chatTemplate) symbol(name string) int {
	if n, ok := t.syms[name]; ok {
		return n
	}
	t.syms[name] = len(t.names)
	t.names = append(t.names, name)
	return len(t.names) - 1
}

type tmplTokenKind uint8

const (
	tokEnd tmplTokenKind = iota
	tokText
	tokPrint    // {{
	tokPrintEnd // }}
	tokBlock    // {%
	tokBlockEnd // %}
	tokName
	tokString
	tokInt
	tokFloat
	tokOp
)

type tmplToken struct {
	kind tmplTokenKind
	text string
	line int
}

func isPythonSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

// lexTemplate cuts a template into tokens, and applies what the marks of white space say.
func lexTemplate(source string) ([]tmplToken, error) {
	s := strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(source)
	s = strings.TrimSuffix(s, "\n")
	var out []tmplToken
	line, starting := 1, true // at the start of a line
	fail := func(what string) error { return fmt.Errorf("template line %d: %s", line, what) }
	// before strips a text that stands before a tag.
	before := func(text string, sign byte, block bool) string {
		switch {
		case sign == '-':
			return strings.TrimRightFunc(text, isPythonSpace)
		case sign != '+' && block:
			from := strings.LastIndexByte(text, '\n') + 1
			if (from > 0 || starting) && strings.TrimFunc(text[from:], isPythonSpace) == "" {
				return text[:from]
			}
		}
		return text
	}
	// after skips what a tag's end takes of the text behind it.
	after := func(i int, sign byte, block bool) int {
		if sign == '-' {
			rest := strings.TrimLeftFunc(s[i:], isPythonSpace)
			return len(s) - len(rest)
		}
		if block && sign != '+' && i < len(s) && s[i] == '\n' {
			return i + 1
		}
		return i
	}
	signAt := func(i int) byte {
		if i < len(s) && (s[i] == '-' || s[i] == '+') {
			return s[i]
		}
		return 0
	}
	for i := 0; i < len(s); {
		at := i
		for {
			k := strings.IndexByte(s[at:], '{')
			if k < 0 {
				at = len(s)
				break
			}
			at += k
			if at+1 < len(s) && (s[at+1] == '{' || s[at+1] == '%' || s[at+1] == '#') {
				break
			}
			at++
		}
		if at >= len(s) {
			if i < len(s) {
				out = append(out, tmplToken{tokText, s[i:], line})
			}
			break
		}
		kind := s[at+1]
		sign := signAt(at + 2)
		if text := before(s[i:at], sign, kind != '{'); text != "" {
			out = append(out, tmplToken{tokText, text, line})
		}
		line += strings.Count(s[i:at], "\n")
		j := at + 2
		if sign != 0 {
			j++
		}
		if kind == '#' {
			end := strings.Index(s[j:], "#}")
			if end < 0 {
				return nil, fail("missing #}")
			}
			endSign := byte(0)
			if end > 0 && (s[j+end-1] == '-' || s[j+end-1] == '+') {
				endSign = s[j+end-1]
			}
			next := after(j+end+2, endSign, true)
			line += strings.Count(s[at:next], "\n")
			starting = next > 0 && s[next-1] == '\n'
			i = next
			continue
		}
		if kind == '%' {
			if body, next, ok := rawBlock(s, j, after); ok {
				if next < 0 {
					return nil, fail("missing endraw")
				}
				if body != "" {
					out = append(out, tmplToken{tokText, body, line})
				}
				line += strings.Count(s[at:next], "\n")
				starting = s[next-1] == '\n'
				i = next
				continue
			}
		}
		begin, end, close := tokPrint, tokPrintEnd, "}}"
		if kind == '%' {
			begin, end, close = tokBlock, tokBlockEnd, "%}"
		}
		out = append(out, tmplToken{begin, "", line})
		depth := 0
		for {
			for j < len(s) {
				r, n := utf8.DecodeRuneInString(s[j:])
				if !isPythonSpace(r) {
					break
				}
				if r == '\n' {
					line++
				}
				j += n
			}
			if j >= len(s) {
				return nil, fail("missing " + close)
			}
			if depth == 0 {
				sign := byte(0)
				k := j
				if s[k] == '-' || s[k] == '+' && kind == '%' {
					sign = s[k]
					k++
				}
				if strings.HasPrefix(s[k:], close) {
					out = append(out, tmplToken{end, "", line})
					next := after(k+2, sign, kind == '%')
					line += strings.Count(s[j:next], "\n")
					starting = s[next-1] == '\n'
					i = next
					break
				}
			}
			tok, n, err := lexToken(s[j:], line)
			if err != nil {
				return nil, err
			}
			if tok.kind == tokOp {
				switch tok.text {
				case "(", "[", "{":
					depth++
				case ")", "]", "}":
					depth--
				}
			}
			line += strings.Count(s[j:j+n], "\n")
			out = append(out, tok)
			j += n
		}
	}
	return append(out, tmplToken{tokEnd, "", line}), nil
}

// rawBlock reads {% raw %} ... {% endraw %}, of which j is behind the opening mark.
func rawBlock(s string, j int, after func(int, byte, bool) int) (body string, next int, ok bool) {
	rest := strings.TrimLeftFunc(s[j:], isPythonSpace)
	rest, ok = strings.CutPrefix(rest, "raw")
	if !ok {
		return "", 0, false
	}
	rest = strings.TrimLeftFunc(rest, isPythonSpace)
	sign := byte(0)
	if rest != "" && (rest[0] == '-' || rest[0] == '+') {
		sign, rest = rest[0], rest[1:]
	}
	if rest, ok = strings.CutPrefix(rest, "%}"); !ok {
		return "", 0, false
	}
	from := after(len(s)-len(rest), sign, true)
	for at := from; ; {
		k := strings.Index(s[at:], "{%")
		if k < 0 {
			return "", -1, true
		}
		at += k
		tail := s[at+2:]
		lead := byte(0)
		if tail != "" && (tail[0] == '-' || tail[0] == '+') {
			lead, tail = tail[0], tail[1:]
		}
		tail = strings.TrimLeftFunc(tail, isPythonSpace)
		if tail, ok = strings.CutPrefix(tail, "endraw"); ok {
			tail = strings.TrimLeftFunc(tail, isPythonSpace)
			sign = 0
			if tail != "" && (tail[0] == '-' || tail[0] == '+') {
				sign, tail = tail[0], tail[1:]
			}
			if tail, ok = strings.CutPrefix(tail, "%}"); ok {
				body = s[from:at]
				switch lead {
				case '-':
					body = strings.TrimRightFunc(body, isPythonSpace)
				case 0:
					if line := strings.LastIndexByte(body, '\n') + 1; line > 0 && strings.TrimFunc(body[line:], isPythonSpace) == "" {
						body = body[:line]
					}
				}
				return body, after(len(s)-len(tail), sign, true), true
			}
		}
		at += 2
	}
}

var tmplOps = []string{"**", "//", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "(", ")", "[", "]", "{", "}", ">", "<", "=", ".", ":", "|", ",", ";"}

// lexToken reads one token of an expression.
func lexToken(s string, line int) (tmplToken, int, error) {
	r, size := utf8.DecodeRuneInString(s)
	switch {
	case r == '_' || unicode.IsLetter(r):
		n := size
		for n < len(s) {
			r, size := utf8.DecodeRuneInString(s[n:])
			if r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) && !unicode.Is(unicode.M, r) {
				break
			}
			n += size
		}
		return tmplToken{tokName, s[:n], line}, n, nil
	case r >= '0' && r <= '9':
		n, kind := 1, tokInt
		if r == '0' && len(s) > 1 && strings.IndexByte("xXoObB", s[1]) >= 0 {
			n = 2
			for n < len(s) && (s[n] == '_' || isHex(s[n])) {
				n++
			}
			return tmplToken{tokInt, s[:n], line}, n, nil
		}
		digits := func() {
			for n < len(s) && (s[n]-'0' <= 9 || s[n] == '_') {
				n++
			}
		}
		digits()
		if n+1 < len(s) && s[n] == '.' && s[n+1]-'0' <= 9 {
			kind = tokFloat
			n++
			digits()
		}
		if n < len(s) && s[n]|0x20 == 'e' {
			k := n + 1
			if k < len(s) && (s[k] == '+' || s[k] == '-') {
				k++
			}
			if k < len(s) && s[k]-'0' <= 9 {
				kind, n = tokFloat, k
				digits()
			}
		}
		return tmplToken{kind, strings.ReplaceAll(s[:n], "_", ""), line}, n, nil
	case r == '"' || r == '\'':
		for n := 1; n < len(s); n++ {
			switch s[n] {
			case '\\':
				n++
			case s[0]:
				return tmplToken{tokString, tmplUnescape(s[1:n]), line}, n + 1, nil
			}
		}
		return tmplToken{}, 0, fmt.Errorf("template line %d: a string has no end", line)
	}
	for _, op := range tmplOps {
		if strings.HasPrefix(s, op) {
			return tmplToken{tokOp, op, line}, len(op), nil
		}
	}
	return tmplToken{}, 0, fmt.Errorf("template line %d: unexpected %q", line, r)
}

func isHex(c byte) bool { return c-'0' <= 9 || c|0x20-'a' < 6 }

// tmplUnescape undoes the escapes of a Python string.
func tmplUnescape(s string) string {
	if strings.IndexByte(s, '\\') < 0 {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		i++
		number := func(digits, base int) bool {
			n, err := strconv.ParseUint(s[i+1:min(i+1+digits, len(s))], base, 32)
			if i+1+digits > len(s) || err != nil {
				return false
			}
			b.WriteRune(rune(n))
			i += digits
			return true
		}
		c := s[i]
		if k := strings.IndexByte(`abfnrtv\'"`, c); k >= 0 {
			b.WriteByte("\a\b\f\n\r\t\v\\'\""[k])
			continue
		}
		switch {
		case c == '\n':
		case c == 'x' && number(2, 16), c == 'u' && number(4, 16), c == 'U' && number(8, 16):
		case c-'0' < 8:
			n := 0
			k := i
			for k < len(s) && k < i+3 && s[k]-'0' < 8 {
				n = n*8 + int(s[k]-'0')
				k++
			}
			i = k - 1
			b.WriteRune(rune(n))
		default:
			b.WriteByte('\\')
			b.WriteByte(c)
		}
	}
	return b.String()
}

type tmplParser struct {
	t      *chatTemplate
	tokens []tmplToken
	i      int
	depth  int
	loops  int
	loop   bool // a name loop was seen since the innermost for began
}

func (p *tmplParser) peek() tmplToken { return p.tokens[p.i] }

func (p *tmplParser) next() tmplToken {
	t := p.tokens[p.i]
	if t.kind != tokEnd {
		p.i++
	}
	return t
}

func (p *tmplParser) fail(format string, args ...any) error {
	return fmt.Errorf("template line %d: %s", p.peek().line, fmt.Sprintf(format, args...))
}

func (p *tmplParser) op(text string) bool {
	if t := p.peek(); t.kind == tokOp && t.text == text {
		p.i++
		return true
	}
	return false
}

func (p *tmplParser) word(text string) bool {
	if p.isWord(text) {
		p.i++
		return true
	}
	return false
}

func (p *tmplParser) isWord(text string) bool {
	t := p.peek()
	return t.kind == tokName && t.text == text
}

func (p *tmplParser) expect(text string) error {
	if !p.op(text) {
		return p.fail("expected %q", text)
	}
	return nil
}

func (p *tmplParser) name() (string, error) {
	t := p.peek()
	if t.kind != tokName {
		return "", p.fail("expected a name")
	}
	p.i++
	return t.text, nil
}

func (p *tmplParser) blockEnd() error {
	if p.peek().kind != tokBlockEnd {
		return p.fail("expected %%}")
	}
	p.i++
	return nil
}

func (p *tmplParser) node(kind tmplKind) *tmplNode { return &tmplNode{kind: kind, line: p.peek().line} }

func (p *tmplParser) enter() error {
	if p.depth++; p.depth > maxTemplateDepth {
		return p.fail("nested too deeply")
	}
	return nil
}

// statements reads up to a block that begins with one of ends, which it leaves
// with its name as the next token.
func (p *tmplParser) statements(ends ...string) ([]*tmplNode, error) {
	if err := p.enter(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	var out []*tmplNode
	for {
		switch t := p.peek(); t.kind {
		case tokEnd:
			if len(ends) > 0 {
				return nil, p.fail("missing %s", ends[len(ends)-1])
			}
			return out, nil
		case tokText:
			n := p.node(nodeText)
			n.text = t.text
			p.i++
			out = append(out, n)
		case tokPrint:
			n := p.node(nodePrint)
			p.i++
			var err error
			if n.a, err = p.tuple(); err != nil {
				return nil, err
			}
			if p.peek().kind != tokPrintEnd {
				return nil, p.fail("expected }}")
			}
			p.i++
			out = append(out, n)
		case tokBlock:
			p.i++
			if t := p.peek(); t.kind == tokName && slices.Contains(ends, t.text) {
				return out, nil
			}
			n, err := p.statement()
			if err != nil {
				return nil, err
			}
			out = append(out, n)
		default:
			return nil, p.fail("unexpected token")
		}
	}
}

// end reads the rest of a block that ends a statement.
func (p *tmplParser) end(name string) error {
	if !p.word(name) {
		return p.fail("expected %s", name)
	}
	return p.blockEnd()
}

func (p *tmplParser) statement() (*tmplNode, error) {
	n := p.node(nodeText)
	name, err := p.name()
	if err != nil {
		return nil, err
	}
	switch name {
	case "if":
		return n, p.ifStatement(n)
	case "for":
		return n, p.forStatement(n)
	case "set":
		return n, p.setStatement(n)
	case "macro":
		n.kind = nodeMacro
		if n.text, err = p.name(); err != nil {
			return nil, err
		}
		n.sym = p.t.symbol(n.text)
		if err := p.parameters(n); err != nil {
			return nil, err
		}
		return n, p.bodyUntil(n, "endmacro")
	case "call":
		n.kind = nodeCall
		if t := p.peek(); t.kind == tokOp && t.text == "(" {
			if err := p.parameters(n); err != nil {
				return nil, err
			}
		}
		if n.a, err = p.expression(); err != nil {
			return nil, err
		}
		if n.a.kind != exprCall {
			return nil, p.fail("call wants a call")
		}
		return n, p.bodyUntil(n, "endcall")
	case "filter":
		n.kind = nodeFilter
		hole := p.node(exprConst)
		if n.a, err = p.pipe(hole, true); err != nil {
			return nil, err
		}
		n.b = hole
		return n, p.bodyUntil(n, "endfilter")
	case "with":
		n.kind = nodeWith
		for p.peek().kind != tokBlockEnd {
			if len(n.named) > 0 {
				if err := p.expect(","); err != nil {
					return nil, err
				}
			}
			var arg tmplArg
			if arg.name, err = p.name(); err != nil {
				return nil, err
			}
			arg.sym = p.t.symbol(arg.name)
			if err := p.expect("="); err != nil {
				return nil, err
			}
			if arg.v, err = p.expression(); err != nil {
				return nil, err
			}
			n.named = append(n.named, arg)
		}
		return n, p.bodyUntil(n, "endwith")
	case "generation":
		n.kind = nodeGroup
		return n, p.bodyUntil(n, "endgeneration")
	case "break", "continue":
		if p.loops == 0 {
			return nil, p.fail("%s outside of a loop", name)
		}
		n.kind = nodeBreak
		if name == "continue" {
			n.kind = nodeContinue
		}
		return n, p.blockEnd()
	}
	return nil, p.fail("the statement %s is not supported", name)
}

func (p *tmplParser) bodyUntil(n *tmplNode, end string) error {
	if err := p.blockEnd(); err != nil {
		return err
	}
	loops := p.loops
	if n.kind == nodeMacro || n.kind == nodeCall {
		p.loops = 0
	}
	var err error
	if n.body, err = p.statements(end); err != nil {
		return err
	}
	p.loops = loops
	return p.end(end)
}

func (p *tmplParser) ifStatement(n *tmplNode) error {
	n.kind = nodeIf
	var err error
	if n.a, err = p.tuple(); err != nil {
		return err
	}
	if err = p.blockEnd(); err != nil {
		return err
	}
	if n.body, err = p.statements("elif", "else", "endif"); err != nil {
		return err
	}
	switch {
	case p.isWord("elif"):
		if err := p.enter(); err != nil {
			return err
		}
		defer func() { p.depth-- }()
		other := p.node(nodeIf)
		p.i++
		n.other = []*tmplNode{other}
		return p.ifStatement(other)
	case p.word("else"):
		if err = p.blockEnd(); err != nil {
			return err
		}
		if n.other, err = p.statements("endif"); err != nil {
			return err
		}
	}
	return p.end("endif")
}

func (p *tmplParser) forStatement(n *tmplNode) error {
	n.kind = nodeFor
	var err error
	if n.a, err = p.target(); err != nil {
		return err
	}
	if !p.word("in") {
		return p.fail("expected in")
	}
	if n.b, err = p.tupleWithoutCondition(); err != nil {
		return err
	}
	if p.word("if") { // loop is that of the loop outside
		if n.c, err = p.expression(); err != nil {
			return err
		}
	}
	outer := p.loop
	p.loop = false
	if p.isWord("recursive") {
		return p.fail("recursive loops are not supported")
	}
	if err = p.blockEnd(); err != nil {
		return err
	}
	p.loops++
	if n.body, err = p.statements("else", "endfor"); err != nil {
		return err
	}
	p.loops--
	n.loops = p.loop
	p.loop = outer
	if p.word("else") {
		if err = p.blockEnd(); err != nil {
			return err
		}
		if n.other, err = p.statements("endfor"); err != nil {
			return err
		}
	}
	return p.end("endfor")
}

// target reads what is assigned to: a name, names with commas, name.attribute.
func (p *tmplParser) target() (*tmplNode, error) {
	tuple := p.node(exprTuple)
	paren := p.op("(")
	for {
		n := p.node(exprName)
		name, err := p.name()
		if err != nil {
			return nil, err
		}
		n.text, n.sym = name, p.t.symbol(name)
		tuple.args = append(tuple.args, n)
		if !p.op(",") {
			break
		}
		if p.isWord("in") {
			return tuple, nil // a, in x
		}
	}
	if paren {
		if err := p.expect(")"); err != nil {
			return nil, err
		}
	}
	if len(tuple.args) == 1 {
		return tuple.args[0], nil
	}
	return tuple, nil
}

func (p *tmplParser) setStatement(n *tmplNode) error {
	n.kind = nodeSet
	var err error
	if n.a, err = p.target(); err != nil {
		return err
	}
	if n.a.kind == exprName && p.op(".") {
		attr := p.node(exprAttr)
		attr.a = n.a
		if attr.text, err = p.name(); err != nil {
			return err
		}
		n.a = attr
	}
	if p.op("=") {
		if n.b, err = p.tuple(); err != nil {
			return err
		}
		return p.blockEnd()
	}
	n.c = p.node(exprConst) // where the text goes
	n.b = n.c
	if p.op("|") {
		if n.b, err = p.pipe(n.c, true); err != nil {
			return err
		}
	}
	return p.bodyUntil(n, "endset")
}

// parameters reads those of a macro.
func (p *tmplParser) parameters(n *tmplNode) error {
	if err := p.expect("("); err != nil {
		return err
	}
	for !p.op(")") {
		if len(n.named) > 0 {
			if err := p.expect(","); err != nil {
				return err
			}
		}
		name, err := p.name()
		if err != nil {
			return err
		}
		arg := tmplArg{name: name, sym: p.t.symbol(name)}
		if p.op("=") {
			if arg.v, err = p.expression(); err != nil {
				return err
			}
		}
		n.named = append(n.named, arg)
	}
	return nil
}

// tuple reads an expression, or several with commas.
func (p *tmplParser) tuple() (*tmplNode, error) { return p.tupleOf(p.expression) }

func (p *tmplParser) tupleWithoutCondition() (*tmplNode, error) { return p.tupleOf(p.or) }

func (p *tmplParser) tupleOf(one func() (*tmplNode, error)) (*tmplNode, error) {
	first, err := one()
	if err != nil {
		return nil, err
	}
	if t := p.peek(); t.kind != tokOp || t.text != "," {
		return first, nil
	}
	n := p.node(exprTuple)
	n.args = []*tmplNode{first}
	for p.op(",") {
		if t := p.peek(); t.kind == tokPrintEnd || t.kind == tokBlockEnd || t.kind == tokOp && t.text == ")" {
			break
		}
		x, err := one()
		if err != nil {
			return nil, err
		}
		n.args = append(n.args, x)
	}
	return n, nil
}

func (p *tmplParser) expression() (*tmplNode, error) {
	if err := p.enter(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	left, err := p.or()
	if err != nil {
		return nil, err
	}
	for p.isWord("if") {
		n := p.node(exprCond)
		p.i++
		n.b = left
		if n.a, err = p.or(); err != nil {
			return nil, err
		}
		if p.word("else") {
			if n.c, err = p.expression(); err != nil {
				return nil, err
			}
		}
		left = n
	}
	return left, nil
}

func (p *tmplParser) or() (*tmplNode, error)  { return p.chain("or", exprOr, p.and) }
func (p *tmplParser) and() (*tmplNode, error) { return p.chain("and", exprAnd, p.not) }

func (p *tmplParser) chain(word string, kind tmplKind, sub func() (*tmplNode, error)) (*tmplNode, error) {
	left, err := sub()
	for err == nil && p.isWord(word) {
		n := p.node(kind)
		p.i++
		n.a = left
		n.b, err = sub()
		left = n
	}
	return left, err
}

func (p *tmplParser) not() (*tmplNode, error) {
	if !p.isWord("not") {
		return p.comparison()
	}
	if err := p.enter(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	n := p.node(exprUnary)
	n.text = "not"
	p.i++
	var err error
	n.a, err = p.not()
	return n, err
}

func (p *tmplParser) comparison() (*tmplNode, error) {
	left, err := p.sum()
	if err != nil {
		return nil, err
	}
	n := p.node(exprCompare)
	n.a = left
	for {
		op := ""
		switch t := p.peek(); {
		case t.kind == tokOp && slices.Contains([]string{"==", "!=", "<", "<=", ">", ">="}, t.text):
			op = t.text
			p.i++
		case p.word("in"):
			op = "in"
		case p.isWord("not") && p.tokens[p.i+1].kind == tokName && p.tokens[p.i+1].text == "in":
			op = "not in"
			p.i += 2
		}
		if op == "" {
			break
		}
		right, err := p.sum()
		if err != nil {
			return nil, err
		}
		n.ops, n.args = append(n.ops, op), append(n.args, right)
	}
	if len(n.ops) == 0 {
		return left, nil
	}
	return n, nil
}

func (p *tmplParser) binary(sub func() (*tmplNode, error), ops ...string) (*tmplNode, error) {
	left, err := sub()
	for err == nil {
		t := p.peek()
		if t.kind != tokOp || !slices.Contains(ops, t.text) {
			break
		}
		n := p.node(exprBinary)
		n.text = t.text
		p.i++
		n.a = left
		if n.b, err = sub(); n.text == "+" { // the terms of a sum in one row
			if left.kind == exprBinary && left.text == "+" {
				n.args = append(n.args, left.args...)
			} else {
				n.args = append(n.args, left)
			}
			n.args = append(n.args, n.b)
		}
		left = n
	}
	return left, err
}

func (p *tmplParser) sum() (*tmplNode, error) { return p.binary(p.concat, "+", "-") }

func (p *tmplParser) concat() (*tmplNode, error) {
	left, err := p.product()
	if err != nil {
		return nil, err
	}
	n := p.node(exprConcat)
	n.args = []*tmplNode{left}
	for p.op("~") {
		x, err := p.product()
		if err != nil {
			return nil, err
		}
		n.args = append(n.args, x)
	}
	if len(n.args) == 1 {
		return left, nil
	}
	return n, nil
}

func (p *tmplParser) product() (*tmplNode, error) { return p.binary(p.power, "*", "/", "//", "%") }

func (p *tmplParser) power() (*tmplNode, error) {
	return p.binary(func() (*tmplNode, error) { return p.unary(true) }, "**")
}

func (p *tmplParser) unary(pipes bool) (*tmplNode, error) {
	if err := p.enter(); err != nil {
		return nil, err
	}
	defer func() { p.depth-- }()
	var n *tmplNode
	var err error
	if t := p.peek(); t.kind == tokOp && (t.text == "-" || t.text == "+") {
		n = p.node(exprUnary)
		n.text = t.text
		p.i++
		n.a, err = p.unary(false)
	} else {
		n, err = p.primary()
	}
	if err == nil {
		n, err = p.postfix(n)
	}
	if err == nil && pipes {
		n, err = p.pipes(n)
	}
	return n, err
}

func (p *tmplParser) primary() (*tmplNode, error) {
	n := p.node(exprConst)
	t := p.next()
	switch t.kind {
	case tokName:
		switch t.text {
		case "true", "True":
			n.v = boolValue(true)
		case "false", "False":
			n.v = boolValue(false)
		case "none", "None":
			n.v = none
		default:
			n.kind, n.text, n.sym = exprName, t.text, p.t.symbol(t.text)
			if t.text == "loop" {
				p.loop = true
			}
		}
		return n, nil
	case tokString:
		s := t.text
		for p.peek().kind == tokString {
			s += p.next().text
		}
		n.v = stringValue(s)
		return n, nil
	case tokInt:
		i, err := strconv.ParseInt(t.text, 0, 64)
		if err != nil {
			if i, err = strconv.ParseInt(t.text, 10, 64); err != nil {
				p.i--
				return nil, p.fail("the number %s is not supported", t.text)
			}
		}
		n.v = intValue(int(i))
		return n, nil
	case tokFloat:
		f, err := strconv.ParseFloat(t.text, 64)
		if err != nil {
			p.i--
			return nil, p.fail("the number %s is not supported", t.text)
		}
		n.v = floatValue(f)
		return n, nil
	case tokOp:
		switch t.text {
		case "(":
			if p.op(")") {
				n.kind = exprTuple
				return n, nil
			}
			x, err := p.tuple()
			if err != nil {
				return nil, err
			}
			return x, p.expect(")")
		case "[":
			n.kind = exprList
			for !p.op("]") {
				if len(n.args) > 0 {
					if err := p.expect(","); err != nil {
						return nil, err
					}
					if p.op("]") {
						break
					}
				}
				x, err := p.expression()
				if err != nil {
					return nil, err
				}
				n.args = append(n.args, x)
			}
			return n, nil
		case "{":
			n.kind = exprDict
			for !p.op("}") {
				if len(n.args) > 0 {
					if err := p.expect(","); err != nil {
						return nil, err
					}
					if p.op("}") {
						break
					}
				}
				k, err := p.expression()
				if err == nil {
					err = p.expect(":")
				}
				if err != nil {
					return nil, err
				}
				v, err := p.expression()
				if err != nil {
					return nil, err
				}
				n.args = append(n.args, k, v)
			}
			return n, nil
		}
	}
	p.i--
	return nil, p.fail("expected an expression")
}

func (p *tmplParser) postfix(n *tmplNode) (*tmplNode, error) {
	for {
		switch {
		case p.op("."):
			x := p.node(exprAttr)
			x.a = n
			switch t := p.next(); t.kind {
			case tokName:
				x.text = t.text
				x.v = stringValue(t.text)
				x.plain = dictMethod(nil, t.text) == nil
			case tokInt:
				i, err := strconv.Atoi(t.text)
				if err != nil {
					return nil, p.fail("the number %s is not supported", t.text)
				}
				x.kind, x.b = exprItem, &tmplNode{kind: exprConst, v: intValue(i)}
			default:
				p.i--
				return nil, p.fail("expected a name behind .")
			}
			n = x
		case p.op("["):
			x := p.node(exprItem)
			x.a = n
			if err := p.subscript(x); err != nil {
				return nil, err
			}
			n = x
		default:
			t := p.peek()
			if t.kind != tokOp || t.text != "(" {
				return n, nil
			}
			x := p.node(exprCall)
			x.a = n
			if err := p.arguments(x); err != nil {
				return nil, err
			}
			n = x
		}
	}
}

func (p *tmplParser) subscript(x *tmplNode) error {
	var parts [3]*tmplNode
	k := 0
	for ; ; k++ {
		if t := p.peek(); t.kind != tokOp || t.text != ":" && t.text != "]" {
			var err error
			if parts[k], err = p.expression(); err != nil {
				return err
			}
		}
		if k == 2 || !p.op(":") {
			break
		}
	}
	if k == 0 {
		if parts[0] == nil {
			return p.fail("expected an expression")
		}
		x.b = parts[0]
		return p.expect("]")
	}
	x.kind = exprSlice
	x.args = parts[:]
	return p.expect("]")
}

// arguments reads those of a call, a filter or a test.
func (p *tmplParser) arguments(n *tmplNode) error {
	if err := p.expect("("); err != nil {
		return err
	}
	for first := true; !p.op(")"); first = false {
		if !first {
			if err := p.expect(","); err != nil {
				return err
			}
			if p.op(")") {
				break
			}
		}
		if t := p.peek(); t.kind == tokOp && (t.text == "*" || t.text == "**") {
			return p.fail("%s arguments are not supported", t.text)
		}
		if t := p.peek(); t.kind == tokName && p.tokens[p.i+1].kind == tokOp && p.tokens[p.i+1].text == "=" {
			p.i += 2
			x, err := p.expression()
			if err != nil {
				return err
			}
			n.named = append(n.named, tmplArg{name: t.text, v: x})
			continue
		}
		if len(n.named) > 0 {
			return p.fail("a plain argument behind a named one")
		}
		x, err := p.expression()
		if err != nil {
			return err
		}
		n.args = append(n.args, x)
	}
	return nil
}

// pipes reads filters, tests and calls behind an expression.
func (p *tmplParser) pipes(n *tmplNode) (*tmplNode, error) {
	for {
		switch t := p.peek(); {
		case t.kind == tokOp && t.text == "|":
			p.i++
			x, err := p.pipe(n, false)
			if err != nil {
				return nil, err
			}
			n = x
		case t.kind == tokName && t.text == "is":
			p.i++
			x, err := p.isTest(n)
			if err != nil {
				return nil, err
			}
			n = x
		case t.kind == tokOp && t.text == "(":
			x := p.node(exprCall)
			x.a = n
			if err := p.arguments(x); err != nil {
				return nil, err
			}
			n = x
		default:
			return n, nil
		}
	}
}

// pipe reads one filter, or with more all that follow.
func (p *tmplParser) pipe(n *tmplNode, more bool) (*tmplNode, error) {
	for {
		x := p.node(exprPipe)
		name, err := p.name()
		if err != nil {
			return nil, err
		}
		if x.filter = tmplFilter(name); x.filter == nil {
			// As in Jinja an error only where it is reached.
			x.filter = func(*execution, value, []value, []namedValue) (value, error) { return value{}, errTemplateName }
		}
		x.text, x.a = name, n
		if t := p.peek(); t.kind == tokOp && t.text == "(" {
			if err := p.arguments(x); err != nil {
				return nil, err
			}
		}
		n = x
		if !more || !p.op("|") {
			return n, nil
		}
	}
}

func (p *tmplParser) isTest(n *tmplNode) (*tmplNode, error) {
	x := p.node(exprIs)
	x.a = n
	if p.word("not") {
		x.sym = 1
	}
	name, err := p.name()
	if err != nil {
		return nil, err
	}
	if x.test = tmplTest(name); x.test == nil {
		x.test = func(*execution, value, []value) (bool, error) {
			return false, fmt.Errorf("test %s: %w", name, errTemplateName)
		}
	}
	x.text = name
	switch t := p.peek(); {
	case t.kind == tokOp && t.text == "(":
		if err := p.arguments(x); err != nil {
			return nil, err
		}
		if len(x.named) > 0 {
			return nil, p.fail("named arguments of a test are not supported")
		}
	case t.kind == tokString || t.kind == tokInt || t.kind == tokFloat || t.kind == tokOp && (t.text == "[" || t.text == "{") ||
		t.kind == tokName && !slices.Contains([]string{"else", "or", "and", "is", "if", "in", "not"}, t.text):
		arg, err := p.primary()
		if err == nil {
			arg, err = p.postfix(arg)
		}
		if err != nil {
			return nil, err
		}
		x.args = []*tmplNode{arg}
	}
	return x, nil
}
