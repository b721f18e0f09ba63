package kube

import (
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr"
)

func TestAuthenticateAlgorithms(t *testing.T) {
	c := fileCluster(t, "rsa", "p256", "p384", "p521", "ed")
	for alg, key := range map[jose.SignatureAlgorithm]string{
		jose.RS256: "rsa", jose.RS384: "rsa", jose.RS512: "rsa", jose.PS256: "rsa", jose.PS384: "rsa", jose.PS512: "rsa",
		jose.ES256: "p256", jose.ES384: "p384", jose.ES512: "p521", jose.EdDSA: "ed",
	} {
		before := time.Now()
		got, err := c.Authenticate(t.Context(), sign(t, key, key, alg, claims()))
		if err != nil {
			t.Errorf("%s: %v", alg, err)
			continue
		}
		if got.AttestedAt.Before(before) {
			t.Errorf("%s: attested at %v, before the call", alg, got.AttestedAt)
		}
		got.AttestedAt = time.Time{}
		want := csr.Caller{
			Namespace: "foo", ServiceAccount: "web", PodName: "web-0", PodUID: "uid-0", Node: "node-1",
			CredentialID: "JTI=6c3b4d7e-0000-4000-8000-000000000001",
		}
		if got != want {
			t.Errorf("%s: got %+v, want %+v", alg, got, want)
		}
	}
}

func TestAuthenticateClaims(t *testing.T) {
	c := fileCluster(t, "rsa", "p256")
	now := time.Now().Unix()
	for name, tc := range map[string]struct {
		change func(object)
		reason string // empty: accepted
	}{
		"as it is":                     {func(object) {}, ""},
		"issuer with a slash":          {set("iss", testIssuer+"/"), csr.ReasonTokenIssuer},
		"issuer missing":               {unset("iss"), csr.ReasonTokenIssuer},
		"issuer in capitals":           {func(c object) { delete(c, "iss"); c["ISS"] = testIssuer }, csr.ReasonTokenIssuer},
		"audience as a string":         {set("aud", "chancery"), ""},
		"audience among others":        {set("aud", []string{"vault", "chancery"}), ""},
		"audience of somebody else":    {set("aud", []string{"vault"}), csr.ReasonTokenAudience},
		"audience that has ours in it": {set("aud", []string{"istio-ca2"}), csr.ReasonTokenAudience},
		"audience missing":             {unset("aud"), csr.ReasonTokenAudience},
		"audience null":                {set("aud", nil), csr.ReasonTokenAudience},
		"audience a number":            {set("aud", 7), csr.ReasonTokenMalformed},
		"expired":                      {set("exp", now-1), csr.ReasonTokenExpired},
		"no expiry":                    {unset("exp"), csr.ReasonTokenMalformed},
		"expiry null":                  {set("exp", nil), csr.ReasonTokenMalformed},
		"expiry a string":              {set("exp", "9999999999"), csr.ReasonTokenMalformed},
		"expiry beyond time":           {set("exp", 1e300), csr.ReasonTokenMalformed},
		"expiry negative":              {set("exp", -1), csr.ReasonTokenMalformed},
		"expiry with a fraction":       {set("exp", float64(now)+60.5), ""},
		"not yet, within leeway":       {set("nbf", now+20), ""},
		"not yet":                      {set("nbf", now+60), csr.ReasonTokenExpired},
		"issued in the future":         {set("iat", now+60), csr.ReasonTokenExpired},
		"no nbf and iat":               {func(c object) { delete(c, "nbf"); delete(c, "iat") }, ""},
		"no jti":                       {unset("jti"), ""},
		"jti with a line break":        {set("jti", "a\nb"), csr.ReasonTokenMalformed},
		"subject a user":               {set("sub", "admin"), csr.ReasonTokenMalformed},
		"subject too short":            {set("sub", "system:serviceaccount:foo"), csr.ReasonTokenMalformed},
		"subject too long":             {set("sub", "system:serviceaccount:foo:web:x"), csr.ReasonTokenMalformed},
		"subject of another account":   {set("sub", "system:serviceaccount:foo:root"), csr.ReasonTokenMalformed},
		"another namespace":            {setKube("namespace", "bar"), csr.ReasonTokenMalformed},
		"another account":              {setKube("serviceaccount", object{"name": "root"}), csr.ReasonTokenMalformed},
		"no kubernetes.io":             {unset("kubernetes.io"), csr.ReasonTokenMalformed},
		"account with dots":            {func(c object) { account(c, "foo", "web.v2") }, ""},
		"account with a slash":         {func(c object) { account(c, "foo", "web/x") }, csr.ReasonTokenMalformed},
		"namespace with a dot":         {func(c object) { account(c, "foo.bar", "web") }, csr.ReasonTokenMalformed},
		"namespace in capitals":        {func(c object) { account(c, "Foo", "web") }, csr.ReasonTokenMalformed},
		"namespace too long":           {func(c object) { account(c, strings.Repeat("a", 64), "web") }, csr.ReasonTokenMalformed},
		"no pod":                       {setKube("pod", nil), ""},
		"pod without UID":              {setKube("pod", object{"name": "web-0"}), csr.ReasonTokenMalformed},
		"pod without name":             {setKube("pod", object{"uid": "uid-0"}), csr.ReasonTokenMalformed},
		"no node":                      {setKube("node", nil), ""},
		"node without name":            {setKube("node", object{"uid": "x"}), csr.ReasonTokenMalformed},
		"node without UID":             {setKube("node", object{"name": "node-1"}), ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.Authenticate(t.Context(), sign(t, "p256", "p256", jose.ES256, claims(tc.change)))
			wantDenial(t, err, codes.Unauthenticated, tc.reason)
		})
	}
}

func account(c object, namespace, name string) {
	c["sub"] = "system:serviceaccount:" + namespace + ":" + name
	setKube("namespace", namespace)(c)
	setKube("serviceaccount", object{"name": name})(c)
}

func TestAuthenticateForm(t *testing.T) {
	c := fileCluster(t, "rsa", "p256")
	payload, _ := json.Marshal(claims())
	good := sign(t, "p256", "p256", jose.ES256, payload)
	parts := strings.Split(good, ".")
	b64 := base64.RawURLEncoding.EncodeToString
	header := func(h string) string { return b64([]byte(h)) + "." + parts[1] + "." + parts[2] }
	pub, _ := x509.MarshalPKIXPublicKey(testKeys()["rsa"].Public())
	jws, _ := jose.ParseSignedCompact(good, algorithms)
	own := jose.JSONWebKey{Key: testKeys()["rsa2"], KeyID: "p256"}
	embed, _ := jose.NewSigner(jose.SigningKey{Algorithm: jose.RS256, Key: testKeys()["rsa2"]}, &jose.SignerOptions{EmbedJWK: true})
	embedded, _ := embed.Sign(payload)
	embeddedToken, _ := embedded.CompactSerialize()
	critToken := b64([]byte(`{"alg":"ES256","kid":"p256","crit":["b64"],"b64":true}`)) + "." + parts[1] + "." + parts[2]
	for name, tc := range map[string]struct{ token, reason string }{
		"empty":                        {"", csr.ReasonTokenMalformed},
		"two parts":                    {parts[0] + "." + parts[1], csr.ReasonTokenMalformed},
		"four parts":                   {good + ".x", csr.ReasonTokenMalformed},
		"five parts, as of a JWE":      {"a.b.c.d.e", csr.ReasonTokenMalformed},
		"JSON serialization":           {jws.FullSerialize(), csr.ReasonTokenMalformed},
		"space before":                 {" " + good, csr.ReasonTokenMalformed},
		"line break behind":            {good + "\n", csr.ReasonTokenMalformed},
		"padding":                      {good + "=", csr.ReasonTokenMalformed},
		"too large":                    {good + strings.Repeat("A", maxToken), csr.ReasonTokenMalformed},
		"other bits behind the last":   {nonCanonical(good), csr.ReasonTokenMalformed},
		"header no JSON":               {header(`alg`), csr.ReasonTokenMalformed},
		"header without algorithm":     {header(`{"kid":"p256"}`), csr.ReasonTokenMalformed},
		"header with two algorithms":   {header(`{"alg":"ES256","alg":"ES256","kid":"p256"}`), csr.ReasonTokenMalformed},
		"critical extension":           {critToken, csr.ReasonTokenMalformed},
		"alg none":                     {header(`{"alg":"none","kid":"p256"}`), csr.ReasonTokenKey},
		"alg none without signature":   {b64([]byte(`{"alg":"none"}`)) + "." + parts[1] + ".", csr.ReasonTokenKey},
		"alg nOnE":                     {header(`{"alg":"nOnE","kid":"p256"}`), csr.ReasonTokenKey},
		"HS256 with the public key":    {signWith(t, jose.JSONWebKey{Key: pub, KeyID: "rsa"}, jose.HS256, payload), csr.ReasonTokenKey},
		"unknown algorithm":            {header(`{"alg":"ML-DSA-65","kid":"p256"}`), csr.ReasonTokenKey},
		"algorithm of another key":     {header(`{"alg":"RS256","kid":"p256"}`), csr.ReasonTokenKey},
		"curve of another key":         {header(`{"alg":"ES384","kid":"p256"}`), csr.ReasonTokenKey},
		"unknown key":                  {sign(t, "p256", "p257", jose.ES256, payload), csr.ReasonTokenKey},
		"no key ID, one key fits":      {sign(t, "p256", "", jose.ES256, payload), ""},
		"another cluster's key":        {signWith(t, jose.JSONWebKey{Key: testKeys()["rsa2"], KeyID: "rsa"}, jose.RS256, payload), csr.ReasonTokenSignature},
		"a key that it brings along":   {signWith(t, own, jose.RS256, payload), csr.ReasonTokenKey},
		"a key in its header":          {embeddedToken, csr.ReasonTokenSignature},
		"tampered payload":             {parts[0] + "." + b64([]byte(strings.Replace(string(payload), ":web", ":root", 1))) + "." + parts[2], csr.ReasonTokenSignature},
		"no signature":                 {parts[0] + "." + parts[1] + ".", csr.ReasonTokenSignature},
		"payload no object":            {sign(t, "p256", "p256", jose.ES256, []byte(`[]`)), csr.ReasonTokenMalformed},
		"payload null":                 {sign(t, "p256", "p256", jose.ES256, []byte(`null`)), csr.ReasonTokenIssuer},
		"payload with two subjects":    {sign(t, "p256", "p256", jose.ES256, append([]byte(`{"sub":"system:serviceaccount:foo:root",`), payload[1:]...)), csr.ReasonTokenMalformed},
		"payload with something extra": {sign(t, "p256", "p256", jose.ES256, append(payload[:len(payload):len(payload)], " {}"...)), csr.ReasonTokenMalformed},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.Authenticate(t.Context(), tc.token)
			wantDenial(t, err, codes.Unauthenticated, tc.reason)
			if err != nil && len(tc.token) > 20 && strings.Contains(err.Error(), tc.token[len(tc.token)-20:]) {
				t.Errorf("the denial quotes the token: %v", err)
			}
		})
	}
}

// nonCanonical changes the token's last bits, which its signature does not need.
func nonCanonical(token string) string {
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := strings.IndexByte(digits, token[len(token)-1])
	return token[:len(token)-1] + string(digits[last^1])
}

func TestAuthenticateWithoutKeyIDNeedsOneKey(t *testing.T) {
	c := fileCluster(t, "rsa", "rsa2", "p256")
	_, err := c.Authenticate(t.Context(), sign(t, "rsa", "", jose.RS256, claims()))
	wantDenial(t, err, codes.Unauthenticated, csr.ReasonTokenKey)
}

func TestD18CacheEndsWithTheToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fileCluster(t, "p256")
		token := sign(t, "p256", "p256", jose.ES256, claims(set("exp", time.Now().Unix()+90)))
		for _, step := range []struct {
			wait         time.Duration
			hits, misses float64
			reason       string
		}{
			{0, 0, 1, ""},
			{59 * time.Second, 1, 1, ""},
			{1 * time.Second, 1, 2, ""}, // 60 s are over
			{29 * time.Second, 2, 2, ""},
			{1 * time.Second, 2, 3, csr.ReasonTokenExpired},
		} {
			time.Sleep(step.wait)
			_, err := c.Authenticate(t.Context(), token)
			wantDenial(t, err, codes.Unauthenticated, step.reason)
			if h, m := value(t, c.metrics.hits), value(t, c.metrics.misses); h != step.hits || m != step.misses {
				t.Errorf("%v hits and %v misses, want %v and %v", h, m, step.hits, step.misses)
			}
		}
	})
}

func TestD18CachedTokenIsStillCheckedForAudience(t *testing.T) {
	c := fileCluster(t, "p256")
	token := sign(t, "p256", "p256", jose.ES256, claims(set("aud", "vault")))
	for range 2 {
		_, err := c.Authenticate(t.Context(), token)
		wantDenial(t, err, codes.Unauthenticated, csr.ReasonTokenAudience)
	}
	if value(t, c.metrics.hits) != 1 {
		t.Error("the second call did not come from the cache")
	}
}

func TestD18BadTokensAreNotCached(t *testing.T) {
	c := fileCluster(t, "p256")
	token := signWith(t, jose.JSONWebKey{Key: testKeys()["rsa2"], KeyID: "p256"}, jose.RS256, []byte("{}"))
	for range 3 {
		c.Authenticate(t.Context(), token)
	}
	if n := len(c.cache.m); n != 0 {
		t.Errorf("%d verdicts in the cache", n)
	}
}

func TestD18CacheIsBounded(t *testing.T) {
	now := time.Now()
	c := newVerdicts(100)
	for i := range 1000 {
		c.put(&digest{byte(i), byte(i >> 8)}, &verdict{until: now.Add(time.Minute)})
	}
	if len(c.m) != 100 {
		t.Errorf("%d entries, want 100", len(c.m))
	}
}

func TestCacheIsSwept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fileCluster(t, "p256")
		run(t, c)
		c.Authenticate(t.Context(), sign(t, "p256", "p256", jose.ES256, claims()))
		time.Sleep(3 * maxCached)
		c.cache.mu.Lock()
		defer c.cache.mu.Unlock()
		if len(c.cache.m) != 0 {
			t.Errorf("%d verdicts are left", len(c.cache.m))
		}
	})
}

func BenchmarkAuthenticate(b *testing.B) {
	run := func(name string, c *Cluster, token string, uncached bool) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if uncached {
					clear(c.cache.m)
				}
				if _, err := c.Authenticate(b.Context(), token); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	c := fileCluster(b, "rsa", "p256")
	rs, es := sign(b, "rsa", "rsa", jose.RS256, claims()), sign(b, "p256", "p256", jose.ES256, claims())
	run("cached", c, rs, false)
	run("RS256", c, rs, true)
	run("ES256", c, es, true)

	s := newAPIServer(b)
	s.put(testPod())
	withPods := newCluster(b, Config{JWKSFile: writeFile(b, jwks(b, "rsa"))})
	withPods.pods = newPodWatch("Kubernetes", nil, withPods.log)
	withPods.pods.current = &openedWatch{}
	withPods.pods.Replace([]any{testPod()}, "1")
	withPods.pods.heard = time.Now().Add(time.Hour)
	run("cached, pod watched", withPods, rs, false)
	b.Run("cached, pod watched, parallel", func(b *testing.B) {
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				withPods.Authenticate(b.Context(), rs)
			}
		})
	})
}
