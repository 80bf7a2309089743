package routing

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// renderTemplate runs a template with variables given as JSON.
func renderTemplate(source, vars string, limits templateLimits) (string, error) {
	c, err := compileTemplate(source)
	if err != nil {
		return "", err
	}
	v, err := parseValue(vars)
	if err != nil {
		return "", err
	}
	var named []namedValue
	for i, k := range v.dict().keys {
		named = append(named, namedValue{k.str, v.dict().vals[i]})
	}
	x := &execution{now: oracleNow, limits: limits}
	out, err := x.run(c, named)
	return string(out), err
}

type templateSample struct {
	Template string          `json:"template"`
	Vars     json.RawMessage `json:"vars"`
	Text     string          `json:"text"`
	Error    string          `json:"error"`
}

func readTemplateSamples(t testing.TB, f func(source, vars, want, fails string)) int {
	vars := ""
	return readLines(t, "testdata/templates.jsonl", func(line []byte) {
		var s templateSample
		if err := json.Unmarshal(line, &s); err != nil {
			t.Fatal(err)
		}
		if vars == "" { // the first line has those of all
			vars = string(s.Vars)
			return
		}
		f(s.Template, vars, s.Text, s.Error)
	})
}

// TestTemplateSamples holds templates against what transformers renders: see
// bench/oracle/tokenizer.py.
func TestTemplateSamples(t *testing.T) {
	n := readTemplateSamples(t, func(source, vars, want, fails string) {
		got, err := renderTemplate(source, vars, defaultTemplateLimits)
		if (err != nil) != (fails != "") || err == nil && got != want {
			t.Errorf("%s\nwith %s: got %q, %v, want %q, %s", source, vars, got, err, want, fails)
		}
	})
	if n < 200 {
		t.Errorf("samples: got %d, want at least 200", n)
	}
}

func TestTemplateLimits(t *testing.T) {
	small := templateLimits{steps: 20_000, memory: 1 << 20, output: 1 << 16}
	f := func(t *testing.T, source string, want error) {
		t.Helper()
		if _, err := renderTemplate(source, `{"m":[1,2,3]}`, small); !errors.Is(err, want) {
			t.Errorf("%s: got error %v, want %v", source, err, want)
		}
	}
	f(t, `{% for a in m * 9 %}{% for b in m * 9 %}{% for b in m * 9 %}{% endfor %}{% endfor %}{% endfor %}`, errTemplateSteps)
	f(t, `{% for a in range(100000) %}{% endfor %}`, errTemplateMemory)
	f(t, `{% for a in range(1000) %}{{ 'x' * 1000 }}{% endfor %}`, errTemplateOutput)
	f(t, `{% set ns = namespace(s='x') %}{% for a in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}`, errTemplateMemory)
	f(t, `{% set ns = namespace(s='x') %}{% for a in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}`, errTemplateMemory)
	f(t, `{% set ns = namespace(s=[1]) %}{% for a in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}`, errTemplateMemory)
	f(t, `{{ 'x' * 10000000000 }}`, errTemplateMemory)
	f(t, `{{ [1] * 10000000000 }}`, errTemplateMemory)
	f(t, `{{ 'x'.ljust(10000000000) }}`, errTemplateMemory)
	f(t, `{{ ('a' * 100000).replace('a', 'b' * 100) }}`, errTemplateMemory)
	f(t, `{{ ('\n' * 100000)|indent(9000) }}`, errTemplateMemory)
	f(t, `{{ (m * 10000)|join('x' * 1000) }}`, errTemplateMemory)
	// A value that holds another twice, that one another twice: far larger than it is.
	const twice = `{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(100) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}`
	f(t, twice+`{{ ns.a }}`, errTemplateMemory)
	f(t, twice+`{{ ns.a ~ '' }}`, errTemplateMemory)
	f(t, twice+`{{ ns.a | string }}`, errTemplateMemory)
	f(t, twice+`{{ ns.a | tojson }}`, errTemplateMemory)
	f(t, twice+`{{ [ns.a] | join }}`, errTemplateMemory)
	f(t, twice+`{{ '%s' % ns.a }}`, errTemplateMemory)
	f(t, twice+`{{ '{}'.format(ns.a) }}`, errTemplateMemory)
	f(t, twice+`{{ ns.a == ns.b }}`, errTemplateSteps)
	f(t, twice+`{{ ns.a < ns.b }}`, errTemplateSteps)
	f(t, twice+`{{ ns.a in [ns.b] }}`, errTemplateSteps)
	f(t, twice+`{{ [ns.a].index(ns.b) }}`, errTemplateSteps)
	f(t, twice+`{{ [ns.a, ns.b] | sort }}`, errTemplateSteps)
	f(t, twice+`{{ [ns.a, ns.b] | min }}`, errTemplateSteps)
	f(t, twice+`{{ ns.a is sameas ns.b }}`, errTemplateSteps)
	f(t, twice+`{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}`, errTemplateSteps)
	f(t, `{{ ('%s' * 100000) % (('x' * 10000,) * 100000) }}`, errTemplateMemory)
	f(t, `{% set s = 'x' * 400000 %}{% for i in range(10000) %}{% if s.strip() %}{% endif %}{% endfor %}`, errTemplateSteps)
	f(t, `{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}`, errTemplateDepth)
	f(t, `{% macro f(n) %}{{ f(n + 1) if n < 90 }}{{ f(n + 1) if n < 90 }}{% endmacro %}{{ f(0) }}`, errTemplateSteps)
}

// TestTemplateTime stops a template by the clock.
func TestTemplateTime(t *testing.T) {
	c, err := compileTemplate(`{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}`)
	if err != nil {
		t.Fatal(err)
	}
	now := oracleNow()
	x := &execution{limits: defaultTemplateLimits, now: func() time.Time {
		now = now.Add(100 * time.Millisecond)
		return now
	}}
	if _, err := x.run(c, nil); !errors.Is(err, errTemplateTime) {
		t.Errorf("got error %v, want %v", err, errTemplateTime)
	}
}

func TestCompileTemplateErrors(t *testing.T) {
	f := func(t *testing.T, source, want string) {
		t.Helper()
		_, err := compileTemplate(source)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want one with %q", source, err, want)
		}
	}
	f(t, "a\n{{ x", "line 2: missing }}")
	f(t, "{% if x %}", "missing endif")
	f(t, "{% for x in y %}{% endif %}", "the statement endif is not supported")
	f(t, "{% for x in y recursive %}{% endfor %}", "recursive loops are not supported")
	f(t, "{% include 'x' %}", "the statement include is not supported")
	f(t, "{% break %}", "break outside of a loop")
	f(t, "{% macro f() %}{% break %}{% endmacro %}", "break outside of a loop")
	f(t, "{# x", "missing #}")
	f(t, "{% raw %}x", "missing endraw")
	f(t, "{{ 'x }}", "a string has no end")
	f(t, "{{ ? }}", `unexpected '?'`)
	f(t, "{{ x. }}", "expected a name behind .")
	f(t, "{{ x[] }}", "expected an expression")
	f(t, "{{ f(*a) }}", "* arguments are not supported")
	f(t, "{{ f(a=1, 2) }}", "a plain argument behind a named one")
	f(t, "{{ 99999999999999999999 }}", "is not supported")
	f(t, "{% set x.y.z = 1 %}", "expected")
	f(t, "{% set 1 = 2 %}", "expected a name")
	f(t, "{% call x %}{% endcall %}", "call wants a call")
	f(t, "{{ x is divisibleby(a=1) }}", "named arguments of a test")
	f(t, strings.Repeat("{% if x %}", 500), "nested too deeply")
	f(t, "{{ "+strings.Repeat("(", 500)+"x"+strings.Repeat(")", 500)+" }}", "nested too deeply")
	f(t, "{{ "+strings.Repeat("-", 500)+"1 }}", "nested too deeply")
	f(t, "{{ "+strings.Repeat("not ", 500)+"1 }}", "nested too deeply")
	f(t, strings.Repeat("x", maxTemplateBytes+1), "more than")
	f(t, "\xff", "no UTF-8")
	if _, _, err := parseTemplates([]byte(`[{"name":"x","template":""}]`)); err == nil || !strings.Contains(err.Error(), "none with the name default") {
		t.Errorf("a list without default: got error %v", err)
	}
	if _, _, err := parseTemplates([]byte(`7`)); err == nil || !strings.Contains(err.Error(), "neither a template nor a list") {
		t.Errorf("a number: got error %v", err)
	}
	if _, _, err := parseTemplates([]byte(`[{"name":"default","template":"{% x %}"}]`)); err == nil || !strings.Contains(err.Error(), `"default": template line 1`) {
		t.Errorf("a bad one: got error %v", err)
	}
}

func TestTemplateRefuses(t *testing.T) {
	_, err := renderTemplate(`{{ raise_exception('no ' ~ x) }}`, `{"x":"way"}`, defaultTemplateLimits)
	var refused *templateError
	if !errors.As(err, &refused) || refused.message != "no way" {
		t.Errorf("got error %v, want the template's own", err)
	}
}

func TestNamedTemplates(t *testing.T) {
	f := func(t *testing.T, tools value, want string) {
		t.Helper()
		plain, toolUse, err := parseTemplates([]byte(`[{"name":"default","template":"plain"},{"name":"tool_use","template":"tools"},{"name":"rag","template":"rag"}]`))
		if err != nil {
			t.Fatal(err)
		}
		c := &chatTemplates{plain: plain, tools: toolUse}
		x := &execution{limits: defaultTemplateLimits}
		got, err := c.render(x, &chatInput{messages: listValue([]value{none}), tools: tools, docs: none})
		if err != nil || string(got) != want {
			t.Errorf("got %q, %v, want %q", got, err, want)
		}
	}
	f(t, none, "plain")
	f(t, listValue(nil), "tools")
}

func TestParseValueErrors(t *testing.T) {
	f := func(t *testing.T, in, want string) {
		t.Helper()
		if _, err := parseValue(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want one with %q", in, err, want)
		}
	}
	f(t, ``, "nothing")
	f(t, `{`, "a key is missing")
	f(t, `{"a"}`, "a colon is missing")
	f(t, `{"a":1`, "a comma is missing")
	f(t, `[1`, "a comma is missing")
	f(t, `-`, "no number")
	f(t, `1.e`, "no number")
	f(t, `"a`, "an open string")
	f(t, `"\`, "an open string")
	f(t, `"\u12"`, "a short escape")
	f(t, `"\q"`, "an unknown escape")
	f(t, `"\u12xy"`, "hexadecimal")
	f(t, `"\ud800"`, "half a surrogate pair")
	f(t, `"\udc00"`, "half a surrogate pair")
	f(t, `1 2`, "more than one value")
	f(t, strings.Repeat("[", 1000), "nested too deeply")
}

func FuzzTemplate(f *testing.F) {
	readTemplateSamples(f, func(source, vars, _, _ string) { f.Add(source, vars) })
	f.Fuzz(func(t *testing.T, source, vars string) {
		if !strings.HasPrefix(strings.TrimSpace(vars), "{") {
			return
		}
		_, _ = renderTemplate(source, vars, templateLimits{steps: 20_000, memory: 1 << 20, output: 1 << 18})
	})
}

// FuzzTemplateChat gives the samples' templates odd conversations.
func FuzzTemplateChat(f *testing.F) {
	var templates []*chatTemplates
	dirs, _ := filepath.Glob(filepath.Join(tokenizerSamples, "*", "chat_template.jinja"))
	for _, d := range dirs {
		data, err := os.ReadFile(d)
		if err != nil {
			f.Fatal(err)
		}
		c, err := compileTemplate(string(data))
		if err != nil {
			f.Fatal(err)
		}
		templates = append(templates, &chatTemplates{plain: c})
	}
	if len(templates) == 0 {
		f.Fatal("no samples of templates")
	}
	f.Add(`[{"role":"user","content":"x"}]`, `[{"type":"function","function":{"name":"f"}}]`, true)
	f.Add(`[{"role":"assistant","content":[{"type":"text","text":"x "}]}]`, `null`, false)
	f.Fuzz(func(t *testing.T, messages, tools string, resume bool) {
		m, err := parseValue(messages)
		if err != nil || !m.isList() {
			return
		}
		tv, err := parseValue(tools)
		if err != nil {
			return
		}
		x := &execution{limits: templateLimits{steps: 50_000, memory: 4 << 20, output: 1 << 20}}
		for _, c := range templates {
			_, _ = c.render(x, &chatInput{messages: m, tools: tv, docs: none, resume: resume, generate: !resume})
		}
	})
}
