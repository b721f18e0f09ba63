package federation

import (
	"bytes"
	"crypto/x509"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// TestRelationshipIsWhole: each of domain, URL and profile is required, and each error begins with the field.
func TestRelationshipIsWhole(t *testing.T) {
	id := must(trust.ParseID("spiffe://b.example/server"))
	for _, c := range []struct {
		r    Relationship
		want string
	}{
		{Relationship{foreignDomain, "https://b.example:8443/bundle?x=y", Web, trust.ID{}}, ""},
		{Relationship{foreignDomain, "https://[::1]/", SPIFFE, id}, ""},
		{Relationship{trust.Domain{}, "https://b.example", Web, trust.ID{}}, "trustDomain is missing"},
		{Relationship{foreignDomain, "", Web, trust.ID{}}, "url: it is missing"},
		{Relationship{foreignDomain, "http://b.example", Web, trust.ID{}}, "url: \"http://b.example\" should begin with https://"},
		{Relationship{foreignDomain, "b.example", Web, trust.ID{}}, "url: \"b.example\" should begin with https://"},
		{Relationship{foreignDomain, "https://eve:secret@b.example", Web, trust.ID{}}, "url: it has user information"},
		{Relationship{foreignDomain, "https:///bundle", Web, trust.ID{}}, "url: \"https:///bundle\" names no host"},
		{Relationship{foreignDomain, "https://:443/", Web, trust.ID{}}, "names no host"},
		{Relationship{foreignDomain, "https://b.example/#a", Web, trust.ID{}}, "has a fragment"},
		{Relationship{foreignDomain, "https://b.example/" + strings.Repeat("a", maxURL), Web, trust.ID{}}, "at most 2048 are allowed"},
		{Relationship{foreignDomain, "https://b.example/%zz", Web, trust.ID{}}, "is no URL"},
		{Relationship{foreignDomain, "https://b.example", "", trust.ID{}}, "profile is missing"},
		{Relationship{foreignDomain, "https://b.example", "https", trust.ID{}}, "profile: \"https\" is not known"},
		{Relationship{foreignDomain, "https://b.example", SPIFFE, trust.ID{}}, "endpointID is missing"},
		{Relationship{foreignDomain, "https://b.example", Web, id}, "endpointID: with https_web"},
	} {
		_, err := NewClient(ClientConfig{Relationship: c.r})
		if (err == nil) != (c.want == "") || err != nil && (!strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("%+v: %v, want %q", c.r, err, c.want)
		}
	}
}

// TestWeb: an endpoint is verified by the host name of its URL (RFC 6125), against the roots that are named.
func TestWeb(t *testing.T) {
	good, other := newCA("good"), newCA("other")
	data := bundle(7, good.cert)
	address := serve(t, good.leaf("127.0.0.1"), write(data))
	b, err := web(t, address, good.pool).Fetch(t.Context())
	if err != nil || b.Sequence != 7 || len(b.Roots) != 1 || b.RefreshHint != 2*time.Minute || b.Domain != foreignDomain {
		t.Fatalf("%+v, %v", b, err)
	}
	for name, c := range map[string]*Client{
		"signed by unknown authority": web(t, address, other.pool),
		"unknown authority":           web(t, address, nil), // the system's
		"doesn't contain any IP SANs": web(t, serve(t, good.leaf("b.example"), write(data)), good.pool),
		"no such file":                web(t, address, func() (*x509.CertPool, error) { return nil, errors.New("no such file") }),
	} {
		if _, err := c.Fetch(t.Context()); err == nil || !strings.HasPrefix(err.Error(), "bundle endpoint of b.example: ") || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSPIFFE: an endpoint proves the very ID that is configured, by the bundle of that ID's trust domain and no other.
func TestSPIFFE(t *testing.T) {
	b, c := newCA("b"), newCA("c")
	const id = "spiffe://b.example/server"
	data := bundle(7, b.cert)
	domainC := must(trust.ParseDomain("c.example"))
	knows := map[trust.Domain]*trust.Bundle{
		foreignDomain: must(trust.NewBundle(foreignDomain, 1, []*x509.Certificate{b.cert})), domainC: must(trust.NewBundle(domainC, 1, []*x509.Certificate{c.cert})),
	}
	of := func(td trust.Domain) (*trust.Bundle, error) { return knows[td], nil }
	none := func(trust.Domain) (*trust.Bundle, error) { return nil, nil }
	for _, x := range []struct {
		name   string
		client *Client
		want   string
	}{
		{"self-serving", svid(t, serve(t, b.leaf(id), write(data)), id, of), ""},
		{"served by another domain", svid(t, serve(t, c.leaf("spiffe://c.example/gate"), write(data)), "spiffe://c.example/gate", of), ""},
		{"another ID of the domain", svid(t, serve(t, b.leaf("spiffe://b.example/ns/x/sa/y"), write(data)), id, of), "expected spiffe://b.example/server"},
		{"an ID of a domain whose root did not sign it", svid(t, serve(t, c.leaf(id), write(data)), id, of), "chancery trust import"},
		{"an ID of another domain", svid(t, serve(t, c.leaf("spiffe://c.example/gate"), write(data)), id, of), "trust domain c.example is not trusted here"},
		{"a host name", svid(t, serve(t, b.leaf("127.0.0.1"), write(data)), id, of), "URI"},
		{"nothing to begin with", svid(t, serve(t, b.leaf(id), write(data)), id, none), "set bootstrap"},
		{"nothing of the other domain", svid(t, serve(t, c.leaf("spiffe://c.example/gate"), write(data)), "spiffe://c.example/gate", none), "federate with that trust domain, too"},
	} {
		_, err := x.client.Fetch(t.Context())
		if (err == nil) != (x.want == "") || err != nil && !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", x.name, err, x.want)
		}
	}
}

// TestRedirects: to what is an endpoint's URL and proves itself in the same way, as the same; a few, and for that time only.
func TestRedirects(t *testing.T) {
	good, other := newCA("good"), newCA("other")
	data := bundle(7, good.cert)
	target := serve(t, good.leaf("127.0.0.1"), write(data))
	hits := atomic.Int32{}
	plain := http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hits.Add(1) })}
	defer plain.Close()
	for _, x := range []struct {
		name string
		to   string
		want string
	}{
		{"to another host", target + "/x", ""},
		{"to plain HTTP", "http://" + strings.TrimPrefix(target, "https://"), "it redirects to a URL that is none of an endpoint: \"http://"},
		{"with user information", strings.Replace(target, "https://", "https://eve:secret@", 1), "it has user information"},
		{"to a file", "file:///etc/passwd", "none of an endpoint"},
		{"to a host of another CA", serve(t, other.leaf("127.0.0.1"), write(data)), "unknown authority"},
		{"to itself", "", "redirects more than 5 times"},
	} {
		for _, code := range []int{301, 302, 307, 308} {
			first := atomic.Int32{}
			c := web(t, serve(t, good.leaf("127.0.0.1"), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				first.Add(1)
				to := x.to
				if to == "" {
					to = "/again"
				}
				http.Redirect(w, r, to, code)
			})), good.pool)
			for range 2 { // nothing is remembered, of a permanent one neither
				_, err := c.Fetch(t.Context())
				if (err == nil) != (x.want == "") || err != nil && (!strings.Contains(err.Error(), x.want) || strings.Contains(err.Error(), "secret")) {
					t.Errorf("%s, %d: %v, want %q", x.name, code, err, x.want)
				}
			}
			if n := first.Load(); n < 2 {
				t.Errorf("%s, %d: the URL that is configured was asked %d times", x.name, code, n)
			}
		}
	}
	b := newCA("b")
	of := func(td trust.Domain) (*trust.Bundle, error) {
		return trust.NewBundle(td, 1, []*x509.Certificate{b.cert})
	}
	redirect := func(to string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, to, http.StatusTemporaryRedirect) }
	}
	const id = "spiffe://b.example/server"
	same := serve(t, b.leaf(id), write(data))
	if _, err := svid(t, serve(t, b.leaf(id), redirect(same)), id, of).Fetch(t.Context()); err != nil {
		t.Errorf("to the same ID: %v", err)
	}
	another := serve(t, b.leaf("spiffe://b.example/other"), write(data))
	if _, err := svid(t, serve(t, b.leaf(id), redirect(another)), id, of).Fetch(t.Context()); err == nil || !strings.Contains(err.Error(), "expected "+id) {
		t.Errorf("to another ID: %v", err)
	}
}

// TestAnswers: what is no bundle is refused, with a reason.
func TestAnswers(t *testing.T) {
	good := newCA("good")
	for _, x := range []struct {
		name string
		h    http.HandlerFunc
		want string
	}{
		{"not found", http.NotFound, "HTTP status 404 Not Found"},
		{"a bundle with an error", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500); w.Write(bundle(7)) }, "HTTP status 500"},
		{"no content", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }, "HTTP status 204"},
		{"not modified, of what was never asked", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(304) }, "HTTP status 304"},
		{"a page of a proxy", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			w.Write([]byte("<html>log in</html>"))
		}, `Content-Type is "text/html"`},
		{"half a bundle", write([]byte(`{"keys":[`)), "SPIFFE bundle of b.example"},
		{"too much", write(append(bundle(7), bytes.Repeat([]byte(" "), MaxBody)...)), "more than 1048576 bytes"},
		{"less than it says", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "10000")
			w.Write(bundle(7))
		}, "reading it"},
		{"endless headers", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Much", strings.Repeat("x", 2*maxHeader))
			w.Write(bundle(7))
		}, "header"},
		{"no keys at all", write([]byte(`{}`)), "no array of keys"},
	} {
		if _, err := web(t, serve(t, good.leaf("127.0.0.1"), x.h), good.pool).Fetch(t.Context()); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", x.name, err, x.want)
		}
	}
	if b, err := web(t, serve(t, good.leaf("127.0.0.1"), write([]byte(`{"keys":[],"spiffe_sequence":8}`))), good.pool).Fetch(t.Context()); err != nil || len(b.Roots) != 0 {
		t.Errorf("an empty bundle says that nothing is trusted: %+v, %v", b, err)
	}
}

// TestNotModified: a bundle that has not changed is not sent again; one that has is.
func TestNotModified(t *testing.T) {
	good := newCA("good")
	var tag, body atomic.Value
	var sent, saved atomic.Int32
	c := web(t, serve(t, good.leaf("127.0.0.1"), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", tag.Load().(string))
		if r.Header.Get("If-None-Match") == tag.Load() && tag.Load() != "" {
			saved.Add(1)
			w.WriteHeader(304)
			return
		}
		sent.Add(1)
		w.Write(body.Load().([]byte))
	})), good.pool)
	for i, x := range []struct {
		tag         string
		n           uint64
		sent, saved int32
	}{{`"a"`, 1, 1, 0}, {`"a"`, 1, 1, 1}, {`W/"b"`, 2, 2, 1}, {`W/"b"`, 2, 2, 2}, {"", 3, 3, 2}, {"", 3, 4, 2}, {`"` + strings.Repeat("t", maxTag) + `"`, 4, 5, 2}, {`"` + strings.Repeat("t", maxTag) + `"`, 4, 6, 2}} {
		tag.Store(x.tag)
		body.Store(bundle(x.n))
		b, err := c.Fetch(t.Context())
		if err != nil || b.Sequence != x.n || sent.Load() != x.sent || saved.Load() != x.saved {
			t.Errorf("%d: sent %d, saved %d, %+v, %v", i, sent.Load(), saved.Load(), b, err)
		}
	}
}

// A tag is remembered of a bundle that could be read only: what is broken is asked for again as a whole.
func TestNoTagOfWhatIsBroken(t *testing.T) {
	good := newCA("good")
	broken := true
	c := web(t, serve(t, good.leaf("127.0.0.1"), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"a"`)
		if r.Header.Get("If-None-Match") != "" {
			w.WriteHeader(304)
		} else if broken {
			w.Write([]byte("{"))
		} else {
			w.Write(bundle(1))
		}
	})), good.pool)
	if _, err := c.Fetch(t.Context()); err == nil {
		t.Error("half a bundle is one")
	}
	broken = false
	if b, err := c.Fetch(t.Context()); err != nil || b.Sequence != 1 {
		t.Errorf("%+v, %v", b, err)
	}
}

// TestSlow: however an endpoint takes its time, a fetch ends in time.
func TestSlow(t *testing.T) {
	good := newCA("good")
	slow := map[string]http.HandlerFunc{
		"says nothing": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"a byte at a time": func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				w.Write([]byte(" "))
				w.(http.Flusher).Flush()
				time.Sleep(time.Second)
			}
		},
		"redirects slowly": func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-time.After(4 * time.Second):
			case <-r.Context().Done():
			}
			http.Redirect(w, r, "/again", http.StatusFound)
		},
	}
	for name, h := range slow {
		synctest.Test(t, func(t *testing.T) {
			n := newNetwork(good.leaf("b.example"), h)
			defer n.close()
			c := web(t, "https://b.example/", good.pool)
			c.dial = n.dial
			begun := time.Now()
			_, err := c.Fetch(t.Context())
			if took := time.Since(begun); err == nil || !strings.Contains(err.Error(), "did not answer within 10s") || took != Timeout {
				t.Errorf("%s: after %s: %v", name, took, err)
			}
		})
	}
}

// FuzzAnswer: whatever an endpoint answers is no reason to panic, and a bundle that is taken is one of its domain.
func FuzzAnswer(f *testing.F) {
	f.Add(200, "application/json", "", bundle(7))
	f.Add(302, "", "/x", []byte(nil))
	f.Add(304, "", "", []byte(nil))
	f.Add(302, "", "http://[::1", []byte("x"))
	f.Add(200, "text/html", "", []byte(`{"keys":[{"kty":"EC","use":"x509-svid","x5c":["AAAA"]}]}`))
	good := newCA("good")
	f.Fuzz(func(t *testing.T, code int, kind, to string, body []byte) {
		if code < 200 || code > 999 {
			t.Skip()
		}
		n := newNetwork(good.leaf("b.example"), func(w http.ResponseWriter, r *http.Request) {
			if kind != "" {
				w.Header().Set("Content-Type", kind)
			}
			if to != "" {
				w.Header().Set("Location", to)
			}
			w.Header().Set("ETag", kind)
			w.WriteHeader(code)
			w.Write(body)
		})
		defer n.close()
		c := web(t, "https://b.example/", good.pool)
		c.dial = n.dial
		for range 2 {
			b, err := c.Fetch(t.Context())
			if (b == nil) == (err == nil) || b != nil && b.Domain != foreignDomain {
				t.Fatalf("%+v, %v", b, err)
			}
			if err == nil && code != 200 && (code < 300 || code > 308 || to == "") {
				t.Fatalf("status %d is taken for a bundle", code)
			}
		}
	})
}
