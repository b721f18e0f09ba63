package parts

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
)

// Memory is what a process holds, in units of 1,000,000 bytes: all resident pages, and those it shares with nobody
// and no file. Clean pages of the binary count in the first only.
type Memory struct {
	RSS     float64
	Private float64
}

// Print prints it.
func (m Memory) Print(w io.Writer, who, when string) {
	fmt.Fprintf(w, "memory %s rss=%.1fMB private=%.1fMB when=%s\n", who, m.RSS, m.Private, when)
}

// ReadMemory reads what a process has now.
func ReadMemory(pid int) (Memory, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return Memory{}, fmt.Errorf("reading memory of process: %w", err)
	}
	var m Memory
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		kibibytes, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		if err != nil {
			continue // not a size
		}
		switch key {
		case "VmRSS":
			m.RSS = kibibytes * 1024 / 1e6
		case "RssAnon":
			m.Private = kibibytes * 1024 / 1e6
		}
	}
	return m, nil
}

// CPUTime is the processor time that a process has used, in steps of the kernel's clock tick (10 ms).
func CPUTime(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("reading processor time: %w", err)
	}
	// Fields are counted after the command's name, which may hold spaces: user and system time are the 12th and 13th.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("reading processor time: /proc/%d/stat has %d fields, want 13 or more", pid, len(fields))
	}
	var ticks int64
	for _, field := range fields[11:13] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("reading processor time: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}
