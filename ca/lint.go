package ca

import (
	"bytes"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// A lint is one rule that a certificate must meet before it is signed. It sees the certificate parsed back from the
// to-be-signed bytes, not the template that they were made from, so that a fault in our own encoder is caught too.
type lint struct {
	name    string
	section string // where the rule stands
	check   func(*linted) error
}

// linted is what a lint looks at.
type linted struct {
	cert    *x509.Certificate
	issuer  *Issuer
	profile *Profile
	request *Request
	now     time.Time
}

// lints holds every MUST on the contents of a certificate in X509-SVID sections 2 to 4, the rules of RFC 5280 that
// peers stumble over, and our own invariants.
var lints = []lint{
	{"one_uri_san", "X509-SVID 2", func(l *linted) error {
		if n := len(l.cert.URIs); n != 1 {
			return fmt.Errorf("%d URI SANs; exactly one is allowed", n)
		}
		return nil
	}},
	{"leaf_id_has_path", "X509-SVID 3.1, SPIFFE-ID 2", func(l *linted) error {
		if l.profile.ca || len(l.cert.URIs) != 1 {
			return nil
		}
		_, err := trust.ParseID(l.cert.URIs[0].String())
		return err
	}},
	{"san_critical_without_subject", "X509-SVID 3.1, RFC 5280 4.1.2.6", func(l *linted) error {
		if e := l.extension(oidSAN); bytes.Equal(l.cert.RawSubject, emptyName) && (e == nil || !e.critical) {
			return errors.New("the subject is empty and the SAN is not critical")
		}
		return nil
	}},
	{"signing_id_without_path", "X509-SVID 3.2", func(l *linted) error {
		if !l.profile.ca || len(l.cert.URIs) != 1 {
			return nil
		}
		if u := l.cert.URIs[0]; u.Scheme != "spiffe" || u.Path != "" || u.Host != l.request.CA.Domain.String() {
			return fmt.Errorf("the SPIFFE ID %s of a signing certificate should be its trust domain alone", u)
		}
		return nil
	}},
	{"basic_constraints", "X509-SVID 4.1", func(l *linted) error {
		if e := l.extension(oidBasic); e == nil || !e.critical || !l.cert.BasicConstraintsValid {
			return errors.New("missing or not critical")
		}
		if l.cert.IsCA != l.profile.ca {
			return fmt.Errorf("cA is %v", l.cert.IsCA)
		}
		return nil
	}},
	{"key_usage_present_and_critical", "X509-SVID 4.3", func(l *linted) error {
		if e := l.extension(oidKeyUsage); e == nil || !e.critical {
			return errors.New("missing or not critical")
		}
		return nil
	}},
	{"signing_key_usage", "X509-SVID 4.3", func(l *linted) error {
		if l.profile.ca && l.cert.KeyUsage&x509.KeyUsageCertSign == 0 {
			return errors.New("keyCertSign is not set")
		}
		return nil
	}},
	{"leaf_key_usage_digital_signature", "X509-SVID 4.3", func(l *linted) error {
		if !l.profile.ca && l.cert.KeyUsage&x509.KeyUsageDigitalSignature == 0 {
			return errors.New("digitalSignature is not set")
		}
		return nil
	}},
	{"leaf_key_usage_no_signing", "X509-SVID 4.3", func(l *linted) error {
		if !l.profile.ca && l.cert.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0 {
			return errors.New("keyCertSign or cRLSign is set")
		}
		return nil
	}},
	{"leaf_ext_key_usage", "X509-SVID 4.4", func(l *linted) error {
		if l.profile.ca {
			return nil
		}
		for _, u := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
			if !slices.Contains(l.cert.ExtKeyUsage, u) {
				return errors.New("serverAuth and clientAuth should both be set")
			}
		}
		return nil
	}},
	{"version_3", "RFC 5280 4.1.2.1", func(l *linted) error {
		if l.cert.Version != 3 {
			return fmt.Errorf("version is %d", l.cert.Version)
		}
		return nil
	}},
	{"serial", "RFC 5280 4.1.2.2, decision D13", func(l *linted) error {
		if n := l.cert.SerialNumber.BitLen(); l.cert.SerialNumber.Sign() <= 0 || n > 159 {
			return fmt.Errorf("%d bits; it should be positive and at most 20 octets", n)
		}
		return nil
	}},
	{"issuer_name", "RFC 5280 4.1.2.4", func(l *linted) error {
		if !bytes.Equal(l.cert.RawIssuer, l.issuer.name) || bytes.Equal(l.cert.RawIssuer, emptyName) {
			return errors.New("not the byte-wise subject of the issuer")
		}
		return nil
	}},
	{"key_identifiers", "RFC 5280 4.2.1.1, 4.2.1.2", func(l *linted) error {
		if len(l.cert.SubjectKeyId) == 0 || !bytes.Equal(l.cert.AuthorityKeyId, l.issuer.ski) {
			return errors.New("subject key identifier missing, or authority key identifier not the issuer's")
		}
		return nil
	}},
	{"extensions", "RFC 5280 4.2", func(l *linted) error {
		seen := map[string]bool{}
		for _, e := range l.cert.Extensions {
			if seen[e.Id.String()] {
				return fmt.Errorf("extension %s occurs twice", e.Id)
			}
			seen[e.Id.String()] = true
		}
		if n := len(l.cert.UnhandledCriticalExtensions); n > 0 {
			return fmt.Errorf("%d unknown critical extensions", n)
		}
		return nil
	}},
	{"signing_subject", "RFC 5280 4.1.2.6", func(l *linted) error {
		if l.profile.ca && bytes.Equal(l.cert.RawSubject, emptyName) {
			return errors.New("a signing certificate needs a subject")
		}
		return nil
	}},
	{"validity", "invariant 3", func(l *linted) error {
		c := l.cert
		switch {
		case !c.NotAfter.After(c.NotBefore):
			return fmt.Errorf("ends %s, not after it begins %s", c.NotAfter, c.NotBefore)
		case c.NotBefore.After(l.now):
			return fmt.Errorf("begins at %s, in the future", c.NotBefore)
		case c.NotAfter.After(l.issuer.notAfter):
			return fmt.Errorf("ends at %s, after its chain at %s", c.NotAfter, l.issuer.notAfter)
		case c.NotAfter.After(l.now.Add(l.profile.maxTTL)):
			return fmt.Errorf("ends at %s, later than the profile's %s from now", c.NotAfter, l.profile.maxTTL)
		}
		return nil
	}},
	{"what_was_asked", "invariant 2", func(l *linted) error {
		want := l.request.ID.String()
		if l.profile.ca {
			want = l.request.CA.Domain.URI()
		}
		if len(l.cert.URIs) == 1 && l.cert.URIs[0].String() != want {
			return fmt.Errorf("the ID is %s; asked for %s", l.cert.URIs[0], want)
		}
		if !trust.SameKey(l.cert.PublicKey, l.request.PublicKey) {
			return errors.New("the public key is not the one asked for")
		}
		if len(l.cert.DNSNames) != len(l.request.DNSNames) || len(l.cert.IPAddresses) != len(l.request.IPs) || len(l.cert.EmailAddresses) != 0 {
			return errors.New("names were added or lost")
		}
		return nil
	}},
}

type foundExtension struct{ critical bool }

func (l *linted) extension(oid asn1.ObjectIdentifier) *foundExtension {
	for _, e := range l.cert.Extensions {
		if e.Id.Equal(oid) {
			return &foundExtension{e.Critical}
		}
	}
	return nil
}

// run applies every lint and returns all that fail, each with its name and section.
func (l *linted) run() error {
	var errs []error
	for _, x := range lints {
		if err := x.check(l); err != nil {
			errs = append(errs, fmt.Errorf("lint %s (%s): %w", x.name, x.section, err))
		}
	}
	return errors.Join(errs...)
}
