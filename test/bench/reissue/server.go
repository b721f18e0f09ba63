package main

import (
	"context"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/client/source"
	"github.com/chancery-project/chancery/test/bench/parts"
)

// pollEvery is how often the rotation's phase is looked at, which is how exactly its begin is known.
const pollEvery = 100 * time.Millisecond

// server is the server under test.
type server struct {
	process        *parts.Process
	binary, config string
	addr           string
	trusted        func() ([]*x509.Certificate, error) // its roots, read again each time
	conn           *grpc.ClientConn
	admin          chanceryv1.AdminClient
}

func startServer(ctx context.Context, dir string) (*server, error) {
	binary, err := parts.Binary(ctx, dir)
	if err != nil {
		return nil, err
	}
	s := &server{binary: binary, config: filepath.Join(dir, "server.yaml")}
	text := fmt.Sprintf(parts.ServerConfig, "sqlite: state.db", filepath.Join(dir, "jwks.json"))
	if err := os.WriteFile(s.config, []byte(text), 0o600); err != nil {
		return nil, fmt.Errorf("writing server config: %w", err)
	}
	if err := parts.MakeAuthority(ctx, binary, s.config); err != nil {
		return nil, err
	}
	s.trusted = source.RootsFile(filepath.Join(dir, "roots.pem"))
	if s.process, err = parts.Start(ctx, dir, binary, "server", "-c", s.config); err != nil {
		return nil, err
	}
	addrs, err := s.process.Addresses(ctx, filepath.Join(dir, "server.addr"))
	if err == nil {
		err = s.process.WaitFor(ctx, "readiness", func() bool { return parts.Get(ctx, "http://"+addrs["metrics"]+"/readyz") == nil })
	}
	if err == nil {
		s.addr = addrs["listen"]
		s.conn, err = grpc.NewClient("unix:"+filepath.Join(dir, "admin.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	}
	if err != nil {
		s.process.Stop()
		return nil, err
	}
	s.admin = chanceryv1.NewAdminClient(s.conn)
	return s, nil
}

func (s *server) stop() {
	_ = s.conn.Close()
	s.process.Stop()
}

// awaitSync waits until so many agents have a stream and all that there is.
func (s *server) awaitSync(ctx context.Context, agents int, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		got, err := s.admin.ListRevocations(ctx, &chanceryv1.ListRevocationsRequest{})
		if err != nil {
			return fmt.Errorf("waiting for each agent's stream: %w", err)
		}
		if got.GetAgents() == uint32(agents) && got.GetAcknowledged() == got.GetAgents() {
			return nil
		}
		time.Sleep(10 * pollEvery)
	}
}

// awaitPhase waits for a phase of the rotation, and returns when it had not begun yet for certain.
func (s *server) awaitPhase(ctx context.Context, phase string, limit time.Duration) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var last string
	var gates []*chanceryv1.Gate
	for before := time.Now(); ; {
		now := time.Now()
		got, err := s.admin.GetRotation(ctx, &chanceryv1.GetRotationRequest{})
		if err != nil {
			return time.Time{}, fmt.Errorf("waiting for phase %s; the rotation is in %s, behind %v: %w", phase, last, gates, err)
		}
		r := got.GetRotation()
		if r.GetPhase() == phase {
			return before, nil
		}
		gates = r.GetGates()
		if before = now; r.GetPhase() != last {
			last = r.GetPhase()
			fmt.Fprintf(os.Stderr, "%s rotation in phase %q\n", now.UTC().Format("15:04:05.000"), last)
		}
		time.Sleep(pollEvery)
	}
}
