package configs

import (
	"math"
	"testing"
)

func TestSize(t *testing.T) {
	f := func(text string, want Size, shown string) {
		t.Helper()
		var got, again Size
		if err := got.UnmarshalText([]byte(text)); err != nil || got != want {
			t.Errorf("got %d and error %v for %q, want %d", got, err, text, want)
		}
		if s := got.String(); s != shown {
			t.Errorf("got %q for %d, want %q", s, got, shown)
		}
		if err := again.UnmarshalText([]byte(got.String())); err != nil || again != got {
			t.Errorf("got %d and error %v for %q, want %d", again, err, got, got)
		}
	}
	f("0", 0, "0")
	f("1", 1, "1")
	f("1000", 1000, "1000")
	f("1024B", 1024, "1KiB")
	f("64k", 64<<10, "64KiB")
	f("64K", 64<<10, "64KiB")
	f("64Ki", 64<<10, "64KiB")
	f("64kib", 64<<10, "64KiB")
	f("32MiB", 32<<20, "32MiB")
	f("33554432", 32<<20, "32MiB")
	f("1536MiB", 1536<<20, "1536MiB")
	f("1g", 1<<30, "1GiB")
	f("2TiB", 2<<40, "2TiB")
	f("8388607TiB", 8388607<<40, "8388607TiB")
	f("9223372036854775807", math.MaxInt64, "9223372036854775807")
}

func TestSizeErrors(t *testing.T) {
	const remedy = "write a number of bytes, or one with the unit KiB, MiB, GiB or TiB, such as 32MiB"
	f := func(text, want string) {
		t.Helper()
		s := Size(7)
		err := s.Set(text)
		if err == nil || err.Error() != want {
			t.Errorf("got %v for %q, want %s", err, text, want)
		}
		if s != 7 {
			t.Errorf("got %d after the error, want the old value 7", s)
		}
	}
	for _, text := range []string{"", "k", "MiB", "-1", "+1", "1.5MiB", "1 MiB", "5x", "5kk", "5i", "5PiB", "0x10", "1e3", "٣"} {
		f(text, quote(text)+" is no size: "+remedy)
	}
	f("64KB", `the unit of "64KB" may mean 1000 or 1024: `+remedy)
	f("1mb", `the unit of "1mb" may mean 1000 or 1024: `+remedy)
	f("8388608TiB", `"8388608TiB" is too large: at most 9223372036854775807 bytes`)
	f("9223372036854775808", `"9223372036854775808" is no size: `+remedy)
}

func TestQuantity(t *testing.T) {
	f := func(text string, want Quantity) {
		t.Helper()
		var got Quantity
		if err := got.UnmarshalText([]byte(text)); err != nil || got != want {
			t.Errorf("got %d and error %v for %q, want %d", got, err, text, want)
		}
	}
	f("0", 0)
	f("1024", 1024)
	f("+5", 5)
	f("-5", -5)
	f("1Ki", 1024)
	f("1.5Gi", 3<<29)
	f("1Ei", 1<<60)
	f("5k", 5000)
	f("1M", 1_000_000)
	f("2E", 2e18)
	f("1e9", 1_000_000_000)
	f("1E3", 1000)
	f("15e-1", 2)
	f("100m", 1)
	f("-100m", -1)
	f("1500m", 2)
	f("2000000u", 2)
	f("1n", 1)
	f(".5", 1)
	f("5.", 5)
	f("9223372036854775807", math.MaxInt64)
}

func TestQuantityErrors(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		var q Quantity
		if err := q.UnmarshalText([]byte(text)); err == nil || err.Error() != want {
			t.Errorf("got %v for %q, want %s", err, text, want)
		}
	}
	for _, text := range []string{"", "x", "k", "1kk", "1K", "1ki", "1i", "1GB", "1e", "e3", "1e3k", "1e100", "1e-100", "1.2.3", "--1", "1-", "-", ".", "1/2", "0x10", "1_000", "١",
		"00000000000000000000000000000000000000001"} {
		f(text, quote(text)+" is no quantity: write a number, or one with a suffix such as k, M, Mi or Gi")
	}
	f("8Ei", `"8Ei" is out of range: at most 9223372036854775807`)
	f("1e99", `"1e99" is out of range: at most 9223372036854775807`)
	f("1e19", `"1e19" is out of range: at most 9223372036854775807`)
}
