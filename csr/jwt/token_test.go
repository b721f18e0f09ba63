package jwt

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
	"github.com/chancery-project/chancery/csr/jwt/jwttest"
)

func TestVerifyAlgorithms(t *testing.T) {
	c := fileVerifier(t, "rsa", "p256", "p384", "p521", "ed")
	for alg, key := range map[jose.SignatureAlgorithm]string{
		jose.RS256: "rsa", jose.RS384: "rsa", jose.RS512: "rsa", jose.PS256: "rsa", jose.PS384: "rsa", jose.PS512: "rsa",
		jose.ES256: "p256", jose.ES384: "p384", jose.ES512: "p521", jose.EdDSA: "ed",
	} {
		got, err := verify(t, c, jwttest.Sign(t, key, key, alg, jwttest.Claims()))
		if err != nil {
			t.Errorf("%s: %v", alg, err)
			continue
		}
		if got.Ends.Before(time.Now()) {
			t.Errorf("%s: the token is said to end at %s", alg, got.Ends)
		}
		got.Ends = time.Time{}
		want := csr.Caller{
			Namespace: "foo", ServiceAccount: "web", PodName: "web-0", PodUID: "uid-0", Node: "node-1",
			CredentialID: "JTI=6c3b4d7e-0000-4000-8000-000000000001",
		}
		if got != want {
			t.Errorf("%s: got %+v, want %+v", alg, got, want)
		}
	}
}

func TestVerifyClaims(t *testing.T) {
	c := fileVerifier(t, "rsa", "p256")
	now := time.Now().Unix()
	for name, tc := range map[string]struct {
		change func(jwttest.Object)
		reason string // empty: accepted
	}{
		"as it is":                     {func(jwttest.Object) {}, ""},
		"issuer with a slash":          {jwttest.Set("iss", jwttest.Issuer+"/"), csr.ReasonTokenIssuer},
		"issuer missing":               {jwttest.Unset("iss"), csr.ReasonTokenIssuer},
		"issuer in capitals":           {func(c jwttest.Object) { delete(c, "iss"); c["ISS"] = jwttest.Issuer }, csr.ReasonTokenIssuer},
		"audience as a string":         {jwttest.Set("aud", "chancery"), ""},
		"audience among others":        {jwttest.Set("aud", []string{"vault", "chancery"}), ""},
		"audience of somebody else":    {jwttest.Set("aud", []string{"vault"}), csr.ReasonTokenAudience},
		"audience that has ours in it": {jwttest.Set("aud", []string{"istio-ca2"}), csr.ReasonTokenAudience},
		"audience missing":             {jwttest.Unset("aud"), csr.ReasonTokenAudience},
		"audience null":                {jwttest.Set("aud", nil), csr.ReasonTokenAudience},
		"audience a number":            {jwttest.Set("aud", 7), csr.ReasonTokenMalformed},
		"expired":                      {jwttest.Set("exp", now-1), csr.ReasonTokenExpired},
		"no expiry":                    {jwttest.Unset("exp"), csr.ReasonTokenMalformed},
		"expiry null":                  {jwttest.Set("exp", nil), csr.ReasonTokenMalformed},
		"expiry a string":              {jwttest.Set("exp", "9999999999"), csr.ReasonTokenMalformed},
		"expiry beyond time":           {jwttest.Set("exp", 1e300), csr.ReasonTokenMalformed},
		"expiry negative":              {jwttest.Set("exp", -1), csr.ReasonTokenMalformed},
		"expiry with a fraction":       {jwttest.Set("exp", float64(now)+60.5), ""},
		"not yet, within leeway":       {jwttest.Set("nbf", now+20), ""},
		"not yet":                      {jwttest.Set("nbf", now+60), csr.ReasonTokenExpired},
		"issued in the future":         {jwttest.Set("iat", now+60), csr.ReasonTokenExpired},
		"no nbf and iat":               {func(c jwttest.Object) { delete(c, "nbf"); delete(c, "iat") }, ""},
		"no jti":                       {jwttest.Unset("jti"), ""},
		"jti with a line break":        {jwttest.Set("jti", "a\nb"), csr.ReasonTokenMalformed},
		"subject a user":               {jwttest.Set("sub", "admin"), csr.ReasonTokenMalformed},
		"subject too short":            {jwttest.Set("sub", "system:serviceaccount:foo"), csr.ReasonTokenMalformed},
		"subject too long":             {jwttest.Set("sub", "system:serviceaccount:foo:web:x"), csr.ReasonTokenMalformed},
		"subject of another account":   {jwttest.Set("sub", "system:serviceaccount:foo:root"), csr.ReasonTokenMalformed},
		"another namespace":            {jwttest.SetKube("namespace", "bar"), csr.ReasonTokenMalformed},
		"another account":              {jwttest.SetKube("serviceaccount", jwttest.Object{"name": "root"}), csr.ReasonTokenMalformed},
		"no kubernetes.io":             {jwttest.Unset("kubernetes.io"), ""},
		"kubernetes.io empty":          {jwttest.Set("kubernetes.io", jwttest.Object{}), ""},
		"account with dots":            {func(c jwttest.Object) { account(c, "foo", "web.v2") }, ""},
		"account with a slash":         {func(c jwttest.Object) { account(c, "foo", "web/x") }, csr.ReasonTokenMalformed},
		"namespace with a dot":         {func(c jwttest.Object) { account(c, "foo.bar", "web") }, csr.ReasonTokenMalformed},
		"namespace in capitals":        {func(c jwttest.Object) { account(c, "Foo", "web") }, csr.ReasonTokenMalformed},
		"namespace too long":           {func(c jwttest.Object) { account(c, strings.Repeat("a", 64), "web") }, csr.ReasonTokenMalformed},
		"no pod":                       {jwttest.SetKube("pod", nil), ""},
		"pod without UID":              {jwttest.SetKube("pod", jwttest.Object{"name": "web-0"}), csr.ReasonTokenMalformed},
		"pod without name":             {jwttest.SetKube("pod", jwttest.Object{"uid": "uid-0"}), csr.ReasonTokenMalformed},
		"no node":                      {jwttest.SetKube("node", nil), ""},
		"node without name":            {jwttest.SetKube("node", jwttest.Object{"uid": "x"}), csr.ReasonTokenMalformed},
		"node without UID":             {jwttest.SetKube("node", jwttest.Object{"name": "node-1"}), ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := verify(t, c, jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims(tc.change)))
			jwttest.WantDenial(t, err, codes.Unauthenticated, tc.reason)
		})
	}
}

func account(c jwttest.Object, namespace, name string) {
	c["sub"] = "system:serviceaccount:" + namespace + ":" + name
	jwttest.SetKube("namespace", namespace)(c)
	jwttest.SetKube("serviceaccount", jwttest.Object{"name": name})(c)
}

func TestVerifyForm(t *testing.T) {
	c := fileVerifier(t, "rsa", "p256")
	payload, _ := json.Marshal(jwttest.Claims())
	good := jwttest.Sign(t, "p256", "p256", jose.ES256, payload)
	parts := strings.Split(good, ".")
	b64 := base64.RawURLEncoding.EncodeToString
	header := func(h string) string { return b64([]byte(h)) + "." + parts[1] + "." + parts[2] }
	pub, _ := x509.MarshalPKIXPublicKey(jwttest.Keys()["rsa"].Public())
	jws, _ := jose.ParseSignedCompact(good, algorithms)
	own := jose.JSONWebKey{Key: jwttest.Keys()["rsa2"], KeyID: "p256"}
	embed, _ := jose.NewSigner(jose.SigningKey{Algorithm: jose.RS256, Key: jwttest.Keys()["rsa2"]}, &jose.SignerOptions{EmbedJWK: true})
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
		"HS256 with the public key":    {jwttest.SignWith(t, jose.JSONWebKey{Key: pub, KeyID: "rsa"}, jose.HS256, payload), csr.ReasonTokenKey},
		"unknown algorithm":            {header(`{"alg":"ML-DSA-65","kid":"p256"}`), csr.ReasonTokenKey},
		"algorithm of another key":     {header(`{"alg":"RS256","kid":"p256"}`), csr.ReasonTokenKey},
		"curve of another key":         {header(`{"alg":"ES384","kid":"p256"}`), csr.ReasonTokenKey},
		"unknown key":                  {jwttest.Sign(t, "p256", "p257", jose.ES256, payload), csr.ReasonTokenKey},
		"no key ID, one key fits":      {jwttest.Sign(t, "p256", "", jose.ES256, payload), ""},
		"another cluster's key":        {jwttest.SignWith(t, jose.JSONWebKey{Key: jwttest.Keys()["rsa2"], KeyID: "rsa"}, jose.RS256, payload), csr.ReasonTokenSignature},
		"a key that it brings along":   {jwttest.SignWith(t, own, jose.RS256, payload), csr.ReasonTokenKey},
		"a key in its header":          {embeddedToken, csr.ReasonTokenSignature},
		"tampered payload":             {parts[0] + "." + b64([]byte(strings.Replace(string(payload), ":web", ":root", 1))) + "." + parts[2], csr.ReasonTokenSignature},
		"no signature":                 {parts[0] + "." + parts[1] + ".", csr.ReasonTokenSignature},
		"payload no object":            {jwttest.Sign(t, "p256", "p256", jose.ES256, []byte(`[]`)), csr.ReasonTokenMalformed},
		"payload null":                 {jwttest.Sign(t, "p256", "p256", jose.ES256, []byte(`null`)), csr.ReasonTokenIssuer},
		"payload with two subjects":    {jwttest.Sign(t, "p256", "p256", jose.ES256, append([]byte(`{"sub":"system:serviceaccount:foo:root",`), payload[1:]...)), csr.ReasonTokenMalformed},
		"payload with something extra": {jwttest.Sign(t, "p256", "p256", jose.ES256, append(payload[:len(payload):len(payload)], " {}"...)), csr.ReasonTokenMalformed},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := verify(t, c, tc.token)
			jwttest.WantDenial(t, err, codes.Unauthenticated, tc.reason)
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

func TestVerifyWithoutKeyIDNeedsOneKey(t *testing.T) {
	c := fileVerifier(t, "rsa", "rsa2", "p256")
	_, err := verify(t, c, jwttest.Sign(t, "rsa", "", jose.RS256, jwttest.Claims()))
	jwttest.WantDenial(t, err, codes.Unauthenticated, csr.ReasonTokenKey)
}

func TestD18CacheEndsWithTheToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fileVerifier(t, "p256")
		token := jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims(jwttest.Set("exp", time.Now().Unix()+90)))
		for _, step := range []struct {
			wait         time.Duration
			hits, misses uint64
			reason       string
		}{
			{0, 0, 1, ""},
			{59 * time.Second, 1, 1, ""},
			{1 * time.Second, 1, 2, ""}, // 60 s are over
			{29 * time.Second, 2, 2, ""},
			{1 * time.Second, 2, 3, csr.ReasonTokenExpired},
		} {
			time.Sleep(step.wait)
			_, err := verify(t, c, token)
			jwttest.WantDenial(t, err, codes.Unauthenticated, step.reason)
			if got := c.Stats(); got.Hits != step.hits || got.Misses != step.misses {
				t.Errorf("%d hits and %d misses, want %d and %d", got.Hits, got.Misses, step.hits, step.misses)
			}
		}
	})
}

func TestD18CachedTokenIsStillCheckedForAudience(t *testing.T) {
	c := fileVerifier(t, "p256")
	token := jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims(jwttest.Set("aud", "vault")))
	for range 2 {
		_, err := verify(t, c, token)
		jwttest.WantDenial(t, err, codes.Unauthenticated, csr.ReasonTokenAudience)
	}
	if c.Stats().Hits != 1 {
		t.Error("the second call did not come from the cache")
	}
}

func TestD18BadTokensAreNotCached(t *testing.T) {
	c := fileVerifier(t, "p256")
	token := jwttest.SignWith(t, jose.JSONWebKey{Key: jwttest.Keys()["rsa2"], KeyID: "p256"}, jose.RS256, []byte("{}"))
	for range 3 {
		verify(t, c, token)
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
		c := fileVerifier(t, "p256")
		run(t, c)
		verify(t, c, jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims()))
		time.Sleep(3 * maxCached)
		c.cache.mu.Lock()
		defer c.cache.mu.Unlock()
		if len(c.cache.m) != 0 {
			t.Errorf("%d verdicts are left", len(c.cache.m))
		}
	})
}

func BenchmarkVerify(b *testing.B) {
	c := fileVerifier(b, "rsa", "p256")
	rs := jwttest.Sign(b, "rsa", "rsa", jose.RS256, jwttest.Claims())
	es := jwttest.Sign(b, "p256", "p256", jose.ES256, jwttest.Claims())
	for _, bench := range []struct {
		name, token string
		cached      bool
	}{{"cached", rs, true}, {"RS256", rs, false}, {"ES256", es, false}} {
		b.Run(bench.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if !bench.cached {
					clear(c.cache.m)
				}
				if _, err := verify(b, c, bench.token); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
