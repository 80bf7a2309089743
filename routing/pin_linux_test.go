package routing

import (
	"os"
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// apart gives the calling goroutine a processor to itself until the benchmark ends:
// the threads of all others keep to the first one. Nothing changes where there is one processor.
func apart(b *testing.B) {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil || all.Count() < 2 {
		return
	}
	runtime.LockOSThread()
	own := unix.Gettid()
	pin := func(first, others func(set *unix.CPUSet)) {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			b.Fatal(err)
		}
		for _, t := range tasks {
			id, _ := strconv.Atoi(t.Name())
			var set unix.CPUSet
			if id == own {
				first(&set)
			} else {
				others(&set)
			}
			_ = unix.SchedSetaffinity(id, &set) // it may have ended
		}
	}
	var cpus []int
	for i := 0; len(cpus) < 2; i++ {
		if all.IsSet(i) {
			cpus = append(cpus, i)
		}
	}
	pin(func(s *unix.CPUSet) { s.Set(cpus[1]) }, func(s *unix.CPUSet) { s.Set(cpus[0]) })
	b.Cleanup(func() {
		whole := func(s *unix.CPUSet) { *s = all }
		pin(whole, whole)
		runtime.UnlockOSThread()
	})
}
