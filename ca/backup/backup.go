// Package backup owns exports of the authority document: what a file of `chancery state export` holds, and holding it to the
// sealing key and the trust domain that it is to be restored for (decision D9).
//
// An export is no more secret than the store: private keys in it are sealed. It refuses one that was made with another sealing
// key, was changed, or is of a newer format; and it holds neither the sealing key nor what lies in key stores, files and logs,
// all of which it names.
package backup

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/strict"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// Format is that of exports; a binary refuses a higher one.
const Format = 1

// MaxFile bounds an export, in bytes: a document in base64, and some.
const MaxFile = store.MaxDocument/3*4 + 1<<20

// Export is what a file holds.
type Export struct {
	Kind         string    `json:"kind"` // kind
	Format       int       `json:"format"`
	TrustDomains []string  `json:"trustDomains"`
	Version      uint64    `json:"version"` // of the document
	Time         time.Time `json:"time"`
	Replica      string    `json:"replica"` // who made it
	Source       Source    `json:"source"`
	SealingKey   string    `json:"sealingKey"` // its ID; see keyID
	KeyRefs      []string  `json:"keyRefs,omitempty"`
	NotIncluded  []string  `json:"notIncluded"` // for people
	Document     []byte    `json:"document"`    // as a store holds it: authenticated, its keys sealed
}

// Source says where an export was taken from.
type Source string

// The sources.
const (
	FromStore  Source = "store"
	FromServer Source = "server" // its memory: the store did not answer, or has an older one
)

const kind = "chancery state export"

// notIncluded is what a CA needs besides, for whoever finds the file.
var notIncluded = []string{
	"the sealing key, without which nothing here can be used: keep a copy elsewhere, never beside exports",
	"private keys in key stores: those listed as keyRefs",
	"plugged-in issuer files, the config, and what it names: key sets, kubeconfigs, passwords, tokens",
	"audit logs and issuance logs of the replicas",
	"changes after this time, revocations among them: the audit logs have them",
}

type file struct {
	Export json.RawMessage `json:"export"`
	MAC    []byte          `json:"mac"`
}

// bound is what is authenticated: no document, note or mark begins like this.
func bound(raw []byte) []byte { return append([]byte(kind+"\x00"), raw...) }

// keyID tells sealing keys apart, and says nothing of them.
func keyID(s *keys.Sealer) string {
	return hex.EncodeToString(s.MAC([]byte("chancery sealing key ID"))[:8])
}

// Make makes an export of a document in its stored form.
func Make(data []byte, version uint64, s *keys.Sealer, replica string, source Source, now time.Time) ([]byte, *Export, error) {
	doc, err := document.Decode(data, version, s)
	if err != nil {
		return nil, nil, err
	}
	e := &Export{
		Kind: kind, Format: Format, TrustDomains: slices.Sorted(maps.Keys(doc.Domains)), Version: version, Time: now.UTC().Truncate(time.Second), Replica: replica,
		Source: source, SealingKey: keyID(s), KeyRefs: slices.Sorted(maps.Keys(doc.KeyRefs())), NotIncluded: notIncluded, Document: data,
	}
	raw, err := json.Marshal(e)
	if err != nil {
		return nil, nil, fmt.Errorf("encoding the export: %w", err)
	}
	out, err := json.MarshalIndent(file{raw, s.MAC(bound(raw))}, "", "  ")
	if err != nil {
		return nil, nil, fmt.Errorf("encoding the export: %w", err)
	}
	return append(out, '\n'), e, nil
}

// Open reads and authenticates an export, and the document in it.
func Open(data []byte, s *keys.Sealer) (*Export, *document.Document, error) {
	if len(data) > MaxFile {
		return nil, nil, fmt.Errorf("it has more than %d bytes, which no export has", MaxFile)
	}
	var f file
	if err := strict.JSON(data, &f); err != nil {
		return nil, nil, fmt.Errorf("it is no export: %w", err)
	}
	var compact bytes.Buffer // what was authenticated has no space, which the file has for people
	if err := json.Compact(&compact, f.Export); err != nil {
		return nil, nil, fmt.Errorf("it is no export: %w", err)
	}
	raw := compact.Bytes()
	var head struct {
		Kind       string
		Format     int
		SealingKey string
	}
	if err := json.Unmarshal(raw, &head); err != nil || head.Kind != kind {
		return nil, nil, fmt.Errorf("it is no export: its kind is %.60q, not %q", head.Kind, kind)
	}
	if !s.CheckMAC(bound(raw), f.MAC) {
		if id := keyID(s); head.SealingKey != id {
			return nil, nil, fmt.Errorf("it was made with the sealing key of ID %.16q, and the one in use has %s: name the right one in state.sealingKey", head.SealingKey, id)
		}
		return nil, nil, errors.New("it was changed since it was made, or cut off")
	}
	if head.Format > Format {
		return nil, nil, fmt.Errorf("it has format %d; this binary knows up to %d: use a newer one", head.Format, Format)
	}
	e := new(Export)
	if err := strict.JSON(raw, e); err != nil {
		return nil, nil, fmt.Errorf("reading it: %w", err)
	}
	doc, err := document.Decode(e.Document, e.Version, s)
	if err != nil {
		return nil, nil, fmt.Errorf("the document in it: %w", err)
	}
	return e, doc, nil
}

// CheckDomain refuses an export, and the document in it, that are not of the trust domain, by whichever of an authority's names.
func (e *Export) CheckDomain(d *document.Document, td trust.Domain) error {
	if _, ok := d.Line(td); ok {
		return nil
	}
	return fmt.Errorf("it is of trust domain %s, and the config is of %s", strings.Join(e.TrustDomains, ", "), td)
}
