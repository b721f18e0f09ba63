package server

import (
	"context"
	"io"
	"maps"
	"slices"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	printed "github.com/chancery-project/chancery/cmd/chancery/server/show"
)

// show prints the authorities: as a running server says, or from the store if none runs here (decision D14).
func show(ctx context.Context, s *Settings, format string, out io.Writer) error {
	var resp *chanceryv1.GetAuthoritiesResponse
	err := s.EitherWay(ctx, func() error {
		st, err := s.OpenState(ctx)
		if err != nil {
			return err
		}
		defer st.Store.Close()
		resp, err = describe(st.Document)
		return err
	}, func(ctx context.Context, c chanceryv1.AdminClient) (err error) {
		resp, err = c.GetAuthorities(ctx, &chanceryv1.GetAuthoritiesRequest{})
		return err
	})
	if err != nil {
		return err
	}
	return printed.Print(out, format, resp)
}

// describe turns a document into its public form, domains by name.
func describe(d *authority.Document) (*chanceryv1.GetAuthoritiesResponse, error) {
	resp := new(chanceryv1.GetAuthoritiesResponse)
	for _, name := range slices.Sorted(maps.Keys(d.Domains)) {
		state := d.Domains[name]
		out := &chanceryv1.DomainAuthorities{TrustDomain: name, Generation: state.Generation, BundleKey: state.PublicBundleKey()}
		for i := range state.Authorities {
			one, err := printed.Describe(&state.Authorities[i])
			if err != nil {
				return nil, err
			}
			out.Authorities = append(out.Authorities, one)
		}
		resp.Domains = append(resp.Domains, out)
	}
	return resp, nil
}
