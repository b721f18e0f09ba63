package rotate

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

var now = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func at(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(d)) }

// full is a status in which every field is set; what others wrote tries to steer a terminal.
func full() *chanceryv1.RotationStatus {
	return &chanceryv1.RotationStatus{
		TrustDomain: "cluster.local", Version: 17, Time: timestamppb.New(now),
		Rotation: &chanceryv1.Rotation{
			Id: "1a2b3c4d5e6f7081", Kind: "root", Reason: "asked", Actor: "unix:alice", FromRoot: "aa01", FromIssuer: "aa02", ToRoot: "bb01", ToIssuer: "bb02",
			Started: at(-time.Minute), Phase: "distribute", Since: at(-12 * time.Second), PhaseEstimate: durationpb.New(time.Hour), Latest: at(2 * time.Hour),
			Gates: []*chanceryv1.Gate{
				{Name: "replicas", Passed: true, Have: 2, Want: 2},
				{Name: "consumers", Have: 2, Want: 5, Waiting: []string{"spiffe://cluster.local/ns/foo/sa/web: \x1b[2Jrejected it"}, Until: at(50 * time.Minute)},
				{Name: "readers", Until: at(25 * time.Minute)},
				{Name: "stragglers", Passed: true, Overridden: true},
			},
			Overrides: []*chanceryv1.RotationOverride{{Gate: "stragglers", Phase: "distribute", Because: "gone\x1b[1m", Actor: "unix:bob", Time: at(-time.Second)}},
			Trouble:   "the store\nis away",
		},
		Past: []*chanceryv1.Rotation{{Id: "0000000000000002", Kind: "issuer", Reason: "policy", Started: at(-2 * time.Hour), Ended: at(-time.Hour), Outcome: "done"}},
	}
}

// TestEveryFieldIsSaid, and no text of others steers the terminal.
func TestEveryFieldIsSaid(t *testing.T) {
	var out bytes.Buffer
	if err := printStatus(&out, "text", full()); err != nil {
		t.Fatal(err)
	}
	want := `Rotation 1a2b3c4d5e6f7081 of the root, started by unix:alice, 1 min 0 s ago
from root aa01 and issuer aa02
to   root bb01 and issuer bb02
  done  prepare
  now   distribute, for 12 s; estimated: at most 1 h 0 min
          replicas    [####################] 2 of 2  passed
          consumers   [########------------] 2 of 5  waits, 50 min 0 s at the most
            - spiffe://cluster.local/ns/foo/sa/web: ` + "\uFFFD" + `[2Jrejected it
          readers                             waits, 25 min 0 s at the most
          stragglers                          OVERRIDDEN
  later activate
  later reissue
  later retire
TROUBLE: the store; is away
overridden: gate stragglers of distribute, by unix:bob at 2026-11-30T11:59:59Z: gone` + "\uFFFD" + `[1m
elapsed 1 min 0 s; it ends in 2 h 0 min at the latest, at 2026-11-30T14:00:00Z, unless somebody pauses it
Rotation 0000000000000002 of the issuer, started by policy: done at 2026-11-30T11:00:00Z, after 1 h 0 min.
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
	out.Reset()
	if err := printStatus(&out, "json", full()); err != nil {
		t.Fatal(err)
	}
	var got statusJSON
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	x := got.Rotation
	if got.Version != 17 || x.Latest.Sub(now) != 2*time.Hour || *x.PhaseEstimate != 3600 || x.Gates[1].Want != 5 || !x.Gates[3].Overridden || x.Overrides[0].Actor != "unix:bob" || x.Trouble == "" ||
		got.Past[0].Outcome != "done" || x.ToIssuer != "bb02" || len(x.Gates[1].Waiting) != 1 || x.Gates[0].Waiting == nil {
		t.Errorf("%s", out.String())
	}
}

// TestWhatElseIsSaid: a pause, a rollback, an end that cannot be told, and nothing at all.
func TestWhatElseIsSaid(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*chanceryv1.RotationStatus)
		want   []string
		not    string
	}{
		"paused": {func(r *chanceryv1.RotationStatus) {
			r.Rotation.Paused, r.Rotation.PausedBy = at(-time.Hour), "unix:eve\x1b"
		},
			[]string{"PAUSED by unix:eve\uFFFD, 1 h 0 min ago: no gate passes until `chancery rotate resume`", "it does not end while it is paused"}, "at the latest"},
		"rolled back": {func(r *chanceryv1.RotationStatus) { r.Rotation.Back, r.Rotation.Phase = true, "reissue" },
			[]string{"ROLLED BACK", "  done  activate\n  now   reissue", "  later retire"}, "prepare"},
		"unknown end":    {func(r *chanceryv1.RotationStatus) { r.Rotation.Latest = nil }, []string{"when it ends cannot be told"}, "at the latest"},
		"compromised":    {func(r *chanceryv1.RotationStatus) { r.Rotation.Reason = "compromised" }, []string{"of the root, COMPROMISED, started by unix:alice"}, "policy, 1"},
		"files":          {func(r *chanceryv1.RotationStatus) { r.Rotation.Reason = "files" }, []string{"started by a change of plugged-in files"}, "unix:alice"},
		"issuer":         {func(r *chanceryv1.RotationStatus) { r.Rotation.Kind = "issuer" }, []string{"  later reissue\n"}, "retire"},
		"none under way": {func(r *chanceryv1.RotationStatus) { r.Rotation = nil }, []string{"No rotation is under way.\nRotation 0000000000000002"}, "from root"},
		"never any":      {func(r *chanceryv1.RotationStatus) { r.Rotation, r.Past = nil, nil }, []string{"No rotation is under way.\n"}, "Rotation"},
		"overrides": {func(r *chanceryv1.RotationStatus) {
			r.Past[0].Outcome, r.Past[0].Overrides = "rolled back", append(r.Rotation.Overrides, r.Rotation.Overrides...)
		}, []string{"rolled back at 2026-11-30T11:00:00Z, after 1 h 0 min. 2 gates were overridden."}, "policy: done"},
	} {
		r := full()
		c.change(r)
		var out bytes.Buffer
		if err := printStatus(&out, "text", r); err != nil {
			t.Fatal(err)
		}
		for _, want := range c.want {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s: it does not say %q:\n%s", name, want, out.String())
			}
		}
		if strings.Contains(out.String(), c.not) {
			t.Errorf("%s: it says %q:\n%s", name, c.not, out.String())
		}
	}
}

// moving is a migration in phase issue.
func moving() *chanceryv1.RotationStatus {
	r := full()
	x := r.Rotation
	x.FromDomain, x.ToDomain, x.Share, x.Namespaces, x.Phase = "old.example", "new.example", 50, []string{"web", "shop"}, "issue"
	x.Gates, x.Overrides, x.Trouble, x.Latest, x.PhaseEstimate = []*chanceryv1.Gate{{Name: "share", Have: 50, Want: 100, Waiting: []string{"50 of them"}}}, nil, "", nil, nil
	r.Former = []*chanceryv1.FormerUse{
		{Kind: "presents", Who: "web-1\x1b", Detail: "has a certificate of it", Count: 7}, {Kind: "presents", Who: "web-2", Detail: "likewise", Count: 7},
		{Kind: "federates", Who: "other.example", Detail: "tell them"},
	}
	return r
}

// TestAMigrationIsSaid: which domains, who has the new one, and who still presents the old; by the names of its own phases and commands.
func TestAMigrationIsSaid(t *testing.T) {
	said := func(r *chanceryv1.RotationStatus) string {
		var out bytes.Buffer
		if err := printStatus(&out, "text", r); err != nil {
			t.Fatal(err)
		}
		text, _, _ := strings.Cut(out.String(), "Rotation 0000000000000002")
		return text
	}
	want := `Migration 1a2b3c4d5e6f7081 from old.example to new.example, started by unix:alice, 1 min 0 s ago
from root aa01 and issuer aa02
to   root bb01 and issuer bb02
new domain: given to namespaces web, shop, and to 50 of 100 identities of all others
  done  accept: prepare
  done  accept: distribute
  now   issue, for 12 s
          share       [##########----------] 50 of 100  waits
            - 50 of them
  later only: activate
  later only: reissue
  later retire
still presents old.example (7 in all):
    - web-1` + "\uFFFD" + `: has a certificate of it
    - web-2: likewise
still federates old.example:
    - other.example: tell them
elapsed 1 min 0 s; when it ends cannot be told
`
	if got := said(moving()); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	for want, change := range map[string]func(x *chanceryv1.Rotation){
		"given to 50 of 100 identities\n":                       func(x *chanceryv1.Rotation) { x.Namespaces = nil },
		"given to namespaces web, shop\n":                       func(x *chanceryv1.Rotation) { x.Share = 0 },
		"given to all\n":                                        func(x *chanceryv1.Rotation) { x.Phase = "reissue" },
		"given to nobody before":                                func(x *chanceryv1.Rotation) { x.Phase = "distribute" },
		"gate passes until `chancery trust migrate resume`":     func(x *chanceryv1.Rotation) { x.Paused = at(0) },
		"from new.example to old.example, started by":           func(x *chanceryv1.Rotation) { x.Back = true },
		"ROLLED BACK: what it had brought is taken out again\n": func(x *chanceryv1.Rotation) { x.Back, x.Phase = true, "activate" },
	} {
		r := moving()
		change(r.Rotation)
		if got := said(r); !strings.Contains(got, want) {
			t.Errorf("it does not say %q:\n%s", want, got)
		}
	}
	var out bytes.Buffer
	r := moving()
	r.Past, r.Rotation = []*chanceryv1.Rotation{r.Rotation}, nil
	r.Past[0].Outcome, r.Past[0].Ended = "done", at(0)
	w := watcher{name: "trust migrate", out: &out, id: r.Past[0].Id}
	if ended, err := w.show(statusOf(r)); !ended || err != nil || !strings.Contains(out.String(), "set trustDomain to new.example") {
		t.Errorf("%t, %v: %s", ended, err, out.String())
	}
	q := &chanceryv1.StartRotationRequest{Kind: "root", ToDomain: "new.example", Share: new(uint32(0)), Namespaces: []string{"a", "b"}}
	if got := startOf(q); got != "chancery trust migrate start --to new.example --share 0 --namespace a --namespace b" {
		t.Error(got)
	}
}

// TestCommandsForMigrations change no other rotation; those for rotations change both.
func TestCommandsForMigrations(t *testing.T) {
	for _, c := range []struct {
		name string
		of   *chanceryv1.RotationStatus
		want string
	}{
		{"rotate", full(), ""}, {"rotate", moving(), ""}, {"trust migrate", moving(), ""}, {"trust migrate", &chanceryv1.RotationStatus{}, ""},
		{"trust migrate", full(), "no migration is under way, but rotation 1a2b3c4d5e6f7081 of the root, in phase distribute: see `chancery rotate status`"},
	} {
		if err := NewAsker(c.name, "").isAbout(c.of.GetRotation()); (err == nil) != (c.want == "") || err != nil && err.Error() != c.want {
			t.Errorf("%s: %v; want %q", c.name, err, c.want)
		}
	}
}

func TestPlanIsSaid(t *testing.T) {
	q := &chanceryv1.StartRotationRequest{Kind: "root", Reason: "compromised"}
	r := &chanceryv1.PlanRotationResponse{
		FromRoot: "aa01", FromIssuer: "aa02", Notes: []string{"readers\x1b cannot acknowledge"},
		Phases: []*chanceryv1.PlannedPhase{
			{Phase: "prepare", Does: "makes a root"},
			{Phase: "distribute", Does: "hands it out", WaitsFor: []string{"replicas: all", "consumers: all"}, Least: durationpb.New(time.Second), Most: durationpb.New(time.Hour)},
			{Phase: "activate", Does: "signs with it", Most: durationpb.New(time.Minute)},
		},
	}
	var out bytes.Buffer
	if err := printPlan(&out, "text", " -c server.yaml", q, r); err != nil {
		t.Fatal(err)
	}
	want := `A rotation of the root would replace root aa01 and issuer aa02. Nothing has been changed.
1. prepare     makes a root
   takes:      a moment
2. distribute  hands it out
   takes:      1 s to 1 h 0 min
   waits for:  replicas: all
   waits for:  consumers: all
3. activate    signs with it
   takes:      at most 1 min 0 s
In all: 1 s to 1 h 1 min, if nobody pauses it and nobody stays behind for longer than a certificate lives.
Note: readers` + "\uFFFD" + ` cannot acknowledge
Start it with ` + "`chancery rotate start --root --reason compromised -c server.yaml`" + `.
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
	out.Reset()
	if err := printPlan(&out, "json", "", q, r); err != nil {
		t.Fatal(err)
	}
	var p planJSON
	if err := json.Unmarshal(out.Bytes(), &p); err != nil || p.Most != 3660 || p.Least != 1 || len(p.Phases) != 3 || p.Phases[1].WaitsFor[1] != "consumers: all" || p.Notes[0] == "" {
		t.Errorf("%v: %s", err, out.String())
	}
}

// statuses are what a server says one after the other: under way, a gate further, the clock alone, and the end.
func statuses(outcome string) []statusJSON {
	first, second, third, last := full(), full(), full(), full()
	second.Rotation.Gates[1].Have = 3
	third.Rotation.Gates[1].Have = 3
	third.Time, third.Rotation.Latest = at(time.Second), at(3*time.Hour)
	ended := last.Rotation
	ended.Ended, ended.Outcome, ended.Gates = at(time.Minute), outcome, nil
	last.Rotation, last.Past = nil, append([]*chanceryv1.Rotation{ended}, last.Past...)
	var all []statusJSON
	for _, r := range []*chanceryv1.RotationStatus{first, second, third, last} {
		all = append(all, statusOf(r))
	}
	return all
}

// TestWatchEnds: with 0 if the rotation was done, with 2 if it was taken back; a line for each change.
func TestWatchEnds(t *testing.T) {
	for outcome, code := range map[string]int{"done": 0, "aborted": 2, "rolled back": 2} {
		for _, format := range []string{"text", "json"} {
			var out bytes.Buffer
			w := &watcher{format: format, out: &out}
			for i, s := range statuses(outcome) {
				ended, err := w.show(s)
				if ended != (i == 3) {
					t.Fatalf("status %d: ended %t, %v", i, ended, err)
				}
				e, failed := errors.AsType[*process.ExitError](err)
				if failed != (ended && code != 0) || failed && e.Code != code || !failed && err != nil {
					t.Errorf("%s: %v", outcome, err)
				}
			}
			all := strings.Split(strings.TrimSpace(out.String()), "\n")
			if len(all) != 3 {
				t.Fatalf("%s: %d lines, want the first, the change and the end:\n%s", format, len(all), out.String())
			}
			for _, line := range all {
				if format == "json" && !json.Valid([]byte(line)) {
					t.Errorf("no object: %s", line)
				}
			}
			if format == "text" && (!strings.Contains(all[0], "consumers waits (2 of 5): ") || !strings.HasPrefix(all[1], "2026-11-30T12:00:00Z  rotation 1a2b3c4d5e6f7081 of the root, phase distribute, replicas passed (2 of 2), consumers waits (3 of 5)") ||
				!strings.Contains(all[2], outcome+" at ")) {
				t.Errorf("%s", out.String())
			}
		}
	}
}

// TestWatchOfOneThatIsOver: none under way ends at once, as the last one did; one that is followed is not mistaken for the next.
func TestWatchOfOneThatIsOver(t *testing.T) {
	all := statuses("aborted")
	w := &watcher{format: "text", out: t.Output()}
	if ended, err := w.show(all[3]); !ended || err == nil || !strings.Contains(err.Error(), "rotation 1a2b3c4d5e6f7081 was aborted") {
		t.Errorf("%t, %v", ended, err)
	}
	moved := all[3].Past[0]
	moved.FromDomain, moved.ToDomain = "old.example", "new.example"
	w = &watcher{format: "text", out: t.Output()}
	if ended, err := w.show(statusJSON{Past: []rotationJSON{moved}}); !ended || err == nil || !strings.Contains(err.Error(), "migration 1a2b3c4d5e6f7081 was aborted") {
		t.Errorf("%t, %v", ended, err)
	}
	w = &watcher{format: "text", out: t.Output()}
	if ended, err := w.show(statusJSON{}); !ended || err != nil {
		t.Errorf("%t, %v", ended, err)
	}
	next := all[0]
	other := *next.Rotation
	other.ID = "ffffffffffffffff"
	next.Rotation, next.Past = &other, all[3].Past
	w = &watcher{format: "text", out: t.Output(), id: "1a2b3c4d5e6f7081"}
	if ended, err := w.show(next); !ended || err == nil || !strings.Contains(err.Error(), "was aborted") {
		t.Errorf("the next one is under way: %t, %v", ended, err)
	}
	next.Past = nil
	if ended, err := w.show(next); !ended || err == nil || !strings.Contains(err.Error(), "does not know how") {
		t.Errorf("forgotten: %t, %v", ended, err)
	}
}

// TestScreenDrawsOverItself: each table takes the place of the one before, whatever the lengths.
func TestScreenDrawsOverItself(t *testing.T) {
	var out bytes.Buffer
	s := &screen{out: &out, size: func() (int, int) { return 20, 6 }}
	draw := func(l ...string) string {
		out.Reset()
		if err := s.draw(l); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	if got := draw("a", strings.Repeat("é", 21)); got != "\ra\x1b[K\n\r"+strings.Repeat("é", 20)+"\x1b[K\n\r    é\x1b[K\n\x1b[J" {
		t.Errorf("%q", got)
	}
	if got := draw("b"); got != "\x1b[3A\rb\x1b[K\n\x1b[J" {
		t.Errorf("%q", got)
	}
	if got := draw("1", "2", "3", "4", "5", strings.Repeat("6", 21), "7"); !strings.HasPrefix(got, "\x1b[1A\r1\x1b[K\n") || !strings.Contains(got, "... and 3 more line…") || s.rows != 5 {
		t.Errorf("%q, %d rows", got, s.rows)
	}
	w := &watcher{format: "text", screen: s}
	s.drawn = lines{"table"}
	for range 3 {
		if err := w.silent(errors.New("gone")); err != nil || !slices.Equal(s.drawn, lines{"table"}) || s.rows != 3 {
			t.Errorf("%v: %q, %d rows", err, s.drawn, s.rows)
		}
	}
}
