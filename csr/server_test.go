package csr_test

import (
	"context"
	"crypto/tls"
	"net"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	istio "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/others"
	"github.com/chancery-project/chancery/trust"
)

func TestServerNeedsAReadyMark(t *testing.T) {
	w := newWorld(t)
	health := healthpb.NewHealthClient(w.dial(nil))
	check := func(want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		resp, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{})
		if err != nil || resp.GetStatus() != want {
			t.Errorf("health is %v, %v; want %v", resp.GetStatus(), err, want)
		}
	}
	check(healthpb.HealthCheckResponse_NOT_SERVING)
	w.server.SetReady(true)
	check(healthpb.HealthCheckResponse_SERVING)
	w.server.SetReady(false)
	check(healthpb.HealthCheckResponse_NOT_SERVING)
}

func TestServerListsItsServices(t *testing.T) {
	w := newWorld(t)
	stream, err := reflectionpb.NewServerReflectionClient(w.dial(nil)).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	resp, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range resp.GetListServicesResponse().GetService() {
		names = append(names, s.GetName())
	}
	for _, want := range []string{"istio.v1.auth.IstioCertificateService", "chancery.v1.Issuance", "grpc.health.v1.Health"} {
		if !slices.Contains(names, want) {
			t.Errorf("%s is not among %q", want, names)
		}
	}
	if slices.Contains(names, "chancery.v1.Admin") {
		t.Error("the admin service is on the network (decision D14)")
	}
}

// A stranger's message is not read, let alone kept: the answer comes before the first byte of it.
func TestStrangersAreAnsweredBeforeTheirMessageIsRead(t *testing.T) {
	w := newWorld(t)
	conn := w.dial(nil)
	for _, method := range []string{"/istio.v1.auth.IstioCertificateService/CreateCertificate", "/chancery.v1.Issuance/Issue"} {
		stream, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, method) // headers only
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.RecvMsg(new(istio.IstioCertificateResponse)); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s: %v", method, err)
		}
	}
}

func TestServerSurvivesAPanic(t *testing.T) {
	w := newWorld(t, withBroken("panics", func() error { panic("index out of range of " + "/etc/secret") }))
	for range 3 {
		for api, err := range w.both(bearer("x", "clusterid", "panics")) {
			if st := status.Convert(err); st.Code() != codes.Internal || strings.Contains(st.Message(), "secret") {
				t.Errorf("%s: got %v", api, st)
			}
		}
	}
	if n := w.metric("chancery_csr_panics_total"); n != 6 {
		t.Errorf("%v panics were counted, want 6", n)
	}
	if log := w.output.String(); !strings.Contains(log, "/etc/secret") || !strings.Contains(log, "world_test.go") && !strings.Contains(log, "server_test.go") {
		t.Errorf("the log has no reason or stack:\n%.2000s", log)
	}
	if _, err := w.istio(bearer(token(claims{}), "clusterid", "Kubernetes"), ask("")); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

// A panic behind admission gives its slot back.
func TestServerPanicHoldsNoSlot(t *testing.T) {
	w := newWorld(t, withPods, func(w *world, c *csr.Config) {
		c.Admission.MaxInFlight = 1
		c.Clusters["Kubernetes"] = csr.ClusterConfig{Cluster: panicsOnNode{w.pods}}
	})
	_, err := w.istio(bearer(ztunnel()), ask(webURI))
	if status.Code(err) != codes.Internal || !w.service.Idle() {
		t.Errorf("got %v, idle is %v", err, w.service.Idle())
	}
	if _, err := w.istio(bearer(ztunnel()), ask("")); err != nil {
		t.Error(err)
	}
}

type panicsOnNode struct{ *podCluster }

func (panicsOnNode) OnNode(context.Context, csr.Caller, string, string) error { panic("bug") }

func TestServerBoundsMessages(t *testing.T) {
	w := newWorld(t)
	good := bearer(token(claims{}))
	_, err := w.istio(good, &istio.IstioCertificateRequest{Csr: strings.Repeat("x", 3<<20)})
	wantStatus(t, err, codes.ResourceExhausted, "", "larger than max")
	_, err = w.istio(good, &istio.IstioCertificateRequest{Csr: strings.Repeat("x", 1<<20)})
	wantStatus(t, err, codes.InvalidArgument, csr.ReasonCSR, "")
	_, err = w.istio(bearer(strings.Repeat("x", 1<<20)), ask(""))
	if c := status.Code(err); c == codes.OK || c == codes.Unauthenticated {
		t.Errorf("1 MB of headers was read: %v", err)
	}
	if _, err := w.istio(good, ask("")); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

func TestServerTLS(t *testing.T) {
	w := newWorld(t)
	for _, tc := range []struct {
		name string
		most uint16
		ok   bool
	}{{"1.3", tls.VersionTLS13, true}, {"1.2", tls.VersionTLS12, false}} {
		conn, err := tls.Dial("tcp", w.addr, &tls.Config{InsecureSkipVerify: true, MaxVersion: tc.most, NextProtos: []string{"h2"}})
		if (err == nil) != tc.ok {
			t.Errorf("TLS %s: %v", tc.name, err)
		}
		if err == nil {
			id, _, err := trust.Verify(conn.ConnectionState().PeerCertificates, trust.Only(w.issuer.Load().Bundle()), w.own.ReceivedAt)
			if err != nil || id.String() != "spiffe://cluster.local/chancery/server" {
				t.Errorf("the server is %s, %v (decision D15)", id, err)
			}
			conn.Close()
		}
	}
	plain, err := net.Dial("tcp", w.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	plain.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	if n, _ := plain.Read(make([]byte, 100)); n > 7 { // an alert has 7 bytes
		t.Errorf("the server answers without TLS: %d bytes", n)
	}
}

func TestServerEndsWithItsContext(t *testing.T) {
	w := newWorld(t)
	if _, err := w.istio(bearer(token(claims{})), ask("")); err != nil {
		t.Fatal(err)
	}
	if err := w.stop(); err != nil {
		t.Errorf("Run returned %v", err)
	}
	if _, err := net.Dial("tcp", w.addr); err == nil {
		t.Error("it still listens")
	}
	for range 3000 { // also if the context ends before serving begins
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		if err := csr.NewServer(w.service, func() *trust.Identity { return w.own }).Run(ctx, l); err != nil {
			t.Fatalf("Run with an ended context returned %v", err)
		}
	}
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	l.Close()
	if err := csr.NewServer(w.service, func() *trust.Identity { return w.own }).Run(t.Context(), l); err == nil {
		t.Error("a closed listener is no error")
	}
}

func TestServerWithoutACertificateYet(t *testing.T) {
	w := newWorld(t)
	w.server = csr.NewServer(w.service, func() *trust.Identity { return nil })
	w.serve()
	if _, err := tls.Dial("tcp", w.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}); err == nil {
		t.Error("a handshake succeeded without a certificate")
	}
}

func TestNewServiceNeedsClusters(t *testing.T) {
	if _, err := csr.NewService(csr.Config{}); err == nil {
		t.Error("no clusters were accepted")
	}
}

func TestAuditSaysWhoAsked(t *testing.T) {
	w := newWorld(t, withPods)
	if _, err := w.istio(bearer(ztunnel()), ask(webURI)); err != nil {
		t.Fatal(err)
	}
	records := w.records(audit.Intent)
	r := records[len(records)-1]
	who := r.Requester
	if r.SPIFFEID != webURI || who.SPIFFEID != "spiffe://cluster.local/ns/istio-system/sa/ztunnel" || who.Method != csr.MethodToken ||
		who.Cluster != "Kubernetes" || who.Pod != "ztunnel-0" || who.PodUID != "uid-zt" || who.Node != "node-1" ||
		who.CredentialID != "JTI=jti-ztunnel" || !strings.HasPrefix(who.Remote, "127.0.0.1:") {
		t.Errorf("the intent is %+v", r)
	}
}

// TestBoundOfStrangersMessages: gRPC's own services take messages from anybody, but of few calls at a time; ours go on.
func TestBoundOfStrangersMessages(t *testing.T) {
	w := newWorld(t)
	conn := w.dial(nil)
	open := func(ctx context.Context) error {
		stream, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
		if err == nil {
			err = stream.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}})
		}
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	ctx, cancel := context.WithCancel(t.Context())
	for i := range others.Max {
		if err := open(ctx); err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
	}
	health := healthpb.NewHealthClient(w.dial(nil)) // on another connection
	if _, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one more: %v", err)
	}
	if _, err := chanceryv1.NewIssuanceClient(conn).Issue(t.Context(), &chanceryv1.IssueRequest{}); status.Code(err) != codes.Unauthenticated {
		t.Errorf("our own method: %v", err)
	}
	cancel()
	for status.Code(open(t.Context())) == codes.ResourceExhausted { // until the server has seen the end of one
	}
}

// A call that is under way when the server is told to stop is finished, on a connection that was told to go.
func TestCallsUnderWayAreFinished(t *testing.T) {
	begun, goOn := make(chan struct{}), make(chan struct{})
	w := newWorld(t, withPods, func(w *world, c *csr.Config) {
		c.Clusters["Kubernetes"] = csr.ClusterConfig{Cluster: waitsOnNode{w.pods, begun, goOn}}
	})
	answered := make(chan error, 1)
	go func() {
		_, err := w.istio(bearer(ztunnel()), ask(webURI))
		answered <- err
	}()
	<-begun
	stopped := make(chan error, 1)
	go func() { stopped <- w.stop() }()
	for !w.server.Stopping() {
		runtime.Gosched()
	}
	select {
	case err := <-answered:
		t.Errorf("cut off: %v", err)
	case err := <-stopped:
		t.Errorf("it did not wait: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	close(goOn)
	if err := <-answered; err != nil {
		t.Errorf("the call under way: %v", err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

type waitsOnNode struct {
	*podCluster
	begun, goOn chan struct{}
}

func (c waitsOnNode) OnNode(ctx context.Context, who csr.Caller, namespace, account string) error {
	close(c.begun)
	<-c.goOn
	return c.podCluster.OnNode(ctx, who, namespace, account)
}

// healthy asks gRPC's health service.
func (w *world) healthy() error {
	resp, err := healthpb.NewHealthClient(w.dial(nil)).Check(w.t.Context(), &healthpb.HealthCheckRequest{})
	if err == nil && resp.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		err = status.Error(codes.Unavailable, resp.GetStatus().String())
	}
	return err
}
