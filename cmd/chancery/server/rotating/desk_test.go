package rotating

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/rotate/staged"
	"github.com/chancery-project/chancery/rotate/stages"
	"github.com/chancery-project/chancery/trust"
)

// TestLatestEnd: the end of the phase as its gates say, or as it was estimated, and all phases after it.
func TestLatestEnd(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	plan := []staged.PlannedPhase{
		{Phase: document.PhasePrepare}, {Phase: document.PhaseDistribute, Most: time.Hour}, {Phase: document.PhaseActivate, Most: time.Minute}, {Phase: document.PhaseReissue, Most: time.Hour},
	}
	open, until := stages.Gate{Name: stages.GateConsumers}, stages.Gate{Name: stages.GateReaders, Until: now.Add(10 * time.Minute)}
	for _, c := range []struct {
		name  string
		phase document.Phase
		since time.Duration // ago
		gates []stages.Gate
		want  time.Duration // from now; 0: it cannot be told
	}{
		{"all has passed", document.PhaseDistribute, time.Minute, []stages.Gate{{Passed: true}}, 61 * time.Minute},
		{"a gate that counts", document.PhaseDistribute, time.Minute, []stages.Gate{open}, 59*time.Minute + 61*time.Minute},
		{"a gate with an end", document.PhaseDistribute, time.Minute, []stages.Gate{until}, 10*time.Minute + 61*time.Minute},
		{"both", document.PhaseDistribute, time.Minute, []stages.Gate{until, open}, 59*time.Minute + 61*time.Minute},
		{"longer than was thought, with an end", document.PhaseDistribute, 2 * time.Hour, []stages.Gate{until}, 10*time.Minute + 61*time.Minute},
		{"longer than was thought", document.PhaseDistribute, 2 * time.Hour, []stages.Gate{open, until}, 0},
		{"the last phase", document.PhaseReissue, 10 * time.Minute, []stages.Gate{open}, 50 * time.Minute},
		{"an end that is over", document.PhaseReissue, time.Minute, []stages.Gate{{Until: now.Add(-time.Second)}}, 0},
		{"a phase that is not planned", document.PhaseRetire, time.Minute, nil, 0},
	} {
		e := estimate{plan, &staged.Status{Rotation: &document.Rotation{Phase: c.phase, Since: now.Add(-c.since)}, Gates: c.gates}, now}
		at, ok := e.latest()
		if c.name == "an end that is over" { // it passes with the next look
			if !ok || !at.Equal(now) {
				t.Errorf("%s: %s, %t", c.name, at, ok)
			}
			continue
		}
		if ok != (c.want != 0) || ok && at.Sub(now) != c.want {
			t.Errorf("%s: %s, %t; want %s", c.name, at.Sub(now), ok, c.want)
		}
		e.status.Rotation.Paused = &now
		if _, ok := e.latest(); ok {
			t.Errorf("%s: it ends though it is paused", c.name)
		}
	}
}

// TestBadRequestsAreRefused, with what would be right.
func TestBadRequestsAreRefused(t *testing.T) {
	for _, c := range []struct{ kind, reason, want string }{
		{"", "", `"" cannot be rotated; it should be root or issuer`},
		{"leaf", "", `"leaf" cannot be rotated`},
		{"root", "policy", `reason "policy" is not known; it should be empty or compromised`},
	} {
		_, err := asked(&chanceryv1.StartRotationRequest{Kind: c.kind, Reason: c.reason})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	s := &staged.Status{Rotation: &document.Rotation{Phase: document.PhaseReissue}, Gates: []stages.Gate{{Name: stages.GateConsumers, Passed: true}, {Name: stages.GateWait, Waiting: []string{"until noon"}}}}
	for gate, want := range map[string]string{
		"":               `phase reissue has no gate ""; it has consumers, which have passed`,
		stages.GateWait:  "gate wait of phase reissue cannot be overridden: until noon",
		"replicas\x1b":   `no gate "replicas\x1b"`,
		"consumers":      "",
		"no gate at all": `no gate "no gate at all"`,
	} {
		if err := checkGate(s, gate); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", gate, err, want)
		}
	}
	s.Gates = []stages.Gate{{Name: stages.GateSuccessor}}
	if err := checkGate(s, "replicas"); err == nil || !strings.Contains(err.Error(), "phase reissue has no gate that can be overridden") {
		t.Error(err)
	}
}

func TestBecauseIsBounded(t *testing.T) {
	for text, want := range map[string]string{
		"": "--because TEXT", " \t": "why?", "a\nb": "one line", strings.Repeat("x", MaxBecause+1): "at most 500 bytes", strings.Repeat("x", MaxBecause): "", "the node burnt down": "",
	} {
		if err := CheckBecause(text); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v, want %q", text, err, want)
		}
	}
}

// TestMigrationRequests: what names another trust domain, and who has it first.
func TestMigrationRequests(t *testing.T) {
	for _, c := range []struct {
		q    *chanceryv1.StartRotationRequest
		want string // or what is wrong
	}{
		{&chanceryv1.StartRotationRequest{Kind: "root"}, "<nil>"},
		{&chanceryv1.StartRotationRequest{Kind: "root", ToDomain: "new"}, "&{new 100 []}"},
		{&chanceryv1.StartRotationRequest{Kind: "root", ToDomain: "new", Share: new(uint32(0))}, "&{new 0 []}"},
		{&chanceryv1.StartRotationRequest{Kind: "root", ToDomain: "new", Share: new(uint32(1 << 31))}, "&{new 101 []}"}, // package stages refuses it
		{&chanceryv1.StartRotationRequest{Kind: "root", ToDomain: "new", Namespaces: []string{"a"}}, "&{new 0 [a]}"},
		{&chanceryv1.StartRotationRequest{Kind: "root", ToDomain: "new", Share: new(uint32(7)), Namespaces: []string{"a"}}, "&{new 7 [a]}"},
		{&chanceryv1.StartRotationRequest{Kind: "root", Share: new(uint32(7))}, "for a migration"},
		{&chanceryv1.StartRotationRequest{Kind: "root", Namespaces: []string{"a"}}, "for a migration"},
		{&chanceryv1.StartRotationRequest{Kind: "root", ToDomain: "New"}, "to_domain: "},
		{&chanceryv1.StartRotationRequest{Kind: "issuer", ToDomain: "new"}, "is a rotation of the root, without a reason"},
		{&chanceryv1.StartRotationRequest{Kind: "root", Reason: Compromised, ToDomain: "new"}, "is a rotation of the root, without a reason"},
	} {
		what, err := asked(c.q)
		switch {
		case err != nil && (status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%v: %v; want %q", c.q, err, c.want)
		case err == nil && fmt.Sprint(what.Migrate) != c.want:
			t.Errorf("%v: %v; want %s", c.q, what.Migrate, c.want)
		}
	}
	out := describe(&document.Rotation{Kind: document.KindRoot, Migration: &document.Migration{From: "old", To: "new", Share: 7, Namespaces: []string{"a"}}})
	if out.GetFromDomain() != "old" || out.GetToDomain() != "new" || out.GetShare() != 7 || len(out.GetNamespaces()) != 1 {
		t.Errorf("%v", out)
	}
}

// TestFormerNames: an agent with many names is told in one line.
func TestFormerNames(t *testing.T) {
	uses := Former(func(d trust.Domain) ([]agents.Former, int) {
		return []agents.Former{{Agent: "agent a", Names: []string{d.URI()}}, {Agent: "agent b", Names: []string{"1", "2", "3", "4", "5", "6", "7"}}}, 9
	})(trust.Domain{})
	if len(uses) != 2 {
		t.Fatalf("%+v", uses)
	}
	if uses[0].Kind != "names" || uses[0].Who != "agent a" || uses[1].Detail != "its consumers ask for 1, 2, 3, 4, 5 and 2 more" || uses[1].Count != 9 {
		t.Errorf("%+v", uses)
	}
}

// TestD24ConfigsThatRefuse: what is an alias, or federated, cannot become the own trust domain.
func TestD24ConfigsThatRefuse(t *testing.T) {
	var all []trust.Domain
	for _, name := range []string{"alias", "foreign", "new"} {
		d, err := trust.ParseDomain(name)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, d)
	}
	refuses := Refuses(all[:1], all[1:2])
	for i, want := range []string{"trustDomainAliases", "is federated", ""} {
		if err := refuses(all[i]); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", all[i], err, want)
		}
	}
}
