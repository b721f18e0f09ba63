// Command log measures `chancery log verify` on a log of a million entries: seconds, and the memory it takes at most. It
// makes the log first, with made-up certificates, through package ca/issuelog as a server does.
//
// It refuses to measure a verification that finds something.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/issuelogtest"
	"github.com/chancery-project/chancery/test/bench/parts"
)

// Targets of DESIGN.md.
const (
	targetTime   = time.Minute
	targetMemory = 200 // MB
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "log:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	flags := flag.NewFlagSet("log", flag.ContinueOnError)
	entries := flags.Int("entries", 1_000_000, "size of the log")
	parent := flags.String("dir", "", "where to make the temporary directory, of a kilobyte an entry (default: the system's place)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(*parent, "chancery-bench-log-")
	if err != nil {
		return fmt.Errorf("making temporary directory: %w", err)
	}
	defer os.RemoveAll(dir)
	binary, err := parts.Binary(ctx, dir)
	if err != nil {
		return err
	}
	log := filepath.Join(dir, "log")
	begun := time.Now()
	if err := build(ctx, log, *entries/2); err != nil {
		return err
	}
	took := time.Since(begun)
	fmt.Fprintf(stdout, "log made entries=%d seconds=%.1f rate=%.0f/s\n", *entries/2*2, took.Seconds(), float64(*entries)/took.Seconds())

	verify := exec.CommandContext(ctx, binary, "log", "verify", log)
	verify.Stdout, verify.Stderr = os.Stderr, os.Stderr
	begun = time.Now()
	if err := verify.Run(); err != nil {
		return fmt.Errorf("verifying: %w", err)
	}
	took = time.Since(begun)
	usage, ok := verify.ProcessState.SysUsage().(*syscall.Rusage)
	if !ok {
		return errors.New("no resource usage of the child on this system")
	}
	memory := usage.Maxrss >> 10
	fmt.Fprintf(stdout, "log verify entries=%d seconds=%.1f cpu=%.1f memory=%dMB\n", *entries/2*2, took.Seconds(),
		(verify.ProcessState.UserTime() + verify.ProcessState.SystemTime()).Seconds(), memory)
	if *entries <= 1_000_000 && (took > targetTime || memory > targetMemory) {
		return fmt.Errorf("above the targets %s and %d MB", targetTime, targetMemory)
	}
	return nil
}

// build makes a log of pairs of intent and certificate.
func build(ctx context.Context, dir string, pairs int) error {
	if _, err := issuelog.Create(dir, "bench.example/log/16909060"); err != nil {
		return err
	}
	l, err := issuelog.Open(issuelog.Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	const step = 500
	for i := 0; i < pairs && ctx.Err() == nil; i += step {
		err := l.Write(issuelogtest.Pairs(i, min(step, pairs-i)))
		if err == nil && i%(10*step) == 0 {
			err = l.Sequence()
		}
		if err != nil {
			return errors.Join(err, l.Close())
		}
	}
	return errors.Join(l.Close(), ctx.Err())
}
