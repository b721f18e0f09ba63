package e2e

import (
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

// TestKillServerUnderLoad: whatever the moment of a kill -9, the audit log has the intent of each certificate that somebody got
// (invariant 10), and no more than its last line is torn.
func TestKillServerUnderLoad(t *testing.T) {
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "crash"), "web", "web-1", "node-a")
	server := StartServer(t, k.StaticCluster(t))
	got := issueContinuously(t, server, Ask{Token: k.BoundToken(t, pod, time.Hour, audience)})

	const kills = 5
	for kill := 1; kill <= kills; kill++ {
		before, _ := got.soFar()
		Eventually(t, 30*time.Second, fmt.Sprintf("certificates are issued before kill %d", kill), func() error {
			if serials, err := got.soFar(); len(serials)-len(before) < 200 {
				return fmt.Errorf("%d since the last start; last error: %w", len(serials)-len(before), err)
			}
			return nil
		})
		server.Kill()
		serials, _ := got.soFar() // of before the restart: nobody issues now
		server.Start(t)
		intents, torn := server.Audit(t, func(a auditLine) bool { return a.Event == "intent" && a.Serial != "" }) // CRLs have none
		if torn > kill {
			t.Errorf("%d lines of the audit log do not parse after %d kills", torn, kill)
		}
		logged := map[string]bool{}
		for _, a := range intents {
			if logged[a.Serial] {
				t.Errorf("serial %s was used twice", a.Serial)
			}
			logged[a.Serial] = true
		}
		for _, serial := range serials {
			if !logged[serial] {
				t.Errorf("after kill %d: a client has serial %s, of which the audit log knows nothing", kill, serial)
			}
		}
	}
	starts, torn := server.Audit(t, func(a auditLine) bool { return a.Event == "started" })
	serials, _ := got.soFar()
	t.Logf("%d certificates over %d kills, %d torn lines", len(serials), kills, torn)
	if len(starts) != kills+1 {
		t.Errorf("the audit log tells of %d starts; want %d", len(starts), kills+1)
	}
}

// received are the serials of the certificates that clients got, and the last error that one of them saw.
type received struct {
	mu      sync.Mutex // guards both
	serials []string
	err     error
}

// soFar returns what has come in until now.
func (r *received) soFar() (serials []string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.serials), r.err
}

func (r *received) add(cert *x509.Certificate, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.err = err
		return
	}
	r.serials = append(r.serials, serialOf(cert))
}

// issueContinuously asks for certificates from 8 callers on 2 connections until the test ends.
func issueContinuously(t *testing.T, s *Server, ask Ask) *received {
	t.Helper()
	var err error
	if ask.CSR, err = newCSR(nil); err != nil {
		t.Fatal(err)
	}
	r := new(received)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range 2 {
		conn := s.Dial(t)
		for range 4 {
			wg.Go(func() {
				for ctx.Err() == nil {
					r.add(ask.Certificate(ctx, conn))
				}
			})
		}
	}
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return r
}
