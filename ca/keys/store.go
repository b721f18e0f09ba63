package keys

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/tbs"
)

// Store holds private keys of authorities. A key is made in its store and never leaves it: callers get a reference,
// which the authority document keeps, and signers. All methods are safe for concurrent use. A Store is closed by who
// opened it; then every method, and every signer that it gave, returns ErrClosed.
type Store interface {
	// Generate makes a new key and returns its reference. The key is durable when it returns.
	Generate(context.Context, ca.KeyType) (ref string, err error)
	// Open returns a signer for a key, or ErrNotFound. The signer never exposes the private key.
	Open(ctx context.Context, ref string) (crypto.Signer, error)
	// Delete destroys a key. A key that is not there is no error.
	Delete(ctx context.Context, ref string) error
}

// Errors that callers tell apart.
var (
	ErrNotFound = errors.New("there is no such key in the store")
	ErrClosed   = errors.New("the key store is closed")
)

// signer is a key in memory behind a type that does not hand it out: it cannot be encoded or converted. The store that
// gave it takes it out of use when it closes.
type signer struct {
	key  crypto.Signer
	open func() error
}

// Hide returns a signer that makes signatures with a key in memory while usable returns nil, and never hands the key out. It
// is for stores in other packages.
func Hide(key crypto.Signer, usable func() error) crypto.Signer { return signer{key, usable} }

func (s signer) Public() crypto.PublicKey { return s.key.Public() }

func (s signer) Sign(random io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	if err := s.open(); err != nil {
		return nil, err
	}
	return s.key.Sign(random, digest, opts)
}

// InProcess tells package ca that signatures are made by Go's own code, so that a sample of them is verified.
func (signer) InProcess() bool { return true }

// Format keeps the key out of whatever prints a signer.
func (s signer) Format(f fmt.State, _ rune) { fmt.Fprintf(f, "signer of type %T", s.key.Public()) }

// IDOf returns the identifier of a public key in hex; certificates by package ca carry it as subject key identifier.
func IDOf(pub crypto.PublicKey) (string, error) {
	spki, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		return "", fmt.Errorf("encoding public key: %w", err)
	}
	id, err := tbs.KeyID(spki)
	return hex.EncodeToString(id), err
}

// check leads what Check signs. A to-be-signed certificate or CRL begins with the tag of an ASN.1 SEQUENCE, so that the
// signature of a check can never be one of a certificate.
const check = "chancery: does this key sign? "

// Check makes a signature with a key, over bytes that are no certificate, and verifies it.
func Check(key crypto.Signer) error {
	alg, err := tbs.AlgorithmOf(key.Public())
	if err != nil {
		return err
	}
	message := append([]byte(check), rand.Text()...)
	sig, err := crypto.SignMessage(key, rand.Reader, message, alg.Hash)
	if err != nil {
		return fmt.Errorf("signing with the key: %w", err)
	}
	return alg.Check(key.Public(), message, sig)
}

// Private reports whether a file's mode keeps others from it: only its owner may do anything, or a group that it is Lent to may
// read it.
func Private(info fs.FileInfo) bool {
	mode := info.Mode().Perm()
	return mode&0o077 == 0 || mode&0o037 == 0 && Lent(info)
}

// Lent reports whether a file or folder is root's, for a group that this process is in and root is not. That is what Kubernetes
// makes of what it mounts for a pod that is not root (fsGroup): root's with mode 0440 is the least that a Secret can have there.
func Lent(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	groups, err := os.Getgroups()
	return ok && err == nil && st.Uid == 0 && st.Gid != 0 && os.Geteuid() != 0 && slices.Contains(append(groups, os.Getegid()), int(st.Gid))
}

// maxSecret bounds the file of a passphrase or PIN.
const maxSecret = 1024

// ReadSecret reads a passphrase or PIN from a file that nobody else can read (Private), without the line's end. what names
// it in errors, which never hold the secret.
func ReadSecret(what, path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe would be waited for
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", what, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", what, err)
	}
	switch {
	case !info.Mode().IsRegular():
		return "", fmt.Errorf("%s %s is not a regular file", what, path)
	case !Private(info):
		return "", fmt.Errorf("%s %s has mode %04o; it should be 0600", what, path, info.Mode().Perm())
	case info.Size() > maxSecret:
		return "", fmt.Errorf("%s %s has %d bytes; it should be one line", what, path, info.Size())
	}
	data, err := io.ReadAll(io.LimitReader(f, maxSecret+1))
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", what, err)
	}
	secret := strings.TrimRight(string(data), "\r\n")
	if secret == "" || len(data) > maxSecret || strings.ContainsAny(secret, "\r\n") {
		return "", fmt.Errorf("%s %s should be one line", what, path)
	}
	return secret, nil
}

// DropUnneeded deletes those keys that are not needed any more. What fails is logged: the key lies there unused.
func DropUnneeded(ctx context.Context, s Store, have, needed map[string]bool, logger *slog.Logger) {
	for ref := range have {
		if needed[ref] {
			continue
		}
		if err := s.Delete(ctx, ref); err != nil {
			logger.Warn("key of an issuer that has ended is not deleted", "key", ref, "reason", err.Error())
		}
	}
}
