// Package kube owns the signers of Kubernetes' own certificate APIs, as the API server sees them: it follows PodCertificateRequests and
// CertificateSigningRequests of the configured signer names, has them decided by csr/signers, and writes what came out into their status,
// in one write each.
//
// What can be met later stays untouched and is tried again, for ever and with backoff: a status that says Failed makes the kubelet give up
// on the pod. A certificate that was signed and whose status could not be written is written again, not signed again; only a server that
// ended in between leaves it to the next one, which signs another: the first is in the logs, was given to nobody and counts until it ends.
//
// It refuses to work where another replica drives, and to hold more than it can sign in time: nodes take turns, a few requests are worked
// on at once.
package kube

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/chancery-project/chancery/ca/kube"
	"github.com/chancery-project/chancery/csr/signers"
	follow "github.com/chancery-project/chancery/trust/kube"
)

// callTime bounds each call to the API server.
const callTime = 10 * time.Second

// Config says what is signed.
type Config struct {
	// Kubeconfig reaches the API server; empty: the service account of the pod that the server runs in.
	Kubeconfig string
	// PodSigner and NamedSigner are the signer names of PodCertificateRequests and CertificateSigningRequests; empty: none are signed.
	PodSigner, NamedSigner string
	// Drives reports whether this replica does the work; it is asked each second.
	Drives  func() bool
	Logger  *slog.Logger
	Metrics prometheus.Registerer
}

// Controller signs what the API server holds.
type Controller struct {
	config  Config
	client  rest.Interface
	http    *http.Client
	lines   []*line
	metrics *metrics
}

// New makes a controller. It asks the API server nothing.
func New(c Config, signer *signers.Signer) (*Controller, error) {
	cfg, transport, err := kube.Client(c.Kubeconfig)
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(certificatesv1.SchemeGroupVersion, &certificatesv1.PodCertificateRequest{}, &certificatesv1.PodCertificateRequestList{},
		&certificatesv1.CertificateSigningRequest{}, &certificatesv1.CertificateSigningRequestList{})
	metav1.AddToGroupVersion(scheme, certificatesv1.SchemeGroupVersion)
	client, err := follow.Group(cfg, transport, scheme, certificatesv1.SchemeGroupVersion)
	if err != nil {
		return nil, fmt.Errorf("making a client from kubeconfig %q: %w", c.Kubeconfig, err)
	}
	ctl := &Controller{config: c, client: client, http: transport, metrics: newMetrics(c.Metrics)}
	if c.PodSigner != "" {
		ctl.lines = append(ctl.lines, ctl.newLine(scheme, pods{signer}, c.PodSigner))
	}
	if c.NamedSigner != "" {
		ctl.lines = append(ctl.lines, ctl.newLine(scheme, named{signer}, c.NamedSigner))
	}
	return ctl, nil
}

// Run signs, as long as this replica drives, until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	defer c.http.CloseIdleConnections()
	for {
		if !wait(ctx, c.config.Drives) {
			return nil
		}
		c.config.Logger.Info("this replica signs for Kubernetes")
		c.drive(ctx)
		if ctx.Err() != nil {
			return nil
		}
		c.config.Logger.Info("this replica does not sign for Kubernetes any more; another one drives")
	}
}

// wait waits until something is so. False: ctx ended.
func wait(ctx context.Context, so func() bool) bool {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for !so() {
		select {
		case <-ctx.Done():
			return false
		case <-ticker.C:
		}
	}
	return ctx.Err() == nil
}

func (c *Controller) drive(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var g errgroup.Group
	for _, l := range c.lines {
		g.Go(func() error { l.run(ctx); return nil })
	}
	wait(ctx, func() bool { return !c.config.Drives() })
	cancel()
	_ = g.Wait() // none fails
}

// Trouble returns what keeps requests from being signed, by signer name; nil where this replica does not drive.
func (c *Controller) Trouble() map[string]error {
	if !c.config.Drives() {
		return nil
	}
	out := map[string]error{}
	for _, l := range c.lines {
		if err := l.trouble(); err != nil {
			out[l.signer] = err
		}
	}
	return out
}

// hint names the rights that lack.
func hint(err error, resource, signer string) error {
	switch {
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err) && strings.Contains(err.Error(), `not permitted to "sign"`):
		return fmt.Errorf("%w; its account should have the rights to list and watch %s, to update %s/status, and the verb sign on signers %s, all of certificates.k8s.io, as in deploy/kubernetes/signing/rbac.yaml",
			err, resource, resource, signer)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%w; the API server should serve certificates.k8s.io/v1 %s (Kubernetes 1.37)", err, resource)
	}
	return err
}
