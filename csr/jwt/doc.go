// Package jwt owns the verification of Kubernetes service-account tokens: keys, signatures, claims, and the cache of
// verdicts. A [Verifier] knows one issuer's key set and tells whom a token is for.
//
//	tokens, err := jwt.New(jwt.Config{
//		Issuer:    "https://kubernetes.default.svc",
//		Audiences: []string{"istio-ca"},
//		Keys:      func(context.Context) (io.ReadCloser, error) { return os.Open("jwks.json") },
//		Poll:      2 * time.Second,
//	})
//	go tokens.Run(ctx)
//	caller, err := tokens.Verify(ctx, token, time.Now())
//
// A token is a compact JWS of at most 16 KiB. Its key is chosen by its key ID among the issuer's keys, never by what
// the token says of its issuer. Issuer and one of our audiences must match exactly; expiry is required and exact; "not
// before" and "issued at" may lie 30 s ahead of our clock. That a signature verified may be cached for at most 60 s
// and no longer than the key is in the set; times and audience are checked on every call (decision D18).
//
// The package refuses symmetric algorithms and "none", tokens of the legacy kind that never expire, private keys in a
// key set, and keys that a token brings along. It does not know what became of a token's pod, and it needs no client of
// an API server: how keys are fetched, and who else may vouch for a token, are functions of its configuration.
//
// Whoever can answer these functions can be anybody that the issuer could name.
package jwt
