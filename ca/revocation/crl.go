package revocation

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
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
	der    []byte
	number uint64    // of the document's CRLs
	ends   time.Time // nextUpdate
}

// round is one look at the CRLs of all issuers.
type round struct {
	now     time.Time
	last    map[string]signed // by keyOf
	keep    map[string][]byte // see authority.CRLSigner.KeepCRL
	lists   [][]byte
	off     []string // issuers that cannot have a CRL
	stale   []string // those whose stored CRL lacks something
	failed  []error  // why a CRL was not signed anew, where the one before still stands,
	missing []error  // and where there is none
}

// keyOf tells issuers apart as verifiers do: by name and key.
func keyOf(s *authority.CRLSigner) string { return s.ID + " " + string(s.Chain[0].RawSubject) }

// over reports whether an issuer's certificate has ended, and with it each of its leaves.
func over(s *authority.CRLSigner, now time.Time) bool {
	return s.Issuer != nil && now.After(s.Issuer.NotAfter())
}

// of returns what the CRL of an issuer lists. A serial that no log has may be any issuer's.
func (l *listing) of(issuer string) []entry {
	var out []entry
	for _, e := range l.entries {
		if e.issuer == issuer || e.issuer == "" {
			out = append(out, e)
		}
	}
	return out
}

// crls returns the CRL of each signer, or why there are none: signed where the last is not of the number that was reached. What fails for one issuer does not hold up the CRLs of the others: its last one stands, and late says
// why. Caller holds mu.
func (m *Manager) crls(ctx context.Context, signers []authority.CRLSigner, now time.Time) (lists [][]byte, off []string, late, err error) {
	r := &round{now: now, last: map[string]signed{}, keep: map[string][]byte{}}
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
		m.without = time.Time{}
	} else {
		if m.without.IsZero() {
			m.without = now
		}
		why := errors.Join(r.missing...)
		if now.Sub(m.without) < patience { // agents keep what they have
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
	use := func(x signed) { r.last[key], r.lists = x, append(r.lists, x.der) }
	if ok && have.number == m.at.Number {
		use(have)
		return nil
	}
	if s.Issuer == nil {
		x, lacks, found := stored(s, m.at.of(s.ID), r.now)
		if found && (!ok || have.number <= x.number) { // another replica may have signed it
			have, ok = x, true
		}
		switch {
		case found && lacks > 0 && !s.Retry:
			r.stale = append(r.stale, fmt.Sprintf("issuer %s: %v. Its last CRL stands, which lacks %d revoked certificates; these are refused renewal", s.ID, s.Why, lacks))
			fallthrough
		case found && lacks == 0:
			use(have)
			return nil
		case !s.Retry:
			r.off = append(r.off, fmt.Sprintf("issuer %s cannot sign CRLs: %v. Until its certificates have ended, by %s at the latest, no CRL is published, since "+
				"verifiers would refuse all of them; what is revoked is refused renewal", s.ID, s.Why, s.NotAfter.UTC().Format(time.RFC3339)))
			return nil
		}
	}
	err := s.Why
	if s.Issuer != nil {
		var x signed
		if x, err = m.sign(ctx, s); err == nil {
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
func stored(s *authority.CRLSigner, entries []entry, now time.Time) (_ signed, lacks int, ok bool) {
	if s.CRL == nil || s.Chain[0].KeyUsage&x509.KeyUsageCRLSign == 0 {
		return signed{}, 0, false
	}
	crl, err := x509.ParseRevocationList(s.CRL)
	if err != nil || !bytes.Equal(crl.RawIssuer, s.Chain[0].RawSubject) || !bytes.Equal(crl.AuthorityKeyId, s.Chain[0].SubjectKeyId) || crl.CheckSignatureFrom(s.Chain[0]) != nil ||
		now.After(crl.NextUpdate) || crl.Number == nil || !crl.Number.IsUint64() {
		return signed{}, 0, false
	}
	has := map[string]bool{}
	for _, e := range crl.RevokedCertificateEntries {
		has[hex.EncodeToString(e.SerialNumber.Bytes())] = true
	}
	for _, e := range entries {
		if !has[e.serial] {
			lacks++
		}
	}
	return signed{der: s.CRL, number: crl.Number.Uint64(), ends: crl.NextUpdate}, lacks, true
}

// sign makes the CRL of an issuer that lists what was reached, by the same steps that a certificate takes. All that goes into it comes from
// the document and from what all replicas told: each of them makes the same.
func (m *Manager) sign(ctx context.Context, s *authority.CRLSigner) (signed, error) {
	r := ca.CRLRequest{
		Number: new(big.Int).SetUint64(m.at.Number), ThisUpdate: m.at.Time.Add(-crlBackdate), NextUpdate: m.at.Until,
		UserCertsOnly: true, Requester: audit.Requester{Method: "revocation"},
	}
	if end := s.Issuer.NotAfter(); r.NextUpdate.After(end) {
		r.NextUpdate = end
	}
	for _, e := range m.at.of(s.ID) {
		serial, err := hex.DecodeString(e.serial)
		if err != nil {
			return signed{}, fmt.Errorf("serial %q: %w", e.serial, err)
		}
		r.Revoked = append(r.Revoked, x509.RevocationListEntry{SerialNumber: new(big.Int).SetBytes(serial), RevocationTime: e.time, ReasonCode: e.reason})
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
	return signed{der: der, number: m.at.Number, ends: r.NextUpdate}, err
}
