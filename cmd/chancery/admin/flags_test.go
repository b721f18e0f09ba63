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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
	var handler grpc.StreamHandler
	var s *grpc.Server
	if ends {
		handler = func(_ any, stream grpc.ServerStream) error {
			go s.Stop()
			<-stream.Context().Done()
			return stream.Context().Err()
		}
	}
	return serveWith(t, handler, &s)
}

// serveWith serves a socket with a gRPC server whose calls a handler answers.
func serveWith(t *testing.T, handler grpc.StreamHandler, s **grpc.Server) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var options []grpc.ServerOption
	if handler != nil {
		options = append(options, grpc.UnknownServiceHandler(handler))
	}
	g := grpc.NewServer(options...)
	*s = g
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	t.Cleanup(func() {
		g.Stop()
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

// TestCallGivesTheServersOwnWords: a refusal is not dressed in gRPC's, and is not taken for a server that is down.
func TestCallGivesTheServersOwnWords(t *testing.T) {
	for _, code := range []codes.Code{codes.FailedPrecondition, codes.Unavailable} {
		var s *grpc.Server
		socket := serveWith(t, func(any, grpc.ServerStream) error { return status.Error(code, "audit log: no space left on device") }, &s)
		if got := ask(t, socket); got != "audit log: no space left on device" {
			t.Errorf("%s: %s", code, got)
		}
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
