package trust

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// MaxAliases bounds the trust domains that count as one.
const MaxAliases = 100

// clusterLocal stands, in Istio's principals, for whatever the own trust domain is.
const clusterLocal = "cluster.local"

// Aliases are the trust domains whose identities count as ours: the own one, its kin (both domains of a migration, and former ones) and
// trustDomainAliases. Naming, the principals of policies and checks of who calls ask this one value, so that they cannot differ. It is about
// names alone: which roots vouch for whom is the Bundle's (decision D10), and federation is no aliasing (D24). The zero value has no domains.
type Aliases struct {
	domains []Domain // the own first
	foreign []Domain
}

// NewAliases returns the own domain with others, in their order; one that occurs again is dropped.
func NewAliases(own Domain, others ...Domain) (Aliases, error) {
	if own.IsZero() {
		return Aliases{}, errors.New("aliases without a trust domain of their own")
	}
	a := Aliases{domains: []Domain{own}}
	for _, d := range others {
		if d.IsZero() {
			return Aliases{}, fmt.Errorf("an alias of %s is empty; it should be a trust domain like cluster.local", own)
		}
		if !a.Has(d) {
			a.domains = append(a.domains, d)
		}
	}
	if n := len(a.domains); n > MaxAliases {
		return Aliases{}, fmt.Errorf("%d trust domains count as %s; at most %d are allowed", n, own, MaxAliases)
	}
	return a, nil
}

// WithForeign says which trust domains are federated. None of them may count as ours, too (decision D24). Where one is named cluster.local,
// that name means it, and no longer our own domain.
func (a Aliases) WithForeign(foreign ...Domain) (Aliases, error) {
	for _, d := range foreign {
		if a.Has(d) {
			return Aliases{}, fmt.Errorf("trust domain %s is federated, and counts as %s, too: an alias's identities are ours, a federated domain's are not; take it out of one of the two", d, a.domains[0])
		}
	}
	return Aliases{domains: a.domains, foreign: slices.Clone(foreign)}, nil
}

// Own returns the own domain.
func (a Aliases) Own() Domain {
	if len(a.domains) == 0 {
		return Domain{}
	}
	return a.domains[0]
}

// All returns the domains, the own first. Callers must not change them.
func (a Aliases) All() []Domain { return slices.Clip(a.domains) }

// Has reports whether identities of the domain count as ours.
func (a Aliases) Has(d Domain) bool { return slices.Contains(a.domains, d) }

// Equivalent returns the IDs that count as the same identity: for one of ours its path in each of the domains, the own first; for any other
// the ID alone. What would be longer than an ID may be is left out.
func (a Aliases) Equivalent(id ID) []ID {
	if id.IsZero() || !a.Has(id.Domain()) {
		return []ID{id}
	}
	out := make([]ID, 0, len(a.domains))
	for _, d := range a.domains {
		if other := id.WithDomain(d); len(other.uri) <= MaxIDLen {
			out = append(out, other)
		}
	}
	return out
}

// Same reports whether two IDs count as one identity.
func (a Aliases) Same(x, y ID) bool {
	return x == y || !x.IsZero() && !y.IsZero() && x.Path() == y.Path() && a.Has(x.Domain()) && a.Has(y.Domain())
}

// Principals returns what a principal of a policy stands for, in Istio's form: TRUSTDOMAIN/ns/NS/sa/SA without a scheme, each part of which
// may have a wildcard. One whose domain is one of ours, or matches one, or is cluster.local, stands for all of ours; any other for itself. It is
// Istio's ReplaceTrustDomainAliases, but that a foreign cluster.local is no pointer to ours (decision D24).
func (a Aliases) Principals(pattern string) []string {
	domain, path, _ := strings.Cut(pattern, "/")
	if strings.Count(pattern, "/") != 4 || domain == "*" || !a.means(domain) {
		return []string{pattern}
	}
	out := make([]string, 0, len(a.domains))
	for _, d := range a.domains {
		p := d.name + "/" + path
		if hasWildSuffix(d.name, domain) {
			p = pattern // stays, as it matches that domain by itself
		}
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}

// means reports whether the domain of a principal is meant to be one of ours.
func (a Aliases) means(domain string) bool {
	if domain == clusterLocal {
		return !slices.Contains(a.foreign, Domain{clusterLocal}) && len(a.domains) > 0
	}
	return slices.ContainsFunc(a.domains, func(d Domain) bool {
		return d.name == domain || hasWildPrefix(d.name, domain) || hasWildSuffix(d.name, domain)
	})
}

// hasWildPrefix reports whether the pattern is "PREFIX*" and matches.
func hasWildPrefix(s, pattern string) bool {
	prefix, ok := strings.CutSuffix(pattern, "*")
	return ok && strings.HasPrefix(s, prefix)
}

// hasWildSuffix reports whether the pattern is "*SUFFIX" and matches.
func hasWildSuffix(s, pattern string) bool {
	suffix, ok := strings.CutPrefix(pattern, "*")
	return ok && strings.HasSuffix(s, suffix)
}

// Domains returns what the trust domains of a policy stand for: one that is ours, by its exact name, for all of ours; anything else for itself. As
// in Istio's ExpandTrustDomainAliases cluster.local is no pointer here, and what occurs twice is dropped.
func (a Aliases) Domains(values ...string) []string {
	out := make([]string, 0, len(values))
	add := func(s string) {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	for _, v := range values {
		if !slices.ContainsFunc(a.domains, func(d Domain) bool { return d.name == v }) {
			add(v)
			continue
		}
		for _, d := range a.domains {
			add(d.name)
		}
	}
	return out
}
