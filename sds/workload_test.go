package sds

import (
	"context"
	"crypto/x509"
	"strings"
	"testing"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/chancery-project/chancery/sds/socket"
	"github.com/chancery-project/chancery/trust"
)

func x509Roots(roots []*x509.Certificate) x509.VerifyOptions {
	pool := x509.NewCertPool()
	for _, r := range roots {
		pool.AddCert(r)
	}
	return x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}
}

// watcher hands what go-spiffe's client sees to the test.
type watcher struct {
	updates chan *workloadapi.X509Context
	bundles chan *x509bundle.Set
	errs    chan error
}

func newWatcher() *watcher {
	return &watcher{make(chan *workloadapi.X509Context, 10), make(chan *x509bundle.Set, 10), make(chan error, 100)}
}

func (w *watcher) OnX509ContextUpdate(c *workloadapi.X509Context) { w.updates <- c }
func (w *watcher) OnX509ContextWatchError(err error)              { w.errs <- err }
func (w *watcher) OnX509BundlesUpdate(s *x509bundle.Set)          { w.bundles <- s }
func (w *watcher) OnX509BundlesWatchError(err error)              { w.errs <- err }

func (a *agent) workload() *workloadapi.Client {
	a.t.Helper()
	c, err := workloadapi.New(a.context(), workloadapi.WithAddr(a.socket))
	must(a.t, err)
	a.t.Cleanup(func() { c.Close() })
	return c
}

func TestWorkloadAPIWithGoSpiffe(t *testing.T) {
	ca, other := newCA(t, "cluster.local"), newCA(t, "other.test")
	web, api := ca.identity("/ns/foo/sa/web"), ca.identity("/ns/foo/sa/api")
	ownBundle, otherBundle := ca.bundle(), other.bundle()
	box := newBox(new(View))
	a := start(t, Config{Attest: box.attest})
	client, w := a.workload(), newWatcher()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 2)
	go func() { ended <- client.WatchX509Context(ctx, w) }()
	go func() { ended <- client.WatchX509Bundles(ctx, w) }()

	// Nothing yet: the client waits rather than failing.
	a.waitForAll("waiting", 2, anyState)
	box.set(View{Identities: []*trust.Identity{web, api}, Hints: []string{"main", "main"}, Bundles: []*trust.Bundle{ownBundle, otherBundle}})
	x := <-w.updates
	want(t, "SVIDs", len(x.SVIDs), 2)
	want(t, "default", x.DefaultSVID().ID.String(), web.ID.String())
	want(t, "hint", x.SVIDs[0].Hint, "main")
	want(t, "duplicate hint", x.SVIDs[1].Hint, "")
	want(t, "serial", x.DefaultSVID().Certificates[0].SerialNumber.String(), web.Leaf().SerialNumber.String())
	want(t, "chain", len(x.DefaultSVID().Certificates), 2)
	want(t, "bundles", x.Bundles.Len(), 2)
	want(t, "bundles", (<-w.bundles).Len(), 2)
	a.waitForAll("delivered", 2, func(st StreamStatus) bool { return len(st.Resources) == 1 && st.Resources[0].Sent.Generation == 1 })

	// A view with the same content is not sent; a renewed SVID is, and the bundles stream hears nothing of it.
	box.set(View{Identities: []*trust.Identity{web, api}, Hints: []string{"main"}, Bundles: []*trust.Bundle{ca.bundle(), otherBundle}})
	renewed := ca.identity("/ns/foo/sa/web")
	box.set(View{Identities: []*trust.Identity{renewed}, Bundles: []*trust.Bundle{ownBundle, otherBundle}})
	x = <-w.updates
	want(t, "SVIDs", len(x.SVIDs), 1)
	want(t, "serial", x.DefaultSVID().Certificates[0].SerialNumber.String(), renewed.Leaf().SerialNumber.String())

	// The federated domain goes, the own one trusts nobody any more: both reach the client as full state.
	box.set(View{Identities: []*trust.Identity{renewed}, Bundles: []*trust.Bundle{ca.emptyBundle()}})
	x = <-w.updates
	want(t, "bundles", x.Bundles.Len(), 1)
	b, ok := x.Bundles.Get(spiffeid.RequireTrustDomainFromString("cluster.local"))
	if !ok || b.HasX509Authority(ca.root) {
		t.Error("the emptied bundle still has the old root")
	}
	want(t, "bundles", (<-w.bundles).Len(), 1)

	// All is withdrawn.
	box.set(View{Bundles: []*trust.Bundle{ownBundle}})
	wantCode(t, <-w.errs, codes.PermissionDenied, "no identity issued")
	cancel()
	<-ended
	<-ended
	want(t, "pushes", a.metric("pushes_total", APIX509SVID), 3)
}

func TestWorkloadAPIRefusals(t *testing.T) {
	ca := newCA(t, "cluster.local")
	box := newBox(&View{Identities: []*trust.Identity{ca.identity("/a")}, Bundles: []*trust.Bundle{ca.bundle()}})
	a := start(t, Config{Attest: box.attest})
	api := workload.NewSpiffeWorkloadAPIClient(a.conn)
	for _, header := range [][]string{nil, {socket.SecurityHeader, "false"}, {socket.SecurityHeader, ""}} {
		stream, err := api.FetchX509SVID(metadata.AppendToOutgoingContext(a.context(), header...), new(workload.X509SVIDRequest))
		must(t, err)
		_, err = stream.Recv()
		wantCode(t, err, codes.InvalidArgument, socket.SecurityHeader)
		_, err = api.FetchJWTSVID(metadata.AppendToOutgoingContext(a.context(), header...), new(workload.JWTSVIDRequest))
		wantCode(t, err, codes.InvalidArgument, socket.SecurityHeader)
	}
	ctx := metadata.AppendToOutgoingContext(a.context(), socket.SecurityHeader, "true")
	_, err := api.FetchJWTSVID(ctx, new(workload.JWTSVIDRequest))
	wantCode(t, err, codes.Unimplemented, "X.509 profile only")
	_, err = api.ValidateJWTSVID(ctx, new(workload.ValidateJWTSVIDRequest))
	wantCode(t, err, codes.Unimplemented, "X.509 profile only")
	wit, err := api.FetchWITBundles(ctx, new(workload.WITBundlesRequest))
	must(t, err)
	_, err = wit.Recv()
	wantCode(t, err, codes.Unimplemented, "X.509 profile only")
	stream, err := api.FetchX509SVID(ctx, new(workload.X509SVIDRequest))
	must(t, err)
	r, err := stream.Recv()
	must(t, err)
	want(t, "SVIDs", len(r.GetSvids()), 1)
	want(t, "CRLs", len(r.GetCrl()), 0)

	refusing := start(t, Config{Attest: func(context.Context, Peer) (Source, error) { return nil, &Refused{Reason: "unknown_uid"} }})
	_, err = refusing.workload().FetchX509Context(t.Context())
	wantCode(t, err, codes.PermissionDenied, "no identity issued: unknown_uid")
}

func TestHints(t *testing.T) {
	v := &View{Hints: []string{"a", strings.Repeat("x", 1025), "a", "b"}}
	for i, hint := range []string{"a", "", "", "b", ""} {
		want(t, "hint", v.Hint(i), hint)
	}
}
