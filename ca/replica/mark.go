package replica

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/strict"
	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// This file is about marks (decision D9): what shows that the store was rolled back. One lies in a file of the replica's own; the
// other the agents carry from server to server.

// Mark is the highest version that was seen.
type Mark struct {
	Version uint64
	Hash    string // of that version's stored form, in hex; empty with version 0
}

// markFile is how a mark lies in a file.
type markFile struct {
	Format      int    `json:"format"`
	TrustDomain string `json:"trustDomain"`
	Version     uint64 `json:"version"`
	Hash        string `json:"hash,omitempty"`
	MAC         []byte `json:"mac"`
}

const maxMarkFile = 64 << 10

func (m *markFile) text() []byte {
	return fmt.Appendf(nil, "chancery mark file v1\n%s\n%d\n%s\n", m.TrustDomain, m.Version, m.Hash)
}

// ReadMark reads a mark. An error is fs.ErrNotExist if there is none.
func ReadMark(path string, td trust.Domain, s *keys.Sealer) (Mark, error) {
	data, err := strict.Read(path, maxMarkFile)
	if err != nil {
		return Mark{}, fmt.Errorf("reading mark: %w", err)
	}
	var m markFile
	switch err := strict.JSON(data, &m); {
	case len(data) > maxMarkFile:
		return Mark{}, fmt.Errorf("reading mark %s: it has more than %d bytes", path, maxMarkFile)
	case err != nil:
		return Mark{}, fmt.Errorf("reading mark %s: it is damaged: %w", path, err)
	case m.Format != 1:
		return Mark{}, fmt.Errorf("reading mark %s: it has format %d; this binary knows 1: use a newer one", path, m.Format)
	case m.TrustDomain != td.String():
		return Mark{}, fmt.Errorf("reading mark %s: it is of trust domain %.80q, not of %s", path, m.TrustDomain, td)
	case !s.CheckMAC(m.text(), m.MAC):
		return Mark{}, fmt.Errorf("reading mark %s: it was not written with this sealing key, or was changed since", path)
	}
	return Mark{m.Version, m.Hash}, nil
}

// CheckUnseen refuses to make the first document where one was seen: a store that has none lost it, and another authority in its place
// would be an older document like any other, with a root that nobody trusts. The mark of an `authority init` that was cut off tells
// of none; one that this sealing key did not make, or that comes without one, may tell of any.
func CheckUnseen(path string, td trust.Domain, sealingKey string) error {
	if _, err := os.Lstat(path); err != nil { // if it is for anything but that there is none, writing it will say so
		return nil
	}
	s, err := keys.LoadSealer(sealingKey)
	var m Mark
	if err == nil {
		m, err = ReadMark(path, td, s)
	}
	if err == nil && m.Version == 0 {
		return nil
	}
	seen := fmt.Sprintf("version %d of an authority document was seen here, as %s says", m.Version, path)
	if err != nil {
		seen = fmt.Sprintf("an authority document was seen here, as there is a mark (%v)", err)
	}
	return fmt.Errorf("%s, and the store has none: it was lost, or the config names another place than before. `chancery state import` "+
		"restores an export; if a new authority is meant, with a root that nobody trusts yet, move %s away", seen, path)
}

// WriteMark writes a mark, whole or not at all.
func WriteMark(path string, td trust.Domain, s *keys.Sealer, m Mark) error {
	f := markFile{Format: 1, TrustDomain: td.String(), Version: m.Version, Hash: m.Hash}
	f.MAC = s.MAC(f.text())
	data, err := json.Marshal(f)
	if err == nil {
		err = durable.Replace(path, append(data, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("writing mark %s: %w", path, err)
	}
	return nil
}

// checkMark holds a document that was loaded at start to the mark.
func (h *Hold) checkMark(d *document.Document, data []byte) error {
	c := h.config
	if c.Mark == "" {
		return nil
	}
	m, err := ReadMark(c.Mark, c.Domain, c.Sealer)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return h.mayLackMark(d)
	case err != nil:
		return fmt.Errorf("%w; it says what this replica has seen of the authority document. Put it back; if it is lost, "+
			"take it away and `chancery replica forget %s`, so that this replica is registered anew", err, c.Name)
	}
	const has = "the store has %s, and this replica has seen version %d, as %s says"
	switch {
	case d.Version < m.Version:
		return rolledBack(has, fmt.Sprintf("version %d", d.Version), m.Version, c.Mark)
	case d.Version == m.Version && document.Hash(data) != m.Hash:
		return rolledBack(has, fmt.Sprintf("another version %d", d.Version), m.Version, c.Mark)
	case m.Version > 0 && d.Version > m.Version && !d.Follows(m.Version, m.Hash):
		return rolledBack(has, fmt.Sprintf("a version %d that does not follow it", d.Version), m.Version, c.Mark)
	}
	h.marked, h.first = m.Version, m.Version == 0
	return nil
}

// mayLackMark returns an error if there should be a mark: once the document lists a replica, it has seen that document.
func (h *Hold) mayLackMark(d *document.Document) error {
	c := h.config
	own := d.Own(c.Name, c.Issuance.Key)
	switch {
	case own == nil:
		h.first = true
		return nil
	case own.DeclaredDead != nil:
		return nil
	case own.Replica == "":
		c.Logger.Info("from now on the highest version of the authority document that was seen is noted, so that an older one is refused", "mark", c.Mark, "version", d.Version)
		return nil
	}
	return fmt.Errorf("the mark %s is missing, which says what this replica, %s, has seen of the authority document: an older document would not be noticed. "+
		"Put it back; if it is lost, `chancery replica forget %s`, so that this replica is registered anew", c.Mark, own.Replica, own.Replica)
}

// putMark writes the mark for the document in use. Caller holds the lock or is alone.
func (h *Hold) putMark() error {
	d := h.snapshot.Load()
	if h.config.Mark == "" || h.marked == d.Version {
		return nil
	}
	if err := WriteMark(h.config.Mark, h.config.Domain, h.config.Sealer, Mark{d.Version, document.Hash(h.data)}); err != nil {
		return err
	}
	h.marked = d.Version
	return nil
}

// told is what agents know of documents that this replica has not.
type told struct {
	version uint64
	tainted uint64    // version that tainted an authority
	since   time.Time // when we last caught up with what we were told
}

// behindFor is how long a replica may lack a document that an agent knows of: it is loaded at once, where the store is sound.
const behindFor = 30 * time.Second

// markText is what a mark's code is over. Servers that know of no taint write and read the first form, so that one without says the same
// to all.
func (h *Hold) markText(version, tainted uint64) []byte {
	if tainted == 0 {
		return fmt.Appendf(nil, "chancery document mark v1\n%s\n%d\n", h.config.Domain, version)
	}
	return fmt.Appendf(nil, "chancery document mark v2\n%s\n%d\n%d\n", h.config.Domain, version, tainted)
}

// Mark returns what agents are told of the document in use, and bring back: to another server, maybe. Tainted is the version that last
// tainted an authority, 0 if none did.
func (h *Hold) Mark() (version, tainted uint64, mac []byte) {
	d := h.Document()
	m := h.stamp.Load()
	if m == nil || m.of != d { // each message to an agent takes it: it is made once for each document
		version, tainted = d.Version, d.TaintedAt(h.config.Domain)
		m = &stamp{d, version, tainted, h.config.Sealer.MAC(h.markText(version, tainted))}
		h.stamp.Store(m)
	}
	return m.version, m.tainted, slices.Clone(m.mac)
}

// stamp is the mark of a document, which never changes.
type stamp struct {
	of               *document.Document
	version, tainted uint64
	mac              []byte
}

// CheckMark takes a mark that an agent brings. If it tells of a newer document, that is looked for at once; see Err. If it tells of a
// taint that is newer, MaySign is an error from here on. An error says that the mark is not one of ours.
func (h *Hold) CheckMark(version, tainted uint64, mac []byte) error {
	if !h.config.Sealer.CheckMAC(h.markText(version, tainted), mac) {
		return fmt.Errorf("the mark of document version %d was not made with this sealing key", version)
	}
	for {
		have, old, was := h.Document().Version, h.told.Load(), told{}
		if old != nil {
			was = *old
		}
		if version <= max(have, was.version) && tainted <= max(have, was.tainted) {
			return nil
		}
		now := &told{max(version, was.version), max(tainted, was.tainted), time.Now()}
		if was.version > have {
			now.since = was.since
		}
		if !h.told.CompareAndSwap(old, now) {
			continue
		}
		if tainted > max(have, was.tainted) {
			h.config.Logger.Error("an agent knows that an authority was tainted; nothing is signed until this server has the document that says so", "version", have, "tainted", tainted)
		}
		h.Wake()
		return nil
	}
}

// ErrTainted: another replica has tainted an authority, and this one has no document yet that says which.
var ErrTainted = errors.New("an authority was tainted, and this server does not know yet which one")

// MaySign returns an error if this replica was told of a taint that its document does not have: what it would sign with may be just
// that (decision D4); also while it has slept and not asked the store since. It is over once it has that document, and not before.
func (h *Hold) MaySign() error {
	if err := h.awake(time.Now()); err != nil {
		return err
	}
	t := h.told.Load()
	if t == nil {
		return nil
	}
	if have := h.Document().Version; t.tainted > have {
		return fmt.Errorf("%w: version %d of the authority document says so, as an agent knows, and this server has version %d; it signs nothing until it has that from the store",
			ErrTainted, t.tainted, have)
	}
	return nil
}

// caughtUp gives a replica that gets ahead more time to load the rest.
func (h *Hold) caughtUp() {
	if was := h.told.Load(); was != nil && was.version > h.Document().Version {
		h.told.CompareAndSwap(was, &told{was.version, was.tainted, time.Now()})
	}
}

// behind returns an error if an agent knows of a document that we could not get.
func (h *Hold) behind(now time.Time) error {
	t, have := h.told.Load(), h.Document().Version
	if t == nil || t.version <= have || now.Sub(t.since) < behindFor {
		return nil
	}
	_, why := h.Fresh()
	if why != nil {
		return fmt.Errorf("an agent has seen version %d of the authority document, and this replica has version %d: %w", t.version, have, why)
	}
	return rolledBack("an agent has seen version %d, and the store has version %d", t.version, have)
}
