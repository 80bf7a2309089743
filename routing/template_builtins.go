package routing

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
)

// global returns a function that every template has, or what is undefined.
func (x *execution) global(name string) value {
	switch name {
	case "range":
		return funcOf(name, rangeOf)
	case "namespace":
		return funcOf(name, func(_ *execution, args []value, named []namedValue) (value, error) {
			v, err := dictFrom(args, named)
			v.kind = kindNamespace
			return v, err
		})
	case "dict":
		return funcOf(name, func(_ *execution, args []value, named []namedValue) (value, error) { return dictFrom(args, named) })
	case "raise_exception":
		return funcOf(name, func(_ *execution, args []value, named []namedValue) (value, error) {
			v, _ := argument(args, named, 0, "message")
			text, err := appendText(nil, v, maxRefusal)
			if err != nil {
				return v, err
			}
			return v, &templateError{string(text)}
		})
	case "strftime_now":
		return funcOf(name, func(x *execution, args []value, named []namedValue) (value, error) {
			v, _ := argument(args, named, 0, "format")
			if v.kind != kindString || x.now == nil {
				return v, errors.New("strftime_now wants a format and a clock")
			}
			s, err := strftime(x.now(), v.str)
			return stringValue(s), err
		})
	case "joiner":
		return funcOf(name, func(_ *execution, args []value, named []namedValue) (value, error) {
			sep, ok := argument(args, named, 0, "sep")
			if !ok {
				sep = stringValue(", ")
			}
			used := false
			return funcOf("", func(*execution, []value, []namedValue) (value, error) {
				if used {
					return sep, nil
				}
				used = true
				return stringValue(""), nil
			}), nil
		})
	}
	return value{}
}

// maxRefusal bounds what raise_exception says of a value that is no string, in bytes.
const maxRefusal = 1 << 16

// argument returns an argument by place or name.
func argument(args []value, named []namedValue, i int, name string) (value, bool) {
	if i < len(args) {
		return args[i], true
	}
	for _, a := range named {
		if a.name == name {
			return a.v, true
		}
	}
	return value{}, false
}

// only refuses arguments that a function does not have.
func only(args []value, named []namedValue, names ...string) error {
	if len(args) > len(names) {
		return fmt.Errorf("takes %d arguments, not %d", len(names), len(args))
	}
	for _, a := range named {
		if i := slices.Index(names, a.name); i < len(args) {
			return fmt.Errorf("argument %s is unknown or given twice", a.name)
		}
	}
	return nil
}

func textArg(args []value, named []namedValue, i int, name, otherwise string) (string, error) {
	v, ok := argument(args, named, i, name)
	if !ok {
		return otherwise, nil
	}
	if v.kind != kindString {
		return "", fmt.Errorf("%s is a %s, not a str", name, kindNames[v.kind])
	}
	return v.str, nil
}

func intArg(args []value, named []namedValue, i int, name string, otherwise int) (int, error) {
	v, ok := argument(args, named, i, name)
	if !ok {
		return otherwise, nil
	}
	if v.kind != kindInt && v.kind != kindBool || v.str != "" {
		return 0, fmt.Errorf("%s is a %s, not an int", name, kindNames[v.kind])
	}
	return v.int(), nil
}

// maxRange is the bound that the sandbox has, too.
const maxRange = 100_000

func rangeOf(x *execution, args []value, named []namedValue) (value, error) {
	if len(named) > 0 || len(args) < 1 || len(args) > 3 {
		return value{}, errors.New("takes 1 to 3 numbers")
	}
	var n [3]int
	for i := range args {
		var err error
		if n[i], err = intArg(args, nil, i, "bound", 0); err != nil {
			return value{}, err
		}
	}
	from, to, step := 0, n[0], 1
	if len(args) > 1 {
		from, to = n[0], n[1]
	}
	if len(args) > 2 {
		step = n[2]
	}
	if step == 0 {
		return value{}, errors.New("a step of 0")
	}
	var out []value
	for i := from; step > 0 && i < to || step < 0 && i > to; {
		if len(out) >= maxRange {
			return value{}, errors.New("the range is too large")
		}
		out = append(out, intValue(i))
		next := i + step
		if (next > i) != (step > 0) {
			break // beyond 64 bits, and so beyond the bound
		}
		i = next
	}
	if err := x.made(48 * len(out)); err != nil {
		return value{}, err
	}
	v := view(rangeView, out)
	v.view().bound = [3]int{from, to, step}
	return v, x.step(len(out))
}

func dictFrom(args []value, named []namedValue) (value, error) {
	d := &dictValue{}
	if len(args) > 1 || len(args) == 1 && !args[0].isDict() {
		return value{}, errors.New("takes a dict and named values")
	}
	if len(args) == 1 {
		for i, k := range args[0].dict().keys {
			d.set(k, args[0].dict().vals[i])
		}
	}
	for _, a := range named {
		d.put(a.name, a.v)
	}
	return dictOf(d), nil
}

// strftime is C's in the C locale.
func strftime(t time.Time, format string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		plain := false
		if format[i] == '-' && i+1 < len(format) {
			plain = true
			i++
		}
		two := func(n, width int) {
			if plain {
				width = 0
			}
			fmt.Fprintf(&b, "%0*d", width, n)
		}
		switch format[i] {
		case 'Y':
			two(t.Year(), 4)
		case 'y':
			two(t.Year()%100, 2)
		case 'm':
			two(int(t.Month()), 2)
		case 'd':
			two(t.Day(), 2)
		case 'e':
			fmt.Fprintf(&b, "%2d", t.Day())
		case 'H':
			two(t.Hour(), 2)
		case 'I':
			two((t.Hour()+11)%12+1, 2)
		case 'M':
			two(t.Minute(), 2)
		case 'S':
			two(t.Second(), 2)
		case 'j':
			two(t.YearDay(), 3)
		case 'B':
			b.WriteString(t.Month().String())
		case 'b', 'h':
			b.WriteString(t.Month().String()[:3])
		case 'A':
			b.WriteString(t.Weekday().String())
		case 'a':
			b.WriteString(t.Weekday().String()[:3])
		case 'p':
			b.WriteString(t.Format("PM"))
		case 'F':
			b.WriteString(t.Format("2006-01-02"))
		case 'T':
			b.WriteString(t.Format("15:04:05"))
		case 'D':
			b.WriteString(t.Format("01/02/06"))
		case 'R':
			b.WriteString(t.Format("15:04"))
		case 'u':
			two((int(t.Weekday())+6)%7+1, 1)
		case 'w':
			two(int(t.Weekday()), 1)
		case 'n':
			b.WriteByte('\n')
		case 't':
			b.WriteByte('\t')
		case '%':
			b.WriteByte('%')
		case 'Z', 'z': // of a time without a zone
		default:
			return "", fmt.Errorf("%%%c is not supported", format[i])
		}
	}
	return b.String(), nil
}

type filterFunc = func(x *execution, v value, args []value, named []namedValue) (value, error)

// textOf returns str(v), as the filters that work on text take it.
func (x *execution) textOf(v value) (string, error) {
	if v.kind == kindString {
		return v.str, nil
	}
	b, err := appendText(nil, v, x.limits.memory)
	if err == nil {
		err = x.made(len(b))
	}
	return string(b), err
}

// onlyText returns a str, for the filters that Python has for nothing else.
func onlyText(v value) (string, error) {
	if v.kind != kindString {
		return "", fmt.Errorf("of a %s", kindNames[v.kind])
	}
	return v.str, nil
}

// onText makes a filter of a function on text.
func onText(f func(string) string) filterFunc {
	return func(x *execution, v value, args []value, named []namedValue) (value, error) {
		s, err := x.textOf(v)
		if err == nil {
			err = only(args, named)
		}
		if err != nil {
			return value{}, err
		}
		if err := x.step(len(s) / 64); err != nil {
			return value{}, err
		}
		return x.text(f(s))
	}
}

// tmplFilter returns a filter by its name, nil when there is none.
func tmplFilter(name string) filterFunc {
	switch name {
	case "tojson":
		return filterJSON
	case "trim":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			s, err := x.textOf(v)
			if err == nil {
				err = only(args, named, "chars")
			}
			if err != nil {
				return value{}, err
			}
			if c, ok := argument(args, named, 0, "chars"); ok && c.kind == kindString {
				return stringValue(strings.Trim(s, c.str)), nil
			}
			return stringValue(strings.TrimFunc(s, isPythonSpace)), nil
		}
	case "upper":
		return onText(toUpper)
	case "lower":
		return onText(toLower)
	case "capitalize":
		return onText(capitalize)
	case "title":
		return onText(jinjaTitle)
	case "string":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			s, err := x.textOf(v)
			return stringValue(s), err
		}
	case "format":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			s, err := x.textOf(v)
			if err != nil || len(named) > 0 {
				return value{}, errors.New("named values are not supported")
			}
			return x.percent(s, tupleValue(args...))
		}
	case "safe":
		return func(_ *execution, v value, _ []value, _ []namedValue) (value, error) { return v, nil }
	case "e", "escape":
		return onText(strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", "'", "&#39;", `"`, "&#34;").Replace)
	case "length", "count":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			n, err := lengthOf(v)
			return intValue(n), err
		}
	case "default", "d":
		return func(_ *execution, v value, args []value, named []namedValue) (value, error) {
			if err := only(args, named, "default_value", "boolean"); err != nil {
				return v, err
			}
			b, _ := argument(args, named, 1, "boolean")
			if v.kind == kindUndefined || b.truth() && !v.truth() {
				d, ok := argument(args, named, 0, "default_value")
				if !ok {
					d = stringValue("")
				}
				return d, nil
			}
			return v, nil
		}
	case "first", "last":
		return func(x *execution, v value, _ []value, _ []namedValue) (value, error) {
			if name == "last" && v.kind == kindView && v.view().name == "" {
				return value{}, errors.New("of a generator")
			}
			items, err := x.items(v)
			if err != nil || len(items) == 0 {
				return value{}, err
			}
			if name == "first" {
				return items[0], nil
			}
			return items[len(items)-1], nil
		}
	case "list":
		return func(x *execution, v value, _ []value, _ []namedValue) (value, error) {
			items, err := x.items(v)
			return listValue(items), err
		}
	case "items":
		return func(x *execution, v value, _ []value, _ []namedValue) (value, error) {
			if v.kind == kindUndefined {
				return generated(nil), nil
			}
			if !v.isDict() {
				return v, fmt.Errorf("of a %s", kindNames[v.kind])
			}
			pairs, err := x.pairs(v.dict())
			if err != nil {
				return v, err
			}
			return generated(pairs.list()), nil
		}
	case "join":
		return filterJoin
	case "replace":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			s, err := x.textOf(v)
			if err == nil {
				err = only(args, named, "old", "new", "count")
			}
			if err != nil {
				return v, err
			}
			for i := range args[:min(len(args), 2)] {
				if args[i].str, err = x.textOf(args[i]); err != nil {
					return v, err
				}
				args[i].kind = kindString
			}
			return x.replace(s, args, named)
		}
	case "reverse":
		return func(x *execution, v value, _ []value, _ []namedValue) (value, error) {
			items, err := x.items(v)
			if err != nil {
				return v, err
			}
			out := slices.Clone(items)
			slices.Reverse(out)
			if v.kind == kindString {
				return filterJoin(x, listValue(out), nil, nil)
			}
			if v.kind == kindView && v.view().name == "" {
				return listValue(out), x.step(len(out))
			}
			return generated(out), x.step(len(out))
		}
	case "sort":
		return filterSort
	case "dictsort":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			if !v.isDict() {
				return v, fmt.Errorf("of a %s", kindNames[v.kind])
			}
			by, err := textArg(args, named, 1, "by", "key")
			if err != nil {
				return v, err
			}
			folded, _ := argument(args, named, 0, "case_sensitive")
			back, _ := argument(args, named, 2, "reverse")
			pairs, err := x.pairs(v.dict())
			if err != nil {
				return v, err
			}
			at := 0
			if by == "value" {
				at = 1
			}
			return x.sorted(pairs.list(), func(p value) (value, error) { return p.list()[at], nil }, folded.truth(), back.truth())
		}
	case "unique":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			items, err := x.items(v)
			if err != nil {
				return v, err
			}
			exact, _ := argument(args, named, 0, "case_sensitive")
			attr, by := argument(args, named, 1, "attribute")
			seen := &dictValue{}
			var out []value
			for _, item := range items {
				key := item
				if by {
					if key, err = x.path(item, attr); err != nil {
						return v, err
					}
				}
				if key.kind == kindString && !exact.truth() {
					key = stringValue(toLower(key.str))
				}
				if !key.isKey() {
					return v, fmt.Errorf("of a %s", kindNames[key.kind])
				}
				if err := x.step(1 + len(seen.keys)/64); err != nil {
					return v, err
				}
				if _, ok := seen.get(key); !ok {
					seen.set(key, none)
					out = append(out, item)
				}
			}
			return generated(out), nil
		}
	case "map":
		return filterMap
	case "select", "reject", "selectattr", "rejectattr":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			return x.selected(v, args, strings.HasSuffix(name, "attr"), strings.HasPrefix(name, "reject"))
		}
	case "groupby":
		return filterGroup
	case "batch", "slice":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			items, err := x.items(v)
			if err != nil {
				return v, err
			}
			n, err := intArg(args, named, 0, "linecount", 1)
			if err != nil || n < 1 {
				return v, errors.New("wants a number above 0")
			}
			if _, fill := argument(args, named, 1, "fill_with"); fill || name == "slice" {
				return v, errors.New("is not supported so")
			}
			var out []value
			for part := range slices.Chunk(items, n) {
				out = append(out, listValue(part))
			}
			return generated(out), x.step(len(out))
		}
	case "min", "max":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			if len(args)+len(named) > 0 {
				return v, errors.New("arguments are not supported")
			}
			items, err := x.items(v)
			if err != nil || len(items) == 0 {
				return value{}, err
			}
			best := items[0]
			err = x.metered(func(m *meter) error {
				for _, item := range items[1:] {
					c, err := m.compare(item, best)
					if err != nil {
						return err
					}
					if c != 0 && (c < 0) == (name == "min") {
						best = item
					}
				}
				return nil
			})
			return best, err
		}
	case "sum":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			items, err := x.items(v)
			if err != nil {
				return v, err
			}
			attr, by := argument(args, named, 0, "attribute")
			total, ok := argument(args, named, 1, "start")
			if !ok {
				total = intValue(0)
			}
			for _, item := range items {
				if by && attr.kind != kindNone {
					if item, err = x.path(item, attr); err != nil {
						return v, err
					}
				}
				if total, err = x.binary("+", total, item); err != nil {
					return v, err
				}
			}
			return total, x.step(len(items))
		}
	case "abs":
		return func(_ *execution, v value, _ []value, _ []namedValue) (value, error) {
			switch {
			case v.kind == kindFloat:
				return floatValue(math.Abs(v.float())), nil
			case v.isNumber() && v.str == "":
				return intValue(max(v.int(), -v.int())), nil
			}
			return v, fmt.Errorf("of a %s", kindNames[v.kind])
		}
	case "int":
		return func(_ *execution, v value, args []value, named []namedValue) (value, error) {
			otherwise, ok := argument(args, named, 0, "default")
			if !ok {
				otherwise = intValue(0)
			}
			base, err := intArg(args, named, 1, "base", 10)
			if err != nil {
				return v, err
			}
			if v.kind == kindUndefined {
				return v, errors.New("of an undefined value")
			}
			return toInt(v, otherwise, base), nil
		}
	case "float":
		return func(_ *execution, v value, args []value, named []namedValue) (value, error) {
			otherwise, ok := argument(args, named, 0, "default")
			if !ok {
				otherwise = floatValue(0)
			}
			if v.kind == kindUndefined {
				return v, errors.New("of an undefined value")
			}
			if v.isNumber() {
				return floatValue(v.asFloat()), nil
			}
			f, err := strconv.ParseFloat(strings.TrimFunc(v.str, isPythonSpace), 64)
			if v.kind != kindString || err != nil && !errors.Is(err, strconv.ErrRange) {
				return otherwise, nil
			}
			return floatValue(f), nil
		}
	case "round":
		return filterRound
	case "indent":
		return filterIndent
	case "wordcount":
		return func(x *execution, v value, _ []value, _ []namedValue) (value, error) {
			s, err := x.textOf(v)
			n, in := 0, false
			for _, r := range s {
				word := unicode.IsLetter(r) || unicode.IsNumber(r) || r == '_'
				if word && !in {
					n++
				}
				in = word
			}
			return intValue(n), err
		}
	case "truncate":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			s, err := onlyText(v)
			if err != nil {
				return v, err
			}
			return x.truncate(s, args, named)
		}
	case "attr":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			a, err := textArg(args, named, 0, "name", "")
			if err != nil || v.isDict() {
				return value{}, err
			}
			return x.attribute(v, a)
		}
	case "center":
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			s, err := x.textOf(v)
			if err != nil {
				return v, err
			}
			n, err := intArg(args, named, 0, "width", 80)
			if err != nil {
				return v, err
			}
			return x.justify(s, n, " ", 'c')
		}
	case "urlencode":
		text := onText(func(s string) string {
			var b strings.Builder
			for i := range len(s) {
				if c := s[i]; c < utf8.RuneSelf && (unicode.IsLetter(rune(c)) || unicode.IsDigit(rune(c)) || strings.IndexByte("_.-~/", c) >= 0) {
					b.WriteByte(c)
				} else {
					fmt.Fprintf(&b, "%%%02X", c)
				}
			}
			return b.String()
		})
		return func(x *execution, v value, args []value, named []namedValue) (value, error) {
			if v.isList() || v.isDict() || v.kind == kindView { // pairs
				return v, fmt.Errorf("of a %s", kindNames[v.kind])
			}
			return text(x, v, args, named)
		}
	}
	return nil
}

func lengthOf(v value) (int, error) {
	switch v.kind {
	case kindString:
		return utf8.RuneCountInString(v.str), nil
	case kindList, kindTuple:
		return len(v.list()), nil
	case kindDict:
		return len(v.dict().keys), nil
	case kindView:
		if v.view().name == "" {
			return 0, errors.New("a generator has no length")
		}
		return len(v.view().items), nil
	case kindUndefined:
		return 0, nil
	}
	return 0, fmt.Errorf("a %s has no length", kindNames[v.kind])
}

func (x *execution) pairs(d *dictValue) (value, error) {
	out := make([]value, len(d.keys))
	for i := range out {
		out[i] = tupleValue(d.keys[i], d.vals[i])
	}
	if err := x.made(144 * len(out)); err != nil {
		return value{}, err
	}
	return listValue(out), x.step(len(out))
}

func capitalize(s string) string {
	_, n := utf8.DecodeRuneInString(s)
	if onlyASCII(s) {
		return strings.ToUpper(s[:n]) + strings.ToLower(s[n:])
	}
	return titleOf(s[:n]) + lowerBehind(s, n)
}

// jinjaTitle capitalizes the words between blanks, hyphens and brackets.
func jinjaTitle(s string) string {
	var b strings.Builder
	for s != "" {
		n := strings.IndexFunc(s, func(r rune) bool { return isPythonSpace(r) || strings.ContainsRune("-({[<", r) })
		if n == 0 {
			_, n = utf8.DecodeRuneInString(s)
			b.WriteString(s[:n])
		} else {
			if n < 0 {
				n = len(s)
			}
			_, first := utf8.DecodeRuneInString(s)
			b.WriteString(toUpper(s[:first]))
			b.WriteString(toLower(s[first:n]))
		}
		s = s[n:]
	}
	return b.String()
}

// pythonTitle capitalizes every letter behind what is no letter.
func pythonTitle(s string) string {
	var b strings.Builder
	in := false
	for i, r := range s {
		was := in
		in = isLetterCase(r)
		c := s[i : i+max(utf8.RuneLen(r), 1)]
		switch {
		case was && in:
			b.WriteString(lowerAt(s, i))
		case was:
			b.WriteString(toLower(c))
		default:
			b.WriteString(titleOf(c))
		}
	}
	return b.String()
}

// toUpper is Python's str.upper: of more than one character for some.
func toUpper(s string) string {
	if onlyASCII(s) {
		return strings.ToUpper(s)
	}
	c := cases.Upper(language.Und)
	return c.String(s)
}

// toLower is Python's str.lower.
func toLower(s string) string {
	if onlyASCII(s) {
		return strings.ToLower(s)
	}
	return lowerBehind(s, 0)
}

// lowerBehind returns s from a place on in lower case, a final sigma as it stands in s.
func lowerBehind(s string, from int) string {
	var b strings.Builder
	for i := from; i < len(s); {
		b.WriteString(lowerAt(s, i))
		_, n := utf8.DecodeRuneInString(s[i:])
		i += n
	}
	return b.String()
}

// lowerAt returns the character at a place in lower case.
func lowerAt(s string, i int) string {
	r, n := utf8.DecodeRuneInString(s[i:])
	switch {
	case r == 'İ':
		return "i\u0307"
	case r == 'Σ' && isFinal(s, i, i+n):
		return "ς"
	case r == utf8.RuneError && n == 1:
		return s[i : i+1]
	}
	return string(unicode.ToLower(r))
}

// isFinal reports whether what stands from i to j has a letter with a case before it, and
// none behind, leaving out what case does not see (Unicode Standard 3.13, Final_Sigma).
func isFinal(s string, i, j int) bool {
	before := strings.TrimRightFunc(s[:i], isCaseIgnorable)
	r, n := utf8.DecodeLastRuneInString(before)
	if n == 0 || !isLetterCase(r) {
		return false
	}
	r, n = utf8.DecodeRuneInString(strings.TrimLeftFunc(s[j:], isCaseIgnorable))
	return n == 0 || !isLetterCase(r)
}

func isCaseIgnorable(r rune) bool {
	return unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) || strings.ContainsRune("'.:·\u0387\u055f\u05f4\u2018\u2019\u2024\u2027\ufe13\ufe52\ufe55\uff07\uff0e\uff1a", r)
}

// isLetterCase reports whether a character is upper, lower or title case.
func isLetterCase(r rune) bool { return isUpper(r) || isLower(r) || unicode.IsTitle(r) }

func isUpper(r rune) bool { return unicode.IsUpper(r) || unicode.Is(unicode.Other_Uppercase, r) }
func isLower(r rune) bool { return unicode.IsLower(r) || unicode.Is(unicode.Other_Lowercase, r) }

// titleOf returns one character in title case.
func titleOf(s string) string {
	c := cases.Title(language.Und, cases.NoLower)
	return c.String(s)
}

// maxIndent bounds the indent of tojson, in bytes.
const maxIndent = 1000

func filterJSON(x *execution, v value, args []value, named []namedValue) (value, error) {
	// In the order of transformers' own filter.
	if err := only(args, named, "ensure_ascii", "indent", "separators", "sort_keys"); err != nil {
		return v, err
	}
	style := jsonStyle{item: ", ", key: ": ", limit: x.limits.memory}
	if a, ok := argument(args, named, 0, "ensure_ascii"); ok {
		style.ascii = a.truth()
	}
	if a, ok := argument(args, named, 1, "indent"); ok && a.kind != kindNone {
		style.pretty, style.item = true, ","
		switch {
		case a.kind == kindString && len(a.str) <= maxIndent:
			style.indent = a.str
		case a.isNumber() && a.kind != kindFloat && a.str == "" && a.int() <= maxIndent:
			style.indent = strings.Repeat(" ", max(a.int(), 0))
		default:
			return v, errors.New("indent must be a number or a str")
		}
	}
	if a, ok := argument(args, named, 2, "separators"); ok && a.kind != kindNone {
		if !a.isList() || len(a.list()) != 2 || a.list()[0].kind != kindString || a.list()[1].kind != kindString {
			return v, errors.New("separators must be two strs")
		}
		style.item, style.key = a.list()[0].str, a.list()[1].str
	}
	if a, ok := argument(args, named, 3, "sort_keys"); ok {
		style.sortKeys = a.truth()
	}
	out, err := appendJSON(nil, v, &style, 0)
	if err != nil {
		return v, err
	}
	if err := x.step(len(out) / 64); err != nil {
		return v, err
	}
	return x.text(string(out))
}

func filterJoin(x *execution, v value, args []value, named []namedValue) (value, error) {
	items, err := x.items(v)
	if err != nil {
		return v, err
	}
	sep, _ := argument(args, named, 0, "d")
	glue, err := x.textOf(sep)
	if err != nil {
		return v, err
	}
	attr, by := argument(args, named, 1, "attribute")
	var out []byte
	for i, item := range items {
		if by && attr.kind != kindNone {
			if item, err = x.path(item, attr); err != nil {
				return v, err
			}
		}
		if i > 0 {
			out = append(out, glue...)
		}
		if out, err = appendText(out, item, x.limits.memory); err != nil {
			return v, err
		}
		if len(out) > x.limits.memory {
			return v, errTemplateMemory
		}
	}
	if err := x.step(len(items)); err != nil {
		return v, err
	}
	return x.text(string(out))
}

// path follows an attribute with dots, as map(attribute="a.b") names it.
func (x *execution) path(v, attr value) (value, error) {
	if err := x.step(1); err != nil {
		return v, err
	}
	if attr.kind != kindString {
		return x.item(v, attr)
	}
	for part := range strings.SplitSeq(attr.str, ".") {
		key := stringValue(part)
		if n, err := strconv.Atoi(part); err == nil {
			key = intValue(n)
		}
		var err error
		if v, err = x.item(v, key); err != nil {
			return v, err
		}
	}
	return v, nil
}

func (x *execution) replace(s string, args []value, named []namedValue) (value, error) {
	old, err := textArg(args, named, 0, "old", "")
	if err != nil {
		return value{}, err
	}
	with, err := textArg(args, named, 1, "new", "")
	if err != nil {
		return value{}, err
	}
	n := -1
	if c, ok := argument(args, named, 2, "count"); ok && c.kind != kindNone {
		n = c.int()
	}
	if count := strings.Count(s, old); len(with) > 0 && count > x.limits.memory/len(with) {
		return value{}, errTemplateMemory
	}
	return x.text(strings.Replace(s, old, with, n))
}

func (x *execution) sorted(items []value, key func(value) (value, error), exact, back bool) (value, error) {
	order := make([]int, len(items))
	keys := make([]value, len(items))
	for i, item := range items {
		order[i] = i
		var err error
		if keys[i], err = key(item); err != nil {
			return value{}, err
		}
		if keys[i].kind == kindString && !exact {
			keys[i] = stringValue(toLower(keys[i].str))
		}
	}
	if err := x.step(20 * len(items)); err != nil {
		return value{}, err
	}
	if back { // a stable sort backwards keeps the order of equals
		slices.Reverse(order)
	}
	if err := x.metered(func(m *meter) error { return m.sortBy(order, func(i int) value { return keys[i] }) }); err != nil {
		return value{}, err
	}
	if back {
		slices.Reverse(order)
	}
	out := make([]value, len(items))
	for i, k := range order {
		out[i] = items[k]
	}
	return listValue(out), x.made(48 * len(out))
}

func filterSort(x *execution, v value, args []value, named []namedValue) (value, error) {
	if err := only(args, named, "reverse", "case_sensitive", "attribute"); err != nil {
		return v, err
	}
	items, err := x.items(v)
	if err != nil {
		return v, err
	}
	back, _ := argument(args, named, 0, "reverse")
	exact, _ := argument(args, named, 1, "case_sensitive")
	attr, by := argument(args, named, 2, "attribute")
	return x.sorted(items, func(item value) (value, error) {
		if !by || attr.kind == kindNone {
			return item, nil
		}
		return x.path(item, attr)
	}, exact.truth(), back.truth())
}

func filterMap(x *execution, v value, args []value, named []namedValue) (value, error) {
	items, err := x.items(v)
	if err != nil {
		return v, err
	}
	out := make([]value, len(items))
	if len(args) == 0 {
		attr, ok := argument(nil, named, 0, "attribute")
		otherwise, has := argument(nil, named, 1, "default")
		if !ok {
			return v, errors.New("wants a filter or an attribute")
		}
		for i, item := range items {
			if out[i], err = x.path(item, attr); err != nil {
				return v, err
			}
			if has && out[i].kind == kindUndefined {
				out[i] = otherwise
			}
		}
		return generated(out), x.made(48 * len(out))
	}
	f := tmplFilter(args[0].str)
	if args[0].kind != kindString || f == nil {
		return v, fmt.Errorf("filter %q is not supported", args[0].str)
	}
	for i, item := range items {
		if err := x.nested(); err != nil {
			return v, err
		}
		out[i], err = f(x, item, args[1:], named)
		x.depth--
		if err != nil {
			return v, err
		}
	}
	return generated(out), x.made(48 * len(out))
}

// nested counts a filter in a filter. The caller takes it back.
func (x *execution) nested() error {
	if x.depth++; x.depth > maxTemplateCalls {
		x.depth--
		return errTemplateDepth
	}
	return x.step(1)
}

func (x *execution) selected(v value, args []value, attr, reject bool) (value, error) {
	items, err := x.items(v)
	if err != nil {
		return v, err
	}
	var path value
	if attr {
		if len(args) == 0 {
			return v, errors.New("wants an attribute")
		}
		path, args = args[0], args[1:]
	}
	test := func(_ *execution, v value, _ []value) (bool, error) { return v.truth(), nil }
	if len(args) > 0 {
		if test = tmplTest(args[0].str); args[0].kind != kindString || test == nil {
			return v, fmt.Errorf("test %q is not supported", args[0].str)
		}
		args = args[1:]
	}
	var out []value
	for _, item := range items {
		if err := x.step(1); err != nil {
			return v, err
		}
		key := item
		if attr {
			if key, err = x.path(item, path); err != nil {
				return v, err
			}
		}
		ok, err := test(x, key, args)
		if err != nil {
			return v, err
		}
		if ok != reject {
			out = append(out, item)
		}
	}
	return generated(out), x.made(48 * len(out))
}

func filterGroup(x *execution, v value, args []value, named []namedValue) (value, error) {
	attr, ok := argument(args, named, 0, "attribute")
	if !ok || len(args) > 1 || len(named) > 0 {
		return v, errors.New("wants an attribute and nothing else")
	}
	sorted, err := filterSort(x, v, nil, []namedValue{{"attribute", attr}})
	if err != nil {
		return v, err
	}
	var out []value
	var group []value
	var key value
	for _, item := range sorted.list() {
		k, err := x.path(item, attr)
		if err != nil {
			return v, err
		}
		same, err := x.equal(foldedKey(k), foldedKey(key))
		if err != nil {
			return v, err
		}
		if group != nil && !same {
			out = append(out, tupleValue(key, listValue(group)))
			group = nil
		}
		if group == nil {
			key = k
		}
		group = append(group, item)
	}
	if group != nil {
		out = append(out, tupleValue(key, listValue(group)))
	}
	return listValue(out), nil
}

func foldedKey(v value) value {
	if v.kind == kindString {
		return stringValue(toLower(v.str))
	}
	return v
}

func toInt(v, otherwise value, base int) value {
	switch {
	case v.kind == kindFloat:
		f := v.float()
		if math.IsNaN(f) || math.Abs(f) > 1<<62 {
			return otherwise
		}
		return intValue(int(f))
	case v.isNumber():
		return value{kind: kindInt, num: v.num, str: v.str}
	case v.kind != kindString:
		return otherwise
	}
	s := strings.TrimFunc(v.str, isPythonSpace)
	if base == 16 {
		s = strings.TrimPrefix(strings.TrimPrefix(s, "0x"), "0X")
	}
	if n, err := strconv.ParseInt(s, base, 64); err == nil {
		return intValue(int(n))
	} else if v, bad := parseValue(s); errors.Is(err, strconv.ErrRange) && base == 10 && bad == nil && v.kind == kindInt {
		return v
	}
	if f, err := strconv.ParseFloat(s, 64); err == nil && math.Abs(f) < 1<<62 {
		return intValue(int(f))
	}
	return otherwise
}

func filterRound(_ *execution, v value, args []value, named []namedValue) (value, error) {
	digits, err := intArg(args, named, 0, "precision", 0)
	if err != nil || !v.isNumber() {
		return v, errors.New("wants numbers")
	}
	how, err := textArg(args, named, 1, "method", "common")
	if err != nil {
		return v, err
	}
	f := v.asFloat()
	switch scale := math.Pow(10, float64(digits)); how {
	case "common":
		if digits < 0 || digits > 15 {
			return v, errors.New("such a precision is not supported")
		}
		if v.kind != kindFloat {
			return v, nil
		}
		f, _ = strconv.ParseFloat(strconv.FormatFloat(f, 'f', digits, 64), 64)
	case "ceil":
		f = math.Ceil(f*scale) / scale
	case "floor":
		f = math.Floor(f*scale) / scale
	default:
		return v, fmt.Errorf("method %q is not supported", how)
	}
	return floatValue(f), nil
}

func filterIndent(x *execution, v value, args []value, named []namedValue) (value, error) {
	s, err := onlyText(v)
	if err == nil {
		err = only(args, named, "width", "first", "blank")
	}
	if err != nil {
		return v, err
	}
	width := "    "
	if w, ok := argument(args, named, 0, "width"); ok {
		if w.kind == kindString {
			width = w.str
		} else if w.kind == kindInt && w.int() >= 0 && w.int() < 10_000 {
			width = strings.Repeat(" ", w.int())
		} else {
			return v, errors.New("width must be a number or a str")
		}
	}
	first, _ := argument(args, named, 1, "first")
	blank, _ := argument(args, named, 2, "blank")
	if lines := strings.Count(s, "\n") + 1; lines > x.limits.memory/max(len(width), 48) {
		return v, errTemplateMemory
	}
	var b strings.Builder
	for i, line := range strings.Split(strings.ReplaceAll(s, "\r\n", "\n"), "\n") {
		if i > 0 {
			b.WriteByte('\n')
		}
		if i == 0 && first.truth() || i > 0 && (line != "" || blank.truth()) {
			b.WriteString(width)
		}
		b.WriteString(line)
	}
	return x.text(b.String())
}

func (x *execution) truncate(s string, args []value, named []namedValue) (value, error) {
	n, err := intArg(args, named, 0, "length", 255)
	if err != nil {
		return value{}, err
	}
	kill, _ := argument(args, named, 1, "killwords")
	end, err := textArg(args, named, 2, "end", "...")
	if err != nil {
		return value{}, err
	}
	leeway, err := intArg(args, named, 3, "leeway", 5)
	if err != nil {
		return value{}, err
	}
	runes := []rune(s)
	tail := utf8.RuneCountInString(end)
	if n < tail || leeway < 0 {
		return value{}, errors.New("the length is too small")
	}
	if len(runes) <= n+leeway {
		return stringValue(s), nil
	}
	cut := string(runes[:n-tail])
	if !kill.truth() {
		if i := strings.LastIndexByte(cut, ' '); i >= 0 {
			cut = cut[:i]
		}
	}
	return x.text(cut + end)
}

func (x *execution) justify(s string, n int, fill string, how byte) (value, error) {
	pad := n - utf8.RuneCountInString(s)
	if pad <= 0 {
		return stringValue(s), nil
	}
	if utf8.RuneCountInString(fill) != 1 || pad > x.limits.memory/4 {
		return value{}, errTemplateMemory
	}
	switch how {
	case 'l':
		return x.text(s + strings.Repeat(fill, pad))
	case 'r':
		return x.text(strings.Repeat(fill, pad) + s)
	}
	left := pad/2 + pad&n&1
	return x.text(strings.Repeat(fill, left) + s + strings.Repeat(fill, pad-left))
}

// tmplTest returns a test by its name, nil when there is none.
func tmplTest(name string) func(x *execution, v value, args []value) (bool, error) {
	is := func(f func(v value) bool) func(*execution, value, []value) (bool, error) {
		return func(_ *execution, v value, args []value) (bool, error) {
			if len(args) > 0 {
				return false, fmt.Errorf("test %s takes no arguments", name)
			}
			return f(v), nil
		}
	}
	with := func(f func(x *execution, v, arg value) (bool, error)) func(*execution, value, []value) (bool, error) {
		return func(x *execution, v value, args []value) (bool, error) {
			if len(args) != 1 {
				return false, fmt.Errorf("test %s takes one argument", name)
			}
			return f(x, v, args[0])
		}
	}
	ops := map[string]string{"eq": "==", "equalto": "==", "==": "==", "ne": "!=", "!=": "!=", "lt": "<", "lessthan": "<", "le": "<=",
		"gt": ">", "greaterthan": ">", "ge": ">=", "in": "in", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
	if op, ok := ops[name]; ok {
		return with(func(x *execution, v, arg value) (bool, error) { return x.holds(op, v, arg) })
	}
	switch name {
	case "defined":
		return is(func(v value) bool { return v.kind != kindUndefined })
	case "undefined":
		return is(func(v value) bool { return v.kind == kindUndefined })
	case "none":
		return is(func(v value) bool { return v.kind == kindNone })
	case "boolean":
		return is(func(v value) bool { return v.kind == kindBool })
	case "integer":
		return is(func(v value) bool { return v.kind == kindInt })
	case "float":
		return is(func(v value) bool { return v.kind == kindFloat })
	case "number":
		return is(value.isNumber)
	case "string":
		return is(func(v value) bool { return v.kind == kindString })
	case "mapping":
		return is(value.isDict)
	case "iterable":
		return is(func(v value) bool {
			return v.kind == kindString || v.isList() || v.isDict() || v.kind == kindUndefined || v.kind == kindLoop || v.kind == kindView
		})
	case "sequence":
		return is(func(v value) bool {
			return v.kind == kindString || v.isList() || v.isDict() || v.kind == kindUndefined || v.kind == kindView && v.view().name == rangeView
		})
	case "callable":
		return is(func(v value) bool { return v.kind == kindFunc })
	case "true":
		return is(func(v value) bool { return v.kind == kindBool && v.num == 1 })
	case "false":
		return is(func(v value) bool { return v.kind == kindBool && v.num == 0 })
	case "upper", "lower":
		want, not := isUpper, isLower
		if name == "lower" {
			want, not = not, want
		}
		return func(x *execution, v value, _ []value) (bool, error) {
			s, err := x.textOf(v)
			return isCased(s, want, not), err
		}
	case "odd", "even":
		return func(_ *execution, v value, _ []value) (bool, error) {
			if v.kind != kindInt && v.kind != kindBool || v.str != "" {
				return false, fmt.Errorf("test %s of a %s", name, kindNames[v.kind])
			}
			return (v.int()%2 != 0) == (name == "odd"), nil
		}
	case "divisibleby":
		return with(func(x *execution, v, arg value) (bool, error) {
			r, err := x.binary("%", v, arg)
			return !r.truth(), err
		})
	case "sameas":
		return with(func(x *execution, v, arg value) (bool, error) {
			same, err := x.equal(v, arg)
			return same && v.kind == arg.kind, err
		})
	case "filter":
		return is(func(v value) bool { return v.kind == kindString && tmplFilter(v.str) != nil })
	case "test":
		return is(func(v value) bool { return v.kind == kindString && tmplTest(v.str) != nil })
	}
	return nil
}

// isCased reports whether a text has letters of one case and none of the other.
func isCased(s string, want, not func(rune) bool) bool {
	return strings.IndexFunc(s, want) >= 0 && strings.IndexFunc(s, not) < 0 && strings.IndexFunc(s, unicode.IsTitle) < 0
}
