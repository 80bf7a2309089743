package routing

import (
	"math/bits"
	"unsafe"
)

// copyText is copyTextPortable.
//
//go:noescape
func copyText(dst, src []byte) (n, i int)

// plainText is plainTextPortable. Most strings are short: calling assembler for their first 16 bytes took about
// 1.3 times as long; of long ones, as images are, this takes 0.4 of the time (BenchmarkCopyText).
func plainText(src []byte) int {
	if len(src) < textStep {
		return 0
	}
	s := unsafe.Pointer(unsafe.SliceData(src))
	if m := special(load64(s, 0)); m != 0 {
		return bits.TrailingZeros64(m) / 8
	}
	if m := special(load64(s, 8)); m != 0 {
		return 8 + bits.TrailingZeros64(m)/8
	}
	return 16 + plainBlocks(src[16:])
}

// plainBlocks is plainTextPortable for long runs.
//
//go:noescape
func plainBlocks(src []byte) int
