package admin

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// ask asks whatever serves a socket for its status.
func ask(t *testing.T, socket string) string {
	t.Helper()
	f := Flags{Socket: socket}
	err := f.Call(t.Context(), 10*time.Second, func(ctx context.Context, c chanceryv1.AdminClient) error {
		_, err := c.GetStatus(ctx, &chanceryv1.GetStatusRequest{})
		return err
	})
	if err == nil {
		t.Fatal("it answers")
	}
	return err.Error()
}

// serve serves a socket with a gRPC server that knows no service, or ends when it is asked.
func serve(t *testing.T, ends bool) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var options []grpc.ServerOption
	var s *grpc.Server
	if ends {
		options = append(options, grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			go s.Stop()
			<-stream.Context().Done()
			return stream.Context().Err()
		}))
	}
	s = grpc.NewServer(options...)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		<-served
	})
	return socket
}

// TestCallSaysWhatIsWrong: above all, that it is not known whether a change was made, where that is so.
func TestCallSaysWhatIsWrong(t *testing.T) {
	if got := ask(t, filepath.Join(t.TempDir(), "none")); !strings.Contains(got, "no server answers on the admin socket") {
		t.Error(got)
	}
	if got := ask(t, serve(t, false)); !strings.Contains(got, "is no admin socket of a server") {
		t.Error(got)
	}
	if got := ask(t, serve(t, true)); !strings.Contains(got, "whether it was done is not known") {
		t.Error(got)
	}
}

func TestCallWithoutTheRight(t *testing.T) {
	if os.Getuid() == 0 {
		t.Skip("root may use every socket")
	}
	socket := serve(t, false)
	if err := os.Chmod(socket, 0); err != nil {
		t.Fatal(err)
	}
	if got := ask(t, socket); !strings.Contains(got, "may be used by root and the server's user only") {
		t.Error(got)
	}
}
