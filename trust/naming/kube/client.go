package kube

import (
	"context"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/chancery-project/chancery/trust/naming"
)

// istio is the group of ServiceEntries and WorkloadEntries. Istio has served this version since 1.22.
var istio = schema.GroupVersion{Group: "networking.istio.io", Version: "v1"}

// resource is how objects of a kind are read.
type resource struct {
	client   rest.Interface
	params   runtime.ParameterCodec
	name     string // as in URLs
	fields   string // selector
	one      runtime.Object
	list     func() runtime.Object
	optional bool // of a CustomResourceDefinition
}

// resources are those of all kinds.
func resources(cfg *rest.Config, client *http.Client) (map[naming.Kind]resource, error) {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Pod{}, &corev1.PodList{}, &corev1.Service{}, &corev1.ServiceList{})
	scheme.AddKnownTypes(discoveryv1.SchemeGroupVersion, &discoveryv1.EndpointSlice{}, &discoveryv1.EndpointSliceList{})
	for _, kind := range []string{"ServiceEntry", "WorkloadEntry"} {
		scheme.AddKnownTypeWithName(istio.WithKind(kind), &custom{})
		scheme.AddKnownTypeWithName(istio.WithKind(kind+"List"), &customList{})
	}
	groups := map[string]rest.Interface{}
	for _, gv := range []schema.GroupVersion{corev1.SchemeGroupVersion, discoveryv1.SchemeGroupVersion, istio} {
		metav1.AddToGroupVersion(scheme, gv)
		group, err := open(cfg, client, scheme, gv)
		if err != nil {
			return nil, fmt.Errorf("making a client for %s: %w", gv, err)
		}
		groups[gv.Group] = group
	}
	params := runtime.NewParameterCodec(scheme)
	return map[naming.Kind]resource{
		naming.KindPod:      {groups[""], params, "pods", "status.phase!=Succeeded,status.phase!=Failed", &corev1.Pod{}, func() runtime.Object { return &corev1.PodList{} }, false},
		naming.KindService:  {groups[""], params, "services", "", &corev1.Service{}, func() runtime.Object { return &corev1.ServiceList{} }, false},
		naming.KindSlice:    {groups[discoveryv1.GroupName], params, "endpointslices", "", &discoveryv1.EndpointSlice{}, func() runtime.Object { return &discoveryv1.EndpointSliceList{} }, false},
		naming.KindEntry:    {groups[istio.Group], params, "serviceentries", "", &custom{}, func() runtime.Object { return &customList{} }, true},
		naming.KindWorkload: {groups[istio.Group], params, "workloadentries", "", &custom{}, func() runtime.Object { return &customList{} }, true},
	}, nil
}

// open makes a client of one group. Custom resources are served as JSON only.
func open(cfg *rest.Config, client *http.Client, scheme *runtime.Scheme, gv schema.GroupVersion) (rest.Interface, error) {
	c := rest.CopyConfig(cfg)
	c.QPS, c.GroupVersion, c.APIPath = -1, &gv, "/apis"
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	switch gv.Group {
	case corev1.GroupName:
		c.APIPath = "/api"
	case istio.Group:
		c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	}
	return rest.RESTClientForConfigAndClient(c, client)
}

func (r *resource) get(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	l := r.list()
	o.FieldSelector = r.fields
	return l, r.client.Get().Resource(r.name).VersionedParams(&o, r.params).Do(ctx).Into(l)
}

func (r *resource) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch, o.FieldSelector = true, r.fields
	return r.client.Get().Resource(r.name).VersionedParams(&o, r.params).Watch(ctx)
}
