package revoking

import (
	"bytes"
	"maps"
	"slices"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document/foreign"
	"github.com/chancery-project/chancery/csr/answers"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// federation is what agents are told of the foreign trust domains in the document. Its fields belong to the lock of what agents were told.
type federation struct {
	signed  answers.Federation
	doc     *authority.Document // that was looked at last
	from    map[string]*foreign.Domain
	bundles []*trust.Bundle // of these
	last    *chanceryv1.SignedFederation
	trouble string // that was said last
}

// federation returns what there is to say of foreign trust domains; nil as long as nothing signs it. What cannot be said anew stays as it
// was said. Caller holds told's lock.
func (d Desk) federation() *chanceryv1.SignedFederation {
	f := &d.told.federation
	m, err := d.sayForeign(f)
	if err == nil {
		f.last, f.trouble = m, ""
		return m
	}
	if f.trouble != err.Error() {
		f.trouble = err.Error()
		d.config.Logger.Error("agents are not told of foreign trust domains as they are now; what they were told stands", "reason", f.trouble)
	}
	return f.last
}

func (d Desk) sayForeign(f *federation) (*chanceryv1.SignedFederation, error) {
	by, err := d.source.Signer()
	if err != nil {
		return f.last, nil // the source says why
	}
	own, err := d.source.Bundle()
	if err != nil {
		return f.last, nil
	}
	doc := d.config.Authority.Document()
	if f.doc != doc {
		if f.doc == nil || !maps.EqualFunc(doc.Foreign, f.from, func(a, b *foreign.Domain) bool { return bytes.Equal(a.Bundle, b.Bundle) }) {
			if f.bundles, err = foreignOf(doc); err != nil {
				return nil, err
			}
			f.from = doc.Foreign
		}
		f.doc = doc
	}
	told := slices.DeleteFunc(slices.Clone(f.bundles), func(b *trust.Bundle) bool { return own.Of(b.Domain()) != nil }) // D24
	return f.signed.Signed(own.Domain(), doc.Version, told, by)
}

// foreignOf reads the bundles of foreign trust domains.
func foreignOf(doc *authority.Document) ([]*trust.Bundle, error) {
	var out []*trust.Bundle
	for _, name := range slices.Sorted(maps.Keys(doc.Foreign)) {
		td, err := trust.ParseDomain(name)
		if err != nil {
			return nil, err
		}
		parsed, err := spiffebundle.Parse(td, doc.Foreign[name].Bundle)
		if err != nil {
			return nil, err
		}
		b, err := parsed.Trust()
		if err != nil {
			return nil, err
		}
		out = append(out, b)
	}
	return out, nil
}
