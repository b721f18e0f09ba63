package server

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

// show prints the authorities: as a running server says, or from the store if no server holds it (decision D14).
func show(ctx context.Context, s *Settings, format string, out io.Writer) error {
	resp, err := readAuthorities(ctx, s)
	if errors.Is(err, store.ErrLocked) {
		resp, err = askAdmin(ctx, s.AdminSocket())
	}
	if err != nil {
		return s.explainStore(err)
	}
	return printAuthorities(out, format, resp)
}

func readAuthorities(ctx context.Context, s *Settings) (*chanceryv1.GetAuthoritiesResponse, error) {
	st, err := store.OpenSQLite(ctx, s.State.SQLite)
	if err != nil {
		return nil, err
	}
	defer st.Close()
	data, version, err := st.Load(ctx)
	if err != nil {
		return nil, err
	}
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	if err != nil {
		return nil, err
	}
	doc, err := authority.DecodeDocument(data, version, sealer)
	if err != nil {
		return nil, err
	}
	return describe(doc)
}

// describe turns a document into its public form, domains by name.
func describe(d *authority.Document) (*chanceryv1.GetAuthoritiesResponse, error) {
	resp := new(chanceryv1.GetAuthoritiesResponse)
	for _, name := range slices.Sorted(maps.Keys(d.Domains)) {
		state := d.Domains[name]
		out := &chanceryv1.DomainAuthorities{TrustDomain: name, Generation: state.Generation}
		for i := range state.Authorities {
			a := &state.Authorities[i]
			cert, err := a.X509()
			if err != nil {
				return nil, err
			}
			out.Authorities = append(out.Authorities, &chanceryv1.Authority{
				Id: a.ID, Kind: string(a.Kind), State: string(a.State), Generation: a.Generation, Certificate: cert.Raw,
			})
		}
		resp.Domains = append(resp.Domains, out)
	}
	return resp, nil
}

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

func printAuthorities(out io.Writer, format string, resp *chanceryv1.GetAuthoritiesResponse) error {
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
			case a.Kind == string(authority.KindRoot) && a.State != string(authority.StateTainted):
				fmt.Fprint(out, a.Certificate)
			}
		}
	}
	return nil
}
