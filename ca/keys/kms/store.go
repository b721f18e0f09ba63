package kms

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
)

// patience bounds each call that makes, finds or deletes a key; signatures are bounded by go.step.sm/crypto (15 s).
const patience = 30 * time.Second

// service is one cloud's key management. References are its own; it answers keys.ErrNotFound for those that name no key
// that can sign, in the place that the URI names.
type service interface {
	create(ctx context.Context, kt ca.KeyType) (ref string, err error)
	open(ctx context.Context, ref string) (crypto.Signer, error)
	destroy(ctx context.Context, ref string) error
	io.Closer
}

// Store is a keys.Store in a cloud's key management service.
type Store struct {
	uri     *URI
	service service
	closed  atomic.Bool

	mu     sync.Mutex // guards opened; never held over a call
	opened map[string]crypto.Signer
}

// Open makes a client. Whether the service answers shows with the first key.
func Open(ctx context.Context, u *URI) (*Store, error) {
	var s service
	var err error
	switch u.scheme {
	case "awskms":
		s, err = openAWS(ctx, u)
	case "gcpkms":
		s, err = openGCP(ctx, u)
	case "azurekms":
		s, err = openAzure(ctx, u)
	}
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", u, err)
	}
	return newStore(u, s), nil
}

func newStore(u *URI, s service) *Store {
	return &Store{uri: u, service: s, opened: map[string]crypto.Signer{}}
}

// notBuilt says how to get a binary that knows a service.
func notBuilt(tag string) error {
	return fmt.Errorf("this binary was built without it; build one with `go build -tags %s ./cmd/chancery`", tag)
}

// Generate implements keys.Store. The service makes the key.
func (s *Store) Generate(ctx context.Context, kt ca.KeyType) (string, error) {
	if s.closed.Load() {
		return "", keys.ErrClosed
	}
	switch kt {
	case ca.P256, ca.P384, ca.RSA:
	default:
		return "", fmt.Errorf("making key: keys in a cloud's service are of type p256, p384 and rsa, not %s", kt)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ref, err := s.service.create(ctx, kt)
	if err != nil {
		return "", fmt.Errorf("making key in %s: %w", s.uri, err)
	}
	key, err := s.signer(ctx, ref)
	if err != nil {
		return "", err
	}
	if got, err := ca.TypeOf(key.Public()); err != nil || got != kt {
		return "", fmt.Errorf("making key in %s: it made %s, of type %s instead of %s", s.uri, ref, got, kt)
	}
	return ref, nil
}

// Open implements keys.Store.
func (s *Store) Open(ctx context.Context, ref string) (crypto.Signer, error) {
	if s.closed.Load() {
		return nil, keys.ErrClosed
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	key, err := s.signer(ctx, ref)
	if err != nil {
		return nil, err
	}
	return &signer{s, ref, key}, nil
}

// signer finds a key, in the service for the first time.
func (s *Store) signer(ctx context.Context, ref string) (crypto.Signer, error) {
	s.mu.Lock()
	key := s.opened[ref]
	s.mu.Unlock()
	if key != nil {
		return key, nil
	}
	key, err := s.service.open(ctx, ref)
	if err != nil {
		return nil, fmt.Errorf("opening key %.200q in %s: %w", ref, s.uri, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opened[ref] = key
	return key, nil
}

// Delete implements keys.Store. Services delete after some days, within which an admin can take it back.
func (s *Store) Delete(ctx context.Context, ref string) error {
	if s.closed.Load() {
		return keys.ErrClosed
	}
	s.mu.Lock()
	delete(s.opened, ref)
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := s.service.destroy(ctx, ref); err != nil && !errors.Is(err, keys.ErrNotFound) {
		return fmt.Errorf("deleting key %.200q in %s: %w", ref, s.uri, err)
	}
	return nil
}

// Close takes every signer of the store out of use.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	return s.service.Close()
}

// signer is a key in the service.
type signer struct {
	store *Store
	ref   string
	key   crypto.Signer
}

func (s *signer) Public() crypto.PublicKey { return s.key.Public() }

func (s *signer) Sign(random io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	if s.store.closed.Load() {
		return nil, keys.ErrClosed
	}
	sig, err := s.key.Sign(random, digest, opts)
	if err != nil {
		return nil, fmt.Errorf("signing with key %s in %s: %w", s.ref, s.store.uri, err)
	}
	return sig, nil
}

// Format keeps the insides out of whatever prints a signer.
func (s *signer) Format(f fmt.State, _ rune) { fmt.Fprintf(f, "signer in a cloud, %T", s.Public()) }
