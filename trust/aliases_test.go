package trust

import (
	"slices"
	"strings"
	"testing"
)

func domains(t testing.TB, names ...string) []Domain {
	t.Helper()
	var out []Domain
	for _, n := range names {
		d, err := ParseDomain(n)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, d)
	}
	return out
}

func aliases(t testing.TB, names ...string) Aliases {
	t.Helper()
	all := domains(t, names...)
	a, err := NewAliases(all[0], all[1:]...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// The cases of Istio's table of ReplaceTrustDomainAliases (pilot/pkg/security/trustdomain), then what they leave out.
func TestPrincipals(t *testing.T) {
	for name, tc := range map[string]struct {
		domains, principals, want []string
	}{
		"no aliases":                        {[]string{"cluster.local"}, []string{"cluster.local/ns/foo/sa/bar"}, []string{"cluster.local/ns/foo/sa/bar"}},
		"*":                                 {[]string{"cluster.local"}, []string{"*"}, []string{"*"}},
		"* for the domain":                  {[]string{"cluster.local"}, []string{"*/ns/foo/sa/bar"}, []string{"*/ns/foo/sa/bar"}},
		"one alias, one principal":          {[]string{"td2", "td1"}, []string{"td1/ns/foo/sa/bar"}, []string{"td2/ns/foo/sa/bar", "td1/ns/foo/sa/bar"}},
		"one alias, two principals":         {[]string{"td1", "cluster.local"}, []string{"cluster.local/ns/foo/sa/bar", "cluster.local/ns/yyy/sa/zzz"}, []string{"td1/ns/foo/sa/bar", "cluster.local/ns/foo/sa/bar", "td1/ns/yyy/sa/zzz", "cluster.local/ns/yyy/sa/zzz"}},
		"wildcards that are of no domain":   {[]string{"td1", "cluster.local"}, []string{"*/ns/foo/sa/bar", "*sa/zzz", "*"}, []string{"*/ns/foo/sa/bar", "*sa/zzz", "*"}},
		"two aliases, two principals":       {[]string{"td2", "td1", "cluster.local"}, []string{"cluster.local/ns/foo/sa/bar", "td1/ns/yyy/sa/zzz"}, []string{"td2/ns/foo/sa/bar", "td1/ns/foo/sa/bar", "cluster.local/ns/foo/sa/bar", "td2/ns/yyy/sa/zzz", "td1/ns/yyy/sa/zzz", "cluster.local/ns/yyy/sa/zzz"}},
		"two aliases, * before the domain":  {[]string{"td2", "foo-td1", "cluster.local"}, []string{"*-td1/ns/foo/sa/bar"}, []string{"td2/ns/foo/sa/bar", "*-td1/ns/foo/sa/bar", "cluster.local/ns/foo/sa/bar"}},
		"none of ours":                      {[]string{"td1", "td2"}, []string{"some-td/ns/foo/sa/bar"}, []string{"some-td/ns/foo/sa/bar"}},
		"the last alias":                    {[]string{"td1", "td2", "some-td"}, []string{"some-td/ns/foo/sa/bar"}, []string{"td1/ns/foo/sa/bar", "td2/ns/foo/sa/bar", "some-td/ns/foo/sa/bar"}},
		"one of two":                        {[]string{"new-td", "td2", "td3"}, []string{"td1/ns/some-ns/sa/some-sa", "td2/ns/foo/sa/bar"}, []string{"td1/ns/some-ns/sa/some-sa", "new-td/ns/foo/sa/bar", "td2/ns/foo/sa/bar", "td3/ns/foo/sa/bar"}},
		"* matches all":                     {[]string{"new-td", "old-td"}, []string{"*-td/ns/foo/sa/bar"}, []string{"*-td/ns/foo/sa/bar"}},
		"no domain":                         {[]string{"td1", "td2"}, []string{"/ns/foo/sa/bar"}, []string{"/ns/foo/sa/bar"}},
		"* after the domain's beginning":    {[]string{"td1", "td2", "other"}, []string{"td*/ns/foo/sa/bar"}, []string{"td1/ns/foo/sa/bar", "td2/ns/foo/sa/bar", "other/ns/foo/sa/bar"}},
		"cluster.local points to the own":   {[]string{"td1", "td2"}, []string{"cluster.local/ns/foo/sa/bar"}, []string{"td1/ns/foo/sa/bar", "td2/ns/foo/sa/bar"}},
		"with a scheme it is no principal":  {[]string{"td1", "td2"}, []string{"spiffe://td1/ns/foo/sa/bar"}, []string{"spiffe://td1/ns/foo/sa/bar"}},
		"parts in another order, too few":   {[]string{"td1", "td2"}, []string{"sa/test-sa/ns/default", "td1/ns/foo", "td1/ns/foo/sa/bar/x"}, []string{"sa/test-sa/ns/default", "td1/ns/foo", "td1/ns/foo/sa/bar/x"}},
		"wildcards in the path":             {[]string{"td1", "td2"}, []string{"td1/ns/foo/sa/*"}, []string{"td1/ns/foo/sa/*", "td2/ns/foo/sa/*"}},
		"a domain that only begins as ours": {[]string{"td1", "td2"}, []string{"td11/ns/foo/sa/bar", "xtd1/ns/foo/sa/bar"}, []string{"td11/ns/foo/sa/bar", "xtd1/ns/foo/sa/bar"}},
	} {
		a := aliases(t, tc.domains...)
		var got []string
		for _, p := range tc.principals {
			got = append(got, a.Principals(p)...)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %q; want %q", name, got, tc.want)
		}
	}
}

// What Istio's ExpandTrustDomainAliases says of trustDomains.
func TestDomainsOfPolicies(t *testing.T) {
	for name, tc := range map[string]struct{ domains, values, want []string }{
		"one of ours":                {[]string{"td1", "td2"}, []string{"td2"}, []string{"td1", "td2"}},
		"all of ours":                {[]string{"td1", "td2"}, []string{"td2", "td1"}, []string{"td1", "td2"}},
		"none of ours":               {[]string{"td1", "td2"}, []string{"other"}, []string{"other"}},
		"both":                       {[]string{"td1", "td2"}, []string{"other", "td1", "other"}, []string{"other", "td1", "td2"}},
		"cluster.local points to no": {[]string{"td1", "td2"}, []string{"cluster.local"}, []string{"cluster.local"}},
		"cluster.local is an alias":  {[]string{"td1", "cluster.local"}, []string{"cluster.local"}, []string{"td1", "cluster.local"}},
		"wildcards stay":             {[]string{"td1", "td2"}, []string{"td*", "*"}, []string{"td*", "*"}},
		"none":                       {[]string{"td1"}, nil, []string{}},
	} {
		if got := aliases(t, tc.domains...).Domains(tc.values...); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %q; want %q", name, got, tc.want)
		}
	}
}

func TestAliasesAreOneIdentity(t *testing.T) {
	a := aliases(t, "new", "old", "older", "old", "new")
	id := func(s string) ID {
		id, err := ParseID(s)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	if all := a.All(); a.Own().String() != "new" || len(all) != 3 || all[1].String() != "old" || all[2].String() != "older" {
		t.Errorf("domains: %v", all)
	}
	want := []ID{id("spiffe://new/ns/a/sa/b"), id("spiffe://old/ns/a/sa/b"), id("spiffe://older/ns/a/sa/b")}
	if got := a.Equivalent(want[2]); !slices.Equal(got, want) {
		t.Errorf("equivalent: %v", got)
	}
	foreign := id("spiffe://foreign/ns/a/sa/b")
	if got := a.Equivalent(foreign); !slices.Equal(got, []ID{foreign}) {
		t.Errorf("a foreign ID stands for %v", got)
	}
	if !a.Same(want[0], want[2]) || a.Same(want[0], foreign) || a.Same(want[0], id("spiffe://old/ns/a/sa/c")) || !a.Same(foreign, foreign) || a.Same(ID{}, want[0]) {
		t.Error("who is the same as who")
	}
	long := id("spiffe://old/" + strings.Repeat("a", MaxIDLen-len("spiffe://old/")))
	if got := a.Equivalent(long); len(got) != 2 || got[1] != long {
		t.Errorf("of an ID of %d bytes: %d", MaxIDLen, len(got))
	}
	for _, s := range []string{"spiffe://new/ns/a/sa/b", "spiffe://older/x"} {
		for _, e := range a.Equivalent(id(s)) {
			if read, err := ParseID(e.String()); err != nil || read != e {
				t.Errorf("%s is no ID as it would be read: %v", e, err)
			}
		}
	}
	if _, err := NewAliases(Domain{}); err == nil {
		t.Error("no own domain")
	}
	if _, err := NewAliases(a.Own(), Domain{}); err == nil {
		t.Error("an empty alias")
	}
	var none Aliases
	if none.Has(Domain{}) || none.Has(a.Own()) || len(none.Principals("cluster.local/ns/a/sa/b")) != 1 || !none.Own().IsZero() {
		t.Error("the zero value has domains")
	}
}

func TestD24AliasAndFederatedIsAnError(t *testing.T) {
	a := aliases(t, "td1", "td2")
	if _, err := a.WithForeign(domains(t, "other", "td2")...); err == nil || !strings.Contains(err.Error(), "td2") {
		t.Errorf("td2 is both: %v", err)
	}
	if _, err := a.WithForeign(domains(t, "td1")...); err == nil {
		t.Error("the own domain is federated")
	}
	const p = "cluster.local/ns/a/sa/b"
	for _, tc := range []struct {
		foreign string
		want    []string
	}{{"other", []string{"td1/ns/a/sa/b", "td2/ns/a/sa/b"}}, {"cluster.local", []string{p}}} {
		with, err := a.WithForeign(domains(t, tc.foreign)...)
		if err != nil {
			t.Fatal(err)
		}
		if got := with.Principals(p); !slices.Equal(got, tc.want) {
			t.Errorf("%s is foreign: %s means %q; want %q", tc.foreign, p, got, tc.want)
		}
	}
}

func FuzzPrincipals(f *testing.F) {
	for _, p := range []string{"td1/ns/foo/sa/bar", "*", "*/ns/foo/sa/bar", "*-td1/ns/foo/sa/bar", "td*/ns/a/sa/b", "/ns/a/sa/b", "cluster.local/ns/a/sa/b", "spiffe://td1/ns/a"} {
		f.Add(p)
	}
	a := aliases(f, "td2", "foo-td1", "td1")
	f.Fuzz(func(t *testing.T, p string) {
		got := a.Principals(p)
		if len(got) == 0 || len(got) > len(a.All()) {
			t.Fatalf("%q became %q", p, got)
		}
		if len(got) == 1 && got[0] == p {
			return
		}
		_, path, _ := strings.Cut(p, "/")
		for i, g := range got {
			domain, rest, _ := strings.Cut(g, "/")
			if d, err := ParseDomain(domain); rest != path || g != p && (err != nil || !a.Has(d)) {
				t.Errorf("%q became %q, which is no domain of ours with that path", p, g)
			}
			if slices.Contains(got[:i], g) {
				t.Errorf("%q became %q, twice the same", p, got)
			}
		}
	})
}
