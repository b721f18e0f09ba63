package kube

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// NewClient makes a client from a kubeconfig file; an empty path means the service account of the pod that we run in.
// The file is trusted: it may name programs to run for credentials, and who can change it can be anybody in the cluster.
//
// The client has no rate limit of its own. The API server's priority and fairness is the one place that can tell who
// harms whom; a client's limit only makes bursts of new pods wait for each other.
func NewClient(path string) (*kubernetes.Clientset, error) {
	cfg, err := loadRESTConfig(path)
	if err != nil {
		return nil, err
	}
	cfg.QPS = -1
	cfg.UserAgent = "chancery"
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	// No cfg.Timeout: it would end watches. Each call has a deadline of its own.
	cfg.Dial = (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("making a client from kubeconfig %q: %w", path, err)
	}
	return client, nil
}

func loadRESTConfig(path string) (*rest.Config, error) {
	if path == "" {
		cfg, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("reading the service account of our own pod, as no kubeconfig is given: %w", err)
		}
		return cfg, nil
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, fmt.Errorf("reading kubeconfig %q: %w", path, err)
	}
	if cfg.Insecure {
		return nil, fmt.Errorf("kubeconfig %q sets insecure-skip-tls-verify: whoever answers could then make up keys and pods; give certificate-authority-data", path)
	}
	if u, err := url.Parse(cfg.Host); err != nil || u.Scheme != "https" && !loopback(u.Hostname()) {
		return nil, fmt.Errorf("kubeconfig %q: the server should be an https URL", path)
	}
	return cfg, nil
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}
