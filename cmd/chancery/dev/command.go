package dev

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// flags are the flags of `chancery dev`.
type flags struct {
	dir, listen, metrics string
	ttl                  time.Duration
	verbose              bool
}

// Command returns `chancery dev`.
func Command() *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use: "dev", Short: "Run everything in one process, to see it work", Args: process.NoArgs,
		Long: "Runs a server, an agent and a token issuer in one process, with all state in one folder. Whoever connects to the\n" +
			"agent's socket is identified by Unix user, as spiffe://cluster.local/ns/dev/sa/USER. For trying things out, not for\n" +
			"production: the token issuer vouches for whatever this process asks.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			level := slog.LevelWarn
			if f.verbose {
				level = slog.LevelInfo
			}
			d := &dev{
				flags: f, out: cmd.OutOrStdout(), pickListen: !cmd.Flags().Changed("listen"), pickMetrics: !cmd.Flags().Changed("metrics"),
				logger: slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level})),
			}
			if err := process.Ended(cmd.Context(), d.run(cmd.Context())); err != nil {
				return fmt.Errorf("dev: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&f.dir, "dir", defaultDir(), "folder for all state")
	cmd.Flags().DurationVar(&f.ttl, "svid-ttl", time.Hour, "lifetime of SVIDs; 20s or 1m show rotation happen")
	cmd.Flags().StringVar(&f.listen, "listen", "127.0.0.1:8443", "gRPC address; without the flag another port is taken if this one is in use")
	cmd.Flags().StringVar(&f.metrics, "metrics", "127.0.0.1:9443", "HTTP address of the server's /metrics, likewise")
	cmd.Flags().BoolVarP(&f.verbose, "verbose", "v", false, "print the logs of server and agent")
	return cmd
}

// defaultDir is where `chancery dev` keeps its state if no folder is named.
func defaultDir() string {
	if state := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(state) {
		return filepath.Join(state, "chancery-dev")
	}
	if home, err := os.UserHomeDir(); err == nil {
		return filepath.Join(home, ".local", "state", "chancery-dev")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("chancery-dev-%d", os.Getuid()))
}

// DefaultSocket is where the agent of a `chancery dev` without --dir serves.
func DefaultSocket() string { return filepath.Join(defaultDir(), socketName) }

// DefaultAdmin is the admin socket of the server of a `chancery dev` without --dir.
func DefaultAdmin() string { return filepath.Join(defaultDir(), "admin.sock") }
