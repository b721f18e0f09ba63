package answers

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/trust"
)

// MaxFederated bounds the foreign trust domains that agents are told of.
const MaxFederated = 100

// Federation is what agents are told of foreign trust domains, signed once for each change. Its zero value is ready, and safe for concurrent
// use.
type Federation struct {
	mu      sync.Mutex // guards all below
	own     trust.Domain
	bundles []*trust.Bundle
	looked  uint64 // version of the document that said so last
	by      *trust.BundleSigner
	message *chanceryv1.SignedFederation
}

// Signed returns the bundles of all foreign trust domains, whose generations are their sequences, as the bundle key signs them for agents of
// a domain. It is the same message as long as they, the domain and the key are the same. A new one has the version of the document, which
// is as new as what it says. Where versions of the document were missed there may have been another word in between, which agents have from
// another server: they would take the old message for a step back, so there is a new one.
func (f *Federation) Signed(own trust.Domain, version uint64, bundles []*trust.Bundle, by *trust.BundleSigner) (*chanceryv1.SignedFederation, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	sorted := slices.SortedFunc(slices.Values(bundles), func(a, b *trust.Bundle) int { return strings.Compare(a.Domain().String(), b.Domain().String()) })
	same := slices.EqualFunc(sorted, f.bundles, func(a, b *trust.Bundle) bool { return a.SameRoots(b) && a.Generation() == b.Generation() })
	if f.message != nil && same && own == f.own && by == f.by && version <= f.looked+1 {
		f.looked = max(f.looked, version)
		return f.message, nil
	}
	if n := len(sorted); n > MaxFederated {
		return nil, fmt.Errorf("%d foreign trust domains; agents are told of %d at most", n, MaxFederated)
	}
	m := &chanceryv1.Federation{TrustDomain: own.String(), Version: version}
	for _, b := range sorted {
		m.Bundles = append(m.Bundles, &chanceryv1.ForeignBundle{TrustDomain: b.Domain().String(), Sequence: b.Generation(), Roots: raw(b)})
	}
	encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encoding what agents are told of foreign trust domains: %w", err)
	}
	if n := len(encoded); n > trust.MaxSignedFederation { // nobody would take it
		return nil, fmt.Errorf("the bundles of foreign trust domains have %d bytes; agents are told of %d at most", n, trust.MaxSignedFederation)
	}
	x := by.SignFederation(encoded)
	f.own, f.bundles, f.by, f.looked = own, sorted, by, version
	f.message = &chanceryv1.SignedFederation{Federation: x.Federation, Signature: x.Signature, Key: x.Key}
	return f.message, nil
}
