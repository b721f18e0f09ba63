package kube

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	authn "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/chancery-project/chancery/csr"
)

// Keys of what a TokenReview says beside the user name.
const (
	extraPodName    = "authentication.kubernetes.io/pod-name"
	extraPodUID     = "authentication.kubernetes.io/pod-uid"
	extraNode       = "authentication.kubernetes.io/node-name"
	extraCredential = "authentication.kubernetes.io/credential-id"
)

// reviewed is review with a bound on how many run at once. Calls with the same key, unless it is empty, share one.
func (c *Cluster) reviewed(ctx context.Context, key string, p *parsedToken, now time.Time) (v *verdict, err error) {
	f := func(ctx context.Context) (*verdict, error) { return c.review(ctx, p, now) }
	if key == "" {
		v, err = c.reviews.run(ctx, f)
	} else {
		v, err = c.reviews.shared(ctx, key, f)
	}
	if d := (*csr.Denial)(nil); err != nil && !errors.As(err, &d) {
		return nil, deny(codes.Unavailable, csr.ReasonNotReady, "asking for a TokenReview: %v", err)
	}
	return v, err
}

// review asks the API server about a token. What the token claims is only used to refuse it without asking: a token
// of another issuer, for another audience or past its time is not sent anywhere. Who calls is what the answer says.
func (c *Cluster) review(ctx context.Context, p *parsedToken, now time.Time) (*verdict, error) {
	claimed, err := c.readClaims(p.payload)
	if err != nil {
		return nil, err
	}
	if err := c.checkTimes(claimed, now); err != nil {
		return nil, err
	}
	start := time.Now()
	status, err := c.askReview(ctx, p.token)
	c.metrics.reviewed(time.Since(start), err == nil)
	if err != nil {
		return nil, deny(codes.Unavailable, csr.ReasonNotReady, "asking for a TokenReview: %v", err)
	}
	caller, err := c.readReview(status)
	if err != nil {
		return nil, err
	}
	return &verdict{
		caller: caller, audiences: status.Audiences,
		expires: claimed.expires, notBefore: claimed.notBefore, until: earlier(claimed.expires, now.Add(maxCached)),
	}, nil
}

func (c *Cluster) askReview(ctx context.Context, token string) (*authn.TokenReviewStatus, error) {
	r, err := c.client.AuthenticationV1().TokenReviews().Create(ctx, &authn.TokenReview{
		Spec: authn.TokenReviewSpec{Token: token, Audiences: c.audiences},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return &r.Status, nil
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
	ns, sa, err := splitUsername(s.User.Username)
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
		if err := checkPodRef(caller.PodName, caller.PodUID); err != nil {
			return refuse("pod: %v", err)
		}
	}
	return caller, nil
}
