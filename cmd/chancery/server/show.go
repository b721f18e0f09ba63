package server

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	printed "github.com/chancery-project/chancery/cmd/chancery/server/show"
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
	return printed.Print(out, format, resp)
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
