package sds

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
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

// kind is the family of a resource name; it is the bounded label under which a name is counted.
type kind string

const (
	kindDefault  kind = "default"
	kindIdentity kind = "identity"
	kindRoots    kind = "ROOTCA"
	kindDomain   kind = "trust_domain"
	kindAll      kind = "ALL"
	kindService  kind = "service"
	kindFileCert kind = "file_cert"
	kindFileRoot kind = "file_root"
	kindOther    kind = "other"
)

func kindOf(name string) kind {
	switch name {
	case NameDefault:
		return kindDefault
	case NameRoots:
		return kindRoots
	case NameAll:
		return kindAll
	}
	if rest, ok := strings.CutPrefix(name, "spiffe://"); ok {
		if strings.Contains(rest, "/") {
			return kindIdentity
		}
		return kindDomain
	}
	switch {
	case strings.HasPrefix(name, PrefixService):
		return kindService
	case strings.HasPrefix(name, PrefixFileCert):
		return kindFileCert
	case strings.HasPrefix(name, PrefixFileRoot):
		return kindFileRoot
	}
	return kindOther
}

// validates reports whether resources of this kind are validation contexts, which say whom to trust.
func (k kind) validates() bool {
	switch k {
	case kindRoots, kindDomain, kindAll, kindService, kindFileRoot:
		return true
	}
	return false
}

// standing is what a name means in a view.
type standing int

const (
	unknown standing = iota // no such resource for this caller
	pending                 // its turn comes: nothing has been issued yet, so a proxy is left to wait rather than told no
	known
)

// answer is what a view holds under a name. The version is that of the content, computed from public inputs without
// making the resource, so that streams can compare before anything is marshalled.
type answer struct {
	standing standing
	version  string
	build    func() (*tlsv3.Secret, error)
}

// answerFor looks a name up in a view.
func (s *Server) answerFor(v *View, name string) answer {
	switch k := kindOf(name); k {
	case kindDefault, kindIdentity:
		for _, id := range v.Identities {
			if k == kindDefault || id.ID.String() == name {
				return identityAnswer(id)
			}
		}
		if len(v.Identities) == 0 {
			return answer{standing: pending}
		}
	case kindRoots, kindDomain, kindAll, kindService:
		if v.own() == nil {
			return answer{standing: pending}
		}
		return contextAnswer(v, k, name)
	case kindFileCert, kindFileRoot:
		return s.fileAnswer(name)
	}
	return answer{}
}

func identityAnswer(id *trust.Identity) answer {
	return answer{known, secret.Version("identity", rawOf(id.Chain)...), func() (*tlsv3.Secret, error) {
		return secret.Certificate(id.Chain, id.Key)
	}}
}

func contextAnswer(v *View, k kind, name string) answer {
	switch k {
	case kindAll:
		return allAnswer(v.Bundles)
	case kindDomain:
		for _, b := range v.Bundles {
			if b.Domain().URI() == name {
				return rootsAnswer(b, nil)
			}
		}
		return answer{}
	case kindService:
		ids := v.Naming[strings.TrimPrefix(name, PrefixService)]
		if len(ids) == 0 { // a context without matchers would accept every identity of the domain
			return answer{}
		}
		return rootsAnswer(v.own(), ids)
	}
	return rootsAnswer(v.own(), nil)
}

// rootsAnswer is a plain validation context: the roots and CRLs of one domain and, for a service, its identities.
//
// ROOTCA and spiffe://TD carry no SAN matchers, and never may: Envoy joins this context with its cluster's
// default_validation_context by MergeFrom, which appends repeated fields, and matchers are alternatives. A matcher
// sent from here would not narrow the one in Envoy's configuration but widen it.
func rootsAnswer(b *trust.Bundle, ids []trust.ID) answer {
	peers := make([]string, len(ids))
	for i, id := range ids {
		peers[i] = id.String()
	}
	slices.Sort(peers)
	peers = slices.Compact(peers)
	parts := rawOf(b.Roots())
	for _, p := range peers {
		parts = append(parts, []byte("san:"+p))
	}
	parts = appendCRLs(parts, b)
	return answer{known, secret.Version("roots", parts...), func() (*tlsv3.Secret, error) {
		return secret.Roots(b, peers), nil
	}}
}

// appendCRLs appends what stands for a bundle's CRLs; nothing where there are none.
func appendCRLs(parts [][]byte, b *trust.Bundle) [][]byte {
	if b.CRLs() == nil {
		return parts
	}
	sum := b.CRLs().Sum()
	return append(parts, append([]byte("crls:"), sum[:]...))
}

func allAnswer(bundles []*trust.Bundle) answer {
	sorted := slices.SortedFunc(slices.Values(bundles), func(a, b *trust.Bundle) int {
		return strings.Compare(a.Domain().String(), b.Domain().String())
	})
	var parts [][]byte
	for _, b := range sorted {
		parts = append(parts, []byte("domain:"+b.Domain().String()))
		parts = append(parts, rawOf(b.Roots())...)
	}
	return answer{known, secret.Version("all", parts...), func() (*tlsv3.Secret, error) {
		return secret.RootsByDomain(sorted)
	}}
}

// fileAnswer is the content of files that the name tells.
func (s *Server) fileAnswer(name string) answer {
	ref, ok := fileRef(name)
	if !ok {
		return answer{}
	}
	c := s.files.Content(ref)
	if c == nil {
		return answer{}
	}
	return answer{known, secret.Version("file", c.Certificates), func() (*tlsv3.Secret, error) {
		if c.Key == nil {
			return secret.RootsPEM(c.Certificates), nil
		}
		return secret.CertificatePEM(c.Certificates, c.Key), nil
	}}
}

// fileRef returns the files that a name of the form file-cert:CERT~KEY or file-root:CA tells; ok is false for others.
func fileRef(name string) (ref files.Ref, ok bool) {
	if ca, is := strings.CutPrefix(name, PrefixFileRoot); is {
		return files.Ref{Certificates: ca}, true
	}
	pair, is := strings.CutPrefix(name, PrefixFileCert)
	cert, key, both := strings.Cut(pair, "~")
	return files.Ref{Certificates: cert, Key: key}, is && both && key != ""
}

// nobodyVersion is the version of a context that trusts nobody.
const nobodyVersion = "nobody"

// nobodyAnswer is what a validation context becomes when its roots or its name go. Envoy ignores the removal of a
// secret, over delta as over state of the world, and would go on trusting the last roots it got; so it is first sent
// a context that no certificate satisfies, and only then told that the name is gone.
var nobodyAnswer = answer{known, nobodyVersion, func() (*tlsv3.Secret, error) { return secret.Nobody(), nil }}

func rawOf(certs []*x509.Certificate) [][]byte {
	raw := make([][]byte, len(certs))
	for i, c := range certs {
		raw[i] = c.Raw
	}
	return raw
}

// versionOf names a set of resources by their names and versions.
func versionOf(rs []*secret.Resource) string {
	if len(rs) == 1 {
		return rs[0].Version
	}
	h := sha256.New()
	for _, r := range rs {
		fmt.Fprintf(h, "%q %s\n", r.Name, r.Version)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}
