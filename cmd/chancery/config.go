package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/trust"
)

// maxConfig bounds a config file, in bytes.
const maxConfig = 1 << 20

// serverConfig is the file of `chancery server -c FILE`. Relative paths count from the file's folder.
type serverConfig struct {
	// TrustDomain names the identities that are issued. Required.
	TrustDomain string `json:"trustDomain"`
	// Listen is the gRPC address, host:port. Default 127.0.0.1:8443. Port 0: the system picks one; see AddrFile.
	Listen string `json:"listen,omitempty"`
	// ServerNames are the DNS names and IPs in the server's certificate, for clients that check host names, such as
	// Istio's agents. Default: the host of Listen, and localhost.
	ServerNames []string `json:"serverNames,omitempty"`
	// Metrics is the HTTP address of /metrics, /healthz and /readyz. It is not authenticated. Default 127.0.0.1:9443.
	Metrics string `json:"metrics,omitempty"`
	// AddrFile, if set, is written once the server listens: lines listen=HOST:PORT and metrics=HOST:PORT.
	AddrFile string `json:"addrFile,omitempty"`
	// State is where the authority document lies. Required.
	State stateConfig `json:"state"`
	// AuditLog is the file of the audit log. Required. Who can change it can hide what was issued.
	AuditLog string `json:"auditLog"`
	// Issuer names a plugged-in issuer. Default: root and issuer in the state, made by `authority init`.
	Issuer *issuerConfig `json:"issuer,omitempty"`
	// Profile sets lifetimes and key types of workload certificates. All fields have defaults.
	Profile ca.ProfileConfig `json:"profile,omitempty"`
	// Clusters lists whose tokens are accepted. At least one.
	Clusters []clusterConfig `json:"clusters"`
	// Admission bounds the load. All fields have defaults.
	Admission admissionConfig `json:"admission,omitempty"`
}

// stateConfig says where the state lies.
type stateConfig struct {
	// SQLite is the database file. Who can write it can roll it back or delete it, but not forge it.
	SQLite string `json:"sqlite"`
	// SealingKey is the file of the key that seals private keys and authenticates the state. Default: state.key in
	// the folder of SQLite. Who can read it and the state has the CA's keys: keep them apart.
	SealingKey string `json:"sealingKey,omitempty"`
}

// issuerConfig names the folder of a plugged-in issuer; exactly one field is set. Who can write it is the CA.
type issuerConfig struct {
	// CACerts is a folder with ca-cert.pem, ca-key.pem, cert-chain.pem and root-cert.pem, as in Istio.
	CACerts string `json:"cacerts,omitempty"`
	// TLS is a folder with tls.crt, tls.key and ca.crt, as in Secrets of type kubernetes.io/tls.
	TLS string `json:"tls,omitempty"`
}

// clusterConfig is one cluster whose tokens are accepted.
type clusterConfig struct {
	// Name is what callers send as clusterid. Required.
	Name string `json:"name"`
	// Issuer is the exact iss of tokens. Required.
	Issuer string `json:"issuer"`
	// Audiences are the accepted aud values. At least one.
	Audiences []string `json:"audiences"`
	// JWKSFile holds the keys that sign tokens. With it alone, pods are not watched: a token is good until it ends.
	JWKSFile string `json:"jwksFile,omitempty"`
	// Kubeconfig reaches the API server, for keys, pods and TokenReview.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// InCluster reaches the API server by the service account of the pod that the server runs in.
	InCluster bool `json:"inCluster,omitempty"`
	// TokenReview is never (default), fallback or always.
	TokenReview string `json:"tokenReview,omitempty"`
	// NodeAgents lists NAMESPACE/NAME of service accounts that may ask for the pods of their own node.
	NodeAgents []string `json:"nodeAgents,omitempty"`
	// AllowUnboundTokens accepts tokens that are bound to no pod though pods are watched. Default false.
	AllowUnboundTokens bool `json:"allowUnboundTokens,omitempty"`
	// MaxRenewalAge is how long an SVID may renew itself by certificate after its last token. Default 24h.
	MaxRenewalAge string `json:"maxRenewalAge,omitempty"`
}

// admissionConfig bounds the load; rates apply only where set.
type admissionConfig struct {
	MaxInFlight int        `json:"maxInFlight,omitempty"` // requests at a time; default 128
	MaxQueue    int        `json:"maxQueue,omitempty"`    // waiting requests; default 10000
	MaxWait     string     `json:"maxWait,omitempty"`     // default 5s
	PerIdentity rateConfig `json:"perIdentity,omitempty"`
	PerNode     rateConfig `json:"perNode,omitempty"`
	Global      rateConfig `json:"global,omitempty"`
}

// rateConfig is a token bucket.
type rateConfig struct {
	PerSecond float64 `json:"perSecond"`
	Burst     int     `json:"burst,omitempty"` // default perSecond
}

// agentConfig is the file of `chancery agent -c FILE`. Relative paths count from the file's folder.
type agentConfig struct {
	// Server is the gRPC address of the server, host:port. Required.
	Server string `json:"server"`
	// ServerRoots is a PEM file with the roots that vouch for the server. It is read again for each connection.
	ServerRoots string `json:"serverRoots"`
	// TrustDomain of server and identity. Default: that of Identity.
	TrustDomain string `json:"trustDomain,omitempty"`
	// Cluster is sent as clusterid. Default: not sent; the server then must know exactly one.
	Cluster string `json:"cluster,omitempty"`
	// TokenFile is the service-account token, read again for each request. Required.
	TokenFile string `json:"tokenFile"`
	// Socket is where SDS and the Workload API are served. Default /run/chancery/agent.sock.
	Socket string `json:"socket,omitempty"`
	// Identity is the SPIFFE ID to fetch and serve. Required.
	Identity string `json:"identity"`
	// AllowUIDs lists the Unix users that are served, besides root and the agent's own.
	AllowUIDs []uint32 `json:"allowUIDs,omitempty"`
	// SVIDTTL is the lifetime to ask for. Default: the server's.
	SVIDTTL string `json:"svidTTL,omitempty"`
	// Files lists folders whose PEM files are served as file-cert: and file-root: to every allowed user. Default none.
	Files []string `json:"files,omitempty"`
	// Naming lists which identities a service may have, for the SDS name service:NS/NAME.
	Naming []namingConfig `json:"naming,omitempty"`
	// Metrics is the HTTP address of /metrics, /healthz and /readyz. Default 127.0.0.1:9444.
	Metrics string `json:"metrics,omitempty"`
	// AddrFile, if set, is written once the agent listens: a line metrics=HOST:PORT.
	AddrFile string `json:"addrFile,omitempty"`
}

// namingConfig is one rule of secure naming.
type namingConfig struct {
	Service    string   `json:"service"`    // NAMESPACE/NAME
	Identities []string `json:"identities"` // SPIFFE IDs; at least one
}

// loadConfig reads a YAML file strictly: an unknown or repeated field is an error.
func loadConfig(path string, into any) error {
	if path == "" {
		return errors.New("no config file given; use -c FILE")
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("reading config: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err != nil {
		return fmt.Errorf("reading config %s: %w", path, err)
	}
	if len(data) > maxConfig {
		return fmt.Errorf("config %s is larger than %d bytes", path, maxConfig)
	}
	if err := yaml.UnmarshalStrict(data, into); err != nil {
		return fmt.Errorf("config %s: %s", path, strings.TrimPrefix(err.Error(), "error unmarshaling JSON: while decoding JSON: "))
	}
	return nil
}

func loadServerConfig(path string) (*serverConfig, error) {
	c := new(serverConfig)
	if err := loadConfig(path, c); err != nil {
		return nil, err
	}
	c.resolve(filepath.Dir(path))
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("config %s: %w", path, err)
	}
	return c, nil
}

// resolve sets defaults and makes paths relative to the config file absolute in meaning.
func (c *serverConfig) resolve(dir string) {
	setDefault(&c.Listen, "127.0.0.1:8443")
	setDefault(&c.Metrics, "127.0.0.1:9443")
	paths := []*string{&c.AddrFile, &c.State.SQLite, &c.State.SealingKey, &c.AuditLog}
	if c.Issuer != nil {
		paths = append(paths, &c.Issuer.CACerts, &c.Issuer.TLS)
	}
	for i := range c.Clusters {
		paths = append(paths, &c.Clusters[i].JWKSFile, &c.Clusters[i].Kubeconfig)
	}
	relativeTo(dir, paths...)
	if c.State.SQLite != "" {
		setDefault(&c.State.SealingKey, filepath.Join(filepath.Dir(c.State.SQLite), "state.key"))
	}
}

func (c *serverConfig) check() error {
	if _, err := trust.ParseDomain(c.TrustDomain); err != nil {
		return fmt.Errorf("trustDomain: %w", err)
	}
	switch {
	case c.State.SQLite == "":
		return errors.New("state: sqlite is missing; name a file, such as state.db")
	case c.AuditLog == "":
		return errors.New("auditLog is missing; name a file, such as audit.jsonl")
	case len(c.Clusters) == 0:
		return errors.New("clusters is empty; nobody could ask for a certificate")
	case c.Issuer != nil && (c.Issuer.CACerts == "") == (c.Issuer.TLS == ""):
		return errors.New("issuer: set exactly one of cacerts and tls")
	}
	for field, addr := range map[string]string{"listen": c.Listen, "metrics": c.Metrics} {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return fmt.Errorf("%s: %q is not host:port", field, addr)
		}
	}
	seen := map[string]bool{}
	for i, cl := range c.Clusters {
		if seen[cl.Name] {
			return fmt.Errorf("clusters[%d]: the name %q is used twice", i, cl.Name)
		}
		seen[cl.Name] = true
	}
	return nil
}

// names splits the server's names into DNS names and IPs.
func (c *serverConfig) names() (dns []string, ips []netip.Addr, err error) {
	names := c.ServerNames
	if len(names) == 0 {
		host, _, err := net.SplitHostPort(c.Listen)
		if err != nil {
			return nil, nil, fmt.Errorf("listen: %w", err)
		}
		names = []string{"localhost", host}
	}
	seen := map[string]bool{}
	for _, n := range names {
		if seen[n] || n == "" {
			continue
		}
		seen[n] = true
		if ip, err := netip.ParseAddr(n); err == nil {
			if !ip.IsUnspecified() {
				ips = append(ips, ip.Unmap())
			}
		} else if isHostName(n) {
			dns = append(dns, n)
		} else {
			return nil, nil, fmt.Errorf("serverNames: %q is neither a DNS name nor an IP", n)
		}
	}
	return dns, ips, nil
}

func isHostName(s string) bool {
	if len(s) > 253 {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") != "" {
			return false
		}
	}
	return true
}

func (c *issuerConfig) plugged() *authority.Plugged {
	switch {
	case c == nil:
		return nil
	case c.CACerts != "":
		return &authority.Plugged{Dir: c.CACerts, Layout: files.CACerts}
	}
	return &authority.Plugged{Dir: c.TLS, Layout: files.TLS}
}

func (c admissionConfig) parse() (csr.AdmissionConfig, error) {
	wait, err := parseDuration("admission: maxWait", c.MaxWait, 0)
	if err != nil {
		return csr.AdmissionConfig{}, err
	}
	rates := map[string]rateConfig{"perIdentity": c.PerIdentity, "perNode": c.PerNode, "global": c.Global}
	for name, r := range rates {
		if r.PerSecond < 0 || r.Burst < 0 || r.Burst > 0 && r.PerSecond == 0 {
			return csr.AdmissionConfig{}, fmt.Errorf("admission: %s: perSecond and burst should be above 0", name)
		}
	}
	if c.MaxInFlight < 0 || c.MaxQueue < 0 || wait < 0 {
		return csr.AdmissionConfig{}, errors.New("admission: maxInFlight, maxQueue and maxWait should not be negative")
	}
	return csr.AdmissionConfig{
		MaxInFlight: c.MaxInFlight, MaxQueue: c.MaxQueue, MaxWait: wait,
		PerIdentity: csr.Rate(c.PerIdentity), PerNode: csr.Rate(c.PerNode), Global: csr.Rate(c.Global),
	}, nil
}

func loadAgentConfig(path string) (*agentConfig, error) {
	c := new(agentConfig)
	if err := loadConfig(path, c); err != nil {
		return nil, err
	}
	setDefault(&c.Socket, defaultSocket)
	setDefault(&c.Metrics, "127.0.0.1:9444")
	dir := filepath.Dir(path)
	relativeTo(dir, &c.ServerRoots, &c.TokenFile, &c.Socket, &c.AddrFile)
	for i := range c.Files {
		relativeTo(dir, &c.Files[i])
	}
	for field, v := range map[string]string{"server": c.Server, "serverRoots": c.ServerRoots, "tokenFile": c.TokenFile, "identity": c.Identity} {
		if v == "" {
			return nil, fmt.Errorf("config %s: %s is missing", path, field)
		}
	}
	if _, _, err := net.SplitHostPort(c.Server); err != nil {
		return nil, fmt.Errorf("config %s: server: %q is not host:port", path, c.Server)
	}
	return c, nil
}

// naming reads the rules of secure naming.
func (c *agentConfig) naming() (map[string][]trust.ID, error) {
	out := map[string][]trust.ID{}
	for i, n := range c.Naming {
		ns, name, ok := strings.Cut(n.Service, "/")
		if !ok || ns == "" || name == "" || strings.Contains(name, "/") {
			return nil, fmt.Errorf("naming[%d]: service is %q; it should be NAMESPACE/NAME", i, n.Service)
		}
		if _, twice := out[n.Service]; twice {
			return nil, fmt.Errorf("naming[%d]: service %q occurs twice", i, n.Service)
		}
		if len(n.Identities) == 0 {
			return nil, fmt.Errorf("naming[%d]: service %q has no identities; an empty list does not mean anyone", i, n.Service)
		}
		for _, s := range n.Identities {
			id, err := trust.ParseID(s)
			if err != nil {
				return nil, fmt.Errorf("naming[%d]: %w", i, err)
			}
			out[n.Service] = append(out[n.Service], id)
		}
	}
	return out, nil
}

func setDefault(s *string, def string) {
	if *s == "" {
		*s = def
	}
}

func relativeTo(dir string, paths ...*string) {
	for _, p := range paths {
		if *p != "" && !filepath.IsAbs(*p) {
			*p = filepath.Join(dir, *p)
		}
	}
}

func parseDuration(field, s string, def time.Duration) (time.Duration, error) {
	if s == "" {
		return def, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("%s: %q is not a duration; write it like 90s, 15m or 24h", field, s)
	}
	return d, nil
}
