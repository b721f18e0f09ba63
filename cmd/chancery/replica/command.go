// Package replica owns `chancery replica`: the servers that share a store, and telling that one of them is gone for good.
//
// It refuses to guess which one is meant: the name is given whole, and is the confirmation.
package replica

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server"
	"github.com/chancery-project/chancery/cmd/chancery/server/replicas"
	"github.com/chancery-project/chancery/cmd/chancery/status"
)

// Command returns `chancery replica`.
func Command() *cobra.Command {
	cmd := &cobra.Command{Use: "replica", Short: "Show the servers that share a store, and forget one that is gone", Args: process.Group, RunE: process.Help}
	var file, format string
	lists := &cobra.Command{
		Use: "list -c FILE", Short: "Show the servers that share the store", Args: process.NoArgs,
		Long: "Prints each server that the authority document lists: its log, when it was last heard of, the version of the document that\n" +
			"it works by, whether it renews issuers, whether it was declared dead. It asks the server that runs here; while none runs it\n" +
			"reads the store.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := process.CheckFormat(format, "text", "json"); err != nil {
				return err
			}
			s, err := server.Load(file)
			if err != nil {
				return err
			}
			resp, err := list(cmd.Context(), s)
			if err != nil {
				return fmt.Errorf("replica list: %w", err)
			}
			return print(cmd.OutOrStdout(), format, resp, time.Now())
		},
	}
	lists.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	forgets := &cobra.Command{
		Use: "forget -c FILE NAME", Short: "Declare a server dead that will not come back", Args: process.OneArg,
		Long: "Declares a server dead: the next issuer does not wait for it any more, and it leaves the authority document once all that it\n" +
			"issued has ended. Its certificates stay valid; what it issued can be found, to be revoked, in its issuance log only.\n" +
			"One that comes back with its log is there again. One that lost its log or its state.mark is registered anew at its next start.\n" +
			"It asks the server that runs here; while none runs it changes the store.",
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := server.Load(file)
			if err != nil {
				return err
			}
			return forget(cmd.Context(), s, args[0], cmd.OutOrStdout())
		},
	}
	for _, sub := range []*cobra.Command{lists, forgets} {
		sub.Flags().StringVarP(&file, "config", "c", "", "config file of a server on the store (YAML)")
		cmd.AddCommand(sub)
	}
	return cmd
}

// quietFor is for how long a server that is gone has not been heard of.
const quietFor = 90 * time.Second

// list asks the server that runs here, or, while none does, reads the store (decision D14).
func list(ctx context.Context, s *server.Settings) (resp *chanceryv1.ListReplicasResponse, err error) {
	err = s.EitherWay(ctx, func() error {
		return s.Direct(ctx, func(st *server.Stored, log *audit.Log) error {
			if err := log.Append(audit.Record{Event: audit.Admin, Actor: actor(), Detail: "replica list"}); err != nil {
				return err
			}
			b := board.Open(board.Config{Store: st.Store, Sealer: st.Sealer, Domain: s.Domain(), Replica: "nobody", Logger: slog.New(slog.DiscardHandler)})
			if err := b.Read(ctx); err != nil {
				return err
			}
			resp = &chanceryv1.ListReplicasResponse{Version: st.Document.Version, Replicas: replicas.List(st.Document, "", b.Others(), b.Trouble())}
			return nil
		})
	}, func(ctx context.Context, c chanceryv1.AdminClient) (err error) {
		resp, err = c.ListReplicas(ctx, new(chanceryv1.ListReplicasRequest))
		return err
	})
	return resp, err
}

func forget(ctx context.Context, s *server.Settings, name string, out io.Writer) error {
	err := s.EitherWay(ctx, func() error {
		return s.Direct(ctx, func(st *server.Stored, log *audit.Log) error {
			return replica.Forget(ctx, st.Store, st.Sealer, log, actor(), name)
		})
	}, func(ctx context.Context, c chanceryv1.AdminClient) error {
		_, err := c.ForgetReplica(ctx, &chanceryv1.ForgetReplicaRequest{Name: name})
		return err
	})
	if err != nil {
		return fmt.Errorf("replica forget: %w", err)
	}
	fmt.Fprintf(out, "Replica %s is declared dead: nothing waits for it. It leaves the document once what it issued has ended.\n", process.Printable(name))
	resp, err := list(ctx, s)
	if err != nil {
		return nil // it is done
	}
	for _, r := range resp.GetReplicas() {
		if since := time.Since(r.GetSeen().AsTime()); r.GetName() == name && r.GetSeen() != nil && since < quietFor {
			fmt.Fprintf(out, "It was last heard of %s ago. If it still runs, it works on, and is there again after its next start: stop it.\n", checkup.Span(max(0, since)))
		}
	}
	return nil
}

func actor() string { return process.UserName(uint32(os.Getuid())) }

// print prints replicas.
func print(out io.Writer, format string, resp *chanceryv1.ListReplicasResponse, now time.Time) error {
	all := []checkup.Replica{}
	for _, r := range resp.GetReplicas() {
		all = append(all, status.ReplicaOf(r))
	}
	if format == "json" {
		return process.WriteJSON(out, map[string]any{"version": resp.GetVersion(), "replicas": all})
	}
	fmt.Fprintf(out, "authority document version %d\n", resp.GetVersion())
	for i := range all {
		fmt.Fprintln(out, process.Printable(status.ReplicaLine(now, &all[i])))
	}
	return nil
}
