package mtls

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
)

// A stream of gRPC ends with its client's certificate, and the next one is under the SVID that the client has by then.
func TestGRPCStreamsEndWithTheirPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		td := newAuthority(t, "td")
		b := trusted(td.bundle(1))
		server, client := newParty(t, td.identity("/db", 500*time.Hour, nil), b, Anyone()), newParty(t, td.identity("/web", time.Hour, nil), b, Anyone())
		l := bufconn.Listen(1 << 16)
		g := grpc.NewServer(grpc.Creds(credentials.NewTLS(server.ServerTLS())))
		grpc_health_v1.RegisterHealthServer(g, health.NewServer())
		go g.Serve(server.Listener(l))
		defer g.Stop()
		conn, err := grpc.NewClient("passthrough:///db", grpc.WithTransportCredentials(credentials.NewTLS(client.ClientTLS())),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		watch := func() grpc_health_v1.Health_WatchClient {
			s, err := grpc_health_v1.NewHealthClient(conn).Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Recv(); err != nil {
				t.Fatal(err)
			}
			return s
		}
		stream := watch()
		end := client.own.Load().NotAfter()
		time.Sleep(50 * time.Minute)
		client.own.Store(td.identity("/web", time.Hour, nil)) // renewed in time; the stream is that of the first SVID
		if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
			t.Errorf("the stream ended with %v", err)
		}
		if late := time.Since(end); late < 0 || late > time.Second {
			t.Errorf("it ended %s after the client's certificate", late)
		}
		watch()
	})
}
