package routing

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"image"
	_ "image/gif"  // image headers
	_ "image/jpeg" // image headers
	_ "image/png"  // image headers
	"math"
	"strconv"
)

// EstimateParams are the parameters `estimate` of the token-producer. Zero means
// the default.
type EstimateParams struct {
	Image ImageEstimate `json:"image"`
	Video VideoEstimate `json:"video"`
}

// ImageEstimate says how many tokens an image takes.
type ImageEstimate struct {
	// Mode is "dynamic" (pixels over a factor, the default) or "static".
	Mode string `json:"mode"`
	// DefaultResolution stands for an image whose size cannot be read: 640x360.
	DefaultResolution Resolution   `json:"defaultResolution"`
	Static            StaticImage  `json:"static"`
	Dynamic           DynamicImage `json:"dynamic"`
}

// StaticImage is the constant number of tokens of an image, at least 1.
type StaticImage struct {
	StaticToken int `json:"staticToken"`
}

// DynamicImage maps pixels to tokens: width * height / Factor, 1024 by default.
type DynamicImage struct {
	Factor int `json:"factor"`
}

// Resolution is a size in pixels.
type Resolution struct {
	Width  int `json:"width"`
	Height int `json:"height"`
}

// VideoEstimate says how many tokens a video takes: frames * tokens per frame,
// at most MaxVideoTokens when that is above 0.
type VideoEstimate struct {
	// DefaultResolution stands for a video of unknown size: 640x360.
	DefaultResolution Resolution `json:"defaultResolution"`
	// DefaultDuration stands for an unknown duration: 10 seconds.
	DefaultDuration float64        `json:"defaultDuration"`
	TokensPerFrame  TokensPerFrame `json:"tokensPerFrame"`
	Frames          Frames         `json:"frames"`
	MaxVideoTokens  int            `json:"maxVideoTokens"`
}

// TokensPerFrame says how many tokens a frame takes.
type TokensPerFrame struct {
	// Mode is "dynamic" (pixels over a factor, the default) or "static".
	Mode    string       `json:"mode"`
	Static  StaticFrame  `json:"static"`
	Dynamic DynamicFrame `json:"dynamic"`
}

// StaticFrame is the constant number of tokens of a frame, at least 1.
type StaticFrame struct {
	NumTokensPerFrame int `json:"numTokensPerFrame"`
}

// DynamicFrame maps pixels to tokens: width * height / Factor, 1024 by default.
type DynamicFrame struct {
	Factor int `json:"factor"`
}

// Frames says how many frames of a video count. MinFrames and MaxFrames bound
// the number in both modes when they are above 0.
type Frames struct {
	// Mode is "sampled" (duration * sample rate, the default) or "strided"
	// (duration * source rate / stride).
	Mode      string        `json:"mode"`
	MinFrames int           `json:"minFrames"`
	MaxFrames int           `json:"maxFrames"`
	Sampled   SampledFrames `json:"sampled"`
	Strided   StridedFrames `json:"strided"`
}

// SampledFrames are the parameters of the sampled mode.
type SampledFrames struct {
	// SampleFPS is the number of frames taken per second: 2.
	SampleFPS float64 `json:"sampleFPS"`
	// TemporalPatchSize is the number of frames that make one group of tokens: 1.
	TemporalPatchSize int `json:"temporalPatchSize"`
}

// StridedFrames are the parameters of the strided mode.
type StridedFrames struct {
	// DefaultSourceFPS stands for an unknown frame rate: 24.
	DefaultSourceFPS float64 `json:"defaultSourceFPS"`
	// FrameStride keeps every so many frames: 1.
	FrameStride int `json:"frameStride"`
}

// Modes of the estimate.
const (
	modeDynamic = "dynamic"
	modeStatic  = "static"
	modeSampled = "sampled"
	modeStrided = "strided"
)

// DefaultEstimateParams returns the parameters that hold when none are given.
func DefaultEstimateParams() EstimateParams { return EstimateParams{}.withDefaults() }

func orDefault[T int | float64 | string](v *T, otherwise T) {
	var zero T
	if *v == zero {
		*v = otherwise
	}
}

func (p EstimateParams) withDefaults() EstimateParams {
	for _, r := range []*Resolution{&p.Image.DefaultResolution, &p.Video.DefaultResolution} {
		orDefault(&r.Width, 640)
		orDefault(&r.Height, 360)
	}
	orDefault(&p.Image.Mode, modeDynamic)
	orDefault(&p.Image.Static.StaticToken, 1)
	orDefault(&p.Image.Dynamic.Factor, 1024)
	v := &p.Video
	orDefault(&v.DefaultDuration, 10)
	orDefault(&v.TokensPerFrame.Mode, modeDynamic)
	orDefault(&v.TokensPerFrame.Static.NumTokensPerFrame, 1)
	orDefault(&v.TokensPerFrame.Dynamic.Factor, 1024)
	orDefault(&v.Frames.Mode, modeSampled)
	orDefault(&v.Frames.Sampled.SampleFPS, 2)
	orDefault(&v.Frames.Sampled.TemporalPatchSize, 1)
	orDefault(&v.Frames.Strided.DefaultSourceFPS, 24)
	orDefault(&v.Frames.Strided.FrameStride, 1)
	return p
}

// Validate returns an error that names the first parameter that is out of range.
func (p EstimateParams) Validate() error {
	i, v := p.Image, p.Video
	for _, m := range []struct{ name, mode, a, b string }{
		{"image.mode", i.Mode, modeDynamic, modeStatic},
		{"video.tokensPerFrame.mode", v.TokensPerFrame.Mode, modeDynamic, modeStatic},
		{"video.frames.mode", v.Frames.Mode, modeSampled, modeStrided},
	} {
		if m.mode != "" && m.mode != m.a && m.mode != m.b {
			return fmt.Errorf("%s %q: use %q or %q", m.name, m.mode, m.a, m.b)
		}
	}
	for _, n := range []struct {
		name  string
		value float64
	}{
		{"image.defaultResolution.width", float64(i.DefaultResolution.Width)},
		{"image.defaultResolution.height", float64(i.DefaultResolution.Height)},
		{"image.static.staticToken", float64(i.Static.StaticToken)},
		{"image.dynamic.factor", float64(i.Dynamic.Factor)},
		{"video.defaultResolution.width", float64(v.DefaultResolution.Width)},
		{"video.defaultResolution.height", float64(v.DefaultResolution.Height)},
		{"video.defaultDuration", v.DefaultDuration},
		{"video.maxVideoTokens", float64(v.MaxVideoTokens)},
		{"video.tokensPerFrame.static.numTokensPerFrame", float64(v.TokensPerFrame.Static.NumTokensPerFrame)},
		{"video.tokensPerFrame.dynamic.factor", float64(v.TokensPerFrame.Dynamic.Factor)},
		{"video.frames.minFrames", float64(v.Frames.MinFrames)},
		{"video.frames.maxFrames", float64(v.Frames.MaxFrames)},
		{"video.frames.sampled.sampleFPS", v.Frames.Sampled.SampleFPS},
		{"video.frames.sampled.temporalPatchSize", float64(v.Frames.Sampled.TemporalPatchSize)},
		{"video.frames.strided.defaultSourceFPS", v.Frames.Strided.DefaultSourceFPS},
		{"video.frames.strided.frameStride", float64(v.Frames.Strided.FrameStride)},
	} {
		if n.value < 0 {
			return fmt.Errorf("%s %v is negative: leave it out for the default", n.name, n.value)
		}
	}
	return nil
}

// Estimator makes tokens without a tokenizer: four bytes of a prompt's text are
// one little-endian token, the last one padded with zeros. An asset starts on a
// token of its own and is as many tokens as a model might need for it, each the
// low 32 bits of the XXH64 of its content. Token ids stay what they are.
type Estimator struct {
	params EstimateParams // complete
}

// NewEstimator returns an Estimator, or an error when a parameter is invalid.
func NewEstimator(p EstimateParams) (*Estimator, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	return &Estimator{p.withDefaults()}, nil
}

// maxAssetTokens bounds the tokens that all assets of a request add: a few bytes
// can claim to be an image of any size. An asset beyond that is one token.
const maxAssetTokens = 1 << 20

// Tokenize fills r.Tokens, r.Ends and r.Exact from what Parse found. A second
// call changes nothing.
func (e *Estimator) Tokenize(r *Request) {
	p := &r.prompt
	if p.done {
		return
	}
	p.done = true
	r.Ends = r.Ends[:0]
	n, ok := p.inOrder(&r.Ends)
	if p.recall.hole > 0 && (!ok || n < p.recall.hole) {
		r.reparse()
		p.done, r.Ends = true, r.Ends[:0]
		n, ok = p.inOrder(&r.Ends)
	}
	if ok {
		// The usual case: the scanner's output is the prompt.
		r.Tokens, p.out = p.out[:n], r.Tokens[:0]
	} else {
		p.recall.memo = nil
		e.assemble(r)
	}
	r.Tokens = pad(r.Tokens)
	r.endPrompt()
	r.Exact = p.isExact()
	switch {
	case len(r.Tokens) == 0:
		r.Source = TokensNone
	case r.Exact:
		r.Source = TokensGiven
	default:
		r.Source = TokensEstimated
	}
}

// isExact reports whether the prompts are token ids; text does not mix with them.
func (p *prompt) isExact() bool {
	for _, s := range p.sections {
		if s.from < s.to {
			return p.pieces[s.from].kind == pieceIDs
		}
	}
	return false
}

// endPrompt notes the end of a prompt. Prompts without tokens do not count.
func (r *Request) endPrompt() {
	start := 0
	if n := len(r.Ends); n > 0 {
		start = r.Ends[n-1]
	}
	if len(r.Tokens) > start {
		r.Ends = append(r.Ends, len(r.Tokens))
	}
}

// inOrder reports whether the pieces of all sections are the first n bytes of
// the output, and appends to ends where prompts end among them.
func (p *prompt) inOrder(ends *[]int) (n int, ok bool) {
	for _, s := range p.sections {
		for _, c := range p.pieces[s.from:s.to] {
			if c.kind > pieceIDs || c.from != n && c.from != c.to {
				*ends = (*ends)[:0]
				return 0, false
			}
			n += c.to - c.from
			if c.ends {
				*ends = append(*ends, n)
			}
		}
	}
	return n, true
}

// assemble puts the pieces together in their order.
func (e *Estimator) assemble(r *Request) {
	p := &r.prompt
	r.Tokens = r.Tokens[:0]
	left := maxAssetTokens
	for _, s := range p.sections {
		for _, c := range p.pieces[s.from:s.to] {
			if c.kind <= pieceIDs {
				r.Tokens = append(r.Tokens, p.bytes(c)...)
			} else {
				n := max(1, min(e.assetTokens(r, c), left))
				left -= n
				r.Tokens = appendAsset(pad(r.Tokens), uint32(c.hash), n)
			}
			if c.ends {
				r.Tokens = pad(r.Tokens)
				r.endPrompt()
			}
		}
	}
}

// pad appends zeros up to a whole token.
func pad(b []byte) []byte {
	for len(b)%bytesPerToken != 0 {
		b = append(b, 0)
	}
	return b
}

func appendAsset(out []byte, token uint32, n int) []byte {
	for range n {
		out = binary.LittleEndian.AppendUint32(out, token)
	}
	return out
}

// assetTokens returns the number of tokens of an asset.
func (e *Estimator) assetTokens(r *Request, c piece) int {
	switch c.kind {
	case pieceAudio:
		return (c.to - c.from + bytesPerToken - 1) / bytesPerToken
	case pieceVideo:
		return e.videoTokens(r.Headers)
	}
	i := &e.params.Image
	if i.Mode == modeStatic {
		return i.Static.StaticToken
	}
	size := i.DefaultResolution
	data, isData := r.prompt.bytes(c), true
	if c.kind == pieceImageURL {
		data, isData = dataURL(data)
	}
	if isData {
		if s, ok := imageSize(data); ok {
			size = s
		}
	}
	return size.tokens(i.Dynamic.Factor)
}

// tokens returns width * height / factor, without overflow.
func (s Resolution) tokens(factor int) int {
	return int(min(float64(s.Width)*float64(s.Height)/float64(factor), maxAssetTokens))
}

// dataURL returns the base64 payload of an image's data URL.
func dataURL(url []byte) ([]byte, bool) {
	if !bytes.HasPrefix(url, []byte("data:image/")) {
		return nil, false
	}
	_, payload, ok := bytes.Cut(url, []byte("base64,"))
	return payload, ok
}

// maxImageHeader bounds the base64 bytes read to find an image's size. JPEG has
// its size behind metadata and colour profiles.
const maxImageHeader = 256 << 10

// imageSize reads the size of a GIF, JPEG or PNG from its base64 bytes.
func imageSize(data []byte) (Resolution, bool) {
	data = data[:min(len(data), maxImageHeader)]
	c, _, err := image.DecodeConfig(base64.NewDecoder(base64.StdEncoding, bytes.NewReader(data)))
	if err != nil || c.Width <= 0 || c.Height <= 0 {
		return Resolution{}, false
	}
	return Resolution{c.Width, c.Height}, true
}

// videoTokens estimates a video. The headers x-llm-d-video-duration-seconds,
// -fps and -resolution say what the parameters only suppose.
func (e *Estimator) videoTokens(h Headers) int {
	v := &e.params.Video
	seconds := positiveHeader(h, "x-llm-d-video-duration-seconds", v.DefaultDuration)
	var frames float64
	if f := &v.Frames; f.Mode == modeStrided {
		fps := positiveHeader(h, "x-llm-d-video-fps", f.Strided.DefaultSourceFPS)
		frames = math.Floor(math.Floor(seconds*fps) / float64(f.Strided.FrameStride))
	} else {
		frames = math.Floor(seconds * f.Sampled.SampleFPS)
	}
	if n := float64(v.Frames.MinFrames); n > 0 {
		frames = max(frames, n)
	}
	if n := float64(v.Frames.MaxFrames); n > 0 {
		frames = min(frames, n)
	}
	if v.Frames.Mode == modeSampled {
		frames = math.Floor(frames / float64(v.Frames.Sampled.TemporalPatchSize))
	}
	perFrame := v.TokensPerFrame.Static.NumTokensPerFrame
	if v.TokensPerFrame.Mode == modeDynamic {
		size := v.DefaultResolution
		if s, ok := resolutionHeader(h); ok {
			size = s
		}
		perFrame = max(1, size.tokens(v.TokensPerFrame.Dynamic.Factor))
	}
	n := int(min(frames*float64(perFrame), maxAssetTokens))
	if v.MaxVideoTokens > 0 {
		n = min(n, v.MaxVideoTokens)
	}
	return n
}

func headerValue(h Headers, name string) []byte {
	if h == nil {
		return nil
	}
	return h.Header(name)
}

// positiveHeader returns a header's value, or otherwise when it is no number above 0.
func positiveHeader(h Headers, name string, otherwise float64) float64 {
	f, err := strconv.ParseFloat(string(headerValue(h, name)), 64)
	if err != nil || !(f > 0) || math.IsInf(f, 0) {
		return otherwise
	}
	return f
}

// resolutionHeader reads WxH from x-llm-d-video-resolution.
func resolutionHeader(h Headers) (Resolution, bool) {
	v := headerValue(h, "x-llm-d-video-resolution")
	x := bytes.IndexAny(v, "xX")
	if x < 0 {
		return Resolution{}, false
	}
	w, errW := strconv.Atoi(string(bytes.TrimSpace(v[:x])))
	height, errH := strconv.Atoi(string(bytes.TrimSpace(v[x+1:])))
	if errW != nil || errH != nil || w <= 0 || height <= 0 {
		return Resolution{}, false
	}
	return Resolution{w, height}, true
}
