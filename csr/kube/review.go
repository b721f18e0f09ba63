package kube

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	authn "k8s.io/api/authentication/v1"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/jwt"
)

// Keys of what a TokenReview says beside the user name.
const (
	extraPodName    = "authentication.kubernetes.io/pod-name"
	extraPodUID     = "authentication.kubernetes.io/pod-uid"
	extraNode       = "authentication.kubernetes.io/node-name"
	extraCredential = "authentication.kubernetes.io/credential-id"
)

// review asks the API server about a token. Calls with the same token share one answer, except with Always.
func (c *Cluster) review(ctx context.Context, token string) (jwt.Answer, error) {
	ask := func(ctx context.Context) (jwt.Answer, error) { return c.askReview(ctx, token) }
	var a jwt.Answer
	var err error
	if c.mode == Always {
		a, err = c.reviews.run(ctx, ask)
	} else {
		a, err = c.reviews.shared(ctx, token, ask)
	}
	if d := (*csr.Denial)(nil); err != nil && !errors.As(err, &d) {
		return jwt.Answer{}, deny(codes.Unavailable, csr.ReasonNotReady, "asking for a TokenReview: %v", err)
	}
	return a, err
}

func (c *Cluster) askReview(ctx context.Context, token string) (jwt.Answer, error) {
	start := time.Now()
	status, err := c.client.reviewToken(ctx, authn.TokenReviewSpec{Token: token, Audiences: c.audiences})
	c.metrics.reviewed(time.Since(start), err == nil)
	if err != nil {
		return jwt.Answer{}, err
	}
	caller, err := c.readReview(status)
	return jwt.Answer{Caller: caller, Audiences: status.Audiences}, err
}

// readReview reads an answer. An API server that does not know audiences would leave status.audiences empty and have
// checked nothing; that is a refusal.
func (c *Cluster) readReview(s *authn.TokenReviewStatus) (csr.Caller, error) {
	refuse := func(format string, args ...any) (csr.Caller, error) {
		return csr.Caller{}, deny(codes.Unauthenticated, csr.ReasonTokenReview, "TokenReview: "+format, args...)
	}
	if !s.Authenticated {
		return refuse("not authenticated: %.300s", s.Error)
	}
	if !slices.ContainsFunc(s.Audiences, func(a string) bool { return slices.Contains(c.audiences, a) }) {
		return csr.Caller{}, deny(codes.Unauthenticated, csr.ReasonTokenAudience, "TokenReview: valid for %.200q; one of %q is needed", s.Audiences, c.audiences)
	}
	ns, sa, err := jwt.ParseUser(s.User.Username)
	if err != nil {
		return refuse("user: %v", err)
	}
	extra := func(key string) string {
		if v := s.User.Extra[key]; len(v) == 1 {
			return v[0]
		}
		return ""
	}
	caller := csr.Caller{
		Namespace: ns, ServiceAccount: sa,
		PodName: extra(extraPodName), PodUID: extra(extraPodUID),
		Node: extra(extraNode), CredentialID: extra(extraCredential),
	}
	if caller.PodName != "" || caller.PodUID != "" {
		if err := jwt.CheckPod(caller.PodName, caller.PodUID); err != nil {
			return refuse("pod: %v", err)
		}
	}
	return caller, nil
}
