package lint

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/chancery-project/chancery/ca/tbs"
)

// CRL is a CRL, and what it is held against.
type CRL struct {
	CRL *x509.RevocationList
	Now time.Time

	IssuerName, IssuerSKI []byte
	IssuerNotAfter        time.Time

	Number  *big.Int // as asked for
	Entries int      // how many

	UserCertsOnly bool // an issuing distribution point was asked for
}

// Run returns the first rule that the CRL breaks.
func (l *CRL) Run() error {
	c := l.CRL
	fail := func(name, section, format string, args ...any) error {
		return fmt.Errorf("lint %s (%s): %w", name, section, fmt.Errorf(format, args...))
	}
	switch {
	case !bytes.Equal(c.RawIssuer, l.IssuerName) || !bytes.Equal(c.AuthorityKeyId, l.IssuerSKI):
		return fail("crl_issuer", "RFC 5280 5.1.2.3, 5.2.1", "issuer or authority key identifier is not the issuer's")
	case c.Number == nil || c.Number.Sign() < 0 || c.Number.BitLen() > 159:
		return fail("crl_number", "RFC 5280 5.2.3", "it should be 0 or more, and have at most 20 octets")
	case c.Number.Cmp(l.Number) != 0 || len(c.RevokedCertificateEntries) != l.Entries:
		return fail("crl_what_was_asked", "invariant 1", "number or entries differ from what was asked")
	case c.ThisUpdate.After(l.Now):
		return fail("crl_validity", "RFC 5280 5.1.2.4", "thisUpdate %s lies in the future", stamp(c.ThisUpdate))
	case !c.NextUpdate.After(c.ThisUpdate) || !c.NextUpdate.After(l.Now):
		return fail("crl_validity", "RFC 5280 5.1.2.5", "nextUpdate %s should lie after thisUpdate %s and after now", stamp(c.NextUpdate), stamp(c.ThisUpdate))
	case c.NextUpdate.After(l.IssuerNotAfter):
		return fail("crl_validity", "invariant 3", "nextUpdate %s lies after the end of its issuer's chain at %s", stamp(c.NextUpdate), stamp(l.IssuerNotAfter))
	}
	if err := l.distributionPoint(); err != nil {
		return fail("crl_idp", "RFC 5280 5.2.5, decision D22", "%w", err)
	}
	seen := map[string]bool{}
	for n, e := range c.RevokedCertificateEntries {
		serial := e.SerialNumber.Text(16)
		switch {
		case e.SerialNumber.Sign() <= 0 || e.SerialNumber.BitLen() > 159:
			return fail("crl_serial", "RFC 5280 4.1.2.2", "entry %d: serial %s should be above 0 and have at most 20 octets", n, serial)
		case seen[serial]:
			return fail("crl_serial", "RFC 5280 5.1.2.6", "entry %d: serial %s is listed twice", n, serial)
		case e.RevocationTime.After(l.Now): // thisUpdate itself may be backdated
			return fail("crl_entry", "RFC 5280 5.3", "entry %d: revoked at %s, in the future", n, stamp(e.RevocationTime))
		case e.ReasonCode < 0 || e.ReasonCode > 10 || e.ReasonCode == 7 || e.ReasonCode == 8:
			return fail("crl_entry", "RFC 5280 5.3.1", "entry %d: reason %d is none of a full CRL", n, e.ReasonCode)
		}
		seen[serial] = true
	}
	return nil
}

// distributionPoint holds the CRL's issuing distribution point to what was asked: none, or one that says "leaves only". Any
// other would make verifiers pass the CRL over.
func (l *CRL) distributionPoint() error {
	found := 0
	for _, e := range l.CRL.Extensions {
		if !e.Id.Equal(tbs.OIDIssuingDistributionPoint) {
			continue
		}
		found++
		if !e.Critical || !bytes.Equal(e.Value, tbs.UserCertsOnlyIDP) {
			return errors.New("the issuing distribution point should be critical and hold onlyContainsUserCerts alone")
		}
	}
	if want := l.UserCertsOnly; (found == 1) != want || found > 1 {
		return fmt.Errorf("there are %d issuing distribution points; one was asked for: %v", found, want)
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
