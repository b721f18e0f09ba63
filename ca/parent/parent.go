// Package parent owns what an issuer needs from a parent CA elsewhere: the request that the parent signs, and the checks
// on the chain that comes back.
//
// It refuses a chain that does not fit in every respect, before it is put to use: an issuer whose certificate breaks in a
// verifier's hands breaks every workload at once.
package parent

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/tbs"
	"github.com/chancery-project/chancery/ca/zlint"
	"github.com/chancery-project/chancery/trust"
)

// What a request asks for, in DER.
var (
	usageSigning = []byte{0x03, 0x02, 0x01, 0x06}                         // keyCertSign, cRLSign
	caForLeaves  = []byte{0x30, 0x06, 0x01, 0x01, 0xff, 0x02, 0x01, 0x00} // cA, pathLen 0
)

// Request returns a certificate signing request in DER for an issuer of the domain. It asks for what Check wants to see:
// a CA that signs leaves only, with the domain's URI.
func Request(td trust.Domain, key crypto.Signer) ([]byte, error) {
	id, err := keys.IDOf(key.Public())
	if err != nil {
		return nil, err
	}
	uri, err := url.Parse(td.URI())
	if err != nil {
		return nil, fmt.Errorf("encoding request: %w", err)
	}
	// Unlike that of any other issuer: path building among issuers of one name tries them all.
	subject := pkix.Name{CommonName: "chancery issuer " + id[:12]}
	if len(td.String()) <= 64 { // RFC 5280 appendix A.1, ub-organization-name
		subject.Organization = []string{td.String()}
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: subject, URIs: []*url.URL{uri},
		ExtraExtensions: []pkix.Extension{
			{Id: tbs.OIDKeyUsage, Critical: true, Value: usageSigning}, {Id: tbs.OIDBasic, Critical: true, Value: caForLeaves},
		},
	}, key)
	if err != nil {
		return nil, fmt.Errorf("signing request: %w", err)
	}
	return csr, nil
}

// Check checks a chain that a parent returned for a key, the issuing certificate first: it is that of the key, it and all
// above it may vouch for leaves of the domain, it passes the RFC lints, and the chain leads to a root of the bundle. It
// returns the certificates between the issuing one and the root; what does not belong to the path is left out.
func Check(td trust.Domain, key crypto.PublicKey, chain []*x509.Certificate, b *trust.Bundle, now time.Time) ([]*x509.Certificate, error) {
	if len(chain) == 0 {
		return nil, errors.New("no issuing certificate")
	}
	cert := chain[0]
	wrong := func(err error) error { return fmt.Errorf("issuing certificate %q: %w", cert.Subject, err) }
	if err := checkIssuing(td, key, cert, now); err != nil {
		return nil, wrong(err)
	}
	path, err := b.PathTo(chain, now)
	if err != nil {
		return nil, wrong(fmt.Errorf("it does not lead to a root of the trust domain: %w", err))
	}
	for below, c := range path {
		if err := mayVouch(c, below, td); err != nil {
			return nil, fmt.Errorf("certificate %q in the chain: %w", c.Subject, err)
		}
	}
	if err := zlint.Certificate(cert.Raw); err != nil {
		return nil, wrong(err)
	}
	if len(path) == 1 {
		return nil, nil
	}
	return path[1 : len(path)-1], nil
}

func checkIssuing(td trust.Domain, key crypto.PublicKey, cert *x509.Certificate, now time.Time) error {
	switch {
	case !trust.SameKey(cert.PublicKey, key):
		return errors.New("it is for another key than the one that was asked for; the first certificate should be the new issuer's")
	case !cert.BasicConstraintsValid || !cert.IsCA:
		return errors.New("it is not a CA certificate (basicConstraints cA is not true)")
	case cert.KeyUsage&x509.KeyUsageCertSign == 0:
		return errors.New("its key usage lacks keyCertSign")
	case cert.KeyUsage&x509.KeyUsageCRLSign == 0:
		return errors.New("its key usage lacks cRLSign, without which it cannot revoke what it signed")
	case len(cert.RawSubject) <= 2:
		return errors.New("its subject is empty; verifiers could not find it")
	case len(cert.SubjectKeyId) == 0:
		return errors.New("it has no subject key identifier")
	case now.After(cert.NotAfter):
		return fmt.Errorf("it ended at %s", cert.NotAfter.UTC().Format(time.RFC3339))
	case now.Before(cert.NotBefore):
		return fmt.Errorf("it begins at %s, in the future", cert.NotBefore.UTC().Format(time.RFC3339))
	case len(cert.URIs) > 1: // X509-SVID 2
		return fmt.Errorf("it has %d URIs; an issuer may have one, %s", len(cert.URIs), td.URI())
	case len(cert.URIs) == 1 && cert.URIs[0].String() != td.URI(): // X509-SVID 3.2
		return fmt.Errorf("its URI is %s; an issuer of this trust domain may have %s only", cert.URIs[0], td.URI())
	}
	return nil
}

// mayVouch checks what a CA's certificate says of leaves that have so many CAs between it and them. crypto/x509 judges the
// chain as if it ended with the issuer.
func mayVouch(c *x509.Certificate, between int, td trust.Domain) error {
	host := td.String()
	limited := c.MaxPathLen > 0 || c.MaxPathLen == 0 && c.MaxPathLenZero
	switch {
	case limited && c.MaxPathLen < between:
		return fmt.Errorf("its path length of %d leaves no room for the %d CAs below it", c.MaxPathLen, between)
	case len(c.PermittedURIDomains) > 0 && !slices.Contains(c.PermittedURIDomains, host):
		return fmt.Errorf("its name constraints permit URIs of %v only, not of %s", c.PermittedURIDomains, host)
	case slices.Contains(c.ExcludedURIDomains, host):
		return fmt.Errorf("its name constraints exclude URIs of %s", host)
	case len(c.ExtKeyUsage)+len(c.UnknownExtKeyUsage) == 0 || slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny):
		return nil
	case !slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageServerAuth), !slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageClientAuth):
		return errors.New("its extended key usage should have both serverAuth and clientAuth, or be left out")
	}
	return nil
}

// CheckRoot refuses a certificate that cannot be the root of a CA that is kept elsewhere.
func CheckRoot(r *x509.Certificate, now time.Time) error {
	switch {
	case !r.BasicConstraintsValid || !r.IsCA:
		return errors.New("it is not a CA certificate (basicConstraints cA is not true)")
	case r.KeyUsage != 0 && r.KeyUsage&x509.KeyUsageCertSign == 0:
		return errors.New("its key usage lacks keyCertSign")
	case r.CheckSignatureFrom(r) != nil:
		return errors.New("it is not signed by itself; give the root's certificate, and bring those below it with `authority import`")
	case now.After(r.NotAfter):
		return fmt.Errorf("it ended at %s", r.NotAfter.UTC().Format(time.RFC3339))
	case now.Before(r.NotBefore):
		return fmt.Errorf("it begins at %s, in the future", r.NotBefore.UTC().Format(time.RFC3339))
	case len(r.SubjectKeyId) == 0:
		return errors.New("it has no subject key identifier")
	}
	return nil
}
