// Package trust owns `chancery trust`: what an admin asks a running server about the roots that it trusts, its own and those of foreign trust
// domains, and what he has it take over.
//
// It decides nothing, and refuses to guess of which trust domain a file is the bundle: no bundle says so itself.
package trust

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/admin"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/trust/migrate"
	base "github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// How long the server may take: an import is a write to the store; fetches are bounded, but of a hundred domains not all run at a time.
const (
	patience    = 30 * time.Second
	longerStill = 3 * time.Minute
)

// asking are the flags of each subcommand.
type asking struct {
	server admin.Flags
	format string
}

func (a *asking) addFormat(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&a.format, "output", "o", "text", "text or json")
}

// ask asks the server, and names the subcommand in what goes wrong.
func (a *asking) ask(ctx context.Context, name string, time time.Duration, do func(context.Context, chanceryv1.AdminClient) error) error {
	if a.format != "" {
		if err := process.CheckFormat(a.format, "text", "json"); err != nil {
			return err
		}
	}
	if err := a.server.Call(ctx, time, do); err != nil {
		return fmt.Errorf("trust %s: %w", name, err)
	}
	return nil
}

// list asks for one trust domain, or for all of them.
func (a *asking) list(ctx context.Context, name, domain string) (resp *chanceryv1.ListTrustResponse, err error) {
	err = a.ask(ctx, name, patience, func(ctx context.Context, c chanceryv1.AdminClient) (err error) {
		resp, err = c.ListTrust(ctx, &chanceryv1.ListTrustRequest{TrustDomain: domain})
		return err
	})
	return resp, err
}

// Command returns `chancery trust`. Dev is the admin socket of `chancery dev`, which is asked if it answers and no server is named.
func Command(dev string) *cobra.Command {
	cmd := &cobra.Command{
		Use: "trust", Short: "Show and change which roots are trusted, of foreign trust domains, too", Args: process.Group, RunE: process.Help,
		Long: "Shows of which trust domains the server has roots, where they come from and how old they are, and takes over or forgets those of\n" +
			"foreign trust domains. docs/federation.md says how two trust domains federate.",
	}
	for _, make := range []func(*asking) *cobra.Command{listCommand, showCommand, diffCommand, exportCommand, importCommand, refreshCommand, forgetCommand} {
		a := &asking{server: admin.Flags{Dev: dev}}
		sub := make(a)
		a.server.Add(sub)
		cmd.AddCommand(sub)
	}
	cmd.AddCommand(migrate.Command(dev))
	return cmd
}

func listCommand(a *asking) *cobra.Command {
	cmd := &cobra.Command{
		Use: "list -c FILE|--admin SOCKET", Short: "Show the trust domains of which there are roots", Args: process.NoArgs,
		Long: "Prints a line for each trust domain of which the server has roots, or shall have: what it is to us (own; kin, the other end of a\n" +
			"migration; former; federated), how many roots it has, the number of its bundle (the generation of an own one, spiffe_sequence of a\n" +
			"foreign one), how old that is, when it is fetched again, and what went wrong with that. Only the server that renews issuers fetches\n" +
			"bundles when they are due, and knows; `chancery replica list` says which one that is.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := a.list(cmd.Context(), "list", "")
			if err != nil {
				return err
			}
			return printList(cmd.OutOrStdout(), a.format, resp.GetDomains(), resp.GetTime().AsTime())
		},
	}
	a.addFormat(cmd)
	return cmd
}

func showCommand(a *asking) *cobra.Command {
	cmd := &cobra.Command{
		Use: "show DOMAIN -c FILE|--admin SOCKET", Short: "Show the roots of a trust domain, and where they come from", Args: process.OneArg,
		Long: "Prints of a trust domain each root, with its subject key identifier, its end and the SHA-256 of the certificate, who had the bundle\n" +
			"taken over and when, and how the relationship goes by which it is kept up to date.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkDomain("show", args[0]); err != nil {
				return err
			}
			resp, err := a.list(cmd.Context(), "show", args[0])
			if err != nil {
				return err
			}
			return printDomain(cmd.OutOrStdout(), a.format, resp.GetDomains()[0], resp.GetTime().AsTime())
		},
	}
	a.addFormat(cmd)
	return cmd
}

func diffCommand(a *asking) *cobra.Command {
	cmd := &cobra.Command{
		Use: "diff DOMAIN [FILE] -c FILE|--admin SOCKET", Short: "Compare the roots of a trust domain with a file, or with those before", Args: process.OneOrTwoArgs,
		Long: "Compares the bundle of a trust domain as the server has it (-) with a file (+): a SPIFFE bundle in JSON, or roots in PEM; - is the\n" +
			"standard input. Without a file it compares the bundle of a foreign trust domain that was there before (-) with the present one (+).\n" +
			"Exit code: 0 the roots are the same, 2 they differ, 1 it could not be told.",
		RunE: func(cmd *cobra.Command, args []string) error { return a.diff(cmd, args) },
	}
	a.addFormat(cmd)
	return cmd
}

func exportCommand(a *asking) *cobra.Command {
	var form string
	cmd := &cobra.Command{
		Use: "export [DOMAIN] [--format spiffe|pem] -c FILE|--admin SOCKET", Short: "Print the bundle of a trust domain", Args: process.MaybeOneArg,
		Long: "Prints the bundle of a trust domain, the server's own by default: as a SPIFFE bundle (JSON), which others take to federate with it, or\n" +
			"its roots in PEM, for those who can read nothing else.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkForm(form); err != nil {
				return err
			}
			domain := ""
			if len(args) > 0 {
				if domain = args[0]; checkDomain("export", domain) != nil {
					return checkDomain("export", domain)
				}
			}
			resp, err := a.list(cmd.Context(), "export", domain)
			if err != nil {
				return err
			}
			return printBundle(cmd.OutOrStdout(), form, resp.GetDomains()[0]) // our own is the first
		},
	}
	cmd.Flags().StringVar(&form, "format", "spiffe", "spiffe (JSON) or pem")
	return cmd
}

func importCommand(a *asking) *cobra.Command {
	var older bool
	cmd := &cobra.Command{
		Use: "import DOMAIN FILE [--older] -c FILE|--admin SOCKET", Short: "Take over the bundle of a foreign trust domain from a file", Args: process.TwoArgs,
		Long: "Takes over the bundle of a foreign trust domain: a SPIFFE bundle in JSON, or roots in PEM; - is the standard input. Its identities are\n" +
			"verified by these roots from then on. With a relationship in the config it is kept up to date from there; without one it stays as it is\n" +
			"until another one is imported or `chancery trust forget` drops it.\n" +
			"A bundle with a lower sequence than the last one is refused, unless --older says that it is the right one.",
		RunE: func(cmd *cobra.Command, args []string) error {
			b, err := readBundle(cmd, "import", args[0], args[1])
			if err != nil {
				return err
			}
			data, err := b.Marshal()
			if err != nil {
				return fmt.Errorf("trust import: %w", err)
			}
			var resp *chanceryv1.ImportTrustResponse
			err = a.ask(cmd.Context(), "import", patience, func(ctx context.Context, c chanceryv1.AdminClient) (err error) {
				resp, err = c.ImportTrust(ctx, &chanceryv1.ImportTrustRequest{TrustDomain: args[0], Bundle: data, Older: older})
				return err
			})
			if err != nil {
				return err
			}
			return printImported(cmd.OutOrStdout(), a.format, b, resp.GetChanged())
		},
	}
	cmd.Flags().BoolVar(&older, "older", false, "take it though its sequence is lower than that of the last one")
	a.addFormat(cmd)
	return cmd
}

func refreshCommand(a *asking) *cobra.Command {
	cmd := &cobra.Command{
		Use: "refresh [DOMAIN] -c FILE|--admin SOCKET", Short: "Fetch the bundles of foreign trust domains now", Args: process.MaybeOneArg,
		Long: "Has the server fetch the bundle of a foreign trust domain now, or those of all that its config names, and waits for it.\n" +
			"Exit code: 0 all were fetched, 1 one was not, or the server could not be asked.",
		RunE: func(cmd *cobra.Command, args []string) error {
			q := new(chanceryv1.RefreshTrustRequest)
			if len(args) > 0 {
				if err := checkDomain("refresh", args[0]); err != nil {
					return err
				}
				q.TrustDomain = args[0]
			}
			var resp *chanceryv1.RefreshTrustResponse
			err := a.ask(cmd.Context(), "refresh", longerStill, func(ctx context.Context, c chanceryv1.AdminClient) (err error) {
				resp, err = c.RefreshTrust(ctx, q)
				return err
			})
			if err != nil {
				return err
			}
			if err := printList(cmd.OutOrStdout(), a.format, resp.GetDomains(), time.Now()); err != nil {
				return err
			}
			return failed(resp.GetDomains())
		},
	}
	a.addFormat(cmd)
	return cmd
}

// failed returns an error if a domain could not be fetched.
func failed(all []*chanceryv1.TrustedDomain) error {
	n := 0
	for _, d := range all {
		if d.GetRelationship().GetError() != "" {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("trust refresh: %d of %d were not fetched; `chancery trust show DOMAIN` says why", n, len(all))
}

func forgetCommand(a *asking) *cobra.Command {
	cmd := &cobra.Command{
		Use: "forget DOMAIN -c FILE|--admin SOCKET", Short: "Drop the bundle of a foreign trust domain", Args: process.OneArg,
		Long: "Drops the bundle of a foreign trust domain: none of its identities is accepted any more. One that the config federates with is refused,\n" +
			"since it would be fetched again: take it out of the config first; then it goes by itself, or at once by this command.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkDomain("forget", args[0]); err != nil {
				return err
			}
			err := a.ask(cmd.Context(), "forget", patience, func(ctx context.Context, c chanceryv1.AdminClient) error {
				_, err := c.ImportTrust(ctx, &chanceryv1.ImportTrustRequest{TrustDomain: args[0], Forget: true})
				return err
			})
			if err != nil {
				return err
			}
			return printForgotten(cmd.OutOrStdout(), a.format, args[0])
		},
	}
	a.addFormat(cmd)
	return cmd
}

func checkDomain(name, domain string) error {
	if _, err := base.ParseDomain(domain); err != nil {
		return fmt.Errorf("trust %s: %w", name, err)
	}
	return nil
}

func checkForm(form string) error {
	if form == "spiffe" || form == "pem" {
		return nil
	}
	return fmt.Errorf("--format %q is not known; use spiffe or pem", form)
}

// parse reads what a server has of a trust domain, which may be nothing yet.
func parse(domain string, data []byte) (*spiffebundle.Bundle, error) {
	td, err := base.ParseDomain(domain)
	if err != nil || len(data) == 0 {
		return nil, err
	}
	return spiffebundle.Parse(td, data)
}
