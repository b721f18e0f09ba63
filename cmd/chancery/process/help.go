package process

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// Help is the RunE of a command that only has others below it, together with Args: Group: without arguments it prints the
// help, and a misspelt sub-command is an error instead of a help text and exit code 0.
func Help(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// Group is the Args of such a command.
func Group(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var known []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			known = append(known, c.Name())
		}
	}
	return fmt.Errorf("%sthere is no command %q; known are %s", prefix(cmd), args[0], strings.Join(known, ", "))
}

// NoArgs is the Args of a command that takes flags only.
func NoArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("%sit takes no argument, only flags; got %q", prefix(cmd), args[0])
}

// OneArg is the Args of a command that takes exactly one, which its Use names.
func OneArg(cmd *cobra.Command, args []string) error { return between(cmd, args, 1, 1) }

// MaybeOneArg is the Args of a command that takes one at most.
func MaybeOneArg(cmd *cobra.Command, args []string) error { return between(cmd, args, 0, 1) }

// OneOrTwoArgs is the Args of a command that takes one or two.
func OneOrTwoArgs(cmd *cobra.Command, args []string) error { return between(cmd, args, 1, 2) }

// TwoArgs is the Args of a command that takes exactly two, which its Use names.
func TwoArgs(cmd *cobra.Command, args []string) error { return between(cmd, args, 2, 2) }

func between(cmd *cobra.Command, args []string, least, most int) error {
	how := cmd.Use
	if cmd.HasParent() {
		how = cmd.Parent().CommandPath() + " " + how
	}
	switch {
	case len(args) < least:
		return fmt.Errorf("%san argument is missing; use it as %s", prefix(cmd), how)
	case len(args) > most:
		return fmt.Errorf("%s%q is an argument too many; use it as %s", prefix(cmd), args[most], how)
	}
	return nil
}

// FlagError says where the flags of a command are listed.
func FlagError(cmd *cobra.Command, err error) error {
	return fmt.Errorf("%s%w; --help lists the flags", prefix(cmd), err)
}

// prefix names a command in front of an error, as its own errors do: without the program's name, which comes first anyway.
func prefix(cmd *cobra.Command) string {
	if !cmd.HasParent() {
		return ""
	}
	return strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ") + ": "
}
