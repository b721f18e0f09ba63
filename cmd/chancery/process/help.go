package process

import "github.com/spf13/cobra"

// Help is the RunE of a command that only has others below it, together with Args: cobra.NoArgs: without arguments it
// prints the help, and a misspelt sub-command is an error instead of a help text and exit code 0.
func Help(cmd *cobra.Command, _ []string) error { return cmd.Help() }
