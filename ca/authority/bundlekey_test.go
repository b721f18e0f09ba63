package authority

import (
	"crypto/x509"
	"testing"

	"github.com/chancery-project/chancery/ca/bundlekey"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/trust"
)

// TestD6EveryInitMakesABundleKey, whatever the roots' keys lie in, and never there: who gets into a key store of authorities should not
// be able to tell agents of other roots.
func TestD6EveryInitMakesABundleKey(t *testing.T) {
	_, root := parentCA(t)
	stores := stores(t)
	for name, change := range map[string]func(t *testing.T, c *Config){
		"sealed":    func(*testing.T, *Config) {},
		"key store": func(_ *testing.T, c *Config) { c.Keys = stores["files"] },
		"offline":   func(_ *testing.T, c *Config) { c.Roots = []*x509.Certificate{root} },
		"parented": func(_ *testing.T, c *Config) {
			c.Roots, c.Parented, c.Keys = []*x509.Certificate{root}, true, stores["memory"]
		},
		"plugged": func(t *testing.T, c *Config) {
			dir, made := t.TempDir(), newCA(t, *c)
			plugged(t, dir, made, made.Root)
			c.Plugged = &Plugged{Dir: dir, Layout: files.CACerts}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := setup(t, t.TempDir())
			change(t, &c)
			if _, err := Init(t.Context(), c, "test"); err != nil {
				t.Fatal(err)
			}
			data, version, err := c.Store.Load(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			doc, err := DecodeDocument(data, version, c.Sealer)
			if err != nil {
				t.Fatal(err)
			}
			key := doc.State(c.Domain).BundleKey
			if key == nil {
				t.Fatal("there is none")
			}
			signer, err := bundlekey.Open(key, c.Domain, c.Sealer)
			if err != nil {
				t.Fatal(err)
			}
			if err := signer.Sign([]byte("roots")).Verify(key.Public); err != nil {
				t.Error(err)
			}
			for ref := range doc.KeyRefs() {
				kept, err := c.Keys.Open(t.Context(), ref)
				if err != nil {
					t.Fatal(err)
				}
				if trust.SameKey(kept.Public(), signer.Public()) {
					t.Errorf("it lies in the key store, as %s", ref)
				}
			}
			if want := map[string]int{"key store": 2}[name]; len(doc.KeyRefs()) != want {
				t.Errorf("%d keys in the key store, want %d", len(doc.KeyRefs()), want)
			}
		})
	}
}
