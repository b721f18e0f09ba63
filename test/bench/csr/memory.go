package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/chancery-project/chancery/test/bench/parts"
)

// settledMemory reads a process's memory once it has held still (within 1 %) for three seconds, or after half a
// minute. From outside one cannot ask for a garbage collection, and an idle process runs one only every two minutes;
// scraping its metrics, as Prometheus would, makes enough garbage to bring it about.
func settledMemory(ctx context.Context, p *parts.Process, metrics string) (parts.Memory, error) {
	steady, err := parts.ReadMemory(p.PID())
	if err != nil {
		return parts.Memory{}, err
	}
	began := time.Now()
	since := began
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for time.Since(since) < 3*time.Second && time.Since(began) < 30*time.Second {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return parts.Memory{}, fmt.Errorf("measuring memory of %s: %w", p.Name, ctx.Err())
		}
		if err := parts.Get(ctx, metrics+"/metrics"); err != nil {
			return parts.Memory{}, fmt.Errorf("measuring memory of %s: %w", p.Name, err)
		}
		now, err := parts.ReadMemory(p.PID())
		if err != nil {
			return parts.Memory{}, err
		}
		if now.Private < steady.Private*0.99 || now.Private > steady.Private*1.01 {
			steady, since = now, time.Now()
		}
	}
	return parts.ReadMemory(p.PID())
}

// reportMemory prints the server's memory before and after the load, and that of an agent with one identity.
func reportMemory(ctx context.Context, w io.Writer, binary, dir string, server *target, idle parts.Memory) error {
	idle.Print(w, "server", "idle")
	loaded, err := settledMemory(ctx, server.process, server.metrics)
	if err != nil {
		return err
	}
	loaded.Print(w, "server", "after-load")
	// The token in dir is the first workload's.
	p, metrics, err := startAgent(ctx, binary, dir, server.addr, "spiffe://"+parts.TrustDomain+"/ns/bench-0/sa/app-0")
	if err != nil {
		return err
	}
	defer p.Stop()
	agent, err := settledMemory(ctx, p, metrics)
	if err != nil {
		return err
	}
	agent.Print(w, "agent", "idle")
	return nil
}
