// Package doctor owns `chancery doctor`: everything about a server, or an agent, that can be looked at from its machine, with a
// severity, what it means and what to do.
//
// It asks a server that runs and reads the files of one that does not. It refuses to change anything: it writes to no file of
// theirs, takes no lock that a process that starts could miss, and tries no PIN. What it cannot look at is a finding, never
// silence.
package doctor

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/cmd/chancery/agent"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server"
	"github.com/chancery-project/chancery/cmd/chancery/status"
)

// Command returns `chancery doctor`.
func Command() *cobra.Command {
	var file, format string
	var offline bool
	cmd := &cobra.Command{
		Use: "doctor -c FILE", Short: "Look for what is wrong with a server or an agent", Args: process.NoArgs,
		Long: "Looks at all that belongs to the server, or agent, whose config is given: what it says itself if it runs, chain, keys,\n" +
			"logs, file modes, disks, clock. Each finding says what it means and what to do. Nothing is changed. Run it on the same\n" +
			"machine, as the same user or root; what it may not look at is a finding, too.\n\n" + status.ExitCodes,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := process.CheckFormat(format, "text", "json"); err != nil {
				return err
			}
			r, err := examine(cmd.Context(), file, offline)
			if err != nil {
				return err
			}
			return show(cmd.OutOrStdout(), format, r)
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "config file of a server or an agent (YAML)")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	cmd.Flags().BoolVar(&offline, "offline", false, "the server or agent is meant to be down: look at files only")
	return cmd
}

// examine looks at whatever the config is of.
func examine(ctx context.Context, file string, offline bool) (*status.Report, error) {
	data, err := process.ReadConfig(file)
	if err != nil {
		return nil, err
	}
	if isAgents(data) {
		s, err := agent.Load(file)
		if err != nil {
			return nil, err
		}
		return examineAgent(ctx, s, offline), nil
	}
	s, err := server.Load(file)
	if err != nil {
		return nil, err
	}
	if err := process.Absolute(".", &file); err != nil {
		return nil, err
	}
	return examineServer(ctx, s, file, offline), nil
}

// isAgents reports whether a config is an agent's: it has fields that only an agent's has. One that does not parse is left to
// the server's reader, whose errors say what is wrong.
func isAgents(data []byte) bool {
	var fields map[string]any
	if yaml.Unmarshal(data, &fields) != nil {
		return false
	}
	for _, name := range []string{"tokenFile", "serverRoots", "identity"} {
		if _, ok := fields[name]; ok {
			return true
		}
	}
	return false
}

func show(out io.Writer, format string, r *status.Report) error {
	if format == "json" {
		if err := process.WriteJSON(out, r); err != nil {
			return err
		}
		return r.Err("doctor")
	}
	if r.CA != nil {
		status.Print(out, r.CA)
	}
	r.PrintFindings(out)
	fmt.Fprintf(out, "checked: %s\n", strings.Join(r.Checked, ", "))
	if len(r.Findings) == 0 {
		fmt.Fprintln(out, "all is well")
	}
	return r.Err("doctor")
}
