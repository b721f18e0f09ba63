package state

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/backup"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server"
)

// asked is what the flags of an import say.
type asked struct {
	as, confirm string
	above       uint64
	stopped     []string
	dryRun      bool
}

func importCommand() *cobra.Command {
	var file string
	var ask asked
	cmd := &cobra.Command{
		Use: "import -c FILE IN --as NAME --confirm TRUST-DOMAIN", Short: "Restore the state of a server from an export", Args: process.OneArg,
		Long: "Restores the authority document of an export into the store that the config names: one without a document, or over an\n" +
			"older or newer one of the same authority. It gets a version above all that was seen, as do CRLs and bundles, so that no\n" +
			"server or agent takes it for a step back. --as names the admin, who goes into the audit log and into the document.\n\n" +
			"All servers on the store must be stopped, unless it has no document. What was changed since the export is lost, revocations\n" +
			"among them; it says how many it knows of. --dry-run prints what would happen, and changes nothing. docs/recovery.md has all\n" +
			"steps.",
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := server.Load(file)
			if err != nil {
				return err
			}
			if err := restore(cmd.Context(), s, args[0], ask, cmd.OutOrStdout()); err != nil {
				return fmt.Errorf("state import: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "config file of the server (YAML)")
	cmd.Flags().StringVar(&ask.as, "as", "", "name of the admin who restores")
	cmd.Flags().StringVar(&ask.confirm, "confirm", "", "the trust domain, as a confirmation")
	cmd.Flags().Uint64Var(&ask.above, "above", 0, "a version that an agent or another server has seen; what is restored gets a higher one")
	cmd.Flags().StringSliceVar(&ask.stopped, "stopped", nil, "name of a replica that is stopped, though it was seen a moment ago")
	cmd.Flags().BoolVar(&ask.dryRun, "dry-run", false, "only print what would happen")
	return cmd
}

// maxAs bounds the admin's name.
const maxAs = 100

func (a *asked) check(td string) error {
	odd := func(r rune) bool { return !unicode.IsPrint(r) }
	switch {
	case a.as == "" && !a.dryRun:
		return errors.New("who restores? Use --as NAME; it goes into the audit log and into the document")
	case len(a.as) > maxAs || strings.ContainsFunc(a.as, odd):
		return fmt.Errorf("--as should be a name of at most %d bytes that can be printed", maxAs)
	case a.confirm != td && !a.dryRun:
		return fmt.Errorf("this replaces the authority document of trust domain %s: confirm it with --confirm %[1]s, or look first with --dry-run", td)
	}
	return nil
}

// restoring is an import on its way.
type restoring struct {
	settings *server.Settings
	ask      asked
	export   *backup.Export
	from     *document.Document // of the export
	sealer   *keys.Sealer
	store    store.Store        // nil in a dry run without a store
	holder   string             // of the lease
	data     []byte             // what the store has; nil for nothing
	version  uint64             // likewise
	present  *document.Document // likewise
}

// restore restores an export.
func restore(ctx context.Context, s *server.Settings, path string, ask asked, out io.Writer) error {
	if err := ask.check(s.TrustDomain); err != nil {
		return err
	}
	r := &restoring{settings: s, ask: ask}
	if err := r.read(path); err != nil {
		return err
	}
	defer r.close()
	if err := r.look(ctx); err != nil {
		return err
	}
	seen, err := r.seen()
	if err != nil {
		return err
	}
	actor := fmt.Sprintf("%s (%s)", cmpOr(ask.as, "nobody"), process.UserName(uint32(os.Getuid())))
	next, err := r.from.ReissueBy(seen, document.Import{Time: time.Now().UTC().Truncate(time.Second), Actor: actor, Exported: r.export.Time})
	if err != nil {
		return err
	}
	var kept []string
	if r.present != nil {
		kept = backup.Keep(next, r.present)
	}
	r.say(ctx, out, next, kept)
	if ask.dryRun {
		fmt.Fprintln(out, "Nothing was changed (--dry-run).")
		return nil
	}
	if err := r.write(ctx, next, actor); err != nil {
		return err
	}
	fmt.Fprintf(out, "Restored as version %d, by %s. Start the servers.\n", next.Version, process.Printable(actor))
	if err := s.WriteRoots(next); err != nil {
		return fmt.Errorf("the state is restored, but the file with the roots for agents is not written: %w", err)
	}
	return nil
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// read reads the export.
func (r *restoring) read(path string) (err error) {
	if r.sealer, err = keys.LoadSealer(r.settings.State.SealingKey); err != nil {
		return fmt.Errorf("%w; an export can be restored with the sealing key that it was made with only", err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe would be waited for
	if err != nil {
		return fmt.Errorf("reading the export: %w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return fmt.Errorf("reading the export: %w", err)
	} else if !info.Mode().IsRegular() {
		return fmt.Errorf("reading the export: %s is not a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, backup.MaxFile+1))
	if err != nil {
		return fmt.Errorf("reading the export: %w", err)
	}
	if r.export, r.from, err = backup.Open(data, r.sealer); err != nil {
		return fmt.Errorf("export %s: %w", path, err)
	}
	if err := r.export.CheckDomain(r.from, r.settings.Domain()); err != nil {
		return fmt.Errorf("export %s: %w", path, err)
	}
	r.settings.InLine(r.from)
	return nil
}

// look opens the store, reads what it has, and refuses it while servers work on it.
func (r *restoring) look(ctx context.Context) (err error) {
	place, quiet := r.settings.Place(), slog.New(slog.DiscardHandler)
	if r.store, err = place.Open(ctx, quiet); errors.Is(err, store.ErrMissing) {
		if r.store = nil; r.ask.dryRun {
			return nil
		}
		r.store, err = place.Create(ctx, quiet)
	}
	if errors.Is(err, store.ErrLocked) {
		return fmt.Errorf("%w, which is a server or another command; stop it first", err)
	} else if err != nil {
		return err
	}
	r.data, r.version, err = r.store.Load(ctx)
	if errors.Is(err, store.ErrMissing) {
		r.data = nil
		return nil
	} else if err != nil {
		return err
	}
	r.present, err = document.Decode(r.data, r.version, r.sealer)
	switch {
	case err != nil:
		return fmt.Errorf("%s holds something that is not of this authority (%w): move it away first, or %s", place, err, place.Another())
	case r.present.Of(r.settings.Domain()) == nil:
		return fmt.Errorf("%s holds the authorities of another trust domain: %s", place, place.Another())
	}
	return r.checkStopped(ctx)
}

// importName leads the name under which an import has the lease.
const importName = "state-import-"

// leaseTime is how long others are kept from driving; an import takes a moment.
const leaseTime = 30 * time.Second

// checkStopped refuses a store that servers work on. What it does not see is no danger, since the store changes by
// compare-and-swap; but a server would go on for some seconds by what is being replaced.
func (r *restoring) checkStopped(ctx context.Context) error {
	place := r.settings.Place()
	if !place.Shared() { // its lock says so
		return nil
	}
	if err := r.askServer(ctx); err != nil {
		return err
	}
	if err := r.readBoard(ctx); err != nil {
		return err
	}
	if r.ask.dryRun {
		return nil
	}
	b := make([]byte, 6)
	rand.Read(b)
	holder := importName + hex.EncodeToString(b)
	held, by, err := r.store.Hold(ctx, holder, leaseTime)
	if err != nil {
		return err
	}
	if !held && strings.HasPrefix(by, importName) {
		return fmt.Errorf("another `chancery state import` works on %s, or was cut off: look what it did, and try again in half a minute", place)
	}
	if !held && !slices.Contains(r.ask.stopped, by) {
		return fmt.Errorf("replica %s holds the lease of %s: stop all servers on it, and try again in half a minute", process.Printable(by), place)
	}
	r.holder = holder
	return nil
}

// close gives back what look took.
func (r *restoring) close() {
	if r.store == nil {
		return
	}
	if r.holder != "" {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = r.store.GiveUp(ctx, r.holder) // it ends by itself
	}
	r.store.Close()
}

// seen returns the highest version that anybody may know.
func (r *restoring) seen() (uint64, error) {
	marked, err := r.marked()
	if err != nil {
		return 0, err
	}
	return max(r.version, r.export.Version, marked, r.ask.above), nil
}

// write stores the document.
func (r *restoring) write(ctx context.Context, next *document.Document, actor string) error {
	data, err := next.Encode(r.sealer)
	if err != nil {
		return err
	}
	log, err := audit.Open(r.settings.AuditLog)
	if err != nil {
		return err
	}
	defer log.Close()
	if err := log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: fmt.Sprintf("state import of version %d, exported by replica %s at %s, as version %d",
		r.export.Version, r.export.Replica, r.export.Time.Format(time.RFC3339), next.Version)}); err != nil {
		return err
	}
	if r.data == nil {
		err = r.store.Create(ctx, next.Version, data)
	} else {
		err = r.store.Replace(ctx, r.version, next.Version, data)
	}
	if err != nil {
		if got, version, loadErr := r.store.Load(ctx); loadErr != nil || version != next.Version || string(got) != string(data) {
			return err
		} // else it happened all the same
	}
	// This server has seen the document now; it would refuse to start without a mark that says so.
	sum := sha256.Sum256(data)
	if err := replica.WriteMark(r.settings.Place().Mark(), r.settings.Domain(), r.sealer, replica.Mark{Version: next.Version, Hash: hex.EncodeToString(sum[:])}); err != nil {
		return fmt.Errorf("the state is restored, as version %d, but the mark is not written: %w", next.Version, err)
	}
	return nil
}
