package svid

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

func set(text string) map[string][]byte {
	return map[string][]byte{"svid.pem": []byte("svid " + text), "svid_key.pem": []byte("key " + text), "bundle.pem": []byte("bundle " + text)}
}

// checkSet fails the test unless readers of the folder see the whole of one set.
func checkSet(t *testing.T, dir, text string) {
	t.Helper()
	for name, want := range set(text) {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || string(got) != string(want) {
			t.Errorf("%s holds %q (%v), want %q", name, got, err, want)
		}
	}
}

func countSets(t *testing.T, dir string) int {
	t.Helper()
	sets, err := filepath.Glob(filepath.Join(dir, setPrefix+"*"))
	if err != nil {
		t.Fatal(err)
	}
	return len(sets)
}

// TestWriteSetModes: whatever the umask, nobody else can read the key, and the owner can.
func TestWriteSetModes(t *testing.T) {
	for _, mask := range []int{0, 0o022, 0o277} {
		dir := filepath.Join(t.TempDir(), "out")
		old := syscall.Umask(mask)
		err := writeSet(dir, set("a"))
		syscall.Umask(old)
		if err != nil {
			t.Fatalf("umask %04o: %v", mask, err)
		}
		checkSet(t, dir, "a")
		for path, want := range map[string]os.FileMode{
			dir: 0o700, filepath.Join(dir, current): 0o700,
			filepath.Join(dir, "svid.pem"): 0o600, filepath.Join(dir, "svid_key.pem"): 0o600, filepath.Join(dir, "bundle.pem"): 0o600,
		} {
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
				t.Errorf("umask %04o: %s has mode %v (%v), want %04o", mask, path, info.Mode(), err, want)
			}
		}
	}
}

// TestWriteSetCrash stops after each step of a replacement: readers have the old set until the link is swapped, and
// the new one from then on, and the next call cleans up.
func TestWriteSetCrash(t *testing.T) {
	for _, c := range []struct {
		name  string
		crash func(t *testing.T, dir string)
		now   string
	}{
		{"folder made", func(t *testing.T, dir string) {
			if err := os.Mkdir(filepath.Join(dir, setPrefix+"half"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, "old"},
		{"one file written", func(t *testing.T, dir string) {
			half := filepath.Join(dir, setPrefix+"half")
			if err := os.Mkdir(half, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := writeSynced(filepath.Join(half, "svid.pem"), []byte("svid n")); err != nil {
				t.Fatal(err)
			}
		}, "old"},
		{"all files written", func(t *testing.T, dir string) {
			if _, err := newSet(dir, set("new")); err != nil {
				t.Fatal(err)
			}
		}, "old"},
		{"link made", func(t *testing.T, dir string) {
			name, err := newSet(dir, set("new"))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(name, filepath.Join(dir, current+".new")); err != nil {
				t.Fatal(err)
			}
		}, "old"},
		{"link swapped", func(t *testing.T, dir string) {
			name, err := newSet(dir, set("new"))
			if err != nil {
				t.Fatal(err)
			}
			if err := swapLink(name, filepath.Join(dir, current)); err != nil {
				t.Fatal(err)
			}
		}, "new"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := writeSet(dir, set("old")); err != nil {
				t.Fatal(err)
			}
			c.crash(t, dir)
			checkSet(t, dir, c.now)
			if err := writeSet(dir, set("next")); err != nil {
				t.Fatal(err)
			}
			checkSet(t, dir, "next")
			if n := countSets(t, dir); n != 1 {
				t.Errorf("%d sets are left", n)
			}
			if _, err := os.Lstat(filepath.Join(dir, current+".new")); !os.IsNotExist(err) {
				t.Errorf("the half-made link is left: %v", err)
			}
		})
	}
}

// TestWriteSetForeignFiles: what somebody else made is not touched, and nothing is written beside it.
func TestWriteSetForeignFiles(t *testing.T) {
	for _, name := range []string{"svid.pem", "svid_key.pem", "bundle.pem", current} {
		for kind, make := range map[string]func(string) error{
			"file":   func(p string) error { return os.WriteFile(p, []byte("mine"), 0o644) },
			"link":   func(p string) error { return os.Symlink("/etc/hostname", p) },
			"folder": func(p string) error { return os.Mkdir(p, 0o755) },
		} {
			dir := t.TempDir()
			path := filepath.Join(dir, name)
			if err := make(path); err != nil {
				t.Fatal(err)
			}
			before, err := os.Lstat(path)
			if err != nil {
				t.Fatal(err)
			}
			err = writeSet(dir, set("a"))
			if err == nil || !strings.Contains(err.Error(), path+" is in the way") || !strings.Contains(err.Error(), "another folder") {
				t.Errorf("%s as a %s: got %v", name, kind, err)
			}
			if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) || after.Mode() != before.Mode() {
				t.Errorf("%s as a %s was touched", name, kind)
			}
			if left, _ := os.ReadDir(dir); len(left) != 1 {
				t.Errorf("%s as a %s: written beside it: %v", name, kind, left)
			}
		}
	}
}

func TestWriteSetUnwritable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{file, filepath.Join(file, "sub")} {
		if err := writeSet(dir, set("a")); err == nil || !strings.Contains(err.Error(), "name a folder") {
			t.Errorf("%s: got %v", dir, err)
		}
	}
	if os.Getuid() == 0 {
		return // root can write everywhere
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o500); err != nil {
		t.Fatal(err)
	}
	if err := writeSet(dir, set("a")); err == nil || !strings.Contains(err.Error(), "writable by this user") {
		t.Errorf("got %v", err)
	}
}

// TestWriteSetFails: of a set that cannot be written as a whole, such as on a full disk, nothing stays.
func TestWriteSetFails(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	if err := writeSet(dir, set("a")); err != nil {
		t.Fatal(err)
	}
	if _, err := newSet(dir, map[string][]byte{"a": []byte("key"), "no/folder": nil}); err == nil {
		t.Error("a file in a folder that does not exist was written")
	}
	checkSet(t, dir, "a")
	if n := countSets(t, dir); n != 1 {
		t.Errorf("there are %d sets, want 1", n)
	}
}

// TestWriteSetTwoWriters: each leaves a whole set, and none sweeps up the other's.
func TestWriteSetTwoWriters(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 20 {
				if err := writeSet(dir, set("same")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	checkSet(t, dir, "same")
	if n := countSets(t, dir); n != 1 {
		t.Errorf("%d sets are left", n)
	}
}
