package tbs

import (
	"encoding/asn1"
	"math/big"
	"time"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"
)

var (
	oidReason = asn1.ObjectIdentifier{2, 5, 29, 21}
	// OIDIssuingDistributionPoint is the extension of RFC 5280 section 5.2.5.
	OIDIssuingDistributionPoint = asn1.ObjectIdentifier{2, 5, 29, 28}
)

// CRL is everything that goes into the to-be-signed bytes of a version 2 CRL.
type CRL struct {
	Algorithm              []byte // DER
	Issuer                 []byte // DER name
	ThisUpdate, NextUpdate time.Time
	Number                 *big.Int // from 0
	AKI                    []byte
	UserCertsOnly          bool // adds an issuing distribution point that says so, and nothing else (decision D22)
	Entries                []CRLEntry
}

// CRLEntry is one revoked certificate.
type CRLEntry struct {
	Serial *big.Int
	Time   time.Time // of revocation
	Reason int       // CRLReason of RFC 5280 section 5.3.1; 0, unspecified, is left out, as that section asks
}

// UserCertsOnlyIDP is an issuing distribution point without a name whose onlyContainsUserCerts is true, in DER.
var UserCertsOnlyIDP = []byte{0x30, 3, 0x81, 1, 0xff}

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
				if c.UserCertsOnly {
					addExtension(b, OIDIssuingDistributionPoint, true, func(b *cryptobyte.Builder) { b.AddBytes(UserCertsOnlyIDP) })
				}
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
