package stages

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
)

// FuzzNext: whatever a document and evidence say, nothing here panics; Next changes nothing that it was given, decides the same again, and
// has nothing to add to what it has decided.
func FuzzNext(f *testing.F) {
	w := &world{start: root(), consumer: onlyC}
	s := w.first()
	_ = s.begin("root")
	m := (&world{start: []string{"migrate 50"}, consumer: onlyC}).first()
	_ = m.begin("migrate 50")
	f.Add(must(json.Marshal(m.doc)), must(json.Marshal(*m.notes[1])), int64(90))
	for range 4 {
		f.Add(must(json.Marshal(s.doc)), must(json.Marshal(*s.notes[1])), int64(90))
		s = w.calm(s)
	}
	for _, text := range []string{`{}`, `{"domains":{"td":null}}`, `{"domains":{"td":{"rotation":{}}}}`,
		`{"domains":{"td":{"rotation":{"phase":"reissue","kind":"root","fromRoot":"x"}}},"logs":[{"replica":"a"},{"replica":"a","declaredDead":"2026-12-01T00:00:00Z"}]}`} {
		f.Add([]byte(text), []byte(`{}`), int64(0))
	}
	f.Fuzz(func(t *testing.T, doc, note []byte, second int64) {
		d, n := new(document.Document), board.Note{}
		if json.Unmarshal(doc, d) != nil || json.Unmarshal(note, &n) != nil || second < -1<<33 || second > 1<<33 {
			return
		}
		use(t, d, Evidence{Notes: []board.Note{n}, LeafTTL: time.Minute, Floor: time.Minute}, epoch.Add(time.Duration(second)*time.Second))
	})
}

// use calls all that there is.
func use(t *testing.T, d *document.Document, e Evidence, now time.Time) {
	t.Helper()
	before, err := json.Marshal(d)
	if err != nil {
		return // times that JSON cannot write
	}
	gates := fmt.Sprint(Gates(d, td, e, now))
	Presents(d, td, e, now)
	next, actions := Next(d, td, e, now)
	if after := must(json.Marshal(d)); string(after) != string(before) {
		t.Fatalf("Next changed what it was given, from\n%s to\n%s", before, after)
	}
	again, actions2 := Next(d, td, e, now)
	if !reflect.DeepEqual(next, again) || !reflect.DeepEqual(actions, actions2) || fmt.Sprint(Gates(d, td, e, now)) != gates {
		t.Fatalf("the second time it is otherwise: %s", before)
	}
	if next != d && acknowledged(e) < d.Version { // as stored: nobody has acknowledged this version yet
		stored := next.Clone()
		stored.Version++
		if more, _ := Next(stored, td, e, now); more != stored && phaseOf(next) != phaseOf(d) && phaseOf(more) != phaseOf(next) {
			t.Fatalf("without new evidence it goes on, from %s by %s to %s: %s", phaseOf(d), phaseOf(next), phaseOf(more), before)
		}
	}
	for _, f := range []func(d *document.Document) error{
		func(d *document.Document) error {
			return Start(d, td, Request{Kind: document.KindRoot, Reason: document.ReasonCompromised, Actor: "a", ID: "1"}, now)
		},
		func(d *document.Document) error {
			return Start(d, td, Request{Kind: document.KindRoot, Reason: document.ReasonAsked, Actor: "a", ID: "1", Migrate: &Target{Domain: newTD}}, now)
		},
		func(d *document.Document) error { return Issue(d, td, "a", new(50), []string{"b"}, now) },
		func(d *document.Document) error { return Pause(d, td, "a", now) },
		func(d *document.Document) error { return Resume(d, td, "a", now) },
		func(d *document.Document) error { return Abort(d, td, "a", now) },
		func(d *document.Document) error { return Rollback(d, td, "a", now) },
		func(d *document.Document) error {
			return Override(d, td, document.Override{Gate: GateConsumers, Because: "b", Actor: "a"}, now)
		},
	} {
		c := d.Clone()
		if f(c) != nil {
			if after := must(json.Marshal(c)); string(after) != string(before) {
				t.Fatalf("a command that is refused changed\n%s to\n%s", before, after)
			}
		}
	}
}

func acknowledged(e Evidence) (most uint64) {
	for _, n := range e.Notes {
		most = max(most, n.Acknowledged)
	}
	return most
}

func phaseOf(d *document.Document) string {
	if r := d.Rotating(td); r != nil {
		return string(r.Phase)
	}
	return "none"
}

// TestNextInRandomWorlds plays random histories, with all that can fail, and calls everything in each state.
func TestNextInRandomWorlds(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 1))
	runs := 60
	if testing.Short() {
		runs = 15
	}
	for run := range runs {
		w := &world{start: []string{[]string{"root", "issuer", "root compromised", "migrate 0"}[run%4]}, consumer: [people]bool{true, true, true}, reader: run%2 == 0, faults: 9, orders: 9,
			kinds: "die sleep forget", commands: slices.Concat(orders, overrides, []string{"issue e", "issue 100"}), blind: [people]bool{run%3 == 0}, board: run%5 == 0, lag: run%7 == 0}
		s := w.first()
		for range 120 {
			all := w.steps(&s, "")
			st := all[r.IntN(len(all))]
			if s = st.to; s.bad != "" {
				t.Fatalf("run %d: %s", run, s.bad)
			}
			use(t, s.doc, w.evidence(&s), at(s.now))
		}
	}
}

// files is a document with plugged-in files' root and issuer, made by hand.
func filesDoc() *document.Document {
	w := &world{start: root()}
	d := w.first().doc.Clone()
	for i := range domain(d).Authorities {
		domain(d).Authorities[i].KeyRef = ""
	}
	return d
}

// TestD7PluggedFilesGoInSteps: the new root is distributed before the files may bring its issuer, each replica must hold that, and the old
// root leaves once the files have left it out.
func TestD7PluggedFilesGoInSteps(t *testing.T) {
	d := filesDoc()
	if err := Start(d, td, Request{Kind: document.KindRoot, Reason: document.ReasonAsked, Actor: "admin", ID: "1"}, epoch); err == nil || !strings.Contains(err.Error(), "lies elsewhere") {
		t.Fatal(err)
	}
	if err := Start(d, td, Request{Kind: document.KindRoot, Reason: document.ReasonFiles, Actor: "files", ID: "1"}, epoch); err != nil {
		t.Fatal(err)
	}
	now, e := epoch, Evidence{LeafTTL: time.Minute, Files: []string{"R1", "R2"}}
	step := func(want document.Phase, waits string) {
		t.Helper()
		d.Version++
		d, _ = Next(d, td, e, now)
		if phaseOf(d) != string(want) {
			t.Fatalf("the phase is %s, not %s", phaseOf(d), want)
		}
		var names []string
		for _, g := range Gates(d, td, e, now) {
			if !g.Passed {
				names = append(names, g.Name)
			}
		}
		if got := strings.Join(names, " "); got != waits {
			t.Fatalf("in phase %s it waits for %q, not %q", want, got, waits)
		}
	}
	acknowledge := func() {
		e.Notes = nil
		for _, n := range serverNames {
			e.Notes = append(e.Notes, board.Note{Replica: n, Acknowledged: d.Version, Evidence: board.Evidence{Goal: domain(d).Goal()}})
		}
	}
	step(document.PhasePrepare, GateSuccessor)
	s := domain(d)
	s.Authorities, s.Rotation.ToRoot = append(s.Authorities, authority(document.KindRoot, "R2", "", document.StatePrepared)), "R2"
	s.Generation++
	step(document.PhaseDistribute, "successor replicas consumers")
	acknowledge()
	step(document.PhaseDistribute, GateSuccessor)
	s = domain(d)
	s.Authorities, s.Rotation.ToIssuer = append(s.Authorities, authority(document.KindIssuer, "I2", "R2", document.StatePrepared)), "I2"
	s.Generation++
	step(document.PhaseDistribute, "replicas consumers") // all must hold the issuer, and have its CRL
	acknowledge()
	step(document.PhaseActivate, GateReplicas)
	if err := Rollback(d.Clone(), td, "admin", now); err == nil || !strings.Contains(err.Error(), "plugged-in files") {
		t.Error(err)
	}
	acknowledge()
	step(document.PhaseReissue, "consumers wait files")
	acknowledge()
	now = now.Add(time.Hour)
	step(document.PhaseReissue, GateFiles)
	e.Files = []string{"R2"}
	step(document.PhaseRetire, "replicas consumers")
	acknowledge()
	step("none", "")
	if s := domain(d); s.Get(document.KindRoot, "R1") != nil || s.Get(document.KindIssuer, "I1") != nil || len(s.Past) != 1 || s.Past[0].Outcome != OutcomeDone {
		t.Errorf("%+v", s)
	}
}

// TestAnIssuerThatEndsSoonIsFollowedWithoutEvidence: nothing signed at all is worse.
func TestAnIssuerThatEndsSoonIsFollowedWithoutEvidence(t *testing.T) {
	made := must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, IssuerTTL: 60 * time.Hour, LogID: ca.MinLogID, Log: must(audit.Open(filepath.Join(t.TempDir(), "log")))}))
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	d := document.New()
	d.Logs[0].Replica = "a"
	for _, err := range []error{d.Add(td, document.KindRoot, document.Key{Signer: made.RootKey}, sealer, made.Root), d.Add(td, document.KindIssuer, document.Key{Signer: made.IssuerKey}, sealer, made.Issuer)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := Start(d, td, Request{Kind: document.KindIssuer, Reason: document.ReasonPolicy, Actor: "policy", ID: "1"}, time.Now()); err != nil {
		t.Fatal(err)
	}
	add(d, Make{Under: domain(d).Authorities[0].ID})
	e := Evidence{LeafTTL: 24 * time.Hour}
	d, _ = Next(d, td, e, time.Now())
	if next, _ := Next(d, td, e, made.Issuer.NotAfter.Add(-11*time.Hour)); next != d {
		t.Fatal("it goes on though the issuer lives long enough")
	}
	next, actions := Next(d, td, e, made.Issuer.NotAfter.Add(-9*time.Hour))
	r := next.Rotating(td)
	if phaseOf(next) != "activate" || len(actions) != 2 || len(r.Overrides) != 2 || r.Overrides[0].Actor != "policy" || r.Overrides[0].Because == "" {
		t.Fatalf("%s, %v, %+v", phaseOf(next), actions, r)
	}
}

// TestD2SettledIsOlderThanWhoIsHere: a consumer that is connected to a live replica and says that it is behind is not settled by what
// another replica heard of it before; once the replica is declared dead, it is.
func TestD2SettledIsOlderThanWhoIsHere(t *testing.T) {
	now := epoch.Add(time.Hour)
	goal := document.Goal{Generation: 2}
	d := document.New()
	d.Logs = []document.LogState{{ID: 1 << 24, Replica: "a"}, {ID: 1<<24 + 1, Replica: "b"}}
	d.State(td).Rotation = &document.Rotation{ID: "r", Kind: document.KindIssuer, Phase: document.PhaseDistribute, Version: 1, Generation: 2}
	behind := board.Behind{Consumer: 7, Until: now.Add(time.Hour), Here: true}
	e := Evidence{Notes: []board.Note{
		{Replica: "a", Acknowledged: 1, Evidence: board.Evidence{Goal: goal, Behind: []board.Behind{behind}}},
		{Replica: "b", Acknowledged: 1, Evidence: board.Evidence{Goal: goal, Settled: []uint64{7}}},
	}}
	waits := func() int { return len(look(d, td, e, now).behind()) }
	if n := waits(); n != 1 {
		t.Errorf("%d are behind, want the one that says so", n)
	}
	if _, err := d.Forget("a", now); err != nil {
		t.Fatal(err)
	}
	if n := waits(); n != 0 {
		t.Errorf("%d are behind by the word of the dead, though another heard that they are not", n)
	}
}

// TestDriverThatIsBehindIsNamed: while nothing is made, it is said which server should, if that one is down or too old for the document.
func TestDriverThatIsBehindIsNamed(t *testing.T) {
	d := document.New()
	d.Logs = []document.LogState{{ID: 1 << 24, Replica: "a"}, {ID: 1<<24 + 1, Replica: "b"}}
	d.State(td).Rotation = &document.Rotation{ID: "r", Kind: document.KindRoot, Phase: document.PhasePrepare, Version: 5}
	d.Driver = &document.Driver{Replica: "a", Term: 1}
	for _, c := range []struct {
		notes []board.Note
		says  string
	}{
		{[]board.Note{{Replica: "b", Acknowledged: 5}}, "the new root is not made yet: replica a should make it, and has written no note"},
		{[]board.Note{{Replica: "a", Acknowledged: 4}}, "the new root is not made yet: replica a should make it, and works by version 4 of the document; this began with 5"},
		{[]board.Note{{Replica: "a", Acknowledged: 5}}, "the new root is not made yet"},
	} {
		g := Gates(d, td, Evidence{Notes: c.notes}, epoch)
		if len(g) != 1 || g[0].Passed || !slices.Equal(g[0].Waiting, []string{c.says}) {
			t.Errorf("%+v, want %q", g, c.says)
		}
	}
}
