package kube

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/chancery-project/chancery/ca/parent/parenttest"
	"github.com/chancery-project/chancery/ca/parent/renewal"
	"github.com/chancery-project/chancery/trust"
)

const path = "/apis/cert-manager.io/v1/namespaces/mesh/certificaterequests"

// api keeps CertificateRequests in memory and decides on them at once, as an API server with cert-manager would. The real API
// server is used in test/e2e.
type api struct {
	t    *testing.T
	peer *parenttest.Peer

	mu      sync.Mutex // guards all below
	objects map[string]map[string]any
	made    int
	deleted int
	status  func(map[string]any) map[string]any // of a new object; nil: the peer signs
	seen    func()                              // called when one is read
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	name := strings.TrimPrefix(r.URL.Path, path+"/")
	switch {
	case !strings.HasPrefix(r.URL.Path, path):
		a.t.Errorf("%s %s", r.Method, r.URL)
	case r.Method == http.MethodPost:
		a.create(w, r)
	case a.objects[name] == nil:
		reply(w, http.StatusNotFound, map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404, "message": "not found"})
	case r.Method == http.MethodGet:
		reply(w, http.StatusOK, a.objects[name])
		if a.seen != nil {
			a.seen()
		}
	case r.Method == http.MethodDelete:
		a.deleted++
		delete(a.objects, name)
		reply(w, http.StatusOK, map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Success"})
	}
}

func (a *api) create(w http.ResponseWriter, r *http.Request) {
	var o map[string]any
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
		a.t.Error(err)
	}
	a.made++
	meta := o["metadata"].(map[string]any)
	meta["uid"] = fmt.Sprint("uid-", a.made)
	if a.status != nil {
		o["status"] = a.status(o)
	} else {
		o["status"] = a.sign(o)
	}
	a.objects[meta["name"].(string)] = o
	reply(w, http.StatusCreated, o)
}

func (a *api) sign(o map[string]any) map[string]any {
	spec := o["spec"].(map[string]any)
	data, _ := base64.StdEncoding.DecodeString(spec["request"].(string))
	block, _ := pem.Decode(data)
	ref := spec["issuerRef"].(map[string]any)
	if block == nil || spec["isCA"] != true || spec["duration"] != "24h0m0s" || ref["name"] != "mesh-ca" || ref["kind"] != "Issuer" || ref["group"] != "cert-manager.io" ||
		fmt.Sprint(spec["usages"]) != "[cert sign crl sign]" {
		a.t.Errorf("asked for %v", spec)
	}
	chain, err := a.peer.Sign(block.Bytes)
	if err != nil {
		return state("Ready", "False", "Failed", err.Error())
	}
	s := state("Ready", "True", "Issued", "")
	s["certificate"] = base64.StdEncoding.EncodeToString(trust.EncodeCertificates(chain...))
	s["ca"] = base64.StdEncoding.EncodeToString(trust.EncodeCertificates(a.peer.World.Root.Cert))
	return s
}

func state(kind, status, reason, message string) map[string]any {
	return map[string]any{"conditions": []any{map[string]any{"type": kind, "status": status, "reason": reason, "message": message}}}
}

func reply(w http.ResponseWriter, code int, o any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(o)
}

func serve(t *testing.T, p *parenttest.Peer) (*Parent, *api) {
	t.Helper()
	a := &api{t: t, peer: p, objects: map[string]map[string]any{}}
	s := httptest.NewServer(p.Handler(a))
	t.Cleanup(s.Close)
	addr := s.Listener.Addr().String()
	p.Switch(s.Close, func() {
		next := httptest.NewUnstartedServer(p.Handler(a))
		next.Listener.Close()
		next.Listener = parenttest.Listen(t, addr)
		next.Start()
		t.Cleanup(next.Close)
	})
	made, err := New(Config{API: &rest.Config{Host: s.URL}, Namespace: "mesh", Issuer: "mesh-ca", Kind: "Issuer", Group: "cert-manager.io", TTL: parenttest.Lifetime})
	if err != nil {
		t.Fatal(err)
	}
	return made, a
}

func TestContract(t *testing.T) {
	var last *api
	parenttest.Run(t, parenttest.Config{Start: func(t *testing.T, p *parenttest.Peer) (parent renewal.Parent) {
		parent, last = serve(t, p)
		return parent
	}})
	if len(last.objects) > 0 || last.made != last.deleted {
		t.Errorf("%d requests made, %d deleted", last.made, last.deleted)
	}
}

// One that waits is left, and found again by the next try; one that was decided against, or asks something else, is made anew.
func TestDeletedAndMadeAnew(t *testing.T) {
	w := parenttest.NewWorld(t)
	p, a := serve(t, parenttest.NewPeer(w))
	r := w.Renewer(p)
	pending := func(map[string]any) map[string]any { return map[string]any{} }
	set := func(f func()) {
		a.mu.Lock()
		defer a.mu.Unlock()
		f()
	}
	try := func(want string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		reads := 0
		set(func() {
			a.seen = func() {
				if reads++; reads == 2 { // one that waits
					cancel()
				}
			}
		})
		if err := r.Renew(ctx); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "CertificateRequest mesh/chancery-issuer-") {
			t.Errorf("want %q, got %v", want, err)
		}
	}
	a.status = pending
	try("not decided yet: it waits for an approval; it is left as it is")
	try("it waits for an approval")
	if a.made != 1 || a.deleted != 0 {
		t.Errorf("one that waits: made %d times, deleted %d times", a.made, a.deleted)
	}
	for i, c := range []struct{ kind, status, reason, want string }{
		{"Denied", "True", "policy.example", "denied: because"}, {"InvalidRequest", "True", "", "invalid: because"}, {"Ready", "False", "Failed", "failed: because"},
	} {
		set(func() {
			for _, o := range a.objects {
				o["status"] = state(c.kind, c.status, c.reason, "because\nof this")
				o["status"].(map[string]any)["conditions"] = append(o["status"].(map[string]any)["conditions"].([]any), "nonsense", map[string]any{"type": 7})
			}
			a.status = pending
		})
		try(c.want)
		if a.made != 1+i || a.deleted != 1+i {
			t.Errorf("%s: made %d times, deleted %d times", c.want, a.made, a.deleted)
		}
		try("it waits for an approval") // the next one
	}
	set(func() {
		for _, o := range a.objects { // the admin has chosen another issuer since
			o["spec"].(map[string]any)["issuerRef"].(map[string]any)["name"] = "former"
		}
		a.status = nil
	})
	if err := r.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(a.objects) > 0 || a.made != a.deleted {
		t.Errorf("made %d, deleted %d", a.made, a.deleted)
	}
	w.Issue(t)
}

// Whatever a status holds that is not what cert-manager writes is an error that names the field.
func TestBadStatus(t *testing.T) {
	w := parenttest.NewWorld(t)
	p, a := serve(t, parenttest.NewPeer(w))
	r := w.Renewer(p)
	for want, change := range map[string]func(map[string]any){
		"status.certificate is not base64":       func(s map[string]any) { s["certificate"] = "%%" },
		"status.certificate: no PEM block":       func(s map[string]any) { s["certificate"] = "AAAA" },
		"status.certificate: no PEM block found": func(s map[string]any) { delete(s, "certificate") },
		"status.certificate is not text":         func(s map[string]any) { s["certificate"] = 7 },
		"status.ca: no PEM block":                func(s map[string]any) { s["ca"] = "AAAA" },
	} {
		clear(a.objects) // one that waits would be found again
		a.status = func(o map[string]any) map[string]any {
			s := a.sign(o)
			change(s)
			return s
		}
		err := r.Renew(t.Context())
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
}
