package revocation

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
)

const (
	// crlLife is how long a CRL stands: beyond the longest outage of the server that anybody should bear.
	crlLife = 7 * 24 * time.Hour
	// crlBackdate is for verifiers whose clocks are behind: they would refuse a CRL of the future, and with it every leaf.
	crlBackdate = time.Hour
	// MaxEntries bounds the entries of all CRLs, so that an update fits into a gRPC message.
	MaxEntries = 50_000
)

// signed is the last CRL of an issuer.
type signed struct {
	der     []byte
	content [sha256.Size]byte // over the entries
	resign  time.Time         // zero: never
	ends    time.Time         // nextUpdate
}

// entriesOf returns what the CRL of an issuer lists, in a fixed order, and a hash of it. A serial that no log has may be any
// issuer's.
func (m *Manager) entriesOf(issuer string, now time.Time) ([]Certificate, [sha256.Size]byte) {
	var out []Certificate
	for _, c := range m.found {
		if (c.Issuer == issuer || c.Issuer == "") && now.Before(c.NotAfter) {
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b Certificate) int { return strings.Compare(a.Serial, b.Serial) })
	h := sha256.New()
	for _, c := range out {
		r := &m.predicates.all[c.Revocation]
		fmt.Fprintf(h, "%s %d %d\n", c.Serial, r.Reason, r.Time.Unix())
	}
	return out, [sha256.Size]byte(h.Sum(nil))
}

// crls returns the CRL of each signer, or why there are none: signed anew where entries have changed, or where half of its
// life is over. Caller holds mu.
func (m *Manager) crls(ctx context.Context, signers []authority.CRLSigner, now time.Time) (lists [][]byte, off []string, err error) {
	var number *big.Int
	keep := map[string][]byte{}
	last := map[string]signed{}
	m.stale = nil
	for _, s := range signers {
		if s.Issuer != nil && now.After(s.Issuer.NotAfter()) { // and so has each of its leaves
			continue
		}
		have, ok := m.last[s.ID]
		entries, content := m.entriesOf(s.ID, now)
		switch {
		case ok && have.content == content && (have.resign.IsZero() || now.Before(have.resign)):
		case s.Issuer == nil:
			var lacks int
			if have, lacks, ok = stored(s, entries, now); !ok {
				off = append(off, fmt.Sprintf("issuer %s cannot sign CRLs: %v. Until its certificates have ended, by %s at the latest, no CRL is published, since "+
					"verifiers would refuse all of them; what is revoked is refused renewal", s.ID, s.Why, s.NotAfter.UTC().Format(time.RFC3339)))
				continue
			}
			if lacks > 0 {
				m.stale = append(m.stale, fmt.Sprintf("issuer %s: %v. Its last CRL stands, which lacks %d revoked certificates; these are refused renewal", s.ID, s.Why, lacks))
			}
		default:
			if number == nil {
				n, err := m.config.Authority.NextCRLNumber(ctx)
				if err != nil {
					return nil, nil, fmt.Errorf("taking a number for CRLs: %w", err)
				}
				number = new(big.Int).SetUint64(n)
			}
			if have, err = m.sign(ctx, s, number, entries, now); err != nil {
				return nil, nil, fmt.Errorf("signing the CRL of issuer %s: %w", s.ID, err)
			}
			have.content = content
			if s.KeepCRL {
				keep[s.ID] = have.der
			}
		}
		last[s.ID] = have
		lists = append(lists, have.der)
	}
	if err := m.config.Authority.KeepCRLs(ctx, keep); err != nil {
		return nil, nil, fmt.Errorf("keeping CRLs: %w", err)
	}
	m.last = last
	if len(off) > 0 {
		lists = nil
	}
	return lists, off, nil
}

// stored returns the CRL that is kept of an issuer whose key is gone, and how many of the entries it lacks.
func stored(s authority.CRLSigner, entries []Certificate, now time.Time) (_ signed, lacks int, ok bool) {
	if s.CRL == nil || s.Chain[0].KeyUsage&x509.KeyUsageCRLSign == 0 {
		return signed{}, 0, false
	}
	crl, err := x509.ParseRevocationList(s.CRL)
	if err != nil || !bytes.Equal(crl.AuthorityKeyId, s.Chain[0].SubjectKeyId) || crl.CheckSignatureFrom(s.Chain[0]) != nil || now.After(crl.NextUpdate) {
		return signed{}, 0, false
	}
	has := map[string]bool{}
	for _, e := range crl.RevokedCertificateEntries {
		has[hex.EncodeToString(e.SerialNumber.Bytes())] = true
	}
	for _, c := range entries {
		if !has[c.Serial] {
			lacks++
		}
	}
	return signed{der: s.CRL, resign: crl.NextUpdate, ends: crl.NextUpdate}, lacks, true
}

// sign makes one CRL, by the same steps that a certificate takes.
func (m *Manager) sign(ctx context.Context, s authority.CRLSigner, number *big.Int, entries []Certificate, now time.Time) (signed, error) {
	life := max(crlLife, 2*s.MaxTTL) // so that what is left at half outlives every leaf
	r := ca.CRLRequest{
		Number: number, ThisUpdate: now.Add(-crlBackdate).Truncate(time.Second), NextUpdate: now.Add(life).Truncate(time.Second),
		UserCertsOnly: true, Requester: audit.Requester{Method: "revocation"},
	}
	resign := now.Add(life / 2)
	if end := s.Issuer.NotAfter(); !r.NextUpdate.Before(end) {
		r.NextUpdate, resign = end, time.Time{}
	}
	for _, c := range entries {
		serial, err := hex.DecodeString(c.Serial)
		if err != nil {
			return signed{}, fmt.Errorf("serial %q: %w", c.Serial, err)
		}
		why := &m.predicates.all[c.Revocation]
		at := why.Time.Truncate(time.Second)
		if at.After(now) { // by a clock that was ahead
			at = now.Truncate(time.Second)
		}
		r.Revoked = append(r.Revoked, x509.RevocationListEntry{SerialNumber: new(big.Int).SetBytes(serial), RevocationTime: at, ReasonCode: why.Reason})
	}
	draft, err := s.Issuer.DraftCRL(r)
	if err != nil {
		return signed{}, err
	}
	token, err := draft.Prepare()
	if err != nil {
		return signed{}, err
	}
	der, err := s.Issuer.IssueCRL(ctx, token)
	return signed{der: der, resign: resign, ends: r.NextUpdate}, err
}
