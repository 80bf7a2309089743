package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is a program that the bench started, with all its children: one
// process group. Its output goes to a file.
type process struct {
	name  string
	group int
	log   string
	done  chan struct{} // closed when the first process has ended
	err   error         // why, valid once done
}

// startProcess starts a program in dir. The kernel kills it when the bench dies.
func startProcess(name, dir string, env []string, exe string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(dir, name+".log"), done: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer func() { _ = out.Close() }()
	cmd := exec.Command(exe, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, out
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	p.group = cmd.Process.Pid
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// alive returns an error with the end of the log when the program has ended.
func (p *process) alive() error {
	select {
	case <-p.done:
		why := "exit status 0"
		if p.err != nil {
			why = p.err.Error()
		}
		return fmt.Errorf("%s has ended (%s): %s", p.name, why, p.lastWords())
	default:
		return nil
	}
}

// lastWords returns the end of the log.
func (p *process) lastWords() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	text = bytes.TrimSpace(text)
	return string(text[max(0, len(text)-600):])
}

// pause takes the program off the processors, so that what it does when idle
// does not disturb the others; resume puts it back.
func (p *process) pause()  { _ = unix.Kill(-p.group, unix.SIGSTOP) }
func (p *process) resume() { _ = unix.Kill(-p.group, unix.SIGCONT) }

// stop ends the program and everything that it started. It returns when all are gone.
func (p *process) stop() {
	_ = unix.Kill(-p.group, unix.SIGTERM)
	p.resume()
	deadline := time.Now().Add(10 * time.Second)
	for {
		members, err := p.members()
		if err == nil && len(members) == 0 {
			break
		}
		if time.Now().After(deadline) {
			_ = unix.Kill(-p.group, unix.SIGKILL)
		}
		time.Sleep(20 * time.Millisecond)
	}
	<-p.done
}

// members returns the processes of the group that have not ended, sorted.
func (p *process) members() ([]int, error) {
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, d := range dirs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		stat, err := readStat(pid)
		if err == nil && stat.group == p.group && stat.state != 'Z' {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids, nil
}

// procStat is what the bench needs of /proc/PID/stat, see proc(5).
type procStat struct {
	state    byte
	group    int
	children time.Duration // processor time of children that ended and were waited for
}

func readStat(pid int) (procStat, error) {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return procStat{}, err
	}
	return parseStat(line)
}

// parseStat reads a line of /proc/PID/stat. The second field, a name in
// parentheses, may hold anything.
func parseStat(line []byte) (s procStat, err error) {
	const ticks = 100 // per second, in every file of /proc (USER_HZ)
	fields := bytes.Fields(line[bytes.LastIndexByte(line, ')')+1:])
	if len(fields) < 15 {
		return s, fmt.Errorf("/proc/PID/stat: %d fields behind the name, at least 15 were expected: %q", len(fields), line)
	}
	number := func(i int) int64 { // i counts from 1 as in proc(5)
		n, e := strconv.ParseInt(string(fields[i-3]), 10, 64)
		err = errors.Join(err, e)
		return n
	}
	s.state, s.group = fields[0][0], int(number(5))
	s.children = time.Duration(number(16)+number(17)) * time.Second / ticks
	return s, err
}

// cpuMeter takes the processor time, user and system, of processes. It takes it
// from the clock that the kernel has for every process: /proc/PID/stat counts
// in hundredths of a second, too coarse for short windows.
type cpuMeter struct {
	pids  []int
	begin time.Duration
	err   error
}

func newCPUMeter(pids []int) *cpuMeter { return &cpuMeter{pids: pids} }

// start takes the time at the beginning of a window.
func (m *cpuMeter) start() { m.begin, m.err = m.total() }

// stop returns the time since start.
func (m *cpuMeter) stop() (time.Duration, error) {
	end, err := m.total()
	return end - m.begin, errors.Join(m.err, err)
}

func (m *cpuMeter) total() (sum time.Duration, err error) {
	for _, pid := range m.pids {
		// MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of the kernel's posix-timers.h.
		const sched = 2
		var t unix.Timespec
		if err := unix.ClockGettime(int32(^pid<<3|sched), &t); err != nil {
			return 0, fmt.Errorf("process %d: clock: %w", pid, err)
		}
		stat, err := readStat(pid)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(t.Nano()) + stat.children
	}
	return sum, nil
}

// memory is resident memory in bytes, summed over processes: pages that
// processes share count for each.
type memory struct{ now, peak int64 }

// resetPeak makes the peak of processes their present memory.
func resetPeak(pids []int) error {
	for _, pid := range pids {
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0); err != nil {
			return err
		}
	}
	return nil
}

func readMemory(pids []int) (m memory, err error) {
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return m, err
		}
		one, err := parseStatus(text)
		if err != nil {
			return m, fmt.Errorf("process %d: %w", pid, err)
		}
		m.now += one.now
		m.peak += one.peak
	}
	return m, nil
}

// parseStatus reads VmRSS and VmHWM, which are in KiB, of /proc/PID/status.
func parseStatus(text []byte) (m memory, err error) {
	for line := range bytes.Lines(text) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		into := &m.now
		switch string(name) {
		case "VmHWM":
			into = &m.peak
		case "VmRSS":
		default:
			continue
		}
		n, e := strconv.ParseInt(string(bytes.TrimSuffix(bytes.TrimSpace(value), []byte(" kB"))), 10, 64)
		*into, err = n<<10, errors.Join(err, e)
	}
	if err == nil && (m.now == 0 || m.peak == 0) {
		err = errors.New("/proc/PID/status has no VmRSS or VmHWM")
	}
	return m, err
}

// waitFor polls until ready returns nil, the program ends, or the time is over.
func (p *process) waitFor(ctx context.Context, limit time.Duration, ready func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := ready()
		if err == nil {
			return nil
		}
		if e := p.alive(); e != nil {
			return e
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s did not serve within %v: %w; its log ends with: %s", p.name, limit, err, p.lastWords())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// machineFacts returns the kernel, the processor and the memory in bytes.
func machineFacts() (kernel, cpu string, ram uint64) {
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		kernel = unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:]) + " " + unix.ByteSliceToString(u.Machine[:])
	}
	text, _ := os.ReadFile("/proc/cpuinfo") // absent on no Linux; a report without it is still one
	for line := range bytes.Lines(text) {
		if name, value, ok := bytes.Cut(line, []byte(":")); ok && string(bytes.TrimSpace(name)) == "model name" {
			cpu = string(bytes.TrimSpace(value))
			break
		}
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		ram = info.Totalram * uint64(info.Unit)
	}
	return kernel, cpu, ram
}
