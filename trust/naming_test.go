package trust

import (
	"slices"
	"strings"
	"sync"
	"testing"
)

func idOf(t testing.TB, s string) ID {
	t.Helper()
	id, err := ParseID(s)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TestNaming: nothing read, no such service, nobody and somebody are four answers, and only the last one permits.
func TestNaming(t *testing.T) {
	n := NewNaming()
	a, b, c := idOf(t, "spiffe://td/a"), idOf(t, "spiffe://td/b"), idOf(t, "spiffe://td/c")
	check := func(service string, standing NamingStanding, says string, ids ...ID) {
		t.Helper()
		got, is := n.Lookup(service)
		if is != standing || !slices.Equal(got, ids) || !slices.Equal(n.Allowed(service), ids) {
			t.Errorf("%s: %v, %v; want %v, %v", service, got, is, ids, standing)
		}
		for _, id := range ids {
			if err := n.Permits(service, id); err != nil {
				t.Errorf("%s: %v", service, err)
			}
		}
		if err := n.Permits(service, c); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %s", service, err, says)
		}
	}
	check("shop/web", NamingUnread, "not known yet")
	n.Update()
	check("shop/web", NamingUnknown, "no such service")
	n.Update(NamingChange{Service: "shop/web", IDs: []ID{a, b}}, NamingChange{Service: "shop/none"})
	check("shop/web", NamingKnown, "none of the 2 identities", a, b)
	check("shop/none", NamingKnown, "none of the 0 identities")
	if got := n.Services(); !slices.Equal(got, []string{"shop/none", "shop/web"}) {
		t.Errorf("%q", got)
	}
	held := n.Allowed("shop/web")
	n.Update(NamingChange{Service: "shop/web", IDs: []ID{b}}, NamingChange{Service: "shop/none", Gone: true})
	check("shop/web", NamingKnown, "none of the 1 identities", b)
	check("shop/none", NamingUnknown, "no such service")
	if _ = append(held, c); !slices.Equal(held, []ID{a, b}) {
		t.Errorf("a list that was handed out has changed: %v", held)
	}
}

// TestNamingIsLive: readers see lists as a whole while they change. It is for the race detector, too.
func TestNamingIsLive(t *testing.T) {
	n := NewNaming()
	a, b := idOf(t, "spiffe://td/a"), idOf(t, "spiffe://td/b")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 2000 {
				if ids, standing := n.Lookup("x/y"); standing == NamingKnown && (len(ids) != 2 || ids[0] != a || ids[1] != b) {
					t.Errorf("half a list: %v", ids)
				}
				n.Services()
			}
		})
	}
	for range 2000 {
		n.Update(NamingChange{Service: "x/y", IDs: []ID{a, b}})
		n.Update(NamingChange{Service: "x/y", Gone: true})
	}
	wg.Wait()
	if got := testing.AllocsPerRun(100, func() { n.Allowed("x/y") }); got > 0 {
		t.Errorf("a look-up allocates %v times", got)
	}
}
