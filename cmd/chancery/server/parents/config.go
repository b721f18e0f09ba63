// Package parents owns what a server's config says of CAs above and servers below it: its groups `parent` and `issuers`, and
// putting together what they name.
//
// It refuses groups that could not be followed before anything is opened, and has no default for who may have an issuer.
package parents

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/csr/issuers"
	"github.com/chancery-project/chancery/trust"
)

// Bounds of lifetimes of issuers.
const (
	minLifetime = 10 * time.Second
	maxLifetime = 10 * 365 * 24 * time.Hour
	maxPathLen  = 8
)

// Config names the CA that signs this server's issuer; exactly one of the kinds is set. Whatever it answers, the issuer is held
// against the roots given at `authority init --root`.
type Config struct {
	// Lifetime is what the parent is asked for. Default 168h. With cfssl it is the profile's there, and should be left out.
	Lifetime string `json:"lifetime,omitempty"`
	// Files is a parent whose certificate and key lie in files. Who can write them can have issuers under the same root.
	Files *FilesConfig `json:"files,omitempty"`
	// Chancery is another Chancery server of the same trust domain, whose config lists us in issuers.
	Chancery *ChanceryConfig `json:"chancery,omitempty"`
	// CertManager is an issuer of cert-manager's, asked by CertificateRequests.
	CertManager *CertManagerConfig `json:"certManager,omitempty"`
	// Vault is a PKI secrets engine of Vault or OpenBao.
	Vault *VaultConfig `json:"vault,omitempty"`
	// CFSSL is a remote multirootca, asked by authenticated sign.
	CFSSL *CFSSLConfig `json:"cfssl,omitempty"`
}

// FilesConfig names the folder of a parent; exactly one field is set. It is read again for each issuer.
type FilesConfig struct {
	// CACerts is a folder with ca-cert.pem, ca-key.pem, cert-chain.pem and root-cert.pem, as in Istio.
	CACerts string `json:"cacerts,omitempty"`
	// TLS is a folder with tls.crt, tls.key and ca.crt, as in Secrets of type kubernetes.io/tls.
	TLS string `json:"tls,omitempty"`
}

// ChanceryConfig names a server above this one.
type ChanceryConfig struct {
	// Server is its gRPC address, host:port. Required.
	Server string `json:"server"`
	// ServerRoots is a PEM file with the roots that vouch for it, such as its roots.pem. Required. Read again for each call.
	ServerRoots string `json:"serverRoots"`
	// Cluster is sent as clusterid. Default: not sent.
	Cluster string `json:"cluster,omitempty"`
	// TokenFile is a service-account token of this server's own pod, whose identity the server above lists in issuers. Required.
	// Read again for each call. Who can read it can have an issuer, and with that any identity.
	TokenFile string `json:"tokenFile"`
}

// CertManagerConfig names an issuer of cert-manager's.
type CertManagerConfig struct {
	// Kubeconfig reaches the API server; or InCluster is set.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// InCluster reaches the API server by the service account of the pod that the server runs in. Default false.
	InCluster bool `json:"inCluster,omitempty"`
	// Namespace is where CertificateRequests are made. Required. The account needs create, get and delete of them there.
	Namespace string `json:"namespace"`
	// Issuer is the name of the issuer. Required. It must be one that signs CAs.
	Issuer string `json:"issuer"`
	// Kind is Issuer (default), ClusterIssuer, or that of an external issuer.
	Kind string `json:"kind,omitempty"`
	// Group is the API group of the issuer. Default cert-manager.io.
	Group string `json:"group,omitempty"`
}

// VaultConfig names a PKI secrets engine; one of TokenFile and Kubernetes is set.
type VaultConfig struct {
	// Address is that of the API, such as https://vault.example:8200. Required. Plain http is for loopback addresses only.
	Address string `json:"address"`
	// Roots is a PEM file with the roots that vouch for Address. Default: the system's. Read again for each call.
	Roots string `json:"roots,omitempty"`
	// Namespace is sent as X-Vault-Namespace. Default: not sent.
	Namespace string `json:"namespace,omitempty"`
	// Mount is where the engine is mounted. Default pki.
	Mount string `json:"mount,omitempty"`
	// Issuer is the ID or name of the issuer in the engine. Default: the engine's default issuer.
	Issuer string `json:"issuer,omitempty"`
	// TokenFile holds a token, one line, mode 0600. Read again for each call, so that an agent of Vault's can renew it.
	TokenFile string `json:"tokenFile,omitempty"`
	// Kubernetes logs in with a service-account token instead.
	Kubernetes *VaultLoginConfig `json:"kubernetes,omitempty"`
}

// VaultLoginConfig is a login by Vault's kubernetes auth method.
type VaultLoginConfig struct {
	// Role is the role to log in as. Required.
	Role string `json:"role"`
	// Mount is where the auth method is mounted. Default kubernetes.
	Mount string `json:"mount,omitempty"`
	// TokenFile is the service-account token. Default /var/run/secrets/kubernetes.io/serviceaccount/token.
	TokenFile string `json:"tokenFile,omitempty"`
}

// CFSSLConfig names a signer of a multirootca.
type CFSSLConfig struct {
	// Address is that of the API, such as https://ca.example:8888. Required. Plain http is for loopback addresses only.
	Address string `json:"address"`
	// Roots is a PEM file with the roots that vouch for Address. Default: the system's. Read again for each call.
	Roots string `json:"roots,omitempty"`
	// Label is that of the signer. Default: the default one there.
	Label string `json:"label,omitempty"`
	// Profile is a signing profile there, of a CA with path length 0. Default: the default one there.
	Profile string `json:"profile,omitempty"`
	// AuthKeyFile holds the auth key of the profile in hex, one line, mode 0600. Required. Who can read it can have any issuer
	// that the profile gives.
	AuthKeyFile string `json:"authKeyFile"`
	// ChainFile is a PEM file with the signer's certificate and those up to the root. Default none: the signer is the root.
	ChainFile string `json:"chainFile,omitempty"`
}

// ServerConfig allows one server below this one to have an issuer. Who holds it can give any identity of the trust domain.
type ServerConfig struct {
	// Identity is the SPIFFE ID of the server's pod, which comes with a token of a cluster that is listed in clusters. Required.
	Identity string `json:"identity"`
	// MaxLifetime is the longest that its issuer may live. Required.
	MaxLifetime string `json:"maxLifetime"`
	// PathLength is how many CAs may stand below its issuer. Default 0: it signs workloads' certificates only.
	PathLength int `json:"pathLength,omitempty"`
}

// Paths returns the file names of a config, to be made absolute.
func (c *Config) Paths() []*string {
	if c == nil {
		return nil
	}
	var out []*string
	if f := c.Files; f != nil {
		out = append(out, &f.CACerts, &f.TLS)
	}
	if f := c.Chancery; f != nil {
		out = append(out, &f.ServerRoots, &f.TokenFile)
	}
	if f := c.CertManager; f != nil {
		out = append(out, &f.Kubeconfig)
	}
	if f := c.Vault; f != nil {
		out = append(out, &f.Roots, &f.TokenFile)
		if f.Kubernetes != nil {
			out = append(out, &f.Kubernetes.TokenFile)
		}
	}
	if f := c.CFSSL; f != nil {
		out = append(out, &f.Roots, &f.AuthKeyFile, &f.ChainFile)
	}
	return out
}

// Secrets returns the files of a config that must be its owner's alone, by what they hold.
func (c *Config) Secrets() map[string]string {
	out := map[string]string{}
	if c != nil && c.Vault != nil && c.Vault.TokenFile != "" {
		out["Vault token"] = c.Vault.TokenFile
	}
	if c != nil && c.CFSSL != nil {
		out["cfssl auth key"] = c.CFSSL.AuthKeyFile
	}
	return out
}

// Place is a Config that was checked.
type Place struct {
	config   Config
	kind     string
	lifetime time.Duration // 0 = the parent's to say
}

// Kind returns which kind of parent it is, as the config spells it.
func (p *Place) Kind() string { return p.kind }

// Parse checks a config without opening anything. Its paths should be absolute. A nil one gives nil.
func Parse(c *Config) (*Place, error) {
	if c == nil {
		return nil, nil
	}
	p := &Place{config: *c, lifetime: ca.DefaultIssuerTTL}
	var set []string
	for _, k := range []struct {
		name string
		set  bool
	}{{"files", c.Files != nil}, {"chancery", c.Chancery != nil}, {"certManager", c.CertManager != nil}, {"vault", c.Vault != nil}, {"cfssl", c.CFSSL != nil}} {
		if k.set {
			set = append(set, k.name)
		}
	}
	if len(set) != 1 {
		return nil, fmt.Errorf("parent: %d kinds are set (%s); set exactly one of files, chancery, certManager, vault and cfssl", len(set), strings.Join(set, ", "))
	}
	p.kind = set[0]
	if err := p.parseLifetime(); err != nil {
		return nil, err
	}
	if err := p.parseKind(); err != nil {
		return nil, fmt.Errorf("parent.%s%w", p.kind, err)
	}
	return p, nil
}

func (p *Place) parseLifetime() error {
	if p.kind == "cfssl" {
		p.lifetime = 0
		if p.config.Lifetime != "" {
			return errors.New("parent.lifetime: with cfssl the lifetime is that of the profile there; leave it out")
		}
		return nil
	}
	d, err := process.Duration("parent.lifetime", p.config.Lifetime)
	if err != nil {
		return err
	}
	if d != 0 {
		p.lifetime = d
	}
	return checkLifetime("parent.lifetime", p.lifetime)
}

func checkLifetime(field string, d time.Duration) error {
	if d < minLifetime || d > maxLifetime {
		return fmt.Errorf("%s: %s is not between %s and %s", field, d, minLifetime, maxLifetime)
	}
	return nil
}

// parseKind returns errors that begin with the rest of the field's path.
func (p *Place) parseKind() error {
	switch c := p.config; p.kind {
	case "files":
		if (c.Files.CACerts == "") == (c.Files.TLS == "") {
			return errors.New(": set one of cacerts and tls, the one whose layout the folder has")
		}
	case "chancery":
		if err := process.CheckAddress("server", c.Chancery.Server); err != nil {
			return fmt.Errorf(".%w", err)
		}
		return required(map[string]string{"serverRoots": c.Chancery.ServerRoots, "tokenFile": c.Chancery.TokenFile})
	case "certManager":
		if (c.CertManager.Kubeconfig == "") == !c.CertManager.InCluster {
			return errors.New(": set one of kubeconfig and inCluster")
		}
		return required(map[string]string{"namespace": c.CertManager.Namespace, "issuer": c.CertManager.Issuer})
	default: // vault and cfssl: their packages check the rest
		_, err := p.web()
		if err != nil {
			return fmt.Errorf(": %w", err)
		}
	}
	return nil
}

func required(fields map[string]string) error {
	names := make([]string, 0, len(fields))
	for name, value := range fields {
		if value == "" {
			names = append(names, name)
		}
	}
	if slices.Sort(names); len(names) > 0 {
		return fmt.Errorf(".%s is missing", names[0])
	}
	return nil
}

// ParseServers checks the group `issuers`.
func ParseServers(all []ServerConfig, td trust.Domain) (map[trust.ID]issuers.Grant, error) {
	grants := map[trust.ID]issuers.Grant{}
	for i, c := range all {
		field := fmt.Sprintf("issuers[%d]", i)
		id, err := trust.ParseID(c.Identity)
		if err != nil {
			return nil, fmt.Errorf("%s.identity: %w", field, err)
		}
		if _, _, ok := id.Workload(); !ok || id.Reserved() || id.Domain() != td {
			return nil, fmt.Errorf("%s.identity: %s is not the identity of a pod in this trust domain, such as %s", field, id, td.URI()+"/ns/chancery/sa/east")
		}
		if _, twice := grants[id]; twice {
			return nil, fmt.Errorf("%s.identity: %s is listed twice", field, id)
		}
		d, err := process.Duration(field+".maxLifetime", c.MaxLifetime)
		if err == nil {
			err = checkLifetime(field+".maxLifetime", d)
		}
		if err != nil {
			return nil, err
		}
		if c.PathLength < 0 || c.PathLength > maxPathLen {
			return nil, fmt.Errorf("%s.pathLength: %d is not between 0 and %d", field, c.PathLength, maxPathLen)
		}
		grants[id] = issuers.Grant{MaxLifetime: d, PathLen: c.PathLength}
	}
	return grants, nil
}
