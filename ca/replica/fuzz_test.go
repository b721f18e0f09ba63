package replica

import (
	"os"
	"path/filepath"
	"testing"

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
