// Package naming owns `chancery naming`: what an admin asks a running server about who may serve which service.
//
// It refuses to let an unknown service pass for one that nobody may serve.
package naming

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/admin"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust/naming"
)

// patience is how long the server may take.
const patience = 30 * time.Second

// Command returns `chancery naming`.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use: "naming", Short: "Show which identities may serve which service", Args: process.Group, RunE: process.Help,
		Long: "Shows secure naming: the identities that may serve a service, as agents are told for the SDS name service:NAMESPACE/NAME.\n" +
			"docs/naming.md says what names them.",
	}
	cmd.AddCommand(showCommand(), listCommand())
	return cmd
}

// common are the flags of each subcommand.
type common struct {
	server admin.Flags
	format string
}

func (c *common) add(cmd *cobra.Command) {
	c.server.Add(cmd)
	cmd.Flags().StringVarP(&c.format, "output", "o", "text", "text or json")
}

// ask asks the server, and names the subcommand in what goes wrong.
func (c *common) ask(ctx context.Context, name, service string) (resp *chanceryv1.ShowNamingResponse, err error) {
	if err := process.CheckFormat(c.format, "text", "json"); err != nil {
		return nil, err
	}
	err = c.server.Call(ctx, patience, func(ctx context.Context, a chanceryv1.AdminClient) (err error) {
		resp, err = a.ShowNaming(ctx, &chanceryv1.ShowNamingRequest{Service: service})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("naming %s: %w", name, err)
	}
	return resp, nil
}

func showCommand() *cobra.Command {
	c := new(common)
	why := false
	cmd := &cobra.Command{
		Use: "show NAMESPACE/NAME [--why] -c FILE|--admin SOCKET", Short: "Show who may serve a service", Args: process.OneArg,
		Long: "Prints the identities that may serve a service, one a line. With --why each is followed by the objects that name it, and what is wrong with\n" +
			"objects that speak of the service. A service that nothing says anything of is an error; one that nobody may serve is not.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := naming.CheckService(args[0]); err != nil {
				return fmt.Errorf("naming show: %w", err)
			}
			resp, err := c.ask(cmd.Context(), "show", args[0])
			if err != nil {
				return err
			}
			if len(resp.GetServices()) != 1 {
				return errors.New("naming show: the server's answer is about no service, or several; it may be of another version than this command")
			}
			return show(cmd.OutOrStdout(), c.format, why, resp, time.Now())
		},
	}
	cmd.Flags().BoolVar(&why, "why", false, "say which objects name each identity")
	c.add(cmd)
	return cmd
}

func listCommand() *cobra.Command {
	c := new(common)
	cmd := &cobra.Command{
		Use: "list -c FILE|--admin SOCKET", Short: "List the services and who may serve them", Args: process.NoArgs,
		Long: "Prints each service that is known, with the identities that may serve it, by name; the first thousand.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := c.ask(cmd.Context(), "list", "")
			if err != nil {
				return err
			}
			return list(cmd.OutOrStdout(), c.format, resp)
		},
	}
	c.add(cmd)
	return cmd
}

// The shape of -o json. It is stable: fields are added, never changed. docs/naming.md has them all.

type serviceJSON struct {
	Service    string         `json:"service"`
	Known      bool           `json:"known"`
	Identities []identityJSON `json:"identities"`
	Problems   []string       `json:"problems,omitempty"`
	Trouble    []string       `json:"trouble,omitempty"`
}

type identityJSON struct {
	ID      string     `json:"id"`
	Because []string   `json:"because,omitempty"`
	More    uint64     `json:"moreReasons,omitempty"`
	Until   *time.Time `json:"until,omitempty"`
}

type listJSON struct {
	Services []serviceJSON `json:"services"`
	Omitted  uint64        `json:"omitted,omitempty"`
	Trouble  []string      `json:"trouble,omitempty"`
}

func shape(s *chanceryv1.NamedService, why bool) serviceJSON {
	out := serviceJSON{Service: s.GetService(), Known: !s.GetUnknown(), Identities: []identityJSON{}}
	for _, id := range s.GetIdentities() {
		one := identityJSON{ID: id.GetSpiffeId()}
		if why {
			one.Because, one.More = id.GetBecause(), id.GetMore()
		}
		if id.GetUntil() != nil {
			until := id.GetUntil().AsTime()
			one.Until = &until
		}
		out.Identities = append(out.Identities, one)
	}
	if why {
		out.Problems = s.GetProblems()
	}
	return out
}

func show(out io.Writer, format string, why bool, resp *chanceryv1.ShowNamingResponse, now time.Time) error {
	s := shape(resp.GetServices()[0], why)
	s.Trouble = resp.GetTrouble()
	if format == "json" {
		if err := process.WriteJSON(out, s); err != nil {
			return err
		}
	} else {
		text(out, &s, now)
	}
	if !s.Known {
		return fmt.Errorf("naming show: nothing says that there is a service %s; `chancery naming list` has those that are known", s.Service)
	}
	return nil
}

func text(out io.Writer, s *serviceJSON, now time.Time) {
	line := func(format string, args ...any) { fmt.Fprintln(out, process.Printable(fmt.Sprintf(format, args...))) }
	if s.Known && len(s.Identities) == 0 {
		line("nobody may serve %s", s.Service)
	}
	for _, id := range s.Identities {
		left := ""
		if id.Until != nil {
			left = fmt.Sprintf("  (leaves in %s: nothing names it any more)", max(0, id.Until.Sub(now)).Round(time.Second))
		}
		line("%s%s", id.ID, left)
		for _, b := range id.Because {
			line("  %s", b)
		}
		if id.More > 0 {
			line("  and %d more", id.More)
		}
	}
	for _, p := range s.Problems {
		line("problem: %s", p)
	}
	for _, t := range s.Trouble {
		line("trouble: %s", t)
	}
}

func list(out io.Writer, format string, resp *chanceryv1.ShowNamingResponse) error {
	all := listJSON{Services: []serviceJSON{}, Omitted: resp.GetOmitted(), Trouble: resp.GetTrouble()}
	for _, s := range resp.GetServices() {
		all.Services = append(all.Services, shape(s, false))
	}
	if format == "json" {
		return process.WriteJSON(out, all)
	}
	line := func(format string, args ...any) { fmt.Fprintln(out, process.Printable(fmt.Sprintf(format, args...))) }
	for _, s := range all.Services {
		if len(s.Identities) == 0 {
			line("%s: nobody", s.Service)
			continue
		}
		line("%s:", s.Service)
		for _, id := range s.Identities {
			line("  %s", id.ID)
		}
	}
	if all.Omitted > 0 {
		line("and %d more services", all.Omitted)
	}
	for _, t := range all.Trouble {
		line("trouble: %s", t)
	}
	return nil
}
