// Package ceremony owns `chancery authority ceremony` and `chancery authority import-profile`: making authorities by hand
// out of one reviewed file, and taking over the signing profiles of a cfssl.
//
// It refuses to sign without --sign, and before everything was printed.
package ceremony

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/ceremony"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// Command returns `chancery authority ceremony`.
func Command() *cobra.Command {
	var file string
	var sign bool
	cmd := &cobra.Command{
		Use: "ceremony -c FILE [--sign]", Short: "Make roots, issuers, cross-certificates and CRLs from one reviewed file", Args: process.NoArgs,
		Long: "Prints in words every certificate and CRL that the file asks for, after all checks and lints. That is all, unless\n" +
			"--sign is given: then the same is printed with its serial numbers, signed, and written into the output folder, which\n" +
			"appears complete or not at all. docs/ceremony.md walks through one.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd.Context(), file, sign, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "file of the ceremony (YAML)")
	cmd.Flags().BoolVar(&sign, "sign", false, "sign, after printing what")
	return cmd
}

func run(ctx context.Context, file string, sign bool, out io.Writer) (err error) {
	data, err := process.ReadConfig(file)
	if err != nil {
		return err
	}
	var c ceremony.Config
	if err := process.DecodeConfig(data, &c); err != nil {
		return fmt.Errorf("ceremony %s: %w", file, err)
	}
	dir, err := filepath.Abs(filepath.Dir(file))
	if err != nil {
		return fmt.Errorf("finding the folder of %s: %w", file, err)
	}
	sum := sha256.Sum256(data)
	o := ceremony.Options{Dir: dir, Digest: hex.EncodeToString(sum[:]), Actor: process.UserName(uint32(os.Getuid()))}
	// Without a log first: what is refused should leave no trace, not even an empty audit log.
	plan, err := ceremony.NewPlan(c, o)
	if err != nil {
		return fmt.Errorf("ceremony %s: %w", file, err)
	}
	if !sign {
		return plan.Print(out)
	}
	if err := process.Absolute(file, &c.AuditLog); err != nil {
		return err
	}
	if o.Log, err = audit.Open(c.AuditLog); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, o.Log.Close()) }()
	if plan, err = ceremony.NewPlan(c, o); err != nil {
		return fmt.Errorf("ceremony %s: %w", file, err)
	}
	if err := plan.Print(out); err != nil {
		return err
	}
	if err := plan.Sign(ctx); err != nil {
		return fmt.Errorf("ceremony %s: %w", file, err)
	}
	_, err = fmt.Fprintf(out, "\nSigned: all of it lies in %s.\n", c.Output)
	return err
}
