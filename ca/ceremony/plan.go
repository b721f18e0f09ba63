package ceremony

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/trust"
)

// Options is what a plan needs besides the file.
type Options struct {
	Dir    string     // that relative paths count from: the folder of the file
	Digest string     // SHA-256 of the file in hex: says which text was reviewed
	Actor  string     // who holds the ceremony, for the audit log
	Log    *audit.Log // nil for a dry run, whose plan cannot be signed
}

// Plan is a ceremony with every certificate and CRL drafted.
type Plan struct {
	config  Config
	options Options
	domain  trust.Domain
	logID   uint32
	steps   []*step
	known   map[string]*authority
}

// authority is what steps name: an existing one, or one that an earlier step makes.
type authority struct {
	cert     *x509.Certificate // without a signature yet, if a step makes it
	issuer   *ca.Issuer        // nil if it cannot sign
	chain    []*x509.Certificate
	existing bool
}

// made is what the plan adds to a step.
type made struct {
	key    crypto.Signer // of a root or issuer
	draft  *ca.Draft
	issuer *ca.Issuer // that signs
	der    []byte     // once signed
}

// NewPlan reads keys and certificates, makes the keys that are to be made, in memory, and drafts and lints everything.
// It signs, logs and writes nothing.
func NewPlan(c Config, o Options) (*Plan, error) {
	td, steps, err := parse(&c)
	if err != nil {
		return nil, err
	}
	p := &Plan{config: c, options: o, domain: td, steps: steps, known: map[string]*authority{}}
	if _, err := os.Lstat(p.path(c.Output)); !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("output: %s exists already, or cannot be looked at; nothing is ever overwritten: name another folder", c.Output)
	}
	if parent := filepath.Dir(p.path(c.Output)); !isDir(parent) {
		return nil, fmt.Errorf("output: %s is no folder, so %s cannot be made in it; make it first", parent, filepath.Base(c.Output))
	}
	var id [4]byte
	rand.Read(id[:])
	p.logID = ca.MinLogID + binary.BigEndian.Uint32(id[:])%(ca.MaxLogID-ca.MinLogID)
	for i := range c.Existing {
		if err := p.addExisting(&c.Existing[i]); err != nil {
			return nil, fmt.Errorf("existing[%d] (%s): %w", i, c.Existing[i].Name, err)
		}
	}
	for _, s := range steps { // keys first: making them can take long, and drafts do not keep
		if s.Key == nil {
			continue
		}
		if s.made.key, err = p.keyOf(s); err != nil {
			return nil, fmt.Errorf("%s (%s): %w", s.field, s.Name, err)
		}
	}
	for _, s := range steps {
		if err := p.draft(s); err != nil {
			return nil, fmt.Errorf("%s (%s): %w", s.field, s.Name, err)
		}
		if err := s.made.draft.Zlint(); err != nil {
			if !strings.Contains(p.domain.String(), ".") {
				err = fmt.Errorf("%w: trust domain %s should have a dot, such as example.org", err, p.domain)
			}
			return nil, fmt.Errorf("%s (%s): %w", s.field, s.Name, err)
		}
	}
	return p, nil
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

func (p *Plan) path(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(p.options.Dir, name)
}

func (p *Plan) addExisting(e *ExistingConfig) error {
	data, err := readBounded(p.path(e.Certificate), false)
	if err != nil {
		return fmt.Errorf("certificate: %w", err)
	}
	chain, err := trust.ParseCertificates(data)
	if err != nil {
		return fmt.Errorf("certificate %s: %w", e.Certificate, err)
	}
	cert, root := chain[0], chain[len(chain)-1]
	for _, c := range chain {
		for _, u := range c.URIs {
			if u.String() != p.domain.URI() {
				return fmt.Errorf("certificate %s: %q is of %s; all of a ceremony is for one trust domain, here %s (D10)", e.Certificate, c.Subject, u, p.domain)
			}
		}
	}
	if err := p.unique(cert); err != nil {
		return err
	}
	a := &authority{cert: cert, chain: chain, existing: true}
	p.known[e.Name] = a
	if e.Key == "" {
		return nil
	}
	if err := root.CheckSignatureFrom(root); err != nil {
		return fmt.Errorf("certificate %s: the last one, %q, should be a self-signed root", e.Certificate, root.Subject)
	}
	key, err := p.readKey(e.Key)
	if err != nil {
		return fmt.Errorf("key: %w", err)
	}
	bundle, err := trust.NewBundle(p.domain, 1, []*x509.Certificate{root})
	if err != nil {
		return err
	}
	a.issuer, err = ca.NewIssuer(ca.IssuerConfig{Domain: p.domain, Key: key, Chain: chain, Bundle: bundle, LogID: p.logID, Log: p.options.Log})
	return err
}

// unique refuses a subject or a key that another authority of the ceremony has: verifiers could not tell them apart.
func (p *Plan) unique(cert *x509.Certificate) error {
	for name, a := range p.known {
		switch {
		case string(a.cert.RawSubject) == string(cert.RawSubject):
			return fmt.Errorf("%s has the same subject %q", name, cert.Subject)
		case trust.SameKey(a.cert.PublicKey, cert.PublicKey):
			return fmt.Errorf("%s has the same key; each authority needs its own", name)
		}
	}
	return nil
}

// signer returns an authority by name that can sign.
func (p *Plan) signer(name string) (*authority, error) {
	a := p.known[name]
	switch {
	case a == nil:
		return nil, fmt.Errorf("by: there is no authority %q among existing and earlier steps", name)
	case a.issuer == nil:
		return nil, fmt.Errorf("by: %q cannot sign; give its key in existing", name)
	}
	return a, nil
}

func (p *Plan) draft(s *step) (err error) {
	switch s.Kind {
	case kindCRL:
		return p.draftCRL(s)
	case kindCross:
		return p.draftCross(s)
	}
	pathLen := 0
	if s.Kind == kindRoot {
		pathLen = -1
		if s.issuer, err = p.selfIssuer(s); err != nil {
			return err
		}
	} else {
		by, err := p.signer(s.By)
		if err != nil {
			return err
		}
		s.issuer = by.issuer
	}
	if s.PathLen != nil {
		pathLen = *s.PathLen
	}
	if err := p.draftCertificate(s, s.made.key.Public(), pathLen, nil); err != nil {
		return err
	}
	cert := s.made.draft.Certificate()
	if err := p.unique(cert); err != nil {
		return err
	}
	own, err := s.made.draft.Issuer(s.made.key)
	if err != nil {
		return err
	}
	p.known[s.Name] = &authority{cert: cert, issuer: own}
	return nil
}

func (p *Plan) selfIssuer(s *step) (*ca.Issuer, error) {
	begin := s.notBefore
	if begin.IsZero() {
		begin = time.Now().Add(-ca.DefaultBackdate).Truncate(time.Second)
	}
	return ca.NewSelfIssuer(ca.SelfConfig{
		Domain: p.domain, Key: s.made.key, CommonName: kindRoot, NotBefore: begin, NotAfter: s.notAfter, LogID: p.logID, Log: p.options.Log,
	})
}

func (p *Plan) draftCross(s *step) error {
	by, err := p.signer(s.By)
	if err != nil {
		return err
	}
	of := p.known[s.Of]
	if of == nil {
		return fmt.Errorf("of: there is no authority %q among existing and earlier steps", s.Of)
	}
	pathLen := of.cert.MaxPathLen
	if s.PathLen != nil {
		pathLen = *s.PathLen
	}
	s.issuer = by.issuer
	return p.draftCertificate(s, of.cert.PublicKey, pathLen, of.cert)
}

func (p *Plan) draftCertificate(s *step, pub crypto.PublicKey, pathLen int, existing *x509.Certificate) (err error) {
	s.made.draft, err = s.issuer.Draft(ca.CeremonyProfile(s.Kind), ca.Request{
		PublicKey: pub, Requester: audit.Requester{Method: "ceremony", User: p.options.Actor},
		CA: &ca.CARequest{
			Domain: p.domain, CommonName: s.Kind, PathLen: pathLen, NotBefore: s.notBefore, NotAfter: s.notAfter, Existing: existing,
		},
	})
	return err
}

func (p *Plan) draftCRL(s *step) error {
	by, err := p.signer(s.By)
	if err != nil {
		return err
	}
	this := s.thisUpdate
	if this.IsZero() {
		this = time.Now().Truncate(time.Second)
	}
	s.issuer = by.issuer
	s.made.draft, err = by.issuer.DraftCRL(ca.CRLRequest{
		Number: big.NewInt(int64(s.Number)), ThisUpdate: this, NextUpdate: s.nextUpdate, Revoked: s.revoked,
		Requester: audit.Requester{Method: "ceremony", User: p.options.Actor},
	})
	return err
}

// keyOf makes or reads the key of a root or issuer.
func (p *Plan) keyOf(s *step) (crypto.Signer, error) {
	if s.Key.File != "" {
		key, err := p.readKey(s.Key.File)
		if err != nil {
			return nil, fmt.Errorf("key.file: %w", err)
		}
		return key, nil
	}
	key, err := ca.GenerateKey(s.keyType)
	if err != nil {
		return nil, fmt.Errorf("key.generate: %w", err)
	}
	return key, nil
}

func (p *Plan) readKey(name string) (crypto.Signer, error) {
	data, err := readBounded(p.path(name), true)
	if err != nil {
		return nil, err
	}
	key, err := trust.ParseKey(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return key, nil
}
