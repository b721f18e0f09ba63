package authority

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// documentFormat is the version of the document's layout; a binary refuses a higher one.
const documentFormat = 1

// maxDocument bounds what is decoded from a store.
const maxDocument = 16 << 20

// Document is the authority document: all that a server must agree on with others and with its own past. It lies in a
// compare-and-swap store, authenticated and with sealed keys (decision D9), and is keyed by trust domain (D10).
type Document struct {
	Format   int                     `json:"format"`
	Version  uint64                  `json:"version"`            // equals the store's
	Previous string                  `json:"previous,omitempty"` // hex SHA-256 of the version before, MAC included
	Domains  map[string]*DomainState `json:"domains"`            // by trust domain
	Logs     []LogState              `json:"logs"`               // of each replica (decision D13)
}

// DomainState holds the authorities of one trust domain.
type DomainState struct {
	Generation  uint64      `json:"generation"` // of the bundle; grows when its roots change
	Authorities []Authority `json:"authorities"`
}

// LogState names one replica's log.
type LogState struct {
	ID uint32 `json:"id"` // ca.MinLogID to ca.MaxLogID
}

// Authority is a root or an issuer.
type Authority struct {
	ID          string         `json:"id"` // subject key identifier in hex
	Kind        AuthorityKind  `json:"kind"`
	State       AuthorityState `json:"state"`
	Generation  uint64         `json:"generation"` // of the domain's when it was added
	Certificate string         `json:"certificate"`
	Key         []byte         `json:"key,omitempty"` // sealed PKCS#8; empty for keys that lie elsewhere (plugged-in issuer)
	Created     time.Time      `json:"created"`
}

// AuthorityKind tells roots from issuers.
type AuthorityKind string

// AuthorityState is where an authority stands in its life.
type AuthorityState string

// Kinds and states.
const (
	KindRoot   AuthorityKind = "root"
	KindIssuer AuthorityKind = "issuer"

	StatePrepared AuthorityState = "prepared" // trusted, not signing yet
	StateActive   AuthorityState = "active"   // signs, or, for a root, vouches for the active issuer
	StateRetiring AuthorityState = "retiring" // trusted until what it signed has ended
	StateTainted  AuthorityState = "tainted"  // not to be trusted any more
)

// NewDocument returns a first document with a log ID for this server and no authority.
func NewDocument() *Document {
	var b [4]byte
	rand.Read(b[:])
	id := ca.MinLogID + binary.BigEndian.Uint32(b[:])%(ca.MaxLogID-ca.MinLogID)
	return &Document{Format: documentFormat, Version: 1, Domains: map[string]*DomainState{}, Logs: []LogState{{ID: id}}}
}

// LogID returns the log ID of this server, the only replica so far.
func (d *Document) LogID() uint32 { return d.Logs[0].ID }

// Add puts an authority into the document. key is sealed into it; nil leaves it outside. Adding a root raises the
// domain's generation.
func (d *Document) Add(td trust.Domain, kind AuthorityKind, cert *x509.Certificate, key crypto.Signer, s *keys.Sealer) error {
	state := d.Domains[td.String()]
	if state == nil {
		state = &DomainState{}
		d.Domains[td.String()] = state
	}
	if kind == KindRoot {
		state.Generation++
	}
	a := Authority{
		ID: hex.EncodeToString(cert.SubjectKeyId), Kind: kind, State: StateActive, Generation: state.Generation,
		Certificate: string(trust.EncodeCertificates(cert)), Created: time.Now().UTC().Truncate(time.Second),
	}
	if key != nil {
		pem, err := trust.EncodeKey(key)
		if err != nil {
			return err
		}
		a.Key = s.Seal(pem, a.sealContext(td))
	}
	state.Authorities = append(state.Authorities, a)
	return nil
}

func (a *Authority) sealContext(td trust.Domain) string {
	return fmt.Sprintf("key of %s %s of %s, generation %d", a.Kind, a.ID, td, a.Generation)
}

// X509 returns the authority's certificate.
func (a *Authority) X509() (*x509.Certificate, error) {
	certs, err := trust.ParseCertificates([]byte(a.Certificate))
	if err != nil || len(certs) != 1 {
		return nil, fmt.Errorf("authority %s: its certificate does not parse: %w", a.ID, err)
	}
	return certs[0], nil
}

// OpenKey unseals the authority's private key.
func (a *Authority) OpenKey(td trust.Domain, s *keys.Sealer) (crypto.Signer, error) {
	if len(a.Key) == 0 {
		return nil, fmt.Errorf("the key of %s %s does not lie in the document", a.Kind, a.ID)
	}
	pem, err := s.Open(a.Key, a.sealContext(td))
	if err != nil {
		return nil, err
	}
	return trust.ParseKey(pem)
}

// Bundle returns the roots of a trust domain that are trusted now: all but tainted ones.
func (d *Document) Bundle(td trust.Domain) (*trust.Bundle, error) {
	state := d.Domains[td.String()]
	if state == nil {
		return nil, fmt.Errorf("the authority document has nothing for trust domain %s; it has %v", td, d.domainNames())
	}
	var roots []*x509.Certificate
	for i := range state.Authorities {
		a := &state.Authorities[i]
		if a.Kind != KindRoot || a.State == StateTainted {
			continue
		}
		cert, err := a.X509()
		if err != nil {
			return nil, err
		}
		roots = append(roots, cert)
	}
	return trust.NewBundle(td, state.Generation, roots)
}

// Active returns the active authority of a kind.
func (d *Document) Active(td trust.Domain, kind AuthorityKind) (*Authority, error) {
	if state := d.Domains[td.String()]; state != nil {
		for i := range state.Authorities {
			if a := &state.Authorities[i]; a.Kind == kind && a.State == StateActive {
				return a, nil
			}
		}
	}
	return nil, fmt.Errorf("the authority document has no active %s for trust domain %s", kind, td)
}

// Issuer returns the active issuer of a trust domain, with its key from the document.
func (d *Document) Issuer(td trust.Domain, s *keys.Sealer, log *audit.Log) (*ca.Issuer, error) {
	a, err := d.Active(td, KindIssuer)
	if err != nil {
		return nil, err
	}
	key, err := a.OpenKey(td, s)
	if err != nil {
		return nil, err
	}
	cert, err := a.X509()
	if err != nil {
		return nil, err
	}
	bundle, err := d.Bundle(td)
	if err != nil {
		return nil, err
	}
	return ca.NewIssuer(ca.IssuerConfig{Domain: td, Key: key, Chain: []*x509.Certificate{cert}, Bundle: bundle, LogID: d.LogID(), Log: log})
}

// NewIssuer makes a new issuer under the active root, whose key must lie in the document. It changes nothing: see
// ReplaceIssuer. The key's type is the root's.
func (d *Document) NewIssuer(ctx context.Context, td trust.Domain, s *keys.Sealer, log *audit.Log) (*x509.Certificate, crypto.Signer, error) {
	root, err := d.Active(td, KindRoot)
	if err != nil {
		return nil, nil, err
	}
	cert, err := root.X509()
	if err != nil {
		return nil, nil, err
	}
	rootKey, err := root.OpenKey(td, s)
	if err != nil {
		return nil, nil, err
	}
	bundle, err := d.Bundle(td)
	if err != nil {
		return nil, nil, err
	}
	signer, err := ca.NewIssuer(ca.IssuerConfig{Domain: td, Key: rootKey, Chain: []*x509.Certificate{cert}, Bundle: bundle, LogID: d.LogID(), Log: log})
	if err != nil {
		return nil, nil, err
	}
	return signer.NewIssuer(ctx, ca.DefaultIssuerTTL, audit.Requester{Method: "issuer renewal"})
}

// ReplaceIssuer makes cert the active issuer. The former one retires: nothing is signed with it any more, and what it
// signed stays valid, since each leaf is sent with its issuer. Its sealed key is dropped.
func (d *Document) ReplaceIssuer(td trust.Domain, cert *x509.Certificate, key crypto.Signer, s *keys.Sealer) error {
	old, err := d.Active(td, KindIssuer)
	if err != nil {
		return err
	}
	old.State, old.Key = StateRetiring, nil
	d.dropEndedIssuers(td, time.Now())
	return d.Add(td, KindIssuer, cert, key, s)
}

// dropEndedIssuers forgets retired issuers whose certificates have ended, so that the document does not grow for ever.
func (d *Document) dropEndedIssuers(td trust.Domain, now time.Time) {
	state := d.Domains[td.String()]
	kept := state.Authorities[:0]
	for _, a := range state.Authorities {
		if cert, err := a.X509(); a.Kind == KindIssuer && a.State == StateRetiring && err == nil && now.After(cert.NotAfter) {
			continue
		}
		kept = append(kept, a)
	}
	state.Authorities = kept
}

func (d *Document) domainNames() []string {
	var out []string
	for name := range d.Domains {
		out = append(out, name)
	}
	return out
}

// envelope is how a document is stored.
type envelope struct {
	Document json.RawMessage `json:"document"`
	MAC      []byte          `json:"mac"`
}

// Encode returns the document's bytes for a store.
func (d *Document) Encode(s *keys.Sealer) ([]byte, error) {
	raw, err := json.Marshal(d)
	if err != nil {
		return nil, fmt.Errorf("encoding authority document: %w", err)
	}
	return json.Marshal(envelope{raw, s.MAC(raw)})
}

// DecodeDocument reads and authenticates a document that a store holds as the given version.
func DecodeDocument(data []byte, version uint64, s *keys.Sealer) (*Document, error) {
	if len(data) > maxDocument {
		return nil, fmt.Errorf("authority document has %d bytes; at most %d are read", len(data), maxDocument)
	}
	var e envelope
	if err := strictJSON(data, &e); err != nil {
		return nil, fmt.Errorf("authority document: %w", err)
	}
	if !s.CheckMAC(e.Document, e.MAC) {
		return nil, errors.New("authority document: it was not written with this sealing key, or was changed since")
	}
	var format struct{ Format int }
	if err := json.Unmarshal(e.Document, &format); err != nil {
		return nil, fmt.Errorf("authority document: %w", err)
	}
	if format.Format > documentFormat {
		return nil, fmt.Errorf("authority document has format %d; this binary knows up to %d: use a newer one", format.Format, documentFormat)
	}
	d := new(Document)
	if err := strictJSON(e.Document, d); err != nil {
		return nil, fmt.Errorf("authority document: %w", err)
	}
	if d.Version != version {
		return nil, fmt.Errorf("authority document says version %d and the store %d: it was put there from elsewhere", d.Version, version)
	}
	if len(d.Logs) == 0 {
		return nil, errors.New("authority document lists no log")
	}
	return d, nil
}

// Next returns a copy to be changed and stored as the following version; data is the stored form of d.
func (d *Document) Next(data []byte) (*Document, error) {
	raw, err := json.Marshal(d)
	if err != nil {
		return nil, fmt.Errorf("copying authority document: %w", err)
	}
	n := new(Document)
	if err := json.Unmarshal(raw, n); err != nil {
		return nil, fmt.Errorf("copying authority document: %w", err)
	}
	sum := sha256.Sum256(data)
	n.Version, n.Previous = d.Version+1, hex.EncodeToString(sum[:])
	return n, nil
}

func strictJSON(data []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if dec.More() {
		return errors.New("there is more than one JSON value")
	}
	return nil
}
