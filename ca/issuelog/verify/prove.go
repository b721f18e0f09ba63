package verify

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/v2"
	"errors"
	"fmt"
	"sort"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/tiles"
)

// Found is an entry with its place in the log.
type Found struct {
	Index int64
	Raw   []byte // the leaf
	Entry *issuelog.Entry
}

// Query says which entries Search looks for; what is empty does not matter.
type Query struct {
	Serial   string // hex
	SPIFFEID string
	Since    time.Time
	From     int64                 // index of the first entry that matters
	Keep     func(raw []byte) bool // whether an entry may matter, before it is decoded; several calls at a time
}

// Search gives each entry of the tree that a query matches, in order. It reads all bundles from q.From on, and does not
// verify them: see Log and Prove.
func (r *Reader) Search(ctx context.Context, q Query, each func(Found) error) error {
	var needle []byte
	switch {
	case q.Serial != "":
		needle = []byte(`"serial":"` + q.Serial + `"`)
	case q.SPIFFEID != "":
		needle = []byte(`"spiffe_id":"` + q.SPIFFEID + `"`)
	}
	type result struct {
		found []Found
		err   error
	}
	first := q.From / tiles.Width
	search := func(n int64) result {
		found, err := r.searchBundle(first+n, needle, &q)
		return result{found, err}
	}
	return inOrder(max(0, r.bundles()-first), search, func(_ int64, res result) error {
		for _, f := range res.found {
			if err := each(f); err != nil {
				return err
			}
		}
		return errors.Join(res.err, ctx.Err())
	})
}

func (r *Reader) searchBundle(n int64, needle []byte, q *Query) (found []Found, err error) {
	name := tiles.BundlePath(n, r.width(n))
	data, err := r.read(name)
	if err != nil {
		return nil, fmt.Errorf("%s/%s: %w", r.Dir, name, err)
	}
	if !bytes.Contains(data, needle) {
		return nil, nil
	}
	for i := range r.width(n) {
		index := n*tiles.Width + int64(i)
		raw, rest, ok := tiles.CutEntry(data)
		if !ok {
			return found, fmt.Errorf("%s/%s: entry %d goes beyond its end", r.Dir, name, index)
		}
		data = rest
		if index < q.From || !bytes.Contains(raw, needle) || q.Keep != nil && !q.Keep(raw) {
			continue
		}
		e, err := issuelog.DecodeEntry(raw)
		if err != nil {
			return found, fmt.Errorf("%s/%s: entry %d: %w", r.Dir, name, index, err)
		}
		if !e.Time.Before(q.Since) {
			found = append(found, Found{index, raw, e})
		}
	}
	return found, nil
}

// IndexOf returns an index before which all entries are older than t, close to the first one that is not. Entries stand
// nearly in the order of their times.
func (r *Reader) IndexOf(t time.Time) (int64, error) {
	var failed error
	n := sort.Search(int(r.bundles()), func(n int) bool {
		if failed != nil {
			return true
		}
		name := tiles.BundlePath(int64(n), r.width(int64(n)))
		data, err := r.read(name)
		if err != nil {
			failed = fmt.Errorf("%s/%s: %w", r.Dir, name, err)
			return true
		}
		raw, _, ok := tiles.CutEntry(data)
		e, err := issuelog.DecodeEntry(raw)
		if !ok || err != nil {
			failed = fmt.Errorf("%s/%s: its first entry does not decode: %w", r.Dir, name, err)
			return true
		}
		return !e.Time.Before(t)
	})
	return max(0, int64(n)-1) * tiles.Width, failed
}

// Proof shows that the entries of one serial are in the log, to whoever has the log's public key.
type Proof struct {
	Checkpoint string       `json:"checkpoint"`
	Entries    []ProofEntry `json:"entries"`
}

// ProofEntry is one leaf with the hashes that lead to the root.
type ProofEntry struct {
	Index int64       `json:"index"`
	Entry string      `json:"entry"`
	Proof []tlog.Hash `json:"proof"`
}

// maxProof bounds a file that is read as a proof.
const maxProof = 1 << 20

// ErrNotLogged says that a log has no entry of a serial.
var ErrNotLogged = errors.New("not in the log")

// Prove makes the proof for a serial: its intent, and its certificate if the log has it. Each hash that it uses is
// verified against the checkpoint.
func (r *Reader) Prove(ctx context.Context, serial string) (*Proof, error) {
	p := &Proof{Checkpoint: r.Checkpoint.Note}
	err := r.Search(ctx, Query{Serial: serial}, func(f Found) error {
		if f.Entry.Serial != serial {
			return nil
		}
		hashes, err := tlog.ProveRecord(r.Checkpoint.Size, f.Index, r.hashes())
		if err != nil {
			return fmt.Errorf("proving entry %d: %w", f.Index, err)
		}
		p.Entries = append(p.Entries, ProofEntry{f.Index, string(f.Raw), hashes})
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(p.Entries) == 0 {
		return nil, fmt.Errorf("serial %s: %w %s of size %d", serial, ErrNotLogged, r.Checkpoint.Origin, r.Checkpoint.Size)
	}
	_, _, err = p.Check(r.PublicKey, nil)
	return p, err
}

// DecodeProof reads a proof, strictly.
func DecodeProof(data []byte) (*Proof, error) {
	if len(data) > maxProof {
		return nil, fmt.Errorf("a proof of %d bytes; at most %d are read", len(data), maxProof)
	}
	p := new(Proof)
	if err := json.Unmarshal(data, p, json.RejectUnknownMembers(true)); err != nil {
		return nil, fmt.Errorf("it is no proof, as `chancery log prove -o json` prints it: %w", err)
	}
	return p, nil
}

// Check verifies a proof with the log's public key, without the log: the signature, and that each entry is in the tree. A
// certificate in DER, if given, must be the one that the entries are about. It returns what was proved.
func (p *Proof) Check(publicKey string, certificate []byte) (*issuelog.Checkpoint, []Found, error) {
	c, err := issuelog.ParseCheckpoint([]byte(p.Checkpoint), publicKey)
	if err != nil {
		return nil, nil, err
	}
	if len(p.Entries) == 0 {
		return nil, nil, errors.New("the proof has no entries")
	}
	var all []Found
	var serial, tbs string
	for _, pe := range p.Entries {
		if pe.Index < 0 || pe.Index >= c.Size {
			return nil, nil, fmt.Errorf("entry %d is not among the %d of the checkpoint", pe.Index, c.Size)
		}
		raw := []byte(pe.Entry)
		if err := tlog.CheckRecord(pe.Proof, c.Size, c.Root, pe.Index, tlog.RecordHash(raw)); err != nil {
			return nil, nil, fmt.Errorf("entry %d is not in the tree that the log signed: %w", pe.Index, err)
		}
		e, err := issuelog.DecodeEntry(raw)
		if err != nil {
			return nil, nil, fmt.Errorf("entry %d: %w", pe.Index, err)
		}
		if f := factOf(raw); f.problem != "" {
			return nil, nil, fmt.Errorf("entry %d: %s", pe.Index, f.problem)
		} else if e.Event == audit.Intent {
			tbs = e.TBSHash
		}
		if serial != "" && e.Serial != serial {
			return nil, nil, fmt.Errorf("the proof is about serials %s and %s; it should be about one", serial, e.Serial)
		}
		serial = e.Serial
		all = append(all, Found{pe.Index, raw, e})
	}
	if tbs == "" {
		return nil, nil, fmt.Errorf("the proof lacks the intent of serial %s", serial)
	}
	for _, f := range all {
		if err := matches(f.Entry.Certificate, tbs); err != nil {
			return nil, nil, fmt.Errorf("entry %d: %w", f.Index, err)
		}
	}
	return c, all, matches(certificate, tbs)
}

// matches reports whether a certificate, if there is one, has to-be-signed bytes of the given hash.
func matches(der []byte, want string) error {
	if der == nil {
		return nil
	}
	tbs, serial, err := splitCertificate(der)
	if err != nil {
		return err
	}
	if sum := sha256.Sum256(tbs); hex.EncodeToString(sum[:]) != want {
		return fmt.Errorf("certificate %x is not the one that the intent announced", serial)
	}
	return nil
}
