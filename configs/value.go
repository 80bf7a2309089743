package configs

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
)

// Size is a number of bytes. As text it is a whole number with an optional binary
// unit: 32MiB, 64KiB, 64k, 1048576.
type Size int64

// sizeUnits are powers of 1024, largest first.
const sizeUnits = "tgmk"

// UnmarshalText reads "32MiB", "64k" or a plain number of bytes.
func (s *Size) UnmarshalText(text []byte) error {
	const remedy = "write a number of bytes, or one with the unit KiB, MiB, GiB or TiB, such as 32MiB"
	digits := strings.TrimRight(string(text), "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil {
		return fmt.Errorf("%s is no size: %s", quote(string(text)), remedy)
	}
	shift := 0
	switch unit := strings.ToLower(string(text[len(digits):])); {
	case unit == "" || unit == "b":
	case strings.HasSuffix(unit, "b") && !strings.HasSuffix(unit, "ib"):
		return fmt.Errorf("the unit of %s may mean 1000 or 1024: %s", quote(string(text)), remedy)
	default:
		i := strings.Index(sizeUnits, strings.TrimSuffix(strings.TrimSuffix(unit, "b"), "i"))
		if len(strings.TrimSuffix(strings.TrimSuffix(unit, "b"), "i")) != 1 || i < 0 {
			return fmt.Errorf("%s is no size: %s", quote(string(text)), remedy)
		}
		shift = 10 * (len(sizeUnits) - i)
	}
	if n > math.MaxInt64>>shift {
		return fmt.Errorf("%s is too large: at most %d bytes", quote(string(text)), int64(math.MaxInt64))
	}
	*s = Size(n << shift)
	return nil
}

// String returns the size in the largest unit that divides it. UnmarshalText reads it back.
func (s Size) String() string {
	for i, unit := range []string{"TiB", "GiB", "MiB", "KiB"} {
		if one := Size(1) << (10 * (len(sizeUnits) - i)); s != 0 && s%one == 0 {
			return strconv.FormatInt(int64(s/one), 10) + unit
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// Quantity is a Kubernetes quantity that counts something: "1Gi", "500M", "1e9", 1024.
// A fraction is rounded away from zero, as Kubernetes does.
type Quantity int64

// UnmarshalText reads a Kubernetes quantity.
func (q *Quantity) UnmarshalText(text []byte) error {
	s := string(text)
	number := strings.TrimRight(s, "numkKMGTPEi")
	suffix := s[len(number):]
	factor := new(big.Rat)
	switch {
	case len(suffix) == 2 && suffix[1] == 'i' && strings.Contains("KMGTPE", suffix[:1]):
		factor.SetInt(new(big.Int).Lsh(big.NewInt(1), 10*uint(1+strings.Index("KMGTPE", suffix[:1]))))
	case len(suffix) == 1 && strings.Contains("kMGTPE", suffix):
		factor.SetInt(new(big.Int).Exp(big.NewInt(1000), big.NewInt(int64(1+strings.Index("kMGTPE", suffix))), nil))
	case len(suffix) == 1 && strings.Contains("mun", suffix):
		factor.SetFrac64(1, int64(math.Pow10(3*(1+strings.Index("mun", suffix)))))
	case suffix == "":
		factor.SetInt64(1)
	default:
		return badQuantity(s)
	}
	const longest = 40 // characters, which bounds the work; int64 has 19 digits
	mantissa, exponent, scientific := strings.Cut(strings.ToLower(number), "e")
	exp, err := 0, error(nil)
	if scientific {
		exp, err = strconv.Atoi(exponent)
	}
	plain := strings.Trim(mantissa, "0123456789.+-") == "" && strings.Count(mantissa, ".") <= 1 && mantissa != "" && mantissa[len(mantissa)-1] != '-'
	value, ok := new(big.Rat).SetString(mantissa)
	if len(s) > longest || err != nil || exp < -longest || exp > longest || !plain || !ok || scientific && suffix != "" {
		return badQuantity(s)
	}
	power := new(big.Rat).SetInt(new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(max(exp, -exp))), nil))
	if exp < 0 {
		power.Inv(power)
	}
	value.Mul(value, factor.Mul(factor, power))
	whole, rest := new(big.Int).QuoRem(value.Num(), value.Denom(), new(big.Int))
	whole.Add(whole, big.NewInt(int64(rest.Sign())))
	if !whole.IsInt64() {
		return fmt.Errorf("%s is out of range: at most %d", quote(s), int64(math.MaxInt64))
	}
	*q = Quantity(whole.Int64())
	return nil
}

func badQuantity(s string) error {
	return fmt.Errorf("%s is no quantity: write a number, or one with a suffix such as k, M, Mi or Gi", quote(s))
}
