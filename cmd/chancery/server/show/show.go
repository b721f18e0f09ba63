// Package show owns what `chancery authority show` says of authorities, and how it prints them: as text, as JSON whose shape is stable, and as PEM.
//
// It refuses to leave out a tainted root, and says that it is: it is trusted until it has left the bundle.
package show

import (
	"crypto/x509"
	"fmt"
	"io"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

// Describe returns the public form of an authority.
func Describe(a *authority.Authority) (*chanceryv1.Authority, error) {
	cert, err := a.X509()
	if err != nil {
		return nil, err
	}
	out := &chanceryv1.Authority{Id: a.ID, Kind: string(a.Kind), State: string(a.State), Generation: a.Generation, Certificate: cert.Raw}
	if a.Tainted != nil {
		out.Tainted = timestamppb.New(*a.Tainted)
	}
	return out, nil
}

// authorityJSON is one authority in `authority show -o json`.
type authorityJSON struct {
	ID          string     `json:"id"` // subject key identifier
	Kind        string     `json:"kind"`
	State       string     `json:"state"`
	Generation  uint64     `json:"generation"`
	Subject     string     `json:"subject"`
	NotBefore   time.Time  `json:"notBefore"`
	NotAfter    time.Time  `json:"notAfter"`
	Certificate string     `json:"certificate"`       // PEM
	Tainted     *time.Time `json:"tainted,omitempty"` // since when others may know its key
}

// domainJSON is one trust domain in `authority show -o json`.
type domainJSON struct {
	TrustDomain string          `json:"trustDomain"`
	Generation  uint64          `json:"generation"`
	BundleKey   string          `json:"bundleKey,omitempty"` // fingerprint of the key that agents pin
	Authorities []authorityJSON `json:"authorities"`
}

func domainsOf(resp *chanceryv1.GetAuthoritiesResponse) ([]domainJSON, error) {
	domains := []domainJSON{}
	for _, d := range resp.GetDomains() {
		dj := domainJSON{TrustDomain: d.GetTrustDomain(), Generation: d.GetGeneration(), Authorities: []authorityJSON{}}
		if key := d.GetBundleKey(); len(key) > 0 {
			dj.BundleKey = trust.KeyFingerprint(key)
		}
		for _, a := range d.GetAuthorities() {
			cert, err := x509.ParseCertificate(a.GetCertificate())
			if err != nil {
				return nil, fmt.Errorf("reading authority %s: %w", a.GetId(), err)
			}
			one := authorityJSON{
				ID: a.GetId(), Kind: a.GetKind(), State: a.GetState(), Generation: a.GetGeneration(), Subject: cert.Subject.String(),
				NotBefore: cert.NotBefore.UTC(), NotAfter: cert.NotAfter.UTC(), Certificate: string(trust.EncodeCertificates(cert)),
			}
			if t := a.GetTainted(); t != nil {
				since := t.AsTime()
				one.Tainted = &since
			}
			dj.Authorities = append(dj.Authorities, one)
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
			if d.BundleKey != "" {
				fmt.Fprintf(out, "  bundle key %s\n", d.BundleKey)
			}
		}
		for _, a := range d.Authorities {
			switch {
			case format == "text":
				tainted := ""
				if a.Tainted != nil {
					tainted = "  TAINTED since " + a.Tainted.Format(time.RFC3339)
				}
				fmt.Fprintf(out, "  %-6s  %-8s  %s  until %s  %s%s\n", a.Kind, a.State, a.ID, a.NotAfter.Format(time.RFC3339), process.Printable(a.Subject), tainted)
			case a.Kind == string(authority.KindRoot):
				fmt.Fprint(out, a.Certificate)
			}
		}
	}
	return nil
}
