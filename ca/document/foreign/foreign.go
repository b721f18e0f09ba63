// Package foreign owns what the authority document holds of foreign trust domains: of each its bundle as it was last taken over, and the one
// before; and the changes that these go through, each as a function of what was there before.
//
// It refuses a bundle whose sequence goes back, and more than a document should carry. It knows of no network.
package foreign

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// Bounds of what a document holds: it is stored, and goes to agents, as a whole.
const (
	MaxDomains = 100
	MaxBundle  = 256 << 10 // of one domain, so that none takes the room of the others
	MaxBytes   = 1 << 20   // of all bundles, with those before them
)

// Domain is a foreign trust domain, by whose roots its own identities are verified and nobody else's. It is never changed, but replaced.
type Domain struct {
	Bundle   []byte    `json:"bundle"`             // SPIFFE bundle, as JSON, normalized
	Previous []byte    `json:"previous,omitempty"` // the one before it
	Since    time.Time `json:"since"`              // when it was taken over,
	Actor    string    `json:"actor"`              // and by whom: an admin, or the endpoint's URL
}

// Domains are all of a document, by name.
type Domains = map[string]*Domain

// Fetched reports whether the bundle came from an endpoint, and not from an admin.
func (d *Domain) Fetched() bool { return strings.HasPrefix(d.Actor, "https://") }

// Read returns the bundle of a trust domain; nil if there is none.
func Read(all Domains, td trust.Domain) (*spiffebundle.Bundle, error) {
	d := all[td.String()]
	if d == nil {
		return nil, nil
	}
	return spiffebundle.Parse(td, d.Bundle)
}

// ErrOlder: a bundle has a lower sequence than the one that there is.
var ErrOlder = errors.New("its sequence goes back")

// Verdict is what taking a bundle would do.
type Verdict struct {
	Change bool // there is none yet, or another one
	// Unordered says that the content differs though the sequence does not, against the standard: which one is newer cannot be told.
	Unordered bool
	Before    *spiffebundle.Bundle // nil for none
}

// Judge says what it would do to take a bundle after those that there are. One without a sequence counts as number 0.
//
// Where the sequence is the same and the content is not, the newer word of the endpoint counts: it is as authentic as the one before, and
// who controls the endpoint could as well count on. A sequence guards against old copies, such as in a cache, and that this is none cannot
// be told; to stay with the former would leave us behind for ever with a domain that does not count.
func Judge(all Domains, b *spiffebundle.Bundle) (Verdict, error) {
	before, err := Read(all, b.Domain)
	if err != nil {
		return Verdict{}, fmt.Errorf("the bundle that is stored cannot be read, so whether another one is newer cannot be told; `chancery trust import --older` replaces it: %w", err)
	}
	if before == nil {
		return Verdict{Change: true}, nil
	}
	v := Verdict{Before: before, Change: !b.Same(before) || b.Sequence != before.Sequence || b.HasSequence != before.HasSequence || b.RefreshHint != before.RefreshHint}
	if b.Sequence < before.Sequence {
		return v, fmt.Errorf("bundle of %s: %w, from %d to %s; it is an old copy, or that trust domain was set up anew or restored: in that case, `chancery trust import --older` takes it",
			b.Domain, ErrOlder, before.Sequence, number(b))
	}
	v.Unordered = b.Sequence == before.Sequence && !b.Same(before)
	return v, nil
}

func number(b *spiffebundle.Bundle) string {
	if !b.HasSequence {
		return "none"
	}
	return fmt.Sprint(b.Sequence)
}

// Take puts a bundle in the place of the one before, as an actor wants it at a time. It is ErrOlder for one whose sequence goes back, unless
// older allows that, on an admin's word; which also replaces one that cannot be read. It reports whether that changes anything, and returns what there is then; all is not changed.
func Take(all Domains, b *spiffebundle.Bundle, actor string, older bool, now time.Time) (next Domains, changed bool, err error) {
	v, err := Judge(all, b)
	switch {
	case err != nil && !older:
		return all, false, err
	case v.Before == nil: // it is the first, or the one that is there cannot be read
	case !v.Change:
		return all, false, nil
	}
	name := b.Domain.String()
	data, err := b.Marshal()
	if err != nil {
		return all, false, err
	}
	one := &Domain{Bundle: data, Since: now.UTC().Truncate(time.Second), Actor: actor}
	if was := all[name]; was != nil && !bytes.Equal(was.Bundle, data) {
		one.Previous = was.Bundle
		if v.Before == nil || b.Same(v.Before) { // a new number or hint alone is not worth the last set of other roots
			one.Previous = was.Previous
		}
	}
	next = maps.Clone(all)
	if next == nil {
		next = Domains{}
	}
	next[name] = one
	if err := checkSize(next, name); err != nil {
		return all, false, err
	}
	return next, true, nil
}

// checkSize refuses a change of one domain that makes too much of all; rather than that, its bundle before goes.
func checkSize(all Domains, name string) error {
	if len(all) > MaxDomains {
		return fmt.Errorf("there would be %d foreign trust domains; at most %d are kept", len(all), MaxDomains)
	}
	one, total := all[name], 0
	for _, d := range all {
		total += len(d.Bundle) + len(d.Previous)
	}
	if n := len(one.Bundle); n > MaxBundle {
		return fmt.Errorf("bundle of %s has %d bytes; at most %d are kept of one trust domain", name, n, MaxBundle)
	}
	if total > MaxBytes {
		total -= len(one.Previous)
		one.Previous = nil
	}
	if total > MaxBytes {
		return fmt.Errorf("with the bundle of %s those of all foreign trust domains would have %d bytes; at most %d are kept", name, total, MaxBytes)
	}
	return nil
}

// Forget drops a trust domain. It reports whether there was one; all is not changed.
func Forget(all Domains, td trust.Domain) (next Domains, was bool) {
	if all[td.String()] == nil {
		return all, false
	}
	next = maps.Clone(all)
	delete(next, td.String())
	if len(next) == 0 {
		next = nil
	}
	return next, true
}
