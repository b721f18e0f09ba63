package naming

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"github.com/chancery-project/chancery/trust"
)

// Kind is a kind of objects that name identities.
type Kind string

const (
	KindPod      Kind = "pod"
	KindService  Kind = "service"
	KindSlice    Kind = "endpointslice"
	KindEntry    Kind = "serviceentry"
	KindWorkload Kind = "workloadentry"
)

// Kinds are all of them. A cluster has been read once it has been of each kind.
var Kinds = []Kind{KindPod, KindService, KindSlice, KindEntry, KindWorkload}

// Key names an object of a cluster.
type Key struct {
	Kind            Kind
	Namespace, Name string
}

// Object is what counts of an object: one of the types below. None is changed any more once it was handed over.
type Object interface{ Key() Key }

// Pod is a pod.
type Pod struct {
	Namespace, Name string
	UID             UID
	Account         string // empty: default, as for a mirror pod
	Ended           bool   // Succeeded or Failed: it serves nobody any more
	Labels          Labels
}

// Service is a Service.
type Service struct {
	Namespace, Name string
	External        bool   // of type ExternalName: it is another name of something, so neither pods nor annotations count
	Selector        Labels // nil: its endpoints are somebody else's work
	// Accounts and IDs are what its annotations alpha.istio.io/kubernetes-serviceaccounts and canonical-serviceaccounts name.
	Accounts, IDs string
}

// Slice is an EndpointSlice.
type Slice struct {
	Namespace, Name string
	Service         string // in the same namespace
	Pods            []PodRef
}

// PodRef is a pod that an endpoint names as its target.
type PodRef struct {
	Namespace, Name string // an empty namespace is that of the slice
	UID             UID    // zero: whichever pod has the name
}

// Entry is a ServiceEntry of Istio.
type Entry struct {
	Namespace, Name string
	Hosts           []string
	IDs             []string // subjectAltNames
	Selector        Labels   // workloadSelector
	Accounts        []string // serviceAccount of its own endpoints
	Problem         string   // it could not be read: what was known of it stays
	Note            string   // something in it counts for nothing
}

// Workload is a WorkloadEntry of Istio.
type Workload struct {
	Namespace, Name string
	Account         string // empty: it names no identity
	Labels          Labels
	Problem         string // likewise
}

// Key implements Object.
func (o *Pod) Key() Key { return Key{KindPod, o.Namespace, o.Name} }

// Key implements Object.
func (o *Service) Key() Key { return Key{KindService, o.Namespace, o.Name} }

// Key implements Object.
func (o *Slice) Key() Key { return Key{KindSlice, o.Namespace, o.Name} }

// Key implements Object.
func (o *Entry) Key() Key { return Key{KindEntry, o.Namespace, o.Name} }

// Key implements Object.
func (o *Workload) Key() Key { return Key{KindWorkload, o.Namespace, o.Name} }

// UID is an object's UID, shortened: what tells a pod from another one of the same name.
type UID uint64

var uidSeed = maphash.MakeSeed()

// UIDOf shortens a UID. That of nothing is zero.
func UIDOf(uid string) UID {
	if uid == "" {
		return 0
	}
	return UID(maphash.String(uidSeed, uid) | 1)
}

// Labels are an object's labels, or a selector's, in one string, in order: pods of one ReplicaSet have the same.
type Labels string

// label is one of them, as Labels has it: "key=value". Keys have no '='.
type label = string

// LabelsOf joins labels.
func LabelsOf(m map[string]string) Labels {
	if len(m) == 0 {
		return ""
	}
	all, size := make([]string, 0, len(m)), 0
	for k, v := range m {
		all, size = append(all, k+"="+v), size+len(k)+len(v)+2
	}
	slices.Sort(all)
	var b strings.Builder
	b.Grow(size)
	for i, l := range all {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(l)
	}
	return Labels(b.String())
}

// split returns them one by one, in order; nil for none.
func (l Labels) split() []label {
	if l == "" {
		return nil
	}
	return strings.Split(string(l), ",")
}

// covers reports whether labels have all of a selector's; both are in order.
func covers(labels, selector []label) bool {
	for _, want := range selector {
		i, found := slices.BinarySearch(labels, want)
		if !found {
			return false
		}
		labels = labels[i+1:]
	}
	return true
}

// Bounds on what one object, and all of them, can name. A reader need not hand over much more.
const (
	MaxNamed  = 200  // identities that one object names itself
	MaxHosts  = 256  // of a ServiceEntry
	maxListed = 1000 // identities of one service, aliases included
)

// accountsOf reads names of service accounts of one namespace, such as those of an annotation.
func accountsOf(d trust.Domain, namespace, field string, names []string) (ids []trust.ID, problems []string) {
	return idsOf(field, names, func(name string) (trust.ID, error) {
		if name == "" {
			return trust.ID{}, fmt.Errorf("it is empty; it should be the name of a service account of namespace %s", namespace)
		}
		return trust.WorkloadID(d, namespace, name)
	})
}

// canonical reads SPIFFE IDs as they stand.
func canonical(field string, names []string) (ids []trust.ID, problems []string) {
	return idsOf(field, names, trust.ParseID)
}

// idsOf reads what names identities. What is wrong is left out and said: an object that names two right ones and a wrong one names two.
func idsOf(field string, names []string, parse func(string) (trust.ID, error)) (ids []trust.ID, problems []string) {
	for i, name := range names {
		if i == MaxNamed {
			return ids, append(problems, fmt.Sprintf("%s: there are more than %d names; the rest count for nothing", field, MaxNamed))
		}
		id, err := parse(strings.TrimSpace(name))
		if err == nil && id.Reserved() {
			err = fmt.Errorf("%.80q is an identity of Chancery's own, which serves nothing else", id)
		}
		if err != nil {
			if len(problems) < maxProblems {
				problems = append(problems, fmt.Sprintf("%s[%d]: %v", field, i, err))
			}
			continue
		}
		ids = append(ids, id)
	}
	return ids, problems
}

// list splits an annotation that is a list with commas; an empty one names nothing.
func list(s string) []string {
	if strings.TrimSpace(s) == "" {
		return nil
	}
	return strings.SplitN(s, ",", MaxNamed+2)
}

// CheckLabels refuses labels that Labels cannot tell apart. Those of Kubernetes' own objects are none of them; those in the spec of Istio's are not
// checked by an API server.
func CheckLabels(m map[string]string) error {
	for k, v := range m {
		if k == "" || strings.ContainsAny(k, "=,") || strings.ContainsAny(v, "=,") {
			return fmt.Errorf("%.80q: %.80q should be a label, of letters, digits, '-', '_', '.' and '/'", k, v)
		}
	}
	return nil
}
