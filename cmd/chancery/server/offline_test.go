package server

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/server/answering"
	"github.com/chancery-project/chancery/sds/socket"
)

// TestD14OfflineCalls: the calls that change the issuer are for root and the server's own user, and bounded.
func TestD14OfflineCalls(t *testing.T) {
	srv, stop := started(t, "")
	defer stop()
	admin := answering.Service{Authority: srv.authority, Log: srv.log}
	as := func(uid uint32) (request, imported error) {
		ctx := peer.NewContext(t.Context(), &peer.Peer{AuthInfo: socket.Info{Peer: socket.Peer{UID: uid}}})
		_, request = admin.RequestIssuer(ctx, &chanceryv1.RequestIssuerRequest{})
		_, imported = admin.ImportIssuer(ctx, &chanceryv1.ImportIssuerRequest{Certificates: [][]byte{{1, 2, 3}}})
		return request, imported
	}
	request, imported := as(54321)
	if status.Code(request) != codes.PermissionDenied || status.Code(imported) != codes.PermissionDenied {
		t.Errorf("another user: %v, %v", request, imported)
	}
	request, imported = as(0)
	if status.Code(request) != codes.FailedPrecondition || !strings.Contains(request.Error(), "the root's key lies here") {
		t.Errorf("a request where the root is ours: %v", request)
	}
	if status.Code(imported) != codes.InvalidArgument {
		t.Errorf("an import of garbage: %v", imported)
	}
	ctx := peer.NewContext(t.Context(), &peer.Peer{AuthInfo: socket.Info{Peer: socket.Peer{UID: 0}}})
	if _, err := admin.ImportIssuer(ctx, &chanceryv1.ImportIssuerRequest{Certificates: make([][]byte, 1000)}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("an import of too much: %v", err)
	}
	if _, err := admin.ImportIssuer(ctx, &chanceryv1.ImportIssuerRequest{}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("an import of nothing: %v", err)
	}
}
