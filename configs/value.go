package configs

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"regexp"
	"strconv"
	"strings"
	"unicode"
)

// Size is a number of bytes. As text it is a whole number with an optional binary
// unit: 32MiB, 64KiB, 64k, 1048576.
type Size int64

// sizeUnits are the powers of 1024 from the first.
var sizeUnits = [...]string{"KiB", "MiB", "GiB", "TiB"}

// UnmarshalText reads "32MiB", "64k" or a plain number of bytes.
func (s *Size) UnmarshalText(text []byte) error {
	const remedy = "write a number of bytes, or one with the unit KiB, MiB, GiB or TiB, such as 32MiB"
	digits := bytes.TrimRightFunc(text, unicode.IsLetter)
	unit := string(text[len(digits):])
	n, err := strconv.ParseUint(string(digits), 10, 63)
	shift := -1
	if unit == "" || strings.EqualFold(unit, "b") {
		shift = 0
	}
	for i, u := range sizeUnits {
		switch {
		case strings.EqualFold(unit, u), strings.EqualFold(unit, u[:2]), strings.EqualFold(unit, u[:1]):
			shift = 10 * (i + 1)
		case strings.EqualFold(unit, u[:1]+"b"):
			return fmt.Errorf("the unit of %s may mean 1000 or 1024: %s", quote(string(text)), remedy)
		}
	}
	switch {
	case err != nil || shift < 0:
		return fmt.Errorf("%s is no size: %s", quote(string(text)), remedy)
	case n > math.MaxInt64>>shift:
		return fmt.Errorf("%s is too large: at most %d bytes", quote(string(text)), int64(math.MaxInt64))
	}
	*s = Size(n << shift)
	return nil
}

// String returns the size in the largest unit that divides it. UnmarshalText reads it back.
func (s Size) String() string {
	for i := len(sizeUnits); i > 0; i-- {
		if one := Size(1) << (10 * i); s != 0 && s%one == 0 {
			return strconv.FormatInt(int64(s/one), 10) + sizeUnits[i-1]
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// Quantity is a Kubernetes quantity that counts something: "1Gi", "500M", "1e9", 1024.
// A fraction is rounded away from zero, as Kubernetes does.
type Quantity int64

// quantity splits a quantity into mantissa, decimal exponent and suffix.
var quantity = regexp.MustCompile(`^([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE]))?$`)

// UnmarshalText reads a Kubernetes quantity.
func (q *Quantity) UnmarshalText(text []byte) error {
	const longest = 40 // characters; an int64 has 19 digits
	m := quantity.FindStringSubmatch(string(text))
	if m == nil || len(text) > longest {
		return fmt.Errorf("%s is no quantity: write a number, or one with a suffix such as k, M, Mi or Gi", quote(string(text)))
	}
	value, _ := new(big.Rat).SetString(m[1])
	base, power := int64(10), 0
	switch exponent, suffix := m[2], m[3]; {
	case exponent != "":
		power, _ = strconv.Atoi(exponent)
	case len(suffix) == 2:
		base, power = 1024, 1+strings.Index("KMGTPE", suffix[:1])
	case suffix != "":
		power = 3 * (strings.Index("num.kMGTPE", suffix) - 3)
	}
	factor := new(big.Rat).SetInt(new(big.Int).Exp(big.NewInt(base), big.NewInt(int64(max(power, -power))), nil))
	if power < 0 {
		factor.Inv(factor)
	}
	value.Mul(value, factor)
	whole, rest := new(big.Int).QuoRem(value.Num(), value.Denom(), new(big.Int))
	whole.Add(whole, big.NewInt(int64(rest.Sign())))
	if !whole.IsInt64() {
		return fmt.Errorf("%s is out of range: at most %d", quote(string(text)), int64(math.MaxInt64))
	}
	*q = Quantity(whole.Int64())
	return nil
}
