package bench

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

// elements reads a whole XML document and counts its elements by name.
func elements(t *testing.T, doc []byte) map[string]int {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(doc))
	count := map[string]int{}
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return count
		}
		if err != nil {
			t.Fatalf("got %v in\n%s\nwant well-formed XML", err, doc)
		}
		if e, ok := token.(xml.StartElement); ok {
			count[e.Name.Local]++
		}
	}
}

func TestPlots(t *testing.T) {
	f := func(t *testing.T, plot func(io.Writer, []*LabResult) error, results []*LabResult, wantLines int) {
		var b bytes.Buffer
		if err := plot(&b, results); err != nil {
			t.Fatal(err)
		}
		if got := elements(t, b.Bytes()); got["svg"] != 1 || got["polyline"] != wantLines {
			t.Errorf("got %v, want one svg with %d lines", got, wantLines)
		}
		if got := b.String(); strings.Contains(got, "NaN") || strings.Contains(got, "Inf") {
			t.Errorf("got %s, want numbers only", got)
		}
		if b.Len() > 100<<10 {
			t.Errorf("got %d bytes, want at most 100 KiB", b.Len())
		}
	}
	load := make([]float32, 5000)
	for i := range load {
		load[i] = float32(i % 7)
	}
	results := []*LabResult{
		{Policy: "a<b & \"c\"", TTFT: []float64{0.1, 3, 20}, Arrivals: make([]time.Duration, 3), Load: [][]float32{load, load}},
		{Policy: "zero", TTFT: []float64{0, 0}, Load: [][]float32{make([]float32, 1)}},
	}
	t.Run("TTFT", func(t *testing.T) { f(t, PlotTTFT, results, 2) })
	t.Run("TTFT of nothing", func(t *testing.T) { f(t, PlotTTFT, []*LabResult{{Policy: "none"}}, 1) })
	t.Run("load", func(t *testing.T) { f(t, PlotLoad, results, 2) })
	t.Run("load not sampled", func(t *testing.T) { f(t, PlotLoad, []*LabResult{{Policy: "none"}}, 0) })
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func TestPlotReportsErrors(t *testing.T) {
	if err := PlotTTFT(brokenWriter{}, nil); !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("got %v, want %v", err, io.ErrShortWrite)
	}
}
