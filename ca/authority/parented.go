package authority

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
)

// This file is for issuers between servers: one that a parent renews (package parent/renewal), and those that we sign for
// servers below us.

// openParented makes the active issuer ready. One that is missing, was plugged in, or whose chain has ended, is left to the
// parent, which is asked once the server runs.
func (a *Keeper) openParented(ctx context.Context) error {
	c := a.config
	if !a.offline() {
		return errors.New("a parent is configured, and the root's key lies here, so that no parent is needed; leave `parent` out of the config, " +
			"or start with the parent's root: `chancery authority init --root FILE`")
	}
	issuer, err := a.Document().Active(c.Domain, KindIssuer)
	if err != nil || !issuer.HasKey() {
		return nil
	}
	if issuer.Ended(time.Now()) {
		return nil
	}
	use, err := a.activeOf(ctx, a.Document())
	if err != nil {
		return err
	}
	a.swap(ctx, use)
	return nil
}

// SignsIssuers returns why this server cannot sign issuers for servers below it; nil if it can.
func (a *Keeper) SignsIssuers() error {
	root, err := a.Document().Active(a.config.Domain, KindRoot)
	if err != nil {
		return err
	}
	if !root.HasKey() {
		return errors.New("the root's key is kept elsewhere, so this server cannot sign issuers of other servers")
	}
	return nil
}

// SignIssuer signs an issuer of another server of the trust domain, with the root, and returns its chain without the root.
// It changes nothing here, and holds no lock while the root's key signs.
func (a *Keeper) SignIssuer(ctx context.Context, pub crypto.PublicKey, terms ca.IssuerTerms, who audit.Requester) ([]*x509.Certificate, error) {
	root, _, err := a.held.Root(ctx, a.Document(), "")
	if err != nil {
		return nil, err
	}
	cert, err := root.SignSubordinate(ctx, pub, terms, who)
	if err != nil {
		return nil, err
	}
	return append([]*x509.Certificate{cert}, root.Chain()...), nil
}
