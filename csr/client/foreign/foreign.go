// Package foreign owns what an agent knows of foreign trust domains, over restarts: the newest word on them that the pinned bundle key has
// signed (decision D6).
//
// It refuses what has another signature, what is of another authority, and what is older than what it has; all of it, where a part is
// wrong. Whether a foreign domain has become one of the own it does not judge.
package foreign

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/document/strict"
	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/trust"
)

const (
	format     = 1
	maxDomains = 100
	maxFile    = 2*trust.MaxSignedFederation + 64<<10
)

// Config says where it lies.
type Config struct {
	File   string         // empty: in memory alone
	Anchor *anchor.Anchor // whose key counts, and which domains are the own ones
	Logger *slog.Logger   // nil: nothing is logged
}

// Domains are the bundles of foreign trust domains. They are safe for concurrent use.
type Domains struct {
	config Config

	mu      sync.Mutex // guards all below
	signed  trust.SignedFederation
	word    *word // what signed says; nil before the first
	changed chan struct{}
	dirty   bool // the file has not all of it
}

// word is what was said, read.
type word struct {
	version uint64
	content []byte // without the version
	bundles []*trust.Bundle
}

// file is what is kept.
type file struct {
	Format     int    `json:"format"`
	Federation []byte `json:"federation"`
	Signature  []byte `json:"signature"`
	Key        []byte `json:"key"`
}

// Open reads what was kept. What cannot be read, or does not verify by the pinned key, is as good as nothing: foreign domains are trusted
// again once a server has said so.
func Open(c Config) *Domains {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	d := &Domains{config: c, changed: make(chan struct{})}
	if c.File == "" {
		return d
	}
	if err := d.load(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.Logger.Error("what was kept of foreign trust domains is of no use; they are trusted again once a server has said so", "file", c.File, "reason", err.Error())
	}
	return d
}

func (d *Domains) load() error {
	data, err := strict.Read(d.config.File, maxFile)
	if err != nil {
		return err
	}
	return d.parse(data)
}

// parse takes a file over, strictly.
func (d *Domains) parse(data []byte) error {
	var c file
	if err := strict.Kept(data, maxFile, format, &c, &c.Format); err != nil {
		return err
	}
	s := trust.SignedFederation{Federation: c.Federation, Signature: c.Signature, Key: c.Key}
	w, err := d.read(s)
	if err != nil {
		return err
	}
	d.signed, d.word = s, w
	return nil
}

// read verifies what was said, and reads it.
func (d *Domains) read(s trust.SignedFederation) (*word, error) {
	if err := s.Verify(d.config.Anchor.Key()); err != nil {
		return nil, err
	}
	var m chanceryv1.Federation
	if err := proto.Unmarshal(s.Federation, &m); err != nil {
		return nil, fmt.Errorf("reading signed federation: %w", err)
	}
	own, err := trust.ParseDomain(m.GetTrustDomain())
	if err != nil {
		return nil, fmt.Errorf("reading signed federation: %w", err)
	}
	if d.config.Anchor.Bundle().Of(own) == nil {
		return nil, fmt.Errorf("reading signed federation: it is for agents of %s, which is none of the own trust domains", own)
	}
	w := &word{version: m.GetVersion()}
	if w.bundles, err = parse(&m); err != nil {
		return nil, fmt.Errorf("reading signed federation: %w", err)
	}
	m.Version, m.TrustDomain = 0, "" // a migration gives it another name
	if w.content, err = (proto.MarshalOptions{Deterministic: true}).Marshal(&m); err != nil {
		return nil, fmt.Errorf("reading signed federation: %w", err)
	}
	return w, nil
}

func parse(m *chanceryv1.Federation) ([]*trust.Bundle, error) {
	if n := len(m.GetBundles()); n > maxDomains {
		return nil, fmt.Errorf("%d trust domains; at most %d are allowed", n, maxDomains)
	}
	var out []*trust.Bundle
	for i, b := range m.GetBundles() {
		td, err := trust.ParseDomain(b.GetTrustDomain())
		if err != nil {
			return nil, err
		}
		if i > 0 && td.String() <= out[i-1].Domain().String() {
			return nil, fmt.Errorf("%s comes after %s; expected the order of their names, each once", td, out[i-1].Domain())
		}
		roots, err := anchor.Certificates(b.GetRoots())
		if len(b.GetRoots()) == 0 {
			err = nil // nothing of the domain is trusted
		}
		if err != nil {
			return nil, fmt.Errorf("roots of %s: %w", td, err)
		}
		next, err := trust.NewBundle(td, b.GetSequence(), roots)
		if err != nil {
			return nil, err
		}
		out = append(out, next)
	}
	return out, nil
}

// Take takes over what a server says. A *trust.Older is the error of a server that knows less than one before.
func (d *Domains) Take(m *chanceryv1.SignedFederation) error {
	s := trust.SignedFederation{Federation: m.GetFederation(), Signature: m.GetSignature(), Key: m.GetKey()}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.word != nil && bytes.Equal(s.Federation, d.signed.Federation) && bytes.Equal(s.Key, d.signed.Key) && bytes.Equal(s.Signature, d.signed.Signature) {
		d.save()
		return nil
	}
	next, err := d.read(s)
	if err != nil {
		return err
	}
	same := d.word != nil && bytes.Equal(next.content, d.word.content)
	switch was := d.word; {
	case was == nil || next.version > was.version:
	case same: // of a server that has looked later, or has not been started since
		d.save()
		return nil
	case next.version < was.version:
		return trust.NewOlder(fmt.Sprintf("what is said of foreign trust domains is of version %d of the document; version %d was there before", next.version, was.version))
	default:
		return fmt.Errorf("there are two words on foreign trust domains of version %d, signed by one key", next.version)
	}
	if d.signed, d.word, d.dirty = s, next, true; !same {
		close(d.changed)
		d.changed = make(chan struct{})
	}
	d.save()
	return nil
}

// save writes the file if it lacks something. What cannot be written counts in memory, and is tried again with the next update that
// comes. mu is held.
func (d *Domains) save() {
	if !d.dirty {
		return
	}
	if d.config.File == "" {
		d.dirty = false
		return
	}
	data, err := json.Marshal(&file{Format: format, Federation: d.signed.Federation, Signature: d.signed.Signature, Key: d.signed.Key})
	if err == nil {
		err = durable.Replace(d.config.File, append(data, '\n'), 0o600)
	}
	if err != nil {
		d.config.Logger.Error("what is known of foreign trust domains cannot be kept: after a restart what was before would count", "file", d.config.File, "reason", err.Error())
		return
	}
	d.dirty = false
}

// Bundles returns the bundles of all foreign domains, in the order of their names, and a channel that is closed when there are others.
func (d *Domains) Bundles() ([]*trust.Bundle, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.word == nil {
		return nil, d.changed
	}
	return slices.Clip(d.word.bundles), d.changed
}
