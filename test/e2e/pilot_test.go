package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
)

// PilotAgentConfig is what an injected sidecar's environment tells the Istio agent.
type PilotAgentConfig struct {
	Pod         Pod
	Token       string        // for its projected token file
	CAAddr      string        // HOST:PORT of the certificate service; must not end in ":15010", where the agent uses no TLS
	CARootFile  string        // PEM roots of the server's certificate
	ClusterID   string        // empty: "Kubernetes"
	TrustDomain string        // empty: "cluster.local"
	SecretTTL   time.Duration // validity asked for; 0: 1 h. Renewed after half of it
	RSA         bool          // the agent's own default, RSA 2048; else P-256

	// Client makes the sidecar's Envoy what StartClientEnvoy starts, with its certificate from the agent. Nil: it only serves its
	// admin port.
	Client *EnvoyConfig
}

// PilotAgent is a running `pilot-agent proxy sidecar` with the Envoy that it started.
type PilotAgent struct {
	*Process
	Dir       string // its working directory, "/" of the istio-proxy container
	Socket    string // its SDS
	TokenFile string // replaced by WriteToken
	Envoy     *Envoy // the sidecar's Envoy; its Process is the agent's
}

// StartPilotAgent starts the real Istio agent the way it runs in a sidecar, as far as certificates go: its file names are relative
// to the working directory, the certificate service is given by CA_ADDR, and there is no istiod for xDS (its Envoy has a static
// configuration). WaitSDS waits for its first certificate.
func StartPilotAgent(t testing.TB, cfg PilotAgentConfig) *PilotAgent {
	t.Helper()
	path, envoy := Tool(t, "pilot-agent"), Tool(t, "envoy")
	a := &PilotAgent{Dir: SocketDir(t)}
	a.Socket = filepath.Join(a.Dir, "var/run/secrets/workload-spiffe-uds/socket")
	a.TokenFile = filepath.Join(a.Dir, "var/run/secrets/tokens/istio-token")
	WriteToken(t, a.TokenFile, cfg.Token)
	// What the downward API would show of the pod: no status port, which would listen on all addresses.
	writeFile(t, filepath.Join(a.Dir, "etc/istio/pod/annotations"), "status.sidecar.istio.io/port=\"0\"\n", 0o600)
	adminFile := filepath.Join(a.Dir, "admin-address")
	proxyConfig, err := json.Marshal(map[string]any{
		"binaryPath":               envoyWrapper(t, a.Dir, envoy, adminFile),
		"customConfigFile":         sidecarBootstrap(t, a.Dir, a.Socket, cfg.Client), // else the agent makes one that waits for istiod
		"configPath":               filepath.Join(a.Dir, "etc/istio/proxy"),
		"discoveryAddress":         "127.0.0.1:1", // nobody's port: there is no istiod
		"controlPlaneAuthPolicy":   "NONE",        // so it needs no root for istiod
		"proxyAdminPort":           1,             // nobody's port either: the agent asks there for a drain, Envoy listens where the system says
		"concurrency":              1,
		"terminationDrainDuration": "0s",
	})
	if err != nil {
		t.Fatal(err)
	}
	a.Process = StartProcess(t, ProcessConfig{
		Name: "pilot-agent", Path: path, Dir: a.Dir,
		Args: []string{"proxy", "sidecar", "--log_output_level=default:info"},
		Env:  append(pilotEnv(cfg), "PROXY_CONFIG="+string(proxyConfig)),
	})
	a.Envoy = &Envoy{Process: a.Process}
	a.Envoy.waitAdmin(t, adminFile)
	return a
}

func pilotEnv(cfg PilotAgentConfig) []string {
	orElse := func(s, def string) string {
		if s == "" {
			return def
		}
		return s
	}
	if cfg.SecretTTL == 0 {
		cfg.SecretTTL = time.Hour
	}
	env := []string{
		"PATH=" + os.Getenv("PATH"),
		"CA_ADDR=" + cfg.CAAddr, "CA_ROOT_CA=" + cfg.CARootFile,
		"ISTIO_META_CLUSTER_ID=" + orElse(cfg.ClusterID, "Kubernetes"),
		"TRUST_DOMAIN=" + orElse(cfg.TrustDomain, "cluster.local"),
		"POD_NAME=" + cfg.Pod.Name, "POD_NAMESPACE=" + cfg.Pod.Namespace, "SERVICE_ACCOUNT=" + cfg.Pod.ServiceAccount,
		"INSTANCE_IP=127.0.0.1",
		"SECRET_TTL=" + cfg.SecretTTL.String(),
		"GRPC_XDS_BOOTSTRAP=", // writes no file for gRPC applications
		"CLOUD_PLATFORM=none", // else it asks the metadata services of three clouds
		"MINIMUM_DRAIN_DURATION=0s",
	}
	if !cfg.RSA {
		env = append(env, "ECC_SIGNATURE_ALGORITHM=ECDSA")
	}
	return env
}

// envoyWrapper writes the program that the agent runs as its Envoy. It says what the agent has no option for: where to write the
// admin address, and that the kernel kills Envoy when the agent is killed, as a container's end would.
func envoyWrapper(t testing.TB, dir, envoy, adminFile string) string {
	t.Helper()
	path := filepath.Join(dir, "envoy")
	writeFile(t, path, fmt.Sprintf("#!/bin/sh\nexec setpriv --pdeathsig KILL '%s' --admin-address-path '%s' "+
		"--service-node sidecar --service-cluster e2e \"$@\"\n", envoy, adminFile), 0o700)
	return path
}

func sidecarBootstrap(t testing.TB, dir, sdsSocket string, client *EnvoyConfig) string {
	t.Helper()
	if client != nil {
		cfg := *client
		cfg.SDSSocket = sdsSocket
		return writeBootstrap(t, dir, cfg, clientBootstrap)
	}
	path := filepath.Join(dir, "envoy.yaml")
	writeFile(t, path, "admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}\n", 0o600)
	return path
}

// WaitSDS waits until the agent serves its certificate and root, and returns both secrets.
func (a *PilotAgent) WaitSDS(t testing.TB, limit time.Duration) map[string]*tlsv3.Secret {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	var secrets map[string]*tlsv3.Secret
	a.WaitFor(t, limit, "serves its certificate", func() (err error) {
		secrets, err = FetchSDS(ctx, a.Socket, "default", "ROOTCA")
		return err
	})
	return secrets
}
