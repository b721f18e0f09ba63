package server

import (
	"context"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
	"github.com/chancery-project/chancery/cmd/chancery/server/keystore"
	"github.com/chancery-project/chancery/cmd/chancery/server/report"
	"github.com/chancery-project/chancery/trust"
)

// newReport joins the parts of a server to what it says of its health.
func (s *Server) newReport() *report.Reporter {
	c := s.settings
	r := report.Config{
		Domain: c.domain, MaxTTL: c.profile.MaxTTL(), Plugged: c.Issuer != nil, Parented: c.parent != nil, Ready: s.ready, WasReady: s.wasReady.Load, Authority: s.authority, Health: s.health,
		Own: s.own, Recent: s.requests.Recent(), Log: s.log, AuditLog: c.AuditLog, Issuance: s.issuance, IssuanceLog: c.IssuanceLog, Crls: s.desk.Status, Store: s.replicas.Status, BundleKey: s.desk.BundleKey,
	}
	for _, k := range s.clusters {
		r.Clusters = append(r.Clusters, report.Cluster{Name: k.Name, Ready: k.Ready, WasReady: k.WasReady})
	}
	return report.New(r)
}

// GetStatus returns what the server knows of its health.
func (s adminService) GetStatus(ctx context.Context, _ *chanceryv1.GetStatusRequest) (*chanceryv1.GetStatusResponse, error) {
	actor, err := adminsocket.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	return s.report.Status(actor)
}

// RootsFile is where the roots lie for agents.
func (s *Settings) RootsFile() string { return s.rootsFile() }

// MaxTTL is the longest lifetime of workload certificates.
func (s *Settings) MaxTTL() time.Duration { return s.profile.MaxTTL() }

// Domain is the trust domain.
func (s *Settings) Domain() trust.Domain { return s.domain }

// KeyPlace is where new keys are made and kept.
func (s *Settings) KeyPlace() *keystore.Place { return s.keys }
