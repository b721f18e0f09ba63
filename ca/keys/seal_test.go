package keys

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSealerOpensOnlyWhatItSealedThere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.key")
	s, err := CreateSealer(path)
	if err != nil {
		t.Fatal(err)
	}
	sealed := s.Seal([]byte("secret"), "root 1")
	loaded, err := LoadSealer(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := loaded.Open(sealed, "root 1"); err != nil || string(got) != "secret" {
		t.Errorf("opened %q, %v", got, err)
	}
	if _, err := loaded.Open(sealed, "root 2"); err == nil {
		t.Error("it opened in another context")
	}
	sealed[len(sealed)-1] ^= 1
	if _, err := loaded.Open(sealed, "root 1"); err == nil {
		t.Error("it opened after a change")
	}
	if _, err := loaded.Open(nil, "root 1"); err == nil {
		t.Error("nothing opened")
	}
	if !loaded.CheckMAC([]byte("doc"), s.MAC([]byte("doc"))) || loaded.CheckMAC([]byte("doc2"), s.MAC([]byte("doc"))) {
		t.Error("the MAC does not tell documents apart")
	}
}

func TestSealingKeyFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.key")
	if _, err := CreateSealer(path); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := CreateSealer(path); err == nil {
		t.Error("an existing key was made anew")
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 1 {
		t.Errorf("left beside the key: %v, %v", names, err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadSealer(path); err == nil || !strings.Contains(err.Error(), "0600") {
		t.Errorf("a key that others can read gave %v", err)
	}
	for name, text := range map[string]string{"short": "AAAA", "text": "hello", "long": strings.Repeat("A", 2000)} {
		bad := filepath.Join(dir, name)
		if err := os.WriteFile(bad, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadSealer(bad); err == nil || !strings.Contains(err.Error(), bad) || strings.Contains(err.Error(), text+" ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
