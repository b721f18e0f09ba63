package ca

import (
	"crypto/x509"
	"encoding/asn1"
	"fmt"
	"time"

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
	der, err := asn1.Marshal(attestationASN1{a.Cluster, a.PodHash, a.Node, a.Time.UTC().Truncate(time.Second)})
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
			return nil, fmt.Errorf("attestation extension of certificate %x does not parse", c.SerialNumber)
		}
		return &Attestation{a.Cluster, a.PodHash, a.Node, a.Time}, nil
	}
	return nil, nil
}
