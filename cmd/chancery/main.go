// Command chancery is a certificate authority and identity service for service meshes: server, node agent and the
// commands around them in one binary.
//
// This package owns flags, config files and wiring, and no decision: what is issued, to whom and when is decided in
// the packages that it puts together. It refuses configs with unknown fields.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run executes one command line and returns the exit code: 0 done, 1 failed.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	cmd := newRoot()
	cmd.SetArgs(args)
	cmd.SetIn(stdin)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	if err := cmd.ExecuteContext(ctx); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintf(stderr, "chancery: %v\n", err)
		return 1
	}
	return 0
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "chancery",
		Short: "Certificate authority and identity service for service meshes",
		Long: "Chancery issues X.509-SVIDs to workloads that prove themselves with Kubernetes service-account tokens,\n" +
			"serves them to proxies over SDS and the SPIFFE Workload API, and rotates them.\n\n" +
			"To see it work on this machine: chancery dev",
		SilenceErrors: true, SilenceUsage: true, Version: version(),
	}
	root.AddCommand(newServerCmd(), newAgentCmd(), newDevCmd(), newAuthorityCmd(), newSVIDCmd(), newInspectCmd())
	return root
}

func version() string {
	v := "devel"
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		v = info.Main.Version
	}
	return v
}

// logFlags are the flags of commands that keep running.
type logFlags struct {
	level  string
	format string
}

func (f *logFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.level, "log-level", "info", "debug, info, warn or error")
	cmd.Flags().StringVar(&f.format, "log-format", "text", "text or json")
}

func (f *logFlags) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.level)); err != nil {
		return nil, fmt.Errorf("--log-level %q: use debug, info, warn or error", f.level)
	}
	opts := &slog.HandlerOptions{Level: level}
	switch f.format {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	}
	return nil, fmt.Errorf("--log-format %q: use text or json", f.format)
}
