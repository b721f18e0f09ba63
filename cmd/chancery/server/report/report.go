// Package report owns what a running server says of its own health: facts, gathered from its parts without waiting for a
// write, a signature or an API server, so that one that is in trouble still answers.
//
// It refuses to judge: the thresholds are those of ca/checkup, in whoever asks.
package report

import (
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
	"github.com/chancery-project/chancery/csr/tally"
	"github.com/chancery-project/chancery/trust"
)

// Config holds the parts of a server.
type Config struct {
	Domain      trust.Domain
	MaxTTL      time.Duration // of workload certificates
	Plugged     bool          // the issuer is plugged in from files
	Parented    bool          // the issuer is signed by a parent
	Ready       func() error
	WasReady    func() bool
	Authority   *authority.Keeper
	Health      *keys.Health
	Own         func() *trust.Identity
	Recent      *tally.Tally
	Log         *audit.Log
	Notes       *adminsocket.Notes
	AuditLog    string // its file
	Issuance    *issuelog.Log
	IssuanceLog string // its folder; empty for none
	Clusters    []Cluster
	Signing     func() string                             // what keeps it from signing in Kubernetes,
	Publishing  func() string                             // and from publishing there; empty: nothing does
	Naming      func() (trouble string, unread bool)      // what it cannot read of who may serve what, and whether it never did
	BundleKey   func() ([]byte, error)                    // its public part, and why it signs nothing
	Crls        func() *chanceryv1.GetStatusResponse_Crls // nil without any
	Store       func() *chanceryv1.GetStatusResponse_Store
	Rotation    func() *chanceryv1.Rotation // nil for none under way
	Federation  func() ([]*chanceryv1.GetStatusResponse_Federated, *chanceryv1.GetStatusResponse_BundleEndpoint)
}

// Cluster is a cluster whose tokens are accepted.
type Cluster struct {
	Name     string
	Ready    func() error
	WasReady func() bool
}

// Reporter answers for a server.
type Reporter struct {
	config  Config
	started time.Time
}

// New returns a reporter for a server that starts now.
func New(c Config) *Reporter {
	return &Reporter{config: c, started: time.Now()}
}

// Status returns what is known. The actor goes into the audit log (decision D14), once an hour.
func (r *Reporter) Status(actor string) (*chanceryv1.GetStatusResponse, error) {
	r.config.Notes.Note(actor, "status")
	c, now := r.config, time.Now()
	resp := &chanceryv1.GetStatusResponse{
		Time: timestamppb.New(now), Started: timestamppb.New(r.started), TrustDomain: c.Authority.Present().String(), NotReady: text(c.Ready()), WasReady: c.WasReady(),
		MaxTtl: durationpb.New(c.MaxTTL),
	}
	stores, err := r.authorities(resp, now)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	for _, v := range c.Health.Verdicts() {
		k := &chanceryv1.GetStatusResponse_Key{Name: v.Name, Store: stores[v.Name], Error: text(v.Err), Checked: stampOf(v.Checked), Waiting: stampOf(v.Waiting)}
		if !v.Checked.IsZero() {
			k.Took = durationpb.New(v.Took)
		}
		resp.Keys = append(resp.Keys, k)
	}
	counts := c.Recent.Counts()
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		n := counts[name]
		resp.Outcomes = append(resp.Outcomes, &chanceryv1.GetStatusResponse_Outcome{Outcome: name, Minute: n.Minute, Hour: n.Hour, Total: n.Total})
	}
	r.logs(resp)
	if c.Crls != nil {
		resp.Crls = c.Crls()
	}
	if c.Store != nil {
		resp.Store = c.Store()
	}
	if c.Rotation != nil {
		resp.Rotation = c.Rotation()
	}
	resp.SigningError, resp.PublishingError = c.Signing(), c.Publishing()
	resp.NamingError, resp.NamingUnread = c.Naming()
	if c.Federation != nil {
		resp.Federation, resp.BundleEndpoint = c.Federation()
	}
	for _, k := range c.Clusters {
		resp.Clusters = append(resp.Clusters, &chanceryv1.GetStatusResponse_Cluster{Name: k.Name, NotReady: text(k.Ready()), WasReady: k.WasReady()})
	}
	return resp, nil
}

// authorities fills in document and certificates, and returns where each key lies.
func (r *Reporter) authorities(resp *chanceryv1.GetStatusResponse, now time.Time) (map[string]string, error) {
	c := r.config
	var chain, roots []*x509.Certificate
	if i := c.Authority.InUse(); i != nil {
		chain, roots = chainOf(i), i.Bundle().All()
	}
	inv, err := checkup.Take(c.Authority.Document(), c.Domain, chain, roots, c.Plugged, now)
	if err != nil {
		return nil, fmt.Errorf("reading the authority document: %w", err)
	}
	if c.Parented {
		inv.RenewedBy = checkup.RenewedByParent
	}
	d := &chanceryv1.GetStatusResponse_Document{Version: inv.Document.Version, Generation: inv.Document.Generation}
	for _, l := range inv.Document.Logs {
		d.Logs = append(d.Logs, &chanceryv1.GetStatusResponse_Log{Id: l.ID, Key: l.Key})
	}
	if at := inv.Document.Requested; at != nil {
		d.Requested = timestamppb.New(*at)
	}
	if c.BundleKey != nil {
		key, err := c.BundleKey()
		d.BundleKey, d.BundleKeyError = key, text(err)
	}
	resp.Document, resp.IssuerRenewedBy = d, inv.RenewedBy
	if own := c.Own(); own != nil {
		inv.Certs = append(inv.Certs, checkup.NewCertificate(checkup.KindServer, "active", true, own.Leaf(), now))
	}
	for i := range inv.Certs {
		x := &inv.Certs[i]
		one := &chanceryv1.GetStatusResponse_Certificate{Kind: x.Kind, State: x.State, InUse: x.InUse, Certificate: x.DER}
		if x.Tainted != nil {
			one.Tainted = timestamppb.New(*x.Tainted)
		}
		resp.Certificates = append(resp.Certificates, one)
	}
	if c.Plugged {
		inv.Stores[c.Authority.KeyName()] = "issuer files"
	}
	return inv.Stores, nil
}

// chainOf returns what signs, the issuing certificate first; that is the root itself where it issues.
func chainOf(i *ca.Issuer) []*x509.Certificate {
	if chain := i.Chain(); len(chain) > 0 {
		return chain
	}
	for _, r := range i.Bundle().Roots() {
		if hex.EncodeToString(r.SubjectKeyId) == i.SKI() {
			return []*x509.Certificate{r}
		}
	}
	return nil
}

func (r *Reporter) logs(resp *chanceryv1.GetStatusResponse) {
	c := r.config
	resp.AuditLog = &chanceryv1.GetStatusResponse_AuditLog{Path: c.AuditLog, Error: text(c.Log.Err()), Moved: c.Log.Moved()}
	if info, err := os.Stat(c.AuditLog); err == nil {
		resp.AuditLog.Size = info.Size()
	}
	if c.Issuance == nil {
		return
	}
	p := c.Issuance.Progress()
	resp.IssuanceLog = &chanceryv1.GetStatusResponse_IssuanceLog{
		Dir: c.IssuanceLog, Size: p.Size, CheckpointSize: p.Covered, Checkpoint: stampOf(p.Checkpoint), Sequenced: stampOf(p.Sequenced),
		Error: text(p.Err), CheckpointError: text(p.Failed),
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// stampOf leaves out a time that is not known.
func stampOf(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
