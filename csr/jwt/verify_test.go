package jwt

import (
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/jwt/jwttest"
)

func opener(file string) func(context.Context) (io.ReadCloser, error) {
	return func(context.Context) (io.ReadCloser, error) { return os.Open(file) }
}

// fileVerifier verifies with a file of the given keys.
func fileVerifier(t testing.TB, ids ...string) *Verifier {
	t.Helper()
	return newVerifier(t, Config{Keys: opener(jwttest.File(t, jwttest.KeySet(t, ids...)))})
}

func newVerifier(t testing.TB, cfg Config) *Verifier {
	t.Helper()
	cfg.Issuer, cfg.Audiences, cfg.Poll = jwttest.Issuer, []string{jwttest.Audience, "chancery"}, 5*time.Minute
	v, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func verify(t testing.TB, v *Verifier, token string) (csr.Caller, error) {
	return v.Verify(t.Context(), token, time.Now())
}

// run runs the verifier until the test ends. For synctest bubbles.
func run(t testing.TB, v *Verifier) {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	go v.Run(ctx)
}

func TestNewRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"issuer":           {func(c *Config) { c.Issuer = "" }, "issuer is empty"},
		"audiences":        {func(c *Config) { c.Audiences = nil }, "audiences is empty"},
		"empty audience":   {func(c *Config) { c.Audiences = []string{"a", ""} }, "empty entry"},
		"default audience": {func(c *Config) { c.Audiences = []string{jwttest.Issuer} }, "API server's own audience"},
		"nobody to vouch":  {func(c *Config) { c.Keys = nil }, "neither keys nor an issuer"},
		"poll":             {func(c *Config) { c.Poll = 0 }, "poll should be"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Issuer: jwttest.Issuer, Audiences: []string{jwttest.Audience}, Keys: opener("/nonexistent"), Poll: time.Second}
			tc.change(&cfg)
			if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
		})
	}
}

// TestD18Ask goes over what is asked and what is kept of an answer; which tokens are asked about is in csr/kube.
func TestD18Ask(t *testing.T) {
	answer := Answer{Caller: csr.Caller{Namespace: "bar", ServiceAccount: "db"}, Audiences: []string{jwttest.Audience}}
	for name, tc := range map[string]struct {
		keys  bool
		asked int // in two calls
	}{"no key fits": {true, 1}, "no keys": {false, 2}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var asked []string
				cfg := Config{Ask: func(_ context.Context, token string) (Answer, error) {
					asked = append(asked, token)
					return answer, nil
				}}
				if tc.keys {
					cfg.Keys = (&source{data: jwttest.KeySet(t, "p256")}).open
				}
				v := newVerifier(t, cfg)
				token := jwttest.Sign(t, "ed", "ed", jose.EdDSA, jwttest.Claims())
				for range 2 {
					got, err := verify(t, v, token)
					if got.Ends.Before(time.Now()) {
						t.Errorf("the token is said to end at %s", got.Ends)
					}
					got.Ends = time.Time{}                  // it is the token's
					if err != nil || got != answer.Caller { // the answer's, not the token's
						t.Errorf("got %+v and %v", got, err)
					}
				}
				if len(asked) != tc.asked || asked[0] != token {
					t.Errorf("asked about %d tokens, want %d", len(asked), tc.asked)
				}
				_, err := verify(t, v, jwttest.Sign(t, "ed", "ed", jose.EdDSA, jwttest.Claims(jwttest.Set("aud", "x"))))
				jwttest.WantDenial(t, err, codes.Unauthenticated, csr.ReasonTokenAudience)
				if len(asked) != tc.asked {
					t.Error("asked about a token for somebody else")
				}
			})
		})
	}
}
