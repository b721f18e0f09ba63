package client_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/parent/parenttest"
	"github.com/chancery-project/chancery/ca/parent/renewal"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/client/source"
	"github.com/chancery-project/chancery/trust"
)

// above is a server of Issuers that does what its peer says. What a real one does is tested in csr/issuers and test/e2e.
type above struct {
	chanceryv1.UnimplementedIssuersServer
	t     *testing.T
	peer  *parenttest.Peer
	token string
}

func (a *above) SignIssuer(ctx context.Context, r *chanceryv1.SignIssuerRequest) (*chanceryv1.SignIssuerResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	if got := md.Get("authorization"); len(got) != 1 || got[0] != "Bearer "+a.token || strings.Join(md.Get("clusterid"), "") != "east" || r.GetLifetime().AsDuration() != parenttest.Lifetime {
		a.t.Errorf("asked with %v, lifetime %v", md, r.GetLifetime())
	}
	switch a.peer.Fault() {
	case parenttest.Garbage:
		return &chanceryv1.SignIssuerResponse{Chain: [][]byte{[]byte("garbage")}}, nil
	case parenttest.Oversized:
		return &chanceryv1.SignIssuerResponse{Chain: [][]byte{bytes.Repeat([]byte{1}, 8<<20)}}, nil
	case parenttest.Hanging:
		select {
		case <-ctx.Done():
		case <-a.peer.Closed():
		}
		return nil, ctx.Err()
	}
	chain, err := a.peer.Sign(r.GetCsr())
	if err != nil {
		return nil, status.Error(codes.PermissionDenied, err.Error())
	}
	resp := new(chanceryv1.SignIssuerResponse)
	for _, c := range chain {
		resp.Chain = append(resp.Chain, c.Raw)
	}
	return resp, nil
}

// serve serves on an address of before, or, if that is empty, on a new one.
func (a *above) serve(addr string) *grpc.Server {
	w := a.peer.World
	key := newKey()
	leaf := parenttest.Template("", time.Hour)
	leaf.IsCA, leaf.MaxPathLen, leaf.KeyUsage, leaf.URIs = false, 0, x509.KeyUsageDigitalSignature, []*url.URL{trust.SystemID(w.Domain, "server").URL()}
	leaf.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	cert := must(w.Above.Sign(leaf, key.Public()))
	own := must(trust.NewIdentity(trust.SystemID(w.Domain, "server"), []*x509.Certificate{cert, w.Above.Cert}, key,
		must(trust.NewBundle(w.Domain, 1, []*x509.Certificate{w.Root.Cert})), time.Now()))
	g := grpc.NewServer(grpc.Creds(credentials.NewTLS(trust.ServerTLS(func() *trust.Identity { return own }))))
	chanceryv1.RegisterIssuersServer(g, a)
	var l net.Listener
	if addr == "" {
		l = must(net.Listen("tcp", "127.0.0.1:0"))
	} else {
		l = parenttest.Listen(a.t, addr)
	}
	go g.Serve(l)
	a.t.Cleanup(g.Stop)
	return g
}

func TestParentContract(t *testing.T) {
	bearer := token("parent", time.Hour)
	parenttest.Run(t, parenttest.Config{Secrets: []string{bearer}, Start: func(t *testing.T, p *parenttest.Peer) renewal.Parent {
		a := &above{t: t, peer: p, token: bearer}
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		addr := l.Addr().String()
		l.Close()
		g := a.serve(addr)
		p.Switch(func() { g.Stop() }, func() { g = a.serve(addr) })
		roots := filepath.Join(t.TempDir(), "roots.pem")
		(&world{t: t}).write(roots, trust.EncodeCertificates(p.World.Root.Cert))
		return client.NewParent(client.Config{
			Servers: []string{addr}, Domain: p.World.Domain, Roots: source.RootsFile(roots), Cluster: "east", TTL: parenttest.Lifetime,
			Token: func(context.Context) (string, error) { return bearer, nil },
		})
	}})
}

// A token that has ended is not sent, and none is an error: a certificate is not enough for an issuer.
func TestParentNeedsAToken(t *testing.T) {
	w := newWorld(t)
	for want, source := range map[string]func(context.Context) (string, error){
		"no token to come with": nil,
		"the token ended at":    func(context.Context) (string, error) { return token("old", -time.Hour), nil },
	} {
		c := w.config()
		c.Token, c.Current = source, w.own.Load
		if _, err := client.NewParent(c).Sign(t.Context(), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// A server whose config lists nobody does not know the API.
func TestParentThatSignsForNobody(t *testing.T) {
	w := newWorld(t)
	if _, err := client.NewParent(w.config()).Sign(t.Context(), nil); status.Code(err) != codes.Unimplemented {
		t.Errorf("got %v", err)
	}
}
