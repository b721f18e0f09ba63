package view

import (
	"crypto/x509"
	"slices"
	"strings"

	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"

	"github.com/chancery-project/chancery/sds/files"
	"github.com/chancery-project/chancery/sds/secret"
	"github.com/chancery-project/chancery/trust"
)

// Names of resources that every caller may ask for, and prefixes of families of names.
const (
	NameDefault    = "default"
	NameRoots      = "ROOTCA"
	NameAll        = "ALL"
	PrefixService  = "service:"
	PrefixFileCert = "file-cert:"
	PrefixFileRoot = "file-root:"
)

// Kind is the family of a resource name; it is the bounded label under which a name is counted.
type Kind string

const (
	KindDefault  Kind = "default"
	KindIdentity Kind = "identity"
	KindRoots    Kind = "ROOTCA"
	KindDomain   Kind = "trust_domain"
	KindAll      Kind = "ALL"
	KindService  Kind = "service"
	KindFileCert Kind = "file_cert"
	KindFileRoot Kind = "file_root"
	KindOther    Kind = "other"
)

// KindOf returns the family of a name.
func KindOf(name string) Kind {
	switch name {
	case NameDefault:
		return KindDefault
	case NameRoots:
		return KindRoots
	case NameAll:
		return KindAll
	}
	if rest, ok := strings.CutPrefix(name, "spiffe://"); ok {
		if strings.Contains(rest, "/") {
			return KindIdentity
		}
		return KindDomain
	}
	switch {
	case strings.HasPrefix(name, PrefixService):
		return KindService
	case strings.HasPrefix(name, PrefixFileCert):
		return KindFileCert
	case strings.HasPrefix(name, PrefixFileRoot):
		return KindFileRoot
	}
	return KindOther
}

// Validates reports whether resources of this kind are validation contexts, which say whom to trust.
func (k Kind) Validates() bool {
	switch k {
	case KindRoots, KindDomain, KindAll, KindService, KindFileRoot:
		return true
	}
	return false
}

// Standing is what a name means in a view.
type Standing int

const (
	Unknown Standing = iota // no such resource for this caller
	Pending                 // its turn comes: nothing has been issued yet, so a proxy is left to wait rather than told no
	Known
)

// Answer is what a view holds under a name. The version is that of the content, computed from public inputs without
// making the resource, so that streams can compare before anything is marshalled.
type Answer struct {
	Standing Standing
	Version  string
	Build    func() (*tlsv3.Secret, error)
	Identity *trust.Identity // whose chain and key it is; nil for all else
}

func known(version string, build func() (*tlsv3.Secret, error)) Answer {
	return Answer{Standing: Known, Version: version, Build: build}
}

// Answer looks a name up. Files are taken from the watcher.
func (v *View) Answer(f *files.Watcher, name string) Answer {
	switch k := KindOf(name); k {
	case KindDefault, KindIdentity:
		if id := v.identity(name); id != nil {
			return identityAnswer(id)
		}
		if len(v.Identities) == 0 {
			return Answer{Standing: Pending}
		}
	case KindRoots, KindDomain, KindAll, KindService:
		if v.Own() == nil {
			return Answer{Standing: Pending}
		}
		return contextAnswer(v, k, name)
	case KindFileCert, KindFileRoot:
		return fileAnswer(f, name)
	}
	return Answer{}
}

// identity returns the identity that a name stands for. Those of the same path in all of the authority's trust domains are one: a name in
// the old domain of a migration stands for what has taken its place.
func (v *View) identity(name string) *trust.Identity {
	for _, id := range v.Identities {
		if name == NameDefault || id.ID.String() == name {
			return id
		}
	}
	asked, err := trust.ParseID(name)
	if err != nil || v.Own().Of(asked.Domain()) == nil {
		return nil
	}
	for _, id := range v.Identities {
		if v.Own().Of(id.ID.Domain()) != nil && id.ID.WithDomain(asked.Domain()) == asked {
			return id
		}
	}
	return nil
}

func identityAnswer(id *trust.Identity) Answer {
	a := known(secret.Version("identity", RawOf(id.Chain)...), func() (*tlsv3.Secret, error) {
		return secret.Certificate(id.Chain, id.Key)
	})
	a.Identity = id
	return a
}

func contextAnswer(v *View, k Kind, name string) Answer {
	switch k {
	case KindAll:
		return allAnswer(v.trusted())
	case KindDomain:
		for _, b := range v.domains() {
			switch {
			case b.Domain().URI() != name:
			case v.isFormer(b):
				return NobodyAnswer
			case v.Own().Of(b.Domain()) == nil: // a plain context would take whatever its roots sign, such as names of ours (decision D24)
				return spiffeAnswer([]*trust.Bundle{b}, nil)
			default:
				return rootsAnswer(b.Roots(), b.CRLs(), nil)
			}
		}
		return Answer{}
	case KindService:
		return serviceAnswer(v, strings.TrimPrefix(name, PrefixService))
	}
	return rootsAnswer(v.Own().All(), v.Own().CRLs(), nil)
}

// IsService reports whether a name is one of a service, and which.
func IsService(name string) (service string, ok bool) {
	service, ok = strings.CutPrefix(name, PrefixService)
	ns, rest, slash := strings.Cut(service, "/")
	return service, ok && slash && ns != "" && rest != "" && !strings.Contains(rest, "/")
}

// parties are the identities that may serve a service, by what vouches for them.
type parties struct {
	own     []string        // of the own trust domains,
	foreign []string        // and of others,
	bundles []*trust.Bundle // whose bundles these are
}

// servedBy sorts the identities of a service. Of the own trust domains each stands for those of the same path in the others; of foreign
// ones of which nothing is known none counts.
func (v *View) servedBy(ids []trust.ID) (p parties) {
	own := v.Own()
	for _, id := range ids {
		if own.Of(id.Domain()) != nil {
			p.own = append(p.own, id.String(), id.WithDomain(own.Domain()).String())
			for _, k := range own.Kin() {
				if !v.isFormer(k) {
					p.own = append(p.own, id.WithDomain(k.Domain()).String())
				}
			}
			continue
		}
		i := slices.IndexFunc(v.Bundles, func(b *trust.Bundle) bool { return b.Domain() == id.Domain() && len(b.Roots()) > 0 })
		if i < 0 {
			continue
		}
		p.foreign = append(p.foreign, id.String())
		if !slices.Contains(p.bundles, v.Bundles[i]) {
			p.bundles = append(p.bundles, v.Bundles[i])
		}
	}
	slices.Sort(p.own)
	slices.Sort(p.foreign)
	p.own, p.foreign = slices.Compact(p.own), slices.Compact(p.foreign)
	return p
}

// serviceAnswer is a context that takes the identities of a service and nobody else. One without matchers would take every identity, so
// where nobody may serve it, it takes nobody.
//
// In a plain context each root vouches for each matcher. So that of a service with identities of the own trust domains has the own roots,
// and matchers for these alone; one with foreign identities only is the SPIFFE validator, which binds roots to domains, with matchers
// (decisions D23 and D24).
func serviceAnswer(v *View, service string) Answer {
	ids, known := v.Naming[service]
	if _, is := IsService(PrefixService + service); !known && v.Asks && is {
		return Answer{Standing: Pending}
	}
	if !known {
		return Answer{}
	}
	p := v.servedBy(ids)
	switch {
	case len(p.own) > 0:
		return rootsAnswer(v.Own().All(), v.Own().CRLs(), p.own)
	case len(p.foreign) > 0:
		return spiffeAnswer(p.bundles, p.foreign)
	}
	return NobodyAnswer
}

// LeftOut returns the identities of a service that its context does not take: those of foreign trust domains, where it has some of the own,
// and where nothing is known of their domain.
func (v *View) LeftOut(service string) (out []string) {
	if v.Own() == nil {
		return nil
	}
	p := v.servedBy(v.Naming[service])
	for _, id := range v.Naming[service] {
		text := id.String()
		switch {
		case v.Own().Of(id.Domain()) != nil || len(p.own) == 0 && slices.Contains(p.foreign, text):
		case v.isAlias(p, id):
		default:
			out = append(out, text)
		}
	}
	return out
}

// isAlias reports whether an identity is one of the own under the name of an alias, which servers list beside it: of a trust domain without roots, and
// of the path of one that is taken.
func (v *View) isAlias(p parties, id trust.ID) bool {
	return slices.Contains(p.own, id.WithDomain(v.Own().Domain()).String()) &&
		!slices.ContainsFunc(v.Bundles, func(b *trust.Bundle) bool { return b.Domain() == id.Domain() })
}

// rootsAnswer is a plain validation context: roots and CRLs and, for a service, its identities.
//
// ROOTCA and spiffe://TD carry no SAN matchers, and never may: Envoy joins this context with its cluster's
// default_validation_context by MergeFrom, which appends repeated fields, and matchers are alternatives. A matcher
// sent from here would not narrow the one in Envoy's configuration but widen it.
func rootsAnswer(roots []*x509.Certificate, crls *trust.CRLs, peers []string) Answer {
	parts := RawOf(roots)
	for _, p := range peers {
		parts = append(parts, []byte("san:"+p))
	}
	parts = appendCRLs(parts, crls)
	return known(secret.Version("roots", parts...), func() (*tlsv3.Secret, error) {
		return secret.Roots(roots, crls, peers), nil
	})
}

// AppendCRLs appends what stands for a bundle's CRLs; nothing where there are none.
func AppendCRLs(parts [][]byte, b *trust.Bundle) [][]byte { return appendCRLs(parts, b.CRLs()) }

func appendCRLs(parts [][]byte, c *trust.CRLs) [][]byte {
	if c == nil {
		return parts
	}
	sum := c.Sum()
	return append(parts, append([]byte("crls:"), sum[:]...))
}

func allAnswer(bundles []*trust.Bundle) Answer { return spiffeAnswer(bundles, nil) }

// spiffeAnswer is Envoy's SPIFFE validator, with matchers where there are any.
func spiffeAnswer(bundles []*trust.Bundle, peers []string) Answer {
	sorted := slices.SortedFunc(slices.Values(bundles), func(a, b *trust.Bundle) int {
		return strings.Compare(a.Domain().String(), b.Domain().String())
	})
	var parts [][]byte
	for _, b := range sorted {
		parts = append(parts, []byte("domain:"+b.Domain().String()))
		parts = append(parts, RawOf(b.Roots())...)
	}
	for _, p := range peers {
		parts = append(parts, []byte("san:"+p))
	}
	return known(secret.Version("all", parts...), func() (*tlsv3.Secret, error) {
		return secret.RootsByDomain(sorted, peers)
	})
}

// fileAnswer is the content of files that the name tells.
func fileAnswer(f *files.Watcher, name string) Answer {
	ref, ok := FileRef(name)
	if !ok {
		return Answer{}
	}
	c := f.Content(ref)
	if c == nil {
		return Answer{}
	}
	return known(secret.Version("file", c.Certificates), func() (*tlsv3.Secret, error) {
		if c.Key == nil {
			return secret.RootsPEM(c.Certificates), nil
		}
		return secret.CertificatePEM(c.Certificates, c.Key), nil
	})
}

// FileRef returns the files that a name of the form file-cert:CERT~KEY or file-root:CA tells; ok is false for others.
func FileRef(name string) (ref files.Ref, ok bool) {
	if ca, is := strings.CutPrefix(name, PrefixFileRoot); is {
		return files.Ref{Certificates: ca}, true
	}
	pair, is := strings.CutPrefix(name, PrefixFileCert)
	cert, key, both := strings.Cut(pair, "~")
	return files.Ref{Certificates: cert, Key: key}, is && both && key != ""
}

// NobodyVersion is the version of a context that trusts nobody.
const NobodyVersion = "nobody"

// NobodyAnswer is what a validation context becomes when its roots or its name go. Envoy ignores the removal of a
// secret, over delta as over state of the world, and would go on trusting the last roots it got; so it is first sent
// a context that no certificate satisfies, and only then told that the name is gone.
var NobodyAnswer = known(NobodyVersion, func() (*tlsv3.Secret, error) { return secret.Nobody(), nil })

// RawOf returns the DER bytes of certificates.
func RawOf(certs []*x509.Certificate) [][]byte {
	raw := make([][]byte, len(certs))
	for i, c := range certs {
		raw[i] = c.Raw
	}
	return raw
}
