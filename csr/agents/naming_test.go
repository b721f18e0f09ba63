package agents

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/trust"
)

// book is a source of naming.
type book struct {
	mu  sync.Mutex
	all map[string][]string
}

func (b *book) of(service string) ([]string, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ids, known := b.all[service]
	return ids, known
}

func (b *book) set(service string, ids ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all[service] = ids
}

func newBook(h *Hub) *book {
	b := &book{all: map[string][]string{}}
	h.naming.of = b.of
	return b
}

// said is what an update says of naming.
func said(u *chanceryv1.SyncUpdate) string {
	var all []string
	for _, s := range u.GetNaming() {
		text := s.GetService() + "=" + strings.Join(s.GetSpiffeIds(), ",")
		if s.GetUnknown() {
			text += "?"
		}
		all = append(all, text)
	}
	return strings.Join(all, " ")
}

// An agent is told of the services that it asks for, once the source knows, and at once of each change; one that asks for none, or
// others, is sent nothing for it.
func TestNamingGoesToThoseWhoAsk(t *testing.T) {
	h, connect := start(t)
	b := newBook(h)
	publish(t, h, crl("1"))
	web, other, none := connect("web"), connect("other"), connect("none")
	for _, s := range []chanceryv1.Issuance_SyncClient{web, other, none} {
		if u := recv(t, s); said(u) != "" {
			t.Errorf("nobody has asked, and is told %s", said(u))
		}
	}
	send(t, web, &chanceryv1.SyncRequest{Services: []string{"foo/api", "foo/web"}})
	send(t, other, &chanceryv1.SyncRequest{Services: []string{"foo/api"}})
	until(t, "both ask", func() bool { h.naming.mu.Lock(); defer h.naming.mu.Unlock(); return h.naming.asked == 3 })
	b.set("foo/web", "spiffe://td/b", "spiffe://td/a", "spiffe://td/a")
	h.NamingChanged()
	// Before that there was nothing to say, whatever was sent.
	want := func(s chanceryv1.Issuance_SyncClient, want string) {
		t.Helper()
		u := recv(t, s)
		for said(u) == "" {
			u = recv(t, s)
		}
		if said(u) != want {
			t.Errorf("told %q; want %q", said(u), want)
		}
		if u.GetVersion() != 0 || u.GetBundle() != nil || len(u.GetCrls()) > 0 {
			t.Errorf("what is news of naming alone came with an update: %v", u)
		}
	}
	want(web, "foo/api=? foo/web=spiffe://td/a,spiffe://td/b")
	want(other, "foo/api=?")
	b.set("foo/web")
	h.NamingChanged("foo/web", "foo/nobody-asks")
	want(web, "foo/web=")                 // what is new alone
	h.NamingChanged("foo/web", "foo/api") // nothing is new
	b.set("foo/api", "spiffe://td/api")
	h.NamingChanged("foo/api")
	want(other, "foo/api=spiffe://td/api")
	want(web, "foo/api=spiffe://td/api")

	send(t, web, &chanceryv1.SyncRequest{Services: []string{"foo/api"}})
	send(t, web, &chanceryv1.SyncRequest{Services: []string{"foo/new", "foo/web"}}) // foo/web is asked for anew
	want(web, "foo/new=? foo/web=")
	publish(t, h, crl("2"))
	if u := recv(t, none); said(u) != "" || u.GetVersion() == 0 {
		t.Errorf("one who asks for nothing got %v", u)
	}
	if u := recv(t, web); u.GetVersion() == 0 || said(u) != "" {
		t.Errorf("with new CRLs came what is known of naming: %v", u)
	}
	for _, s := range []chanceryv1.Issuance_SyncClient{web, other, none} {
		if err := s.CloseSend(); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "nothing is kept of streams that are gone", func() bool {
		h.naming.mu.Lock()
		defer h.naming.mu.Unlock()
		return h.naming.asked == 0 && len(h.naming.all) == 0 && len(h.naming.byPlace) == 0
	})
}

// Streams share the bytes of what they are told, and have nothing of them as long as they ask for nothing.
func TestNamingIsEncodedOnce(t *testing.T) {
	c := newCrowd(t, 100)
	for _, s := range c.streams[1:] {
		c.ask(s, []string{"foo/web"})
	}
	// A server without naming in its config says nothing: another one of the same authority may have it, and its word stands.
	n, _, _ := c.next(c.streams[1], time.Now())
	if m, err := c.encode(c.streams[1], n); err != nil || len(m.parts) != 0 {
		t.Errorf("who has no source says %d parts, %v", len(m.parts), err)
	}
	newBook(c.Hub)
	c.NamingChanged()
	var first []byte
	for i, s := range c.streams {
		n, changed, _ := c.next(s, time.Now().Add(time.Second))
		if i == 0 {
			if changed == nil || s.services != nil || n.named {
				t.Error("one who asks for nothing is told something")
			}
			continue
		}
		m, err := c.encode(s, n)
		if err != nil || n.update != nil || len(m.parts) != 1 {
			t.Fatalf("stream %d: %v, %v, %d parts", i, err, n, len(m.parts))
		}
		if got := m.parts[0].ReadOnlyData(); first == nil {
			first = got
		} else if &first[0] != &got[0] {
			t.Fatal("the same is encoded twice")
		}
	}
}

// What changes often is told a stream in one, and a little later.
func TestNamingIsCoalesced(t *testing.T) {
	c := newCrowd(t, 1)
	b, s, now := newBook(c.Hub), c.streams[0], time.Now()
	c.NamingChanged()
	c.ask(s, []string{"foo/web"})
	if n, _, _ := c.next(s, now); !n.named {
		t.Fatal("the first word is not told at once")
	}
	for i := range 10 {
		b.set("foo/web", fmt.Sprintf("spiffe://td/%d", i))
		c.NamingChanged("foo/web")
		if n, _, again := c.next(s, now); n.named || !again.Equal(now.Add(namingPause)) {
			t.Fatalf("told %v, next look at %s", n, again)
		}
	}
	if n, _, _ := c.next(s, now.Add(namingPause)); !n.named || n.update != nil {
		t.Errorf("not told after the pause: %v", n)
	}
	if n, changed, _ := c.next(s, now.Add(time.Second)); n.named || changed == nil {
		t.Errorf("told twice: %v", n)
	}
}

func TestNamingHasBounds(t *testing.T) {
	h, connect := start(t)
	publish(t, h, crl("1"))
	many := func(n int, name string) (out []string) {
		for i := range n {
			out = append(out, fmt.Sprintf(name, i))
		}
		return out
	}
	for want, m := range map[string]*chanceryv1.SyncRequest{
		"2001 services are asked for":         {Services: many(maxServices+1, "foo/%05d")},
		"expected in order":                   {Services: []string{"foo/b", "foo/a"}},
		"each once":                           {Services: []string{"foo/b", "foo/b"}},
		"a name is NAMESPACE/NAME":            {Services: []string{"foo"}},
		`service "/a" is asked`:               {Services: []string{"/a"}},
		`service "a/b/c" is asked`:            {Services: []string{"a/b/c"}},
		`service "a/b c" is asked`:            {Services: []string{"a/b c"}},
		"of at most 320 bytes":                {Services: []string{"a/" + strings.Repeat("x", maxService)}},
		"21 trust domains":                    {UnknownAuthorities: many(maxUnknown+1, "td%d")},
		`trust domain "TD" has the character`: {UnknownAuthorities: []string{"TD"}},
		"21 names of former trust domains":    {FormerNames: many(maxFormer+1, "spiffe://td/%d")},
		"has 301 bytes; at most 300":          {FormerNames: []string{strings.Repeat("x", maxFormerBytes+1)}},
	} {
		s := connect("a")
		recv(t, s)
		send(t, s, m)
		if _, err := s.Recv(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}

	c := newCrowd(t, 0)
	b := newBook(c.Hub)
	b.set("foo/many", many(maxIdentities+1, "spiffe://td/%d")...)
	c.NamingChanged()
	s := c.come()
	c.ask(s, []string{"foo/less", "foo/many"})
	if got := c.parts(s); len(got) != 1 {
		t.Errorf("a list that is too long is told: %d parts", len(got))
	}
	for i := range 20 { // of one identity and place
		s := &stream{id: "a", place: "a node", look: time.NewTimer(time.Hour)}
		c.ask(s, many(maxServices, fmt.Sprintf("foo%02d/%%05d", i)))
		if n := c.naming.byPlace[s.place]; n > maxPlaceAsked {
			t.Fatalf("one place asks for %d services", n)
		}
	}
	long := many(200, "spiffe://td/"+strings.Repeat("x", 1000)+"%d")
	for _, name := range many(100, "big/%03d") {
		b.set(name, long...)
	}
	s = c.come()
	c.ask(s, many(100, "big/%03d"))
	told, messages, now := 0, 0, time.Now()
	for ; messages < 10; messages++ { // what does not fit into one message comes with another, and nothing twice
		n, _, _ := c.next(s, now)
		if !n.named {
			break
		}
		got := c.parts(s)
		if got.Len() > maxNaming || len(got) < 10 {
			t.Errorf("a message has %d bytes of %d services", got.Len(), len(got))
		}
		told += len(got)
		now = now.Add(time.Second)
	}
	if told != 100 || messages < 2 {
		t.Errorf("told of %d services of 100 in %d messages", told, messages)
	}
}

// What agents say of trust domains: of unknown authorities each is passed on once, names of a former domain are there as long as the
// stream.
func TestWhatIsSaidOfTrustDomains(t *testing.T) {
	h, connect := start(t)
	var mu sync.Mutex
	var unknown []string
	h.OnUnknown(func(d trust.Domain) { mu.Lock(); defer mu.Unlock(); unknown = append(unknown, d.String()) })
	publish(t, h, crl("1"))
	s := connect("spiffe://td/a")
	recv(t, s)
	m := &chanceryv1.SyncRequest{
		UnknownAuthorities: []string{"foreign.org", "other.org"}, FormerNames: []string{"spiffe://old", "spiffe://old/ns/a/sa/b", "spiffe://older/x"},
	}
	send(t, s, m)
	send(t, s, m)
	old, err := trust.ParseDomain("old")
	if err != nil {
		t.Fatal(err)
	}
	until(t, "names are known", func() bool { _, n := h.Former(old); return n == 1 })
	some, _ := h.Former(old)
	if some[0].Agent != "agent spiffe://td/a at 192.0.2.1:1" || !slices.Equal(some[0].Names, []string{"spiffe://old", "spiffe://old/ns/a/sa/b"}) {
		t.Errorf("former names are %v", some)
	}
	send(t, s, &chanceryv1.SyncRequest{UnknownAuthorities: []string{"third.org"}})
	until(t, "names are gone", func() bool { _, n := h.Former(old); return n == 0 })
	until(t, "domains are passed on", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return strings.Join(unknown, " ") == "foreign.org other.org third.org"
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.former != 0 {
		t.Errorf("%d bytes are counted of no names", h.former)
	}
}

// BenchmarkNamingToTenThousand is one service that changes, of twenty that each of ten thousand agents asks for, until each stream knows what
// to send.
func BenchmarkNamingToTenThousand(b *testing.B) {
	h := New(Config{})
	book := newBook(h)
	h.NamingChanged()
	if err := h.Publish(crl("1")); err != nil {
		b.Fatal(err)
	}
	var names []string
	for i := range 20 {
		names = append(names, fmt.Sprintf("foo/%02d", i))
	}
	now := time.Now()
	streams := make([]*stream, 10_000)
	for i := range streams {
		s := &stream{id: "a", place: fmt.Sprint(i), look: time.NewTimer(time.Hour)}
		if err := h.join(s); err != nil {
			b.Fatal(err)
		}
		h.ask(s, names)
		n, _, _ := h.next(s, now)
		if m, err := h.encode(s, n); err != nil || len(m.parts) < 20 {
			b.Fatalf("%v, %d parts of the first word", err, len(m.parts))
		}
		streams[i] = s
	}
	for i := 0; b.Loop(); i++ {
		now = now.Add(time.Second)
		book.set("foo/07", fmt.Sprintf("spiffe://td/%d", i))
		h.NamingChanged("foo/07")
		for _, s := range streams {
			n, _, _ := h.next(s, now)
			m, err := h.encode(s, n)
			if err != nil || len(m.parts) != 1 {
				b.Fatalf("%v, %d parts", err, len(m.parts))
			}
		}
	}
}
