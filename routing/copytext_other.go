//go:build !amd64

package routing

func copyText(dst, src []byte) (n, i int) { return copyTextPortable(dst, src) }

func plainText(src []byte) int { return plainTextPortable(src) }
