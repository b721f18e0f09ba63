package agent

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"log/slog"
	"math/big"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/trust"
)

// TestD23WithheldCRLsAreTold: an agent acknowledges CRLs that it took over and does not serve; the server must hear that nobody
// behind it enforces them.
func TestD23WithheldCRLsAreTold(t *testing.T) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	newKey := func() *ecdsa.PrivateKey {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		must(err)
		return key
	}
	newRoot := func(name string) (*x509.Certificate, *ecdsa.PrivateKey) {
		key := newKey()
		x := &x509.Certificate{
			SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
			IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		}
		der, err := x509.CreateCertificate(rand.Reader, x, x, key.Public(), key)
		must(err)
		cert, err := x509.ParseCertificate(der)
		must(err)
		return cert, key
	}
	td, err := trust.ParseDomain("td")
	must(err)
	id, err := trust.ParseID("spiffe://td/ns/foo/sa/web")
	must(err)
	own, ownKey := newRoot("own")
	other, otherKey := newRoot("other")
	plain, err := trust.NewBundle(td, 1, []*x509.Certificate{own, other})
	must(err)
	bundle := func(issuer *x509.Certificate, key crypto.Signer) *trust.Bundle {
		der, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
			Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour), NextUpdate: time.Now().Add(time.Hour),
		}, issuer, key)
		must(err)
		crls, err := trust.NewCRLs(plain, [][]byte{der}, nil, time.Now())
		must(err)
		return plain.WithCRLs(crls)
	}
	k := &Keeper{notEnforcing: func() []string { return []string{"a proxy"} }}
	k.Keeper = rotate.NewKeeper(rotate.KeeperConfig{ID: id, Logger: slog.New(slog.DiscardHandler), Issue: func(_ context.Context, key crypto.Signer) (rotate.Issued, error) {
		x := &x509.Certificate{
			SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
			URIs: []*url.URL{{Scheme: "spiffe", Host: "td", Path: "/ns/foo/sa/web"}}, KeyUsage: x509.KeyUsageDigitalSignature,
		}
		der, err := x509.CreateCertificate(rand.Reader, x, own, key.Public(), ownKey)
		if err != nil {
			return rotate.Issued{}, err
		}
		leaf, err := x509.ParseCertificate(der)
		return rotate.Issued{Chain: []*x509.Certificate{leaf}, Bundle: plain}, err
	}})
	_, first := k.Current()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- k.Keeper.Run(ctx) }()
	defer func() {
		cancel()
		must(<-done)
	}()
	<-first
	must(k.Adopt(bundle(other, otherKey)))
	if got := k.notices(); len(got) != 2 || !strings.Contains(got[0], "are not served to its proxies") || got[1] != "a proxy" {
		t.Errorf("CRLs without that of the own issuer: %q", got)
	}
	must(k.Adopt(bundle(own, ownKey)))
	if got := k.notices(); len(got) != 1 || got[0] != "a proxy" {
		t.Errorf("CRLs that are served: %q", got)
	}
}
