package trust

import (
	"crypto/tls"
	"errors"
	"fmt"
	"time"
)

// ClientTLS returns a TLS 1.3 configuration for a client of a SPIFFE server. The server's chain must verify against
// the bundle of its trust domain and its ID must be want; host names play no part. own gives the client's SVID, or
// nil where it has none to show.
//
// The check sits in VerifyConnection, which also runs when a session is resumed; VerifyPeerCertificate does not.
func ClientTLS(want ID, bundleOf func(Domain) *Bundle, own func() *Identity) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // replaced by VerifyConnection: SPIFFE verification has no host names
		VerifyConnection: func(cs tls.ConnectionState) error {
			id, _, err := Verify(cs.PeerCertificates, bundleOf, time.Now())
			if err != nil {
				return fmt.Errorf("verifying server: %w", err)
			}
			if id != want {
				return fmt.Errorf("server is %s; expected %s", id, want)
			}
			return nil
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if id := own(); id != nil {
				return id.TLSCertificate(), nil
			}
			return new(tls.Certificate), nil // none to show
		},
	}
}

// ServerTLS returns a TLS 1.3 configuration for a server that presents the identity of each moment and asks for a
// client certificate without judging it: a client with an expired SVID must still be able to come with a token, so
// whoever authenticates the call verifies the certificate (Verify).
func ServerTLS(own func() *Identity) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequestClientCert,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			if id := own(); id != nil {
				return id.TLSCertificate(), nil
			}
			return nil, errors.New("no server certificate yet")
		},
		SessionTicketsDisabled: true, // a resumed session would keep a client certificate alive past its end
		// Answers are of use once they are there as a whole: small records first, as for a browser, only cost.
		DynamicRecordSizingDisabled: true,
	}
}
