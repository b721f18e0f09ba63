// Package migrate owns `chancery trust migrate`: what an admin asks a running server about moving all identities to another trust domain.
//
// It decides nothing: a migration is a rotation of the root, and package cmd/chancery/rotate says how it stands.
package migrate

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/rotate"
	"github.com/chancery-project/chancery/rotate/stages"
	"github.com/chancery-project/chancery/trust"
)

// name is what goes before the names of subcommands.
const name = "trust migrate"

// Command returns `chancery trust migrate`. Dev is the admin socket of `chancery dev`, which is asked if it answers and no server is named.
func Command(dev string) *cobra.Command {
	cmd := &cobra.Command{
		Use: "migrate", Short: "Move all identities to another trust domain, with evidence that everybody follows", Args: process.Group, RunE: process.Help,
		Long: "Moves all identities to another trust domain, with a root of its own, in phases: accept (everybody trusts both domains), issue (some\n" +
			"identities have the new one), only (all have), retire (the old root leaves). Each ends by evidence, or by your word. Nothing is restarted,\n" +
			"no connection is lost, and until retire `rollback` leads back. docs/migration.md says what to look at, and what to change before and after.",
	}
	ask := func() *rotate.Asker { return rotate.NewAsker(name, dev) }
	cmd.AddCommand(planCommand(ask()), startCommand(ask()), issueCommand(ask()), rotate.OverrideCommand(ask()), rotate.StatusCommand(ask(),
		"Show the migration under way, and what it waits for",
		"Prints the phase of the migration under way, its gates, who they wait for and why, and what still presents, names or allows the old domain; or, if\n"+
			"none is under way, how the last ones ended, rotations among them.\n\n"+
			"With -w it goes on until the migration ends. Exit code then: 0 done, or none was ever started; 2 aborted or rolled back; 1 the server could\n"+
			"not be asked, or it was interrupted. If none is under way, it is that of the last one."))
	for _, c := range changes {
		cmd.AddCommand(rotate.ChangeCommand(ask(), c.name, c.short, c.long))
	}
	return cmd
}

// changes are the subcommands that change a migration and need no more than its ID.
var changes = []struct{ name, short, long string }{
	{"pause", "Let no gate of the migration pass", "Lets no gate pass until `chancery trust migrate resume`. Certificates are issued and renewed as ever, of the domain that each identity has by now."},
	{"resume", "Let the gates of a paused migration pass again", "Ends a pause: gates that have passed meanwhile count at once."},
	{"abort", "Give a migration up before the new domain is issued", "Gives a migration up in accept: the new root leaves, and all is as before. Later there is `chancery trust migrate rollback`."},
	{"rollback", "Go back to the old domain", "Goes back to the old domain: in accept as `abort`; in issue and only all identities get certificates of the old one again, and then the new\n" +
		"root leaves, by the same phases. Not in retire, when the old root is not trusted any more: migrate back, once this is done."},
}

// movers are the flags that say who is given the new domain.
type movers struct {
	share      int
	namespaces []string
}

func (m *movers) add(cmd *cobra.Command, share string) {
	cmd.Flags().IntVar(&m.share, "share", 0, share)
	cmd.Flags().StringArrayVar(&m.namespaces, "namespace", nil, "a namespace whose identities are given the new domain, whatever the share; may be repeated")
}

// fields returns them for a request; the share is nil if none was given.
func (m *movers) fields(cmd *cobra.Command) (share *uint32, namespaces []string, err error) {
	if !cmd.Flags().Changed("share") {
		return nil, m.namespaces, nil
	}
	if m.share < 0 || m.share > stages.All {
		return nil, nil, fmt.Errorf("--share %d is not between 0 and %d", m.share, stages.All)
	}
	return new(uint32(m.share)), m.namespaces, nil
}

// where are the flags that say where a migration leads to.
type where struct {
	to string
	movers
}

func (w *where) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&w.to, "to", "", "the new trust domain")
	w.movers.add(cmd, "how many of a hundred identities are given the new domain at first, by a hash of their paths (default: all; with --namespace: those alone)")
}

func (w *where) request(cmd *cobra.Command, sub string) (*chanceryv1.StartRotationRequest, error) {
	to, err := trust.ParseDomain(w.to)
	switch {
	case w.to == "":
		err = errors.New("where to? Use --to NEW-TRUST-DOMAIN")
	case err != nil:
		err = fmt.Errorf("--to: %w", err)
	}
	q := &chanceryv1.StartRotationRequest{Kind: "root", ToDomain: to.String()}
	if err == nil {
		q.Share, q.Namespaces, err = w.fields(cmd)
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", name, sub, err)
	}
	return q, nil
}

func planCommand(c *rotate.Asker) *cobra.Command {
	var w where
	cmd := &cobra.Command{
		Use: "plan --to DOMAIN [--share N] [--namespace NS]... -c FILE|--admin SOCKET", Short: "Say what a migration would do, and what to change before", Args: process.NoArgs,
		Long: "Prints the phases of a migration, what each waits for, how long it may take, and what to look after beside it. It changes nothing.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := w.request(cmd, "plan")
			if err != nil {
				return err
			}
			return c.Plan(cmd, q)
		},
	}
	w.add(cmd)
	c.Add(cmd, "text or json")
	return cmd
}

func startCommand(c *rotate.Asker) *cobra.Command {
	var w where
	cmd := &cobra.Command{
		Use: "start --to DOMAIN [--share N] [--namespace NS]... -c FILE|--admin SOCKET", Short: "Start a migration", Args: process.NoArgs,
		Long: "Starts a migration and returns at once; `chancery trust migrate status -w` watches it. Look at `chancery trust migrate plan` first. By default all\n" +
			"identities move as soon as everybody trusts both domains, and then the old one is retired. With --share or --namespace some move, and the\n" +
			"others once `chancery trust migrate issue` says so.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := w.request(cmd, "start")
			if err != nil {
				return err
			}
			return c.Start(cmd, q)
		},
	}
	w.add(cmd)
	c.Add(cmd, "text or json")
	return cmd
}

func issueCommand(c *rotate.Asker) *cobra.Command {
	var m movers
	var id string
	cmd := &cobra.Command{
		Use: "issue --share N|--namespace NS... -c FILE|--admin SOCKET", Short: "Give the new domain to more identities", Args: process.NoArgs,
		Long: "Gives the new domain to more identities: each gets it as it renews. Share and namespaces only grow; `chancery trust migrate rollback` leads\n" +
			"back. With --share 100 all have it, and phase issue ends.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			share, namespaces, err := m.fields(cmd)
			if err == nil && share == nil && len(namespaces) == 0 {
				err = errors.New("to whom? Use --share N, or --namespace NS")
			}
			if err != nil {
				return fmt.Errorf("%s issue: %w", name, err)
			}
			return c.Change(cmd, &chanceryv1.ChangeRotationRequest{Change: "issue", Share: share, Namespaces: namespaces, Rotation: id})
		},
	}
	m.add(cmd, "how many of a hundred identities have the new domain from now on, by a hash of their paths; 100: all")
	cmd.Flags().StringVar(&id, "rotation", "", "ID of the migration that is meant; another one is not touched (default: the one under way)")
	c.Add(cmd, "text or json")
	return cmd
}
