package view

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"slices"
	"time"

	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"

	"github.com/chancery-project/chancery/sds/secret"
	"github.com/chancery-project/chancery/trust"
)

// lastPart is the part of an SVID's life at whose beginning it does not count as working any more, where another one waits.
const lastPart = 10

// SVIDVersion is the version of what FetchX509SVID sends; empty while there is nothing to send.
func SVIDVersion(v *View) string {
	if len(v.Identities) == 0 {
		return ""
	}
	var parts [][]byte
	for i, id := range v.Identities {
		parts = append(parts, []byte("svid:"+v.Hint(i)))
		parts = append(parts, RawOf(id.Chain)...)
		parts = AppendCRLs(append(parts, v.BundleOf(id).DER()), v.BundleOf(id))
	}
	return secret.Version("svids", append(parts, []byte(BundlesVersion(v)))...)
}

// SVIDResponse is what FetchX509SVID sends.
func SVIDResponse(v *View) (*workload.X509SVIDResponse, error) {
	resp := &workload.X509SVIDResponse{FederatedBundles: make(map[string][]byte), Crl: crlsOf(v)}
	for _, b := range v.trusted() {
		resp.FederatedBundles[b.Domain().URI()] = trust.ConcatDER(secret.RootsOf(b))
	}
	for i, id := range v.Identities {
		key, err := x509.MarshalPKCS8PrivateKey(id.Key)
		if err != nil {
			return nil, fmt.Errorf("encoding private key of %s: %w", id.ID, err)
		}
		own := v.BundleOf(id)
		resp.Svids = append(resp.Svids, &workload.X509SVID{
			SpiffeId:    id.ID.String(),
			X509Svid:    trust.ConcatDER(id.Chain),
			X509SvidKey: key,
			Bundle:      trust.ConcatDER(secret.RootsOf(own)),
			Hint:        v.Hint(i),
		})
		delete(resp.FederatedBundles, own.Domain().URI())
	}
	return resp, nil
}

// crlsOf returns the CRLs of all domains; kin share theirs. The Workload API has one list for all of them.
func crlsOf(v *View) [][]byte {
	var out [][]byte
	for _, b := range v.Bundles {
		out = append(out, b.CRLs().DER()...)
	}
	return out
}

// BundlesVersion is the version of what FetchX509Bundles sends; empty while there is nothing to send.
func BundlesVersion(v *View) string {
	if len(v.Bundles) == 0 {
		return ""
	}
	var parts [][]byte
	for _, b := range v.trusted() {
		parts = AppendCRLs(append(parts, []byte(b.Domain().URI()), b.DER()), b)
	}
	return secret.Version("bundles", parts...)
}

// BundlesResponse is what FetchX509Bundles sends.
func BundlesResponse(v *View) (*workload.X509BundlesResponse, error) {
	resp := &workload.X509BundlesResponse{Bundles: make(map[string][]byte, len(v.Bundles)), Crl: crlsOf(v)}
	for _, b := range v.trusted() {
		resp.Bundles[b.Domain().URI()] = trust.ConcatDER(secret.RootsOf(b))
	}
	return resp, nil
}

// WorkloadName is the name of an SVID of the Workload API in a table of consumers: its own, for a process may have the same one over
// SDS.
func WorkloadName(id *trust.Identity) string { return "x509:" + id.ID.String() }

// WorkloadVersion is the version of such an SVID.
func WorkloadVersion(id *trust.Identity) string {
	return secret.Version("identity", RawOf(id.Chain)...)
}

// HasRoot reports whether a bundle, or one of its kin, has the root with a subject key identifier.
func HasRoot(b *trust.Bundle, id []byte) bool {
	return b != nil && hasRoot(b.All(), id)
}

// StillWorks reports whether peers that have the bundle take an SVID, and will for a while. Only the roots of its own trust domain vouch
// for it.
func StillWorks(chain []*x509.Certificate, b *trust.Bundle, now time.Time) bool {
	leaf := chain[0]
	id, err := trust.LeafID(leaf)
	if err != nil || b.Of(id.Domain()) == nil {
		return false
	}
	margin := leaf.NotAfter.Sub(leaf.NotBefore) / lastPart
	return now.Before(leaf.NotAfter.Add(-margin)) && hasRoot(b.Of(id.Domain()).Roots(), chain[len(chain)-1].AuthorityKeyId) && b.CRLs().Check(leaf) == nil
}

func hasRoot(roots []*x509.Certificate, id []byte) bool {
	return slices.ContainsFunc(roots, func(r *x509.Certificate) bool { return bytes.Equal(r.SubjectKeyId, id) })
}
