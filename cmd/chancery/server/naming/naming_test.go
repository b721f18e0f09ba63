package naming

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/cmd/chancery/server/clusters"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/naming"
)

func domain(t *testing.T, name string) trust.Domain {
	t.Helper()
	d, err := trust.ParseDomain(name)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestParse(t *testing.T) {
	known := []clusters.Config{{Name: "east", Kubeconfig: "/east"}, {Name: "here", InCluster: true}, {Name: "files", JWKSFile: "/jwks"}}
	rule := func(service string, ids ...string) Config { return Config{Rules: []RuleConfig{{service, ids}}} }
	for _, c := range []struct {
		in    Config
		error string
	}{
		{Config{}, "naming: clusters and rules are both empty"},
		{Config{Clusters: []ClusterConfig{{Name: "east", TrustDomain: "other"}, {Name: "here"}}, RootNamespace: "root", ClusterDomain: "k8s.example.com"}, ""},
		{Config{Clusters: []ClusterConfig{{Name: "east"}, {Name: "east"}}}, `naming.clusters[1].name: "east" occurs twice`},
		{Config{Clusters: []ClusterConfig{{Name: "west"}}}, `naming.clusters[0].name: "west" is none of the server's`},
		{Config{Clusters: []ClusterConfig{{Name: "files"}}}, `naming.clusters[0].name: cluster "files" of`},
		{Config{Clusters: []ClusterConfig{{Name: "east", TrustDomain: "A"}}}, `naming.clusters[0].trustDomain: trust domain "A"`},
		{Config{Clusters: []ClusterConfig{{Name: "east"}}, RootNamespace: "a/b"}, "naming.rootNamespace"},
		{Config{Clusters: []ClusterConfig{{Name: "east"}}, ClusterDomain: "*.local"}, "naming.clusterDomain"},
		{rule("web", "spiffe://td/x"), `naming.rules[0].service: service "web" should be`},
		{rule("shop/web"), ""},
		{rule("shop/web", "spiffe://td/chancery/server"), "naming.rules[0].identities[0]: spiffe://td/chancery/server is one of Chancery's own"},
		{rule("shop/web", "spiffe://td/x", "spiffe://td"), "naming.rules[0].identities[1]: SPIFFE ID"},
		{rule("shop/web", make([]string, naming.MaxNamed+1)...), "201 identities; at most 200"},
		{Config{Rules: []RuleConfig{{Service: "a/b"}, {Service: "a/b"}}}, `naming.rules[1].service: "a/b" is that of rules[0] already`},
		{Config{Rules: make([]RuleConfig, maxRules+1)}, "10001 rules; at most 10000"},
	} {
		_, err := Parse(&c.in, domain(t, "td"), known)
		if (err == nil) != (c.error == "") || err != nil && !strings.Contains(err.Error(), c.error) {
			t.Errorf("%+v: %v, want %q", c.in, err, c.error)
		}
	}
	if p, err := Parse(nil, domain(t, "td"), known); p != nil || err != nil {
		t.Error(p, err)
	}
	p, err := Parse(&Config{Clusters: []ClusterConfig{{Name: "east", TrustDomain: "other"}, {Name: "here"}}}, domain(t, "td"), known)
	if err != nil || !slices.Equal(p.clusters, []cluster{{"east", "/east", domain(t, "other")}, {"here", "", domain(t, "td")}}) || p.root != "istio-system" || p.clusterDomain != "cluster.local" {
		t.Errorf("%+v, %v", p, err)
	}
}

// desk opens one of rules, over a document that the test changes.
func desk(t *testing.T, doc *atomic.Pointer[document.Document], aliases ...string) *Desk {
	t.Helper()
	p, err := Parse(&Config{Rules: []RuleConfig{{"shop/web", []string{"spiffe://td/ns/shop/sa/web", "spiffe://foreign/x"}}}}, domain(t, "td"), nil)
	if err != nil {
		t.Fatal(err)
	}
	env := Env{
		Document: doc.Load, Domain: domain(t, "td"), Logger: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(), Note: func(string, string) {},
		ActorOf: func(ctx context.Context) (string, error) {
			if ctx.Value(who{}) == nil {
				return "", status.Error(codes.PermissionDenied, "who are you?")
			}
			return "root", nil
		},
	}
	for _, a := range aliases {
		env.Aliases = append(env.Aliases, domain(t, a))
	}
	d, err := p.Open(env)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

type who struct{}

// TestFollowsTheDocument: what counts as ours, and what is said of it, changes with the document; agents are told.
func TestFollowsTheDocument(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var doc atomic.Pointer[document.Document]
		doc.Store(&document.Document{Version: 1, Domains: map[string]*document.DomainState{"td": {}}})
		d := desk(t, &doc, "alias")
		var told [][]string
		d.OnChange(func(s ...string) { told = append(told, s) })
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { d.Run(ctx) })
		synctest.Wait()
		if len(told) != 1 || told[0] != nil {
			t.Errorf("told %q at the start; that all is known should be told once", told)
		}
		if ids, known := d.Source()("shop/web"); !known || !slices.Equal(ids, []string{"spiffe://alias/ns/shop/sa/web", "spiffe://foreign/x", "spiffe://td/ns/shop/sa/web"}) {
			t.Errorf("%q, %t", ids, known)
		}
		if ids, known := d.Source()("shop/none"); known || len(ids) > 0 {
			t.Errorf("%q, %t", ids, known)
		}
		time.Sleep(10 * time.Second)
		if synctest.Wait(); len(told) != 1 {
			t.Errorf("told %q while nothing changed", told)
		}
		cancel()
		wg.Wait()
	})
}

// TestOnlyNewsMakesListsAnew: a version of the document that says nothing new of aliases and revocations makes no list anew.
func TestOnlyNewsMakesListsAnew(t *testing.T) {
	var doc atomic.Pointer[document.Document]
	now, version := time.Now(), uint64(0)
	state := func(s document.DomainState) {
		version++
		doc.Store(&document.Document{Version: version, Domains: map[string]*document.DomainState{"td": &s}})
	}
	state(document.DomainState{})
	d := desk(t, &doc, "alias")
	identity := document.Revocation{Predicate: document.Predicate{SPIFFEID: "spiffe://td/ns/shop/sa/web"}, Time: now}
	restored := identity
	restored.Restored = &now
	for _, c := range []struct {
		name string
		next document.DomainState
		news bool
	}{
		{"nothing", document.DomainState{}, false},
		{"a certificate revoked", document.DomainState{Revocations: []document.Revocation{{Predicate: document.Predicate{Serial: "01"}, Time: now}}}, false},
		{"an identity revoked", document.DomainState{Revocations: []document.Revocation{identity}}, true},
		{"still revoked, and an issuer more", document.DomainState{Revocations: []document.Revocation{identity}, Authorities: []document.Authority{{Kind: document.KindIssuer}}}, false},
		{"restored", document.DomainState{Revocations: []document.Revocation{restored}}, true},
		{"all before a time", document.DomainState{Revocations: []document.Revocation{{Predicate: document.Predicate{IssuedBefore: &now}, Time: now}}}, true},
		{"a tainted issuer", document.DomainState{Authorities: []document.Authority{{Kind: document.KindIssuer, Tainted: &now}}}, true},
	} {
		state(c.next)
		if got := d.bring(); got != c.news {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}

// TestD25NoGrace: whom the document calls revoked, or whose authority is tainted, has no grace.
func TestD25NoGrace(t *testing.T) {
	var doc atomic.Pointer[document.Document]
	now := time.Now()
	by := func(p document.Predicate) document.Revocation { return document.Revocation{Predicate: p, Time: now} }
	over, before := by(document.Predicate{IssuedBefore: &now}), now.Add(-time.Second)
	over.Until = &before
	restored := by(document.Predicate{SPIFFEID: "spiffe://td/ns/shop/sa/web"})
	restored.Restored = &now
	for _, c := range []struct {
		name    string
		state   document.DomainState
		revoked bool
	}{
		{"nothing", document.DomainState{}, false},
		{"the identity", document.DomainState{Revocations: []document.Revocation{by(document.Predicate{SPIFFEID: "spiffe://td/ns/shop/sa/web"})}}, true},
		{"its alias", document.DomainState{Revocations: []document.Revocation{by(document.Predicate{SPIFFEID: "spiffe://alias/ns/shop/sa/web"})}}, true},
		{"another", document.DomainState{Revocations: []document.Revocation{by(document.Predicate{SPIFFEID: "spiffe://td/ns/shop/sa/we"})}}, false},
		{"the same path of a foreign domain", document.DomainState{Revocations: []document.Revocation{by(document.Predicate{SPIFFEID: "spiffe://foreign/ns/shop/sa/web"})}}, false},
		{"restored", document.DomainState{Revocations: []document.Revocation{restored}}, false},
		{"one certificate", document.DomainState{Revocations: []document.Revocation{by(document.Predicate{Serial: "01"})}}, false},
		{"a node", document.DomainState{Revocations: []document.Revocation{by(document.Predicate{IssuedBefore: &now, Node: "n", Cluster: "c"})}}, false},
		{"all before a time", document.DomainState{Revocations: []document.Revocation{by(document.Predicate{IssuedBefore: &now})}}, true},
		{"all before a time, and nothing of that is left", document.DomainState{Revocations: []document.Revocation{over}}, false},
		{"a tainted issuer", document.DomainState{Authorities: []document.Authority{{Kind: document.KindIssuer}, {Kind: document.KindIssuer, Tainted: &now}}}, true},
	} {
		doc.Store(&document.Document{Version: 1, Domains: map[string]*document.DomainState{"td": &c.state}})
		d := desk(t, &doc, "alias")
		id, err := trust.ParseID("spiffe://td/ns/shop/sa/web")
		if err != nil {
			t.Fatal(err)
		}
		if got := d.revoked(id); got != c.revoked {
			t.Errorf("%s: %t", c.name, got)
		}
		if d.revoked(id.WithDomain(domain(t, "foreign"))) {
			t.Errorf("%s: says something of a foreign identity", c.name)
		}
	}
}

// TestShowNaming: who asks is known first, and what is not known does not pass for nobody.
func TestShowNaming(t *testing.T) {
	var doc atomic.Pointer[document.Document]
	doc.Store(&document.Document{Version: 1, Domains: map[string]*document.DomainState{"td": {}}})
	d, admin := desk(t, &doc), context.WithValue(t.Context(), who{}, true)
	if _, err := d.ShowNaming(t.Context(), &chanceryv1.ShowNamingRequest{}); status.Code(err) != codes.PermissionDenied {
		t.Error(err)
	}
	if _, err := d.ShowNaming(admin, &chanceryv1.ShowNamingRequest{Service: "web"}); status.Code(err) != codes.InvalidArgument {
		t.Error(err)
	}
	if _, err := (*Desk)(nil).ShowNaming(admin, &chanceryv1.ShowNamingRequest{}); status.Code(err) != codes.FailedPrecondition {
		t.Error(err)
	}
	for _, service := range []string{"shop/web", "shop/none"} {
		resp, err := d.ShowNaming(admin, &chanceryv1.ShowNamingRequest{Service: service})
		if err != nil || len(resp.GetServices()) != 1 {
			t.Fatal(resp, err)
		}
		s := resp.GetServices()[0]
		if s.GetUnknown() != (service == "shop/none") || len(s.GetIdentities()) == 0 == (service == "shop/web") {
			t.Errorf("%v", s)
		}
	}
	if resp, err := d.ShowNaming(admin, &chanceryv1.ShowNamingRequest{}); err != nil || len(resp.GetServices()) != 1 || len(resp.GetTrouble()) > 0 {
		t.Errorf("%v, %v", resp, err)
	}
	for _, one := range []*Desk{d, nil} {
		if trouble, unread := one.Trouble(); trouble != "" || unread {
			t.Errorf("%q, unread %t", trouble, unread)
		}
	}
}

// TestAClusterThatWasNeverRead: nothing is said, the admin is told why, and metrics show it. Nobody was asked anything before Run.
func TestAClusterThatWasNeverRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {token: x}}]\ncurrent-context: c\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := Parse(&Config{Clusters: []ClusterConfig{{Name: "east"}}}, domain(t, "td"), []clusters.Config{{Name: "east", Kubeconfig: file}})
	if err != nil {
		t.Fatal(err)
	}
	doc, reg := &document.Document{Version: 1, Domains: map[string]*document.DomainState{"td": {}}}, prometheus.NewRegistry()
	d, err := p.Open(Env{
		Document: func() *document.Document { return doc }, Domain: domain(t, "td"), Logger: slog.New(slog.DiscardHandler), Metrics: reg,
		Note: func(string, string) {}, ActorOf: func(context.Context) (string, error) { return "root", nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.ShowNaming(t.Context(), &chanceryv1.ShowNamingRequest{})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "cluster east: not read yet: [pod service endpointslice serviceentry workloadentry]") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	deadline := time.Now().Add(30 * time.Second)
	for {
		_, err := d.ShowNaming(t.Context(), &chanceryv1.ShowNamingRequest{})
		if err != nil && strings.Contains(err.Error(), "cluster east: pods cannot be read since") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if trouble, unread := d.Trouble(); !unread || !strings.Contains(trouble, "cluster east: pods cannot be read since") {
		t.Errorf("%q, unread %t", trouble, unread)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, f := range families {
		if name := f.GetName(); name == "chancery_naming_cluster_unread" || name == "chancery_naming_cluster_failing" {
			seen++
			if v := f.GetMetric()[0].GetGauge().GetValue(); v < 1 {
				t.Errorf("%s is %v", name, v)
			}
		}
	}
	if seen != 2 {
		t.Errorf("%d metrics", seen)
	}
	cancel()
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestFormer: rules that name the trust domain which a migration leaves are told, a few by name and all by number.
func TestFormer(t *testing.T) {
	var doc atomic.Pointer[document.Document]
	doc.Store(&document.Document{Version: 1, Domains: map[string]*document.DomainState{"td": {}}})
	d := desk(t, &doc)
	uses := d.Former(domain(t, "td"))
	if len(uses) != 1 || uses[0].Kind != "names" || uses[0].Who != "naming.rules[0]" || uses[0].Detail != "spiffe://td/ns/shop/sa/web" || uses[0].Count != 0 {
		t.Errorf("%+v", uses)
	}
	if uses := d.Former(domain(t, "other")); len(uses) > 0 {
		t.Errorf("%+v", uses)
	}
	if uses := (*Desk)(nil).Former(domain(t, "td")); len(uses) > 0 {
		t.Errorf("%+v", uses)
	}
}
