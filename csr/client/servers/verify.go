package servers

import (
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// Verify checks that a certificate is a server's of any of the authority's trust domains (decision D15): a migration gives it that of the
// next one.
func Verify(chain []*x509.Certificate, b *trust.Bundle) error {
	id, _, err := trust.Verify(chain, b.Of, time.Now())
	if err != nil {
		return fmt.Errorf("verifying server: %w", err)
	}
	if want := trust.SystemID(id.Domain(), "server"); id != want {
		return fmt.Errorf("server is %s; expected %s", id, want)
	}
	return nil
}

// VerifyAny is Verify for a server of whatever trust domain, under roots of which it is not known for which domains they vouch.
func VerifyAny(chain []*x509.Certificate, roots []*x509.Certificate) error {
	if len(chain) == 0 {
		return errors.New("verifying server: it shows no certificate")
	}
	id, err := trust.LeafID(chain[0])
	if err != nil {
		return fmt.Errorf("verifying server: %w", err)
	}
	b, err := trust.NewBundle(id.Domain(), 0, roots)
	if err != nil {
		return err
	}
	return Verify(chain, b)
}

// MayBeTrusted reports whether a newer bundle might vouch for a certificate that Verify has refused: no root does, or it is a server's of a
// trust domain that is not known.
func MayBeTrusted(err error, chain []*x509.Certificate, b *trust.Bundle) bool {
	if _, is := errors.AsType[x509.UnknownAuthorityError](err); is {
		return true
	}
	if err == nil || len(chain) == 0 {
		return false
	}
	id, wrong := trust.LeafID(chain[0])
	return wrong == nil && b.Of(id.Domain()) == nil && id == trust.SystemID(id.Domain(), "server")
}

// Join returns the roots of the newest bundle with those of a file. That does not say for which domain its roots vouch: for the configured
// one, unless the bundle has nothing of that any more; then for the one that has taken its place.
func Join(configured trust.Domain, newest *trust.Bundle, file []*x509.Certificate) (*trust.Bundle, error) {
	td := configured
	if b := newest.Of(td); b == nil || len(b.Roots()) == 0 {
		td = newest.Domain()
	}
	file = slices.DeleteFunc(slices.Clone(file), newest.HasRoot)
	var all []*trust.Bundle
	for _, b := range append([]*trust.Bundle{newest}, newest.Kin()...) {
		roots := b.Roots()
		if b.Domain() == td {
			roots = append(roots, file...)
		}
		next, err := trust.NewBundle(b.Domain(), 0, roots)
		if err != nil {
			return nil, err
		}
		all = append(all, next)
	}
	return all[0].WithKin(all[1:]...)
}
