package csr

import (
	"crypto"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"strings"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr/pkcs10"
	"github.com/chancery-project/chancery/trust"
)

// maxCSR bounds a CSR in DER: an RSA-8192 request with a 2,048-byte ID has under 5 kB.
const maxCSR = 16 << 10

// decodePEM returns the DER of a PEM request.
func decodePEM(s string) ([]byte, *Denial) {
	if len(s) > 2*maxCSR { // before the decoder works on it
		return nil, badCSR("the CSR has %d bytes of PEM; at most %d are read", len(s), 2*maxCSR)
	}
	block, rest := pem.Decode([]byte(s))
	switch {
	case block == nil:
		return nil, badCSR("the CSR is not PEM; expected -----BEGIN CERTIFICATE REQUEST-----")
	case block.Type != "CERTIFICATE REQUEST" && block.Type != "NEW CERTIFICATE REQUEST":
		return nil, badCSR("the PEM block is a %.40q; expected a CERTIFICATE REQUEST", block.Type)
	case strings.TrimSpace(string(rest)) != "":
		return nil, badCSR("there is more behind the first PEM block; send one CSR")
	}
	return block.Bytes, nil
}

// parseCSR checks a request in DER and returns the public key, the one thing that is taken from it (invariant 2). The
// key is judged before the signature, whose cost grows with it. Names must say id, in this or another trust
// domain of ours (decision D17).
func parseCSR(der []byte, id trust.ID, says func(name string) bool) (crypto.PublicKey, *Denial) {
	if len(der) == 0 || len(der) > maxCSR {
		return nil, badCSR("the CSR has %d bytes of DER; 1 to %d are read", len(der), maxCSR)
	}
	req, err := pkcs10.Parse(der)
	if err != nil {
		return nil, badCSR("the CSR does not parse: %v", err)
	}
	if _, err := ca.TypeOf(req.PublicKey); err != nil {
		return nil, badCSR("the CSR's key: %v", err)
	}
	if err := req.CheckSignature(); err != nil {
		return nil, badCSR("the CSR's signature does not prove possession of its key: %v", err)
	}
	if err := checkNames(req, id, says); err != nil {
		return nil, &Denial{Code: codes.PermissionDenied, Reason: ReasonCSRNames, Detail: err.Error()}
	}
	return req.PublicKey, nil
}

func badCSR(format string, args ...any) *Denial {
	return &Denial{Code: codes.InvalidArgument, Reason: ReasonCSR, Detail: fmt.Sprintf(format, args...)}
}

// checkNames accepts no names, or those that say the identity: as the only URI SAN, and as the common name. Istio's agents send
// an organisation with an empty value, which names nobody.
func checkNames(req *pkcs10.Request, id trust.ID, says func(name string) bool) error {
	for _, a := range req.Subject {
		if len(a.Value) > 0 && (a.Tag != cbasn1.UTF8String && a.Tag != cbasn1.PrintableString && a.Tag != cbasn1.IA5String || !says(string(a.Value))) {
			return fmt.Errorf("the CSR's subject has %s=%.80q; leave the subject empty, the identity is %s", dotted(a.OID), a.Value, id)
		}
	}
	if req.SAN == nil {
		return nil
	}
	return onlyURI(req.SAN, id, says)
}

// dotted writes an OID as people know it.
func dotted(octets []byte) string {
	b := cryptobyte.NewBuilder(nil)
	b.AddASN1(cbasn1.OBJECT_IDENTIFIER, func(b *cryptobyte.Builder) { b.AddBytes(octets) })
	var oid asn1.ObjectIdentifier
	if in := cryptobyte.String(b.BytesOrPanic()); !in.ReadASN1ObjectIdentifier(&oid) {
		return fmt.Sprintf("(%x)", octets)
	}
	return oid.String()
}

// onlyURI reads subject alternative names itself: crypto/x509 skips some types of names in silence, and what it returns
// as a URI has lost an empty fragment and the case of its scheme.
func onlyURI(value []byte, id trust.ID, says func(name string) bool) error {
	der, names := cryptobyte.String(value), cryptobyte.String(nil)
	if !der.ReadASN1(&names, cbasn1.SEQUENCE) || !der.Empty() {
		return fmt.Errorf("the CSR's subject alternative names do not parse")
	}
	for first := true; !names.Empty(); first = false {
		var name cryptobyte.String
		var tag cbasn1.Tag
		switch {
		case !names.ReadAnyASN1(&name, &tag):
			return fmt.Errorf("the CSR's subject alternative names do not parse")
		case tag != cbasn1.Tag(6).ContextSpecific():
			return fmt.Errorf("the CSR asks for a name of type %d (%.80q); only the SPIFFE ID as a URI is issued", tag&0x1f, []byte(name))
		case !says(string(name)):
			return fmt.Errorf("the CSR asks for the URI %.120q; the identity is %s", []byte(name), id)
		case !first:
			return fmt.Errorf("the CSR has more than one URI; an SVID has exactly one, %s", id)
		}
	}
	return nil
}
