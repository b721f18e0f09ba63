package ca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"
)

// This file writes the to-be-signed bytes of a certificate (RFC 5280 section 4.1). We write them ourselves, and not
// with x509.CreateCertificate, so that the bytes exist, and can be linted and logged, before the key is used; what
// is signed is then exactly what was linted (invariant 1).

var (
	oidSKI         = asn1.ObjectIdentifier{2, 5, 29, 14}
	oidKeyUsage    = asn1.ObjectIdentifier{2, 5, 29, 15}
	oidSAN         = asn1.ObjectIdentifier{2, 5, 29, 17}
	oidBasic       = asn1.ObjectIdentifier{2, 5, 29, 19}
	oidAKI         = asn1.ObjectIdentifier{2, 5, 29, 35}
	oidExtKeyUsage = asn1.ObjectIdentifier{2, 5, 29, 37}
	oidServerAuth  = asn1.ObjectIdentifier{1, 3, 6, 1, 5, 5, 7, 3, 1}
	oidClientAuth  = asn1.ObjectIdentifier{1, 3, 6, 1, 5, 5, 7, 3, 2}
)

// algorithm is how one kind of key signs: the AlgorithmIdentifier in DER and the hash, 0 for keys that take the
// whole message.
type algorithm struct {
	id   []byte
	hash crypto.Hash
}

func algorithmOf(pub crypto.PublicKey) (algorithm, error) {
	t, err := TypeOf(pub)
	if err != nil {
		return algorithm{}, fmt.Errorf("issuing key: %w", err)
	}
	var id pkix.AlgorithmIdentifier
	var hash crypto.Hash
	switch t {
	case P256:
		id.Algorithm, hash = asn1.ObjectIdentifier{1, 2, 840, 10045, 4, 3, 2}, crypto.SHA256
	case P384:
		id.Algorithm, hash = asn1.ObjectIdentifier{1, 2, 840, 10045, 4, 3, 3}, crypto.SHA384
	case Ed25519:
		id.Algorithm = asn1.ObjectIdentifier{1, 3, 101, 112}
	case RSA:
		id.Algorithm, hash = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 11}, crypto.SHA256
		id.Parameters = asn1.NullRawValue
	}
	der, err := asn1.Marshal(id)
	return algorithm{der, hash}, err
}

// checkSignature verifies what a key returned, before anybody sees it: a key in hardware, or with a fault, may err.
func (a algorithm) checkSignature(pub crypto.PublicKey, message, sig []byte) error {
	digest := message
	if a.hash != 0 {
		h := a.hash.New()
		h.Write(message)
		digest = h.Sum(nil)
	}
	ok := false
	switch k := pub.(type) {
	case *ecdsa.PublicKey:
		ok = ecdsa.VerifyASN1(k, digest, sig)
	case ed25519.PublicKey:
		ok = ed25519.Verify(k, message, sig)
	case *rsa.PublicKey:
		ok = rsa.VerifyPKCS1v15(k, a.hash, digest, sig) == nil
	}
	if !ok {
		return errors.New("the issuing key returned a signature that does not verify")
	}
	return nil
}

// template is everything that goes into the to-be-signed bytes.
type template struct {
	keyType             KeyType // of the subject; not written
	serial              []byte  // big-endian, positive
	algorithm           []byte  // DER
	issuer, subject     []byte  // DER names
	notBefore, notAfter time.Time
	spki                []byte // DER
	ski, aki            []byte
	keyUsage            x509.KeyUsage
	ca                  bool
	pathLen             int
	uri                 string
	dns                 []string
	ips                 []netip.Addr
	attestation         []byte // DER, nil for none
}

func (t *template) marshal() ([]byte, error) {
	b := cryptobyte.NewBuilder(make([]byte, 0, 1024))
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.Tag(0).ContextSpecific().Constructed(), func(b *cryptobyte.Builder) { b.AddASN1Int64(2) })
		b.AddASN1(cbasn1.INTEGER, func(b *cryptobyte.Builder) { b.AddBytes(t.serial) })
		b.AddBytes(t.algorithm)
		b.AddBytes(t.issuer)
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			addTime(b, t.notBefore)
			addTime(b, t.notAfter)
		})
		b.AddBytes(t.subject)
		b.AddBytes(t.spki)
		b.AddASN1(cbasn1.Tag(3).ContextSpecific().Constructed(), func(b *cryptobyte.Builder) {
			b.AddASN1(cbasn1.SEQUENCE, t.addExtensions)
		})
	})
	return b.Bytes()
}

func (t *template) addExtensions(b *cryptobyte.Builder) {
	addExtension(b, oidKeyUsage, true, func(b *cryptobyte.Builder) { addKeyUsage(b, t.keyUsage) })
	if !t.ca {
		addExtension(b, oidExtKeyUsage, false, func(b *cryptobyte.Builder) {
			b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
				b.AddASN1ObjectIdentifier(oidServerAuth)
				b.AddASN1ObjectIdentifier(oidClientAuth)
			})
		})
	}
	addExtension(b, oidBasic, true, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			if t.ca {
				b.AddASN1Boolean(true)
				if t.pathLen >= 0 {
					b.AddASN1Int64(int64(t.pathLen))
				}
			}
		})
	})
	addExtension(b, oidSKI, false, func(b *cryptobyte.Builder) { b.AddASN1OctetString(t.ski) })
	addExtension(b, oidAKI, false, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddASN1(cbasn1.Tag(0).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes(t.aki) })
		})
	})
	// RFC 5280 section 4.1.2.6: critical when the subject is empty.
	addExtension(b, oidSAN, len(t.subject) == 2, t.addSAN)
	if t.attestation != nil {
		addExtension(b, oidAttestation, false, func(b *cryptobyte.Builder) { b.AddBytes(t.attestation) })
	}
}

func (t *template) addSAN(b *cryptobyte.Builder) {
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.Tag(6).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes([]byte(t.uri)) })
		for _, d := range t.dns {
			b.AddASN1(cbasn1.Tag(2).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes([]byte(d)) })
		}
		for _, ip := range t.ips {
			b.AddASN1(cbasn1.Tag(7).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes(ip.AsSlice()) })
		}
	})
}

func addExtension(b *cryptobyte.Builder, oid asn1.ObjectIdentifier, critical bool, value cryptobyte.BuilderContinuation) {
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1ObjectIdentifier(oid)
		if critical {
			b.AddASN1Boolean(true)
		}
		b.AddASN1(cbasn1.OCTET_STRING, value)
	})
}

// addKeyUsage writes the named bit list: bit i of usage is bit i of the list, trailing zero bits are left out (DER).
func addKeyUsage(b *cryptobyte.Builder, usage x509.KeyUsage) {
	var bits [2]byte
	last := 0
	for i := range 9 {
		if usage&(1<<i) != 0 {
			bits[i/8] |= 0x80 >> (i % 8)
			last = i
		}
	}
	b.AddASN1(cbasn1.BIT_STRING, func(b *cryptobyte.Builder) {
		b.AddUint8(uint8(7 - last%8))
		b.AddBytes(bits[:last/8+1])
	})
}

// addTime writes UTCTime up to 2049 and GeneralizedTime from then on (RFC 5280 section 4.1.2.5).
func addTime(b *cryptobyte.Builder, t time.Time) {
	t = t.UTC()
	if t.Year() < 2050 {
		b.AddASN1UTCTime(t)
		return
	}
	b.AddASN1GeneralizedTime(t)
}

// assemble puts a certificate together from its signed bytes.
func assemble(tbs, algorithm, signature []byte) ([]byte, error) {
	b := cryptobyte.NewBuilder(make([]byte, 0, len(tbs)+len(signature)+32))
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddBytes(tbs)
		b.AddBytes(algorithm)
		b.AddASN1BitString(signature)
	})
	return b.Bytes()
}

var emptyName = []byte{0x30, 0x00}

// keyID returns the subject key identifier: the leftmost 160 bits of the SHA-256 of the key's bits (RFC 7093
// section 2, method 1).
func keyID(spki []byte) ([]byte, error) {
	in := cryptobyte.String(spki)
	var info, algorithm, key cryptobyte.String
	var unused uint8
	if !in.ReadASN1(&info, cbasn1.SEQUENCE) || !info.ReadASN1(&algorithm, cbasn1.SEQUENCE) ||
		!info.ReadASN1(&key, cbasn1.BIT_STRING) || !key.ReadUint8(&unused) || unused != 0 {
		return nil, errors.New("public key does not parse")
	}
	sum := sha256.Sum256(key)
	return sum[:20], nil
}
