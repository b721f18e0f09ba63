package document

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/keys"
)

// TestD9RestoredIsAboveAllThatWasSeen: what was restored has a version, CRL numbers and bundle generations that nobody can take
// for a step back; also if the same export is restored a second time, after the numbers have moved on.
func TestD9RestoredIsAboveAllThatWasSeen(t *testing.T) {
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	d := New()
	d.Version = 7
	d.Logs = append(d.Logs, LogState{ID: 1 << 25, Replica: "ca-2", DeclaredDead: &time.Time{}})
	d.State(td).Generation, d.State(td).CRL = 3, &CRL{Number: 12, Content: "ab"}
	by := Import{Time: time.Now().UTC(), Actor: "alice (unix:root)", Exported: time.Now().Add(-time.Hour).UTC()}

	first, err := d.ReissueBy(9, by)
	if err != nil {
		t.Fatal(err)
	}
	if first.Version != 1<<32 || first.State(td).Generation != 3+1<<16 || first.State(td).LastCRL().Number != 12+1<<32 {
		t.Errorf("%+v %+v", first, first.State(td))
	}
	if first.Imported == nil || first.Imported.Version != 7 || first.Imported.Actor != by.Actor {
		t.Errorf("it does not say who restored what: %+v", first.Imported)
	}
	if len(first.Logs) != 2 || len(first.Live()) != 1 {
		t.Errorf("replicas are not listed as they were: %+v", first.Logs)
	}
	if d.Version != 7 || d.Imported != nil || d.State(td).Generation != 3 {
		t.Error("what was restored from was changed")
	}
	if back, err := Decode(must(first.Encode(sealer)), 1<<32, sealer); err != nil || back.Imported == nil {
		t.Errorf("it does not survive being written: %v", err)
	}
	first.Version += 40
	first.State(td).Generation += 5
	first.State(td).CRL = &CRL{Number: first.State(td).LastCRL().Number + 1000}
	second, err := d.ReissueBy(first.Version, by)
	if err != nil {
		t.Fatal(err)
	}
	if second.Version != 2<<32 || second.State(td).Generation <= first.State(td).Generation || second.State(td).LastCRL().Number <= first.State(td).LastCRL().Number {
		t.Errorf("the second time: %+v %+v after %+v %+v", second, second.State(td), first, first.State(td))
	}

	for _, c := range []struct {
		seen  uint64
		actor string
		want  string
	}{
		{1 << 62, "a", "no epoch after it"}, {1, "", "1 to 256"}, {1, strings.Repeat("a", 257), "1 to 256"},
	} {
		if _, err := d.ReissueBy(c.seen, Import{Actor: c.actor}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%d, %.5q: %v", c.seen, c.actor, err)
		}
	}
	if _, err := d.ReissueBy((1<<30-2)<<32|5, by); err != nil { // the last one that a store takes
		t.Error(err)
	}
}
