// Package bundles owns what a server says of roots beside its issuer: the bundle of the document in use, what signs it (decision D6),
// and whether an authority is tainted (D16). All of it is asked on each request: what a document says is worked out once.
//
// It refuses to sign while a taint is known of that the document does not have (D4). It makes the key that signs bundles where an
// authority of an older version has none; everything else in the document it leaves to others.
package bundles

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/bundlekey"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/trust"
)

// Config says of whom it is.
type Config struct {
	Domain    trust.Domain
	Authority *authority.Keeper
	Sealer    *keys.Sealer
	Log       *audit.Log
	Logger    *slog.Logger
}

// Source answers. Its methods are safe for concurrent use, but for Mind.
type Source struct {
	config Config
	known  atomic.Pointer[known]
	told   string    // why there was no key, when the log was told last; of Mind,
	next   time.Time // which does not try to make one before
}

// known is what one document says.
type known struct {
	doc     *authority.Document
	bundle  *trust.Bundle
	noRoots error // why there is no bundle
	public  []byte
	sealed  []byte
	signer  *trust.BundleSigner
	noKey   error // why there is no signer
	tainted map[string]bool
}

// New returns a source.
func New(c Config) *Source { return &Source{config: c} }

// ErrNoKey: the authority was made by an older version, and nobody has made the key since.
var ErrNoKey = errors.New("the authority document has no bundle key yet; the server that renews issuers makes it")

// of works out what the document in use says, unless that was done.
func (s *Source) of() *known {
	doc, was := s.config.Authority.Document(), s.known.Load()
	if was != nil && was.doc == doc {
		return was
	}
	td := s.config.Domain
	k := &known{doc: doc, noKey: ErrNoKey}
	k.bundle, k.noRoots = doc.Bundle(td)
	if was != nil && k.bundle != nil && k.bundle.SameRoots(was.bundle) && k.bundle.Generation() == was.bundle.Generation() {
		k.bundle = was.bundle // who keeps something by it need not do it anew
	}
	if state := doc.Domains[td.String()]; state != nil {
		if b := state.BundleKey; b != nil {
			k.public, k.sealed = b.Public, b.Key
			if was != nil && bytes.Equal(was.sealed, b.Key) && bytes.Equal(was.public, b.Public) {
				k.signer, k.noKey = was.signer, was.noKey
			} else {
				k.signer, k.noKey = bundlekey.Open(b, td, s.config.Sealer)
			}
		}
		for i := range state.Authorities {
			a := &state.Authorities[i]
			if a.Tainted == nil {
				continue
			}
			if k.tainted == nil {
				k.tainted = map[string]bool{}
			}
			if cert, err := a.X509(); err == nil { // else there is no bundle, and nothing verifies
				k.tainted[string(cert.RawSubjectPublicKeyInfo)] = true
			}
		}
	}
	s.known.CompareAndSwap(was, k)
	return k
}

// Bundle returns the roots of the document in use, whether anything can be issued or not.
func (s *Source) Bundle() (*trust.Bundle, error) {
	k := s.of()
	return k.bundle, k.noRoots
}

// Signer returns what signs bundles; the same one, as long as the key is the same.
func (s *Source) Signer() (*trust.BundleSigner, error) {
	if err := s.config.Authority.MaySign(); err != nil {
		return nil, err
	}
	k := s.of()
	return k.signer, k.noKey
}

// Key returns the public part of the key, and why it signs nothing; nothing of both while there is none.
func (s *Source) Key() (public []byte, err error) {
	k := s.of()
	if errors.Is(k.noKey, ErrNoKey) {
		return nil, nil
	}
	return k.public, k.noKey
}

// Tainted reports whether a certificate's key is that of an authority that is tainted.
func (s *Source) Tainted(cert *x509.Certificate) bool {
	t := s.of().tainted
	return t != nil && t[string(cert.RawSubjectPublicKeyInfo)]
}

// makeEvery is how often it is tried to make the key: each try is a line in the audit log.
const makeEvery = time.Minute

// Mind makes the key where there is none and this server drives changes, and says in the log why bundles are not signed. It is called
// again and again.
func (s *Source) Mind(ctx context.Context) {
	k := s.of()
	if k.noKey == nil {
		s.told = ""
		return
	}
	err := k.noKey
	if now := time.Now(); errors.Is(err, ErrNoKey) && s.config.Authority.Drives() && !now.Before(s.next) {
		s.next = now.Add(makeEvery)
		if err = s.make(ctx); err == nil || errors.Is(err, replica.ErrNotDriver) {
			return
		}
	}
	if s.told == err.Error() {
		return
	}
	s.told = err.Error()
	if errors.Is(err, ErrNoKey) {
		s.config.Logger.Warn("bundles are not signed yet; agents that start now pin no key", "reason", err.Error())
		return
	}
	s.config.Logger.Error("bundles are not signed: agents that have pinned the bundle key take no roots and no CRLs from this server, and go on with the last ones",
		"reason", err.Error())
}

// make makes the key. The audit log has it first (invariant 10).
func (s *Source) make(ctx context.Context) error {
	c := s.config
	if c.Authority.Document().Domains[c.Domain.String()] == nil {
		return fmt.Errorf("the authority document has nothing for trust domain %s", c.Domain)
	}
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: "server", Detail: "making the bundle key, which an authority of an older version lacks"}); err != nil {
		return err
	}
	err := c.Authority.Drive(ctx, func(next *authority.Document) error {
		made, err := bundlekey.Make(next, c.Domain, c.Sealer)
		if err == nil && !made {
			err = replica.ErrUnchanged
		}
		return err
	})
	if err != nil {
		return err
	}
	if b := c.Authority.Document().State(c.Domain).BundleKey; b != nil {
		c.Logger.Info("bundle key made: agents pin it, and take roots that are signed by it only", "fingerprint", trust.KeyFingerprint(b.Public))
	}
	return nil
}
