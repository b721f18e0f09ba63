package anchor

import (
	"crypto/x509"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/trust"
)

// Update returns the bundle of an update with its CRLs, after all that can be checked of it by itself, and against the one before; nil for none.
func (a *Anchor) Update(u *chanceryv1.SyncUpdate, last *trust.Bundle, now time.Time) (*trust.Bundle, error) {
	bundle, err := a.Take(u.GetBundle(), u.GetSignedBundle())
	if err != nil {
		return nil, err
	}
	if last != nil && bundle.SameRoots(last) && last.CRLs().Are(u.GetCrls()) { // most often: then there is nothing to parse
		return bundle.WithCRLs(last.CRLs()), nil
	}
	if n := len(u.GetIssuers()); n > trust.MaxCRLs {
		return nil, fmt.Errorf("%d certificates of issuers; at most %d are allowed", n, trust.MaxCRLs)
	}
	var issuers []*x509.Certificate
	for i, der := range u.GetIssuers() {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("reading issuer %d: %w", i, err)
		}
		issuers = append(issuers, cert)
	}
	crls, err := trust.NewCRLs(bundle, u.GetCrls(), issuers, now)
	if err != nil {
		return nil, err
	}
	if last != nil {
		if err := crls.Follows(last.CRLs()); err != nil {
			return nil, err
		}
		if bundle.SameRoots(last) && crls.Says(last.CRLs()) { // of another server: no news for those that we serve
			crls = last.CRLs()
		}
	}
	return bundle.WithCRLs(crls), nil
}

// Introduce pins the key of a signed bundle that has the configured domain beside others, once the bundle itself vouches for who has sent it.
func (a *Anchor) Introduce(signed *chanceryv1.SignedBundle, vouches func(*trust.Bundle) error) error {
	var plain chanceryv1.Bundle
	if err := proto.Unmarshal(signed.GetBundle(), &plain); err != nil {
		return fmt.Errorf("reading signed bundle: %w", err)
	}
	bundle, err := Parse(a.config.Domain, &plain)
	if err != nil {
		return err
	}
	if err := vouches(bundle); err != nil {
		return fmt.Errorf("by its own bundle: %w", err)
	}
	_, err = a.Take(nil, signed)
	return err
}
