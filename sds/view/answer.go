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
		for _, id := range v.Identities {
			if k == KindDefault || id.ID.String() == name {
				return identityAnswer(id)
			}
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
		return allAnswer(v.Bundles)
	case KindDomain:
		for _, b := range v.Bundles {
			if b.Domain().URI() == name {
				return rootsAnswer(b, nil)
			}
		}
		return Answer{}
	case KindService:
		ids := v.Naming[strings.TrimPrefix(name, PrefixService)]
		if len(ids) == 0 { // a context without matchers would accept every identity of the domain
			return Answer{}
		}
		return rootsAnswer(v.Own(), ids)
	}
	return rootsAnswer(v.Own(), nil)
}

// rootsAnswer is a plain validation context: the roots and CRLs of one domain and, for a service, its identities.
//
// ROOTCA and spiffe://TD carry no SAN matchers, and never may: Envoy joins this context with its cluster's
// default_validation_context by MergeFrom, which appends repeated fields, and matchers are alternatives. A matcher
// sent from here would not narrow the one in Envoy's configuration but widen it.
func rootsAnswer(b *trust.Bundle, ids []trust.ID) Answer {
	peers := make([]string, len(ids))
	for i, id := range ids {
		peers[i] = id.String()
	}
	slices.Sort(peers)
	peers = slices.Compact(peers)
	parts := RawOf(b.Roots())
	for _, p := range peers {
		parts = append(parts, []byte("san:"+p))
	}
	parts = AppendCRLs(parts, b)
	return known(secret.Version("roots", parts...), func() (*tlsv3.Secret, error) {
		return secret.Roots(b, peers), nil
	})
}

// AppendCRLs appends what stands for a bundle's CRLs; nothing where there are none.
func AppendCRLs(parts [][]byte, b *trust.Bundle) [][]byte {
	if b.CRLs() == nil {
		return parts
	}
	sum := b.CRLs().Sum()
	return append(parts, append([]byte("crls:"), sum[:]...))
}

func allAnswer(bundles []*trust.Bundle) Answer {
	sorted := slices.SortedFunc(slices.Values(bundles), func(a, b *trust.Bundle) int {
		return strings.Compare(a.Domain().String(), b.Domain().String())
	})
	var parts [][]byte
	for _, b := range sorted {
		parts = append(parts, []byte("domain:"+b.Domain().String()))
		parts = append(parts, RawOf(b.Roots())...)
	}
	return known(secret.Version("all", parts...), func() (*tlsv3.Secret, error) {
		return secret.RootsByDomain(sorted)
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
