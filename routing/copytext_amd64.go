package routing

import (
	"math/bits"
	"unsafe"
)

// copyText is copyTextPortable.
//
//go:noescape
func copyText(dst, src []byte) (n, i int)

// plainText is plainTextPortable. Most strings are short: their first 16 bytes are not worth the call of assembler.
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
