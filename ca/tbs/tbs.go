// Package tbs owns the to-be-signed bytes: of certificates (RFC 5280 section 4.1) and of CRLs (section 5.1), the algorithm
// identifiers that go with each kind of key, and putting bytes and signature together.
//
// Chancery writes these bytes itself, and not with x509.CreateCertificate, so that they exist, and can be linted and
// logged, before the key is used; what is signed is then exactly what was linted (invariant 1).
//
// It refuses to judge: it writes what a Template or CRL says, and package ca lints what was written.
package tbs

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/mldsa"
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

// Object identifiers of the extensions.
var (
	OIDSKI         = asn1.ObjectIdentifier{2, 5, 29, 14}
	OIDKeyUsage    = asn1.ObjectIdentifier{2, 5, 29, 15}
	OIDSAN         = asn1.ObjectIdentifier{2, 5, 29, 17}
	OIDBasic       = asn1.ObjectIdentifier{2, 5, 29, 19}
	OIDAKI         = asn1.ObjectIdentifier{2, 5, 29, 35}
	OIDExtKeyUsage = asn1.ObjectIdentifier{2, 5, 29, 37}
	OIDCRLNumber   = asn1.ObjectIdentifier{2, 5, 29, 20}

	// OIDAttestation marks the extension of ca.Attestation. Chancery has no number of its own from IANA, so it lies under
	// the arc for UUIDs, which nobody administers, with an arc short enough for every parser ("CHNC" in ASCII).
	OIDAttestation = asn1.ObjectIdentifier{2, 25, 0x43484E43, 1}

	// Of extended key usages.
	OIDServerAuth = asn1.ObjectIdentifier{1, 3, 6, 1, 5, 5, 7, 3, 1}
	OIDClientAuth = asn1.ObjectIdentifier{1, 3, 6, 1, 5, 5, 7, 3, 2}
)

// Octets returns the contents of an OID in DER, as readers of DER compare it.
func Octets(oid asn1.ObjectIdentifier) string {
	b := cryptobyte.NewBuilder(nil)
	b.AddASN1ObjectIdentifier(oid)
	return string(b.BytesOrPanic()[2:])
}

// Algorithm is how one kind of key signs.
type Algorithm struct {
	ID   []byte      // the AlgorithmIdentifier in DER
	Hash crypto.Hash // 0 for keys that take the whole message
}

// AlgorithmOf returns how a key signs, or an error for a kind of key that signs nothing here.
func AlgorithmOf(pub crypto.PublicKey) (Algorithm, error) {
	var id pkix.AlgorithmIdentifier
	var hash crypto.Hash
	switch k := pub.(type) {
	case *ecdsa.PublicKey:
		switch k.Curve {
		case elliptic.P256():
			id.Algorithm, hash = asn1.ObjectIdentifier{1, 2, 840, 10045, 4, 3, 2}, crypto.SHA256
		case elliptic.P384():
			id.Algorithm, hash = asn1.ObjectIdentifier{1, 2, 840, 10045, 4, 3, 3}, crypto.SHA384
		}
	case ed25519.PublicKey:
		id.Algorithm = asn1.ObjectIdentifier{1, 3, 101, 112}
	case *rsa.PublicKey:
		id.Algorithm, hash = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 11}, crypto.SHA256
		id.Parameters = asn1.NullRawValue
	case *mldsa.PublicKey: // RFC 9881: no parameters, and the message itself is signed, not a hash of it
		if k.Parameters() == mldsa.MLDSA65() {
			id.Algorithm = asn1.ObjectIdentifier{2, 16, 840, 1, 101, 3, 4, 3, 18}
		}
	}
	if id.Algorithm == nil {
		return Algorithm{}, fmt.Errorf("keys of type %T do not sign here", pub)
	}
	der, err := asn1.Marshal(id)
	return Algorithm{der, hash}, err
}

// Check verifies what a key returned, before anybody sees it: a key in hardware, or with a fault, may err.
func (a Algorithm) Check(pub crypto.PublicKey, message, sig []byte) error {
	digest := message
	if a.Hash != 0 {
		h := a.Hash.New()
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
		ok = rsa.VerifyPKCS1v15(k, a.Hash, digest, sig) == nil
	case *mldsa.PublicKey:
		ok = mldsa.Verify(k, message, sig, nil) == nil
	}
	if !ok {
		return errors.New("the issuing key returned a signature that does not verify")
	}
	return nil
}

// Template is everything that goes into the to-be-signed bytes of a certificate.
type Template struct {
	Serial              []byte // big-endian, positive
	Algorithm           []byte // DER
	Issuer, Subject     []byte // DER names
	NotBefore, NotAfter time.Time
	SPKI                []byte // DER
	SKI, AKI            []byte
	KeyUsage            x509.KeyUsage
	CA                  bool
	PathLen             int // below 0: no bound
	URI                 string
	DNS                 []string
	IPs                 []netip.Addr
	Attestation         []byte // DER, nil for none
}

// Marshal writes the to-be-signed bytes.
func (t *Template) Marshal() ([]byte, error) {
	b := cryptobyte.NewBuilder(make([]byte, 0, 1024))
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.Tag(0).ContextSpecific().Constructed(), func(b *cryptobyte.Builder) { b.AddASN1Int64(2) })
		b.AddASN1(cbasn1.INTEGER, func(b *cryptobyte.Builder) { b.AddBytes(t.Serial) })
		b.AddBytes(t.Algorithm)
		b.AddBytes(t.Issuer)
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			addTime(b, t.NotBefore)
			addTime(b, t.NotAfter)
		})
		b.AddBytes(t.Subject)
		b.AddBytes(t.SPKI)
		b.AddASN1(cbasn1.Tag(3).ContextSpecific().Constructed(), func(b *cryptobyte.Builder) {
			b.AddASN1(cbasn1.SEQUENCE, t.addExtensions)
		})
	})
	return b.Bytes()
}

func (t *Template) addExtensions(b *cryptobyte.Builder) {
	addExtension(b, OIDKeyUsage, true, func(b *cryptobyte.Builder) { AddKeyUsage(b, t.KeyUsage) })
	if t.CA {
		addBasic(b, true, t.PathLen)
	} else {
		b.AddBytes(leafExtensions)
	}
	addExtension(b, OIDSKI, false, func(b *cryptobyte.Builder) { b.AddASN1OctetString(t.SKI) })
	addAKI(b, t.AKI)
	// RFC 5280 section 4.1.2.6: critical when the subject is empty.
	addExtension(b, OIDSAN, len(t.Subject) == 2, t.addSAN)
	if t.Attestation != nil {
		addExtension(b, OIDAttestation, false, func(b *cryptobyte.Builder) { b.AddBytes(t.Attestation) })
	}
}

// leafExtensions are the two that all leaves have alike.
var leafExtensions = func() []byte {
	b := cryptobyte.NewBuilder(nil)
	addExtension(b, OIDExtKeyUsage, false, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddASN1ObjectIdentifier(OIDServerAuth)
			b.AddASN1ObjectIdentifier(OIDClientAuth)
		})
	})
	addBasic(b, false, -1)
	return b.BytesOrPanic()
}()

func addBasic(b *cryptobyte.Builder, ca bool, pathLen int) {
	addExtension(b, OIDBasic, true, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			if !ca {
				return // FALSE is the default, which DER leaves out
			}
			b.AddASN1Boolean(true)
			if pathLen >= 0 {
				b.AddASN1Int64(int64(pathLen))
			}
		})
	})
}

func (t *Template) addSAN(b *cryptobyte.Builder) {
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.Tag(6).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes([]byte(t.URI)) })
		for _, d := range t.DNS {
			b.AddASN1(cbasn1.Tag(2).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes([]byte(d)) })
		}
		for _, ip := range t.IPs {
			b.AddASN1(cbasn1.Tag(7).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes(ip.AsSlice()) })
		}
	})
}

func addAKI(b *cryptobyte.Builder, id []byte) {
	addExtension(b, OIDAKI, false, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddASN1(cbasn1.Tag(0).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes(id) })
		})
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

// AddKeyUsage writes the named bit list: bit i of usage is bit i of the list, trailing zero bits are left out (DER).
func AddKeyUsage(b *cryptobyte.Builder, usage x509.KeyUsage) {
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

// Assemble puts a certificate or CRL together from its signed bytes.
func Assemble(tbs, algorithm, signature []byte) ([]byte, error) {
	b := cryptobyte.NewBuilder(make([]byte, 0, len(tbs)+len(signature)+32))
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddBytes(tbs)
		b.AddBytes(algorithm)
		b.AddASN1BitString(signature)
	})
	return b.Bytes()
}

// EmptyName is a name without any part, in DER.
var EmptyName = []byte{0x30, 0x00}

// Key returns a public key's SubjectPublicKeyInfo in DER. That of P-256, which nearly all keys are, is written here, at a
// tenth of the price.
func Key(pub crypto.PublicKey) ([]byte, error) {
	k, ok := pub.(*ecdsa.PublicKey)
	if !ok || k.Curve != elliptic.P256() {
		return x509.MarshalPKIXPublicKey(pub)
	}
	point, err := k.Bytes() // checks that it is a point of the curve
	if err != nil {
		return nil, err
	}
	return append(P256Prefix[:len(P256Prefix):len(P256Prefix)], point...), nil
}

// P256Prefix is what the SubjectPublicKeyInfo of every P-256 key begins with (RFC 5480 section 2); the uncompressed
// point, of 65 octets, follows.
var P256Prefix = []byte{
	0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01,
	0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
}

// KeyID returns the subject key identifier: the leftmost 160 bits of the SHA-256 of the key's bits (RFC 7093
// section 2, method 1).
func KeyID(spki []byte) ([]byte, error) {
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
