// Package document owns the authority document: what it holds, how it is authenticated and sealed, and the changes that it
// goes through, each as a function of the document before.
//
// It refuses documents that another sealing key wrote, that were changed, that come from another place in the store's
// history, and fields that it does not know: an older binary must not pass over what a newer one has written. It stores
// nothing and signs nothing: that is package authority.
package document

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/document/below"
	"github.com/chancery-project/chancery/ca/document/entry"
	"github.com/chancery-project/chancery/ca/document/foreign"
	"github.com/chancery-project/chancery/ca/document/listed"
	"github.com/chancery-project/chancery/ca/document/strict"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// Format is the version of the document's layout; a binary refuses a higher one. A document is written in the lowest that says it all: see
// Needs.
const Format = 4

// Document is the authority document: all that a server must agree on with others and with its own past. It lies in a
// compare-and-swap store, authenticated and with sealed keys (decision D9), and is keyed by trust domain (D10).
type Document struct {
	Format   int                     `json:"format"`
	Version  uint64                  `json:"version"`            // equals the store's
	Previous string                  `json:"previous,omitempty"` // hex SHA-256 of the version before, MAC included
	Domains  map[string]*DomainState `json:"domains"`            // by trust domain
	Logs     []LogState              `json:"logs"`               // of each replica (decision D13)
	// Before holds the beginnings of the hashes of versions before that, the newest first: whoever missed some can tell that they
	// led here.
	Before   []string `json:"before,omitempty"`
	By       string   `json:"by,omitempty"`       // replica and process that wrote this version: what two write is never the same
	Driver   *Driver  `json:"driver,omitempty"`   // who prepares and activates; nil before the first did
	Imported *Import  `json:"imported,omitempty"` // the last time that it was restored
	// Foreign are the bundles of federated trust domains, by name.
	Foreign map[string]*foreign.Domain `json:"foreign,omitempty"`
}

// DomainState holds the authorities of one line of trust domains, under the name of the first of it: a migration adds the next one.
type DomainState struct {
	Generation  uint64           `json:"generation"` // of the bundle; grows when its roots change
	Authorities []Authority      `json:"authorities"`
	Requested   *RequestedIssuer `json:"requested,omitempty"` // whose certificate a parent elsewhere is to sign
	Revocations []Revocation     `json:"revocations,omitempty"`
	CRL         *CRL             `json:"crl,omitempty"`       // what the last CRLs are; nil: there were none, or see CRLNumber
	CRLNumber   uint64           `json:"crlNumber,omitempty"` // of the last CRLs of a version that kept no more of them
	Rotation    *Rotation        `json:"rotation,omitempty"`  // under way; nil: none is
	Past        []PastRotation   `json:"past,omitempty"`      // that have ended, the newest first
	BundleKey   *BundleKey       `json:"bundleKey,omitempty"` // signs what agents are told of roots; nil: not made yet
	TaintedAt   uint64           `json:"taintedAt,omitempty"` // version that last tainted an authority; see NoteTaints
	Below       []below.Issuers  `json:"below,omitempty"`     // of servers below
	Domain      string           `json:"domain,omitempty"`    // the trust domain of the line now; empty: its first, whose name it has
	Former      []string         `json:"former,omitempty"`    // trust domains that it was before, in order
}

// What packages entry and listed own, under the names by which others know it.
type (
	// Authority is a root or an issuer.
	Authority = entry.Authority
	// AuthorityKind tells roots from issuers.
	AuthorityKind = entry.Kind
	// AuthorityState is where an authority stands in its life.
	AuthorityState = entry.State
	// Key is an authority's key as it enters the document.
	Key = entry.Key
	// RequestedIssuer is an issuer that has a key and no certificate yet.
	RequestedIssuer = entry.Requested
	// LogState is a replica, and names its log.
	LogState = listed.LogState
)

// Kinds and states.
const (
	KindRoot   = entry.KindRoot
	KindIssuer = entry.KindIssuer

	StatePrepared = entry.StatePrepared
	StateActive   = entry.StateActive
	StateRetiring = entry.StateRetiring
)

// RootOf returns the ID of the root above a chain, as its last certificate names it.
func RootOf(chain []*x509.Certificate) string { return entry.RootOf(chain) }

// NewLogID returns a log ID at random.
func NewLogID() uint32 { return listed.NewLogID() }

// BundleKey is the Ed25519 key that signs bundles (decision D6). Agents pin its public part when they are enrolled, so that who has
// a root's key alone cannot tell them of other roots.
type BundleKey struct {
	Public  []byte    `json:"public"` // 32 bytes
	Key     []byte    `json:"key"`    // sealed PKCS#8
	Created time.Time `json:"created"`
}

// New returns a first document with a log ID, for who opens it, and no authority.
func New() *Document {
	return &Document{Format: formatBefore, Version: 1, Domains: map[string]*DomainState{}, Logs: []LogState{{ID: NewLogID()}}}
}

// Add puts an authority into the document: its certificate, followed by those between it and its root, if any. Adding a
// root raises the domain's generation.
func (d *Document) Add(td trust.Domain, kind AuthorityKind, key Key, s *keys.Sealer, cert *x509.Certificate, chain ...*x509.Certificate) error {
	return d.add(td, kind, StateActive, key, s, cert, chain...)
}

// Prepare adds an issuer that signs no certificate yet.
func (d *Document) Prepare(td trust.Domain, key Key, s *keys.Sealer, cert *x509.Certificate, chain ...*x509.Certificate) error {
	d.DropPrepared(td)
	return d.add(td, KindIssuer, StatePrepared, key, s, cert, chain...)
}

func (d *Document) add(td trust.Domain, kind AuthorityKind, as AuthorityState, key Key, s *keys.Sealer, cert *x509.Certificate, chain ...*x509.Certificate) error {
	state := d.State(td)
	td, _ = d.Line(td)
	if kind == KindRoot {
		state.Generation++
	}
	a := Authority{
		ID: hex.EncodeToString(cert.SubjectKeyId), Kind: kind, State: as, Generation: state.Generation, KeyRef: key.Ref,
		Certificate: string(trust.EncodeCertificates(cert)), Chain: string(trust.EncodeCertificates(chain...)),
		Created: time.Now().UTC().Truncate(time.Second),
	}
	if kind == KindIssuer {
		a.Root = RootOf(append([]*x509.Certificate{cert}, chain...))
		if root := state.Get(KindRoot, a.Root); root != nil { // it vouches for whom its root does
			a.Domain = root.Domain
		}
	}
	if key.Signer != nil && key.Ref == "" {
		if err := a.Seal(key, td, s); err != nil {
			return err
		}
	}
	state.Authorities = append(state.Authorities, a)
	return nil
}

// State returns what the document has of a trust domain; if it has nothing yet, a place for it.
func (d *Document) State(td trust.Domain) *DomainState {
	state := d.Of(td)
	if state == nil {
		state = &DomainState{}
		d.Domains[td.String()] = state
	}
	return state
}

// lacks is the error where a trust domain was never set up in this document.
func (d *Document) lacks(td trust.Domain) error {
	return fmt.Errorf("the authority document has nothing for trust domain %s; it has %v", td, d.domainNames())
}

// Active returns the active authority of a kind.
func (d *Document) Active(td trust.Domain, kind AuthorityKind) (*Authority, error) {
	state := d.Of(td)
	if state == nil {
		return nil, d.lacks(td)
	}
	for i := range state.Authorities {
		if a := &state.Authorities[i]; a.Kind == kind && a.State == StateActive {
			return a, nil
		}
	}
	return nil, fmt.Errorf("the authority document has no active %s for trust domain %s", kind, td)
}

// KeyRefs returns the references of all keys that the document needs.
func (d *Document) KeyRefs() map[string]bool {
	refs := map[string]bool{}
	for _, state := range d.Domains {
		for _, a := range state.Authorities {
			refs[a.KeyRef] = true
		}
		if state.Requested != nil {
			refs[state.Requested.KeyRef] = true
		}
	}
	delete(refs, "")
	return refs
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
	if err := d.checkLines(); err != nil {
		return nil, fmt.Errorf("encoding authority document: %w", err)
	}
	if need := d.Needs(); d.Format < need { // a server that knows less must not read it as if it had said all
		as := *d
		as.Format, d = need, &as
	}
	raw, err := json.Marshal(d)
	if err != nil {
		return nil, fmt.Errorf("encoding authority document: %w", err)
	}
	return json.Marshal(envelope{raw, s.MAC(raw)})
}

// Decode reads and authenticates a document that a store holds as the given version.
func Decode(data []byte, version uint64, s *keys.Sealer) (*Document, error) {
	if len(data) > store.MaxDocument {
		return nil, fmt.Errorf("authority document has %d bytes; at most %d are read", len(data), store.MaxDocument)
	}
	var e envelope
	if err := strict.JSON(data, &e); err != nil {
		return nil, fmt.Errorf("authority document: %w", err)
	}
	if !s.CheckMAC(e.Document, e.MAC) {
		return nil, fmt.Errorf("authority document: it was not written with %s, which all servers on one store have alike, or was changed since", s)
	}
	var format struct{ Format int }
	if err := json.Unmarshal(e.Document, &format); err != nil {
		return nil, fmt.Errorf("authority document: %w", err)
	}
	if format.Format > Format {
		return nil, fmt.Errorf("authority document has format %d; this binary knows up to %d: use a newer one", format.Format, Format)
	}
	d := new(Document)
	if err := strict.JSON(e.Document, d); err != nil {
		return nil, fmt.Errorf("authority document: %w", err)
	}
	if d.Version != version {
		return nil, fmt.Errorf("authority document says version %d and the store %d: it was put there from elsewhere", d.Version, version)
	}
	if n := len(d.Logs); n == 0 || n > MaxReplicas {
		return nil, fmt.Errorf("authority document lists %d replicas; 1 to %d are read", n, MaxReplicas)
	}
	for name, state := range d.Domains {
		if state == nil {
			return nil, fmt.Errorf("authority document has null for trust domain %.80q", name)
		}
	}
	for name, f := range d.Foreign {
		if f == nil {
			return nil, fmt.Errorf("authority document has null for foreign trust domain %.80q", name)
		}
	}
	if err := d.checkLines(); err != nil {
		return nil, fmt.Errorf("authority document: %w", err)
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
	if n.Version, n.Previous = d.Version+1, Hash(data); d.Previous != "" {
		n.Before = append([]string{short(d.Previous)}, d.Before[:min(len(d.Before), maxBefore-1)]...)
	}
	return n, nil
}

// maxBefore is how many hashes a document has of versions before the previous one, and shortHash how much of each.
const (
	maxBefore = 64
	shortHash = 32 // in hex
)

// Hash returns the hash of a document's stored form, in hex.
func Hash(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

func short(hash string) string { return hash[:min(len(hash), shortHash)] }

// Follows reports whether a document may come after the version of a hash: it does not if it knows of another one in its place.
func (d *Document) Follows(version uint64, hash string) bool {
	switch gap := d.Version - version; {
	case d.Version <= version:
		return false
	case gap == 1:
		return d.Previous == hash
	case gap-2 < uint64(len(d.Before)):
		return d.Before[gap-2] == short(hash)
	}
	return true // too long ago, or before it was restored
}

// Has reports whether a document knows that it came after the version of a hash.
func (d *Document) Has(version uint64, hash string) bool {
	gap := d.Version - version
	return d.Follows(version, hash) && (gap == 1 || gap-2 < uint64(len(d.Before)))
}

// Request notes that an issuer with this key was requested. Its ID is id.
func (d *Document) Request(td trust.Domain, id string, key Key, s *keys.Sealer) error {
	state := d.State(td)
	line, _ := d.Line(td)
	r, err := entry.NewRequested(line, id, key, s)
	if err == nil {
		state.Requested = r
	}
	return err
}
