package answering

import (
	"maps"
	"slices"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	printed "github.com/chancery-project/chancery/cmd/chancery/server/show"
	"github.com/chancery-project/chancery/trust"
)

// Describe turns a document into its public form, domains by name.
func Describe(d *authority.Document) (*chanceryv1.GetAuthoritiesResponse, error) {
	resp := new(chanceryv1.GetAuthoritiesResponse)
	for _, name := range slices.Sorted(maps.Keys(d.Domains)) {
		state := d.Domains[name]
		if td, err := trust.ParseDomain(name); err == nil { // what the line is now
			name = state.Present(td).String()
		}
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
