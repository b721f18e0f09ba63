package server

import (
	"time"

	"github.com/chancery-project/chancery/cmd/chancery/server/keystore"
	"github.com/chancery-project/chancery/cmd/chancery/server/report"
	"github.com/chancery-project/chancery/trust"
)

// newReport joins the parts of a server to what it says of its health.
func (s *Server) newReport() *report.Reporter {
	c := s.settings
	r := report.Config{
		Domain: c.domain, MaxTTL: c.profile.MaxTTL(), Plugged: c.Issuer != nil, Parented: c.parent != nil, Ready: s.ready, WasReady: s.wasReady.Load, Authority: s.authority, Health: s.health,
		Own: s.own, Recent: s.requests.Recent(), Log: s.log, AuditLog: c.AuditLog, Issuance: s.issuance, IssuanceLog: c.IssuanceLog, Crls: s.desk.Status, Store: s.replicas.Status, Rotation: s.rotating.Current, Notes: s.notes, Federation: s.federation.Report, BundleKey: s.desk.BundleKey,
		Signing: s.signer.Trouble, Publishing: s.publisher.Trouble, Naming: s.naming.Trouble,
	}
	for _, k := range s.clusters {
		r.Clusters = append(r.Clusters, report.Cluster{Name: k.Name, Ready: k.Ready, WasReady: k.WasReady})
	}
	return report.New(r)
}

// RootsFile is where the roots lie for agents.
func (s *Settings) RootsFile() string { return s.rootsFile() }

// MaxTTL is the longest lifetime of workload certificates.
func (s *Settings) MaxTTL() time.Duration { return s.profile.MaxTTL() }

// Domain is the trust domain.
func (s *Settings) Domain() trust.Domain { return s.domain }

// KeyPlace is where new keys are made and kept.
func (s *Settings) KeyPlace() *keystore.Place { return s.keys }
