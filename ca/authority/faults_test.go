package authority

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/ca/keys"
)

// whole is the full-state checker: the document is one of those that were written, whole; it continues the one before; a server
// starts on it and issues; the audit log has the intent of the active issuer.
func whole(t *testing.T, name, dir string, c Config, least uint64, before []byte) {
	t.Helper()
	data, version, err := c.Store.Load(t.Context())
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if version < least || version > least+1 {
		t.Errorf("%s: version %d is stored; %d was confirmed", name, version, least)
	}
	doc, err := document.Decode(data, version, c.Sealer)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if sum := sha256.Sum256(before); version == least+1 && doc.Previous != hex.EncodeToString(sum[:]) {
		t.Errorf("%s: the document does not follow the one that was confirmed", name)
	}
	k := open(t, c)
	issue(t, k)
	for ref := range doc.KeyRefs() {
		key, err := c.Keys.Open(t.Context(), ref)
		if err == nil {
			err = keys.Check(key)
		}
		if err != nil {
			t.Errorf("%s: key %s: %v", name, ref, err)
		}
	}
	log, err := os.ReadFile(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	active, err := doc.Active(c.Domain, document.KindIssuer)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := active.X509()
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Roots) > 0 { // it was signed elsewhere: the log says who brought it
		if !strings.Contains(string(log), "authority import: issuer "+active.ID) {
			t.Errorf("%s: the audit log does not tell of the import", name)
		}
	} else if !hasIntent(string(log), hex.EncodeToString(cert.SerialNumber.Bytes())) {
		t.Errorf("%s: the audit log lacks the intent of the active issuer", name)
	}
}

// stored is the stored form of the document in use.
func stored(t *testing.T, k *Keeper) []byte {
	t.Helper()
	data, err := k.Document().Encode(k.config.Sealer)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func hasIntent(log, serial string) bool {
	for line := range strings.Lines(log) {
		var r audit.Record
		if json.Unmarshal([]byte(line), &r) == nil && r.Event == audit.Intent && r.Serial == serial {
			return true
		}
	}
	return false
}

// quick is setup with a profile for one type of key: each check of an issuer makes a key of each type.
func quick(t *testing.T, dir string) Config {
	t.Helper()
	c := setup(t, dir)
	p, err := ca.NewProfile("workload", ca.ProfileConfig{KeyTypes: []string{"p256"}})
	if err != nil {
		t.Fatal(err)
	}
	c.Profiles = []*ca.Profile{p}
	return c
}

// TestChangeFaultsAtEachStep fails each step of what changes a document, in each way: the renewal of an issuer, and request and
// import of one that is signed elsewhere.
func TestChangeFaultsAtEachStep(t *testing.T) {
	root, rootCert := parentCA(t)
	changes := map[string]struct {
		prepare func(t *testing.T, c *Config)
		do      func(t *testing.T, k *Keeper) error
		least   int
	}{
		"renewal": {
			prepare: func(*testing.T, *Config) {},
			do:      func(t *testing.T, k *Keeper) error { return k.renew(t.Context()) },
			least:   3, // and two more, if the result is noted by then
		},
		"request and import": {
			prepare: func(_ *testing.T, c *Config) { c.Roots = []*x509.Certificate{rootCert} },
			do: func(t *testing.T, k *Keeper) error {
				der, err := k.Request(t.Context(), "test", false)
				if err != nil {
					return err
				}
				return k.Import(t.Context(), "test", []*x509.Certificate{answer(t, root, der, time.Hour)})
			},
			least: 6,
		},
	}
	for what, change := range changes {
		one := func(t *testing.T, n int, mode durabletest.Mode) int {
			dir := t.TempDir()
			c := quick(t, dir)
			change.prepare(t, &c)
			if _, err := Init(t.Context(), c, "test"); err != nil {
				t.Fatal(err)
			}
			k, err := load(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			if what == "renewal" {
				k = driving(t, c)
			} else if err := change.do(t, k); err != nil { // the first one, so that there is something to lose
				t.Fatal(err)
			}
			d := durabletest.Watch(t, dir)
			d.FailAt(n, mode)
			err = change.do(t, k)
			steps, name := d.Steps(), fmt.Sprintf("%s: %s (%v)", what, d.Failed(), err)
			confirmed, before := k.Document().Version, stored(t, k)
			d.FailAt(-1, "")
			if d.Dead() {
				left := d.Copy()
				c = quick(t, left)
				change.prepare(t, &c)
				whole(t, name, left, c, confirmed, before)
				return steps
			}
			whole(t, name, dir, c, confirmed, before)
			if err != nil { // the next try works, on what it finds, or on what it has caught up with
				if err := change.do(t, k); err != nil {
					t.Errorf("%s: the next try: %v", name, err)
				}
			}
			issue(t, k)
			whole(t, name, dir, c, k.Document().Version, stored(t, k))
			return steps
		}
		total := one(t, -1, "")
		if total < change.least {
			t.Errorf("%s: only %d steps were seen", what, total)
		}
		for n := range max(total, change.least+2) {
			for _, mode := range durabletest.Modes {
				t.Run(fmt.Sprint(what, " ", n, " ", mode), func(t *testing.T) { one(t, n, mode) })
			}
		}
	}
}

// TestRenewalWithKeyFilesAfterACrash: whatever the moment of a crash, each key that the document names is in its store.
func TestRenewalWithKeyFilesAfterACrash(t *testing.T) {
	if testing.Short() {
		t.Skip("each key costs a fifth of a second: not under -short")
	}
	pass := filepath.Join(t.TempDir(), "passphrase")
	if err := os.WriteFile(pass, []byte("correct horse battery staple\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	withFiles := func(t *testing.T, dir string) Config {
		c := quick(t, dir)
		f, err := keys.OpenFiles(keys.FilesConfig{Dir: filepath.Join(dir, "keys"), PassphraseFile: pass})
		if err != nil {
			t.Fatal(err)
		}
		c.Keys, c.KeyType = f, ca.P256
		return c
	}
	one := func(t *testing.T, n int) int {
		dir := t.TempDir()
		c := withFiles(t, dir)
		if _, err := Init(t.Context(), c, "test"); err != nil {
			t.Fatal(err)
		}
		k := driving(t, c)
		before := stored(t, k)
		d := durabletest.Watch(t, dir)
		d.FailAt(n, durabletest.Crash)
		err := k.renew(t.Context())
		left := d.Copy()
		least := uint64(2) // the driver is in it
		if err == nil {
			least, before = 3, stored(t, k)
		}
		whole(t, d.Failed(), left, withFiles(t, left), least, before)
		return d.Steps()
	}
	total := one(t, -1)
	if total < 8 {
		t.Errorf("only %d steps were seen", total)
	}
	for n := range total {
		t.Run(fmt.Sprint(n), func(t *testing.T) { one(t, n) })
	}
}
