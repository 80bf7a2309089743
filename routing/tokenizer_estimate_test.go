package routing

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"
)

// A PNG of 64x32, a GIF of 64x64 and a JPEG of 128x48 pixels.
const (
	pngBase64  = "iVBORw0KGgoAAAANSUhEUgAAAEAAAAAgAQMAAACYU+zHAAAABlBMVEUAAAD///+l2Z/dAAAAEElEQVR42mIYBXgBIAAA//8BIAAB6sUB8AAAAABJRU5ErkJggg=="
	gifBase64  = "R0lGODlhQABAAIAAAAAAAP///ywAAAAAQABAAAACRYSPqcvtD6OctNqLs968+w+G4kiW5omm6sq27gvH8kzX9o3n+s73/g8MCofEovGITCqXzKbzCY1Kp9Sq9YrNarfcrhdQAAA7"
	jpegBase64 = "/9j/2wCEAP////////////////////////////////////////////////////////////////////////////////////8B///////////////////////////////////////////////////////////////////////////////////////AAAsIADAAgAEBEQD/xADSAAABBQEBAQEBAQAAAAAAAAAAAQIDBAUGBwgJCgsQAAIBAwMCBAMFBQQEAAABfQECAwAEEQUSITFBBhNRYQcicRQygZGhCCNCscEVUtHwJDNicoIJChYXGBkaJSYnKCkqNDU2Nzg5OkNERUZHSElKU1RVVldYWVpjZGVmZ2hpanN0dXZ3eHl6g4SFhoeIiYqSk5SVlpeYmZqio6Slpqeoqaqys7S1tre4ubrCw8TFxsfIycrS09TV1tfY2drh4uPk5ebn6Onq8fLz9PX29/j5+v/aAAgBAQAAPwCOiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiv/9k="
)

// mapHeaders is a request's header for tests.
type mapHeaders map[string]string

func (h mapHeaders) Header(name string) []byte {
	if v, ok := h[name]; ok {
		return []byte(v)
	}
	return nil
}

// estimate reads parameters as a configuration has them.
func estimate(t *testing.T, params string) EstimateParams {
	t.Helper()
	var p EstimateParams
	d := json.NewDecoder(strings.NewReader(params))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		t.Fatalf("decoding %s: error %v, want none", params, err)
	}
	return p
}

// checkAsset wants a message of one block to be n tokens of an asset with that content.
func checkAsset(t *testing.T, params string, h Headers, api API, block, content string, n int) {
	t.Helper()
	r := tokenizedWith(t, estimate(t, params), h, api, `{"messages":[{"role":"user","content":[`+block+`]}]}`)
	want := bytes.Repeat(binary.LittleEndian.AppendUint32(nil, uint32(xxhash.Sum64String(content))), n)
	if got, ok := bytes.CutPrefix(r.Tokens, []byte("user")); !ok || !bytes.Equal(got, want) {
		t.Errorf("%s %v %.80s: %d tokens, first %x, want %d tokens of %x", params, h, block, len(got)/4, got[:min(4, len(got))], n, want[:4])
	}
}

func TestImageTokens(t *testing.T) {
	f := func(t *testing.T, params, url string, want int) {
		t.Helper()
		checkAsset(t, params, nil, APIChat, fmt.Sprintf(`{"type":"image_url","image_url":{"url":%q}}`, url), url, want)
	}
	png := "data:image/png;base64," + pngBase64
	f(t, `{}`, png, 2)
	f(t, `{}`, "data:image/gif;base64,"+gifBase64, 4)
	f(t, `{}`, "data:image/jpeg;base64,"+jpegBase64, 6)
	f(t, `{}`, "https://example.com/a.png", 225)
	f(t, `{}`, "data:image/png;base64,AAAA", 225)
	f(t, `{}`, "data:image/png;base64,!", 225)
	f(t, `{}`, "data:image/png,"+pngBase64, 225)
	f(t, `{}`, "data:text/plain;base64,"+pngBase64, 225)
	f(t, `{}`, "", 225)
	f(t, `{"image":{"dynamic":{"factor":2048}}}`, "https://example.com/a.png", 112)
	f(t, `{"image":{"dynamic":{"factor":10000}}}`, png, 1)
	f(t, `{"image":{"defaultResolution":{"width":1024,"height":1024}}}`, "https://example.com/a.png", 1024)
	f(t, `{"image":{"defaultResolution":{"width":1024}}}`, "https://example.com/a.png", 360)
	f(t, `{"image":{"mode":"static","static":{"staticToken":7}}}`, png, 7)
	f(t, `{"image":{"mode":"static"}}`, png, 1)

	bare := `{"type":"image_url","image_url":"https://example.com/a.png"}`
	checkAsset(t, `{}`, nil, APIChat, bare, "https://example.com/a.png", 225)
	slashes := `{"image_url":{"url":"` + strings.ReplaceAll(png, "/", `\/`) + `","detail":"low"},"type":"image_url"}`
	checkAsset(t, `{}`, nil, APIChat, slashes, png, 2)
}

func TestAnthropicImageTokens(t *testing.T) {
	f := func(t *testing.T, block, content string, want int) {
		t.Helper()
		checkAsset(t, `{}`, nil, APIMessages, block, content, want)
	}
	f(t, `{"type":"image","source":{"type":"base64","media_type":"image/png","data":"`+pngBase64+`"}}`, pngBase64, 2)
	f(t, `{"type":"image","source":{"type":"url","url":"https://example.com/a.png"}}`, "https://example.com/a.png", 225)
	f(t, `{"type":"image","source":{"url":"u","data":"d"}}`, "u", 225)
	f(t, `{"type":"tool_result","content":[{"type":"image","source":{"media_type":"image/png","data":"`+pngBase64+`"}}]}`, "data:image/png;base64,"+pngBase64, 2)
	f(t, `{"type":"tool_result","content":[{"type":"image","source":{"data":"`+pngBase64+`"}},{"type":"image"}]}`, "data:image/jpeg;base64,"+pngBase64, 2)
	f(t, `{"type":"image","source":{"data":"x"},"source":{"url":"u"}},{"type":"image","source":7},{"type":"image"}`, "u", 225)
}

func TestAudioTokens(t *testing.T) {
	f := func(t *testing.T, block, content string, want int) {
		t.Helper()
		checkAsset(t, `{}`, nil, APIChat, block, content, want)
	}
	f(t, `{"type":"input_audio","input_audio":{"data":"AAAABBBB","format":"wav"}}`, "AAAABBBBwav", 3)
	f(t, `{"type":"input_audio","input_audio":{"format":"w\u0061v","data":"AA\/A"}}`, "AA/Awav", 2)
	f(t, `{"type":"input_audio","input_audio":{"data":"AAAA"}}`, "AAAA", 1)
	f(t, `{"type":"input_audio","input_audio":{"format":"wav"}}`, "wav", 1)
	f(t, `{"type":"input_audio"}`, "", 1)
	f(t, `{"type":"audio_url","audio_url":{"url":"https://example.com/a.wav"}}`, "https://example.com/a.wav", 7)
}

func TestVideoTokens(t *testing.T) {
	f := func(t *testing.T, params string, h mapHeaders, want int) {
		t.Helper()
		checkAsset(t, params, h, APIChat, `{"type":"video_url","video_url":{"url":"https://example.com/v.mp4"}}`, "https://example.com/v.mp4", want)
	}
	checkAsset(t, `{}`, nil, APIChat, `{"type":"video_url","video_url":{"url":"v"}}`, "v", 4500)
	small := mapHeaders{"x-llm-d-video-resolution": "320x240", "x-llm-d-video-duration-seconds": "3"}
	f(t, `{}`, small, 450)
	f(t, `{"video":{"maxVideoTokens":100}}`, small, 100)
	f(t, `{"video":{"defaultResolution":{"width":320,"height":240},"defaultDuration":3}}`, nil, 450)

	const one = `"tokensPerFrame":{"mode":"static"},`
	strided := func(rest string) string {
		return `{"video":{` + one + `"frames":{"mode":"strided","strided":{"frameStride":4}` + rest + `}}}`
	}
	seconds := func(s string) mapHeaders { return mapHeaders{"x-llm-d-video-duration-seconds": s} }
	f(t, strided(``), nil, 60)
	f(t, strided(`,"maxFrames":16`), nil, 16)
	f(t, strided(``), seconds("1"), 6)
	f(t, strided(`,"minFrames":8`), seconds("1"), 8)
	f(t, `{"video":{`+one+`"frames":{"mode":"strided","strided":{"frameStride":2}}}}`,
		mapHeaders{"x-llm-d-video-duration-seconds": "3", "x-llm-d-video-fps": "30"}, 45)
	f(t, `{"video":{`+one+`"frames":{"mode":"strided","strided":{"defaultSourceFPS":12}}}}`, nil, 120)
	sampled := func(rest string) string {
		return `{"video":{` + one + `"frames":{"sampled":{"sampleFPS":2,"temporalPatchSize":2}` + rest + `}}}`
	}
	f(t, sampled(``), nil, 10)
	f(t, sampled(`,"minFrames":4`), seconds("1"), 2)
	f(t, sampled(`,"maxFrames":7`), nil, 3)
	f(t, sampled(``), mapHeaders{"x-llm-d-video-fps": "60"}, 10)
	f(t, `{"video":{"tokensPerFrame":{"mode":"static","static":{"numTokensPerFrame":100}}}}`, nil, 2000)
	f(t, `{"video":{"tokensPerFrame":{"dynamic":{"factor":2048}}}}`, nil, 2240)

	for _, odd := range []mapHeaders{
		seconds("x"), seconds("-1"), seconds("0"), seconds("Inf"), seconds("NaN"), seconds(""),
		{"x-llm-d-video-resolution": "320"}, {"x-llm-d-video-resolution": "x240"}, {"x-llm-d-video-resolution": "320x"},
		{"x-llm-d-video-resolution": "-1x240"}, {"x-llm-d-video-resolution": "320x0"}, {"x-llm-d-video-resolution": "9999999999999999999x1"},
	} {
		f(t, `{}`, odd, 4500)
	}
	f(t, `{}`, mapHeaders{"x-llm-d-video-resolution": " 320 X 240 "}, 1500)
	f(t, `{}`, seconds("0.1"), 1)
}

// TestAssetLimit lets assets claim any size: the request's tokens stay bounded.
func TestAssetLimit(t *testing.T) {
	huge := []byte("\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x7f\xff\xff\xff\x7f\xff\xff\xff\x08\x00\x00\x00\x00\x00\x00\x00\x00")
	f := func(t *testing.T, h Headers, block string, wantTokens int) {
		t.Helper()
		r := tokenizedWith(t, EstimateParams{}, h, APIChat, `{"messages":[{"role":"user","content":[`+block+`]}]}`)
		if got := len(r.Tokens) / 4; got != wantTokens {
			t.Errorf("%.60s: %d tokens, want %d", block, got, wantTokens)
		}
	}
	f(t, mapHeaders{"x-llm-d-video-duration-seconds": "1e300", "x-llm-d-video-resolution": "999999999x999999999"}, `{"type":"video_url"}`, 1+maxAssetTokens)
	f(t, nil, strings.Repeat(`{"type":"image_url"},`, 5000)+`"end"`, 1+maxAssetTokens+(5000-(maxAssetTokens+224)/225)+1)
	if got, ok := imageSize([]byte(base64Of(huge))); ok && got.tokens(1) > maxAssetTokens {
		t.Errorf("an image of %v has %d tokens, want at most %d", got, got.tokens(1), maxAssetTokens)
	}
	if got := (Resolution{1 << 31, 1 << 31}).tokens(1024); got != maxAssetTokens {
		t.Errorf("tokens of the largest image = %d, want %d", got, maxAssetTokens)
	}
}

func TestEstimateParams(t *testing.T) {
	f := func(t *testing.T, params, want string) {
		t.Helper()
		_, err := NewEstimator(estimate(t, params))
		if got := fmt.Sprint(err); want == "" && err != nil || !strings.Contains(got, want) {
			t.Errorf("NewEstimator(%s): error %v, want %q in it", params, err, want)
		}
	}
	f(t, `{}`, "")
	f(t, `{"image":{"mode":"dynamic"},"video":{"tokensPerFrame":{"mode":"static"},"frames":{"mode":"strided"}}}`, "")
	f(t, `{"image":{"mode":"dynamc"}}`, `image.mode "dynamc": use "dynamic" or "static"`)
	f(t, `{"video":{"tokensPerFrame":{"mode":"x"}}}`, `video.tokensPerFrame.mode "x": use "dynamic" or "static"`)
	f(t, `{"video":{"frames":{"mode":"x"}}}`, `video.frames.mode "x": use "sampled" or "strided"`)
	f(t, `{"image":{"defaultResolution":{"height":-1}}}`, "image.defaultResolution.height -1 is negative")
	f(t, `{"image":{"static":{"staticToken":-1}}}`, "image.static.staticToken -1 is negative")
	f(t, `{"video":{"defaultDuration":-0.5}}`, "video.defaultDuration -0.5 is negative")
	f(t, `{"video":{"frames":{"strided":{"frameStride":-2}}}}`, "video.frames.strided.frameStride -2 is negative")
	if got, want := DefaultEstimateParams(), (EstimateParams{}).withDefaults(); got != want {
		t.Errorf("DefaultEstimateParams() = %+v, want %+v", got, want)
	}
}

// TestAssetsInTheStream aligns assets in the middle of text.
func TestAssetsInTheStream(t *testing.T) {
	r := tokenized(t, APIChat, `{"messages":[{"content":["a",{"type":"image_url","image_url":{"url":"data:image/png;base64,`+pngBase64+`"}},"bcdef"],"role":"user"},{"role":"x"}]}`)
	token := string(binary.LittleEndian.AppendUint32(nil, uint32(xxhash.Sum64String("data:image/png;base64,"+pngBase64))))
	want := "usera\x00\x00\x00" + token + token + "bcdefx\x00\x00"
	if got := string(r.Tokens); got != want || len(r.Ends) != 1 || r.Ends[0] != len(want) {
		t.Errorf("tokens %q, ends %v, want %q, [%d]", got, r.Ends, want, len(want))
	}
}

func base64Of(b []byte) string { return base64.StdEncoding.EncodeToString(b) }
