// Command csr measures how fast Chancery issues certificates through the Istio API, against a bare server that
// verifies the token and the certificate request, signs, and does nothing else. It owns the load, the bare server
// ("the floor") and the arithmetic, and prints rates, latencies, the ratio of the two, and idle memory of server and
// agent. It refuses to hide a failed call: each is counted, and one is enough for exit code 1.
//
// Server, floor and load share one machine, so an absolute rate says little; the ratio is what counts. Server and
// floor are processes of their own, driven in turns (A B B A ...) so that a slow spell of the machine hits both, and
// the ratio is the median over neighbouring turns. The server keeps its audit log, which is counted afterwards: fewer
// lines than certificates is an error.
//
// Tokens come back every few hundred calls, as they do from one pod's renewals, so a server may gain by remembering
// that it has verified one; with -tokens above the number of calls each is new.
//
// Output, in units of 1,000,000 bytes, microseconds of the server's own processor time for one call, and so on:
//
//	csr server=chancery rate=N/s p50=Nms p99=Nms n=N    (then the same for server=floor)
//	cpu server=chancery call=Nus
//	csr ratio=N failed=N
//	csr pairs min=N median=N max=N
//	audit lines=N
//	memory server rss=NMB private=NMB when=idle         (then when=after-load, then memory agent)
//
//	go run ./test/bench/csr                 # builds cmd/chancery, or takes CHANCERY_BIN
//	go run ./test/bench/csr -floor-only     # the floor alone
//	go run ./test/bench/csr -two-servers    # two servers on one PostgreSQL against one of them
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/test/bench/parts"
)

// turns is the number of measured slices, half of them for each server.
const turns = 12

// config is what the flags say.
type config struct {
	duration  time.Duration // all measured slices together
	callers   int           // concurrent callers
	conns     int           // kept gRPC connections that the callers share
	tokens    int           // distinct tokens, one identity each; more than the load uses means no token is seen twice
	csrs      int           // distinct certificate requests, spread over the tokens
	dir       string        // parent of the temporary directory: the audit log's fsync costs what this disk costs
	floorOnly bool
	logged    bool // the issuance log is on
	two       bool // two servers against one
	unbounded bool // these have all cores
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == floorArgument {
		fmt.Fprintln(os.Stderr, "floor:", serveFloor(os.Args[2]))
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "csr:", err)
		os.Exit(1)
	}
}

func parseFlags(args []string) (config, error) {
	var c config
	flags := flag.NewFlagSet("csr", flag.ContinueOnError)
	flags.DurationVar(&c.duration, "duration", 24*time.Second, "measured time, all slices together")
	flags.IntVar(&c.callers, "callers", 16, "concurrent callers")
	flags.IntVar(&c.conns, "conns", 4, "gRPC connections shared by the callers")
	flags.IntVar(&c.tokens, "tokens", 200, "distinct tokens and identities")
	flags.IntVar(&c.csrs, "csrs", 500, "distinct certificate requests (at least one for each token is made)")
	flags.StringVar(&c.dir, "dir", "", "where to make the temporary directory (default: the system's place)")
	flags.BoolVar(&c.floorOnly, "floor-only", false, "measure the bare server alone")
	flags.BoolVar(&c.logged, "issuance-log", false, "keep an issuance log beside the audit log; result lines then begin with csr+log")
	flags.BoolVar(&c.two, "two-servers", false, "measure two servers on one store against one; result lines then begin with servers")
	flags.BoolVar(&c.unbounded, "unbounded", false, "with -two-servers: give both servers all cores")
	if err := flags.Parse(args); err != nil {
		return config{}, err
	}
	if c.duration < turns*100*time.Millisecond || c.callers < 1 || c.conns < 1 || c.tokens < 1 {
		return config{}, errors.New("reading flags: -duration must be 1.2s or more, -callers, -conns and -tokens 1 or more")
	}
	c.csrs = max(c.csrs, c.tokens)
	return c, nil
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	c, err := parseFlags(args)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(c.dir, "chancery-bench-csr-")
	if err != nil {
		return fmt.Errorf("making temporary directory: %w", err)
	}
	defer os.RemoveAll(dir)
	requests, err := prepare(dir, c.tokens, c.csrs)
	if err != nil {
		return err
	}
	if c.two {
		return runTwo(ctx, stdout, c, dir, requests)
	}
	floor, err := startFloor(ctx, dir, c.conns)
	if err != nil {
		return err
	}
	defer floor.stop()
	load := &load{requests: requests, callers: c.callers}
	if c.floorOnly {
		if err := load.alternate(ctx, c.duration, floor, nil); err != nil {
			return errors.Join(err, load.err())
		}
		return report(stdout, c.name(), load, floor, nil)
	}

	binary, err := parts.Binary(ctx, dir)
	if err != nil {
		return err
	}
	server, err := startServer(ctx, binary, dir, c.conns, c.logged)
	if err != nil {
		return err
	}
	defer server.stop()
	idle, err := settledMemory(ctx, server.process, server.metrics)
	if err != nil {
		return err
	}
	// What builds and tests have left to be written goes to the disk first: else the server's syncs, and not the floor's calls,
	// would wait for it. The server's own writes are of the measured time.
	unix.Sync()
	if err := load.alternate(ctx, c.duration, server, floor); err != nil {
		return errors.Join(err, load.err())
	}
	return errors.Join(
		report(stdout, c.name(), load, floor, server),
		reportAudit(stdout, dir, server.succeeded),
		reportMemory(ctx, stdout, binary, dir, server, idle),
	)
}

// name is what the result lines begin with.
func (c config) name() string {
	if c.logged {
		return "csr+log"
	}
	return "csr"
}

// report prints the result lines, which begin with name; its error says that calls failed. Without a server there is no
// ratio.
func report(w io.Writer, name string, l *load, floor, server *target) error {
	failed := l.failed.Load()
	if server != nil {
		reportTarget(w, name, server)
	}
	reportTarget(w, name, floor)
	if server == nil {
		fmt.Fprintf(w, "%s failed=%d\n", name, failed)
	} else {
		reportRatio(w, name, server, floor, failed)
	}
	return l.err()
}

// reportRatio prints how much faster a is than b, as the median over neighbouring slices.
func reportRatio(w io.Writer, name string, a, b *target, failed uint64) {
	pairs := make([]float64, 0, turns/2)
	for i := range min(len(a.rates), len(b.rates)) {
		pairs = append(pairs, a.rates[i]/b.rates[i])
	}
	slices.Sort(pairs)
	median := (pairs[(len(pairs)-1)/2] + pairs[len(pairs)/2]) / 2
	// Cut, not rounded: 0.996 must not read as 1.00.
	fmt.Fprintf(w, "%s ratio=%.2f failed=%d\n", name, float64(int(median*100))/100, failed)
	fmt.Fprintf(w, "%s pairs min=%.3f median=%.3f max=%.3f\n", name, pairs[0], median, pairs[len(pairs)-1])
}

// reportAudit holds the server to its audit log: each certificate has a line at least, written before it was signed.
func reportAudit(w io.Writer, dir string, certificates int) error {
	file, err := os.Open(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		return fmt.Errorf("counting audit log: %w", err)
	}
	defer file.Close()
	lines := 0
	for buf := make([]byte, 1<<20); err == nil; {
		var n int
		n, err = file.Read(buf)
		lines += bytes.Count(buf[:n], []byte{'\n'})
	}
	if err != io.EOF {
		return fmt.Errorf("counting audit log: %w", err)
	}
	fmt.Fprintf(w, "audit lines=%d\n", lines)
	if lines < certificates {
		return fmt.Errorf("counting audit log: %d lines for %d certificates, want one each at least", lines, certificates)
	}
	return nil
}

func reportTarget(w io.Writer, name string, t *target) {
	slices.Sort(t.latencies)
	n := len(t.latencies)
	var p50, p99 time.Duration
	if n > 0 {
		p50, p99 = t.latencies[n/2], t.latencies[n*99/100]
	}
	milliseconds := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	fmt.Fprintf(w, "%s server=%s rate=%.0f/s p50=%.2fms p99=%.2fms n=%d\n", name, t.name,
		float64(n)/t.elapsed.Seconds(), milliseconds(p50), milliseconds(p99), n)
	fmt.Fprintf(w, "cpu server=%s call=%.0fus\n", t.name, float64(t.cpu.Microseconds())/float64(max(n, 1)))
}
