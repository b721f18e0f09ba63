package naming

import (
	"fmt"
	"slices"
	"strings"
)

// setService takes a Service.
func (sp *space) setService(o *Service) {
	old := sp.services[o.Name]
	if old != nil {
		old.epoch = sp.cluster.epoch
		if *old.object.(*Service) == *o {
			return
		}
		sp.remove(old)
	}
	s := &source{kind: KindService, space: sp, name: o.Name, live: true, object: o, epoch: sp.cluster.epoch}
	service := sp.name + "/" + o.Name
	if err := CheckService(service); err != nil {
		return // an API server has none of such a name
	}
	s.targets = []*named{sp.cluster.engine.named(service)}
	if !o.External {
		ids, problems := accountsOf(sp.cluster.domain, sp.name, "annotation alpha.istio.io/kubernetes-serviceaccounts", list(o.Accounts))
		more, others := canonical("annotation alpha.istio.io/canonical-serviceaccounts", list(o.IDs))
		s.fixed, s.words, s.problems, s.selector = append(ids, more...), more, append(problems, others...), o.Selector.split()
	} else if o.Accounts != "" || o.IDs != "" {
		s.problems = []string{"it is of type ExternalName, so its annotations name nobody; a rule in the server's config can"}
	}
	sp.services[o.Name] = s
	s.appear()
	s.selects()
	sp.awaken(o.Name)
}

// setSlice takes an EndpointSlice. Most changes of one are about readiness, which names nobody else.
func (sp *space) setSlice(o *Slice) {
	old := sp.slices[o.Name]
	if old != nil {
		old.epoch = sp.cluster.epoch
		if old.object.(*Slice).Service == o.Service && len(old.problems) == 0 && slices.EqualFunc(old.refs, o.Pods, ref.is) {
			return
		}
		sp.remove(old)
	}
	service := sp.name + "/" + o.Service
	if CheckService(service) != nil {
		return // it is of no Service
	}
	own, strangers := o.Pods, 0
	if slices.ContainsFunc(o.Pods, func(p PodRef) bool { return p.Namespace != "" && p.Namespace != sp.name }) {
		own = slices.DeleteFunc(slices.Clone(o.Pods), func(p PodRef) bool { return p.Namespace != "" && p.Namespace != sp.name })
		strangers = len(o.Pods) - len(own)
	}
	s := &source{kind: KindSlice, space: sp, name: o.Name, object: &Slice{Service: o.Service}, epoch: sp.cluster.epoch}
	if strangers > 0 {
		s.problems = []string{fmt.Sprintf("%d endpoints name pods of other namespaces; those name nobody here (decision D25)", strangers)}
	}
	s.targets = []*named{sp.cluster.engine.named(service)}
	sp.slices[o.Name] = s
	sp.backends[o.Service] = append(sp.backends[o.Service], s)
	s.appear()
	sp.refer(s, own)
	sp.awaken(o.Service)
}

// setEntry takes a ServiceEntry.
func (sp *space) setEntry(o *Entry) {
	old := sp.entries[o.Name]
	if old != nil {
		old.epoch = sp.cluster.epoch
		if o.Problem != "" { // the last good one stays
			old.problems, old.broken = []string{o.Problem}, true
			return
		}
		if !old.broken && sameEntry(old.object.(*Entry), o) {
			return
		}
		sp.remove(old)
	}
	s := &source{kind: KindEntry, space: sp, name: o.Name, live: true, object: o, epoch: sp.cluster.epoch, selector: o.Selector.split()}
	sp.entries[o.Name] = s
	if o.Problem != "" {
		s.problems = []string{o.Problem}
		return
	}
	for i, host := range o.Hosts {
		if i == MaxHosts {
			s.problem("hosts: there are more than %d; the rest count for nothing", MaxHosts)
			break
		}
		sp.target(s, host, fmt.Sprintf("hosts[%d]", i))
	}
	if o.Note != "" {
		s.problem("%s", o.Note)
	}
	ids, problems := canonical("subjectAltNames", o.IDs)
	more, others := accountsOf(sp.cluster.domain, sp.name, "endpoints' serviceAccount", o.Accounts)
	s.fixed, s.words = append(slices.Clip(ids), more...), ids
	s.problems = append(append(s.problems, problems...), others...)
	s.appear()
	s.selects()
}

func sameEntry(a, b *Entry) bool {
	return a.Problem == b.Problem && a.Note == b.Note && a.Selector == b.Selector && slices.Equal(a.Hosts, b.Hosts) && slices.Equal(a.IDs, b.IDs) && slices.Equal(a.Accounts, b.Accounts)
}

func (s *source) problem(format string, args ...any) {
	if len(s.problems) < maxProblems {
		s.problems = append(s.problems, fmt.Sprintf(format, args...))
	}
}

// target finds the service that a host of a ServiceEntry is: a Service of a cluster by its full name, else one of the entry's own
// namespace.
func (sp *space) target(s *source, host, field string) {
	e := sp.cluster.engine
	host = strings.ToLower(host)
	service, of := serviceOf(host, sp.name, e.config.ClusterDomain)
	if !strings.Contains(host, ".") {
		s.problem("%s: %.80q should be a full DNS name", field, host)
		return
	}
	if err := CheckService(service); err != nil {
		s.problem("%s: %v", field, err)
		return
	}
	t := e.named(service)
	switch {
	case slices.Contains(s.targets, t) || slices.Contains(s.refused, t):
	case of != sp.name && sp.name != e.config.RootNamespace:
		s.refused = append(s.refused, t)
		s.problem("%s: %s is of namespace %s; an object of namespace %s may not say who serves it (decision D25)", field, service, of, sp.name)
	default:
		s.targets = append(s.targets, t)
	}
}

// serviceOf returns the service that a host names for an object of a namespace, and the namespace whose service it is.
func serviceOf(host, namespace, clusterDomain string) (service, of string) {
	rest, ok := strings.CutSuffix(host, ".svc."+clusterDomain)
	if !ok {
		rest, ok = strings.CutSuffix(host, ".svc")
	}
	if ok {
		if name, ns, two := strings.Cut(rest, "."); two {
			return ns + "/" + name, ns
		}
	}
	return namespace + "/" + host, namespace
}
