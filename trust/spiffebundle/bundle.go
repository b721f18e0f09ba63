// Package spiffebundle owns the SPIFFE bundle, the JSON form in which trust domains show each other their roots, and the bundle map, which
// holds those of several (SPIFFE Trust Domain and Bundle sections 4 and 5, X509-SVID section 6): how they are read, and written.
//
// Of a bundle it passes over what the standards say must be passed over, and says so in Ignored: entries of a key type or use that it does not
// know, and roots without a certificate. It refuses whatever else is wrong, as a whole: a bundle half of which is ignored is a bundle that nobody
// checked, and who keeps the last good one is better off. It knows nothing of where bundles come from, and whether to trust them.
package spiffebundle

import (
	"bytes"
	"crypto/x509"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// Bounds of a bundle.
const (
	MaxBytes       = 1 << 20
	MaxEntries     = 1000 // JWKs, with those that are ignored
	MaxKeys        = 100  // authorities of JWT-SVIDs and WIT-SVIDs; of roots there are trust.MaxCertificates at most
	MaxRefreshHint = 365 * 24 * time.Hour
)

// MediaType is what a bundle is served as (SPIFFE Federation section 5.2).
const MediaType = "application/json"

// Bundle is the bundle of a trust domain. The JSON does not name it: who reads one says whose it is (SPIFFE Federation section 5.1).
type Bundle struct {
	Domain      trust.Domain
	Roots       []*x509.Certificate // in the order of their DER bytes, none twice
	Keys        []Key               // in the order of use and ID
	Sequence    uint64
	HasSequence bool
	RefreshHint time.Duration // whole seconds; 0: none said

	// Ignored says which entries were passed over, and why: the trust domain says more than is understood here.
	Ignored []string
}

// Key is an authority of JWT-SVIDs or WIT-SVIDs. It is kept as it came.
type Key struct {
	Use, ID string
	JWK     jsontext.Value
}

// The uses of entries.
const (
	useX509 = "x509-svid"
	useJWT  = "jwt-svid"
	useWIT  = "wit-svid"
)

// Parse reads the bundle of a trust domain.
func Parse(td trust.Domain, data []byte) (*Bundle, error) {
	b, err := parse(td, data)
	if err != nil {
		// A stranger chose what it quotes, so it has an end. Nobody asks what kind it is.
		return nil, fmt.Errorf("SPIFFE bundle of %s: %.300s", td, err)
	}
	return b, nil
}

func parse(td trust.Domain, data []byte) (*Bundle, error) {
	if td.IsZero() {
		return nil, errors.New("no trust domain is given")
	}
	if len(data) > MaxBytes {
		return nil, fmt.Errorf("it has %d bytes; at most %d are read", len(data), MaxBytes)
	}
	var doc struct {
		Keys     jsontext.Value `json:"keys"`
		Sequence jsontext.Value `json:"spiffe_sequence"`
		Hint     jsontext.Value `json:"spiffe_refresh_hint"`
	}
	if err := object(data, &doc); err != nil { // refuses names that occur twice, on all levels, and what is not UTF-8
		return nil, err
	}
	b := &Bundle{Domain: td}
	if doc.Sequence != nil {
		if err := integer(doc.Sequence, &b.Sequence); err != nil {
			return nil, fmt.Errorf("spiffe_sequence is %.40s; it should be an integer from 0 to 18446744073709551615", doc.Sequence)
		}
		b.HasSequence = true
	}
	if doc.Hint != nil {
		var seconds uint64
		if err := integer(doc.Hint, &seconds); err != nil {
			return nil, fmt.Errorf("spiffe_refresh_hint is %.40s; it should be an integer, of seconds", doc.Hint)
		}
		b.RefreshHint = time.Duration(min(seconds, uint64(MaxRefreshHint/time.Second))) * time.Second
	}
	if err := b.readEntries(doc.Keys); err != nil {
		return nil, err
	}
	return b, b.arrange()
}

// object decodes a JSON object; null is none.
func object(data []byte, v any) error {
	if jsontext.Value(data).Kind() != '{' {
		return errors.New("it should be a JSON object")
	}
	return json.Unmarshal(data, v)
}

// integer decodes a number without a fraction; null is none.
func integer(data jsontext.Value, n *uint64) error {
	if data.Kind() != '0' {
		return errors.New("no number")
	}
	return json.Unmarshal(data, n)
}

func (b *Bundle) readEntries(data jsontext.Value) error {
	if data.Kind() != '[' {
		return errors.New("it has no array of keys; an empty one would say that nothing is trusted any more")
	}
	var entries []jsontext.Value
	if err := json.Unmarshal(data, &entries); err != nil {
		return err
	}
	if len(entries) > MaxEntries {
		return fmt.Errorf("it has %d keys; at most %d are read", len(entries), MaxEntries)
	}
	for i, e := range entries {
		why, err := b.readEntry(e)
		if err != nil {
			return fmt.Errorf("keys[%d]: %w", i, err)
		}
		if why != "" {
			b.Ignored = append(b.Ignored, fmt.Sprintf("keys[%d]: %s", i, why))
		}
	}
	return nil
}

// readEntry reads one JWK; why says that it is one to ignore.
func (b *Bundle) readEntry(data jsontext.Value) (why string, err error) {
	var e entry
	if err := object(data, &e); err != nil {
		return "", err
	}
	kty, use := text(e["kty"]), text(e["use"])
	switch {
	case kty == "":
		return "it has no key type (kty)", nil
	case !slices.Contains(keyTypes, kty):
		return fmt.Sprintf("its key type %.40q is not known; known are %q", kty, keyTypes), nil
	case use == "":
		return "it has no use", nil
	case use != useX509 && use != useJWT && use != useWIT:
		return fmt.Sprintf("its use %.40q is not known; known are %s, %s and %s", use, useX509, useJWT, useWIT), nil
	}
	if private := e.private(); private != "" {
		return "", fmt.Errorf("it has the member %s, a part of a private key; whoever can read the bundle can sign with it", private)
	}
	if use == useX509 {
		root, err := e.certificate(kty)
		if err != nil {
			return "", err
		}
		if root == nil {
			return "it is for X509-SVIDs and has no certificate (x5c)", nil
		}
		b.Roots = append(b.Roots, root)
		return "", nil
	}
	id := text(e["kid"])
	if id == "" {
		return fmt.Sprintf("it is for %ss and has no key ID (kid)", use), nil
	}
	jwk := slices.Clone(data)
	if err := jwk.Compact(); err != nil {
		return "", err
	}
	b.Keys = append(b.Keys, Key{use, id, jwk})
	return "", nil
}

// arrange puts all in its order, and refuses what there is too much of.
func (b *Bundle) arrange() error {
	slices.SortFunc(b.Roots, func(x, y *x509.Certificate) int { return bytes.Compare(x.Raw, y.Raw) })
	b.Roots = slices.CompactFunc(b.Roots, (*x509.Certificate).Equal)
	slices.SortFunc(b.Keys, Key.compare)
	for i, k := range b.Keys {
		// One entry for both uses would be two keys of one ID, which a WIT-SVID's may not have.
		if slices.ContainsFunc(b.Keys[:i], func(o Key) bool { return o.ID == k.ID }) {
			return fmt.Errorf("the key ID %.40q occurs twice", k.ID)
		}
		if i >= MaxKeys {
			return fmt.Errorf("it has %d authorities of JWT-SVIDs and WIT-SVIDs; at most %d are read", len(b.Keys), MaxKeys)
		}
	}
	_, err := b.Trust() // what is no root is refused here
	return err
}

// Marshal returns the bundle in JSON. Equal bundles have equal bytes.
func (b *Bundle) Marshal() ([]byte, error) {
	keys := []jsontext.Value{}
	for _, r := range b.Roots {
		jwk, err := certificateEntry(r)
		if err != nil {
			return nil, fmt.Errorf("SPIFFE bundle of %s: root %q: %w", b.Domain, r.Subject, err)
		}
		keys = append(keys, jwk)
	}
	for _, k := range b.Keys {
		keys = append(keys, k.JWK)
	}
	doc := struct {
		Sequence *uint64          `json:"spiffe_sequence,omitzero"`
		Hint     int64            `json:"spiffe_refresh_hint,omitzero"`
		Keys     []jsontext.Value `json:"keys"`
	}{Hint: int64(b.RefreshHint / time.Second), Keys: keys}
	if b.HasSequence {
		doc.Sequence = &b.Sequence
	}
	data, err := json.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("SPIFFE bundle of %s: %w", b.Domain, err)
	}
	return data, nil
}

// ParsePEM reads roots of a trust domain in PEM. Such a bundle has no sequence and no refresh hint.
func ParsePEM(td trust.Domain, data []byte) (*Bundle, error) {
	roots, err := trust.ParseCertificates(data)
	if err != nil {
		return nil, fmt.Errorf("roots of %s: %w", td, err)
	}
	b := &Bundle{Domain: td, Roots: roots}
	if err := b.arrange(); err != nil {
		return nil, err
	}
	return b, nil
}

// FromTrust returns the roots of a bundle's own domain in this form; its kin has bundles of its own. Its generation is the sequence: both change
// with each change of the roots.
func FromTrust(b *trust.Bundle, hint time.Duration) *Bundle {
	return &Bundle{Domain: b.Domain(), Roots: b.Roots(), Sequence: b.Generation(), HasSequence: true, RefreshHint: hint.Truncate(time.Second)}
}

// Trust returns the roots as what peers are verified against; the sequence is its generation.
func (b *Bundle) Trust() (*trust.Bundle, error) {
	return trust.NewBundle(b.Domain, b.Sequence, b.Roots)
}

// Same reports whether both say the same of the same trust domain, but for sequence and refresh hint.
func (b *Bundle) Same(o *Bundle) bool {
	return b.Domain == o.Domain && slices.EqualFunc(b.Roots, o.Roots, (*x509.Certificate).Equal) &&
		slices.EqualFunc(b.Keys, o.Keys, func(x, y Key) bool { return x.compare(y) == 0 })
}
