package proxy

import (
	"bytes"
	"crypto/rand"
	_ "embed" // the page
	"fmt"
	"html/template"
	"net/http"
	"strings"

	"go.uber.org/zap"

	"kvgate/routing"
)

//go:embed status.html
var statusHTML string

var statusTemplate = template.Must(template.New("status").Funcs(template.FuncMap{
	"number": func(v *float64) string { return statusNumber(v, "%.0f", 1) },
	"pct":    func(v *float64) string { return statusNumber(v, "%.0f %%", 100) },
	"width":  func(v *float64) string { return statusNumber(v, "%.0f", 60) },
	"age":    func(v *float64) string { return statusNumber(v, "%.1f s", 1) },
	"models": func(names []string) string {
		if names == nil {
			return "unknown"
		}
		return strings.Join(names, ", ")
	},
}).Parse(statusHTML))

func statusNumber(v *float64, format string, unit float64) string {
	if v == nil {
		return "–"
	}
	return fmt.Sprintf(format, *v*unit)
}

// statusPage shows the fleet as it is now; its script keeps it so. The page is
// whole in itself: it loads nothing but this listener's own JSON and metrics.
func (a *admin) statusPage(w http.ResponseWriter, _ *http.Request) {
	data := struct {
		Nonce, Version, Problem string
		Fleet                   routing.FleetSnapshot
		Ready, InFlight, Blocks int
	}{Nonce: rand.Text(), Version: a.Version, Fleet: a.Fleet.Snapshot()}
	if a.Ready != nil {
		if err := a.Ready(); err != nil {
			data.Problem = err.Error()
		}
	}
	for _, r := range data.Fleet.Replicas {
		if r.State == routing.Ready.String() {
			data.Ready++
		}
		data.InFlight += r.InFlight
		data.Blocks += r.IndexBlocks
	}
	var page bytes.Buffer
	if err := statusTemplate.Execute(&page, data); err != nil {
		a.Log.Error("status page", zap.Error(err))
		fail(w, http.StatusInternalServerError, fmt.Errorf("status page: %w", err))
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; connect-src 'self'; img-src data:; style-src 'nonce-"+data.Nonce+
		"'; script-src 'nonce-"+data.Nonce+"'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("Referrer-Policy", "no-referrer")
	_, _ = w.Write(page.Bytes())
}
