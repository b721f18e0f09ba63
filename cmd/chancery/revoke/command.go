// Package revoke owns `chancery revoke` and `chancery restore`: what an admin asks a running server to revoke, and how the
// answer is said.
//
// It refuses to make the answer look better than it is: what could not be looked up, agents that are behind and consumers
// that do not look at CRLs are named each time.
package revoke

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/admin"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/revoking"
	"github.com/chancery-project/chancery/trust"
)

// patience is how long the server may take, besides its wait for agents: it may have to read all of a log.
const patience = 2 * time.Minute

// Command returns `chancery revoke`.
func Command() *cobra.Command {
	var server admin.Flags
	var ask asked
	var format string
	cmd := &cobra.Command{
		Use:   "revoke SERIAL|SPIFFE-ID|--issued-before T|--node N [--dry-run] -c FILE|--admin SOCKET",
		Short: "Revoke certificates and identities",
		Long: "Revokes a certificate by its serial (hex), all of an identity, all that was issued before a time, or all that was issued to\n" +
			"the pods of a node; the last two can be combined. With --dry-run nothing changes: it prints what would be revoked.\n\n" +
			"What is revoked goes onto the CRLs, which agents get at once, and renews nothing. A SPIFFE ID gets no certificate at all until\n" +
			"`chancery restore`; in the other cases whoever has a good token gets a new one. Connections that stand go on until\n" +
			"their next handshake. docs/revocation.md says who enforces what.\n\n" +
			"Exit code 2: INCOMPLETE. Logs of other replicas could not be read, or the CRLs are not out yet; it is tried again.",
		Args: process.MaybeOneArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := process.CheckFormat(format, "text", "json"); err != nil {
				return err
			}
			req, err := ask.request(args, time.Now())
			if err != nil {
				return fmt.Errorf("revoke: %w", err)
			}
			var resp *chanceryv1.RevokeResponse
			err = server.Call(cmd.Context(), patience, func(ctx context.Context, c chanceryv1.AdminClient) (err error) {
				resp, err = c.Revoke(ctx, req)
				return err
			})
			if err != nil {
				return fmt.Errorf("revoke: %w", err)
			}
			return printRevoked(cmd.OutOrStdout(), format, req, resp)
		},
	}
	server.Add(cmd)
	cmd.Flags().BoolVar(&ask.dryRun, "dry-run", false, "only print what would be revoked")
	cmd.Flags().StringVar(&ask.before, "issued-before", "", "all that was issued before: RFC 3339, or a duration back from now, such as 2h")
	cmd.Flags().StringVar(&ask.node, "node", "", "all that was issued to pods of a node: CLUSTER/NODE, or NODE where there is one cluster")
	cmd.Flags().StringVar(&ask.reason, "reason", "", strings.Join(revoking.Reasons(), ", ")+" (default: not said)")
	cmd.Flags().DurationVar(&ask.wait, "wait", 5*time.Second, "how long to wait for agents to have it, at most 30s")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	cmd.AddCommand(listCommand())
	return cmd
}

// asked is what the flags say.
type asked struct {
	before, node, reason string
	wait                 time.Duration
	dryRun               bool
}

// request checks what was asked for.
func (a *asked) request(args []string, now time.Time) (*chanceryv1.RevokeRequest, error) {
	p := new(chanceryv1.Predicate)
	switch {
	case len(args) > 0 && (a.before != "" || a.node != ""):
		return nil, errors.New("a serial or SPIFFE ID cannot be combined with --issued-before or --node; it is revoked whatever these say")
	case len(args) == 0 && a.before == "" && a.node == "":
		return nil, errors.New("what? Give a serial (hex), a SPIFFE ID, --issued-before or --node")
	case len(args) > 0 && strings.HasPrefix(args[0], "spiffe:"):
		id, err := trust.ParseID(args[0])
		if err != nil {
			return nil, err
		}
		p.SpiffeId = id.String()
	case len(args) > 0:
		serial, err := process.CleanSerial(args[0])
		if err != nil {
			return nil, fmt.Errorf("%w, or a SPIFFE ID such as spiffe://cluster.local/ns/NS/sa/SA", err)
		}
		p.Serial = serial
	}
	if a.before != "" {
		t, err := process.TimeOrAgo("--issued-before", a.before, now)
		if err != nil {
			return nil, err
		}
		p.IssuedBefore = timestamppb.New(t)
	}
	p.Node = a.node
	if a.wait < 0 {
		return nil, fmt.Errorf("--wait %s is negative; give a duration from 0s to 30s", a.wait)
	}
	return &chanceryv1.RevokeRequest{Predicate: p, Reason: a.reason, DryRun: a.dryRun, Wait: durationpb.New(a.wait)}, nil
}

func listCommand() *cobra.Command {
	var server admin.Flags
	var format string
	cmd := &cobra.Command{
		Use: "list -c FILE|--admin SOCKET", Short: "Show what is revoked, and who has it", Args: process.NoArgs,
		Long: "Prints the revocations that stand, how many agents have the last CRLs, and who does not enforce them.\n" +
			"Exit code 2: INCOMPLETE. Logs of other replicas cannot be read, or the CRLs are not out yet; it is tried again.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := process.CheckFormat(format, "text", "json"); err != nil {
				return err
			}
			var resp *chanceryv1.ListRevocationsResponse
			err := server.Call(cmd.Context(), patience, func(ctx context.Context, c chanceryv1.AdminClient) (err error) {
				resp, err = c.ListRevocations(ctx, new(chanceryv1.ListRevocationsRequest))
				return err
			})
			if err != nil {
				return fmt.Errorf("revoke list: %w", err)
			}
			return printList(cmd.OutOrStdout(), format, resp)
		},
	}
	server.Add(cmd)
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// RestoreCommand returns `chancery restore`.
func RestoreCommand() *cobra.Command {
	var server admin.Flags
	cmd := &cobra.Command{
		Use: "restore SPIFFE-ID -c FILE|--admin SOCKET", Short: "Let a revoked identity have certificates again", Args: process.OneArg,
		Long: "Ends the revocation of an identity: it may have new certificates. Those that were revoked stay revoked.",
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := trust.ParseID(args[0])
			if err != nil {
				return fmt.Errorf("restore: %w", err)
			}
			err = server.Call(cmd.Context(), patience, func(ctx context.Context, c chanceryv1.AdminClient) error {
				_, err := c.Restore(ctx, &chanceryv1.RestoreRequest{SpiffeId: id.String()})
				return err
			})
			if err != nil {
				return fmt.Errorf("restore: %w", err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s may have certificates again. Those that were revoked stay revoked.\n", id)
			return nil
		},
	}
	server.Add(cmd)
	return cmd
}
