// Package san owns how the URI of a certificate is read: byte for byte, as it stands in the subject alternative names. It refuses certificates with
// more than one, and knows nothing of what the URI means.
package san

import (
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"
)

var oidSAN = asn1.ObjectIdentifier{2, 5, 29, 17}

// URI returns a certificate's only URI, byte for byte. What crypto/x509 returns went through net/url, which loses the
// case of a scheme and an empty fragment: two certificates that differ would be one identity.
func URI(cert *x509.Certificate) (string, error) {
	var uris []string
	for _, e := range cert.Extensions {
		if !e.Id.Equal(oidSAN) { // there is one at most, or it would not have parsed
			continue
		}
		der, names := cryptobyte.String(e.Value), cryptobyte.String(nil)
		if !der.ReadASN1(&names, cbasn1.SEQUENCE) || !der.Empty() {
			return "", errors.New("certificate's subject alternative names do not parse")
		}
		for !names.Empty() {
			var name cryptobyte.String
			var tag cbasn1.Tag
			if !names.ReadAnyASN1(&name, &tag) {
				return "", errors.New("certificate's subject alternative names do not parse")
			}
			if tag == cbasn1.Tag(6).ContextSpecific() {
				uris = append(uris, string(name))
			}
		}
	}
	if len(uris) != 1 {
		return "", fmt.Errorf("certificate has %d URI SANs; an SVID has exactly one (X509-SVID section 2)", len(uris))
	}
	return uris[0], nil
}
