package lint_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/asn1"
	"net/netip"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/lint"
	"github.com/chancery-project/chancery/ca/tbs"
)

// templates are of each kind of certificate that is written here.
func templates(t testing.TB) map[string]*tbs.Template {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	spki, err := tbs.Key(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	alg, err := tbs.AlgorithmOf(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	name := []byte{0x30, 0x0c, 0x31, 0x0a, 0x30, 0x08, 0x06, 0x03, 0x55, 0x04, 0x03, 0x0c, 0x01, 'x'} // CN=x
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	leaf := tbs.Template{
		Serial: []byte{1, 2, 3}, Algorithm: alg.ID, Issuer: name, Subject: tbs.EmptyName, NotBefore: now, NotAfter: now.Add(time.Hour),
		SPKI: spki, SKI: []byte{4}, AKI: []byte{5}, KeyUsage: x509.KeyUsageDigitalSignature, URI: "spiffe://td/ns/a/sa/b",
	}
	named, ca, unbound, late := leaf, leaf, leaf, leaf
	named.DNS, named.IPs = []string{"a.example"}, []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1")}
	named.Attestation = []byte{0x05, 0x00}
	ca.CA, ca.PathLen, ca.Subject, ca.URI, ca.KeyUsage = true, 3, name, "spiffe://td", x509.KeyUsageCertSign|x509.KeyUsageCRLSign
	unbound.CA, unbound.PathLen, unbound.KeyUsage = true, -1, x509.KeyUsageDecipherOnly
	late.NotAfter = now.AddDate(30, 0, 0)
	return map[string]*tbs.Template{"leaf": &leaf, "named": &named, "ca": &ca, "unbound": &unbound, "late": &late}
}

// What Read says is what crypto/x509 says, of each kind of certificate that is written here.
func TestReadSaysWhatX509Says(t *testing.T) {
	for name, tm := range templates(t) {
		message, err := tm.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if !compare(t, message) {
			t.Errorf("%s: not read by both", name)
		}
	}
}

// FuzzRead changes to-be-signed bytes: what both readers take, both understand alike, and no bytes make Read panic.
func FuzzRead(f *testing.F) {
	for _, tm := range templates(f) {
		message, err := tm.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(message)
	}
	f.Fuzz(func(t *testing.T, message []byte) { compare(t, message) })
}

// compare reports whether both read the bytes; if they do, they must agree.
func compare(t *testing.T, message []byte) bool {
	t.Helper()
	c, err := lint.Read(message)
	if err != nil {
		return false
	}
	der, err := tbs.Assemble(message, c.Algorithm, []byte{0})
	if err != nil {
		t.Fatal(err)
	}
	x, err := x509.ParseCertificate(der)
	if err != nil {
		return false
	}
	if x.Version != 3 { // crypto/x509 does not look at extensions then; the lints refuse all but version 3
		if c.Version != x.Version {
			t.Errorf("version %d; crypto/x509 %d", c.Version, x.Version)
		}
		return true
	}
	server, client := false, false
	for _, u := range x.ExtKeyUsage {
		server, client = server || u == x509.ExtKeyUsageServerAuth, client || u == x509.ExtKeyUsageClientAuth
	}
	pathLen := x.MaxPathLen
	if !x.BasicConstraintsValid || pathLen == 0 && !x.MaxPathLenZero {
		pathLen = -1
	}
	same := map[string]bool{
		"version":      c.Version == x.Version,
		"serial":       bytes.Equal(bytes.TrimLeft(c.Serial, "\x00"), x.SerialNumber.Bytes()) || x.SerialNumber.Sign() < 0,
		"issuer":       bytes.Equal(c.Issuer, x.RawIssuer),
		"subject":      bytes.Equal(c.Subject, x.RawSubject),
		"key":          bytes.Equal(c.SPKI, x.RawSubjectPublicKeyInfo),
		"not before":   c.NotBefore.Equal(x.NotBefore),
		"not after":    c.NotAfter.Equal(x.NotAfter),
		"key usage":    c.KeyUsage == x.KeyUsage,
		"extended":     c.ServerAuth == server && c.ClientAuth == client,
		"ca":           c.IsCA == x.IsCA,
		"path length":  c.PathLen == pathLen,
		"subject key":  bytes.Equal(c.SKI, x.SubjectKeyId),
		"issuer's key": bytes.Equal(c.AKI, x.AuthorityKeyId),
		"names":        len(c.URIs) == len(x.URIs) && c.DNS == len(x.DNSNames) && c.IPs == len(x.IPAddresses),
		"extensions":   len(c.Extensions) == len(x.Extensions),
	}
	for what, ok := range same {
		if !ok {
			t.Errorf("%s: we read %+v; crypto/x509 %+v", what, c, x)
		}
	}
	for n, e := range c.Extensions {
		oid, err := asn1.Marshal(x.Extensions[n].Id)
		if err != nil || !bytes.Equal(oid[2:], e.OID) || x.Extensions[n].Critical != e.Critical || !bytes.Equal(x.Extensions[n].Value, e.Value) {
			t.Errorf("extension %d: we read %+v; crypto/x509 %+v", n, e, x.Extensions[n])
		}
	}
	return true
}

// Bytes that no certificate of ours can have are an error that says where, not a certificate with something missing.
func TestReadRefuses(t *testing.T) {
	message, err := templates(t)["named"].Marshal()
	if err != nil {
		t.Fatal(err)
	}
	for n := range message {
		if _, err := lint.Read(message[:n]); err == nil {
			t.Errorf("the first %d bytes were read", n)
		}
	}
	if _, err := lint.Read(append(message, 0)); err == nil {
		t.Error("a byte behind the end was read")
	}
}

func TestKeyIsWhatX509Writes(t *testing.T) {
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	keys := []crypto.Signer{ed}
	for _, c := range []elliptic.Curve{elliptic.P256(), elliptic.P384()} {
		k, err := ecdsa.GenerateKey(c, rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, k)
	}
	for _, k := range keys {
		want, err := x509.MarshalPKIXPublicKey(k.Public())
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second one must not have written into the first one's bytes
			if got, err := tbs.Key(k.Public()); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%T: %x, %v; want %x", k, got, err, want)
			}
		}
	}
	off := keys[1].Public().(*ecdsa.PublicKey)
	//lint:ignore SA1019 there is no other way to make a key that is no point
	off.Y.Add(off.Y, off.X)
	if _, err := tbs.Key(off); err == nil {
		t.Error("a key that is no point of its curve was written")
	}
}
