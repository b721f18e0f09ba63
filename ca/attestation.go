package ca

import (
	"crypto/x509"
	"encoding/asn1"
	"fmt"
	"time"
	"unicode/utf8"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"

	"github.com/chancery-project/chancery/ca/tbs"
)

// Attestation says how the holder of a certificate last proved itself with a token (decision D16). It is copied on
// renewal by certificate, so that renewal can be refused once the proof is too old or its pod is gone. The extension
// is not critical: other validators ignore it.
type Attestation struct {
	Cluster string
	PodHash []byte // of the pod's UID, see csr.PodHash; empty for tokens not bound to a pod
	Node    string
	Time    time.Time // to the second
}

type attestationASN1 struct {
	Cluster string `asn1:"utf8"`
	PodHash []byte
	Node    string    `asn1:"utf8"`
	Time    time.Time `asn1:"generalized"`
}

func (a *Attestation) marshal() ([]byte, error) {
	if !utf8.ValidString(a.Cluster) || !utf8.ValidString(a.Node) {
		return nil, fmt.Errorf("encoding attestation: cluster %.80q or node %.80q is not UTF-8", a.Cluster, a.Node)
	}
	b := cryptobyte.NewBuilder(make([]byte, 0, 128))
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1(cbasn1.UTF8String, func(b *cryptobyte.Builder) { b.AddBytes([]byte(a.Cluster)) })
		b.AddASN1OctetString(a.PodHash)
		b.AddASN1(cbasn1.UTF8String, func(b *cryptobyte.Builder) { b.AddBytes([]byte(a.Node)) })
		b.AddASN1GeneralizedTime(a.Time.UTC())
	})
	der, err := b.Bytes()
	if err != nil {
		return nil, fmt.Errorf("encoding attestation: %w", err)
	}
	return der, nil
}

// AttestationOf returns the attestation in a certificate, or nil if it has none.
func AttestationOf(c *x509.Certificate) (*Attestation, error) {
	for _, e := range c.Extensions {
		if !e.Id.Equal(tbs.OIDAttestation) {
			continue
		}
		var a attestationASN1
		if rest, err := asn1.Unmarshal(e.Value, &a); err != nil || len(rest) > 0 {
			return nil, fmt.Errorf("attestation extension of certificate %x does not parse", c.SerialNumber.Bytes())
		}
		return &Attestation{a.Cluster, a.PodHash, a.Node, a.Time}, nil
	}
	return nil, nil
}
