// Package pkcs10 owns reading certificate requests (PKCS #10, RFC 2986): the public key, the proof that the sender has its
// private key, and the names asked for, as they stand in the request.
//
// It reads what crypto/x509 reads, and gives the same key, at a fifth of the price: every issuance reads one. Names are
// left as they stand, since crypto/x509 drops some and changes others.
// It refuses requests that are not DER, have an extension twice, or are signed by way of SHA-1 and older, and to judge
// keys and names.
package pkcs10

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"

	"github.com/chancery-project/chancery/ca/tbs"
)

// Request is a certificate request. Its slices point into the DER that it was read from.
type Request struct {
	PublicKey crypto.PublicKey
	Subject   []Attribute
	SAN       []byte // the value of the extension for subject alternative names; nil if there is none

	message   []byte // what is signed
	algorithm x509.SignatureAlgorithm
	signature []byte
}

// Attribute is one part of a subject's name.
type Attribute struct {
	OID   []byte // the octets of the OBJECT IDENTIFIER
	Tag   cbasn1.Tag
	Value []byte // the octets of the value
}

var (
	oidExtensionRequest = tbs.Octets(asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 14}) // PKCS #9
	oidSAN              = tbs.Octets(tbs.OIDSAN)
)

// Parse reads a request in DER. Its signature is not checked yet.
func Parse(der []byte) (*Request, error) {
	in := cryptobyte.String(der)
	var outer, algorithm, signature, message cryptobyte.String
	switch {
	case !in.ReadASN1(&outer, cbasn1.SEQUENCE):
		return nil, errors.New("it is not one DER SEQUENCE")
	case !in.Empty():
		return nil, errors.New("trailing data")
	case !outer.ReadASN1Element(&message, cbasn1.SEQUENCE):
		return nil, errors.New("no certificationRequestInfo")
	case !outer.ReadASN1Element(&algorithm, cbasn1.SEQUENCE):
		return nil, errors.New("no signatureAlgorithm")
	case !readBits(&outer, &signature) || !outer.Empty():
		return nil, errors.New("no signature, or more behind it")
	}
	r := &Request{message: message, signature: signature}
	if err := r.readInfo(message); err != nil {
		return nil, err
	}
	var ok bool
	if r.algorithm, ok = algorithms[string(algorithm)]; !ok {
		var err error
		if r.algorithm, err = rareAlgorithm(der); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// readBits reads a BIT STRING of whole octets.
func readBits(in, out *cryptobyte.String) bool {
	var unused uint8
	return in.ReadASN1(out, cbasn1.BIT_STRING) && out.ReadUint8(&unused) && unused == 0
}

// readInfo reads the signed part.
func (r *Request) readInfo(message cryptobyte.String) error {
	var info, subject, spki, attributes cryptobyte.String
	var version int64
	switch {
	case !message.ReadASN1(&info, cbasn1.SEQUENCE):
		return errors.New("no certificationRequestInfo")
	case !info.ReadASN1Integer(&version):
		return errors.New("no version")
	case !info.ReadASN1(&subject, cbasn1.SEQUENCE):
		return errors.New("no subject")
	case !info.ReadASN1Element(&spki, cbasn1.SEQUENCE):
		return errors.New("no subjectPKInfo")
	case !info.ReadASN1(&attributes, cbasn1.Tag(0).ContextSpecific().Constructed()) || !info.Empty():
		return errors.New("no attributes, or more behind them")
	}
	var err error
	if r.PublicKey, err = parseKey(spki); err != nil {
		return fmt.Errorf("public key: %w", err)
	}
	if r.Subject, err = readName(subject); err != nil {
		return err
	}
	return r.readAttributes(attributes)
}

func parseKey(spki []byte) (crypto.PublicKey, error) {
	if point, ok := bytes.CutPrefix(spki, tbs.P256Prefix); ok {
		return ecdsa.ParseUncompressedPublicKey(elliptic.P256(), point)
	}
	return x509.ParsePKIXPublicKey(spki)
}

// readName reads a Name (RFC 5280 section 4.1.2.4): SETs of attributes, mostly of one.
func readName(name cryptobyte.String) ([]Attribute, error) {
	var out []Attribute
	for !name.Empty() {
		var set cryptobyte.String
		if !name.ReadASN1(&set, cbasn1.SET) {
			return nil, errors.New("the subject does not parse")
		}
		for !set.Empty() {
			var pair cryptobyte.String
			var a Attribute
			if !set.ReadASN1(&pair, cbasn1.SEQUENCE) || !pair.ReadASN1((*cryptobyte.String)(&a.OID), cbasn1.OBJECT_IDENTIFIER) ||
				!pair.ReadAnyASN1((*cryptobyte.String)(&a.Value), &a.Tag) || !pair.Empty() {
				return nil, errors.New("the subject does not parse")
			}
			out = append(out, a)
		}
	}
	return out, nil
}

// readAttributes looks for requested extensions (RFC 2985 section 5.4.2) and skips other attributes.
func (r *Request) readAttributes(in cryptobyte.String) error {
	var seen [][]byte // OIDs of extensions
	for !in.Empty() {
		var attribute, oid, values cryptobyte.String
		if !in.ReadASN1(&attribute, cbasn1.SEQUENCE) || !attribute.ReadASN1(&oid, cbasn1.OBJECT_IDENTIFIER) ||
			!attribute.ReadASN1(&values, cbasn1.SET) || !attribute.Empty() {
			return errors.New("an attribute does not parse")
		}
		if string(oid) != oidExtensionRequest {
			continue
		}
		var list cryptobyte.String
		if !values.ReadASN1(&list, cbasn1.SEQUENCE) || !values.Empty() {
			return errors.New("the requested extensions do not parse")
		}
		for !list.Empty() {
			oid, value, ok := readExtension(&list)
			if !ok {
				return errors.New("a requested extension does not parse")
			}
			for _, other := range seen {
				if bytes.Equal(oid, other) {
					return errors.New("duplicate requested extension")
				}
			}
			if seen = append(seen, oid); len(seen) > maxExtensions {
				return fmt.Errorf("more than %d requested extensions", maxExtensions)
			}
			if string(oid) == oidSAN {
				r.SAN = value
			}
		}
	}
	return nil
}

// maxExtensions bounds the search for duplicates.
const maxExtensions = 50

func readExtension(list *cryptobyte.String) (oid, value []byte, ok bool) {
	var extension cryptobyte.String
	var critical bool
	ok = list.ReadASN1(&extension, cbasn1.SEQUENCE) && extension.ReadASN1((*cryptobyte.String)(&oid), cbasn1.OBJECT_IDENTIFIER) &&
		(!extension.PeekASN1Tag(cbasn1.BOOLEAN) || extension.ReadASN1Boolean(&critical)) &&
		extension.ReadASN1((*cryptobyte.String)(&value), cbasn1.OCTET_STRING) && extension.Empty()
	return oid, value, ok
}

// CheckSignature verifies that the sender has the private key.
func (r *Request) CheckSignature() error {
	x := x509.CertificateRequest{
		RawTBSCertificateRequest: r.message, SignatureAlgorithm: r.algorithm, Signature: r.signature, PublicKey: r.PublicKey,
	}
	return x.CheckSignature()
}

// algorithms are the usual ones by their AlgorithmIdentifier in DER: RFC 5758 section 3.2, RFC 8410 section 3, and RFC 4055
// section 5 with its NULL.
var algorithms = map[string]x509.SignatureAlgorithm{
	ecdsaWith(2):                   x509.ECDSAWithSHA256,
	ecdsaWith(3):                   x509.ECDSAWithSHA384,
	ecdsaWith(4):                   x509.ECDSAWithSHA512,
	"\x30\x05\x06\x03\x2b\x65\x70": x509.PureEd25519,
	rsaWith(11):                    x509.SHA256WithRSA,
	rsaWith(12):                    x509.SHA384WithRSA,
	rsaWith(13):                    x509.SHA512WithRSA,
}

func ecdsaWith(last byte) string {
	return "\x30\x0a\x06\x08\x2a\x86\x48\xce\x3d\x04\x03" + string(rune(last))
}

func rsaWith(last byte) string {
	return "\x30\x0d\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x01" + string(rune(last)) + "\x05\x00"
}

// rareAlgorithm asks crypto/x509, which knows the parameters of RSA-PSS.
func rareAlgorithm(der []byte) (x509.SignatureAlgorithm, error) {
	x, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return 0, err
	}
	switch x.SignatureAlgorithm {
	case x509.SHA256WithRSAPSS, x509.SHA384WithRSAPSS, x509.SHA512WithRSAPSS:
		return x.SignatureAlgorithm, nil
	}
	return 0, fmt.Errorf("signature algorithm %s is not accepted; sign with SHA-256 or better", x.SignatureAlgorithm)
}
