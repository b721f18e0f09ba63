package lint

import (
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"math"
	"time"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"

	"github.com/chancery-project/chancery/ca/tbs"
)

// Contents is what the to-be-signed bytes of a certificate say (RFC 5280 section 4.1). Slices point into those bytes.
type Contents struct {
	Version             int    // 3 for v3
	Serial              []byte // the octets of the INTEGER
	Algorithm           []byte // DER
	Issuer, Subject     []byte // DER
	NotBefore, NotAfter time.Time
	SPKI                []byte // DER
	Extensions          []Extension

	// Of the extensions; zero where one is missing.
	KeyUsage               x509.KeyUsage
	ServerAuth, ClientAuth bool
	OtherUsages            int // extended key usages besides the two
	IsCA                   bool
	PathLen                int // -1 for no bound
	SKI, AKI               []byte
	URIs                   []string
	DNS, IPs, OtherNames   int // how many
}

// Extension is one extension.
type Extension struct {
	OID      []byte // the octets of the OBJECT IDENTIFIER
	Critical bool
	Value    []byte

	known bool // it was read into Contents
}

// extensions are those that are read, by the octets of their OIDs.
var extensions = map[string]func(*Contents, cryptobyte.String) bool{
	tbs.Octets(tbs.OIDKeyUsage):    (*Contents).readKeyUsage,
	tbs.Octets(tbs.OIDExtKeyUsage): (*Contents).readExtKeyUsage,
	tbs.Octets(tbs.OIDBasic):       (*Contents).readBasic,
	tbs.Octets(tbs.OIDSKI):         (*Contents).readSKI,
	tbs.Octets(tbs.OIDAKI):         (*Contents).readAKI,
	tbs.Octets(tbs.OIDSAN):         (*Contents).readSAN,
}

var (
	basic, keyUsage, san   = tbs.Octets(tbs.OIDBasic), tbs.Octets(tbs.OIDKeyUsage), tbs.Octets(tbs.OIDSAN)
	serverAuth, clientAuth = tbs.Octets(tbs.OIDServerAuth), tbs.Octets(tbs.OIDClientAuth)
)

// Read reads to-be-signed bytes, strictly: DER that a certificate of ours cannot have is an error, though crypto/x509, at
// five times the price, might take it. It is a reader of its own, and not the inverse of package tbs, which writes them.
func Read(message []byte) (*Contents, error) {
	in := cryptobyte.String(message)
	c := &Contents{Version: 1, PathLen: -1, Extensions: make([]Extension, 0, 8)}
	var body, validity, wrapped, list cryptobyte.String
	var versioned, extended bool
	switch {
	case !in.ReadASN1(&body, cbasn1.SEQUENCE) || !in.Empty():
		return nil, errors.New("not one SEQUENCE")
	case !body.ReadOptionalASN1(&wrapped, &versioned, cbasn1.Tag(0).ContextSpecific().Constructed()):
		return nil, errors.New("the version does not parse")
	case versioned && (!wrapped.ReadASN1Integer(&c.Version) || !wrapped.Empty()):
		return nil, errors.New("the version does not parse")
	case !body.ReadASN1((*cryptobyte.String)(&c.Serial), cbasn1.INTEGER):
		return nil, errors.New("the serial number does not parse")
	case !readElement(&body, &c.Algorithm) || !readElement(&body, &c.Issuer):
		return nil, errors.New("algorithm or issuer do not parse")
	case !body.ReadASN1(&validity, cbasn1.SEQUENCE) || !readTime(&validity, &c.NotBefore) || !readTime(&validity, &c.NotAfter) || !validity.Empty():
		return nil, errors.New("the validity does not parse")
	case !readElement(&body, &c.Subject) || !readElement(&body, &c.SPKI):
		return nil, errors.New("subject or public key do not parse")
	case !body.ReadOptionalASN1(&wrapped, &extended, cbasn1.Tag(3).ContextSpecific().Constructed()) || !body.Empty():
		return nil, errors.New("there is something else than extensions behind the public key")
	case extended && (!wrapped.ReadASN1(&list, cbasn1.SEQUENCE) || !wrapped.Empty()):
		return nil, errors.New("the extensions do not parse")
	}
	if versioned {
		c.Version++ // v3 is written as 2
	}
	for !list.Empty() {
		if err := c.readExtension(&list); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// readElement reads a SEQUENCE with its header.
func readElement(in *cryptobyte.String, out *[]byte) bool {
	return in.ReadASN1Element((*cryptobyte.String)(out), cbasn1.SEQUENCE)
}

// readTime reads UTCTime up to 2049 and GeneralizedTime from then on (RFC 5280 section 4.1.2.5).
func readTime(in *cryptobyte.String, out *time.Time) bool {
	if in.PeekASN1Tag(cbasn1.UTCTime) {
		return in.ReadASN1UTCTime(out)
	}
	return in.ReadASN1GeneralizedTime(out) && out.Year() >= 2050
}

func (c *Contents) readExtension(list *cryptobyte.String) error {
	var e Extension
	var entry, value cryptobyte.String
	n := len(c.Extensions) + 1
	if !list.ReadASN1(&entry, cbasn1.SEQUENCE) || !entry.ReadASN1((*cryptobyte.String)(&e.OID), cbasn1.OBJECT_IDENTIFIER) {
		return fmt.Errorf("extension %d does not parse", n)
	}
	// DER leaves FALSE out. It is read all the same, for the lints to say what is wrong with it.
	if entry.PeekASN1Tag(cbasn1.BOOLEAN) && !entry.ReadASN1Boolean(&e.Critical) {
		return fmt.Errorf("extension %d does not parse", n)
	}
	if !entry.ReadASN1(&value, cbasn1.OCTET_STRING) || !entry.Empty() {
		return fmt.Errorf("extension %d does not parse", n)
	}
	e.Value = value
	if read := extensions[string(e.OID)]; read != nil {
		if e.known = true; !read(c, value) {
			return fmt.Errorf("extension %d, of a known kind, does not parse", n)
		}
	}
	c.Extensions = append(c.Extensions, e)
	return nil
}

// critical reports whether an extension is there, and critical.
func (c *Contents) critical(oid string) bool {
	for _, e := range c.Extensions {
		if string(e.OID) == oid {
			return e.Critical
		}
	}
	return false
}

// readKeyUsage reads a named bit list: bit 0 is the top bit of the first octet.
func (c *Contents) readKeyUsage(in cryptobyte.String) bool {
	var bits asn1.BitString
	if !in.ReadASN1BitString(&bits) || !in.Empty() || bits.BitLength > 9 {
		return false
	}
	c.KeyUsage = 0
	for i := range 9 {
		c.KeyUsage |= x509.KeyUsage(bits.At(i)) << i
	}
	return true
}

func (c *Contents) readExtKeyUsage(in cryptobyte.String) bool {
	var list cryptobyte.String
	if !in.ReadASN1(&list, cbasn1.SEQUENCE) || !in.Empty() || list.Empty() {
		return false
	}
	for !list.Empty() {
		var oid cryptobyte.String
		if !list.ReadASN1(&oid, cbasn1.OBJECT_IDENTIFIER) {
			return false
		}
		switch string(oid) {
		case serverAuth:
			c.ServerAuth = true
		case clientAuth:
			c.ClientAuth = true
		default:
			c.OtherUsages++
		}
	}
	return true
}

func (c *Contents) readBasic(in cryptobyte.String) bool {
	var body cryptobyte.String
	if !in.ReadASN1(&body, cbasn1.SEQUENCE) || !in.Empty() {
		return false
	}
	if body.PeekASN1Tag(cbasn1.BOOLEAN) && !body.ReadASN1Boolean(&c.IsCA) {
		return false
	}
	if body.Empty() {
		return true
	}
	var n int64
	if !body.ReadASN1Integer(&n) || n < 0 || n > math.MaxInt32 {
		return false
	}
	c.PathLen = int(n)
	return body.Empty()
}

func (c *Contents) readSKI(in cryptobyte.String) bool {
	return in.ReadASN1((*cryptobyte.String)(&c.SKI), cbasn1.OCTET_STRING) && in.Empty()
}

// readAKI reads the one form that is written here, with a key identifier and nothing else.
func (c *Contents) readAKI(in cryptobyte.String) bool {
	var body cryptobyte.String
	return in.ReadASN1(&body, cbasn1.SEQUENCE) && in.Empty() &&
		body.ReadASN1((*cryptobyte.String)(&c.AKI), cbasn1.Tag(0).ContextSpecific()) && body.Empty()
}

func (c *Contents) readSAN(in cryptobyte.String) bool {
	var list cryptobyte.String
	if !in.ReadASN1(&list, cbasn1.SEQUENCE) || !in.Empty() || list.Empty() {
		return false
	}
	for !list.Empty() {
		var name cryptobyte.String
		var tag cbasn1.Tag
		if !list.ReadAnyASN1(&name, &tag) {
			return false
		}
		switch tag {
		case cbasn1.Tag(6).ContextSpecific():
			c.URIs = append(c.URIs, string(name))
		case cbasn1.Tag(2).ContextSpecific():
			c.DNS++
		case cbasn1.Tag(7).ContextSpecific():
			c.IPs++
		default:
			c.OtherNames++
		}
	}
	return true
}
