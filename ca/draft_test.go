package ca

import (
	"bytes"
	"context"
	"crypto/mldsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/tbs"
	"github.com/chancery-project/chancery/trust"
)

// A draft is the right to one token, and without its intent in the log to none.
func TestInvariant1DraftIsOneShot(t *testing.T) {
	i, _, path := newIssuer(t, CreateConfig{})
	before := len(readLog(t, path))
	d, err := i.Draft(profile(t, ProfileConfig{}), Request{ID: id(t, "spiffe://cluster.local/ns/a/sa/b"), PublicKey: publicKey(t, P256)})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(readLog(t, path)); n != before {
		t.Errorf("a draft wrote %d lines to the log", n-before)
	}
	if err := d.Zlint(); err != nil {
		t.Error(err)
	}
	token, err := d.Prepare()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Prepare(); err == nil || !strings.Contains(err.Error(), "used before") {
		t.Errorf("a second token for one draft: %v", err)
	}
	if _, err := i.IssueCRL(t.Context(), token); err == nil || !strings.Contains(err.Error(), "for a certificate") {
		t.Errorf("a certificate's token made a CRL: %v", err)
	}
	c, err := i.Issue(t.Context(), token)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(c.DER)
	if err != nil || !bytes.Equal(cert.RawTBSCertificate, d.Certificate().RawTBSCertificate) {
		t.Errorf("what was signed is not what was drafted: %v", err)
	}
}

func TestDraftWithoutLogGivesNoToken(t *testing.T) {
	key, err := GenerateKey(P256)
	if err != nil {
		t.Fatal(err)
	}
	end := time.Now().Add(time.Hour).Truncate(time.Second)
	i, err := NewSelfIssuer(SelfConfig{Domain: domain(t, "a"), Key: key, CommonName: "root", NotBefore: time.Now().Add(-time.Minute), NotAfter: end, LogID: MinLogID})
	if err != nil {
		t.Fatal(err)
	}
	d, err := i.Draft(CeremonyProfile("root"), Request{PublicKey: key.Public(), CA: &CARequest{
		Domain: i.domain, CommonName: "root", PathLen: 1, NotBefore: i.notBefore, NotAfter: end,
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Prepare(); !errors.Is(err, ErrNotReady) {
		t.Errorf("no log and yet: %v", err)
	}
	other, err := GenerateKey(P256)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Issuer(other); err == nil {
		t.Error("an issuer of a drafted certificate with another key")
	}
}

func TestSigningDatesOutsideTheIssuerAreRefused(t *testing.T) {
	i, _, _ := newIssuer(t, CreateConfig{IssuerTTL: time.Hour})
	i.pathLen = -1
	for want, ca := range map[string]*CARequest{
		"after its issuer's chain": {NotAfter: time.Now().Add(2 * time.Hour)},
		"before its issuer":        {NotAfter: time.Now().Add(time.Minute), NotBefore: time.Now().Add(-time.Hour)},
	} {
		ca.Domain, ca.CommonName = i.domain, "issuer"
		_, err := i.Draft(CeremonyProfile("issuer"), Request{PublicKey: publicKey(t, P256), CA: ca})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q: %v", want, err)
		}
	}
}

// The path length is that of the whole chain, not of the issuing certificate alone.
func TestPathLengthCountsFromTheWholeChain(t *testing.T) {
	i, made, _ := newIssuer(t, CreateConfig{})
	if i.pathLen != 0 {
		t.Errorf("an issuer with path length 0 counts %d", i.pathLen)
	}
	root, err := NewIssuer(IssuerConfig{Domain: i.domain, Key: made.RootKey, Chain: []*x509.Certificate{made.Root}, Bundle: i.bundle, LogID: i.logID, Log: i.log})
	if err != nil || root.pathLen != -1 {
		t.Errorf("a root without bound counts %d, %v", root.pathLen, err)
	}
	_, err = i.Draft(CeremonyProfile("issuer"), Request{PublicKey: publicKey(t, P256), CA: &CARequest{Domain: i.domain, CommonName: "x"}})
	if err == nil || !strings.Contains(err.Error(), "lint path_length") {
		t.Errorf("an issuer under one with path length 0: %v", err)
	}
}

// A CRL of ours has the very bytes that crypto/x509 gives for the same contents.
func TestCRLIsWhatCryptoX509Writes(t *testing.T) {
	now := time.Now().Add(-time.Second).UTC().Truncate(time.Second)
	for _, kt := range []KeyType{P256, P384, Ed25519, RSA, MLDSA65} {
		_, made, _ := newIssuer(t, CreateConfig{KeyType: kt})
		log, err := audit.Open(t.TempDir() + "/log")
		if err != nil {
			t.Fatal(err)
		}
		bundle, err := trust.NewBundle(domain(t, "cluster.local"), 1, []*x509.Certificate{made.Root})
		if err != nil {
			t.Fatal(err)
		}
		root, err := NewIssuer(IssuerConfig{Domain: bundle.Domain(), Key: made.RootKey, Chain: []*x509.Certificate{made.Root}, Bundle: bundle, LogID: MinLogID, Log: log})
		if err != nil {
			t.Fatal(err)
		}
		for _, revoked := range [][]x509.RevocationListEntry{nil, {
			{SerialNumber: big.NewInt(0x80), RevocationTime: now}, {SerialNumber: big.NewInt(1 << 40), RevocationTime: now.Add(-time.Hour), ReasonCode: 4},
		}} {
			d, err := root.DraftCRL(CRLRequest{Number: big.NewInt(200), ThisUpdate: now, NextUpdate: now.Add(time.Hour), Revoked: revoked})
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Zlint(); err != nil {
				t.Errorf("%s: %v", kt, err)
			}
			token, err := d.Prepare()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := root.Issue(t.Context(), token); err == nil {
				t.Error("a CRL's token made a certificate")
			}
			der, err := root.IssueCRL(t.Context(), token)
			if err != nil {
				t.Fatal(err)
			}
			ours, err := x509.ParseRevocationList(der)
			if err != nil {
				t.Fatal(err)
			}
			if err := ours.CheckSignatureFrom(made.Root); err != nil {
				t.Errorf("%s: %v", kt, err)
			}
			want, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
				Number: big.NewInt(200), ThisUpdate: now, NextUpdate: now.Add(time.Hour), RevokedCertificateEntries: revoked,
			}, made.Root, made.RootKey)
			if err != nil {
				t.Fatal(err)
			}
			theirs, err := x509.ParseRevocationList(want)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(ours.RawTBSRevocationList, theirs.RawTBSRevocationList) {
				t.Errorf("%s: got\n%x\nwant\n%x", kt, ours.RawTBSRevocationList, theirs.RawTBSRevocationList)
			}
		}
		log.Close()
	}
}

func TestCRLsRefused(t *testing.T) {
	i, _, _ := newIssuer(t, CreateConfig{IssuerTTL: 2 * time.Hour})
	now := time.Now().Truncate(time.Second)
	serial := big.NewInt(7)
	for _, tc := range []struct {
		want string
		edit func(*CRLRequest)
	}{
		{"crl_number", func(r *CRLRequest) { r.Number = big.NewInt(-1) }},
		{"needs a number", func(r *CRLRequest) { r.Number = nil }},
		{"crl_validity", func(r *CRLRequest) { r.ThisUpdate = now.Add(time.Minute) }},
		{"crl_validity", func(r *CRLRequest) { r.NextUpdate = r.ThisUpdate }},
		{"crl_validity", func(r *CRLRequest) { r.NextUpdate = now.Add(3 * time.Hour) }},
		{"crl_serial", func(r *CRLRequest) {
			r.Revoked = []x509.RevocationListEntry{{SerialNumber: new(big.Int), RevocationTime: now}}
		}},
		{"listed twice", func(r *CRLRequest) {
			r.Revoked = []x509.RevocationListEntry{{SerialNumber: serial, RevocationTime: now}, {SerialNumber: serial, RevocationTime: now}}
		}},
		{"in the future", func(r *CRLRequest) {
			r.Revoked = []x509.RevocationListEntry{{SerialNumber: serial, RevocationTime: now.Add(time.Minute)}}
		}},
		{"reason 8", func(r *CRLRequest) {
			r.Revoked = []x509.RevocationListEntry{{SerialNumber: serial, RevocationTime: now, ReasonCode: 8}}
		}},
		{"no serial", func(r *CRLRequest) { r.Revoked = make([]x509.RevocationListEntry, 1) }},
	} {
		r := CRLRequest{Number: big.NewInt(1), ThisUpdate: now, NextUpdate: now.Add(time.Hour)}
		tc.edit(&r)
		if _, err := i.DraftCRL(r); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("want %q: %v", tc.want, err)
		}
	}
}

// An ML-DSA-65 root vouches for a P-256 issuer and leaf in real TLS 1.3 handshakes between Go programs.
func TestMLDSARootInGoTLS(t *testing.T) {
	i, made, _ := newIssuer(t, CreateConfig{KeyType: MLDSA65})
	if made.Root.SignatureAlgorithm != x509.MLDSA65 || made.Issuer.SignatureAlgorithm != x509.MLDSA65 {
		t.Fatalf("signed with %s and %s", made.Root.SignatureAlgorithm, made.Issuer.SignatureAlgorithm)
	}
	if kt, err := TypeOf(made.Issuer.PublicKey); kt != P256 {
		t.Fatalf("the issuer has a %s key, %v", kt, err)
	}
	encoded, err := trust.EncodeKey(made.RootKey)
	if err != nil {
		t.Fatal(err)
	}
	if back, err := trust.ParseKey(encoded); err != nil || !trust.SameKey(back.Public(), made.Root.PublicKey) {
		t.Errorf("the key does not come back from PEM: %v", err)
	}
	server, client := tlsIdentity(t, i, "server"), tlsIdentity(t, i, "client")
	if err := handshake(t, trust.ServerTLS(func() *trust.Identity { return server }), server.ID, client); err != nil {
		t.Error(err)
	}
	stranger, _, _ := newIssuer(t, CreateConfig{KeyType: MLDSA65})
	client.Bundle = stranger.Bundle()
	if err := handshake(t, trust.ServerTLS(func() *trust.Identity { return server }), server.ID, client); err == nil {
		t.Error("a chain under another ML-DSA root was accepted")
	}
}

func tlsIdentity(t *testing.T, i *Issuer, name string) *trust.Identity {
	t.Helper()
	key, err := GenerateKey(P256)
	if err != nil {
		t.Fatal(err)
	}
	want := id(t, "spiffe://cluster.local/ns/a/sa/"+name)
	cert, err := issue(t, i, profile(t, ProfileConfig{}), Request{ID: want, PublicKey: key.Public()})
	if err != nil {
		t.Fatal(err)
	}
	identity, err := trust.NewIdentity(want, append([]*x509.Certificate{cert}, i.Chain()...), key, i.Bundle(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return identity
}

// handshake connects a client to a server, both ways verified.
func handshake(t *testing.T, serverConfig *tls.Config, want trust.ID, client *trust.Identity) error {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	done := make(chan error, 1)
	go func() {
		conn := tls.Server(a, serverConfig)
		err := conn.HandshakeContext(t.Context())
		if err == nil {
			_, _, err = trust.Verify(conn.ConnectionState().PeerCertificates, trust.Only(client.Bundle), time.Now())
		}
		if err != nil {
			a.Close()
		}
		done <- err
	}()
	conn := tls.Client(b, trust.ClientTLS(want, trust.Only(client.Bundle), func() *trust.Identity { return client }))
	err := conn.HandshakeContext(context.Background())
	if err != nil {
		b.Close()
	}
	return errors.Join(err, <-done)
}

func TestMLDSAIsNotForLeaves(t *testing.T) {
	if _, err := NewProfile("workload", ProfileConfig{KeyTypes: []string{"p256", "mldsa65"}}); err == nil || !strings.Contains(err.Error(), "for roots and issuers only") {
		t.Errorf("a leaf profile took mldsa65: %v", err)
	}
	i, _, _ := newIssuer(t, CreateConfig{})
	_, err := i.Prepare(profile(t, ProfileConfig{}), Request{ID: id(t, "spiffe://cluster.local/ns/a/sa/b"), PublicKey: publicKey(t, MLDSA65)})
	if !errors.Is(err, ErrKey) {
		t.Errorf("a leaf with an ML-DSA key: %v", err)
	}
	other, err := mldsa.GenerateKey(mldsa.MLDSA44())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := TypeOf(other.Public()); err == nil {
		t.Error("ML-DSA-44 was accepted")
	}
	if _, err := tbs.AlgorithmOf(other.Public()); err == nil {
		t.Error("ML-DSA-44 has an algorithm")
	}
}
