// Package apiserver owns the real API server of tests: a kube-apiserver with its etcd on loopback, as test/tools installs them,
// without controllers, scheduler or kubelet.
//
// It refuses fixed ports. Nobody creates default service accounts or removes namespaces there, so tests make what they
// need under names of their own.
package apiserver

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/chancery-project/chancery/test/process"
)

// Issuer is what every cluster calls itself by default in its tokens.
const Issuer = "https://kubernetes.default.svc"

// adminToken is that of a member of system:masters. It is good on this machine's loopback while a test runs.
const adminToken = "test-admin"

// Server is a running API server with its etcd.
type Server struct {
	URL             string // https://127.0.0.1:PORT
	Issuer          string // "iss" of its tokens
	CAFile          string // root of its TLS certificate
	AdminKubeconfig string // file; member of system:masters
	AuditFile       string // its audit log, if there is an audit policy
	Client          *kubernetes.Clientset
	TokenKey        *rsa.PrivateKey // the API server's own key for service-account tokens

	apiserver, etcd *process.Process
	config          process.Config
}

// Config says how to start one.
type Config struct {
	Dir             string   // for its files
	APIServer, Etcd string   // the programs
	AuditPolicy     string   // what it writes into AuditFile; default nothing
	Args            []string // more flags of the API server; the last of two counts
}

// Start starts an API server for one test, which may then pause or kill it.
func Start(t testing.TB, auditPolicy string) *Server {
	t.Helper()
	s, err := Launch(Config{Dir: t.TempDir(), APIServer: process.Tool(t, "kube-apiserver"), Etcd: process.Tool(t, "etcd"), AuditPolicy: auditPolicy})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Stop()
		if t.Failed() {
			t.Logf("end of the API server's log:\n%s", s.apiserver.LogTail(15))
		}
	})
	return s
}

// Launch is Start without a test. It tries again with other ports, since neither program can be given port 0 and a picked one
// may be taken.
func Launch(c Config) (s *Server, err error) {
	dir := c.Dir
	for try := range 3 {
		c.Dir = filepath.Join(dir, fmt.Sprint(try))
		if err := os.MkdirAll(c.Dir, 0o700); err != nil {
			return nil, err
		}
		s = &Server{Issuer: Issuer}
		if err = s.start(c); err == nil {
			return s, nil
		}
		s.Stop()
		if !strings.Contains(err.Error(), "address already in use") {
			break
		}
	}
	return nil, err
}

func (s *Server) start(c Config) error {
	etcdURL, err := s.startEtcd(c)
	if err != nil {
		return err
	}
	return s.startAPIServer(c, etcdURL)
}

func (s *Server) startEtcd(c Config) (clientURL string, err error) {
	clientPort, err := process.FreePort()
	if err != nil {
		return "", err
	}
	peerPort, err := process.FreePort()
	if err != nil {
		return "", err
	}
	clientURL = fmt.Sprintf("http://127.0.0.1:%d", clientPort)
	peerURL := fmt.Sprintf("http://127.0.0.1:%d", peerPort)
	s.etcd, err = process.Launch(process.Config{
		Name: "etcd", Path: c.Etcd, Log: filepath.Join(c.Dir, "etcd.log"),
		Args: []string{
			"--data-dir=" + filepath.Join(c.Dir, "etcd"), "--unsafe-no-fsync", "--log-level=warn",
			"--listen-client-urls=" + clientURL, "--advertise-client-urls=" + clientURL,
			"--listen-peer-urls=" + peerURL, "--initial-advertise-peer-urls=" + peerURL, "--initial-cluster=default=" + peerURL,
		},
	})
	return clientURL, err
}

func (s *Server) startAPIServer(c Config, etcdURL string) error {
	port, err := process.FreePort()
	if err != nil {
		return err
	}
	s.URL = fmt.Sprintf("https://127.0.0.1:%d", port)
	file := func(name string) string { return filepath.Join(c.Dir, name) }
	s.CAFile, s.AdminKubeconfig = file("apiserver.crt"), file("admin.kubeconfig")
	if s.TokenKey, err = rsa.GenerateKey(rand.Reader, 2048); err != nil {
		return fmt.Errorf("generating the service-account key: %w", err)
	}
	err = writeAll(
		func() error { return writeCertificate(s.CAFile, file("apiserver.key")) },
		func() error {
			return writePEM(file("sa.key"), "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(s.TokenKey))
		},
		func() error {
			return os.WriteFile(file("tokens.csv"), []byte(adminToken+",admin,admin,system:masters\n"), 0o600)
		},
		func() error { return s.WriteKubeconfig(s.AdminKubeconfig, &clientcmdapi.AuthInfo{Token: adminToken}) },
	)
	if err != nil {
		return err
	}
	s.config = process.Config{
		Name: "kube-apiserver", Path: c.APIServer, Log: file("kube-apiserver.log"),
		Args: []string{
			"--etcd-servers=" + etcdURL,
			"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", port),
			// Nobody reads the Service "kubernetes", and its endpoints may not be loopback addresses.
			"--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.0.0.0/24",
			"--tls-cert-file=" + s.CAFile, "--tls-private-key-file=" + file("apiserver.key"), "--token-auth-file=" + file("tokens.csv"),
			"--service-account-issuer=" + Issuer, "--service-account-jwks-uri=" + s.URL + "/openid/v1/jwks",
			"--service-account-signing-key-file=" + file("sa.key"), "--service-account-key-file=" + file("sa.key"),
			"--authorization-mode=RBAC", "--anonymous-auth=false",
			"--feature-gates=ClusterTrustBundle=true,PodCertificateRequest=true",
		},
	}
	if c.AuditPolicy != "" {
		if err := os.WriteFile(file("audit-policy.yaml"), []byte(c.AuditPolicy), 0o600); err != nil {
			return err
		}
		s.AuditFile = file("audit.log")
		s.config.Args = append(s.config.Args, "--audit-policy-file="+file("audit-policy.yaml"), "--audit-log-path="+s.AuditFile, "--audit-log-mode=blocking")
	}
	s.config.Args = append(s.config.Args, c.Args...)
	if s.apiserver, err = process.Launch(s.config); err != nil {
		return err
	}
	return s.connect()
}

// connect makes the admin's client and waits until the server is ready.
func (s *Server) connect() error {
	cfg, err := clientcmd.BuildConfigFromFlags("", s.AdminKubeconfig)
	if err != nil {
		return fmt.Errorf("reading the admin's kubeconfig: %w", err)
	}
	cfg.QPS, cfg.Burst = 1000, 1000 // the defaults (5, 10) are for being polite to a shared cluster
	cfg.WarningHandler = rest.NoWarnings{}
	if s.Client, err = kubernetes.NewForConfig(cfg); err != nil {
		return fmt.Errorf("making the admin's client: %w", err)
	}
	return s.apiserver.Await(60*time.Second, "is ready", s.ready)
}

func (s *Server) ready() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return s.Client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
}

// WriteKubeconfig writes a kubeconfig for a user, with mode 0600.
func (s *Server) WriteKubeconfig(path string, user *clientcmdapi.AuthInfo) error {
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["e2e"] = &clientcmdapi.Cluster{Server: s.URL, CertificateAuthority: s.CAFile}
	cfg.AuthInfos["e2e"] = user
	cfg.Contexts["e2e"] = &clientcmdapi.Context{Cluster: "e2e", AuthInfo: "e2e"}
	cfg.CurrentContext = "e2e"
	if err := clientcmd.WriteToFile(*cfg, path); err != nil {
		return fmt.Errorf("writing kubeconfig %s: %w", path, err)
	}
	return nil
}

// RequestToken asks for a service account's token.
func (s *Server) RequestToken(ctx context.Context, namespace, serviceAccount string, spec authenticationv1.TokenRequestSpec) (string, error) {
	req, err := s.Client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, serviceAccount,
		&authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("requesting a token of %s/%s: %w", namespace, serviceAccount, err)
	}
	return req.Status.Token, nil
}

// APIServer returns the API server's process, for tests that pause (SIGSTOP) or kill it; only on a server of the test's own.
func (s *Server) APIServer() *process.Process { return s.apiserver }

// Etcd returns the process of its store.
func (s *Server) Etcd() *process.Process { return s.etcd }

// RestartAPIServer starts a killed API server again, with what it has in etcd, and waits until it is ready.
func (s *Server) RestartAPIServer(t testing.TB) {
	t.Helper()
	for try := 0; ; try++ {
		var err error
		if s.apiserver, err = process.Launch(s.config); err != nil {
			t.Fatal(err)
		}
		err = s.apiserver.Await(60*time.Second, "is ready again", s.ready)
		if err == nil {
			return
		}
		// A connection of somebody else may have got the port in between.
		if try == 5 || !strings.Contains(err.Error(), "address already in use") {
			t.Fatal(err)
		}
	}
}

// Stop kills both processes.
func (s *Server) Stop() {
	for _, p := range []*process.Process{s.apiserver, s.etcd} {
		if p != nil {
			p.Kill()
		}
	}
}

// writeCertificate writes a certificate that is its own root.
func writeCertificate(certFile, keyFile string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "kube-apiserver"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost", "kubernetes.default.svc"},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return writeAll(
		func() error { return writePEM(certFile, "CERTIFICATE", cert) },
		func() error { return writePEM(keyFile, "PRIVATE KEY", der) },
	)
}

func writePEM(path, kind string, data []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data}), 0o600)
}

func writeAll(writes ...func() error) error {
	for _, write := range writes {
		if err := write(); err != nil {
			return err
		}
	}
	return nil
}
