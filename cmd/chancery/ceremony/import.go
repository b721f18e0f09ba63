package ceremony

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/cfssl"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// ImportCommand returns `chancery authority import-profile`.
func ImportCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: "import-profile FILE", Short: "Turn signing profiles of cfssl into profiles for a server's config", Args: process.OneArg,
		Long: "Reads the signing profiles in a config file of cfssl and prints each as a profile for the config of a server. A setting\n" +
			"that would mean something else here is refused by name, with the reason; then nothing is printed.",
		RunE: func(cmd *cobra.Command, args []string) error {
			data, err := process.ReadConfig(args[0])
			if err != nil {
				return err
			}
			profiles, err := cfssl.Import(data, name)
			if err != nil {
				return fmt.Errorf("importing %s:\n%w", args[0], err)
			}
			return printProfiles(cmd.OutOrStdout(), args[0], profiles)
		},
	}
	cmd.Flags().StringVar(&name, "profile", "", "only this one; \"default\" is signing.default (default: all of signing.profiles)")
	return cmd
}

// printProfiles prints YAML documents, each of which holds what goes into a server's config.
func printProfiles(out io.Writer, file string, profiles []cfssl.Profile) error {
	for i, p := range profiles {
		if i > 0 {
			fmt.Fprintln(out, "---")
		}
		fmt.Fprintf(out, "# profile %s of %s\n", process.Printable(p.Name), process.Printable(file))
		for _, note := range p.Notes {
			fmt.Fprintf(out, "# %s\n", process.Printable(strings.ReplaceAll(note, "\n", " ")))
		}
		text, err := yaml.Marshal(map[string]ca.ProfileConfig{"profile": p.Config})
		if err != nil {
			return fmt.Errorf("printing profile %s: %w", p.Name, err)
		}
		if _, err := out.Write(text); err != nil {
			return err
		}
	}
	return nil
}
