// Package kube owns the authority document in a Kubernetes cluster: one Secret for the document, one Secret for the notes of
// all replicas, and one Lease, in one namespace and under fixed names, so that several servers may share them.
//
// What is trusted is what package store says: who can write the Secrets can roll the document back or delete it, and no more.
// Each change is a patch that names the fields it sets, so that labels, annotations and fields which others put there stay;
// where a change must not meet another one, the patch also names the resourceVersion that it is made for.
//
// It refuses to create what it is asked to open, a Secret of another type or with data that it did not write, and a document
// that does not fit into a Secret. It never lists and never deletes: to get, watch and patch those three objects is enough,
// and only Create needs the right to create them.
package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"sync"
	"time"

	coordination "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/chancery-project/chancery/ca/kube"
	"github.com/chancery-project/chancery/ca/store"
)

// Types of the Secrets. They name the layout of the data, so that a later one can be told apart.
const (
	documentType = "chancery/state-v1"
	notesType    = "chancery/notes-v1"
)

const (
	// DefaultName is that of the objects where Config gives none.
	DefaultName = "chancery-state"
	// MaxNote is the most bytes of one note: all notes share a Secret, of at most 1 MiB, so that four replicas always have room. A
	// document may have what is at most 1 MiB after gzip.
	MaxNote = 256 << 10
	// patience bounds each call.
	patience = 10 * time.Second
	// retries is how often client-go sends a request again by itself, a second later or when the API server says: the connection
	// ended, or the server has too much to do. Its default, 10, would have every call of an outage take all its time.
	retries = 1
)

// Config says which objects hold the state, and how their cluster is reached.
type Config struct {
	// Namespace of the Secrets and the Lease. Required. Who can read its Secrets has the document, but without the sealing key
	// no private key in it; who can write them can roll the document back or delete it, but not forge it.
	Namespace string `json:"namespace"`
	// Name of the Secret with the document and of the Lease; the Secret with the replicas' notes has -notes after it. Default
	// chancery-state. Two authorities may share a namespace under two names.
	Name string `json:"name,omitempty"`
	// Kubeconfig is a file that says how to reach the API server. It or InCluster is required. It is trusted: it may name
	// programs to run for credentials.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// InCluster reaches the API server by the service account of the pod that the server runs in, instead of Kubeconfig. Default
	// false.
	InCluster bool `json:"inCluster,omitempty"`
}

// Paths are the fields that name files, for who makes them absolute.
func (c *Config) Paths() []*string { return []*string{&c.Kubeconfig} }

var (
	namespaceForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	nameForm      = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
)

// maxName leaves room for -notes in an object's name.
const maxName = 240

// Check says what is wrong with the config. It asks nobody.
func (c *Config) Check() error {
	switch {
	case !namespaceForm.MatchString(c.Namespace):
		return fmt.Errorf("namespace: %.80q is no name of a namespace; give one that exists, such as chancery", c.Namespace)
	case c.Name != "" && (len(c.Name) > maxName || !nameForm.MatchString(c.Name)):
		return fmt.Errorf("name: %.80q is no name of a Secret; at most %d of a-z, 0-9, and between these - and . are allowed, such as %s", c.Name, maxName, DefaultName)
	case c.Kubeconfig == "" && !c.InCluster:
		return errors.New("neither kubeconfig nor inCluster is set; one should say how to reach the API server")
	case c.Kubeconfig != "" && c.InCluster:
		return errors.New("kubeconfig and inCluster are both set; one should say how to reach the API server")
	}
	return nil
}

// Store is a store.Store. A request to the API server is made by the call that needs it and ends with it, but for Watch.
type Store struct {
	namespace, name string
	core, coord     rest.Interface
	params          runtime.ParameterCodec
	client          interface{ CloseIdleConnections() }
	log             *slog.Logger
	life            context.Context // until Close
	end             context.CancelFunc

	mu   sync.Mutex // guards seen, never held over a request
	seen observed   // of the lease
}

var _ store.Store = (*Store)(nil)

// Open opens a store whose objects are all there. A nil logger logs nothing.
func Open(ctx context.Context, c Config, log *slog.Logger) (*Store, error) {
	s, err := connect(c, log)
	if err != nil {
		return nil, err
	}
	if err := s.look(ctx); err != nil {
		s.Close()
		return nil, fmt.Errorf("opening the state in Kubernetes: %w", err)
	}
	return s, nil
}

// Create opens a store and makes what objects are missing, all of them empty: there is no document then. It needs the right
// to create Secrets and Leases if any is missing.
func Create(ctx context.Context, c Config, log *slog.Logger) (*Store, error) {
	s, err := connect(c, log)
	if err != nil {
		return nil, err
	}
	err = s.makeMissing(ctx)
	if err == nil {
		err = s.look(ctx) // what was there already may be of another type
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("creating the state in Kubernetes: %w", err)
	}
	return s, nil
}

// connect makes a client. It asks the API server nothing.
func connect(c Config, log *slog.Logger) (*Store, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	cfg, client, err := kube.Client(c.Kubeconfig)
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Secret{})
	scheme.AddKnownTypes(coordination.SchemeGroupVersion, &coordination.Lease{})
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	metav1.AddToGroupVersion(scheme, coordination.SchemeGroupVersion)
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		return nil, err
	}
	s := &Store{
		namespace: c.Namespace, name: c.Name, params: runtime.NewParameterCodec(scheme), client: client, log: log,
	}
	if s.name == "" {
		s.name = DefaultName
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.life, s.end = context.WithCancel(context.Background())
	if s.core, err = kube.Group(cfg, client, scheme, corev1.SchemeGroupVersion, "/api"); err == nil {
		s.coord, err = kube.Group(cfg, client, scheme, coordination.SchemeGroupVersion, "/apis")
	}
	if err != nil {
		return nil, fmt.Errorf("making a client from kubeconfig %q: %w", c.Kubeconfig, err)
	}
	return s, nil
}

// look reads each object once, so that a missing one is told at the start and not when it is first written.
func (s *Store) look(ctx context.Context) error {
	if _, _, err := s.Load(ctx); err != nil && !errors.Is(err, errEmpty) {
		return err
	}
	if _, err := s.Notes(ctx); err != nil {
		return err
	}
	return s.do(ctx, "reading", s.leaseObject(), func(ctx context.Context) error {
		_, err := s.lease(ctx)
		return err
	})
}

func (s *Store) makeMissing(ctx context.Context) error {
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: name, Namespace: s.namespace, Labels: map[string]string{
			"app.kubernetes.io/managed-by": "chancery", "app.kubernetes.io/component": "authority-state",
		}}
	}
	return errors.Join(
		s.makeOne(ctx, s.documentSecret(), &corev1.Secret{ObjectMeta: meta(s.name), Type: documentType}),
		s.makeOne(ctx, s.notesSecret(), &corev1.Secret{ObjectMeta: meta(s.notesName()), Type: notesType}),
		s.makeOne(ctx, s.leaseObject(), &coordination.Lease{ObjectMeta: meta(s.name)}),
	)
}

// makeOne makes an object unless it is there. It asks first, so that who may not create can open what is all there.
func (s *Store) makeOne(ctx context.Context, o object, body runtime.Object) error {
	return s.do(ctx, "creating", o, func(ctx context.Context) error {
		err := s.get(ctx, o, body.DeepCopyObject())
		if !apierrors.IsNotFound(err) {
			return err
		}
		err = o.group.Post().Namespace(s.namespace).Resource(o.resource).Body(body).Do(ctx).Error()
		if apierrors.IsForbidden(err) {
			return fmt.Errorf("%w; who runs `chancery authority init` should have the right to create secrets and leases in namespace %s", err, s.namespace)
		} else if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	})
}

// Close implements store.Store. The objects stay as they are; a lease that is held is left to end.
func (s *Store) Close() error {
	s.end()
	s.client.CloseIdleConnections()
	return nil
}

// object is one of the three.
type object struct {
	group          rest.Interface
	kind           string
	resource, name string
}

func (s *Store) documentSecret() object { return object{s.core, "Secret", "secrets", s.name} }
func (s *Store) notesSecret() object    { return object{s.core, "Secret", "secrets", s.notesName()} }
func (s *Store) leaseObject() object    { return object{s.coord, "Lease", "leases", s.name} }
func (s *Store) notesName() string      { return s.name + "-notes" }

// do runs a call that is about one object: within the time that a call has, until Close, and with errors that say which it was.
func (s *Store) do(ctx context.Context, doing string, o object, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	err := ctx.Err()
	if err == nil && s.life.Err() == nil {
		err = call(ctx)
	}
	switch {
	case errors.Is(err, store.ErrMissing), errors.Is(err, store.ErrConflict):
	case s.life.Err() != nil:
		err = store.ErrClosed
	case err != nil && ctx.Err() != nil && !errors.Is(err, ctx.Err()):
		err = fmt.Errorf("%w (%w)", ctx.Err(), err)
	}
	if err != nil {
		return fmt.Errorf("%s %s %s/%s: %w", doing, o.kind, s.namespace, o.name, err)
	}
	return nil
}

func (s *Store) get(ctx context.Context, o object, into runtime.Object) error {
	return s.hint(o.group.Get().MaxRetries(retries).Namespace(s.namespace).Resource(o.resource).Name(o.name).Do(ctx).Into(into))
}

// patch changes the fields that a JSON merge patch (RFC 7396) has; with metadata.resourceVersion in it only if the object is
// still that version, else the answer is a conflict.
func (s *Store) patch(ctx context.Context, o object, patch any) error {
	body, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	// The answer is the object once more; we have no use for it.
	return s.hint(o.group.Patch(types.MergePatchType).MaxRetries(retries).Namespace(s.namespace).Resource(o.resource).Name(o.name).Body(body).Do(ctx).Error())
}

// version is the part of a patch that says what it is made for.
type version struct {
	ResourceVersion string `json:"resourceVersion"`
}

// hint says what to do about an error where that is known.
func (s *Store) hint(err error) error {
	switch {
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w; its account should have the rights to get, watch and patch secrets %s and %s and lease %s in namespace %s, as in deploy/kubernetes/rbac.yaml",
			err, s.name, s.notesName(), s.name, s.namespace)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%w; `chancery authority init` makes it, and a server never does", err)
	}
	return err
}

// How long is waited before a change that met another one is made anew.
const (
	retryFirst = 10 * time.Millisecond
	retryMost  = time.Second
)

// pause waits before the n-th try, longer each time and never for the same time as somebody else. False: ctx ended.
func pause(ctx context.Context, n int, first, most time.Duration) bool {
	d := min(first<<min(n, 16), most)
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d/2 + rand.N(d)):
		return true
	}
}
