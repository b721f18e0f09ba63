package answers

import (
	"errors"
	"fmt"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/trust"
)

// Roots returns the roots of a bundle, and those of its kin, as they are sent.
func Roots(b *trust.Bundle) *chanceryv1.Bundle {
	m := &chanceryv1.Bundle{TrustDomain: b.Domain().String(), Generation: b.Generation(), Roots: raw(b)}
	for _, k := range b.Kin() {
		m.Kin = append(m.Kin, &chanceryv1.DomainRoots{TrustDomain: k.Domain().String(), Roots: raw(k)})
	}
	return m
}

func raw(b *trust.Bundle) (out [][]byte) {
	for _, x := range b.Roots() {
		out = append(out, x.Raw)
	}
	return out
}

// Config says what there is to sign, and with what. Both functions are asked each time.
type Config struct {
	// Bundle returns the roots of this moment.
	Bundle func() (*trust.Bundle, error)
	// Signer returns what signs bundles, or why nothing does; the same pointer as long as it is the same key.
	Signer func() (*trust.BundleSigner, error)
}

// Bundles are bundles signed by the bundle key. Its methods are safe for concurrent use, and work on nil: then nothing is signed.
type Bundles struct {
	config Config
	last   atomic.Pointer[signed]
}

// signed is the bundle that was signed last.
type signed struct {
	bundle  *trust.Bundle
	by      *trust.BundleSigner
	message *chanceryv1.SignedBundle
}

// NewBundles returns bundles that have not been signed yet.
func NewBundles(c Config) *Bundles { return &Bundles{config: c} }

var errNone = errors.New("this server signs no bundles")

// Signed returns a bundle with its signature, or why there is none: whoever has pinned the key takes no other.
func (s *Bundles) Signed(b *trust.Bundle) (*chanceryv1.SignedBundle, error) {
	if s == nil {
		return nil, errNone
	}
	by, err := s.config.Signer()
	if err != nil {
		return nil, err
	}
	if was := s.last.Load(); was != nil && was.by == by && (was.bundle == b || was.bundle.Generation() == b.Generation() && was.bundle.SameRoots(b)) {
		return was.message, nil
	}
	encoded, err := proto.Marshal(Roots(b))
	if err != nil {
		return nil, fmt.Errorf("encoding a bundle: %w", err)
	}
	if len(encoded) > trust.MaxSignedBundle { // nobody would take it
		return nil, fmt.Errorf("the bundle of %s has %d bytes; at most %d are signed", b.Domain(), len(encoded), trust.MaxSignedBundle)
	}
	x := by.Sign(encoded)
	m := &chanceryv1.SignedBundle{Bundle: x.Bundle, Signature: x.Signature, Key: x.Key}
	s.last.Store(&signed{b, by, m})
	return m, nil
}

// Newest returns the bundle of this moment with its signature.
func (s *Bundles) Newest() (*chanceryv1.SignedBundle, error) {
	if s == nil {
		return nil, errNone
	}
	b, err := s.config.Bundle()
	if err != nil {
		return nil, err
	}
	return s.Signed(b)
}
