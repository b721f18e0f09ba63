package revocation

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
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
	// endedStays is how long a certificate that has ended stays on CRLs at least: a verifier whose clock is behind would
	// accept it.
	endedStays = crlBackdate
	// patience is how long an issuer may fail to have any CRL before there are none of all others either. Meanwhile agents
	// keep those that they have: a key store that is away for a moment must not take them back.
	patience = 15 * time.Minute
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
func (m *Manager) entriesOf(issuer string) ([]Certificate, [sha256.Size]byte) {
	var out []Certificate
	for _, c := range m.found {
		if c.Issuer == issuer || c.Issuer == "" {
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

// round is one look at the CRLs of all issuers.
type round struct {
	now      time.Time
	number   *big.Int          // nil until a CRL is signed
	last     map[string]signed // by keyOf
	keep     map[string][]byte // see authority.CRLSigner.KeepCRL
	lists    [][]byte
	off      []string // issuers that cannot have a CRL
	stale    []string // those whose stored CRL lacks something
	failed   []error  // why a CRL was not signed anew, where the one before still stands,
	missing  []error  // and where there is none
	examined map[string]examined
}

type examined struct {
	entries []Certificate
	content [sha256.Size]byte
}

// keyOf tells issuers apart as verifiers do: by name and key.
func keyOf(s *authority.CRLSigner) string { return s.ID + " " + string(s.Chain[0].RawSubject) }

// over reports whether an issuer's certificate has ended, and with it each of its leaves.
func over(s *authority.CRLSigner, now time.Time) bool {
	return s.Issuer != nil && now.After(s.Issuer.NotAfter())
}

// examine works out what each CRL should list. What has ended leaves the CRLs when one is signed anyway: so each entry is on
// a CRL that was signed after the end of its certificate (RFC 5280 section 5.1.2), and a mass of certificates that end one
// after the other does not bring a new CRL to every agent each time.
func (m *Manager) examine(signers []authority.CRLSigner, now time.Time) map[string]examined {
	look := func() (out map[string]examined, anew bool) {
		out = map[string]examined{}
		for i := range signers {
			s := &signers[i]
			var e examined
			e.entries, e.content = m.entriesOf(s.ID)
			out[keyOf(s)] = e
			anew = anew || s.Issuer != nil && !over(s, now) && !m.current(s, e, now)
		}
		return out, anew
	}
	out, anew := look()
	if known := len(m.found); anew {
		maps.DeleteFunc(m.found, func(_ string, c Certificate) bool { return c.gone(now) })
		if len(m.found) != known {
			out, _ = look()
		}
	}
	return out
}

// current reports whether the last CRL of an issuer needs no successor yet.
func (m *Manager) current(s *authority.CRLSigner, e examined, now time.Time) bool {
	have, ok := m.last[keyOf(s)]
	return ok && have.content == e.content && (have.resign.IsZero() || now.Before(have.resign))
}

// crls returns the CRL of each signer, or why there are none: signed anew where entries have changed, or where half of its
// life is over. What fails for one issuer does not hold up the CRLs of the others: its last one stands, and late says
// why. Caller holds mu.
func (m *Manager) crls(ctx context.Context, signers []authority.CRLSigner, now time.Time) (lists [][]byte, off []string, late, err error) {
	r := &round{now: now, last: map[string]signed{}, keep: map[string][]byte{}, examined: m.examine(signers, now)}
	for i := range signers {
		if s := &signers[i]; !over(s, now) {
			if err := m.one(ctx, r, s); err != nil {
				return nil, nil, nil, err
			}
		}
	}
	m.stale, m.last = r.stale, r.last
	if err := m.config.Authority.KeepCRLs(ctx, r.keep); err != nil {
		for key := range r.last { // so that they are kept the next time
			if _, ok := r.keep[key[:strings.IndexByte(key, ' ')]]; ok {
				delete(m.last, key)
			}
		}
		return nil, nil, nil, fmt.Errorf("keeping CRLs: %w", err)
	}
	if len(r.missing) == 0 {
		m.missing = time.Time{}
	} else {
		if m.missing.IsZero() {
			m.missing = now
		}
		why := errors.Join(r.missing...)
		if now.Sub(m.missing) < patience { // agents keep what they have
			return nil, nil, nil, why
		}
		r.off = append(r.off, fmt.Sprintf("%v. Until that is mended no CRL is published, since verifiers would refuse all certificates of that issuer; "+
			"what is revoked is refused renewal", why))
		r.failed = append(r.failed, r.missing...)
	}
	if len(r.off) > 0 {
		r.lists = nil
	}
	return r.lists, r.off, errors.Join(r.failed...), nil
}

// one adds the CRL of one issuer to a round. An error ends the round.
func (m *Manager) one(ctx context.Context, r *round, s *authority.CRLSigner) error {
	key := keyOf(s)
	have, ok := m.last[key]
	e := r.examined[key]
	use := func(x signed) { r.last[key], r.lists = x, append(r.lists, x.der) }
	if m.current(s, e, r.now) {
		use(have)
		return nil
	}
	if s.Issuer == nil && !s.Retry {
		x, lacks, ok := stored(s, e.entries, r.now)
		if !ok {
			r.off = append(r.off, fmt.Sprintf("issuer %s cannot sign CRLs: %v. Until its certificates have ended, by %s at the latest, no CRL is published, since "+
				"verifiers would refuse all of them; what is revoked is refused renewal", s.ID, s.Why, s.NotAfter.UTC().Format(time.RFC3339)))
			return nil
		}
		if lacks > 0 {
			r.stale = append(r.stale, fmt.Sprintf("issuer %s: %v. Its last CRL stands, which lacks %d revoked certificates; these are refused renewal", s.ID, s.Why, lacks))
		}
		use(x)
		return nil
	}
	err := s.Why
	if s.Issuer != nil {
		if r.number == nil {
			n, err := m.config.Authority.NextCRLNumber(ctx)
			if err != nil {
				return fmt.Errorf("taking a number for CRLs: %w", err)
			}
			r.number = new(big.Int).SetUint64(n)
		}
		var x signed
		if x, err = m.sign(ctx, s, r.number, e.entries, r.now); err == nil {
			x.content = e.content
			if s.KeepCRL {
				r.keep[s.ID] = x.der
			}
			use(x)
			return nil
		}
	}
	err = fmt.Errorf("signing the CRL of issuer %s: %w", s.ID, err)
	if !ok || !r.now.Before(have.ends) {
		r.missing = append(r.missing, err)
		return nil
	}
	use(have)
	r.failed = append(r.failed, fmt.Errorf("%w; its last CRL stands until %s", err, have.ends.UTC().Format(time.RFC3339)))
	return nil
}

// stored returns the CRL that is kept of an issuer whose key is gone, and how many of the entries it lacks.
func stored(s *authority.CRLSigner, entries []Certificate, now time.Time) (_ signed, lacks int, ok bool) {
	if s.CRL == nil || s.Chain[0].KeyUsage&x509.KeyUsageCRLSign == 0 {
		return signed{}, 0, false
	}
	crl, err := x509.ParseRevocationList(s.CRL)
	if err != nil || !bytes.Equal(crl.RawIssuer, s.Chain[0].RawSubject) || !bytes.Equal(crl.AuthorityKeyId, s.Chain[0].SubjectKeyId) || crl.CheckSignatureFrom(s.Chain[0]) != nil || now.After(crl.NextUpdate) {
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
func (m *Manager) sign(ctx context.Context, s *authority.CRLSigner, number *big.Int, entries []Certificate, now time.Time) (signed, error) {
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
