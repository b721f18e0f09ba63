package kube

import (
	"context"
	"errors"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/jwt/jwttest"
)

// What csr/jwt has: between loads that unknown key IDs cause, and for a load.
const (
	minReload     = 10 * time.Second
	reloadTimeout = 10 * time.Second
)

func TestKeyFileIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := jwttest.File(t, jwttest.KeySet(t, "p256"))
		c := newCluster(t, Config{JWKSFile: file})
		run(t, c)
		try := func(key string, alg jose.SignatureAlgorithm, code codes.Code, reason string) {
			t.Helper()
			time.Sleep(minReload) // so that each step could load anew
			_, err := c.Authenticate(t.Context(), jwttest.Sign(t, key, key, alg, jwttest.Claims()))
			jwttest.WantDenial(t, err, code, reason)
		}
		write := func(data []byte) {
			t.Helper()
			if err := os.WriteFile(file, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		try("p256", jose.ES256, 0, "")
		try("rsa", jose.RS256, codes.Unauthenticated, csr.ReasonTokenKey)
		write(jwttest.KeySet(t, "rsa"))
		try("rsa", jose.RS256, 0, "")
		try("p256", jose.ES256, codes.Unauthenticated, csr.ReasonTokenKey)
		write([]byte(`{"keys":[`)) // half written
		try("rsa", jose.RS256, 0, "")
		try("p256", jose.ES256, codes.Unavailable, csr.ReasonNotReady) // it may be in what we cannot read
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		try("rsa", jose.RS256, 0, "")
		if err := c.Ready(); err != nil {
			t.Errorf("the last good keys are in force, but: %v", err)
		}
	})
}

func TestKeysAreRefreshed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		s.down = true
		c := newCluster(t, Config{Client: s.client(t)})
		run(t, c)
		time.Sleep(time.Minute)
		if n := s.count("jwks"); n < 6 || n > 8 {
			t.Errorf("%d attempts in the first minute without an API server, want one each 8 to 10 s", n)
		}
		s.with(func() { s.down = false })
		time.Sleep(minReload)
		before := s.count("jwks")
		time.Sleep(time.Hour)
		if n := s.count("jwks") - before; n < 12 || n > 15 {
			t.Errorf("%d loads in an hour, want one each 4 to 5 min", n)
		}
	})
}

func TestHungAPIServerDoesNotHoldCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		s.hang = true
		c := newCluster(t, Config{Client: s.client(t)})
		t.Cleanup(settle)
		start := time.Now()
		_, err := c.Authenticate(t.Context(), jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims()))
		jwttest.WantDenial(t, err, codes.Unavailable, csr.ReasonNotReady)
		if took := time.Since(start); took > reloadTimeout {
			t.Errorf("it took %v", took)
		}
		time.Sleep(minReload)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start = time.Now()
		_, err = c.Authenticate(ctx, jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims()))
		jwttest.WantDenial(t, err, codes.Unavailable, csr.ReasonNotReady)
		if took := time.Since(start); took > time.Second || !errors.Is(ctx.Err(), context.DeadlineExceeded) {
			t.Errorf("it took %v, beyond the caller's deadline", took)
		}
	})
}
