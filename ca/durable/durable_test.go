package durable_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
)

// eachFault runs work on a folder with a file "f" that says "old": without a fault, with each step failing in each way, and with a
// crash after each step. check is given what is left, and whether the work said that it was done.
func eachFault(t *testing.T, work func(dir string) error, check func(t *testing.T, name, dir string, ended bool, err error)) {
	t.Helper()
	begin := func(t *testing.T) (string, *durabletest.Disk) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "f"), []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		return dir, durabletest.Watch(t, dir)
	}
	one := func(t *testing.T, n int, mode durabletest.Mode) int {
		dir, d := begin(t)
		d.FailAt(n, mode)
		err := work(dir)
		check(t, fmt.Sprintf("%s (%v)", d.Failed(), err), d.Copy(), !d.Dead(), err)
		return d.Steps()
	}
	total := one(t, -1, "")
	for n := range total {
		for _, mode := range durabletest.Modes {
			t.Run(fmt.Sprint(n, " ", mode), func(t *testing.T) { one(t, n, mode) })
		}
	}
	dir, d := begin(t)
	if err := work(dir); err != nil {
		t.Fatal(err)
	}
	d.Mark("done")
	d.Crashes(1, func(_ bool, left *durabletest.Left) { check(t, left.String(), left.Dir, len(left.Marks) > 0, nil) })
}

func content(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return string(data)
}

func TestReplaceIsTheOldOneOrTheNewOne(t *testing.T) {
	eachFault(t, func(dir string) error { return durable.Replace(filepath.Join(dir, "f"), []byte("new one"), 0o600) },
		func(t *testing.T, name, dir string, ended bool, err error) {
			switch got := content(t, filepath.Join(dir, "f")); {
			case got != "old" && got != "new one":
				t.Errorf("%s: %q", name, got)
			case got == "old" && ended && err == nil:
				t.Errorf("%s: it says that it is done", name)
			}
			if err := durable.Replace(filepath.Join(dir, "f"), []byte("again"), 0o600); err != nil {
				t.Errorf("%s: the next one: %v", name, err)
			}
		})
}

func TestPlaceIsWholeAndReplacesNothing(t *testing.T) {
	eachFault(t, func(dir string) error { return durable.Place(filepath.Join(dir, "g"), []byte("new one"), 0o600) },
		func(t *testing.T, name, dir string, ended bool, err error) {
			switch got := content(t, filepath.Join(dir, "g")); {
			case got != "" && got != "new one":
				t.Errorf("%s: %q", name, got)
			case got == "" && ended && err == nil:
				t.Errorf("%s: it says that it is done", name)
			}
			if err := durable.Place(filepath.Join(dir, "f"), []byte("new"), 0o600); !errors.Is(err, fs.ErrExist) || content(t, filepath.Join(dir, "f")) != "old" {
				t.Errorf("%s: over a file that is there: %v", name, err)
			}
		})
}

func TestFoldersAreDurable(t *testing.T) {
	eachFault(t, func(dir string) error {
		if err := durable.MakeDirs(filepath.Join(dir, "a", "b")); err != nil {
			return err
		}
		return durable.Replace(filepath.Join(dir, "a", "b", "f"), []byte("x"), 0o600)
	}, func(t *testing.T, name, dir string, ended bool, err error) {
		if got := content(t, filepath.Join(dir, "a", "b", "f")); ended && err == nil && got != "x" {
			t.Errorf("%s: %q", name, got)
		}
		if err := durable.MakeDirs(filepath.Join(dir, "a", "b")); err != nil {
			t.Errorf("%s: a second time: %v", name, err)
		}
	})
}

// TestModelFindsWhatIsNotSynced: the model of a failing machine finds the mistakes that it is there for.
func TestModelFindsWhatIsNotSynced(t *testing.T) {
	write := func(path string, sync bool) error {
		f, err := durable.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		_, err = f.Write([]byte("new one"))
		if sync && err == nil {
			err = f.Sync()
		}
		return errors.Join(err, f.Close())
	}
	for name, work := range map[string]func(path string) error{
		"content that is not synced": func(path string) error {
			return errors.Join(write(path+".new", false), durable.RenameFile(path+".new", path), durable.SyncDirectory(filepath.Dir(path)))
		},
		"a name that is not synced": func(path string) error {
			return errors.Join(write(path+".new", true), durable.RenameFile(path+".new", path))
		},
		"content in place": func(path string) error {
			f, err := durable.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0o600)
			if err != nil {
				return err
			}
			_, err = f.Write([]byte("new one"))
			return errors.Join(f.Empty(), err, f.Sync(), f.Close())
		},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "f")
		if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		d := durabletest.Watch(t, dir)
		if err := work(path); err != nil {
			t.Fatal(err)
		}
		d.Mark("done")
		found := false
		d.Crashes(1, func(_ bool, left *durabletest.Left) {
			got := content(t, filepath.Join(left.Dir, "f"))
			found = found || got != "old" && got != "new one" || len(left.Marks) > 0 && got != "new one"
		})
		if !found {
			t.Errorf("%s is not found", name)
		}
	}
}

// TestInjectConcernsItsFolderOnly: what one test does is no other's fault.
func TestInjectConcernsItsFolderOnly(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "ab")
	remove := durable.Inject(a, func(durable.Step, func(int) error) error { return durabletest.ErrInjected })
	if err := durable.MakeDirs(b); err != nil {
		t.Errorf("beside it: %v", err)
	}
	if err := durable.MakeDirs(a); !errors.Is(err, durabletest.ErrInjected) {
		t.Errorf("in it: %v", err)
	}
	remove()
	if err := durable.MakeDirs(a); err != nil {
		t.Errorf("after it: %v", err)
	}
}
