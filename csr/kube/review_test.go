package kube

import (
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"google.golang.org/grpc/codes"
	authn "k8s.io/api/authentication/v1"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/jwt"
	"github.com/chancery-project/chancery/csr/jwt/jwttest"
)

// approve is what an API server says of jwttest.Claims().
func approve(authn.TokenReviewSpec) authn.TokenReviewStatus {
	return authn.TokenReviewStatus{
		Authenticated: true,
		Audiences:     []string{jwttest.Audience},
		User: authn.UserInfo{
			Username: "system:serviceaccount:foo:web",
			Groups:   []string{"system:serviceaccounts"},
			Extra: map[string]authn.ExtraValue{
				extraPodName: {"web-0"}, extraPodUID: {"uid-0"}, extraNode: {"node-1"}, extraCredential: {"JTI=1"},
			},
		},
	}
}

func reviewing(mode Mode, review func(authn.TokenReviewSpec) authn.TokenReviewStatus) func(*apiServer, *Config) {
	return func(s *apiServer, cfg *Config) { cfg.TokenReview, s.review = mode, review }
}

// reviews checks how many TokenReviews there were.
func (w watching) reviews(n int) {
	w.Helper()
	if got := w.s.count("review"); got != n {
		w.Errorf("%d TokenReviews, want %d", got, n)
	}
}

func TestD18Never(t *testing.T) {
	watched(t, func(w watching) {
		_, err := w.c.Authenticate(w.Context(), jwttest.Sign(w, "ed", "ed", jose.EdDSA, jwttest.Claims()))
		jwttest.WantDenial(w, err, codes.Unauthenticated, csr.ReasonTokenKey)
		w.reviews(0)
	}, reviewing(Never, approve))
}

func TestD18Fallback(t *testing.T) {
	pq := func(token string) string { // another header; only the API server could say what that signature is worth
		_, rest, _ := strings.Cut(token, ".")
		return "eyJhbGciOiJNTC1EU0EtNjUiLCJraWQiOiJwcSJ9." + rest // {"alg":"ML-DSA-65","kid":"pq"}
	}
	sig := func(f ...func(jwttest.Object)) func(testing.TB) string {
		return func(t testing.TB) string { return jwttest.Sign(t, "ed", "ed", jose.EdDSA, jwttest.Claims(f...)) }
	}
	now := func() int64 { return time.Now().Unix() }
	for name, tc := range map[string]struct {
		token   func(testing.TB) string
		reviews int
		reason  string
	}{
		"known key":         {func(t testing.TB) string { return jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims()) }, 0, ""},
		"unknown key":       {sig(), 1, ""},
		"unknown algorithm": {func(t testing.TB) string { return pq(sig()(t)) }, 1, ""},
		"bad signature":     {func(t testing.TB) string { return jwttest.Sign(t, "rsa2", "rsa", jose.RS256, jwttest.Claims()) }, 0, csr.ReasonTokenSignature},
		"audience": {func(t testing.TB) string {
			return jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims(jwttest.Set("aud", "x")))
		}, 0, csr.ReasonTokenAudience},
		"unknown key, audience":  {sig(jwttest.Set("aud", "x")), 0, csr.ReasonTokenAudience},
		"unknown key, issuer":    {sig(jwttest.Set("iss", "x")), 0, csr.ReasonTokenIssuer},
		"unknown key, no expiry": {sig(jwttest.Unset("exp")), 0, csr.ReasonTokenMalformed},
		"unknown key, expired":   {func(t testing.TB) string { return sig(jwttest.Set("exp", now()-1))(t) }, 0, csr.ReasonTokenExpired},
		"expired": {func(t testing.TB) string {
			return jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims(jwttest.Set("exp", now()-1)))
		}, 0, csr.ReasonTokenExpired},
		"symmetric": {func(t testing.TB) string {
			return jwttest.SignWith(t, []byte(strings.Repeat("k", 32)), jose.HS256, []byte("{}"))
		}, 0, csr.ReasonTokenKey},
		"none": {func(t testing.TB) string { _, r, _ := strings.Cut(sig()(t), "."); return "eyJhbGciOiJub25lIn0." + r }, 0, csr.ReasonTokenKey},
	} {
		t.Run(name, func(t *testing.T) {
			watched(t, func(w watching) {
				_, err := w.c.Authenticate(w.Context(), tc.token(w))
				jwttest.WantDenial(w, err, codes.Unauthenticated, tc.reason)
				w.reviews(tc.reviews)
			}, reviewing(Fallback, approve))
		})
	}
}

func TestD18FallbackIsCachedForAMinute(t *testing.T) {
	watched(t, func(w watching) {
		short := jwttest.Sign(w, "ed", "ed", jose.EdDSA, jwttest.Claims(jwttest.Set("exp", time.Now().Unix()+30)))
		long := jwttest.Sign(w, "ed", "ed", jose.EdDSA, jwttest.Claims())
		try := func(token string, reviews int, reason string) {
			w.Helper()
			_, err := w.c.Authenticate(w.Context(), token)
			jwttest.WantDenial(w, err, codes.Unauthenticated, reason)
			w.reviews(reviews)
		}
		try(short, 1, "")
		try(long, 2, "")
		try(short, 2, "")
		time.Sleep(30 * time.Second)
		try(short, 2, csr.ReasonTokenExpired)
		time.Sleep(29 * time.Second)
		try(long, 2, "")
		time.Sleep(time.Second)
		try(long, 3, "")
		w.s.remove("foo", "web-0")
		synctest.Wait()
		try(long, 3, csr.ReasonPodGone)
	}, reviewing(Fallback, approve))
}

func TestD18AlwaysAsksEachTime(t *testing.T) {
	watched(t, func(w watching) {
		token := jwttest.Sign(w, "ed", "ed", jose.EdDSA, jwttest.Claims())
		for i := range 3 {
			got, err := w.c.Authenticate(w.Context(), token)
			jwttest.WantDenial(w, err, 0, "")
			w.reviews(i + 1)
			if got.Ends.Before(time.Now()) {
				w.Errorf("the token is said to end at %s", got.Ends)
			}
			got.AttestedAt, got.Ends = time.Time{}, time.Time{}
			want := csr.Caller{Namespace: "foo", ServiceAccount: "web", PodName: "web-0", PodUID: "uid-0", Node: "node-1", CredentialID: "JTI=1"}
			if got != want {
				w.Errorf("got %+v, want %+v", got, want)
			}
		}
		if w.s.count("jwks") != 0 || w.c.tokens.Stats() != (jwt.Stats{}) {
			w.Error("keys or cache were used")
		}
		w.s.remove("foo", "web-0")
		synctest.Wait()
		_, err := w.c.Authenticate(w.Context(), token)
		jwttest.WantDenial(w, err, codes.Unauthenticated, csr.ReasonPodGone)
	}, reviewing(Always, func(spec authn.TokenReviewSpec) authn.TokenReviewStatus {
		if len(spec.Audiences) != 2 || spec.Audiences[0] != jwttest.Audience {
			t.Errorf("spec.audiences is %q", spec.Audiences)
		}
		return approve(spec)
	}))
}

func TestReviewAnswers(t *testing.T) {
	extra := func(key string, values ...string) func(*authn.TokenReviewStatus) {
		return func(s *authn.TokenReviewStatus) {
			s.User.Extra = maps.Clone(s.User.Extra)
			s.User.Extra[key] = values
		}
	}
	for name, tc := range map[string]struct {
		change func(*authn.TokenReviewStatus)
		reason string
	}{
		"refused":            {func(s *authn.TokenReviewStatus) { s.Authenticated, s.Error = false, "token has been invalidated" }, csr.ReasonTokenReview},
		"no audiences":       {func(s *authn.TokenReviewStatus) { s.Audiences = nil }, csr.ReasonTokenAudience},
		"other audiences":    {func(s *authn.TokenReviewStatus) { s.Audiences = []string{"vault"} }, csr.ReasonTokenAudience},
		"a user":             {func(s *authn.TokenReviewStatus) { s.User.Username = "admin" }, csr.ReasonTokenReview},
		"a short user":       {func(s *authn.TokenReviewStatus) { s.User.Username = "system:serviceaccount:foo" }, csr.ReasonTokenReview},
		"a long user":        {func(s *authn.TokenReviewStatus) { s.User.Username += ":x" }, csr.ReasonTokenReview},
		"pod without UID":    {extra(extraPodUID), csr.ReasonTokenReview},
		"two pods":           {extra(extraPodName, "web-0", "web-1"), csr.ReasonTokenReview},
		"another UID":        {extra(extraPodUID, "uid-1"), csr.ReasonPodGone},
		"another node":       {extra(extraNode, "node-2"), csr.ReasonPodMismatch},
		"no node, as before": {extra(extraNode), ""},
		"no pod":             {func(s *authn.TokenReviewStatus) { s.User.Extra = nil }, csr.ReasonTokenNoPod},
		"no credential ID":   {extra(extraCredential), ""},
	} {
		t.Run(name, func(t *testing.T) {
			watched(t, func(w watching) {
				_, err := w.c.Authenticate(w.Context(), jwttest.Sign(w, "ed", "ed", jose.EdDSA, jwttest.Claims()))
				jwttest.WantDenial(w, err, codes.Unauthenticated, tc.reason)
			}, reviewing(Always, func(spec authn.TokenReviewSpec) authn.TokenReviewStatus {
				s := approve(spec)
				tc.change(&s)
				return s
			}))
		})
	}
}

func TestReviewFailuresAreOurs(t *testing.T) {
	for _, mode := range []Mode{Fallback, Always} {
		watched(t, func(w watching) {
			token := jwttest.Sign(w, "ed", "ed", jose.EdDSA, jwttest.Claims())
			w.s.with(func() { w.s.down = true })
			_, err := w.c.Authenticate(w.Context(), token)
			jwttest.WantDenial(w, err, codes.Unavailable, csr.ReasonNotReady)
			w.s.with(func() { w.s.down, w.s.hang = false, true })
			done := make(chan error, 200)
			start := time.Now()
			for range 2 * maxReviews {
				go func() {
					_, err := w.c.Authenticate(w.Context(), token)
					done <- err
				}()
			}
			synctest.Wait()
			w.reviews(map[Mode]int{Fallback: 2, Always: 1 + maxReviews}[mode]) // the same token is asked for once
			for range 2 * maxReviews {
				jwttest.WantDenial(w, <-done, codes.Unavailable, csr.ReasonNotReady)
			}
			if took := time.Since(start); took > reviewTimeout {
				w.Errorf("%s: it took %v", mode, took)
			}
			w.s.with(func() { w.s.hang = false })
			before := w.s.count("review")
			_, err = w.c.Authenticate(w.Context(), token) // no failure was cached
			jwttest.WantDenial(w, err, 0, "")
			w.reviews(before + 1)
		}, reviewing(mode, approve))
	}
}
