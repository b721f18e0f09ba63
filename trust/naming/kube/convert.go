package kube

import (
	stdjson "encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/json"

	"github.com/chancery-project/chancery/trust/naming"
)

// custom is an object of a CustomResourceDefinition. Its spec is read by itself, so that a bad one does not spoil the list.
type custom struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              stdjson.RawMessage `json:"spec"`
}

type customList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []custom `json:"items"`
}

// DeepCopyObject implements runtime.Object.
func (c *custom) DeepCopyObject() runtime.Object {
	out := *c
	out.ObjectMeta = *c.ObjectMeta.DeepCopy()
	return &out
}

// DeepCopyObject implements runtime.Object.
func (l *customList) DeepCopyObject() runtime.Object {
	out := *l
	out.Items = make([]custom, len(l.Items))
	for i := range l.Items {
		out.Items[i] = *l.Items[i].DeepCopyObject().(*custom)
	}
	return &out
}

// Istio's annotations of Services.
const (
	kubernetesAccounts = "alpha.istio.io/kubernetes-serviceaccounts"
	canonicalAccounts  = "alpha.istio.io/canonical-serviceaccounts"
)

// convert keeps of an object what naming wants of it. The kind tells Istio's objects apart.
func convert(kind naming.Kind, o any) (naming.Object, error) {
	switch o := o.(type) {
	case naming.Object:
		return o, nil // it was converted already
	case *corev1.Pod:
		return &naming.Pod{
			Namespace: o.Namespace, Name: o.Name, UID: naming.UIDOf(string(o.UID)), Account: o.Spec.ServiceAccountName,
			Ended: o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed, Labels: naming.LabelsOf(o.Labels),
		}, nil
	case *corev1.Service:
		return &naming.Service{
			Namespace: o.Namespace, Name: o.Name, External: o.Spec.Type == corev1.ServiceTypeExternalName, Selector: naming.LabelsOf(o.Spec.Selector),
			Accounts: o.Annotations[kubernetesAccounts], IDs: o.Annotations[canonicalAccounts],
		}, nil
	case *discoveryv1.EndpointSlice:
		return sliceOf(o), nil
	case *custom:
		if kind == naming.KindEntry {
			return entryOf(o), nil
		}
		return workloadOf(o), nil
	}
	return nil, fmt.Errorf("reading a %s: got %T", kind, o)
}

func sliceOf(o *discoveryv1.EndpointSlice) *naming.Slice {
	out := &naming.Slice{Namespace: o.Namespace, Name: o.Name, Service: o.Labels[discoveryv1.LabelServiceName]}
	for i := range o.Endpoints {
		target := o.Endpoints[i].TargetRef
		if target == nil || target.Kind != "Pod" || target.Name == "" {
			continue
		}
		ref := naming.PodRef{Name: target.Name, UID: naming.UIDOf(string(target.UID))}
		if target.Namespace != o.Namespace {
			ref.Namespace = target.Namespace
		}
		out.Pods = append(out.Pods, ref)
	}
	return out
}

// entrySpec is what counts of a ServiceEntry. Other fields are not naming's.
type entrySpec struct {
	Hosts            []string `json:"hosts"`
	SubjectAltNames  []string `json:"subjectAltNames"`
	WorkloadSelector *struct {
		Labels map[string]string `json:"labels"`
	} `json:"workloadSelector"`
	Endpoints []struct {
		ServiceAccount string `json:"serviceAccount"`
	} `json:"endpoints"`
}

func entryOf(o *custom) *naming.Entry {
	out := &naming.Entry{Namespace: o.Namespace, Name: o.Name}
	var spec entrySpec
	if err := decode(o.Spec, &spec); err != nil {
		out.Problem = err.Error()
		return out
	}
	if sel := spec.WorkloadSelector; sel != nil {
		if err := naming.CheckLabels(sel.Labels); err != nil {
			out.Problem = "spec.workloadSelector.labels: " + err.Error()
			return out
		}
		if out.Selector = naming.LabelsOf(sel.Labels); len(sel.Labels) == 0 {
			out.Note = "spec.workloadSelector has no labels; it selects nothing here, as it could be anything"
		}
	}
	out.Hosts = spec.Hosts[:min(len(spec.Hosts), naming.MaxHosts+1)]
	out.IDs = spec.SubjectAltNames[:min(len(spec.SubjectAltNames), naming.MaxNamed+1)]
	seen := map[string]bool{}
	for _, e := range spec.Endpoints {
		if a := e.ServiceAccount; a != "" && !seen[a] && len(out.Accounts) <= naming.MaxNamed {
			seen[a] = true
			out.Accounts = append(out.Accounts, a)
		}
	}
	return out
}

// workloadSpec is what counts of a WorkloadEntry.
type workloadSpec struct {
	ServiceAccount string            `json:"serviceAccount"`
	Labels         map[string]string `json:"labels"`
}

func workloadOf(o *custom) *naming.Workload {
	out := &naming.Workload{Namespace: o.Namespace, Name: o.Name}
	var spec workloadSpec
	if err := decode(o.Spec, &spec); err != nil {
		out.Problem = err.Error()
		return out
	}
	if err := naming.CheckLabels(spec.Labels); err != nil {
		out.Problem = "spec.labels: " + err.Error()
		return out
	}
	labels := map[string]string{}
	for k, v := range spec.Labels {
		labels[k] = v
	}
	for k, v := range o.Labels { // those of the object come first, as in Istio
		labels[k] = v
	}
	out.Account, out.Labels = spec.ServiceAccount, naming.LabelsOf(labels)
	return out
}

// decode reads a spec: fields that we read must be of their type; others are Istio's affair.
func decode(raw stdjson.RawMessage, into any) error {
	if len(raw) == 0 || string(raw) == "null" {
		return errors.New("spec is missing")
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("spec: %w", err)
	}
	return nil
}
