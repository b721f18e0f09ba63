package sds

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"math/big"
	"testing"
	"time"

	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc/metadata"

	"github.com/chancery-project/chancery/sds/socket"
	"github.com/chancery-project/chancery/trust"
)

// revoking returns a bundle with a CRL of the issuer that lists these identities' SVIDs.
func (ca *testCA) revoking(b *trust.Bundle, number int64, ids ...*trust.Identity) *trust.Bundle {
	ca.t.Helper()
	l := &x509.RevocationList{Number: big.NewInt(number), ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(time.Hour)}
	for _, id := range ids {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: id.Leaf().SerialNumber, RevocationTime: l.ThisUpdate})
	}
	der, err := x509.CreateRevocationList(rand.Reader, l, ca.issuer, ca.key)
	must(ca.t, err)
	crls, err := trust.NewCRLs(b, [][]byte{der}, []*x509.Certificate{ca.issuer}, time.Now())
	must(ca.t, err)
	return b.WithCRLs(crls)
}

func crlOf(s *tlsv3.Secret) string {
	return string(s.GetValidationContext().GetCrl().GetInlineBytes())
}

// Roots and CRLs come in one push, for leaves only; without CRLs there is no field, for Envoy takes an empty one amiss.
func TestD22CRLsComeWithTheRoots(t *testing.T) {
	ca, other := newCA(t, "cluster.local"), newCA(t, "other.test")
	web := ca.identity("/ns/foo/sa/web")
	plain, foreign := ca.bundle(), other.bundle()
	with := func(b *trust.Bundle) View {
		return View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{b, foreign}, Naming: map[string][]trust.ID{"foo/web": {web.ID}}}
	}
	box := newBox(new(View))
	box.set(with(plain))
	a := start(t, Config{Attest: box.attest})
	contexts := []string{"ROOTCA", "service:foo/web", "spiffe://cluster.local"}
	c := a.sotw(append(contexts, "ALL", "default", "spiffe://other.test")...)
	got := c.next()
	c.ack(append(contexts, "ALL", "default", "spiffe://other.test")...)
	for name, s := range got {
		if v := s.GetValidationContext(); v.GetCrl() != nil || v.GetOnlyVerifyLeafCertCrl() {
			t.Errorf("%s without CRLs: %v", name, v)
		}
	}

	grown := ca.bundle(newCA(t, "cluster.local").root)
	for _, b := range []*trust.Bundle{ca.revoking(plain, 1), ca.revoking(plain, 2, web), ca.revoking(grown, 3, web), plain} {
		box.set(with(b))
		got := c.next()
		for _, name := range contexts {
			v := got[name].GetValidationContext()
			want(t, name+": roots", trustedCA(got[name]), string(b.PEM()))
			want(t, name+": CRLs", crlOf(got[name]), string(b.CRLs().PEM()))
			want(t, name+": leaf only", v.GetOnlyVerifyLeafCertCrl(), b.CRLs() != nil)
			want(t, name+": a field for none", v.GetCrl() != nil, b.CRLs() != nil)
			must(t, v.ValidateAll())
		}
		want(t, "other.test: CRLs", crlOf(got["spiffe://other.test"]), "")
	}
}

// Envoy's SPIFFE validator ignores CRLs: ALL carries none, and a change of CRLs is no change of it.
func TestD23AllCarriesNoCRL(t *testing.T) {
	ca := newCA(t, "cluster.local")
	web, plain := ca.identity("/ns/foo/sa/web"), ca.bundle()
	box := newBox(&View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{plain}})
	a := start(t, Config{Attest: box.attest})
	d := a.delta(nil, "ALL", "ROOTCA")
	want(t, "first", namesOf(d.next()), "ALL ROOTCA")
	d.ack()
	box.set(View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{ca.revoking(plain, 1, web)}})
	got := d.next()
	want(t, "with CRLs", namesOf(got), "ROOTCA")
	d.ack()
	fresh := a.sotw("ALL")
	v := fresh.next()["ALL"].GetValidationContext()
	if v.GetCrl() != nil || v.GetOnlyVerifyLeafCertCrl() || v.GetCustomValidatorConfig() == nil {
		t.Errorf("ALL is %v", v)
	}
}

func TestWorkloadAPIHasCRLs(t *testing.T) {
	ca := newCA(t, "cluster.local")
	web, plain := ca.identity("/ns/foo/sa/web"), ca.bundle()
	box := newBox(&View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{plain}})
	a := start(t, Config{Attest: box.attest})
	ctx := metadata.AppendToOutgoingContext(a.context(), socket.SecurityHeader, "true")
	api := workload.NewSpiffeWorkloadAPIClient(a.conn)
	svids, err := api.FetchX509SVID(ctx, new(workload.X509SVIDRequest))
	must(t, err)
	bundles, err := api.FetchX509Bundles(ctx, new(workload.X509BundlesRequest))
	must(t, err)
	next := func() [2][][]byte {
		t.Helper()
		s, err := svids.Recv()
		must(t, err)
		b, err := bundles.Recv()
		must(t, err)
		return [2][][]byte{s.GetCrl(), b.GetCrl()}
	}
	for _, crls := range next() {
		want(t, "CRLs", len(crls), 0)
	}
	for _, b := range []*trust.Bundle{ca.revoking(plain, 1), ca.revoking(plain, 2, web), plain} {
		box.set(View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{b}})
		for _, crls := range next() {
			want(t, "CRLs", string(bytes.Join(crls, nil)), string(bytes.Join(b.CRLs().DER(), nil)))
		}
	}
}
