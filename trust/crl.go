package trust

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"time"
)

// Bounds of a set of CRLs.
const (
	MaxCRLs     = 100     // and as many certificates of their issuers
	MaxCRLBytes = 4 << 20 // of all CRLs together
)

// crlMargin is how long before its end a CRL counts as ended: whoever takes it away has until then.
const crlMargin = time.Minute

// CRLs are the certificate revocation lists of one trust domain, one full CRL for each issuer. They are immutable: a
// change makes a new set. A nil set is an empty one.
type CRLs struct {
	lists []crl // in the order of their issuers
	sum   [sha256.Size]byte
}

type crl struct {
	der        []byte
	signed     [sha256.Size]byte // hash of what the signature is over
	name       []byte            // of the issuer, DER
	keyID      []byte
	number     *big.Int
	thisUpdate time.Time
	nextUpdate time.Time
	revoked    []revocation // in the order of their serials
}

// revocation is one entry; there can be many, so it is small. Certificates have no serials of more than 20 bytes.
type revocation struct {
	serial [20]byte
	reason uint8
	time   int64 // Unix
}

// serialOf returns a serial with a fixed length; ok is false for one that no certificate may have.
func serialOf(n *big.Int) (serial [20]byte, ok bool) {
	if n.Sign() < 0 || n.BitLen() > 8*len(serial) {
		return serial, false
	}
	n.FillBytes(serial[:])
	return serial, true
}

func (r revocation) compare(serial [20]byte) int { return bytes.Compare(r.serial[:], serial[:]) }

var (
	oidAuthorityKeyID = asn1.ObjectIdentifier{2, 5, 29, 35}
	oidCRLNumber      = asn1.ObjectIdentifier{2, 5, 29, 20}
	oidIDP            = asn1.ObjectIdentifier{2, 5, 29, 28}

	// userCertsOnly is an issuing distribution point (RFC 5280 section 5.2.5) that says onlyContainsUserCerts and no more.
	userCertsOnly = []byte{0x30, 0x03, 0x81, 0x01, 0xff}
)

// NewCRLs reads CRLs in DER and checks that each is one that a verifier can use without harm: whole, for one issuer
// alone, and signed by one of the given issuers or roots, whose chain leads to a root of the bundle. A proxy refuses
// every certificate of an issuer whose CRL it cannot verify, so one such CRL refuses the set. No CRLs make a nil set.
func NewCRLs(b *Bundle, ders [][]byte, issuers []*x509.Certificate, now time.Time) (*CRLs, error) {
	if len(ders) == 0 {
		return nil, nil
	}
	if len(ders) > MaxCRLs || len(issuers) > MaxCRLs {
		return nil, fmt.Errorf("%d CRLs of %d issuers; at most %d of each are allowed", len(ders), len(issuers), MaxCRLs)
	}
	size := 0
	for _, der := range ders {
		size += len(der)
	}
	if size > MaxCRLBytes {
		return nil, fmt.Errorf("CRLs of %d bytes; at most %d are allowed", size, MaxCRLBytes)
	}
	known := append(slices.Clone(issuers), b.All()...)
	c := &CRLs{}
	for i, der := range ders {
		list, err := x509.ParseRevocationList(der)
		if err == nil && len(list.Raw) != len(der) { // it passes over what follows
			err = fmt.Errorf("there are %d bytes behind its end", len(der)-len(list.Raw))
		}
		if err != nil {
			return nil, fmt.Errorf("CRL %d: %w", i, err)
		}
		if err = checkForm(list); err == nil {
			err = checkSigner(list, b, known, now)
		}
		if err != nil {
			return nil, fmt.Errorf("CRL %d, of %q: %w", i, list.Issuer, err)
		}
		c.lists = append(c.lists, compact(list))
	}
	slices.SortFunc(c.lists, func(x, y crl) int {
		return cmpFirst(bytes.Compare(x.name, y.name), bytes.Compare(x.keyID, y.keyID))
	})
	h := sha256.New()
	for i, l := range c.lists {
		if i > 0 && l.sameIssuer(&c.lists[i-1]) { // proxies would take the first that they find
			return nil, fmt.Errorf("there are two CRLs of the issuer with key %x; one full CRL is expected", l.keyID)
		}
		fmt.Fprintf(h, "%d:", len(l.der))
		h.Write(l.der)
	}
	h.Sum(c.sum[:0])
	return c, nil
}

func cmpFirst(order ...int) int {
	for _, o := range order {
		if o != 0 {
			return o
		}
	}
	return 0
}

// checkForm refuses what is not a full CRL for its issuer's leaves, and what verifiers do not understand.
func checkForm(l *x509.RevocationList) error {
	switch {
	case l.Number == nil:
		return errors.New("it has no CRL number (RFC 5280 section 5.2.3)")
	case len(l.AuthorityKeyId) == 0:
		return errors.New("it has no authority key identifier (RFC 5280 section 5.2.1)")
	case l.NextUpdate.IsZero():
		return errors.New("it has no nextUpdate (RFC 5280 section 5.1.2.5)")
	}
	for _, e := range l.Extensions {
		switch {
		case e.Id.Equal(oidAuthorityKeyID), e.Id.Equal(oidCRLNumber):
		case e.Id.Equal(oidIDP):
			if !bytes.Equal(e.Value, userCertsOnly) {
				return errors.New("its issuing distribution point says more than onlyContainsUserCerts, which proxies do not take (decision D22)")
			}
		case e.Critical:
			return fmt.Errorf("it has the critical extension %s, which is not understood; a full CRL is expected", e.Id)
		}
	}
	for _, entry := range l.RevokedCertificateEntries {
		for _, e := range entry.Extensions {
			if e.Critical {
				return fmt.Errorf("its entry for serial %x has the critical extension %s, which is not understood", entry.SerialNumber.Bytes(), e.Id)
			}
		}
	}
	return nil
}

// checkSigner verifies the signature with a known certificate of the issuer whose chain leads to a root. A time when
// that certificate is valid is taken: a CRL of an issuer that has just ended is still its word.
func checkSigner(l *x509.RevocationList, b *Bundle, known []*x509.Certificate, now time.Time) error {
	err := fmt.Errorf("its issuer, with key %x, is not among the certificates that came with it", l.AuthorityKeyId)
	for i, c := range known {
		if !bytes.Equal(c.RawSubject, l.RawIssuer) || !bytes.Equal(c.SubjectKeyId, l.AuthorityKeyId) {
			continue
		}
		if err = l.CheckSignatureFrom(c); err != nil {
			continue
		}
		at := now
		if at.After(c.NotAfter) {
			at = c.NotAfter
		} else if at.Before(c.NotBefore) {
			at = c.NotBefore
		}
		others := slices.Delete(slices.Clone(known), i, i+1)
		if _, err = b.PathTo(append([]*x509.Certificate{c}, others...), at); err == nil {
			return nil
		}
	}
	return err
}

// compact keeps what is needed of a CRL.
func compact(l *x509.RevocationList) crl {
	out := crl{
		der: bytes.Clone(l.Raw), signed: sha256.Sum256(l.RawTBSRevocationList), name: bytes.Clone(l.RawIssuer), keyID: bytes.Clone(l.AuthorityKeyId), number: l.Number,
		thisUpdate: l.ThisUpdate, nextUpdate: l.NextUpdate, revoked: make([]revocation, 0, len(l.RevokedCertificateEntries)),
	}
	for _, e := range l.RevokedCertificateEntries {
		if serial, ok := serialOf(e.SerialNumber); ok {
			out.revoked = append(out.revoked, revocation{serial, uint8(e.ReasonCode), e.RevocationTime.Unix()})
		}
	}
	slices.SortFunc(out.revoked, func(a, b revocation) int { return a.compare(b.serial) })
	return out
}

func (l *crl) sameIssuer(o *crl) bool {
	return bytes.Equal(l.name, o.name) && bytes.Equal(l.keyID, o.keyID)
}

// of returns the CRL of a certificate's issuer, or nil.
func (c *CRLs) of(cert *x509.Certificate) *crl {
	if c == nil {
		return nil
	}
	for i := range c.lists {
		l := &c.lists[i]
		if bytes.Equal(l.name, cert.RawIssuer) && (len(cert.AuthorityKeyId) == 0 || bytes.Equal(l.keyID, cert.AuthorityKeyId)) {
			return l
		}
	}
	return nil
}

// Check returns an error if the certificate is on its issuer's CRL. What a CRL lists stays revoked past its nextUpdate.
// A certificate whose issuer has no CRL here passes: the set comes from the authority that made the issuer, so it is
// the set that is older.
func (c *CRLs) Check(cert *x509.Certificate) error {
	l := c.of(cert)
	if l == nil {
		return nil
	}
	serial, ok := serialOf(cert.SerialNumber)
	if !ok {
		return nil
	}
	i, found := slices.BinarySearchFunc(l.revoked, serial, revocation.compare)
	if !found {
		return nil
	}
	r := l.revoked[i]
	return fmt.Errorf("certificate with serial %x was revoked at %s (%s), says CRL %s of its issuer", cert.SerialNumber.Bytes(),
		time.Unix(r.time, 0).UTC().Format(time.RFC3339), ReasonName(int(r.reason)), l.number)
}

// ReasonName returns the name of a CRLReason of RFC 5280 section 5.3.1.
func ReasonName(r int) string {
	names := []string{"unspecified", "keyCompromise", "cACompromise", "affiliationChanged", "superseded", "cessationOfOperation",
		"certificateHold", "", "removeFromCRL", "privilegeWithdrawn", "aACompromise"}
	if r >= 0 && r < len(names) && names[r] != "" {
		return names[r]
	}
	return fmt.Sprintf("reason %d", r)
}

// Covers returns nil if a verifier that wants a current CRL for each leaf, as Envoy does once it has any, would pass a
// leaf that is not revoked; else what is wrong. Near its end a CRL does not count, nor does a set of which a part is
// from the future.
func (c *CRLs) Covers(leaf *x509.Certificate, now time.Time) error {
	l := c.of(leaf)
	if l == nil {
		return fmt.Errorf("no CRL of the issuer with key %x, which issued the SVID", leaf.AuthorityKeyId)
	}
	if !now.Add(crlMargin).Before(l.nextUpdate) {
		return fmt.Errorf("the CRL of the SVID's issuer ends at %s", l.nextUpdate.UTC().Format(time.RFC3339))
	}
	for i := range c.lists {
		if from := c.lists[i].thisUpdate; now.Before(from) {
			return fmt.Errorf("a CRL is valid only from %s on", from.UTC().Format(time.RFC3339))
		}
	}
	return nil
}

// Older is the error of what would take back CRLs, or roots: who sent it knows less than somebody before.
type Older struct{ what string }

// NewOlder returns one that says what is older than what.
func NewOlder(what string) *Older { return &Older{what} }

// Error says which.
func (o *Older) Error() string { return o.what }

// Follows returns an *Older if the set would take back a CRL of the other: CRL numbers grow (RFC 5280 section 5.2.3).
func (c *CRLs) Follows(last *CRLs) error {
	if c == nil || last == nil {
		return nil
	}
	for i := range c.lists {
		for j := range last.lists {
			if n, o := &c.lists[i], &last.lists[j]; n.sameIssuer(o) && n.number.Cmp(o.number) < 0 {
				return &Older{fmt.Sprintf("CRL of the issuer with key %x has number %s; number %s was there before", n.keyID, n.number, o.number)}
			}
		}
	}
	return nil
}

// Equal reports whether both sets hold the same CRLs.
func (c *CRLs) Equal(o *CRLs) bool { return c.Sum() == o.Sum() }

// Says reports whether both sets say the same, to the bit: only their signatures may differ, as where two servers signed.
func (c *CRLs) Says(o *CRLs) bool {
	if c == nil || o == nil {
		return c == o
	}
	return slices.EqualFunc(c.lists, o.lists, func(a, b crl) bool { return a.signed == b.signed })
}

// Are reports whether the set holds just these CRLs, in whatever order.
func (c *CRLs) Are(ders [][]byte) bool {
	if c == nil || len(ders) != len(c.lists) {
		return len(ders) == 0 && c == nil
	}
	left := c.DER()
	for _, der := range ders {
		i := slices.IndexFunc(left, func(have []byte) bool { return bytes.Equal(have, der) })
		if i < 0 {
			return false
		}
		left = slices.Delete(left, i, i+1)
	}
	return true
}

// Sum returns a hash of the set, zero for an empty one.
func (c *CRLs) Sum() [sha256.Size]byte {
	if c == nil {
		return [sha256.Size]byte{}
	}
	return c.sum
}

// Ends returns each CRL's nextUpdate by the issuer's key identifier, in hex.
func (c *CRLs) Ends() map[string]time.Time {
	out := map[string]time.Time{}
	if c != nil {
		for _, l := range c.lists {
			out[hex.EncodeToString(l.keyID)] = l.nextUpdate
		}
	}
	return out
}

// DER returns the CRLs in DER, in the order of their issuers. Callers must not change them.
func (c *CRLs) DER() [][]byte {
	if c == nil {
		return nil
	}
	out := make([][]byte, len(c.lists))
	for i, l := range c.lists {
		out[i] = l.der
	}
	return out
}

// PEM returns the CRLs as concatenated PEM blocks.
func (c *CRLs) PEM() []byte {
	var out []byte
	for _, der := range c.DER() {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})...)
	}
	return out
}
