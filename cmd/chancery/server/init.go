package server

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/issuance"
	"github.com/chancery-project/chancery/trust"
)

// Init makes sealing key, document and roots.pem, in this order; a crash on the way leaves what a second call
// completes. If there is a document already it makes roots.pem if that is missing, changes nothing else, and returns
// store.ErrConflict.
func Init(ctx context.Context, s *Settings, out io.Writer) error { return initialize(ctx, s, nil, out) }

// initialize is Init. With roots, those of a CA that is kept elsewhere, none is made, and the issuer is left to
// `authority csr` and `authority import`.
func initialize(ctx context.Context, s *Settings, roots []*x509.Certificate, out io.Writer) error {
	if err := errors.Join(s.parent.CheckRoots(roots), ca.CheckDomain(s.domain)); err != nil { // before anything is made, such as a mark of that name
		return s.wrong(err)
	}
	st, err := s.place.Create(ctx, slog.New(slog.DiscardHandler))
	if err != nil {
		return s.explainStore(err)
	}
	defer st.Close()
	data, version, err := st.Load(ctx)
	if err == nil { // before a sealing key is made or the audit log opened
		return alreadyMade(ctx, s, st, data, version)
	} else if !errors.Is(err, store.ErrMissing) {
		return err
	}
	if err := replica.CheckUnseen(s.place.Mark(), s.domain, s.State.SealingKey); err != nil {
		return fmt.Errorf("no authorities are made: %w", err)
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
	if _, err := issuance.Create(s.IssuanceLog, s.domain, authority.NewLogID()); err != nil {
		return err
	}
	issued, listed, err := issuance.Open(s.IssuanceLog, log, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	if issued != nil {
		defer issued.Close()
		defer log.Close() // before it
	}
	kept, err := s.keys.Open(ctx, sealer, slog.New(slog.DiscardHandler))
	if err != nil {
		return s.wrong(err)
	}
	if kept != nil {
		defer kept.Close()
	}
	doc, err := authority.Init(ctx, authority.Config{
		Domain: s.domain, Store: st, Sealer: sealer, Log: log, Logger: slog.New(slog.DiscardHandler), Replica: s.place.Replica(), Mark: s.place.Mark(),
		Plugged: s.Issuer.plugged(), IssuanceLog: listed, Keys: kept, KeyType: s.keys.Type(), RootTTL: s.lifetimes.Root, IssuerTTL: s.lifetimes.Issuer, Roots: roots,
	}, process.UserName(uint32(os.Getuid())))
	if err != nil {
		return err
	}
	if err := s.WriteRoots(doc); err != nil {
		return err
	}
	fmt.Fprintf(out, "Made the authorities of trust domain %s in %s.\n", s.domain, s.place)
	fmt.Fprintf(out, "Agents need the roots in %s (serverRoots).\n", s.rootsFile())
	if s.Issuer == nil {
		fmt.Fprintln(out, s.keys.Describe(fmt.Sprintf("Private keys lie in %s, sealed with %s.", s.place, s.State.SealingKey)))
	}
	fmt.Fprintf(out, "Keep %s apart from backups of the state: both together are the CA.\n", s.State.SealingKey)
	if s.parent != nil {
		fmt.Fprintf(out, "There is no issuer yet: the server asks its parent (%s) for one once it runs.\n", s.parent.Kind())
	} else if len(roots) > 0 {
		fmt.Fprintf(out, "There is no issuer yet: `chancery authority csr -c %s` makes a request for the root's CA to sign.\n", s.file)
	}
	return nil
}

// existsError says that there is nothing to make. It is a store.ErrConflict, whose text would say that somebody else made it.
type existsError struct{ text string }

func (e *existsError) Error() string { return e.text }

// Is implements errors.Is.
func (e *existsError) Is(target error) bool { return target == store.ErrConflict }

// alreadyMade makes up for a crash between document and roots.pem, and for an issuance log that the config names since.
func alreadyMade(ctx context.Context, s *Settings, st store.Store, data []byte, version uint64) error {
	have := error(&existsError{fmt.Sprintf("the authorities of this server exist already, in the state %s, and were not changed: `chancery authority show -c %s` prints them, "+
		"`chancery server -c %[2]s` starts with them; for new ones beside them, %[3]s", s.place, s.file, s.place.Another())})
	_, err := os.Lstat(s.rootsFile())
	rootsMissing := errors.Is(err, fs.ErrNotExist)
	if !rootsMissing && s.IssuanceLog == "" {
		return have
	}
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	var doc *authority.Document
	if err == nil {
		doc, err = authority.DecodeDocument(data, version, sealer)
	}
	if err != nil {
		return &existsError{fmt.Sprintf("the authorities of this server exist already, in the state %s, and were not changed; but this config cannot use them: %v", s.place, err)}
	}
	if rootsMissing {
		if err := s.WriteRoots(doc); err != nil {
			return errors.Join(have, err)
		}
		have = fmt.Errorf("%w; %s was missing and has been written", have, s.rootsFile())
	}
	made, err := issuance.Attach(ctx, s.IssuanceLog, authority.Config{Domain: s.domain, Store: st, Sealer: sealer, Replica: s.place.Replica(), Mark: s.place.Mark()}, doc)
	if err != nil {
		return err
	}
	if made {
		have = fmt.Errorf("%w; the issuance log %s was missing and has been made", have, s.IssuanceLog)
	}
	return have
}

// WriteRoots writes the roots of a document to where agents are given them from.
func (s *Settings) WriteRoots(doc *authority.Document) error {
	bundle, err := doc.Bundle(s.domain)
	if err != nil {
		return err
	}
	if err := process.ReplaceFile(s.rootsFile(), trust.EncodeCertificates(bundle.All()...), 0o644); err != nil {
		return fmt.Errorf("%w; `chancery authority show -c %s -o pem` prints them", err, s.file)
	}
	return nil
}
