package routing

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
)

// method returns a method of a str, a list or a dict. Those that would change a value
// are not there, as in the sandbox.
func method(v value, name string) (value, bool) {
	var call func(x *execution, args []value, named []namedValue) (value, error)
	switch {
	case v.kind == kindString:
		call = textMethod(v.str, name)
	case v.isDict():
		call = dictMethod(v.dict(), name)
	case v.isList():
		call = listMethod(v.list(), name)
	}
	if call == nil {
		return value{}, false
	}
	cost := len(v.str) / 64
	if v.isList() {
		cost = len(v.list())
	}
	return value{kind: kindFunc, ref: &funcValue{name, cost, call}}, true
}

type methodFunc = func(x *execution, args []value, named []namedValue) (value, error)

func dictMethod(d *dictValue, name string) methodFunc {
	switch name {
	case "items", "keys", "values":
		return func(x *execution, args []value, named []namedValue) (value, error) {
			if err := only(args, named); err != nil {
				return value{}, err
			}
			switch name {
			case "keys":
				return view("dict_keys", d.keys), nil
			case "values":
				return view("dict_values", d.vals), nil
			}
			pairs, err := x.pairs(d)
			if err != nil {
				return value{}, err
			}
			return view("dict_items", pairs.list()), nil
		}
	case "get":
		return func(_ *execution, args []value, named []namedValue) (value, error) {
			if len(named) > 0 || len(args) < 1 || len(args) > 2 {
				return value{}, errors.New("takes a key and a default")
			}
			if v, ok := d.get(args[0]); ok {
				return v, nil
			}
			if len(args) == 2 {
				return args[1], nil
			}
			return none, nil
		}
	case "copy":
		return func(x *execution, args []value, named []namedValue) (value, error) {
			if err := x.made(96 * len(d.keys)); err != nil {
				return value{}, err
			}
			return dictFrom([]value{dictOf(d)}, nil)
		}
	case "update", "pop", "popitem", "clear", "setdefault":
		return unsafeMethod
	}
	return nil
}

func unsafeMethod(*execution, []value, []namedValue) (value, error) {
	return value{}, errors.New("the sandbox does not let values be changed")
}

func listMethod(list []value, name string) methodFunc {
	switch name {
	case "index", "count":
		return func(x *execution, args []value, named []namedValue) (value, error) {
			if len(args) != 1 || len(named) > 0 {
				return value{}, errors.New("takes one value")
			}
			n := 0
			for i, v := range list {
				same, err := x.equal(v, args[0])
				if err != nil {
					return value{}, err
				}
				if !same {
					continue
				}
				if name == "index" {
					return intValue(i), nil
				}
				n++
			}
			if name == "index" {
				return value{}, errors.New("is not in the list")
			}
			return intValue(n), nil
		}
	case "copy":
		return func(x *execution, _ []value, _ []namedValue) (value, error) {
			return listValue(slices.Clone(list)), x.made(48 * len(list))
		}
	case "append", "extend", "insert", "pop", "remove", "reverse", "sort", "clear":
		return unsafeMethod
	}
	return nil
}

// textMethod returns a method of str.
func textMethod(s, name string) methodFunc {
	plain := func(f func() (value, error)) methodFunc {
		return func(x *execution, args []value, named []namedValue) (value, error) {
			if err := only(args, named); err != nil {
				return value{}, err
			}
			if err := x.step(len(s) / 64); err != nil {
				return value{}, err
			}
			v, err := f()
			if err == nil {
				err = x.made(len(v.str))
			}
			return v, err
		}
	}
	text := func(f func(string) string) methodFunc {
		return plain(func() (value, error) { return stringValue(f(s)), nil })
	}
	every := func(f func(rune) bool) methodFunc {
		return plain(func() (value, error) {
			return boolValue(s != "" && strings.IndexFunc(s, func(r rune) bool { return !f(r) }) < 0), nil
		})
	}
	switch name {
	case "upper":
		return text(toUpper)
	case "lower":
		return text(toLower)
	case "casefold":
		return text(func(s string) string {
			c := cases.Fold()
			return c.String(s)
		})
	case "title":
		return text(pythonTitle)
	case "capitalize":
		return text(capitalize)
	case "swapcase":
		return text(func(s string) string {
			var b strings.Builder
			for i, r := range s {
				switch c := s[i : i+max(utf8.RuneLen(r), 1)]; {
				case isUpper(r):
					b.WriteString(lowerAt(s, i))
				case isLower(r):
					b.WriteString(toUpper(c))
				default:
					b.WriteString(c)
				}
			}
			return b.String()
		})
	case "isdigit", "isdecimal", "isnumeric":
		return plain(func() (value, error) {
			for _, r := range s {
				switch {
				case unicode.Is(unicode.Nd, r):
				case name != "isdecimal" && unicode.In(r, unicode.No, unicode.Nl, unicode.Han):
					return value{}, fmt.Errorf("of %q is not supported", r) // some are, and some are not
				default:
					return boolValue(false), nil
				}
			}
			return boolValue(s != ""), nil
		})
	case "isalpha":
		return every(unicode.IsLetter)
	case "isalnum":
		return every(func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) })
	case "isspace":
		return every(isPythonSpace)
	case "isupper":
		return plain(func() (value, error) { return boolValue(isCased(s, isUpper, isLower)), nil })
	case "islower":
		return plain(func() (value, error) { return boolValue(isCased(s, isLower, isUpper)), nil })
	case "isascii":
		return plain(func() (value, error) { return boolValue(onlyASCII(s)), nil })
	case "strip", "lstrip", "rstrip":
		return func(_ *execution, args []value, named []namedValue) (value, error) {
			if err := only(args, named, "chars"); err != nil {
				return value{}, err
			}
			space := isPythonSpace
			if c, ok := argument(args, named, 0, "chars"); ok && c.kind != kindNone {
				if c.kind != kindString {
					return value{}, fmt.Errorf("of a %s", kindNames[c.kind])
				}
				space = func(r rune) bool { return strings.ContainsRune(c.str, r) }
			}
			out := s
			if name != "rstrip" {
				out = strings.TrimLeftFunc(out, space)
			}
			if name != "lstrip" {
				out = strings.TrimRightFunc(out, space)
			}
			return stringValue(out), nil
		}
	case "startswith", "endswith":
		return func(_ *execution, args []value, named []namedValue) (value, error) {
			if len(args) != 1 || len(named) > 0 {
				return value{}, errors.New("takes one str or tuple")
			}
			tries := []value{args[0]}
			if args[0].kind == kindTuple {
				tries = args[0].list()
			}
			for _, t := range tries {
				if t.kind != kindString {
					return value{}, fmt.Errorf("of a %s", kindNames[t.kind])
				}
				if name == "startswith" && strings.HasPrefix(s, t.str) || name == "endswith" && strings.HasSuffix(s, t.str) {
					return boolValue(true), nil
				}
			}
			return boolValue(false), nil
		}
	case "removeprefix", "removesuffix":
		return func(_ *execution, args []value, named []namedValue) (value, error) {
			p, err := textArg(args, named, 0, "prefix", "")
			if err != nil {
				return value{}, err
			}
			if name == "removeprefix" {
				return stringValue(strings.TrimPrefix(s, p)), nil
			}
			return stringValue(strings.TrimSuffix(s, p)), nil
		}
	case "replace":
		return func(x *execution, args []value, named []namedValue) (value, error) {
			if len(args) < 2 {
				return value{}, errors.New("takes two strs")
			}
			return x.replace(s, args, named)
		}
	case "split", "rsplit":
		return func(x *execution, args []value, named []namedValue) (value, error) {
			return x.split(s, name == "rsplit", args, named)
		}
	case "splitlines":
		return func(x *execution, args []value, named []namedValue) (value, error) {
			keep, _ := argument(args, named, 0, "keepends")
			return x.lines(s, keep.truth())
		}
	case "partition", "rpartition":
		return func(_ *execution, args []value, named []namedValue) (value, error) {
			sep, err := textArg(args, named, 0, "sep", "")
			if err != nil || sep == "" {
				return value{}, errors.New("takes a separator")
			}
			at := strings.Index(s, sep)
			if name == "rpartition" {
				at = strings.LastIndex(s, sep)
			}
			switch {
			case at >= 0:
				return tupleValue(stringValue(s[:at]), stringValue(sep), stringValue(s[at+len(sep):])), nil
			case name == "partition":
				return tupleValue(stringValue(s), stringValue(""), stringValue("")), nil
			}
			return tupleValue(stringValue(""), stringValue(""), stringValue(s)), nil
		}
	case "find", "rfind", "index", "rindex":
		return func(_ *execution, args []value, named []namedValue) (value, error) {
			if len(args) != 1 || len(named) > 0 || args[0].kind != kindString {
				return value{}, errors.New("takes one str")
			}
			at := strings.Index(s, args[0].str)
			if name[0] == 'r' {
				at = strings.LastIndex(s, args[0].str)
			}
			if at < 0 {
				if strings.HasSuffix(name, "index") {
					return value{}, errors.New("is not in the str")
				}
				return intValue(-1), nil
			}
			return intValue(utf8.RuneCountInString(s[:at])), nil
		}
	case "count":
		return func(_ *execution, args []value, named []namedValue) (value, error) {
			if len(args) != 1 || len(named) > 0 || args[0].kind != kindString {
				return value{}, errors.New("takes one str")
			}
			return intValue(strings.Count(s, args[0].str)), nil
		}
	case "join":
		return func(x *execution, args []value, named []namedValue) (value, error) {
			if len(args) != 1 || len(named) > 0 {
				return value{}, errors.New("takes one list")
			}
			items, err := x.items(args[0])
			if err != nil {
				return value{}, err
			}
			for _, v := range items {
				if v.kind != kindString {
					return value{}, fmt.Errorf("of a %s", kindNames[v.kind])
				}
			}
			return filterJoin(x, listValue(items), []value{stringValue(s)}, nil)
		}
	case "ljust", "rjust", "center":
		return func(x *execution, args []value, named []namedValue) (value, error) {
			n, err := intArg(args, named, 0, "width", 0)
			if err != nil {
				return value{}, err
			}
			fill, err := textArg(args, named, 1, "fillchar", " ")
			if err != nil {
				return value{}, err
			}
			return x.justify(s, n, fill, name[0])
		}
	case "zfill":
		return func(x *execution, args []value, named []namedValue) (value, error) {
			n, err := intArg(args, named, 0, "width", 0)
			if err != nil {
				return value{}, err
			}
			if s != "" && (s[0] == '-' || s[0] == '+') {
				v, err := x.justify(s[1:], n-1, "0", 'r')
				return stringValue(s[:1] + v.str), err
			}
			return x.justify(s, n, "0", 'r')
		}
	case "format":
		return func(x *execution, args []value, named []namedValue) (value, error) { return x.format(s, args, named) }
	}
	return nil
}

func (x *execution) split(s string, right bool, args []value, named []namedValue) (value, error) {
	if err := only(args, named, "sep", "maxsplit"); err != nil {
		return value{}, err
	}
	n, err := intArg(args, named, 1, "maxsplit", -1)
	if err != nil {
		return value{}, err
	}
	sep, ok := argument(args, named, 0, "sep")
	var parts []string
	blanks := !ok || sep.kind == kindNone
	if most := x.limits.memory / 48; blanks && len(s)/2 > most || !blanks && len(s) > most && strings.Count(s, sep.str) > most {
		return value{}, errTemplateMemory
	}
	switch {
	case blanks:
		if n >= 0 {
			parts = splitSpaces(s, n, right)
		} else {
			parts = strings.FieldsFunc(s, isPythonSpace)
		}
	case sep.kind != kindString || sep.str == "":
		return value{}, errors.New("wants a separator that is not empty")
	case n < 0:
		parts = strings.Split(s, sep.str)
	case right:
		for range n {
			at := strings.LastIndex(s, sep.str)
			if at < 0 {
				break
			}
			parts = append(parts, s[at+len(sep.str):])
			s = s[:at]
		}
		parts = append(parts, s)
		slices.Reverse(parts)
	default:
		parts = strings.SplitN(s, sep.str, min(n, len(s))+1)
	}
	if err := x.made(48 * len(parts)); err != nil {
		return value{}, err
	}
	out := make([]value, len(parts))
	for i, p := range parts {
		out[i] = stringValue(p)
	}
	return listValue(out), x.step(len(out))
}

// splitSpaces splits at white space, at most n times.
func splitSpaces(s string, n int, right bool) (parts []string) {
	if right {
		s = strings.TrimRightFunc(s, isPythonSpace)
		for ; n > 0 && s != ""; n-- {
			at := strings.LastIndexFunc(s, isPythonSpace)
			if at < 0 {
				break
			}
			_, size := utf8.DecodeRuneInString(s[at:])
			parts = append(parts, s[at+size:])
			s = strings.TrimRightFunc(s[:at], isPythonSpace)
		}
		if s != "" {
			parts = append(parts, s)
		}
		slices.Reverse(parts)
		return parts
	}
	s = strings.TrimLeftFunc(s, isPythonSpace)
	for ; n > 0 && s != ""; n-- {
		at := strings.IndexFunc(s, isPythonSpace)
		if at < 0 {
			break
		}
		parts = append(parts, s[:at])
		s = strings.TrimLeftFunc(s[at:], isPythonSpace)
	}
	if s != "" {
		parts = append(parts, s)
	}
	return parts
}

func (x *execution) lines(s string, keep bool) (value, error) {
	var out []value
	from := 0
	for i, r := range s {
		if i < from {
			continue
		}
		end := 0
		switch {
		case r == '\r' && strings.HasPrefix(s[i:], "\r\n"):
			end = 2
		case r == '\n' || r == '\r' || r == '\v' || r == '\f' || r >= 0x1c && r <= 0x1e || r == 0x85 || r == 0x2028 || r == 0x2029:
			end = utf8.RuneLen(r)
		default:
			continue
		}
		if keep {
			out = append(out, stringValue(s[from:i+end]))
		} else {
			out = append(out, stringValue(s[from:i]))
		}
		from = i + end
	}
	if from < len(s) {
		out = append(out, stringValue(s[from:]))
	}
	if err := x.made(48 * len(out)); err != nil {
		return value{}, err
	}
	return listValue(out), x.step(len(out))
}

// format is str.format with {}, {0} and {name}.
func (x *execution) format(s string, args []value, named []namedValue) (value, error) {
	var out []byte
	next := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if (c == '{' || c == '}') && i+1 < len(s) && s[i+1] == c {
			out = append(out, c)
			i++
			continue
		}
		if c == '}' {
			return value{}, errors.New("a single }")
		}
		if c != '{' {
			out = append(out, c)
			continue
		}
		end := strings.IndexByte(s[i:], '}')
		if end < 0 {
			return value{}, errors.New("a single {")
		}
		field := s[i+1 : i+end]
		i += end
		var v value
		var ok bool
		if n, err := strconv.Atoi(field); field == "" || err == nil {
			if field == "" {
				n = next
				next++
			}
			v, ok = argument(args, nil, n, "")
		} else {
			v, ok = argument(nil, named, 0, field)
		}
		if !ok {
			return value{}, fmt.Errorf("the field {%s} is unknown or not supported", field)
		}
		var err error
		if out, err = appendText(out, v, x.limits.memory); err != nil {
			return value{}, err
		}
		if len(out) > x.limits.memory {
			return value{}, errTemplateMemory
		}
	}
	return x.text(string(out))
}
