//go:build !linux

package routing

import "testing"

func apart(*testing.B) {}
