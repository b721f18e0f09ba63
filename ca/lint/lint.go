// Package lint owns our own lints: the rules that a certificate or CRL must meet before it is signed.
//
// They see it parsed back from the to-be-signed bytes, not the template that those were made from, so that a fault in
// our own encoder is caught too. They run before the key is used, on every single one (invariant 1); zlint's lints are
// in package ca/zlint.
//
// It refuses to know issuers and profiles: what a rule holds the certificate against comes in as values.
package lint

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/tbs"
	"github.com/chancery-project/chancery/trust"
)

// Lint is one rule.
type Lint struct {
	Name    string
	Section string // where the rule stands
	Check   func(*Subject) error
}

// Subject is a certificate, and what it is held against.
type Subject struct {
	Cert *x509.Certificate
	Now  time.Time

	// Of the profile.
	CA     bool // for signing certificates
	MaxTTL time.Duration

	// Of the issuer.
	IssuerName, IssuerSKI []byte
	IssuerNotAfter        time.Time // the earliest end in its chain
	IssuerPathLen         int       // below 0: no bound

	// As asked for.
	ID            string // the URI: of a workload, or of the trust domain
	PublicKey     crypto.PublicKey
	DNSNames, IPs int               // how many
	Existing      *x509.Certificate // that this one is a cross-certificate of; nil for others
}

// Lints holds every MUST on the contents of a certificate in X509-SVID sections 2 to 4, the rules of RFC 5280 that
// peers stumble over, and our own invariants.
var Lints = []Lint{
	{"one_uri_san", "X509-SVID 2", func(s *Subject) error {
		if n := len(s.Cert.URIs); n != 1 {
			return fmt.Errorf("%d URI SANs; exactly one is allowed", n)
		}
		return nil
	}},
	{"leaf_id_has_path", "X509-SVID 3.1, SPIFFE-ID 2", func(s *Subject) error {
		if s.CA || len(s.Cert.URIs) != 1 {
			return nil
		}
		_, err := trust.ParseID(s.Cert.URIs[0].String())
		return err
	}},
	{"san_critical_without_subject", "X509-SVID 3.1, RFC 5280 4.1.2.6", func(s *Subject) error {
		if e := s.extension(tbs.OIDSAN); bytes.Equal(s.Cert.RawSubject, tbs.EmptyName) && (e == nil || !e.critical) {
			return errors.New("the subject is empty and the SAN is not critical")
		}
		return nil
	}},
	{"signing_id_without_path", "X509-SVID 3.2", func(s *Subject) error {
		if !s.CA || len(s.Cert.URIs) != 1 {
			return nil
		}
		if u := s.Cert.URIs[0]; u.Scheme != "spiffe" || u.Path != "" || "spiffe://"+u.Host != s.ID {
			return fmt.Errorf("the SPIFFE ID %s of a signing certificate should be its trust domain alone", u)
		}
		return nil
	}},
	{"basic_constraints", "X509-SVID 4.1", func(s *Subject) error {
		if e := s.extension(tbs.OIDBasic); e == nil || !e.critical || !s.Cert.BasicConstraintsValid {
			return errors.New("missing or not critical")
		}
		if s.Cert.IsCA != s.CA {
			return fmt.Errorf("cA is %v", s.Cert.IsCA)
		}
		return nil
	}},
	{"key_usage_present_and_critical", "X509-SVID 4.3", func(s *Subject) error {
		if e := s.extension(tbs.OIDKeyUsage); e == nil || !e.critical {
			return errors.New("missing or not critical")
		}
		return nil
	}},
	{"signing_key_usage", "X509-SVID 4.3", func(s *Subject) error {
		if s.CA && s.Cert.KeyUsage&x509.KeyUsageCertSign == 0 {
			return errors.New("keyCertSign is not set")
		}
		return nil
	}},
	{"leaf_key_usage_digital_signature", "X509-SVID 4.3", func(s *Subject) error {
		if !s.CA && s.Cert.KeyUsage&x509.KeyUsageDigitalSignature == 0 {
			return errors.New("digitalSignature is not set")
		}
		return nil
	}},
	{"leaf_key_usage_no_signing", "X509-SVID 4.3", func(s *Subject) error {
		if !s.CA && s.Cert.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0 {
			return errors.New("keyCertSign or cRLSign is set")
		}
		return nil
	}},
	{"leaf_ext_key_usage", "X509-SVID 4.4", func(s *Subject) error {
		if s.CA {
			return nil
		}
		for _, u := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
			if !slices.Contains(s.Cert.ExtKeyUsage, u) {
				return errors.New("serverAuth and clientAuth should both be set")
			}
		}
		return nil
	}},
	{"version_3", "RFC 5280 4.1.2.1", func(s *Subject) error {
		if s.Cert.Version != 3 {
			return fmt.Errorf("version is %d", s.Cert.Version)
		}
		return nil
	}},
	{"serial", "RFC 5280 4.1.2.2, decision D13", func(s *Subject) error {
		if n := s.Cert.SerialNumber.BitLen(); s.Cert.SerialNumber.Sign() <= 0 || n > 159 {
			return fmt.Errorf("%d bits; it should be positive and at most 20 octets", n)
		}
		return nil
	}},
	{"issuer_name", "RFC 5280 4.1.2.4", func(s *Subject) error {
		if !bytes.Equal(s.Cert.RawIssuer, s.IssuerName) || bytes.Equal(s.Cert.RawIssuer, tbs.EmptyName) {
			return errors.New("not the byte-wise subject of the issuer")
		}
		return nil
	}},
	{"key_identifiers", "RFC 5280 4.2.1.1, 4.2.1.2", func(s *Subject) error {
		if len(s.Cert.SubjectKeyId) == 0 || !bytes.Equal(s.Cert.AuthorityKeyId, s.IssuerSKI) {
			return errors.New("subject key identifier missing, or authority key identifier not the issuer's")
		}
		return nil
	}},
	{"extensions", "RFC 5280 4.2", func(s *Subject) error {
		seen := map[string]bool{}
		for _, e := range s.Cert.Extensions {
			if seen[e.Id.String()] {
				return fmt.Errorf("extension %s occurs twice", e.Id)
			}
			seen[e.Id.String()] = true
		}
		if n := len(s.Cert.UnhandledCriticalExtensions); n > 0 {
			return fmt.Errorf("%d unknown critical extensions", n)
		}
		return nil
	}},
	{"signing_subject", "RFC 5280 4.1.2.6", func(s *Subject) error {
		if s.CA && bytes.Equal(s.Cert.RawSubject, tbs.EmptyName) {
			return errors.New("a signing certificate needs a subject")
		}
		return nil
	}},
	{"path_length", "RFC 5280 4.2.1.9", func(s *Subject) error {
		c, most := s.Cert, s.IssuerPathLen
		switch {
		case !s.CA || most < 0 || bytes.Equal(c.SubjectKeyId, s.IssuerSKI):
			return nil
		case most == 0:
			return errors.New("the issuer's path length is 0: it may sign leaves only")
		case c.MaxPathLen < 0 || c.MaxPathLen >= most:
			return fmt.Errorf("path length %d under an issuer with %d; set %d or less", c.MaxPathLen, most, most-1)
		}
		return nil
	}},
	{"cross_certificate", "RFC 5280 3.2", func(s *Subject) error {
		if !s.CA || s.Existing == nil {
			return nil
		}
		e := s.Existing
		switch {
		case !bytes.Equal(s.Cert.RawSubject, e.RawSubject) || !bytes.Equal(s.Cert.SubjectKeyId, e.SubjectKeyId):
			return errors.New("subject and subject key identifier should be those of the existing certificate")
		case !trust.SameKey(s.Cert.PublicKey, e.PublicKey):
			return errors.New("the key should be that of the existing certificate")
		case bytes.Equal(s.Cert.RawSubject, s.Cert.RawIssuer) || bytes.Equal(e.SubjectKeyId, s.IssuerSKI):
			return errors.New("an authority should not certify itself again")
		}
		return nil
	}},
	{"validity", "invariant 3", func(s *Subject) error {
		c := s.Cert
		switch {
		case !c.NotAfter.After(c.NotBefore):
			return fmt.Errorf("ends %s, not after it begins %s", c.NotAfter, c.NotBefore)
		case c.NotBefore.After(s.Now):
			return fmt.Errorf("begins at %s, in the future", c.NotBefore)
		case c.NotAfter.After(s.IssuerNotAfter):
			return fmt.Errorf("ends at %s, after its chain at %s", c.NotAfter, s.IssuerNotAfter)
		case c.NotAfter.After(s.Now.Add(s.MaxTTL)):
			return fmt.Errorf("ends at %s, later than the profile's %s from now", c.NotAfter, s.MaxTTL)
		}
		return nil
	}},
	{"what_was_asked", "invariant 2", func(s *Subject) error {
		if len(s.Cert.URIs) == 1 && s.Cert.URIs[0].String() != s.ID {
			return fmt.Errorf("the ID is %s; asked for %s", s.Cert.URIs[0], s.ID)
		}
		if !trust.SameKey(s.Cert.PublicKey, s.PublicKey) {
			return errors.New("the public key is not the one asked for")
		}
		if len(s.Cert.DNSNames) != s.DNSNames || len(s.Cert.IPAddresses) != s.IPs || len(s.Cert.EmailAddresses) != 0 {
			return errors.New("names were added or lost")
		}
		return nil
	}},
}

type foundExtension struct{ critical bool }

func (s *Subject) extension(oid asn1.ObjectIdentifier) *foundExtension {
	for _, e := range s.Cert.Extensions {
		if e.Id.Equal(oid) {
			return &foundExtension{e.Critical}
		}
	}
	return nil
}

// Run applies every lint and returns all that fail, each with its name and section.
func (s *Subject) Run() error {
	var errs []error
	for _, x := range Lints {
		if err := x.Check(s); err != nil {
			errs = append(errs, fmt.Errorf("lint %s (%s): %w", x.Name, x.Section, err))
		}
	}
	return errors.Join(errs...)
}
