// Package state owns `chancery state`: exports of the authority document, and restoring one.
//
// It refuses to restore without a named admin and the trust domain's name as a confirmation, over a store that servers work on,
// and an export that is not of this authority (decision D9). It never makes a sealing key: what is restored needs the one that
// it was sealed with.
package state

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/backup"
	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server"
)

// Command returns `chancery state`.
func Command() *cobra.Command {
	cmd := &cobra.Command{Use: "state", Short: "Export and restore the state of a server", Args: process.Group, RunE: process.Help}
	cmd.AddCommand(exportCommand(), importCommand())
	return cmd
}

func exportCommand() *cobra.Command {
	var file, out string
	cmd := &cobra.Command{
		Use: "export -c FILE -o OUT", Short: "Write the authority document, sealed, to a file", Args: process.NoArgs,
		Long: "Writes the authority document to a new file with mode 0600, as the store has it: authenticated, and with sealed keys. It asks\n" +
			"the server that runs here, which knows the document even if the store is lost; while none runs it reads the store. With\n" +
			"`-o -` it prints the export.\n\n" +
			"It does not hold the sealing key, keys that lie in key stores or plugged-in files, and logs. docs/recovery.md says what to\n" +
			"keep besides, and how to restore.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if out == "" {
				return errors.New("state export: where to? Use -o FILE")
			}
			s, err := server.Load(file)
			if err != nil {
				return err
			}
			if err := export(cmd.Context(), s, out, cmd.OutOrStdout(), cmd.ErrOrStderr()); err != nil {
				return fmt.Errorf("state export: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "config file of the server (YAML)")
	cmd.Flags().StringVarP(&out, "output", "o", "", "file to write, which must not exist yet; - for standard output")
	return cmd
}

// take returns an export: that of a server that runs here, or, while none does, one made from the store (decision D14).
func take(ctx context.Context, s *server.Settings, actor string) (out []byte, err error) {
	err = s.EitherWay(ctx, func() error {
		return s.Direct(ctx, func(st *server.Stored, log *audit.Log) error {
			if err := log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "state export"}); err != nil {
				return err
			}
			out, _, err = backup.Make(st.Data, st.Document.Version, st.Sealer, s.Place().Replica(), backup.FromStore, time.Now())
			return err
		})
	}, func(ctx context.Context, c chanceryv1.AdminClient) error {
		resp, err := c.ExportState(ctx, new(chanceryv1.ExportStateRequest))
		out = resp.GetExport()
		return err
	})
	return out, err
}

// export writes an export, and says what it is.
func export(ctx context.Context, s *server.Settings, path string, stdout, stderr io.Writer) error {
	say := stdout
	if path == "-" {
		say = stderr
	} else if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("%s exists already; name another file", path)
	}
	data, err := take(ctx, s, process.UserName(uint32(os.Getuid())))
	if err != nil {
		return err
	}
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	if err != nil {
		return err
	}
	e, _, err := backup.Open(data, sealer) // what came from the server, and can be restored with the key that is configured here
	if err != nil {
		return fmt.Errorf("the export could not be restored: %w", err)
	}
	if path == "-" {
		_, err = stdout.Write(data)
	} else if err = durable.Place(path, data, 0o600); errors.Is(err, fs.ErrExist) {
		err = fmt.Errorf("%s exists already; name another file", path)
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(say, "Exported version %d of the authority document of %s.\n", e.Version, strings.Join(e.TrustDomains, ", "))
	if e.Source == backup.FromServer {
		fmt.Fprintln(say, "The store did not give the newest document: this is the one that the server works by.")
	}
	fmt.Fprintln(say, "Not included, and needed to restore:")
	for _, what := range e.NotIncluded {
		fmt.Fprintf(say, "  %s\n", what)
	}
	for _, ref := range e.KeyRefs {
		fmt.Fprintf(say, "  key %s\n", process.Printable(ref))
	}
	if dir, err := filepath.Abs(filepath.Dir(path)); path != "-" && err == nil && dir == filepath.Dir(s.State.SealingKey) {
		fmt.Fprintf(stderr, "Warning: the sealing key %s lies in the same folder: both together are the CA.\n", s.State.SealingKey)
	}
	return nil
}
