package doctor

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/authority/swap"
	"github.com/chancery-project/chancery/ca/bundlekey"
	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/server/keystore"
	"github.com/chancery-project/chancery/trust"
)

// This file finds out from files what a server that does not run, or may not be asked, would say.

// keyTimeout bounds the opening of a key store.
const keyTimeout = 20 * time.Second

// readState reads the authority document, unless the server has told all.
func (e *exam) readState(ctx context.Context) {
	if e.state != nil {
		return
	}
	c := e.settings.Config
	doc, sealer := e.document(ctx)
	if doc == nil {
		return
	}
	e.settings.InLine(doc)
	td := e.settings.Domain()
	chain, roots := e.chain(doc, td)
	inv, err := checkup.Take(doc, td, chain, roots, c.Issuer != nil, e.now)
	if err != nil {
		e.found("state.refused", checkup.Critical, e.stateName(), "cannot be used: %v", err)
		return
	}
	if c.Parent != nil {
		inv.RenewedBy = checkup.RenewedByParent
	}
	if key := doc.State(td).BundleKey; key != nil {
		if _, err := bundlekey.Open(key, td, sealer); err != nil {
			inv.Document.BundleKeyError = err.Error()
		}
	}
	e.state = &checkup.State{
		Time: e.now.UTC(), TrustDomain: doc.Present(td).String(), Document: &inv.Document, RenewedBy: inv.RenewedBy, MaxTTL: e.settings.MaxTTL().Seconds(),
		Certs: inv.Certs, Clusters: []checkup.Cluster{}, Keys: e.keys(ctx, doc, td, sealer, inv.Stores),
		Rotation: checkup.RotationOf(doc.Of(td)),
	}
	if e.state.Certs == nil {
		e.state.Certs = []checkup.Certificate{}
	}
}

func (e *exam) stateName() string { return "state " + e.settings.Place().String() }

// document reads and authenticates the document; nil if that is not possible, which is a finding then.
func (e *exam) document(ctx context.Context) (*authority.Document, *keys.Sealer) {
	c := e.settings.Config.State
	data, version, err := e.settings.Place().Read(ctx)
	switch {
	case errors.Is(err, store.ErrMissing):
		e.found("state.missing", checkup.Critical, e.stateName(), "has no authority document")
		return nil, nil
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, store.ErrChanging) || ctx.Err() != nil:
		e.unchecked(e.stateName(), err)
		return nil, nil
	case err != nil && e.settings.Place().Shared():
		e.found("state.unreachable", checkup.Critical, e.stateName(), "cannot be read: %v", err)
		return nil, nil
	case err != nil:
		e.found("state.refused", checkup.Critical, e.stateName(), "cannot be read: %v", err)
		return nil, nil
	}
	sealer, err := keys.LoadSealer(c.SealingKey)
	switch {
	case errors.Is(err, fs.ErrPermission):
		e.unchecked("sealing key "+c.SealingKey, err)
		return nil, nil
	case err != nil:
		e.found("sealing-key.unusable", checkup.Critical, "sealing key "+c.SealingKey, "cannot be used: %v", err)
		return nil, nil
	}
	doc, err := authority.DecodeDocument(data, version, sealer)
	if err != nil {
		e.found("state.refused", checkup.Critical, e.stateName(), "is refused: %v", err)
		return nil, nil
	}
	return doc, sealer
}

// chain returns what would sign, and the roots; and looks whether they belong together.
func (e *exam) chain(doc *authority.Document, td trust.Domain) (chain, roots []*x509.Certificate) {
	bundle, err := doc.Bundle(td)
	if err != nil {
		e.found("state.refused", checkup.Critical, e.stateName(), "cannot be used: %v", err)
		return nil, nil
	}
	roots = bundle.All()
	if p := e.settings.Issuer; p != nil {
		chain = e.plugged(doc, td)
	} else if a, err := doc.Active(td, authority.KindIssuer); err == nil {
		if chain, err = a.Certificates(); err != nil {
			e.found("state.refused", checkup.Critical, e.stateName(), "cannot be used: %v", err)
			return nil, roots
		}
	}
	if len(chain) == 0 {
		return nil, roots
	}
	for _, c := range append(roots[:len(roots):len(roots)], chain...) {
		if e.now.After(c.NotAfter) || e.now.Before(c.NotBefore) {
			return chain, roots // its life is judged; whether it fits cannot be seen beside that
		}
	}
	if _, err := bundle.PathTo(chain, e.now); err != nil {
		e.found("chain.broken", checkup.Critical, fmt.Sprintf("issuer %x", chain[0].SubjectKeyId), "does not verify: %v", err)
	}
	return chain, roots
}

// plugged reads plugged-in files.
func (e *exam) plugged(doc *authority.Document, td trust.Domain) []*x509.Certificate {
	dir, set := e.readPlugged(checkup.Critical)
	if set == nil {
		return nil
	}
	if step, err := swap.Judge(doc, td, set, swap.History{}, dir, e.now); err != nil {
		e.found("issuer-files.unusable", checkup.Critical, "issuer files "+dir, "cannot be used: %v", err)
	} else if step.Hint != "" {
		e.found("issuer-files.unusable", checkup.Warning, "issuer files "+dir, "should be changed: %s", step.Hint)
	}
	return set.Chain
}

// readPlugged reads the files; nil if that is not possible, which is a finding then.
func (e *exam) readPlugged(s checkup.Severity) (dir string, set *files.Set) {
	dir, layout := e.settings.Issuer.CACerts, files.CACerts
	if dir == "" {
		dir, layout = e.settings.Issuer.TLS, files.TLS
	}
	set, err := files.Read(dir, layout)
	switch {
	case errors.Is(err, fs.ErrPermission):
		e.unchecked("issuer files "+dir, err)
		return dir, nil
	case err != nil:
		e.found("issuer-files.unusable", s, "issuer files "+dir, "cannot be used: %v", err)
		return dir, nil
	}
	return dir, set
}

// checkPlugged looks whether a server that runs uses the files as they lie there: it goes on with the former ones when it cannot.
func (e *exam) checkPlugged(context.Context) {
	if e.settings.Issuer == nil || !e.running() {
		return
	}
	dir, set := e.readPlugged(checkup.Warning)
	if set == nil {
		return
	}
	trusted := func(x *x509.Certificate) bool {
		return slices.ContainsFunc(e.state.Certs, func(c checkup.Certificate) bool { return c.Kind == checkup.KindRoot && bytes.Equal(c.DER, x.Raw) })
	}
	if slices.ContainsFunc(set.Roots, func(x *x509.Certificate) bool { return !trusted(x) }) {
		e.found("issuer-files.unusable", checkup.Warning, "issuer files "+dir, "bring roots that the server does not trust; its log says why")
		return
	}
	uses := func(c checkup.Certificate) bool { return c.InUse && bytes.Equal(c.DER, set.Chain[0].Raw) }
	if t := changed(dir); !slices.ContainsFunc(e.state.Certs, uses) && t != nil && e.now.Sub(*t) > pluggedLag {
		e.found("issuer-files.unusable", checkup.Warning, "issuer files "+dir, "hold issuer %x, which the server does not use; its log says why", set.Chain[0].SubjectKeyId)
	}
}

// pluggedLag is how long a server may take to see that files have changed: it looks every 5 s.
const pluggedLag = 30 * time.Second

// keys has the keys that a server would need make a signature each. They are opened where that does no harm: a token is not,
// since each wrong PIN brings it closer to locking itself.
func (e *exam) keys(ctx context.Context, doc *authority.Document, td trust.Domain, sealer *keys.Sealer, stores map[string]string) []checkup.Key {
	ctx, cancel := context.WithTimeout(ctx, keyTimeout)
	defer cancel()
	out := []checkup.Key{}
	kept, storeErr := e.openStore(ctx, sealer)
	if kept != nil {
		defer kept.Close()
	}
	for _, kind := range []document.AuthorityKind{authority.KindIssuer, authority.KindRoot} {
		a, err := doc.Active(td, kind)
		if err != nil || checkup.StoreOf(a) == checkup.StoreElsewhere {
			continue
		}
		name := string(kind) + " " + a.ID
		k := checkup.Key{Name: name, Store: stores[name]}
		if took, err := tryKey(ctx, a, td, sealer, kept, storeErr); errors.Is(err, fs.ErrPermission) || errors.Is(err, errToken) {
			k.Unknown = err.Error()
		} else {
			now := time.Now()
			k.Checked, k.SignSeconds = &now, took.Seconds()
			if err != nil {
				k.Error = err.Error()
			}
		}
		out = append(out, k)
	}
	return out
}

var errToken = errors.New("a token is not opened while the server is down, since each wrong PIN counts; a server that runs says how its keys are")

// openStore opens the key store of the config; nil without one.
func (e *exam) openStore(ctx context.Context, sealer *keys.Sealer) (keystore.Store, error) {
	if e.settings.Keys.PKCS11 != "" {
		return nil, errToken
	}
	place, err := keystore.Parse(e.settings.Keys)
	if err != nil {
		return nil, err
	}
	return place.Open(ctx, sealer, slog.New(slog.DiscardHandler))
}

// tryKey makes a signature with an authority's key, and returns how long that took.
func tryKey(ctx context.Context, a *authority.Authority, td trust.Domain, sealer *keys.Sealer, kept keystore.Store, storeErr error) (time.Duration, error) {
	if a.KeyRef != "" && storeErr != nil {
		return 0, storeErr
	}
	var from keys.Store
	if kept != nil { // else it would be an interface that holds nil
		from = kept
	}
	signer, err := a.OpenKey(ctx, td, sealer, from)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	err = keys.Check(signer)
	return time.Since(began), err
}
