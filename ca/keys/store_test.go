package keys_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/keys/keystest"
)

var allTypes = []ca.KeyType{ca.P256, ca.P384, ca.Ed25519, ca.RSA, ca.MLDSA65}

func TestMemoryContract(t *testing.T) {
	keystest.Run(t, keystest.Config{
		Open: func(*testing.T) keystest.Store { return keys.NewMemory() }, Types: allTypes, Forgets: true,
	})
}

const passphrase = "correct horse battery staple\n"

func filesConfig(t *testing.T) keys.FilesConfig {
	t.Helper()
	dir := t.TempDir()
	c := keys.FilesConfig{Dir: filepath.Join(dir, "keys"), PassphraseFile: filepath.Join(dir, "passphrase")}
	write(t, c.PassphraseFile, passphrase, 0o600)
	return c
}

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func openFiles(t *testing.T, c keys.FilesConfig) *keys.Files {
	t.Helper()
	f, err := keys.OpenFiles(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestFilesContract(t *testing.T) {
	c := filesConfig(t)
	keystest.Run(t, keystest.Config{
		Open: func(t *testing.T) keystest.Store { return openFiles(t, c) }, Types: allTypes,
	})
}

// What lies in the folder is encrypted, for its owner only, and complete.
func TestFilesAtRest(t *testing.T) {
	c := filesConfig(t)
	keystest.New(t, openFiles(t, c), ca.P256)
	info, err := os.Stat(c.Dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("folder: %v, %v", info.Mode(), err)
	}
	entries, err := os.ReadDir(c.Dir)
	if err != nil || len(entries) != 1 {
		t.Fatalf("%d files, %v", len(entries), err)
	}
	path := filepath.Join(c.Dir, entries[0].Name())
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("file: %v, %v", info.Mode(), err)
	}
	data, err := os.ReadFile(path)
	if err != nil || !bytes.HasPrefix(data, []byte("age-encryption.org/v1\n-> scrypt ")) || bytes.Contains(data, []byte("PRIVATE KEY")) {
		t.Errorf("the file is no age file: %.60q", data)
	}
}

// Each thing that can be wrong with a key file has an error that names the file and gives away nothing.
func TestFilesThatDoNotOpen(t *testing.T) {
	c := filesConfig(t)
	first := openFiles(t, c)
	ref, _ := keystest.New(t, first, ca.P256)
	other, _ := keystest.New(t, first, ca.P256)
	path := filepath.Join(c.Dir, strings.TrimPrefix(ref, "file:")+".age")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	swapped, err := os.ReadFile(filepath.Join(c.Dir, strings.TrimPrefix(other, "file:")+".age"))
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(good)
	flipped[len(flipped)-1] ^= 1
	heavy := bytes.Replace(good, []byte(" 16\n"), []byte(" 30\n"), 1)
	for name, tc := range map[string]struct {
		file []byte
		pass string
		want string
	}{
		"a wrong passphrase":       {good, "another passphrase altogether", "does not open with the passphrase"},
		"a changed byte":           {flipped, passphrase, "changed or cut off"},
		"cut off":                  {good[:len(good)-20], passphrase, path},
		"empty":                    {nil, passphrase, path},
		"another key's file":       {swapped, passphrase, "holds another key"},
		"a costly scrypt":          {heavy, passphrase, path},
		"a passphrase that is bad": {good, "short", "at least 16"},
	} {
		t.Run(name, func(t *testing.T) {
			write(t, path, string(tc.file), 0o600)
			fresh := openFiles(t, c) // decrypts again
			write(t, c.PassphraseFile, tc.pass, 0o600)
			defer write(t, c.PassphraseFile, passphrase, 0o600)
			_, err := fresh.Open(t.Context(), ref)
			if err == nil || !strings.Contains(err.Error(), tc.want) || errors.Is(err, keys.ErrNotFound) {
				t.Errorf("got %v, want %s", err, tc.want)
			}
			if err != nil && strings.Contains(err.Error(), strings.TrimSpace(tc.pass)) {
				t.Errorf("the passphrase is in the error: %v", err)
			}
		})
	}
}

func TestPassphraseFile(t *testing.T) {
	c := filesConfig(t)
	for name, tc := range map[string]struct {
		text string
		mode os.FileMode
		want string
	}{
		"readable by others": {passphrase, 0o640, "should be 0600"},
		"empty":              {"\n", 0o600, "should be one line"},
		"two lines":          {passphrase + passphrase, 0o600, "should be one line"},
		"huge":               {strings.Repeat("a", 2000), 0o600, "2000 bytes"},
		"short":              {"secret", 0o600, "at least 16"},
	} {
		write(t, c.PassphraseFile, tc.text, tc.mode)
		if _, err := keys.OpenFiles(c); err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), c.PassphraseFile) {
			t.Errorf("%s: %v", name, err)
		}
	}
	c.PassphraseFile = t.TempDir()
	if _, err := keys.OpenFiles(c); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a folder: %v", err)
	}
}

func BenchmarkSign(b *testing.B) {
	dir := b.TempDir()
	pass := filepath.Join(dir, "passphrase")
	if err := os.WriteFile(pass, []byte(passphrase), 0o600); err != nil {
		b.Fatal(err)
	}
	f, err := keys.OpenFiles(keys.FilesConfig{Dir: dir, PassphraseFile: pass})
	if err != nil {
		b.Fatal(err)
	}
	for name, s := range map[string]keys.Store{"memory": keys.NewMemory(), "files": f} {
		keystest.Benchmark(b, name, s)
	}
	b.Run("files: first opening", func(b *testing.B) {
		ref, err := f.Generate(b.Context(), ca.P256)
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			fresh, err := keys.OpenFiles(keys.FilesConfig{Dir: dir, PassphraseFile: pass})
			if err != nil {
				b.Fatal(err)
			}
			if _, err := fresh.Open(b.Context(), ref); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// Files of secrets and keys are read up to their bounds, and regular files only.
func TestBoundsOfKeyFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "secret")
	write(t, path, strings.Repeat("x", 1025), 0o600)
	pipe := filepath.Join(dir, "pipe") // that nobody writes to: opening it would wait for that
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for what, read := range map[string]func(string) error{
		"passphrase":  func(p string) error { _, err := keys.ReadSecret("passphrase", p); return err },
		"sealing key": func(p string) error { _, err := keys.LoadSealer(p); return err },
	} {
		if err := read(path); err == nil || !strings.Contains(err.Error(), what) || !strings.Contains(err.Error(), "1025 bytes") {
			t.Errorf("%s: %v", what, err)
		}
		for _, odd := range []string{"/dev/null", pipe} {
			if err := read(odd); err == nil || !strings.Contains(err.Error(), "not a regular file") {
				t.Errorf("%s in %s: %v", what, odd, err)
			}
		}
	}
	c := filesConfig(t)
	ref, _ := keystest.New(t, openFiles(t, c), ca.Ed25519)
	file := filepath.Join(c.Dir, strings.TrimPrefix(ref, "file:")+".age")
	if err := os.Truncate(file, 1<<30); err != nil { // sparse
		t.Fatal(err)
	}
	if _, err := openFiles(t, c).Open(t.Context(), ref); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("a key file of 1 GiB: %v", err)
	}
}
