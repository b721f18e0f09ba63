// Package status owns `chancery status`: what a running server says of its health, and what is wrong with it.
//
// It looks at nothing but the server's answer; `chancery doctor` looks at files and the machine, too. It refuses to judge by
// itself: that is ca/checkup's.
package status

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server"
)

// ExitCodes is what the help of status and doctor says of them.
const ExitCodes = "Exit code 0: all is well. 2: the worst finding is a warning. 3: it is critical. 1: the command could not do its\n" +
	"work, such as with a wrong flag or config. docs/operations.md lists all findings."

// Command returns `chancery status`.
func Command() *cobra.Command {
	var file, format string
	cmd := &cobra.Command{
		Use: "status -c FILE", Short: "Ask a running server how it is", Args: process.NoArgs,
		Long: "Asks the server whose config is given, over its admin socket, and prints the chain with the life that is left, the\n" +
			"health of each key, what was issued and refused, logs and clusters; then what is wrong. For root and the server's\n" +
			"own user. `chancery doctor` looks at more.\n\n" + ExitCodes,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := process.CheckFormat(format, "text", "json"); err != nil {
				return err
			}
			settings, err := server.Load(file)
			if err != nil {
				return err
			}
			return run(cmd.Context(), settings.AdminSocket(), format, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "config file of the server (YAML)")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

func run(ctx context.Context, socket, format string, out io.Writer) error {
	state, err := Ask(ctx, socket)
	var r *Report
	if err == nil {
		r = NewReport(checkup.Judge(state))
		r.CA = state
	} else if f, ok := FindingOf(err, socket); ok {
		r = NewReport([]checkup.Finding{f})
	} else {
		return fmt.Errorf("status: %w", err)
	}
	if format == "json" {
		if err := process.WriteJSON(out, r); err != nil {
			return err
		}
		return r.Err("status")
	}
	if state != nil {
		Print(out, state)
	}
	r.PrintFindings(out)
	return r.Err("status")
}

// FindingOf turns an error of Ask that says something of the server into a finding.
func FindingOf(err error, socket string) (checkup.Finding, bool) {
	switch {
	case errors.Is(err, ErrDown):
		return checkup.Found("server.down", checkup.Critical, "server", "does not listen on %s", socket), true
	case errors.Is(err, ErrSilent):
		return checkup.Found("server.silent", checkup.Critical, "server", "has not answered on %s within %s", socket, askTimeout), true
	}
	return checkup.Finding{}, false
}
