package kube

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/chancery-project/chancery/trust/naming"
)

// TestEntries reads specs of ServiceEntries: what naming wants, whatever else there is; and says what is wrong.
func TestEntries(t *testing.T) {
	for spec, want := range map[string]naming.Entry{
		`{"hosts": ["a.example"], "ports": [{"number": 1}], "new": {"field": true}}`:                                                {Hosts: []string{"a.example"}},
		`{"hosts": ["a.example"], "subjectAltNames": ["spiffe://td/x", "a"], "workloadSelector": {"labels": {"b": "2", "a": "1"}}}`: {Hosts: []string{"a.example"}, IDs: []string{"spiffe://td/x", "a"}, Selector: "a=1,b=2"},
		`{"hosts": ["a.example"], "endpoints": [{"serviceAccount": "x"}, {"address": "1"}, {"serviceAccount": "x"}]}`:               {Hosts: []string{"a.example"}, Accounts: []string{"x"}},
		`{"hosts": ["a.example"], "workloadSelector": {}}`:                                                                          {Hosts: []string{"a.example"}, Note: "selects nothing here"},
		`{"Hosts": ["a.example"]}`: {},
		``:                         {Problem: "spec is missing"},
		`null`:                     {Problem: "spec is missing"},
		`{"hosts": "a.example"}`:   {Problem: "spec: json: cannot unmarshal string"},
		`{"hosts": ["a.example"], "workloadSelector": {"labels": {"a": "1,app=web"}}}`: {Problem: `spec.workloadSelector.labels: "a": "1,app=web" should be a label`},
		`{"hosts": ["a.example"], "workloadSelector": {"labels": {"": "1"}}}`:          {Problem: "spec.workloadSelector.labels"},
	} {
		got := entryOf(&custom{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "e"}, Spec: []byte(spec)})
		if strings.Join(got.Hosts, " ") != strings.Join(want.Hosts, " ") || strings.Join(got.IDs, " ") != strings.Join(want.IDs, " ") || strings.Join(got.Accounts, " ") != strings.Join(want.Accounts, " ") ||
			got.Selector != want.Selector || !strings.HasPrefix(got.Problem, want.Problem) || got.Problem != "" && want.Problem == "" || !strings.Contains(got.Note, want.Note) || got.Namespace != "shop" || got.Name != "e" {
			t.Errorf("%s: %+v", spec, got)
		}
	}
}

// TestWorkloads: labels of the object come before those of its spec, as in Istio.
func TestWorkloads(t *testing.T) {
	for spec, want := range map[string]naming.Workload{
		`{"serviceAccount": "vm", "labels": {"app": "web", "v": "1"}}`: {Account: "vm", Labels: "app=db,v=1"},
		`{"address": "10.0.0.1"}`:                                      {Labels: "app=db"},
		`{"serviceAccount": 7}`:                                        {Problem: "spec: json: cannot unmarshal number"},
		`{"labels": {"a=b": "c"}}`:                                     {Problem: "spec.labels: "},
		``:                                                             {Problem: "spec is missing"},
	} {
		got := workloadOf(&custom{ObjectMeta: metav1.ObjectMeta{Name: "w", Labels: map[string]string{"app": "db"}}, Spec: []byte(spec)})
		if got.Account != want.Account || got.Labels != want.Labels || !strings.HasPrefix(got.Problem, want.Problem) || got.Problem != "" && want.Problem == "" {
			t.Errorf("%s: %+v", spec, got)
		}
	}
}

// TestSlices: endpoints of pods count, ready or not; a pod of another namespace is told as such.
func TestSlices(t *testing.T) {
	no := false
	endpoint := func(kind, ns, name string) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{TargetRef: &corev1.ObjectReference{Kind: kind, Namespace: ns, Name: name, UID: "u"}, Conditions: discoveryv1.EndpointConditions{Ready: &no}}
	}
	got := sliceOf(&discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "s", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		Endpoints:  []discoveryv1.Endpoint{endpoint("Pod", "shop", "a"), endpoint("Pod", "test", "b"), endpoint("Node", "", "n"), {}, endpoint("Pod", "shop", "")},
	})
	u := naming.UIDOf("u")
	if got.Service != "web" || len(got.Pods) != 2 || got.Pods[0] != (naming.PodRef{Name: "a", UID: u}) || got.Pods[1] != (naming.PodRef{Namespace: "test", Name: "b", UID: u}) {
		t.Errorf("%+v", got)
	}
}

// FuzzSpecs: no spec makes a reader or the engine fail, and what comes of it is in bounds.
func FuzzSpecs(f *testing.F) {
	f.Add([]byte(`{"hosts": ["a.example"], "subjectAltNames": ["spiffe://td/x"], "workloadSelector": {"labels": {"a": "1"}}}`), []byte(`{"serviceAccount": "vm", "labels": {"a": "1"}}`))
	f.Add([]byte(`{"hosts": 1}`), []byte(`[]`))
	f.Fuzz(func(t *testing.T, entry, workload []byte) {
		e := entryOf(&custom{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "e"}, Spec: entry})
		w := workloadOf(&custom{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "w"}, Spec: workload})
		if len(e.Hosts) > naming.MaxHosts+1 || len(e.IDs) > naming.MaxNamed+1 || len(e.Accounts) > naming.MaxNamed+1 {
			t.Fatalf("%d hosts, %d IDs, %d accounts", len(e.Hosts), len(e.IDs), len(e.Accounts))
		}
		if e.Problem != "" && (e.Hosts != nil || e.IDs != nil || e.Selector != "") || w.Problem != "" && (w.Account != "" || w.Labels != "") {
			t.Fatalf("what cannot be read says something: %+v, %+v", e, w)
		}
	})
}
