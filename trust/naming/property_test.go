package naming

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// world is what an API server would have, and the naive way to say who may serve what: from scratch, with nothing but loops.
type world map[string]map[Key]Object

// naive returns the lists of all services.
func (w world) naive(t testing.TB, domains map[string]trust.Domain) map[string][]trust.ID {
	lists := map[string]map[trust.ID]bool{}
	know := func(service string) map[trust.ID]bool {
		if lists[service] == nil {
			lists[service] = map[trust.ID]bool{}
		}
		return lists[service]
	}
	for cluster, objects := range w {
		account := func(ns, name string) trust.ID {
			id, err := trust.WorkloadID(domains[cluster], ns, name)
			if err != nil {
				t.Fatal(err)
			}
			return id
		}
		selected := func(ns string, selector Labels, ids map[trust.ID]bool) {
			if selector == "" {
				return
			}
			matches := func(l Labels) bool {
				for want := range strings.SplitSeq(string(selector), ",") {
					if !slices.Contains(strings.Split(string(l), ","), want) {
						return false
					}
				}
				return true
			}
			for _, o := range objects {
				switch o := o.(type) {
				case *Pod:
					if o.Namespace == ns && !o.Ended && matches(o.Labels) {
						ids[account(ns, o.Account)] = true
					}
				case *Workload:
					if o.Namespace == ns && o.Account != "" && matches(o.Labels) {
						ids[account(ns, o.Account)] = true
					}
				}
			}
		}
		for _, o := range objects {
			switch o := o.(type) {
			case *Service:
				ids := know(o.Namespace + "/" + o.Name)
				if o.External {
					continue
				}
				selected(o.Namespace, o.Selector, ids)
				if o.Accounts != "" {
					ids[account(o.Namespace, o.Accounts)] = true
				}
				for _, s := range objects {
					s, ok := s.(*Slice)
					if !ok || s.Namespace != o.Namespace || s.Service != o.Name {
						continue
					}
					for _, ref := range s.Pods {
						p, ok := objects[Key{KindPod, o.Namespace, ref.Name}].(*Pod)
						if ok && !p.Ended && (ref.Namespace == "" || ref.Namespace == o.Namespace) && (ref.UID == 0 || ref.UID == p.UID) {
							ids[account(o.Namespace, p.Account)] = true
						}
					}
				}
			case *Entry:
				for _, host := range o.Hosts {
					service := o.Namespace + "/" + host
					if rest, ok := strings.CutSuffix(host, ".svc.cluster.local"); ok {
						name, ns, _ := strings.Cut(rest, ".")
						if ns != o.Namespace && o.Namespace != "root" {
							continue
						}
						service = ns + "/" + name
					}
					ids := know(service)
					selected(o.Namespace, o.Selector, ids)
					for _, s := range o.IDs {
						id, err := trust.ParseID(s)
						if err != nil {
							t.Fatal(err)
						}
						ids[id] = true
					}
				}
			}
		}
	}
	out := map[string][]trust.ID{}
	for service, ids := range lists {
		out[service] = slices.SortedFunc(maps.Keys(ids), trust.CompareIDs)
	}
	return out
}

// draw makes objects of small numbers, so that names meet.
type draw struct{ next func(n int) int }

func (d draw) of(all ...string) string { return all[d.next(len(all))] }

func (d draw) labels() Labels {
	m := map[string]string{}
	for _, k := range []string{"app", "v"} {
		if d.next(3) > 0 {
			m[k] = d.of("1", "2")
		}
	}
	return LabelsOf(m)
}

func (d draw) object() Object {
	ns := d.of("root", "one", "two")
	switch d.next(6) {
	case 0, 1:
		return &Pod{Namespace: ns, Name: d.of("a", "b", "c", "d"), UID: UID(d.next(3)), Account: d.of("x", "y", "z"), Ended: d.next(6) == 0, Labels: d.labels()}
	case 2:
		o := &Service{Namespace: ns, Name: d.of("s", "t"), External: d.next(5) == 0, Accounts: d.of("", "", "x", "w")}
		if d.next(4) > 0 {
			o.Selector = d.labels()
		}
		return o
	case 3:
		o := &Slice{Namespace: ns, Name: d.of("e", "f"), Service: d.of("s", "t")}
		for range d.next(4) {
			o.Pods = append(o.Pods, PodRef{d.of("", "", "", "one"), d.of("a", "b", "c", "d"), UID(d.next(3))})
		}
		return o
	case 4:
		o := &Entry{Namespace: ns, Name: d.of("g", "h"), Selector: d.labels()}
		for range d.next(4) {
			o.Hosts = append(o.Hosts, d.of("s.one.svc.cluster.local", "t.two.svc.cluster.local", "ext.example"))
		}
		for range d.next(3) {
			o.IDs = append(o.IDs, d.of("spiffe://foreign/x", "spiffe://td/ns/one/sa/x"))
		}
		return o
	}
	return &Workload{Namespace: ns, Name: d.of("a", "b"), Account: d.of("", "x", "v"), Labels: d.labels()}
}

// play makes steps of a random history and compares after each.
func play(t testing.TB, steps int, next func(n int) int) {
	domains := map[string]trust.Domain{"east": domain(t, "td"), "west": domain(t, "west")}
	var told []string
	e, err := New(Config{
		RootNamespace: "root", ClusterDomain: "cluster.local", Clusters: []ClusterConfig{{"east", domains["east"]}, {"west", domains["west"]}},
		Changed: func(services []string) { told = append(told, services...) },
	})
	if err != nil {
		t.Fatal(err)
	}
	w, d := world{"east": {}, "west": {}}, draw{next}
	was := map[string][]trust.ID{}
	for step := range steps {
		told = told[:0]
		name := d.of("east", "west")
		c, objects := e.Cluster(name), w[name]
		switch op := d.next(12); {
		case step < 2*len(Kinds) || op == 0: // all of a kind; at first once of each
			kind := Kinds[d.next(len(Kinds))]
			if step < 2*len(Kinds) {
				kind, name = Kinds[step/2], []string{"east", "west"}[step%2]
				c, objects = e.Cluster(name), w[name]
			}
			var all []Object
			for k := range objects {
				if k.Kind == kind && d.next(3) == 0 {
					delete(objects, k)
				}
			}
			for range d.next(3) {
				if o := d.object(); o.Key().Kind == kind {
					objects[o.Key()] = o
				}
			}
			for _, k := range slices.SortedFunc(maps.Keys(objects), func(a, b Key) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }) {
				if k.Kind == kind {
					all = append(all, objects[k])
				}
			}
			c.Replace(kind, all)
		case op < 4:
			k := d.object().Key()
			delete(objects, k)
			c.Drop(k)
		default:
			o := d.object()
			objects[o.Key()] = o
			c.Put(o)
		}
		if step < 2*len(Kinds)-1 {
			continue
		}
		lists := w.naive(t, domains)
		now := compare(t, e, lists, step)
		for service := range maps.All(now) {
			if !slices.Equal(now[service], was[service]) && !slices.Contains(told, service) && step >= 2*len(Kinds) {
				t.Fatalf("step %d: nobody was told of %s", step, service)
			}
		}
		if was = now; next(4) == 0 { // the grace of all ends
			e.expire(time.Now().Add(Grace))
			was = compare(t, e, lists, step)
			for service, ids := range was {
				if l, ok := lists[service]; !ok || !slices.Equal(l, ids) {
					t.Fatalf("step %d: %s is %v after all grace; from scratch %v", step, service, ids, l)
				}
			}
		}
	}
}

// compare checks the index against lists made from scratch: what is beyond them is in its grace.
func compare(t testing.TB, e *Engine, lists map[string][]trust.ID, step int) map[string][]trust.ID {
	now := map[string][]trust.ID{}
	for _, service := range e.Naming().Services() {
		now[service] = e.Naming().Allowed(service)
	}
	for service, ids := range lists {
		if _, known := now[service]; !known {
			t.Fatalf("step %d: %s is not known; from scratch it is", step, service)
		}
		for _, id := range ids {
			if !slices.Contains(now[service], id) {
				t.Fatalf("step %d: %s may not serve %s: %v", step, id, service, now[service])
			}
		}
	}
	for service, ids := range now {
		leaving := map[trust.ID]bool{}
		for _, l := range e.services[service].leaving {
			leaving[l.id] = true
		}
		if _, known := lists[service]; !known && len(leaving) == 0 {
			t.Fatalf("step %d: %s is known; from scratch it is not", step, service)
		}
		for _, id := range ids {
			if !slices.Contains(lists[service], id) != leaving[id] {
				t.Fatalf("step %d: %s serves %s: from scratch %v, in its grace %t", step, id, service, lists[service], leaving[id])
			}
		}
		why := e.Why(service)
		for i, r := range why.Identities {
			if r.ID != ids[i] || len(r.Because) == 0 || leaving[r.ID] != !r.Until.IsZero() {
				t.Fatalf("step %d: %s: %+v explains %v", step, service, why, ids)
			}
		}
		if len(why.Identities) != len(ids) {
			t.Fatalf("step %d: %s: %+v explains %v", step, service, why, ids)
		}
	}
	return now
}

// TestIncrementalEqualsFull: whatever happens, in whatever order, the index is as if it were made from scratch.
func TestIncrementalEqualsFull(t *testing.T) {
	histories := 400
	if testing.Short() {
		histories = 60
	}
	for seed := range histories {
		r := rand.New(rand.NewPCG(uint64(seed), 7))
		play(t, 120, r.IntN)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// FuzzHistories is the same, of histories that look for new ways.
func FuzzHistories(f *testing.F) {
	f.Add([]byte("pods come and go, services stay"))
	f.Fuzz(func(t *testing.T, data []byte) {
		i := 0
		play(t, min(len(data)/4, 60), func(n int) int {
			if i++; i > len(data) {
				return 0
			}
			return int(data[i-1]) % n
		})
	})
}

// FuzzAnnotations: whatever an annotation or a ServiceEntry says, it names whole IDs, none of Chancery's own, and in bounds.
func FuzzAnnotations(f *testing.F) {
	f.Add("one, two,,", "spiffe://td/x,spiffe://td/chancery/server", "api.example.com", "web.shop.svc")
	f.Add(strings.Repeat(",", 300), "spiffe://td/%2f", "*.", ".svc.cluster.local")
	f.Fuzz(func(t *testing.T, accounts, ids, host, other string) {
		e, east := open(t, nil)
		east.Put(&Service{Namespace: "shop", Name: "web", Accounts: accounts, IDs: ids})
		east.Put(&Entry{Namespace: "shop", Name: "e", Hosts: []string{host, other}, IDs: []string{ids, accounts}, Accounts: []string{accounts}})
		for _, service := range e.Naming().Services() {
			if err := CheckService(service); err != nil || !strings.HasPrefix(service, "shop/") {
				t.Fatalf("%s: %v", service, err)
			}
			list := e.Naming().Allowed(service)
			for _, id := range list {
				if again, err := trust.ParseID(id.String()); err != nil || again != id || id.Reserved() {
					t.Fatalf("%s: %v, %v", service, id, err)
				}
			}
			if len(list) > 2*MaxNamed+2 || len(e.Why(service).Problems) > maxProblems {
				t.Fatal("out of bounds")
			}
		}
	})
}
