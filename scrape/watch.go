package scrape

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"
)

// Rhythm of file watching.
const (
	// debounceFor is the silence after an event that makes a file worth reading, debounceMax the longest wait for it.
	debounceFor = 100 * time.Millisecond
	debounceMax = time.Second
	// pollInterval is how often a file is read although nothing was heard of it: for file systems
	// without notifications, and for links whose target changes in another directory.
	pollInterval = 5 * time.Second
)

// watcher calls changed when a file may have changed. It watches the directory,
// not the file: editors and deployments write a new file and rename it over the
// old one, and Kubernetes swaps a link (..data) that the path leads through.
type watcher struct {
	path    string
	poll    time.Duration
	log     *zap.Logger
	changed func(ctx context.Context)
	ctx     context.Context
	cancel  context.CancelFunc
	done    chan struct{}
}

func newWatcher(ctx context.Context, path string, poll time.Duration, log *zap.Logger, changed func(ctx context.Context)) *watcher {
	w := &watcher{path: path, poll: poll, log: log, changed: changed, done: make(chan struct{})}
	w.ctx, w.cancel = context.WithCancel(ctx)
	go w.run()
	return w
}

func (w *watcher) run() {
	defer close(w.done)
	defer w.cancel()
	var events chan fsnotify.Event
	var failures chan error
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		w.log.Warn("no file notifications: the file is only polled", zap.String("file", w.path), zap.Duration("interval", w.poll), zap.Error(err))
	} else {
		events, failures = notify.Events, notify.Errors
		defer func() { _ = notify.Close() }()
	}
	dir := filepath.Dir(w.path)
	var watched os.FileInfo // the directory as it was when the watch began
	look := func() {
		now, err := os.Stat(dir)
		if notify == nil || err != nil || watched != nil && os.SameFile(now, watched) {
			return
		}
		if watched != nil {
			_ = notify.Remove(dir) // another directory has taken its place
		}
		watched = nil
		if err := notify.Add(dir); err == nil {
			watched = now
		}
	}
	look()
	w.changed(w.ctx) // since the file was last read
	poll := time.NewTicker(w.poll)
	defer poll.Stop()
	quiet := time.NewTimer(time.Hour)
	defer quiet.Stop()
	var since time.Time // of the first event that is not dealt with
	heard := func() {
		if since.IsZero() {
			since = time.Now()
		}
		quiet.Reset(min(debounceFor, time.Until(since.Add(debounceMax))))
	}
	for {
		select {
		case <-w.ctx.Done():
			return
		case e := <-events:
			name := filepath.Base(e.Name)
			if name == filepath.Base(w.path) || strings.HasPrefix(name, "..") {
				heard()
			}
			if e.Has(fsnotify.Remove|fsnotify.Rename) && filepath.Clean(e.Name) == filepath.Clean(dir) {
				watched = nil
			}
		case err := <-failures:
			w.log.Debug("file notifications were lost", zap.String("file", w.path), zap.Error(err))
			heard()
		case <-quiet.C:
			if !since.IsZero() {
				since = time.Time{}
				w.changed(w.ctx)
			}
		case <-poll.C:
			look()
			w.changed(w.ctx)
		}
	}
}
