// Package kube owns how we reach an API server: what is taken from a kubeconfig or from our own pod, with client-go's
// parts and not its clientset, which knows every kind of object and would be two fifths of our binary.
//
// It refuses an API server whose certificate is not verified: whoever answers could then make up what we ask for.
package kube

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Config reads how to reach an API server from a kubeconfig file; an empty path means the service account of the pod that
// we run in. The file is trusted: it may name programs to run for credentials.
//
// The client has no rate limit of its own. The API server's priority and fairness is the one place that can tell who
// harms whom; a client's limit only makes bursts of requests wait for each other. There is no timeout either, since it
// would end watches: each call should have a deadline.
func Config(path string) (*rest.Config, error) {
	cfg, err := load(path)
	if err != nil {
		return nil, err
	}
	cfg.UserAgent = "chancery"
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	cfg.Dial = (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	return cfg, nil
}

// Client is Config with the HTTP client that the groups of its API server share. It asks the API server nothing.
func Client(path string) (*rest.Config, *http.Client, error) {
	cfg, err := Config(path)
	if err != nil {
		return nil, nil, err
	}
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("making a client from kubeconfig %q: %w", path, err)
	}
	return cfg, client, nil
}

// Group returns a client for the objects of one group and version, which the scheme knows; path is /api for the core group
// and /apis for all others. Groups of one API server share the HTTP client.
func Group(cfg *rest.Config, client *http.Client, scheme *runtime.Scheme, gv schema.GroupVersion, path string) (*rest.RESTClient, error) {
	c := rest.CopyConfig(cfg)
	c.QPS, c.GroupVersion, c.APIPath = -1, &gv, path
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientForConfigAndClient(c, client)
}

func load(path string) (*rest.Config, error) {
	if path == "" {
		cfg, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("reading the service account of our own pod, as no kubeconfig is given: %w", err)
		}
		return cfg, nil
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	if clientcmd.IsEmptyConfig(err) { // its own text names an environment variable that we do not read
		return nil, fmt.Errorf("reading kubeconfig %q: it holds no cluster; it should be a file like ~/.kube/config, with clusters, users, contexts and current-context", path)
	} else if err != nil {
		return nil, fmt.Errorf("reading kubeconfig %q: %w", path, err)
	}
	if cfg.Insecure {
		return nil, fmt.Errorf("kubeconfig %q sets insecure-skip-tls-verify: whoever answers could then make up what we ask for; give certificate-authority-data", path)
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
