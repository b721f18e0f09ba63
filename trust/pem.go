package trust

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
)

// Bounds of what is read from a PEM file or a message.
const (
	MaxPEMBytes     = 1 << 20 // of one file
	MaxCertificates = 100     // of one file, chain or bundle
)

// ParseCertificates reads one or more PEM certificates. Text outside of blocks is a comment; any other block, be it a key
// or a certificate that is damaged, is an error: a bundle half of which is ignored is a bundle nobody checked. Errors say
// which block is wrong.
func ParseCertificates(data []byte) ([]*x509.Certificate, error) {
	if len(data) > MaxPEMBytes {
		return nil, fmt.Errorf("PEM is %d bytes; at most %d are read", len(data), MaxPEMBytes)
	}
	var certs []*x509.Certificate
	for n := 1; ; n++ {
		block, rest := pem.Decode(data)
		if block == nil {
			if n == 1 {
				return nil, errors.New("no PEM block found; expected -----BEGIN CERTIFICATE-----")
			}
			if bytes.Contains(rest, []byte("-----BEGIN")) {
				return nil, fmt.Errorf("PEM block %d does not decode; is the file cut off?", n)
			}
			return certs, nil
		}
		if read := data[:len(data)-len(rest)]; bytes.Count(read, []byte("-----BEGIN")) > 1 { // the decoder skips what it cannot read
			return nil, fmt.Errorf("PEM block %d does not decode; is it damaged?", n)
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("PEM block %d is a %q; expected a CERTIFICATE", n, block.Type)
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("PEM block %d: %w", n, err)
		}
		if certs = append(certs, cert); len(certs) > MaxCertificates {
			return nil, fmt.Errorf("more than %d certificates", MaxCertificates)
		}
		data = rest
	}
}

// ParseKey reads the private key that the data begins with, in PEM: PKCS#8, SEC 1 (EC) or PKCS#1 (RSA). Errors never
// hold key bytes.
func ParseKey(data []byte) (crypto.Signer, error) {
	if len(data) > MaxPEMBytes {
		return nil, fmt.Errorf("PEM is %d bytes; at most %d are read", len(data), MaxPEMBytes)
	}
	block, rest := pem.Decode(data)
	for block != nil && block.Type == "EC PARAMETERS" { // openssl ecparam -genkey writes one before the key
		block, rest = pem.Decode(rest)
	}
	if block == nil {
		return nil, errors.New("no PEM block found; expected a private key")
	}
	var key any
	var err error
	switch block.Type {
	case "PRIVATE KEY":
		key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	case "EC PRIVATE KEY":
		key, err = x509.ParseECPrivateKey(block.Bytes)
	case "RSA PRIVATE KEY":
		key, err = x509.ParsePKCS1PrivateKey(block.Bytes)
	case "ENCRYPTED PRIVATE KEY":
		return nil, errors.New("the key is encrypted; only unencrypted PEM keys are read here")
	default:
		return nil, fmt.Errorf("PEM block is a %q; expected PRIVATE KEY, EC PRIVATE KEY or RSA PRIVATE KEY", block.Type)
	}
	if err != nil {
		return nil, fmt.Errorf("PEM block %q does not parse as a private key", block.Type)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("a key of type %T cannot sign", key)
	}
	return signer, nil
}

// EncodeCertificates returns the certificates as concatenated PEM blocks.
func EncodeCertificates(certs ...*x509.Certificate) []byte {
	var out []byte
	for _, c := range certs {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	return out
}

// EncodeKey returns the key as a PKCS#8 PEM block.
func EncodeKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encoding private key of type %T: %w", key, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// SameKey reports whether two public keys are equal.
func SameKey(a, b crypto.PublicKey) bool {
	k, ok := a.(interface{ Equal(crypto.PublicKey) bool })
	return ok && k.Equal(b)
}
