// Package show owns how `chancery authority show` prints authorities: as text, as JSON whose shape is stable, and as PEM.
//
// It refuses to print a tainted root among those to trust.
package show

import (
	"crypto/x509"
	"fmt"
	"io"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

// authorityJSON is one authority in `authority show -o json`.
type authorityJSON struct {
	ID          string    `json:"id"` // subject key identifier
	Kind        string    `json:"kind"`
	State       string    `json:"state"`
	Generation  uint64    `json:"generation"`
	Subject     string    `json:"subject"`
	NotBefore   time.Time `json:"notBefore"`
	NotAfter    time.Time `json:"notAfter"`
	Certificate string    `json:"certificate"` // PEM
}

// domainJSON is one trust domain in `authority show -o json`.
type domainJSON struct {
	TrustDomain string          `json:"trustDomain"`
	Generation  uint64          `json:"generation"`
	Authorities []authorityJSON `json:"authorities"`
}

func domainsOf(resp *chanceryv1.GetAuthoritiesResponse) ([]domainJSON, error) {
	domains := []domainJSON{}
	for _, d := range resp.GetDomains() {
		dj := domainJSON{TrustDomain: d.GetTrustDomain(), Generation: d.GetGeneration(), Authorities: []authorityJSON{}}
		for _, a := range d.GetAuthorities() {
			cert, err := x509.ParseCertificate(a.GetCertificate())
			if err != nil {
				return nil, fmt.Errorf("reading authority %s: %w", a.GetId(), err)
			}
			dj.Authorities = append(dj.Authorities, authorityJSON{
				a.GetId(), a.GetKind(), a.GetState(), a.GetGeneration(), cert.Subject.String(), cert.NotBefore.UTC(), cert.NotAfter.UTC(),
				string(trust.EncodeCertificates(cert)),
			})
		}
		domains = append(domains, dj)
	}
	return domains, nil
}

// Print prints authorities as text, json or pem; the last has the roots only.
func Print(out io.Writer, format string, resp *chanceryv1.GetAuthoritiesResponse) error {
	domains, err := domainsOf(resp)
	if err != nil {
		return err
	}
	if format == "json" {
		return process.WriteJSON(out, map[string]any{"domains": domains})
	}
	for _, d := range domains {
		if format == "text" {
			fmt.Fprintf(out, "trust domain %s, bundle generation %d\n", d.TrustDomain, d.Generation)
		}
		for _, a := range d.Authorities {
			switch {
			case format == "text":
				fmt.Fprintf(out, "  %-6s  %-8s  %s  until %s  %s\n", a.Kind, a.State, a.ID, a.NotAfter.Format(time.RFC3339), process.Printable(a.Subject))
			case a.Kind == string(authority.KindRoot):
				fmt.Fprint(out, a.Certificate)
			}
		}
	}
	return nil
}
