// Package kube owns the roots as they are published in a Kubernetes cluster: two ClusterTrustBundles, and ConfigMaps in each namespace that
// the config selects. It is level-triggered: what is there is followed and compared with what should be, and what fails is tried again for
// ever, with backoff.
//
// Writes are server-side applies of the fields that are ours, under a field manager of our own, so that keys, labels and annotations of
// others stay. What we published and somebody changed is put back. What another manager owned first is reported, and taken only where the
// config says so; and who takes the same key again and again, such as another control plane that publishes its own roots there, is left with
// it and reported, as two who put it back for ever would be worse for its readers than either.
//
// It refuses to delete anything: who has the roots from an object that is not published any more would stand without. It works only where
// this replica drives.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	certificatesv1 "k8s.io/api/certificates/v1"
	certificatesv1beta1 "k8s.io/api/certificates/v1beta1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/chancery-project/chancery/trust"
	follow "github.com/chancery-project/chancery/trust/kube"
	"github.com/chancery-project/chancery/trust/publish"
)

// troubling is how long it may take until it is known what there is.
const troubling = time.Minute

// callTime bounds each call to the API server.
const callTime = 10 * time.Second

// Config says what is published, and where.
type Config struct {
	REST *rest.Config // see ca/kube.Client
	HTTP *http.Client
	// Bundle returns the roots of this moment; it is asked each second.
	Bundle func() (*trust.Bundle, error)
	// Drives reports whether this replica does the work; it is asked each second.
	Drives func() bool
	// Manager is our field manager.
	Manager string
	// Force takes keys that another manager owned first.
	Force bool
	// Signer is the signer name of the ClusterTrustBundles; empty: there are none. Lead is how much earlier the canary gets a new set.
	Signer string
	Lead   time.Duration
	// ConfigMaps says what each has, by name; Namespaces selects where.
	ConfigMaps map[string][]Key
	Namespaces labels.Selector
	// Hint is the refresh hint in SPIFFE bundles.
	Hint    time.Duration
	Logger  *slog.Logger
	Metrics prometheus.Registerer
}

// Key is a key of a ConfigMap.
type Key struct {
	Name string
	Of   func(publish.Contents) string
}

// Publisher publishes.
type Publisher struct {
	config  Config
	core    rest.Interface
	scheme  *runtime.Scheme
	want    atomic.Pointer[publish.Contents]
	failing atomic.Pointer[error] // of the bundle
	metrics *metrics

	mu    sync.Mutex // guards the rest
	trust *bundles   // nil where this replica does not drive, as is
	maps  *configMaps
	began time.Time // to drive
}

// New makes a publisher. It asks the API server nothing.
func New(c Config) (*Publisher, error) {
	s := runtime.NewScheme()
	s.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.ConfigMap{}, &corev1.ConfigMapList{}, &corev1.Namespace{}, &corev1.NamespaceList{})
	s.AddKnownTypes(certificatesv1.SchemeGroupVersion, &certificatesv1.ClusterTrustBundle{}, &certificatesv1.ClusterTrustBundleList{})
	s.AddKnownTypes(certificatesv1beta1.SchemeGroupVersion, &certificatesv1beta1.ClusterTrustBundle{}, &certificatesv1beta1.ClusterTrustBundleList{})
	metav1.AddToGroupVersion(s, corev1.SchemeGroupVersion)
	metav1.AddToGroupVersion(s, certificatesv1.SchemeGroupVersion)
	metav1.AddToGroupVersion(s, certificatesv1beta1.SchemeGroupVersion)
	core, err := follow.Group(c.REST, c.HTTP, s, corev1.SchemeGroupVersion)
	if err != nil {
		return nil, fmt.Errorf("making a client: %w", err)
	}
	p := &Publisher{config: c, core: core, scheme: s}
	p.metrics = newMetrics(c.Metrics, p)
	return p, nil
}

// Run publishes, as long as this replica drives, until ctx ends.
func (p *Publisher) Run(ctx context.Context) error {
	defer p.config.HTTP.CloseIdleConnections()
	for ctx.Err() == nil {
		if !p.config.Drives() {
			p.pause(ctx)
			continue
		}
		p.config.Logger.Info("this replica publishes roots in Kubernetes")
		p.drive(ctx)
		p.config.Logger.Info("this replica does not publish roots in Kubernetes any more")
	}
	return nil
}

func (p *Publisher) pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(time.Second):
	}
}

// drive publishes until another replica drives.
func (p *Publisher) drive(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p.look()
	var b *bundles
	var m *configMaps
	var g sync.WaitGroup
	if p.config.Signer != "" {
		b = newBundles(p)
		g.Go(func() { b.run(ctx) })
	}
	if len(p.config.ConfigMaps) > 0 {
		m = newMaps(p)
		g.Go(func() { m.run(ctx) })
	}
	p.set(b, m)
	for ctx.Err() == nil && p.config.Drives() {
		if p.look() && m != nil {
			m.all()
		}
		p.pause(ctx)
	}
	cancel()
	g.Wait()
	p.set(nil, nil)
}

func (p *Publisher) set(b *bundles, m *configMaps) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trust, p.maps, p.began = b, m, time.Now()
}

func (p *Publisher) parts() (*bundles, *configMaps) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.trust, p.maps
}

// look takes over the roots of the moment, and reports whether they are others.
func (p *Publisher) look() bool {
	b, err := p.config.Bundle()
	var c publish.Contents
	if err == nil {
		c, err = publish.Of(b, p.config.Hint)
	}
	if err != nil {
		if p.failing.Swap(&err) == nil {
			p.config.Logger.Error("roots are not published", "reason", err.Error())
		}
		return false
	}
	p.failing.Store(nil)
	was := p.want.Swap(&c)
	return was == nil || *was != c
}

// Unpublished says what does not have the roots of the moment yet, of what this replica publishes: a rotation waits for it, as nobody can
// have read what is not there. What another manager holds is not ours. Empty where this replica does not drive.
func (p *Publisher) Unpublished() []string {
	if !p.config.Drives() {
		return nil
	}
	want := p.want.Load()
	b, m := p.parts()
	if want == nil || b == nil && m == nil {
		return []string{"roots are not published in Kubernetes yet"}
	}
	if now, err := p.config.Bundle(); err != nil || now.Generation() != want.Generation {
		return []string{"the newest roots are not published in Kubernetes yet"}
	}
	var out []string
	if b != nil {
		out = append(out, b.unpublished(*want)...)
	}
	if m != nil {
		out = append(out, m.unpublished(*want)...)
	}
	return out
}

// Trouble returns what keeps roots from being published, for people; nil if nothing does, or this replica does not drive.
func (p *Publisher) Trouble() error {
	if !p.config.Drives() {
		return nil
	}
	var errs []error
	if err := p.failing.Load(); err != nil {
		errs = append(errs, *err)
	}
	b, m := p.parts()
	if b != nil {
		errs = append(errs, b.trouble())
	}
	if m != nil {
		errs = append(errs, m.trouble())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.began) < troubling {
		errs = slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, follow.ErrNotListed) })
	}
	return errors.Join(errs...)
}
