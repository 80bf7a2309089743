package proxy

import (
	"debug/elf"
	"debug/gosym"
	_ "embed"
	"errors"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// prefetcher has the processor load the code of a request's way all at once. After a
// pause the caches hold what others run, and a request would wait for memory at each
// of some 1,500 cache lines, one after the other. What it gains is in docs/benchmarks.md, "A small
// answer".
type prefetcher struct {
	lines atomic.Pointer[[]uintptr] // addresses of code, nil until they are found
	last  atomic.Int64              // about when the last request came, ns since 1970
}

// prefetchPause is the pause between two requests of the process behind which
// the code is taken to be out of the caches. BenchmarkPrefetch has what it costs where it is not.
const prefetchPause = 2 * time.Millisecond

// arrived is called when the first bytes of a request have been read.
func (p *prefetcher) arrived(now time.Time) {
	if !p.due(now) {
		return
	}
	if lines := p.lines.Load(); lines != nil {
		prefetch(*lines)
	}
}

// due notes a request and says whether it comes behind a pause.
func (p *prefetcher) due(now time.Time) bool {
	t, last := now.UnixNano(), p.last.Load()
	if t-last < int64(prefetchPause/16) {
		return false // busy processors read what none of them writes
	}
	p.last.Store(t)
	return t-last >= int64(prefetchPause)
}

// prefetch brings the cache lines at the addresses into the second-level cache. It
// does not wait for them, and no address is an error.
//
//go:noescape
func prefetch(addresses []uintptr)

// prefetchNames are the functions on a request's way: those that run between its
// arrival and the answer, from a trace of one request, one name per line. Names that
// a program does not have are passed over.
//
//go:embed prefetch.txt
var prefetchNames string

const (
	cacheLine = 64
	// The first lines of a function are most of what runs of it: errors are handled
	// further down.
	linesPerFunction = 8
)

// find looks the functions up. Without a symbol table nothing is prefetched.
func (p *prefetcher) find(log *zap.Logger) {
	lines, err := requestCode()
	if err != nil {
		log.Debug("the code of requests is not prefetched", zap.Error(err))
		return
	}
	p.lines.Store(&lines)
}

// requestCode returns the addresses of the code on a request's way.
var requestCode = sync.OnceValues(func() ([]uintptr, error) {
	table, err := symbols("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	lines, err := codeLines(table, strings.Fields(prefetchNames))
	debug.FreeOSMemory() // the table takes 12 MB
	return lines, err
})

var errNoSymbols = errors.New("no symbol table of Go's")

// symbols reads the table of functions of a Go program, which stripping leaves there.
func symbols(exe string) (*gosym.Table, error) {
	f, err := elf.Open(exe)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	text, table := f.Section(".text"), f.Section(".gopclntab")
	if text == nil || table == nil {
		return nil, errNoSymbols
	}
	data, err := table.Data()
	if err != nil {
		return nil, err
	}
	return gosym.NewTable(nil, gosym.NewLineTable(data, text.Addr))
}

// codeLines returns the addresses of the first cache lines of the functions in the
// running program, of which table is.
func codeLines(table *gosym.Table, names []string) ([]uintptr, error) {
	own := table.LookupFunc("kvgate/proxy.codeLines")
	if own == nil {
		return nil, errNoSymbols
	}
	moved := reflect.ValueOf(codeLines).Pointer() - uintptr(own.Entry) // of a program that may lie anywhere
	wanted := make(map[string]bool, len(names))
	for _, name := range names {
		wanted[name] = true
	}
	var lines []uintptr
	for i := range table.Funcs {
		fn := &table.Funcs[i]
		if !wanted[fn.Name] {
			continue
		}
		to := min(fn.End, fn.Entry+linesPerFunction*cacheLine)
		for a := fn.Entry &^ (cacheLine - 1); a < to; a += cacheLine {
			lines = append(lines, uintptr(a)+moved)
		}
	}
	slices.Sort(lines)
	return slices.Clip(slices.Compact(lines)), nil
}
