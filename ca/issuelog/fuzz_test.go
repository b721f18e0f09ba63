package issuelog_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/issuelogtest"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
)

// testKey returns a log's key pair that is the same in each run.
func testKey(f *testing.F) (note.Signer, string) {
	f.Helper()
	seed := sha256.Sum256([]byte("a public seed"))
	secret, public, err := note.GenerateKey(bytes.NewReader(seed[:]), origin)
	if err != nil {
		f.Fatal(err)
	}
	signer, err := note.NewSigner(secret)
	if err != nil {
		f.Fatal(err)
	}
	return signer, public
}

// FuzzCheckpoint: what is accepted was signed with the log's key, and says the same when its signed text is written again.
func FuzzCheckpoint(f *testing.F) {
	signer, public := testKey(f)
	for _, text := range []string{
		origin + "\n0\n47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\n",
		origin + "\n7\n47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\nextension\n",
		origin + "\n-1\nAAAA\n", origin + "\n01\n47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\n", "other\n1\n\n", "\n", origin + "\n",
	} {
		f.Add([]byte(text), true)
		if signed, err := note.Sign(&note.Note{Text: text}, signer); err == nil {
			f.Add(signed, false)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte, sign bool) {
		if sign {
			signed, err := note.Sign(&note.Note{Text: string(data)}, signer)
			if err != nil {
				return
			}
			data = signed
		}
		c, err := issuelog.ParseCheckpoint(data, public)
		if err != nil {
			return
		}
		v, err := note.NewVerifier(public)
		if err != nil {
			t.Fatal(err)
		}
		n, err := note.Open(data, note.VerifierList(v))
		if err != nil {
			t.Fatalf("accepted what is not signed: %q", data)
		}
		if want := fmt.Sprintf("%s\n%d\n%s\n", origin, c.Size, c.Root); !strings.HasPrefix(n.Text, want) || c.Size < 0 || c.Note != string(data) {
			t.Errorf("%q was read as %+v", n.Text, c)
		}
	})
}

// FuzzPublicKey: a key that is accepted verifies, and there is one way to write it.
func FuzzPublicKey(f *testing.F) {
	_, public := testKey(f)
	f.Add(public + "\n")
	f.Add(public)
	f.Add(strings.Replace(public, "+", "++", 1))
	f.Add("a+00000000+AQ==\n")
	path := filepath.Join(f.TempDir(), "log.pub")
	f.Fuzz(func(t *testing.T, text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		key, err := issuelog.ReadPublicKey(path)
		if err != nil {
			return
		}
		if _, err := note.NewVerifier(key); err != nil {
			t.Errorf("%q was accepted: %v", text, err)
		}
		if text != key && text != key+"\n" {
			t.Errorf("%q was read as %q", text, key)
		}
		if _, err := issuelog.IDOf(key); err == nil && !strings.Contains(key, "+") {
			t.Errorf("an ID in %q", key)
		}
	})
}

// FuzzJournal: whatever a journal holds, entries come out in the order of their indices within a frame, and none after a part that
// is no frame.
func FuzzJournal(f *testing.F) {
	dir := filepath.Join(f.TempDir(), "log")
	if _, err := issuelog.Create(dir, origin); err != nil {
		f.Fatal(err)
	}
	l, err := issuelog.Open(faultConfig(filepath.Dir(dir)))
	if err != nil {
		f.Fatal(err)
	}
	for i := range 3 {
		if err := l.Write(issuelogtest.Pairs(i, 1)); err != nil {
			f.Fatal(err)
		}
	}
	l.Kill()
	whole, err := os.ReadFile(filepath.Join(dir, issuelog.JournalFiles[0]))
	if err != nil || len(whole) == 0 {
		f.Fatal(len(whole), err)
	}
	f.Add(whole)
	f.Add(whole[:len(whole)/2])
	f.Add(append(bytes.Clone(whole[:20]), whole...))
	f.Add(bytes.Repeat([]byte("chlogfrm\x00\xff\xff\xff"), 20))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		total := 0
		err := issuelog.ReadJournal(bytes.NewReader(data), func(_ int64, entry []byte) error {
			if total += 2 + len(entry); total > len(data) {
				t.Fatalf("%d bytes of entries in a journal of %d", total, len(data))
			}
			return nil
		})
		switch {
		case err == nil, errors.Is(err, issuelog.ErrTorn), errors.Is(err, issuelog.ErrDamaged):
		default:
			t.Errorf("an error of another kind: %v", err)
		}
		if bytes.HasPrefix(data, whole) && total < len(whole)-3*28 {
			t.Errorf("frames at the beginning were not read: %d bytes of %d", total, len(whole))
		}
	})
}

// FuzzFolder changes a file of a log. What is changed below a checkpoint is found; a server that opens the log all the same
// continues the checkpoint that somebody kept, and what it then has verifies.
func FuzzFolder(f *testing.F) {
	dir := f.TempDir()
	c := faultConfig(dir)
	if _, err := issuelog.Create(c.Dir, origin); err != nil {
		f.Fatal(err)
	}
	l, err := issuelog.Open(c)
	if err != nil {
		f.Fatal(err)
	}
	if err := errors.Join(l.Write(issuelogtest.Pairs(0, 3)), l.Sequence(), l.Write(issuelogtest.Pairs(3, 1))); err != nil {
		f.Fatal(err)
	}
	l.Kill()
	files := []string{issuelog.CheckpointFile, "tile/0/000.p/6", "tile/entries/000.p/6", "log.pub", "log.key", issuelog.JournalFiles[0], issuelog.JournalFiles[1], "log.lock"}
	covered := files[:3]
	good := map[string][]byte{}
	for i, name := range files {
		if good[name], err = os.ReadFile(filepath.Join(c.Dir, name)); err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(i), good[name])
		f.Add(uint8(i), append(bytes.Clone(good[name]), 0))
		if n := len(good[name]); n > 0 {
			f.Add(uint8(i), good[name][:n-1])
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, data []byte) {
		name := files[int(which)%len(files)]
		own := t.TempDir()
		c := faultConfig(own)
		for file, content := range good {
			path := filepath.Join(c.Dir, file)
			if file == name {
				content = data
			}
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, content, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		same := bytes.Equal(data, good[name])
		report, err := verify.Log(t.Context(), verify.Config{Dir: c.Dir, Earlier: good[issuelog.CheckpointFile], EarlierName: "kept"})
		clean := err == nil && len(report.Findings) == 0
		if same != clean && (same || slices.Contains(covered, name)) {
			t.Errorf("%s changed: %v, the log is clean: %v", name, !same, clean)
		}
		defer durabletest.WithoutSyncs(own)()
		l, err := issuelog.Open(c)
		if err != nil {
			if same || errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: %v", name, err)
			}
			return
		}
		if err := errors.Join(l.Write(issuelogtest.Pairs(90, 1)), l.Close()); err != nil {
			t.Fatal(err)
		}
		if name == "log.key" || name == "log.pub" {
			return // another log from here on
		}
		report, err = verify.Log(t.Context(), verify.Config{Dir: c.Dir, Earlier: good[issuelog.CheckpointFile], EarlierName: "kept"})
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range report.Findings {
			if x.Index < 6 {
				t.Errorf("%s changed, and the server went on: %v", name, x)
			}
		}
	})
}
