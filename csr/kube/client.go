package kube

import (
	"context"
	"fmt"
	"io"

	authn "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/chancery-project/chancery/ca/kube"
)

// Client makes the few sorts of requests that a Cluster needs of its API server.
type Client struct {
	core, authn rest.Interface
	params      runtime.ParameterCodec
}

// NewClient makes a client from a kubeconfig file; an empty path means the service account of the pod that we run in.
// The file is trusted: it may name programs to run for credentials, and who can change it can be anybody in the cluster.
func NewClient(path string) (*Client, error) {
	cfg, err := kube.Config(path)
	if err != nil {
		return nil, err
	}
	client, err := newClient(cfg)
	if err != nil {
		return nil, fmt.Errorf("making a client from kubeconfig %q: %w", path, err)
	}
	return client, nil
}

func newClient(cfg *rest.Config) (*Client, error) {
	scheme := kinds()
	transport, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, err
	}
	core, err := kube.Group(cfg, transport, scheme, corev1.SchemeGroupVersion, "/api")
	if err != nil {
		return nil, err
	}
	auth, err := kube.Group(cfg, transport, scheme, authn.SchemeGroupVersion, "/apis")
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
