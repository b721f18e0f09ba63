// Package inspect owns `chancery inspect`: it says in words what PEM certificates, CSRs and CRLs hold, and what would stop
// a SPIFFE validator from accepting them.
//
// It refuses to print private keys; where the input has one it only says so.
package inspect

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

// Command returns `chancery inspect`.
func Command() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use: "inspect FILE|-", Short: "Say in words what PEM certificates, CSRs and CRLs hold", Args: process.OneArg,
		Long: "Reads PEM from a file or standard input and prints each certificate, CSR and CRL: identity, validity, keys, usages, and\n" +
			"what would stop a SPIFFE validator from accepting it. Private keys in the input are named, never printed.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := process.CheckFormat(format, "text", "json"); err != nil {
				return err
			}
			data, err := readInput(args[0], cmd.InOrStdin())
			if err != nil {
				return fmt.Errorf("inspect: %w", err)
			}
			blocks, err := decode(data)
			if err != nil {
				return fmt.Errorf("inspect: %s: %w", args[0], err)
			}
			if format == "json" {
				return process.WriteJSON(cmd.OutOrStdout(), blocks)
			}
			var text bytes.Buffer // written at once, so that what cannot be written is an error
			for _, b := range blocks {
				b.print(&text)
			}
			_, err = cmd.OutOrStdout().Write(text.Bytes())
			return err
		},
	}
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// readInput reads a file, or standard input for "-".
func readInput(name string, stdin io.Reader) ([]byte, error) {
	in := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, trust.MaxPEMBytes+1))
	if err != nil {
		return nil, err
	}
	if len(data) > trust.MaxPEMBytes {
		return nil, errors.New(name + " is larger than the 1 MiB that is read")
	}
	return data, nil
}
