// Package keystore owns where a server's config says that keys lie: its `keys` group, and opening what it names.
//
// It refuses a group that could not be followed, such as two places at once, before anything is opened.
package keystore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/keys/pkcs11"
)

// Config says where new private keys are made and kept: Dir with PassphraseFile, or PKCS11, or, with neither, sealed in
// the state. Keys that are there stay where they are.
type Config struct {
	// Dir is a folder of encrypted key files, in the age format. It is made if it does not exist.
	Dir string `json:"dir,omitempty"`
	// PassphraseFile holds the passphrase of the files in Dir: one line of at least 16 bytes, mode 0600. Who can read it
	// and Dir has the CA's keys: keep them apart.
	PassphraseFile string `json:"passphraseFile,omitempty"`
	// PKCS11 names a token: pkcs11:module-path=FILE;token=LABEL?pin-source=FILE, where FILE is absolute and the PIN's has
	// mode 0600. It works in binaries built with the tag pkcs11.
	PKCS11 string `json:"pkcs11,omitempty"`
	// Type is that of new keys: p256 (default), p384, ed25519 (not in a token), rsa or mldsa65 (not in a token). An issuer
	// made by the server has its root's type, but p256 under an mldsa65 root.
	Type string `json:"type,omitempty"`
}

// Place is a Config that was checked.
type Place struct {
	config Config
	kind   ca.KeyType
	token  *pkcs11.URI
}

// Store is a key store that this process opened.
type Store interface {
	keys.Store
	io.Closer
}

// Parse checks a config without opening anything. Its paths should be absolute.
func Parse(c Config) (*Place, error) {
	p := &Place{config: c}
	var err error
	if c.Type != "" {
		if p.kind, err = ca.ParseKeyType(c.Type); err != nil {
			return nil, fmt.Errorf("keys.type: %w", err)
		}
	}
	switch {
	case c.Dir != "" && c.PKCS11 != "":
		return nil, errors.New("keys: dir and pkcs11 are both set; set the one where keys should lie")
	case (c.Dir != "") != (c.PassphraseFile != ""):
		return nil, errors.New("keys: dir and passphraseFile belong together: the folder of the keys, and the file with the passphrase that encrypts them")
	case c.PKCS11 != "" && (p.kind == ca.Ed25519 || p.kind == ca.MLDSA65):
		return nil, errors.New("keys.type: tokens make keys of type p256, p384 and rsa")
	case c.PKCS11 != "":
		if p.token, err = pkcs11.ParseURI(c.PKCS11); err != nil {
			return nil, fmt.Errorf("keys.pkcs11: %w", err)
		}
	}
	return p, nil
}

// Type returns the type of new keys; empty means the default.
func (p *Place) Type() ca.KeyType { return p.kind }

// Open opens the store; nil if keys lie sealed in the state.
func (p *Place) Open(ctx context.Context, logger *slog.Logger) (store Store, err error) {
	switch {
	case p.config.Dir != "":
		store, err = keys.OpenFiles(keys.FilesConfig{Dir: p.config.Dir, PassphraseFile: p.config.PassphraseFile})
	case p.token != nil:
		store, err = pkcs11.Open(ctx, pkcs11.Config{URI: p.token, Logger: logger})
	}
	if err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	return store, nil
}

// Describe says to an admin where keys lie; sealed is what to say if it is the state.
func (p *Place) Describe(sealed string) string {
	switch {
	case p.config.Dir != "":
		return fmt.Sprintf("Private keys lie in %s, encrypted with the passphrase in %s.", p.config.Dir, p.config.PassphraseFile)
	case p.token != nil:
		return "Private keys lie in the token, and never leave it."
	}
	return sealed
}
