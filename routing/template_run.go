package routing

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"
)

// templateLimits bound one execution: a template is a program, and what it is given
// comes from clients.
type templateLimits struct {
	steps  int           // statements, expressions and items
	memory int           // bytes of strings and lists that are made
	output int           // bytes
	time   time.Duration // by the clock; 0 is no limit
}

// defaultTemplateLimits are far beyond what a chat template needs for the longest
// prompt.
var defaultTemplateLimits = templateLimits{steps: 4_000_000, memory: 128 << 20, output: 32 << 20, time: time.Second}

var (
	errTemplateSteps  = errors.New("the template takes too many steps")
	errTemplateMemory = errors.New("the template makes too much text")
	errTemplateOutput = errors.New("the template prints too much")
	errTemplateTime   = errors.New("the template takes too long")
	errTemplateName   = errors.New("there is none of that name, or it is not supported")
	errTemplateDepth  = errors.New("the template calls itself too deeply")
)

// templateError is what raise_exception raises: the template refuses the request.
type templateError struct{ message string }

func (e *templateError) Error() string { return "the template refuses: " + e.message }

// execution is one run of a template. Its memory may be kept for the next.
type execution struct {
	t      *chatTemplate
	now    func() time.Time
	limits templateLimits
	until  time.Time

	out    []byte
	steps  int
	memory int
	depth  int
	free   []*tmplScope
	stack  []value // terms of the sums being printed
	absent value   // what peek finds where nothing is
}

// tmplScope holds the variables that are set in it.
type tmplScope struct {
	parent *tmplScope
	syms   []int
	vals   []value
	kept   bool // a macro refers to it
}

func (s *tmplScope) set(sym int, v value) {
	for i, k := range s.syms {
		if k == sym {
			s.vals[i] = v
			return
		}
	}
	s.syms = append(s.syms, sym)
	s.vals = append(s.vals, v)
}

func (s *tmplScope) get(sym int) (value, bool) {
	for ; s != nil; s = s.parent {
		for i, k := range s.syms {
			if k == sym {
				return s.vals[i], true
			}
		}
	}
	return value{}, false
}

// flow is how a statement ends.
type flow uint8

const (
	flowOn flow = iota
	flowBreak
	flowContinue
)

// maxTemplateCalls bounds macros and expressions inside of each other.
const maxTemplateCalls = 400

// run executes the template with variables by name and returns what it prints, which
// is valid until the next run.
func (x *execution) run(t *chatTemplate, vars []namedValue) ([]byte, error) {
	x.t, x.out, x.steps, x.memory, x.depth = t, x.out[:0], 0, 0, 0
	x.stack = x.stack[:0]
	if x.limits.time > 0 && x.now != nil {
		x.until = x.now().Add(x.limits.time)
	}
	s := &tmplScope{}
	for _, v := range vars {
		if sym, ok := t.syms[v.name]; ok {
			s.set(sym, v.v)
		}
	}
	_, err := x.body(t.body, s)
	return x.out, err
}

// step counts n steps.
func (x *execution) step(n int) error {
	before := x.steps
	if x.steps += n; x.steps > x.limits.steps {
		return errTemplateSteps
	}
	const often = 4096
	if x.steps/often != before/often && x.limits.time > 0 && x.now != nil && x.now().After(x.until) {
		return errTemplateTime
	}
	return nil
}

// made counts memory.
func (x *execution) made(bytes int) error {
	if x.memory += bytes; x.memory > x.limits.memory || bytes < 0 {
		return errTemplateMemory
	}
	return nil
}

func (x *execution) text(s string) (value, error) { return stringValue(s), x.made(len(s)) }

func (x *execution) scope(parent *tmplScope) *tmplScope {
	if n := len(x.free); n > 0 {
		s := x.free[n-1]
		x.free = x.free[:n-1]
		s.parent = parent
		return s
	}
	return &tmplScope{parent: parent}
}

func (x *execution) release(s *tmplScope) {
	if s.kept {
		return
	}
	clear(s.vals)
	s.syms, s.vals, s.parent = s.syms[:0], s.vals[:0], nil
	x.free = append(x.free, s)
}

func (x *execution) body(nodes []*tmplNode, s *tmplScope) (flow, error) {
	for _, n := range nodes {
		f, err := x.statement(n, s)
		if err != nil || f != flowOn {
			return f, err
		}
	}
	return flowOn, nil
}

func (n *tmplNode) wrap(err error) error {
	if err == nil {
		return nil
	}
	return n.wrapped(err)
}

func (n *tmplNode) wrapped(err error) error {
	var refused *templateError
	if errors.As(err, &refused) || strings.HasPrefix(err.Error(), "template line ") {
		return err
	}
	return fmt.Errorf("template line %d: %w", n.line, err)
}

func (x *execution) statement(n *tmplNode, s *tmplScope) (flow, error) {
	if err := x.step(1); err != nil {
		return flowOn, err
	}
	switch n.kind {
	case nodeText:
		return flowOn, x.print(n.text)
	case nodePrint:
		if len(n.a.args) > 1 && (n.a.kind == exprBinary || n.a.kind == exprConcat) {
			return flowOn, n.wrap(x.printSum(n.a, s))
		}
		if v := x.peek(n.a, s); v != nil && v.kind == kindString {
			return flowOn, x.print(v.str)
		}
		v, err := x.eval(n.a, s)
		if err != nil {
			return flowOn, n.wrap(err)
		}
		if v.kind == kindString {
			return flowOn, x.print(v.str)
		}
		return flowOn, n.wrap(x.printValue(v))
	case nodeIf:
		ok, err := x.truth(n.a, s)
		if err != nil {
			return flowOn, n.wrap(err)
		}
		if ok {
			return x.body(n.body, s)
		}
		return x.body(n.other, s)
	case nodeFor:
		f, err := x.loop(n, s)
		return f, n.wrap(err)
	case nodeSet:
		return flowOn, n.wrap(x.assign(n, s))
	case nodeMacro:
		s.keep()
		s.set(n.sym, x.macro(n, s, nil))
		return flowOn, nil
	case nodeCall:
		s.keep()
		v, err := x.call(n.a, s, []namedValue{{"caller", x.macro(n, s, nil)}})
		if err == nil {
			err = x.printValue(v)
		}
		return flowOn, n.wrap(err)
	case nodeFilter:
		text, err := x.capture(n.body, s)
		if err != nil {
			return flowOn, err
		}
		v, err := x.filtered(n.a, n.b, text, s)
		if err == nil && v.kind != kindString {
			err = fmt.Errorf("a filter block that gives a %s", kindNames[v.kind])
		}
		if err == nil {
			err = x.printValue(v)
		}
		return flowOn, n.wrap(err)
	case nodeWith:
		inner := x.scope(s)
		defer x.release(inner)
		vals := make([]value, len(n.named))
		for i, a := range n.named {
			var err error
			if vals[i], err = x.eval(a.v, s); err != nil {
				return flowOn, n.wrap(err)
			}
		}
		for i, a := range n.named {
			inner.set(a.sym, vals[i])
		}
		return x.body(n.body, inner)
	case nodeGroup:
		inner := x.scope(s)
		defer x.release(inner)
		return x.body(n.body, inner)
	case nodeBreak:
		return flowBreak, nil
	case nodeContinue:
		return flowContinue, nil
	}
	return flowOn, n.wrap(errors.New("unknown statement"))
}

func (s *tmplScope) keep() {
	for ; s != nil && !s.kept; s = s.parent {
		s.kept = true
	}
}

func (x *execution) print(s string) error {
	if x.out = append(x.out, s...); len(x.out) > x.limits.output {
		return errTemplateOutput
	}
	return nil
}

func (x *execution) printValue(v value) (err error) {
	if x.out, err = appendText(x.out, v, x.limits.output); err == nil && len(x.out) > x.limits.output {
		err = errTemplateOutput
	}
	return err
}

// equal is ==, its cost in steps.
func (x *execution) equal(a, b value) (bool, error) {
	if a.kind == kindView || b.kind == kindView {
		return false, errors.New("a view is compared")
	}
	m := meter{x.limits.steps - x.steps}
	before := m.left
	ok := m.equal(a, b, 0)
	if m.left < 0 {
		return false, errTemplateSteps
	}
	return ok, x.step(before - m.left)
}

// metered has f compare values, its cost in steps.
func (x *execution) metered(f func(*meter) error) error {
	m := meter{x.limits.steps - x.steps}
	before := m.left
	if err := f(&m); err != nil {
		return err
	}
	return x.step(before - m.left)
}

// capture returns what a body prints.
func (x *execution) capture(body []*tmplNode, s *tmplScope) (value, error) {
	inner := x.scope(s)
	defer x.release(inner)
	return x.captureIn(body, inner)
}

func (x *execution) captureIn(body []*tmplNode, s *tmplScope) (value, error) {
	from := len(x.out)
	_, err := x.body(body, s)
	if err != nil {
		return value{}, err
	}
	text := string(x.out[from:])
	x.out = x.out[:from]
	return x.text(text)
}

// filtered evaluates a chain of filters on a value in place of hole.
func (x *execution) filtered(n, hole *tmplNode, v value, s *tmplScope) (value, error) {
	if n == hole {
		return v, nil
	}
	in, err := x.filtered(n.a, hole, v, s)
	if err != nil {
		return value{}, err
	}
	return x.applyFilter(n, in, s)
}

func (x *execution) assign(n *tmplNode, s *tmplScope) error {
	var v value
	var err error
	if n.c != nil {
		if v, err = x.capture(n.body, s); err == nil {
			v, err = x.filtered(n.b, n.c, v, s)
		}
	} else {
		v, err = x.operand(n.b, s)
	}
	if err != nil {
		return err
	}
	if n.a.kind != exprAttr {
		return x.bind(n.a, v, s)
	}
	target, ok := s.get(n.a.a.sym)
	if !ok || target.kind != kindNamespace {
		return fmt.Errorf("%s is no namespace: attributes of other values cannot be set", n.a.a.text)
	}
	target.dict().put(n.a.text, v)
	return nil
}

// bind gives a value to a name, or its items to several.
func (x *execution) bind(target *tmplNode, v value, s *tmplScope) error {
	if target.kind == exprName {
		s.set(target.sym, v)
		return nil
	}
	items, err := x.items(v)
	if err != nil {
		return err
	}
	if len(items) != len(target.args) {
		return fmt.Errorf("%d values for %d names", len(items), len(target.args))
	}
	for i, a := range target.args {
		s.set(a.sym, items[i])
	}
	return nil
}

// items returns what iterating over a value gives.
func (x *execution) items(v value) ([]value, error) {
	switch v.kind {
	case kindList, kindTuple:
		return v.list(), nil
	case kindDict:
		return v.dict().keys, nil
	case kindView:
		w := v.view()
		if w.name == "" {
			if w.used {
				return nil, errors.New("a generator cannot be gone through twice")
			}
			w.used = true
		}
		return w.items, nil
	case kindUndefined:
		return nil, nil
	case kindString:
		if err := x.step(len(v.str)); err != nil {
			return nil, err
		}
		if err := x.made(48 * len(v.str)); err != nil {
			return nil, err
		}
		out := make([]value, 0, len(v.str))
		for i := 0; i < len(v.str); {
			_, n := utf8.DecodeRuneInString(v.str[i:])
			out = append(out, stringValue(v.str[i:i+n]))
			i += n
		}
		return out, nil
	}
	return nil, fmt.Errorf("a %s cannot be iterated", kindNames[v.kind])
}

// loopValue is the variable loop.
type loopValue struct {
	items []value
	i     int
	depth int
	last  []value // of changed
	seen  bool
}

func (x *execution) loop(n *tmplNode, s *tmplScope) (flow, error) {
	v, err := x.eval(n.b, s)
	if err != nil {
		return flowOn, err
	}
	items, err := x.items(v)
	if err != nil {
		return flowOn, err
	}
	inner := x.scope(s)
	defer func() { x.release(inner) }()
	if n.c != nil {
		var kept []value
		for _, item := range items {
			if err := x.step(1); err != nil {
				return flowOn, err
			}
			if err := x.bind(n.a, item, inner); err != nil {
				return flowOn, err
			}
			ok, err := x.truth(n.c, inner)
			if err != nil {
				return flowOn, err
			}
			if ok {
				kept = append(kept, item)
			}
		}
		items = kept
	}
	l, symbol := &loopValue{items: items}, x.t.syms["loop"]
	for l.i = range items {
		if inner.kept {
			inner = x.scope(s)
		} else {
			inner.syms, inner.vals = inner.syms[:0], inner.vals[:0]
		}
		if n.loops {
			inner.set(symbol, value{kind: kindLoop, ref: l})
		}
		if err := x.step(1); err != nil {
			return flowOn, err
		}
		if err := x.bind(n.a, items[l.i], inner); err != nil {
			return flowOn, err
		}
		f, err := x.body(n.body, inner)
		if err != nil {
			return flowOn, err
		}
		if f == flowBreak {
			break
		}
	}
	if len(items) == 0 {
		return x.body(n.other, s)
	}
	return flowOn, nil
}

func (l *loopValue) attr(name string) (value, bool) {
	n := len(l.items)
	switch name {
	case "index":
		return intValue(l.i + 1), true
	case "index0":
		return intValue(l.i), true
	case "revindex":
		return intValue(n - l.i), true
	case "revindex0":
		return intValue(n - l.i - 1), true
	case "first":
		return boolValue(l.i == 0), true
	case "last":
		return boolValue(l.i == n-1), true
	case "length":
		return intValue(n), true
	case "depth":
		return intValue(l.depth + 1), true
	case "depth0":
		return intValue(l.depth), true
	case "previtem":
		if l.i > 0 {
			return l.items[l.i-1], true
		}
		return value{}, true
	case "nextitem":
		if l.i+1 < n {
			return l.items[l.i+1], true
		}
		return value{}, true
	case "cycle":
		return funcOf("cycle", func(_ *execution, args []value, _ []namedValue) (value, error) {
			if len(args) == 0 {
				return value{}, errors.New("cycle wants values")
			}
			return args[l.i%len(args)], nil
		}), true
	case "changed":
		return funcOf("changed", func(x *execution, args []value, _ []namedValue) (value, error) {
			same := false
			if l.seen {
				var err error
				if same, err = x.equal(listValue(args), listValue(l.last)); err != nil {
					return value{}, err
				}
			}
			l.seen, l.last = true, args
			return boolValue(!same), nil
		}), true
	}
	return value{}, false
}

func funcOf(name string, call func(*execution, []value, []namedValue) (value, error)) value {
	return value{kind: kindFunc, ref: &funcValue{name: name, call: call}}
}

// macro returns a macro, or the caller of a call block, as a function.
func (x *execution) macro(n *tmplNode, s *tmplScope, _ []namedValue) value {
	return funcOf(n.text, func(x *execution, args []value, named []namedValue) (value, error) {
		if x.depth++; x.depth > maxTemplateCalls {
			return value{}, errTemplateDepth
		}
		defer func() { x.depth-- }()
		inner := x.scope(s)
		defer x.release(inner)
		if len(args) > len(n.named) {
			return value{}, fmt.Errorf("macro %s takes %d arguments, not %d", n.text, len(n.named), len(args))
		}
		used := 0
		for i, p := range n.named {
			v, given := value{}, false
			if i < len(args) {
				v, given = args[i], true
			}
			for _, a := range named {
				if a.name == p.name {
					if given {
						return value{}, fmt.Errorf("macro %s: argument %s is given twice", n.text, p.name)
					}
					v, given = a.v, true
					used++
				}
			}
			if !given && p.v != nil {
				var err error
				if v, err = x.eval(p.v, inner); err != nil {
					return value{}, err
				}
			}
			inner.set(p.sym, v)
		}
		for _, a := range named {
			if a.name == "caller" {
				if sym, ok := x.t.syms["caller"]; ok {
					inner.set(sym, a.v)
				}
				used++
			}
		}
		if used < len(named) {
			return value{}, fmt.Errorf("macro %s: an argument is unknown", n.text)
		}
		return x.captureIn(n.body, inner)
	})
}

// peek returns what a constant, a variable or a field of an object is without copying it,
// valid until the next variable is set; nil when eval has to find out.
func (x *execution) peek(n *tmplNode, s *tmplScope) *value {
	switch n.kind {
	case exprConst:
		x.steps++
		return &n.v
	case exprName:
		for ; s != nil; s = s.parent {
			for i, k := range s.syms {
				if k == n.sym {
					x.steps++
					return &s.vals[i]
				}
			}
		}
	case exprAttr:
		if v := x.peek(n.a, s); v != nil && (v.kind == kindDict && n.plain || v.kind == kindNamespace) {
			x.steps++
			d := v.dict()
			if i := d.findText(n.text); i >= 0 {
				return &d.vals[i]
			}
			x.absent = value{}
			return &x.absent
		}
	}
	return nil
}

// operand is eval, by way of peek.
func (x *execution) operand(n *tmplNode, s *tmplScope) (value, error) {
	if v := x.peek(n, s); v != nil {
		return *v, nil
	}
	return x.eval(n, s)
}

// truth is whether an expression is true.
func (x *execution) truth(n *tmplNode, s *tmplScope) (bool, error) {
	switch n.kind {
	case exprCompare:
		return x.comparison(n, s)
	case exprAnd, exprOr:
		if ok, err := x.truth(n.a, s); err != nil || ok == (n.kind == exprOr) {
			return ok, err
		}
		return x.truth(n.b, s)
	case exprUnary:
		if n.text == "not" {
			ok, err := x.truth(n.a, s)
			return !ok, err
		}
	case exprIs:
		return x.is(n, s)
	}
	v, err := x.operand(n, s)
	return v.truth(), err
}

// is evaluates a test.
func (x *execution) is(n *tmplNode, s *tmplScope) (bool, error) {
	if err := x.step(1); err != nil {
		return false, err
	}
	v, err := x.operand(n.a, s)
	if err != nil {
		return false, err
	}
	args, err := x.evalAll(n.args, s)
	if err != nil {
		return false, err
	}
	ok, err := n.test(x, v, args)
	return ok != (n.sym == 1), err
}

// eval evaluates an expression.
func (x *execution) eval(n *tmplNode, s *tmplScope) (value, error) {
	if err := x.step(1); err != nil {
		return value{}, err
	}
	if n == nil {
		return value{}, nil
	}
	switch n.kind {
	case exprConst:
		return n.v, nil
	case exprName:
		if v, ok := s.get(n.sym); ok {
			return v, nil
		}
		return x.global(n.text), nil
	case exprList, exprTuple:
		list, err := x.evalAll(n.args, s)
		if n.kind == exprTuple {
			return tupleValue(list...), err
		}
		return listValue(list), err
	case exprDict:
		d := &dictValue{}
		for i := 0; i < len(n.args); i += 2 {
			k, err := x.eval(n.args[i], s)
			if err != nil {
				return k, err
			}
			v, err := x.eval(n.args[i+1], s)
			if err != nil {
				return v, err
			}
			if err := x.made(128); err != nil {
				return v, err
			}
			if !k.isKey() {
				return v, fmt.Errorf("a %s cannot be a key", kindNames[k.kind])
			}
			d.set(k, v)
		}
		return dictOf(d), nil
	case exprAttr:
		if v := x.peek(n, s); v != nil {
			return *v, nil
		}
		v, err := x.operand(n.a, s)
		if err != nil {
			return v, err
		}
		return x.attribute(v, n.text)
	case exprItem:
		v, err := x.eval(n.a, s)
		if err != nil {
			return v, err
		}
		k, err := x.eval(n.b, s)
		if err != nil {
			return k, err
		}
		return x.item(v, k)
	case exprSlice:
		return x.slice(n, s)
	case exprCall:
		return x.call(n, s, nil)
	case exprPipe:
		v, err := x.operand(n.a, s)
		if err != nil {
			return v, err
		}
		return x.applyFilter(n, v, s)
	case exprIs:
		ok, err := x.is(n, s)
		return boolValue(ok), err
	case exprUnary:
		if n.text == "not" {
			ok, err := x.truth(n.a, s)
			return boolValue(!ok), err
		}
		v, err := x.eval(n.a, s)
		if err != nil {
			return v, err
		}
		switch {
		case !v.isNumber() || v.str != "":
			return v, fmt.Errorf("%s of a %s", n.text, kindNames[v.kind])
		case v.kind == kindFloat && n.text == "-":
			return floatValue(-v.float()), nil
		case v.kind == kindFloat:
			return v, nil
		case n.text == "-":
			return intValue(-v.int()), nil
		}
		return intValue(v.int()), nil
	case exprBinary:
		if n.text == "+" {
			return x.sum(n, s)
		}
		a, err := x.operand(n.a, s)
		if err != nil {
			return a, err
		}
		b, err := x.operand(n.b, s)
		if err != nil {
			return b, err
		}
		if n.text == "-" && a.kind == kindInt && b.kind == kindInt && a.str == "" && b.str == "" {
			return intArithmetic("-", a.int(), b.int())
		}
		return x.binary(n.text, a, b)
	case exprCompare:
		ok, err := x.comparison(n, s)
		return boolValue(ok), err
	case exprAnd, exprOr:
		v, err := x.eval(n.a, s)
		if err != nil || v.truth() == (n.kind == exprOr) {
			return v, err
		}
		return x.eval(n.b, s)
	case exprCond:
		ok, err := x.truth(n.a, s)
		if err != nil {
			return value{}, err
		}
		if ok {
			return x.eval(n.b, s)
		}
		return x.eval(n.c, s)
	case exprConcat:
		parts, err := x.evalAll(n.args, s)
		if err != nil {
			return value{}, err
		}
		var out []byte
		for _, v := range parts {
			if out, err = appendText(out, v, x.limits.memory); err != nil {
				return value{}, err
			}
			if len(out) > x.limits.memory {
				return value{}, errTemplateMemory
			}
		}
		return x.text(string(out))
	}
	return value{}, errors.New("unknown expression")
}

// sum evaluates a + b + c: a text is put together once, not once for each sign.
func (x *execution) sum(n *tmplNode, s *tmplScope) (value, error) {
	from := len(x.stack)
	defer x.unstack(from)
	size, err := x.terms(n.args, s)
	parts := x.stack[from:]
	switch {
	case err != nil:
		return value{}, err
	case size < 0:
		return x.added(parts)
	}
	if err := x.made(size); err != nil {
		return value{}, err
	}
	out := make([]byte, 0, size)
	for i := range parts {
		out = append(out, parts[i].str...)
	}
	return stringValue(string(out)), nil
}

// added adds the terms of a sum one by one.
func (x *execution) added(parts []value) (v value, err error) {
	v = parts[0]
	for i := 1; i < len(parts) && err == nil; i++ {
		v, err = x.binary("+", v, parts[i])
	}
	return v, err
}

// terms puts values on the stack. size is that of their text, -1 when one of them is none.
func (x *execution) terms(nodes []*tmplNode, s *tmplScope) (size int, err error) {
	for _, n := range nodes {
		v, err := x.operand(n, s)
		if err != nil {
			return 0, err
		}
		x.stack = append(x.stack, v)
		if v := &x.stack[len(x.stack)-1]; v.kind != kindString {
			size = -1
		} else if size >= 0 {
			size += len(v.str)
		}
	}
	return size, nil
}

func (x *execution) unstack(from int) {
	clear(x.stack[from:])
	x.stack = x.stack[:from]
}

// printSum prints a sum or a concatenation without putting it together.
func (x *execution) printSum(n *tmplNode, s *tmplScope) error {
	from := len(x.stack)
	defer x.unstack(from)
	size, err := x.terms(n.args, s)
	if err == nil && size < 0 && n.kind == exprBinary {
		var v value
		v, err = x.added(x.stack[from:])
		x.stack = append(x.stack[:from], v)
	}
	for i := from; i < len(x.stack) && err == nil; i++ {
		err = x.printValue(x.stack[i])
	}
	return err
}

func (x *execution) evalAll(nodes []*tmplNode, s *tmplScope) ([]value, error) {
	if len(nodes) == 0 {
		return nil, nil
	}
	out := make([]value, len(nodes))
	for i, n := range nodes {
		var err error
		if out[i], err = x.eval(n, s); err != nil {
			return nil, err
		}
	}
	return out, x.made(48 * len(out))
}

func (x *execution) applyFilter(n *tmplNode, v value, s *tmplScope) (value, error) {
	args, err := x.evalAll(n.args, s)
	if err != nil {
		return value{}, err
	}
	named, err := x.evalNamed(n.named, s)
	if err != nil {
		return value{}, err
	}
	if err := x.step(1 + len(v.str)/64); err != nil {
		return value{}, err
	}
	out, err := n.filter(x, v, args, named)
	if err != nil {
		return out, fmt.Errorf("filter %s: %w", n.text, err)
	}
	return out, nil
}

func (x *execution) evalNamed(args []tmplArg, s *tmplScope) ([]namedValue, error) {
	if len(args) == 0 {
		return nil, nil
	}
	out := make([]namedValue, len(args))
	for i, a := range args {
		v, err := x.eval(a.v, s)
		if err != nil {
			return nil, err
		}
		out[i] = namedValue{a.name, v}
	}
	return out, nil
}

func (x *execution) call(n *tmplNode, s *tmplScope, more []namedValue) (value, error) {
	f, err := x.eval(n.a, s)
	if err != nil {
		return f, err
	}
	args, err := x.evalAll(n.args, s)
	if err != nil {
		return value{}, err
	}
	named, err := x.evalNamed(n.named, s)
	if err != nil {
		return value{}, err
	}
	if f.kind != kindFunc {
		return value{}, fmt.Errorf("a %s cannot be called", kindNames[f.kind])
	}
	fn := f.ref.(*funcValue)
	cost := fn.cost
	for i := range args {
		cost += len(args[i].str) / 64
	}
	if err := x.step(cost); err != nil {
		return value{}, err
	}
	v, err := fn.call(x, args, append(named, more...))
	var refused *templateError
	if err != nil && fn.name != "" && !errors.As(err, &refused) && !strings.HasPrefix(err.Error(), "template line ") {
		err = fmt.Errorf("%s: %w", fn.name, err)
	}
	return v, err
}

// attribute is v.name: a method or an attribute first, then an item.
func (x *execution) attribute(v value, name string) (value, error) {
	switch v.kind {
	case kindUndefined:
		return v, fmt.Errorf("%s of an undefined value", name)
	case kindLoop:
		if out, ok := v.ref.(*loopValue).attr(name); ok {
			return out, nil
		}
	case kindNamespace:
		out, _ := v.dict().text(name)
		return out, nil
	default:
		if m, ok := method(v, name); ok {
			return m, nil
		}
		if v.isDict() {
			out, _ := v.dict().text(name)
			return out, nil
		}
	}
	return value{}, nil
}

// item is v[k]: an item first, then an attribute.
func (x *execution) item(v, k value) (value, error) {
	switch {
	case v.kind == kindUndefined:
		return v, errors.New("an item of an undefined value")
	case v.isDict():
		if out, ok := v.dict().get(k); ok {
			return out, nil
		}
	case (v.isList() || v.kind == kindView && v.view().name == rangeView) && (k.kind == kindInt || k.kind == kindBool) && k.str == "":
		var list []value
		if v.kind == kindView {
			list = v.view().items
		} else {
			list = v.list()
		}
		i := k.int()
		if i < 0 {
			i += len(list)
		}
		if i >= 0 && i < len(list) {
			return list[i], nil
		}
		return value{}, nil
	case v.kind == kindString && (k.kind == kindInt || k.kind == kindBool) && k.str == "":
		return runeAt(v.str, k.int()), nil
	}
	if k.kind == kindString {
		if v.isDict() {
			m, _ := method(v, k.str)
			return m, nil
		}
		return x.attribute(v, k.str)
	}
	return value{}, nil
}

func runeAt(s string, i int) value {
	n := utf8.RuneCountInString(s)
	if i < 0 {
		i += n
	}
	if i < 0 || i >= n {
		return value{}
	}
	for at := range s {
		if i == 0 {
			_, size := utf8.DecodeRuneInString(s[at:])
			return stringValue(s[at : at+size])
		}
		i--
	}
	return value{}
}

func (x *execution) slice(n *tmplNode, s *tmplScope) (value, error) {
	v, err := x.eval(n.a, s)
	if err != nil {
		return v, err
	}
	var bounds [3]value
	for i, a := range n.args {
		if a == nil {
			bounds[i] = none
			continue
		}
		if bounds[i], err = x.eval(a, s); err != nil {
			return v, err
		}
		if k := bounds[i].kind; k != kindNone && k != kindInt && k != kindBool || bounds[i].str != "" {
			return v, fmt.Errorf("a %s as a bound of a slice", kindNames[k])
		}
	}
	if v.kind == kindString && onlyASCII(v.str) && bounds[2].kind == kindNone {
		from, to, _, _ := sliceBounds(len(v.str), bounds)
		if from >= to {
			return stringValue(""), nil
		}
		return stringValue(v.str[from:to]), nil
	}
	if !v.isList() && v.kind != kindString {
		return v, fmt.Errorf("a slice of a %s", kindNames[v.kind])
	}
	items, err := x.items(v)
	if err != nil {
		return v, err
	}
	from, to, step, err := sliceBounds(len(items), bounds)
	if err != nil {
		return v, err
	}
	if step == 1 && v.kind != kindString {
		if from >= to {
			from, to = 0, 0
		}
		out := items[from:to:to]
		return value{kind: v.kind, ref: &out}, x.step(1)
	}
	var out []value
	for i := from; step > 0 && i < to || step < 0 && i > to; i += step {
		out = append(out, items[i])
	}
	if err := x.made(48 * len(out)); err != nil {
		return v, err
	}
	if v.kind == kindString {
		var b strings.Builder
		for _, c := range out {
			b.WriteString(c.str)
		}
		return stringValue(b.String()), x.step(len(out))
	}
	return value{kind: v.kind, ref: &out}, x.step(len(out))
}

func onlyASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// sliceBounds turns the bounds of a Python slice into indices.
func sliceBounds(n int, b [3]value) (from, to, step int, err error) {
	step = 1
	if b[2].kind != kindNone {
		if step = b[2].int(); step == 0 {
			return 0, 0, 0, errors.New("a slice with step 0")
		}
	}
	step = max(min(step, 1<<40), -1<<40)
	low, high := 0, n
	if step < 0 {
		low, high = -1, n-1
	}
	clip := func(v value, otherwise int) int {
		if v.kind == kindNone {
			return otherwise
		}
		i := v.int()
		if i < 0 {
			i += n
		}
		return min(max(i, low), high)
	}
	if step > 0 {
		return clip(b[0], low), clip(b[1], high), step, nil
	}
	return clip(b[0], high), clip(b[1], low), step, nil
}

func (x *execution) comparison(n *tmplNode, s *tmplScope) (bool, error) {
	if p := x.peek(n.a, s); p != nil && p.kind == kindString && len(n.ops) == 1 && n.args[0].kind == exprConst && n.args[0].v.kind == kindString {
		// The usual case, a text and a constant.
		switch text := n.args[0].v.str; n.ops[0] {
		case "==":
			return p.str == text, x.step(2 + len(text)/256)
		case "!=":
			return p.str != text, x.step(2 + len(text)/256)
		}
	}
	a, err := x.operand(n.a, s)
	if err != nil {
		return false, err
	}
	for i, op := range n.ops {
		b, err := x.operand(n.args[i], s)
		if err != nil {
			return false, err
		}
		if err := x.step(1 + (len(a.str)+len(b.str))/256); err != nil {
			return false, err
		}
		ok, err := x.holds(op, a, b)
		if err != nil || !ok {
			return false, err
		}
		a = b
	}
	return true, nil
}

func (x *execution) holds(op string, a, b value) (bool, error) {
	switch op {
	case "==", "!=":
		same, err := x.equal(a, b)
		return same == (op == "=="), err
	case "in", "not in":
		in, err := x.contains(b, a)
		return in != (op == "not in"), err
	}
	if a.kind == kindUndefined || b.kind == kindUndefined {
		return false, errors.New("an undefined value has no order")
	}
	c := 0
	err := x.metered(func(m *meter) (err error) {
		c, err = m.compare(a, b)
		return err
	})
	if err != nil {
		return false, err
	}
	switch op {
	case "<":
		return c < 0, nil
	case "<=":
		return c <= 0, nil
	case ">":
		return c > 0, nil
	}
	return c >= 0, nil
}

func (x *execution) contains(in, v value) (bool, error) {
	switch in.kind {
	case kindString:
		if v.kind != kindString {
			return false, fmt.Errorf("a %s in a str", kindNames[v.kind])
		}
		return strings.Contains(in.str, v.str), nil
	case kindList, kindTuple:
		for _, item := range in.list() {
			if same, err := x.equal(item, v); same || err != nil {
				return same, err
			}
		}
		return false, nil
	case kindView:
		items, err := x.items(in)
		if err != nil {
			return false, err
		}
		return x.contains(listValue(items), v)
	case kindDict:
		if !v.isKey() {
			return false, fmt.Errorf("a %s cannot be a key", kindNames[v.kind])
		}
		return in.dict().find(v) >= 0, nil
	case kindUndefined:
		return false, nil
	}
	return false, fmt.Errorf("in a %s", kindNames[in.kind])
}

// binary is an operator of arithmetic.
func (x *execution) binary(op string, a, b value) (value, error) {
	bad := func() (value, error) {
		return value{}, fmt.Errorf("%s %s %s", kindNames[a.kind], op, kindNames[b.kind])
	}
	switch {
	case op == "+" && a.kind == kindString && b.kind == kindString:
		if err := x.made(len(a.str) + len(b.str)); err != nil {
			return value{}, err
		}
		return stringValue(a.str + b.str), nil
	case op == "+" && a.isList() && a.kind == b.kind:
		p, q := a.list(), b.list()
		if err := x.made(48 * (len(p) + len(q))); err != nil {
			return value{}, err
		}
		out := append(append(make([]value, 0, len(p)+len(q)), p...), q...)
		return value{kind: a.kind, ref: &out}, x.step(len(out))
	case op == "*" && (a.kind == kindString || a.isList()) && (b.kind == kindInt || b.kind == kindBool):
		return x.repeat(a, b.int())
	case op == "*" && (b.kind == kindString || b.isList()) && (a.kind == kindInt || a.kind == kindBool):
		return x.repeat(b, a.int())
	case op == "%" && a.kind == kindString:
		return x.percent(a.str, b)
	case !a.isNumber() || !b.isNumber() || a.str != "" || b.str != "":
		return bad()
	}
	if a.kind != kindFloat && b.kind != kindFloat && op != "/" {
		return intArithmetic(op, a.int(), b.int())
	}
	p, q := a.asFloat(), b.asFloat()
	switch op {
	case "+":
		return floatValue(p + q), nil
	case "-":
		return floatValue(p - q), nil
	case "*":
		return floatValue(p * q), nil
	case "**":
		return floatValue(math.Pow(p, q)), nil
	}
	if q == 0 {
		return value{}, errors.New("division by zero")
	}
	switch op {
	case "/":
		return floatValue(p / q), nil
	case "//":
		return floatValue(math.Floor(p / q)), nil
	}
	r := math.Mod(p, q)
	if r != 0 && (r < 0) != (q < 0) {
		r += q
	}
	return floatValue(r), nil
}

var errIntRange = errors.New("a number is too large")

func intArithmetic(op string, a, b int) (value, error) {
	switch op {
	case "+":
		if c := a + b; (c > a) == (b > 0) {
			return intValue(c), nil
		}
		return value{}, errIntRange
	case "-":
		if c := a - b; (c < a) == (b > 0) {
			return intValue(c), nil
		}
		return value{}, errIntRange
	case "*":
		c := a * b
		if a != 0 && (c/a != b || a == -1 && b == math.MinInt) {
			return value{}, errIntRange
		}
		return intValue(c), nil
	case "**":
		if b < 0 {
			return floatValue(math.Pow(float64(a), float64(b))), nil
		}
		out := intValue(1)
		for range min(b, 64) {
			var err error
			if out, err = intArithmetic("*", out.int(), a); err != nil {
				return out, err
			}
		}
		if b > 64 && a != 0 && a != 1 && a != -1 {
			return value{}, errIntRange
		}
		if a == -1 && b%2 == 1 {
			out = intValue(-1)
		}
		return out, nil
	}
	if b == 0 {
		return value{}, errors.New("division by zero")
	}
	if a == math.MinInt && b == -1 {
		return value{}, errIntRange
	}
	q, r := a/b, a%b
	if r != 0 && (r < 0) != (b < 0) {
		q, r = q-1, r+b
	}
	if op == "//" {
		return intValue(q), nil
	}
	return intValue(r), nil
}

func (x *execution) repeat(v value, n int) (value, error) {
	n = max(n, 0)
	if v.kind == kindString {
		if len(v.str) > 0 && n > x.limits.memory/len(v.str) {
			return value{}, errTemplateMemory
		}
		return x.text(strings.Repeat(v.str, n))
	}
	list := v.list()
	if len(list) == 0 {
		n = 0
	} else if n > x.limits.memory/(48*len(list)) {
		return value{}, errTemplateMemory
	}
	if err := x.made(48 * n * len(list)); err != nil {
		return value{}, err
	}
	out := make([]value, 0, n*len(list))
	for range n {
		out = append(out, list...)
	}
	return value{kind: v.kind, ref: &out}, x.step(len(out))
}

// percent is "..." % values with %s, %d, %r, %c and %%.
func (x *execution) percent(format string, v value) (value, error) {
	args := []value{v}
	if v.kind == kindTuple {
		args = v.list()
	}
	var out []byte
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			out = append(out, format[i])
			continue
		}
		i++
		if i < len(format) && format[i] == '%' {
			out = append(out, '%')
			continue
		}
		if i >= len(format) || len(args) == 0 {
			return value{}, errors.New("a format has too few values")
		}
		var err error
		switch a := args[0]; format[i] {
		case 's':
			out, err = appendText(out, a, x.limits.memory)
		case 'r':
			out, err = appendRepr(out, a, len(out)+x.limits.memory, 0)
		case 'c':
			switch {
			case a.kind == kindInt && a.str == "" && a.int() >= 0 && a.int() <= utf8.MaxRune:
				out = utf8.AppendRune(out, rune(a.int()))
			case a.kind == kindString && utf8.RuneCountInString(a.str) == 1:
				out = append(out, a.str...)
			default:
				err = fmt.Errorf("%%c of a %s", kindNames[a.kind])
			}
		case 'd':
			if !a.isNumber() {
				err = fmt.Errorf("%%d of a %s", kindNames[a.kind])
			} else if a.kind == kindFloat {
				a = intValue(int(a.float()))
			}
			if err == nil {
				if a.kind == kindBool {
					a.kind = kindInt
				}
				out, err = appendRepr(out, a, len(out)+x.limits.memory, 0)
			}
		default:
			err = fmt.Errorf("%%%c is not supported", format[i])
		}
		if err == nil && len(out) > x.limits.memory {
			err = errTemplateMemory
		}
		if err != nil {
			return value{}, err
		}
		args = args[1:]
	}
	if len(args) > 0 && v.kind != kindList && v.kind != kindDict && v.kind != kindUndefined { // what has items may be left
		return value{}, errors.New("a format has too many values")
	}
	return x.text(string(out))
}
