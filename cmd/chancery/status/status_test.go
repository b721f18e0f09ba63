package status

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

// shortDir is a folder whose name is short enough for a socket.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "st")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// TestServersThatDoNotAnswer: each kind of silence is told apart.
func TestServersThatDoNotAnswer(t *testing.T) {
	socket := filepath.Join(shortDir(t), "admin.sock")
	if _, err := Ask(t.Context(), socket); !errors.Is(err, ErrDown) {
		t.Errorf("no socket: %v", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = Ask(ctx, socket)
	if !errors.Is(err, ErrSilent) {
		t.Errorf("a server that hangs: %v", err)
	}
	if f, ok := FindingOf(err, socket); !ok || f.ID != "server.silent" || f.Severity != checkup.Critical {
		t.Errorf("found as %+v", f)
	}
	l.Close()
	if _, err := Ask(t.Context(), socket); !errors.Is(err, ErrDown) {
		t.Errorf("a socket that a crash left: %v", err)
	}
	var out bytes.Buffer
	err = run(t.Context(), socket, "json", &out)
	if e, ok := errors.AsType[*process.ExitError](err); !ok || e.Code != 3 || !strings.Contains(out.String(), `"id": "server.down"`) || strings.Contains(out.String(), `"ca"`) {
		t.Errorf("%v: %s", err, out.String())
	}
	l, err = net.ListenUnix("unix", &net.UnixAddr{Name: socket + ".old"})
	if err != nil {
		t.Fatal(err)
	}
	older := grpc.NewServer() // knows no Admin
	defer older.Stop()
	go older.Serve(l)
	_, err = Ask(t.Context(), socket+".old")
	if _, ok := FindingOf(err, socket); err == nil || ok || !strings.Contains(err.Error(), "older version") {
		t.Errorf("an older server: %v", err)
	}
}

// TestEveryFieldOfAnAnswerArrives, and is printed without what could steer a terminal.
func TestEveryFieldOfAnAnswerArrives(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	at := func(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }
	s, err := stateOf(&chanceryv1.GetStatusResponse{
		Time: timestamppb.New(now), Started: at(3 * time.Hour), TrustDomain: "cluster.local", NotReady: "bad\x1b[2J", IssuerRenewedBy: "import", MaxTtl: durationpb.New(time.Hour),
		Document:     &chanceryv1.GetStatusResponse_Document{Version: 7, Generation: 3, Requested: at(time.Hour), BundleKey: []byte("public"), BundleKeyError: "changed", Logs: []*chanceryv1.GetStatusResponse_Log{{Id: 16909060, Key: "k"}}},
		Certificates: []*chanceryv1.GetStatusResponse_Certificate{{Kind: "root", State: "active", InUse: true, Certificate: anyRoot(t), Tainted: at(time.Hour)}},
		Keys: []*chanceryv1.GetStatusResponse_Key{
			{Name: "issuer a", Store: "token", Checked: at(time.Minute), Took: durationpb.New(2 * time.Millisecond)},
			{Name: "root b", Store: "token", Waiting: at(time.Second), Error: "gone"}, {Name: "issuer c"},
		},
		Outcomes: []*chanceryv1.GetStatusResponse_Outcome{
			{Outcome: "ok", Minute: 1, Hour: 2, Total: 3}, {Outcome: "BUSY", Minute: 10, Hour: 20, Total: 30}, {Outcome: "CSR_INVALID", Hour: 5, Total: 6}},
		AuditLog:    &chanceryv1.GetStatusResponse_AuditLog{Path: "/a", Size: 5000, Error: "full", Moved: true},
		IssuanceLog: &chanceryv1.GetStatusResponse_IssuanceLog{Dir: "/l", Size: 9, CheckpointSize: 8, Checkpoint: at(time.Minute), Sequenced: at(time.Hour), Error: "x", CheckpointError: "y"},
		Crls: &chanceryv1.GetStatusResponse_Crls{
			Off: []string{"no key"}, Stale: []string{"lacks 3"}, Error: "z", Failing: at(time.Hour), Ends: at(-time.Hour), Revocations: 4, Certificates: 5, Agents: 7, Acknowledged: 6,
			Published: at(2 * time.Hour),
		},
		Store: &chanceryv1.GetStatusResponse_Store{
			Kind: "postgres", Place: "db", Replica: "ca-1", Confirmed: at(time.Minute), Error: "refused", Changed: at(time.Hour), Driver: "ca-2", Imported: at(24 * time.Hour), ImportedBy: "Alice\x1b[2J",
			Replicas: []*chanceryv1.Replica{
				{Name: "ca-1", LogId: 1 << 24, LogKey: "k", Own: true, Acknowledged: 7, LogSize: 12, Format: 2},
				{Name: "ca-2", LogId: 1 << 25, Drives: true, Seen: at(time.Minute), Acknowledged: 6, LogSize: -1},
				{Name: "ca-3", LogId: 1 << 26, LogSize: -1, DeclaredDead: at(time.Hour)},
				{Name: "ca-4", LogId: 1 << 27, LogSize: -1, Trouble: "changed"},
			},
		},
		Rotation: &chanceryv1.Rotation{
			Id: "a1", Kind: "root", Reason: "asked", Started: at(time.Hour), Phase: "distribute", Since: at(time.Minute), PhaseEstimate: durationpb.New(time.Minute), Latest: at(-time.Hour),
			Paused: at(time.Minute), PausedBy: "unix:eve", Back: true, Trouble: "no key",
			Gates:     []*chanceryv1.Gate{{Name: "replicas", Passed: true}, {Name: "consumers", Have: 1, Want: 2, Waiting: []string{"web"}, Overridden: true}},
			Overrides: []*chanceryv1.RotationOverride{{Gate: "g", Phase: "p", Because: "b", Actor: "x", Time: at(0)}},
		},
		Clusters: []*chanceryv1.GetStatusResponse_Cluster{{Name: "east", WasReady: true}, {Name: "west", NotReady: "no keys"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if r := s.Requests; r.Issued != (checkup.Count{Minute: 1, Hour: 2, Total: 3}) || r.Refused != (checkup.Count{Minute: 10, Hour: 25, Total: 36}) || len(r.Reasons) != 2 {
		t.Errorf("requests: %+v", r)
	}
	var out bytes.Buffer
	Print(&out, s)
	for _, want := range []string{
		"server of trust domain cluster.local, NOT READY, started 3 h 0 min ago", "version 7, bundle generation 3", "log 16909060  k", "requested 1 h 0 min ago",
		"bundle key " + trust.KeyFingerprint([]byte("public")) + ", FAILS: changed", "  in use  TAINTED since 2026-11-30T11:00:00Z",
		"renewed by: import", "key of issuer a, token: signs, in 2ms, checked 1 min 0 s ago", "root b, token: DOES NOT SIGN: gone", "issuer c, : not checked yet",
		"issued 1 in the last minute, 2 in the last hour, 3 since", "refused 10 in the last minute, 25 in", "  BUSY: 10 in", "audit log /a, 5 kB, FAILS: full",
		"issuance log /l, 9 entries, last checkpoint over 8, made 1 min 0 s ago, FAILS: x, FAILS: y", "revocations 4, of 5 certificates, there are no CRLs, FAILS: z", "agents 7, 6 of them have", "cluster east ready", "cluster west NOT READY",
		"rotation a1 of the root, started 1 h 0 min ago, in phase distribute since 2026-11-30T11:59:00Z, ROLLED BACK, PAUSED, waits for consumers (1 of 2), FAILS: no key\n",
		"store postgres, db, confirmed 1 min 0 s ago, FAILS: refused", "restored from an export 1 d 0 h ago, by Alice\uFFFD[2J",
		"replica ca-1, log 16777216 of 12 entries, this server, works by version 7\n", "replica ca-2, log 33554432, seen 1 min 0 s ago, works by version 6, renews issuers\n",
		"replica ca-3, log 67108864, never seen, declared dead 1 h 0 min ago\n", "replica ca-4, log 134217728, never seen, CANNOT BE USED: changed\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it does not print %q:\n%s", want, out.String())
		}
	}
	if st := s.Store; st.Kind != "postgres" || st.Replica != "ca-1" || st.Driver != "ca-2" || !st.Changed.Equal(now.Add(-time.Hour)) || st.Replicas[0].LogKey != "k" ||
		st.Replicas[0].Format != 2 || *st.Replicas[0].LogSize != 12 || st.Replicas[1].LogSize != nil {
		t.Errorf("store: %+v", st)
	}
	if r := s.Rotation; *r.PhaseEstimate != 60 || !r.Latest.Equal(now.Add(time.Hour)) || r.Reason != "asked" || r.PausedBy != "unix:eve" || !r.Gates[1].Overridden || r.Gates[1].Waiting[0] != "web" ||
		r.Overrides[0] != (checkup.Override{Gate: "g", Phase: "p", Because: "b", Actor: "x", Time: now}) {
		t.Errorf("rotation: %+v", r)
	}
	if c := s.CRLs; c.Off[0] != "no key" || c.Stale[0] != "lacks 3" || !c.Failing.Equal(now.Add(-time.Hour)) || !c.Ends.Equal(now.Add(time.Hour)) || !c.Published.Equal(now.Add(-2*time.Hour)) {
		t.Errorf("CRLs: %+v", c)
	}
	out.Reset()
	s.RenewedBy = checkup.RenewedByParent
	Print(&out, s)
	if !strings.Contains(out.String(), "renewed by: parent") || !strings.Contains(out.String(), "the parent has not signed it yet") {
		t.Errorf("with a parent:\n%s", out.String())
	}
	out.Reset()
	NewReport(checkup.Judge(s)).PrintFindings(&out)
	if strings.Contains(out.String(), "\x1b") || !strings.Contains(out.String(), "server.not-ready") {
		t.Errorf("%q", out.String())
	}
	if _, err := stateOf(&chanceryv1.GetStatusResponse{Certificates: []*chanceryv1.GetStatusResponse_Certificate{{Kind: "root", Certificate: []byte("x")}}}); err == nil {
		t.Error("a certificate that does not parse is taken")
	}
	if s, err := stateOf(new(chanceryv1.GetStatusResponse)); err != nil {
		t.Errorf("an empty answer: %v", err)
	} else {
		Print(&out, s) // must not panic
		checkup.Judge(s)
	}
}

// TestAgoIsNeverNegative: doctor looks at the keys a moment after it noted the time.
func TestAgoIsNeverNegative(t *testing.T) {
	now := time.Now()
	for _, d := range []time.Duration{time.Millisecond, time.Hour} {
		if got := ago(now, new(now.Add(d))); got != "0 s ago" {
			t.Errorf("%s ahead prints as %q", d, got)
		}
	}
}

// anyRoot returns a root's certificate in DER.
func anyRoot(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	x := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "root"}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, x, x, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}
