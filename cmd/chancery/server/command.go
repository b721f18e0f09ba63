package server

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/garbage"
)

// Command returns `chancery server`.
func Command() *cobra.Command {
	var file string
	var logs process.LogFlags
	cmd := &cobra.Command{
		Use: "server -c FILE", Short: "Run the certificate authority", Args: process.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			logger, err := logs.Logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			settings, err := Load(file)
			if err != nil {
				return err
			}
			return process.Ended(cmd.Context(), serve(cmd.Context(), settings, logger))
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "config file (YAML)")
	logs.Add(cmd)
	return cmd
}

func serve(ctx context.Context, settings *Settings, logger *slog.Logger) error {
	s, err := Open(ctx, settings, logger)
	if err != nil {
		return err
	}
	defer s.Close()
	if _, _, err := s.Listen(); err != nil {
		return err
	}
	tuneRuntime()
	go garbage.Bound(ctx)
	defer process.SayStopping(ctx, logger)()
	return s.Run(ctx, nil)
}

// tuneRuntime trades for throughput, measured by test/bench/csr.
func tuneRuntime() {
	// A sync of the audit log blocks in the kernel for a fifth of a millisecond, and the runtime counts its thread as
	// running for most of that time: without one more, a server on two cores would stand half idle during each sync.
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1)
	}
}

// AuthorityCommand returns `chancery authority`.
func AuthorityCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "authority", Short: "Make and show the authorities of a server", Args: process.Group, RunE: process.Help}
	var file, format, root string
	init := &cobra.Command{
		Use: "init -c FILE", Short: "Make root and issuer, or adopt plugged-in ones", Args: process.NoArgs,
		Long: "Makes the authority document of the server whose config is given: with a new root and issuer, or, where the config\n" +
			"names a plugged-in issuer, with that. Writes the roots to roots.pem beside the state. Nothing that exists is changed.\n" +
			"With --root, the root is kept elsewhere: only its certificate is taken, and the issuer comes from the config's parent,\n" +
			"or by `authority csr` and `authority import`.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := Load(file)
			if err != nil {
				return err
			}
			var roots []*x509.Certificate
			if root != "" {
				if roots, err = readCertificates(root); err != nil {
					return fmt.Errorf("--root: %w", err)
				}
			}
			return initialize(cmd.Context(), s, roots, cmd.OutOrStdout())
		},
	}
	init.Flags().StringVar(&root, "root", "", "PEM file with the certificate of a root whose key is kept elsewhere")
	show := &cobra.Command{
		Use: "show -c FILE", Short: "Show the authorities of every trust domain", Args: process.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := process.CheckFormat(format, "text", "json", "pem"); err != nil {
				return err
			}
			s, err := Load(file)
			if err != nil {
				return err
			}
			return show(cmd.Context(), s, format, cmd.OutOrStdout())
		},
	}
	show.Flags().StringVarP(&format, "output", "o", "text", "text, json or pem (roots only)")
	for _, sub := range []*cobra.Command{init, show, csrCommand(&file), importCommand(&file)} {
		sub.Flags().StringVarP(&file, "config", "c", "", "config file of the server (YAML)")
		cmd.AddCommand(sub)
	}
	return cmd
}
