package checkup

import (
	"bytes"
	"crypto/x509"
	"encoding/hex"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// Inventory is what an authority document, and the chain in use, say of a trust domain.
type Inventory struct {
	Document  Document
	RenewedBy string
	Certs     []Certificate
	Stores    map[string]string // by "issuer ID" or "root ID", where its key lies
}

// Take makes the inventory. chain is what signs, the issuing certificate first; plugged says that it comes from files, whose
// roots may then be more than the document's. It is empty where there is no issuer yet.
func Take(d *authority.Document, td trust.Domain, chain, roots []*x509.Certificate, plugged bool, now time.Time) (*Inventory, error) {
	inv := &Inventory{RenewedBy: RenewedByServer, Stores: map[string]string{}, Document: Document{Version: d.Version, Logs: []Log{}}}
	for _, l := range d.Logs {
		inv.Document.Logs = append(inv.Document.Logs, Log{l.ID, l.Key, l.Replica, l.DeclaredDead != nil})
	}
	known, tainted := map[string]bool{}, map[string]*time.Time{} // by certificate; by kind and ID
	add := func(kind, state string, inUse bool, c *x509.Certificate) {
		if id := string(c.Raw); !known[id] {
			known[id] = true
			one := NewCertificate(kind, state, inUse, c, now)
			one.Tainted = tainted[kind+" "+one.ID]
			inv.Certs = append(inv.Certs, one)
		}
	}
	state := d.Of(td)
	states := map[string]string{}
	if state != nil {
		if err := inv.read(state, states, tainted); err != nil {
			return nil, err
		}
	}
	stateOf := func(c *x509.Certificate) string {
		if s, ok := states[hex.EncodeToString(c.SubjectKeyId)]; ok {
			return s
		}
		return string(authority.StateActive)
	}
	for _, r := range roots {
		add(KindRoot, stateOf(r), len(chain) > 0 && isParent(r, chain[len(chain)-1]), r)
	}
	for i := len(chain) - 1; i >= 0; i-- {
		kind := KindIntermediate
		if i == 0 {
			kind = KindIssuer
		}
		add(kind, stateOf(chain[i]), true, chain[i])
	}
	if plugged {
		inv.RenewedBy = RenewedByFiles
	}
	if state == nil {
		return inv, nil
	}
	for i := range state.Authorities { // those that are neither trusted nor sign any more
		c, err := state.Authorities[i].X509()
		if err != nil {
			return nil, err
		}
		add(string(state.Authorities[i].Kind), string(state.Authorities[i].State), false, c)
	}
	return inv, nil
}

// read takes down what a domain's part of the document says.
func (inv *Inventory) read(d *document.DomainState, states map[string]string, tainted map[string]*time.Time) error {
	inv.Document.Generation = d.Generation
	if key := d.PublicBundleKey(); key != nil {
		inv.Document.BundleKey = trust.KeyFingerprint(key)
	}
	if d.Requested != nil {
		inv.Document.Requested = &d.Requested.Created
	}
	for i := range d.Authorities {
		a := &d.Authorities[i]
		states[a.ID] = string(a.State)
		tainted[string(a.Kind)+" "+a.ID] = a.Tainted
		store := StoreOf(a)
		inv.Stores[string(a.Kind)+" "+a.ID] = store
		if a.Kind == authority.KindRoot && a.State == authority.StateActive && store == StoreElsewhere {
			inv.RenewedBy = RenewedByImport
		}
		if inv.Document.Created == nil || a.Created.After(*inv.Document.Created) {
			inv.Document.Created = &a.Created
		}
	}
	return nil
}

// Where a key can lie, besides in a key store.
const (
	StoreState     = "sealed in the state"
	StoreElsewhere = "kept elsewhere"
)

// StoreOf says where an authority's key lies.
func StoreOf(a *authority.Authority) string {
	switch scheme, _, _ := strings.Cut(a.KeyRef, ":"); {
	case scheme == "file":
		return "encrypted file"
	case scheme == "pkcs11":
		return "token"
	case scheme == "secret":
		return "Kubernetes Secret"
	case scheme == "awskms" || scheme == "gcpkms" || scheme == "azurekms":
		return "cloud KMS"
	case scheme != "":
		return "key store " + scheme
	case len(a.Key) > 0:
		return StoreState
	}
	return StoreElsewhere
}

// isParent reports whether a root vouches for a certificate, by names and identifiers; or is it.
func isParent(root, c *x509.Certificate) bool {
	return root.Equal(c) || bytes.Equal(root.RawSubject, c.RawIssuer) &&
		(len(c.AuthorityKeyId) == 0 || len(root.SubjectKeyId) == 0 || bytes.Equal(root.SubjectKeyId, c.AuthorityKeyId))
}
