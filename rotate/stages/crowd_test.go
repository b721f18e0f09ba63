package stages

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
)

// crowd is a rotation that waits for ten thousand consumers of its replicas, some of which have words.
func crowd(t testing.TB) (*document.Document, Evidence, time.Time) {
	t.Helper()
	w := &world{start: root(), consumer: onlyC}
	s := w.first()
	_ = s.begin("root")
	for range 20 {
		if phaseOf(s.doc) == string(document.PhaseDistribute) {
			break
		}
		s = w.calm(s)
	}
	now := epoch.Add(time.Hour)
	e := Evidence{LeafTTL: time.Hour}
	for _, l := range s.doc.Live() {
		n := board.Note{Replica: l.Replica, Acknowledged: s.doc.Version, Evidence: board.Evidence{Goal: s.doc.Domains[td.String()].Goal(), Total: 10_000}}
		for i := range 10_000 {
			n.Evidence.Behind = append(n.Evidence.Behind, board.Behind{Consumer: uint64(i), Until: now.Add(time.Hour + time.Duration((i+5000)%10_000)*time.Second)})
		}
		for i := range 3 {
			n.Evidence.Sample = append(n.Evidence.Sample, board.Laggard{Consumer: uint64(i), Name: fmt.Sprint("agent ", i), Why: "silent"})
		}
		e.Notes = append(e.Notes, n)
	}
	return s.doc, e, now
}

// BenchmarkLook is what the driver does each second.
func BenchmarkLook(b *testing.B) {
	d, e, now := crowd(b)
	b.ReportAllocs()
	for b.Loop() {
		Gates(d, td, e, now)
		if next, _ := Next(d, td, e, now); phaseOf(next) != string(document.PhaseDistribute) {
			b.Fatal(phaseOf(next))
		}
	}
}

// TestACrowdHasFewWords: those with words are named first, then who counts for the least time, and how many more there are. Nobody makes
// words for ten thousand each second.
func TestACrowdHasFewWords(t *testing.T) {
	d, e, now := crowd(t)
	gates := Gates(d, td, e, now)
	i := slices.IndexFunc(gates, func(g Gate) bool { return g.Name == GateConsumers })
	g := gates[i]
	if len(g.Waiting) != maxWaiting+1 || g.Want-g.Have != 10_000 || g.Waiting[maxWaiting] != fmt.Sprintf("and %d more", 10_000-maxWaiting) {
		t.Fatalf("%d words, %d of %d: %q", len(g.Waiting), g.Have, g.Want, g.Waiting)
	}
	for i, words := range g.Waiting[:maxWaiting] {
		want := fmt.Sprintf("agent %d: silent (", i)
		if i >= 3 {
			want = fmt.Sprintf("consumer %016x (", 5000+i-3)
		}
		if !strings.HasPrefix(words, want) {
			t.Errorf("%d. is %q; want %q", i, words, want)
		}
	}
	if n := testing.AllocsPerRun(3, func() { Gates(d, td, e, now) }); n > 1000 {
		t.Errorf("a look makes %.0f allocations", n)
	}
}

// TestD2CutOffReplicaSignsBeyondItsNote: one that was cut off for long before it was declared dead has signed until then, for as long as
// its certificates live: that its last note's time has passed says nothing.
func TestD2CutOffReplicaSignsBeyondItsNote(t *testing.T) {
	d, e, now := crowd(t)
	e.LeafTTL = 24 * time.Hour
	d = d.Clone()
	dead := now.Add(-10 * time.Minute)
	d.Logs[0].DeclaredDead = &dead
	n := &e.Notes[slices.IndexFunc(e.Notes, func(n board.Note) bool { return n.Replica == d.Logs[0].Replica })]
	n.Acknowledged, n.Seen = 0, now.Add(-30*time.Hour)
	for _, life := range []time.Duration{time.Hour, 12 * time.Hour} {
		n.Evidence.Ahead = n.Seen.Add(life)
		v := look(d, td, e, now)
		if v.now = dead.Add(life); v.stragglers().Name == "" {
			t.Errorf("with certificates of %s it is not waited for that long", life)
		}
		if v.now = dead.Add(life + settled + 2*skew); v.stragglers().Name != "" {
			t.Errorf("with certificates of %s: %+v", life, v.stragglers())
		}
	}
}
