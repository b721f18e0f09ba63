package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
)

// memory is what a process holds, in units of 1,000,000 bytes: all resident pages, and those it shares with nobody
// and no file. Clean pages of the binary count in the first only.
type memory struct {
	rss     float64
	private float64
}

func (m memory) print(w io.Writer, who, when string) {
	fmt.Fprintf(w, "memory %s rss=%.1fMB private=%.1fMB when=%s\n", who, m.rss, m.private, when)
}

func readMemory(pid int) (memory, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return memory{}, fmt.Errorf("reading memory of process: %w", err)
	}
	var m memory
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		kibibytes, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		if err != nil {
			continue // not a size
		}
		switch key {
		case "VmRSS":
			m.rss = kibibytes * 1024 / 1e6
		case "RssAnon":
			m.private = kibibytes * 1024 / 1e6
		}
	}
	return m, nil
}

// settledMemory reads a process's memory once it has held still (within 1 %) for three seconds, or after half a
// minute. From outside one cannot ask for a garbage collection, and an idle process runs one only every two minutes;
// scraping its metrics, as Prometheus would, makes enough garbage to bring it about.
func settledMemory(ctx context.Context, p *process, metrics string) (memory, error) {
	steady, err := readMemory(p.pid())
	if err != nil {
		return memory{}, err
	}
	began := time.Now()
	since := began
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for time.Since(since) < 3*time.Second && time.Since(began) < 30*time.Second {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return memory{}, fmt.Errorf("measuring memory of %s: %w", p.name, ctx.Err())
		}
		if err := get(ctx, metrics+"/metrics"); err != nil {
			return memory{}, fmt.Errorf("measuring memory of %s: %w", p.name, err)
		}
		now, err := readMemory(p.pid())
		if err != nil {
			return memory{}, err
		}
		if now.private < steady.private*0.99 || now.private > steady.private*1.01 {
			steady, since = now, time.Now()
		}
	}
	return readMemory(p.pid())
}

// reportMemory prints the server's memory before and after the load, and that of an agent with one identity.
func reportMemory(ctx context.Context, w io.Writer, binary, dir string, server *target, idle memory) error {
	idle.print(w, "server", "idle")
	loaded, err := settledMemory(ctx, server.process, server.metrics)
	if err != nil {
		return err
	}
	loaded.print(w, "server", "after-load")
	// The token in dir is the first workload's.
	p, metrics, err := startAgent(ctx, binary, dir, server.addr, "spiffe://"+trustDomain+"/ns/bench-0/sa/app-0")
	if err != nil {
		return err
	}
	defer p.stop()
	agent, err := settledMemory(ctx, p, metrics)
	if err != nil {
		return err
	}
	agent.print(w, "agent", "idle")
	return nil
}

// cpuTime is the processor time that a process has used, in steps of the kernel's clock tick (10 ms).
func cpuTime(pid int) (time.Duration, error) {
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
