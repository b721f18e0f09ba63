package kube

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/json" // unlike encoding/json it tells "iss" from "ISS" and refuses duplicates
	"google.golang.org/grpc/codes"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/chancery-project/chancery/csr"
)

const (
	maxToken = 16 << 10
	// leeway is how far the API server's clock may be ahead of ours; expiry has none.
	leeway = 30 * time.Second
)

// algorithms are what a token may be signed with. Neither symmetric ones nor "none" are ever among them.
var algorithms = []jose.SignatureAlgorithm{
	jose.RS256, jose.RS384, jose.RS512, jose.PS256, jose.PS384, jose.PS512,
	jose.ES256, jose.ES384, jose.ES512, jose.EdDSA,
}

// verdict is what is known of a token whose signature verified, or that the API server vouched for. It is immutable.
type verdict struct {
	caller    csr.Caller // without ID, Method, Cluster and AttestedAt
	audiences []string
	expires   time.Time
	notBefore time.Time // the later of nbf and iat
	key       *key      // nil if the API server vouched
	until     time.Time // when this verdict ends
}

// verdict verifies a token, or finds that it did so a short while ago.
func (c *Cluster) verdict(ctx context.Context, token string, now time.Time) (*verdict, error) {
	if len(token) > maxToken {
		return nil, deny(codes.Unauthenticated, csr.ReasonTokenMalformed, "the token is %d bytes long; at most %d are allowed", len(token), maxToken)
	}
	if c.mode == Always {
		p, err := parseToken(token)
		if err != nil {
			return nil, err
		}
		return c.reviewed(ctx, "", p, now)
	}
	d := digest(sha256.Sum256([]byte(token)))
	if v := c.cache.get(&d, now); v != nil {
		c.metrics.hits.Inc()
		return v, nil
	}
	c.metrics.misses.Inc()
	p, err := parseToken(token)
	if err != nil {
		return nil, err
	}
	v, err := c.verify(ctx, &d, p, now)
	if err != nil {
		return nil, err
	}
	c.cache.put(&d, v)
	return v, nil
}

// verify checks a token's signature and claims with the cluster's keys, or where it may, by the API server.
func (c *Cluster) verify(ctx context.Context, d *digest, p *parsedToken, now time.Time) (*verdict, error) {
	k, err := c.findKey(ctx, p)
	if err != nil {
		if c.mode == Fallback {
			return c.reviewed(ctx, string(d[:]), p, now)
		}
		return nil, err
	}
	payload, err := p.jws.Verify(k.public)
	if err != nil {
		return nil, deny(codes.Unauthenticated, csr.ReasonTokenSignature, "the signature does not verify with key %.80q", k.id)
	}
	v, err := c.readClaims(payload)
	if err != nil {
		return nil, err
	}
	v.key = k
	v.until = earlier(v.expires, now.Add(maxCached))
	return v, nil
}

func (c *Cluster) findKey(ctx context.Context, p *parsedToken) (*key, error) {
	if p.jws == nil {
		return nil, deny(codes.Unauthenticated, csr.ReasonTokenKey, "no key has the token's algorithm %.40q", p.alg)
	}
	return c.keys.find(ctx, p.kid, p.alg)
}

// parsedToken is a token whose form is right. Nothing of it is verified.
type parsedToken struct {
	token   string
	kid     string
	alg     jose.SignatureAlgorithm
	jws     *jose.JSONWebSignature // nil if we do not know the algorithm
	payload []byte
}

// parseToken takes a compact JWS apart. It is strict about base64, so that a token has one form only.
func parseToken(token string) (*parsedToken, error) {
	malformed := func(why string) error {
		return deny(codes.Unauthenticated, csr.ReasonTokenMalformed, "the token is no compact JWS: %s", why)
	}
	parts := strings.SplitN(token, ".", 4)
	if len(parts) != 3 {
		return nil, malformed("it should have three parts, with dots between")
	}
	p := &parsedToken{token: token}
	for i, part := range parts {
		if strings.ContainsAny(part, "\r\n") { // which the decoder would skip
			return nil, malformed("a line break")
		}
		b, err := base64.RawURLEncoding.Strict().DecodeString(part)
		if err != nil {
			return nil, malformed("a part is not base64url")
		}
		if i == 1 {
			p.payload = b
		}
	}
	jws, err := jose.ParseSignedCompact(token, algorithms)
	if unknown := (*jose.ErrUnexpectedSignatureAlgorithm)(nil); errors.As(err, &unknown) {
		if p.alg = unknown.Got; p.alg == "" {
			return nil, malformed("no algorithm in its header")
		}
		if a := strings.ToUpper(string(p.alg)); a == "NONE" || strings.HasPrefix(a, "HS") {
			return nil, deny(codes.Unauthenticated, csr.ReasonTokenKey, "the token's algorithm %.40q is never accepted", p.alg)
		}
		return p, nil
	}
	if err != nil || len(jws.Signatures) != 1 {
		return nil, malformed("its header cannot be read") // the error may quote the header
	}
	h := jws.Signatures[0].Protected
	if _, ok := h.ExtraHeaders["crit"]; ok {
		return nil, malformed("its header has critical extensions")
	}
	p.jws, p.kid, p.alg = jws, h.KeyID, jose.SignatureAlgorithm(h.Algorithm)
	return p, nil
}

// wireClaims is a service-account token's payload. What we do not use is left out.
type wireClaims struct {
	Issuer     string      `json:"iss"`
	Subject    string      `json:"sub"`
	Audience   audience    `json:"aud"`
	ID         string      `json:"jti"`
	Expires    *float64    `json:"exp"`
	NotBefore  *float64    `json:"nbf"`
	IssuedAt   *float64    `json:"iat"`
	Kubernetes *kubeClaims `json:"kubernetes.io"`
}

type kubeClaims struct {
	Namespace      string  `json:"namespace"`
	ServiceAccount objRef  `json:"serviceaccount"`
	Pod            *objRef `json:"pod"`
	Node           *objRef `json:"node"`
}

type objRef struct {
	Name string `json:"name"`
	UID  string `json:"uid"`
}

// audience is the aud claim: a string or an array of strings (RFC 7519 section 4.1.3).
type audience []string

// UnmarshalJSON reads both forms.
func (a *audience) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		*a = []string{""}
		return json.Unmarshal(b, &(*a)[0])
	}
	return json.Unmarshal(b, (*[]string)(a))
}

// readClaims reads a payload and checks all that stays the same for as long as the token lives. Times and audience
// are for checkTimes.
func (c *Cluster) readClaims(payload []byte) (*verdict, error) {
	malformed := func(format string, args ...any) error {
		return deny(codes.Unauthenticated, csr.ReasonTokenMalformed, "the token's claims: "+format, args...)
	}
	var w wireClaims
	if err := json.Unmarshal(payload, &w); err != nil {
		return nil, malformed("they are no JSON object of the right types")
	}
	if w.Issuer != c.issuer {
		return nil, deny(codes.Unauthenticated, csr.ReasonTokenIssuer, "the token's issuer is %.200q; it should be %q", w.Issuer, c.issuer)
	}
	v := &verdict{audiences: w.Audience}
	var err error
	if v.expires, v.notBefore, err = w.times(); err != nil {
		return nil, malformed("%v", err)
	}
	if v.caller, err = w.caller(); err != nil {
		return nil, malformed("%v", err)
	}
	return v, nil
}

func (w *wireClaims) times() (expires, notBefore time.Time, err error) {
	if w.Expires == nil {
		return expires, notBefore, errors.New("exp is missing")
	}
	if expires, err = date("exp", *w.Expires); err != nil {
		return expires, notBefore, err
	}
	for name, t := range map[string]*float64{"nbf": w.NotBefore, "iat": w.IssuedAt} {
		if t == nil {
			continue
		}
		d, err := date(name, *t)
		if err != nil {
			return expires, notBefore, err
		}
		if d.After(notBefore) {
			notBefore = d
		}
	}
	return expires, notBefore, nil
}

// date reads a NumericDate (RFC 7519 section 2) within the years 1970 to 9999.
func date(name string, f float64) (time.Time, error) {
	if !(f >= 0 && f <= 253402300799) {
		return time.Time{}, fmt.Errorf("%s is out of range", name)
	}
	return time.Unix(int64(math.Floor(f)), 0), nil
}

// caller reads who the token is for. Subject and the Kubernetes claims must agree.
func (w *wireClaims) caller() (csr.Caller, error) {
	var c csr.Caller
	k := w.Kubernetes
	if k == nil {
		return c, errors.New("kubernetes.io is missing; it should be a bound service-account token")
	}
	ns, sa, err := splitUsername(w.Subject)
	if err != nil {
		return c, fmt.Errorf("sub: %w", err)
	}
	if ns != k.Namespace || sa != k.ServiceAccount.Name {
		return c, errors.New("sub and kubernetes.io name different service accounts")
	}
	c.Namespace, c.ServiceAccount = ns, sa
	if k.Pod != nil {
		c.PodName, c.PodUID = k.Pod.Name, k.Pod.UID
		if err := checkPodRef(k.Pod.Name, k.Pod.UID); err != nil {
			return c, fmt.Errorf("kubernetes.io pod: %w", err)
		}
	}
	if k.Node != nil {
		if c.Node = k.Node.Name; len(validation.IsDNS1123Subdomain(c.Node)) > 0 {
			return c, errors.New("kubernetes.io node: its name is no DNS-1123 subdomain")
		}
	}
	if w.ID != "" {
		c.CredentialID = "JTI=" + w.ID // as the API server writes it into its own audit log
		if len(w.ID) > 256 || !printable(w.ID) {
			return c, errors.New("jti should be at most 256 printable characters")
		}
	}
	return c, nil
}

// splitUsername takes a user name system:serviceaccount:NAMESPACE:NAME apart.
func splitUsername(s string) (namespace, account string, err error) {
	rest, ok := strings.CutPrefix(s, "system:serviceaccount:")
	namespace, account, ok2 := strings.Cut(rest, ":")
	if !ok || !ok2 {
		return "", "", fmt.Errorf("%.80q is no service account; it should be system:serviceaccount:NAMESPACE:NAME", s)
	}
	return namespace, account, checkAccount(namespace, account)
}

func checkPodRef(name, uid string) error {
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		return errors.New("its name is no DNS-1123 subdomain")
	}
	if uid == "" || len(uid) > 128 || !printable(uid) {
		return errors.New("its uid should be 1 to 128 printable characters")
	}
	return nil
}

// checkTimes checks audience and times, on every call.
func (c *Cluster) checkTimes(v *verdict, now time.Time) error {
	if !slices.ContainsFunc(v.audiences, func(a string) bool { return slices.Contains(c.audiences, a) }) {
		return deny(codes.Unauthenticated, csr.ReasonTokenAudience, "the token is for %.200q; one of %q is needed", v.audiences, c.audiences)
	}
	if !now.Before(v.expires) {
		return deny(codes.Unauthenticated, csr.ReasonTokenExpired, "the token expired at %s", v.expires.UTC().Format(time.RFC3339))
	}
	if now.Add(leeway).Before(v.notBefore) {
		return deny(codes.Unauthenticated, csr.ReasonTokenExpired, "the token is not valid before %s; is a clock wrong?", v.notBefore.UTC().Format(time.RFC3339))
	}
	return nil
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
