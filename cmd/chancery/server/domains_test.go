package server

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca"
	docs "github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

func opened(t *testing.T, s *Settings, log *bytes.Buffer) *Server {
	t.Helper()
	server := &Server{settings: s, logger: slog.New(slog.NewTextHandler(log, nil)), registry: prometheus.NewRegistry()}
	if err := server.openState(t.Context()); err != nil {
		server.Close()
		t.Fatal(err)
	}
	return server
}

// TestD15OwnCertificateFollowsTheMigration: the server is of the trust domain that all agents know, its names stay; the file with the roots has
// those of both; and after a restart each name of the authority in the config works.
func TestD15OwnCertificateFollowsTheMigration(t *testing.T) {
	dir := t.TempDir()
	named := func(td string) *Settings {
		t.Helper()
		text := strings.NewReplacer("state/state.db", "state.db", "trustDomain: cluster.local", "trustDomain: "+td).Replace(minimal) + "issuanceLog: log\nserverNames: [ca.example]\n"
		s, err := parseConfig([]byte(text), filepath.Join(dir, "server.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := named("cluster.local")
	if err := Init(t.Context(), s, t.Output()); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	server := opened(t, s, &log)
	a := server.authority
	if !a.TakeLease(t.Context()) {
		t.Fatal("it does not drive")
	}
	change := func(f func(s *docs.DomainState)) {
		t.Helper()
		if err := a.Change(t.Context(), func(d *docs.Document) error { f(d.State(a.Domain())); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	own := func(want string, roots int) {
		t.Helper()
		key, err := ca.GenerateKey(ca.P256)
		if err != nil {
			t.Fatal(err)
		}
		got, err := server.issueOwn(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		old, err := trust.ParseDomain("cluster.local")
		if err != nil {
			t.Fatal(err)
		}
		// As the keeper takes it, which asked for another one's name before.
		id, err := trust.NewIdentity(trust.SystemID(old, "server"), got.Chain, key, got.Bundle, time.Now())
		if err != nil || got.Chain[0].URIs[0].String() != want || !slices.Equal(got.Chain[0].DNSNames, []string{"ca.example"}) {
			t.Errorf("it is %v with names %v, %v; want %s", id, got.Chain[0].DNSNames, err, want)
		}
		if err := server.settings.WriteRoots(a.Document()); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(server.settings.rootsFile())
		if err != nil {
			t.Fatal(err)
		}
		if certs, err := trust.ParseCertificates(data); err != nil || len(certs) != roots {
			t.Errorf("the file for agents has %d roots, want %d: %v", len(certs), roots, err)
		}
	}
	own("spiffe://cluster.local/chancery/server", 1)
	change(func(s *docs.DomainState) {
		s.Rotation = &docs.Rotation{ID: "m", Kind: docs.KindRoot, FromRoot: s.Authorities[0].ID, FromIssuer: s.Authorities[1].ID, Phase: docs.PhasePrepare,
			Started: time.Now(), Since: time.Now(), Migration: &docs.Migration{From: "cluster.local", To: "new.example", Share: 100}}
	})
	if err := a.MakeSuccessors(t.Context(), "m"); err != nil {
		t.Fatal(err)
	}
	change(func(s *docs.DomainState) { s.Rotation.Phase = docs.PhaseIssue })
	own("spiffe://cluster.local/chancery/server", 2)
	change(func(s *docs.DomainState) {
		s.Activate(docs.KindRoot, s.Rotation.ToRoot, time.Now())
		s.Activate(docs.KindIssuer, s.Rotation.ToIssuer, time.Now())
		s.Rotation.Phase = docs.PhaseActivate
	})
	own("spiffe://new.example/chancery/server", 2)
	to, err := trust.ParseDomain("new.example")
	if err != nil {
		t.Fatal(err)
	}
	change(func(s *docs.DomainState) {
		s.Become(a.Domain(), to)
		s.DropRoot(s.Rotation.FromRoot)
		s.EndRotation("done", time.Now())
	})
	own("spiffe://new.example/chancery/server", 1)
	server.Close()
	for _, name := range []string{"new.example", "cluster.local"} {
		log.Reset()
		server = opened(t, named(name), &log)
		a = server.authority
		if server.settings.domain.String() != "cluster.local" || a.Present() != to {
			t.Errorf("by %s: the line is %s and is %s now", name, server.settings.domain, a.Present())
		}
		own("spiffe://new.example/chancery/server", 1)
		if warns := strings.Contains(log.String(), "trustDomain in the config is not what this authority is now"); warns != (name == "cluster.local") {
			t.Errorf("by %s the log says %s", name, log.String())
		}
		server.Close()
	}
	stranger := named("stranger.example")
	if err := openAndClose(t, stranger); err == nil || !strings.Contains(err.Error(), "stranger.example") {
		t.Errorf("a config of another authority: %v", err)
	}
}

// TestAliases are trust domains, each once, and not the own one.
func TestAliases(t *testing.T) {
	var many []string
	for i := range 33 {
		many = append(many, string(rune('a'+i%26))+strings.Repeat("x", i+1))
	}
	for list, want := range map[string]string{
		"legacy.example, old": "[legacy.example old]", "": "[]", "Legacy": "trustDomainAliases[0]", "'spiffe://a'": "trustDomainAliases[0]",
		"a, a": "trustDomainAliases[1]: a is listed twice", "cluster.local": "trustDomainAliases[0]: cluster.local is trustDomain itself",
		strings.Join(many, ", "): "lists 33 trust domains",
	} {
		s, err := parseConfig([]byte(minimal+"trustDomainAliases: ["+list+"]\n"), "/c/server.yaml")
		var got string
		if err != nil {
			got = err.Error()
		} else {
			var names []string
			for _, d := range s.aliases {
				names = append(names, d.String())
			}
			got = "[" + strings.Join(names, " ") + "]"
		}
		if !strings.Contains(got, want) {
			t.Errorf("%q: %s, want %s", list, got, want)
		}
	}
}
