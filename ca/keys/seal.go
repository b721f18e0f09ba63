// Package keys owns private keys at rest: the sealing key and what is sealed with it, stores that hold keys outside of the
// authority document (Store), and the check that each key still signs (Health).
//
// A Sealer encrypts private keys before they enter the authority document and authenticates the document itself
// (decision D9). Its key lies in a file of its own, never in the store: who can read the store alone learns no key,
// who can write the store alone cannot make a server accept what he wrote.
//
// It refuses a sealing key, passphrase or PIN that others may read, to make a new one where one is expected, and to hand
// out a private key: what it returns signs, and that is all.
package keys

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"fmt"

	"github.com/chancery-project/chancery/ca/durable"
)

const keyBytes = 32

// Sealer encrypts and authenticates with keys derived from one sealing key. It is safe for concurrent use.
type Sealer struct {
	aead cipher.AEAD
	mac  []byte
	file string // for messages; may be empty
}

// CreateSealer makes a new sealing key in a file with mode 0600 that must not exist yet. A crash leaves the whole key
// or none, and once it returns the key is on disk: a document sealed with a key that is lost would be lost with it.
func CreateSealer(path string) (*Sealer, error) {
	key := make([]byte, keyBytes)
	rand.Read(key)
	if err := durable.Place(path, []byte(base64.StdEncoding.EncodeToString(key)+"\n"), 0o600); err != nil {
		return nil, fmt.Errorf("writing sealing key %s: %w", path, err)
	}
	return newSealer(key)
}

// LoadSealer reads the sealing key from a file: 32 bytes in base64, readable by its owner only.
func LoadSealer(path string) (*Sealer, error) {
	text, err := ReadSecret("sealing key", path)
	if err != nil {
		return nil, err
	}
	key, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(key) != keyBytes {
		return nil, fmt.Errorf("sealing key %s should be %d bytes in base64", path, keyBytes)
	}
	s, err := newSealer(key)
	if err != nil {
		return nil, err
	}
	s.file = path
	return s, nil
}

// String names the key by its file, and says nothing else of it.
func (s *Sealer) String() string {
	if s.file == "" {
		return "this sealing key"
	}
	return "the sealing key " + s.file
}

func newSealer(key []byte) (*Sealer, error) {
	enc, err := hkdf.Key(sha256.New, key, nil, "chancery sealed keys v1", keyBytes)
	if err != nil {
		return nil, err
	}
	mac, err := hkdf.Key(sha256.New, key, nil, "chancery document v1", keyBytes)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(enc)
	if err != nil {
		return nil, err
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, err
	}
	return &Sealer{aead: aead, mac: mac}, nil
}

// Seal encrypts secret and binds it to context, without which it does not open.
func (s *Sealer) Seal(secret []byte, context string) []byte {
	return s.aead.Seal(nil, nil, secret, []byte(context))
}

// Open decrypts what Seal gave for the same context.
func (s *Sealer) Open(sealed []byte, context string) ([]byte, error) {
	secret, err := s.aead.Open(nil, nil, sealed, []byte(context))
	if err != nil {
		return nil, fmt.Errorf("unsealing %s: wrong sealing key, or the sealed bytes were changed or moved", context)
	}
	return secret, nil
}

// MAC returns the authentication code of a document's bytes.
func (s *Sealer) MAC(data []byte) []byte {
	h := hmac.New(sha256.New, s.mac)
	h.Write(data)
	return h.Sum(nil)
}

// CheckMAC reports whether mac is data's, in constant time.
func (s *Sealer) CheckMAC(data, mac []byte) bool { return hmac.Equal(s.MAC(data), mac) }
