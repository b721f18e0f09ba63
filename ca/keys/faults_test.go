package keys_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/ca/keys"
)

// TestSealingKeyFaultsAtEachStep: after any fault or crash there is no sealing key, or the one whose maker was told so, and a
// second call makes one where there is none.
func TestSealingKeyFaultsAtEachStep(t *testing.T) {
	again := func(t *testing.T, name, path string, made *keys.Sealer) {
		t.Helper()
		have, err := keys.LoadSealer(path)
		switch {
		case errors.Is(err, fs.ErrNotExist) && made == nil:
			if have, err = keys.CreateSealer(path); err != nil {
				t.Fatalf("%s: making it a second time: %v", name, err)
			}
		case err != nil:
			t.Fatalf("%s: %v", name, err)
		}
		if made != nil && !have.CheckMAC([]byte("x"), made.MAC([]byte("x"))) {
			t.Errorf("%s: the file has another key than the one that was returned", name)
		}
	}
	one := func(t *testing.T, n int, mode durabletest.Mode) int {
		dir := t.TempDir()
		d := durabletest.Watch(t, dir)
		d.FailAt(n, mode)
		made, err := keys.CreateSealer(filepath.Join(dir, "state.key"))
		if (err == nil) != (made != nil) {
			t.Errorf("%v with a key: %v", err, made != nil)
		}
		again(t, d.Failed(), filepath.Join(d.Copy(), "state.key"), made)
		return d.Steps()
	}
	total := one(t, -1, "")
	if total < 6 {
		t.Errorf("only %d steps were seen", total)
	}
	for n := range total {
		for _, mode := range modes() {
			t.Run(fmt.Sprint(n, " ", mode), func(t *testing.T) { one(t, n, mode) })
		}
	}

	dir := t.TempDir()
	d := durabletest.Watch(t, dir)
	made, err := keys.CreateSealer(filepath.Join(dir, "state.key"))
	if err != nil {
		t.Fatal(err)
	}
	d.Mark(made)
	d.Crashes(1, func(_ bool, left *durabletest.Left) {
		var made *keys.Sealer
		if len(left.Marks) > 0 {
			made = left.Marks[0].(*keys.Sealer)
		}
		again(t, left.String(), filepath.Join(left.Dir, "state.key"), made)
	})
}

func modes() []durabletest.Mode {
	if testing.Short() {
		return []durabletest.Mode{durabletest.FailDone, durabletest.Crash}
	}
	return durabletest.Modes
}

// TestKeyFileFaultsAtEachStep: a key whose reference was returned opens, after any fault or crash, until Delete was called; a
// file that is there at all is whole.
func TestKeyFileFaultsAtEachStep(t *testing.T) {
	defer keys.SetWorkFactor(1)()
	pass := filepath.Join(t.TempDir(), "passphrase")
	write(t, pass, passphrase, 0o600)
	type told struct {
		made, gone string // references that Generate returned; that Delete was called for
	}
	work := func(dir string, tell func(told)) {
		f := openFiles(t, keys.FilesConfig{Dir: filepath.Join(dir, "keys"), PassphraseFile: pass})
		for i := range 3 {
			ref, err := f.Generate(t.Context(), ca.Ed25519)
			if err != nil {
				continue
			}
			tell(told{made: ref})
			if i == 1 {
				tell(told{gone: ref})
				if f.Delete(t.Context(), ref) == nil {
					tell(told{gone: ref + " done"})
				}
			}
		}
	}
	check := func(t *testing.T, name, dir string, all []told) {
		t.Helper()
		c := keys.FilesConfig{Dir: filepath.Join(dir, "keys"), PassphraseFile: pass}
		f := openFiles(t, c)
		gone := map[string]bool{}
		for _, x := range all {
			gone[x.gone] = true
		}
		for _, x := range all {
			if x.made == "" {
				continue
			}
			key, err := f.Open(t.Context(), x.made)
			switch {
			case err == nil && !gone[x.made+" done"]:
				if err := keys.Check(key); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			case err == nil:
				t.Errorf("%s: a deleted key opens", name)
			case !gone[x.made] || !errors.Is(err, keys.ErrNotFound):
				t.Errorf("%s: %v", name, err)
			}
		}
		files, err := filepath.Glob(filepath.Join(c.Dir, "*.age"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range files {
			if _, err := f.Open(t.Context(), "file:"+fileID(path)); err != nil {
				t.Errorf("%s: a file that is there: %v", name, err)
			}
		}
		if _, err := f.Generate(t.Context(), ca.Ed25519); err != nil {
			t.Errorf("%s: the next key: %v", name, err)
		}
	}
	one := func(t *testing.T, n int, mode durabletest.Mode) int {
		dir := t.TempDir()
		d := durabletest.Watch(t, dir)
		d.FailAt(n, mode)
		var all []told
		work(dir, func(x told) { all = append(all, x) })
		if !d.Dead() && len(all) == 0 {
			t.Errorf("%s: no key could be made after one fault", d.Failed())
		}
		check(t, d.Failed(), d.Copy(), all)
		return d.Steps()
	}
	total := one(t, -1, "")
	if total < 20 {
		t.Errorf("only %d steps were seen", total)
	}
	for n := range total {
		for _, mode := range modes() {
			t.Run(fmt.Sprint(n, " ", mode), func(t *testing.T) { one(t, n, mode) })
		}
	}

	dir := t.TempDir()
	d := durabletest.Watch(t, dir)
	work(dir, func(x told) { d.Mark(x) })
	d.Crashes(1, func(_ bool, left *durabletest.Left) {
		var all []told
		for _, m := range left.Marks {
			all = append(all, m.(told))
		}
		check(t, left.String(), left.Dir, all)
	})
}

func fileID(path string) string {
	name := filepath.Base(path)
	return name[:len(name)-len(filepath.Ext(name))]
}

// TestKeyFilesOnAFullDisk: what could not be written whole is not there, and the folder works once there is room.
func TestKeyFilesOnAFullDisk(t *testing.T) {
	defer keys.SetWorkFactor(1)()
	disk := durabletest.SmallDisk(t, 256<<10)
	pass := filepath.Join(t.TempDir(), "passphrase")
	write(t, pass, passphrase, 0o600)
	f := openFiles(t, keys.FilesConfig{Dir: filepath.Join(disk, "keys"), PassphraseFile: pass})
	if _, err := f.Generate(t.Context(), ca.P256); err != nil {
		t.Fatal(err)
	}
	remove := durabletest.Fill(t, disk)
	if ref, err := f.Generate(t.Context(), ca.P256); err == nil {
		t.Errorf("%s was made on a full disk", ref)
	}
	if _, err := keys.CreateSealer(filepath.Join(disk, "state.key")); err == nil {
		t.Error("a sealing key was made on a full disk")
	}
	remove()
	files, err := os.ReadDir(filepath.Join(disk, "keys"))
	if err != nil || len(files) != 1 {
		t.Errorf("%d files, %v", len(files), err)
	}
	if _, err := f.Generate(t.Context(), ca.P256); err != nil {
		t.Errorf("with room again: %v", err)
	}
	if _, err := keys.CreateSealer(filepath.Join(disk, "state.key")); err != nil {
		t.Errorf("with room again: %v", err)
	}
}
