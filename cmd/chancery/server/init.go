package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// Init makes sealing key, document and roots.pem, in this order; a crash on the way leaves what a second call
// completes. If there is a document already it makes roots.pem if that is missing, changes nothing else, and returns
// store.ErrConflict.
func Init(ctx context.Context, s *Settings, out io.Writer) error {
	st, err := store.CreateSQLite(ctx, s.State.SQLite)
	if err != nil {
		return s.explainStore(err)
	}
	defer st.Close()
	data, version, err := st.Load(ctx)
	if err == nil { // before a sealing key is made or the audit log opened
		return alreadyMade(s, data, version)
	} else if !errors.Is(err, store.ErrMissing) {
		return err
	}
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	if errors.Is(err, fs.ErrNotExist) {
		sealer, err = keys.CreateSealer(s.State.SealingKey)
	}
	if err != nil {
		return err
	}
	log, err := audit.Open(s.AuditLog)
	if err != nil {
		return err
	}
	defer log.Close()
	doc, err := authority.Init(ctx, authority.Config{
		Domain: s.domain, Store: st, Sealer: sealer, Log: log, Logger: slog.New(slog.DiscardHandler), Plugged: s.Issuer.plugged(),
	}, userName(uint32(os.Getuid())))
	if err != nil {
		return err
	}
	if err := writeRoots(s, doc); err != nil {
		return err
	}
	fmt.Fprintf(out, "Made the authorities of trust domain %s in %s.\n", s.domain, s.State.SQLite)
	fmt.Fprintf(out, "Agents need the roots in %s (serverRoots).\n", s.rootsFile())
	fmt.Fprintf(out, "Keep %s apart from backups of the state: both together are the CA.\n", s.State.SealingKey)
	return nil
}

// alreadyMade makes up for a crash between document and roots.pem.
func alreadyMade(s *Settings, data []byte, version uint64) error {
	have := fmt.Errorf("the state %s has authorities already (%w); `chancery authority show -c %s` prints them", s.State.SQLite, store.ErrConflict, s.file)
	if _, err := os.Lstat(s.rootsFile()); !errors.Is(err, fs.ErrNotExist) {
		return have
	}
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	if err != nil {
		return errors.Join(have, err)
	}
	doc, err := authority.DecodeDocument(data, version, sealer)
	if err != nil {
		return errors.Join(have, err)
	}
	if err := writeRoots(s, doc); err != nil {
		return errors.Join(have, err)
	}
	return fmt.Errorf("%w; %s was missing and has been written", have, s.rootsFile())
}

func writeRoots(s *Settings, doc *authority.Document) error {
	bundle, err := doc.Bundle(s.domain)
	if err != nil {
		return err
	}
	if err := process.ReplaceFile(s.rootsFile(), bundle.PEM(), 0o644); err != nil {
		return fmt.Errorf("%w; `chancery authority show -c %s -o pem` prints them", err, s.file)
	}
	return nil
}
