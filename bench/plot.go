package bench

import (
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"
)

// series is one line of a plot.
type series struct {
	name string
	x, y []float64
}

// plotColours are readable on white and on black, and told apart by most eyes
// (Okabe and Ito, 2008).
var plotColours = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#f0e442", "#000000"}

// svgPlot writes lines over common axes. logX takes the horizontal axis in decades.
func svgPlot(w io.Writer, title, xLabel, yLabel string, logX bool, lines []series) error {
	const width, height, left, right, top, bottom = 760, 420, 70, 190, 40, 50
	tx := func(v float64) float64 { return v }
	if logX {
		tx = func(v float64) float64 { return math.Log10(max(v, 1e-4)) }
	}
	x0, x1, y1 := math.Inf(1), math.Inf(-1), 0.0
	for _, l := range lines {
		for i := range l.x {
			x0, x1, y1 = min(x0, tx(l.x[i])), max(x1, tx(l.x[i])), max(y1, l.y[i])
		}
	}
	if !(x1 > x0) {
		x0, x1 = 0, 1
	}
	if y1 <= 0 {
		y1 = 1
	}
	px := func(v float64) float64 { return left + (tx(v)-x0)/(x1-x0)*(width-left-right) }
	py := func(v float64) float64 { return height - bottom - v/y1*(height-top-bottom) }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#fff"/><text x="%d" y="24" font-size="15">%s</text>`+"\n", width, height, left, title)
	for i := range 6 {
		v := y1 * float64(i) / 5
		fmt.Fprintf(&b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%.3g</text>`+"\n", left, width-right, py(v), py(v), left-6, py(v)+4, v)
	}
	for i := range 6 {
		v := x0 + (x1-x0)*float64(i)/5
		label := v
		if logX {
			label = math.Pow(10, v)
		}
		x := left + (v-x0)/(x1-x0)*(width-left-right)
		fmt.Fprintf(&b, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#ddd"/><text x="%.1f" y="%d" text-anchor="middle">%.3g</text>`+"\n", x, x, top, height-bottom, x, height-bottom+18, label)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">%s</text><text x="16" y="%d" transform="rotate(-90 16 %d)" text-anchor="middle">%s</text>`+"\n",
		(left+width-right)/2, height-10, xLabel, (top+height-bottom)/2, (top+height-bottom)/2, yLabel)
	for i, l := range lines {
		colour := plotColours[i%len(plotColours)]
		fmt.Fprintf(&b, `<polyline fill="none" stroke="%s" stroke-width="1.6" points="`, colour)
		for k := range l.x {
			fmt.Fprintf(&b, "%.1f,%.1f ", px(l.x[k]), py(l.y[k]))
		}
		fmt.Fprintf(&b, `"/><rect x="%d" y="%d" width="12" height="12" fill="%s"/><text x="%d" y="%d">%s</text>`+"\n", width-right+14, top+18*i, colour, width-right+32, top+18*i+11, html.EscapeString(l.name))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// PlotTTFT writes the distribution of the times to first token as an SVG.
func PlotTTFT(w io.Writer, results []*LabResult) error {
	var lines []series
	for _, r := range results {
		sorted := slices.Sorted(slices.Values(r.TTFT))
		l := series{name: r.Policy}
		for k := range 200 {
			q := float64(k) / 199
			l.x = append(l.x, rank(sorted, q))
			l.y = append(l.y, 100*q)
		}
		lines = append(lines, l)
	}
	return svgPlot(w, "Time to first token", "seconds", "% of requests at most", true, lines)
}

// PlotLoad writes the requests in flight on the busiest replica over time as an SVG.
func PlotLoad(w io.Writer, results []*LabResult) error {
	var lines []series
	for _, r := range results {
		l := series{name: r.Policy}
		if len(r.Load) == 0 {
			continue
		}
		n := len(r.Load[0])
		stride := max(1, n/300)
		for k := 0; k < n; k += stride {
			most := float32(0)
			for _, samples := range r.Load {
				for _, v := range samples[k:min(k+stride, n)] {
					most = max(most, v)
				}
			}
			l.x = append(l.x, float64(k)*loadSample.Seconds())
			l.y = append(l.y, float64(most))
		}
		lines = append(lines, l)
	}
	return svgPlot(w, "Requests in flight on the busiest replica", "seconds", "requests", false, lines)
}
