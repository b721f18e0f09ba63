package e2e

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/structpb"
	istio "istio.io/api/security/v1alpha1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

// trustDomain is that of all servers here; audience that of all good tokens.
const (
	trustDomain = "cluster.local"
	audience    = "istio-ca"
)

// serverYAML is a server's config file, as far as tests set it.
type serverYAML struct {
	TrustDomain string            `json:"trustDomain"`
	Listen      string            `json:"listen"`
	Metrics     string            `json:"metrics"`
	AddrFile    string            `json:"addrFile"`
	State       map[string]any    `json:"state"`
	AuditLog    string            `json:"auditLog"`
	IssuanceLog string            `json:"issuanceLog,omitempty"`
	Issuer      map[string]string `json:"issuer,omitempty"`
	Keys        any               `json:"keys,omitempty"` // a map
	Profile     map[string]string `json:"profile,omitempty"`
	Parent      map[string]any    `json:"parent,omitempty"`
	Issuers     []map[string]any  `json:"issuers,omitempty"`
	Clusters    []clusterYAML     `json:"clusters"`
	Signing     map[string]any    `json:"signing,omitempty"`
	Publishing  map[string]any    `json:"publishing,omitempty"`

	Federation     []map[string]any  `json:"federation,omitempty"`
	BundleEndpoint map[string]string `json:"bundleEndpoint,omitempty"`
	Naming         any               `json:"naming,omitempty"` // a map
}

type clusterYAML struct {
	Name          string   `json:"name"`
	Issuer        string   `json:"issuer"`
	Audiences     []string `json:"audiences"`
	JWKSFile      string   `json:"jwksFile,omitempty"`
	Kubeconfig    string   `json:"kubeconfig,omitempty"`
	TokenReview   string   `json:"tokenReview,omitempty"`
	NodeAgents    []string `json:"nodeAgents,omitempty"`
	MaxRenewalAge string   `json:"maxRenewalAge,omitempty"`
}

// Cluster is the config entry of a server that reaches the API server by a kubeconfig of its own.
func (k *Kube) Cluster(kubeconfig string) clusterYAML {
	return clusterYAML{Name: "Kubernetes", Issuer: k.Issuer, Audiences: []string{audience, "chancery"}, Kubeconfig: kubeconfig}
}

// StaticCluster is the config entry of a server that knows the cluster's keys and nothing else of it.
func (k *Kube) StaticCluster(t testing.TB) clusterYAML {
	t.Helper()
	c := k.Cluster("")
	c.JWKSFile = filepath.Join(t.TempDir(), "jwks.json")
	writeFile(t, c.JWKSFile, string(k.JWKS(t)), 0o600)
	return c
}

// What a server may do in a cluster: follow pods and read the token keys; and, where tokenReview is set, ask about tokens.
var (
	followPods   = rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}}
	readKeys     = rbacv1.PolicyRule{NonResourceURLs: []string{"/openid/v1/jwks"}, Verbs: []string{"get"}}
	reviewTokens = rbacv1.PolicyRule{APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"tokenreviews"}, Verbs: []string{"create"}}
)

// ServerKubeconfig returns a kubeconfig with exactly what a server needs, and what is given besides.
func (k *Kube) ServerKubeconfig(t testing.TB, more ...rbacv1.PolicyRule) string {
	t.Helper()
	return k.KubeconfigFor(t, k.Namespace(t, "chancery"), "server", append(more, followPods, readKeys)...)
}

// Server is a `chancery server` with all its files in one folder, to be killed and started again.
type Server struct {
	*Process
	Dir     string
	Config  string // file
	Roots   string // file, made by `authority init`
	Listen  string // HOST:PORT, the same over all starts
	Metrics string // HOST:PORT, of the last start

	yaml serverYAML
}

// NewServer writes a config file and runs `authority init` with what is given besides.
func NewServer(t testing.TB, cfg serverYAML, init ...string) *Server {
	t.Helper()
	s := writeServer(t, cfg)
	MustRun(t, append([]string{"authority", "init", "-c", s.Config}, init...)...)
	return s
}

// writeServer is NewServer without the init. Without a state in the config it is a database beside it.
func writeServer(t testing.TB, cfg serverYAML) *Server {
	t.Helper()
	s := &Server{Dir: SocketDir(t), yaml: cfg} // a short name: the admin socket lies beside the state
	s.Config, s.Roots = filepath.Join(s.Dir, "server.yaml"), filepath.Join(s.Dir, "roots.pem")
	s.yaml.TrustDomain, s.yaml.Listen, s.yaml.Metrics, s.yaml.AddrFile = trustDomain, "127.0.0.1:0", "127.0.0.1:0", "addrs"
	s.yaml.AuditLog = "audit.jsonl"
	if s.yaml.State == nil {
		s.yaml.State = map[string]any{"sqlite": "state.db"}
	}
	s.writeConfig(t)
	return s
}

// StartServer makes a server, starts it and waits until it is ready.
func StartServer(t testing.TB, clusters ...clusterYAML) *Server {
	t.Helper()
	s := NewServer(t, serverYAML{Clusters: clusters})
	s.Start(t)
	s.WaitReady(t)
	return s
}

func (s *Server) writeConfig(t testing.TB) {
	t.Helper()
	data, err := yaml.Marshal(s.yaml)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, s.Config, string(data), 0o600)
}

// Start starts the server, after a Kill under its old address. All its lives share one log.
func (s *Server) Start(t testing.TB) {
	t.Helper()
	addrFile := filepath.Join(s.Dir, s.yaml.AddrFile)
	for try := 0; ; try++ {
		os.Remove(addrFile)
		s.Process = StartProcess(t, ProcessConfig{
			Name: "server", Path: ChanceryBinary(t), Args: []string{"server", "-c", s.Config}, Dir: s.Dir, Log: filepath.Join(s.Dir, "server.log"),
		})
		var addrs map[string]string
		err := s.Await(30*time.Second, "listens", func() (err error) {
			addrs, err = readAddrs(addrFile)
			return err
		})
		if err == nil {
			s.Listen, s.Metrics = addrs["listen"], addrs["metrics"]
			s.yaml.Listen = s.Listen
			s.writeConfig(t)
			return
		}
		// A connection of somebody else may have got the port in between; a supervisor would try again, too.
		if try == 20 || !strings.Contains(err.Error(), "address already in use") {
			t.Fatal(err)
		}
	}
}

// WaitReady waits until /readyz says so.
func (s *Server) WaitReady(t testing.TB) {
	t.Helper()
	s.WaitHTTP(t, 30*time.Second, "http://"+s.Metrics+"/readyz")
}

// readyNow returns what /readyz says, nil if it is ready.
func (s *Server) readyNow() error {
	_, err := httpGet(http.DefaultClient, "http://"+s.Metrics+"/readyz")
	return err
}

// Metric returns the lines of /metrics that begin with the text.
func (s *Server) Metric(t testing.TB, prefix string) []string {
	t.Helper()
	body, err := httpGet(http.DefaultClient, "http://"+s.Metrics+"/metrics")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(body)) {
		if strings.HasPrefix(line, prefix) {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// auditLine is what tests look at in a line of the audit log.
type auditLine struct {
	Event     string `json:"event"`
	Serial    string `json:"serial"`
	SPIFFEID  string `json:"spiffe_id"`
	Profile   string `json:"profile"`
	Reason    string `json:"reason"`
	Detail    string `json:"detail"`
	Actor     string `json:"actor"`
	Requester struct {
		Remote       string `json:"remote"`
		Method       string `json:"method"`
		SPIFFEID     string `json:"spiffe_id"`
		Pod          string `json:"pod"`
		Node         string `json:"node"`
		CredentialID string `json:"credential_id"`
	} `json:"requester"`
}

// Audit returns the lines of the audit log for which keep holds, and how many lines do not parse. A last line that is still
// being written does not count.
func (s *Server) Audit(t testing.TB, keep func(auditLine) bool) (lines []auditLine, torn int) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(s.Dir, s.yaml.AuditLog))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		var a auditLine
		switch {
		case !bytes.HasSuffix(line, []byte("\n")):
		case json.Unmarshal(line, &a) != nil:
			torn++
		case keep(a):
			lines = append(lines, a)
		}
	}
	return lines, torn
}

// workloadIntents counts what was or may have been signed, the server's own certificate left out.
func (s *Server) workloadIntents(t testing.TB) int {
	t.Helper()
	lines, _ := s.Audit(t, func(a auditLine) bool { return a.Event == "intent" && a.Profile == "workload" })
	return len(lines)
}

// Dial connects as any TLS client that trusts roots.pem and knows the server by its DNS name.
func (s *Server) Dial(t testing.TB) *grpc.ClientConn {
	t.Helper()
	pool := x509.NewCertPool()
	if data, err := os.ReadFile(s.Roots); err != nil || !pool.AppendCertsFromPEM(data) {
		t.Fatalf("reading %s: %v", s.Roots, err)
	}
	conn, err := grpc.NewClient(s.Listen,
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: pool, ServerName: "localhost", MinVersion: tls.VersionTLS13})),
		// As quick after a restart as a test wants to be.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, MaxDelay: 200 * time.Millisecond}, MinConnectTimeout: 5 * time.Second,
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// Ask is one call of the Istio API.
type Ask struct {
	Token         string   // sent as "Bearer TOKEN"
	Authorization []string // values as they are, instead of Token
	Cluster       string   // clusterid; empty: not sent
	CSR           string   // PEM; empty: a good one, without names, for a new key
	Identity      string   // ImpersonatedIdentity; empty: not sent
	Seconds       int64    // validity; 0: the server's default
	FailFast      bool     // an address where nobody listens is an error at once
}

// Create makes the call and returns the elements of the answered chain.
func (a Ask) Create(ctx context.Context, conn *grpc.ClientConn) ([]string, error) {
	if a.Token != "" {
		a.Authorization = []string{"Bearer " + a.Token}
	}
	md := metadata.MD{"authorization": a.Authorization}
	if a.Cluster != "" {
		md.Set("clusterid", a.Cluster)
	}
	req := &istio.IstioCertificateRequest{Csr: a.CSR, ValidityDuration: a.Seconds}
	if req.Csr == "" {
		var err error
		if req.Csr, err = newCSR(nil); err != nil {
			return nil, err
		}
	}
	if a.Identity != "" {
		req.Metadata = &structpb.Struct{Fields: map[string]*structpb.Value{"ImpersonatedIdentity": structpb.NewStringValue(a.Identity)}}
	}
	ctx, cancel := context.WithTimeout(metadata.NewOutgoingContext(ctx, md), 10*time.Second)
	defer cancel()
	resp, err := istio.NewIstioCertificateServiceClient(conn).CreateCertificate(ctx, req, grpc.WaitForReady(!a.FailFast))
	return resp.GetCertChain(), err
}

// Certificate is Create for tests that look at the leaf only.
func (a Ask) Certificate(ctx context.Context, conn *grpc.ClientConn) (*x509.Certificate, error) {
	chain, err := a.Create(ctx, conn)
	if err != nil {
		return nil, err
	}
	if len(chain) == 0 {
		return nil, errors.New("an answer without a chain")
	}
	certs, err := parseCerts([]byte(chain[0]))
	if err != nil {
		return nil, err
	}
	return certs[0], nil
}

// newCSR returns a CSR in PEM for a new P-256 key; a nil template asks for no names.
func newCSR(template *x509.CertificateRequest) (string, error) {
	if template == nil {
		template = new(x509.CertificateRequest)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", fmt.Errorf("generating the key of a CSR: %w", err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		return "", fmt.Errorf("making a CSR: %w", err)
	}
	return csrPEM(der), nil
}

func csrPEM(der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
}

// Agent is a `chancery agent` with one identity, to be killed and started again.
type Agent struct {
	*Process
	Socket    string
	TokenFile string

	dir   string
	roots string // file
}

// AgentConfig says for whom an agent fetches.
type AgentConfig struct {
	Pod     Pod
	Token   string
	Cluster string        // empty: clusterid is not sent
	TTL     time.Duration // of its SVIDs
	Servers []string      // all that it may ask; empty: the one
	Roots   string        // its own file of the roots that vouch for servers; empty: the server's
}

// StartAgent starts an agent of the server.
func StartAgent(t testing.TB, s *Server, cfg AgentConfig) *Agent {
	t.Helper()
	a := &Agent{dir: SocketDir(t)}
	a.Socket, a.TokenFile = filepath.Join(a.dir, "agent.sock"), filepath.Join(a.dir, "token")
	WriteToken(t, a.TokenFile, cfg.Token)
	if cfg.Roots == "" {
		cfg.Roots = s.Roots
	}
	a.roots = cfg.Roots
	file := map[string]any{
		"serverRoots": cfg.Roots, "trustDomain": trustDomain, "cluster": cfg.Cluster, "tokenFile": "token",
		"socket": "agent.sock", "identity": cfg.Pod.SPIFFEID(trustDomain), "svidTTL": cfg.TTL.String(), "metrics": "127.0.0.1:0", "addrFile": "addrs",
	}
	if cfg.Servers == nil {
		file["server"] = s.Listen
	} else {
		file["servers"] = cfg.Servers
	}
	data, err := yaml.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(a.dir, "agent.yaml"), string(data), 0o600)
	a.Start(t)
	return a
}

// Start starts the agent, also after a Kill. All its lives share one log.
func (a *Agent) Start(t testing.TB) {
	t.Helper()
	a.Process = StartProcess(t, ProcessConfig{
		Name: "agent", Path: ChanceryBinary(t), Args: []string{"agent", "-c", filepath.Join(a.dir, "agent.yaml")}, Dir: a.dir, Log: filepath.Join(a.dir, "agent.log"),
	})
}

// Leaf returns the certificate that the agent serves now.
func (a *Agent) Leaf(t testing.TB) (*x509.Certificate, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	secrets, err := FetchSDS(ctx, a.Socket, "default")
	if err != nil {
		return nil, err
	}
	chain, err := SecretChain(secrets["default"])
	if err != nil {
		return nil, err
	}
	return chain[0], nil
}

// WaitRenewal waits until the agent serves a certificate other than old (nil: any) and returns it.
func (a *Agent) WaitRenewal(t testing.TB, limit time.Duration, old *x509.Certificate) *x509.Certificate {
	t.Helper()
	var leaf *x509.Certificate
	a.WaitFor(t, limit, "serves a new certificate", func() (err error) {
		leaf, err = a.Leaf(t)
		if err == nil && old != nil && leaf.Equal(old) {
			err = fmt.Errorf("it serves serial %s", serialOf(old))
		}
		return err
	})
	return leaf
}

// CRLs returns those that the agent serves with the roots.
func (a *Agent) CRLs(t testing.TB) ([]*x509.RevocationList, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	secrets, err := FetchSDS(ctx, a.Socket, "ROOTCA")
	if err != nil {
		return nil, err
	}
	var lists []*x509.RevocationList
	rest := secrets["ROOTCA"].GetValidationContext().GetCrl().GetInlineBytes()
	for block, rest := pem.Decode(rest); block != nil; block, rest = pem.Decode(rest) {
		list, err := x509.ParseRevocationList(block.Bytes)
		if err != nil {
			return nil, err
		}
		lists = append(lists, list)
	}
	return lists, nil
}

// ready says what the agent's /readyz says.
func (a *Agent) ready(t testing.TB) bool {
	t.Helper()
	_, err := a.get(t, "/readyz")
	return err == nil
}

// page returns a page that the agent shows beside its metrics.
func (a *Agent) page(t testing.TB, path string) string {
	t.Helper()
	body, err := a.get(t, path)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

func (a *Agent) get(t testing.TB, path string) ([]byte, error) {
	t.Helper()
	addrs, err := readAddrs(filepath.Join(a.dir, "addrs"))
	if err != nil {
		t.Fatal(err)
	}
	return httpGet(http.DefaultClient, "http://"+addrs["metrics"]+path)
}

// Run runs a chancery command to its end.
func Run(t testing.TB, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	binary := ChanceryBinary(t) // the first one builds it, which may take minutes
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	var out, errs strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// MustRun is Run for commands that should succeed; it returns standard output.
func MustRun(t testing.TB, args ...string) string {
	t.Helper()
	stdout, stderr, err := Run(t, "", args...)
	if err != nil {
		t.Fatalf("chancery %s: %v\n%s", strings.Join(args, " "), err, stderr)
	}
	return stdout
}
