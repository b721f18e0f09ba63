package staged

import (
	"bytes"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/authority/swap"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/rotate/stages"
	"github.com/chancery-project/chancery/trust"
)

// writeFiles writes a plugged-in issuer in Istio's layout.
func writeFiles(t *testing.T, dir string, made *ca.Created, roots ...*x509.Certificate) {
	t.Helper()
	for name, data := range map[string][]byte{
		"ca-cert.pem": trust.EncodeCertificates(made.Issuer), "ca-key.pem": must(trust.EncodeKey(made.IssuerKey)),
		"cert-chain.pem": trust.EncodeCertificates(made.Issuer, made.Root), "root-cert.pem": trust.EncodeCertificates(roots...),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// pluggedWorld is a world of servers that each have files of their own.
type pluggedWorld struct {
	*world
	dirs     map[string]string
	log      *audit.Log
	old, new *ca.Created
	refused  map[string]error // what became of the last files of each
}

func newPluggedWorld(t *testing.T, names string) *pluggedWorld {
	t.Helper()
	p := &pluggedWorld{dirs: map[string]string{}, log: must(newLog(t)), refused: map[string]error{}}
	made := func() *ca.Created {
		return must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: p.log, RootTTL: 5000 * time.Hour, IssuerTTL: 4000 * time.Hour}))
	}
	p.old, p.new = made(), made()
	for _, name := range strings.Fields(names) {
		p.dirs[name] = t.TempDir()
		writeFiles(t, p.dirs[name], p.old, p.old.Root)
	}
	p.world = newWorld(t, "", func(c *authority.Config) { c.Keys = nil })
	for i, name := range strings.Fields(names) {
		p.config.Plugged = &authority.Plugged{Dir: p.dirs[name], Layout: files.CACerts}
		if i == 0 {
			c, _ := p.configOf(name, new(bytes.Buffer))
			must(authority.Init(t.Context(), c, "test"))
		}
		p.world.start(name, p.store)
	}
	return p
}

// restart starts a server anew, on the files that it has.
func (p *pluggedWorld) restart(name string) *server {
	p.config.Plugged = &authority.Plugged{Dir: p.dirs[name], Layout: files.CACerts}
	return p.world.start(name, p.store)
}

// change changes the files of servers, and has them look.
func (p *pluggedWorld) change(names string, made *ca.Created, roots ...*x509.Certificate) {
	p.t.Helper()
	for _, name := range strings.Fields(names) {
		writeFiles(p.t, p.dirs[name], made, roots...)
		p.refused[name] = p.all[name].k.TakeFiles(p.t.Context(), must(files.Read(p.dirs[name], files.CACerts)))
	}
}

// goOn has a driver look, and all acknowledge, for some minutes.
func (p *pluggedWorld) goOn(driver string, minutes int) {
	p.t.Helper()
	for range minutes {
		s := p.drives(driver)
		s.k.Mind(p.t.Context())
		s.m.look(p.t.Context(), time.Now())
		p.acknowledge(p.names()...)
		time.Sleep(time.Minute)
	}
}

func (p *pluggedWorld) expect(when string, phase document.Phase, signs *ca.Created, roots int) {
	p.t.Helper()
	if got := p.phase(); got != phase {
		p.t.Errorf("%s: phase %q, want %q; %+v", when, got, phase, p.all["a"].m.Status().Gates)
	}
	for _, name := range p.names() {
		s := p.all[name]
		s.k.Follow(p.t.Context())
		if got := p.issues(s); got != swap.ID(signs.Issuer) {
			p.t.Errorf("%s: %s signs with %s", when, name, got)
		}
		if n := len(must(s.k.Document().Bundle(td)).Roots()); n != roots {
			p.t.Errorf("%s: %s has %d roots", when, name, n)
		}
	}
}

// waits reports what the gates say is waited for.
func (p *pluggedWorld) waits() string {
	var all []string
	for _, g := range p.all["a"].m.Status().Gates {
		if !g.Passed {
			all = append(all, g.Name+": "+strings.Join(g.Waiting, "; "))
		}
	}
	return strings.Join(all, "\n")
}

// TestD7PluggedInRootByItsSteps: two servers whose files change at different times go through the three steps; each that comes too early waits
// or is refused, and nothing is cut off.
func TestD7PluggedInRootByItsSteps(t *testing.T) {
	bubble(t, func(t *testing.T) {
		p := newPluggedWorld(t, "a b")
		a, b := p.drives("a"), p.all["b"]
		p.goOn("a", 2)
		p.expect("at first", "", p.old, 1)
		if err := a.m.Start(t.Context(), "test", Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}); err == nil || !strings.Contains(err.Error(), "(1) add the new root") {
			t.Errorf("by command: %v", err)
		}

		// All at once.
		for name, change := range map[string]func(){
			"another CA": func() { p.change("a", p.new, p.new.Root) }, "both roots and the new key": func() { p.change("a", p.new, p.old.Root, p.new.Root) },
		} {
			if change(); p.refused["a"] == nil || !strings.Contains(p.refused["a"].Error(), "(2) when") {
				t.Errorf("%s: %v", name, p.refused["a"])
			}
			p.goOn("a", 2)
			p.expect(name, "", p.old, 1)
		}

		// 1: the other's files first, which does not drive; then the driver's.
		p.change("b", p.old, p.old.Root, p.new.Root)
		p.goOn("a", 2)
		p.expect("who does not drive", "", p.old, 1)
		p.change("a", p.old, p.old.Root, p.new.Root)
		p.goOn("a", 3)
		p.expect("the first step", document.PhaseDistribute, p.old, 2)
		r := p.state().Rotation
		if r.Reason != document.ReasonFiles || r.ToRoot != swap.ID(p.new.Root) || r.FromRoot != swap.ID(p.old.Root) || r.ToIssuer != "" {
			t.Errorf("%+v", r)
		}
		a.audited(t, `"actor":"files"`, "of the root, reason files")
		if w := p.waits(); !strings.Contains(w, "change certificate and key of the issuer") {
			t.Errorf("it waits for %s", w)
		}
		if err := a.m.Change(t.Context(), "test", Change{What: "rollback", Rotation: "ff"}); err == nil {
			t.Error("another rotation was rolled back")
		}

		// 3 before 2.
		p.change("a", p.old, p.new.Root)
		if p.refused["a"] == nil { // the issuer does not even verify
			t.Error("the old root was left out while its issuer signs")
		}
		p.change("a", p.new, p.new.Root)
		if p.refused["a"] == nil || !strings.Contains(p.refused["a"].Error(), "too early") || !strings.Contains(p.refused["a"].Error(), "phase distribute") {
			t.Errorf("the old root was left out with the key: %v", p.refused["a"])
		}
		p.change("a", p.old, p.old.Root, p.new.Root)

		// 2, while somebody has not got the new root: the key is held, and waits.
		b.numb = true
		p.acknowledge("a", "b")
		delete(p.notes, "b")
		p.change("a b", p.new, p.old.Root, p.new.Root)
		if p.refused["a"] != nil || p.refused["b"] != nil {
			t.Fatal(p.refused)
		}
		p.goOn("a", 3)
		p.expect("the second step, too early", document.PhaseDistribute, p.old, 2)
		if w := p.waits(); !strings.Contains(w, "replica b") || p.state().Rotation.ToIssuer != "" {
			t.Errorf("it waits for %s; %+v", w, p.state().Rotation)
		}
		// 2, at one of them only.
		b.numb = false
		p.change("b", p.old, p.old.Root, p.new.Root)
		p.restart("b") // so that it holds the new key no more
		p.goOn("a", 5)
		p.expect("the second step at one", document.PhaseDistribute, p.old, 2)
		if r := p.state().Rotation; r.ToIssuer != swap.ID(p.new.Issuer) {
			t.Errorf("%+v", r)
		}
		p.change("b", p.new, p.old.Root, p.new.Root)
		p.goOn("a", 3)
		p.expect("the second step at both", document.PhaseReissue, p.new, 2)
		if w := p.waits(); !strings.Contains(w, "take the old root out") {
			t.Errorf("it waits for %s", w)
		}
		// Former files do not bring the former issuer back; who has them leaves driving to others.
		p.change("a", p.old, p.old.Root, p.new.Root)
		p.goOn("a", 1)
		if a.k.TakeLease(t.Context()) {
			t.Error("it drives by former files")
		}
		p.goOn("b", 3)
		p.expect("former files", document.PhaseReissue, p.new, 2)
		p.change("a", p.new, p.old.Root, p.new.Root)
		if err := a.m.Change(t.Context(), "test", Change{What: "rollback"}); err == nil || !strings.Contains(err.Error(), "files") {
			t.Errorf("rollback: %v", err)
		}
		p.goOn("a", 90)
		p.expect("long after", document.PhaseReissue, p.new, 2)

		// 3, at the driver.
		p.change("a", p.new, p.new.Root)
		if p.refused["a"] != nil {
			t.Fatal(p.refused["a"])
		}
		p.goOn("a", 4)
		p.expect("the third step", "", p.new, 1)
		if past := p.state().Past; len(past) != 1 || past[0].Outcome != stages.OutcomeDone || past[0].Reason != document.ReasonFiles {
			t.Errorf("%+v", past)
		}

		// The other has the old root in its files still: it drives, starts anew, and brings nothing back.
		p.goOn("b", 3)
		b = p.restart("b")
		p.goOn("b", 3)
		p.expect("the old root in a file", "", p.new, 1)
		if !strings.Contains(b.log.String(), "take it out of the root file") {
			t.Errorf("its log does not say so:\n%s", b.log)
		}
		p.change("b", p.new, p.new.Root)
		p.goOn("b", 2)
		p.expect("in the end", "", p.new, 1)
	})
}

// TestD7RootThatIsTakenBack: before anything is signed under it, a root that was added can be taken back, by the files or by an admin; and
// may come again later. A file that never had it takes nothing back.
func TestD7RootThatIsTakenBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		p := newPluggedWorld(t, "a b")
		p.drives("a")
		p.change("a", p.old, p.old.Root, p.new.Root)
		p.goOn("a", 3)
		p.expect("added", document.PhaseDistribute, p.old, 2)
		p.goOn("b", 3) // its files never had it
		p.expect("at the other", document.PhaseDistribute, p.old, 2)
		p.change("a", p.old, p.old.Root)
		p.goOn("b", 2)
		p.expect("taken back, at who does not drive", document.PhaseDistribute, p.old, 2)
		p.goOn("a", 3)
		p.expect("taken back", "", p.old, 1)
		p.all["a"].audited(t, `"actor":"files"`, "aborted, since the files do not have root")

		p.change("a", p.old, p.old.Root, p.new.Root)
		p.goOn("a", 3)
		p.expect("added again", document.PhaseDistribute, p.old, 2)
		if err := p.all["b"].m.Change(t.Context(), "test", Change{What: "abort"}); err != nil {
			t.Fatal(err)
		}
		p.goOn("a", 3)
		p.expect("aborted, and in the file still", "", p.old, 1)
		a := p.restart("a")
		p.goOn("a", 3)
		p.expect("after a start", "", p.old, 1)
		if !strings.Contains(a.log.String(), "which was aborted: take it out of the root file") {
			t.Errorf("its log does not say so:\n%s", a.log)
		}
		p.change("a", p.old, p.old.Root)
		p.change("a", p.old, p.old.Root, p.new.Root)
		p.goOn("a", 3)
		p.expect("taken out and added", document.PhaseDistribute, p.old, 2)
	})
}

// TestD7IssuerUnderTheSameRootDuringASwap: cert-manager does not wait for us. An issuer that is renewed under its root while a root rotates
// is used by the steps of every renewal, and the rotation goes on from it.
func TestD7IssuerUnderTheSameRootDuringASwap(t *testing.T) {
	bubble(t, func(t *testing.T) {
		p := newPluggedWorld(t, "a")
		p.drives("a")
		p.change("a", p.old, p.old.Root, p.new.Root)
		p.goOn("a", 3)
		under := func(made *ca.Created) *ca.Created {
			next := *made
			root := must(ca.NewIssuer(ca.IssuerConfig{
				Domain: td, Key: made.RootKey, Chain: []*x509.Certificate{made.Root}, LogID: ca.MinLogID, Log: p.log, Bundle: must(trust.NewBundle(td, 1, []*x509.Certificate{made.Root})),
			}))
			var err error
			if next.Issuer, next.IssuerKey, err = root.NewIssuer(t.Context(), 4000*time.Hour, audit.Requester{}); err != nil {
				t.Fatal(err)
			}
			return &next
		}
		second := under(p.old)
		p.change("a", second, p.old.Root, p.new.Root)
		p.goOn("a", 3)
		p.expect("renewed", document.PhaseDistribute, second, 2)
		if r := p.state().Rotation; r.FromIssuer != swap.ID(second.Issuer) || r.ToIssuer != "" {
			t.Errorf("%+v", r)
		}
		p.change("a", p.new, p.old.Root, p.new.Root)
		p.goOn("a", 4)
		p.expect("the new one", document.PhaseReissue, p.new, 2)
		third := under(p.new)
		p.change("a", third, p.old.Root, p.new.Root)
		p.goOn("a", 3)
		p.expect("renewed again", document.PhaseReissue, third, 2)
		if r := p.state().Rotation; r.ToIssuer != swap.ID(third.Issuer) {
			t.Errorf("%+v", r)
		}
		p.change("a", third, p.new.Root)
		p.goOn("a", 90)
		p.expect("in the end", "", third, 1)
	})
}
