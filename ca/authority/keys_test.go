package authority

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/parent"
	"github.com/chancery-project/chancery/trust"
)

// stores are where keys may lie; nil is the document.
func stores(t *testing.T) map[string]keys.Store {
	t.Helper()
	dir := t.TempDir()
	pass := filepath.Join(dir, "passphrase")
	if err := os.WriteFile(pass, []byte("correct horse battery staple\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := keys.OpenFiles(keys.FilesConfig{Dir: filepath.Join(dir, "keys"), PassphraseFile: pass})
	if err != nil {
		t.Fatal(err)
	}
	return map[string]keys.Store{"sealed": nil, "memory": keys.NewMemory(), "files": f}
}

// issue issues one certificate, as a client sees it.
func issue(t *testing.T, k *Keeper) *x509.Certificate {
	t.Helper()
	issuer, err := k.Issuer()
	if err != nil {
		t.Fatal(err)
	}
	key, err := ca.GenerateKey(ca.P256)
	if err != nil {
		t.Fatal(err)
	}
	id, err := trust.ParseID("spiffe://cluster.local/ns/a/sa/b")
	if err != nil {
		t.Fatal(err)
	}
	token, err := issuer.Prepare(k.config.Profiles[0], ca.Request{ID: id, PublicKey: key.Public()})
	if err != nil {
		t.Fatal(err)
	}
	made, err := issuer.Issue(t.Context(), token)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(made.DER)
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err := trust.Verify(append([]*x509.Certificate{cert}, issuer.Chain()...), trust.Only(issuer.Bundle()), time.Now()); err != nil || got != id {
		t.Errorf("verified as %q: %v", got, err)
	}
	return cert
}

// Whatever the store: init makes the keys there, a restart finds them, a renewal makes one more, and the document holds
// either the sealed key or the reference, never both.
func TestKeysLieWhereTheyShould(t *testing.T) {
	for name, store := range stores(t) {
		t.Run(name, func(t *testing.T) {
			c := setup(t, t.TempDir())
			c.Keys, c.KeyType = store, ca.P384
			if _, err := Init(t.Context(), c, "test"); err != nil {
				t.Fatal(err)
			}
			issue(t, open(t, c))
			k := driving(t, c)
			if err := k.renew(t.Context()); err != nil {
				t.Fatal(err)
			}
			issue(t, k)
			issue(t, open(t, c))
			for _, a := range k.Document().Domains["cluster.local"].Authorities {
				if a.State == StateActive && (len(a.Key) > 0) != (store == nil) || (a.KeyRef != "") != (store != nil) {
					t.Errorf("%s %s: sealed %v, reference %q", a.State, a.Kind, len(a.Key) > 0, a.KeyRef)
				}
				cert, err := a.X509()
				if err != nil {
					t.Fatal(err)
				}
				if kt, err := ca.TypeOf(cert.PublicKey); err != nil || kt != ca.P384 {
					t.Errorf("the key of the %s is of type %s, %v", a.Kind, kt, err)
				}
			}
			for _, w := range k.Keys() {
				key, err := w.Open(t.Context())
				if err == nil {
					err = keys.Check(key)
				}
				if err != nil {
					t.Errorf("%s: %v", w.Name, err)
				}
			}
			if n := len(k.Keys()); n != 2 {
				t.Errorf("%d keys are watched", n)
			}
			without := c
			without.Keys = nil
			if _, err := Open(t.Context(), without); (err == nil) != (store == nil) || err != nil && !strings.Contains(err.Error(), "set `keys` in the config") {
				t.Errorf("without the store: %v", err)
			}
		})
	}
}

// A store that is set later takes new keys; the keys that are sealed stay of use.
func TestKeyStoreThatIsSetLater(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	c.Keys = keys.NewMemory()
	k := driving(t, c)
	if err := k.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	issue(t, k)
	if a, err := k.Document().Active(c.Domain, KindIssuer); err != nil || a.KeyRef == "" || a.Key != nil {
		t.Errorf("the new issuer's key does not lie in the store: %+v, %v", a, err)
	}
}

// counting tells which keys are deleted.
type counting struct {
	*keys.Memory
	deleted []string
}

func (c *counting) Delete(ctx context.Context, ref string) error {
	c.deleted = append(c.deleted, ref)
	return c.Memory.Delete(ctx, ref)
}

// A key is deleted once its issuer has ended, not sooner: it may have to sign a CRL.
func TestKeysOfEndedIssuersAreDeleted(t *testing.T) {
	c := setup(t, t.TempDir())
	store := &counting{Memory: keys.NewMemory()}
	c.Keys = store
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := driving(t, c)
	first, err := k.Document().Active(c.Domain, KindIssuer)
	if err != nil {
		t.Fatal(err)
	}
	if err := k.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(store.deleted) > 0 {
		t.Errorf("deleted %v while its certificate lives", store.deleted)
	}
	err = k.Change(t.Context(), func(next *Document) error {
		next.DropEndedIssuers(c.Domain, time.Now().Add(2*ca.DefaultIssuerTTL))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(store.deleted) != 1 || store.deleted[0] != first.KeyRef {
		t.Errorf("deleted %v, want %s", store.deleted, first.KeyRef)
	}
}

// slowStore gives keys that take long to sign, as a busy or distant token does.
type slowStore struct {
	*keys.Memory
	delay time.Duration
}

type slowKey struct {
	crypto.Signer
	delay time.Duration
}

func (s slowStore) Open(ctx context.Context, ref string) (crypto.Signer, error) {
	key, err := s.Memory.Open(ctx, ref)
	return slowKey{key, s.delay}, err
}

func (s slowKey) Sign(random io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	time.Sleep(s.delay)
	return s.Signer.Sign(random, digest, opts)
}

// A slow token delays its own signatures and nothing else: not another issuer, not the question whether one can issue,
// not who wants to see the document, not the other signatures of the same token.
func TestSlowTokenBlocksNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all []*Keeper
		for _, store := range []keys.Store{slowStore{keys.NewMemory(), 10 * time.Second}, keys.NewMemory()} {
			c := setup(t, t.TempDir())
			c.Keys = store
			if _, err := Init(t.Context(), c, "test"); err != nil {
				t.Fatal(err)
			}
			all = append(all, driving(t, c))
		}
		began := time.Now()
		done := make(chan time.Duration, 2)
		for range 2 {
			go func() {
				issue(t, all[0])
				done <- time.Since(began)
			}()
		}
		renewed := make(chan error, 1)
		go func() { renewed <- all[0].renew(t.Context()) }() // holds the keeper's lock while the root signs
		time.Sleep(time.Second)
		issue(t, all[1])
		if _, err := all[0].Issuer(); err != nil {
			t.Error(err)
		}
		all[0].Document()
		all[0].Keys()
		all[0].Expiries()
		if d := time.Since(began); d > 2*time.Second {
			t.Errorf("the others waited for %s", d)
		}
		for range 2 { // side by side, not one after the other
			if d := <-done; d < 10*time.Second || d > 15*time.Second {
				t.Errorf("a signature of the slow token took %s", d)
			}
		}
		if err := <-renewed; err != nil {
			t.Error(err)
		}
	})
}

// parentCA is a CA of our own whose root is kept elsewhere.
func parentCA(t *testing.T) (*ca.Issuer, *x509.Certificate) {
	t.Helper()
	c := setup(t, t.TempDir())
	made := newCA(t, c)
	b, err := trust.NewBundle(c.Domain, 1, []*x509.Certificate{made.Root})
	if err != nil {
		t.Fatal(err)
	}
	root, err := ca.NewIssuer(ca.IssuerConfig{Domain: c.Domain, Key: made.RootKey, Chain: []*x509.Certificate{made.Root}, Bundle: b, LogID: ca.MinLogID, Log: c.Log})
	if err != nil {
		t.Fatal(err)
	}
	return root, made.Root
}

// answer has the parent sign a request.
func answer(t *testing.T, root *ca.Issuer, der []byte, ttl time.Duration) *x509.Certificate {
	t.Helper()
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := root.SignIssuer(t.Context(), csr.PublicKey, ttl, audit.Requester{})
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// The whole way with a root that is kept elsewhere, by our own CA, for each place where keys may lie.
func TestOfflineRoot(t *testing.T) {
	for name, store := range stores(t) {
		t.Run(name, func(t *testing.T) {
			root, cert := parentCA(t)
			c := setup(t, t.TempDir())
			c.Keys, c.Roots = store, []*x509.Certificate{cert}
			doc, err := Init(t.Context(), c, "test")
			if err != nil {
				t.Fatal(err)
			}
			if as := doc.Domains["cluster.local"].Authorities; len(as) != 1 || as[0].HasKey() {
				t.Fatalf("init made %d authorities", len(as))
			}
			if _, err := Open(t.Context(), c); !errors.Is(err, held.ErrOffline) || !strings.Contains(err.Error(), "has no active issuer") {
				t.Errorf("opening without an issuer: %v", err)
			}
			if err := Import(t.Context(), c, "test", []*x509.Certificate{cert}); err == nil || !strings.Contains(err.Error(), "no issuer was requested") {
				t.Errorf("importing without a request: %v", err)
			}
			first, err := Request(t.Context(), c, "test", false)
			if err != nil {
				t.Fatal(err)
			}
			again, err := Request(t.Context(), c, "test", false)
			if err != nil {
				t.Fatal(err)
			}
			old := answer(t, root, first, time.Hour)
			if other := answer(t, root, again, time.Hour); !trust.SameKey(old.PublicKey, other.PublicKey) {
				t.Error("the open request has another key the second time")
			}
			fresh, err := Request(t.Context(), c, "test", true)
			if err != nil {
				t.Fatal(err)
			}
			if err := Import(t.Context(), c, "test", []*x509.Certificate{old}); err == nil || !strings.Contains(err.Error(), "another key") {
				t.Errorf("the answer to a request that was dropped: %v", err)
			}
			issuer := answer(t, root, fresh, time.Hour)
			if err := Import(t.Context(), c, "test", []*x509.Certificate{issuer, cert}); err != nil {
				t.Fatal(err)
			}
			if err := Import(t.Context(), c, "test", []*x509.Certificate{issuer}); err == nil {
				t.Error("one answer was imported twice")
			}
			k := open(t, c)
			if leaf := issue(t, k); leaf.CheckSignatureFrom(issuer) != nil {
				t.Error("the leaf is not of the imported issuer")
			}
			if got := k.Document().Domains["cluster.local"].Requested; got != nil {
				t.Errorf("a request stays open: %+v", got)
			}
			if err := k.renew(t.Context()); !errors.Is(err, held.ErrOffline) {
				t.Errorf("renewing without the root's key: %v", err)
			}
			if ks := k.Keys(); len(ks) != 1 || ks[0].Name != k.KeyName() {
				t.Errorf("%d keys are watched", len(ks))
			}

			// The next one replaces it.
			next, err := Request(t.Context(), c, "test", false)
			if err != nil {
				t.Fatal(err)
			}
			if err := Import(t.Context(), c, "test", []*x509.Certificate{answer(t, root, next, time.Hour)}); err != nil {
				t.Fatal(err)
			}
			if leaf := issue(t, open(t, c)); leaf.CheckSignatureFrom(issuer) == nil {
				t.Error("the former issuer still signs")
			}
		})
	}
}

// A chain from another root is refused, and a document that somebody else changed is not overwritten.
func TestImportThatFailsChangesNothing(t *testing.T) {
	root, cert := parentCA(t)
	stranger, _ := parentCA(t)
	c := setup(t, t.TempDir())
	c.Roots = []*x509.Certificate{cert}
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	der, err := Request(t.Context(), c, "test", false)
	if err != nil {
		t.Fatal(err)
	}
	before, version, err := c.Store.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	foreign := answer(t, stranger, der, time.Hour)
	if err := Import(t.Context(), c, "test", []*x509.Certificate{foreign}); err == nil || !strings.Contains(err.Error(), "does not lead to a root") {
		t.Errorf("got %v", err)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Import(canceled, c, "test", []*x509.Certificate{answer(t, root, der, time.Hour)}); err == nil {
		t.Error("an interrupted import says that it is done")
	}
	after, now, err := c.Store.Load(t.Context())
	if err != nil || now != version || !bytes.Equal(before, after) {
		t.Errorf("the document changed from version %d to %d: %v", version, now, err)
	}
	if err := Import(t.Context(), c, "test", []*x509.Certificate{answer(t, root, der, time.Hour)}); err != nil {
		t.Errorf("the right answer afterwards: %v", err)
	}
}

func TestRootsThatInitRefuses(t *testing.T) {
	root, cert := parentCA(t)
	c := setup(t, t.TempDir())
	issuer, _, err := root.NewIssuer(t.Context(), time.Hour, audit.Requester{})
	if err != nil {
		t.Fatal(err)
	}
	for want, roots := range map[string][]*x509.Certificate{
		"not signed by itself": {issuer}, "occurs twice": {cert, cert},
	} {
		c.Roots = roots
		if _, err := Init(t.Context(), c, "test"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	ended := *cert
	ended.NotAfter = time.Now().Add(-time.Second)
	if err := parent.CheckRoot(&ended, time.Now()); err == nil || !strings.Contains(err.Error(), "it ended at") {
		t.Errorf("got %v", err)
	}
	c.Roots, c.Plugged = []*x509.Certificate{cert}, &Plugged{}
	if _, err := Init(t.Context(), c, "test"); err == nil || !strings.Contains(err.Error(), "brings its roots along") {
		t.Errorf("beside a plugged-in issuer: %v", err)
	}
}

// An issuer that only an admin can renew is called to mind from half of its life on, once an hour.
func TestOfflineIssuerPastHalfOfItsLifeIsLogged(t *testing.T) {
	root, cert := parentCA(t)
	c := setup(t, t.TempDir())
	c.Roots = []*x509.Certificate{cert}
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	der, err := Request(t.Context(), c, "test", false)
	if err != nil {
		t.Fatal(err)
	}
	if err := Import(t.Context(), c, "test", []*x509.Certificate{answer(t, root, der, 6*time.Hour)}); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	c.Logger = slog.New(slog.NewTextHandler(&log, nil))
	k := driving(t, c)
	log.Reset()
	k.mindIssuer(t.Context(), time.Now())
	if log.Len() > 0 {
		t.Errorf("a new issuer is logged: %s", log.String())
	}
	start := time.Now().Add(4 * time.Hour)
	for i := range 90 { // minutes
		k.mindIssuer(t.Context(), start.Add(time.Duration(i)*time.Minute))
	}
	if n := strings.Count(log.String(), "issuer is past half of its life"); n != 2 || !strings.Contains(log.String(), "authority csr") || strings.Contains(log.String(), "ERROR") {
		t.Errorf("logged %d times in 90 minutes: %s", n, log.String())
	}
}
