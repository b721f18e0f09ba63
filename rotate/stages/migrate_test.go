package stages

import (
	"fmt"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/foreign"
	"github.com/chancery-project/chancery/trust"
)

// TestD24MigrationsThatAreRefused: to a domain that is federated, or another authority's, or the one that there is; and for a key that others know.
func TestD24MigrationsThatAreRefused(t *testing.T) {
	s := (&world{}).first()
	for _, c := range []struct {
		name   string
		change func(d *document.Document, q *Request)
		want   string
	}{
		{"as it is", func(*document.Document, *Request) {}, ""},
		{"to where it is", func(_ *document.Document, q *Request) { q.Migrate.Domain = td }, "present one already"},
		{"to a federated one", func(d *document.Document, _ *Request) { d.Foreign = map[string]*foreign.Domain{"new": {}} }, "federated"},
		{"to another authority's", func(d *document.Document, _ *Request) { d.Domains["other"] = &document.DomainState{Domain: "new"} }, "another authority"},
		{"to nowhere", func(_ *document.Document, q *Request) { q.Migrate.Domain = trust.Domain{} }, "none is named"},
		{"of an issuer", func(_ *document.Document, q *Request) { q.Kind = document.KindIssuer }, "replaces the root"},
		{"of a compromised root", func(_ *document.Document, q *Request) { q.Reason = document.ReasonCompromised }, "rotation of its own"},
		{"of too many", func(_ *document.Document, q *Request) { q.Migrate.Share = 101 }, "share of 101"},
		{"of too few", func(_ *document.Document, q *Request) { q.Migrate.Share = -1 }, "share of -1"},
		{"of no namespace", func(_ *document.Document, q *Request) { q.Migrate.Namespaces = []string{"a/b"} }, "namespace"},
		{"of too many namespaces", func(_ *document.Document, q *Request) {
			for i := range 300 {
				q.Migrate.Namespaces = append(q.Migrate.Namespaces, fmt.Sprintf("ns-%d", i))
			}
		}, "300 namespaces"},
		{"with a root that lies elsewhere", func(d *document.Document, _ *Request) {
			for i := range domain(d).Authorities {
				domain(d).Authorities[i].KeyRef = ""
			}
		}, "lies elsewhere"},
	} {
		d, q := s.doc.Clone(), Request{Kind: document.KindRoot, Reason: document.ReasonAsked, Actor: "admin", ID: "1", Migrate: &Target{Domain: newTD, Share: All}}
		c.change(d, &q)
		err := Start(d, td, q, epoch)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", c.name, err, c.want)
		}
		if refused := domain(d).Rotation == nil; refused != (err != nil) {
			t.Errorf("%s: %v, and it was begun: %t", c.name, err, !refused)
		}
	}
}

// TestAMigrationLeadsBack: the line has the name of a former domain again, with another root; what it was called meanwhile is a former one.
func TestAMigrationLeadsBack(t *testing.T) {
	w := &world{start: []string{"migrate 100"}, consumer: onlyE}
	s := w.first()
	for range 20 {
		s = w.calm(s)
	}
	d := s.dom()
	if s.phase() != OutcomeDone || d.Present(td) != newTD || len(d.Former) != 1 || d.Past[0].Migration.To != "new" {
		t.Fatalf("%s; %+v", s.phase(), d)
	}
	for _, a := range d.Authorities {
		if a.DomainOf(d.Present(td)) != newTD {
			t.Errorf("%s %s is of %s", a.Kind, a.ID, a.DomainOf(d.Present(td)))
		}
	}
	q := Request{Kind: document.KindRoot, Reason: document.ReasonAsked, Actor: "admin", ID: "2", Migrate: &Target{Domain: td, Share: All}}
	back := s.doc.Clone()
	if err := Start(back, newTD, q, at(s.now)); err != nil { // the line is known by each of its names
		t.Fatal(err)
	}
	if m := back.Rotating(td).Migration; m.From != "new" || m.To != "td" || Told(back.Rotating(td)) != "migration 2 from new to td, issuing to all identities" {
		t.Errorf("%+v: %s", m, Told(back.Rotating(td)))
	}
	state := back.Of(td)
	state.Become(td, td)
	if state.Present(td) != td || fmt.Sprint(state.Former) != "[new]" {
		t.Errorf("%s, formerly %v", state.Present(td), state.Former)
	}
}

// TestPresents: who holds a certificate of the domain that is left is named while both are issued, and while they are replaced.
func TestPresents(t *testing.T) {
	w := &world{start: []string{"migrate e"}, consumer: eAndC, commands: []string{"issue 100"}, life: 2}
	s := w.first()
	var seen []string
	for _, label := range strings.Split("start migrate e;drive;b follows;4 minutes;b writes;drive;b follows;c renews b;b writes;issue 100;drive;b follows;drive;b follows", ";") {
		next, err := w.tellOne(s, label)
		if err != nil {
			t.Fatalf("%s: %v", label, err)
		}
		s = next
		if names, n := Presents(s.doc, td, w.evidence(&s), at(s.now)); n > 0 {
			seen = append(seen, fmt.Sprintf("%s: %d %s", s.phase(), n, names))
		}
	}
	const c = "1 [consumer 0000000000000005 (counts until 2026-12-01T00:06:00Z)]"
	if got := strings.Join(seen, "; "); got != "issue: "+c+"; issue: "+c+"; reissue: "+c {
		t.Error(got)
	}
}

// TestShareOfAllHasNoLess says that all have the new domain, not between which numbers a share may be.
func TestShareOfAllHasNoLess(t *testing.T) {
	m := &document.Migration{From: "old.example", To: "new.example", Share: All}
	if _, err := grow(m, 10, nil); err == nil || !strings.Contains(err.Error(), "all identities are given new.example already") {
		t.Error(err)
	}
	if _, err := grow(m, All, nil); err != nil {
		t.Error(err)
	}
}
