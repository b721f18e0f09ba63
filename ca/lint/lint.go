// Package lint owns our own lints: the rules that a certificate or CRL must meet before it is signed.
//
// They see what the to-be-signed bytes say (Read), not the template that those were made from, so that a fault in our own
// encoder is caught too. They run before the key is used, on every single one (invariant 1); zlint's lints are in package
// ca/zlint, and crypto/x509 reads a sample of what was signed.
//
// It refuses to know issuers and profiles: what a rule holds the certificate against comes in as values.
package lint

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
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
	*Contents
	Now time.Time

	// Of the profile.
	CA     bool // for signing certificates
	MaxTTL time.Duration

	// Of the issuer.
	IssuerName, IssuerSKI []byte
	IssuerAlgorithm       []byte    // DER, with which it signs
	IssuerNotAfter        time.Time // the earliest end in its chain
	IssuerPathLen         int       // below 0: no bound

	// As asked for.
	AskedID            string            // the URI: of a workload, or of the trust domain
	AskedSPKI          []byte            // DER, the public key
	AskedDNS, AskedIPs int               // how many
	Existing           *x509.Certificate // that this one is a cross-certificate of; nil for others
}

// Lints holds every MUST on the contents of a certificate in X509-SVID sections 2 to 4, the rules of RFC 5280 that
// peers stumble over, and our own invariants.
var Lints = []Lint{
	{"one_uri_san", "X509-SVID 2", func(s *Subject) error {
		if n := len(s.URIs); n != 1 {
			return fmt.Errorf("%d URI SANs; exactly one is allowed", n)
		}
		return nil
	}},
	{"leaf_id_has_path", "X509-SVID 3.1, SPIFFE-ID 2", func(s *Subject) error {
		if s.CA || len(s.URIs) != 1 {
			return nil
		}
		_, err := trust.ParseID(s.URIs[0])
		return err
	}},
	{"san_critical_without_subject", "X509-SVID 3.1, RFC 5280 4.1.2.6", func(s *Subject) error {
		if bytes.Equal(s.Subject, tbs.EmptyName) && !s.critical(san) {
			return errors.New("the subject is empty and the SAN is not critical")
		}
		return nil
	}},
	{"signing_id_without_path", "X509-SVID 3.2", func(s *Subject) error {
		if s.CA && len(s.URIs) == 1 && s.URIs[0] != s.AskedID {
			return fmt.Errorf("the SPIFFE ID %s of a signing certificate should be its trust domain alone, %s", s.URIs[0], s.AskedID)
		}
		return nil
	}},
	{"basic_constraints", "X509-SVID 4.1", func(s *Subject) error {
		if !s.critical(basic) {
			return errors.New("missing or not critical")
		}
		if s.IsCA != s.CA {
			return fmt.Errorf("cA is %v", s.IsCA)
		}
		return nil
	}},
	{"key_usage_present_and_critical", "X509-SVID 4.3", func(s *Subject) error {
		if !s.critical(keyUsage) {
			return errors.New("missing or not critical")
		}
		return nil
	}},
	{"signing_key_usage", "X509-SVID 4.3", func(s *Subject) error {
		if s.CA && s.KeyUsage&x509.KeyUsageCertSign == 0 {
			return errors.New("keyCertSign is not set")
		}
		return nil
	}},
	{"leaf_key_usage_digital_signature", "X509-SVID 4.3", func(s *Subject) error {
		if !s.CA && s.KeyUsage&x509.KeyUsageDigitalSignature == 0 {
			return errors.New("digitalSignature is not set")
		}
		return nil
	}},
	{"leaf_key_usage_no_signing", "X509-SVID 4.3", func(s *Subject) error {
		if !s.CA && s.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0 {
			return errors.New("keyCertSign or cRLSign is set")
		}
		return nil
	}},
	{"leaf_ext_key_usage", "X509-SVID 4.4", func(s *Subject) error {
		if !s.CA && (!s.ServerAuth || !s.ClientAuth || s.OtherUsages > 0) {
			return errors.New("serverAuth and clientAuth should be set, and nothing else")
		}
		return nil
	}},
	{"version_3", "RFC 5280 4.1.2.1", func(s *Subject) error {
		if s.Version != 3 {
			return fmt.Errorf("version is %d", s.Version)
		}
		return nil
	}},
	{"serial", "RFC 5280 4.1.2.2, decision D13", func(s *Subject) error {
		if n := len(s.Serial); n == 0 || n > 20 || s.Serial[0] == 0 || s.Serial[0] > 0x7f {
			return fmt.Errorf("%x; it should be positive, at most 20 octets, and without leading zeros", s.Serial)
		}
		return nil
	}},
	{"signature_algorithm", "RFC 5280 4.1.1.2, 4.1.2.3", func(s *Subject) error {
		if !bytes.Equal(s.Algorithm, s.IssuerAlgorithm) {
			return errors.New("not the algorithm that the issuer signs with")
		}
		return nil
	}},
	{"issuer_name", "RFC 5280 4.1.2.4", func(s *Subject) error {
		if !bytes.Equal(s.Issuer, s.IssuerName) || bytes.Equal(s.Issuer, tbs.EmptyName) {
			return errors.New("not the byte-wise subject of the issuer")
		}
		return nil
	}},
	{"key_identifiers", "RFC 5280 4.2.1.1, 4.2.1.2", func(s *Subject) error {
		if len(s.SKI) == 0 || !bytes.Equal(s.AKI, s.IssuerSKI) {
			return errors.New("subject key identifier missing, or authority key identifier not the issuer's")
		}
		return nil
	}},
	{"extensions", "RFC 5280 4.2", func(s *Subject) error {
		for n, e := range s.Extensions {
			for _, other := range s.Extensions[:n] {
				if bytes.Equal(e.OID, other.OID) {
					return fmt.Errorf("extension %x occurs twice", e.OID)
				}
			}
			if e.Critical && !e.known {
				return fmt.Errorf("extension %x is unknown and critical", e.OID)
			}
		}
		return nil
	}},
	{"signing_subject", "RFC 5280 4.1.2.6", func(s *Subject) error {
		if s.CA && bytes.Equal(s.Subject, tbs.EmptyName) {
			return errors.New("a signing certificate needs a subject")
		}
		return nil
	}},
	{"path_length", "RFC 5280 4.2.1.9", func(s *Subject) error {
		most := s.IssuerPathLen
		switch {
		case !s.CA || most < 0 || bytes.Equal(s.SKI, s.IssuerSKI):
			return nil
		case most == 0:
			return errors.New("the issuer's path length is 0: it may sign leaves only")
		case s.PathLen < 0 || s.PathLen >= most:
			return fmt.Errorf("path length %d under an issuer with %d; set %d or less", s.PathLen, most, most-1)
		}
		return nil
	}},
	{"cross_certificate", "RFC 5280 3.2", func(s *Subject) error {
		if !s.CA || s.Existing == nil {
			return nil
		}
		e := s.Existing
		switch {
		case !bytes.Equal(s.Subject, e.RawSubject) || !bytes.Equal(s.SKI, e.SubjectKeyId):
			return errors.New("subject and subject key identifier should be those of the existing certificate")
		case !bytes.Equal(s.SPKI, e.RawSubjectPublicKeyInfo):
			return errors.New("the key should be that of the existing certificate")
		case bytes.Equal(s.Subject, s.Issuer) || bytes.Equal(e.SubjectKeyId, s.IssuerSKI):
			return errors.New("an authority should not certify itself again")
		}
		return nil
	}},
	{"validity", "invariant 3", func(s *Subject) error {
		switch {
		case !s.NotAfter.After(s.NotBefore):
			return fmt.Errorf("ends %s, not after it begins %s", s.NotAfter, s.NotBefore)
		case s.NotBefore.After(s.Now):
			return fmt.Errorf("begins at %s, in the future", s.NotBefore)
		case s.NotAfter.After(s.IssuerNotAfter):
			return fmt.Errorf("ends at %s, after its chain at %s", s.NotAfter, s.IssuerNotAfter)
		case s.NotAfter.After(s.Now.Add(s.MaxTTL)):
			return fmt.Errorf("ends at %s, later than the profile's %s from now", s.NotAfter, s.MaxTTL)
		}
		return nil
	}},
	{"what_was_asked", "invariant 2", func(s *Subject) error {
		if len(s.URIs) == 1 && s.URIs[0] != s.AskedID {
			return fmt.Errorf("the ID is %s; asked for %s", s.URIs[0], s.AskedID)
		}
		if !bytes.Equal(s.SPKI, s.AskedSPKI) {
			return errors.New("the public key is not the one asked for")
		}
		if s.DNS != s.AskedDNS || s.IPs != s.AskedIPs || s.OtherNames != 0 {
			return errors.New("names were added or lost")
		}
		return nil
	}},
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
