// Package publish owns what is published of an authority's roots for those who read them and cannot acknowledge: the contents, the names in
// Kubernetes, and when which of two ClusterTrustBundles gets a new set. trust/publish/kube writes them.
//
// Published are the authority's own roots only, both domains' during a migration: whoever reads them has one flat pool, so a federated
// domain's roots in it would vouch for our names (decision D24). It refuses to publish nothing: readers would trust nobody, or, of an empty
// file, anybody.
package publish

import (
	"fmt"
	"strings"
	"time"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// Contents are the roots of one moment.
type Contents struct {
	Generation uint64
	Roots      string // PEM, of the authority's domains
	Bundle     string // of the present domain, as a SPIFFE bundle
}

// Of returns what is published of a bundle. Hint is how often readers should look again.
func Of(b *trust.Bundle, hint time.Duration) (Contents, error) {
	all := b.All()
	if len(all) == 0 {
		return Contents{}, fmt.Errorf("the bundle of %s has no roots; what is published stays as it is", b.Domain())
	}
	text, err := spiffebundle.FromTrust(b, hint).Marshal()
	if err != nil {
		return Contents{}, fmt.Errorf("writing the bundle of %s: %w", b.Domain(), err)
	}
	return Contents{Generation: b.Generation(), Roots: string(trust.EncodeCertificates(all...)), Bundle: string(text)}, nil
}

// The two ClusterTrustBundles of a signer. A pod chooses by signer name and the label: those that read the canary have a new set of roots
// earlier, so that what goes wrong with it does so there.
const (
	Live   = "live"
	Canary = "canary"
	// VersionLabel has Live or Canary.
	VersionLabel = "chancery.dev/cluster-trust-bundle-version"
	// SinceAnnotation of the canary is when it got the set that it has: whoever writes the live one after a failover knows how long to wait.
	SinceAnnotation = "chancery.dev/canary-since"
)

// ByAnnotation of a ConfigMap has our field manager. It stays ours when somebody edits the keys, so that an edit can be told from an object
// that was somebody else's first.
const ByAnnotation = "chancery.dev/roots-published-by"

// BundleName returns the name of a ClusterTrustBundle: the API demands that it begins with that of its signer.
func BundleName(signer, version string) string {
	return strings.ReplaceAll(signer, "/", ":") + ":" + version
}

// Object is a ClusterTrustBundle as it is found.
type Object struct {
	Roots string    // empty: there is none
	Since time.Time // of the canary; zero if that is not known
}

// Step is what is to be written now.
type Step struct {
	Canary, Live bool
	Since        time.Time // for the canary
	Due          time.Time // when the live one is, if that is later
}

// Next says what comes next, so that both come to hold what is wanted: the canary at once, the live one when the canary has held it for as
// long as the lead. Where there is no live one, nobody is harmed by it.
func Next(live, canary Object, want string, lead time.Duration, now time.Time) (s Step) {
	since := canary.Since
	if canary.Roots != want || since.IsZero() || since.After(now.Add(time.Minute)) {
		s.Canary, since = true, now.UTC().Truncate(time.Second)
		s.Since = since
	}
	switch due := since.Add(lead); {
	case live.Roots == want:
	case live.Roots == "", !now.Before(due):
		s.Live = true
	default:
		s.Due = due
	}
	return s
}
