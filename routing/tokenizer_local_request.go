package routing

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// contentFormat is how the parts of a message's content reach the template.
type contentFormat uint8

const (
	contentString contentFormat = iota // one text
	contentParts                       // a list of dicts, as in the request
)

// errUnsupported is the reason why an engine might make other tokens of a request, or
// refuse it.
var errUnsupported = errors.New("not supported")

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errUnsupported, fmt.Sprintf(format, args...))
}

// chatRules say how an engine was told to render chats.
type chatRules struct {
	format      contentFormat
	developer   bool         // the template knows the role
	defaults    []namedValue // chat_template_kwargs of the server
	dropForNone bool         // no tools when tool_choice is none
}

// field returns a field of a body, none when it is absent.
func (d *dictValue) field(name string) value {
	if v, ok := d.text(name); ok {
		return v
	}
	return none
}

// flag returns a bool of a body.
func (d *dictValue) flag(name string, otherwise bool) (bool, error) {
	switch v := d.field(name); v.kind {
	case kindNone:
		return otherwise, nil
	case kindBool:
		return v.truth(), nil
	}
	return false, unsupported("%s is no bool", name)
}

// reservedArgs are arguments of apply_chat_template that a request cannot set.
var reservedArgs = []string{
	"chat_template", "tokenize", "conversation", "messages", "padding", "truncation", "max_length", "return_tensors", "return_dict",
	"return_assistant_tokens_mask", "tokenizer_kwargs",
}

// chatOf reads a chat as vLLM does: what its protocol makes of the body, and what its
// renderer makes of that. The body's messages come behind known ones, which the rules
// have made before; developer says that one of those may be a developer's. special says that tokens go around the text.
func (rules *chatRules) chatOf(body value, known []value, developer bool) (in *chatInput, special bool, err error) {
	if !body.isDict() {
		return nil, false, unsupported("the body is no object")
	}
	d := body.dict()
	for _, name := range [...]string{"chat_template", "truncate_prompt_tokens", "mm_processor_kwargs"} {
		if d.field(name).kind != kindNone {
			return nil, false, unsupported("%s", name)
		}
	}
	in = &chatInput{tools: none, docs: none}
	if in.generate, err = d.flag("add_generation_prompt", true); err != nil {
		return nil, false, err
	}
	if in.resume, err = d.flag("continue_final_message", false); err != nil {
		return nil, false, err
	}
	if special, err = d.flag("add_special_tokens", false); err != nil {
		return nil, false, err
	}
	if in.docs, err = documents(d.field("documents")); err != nil {
		return nil, false, err
	}
	if in.tools, err = requestTools(d.field("tools")); err != nil {
		return nil, false, err
	}
	if choice := d.field("tool_choice"); rules.dropForNone && choice.kind == kindString && choice.str == "none" {
		in.tools = none
	}
	if err := rules.arguments(d, in); err != nil {
		return nil, false, err
	}
	if in.read, err = rules.conversation(d.field("messages"), known); err != nil {
		return in, special, err
	}
	in.developer = developer || slices.ContainsFunc(in.read[len(known):], isDeveloper)
	messages := in.read
	if in.developer && !rules.developer && slices.ContainsFunc(messages, isDeveloper) {
		messages = withoutDevelopers(messages)
	}
	in.messages = listValue(messages)
	return in, special, nil
}

// arguments merges chat_template_kwargs: the server's, the request's, and what fields
// of the request stand for. Null and "auto" do not override.
func (rules *chatRules) arguments(d *dictValue, in *chatInput) error {
	in.extra = slices.Clone(rules.defaults)
	set := func(name string, v value) {
		if v.kind == kindNone || v.kind == kindString && v.str == "auto" {
			return
		}
		for i := range in.extra {
			if in.extra[i].name == name {
				in.extra[i].v = v
				return
			}
		}
		in.extra = append(in.extra, namedValue{name, v})
	}
	effort, thinking := d.field("reasoning_effort"), false
	switch kwargs := d.field("chat_template_kwargs"); kwargs.kind {
	case kindNone:
	case kindDict:
		for i, k := range kwargs.dict().keys {
			v := kwargs.dict().vals[i]
			switch {
			case slices.Contains(reservedArgs, k.str):
				return unsupported("chat_template_kwargs.%s", k.str)
			case k.str == "tools" && v.kind != kindNone:
				if !v.isList() {
					return unsupported("chat_template_kwargs.tools is no list")
				}
				in.tools = v
			case k.str == "documents" && in.docs.kind == kindNone:
				in.docs = v
			case k.str == "tools", k.str == "documents", k.str == "add_generation_prompt", k.str == "continue_final_message":
			default:
				thinking = thinking || k.str == "enable_thinking"
				set(k.str, v)
			}
		}
	default:
		return unsupported("chat_template_kwargs is no object")
	}
	if effort.kind != kindNone {
		if effort.kind != kindString {
			return unsupported("reasoning_effort is no string")
		}
		set("reasoning_effort", effort)
		if !thinking {
			set("enable_thinking", boolValue(effort.str != "none"))
		}
	}
	return nil
}

func documents(v value) (value, error) {
	if v.kind == kindNone {
		return v, nil
	}
	if !v.isList() {
		return v, unsupported("documents is no list")
	}
	for _, doc := range v.list() {
		if !doc.isDict() || slices.ContainsFunc(doc.dict().vals, func(x value) bool { return x.kind != kindString }) {
			return v, unsupported("a document is no object of strings")
		}
	}
	return v, nil
}

// requestTools turns tools into what the protocol's model of them holds, in its order.
func requestTools(v value) (value, error) {
	if v.kind == kindNone {
		return v, nil
	}
	if !v.isList() || len(v.list()) == 0 {
		return v, unsupported("tools is no list, or empty")
	}
	out := make([]value, 0, len(v.list()))
	for _, tool := range v.list() {
		if !tool.isDict() {
			return v, unsupported("a tool is no object")
		}
		d := tool.dict()
		if typ, ok := d.text("type"); ok && (typ.kind != kindString || typ.str != "function") {
			return v, unsupported("a tool is no function")
		}
		fn := d.field("function")
		if !fn.isDict() {
			return v, unsupported("a tool has no function")
		}
		f := fn.dict()
		name, about, params := f.field("name"), f.field("description"), f.field("parameters")
		if name.kind != kindString || about.kind != kindNone && about.kind != kindString || params.kind != kindNone && !params.isDict() {
			return v, unsupported("a function of another shape")
		}
		g := &dictValue{}
		g.put("name", name)
		g.put("description", about)
		g.put("parameters", params)
		if strict := f.field("strict"); strict.kind == kindBool {
			g.put("strict", strict)
		} else if strict.kind != kindNone {
			return v, unsupported("strict is no bool")
		}
		late, inner := d.field("defer_loading"), f.field("defer_loading")
		if inner.kind == kindNone {
			inner = late
		}
		for _, x := range []value{late, inner} {
			if x.kind != kindNone && x.kind != kindBool {
				return v, unsupported("defer_loading is no bool")
			}
		}
		if inner.kind != kindNone {
			g.put("defer_loading", inner)
		}
		t := &dictValue{}
		t.put("type", stringValue("function"))
		t.put("function", dictOf(g))
		if late.kind != kindNone {
			t.put("defer_loading", late)
		}
		out = append(out, dictOf(t))
	}
	return listValue(out), nil
}

// conversation appends the messages of a request, as templates are given them, to known ones.
func (rules *chatRules) conversation(v value, known []value) ([]value, error) {
	if !v.isList() || len(known)+len(v.list()) == 0 {
		return nil, unsupported("messages is no list, or empty")
	}
	out := slices.Grow(known, len(v.list()))
	for _, m := range v.list() {
		if !m.isDict() {
			return nil, unsupported("a message is no object")
		}
		d, err := rules.message(m.dict())
		if err != nil {
			return nil, err
		}
		out = append(out, dictOf(d))
	}
	return out, nil
}

func isDeveloper(m value) bool {
	role, _ := m.dict().text("role")
	return role.str == "developer"
}

func (rules *chatRules) message(m *dictValue) (*dictValue, error) {
	role := m.field("role")
	if role.kind != kindString {
		return nil, unsupported("a message without a role")
	}
	content, err := rules.content(m.field("content"), role.str)
	if err != nil {
		return nil, err
	}
	d := &dictValue{}
	d.put("role", role)
	d.put("content", content)
	switch role.str {
	case "assistant":
		if calls := m.field("tool_calls"); calls.kind != kindNone {
			if !calls.isList() {
				return nil, unsupported("tool_calls is no list")
			}
			if len(calls.list()) > 0 {
				if calls, err = toolCalls(calls.list()); err != nil {
					return nil, err
				}
				d.put("tool_calls", calls)
			}
		}
		reasoning := m.field("reasoning")
		if reasoning.kind == kindNone {
			reasoning = m.field("reasoning_content")
		}
		if reasoning.kind != kindNone {
			if reasoning.kind != kindString {
				return nil, unsupported("reasoning is no string")
			}
			d.put("reasoning", reasoning)
			d.put("reasoning_content", reasoning)
		}
	case "tool":
		if id, ok := m.text("tool_call_id"); ok {
			d.put("tool_call_id", id)
		}
		if content.isList() {
			var texts []string
			plain := true
			for _, part := range content.list() {
				typ, _ := part.dict().text("type")
				text, _ := part.dict().text("text")
				plain = plain && typ.str == "text"
				texts = append(texts, text.str)
			}
			if plain {
				d.put("content", stringValue(strings.Join(texts, "\n")))
			}
		}
	case "developer":
		tools := m.field("tools")
		if tools.kind != kindNone && rules.developer {
			return nil, unsupported("tools of a developer message")
		}
		defer d.put("tools", tools)
	}
	for _, name := range [...]string{"name", "task"} {
		if v := m.field(name); v.kind == kindString {
			d.put(name, v)
		}
	}
	return d, nil
}

// billingHeader begins a line that a client puts before its system prompt, and the
// engine takes away: it differs with every request.
const billingHeader = "x-anthropic-billing-header"

// knownPartFields are those of content parts that do not reach a template.
var knownPartFields = []string{
	"audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio", "name", "prompt_cache_breakpoint",
	"refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
}

// content turns a content into one text or a list of text parts.
func (rules *chatRules) content(v value, role string) (value, error) {
	var parts []value
	switch {
	case v.kind == kindNone:
	case v.kind == kindString:
		if rules.format == contentString && (role != "system" || !strings.HasPrefix(v.str, billingHeader)) {
			return v, nil
		}
		part := &dictValue{}
		part.put("type", stringValue("text"))
		part.put("text", v)
		parts = []value{dictOf(part)}
	case v.isList():
		parts = v.list()
	default:
		return v, unsupported("a content of another shape")
	}
	var texts []string
	var list []value
	for _, p := range parts {
		text, extra, ok, err := rules.part(p, role)
		if err != nil {
			return v, err
		}
		if !ok {
			continue
		}
		if rules.format == contentString {
			if text != "" {
				texts = append(texts, text)
			}
			continue
		}
		d := &dictValue{}
		d.put("type", stringValue("text"))
		d.put("text", stringValue(text))
		if extra != nil {
			for i, k := range extra.keys {
				if !slices.Contains(knownPartFields, k.str) {
					d.set(k, extra.vals[i])
				}
			}
		}
		list = append(list, dictOf(d))
	}
	if rules.format == contentString {
		return stringValue(strings.Join(texts, "\n")), nil
	}
	return listValue(list), nil
}

// part returns the text of a content part, and the part itself when it is an object.
func (rules *chatRules) part(p value, role string) (text string, extra *dictValue, ok bool, err error) {
	plain := p.kind == kindString
	if plain {
		text = p.str
	} else {
		if !p.isDict() {
			return "", nil, false, unsupported("a content part of another shape")
		}
		extra = p.dict()
		typ := extra.field("type")
		field := "text"
		switch typ.str {
		case "text", "input_text", "output_text":
		case "thinking", "refusal":
			field = typ.str
		default:
			return "", nil, false, unsupported("a content part of type %q", typ.str)
		}
		if extra.field("uuid").kind != kindNone {
			return "", nil, false, unsupported("a content part with a uuid")
		}
		v := extra.field(field)
		if v.kind == kindNone && (typ.str == "text" || typ.str == "refusal") {
			return "", nil, false, nil
		}
		if v.kind != kindString {
			return "", nil, false, unsupported("a content part without its text")
		}
		text = v.str
		plain = typ.str == "text"
	}
	if role == "system" && plain && strings.HasPrefix(text, billingHeader) {
		_, text, _ = strings.Cut(text, "\n")
		return text, extra, text != "", nil
	}
	return text, extra, true, nil
}

// toolCalls turns arguments into objects, as templates want them; fields are in the
// order of the protocol's model.
func toolCalls(calls []value) (value, error) {
	out := make([]value, 0, len(calls))
	for _, c := range calls {
		if !c.isDict() {
			return none, unsupported("a tool call is no object")
		}
		f := c.dict().field("function")
		if typ, ok := c.dict().text("type"); ok && (typ.kind != kindString || typ.str != "function") || !f.isDict() {
			return none, unsupported("a tool call is no function's")
		}
		args := dictOf(&dictValue{})
		switch a := f.dict().field("arguments"); a.kind {
		case kindString:
			if v, err := parseValue(a.str); err == nil && v.isDict() {
				args = v
			} else if errors.Is(err, errSurrogate) || errors.Is(err, errValueDepth) {
				return none, unsupported("arguments: %v", err)
			}
		case kindDict:
			args = a
		}
		fn := ordered(f.dict(), "arguments", "name")
		fn.put("arguments", args)
		call := ordered(c.dict(), "id", "function", "type")
		call.put("function", dictOf(fn))
		out = append(out, dictOf(call))
	}
	return listValue(out), nil
}

// ordered returns a copy with these keys first.
func ordered(d *dictValue, first ...string) *dictValue {
	out := &dictValue{}
	for _, name := range first {
		if v, ok := d.text(name); ok {
			out.put(name, v)
		}
	}
	for i, k := range d.keys {
		out.set(k, d.vals[i])
	}
	return out
}

// withoutDevelopers makes developer messages system messages, for a template that does
// not know the role, and then one system message of all, as many templates want it.
func withoutDevelopers(messages []value) []value {
	var out, rest []value
	var texts []string
	merge := false
	for _, m := range messages {
		d := m.dict()
		role, _ := d.text("role")
		if role.str == "developer" {
			d = &dictValue{}
			for i, k := range m.dict().keys {
				if k.str != "tools" {
					d.set(k, m.dict().vals[i])
				}
			}
			d.put("role", stringValue("system"))
			role.str = "system"
		}
		out = append(out, dictOf(d))
		if role.str != "system" {
			rest = append(rest, dictOf(d))
			continue
		}
		merge = merge || len(out) > 1
		content := d.field("content")
		text := content.str
		if content.isList() {
			var lines []string
			for _, p := range content.list() {
				lines = append(lines, p.dict().field("text").str)
			}
			text = strings.Join(lines, "\n")
		}
		if text != "" {
			texts = append(texts, text)
		}
	}
	if !merge {
		return out
	}
	first := &dictValue{}
	first.put("role", stringValue("system"))
	first.put("content", stringValue(strings.Join(texts, "\n\n")))
	return append([]value{dictOf(first)}, rest...)
}

// detectFormat finds out, as vLLM does, whether a template goes through the parts of a
// message's content itself.
func (t *chatTemplate) detectFormat() contentFormat {
	var nodes []*tmplNode
	macros := map[*tmplNode]*tmplNode{} // the innermost macro of a for
	var walk func(list []*tmplNode, macro *tmplNode)
	var visit func(n, macro *tmplNode)
	visit = func(n, macro *tmplNode) {
		if n == nil {
			return
		}
		nodes = append(nodes, n)
		if n.kind == nodeFor && macro != nil {
			macros[n] = macro
		}
		if n.kind == nodeMacro {
			macro = n
		}
		visit(n.a, macro)
		visit(n.b, macro)
		visit(n.c, macro)
		for _, a := range n.named {
			visit(a.v, macro)
		}
		walk(n.args, macro)
		walk(n.body, macro)
		walk(n.other, macro)
	}
	walk = func(list []*tmplNode, macro *tmplNode) {
		for _, n := range list {
			visit(n, macro)
		}
	}
	walk(t.body, nil)

	lists := []string{"messages"} // names of the messages or some of them
	for i := 0; i < len(lists) && i < 100; i++ {
		for _, n := range nodes {
			if n.kind == nodeSet && n.c == nil && n.a.kind == exprName && isVariable(n.b, lists[i], "") && !slices.Contains(lists, n.a.text) {
				lists = append(lists, n.a.text)
			}
		}
	}
	var items []string // names of a message
	for _, n := range nodes {
		if n.kind == nodeFor && n.a.kind == exprName && slices.ContainsFunc(lists, func(l string) bool { return isVariable(n.b, l, "") }) {
			items = append(items, n.a.text)
		}
	}
	isContent := func(n *tmplNode) bool {
		return slices.ContainsFunc(items, func(m string) bool { return isVariable(n, m, "content") })
	}
	params := map[*tmplNode][]string{} // parameters of macros that are given a content
	for _, m := range nodes {
		if m.kind != nodeMacro {
			continue
		}
		for _, c := range nodes {
			if c.kind != exprCall || c.a.kind != exprName || c.a.text != m.text {
				continue
			}
			for i, a := range c.args {
				if i < len(m.named) && isContent(a) {
					params[m] = append(params[m], m.named[i].name)
				}
			}
			for _, a := range c.named {
				if isContent(a.v) && slices.ContainsFunc(m.named, func(p tmplArg) bool { return p.name == a.name }) {
					params[m] = append(params[m], a.name)
				}
			}
		}
	}
	for _, n := range nodes {
		if n.kind != nodeFor {
			continue
		}
		macro := macros[n]
		if isContent(n.b) || n.b.kind == exprName && (macro != nil && slices.Contains(params[macro], n.b.text) || macro == nil && n.b.text == "content") {
			return contentParts
		}
	}
	return contentString
}

// isVariable reports whether an expression is a variable, or with key an entry of it,
// behind any filters, tests and slices.
func isVariable(n *tmplNode, name, key string) bool {
	for n != nil && (n.kind == exprPipe || n.kind == exprIs || n.kind == exprSlice) {
		n = n.a
	}
	if n == nil {
		return false
	}
	if key == "" {
		return n.kind == exprName && n.text == name
	}
	switch n.kind {
	case exprAttr:
		return n.text == key && n.a.kind == exprName && n.a.text == name
	case exprItem:
		return n.b.kind == exprConst && n.b.v.kind == kindString && n.b.v.str == key && n.a.kind == exprName && n.a.text == name
	}
	return false
}
