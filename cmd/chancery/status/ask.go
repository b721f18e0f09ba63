package status

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
	"github.com/chancery-project/chancery/trust"
)

// askTimeout bounds a call to a server.
const askTimeout = 10 * time.Second

// Errors that callers tell apart.
var (
	// ErrDown: nobody listens on the socket.
	ErrDown = adminsocket.ErrDown
	// ErrSilent: somebody listens, and does not answer.
	ErrSilent = errors.New("the server does not answer")
)

// Ask returns what a running server says of its health on its admin socket.
func Ask(ctx context.Context, socket string) (*checkup.State, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if err := adminsocket.Probe(ctx, socket); err != nil {
		return nil, fmt.Errorf("asking the server on admin socket %s: %w", socket, err)
	}
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("asking the server on admin socket %s: %w", socket, err)
	}
	defer conn.Close()
	resp, err := chanceryv1.NewAdminClient(conn).GetStatus(ctx, new(chanceryv1.GetStatusRequest))
	switch {
	case status.Code(err) == codes.DeadlineExceeded:
		err = fmt.Errorf("%w within %s", ErrSilent, askTimeout)
	case status.Code(err) == codes.Unimplemented:
		err = errors.New("the server is of an older version, which has no status; start it with this one")
	}
	if err != nil {
		return nil, fmt.Errorf("asking the server on admin socket %s: %w", socket, err)
	}
	return stateOf(resp)
}

// stateOf reads an answer.
func stateOf(r *chanceryv1.GetStatusResponse) (*checkup.State, error) {
	s := &checkup.State{
		Running: true, Time: r.GetTime().AsTime(), Started: timeOf(r.GetStarted()), TrustDomain: r.GetTrustDomain(), NotReady: r.GetNotReady(), WasReady: r.GetWasReady(),
		RenewedBy: r.GetIssuerRenewedBy(), MaxTTL: r.GetMaxTtl().AsDuration().Seconds(), Certs: []checkup.Certificate{}, Keys: []checkup.Key{}, Clusters: []checkup.Cluster{},
		Requests: &checkup.Requests{Reasons: map[string]checkup.Count{}},
	}
	if d := r.GetDocument(); d != nil {
		s.Document = &checkup.Document{Version: d.GetVersion(), Generation: d.GetGeneration(), Requested: timeOf(d.GetRequested()), Logs: []checkup.Log{}}
		if key := d.GetBundleKey(); len(key) > 0 {
			s.Document.BundleKey = trust.KeyFingerprint(key)
		}
		s.Document.BundleKeyError = d.GetBundleKeyError()
		for _, l := range d.GetLogs() {
			s.Document.Logs = append(s.Document.Logs, checkup.Log{ID: l.GetId(), Key: l.GetKey()})
		}
	}
	s.Store = storeOf(r.GetStore())
	for _, c := range r.GetCertificates() {
		cert, err := x509.ParseCertificate(c.GetCertificate())
		if err != nil {
			return nil, fmt.Errorf("the server's answer: %s certificate: %w", c.GetKind(), err)
		}
		one := checkup.NewCertificate(c.GetKind(), c.GetState(), c.GetInUse(), cert, s.Time)
		one.Tainted = timeOf(c.GetTainted())
		s.Certs = append(s.Certs, one)
	}
	for _, k := range r.GetKeys() {
		s.Keys = append(s.Keys, checkup.Key{
			Name: k.GetName(), Store: k.GetStore(), Checked: timeOf(k.GetChecked()), SignSeconds: k.GetTook().AsDuration().Seconds(),
			Waiting: timeOf(k.GetWaiting()), Error: k.GetError(),
		})
	}
	for _, o := range r.GetOutcomes() {
		s.Requests.Add(o.GetOutcome(), checkup.Count{Minute: o.GetMinute(), Hour: o.GetHour(), Total: o.GetTotal()})
	}
	if a := r.GetAuditLog(); a != nil {
		s.AuditLog = &checkup.AuditLog{Path: a.GetPath(), Bytes: a.GetSize(), Error: a.GetError(), Moved: a.GetMoved()}
	}
	if l := r.GetIssuanceLog(); l != nil {
		s.IssuanceLog = &checkup.IssuanceLog{
			Dir: l.GetDir(), Size: l.GetSize(), Covered: l.GetCheckpointSize(), Checkpoint: timeOf(l.GetCheckpoint()), Sequenced: timeOf(l.GetSequenced()),
			Error: l.GetError(), CheckpointError: l.GetCheckpointError(),
		}
	}
	if c := r.GetCrls(); c != nil {
		s.CRLs = &checkup.CRLs{
			Off: c.GetOff(), Stale: c.GetStale(), Error: c.GetError(), Failing: timeOf(c.GetFailing()), Ends: timeOf(c.GetEnds()), Revocations: c.GetRevocations(),
			Certificates: c.GetCertificates(), Agents: c.GetAgents(), Acknowledged: c.GetAcknowledged(), Published: timeOf(c.GetPublished()),
		}
	}
	s.Rotation = rotationOf(r.GetRotation())
	s.Federation, s.BundleEndpoint = federationOf(r)
	for _, c := range r.GetClusters() {
		s.Clusters = append(s.Clusters, checkup.Cluster{Name: c.GetName(), NotReady: c.GetNotReady(), WasReady: c.GetWasReady()})
	}
	s.Kubernetes = checkup.Kubernetes{Signing: r.GetSigningError(), Publishing: r.GetPublishingError(), Naming: r.GetNamingError(), Unread: r.GetNamingUnread()}
	return s, nil
}

func federationOf(r *chanceryv1.GetStatusResponse) (all []checkup.Federated, e *checkup.BundleEndpoint) {
	for _, f := range r.GetFederation() {
		x := f.GetRelationship()
		all = append(all, checkup.Federated{
			TrustDomain: f.GetTrustDomain(), Since: timeOf(f.GetSince()), Roots: int(f.GetRoots()), URL: x.GetUrl(), RefreshHint: x.GetRefreshHint().AsDuration().Seconds(),
			LastSuccess: timeOf(x.GetLastSuccess()), LastTry: timeOf(x.GetLastTry()), NextTry: timeOf(x.GetNextTry()), Error: x.GetError(),
		})
	}
	if b := r.GetBundleEndpoint(); b != nil {
		e = &checkup.BundleEndpoint{Listen: b.GetListen(), Error: b.GetError(), NotAfter: timeOf(b.GetNotAfter())}
	}
	return all, e
}

func rotationOf(r *chanceryv1.Rotation) *checkup.Rotation {
	if r == nil {
		return nil
	}
	out := &checkup.Rotation{
		ID: r.GetId(), Kind: r.GetKind(), Reason: r.GetReason(), FromDomain: r.GetFromDomain(), ToDomain: r.GetToDomain(), Started: r.GetStarted().AsTime(), Phase: r.GetPhase(), Since: r.GetSince().AsTime(), Latest: timeOf(r.GetLatest()),
		Paused: timeOf(r.GetPaused()), PausedBy: r.GetPausedBy(), Back: r.GetBack(), Trouble: r.GetTrouble(), Gates: []checkup.Gate{}, Overrides: []checkup.Override{},
	}
	if d := r.GetPhaseEstimate(); d != nil {
		out.PhaseEstimate = new(d.AsDuration().Seconds())
	}
	for _, g := range r.GetGates() {
		out.Gates = append(out.Gates, checkup.Gate{Name: g.GetName(), Passed: g.GetPassed(), Overridden: g.GetOverridden(), Have: g.GetHave(), Want: g.GetWant(), Waiting: append([]string{}, g.GetWaiting()...)})
	}
	for _, o := range r.GetOverrides() {
		out.Overrides = append(out.Overrides, checkup.Override{Gate: o.GetGate(), Phase: o.GetPhase(), Because: o.GetBecause(), Actor: o.GetActor(), Time: o.GetTime().AsTime()})
	}
	return out
}

func storeOf(r *chanceryv1.GetStatusResponse_Store) *checkup.Store {
	if r == nil {
		return nil
	}
	s := &checkup.Store{
		Kind: r.GetKind(), Place: r.GetPlace(), Replica: r.GetReplica(), Confirmed: timeOf(r.GetConfirmed()), Error: r.GetError(), Changed: timeOf(r.GetChanged()),
		Driver: r.GetDriver(), Imported: timeOf(r.GetImported()), By: r.GetImportedBy(), Replicas: []checkup.Replica{},
	}
	for _, one := range r.GetReplicas() {
		s.Replicas = append(s.Replicas, ReplicaOf(one))
	}
	return s
}

// ReplicaOf reads what a server says of a replica.
func ReplicaOf(r *chanceryv1.Replica) checkup.Replica {
	one := checkup.Replica{
		Name: r.GetName(), LogID: r.GetLogId(), LogKey: r.GetLogKey(), Own: r.GetOwn(), Drives: r.GetDrives(), Seen: timeOf(r.GetSeen()),
		Acknowledged: r.GetAcknowledged(), DeclaredDead: timeOf(r.GetDeclaredDead()), Format: r.GetFormat(), Trouble: r.GetTrouble(),
	}
	if n := r.GetLogSize(); n >= 0 {
		one.LogSize = &n
	}
	return one
}

func timeOf(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	at := t.AsTime()
	return &at
}
