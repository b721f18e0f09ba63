package client_test

import (
	"crypto/ed25519"
	"crypto/x509"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/csr/client/foreign"
	"github.com/chancery-project/chancery/csr/client/naming"
	"github.com/chancery-project/chancery/trust"
)

var nextDomain = must(trust.ParseDomain("next.test"))

// migrated is a bundle of the next domain, with what is left of the old one.
func migrated(generation uint64, next *x509.Certificate, old ...*x509.Certificate) *chanceryv1.Bundle {
	kin := &chanceryv1.DomainRoots{TrustDomain: td.String()}
	for _, r := range old {
		kin.Roots = append(kin.Roots, r.Raw)
	}
	return &chanceryv1.Bundle{TrustDomain: nextDomain.String(), Generation: generation, Roots: [][]byte{next.Raw}, Kin: []*chanceryv1.DomainRoots{kin}}
}

// lineAgent has pinned a key of the first world.
func lineAgent(t *testing.T, w *world, key ed25519.PrivateKey, s *signing) client.Config {
	c := w.config()
	c.Servers = []string{s.addr}
	c.Anchor = must(anchor.Open(anchor.Config{File: pinned(t, w, key), Domain: td}))
	return c
}

// TestD15AServerOfTheNextDomain: a server shows a certificate of any of the authority's trust domains, under a root of that domain; an agent
// that slept through a migration finds out by the word of the pinned key alone.
func TestD15AServerOfTheNextDomain(t *testing.T) {
	before, after := newWorld(t), newWorld(t)
	key := bundleKey()
	own := before.own.Load()
	server := func(domain trust.Domain, by *world, b *chanceryv1.Bundle) *signing {
		by.own.Store(by.impostor(trust.SystemID(domain, "server")))
		s := after.newSigning(key, 0)
		s.bundle = b
		after.own.Store(by.own.Load())
		return s
	}
	for name, c := range map[string]struct {
		domain trust.Domain
		by     *world
		bundle *chanceryv1.Bundle
		want   string // empty: it is taken
	}{
		"over":                      {nextDomain, after, migrated(3, after.made.Root), ""},
		"under way":                 {nextDomain, after, migrated(3, after.made.Root, before.made.Root), ""},
		"the old one, under way":    {td, before, migrated(3, after.made.Root, before.made.Root), ""},
		"the old one, over":         {td, before, migrated(3, after.made.Root), "chancery authority show -o pem"},
		"by the other's root":       {nextDomain, before, migrated(3, after.made.Root, before.made.Root), "chancery authority show -o pem"},
		"by the other's root, too":  {td, after, migrated(3, after.made.Root, before.made.Root), "chancery authority show -o pem"},
		"of no domain of the line":  {must(trust.ParseDomain("other.test")), after, migrated(3, after.made.Root), "chancery authority show -o pem"},
		"older than what was known": {nextDomain, after, migrated(0, after.made.Root), "chancery authority show -o pem"},
	} {
		t.Run(name, func(t *testing.T) {
			before.own.Store(own)
			config := lineAgent(t, before, key, &signing{})
			s := server(c.domain, c.by, c.bundle)
			config.Servers = []string{s.addr}
			if name == "the old one, over" { // it knows by now
				must(config.Anchor.Offer(s.signed()))
			}
			if c.want != "" {
				if _, err := issue(t, client.New(config)); err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%v; want %q", err, c.want)
				}
				if tokens, asked := s.shown(); tokens != 0 || strings.Join(asked, "") != "" {
					t.Errorf("the server was shown %d tokens, and %q", tokens, asked)
				}
				return
			}
			a := before.startSync(config)
			st := s.next(t)
			st.request()
			if r := st.push(&chanceryv1.SyncUpdate{Version: 1, SignedBundle: s.signed()}); r.GetAcknowledged() != 1 || r.GetReads() != 1 {
				t.Errorf("the agent says %v", r)
			}
			if b, _ := a.last(); b.Domain() != nextDomain || b.Of(td) == nil || b.Generation() != 3 {
				t.Errorf("what counts is %v", b)
			}
		})
	}
}

// TestD15AFirstContactDuringAMigration: an agent that has pinned no key yet, and is told the one domain of the line by its config, takes a server of the
// other, if the configured roots vouch for it and its bundle says that both are of one authority. It shows nothing before.
func TestD15AFirstContactDuringAMigration(t *testing.T) {
	before, after, strange := newWorld(t), newWorld(t), newWorld(t)
	key := bundleKey()
	alone := migrated(3, after.made.Root)
	alone.Kin = nil
	for name, c := range map[string]struct {
		by     *world
		bundle *chanceryv1.Bundle
		want   string // empty: it is taken
	}{
		"under way":           {after, migrated(3, after.made.Root, before.made.Root), ""},
		"over":                {after, migrated(3, after.made.Root), ""},
		"another authority":   {after, alone, "chancery authority show -o pem"},
		"by the other's root": {before, migrated(3, after.made.Root, before.made.Root), "chancery authority show -o pem"},
		"by a strange root":   {strange, migrated(3, strange.made.Root, before.made.Root), "chancery authority show -o pem"},
	} {
		t.Run(name, func(t *testing.T) {
			s := after.newSigning(key, 0)
			s.bundle = c.bundle
			after.own.Store(c.by.impostor(trust.SystemID(nextDomain, "server")))
			config := before.config()
			config.Servers = []string{s.addr}
			config.Roots = func() ([]*x509.Certificate, error) {
				return []*x509.Certificate{before.made.Root, after.made.Root}, nil
			}
			config.Anchor = must(anchor.Open(anchor.Config{Domain: td}))
			if c.want == "" {
				a := before.startSync(config)
				st := s.next(t)
				st.request()
				if r := st.push(&chanceryv1.SyncUpdate{Version: 1, SignedBundle: s.signed()}); r.GetAcknowledged() != 1 {
					t.Errorf("the agent says %v", r)
				}
				if b, _ := a.last(); b.Domain() != nextDomain || b.Of(td) == nil || !config.Anchor.Pinned() {
					t.Errorf("what counts is %v", b)
				}
				return
			}
			if _, err := issue(t, client.New(config)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v; want %q", err, c.want)
			}
			if tokens, _ := s.shown(); tokens != 0 || config.Anchor.Pinned() {
				t.Errorf("the server was shown %d tokens; its key is pinned: %v", tokens, config.Anchor.Pinned())
			}
		})
	}
}

// TestD6ForeignDomainsAndNamingOverSync: what is said of foreign trust domains counts by the pinned key alone and does not keep roots from
// being taken; services are asked for when somebody wants them, and what is said of them alone is no update to acknowledge.
func TestD6ForeignDomainsAndNamingOverSync(t *testing.T) {
	w := newWorld(t)
	key := bundleKey()
	s := w.newSigning(key, 1, w.made.Root)
	c := lineAgent(t, w, key, s)
	c.Foreign = foreign.Open(foreign.Config{File: filepath.Join(t.TempDir(), "federation"), Anchor: c.Anchor})
	c.Naming = naming.Open(naming.Config{})
	a := w.startSync(c)
	st := s.next(t)
	if r := st.request(); len(r.GetServices()) != 0 || r.GetReads() != 1 {
		t.Errorf("the agent begins with %v", r)
	}
	federation := func(by ed25519.PrivateKey, version uint64) *chanceryv1.SignedFederation {
		x := trust.SignFederation(by, must(proto.Marshal(&chanceryv1.Federation{TrustDomain: td.String(), Version: version, Bundles: []*chanceryv1.ForeignBundle{
			{TrustDomain: "foreign.test", Sequence: version, Roots: [][]byte{w.made.Root.Raw}},
		}})))
		return &chanceryv1.SignedFederation{Federation: x.Federation, Signature: x.Signature, Key: x.Key}
	}
	known := func() uint64 {
		all, _ := c.Foreign.Bundles()
		if len(all) == 0 {
			return 0
		}
		return all[0].Generation()
	}
	for i, step := range []struct {
		m    *chanceryv1.SignedFederation
		want uint64
	}{{nil, 0}, {federation(bundleKey(), 4), 0}, {federation(key, 4), 4}, {nil, 4}, {federation(key, 3), 4}, {federation(key, 5), 5}} {
		version := uint64(i + 1)
		if r := st.push(&chanceryv1.SyncUpdate{Version: version, SignedBundle: s.signed(), Federation: step.m}); r.GetAcknowledged() != version || r.GetRefused() != "" {
			t.Errorf("step %d: the agent says %v", i, r)
		}
		for deadline := time.Now().Add(20 * time.Second); known() != step.want; time.Sleep(time.Millisecond) { // it is taken after the roots
			if time.Now().After(deadline) {
				t.Fatalf("step %d: known is %d; want %d", i, known(), step.want)
			}
		}
	}
	if text := a.log.String(); strings.Count(text, "of foreign trust domains is refused") != 1 || strings.Count(text, "knows less of foreign trust domains") != 1 {
		t.Errorf("the log has %s", text)
	}

	if err := c.Naming.Hold("foo/web"); err != nil {
		t.Fatal(err)
	}
	if r := st.request(); strings.Join(r.GetServices(), " ") != "foo/web" || r.GetAcknowledged() != 6 {
		t.Errorf("the agent asks %v", r)
	}
	_, changed := c.Naming.Known()
	if err := st.Send(&chanceryv1.SyncUpdate{Naming: []*chanceryv1.ServiceIdentities{{Service: "foo/web", SpiffeIds: []string{web.String()}}}}); err != nil {
		t.Fatal(err)
	}
	<-changed
	if all, _ := c.Naming.Known(); len(all["foo/web"]) != 1 || all["foo/web"][0] != web {
		t.Errorf("known is %v", all)
	}
	if r := st.push(&chanceryv1.SyncUpdate{Version: 7, SignedBundle: s.signed()}); r.GetAcknowledged() != 7 {
		t.Errorf("then the agent says %v", r)
	}
	if all, _ := c.Naming.Known(); len(all["foo/web"]) != 1 {
		t.Error("silence was a word")
	}
	if _, n := a.last(); n != 7 {
		t.Errorf("roots were applied %d times", n)
	}
}
