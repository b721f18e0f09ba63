package federating

import (
	"fmt"
	"time"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/federation"
)

// RelationshipConfig says where the bundle of one foreign trust domain is got.
type RelationshipConfig struct {
	// TrustDomain is the foreign trust domain. Required. Its roots vouch for its own identities, and nobody else's.
	TrustDomain string `json:"trustDomain"`
	// URL is that of its bundle endpoint, https://... Required. Redirects are followed to such URLs only.
	URL string `json:"url"`
	// Profile is how the endpoint proves itself: https_web (a certificate for the host name) or https_spiffe (an SVID). Required.
	Profile string `json:"profile"`
	// Roots is a PEM file of those that vouch for the endpoint's certificate, with https_web. It is read for each fetch. Default: the system's.
	// Who can write it can be the endpoint, and so anybody in the foreign trust domain.
	Roots string `json:"roots,omitempty"`
	// EndpointID is the SPIFFE ID that the endpoint must prove. Required with https_spiffe. One of the foreign domain itself is verified by
	// the bundle that came last; one of another domain by the bundle of that, which must be our own or federated, too.
	EndpointID string `json:"endpointID,omitempty"`
	// Bootstrap is a file with a bundle of the foreign domain, as SPIFFE has it (JSON), to verify the endpoint by before the first fetch, with
	// https_spiffe and an EndpointID of that domain. Default: one that was taken with `chancery trust import`. Once a bundle is stored it counts
	// no more. Who can write it until then can be anybody in the foreign trust domain.
	Bootstrap string `json:"bootstrap,omitempty"`
}

// EndpointConfig is the bundle endpoint, where others get this trust domain's roots.
type EndpointConfig struct {
	// Listen is its HTTPS address, host:port. Required. Port 0: the system picks one; see addrFile.
	Listen string `json:"listen"`
	// Profile is how it proves itself: https_web (Certificate and Key) or https_spiffe (the server's own SVID, spiffe://TD/chancery/server).
	// Required.
	Profile string `json:"profile"`
	// Certificate is a PEM file with the chain for the host name that others use, with https_web. It is read again when it changes.
	Certificate string `json:"certificate,omitempty"`
	// Key is the PEM file of its private key. Who can read it can show others any roots.
	Key string `json:"key,omitempty"`
	// RefreshHint is how often others are asked to come: 1m to 24h. A rotation of the root waits five times as long before it signs under the
	// new one. Default 5m.
	RefreshHint string `json:"refreshHint,omitempty"`
}

// Paths are the fields that name files.
func (c *RelationshipConfig) Paths() []*string { return []*string{&c.Roots, &c.Bootstrap} }

// Paths are the fields that name files; of no endpoint none.
func (c *EndpointConfig) Paths() []*string {
	if c == nil {
		return nil
	}
	return []*string{&c.Certificate, &c.Key}
}

// Bounds of refreshHint.
const (
	defaultHint  = federation.DefaultEvery
	shortestHint = time.Minute
	longestHint  = 24 * time.Hour
	// periods is how many refresh hints a new root is shown before it signs (decision D3).
	periods = 5
)

// Place is a config that was checked: with whom a server federates, and how it shows its own roots.
type Place struct {
	relations []relation
	endpoint  *EndpointConfig // nil: there is none
	hint      time.Duration
}

type relation struct {
	federation.Relationship
	roots, bootstrap string // files; empty for none
}

// Parse checks a config, for a server whose own domain and aliases of it are given: what is ours cannot be federated (decision D24).
func Parse(all []RelationshipConfig, e *EndpointConfig, own trust.Domain, aliases []trust.Domain) (*Place, error) {
	if len(all) > federation.MaxRelationships {
		return nil, fmt.Errorf("federation has %d entries; at most %d are allowed", len(all), federation.MaxRelationships)
	}
	p := &Place{endpoint: e}
	seen := map[trust.Domain]int{}
	for i := range all {
		field := fmt.Sprintf("federation[%d]", i)
		r, err := parseRelation(&all[i])
		if err != nil {
			return nil, fmt.Errorf("%s.%w", field, err)
		}
		if first, twice := seen[r.Domain]; twice {
			return nil, fmt.Errorf("%s.trustDomain: %s is that of federation[%d] already; a trust domain has one bundle", field, r.Domain, first)
		}
		seen[r.Domain] = i
		if r.Domain == own {
			return nil, fmt.Errorf("%s.trustDomain: %s is our own; name a foreign one", field, own)
		}
		for k, a := range aliases {
			if r.Domain == a {
				return nil, fmt.Errorf("%s.trustDomain: %s is trustDomainAliases[%d], too; identities of an alias count as ours and have no roots of their own, "+
					"those of a federated domain do not: it should be in one of both (decision D24)", field, a, k)
			}
		}
		p.relations = append(p.relations, r)
	}
	return p, p.parseEndpoint()
}

func parseRelation(c *RelationshipConfig) (r relation, err error) {
	r = relation{Relationship: federation.Relationship{URL: c.URL, Profile: federation.Profile(c.Profile)}, roots: c.Roots, bootstrap: c.Bootstrap}
	if c.TrustDomain != "" { // else Check says that it is missing
		if r.Domain, err = trust.ParseDomain(c.TrustDomain); err != nil {
			return r, fmt.Errorf("trustDomain: %w", err)
		}
	}
	if c.EndpointID != "" {
		if r.EndpointID, err = trust.ParseID(c.EndpointID); err != nil {
			return r, fmt.Errorf("endpointID: %w", err)
		}
	}
	if err := r.Check(); err != nil {
		return r, err
	}
	switch {
	case c.Roots != "" && r.Profile != federation.Web:
		return r, fmt.Errorf("roots: with %s the endpoint is verified by the bundle of %s; leave roots out, or use %s", r.Profile, r.EndpointID.Domain(), federation.Web)
	case c.Bootstrap != "" && !r.SelfServing():
		return r, fmt.Errorf("bootstrap: only an endpoint with %s and an endpointID of %s is verified by that domain's own bundle; leave bootstrap out", federation.SPIFFE, r.Domain)
	}
	return r, nil
}

func (p *Place) parseEndpoint() (err error) {
	c := p.endpoint
	if c == nil {
		return nil
	}
	if c.Listen == "" {
		return fmt.Errorf("bundleEndpoint.listen is missing; name an address such as 0.0.0.0:8444")
	}
	if err := process.CheckAddress("bundleEndpoint.listen", c.Listen); err != nil {
		return err
	}
	files := c.Certificate != "" || c.Key != ""
	switch profile := federation.Profile(c.Profile); {
	case profile == "":
		return fmt.Errorf("bundleEndpoint.profile is missing; it is %s with a certificate of a public CA, %s with the server's own SVID", federation.Web, federation.SPIFFE)
	case profile != federation.Web && profile != federation.SPIFFE:
		return fmt.Errorf("bundleEndpoint.profile: %.40q is not known; it should be %s or %s", c.Profile, federation.Web, federation.SPIFFE)
	case profile == federation.Web && (c.Certificate == "" || c.Key == ""):
		return fmt.Errorf("bundleEndpoint: with %s, both certificate and key should name a file", federation.Web)
	case profile == federation.SPIFFE && files:
		return fmt.Errorf("bundleEndpoint: with %s the server shows its own SVID; leave certificate and key out", federation.SPIFFE)
	}
	if p.hint, err = process.Duration("bundleEndpoint.refreshHint", c.RefreshHint); err != nil {
		return err
	}
	switch {
	case c.RefreshHint == "":
		p.hint = defaultHint
	case p.hint < shortestHint || p.hint > longestHint || p.hint%time.Second != 0:
		return fmt.Errorf("bundleEndpoint.refreshHint: %s should be between %s and %s, in whole seconds; 5m is usual", p.hint, shortestHint, longestHint)
	}
	return nil
}

// Domains returns those that are federated.
func (p *Place) Domains() (all []trust.Domain) {
	for i := range p.relations {
		all = append(all, p.relations[i].Domain)
	}
	return all
}

// Readers is how long those who federate need to get a new root (decision D3): 0 if nobody can, for want of an endpoint.
func (p *Place) Readers() time.Duration {
	if p.endpoint == nil {
		return 0
	}
	return periods * p.hint
}

// Files are those that the config names, for a check that each has one use.
func (p *Place) Files() (all []process.File) {
	for i, r := range p.relations {
		all = append(all, process.File{Field: fmt.Sprintf("federation[%d].roots", i), Path: r.roots}, process.File{Field: fmt.Sprintf("federation[%d].bootstrap", i), Path: r.bootstrap})
	}
	if e := p.endpoint; e != nil {
		all = append(all, process.File{Field: "bundleEndpoint.certificate", Path: e.Certificate}, process.File{Field: "bundleEndpoint.key", Path: e.Key})
	}
	return all
}
