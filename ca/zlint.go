package ca

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/ca/tbs"
	"github.com/chancery-project/chancery/ca/zlint"
	"github.com/chancery-project/chancery/trust"
)

// SelfCheck builds, with throw-away keys and without signing, the certificate that each profile would give for each of
// its key types, and lints it with our lints and zlint's. An issuer that fails is not put to use.
func (i *Issuer) SelfCheck(profiles ...*Profile) error {
	for _, p := range profiles {
		for _, kt := range p.keyTypes {
			if err := i.selfCheck(p, kt); err != nil {
				return fmt.Errorf("profile %s with a %s key under issuer %s: %w", p.name, kt, i.SKI(), err)
			}
		}
	}
	return nil
}

// CheckDomain returns why no certificate could be issued for identities of a trust domain, by its name alone: the SPIFFE standard allows names
// that crypto/x509 does not read as the host of a URI, those with an empty label. It is asked before there is an authority for it.
func CheckDomain(td trust.Domain) error {
	key, err := GenerateKey(P256)
	if err != nil {
		return err
	}
	now := time.Now()
	i, err := NewSelfIssuer(SelfConfig{Domain: td, Key: key, CommonName: "root", NotBefore: now.Add(-DefaultBackdate), NotAfter: now.Add(DefaultRootTTL), LogID: 1 << 30})
	if err != nil {
		return err
	}
	if err := i.selfCheck(ServerProfile(), P256); err != nil {
		return fmt.Errorf("no certificate could be issued in trust domain %s, since nobody could read a certificate with that name in a URI; "+
			"use one like prod or mesh.example, without a dot at either end or two in a row (%w)", td, err)
	}
	return nil
}

func (i *Issuer) selfCheck(p *Profile, kt KeyType) error {
	key, err := GenerateKey(kt)
	if err != nil {
		return err
	}
	r := &Request{PublicKey: key.Public(), Attestation: &Attestation{Cluster: "c", Node: "n", PodHash: make([]byte, 16), Time: time.Now()}}
	if p.ca {
		r.CA = &CARequest{Domain: i.domain, CommonName: "check"}
	} else if r.ID, err = trust.ParseID(i.domain.URI() + "/" + strings.ReplaceAll(strings.Join(p.paths[0], "/"), "*", "check")); err != nil {
		return err
	}
	signed, _, _, err := i.build(p, r, time.Now())
	if err != nil {
		return err
	}
	// zlint looks at the signature's length only, so a certificate without a real one does.
	der, err := tbs.Assemble(signed, i.algorithm.ID, make([]byte, 64))
	if err != nil {
		return err
	}
	if _, err := x509.ParseCertificate(der); err != nil { // what peers in Go do with it
		return err
	}
	return zlint.Certificate(der)
}

// Sampler lints one in Every issued certificates with zlint, and verifies its signature, in the background and never in
// anybody's way.
type Sampler struct {
	Every  int          // 0 = 1,000; 1 = all that there is time for
	Logger *slog.Logger // a finding is an error with the certificate's serial
	Found  func()       // called for each finding, for a metric; may be nil

	once  sync.Once
	queue chan *Certificate
	count atomic.Uint64
}

// Offer hands a certificate to the sampler; it never blocks.
func (s *Sampler) Offer(c *Certificate) {
	s.init()
	every := s.Every
	if every == 0 {
		every = 1000
	}
	if s.count.Add(1)%uint64(every) != 0 {
		return
	}
	select {
	case s.queue <- c:
	default: // still busy with an earlier one; the next sample will do
	}
}

func (s *Sampler) init() { s.once.Do(func() { s.queue = make(chan *Certificate, 1) }) }

// Run lints what is offered until ctx ends.
func (s *Sampler) Run(ctx context.Context) error {
	s.init()
	for {
		select {
		case <-ctx.Done():
			return nil
		case c := <-s.queue:
			if err := errors.Join(zlint.Certificate(c.DER), c.check()); err != nil {
				s.Logger.Error("issued certificate fails a check", "serial", c.Serial, "reason", err.Error())
				if s.Found != nil {
					s.Found()
				}
			}
		}
	}
}
