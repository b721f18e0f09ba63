package answers

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("cluster.local"))

// root makes a root whose subject has a size.
func root(size int) *x509.Certificate {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "root", Organization: []string{string(bytes.Repeat([]byte("x"), size))}},
		NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	return must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key))))
}

func signer(n byte) *trust.BundleSigner {
	return trust.NewBundleSigner(ed25519.NewKeyFromSeed(bytes.Repeat([]byte{n}, ed25519.SeedSize)))
}

// TestD6BundlesAreSignedOnce for all who ask, and anew for another generation, other roots, or another key.
func TestD6BundlesAreSignedOnce(t *testing.T) {
	r1, r2 := root(1), root(2)
	one := must(trust.NewBundle(td, 1, []*x509.Certificate{r1}))
	by := signer(1)
	failing := errors.New("no key")
	var why error
	s := NewBundles(Config{Bundle: func() (*trust.Bundle, error) { return one, why }, Signer: func() (*trust.BundleSigner, error) { return by, why }})
	check := func(name string, b *trust.Bundle) *chanceryv1.SignedBundle {
		t.Helper()
		m, err := s.Signed(b)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := (trust.SignedBundle{Bundle: m.GetBundle(), Signature: m.GetSignature(), Key: m.GetKey()}).Verify(by.Public()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		said := new(chanceryv1.Bundle)
		if err := proto.Unmarshal(m.GetBundle(), said); err != nil || !proto.Equal(said, Roots(b)) {
			t.Errorf("%s: it says %v, %v", name, said, err)
		}
		return m
	}
	first := check("first", one)
	if check("the same", one) != first || check("the same in other words", must(trust.NewBundle(td, 1, []*x509.Certificate{r1}))) != first ||
		check("with CRLs", one.WithCRLs(nil)) != first || must(s.Newest()) != first {
		t.Error("it is signed again")
	}
	if n := testing.AllocsPerRun(100, func() { _, _ = s.Signed(one) }); n != 0 {
		t.Errorf("asking takes %v allocations", n)
	}
	next := check("another generation", must(trust.NewBundle(td, 2, []*x509.Certificate{r1})))
	other := check("other roots", must(trust.NewBundle(td, 2, []*x509.Certificate{r1, r2})))
	by = signer(2)
	again := check("another key", must(trust.NewBundle(td, 2, []*x509.Certificate{r1, r2})))
	for i, a := range []*chanceryv1.SignedBundle{first, next, other, again} {
		for _, b := range []*chanceryv1.SignedBundle{first, next, other, again}[i+1:] {
			if bytes.Equal(a.GetSignature(), b.GetSignature()) {
				t.Error("two of them have one signature")
			}
		}
	}
	why = failing
	if _, err := s.Signed(one); !errors.Is(err, failing) {
		t.Errorf("without a key: %v", err)
	}
	if _, err := s.Newest(); !errors.Is(err, failing) {
		t.Errorf("without a bundle: %v", err)
	}
	why = nil
	large := must(trust.NewBundle(td, 3, []*x509.Certificate{root(trust.MaxSignedBundle)}))
	if m, err := s.Signed(large); err == nil {
		t.Errorf("what nobody would take is signed: %d bytes", len(m.GetBundle()))
	}
	var none *Bundles
	if _, err := none.Signed(one); err == nil {
		t.Error("nothing signs")
	}
	if _, err := none.Newest(); err == nil {
		t.Error("nothing signs")
	}
}

func BenchmarkSigned(b *testing.B) {
	one := must(trust.NewBundle(td, 1, []*x509.Certificate{root(1), root(2)}))
	by := signer(1)
	s := NewBundles(Config{Signer: func() (*trust.BundleSigner, error) { return by, nil }})
	for b.Loop() {
		if _, err := s.Signed(one); err != nil {
			b.Fatal(err)
		}
	}
}
