package server

import (
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/admission"
	"github.com/chancery-project/chancery/cmd/chancery/server/clusters"
	"github.com/chancery-project/chancery/cmd/chancery/server/connections"
	"github.com/chancery-project/chancery/cmd/chancery/server/federating"
	"github.com/chancery-project/chancery/cmd/chancery/server/keystore"
	"github.com/chancery-project/chancery/cmd/chancery/server/lifetimes"
	"github.com/chancery-project/chancery/cmd/chancery/server/naming"
	"github.com/chancery-project/chancery/cmd/chancery/server/parents"
	"github.com/chancery-project/chancery/cmd/chancery/server/publishing"
	"github.com/chancery-project/chancery/cmd/chancery/server/rotating"
	"github.com/chancery-project/chancery/cmd/chancery/server/signing"
	"github.com/chancery-project/chancery/cmd/chancery/server/stores"
)

// Config is the file of `chancery server -c FILE`. Relative paths count from the file's folder.
type Config struct {
	// TrustDomain names the identities that are issued, such as cluster.local. Required. After a migration each name that the authority had works; the
	// present one is better, and `chancery doctor` says so.
	TrustDomain string `json:"trustDomain"`
	// TrustDomainAliases are other trust domains whose identities count as those of the own one where a request names one, such as the one that a mesh
	// had before. None is issued, and none has roots here. At most 32.
	TrustDomainAliases []string `json:"trustDomainAliases,omitempty"`
	// Listen is the gRPC address, host:port. Default 127.0.0.1:8443. Port 0: the system picks one; see AddrFile.
	Listen string `json:"listen,omitempty"`
	// ServerNames are the DNS names and IPs in the server's certificate, for clients that check host names, such as
	// Istio's agents. Default: the host of Listen, and localhost.
	ServerNames []string `json:"serverNames,omitempty"`
	// Metrics is the HTTP address of /metrics, /healthz and /readyz, host:port. It is not authenticated. Default
	// 127.0.0.1:9443. On a loopback address /readyz also says what is missing, and Go's profiles are served, under /debug/pprof/.
	Metrics string `json:"metrics,omitempty"`
	// AddrFile, if set, is written once the server listens: lines listen=HOST:PORT, metrics=HOST:PORT and, with a BundleEndpoint,
	// bundleEndpoint=HOST:PORT.
	AddrFile string `json:"addrFile,omitempty"`
	// State is where the authority document lies. Required.
	State stores.Config `json:"state"`
	// AuditLog is the file of the audit log. Required. Who can change it can hide what was issued.
	AuditLog string `json:"auditLog"`
	// IssuanceLog is the folder of the issuance log: a Merkle tree over all that is issued, which `chancery log` verifies.
	// Default none. Once the authority document lists it, a server does not start without it. Who can write it can hide what
	// was issued from those who hold no checkpoint of it.
	IssuanceLog string `json:"issuanceLog,omitempty"`
	// Issuer names a plugged-in issuer. Default: root and issuer in the state, made by `authority init`.
	Issuer *IssuerConfig `json:"issuer,omitempty"`
	// Parent names a CA that signs this server's issuer, again and again, under a root that is kept elsewhere. Default none.
	Parent *parents.Config `json:"parent,omitempty"`
	// Issuers lists the servers below this one that may have an issuer signed by its root. Default none.
	Issuers []parents.ServerConfig `json:"issuers,omitempty"`
	// Keys says where private keys of root and issuer are made and kept. Default: sealed in the state.
	Keys keystore.Config `json:"keys,omitzero"`
	// Lifetimes are those of the root and issuers that the server makes. Not beside Issuer, which brings its own, or Parent,
	// which has a lifetime of its own.
	Lifetimes lifetimes.Config `json:"lifetimes,omitzero"`
	// Rotation says what a rotation of roots and issuers goes by. All fields have defaults.
	Rotation rotating.Config `json:"rotation,omitzero"`
	// Naming says who may serve which service, for the SDS names service:NAMESPACE/NAME of agents. Default none: of no service is anything known.
	Naming *naming.Config `json:"naming,omitempty"`
	// Profile sets lifetimes and key types of workload certificates. All fields have defaults.
	Profile ca.ProfileConfig `json:"profile,omitzero"`
	// Clusters lists whose tokens are accepted. At least one.
	Clusters []clusters.Config `json:"clusters"`
	// Signing says which of Kubernetes' own requests for certificates are signed. Default none.
	Signing *signing.Config `json:"signing,omitempty"`
	// Publishing says where the roots are published in Kubernetes. Default nowhere.
	Publishing *publishing.Config `json:"publishing,omitempty"`
	// Admission bounds the load. All fields have defaults.
	Admission admission.Config `json:"admission,omitzero"`
	// Connections says when connections end. All fields have defaults.
	Connections connections.Config `json:"connections,omitzero"`
	// Federation lists the foreign trust domains whose identities are verified, each by its own roots. Default none.
	Federation []federating.RelationshipConfig `json:"federation,omitempty"`
	// BundleEndpoint is where others get the roots of this trust domain, to federate with it. Default none.
	BundleEndpoint *federating.EndpointConfig `json:"bundleEndpoint,omitempty"`
}

// IssuerConfig names the folder of a plugged-in issuer; exactly one field is set. Who can write it is the CA.
type IssuerConfig struct {
	// CACerts is a folder with ca-cert.pem, ca-key.pem, cert-chain.pem and root-cert.pem, as in Istio.
	CACerts string `json:"cacerts,omitempty"`
	// TLS is a folder with tls.crt, tls.key and ca.crt, as in Secrets of type kubernetes.io/tls.
	TLS string `json:"tls,omitempty"`
}

// setDefaults fills in what the file leaves out and makes paths absolute.
func (c *Config) setDefaults(file string) error {
	process.SetDefault(&c.Listen, "127.0.0.1:8443")
	process.SetDefault(&c.Metrics, "127.0.0.1:9443")
	paths := append([]*string{&c.AddrFile, &c.AuditLog, &c.IssuanceLog}, c.State.Paths()...)
	paths = append(paths, c.Keys.Paths()...)
	if c.Issuer != nil {
		paths = append(paths, &c.Issuer.CACerts, &c.Issuer.TLS)
	}
	paths = append(paths, c.Parent.Paths()...)
	for i := range c.Clusters {
		paths = append(paths, c.Clusters[i].Paths()...)
	}
	for i := range c.Federation {
		paths = append(paths, c.Federation[i].Paths()...)
	}
	paths = append(paths, c.BundleEndpoint.Paths()...)
	if err := process.Absolute(file, paths...); err != nil {
		return err
	}
	return c.State.SetDefaults(c.AuditLog)
}
