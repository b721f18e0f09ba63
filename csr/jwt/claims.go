package jwt

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4/json" // unlike encoding/json it tells "iss" from "ISS" and refuses duplicates
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/chancery-project/chancery/csr"
)

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
func (v *Verifier) readClaims(payload []byte) (*verdict, error) {
	malformed := func(format string, args ...any) error {
		return refuse(csr.ReasonTokenMalformed, "the token's claims: "+format, args...)
	}
	var w wireClaims
	if err := json.Unmarshal(payload, &w); err != nil {
		return nil, malformed("they are no JSON object of the right types")
	}
	if w.Issuer != v.issuer {
		return nil, refuse(csr.ReasonTokenIssuer, "the token's issuer is %.200q; it should be %q", w.Issuer, v.issuer)
	}
	t := &verdict{audiences: w.Audience}
	var err error
	if t.expires, t.notBefore, err = w.times(); err != nil {
		return nil, malformed("%v", err)
	}
	if t.caller, err = w.caller(); err != nil {
		return nil, malformed("%v", err)
	}
	return t, nil
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

// caller reads who the token is for. The subject says it; the Kubernetes claims, as far as they are there, must agree.
// Issuers that only look like Kubernetes may leave them out: such a token is bound to no pod.
func (w *wireClaims) caller() (csr.Caller, error) {
	var c csr.Caller
	ns, sa, err := ParseUser(w.Subject)
	if err != nil {
		return c, fmt.Errorf("sub: %w", err)
	}
	k := w.Kubernetes
	if k == nil {
		k = new(kubeClaims)
	}
	if k.Namespace != "" && k.Namespace != ns || k.ServiceAccount.Name != "" && k.ServiceAccount.Name != sa {
		return c, errors.New("sub and kubernetes.io name different service accounts")
	}
	c.Namespace, c.ServiceAccount = ns, sa
	if k.Pod != nil {
		c.PodName, c.PodUID = k.Pod.Name, k.Pod.UID
		if err := CheckPod(k.Pod.Name, k.Pod.UID); err != nil {
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

// ParseUser takes a user name system:serviceaccount:NAMESPACE:NAME apart and checks both parts.
func ParseUser(s string) (namespace, account string, err error) {
	rest, ok := strings.CutPrefix(s, "system:serviceaccount:")
	namespace, account, ok2 := strings.Cut(rest, ":")
	if !ok || !ok2 {
		return "", "", fmt.Errorf("%.80q is no service account; it should be system:serviceaccount:NAMESPACE:NAME", s)
	}
	return namespace, account, CheckAccount(namespace, account)
}

// CheckAccount checks the names of a namespace and a service account as the API server does.
func CheckAccount(namespace, account string) error {
	if len(validation.IsDNS1123Label(namespace)) > 0 {
		return fmt.Errorf("namespace %.80q is no DNS-1123 label", namespace)
	}
	if len(validation.IsDNS1123Subdomain(account)) > 0 {
		return fmt.Errorf("service account %.80q is no DNS-1123 subdomain", account)
	}
	return nil
}

// CheckPod checks what a token, or an answer about it, says of its pod.
func CheckPod(name, uid string) error {
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		return errors.New("its name is no DNS-1123 subdomain")
	}
	if uid == "" || len(uid) > 128 || !printable(uid) {
		return errors.New("its uid should be 1 to 128 printable characters")
	}
	return nil
}

// printable reports whether s has only visible ASCII characters, so that it can go into a log as it is.
func printable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}
