package tbs

import (
	"encoding/asn1"
	"math/big"
	"time"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"
)

var oidReason = asn1.ObjectIdentifier{2, 5, 29, 21}

// CRL is everything that goes into the to-be-signed bytes of a version 2 CRL.
type CRL struct {
	Algorithm              []byte // DER
	Issuer                 []byte // DER name
	ThisUpdate, NextUpdate time.Time
	Number                 *big.Int // from 0
	AKI                    []byte
	Entries                []CRLEntry
}

// CRLEntry is one revoked certificate.
type CRLEntry struct {
	Serial *big.Int
	Time   time.Time // of revocation
	Reason int       // CRLReason of RFC 5280 section 5.3.1; 0, unspecified, is left out, as that section asks
}

// Marshal writes the to-be-signed bytes.
func (c *CRL) Marshal() ([]byte, error) {
	b := cryptobyte.NewBuilder(make([]byte, 0, 256+48*len(c.Entries)))
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1Int64(1) // version 2
		b.AddBytes(c.Algorithm)
		b.AddBytes(c.Issuer)
		addTime(b, c.ThisUpdate)
		addTime(b, c.NextUpdate)
		if len(c.Entries) > 0 { // section 5.1.2.6: absent when there is none
			b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
				for _, e := range c.Entries {
					e.add(b)
				}
			})
		}
		b.AddASN1(cbasn1.Tag(0).ContextSpecific().Constructed(), func(b *cryptobyte.Builder) {
			b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
				addAKI(b, c.AKI)
				addExtension(b, OIDCRLNumber, false, func(b *cryptobyte.Builder) { b.AddASN1BigInt(c.Number) })
			})
		})
	})
	return b.Bytes()
}

func (e CRLEntry) add(b *cryptobyte.Builder) {
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1BigInt(e.Serial)
		addTime(b, e.Time)
		if e.Reason == 0 {
			return
		}
		b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
			addExtension(b, oidReason, false, func(b *cryptobyte.Builder) { b.AddASN1Enum(int64(e.Reason)) })
		})
	})
}
