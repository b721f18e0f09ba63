package kube

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"time"

	authn "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Client makes the few sorts of requests that a Cluster needs of its API server. It is built from client-go's parts
// and not its clientset, which knows every kind of object and would be two fifths of our binary.
type Client struct {
	core, authn rest.Interface
	params      runtime.ParameterCodec
}

// NewClient makes a client from a kubeconfig file; an empty path means the service account of the pod that we run in.
// The file is trusted: it may name programs to run for credentials, and who can change it can be anybody in the cluster.
//
// The client has no rate limit of its own. The API server's priority and fairness is the one place that can tell who
// harms whom; a client's limit only makes bursts of new pods wait for each other.
func NewClient(path string) (*Client, error) {
	cfg, err := loadRESTConfig(path)
	if err != nil {
		return nil, err
	}
	cfg.UserAgent = "chancery"
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	// No cfg.Timeout: it would end watches. Each call has a deadline of its own.
	cfg.Dial = (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	client, err := newClient(cfg)
	if err != nil {
		return nil, fmt.Errorf("making a client from kubeconfig %q: %w", path, err)
	}
	return client, nil
}

func newClient(cfg *rest.Config) (*Client, error) {
	scheme := kinds()
	codecs := serializer.NewCodecFactory(scheme).WithoutConversion()
	transport, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, err
	}
	group := func(gv schema.GroupVersion, path string) (*rest.RESTClient, error) {
		c := rest.CopyConfig(cfg)
		c.QPS, c.GroupVersion, c.APIPath, c.NegotiatedSerializer = -1, &gv, path, codecs
		return rest.RESTClientForConfigAndClient(c, transport)
	}
	core, err := group(corev1.SchemeGroupVersion, "/api")
	if err != nil {
		return nil, err
	}
	auth, err := group(authn.SchemeGroupVersion, "/apis")
	if err != nil {
		return nil, err
	}
	return &Client{core: core, authn: auth, params: runtime.NewParameterCodec(scheme)}, nil
}

// kinds are the kinds of objects that we know.
func kinds() *runtime.Scheme {
	s := runtime.NewScheme()
	s.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Pod{}, &corev1.PodList{})
	s.AddKnownTypes(authn.SchemeGroupVersion, &authn.TokenReview{})
	metav1.AddToGroupVersion(s, corev1.SchemeGroupVersion)
	metav1.AddToGroupVersion(s, authn.SchemeGroupVersion)
	return s
}

func (c *Client) getPod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	p := &corev1.Pod{}
	return p, c.core.Get().Namespace(namespace).Resource("pods").Name(name).Do(ctx).Into(p)
}

// listPods lists the pods of a namespace, or of all if it is empty.
func (c *Client) listPods(ctx context.Context, namespace string, o metav1.ListOptions) (*corev1.PodList, error) {
	l := &corev1.PodList{}
	return l, c.core.Get().Namespace(namespace).Resource("pods").VersionedParams(&o, c.params).Do(ctx).Into(l)
}

// watchPods watches the pods of all namespaces.
func (c *Client) watchPods(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	return c.core.Get().Resource("pods").VersionedParams(&o, c.params).Watch(ctx)
}

func (c *Client) reviewToken(ctx context.Context, spec authn.TokenReviewSpec) (*authn.TokenReviewStatus, error) {
	r := &authn.TokenReview{Spec: spec}
	return &r.Status, c.authn.Post().Resource("tokenreviews").Body(r).Do(ctx).Into(r)
}

// keySet opens the key set that the API server publishes.
func (c *Client) keySet(ctx context.Context) (io.ReadCloser, error) {
	const path = "/openid/v1/jwks"
	body, err := c.core.Get().AbsPath(path).SetHeader("Accept", "application/jwk-set+json, application/json").Stream(ctx)
	if err != nil {
		return nil, fmt.Errorf("getting %s from the API server: %w", path, err)
	}
	return body, nil
}

// APIConfig reads how to reach an API server, as NewClient does, for other packages named kube.
func APIConfig(path string) (*rest.Config, error) { return loadRESTConfig(path) }

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
