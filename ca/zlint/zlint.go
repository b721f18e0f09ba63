// Package zlint owns the RFC lints of the zlint project: which of them count, and what a finding reads like.
//
// They cost as much as an issuance does, so nothing here runs between a request and its answer (invariant 1): package ca
// runs them when profiles and issuers are loaded, on a sample of what is issued, and before a ceremony.
//
// It refuses to fix anything: each finding, a warning or notice too, is an error.
package zlint

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	zx509 "github.com/zmap/zcrypto/x509"
	"github.com/zmap/zlint/v3"
	"github.com/zmap/zlint/v3/lint"
)

var rfcLints = sync.OnceValues(func() (lint.Registry, error) {
	return lint.GlobalRegistry().Filter(lint.FilterOptions{
		IncludeSources: lint.SourceList{lint.RFC5280, lint.RFC5480, lint.RFC5891, lint.RFC8813},
		// RFC 5280 wants the host of a URI to be a fully qualified domain name or an address (section 4.2.1.6). A trust domain stands there, which SPIFFE-ID
		// (section 2.1) lets be any name, such as "prod"; and nobody looks it up. Package ca/lint holds it to that standard.
		ExcludeNames: []string{"e_ext_san_uri_host_not_fqdn_or_ip"},
	})
})

// Certificate returns an error that names each RFC lint that a certificate in DER fails or is warned of.
func Certificate(der []byte) error {
	registry, err := rfcLints()
	if err != nil {
		return fmt.Errorf("selecting RFC lints: %w", err)
	}
	cert, err := zx509.ParseCertificate(der)
	if err != nil {
		return fmt.Errorf("parsing certificate for zlint: %w", err)
	}
	return findings(zlint.LintCertificateEx(cert, registry))
}

// CRL does the same for a CRL.
func CRL(der []byte) error {
	registry, err := rfcLints()
	if err != nil {
		return fmt.Errorf("selecting RFC lints: %w", err)
	}
	crl, err := zx509.ParseRevocationList(der)
	if err != nil {
		return fmt.Errorf("parsing CRL for zlint: %w", err)
	}
	return findings(zlint.LintRevocationListEx(crl, registry))
}

func findings(set *zlint.ResultSet) error {
	var failed []string
	for name, r := range set.Results {
		if r.Status > lint.Pass {
			failed = append(failed, strings.TrimSpace(fmt.Sprintf("%s (%s) %s", name, r.Status, r.Details)))
		}
	}
	if len(failed) == 0 {
		return nil
	}
	slices.Sort(failed)
	return errors.New("zlint: " + strings.Join(failed, "; "))
}
