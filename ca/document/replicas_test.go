package document

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/chancery-project/chancery/ca/keys"
)

// TestD9FollowsTellsLinesApart: a document knows the versions before it, whichever of them somebody saw last; one from another line
// does not pass, as long as it can know.
func TestD9FollowsTellsLinesApart(t *testing.T) {
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	line := func(d *Document, by string, n int) (all []*Document, hashes []string) {
		for range n {
			data := must(d.Encode(sealer))
			all, hashes = append(all, d), append(hashes, Hash(data))
			d = must(d.Next(data))
			d.By = by
		}
		return all, hashes
	}
	const n = 200
	all, hashes := line(New(), "a", n)
	forked, other := line(all[10], "b", n)
	for i, d := range all {
		for seen := range all {
			if got, want := d.Follows(uint64(seen+1), hashes[seen]), seen < i; got != want {
				t.Fatalf("version %d after %d: %v", i+1, seen+1, got)
			}
		}
		if len(d.Before) > maxBefore {
			t.Fatalf("it keeps %d hashes", len(d.Before))
		}
	}
	for k, d := range forked[1:] {
		version := uint64(k + 12)
		if d.Version != version {
			t.Fatal(d.Version, version)
		}
		for seen := uint64(12); seen < min(version, n+1); seen++ { // what the first line had
			known := version-seen <= maxBefore+1
			if d.Follows(seen, hashes[seen-1]) == known {
				t.Fatalf("version %d of another line after %d: %v", version, seen, !known)
			}
			if !d.Follows(seen, other[seen-11]) {
				t.Fatalf("version %d after its own %d does not follow", version, seen)
			}
		}
	}
	again := must(all[n-1].Reissue(0))
	for i, h := range hashes {
		if !again.Follows(uint64(i+1), h) {
			t.Errorf("what was restored does not follow version %d", i+1)
		}
	}
}

// TestD9ReissueIsAboveAllThatWasSeen: version, CRL numbers and generations, however often and from whichever backup.
func TestD9ReissueIsAboveAllThatWasSeen(t *testing.T) {
	d := New()
	d.Version = 57
	d.State(td).CRLNumber, d.State(td).Generation = 900, 3
	d.Driver = &Driver{"a", 4}
	var seen, number, generation uint64
	for i := range 3 {
		n := must(d.Reissue(seen)) // the same backup each time
		s := n.State(td)
		if n.Version <= max(seen, d.Version) || s.LastCRL().Number <= max(number, 900) || s.Generation <= max(generation, 3) || n.Driver != nil || n.Previous != "" {
			t.Errorf("restored %d times: version %d, CRL number %d, generation %d, %+v", i+1, n.Version, s.LastCRL().Number, s.Generation, n.Driver)
		}
		if n.Version>>32 != uint64(i+1) || n.Version&(1<<32-1) != 0 {
			t.Errorf("version %x is not the first of epoch %d", n.Version, i+1)
		}
		seen, number, generation = n.Version+1000, s.LastCRL().Number+1000, s.Generation+1000
	}
	for _, seen := range []uint64{1<<62 - 1, 1 << 63} {
		if _, err := d.Reissue(seen); err == nil {
			t.Errorf("above %x there is a version", seen)
		}
	}
	if d.Version != 57 || d.State(td).CRLNumber != 900 {
		t.Error("the document that was restored changed")
	}
}

func ExampleDocument_Own() {
	d := New()
	d.Logs = nil
	fmt.Println(d.Register("a", LogState{ID: 20000001, Key: "log a"}), d.Own("b", "log a").Replica, d.Own("b", ""))
	// Output: <nil> a <nil>
}
