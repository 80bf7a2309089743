package fakevllm

import (
	"bytes"
	"encoding/json"
	"strconv"
	"unicode/utf8"
)

// appendString appends s as a JSON string.
func appendString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', s[0])
		case r == '\n':
			dst = append(dst, '\\', 'n')
		case r < 0x20:
			dst = append(dst, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
		default:
			dst = utf8.AppendRune(dst, r)
		}
		s = s[n:]
	}
	return append(dst, '"')
}

func appendInt(dst []byte, n int) []byte { return strconv.AppendInt(dst, int64(n), 10) }

// eachField calls f for every field of a JSON object with the key, unescaped,
// and the raw value. The document must be valid, or eachField stops where it is not an object.
func eachField(doc []byte, f func(key, value []byte)) {
	doc = bytes.TrimLeft(doc, " \t\r\n")
	if len(doc) == 0 || doc[0] != '{' {
		return
	}
	for doc = doc[1:]; ; {
		doc = bytes.TrimLeft(doc, " \t\r\n,")
		if len(doc) == 0 || doc[0] != '"' {
			return
		}
		end := valueEnd(doc)
		key := doc[1:max(1, end-1)]
		if bytes.IndexByte(key, '\\') >= 0 {
			var s string
			_ = json.Unmarshal(doc[:end], &s) // a broken key matches nothing
			key = []byte(s)
		}
		doc = bytes.TrimLeft(doc[end:], " \t\r\n:")
		end = valueEnd(doc)
		f(key, doc[:end])
		if doc = doc[end:]; len(doc) == 0 {
			return
		}
	}
}

// valueEnd returns the length of the JSON value that doc starts with.
func valueEnd(doc []byte) int {
	depth := 0
	for i := 0; i < len(doc); i++ {
		switch doc[i] {
		case '"':
			i = stringEnd(doc, i+1)
			if depth == 0 {
				return min(i+1, len(doc))
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 { // of the object around a number or a word
				return i
			}
			if depth--; depth == 0 {
				return i + 1
			}
		case ',', ' ', '\t', '\r', '\n':
			if depth == 0 {
				return i
			}
		}
	}
	return len(doc)
}

// stringEnd returns the index of the quote that ends a string whose text
// starts at i.
func stringEnd(doc []byte, i int) int {
	for {
		n := bytes.IndexByte(doc[i:], '"')
		if n < 0 {
			return len(doc)
		}
		end := i + n
		escapes := end
		for escapes > i && doc[escapes-1] == '\\' {
			escapes--
		}
		if (end-escapes)%2 == 0 {
			return end
		}
		i = end + 1
	}
}
