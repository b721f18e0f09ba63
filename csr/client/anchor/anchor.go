// Package anchor owns what an agent trusts a trust domain by, over restarts: the bundle key that it pinned at its first contact, and
// the newest bundle that this key has signed (decision D6). From then on no server, and nobody who poses as one, can change the roots.
//
// It refuses a bundle without that signature, and one that is older than what it has; and it never pins a key by the word of a
// connection that was not verified.
package anchor

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/document/strict"
	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/trust"
)

const (
	format = 1
	// maxLeft bounds the roots that are remembered because they left the bundle.
	maxLeft = 64
	maxFile = 2*trust.MaxSignedBundle + 64<<10
)

// Config says where an anchor lies.
type Config struct {
	File   string // empty: in memory alone
	Domain trust.Domain
	Logger *slog.Logger // nil: nothing is logged
}

// Anchor is what an agent trusts. It is safe for concurrent use.
type Anchor struct {
	config Config

	mu     sync.Mutex // guards all below
	key    ed25519.PublicKey
	signed trust.SignedBundle
	bundle *trust.Bundle       // what signed says; nil before the first
	left   [][sha256.Size]byte // roots that were in a bundle before, the newest last
	dirty  bool                // the file has not all of it
}

// content is the file.
type content struct {
	Format int `json:"format"`
	// The bundle key and the newest bundle that it has signed.
	Bundle    []byte `json:"bundle"`
	Signature []byte `json:"signature"`
	Key       []byte `json:"key"`
	// SHA-256 of roots that an earlier bundle had and this one has not.
	Left [][]byte `json:"left,omitempty"`
}

// Open reads what was kept. What cannot be read, or does not verify, is as good as nothing: the key is pinned anew at the next
// contact with a server that verifies.
func Open(c Config) (*Anchor, error) {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	a := &Anchor{config: c}
	if c.File == "" {
		return a, nil
	}
	err := a.load()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.Logger.Error("what was kept of the trust domain's bundle is of no use; the bundle key is pinned anew at the next contact with a server that serverRoots vouch for",
			"file", c.File, "reason", err.Error())
	}
	return a, nil
}

func (a *Anchor) load() error {
	data, err := strict.Read(a.config.File, maxFile)
	if err != nil {
		return err
	}
	return a.parse(data)
}

// parse takes a file over, strictly.
func (a *Anchor) parse(data []byte) error {
	var c content
	if err := strict.Kept(data, maxFile, format, &c, &c.Format); err != nil {
		return err
	}
	if len(c.Left) > maxLeft {
		return fmt.Errorf("it has %d roots that left; at most %d are kept", len(c.Left), maxLeft)
	}
	signed := trust.SignedBundle{Bundle: c.Bundle, Signature: c.Signature, Key: c.Key}
	if err := signed.Verify(nil); err != nil {
		return err
	}
	bundle, err := a.read(signed)
	if err != nil {
		return err
	}
	var left [][sha256.Size]byte
	for _, l := range c.Left {
		if len(l) != sha256.Size {
			return fmt.Errorf("a hash of a root has %d bytes", len(l))
		}
		left = append(left, [sha256.Size]byte(l))
	}
	a.key, a.signed, a.bundle, a.left = signed.Key, signed, bundle, left
	return nil
}

// read returns the bundle that a verified one says.
func (a *Anchor) read(s trust.SignedBundle) (*trust.Bundle, error) {
	var b chanceryv1.Bundle
	if err := proto.Unmarshal(s.Bundle, &b); err != nil {
		return nil, fmt.Errorf("reading signed bundle: %w", err)
	}
	return Parse(a.config.Domain, &b)
}

// maxKin bounds the other trust domains of an authority.
const maxKin = 100

// Parse reads a bundle with its kin. The domain must be one of these: a migration makes another one the first.
func Parse(domain trust.Domain, b *chanceryv1.Bundle) (*trust.Bundle, error) {
	roots, err := Certificates(b.GetRoots())
	if err != nil {
		return nil, fmt.Errorf("reading bundle: %w", err)
	}
	own, err := trust.ParseDomain(b.GetTrustDomain())
	if err != nil {
		return nil, fmt.Errorf("reading bundle: %w", err)
	}
	bundle, err := trust.NewBundle(own, b.GetGeneration(), roots)
	if err != nil {
		return nil, err
	}
	kin, err := parseKin(b)
	if err != nil {
		return nil, fmt.Errorf("reading bundle of %s: %w", own, err)
	}
	if bundle, err = bundle.WithKin(kin...); err != nil {
		return nil, err
	}
	if bundle.Of(domain) == nil {
		return nil, fmt.Errorf("the server answered with the bundle of %q; expected %s", own, domain)
	}
	return bundle, nil
}

func parseKin(b *chanceryv1.Bundle) ([]*trust.Bundle, error) {
	if n := len(b.GetKin()); n > maxKin {
		return nil, fmt.Errorf("%d trust domains of the same authority; at most %d are allowed", n, maxKin)
	}
	var out []*trust.Bundle
	for i, k := range b.GetKin() {
		d, err := trust.ParseDomain(k.GetTrustDomain())
		if err != nil {
			return nil, fmt.Errorf("kin %d: %w", i, err)
		}
		if i > 0 && d.String() <= b.GetKin()[i-1].GetTrustDomain() {
			return nil, fmt.Errorf("kin %d: %s comes after %s; expected the order of their names, each once", i, d, b.GetKin()[i-1].GetTrustDomain())
		}
		var roots []*x509.Certificate
		if len(k.GetRoots()) > 0 { // a former domain has none
			if roots, err = Certificates(k.GetRoots()); err != nil {
				return nil, fmt.Errorf("kin %s: %w", d, err)
			}
		}
		one, err := trust.NewBundle(d, b.GetGeneration(), roots)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

// Certificates reads those of an answer, DER each: at least one, and no more than a bundle or a chain may have.
func Certificates(ders [][]byte) ([]*x509.Certificate, error) {
	if len(ders) == 0 || len(ders) > trust.MaxCertificates {
		return nil, fmt.Errorf("%d certificates; expected 1 to %d", len(ders), trust.MaxCertificates)
	}
	var out []*x509.Certificate
	for _, der := range ders {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		out = append(out, cert)
	}
	return out, nil
}

func signedOf(s *chanceryv1.SignedBundle) trust.SignedBundle {
	return trust.SignedBundle{Bundle: s.GetBundle(), Signature: s.GetSignature(), Key: s.GetKey()}
}

// Take returns the bundle to go by of what a verified server has sent: the signed one, by the pinned key, which is pinned now if
// none was before. A server without a bundle key is taken at its word as long as none is pinned; but that the own trust domain has
// become another one has to be signed.
func (a *Anchor) Take(plain *chanceryv1.Bundle, signed *chanceryv1.SignedBundle) (*trust.Bundle, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if signed == nil {
		if a.key != nil {
			return nil, fmt.Errorf("the bundle is not signed; it should be, by the key %s, as those before were%s", trust.KeyFingerprint(a.key), a.remedy())
		}
		bundle, err := Parse(a.config.Domain, plain)
		if err == nil && bundle.Domain() != a.config.Domain {
			return nil, fmt.Errorf("the server answered with the bundle of %q; expected %s, since nothing signs that it has taken its place", bundle.Domain(), a.config.Domain)
		}
		return bundle, err
	}
	bundle, _, err := a.take(signedOf(signed))
	return bundle, err
}

// TakeAnswer is Take for what came with an SVID. One of a server that has an older bundle is held against the newest: the server is a
// little behind, and what it signs is good if the newest roots vouch for it. If they do not it was asleep while they changed (decision
// D4), and the error is a *trust.Older.
func (a *Anchor) TakeAnswer(chain []*x509.Certificate, plain *chanceryv1.Bundle, signed *chanceryv1.SignedBundle) (*trust.Bundle, error) {
	bundle, err := a.Take(plain, signed)
	older, is := errors.AsType[*trust.Older](err)
	newest := a.Bundle()
	if !is || newest == nil {
		return bundle, err
	}
	if _, _, err := trust.Verify(chain, trust.Only(newest), time.Now()); err != nil {
		return nil, trust.NewOlder(fmt.Sprintf("%s, and those do not vouch for the answer: %v", older, err))
	}
	return newest, nil
}

// Offer takes a bundle from somebody who was not verified. It counts only if the pinned key has signed it, and reports whether it is
// newer than what there was.
func (a *Anchor) Offer(signed *chanceryv1.SignedBundle) (news bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.key == nil {
		return false, errors.New("no bundle key is pinned")
	}
	_, news, err = a.take(signedOf(signed))
	return news, err
}

// take verifies a signed bundle, holds it against the newest, and keeps it if it is newer. mu is held.
func (a *Anchor) take(s trust.SignedBundle) (b *trust.Bundle, news bool, err error) {
	if a.bundle != nil && bytes.Equal(s.Bundle, a.signed.Bundle) && bytes.Equal(s.Key, a.key) && bytes.Equal(s.Signature, a.signed.Signature) {
		a.save()
		return a.bundle, false, nil
	}
	if err := s.Verify(a.key); err != nil {
		if a.key != nil {
			return nil, false, fmt.Errorf("%w%s", err, a.remedy())
		}
		return nil, false, err
	}
	if b, err = a.read(s); err != nil {
		return nil, false, err
	}
	if a.bundle != nil {
		switch {
		case b.Generation() < a.bundle.Generation():
			return nil, false, trust.NewOlder(fmt.Sprintf("the roots are of generation %d of the bundle; generation %d was there before", b.Generation(), a.bundle.Generation()))
		case b.Generation() == a.bundle.Generation() && !b.SameRoots(a.bundle):
			return nil, false, fmt.Errorf("there are two bundles of generation %d with different roots, signed by one key%s", b.Generation(), a.remedy())
		}
		news = b.Generation() > a.bundle.Generation()
	} else {
		news = true
		a.config.Logger.Info("the bundle key is pinned", "key", trust.KeyFingerprint(s.Key), "trust_domain", a.config.Domain.String(), "file", a.config.File)
	}
	if news {
		a.leave(b)
		a.key, a.signed, a.bundle, a.dirty = bytes.Clone(s.Key), s, b, true
	}
	a.save()
	return b, news, nil
}

// leave notes which roots leave with a new bundle. mu is held.
func (a *Anchor) leave(next *trust.Bundle) {
	in := map[[sha256.Size]byte]bool{}
	for _, r := range next.All() {
		in[sha256.Sum256(r.Raw)] = true
	}
	a.left = slices.DeleteFunc(a.left, func(l [sha256.Size]byte) bool { return in[l] })
	if a.bundle == nil {
		return
	}
	for _, r := range a.bundle.All() {
		if sum := sha256.Sum256(r.Raw); !in[sum] {
			a.left = append(a.left, sum)
		}
	}
	a.left = a.left[max(0, len(a.left)-maxLeft):]
}

// save writes the file if it lacks something. What cannot be written counts in memory, and is tried again with the next bundle that
// comes. mu is held.
func (a *Anchor) save() {
	if !a.dirty {
		return
	}
	if a.config.File == "" {
		a.dirty = false
		return
	}
	c := content{Format: format, Bundle: a.signed.Bundle, Signature: a.signed.Signature, Key: a.signed.Key}
	for _, l := range a.left {
		c.Left = append(c.Left, l[:])
	}
	data, err := json.Marshal(&c)
	if err == nil {
		err = durable.Replace(a.config.File, append(data, '\n'), 0o600)
	}
	if err != nil {
		a.config.Logger.Error("the trust domain's bundle cannot be kept: after a restart the one before would count", "file", a.config.File, "reason", err.Error())
		return
	}
	a.dirty = false
}

// remedy says what to do if the key was replaced on purpose.
func (a *Anchor) remedy() string {
	if a.config.File == "" {
		return ""
	}
	return fmt.Sprintf("; if the authority was replaced on purpose, stop the agent, remove %s, and start it again", a.config.File)
}

// Pinned reports whether a bundle key is pinned.
func (a *Anchor) Pinned() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.key != nil
}

// Key returns the bundle key that is pinned; nil if none is. Callers must not change it.
func (a *Anchor) Key() ed25519.PublicKey {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.key
}

// Bundle returns the newest bundle that the pinned key has signed; nil if there is none.
func (a *Anchor) Bundle() *trust.Bundle {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.bundle
}

// HasLeft reports whether a root was in an earlier bundle and is not in the newest: whatever file still has it, it vouches for
// nobody any more.
func (a *Anchor) HasLeft(root *x509.Certificate) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Contains(a.left, sha256.Sum256(root.Raw))
}
