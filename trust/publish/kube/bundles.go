package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	certificatesv1beta1 "k8s.io/api/certificates/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	follow "github.com/chancery-project/chancery/trust/kube"
	"github.com/chancery-project/chancery/trust/publish"
)

const trustBundles = "clustertrustbundles"

// bundles publishes the two ClusterTrustBundles.
type bundles struct {
	p      *Publisher
	client rest.Interface
	beta   bool

	mu       sync.Mutex        // guards the rest
	found    map[string]*found // by version
	watches  []*follow.Watch
	err      error
	contests map[string]*contest // by version
	wake     chan struct{}
}

// found is a ClusterTrustBundle that is there.
type found struct {
	publish.Object
	label, signer string
	ours          bool
	other         string // manager of a field of ours, if that is not us
	edited        bool   // somebody has changed the roots, which were ours
}

func newBundles(p *Publisher) *bundles {
	return &bundles{
		p: p, found: map[string]*found{}, contests: map[string]*contest{publish.Live: {}, publish.Canary: {}}, wake: make(chan struct{}, 1),
		err: fmt.Errorf("%s: %w", trustBundles, follow.ErrNotListed),
	}
}

// run publishes until ctx ends.
func (b *bundles) run(ctx context.Context) {
	for tries := 0; ; tries++ {
		err := b.connect(ctx)
		if err == nil {
			break
		}
		b.fail(err)
		if !sleep(ctx, backoff(tries)) {
			return
		}
	}
	var g sync.WaitGroup
	for _, version := range []string{publish.Live, publish.Canary} {
		w := b.watch(version)
		b.mu.Lock()
		b.watches = append(b.watches, w)
		b.mu.Unlock()
		g.Go(func() { w.Run(ctx) })
	}
	tries := 0
	for ctx.Err() == nil {
		err := b.step(ctx)
		b.fail(err)
		pause := time.Second
		if tries++; err == nil {
			tries = 0
		} else {
			pause = backoff(tries)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		case <-b.wake:
			sleep(ctx, 50*time.Millisecond) // several changes at once are one
		}
	}
	g.Wait()
}

func (b *bundles) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil && b.err == nil {
		b.p.config.Logger.Warn("ClusterTrustBundles are not published; it is tried again", "reason", err.Error())
	}
	b.err = err
}

// connect finds out which version of the API there is.
func (b *bundles) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	for _, gv := range []string{certificatesv1.SchemeGroupVersion.String(), certificatesv1beta1.SchemeGroupVersion.String()} {
		raw, err := b.p.core.Get().AbsPath("/apis/"+gv).SetHeader("Accept", "application/json").Do(ctx).Raw()
		if apierrors.IsNotFound(err) {
			continue
		}
		var list metav1.APIResourceList
		if err == nil {
			err = json.Unmarshal(raw, &list)
		}
		if err != nil {
			return fmt.Errorf("asking which resources %s has: %w", gv, err)
		}
		for _, r := range list.APIResources {
			if r.Name != trustBundles {
				continue
			}
			version := certificatesv1.SchemeGroupVersion
			if b.beta = gv != version.String(); b.beta {
				version = certificatesv1beta1.SchemeGroupVersion
			}
			b.client, err = follow.Group(b.p.config.REST, b.p.config.HTTP, b.p.scheme, version)
			return err
		}
	}
	return errors.New("the API server has no ClusterTrustBundles, neither v1 (Kubernetes 1.37) nor v1beta1; turn them on (feature gate ClusterTrustBundle and " +
		"--runtime-config=certificates.k8s.io/v1beta1/clustertrustbundles=true), or leave publishing.clusterTrustBundle out")
}

func (b *bundles) watch(version string) *follow.Watch {
	set := func(f *found) {
		b.mu.Lock()
		b.found[version] = f
		b.mu.Unlock()
		b.tell()
	}
	w := &follow.Watch{
		Client: b.client, Scheme: b.p.scheme, Resource: trustBundles, Fields: "metadata.name=" + publish.BundleName(b.p.config.Signer, version), Logger: b.p.config.Logger,
		Object: &certificatesv1.ClusterTrustBundle{}, List: func() runtime.Object { return &certificatesv1.ClusterTrustBundleList{} },
		Put: func(o runtime.Object) { set(b.read(o)) }, Drop: func(runtime.Object) { set(nil) },
		Replace: func(all []runtime.Object) { // in one step: one that is missing is made at once, before the canary's time is over
			var f *found
			for _, o := range all {
				f = b.read(o)
			}
			set(f)
		}, Hint: b.hint,
	}
	if b.beta {
		w.Object, w.List = &certificatesv1beta1.ClusterTrustBundle{}, func() runtime.Object { return &certificatesv1beta1.ClusterTrustBundleList{} }
	}
	return w
}

func (b *bundles) tell() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

func (b *bundles) read(o runtime.Object) *found {
	var m *metav1.ObjectMeta
	f := new(found)
	switch x := o.(type) {
	case *certificatesv1.ClusterTrustBundle:
		m, f.Roots, f.signer = &x.ObjectMeta, x.Spec.TrustBundle, x.Spec.SignerName
	case *certificatesv1beta1.ClusterTrustBundle:
		m, f.Roots, f.signer = &x.ObjectMeta, x.Spec.TrustBundle, x.Spec.SignerName
	default:
		return f
	}
	f.label = m.Labels[publish.VersionLabel]
	f.Since, _ = time.Parse(time.RFC3339, m.Annotations[publish.SinceAnnotation]) // zero: not known
	f.ours, f.other = owners(m.ManagedFields, b.p.config.Manager, "f:spec\x00f:trustBundle", "f:metadata\x00f:labels\x00f:"+publish.VersionLabel,
		"f:metadata\x00f:annotations\x00f:"+publish.SinceAnnotation)
	const roots = "f:spec\x00f:trustBundle"
	if _, other := owners(m.ManagedFields, b.p.config.Manager, roots); f.ours && other != "" {
		f.edited = !manages(m.ManagedFields, b.p.config.Manager, roots)
	}
	return f
}

// step writes what is to be written now.
func (b *bundles) step(ctx context.Context) error {
	want := b.p.want.Load()
	if want == nil {
		return errors.New("there are no roots to publish")
	}
	b.mu.Lock()
	for _, w := range b.watches {
		if err := w.Err(); err != nil {
			b.mu.Unlock()
			return err
		}
	}
	live, canary := b.get(publish.Live), b.get(publish.Canary)
	b.mu.Unlock()
	now := time.Now()
	next := publish.Next(live.Object, canary.Object, want.Roots, b.p.config.Lead, now)
	var errs []error
	if next.Canary || canary.label != publish.Canary {
		if !next.Canary {
			next.Since = canary.Since
		}
		errs = append(errs, b.write(ctx, publish.Canary, want.Roots, canary, map[string]string{publish.SinceAnnotation: next.Since.Format(time.RFC3339)}))
	}
	switch {
	case next.Live, live.edited && live.Roots != want.Roots: // nobody reads what was there before: it is not waited for the canary
		errs = append(errs, b.write(ctx, publish.Live, want.Roots, live, nil))
	case live.label != publish.Live && live.Roots != "":
		errs = append(errs, b.write(ctx, publish.Live, live.Roots, live, nil))
	}
	return errors.Join(errs...)
}

// get returns what is found. Caller holds mu.
func (b *bundles) get(version string) found {
	if f := b.found[version]; f != nil {
		return *f
	}
	return found{}
}

func (b *bundles) write(ctx context.Context, version, roots string, is found, annotations map[string]string) error {
	name, c := publish.BundleName(b.p.config.Signer, version), b.contests[version]
	now := time.Now()
	if now.Before(c.until) && is.other != "" {
		return fmt.Errorf("ClusterTrustBundle %s is left to %s until %s", name, c.held, c.until.UTC().Format(time.RFC3339))
	}
	force, err := c.force(is.ours, is.other, b.p.config.Force, now)
	if err != nil {
		return fmt.Errorf("ClusterTrustBundle %s: %w", name, err)
	}
	o := applied{
		APIVersion: b.version(), Kind: "ClusterTrustBundle", Spec: &bundleSpec{b.p.config.Signer, roots},
		Metadata: metadata{Name: name, Labels: map[string]string{publish.VersionLabel: version}, Annotations: annotations},
	}
	if err := b.p.apply(ctx, b.client, trustBundles, o, force); err != nil {
		return fmt.Errorf("writing ClusterTrustBundle %s: %w", name, b.hint(err))
	}
	if force {
		b.p.config.Logger.Warn("what was changed in a ClusterTrustBundle has been put back", "name", name, "by", is.other)
	}
	b.p.config.Logger.Info("roots published", "cluster_trust_bundle", name)
	b.mu.Lock()
	defer b.mu.Unlock()
	f := &found{Object: publish.Object{Roots: roots}, label: version, ours: true}
	f.Since, _ = time.Parse(time.RFC3339, annotations[publish.SinceAnnotation])
	b.found[version] = f
	return nil
}

func (b *bundles) version() string {
	if b.beta {
		return certificatesv1beta1.SchemeGroupVersion.String()
	}
	return certificatesv1.SchemeGroupVersion.String()
}

// hint names the rights that lack, or the setting.
func (b *bundles) hint(err error) error {
	switch {
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w; its account should have the rights to list, watch, create and patch clustertrustbundles %s and %s, and the verb attest on signers %s, all of certificates.k8s.io, as in deploy/kubernetes/publishing/rbac.yaml",
			err, publish.BundleName(b.p.config.Signer, publish.Live), publish.BundleName(b.p.config.Signer, publish.Canary), b.p.config.Signer)
	case apierrors.IsConflict(err):
		return fmt.Errorf("%w; it is another manager's: take it away there, choose another signerName, or set publishing.force", err)
	}
	return err
}

func (b *bundles) unpublished(want publish.Contents) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if live := b.get(publish.Live); live.Roots != want.Roots {
		return []string{fmt.Sprintf("ClusterTrustBundle %s does not have the new roots yet", publish.BundleName(b.p.config.Signer, publish.Live))}
	}
	return nil
}

func (b *bundles) trouble() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}
