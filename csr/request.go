package csr

import (
	"crypto"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"strings"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/trust"
)

// maxCSR bounds a CSR in DER: an RSA-8192 request with a 2,048-byte ID has under 5 kB.
const maxCSR = 16 << 10

var oidSAN = asn1.ObjectIdentifier{2, 5, 29, 17}

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
// key is judged before the signature, whose cost grows with it. Names must agree with id (decision D17).
func parseCSR(der []byte, id trust.ID) (crypto.PublicKey, *Denial) {
	if len(der) == 0 || len(der) > maxCSR {
		return nil, badCSR("the CSR has %d bytes of DER; 1 to %d are read", len(der), maxCSR)
	}
	req, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, badCSR("the CSR does not parse: %v", err)
	}
	if _, err := ca.TypeOf(req.PublicKey); err != nil {
		return nil, badCSR("the CSR's key: %v", err)
	}
	if err := req.CheckSignature(); err != nil {
		return nil, badCSR("the CSR's signature does not prove possession of its key: %v", err)
	}
	if err := checkNames(req, id); err != nil {
		return nil, &Denial{Code: codes.PermissionDenied, Reason: ReasonCSRNames, Detail: err.Error()}
	}
	return req.PublicKey, nil
}

func badCSR(format string, args ...any) *Denial {
	return &Denial{Code: codes.InvalidArgument, Reason: ReasonCSR, Detail: fmt.Sprintf(format, args...)}
}

// checkNames accepts no names, or the identity's own: as the only URI SAN, and as the common name. Istio's agents send
// an organisation with an empty value, which names nobody.
func checkNames(req *x509.CertificateRequest, id trust.ID) error {
	for _, attr := range req.Subject.Names {
		if v, ok := attr.Value.(string); !ok || v != "" && v != id.String() {
			return fmt.Errorf("the CSR's subject has %s=%.80q; leave the subject empty, the identity is %s", attr.Type, attr.Value, id)
		}
	}
	for _, e := range req.Extensions {
		if e.Id.Equal(oidSAN) { // there is one at most, or it would not have parsed
			return onlyURI(e.Value, id)
		}
	}
	return nil
}

// onlyURI reads subject alternative names itself: crypto/x509 skips some types of names in silence, and what it returns
// as a URI has lost an empty fragment and the case of its scheme.
func onlyURI(value []byte, id trust.ID) error {
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
		case string(name) != id.String():
			return fmt.Errorf("the CSR asks for the URI %.120q; the identity is %s", []byte(name), id)
		case !first:
			return fmt.Errorf("the CSR has more than one URI; an SVID has exactly one, %s", id)
		}
	}
	return nil
}
