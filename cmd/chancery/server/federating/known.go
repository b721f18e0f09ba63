package federating

import (
	"fmt"
	"slices"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/foreign"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// known is what one version of the document says of roots, read once.
type known struct {
	document *document.Document
	own      *trust.Bundle // with its kin; nil: it does not parse
	ownErr   error
	foreign  map[trust.Domain]*federated
}

type federated struct {
	stored *foreign.Domain
	bundle *spiffebundle.Bundle // nil: it does not parse,
	err    error                // and why
}

// known returns what the newest document says. Bundles that did not change since the one before are not read again.
func (d *Desk) known() *known {
	doc := d.config.Authority.Document()
	was := d.last.Load()
	if was != nil && was.document == doc {
		return was
	}
	k := &known{document: doc, foreign: map[trust.Domain]*federated{}}
	if k.own, k.ownErr = doc.Bundle(d.config.Domain); k.ownErr == nil && was != nil && was.own != nil &&
		was.own.Generation() == k.own.Generation() && was.own.SameRoots(k.own) {
		k.own = was.own
	}
	for name, stored := range doc.Foreign {
		td, err := trust.ParseDomain(name)
		if err != nil {
			d.config.Logger.Error("the authority document names a foreign trust domain that is none", "reason", err.Error())
			continue
		}
		if was != nil && was.foreign[td] != nil && slices.Equal(was.foreign[td].stored.Bundle, stored.Bundle) {
			k.foreign[td] = &federated{stored, was.foreign[td].bundle, was.foreign[td].err}
			continue
		}
		one := &federated{stored: stored}
		if one.bundle, one.err = spiffebundle.Parse(td, stored.Bundle); one.err != nil {
			d.config.Logger.Error("a stored bundle of a foreign trust domain cannot be read", "reason", one.err.Error())
		}
		k.foreign[td] = one
	}
	d.last.Store(k)
	return k
}

// bundle returns the own bundle, with its kin.
func (d *Desk) bundle() (*trust.Bundle, error) {
	k := d.known()
	return k.own, k.ownErr
}

// verifier returns the bundle by which the endpoint of a relationship is verified, of its endpoint's trust domain: our own, or one that is
// federated. The bootstrap file counts until there is any.
func (d *Desk) verifier(r *relation, of trust.Domain) (*trust.Bundle, error) {
	k := d.known()
	if b := k.own.Of(of); b != nil {
		return b, nil
	}
	switch f := k.foreign[of]; {
	case f != nil && f.err != nil:
		return nil, f.err
	case f != nil:
		return f.bundle.Trust()
	case r.bootstrap == "" || of != r.Domain:
		return nil, nil
	}
	data, err := readFile(r.bootstrap)
	if err != nil {
		return nil, fmt.Errorf("bootstrap: %w; put the bundle of %s there, or give it to `chancery trust import %s FILE`", err, r.Domain, r.Domain)
	}
	b, err := spiffebundle.Parse(r.Domain, data)
	if err != nil {
		return nil, fmt.Errorf("bootstrap %s: %w", r.bootstrap, err)
	}
	return b.Trust()
}

// refuseOurs refuses a trust domain that is no foreign one (decision D24): one of our own, now, before or at the other end of a migration, as
// a document has it; or an alias, by the config.
func (d *Desk) refuseOurs(doc *document.Document, td trust.Domain) error {
	switch key, ok := doc.Line(td); {
	case ok && td == doc.Present(key):
		return fmt.Errorf("trust domain %s is our own; only foreign ones are federated", td)
	case ok:
		return fmt.Errorf("trust domain %s is one of our own, of a migration, and its identities count as ours; only foreign ones are federated", td)
	case slices.Contains(d.config.Aliases, td):
		return fmt.Errorf("trust domain %s is in trustDomainAliases: its identities count as ours and it has no roots of its own; take it out there to federate with it (decision D24)", td)
	}
	return nil
}
