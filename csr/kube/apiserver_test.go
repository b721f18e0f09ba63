package kube

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	authn "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"

	"github.com/chancery-project/chancery/csr/jwt/jwttest"
)

// TestMain takes out client-go's global error handlers: one sleeps until a millisecond after the last error, which may
// lie decades ahead of a synctest bubble's clock.
func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = nil
	m.Run()
}

// apiServer speaks the few paths of a Kubernetes API server that this package uses, from memory. The real one is used
// in test/e2e; this one can break in all the ways that we must stand.
type apiServer struct {
	t testing.TB

	mu       sync.Mutex // guards the rest
	rv       int
	pods     map[string]*corev1.Pod // by namespace/name
	watches  map[chan metav1.WatchEvent]bool
	lag      bool   // pods are not told to watches
	down     bool   // every request fails
	hang     bool   // requests other than watches are not answered
	noStream bool   // no initial events in watches, as before WatchList
	jwks     []byte // what /openid/v1/jwks has
	review   func(authn.TokenReviewSpec) authn.TokenReviewStatus
	calls    map[string]int // by kind of request
}

func newAPIServer(t testing.TB) *apiServer {
	return &apiServer{t: t, pods: map[string]*corev1.Pod{}, watches: map[chan metav1.WatchEvent]bool{}, calls: map[string]int{}, jwks: jwttest.KeySet(t, "rsa", "p256")}
}

// client returns a client that calls the server without a network, so that it works in a synctest bubble.
func (s *apiServer) client(t testing.TB) *Client {
	t.Helper()
	c, err := newClient(&rest.Config{Host: "http://api.invalid", Transport: inMemory{s}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// with changes the server's state.
func (s *apiServer) with(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *apiServer) count(kind string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[kind]
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	q := r.URL.Query()
	kind := "get"
	switch {
	case r.URL.Path == "/openid/v1/jwks":
		kind = "jwks"
	case strings.HasSuffix(r.URL.Path, "/tokenreviews"):
		kind = "review"
	case q.Get("watch") == "true" || q.Get("watch") == "1":
		kind = "watch"
	case parts[len(parts)-1] == "pods":
		kind = "list"
	}
	s.mu.Lock()
	s.calls[kind]++
	down, hang := s.down, s.hang
	s.mu.Unlock()
	switch {
	case down:
		http.Error(w, "the API server is down", http.StatusInternalServerError)
	case hang && kind != "watch":
		<-r.Context().Done()
	case kind == "jwks":
		s.with(func() { w.Write(s.jwks) })
	case kind == "review":
		s.serveReview(w, r)
	case kind == "watch":
		s.serveWatch(w, r, q.Get("sendInitialEvents") == "true")
	case kind == "list":
		s.serveList(w, parts, q.Get("fieldSelector"))
	default:
		s.serveGet(w, parts[len(parts)-3]+"/"+parts[len(parts)-1])
	}
}

func (s *apiServer) serveReview(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var tr authn.TokenReview
	if _, _, err := serializer.NewCodecFactory(kinds()).UniversalDeserializer().Decode(body, nil, &tr); err != nil {
		s.t.Errorf("reading a TokenReview: %v", err)
	}
	s.mu.Lock()
	f := s.review
	s.mu.Unlock()
	if f == nil {
		s.t.Error("a TokenReview where none should be")
		return
	}
	tr.Status = f(tr.Spec)
	s.reply(w, http.StatusCreated, &tr, "authentication.k8s.io/v1", "TokenReview")
}

func (s *apiServer) serveGet(w http.ResponseWriter, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.pods[name]; p != nil {
		s.reply(w, http.StatusOK, p, "v1", "Pod")
		return
	}
	err := apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, name)
	s.reply(w, http.StatusNotFound, &err.ErrStatus, "v1", "Status")
}

func (s *apiServer) serveList(w http.ResponseWriter, parts []string, selector string) {
	if !strings.Contains(selector, livingPods) {
		s.t.Errorf("a list of all pods, ended ones included: %q", selector)
	}
	_, node, _ := strings.Cut(selector, "spec.nodeName=")
	s.mu.Lock()
	defer s.mu.Unlock()
	l := &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(s.rv)}}
	for _, k := range slices.Sorted(maps.Keys(s.pods)) {
		p := s.pods[k]
		if living(p) && (node == "" || p.Spec.NodeName == node) && (len(parts) < 5 || p.Namespace == parts[3]) {
			l.Items = append(l.Items, *p)
		}
	}
	s.reply(w, http.StatusOK, l, "v1", "PodList")
}

func (s *apiServer) serveWatch(w http.ResponseWriter, r *http.Request, initial bool) {
	s.mu.Lock()
	if initial && s.noStream {
		s.mu.Unlock()
		err := apierrors.NewBadRequest("sendInitialEvents is forbidden")
		s.reply(w, http.StatusBadRequest, &err.ErrStatus, "v1", "Status")
		return
	}
	events := make(chan metav1.WatchEvent, 1000)
	if initial {
		for _, p := range s.pods {
			if living(p) {
				events <- event("ADDED", p)
			}
		}
		events <- event("BOOKMARK", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.Itoa(s.rv), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}})
	}
	s.watches[events] = true
	s.mu.Unlock()
	defer s.with(func() { delete(s.watches, events) })
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	for {
		select {
		case e, ok := <-events:
			if !ok || json.NewEncoder(w).Encode(e) != nil {
				return
			}
		case <-r.Context().Done():
			return
		}
	}
}

func living(p *corev1.Pod) bool {
	return p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed
}

func event(kind string, p *corev1.Pod) metav1.WatchEvent {
	p = p.DeepCopy()
	p.APIVersion, p.Kind = "v1", "Pod"
	raw, _ := json.Marshal(p)
	e := metav1.WatchEvent{Type: kind}
	e.Object.Raw = raw
	return e
}

func (s *apiServer) reply(w http.ResponseWriter, code int, o any, version, kind string) {
	b, _ := json.Marshal(o)
	var m map[string]any
	json.Unmarshal(b, &m)
	m["apiVersion"], m["kind"] = version, kind
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(m)
}

// put stores a pod and tells the watches; one that has ended is deleted as far as they care.
func (s *apiServer) put(p *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rv++
	name := p.Namespace + "/" + p.Name
	kind := "ADDED"
	if s.pods[name] != nil {
		kind = "MODIFIED"
	}
	if !living(p) {
		kind = "DELETED"
	}
	p.ResourceVersion = strconv.Itoa(s.rv)
	s.pods[name] = p
	s.tell(event(kind, p))
}

func (s *apiServer) remove(namespace, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rv++
	p := s.pods[namespace+"/"+name]
	delete(s.pods, namespace+"/"+name)
	p.ResourceVersion = strconv.Itoa(s.rv)
	s.tell(event("DELETED", p))
}

func (s *apiServer) tell(e metav1.WatchEvent) {
	if s.lag {
		return
	}
	for w := range s.watches {
		w <- e
	}
}

// bookmark tells the watches that nothing happened, as a real API server does each minute.
func (s *apiServer) bookmark() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tell(event("BOOKMARK", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(s.rv)}}))
}

// cut ends all watches and refuses everything from now on.
func (s *apiServer) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = true
	for w := range s.watches {
		close(w)
		delete(s.watches, w)
	}
}

// testPod is the pod that jwttest.Claims() is bound to.
func testPod(changes ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "foo", Name: "web-0", UID: "uid-0"},
		Spec:       corev1.PodSpec{NodeName: "node-1", ServiceAccountName: "web"},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, f := range changes {
		f(p)
	}
	return p
}

func podAs(name, uid, node, account string) *corev1.Pod {
	return testPod(func(p *corev1.Pod) {
		p.Name, p.UID, p.Spec.NodeName, p.Spec.ServiceAccountName = name, types.UID(uid), node, account
	})
}

// inMemory is a transport that calls a handler.
type inMemory struct{ h http.Handler }

func (m inMemory) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(r.Context())
	body, out := io.Pipe()
	w := &pipeWriter{out: out, header: http.Header{}, started: make(chan int, 1)}
	stop := context.AfterFunc(ctx, func() { out.CloseWithError(ctx.Err()) })
	go func() {
		defer cancel()
		m.h.ServeHTTP(w, r.WithContext(ctx))
		w.WriteHeader(http.StatusOK)
		stop()
		out.Close()
	}()
	select {
	case code := <-w.started:
		return &http.Response{
			StatusCode: code, Status: http.StatusText(code), Header: w.header, Request: r,
			Body: readCloser{body, func() error { cancel(); return body.CloseWithError(errors.New("closed")) }},
		}, nil
	case <-r.Context().Done():
		cancel()
		return nil, r.Context().Err()
	}
}

type readCloser struct {
	io.Reader
	close func() error
}

func (r readCloser) Close() error { return r.close() }

type pipeWriter struct {
	out     *io.PipeWriter
	header  http.Header
	started chan int
	once    sync.Once
}

func (w *pipeWriter) Header() http.Header { return w.header }

func (w *pipeWriter) WriteHeader(code int) { w.once.Do(func() { w.started <- code }) }

func (w *pipeWriter) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.out.Write(b)
}
