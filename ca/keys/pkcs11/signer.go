//go:build pkcs11 && cgo

package pkcs11

import (
	"crypto"
	"errors"
	"fmt"
	"io"
	"sync"

	"go.step.sm/crypto/kms/apiv1"
	kms "go.step.sm/crypto/kms/pkcs11"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// signer is a key in a token.
type signer struct {
	token  *token
	ref    string
	public crypto.PublicKey

	mu    sync.Mutex // guards key and epoch
	key   crypto.Signer
	epoch uint64 // of the connection that key belongs to
}

func (s *signer) Public() crypto.PublicKey { return s.public }

// Sign signs, over a new connection if the one it knew was lost.
func (s *signer) Sign(random io.Reader, digest []byte, opts crypto.SignerOpts) (sig []byte, err error) {
	err = s.token.with(func(conn *kms.PKCS11, epoch uint64) error {
		key, err := s.current(conn, epoch)
		if err != nil {
			return err
		}
		sig, err = key.Sign(random, digest, opts)
		return err
	})
	if errors.Is(err, keys.ErrClosed) || err == nil {
		return sig, err
	}
	return nil, fmt.Errorf("signing with key %s in token: %w", s.ref, err)
}

// current returns the key as the given connection knows it.
func (s *signer) current(conn *kms.PKCS11, epoch uint64) (crypto.Signer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.epoch != epoch {
		if err := s.locate(conn, epoch); err != nil {
			return nil, err
		}
	}
	return s.key, nil
}

// find looks the key up for the first time.
func (s *signer) find(conn *kms.PKCS11, epoch uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.locate(conn, epoch)
}

// locate looks the key up. Caller holds mu.
func (s *signer) locate(conn *kms.PKCS11, epoch uint64) error {
	key, err := conn.CreateSigner(&apiv1.CreateSignerRequest{SigningKey: s.ref})
	if err != nil && !lost(err) && notFound(err) {
		return fmt.Errorf("%w: %w", keys.ErrNotFound, err)
	} else if err != nil {
		return err
	}
	if s.public != nil && !trust.SameKey(s.public, key.Public()) {
		return errors.New("the token holds another key under this name than before")
	}
	s.key, s.epoch = key, epoch
	return nil
}

// Format keeps the insides out of whatever prints a signer.
func (s *signer) Format(f fmt.State, _ rune) { fmt.Fprintf(f, "signer in a token, %T", s.public) }
