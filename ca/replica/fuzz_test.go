package replica

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
)

// FuzzMark: whatever lies in the file, it is the mark that was written, or an error.
func FuzzMark(f *testing.F) {
	dir := f.TempDir()
	sealer := must(keys.CreateSealer(filepath.Join(dir, "key")))
	path := filepath.Join(dir, "state.mark")
	want := Mark{Version: 1<<32 + 7, Hash: "abcdef"}
	if err := WriteMark(path, td, sealer, want); err != nil {
		f.Fatal(err)
	}
	good := must(os.ReadFile(path))
	f.Add(good)
	f.Add([]byte(`{"format":1,"trustDomain":"cluster.local","version":1,"mac":""}`))
	f.Add([]byte(`{"format":2}`))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if m, err := ReadMark(path, td, sealer); err == nil && m != want {
			t.Errorf("%q was read as %+v", data, m)
		}
	})
}

// FuzzCarriedMark: of what agents bring, only the marks that were made count, and each for what it says.
func FuzzCarriedMark(f *testing.F) {
	sealer := must(keys.CreateSealer(filepath.Join(f.TempDir(), "key")))
	newHold := func() *Hold {
		h := &Hold{config: Config{Domain: td, Sealer: sealer, Logger: slog.New(slog.DiscardHandler)}, wake: make(chan struct{}, 1)}
		doc := document.New()
		doc.Version = 5
		h.snapshot.Store(doc)
		return h
	}
	made := map[[2]uint64][]byte{}
	for _, m := range [][2]uint64{{7, 0}, {9, 8}, {9, 4}, {3, 2}} {
		made[m] = sealer.MAC(newHold().markText(m[0], m[1]))
		f.Add(m[0], m[1], made[m])
	}
	f.Add(uint64(9), uint64(0), made[[2]uint64{9, 8}])
	f.Add(uint64(0), uint64(0), []byte{})
	f.Fuzz(func(t *testing.T, version, tainted uint64, mac []byte) {
		h := newHold()
		taken := h.CheckMark(version, tainted, mac) == nil
		if want := bytes.Equal(mac, made[[2]uint64{version, tainted}]) && len(mac) > 0; taken != want {
			t.Fatalf("version %d, tainted %d, %x: taken %v", version, tainted, mac, taken)
		}
		if stops := h.MaySign() != nil; stops != (taken && tainted > 5) {
			t.Errorf("version %d, tainted %d: it stops: %v", version, tainted, stops)
		}
	})
}
