package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
	"github.com/chancery-project/chancery/test/bench/parts"
)

// runTwo measures what a second server is worth: two servers on one PostgreSQL, and load on one of them or on both in turns.
// Each has one core: where the machine has three or more, one of its own, and load and database have the rest (mode=pinned);
// else one core's worth (GOMAXPROCS=1) of those that all share (mode=shared). With -unbounded servers take what they get
// (mode=unbounded): one alone then fills two cores that it shares with the load, and a second only adds switches and syncs.
func runTwo(ctx context.Context, stdout io.Writer, c config, dir string, requests []request) error {
	database, err := pgtest.Launch()
	if err != nil {
		return err
	}
	defer database.Remove()
	binary, err := parts.Binary(ctx, dir)
	if err != nil {
		return err
	}
	mode, cores, n := "shared", []int{-1, -1}, runtime.NumCPU()
	switch {
	case c.unbounded:
		mode = "unbounded"
	case n >= 3:
		mode, cores = "pinned", []int{n - 2, n - 1}
	default:
		if err := os.Setenv("GOMAXPROCS", "1"); err != nil { // of the servers; this program has read its own
			return err
		}
	}
	var servers []*target
	for i, core := range cores {
		s, err := startReplica(ctx, binary, dir, database, i, core, c.conns)
		if err != nil {
			return err
		}
		defer s.stop()
		servers = append(servers, s)
	}
	if err := keepOff(cores); err != nil {
		return err
	}
	one := servers[0]
	one.name = "one"
	two := &target{name: "two", process: one.process, second: servers[1].process, roots: one.roots}
	for i := range one.clients { // as many connections as one alone has
		two.clients = append(two.clients, servers[i%2].clients[i])
	}
	unix.Sync()
	load := &load{requests: requests, callers: c.callers}
	if err := load.alternate(ctx, c.duration, two, one); err != nil {
		return errors.Join(err, load.err())
	}
	reportTarget(stdout, "servers", two)
	reportTarget(stdout, "servers", one)
	target := map[string]string{"pinned": "1.70", "shared": "1.00", "unbounded": "none"}[mode]
	fmt.Fprintf(stdout, "servers mode=%s cores=%d target=%s\n", mode, runtime.NumCPU(), target)
	reportRatio(stdout, "servers", two, one, load.failed.Load())
	return load.err()
}

// startReplica starts a server of its own folder on the database; the first makes the authority. A core of -1 is any.
func startReplica(ctx context.Context, binary, dir string, database *pgtest.Cluster, n, core, conns int) (*target, error) {
	own := filepath.Join(dir, fmt.Sprintf("server-%d", n))
	if err := os.Mkdir(own, 0o700); err != nil {
		return nil, err
	}
	state := fmt.Sprintf("postgres: {url: %q}, sealingKey: %s, replica: server-%d", database.URL("postgres", pgtest.Admin), filepath.Join(dir, "state.key"), n)
	path := filepath.Join(own, "server.yaml")
	if err := os.WriteFile(path, fmt.Appendf(nil, parts.ServerConfig, state, filepath.Join(dir, "jwks.json")), 0o600); err != nil {
		return nil, fmt.Errorf("writing server config: %w", err)
	}
	roots := filepath.Join(own, "roots.pem")
	if n == 0 {
		if err := parts.MakeAuthority(ctx, binary, path); err != nil {
			return nil, err
		}
	} else if err := os.Link(filepath.Join(dir, "server-0", "roots.pem"), roots); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	if core >= 0 { // a child has the cores of the thread that starts it
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var before, only unix.CPUSet
		if err := unix.SchedGetaffinity(0, &before); err != nil {
			return nil, err
		}
		only.Set(core)
		if err := unix.SchedSetaffinity(0, &only); err != nil {
			return nil, err
		}
		defer func() { _ = unix.SchedSetaffinity(0, &before) }() // to what it was
	}
	return runServer(ctx, binary, own, path, conns)
}

// keepOff keeps this program, which is the load, off the servers' cores.
func keepOff(cores []int) error {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return err
	}
	for _, core := range cores {
		if core >= 0 {
			set.Clear(core)
		}
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, task := range tasks { // threads made later have what the thread has that makes them
		var tid int
		if _, err := fmt.Sscan(task.Name(), &tid); err != nil {
			return err
		}
		if err := unix.SchedSetaffinity(tid, &set); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("leaving cores to the servers: %w", err)
		}
	}
	return nil
}
