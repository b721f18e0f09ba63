// Package line owns what a migration says of the identities of a line of trust domains: who is given certificates of which domain.
//
// It refuses a plan that names nobody's namespace, or the same trust domain twice. It is pure: the same path has the same domain on every
// server, and one that has moved stays there while the share grows.
package line

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/chancery-project/chancery/trust"
)

// Bounds of what the document has of a line.
const (
	// MaxFormer bounds the trust domains that a line was before.
	MaxFormer = 16
	// MaxNamespaces bounds those that a migration lists.
	MaxNamespaces = 256
)

// Migration is what a rotation to another trust domain has beside. After a rollback From and To have changed places.
type Migration struct {
	From string `json:"from"`
	To   string `json:"to"`
	// Who gets certificates of To while both sign: identities of these namespaces, and Share of a hundred of all others, by a hash of their paths.
	Namespaces []string `json:"namespaces,omitempty"`
	Share      int      `json:"share"`
}

// Takes reports whether an identity, of whichever trust domain, gets certificates of To while both sign.
func (m *Migration) Takes(id trust.ID) bool {
	if namespace, _, ok := id.Workload(); ok && slices.Contains(m.Namespaces, namespace) {
		return true
	}
	switch {
	case m.Share <= 0:
		return false
	case m.Share >= 100:
		return true
	}
	sum := sha256.Sum256([]byte(id.Path()))
	return binary.BigEndian.Uint64(sum[:])%100 < uint64(m.Share)
}

// Check says what is wrong with a migration.
func (m *Migration) Check() error {
	from, err := trust.ParseDomain(m.From)
	if err != nil {
		return fmt.Errorf("the migration's trust domain from: %w", err)
	}
	to, err := trust.ParseDomain(m.To)
	if err != nil {
		return fmt.Errorf("the migration's trust domain to: %w", err)
	}
	switch {
	case from == to:
		return fmt.Errorf("the migration leads from trust domain %s to itself", from)
	case m.Share < 0 || m.Share > 100:
		return fmt.Errorf("the migration's share is %d; it should be 0 to 100", m.Share)
	case len(m.Namespaces) > MaxNamespaces:
		return fmt.Errorf("the migration lists %d namespaces; at most %d are read", len(m.Namespaces), MaxNamespaces)
	}
	for i, ns := range m.Namespaces {
		if _, err := trust.WorkloadID(to, ns, "default"); err != nil {
			return fmt.Errorf("the migration's namespace %.80q: %w", ns, err)
		}
		if slices.Contains(m.Namespaces[:i], ns) {
			return fmt.Errorf("the migration lists namespace %s twice", ns)
		}
	}
	return nil
}

// Clone returns a copy that shares nothing which changes.
func (m *Migration) Clone() *Migration {
	if m == nil {
		return nil
	}
	n := *m
	n.Namespaces = slices.Clone(m.Namespaces)
	return &n
}

// Parts are what a document says of a line.
type Parts struct {
	Present     string // empty: the line's first
	Former      []string
	Migration   *Migration   // under way; nil: none
	Past        []*Migration // nil: not of a migration
	Authorities []string     // the trust domain of each; empty: the present one
}

// Check says what is wrong with a line.
func (p *Parts) Check() error {
	if len(p.Former) > MaxFormer {
		return fmt.Errorf("it was %d trust domains before; at most %d are read", len(p.Former), MaxFormer)
	}
	known := slices.Clone(p.Former)
	if p.Present != "" {
		known = append(known, p.Present)
	}
	for i, name := range known {
		if _, err := trust.ParseDomain(name); err != nil {
			return err
		}
		if slices.Contains(known[:i], name) {
			return fmt.Errorf("%s occurs twice among what it is and was", name)
		}
	}
	for _, m := range append([]*Migration{p.Migration}, p.Past...) {
		if m == nil {
			continue
		}
		if err := m.Check(); err != nil {
			return err
		}
	}
	if p.Migration != nil {
		known = append(known, p.Migration.From, p.Migration.To)
	}
	for _, name := range p.Authorities {
		if name != "" && !slices.Contains(known, name) {
			return fmt.Errorf("an authority is of trust domain %.80q, which is none of this line's (%s)", name, strings.Join(known, ", "))
		}
	}
	return nil
}
