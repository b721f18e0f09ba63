// Command push measures how long it takes until all agents of one server have what it pushes, and what each costs it in memory,
// against a bare gRPC server that pushes the same bytes to as many streams. It owns the agents, which are streams of gRPC over TLS with
// a connection each, and the bare server ("the floor"). It refuses to leave out an agent that did not answer: one is enough for
// exit code 1.
//
// Server and agents share one machine, so absolute times say little; the ratio is what counts. Each agent says with each answer what a
// node agent says: the generation that its consumers have, and the issuer that they hold certificates of. What is pushed is a CRL with
// one more entry, along with the roots. "acknowledged" is when the last answer has come in, as the server counts it.
//
//	push server=chancery agents=N connected=Ns received=Nms acknowledged=Nms memory=NkB     (then the same for server=floor)
//	push ratio time=N memory=N
//
//	go run ./test/bench/push              # builds cmd/chancery, or takes CHANCERY_BIN
//	go run ./test/bench/push -agents 500  # where the limits of the machine are lower
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/test/bench/parts"
)

// pushes are measured for each server; the median counts.
const pushes = 5

func main() {
	if len(os.Args) == 3 && os.Args[1] == floorArgument {
		fmt.Fprintln(os.Stderr, "floor:", serveFloor(os.Args[2]))
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "push:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	flags := flag.NewFlagSet("push", flag.ContinueOnError)
	agents := flags.Int("agents", 10_000, "agents, each with a connection of its own")
	if err := flags.Parse(args); err != nil {
		return err
	}
	n, err := fits(*agents)
	if err != nil {
		return err
	}
	if n < *agents {
		fmt.Fprintf(stdout, "push limited agents=%d: a process may have no more open files here\n", n)
	}
	dir, err := os.MkdirTemp("", "chancery-bench-push-")
	if err != nil {
		return fmt.Errorf("making temporary directory: %w", err)
	}
	defer os.RemoveAll(dir)
	binary, err := parts.Binary(ctx, dir)
	if err != nil {
		return err
	}
	tokens, err := prepare(dir, n)
	if err != nil {
		return err
	}
	var results []result
	for _, start := range []func(context.Context, string, string) (*target, error){startServer, startFloor} {
		r, err := measure(ctx, dir, binary, tokens, start)
		if err != nil {
			return err
		}
		fmt.Fprintf(stdout, "push server=%s agents=%d connected=%.1fs received=%dms acknowledged=%dms memory=%.1fkB bytes=%d\n",
			r.name, n, r.connected.Seconds(), r.received.Milliseconds(), r.acknowledged.Milliseconds(), r.memory/1000, r.bytes)
		results = append(results, r)
	}
	// Rounded up: 1.004 must not read as 1.00.
	up := func(x float64) float64 { return float64(int(x*100+0.999)) / 100 }
	fmt.Fprintf(stdout, "push ratio time=%.2f memory=%.2f\n", up(results[0].acknowledged.Seconds()/results[1].acknowledged.Seconds()), up(results[0].memory/results[1].memory))
	return nil
}

// fits returns how many agents this process and the server can have, by the open files that each may have.
func fits(agents int) (int, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("reading the limit of open files: %w", err)
	}
	limit.Cur = limit.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("raising the limit of open files: %w", err)
	}
	const others = 200
	if limit.Max < 2*others {
		return 0, errors.New("this process may have too few open files")
	}
	return min(agents, int(min(limit.Max, 1<<30))-others), nil
}

// result is what one server gave.
type result struct {
	name                              string
	connected, received, acknowledged time.Duration
	memory                            float64 // bytes for each agent
	bytes                             int     // of an update
}

// measure connects all agents to a server and has it push to them a few times.
func measure(ctx context.Context, dir, binary string, tokens []string, start func(context.Context, string, string) (*target, error)) (r result, err error) {
	t, err := start(ctx, dir, binary)
	if err != nil {
		return r, err
	}
	defer t.stop()
	r.name = t.name
	idle, err := t.settled(ctx)
	if err != nil {
		return r, err
	}
	fleet, err := connect(ctx, t, tokens)
	if fleet != nil {
		defer fleet.close()
	}
	if err != nil {
		return r, err
	}
	r.connected = fleet.took
	if err := t.all(ctx, fleet.version()); err != nil {
		return r, err
	}
	var received, acknowledged []time.Duration
	for i := range pushes {
		begun, before := time.Now(), fleet.version()
		if err := t.push(ctx, i); err != nil {
			return r, err
		}
		last, err := fleet.wait(ctx, before)
		if err != nil {
			return r, fmt.Errorf("push %d of %s: %w", i, t.name, err)
		}
		if err := t.all(ctx, fleet.version()); err != nil {
			return r, err
		}
		received, acknowledged = append(received, last.Sub(begun)), append(acknowledged, time.Since(begun))
	}
	slices.Sort(received)
	slices.Sort(acknowledged)
	r.received, r.acknowledged, r.bytes = received[pushes/2], acknowledged[pushes/2], fleet.bytes()
	busy, err := t.settled(ctx)
	if err != nil {
		return r, err
	}
	r.memory = (busy - idle) / float64(len(tokens))
	return r, fleet.err()
}
