package proxy

import (
	"bytes"
	"strings"

	"github.com/valyala/fasthttp"

	"kvgate/routing"
)

// methods is a set of request methods.
type methods uint8

const (
	methodGet methods = 1 << iota
	methodHead
	methodPost
	methodPut
	methodPatch
	methodDelete
	methodOptions
	methodOther
)

const methodsAll = methodGet | methodHead | methodPost | methodPut | methodPatch | methodDelete

var methodNames = [...]string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}

// methodOf returns the method and its name as a string of the program's own.
func methodOf(name []byte) (methods, string) {
	for i, s := range methodNames {
		if string(name) == s {
			return 1 << i, s
		}
	}
	return methodOther, "OTHER"
}

// allow renders the set for an Allow header.
func (m methods) allow() string {
	var names []string
	for i, s := range methodNames {
		if m&(1<<i) != 0 {
			names = append(names, s)
		}
	}
	return strings.Join(append(names, "OPTIONS"), ", ")
}

// kind says who answers a route.
type kind uint8

const (
	kindProxy  kind = iota // a replica
	kindModels             // the gateway: the merged list
	kindModel              // the gateway: one model
	kindAlive              // the gateway: the process runs
	kindReady              // the gateway: it can serve
	kindVersion
	kindLoad
	kindRefused // refused by name: 501
)

// reading says what a request's body is.
type reading uint8

const (
	readJSON reading = iota // scanned whole before the decision
	readForm                // multipart: its head is searched for the model, then it streams through
	readNone                // there is none
	readAny                 // by its Content-Type; what cannot be read is forwarded all the same
)

// dialect is the shape of error bodies.
type dialect uint8

const (
	dialectOpenAI dialect = iota
	dialectAnthropic
	dialectCohere
)

// ending is the event that ends an event stream of an API.
type ending uint8

const (
	endingNone      ending = iota // none that is known
	endingDone                    // data: [DONE]
	endingResponses               // response.completed, response.failed or response.incomplete
	endingMessages                // message_stop
	endingCohere                  // message-end
)

// blocks says whether an engine computes KV blocks for a route, which other
// requests could find.
type blocks uint8

const (
	blocksNone     blocks = iota // none, or none that is known of
	blocksSalted                 // kept apart by cache_salt in the body
	blocksUnsalted               // kept apart by nothing: vLLM's request has no such field
)

// route is one path of the data listener.
type route struct {
	index    int
	template string // name in metrics and logs
	methods  methods
	kind     kind
	api      routing.API
	reading  reading
	dialect  dialect
	ending   ending
	blocks   blocks
	streams  bool   // an answer may be an event stream
	remedy   string // of a refused one
}

// routeEntry is a route with its path; prefixes end in / and match what is longer.
type routeEntry struct {
	path string
	route
}

var routeTable = []routeEntry{
	{"", route{template: "passthrough", methods: methodsAll, reading: readAny, streams: true}},
	{"/v1/chat/completions", route{methods: methodPost, blocks: blocksSalted, api: routing.APIChat, ending: endingDone, streams: true}},
	{"/v1/chat/completions/batch", route{methods: methodPost, blocks: blocksSalted, api: routing.APIChatBatch, ending: endingDone, streams: true}},
	{"/v1/completions", route{methods: methodPost, blocks: blocksSalted, api: routing.APICompletions, ending: endingDone, streams: true}},
	{"/v1/responses", route{methods: methodPost, blocks: blocksSalted, api: routing.APIResponses, ending: endingResponses, streams: true}},
	{"/v1/messages", route{methods: methodPost, blocks: blocksSalted, api: routing.APIMessages, dialect: dialectAnthropic, ending: endingMessages, streams: true}},
	{"/inference/v1/generate", route{methods: methodPost, blocks: blocksSalted, api: routing.APIGenerate, ending: endingDone, streams: true}},
	{"/generative_scoring", route{methods: methodPost, blocks: blocksSalted, api: routing.APIScoring}},
	{"/v1/decisions", route{methods: methodPost, blocks: blocksSalted, api: routing.APIScoring}},
	{"/v1/systemone", route{methods: methodPost, blocks: blocksSalted, api: routing.APIScoring}},
	{"/cohere/v2/chat", route{methods: methodPost, blocks: blocksUnsalted, api: routing.APIChat, dialect: dialectCohere, ending: endingCohere, streams: true}},
	{"/v1/embeddings", route{methods: methodPost, blocks: blocksSalted, api: routing.APIEmbeddings}},
	{"/pooling", route{methods: methodPost, blocks: blocksSalted, api: routing.APIEmbeddings}},
	{"/classify", route{methods: methodPost, blocks: blocksSalted, api: routing.APIEmbeddings}},

	// No KV cache is at stake: routed on load.
	{"/v1/messages/count_tokens", route{methods: methodPost, dialect: dialectAnthropic}},
	{"/v1/messages/render", route{methods: methodPost, dialect: dialectAnthropic}},
	{"/v1/chat/completions/render", route{methods: methodPost}},
	{"/v1/chat/completions/derender", route{methods: methodPost}},
	{"/v1/completions/render", route{methods: methodPost}},
	{"/v1/completions/derender", route{methods: methodPost}},
	{"/v1/responses/render", route{methods: methodPost}},
	{"/cohere/v2/chat/render", route{methods: methodPost, dialect: dialectCohere}},
	{"/tokenize", route{methods: methodPost}},
	{"/detokenize", route{methods: methodPost}},
	{"/tokenizer_info", route{methods: methodGet | methodHead, reading: readNone}},
	{"/v2/embed", route{methods: methodPost, blocks: blocksUnsalted, dialect: dialectCohere}},
	{"/score", route{methods: methodPost, blocks: blocksSalted}},
	{"/v1/score", route{methods: methodPost, blocks: blocksSalted}},
	{"/rerank", route{methods: methodPost, blocks: blocksSalted}},
	{"/v1/rerank", route{methods: methodPost, blocks: blocksSalted}},
	{"/v2/rerank", route{methods: methodPost, blocks: blocksSalted, dialect: dialectCohere}},
	{"/v1/audio/transcriptions", route{methods: methodPost, reading: readForm, ending: endingDone, streams: true}},
	{"/v1/audio/translations", route{methods: methodPost, reading: readForm, ending: endingDone, streams: true}},

	{"/v1/models", route{methods: methodGet | methodHead, kind: kindModels, reading: readNone}},
	{"/v1/models/", route{template: "/v1/models/{id}", methods: methodGet | methodHead, kind: kindModel, reading: readNone}},
	{"/livez", route{methods: methodGet | methodHead, kind: kindAlive, reading: readNone}},
	{"/readyz", route{methods: methodGet | methodHead, kind: kindReady, reading: readNone}},
	{"/health", route{methods: methodGet | methodHead, kind: kindReady, reading: readNone}},
	{"/version", route{methods: methodGet | methodHead, kind: kindVersion, reading: readNone}},
	{"/load", route{methods: methodGet | methodHead, kind: kindLoad, reading: readNone}},

	{"/v1/responses/", route{template: "/v1/responses/{id}", methods: methodGet | methodHead | methodPost | methodDelete, kind: kindRefused, reading: readNone,
		remedy: "stored responses are not supported: each lives in one replica's memory; send the whole conversation in input instead"}},
	{"/v1/realtime", route{methods: methodGet | methodPost, kind: kindRefused, reading: readNone,
		remedy: "realtime sessions are not supported: use /v1/audio/transcriptions or /v1/chat/completions"}},
}

// open says whether a route answers without an API key: health probes have none.
func (r *route) open() bool { return r.kind == kindAlive || r.kind == kindReady }

// unknownRoute stands for every path that is not in the table.
var unknownRoute = route{index: len(routeTable), template: otherLabel}

// RouteTemplates returns the names under which requests are counted, in the
// order of their indexes. They do not change while the process runs.
func RouteTemplates() []string {
	names := make([]string, len(routeTable))
	for i := range routeTable {
		names[i] = routeTable[i].template
		if names[i] == "" {
			names[i] = routeTable[i].path
		}
	}
	return names
}

// RouteAPI returns the shape of the bodies of a path whose requests go to a
// replica; ok is false for every other path.
func RouteAPI(path string) (api routing.API, ok bool) {
	for i := range routeTable {
		if r := &routeTable[i]; r.path == path && path != "" && r.kind == kindProxy {
			return r.api, true
		}
	}
	return routing.APINone, false
}

// routes finds the route of a path without a map: by length, then by comparison.
type routes struct {
	all      []route
	byLength [][]int // of exact paths
	prefixes []int
}

func newRoutes() *routes {
	t := &routes{all: make([]route, len(routeTable))}
	for i, name := range RouteTemplates() {
		t.all[i] = routeTable[i].route
		t.all[i].index, t.all[i].template = i, name
		path := routeTable[i].path
		switch {
		case path == "":
		case strings.HasSuffix(path, "/"):
			t.prefixes = append(t.prefixes, i)
		default:
			for len(t.byLength) <= len(path) {
				t.byLength = append(t.byLength, nil)
			}
			t.byLength[len(path)] = append(t.byLength[len(path)], i)
		}
	}
	return t
}

// find returns the route of a path; passthrough are the configured patterns.
// The path is compared as it is sent on, byte by byte.
func (t *routes) find(path []byte, passthrough []string) *route {
	if len(path) < len(t.byLength) {
		for _, i := range t.byLength[len(path)] {
			if string(path) == routeTable[i].path {
				return &t.all[i]
			}
		}
	}
	for _, i := range t.prefixes {
		if p := routeTable[i].path; len(path) > len(p) && string(path[:len(p)]) == p {
			return &t.all[i]
		}
	}
	for _, p := range passthrough {
		if matchPattern(path, p) {
			return &t.all[0]
		}
	}
	return &unknownRoute
}

// matchPattern says whether a path is that of an item of routes.passthrough: the
// same, or longer than a prefix that ends in /*.
func matchPattern(path []byte, pattern string) bool {
	stem, prefix := strings.CutSuffix(pattern, "*")
	return prefix && len(path) > len(stem) && string(path[:len(stem)]) == stem || string(path) == pattern
}

// target splits a request target into path and query and refuses what a replica
// might read as another path than the one that was matched: dot segments,
// encoded or not, control bytes, backslashes, an encoded slash outside of a
// model's name, bad escapes, fragments. An absolute-form target must name the
// authority of the Host header and loses it.
func target(uri, host []byte) (path, origin []byte, r *refusal) {
	if len(uri) > 0 && uri[0] != '/' {
		scheme, rest, ok := bytes.Cut(uri, []byte("://"))
		if !ok || !equalFold(scheme, "http") && !equalFold(scheme, "https") {
			return nil, nil, refuseTarget
		}
		slash := bytes.IndexByte(rest, '/')
		if slash <= 0 || !bytes.EqualFold(rest[:slash], host) {
			return nil, nil, refuseTarget
		}
		uri = rest[slash:]
	}
	path = uri
	if q := bytes.IndexByte(uri, '?'); q >= 0 {
		path = uri[:q]
	}
	dots, other := 0, 0 // of the current segment
	for i := 1; i <= len(path); i++ {
		c := byte('/')
		if i < len(path) {
			c = path[i]
		}
		if c == '/' {
			if other == 0 && (dots == 1 || dots == 2) {
				return nil, nil, refuseTarget
			}
			dots, other = 0, 0
			continue
		}
		if c == '%' {
			if i+2 >= len(path) {
				return nil, nil, refuseTarget
			}
			hi, lo := unhex(path[i+1]), unhex(path[i+2])
			if hi > 15 || lo > 15 {
				return nil, nil, refuseTarget
			}
			c = hi<<4 | lo
			i += 2
			if c == '/' && !bytes.HasPrefix(path, []byte("/v1/models/")) {
				return nil, nil, refuseTarget
			}
		} else if c == '#' {
			return nil, nil, refuseTarget
		}
		if c < ' ' || c == 0x7f || c == '\\' {
			return nil, nil, refuseTarget
		}
		if c == ';' && other == 0 && (dots == 1 || dots == 2) {
			return nil, nil, refuseTarget // some take the parameters off first
		}
		if c == '.' {
			dots++
		} else {
			other++
		}
	}
	for _, c := range uri[len(path):] {
		if c <= ' ' || c == 0x7f || c == '#' {
			return nil, nil, refuseTarget
		}
	}
	return path, uri, nil
}

func unhex(c byte) byte {
	switch {
	case '0' <= c && c <= '9':
		return c - '0'
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10
	}
	return 16
}

var refuseTarget = &refusal{status: fasthttp.StatusBadRequest, code: "invalid_target", hangUp: true,
	message: "the request target is ambiguous: send a plain path without dot segments, control bytes, encoded slashes or bad escapes"}
