package trust

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"math/big"
	"strings"
	"testing"
	"time"
)

// crlCA is an issuer under a root.
type crlCA struct {
	root, issuer *testCA
}

func newCRLCA(t testing.TB, name string, usage x509.KeyUsage) *crlCA {
	t.Helper()
	root := newTestCA(t, name+" root")
	return &crlCA{root, root.issuer(t, name, usage)}
}

func (c *testCA) issuer(t testing.TB, name string, usage x509.KeyUsage) *testCA {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(7), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: usage,
	}
	return &testCA{key, sign(t, template, c.cert, key.Public(), c.key)}
}

const signsBoth = x509.KeyUsageCertSign | x509.KeyUsageCRLSign

// crl signs a list with changes.
func (c *testCA) crl(t testing.TB, change func(*x509.RevocationList)) []byte {
	t.Helper()
	l := &x509.RevocationList{Number: big.NewInt(5), ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(time.Hour)}
	l.ExtraExtensions = []pkix.Extension{{Id: oidIDP, Critical: true, Value: userCertsOnly}}
	if change != nil {
		change(l)
	}
	der, err := x509.CreateRevocationList(rand.Reader, l, c.cert, c.key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func revoking(serial int64) func(*x509.RevocationList) {
	return func(l *x509.RevocationList) {
		l.RevokedCertificateEntries = []x509.RevocationListEntry{
			{SerialNumber: big.NewInt(1000), RevocationTime: time.Now()},
			{SerialNumber: big.NewInt(serial), RevocationTime: time.Date(2026, 11, 30, 9, 0, 0, 0, time.UTC), ReasonCode: 1},
		}
	}
}

func numbered(n int64) func(*x509.RevocationList) {
	return func(l *x509.RevocationList) { l.Number = big.NewInt(n) }
}

func (c *crlCA) crls(t testing.TB, ders ...[]byte) *CRLs {
	t.Helper()
	crls, err := NewCRLs(c.root.bundle(t, "td"), ders, []*x509.Certificate{c.issuer.cert}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return crls
}

func TestRevokedLeafIsRefused(t *testing.T) {
	ca := newCRLCA(t, "issuer", signsBoth)
	crls := ca.crls(t, ca.issuer.crl(t, revoking(2)))
	plain := ca.root.bundle(t, "td")
	b := plain.WithCRLs(crls)
	leaf, key := ca.issuer.leaf(t, "spiffe://td/ns/a/sa/b", nil) // serial 2
	good, _ := ca.issuer.leaf(t, "spiffe://td/ns/a/sa/b", func(c *x509.Certificate) { c.SerialNumber = big.NewInt(3) })
	other := ca.root.issuer(t, "other", signsBoth)
	fromOther, _ := other.leaf(t, "spiffe://td/ns/a/sa/b", nil) // serial 2 as well, of an issuer that has no CRL here
	namesake := ca.root.issuer(t, "issuer", signsBoth)
	fromNamesake, _ := namesake.leaf(t, "spiffe://td/ns/a/sa/b", nil)
	for name, tc := range map[string]struct {
		leaf   *x509.Certificate
		issuer *testCA
		bundle *Bundle
		want   string
	}{
		"revoked":                    {leaf, ca.issuer, b, "certificate of spiffe://td/ns/a/sa/b: certificate with serial 02 was revoked at 2026-11-30T09:00:00Z (keyCompromise), says CRL 5"},
		"revoked, no CRLs known":     {leaf, ca.issuer, plain, ""},
		"not revoked":                {good, ca.issuer, b, ""},
		"another issuer's":           {fromOther, other, b, ""},
		"of an issuer with the name": {fromNamesake, namesake, b, ""},
	} {
		_, _, err := Verify([]*x509.Certificate{tc.leaf, tc.issuer.cert}, Only(tc.bundle), time.Now())
		if (tc.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}

	// A TLS client refuses a server so, and the bundle without CRLs is as it was.
	chain := []*x509.Certificate{leaf, ca.issuer.cert}
	id := ID{"spiffe://td/ns/a/sa/b", len("spiffe://td")}
	own, err := NewIdentity(id, chain, key, plain, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for bundle, want := range map[*Bundle]string{plain: "", b: "was revoked"} {
		err, _ := handshake(t, ClientTLS(id, Only(bundle), func() *Identity { return nil }), ServerTLS(func() *Identity { return own }))
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("handshake: got %v, want %q", err, want)
		}
	}
	// Its own SVID takes the CRLs over all the same, and other roots not.
	if next, err := own.WithBundle(b, time.Now()); err != nil || next.Bundle != b || next.Key != own.Key || own.Bundle != plain {
		t.Errorf("WithBundle: %v, %v", next, err)
	}
	if _, err := own.WithBundle(newTestCA(t, "x").bundle(t, "td"), time.Now()); err == nil {
		t.Error("invariant 7: a bundle that the SVID does not verify against was taken")
	}
	// What was never verified, as when a bundle had to be taken nevertheless, is not taken for granted the next time.
	forced := *own
	forced.Bundle = newTestCA(t, "x").bundle(t, "td")
	if _, err := forced.WithBundle(forced.Bundle, time.Now()); err == nil {
		t.Error("WithBundle takes roots that vouch for nothing once they are there")
	}
	moved, err := own.WithBundle(b, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := moved.WithBundle(newTestCA(t, "x").bundle(t, "td"), time.Now()); err == nil {
		t.Error("WithBundle takes other roots after a good change")
	}
	if _, err := own.WithBundle(newTestCA(t, "x").bundle(t, "td"), own.NotAfter().Add(time.Second)); err != nil {
		t.Errorf("an SVID that has ended: %v", err)
	}
}

func TestD22NewCRLsRefuses(t *testing.T) {
	ca := newCRLCA(t, "issuer", signsBoth)
	stranger := newCRLCA(t, "stranger", signsBoth)
	mute := newCRLCA(t, "mute", x509.KeyUsageCertSign)
	good := ca.issuer.crl(t, nil)
	damaged := bytes.Clone(good)
	damaged[len(damaged)-5] ^= 1
	extended := func(e pkix.Extension) []byte {
		return ca.issuer.crl(t, func(l *x509.RevocationList) { l.ExtraExtensions = []pkix.Extension{e} })
	}
	issuers := []*x509.Certificate{ca.issuer.cert, stranger.issuer.cert, mute.issuer.cert}
	for _, tc := range []struct {
		name string
		ders [][]byte
		want string
	}{
		{"not a CRL", [][]byte{[]byte("x")}, "CRL 0: x509: "},
		{"a certificate", [][]byte{ca.issuer.cert.Raw}, "CRL 0: x509: "},
		{"rest behind it", [][]byte{append(bytes.Clone(good), 0)}, "1 bytes behind its end"},
		{"damaged", [][]byte{damaged}, "verification"},
		{"another root's issuer", [][]byte{good, stranger.issuer.crl(t, nil)}, `CRL 1, of "CN=stranger": x509: certificate signed by unknown authority`},
		{"unknown issuer", [][]byte{ca.root.issuer(t, "new", signsBoth).crl(t, nil)}, "is not among the certificates that came with it"},
		{"signed by a namesake", [][]byte{(&testCA{newKey(t), ca.issuer.cert}).signed(t)}, "verification"},
		{"two of one issuer", [][]byte{good, ca.issuer.crl(t, numbered(6))}, "two CRLs of the issuer"},
		{"distribution point", [][]byte{extended(pkix.Extension{Id: oidIDP, Critical: true, Value: []byte{0x30, 0x0a, 0xa0, 0x08, 0xa0, 0x06, 0x86, 0x04, 'a', ':', '/', '/'}})}, "decision D22"},
		{"delta CRL", [][]byte{extended(pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 27}, Critical: true, Value: []byte{2, 1, 1}})}, "critical extension 2.5.29.27"},
		{"indirect entry", [][]byte{ca.issuer.crl(t, func(l *x509.RevocationList) {
			l.RevokedCertificateEntries = []x509.RevocationListEntry{{SerialNumber: big.NewInt(255), RevocationTime: time.Now(),
				ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 29}, Critical: true, Value: []byte{0x30, 0}}}}}
		})}, "entry for serial ff has the critical extension 2.5.29.29"},
		{"too many", make([][]byte, MaxCRLs+1), "at most 100"},
		{"too large", [][]byte{make([]byte, MaxCRLBytes+1)}, "at most 4194304"},
	} {
		crls, err := NewCRLs(ca.root.bundle(t, "td"), tc.ders, issuers, time.Now())
		if err == nil || !strings.Contains(err.Error(), tc.want) || crls != nil {
			t.Errorf("%s: got %v, want an error with %q", tc.name, err, tc.want)
		}
	}
	withMute := mute.root.bundle(t, "td")
	l := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour)}
	lying := *mute.issuer.cert // as if it might sign CRLs
	lying.KeyUsage |= x509.KeyUsageCRLSign
	der, err := x509.CreateRevocationList(rand.Reader, l, &lying, mute.issuer.key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewCRLs(withMute, [][]byte{der}, issuers, time.Now()); err == nil {
		t.Error("a CRL of an issuer that may not sign CRLs was taken")
	}
	// Without an IDP, of the root, and of an issuer that has just ended: all right.
	plain := ca.issuer.crl(t, func(l *x509.RevocationList) { l.ExtraExtensions = nil })
	root := newCRLRoot(t)
	between := ca.root.issuer(t, "between", signsBoth)
	deep := between.issuer(t, "deep", signsBoth)
	if _, err := NewCRLs(ca.root.bundle(t, "td"), [][]byte{deep.crl(t, nil)}, []*x509.Certificate{deep.cert}, time.Now()); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("without what lies between issuer and root: %v", err)
	}
	for name, f := range map[string]func() (*CRLs, error){
		"no IDP": func() (*CRLs, error) { return NewCRLs(ca.root.bundle(t, "td"), [][]byte{plain}, issuers, time.Now()) },
		"root's": func() (*CRLs, error) {
			return NewCRLs(root.bundle(t, "td"), [][]byte{root.crl(t, nil)}, nil, time.Now())
		},
		"two levels below": func() (*CRLs, error) {
			return NewCRLs(ca.root.bundle(t, "td"), [][]byte{deep.crl(t, nil)}, []*x509.Certificate{deep.cert, between.cert}, time.Now())
		},
		"just ended": func() (*CRLs, error) {
			return NewCRLs(ca.root.bundle(t, "td"), [][]byte{plain}, issuers, ca.issuer.cert.NotAfter.Add(time.Minute))
		},
	} {
		if crls, err := f(); err != nil || len(crls.DER()) != 1 {
			t.Errorf("%s: %v", name, err)
		}
	}
	if crls, err := NewCRLs(ca.root.bundle(t, "td"), nil, issuers, time.Now()); crls != nil || err != nil {
		t.Errorf("no CRLs: %v, %v", crls, err)
	}
}

// signed makes a CRL in the name of the certificate, by whatever key there is.
func (c *testCA) signed(t testing.TB) []byte {
	t.Helper()
	l := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour)}
	template := *c.cert
	template.PublicKey = c.key.Public()
	der, err := x509.CreateRevocationList(rand.Reader, l, &template, c.key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func newCRLRoot(t testing.TB) *testCA {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "signs CRLs"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: signsBoth,
	}
	return &testCA{key, sign(t, template, template, key.Public(), key)}
}

func TestD22Covers(t *testing.T) {
	ca := newCRLCA(t, "issuer", signsBoth)
	leaf, _ := ca.issuer.leaf(t, "spiffe://td/ns/a/sa/b", nil)
	old := ca.root.issuer(t, "old", signsBoth)
	future := old.crl(t, func(l *x509.RevocationList) {
		l.ThisUpdate, l.NextUpdate = time.Now().Add(10*time.Minute), time.Now().Add(20*time.Minute)
	})
	both := func(ders ...[]byte) *CRLs {
		c, err := NewCRLs(ca.root.bundle(t, "td"), ders, []*x509.Certificate{ca.issuer.cert, old.cert}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	own := ca.issuer.crl(t, nil) // for an hour
	for _, tc := range []struct {
		name string
		crls *CRLs
		in   time.Duration
		want string
	}{
		{"current", both(own), 0, ""},
		{"revoked itself", both(ca.issuer.crl(t, revoking(2))), 0, ""},
		{"near its end", both(own), 58 * time.Minute, ""},
		{"too near its end", both(own), 59*time.Minute + time.Second, "ends at"},
		{"past its end", both(own), 2 * time.Hour, "ends at"},
		{"another's has ended", both(own, old.crl(t, func(l *x509.RevocationList) { l.NextUpdate = time.Now().Add(time.Minute) })), 30 * time.Minute, ""},
		{"another's is from the future", both(own, future), 0, "valid only from"},
		{"its time has come", both(own, future), 11 * time.Minute, ""},
		{"lacks its issuer", both(old.crl(t, nil)), 0, "no CRL of the issuer"},
		{"none", nil, 0, "no CRL of the issuer"},
	} {
		err := tc.crls.Covers(leaf, time.Now().Add(tc.in))
		if (tc.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", tc.name, err, tc.want)
		}
	}
}

func TestCRLNumbersDoNotGoBack(t *testing.T) {
	ca := newCRLCA(t, "issuer", signsBoth)
	five, six := ca.crls(t, ca.issuer.crl(t, numbered(5))), ca.crls(t, ca.issuer.crl(t, numbered(6)))
	again := ca.crls(t, ca.issuer.crl(t, numbered(5)))
	for _, tc := range []struct {
		next, last *CRLs
		ok         bool
	}{{six, five, true}, {five, six, false}, {again, five, true}, {nil, five, true}, {five, nil, true}} {
		if err := tc.next.Follows(tc.last); (err == nil) != tc.ok {
			t.Errorf("got %v, want ok %v", err, tc.ok)
		}
	}
	if older, is := errors.AsType[*Older](five.Follows(six)); !is || !strings.Contains(older.Error(), "has number 5; number 6 was there before") {
		t.Error("older CRLs are not told apart")
	}
	if six.Says(five) || five.Says(nil) || (*CRLs)(nil).Says(five) || !(*CRLs)(nil).Says(nil) || !five.Says(five) {
		t.Error("Says is wrong")
	}
	parsed, err := x509.ParseRevocationList(five.DER()[0])
	if err != nil {
		t.Fatal(err)
	}
	signedAgain := ca.crls(t, ca.issuer.crl(t, func(l *x509.RevocationList) {
		l.Number, l.ThisUpdate, l.NextUpdate = parsed.Number, parsed.ThisUpdate, parsed.NextUpdate
	}))
	if !signedAgain.Says(five) || signedAgain.Equal(five) {
		t.Error("what differs in its signatures only should say the same")
	}
	if !five.Equal(five) || five.Equal(again) || five.Equal(nil) || !(*CRLs)(nil).Equal(nil) {
		t.Error("Equal is wrong")
	}
	for _, tc := range []struct {
		crls *CRLs
		ders [][]byte
		want bool
	}{
		{five, five.DER(), true}, {five, again.DER(), false}, {five, nil, false}, {nil, nil, true}, {nil, five.DER(), false},
		{five, append(five.DER(), five.DER()...), false},
	} {
		if got := tc.crls.Are(tc.ders); got != tc.want {
			t.Errorf("Are(%d CRLs) = %v, want %v", len(tc.ders), got, tc.want)
		}
	}
	block, rest := pem.Decode(five.PEM())
	if block == nil || block.Type != "X509 CRL" || !bytes.Equal(block.Bytes, five.DER()[0]) || len(rest) != 0 {
		t.Errorf("PEM is %s", five.PEM())
	}
	if (*CRLs)(nil).PEM() != nil || (*CRLs)(nil).DER() != nil {
		t.Error("no CRLs are not nothing")
	}
}

// Whatever comes from the network makes an error or a set that holds what it was given.
func FuzzNewCRLs(f *testing.F) {
	ca := newCRLCA(f, "issuer", signsBoth)
	b := ca.root.bundle(f, "td")
	leaf, _ := ca.issuer.leaf(f, "spiffe://td/ns/a/sa/b", nil)
	good := ca.issuer.crl(f, revoking(2))
	f.Add(good)
	f.Add(ca.issuer.crl(f, nil))
	f.Add(ca.issuer.cert.Raw)
	f.Add([]byte{0x30, 0x80})
	f.Fuzz(func(t *testing.T, der []byte) {
		list, err := x509.ParseRevocationList(der)
		if err == nil { // the form is judged before the signature, so that the fuzzer gets past it
			_ = checkForm(list)
			c := compact(list)
			set := &CRLs{lists: []crl{c}}
			_, _ = set.Check(leaf), set.Covers(leaf, time.Now())
			_, _ = set.Ends(), set.PEM()
		}
		crls, err := NewCRLs(b, [][]byte{der}, []*x509.Certificate{ca.issuer.cert}, time.Now())
		if err == nil && !crls.Are([][]byte{der}) {
			t.Errorf("%x became %x", der, crls.DER())
		}
	})
}
