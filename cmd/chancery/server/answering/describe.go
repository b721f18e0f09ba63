package answering

import (
	"maps"
	"slices"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
)

// Describe turns a document into its public form, domains by name.
func Describe(d *authority.Document) (*chanceryv1.GetAuthoritiesResponse, error) {
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
