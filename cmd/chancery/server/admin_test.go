package server

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
	"github.com/chancery-project/chancery/cmd/chancery/server/answering"
	"github.com/chancery-project/chancery/sds/socket"
)

// TestD14AdminSocket: root and the server's own user get an answer, nobody else, and who asked is in the audit log.
func TestD14AdminSocket(t *testing.T) {
	dir := t.TempDir()
	text := strings.Replace(minimal, "state/state.db", "state.db", 1)
	s, err := parseConfig([]byte(text), filepath.Join(dir, "server.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := Init(t.Context(), s, t.Output()); err != nil {
		t.Fatal(err)
	}
	st, err := store.OpenSQLite(t.Context(), s.State.SQLite)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	if err != nil {
		t.Fatal(err)
	}
	log, err := audit.Open(s.AuditLog)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	a, err := authority.Open(t.Context(), authority.Config{
		Domain: s.domain, Store: st, Sealer: sealer, Log: log, Logger: discard, Profiles: []*ca.Profile{s.profile},
	})
	if err != nil {
		t.Fatal(err)
	}

	admin := answering.Service{Authority: a, Log: log}
	for name, ctx := range map[string]context.Context{
		"another user": peer.NewContext(t.Context(), &peer.Peer{AuthInfo: socket.Info{Peer: socket.Peer{UID: 54321}}}),
		"nobody":       t.Context(),
	} {
		if _, err := admin.GetAuthorities(ctx, nil); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: got %v, want PermissionDenied", name, err)
		}
		if _, err := admin.GetStatus(ctx, nil); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: status gives %v, want PermissionDenied", name, err)
		}
	}

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	l, err := adminsocket.Listen(s.AdminSocket())
	if err != nil {
		t.Fatal(err)
	}
	go func() { ended <- adminsocket.Serve(ctx, l, admin) }()
	if info, err := os.Stat(s.AdminSocket()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket has mode %v (%v), want 0600", info.Mode(), err)
	}
	var resp *chanceryv1.GetAuthoritiesResponse
	err = s.EitherWay(t.Context(), func() error { return store.ErrLocked }, func(ctx context.Context, c chanceryv1.AdminClient) (err error) {
		resp, err = c.GetAuthorities(ctx, &chanceryv1.GetAuthoritiesRequest{})
		return err
	})
	if err != nil || len(resp.GetDomains()) != 1 || len(resp.GetDomains()[0].GetAuthorities()) != 2 {
		t.Errorf("got %v, %v", resp, err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	lines, err := os.ReadFile(s.AuditLog)
	if err != nil || bytes.Count(lines, []byte(`"detail":"authority show"`)) != 1 {
		t.Errorf("the audit log has not one line of it (%v):\n%s", err, lines)
	}
}
