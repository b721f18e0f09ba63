package naming

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/trust"
)

func domain(t testing.TB, name string) trust.Domain {
	t.Helper()
	d, err := trust.ParseDomain(name)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func id(t testing.TB, s string) trust.ID {
	t.Helper()
	id, err := trust.ParseID(s)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// open makes an engine of one cluster, east, of trust domain td, which has been read and is empty.
func open(t testing.TB, change func(*Config)) (*Engine, *Cluster) {
	t.Helper()
	c := Config{RootNamespace: "istio-system", ClusterDomain: "cluster.local", Clusters: []ClusterConfig{{"east", domain(t, "td")}}}
	if change != nil {
		change(&c)
	}
	e, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, cc := range c.Clusters {
		for _, k := range Kinds {
			e.Cluster(cc.Name).Replace(k, nil)
		}
	}
	return e, e.Cluster("east")
}

func labels(pairs ...string) Labels {
	m := map[string]string{}
	for _, p := range pairs {
		k, v, _ := strings.Cut(p, "=")
		m[k] = v
	}
	return LabelsOf(m)
}

// allowed returns a service's list in short: "unknown", or the IDs without spiffe://, joined by spaces.
func allowed(e *Engine, service string) string {
	ids, standing := e.Naming().Lookup(service)
	switch standing {
	case trust.NamingUnread:
		return "unread"
	case trust.NamingUnknown:
		return "unknown"
	}
	var out []string
	for _, id := range ids {
		out = append(out, strings.TrimPrefix(id.String(), "spiffe://"))
	}
	return strings.Join(out, " ")
}

func want(t *testing.T, e *Engine, service, ids string) {
	t.Helper()
	if got := allowed(e, service); got != ids {
		t.Errorf("%s: %q, want %q", service, got, ids)
	}
}

// TestWhoMayServe has each way in which an object names an identity: research/istio.md 4, but that an empty list means nobody.
func TestWhoMayServe(t *testing.T) {
	web := labels("app=web")
	pod := func(name, account string, l ...string) *Pod {
		return &Pod{Namespace: "shop", Name: name, UID: UIDOf("uid-" + name), Account: account, Labels: labels(l...)}
	}
	selecting := &Service{Namespace: "shop", Name: "web", Selector: web}
	for _, c := range []struct {
		name    string
		objects []Object
		want    map[string]string
	}{
		{"nothing", nil, map[string]string{"shop/web": "unknown"}},
		{"no pods", []Object{selecting}, map[string]string{"shop/web": ""}},
		{"a pod", []Object{selecting, pod("a", "front", "app=web", "v=1"), pod("b", "other", "app=db")}, map[string]string{"shop/web": "td/ns/shop/sa/front"}},
		{"the pod before its service", []Object{pod("a", "front", "app=web"), selecting}, map[string]string{"shop/web": "td/ns/shop/sa/front"}},
		{"two accounts", []Object{selecting, pod("a", "front", "app=web"), pod("b", "back", "app=web")}, map[string]string{"shop/web": "td/ns/shop/sa/back td/ns/shop/sa/front"}},
		{"no account", []Object{selecting, pod("a", "", "app=web")}, map[string]string{"shop/web": "td/ns/shop/sa/default"}},
		{"the pod has ended", []Object{selecting, &Pod{Namespace: "shop", Name: "a", Account: "front", Ended: true, Labels: web}}, map[string]string{"shop/web": ""}},
		{"a pod of another namespace", []Object{selecting, &Pod{Namespace: "test", Name: "a", Account: "front", Labels: web}}, map[string]string{"shop/web": ""}},
		{"one pod in two services", []Object{selecting, &Service{Namespace: "shop", Name: "all", Selector: labels("tier=x")}, pod("a", "front", "app=web", "tier=x")},
			map[string]string{"shop/web": "td/ns/shop/sa/front", "shop/all": "td/ns/shop/sa/front"}},
		{"all labels of a selector count", []Object{&Service{Namespace: "shop", Name: "web", Selector: labels("app=web", "v=2")}, pod("a", "front", "app=web", "v=1")}, map[string]string{"shop/web": ""}},
		{"ExternalName", []Object{&Service{Namespace: "shop", Name: "web", External: true, Selector: web, Accounts: "x", IDs: "spiffe://td/x"}, pod("a", "front", "app=web"),
			&Slice{Namespace: "shop", Name: "s", Service: "web", Pods: []PodRef{{Name: "a"}}}}, map[string]string{"shop/web": ""}},
		{"no selector", []Object{&Service{Namespace: "shop", Name: "web"}, pod("a", "front", "app=web"), &Slice{Namespace: "shop", Name: "s", Service: "web", Pods: []PodRef{{Name: "a"}}}},
			map[string]string{"shop/web": "td/ns/shop/sa/front"}},
		{"no selector, and endpoints of no pod", []Object{&Service{Namespace: "shop", Name: "web"}, &Slice{Namespace: "shop", Name: "s", Service: "web", Pods: []PodRef{{Name: "gone"}}}},
			map[string]string{"shop/web": ""}},
		{"endpoints before all else", []Object{&Slice{Namespace: "shop", Name: "s", Service: "web", Pods: []PodRef{{Name: "a", UID: UIDOf("uid-a")}}}, &Service{Namespace: "shop", Name: "web"}, pod("a", "front")},
			map[string]string{"shop/web": "td/ns/shop/sa/front"}},
		{"endpoints without a service", []Object{&Slice{Namespace: "shop", Name: "s", Service: "web", Pods: []PodRef{{Name: "a"}}}, pod("a", "front")}, map[string]string{"shop/web": "unknown"}},
		{"an endpoint of a former pod of that name", []Object{&Service{Namespace: "shop", Name: "web"}, &Slice{Namespace: "shop", Name: "s", Service: "web", Pods: []PodRef{{Name: "a", UID: UIDOf("former")}}}, pod("a", "front")},
			map[string]string{"shop/web": ""}},
		{"annotations", []Object{&Service{Namespace: "shop", Name: "web", Accounts: "one, two", IDs: "spiffe://other/vm/1 ,spiffe://td/ns/x/sa/y"}},
			map[string]string{"shop/web": "other/vm/1 td/ns/shop/sa/one td/ns/shop/sa/two td/ns/x/sa/y"}},
		{"annotations that are wrong in part", []Object{&Service{Namespace: "shop", Name: "web", Accounts: "one,,a/b", IDs: "web.example.com,spiffe://td/chancery/server"}},
			map[string]string{"shop/web": "td/ns/shop/sa/one"}},
		{"a ServiceEntry", []Object{&Entry{Namespace: "shop", Name: "api", Hosts: []string{"api.example.com", "*.example.net", "short"}, IDs: []string{"spiffe://td/api", "api.example.com"}, Accounts: []string{"vm"}}},
			map[string]string{"shop/api.example.com": "td/api td/ns/shop/sa/vm", "shop/*.example.net": "td/api td/ns/shop/sa/vm", "shop/short": "unknown", "shop/api": "unknown"}},
		{"a ServiceEntry that selects", []Object{&Entry{Namespace: "shop", Name: "api", Hosts: []string{"api.example.com"}, Selector: web}, pod("a", "front", "app=web"),
			&Workload{Namespace: "shop", Name: "vm", Account: "vm", Labels: web}, &Workload{Namespace: "shop", Name: "none", Labels: web}, &Workload{Namespace: "test", Name: "vm", Account: "vm", Labels: web}},
			map[string]string{"shop/api.example.com": "td/ns/shop/sa/front td/ns/shop/sa/vm"}},
		{"a Service that selects a WorkloadEntry", []Object{selecting, &Workload{Namespace: "shop", Name: "vm", Account: "vm", Labels: web}}, map[string]string{"shop/web": "td/ns/shop/sa/vm"}},
		{"a ServiceEntry without any", []Object{&Entry{Namespace: "shop", Name: "api", Hosts: []string{"api.example.com"}}}, map[string]string{"shop/api.example.com": ""}},
		{"a ServiceEntry for a Service", []Object{selecting, &Entry{Namespace: "shop", Name: "api", Hosts: []string{"web.shop.svc.cluster.local"}, IDs: []string{"spiffe://td/vm"}}}, map[string]string{"shop/web": "td/vm"}},
		{"one of another suffix", []Object{selecting, &Entry{Namespace: "shop", Name: "api", Hosts: []string{"web.shop.svc.example.com"}, IDs: []string{"spiffe://td/vm"}}},
			map[string]string{"shop/web": "", "shop/web.shop.svc.example.com": "td/vm"}},
		{"an unreadable one", []Object{&Entry{Namespace: "shop", Name: "api", Problem: "spec.hosts should be a list"}}, map[string]string{"shop/api": "unknown"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e, east := open(t, nil)
			for _, o := range c.objects {
				east.Put(o)
			}
			for service, ids := range c.want {
				want(t, e, service, ids)
			}
			// As one list of each kind, after another cluster's pause, it is the same; and nothing is left of it in the end.
			listed, two := open(t, nil)
			for _, k := range Kinds {
				var all []Object
				for _, o := range c.objects {
					if o.Key().Kind == k {
						all = append(all, o)
					}
				}
				two.Replace(k, all)
			}
			for service, ids := range c.want {
				want(t, listed, service, ids)
			}
			for _, k := range Kinds {
				two.Replace(k, nil)
			}
			listed.expire(time.Now().Add(Grace))
			if len(listed.services) > 0 || len(two.spaces) > 0 || len(listed.Naming().Services()) > 0 {
				t.Errorf("left: %v, %v", listed.services, two.spaces)
			}
		})
	}
}

// TestD25OnlyOwnAndRootNamespace: nobody elsewhere can say who serves a service.
func TestD25OnlyOwnAndRootNamespace(t *testing.T) {
	e, east := open(t, nil)
	east.Put(&Service{Namespace: "infra", Name: "datastore", Selector: labels("app=datastore")})
	east.Put(&Pod{Namespace: "infra", Name: "ds-0", Account: "infra-team", Labels: labels("app=datastore")})
	legitimate := "td/ns/infra/sa/infra-team"
	host := []string{"datastore.infra.svc.cluster.local"}
	east.Put(&Pod{Namespace: "test", Name: "forged", Account: "test-team", Labels: labels("app=datastore")})
	east.Put(&Entry{Namespace: "test", Name: "forged", Hosts: host, IDs: []string{"spiffe://td/ns/test/sa/test-team"}, Selector: labels("app=datastore")})
	east.Put(&Slice{Namespace: "test", Name: "datastore", Service: "datastore", Pods: []PodRef{{Name: "forged"}}})
	east.Put(&Slice{Namespace: "infra", Name: "datastore", Service: "datastore", Pods: []PodRef{{Namespace: "test", Name: "forged"}}})
	want(t, e, "infra/datastore", legitimate)
	problems := strings.Join(e.Why("infra/datastore").Problems, "\n")
	for _, say := range []string{"serviceentry test/forged: hosts[0]: infra/datastore is of namespace infra; an object of namespace test may not say who serves it (decision D25)",
		"endpointslice infra/datastore: 1 endpoints name pods of other namespaces"} {
		if !strings.Contains(problems, say) {
			t.Errorf("not said: %s\n%s", say, problems)
		}
	}
	east.Put(&Entry{Namespace: "istio-system", Name: "mesh", Hosts: host, IDs: []string{"spiffe://td/vm"}})
	want(t, e, "infra/datastore", legitimate+" td/vm")
}

// TestD25JoinsWithThePod: no endpoint is there yet, and the account may already serve.
func TestD25JoinsWithThePod(t *testing.T) {
	var told []string
	times := 0
	e, east := open(t, func(c *Config) { c.Changed = func(s []string) { told, times = append(told, s...), times+1 } })
	if times != 1 || told != nil {
		t.Errorf("told %d times, of %v, that all is known", times, told)
	}
	east.Put(&Service{Namespace: "shop", Name: "web", Selector: labels("app=web")})
	east.Put(&Service{Namespace: "shop", Name: "db", Selector: labels("app=db")})
	told = nil
	east.Put(&Pod{Namespace: "shop", Name: "a", Account: "front", Labels: labels("app=web")})
	want(t, e, "shop/web", "td/ns/shop/sa/front")
	if !slices.Equal(told, []string{"shop/web"}) {
		t.Errorf("told of %v", told)
	}
	told = nil
	east.Put(&Pod{Namespace: "shop", Name: "b", Account: "front", Labels: labels("app=web")})
	east.Put(&Slice{Namespace: "shop", Name: "web-1", Service: "web", Pods: []PodRef{{Name: "a"}, {Name: "b"}}})
	east.Drop(Key{KindPod, "shop", "a"})
	if len(told) > 0 {
		t.Errorf("told of %v though nobody else may serve", told)
	}
}

// TestD25GraceIsBounded: who is no longer named stays two minutes, and no longer.
func TestD25GraceIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, east := open(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { e.Run(ctx) })
		both := "td/ns/shop/sa/new td/ns/shop/sa/old"
		east.Put(&Service{Namespace: "shop", Name: "web", Selector: labels("app=web")})
		east.Put(&Pod{Namespace: "shop", Name: "a", Account: "old", Labels: labels("app=web")})
		east.Put(&Pod{Namespace: "shop", Name: "a", Account: "new", Labels: labels("app=web")})
		want(t, e, "shop/web", both)
		until := e.Why("shop/web").Identities[1].Until
		if left := time.Until(until); left != Grace {
			t.Errorf("it stays for %s", left)
		}
		time.Sleep(Grace - time.Second)
		synctest.Wait()
		want(t, e, "shop/web", both)
		time.Sleep(time.Second)
		synctest.Wait()
		want(t, e, "shop/web", "td/ns/shop/sa/new")

		// Who comes back stays, and its next grace is a whole one.
		east.Put(&Pod{Namespace: "shop", Name: "b", Account: "old", Labels: labels("app=web")})
		east.Drop(Key{KindPod, "shop", "b"})
		time.Sleep(Grace / 2)
		east.Put(&Pod{Namespace: "shop", Name: "b", Account: "old", Labels: labels("app=web")})
		time.Sleep(Grace)
		synctest.Wait()
		want(t, e, "shop/web", both)
		east.Drop(Key{KindPod, "shop", "b"})
		time.Sleep(Grace - time.Second)
		synctest.Wait()
		want(t, e, "shop/web", both)

		// A service that is gone is known as long as somebody may still serve it.
		east.Drop(Key{KindService, "shop", "web"})
		want(t, e, "shop/web", both)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		want(t, e, "shop/web", "td/ns/shop/sa/new")
		time.Sleep(Grace)
		synctest.Wait()
		want(t, e, "shop/web", "unknown")
		cancel()
		wg.Wait()
	})
}

// TestD25GraceIsVoidOnRevocation, also if it comes while the grace runs.
func TestD25GraceIsVoidOnRevocation(t *testing.T) {
	revoked := map[trust.ID]bool{id(t, "spiffe://td/ns/shop/sa/old"): true}
	e, east := open(t, func(c *Config) { c.Revoked = func(id trust.ID) bool { return revoked[id] } })
	east.Put(&Service{Namespace: "shop", Name: "web", Selector: labels("app=web")})
	for _, account := range []string{"old", "older", "new"} {
		east.Put(&Pod{Namespace: "shop", Name: "a", Account: account, Labels: labels("app=web")})
	}
	want(t, e, "shop/web", "td/ns/shop/sa/new td/ns/shop/sa/older")
	revoked[id(t, "spiffe://td/ns/shop/sa/older")] = true
	e.Refresh()
	want(t, e, "shop/web", "td/ns/shop/sa/new")
	revoked[id(t, "spiffe://td/ns/shop/sa/new")] = true // its pods are there: certificates are what was revoked
	e.Refresh()
	want(t, e, "shop/web", "td/ns/shop/sa/new")
}

// TestNothingIsSaidBeforeAllIsRead: an empty list would be one too soon.
func TestNothingIsSaidBeforeAllIsRead(t *testing.T) {
	e, err := New(Config{Clusters: []ClusterConfig{{"east", domain(t, "td")}, {"west", domain(t, "west")}}, Rules: []RuleConfig{{"shop/web", []trust.ID{id(t, "spiffe://td/x")}}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"west", "east"} {
		c := e.Cluster(name)
		c.Put(&Pod{Namespace: "shop", Name: "a", Account: "former", Labels: labels("app=web")})
		c.Put(&Service{Namespace: "shop", Name: "web", Selector: labels("app=web")})
		for i, k := range Kinds {
			want(t, e, "shop/web", "unread")
			if got := c.Unread(); !slices.Equal(got, Kinds[i:]) {
				t.Errorf("unread: %v", got)
			}
			if e.Naming().Services() != nil || e.Naming().Allowed("shop/web") != nil || e.Why("shop/web").Identities != nil {
				t.Error("something is said too soon")
			}
			switch k {
			case KindPod: // what came and went before counts for nothing
				c.Replace(k, []Object{&Pod{Namespace: "shop", Name: "a", Account: "front", Labels: labels("app=web")}})
			case KindService:
				c.Replace(k, []Object{&Service{Namespace: "shop", Name: "web", Selector: labels("app=web")}})
			default:
				c.Replace(k, nil)
			}
		}
	}
	want(t, e, "shop/web", "td/ns/shop/sa/front td/x west/ns/shop/sa/front") // the union of all, each of its own trust domain
	want(t, e, "shop/db", "unknown")
}

// TestAliases: an identity counts in each domain that counts as its own, from the moment that this is so.
func TestAliases(t *testing.T) {
	others := []string{"td"}
	e, east := open(t, func(c *Config) {
		c.Rules = []RuleConfig{{"shop/web", []trust.ID{id(t, "spiffe://foreign/x")}}}
		c.Aliases = func(i trust.ID) []trust.ID {
			if i.Domain().String() == "foreign" {
				return []trust.ID{i}
			}
			var out []trust.ID
			for _, d := range others {
				out = append(out, i.WithDomain(domain(t, d)))
			}
			return out
		}
	})
	east.Put(&Service{Namespace: "shop", Name: "web", Selector: labels("app=web")})
	east.Put(&Pod{Namespace: "shop", Name: "a", Account: "front", Labels: labels("app=web")})
	want(t, e, "shop/web", "foreign/x td/ns/shop/sa/front")
	others = []string{"td", "new"}
	e.Refresh()
	want(t, e, "shop/web", "foreign/x new/ns/shop/sa/front td/ns/shop/sa/front")
	why := e.Why("shop/web")
	if len(why.Identities) != 3 || !slices.Equal(why.Identities[1].Because, []string{"it counts as spiffe://td/ns/shop/sa/front"}) {
		t.Errorf("%+v", why)
	}
}

// TestWhy gives each reason, bounded.
func TestWhy(t *testing.T) {
	e, east := open(t, func(c *Config) { c.Rules = []RuleConfig{{"shop/web", []trust.ID{id(t, "spiffe://td/x")}}} })
	east.Put(&Service{Namespace: "shop", Name: "web", Selector: labels("app=web"), Accounts: "one,,", IDs: "x"})
	for _, name := range strings.Split("abcdefghijklmnopqrstuvwxyz", "") {
		east.Put(&Pod{Namespace: "shop", Name: name, Account: "front", Labels: labels("app=web")})
	}
	east.Put(&Slice{Namespace: "shop", Name: "web-1", Service: "web", Pods: []PodRef{{Name: "a"}, {Name: "nobody"}}})
	east.Put(&Workload{Namespace: "shop", Name: "vm", Account: "not/right", Labels: labels("app=web")})
	east.Put(&Workload{Namespace: "shop", Name: "vm2", Account: "vm", Labels: labels("app=web")})
	east.Put(&Workload{Namespace: "shop", Name: "vm2", Problem: "spec.serviceAccount should be a string"}) // its last good version counts
	w := e.Why("shop/web")
	var got []string
	for _, r := range w.Identities {
		got = append(got, r.ID.String()+": "+r.Because[0])
		if n := len(r.Because); n > maxReasons || n+r.More != 1 && n+r.More != 27 {
			t.Errorf("%s has %d reasons and %d more", r.ID, n, r.More)
		}
	}
	if !slices.Equal(got, []string{
		"spiffe://td/ns/shop/sa/front: cluster east: service shop/web selects pod shop/a (app=web)",
		"spiffe://td/ns/shop/sa/one: cluster east: service shop/web: by its own word",
		"spiffe://td/ns/shop/sa/vm: cluster east: service shop/web selects workloadentry shop/vm2 (app=web)",
		"spiffe://td/x: naming.rules[0] in the server's config",
	}) {
		t.Errorf("%q", got)
	}
	for i, say := range []string{`kubernetes-serviceaccounts[1]: it is empty`, `kubernetes-serviceaccounts[2]: it is empty`, `canonical-serviceaccounts[0]: "x" is not a SPIFFE ID`,
		"workloadentry shop/vm: serviceAccount should be", "workloadentry shop/vm2: spec.serviceAccount should be a string"} {
		if i >= len(w.Problems) || !strings.Contains(w.Problems[i], say) {
			t.Errorf("problem %d of %q should say %s", i, w.Problems, say)
		}
	}
	if w := e.Why("shop/none"); w.Standing != trust.NamingUnknown || w.Identities != nil {
		t.Errorf("%+v", w)
	}
}

// TestBrokenEntriesKeepTheLastGood: a ServiceEntry that cannot be read any more says what it said before, until it is right again.
func TestBrokenEntriesKeepTheLastGood(t *testing.T) {
	e, east := open(t, nil)
	good := &Entry{Namespace: "shop", Name: "api", Hosts: []string{"api.example.com"}, IDs: []string{"spiffe://td/x"}}
	east.Put(good)
	for range 2 {
		east.Put(&Entry{Namespace: "shop", Name: "api", Problem: "spec.hosts should be a list"})
		want(t, e, "shop/api.example.com", "td/x")
		if p := e.Why("shop/api.example.com").Problems; len(p) != 1 || !strings.Contains(p[0], "spec.hosts should be a list") {
			t.Errorf("%q", p)
		}
		east.Put(good)
		if p := e.Why("shop/api.example.com").Problems; len(p) != 0 {
			t.Errorf("%q", p)
		}
	}
}

// TestBounds: what nobody should have is cut, and said.
func TestBounds(t *testing.T) {
	e, east := open(t, nil)
	ids := make([]string, 0, MaxNamed+1)
	for i := range MaxNamed + 1 {
		ids = append(ids, "spiffe://td/"+strings.Repeat("x", i+1))
	}
	hosts := make([]string, 0, MaxHosts+1)
	for i := range MaxHosts + 1 {
		hosts = append(hosts, "a."+strings.Repeat("x", i%60+1)+"."+strings.Repeat("y", i/60+1))
	}
	for i := range 6 {
		prefix := strings.Repeat("z", i+1)
		own := make([]string, len(ids))
		for j := range ids {
			own[j] = ids[j] + "/" + prefix
		}
		east.Put(&Entry{Namespace: "shop", Name: prefix, Hosts: hosts, IDs: own})
	}
	if n := len(e.Naming().Services()); n != MaxHosts {
		t.Errorf("%d services of %d hosts", n, MaxHosts+1)
	}
	if n := len(e.Naming().Allowed("shop/" + hosts[0])); n != maxListed {
		t.Errorf("%d identities", n)
	}
	w := e.Why("shop/" + hosts[0])
	if len(w.Problems) != 13 || !strings.Contains(w.Problems[0], "more than 1000 identities") || !strings.Contains(strings.Join(w.Problems, "\n"), "hosts: there are more than 256; the rest count for nothing") ||
		!strings.Contains(strings.Join(w.Problems, "\n"), "subjectAltNames: there are more than 200 names") {
		t.Errorf("%q", w.Problems)
	}
}

// TestBadConfigs: an engine is not made of them.
func TestBadConfigs(t *testing.T) {
	for say, c := range map[string]Config{
		"cluster east has no trust domain": {Clusters: []ClusterConfig{{Name: "east"}}},
		"cluster east occurs twice":        {Clusters: []ClusterConfig{{"east", domain(t, "td")}, {"east", domain(t, "td")}}},
		"rules[0]: service \"web\"":        {Rules: []RuleConfig{{Service: "web"}}},
	} {
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%v, want %s", err, say)
		}
	}
	e, err := New(Config{Rules: []RuleConfig{{"shop/web", []trust.ID{id(t, "spiffe://td/x")}}}})
	if err != nil {
		t.Fatal(err)
	}
	want(t, e, "shop/web", "td/x") // without clusters all is known at once
	if e.Cluster("east") != nil {
		t.Error("there is a cluster that is not configured")
	}
}

// TestSaying: who names a trust domain in so many words is found, for its migration; accounts follow the cluster's by themselves.
func TestSaying(t *testing.T) {
	e, east := open(t, func(c *Config) {
		c.Rules = []RuleConfig{{"shop/web", []trust.ID{id(t, "spiffe://td/x"), id(t, "spiffe://td/y")}}, {"shop/db", []trust.ID{id(t, "spiffe://new/x")}}}
	})
	east.Put(&Service{Namespace: "shop", Name: "web", Selector: labels("app=web"), Accounts: "one"})
	east.Put(&Pod{Namespace: "shop", Name: "a", Account: "front", Labels: labels("app=web")})
	east.Put(&Service{Namespace: "shop", Name: "cart", Accounts: "one", IDs: "spiffe://new/z, spiffe://td/z"})
	east.Put(&Entry{Namespace: "shop", Name: "api", Hosts: []string{"a.example", "b.example"}, IDs: []string{"spiffe://td/api"}, Accounts: []string{"vm"}})
	east.Put(&Entry{Namespace: "shop", Name: "vm", Hosts: []string{"c.example"}, Accounts: []string{"vm"}})
	objects, ids, all := e.Saying(domain(t, "td"), 2)
	if !slices.Equal(objects, []string{"cluster east: service shop/cart", "cluster east: serviceentry shop/api"}) || all != 3 ||
		!slices.Equal(ids, []trust.ID{id(t, "spiffe://td/z"), id(t, "spiffe://td/api")}) {
		t.Errorf("%q, %v, %d", objects, ids, all)
	}
	if objects, _, all := e.Saying(domain(t, "other"), 2); len(objects) > 0 || all > 0 {
		t.Errorf("%q, %d", objects, all)
	}
}
